import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.image
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from tracer.errors import InputError
from tracer.plots import FIGURES, draw, save_figures
from tracer.results import TraceResult

MISSING = {"estimate": None, "low": None, "high": None}


def made(
    n_blocks: int = 4,
    groups: dict[str, tuple[int, int]] | None = None,
    kinds: tuple[str, ...] = ("zero", "mean"),
    *,
    name: str = "org/tiny-model",
    mixers: tuple[str, ...] = ("attention",),
    cka: bool = True,
    intervals: bool = True,
    size: float = 0.3,
    seed: int = 0,
) -> TraceResult:
    """A result by hand; `groups` maps a name to (probes, answered), `size` is the divergence of block 1."""
    rng = np.random.default_rng(seed)
    groups = {"capitals": (12, 9), "antonyms": (10, 3), "plurals": (8, 0)} if groups is None else groups
    names = [group for group, (n, _) in groups.items() for _ in range(n)]
    answered = np.array([i < a for n, a in groups.values() for i in range(n)], dtype=bool)
    n, depths = len(names), n_blocks + 1

    particles = rng.integers(n_blocks // 2, n_blocks, n)
    level = np.where(answered, rng.uniform(0.4, 0.9, n), rng.uniform(0, 0.1, n))
    steps = 1 / (1 + np.exp(-4 * (np.arange(depths)[:, None] - particles - 0.5)))
    arrays: dict[str, np.ndarray] = {"log_p": np.log(1e-6 + level * steps)}
    arrays["norm"] = np.exp(np.linspace(1, 5, depths)[:, None] + rng.normal(0, 0.1, (depths, n)))
    arrays["angle"] = rng.uniform(0, 0.3, (depths, n))
    arrays["entropy"] = rng.uniform(0, 5, (depths, n))
    arrays["kl_to_final"] = np.linspace(12, 0, depths)[:, None] * rng.uniform(0.5, 1.5, n)
    arrays["rank"] = 1 + (1000 * (1 - steps) * rng.uniform(0.5, 1.5, n)).astype(int)
    if cka:
        distance = np.abs(np.subtract.outer(np.arange(depths), np.arange(depths)))
        arrays["cka"] = np.exp(-3 * distance / depths) - 0.05 * (distance > 0.8 * depths)
    for group in groups:
        arrays[f"null_low/{group}"] = np.zeros(depths)
        arrays[f"null_high/{group}"] = np.linspace(0, 0.12, depths)

    blocks = pd.DataFrame({"block": np.arange(n_blocks), "mixer": [mixers[b % len(mixers)] for b in range(n_blocks)]})
    fragility = []
    for kind in kinds:
        jsd = np.minimum(0.68, size * rng.gamma(2, 0.5, n_blocks))
        jsd[0] = 0.62
        blocks[f"jsd_{kind}"] = jsd
        blocks[f"jsd_low_{kind}"] = jsd * rng.uniform(0.5, 0.9, n_blocks) if intervals else math.nan
        blocks[f"jsd_high_{kind}"] = np.minimum(0.69, jsd * rng.uniform(1.1, 1.5, n_blocks)) if intervals else math.nan
        blocks[f"kept_{kind}"] = 1 - jsd / 0.69 if answered.any() else math.nan
        entry = {"ablation": kind, "n": n, "n_answered": int(answered.sum()), "ceiling": 0.64 if n else None}
        entry |= {"fragile": [0], "fragile_without_first": [0] if n_blocks == 1 else [1, n_blocks - 1]}
        fragility.append(entry | {"flat": False, "intervals": "percentile bootstrap over items"})

    found = []
    for group, (size_of, right) in groups.items():
        mine = particles[answered & (np.array(names) == group)]
        good = right >= 6
        block = MISSING
        if good:
            middle = float(np.median(mine))
            spread = {"low": max(0.0, middle - 1), "high": min(n_blocks - 1.0, middle + 1)}
            block = {"estimate": middle} | (spread if intervals else {"low": None, "high": None})
        why = None if good else f"{right} of {size_of} probes answered, 6 needed"
        found.append({"group": group, "n": size_of, "answered": right, "block": block, "why_not": why})
    medians = [group["block"]["estimate"] for group in found if group["why_not"] is None]
    run: dict[str, Any] = {
        "arguments": {
            "ablations": list(kinds),
            "positions": "all",
            "rule": "first_rise",
            "min_rise": 0.05,
            "rel_rise": 0.25,
        },
        "model": {"name": name, "kind": "hub", "dtype": "bfloat16"},
        "engine": "onepass",
        "readout": "logit",
        "groups": found,
        "particle_block": float(np.median(medians)) if medians else None,
        "fragility": fragility,
    }
    probes = pd.DataFrame({"group": names, "answered": answered, "particle": particles}).astype({"particle": "Int64"})
    return TraceResult(run, probes, blocks, arrays)
