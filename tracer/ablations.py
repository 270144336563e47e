"""What an ablation is: how a block's contribution to the residual stream is replaced.

The contribution of block b is `c_b = resid[b + 1] - resid[b]`. All arithmetic here is on streams in the order
`[batch, pos, ...]`; the engine moves other layouts there and back.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from torch import Tensor, nn

from tracer.errors import InputError, one_of
from tracer.models.plain import Adapter, Arguments, BlockSite, OutputEdit, State
from tracer.models.streams import copied
from tracer.models.sublayers import Sublayer, Sublayers, with_edited_sublayers
from tracer.models.tokens import TokenBatch
from tracer.reweighting import perturbation, reweighted
from tracer.statistics import rng

Positions = Literal["all", "not_first", "last"]

KINDS: Mapping[str, str] = {
    "zero": "the block adds nothing: c_b = 0 (alias: skip)",
    "mean": "c_b becomes its mean over the probes' tokens, the first position kept apart",
    "resample": "c_b becomes that of another probe of the same group",
    "noise": "c_b plus Gaussian noise of its per-dimension standard deviation",
    "perturb": "c_b is that of the block with Gaussian noise on its weight matrices",
    "swap_weights": "c_b is that of the block with its weights from another checkpoint of the same architecture",
    "zero_stream": "the whole stream becomes zero (used in papers; the same for every block on bias-free models)",
}
ALIASES = {"skip": "zero"}
DRAWN = ("noise", "perturb")
"""Kinds with chance in them, which are drawn several times."""
WEIGHTED = ("perturb", "swap_weights")
"""Kinds that run the block with other weights, which act at all positions and on the block as a whole."""


Part = Literal["block", "mixer", "mlp"]
"""What is ablated: the whole contribution of a block, or that of one of its sub-layers."""

Summand = tuple[int, int | None]
"""A block and the number of one of its sub-layers, or None for the whole block."""


@dataclass(frozen=True)
class Variant:
    """One ablation of one block, or of a part of it; `sample` counts the draws of the kinds that are drawn."""

    kind: str
    block: int
    sample: int = 0
    part: Part = "block"

    @property
    def depth(self) -> int:
        """The depth at which its stream departs from the clean one."""
        return self.block + 1

    @property
    def label(self) -> str:
        """Kind and part, as results name it: `zero`, `zero_mixer`."""
        return label_of(self.kind, self.part)


def label_of(kind: str, part: str) -> str:
    """The name of an ablation of a part in a result: that of the kind alone for whole blocks."""
    return kind if part == "block" else f"{kind}_{part}"


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


def part_names(names: str | Iterable[str]) -> tuple[Part, ...]:
    """The parts that a user's names mean, once each; names in a list or separated by commas."""
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",")]
    found = tuple(dict.fromkeys(cast(Part, one_of("part", name, get_args(Part))) for name in names))
    if not found:
        raise InputError(f"no part to ablate: pass some of {', '.join(get_args(Part))}")
    return found


def sweep(
    kinds: Iterable[str],
    blocks: Sequence[int],
    noise_samples: int,
    parts: Sequence[Part] = ("block",),
    sublayers: Sublayers | None = None,
) -> tuple[Variant, ...]:
    """Every ablation of every block, kind by kind and part by part; a part that a block does not have is left out.

    Args:
        kinds: the ablations.
        blocks: which blocks.
        noise_samples: draws of `noise` and `perturb`.
        parts: what to ablate of each block.
        sublayers: of the model, needed for parts other than `block`.

    Raises:
        InputError: zero_stream, perturb or swap_weights of a part, a part that no block has, or a block that is not the
            exact sum of its sub-layers.
    """
    kinds = tuple(kinds)
    whole = dict.fromkeys(WEIGHTED, "it changes the weights of a block") | {"zero_stream": "it erases the whole stream"}
    for kind, why in whole.items():
        if kind in kinds and set(parts) != {"block"}:
            raise InputError(f"ablation {kind!r} has no parts: {why}; pass parts='block'")

    def present(block: int, part: Part) -> bool:
        if part == "block":
            return True
        assert sublayers is not None
        return bool(sublayers.of(block, part))

    for part in parts:
        if not any(present(block, part) for block in blocks):
            assert sublayers is not None
            raise InputError(f"no block of {sublayers.model_class} has a part {part!r}: leave it out of parts")
    return tuple(
        Variant(kind, block, sample, part)
        for kind in kinds
        for part in parts
        for block in blocks
        if present(block, part)
        for sample in range(noise_samples if kind in DRAWN else 1)
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
    """Mean and standard deviation of contributions over a reference set.

    The first position is kept apart: it is an attention sink whose contributions swamp a mean.

    Attributes:
        mean, std: per summand `[2, ...]`, entry 0 for first positions and 1 for all others.
        tokens: how many tokens of each kind they come from.
    """

    mean: Mapping[Summand, Tensor]
    std: Mapping[Summand, Tensor]
    tokens: tuple[int, int]


class CalibrationSums:
    """Accumulates `Calibration` over batches, in float64.

    Args:
        adapter: the opened model.
        sublayers: keep those of the sub-layers as well.
    """

    def __init__(self, adapter: Adapter, sublayers: Sublayers | None = None) -> None:
        self._adapter, self._sublayers = adapter, sublayers
        self._sums: dict[Summand, Tensor] = {}
        self._tokens = torch.zeros(2, dtype=torch.float64)

    def add(self, batch: TokenBatch) -> None:
        """Run one clean forward and add every contribution at real tokens."""
        first = torch.zeros_like(batch.mask)
        first[:, 0] = 1
        weights = torch.stack([first, batch.mask - first]).double()  # [2, batch, pos]

        def collect(summand: Summand, contribution: Tensor) -> None:
            c = contribution.double()
            w = weights.to(c.device)
            sums = torch.stack([torch.tensordot(w, power, 2) for power in (c, c.square())]).cpu()
            self._sums[summand] = self._sums[summand] + sums if summand in self._sums else sums

        _run_contributions(self._adapter, batch, self._sublayers, collect)
        self._tokens += weights.sum((1, 2))

    def calibration(self) -> Calibration:
        """The mean and standard deviation over everything added."""
        n = self._tokens.clamp_min(1)
        mean, std = {}, {}
        for summand, (power, square) in self._sums.items():  # each [2, ...]
            shape = (2,) + (1,) * (power.dim() - 1)
            average = power / n.view(shape)
            mean[summand] = average.float()
            std[summand] = (square / n.view(shape) - average.square()).clamp_min(0).sqrt().float()
        first, others = self._tokens.long().tolist()
        return Calibration(mean, std, (first, others))


def _run_contributions(
    adapter: Adapter,
    batch: TokenBatch,
    sublayers: Sublayers | None,
    collect: Callable[[Summand, Tensor], None],
) -> None:
    """Run the model once and hand out what every block and sub-layer adds to the stream, `[batch, pos, ...]`."""

    def visit(site: BlockSite) -> State:
        before = site.resid.clone()
        rows_first = adapter.anatomy.rows_first

        def recorder(number: int, sublayer: Sublayer) -> OutputEdit:
            def record(arguments: Arguments, output: Any) -> Any:
                contribution = sublayer.contribution(arguments, output).reshape(before.shape)
                collect((site.index, number), rows_first(contribution))
                return output

            return record

        own = () if sublayers is None else sublayers.blocks[site.index]
        out = site.run(edits={adapter.modules[s.module]: recorder(i, s) for i, s in enumerate(own)})
        assert out[0] is not None
        collect((site.index, None), rows_first(out[0] - before))
        return out

    adapter.run(batch, visit, logits=False)


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


def donated(
    adapter: Adapter, donors: TokenBatch, positions: np.ndarray, sublayers: Sublayers | None = None
) -> dict[Summand, Tensor]:
    """Contributions of the donors, laid out at the recipients' positions.

    Args:
        adapter: the opened model.
        donors: the donor of each row.
        positions: `[batch, pos]` from `donor_positions`.
        sublayers: those of the sub-layers as well.

    Returns:
        `[batch, pos, ...]` per summand.
    """
    rows = torch.arange(len(donors))[:, None]
    index = torch.as_tensor(positions).clamp_min(0)
    contributions: dict[Summand, Tensor] = {}

    def collect(summand: Summand, c: Tensor) -> None:
        contributions[summand] = c[rows.to(c.device), index.to(c.device)]

    _run_contributions(adapter, donors, sublayers, collect)
    return contributions


@dataclass(frozen=True)
class Edits:
    """Applies ablations to one batch; everything random is fixed by (seed, probe id), so batching changes nothing.

    Attributes:
        adapter: the opened model.
        mask: `[batch, pos]` bool, where to ablate.
        probe_ids: id of each row.
        lengths: real tokens of each row.
        seed: of the noise.
        noise_scale: noise in units of the contribution's standard deviation.
        perturb_scale: norm of the noise on a weight matrix as a share of the matrix's own.
        calibration: needed by `mean` and `noise`.
        donations: needed by `resample`.
        donor_mask: `[batch, pos]` bool, where a donor has a token to give.
        whole: whether the mask covers every real token.
        sublayers: needed by ablations of parts.
        other: blocks of another checkpoint, needed by `swap_weights`.
    """

    adapter: Adapter
    mask: Tensor
    probe_ids: tuple[str, ...]
    lengths: tuple[int, ...]
    seed: int = 0
    noise_scale: float = 1.0
    perturb_scale: float = 0.1
    calibration: Calibration | None = None
    donations: Mapping[Summand, Tensor] | None = None
    donor_mask: Tensor | None = None
    whole: bool = True
    sublayers: Sublayers | None = None
    other: Sequence[nn.Module] | None = None

    def at_depth(self, variant: Variant, site: BlockSite, before: State | None, clean: Callable[[], State]) -> State:
        """The state after the block under an ablation; see `tracer.engine.StreamEdits`."""
        assert before is not None
        if variant.kind in WEIGHTED:
            with reweighted(site.module, self._weights(variant, site.module)):
                return site.run(copied(before))
        if variant.part != "block":
            assert self.sublayers is not None
            ablated = partial(self._ablated_part, variant)
            return with_edited_sublayers(self.adapter, site, before, self.sublayers, variant.part, ablated)
        anatomy, state = self.adapter.anatomy, clean()
        assert before[0] is not None
        assert state[0] is not None
        new = self.apply(variant, None, anatomy.rows_first(before[0]), anatomy.rows_first(state[0]))
        # A block that is skipped whole also hands on unchanged what else it was handed.
        return (anatomy.as_model(new), *(before if variant.kind == "zero" and self.whole else state)[1:])

    def _weights(self, variant: Variant, block: nn.Module) -> dict[str, Tensor]:
        if variant.kind == "perturb":
            return perturbation(block, self.perturb_scale, self.seed, "perturb", variant.block, variant.sample)
        assert self.other is not None
        return dict(self.other[variant.block].named_parameters())

    def _ablated_part(self, variant: Variant, number: int, contribution: Tensor) -> Tensor:
        return self.apply(variant, number, torch.zeros_like(contribution), contribution)

    def apply(self, variant: Variant, number: int | None, before: Tensor, after: Tensor) -> Tensor:
        """The stream with a contribution replaced, `[batch, pos, ...]`.

        Args:
            variant: what to do.
            number: which sub-layer of the block the contribution belongs to, or None for the whole block.
            before: stream without the contribution.
            after: stream with it.
        """
        mask, before = self.mask, before.to(after.device)
        summand = (variant.block, number)
        if variant.kind in ("zero", "zero_stream"):
            new = before if variant.kind == "zero" else torch.zeros_like(after)
            if self.whole:
                return new
        elif variant.kind == "resample":
            assert self.donations is not None
            assert self.donor_mask is not None
            new = before + self.donations[summand].to(before)
            mask = mask & self.donor_mask
        elif variant.kind == "mean":
            assert self.calibration is not None
            new = before + self._by_position(self.calibration.mean[summand], before)
        else:
            assert self.calibration is not None
            std = self._by_position(self.calibration.std[summand], after)
            new = after + self.noise_scale * std * self._noise(variant, number, after)
        return torch.where(mask.to(after.device).view(*mask.shape, *(1,) * (after.dim() - 2)), new, after)

    @staticmethod
    def _by_position(table: Tensor, like: Tensor) -> Tensor:
        """`[pos, ...]` from `[first or other, ...]`."""
        index = torch.ones(like.shape[1], dtype=torch.int64)
        index[0] = 0
        return table[index].to(like)

    def _noise(self, variant: Variant, number: int | None, like: Tensor) -> Tensor:
        noise = torch.zeros(like.shape)
        part = () if number is None else (number,)
        for row, (probe_id, length) in enumerate(zip(self.probe_ids, self.lengths, strict=True)):
            generator = rng(self.seed, "noise", variant.block, *part, variant.sample, probe_id)
            draw = generator.standard_normal((length, *like.shape[2:]), dtype=np.float32)
            noise[row, :length] = torch.from_numpy(draw)
        return noise.to(like)
