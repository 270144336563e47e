"""Which columns of a forward an asked position is, row by row, with padding and with a cache."""

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tracer.errors import InputError

CACHES = ("cache", "past_key_values", "cache_params", "past_kv_cache", "state", "mems", "past_buckets_states")
"""What models call the argument that holds what earlier forwards computed."""


class Lineage:
    """One sequence of tokens over the forwards that a cache joins.

    Attributes:
        length: positions that its forwards have covered; None where that is not known.
    """

    def __init__(self, cache: object):
        self.length = 0 if cache is None else _held(cache)
        self._cache: Callable[[], object] = lambda: None
        self.joined_by(cache)

    def joined_by(self, cache: object) -> None:
        """Remember the cache; weakly where possible, since it holds the keys and values of all blocks."""
        try:
            self._cache = weakref.ref(cache)
        except TypeError:  # None, or a list of states
            self._cache = lambda: cache

    def holds(self, cache: object) -> bool:
        """Whether a cache is this sequence's."""
        return cache is not None and self._cache() is cache

    @property
    def over(self) -> bool:
        """Whether its cache is gone, so that it cannot go on."""
        return self._cache() is None


def _held(cache: Any) -> int | None:
    """How many positions a cache holds; None where it does not say, whatever it does instead."""
    with suppress(Exception):
        return int(cache.get_seq_length())
    with suppress(Exception):  # a purely recurrent cache counts nothing
        return None if cache.has_previous_state() else 0
    return None


class Forward:
    """One forward of the model, as far as positions depend on it.

    Args:
        given: its arguments by name.
        lineages: the sequences that are known.

    Attributes:
        lineage: the sequence that it begins or goes on with.
        mask: its 2-D attention mask, `[batch, cached + pos]`.
        masked_otherwise: whether it was given a mask of another form.
        tokens: how many tokens a row has, where the arguments say so.
        width: positions of the stream at its first block.
    """

    def __init__(self, given: Mapping[str, Any], lineages: Sequence[Lineage]):
        cache = next((given[name] for name in CACHES if given.get(name) is not None), None)
        self.lineage = next((lineage for lineage in lineages if lineage.holds(cache)), None) or Lineage(cache)
        mask = given.get("attention_mask")
        self.mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
        self.masked_otherwise = mask is not None and self.mask is None
        tokens = (given.get(name) for name in ("input_ids", "inputs_embeds"))
        self.tokens = next((t.shape[1] for t in tokens if isinstance(t, Tensor) and t.dim() >= 2), None)
        self.width: int | None = None
        self._has_cache = cache is not None
        # Taken now: the first block that runs makes it longer. A cache may have been cropped since the last forward.
        held = _held(cache) if self._has_cache else 0
        self._held = self.lineage.length if held is None else held

    def cached(self, width: int) -> int:
        """Positions before the first of the `width` positions of this forward.

        Raises:
            InputError: nothing tells, or mask and cache contradict each other.
        """
        if self.mask is not None and self.mask.shape[1] >= width:
            by_mask = self.mask.shape[1] - width
            if self._has_cache and self._held not in (None, by_mask):
                raise InputError(
                    f"the attention_mask covers {self.mask.shape[1]} positions, but the cache holds {self._held} and "
                    f"the forward has {width}: pass a mask over both, or positions=None"
                )
            return by_mask
        if self._held is None:
            raise InputError(
                "the cache does not say how many positions it holds: pass a 2-D attention_mask over all of them, or "
                "positions=None"
            )
        return self._held

    def end(self, output: Any) -> None:
        """Note what it covered, and the cache that it made or went on with."""
        if self.width is not None:
            self.lineage.length = None if self._held is None else self._held + self.width
        keys = list(output.keys()) if isinstance(output, Mapping) else []
        made = next((output[name] for name in CACHES if name in keys and output[name] is not None), None)
        if made is not None:
            self.lineage.joined_by(made)


def named_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names of the module's forward."""
    return {**dict(zip(inspect.signature(module.forward).parameters, args, strict=False)), **kwargs}


@dataclass(frozen=True)
class Where:
    """Places in one stream.

    Attributes:
        columns: `[batch, n]` int64 on the stream's device; None for all positions.
        chosen: which of the asked positions these are, by their order.
    """

    columns: Tensor | None = None
    chosen: tuple[int, ...] = ()

    @property
    def nowhere(self) -> bool:
        """Whether this forward has none of the asked positions."""
        return self.columns is not None and not self.chosen

    def pick(self, stream: Tensor) -> Tensor:
        """`[batch, n, ...]` from `[batch, pos, ...]`."""
        return stream if self.columns is None else stream[self._rows(self.columns), self.columns]

    def put(self, stream: Tensor, values: Tensor) -> Tensor:
        """The stream `[batch, pos, ...]` with `[batch, n, ...]` in these places; the stream itself is not changed."""
        return values if self.columns is None else stream.index_put((self._rows(self.columns), self.columns), values)

    @staticmethod
    def _rows(columns: Tensor) -> Tensor:
        return torch.arange(len(columns), device=columns.device)[:, None]


NOWHERE = Where(torch.empty(0, 0, dtype=torch.int64))


class Positions:
    """The positions that a context manager was asked for.

    Args:
        asked: None for all, else distinct ints, negative ones counted from the last token of each row.

    Attributes:
        reach: one more than the last position that a forward had.

    Raises:
        InputError: one was given twice, or none.
    """

    def __init__(self, asked: Sequence[int] | None):
        if asked is not None and (not asked or len(set(asked)) < len(asked)):
            raise InputError(f"positions {list(asked)}: pass None for all of them, or distinct ints")
        self.asked = asked
        self.reach = 0
        self._prompts: list[tuple[Lineage, Forward]] = []

    def within(self, forward: Forward, stream: Tensor) -> Where:
        """Where the asked positions lie in a stream `[batch, pos, ...]` of a forward.

        Raises:
            InputError: a position is padding in some row, or cannot be told.
        """
        if self.asked is None:
            return Where()
        batch, width = stream.shape[:2]
        if forward.tokens not in (None, width):
            raise InputError(
                f"the stream has {width} positions for {forward.tokens} tokens, so positions cannot be told: pass "
                "positions=None"
            )
        continues = self._continues(forward)
        if continues and max(self.asked) < 0:
            return NOWHERE
        cached = forward.cached(width)
        end = cached + width
        self.reach = max(self.reach, end)
        mask = None if forward.mask is None else forward.mask != 0
        if mask is not None and mask.shape != (batch, end):
            raise InputError(
                f"the attention_mask has shape {list(mask.shape)}, but the stream has {batch} rows and {width} "
                "positions, so positions cannot be told: pass positions=None"
            )
        found = {}
        for index, position in enumerate(self.asked):
            if position < 0 and not continues:
                found[index] = _from_end(-position, forward, batch, end, mask)
            elif cached <= position < end:
                found[index] = _counted(position, batch, mask)
        if not found:
            return NOWHERE
        columns = torch.stack([column.to(stream.device) for column in found.values()], 1) - cached
        if columns.min() < 0:
            raise InputError(f"positions {list(self.asked)}: a negative one lies before this forward, in the cache")
        if (columns.sort(1).values.diff(dim=1) == 0).any():
            raise InputError(f"positions {list(self.asked)}: two of them are the same token in some row")
        return Where(columns, tuple(found))

    def _continues(self, forward: Forward) -> bool:
        """Whether an earlier forward of its sequence was seen here, so that negative positions are already fixed."""
        for lineage, first in self._prompts:
            if lineage is forward.lineage:
                return first is not forward
        self._prompts = [(lineage, first) for lineage, first in self._prompts if not lineage.over]
        self._prompts.append((forward.lineage, forward))
        return False


def _counted(position: int, batch: int, mask: Tensor | None) -> Tensor:
    if mask is not None and not mask[:, position].all():
        row = int((~mask[:, position]).nonzero()[0])
        raise InputError(
            f"position {position} is padding in row {row}: pass a negative position, counted from each row's last "
            "token, or one row at a time"
        )
    return torch.full((batch,), position)


def _from_end(back: int, forward: Forward, batch: int, end: int, mask: Tensor | None) -> Tensor:
    if mask is None:
        if forward.masked_otherwise:
            raise InputError("negative positions need a 2-D attention_mask: pass one, or positions >= 0")
        if back > end:
            raise InputError(f"position -{back} does not exist in rows of {end} tokens")
        return torch.full((batch,), end - back)
    rank = mask.long().flip(1).cumsum(1).flip(1)  # 1 at the last real token, 2 at the one before it
    if (rank[:, 0] < back).any():
        row = int((rank[:, 0] < back).nonzero()[0])
        raise InputError(f"position -{back} does not exist in row {row}, which has {int(rank[row, 0])} tokens")
    return ((rank == back) & mask).long().argmax(1)
