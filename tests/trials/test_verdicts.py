"""The statistics of a trial in simulations whose truth is known, through the same functions as real trainings."""

import numpy as np
import pytest

from tracer.trials.levels import Points, common_level, retained
from tracer.trials.recipe import ACQUISITION
from tracer.trials.verdicts import FAILS, HOLDS, OPEN, verdict

SIMULATIONS, SEEDS = 1000, 8
STEPS = np.arange(0, 151, 25)
RATES = (5e-4, 1e-3, 2e-3)


def simulated(draw: np.random.Generator, shift: float = 0.0) -> Points:
    """An arm that learns and forgets along its steps, faster at higher rates; items and seeds make noise."""
    rate = np.repeat(RATES, len(STEPS))
    step = np.tile(STEPS, len(RATES))
    progress = 1 - np.exp(-rate * step * 15 * np.exp(draw.normal(0, 0.1)))
    halves = []
    for _ in range(2):
        noise = draw.normal(0, 0.03, (2, len(step)))
        kept = 0.95 - 0.6 * progress**1.5 + draw.normal(0, 0.02) + shift
        halves.append({ACQUISITION: progress + noise[0], "old": kept + noise[1]})
    return Points(rate, step, *halves)


def difference(draw: np.random.Generator, shift: float = 0.0) -> float:
    """What the second of two arms keeps more than the first, at the level that both reach."""
    arms = {"full": simulated(draw), "other": simulated(draw, shift)}
    kept = retained(arms, common_level(arms), "old")
    assert kept["full"] is not None
    assert kept["other"] is not None
    return kept["other"] - kept["full"]


@pytest.fixture(scope="module")
def differences() -> np.ndarray:
    """`[simulation, seed]` of two arms that are alike."""
    draw = np.random.default_rng(0)
    return np.array([[difference(draw) for _ in range(SEEDS)] for _ in range(SIMULATIONS)])


def test_intervals_cover_the_truth_and_like_arms_are_told_apart_by_chance_only(differences: np.ndarray) -> None:
    found = [verdict(row) for row in differences]
    covered = sum(f.low <= 0 <= f.high for f in found if f.low is not None and f.high is not None) / SIMULATIONS
    assert 0.93 <= covered <= 0.97
    assert sum(f.words != OPEN for f in found) / SIMULATIONS <= 0.07


def test_a_planted_difference_of_three_standard_deviations_holds(differences: np.ndarray) -> None:
    planted = 3 * float(differences.std())
    draw = np.random.default_rng(1)
    for sign, words in ((1, HOLDS), (-1, FAILS)):
        rows = [np.array([difference(draw, sign * planted) for _ in range(SEEDS)]) for _ in range(50)]
        assert all(verdict(row).words == words for row in rows)


def test_fewer_than_eight_seeds_say_nothing_however_large_the_difference() -> None:
    found = verdict(np.linspace(0.9, 1.0, 7))
    assert (found.words, found.low, found.high, found.n) == (OPEN, None, None, 7)
    assert found.reason == "7 of 8 seeds"
    assert found.difference == pytest.approx(0.95)


def test_an_interval_is_students_over_seeds() -> None:
    values = np.array([0.1, 0.3, 0.2, 0.4, 0.0, 0.2, 0.1, 0.3])
    found = verdict(values)
    half = 2.3646 * values.std(ddof=1) / np.sqrt(8)  # t(7) at 0.975
    assert found.low is not None
    assert found.low == pytest.approx(values.mean() - half, abs=1e-4)
    assert (found.words, found.reason) == (HOLDS, "")
