"""Hooks on the blocks of a module, shared by all context managers that are open on it.

One set of hooks per module, so that what several context managers do at one place happens in the order in which they
were entered. The owner's own hooks see what flows through the model: a stream is taken and edited before the owner's
pre-hooks, and an output edited before the owner's forward hooks, which still act on it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tracer.errors import HookError, InputError
from tracer.hooks.chain import Blocks
from tracer.hooks.positions import Forward, Lineage, Positions, Where, named_arguments
from tracer.models.nested import get, replaced
from tracer.models.plain import Arguments, State
from tracer.models.sublayers import Sublayer


class Operation:
    """What one context manager does in every forward while it is open.

    Args:
        name: what its user called.
        blocks: the blocks that it acts on.
        positions: where it acts.
        places: the depths, or block numbers, at which it must fire, with their names in messages.

    Attributes:
        depths: depths at which it sees the stream.
        contributions: blocks whose contribution it sees.
        sublayers: per block, the sub-layers whose contribution it sees.
    """

    depths: frozenset[int] = frozenset()
    contributions: frozenset[int] = frozenset()
    sublayers: Mapping[int, tuple[Sublayer, ...]] = {}

    def __init__(self, name: str, blocks: Blocks, positions: Sequence[int] | None, places: Mapping[int, str]):
        self.name = name
        self.blocks = blocks
        self.positions = Positions(positions)
        self.ran = False
        self._unseen = {place: set(positions or ()) for place in places}
        self._silent = set(places)
        self._places = places

    def at_depth(self, depth: int, stream: Tensor, forward: Forward) -> Tensor | None:
        """Another stream `[batch, pos, ...]` for this depth, or None to leave it as it is."""
        raise NotImplementedError

    def at_block(self, block: int, before: State, after: State, forward: Forward) -> State:
        """Another state after a block."""
        raise NotImplementedError

    def at_sublayer(
        self, block: int, sublayer: Sublayer, arguments: Arguments, output: Any, shape: torch.Size, forward: Forward
    ) -> Any:
        """Another output of a sub-layer, in a block whose stream has this shape in the model's layout."""
        raise NotImplementedError

    @property
    def modules(self) -> set[str]:
        """Names of the sub-layers' modules."""
        return {sublayer.module for found in self.sublayers.values() for sublayer in found}

    def arguments(self, module: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments that a forward gets on top of its own."""
        return {}

    def beside(self, others: Sequence["Operation"]) -> None:
        """Refuse what cannot be done beside other operations that are open already."""

    def where(self, place: int, forward: Forward, stream: Tensor) -> Where:
        """Where it acts in the stream `[batch, pos, ...]` of a forward; notes that it fired."""
        where = self.positions.within(forward, stream)
        self._silent.discard(place)
        if self.positions.asked is not None:
            self._unseen[place] -= {self.positions.asked[index] for index in where.chosen}
        return where

    def check(self) -> None:
        """Everything that was asked for has happened.

        Raises:
            HookError: something did not fire; says what and why.
        """
        if not self.ran:
            raise HookError(f"{self.name} did nothing: no forward of {type(self.blocks.root).__name__} ran inside it")
        if self._silent:
            silent = ", ".join(self._places[place] for place in sorted(self._silent))
            raise HookError(f"{self.name} did not fire at {silent}: not called in any forward inside it")
        for place, positions in self._unseen.items():
            if positions:
                raise HookError(
                    f"{self.name} did not fire at {self._places[place]}, position {min(positions)}: the forwards "
                    f"inside it reached positions below {self.positions.reach}"
                )


class _BlockCall:
    """A block call in progress: its number, its stream's shape in the model's layout, who takes part, what fired.

    With its state before, if somebody needs it.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        shape: torch.Size,
        before: State | None,
        operations: tuple[Operation, ...],
    ):
        self.index = index
        self.module = module
        self.shape = shape
        self.before = before
        self.operations = operations
        self.fired: Counter[str] = Counter()


class Dispatcher:
    """The hooks on one module while context managers are open on it.

    Args:
        blocks: where the hooks go.
    """

    def __init__(self, blocks: Blocks):
        self.blocks = blocks
        self.operations: list[Operation] = []
        self.paused = False
        adapter = blocks.adapter
        self._indices: dict[nn.Module, list[int]] = {}
        for index, name in enumerate(blocks.names):
            self._indices.setdefault(adapter.modules[name], []).append(index)
        prefixes = {name[:i] for name in blocks.names for i, letter in enumerate(name) if letter == "."} | {""}
        self._ancestors = {adapter.modules[name]: name for name in sorted(prefixes)}
        self._handles: list[RemovableHandle] = []
        self._sublayer_handles: dict[str, RemovableHandle] = {}
        self._lineages: list[Lineage] = []
        self._running: list[nn.Module] = []
        self._forward = Forward({}, ())
        self._called: set[int] = set()
        self._calls: list[_BlockCall] = []
        self._returned: _BlockCall | None = None

    def enter(self, operation: Operation) -> None:
        """Let an operation take part from now on."""
        operation.beside(self.operations)
        if not self.operations:
            self._install()
        self.operations.append(operation)
        for name in operation.modules - self._sublayer_handles.keys():
            hook = partial(self._after_sublayer, name)
            module = self.blocks.adapter.modules[name]
            self._sublayer_handles[name] = module.register_forward_hook(hook, with_kwargs=True, prepend=True)

    def leave(self, operation: Operation) -> None:
        """Take its hooks away, and with the last operation all of them."""
        if operation in self.operations:
            self.operations.remove(operation)
        needed = {name for other in self.operations for name in other.modules}
        for name in self._sublayer_handles.keys() - needed:
            self._sublayer_handles.pop(name).remove()
        if not self.operations:
            while self._handles:
                self._handles.pop().remove()

    def routes(self, depth: int) -> dict[nn.Module, Any]:
        """What to call in place of the blocks before a depth, so that they hand on what they receive."""
        return {module: partial(self._route, depth, module) for module, i in self._indices.items() if i[0] < depth}

    def _install(self) -> None:
        for module in self._ancestors:
            self._handles.append(module.register_forward_pre_hook(self._before_forward, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after_forward, always_call=True))
        for module in self._indices:
            self._handles.append(module.register_forward_pre_hook(self._before_block, with_kwargs=True, prepend=True))
            self._handles.append(module.register_forward_hook(self._after_block, prepend=True))
        last = self.blocks.adapter.modules[self.blocks.names[-1]]
        self._handles.append(last.register_forward_hook(self._after_last))

    # A forward begins with the outermost module around the blocks that is called: the user may call an inner one.

    def _before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self.paused or not self.operations:
            return None
        _refuse_second_runs(module)
        name = self._ancestors[module]
        outer = self._ancestors[self._running[-1]] if self._running else None
        if outer is not None and name != outer and (outer == "" or name.startswith(outer + ".")):
            self._running.append(module)
            return None
        given = named_arguments(module, args, kwargs)
        self._begin(Forward(given, self._lineages))
        # What an interrupted forward left behind goes here: its end was not seen.
        self._running = [module]
        added = {
            key: value for operation in self.operations for key, value in operation.arguments(module, given).items()
        }
        return (args, {**kwargs, **added}) if added else None

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.paused or module not in self._running:
            return
        del self._running[self._running.index(module) :]
        if not self._running:
            self._forward.end(output)
            kept = [lineage for lineage in self._lineages if not lineage.over and lineage is not self._forward.lineage]
            self._lineages = [*kept, self._forward.lineage]

    def _begin(self, forward: Forward) -> None:
        self._forward = forward
        self._called = set()
        self._calls = []

    def _index(self, module: nn.Module) -> int:
        """Which block call this one is, by the order of the calls."""
        indices = self._indices[module]
        index = next((index for index in indices if index not in self._called), None)
        if index is not None:
            return index
        if not self._running:  # the blocks are called by hand, and this is the next round
            self._begin(Forward({}, ()))
            return indices[0]
        if len(indices) == 1 and "_call_impl" in module.__dict__:  # a trace runs it on more rows
            return indices[0]
        raise HookError(
            f"block {indices[0]} ({self.blocks.names[indices[0]]}) was called more often in one forward than the "
            f"{len(indices)} times in which its depths were found"
        )

    def _before_block(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self.paused or not self.operations:
            return None
        _refuse_second_runs(module)
        index = self._index(module)
        self._called.add(index)
        operations = tuple(self.operations)
        arguments: Arguments = {"args": args, "kwargs": kwargs}
        path = self.blocks.anatomy.input_path
        stream = self._checked(index, get(arguments, path))
        new = self._edited(index, stream, operations)
        if new is not stream:
            arguments = replaced(arguments, {path: new})
        before = None
        if any(index in operation.contributions for operation in operations):
            state = (get(arguments, place) for place in self.blocks.adapter.input_paths)
            # Copies: the block, or a hook of its owner, may edit its input in place.
            before = tuple(part.clone() if isinstance(part, Tensor) else None for part in state)
        self._calls.append(_BlockCall(index, module, new.shape, before, operations))
        return None if new is stream else (arguments["args"], arguments["kwargs"])

    def _after_block(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.paused:
            return None
        while self._calls:  # a call that an exception ended is still in the list
            call = self._calls.pop()
            if call.module is module:
                self._returned = call if call.index == self.blocks.n_blocks - 1 else None
                return self._output(call, output)
        return None

    def _output(self, call: _BlockCall, output: Any) -> Any:
        for operation in call.operations:
            for sublayer in operation.sublayers.get(call.index, ()):
                if call.fired[sublayer.module] != 1:
                    raise HookError(
                        f"{operation.name} did not fire: {sublayer.module}, the {sublayer.role} of block {call.index}, "
                        f"was called {call.fired[sublayer.module]} times in this forward, not once: something else is "
                        "run in its place"
                    )
        if call.before is None:
            return None
        paths = self.blocks.adapter.output_paths
        state: State = (self._checked(call.index, get(output, paths[0])), *(get(output, path) for path in paths[1:]))
        for operation in call.operations:
            if call.index in operation.contributions:
                state = operation.at_block(call.index, call.before, state, self._forward)
        return replaced(output, dict(zip(paths, state, strict=True)))

    def _after_last(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """The last depth is what the tail receives: the output of the last block after the owner's hooks."""
        call, self._returned = self._returned, None
        if self.paused or call is None:
            return None
        path = self.blocks.anatomy.output_path
        stream = self._checked(call.index, get(output, path))
        new = self._edited(call.index + 1, stream, call.operations)
        return None if new is stream else replaced(output, {path: new})

    def _edited(self, depth: int, stream: Tensor, operations: Sequence[Operation]) -> Tensor:
        """The stream at a depth, in the model's layout, after everything that is done to it there."""
        anatomy = self.blocks.anatomy
        if self._forward.width is None and anatomy.position_dim is not None:
            self._forward.width = stream.shape[anatomy.position_dim]
        for operation in operations:
            operation.ran = True
            if depth in operation.depths:
                new = operation.at_depth(depth, anatomy.rows_first(stream), self._forward)
                stream = stream if new is None else anatomy.as_model(new)
        return stream

    def _after_sublayer(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any) -> Any:
        if self.paused or not self._calls:
            return None
        call, new = self._calls[-1], output
        call.fired[name] += 1
        for operation in call.operations:
            for sublayer in operation.sublayers.get(call.index, ()):
                if sublayer.module == name:
                    arguments = {"args": args, "kwargs": kwargs}
                    new = operation.at_sublayer(call.index, sublayer, arguments, new, call.shape, self._forward)
        return None if new is output else new

    def _route(self, depth: int, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Called in place of a block: hands on what it receives where it lies before `depth`."""
        index = self._index(module)
        if index >= depth:
            return type(module)._call_impl(module, *args, **kwargs)
        self._called.add(index)
        adapter = self.blocks.adapter
        arguments = {"args": args, "kwargs": kwargs}
        state: State = tuple(get(arguments, path) for path in adapter.input_paths)
        if index == self.blocks.n_blocks - 1:
            state = (self._edited(index + 1, self._checked(index, state[0]), tuple(self.operations)), *state[1:])
        return replaced(adapter.templates[index], dict(zip(adapter.output_paths, state, strict=True)))

    def _checked(self, index: int, stream: Any) -> Tensor:
        if not isinstance(stream, Tensor):
            raise HookError(
                f"block {index} ({self.blocks.names[index]}) was called without a hidden state in its place"
            )
        return stream


def _refuse_second_runs(module: nn.Module) -> None:
    """Refuse calls that are traced, to be run later without Python, and those that are run again for gradients."""
    if torch.compiler.is_compiling():
        raise InputError("hooks inside torch.compile may silently not fire: run the model uncompiled inside them")
    if (module.training and getattr(module, "gradient_checkpointing", False)) or torch._C._current_graph_task_id() >= 0:
        raise HookError(
            "gradient checkpointing runs blocks a second time during the backward pass, with or without these hooks: "
            "turn it off, or call model.eval()"
        )
