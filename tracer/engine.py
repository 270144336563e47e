"""All variants of a sweep in one pass over the blocks, and the plain way as its oracle.

A variant is the model's run with one edit of the residual stream: a block ablated, or a position patched. At block b
the batch holds the clean stream and every variant that departed from it earlier; the block runs once on all of them;
then the variants that depart there are added. For L blocks and one ablation each that is L + L(L - 1)/2 block-runs per
probe instead of L(L + 1) for a loop over whole forwards, and every weight is read once where the rows fit in one call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar, runtime_checkable

from torch import Tensor

from tracer.models.anatomy import Anatomy
from tracer.models.plain import Adapter, BlockSite, State, Visitor
from tracer.models.selfcheck import Engine
from tracer.models.streams import concatenated, copied, positions_of, rows_of, state_batch_dims
from tracer.models.tokens import TokenBatch

DEFAULT_BATCH_TOKENS = 2048
"""Most tokens in one call of a block; never changes a result."""


@runtime_checkable
class StreamVariant(Protocol):
    """One edit of the stream."""

    @property
    def depth(self) -> int:
        """The first depth, 0..L, at which the stream differs from the clean one."""
        ...


V = TypeVar("V", bound=StreamVariant, contravariant=True)


@runtime_checkable
class StreamEdits(Protocol[V]):
    """How variants act on one batch."""

    def at_depth(self, variant: V, site: BlockSite, before: State | None, clean: Callable[[], State]) -> State:
        """The state at the variant's depth.

        Args:
            variant: the edit.
            site: the block before that depth; block 0 for depth 0.
            before: the state that this block received; None for depth 0.
            clean: gives the clean state at the depth. It may run the block, which an edit that runs the block itself
                must not let happen: some blocks write to what others read.
        """
        ...


@dataclass(frozen=True)
class Reads:
    """Where to read: `(row, position)` pairs of a batch, in a fixed order. Both `[reads]` int64."""

    rows: Tensor
    positions: Tensor

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class ReadStreams:
    """Residual streams at the read positions, as sequences of one token in the model's own layout.

    Attributes:
        clean: `resid[d]` for d = 0..L; None where the positions of the stream are not tokens.
        ablated: `resid[L]` of each variant, in the order in which the variants were given; None likewise.
    """

    clean: tuple[Tensor, ...] | None
    ablated: tuple[Tensor, ...] | None


@dataclass
class _Chunk:
    """Variants that go through a block together, copy after copy of the batch."""

    state: State
    variants: list[int] = field(default_factory=list)


def run(
    adapter: Adapter,
    batch: TokenBatch,
    reads: Reads,
    variants: Sequence[V],
    edits: StreamEdits[V],
    *,
    engine: Engine,
    batch_tokens: int = DEFAULT_BATCH_TOKENS,
    on_tokens: Callable[[int], object] = lambda tokens: None,
) -> ReadStreams:
    """Clean streams at every depth and the final stream of every variant, at the read positions.

    Args:
        adapter: the opened model.
        batch: the probes' tokens.
        reads: where to read.
        variants: what is done to the stream.
        edits: how it is done on this batch.
        engine: `onepass`, or `full` (one forward per variant, for models that cannot be resumed).
        batch_tokens: most tokens in one call of a block (at least one copy of the batch).
        on_tokens: called with the number of tokens whenever a block has run on some; see `block_tokens`.
    """
    if adapter.anatomy.position_dim is None:
        on_tokens(block_tokens(adapter.anatomy.n_blocks, variants, batch.ids.numel(), "full"))
        return ReadStreams(None, None)  # nothing to read; its lens runs the forwards
    if engine == "full":
        return _full(adapter, batch, reads, variants, edits, on_tokens)
    return _onepass(adapter, batch, reads, variants, edits, batch_tokens, on_tokens)


def block_tokens(n_blocks: int, variants: Sequence[StreamVariant], tokens: int, engine: Engine) -> int:
    """How many tokens pass through blocks in `run`, counted once per block: the work of a batch."""
    runs = n_blocks + sum(n_blocks if engine == "full" else n_blocks - v.depth for v in variants)
    return runs * tokens


def departing(variant: V, edits: StreamEdits[V]) -> Visitor:
    """A visitor that runs the model with one variant's edit."""

    def visit(site: BlockSite) -> State:
        if variant.depth == 0 and site.index == 0:
            return site.run(edits.at_depth(variant, site, None, partial(copied, site.state)))
        if site.index + 1 != variant.depth:
            return site.run()
        return edits.at_depth(variant, site, copied(site.state), site.run)

    return visit


def _onepass(
    adapter: Adapter,
    batch: TokenBatch,
    reads: Reads,
    variants: Sequence[V],
    edits: StreamEdits[V],
    batch_tokens: int,
    on_tokens: Callable[[int], object],
) -> ReadStreams:
    anatomy = adapter.anatomy
    dims = state_batch_dims(anatomy)
    most_copies = max(1, batch_tokens // batch.ids.numel())
    clean: list[Tensor] = []
    chunks: list[_Chunk] = []

    def depart(site: BlockSite, depth: int, before: State | None, state: State) -> None:
        for index, variant in enumerate(variants):
            if variant.depth == depth:
                _add(chunks, index, edits.at_depth(variant, site, before, lambda: state), dims, most_copies)

    def visit(site: BlockSite) -> State:
        clean.append(_read(anatomy, site.state, reads))
        before = copied(site.state)
        after = site.run()
        on_tokens(batch.ids.numel())
        if site.index == 0:
            depart(site, 0, None, before)
        for chunk in chunks:
            chunk.state = site.run(chunk.state, len(chunk.variants))
            on_tokens(len(chunk.variants) * batch.ids.numel())
        depart(site, site.index + 1, before, after)
        if site.index == anatomy.n_blocks - 1:
            clean.append(_read(anatomy, after, reads))
        return after

    adapter.run(batch, visit, logits=False)
    ablated: dict[int, Tensor] = {}
    for chunk in chunks:
        for copy, index in enumerate(chunk.variants):
            state = rows_of(chunk.state, dims, copy * len(batch), (copy + 1) * len(batch))
            ablated[index] = _read(anatomy, state, reads)
    return ReadStreams(tuple(clean), tuple(ablated[index] for index in range(len(variants))))


def _add(chunks: list[_Chunk], index: int, state: State, dims: Sequence[int | None], most_copies: int) -> None:
    """Put a new variant into the last chunk that has room, or into a new one."""
    last = chunks[-1] if chunks else None
    absent = [part is None for part in state]
    if last and len(last.variants) < most_copies and [part is None for part in last.state] == absent:
        last.state = concatenated([last.state, state], dims)
        last.variants.append(index)
    else:
        chunks.append(_Chunk(state, [index]))


def _full(
    adapter: Adapter,
    batch: TokenBatch,
    reads: Reads,
    variants: Sequence[V],
    edits: StreamEdits[V],
    on_tokens: Callable[[int], object],
) -> ReadStreams:
    anatomy = adapter.anatomy

    def forward(inner: Visitor, depths: bool) -> list[Tensor]:
        seen: list[Tensor] = []

        def visit(site: BlockSite) -> State:
            if depths:
                seen.append(_read(anatomy, site.state, reads))
            out = inner(site)
            on_tokens(batch.ids.numel())
            if site.index == anatomy.n_blocks - 1:
                seen.append(_read(anatomy, out, reads))
            return out

        adapter.run(batch, visit, logits=False)
        return seen

    clean = forward(lambda site: site.run(), True)
    return ReadStreams(tuple(clean), tuple(forward(departing(v, edits), False)[0] for v in variants))


def _read(anatomy: Anatomy, state: State, reads: Reads) -> Tensor:
    assert state[0] is not None
    return positions_of(anatomy, state[0], reads.rows, reads.positions)
