"""What a patch is: part of one run replaced by that of another, as a variant for the one-pass engine.

The run that is changed is called the base, the one whose streams are put in the giver.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tracer.ablations import Summand, donated
from tracer.batches import ProbeBatch
from tracer.errors import InputError
from tracer.models.plain import Adapter, BlockSite, State
from tracer.models.streams import Streams
from tracer.models.sublayers import Sublayers, with_edited_sublayers
from tracer.models.tokens import TokenBatch

Component = Literal["resid", "block", "mixer", "mlp"]
"""What is patched: the stream at a depth, the whole contribution of a block, or that of one of its sub-layers."""

Giver = Literal["other", "aligned", "self"]
"""Whose streams are put in: the other prompt's as asked for, its as aligned from the last token, or the run's own."""


@dataclass(frozen=True)
class PatchVariant:
    """One patch.

    Attributes:
        component: what is replaced.
        place: the depth 0..L of a stream, or the block of a contribution.
        position: column of the base prompt, counted from its last token (-1); None for all mapped ones at once.
        giver: whose is put in.
    """

    component: Component
    place: int
    position: int | None
    giver: Giver = "other"

    @property
    def depth(self) -> int:
        """The depth at which its stream departs from the base's."""
        return self.place if self.component == "resid" else self.place + 1


@dataclass(frozen=True)
class Given:
    """What a run has to give, laid out at the positions of the base.

    Attributes:
        mapped: `[batch, pos]` where it has something to give; None where positions of the stream are not tokens.
        streams: `[batch, pos, ...]` by depth.
        contributions: `[batch, pos, ...]` by summand.
    """

    mapped: Bool[Tensor, "batch pos"] | None
    streams: Mapping[int, Tensor]
    contributions: Mapping[Summand, Tensor]


def given_by(
    adapter: Adapter,
    tokens: TokenBatch,
    sources: Int[np.ndarray, "batch pos"],
    streams: Streams,
    variants: Sequence[PatchVariant],
    sublayers: Sublayers | None = None,
) -> Given:
    """What some variants need of a giver.

    Args:
        adapter: the opened model.
        tokens: the giver's prompts; they are run once more where sub-layers are among the variants.
        sources: the giver's position that stands in at each position of the base, -1 where none does.
        streams: of the giver.
        variants: what will be patched; their positions do not matter.
        sublayers: needed by patches of sub-layers.
    """
    anatomy = adapter.anatomy
    index = torch.as_tensor(sources).clamp_min(0)

    def laid_out(stream: Tensor) -> Tensor:
        rows_first = anatomy.rows_first(stream)
        if anatomy.position_dim is None:
            return rows_first
        at = index.to(stream.device)
        return rows_first[torch.arange(len(at), device=at.device)[:, None], at]

    needed = {(variant.component, variant.place) for variant in variants}
    resid: dict[int, Tensor] = {}
    contributions: dict[Summand, Tensor] = {}
    for component, place in needed:
        if component == "resid":
            # Not what the next block receives: some models change that on the way.
            stream = streams.outputs[place - 1][0] if place else streams.inputs[0][0]
            assert stream is not None
            resid[place] = laid_out(stream)
        elif component == "block":
            before, after = streams.inputs[place][0], streams.outputs[place][0]
            assert before is not None
            assert after is not None
            contributions[place, None] = laid_out(after - before.to(after.device))
    if sublayers is not None and any(component in ("mixer", "mlp") for component, _ in needed):
        contributions |= {
            (block, number): contribution
            for (block, number), contribution in donated(adapter, tokens, sources, sublayers).items()
            if number is not None and (sublayers.blocks[block][number].role, block) in needed
        }
    return Given(None if anatomy.position_dim is None else torch.as_tensor(sources >= 0), resid, contributions)


@dataclass(frozen=True)
class PatchEdits:
    """Applies patches to one batch of base prompts; see `tracer.engine.StreamEdits`.

    Attributes:
        adapter: the opened model.
        columns: `[batch, pos]` of the base prompts: -1 at the last token, not negative at padding.
        givers: what is put in.
        sublayers: needed by patches of sub-layers.
    """

    adapter: Adapter
    columns: Int[Tensor, "batch pos"]
    givers: Mapping[Giver, Given]
    sublayers: Sublayers | None = None

    def at_depth(
        self, variant: PatchVariant, site: BlockSite, before: State | None, clean: Callable[[], State]
    ) -> State:
        """The state at the variant's depth, patched."""
        given, anatomy = self.givers[variant.giver], self.adapter.anatomy
        if variant.component == "resid":
            state = clean()
            assert state[0] is not None
            new = self._put(variant, anatomy.rows_first(state[0]), given.streams[variant.place])
            return (anatomy.as_model(new), *state[1:])
        assert before is not None
        if variant.component == "block":
            state = clean()
            assert before[0] is not None
            assert state[0] is not None
            onto = anatomy.rows_first(before[0])
            new = self._put(variant, anatomy.rows_first(state[0]), given.contributions[variant.place, None], onto)
            return (anatomy.as_model(new), *state[1:])
        assert self.sublayers is not None
        put = partial(self._put_part, variant)
        return with_edited_sublayers(self.adapter, site, before, self.sublayers, variant.component, put)

    def _put_part(self, variant: PatchVariant, number: int, contribution: Tensor) -> Tensor:
        return self._put(variant, contribution, self.givers[variant.giver].contributions[variant.place, number])

    def _put(self, variant: PatchVariant, own: Tensor, given: Tensor, onto: Tensor | None = None) -> Tensor:
        """The base's own `[batch, pos, ...]` with what is given (on top of `onto`) at the variant's positions."""
        if own.shape != given.shape:  # of patches of bytes two prompts need not have the same number
            raise InputError(
                f"clean and corrupt prompts have streams of different shapes in {self.adapter.anatomy.model_class} "
                f"({list(own.shape)} and {list(given.shape)}): they cannot be patched"
            )
        new = given.to(own) if onto is None else onto.to(own) + given.to(own)
        mapped = self.givers[variant.giver].mapped
        if mapped is None:
            return new
        mask = mapped if variant.position is None else mapped & (self.columns == variant.position)
        return torch.where(mask.to(own.device).view(*mask.shape, *(1,) * (own.dim() - 2)), new, own)


@dataclass(frozen=True)
class PairBatch:
    """Base prompts that run together, with their givers in the same order.

    Attributes:
        base: the base prompts.
        giver: the prompts that give.
        columns: `[batch, pos]` of the base prompts, -1 at the last token, not negative at padding.
        sources: `[batch, pos]` the giver's position that stands in at each position, -1 where none does.
        aligned: the same with both prompts aligned from the last token, whatever is asked for.
        differs: `[batch, pos]` where the two streams can differ. Up to the first token that does they are the same in
            a causal model, so that patching there changes nothing.
    """

    base: ProbeBatch
    giver: TokenBatch
    columns: Int[np.ndarray, "batch pos"]
    sources: Int[np.ndarray, "batch pos"]
    aligned: Int[np.ndarray, "batch pos"]
    differs: Bool[np.ndarray, "batch pos"]

    @classmethod
    def of(
        cls, base: ProbeBatch, givers: Sequence[Sequence[int]], position_map: Mapping[int, int] | None
    ) -> "PairBatch":
        """Pair base prompts with their givers.

        Args:
            base: the base prompts.
            givers: the prompts that give, in the same order.
            position_map: column of the base to column of the giver, both counted from the last token (-1); None for
                each column to itself.
        """
        giver = TokenBatch.from_rows(givers)
        at = np.arange(base.tokens.ids.shape[1])
        columns = at - np.array(base.tokens.lengths)[:, None]
        lengths = np.array(giver.lengths)[:, None]
        aligned = np.where(columns < 0, np.maximum(lengths + columns, -1), -1)
        sources = aligned
        if position_map is not None:
            sources = np.full_like(columns, -1)
            for column, source in position_map.items():
                sources = np.where(columns == column, np.maximum(lengths + source, -1), sources)
        same = [
            next((i for i, (a, b) in enumerate(zip(item.prompt_ids, other, strict=False)) if a != b), len(at))
            for item, other in zip(base.items, givers, strict=True)
        ]
        differs = (sources >= 0) & ~((sources == at) & (at < np.array(same)[:, None]))
        return cls(base, giver, columns, sources, aligned, differs)

    def at(self, where: Bool[np.ndarray, "batch pos"], position: int | None) -> Bool[np.ndarray, "batch"]:
        """Which rows have a place of `where` in a column, or anywhere."""
        chosen = where if position is None else where & (self.columns == position)
        return np.any(chosen, axis=1)
