"""Figure of activation patching: recovery over places and positions."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tracer.errors import one_of
from tracer.plots.style import BLACK, BLUE, GREY, READING, model_name, plain, say, style, write_caption

if TYPE_CHECKING:  # a result draws itself through this module
    from tracer.patch_results import PatchResult

COLOURS = "PuOr_r"
"""Diverging around white, and told apart with every kind of colour vision."""

MISSING = "#BDBDBD"

MOST = 1.5
"""Recovery beyond this, up or down, has the colour of this: single cells far out would pale all others."""

HEIGHT, WIDTH, COLUMN = 3.4, 1.7, 0.3
"""Inches: height and least width of a panel, width of one column of cells."""


def draw_patching(result: "PatchResult", group: str | None = None) -> Figure:
    """One panel a component, one row a group: mean recovery of every place (upwards) and position (to the right).

    Where only one column was patched, a profile with 95 % intervals instead of a heat map.

    Args:
        result: of `tracer.patch`.
        group: one group, or `all` for all of them pooled; default a row for each group.

    Returns:
        A figure that no pyplot state knows of.

    Raises:
        InputError: unknown group.
    """
    names = result.groups if group is None else (one_of("group", group, ("all", *result.groups)),)
    heat = len(result.run["positions"]) > 1
    with style():
        columns = {name: _shown(result, name) for name in names}
        panel = max(WIDTH, COLUMN * max(map(len, columns.values())) + 0.3)
        width = max(7.0, len(result.components) * panel + 1.6)
        figure = Figure(figsize=(width, 1.5 + HEIGHT * len(names)), layout="constrained")
        panels = figure.subplots(len(names), len(result.components), squeeze=False)
        meshes = []
        for row, name in zip(panels, names, strict=True):
            for axes, component in zip(row, result.components, strict=True):
                _set_axes(result, axes, component)
                if result.heat_map(component, name).isna().all(axis=None):
                    say(axes, "no recovery is defined", 18)
                    axes.set_xticks([])
                elif heat:
                    meshes.append(_draw_map(result, axes, component, name, columns[name]))
                else:
                    _draw_profile(result, axes, component, name)
                if axes is not row[0]:
                    axes.tick_params(labelleft=False)
            row[0].set_ylabel(f"{plain(name, 40)}\nblock b (depth d at d − 1/2)")
        for axes in panels[-1]:
            axes.set_xlabel("position" if heat else _measure(result))
        if meshes:
            _draw_scale(result, figure, panels, meshes[0])
        write_caption(figure, _caption(result, names, columns))
    return figure


def _shown(result: "PatchResult", group: str) -> list[int]:
    """The columns that are worth drawing: not those where patching changes nothing at all."""
    maps = np.stack([np.nan_to_num(result.heat_map(c, group).to_numpy()).any(axis=0) for c in result.components])
    return np.flatnonzero(maps.any(axis=0)).tolist() or list(range(maps.shape[1]))


def _set_axes(result: "PatchResult", axes: Axes, component: str) -> None:
    axes.set_title(component, loc="left", fontweight="bold")
    axes.grid(False)
    last = len(result.run["model"]["anatomy"]["blocks"]) - 1
    axes.set_ylim(-1, last + 1)
    ticks = MaxNLocator(nbins=10, integer=True, min_n_ticks=1).tick_values(0, last)
    axes.set_yticks([tick for tick in ticks if 0 <= tick <= last])


def _draw_map(result: "PatchResult", axes: Axes, component: str, group: str, columns: Sequence[int]) -> QuadMesh:
    values = result.heat_map(component, group).to_numpy()[:, columns]
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set_xticks(range(len(columns)), _labels(result, group, columns), rotation=90)
    # Depth d ends block d - 1, as in all figures: it stands half a block below block d.
    bottom = -1.0 if component == "resid" else -0.5
    return axes.pcolormesh(
        np.arange(len(columns) + 1) - 0.5,
        np.arange(len(values) + 1) + bottom,
        np.ma.masked_invalid(values),
        cmap=matplotlib.colormaps[COLOURS].with_extremes(bad=MISSING),
        vmin=-_limit(result),
        vmax=_limit(result),
    )


def _draw_profile(result: "PatchResult", axes: Axes, component: str, group: str) -> None:
    cells = result.cells[(result.cells["component"] == component) & (result.cells["group"] == group)]
    y = cells["place"].to_numpy() - (0.5 if component == "resid" else 0.0)
    for value in (0, 1):
        axes.axvline(value, color=GREY, linestyle=":", linewidth=1)
    axes.hlines(y, cells["low"], cells["high"], color=BLUE, linewidth=1)
    axes.plot(cells["recovery"], y, color=BLUE, marker=".", linestyle="none")


def _values(result: "PatchResult") -> np.ndarray:
    """All recoveries of all groups."""
    maps = [result.heat_map(component, group) for component in result.components for group in result.groups]
    values = np.concatenate([table.to_numpy().ravel() for table in maps])
    return values[~np.isnan(values)]


def _limit(result: "PatchResult") -> float:
    """Recovery of the strongest colour: 1 or, where there is more in some cell, at most `MOST`."""
    return float(np.clip(np.abs(_values(result)).max(), 1, MOST))


def _draw_scale(result: "PatchResult", figure: Figure, panels: np.ndarray, mesh: QuadMesh) -> None:
    values, limit = _values(result), _limit(result)
    ends = (bool(values.min() < -limit), bool(values.max() > limit))
    extend = {(False, False): "neither", (True, False): "min", (False, True): "max", (True, True): "both"}[ends]
    scale = figure.colorbar(mesh, ax=panels, extend=extend, aspect=30, fraction=0.06)
    as_other = "as clean" if result.run["arguments"]["direction"] == "denoise" else "as corrupt"
    scale.set_ticks([-1, -0.5, 0, 0.5, 1], labels=["−1", "−0.5", "0", "0.5", f"1 ({as_other})"])
    scale.ax.axhline(1, color=BLACK, linewidth=1.2)
    scale.set_label(_measure(result))


def _measure(result: "PatchResult") -> str:
    return "recovery" if result.run["arguments"]["direction"] == "denoise" else "share lost"


def _labels(result: "PatchResult", group: str, columns: Sequence[int]) -> list[str]:
    """`is −1` where all prompts of the group have the same token there, else `−2`."""
    probes = result.probes if group == "all" else result.probes[result.probes["group"] == group]
    base, giver = "corrupt_tokens", "tokens"
    if result.run["arguments"]["direction"] == "noise":
        base, giver = giver, base
    sources = dict(result.run["arguments"]["position_map"] or [])
    labels = []
    for column in columns:
        position = result.run["positions"][column]
        tokens = {
            row[position] if -position <= len(row) else None
            for name, position in ((base, position), (giver, sources.get(position, position)))
            for row in probes[name]
        }
        token = next(iter(tokens)) if len(tokens) == 1 else None
        shown = "" if token is None else f"{plain(token.strip() or repr(token), 12)} "
        labels.append(f"{shown}{str(position).replace('-', '−')}")
    return labels


def _caption(result: "PatchResult", names: Sequence[str], columns: dict[str, list[int]]) -> list[str]:
    run, arguments = result.run, result.run["arguments"]
    what = {
        "denoise": "put from the clean run into the corrupt one: the share of the difference that comes back",
        "noise": "put from the corrupt run into the clean one: the share of the difference that is lost",
    }
    counted = []
    for name in names:
        own = result.probes if name == "all" else result.probes[result.probes["group"] == name]
        undefined = int(own["undefined"].notna().sum())
        counted.append(
            f"{plain(name, 24)} n = {len(own) - undefined}"
            + (f" ({undefined} undefined)" if undefined else "")
            + f", {int(own['answered_both'].sum())} with both prompts answered"
        )
    omitted = any(len(shown) < len(run["positions"]) for shown in columns.values())
    together = run["positions"] == [None]
    return [
        f"Activation patching: {', '.join(result.components)} {what[arguments['direction']]} in {arguments['metric']} "
        f"(undefined below {arguments['min_gap']:g})",
        f"{model_name(run)}, {run['model']['dtype']}; {'; '.join(counted)}; engine {run['engine']}",
        READING,
        *(["All positions are patched together"] if together else ["Positions count from the last token, −1"]),
        *(["Columns where patching changes nothing are left out"] if omitted else []),
        *(["Lines are 95 % intervals"] if len(run["positions"]) == 1 else ["Grey cells are missing"]),
    ]
