"""Which parameters of a model belong to which block, to the embeddings, to the final norm and to the head."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from tracer.errors import InputError
from tracer.models.plain import Adapter, evaluating

OUTER = ("embeddings", "norm", "head")
"""The parts outside the blocks."""


@dataclass(frozen=True)
class Part:
    """Parameters that are trained or frozen together.

    Attributes:
        module: dotted name of the module that holds them all, where there is one.
        sizes: how many numbers each parameter holds, by its name in `named_parameters`.
    """

    module: str | None
    sizes: Mapping[str, int]

    @property
    def numbers(self) -> int:
        """How many numbers all of them hold."""
        return sum(self.sizes.values())

    def as_dict(self) -> dict[str, Any]:
        """Plain data for `run.json`."""
        return {"module": self.module, "sizes": dict(self.sizes)}


@dataclass(frozen=True)
class Parts:
    """Every parameter of a model, with the part that uses it.

    A parameter that several parts share (a tied head, a block that is called at several depths) stands in each.

    Attributes:
        blocks: by depth.
        embeddings: what runs before the blocks: of tokens, of positions, projections of these.
        norm: what runs after the blocks, without the head.
        head: the unembedding.
        idle: what text does not run through, e.g. a vision tower.
        total: numbers in all parameters, each counted once.
    """

    blocks: tuple[Part, ...]
    embeddings: Part
    norm: Part
    head: Part
    idle: Part
    total: int

    @property
    def tied(self) -> bool:
        """Whether the head and the embeddings share a parameter."""
        return bool(self.head.sizes.keys() & self.embeddings.sizes.keys())

    def as_dict(self) -> dict[str, Any]:
        """Plain data for `run.json`."""
        outer = {name: getattr(self, name).as_dict() for name in (*OUTER, "idle")}
        return {"blocks": [block.as_dict() for block in self.blocks], **outer, "total": self.total}


def parts_of(model: nn.Module, adapter: Adapter) -> Parts:
    """Sort the parameters of a model into its parts, by one forward of a probe.

    Args:
        model: a causal language model of Hugging Face.
        adapter: its blocks, found or named.

    Raises:
        InputError: a block is no module of its own, so that it has no parameters of its own.
    """
    anatomy, modules = adapter.anatomy, dict(model.named_modules())
    for call in anatomy.calls:
        if call.last is not None or call.module not in modules:
            raise InputError(f"block {call.index} of {anatomy.model_class} is no module, so it cannot be trained alone")
    with _called(model) as called, evaluating(model):
        adapter.forward(adapter.probe)
    # A tied parameter has one name; the modules that hold it say which parts it belongs to.
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}

    def part(module: str | None, held: Iterable[nn.Parameter]) -> Part:
        names = dict.fromkeys(name_of[id(parameter)] for parameter in held)
        return Part(module, {name: sizes[name] for name in names})

    head = anatomy.head if anatomy.head in modules else None
    tail = [name for name in anatomy.tail if name in modules]
    inside = [call.module for call in anatomy.calls]
    blocks = tuple(part(name, modules[name].parameters()) for name in inside)
    of_head = list(modules[head].parameters()) if head else []
    own_head = {id(module) for module in modules[head].modules()} if head else set()
    after = [
        parameter
        for name in tail
        for module in modules[name].modules()
        if id(module) not in own_head
        for parameter in module.parameters(recurse=False)
    ]
    taken = {id(m) for name in (*inside, *tail, *filter(None, [head])) for m in modules[name].modules()}
    before: list[nn.Parameter] = []
    idle: list[nn.Parameter] = []
    for module in model.modules():
        if id(module) not in taken:
            (before if module in called else idle).extend(module.parameters(recurse=False))
    used = {id(parameter) for held in (before, after, of_head) for parameter in held}
    used |= {id(parameter) for name in inside for parameter in modules[name].parameters()}
    return Parts(
        blocks,
        part(None, before),
        part(None, after),
        part(head, of_head),
        part(None, (parameter for parameter in idle if id(parameter) not in used)),
        sum(sizes.values()),
    )


@contextmanager
def _called(model: nn.Module) -> Iterator[set[nn.Module]]:
    """The modules that are called meanwhile."""
    called: set[nn.Module] = set()
    handles = [
        module.register_forward_pre_hook(lambda module, _arguments: called.add(module)) for module in model.modules()
    ]
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()
