"""The joint trace: where a model executes tasks and where it is fragile, from one pass over its blocks."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from tracer.ablations import WEIGHTED, Positions, ablation_kinds, part_names
from tracer.assembly import assembled
from tracer.engine import DEFAULT_BATCH_TOKENS
from tracer.errors import InputError, one_of
from tracer.measuring import Measuring, Readout, Settings
from tracer.models.fingerprint import weights_digest
from tracer.models.plain import evaluating
from tracer.models.selfcheck import Engine
from tracer.models.traced import TracedModel, check_same_architecture, load
from tracer.partial import PartialRun, differing
from tracer.particle import ParticleRule
from tracer.probes import (
    Probe,
    ProbeSet,
    TargetReading,
    TokenizedProbes,
    read_probes,
)
from tracer.results import PARTIAL, TraceResult, check_free
from tracer.runs import allowed_engine, check_fit, corrupt_of, default_probes, usable_probes, versions
from tracer.tuned_lens import TunedLens


def trace(
    model: object,
    probes: str | Path | ProbeSet | Sequence[Probe | Mapping[str, object]] | None = None,
    *,
    groups: Sequence[str] | None = None,
    data: str | os.PathLike[str] | None = None,
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
    perturb_scale: float = 0.1,
    seed: int = 0,
    recovery: bool = False,
    swap_from: object = None,
    readout: str = "logit",
    tuned_lens: str | os.PathLike[str] | TunedLens | None = None,
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
        probes: a shipped set or collection (`en-capitals`, `english`, `chinese`), a JSONL or CSV file, the questions of
            a benchmark (`ceval:val`, `cmmlu:test`), or probes. Default: `english`, and `zoo/held` for a model of the
            zoo.
        groups: only these groups; of a benchmark, these subjects.
        data: for a benchmark, the folder of a local copy, as in `tracer.evaluate`.
        limit: only the first so many usable probes of each group.
        ablations: any of `zero` (alias `skip`), `mean`, `resample`, `noise`, `perturb`, `swap_weights`,
            `zero_stream`, as names or separated by commas; an empty list or `none` for the lens alone.
        parts: what of each block is ablated: `block`, `mixer`, `mlp`; the last two where a block is their exact sum.
        positions: where ablations act: `all`, `not_first` or `last`.
        target: how a target of several tokens is read: refused (`single`), its `first` token, or `joint`ly.
        rule: which block is a probe's particle: `first_rise`, `half_final` or `max_rise`.
        min_rise: smallest rise in probability that counts.
        rel_rise: smallest rise as a share of the probe's largest.
        noise_samples: draws per probe for `noise`, and of the weights for `perturb`.
        noise_scale: noise in units of the contribution's standard deviation.
        perturb_scale: norm of the noise on each weight matrix of a block, as a share of the matrix's own.
        seed: of donors, noise, permutations and bootstrap.
        recovery: also patch each block's contribution in the clean run into the run on the corrupt prompt, for probes
            that have one: the share of the answer that the block brings back, beside its fragility. Not with the
            target `joint`, of which it reads no more than one token.
        swap_from: for `swap_weights`, another checkpoint of the same architecture: an opened model, or anything that
            `load` takes, opened with the same options.
        readout: the lens that particles are read through: `logit`, or `tuned`, with the plain lens beside it.
        tuned_lens: for `tuned`, a lens of `train_tuned_lens` or the file that it is saved in.
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
    settings = Settings(
        kinds,
        part_names(parts),
        one_of("positions", positions, get_args(Positions)),  # type: ignore[arg-type]
        one_of("target", target, get_args(TargetReading)),  # type: ignore[arg-type]
        ParticleRule(rule, min_rise, rel_rise),
        noise_samples,
        noise_scale,
        perturb_scale,
        seed,
        batch_tokens,
        limit,
        recovery,
        one_of("readout", readout, get_args(Readout)),  # type: ignore[arg-type]
    )
    if recovery and target == "joint":
        raise InputError(
            "recovery reads one token of a target, not 'joint' ones: pass target='first' or 'single', or leave "
            "recovery out"
        )
    if (readout == "tuned") != (tuned_lens is not None):
        raise InputError(
            "readout 'tuned' needs tuned_lens=, a file that tracer tuned-lens has written"
            if tuned_lens is None
            else "tuned_lens= is given but the readout is 'logit': pass readout='tuned'"
        )
    if ("swap_weights" in kinds) != (swap_from is not None):
        raise InputError(
            "ablation 'swap_weights' needs swap_from=, another checkpoint of the same architecture"
            if swap_from is None
            else "swap_from= is given without the ablation 'swap_weights': pass both or neither"
        )
    lens = tuned_lens if isinstance(tuned_lens, TunedLens) or tuned_lens is None else TunedLens.load(tuned_lens)
    if engine is not None:
        one_of("engine", engine, get_args(Engine))
    folder = None if out is None else Path(out)
    if folder is not None:
        check_free(folder, force=force or resume)
    probe_set = read_probes(
        default_probes(model) if probes is None else probes, skip_bad=skip_bad, groups=groups, data=data
    )
    opened = model if isinstance(model, TracedModel) else load(model, progress=progress, **(load_options or {}))
    used = allowed_engine(opened, engine)
    other = None
    if swap_from is not None:
        options = {**(load_options or {}), "backend": opened.backend}
        other = swap_from if isinstance(swap_from, TracedModel) else load(swap_from, progress=progress, **options)
        check_same_architecture(opened, other)
    _check_reach(opened, settings)
    if lens is not None:
        lens.check(opened)
    tokenized = usable_probes(opened, probe_set, target=settings.target, limit=limit, skip_bad=skip_bad)
    if settings.recovery:
        check_fit(opened, [corrupt_of(item) for item in tokenized.items if item.corrupt_ids is not None])
    if settings.recovery and all(item.corrupt_ids is None for item in tokenized.items):
        raise InputError(
            f"none of the {len(tokenized)} probes of {probe_set.name!r} has a usable corrupt prompt, which recovery "
            "needs: add corrupt and corrupt_target, or leave recovery out"
        )
    plan = _plan(opened, probe_set, tokenized, settings, used, lens, other)
    if folder is not None and resume and (folder / "run.json").exists() and not (folder / PARTIAL).exists():
        return _finished(folder, plan)
    measuring = Measuring(opened, tokenized.items, settings, used, lens, other, progress)
    store = PartialRun(folder, plan, resume=resume, force=force)
    with evaluating(opened.model):
        measured = measuring.run(store)
    result = assembled(opened, probe_set, tokenized, settings, used, lens, plan, measured)
    if folder is not None:
        result.save(folder, force=force or resume)
        store.remove()
    return result


def _check_reach(model: TracedModel, settings: Settings) -> None:
    """Refuse what the model's residual stream does not allow."""
    if settings.readout == "tuned" and model.self_check.tail == "whole":
        raise InputError(
            f"the tail of {model.name} cannot be replayed on single positions, which a tuned lens needs: pass "
            "readout='logit'"
        )
    weighted = [kind for kind in settings.ablations if kind in WEIGHTED]
    if weighted and settings.positions != "all":
        raise InputError(
            f"ablation {weighted[0]!r} changes weights, which act at all positions: pass positions 'all', not "
            f"{settings.positions!r}"
        )
    inside = [call.index for call in model.anatomy.calls if call.last is not None]
    if weighted and inside:
        raise InputError(
            f"ablation {weighted[0]!r} needs blocks that are modules; block {inside[0]} of {model.name} is none"
        )
    positionless = [kind for kind in settings.ablations if kind not in ("zero", "zero_stream", *WEIGHTED)]
    if model.anatomy.position_dim is None and (positionless or settings.positions != "all"):
        raise InputError(
            f"{model.name} is read at positions that are not tokens, so only whole blocks can be ablated, at all "
            f"positions: pass ablations 'zero' or 'perturb' and positions 'all', not "
            f"{positionless[0] if positionless else settings.positions!r}"
        )


def _plan(
    model: TracedModel,
    probes: ProbeSet,
    tokenized: TokenizedProbes,
    settings: Settings,
    engine: Engine,
    lens: TunedLens | None,
    other: TracedModel | None,
) -> dict[str, Any]:
    """Everything that the numbers depend on, as plain data."""
    content = [
        [i.probe.id, i.probe.group, i.prompt_ids, i.target_ids, i.corrupt_ids, i.corrupt_target_id]
        for i in tokenized.items
    ]
    return {
        "model": model.fingerprint(),
        "device": model.device,
        "backend": model.backend,
        "engine": engine,
        "probes": hashlib.sha256(json.dumps(content).encode()).hexdigest(),
        "swap_from": None if other is None else other.fingerprint(),
        "tuned_lens": None if lens is None else _lens_digest(lens),
        "arguments": {
            "model": model.name,
            "probes": probes.name,
            "groups": list(probes.groups),
            **{key: value for key, value in asdict(settings).items() if key != "rule"},
            "swap_from": None if other is None else other.name,
            **{("rule" if key == "name" else key): value for key, value in asdict(settings.rule).items()},
        },
        "versions": versions(),
    }


def _finished(folder: Path, plan: dict[str, Any]) -> TraceResult:
    result = TraceResult.load(folder)
    changed = differing(plan, result.run["plan"] | {key: result.run[key] for key in ("arguments", "versions")})
    if changed is not None:
        raise InputError(f"{str(folder)!r} holds a result with another {changed}: pass another folder, or force")
    return result


def _lens_digest(lens: TunedLens) -> str:
    return weights_digest(lens.tail_hash, [("weight", lens.weight), ("bias", lens.bias)])
