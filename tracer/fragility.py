"""Fragility of a block: how far its ablation moves the model's output.

The Jensen-Shannon divergence of the next-token distributions with and without the ablation, in nats. After
LayerTracer (arXiv 2604.20556), with intervals, the ceiling and the set of blocks that cannot be told from the largest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float

from tracer.divergence import MAX_JSD
from tracer.statistics import bootstrap_profile, largest_set

FLAT_RANGE = 1e-6
"""A profile whose largest and smallest block differ by less (nats) says nothing about blocks."""

CEILING_SHARE = 0.95
"""A block is at the ceiling when its ablation reaches this share of JSD(clean output, uniform)."""


@dataclass(frozen=True)
class Fragility:
    """Fragility of every block under one ablation.

    Attributes:
        kind: the ablation.
        table: one row per block: `jsd`, `jsd_low`, `jsd_high` (nats, 95 %), `jsd_share` (of ln 2); `jsd_answered`,
            the same on answered probes; `log_p_change` (nats, of the target); `kept` (share of answered probes still
            answered); the last three also with `_low` and `_high`; `at_ceiling`, `fragile`, `fragile_without_first`.
            Missing where nothing was measured.
        n: probes.
        n_answered: answered probes.
        ceiling: mean JSD(clean output, uniform distribution), nats.
        fragile: blocks whose paired difference to the largest includes 0.
        fragile_without_first: the same without block 0, whose value can be an artefact of a small embedding scale.
        flat: whether the profile is flat, so that its largest block is meaningless.
        method: how the intervals were made.
        by_mixer: one row per kind of mixer: `mixer`, `blocks` (how many), and the mean JSD over them with its interval
            over probes (`jsd`, `jsd_low`, `jsd_high`). The blocks lie at different depths, which may matter as much.
    """

    kind: str
    table: pd.DataFrame
    n: int
    n_answered: int
    ceiling: float
    fragile: tuple[int, ...]
    fragile_without_first: tuple[int, ...]
    flat: bool
    method: str
    by_mixer: pd.DataFrame


def fragility(
    kind: str,
    jsd: Float[np.ndarray, "blocks probes"],
    log_p_change: Float[np.ndarray, "blocks probes"],
    still_answered: Float[np.ndarray, "blocks probes"],
    answered: Bool[np.ndarray, "probes"],
    ceiling: Float[np.ndarray, "probes"],
    groups: Sequence[str],
    mixers: Sequence[str],
    *,
    seed: int,
) -> Fragility:
    """Summarise the ablations of every block.

    Args:
        kind: name of the ablation, for labels and seeds.
        jsd: nats, averaged over noise draws where there are several; missing in a block that lacks the ablated part.
        log_p_change: log p(target) under the ablation minus without, nats.
        still_answered: share of draws in which the target is top-1 under the ablation.
        answered: whether it is without.
        ceiling: JSD(clean output, uniform) of each probe.
        groups: group of each probe; with several, intervals resample groups, then probes.
        mixers: kind of the mixer of each block.
        seed: of the bootstrap.
    """
    n_blocks = len(jsd)
    present = np.flatnonzero(~np.isnan(jsd).all(axis=1))
    values = np.ascontiguousarray(jsd[present].T)
    profile = bootstrap_profile(values, groups, seed=seed, label=("jsd", kind))
    assert profile.mean is not None
    fragile = present[list(largest_set(values, groups, seed=seed, label=("fragile", kind)))]
    without = fragile
    if len(present) > 1 and present[0] == 0:
        without = present[
            list(largest_set(values, groups, exclude=(0,), seed=seed, label=("fragile", kind, "without first")))
        ]

    def columns(name: str, values: np.ndarray, chosen: np.ndarray) -> dict[str, np.ndarray]:
        of = [group for group, is_chosen in zip(groups, chosen, strict=True) if is_chosen]
        found = bootstrap_profile(np.ascontiguousarray(values[present][:, chosen].T), of, seed=seed, label=(name, kind))
        ends = {name: found.mean, f"{name}_low": found.low, f"{name}_high": found.high}
        return {key: _placed(end, present, n_blocks) for key, end in ends.items()}

    everyone = np.ones(len(values), dtype=bool)
    jsd_columns = columns("jsd", jsd, everyone)
    table = pd.DataFrame(
        {
            **jsd_columns,
            "jsd_share": jsd_columns["jsd"] / MAX_JSD,
            **columns("jsd_answered", jsd, answered),
            **columns("log_p_change", log_p_change, everyone),
            **columns("kept", still_answered, answered),
            "at_ceiling": jsd_columns["jsd"] >= CEILING_SHARE * ceiling.mean(),
            "fragile": np.isin(np.arange(n_blocks), fragile),
            "fragile_without_first": np.isin(np.arange(n_blocks), without),
        }
    )
    return Fragility(
        kind=kind,
        table=table,
        n=len(values),
        n_answered=int(answered.sum()),
        ceiling=float(ceiling.mean()),
        fragile=tuple(fragile.tolist()),
        fragile_without_first=tuple(without.tolist()),
        flat=len(present) > 1 and bool(np.ptp(profile.mean) < FLAT_RANGE),
        method=profile.method,
        by_mixer=_by_mixer(values, np.array(mixers)[present], groups, seed=seed, label=kind),
    )


def _placed(values: np.ndarray | None, present: np.ndarray, n_blocks: int) -> np.ndarray:
    """`[blocks]` with the values of the present blocks in their places."""
    placed = np.full(n_blocks, np.nan)
    if values is not None:
        placed[present] = values
    return placed


def _by_mixer(values: np.ndarray, mixers: np.ndarray, groups: Sequence[str], *, seed: int, label: str) -> pd.DataFrame:
    kinds = list(dict.fromkeys(mixers.tolist()))
    means = np.stack([values[:, mixers == kind].mean(axis=1) for kind in kinds], axis=1)
    found = bootstrap_profile(means, groups, seed=seed, label=("by mixer", label))
    nothing = np.full(len(kinds), np.nan)
    return pd.DataFrame(
        {
            "mixer": kinds,
            "blocks": [int((mixers == kind).sum()) for kind in kinds],
            "jsd": nothing if found.mean is None else found.mean,
            "jsd_low": nothing if found.low is None else found.low,
            "jsd_high": nothing if found.high is None else found.high,
        }
    )
