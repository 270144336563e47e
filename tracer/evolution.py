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


def stability_table(arrays: Mapping[str, np.ndarray], kind: str) -> pd.DataFrame:
    """One row per block: how far its ablation moves the end of the stream and the output, as medians over probes.

    `moved_angle`: angular distance of the last residual to the clean one, units of pi. `moved_norm`: its norm minus the
    clean one's. `moved_entropy`: entropy of the output minus the clean one's, nats. `moved_kl`: KL(output under the
    ablation || clean output), nats. `moved_log2_rank`: log2 of the target's rank minus that without the ablation.

    Args:
        arrays: of a result.
        kind: the ablation.
    """
    moved = {
        "moved_angle": arrays[f"angle_{kind}"],
        "moved_norm": arrays[f"norm_{kind}"] - arrays["norm"][-1],
        "moved_entropy": arrays[f"entropy_{kind}"] - arrays["entropy"][-1],
        "moved_kl": arrays[f"kl_{kind}"],
        "moved_log2_rank": arrays[f"log2_rank_{kind}"] - np.log2(arrays["rank"][-1]),
    }
    return pd.DataFrame({name: np.median(values, axis=1) for name, values in moved.items()})
