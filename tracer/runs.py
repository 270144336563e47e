"""What all analyses share around their passes: what can be run, what it depends on, how it shows that it goes on."""

import platform
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from typing import cast, get_args

import torch
import transformers
from tqdm import tqdm

from tracer.errors import InputError, one_of
from tracer.models.selfcheck import Engine
from tracer.models.traced import TracedModel
from tracer.probes import ProbeSet, TargetReading, TokenizedProbe, TokenizedProbes, tokenize
from tracer.zoo.shelf import PREFIX


def default_probes(model: object) -> str:
    """The probe set for a model, opened or by name, where none is named; a zoo model is asked about its own world."""
    if isinstance(model, TracedModel):
        from_zoo = model.opened.kind == "zoo"
    else:
        from_zoo = isinstance(model, str) and model.startswith(PREFIX)
    return f"{PREFIX}held" if from_zoo else "english"


def allowed_engine(model: TracedModel, engine: str | None) -> Engine:
    """The engine that was asked for, by default the one that the self-check allows.

    Raises:
        InputError: an unknown one, or one that is not exact on this model.
    """
    if engine is None:
        return model.engine
    one_of("engine", engine, get_args(Engine))
    if engine == "onepass" and model.engine == "full":
        raise InputError(f"engine 'onepass' is not exact on {model.name} ({model.self_check.reason}): pass 'full'")
    return cast(Engine, engine)


def check_fit(model: TracedModel, items: Sequence[TokenizedProbe]) -> None:
    """Refuse probes that the model has no positions or no embeddings for, before anything runs.

    Raises:
        InputError: names the first such probe.
    """
    for item in items:
        length, largest = len(item.prompt_ids) + len(item.target_ids) - 1, max(item.prompt_ids + item.target_ids)
        if model.positions is not None and length > model.positions:
            raise InputError(
                f"probe {item.probe.id} has {length} tokens, but {model.name} has {model.positions} positions: "
                "shorten it"
            )
        known = min(model.anatomy.vocab, model.embeddings)
        if largest >= known:
            raise InputError(
                f"probe {item.probe.id} has token {largest}, but {model.name} has only {known}: pass the "
                "tokenizer, or the token ids, that belong to the model"
            )


def corrupt_of(pair: TokenizedProbe) -> TokenizedProbe:
    """The corrupt half of a pair, as a probe of its own."""
    assert pair.corrupt_ids is not None
    assert pair.corrupt_target_id is not None
    return TokenizedProbe(
        replace(pair.probe, id=f"{pair.probe.id} (corrupt)"), pair.corrupt_ids, (pair.corrupt_target_id,)
    )


def first_of_each_group(items: Sequence[TokenizedProbe], limit: int | None) -> tuple[TokenizedProbe, ...]:
    """The first `limit` probes of each group, in the given order; all without a limit."""
    seen: Counter[str] = Counter()
    kept = []
    for item in items:
        seen[item.probe.group] += 1
        if limit is None or seen[item.probe.group] <= limit:
            kept.append(item)
    return tuple(kept)


def usable_probes(
    model: TracedModel, probes: ProbeSet, *, target: TargetReading, limit: int | None, skip_bad: bool
) -> TokenizedProbes:
    """The probes that a trace of a model would use; see `trace` for the arguments.

    Raises:
        InputError: a probe cannot be used, or none can.
    """
    tokenized = tokenize(probes, model.tokenizer, target=target, skip_bad=skip_bad)
    check_fit(model, tokenized.items)
    tokenized = replace(tokenized, items=first_of_each_group(tokenized.items, limit))
    if not tokenized.items:
        first = f" (the first: {tokenized.skipped[0].reason})" if tokenized.skipped else ""
        raise InputError(f"none of the {len(probes)} probes of {probes.name!r} can be used{first}")
    return tokenized


def versions() -> dict[str, str]:
    """Versions of what numbers depend on."""
    return {
        "tracer": version("layertracer"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


@contextmanager
def token_bar(total: int, label: str, show: bool) -> Iterator[Callable[[int], object]]:
    """A progress bar over the tokens that pass through blocks; yields the function that advances it."""
    with tqdm(total=total, desc=label, unit="tok", unit_scale=True, disable=not show or total == 0) as bar:
        yield bar.update
