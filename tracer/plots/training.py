"""Figure of a training: the losses over its steps, and how far the streams moved in the traces on the way."""

from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from tracer.plots.style import BLACK, BLUE, GREEN, ORANGE, PURPLE, add_legend, plain, style, write_caption
from tracer.summary import spans

if TYPE_CHECKING:  # a result draws itself through this module
    from tracer.training.results import CptResult

LOOKS = ((BLUE, "o", "-"), (ORANGE, "s", "--"), (GREEN, "^", "-."), (PURPLE, "D", ":"))
"""Colour, marker and line of each measured text, which repeat after the fourth."""


def draw_training(result: "CptResult") -> Figure:
    """Losses of training and measured texts by step; with traces, the cosine of the streams by depth beside it."""
    traced = result.run["retraces"]
    with style():
        figure = Figure(figsize=(8.4 if traced else 6.0, 3.8), layout="constrained")
        panels = figure.subplots(1, 2 if traced else 1, squeeze=False)[0]
        handles = _losses(panels[0], result)
        if traced:
            _streams(panels[1], result)
        add_legend(figure, handles)
        plan = result.run["plan"]
        write_caption(
            figure,
            [
                f"Continued pre-training of {plain(result.run['recipe']['model'])} on {result.run['tokens']:,} tokens, "
                f"plan {plain(plan['rule'])}: blocks {spans(plan['train'])} trained, {spans(plan['freeze'])} frozen, "
                f"embeddings {plan['embeddings']}, norm {plan['norm']}, head {plan['head']}",
                "One training with one seed; measured texts were not trained on",
                *(
                    [f"Streams at the last token of {traced[0]['n']} prompts against those before the first step"]
                    if traced
                    else []
                ),
            ],
        )
    return figure


def _losses(axes: Axes, result: "CptResult") -> list[Line2D]:
    curve = result.curve
    handles = []
    trained = curve.dropna(subset=["loss"])
    handles += axes.plot(trained["step"], trained["loss"], color=BLACK, linewidth=0.8, label="training")
    for number, name in enumerate(result.measured):
        colour, marker, line = LOOKS[number % len(LOOKS)]
        rows = curve.dropna(subset=[f"{name}_loss"])
        handles += axes.plot(
            rows["step"], rows[f"{name}_loss"], color=colour, marker=marker, linestyle=line, markersize=4, label=name
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a token)")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    return handles


def _streams(axes: Axes, result: "CptResult") -> None:
    rows = result.run["retraces"]
    shades = matplotlib.colormaps["viridis"](np.linspace(0, 0.85, len(rows)))
    for shade, row in zip(shades, rows, strict=True):
        depths = np.arange(len(row["cosine"]))
        axes.plot(depths, row["cosine"], color=shade, marker=".", markersize=3, label=f"step {row['step']:,}")
    axes.set_xlabel("depth d")
    axes.set_ylabel("mean cosine with the stream before")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.legend(fontsize=7, ncols=1 + (len(rows) > 6))
