"""The null of a group of probes: what chance looks like, and whether the lens knows better.

A model that always gives the same answer is right on some probes of every group. The permutation test asks whether the
lens knows which target belongs to which prompt; the null band shows what it gives to targets of other prompts.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Integer

from tracer.errors import InputError
from tracer.statistics import rng

# The natural logarithm of the smallest positive double: no log-probability that a float64 can show lies
# lower.
LOG_FLOOR = -745.0
# Log-probabilities come from float32 models; what differs by less than this (nats) is their rounding.
LOG_ROUNDING = 1e-5


@dataclass(frozen=True)
class PermutationTest:
    """The result of `permutation_test`.

    Attributes:
        p_value: (1 + permutations at least as extreme) / (1 + permutations), corrected for the search over
            depths.
        statistic: `[depths]` mean log p(own target) in standard deviations from its permutation mean; 0 at a
            depth where the permutations do not differ.
        depth: Index of the largest statistic; `None` where no depth tells the items apart.
        n: Items.
        n_permutations: Permutations drawn.
    """

    p_value: float
    statistic: Float[np.ndarray, "depths"]
    depth: int | None
    n: int
    n_permutations: int


def permutation_test(
    log_p: Float[np.ndarray, "depths items targets"],
    own: Integer[np.ndarray, "items"],
    *,
    seed: int,
    label: object,
    n_permutations: int = 2000,
) -> PermutationTest:
    """Does the lens of a group know which target belongs to which prompt, at any depth?

    The targets are permuted over all items of the group. The statistic of a depth is the mean log p(own
    target), in standard deviations from its permutation mean; the test statistic is the largest over depths,
    so that the search over depths is paid for (max-T). Mean and standard deviation are the exact ones over
    all permutations (Hoeffding 1951), not estimates from the drawn ones. A model that always gives the same
    answer has p = 1: its permutations do not differ, and such a depth counts as 0.

    Pass all items, not only the answered ones: selecting those makes chance look significant.

    Args:
        log_p: `[depths, items, targets]` log-probability (nats) of every distinct target after every prompt.
            `-inf` counts as -745, the logarithm of the smallest positive double.
        own: `[items]` index of each item's own target.
        seed: The run's seed.
        label: What the numbers are; see `rng`.
        n_permutations: Permutations drawn.

    Raises:
        InputError: No items, an index outside the targets, a NaN, or a value above 0 (a probability instead
            of its logarithm).

    Source: Westfall & Young (1993), "Resampling-Based Multiple Testing", chapter 2; moments from Hoeffding
    (1951), "A combinatorial central limit theorem", Annals of Mathematical Statistics 22.
    """
    log_p = _log_floor(log_p, own)
    if log_p.max() > LOG_ROUNDING:
        raise InputError(f"log p of {log_p.max():.3g} is above 0; pass log-probabilities, not probabilities")
    depths, n, _ = log_p.shape
    generator = rng(seed, label)
    orders = generator.permuted(np.tile(np.arange(n), (n_permutations, 1)), axis=1)
    orders = np.vstack([np.arange(n), orders])
    statistic = np.zeros((depths, len(orders)))
    varies = np.zeros(depths, dtype=bool)
    for depth in range(depths):
        pairs = log_p[depth][:, own]  # [items, items]: prompt i, target of item j
        pairs = pairs - pairs.mean(axis=0)
        pairs -= pairs.mean(axis=1, keepdims=True)
        varies[depth] = np.abs(pairs).max() > LOG_ROUNDING
        if varies[depth]:
            # Row and column means add the same to every permutation, so the doubly centred sum has mean 0.
            deviation = np.sqrt(np.square(pairs).sum() / (n - 1)) / n
            statistic[depth] = pairs[np.arange(n), orders].mean(axis=1) / deviation
    largest = statistic.max(axis=0)
    # Items that share a target make exact ties, which differ only in the order of summation.
    exceeding = int((largest[1:] >= largest[0] - 1e-9).sum())
    observed = statistic[:, 0].copy()
    depth_of_max = int(np.where(varies, observed, -np.inf).argmax()) if varies.any() else None
    return PermutationTest((1 + exceeding) / (1 + n_permutations), observed, depth_of_max, n, n_permutations)


def null_band(
    p: Float[np.ndarray, "depths items targets"], own: Integer[np.ndarray, "items"]
) -> tuple[Float[np.ndarray, "depths"], Float[np.ndarray, "depths"]] | None:
    """What the lens gives to targets that are not the prompt's own, per depth.

    Args:
        p: `[depths, items, targets]` probability, or log-probability, of every distinct target after every
            prompt. The band is on the same scale; `-inf` counts as -745.
        own: `[items]` index of each item's own target. Items may share one.

    Returns:
        `(low, high)`, each `[depths]`: the 5 and 95 % quantiles over all (item, target) pairs with
        `target != own[item]`; `None` with a single target, where no such pair exists.

    Raises:
        InputError: No items, an index outside the targets, or a NaN.
    """
    p = _log_floor(p, own)
    foreign = np.arange(p.shape[2]) != own[:, None]
    if not foreign.any():
        return None
    low, high = np.quantile(p[:, foreign], [0.05, 0.95], axis=1)
    return low, high


def _log_floor(p: np.ndarray, own: np.ndarray) -> np.ndarray:
    if p.size == 0:
        raise InputError(f"no probabilities (shape {p.shape}); pass [depths, items, targets] with one item or more")
    if own.min() < 0 or own.max() >= p.shape[2]:
        raise InputError(f"own targets span {own.min()} to {own.max()}; pass indices 0 to {p.shape[2] - 1}")
    if np.isnan(p).any():
        raise InputError(f"{int(np.isnan(p).sum())} of {p.size} probabilities are NaN; pass finite ones or -inf")
    return np.maximum(p.astype(np.float64), LOG_FLOOR)
