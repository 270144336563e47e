"""Paired differences over seeds, and what may be said of them."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from tracer.statistics import MIN_SEEDS, t_interval

HOLDS, FAILS, OPEN = "holds", "does not hold", "cannot be told apart"
"""What a verdict says: the difference lies above 0, below it, or its interval covers it."""


@dataclass(frozen=True)
class Verdict:
    """A paired difference and its verdict.

    Attributes:
        n: seeds.
        difference: mean over seeds.
        low: lower end of its 95 % t interval; None with too few seeds.
        high: upper end.
        words: `HOLDS`, `FAILS` or `OPEN`.
    """

    n: int
    difference: float
    low: float | None
    high: float | None
    words: str

    @property
    def reason(self) -> str:
        """Why nothing can be said; empty where something can."""
        return f"{self.n} of {MIN_SEEDS} seeds" if self.low is None else ""


def verdict(differences: Float[np.ndarray, " seed"]) -> Verdict:
    """What paired differences over seeds say.

    Args:
        differences: one number a seed: how much better the first arm is than the second.
    """
    n, mean = len(differences), float(differences.mean())
    if n < MIN_SEEDS:
        return Verdict(n, mean, None, None, OPEN)
    found = t_interval(differences)
    assert found.low is not None
    assert found.high is not None
    words = HOLDS if found.low > 0 else FAILS if found.high < 0 else OPEN
    return Verdict(n, mean, found.low, found.high, words)
