"""Figure of a tuned lens: how far the lens is from the output at every depth, before and after."""

from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, StrMethodFormatter

from tracer.plots.style import BLUE, VERMILLION, model_name, plain, style, write_caption

if TYPE_CHECKING:  # a lens draws itself through this module
    from tracer.tuned_lens import TunedLens


def draw_tuned_lens(lens: "TunedLens") -> Figure:
    """Mean KL(output || lens) on held-out text, plain and tuned, with 95 % intervals."""
    table, record = lens.to_frame(), lens.record
    with style():
        figure = Figure(figsize=(7.2, 4.2), layout="constrained")
        axes = figure.subplots()
        lines = (("kl_plain", "plain logit lens", VERMILLION, "s", "--"), ("kl_tuned", "tuned lens", BLUE, "o", "-"))
        for name, label, colour, marker, dashes in lines:
            axes.fill_between(
                table["depth"],
                table[f"{name}_low"].astype(float),
                table[f"{name}_high"].astype(float),
                facecolor=colour,
                alpha=0.25,
                linewidth=0,
            )
            axes.plot(
                table["depth"], table[name], color=colour, marker=marker, linestyle=dashes, markersize=4, label=label
            )
        axes.set_yscale("log")
        numbers = StrMethodFormatter("{x:g}")  # raised exponents would be smaller than the rest of the text
        axes.yaxis.set_major_formatter(numbers)
        low, high = axes.get_ylim()
        axes.yaxis.set_minor_formatter(numbers if high < 20 * low else NullFormatter())
        axes.set_xlabel("depth d")
        axes.set_ylabel("mean KL(output ‖ lens) (nats)")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, min_n_ticks=1))
        figure.legend(loc="outside upper left", ncols=2)
        write_caption(
            figure,
            [
                "How far the lens is from the output on held-out text; at 0 it would be the output. Depth 0 is the "
                "input of block 0, depth d the output of block d − 1",
                f"Bands: 95 % intervals; n = {table['n'].iloc[0]} positions from {table['n_units'].iloc[0]} "
                f"{record['unit']}s",
                f"{model_name({'model': {'name': lens.model, 'kind': record['kind']}})}, {record['dtype']}, trained on "
                f"{record['positions']} positions of {plain(record['text'])}",
            ],
        )
    return figure
