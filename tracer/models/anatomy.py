"""The anatomy of a model: where its residual stream runs. `locating.py` finds it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import Tensor

from tracer.models.nested import Path

# Primes, so that a dimension of a recorded tensor says what it is by its size.
PROBE_ROWS, PROBE_LENGTH = 3, 11
SECOND_ROWS, SECOND_LENGTH = 2, 13


@dataclass(frozen=True)
class BlockCall:
    """One call of a block, in the order of the forward pass.

    Attributes:
        index: 0-based block number; `resid[index]` is its input, `resid[index + 1]` its output.
        module: dotted name of the module that is called.
        mixer: kind of its sequence mixer, e.g. `attention`, `mamba2`, `gated_deltanet`, `attention+mamba2`.
        argument_batch_dims: for each tensor among its arguments the dimension that grows with the batch, or None.
        last: dotted name of the module whose output is that of the block, where the block is no module but lies in
            its parent's forward, from the input of `module` to the output of this one.
    """

    index: int
    module: str
    mixer: str
    argument_batch_dims: Mapping[Path, int | None]
    last: str | None = None


@dataclass(frozen=True)
class Anatomy:
    """How the residual stream runs through a model; printable, and stored with every result.

    Attributes:
        model_class: class of the opened model.
        calls: the block calls in order.
        input_path: where the residual lies in a block's arguments, e.g. `("args", 0)`.
        output_path: where it lies in a block's output; `()` when the output is the tensor itself.
        carried: other tensors that a block computes for the next one, as (output path, input path).
        batch_dim: batch dimension of the residual stream.
        position_dim: position dimension of the residual stream; None where its positions are not tokens (patches of
            bytes, chunks with padding, several streams one after another).
        stream_shape: shape of the residual of a 3 x 11-token probe.
        shared_state: names of mutable containers that blocks receive and write to.
        tail: the outermost modules called after the last block, in order.
        head: name of the unembedding module, or None when the model does not declare one.
        tied: whether the unembedding and the token embedding are one parameter.
        vocab: width of the logits.
    """

    model_class: str
    calls: tuple[BlockCall, ...]
    input_path: Path
    output_path: Path
    carried: tuple[tuple[Path, Path], ...]
    batch_dim: int
    position_dim: int | None
    stream_shape: tuple[int, ...]
    shared_state: tuple[str, ...]
    tail: tuple[str, ...]
    head: str | None
    tied: bool
    vocab: int

    @property
    def n_blocks(self) -> int:
        """Number of block calls, L."""
        return len(self.calls)

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.stream_shape[-1]

    def rows_first(self, stream: Tensor) -> Tensor:
        """A stream in the model's layout as `[batch, pos, ...]`, a view; without token positions as `[batch, ...]`."""
        if self.position_dim is None:
            return stream.movedim(self.batch_dim, 0)
        return stream.movedim((self.batch_dim, self.position_dim), (0, 1))

    def as_model(self, stream: Tensor) -> Tensor:
        """A stream as `rows_first` gives it in the model's layout, a view."""
        if self.position_dim is None:
            return stream.movedim(0, self.batch_dim)
        return stream.movedim((0, 1), (self.batch_dim, self.position_dim))

    @property
    def mixers(self) -> tuple[str, ...]:
        """Kind of the sequence mixer of each block."""
        return tuple(call.mixer for call in self.calls)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for `run.json`."""
        return {
            "model_class": self.model_class,
            "blocks": [{"block": c.index, "module": c.module, "mixer": c.mixer} for c in self.calls],
            "input_path": list(self.input_path),
            "output_path": list(self.output_path),
            "carried": [[list(out), list(into)] for out, into in self.carried],
            "batch_dim": self.batch_dim,
            "position_dim": self.position_dim,
            "stream_shape": list(self.stream_shape),
            "shared_state": list(self.shared_state),
            "tail": list(self.tail),
            "head": self.head,
            "tied": self.tied,
            "vocab": self.vocab,
        }

    def __str__(self) -> str:
        runs = [(kind, [i for i, _ in run]) for kind, run in groupby(enumerate(self.mixers), lambda item: item[1])]
        spans = ((f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]), kind) for kind, run in runs)
        blocks = ", ".join(f"{span} {kind}" for span, kind in spans)
        pattern = re.sub(r"\d+", "*", self.calls[0].module)
        output = "output" + "".join(f"[{key!r}]" for key in self.output_path)
        lines = [
            f"class          {self.model_class}",
            f"blocks         {self.n_blocks}, called as {pattern}",
            f"mixers         {blocks}",
            f"residual       {_spell(self.input_path)} -> {output}, shape {list(self.stream_shape)} for a "
            f"{PROBE_ROWS} x {PROBE_LENGTH} probe (batch dim {self.batch_dim}, "
            + ("positions are not tokens)" if self.position_dim is None else f"position dim {self.position_dim})"),
            f"tail           {' -> '.join(self.tail) or '(none found)'}",
            f"unembedding    {self.head or '(not declared)'}, {self.vocab} tokens, "
            + ("tied to the embedding" if self.tied else "not tied to the embedding"),
        ]
        if self.carried:
            lines.append("carried        " + ", ".join(_spell(into) for _, into in self.carried))
        if self.shared_state:
            lines.append("shared state   " + ", ".join(self.shared_state))
        return "\n".join(lines)


def _spell(path: Path) -> str:
    if path[:1] == ("kwargs",) and len(path) == 2:
        return f"{path[1]}="
    return "argument " + ".".join(str(key) for key in path[1:])
