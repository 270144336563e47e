"""The verb `eval`: how well a model answers probe sets, by whole forwards."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import binomtest
from tqdm import tqdm

from tracer.engine import DEFAULT_BATCH_TOKENS
from tracer.errors import InputError, one_of
from tracer.evaluation.next_token import next_tokens
from tracer.evaluation.results import ALL, FILES, SCHEMA, EvalResult
from tracer.models.plain import evaluating
from tracer.models.traced import TracedModel, load
from tracer.probes import ProbeSet, read_probes, tokenize
from tracer.results import check_free
from tracer.runs import check_fit, default_probes, first_of_each_group, versions
from tracer.statistics import pooled_interval
from tracer.zoo.shelf import PREFIX, SUITES, read_card


def evaluate(
    model: object,
    suites: str | Sequence[str | Path | ProbeSet] | None = None,
    *,
    target: str = "single",
    skip_bad: bool = False,
    limit: int | None = None,
    seed: int = 0,
    batch_tokens: int = DEFAULT_BATCH_TOKENS,
    out: str | os.PathLike[str] | None = None,
    force: bool = False,
    progress: bool = True,
    load_options: Mapping[str, Any] | None = None,
) -> EvalResult:
    """Ask a model the probes of one or several sets: is the target the most likely token, and how likely is it?

    Args:
        model: an opened model, or anything that `load` takes.
        suites: shipped sets or collections, JSONL or CSV files, as names separated by commas or as a sequence; each is
            a suite of its own. Default: `english`, and for a model of the zoo `zoo/train`, `zoo/held` and
            `zoo/new-template`.
        target: how a target of several tokens is read: refused (`single`), or its `first` token.
        skip_bad: count unusable probes instead of refusing the set; shipped sets are treated so always.
        limit: only the first so many usable probes of each group.
        seed: of the bootstrap.
        batch_tokens: most tokens in one forward; does not change the result.
        out: folder to save the result in.
        force: replace the result in `out`.
        progress: show a progress bar.
        load_options: keyword arguments of `load` for a model that is not opened yet.

    Returns:
        The result, already saved when `out` is given.

    Raises:
        InputError: arguments, probes or folder cannot be used; nothing has been written.
        ModelRefused: the model cannot be traced exactly.

    Example:
        >>> import tracer
        >>> result = tracer.evaluate("zoo/transformer-8", progress=False)
        >>> result.suites
        ('zoo/train', 'zoo/held', 'zoo/new-template')
    """
    one_of("target", target, ("single", "first"))
    if out is not None:
        check_free(Path(out), force=force, files=FILES)
    opened = model if isinstance(model, TracedModel) else load(model, progress=progress, **(load_options or {}))
    if suites is None:
        suites = SUITES if opened.opened.kind == "zoo" else [default_probes(opened)]
    if isinstance(suites, str):
        suites = [name.strip() for name in suites.split(",") if name.strip()]
    sets = [read_probes(suite, skip_bad=skip_bad) for suite in suites]
    names = [probe_set.name for probe_set in sets]
    if not names or len(set(names)) < len(names):
        raise InputError(f"suites {', '.join(names) or 'are empty'}: name each suite once")
    tokenized = []
    for probe_set in sets:
        if ALL in probe_set.groups:
            raise InputError(f"a group is called {ALL!r}, as the pooled one is: give it another name")
        usable = tokenize(
            probe_set, opened.tokenizer, target="first" if target == "first" else "single", skip_bad=skip_bad
        )
        check_fit(opened, usable.items)
        tokenized.append(replace(usable, items=first_of_each_group(usable.items, limit)))
        if not usable.items:
            raise InputError(f"none of the {len(probe_set)} probes of {probe_set.name!r} can be used")
    items = [item for part in tokenized for item in part.items]
    bar = tqdm(total=len(items), desc=f"Asking {opened.name}", unit="probe", disable=not progress)
    with bar, evaluating(opened.model):
        found = next_tokens(opened.adapter.forward, items, batch_tokens=batch_tokens, seen=bar.update)
    probes = pd.DataFrame(
        {
            "suite": [name for name, part in zip(names, tokenized, strict=True) for _ in part.items],
            "id": [item.probe.id for item in items],
            "group": [item.probe.group for item in items],
            "prompt": [item.probe.prompt for item in items],
            "target": [item.probe.target for item in items],
            "said": [None if opened.tokenizer is None else opened.tokenizer.decode([token]) for token in found.said],
            "answered": found.answered.numpy(),
            "log_p": found.log_p.numpy(),
            "p_said": found.p_said.numpy(),
        }
    )
    arrays = {"log_p": found.log_p.numpy(), "p_said": found.p_said.numpy()}
    run = {
        "schema": SCHEMA,
        "arguments": {"model": opened.name, "suites": names, "target": target, "limit": limit, "seed": seed},
        "model": opened.describe(),
        "versions": versions(),
        "skipped": {
            name: [asdict(skip) for skip in (*read.skipped, *part.skipped)]
            for name, read, part in zip(names, sets, tokenized, strict=True)
        },
        "warnings": [asdict(note) for part in tokenized for note in part.warnings],
        "card": _on_card(opened, [s.name for s in sets if s.shipped]) if limit is None else None,
    }
    result = EvalResult(run, probes, _groups(probes, arrays, seed), arrays)
    if out is not None:
        result.save(out, force=force)
    return result


def _groups(probes: pd.DataFrame, arrays: Mapping[str, np.ndarray], seed: int) -> pd.DataFrame:
    """Accuracy and mean log-probability of each group, and of each suite as a whole."""
    rows = []
    for suite, table in probes.groupby("suite", sort=False):
        parts = {ALL: table.index, **table.groupby("group", sort=False).groups}
        for group, index in parts.items():
            answered, log_p = table.loc[index, "answered"].to_numpy(dtype=float), arrays["log_p"][index]
            label = (str(suite), str(group))
            of = table["group"].tolist() if group == ALL and len(parts) > 2 else None
            mean = pooled_interval(log_p, of, seed=seed, label=("log_p", *label))
            low, high = _interval_of_share(answered, of, seed, label)
            rows.append(
                {
                    "suite": suite,
                    "group": group,
                    "n": len(index),
                    "answered": int(answered.sum()),
                    "accuracy": answered.mean(),
                    "low": low,
                    "high": high,
                    "log_p": mean.estimate,
                    "log_p_low": mean.low,
                    "log_p_high": mean.high,
                    "p_said": arrays["p_said"][index].mean(),
                }
            )
    numbers = ("low", "high", "log_p", "log_p_low", "log_p_high")
    return pd.DataFrame(rows).astype(dict.fromkeys(numbers, float))


def _interval_of_share(
    answered: np.ndarray, groups: list[str] | None, seed: int, label: tuple[str, str]
) -> tuple[float | None, float | None]:
    """The 95 % interval of a share: of one group by Wilson, of several by resampling groups and then probes.

    Where all answers agree, resampling would claim to be certain; then each group counts as one observation.
    """
    if groups is not None and answered.min() < answered.max():
        found = pooled_interval(answered, groups, seed=seed, label=("accuracy", *label))
        return found.low, found.high
    n = len(answered) if groups is None else len(set(groups))
    interval = binomtest(round(answered.mean() * n), n).proportion_ci(method="wilson")
    return interval.low, interval.high


def _on_card(model: TracedModel, suites: Sequence[str]) -> dict[str, int] | None:
    """How many probes of each suite a model of the zoo answers according to its card; None for other models."""
    if model.opened.kind != "zoo":
        return None
    sets = read_card(model.name).facts["accuracy"]
    return {
        suite: sum(group["answered"] for group in sets[suite.removeprefix(PREFIX)].values())
        for suite in suites
        if suite.startswith(PREFIX) and suite.removeprefix(PREFIX) in sets
    }
