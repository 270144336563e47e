import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from tracer.errors import InputError
from tracer.statistics import (
    Interval,
    bootstrap_interval,
    bootstrap_profile,
    largest_set,
    pooled_interval,
    rng,
    t_interval,
)

SEED = {"seed": 0, "label": "test"}


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).exponential(size=shape)


def eight_groups(n: int) -> list[str]:
    return [f"group {item % 8}" for item in range(n)]


# rng


def test_rng_depends_on_seed_and_label_alone():
    first = rng(0, "noise", 3).normal(size=4)
    rng(0, "noise", 2).normal(size=4)
    np.testing.assert_array_equal(rng(0, "noise", 3).normal(size=4), first)
    np.testing.assert_array_equal(rng(0, "noise", np.int32(3)).normal(size=4), first)
    others = [rng(1, "noise", 3), rng(0, "noise", 4), rng(0, "noise"), rng(0, "noise3"), rng(0, ("noise", 3))]
    assert not any(np.allclose(other.normal(size=4), first) for other in others)


def test_rng_is_the_same_in_another_process():
    code = "from tracer.statistics import rng; print(rng(7, 'probe', 0.5, None, ('a', 1)).integers(10**9))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(other.stdout) == rng(7, "probe", 0.5, None, ("a", 1)).integers(10**9)


def test_rng_refuses_labels_without_a_stable_form():
    with pytest.raises(InputError, match="type object"):
        rng(0, object())


def test_nothing_touches_the_global_random_state():
    np.random.seed(5)
    before = np.random.get_state()[1].copy()
    bootstrap_interval(draw(20), **SEED)
    bootstrap_profile(draw(16, 3), eight_groups(16), **SEED)
    np.testing.assert_array_equal(np.random.get_state()[1], before)


# Interval


def test_interval_reads_as_estimate_and_ends():
    assert str(Interval(0.1234, 0.101, 0.14, 30)) == "0.123 [0.101, 0.140]"
    assert str(Interval(0.00012, -0.00001, 0.0002, 30)) == "1.20e-04 [-1.00e-05, 2.00e-04]"
    assert str(Interval(0.5, None, None, 1)) == "0.500 (no interval, n = 1)"
    assert str(Interval(None, None, None, 0)) == "undefined (n = 0)"
    assert Interval(0.5, None, None, 1, method="m").as_dict() == {
        "estimate": 0.5,
        "low": None,
        "high": None,
        "n": 1,
        "level": 0.95,
        "method": "m",
    }


def test_interval_refuses_nan():
    with pytest.raises(InputError, match="pass None"):
        Interval(0.5, float("nan"), 0.6, 3)


# Bootstrap over the items of one group


@pytest.mark.parametrize("statistic", ["mean", "median"])
def test_bootstrap_interval_agrees_with_scipy(statistic):
    values = draw(40)
    interval = bootstrap_interval(values, statistic, **SEED)
    function = np.mean if statistic == "mean" else np.median
    expected = stats.bootstrap((values,), function, n_resamples=20_000, rng=1).confidence_interval
    assert interval.estimate == pytest.approx(function(values))
    assert interval.n == 40
    width = expected.high - expected.low
    assert interval.low == pytest.approx(expected.low, abs=0.06 * width)
    assert interval.high == pytest.approx(expected.high, abs=0.06 * width)
    assert interval.method == "BCa bootstrap over items"


def test_bca_follows_the_skew_that_a_symmetric_interval_misses():
    interval = bootstrap_interval(draw(40), **SEED)
    assert interval.high - interval.estimate > 1.1 * (interval.estimate - interval.low)


def test_the_seed_and_the_label_decide_the_interval():
    values = draw(30)
    assert bootstrap_interval(values, **SEED) == bootstrap_interval(list(values), **SEED)
    assert bootstrap_interval(values, **SEED) != bootstrap_interval(values, seed=0, label="other")
    assert bootstrap_interval(values, **SEED) != bootstrap_interval(values, seed=1, label="test")


def test_small_and_constant_samples_have_no_invented_width():
    assert bootstrap_interval([], **SEED).as_dict()["estimate"] is None
    one = bootstrap_interval([0.3], **SEED)
    assert (one.estimate, one.low, one.high, one.n) == (0.3, None, None, 1)
    equal = bootstrap_interval([0.1] * 7, "median", **SEED)
    assert (equal.estimate, equal.low, equal.high, equal.method) == (0.1, 0.1, 0.1, "all values are equal")
    assert bootstrap_interval([1, 0, 1, 1, 0, 1], **SEED).estimate == pytest.approx(2 / 3)


def test_an_undefined_bca_falls_back_to_percentiles_and_says_so():
    # Every leave-one-out median is 0, so the acceleration of BCa is 0 / 0.
    values = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 5.0]
    assert bootstrap_interval(values, "median", **SEED).method == "percentile bootstrap over items (BCa undefined)"
    interval = bootstrap_interval(values, "median", **SEED)
    assert interval.low == 0.0
    assert interval.high is not None


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused(bad):
    with pytest.raises(InputError, match="1 of 3 values are NaN or infinite"):
        bootstrap_interval([0.1, bad, 0.2], **SEED)
    with pytest.raises(InputError, match="1 of 4 values are NaN or infinite"):
        bootstrap_profile(np.array([[0.1, bad], [0.2, 0.3]]), None, **SEED)


def coverage(make, truth: float, groups: list[str] | None, simulations: int) -> float:
    hits = 0
    for simulation in range(simulations):
        values = make(np.random.default_rng(simulation))
        interval = pooled_interval(values, groups, seed=simulation, label="coverage", n_resamples=400)
        hits += interval.low <= truth <= interval.high
    return hits / simulations


def test_coverage_over_items_of_one_group():
    share = coverage(lambda g: g.exponential(size=60), 1.0, None, 200)
    # Nominal 0.95, about 0.93 at this size; the bound leaves three binomial standard errors.
    assert 0.875 < share < 0.99


def test_coverage_over_groups_where_items_are_not_independent():
    groups = [f"{item // 20:02d}" for item in range(320)]

    def clustered(generator: np.random.Generator) -> np.ndarray:
        return (generator.normal(size=(16, 1)) + generator.normal(size=(16, 20))).ravel()

    assert coverage(clustered, 0.0, groups, 150) > 0.86
    assert coverage(clustered, 0.0, None, 50) < 0.7, "items taken as independent ought to fail here"


# Profiles and pooled intervals


def test_profile_agrees_with_scipy_per_block():
    values = draw(50, 4)
    profile = bootstrap_profile(values, None, **SEED)
    expected = stats.bootstrap((values.T,), np.mean, axis=-1, n_resamples=20_000, rng=1).confidence_interval
    np.testing.assert_allclose(profile.mean, values.mean(axis=0))
    np.testing.assert_allclose(profile.low, expected.low, atol=0.03)
    np.testing.assert_allclose(profile.high, expected.high, atol=0.03)
    assert (profile.n, profile.n_groups) == (50, 1)
    same = bootstrap_profile(values, ["only"] * 50, **SEED)
    np.testing.assert_array_equal(same.low, profile.low)


def test_profile_column_is_the_interval_of_its_column():
    values = draw(30, 3)
    for groups in (None, eight_groups(30)):
        profile = bootstrap_profile(values, groups, **SEED)
        alone = pooled_interval(values[:, 1], groups, **SEED)
        assert (alone.estimate, alone.low, alone.high) == pytest.approx(
            (profile.mean[1], profile.low[1], profile.high[1]), abs=1e-12
        )


def test_a_constant_block_has_no_width_beside_others():
    values = draw(30, 3)
    values[:, 1] = 0.1
    for groups in (None, eight_groups(30)):
        profile = bootstrap_profile(values, groups, **SEED)
        assert profile.low[1] == profile.mean[1] == profile.high[1] == 0.1
        assert (profile.low[[0, 2]] < profile.high[[0, 2]]).all()
        assert "undefined" not in profile.method


def test_profile_without_enough_items():
    empty = bootstrap_profile(np.zeros((0, 3)), None, **SEED)
    assert (empty.mean, empty.low, empty.n) == (None, None, 0)
    single = bootstrap_profile(np.ones((1, 3)), ["a"], **SEED)
    assert single.low is None
    assert single.mean.tolist() == [1, 1, 1]


def two_stage_by_hand(values: np.ndarray, groups: np.ndarray, statistic, n_resamples: int) -> np.ndarray:
    generator = np.random.default_rng(1)
    names = sorted(set(groups))
    results = []
    for _ in range(n_resamples):
        parts = []
        for name in generator.choice(names, len(names)):
            members = values[groups == name]
            parts.append(generator.choice(members, len(members)))
        results.append(statistic(np.concatenate(parts)))
    return np.quantile(results, [0.025, 0.975])


@pytest.mark.parametrize("statistic", ["mean", "median"])
def test_pooled_interval_agrees_with_two_stages_by_hand(statistic):
    generator = np.random.default_rng(3)
    groups = np.array(["a"] * 5 + ["b"] * 30 + ["c"] * 12 + ["d"] * 20 + ["e"] * 8)
    shift = {name: generator.normal() for name in "abcde"}
    values = np.array([shift[name] for name in groups]) + generator.normal(size=75)
    function = np.mean if statistic == "mean" else np.median
    low, high = two_stage_by_hand(values, groups, function, 4000)
    interval = pooled_interval(values, groups.tolist(), statistic, seed=0, label="x", n_resamples=8000)
    assert interval.estimate == pytest.approx(function(values))
    assert interval.low == pytest.approx(low, abs=0.06 * (high - low))
    assert interval.high == pytest.approx(high, abs=0.06 * (high - low))
    assert interval.method == "two-stage percentile bootstrap (5 groups, then items)"


def test_the_second_stage_resamples_items_within_groups():
    values = np.random.default_rng(0).normal(size=(8, 30))
    values -= values.mean(axis=1, keepdims=True)  # equal group means: all the spread is within groups
    interval = pooled_interval(values.ravel(), [name for name in "abcdefgh" for _ in range(30)], **SEED)
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * values.std() / np.sqrt(240), rel=0.15)


def test_slices_of_resamples_keep_the_interval(monkeypatch):
    values = draw(40, 2)
    whole = bootstrap_profile(values, eight_groups(40), **SEED)
    monkeypatch.setattr("tracer.statistics.SLICE", 1000)
    sliced = bootstrap_profile(values, eight_groups(40), **SEED)
    np.testing.assert_allclose(sliced.low, whole.low, atol=0.05)
    expected = stats.bootstrap((values.T,), np.mean, axis=-1, rng=1).confidence_interval
    np.testing.assert_allclose(bootstrap_profile(values, None, **SEED).low, expected.low, atol=0.05)


def test_a_group_is_needed_for_every_item():
    with pytest.raises(InputError, match="3 groups for 4 items"):
        pooled_interval([0.1, 0.2, 0.3, 0.4], ["a", "a", "b"], **SEED)


def test_unknown_statistics_are_refused():
    # TypeError where annotations are checked, InputError where they are not.
    with pytest.raises((InputError, TypeError)):
        pooled_interval([0.1, 0.2], None, "mode", **SEED)


def test_values_without_a_block_dimension_are_a_type_error():
    with pytest.raises(TypeError):
        bootstrap_profile(draw(30), None, **SEED)


# The blocks that cannot be told from the largest


def test_largest_set_is_paired():
    generator = np.random.default_rng(0)
    item = generator.normal(size=(100, 1))  # what the items share is far larger than the differences
    values = 10 * item + np.array([0.0, 1.0, 1.0, 0.2]) + 0.1 * generator.normal(size=(100, 4))
    values[:, 2] = values[:, 1] + 0.1 * (-1.0) ** np.arange(100)
    assert largest_set(values, None, **SEED) == (1, 2)
    profile = bootstrap_profile(values, None, **SEED)
    assert profile.low[1] < profile.high[3], "unpaired intervals overlap"


def test_largest_set_without_a_block():
    values = np.random.default_rng(0).normal(size=(60, 4)) * 0.1 + np.array([5.0, 1.0, 1.0, 0.0])
    assert largest_set(values, None, **SEED) == (0,)
    assert largest_set(values, None, exclude=(0,), **SEED) == (1, 2)


def test_largest_set_respects_groups():
    # The groups disagree about which block is larger: certain for these items, open for further groups.
    values = 0.05 * np.random.default_rng(0).normal(size=(240, 2))
    values[:, 1] += np.array([1.0, -0.8, 0.9, -0.7, 0.8, -0.6, 0.9, -0.5])[np.arange(240) % 8]
    assert largest_set(values, None, **SEED) == (1,)
    assert largest_set(values, eight_groups(240), **SEED) == (0, 1)


def test_largest_set_of_equal_blocks_and_of_one_item():
    values = np.repeat(draw(20, 1), 3, axis=1)
    assert largest_set(values, None, **SEED) == (0, 1, 2)
    assert largest_set(values + np.array([0, 1e-15, 0]), None, **SEED) == (0, 1, 2)
    assert largest_set(draw(1, 4), None, exclude=(2,), **SEED) == (0, 1, 3)


def test_largest_set_refuses_what_has_no_largest():
    with pytest.raises(InputError, match="block 4, but the blocks are 0 to 3"):
        largest_set(draw(5, 4), None, exclude=(4,), **SEED)
    with pytest.raises(InputError, match="leave one block"):
        largest_set(draw(5, 2), None, exclude=(0, 1), **SEED)
    with pytest.raises(InputError, match="0 items"):
        largest_set(draw(0, 2), None, **SEED)


# Seeds


def test_t_interval_agrees_with_scipy():
    values = draw(9)
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    interval = t_interval(values)
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high))
    assert (interval.estimate, interval.n) == (pytest.approx(values.mean()), 9)
    assert t_interval(values, level=0.5).high < interval.high


def test_t_interval_needs_eight_seeds():
    with pytest.raises(InputError, match=r"over 7 seeds.*at least 8"):
        t_interval(draw(7))
    assert t_interval([0.1] * 8).low == 0.1
