"""The verb `drift`: two checkpoints of one architecture on the same probes."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from tracer.divergence import debiased_cka, js_divergence
from tracer.drifting.results import FILES, SCHEMA, DriftResult
from tracer.drifting.streams import cosine, last_streams, placed
from tracer.engine import DEFAULT_BATCH_TOKENS
from tracer.errors import InputError
from tracer.models.plain import evaluating
from tracer.models.traced import TracedModel, check_same_architecture, load
from tracer.probes import Probe, ProbeSet
from tracer.results import TraceResult, check_free
from tracer.runs import default_probes, versions
from tracer.statistics import bootstrap_profile, pooled_interval
from tracer.tracing import trace

SWAP = "swap_weights"


def drift(
    base: object,
    continued: object,
    probes: str | Path | ProbeSet | Sequence[Probe | Mapping[str, object]] | None = None,
    *,
    groups: Sequence[str] | None = None,
    limit: int | None = None,
    seed: int = 0,
    engine: str | None = None,
    batch_tokens: int = DEFAULT_BATCH_TOKENS,
    out: str | os.PathLike[str] | None = None,
    force: bool = False,
    skip_bad: bool = False,
    progress: bool = True,
    load_options: Mapping[str, Any] | None = None,
) -> DriftResult:
    """Compare two checkpoints of one architecture: how far streams, outputs and weights moved, and what mattered.

    Args:
        base: the earlier model, opened, or anything that `load` takes.
        continued: the later one, likewise.
        probes: as in `tracer.trace`; default that of the base model.
        groups: only these groups.
        limit: only the first so many usable probes of each group.
        seed: of permutations and bootstrap.
        engine: as in `tracer.trace`.
        batch_tokens: most tokens in one call of a block; does not change the result.
        out: folder to save the result in.
        force: replace the result in `out`.
        skip_bad: count unusable probes instead of refusing the set.
        progress: show progress bars.
        load_options: keyword arguments of `load` for models that are not opened yet.

    Returns:
        The result, already saved when `out` is given.

    Raises:
        InputError: the two are not checkpoints of one architecture, their tokenizers disagree, or arguments, probes or
            folder cannot be used; nothing has been written.
        ModelRefused: one of them cannot be traced exactly.

    Example:
        >>> import tracer
        >>> result = tracer.drift("zoo/transformer-4", "zoo/transformer-4", limit=3, progress=False)
        >>> float(result.probes["jsd"].max()) < 1e-9
        True
    """
    if out is not None:
        check_free(Path(out), force=force, files=FILES)
    options = {"backend": "hooks", **(load_options or {})}
    before, after = (
        model if isinstance(model, TracedModel) else load(model, progress=progress, **options)
        for model in (base, continued)
    )
    check_same_architecture(before, after)
    common: dict[str, Any] = {
        "groups": groups,
        "limit": limit,
        "seed": seed,
        "engine": engine,
        "batch_tokens": batch_tokens,
        "skip_bad": skip_bad,
        "progress": progress,
    }
    asked = default_probes(before) if probes is None else probes
    own = trace(before, asked, ablations=[SWAP], swap_from=after, **common)
    other = trace(after, asked, ablations=[], **common)
    _check_tokens(own, other)
    near, ratio, cka, jsd = _streams(before, after, own, batch_tokens, progress)
    result = _assembled(before, after, own, other, near, ratio, cka, jsd, seed)
    if out is not None:
        result.save(out, force=force)
    return result


def _check_tokens(own: TraceResult, other: TraceResult) -> None:
    mine, others = (
        dict(zip(run.probes["id"], zip(run.probes["prompt_ids"], run.probes["target_ids"], strict=True), strict=True))
        for run in (own, other)
    )
    differing = [name for name in mine.keys() | others.keys() if mine.get(name) != others.get(name)]
    if differing:
        raise InputError(
            f"the tokenizers of {own.run['model']['name']} and {other.run['model']['name']} disagree on probe "
            f"{min(differing)}: pass two checkpoints with one tokenizer"
        )


def _streams(
    before: TracedModel, after: TracedModel, own: TraceResult, batch_tokens: int, progress: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cosine `[depths, probes]`, ratio of mean norms and CKA `[depths]`, and JSD of the outputs `[probes]`."""
    prompts = [list(ids) for ids in own.probes["prompt_ids"]]
    depths = before.n_blocks + 1
    x: np.ndarray | None = None
    y: np.ndarray | None = None
    jsd = np.zeros(len(prompts))
    bar = tqdm(total=len(prompts), desc="streams of both", unit="probe", disable=not progress)
    with bar, evaluating(before.model), evaluating(after.model):
        both = (last_streams(model, prompts, batch_tokens=batch_tokens) for model in (before, after))
        for (rows, mine, log_p), (_, others, log_q) in zip(*both, strict=True):
            x, y = placed(x, rows, mine, len(prompts)), placed(y, rows, others, len(prompts))
            jsd[rows] = js_divergence(log_p, log_q).numpy()
            bar.update(len(rows))
    assert x is not None
    assert y is not None
    norms = [np.linalg.norm(streams.astype(np.float64), axis=-1).mean(axis=1) for streams in (x, y)]
    ratio = np.divide(norms[1], norms[0], out=np.full(depths, np.nan), where=norms[0] > 0)
    cka = [debiased_cka(torch.from_numpy(a), torch.from_numpy(b)) for a, b in zip(x, y, strict=True)]
    return cosine(x, y), ratio, np.array([np.nan if value is None else value for value in cka]), jsd


def _moved(before: TracedModel, after: TracedModel) -> list[float]:
    """Norm of the change of each block's weights over their norm."""
    moved = []
    for own, other in zip(before.blocks, after.blocks, strict=True):
        pairs = list(zip(own.parameters(), other.parameters(), strict=True))
        change = sum(((y.detach().double() - x.detach().double()).square().sum().item() for x, y in pairs), 0.0)
        size = sum((x.detach().double().square().sum().item() for x, _ in pairs), 0.0)
        moved.append((change / size) ** 0.5 if size else float("nan"))
    return moved


def _assembled(
    before: TracedModel,
    after: TracedModel,
    own: TraceResult,
    other: TraceResult,
    near: np.ndarray,
    ratio: np.ndarray,
    cka: np.ndarray,
    jsd: np.ndarray,
    seed: int,
) -> DriftResult:
    groups = own.probes["group"].tolist()
    profile = bootstrap_profile(near.T, groups, seed=seed, label="cosine")
    nothing = np.full(len(near), np.nan)
    swap = own.fragility(SWAP)
    blank = pd.DataFrame({"jsd": [np.nan], "jsd_low": [np.nan], "jsd_high": [np.nan]})
    swapped = pd.concat([blank, swap.table[["jsd", "jsd_low", "jsd_high"]]], ignore_index=True)
    depths = pd.DataFrame(
        {
            "depth": np.arange(len(near)),
            "cosine": near.mean(axis=1),
            "cosine_low": nothing if profile.low is None else profile.low,
            "cosine_high": nothing if profile.high is None else profile.high,
            "norm_ratio": ratio,
            "cka": cka,
            "block": pd.array([None, *range(before.n_blocks)], dtype="Int64"),
            "mixer": [None, *before.anatomy.mixers],
            "weights": [np.nan, *_moved(before, after)],
        }
    ).join(swapped)
    answered, still = (run.probes["answered"].to_numpy(dtype=bool) for run in (own, other))
    probes = own.probes[["id", "group", "prompt", "target"]].assign(
        answered_base=answered,
        answered_continued=still,
        log_p_base=own.arrays["log_p"][-1],
        log_p_continued=other.arrays["log_p"][-1],
        jsd=jsd,
        particle_base=own.probes["particle"],
        particle_continued=other.probes["particle"],
    )
    output = pooled_interval(jsd, groups, seed=seed, label="output")
    by_group = own.groups.merge(other.groups, on="group", suffixes=("_base", "_continued"))
    run = {
        "schema": SCHEMA,
        "arguments": {key: own.run["arguments"][key] for key in ("probes", "groups", "limit", "seed", "batch_tokens")},
        "base": own.run["model"],
        "continued": other.run["model"],
        "versions": versions(),
        "output": {"estimate": output.estimate, "low": output.low, "high": output.high},
        "answered": {
            "both": int((answered & still).sum()),
            "only_base": int((answered & ~still).sum()),
            "only_continued": int((~answered & still).sum()),
            "neither": int((~answered & ~still).sum()),
        },
        "particles": {
            "base": own.run["particle_block"],
            "continued": other.run["particle_block"],
            "groups": by_group[["group", "block_base", "block_continued"]].to_dict("records"),
        },
        "largest": list(swap.fragile),
        "largest_without_first": list(swap.fragile_without_first),
        "warnings": ["no weight of a block differs: the rest of the drift comes from embeddings, norm or head"]
        if not depths["weights"].max() > 0 and jsd.max() > 0
        else [],
    }
    arrays = {"cosine": near, "jsd": jsd, "jsd_swap_weights": own.arrays[f"jsd_{SWAP}"]}
    return DriftResult(run, probes, depths, arrays)
