"""Means over answers, with the interval that fits where the answers come from."""

from collections.abc import Sequence

import numpy as np

from tracer.statistics import Interval, pooled_interval, stratified_interval


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
