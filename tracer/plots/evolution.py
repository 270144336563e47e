"""Figure `evolution`: how the residual stream changes over depth."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogFormatter, MaxNLocator

from tracer.divergence import MIN_CKA_ROWS
from tracer.evolution import evolution_table
from tracer.plots.lens import marker_size
from tracer.plots.style import BLUE, SKY, add_caption, add_legend, say
from tracer.results import TraceResult

PANELS = {
    "norm": "norm of the stream",
    "angle": "angular distance to depth d − 1 (units of π)",
    "kl_to_final": "KL(lens ‖ output) (nats)",
    "rank": "rank of the target (1 = top)",
    "entropy": "entropy of the lens (nats)",
}
LOGARITHMIC = ("norm", "rank")


def draw_evolution(result: TraceResult) -> Figure:
    """Median and quartiles over all probes of every measure of the stream, and CKA between depths."""
    table = evolution_table(result.arrays)
    figure = Figure(figsize=(9.0, 6.2), layout="constrained")
    panels = figure.subplots(2, 3)
    x = table["depth"].to_numpy()
    for axes, (name, label) in zip(panels.flat, PANELS.items(), strict=False):
        axes.set_title(label, loc="left", fontsize=8)
        if table[name].isna().all():
            _say_empty(axes, NO_TOKENS)
            continue
        # The distance to the depth before does not exist at depth 0, where the table holds 0.
        rows = slice(1, None) if name == "angle" else slice(None)
        axes.fill_between(
            x[rows], table[f"{name}_q1"][rows], table[f"{name}_q3"][rows], facecolor=SKY, alpha=0.5, linewidth=0
        )
        axes.plot(x[rows], table[name][rows], color=BLUE, marker=".", markersize=marker_size(len(x)))
        axes.set_xlabel("depth d")
        axes.set_xlim(-0.5, len(x) - 0.5)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
        if name in LOGARITHMIC:
            axes.set_yscale("log")
            # Plain numbers: raised exponents would be smaller than the rest of the text.
            axes.yaxis.set_major_formatter(LogFormatter())
            axes.yaxis.set_minor_formatter(LogFormatter())
        else:
            axes.set_ylim(bottom=0)
    _draw_cka(result, figure, panels.flat[-1])
    add_legend(
        figure,
        [
            Line2D([], [], color=BLUE, marker=".", label="median over probes"),
            Patch(facecolor=SKY, alpha=0.5, label="quartiles"),
        ],
    )
    add_caption(
        figure,
        result,
        "The residual stream at the position that predicts the target, all probes. Depth 0 is the input of block 0, "
        "depth d the output of block d − 1",
    )
    return figure


NO_TOKENS = "the positions of the stream are not tokens"


def _say_empty(axes: Axes, why: str) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    say(axes, why, 30)


def _draw_cka(result: TraceResult, figure: Figure, axes: Axes) -> None:
    axes.set_title("debiased linear CKA between depths", loc="left", fontsize=8)
    axes.grid(False)
    if "cka" not in result.arrays:
        enough = len(result.probes) >= MIN_CKA_ROWS
        why = NO_TOKENS if enough else f"it needs {MIN_CKA_ROWS} probes, this trace has {len(result.probes)}"
        _say_empty(axes, f"no CKA: {why}")
        return
    cka = result.arrays["cka"]
    below = "min" if np.nanmin(cka) < 0 else "neither"
    image = axes.imshow(cka, origin="lower", cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
    figure.colorbar(image, ax=axes, extend=below, shrink=0.8, ticks=[0, 0.5, 1])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    axes.set_xlabel("depth d")
    axes.set_ylabel("depth d")
