"""The verb `eval`: how well a model answers probe sets, by whole forwards."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import binomtest
from tqdm import tqdm

from tracer.engine import DEFAULT_BATCH_TOKENS
from tracer.errors import InputError
from tracer.evaluation.next_token import next_tokens
from tracer.evaluation.results import ALL, FILES, SCHEMA, EvalResult
from tracer.models.plain import evaluating
from tracer.models.traced import TracedModel, load
from tracer.probes import ProbeSet, read_probes, tokenize
from tracer.results import check_free
from tracer.runs import check_fit, default_probes, first_of_each_group, versions
from tracer.statistics import bootstrap_interval, pooled_interval
from tracer.zoo.questions import SUITES
from tracer.zoo.shelf import PREFIX, read_card


def evaluate(
    model: object,
    suites: str | Sequence[str | Path | ProbeSet] | None = None,
    *,
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
            a suite of its own. Default: `english`, and for a model of the zoo the three sets about what it was
            trained on.
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
    if out is not None:
        check_free(Path(out), force=force, files=FILES)
    opened = model if isinstance(model, TracedModel) else load(model, progress=progress, **(load_options or {}))
    if suites is None:
        suites = SUITES if opened.opened.kind == "zoo" else [default_probes(opened)]
    if isinstance(suites, str):
        suites = [name.strip() for name in suites.split(",") if name.strip()]
    sets = [read_probes(suite) for suite in suites]
    names = [probe_set.name for probe_set in sets]
    if not names or len(set(names)) < len(names):
        raise InputError(f"suites {', '.join(names) or 'are empty'}: name each suite once")
    tokenized = []
    for probe_set in sets:
        usable = tokenize(probe_set, opened.tokenizer)
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
        }
    )
    arrays = {"log_p": found.log_p.numpy(), "p_said": found.p_said.numpy()}
    run = {
        "schema": SCHEMA,
        "arguments": {"model": opened.name, "suites": names, "limit": limit, "seed": seed},
        "model": opened.describe(),
        "versions": versions(),
        "skipped": {name: len(part.skipped) for name, part in zip(names, tokenized, strict=True)},
        "card": _on_card(opened, names) if limit is None else None,
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
            if group == ALL and len(parts) > 2:
                of = table["group"].tolist()
                share = pooled_interval(answered, of, seed=seed, label=("accuracy", *label))
                mean = pooled_interval(log_p, of, seed=seed, label=("log_p", *label))
                low, high = share.low, share.high
            else:
                # Wilson: sound at 0 and 1, where a bootstrap would claim to be certain.
                exact = binomtest(int(answered.sum()), len(answered)).proportion_ci(method="wilson")
                mean = bootstrap_interval(log_p, seed=seed, label=("log_p", *label))
                low, high = exact.low, exact.high
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


def _on_card(model: TracedModel, suites: Sequence[str]) -> dict[str, int] | None:
    """How many probes of each suite a model of the zoo answers according to its card; None for other models."""
    if model.opened.kind != "zoo":
        return None
    sets = read_card(model.name).facts["accuracy"]
    return {
        suite: sum(group["answered"] for group in sets[suite.removeprefix(PREFIX)].values())
        for suite in suites
        if suite.removeprefix(PREFIX) in sets
    }
