"""Figure `fragility`: how far the ablation of each block moves the output."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from tracer.divergence import MAX_JSD
from tracer.plots.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    PURPLE,
    SKY,
    VERMILLION,
    add_caption,
    add_legend,
    answered,
    say,
    set_block_axis,
)
from tracer.results import TraceResult

LOOKS: tuple[dict[str, Any], ...] = (
    {"color": BLUE, "marker": "o", "linestyle": "-"},
    {"color": VERMILLION, "marker": "s", "linestyle": "--"},
    {"color": GREEN, "marker": "^", "linestyle": "-."},
    {"color": PURPLE, "marker": "D", "linestyle": ":"},
    {"color": BLACK, "marker": "v", "linestyle": "-"},
)
"""Colour, marker and line style of the ablations, in the order in which they were run."""

CEILING: dict[str, Any] = {"color": BLACK, "linestyle": (0, (6, 3)), "linewidth": 1.0}
LARGEST: dict[str, Any] = {"color": GREY, "linestyle": (0, (1, 1.5)), "linewidth": 1.2}
FIRST: dict[str, Any] = {"facecolor": "#E8E8E8", "edgecolor": "#B0B0B0", "hatch": "....", "linewidth": 0}
NONE_RUN = "no ablation was run: pass ablations, e.g. zero"

LINEAR_BELOW = 1e-4
"""On a logarithmic axis, the divergence (nats) below which it is linear, so that zero has a place."""

SMALL_SHARE = 0.03
"""When the median block stays below this share of ln 2, a linear axis would show it as zero."""


def draw_fragility(result: TraceResult) -> Figure:
    """One panel an ablation: divergence by block with intervals, and the share of answers kept beneath."""
    kinds = result.ablations
    rows = max(1, len(kinds))
    figure = Figure(figsize=(8.0, 1.4 + 2.6 * rows), layout="constrained")
    grid = figure.add_gridspec(2 * rows, 1, height_ratios=(4, 1) * rows)
    logarithmic = needs_log(result)
    first: Axes | None = None
    for i, kind in enumerate(kinds):
        profile = figure.add_subplot(grid[2 * i], sharex=first)
        kept = figure.add_subplot(grid[2 * i + 1], sharex=profile)
        first = first or profile
        mark_limits(result, profile)
        draw_profile(result, kind, profile, LOOKS[i % len(LOOKS)])
        set_jsd_axis(profile, logarithmic)
        profile.set_title(kind, loc="left", fontweight="bold")
        if _summary(result, kind)["flat"]:
            profile.set_title("flat: the largest block means nothing", loc="right", fontsize=8)
        profile.tick_params(labelbottom=False)
        _draw_kept(result, kind, kept)
        kept.tick_params(labelbottom=i == len(kinds) - 1)
    if first is None:
        empty = figure.add_subplot(grid[:])
        say(empty, NONE_RUN)
        set_jsd_axis(empty, logarithmic)
        set_block_axis(empty, len(result.blocks))
        empty.set_xlabel("block")
    else:
        set_block_axis(first, len(result.blocks))
        figure.axes[-1].set_xlabel("block")
        add_legend(figure, [*marker_handles(), *limit_handles(result)])
    add_caption(
        figure,
        result,
        "Jensen-Shannon divergence between the next-token distributions with and without the ablation of a block, "
        "mean over probes, and the share of the answers that the ablated model still gives",
        *interval_notes(result),
    )
    return figure


def draw_profile(result: TraceResult, kind: str, axes: Axes, look: Mapping[str, Any], shift: float = 0.0) -> None:
    """Draw the divergence of every block with its interval, fragile blocks filled.

    Args:
        result: of a trace.
        kind: the ablation.
        axes: to draw on.
        look: one of `LOOKS`.
        shift: to the right, in blocks, so that several ablations can stand side by side.
    """
    colour = look["color"]
    blocks = result.blocks
    x = blocks["block"].to_numpy(dtype=float) + shift
    jsd = blocks[f"jsd_{kind}"].to_numpy(dtype=float)
    low, high = (blocks[f"jsd_{end}_{kind}"].to_numpy(dtype=float) for end in ("low", "high"))
    measured = np.isfinite(low) & np.isfinite(high)
    size = 5.0 if len(x) <= 40 else 3.2
    axes.plot(x, jsd, color=colour, linestyle=look["linestyle"], linewidth=0.9, label=kind)
    axes.vlines(x[measured], low[measured], high[measured], color=colour, linewidth=1.2, label=f"{kind} interval")
    fragile, without_first = fragile_blocks(result, kind)
    for chosen, fill in (
        (fragile, "full"),
        (without_first & ~fragile, "bottom"),
        (~fragile & ~without_first, "none"),
    ):
        if chosen.any():  # a line without points, not clipped, would upset the layout
            axes.plot(x[chosen], jsd[chosen], clip_on=False, **_marker(colour, look["marker"], fill, size))


def _marker(colour: str, marker: str, fill: str, size: float) -> dict[str, Any]:
    """Look of a block's marker; a hollow one is filled white, so that no line runs through it."""
    face = "white" if fill == "none" else colour
    return {
        "color": colour,
        "linestyle": "none",
        "marker": marker,
        "markersize": size,
        "markeredgewidth": 0.9,
        "fillstyle": "full" if fill == "none" else fill,
        "markerfacecolor": face,
        "markerfacecoloralt": "white",
        "zorder": 3,
    }


def fragile_blocks(result: TraceResult, kind: str) -> tuple[Bool[np.ndarray, "blocks"], Bool[np.ndarray, "blocks"]]:
    """`[blocks]` which blocks are fragile, with block 0 and without; none where the profile is flat."""
    summary = _summary(result, kind)
    blocks = np.arange(len(result.blocks))
    if summary["flat"]:
        return np.zeros(len(blocks), dtype=bool), np.zeros(len(blocks), dtype=bool)
    return np.isin(blocks, summary["fragile"]), np.isin(blocks, summary["fragile_without_first"])


def marker_handles(colour: str = BLACK, marker: str = "o") -> list[Artist]:
    """Legend of the three kinds of markers."""
    labels = {
        "full": "fragile: not told apart from the largest",
        "bottom": "fragile when block 0 is left out",
        "none": "less fragile",
    }
    return [Line2D([], [], **_marker(colour, marker, fill, 5.0), label=label) for fill, label in labels.items()]


def mark_limits(result: TraceResult, axes: Axes) -> None:
    """Draw the ceiling and ln 2, and mark block 0."""
    axes.axhline(_ceiling(result), **CEILING)
    axes.axhline(MAX_JSD, **LARGEST)
    if len(result.blocks) > 1:
        axes.axvspan(-0.5, 0.5, zorder=0, **FIRST)


def limit_handles(result: TraceResult) -> list[Artist]:
    """Legend of what `mark_limits` draws."""
    handles: list[Artist] = [
        Line2D([], [], **CEILING, label=f"ceiling: JSD(clean, uniform) = {_ceiling(result):.3f}"),
        Line2D([], [], **LARGEST, label=f"ln 2 = {MAX_JSD:.3f}"),
    ]
    if len(result.blocks) > 1:
        handles.append(Patch(**FIRST, label="block 0: can be an artefact"))
    return handles


def needs_log(result: TraceResult) -> bool:
    """Whether most blocks would be flat at zero on a linear axis up to ln 2."""
    values = [result.blocks[f"jsd_{kind}"] for kind in result.ablations]
    return bool(values) and float(np.median(values)) < SMALL_SHARE * MAX_JSD


def set_jsd_axis(axes: Axes, logarithmic: bool) -> None:
    """From 0 to just above ln 2, the same in every result, so that figures can be compared."""
    if logarithmic:
        axes.set_yscale("symlog", linthresh=LINEAR_BELOW, linscale=0.4)
        axes.set_ylim(0, 1.2)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_ylabel(f"JSD (nats; log above {LINEAR_BELOW:g})")
    else:
        axes.set_ylim(0, 0.75)
        axes.set_ylabel("JSD (nats)")


def interval_notes(result: TraceResult) -> Sequence[str]:
    """Sentences for the caption: how the intervals were made, and why block 0 is marked."""
    if not result.ablations:
        return ()
    notes = [f"Whiskers: 95 % intervals, {_summary(result, result.ablations[0])['intervals']}"]
    if len(result.blocks) > 1:
        notes.append("The value of block 0 can be an artefact of a small embedding scale")
    return notes


def _draw_kept(result: TraceResult, kind: str, axes: Axes) -> None:
    axes.set_ylabel("answers\nkept")
    axes.set_ylim(0, 1.05)
    axes.set_yticks([0, 1], ["0", "1"])
    if not answered(result).any():
        say(axes, "no probe is answered")
        return
    blocks = result.blocks
    axes.bar(blocks["block"], blocks[f"kept_{kind}"], width=0.8, facecolor=SKY, edgecolor=BLACK, linewidth=0.5)


def _summary(result: TraceResult, kind: str) -> dict[str, Any]:
    return next(entry for entry in result.run["fragility"] if entry["ablation"] == kind)


def _ceiling(result: TraceResult) -> float:
    return float(result.run["fragility"][0]["ceiling"])
