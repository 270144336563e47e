"""The folder that a training leaves: a normal model folder with a model card, written whole or not at all."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import PartialState
from huggingface_hub import ModelCard, ModelCardData
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase, Trainer

from tracer.errors import InputError, TrainingStopped
from tracer.models.cache import one_line
from tracer.models.checkpoint import transformers_output
from tracer.models.loading import open_model
from tracer.recipes import Dumper
from tracer.results import WRITING, plain_data
from tracer.training.checkpoints import checkpoints
from tracer.training.frozen import check_unchanged
from tracer.training.preparing import Prepared
from tracer.training.recipe import Recipe
from tracer.training.results import CptResult, summary_of

BEGUN, PLAN, RECIPE = "begun.json", "plan.json", "recipe.yaml"
"""What a training writes before its first step, to know itself again."""

TRACES, ASKED = "traces", "asked"
"""Folders of the traces and of the answers on the way."""


def check_output(folder: Path, *, resume: bool, force: bool) -> None:
    """Raise InputError where a training cannot write, or would overwrite something; nothing is changed."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InputError(f"output_dir {str(folder)!r} is a file: pass a folder that does not exist yet")
    holds = sorted(path.name for path in folder.iterdir())
    if not holds:
        return
    if BEGUN not in holds:
        raise InputError(f"output_dir {str(folder)!r} holds other files ({holds[0]}): pass a folder of its own")
    if not (force or resume):
        state = "a finished training" if "config.json" in holds else "an interrupted training"
        raise InputError(f"output_dir {str(folder)!r} holds {state}: pass --resume, --force, or another folder")


def begin(folder: Path, ready: Prepared, *, resume: bool) -> None:
    """Write down what is about to be trained, into an empty folder unless it goes on.

    Args:
        folder: the output folder.
        ready: the training.
        resume: whether it goes on, as `check_same` allows.

    Raises:
        InputError: the folder cannot be written.
    """
    if resume and (folder / BEGUN).is_file():
        return
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        # First, since by this file the folder is known as one of a training.
        (folder / BEGUN).write_text(json.dumps(_binding(ready), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        ready.plan.save(folder / PLAN)
        (folder / RECIPE).write_text(_recipe_text(ready.recipe), "utf-8")
    except OSError as error:
        raise InputError(f"output_dir {str(folder)!r} cannot be written: {error.strerror or error}") from error


def _binding(ready: Prepared) -> dict[str, dict[str, Any]]:
    """All that the weights at the end depend on, as plain data."""
    plan, texts = ready.plan, ready.texts
    counts = {**texts.counts, **{f"measured {name}": count for name, count in texts.measured_counts.items()}}
    found = {
        "model": {"fingerprint": plan.model["fingerprint"]},
        "plan": {key: getattr(plan, key) for key in ("train", "freeze", "embeddings", "norm", "head")},
        # The plan's file may have moved; what it says is compared.
        "recipe": plain_data({key: value for key, value in ready.recipe.binding().items() if key != "plan"}),
        "text": {name: count.digest for name, count in counts.items()},
        "processes": {"number": PartialState().num_processes},
    }
    plain: dict[str, dict[str, Any]] = json.loads(json.dumps(found))
    return plain


def check_same(folder: Path, ready: Prepared) -> None:
    """Compare a training that would go on with what was written when it began.

    Raises:
        InputError: it goes on with another model, plan, recipe, text or number of processes.
    """
    if not (folder / BEGUN).is_file():
        return
    try:
        earlier = json.loads((folder / BEGUN).read_text(encoding="utf-8"))
        earlier = {part: dict(earlier[part]) for part in ("model", "plan", "recipe", "text", "processes")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{str(folder / BEGUN)!r} is damaged: pass --force to begin anew") from error
    says, then = _binding(ready), "resume with the same, or pass --force"
    for part in ("model", "plan"):
        if earlier[part] != says[part]:
            raise InputError(f"{str(folder)!r} was begun with another {part}: {then}")
    for part in ("recipe", "text", "processes"):
        before, now = earlier[part], says[part]
        changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
        if changed and part == "text":
            raise InputError(f"{str(folder)!r} was begun with other words in text {changed[0]}: {then}")
        if changed:
            key = f"{changed[0]} of processes" if part == "processes" else changed[0]
            raise InputError(
                f"{str(folder)!r} was begun with {key}: {before.get(changed[0])!r}, not {now.get(changed[0])!r}: {then}"
            )


def recipe_data(recipe: Recipe) -> dict[str, Any]:
    """A recipe as the YAML file that says the same; keys that hold their default are left out."""

    def plain(value: Any) -> dict[str, Any]:
        found = {}
        for item in fields(value):
            default = item.default if item.default_factory is MISSING else item.default_factory()
            own = getattr(value, item.name)
            if own != default:
                found[item.name] = own
        return found

    data = plain(recipe)
    arguments = data.pop("arguments")
    for name in ("text", "evaluate"):
        if name in data:
            data[name] = {key: plain(source) for key, source in data[name].items()}
    if "retrace" in data:
        data["retrace"] = plain(recipe.retrace)
    if recipe.ask is not None:
        suites = {key: plain(asked) for key, asked in recipe.ask.suites.items()}
        data["ask"] = {"every": recipe.ask.every, "suites": suites}
    return {**{k: dict(v) if isinstance(v, Mapping) else v for k, v in data.items()}, **arguments}


def _recipe_text(recipe: Recipe) -> str:
    return yaml.dump(recipe_data(recipe), Dumper=Dumper, sort_keys=False, allow_unicode=True)


def save_model(
    trainer: Trainer,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    frozen: Mapping[str, str],
    result: CptResult,
) -> None:
    """Write the trained model and all about it, after reading it back and comparing it (if sharded: what is frozen).

    Called by every process of a training; one of them writes.

    Args:
        trainer: after its training.
        tokenizer: goes with the model.
        recipe: of the training.
        frozen: digests of the frozen tensors before it.
        result: of the training.

    Raises:
        TrainingStopped: a frozen tensor has changed, or what was written is not what was trained.
        InputError: the disk is full.
    """
    folder = recipe.output_dir
    staging = folder / WRITING
    try:
        trainer.save_model(str(staging), _internal_call=True)
        if PartialState().is_main_process:
            (staging / "training_args.bin").unlink(missing_ok=True)  # a pickle, which no reader should need
            tokenizer.save_pretrained(staging)
            _compare(trainer, staging, recipe, frozen)
            for name, content in result.contents().items():
                (staging / name).write_bytes(content)
            card(result, recipe).save(staging / "README.md")
            names = sorted(path.name for path in staging.iterdir())
            for name in sorted(names, key=lambda name: name == "config.json"):  # without it there is no model
                os.replace(staging / name, folder / name)
    except (OSError, SafetensorError) as error:
        last = checkpoints(folder)
        kept = f"; {last[-1].name} is kept, free space and pass --resume" if last else ""
        raise InputError(f"the model cannot be written to {str(folder)!r}: {one_line(error)}{kept}") from error
    finally:
        PartialState().wait_for_everyone()
        shutil.rmtree(staging, ignore_errors=True)


def _compare(trainer: Trainer, staging: Path, recipe: Recipe, frozen: Mapping[str, str]) -> None:
    with transformers_output(False):
        read = open_model(
            Path(staging), dtype=recipe.dtype, trust_remote_code=recipe.trust_remote_code, progress=False
        ).model
    check_unchanged(frozen, read)
    if trainer.is_fsdp_enabled:
        return  # this process holds a part of each tensor only
    state = read.state_dict()
    own = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    wrong = [name for name in own.keys() | state.keys() if not _same(own.get(name), state.get(name))]
    if wrong:
        raise TrainingStopped(f"{len(wrong)} tensors were written otherwise than trained ({sorted(wrong)[0]})")


def _same(x: torch.Tensor | None, y: torch.Tensor | None) -> bool:
    return x is not None and y is not None and torch.equal(x.detach().cpu(), y.detach().cpu())


def card(result: CptResult, recipe: Recipe) -> ModelCard:
    """The model card: base model, plan, data, recipe and results."""
    run = result.run
    texts = [
        f"| {name} | {recipe.text[name].name} | {_number(count['documents'])} | {_number(count['tokens'])} | "
        f"{_number(count['dropped'])} | {share:.1%} |"
        for name, count, share in ((name, run["texts"][name], run["shares"][name]) for name in recipe.text)
    ]
    body = "\n".join(
        [
            f"# {recipe.output_dir.name}",
            "",
            f"[{recipe.model}]({_link(recipe.model)}) after continued pre-training with LayerTracer."
            if _link(recipe.model)
            else f"`{recipe.model}` after continued pre-training with LayerTracer.",
            "",
            "```text",
            summary_of(run),
            "```",
            "",
            "Perplexities are per token; one training, so that they say nothing of how another seed would do.",
            "",
            "## Plan",
            "",
            *(f"- {why}" for why in run["plan"]["why"]),
            "",
            "## Text",
            "",
            "| name | source | documents | tokens | dropped | share of windows |",
            "| --- | --- | --- | --- | --- | --- |",
            *texts,
            "",
            f"Packing `{recipe.packing}`, windows of {recipe.block_size} tokens.",
            "",
            "## Recipe",
            "",
            "```yaml",
            _recipe_text(recipe).rstrip(),
            "```",
            "",
        ]
    )
    data = ModelCardData(
        base_model=recipe.model if _link(recipe.model) else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["continued-pretraining", "layertracer"],
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}")


def _link(model: str) -> str | None:
    """Where a model of the hub is; None for one that is not from there."""
    named = model.count("/") == 1 and not model.startswith((".", "/", "~", "zoo/")) and not Path(model).exists()
    return f"https://huggingface.co/{model}" if named else None


def _number(number: int | None) -> str:
    return "streamed" if number is None else f"{number:,}"
