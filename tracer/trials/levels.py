"""Arms compared at equal acquisition: the best retention among the points of an arm that have learned enough.

An arm is all its points: every learning rate, every step at which it was measured. A point is chosen on the validation
half of the items and read on the test half, so that what is read is not biased by the choice. A level that an arm does
not reach has no value; nothing is extrapolated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from tracer.trials.recipe import ACQUISITION


@dataclass(frozen=True)
class Points:
    """What one arm has reached with one seed.

    Attributes:
        rate: `[point]` learning rate.
        step: `[point]` steps made.
        validation: of each measure `[point]`, a score of which more is better, on the half that points are chosen by.
        test: likewise on the half that they are read on.
    """

    rate: Float[np.ndarray, " point"]
    step: Int[np.ndarray, " point"]
    validation: Mapping[str, Float[np.ndarray, " point"]]
    test: Mapping[str, Float[np.ndarray, " point"]]

    def within(self, budget: int) -> "Points":
        """Those of at most so many steps."""
        kept = self.step <= budget
        return Points(
            self.rate[kept],
            self.step[kept],
            {name: values[kept] for name, values in self.validation.items()},
            {name: values[kept] for name, values in self.test.items()},
        )

    @property
    def best_level(self) -> float:
        """The highest acquisition, on the validation half."""
        return float(self.validation[ACQUISITION].max())

    def chosen(self, level: float, measure: str) -> int | None:
        """The point that keeps the most of a measure among those that reach a level of acquisition.

        Args:
            level: of acquisition, on the validation half.
            measure: by which the point is chosen, on the validation half; of equals the first.

        Returns:
            Its index; None where the level is not reached.
        """
        reached = np.flatnonzero(self.validation[ACQUISITION] >= level)
        if not len(reached):
            return None
        return int(reached[np.argmax(self.validation[measure][reached])])


def common_level(arms: Mapping[str, Points]) -> float:
    """The highest acquisition that every arm reaches: the smallest of their best levels (A*).

    Args:
        arms: of one seed, within one budget.
    """
    return min(points.best_level for points in arms.values())


def retained(arms: Mapping[str, Points], level: float, measure: str) -> dict[str, float | None]:
    """What each arm keeps of a measure at a level of acquisition, on the test half; None where it is not reached."""
    found: dict[str, float | None] = {}
    for name, points in arms.items():
        point = points.chosen(level, measure)
        found[name] = None if point is None else float(points.test[measure][point])
    return found


def curve(
    seeds: Sequence[Mapping[str, Points]], levels: Float[np.ndarray, " level"], measure: str
) -> dict[str, Float[np.ndarray, " level"]]:
    """Mean over seeds of what each arm keeps, at several levels of acquisition.

    Args:
        seeds: the arms, seed by seed.
        levels: of acquisition.
        measure: what is kept.

    Returns:
        By arm; NaN where a seed does not reach the level.
    """
    values = {name: np.full((len(levels), len(seeds)), np.nan) for name in seeds[0]}
    for column, arms in enumerate(seeds):
        for row, level in enumerate(levels):
            for name, value in retained(arms, float(level), measure).items():
                if value is not None:
                    values[name][row, column] = value
    return {name: found.mean(axis=1) for name, found in values.items()}


def learned(points: Points) -> float:
    """Acquisition on the test half, at the point where it is highest on the validation half."""
    return float(points.test[ACQUISITION][int(np.argmax(points.validation[ACQUISITION]))])
