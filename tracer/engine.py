"""All ablations of a sweep in one pass over the blocks, and the plain way as its oracle.

At block b the batch holds the clean stream and every variant that was ablated earlier; the block runs once on all of
them; then the variants that ablate b are added. For L blocks that is L + L(L - 1)/2 block-runs per probe instead of
L(L + 1) for a loop over whole forwards, and every weight is read once where the rows fit in one call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from tracer.ablations import Edits, Variant
from tracer.models.plain import Adapter, BlockSite, State
from tracer.models.selfcheck import Engine
from tracer.models.streams import concatenated, copied, positions_of, rows_of, state_batch_dims
from tracer.models.tokens import TokenBatch

DEFAULT_BATCH_TOKENS = 2048
"""Most tokens in one call of a block; never changes a result."""


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
        clean: `resid[d]` for d = 0..L.
        ablated: `resid[L]` of each variant, in the order in which the variants were given.
    """

    clean: tuple[Tensor, ...]
    ablated: tuple[Tensor, ...]


@dataclass
class _Chunk:
    """Variants that go through a block together, copy after copy of the batch."""

    state: State
    variants: list[int] = field(default_factory=list)


def run(
    adapter: Adapter,
    batch: TokenBatch,
    reads: Reads,
    variants: Sequence[Variant],
    edits: Edits,
    *,
    engine: Engine,
    batch_tokens: int = DEFAULT_BATCH_TOKENS,
    on_tokens: Callable[[int], object] = lambda tokens: None,
) -> ReadStreams:
    """Clean streams at every depth and the final stream of every ablation, at the read positions.

    Args:
        adapter: the opened model.
        batch: the probes' tokens.
        reads: where to read.
        variants: the ablations.
        edits: how an ablation acts on this batch.
        engine: `onepass`, or `full` (one forward per ablation, for models that cannot be resumed).
        batch_tokens: most tokens in one call of a block (at least one copy of the batch).
        on_tokens: called with the number of tokens whenever a block has run on some; see `block_tokens`.
    """
    if engine == "full":
        return _full(adapter, batch, reads, variants, edits, on_tokens)
    return _onepass(adapter, batch, reads, variants, edits, batch_tokens, on_tokens)


def block_tokens(n_blocks: int, variants: Sequence[Variant], tokens: int, engine: Engine) -> int:
    """How many tokens pass through blocks in `run`, counted once per block: the work of a batch."""
    runs = n_blocks + sum(n_blocks if engine == "full" else n_blocks - 1 - v.block for v in variants)
    return runs * tokens


def _onepass(
    adapter: Adapter,
    batch: TokenBatch,
    reads: Reads,
    variants: Sequence[Variant],
    edits: Edits,
    batch_tokens: int,
    on_tokens: Callable[[int], object],
) -> ReadStreams:
    anatomy = adapter.anatomy
    dims = state_batch_dims(anatomy)
    most_copies = max(1, batch_tokens // batch.ids.numel())
    clean: list[Tensor] = []
    chunks: list[_Chunk] = []

    def visit(site: BlockSite) -> State:
        clean.append(positions_of(anatomy, site.resid, reads.rows, reads.positions))
        before = copied(site.state)
        after = site.run()
        on_tokens(batch.ids.numel())
        for chunk in chunks:
            chunk.state = site.run(chunk.state, len(chunk.variants))
            on_tokens(len(chunk.variants) * batch.ids.numel())
        for index, variant in enumerate(variants):
            if variant.block == site.index:
                _add(chunks, index, _ablated(adapter, edits, variant, before, after), dims, most_copies)
        if site.index == anatomy.n_blocks - 1:
            assert after[0] is not None
            clean.append(positions_of(anatomy, after[0], reads.rows, reads.positions))
        return after

    adapter.run(batch, visit, logits=False)
    ablated: dict[int, Tensor] = {}
    for chunk in chunks:
        for copy, index in enumerate(chunk.variants):
            stream = rows_of(chunk.state, dims, copy * len(batch), (copy + 1) * len(batch))[0]
            assert stream is not None
            ablated[index] = positions_of(anatomy, stream, reads.rows, reads.positions)
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


def _ablated(adapter: Adapter, edits: Edits, variant: Variant, before: State, after: State) -> State:
    """State after a block under an ablation."""
    rows_first, as_model = adapter.anatomy.rows_first, adapter.anatomy.as_model
    assert before[0] is not None
    assert after[0] is not None
    edited = edits.apply(variant, rows_first(before[0]), rows_first(after[0]))
    return (as_model(edited), *(before if edits.skips(variant) else after)[1:])


def _full(
    adapter: Adapter,
    batch: TokenBatch,
    reads: Reads,
    variants: Sequence[Variant],
    edits: Edits,
    on_tokens: Callable[[int], object],
) -> ReadStreams:
    anatomy = adapter.anatomy
    last = anatomy.n_blocks - 1

    def forward(variant: Variant | None) -> list[Tensor]:
        seen: list[Tensor] = []

        def visit(site: BlockSite) -> State:
            if variant is None:
                seen.append(positions_of(anatomy, site.resid, reads.rows, reads.positions))
            before = copied(site.state)
            out = site.run()
            on_tokens(batch.ids.numel())
            if variant is not None and variant.block == site.index:
                out = _ablated(adapter, edits, variant, before, out)
            if site.index == last:
                assert out[0] is not None
                seen.append(positions_of(anatomy, out[0], reads.rows, reads.positions))
            return out

        adapter.run(batch, visit, logits=False)
        return seen

    return ReadStreams(tuple(forward(None)), tuple(forward(variant)[0] for variant in variants))
