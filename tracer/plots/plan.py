"""Figure of a freeze plan: which blocks are trained, over the numbers that the choice rests on."""

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from tracer.plots.style import BLACK, ORANGE, SKY, add_legend, model_name, plain, set_block_axis, style, write_caption

if TYPE_CHECKING:  # a plan draws itself through this module
    from tracer.freezing.plan import FreezePlan

TRAINED: dict[str, Any] = {"facecolor": ORANGE, "hatch": "////", "edgecolor": BLACK, "linewidth": 0.5}
FROZEN: dict[str, Any] = {"facecolor": SKY, "edgecolor": BLACK, "linewidth": 0.5}


def draw_plan(plan: "FreezePlan") -> Figure:
    """Share of particles above and fragility below, a bar a block; trained blocks are hatched."""
    table = plan.to_frame()
    looks = [TRAINED if decision == "train" else FROZEN for decision in table["decision"]]
    with style():
        figure = Figure(figsize=(7.2, 4.4), layout="constrained")
        particles, fragility = figure.subplots(2, 1, sharex=True)
        for axes, column, label in (
            (particles, "particles", "share of particles"),
            (fragility, "jsd", "JSD (nats)"),
        ):
            heights = table[column].astype(float).fillna(0.0).to_numpy()
            for block, look in enumerate(looks):
                axes.bar(block, heights[block], width=0.86, **look)
                # Also a block without a particle shows what becomes of it.
                axes.hlines(0, block - 0.43, block + 0.43, color=look["facecolor"], linewidth=3, clip_on=False)
            axes.set_ylim(0, max(1e-3, 1.1 * float(np.max(heights))))
            axes.set_ylabel(label)
        set_block_axis(particles, len(table))
        fragility.set_xlabel("block")
        add_legend(figure, [Patch(**TRAINED, label="trained"), Patch(**FROZEN, label="frozen")])
        counts = plan.parameters
        name = model_name({"model": {"name": plan.model["name"], "kind": plan.model["kind"]}})
        write_caption(
            figure,
            [
                f"Freeze plan {plain(plan.rule)} for {name}: {'; '.join(plan.evidence['why'])}",
                f"{counts['trained'] / counts['total']:.1%} of {counts['total']:,} parameters are trained; embeddings "
                f"{plan.embeddings}, norm {plan.norm}, head {plan.head}",
                "No trace was asked"
                if plan.evidence["probes"] is None
                else f"Particles of the answered probes ({plain(plan.evidence['probes'])}, {plan.evidence['readout']} "
                "lens) and mean divergence under the ablation",
            ],
        )
    return figure
