"""The joint trace: where a model executes tasks and where it is fragile, from one pass over its blocks."""

import hashlib
import json
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import torch
import transformers
from tqdm import tqdm

from tracer.ablations import (
    Calibration,
    CalibrationSums,
    Part,
    Positions,
    Variant,
    ablation_kinds,
    label_of,
    part_names,
    sweep,
)
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
from tracer.engine import DEFAULT_BATCH_TOKENS, block_tokens, run
from tracer.errors import InputError, one_of
from tracer.logit_lens import open_lens
from tracer.measures import Measures, measure, rows_of_stream
from tracer.models.plain import evaluating
from tracer.models.selfcheck import Engine
from tracer.models.sublayers import find_sublayers
from tracer.models.traced import TracedModel, load
from tracer.partial import PartialRun, differing
from tracer.particle import GroupParticle, ParticleRule, overall_block
from tracer.probes import (
    Probe,
    ProbeSet,
    TargetReading,
    TokenizedProbe,
    TokenizedProbes,
    read_probes,
    tokenize,
)
from tracer.results import PARTIAL, SCHEMA, TraceResult, check_free
from tracer.statistics import rng
from tracer.tables import block_table, by_kind, fragilities, group_fragilities, particles_of, probe_table, warnings_of

BATCH = "batch-"
"""Names of stored batches begin so; the others hold the nulls of groups with joint targets."""


@dataclass(frozen=True)
class _Settings:
    """What a trace depends on beside the model and the probes; stored under the arguments' own names."""

    ablations: tuple[str, ...]
    parts: tuple[Part, ...]
    positions: Positions
    target: TargetReading
    rule: ParticleRule
    noise_samples: int
    noise_scale: float
    seed: int
    batch_tokens: int
    limit: int | None

    def __post_init__(self) -> None:
        least_values = {"noise_samples": 1, "batch_tokens": 1, "limit": 1, "noise_scale": 0.0, "seed": 0}
        for name, least in least_values.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"{name} is {getattr(self, name)}: pass a number of at least {least}")


def trace(
    model: object,
    probes: str | Path | ProbeSet | Sequence[Probe | Mapping[str, object]] = "english",
    *,
    groups: Sequence[str] | None = None,
    limit: int | None = None,
    ablations: str | Sequence[str] = ("zero",),
    parts: str | Sequence[str] = ("block",),
    positions: str = "all",
    target: str = "single",
    rule: str = "first_rise",
    min_rise: float = 0.05,
    rel_rise: float = 0.25,
    noise_samples: int = 8,
    noise_scale: float = 1.0,
    seed: int = 0,
    engine: str | None = None,
    batch_tokens: int = DEFAULT_BATCH_TOKENS,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    force: bool = False,
    skip_bad: bool = False,
    progress: bool = True,
    load_options: Mapping[str, Any] | None = None,
) -> TraceResult:
    """Trace a model on a set of probes: logit lens, task particles, fragility, evolution of the stream.

    Args:
        model: an opened model, or anything that `load` takes.
        probes: a shipped set or collection (`en-capitals`, `english`, `chinese`), a JSONL or CSV file, or probes.
        groups: only these groups.
        limit: only the first so many usable probes of each group.
        ablations: any of `zero` (alias `skip`), `mean`, `resample`, `noise`, `zero_stream`, as names or separated by
            commas; an empty list or `none` for the lens alone.
        parts: what of each block is ablated: `block`, `mixer`, `mlp`; the last two where a block is their exact sum.
        positions: where ablations act: `all`, `not_first` or `last`.
        target: how a target of several tokens is read: refused (`single`), its `first` token, or `joint`ly.
        rule: which block is a probe's particle: `first_rise`, `half_final` or `max_rise`.
        min_rise: smallest rise in probability that counts.
        rel_rise: smallest rise as a share of the probe's largest.
        noise_samples: draws per probe for `noise`.
        noise_scale: noise in units of the contribution's standard deviation.
        seed: of donors, noise, permutations and bootstrap.
        engine: `onepass` or `full`; default what the self-check allows.
        batch_tokens: most tokens in one call of a block; does not change the result. The streams of all variants of a
            batch, an eighth as many tokens each, stay in memory until it is done.
        out: folder to save the result in; finished batches are kept there while the trace runs.
        resume: go on with an interrupted trace in `out`; a finished one with the same arguments is loaded.
        force: replace what `out` holds.
        skip_bad: count unusable probes instead of refusing the set.
        progress: show a progress bar.
        load_options: keyword arguments of `load` for a model that is not opened yet.

    Returns:
        The result, already saved when `out` is given.

    Raises:
        InputError: arguments, probes or folder cannot be used; nothing has been written.
        ModelRefused: the model cannot be traced exactly.

    Example:
        >>> import tracer
        >>> result = tracer.trace("smollm2-135m-instruct-q4_1", "en-capitals")  # doctest: +SKIP
        >>> print(result.summary())  # doctest: +SKIP
    """
    kinds = ablation_kinds(ablations)
    settings = _Settings(
        kinds,
        part_names(parts),
        one_of("positions", positions, get_args(Positions)),  # type: ignore[arg-type]
        one_of("target", target, get_args(TargetReading)),  # type: ignore[arg-type]
        ParticleRule(rule, min_rise, rel_rise),
        noise_samples,
        noise_scale,
        seed,
        batch_tokens,
        limit,
    )
    if engine is not None:
        one_of("engine", engine, get_args(Engine))
    folder = None if out is None else Path(out)
    if folder is not None:
        check_free(folder, force=force or resume)
    probe_set = read_probes(probes, skip_bad=skip_bad, groups=groups)
    opened = model if isinstance(model, TracedModel) else load(model, progress=progress, **(load_options or {}))
    if engine == "onepass" and opened.engine == "full":
        raise InputError(f"engine 'onepass' is not exact on {opened.name} ({opened.self_check.reason}): pass 'full'")
    _check_reach(opened, settings)
    tokenized = tokenize(probe_set, opened.tokenizer, target=settings.target, skip_bad=skip_bad)
    _check_fit(opened, tokenized.items)
    tokenized = replace(tokenized, items=_first_of_each_group(tokenized.items, settings.limit))
    if not tokenized.items:
        first = f" (the first: {tokenized.skipped[0].reason})" if tokenized.skipped else ""
        raise InputError(f"none of the {len(probe_set)} probes of {probe_set.name!r} can be used{first}")
    used = cast(Engine, engine or opened.engine)
    plan = _plan(opened, probe_set, tokenized, settings, used)
    if folder is not None and resume and (folder / "run.json").exists() and not (folder / PARTIAL).exists():
        return _finished(folder, plan)
    run_of_it = _Trace(opened, tokenized, settings, used, progress)
    store = PartialRun(folder, plan, resume=resume, force=force)
    with evaluating(opened.model):
        result = run_of_it.run(store, probe_set, plan)
    if folder is not None:
        result.save(folder, force=force or resume)
        store.remove()
    return result


def _check_reach(model: TracedModel, settings: _Settings) -> None:
    """Refuse what the model's residual stream does not allow."""
    positionless = [kind for kind in settings.ablations if kind not in ("zero", "zero_stream")]
    if model.anatomy.position_dim is None and (positionless or settings.positions != "all"):
        raise InputError(
            f"{model.name} is read at positions that are not tokens, so only whole blocks can be ablated, at all "
            f"positions: pass ablations 'zero' and positions 'all', not "
            f"{positionless[0] if positionless else settings.positions!r}"
        )


def _check_fit(model: TracedModel, items: Sequence[TokenizedProbe]) -> None:
    """Refuse probes that the model has no positions or no embeddings for, before anything runs."""
    for item in items:
        length, largest = len(item.prompt_ids) + len(item.target_ids) - 1, max(item.prompt_ids + item.target_ids)
        if model.positions is not None and length > model.positions:
            raise InputError(
                f"probe {item.probe.id} has {length} tokens, but {model.name} has {model.positions} positions: "
                "shorten it"
            )
        known = min(model.anatomy.vocab, model.embeddings)
        if largest >= known:
            raise InputError(
                f"probe {item.probe.id} has token {largest}, but {model.name} has only {known}: pass the "
                "tokenizer, or the token ids, that belong to the model"
            )


def _first_of_each_group(items: Sequence[TokenizedProbe], limit: int | None) -> tuple[TokenizedProbe, ...]:
    seen: Counter[str] = Counter()
    kept = []
    for item in items:
        seen[item.probe.group] += 1
        if limit is None or seen[item.probe.group] <= limit:
            kept.append(item)
    return tuple(kept)


def _plan(
    model: TracedModel, probes: ProbeSet, tokenized: TokenizedProbes, settings: _Settings, engine: Engine
) -> dict[str, Any]:
    """Everything that the numbers depend on, as plain data."""
    content = [[i.probe.id, i.probe.group, i.prompt_ids, i.target_ids] for i in tokenized.items]
    return {
        "model": model.fingerprint(),
        "device": model.device,
        "backend": model.backend,
        "engine": engine,
        "probes": hashlib.sha256(json.dumps(content).encode()).hexdigest(),
        "arguments": {
            "model": model.name,
            "probes": probes.name,
            "groups": list(probes.groups),
            **{key: value for key, value in asdict(settings).items() if key != "rule"},
            **{("rule" if key == "name" else key): value for key, value in asdict(settings.rule).items()},
        },
        "versions": {
            "tracer": version("layertracer"),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }


def _finished(folder: Path, plan: dict[str, Any]) -> TraceResult:
    result = TraceResult.load(folder)
    changed = differing(plan, result.run["plan"] | {key: result.run[key] for key in ("arguments", "versions")})
    if changed is not None:
        raise InputError(f"{str(folder)!r} holds a result with another {changed}: pass another folder, or force")
    return result


class _Trace:
    """One trace while it runs."""

    def __init__(
        self,
        model: TracedModel,
        tokenized: TokenizedProbes,
        settings: _Settings,
        engine: Engine,
        progress: bool,
    ):
        self.model = model
        self.adapter = model.adapter
        self.tokenized = tokenized
        self.items = tokenized.items
        self.settings = settings
        self.engine = engine
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

    def run(self, store: PartialRun, probe_set: ProbeSet, plan: dict[str, Any]) -> TraceResult:
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
        measures = self._gathered(batches)
        rivals = self._rivals(measures, crossings)
        done = [self.store[name] for name, _, _ in work]
        spent = {key: sum(arrays[key].item() for arrays in done) for key in ("seconds", "block_tokens")}
        return self._result(probe_set, plan, measures, rivals, batches, spent)

    def _measure_all(self, work: Sequence[tuple[str, ProbeBatch, Sequence[Variant]]]) -> None:
        """Run every batch that is not in the store yet."""
        todo = [item for item in work if item[0] not in self.store]
        tokens = {
            name: block_tokens(self.model.n_blocks, variants, batch.tokens.ids.numel(), self.engine)
            for name, batch, variants in todo
        }
        with _bar(sum(tokens.values()), f"trace {self.model.name}", self.progress) as advance:
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
                lens = open_lens(
                    self.model.self_check.tail, self.adapter, batch.tokens, batch.reads, variants, edits, streams
                )
                anatomy = self.model.anatomy
                arrays = measure(anatomy, lens, streams, batch.targets, len(variants)).as_dict()
                if name.startswith(BATCH) and streams.clean is not None:
                    arrays["streams"] = self._cka_rows(batch, streams.clean)
                arrays["block_tokens"] = np.array(tokens[name])
                arrays["seconds"] = np.array(time.perf_counter() - began)
                self.store[name] = arrays

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

    def _gathered(self, batches: Sequence[ProbeBatch]) -> Measures:
        """The measures of all probes, in the order of the probe set."""
        order = np.argsort(np.concatenate([batch.index for batch in batches]))
        parts = [self.store[f"{BATCH}{n:05d}"] for n in range(len(batches))]
        arrays: dict[str, np.ndarray] = {}
        for name in Measures.__dataclass_fields__:
            if name == "rival_log_p":  # as wide as the batch's largest group
                widest = max(part[name].shape[2] for part in parts)
                stacked = [np.pad(p[name], ((0, 0), (0, 0), (0, widest - p[name].shape[2]))) for p in parts]
                arrays[name] = np.concatenate(stacked, axis=1)[:, order]
            else:
                arrays[name] = np.concatenate([part[name] for part in parts], axis=-1)[..., order]
        return Measures(**arrays)

    def _rivals(self, measures: Measures, crossings: dict[str, list[tuple[str, ProbeBatch]]]) -> dict[str, np.ndarray]:
        """Per group, log-probability of each of its targets after each prompt, `[depths, probes, targets]`."""
        groups = np.array([item.probe.group for item in self.items])
        rivals = {}
        for group, targets in self.table.targets.items():
            index = np.flatnonzero(groups == group)
            if group in crossings:
                order = np.argsort(np.concatenate([batch.index for _, batch in crossings[group]]))
                log_p = np.concatenate([self.store[name]["log_p"] for name, _ in crossings[group]], axis=1)[:, order]
                rivals[group] = log_p.reshape(len(log_p), len(index), len(targets))
            else:
                rivals[group] = measures.rival_log_p[:, index, : len(targets)]
        return rivals

    def _cka(self, batches: Sequence[ProbeBatch]) -> np.ndarray | None:
        if self.model.anatomy.position_dim is None:
            return None
        streams = np.concatenate([self.store[f"{BATCH}{n:05d}"]["streams"] for n in range(len(batches))], axis=1)
        matrix = cka_matrix(torch.from_numpy(streams))
        return None if matrix is None else matrix.numpy()

    def _result(
        self,
        probe_set: ProbeSet,
        plan: dict[str, Any],
        measures: Measures,
        rivals: dict[str, np.ndarray],
        batches: Sequence[ProbeBatch],
        work: dict[str, Any],
    ) -> TraceResult:
        settings, anatomy = self.settings, self.model.anatomy
        kinds = tuple(label_of(kind, part) for kind in settings.ablations for part in settings.parts)
        groups = [item.probe.group for item in self.items]
        answered = measures.answered
        arrays = by_kind(measures, self.variants, anatomy.n_blocks)
        particles, found = particles_of(self.items, self.table, arrays, rivals, answered, settings.rule, settings.seed)
        usable = self.tokenized.usable()
        found += [GroupParticle.unmeasured(group) for group in probe_set.groups if usable[group] == 0]
        fragile = fragilities(kinds, arrays, answered, groups, anatomy.mixers, settings.seed)
        cka = self._cka(batches)
        if cka is not None:
            arrays["cka"] = cka
        counted = answered & np.isin(groups, [group.group for group in found if group.why_not is None])
        block = overall_block(found, seed=settings.seed)
        by_group = group_fragilities(kinds, arrays, answered, groups, anatomy.mixers, settings.seed)
        run_data = {
            "schema": SCHEMA,
            "arguments": plan["arguments"],
            "model": {"fingerprint": plan["model"], **self.model.describe()},
            "engine": self.engine,
            "readout": "logit",
            "calibration": None if self.calibration is None else {"tokens_first_and_other": self.calibration.tokens},
            "plan": {key: value for key, value in plan.items() if key not in ("arguments", "versions")},
            "versions": plan["versions"],
            "work": work | {"batches": len(batches), "threads": torch.get_num_threads()},
            "skipped": [asdict(skip) for skip in (*probe_set.skipped, *self.tokenized.skipped)],
            "probe_warnings": [asdict(note) for note in self.tokenized.warnings],
            "groups": [group.as_dict() | {"fragility": by_group.get(group.group, {})} for group in found],
            "particle_block": block.as_dict(),
            "fragility": [
                {
                    "ablation": entry.kind,
                    "n": entry.n,
                    "n_answered": entry.n_answered,
                    "ceiling": entry.ceiling,
                    "fragile": list(entry.fragile),
                    "fragile_without_first": list(entry.fragile_without_first),
                    "flat": entry.flat,
                    "by_mixer": entry.by_mixer.to_dict("records"),
                    "intervals": entry.method,
                }
                for entry in fragile
            ],
            "warnings": [*self.model.self_check.notes, *warnings_of(anatomy, found, block.estimate, fragile)],
        }
        return TraceResult(
            run=run_data,
            probes=probe_table(self.items, arrays, measures.answer, answered, particles, kinds, self.model.tokenizer),
            blocks=block_table(anatomy, arrays, fragile, particles, counted),
            arrays=arrays,
        )


@contextmanager
def _bar(total: int, label: str, show: bool) -> Iterator[Callable[[int], object]]:
    """A progress bar over the tokens that pass through blocks; yields the function that advances it."""
    with tqdm(total=total, desc=label, unit="tok", unit_scale=True, disable=not show or total == 0) as bar:
        yield bar.update
