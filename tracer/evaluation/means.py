"""Means over answers, with the interval that fits where the answers come from."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from tracer.statistics import Interval, pooled_interval, rng, stratified_interval

RESAMPLES = 2000
FEWEST = 5
"""Documents below which their resampling says nothing."""


def mean_answer(
    values: np.ndarray, groups: Sequence[str] | None, *, subjects: bool, macro: bool, seed: int, label: object
) -> Interval:
    """A mean over answers and its interval.

    Args:
        values: `[answers]`.
        groups: of each answer; None where they are all of one.
        subjects: the groups are the fixed ones of a benchmark, not some of many that there could be.
        macro: the mean over subjects of their means.
        seed: of the resampling.
        label: what the values are.
    """
    if groups is not None and subjects:
        return stratified_interval(values, groups, macro=macro, seed=seed, label=label)
    return pooled_interval(values, groups, seed=seed, label=label)


def ratio_of_sums(
    numerators: Float[np.ndarray, " item"], denominators: Float[np.ndarray, " item"], *, seed: int, label: object
) -> Interval:
    """A ratio of sums over items, such as bits a byte of documents, with a percentile bootstrap over items.

    Args:
        numerators: of each item.
        denominators: of each item, above 0.
        seed: of the resampling.
        label: what the values are.

    Returns:
        The interval; without ends for fewer than `FEWEST` items.
    """
    n = len(numerators)
    estimate = float(numerators.sum() / denominators.sum())
    method = "percentile bootstrap over items of a ratio of sums"
    if n < FEWEST:
        return Interval(estimate, None, None, n, 0.95, f"{method} (undefined: fewer than {FEWEST} items)")
    drawn = rng(seed, label).multinomial(n, np.full(n, 1 / n), RESAMPLES)
    low, high = np.quantile((drawn @ numerators) / (drawn @ denominators), [0.025, 0.975])
    return Interval(estimate, float(low), float(high), n, 0.95, method)
