"""Proof on the opened model itself that its streams are what we say they are; refuse it otherwise.

The checks cost about five and a half forwards of a 3 x 11-token probe, recording included.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from tracer.errors import ModelRefused
from tracer.models.anatomy import PROBE_LENGTH, PROBE_ROWS, SECOND_LENGTH, SECOND_ROWS
from tracer.models.cache import one_line
from tracer.models.locating import locate, recorded_calls
from tracer.models.nested import get
from tracer.models.plain import Adapter, BlockSite, PlainAdapter, State, evaluating, forward_logits
from tracer.models.streams import (
    concatenated,
    positions_of,
    read_streams,
    resume,
    rows_of,
    state_batch_dims,
    unembed,
)
from tracer.models.tokens import TokenBatch

MAX_GAP = 1e-4
"""What a check accepts in float32 and float64: a difference of probabilities, for the tail of log-probabilities (nats),
for streams relative to their size. In lower precision the model's own rounding decides."""

Engine = Literal["onepass", "full"]

Tail = Literal["replayed", "whole"]
"""How a depth is unembedded: the tail replayed on single positions, or a whole forward without the later blocks."""


@dataclass(frozen=True)
class Check:
    """One check: the largest difference found and the limit that it is held to; see `MAX_GAP` for the units."""

    name: str
    gap: float
    limit: float
    proves: str

    @property
    def passed(self) -> bool:
        """Whether the gap is within the limit."""
        return self.gap <= self.limit

    def __str__(self) -> str:
        verdict = "ok  " if self.passed else "FAIL"
        return f"{verdict} {self.name:<11} gap {self.gap:.1e} (limit {self.limit:.1e})  {self.proves}"


@dataclass(frozen=True)
class SelfCheck:
    """All checks of one model and what they allow.

    Attributes:
        checks: with their measured gaps.
        engine: `onepass`, or `full` where a run cannot be resumed.
        reason: why this engine.
        tail: `replayed` on single positions, or `whole` where what follows the blocks needs more than the last
            residual; the lens at depth d is then a whole forward without the blocks from d on.
        notes: what a reader of the numbers must know.
    """

    checks: tuple[Check, ...]
    engine: Engine
    reason: str
    tail: Tail = "replayed"
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain data for `run.json`."""
        checks = [{"name": c.name, "gap": c.gap, "limit": c.limit, "passed": c.passed} for c in self.checks]
        return {
            "engine": self.engine,
            "reason": self.reason,
            "tail": self.tail,
            "notes": list(self.notes),
            "checks": checks,
        }

    def __str__(self) -> str:
        lines = [*map(str, self.checks), f"engine: {self.engine} ({self.reason})"]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def open_plain(
    model: Any,
    forward: Callable[[TokenBatch], Tensor] | None = None,
    *,
    embeddings: int | None = None,
    blocks: Sequence[str] | None = None,
    all_depths: bool = False,
) -> tuple[PlainAdapter, SelfCheck]:
    """Find the anatomy of a live model, check it and return the adapter.

    Args:
        model: a causal language model.
        forward: its own forward from tokens to logits; default that of a Hugging Face model.
        embeddings: number of tokens that it knows; default that of a Hugging Face model.
        blocks: names of the modules that are its blocks, where they shall not be searched for.
        all_depths: resume from every depth instead of three.

    Raises:
        ModelRefused: the model cannot be traced; names the check that failed and the measured gap.
    """
    if forward is None:
        forward = partial(forward_logits, model)
    first, second = _probes(embeddings or token_count(model))
    with evaluating(model):
        modules = {name: module for name, module in model.named_modules() if name}
        with recorded_calls(modules) as calls:
            logits = forward(first)
        with recorded_calls(modules) as again:
            logits_again = forward(second)
        located = locate(model, calls, again, logits.shape[-1], blocks)
        adapter = PlainAdapter(model, located.anatomy, [call.output for call in located.calls], forward, first)
        recorded = [get(call.arguments, located.anatomy.input_path) for call in located.calls]
        check = self_check(adapter, first, logits, logits_again, recorded, all_depths=all_depths)
        return adapter, check


def self_check(
    adapter: Adapter,
    probe: TokenBatch,
    logits: Tensor,
    logits_again: Tensor,
    recorded: Sequence[Tensor],
    *,
    all_depths: bool = False,
) -> SelfCheck:
    """Check an adapter against the model's own forwards on two probes.

    Args:
        adapter: the opened model.
        probe: the first probe.
        logits: the model's own logits of the first probe.
        logits_again: its logits of the second probe, whose rows share their first tokens with the first one's.
        recorded: `resid[0..L-1]` of that forward, recorded without the adapter.
        all_depths: resume from every depth instead of three.

    Raises:
        ModelRefused: a check that no engine can do without failed.
    """
    anatomy = adapter.anatomy
    n_blocks = anatomy.n_blocks
    rows = torch.tensor([row for row, length in enumerate(probe.lengths) for _ in range(length)])
    positions = torch.tensor([p for length in probe.lengths for p in range(length)])
    tokens = probe.ids[rows, positions]
    truth = _log_probs(logits)[rows, positions]
    exact = logits.dtype in (torch.float32, torch.float64)
    checks: list[Check] = []

    def check(name: str, gap: float, limit: float, proves: str, advice: str | None = None) -> None:
        """Add a check; with advice, the model is refused when it fails."""
        checks.append(Check(name, gap, limit, proves))
        if advice is not None and not checks[-1].passed:
            raise ModelRefused(
                f"{anatomy.model_class} cannot be traced: check '{name}' ({proves}) found a gap of {gap:.3g}, "
                f"limit {limit:.1g}; {advice}"
            )

    def unembedded(state: State) -> Tensor:
        assert state[0] is not None
        return _log_probs(unembed(adapter, positions_of(anatomy, state[0], rows, positions), tokens))

    # The second probe repeats the first one's rows but for their last token: everything before it must stay.
    both = range(SECOND_ROWS)
    before = [(row, position) for row in both for position in range(probe.lengths[row] - 1)]
    changed = [(row, probe.lengths[row] - 1) for row in both]
    composition, effect = (
        max(_gap(_log_probs(logits_again[at]), _log_probs(logits[at])) for at in where) for where in (before, changed)
    )
    check(
        "causality",
        composition,
        MAX_GAP if exact else 0.1 * effect,
        "later tokens change no earlier output",
        "LayerTracer reads next-token predictions: pass a causal (decoder) language model",
    )
    rounding = torch.finfo(logits.dtype).eps
    limit = MAX_GAP if exact else 4 * max(composition, rounding)

    _interrupted_skip(adapter, probe)
    streams = read_streams(adapter, probe)
    differences = [_difference(x, y[0]) for x, y in zip(recorded, streams.inputs, strict=True)]
    stream_limit = MAX_GAP if exact else 4 * rounding
    check(
        "streams",
        max(differences),
        stream_limit,
        "the residuals that are read are those of the untouched model, relative to their size",
        f"they differ first at depth {next((d for d, x in enumerate(differences) if x > stream_limit), None)}",
    )
    check(
        "untouched",
        _gap(_log_probs(streams.logits)[rows, positions], truth),
        limit,
        "reading, and a skip that was broken off, leave nothing behind",
        "the forward of this model is not repeatable",
    )
    handed_over = [
        _difference(x, y)
        for after, following in zip(streams.outputs, streams.inputs[1:], strict=False)
        for x, y in zip(after, following, strict=True)
    ]
    check("chain", max(handed_over, default=0.0), MAX_GAP, "each block receives what the one before returned")
    if anatomy.position_dim is None:
        reason = "the positions of the stream are not tokens"
        notes = (f"{reason}: it has no norm, angle or CKA at a token", *_reach(adapter, probe))
        return SelfCheck(tuple(checks), "full", reason, "whole", notes)
    try:
        final = unembedded(streams.states[-1])
        gap, failure = (final - truth).abs().max().item() if exact else _gap(final, truth), ""
    except Exception as error:  # whatever a tail needs beyond the last residual, it cannot be replayed
        gap, failure = math.inf, f" ({type(error).__name__}: {one_line(error)})"
    check("tail", gap, limit, f"its own tail turns the last residual into its output (log-probabilities){failure}")
    if not checks[-1].passed:
        reason = "the tail needs more than the last residual"
        return SelfCheck(tuple(checks), "full", reason, "whole", _reach(adapter, probe))
    if any(call.last for call in anatomy.calls):
        return SelfCheck(tuple(checks), "full", "the blocks lie in their parent's forward")
    if anatomy.shared_state:
        reason = f"the blocks share mutable state ({', '.join(anatomy.shared_state)})"
        return SelfCheck(tuple(checks), "full", reason)

    dims = state_batch_dims(anatomy)
    assert streams.states[-1][0] is not None
    last = anatomy.rows_first(positions_of(anatomy, streams.states[-1][0], rows, positions))
    _other_tokens(adapter, probe)
    depths = range(1, n_blocks) if all_depths else sorted({1, n_blocks // 2, n_blocks - 1} - {0, n_blocks})
    resumed: list[tuple[str, float, str]] = []
    # From the last depth to the first, so that what blocks may remember is not of this run.
    for depth in reversed(depths):
        # Twice the rows, as the one-pass engine will ask for; from early depths once, which costs a forward.
        copies = 2 if all_depths or depth == n_blocks - 1 else 1
        worst, failure = 0.0, ""
        try:
            end = resume(adapter, probe, depth, concatenated([streams.states[depth]] * copies, dims), copies)
            for i in range(copies):
                part = rows_of(end, dims, i * len(probe), (i + 1) * len(probe))
                worst = max(worst, _gap(unembedded(part), truth))
                if exact:  # where one token has all the probability, only the stream shows a difference
                    assert part[0] is not None
                    mine = anatomy.rows_first(positions_of(anatomy, part[0], rows, positions))
                    worst = max(worst, _relative(mine, last))
        except Exception as error:  # whatever a model does when its blocks are resumed, it cannot be resumed
            worst, failure = math.inf, f" ({type(error).__name__}: {one_line(error)})"
        resumed.append((f"resume {depth}", worst, f"blocks {depth}.. need only the residual before them{failure}"))
    for name, worst, proves in reversed(resumed):
        check(name, worst, limit, proves)
    failed = [check for check in checks if not check.passed]
    if failed:
        reason = f"{failed[0].name} differs by {failed[0].gap:.1e}: a block needs more than the residual before it"
        return SelfCheck(tuple(checks), "full", reason)
    return SelfCheck(tuple(checks), "onepass", "a run can be resumed from any residual")


def _reach(adapter: Adapter, probe: TokenBatch) -> tuple[str, ...]:
    """A note when the modules after the last block carry information from one position to others.

    Such modules are blocks of another kind, or of another model around this one, and are not traced.
    """
    anatomy = adapter.anatomy
    last = anatomy.n_blocks - 1

    def logits(disturbed: int | None) -> Tensor:
        def visit(site: BlockSite) -> State:
            out = site.run()
            if site.index < last or disturbed is None:
                return out
            assert out[0] is not None
            stream = anatomy.rows_first(out[0].clone())
            stream[:, disturbed] += stream.std() * torch.linspace(-1, 1, stream.shape[-1]).to(stream)
            return (anatomy.as_model(stream), *out[1:])

        found = adapter.run(probe, visit)
        assert found is not None
        return _log_probs(found)

    middle = min(probe.lengths) // 2
    moved = (logits(middle) - logits(None)).abs().amax(-1) > MAX_GAP  # [batch, pos]
    reached = moved.any(0).nonzero().flatten().tolist()
    if len(reached) <= 1:
        return ()
    return (
        f"the modules after the last block ({', '.join(anatomy.tail)}) move information between positions: they are "
        "a part of the model that is not traced",
    )


def _log_probs(logits: Tensor) -> Tensor:
    return logits.double().log_softmax(-1)


def _gap(log_p: Tensor, log_q: Tensor) -> float:
    """Largest difference of probabilities: that of log-probabilities is rounding noise where they are small."""
    return (log_p.exp() - log_q.exp()).abs().max().item()


def _relative(streams: Tensor, others: Tensor) -> float:
    """Largest distance between two streams at a position, relative to the length of the second."""
    x, y = (stream.double().flatten(1) for stream in (streams, others))
    return ((x - y).norm(dim=1) / y.norm(dim=1).clamp_min(1e-30)).max().item()


def _difference(x: Tensor | None, y: Tensor | None) -> float:
    """Largest difference relative to the largest entry; 0 where there is nothing to compare."""
    if x is None or y is None or not x.is_floating_point():
        return 0.0
    return ((x - y).abs().max() / x.abs().max().clamp_min(1e-30)).item()


def _interrupted_skip(adapter: Adapter, probe: TokenBatch) -> None:
    """Skip a block and break off in the middle of the forward, as an error or Ctrl-C would."""

    class BrokenOff(Exception):
        pass

    middle = adapter.anatomy.n_blocks // 2

    def visit(site: BlockSite) -> State:
        out = site.run()
        if site.index == middle:
            raise BrokenOff
        return site.state if site.index == 0 else out

    with contextlib.suppress(BrokenOff):
        adapter.run(probe, visit, logits=False)


def _other_tokens(adapter: Adapter, probe: TokenBatch) -> None:
    """Run all blocks but the last on other tokens, so that what they remember cannot stand in for running them."""
    last = adapter.anatomy.n_blocks - 1
    others = probe.ids.roll(1, 0)[:SECOND_ROWS]
    rolled = TokenBatch(others, (others.shape[1],) * len(others))

    def visit(site: BlockSite) -> State:
        return site.state if site.index == last else site.run()

    adapter.run(rolled, visit, logits=False)


def token_count(model: Any) -> int:
    """Number of tokens that a Hugging Face model has embeddings for."""
    return getattr(model.get_input_embeddings(), "num_embeddings", None) or model.config.vocab_size


def _probes(size: int) -> tuple[TokenBatch, TokenBatch]:
    """Two right-padded probes; the rows of the second repeat all but the last token of the first one's, and go on."""
    generator = torch.Generator().manual_seed(0)
    # Tokens from the upper part of the vocabulary: special tokens tend to have the lowest ids.
    tokens = torch.randint(size // 4, size, (PROBE_ROWS, SECOND_LENGTH), generator=generator)
    lengths = (PROBE_LENGTH, PROBE_LENGTH - 1, PROBE_LENGTH - 4)
    first: Sequence[list[int]] = [tokens[row, :length].tolist() for row, length in enumerate(lengths)]
    second = [[*row[:-1], (row[-1] + 1) % size] for row in first[:SECOND_ROWS]]
    second[0] += tokens[0, PROBE_LENGTH:].tolist()
    return TokenBatch.from_rows(first), TokenBatch.from_rows(second)
