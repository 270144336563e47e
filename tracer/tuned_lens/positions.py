"""Residual streams at single positions of a text, at every depth."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tracer.models.anatomy import Anatomy
from tracer.models.plain import Adapter, BlockSite, State
from tracer.models.streams import positions_of
from tracer.models.tokens import TokenBatch
from tracer.statistics import rng
from tracer.tuned_lens.text import TextSequence

FORWARD_TOKENS = 1024
"""Tokens of one forward over the text."""


@dataclass(frozen=True)
class Positions:
    """Single positions of a text at every depth.

    Attributes:
        streams: per depth 0..L, sequences of one position in the model's layout, all on one device.
        tokens: `[positions]` the input token at each.
        units: `[positions]` the unit of the text that each belongs to.
    """

    streams: tuple[Tensor, ...]
    tokens: Tensor
    units: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def at(self, anatomy: Anatomy, index: Tensor) -> "Positions":
        """Some of the positions, as copies."""
        there = index.to(self.streams[-1].device)
        streams = tuple(stream.index_select(anatomy.batch_dim, there) for stream in self.streams)
        return Positions(streams, self.tokens[index], self.units[index])


def joined(anatomy: Anatomy, parts: Sequence[Positions]) -> Positions:
    """The positions of all parts, in order."""
    streams = zip(*(part.streams for part in parts), strict=True)
    return Positions(
        tuple(torch.cat(depth, anatomy.batch_dim) for depth in streams),
        torch.cat([part.tokens for part in parts]),
        torch.cat([part.units for part in parts]),
    )


def read_positions(adapter: Adapter, sequences: Sequence[TextSequence]) -> Iterator[Positions]:
    """Run the model over a text; yields every position that is read, one forward at a time, in order."""
    longest = max(len(item.ids) for item in sequences)
    size = max(1, FORWARD_TOKENS // longest)
    for start in range(0, len(sequences), size):
        part = sequences[start : start + size]
        places = [(row, pos) for row, item in enumerate(part) for pos in range(item.skip, len(item.ids))]
        rows, positions = (torch.tensor(column) for column in zip(*places, strict=True))
        batch = TokenBatch.from_rows([item.ids for item in part])
        streams = _streams_at(adapter, batch, rows, positions)
        units = torch.tensor([item.unit for item in part])[rows]
        yield Positions(tuple(x.to(streams[-1].device) for x in streams), batch.ids[rows, positions], units)


def drawn_positions(
    adapter: Adapter, sequences: Sequence[TextSequence], most: int, seed: int, label: str
) -> Iterator[tuple[Positions, Positions | None]]:
    """As `read_positions`, and of every forward also the positions among at most `most` that a seed has drawn.

    Args:
        adapter: the opened model.
        sequences: the text.
        most: how many positions of the whole text are drawn.
        seed: of the draw.
        label: of the draw.
    """
    total = sum(len(item.ids) - item.skip for item in sequences)
    drawn = np.zeros(total, dtype=bool)
    drawn[rng(seed, "tuned lens", label).choice(total, min(most, total), replace=False)] = True
    before = 0
    for found in read_positions(adapter, sequences):
        index = torch.from_numpy(drawn[before : before + len(found)].nonzero()[0])
        before += len(found)
        yield found, found.at(adapter.anatomy, index) if len(index) else None


def _streams_at(adapter: Adapter, batch: TokenBatch, rows: Tensor, positions: Tensor) -> list[Tensor]:
    """The stream at depths 0..L at some positions; copies, as indexing makes them."""
    anatomy = adapter.anatomy
    found: list[Tensor] = []

    def visit(site: BlockSite) -> State:
        found.append(positions_of(anatomy, site.resid, rows, positions))
        out = site.run()
        if site.index == anatomy.n_blocks - 1:
            assert out[0] is not None
            found.append(positions_of(anatomy, out[0], rows, positions))
        return out

    adapter.run(batch, visit, logits=False)
    return found
