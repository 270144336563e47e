"""Points of arms at equal acquisition, against choices by hand."""

import numpy as np

from tracer.trials.levels import Points, common_level, curve, learned, retained
from tracer.trials.recipe import ACQUISITION


def points(validation: list[list[float]], test: list[list[float]]) -> Points:
    """An arm with one rate: acquisition and what is kept, a value each step."""
    number = len(validation[0])
    halves = [{ACQUISITION: np.array(a), "old": np.array(b)} for a, b in (validation, test)]
    return Points(np.full(number, 1e-3), np.arange(number) * 10, *halves)


FULL = points([[0.1, 0.5, 0.9], [1.0, 0.8, 0.4]], [[0.2, 0.4, 0.8], [0.9, 0.7, 0.3]])
OTHER = points([[0.1, 0.6, 0.5], [1.0, 0.5, 0.7]], [[0.2, 0.7, 0.6], [0.9, 0.4, 0.6]])


def test_the_common_level_is_the_smallest_of_the_best_ones() -> None:
    assert common_level({"full": FULL, "other": OTHER}) == 0.6
    assert common_level({"full": FULL.within(10), "other": OTHER}) == 0.5
    assert common_level({"full": FULL, "other": OTHER.within(0)}) == 0.1


def test_a_point_is_chosen_on_one_half_and_read_on_the_other() -> None:
    # Of those that reach 0.5, step 10 keeps the most of FULL by validation, and step 20 of OTHER.
    assert retained({"full": FULL, "other": OTHER}, 0.5, "old") == {"full": 0.7, "other": 0.6}
    assert retained({"full": FULL, "other": OTHER}, 0.6, "old") == {"full": 0.3, "other": 0.4}
    # The test half alone would have chosen otherwise: 0.9 of step 0 is not at a level of 0.2 by validation.
    assert retained({"full": FULL}, 0.2, "old") == {"full": 0.7}


def test_a_level_that_is_not_reached_has_no_value() -> None:
    assert retained({"full": FULL, "other": OTHER}, 0.7, "old") == {"full": 0.3, "other": None}


def test_within_keeps_the_steps_of_a_budget() -> None:
    kept = FULL.within(10)
    assert kept.step.tolist() == [0, 10]
    assert kept.best_level == 0.5
    assert len(kept.test["old"]) == len(kept.validation[ACQUISITION]) == len(kept.rate) == 2


def test_what_is_learned_is_read_where_the_validation_half_is_highest() -> None:
    assert learned(FULL) == 0.8
    assert learned(OTHER.within(10)) == 0.7


def test_the_curve_is_a_mean_over_seeds_and_ends_where_one_does_not_reach() -> None:
    lower = points([[0.1, 0.5, 0.5], [1.0, 0.8, 0.4]], [[0.2, 0.4, 0.4], [0.9, 0.5, 0.3]])
    found = curve([{"full": FULL}, {"full": lower}], np.array([0.1, 0.5, 0.8]), "old")["full"]
    np.testing.assert_allclose(found, [0.9, (0.7 + 0.5) / 2, np.nan])
