"""The logit lens: next-token logits from the residual stream at any depth, by the model's own tail.

After nostalgebraist (2020). The tail is never re-implemented: the model runs with its blocks passed over. Where that
can be done on single positions (`ReplayedTail`), many depths and ablations share one call; where what follows the
blocks needs more than the last residual, the lens at depth d is a whole forward without the blocks from d on
(`WholeForwards`). Both are the same function of the stream on models that allow both.
A tuned lens (Belrose et al. 2023) translates the stream of a depth before the same tail reads it.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from tracer.engine import Reads, ReadStreams, StreamEdits, StreamVariant, departing
from tracer.models.plain import Adapter, BlockSite, State
from tracer.models.selfcheck import Tail
from tracer.models.streams import copied, unembed
from tracer.models.tokens import TokenBatch

Translate = Callable[[int, Tensor], Tensor]
"""From a depth and the stream there (single positions in the model's layout) to another stream of the same shape."""


@runtime_checkable
class Lens(Protocol):
    """Logits of the items of one batch: item d = 0..L is depth d, item L + 1 + v is the output of variant v."""

    def logits(self, items: Sequence[int], reads: Sequence[int]) -> Float[Tensor, "items reads vocab"]:
        """Logits of some items at some of the batch's read positions."""
        ...


class ReplayedTail:
    """The tail on single positions, all items of a call in one batch.

    Args:
        adapter: the opened model.
        batch: the tokens.
        reads: where the streams were read.
        streams: what the engine returned.
        translate: from a depth and its stream to the stream that is unembedded; a tuned lens.
    """

    def __init__(
        self,
        adapter: Adapter,
        batch: TokenBatch,
        reads: Reads,
        streams: ReadStreams,
        translate: Translate | None = None,
    ):
        assert streams.clean is not None
        assert streams.ablated is not None
        self._adapter = adapter
        clean = streams.clean
        if translate is not None:
            clean = tuple(translate(depth, stream) for depth, stream in enumerate(clean))
        self._streams = (*clean, *streams.ablated)
        self._tokens = batch.ids[reads.rows, reads.positions]

    def logits(self, items: Sequence[int], reads: Sequence[int]) -> Float[Tensor, "items reads vocab"]:
        """See `Lens`."""
        dim = self._adapter.anatomy.batch_dim
        index = torch.as_tensor(reads)
        chosen = [self._streams[item] for item in items]
        device = chosen[-1].device  # a model spread over devices leaves its streams where its blocks are
        stacked = torch.cat([x.index_select(dim, index.to(x.device)).to(device) for x in chosen], dim)
        logits = unembed(self._adapter, stacked, self._tokens[index].repeat(len(items)))
        return logits.view(len(items), len(reads), -1)


class WholeForwards:
    """One forward per item: depth d without the blocks from d on, or the variant's own.

    Every block runs, since others may need what it writes elsewhere, but the stream goes on as it was before it.

    Args:
        adapter: the opened model.
        batch: the tokens.
        reads: where to read.
        variants: what is done to the stream.
        edits: how.
    """

    def __init__(
        self,
        adapter: Adapter,
        batch: TokenBatch,
        reads: Reads,
        variants: Sequence[StreamVariant],
        edits: StreamEdits,
    ):
        self._adapter, self._batch, self._reads = adapter, batch, reads
        self._variants, self._edits = variants, edits

    def logits(self, items: Sequence[int], reads: Sequence[int]) -> Float[Tensor, "items reads vocab"]:
        """See `Lens`."""
        index = torch.as_tensor(reads)
        rows, positions = self._reads.rows[index], self._reads.positions[index]
        found = [self._forward(item) for item in items]
        return torch.stack([logits[rows.to(logits.device), positions.to(logits.device)] for logits in found])

    def _forward(self, item: int) -> Tensor:
        depths = self._adapter.anatomy.n_blocks + 1

        def without(site: BlockSite) -> State:
            before = copied(site.state)
            out = site.run()
            return out if site.index < item else before

        visit = without if item < depths else departing(self._variants[item - depths], self._edits)
        logits = self._adapter.run(self._batch, visit)
        assert logits is not None
        return logits


def open_lens(
    tail: Tail,
    adapter: Adapter,
    batch: TokenBatch,
    reads: Reads,
    variants: Sequence[StreamVariant],
    edits: StreamEdits,
    streams: ReadStreams,
    translate: Translate | None = None,
) -> Lens:
    """The lens that the self-check allows; only a replayed tail can be tuned."""
    if tail == "whole":
        assert translate is None
        return WholeForwards(adapter, batch, reads, variants, edits)
    return ReplayedTail(adapter, batch, reads, streams, translate)
