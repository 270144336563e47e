"""Calibration of what a model says, on answers that were made up."""

import numpy as np
import pytest
from scipy.stats import binomtest

from tracer.evaluation.calibration import BINS, calibration_error, calibration_of


def test_a_calibrated_model_has_no_error_and_an_overconfident_one_its_excess() -> None:
    draw = np.random.default_rng(0)
    p = draw.random(20_000)
    honest = calibration_of(p, draw.random(20_000) < p)
    assert calibration_error(honest) < 0.01
    assert ((honest["low"] <= honest["p_said"]) & (honest["p_said"] <= honest["high"])).sum() >= BINS - 1
    proud = calibration_of(np.minimum(1.0, p + 0.2), draw.random(20_000) < p)
    assert calibration_error(proud) == pytest.approx(0.2 * 0.8 + 0.02, abs=0.01)  # the last fifth is capped at 1


def test_bins_have_equal_counts_and_ties_stay_together() -> None:
    table = calibration_of(np.linspace(0.01, 1.0, 100), np.arange(100) % 2 == 0)
    assert table["n"].tolist() == [20] * 5
    assert table["p_said"].is_monotonic_increasing
    interval = binomtest(10, 20).proportion_ci(method="wilson")
    assert table[["accuracy", "low", "high"]].iloc[0].tolist() == pytest.approx([0.5, interval.low, interval.high])
    tied = calibration_of(np.repeat([0.3, 0.9], [50, 50]), np.repeat([True, False], [50, 50]))
    assert tied[["n", "accuracy"]].to_numpy().tolist() == [[50, 1.0], [50, 0.0]]
    assert calibration_error(tied) == pytest.approx((0.7 + 0.9) / 2)
    alone = calibration_of(np.array([0.4]), np.array([True]))
    assert alone["n"].tolist() == [1]
