"""Where a causal language model keeps its residual stream, found by running it once.

No table of architectures: a probe forward records which modules are called with what, and the blocks are the items
of the container whose calls hand a float tensor from one to the next. A second probe of another shape tells which
dimensions are the batch and which the positions. What is found is only a proposal: `selfcheck.py` proves it.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tracer.errors import ModelRefused
from tracer.models.nested import Path, leaves

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
    """

    index: int
    module: str
    mixer: str
    argument_batch_dims: Mapping[Path, int | None]


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
        position_dim: position dimension of the residual stream.
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
    position_dim: int
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
        """A stream in the model's layout as `[batch, pos, ...]`, a view."""
        return stream.movedim((self.batch_dim, self.position_dim), (0, 1))

    def as_model(self, stream: Tensor) -> Tensor:
        """A stream `[batch, pos, ...]` in the model's layout, a view."""
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
            f"{PROBE_ROWS} x {PROBE_LENGTH} probe (batch dim {self.batch_dim}, position dim {self.position_dim})",
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


@dataclass(frozen=True)
class ModuleCall:
    """One recorded call: the module, what it received (`{"args": ..., "kwargs": ...}`) and what it returned.

    `written` names the mutable containers among its arguments whose items the call changed.
    """

    name: str
    module: nn.Module
    arguments: dict[str, Any]
    output: Any
    written: tuple[str, ...]


@contextmanager
def recorded_calls(modules: Mapping[str, nn.Module]) -> Iterator[list[ModuleCall]]:
    """Record every call of the given modules, in the order in which they return; hooks are removed by handle.

    Arguments are taken before the module's own pre-hooks run and outputs after its own hooks, so that a user's hooks
    count as part of the module.
    """
    calls: list[ModuleCall] = []
    pending: list[tuple[nn.Module, dict[str, Any], dict[str, list[int]]]] = []
    handles = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = {"args": args, "kwargs": dict(kwargs)}
        pending.append((module, arguments, _contents(arguments)))

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        while pending:
            called, arguments, contents = pending.pop()
            if called is module:
                written = tuple(key for key, items in _contents(arguments).items() if items != contents[key])
                calls.append(ModuleCall(names[module], module, arguments, output, written))
                return

    names = {module: name for name, module in modules.items()}
    try:
        for module in names:
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(after, with_kwargs=True))
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def locate(model: nn.Module, first: Sequence[ModuleCall], second: Sequence[ModuleCall], vocab: int) -> Anatomy:
    """Find the anatomy from the calls of all modules in two probe forwards of different shape.

    Args:
        model: the model that was run.
        first: calls in a forward of `PROBE_ROWS` x `PROBE_LENGTH` tokens, in order of return.
        second: calls in a forward of `SECOND_ROWS` x `SECOND_LENGTH` tokens.
        vocab: width of the model's logits.

    Raises:
        ModelRefused: no container of modules hands a hidden state from item to item.
    """
    blocks, pairs, container = _blocks(model, first)
    block_names = {call.name for call in blocks}
    again = [call for call in second if call.name in block_names]
    if [call.name for call in again] != [call.name for call in blocks]:
        raise ModelRefused(
            f"the blocks of {type(model).__name__} are not called in the same order for inputs of another shape, "
            "so they cannot be traced"
        )
    (output_path, input_path), _ = min(pairs.items(), key=lambda item: (-item[1], len(item[0][0]), str(item[0])))
    carried = _carried(blocks, output_path, input_path)
    stream = dict(leaves(blocks[0].arguments))[input_path]
    stream_again = dict(leaves(again[0].arguments))[input_path]
    batch_dim, position_dim = _dims(stream.shape, stream_again.shape)
    if batch_dim is None or position_dim is None:
        raise ModelRefused(
            f"the hidden state of {type(model).__name__} has shape {list(stream.shape)} for {PROBE_ROWS} x "
            f"{PROBE_LENGTH} tokens, in which batch and position cannot be told apart"
        )
    calls = tuple(
        BlockCall(i, a.name, mixer_kind(a.module, _layer_type(model, i, len(blocks))), _argument_dims(a, b))
        for i, (a, b) in enumerate(zip(blocks, again, strict=True))
    )
    head, tied = _head(model)
    return Anatomy(
        model_class=type(model).__name__,
        calls=calls,
        input_path=input_path,
        output_path=output_path,
        carried=carried,
        batch_dim=batch_dim,
        position_dim=position_dim,
        stream_shape=tuple(stream.shape),
        shared_state=tuple(dict.fromkeys(name for call in blocks for name in call.written)),
        tail=_tail(first, blocks[-1], container),
        head=head,
        tied=tied,
        vocab=vocab,
    )


def _blocks(model: nn.Module, calls: Sequence[ModuleCall]) -> tuple[list[ModuleCall], Counter[tuple[Path, Path]], str]:
    """The block calls, how often each (output path, input path) links two of them, and the container's name."""
    candidates: dict[str, tuple[list[ModuleCall], Counter[tuple[Path, Path]]]] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            continue
        items = set(module.children())
        inside = [call for call in calls if call.module in items]
        pairs = Counter(pair for a, b in pairwise(inside) for pair in _links(a, b))
        if pairs:
            candidates[name] = (inside, pairs)
    # A chain inside an item of another chain (the layers of an MLP inside a block) is not the stack of blocks.
    outermost = {
        name: found
        for name, found in candidates.items()
        if not any(name != other and name.startswith(other + ".") for other in candidates)
    }
    if not outermost:
        raise ModelRefused(
            f"{type(model).__name__} has no list of modules whose calls hand a hidden state from one to the next, "
            "so it has no blocks that could be traced"
        )
    container = max(outermost, key=lambda name: max(outermost[name][1].values()))
    return *outermost[container], container


def _links(a: ModuleCall, b: ModuleCall) -> set[tuple[Path, Path]]:
    """Pairs of paths at which the output of call `a` is the input of call `b`."""
    outputs = [(path, x) for path, x in leaves(a.output) if x.is_floating_point() and x.dim() >= 3]
    inputs = [(path, y) for path, y in leaves(b.arguments) if y.is_floating_point() and y.dim() >= 3]
    return {
        (out, into)
        for out, x in outputs
        for into, y in inputs
        if x is y or (x.shape == y.shape and x.device == y.device and torch.equal(x, y))
    }


def _carried(blocks: Sequence[ModuleCall], output_path: Path, input_path: Path) -> tuple[tuple[Path, Path], ...]:
    """Tensors beside the residual that a block makes and the next one receives (router states, indexer indices)."""
    found: dict[tuple[Path, Path], None] = {}
    for a, b in pairwise(blocks):
        received = [x for _, x in leaves(a.arguments)]
        for out, x in leaves(a.output):
            if any(x is y for y in received):
                continue
            for into, y in leaves(b.arguments):
                if x is y and (out, into) != (output_path, input_path):
                    found[(out, into)] = None
    return tuple(found)


def _dims(shape: Sequence[int], again: Sequence[int]) -> tuple[int | None, int | None]:
    """Batch and position dimension of a tensor, from its shapes in the two probes."""
    batch = position = None
    for dim, (x, y) in enumerate(zip(shape, again, strict=True)):
        if x == y:
            continue
        if x * SECOND_ROWS == y * PROBE_ROWS or x * SECOND_ROWS * SECOND_LENGTH == y * PROBE_ROWS * PROBE_LENGTH:
            # The batch alone, or folded with heads ([batch * heads, ...]) or with positions ([batch * pos, ...]).
            batch = dim if batch is None else batch
        elif y - x == SECOND_LENGTH - PROBE_LENGTH:
            position = dim if position is None else position
    return batch, position


def _argument_dims(a: ModuleCall, b: ModuleCall) -> dict[Path, int | None]:
    again = dict(leaves(b.arguments))
    dims: dict[Path, int | None] = {}
    for path, x in leaves(a.arguments):
        y = again.get(path)
        if y is not None and y.dim() == x.dim():
            dims[path] = _dims(x.shape, y.shape)[0]
    return dims


def _contents(arguments: Mapping[str, Any]) -> dict[str, list[int]]:
    """Identities of the items of every mutable container among the arguments of a call."""
    named = (*enumerate(arguments["args"]), *arguments["kwargs"].items())
    return {
        str(key): [id(item) for item in (value.values() if isinstance(value, Mapping) else value)]
        for key, value in named
        if isinstance(value, MutableMapping | MutableSequence)
    }


def _tail(calls: Sequence[ModuleCall], last: ModuleCall, container: str) -> tuple[str, ...]:
    """Outermost modules that are called, and return, after the last block has returned."""
    after = list(calls)[[call is last for call in calls].index(True) + 1 :]
    ancestors = {container[:i] for i, letter in enumerate(container) if letter == "."} | {container, ""}
    names = [call.name for call in after if call.name not in ancestors]
    return tuple(name for name in names if not any(name.startswith(other + ".") for other in names))


def _head(model: nn.Module) -> tuple[str | None, bool]:
    if not isinstance(model, PreTrainedModel):  # a model of TransformerLens calls it so
        return ("unembed" if hasattr(model, "unembed") else None), False
    head = model.get_output_embeddings()
    if head is None:
        return None, False
    name = next((name for name, module in model.named_modules() if module is head), None)
    weight: Tensor | None = getattr(head, "weight", None)
    return name, weight is not None and weight is getattr(model.get_input_embeddings(), "weight", None)


# Kinds of sequence mixers by the words that class names and `layer_types` use for them. Only labels depend on this.
_MIXER_WORDS = (
    (r"gated_?delta_?net|deltanet|gdn", "gated_deltanet"),
    (r"delta_?attention|kimi_?delta|\bkda\b", "delta_attention"),
    (r"mamba_?2", "mamba2"),
    (r"mamba", "mamba"),
    (r"rwkv", "rwkv"),
    (r"m?lstm", "xlstm"),
    (r"rg_?lru|recurrentblock", "rg_lru"),
    (r"lightning|linear_?attention", "linear_attention"),
    (r"short_?conv|convmixer", "convolution"),
    (r"attention|attn", "attention"),
)


def mixer_kind(block: nn.Module, layer_type: str | None = None) -> str:
    """Name the sequence mixer of a block after its modules, else after the config's layer type; a label only."""
    found: list[tuple[str, str]] = []
    for name, module in block.named_modules():
        inner = any(name.startswith(outer + ".") for outer, _ in found)
        if module is block or inner or name.count(".") > 1 or isinstance(module, nn.Linear | nn.ModuleList):
            continue
        words = f"{name.rpartition('.')[2]} {type(module).__name__}".lower()
        if not re.search(r"norm\b|rotary|mlp|embedding|connection", words):
            found += [(name, kind) for pattern, kind in _MIXER_WORDS if re.search(pattern, words)][:1]
    return "+".join(sorted({kind for _, kind in found})) or layer_type or type(block).__name__


def _layer_type(model: nn.Module, index: int, n_blocks: int) -> str | None:
    config = getattr(model, "config", None)
    for name in ("layer_types", "layers_block_type"):
        types = getattr(config, name, None)
        if isinstance(types, Sequence) and len(types) == n_blocks:
            return str(types[index])
    return None
