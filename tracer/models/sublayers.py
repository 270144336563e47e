"""The sub-layers of a block: the modules whose outputs it adds to the residual stream.

The contribution of a block, `resid[b + 1] - resid[b]`, is in most architectures an exact sum of what its mixer and its
MLP add. Nothing is looked up by architecture: every module inside the block is recorded once, the contribution is
solved for as a sum of their outputs, each with one scale (post-norms, residual multipliers and parallel blocks come out
by themselves), and two proofs must hold: the sum, and that taking all found contributions away skips the block. Names
only decide which of the found modules are called mixer and which MLP.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from tracer.errors import HookError, InputError
from tracer.models.mixers import mixer_kind, mixer_word
from tracer.models.nested import Path, get, leaves, replaced
from tracer.models.plain import Adapter, Arguments, BlockSite, OutputEdit, State
from tracer.models.streams import copied

Role = Literal["mixer", "mlp"]

_MLP_WORDS = r"mlp|feed_?forward|ffn|moe|expert|\bfc\d"

MAX_GAP = 1e-5
"""Largest difference between the sum of the parts and the whole, relative to the whole's largest entry at a position.

What the sum may lose by rounding where the stream itself is large is not counted: `ROUNDING` steps of its data type.
"""

ROUNDING = 4

KNOWN = 0.05
"""Entries of the stream whose rounding is a larger share of the contribution say nothing about it."""

MOST_TERMS = 5
"""A block with more summands than this is not taken apart."""

MOST_CHOICES = 64
"""Most ways to say which modules add to one of their own arguments that are tried."""


@dataclass(frozen=True)
class Sublayer:
    """A module whose output a block adds to the stream.

    Attributes:
        role: `mixer` (moves information between positions) or `mlp` (everything else).
        module: dotted name of the module.
        output_path: where in its output the contribution lies.
        scale: contribution = scale x output.
        residual_path: where in its arguments the stream lies when the module itself adds to it (then contribution =
            output - that argument); None where the block adds.
    """

    role: Role
    module: str
    output_path: Path
    scale: float
    residual_path: Path | None

    def contribution(self, arguments: Arguments, output: Any) -> Tensor:
        """What this call adds to the stream, in the stream's shape or with batch and positions in one dimension.

        Args:
            arguments: `{"args": ..., "kwargs": ...}` of the call.
            output: what the module returned.
        """
        value: Tensor = get(output, self.output_path)
        if self.residual_path is None:
            return value if self.scale == 1 else value * self.scale
        return value - get(arguments, self.residual_path)

    def with_contribution(self, arguments: Arguments, output: Any, contribution: Tensor) -> Any:
        """The module's output, so that it adds `contribution` to the stream instead, given in either shape."""
        old: Tensor = get(output, self.output_path)
        value = contribution.reshape(old.shape)
        if self.residual_path is not None:
            value = get(arguments, self.residual_path) + value
        elif self.scale != 1:
            value = value / self.scale
        return replaced(output, {self.output_path: value.to(old.dtype)})


@dataclass(frozen=True)
class Sublayers:
    """The sub-layers of every block, as far as a block is their exact sum.

    Attributes:
        blocks: per block its sub-layers in the order of their calls.
        gaps: per block the larger of the two measured gaps, relative to the block's contribution.
        limit: what the gaps are held to.
        model_class: of the model.
    """

    blocks: tuple[tuple[Sublayer, ...], ...]
    gaps: tuple[float, ...]
    limit: float
    model_class: str

    def of(self, block: int, role: Role) -> tuple[Sublayer, ...]:
        """The sub-layers of one role in a block; empty where the block has none of it (a Mamba block has no MLP).

        Raises:
            InputError: the block is not the exact sum of its sub-layers; names the measured gap.
        """
        if self.gaps[block] > self.limit:
            raise InputError(
                f"block {block} of {self.model_class} is not the exact sum of a mixer and an MLP (best sum of its "
                f"modules' outputs is off by {self.gaps[block]:.2g} of the largest entry, limit {self.limit:.0e}): "
                "ablate or patch the whole block"
            )
        return tuple(sublayer for sublayer in self.blocks[block] if sublayer.role == role)

    @property
    def exact(self) -> bool:
        """Whether every block is the exact sum of its sub-layers."""
        return max(self.gaps) <= self.limit


def with_edited_sublayers(
    adapter: Adapter,
    site: BlockSite,
    before: State,
    sublayers: Sublayers,
    role: Role,
    edit: Callable[[int, Tensor], Tensor],
) -> State:
    """The state after a block whose sub-layers of one role add something else to the stream.

    Args:
        adapter: the opened model.
        site: the block, while the model runs.
        before: the state that it receives.
        sublayers: of the model.
        role: which of them are edited.
        edit: from the number of a sub-layer in its block and its contribution `[batch, pos, ...]` to another one.
    """
    assert before[0] is not None
    shape = before[0].shape
    chosen = {
        adapter.modules[sublayer.module]: partial(_edited, adapter, sublayer, partial(edit, number), shape)
        for number, sublayer in enumerate(sublayers.blocks[site.index])
        if sublayer.role == role
    }
    return site.run(before, edits=chosen)


def _edited(
    adapter: Adapter,
    sublayer: Sublayer,
    edit: Callable[[Tensor], Tensor],
    shape: torch.Size,
    arguments: Arguments,
    output: Any,
) -> Any:
    """What a sub-layer returns instead; see `tracer.models.plain.OutputEdit`."""
    contribution = adapter.anatomy.rows_first(sublayer.contribution(arguments, output).reshape(shape))
    return sublayer.with_contribution(arguments, output, adapter.anatomy.as_model(edit(contribution)))


@dataclass(frozen=True)
class _Call:
    """One call of a module inside a block, with copies of the tensors that it received and returned."""

    name: str  # inside the block
    module: nn.Module
    outputs: tuple[tuple[Path, Tensor], ...]
    inputs: tuple[tuple[Path, Tensor], ...]


@dataclass(frozen=True)
class _Term:
    """A candidate summand: an output as it is, or what the module added to one of its arguments."""

    call: _Call
    output_path: Path
    residual_path: Path | None
    value: np.ndarray


def find_sublayers(adapter: Adapter) -> Sublayers:
    """Find and prove the sub-layers of every block of an opened model; costs about two forwards of the probe.

    The model must be in eval mode and without gradients (see `tracer.models.plain.evaluating`).
    """
    blocks: list[tuple[Sublayer, ...]] = []
    gaps: list[float] = []
    outputs: list[State] = []
    limit = MAX_GAP
    names = {module: name for name, module in adapter.modules.items()}

    def find(site: BlockSite) -> State:
        nonlocal limit
        before = copied(site.state)
        with _recorded(site.module) as calls:
            after = copied(site.run())
        assert before[0] is not None
        assert after[0] is not None
        if after[0].dtype not in (torch.float32, torch.float64):
            limit = max(limit, 8 * torch.finfo(after[0].dtype).eps)
        found, gap = _solved(calls, before[0], after[0], limit)
        blocks.append(tuple(_sublayer(term, scale, calls, names) for term, scale in found))
        gaps.append(gap)
        outputs.append(after)
        return after

    def prove(site: BlockSite) -> State:
        if blocks[site.index]:
            skipped = _skip_gap(adapter, site, blocks[site.index], outputs[site.index])
            gaps[site.index] = max(gaps[site.index], skipped)
        else:
            site.run()
        return outputs[site.index]

    adapter.run(adapter.probe, find, logits=False)
    if any(blocks):  # in a forward of its own: some blocks write to what others read, and may run only once in each
        adapter.run(adapter.probe, prove, logits=False)
    return Sublayers(tuple(blocks), tuple(gaps), limit, adapter.anatomy.model_class)


@contextmanager
def _recorded(block: nn.Module) -> Iterator[list[_Call]]:
    """Record the calls of all modules inside a block; outputs are copied, since blocks add to them in place."""
    calls: list[_Call] = []
    names = {module: name for name, module in block.named_modules() if name}

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        outputs = tuple((path, x.detach().clone()) for path, x in leaves(output) if x.is_floating_point())
        inputs = tuple(
            (path, x.detach().clone()) for path, x in leaves({"args": args, "kwargs": kwargs}) if x.is_floating_point()
        )
        calls.append(_Call(names[module], module, outputs, inputs))

    handles = [module.register_forward_hook(after, with_kwargs=True) for module in names]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _solved(
    calls: Sequence[_Call], before: Tensor, after: Tensor, limit: float
) -> tuple[list[tuple[_Term, float]], float]:
    """The block's contribution as a sum of terms with their scales, and the relative gap of the best sum."""
    x, y = _flat(before), _flat(after)
    whole = _Whole.of(x, y, before.shape[-1], torch.finfo(after.dtype).eps, limit)
    best = 1.0
    once = {call.name for call in calls if sum(other.module is call.module for other in calls) == 1}
    for depth in (1, 2, 3):
        chosen = _outermost(calls, depth, once)
        plain = [t for call in chosen if (t := _plain_term(call, before, (x, y))) is not None]
        for terms in (plain, *_adding(chosen, before, x)):
            most = MOST_TERMS if terms is plain else 2
            found, gap = _subset(_distinct(terms), whole, most)
            if found and not _holds_both(found):
                return found, gap
            best = min(best, gap)
    # A block that adds something is not the sum of nothing, however small the best gap.
    return [], max(best, 2 * limit)


def _outermost(calls: Sequence[_Call], depth: int, once: set[str]) -> list[_Call]:
    """Calls of modules at most `depth` levels inside the block, each module called once."""
    return [call for call in calls if call.name.count(".") < depth and call.name in once]


def _plain_term(call: _Call, like: Tensor, streams: tuple[np.ndarray, ...]) -> _Term | None:
    """The output of a call as a summand; not the stream itself, which some modules only hand through."""
    for path, output in call.outputs:
        # Some blocks fold batch and positions before their MLP.
        if output.shape == like.shape or output.shape == (like.numel() // like.shape[-1], like.shape[-1]):
            value = _flat(output)
            if not any(np.array_equal(value, stream) for stream in streams):
                return _Term(call, path, None, value)
            return None
    return None


def _adding(calls: Sequence[_Call], like: Tensor, x: np.ndarray) -> Iterator[list[_Term]]:
    """Every choice of which modules add to one of their own arguments (BLOOM, MPT), fewest first."""
    options: list[list[_Term]] = []
    for call in calls:
        plain = _plain_term(call, like, (x,))
        if plain is None:
            continue
        adding = [
            _Term(call, plain.output_path, path, plain.value - _flat(received))
            for path, received in call.inputs
            if received.shape == like.shape and not _is_norm(call.module)
        ]
        options.append([plain, *adding])
    if math.prod(map(len, options)) <= MOST_CHOICES:
        choices = [list(choice) for choice in product(*options)]
        yield from sorted(choices, key=lambda terms: sum(term.residual_path is not None for term in terms))[1:]


def _distinct(terms: Sequence[_Term]) -> list[_Term]:
    """One term per value: the last of those modules that hand on the same tensor, which is nearest to the sum."""
    kept: list[_Term] = []
    for term in terms:
        same = next((i for i, other in enumerate(kept) if np.array_equal(other.value, term.value)), None)
        if same is None:
            kept.append(term)
        else:
            kept[same] = term
    return kept


@dataclass(frozen=True)
class _Whole:
    """A block's contribution, as far as it can be known.

    Attributes:
        value: its entries relative to the largest one at their position: what is added at attention sinks can be a
            thousand times as large as elsewhere, and every position counts alike.
        known: which entries of the stream these are: those whose rounding leaves something of the contribution.
        weights: what turns their absolute values into relative ones.
        rounding: how far a sum may be off by rounding, relative likewise.
        limit: what a gap is held to.
    """

    value: np.ndarray
    known: np.ndarray
    weights: np.ndarray
    rounding: np.ndarray
    limit: float

    @classmethod
    def of(cls, x: np.ndarray, y: np.ndarray, width: int, eps: float, limit: float) -> "_Whole":
        """From the stream before and after the block, flattened, `width` entries a position."""
        sizes = np.abs((y - x).reshape(-1, width)).max(axis=1)
        weights = np.repeat(1 / np.where(sizes > 0, sizes, np.inf), width)
        rounding = ROUNDING * eps * (np.abs(x) + np.abs(y)) * weights
        known = (rounding <= KNOWN) & (weights > 0)
        return cls(((y - x) * weights)[known], known, weights[known], rounding[known], limit)

    @property
    def enough(self) -> bool:
        """Whether so much is known that a sum can be judged."""
        return bool(self.known.mean() >= 0.1)

    def gap(self, total: np.ndarray) -> float:
        """How far a sum of terms is from the whole, beyond rounding."""
        return max(0.0, float((np.abs(total - self.value) - self.rounding).max()))


def _subset(terms: Sequence[_Term], whole: _Whole, most: int) -> tuple[list[tuple[_Term, float]], float]:
    """The smallest set of terms that sums to the whole, and the relative gap of the best set tried."""
    best = 1.0
    if not len(terms) or not whole.enough:
        return [], best
    columns = np.stack([term.value[whole.known] * whole.weights for term in terms], axis=1)
    gram, right, square = columns.T @ columns, columns.T @ whole.value, whole.value @ whole.value
    noise = 1e-4 + (whole.rounding @ whole.rounding) / square
    for size in range(1, most + 1):
        for chosen in combinations(range(len(terms)), size):
            index = list(chosen)
            scales = np.linalg.lstsq(gram[np.ix_(index, index)], right[index], rcond=None)[0]
            # The normal equations decide cheaply whether a set is worth an exact look.
            rest = 1 - scales @ right[index] / square
            if rest > noise:
                best = min(best, float(np.sqrt(max(rest, 0.0))))
                continue
            adding = [terms[i].residual_path is not None for i in index]
            # Most blocks add their parts as they are; a fit knows a scale no better than the stream's precision.
            for scales in (np.ones(size), np.linalg.lstsq(columns[:, index], whole.value, rcond=None)[0]):
                gap = whole.gap(columns[:, index] @ scales)
                best = min(best, gap)
                if gap <= whole.limit and (np.abs(scales) > 1e-2).all() and (scales[adding] == 1).all():
                    return [(terms[i], float(scale)) for i, scale in zip(index, scales, strict=True)], gap
    return [], best


def _holds_both(found: Sequence[tuple[_Term, float]]) -> bool:
    """Whether one module is the whole block, so that a mixer and an MLP lie inside it."""
    if len(found) != 1:
        return False
    inside = [(name, m) for name, m in found[0][0].call.module.named_children() if not _is_norm(m)]
    return any(mixer_word(f"{name} {type(m).__name__}") for name, m in inside) and any(
        re.search(_MLP_WORDS, f"{name} {type(m).__name__}".lower()) for name, m in inside
    )


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _sublayer(term: _Term, scale: float, calls: Sequence[_Call], names: Mapping[nn.Module, str]) -> Sublayer:
    """The sub-layer of a term; a norm or convolution after a sub-layer has the role of what it is applied to."""
    source = term.call
    role = _role(source)
    while role is None:
        earlier = [
            call
            for call in calls[: calls.index(source)]
            if any(_equal(out, x) for _, out in call.outputs for _, x in source.inputs)
        ]
        if not earlier:
            break
        source = earlier[-1]
        role = _role(source)
    return Sublayer(role or "mlp", names[term.call.module], term.output_path, scale, term.residual_path)


def _role(call: _Call) -> Role | None:
    """What a module's name says, else its class, else what lies inside it; None for what only follows a sub-layer."""
    class_name = type(call.module).__name__
    if re.search(r"norm|dropout|identity|hookpoint", class_name.lower()):
        return None
    for words in (call.name, class_name):
        if re.search(_MLP_WORDS, words.lower()):
            return "mlp"
        if mixer_word(words):
            return "mixer"
    return "mixer" if mixer_kind(call.module) is not None else "mlp"


def _skip_gap(adapter: Adapter, site: BlockSite, sublayers: Sequence[Sublayer], after: State) -> float:
    """How far the block is from handing on its input when every found contribution is taken away.

    Relative to what it added to reach `after`.
    """
    before = copied(site.state)

    def without(sublayer: Sublayer) -> OutputEdit:
        def edit(arguments: Arguments, output: Any) -> Any:
            nothing = torch.zeros_like(sublayer.contribution(arguments, output))
            return sublayer.with_contribution(arguments, output, nothing)

        return edit

    try:
        rest = site.run(edits={adapter.modules[s.module]: without(s) for s in sublayers})
    except HookError:
        return 1.0
    assert rest[0] is not None
    assert before[0] is not None
    assert after[0] is not None
    off = (rest[0] - before[0]).abs() - ROUNDING * torch.finfo(rest[0].dtype).eps * before[0].abs()
    return (off.amax(-1) / (after[0] - before[0]).abs().amax(-1).clamp_min(1e-30)).max().clamp_min(0).item()


def _flat(x: Tensor) -> np.ndarray:
    return x.detach().double().cpu().flatten().numpy()


def _equal(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and x.device == y.device and torch.equal(x, y)
