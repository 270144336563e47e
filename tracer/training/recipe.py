"""The recipe of a continued pre-training: a YAML file, checked whole before anything is opened."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

from transformers import TrainingArguments

from tracer.ablations import ablation_kinds
from tracer.errors import InputError, one_of
from tracer.evaluation.asking import AskedSuite
from tracer.models.cache import one_line
from tracer.models.loading import DTYPES
from tracer.recipes import built, check_keys, mapping, named, read_yaml, typed
from tracer.text_sources import TextSource

Packing = Literal["packed", "isolated", "none"]

PACKINGS: Mapping[str, str] = {
    "packed": "documents follow each other, an end-of-text token between them; a window sees the documents before",
    "isolated": "the same windows, but a document does not see those before it: where the architecture can",
    "none": "every document in windows of its own, the last one padded",
}

OURS: Mapping[str, Any] = {
    "eval_strategy": "steps",
    "eval_steps": 100,
    "eval_on_start": True,
    "logging_steps": 10,
    "save_steps": 100,
    "save_total_limit": 2,
    "report_to": "none",
}
"""Defaults that differ from those of `TrainingArguments`; a recipe may set them."""

FIXED: Mapping[str, Any] = {
    "remove_unused_columns": False,
    "logging_nan_inf_filter": False,
    "include_num_input_tokens_seen": "all",
    "ddp_find_unused_parameters": False,
    "prediction_loss_only": False,
}
"""What the training relies on, and a recipe may not set otherwise: a NaN is not to be hidden, and a parameter without
a gradient is not to be searched for but refused."""

REFUSED: Mapping[str, str] = {
    "resume_from_checkpoint": "pass --resume",
    "deepspeed": "pass fsdp: true",
    "label_smoothing_factor": "the losses would be no perplexities",
    "use_cache": "nobody reads it, and with it transformers does not keep isolated documents apart",
    "hub_token": "it would be written into the output; log in with hf auth login",
    "push_to_hub_token": "it would be written into the output; log in with hf auth login",
    "load_best_model_at_end": "the model that is measured and the one that is saved would differ",
    "metric_for_best_model": "the checkpoint that is kept is the last one whose loss was near its best",
    "save_only_model": "a training could not go on from such a checkpoint",
    "batch_eval_metrics": "losses are summed over all windows",
    "eval_do_concat_batches": "losses are summed over all windows",
    "use_liger_kernel": "it gives no logits, which texts are measured by",
    "bf16_full_eval": "it changes the weights that are saved",
    "fp16_full_eval": "it changes the weights that are saved",
    "do_train": "it always trains",
    "do_eval": "name texts under evaluate",
    "do_predict": "use tracer eval",
    "auto_find_batch_size": "it changes the batch that the recipe says",
}

UNBOUND = frozenset(
    {"output_dir", "disable_tqdm", "dataloader_num_workers", "dataloader_pin_memory", "run_name", "project"}
)
"""Settings that a resumed training may change, beside those of logging and of what is kept."""
_UNBOUND_PREFIXES = ("logging_", "log_", "report_to", "save_", "hub_", "push_", "trackio_")


@dataclass(frozen=True)
class Retrace:
    """How the model is traced while it is trained.

    Attributes:
        every: steps between two traces; one is also made before the first step and one after the last.
        probes: as in `tracer.trace`; None for the default of the model.
        limit: only the first so many probes of each group.
        ablations: as in `tracer.trace`.
    """

    every: int
    probes: str | None = None
    limit: int | None = None
    ablations: str = "zero"

    def __post_init__(self) -> None:
        if self.every < 1:
            raise InputError(f"every {self.every}: pass at least 1 step")
        if "swap_weights" in ablation_kinds(self.ablations):
            raise InputError("ablations swap_weights: compare the two models with tracer drift instead")
        if self.limit is not None and self.limit < 1:
            raise InputError(f"limit {self.limit}: pass at least 1")


@dataclass(frozen=True)
class Ask:
    """What the model is asked while it is trained.

    Attributes:
        every: steps between two times; it is also asked before the first step and after the last one.
        suites: probe sets and texts, by name.
    """

    every: int
    suites: Mapping[str, AskedSuite]

    def __post_init__(self) -> None:
        if self.every < 1:
            raise InputError(f"every {self.every}: pass at least 1 step")
        if not self.suites:
            raise InputError("suites are empty: name what is asked, or leave ask out")


@dataclass(frozen=True)
class Recipe:
    """A continued pre-training.

    Attributes:
        model: what `tracer.load` takes by name: a Hugging Face id, folder, GGUF file, or name of catalogue or zoo.
        plan: file of `tracer plan`; or the arguments of `tracer.plan` as a mapping, whose `run` is the folder of a
            trace and may be left out for rules that need none.
        text: what is trained on, by name.
        arguments: `TrainingArguments` by their own names.
        evaluate: what else is measured, by name; documents held out of `text` are measured under that text's name.
        dtype: of the weights. float32, with `bf16: true` for mixed precision, unless memory is short: in bfloat16 the
            small steps of a late training round to nothing.
        revision: branch, tag or commit of a Hugging Face id.
        trust_remote_code: run model code that comes with the checkpoint.
        block_size: tokens of a window.
        packing: `packed`, `isolated` or `none`; see `PACKINGS`.
        retrace: how the model is traced meanwhile; None for not at all.
        ask: what the model is asked meanwhile; None for nothing.
        max_loss_rise: nats by which the training loss may rise above its best before the training stops as diverging.
    """

    model: str
    plan: str | Mapping[str, Any]
    text: Mapping[str, TextSource]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    evaluate: Mapping[str, TextSource] = field(default_factory=dict)
    dtype: str = "float32"
    revision: str | None = None
    trust_remote_code: bool = False
    block_size: int = 1024
    packing: str = "packed"
    retrace: Retrace | None = None
    ask: Ask | None = None
    max_loss_rise: float = 2.0

    def __post_init__(self) -> None:
        one_of("packing", self.packing, PACKINGS)
        if one_of("dtype", self.dtype, DTYPES) == "float16":
            raise InputError("dtype 'float16': gradients leave its range; pass float32 with fp16: true, or bfloat16")
        if self.block_size < 2:
            raise InputError(f"block_size {self.block_size}: pass at least 2 tokens, one to predict another from")
        if not self.max_loss_rise > 0:
            raise InputError(f"max_loss_rise {self.max_loss_rise}: pass a number above 0")
        if not self.text:
            raise InputError("the recipe names no text to train on: give text: a name and a path")
        twice = [name for name, source in self.text.items() if source.held_out and name in self.evaluate]
        if twice:
            raise InputError(f"{twice[0]!r} is held out of text and named under evaluate: give one another name")
        if not self.arguments.get("output_dir"):
            raise InputError("the recipe names no output_dir: say where the model goes")
        streamed = [name for name, source in self.text.items() if source.streaming]
        if streamed and not self.arguments.get("max_steps", -1) > 0:
            raise InputError(f"text {streamed[0]!r} is streamed, so that its length is not known: pass max_steps")

    @property
    def output_dir(self) -> Path:
        """Where the model and all about its training go."""
        return Path(self.arguments["output_dir"]).expanduser()

    @property
    def seed(self) -> int:
        """The seed of everything that is drawn."""
        return int(self.arguments.get("seed", 42))

    def training_arguments(self, *, progress: bool, **more: Any) -> TrainingArguments:
        """The Trainer's own settings.

        Args:
            progress: whether it may draw progress bars.
            more: settings that follow from the model, activation checkpointing among them.

        Raises:
            InputError: they contradict each other, or the machine.
        """
        own = {
            key: deepcopy(value)  # the Trainer fills in what a mapping leaves out
            for key, value in self.arguments.items()
            if not key.startswith("gradient_checkpointing")
        }
        settings = {**OURS, **own, **FIXED, **more, "output_dir": str(self.output_dir)}
        # Said in any case: left out, it follows the verbosity of transformers' log.
        settings["disable_tqdm"] = not progress or bool(own.get("disable_tqdm"))
        if not self.evaluate and not any(source.held_out for source in self.text.values()):
            settings |= {"eval_strategy": "no", "eval_on_start": False, "eval_steps": None}
        found = make_arguments(settings)
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "learning_rate"):
            if not getattr(found, name) > 0:
                raise InputError(f"{name} {getattr(found, name)}: pass a number above 0")
        for name, wrong in (("lr_scheduler_type", ("reduce_lr_on_plateau", "greedy")), ("save_strategy", ("best",))):
            value = str(getattr(getattr(found, name), "value", getattr(found, name)))
            if value in wrong:
                raise InputError(f"{name} {value}: it follows one measure, and there are several: pass another one")
        if found.max_steps == 0:
            raise InputError("max_steps 0: pass at least 1, or leave it out")
        return found

    def binding(self) -> dict[str, Any]:
        """What a resumed training must have in common with the one that it goes on with, as plain data."""
        data = asdict(self)
        arguments = {
            key: value
            for key, value in data.pop("arguments").items()
            if key not in UNBOUND and not key.startswith(_UNBOUND_PREFIXES)
        }
        if str(arguments.get("lr_scheduler_type", "")) in ("constant", "constant_with_warmup") and not (
            0 < arguments.get("warmup_steps", 0) < 1 or arguments.get("warmup_ratio")
        ):
            arguments.pop("max_steps", None)  # then a long training begins like a short one
        return {**data, **arguments}


def make_arguments(settings: Mapping[str, Any]) -> TrainingArguments:
    """`TrainingArguments`, with what they refuse said in one line.

    Raises:
        InputError: a value is unknown, or does not go with another or with the machine.
    """
    try:
        return TrainingArguments(**settings)
    except (ValueError, TypeError, ImportError, KeyError, RuntimeError) as error:
        raise InputError(f"the Trainer refuses the recipe: {one_line(error)}") from error


def read_recipe(source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Read a recipe.

    Args:
        source: a YAML file, or what such a file holds.
        overrides: top-level keys that replace those of the file.

    Raises:
        InputError: no such file, not YAML, an unknown key (with the nearest known one), a value of a wrong type, or a
            contradiction.
    """
    if isinstance(source, Mapping):
        where, data = "the recipe", dict(source)
    else:
        where, data = str(source), read_yaml(Path(source))
    data |= overrides or {}
    return recipe_of(data, where)


def recipe_of(data: Mapping[str, Any], where: str) -> Recipe:
    """The recipe that a mapping says; `where` names it in messages."""
    own = {item.name for item in fields(Recipe)} - {"arguments"}
    for key in data:
        if key in REFUSED:
            raise InputError(f"{where}: {key} cannot be set: {REFUSED[key]}")
        if key in FIXED and data[key] != FIXED[key]:
            raise InputError(f"{where}: {key} is always {FIXED[key]!r} here: leave it out")
    check_keys(where, data, training_keys())
    values: dict[str, Any] = {key: data[key] for key in data if key in own}
    for name in ("text", "evaluate"):
        if name in values:
            values[name] = named(TextSource, f"{where}: {name}", values[name])
    if values.get("retrace") is not None:
        values["retrace"] = built(Retrace, f"{where}: retrace", values["retrace"])
    if values.get("ask") is not None:
        said = dict(mapping(f"{where}: ask", values["ask"]))
        if "suites" in said:
            said["suites"] = named(AskedSuite, f"{where}: ask.suites", said["suites"])
        values["ask"] = built(Ask, f"{where}: ask", said)
    hints = get_type_hints(TrainingArguments)
    values["arguments"] = {
        key: typed(f"{where}: {key}", value, hints[key] if key != "fsdp" else bool | str | None)
        for key, value in data.items()
        if key not in own
    }
    return built(Recipe, where, values)


def training_keys() -> set[str]:
    """All top-level keys that a recipe may have."""
    return ({item.name for item in fields(Recipe)} - {"arguments"}) | _ARGUMENTS


_ARGUMENTS = {item.name for item in fields(TrainingArguments) if item.init}
