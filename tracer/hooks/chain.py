"""The chain of blocks that hooks act on: found once per module, and refused where hooks might silently not fire."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule
from transformers import PreTrainedModel

from tracer.errors import InputError, ModelRefused
from tracer.models.anatomy import Anatomy
from tracer.models.plain import PlainAdapter, forward_logits
from tracer.models.selfcheck import SelfCheck, open_plain
from tracer.models.sublayers import Sublayers
from tracer.models.traced import TracedModel


@dataclass
class Known:
    """What was measured on a module; without references to it, so that it can be forgotten with the module.

    Attributes:
        modules: the modules that it had then.
        adapter: what makes an adapter of it again: anatomy, templates, probe.
        resumable: whether a run can be resumed from a stream without running the blocks before it.
        sublayers: its sub-layers, once somebody asked for them.
    """

    modules: tuple[weakref.ref[nn.Module], ...] = ()
    adapter: tuple[Any, ...] | None = None
    resumable: bool = False
    sublayers: Sublayers | None = None


_KNOWN: weakref.WeakKeyDictionary[nn.Module | PlainAdapter, Known] = weakref.WeakKeyDictionary()
"""By the module, or by the adapter of a `TracedModel`: one model may be opened at several chains of blocks."""


@dataclass(frozen=True)
class Blocks:
    """A module whose blocks hand a residual stream from one to the next; made by `tracer.hooks.blocks`.

    Attributes:
        root: the module that is run.
        adapter: how its blocks are called.
        known: what was measured on it.
    """

    root: nn.Module
    adapter: PlainAdapter
    known: Known = field(default_factory=Known)

    @property
    def anatomy(self) -> Anatomy:
        """How the residual stream runs through it."""
        return self.adapter.anatomy

    @property
    def n_blocks(self) -> int:
        """Number of block calls, L."""
        return self.anatomy.n_blocks

    @property
    def resumable(self) -> bool:
        """Whether a run can be resumed from a stream without running the blocks before it."""
        return self.known.resumable

    @property
    def names(self) -> tuple[str, ...]:
        """Dotted name of the module of each block call."""
        return tuple(call.module for call in self.anatomy.calls)

    def same_chain(self, other: "Blocks") -> bool:
        """Whether both are the same blocks of the same module, read at the same places."""
        a, b = self.anatomy, other.anatomy
        return (
            self.root is other.root
            and self.names == other.names
            and (a.input_path, a.output_path, a.carried) == (b.input_path, b.output_path, b.carried)
            and (a.batch_dim, a.position_dim) == (b.batch_dim, b.position_dim)
        )

    def __str__(self) -> str:
        return f"{self.n_blocks} blocks of {type(self.root).__name__}: {', '.join(self.names)}"


def find_blocks(target: Any) -> Blocks:
    """The blocks of what a context manager was given; see `tracer.hooks` for what that may be.

    Raises:
        InputError: it is something else, compiled, or opened at blocks that are no modules.
        ModelRefused: it cannot be read.
    """
    if isinstance(target, nn.Module):
        refuse_compiled(target)
    if isinstance(target, Blocks):
        refuse_compiled(target.root)
        return target
    if isinstance(target, TracedModel):
        refuse_compiled(target.model)
        assert isinstance(target.adapter, PlainAdapter)
        _refuse_spans(target.anatomy)
        known = _known(target.adapter, target.model)
        known.resumable = _resumable(target.anatomy, target.self_check)
        return Blocks(target.model, target.adapter, known)
    if not isinstance(target, PreTrainedModel):
        raise InputError(
            f"hooks on a {type(target).__name__}: pass a TracedModel, a causal language model of Hugging Face, or "
            "hooks.blocks(module, *example_inputs)"
        )
    known = _known(target, target)
    if known.adapter is None:
        try:
            adapter, check = open_plain(target)
        except ModelRefused as error:
            raise ModelRefused(f"{error}; hooks.blocks(model, *example_inputs) takes any chain of blocks") from error
        known.adapter = (adapter.anatomy, adapter.templates, adapter.probe)
        known.resumable = _resumable(adapter.anatomy, check)
        return Blocks(target, adapter, known)
    anatomy, templates, probe = known.adapter
    return Blocks(target, PlainAdapter(target, anatomy, templates, partial(forward_logits, target), probe), known)


def refuse_compiled(root: nn.Module) -> None:
    """Refuse compiled modules: hooks that are added after compilation may silently not fire.

    Raises:
        InputError: the module, or one inside it, is compiled; says what to pass instead.
    """
    for name, module in root.named_modules():
        where = f"module {name!r} of the model" if name else "the model"
        if isinstance(module, OptimizedModule):
            raise InputError(
                f"{where} is wrapped by torch.compile, where hooks may silently not fire: pass the model that was "
                "given to torch.compile (compiled._orig_mod), uncompiled"
            )
        if module._compiled_call_impl is not None:
            raise InputError(
                f"{where} was compiled in place ({type(module).__name__}.compile()), where hooks may silently not "
                "fire: pass a copy that is not compiled (copy.deepcopy(model) is one)"
            )


def _refuse_spans(anatomy: Anatomy) -> None:
    """Refuse blocks from one module to another: hooks on the first would act on a part of the block."""
    span = next((call for call in anatomy.calls if call.last is not None), None)
    if span is not None:
        raise InputError(
            f"hooks on block {span.index} ({span.module}:{span.last}), which is no module but lies in its parent's "
            "forward: pass a model whose blocks are modules, or put hooks of PyTorch on these two"
        )


def _resumable(anatomy: Anatomy, check: SelfCheck) -> bool:
    """Whether the stream alone is all that the blocks after it need."""
    return check.engine == "onepass" and not anatomy.carried


def _known(key: nn.Module | PlainAdapter, root: nn.Module) -> Known:
    """What is known of a module, or of it as an adapter opens it, as long as it is made of the same modules."""
    known = _KNOWN.get(key)
    modules = tuple(root.modules())
    if known is None or not _same(known.modules, modules):
        known = _KNOWN[key] = Known(tuple(weakref.ref(module) for module in modules))
    return known


def _same(references: Sequence["weakref.ref[nn.Module]"], modules: Sequence[nn.Module]) -> bool:
    return len(references) == len(modules) and all(
        reference() is module for reference, module in zip(references, modules, strict=True)
    )
