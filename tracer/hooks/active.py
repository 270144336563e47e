"""The context managers that are open, and running a module as if none were."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from tracer.hooks.chain import Blocks, find_blocks
from tracer.hooks.dispatch import Dispatcher, Operation
from tracer.models.plain import evaluating
from tracer.models.sublayers import Sublayers, find_sublayers

_ACTIVE: list[Dispatcher] = []


@contextmanager
def acting(operation: Operation) -> Iterator[Dispatcher]:
    """Let an operation take part while the context is open.

    Raises:
        HookError: on leaving without another exception, when something that it was asked for did not fire.
    """
    blocks = operation.blocks
    dispatcher = next((d for d in _ACTIVE if d.blocks.same_chain(blocks)), None) or Dispatcher(blocks)
    try:
        if dispatcher not in _ACTIVE:
            _ACTIVE.append(dispatcher)
        dispatcher.enter(operation)
        yield dispatcher
    finally:
        dispatcher.leave(operation)
        if not dispatcher.operations and dispatcher in _ACTIVE:
            _ACTIVE.remove(dispatcher)
    operation.check()


@contextmanager
def paused(root: nn.Module) -> Iterator[None]:
    """Run a module as if no context manager were open on it."""
    dispatchers = [d for d in _ACTIVE if d.blocks.root is root and not d.paused]
    routes = {}
    try:
        for dispatcher in dispatchers:
            dispatcher.paused = True
            for module in dispatcher.routes(dispatcher.blocks.n_blocks):
                if "_call_impl" in module.__dict__:
                    routes[module] = module.__dict__.pop("_call_impl")
        yield
    finally:
        for dispatcher in dispatchers:
            dispatcher.paused = False
        for module, route in routes.items():
            module.__dict__["_call_impl"] = route


def opened(target: Any) -> Blocks:
    """The blocks of what a context manager was given, found as if no other one were open."""
    with paused(target) if isinstance(target, nn.Module) else nullcontext():
        return find_blocks(target)


def sublayers_of(blocks: Blocks) -> Sublayers:
    """The sub-layers of the blocks, found and proven once per chain."""
    if blocks.known.sublayers is None:
        with paused(blocks.root), evaluating(blocks.root):
            blocks.known.sublayers = find_sublayers(blocks.adapter)
    return blocks.known.sublayers
