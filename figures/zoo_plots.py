"""The figures of `docs/FINDINGS.md`, drawn from the tables of `data/zoo`."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from zoo_page import counted, one_of_each_family, verdict_on_difference, verdict_on_particles

from tracer.divergence import MAX_JSD
from tracer.plots.lens import BARS, INTERVAL, MEDIAN
from tracer.plots.style import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION, style, write_caption

COLOURS = {
    "transformer": BLACK,
    "mamba2": BLUE,
    "mamba1": SKY,
    "gdn": VERMILLION,
    "gdn-attention": ORANGE,
    "mamba2-attention": GREEN,
    "mamba2-parallel": PURPLE,
}
DASHES = ("-", "--", ":")
MARKERS = {
    "transformer": "o",
    "mamba2": "s",
    "mamba1": "^",
    "gdn": "D",
    "gdn-attention": "v",
    "mamba2-attention": "P",
    "mamba2-parallel": "X",
}


SIZES = {"transformer-4": "<", "transformer-12": ">"}
"""Markers of the models that share a family with another one."""


def draw_profiles(tables: dict[str, pd.DataFrame], names: Sequence[str] | None = None) -> Figure:
    """One row a model: share of particles at each block, and the fragility of each block beside its random twin.

    `names` are the models to draw; all of them by default.
    """
    models, blocks = tables["models"], tables["blocks"]
    if names is not None:
        models = models[models["name"].isin(names)]
    drawn = blocks[blocks["name"].isin(models["name"]) & (blocks["weights"] == "trained")]
    top = 1.1 * drawn["particles"].max() or 1.0
    with style():
        figure = Figure(figsize=(8.6, 1.7 + 0.55 * len(models)), layout="constrained")
        panels = figure.subplots(len(models), 2, sharex=True)
        for (_, model), (left, right) in zip(models.iterrows(), panels, strict=True):
            own = blocks[blocks["name"] == model["name"]]
            trained, twin = (own[own["weights"] == weights] for weights in ("trained", "random"))
            n = model["blocks"]
            x = (np.arange(n) + 0.5) / n
            left.bar(x, trained["particles"], width=0.86 / n, **BARS)
            left.axvline((model["particle"] + 0.5) / n, **MEDIAN)
            left.axvspan(model["particle_low"] / n, (model["particle_high"] + 1) / n, zorder=0, **INTERVAL)
            left.set_ylim(0, top)
            left.set_ylabel(
                f"{model['name']}\n{model['answered'] / model['n']:.1%} answered", rotation=0, ha="right", va="center"
            )
            bars = right.bar(x, trained["jsd_zero"], width=0.86 / n, color="#9CC4E0")
            bars[0].set(hatch="////", edgecolor=BLACK, linewidth=0.5)
            right.vlines(x, trained["jsd_low_zero"], trained["jsd_high_zero"], color=BLACK, linewidth=0.8)
            right.plot(x, trained["jsd_mean"], "s", color=VERMILLION, markersize=3)
            right.plot(x, twin["jsd_zero"], "_", color=BLACK, markersize=7)
            right.set_ylim(0, MAX_JSD)
            for axes in (left, right):
                axes.set_xlim(0, 1)
                axes.set_xticks(np.linspace(0, 1, 5), ["0", "1/4", "1/2", "3/4", "1"])
                axes.set_yticks([])
                axes.grid(axis="x")
        panels[0, 0].set_title(f"task particles (rows to {top:.0%})", loc="left")
        panels[0, 1].set_title(f"fragility (rows to ln 2 = {MAX_JSD:.2f} nats)", loc="left")
        for axes in panels[-1]:
            axes.set_xlabel("relative depth (0: input of block 0, 1: output of the last)")
        figure.legend(
            handles=[
                Patch(**BARS, label="share of answered probes"),
                Line2D([], [], **MEDIAN, label="median over relations"),
                Patch(**INTERVAL, label="its 95 % interval"),
                Patch(facecolor="#9CC4E0", label="JSD, block skipped (block 0 hatched)"),
                Line2D([], [], color=VERMILLION, marker="s", linestyle="", markersize=3, label="JSD, mean instead"),
                Line2D([], [], color=BLACK, marker="_", linestyle="", label="JSD, skipped, random weights"),
            ],
            loc="outside upper left",
            ncols=3,
        )
        verdicts = models.apply(verdict_on_particles, axis=1)
        write_caption(
            figure,
            [
                f"{len(models)} models of the zoo over relative depth. Left: share of the answered probes whose task "
                "particle is at each block. Right: mean Jensen-Shannon divergence of the output when a block is "
                "ablated, 95 % intervals",
                f"Beyond its interval the median particle lies {counted(verdicts)} of {len(models)} models",
                f"n = {models['n'].iloc[0]} held probes in {tables['groups']['group'].nunique()} relations; plain "
                "logit lens, rule first_rise. Each row is one trained model",
            ],
        )
    return figure


def draw_claims(tables: dict[str, pd.DataFrame]) -> Figure:
    """Shallow less deep half for every model: with block 0 and without, measured and beyond random weights."""
    halves = tables["halves"]
    names = list(dict.fromkeys(halves["name"]))
    kinds = list(dict.fromkeys(halves["ablation"]))
    with style():
        figure = Figure(figsize=(8.6, 1.9 + 0.24 * len(names) * len(kinds)), layout="constrained")
        panels = figure.subplots(len(kinds), 2, sharex=True, sharey=True, squeeze=False)
        for row, kind in zip(panels, kinds, strict=True):
            for axes, first in zip(row, (True, False), strict=True):
                chosen = halves[(halves["ablation"] == kind) & (halves["block_0"] == first)].set_index("name")
                _draw_differences(axes, chosen.loc[names])
                axes.set_title(f"{kind}, {'with' if first else 'without'} block 0", loc="left")
            row[0].set_yticks(range(len(names)), names)
            row[0].set_ylim(len(names) - 0.4, -0.6)
        for axes in panels[-1]:
            axes.set_xlabel("JSD (nats): shallow half less deep half")
        figure.legend(
            handles=[
                Line2D([], [], color=BLUE, marker="o", markersize=4, label="measured"),
                Line2D([], [], color=ORANGE, marker="s", markersize=4, label="beyond the random twin"),
                Line2D([], [], color=BLACK, linestyle="", marker="$<$", label="left: deep blocks are more fragile"),
                Line2D([], [], color=BLACK, linestyle="", marker="$>$", label="right: shallow ones"),
            ],
            loc="outside upper left",
            ncols=4,
        )
        families = halves[halves["name"].isin(one_of_each_family(tables["models"]))]
        verdicts = [
            f"{kind} {'with' if first else 'without'} block 0: {counted(_verdicts(families, kind, first))}"
            for kind in kinds
            for first in (True, False)
        ]
        write_caption(
            figure,
            [
                "Difference of the mean divergence between halves of the depth, 95 % intervals over relations and "
                "probes",
                f"More fragile half, one model of each of {families['family'].nunique()} families: "
                + "; ".join(verdicts),
                f"n = {tables['models']['n'].iloc[0]} probes each; the random twins are means of three initialisations",
            ],
        )
    return figure


def _verdicts(halves: pd.DataFrame, kind: str, with_first: bool) -> list[str]:
    rows = halves[(halves["ablation"] == kind) & (halves["block_0"] == with_first)]
    return [verdict_on_difference(*row) for row in rows[["difference_low", "difference_high"]].to_numpy()]


def _draw_differences(axes: Axes, rows: pd.DataFrame) -> None:
    y = np.arange(len(rows))
    axes.axvline(0, color=GREY, linewidth=1)
    for name, shift, colour, marker in (("difference", -0.15, BLUE, "o"), ("excess", 0.15, ORANGE, "s")):
        axes.hlines(y + shift, rows[f"{name}_low"], rows[f"{name}_high"], color=colour, linewidth=1)
        axes.plot(rows[name], y + shift, marker, color=colour, markersize=3.5)
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")


def draw_norms(tables: dict[str, pd.DataFrame]) -> Figure:
    """Norm of the stream by relative depth."""
    blocks = tables["blocks"]
    trained = blocks[blocks["weights"] == "trained"]
    with style():
        figure = Figure(figsize=(7.2, 4.4), layout="constrained")
        axes = figure.subplots()
        for (name, family, seed, std), rows in trained.groupby(["name", "family", "seed", "embedding_std"], sort=False):
            norms = [rows["norm_before"].iloc[0], *rows["norm_after"]]
            small = std != 1
            axes.plot(
                np.linspace(0, 1, len(norms)),
                norms,
                color=COLOURS[family],
                marker="" if seed else SIZES.get(name, MARKERS[family]),
                markersize=4,
                linestyle=(0, (1, 1)) if small else DASHES[seed],
                linewidth=2.2 if small else 1.1,
                label=name if seed == 0 else None,
            )
        axes.set_yscale("log")
        axes.set_xlabel("relative depth")
        axes.set_ylabel("norm of the stream at the last position")
        figure.legend(loc="outside right upper")
        write_caption(
            figure,
            [
                "Mean norm of the residual stream at each depth. Dashed and dotted: further seeds; thick and dotted: "
                "embedding initialised with standard deviation 0.02 instead of 1",
                f"n = {tables['models']['n'].iloc[0]} probes",
            ],
        )
    return figure
