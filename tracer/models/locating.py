"""Where a causal language model keeps its residual stream, found by running it once.

No table of architectures: a probe forward records which modules are called with what, and the blocks are the items
of the container whose calls hand a float tensor from one to the next. A second probe of another shape tells which
dimensions are the batch and which the positions. What is found is only a proposal: `selfcheck.py` proves it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from tracer.errors import InputError, ModelRefused
from tracer.models.anatomy import PROBE_LENGTH, PROBE_ROWS, SECOND_LENGTH, SECOND_ROWS, Anatomy, BlockCall
from tracer.models.mixers import mixer_kind
from tracer.models.nested import Path, leaves


@dataclass(frozen=True)
class ModuleCall:
    """One recorded call: the module, what it received (`{"args": ..., "kwargs": ...}`) and what it returned.

    `written` names the mutable containers among its arguments whose items the call changed; `last` the module that the
    output is from, where it is another one.
    """

    name: str
    module: nn.Module
    arguments: dict[str, Any]
    output: Any
    written: tuple[str, ...]
    last: str | None = None


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


@dataclass(frozen=True)
class Located:
    """An anatomy and the block calls of the first probe that it was found in."""

    anatomy: Anatomy
    calls: tuple[ModuleCall, ...]


def locate(
    model: nn.Module,
    first: Sequence[ModuleCall],
    second: Sequence[ModuleCall],
    vocab: int,
    blocks: Sequence[str] | None = None,
) -> Located:
    """Find the anatomy from the calls of all modules in two probe forwards of different shape.

    Args:
        model: the model that was run.
        first: calls in a forward of `PROBE_ROWS` x `PROBE_LENGTH` tokens, in order of return.
        second: calls in a forward of `SECOND_ROWS` x `SECOND_LENGTH` tokens.
        vocab: width of the model's logits.
        blocks: names of the modules that are the blocks, where they shall not be searched for; `FIRST:LAST` for a block
            that lies in its parent's forward, from the input of one module to the output of another.

    Raises:
        ModelRefused: no container of modules hands a hidden state from item to item.
        InputError: a named block does not exist, or the named ones hand no hidden state on.
    """
    found, pairs = block_calls(model, first) if blocks is None else _named_blocks(model, first, blocks)
    names = {call.name for call in found}
    again = _spanned(model, second, blocks) if blocks else [call for call in second if call.name in names]
    if [call.name for call in again] != [call.name for call in found]:
        raise ModelRefused(
            f"the blocks of {type(model).__name__} are not called in the same order for inputs of another shape, "
            "so they cannot be traced"
        )
    output_path, input_path = residual_paths(pairs)
    carried = carried_paths(found, output_path, input_path)
    stream = dict(leaves(found[0].arguments))[input_path]
    stream_again = dict(leaves(again[0].arguments))[input_path]
    batch_dim, position_dim = _dims(stream.shape, stream_again.shape)
    if batch_dim is None:
        raise ModelRefused(
            f"the hidden state of {type(model).__name__} has shape {list(stream.shape)} for {PROBE_ROWS} x "
            f"{PROBE_LENGTH} tokens, in which the batch cannot be found"
        )
    if position_dim is not None and stream.shape[position_dim] != PROBE_LENGTH:
        position_dim = None
    calls = tuple(
        BlockCall(i, a.name, _mixer(model, a.module, i, len(found)), _argument_dims(a, b), a.last)
        for i, (a, b) in enumerate(zip(found, again, strict=True))
    )
    head, tied = _head(model)
    anatomy = Anatomy(
        model_class=type(model).__name__,
        calls=calls,
        input_path=input_path,
        output_path=output_path,
        carried=carried,
        batch_dim=batch_dim,
        position_dim=position_dim,
        stream_shape=tuple(stream.shape),
        shared_state=tuple(dict.fromkeys(name for call in found for name in call.written)),
        tail=_tail(first, found[-1]),
        head=head,
        tied=tied,
        vocab=vocab,
    )
    return Located(anatomy, tuple(found))


Links = Counter[tuple[Path, Path]]
"""How often each (output path, input path) links two consecutive block calls."""


def block_calls(model: nn.Module, calls: Sequence[ModuleCall]) -> tuple[list[ModuleCall], Links]:
    """The block calls: those of the longest chain of items of one container, or of several containers in turn."""
    containers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
    }
    chains = _chains({name: list(module.children()) for name, module in containers.items()}, calls)
    if not chains:  # blocks that are attributes of their parent
        chains = _chains(dict(_siblings(model)), calls)
    if not chains:
        raise ModelRefused(
            f"{type(model).__name__} has no list of modules whose calls hand a hidden state from one to the next, "
            "so it has no blocks that could be traced; if it has, name them: blocks=[...]"
        )
    longest = max(chains, key=lambda name: max(chains[name][1].values()))
    blocks, pairs = chains[longest]
    path = residual_paths(pairs)
    # Stacks of the same kind that are called in turn are one row of blocks.
    alike = [c for c, p in chains.values() if type(c[0].module) is type(blocks[0].module) and path in p]
    alike = [c for c in alike if _shape(c[0], path[1]) == _shape(blocks[0], path[1])]
    together = {id(call) for chain in alike for call in chain}
    merged = [call for call in calls if id(call) in together]
    repeated = len({call.name for call in merged}) < len(merged)
    linked = links_of(merged)[path] > sum(p[path] for c, p in chains.values() if c in alike)
    return (merged, links_of(merged)) if len(alike) > 1 and (repeated or linked) else (blocks, pairs)


def residual_paths(links: Links) -> tuple[Path, Path]:
    """Where the residual lies in a block's output and in its arguments: the paths that link most calls."""
    return min(links, key=lambda pair: (-links[pair], len(pair[0]), str(pair)))


def _shape(call: ModuleCall, path: Path) -> tuple[int, ...]:
    return tuple(dict(leaves(call.arguments))[path].shape)


def _chains(
    groups: Mapping[str, Sequence[nn.Module]], calls: Sequence[ModuleCall]
) -> dict[str, tuple[list[ModuleCall], Links]]:
    """Groups of modules whose calls hand a tensor from one to the next, by the name of the group."""
    chains: dict[str, tuple[list[ModuleCall], Links]] = {}
    for name, modules in groups.items():
        items = set(modules)
        inside = [call for call in calls if call.module in items]
        pairs = links_of(inside)
        if pairs:
            chains[name] = (inside, pairs)
    # A chain inside an item of another chain (the layers of an MLP inside a block) is not the stack of blocks.
    return {
        name: found
        for name, found in chains.items()
        if not any(name != other and name.startswith(other + ".") for other in chains)
    }


def links_of(calls: Sequence[ModuleCall]) -> Links:
    """How often each pair of paths links two consecutive calls."""
    return Counter(pair for a, b in pairwise(calls) for pair in _links(a, b))


def _siblings(model: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    """Children of one parent that are of one class, by the name of the parent and their class."""
    for name, parent in model.named_modules():
        by_class: dict[type, list[nn.Module]] = {}
        for child in parent.children():
            by_class.setdefault(type(child), []).append(child)
        for kind, children in by_class.items():
            if len(children) > 1:
                yield f"{name}.{kind.__name__}".lstrip("."), children


def _named_blocks(
    model: nn.Module, calls: Sequence[ModuleCall], names: Sequence[str]
) -> tuple[list[ModuleCall], Links]:
    """The calls of what the user names as the blocks, and what links them."""
    inside = _spanned(model, calls, names)
    pairs = links_of(inside)
    if not pairs:
        raise InputError(
            f"the {len(names)} modules named as blocks of {type(model).__name__} hand no hidden state from one to the "
            f"next ({len(inside)} calls of them were seen): name the modules that pass the residual stream on"
        )
    return inside, pairs


def _spanned(model: nn.Module, calls: Sequence[ModuleCall], names: Sequence[str]) -> list[ModuleCall]:
    """The calls of modules, and from the first to the last of `FIRST:LAST`, in the order of their ends."""
    modules = dict(model.named_modules())
    ends = {name: name.partition(":")[::2] for name in names}
    unknown = [part for first, last in ends.values() for part in (first, last or first) if part not in modules]
    if unknown:
        raise InputError(f"{type(model).__name__} has no module {unknown[0]!r}: pass names of model.named_modules()")
    starts = {modules[first]: last for first, last in ends.values()}
    begun: dict[str, ModuleCall] = {}
    found = []
    for call in calls:
        if call.name in begun:
            found.append(replace(begun.pop(call.name), output=call.output, last=call.name))
        if call.module in starts:
            last = starts[call.module]
            if last:
                begun[last] = call
            else:
                found.append(call)
    return found


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


def carried_paths(blocks: Sequence[ModuleCall], output_path: Path, input_path: Path) -> tuple[tuple[Path, Path], ...]:
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
        str(key): [id(item) for item in _items(value)]
        for key, value in named
        if isinstance(value, MutableMapping | MutableSequence | Cache)
    }


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, Cache):  # some models of older releases make one even when told not to
        return [part for layer in getattr(value, "layers", ()) for part in vars(layer).values()]
    return value.values() if isinstance(value, Mapping) else value


def _tail(calls: Sequence[ModuleCall], last: ModuleCall) -> tuple[str, ...]:
    """Outermost modules that are called, and return, after the last block has returned."""
    end = last.last or last.name
    after = calls[max(i for i, call in enumerate(calls) if call.name == end) + 1 :]
    parts = end.split(".")
    ancestors = {".".join(parts[:i]) for i in range(len(parts))}
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


def _mixer(model: nn.Module, block: nn.Module, index: int, n_blocks: int) -> str:
    return mixer_kind(block) or _layer_type(model, index, n_blocks) or type(block).__name__


def _layer_type(model: nn.Module, index: int, n_blocks: int) -> str | None:
    config = getattr(model, "config", None)
    for name in ("layer_types", "layers_block_type"):
        types = getattr(config, name, None)
        if isinstance(types, Sequence) and len(types) == n_blocks:
            return str(types[index])
    return None
