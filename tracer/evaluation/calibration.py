"""Calibration: how often a model is right where it is so sure of what it says."""

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float
from scipy.stats import binomtest

BINS = 5


def calibration_of(p_said: Float[np.ndarray, " probe"], answered: Bool[np.ndarray, " probe"]) -> pd.DataFrame:
    """Bins of about equal count by how sure a model was.

    Args:
        p_said: probability of what it said.
        answered: whether that was right.

    Returns:
        At most `BINS` rows, the least sure first: `bin`, `n`, `p_said` (mean), `accuracy` and its Wilson 95 % interval
        (`low`, `high`). Equal probabilities stay together, so that a model that is always as sure has one bin.
    """
    edges = np.unique(np.quantile(p_said, np.arange(1, BINS) / BINS, method="lower"))
    bins = np.unique(np.searchsorted(edges, p_said, side="left"), return_inverse=True)[1]
    rows = []
    for number in range(int(bins.max()) + 1):
        own = bins == number
        n, right = int(own.sum()), int(answered[own].sum())
        interval = binomtest(right, n).proportion_ci(method="wilson")
        rows.append((number, n, float(p_said[own].mean()), right / n, interval.low, interval.high))
    return pd.DataFrame(rows, columns=["bin", "n", "p_said", "accuracy", "low", "high"])


def calibration_error(table: pd.DataFrame) -> float:
    """Expected calibration error: the mean over probes of the distance between accuracy and sureness of their bin.

    Source: Naeini, Cooper and Hauskrecht (2015), "Obtaining well calibrated probabilities using Bayesian binning".
    """
    gaps = (table["accuracy"] - table["p_said"]).abs()
    return float((gaps * table["n"]).sum() / table["n"].sum())
