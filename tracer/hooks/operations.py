"""What the context managers of `tracer.hooks` do to a stream: read it, edit it, ablate a contribution, resume."""

import inspect
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tracer.errors import InputError
from tracer.hooks.active import acting, sublayers_of
from tracer.hooks.chain import Blocks
from tracer.hooks.dispatch import Operation
from tracer.hooks.positions import CACHES, Forward, Where
from tracer.models.anatomy import Anatomy
from tracer.models.nested import get, replaced
from tracer.models.plain import Arguments, State, intercepted
from tracer.models.sublayers import Role, Sublayer


class Read(Operation):
    """Keeps the stream at some depths; one tensor per forward that reaches an asked position."""

    def __init__(self, blocks: Blocks, depths: Sequence[int], positions: Sequence[int] | None, detach: bool):
        super().__init__("read", blocks, positions, depth_names(blocks, depths))
        self.depths = frozenset(depths)
        self.tensors: dict[int, list[Tensor]] = {depth: [] for depth in depths}
        self._detach = detach

    def at_depth(self, depth: int, stream: Tensor, forward: Forward) -> Tensor | None:
        """Keep a copy; with gradients, the copy goes on through the model, so that outputs depend on it."""
        where = self.where(depth, forward, stream)
        if where.nowhere:
            return None
        kept = where.pick(stream.detach() if self._detach else stream).clone()
        self.tensors[depth].append(kept)
        if self._detach:
            return None
        if torch.is_grad_enabled() and not kept.requires_grad:
            kept.requires_grad_()
        return where.put(stream, kept.clone())


class Edit(Operation):
    """Replaces the stream at one depth, or adds to it."""

    def __init__(
        self, name: str, blocks: Blocks, depth: int, value: Tensor, positions: Sequence[int] | None, *, add: bool
    ):
        super().__init__(name, blocks, positions, depth_names(blocks, [depth]))
        self.depths = frozenset([depth])
        self._value = Value(f"{name} at depth {depth}", value, blocks.anatomy, positions)
        self._add = add

    def at_depth(self, depth: int, stream: Tensor, forward: Forward) -> Tensor | None:
        """The stream with the value in its places."""
        where = self.where(depth, forward, stream)
        if where.nowhere:
            return None
        value = self._value.like(where.pick(stream), where)
        return where.put(stream, where.pick(stream) + value if self._add else value)


class Resume(Operation):
    """Replaces the whole stream at one depth; what runs before it does not matter."""

    def __init__(self, blocks: Blocks, depth: int, stream: Tensor):
        super().__init__("resume", blocks, None, depth_names(blocks, [depth]))
        self.depths = frozenset([depth])
        self._value = Value(f"resume at depth {depth}", stream, blocks.anatomy, None, broadcast=False)

    def at_depth(self, depth: int, stream: Tensor, forward: Forward) -> Tensor | None:
        """The given stream."""
        return self._value.like(stream, self.where(depth, forward, stream))

    def beside(self, others: Sequence[Operation]) -> None:
        """Refuse a second one.

        Raises:
            InputError: a resume is open already.
        """
        if any(isinstance(other, Resume) for other in others):
            raise InputError("resume inside another resume of the same model: open one at a time")

    def arguments(self, module: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
        """No cache: blocks that are not run would leave holes in it.

        Raises:
            InputError: the caller wants one.
        """
        cached = [name for name in CACHES if given.get(name) is not None]
        if cached or given.get("use_cache"):
            raise InputError(
                f"resume runs without a cache, but the forward was given {cached[0] if cached else 'use_cache=True'}: "
                "pass use_cache=False"
            )
        accepted = inspect.signature(module.forward).parameters
        anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
        takes = "use_cache" in accepted or (anything and isinstance(module, PreTrainedModel))
        return {"use_cache": False} if takes else {}


@contextmanager
def resuming(blocks: Blocks, depth: int, stream: Tensor) -> Iterator[None]:
    """Resume from a depth; the blocks before it are passed through where the stream is all that the others need."""
    skipped = depth if blocks.resumable else 0
    with acting(Resume(blocks, depth, stream)) as dispatcher, intercepted(dispatcher.routes(skipped)):
        yield


class Ablate(Operation):
    """Replaces what blocks, or one kind of their sub-layers, add to the stream."""

    def __init__(
        self,
        blocks: Blocks,
        chosen: Sequence[int],
        role: Role | None,
        contribution: Tensor | None,
        positions: Sequence[int] | None,
    ):
        found = {} if role is None else {block: sublayers_of(blocks).of(block, role) for block in chosen}
        names = {block: f"block {block} ({blocks.names[block]})" for block in chosen}
        for block, parts in found.items():
            if not parts:
                raise InputError(f"{names[block]} has no {role}: ablate the block, or another part")
            if len(parts) > 1 and contribution is not None:
                raise InputError(f"{names[block]} has {len(parts)} {role}s: their contribution can only be zero")
            names[block] = f"the {role} of {names[block]}"
        super().__init__("ablate", blocks, positions, names)
        self.contributions = frozenset(chosen if role is None else ())
        self.sublayers = found
        self._skips = contribution is None and positions is None
        self._value = None if contribution is None else Value("ablate", contribution, blocks.anatomy, positions)

    def at_block(self, block: int, before: State, after: State, forward: Forward) -> State:
        """The state after a block whose contribution is replaced; a block that is skipped hands on all it received."""
        anatomy = self.blocks.anatomy
        assert before[0] is not None
        assert after[0] is not None
        y = anatomy.rows_first(after[0])
        x = anatomy.rows_first(before[0]).to(y)
        where = self.where(block, forward, y)
        if where.nowhere:
            return after
        new = where.pick(x)
        if self._value is not None:
            new = new + self._value.like(new, where)
        return (anatomy.as_model(where.put(y, new)), *(before if self._skips else after)[1:])

    def at_sublayer(
        self, block: int, sublayer: Sublayer, arguments: Arguments, output: Any, shape: torch.Size, forward: Forward
    ) -> Any:
        """The output of a sub-layer whose contribution is replaced; other positions stay as they are, bit by bit."""
        anatomy = self.blocks.anatomy
        path = sublayer.output_path
        # Some sub-layers return batch and positions in one dimension.
        own = anatomy.rows_first(sublayer.contribution(arguments, output).reshape(shape))
        where = self.where(block, forward, own)
        if where.nowhere:
            return output
        picked = where.pick(own)
        new = torch.zeros_like(picked) if self._value is None else self._value.like(picked, where)
        edited = sublayer.with_contribution(arguments, output, anatomy.as_model(where.put(own, new)))
        before, after = (anatomy.rows_first(get(tree, path).reshape(shape)) for tree in (output, edited))
        value = anatomy.as_model(where.put(before, where.pick(after)))
        return replaced(output, {path: value.reshape(get(output, path).shape)})


class Value:
    """What a user wants in the stream: one vector for all places, or one for each; never broadcast otherwise.

    Args:
        name: what it is for, in messages.
        value: `[d_model]`, or `[batch, n_positions, d_model]`.
        anatomy: of the stream.
        positions: those that were asked for.
        broadcast: whether one vector for all places is allowed.

    Raises:
        InputError: its shape is neither.
    """

    def __init__(
        self,
        name: str,
        value: Tensor,
        anatomy: Anatomy,
        positions: Sequence[int] | None,
        *,
        broadcast: bool = True,
    ):
        self._name = name
        self._value = value
        self._broadcast = broadcast
        # The streams of some models have more dimensions than one of width d_model.
        stream = anatomy.rows_first(torch.empty(anatomy.stream_shape, device="meta"))
        places = stream.dim() - 1 if anatomy.position_dim is None else 2
        self._width = stream.shape[places:]
        whole = value.dim() == stream.dim() and value.shape[places:] == self._width
        if whole and positions is not None:
            whole = value.shape[1] == len(positions)
        if not whole and not (broadcast and value.shape == self._width):
            raise self._refused("batch", *["pos" if positions is None else len(positions)] * (places - 1))

    def like(self, stream: Tensor, where: Where) -> Tensor:
        """The value for the places of `stream`, `[batch, n, d_model]`, on its device and of its dtype.

        A copy: blocks, and hooks of the model's owner, may edit what they receive in place.

        Raises:
            InputError: it is for another number of rows or positions.
        """
        value = self._value.to(stream)
        if self._broadcast and value.shape == self._width:
            return value.expand(stream.shape).clone()
        if where.columns is not None:
            value = value[:, list(where.chosen)]
        if value.shape != stream.shape:
            raise self._refused(*stream.shape[: stream.dim() - len(self._width)])
        return value.clone()

    def _refused(self, *places: object) -> InputError:
        width = ", ".join(map(str, self._width))
        shapes = [f"[{width}]"] * self._broadcast + [f"[{', '.join(map(str, places))}, {width}]"]
        return InputError(
            f"{self._name}: the value has shape {list(self._value.shape)}, but the stream there takes "
            f"{' or '.join(shapes)}"
        )


def depth_names(blocks: Blocks, depths: Iterable[int]) -> dict[int, str]:
    """What messages call depths."""
    last = blocks.n_blocks
    return {d: f"depth {d} ({'output' if d == last else 'input'} of {blocks.names[min(d, last - 1)]})" for d in depths}


def numbers(what: str, value: int | Iterable[int], most: int) -> list[int]:
    """Distinct ints from 0 to `most`.

    Raises:
        InputError: anything else.
    """
    found = integers(what, value)
    if not found or len(set(found)) < len(found) or min(found) < 0 or max(found) > most:
        raise InputError(f"{what} {value!r}: pass distinct ones from 0 to {most}")
    return found


def integers(what: str, value: Any) -> list[int]:
    """A list of ints from one, or from an iterable of them.

    Raises:
        InputError: anything else.
    """
    try:
        return [operator.index(item) for item in (value if isinstance(value, Iterable) else [value])]
    except TypeError as error:
        raise InputError(f"{what} {value!r}: pass an int or a list of ints") from error
