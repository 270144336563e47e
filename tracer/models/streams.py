"""Residual streams of an opened model: read them, resume from one, unembed any of them by the model's own tail."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tracer.models.anatomy import Anatomy
from tracer.models.nested import Path
from tracer.models.plain import Adapter, BlockSite, State
from tracer.models.tokens import TokenBatch


@dataclass(frozen=True)
class Streams:
    """One forward, seen at every block; copies, which nothing that runs later can change.

    Attributes:
        inputs: state before each block; `inputs[d][0]` is `resid[d]`.
        outputs: state after each block; `outputs[-1][0]` is `resid[L]`.
        logits: `[batch, pos, vocab]`.
    """

    inputs: tuple[State, ...]
    outputs: tuple[State, ...]
    logits: Float[Tensor, "batch pos vocab"]

    @property
    def states(self) -> tuple[State, ...]:
        """States at depths 0..L."""
        return (*self.inputs, self.outputs[-1])


def read_streams(adapter: Adapter, batch: TokenBatch) -> Streams:
    """Run the model once and keep the residual stream before and after every block."""
    inputs: list[State] = []
    outputs: list[State] = []

    def visit(site: BlockSite) -> State:
        inputs.append(copied(site.state))
        out = site.run()
        outputs.append(copied(out))
        return out

    logits = adapter.run(batch, visit)
    assert logits is not None
    return Streams(tuple(inputs), tuple(outputs), logits)


def copied(state: State) -> State:
    """The state in tensors of its own: a hook of the model's owner may edit the model's in place."""
    return tuple(None if part is None else part.detach().clone() for part in state)


def resume(adapter: Adapter, batch: TokenBatch, depth: int, state: State, copies: int = 1) -> State:
    """The final state when the stream at `depth` is `state`; the blocks before it are passed through, not run.

    Args:
        adapter: the opened model.
        batch: the tokens that the state belongs to.
        depth: 0..L.
        state: with `copies` = n it holds n times the rows of `batch`, copy after copy.
        copies: how many times `state` holds the batch.
    """
    current = state
    n_blocks = adapter.anatomy.n_blocks

    def visit(site: BlockSite) -> State:
        nonlocal current
        if site.index >= depth:
            current = site.run(current, copies)
        return site.state

    if depth < n_blocks:
        adapter.run(batch, visit, logits=False)
    return current


def positions_of(
    anatomy: Anatomy, stream: Tensor, rows: Int[Tensor, " reads"], positions: Int[Tensor, " reads"]
) -> Tensor:
    """The stream at single positions, as `reads` sequences of one token in the stream's own layout.

    Only for anatomies whose stream positions are tokens.
    """
    picked = anatomy.rows_first(stream)[rows.to(stream.device), positions.to(stream.device)]
    return anatomy.as_model(picked.unsqueeze(1))


def unembed(adapter: Adapter, stream: Tensor, tokens: Int[Tensor, " reads"]) -> Float[Tensor, "reads vocab"]:
    """Logits of single-position streams by the model's own tail.

    The model runs with every block passed through and the last one returning `stream`, so that its own final norm,
    head, bias, scale and soft-cap do the rest.

    Args:
        adapter: the opened model.
        stream: `reads` sequences of one position, as `positions_of` gives them.
        tokens: the input token at each of these positions.
    """
    last = adapter.anatomy.n_blocks - 1
    logits = adapter.run(
        TokenBatch(tokens.reshape(-1, 1).cpu(), (1,) * len(tokens)),
        lambda site: (stream, *site.state[1:]) if site.index == last else site.state,
    )
    assert logits is not None
    return logits[:, -1]


def concatenated(states: Sequence[State], dims: Sequence[int | None]) -> State:
    """Join states along their batch dimensions, copy after copy."""
    if len(states) == 1:
        return states[0]
    return tuple(
        parts[0] if dim is None or parts[0] is None else torch.cat(list(parts), dim)
        for dim, *parts in zip(dims, *states, strict=True)
    )


def rows_of(state: State, dims: Sequence[int | None], start: int, stop: int) -> State:
    """Rows `start:stop` of a state, as views."""
    return tuple(
        part if dim is None or part is None else part.narrow(dim, start, stop - start)
        for dim, part in zip(dims, state, strict=True)
    )


def state_batch_dims(anatomy: Anatomy) -> tuple[int | None, ...]:
    """Batch dimension of the residual and of each carried tensor."""

    def of(path: Path) -> int | None:
        return next((c.argument_batch_dims[path] for c in anatomy.calls if path in c.argument_batch_dims), None)

    return (anatomy.batch_dim, *(of(into) for _, into in anatomy.carried))
