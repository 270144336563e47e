"""What activation patching returns, and the folder that it is saved as.

The folder is like that of a trace (see `tracer.results`), with one line a cell in `cells.csv`.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float
from matplotlib.figure import Figure

from tracer.errors import one_of
from tracer.patch_edits import Component
from tracer.results import SavedResult
from tracer.statistics import bootstrap_profile
from tracer.summary import spans

SCHEMA = 1
FILES = ("arrays.safetensors", "cells.csv", "probes.jsonl", "run.json")
"""The files of a result; `run.json` is moved in last, so that a folder that has it is complete."""

ALL = "all"
"""Name of the group of all probes in `cells`."""

WIDTH = 100
MOST_CELLS = 3
HALF = 0.5
MOST_COLUMNS = 1000
"""Cells whose intervals are made at once: bounds the memory for their resamples."""


@dataclass(frozen=True, eq=False)
class PatchResult(SavedResult):
    """Activation patching of one model on one set of pairs of prompts.

    Attributes:
        run: arguments, seed, versions, model, engine, end checks, counts per group and warnings; what `run.json` holds.
        probes: one row per pair: `id`, `group`, `prompt`, `target`, `corrupt`, `corrupt_target`, `prompt_ids`,
            `corrupt_ids`, `tokens` and `corrupt_tokens` (texts of the single tokens), `n_tokens`, `n_corrupt_tokens`,
            `m_clean`, `m_corrupt` (the metric), `gap` (their difference), `answered` and `corrupt_answered` (whether
            target and corrupt target are top-1 of their prompts), `answered_both`, and `undefined`: why it has no
            recovery.
        cells: one row per component, place, position and group (`all`: pooled): `n` pairs with a recovery, its mean
            `recovery` with a 95 % interval `low`, `high`, and the same over pairs of which the model answers both
            prompts (`n_both`, `recovery_both`, `low_both`, `high_both`). `place` is the depth 0..L of `resid`, else the
            block; `position` counts from the last token (-1) of the run that is patched, missing where all were patched
            together.
        arrays: `recovery_COMPONENT` `[places, positions, probes]`, positions as in `run["positions"]`; NaN where it is
            undefined, the prompt has no such position, or the block no such sub-layer.
    """

    run: dict[str, Any]
    probes: pd.DataFrame
    cells: pd.DataFrame
    arrays: dict[str, np.ndarray]

    files: ClassVar = FILES
    schema: ClassVar = SCHEMA
    verb: ClassVar = "patch"
    table: ClassVar = "cells"
    types: ClassVar = {"component": str, "group": str, "position": "Int64"}

    @staticmethod
    def probes_of(rows: list[dict[str, Any]]) -> pd.DataFrame:
        """The table of probes with the types that do not follow from the values."""
        return typed_probes(rows)

    @property
    def components(self) -> tuple[str, ...]:
        """What was patched."""
        return tuple(self.run["arguments"]["components"])

    @property
    def groups(self) -> tuple[str, ...]:
        """Groups of the probes."""
        return tuple(group["group"] for group in self.run["groups"])

    def heat_map(self, component: str, group: str = ALL) -> pd.DataFrame:
        """Mean recovery of one component and group: a row per place, a column per position.

        Args:
            component: one of `components`.
            group: one of `groups`, or `all`.
        """
        one_of("component of this result", component, self.components)
        one_of("group", group, (ALL, *self.groups))
        chosen = self.cells[(self.cells["component"] == component) & (self.cells["group"] == group)]
        shape = self.arrays[f"recovery_{component}"].shape[:2]
        return pd.DataFrame(
            chosen["recovery"].to_numpy(dtype=float).reshape(shape),
            index=pd.RangeIndex(shape[0], name="place"),
            columns=pd.Index(self.run["positions"], name="position"),
        )

    def to_frame(self, of: str = "cells") -> pd.DataFrame:
        """One of the tables `cells` and `probes`, as a copy."""
        return getattr(self, one_of("table", of, ("cells", "probes"))).copy()

    def summary(self) -> str:
        """The result as text for a terminal."""
        parts = [self._head(), *(self._of_component(component) for component in self.components)]
        notes = [*self.run["warnings"], *_about_skipped(self.run["skipped"])]
        if notes:
            wrapped = (textwrap.fill(note, WIDTH, initial_indent="  ! ", subsequent_indent="    ") for note in notes)
            parts.append("Beware\n" + "\n".join(wrapped))
        return "\n\n".join(parts)

    def plot(self, group: str | None = None) -> Figure:
        """Draw the recovery of every component over places and positions; of one group, or of each in a row."""
        from tracer.plots.patching import draw_patching

        return draw_patching(self, group)

    def _head(self) -> str:
        model, arguments, work = (self.run[key] for key in ("model", "arguments", "work"))
        undefined = self.probes["undefined"].dropna().value_counts()
        why = "".join(f"; {count} undefined: {reason}" for reason, count in undefined.items())
        what = {
            "denoise": "from the clean run into the corrupt one",
            "noise": "from the corrupt run into the clean one",
        }
        return "\n".join(
            [
                f"{model['name']}  ({model['anatomy']['model_class']}, {len(model['anatomy']['blocks'])} blocks, "
                f"{model['dtype']}, {model['device']})",
                f"{len(self.probes)} pairs in {len(self.groups)} groups ({arguments['probes']}), both prompts answered "
                f"in {int(self.probes['answered_both'].sum())}{why}",
                f"{arguments['direction']}: {', '.join(self.components)} {what[arguments['direction']]}",
                f"recovery of {arguments['metric']}, defined where clean - corrupt >= {arguments['min_gap']:g}",
                f"engine {self.run['engine']} on {model['backend']}, {work['seconds']:.0f} s, seed "
                f"{arguments['seed']}; 95 % intervals, not corrected for choosing the largest cells",
            ]
        )

    def _of_component(self, component: str) -> str:
        shown = self.groups if len(self.groups) == 1 else (ALL, *self.groups)
        cells = self.cells[self.cells["component"] == component].dropna(subset="recovery")
        by_group = [(group, cells[cells["group"] == group]) for group in shown]
        if component == "resid":
            title = f"Recovery by resid: depths with at least {HALF:.0%} of it"
            rows = [row for group, chosen in by_group for row in _half_rows(group, chosen)]
        else:
            title = f"Recovery by {component}: the largest blocks of each group"
            rows = [row for group, chosen in by_group for row in _largest_rows(group, chosen)]
        if not rows:
            return f"{title}\n  none"
        return title + "\n" + textwrap.indent(pd.DataFrame(rows).to_string(index=False), "  ")


def _half_rows(group: str, cells: pd.DataFrame) -> list[dict[str, Any]]:
    """Per position the depths at which the stream carries half of the answer."""
    rows = []
    for position in cells["position"].unique():
        column = cells[cells["position"].isna() if pd.isna(position) else cells["position"] == position]
        reached = column[column["recovery"] >= HALF]
        if len(reached):
            row = {"group": group, "position": ALL if pd.isna(position) else position}
            rows.append(row | {"depths": spans(reached["place"].tolist()), "n": column["n"].max()})
    return rows


def _largest_rows(group: str, cells: pd.DataFrame) -> list[dict[str, Any]]:
    return [
        {
            "group": group,
            "block": row["place"],
            "position": ALL if pd.isna(row["position"]) else row["position"],
            "n": row["n"],
            "recovery": _with_interval(row["recovery"], row["low"], row["high"]),
            "n both": row["n_both"],
            "both answered": _with_interval(row["recovery_both"], row["low_both"], row["high_both"]),
        }
        for row in cells.nlargest(MOST_CELLS, "recovery").to_dict("records")
    ]


def cell_table(
    recoveries: Mapping[Component, Float[np.ndarray, "places positions probes"]],
    positions: Sequence[int | None],
    groups: Sequence[str],
    both: Bool[np.ndarray, "probes"],
    *,
    seed: int,
) -> pd.DataFrame:
    """The cells of a result; see `PatchResult`.

    Args:
        recoveries: by component.
        positions: columns; None for all at once.
        groups: group of each probe.
        both: whether the model answers both prompts.
        seed: of the bootstrap.
    """
    keys = [
        {"component": component, "place": place, "position": position}
        for component, recovery in recoveries.items()
        for place in range(len(recovery))
        for position in positions
    ]
    values = np.concatenate([recovery.reshape(-1, recovery.shape[2]) for recovery in recoveries.values()])
    names = list(dict.fromkeys(groups))
    own = {name: np.array(groups) == name for name in names}
    own = {ALL: np.ones(len(groups), dtype=bool), **own}
    tables = {
        name: _means(values, chosen, groups, name, seed, "").join(
            _means(values, chosen & both, groups, name, seed, "_both")
        )
        for name, chosen in own.items()
        if name != ALL or len(names) > 1
    }
    tables = {ALL: tables[names[0]], **tables} if len(names) == 1 else tables
    return pd.concat(
        [pd.DataFrame(keys).assign(group=name).join(table) for name, table in tables.items()], ignore_index=True
    ).astype({"position": "Int64"})


def _means(
    values: np.ndarray, chosen: np.ndarray, groups: Sequence[str], name: str, seed: int, suffix: str
) -> pd.DataFrame:
    """Number, mean and interval of each row of `values` `[cells, probes]` over some probes, where it is defined."""
    present = ~np.isnan(values) & chosen
    found = np.full((3, len(values)), np.nan)
    # Cells with the same probes share their resamples.
    patterns, which = np.unique(present, axis=0, return_inverse=True)
    for number, pattern in enumerate(patterns):
        rows = np.flatnonzero(which == number)
        of = [group for group, is_chosen in zip(groups, pattern, strict=True) if is_chosen]
        for start in range(0, len(rows) if of else 0, MOST_COLUMNS):
            part = rows[start : start + MOST_COLUMNS]
            columns = np.ascontiguousarray(values[part][:, pattern].T)
            profile = bootstrap_profile(columns, of, seed=seed, label=("recovery", name))
            for end, numbers in zip(found, (profile.mean, profile.low, profile.high), strict=True):
                end[part] = np.nan if numbers is None else numbers
    names = (f"n{suffix}", f"recovery{suffix}", f"low{suffix}", f"high{suffix}")
    return pd.DataFrame(dict(zip(names, (present.sum(axis=1), *found), strict=True)))


def typed_probes(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """The table of probes with the types that do not follow from the values."""
    return pd.DataFrame(rows).astype({"undefined": "str", "m_clean": float})


def _with_interval(mean: float, low: float, high: float) -> str:
    if np.isnan(mean):
        return ""
    return f"{mean:.2f}" + ("" if np.isnan(low) else f" [{low:.2f}, {high:.2f}]")


def _about_skipped(skipped: Sequence[Mapping[str, str]]) -> list[str]:
    if not skipped:
        return []
    first = textwrap.shorten(f"{skipped[0]['where']}: {skipped[0]['reason']}", 90, placeholder=" ...")
    return [f"{len(skipped)} probe{'s' if len(skipped) > 1 else ''} cannot be patched and were left out, e.g. {first}"]
