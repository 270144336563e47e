"""Token batches as the models receive them: right-padded, with a mask."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenBatch:
    """Token ids of several sequences, padded on the right.

    Right padding keeps positions and recurrent states of the real tokens as they are without padding: in a causal
    model nothing that follows a token can change it.

    Attributes:
        ids: `[batch, pos]` int64; the padding repeats token 0, which no real token can see.
        lengths: number of real tokens of each row.
    """

    ids: Tensor
    lengths: tuple[int, ...]

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]]) -> "TokenBatch":
        """Pad sequences of token ids to the longest of them."""
        lengths = tuple(len(row) for row in rows)
        ids = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.as_tensor(row, dtype=torch.int64)
        return cls(ids, lengths)

    @property
    def mask(self) -> Tensor:
        """`[batch, pos]` int64, 1 at real tokens."""
        return (torch.arange(self.ids.shape[1]) < torch.tensor(self.lengths)[:, None]).to(torch.int64)

    def __len__(self) -> int:
        return len(self.lengths)
