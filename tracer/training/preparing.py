"""All that comes before the first step of a training: texts, model, plan, price and settings, checked."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import datasets
import torch
from accelerate import PartialState
from transformers import TrainingArguments

from tracer.errors import InputError
from tracer.evaluation.asking import Questions
from tracer.freezing.cost import Prices, price
from tracer.freezing.plan import FreezePlan
from tracer.freezing.plan import plan as make_plan
from tracer.models.traced import TracedModel, load
from tracer.probes import read_probes
from tracer.runs import default_probes, usable_probes
from tracer.text_sources import Documents, open_documents, split_documents
from tracer.training.packing import LEAK, Cutter, TextCount, isolation_gap, mixed
from tracer.training.recipe import Recipe

PLAN_KEYS = ("run", "rule", "ablation", "embeddings", "norm", "head", "allow_degenerate")
"""What a recipe may say about a plan that it makes: arguments of `tracer.plan`."""

SHUFFLED = 1000
"""Documents of a streamed text among which the next one is drawn."""


@dataclass(frozen=True)
class Texts:
    """The texts of a training, cut into windows.

    Attributes:
        train: windows to train on.
        measured: windows of each text that is measured.
        counts: what became of each text that is trained on.
        measured_counts: likewise of each that is measured.
        shares: share of the windows that each text gives.
    """

    train: Documents
    measured: Mapping[str, datasets.Dataset]
    counts: Mapping[str, TextCount]
    measured_counts: Mapping[str, TextCount]
    shares: Mapping[str, float]

    @property
    def bytes_per_token(self) -> float:
        """Of what is trained on."""
        return sum(self.shares[name] * count.bytes_per_token for name, count in self.counts.items())


@dataclass(frozen=True)
class Prepared:
    """A training that could begin.

    Attributes:
        recipe: what it was made from.
        model: the opened model, to which the plan is not applied yet.
        plan: which parts are trained.
        texts: what it is trained on and measured by.
        prices: what a step costs; None where it cannot be counted, or nobody asked.
        arguments: the Trainer's settings.
        questions: what is asked on the way; None for nothing.
        notes: what a reader of the result should know.
    """

    recipe: Recipe
    model: TracedModel
    plan: FreezePlan
    texts: Texts
    prices: Prices | None
    arguments: TrainingArguments
    questions: Questions | None
    notes: tuple[str, ...]

    def summary(self) -> str:
        """The plan, its price and the texts, as text for a terminal."""
        parts = [self.plan.summary()]
        if self.prices is not None:
            parts.append(self.prices.summary())
        lines = []
        for name, count in self.texts.counts.items():
            share = f"{self.texts.shares[name]:.0%} of the windows drawn"
            if count.tokens is None:
                lines.append(f"text {name}: streamed, {share}")
            else:
                lines.append(
                    f"text {name}: {count.documents:,} documents, {count.tokens:,} tokens in {count.windows:,} "
                    f"windows, {count.dropped:,} tokens dropped, {share}{self._passes(name)}"
                )
        for name, count in self.texts.measured_counts.items():
            lines.append(f"measured {name}: {count.documents:,} documents, {count.tokens:,} tokens")
        if self.questions is not None:
            for name, items in self.questions.items.items():
                unit = "probes" if items.kind == "probes" else "documents"
                lines.append(f"asked {name}: {len(items.names):,} {unit}")
        return "\n\n".join([*parts, "\n".join(lines), *(f"! {note}" for note in self.notes)])

    def _passes(self, name: str) -> str:
        """How often an epoch of a mixture goes through one of its texts."""
        windows, train = self.texts.counts[name].windows, self.texts.train
        if windows is None or len(self.texts.counts) == 1 or isinstance(train, datasets.IterableDataset):
            return ""
        return f", about {self.texts.shares[name] * len(train) / windows:.1f} times in an epoch"


def prepare(recipe: Recipe, *, progress: bool, priced: bool = True) -> Prepared:
    """Open and check everything that a recipe names; nothing is written.

    Args:
        recipe: of the training.
        progress: show progress bars.
        priced: count what a step costs, which takes some seconds.

    Raises:
        InputError: the plan, a text, or a setting cannot be used.
        ModelRefused: the model's blocks cannot be found exactly.
    """
    return _Preparation(recipe, progress, priced).prepared()


def tokenizer_of(model: TracedModel) -> Any:
    """The tokenizer of a model, which text needs.

    Raises:
        InputError: it has none.
    """
    if model.tokenizer is None:
        raise InputError(f"{model.name} has no tokenizer, which text needs: add its files to the checkpoint")
    return model.tokenizer


def plan_for(recipe: Recipe, model: TracedModel, *, progress: bool) -> FreezePlan:
    """The plan of a recipe, which must be for its model.

    Args:
        recipe: names the plan, or how it is made.
        model: the opened model.
        progress: show progress bars.

    Raises:
        InputError: the plan cannot be read or made, is for another model, or trains nothing.
    """
    said = recipe.plan
    if isinstance(said, str):
        plan = FreezePlan.load(os.path.expanduser(said))
    else:
        options = dict(said)
        for key, value in options.items():
            if key not in PLAN_KEYS:
                raise InputError(f"plan: unknown key {key!r}: pass {', '.join(PLAN_KEYS)}")
            if not isinstance(value, bool if key == "allow_degenerate" else str):
                raise InputError(f"plan: {key} is {value!r}: pass a text, or true or false for allow_degenerate")
        run = options.pop("run", None)
        plan = make_plan(model if run is None else os.path.expanduser(run), **options)
    _check_fingerprint(plan, model, recipe, progress)
    if not plan.trained_names():
        raise InputError(f"plan {plan.rule!r} trains nothing: train a block, the embeddings, the norm or the head")
    return plan


def _check_fingerprint(plan: FreezePlan, model: TracedModel, recipe: Recipe, progress: bool) -> None:
    assert model.parts is not None
    plan.check_parts(model.parts)
    known, dtype, own = plan.model["fingerprint"], plan.model["dtype"], model.fingerprint()
    if known == own:
        return
    # One that was traced in another precision has other numbers as weights there.
    if dtype != model.opened.dtype and known == _open(recipe, dtype, progress).fingerprint():
        return
    raise InputError(
        f"the plan was made for other weights than those of {model.name} (fingerprint {known}, not {own}): trace "
        "this model and plan anew"
    )


def _open(recipe: Recipe, dtype: str, progress: bool) -> TracedModel:
    return load(
        os.path.expanduser(recipe.model),
        backend="hooks",
        dtype=dtype,
        revision=recipe.revision,
        trust_remote_code=recipe.trust_remote_code,
        progress=progress,
    )


class _Preparation:
    """See `prepare`."""

    def __init__(self, recipe: Recipe, progress: bool, priced: bool):
        self.recipe = recipe
        self.progress = progress
        self.priced = priced

    def prepared(self) -> Prepared:
        train, measured = self._open_texts()  # first, since a wrong path should not cost the loading of a model
        model = _open(self.recipe, self.recipe.dtype, self.progress)
        plan = plan_for(self.recipe, model, progress=self.progress)
        arguments = self._arguments(model)
        self._check_retrace(model)
        questions = None if self.recipe.ask is None else Questions(model, self.recipe.ask.suites)
        texts = self._cut(model, train, measured)
        prices, notes = self._price(plan, model) if self.priced else (None, [])
        notes += _overlaps(train, measured)
        return Prepared(self.recipe, model, plan, texts, prices, arguments, questions, tuple(notes))

    def _open_texts(self) -> tuple[dict[str, Documents], dict[str, datasets.Dataset]]:
        """Documents to train on and to measure, by name; nothing is tokenized yet."""
        train: dict[str, Documents] = {}
        measured: dict[str, datasets.Dataset] = {}
        for name, source in self.recipe.text.items():
            found = open_documents(source, progress=self.progress)
            if source.held_out:
                found, measured[name] = split_documents(found, source.held_out, self.recipe.seed)
            train[name] = found
        for name, source in self.recipe.evaluate.items():
            if source.streaming:
                raise InputError(f"evaluate.{name}: a text that is measured is read whole: leave streaming out")
            measured[name] = open_documents(source, progress=self.progress)
        return train, measured

    def _check_retrace(self, model: TracedModel) -> None:
        """Find what is wrong with the traces on the way before the first step, not after it."""
        retrace = self.recipe.retrace
        if retrace is None:
            return
        probes = read_probes(default_probes(model) if retrace.probes is None else retrace.probes, skip_bad=True)
        usable_probes(model, probes, target="single", limit=retrace.limit, skip_bad=True)

    def _cut(
        self, model: TracedModel, train: Mapping[str, Documents], measured: Mapping[str, datasets.Dataset]
    ) -> Texts:
        recipe = self.recipe
        if model.positions is not None and recipe.block_size > model.positions:
            raise InputError(
                f"block_size {recipe.block_size} is more than the {model.positions} positions of {model.name}: pass at "
                "most that"
            )
        if recipe.packing == "isolated":
            self._check_isolation(model)
        cutter = Cutter(tokenizer_of(model), recipe.block_size, recipe.packing)  # type: ignore[arg-type]
        windows: dict[str, tuple[Documents, float]] = {}
        counts: dict[str, TextCount] = {}
        for name, documents in train.items():
            if isinstance(documents, datasets.IterableDataset):
                shuffled = documents.shuffle(seed=recipe.seed, buffer_size=SHUFFLED)
                cut, counts[name] = cutter.stream(shuffled)
            else:
                cut, counts[name] = cutter.cut(documents, recipe.text[name].name)
            windows[name] = (cut, recipe.text[name].weight)
        measured_windows, measured_counts = {}, {}
        for name, documents in measured.items():
            measured_windows[name], measured_counts[name] = cutter.cut_evenly(documents, name)
        total = sum(weight for _, weight in windows.values())
        self._check_tokens(model, max(count.largest for count in (*counts.values(), *measured_counts.values())))
        return Texts(
            mixed(windows, recipe.seed),
            measured_windows,
            counts,
            measured_counts,
            {name: weight / total for name, (_, weight) in windows.items()},
        )

    @staticmethod
    def _check_tokens(model: TracedModel, largest: int) -> None:
        known = min(model.anatomy.vocab, model.embeddings)
        if largest >= known:
            raise InputError(
                f"the tokenizer gives token {largest}, but {model.name} has {known}: pass the tokenizer that belongs "
                "to the model"
            )

    def _check_isolation(self, model: TracedModel) -> None:
        if self.recipe.dtype != "float32":
            raise InputError("packing 'isolated' is proven in float32 only: pass dtype: float32 (and bf16: true)")
        gap = isolation_gap(model.model, min(model.anatomy.vocab, model.embeddings))
        if gap > LEAK:
            raise InputError(
                f"packing 'isolated' is not possible with {model.name}: a document moves the log-probabilities of the "
                f"next one by {gap:.2g}; pass packing: packed, or none for windows of single documents"
            )

    def _price(self, plan: FreezePlan, model: TracedModel) -> tuple[Prices | None, list[str]]:
        batch = int(self.recipe.arguments.get("per_device_train_batch_size", 8))
        again = ["the price leaves activation checkpointing out: fewer activations are kept, and computed again"]
        try:
            found = price(plan, model.model, block_size=self.recipe.block_size, batch=batch)
            return found, again if _checkpointed(self.recipe.arguments) else []
        except InputError as error:
            return None, [f"no price: {error}"]

    def _arguments(self, model: TracedModel) -> TrainingArguments:
        recipe = self.recipe
        more = machine_settings() | _checkpointed(recipe.arguments)
        if recipe.packing == "none":
            more["include_num_input_tokens_seen"] = "non_padding"
        if recipe.arguments.get("fsdp"):
            more["fsdp"] = True
            more["fsdp_config"] = {
                **_sharding(recipe.arguments, more),
                "version": 2,  # which takes frozen and trained parameters in one unit
                "state_dict_type": "FULL_STATE_DICT",  # of which a model folder is made
                "transformer_layer_cls_to_wrap": sorted({type(block).__name__ for block in model.blocks}),
            }
            for name in ("retrace", "ask"):
                if getattr(recipe, name) is not None:
                    raise InputError(
                        f"{name} needs whole blocks, which fsdp shards over processes: leave one of them out"
                    )
        return recipe.training_arguments(progress=self.progress, **more)


def _overlaps(train: Mapping[str, Documents], measured: Mapping[str, datasets.Dataset]) -> list[str]:
    """What of the measured texts is trained on as well."""
    notes = []
    wanted = {name: {text.strip() for text in documents["text"][:]} for name, documents in measured.items()}
    for other, trained in train.items():
        if not wanted:
            break
        if isinstance(trained, datasets.IterableDataset):
            notes.append(f"text {other} is streamed: whether {', '.join(wanted)} is part of it has not been looked up")
            continue
        both: dict[str, set[str]] = {name: set() for name in wanted}
        for row in trained:
            text = row["text"].strip()
            for name, own in wanted.items():
                if text in own:
                    both[name].add(text)
        for name, found in both.items():
            if found:
                notes.append(
                    f"{len(found):,} of the {len(wanted[name]):,} different documents of {name} are trained on in "
                    f"{other}"
                )
    return notes


def machine_settings() -> dict[str, Any]:
    """The settings of the Trainer that follow from the machine."""
    return {} if torch.accelerator.is_available() else {"use_cpu": True}


def _sharding(arguments: Mapping[str, Any], more: Mapping[str, Any]) -> Mapping[str, Any]:
    """The recipe's own settings of FSDP.

    Raises:
        InputError: they cannot be used here.
    """
    own = arguments.get("fsdp_config") or {}
    if PartialState().num_processes == 1:
        raise InputError("fsdp shards over processes, and this is one: start it with torchrun, or leave it out")
    if arguments["fsdp"] is not True or not isinstance(own, Mapping):
        raise InputError("fsdp: pass true, and its settings as a mapping under fsdp_config")
    if arguments.get("use_cpu") and torch.accelerator.is_available():
        raise InputError("fsdp shards over the accelerators that are here: leave use_cpu out")
    if own.get("activation_checkpointing") and ("activation_checkpointing" in more or "gradient_checkpointing" in more):
        raise InputError("activation_checkpointing is said twice, in fsdp_config too: leave one of them out")
    return own


def _checkpointed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of activation checkpointing, under the name that the installed transformers prefers.

    Raises:
        InputError: the reentrant kind was asked for.
    """
    names = {item.name for item in fields(TrainingArguments)}
    old, new = "gradient_checkpointing", "activation_checkpointing"
    said = next((name for name in (new, old) if arguments.get(name)), None)
    if said is None:
        return {}
    own = arguments.get(f"{said}_kwargs") or {}
    if own.get("use_reentrant"):
        raise InputError(f"{said}_kwargs: use_reentrant leaves trained blocks without gradients: pass false")
    key = new if new in names else old
    return {key: True, f"{key}_kwargs": {**own, "use_reentrant": False}}
