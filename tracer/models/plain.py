"""Any causal language model, driven block by block, with nothing but its own forward.

One primitive serves reading, ablating, resuming, the one-pass engine and the lens: `PlainAdapter.run` runs the
model's forward and hands every block call to a visitor, which decides what the block receives and what the model gets
back. The visitor may run the block once, several times on more rows than the model knows of, or not at all.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tracer.errors import HookError, ModelRefused
from tracer.models.anatomy import Anatomy
from tracer.models.nested import Path, get, leaves, replaced
from tracer.models.tokens import TokenBatch

State = tuple[Tensor | None, ...]
"""The residual stream, followed by what else the blocks carry from one to the next."""

Visitor = Callable[["BlockSite"], State]
"""Called at every block with its site; returns the state that the model receives as the block's output."""

Arguments = Mapping[str, Any]
"""What a call received: `{"args": ..., "kwargs": ...}`."""

OutputEdit = Callable[[Arguments, Any], Any]
"""Turns what a module inside a block received and returned into what it returns instead."""


@runtime_checkable
class Adapter(Protocol):
    """What the rest of LayerTracer needs of an opened model; every way of opening one provides it."""

    anatomy: Anatomy
    probe: TokenBatch
    modules: Mapping[str, nn.Module]
    forward: Callable[[TokenBatch], Tensor]

    def run(self, batch: TokenBatch, visit: Visitor, *, logits: bool = True) -> Tensor | None:
        """Run the model's forward with `visit` at every block; see `PlainAdapter.run`."""
        ...


class BlockSite:
    """One block call, as a visitor sees it.

    Attributes:
        index: 0-based block number.
        module: the block.
        state: the state that the model hands to the block; `state[0]` is `resid[index]`.
    """

    def __init__(
        self,
        adapter: "PlainAdapter",
        index: int,
        module: nn.Module,
        arguments: dict[str, Any],
        output: Any = None,
    ):
        anatomy = adapter.anatomy
        self.index = index
        self.module = module
        self._adapter = adapter
        self._arguments = arguments
        self._output = output
        self._over = output is not None
        self.state: State = tuple(get(arguments, path) for path in adapter.input_paths)
        if not isinstance(self.state[0], Tensor):
            raise HookError(f"block {index} was called without a hidden state at {anatomy.input_path}")

    @property
    def resid(self) -> Tensor:
        """The residual stream before this block, `[batch, pos, d_model]` (or the model's own layout)."""
        assert self.state[0] is not None
        return self.state[0]

    def run(
        self, state: State | None = None, copies: int = 1, edits: Mapping[nn.Module, OutputEdit] | None = None
    ) -> State:
        """Run the block, its own hooks included, and return its output state.

        Args:
            state: what the block receives; default the model's own. With `copies` = n it holds n times as many rows,
                copy after copy; all other arguments (masks, positions) are repeated to match.
            copies: how many times the model's batch `state` holds.
            edits: modules inside the block whose outputs are edited in this call.

        Raises:
            HookError: a module to be edited was not called exactly once.
        """
        if self._over:
            if state is not None or edits:
                raise HookError(f"block {self.index} lies in its parent's forward: it cannot be run on its own")
            return tuple(get(self._output, path) for path in self._adapter.output_paths)
        values = dict(zip(self._adapter.input_paths, state or self.state, strict=True))
        if copies > 1:
            values |= self._repeated(copies, values.keys())
        arguments = replaced(self._arguments, values)
        with edited_outputs(edits) if edits else nullcontext():
            output = self._adapter.call(self.module, arguments)
        if state is None or (self._output is None and copies == 1):
            self._output = output
        return tuple(get(output, path) for path in self._adapter.output_paths)

    def output(self, state: State) -> Any:
        """The block's output with `state` in its places; its other parts are the block's own or, unrun, None."""
        template = self._output if self._output is not None else self._adapter.templates[self.index]
        return replaced(template, dict(zip(self._adapter.output_paths, state, strict=True)))

    def _repeated(self, copies: int, given: Any) -> dict[Path, Tensor]:
        known = self._adapter.anatomy.calls[self.index].argument_batch_dims
        repeated = {}
        for path, tensor in leaves(self._arguments):
            if path in given:
                continue
            if path not in known:
                raise HookError(f"block {self.index} received an argument that the probe did not see: {path}")
            dim = known[path]
            if dim is not None and (tensor.shape[dim] > 1 or self.resid.shape[self._adapter.anatomy.batch_dim] == 1):
                repeated[path] = torch.cat([tensor] * copies, dim)
        return repeated


class _Stop(Exception):
    """Ends a forward after its last block, when nobody wants its logits."""


class PlainAdapter:
    """A live Hugging Face model opened with plain interception of its block calls; the model is not changed.

    Args:
        model: the model, in eval mode.
        anatomy: where its residual stream runs.
        outputs: one recorded output per block call, as templates for blocks that are not run.
        forward: the model's own forward, from tokens to logits.
        probe: the tokens that the anatomy was found with.

    Attributes:
        modules: all modules of the model by name.
    """

    def __init__(
        self,
        model: nn.Module,
        anatomy: Anatomy,
        outputs: Sequence[Any],
        forward: Callable[[TokenBatch], Tensor],
        probe: TokenBatch,
    ):
        self.forward = forward
        self.anatomy = anatomy
        self.probe = probe
        self.modules: Mapping[str, nn.Module] = dict(model.named_modules())
        self.input_paths = (anatomy.input_path, *(into for _, into in anatomy.carried))
        self.output_paths = (anatomy.output_path, *(out for out, _ in anatomy.carried))
        # Only the structure is kept: every tensor that is not part of the state becomes None.
        self.templates = [replaced(output, {path: None for path, _ in leaves(output)}) for output in outputs]
        self._blocks = [self.modules[call.module] for call in anatomy.calls if call.last is None]
        self._spans = [(self.modules[c.module], self.modules[c.last]) for c in anatomy.calls if c.last is not None]
        self._running = False

    def run(self, batch: TokenBatch, visit: Visitor, *, logits: bool = True) -> Tensor | None:
        """Run the model's forward on `batch` with `visit` at every block.

        Args:
            batch: the tokens, `[batch, pos]`.
            visit: called with a `BlockSite` at every block call, in order; what it returns goes to the model.
            logits: False ends the forward after the last block (and returns None), which saves the unembedding.

        Returns:
            The model's logits `[batch, pos, vocab]`, or None.

        Raises:
            HookError: a block was not called, or called more often than in the probe.
        """
        calls = _Calls(self, visit, logits)
        result = None
        routes: dict[nn.Module, Callable[..., Any]]
        routes = {block: partial(self._route, calls.intercept, block) for block in self._blocks}
        for first, last in self._spans:
            routes |= self._span_routes(calls.intercept, first, last)
        with intercepted(routes), suppress(_Stop):
            result = self.forward(batch)
        expected = self.anatomy.n_blocks
        if calls.seen != expected:
            raise HookError(
                f"{calls.seen} of {expected} block calls were seen: the model did not run its blocks as in the probe"
            )
        return result

    def call(self, module: nn.Module, arguments: dict[str, Any]) -> Any:
        """Call a block as the model would, with the hooks that its owner put on it."""
        self._running = True
        try:
            return type(module)._call_impl(module, *arguments["args"], **arguments["kwargs"])
        finally:
            self._running = False

    @staticmethod
    def _span_routes(
        intercept: Callable[..., Any], first: nn.Module, last: nn.Module
    ) -> dict[nn.Module, Callable[..., Any]]:
        """For a block that lies in its parent's forward: note how it begins, and visit it where it ends."""
        begun: list[dict[str, Any]] = []

        def begin(*args: Any, **kwargs: Any) -> Any:
            begun.append({"args": args, "kwargs": kwargs})
            return type(first)._call_impl(first, *args, **kwargs)

        def end(*args: Any, **kwargs: Any) -> Any:
            output = type(last)._call_impl(last, *args, **kwargs)
            return intercept(last, begun.pop(), output) if begun else output

        return {first: begin, last: end}

    def _route(
        self, intercept: Callable[[nn.Module, dict[str, Any]], Any], block: nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        if self._running:  # a block inside a block, called by the outer one
            return type(block)._call_impl(block, *args, **kwargs)
        return intercept(block, {"args": args, "kwargs": kwargs})


class _Calls:
    """The block calls of one forward, counted and handed to a visitor."""

    def __init__(self, adapter: PlainAdapter, visit: Visitor, logits: bool):
        self._adapter, self._visit, self._logits = adapter, visit, logits
        self.seen = 0

    def intercept(self, module: nn.Module, arguments: dict[str, Any], output: Any = None) -> Any:
        """What the model gets in place of a block's output."""
        expected = self._adapter.anatomy.n_blocks
        if self.seen >= expected:
            raise HookError(f"more than the {expected} block calls of the probe: {type(module).__name__}")
        site = BlockSite(self._adapter, self.seen, module, arguments, output)
        self.seen += 1
        output = site.output(self._visit(site))
        if self.seen == expected and not self._logits:
            raise _Stop
        return output


@contextmanager
def intercepted(routes: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Call something else in place of modules, on these module objects only, until the context ends.

    The call itself is replaced, not `forward` and not by hooks: a block that is passed through must not run its
    owner's hooks, and one that is run on more rows must run them on all of these.

    Raises:
        HookError: one of them is intercepted already.
    """
    taken = [module for module in routes if "_call_impl" in module.__dict__]
    if taken:
        raise HookError(
            f"the calls of {type(taken[0]).__name__} are already intercepted; a trace inside another trace of "
            "the same model is not possible"
        )
    try:
        for module, route in routes.items():
            module.__dict__["_call_impl"] = route
        yield
    finally:
        for module in routes:
            module.__dict__.pop("_call_impl", None)


@contextmanager
def edited_outputs(edits: Mapping[nn.Module, OutputEdit]) -> Iterator[None]:
    """Edit what modules return, their own hooks included, until the context ends.

    Raises:
        HookError: one of them was not called exactly once: something else than the module was run in its place.
    """
    fired = dict.fromkeys(edits, 0)

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        fired[module] += 1
        output = type(module)._call_impl(module, *args, **kwargs)
        return edits[module]({"args": args, "kwargs": kwargs}, output)

    with intercepted({module: partial(called, module) for module in edits}):
        yield
    wrong = [module for module, count in fired.items() if count != 1]
    if wrong:
        raise HookError(
            f"{type(wrong[0]).__name__} was called {fired[wrong[0]]} times inside its block, not once: its output "
            "cannot be edited"
        )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode and no gradients while inside; every module's own mode is restored."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def forward_logits(model: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """The model's logits `[batch, pos, vocab]` for right-padded tokens, without cache; only what its forward takes.

    Raises:
        ModelRefused: it returns no such logits.
    """
    accepted = inspect.signature(model.forward).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    device = _input_device(model)
    arguments: dict[str, Any] = {"input_ids": batch.ids.to(device)}
    if "attention_mask" in accepted or anything:
        arguments["attention_mask"] = batch.mask.to(device)
    if "use_cache" in accepted or anything:
        arguments["use_cache"] = False
    if "output_router_logits" in accepted:  # blocks that are passed through have none to give
        arguments["output_router_logits"] = False
    output = model(**arguments)
    logits = getattr(output, "logits", None)
    if logits is None and isinstance(output, tuple) and model.get_output_embeddings() is not None:
        logits = output[0]
    if not isinstance(logits, Tensor) or logits.shape[:-1] != batch.ids.shape:
        raise ModelRefused(
            f"{type(model).__name__} returns no next-token logits of shape [batch, pos, vocab]: pass a causal language "
            "model with its head (a ...ForCausalLM class)"
        )
    return logits


def _input_device(model: nn.Module) -> torch.device:
    """Where the model wants its tokens; offloaded weights are on `meta` and accelerate's hooks move the input."""
    devices = (p.device for p in model.parameters() if p.device.type != "meta")
    return next(devices, torch.device("cpu"))
