"""Figure `joint`: where tasks are executed and where the model is fragile, on one axis of blocks."""

from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from tracer.plots.fragility import (
    LOOKS,
    NONE_RUN,
    draw_profile,
    interval_notes,
    limit_handles,
    mark_limits,
    marker_handles,
    needs_log,
    set_jsd_axis,
)
from tracer.plots.lens import BARS, MEDIAN, marker_size, particle_shares, plain_lens_handles
from tracer.plots.style import (
    BLACK,
    BLOCK_LABEL,
    GREEN,
    GREY,
    ORANGE,
    PLAIN_CURVE,
    PLAIN_LENS,
    PURPLE,
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
)
from tracer.results import TraceResult

MIXER_LOOKS = (("#DDDDDD", ""), (ORANGE, "////"), (GREEN, "...."), (PURPLE, "xxxx"), ("white", "||||"), (SKY, "----"))

MOST_ABLATIONS = 3
"""More profiles than these cannot be told apart in one panel; the figure `fragility` has them all."""


def draw_joint(result: TraceResult) -> Figure:
    """Lens curves and particles above, fragility below, and the kinds of mixers where there are several."""
    mixers = list(dict.fromkeys(result.blocks["mixer"].fillna("unknown")))
    hybrid, patched = len(mixers) > 1, result.run["recovery"] is not None
    ratios = [3.0, 1.1, 3.4] + [1.8] * patched + [0.35] * hybrid
    figure = Figure(figsize=(8.0, 7.2 + 1.6 * patched + 0.4 * hybrid), layout="constrained")
    panels = figure.subplots(len(ratios), 1, sharex=True, height_ratios=ratios)
    lens, particles, fragility = panels[:3]
    set_block_axis(lens, len(result.blocks))
    _draw_lens(result, lens)
    _draw_particles(result, particles)
    _draw_fragility(result, fragility)
    handles = _handles(result)
    if patched:
        handles += _draw_recovery(result, panels[3])
    if hybrid:
        handles += _draw_mixers(result, panels[-1], mixers)
    panels[-1].set_xlabel(BLOCK_LABEL)
    add_legend(figure, handles)
    omitted = result.ablations[MOST_ABLATIONS:]
    add_caption(
        figure,
        result,
        "Probability of the target under the lens, task particles, and Jensen-Shannon divergence of the output when "
        "a block is ablated",
        READING,
        *_about_recovery(result),
        *interval_notes(result),
        *([f"Not drawn here: {', '.join(omitted)}"] if omitted else []),
    )
    return figure


def _draw_lens(result: TraceResult, axes: Axes) -> None:
    axes.set_ylabel("p(target)")
    x = depth_positions(len(result.arrays["log_p"]))
    curves, plain_curves = [], []
    for group in result.run["groups"]:
        counted = in_group(result, group["group"]) & answered(result)
        if counted.any():
            curves.append(mean_probability(result, counted))
            if result.run["plain"]:
                plain_curves.append(mean_probability(result, counted, PLAIN_LENS))
            axes.plot(x, curves[-1], color="#A0A0A0", linewidth=0.8)
    if curves:
        size = marker_size(len(x))
        axes.plot(x, np.mean(curves, axis=0), color=BLACK, linewidth=1.8, marker=".", markersize=size, clip_on=False)
        if result.run["plain"]:
            axes.plot(x, np.mean(plain_curves, axis=0), **PLAIN_CURVE)
        probability_axis(axes)
    else:
        say(axes, "no probe is answered")
    _mark_overall(result, axes)


def _draw_particles(result: TraceResult, axes: Axes) -> None:
    axes.set_ylabel("share of\nparticles")
    with_particle = {group["group"] for group in result.run["groups"] if group["why_not"] is None}
    counted = answered(result) & result.probes["group"].isin(with_particle).to_numpy(dtype=bool)
    if with_particle:
        shares = particle_shares(result, counted)
        axes.bar(np.arange(len(result.blocks)), shares, width=0.8, **BARS)
        share_axis(axes, shares.max())
        _mark_overall(result, axes)
    else:
        say(axes, "no group has a particle")


def _mark_overall(result: TraceResult, axes: Axes) -> None:
    if result.run["particle_block"]["estimate"] is not None:
        axes.axvline(result.run["particle_block"]["estimate"], **MEDIAN)


def _draw_fragility(result: TraceResult, axes: Axes) -> None:
    set_jsd_axis(axes, needs_log(result))
    kinds = result.ablations[:MOST_ABLATIONS]
    if not kinds:
        say(axes, NONE_RUN)
        return
    mark_limits(result, axes)
    for i, kind in enumerate(kinds):
        shift = 0.0 if len(kinds) == 1 else 0.5 * (i / (len(kinds) - 1) - 0.5)
        draw_profile(result, kind, axes, LOOKS[i % len(LOOKS)], shift)


def _draw_recovery(result: TraceResult, axes: Axes) -> list[Artist]:
    """Mean recovery of every block, with the values of an idle block (0) and of a sufficient one (1) marked."""
    table = result.blocks
    axes.set_ylabel("recovery")
    for value in (0.0, 1.0):
        axes.axhline(value, color=GREY, linewidth=0.8, zorder=0)
    look: dict[str, Any] = {"color": PURPLE, "marker": "D", "markersize": 3.5, "linewidth": 1.0}
    if table["recovery"].isna().all():
        say(axes, "recovery is undefined for every probe")
        return []
    axes.plot(table["block"], table["recovery"], **look)
    known = table[table["recovery_low"].notna()]
    axes.vlines(known["block"], known["recovery_low"], known["recovery_high"], color=PURPLE, linewidth=1.2)
    return [Line2D([], [], **look, label="recovery, contribution patched in")]


def _about_recovery(result: TraceResult) -> list[str]:
    recovery = result.run["recovery"]
    if recovery is None:
        return []
    return [
        "Recovery: share of the difference in log-odds of the two answers that comes back when a block's contribution "
        f"in the clean run is put into the run on the corrupt prompt (n = {recovery['n']}, undefined for "
        f"{sum(recovery['undefined'].values())})"
    ]


def _draw_mixers(result: TraceResult, axes: Axes, mixers: list[str]) -> list[Artist]:
    looks = {mixer: _mixer_look(i) for i, mixer in enumerate(mixers)}
    for block, mixer in enumerate(result.blocks["mixer"].fillna("unknown")):
        axes.bar(block, 1, width=1, **looks[mixer])
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.set_ylabel("mixer", rotation=0, ha="right", va="center")
    return [Patch(**looks[mixer], label=plain(mixer, 28)) for mixer in mixers]


def _mixer_look(i: int) -> dict[str, Any]:
    colour, hatch = MIXER_LOOKS[i % len(MIXER_LOOKS)]
    return {"facecolor": colour, "hatch": hatch, "edgecolor": BLACK, "linewidth": 0.4}


def _handles(result: TraceResult) -> list[Artist]:
    handles: list[Artist] = [
        Line2D([], [], color=BLACK, linewidth=1.8, marker=".", label=f"{result.run['readout']} lens, mean over groups"),
        Line2D([], [], color="#A0A0A0", linewidth=0.8, label=f"{result.run['readout']} lens, each group"),
        *plain_lens_handles(result),
        Patch(**BARS, label="particles, share of answered"),
    ]
    block = result.run["particle_block"]["estimate"]
    if block is not None:
        handles.append(Line2D([], [], **MEDIAN, label=f"median particle block: {block:.3g}"))
    if not result.ablations:
        return handles
    for kind, look in zip(result.ablations[:MOST_ABLATIONS], LOOKS, strict=False):
        handles.append(Line2D([], [], **look, markersize=4, label=kind))
    return handles + marker_handles(GREY) + limit_handles(result)
