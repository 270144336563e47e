"""Figure `lens`: where each group's target becomes likely, and where its particles are."""

from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from tracer.plots.style import (
    BLACK,
    BLUE,
    GREY,
    ORANGE,
    PLAIN_CURVE,
    PLAIN_LENS,
    READING,
    SKY,
    add_caption,
    add_legend,
    answered,
    depth_positions,
    in_group,
    mean_probability,
    plain,
    probability_axis,
    say,
    set_block_axis,
    share_axis,
    text_width,
)
from tracer.results import TraceResult

INTERVAL: dict[str, Any] = {"facecolor": ORANGE, "alpha": 0.35, "linewidth": 0}
BAND: dict[str, Any] = {"facecolor": "none", "edgecolor": GREY, "hatch": "//////", "linewidth": 0.6}
BARS: dict[str, Any] = {"facecolor": SKY, "edgecolor": BLACK, "linewidth": 0.5}
MEDIAN: dict[str, Any] = {"color": BLACK, "linestyle": ":", "linewidth": 1.2}


def draw_lens(result: TraceResult) -> Figure:
    """One panel a group: lens curve with its null band, and the histogram of particles beneath."""
    groups = result.run["groups"]
    n = len(groups)
    columns = n if n <= 3 else 2 if n == 4 else 3 if n <= 9 else 4
    rows = -(-n // columns)
    figure = Figure(figsize=(max(7.5, 2.6 * columns), 1.7 + 2.5 * rows), layout="constrained")
    grid = figure.add_gridspec(2 * rows, columns, height_ratios=(5, 2) * rows)
    curves: list[Axes] = []
    strips: list[Axes] = []
    largest = 0.0
    for i, group in enumerate(groups):
        row, column = 2 * (i // columns), i % columns
        first = curves[0] if curves else None
        curve = figure.add_subplot(grid[row, column], sharex=first, sharey=first)
        strip = figure.add_subplot(grid[row + 1, column], sharex=curve, sharey=strips[0] if strips else None)
        curves.append(curve)
        strips.append(strip)
        largest = max(largest, _draw_group(result, group, curve, strip))
        curve.tick_params(labelbottom=False, labelleft=column == 0)
        strip.tick_params(labelleft=column == 0)
        if column == 0:
            curve.set_ylabel("p(target)")
            strip.set_ylabel("share")
        if i + columns >= n:
            strip.set_xlabel("block")
    set_block_axis(curves[0], len(result.blocks))
    probability_axis(curves[0])
    share_axis(strips[0], largest or 1.0)
    add_legend(
        figure,
        [
            Line2D([], [], color=BLUE, marker=".", label=f"answered probes, {result.run['readout']} lens"),
            *plain_lens_handles(result),
            Line2D([], [], color=GREY, linestyle="--", linewidth=1, label="all probes"),
            Patch(**BAND, label="null band, 5 to 95 %"),
            Patch(**BARS, label="particles, share of answered probes"),
            Line2D([], [], **MEDIAN, label="median particle block"),
            Patch(**INTERVAL, label="its 95 % interval"),
        ],
    )
    add_caption(
        figure,
        result,
        "Above: mean probability of the target under the lens. Below: share of the group's answered probes whose "
        "particle is at this block. Null band: probabilities of the group's other targets",
        READING,
    )
    return figure


def plain_lens_handles(result: TraceResult) -> list[Artist]:
    """The legend of the plain lens's curve, where the result has one beside a tuned lens."""
    return [Line2D([], [], **PLAIN_CURVE, label="plain logit lens")] if result.run["plain"] else []


def _draw_group(result: TraceResult, group: dict[str, Any], curve: Axes, strip: Axes) -> float:
    """Draw a group's two panels; returns the largest share of particles."""
    name = group["group"]
    member = in_group(result, name)
    counted = member & answered(result)
    x = depth_positions(len(result.arrays["log_p"]))
    if (member & ~counted).any():
        curve.plot(x, mean_probability(result, member), color=GREY, linestyle="--", linewidth=1)
    if counted.any():
        size = marker_size(len(x))
        curve.plot(x, mean_probability(result, counted), color=BLUE, marker=".", markersize=size, clip_on=False)
        if result.run["plain"]:
            curve.plot(x, mean_probability(result, counted, PLAIN_LENS), **PLAIN_CURVE)
    if f"null_low/{name}" in result.arrays:
        curve.fill_between(x, result.arrays[f"null_low/{name}"], result.arrays[f"null_high/{name}"], **BAND)
    shares = np.zeros(1)
    found = f"{group['answered']}/{group['n']} answered"
    if group["why_not"] is None:
        mark_block(group["block"], curve, strip)
        shares = particle_shares(result, counted)
        strip.bar(np.arange(len(result.blocks)), shares, width=0.8, **BARS)
        found += f"; {block_text(group['block'])}"
    else:
        found += "; no particle"
        say(strip, group["why_not"], 36)
    curve.set_title(_shortened(name, 165.0), loc="left", fontweight="bold", pad=15)
    words = curve.annotate(found, (0, 1), xycoords="axes fraction", xytext=(0, 4), textcoords="offset points")
    words.set_in_layout(False)  # else a long line would make this column narrower than the others
    return float(shares.max())


def _shortened(name: str, points: float) -> str:
    """As much of a group's name as fits over its panel."""
    most = len(name)
    while most > 1 and text_width(plain(name, most), 9.0, "bold") > points:
        most -= 1
    return plain(name, most)


def particle_shares(result: TraceResult, counted: np.ndarray) -> Float[np.ndarray, "blocks"]:
    """`[blocks]` share of the counted probes, of which there is at least one, whose particle is at each block."""
    blocks = result.probes["particle"][counted].dropna().to_numpy(dtype=int)
    return np.bincount(blocks, minlength=len(result.blocks)) / counted.sum()


def mark_block(block: dict[str, Any], *panels: Axes) -> None:
    """Mark a median block and its interval, where there is one, across panels."""
    for axes in panels:
        axes.axvline(block["estimate"], **MEDIAN)
        if block["low"] is not None:
            axes.axvspan(block["low"] - 0.5, block["high"] + 0.5, zorder=0, **INTERVAL)


def block_text(block: dict[str, Any]) -> str:
    """A median block and its interval in words."""
    interval = "" if block["low"] is None else f" [{block['low']:.3g}, {block['high']:.3g}]"
    return f"block {block['estimate']:.3g}{interval}"


def marker_size(n: int) -> float:
    """Size of markers (points) that leaves n of them apart in a panel."""
    return 5.0 if n <= 40 else 3.0
