"""Figure of an evaluation: the accuracy of every group in every suite."""

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from tracer.benchmarks import CHANCE
from tracer.evaluation.results import ALL
from tracer.plots.style import BLACK, BLUE, GREEN, ORANGE, VERMILLION, model_name, plain, style, write_caption

if TYPE_CHECKING:  # a result draws itself through this module
    from tracer.evaluation.results import EvalResult

LOOKS = ((BLUE, "o"), (ORANGE, "s"), (GREEN, "^"), (VERMILLION, "D"), (BLACK, "x"))
ROW, SPREAD = 0.26, 0.5
"""Inches of height of a row, and the share of it over which the suites are spread."""


def draw_accuracy(result: "EvalResult") -> Figure:
    """One row a group with its accuracy in every suite and 95 % intervals; the suites as a whole on top."""
    names = list(dict.fromkeys(result.groups["group"]))
    with style():
        figure = Figure(figsize=(7.2, 1.6 + ROW * len(names)), layout="constrained")
        axes = figure.subplots()
        offsets = np.linspace(-SPREAD / 2, SPREAD / 2, len(result.suites)) if len(result.suites) > 1 else [0.0]
        for number, (suite, offset) in enumerate(zip(result.suites, offsets, strict=True)):
            table = result.groups[result.groups["suite"] == suite]
            rows = np.array([names.index(group) for group in table["group"]]) + offset
            colour, marker = LOOKS[number % len(LOOKS)]
            axes.hlines(rows, table["low"], table["high"], color=colour, linewidth=1)
            axes.plot(table["accuracy"], rows, marker, color=colour, markersize=4, label=plain(suite, 30))
        axes.set_yticks(range(len(names)), [plain(name, 30) for name in names])
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlim(-0.02, 1.02)
        axes.grid(axis="x")
        axes.grid(visible=False, axis="y")
        benchmarks = result.benchmarks
        if benchmarks:
            axes.axvline(CHANCE, color=BLACK, linestyle=":", linewidth=1, label="chance, of a question")
        probes, letters = (
            "the target is the most likely of all tokens",
            "the right letter is the most likely of the four",
        )
        what = letters if benchmarks else probes
        if benchmarks and len(benchmarks) < len(result.suites):
            what = f"probes: {probes}; questions: {letters}"
        axes.set_xlabel(f"accuracy ({what})")
        figure.legend(loc="outside upper left", ncols=4)
        counts = result.groups[result.groups["group"] == ALL].set_index("suite")["n"]
        write_caption(
            figure,
            [
                "Share of right answers, by group; lines: 95 % intervals",
                "n = " + ", ".join(f"{counts[suite]} ({plain(suite, 30)})" for suite in result.suites),
                f"{model_name(result.run)}, {result.run['model']['dtype']}",
            ],
        )
    return figure
