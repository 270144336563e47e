"""Activation patching: the share of a right answer that comes back when part of another run is put in.

A clean prompt and a corrupt one with another answer are run; then, in a run of one of them (the base), the residual
stream at a depth, or what a block or a sub-layer adds to it, is replaced at some positions by that of the other (the
giver). The one-pass engine takes all depths of a position column at once. After Vig et al. (2020), "Investigating
Gender Bias in Language Models Using Causal Mediation Analysis", and Meng et al. (2022), "Locating and Editing Factual
Associations in GPT", section 2; metrics and normalisation as in Zhang and Nanda (2024), "Towards Best Practices of
Activation Patching in Language Models", section 2.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tracer.batches import TargetTable, probe_batches
from tracer.divergence import log_probs
from tracer.engine import DEFAULT_BATCH_TOKENS, ReadStreams, block_tokens, run
from tracer.errors import HookError, InputError
from tracer.logit_lens import Lens, open_lens
from tracer.measures import MAX_LOGITS
from tracer.models.plain import evaluating
from tracer.models.selfcheck import MAX_GAP, Engine
from tracer.models.streams import Streams, read_streams
from tracer.models.sublayers import Role, find_sublayers
from tracer.models.traced import TracedModel
from tracer.patch_edits import Component, PairBatch, PatchEdits, PatchVariant, given_by
from tracer.probes import TokenizedProbe

Direction = Literal["denoise", "noise"]
"""`denoise` puts parts of the clean run into the corrupt one, `noise` parts of the corrupt run into the clean one."""

Metric = Literal["logit_diff", "log_p", "p"]
"""What is read of the output: log p(target) - log p(corrupt target), log p(target) in nats, or p(target)."""

MIN_GAP: Mapping[Metric, float] = {"logit_diff": 1.0, "log_p": 1.0, "p": 0.1}
"""Least m(clean) - m(corrupt) for a recovery: a ratio to a smaller difference can be anything and would rule a mean."""

AGREE = "clean and corrupt prompt agree"
REVERSED = "the corrupt prompt makes the target likelier"


@dataclass(frozen=True)
class PatchMeasures:
    """What patching has measured, before any normalisation.

    Attributes:
        clean: `[probes]` the metric of the clean run.
        corrupt: `[probes]` that of the corrupt run.
        answered: `[probes]` whether the target is the clean run's top-1.
        corrupt_answered: `[probes]` whether the corrupt target is the corrupt run's top-1.
        patched: by component `[places, positions, probes]` the metric of the patched run; missing where a prompt has no
            such column or a block no such sub-layer.
        checks: the largest gaps of the end checks and the limit that they were held to; None for a check that the model
            does not allow.
    """

    clean: np.ndarray
    corrupt: np.ndarray
    answered: np.ndarray
    corrupt_answered: np.ndarray
    patched: Mapping[Component, np.ndarray]
    checks: Mapping[str, float | None]


@dataclass(frozen=True)
class _Outputs:
    """Of some runs: log-probabilities `[..., probes, 2]` of target and corrupt target; top-1 tokens `[..., probes]`."""

    log_p: np.ndarray
    top: np.ndarray


class Patcher:
    """Patches pairs of prompts at every place and some positions.

    Args:
        model: the opened model.
        items: pairs; of a target of several tokens the first one is read.
        components: what is patched.
        positions: columns of the base prompt, counted from its last token (-1); None for all mapped ones at once.
        position_map: column of the base to column of the giver, both negative; None for each to itself.
        direction: which run is the base.
        metric: what is read.
        engine: default what the self-check allows.
        batch_tokens: most tokens in one call of a block; does not change the result.

    Attributes:
        places: by component the places that can be patched; not the blocks without such a sub-layer.

    Raises:
        InputError: single positions of a model whose stream has none, or sub-layers that do not sum to their block.
    """

    def __init__(
        self,
        model: TracedModel,
        items: Sequence[TokenizedProbe],
        components: Sequence[Component],
        positions: Sequence[int] | None,
        *,
        position_map: Mapping[int, int] | None = None,
        direction: Direction = "denoise",
        metric: Metric = "logit_diff",
        engine: Engine | None = None,
        batch_tokens: int = DEFAULT_BATCH_TOKENS,
    ):
        roles: list[Role] = [component for component in components if component == "mixer" or component == "mlp"]
        if model.anatomy.position_dim is None and (positions is not None or position_map is not None or roles):
            raise InputError(
                f"the positions of the stream of {model.name} are not tokens: pass positions='together', no position "
                "map, and of the components only 'resid' and 'block'"
            )
        self.model, self.adapter, self.n_blocks = model, model.adapter, model.n_blocks
        self.positions: tuple[int | None, ...] = (None,) if positions is None else tuple(positions)
        self.direction, self.metric, self.batch_tokens = direction, metric, batch_tokens
        self.engine: Engine = engine or model.engine
        self.sublayers = None
        if roles:
            with evaluating(model.model):
                self.sublayers = find_sublayers(model.adapter)
        self.places = {component: self._places(component) for component in components}
        pairs = [(item.prompt_ids, item.corrupt_ids or ()) for item in items]
        bases, givers = zip(*(pair[::-1] if direction == "denoise" else pair for pair in pairs), strict=True)
        rows = [TokenizedProbe(item.probe, base, item.target_ids[:1]) for item, base in zip(items, bases, strict=True)]
        self._wanted = torch.tensor([[item.target_ids[0], item.corrupt_target_id] for item in items])
        self._batches = [
            PairBatch.of(batch, [givers[i] for i in batch.index], position_map)
            for batch in probe_batches(rows, TargetTable.of(rows), batch_tokens)
        ]
        self._checks = self._end_checks()

    @property
    def tokens(self) -> int:
        """How many tokens will pass through blocks, for a progress bar."""
        return sum(
            block_tokens(self.n_blocks, variants, batch.base.tokens.ids.numel(), self.engine)
            for batch in self._batches
            for variants in (self._checks, *map(self._variants, self._columns(batch)))
        )

    def run(self, on_tokens: Callable[[int], object] = lambda tokens: None) -> PatchMeasures:
        """Patch every pair.

        Args:
            on_tokens: called with the number of tokens whenever a block has run on some.

        Raises:
            HookError: an end check failed: putting all of the other prompt's last stream in does not give its output,
                or putting a run's own streams in changes its output.
        """
        n = len(self._wanted)
        bases, givers = (_Outputs(np.zeros((n, 2)), np.zeros(n, dtype=np.int64)) for _ in range(2))
        patched = {
            component: np.full((self.n_blocks + (component == "resid"), len(self.positions), n), np.nan)
            for component in self.places
        }
        gaps = []
        with evaluating(self.model.model):
            for batch in self._batches:
                index = list(batch.base.index)
                streams = read_streams(self.adapter, batch.giver)
                base, giver, gap = self._ends(batch, streams, on_tokens)
                for all_of, found in ((bases, base), (givers, giver)):
                    all_of.log_p[index], all_of.top[index] = found.log_p, found.top
                gaps.append(gap)
                given = given_by(
                    self.adapter, batch.giver, batch.sources, streams, self._variants(None), self.sublayers
                )
                del streams
                edits = PatchEdits(self.adapter, torch.as_tensor(batch.columns), {"other": given}, self.sublayers)
                for column, values in enumerate(self._patched(batch, edits, base, on_tokens)):
                    for component, found_places in values.items():
                        patched[component][np.ix_(self.places[component], [column], index)] = found_places[:, None]
        clean, corrupt = (givers, bases) if self.direction == "denoise" else (bases, givers)
        wanted = self._wanted.numpy()
        return PatchMeasures(
            clean=metric_of(clean.log_p, self.metric),
            corrupt=metric_of(corrupt.log_p, self.metric),
            answered=clean.top == wanted[:, 0],
            corrupt_answered=corrupt.top == wanted[:, 1],
            patched=patched,
            checks={name: _largest(gap[name] for gap in gaps) for name in gaps[0]} | {"limit": self._limit},
        )

    def _places(self, component: Component) -> tuple[int, ...]:
        if component == "resid":
            return tuple(range(self.n_blocks + 1))
        if component == "block":
            return tuple(range(self.n_blocks))
        assert self.sublayers is not None
        found = tuple(block for block in range(self.n_blocks) if self.sublayers.of(block, component))
        if not found:
            raise InputError(f"no block of {self.model.name} has a sub-layer {component!r}: leave it out of components")
        return found

    def _variants(self, position: int | None) -> list[PatchVariant]:
        """Every patch of one column."""
        return [PatchVariant(c, place, position) for c, places in self.places.items() for place in places]

    def _columns(self, batch: PairBatch) -> list[int | None]:
        """The positions at which patching can change anything."""
        return [position for position in self.positions if batch.at(batch.differs, position).any()]

    def _patched(
        self, batch: PairBatch, edits: PatchEdits, base: _Outputs, on_tokens: Callable[[int], object]
    ) -> list[dict[Component, np.ndarray]]:
        """Per position and component the metric of the patched runs, `[places, probes]`."""
        unpatched = metric_of(base.log_p, self.metric)
        everywhere = np.full(batch.columns.shape, self.model.anatomy.position_dim is None)
        running = self._columns(batch)
        found = []
        for position in self.positions:
            variants = self._variants(position)
            mapped = batch.at((batch.sources >= 0) | everywhere, position)
            values = np.tile(np.where(mapped, unpatched, np.nan), (len(variants), 1))
            if position in running:
                lens = self._lens(batch, variants, edits, on_tokens)
                outputs = self._read(
                    lens, range(self.n_blocks + 1, self.n_blocks + 1 + len(variants)), batch.base.index
                )
                # Where nothing can change, rounding may not either: the result must not depend on the batch.
                rows = batch.at(batch.differs | everywhere, position)
                values[:, rows] = metric_of(outputs.log_p, self.metric)[:, rows]
            ends = np.cumsum([len(places) for places in self.places.values()])
            found.append(dict(zip(self.places, np.split(values, ends[:-1]), strict=True)))
        return found

    def _end_checks(self) -> list[PatchVariant]:
        """The run's own stream and own contribution from the middle; then all of the other's last stream."""
        component: Component = next((c for c in self.places if c in ("mixer", "mlp")), "block")
        places = self.places.get(component, range(self.n_blocks))
        middle = min(places, key=lambda place: abs(place - self.n_blocks // 2))
        own = [PatchVariant("resid", self.n_blocks // 2, None, "self"), PatchVariant(component, middle, None, "self")]
        if self.model.self_check.tail == "whole":  # its output depends on more than the last stream
            return own
        return [*own, PatchVariant("resid", self.n_blocks, None, "aligned")]

    def _ends(
        self, batch: PairBatch, streams: Streams, on_tokens: Callable[[int], object]
    ) -> tuple[_Outputs, _Outputs, dict[str, float | None]]:
        """Outputs of base and giver, and the gaps of the end checks."""
        index = batch.base.index
        last = [length - 1 for length in batch.giver.lengths]
        giver = self._outputs(log_probs(streams.logits[range(len(last)), last]), index)
        own, other = self._checks[:2], self._checks[2:]
        at = np.where(batch.columns < 0, np.arange(batch.columns.shape[1]), -1)
        base_streams = read_streams(self.adapter, batch.base.tokens)
        edits = PatchEdits(
            self.adapter,
            torch.as_tensor(batch.columns),
            {
                "self": given_by(self.adapter, batch.base.tokens, at, base_streams, own, self.sublayers),
                "aligned": given_by(self.adapter, batch.giver, batch.aligned, streams, other),
            },
            self.sublayers,
        )
        lens = self._lens(batch, self._checks, edits, on_tokens)
        found = self._read(lens, range(self.n_blocks, self.n_blocks + 1 + len(self._checks)), index)
        base = _Outputs(found.log_p[0], found.top[0])
        gaps: dict[str, float | None] = {
            "own_streams": max(self._gap(log_p, base.log_p) for log_p in found.log_p[1:3]),
            "last_depth": self._gap(found.log_p[3], giver.log_p) if other else None,
        }
        said = {
            "own_streams": "putting a run's own streams in changes its output",
            "last_depth": "putting all of the other prompt's last stream in does not give its output",
        }
        advice = "pass engine='full'" if self.engine == "onepass" else "it keeps more than its residual stream"
        for name, gap in gaps.items():
            if gap is not None and not gap <= self._limit:
                raise HookError(
                    f"patching is not exact on {self.model.name}: {said[name]} (gap {gap:.3g}, limit "
                    f"{self._limit:.1g}); {advice}"
                )
        return base, giver, gaps

    @property
    def _exact(self) -> bool:
        return self.model.opened.dtype in ("float32", "float64")

    @property
    def _limit(self) -> float:
        """Of the end checks; in lower precision what the self-check allows the model's own rounding."""
        return MAX_GAP if self._exact else max(c.limit for c in self.model.self_check.checks if c.name == "untouched")

    def _gap(self, log_p: np.ndarray, expected: np.ndarray) -> float:
        """Of the metric; in lower precision of probabilities, as in the self-check."""
        a, b = (metric_of(x, self.metric) if self._exact else np.exp(x) for x in (log_p, expected))
        return float(np.abs(a - b).max())

    def _lens(
        self,
        batch: PairBatch,
        variants: Sequence[PatchVariant],
        edits: PatchEdits,
        on_tokens: Callable[[int], object],
    ) -> Lens:
        """Outputs of the base (item L) and of variants (from L + 1) at the last token."""
        tail, tokens = self.model.self_check.tail, batch.base.tokens
        if tail == "whole":  # the lens itself runs the forwards
            streams = ReadStreams(None, None)
            on_tokens(block_tokens(self.n_blocks, variants, tokens.ids.numel(), "full"))
        else:
            streams = run(
                self.adapter,
                tokens,
                batch.base.reads,
                variants,
                edits,
                engine=self.engine,
                batch_tokens=self.batch_tokens,
                on_tokens=on_tokens,
            )
        return open_lens(tail, self.adapter, tokens, batch.base.reads, variants, edits, streams)

    def _read(self, lens: Lens, items: Sequence[int], index: Sequence[int]) -> _Outputs:
        """Outputs `[items, probes]`, one chunk of `[rows, vocab]` at a time."""
        vocab = self.model.anatomy.vocab
        log_p, top = np.zeros((len(items), len(index), 2)), np.zeros((len(items), len(index)), dtype=np.int64)
        per_read = max(1, MAX_LOGITS // vocab)
        per_item = max(1, MAX_LOGITS // (min(per_read, len(index)) * vocab))
        for start in range(0, len(index), per_read):
            reads = range(len(index))[start : start + per_read]
            for first in range(0, len(items), per_item):
                rows = slice(first, first + per_item)
                found = self._outputs(log_probs(lens.logits(items[rows], reads)), index[start : start + per_read])
                log_p[rows, start : start + per_read], top[rows, start : start + per_read] = found.log_p, found.top
        return _Outputs(log_p, top)

    def _outputs(self, log_p: Tensor, index: Sequence[int]) -> _Outputs:
        wanted = self._wanted[list(index)].to(log_p.device).expand(*log_p.shape[:-1], 2)
        return _Outputs(log_p.gather(-1, wanted).cpu().numpy(), log_p.argmax(-1).cpu().numpy())


def metric_of(log_p: Float[np.ndarray, "*rows 2"], metric: Metric) -> Float[np.ndarray, "*rows"]:
    """A metric from log-probabilities of the target and the corrupt target, `[..., 2]`."""
    target = log_p[..., 0]
    if metric == "logit_diff":
        return target - log_p[..., 1]
    return target if metric == "log_p" else np.exp(target)


def recovered(
    patched: Float[np.ndarray, "*places probes"],
    clean: Float[np.ndarray, "probes"],
    corrupt: Float[np.ndarray, "probes"],
    direction: Direction,
    min_gap: float,
) -> Float[np.ndarray, "*places probes"]:
    """Normalised recovery: `denoise` the share of the clean metric that came back, `noise` the share that was lost.

    Args:
        patched: metric of the patched runs.
        clean: metric of the clean runs.
        corrupt: metric of the corrupt runs.
        direction: which of them was patched.
        min_gap: where clean - corrupt is smaller, the recovery is missing.

    Returns:
        0 where the patch changes nothing, 1 where it does all that the other prompt does; NaN where undefined.
    """
    gap = np.where(clean - corrupt >= min_gap, clean - corrupt, np.nan)
    return (patched - corrupt if direction == "denoise" else clean - patched) / gap


def why_undefined(clean: float, corrupt: float, min_gap: float) -> str | None:
    """Why a pair has no recovery, or None."""
    if clean - corrupt >= min_gap:
        return None
    return AGREE if clean - corrupt > -min_gap else REVERSED


def _largest(gaps: Iterable[float | None]) -> float | None:
    found = [gap for gap in gaps if gap is not None]
    return max(found) if found else None
