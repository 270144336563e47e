"""Figures of a trial: what is kept against what is learned, what is learned for how much work, and the differences."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from tracer.plots.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    add_legend,
    plain,
    say,
    style,
    write_caption,
)
from tracer.statistics import MIN_SEEDS
from tracer.trials.levels import learned
from tracer.trials.recipe import ACQUISITION

if TYPE_CHECKING:  # a result draws itself through this module
    from tracer.trials.results import TrialResult

COLOURS = (BLACK, BLUE, ORANGE, GREEN, PURPLE, VERMILLION, SKY)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", ":", "-.")

SCORE_WORDS = {"accuracy": "share answered", "log_p": "mean log p (nats)", "bits_per_byte": "− bits a byte"}


def draw_frontier(result: "TrialResult") -> Figure:
    """What each arm keeps at most where it has learned so much, a panel for each thing to keep."""
    kept = list(result.recipe.retention)
    with style():
        figure = Figure(figsize=(4.2 * max(2, len(kept)), 3.9), layout="constrained")
        panels = figure.subplots(1, len(kept), squeeze=False, sharex=True)[0]
        looks = _looks(result)
        for axes, name in zip(panels, kept, strict=True):
            table = result.curve[result.curve["measure"] == name]
            for number, arm in enumerate(result.recipe.arms):
                axes.plot(table["level"], table[arm], markevery=(number, len(looks)), markersize=4, **looks[arm])
            axes.set_xlabel(f"learned at least: {_words(result, ACQUISITION)}")
            axes.set_ylabel(f"{plain(name)} kept: {_words(result, name)}")
            if table.empty:
                say(axes, "no seed has all arms yet")
        add_legend(figure, _handles(looks))
        write_caption(
            figure,
            [
                *_about(result),
                "At each level an arm's point, of all rates and steps, is chosen on one half of the items and read on "
                "the other; a line ends where a seed does not reach the level",
            ],
        )
    return figure


def draw_cost(result: "TrialResult") -> Figure:
    """What each arm has learned at most, over the operations that it has taken."""
    with style():
        figure = Figure(figsize=(8.4, 3.9), layout="constrained")
        axes = figure.subplots()
        looks = _looks(result)
        steps = np.arange(0, result.recipe.steps + 1, result.recipe.every)
        drawn = False
        for arm in result.recipe.arms:
            flops = result.flops(arm)
            if flops is None or not result.seeds:
                continue
            means = [
                np.mean([learned(result.arms(seed, int(step))[arm]) for seed in result.seeds])
                for step in steps.tolist()
            ]
            axes.plot(steps * flops / 1e9, means, markersize=4, **looks[arm])
            drawn = True
        if not drawn:
            say(axes, "operations could not be counted, or no seed has all arms yet")
        axes.set_xlabel("predicted work of training (GFLOP)")
        axes.set_ylabel(f"learned: {_words(result, ACQUISITION)}")
        add_legend(figure, _handles(looks))
        write_caption(
            figure,
            [
                *_about(result),
                f"A marker every {result.recipe.every} steps: the best of all rates up to there, chosen on one half of "
                "the items and read on the other",
            ],
        )
    return figure


def draw_differences(result: "TrialResult") -> Figure:
    """Every arm against the baseline: what it learned, and what it kept at the level that all arms reach."""
    measures, budgets = [ACQUISITION, *result.recipe.retention], result.recipe.budgets
    others = [arm for arm in result.recipe.arms if arm != result.recipe.baseline]
    with style():
        figure = Figure(figsize=(3.0 * len(measures) + 1.2, 1.9 + 0.32 * len(others)), layout="constrained")
        panels = figure.subplots(1, len(measures), squeeze=False, sharey=True)[0]
        for axes, name in zip(panels, measures, strict=True):
            for number, budget in enumerate(budgets):
                shift = (number - (len(budgets) - 1) / 2) * 0.32
                _draw_differences(
                    result, axes, name, budget, others, shift, COLOURS[1 + number % 6], MARKERS[number % 7]
                )
            axes.axvline(0, color=BLACK, linewidth=0.8)
            axes.grid(axis="x")
            axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
            axes.set_xlabel(f"{'learned' if name == ACQUISITION else f'{plain(name)} kept'}: {_words(result, name)}")
        panels[0].set_yticks(range(len(others)), others)
        panels[0].set_ylim(len(others) - 0.5, -0.5)
        add_legend(
            figure,
            [
                Line2D([], [], color=COLOURS[1 + i % 6], marker=MARKERS[i % 7], markersize=5, label=f"{budget} steps")
                for i, budget in enumerate(budgets)
            ]
            + [Line2D([], [], color=GREY, marker="|", linestyle="none", label="a seed")],
        )
        intervals = (
            "Lines: 95 % t intervals of the mean over seeds"
            if len(result.seeds) >= MIN_SEEDS
            else f"No intervals, which need {MIN_SEEDS} seeds"
        )
        write_caption(
            figure,
            [
                *_about(result),
                f"Difference to {result.recipe.baseline} with the same seed; what is kept is compared at the highest "
                "acquisition that all arms reach",
                intervals,
            ],
        )
    return figure


def _draw_differences(
    result: "TrialResult",
    axes: Axes,
    measure: str,
    budget: int,
    others: list[str],
    shift: float,
    colour: str,
    marker: str,
) -> None:
    """The differences of all arms in one measure within one budget, each seed and the mean."""
    values = result.values[(result.values["budget"] == budget) & (result.values["measure"] == measure)]
    if values.empty:
        say(axes, "no seed has all arms yet")
        return
    by_arm = values.pivot(index="seed", columns="arm", values="value")
    table = result.differences
    table = table[(table["budget"] == budget) & (table["measure"] == measure)].set_index("better").loc[others]
    at = np.arange(len(others)) + shift
    for row, arm in zip(at, others, strict=True):
        own = by_arm[arm] - by_arm[result.recipe.baseline]
        axes.plot(own, np.full(len(own), row), "|", color=GREY, markersize=5)
    axes.hlines(at, table["low"], table["high"], color=colour)
    axes.plot(table["difference"], at, marker, color=colour, markersize=5)


def _looks(result: "TrialResult") -> dict[str, dict[str, Any]]:
    """Colour and marker by the blocks that an arm trains, line by what happens to the parts around them."""
    looks: dict[str, dict[str, Any]] = {}
    kinds: list[Any] = []
    outers: list[Any] = []
    for arm, about in result.about["arms"].items():
        drawn = str(about["rule"]).startswith("random:")
        kind, outer = (about["rule"] if drawn else about["train"]), [about[p] for p in ("embeddings", "norm", "head")]
        if kind not in kinds:
            kinds.append(kind)
        if outer not in outers:
            outers.append(outer)
        number, line = kinds.index(kind) % len(COLOURS), outers.index(outer)
        looks[arm] = {
            "color": COLOURS[number],
            "marker": MARKERS[number],
            "linestyle": LINES[line % len(LINES)],
            "markerfacecolor": COLOURS[number] if line == 0 else "white",
            "label": arm,
        }
    return looks


def _handles(looks: Mapping[str, Mapping[str, Any]]) -> list[Line2D]:
    return [Line2D([], [], markersize=4, **look) for look in looks.values()]


def _words(result: "TrialResult", measure: str) -> str:
    return SCORE_WORDS[result.about["measures"][measure]["score"]]


def _about(result: "TrialResult") -> list[str]:
    recipe = result.recipe
    rates = ", ".join(f"{rate:g}" for rate in recipe.rates)
    number = len(result.seeds)
    return [
        f"Trial on {plain(result.about['model']['name'])}, rates {rates}, {recipe.steps} steps, mean over {number} "
        f"{'seed' if number == 1 else 'seeds'} of the data's order; one base checkpoint"
    ]


FIGURES: Mapping[str, Callable[["TrialResult"], Figure]] = {
    "frontier": draw_frontier,
    "cost": draw_cost,
    "differences": draw_differences,
}
"""The figures of a trial, by name."""
