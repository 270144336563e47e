"""The verb `patch`: at which depth and position of a prompt a model holds the answer, by activation patching."""

import hashlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import pandas as pd
import torch

from tracer.engine import DEFAULT_BATCH_TOKENS
from tracer.errors import InputError, one_of
from tracer.models.traced import TracedModel, load
from tracer.patch_edits import Component
from tracer.patch_results import ALL, FILES, SCHEMA, PatchResult, cell_table, typed_probes
from tracer.patcher import AGREE, MIN_GAP, Direction, Metric, Patcher, PatchMeasures, recovered, why_undefined
from tracer.probes import Probe, ProbeSet, Skipped, TokenizedProbe, TokenizedProbes, Tokenizer, read_probes, tokenize
from tracer.results import check_free
from tracer.runs import allowed_engine, check_fit, corrupt_of, default_probes, first_of_each_group, token_bar, versions

TOGETHER = "together"
PATCH_TARGETS = ("single", "first")


def patch(
    model: object,
    probes: str | Path | ProbeSet | Sequence[Probe | Mapping[str, object]] | None = None,
    *,
    components: str | Sequence[str] = ("resid", "mixer", "mlp"),
    direction: str = "denoise",
    positions: str | Sequence[int] = "all",
    position_map: str | Mapping[int, int] | None = None,
    metric: str = "logit_diff",
    min_gap: float | None = None,
    groups: Sequence[str] | None = None,
    limit: int | None = None,
    target: str = "single",
    seed: int = 0,
    engine: str | None = None,
    batch_tokens: int = DEFAULT_BATCH_TOKENS,
    out: str | os.PathLike[str] | None = None,
    force: bool = False,
    skip_bad: bool = False,
    progress: bool = True,
    load_options: Mapping[str, Any] | None = None,
) -> PatchResult:
    """Patch a model's runs on pairs of prompts, component by component, over depth and position.

    A pair is a probe with a corrupt prompt and its answer (`corrupt`, `corrupt_target`, or `corrupt_ids`,
    `corrupt_target_id`). Recovery is 0 where a patch changes nothing and 1 where it does all that the other prompt
    does. It is undefined, and counted with its reason, where the metric is not at least `min_gap` higher on the clean
    prompt than on the corrupt one: the model does not tell the prompts apart, or the corrupt one makes the target
    likelier. All other pairs count; those of which the model answers both prompts stand beside them, since choosing
    pairs by their answers would change what is measured.

    Args:
        model: an opened model, or anything that `load` takes.
        probes: a shipped set or collection (`en-capitals`, `english`, `chinese`), a JSONL or CSV file, or probes.
            Default: `english`, and `zoo/held` for a model of the zoo.
        components: any of `resid` (the stream at a depth), `block` (what a block adds to it), `mixer`, `mlp` (what its
            sub-layers add), as names or separated by commas.
        direction: `denoise` puts parts of the clean run into the corrupt one and gives the share of the metric that
            comes back, `noise` parts of the corrupt run into the clean one and gives the share that is lost.
        positions: columns of the run that is patched, counted from its last token: `all`, `last`, numbers such as
            [-1, -2], or `together` for all of them in one patch.
        position_map: column of the run that is patched to column of the other one, both negative, as {-1: -1} or
            "-1:-1,-2:-3"; default each column to itself, for which both prompts must have as many tokens.
        metric: `logit_diff` (log p(target) - log p(corrupt target)), `log_p` or `p` of the target.
        min_gap: least difference of the metric between the two prompts; default 1 nat, for `p` 0.1.
        groups: only these groups.
        limit: only the first so many usable pairs of each group.
        target: a target of several tokens is refused (`single`) or read by its `first` token.
        seed: of the bootstrap.
        engine: `onepass` or `full`; default what the self-check allows.
        batch_tokens: most tokens in one call of a block; does not change the result.
        out: folder to save the result in; nothing is written before everything is done.
        force: replace what `out` holds.
        skip_bad: count probes that cannot be patched instead of refusing the set; shipped sets are treated so always.
        progress: show a progress bar.
        load_options: keyword arguments of `load` for a model that is not opened yet.

    Returns:
        The result, already saved when `out` is given.

    Raises:
        InputError: arguments, probes or folder cannot be used; nothing has been run or written.
        HookError: an end check failed: patching is not exact on this model.
        ModelRefused: the model cannot be traced exactly.

    Example:
        >>> import tracer
        >>> result = tracer.patch("smollm2-135m-instruct-q4_1", "en-capitals")  # doctest: +SKIP
        >>> result.heat_map("resid")  # doctest: +SKIP
    """
    parts = _components(components)
    one_of("direction", direction, get_args(Direction))
    chosen_metric = cast(Metric, one_of("metric", metric, get_args(Metric)))
    one_of("target", target, PATCH_TARGETS)
    mapped = _position_map(position_map)
    wanted = _positions(positions)
    least = MIN_GAP[chosen_metric] if min_gap is None else min_gap
    for name, value, least_value in (("limit", limit, 1), ("batch_tokens", batch_tokens, 1), ("seed", seed, 0)):
        if value is not None and value < least_value:
            raise InputError(f"{name} is {value}: pass a number of at least {least_value}")
    if not 0 < least < math.inf:
        raise InputError(
            f"min_gap is {least}: pass a finite number above 0, since recovery is a share of this difference"
        )
    folder = None if out is None else Path(out)
    if folder is not None:
        check_free(folder, force=force, files=FILES)
    probe_set = read_probes(default_probes(model) if probes is None else probes, skip_bad=skip_bad, groups=groups)
    if ALL in probe_set.groups:
        raise InputError(f"a group is called {ALL!r}, as the pooled one is: give it another name")
    opened = model if isinstance(model, TracedModel) else load(model, progress=progress, **(load_options or {}))
    used_engine = allowed_engine(opened, engine)
    tokenized = tokenize(
        probe_set,
        opened.tokenizer,
        target="first" if target == "first" else "single",
        skip_bad=skip_bad,
        unequal=True,
    )
    pairs, skipped = _pairs(probe_set, tokenized, strict=not (probe_set.shipped or skip_bad), equal=mapped is None)
    check_fit(opened, [*pairs, *map(corrupt_of, pairs)])
    pairs = first_of_each_group(pairs, limit)
    longest = [max(map(len, rows)) for rows in zip(*((p.prompt_ids, p.corrupt_ids or ()) for p in pairs), strict=True)]
    columns = _columns(wanted, mapped, *(longest[::-1] if direction == "denoise" else longest))
    patcher = Patcher(
        opened,
        pairs,
        parts,
        columns,
        position_map=mapped,
        direction=cast(Direction, direction),
        metric=chosen_metric,
        engine=used_engine,
        batch_tokens=batch_tokens,
    )
    began = time.perf_counter()
    with token_bar(patcher.tokens, f"patch {opened.name}", progress) as advance:
        measures = patcher.run(advance)
    seconds = time.perf_counter() - began
    arguments = {
        "model": opened.name,
        "probes": probe_set.name,
        "groups": list(probe_set.groups),
        "components": list(parts),
        "direction": direction,
        "positions": list(wanted) if isinstance(wanted, tuple) else wanted,
        "position_map": None if mapped is None else [list(pair) for pair in mapped.items()],
        "metric": metric,
        "min_gap": least,
        "limit": limit,
        "target": target,
        "seed": seed,
        "batch_tokens": batch_tokens,
    }
    content = [[p.probe.id, p.probe.group, p.prompt_ids, p.target_ids, p.corrupt_ids] for p in pairs]
    run = {
        "schema": SCHEMA,
        "arguments": arguments,
        "model": {"fingerprint": opened.fingerprint(), **opened.describe()},
        "engine": used_engine,
        "positions": [None] if columns is None else list(columns),
        "probes": hashlib.sha256(json.dumps(content).encode()).hexdigest(),
        "versions": versions(),
        "checks": dict(measures.checks),
        "work": {"seconds": seconds, "block_tokens": patcher.tokens, "threads": torch.get_num_threads()},
        "skipped": [asdict(skip) for skip in (*probe_set.skipped, *tokenized.skipped, *skipped)],
        "probe_warnings": [asdict(note) for note in tokenized.warnings],
    }
    result = _result(run, pairs, measures, columns, opened.tokenizer)
    if folder is not None:
        result.save(folder, force=force)
    return result


def _result(
    run: dict[str, Any],
    pairs: Sequence[TokenizedProbe],
    measures: PatchMeasures,
    columns: tuple[int, ...] | None,
    tokenizer: Tokenizer | None,
) -> PatchResult:
    arguments = run["arguments"]
    recoveries = {
        component: recovered(patched, measures.clean, measures.corrupt, arguments["direction"], arguments["min_gap"])
        for component, patched in measures.patched.items()
    }
    table = _probe_table(pairs, measures, arguments["min_gap"], tokenizer)
    both = table["answered_both"].to_numpy(dtype=bool)
    of = [pair.probe.group for pair in pairs]
    cells = cell_table(recoveries, columns or (None,), of, both, seed=arguments["seed"])
    counted = []
    for group in arguments["groups"]:
        own = table[table["group"] == group]
        counted.append(
            {
                "group": group,
                "n": len(own),
                "answered_both": int(own["answered_both"].sum()),
                "undefined": dict(Counter(own["undefined"].dropna().tolist())),
            }
        )
    run = run | {"groups": counted, "warnings": _warnings(arguments, measures, table)}
    return PatchResult(run, table, cells, {f"recovery_{name}": values for name, values in recoveries.items()})


def _components(names: str | Sequence[str]) -> tuple[Component, ...]:
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",")]
    found = tuple(dict.fromkeys(cast(Component, one_of("component", name, get_args(Component))) for name in names))
    if not found:
        raise InputError(f"no component to patch: pass some of {', '.join(get_args(Component))}")
    return found


def _positions(given: str | Sequence[int]) -> str | tuple[int, ...]:
    """`all`, `together`, or columns."""
    if given == "last":
        return (-1,)
    if isinstance(given, str):
        if given in (ALL, TOGETHER):
            return given
        given = [_column(part, "positions") for part in given.split(",")]
    columns = tuple(dict.fromkeys(_column(position, "positions") for position in given))
    if not columns:
        raise InputError("no positions to patch: pass 'all', 'last', 'together' or numbers such as [-1, -2]")
    return tuple(sorted(columns))


def _position_map(given: str | Mapping[int, int] | None) -> dict[int, int] | None:
    if given is None:
        return None
    pairs: list[Sequence[object]] = (
        [part.split(":") for part in given.split(",")] if isinstance(given, str) else list(given.items())
    )
    if any(len(pair) != 2 for pair in pairs):
        raise InputError(f"position map {given!r} is no list of pairs: pass e.g. -1:-1,-2:-3")
    columns, sources = ([_column(pair[i], "position_map") for pair in pairs] for i in (0, 1))
    if not columns or len(set(columns)) < len(columns):
        raise InputError(f"position map {given!r} must name columns, each once: pass e.g. {{-1: -1, -2: -3}}")
    return dict(sorted(zip(columns, sources, strict=True)))


def _column(value: object, name: str) -> int:
    try:
        column = int(value) if isinstance(value, str) else value
    except ValueError:
        column = None
    if not isinstance(column, int | np.integer) or isinstance(column, bool) or column >= 0:
        raise InputError(f"{name} has {value!r}: pass numbers below 0, counted from each prompt's last token (-1)")
    return int(column)


def _columns(
    wanted: str | tuple[int, ...], mapped: Mapping[int, int] | None, longest: int, longest_giver: int
) -> tuple[int, ...] | None:
    """The columns to patch, None for all in one patch; every one exists in some prompt."""
    known = dict(zip(range(-longest, 0), range(-longest, 0), strict=True)) if mapped is None else mapped
    for column, source in known.items():
        if column < -longest or source < -longest_giver:
            raise InputError(
                f"position_map takes {column} from {source}, but the longest prompt patched has {longest} tokens "
                f"and the longest other one {longest_giver}"
            )
    if wanted == TOGETHER:
        return None
    columns = tuple(known) if wanted == ALL else wanted
    assert not isinstance(columns, str)
    unknown = [column for column in columns if column not in known]
    if unknown:
        raise InputError(f"no position {unknown[0]} to patch: pass some of {', '.join(map(str, known))}")
    return columns


def _pairs(
    probe_set: ProbeSet, tokenized: TokenizedProbes, *, strict: bool, equal: bool
) -> tuple[tuple[TokenizedProbe, ...], list[Skipped]]:
    """The probes that can be patched, and why the others cannot."""
    why = {skip.where: skip.reason for skip in tokenized.corrupt_skipped}
    pairs: list[TokenizedProbe] = []
    skipped: list[Skipped] = []
    for item in tokenized.items:
        reason = why.get(item.probe.id)
        clean, corrupt = len(item.prompt_ids), len(item.corrupt_ids or ())
        if reason is None and item.corrupt_ids is None:
            reason = "it has no corrupt prompt: give it corrupt and corrupt_target (or corrupt_ids, corrupt_target_id)"
        elif reason is None and equal and clean != corrupt:
            reason = (
                f"its prompt has {clean} tokens and its corrupt prompt {corrupt}: pass prompts of equal length, or a "
                "position_map such as {-1: -1}, which patches the last position alone"
            )
        if reason is None:
            pairs.append(item)
        elif strict:
            raise InputError(f"probe {item.probe.id} cannot be patched: {reason}")
        else:
            skipped.append(Skipped(item.probe.id, reason))
    if not pairs:
        first = next((f" (the first: {skip.reason})" for skip in (*skipped, *tokenized.skipped)), "")
        raise InputError(f"none of the {len(probe_set)} probes of {probe_set.name!r} can be patched{first}")
    return tuple(pairs), skipped


def _probe_table(
    pairs: Sequence[TokenizedProbe], measures: PatchMeasures, min_gap: float, tokenizer: Tokenizer | None
) -> pd.DataFrame:
    """One row per pair; texts are missing where a probe is token ids and there is no tokenizer."""

    def text(given: str | None, ids: Sequence[int]) -> str | None:
        return given if given is not None or tokenizer is None else tokenizer.decode(list(ids))

    rows = []
    for i, pair in enumerate(pairs):
        corrupt_ids, corrupt_target = pair.corrupt_ids or (), cast(int, pair.corrupt_target_id)
        clean, corrupt = float(measures.clean[i]), float(measures.corrupt[i])
        answered = bool(measures.answered[i]), bool(measures.corrupt_answered[i])
        rows.append(
            {
                "id": pair.probe.id,
                "group": pair.probe.group,
                "prompt": text(pair.probe.prompt, pair.prompt_ids),
                "target": text(pair.probe.target, pair.target_ids),
                "corrupt": text(pair.probe.corrupt, corrupt_ids),
                "corrupt_target": text(pair.probe.corrupt_target, [corrupt_target]),
                "prompt_ids": list(pair.prompt_ids),
                "target_id": pair.target_ids[0],
                "corrupt_ids": list(corrupt_ids),
                "corrupt_target_id": corrupt_target,
                "tokens": [text(None, [token]) for token in pair.prompt_ids],
                "corrupt_tokens": [text(None, [token]) for token in corrupt_ids],
                "n_tokens": len(pair.prompt_ids),
                "n_corrupt_tokens": len(corrupt_ids),
                "m_clean": clean,
                "m_corrupt": corrupt,
                "gap": clean - corrupt,
                "answered": answered[0],
                "corrupt_answered": answered[1],
                "answered_both": all(answered),
                "undefined": why_undefined(clean, corrupt, min_gap),
            }
        )
    return typed_probes(rows)


def _warnings(arguments: Mapping[str, Any], measures: PatchMeasures, table: pd.DataFrame) -> list[str]:
    """What a reader must know before believing the numbers."""
    notes = []
    n, undefined = len(table), table["undefined"].dropna()
    if len(undefined) == n:
        notes.append("no pair has a recovery: the model does not tell these prompts apart")
    elif len(undefined) > n / 2:
        agree = int((undefined == AGREE).sum())
        notes.append(
            f"{len(undefined)} of {n} pairs have no recovery ({agree}: {AGREE}): the rest may be a special choice"
        )
    if not table["answered_both"].any():
        notes.append("the model answers both prompts of no pair: recovery is about a preference, not about answers")
    if arguments["positions"] == TOGETHER and "resid" in arguments["components"]:
        notes.append("with all positions patched together, resid is trivial: every depth holds the whole run")
    if measures.checks["last_depth"] is None:
        notes.append(
            "what follows the blocks needs more than the last residual, so that patching all of it need not recover all"
        )
    return notes
