"""The task particle: the block where the target's probability first rises significantly and stays.

After LayerTracer (arXiv 2604.20556). The lens reads `p[d]`, the target's probability at depth d = 0..L; a rise between
depth d - 1 and d is the work of block d - 1.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from tracer.errors import InputError, one_of
from tracer.permutation import null_band, permutation_test
from tracer.probes import MIN_USABLE
from tracer.statistics import Interval, bootstrap_interval

RULES = ("first_rise", "half_final", "max_rise")

MIN_ANSWERED = 6
MIN_DISTINCT = 3
MAX_P_VALUE = 0.05

NO_BLOCK = -1


@dataclass(frozen=True)
class ParticleRule:
    """How a probe's particle is chosen; every result names it.

    Attributes:
        name: `first_rise` (the definition above), or `half_final` (first depth with half of the final probability),
            or `max_rise` (the largest rise). The three differ by a block or two.
        min_rise: smallest rise in probability that counts, for `first_rise`.
        rel_rise: smallest rise as a share of the probe's largest, for `first_rise`.
    """

    name: str = "first_rise"
    min_rise: float = 0.05
    rel_rise: float = 0.25

    def __post_init__(self) -> None:
        """Refuse unknown rules and shares outside [0, 1]."""
        one_of("particle rule", self.name, RULES)
        for name in ("min_rise", "rel_rise"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name} is {getattr(self, name)}: pass a number from 0 to 1")


def task_particles(
    p: Float[np.ndarray, "depths probes"],
    band_high: Float[np.ndarray, "depths"] | None,
    rule: ParticleRule = ParticleRule(),
) -> Int[np.ndarray, "probes"]:
    """The particle's block for every probe; `NO_BLOCK` (-1) where there is none.

    Under `first_rise` a rise r[d] = p[d] - p[d-1] counts when it is at least max(min_rise, rel_rise * the probe's
    largest rise), p[d] lies above the null band, and a quarter of it is kept at every later depth.

    Args:
        p: `[depths, probes]` probability of the target.
        band_high: `[depths]` upper end of the null band; None where there is no band, then nothing can lie above it.
        rule: how to choose.
    """
    rises = np.diff(p, axis=0)  # [blocks, probes]
    if rule.name == "max_rise":
        qualifies = (rises == rises.max(axis=0)) & (rises > 0)
    elif rule.name == "half_final":
        # Only a depth that a block has written: what the embedding already says is no block's work.
        reached = p >= p[-1] / 2
        qualifies = reached[1:] & ~reached[0]
    else:
        enough = rises >= np.maximum(rule.min_rise, rule.rel_rise * rises.max(axis=0))
        above = p[1:] > (np.inf if band_high is None else band_high[1:, None])
        lowest_after = np.minimum.accumulate(p[::-1], axis=0)[::-1][1:]  # of this depth and all later ones
        kept = lowest_after >= p[:-1] + rises / 4
        qualifies = enough & above & kept
    return np.where(qualifies.any(axis=0), qualifies.argmax(axis=0), NO_BLOCK)


@dataclass(frozen=True)
class GroupParticle:
    """Where a group of probes is executed.

    Attributes:
        group: its name.
        n: usable probes.
        answered: probes whose target is the model's top-1 token; only these count below.
        distinct: different targets among the answered ones.
        p_value: permutation test of "the lens knows which target belongs to which prompt", over all probes.
        with_particle: answered probes that have a particle.
        block: median block of these with its interval; empty when `why_not` says so.
        depth: the median as a share of the depth, block / (L - 1).
        why_not: why the group has no particle, or None.
    """

    group: str
    n: int
    answered: int
    distinct: int
    p_value: float | None
    with_particle: int
    block: Interval
    depth: float | None
    why_not: str | None

    @classmethod
    def unmeasured(cls, group: str) -> "GroupParticle":
        """A group without a usable probe."""
        nothing = bootstrap_interval(np.zeros(0), "median", seed=0, label=group)
        return cls(group, 0, 0, 0, None, 0, nothing, None, _why_not(0, 0, 0, None, 0))

    def as_dict(self) -> dict[str, Any]:
        """Plain data for `run.json`."""
        return asdict(self)


def group_null(
    rival_log_p: Float[np.ndarray, "depths probes targets"], own: Int[np.ndarray, "probes"]
) -> tuple[np.ndarray, np.ndarray] | None:
    """Null band of a group in probability, `(low, high)`, each `[depths]`; None with a single target."""
    return null_band(np.exp(rival_log_p), own)


def group_particle(
    group: str,
    rival_log_p: Float[np.ndarray, "depths probes targets"],
    own: Int[np.ndarray, "probes"],
    answered: Bool[np.ndarray, "probes"],
    particles: Int[np.ndarray, "probes"],
    *,
    seed: int,
) -> GroupParticle:
    """Decide whether a group has a particle, and where.

    Args:
        group: its name.
        rival_log_p: log-probability of each distinct target of the group after each prompt.
        own: index of each probe's own target.
        answered: whether the model answers the probe.
        particles: from `task_particles`.
        seed: of the permutations and the bootstrap.
    """
    n, n_blocks = len(own), len(rival_log_p) - 1
    distinct = len(np.unique(own[answered]))
    p_value = None
    if n >= 2:
        p_value = permutation_test(rival_log_p, own, seed=seed, label=("group test", group)).p_value
    found = particles[answered & (particles != NO_BLOCK)]
    why_not = _why_not(n, int(answered.sum()), distinct, p_value, len(found))
    used = found if why_not is None else found[:0]
    block = bootstrap_interval(used.astype(float), "median", seed=seed, label=("particle", group))
    depth = None if block.estimate is None else block.estimate / max(1, n_blocks - 1)
    return GroupParticle(group, n, int(answered.sum()), distinct, p_value, len(found), block, depth, why_not)


def _why_not(n: int, answered: int, distinct: int, p_value: float | None, found: int) -> str | None:
    if n < MIN_USABLE:
        return f"not measurable: {n} usable probes, {MIN_USABLE} needed"
    if answered < MIN_ANSWERED:
        return f"{answered} of {n} probes answered, {MIN_ANSWERED} needed"
    if distinct < MIN_DISTINCT:
        return f"only {distinct} different answers are right, {MIN_DISTINCT} needed"
    if p_value is None or p_value > MAX_P_VALUE:
        return f"the lens does not tell the prompts apart (p = {p_value:.2f})"
    if not found:
        return "no answered probe has a rise that lasts"
    return None


def overall_block(groups: Sequence[GroupParticle], *, seed: int) -> Interval:
    """The median over groups of the groups' medians, with an interval over groups; empty without a particle."""
    medians = [group.block.estimate for group in groups if group.block.estimate is not None]
    return bootstrap_interval(np.array(medians, dtype=float), "median", seed=seed, label="particle of all groups")
