"""Recovery of whole blocks: activation patching reduced to one number per block, to stand beside its fragility."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from tracer.engine import DEFAULT_BATCH_TOKENS
from tracer.models.selfcheck import Engine
from tracer.models.traced import TracedModel
from tracer.patcher import AGREE, MIN_GAP, REVERSED, Metric, Patcher, recovered, why_undefined
from tracer.probes import TokenizedProbe

NO_PAIR = "no usable corrupt prompt"
UNEQUAL = "prompt and corrupt prompt differ in length"

UNDEFINED: tuple[str | None, ...] = (None, NO_PAIR, UNEQUAL, AGREE, REVERSED)
"""Why a probe has no recovery; None, the first, where it has one."""


@dataclass(frozen=True)
class BlockRecovery:
    """How much of the right answer each block brings back.

    Attributes:
        values: `[blocks, probes]` share of the metric that a block brings back into the corrupt run; NaN where
            undefined.
        undefined: `[probes]` why a probe has no recovery, one of `UNDEFINED`; None where it has one.
    """

    values: Float[np.ndarray, "blocks probes"]
    undefined: tuple[str | None, ...]


def block_recovery(
    model: TracedModel,
    items: Sequence[TokenizedProbe],
    *,
    metric: Metric = "logit_diff",
    min_gap: float | None = None,
    engine: Engine | None = None,
    batch_tokens: int = DEFAULT_BATCH_TOKENS,
    on_tokens: Callable[[int], object] = lambda tokens: None,
) -> BlockRecovery:
    """How much of the right answer each block brings back: its contribution in the clean run, at all positions at once.

    Args:
        model: the opened model.
        items: probes; those without a corrupt prompt of equal length have no recovery.
        metric: what is read.
        min_gap: least m(clean) - m(corrupt); default `MIN_GAP`.
        engine: default what the self-check allows.
        batch_tokens: most tokens in one call of a block; does not change the result.
        on_tokens: called with the number of tokens whenever a block has run on some; see `block_recovery_tokens`.

    Returns:
        The recovery of every block and probe, and why a probe has none.

    Raises:
        HookError: an end check failed.
    """
    recovery = np.full((model.n_blocks, len(items)), np.nan)
    undefined: list[str | None] = [NO_PAIR if item.corrupt_ids is None else UNEQUAL for item in items]
    pairs = _equal_pairs(items)
    if pairs:
        found = _block_patcher(model, [items[i] for i in pairs], metric, engine, batch_tokens).run(on_tokens)
        least = MIN_GAP[metric] if min_gap is None else min_gap
        recovery[:, pairs] = recovered(found.patched["block"][:, 0], found.clean, found.corrupt, "denoise", least)
        for i, clean, corrupt in zip(pairs, found.clean, found.corrupt, strict=True):
            undefined[i] = why_undefined(float(clean), float(corrupt), least)
    return BlockRecovery(recovery, tuple(undefined))


def block_recovery_tokens(
    model: TracedModel,
    items: Sequence[TokenizedProbe],
    *,
    engine: Engine | None = None,
    batch_tokens: int = DEFAULT_BATCH_TOKENS,
) -> int:
    """How many tokens will pass through blocks in `block_recovery`, for a progress bar."""
    pairs = [items[i] for i in _equal_pairs(items)]
    return _block_patcher(model, pairs, "logit_diff", engine, batch_tokens).tokens if pairs else 0


def _block_patcher(
    model: TracedModel, items: Sequence[TokenizedProbe], metric: Metric, engine: Engine | None, batch_tokens: int
) -> Patcher:
    return Patcher(model, items, ("block",), None, metric=metric, engine=engine, batch_tokens=batch_tokens)


def _equal_pairs(items: Sequence[TokenizedProbe]) -> list[int]:
    return [i for i, x in enumerate(items) if x.corrupt_ids is not None and len(x.corrupt_ids) == len(x.prompt_ids)]
