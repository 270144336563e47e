"""What an ablation is: how a block's contribution to the residual stream is replaced.

The contribution of block b is `c_b = resid[b + 1] - resid[b]`. All arithmetic here is on streams in the order
`[batch, pos, ...]`; the engine moves other layouts there and back.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tracer.errors import InputError, one_of
from tracer.models.plain import Adapter, BlockSite, State
from tracer.models.tokens import TokenBatch
from tracer.statistics import rng

Positions = Literal["all", "not_first", "last"]

KINDS: Mapping[str, str] = {
    "zero": "the block adds nothing: c_b = 0 (alias: skip)",
    "mean": "c_b becomes its mean over the probes' tokens, the first position kept apart",
    "resample": "c_b becomes that of another probe of the same group",
    "noise": "c_b plus Gaussian noise of its per-dimension standard deviation",
    "zero_stream": "the whole stream becomes zero (used in papers; the same for every block on bias-free models)",
}
ALIASES = {"skip": "zero"}


@dataclass(frozen=True)
class Variant:
    """One ablation of one block; `sample` counts the noise draws."""

    kind: str
    block: int
    sample: int = 0


def ablation_kinds(names: str | Iterable[str]) -> tuple[str, ...]:
    """The kinds that a user's names mean, once each.

    Args:
        names: a list of names, or names separated by commas; `none` or an empty list for no ablation.

    Raises:
        InputError: unknown name, or an empty text.
    """
    if isinstance(names, str):
        names = [] if names == "none" else [name.strip() for name in names.split(",")]
    known = (one_of("ablation", name, (*KINDS, *ALIASES)) for name in names)
    return tuple(dict.fromkeys(ALIASES.get(name, name) for name in known))


def sweep(kinds: Iterable[str], blocks: Sequence[int], noise_samples: int) -> tuple[Variant, ...]:
    """Every ablation of every block, kind by kind."""
    return tuple(
        Variant(kind, block, sample)
        for kind in kinds
        for block in blocks
        for sample in range(noise_samples if kind == "noise" else 1)
    )


def position_mask(positions: Positions, batch: TokenBatch, last: Sequence[int]) -> Tensor:
    """`[batch, pos]` bool: where an ablation acts. `last` is the position that predicts the target, per row."""
    index = torch.arange(batch.ids.shape[1])
    mask = batch.mask.bool()
    if positions == "not_first":
        return mask & (index > 0)
    if positions == "last":
        return index == torch.tensor(last)[:, None]
    return mask


@dataclass(frozen=True)
class Calibration:
    """Mean and standard deviation of every block's contribution over a reference set.

    The first position is kept apart: it is an attention sink whose contributions swamp a mean.

    Attributes:
        mean, std: `[blocks, 2, ...]`, entry 0 for first positions and 1 for all others.
        tokens: how many tokens of each kind they come from.
    """

    mean: Tensor
    std: Tensor
    tokens: tuple[int, int]


class CalibrationSums:
    """Accumulates `Calibration` over batches, in float64."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []
        self._tokens = torch.zeros(2, dtype=torch.float64)

    def add(self, adapter: Adapter, batch: TokenBatch) -> None:
        """Run one clean forward and add every block's contributions at real tokens."""
        first = torch.zeros_like(batch.mask)
        first[:, 0] = 1
        weights = torch.stack([first, batch.mask - first]).double()  # [2, batch, pos]

        def visit(site: BlockSite) -> State:
            before = site.resid.double()
            out = site.run()
            assert out[0] is not None
            c = adapter.anatomy.rows_first(out[0].double() - before)
            w = weights.to(c.device)
            sums = torch.stack([torch.tensordot(w, power, 2) for power in (c, c.square())]).cpu()
            if len(self._sums) <= site.index:
                self._sums.append(torch.zeros_like(sums))
            self._sums[site.index] += sums
            return out

        adapter.run(batch, visit, logits=False)
        self._tokens += weights.sum((1, 2))

    def calibration(self) -> Calibration:
        """The mean and standard deviation over everything added."""
        n = self._tokens.clamp_min(1)
        power, square = torch.stack(self._sums, 1)  # each [blocks, 2, ...]
        shape = (1, 2) + (1,) * (power.dim() - 2)
        mean = power / n.view(shape)
        std = (square / n.view(shape) - mean.square()).clamp_min(0).sqrt()
        first, others = self._tokens.long().tolist()
        return Calibration(mean.float(), std.float(), (first, others))


def donor_of(probe_id: str, members: Sequence[str], seed: int) -> str:
    """The probe of the same group whose contribution stands in for this one's, fixed by (seed, probe id).

    Raises:
        InputError: the group has no other probe.
    """
    others = sorted(member for member in members if member != probe_id)
    if not others:
        raise InputError(f"ablation 'resample' needs two probes in a group, but {probe_id!r} is alone in its group")
    return others[int(rng(seed, "donor", probe_id).integers(len(others)))]


def donor_positions(length: int, donor_length: int, width: int) -> np.ndarray:
    """Which position of the donor stands in for each position of a probe, -1 where none does, `[width]`.

    First goes with first, the others are aligned from the last token; where the donor is shorter, the probe's
    leading tokens keep their own contribution.
    """
    position = np.arange(width) - length + donor_length
    position[(position < 1) | (np.arange(width) >= length)] = -1
    position[0] = 0
    return position


def donated(adapter: Adapter, donors: TokenBatch, positions: np.ndarray) -> list[Tensor]:
    """Contributions of the donors at every block, laid out at the recipients' positions.

    Args:
        adapter: the opened model.
        donors: the donor of each row.
        positions: `[batch, pos]` from `donor_positions`.

    Returns:
        One `[batch, pos, ...]` tensor per block.
    """
    rows = torch.arange(len(donors))[:, None]
    index = torch.as_tensor(positions).clamp_min(0)
    contributions: list[Tensor] = []

    def visit(site: BlockSite) -> State:
        before = site.resid.clone()
        out = site.run()
        assert out[0] is not None
        c = adapter.anatomy.rows_first(out[0] - before)
        contributions.append(c[rows.to(c.device), index.to(c.device)])
        return out

    adapter.run(donors, visit, logits=False)
    return contributions


@dataclass(frozen=True)
class Edits:
    """Applies ablations to one batch; everything random is fixed by (seed, probe id), so batching changes nothing.

    Attributes:
        mask: `[batch, pos]` bool, where to ablate.
        probe_ids: id of each row.
        lengths: real tokens of each row.
        seed: of the noise.
        noise_scale: noise in units of the contribution's standard deviation.
        calibration: needed by `mean` and `noise`.
        donations: needed by `resample`; one tensor per block.
        donor_mask: `[batch, pos]` bool, where a donor has a token to give.
        whole: whether the mask covers every real token.
    """

    mask: Tensor
    probe_ids: tuple[str, ...]
    lengths: tuple[int, ...]
    seed: int = 0
    noise_scale: float = 1.0
    calibration: Calibration | None = None
    donations: Sequence[Tensor] | None = None
    donor_mask: Tensor | None = None
    whole: bool = True

    def skips(self, variant: Variant) -> bool:
        """Whether the whole block is skipped, so that it also hands on unchanged what else it was handed."""
        return variant.kind == "zero" and self.whole

    def apply(self, variant: Variant, before: Tensor, after: Tensor) -> Tensor:
        """The stream after the block with its contribution replaced, `[batch, pos, ...]`.

        Args:
            variant: what to do.
            before: stream before the block.
            after: stream after it.
        """
        mask, before = self.mask, before.to(after.device)
        if variant.kind == "zero":
            new = before
        elif variant.kind == "zero_stream":
            new = torch.zeros_like(after)
        elif variant.kind == "resample":
            assert self.donations is not None
            assert self.donor_mask is not None
            new = before + self.donations[variant.block].to(before)
            mask = mask & self.donor_mask
        elif variant.kind == "mean":
            assert self.calibration is not None
            new = before + self._by_position(self.calibration.mean[variant.block], before)
        else:
            assert self.calibration is not None
            std = self._by_position(self.calibration.std[variant.block], after)
            new = after + self.noise_scale * std * self._noise(variant, after)
        return torch.where(mask.to(after.device).view(*mask.shape, *(1,) * (after.dim() - 2)), new, after)

    @staticmethod
    def _by_position(table: Tensor, like: Tensor) -> Tensor:
        """`[pos, ...]` from `[first or other, ...]`."""
        index = torch.ones(like.shape[1], dtype=torch.int64)
        index[0] = 0
        return table[index].to(like)

    def _noise(self, variant: Variant, like: Tensor) -> Tensor:
        noise = torch.zeros(like.shape)
        for row, (probe_id, length) in enumerate(zip(self.probe_ids, self.lengths, strict=True)):
            generator = rng(self.seed, "noise", variant.block, variant.sample, probe_id)
            draw = generator.standard_normal((length, *like.shape[2:]), dtype=np.float32)
            noise[row, :length] = torch.from_numpy(draw)
        return noise.to(like)
