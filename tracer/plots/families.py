"""Figure of several models side by side: where particles lie and which blocks are fragile, over relative depth."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from tracer.divergence import MAX_JSD
from tracer.errors import InputError
from tracer.plots.fragility import fragile_blocks
from tracer.plots.lens import BARS, INTERVAL, MEDIAN, particle_shares
from tracer.plots.style import (
    BLACK,
    BLUE,
    add_legend,
    answered,
    model_name,
    plain,
    say,
    style,
    text_width,
    write_caption,
)
from tracer.results import TraceResult

ROW, LEAST = 0.62, 2.6
"""Inches of height of a model's row, and of all rows together at least."""

PLAIN_BLOCK, FRAGILE_BLOCK = "#B9D4E6", BLUE
FIRST_BLOCK: dict[str, Any] = {"hatch": "////", "edgecolor": BLACK}


def draw_families(results: Sequence[TraceResult], ablation: str | None = None) -> Figure:
    """One row a model: on the left the share of particles at each block, on the right the fragility of each block.

    Block b of L takes b/L to (b + 1)/L of the axis, so that models of different depth can be compared.

    Args:
        results: traces of at least one model.
        ablation: one that all of them have; default the first one that all have. Where they share none, only the
            particles are drawn.

    Returns:
        A figure that no pyplot state knows of.

    Raises:
        InputError: there is no result, or not all of them have the ablation.
    """
    if not results:
        raise InputError("no traces to draw side by side: pass at least one")
    shared = [kind for kind in results[0].ablations if all(kind in result.ablations for result in results)]
    kind = ablation if ablation is not None else next(iter(shared), None)
    if kind is not None and kind not in shared:
        raise InputError(f"ablation {kind!r} is not in all traces: pass one of {', '.join(shared) or 'none'}")
    with style():
        labels = [_label(result) for result in results]
        margin = max(text_width(line) for label in labels for line in label.split("\n")) / 72
        columns = 1 if kind is None else 2
        figure = Figure(figsize=(margin + 3.2 * columns, 1.9 + max(LEAST, ROW * len(results))), layout="constrained")
        panels = figure.subplots(len(results), columns, sharex=True, squeeze=False)
        top = 1.1 * max(_draw_particles(result, axes) for result, axes in zip(results, panels[:, 0], strict=True))
        for result, label, row in zip(results, labels, panels, strict=True):
            row[0].set_ylim(0, top or 1.0)
            row[0].set_ylabel(label, rotation=0, ha="right", va="center")
            if kind is not None:
                _draw_fragility(result, kind, row[1])
        for axes in panels.flat:
            axes.set_xlim(0, 1)
            axes.set_xticks(np.linspace(0, 1, 5), ["0", "1/4", "1/2", "3/4", "1"])
            axes.set_yticks([])
            axes.grid(axis="x")
        panels[0, 0].set_title(f"task particles (rows to {top or 1.0:.0%})", loc="left")
        if kind is not None:
            panels[0, 1].set_title(f"fragility under {kind} (rows to ln 2 = {MAX_JSD:.2f} nats)", loc="left")
        for axes in panels[-1]:
            axes.set_xlabel("relative depth (0: input of block 0, 1: output of the last)")
        handles: list[Artist] = [
            Patch(**BARS, label="share of answered probes"),
            Line2D([], [], **MEDIAN, label="median over groups"),
            Patch(**INTERVAL, label="its 95 % interval"),
        ]
        if kind is not None:
            handles += [
                Patch(facecolor=FRAGILE_BLOCK, label="fragile: as the largest"),
                Patch(facecolor=PLAIN_BLOCK, label="less fragile"),
                Patch(facecolor="white", **FIRST_BLOCK, label="block 0"),
            ]
        add_legend(figure, handles)
        write_caption(figure, _caption(results, kind))
    return figure


def _label(result: TraceResult) -> str:
    probes = plain(str(result.run["arguments"]["probes"]), 20)
    return f"{model_name(result.run)}\n{probes}: {int(answered(result).sum())}/{len(result.probes)} answered"


def _draw_particles(result: TraceResult, axes: Axes) -> float:
    """Draw the histogram of a model's particles; returns its largest share."""
    found = result.run["particle_block"]
    counted = answered(result)
    if found["estimate"] is None:
        say(axes, "no group has a particle", 40)
        return 0.0
    n = len(result.blocks)
    shares = particle_shares(result, counted)
    axes.bar((np.arange(n) + 0.5) / n, shares, width=0.86 / n, **BARS)
    axes.axvline((found["estimate"] + 0.5) / n, **MEDIAN)
    if found["low"] is not None:
        axes.axvspan((found["low"]) / n, (found["high"] + 1) / n, zorder=0, **INTERVAL)
    return float(shares.max())


def _draw_fragility(result: TraceResult, kind: str, axes: Axes) -> None:
    """Draw the divergence of every block, block 0 hatched: its value may come from a small embedding alone."""
    n = len(result.blocks)
    x = (np.arange(n) + 0.5) / n
    jsd, low, high = (result.blocks[f"{name}_{kind}"].to_numpy(dtype=float) for name in ("jsd", "jsd_low", "jsd_high"))
    fragile, _ = fragile_blocks(result, kind)
    bars = axes.bar(x, jsd, width=0.86 / n, color=np.where(fragile, FRAGILE_BLOCK, PLAIN_BLOCK))
    bars[0].set(**FIRST_BLOCK, linewidth=0.5)
    known = np.isfinite(low)
    axes.vlines(x[known], low[known], high[known], color=BLACK, linewidth=0.8)
    axes.set_ylim(0, MAX_JSD)


def _caption(results: Sequence[TraceResult], kind: str | None) -> list[str]:
    rules = {result.run["arguments"]["rule"] for result in results}
    lenses = {result.run["readout"] for result in results}
    several = len({result.run["arguments"]["probes"] for result in results}) > 1
    return [
        "Left: share of the answered probes whose task particle is at each block, and the median over groups. Right: "
        "mean Jensen-Shannon divergence of the output when a block is ablated, with 95 % intervals",
        *(["Rows with other probes ask other things and compare only in shape"] if several else []),
        f"Particle rule {', '.join(sorted(rules))}, "
        f"{', '.join(sorted(lenses))} lens; {f'ablation {kind}' if kind else 'no ablation that all have'}",
        "Each row is one trained model; another seed of the same family may differ",
    ]
