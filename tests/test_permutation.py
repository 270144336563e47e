import itertools

import numpy as np
import pytest
from scipy import stats

from tracer.errors import InputError
from tracer.permutation import null_band, permutation_test

SEED = {"seed": 0, "label": "test"}


def test_studentisation_uses_the_exact_permutation_moments():
    generator = np.random.default_rng(0)
    log_p = np.log(generator.uniform(size=(3, 6, 4)))
    own = np.array([0, 1, 2, 3, 0, 1])
    every = np.array(
        [log_p[:, np.arange(6), own[list(order)]].mean(axis=1) for order in itertools.permutations(range(6))]
    )
    result = permutation_test(log_p, own, **SEED, n_permutations=4000)
    expected = (every[0] - every.mean(axis=0)) / every.std(axis=0)
    np.testing.assert_allclose(result.statistic, expected, atol=1e-9)
    assert result.depth == int(expected.argmax())
    largest = ((every - every.mean(axis=0)) / every.std(axis=0)).max(axis=1)
    assert result.p_value == pytest.approx((largest >= largest[0] - 1e-9).mean(), abs=0.03)


def test_a_model_that_always_gives_the_same_answer_has_p_1():
    row = np.log(np.random.default_rng(0).dirichlet(np.ones(4), size=(5, 1)))
    own = np.arange(40) % 4
    result = permutation_test(np.repeat(row, 40, axis=1), own, **SEED)
    assert result.p_value == 1
    assert result.depth is None
    assert (result.statistic == 0).all()
    # The same in float32, where two batches round differently.
    noise = 1e-6 * np.random.default_rng(1).normal(size=(5, 40, 4))
    assert permutation_test(np.minimum(np.repeat(row, 40, axis=1) + noise, 0), own, **SEED).p_value == 1


def test_one_target_or_one_item_cannot_be_significant():
    log_p = np.log(np.random.default_rng(0).uniform(size=(3, 10, 2)))
    assert permutation_test(log_p, np.zeros(10, dtype=int), **SEED).p_value == 1
    assert permutation_test(log_p[:, :1], np.zeros(1, dtype=int), **SEED).p_value == 1


def test_a_model_that_knows_its_targets_is_found_at_its_depth():
    log_p = np.log(np.random.default_rng(0).uniform(0.2, 1, size=(6, 20, 5)))
    own = np.arange(20) % 5
    log_p[4, np.arange(20), own] += 3
    log_p[4] -= 4
    result = permutation_test(log_p, own, **SEED)
    assert result.depth == 4
    assert result.p_value == pytest.approx(1 / 2001)
    assert (result.n, result.n_permutations) == (20, 2000)


def null_p_values(simulations: int) -> np.ndarray:
    p_values = []
    for simulation in range(simulations):
        generator = np.random.default_rng(simulation)
        # A liking for some targets, correlated depths, unequal prompts: everything but knowledge.
        log_p = generator.normal(size=(1, 1, 4)) + generator.normal(size=(1, 15, 1)) - 20
        log_p = log_p + generator.standard_t(3, size=(6, 15, 4)).cumsum(axis=0) * 0.3
        own = generator.integers(4, size=15)
        test = permutation_test(np.minimum(log_p, 0), own, seed=simulation, label="null", n_permutations=199)
        p_values.append(test.p_value)
    return np.array(p_values)


def test_the_group_test_is_calibrated_under_the_null():
    p_values = null_p_values(600)
    for alpha in (0.05, 0.2, 0.5):
        rejections = int((p_values <= alpha).sum())
        low, high = stats.binom.interval(0.998, 600, alpha)
        assert low <= rejections <= high, f"{rejections} of 600 at {alpha}"


def test_impossible_targets_do_not_make_nan():
    log_p = np.log(np.random.default_rng(0).uniform(size=(3, 12, 4)))
    log_p[1, 3, 2] = log_p[2, 5] = -np.inf
    result = permutation_test(log_p, np.arange(12) % 4, **SEED)
    assert np.isfinite(result.statistic).all()
    assert 0 < result.p_value <= 1


def test_the_group_test_refuses_what_it_cannot_read():
    log_p = np.log(np.random.default_rng(0).uniform(size=(3, 12, 4)))
    own = np.arange(12) % 4
    with pytest.raises(InputError, match="pass log-probabilities, not probabilities"):
        permutation_test(np.exp(log_p), own, **SEED)
    with pytest.raises(InputError, match="span 0 to 4; pass indices 0 to 3"):
        permutation_test(log_p, np.arange(12) % 5, **SEED)
    with pytest.raises(InputError, match="36 of 144 probabilities are NaN"):
        permutation_test(np.where(np.arange(4) == 0, np.nan, log_p), own, **SEED)
    with pytest.raises(InputError, match="one item or more"):
        permutation_test(log_p[:, :0], own[:0], **SEED)
    with pytest.raises(TypeError):
        permutation_test(log_p, own[:-1], **SEED)


# Null band


def test_null_band_is_the_range_over_targets_of_others():
    p = np.random.default_rng(0).uniform(size=(3, 9, 4))
    own = np.array([0, 1, 2, 3, 0, 0, 1, 2, 2])
    low, high = null_band(p, own)
    for depth in range(3):
        foreign = [p[depth, item, target] for item in range(9) for target in range(4) if target != own[item]]
        assert low[depth] == pytest.approx(np.percentile(foreign, 5))
        assert high[depth] == pytest.approx(np.percentile(foreign, 95))


def test_null_band_ignores_the_own_target_and_knows_when_there_is_no_other():
    p = np.full((2, 6, 3), 0.1)
    own = np.arange(6) % 3
    p[:, np.arange(6), own] = 0.9
    low, high = null_band(p, own)
    assert low.tolist() == high.tolist() == [0.1, 0.1]
    assert null_band(p[..., :1], np.zeros(6, dtype=int)) is None


def test_null_band_of_log_probabilities_has_no_nan():
    log_p = np.full((1, 4, 4), -np.inf)
    log_p[:, :, 0] = 0.0
    low, high = null_band(log_p, np.arange(4))
    assert np.isfinite(low).all()
    assert np.isfinite(high).all()
