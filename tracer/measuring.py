"""The measuring part of a trace: batch by batch through the engine and the lens, into a store that survives."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from tracer.ablations import Calibration, CalibrationSums, Edits, Part, Positions, Variant, sweep
from tracer.batches import (
    ProbeBatch,
    TargetTable,
    choose_donors,
    crossed,
    edits_for,
    probe_batches,
    token_batches,
)
from tracer.divergence import MAX_CKA_ROWS, cka_matrix
from tracer.engine import ReadStreams, block_tokens, run
from tracer.errors import InputError
from tracer.logit_lens import Translate, open_lens
from tracer.measures import Measures, measure, rows_of_stream
from tracer.models.plain import evaluating
from tracer.models.selfcheck import Engine
from tracer.models.sublayers import find_sublayers
from tracer.models.traced import TracedModel
from tracer.partial import PartialRun
from tracer.particle import ParticleRule
from tracer.probes import TargetReading, TokenizedProbe
from tracer.recovery import UNDEFINED, BlockRecovery, block_recovery, block_recovery_tokens
from tracer.runs import token_bar
from tracer.statistics import rng
from tracer.tuned_lens import TunedLens

Readout = Literal["logit", "tuned"]
"""The lens that particles are read through."""

LENS_MEASURES = ("log_p", "entropy", "kl_to_final", "rank")
"""What depends on the lens."""

PLAIN = "plain/"
"""Before the names of what the plain logit lens reads, where a tuned one is used."""

BATCH = "batch-"
"""Names of stored batches begin so; the others hold the nulls of groups with joint targets."""


RECOVERY_PROBES = 32
"""Probes whose recovery is measured and kept together."""

MAX_NOISE_SCALE = 1e6
"""Beyond it noise drowns every stream alike, until its square leaves float32."""


@dataclass(frozen=True)
class Settings:
    """What a trace depends on beside the model and the probes; stored under the arguments' own names."""

    ablations: tuple[str, ...]
    parts: tuple[Part, ...]
    positions: Positions
    target: TargetReading
    rule: ParticleRule
    noise_samples: int
    noise_scale: float
    perturb_scale: float
    seed: int
    batch_tokens: int
    limit: int | None
    recovery: bool
    readout: Readout

    def __post_init__(self) -> None:
        least_values = {
            "noise_samples": 1,
            "batch_tokens": 1,
            "limit": 1,
            "noise_scale": 0.0,
            "perturb_scale": 0.0,
            "seed": 0,
        }
        for name, least in least_values.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"{name} is {getattr(self, name)}: pass a number of at least {least}")
        for name in ("noise_scale", "perturb_scale"):
            scale = getattr(self, name)
            if not (math.isfinite(scale) and scale <= MAX_NOISE_SCALE):
                raise InputError(f"{name} is {scale}: pass a finite number of at most {MAX_NOISE_SCALE:g}")


@dataclass(frozen=True)
class Measured:
    """Everything that a trace has measured, in the order of its probes.

    Attributes:
        variants: the ablations, in the order of the arrays' rows.
        table: the targets of each group.
        measures: through the chosen lens; see `tracer.measures.Measures`.
        rivals: per group, log-probability of each of its targets after each prompt, `[depths, probes, targets]`.
        plain: `LENS_MEASURES` and rivals through the plain logit lens, where the chosen one is tuned.
        cka: `[depths, depths]`, or None.
        recovery: share of the answer that each block brings back, or None.
        calibration_tokens: how many first and other tokens the means and deviations come from, or None.
        work: seconds, block tokens and batches.
    """

    variants: tuple[Variant, ...]
    table: TargetTable
    measures: Measures
    rivals: Mapping[str, np.ndarray]
    plain: tuple[dict[str, np.ndarray], dict[str, np.ndarray]] | None
    cka: np.ndarray | None
    recovery: BlockRecovery | None
    calibration_tokens: tuple[int, int] | None
    work: dict[str, Any]


class Measuring:
    """One trace while it runs.

    Args:
        model: the opened model.
        items: the probes.
        settings: what to measure.
        engine: `onepass` or `full`.
        tuned_lens: for the readout `tuned`.
        other: another checkpoint, for `swap_weights`.
        progress: show a progress bar.
    """

    def __init__(
        self,
        model: TracedModel,
        items: tuple[TokenizedProbe, ...],
        settings: Settings,
        engine: Engine,
        tuned_lens: TunedLens | None,
        other: TracedModel | None,
        progress: bool,
    ):
        self.model = model
        self.adapter = model.adapter
        self.items = items
        self.settings = settings
        self.engine = engine
        self.translate = None if tuned_lens is None else partial(tuned_lens.translate, model.anatomy)
        self.other = None if other is None else other.blocks
        self.progress = progress
        self.table = TargetTable.of(self.items)
        self.sublayers = None
        if set(settings.parts) != {"block"}:
            with evaluating(model.model):
                self.sublayers = find_sublayers(model.adapter)
        self.variants = sweep(
            settings.ablations, range(model.n_blocks), settings.noise_samples, settings.parts, self.sublayers
        )
        chosen = rng(settings.seed, "cka").permutation(len(self.items))[:MAX_CKA_ROWS]
        self.cka_probes = set(chosen.tolist())
        self.donors = choose_donors(self.items, settings.seed) if "resample" in settings.ablations else {}
        self.calibration: Calibration | None = None

    def run(self, store: PartialRun) -> Measured:
        """Measure what the store does not hold yet; the model must be in eval mode and without gradients."""
        self.store = store
        self.calibration = self._calibration()
        batches = probe_batches(self.items, self.table, self.settings.batch_tokens)
        joint = [group for group in self.table.targets if self.table.joint(group)]
        work = [(f"{BATCH}{n:05d}", batch, self.variants) for n, batch in enumerate(batches)]
        crossings: dict[str, list[tuple[str, ProbeBatch]]] = {}
        for group in joint:
            pairs = crossed(self.items, self.table, group)
            own = probe_batches(pairs, TargetTable.of(pairs), self.settings.batch_tokens)
            crossings[group] = [(f"null-{joint.index(group)}-{n:05d}", batch) for n, batch in enumerate(own)]
            work += [(name, batch, ()) for name, batch in crossings[group]]
        self._measure_all(work)
        measures = self._gathered(batches, tuple(Measures.__dataclass_fields__))
        plain = None
        if self.translate is not None:
            found = self._gathered(batches, (*LENS_MEASURES, "rival_log_p"), PLAIN)
            plain = ({name: found[name] for name in LENS_MEASURES}, self._rivals(found, crossings, PLAIN))
        done = [self.store[name] for name, _, _ in work]
        spent: dict[str, Any] = {key: sum(arrays[key].item() for arrays in done) for key in ("seconds", "block_tokens")}
        return Measured(
            variants=self.variants,
            table=self.table,
            measures=Measures(**measures),
            rivals=self._rivals(measures, crossings),
            plain=plain,
            cka=self._cka(batches),
            recovery=self._recovery() if self.settings.recovery else None,
            calibration_tokens=None if self.calibration is None else self.calibration.tokens,
            work=spent | {"batches": len(batches), "threads": torch.get_num_threads()},
        )

    def _recovery(self) -> BlockRecovery:
        """See `tracer.recovery.block_recovery`; some probes at a time, which an interrupt does not lose."""
        most = self.settings.batch_tokens
        portions = {
            f"recovery-{start:05d}": self.items[start : start + RECOVERY_PROBES]
            for start in range(0, len(self.items), RECOVERY_PROBES)
        }
        todo = {name: items for name, items in portions.items() if name not in self.store}
        total = sum(
            block_recovery_tokens(self.model, items, engine=self.engine, batch_tokens=most) for items in todo.values()
        )
        with token_bar(total, f"recovery {self.model.name}", self.progress) as advance:
            for name, items in todo.items():
                found = block_recovery(self.model, items, engine=self.engine, batch_tokens=most, on_tokens=advance)
                why = np.array([UNDEFINED.index(reason) for reason in found.undefined], dtype=np.int64)
                self.store[name] = {"recovery": found.values, "undefined": why}
        done = [self.store[name] for name in portions]
        return BlockRecovery(
            values=np.concatenate([arrays["recovery"] for arrays in done], axis=1),
            undefined=tuple(UNDEFINED[code] for arrays in done for code in arrays["undefined"]),
        )

    def _measure_all(self, work: Sequence[tuple[str, ProbeBatch, Sequence[Variant]]]) -> None:
        """Run every batch that is not in the store yet."""
        todo = [item for item in work if item[0] not in self.store]
        tokens = {
            name: block_tokens(self.model.n_blocks, variants, batch.tokens.ids.numel(), self.engine)
            for name, batch, variants in todo
        }
        with token_bar(sum(tokens.values()), f"trace {self.model.name}", self.progress) as advance:
            for name, batch, variants in todo:
                began = time.perf_counter()
                edits = edits_for(
                    self.adapter,
                    batch,
                    self.settings.ablations if variants else (),
                    self.settings.positions,
                    donors=self.donors,
                    calibration=self.calibration,
                    sublayers=self.sublayers,
                    seed=self.settings.seed,
                    noise_scale=self.settings.noise_scale,
                    perturb_scale=self.settings.perturb_scale,
                    other=self.other,
                )
                streams = run(
                    self.adapter,
                    batch.tokens,
                    batch.reads,
                    variants,
                    edits,
                    engine=self.engine,
                    batch_tokens=self.settings.batch_tokens,
                    on_tokens=advance,
                )
                arrays = self._measures(batch, variants, edits, streams)
                if name.startswith(BATCH) and streams.clean is not None:
                    arrays["streams"] = self._cka_rows(batch, streams.clean)
                arrays["block_tokens"] = np.array(tokens[name])
                arrays["seconds"] = np.array(time.perf_counter() - began)
                self.store[name] = arrays

    def _measures(
        self, batch: ProbeBatch, variants: Sequence[Variant], edits: Edits, streams: ReadStreams
    ) -> dict[str, np.ndarray]:
        """The numbers of one batch, through the chosen lens, and with a tuned one through the plain lens too."""
        anatomy, tail = self.model.anatomy, self.model.self_check.tail

        def through(translate: Translate | None, of: Sequence[Variant], read: ReadStreams) -> dict[str, np.ndarray]:
            lens = open_lens(tail, self.adapter, batch.tokens, batch.reads, of, edits, read, translate)
            return measure(anatomy, lens, read, batch.targets, len(of)).as_dict()

        arrays = through(self.translate, variants, streams)
        if self.translate is not None:
            plain = through(None, (), ReadStreams(streams.clean, ()))
            arrays |= {f"{PLAIN}{name}": plain[name] for name in ("rival_log_p", *LENS_MEASURES)}
        return arrays

    def _cka_rows(self, batch: ProbeBatch, streams: Sequence[torch.Tensor]) -> np.ndarray:
        """Clean streams of those probes of a batch that take part in the CKA, `[depths, probes, d]` float32."""
        firsts = batch.targets.first_reads.tolist()
        keep = [read for read, probe in zip(firsts, batch.index, strict=True) if probe in self.cka_probes]
        return np.stack([rows_of_stream(self.model.anatomy, x)[keep].float().numpy() for x in streams])

    def _calibration(self) -> Calibration | None:
        """Means and deviations of all contributions over the prompts of this trace, where an ablation needs them."""
        if not {"mean", "noise"} & set(self.settings.ablations):
            return None
        sums = CalibrationSums(self.adapter, self.sublayers)
        for batch in token_batches([item.prompt_ids for item in self.items], self.settings.batch_tokens):
            sums.add(batch)
        return sums.calibration()

    def _gathered(self, batches: Sequence[ProbeBatch], names: Sequence[str], lens: str = "") -> dict[str, np.ndarray]:
        """Some measures of all probes through one lens, in the order of the probe set."""
        order = np.argsort(np.concatenate([batch.index for batch in batches]))
        parts = [self.store[f"{BATCH}{n:05d}"] for n in range(len(batches))]
        arrays: dict[str, np.ndarray] = {}
        for name in names:
            own = [part[lens + name] for part in parts]
            if name == "rival_log_p":  # as wide as the batch's largest group
                widest = max(array.shape[2] for array in own)
                stacked = [np.pad(array, ((0, 0), (0, 0), (0, widest - array.shape[2]))) for array in own]
                arrays[name] = np.concatenate(stacked, axis=1)[:, order]
            else:
                arrays[name] = np.concatenate(own, axis=-1)[..., order]
        return arrays

    def _rivals(
        self, measures: Mapping[str, np.ndarray], crossings: dict[str, list[tuple[str, ProbeBatch]]], lens: str = ""
    ) -> dict[str, np.ndarray]:
        """Per group, log-probability of each of its targets after each prompt, `[depths, probes, targets]`."""
        groups = np.array([item.probe.group for item in self.items])
        rivals = {}
        for group, targets in self.table.targets.items():
            index = np.flatnonzero(groups == group)
            if group in crossings:
                order = np.argsort(np.concatenate([batch.index for _, batch in crossings[group]]))
                parts = [self.store[name][f"{lens}log_p"] for name, _ in crossings[group]]
                log_p = np.concatenate(parts, axis=1)[:, order]
                rivals[group] = log_p.reshape(len(log_p), len(index), len(targets))
            else:
                rivals[group] = measures["rival_log_p"][:, index, : len(targets)]
        return rivals

    def _cka(self, batches: Sequence[ProbeBatch]) -> np.ndarray | None:
        if self.model.anatomy.position_dim is None:
            return None
        streams = np.concatenate([self.store[f"{BATCH}{n:05d}"]["streams"] for n in range(len(batches))], axis=1)
        matrix = cka_matrix(torch.from_numpy(streams))
        return None if matrix is None else matrix.numpy()
