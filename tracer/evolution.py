"""How the residual stream evolves over depth, and how stable that is over probes and under ablations."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

DEPTH_MEASURES: Mapping[str, str] = {
    "norm": "Euclidean norm of the residual stream",
    "angle": "angular distance to the depth before (units of pi); the block influence",
    "entropy": "entropy of the lens distribution (nats)",
    "kl_to_final": "KL(lens distribution || output distribution) (nats)",
    "rank": "rank of the target under the lens, 1 = top",
}
ABLATED_MEASURES: Mapping[str, str] = {
    "ablated_angle": "angular distance of the last residual to the clean one (units of pi)",
    "ablated_entropy": "entropy of the output under the ablation minus without (nats)",
    "ablated_rank": "log2 of the target's rank under the ablation minus without",
}


def evolution_table(measures: Mapping[str, np.ndarray]) -> pd.DataFrame:
    """One row per depth 0..L: median and quartiles over probes of every measure of the stream.

    Args:
        measures: name to `[depths, probes]`, at least the names of `DEPTH_MEASURES`.
    """
    columns: dict[str, np.ndarray] = {}
    for name in DEPTH_MEASURES:
        low, middle, high = np.quantile(measures[name], [0.25, 0.5, 0.75], axis=1)
        columns |= {name: middle, f"{name}_q1": low, f"{name}_q3": high}
    table = pd.DataFrame(columns)
    table.insert(0, "depth", np.arange(len(table)))
    return table


def stability_table(measures: Mapping[str, np.ndarray]) -> pd.DataFrame:
    """One row per block: how far its ablation moves the end of the stream, as medians over probes.

    Args:
        measures: `ablated_angle`, `ablated_entropy`, `ablated_rank` as `[blocks, probes]`, and the clean `entropy`
            and `rank` as `[depths, probes]`.
    """
    entropy = measures["ablated_entropy"] - measures["entropy"][-1]
    rank = np.log2(measures["ablated_rank"]) - np.log2(measures["rank"][-1])
    return pd.DataFrame(
        {
            "moved_angle": np.median(measures["ablated_angle"], axis=1),
            "moved_entropy": np.median(entropy, axis=1),
            "moved_log2_rank": np.median(rank, axis=1),
        }
    )
