"""Figure of a comparison of two checkpoints: streams by depth, weights and their effect by block."""

from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from tracer.plots.style import (
    BLACK,
    BLUE,
    ORANGE,
    SKY,
    depth_positions,
    model_name,
    plain,
    set_block_axis,
    style,
    write_caption,
)

if TYPE_CHECKING:  # a result draws itself through this module
    from tracer.drifting.results import DriftResult


def draw_drift(result: "DriftResult") -> Figure:
    """Cosine of the two streams above; below how far the weights moved, and what each block's new weights do alone."""
    table = result.depths
    blocks = table.dropna(subset=["block"])
    x = blocks["block"].to_numpy(dtype=float)
    with style():
        figure = Figure(figsize=(7.2, 5.6), layout="constrained")
        streams, weights, outputs = figure.subplots(3, 1, sharex=True)
        at = depth_positions(len(table))
        streams.fill_between(at, table["cosine_low"], table["cosine_high"], color=SKY, alpha=0.5, linewidth=0)
        streams.plot(at, table["cosine"], color=BLUE, marker=".")
        streams.set_ylabel("cosine of\nthe streams")
        weights.bar(x, blocks["weights"], width=0.86, facecolor=ORANGE, edgecolor=BLACK, linewidth=0.5)
        weights.set_ylabel("change of weights\n(of their norm)")
        outputs.bar(x, blocks["jsd"], width=0.86, facecolor=SKY, edgecolor=BLACK, linewidth=0.5)
        low, high = blocks["jsd"] - blocks["jsd_low"], blocks["jsd_high"] - blocks["jsd"]
        if not low.isna().all():
            outputs.errorbar(x, blocks["jsd"], yerr=[low, high], fmt="none", ecolor=BLACK, elinewidth=0.8)
        outputs.set_ylabel("JSD (nats) with\nthis block's weights")
        for axes in (weights, outputs):
            axes.set_ylim(bottom=0)
        set_block_axis(streams, len(blocks))
        outputs.set_xlabel("block b (depth d of the stream stands at d − 1/2)")
        names = [
            model_name({"model": {"name": result.run[key]["name"], "kind": result.run[key]["kind"]}})
            for key in ("continued", "base")
        ]
        output = result.run["output"]
        write_caption(
            figure,
            [
                f"{names[0]} against {names[1]} on {len(result.probes)} probes "
                f"({plain(result.run['arguments']['probes'])}): mean divergence of the outputs "
                f"{output['estimate']:.4f} nats",
                "Below: the earlier model with the later weights of one block; bands and bars are 95 % intervals",
            ],
        )
    return figure
