"""A trace as text for a terminal."""

import textwrap
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd

from tracer.results import TraceResult

WIDTH = 100
MOST_FRAGILE = 5
MOST_REASONS = 3

LARGE_GROWTH = 5
"""By how much block 0 must enlarge the stream for the summary to say that its fragility may be one of scale."""


def summary_of(result: TraceResult) -> str:
    """What was measured, where the groups are executed, which blocks are fragile, and what to beware of."""
    parts = [_head(result), _groups(result)]
    if result.run["plain"] is not None:
        parts.append(_plain_lens(result))
    if result.run["recovery"] is not None:
        parts.append(_recovered(result))
    parts += [_fragile(result, kind) for kind in result.ablations]
    parts += _norms(result)
    notes = [*result.run["warnings"], *_about_probes(result)]
    if notes:
        wrapped = (textwrap.fill(note, WIDTH, initial_indent="  ! ", subsequent_indent="    ") for note in notes)
        parts.append("Beware\n" + "\n".join(wrapped))
    return "\n\n".join(parts)


def side_by_side(results: Sequence[TraceResult]) -> str:
    """One line a model: answers, median particle, and the fragile blocks under the first ablation."""
    rows = []
    for result in results:
        found, n = result.run["particle_block"], len(result.blocks)
        entry = next(iter(result.run["fragility"]), None)
        rows.append(
            (
                result.run["model"]["name"],
                str(n),
                str(result.run["arguments"]["probes"]),
                f"{int(result.probes['answered'].sum())}/{len(result.probes)}",
                "none"
                if found["estimate"] is None
                else f"{found['estimate']:.3g}  {bounds(found['low'], found['high'])}",
                "" if found["estimate"] is None else f"{found['estimate'] / max(1, n - 1):.2f}",
                "" if entry is None else spans(entry["fragile"]),
                "" if entry is None else spans(entry["fragile_without_first"]),
            )
        )
    header = ("model", "blocks", "probes", "answered", "particle block", "depth", "fragile", "without block 0")
    title = "Side by side: median particle block over groups with 95 % interval; depth 0 is block 0, 1 the last block"
    return title + "\n" + _table(header, rows, left=(0, 2, 4, 6, 7))


def _head(result: TraceResult) -> str:
    model, arguments, work = (result.run[key] for key in ("model", "arguments", "work"))
    answered = int(result.probes["answered"].sum())
    kinds = ", ".join(result.ablations) or "none"
    return "\n".join(
        [
            f"{model['name']}  ({model['anatomy']['model_class']}, {len(result.blocks)} blocks, "
            f"{model['dtype']}, {model['device']})",
            f"{len(result.probes)} probes in {len(arguments['groups'])} groups ({arguments['probes']}), "
            f"{answered} answered; ablations {kinds} at {arguments['positions']} positions",
            f"engine {result.run['engine']} on {model['backend']}, {work['seconds']:.0f} s; "
            f"{result.run['readout']} lens, particle rule {arguments['rule']}, seed {arguments['seed']}; "
            "95 % intervals",
        ]
    )


def _groups(result: TraceResult) -> str:
    last = len(result.blocks) - 1
    rows = []
    for row in result.groups.to_dict("records"):
        measured = pd.isna(row["why_not"])
        rows.append(
            (
                row["group"],
                str(row["n"]),
                f"{row['answered']} ({row['answered'] / row['n']:.0%})" if row["n"] else "0",
                "" if pd.isna(row["p_value"]) else f"{row['p_value']:.4f}",
                f"{row['block']:.3g}  {bounds(row['block_low'], row['block_high'])}" if measured else "none",
                f"{row['depth']:.2f}" if measured else textwrap.shorten(row["why_not"], 52, placeholder=" ..."),
            )
        )
    block = result.run["particle_block"]["estimate"]
    title = f"Task particles: median block of 0..{last} over answered probes that have one"
    if block is not None:
        overall = result.run["particle_block"]
        title += f"; over groups {block:.3g} {bounds(overall['low'], overall['high'])}"
    return title + "\n" + _table(("group", "probes", "answered", "p", "block", "depth"), rows, left=(0, 4, 5))


def _plain_lens(result: TraceResult) -> str:
    """What the plain lens would have said."""
    plain = result.run["plain"]
    rows = []
    for tuned, group in zip(result.run["groups"], plain["groups"], strict=True):
        blocks = ("none" if g["why_not"] else f"{g['block']['estimate']:.3g}" for g in (tuned, group))
        rows.append((tuned["group"], *blocks))
    overall = [result.run["particle_block"]["estimate"], plain["particle_block"]["estimate"]]
    rows.append(("over groups", *("none" if block is None else f"{block:.3g}" for block in overall)))
    return "Both lenses: median particle block\n" + _table(("group", "tuned lens", "plain lens"), rows, left=(0,))


def _recovered(result: TraceResult) -> str:
    """The blocks whose contribution brings most of the answer back."""
    about = result.run["recovery"]
    title = (
        f"Recovery: share of the answer that a block's contribution brings back into the run on the corrupt prompt, "
        f"n = {about['n']}{_undefined(about['undefined'])}"
    )
    title = textwrap.fill(title, WIDTH, subsequent_indent="  ")
    if not about["n"]:
        return title
    blocks = result.blocks.sort_values("recovery", ascending=False).head(MOST_FRAGILE)
    rows = [
        (
            str(row["block"]),
            row["mixer"],
            f"{row['recovery']:.2f}  {bounds(row['recovery_low'], row['recovery_high'], '.2f')}",
        )
        for row in blocks.to_dict("records")
    ]
    return f"{title}\n" + _table(("block", "mixer", "recovery"), rows, left=(1, 2))


def _undefined(counts: Mapping[str, int]) -> str:
    """The most frequent reasons for which probes have no recovery, and how many have another."""
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    parts = [f"; {count} undefined: {reason}" for reason, count in ordered[:MOST_REASONS]]
    rest = sum(count for _, count in ordered[MOST_REASONS:])
    return "".join([*parts, f"; {rest} undefined for other reasons" if rest else ""])


def _fragile(result: TraceResult, kind: str) -> str:
    entry = next(e for e in result.run["fragility"] if e["ablation"] == kind)
    present = result.blocks.dropna(subset=[f"jsd_{kind}"])
    blocks = present.sort_values(f"jsd_{kind}", ascending=False).head(MOST_FRAGILE)
    rows = [
        (
            str(row["block"]),
            row["mixer"],
            f"{row[f'jsd_{kind}']:.3f}  {bounds(row[f'jsd_low_{kind}'], row[f'jsd_high_{kind}'], '.3f')}",
            f"{row[f'jsd_share_{kind}']:.2f}",
            "" if np.isnan(row[f"jsd_answered_{kind}"]) else f"{row[f'jsd_answered_{kind}']:.3f}",
            f"{row[f'log_p_change_{kind}']:+.2f}",
            "" if np.isnan(row[f"kept_{kind}"]) else f"{row[f'kept_{kind}']:.0%}",
        )
        for row in blocks.to_dict("records")
    ]
    title = (
        f"Fragility under {kind}: the {len(rows)} largest of {len(present)} blocks, JSD in nats, "
        f"n = {entry['n']} (ceiling {entry['ceiling']:.3f})"
    )
    sets = f"Not told apart from the largest: {spans(entry['fragile'])}"
    sets += f"; without block 0: {spans(entry['fragile_without_first'])}"
    header = ("block", "mixer", "JSD", "/ ln 2", "answered", "log p", "kept")
    lines = [title, _table(header, rows, left=(1, 2)), textwrap.fill(sets, WIDTH, subsequent_indent="  ")]
    if len(entry["by_mixer"]) > 1:
        lines.append(textwrap.fill(f"Mean by mixer: {_by_mixer(entry['by_mixer'])}", WIDTH, subsequent_indent="  "))
    return "\n".join(lines)


def _norms(result: TraceResult) -> list[str]:
    """How the scale of the stream changes, which tells what skipping the first block does to the others."""
    if "norm" not in result.arrays:
        return []
    norms = result.arrays["norm"].mean(axis=1)
    text = f"Norm of the stream: {norms[0]:.3g} before block 0, {norms[1]:.3g} after it, {norms[-1]:.3g} at the end."
    if norms[1] >= LARGE_GROWTH * norms[0]:
        text += (
            f" Skipping block 0 hands the others a stream {norms[1] / norms[0]:.0f} times smaller, so that its "
            "fragility may be one of scale."
        )
    return [textwrap.fill(text, WIDTH, subsequent_indent="  ")]


def _by_mixer(rows: Sequence[dict[str, Any]]) -> str:
    return "; ".join(
        f"{row['mixer']} ({row['blocks']} block{'s' if row['blocks'] > 1 else ''}) {row['jsd']:.3f} "
        f"{bounds(row['jsd_low'], row['jsd_high'], '.3f')}".rstrip()
        for row in rows
    )


def _about_probes(result: TraceResult) -> list[str]:
    """Probes that were left out, and kept ones about which something is suspect."""
    said = {"skipped": "are not usable with this tokenizer and were left out", "probe_warnings": "are kept but suspect"}
    notes = []
    for key, what in said.items():
        found = result.run[key]
        if found:
            first = textwrap.shorten(f"{found[0]['where']}: {found[0]['reason']}", 90, placeholder=" ...")
            notes.append(f"{len(found)} probe{'s' if len(found) > 1 else ''} {what}, e.g. {first}")
    return notes


def spans(blocks: Sequence[int]) -> str:
    """Blocks or depths in ascending order as text: `0, 3-5, 9`."""
    runs = [[block for _, block in run] for _, run in groupby(enumerate(blocks), lambda item: item[1] - item[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs) or "none"


def bounds(low: float | None, high: float | None, style: str = ".3g") -> str:
    """An interval as text, `[low, high]`; empty where there is none."""
    return "" if low is None or high is None or np.isnan(low) else f"[{low:{style}}, {high:{style}}]"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int]) -> str:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = (
        "  "
        + "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in (header, *rows)
    )
    return "\n".join(line.rstrip() for line in lines)
