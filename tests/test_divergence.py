import math
import time

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon
from scipy.stats import entropy as scipy_entropy

from tracer import divergence
from tracer.divergence import (
    MAX_JSD,
    angular_distance,
    cka_matrix,
    debiased_cka,
    entropy,
    js_divergence,
    kl_divergence,
    log_probs,
)
from tracer.errors import InputError

INF = math.inf


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def pairs() -> tuple[torch.Tensor, torch.Tensor]:
    """200 pairs of sharp 50-way distributions, as float64 log-probabilities."""
    logits = torch.randn(2, 200, 50, generator=generator(), dtype=torch.float64) * 6
    return log_probs(logits[0]), log_probs(logits[1])


# log_probs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_log_probs_are_float64_and_normalised_for_every_floating_type(dtype):
    log_p = log_probs(torch.randn(3, 4, 1000, generator=generator()).to(dtype))
    assert log_p.dtype == torch.float64
    torch.testing.assert_close(log_p.exp().sum(-1), torch.ones(3, 4, dtype=torch.float64), atol=1e-12, rtol=0)


def test_log_probs_keep_impossible_tokens():
    log_p = log_probs(torch.tensor([0.0, -INF, 0.0]))
    assert log_p.tolist() == [-math.log(2), -INF, -math.log(2)]


@pytest.mark.parametrize("column", [0, 17, 99])
@pytest.mark.parametrize("value", [math.nan, INF])
def test_log_probs_refuse_one_bad_entry_and_name_its_row(value, column):
    logits = torch.randn(5, 100, generator=generator())
    logits[3, column] = value
    with pytest.raises(InputError, match=r"1 of 5 rows.*first: row 3"):
        log_probs(logits)


def test_log_probs_refuse_a_row_without_a_possible_token():
    with pytest.raises(InputError, match="nothing but -inf"):
        log_probs(torch.full((64,), -INF))


# Jensen-Shannon divergence


def test_jsd_equals_scipy(pairs):
    expected = [jensenshannon(p, q) ** 2 for p, q in zip(pairs[0].exp().numpy(), pairs[1].exp().numpy(), strict=True)]
    np.testing.assert_allclose(js_divergence(*pairs).numpy(), expected, atol=1e-9, rtol=0)


def test_jsd_stays_below_ln_2_where_swapped_arguments_do_not(pairs):
    p, q = pairs
    jsd = js_divergence(p, q)
    log_m = torch.logaddexp(p, q) - math.log(2)
    # kl_div(input, target) is KL(target || input): with the arguments swapped it is KL(m || p).
    swapped = 0.5 * (
        torch.nn.functional.kl_div(p, log_m, log_target=True, reduction="none").sum(-1)
        + torch.nn.functional.kl_div(q, log_m, log_target=True, reduction="none").sum(-1)
    )
    assert swapped.max() > 5
    assert jsd.min() > 0.01
    assert jsd.max() < MAX_JSD
    assert not torch.allclose(jsd, swapped, rtol=0.1)


def test_jsd_is_symmetric(pairs):
    torch.testing.assert_close(js_divergence(*pairs), js_divergence(*pairs[::-1]), atol=1e-15, rtol=0)


def test_jsd_of_distributions_without_a_common_token_is_exactly_ln_2():
    one_hot = torch.full((2, 50), -INF)
    one_hot[0, 3] = one_hot[1, 4] = 0.0
    assert js_divergence(log_probs(one_hot[0]), log_probs(one_hot[1])).item() == math.log(2)
    halves = torch.full((2, 10), -INF)
    halves[0, :5] = halves[1, 5:] = 0.0
    assert js_divergence(log_probs(halves[0]), log_probs(halves[1])).item() == pytest.approx(MAX_JSD, abs=1e-15)


def test_jsd_of_nearly_equal_float32_logits_is_never_negative():
    base = torch.randn(50_000, generator=generator()) * 3
    noise = torch.randn(41, 50_000, generator=generator(1)) * torch.logspace(-9, -4, 41)[:, None]
    jsd = js_divergence(log_probs(base), log_probs(base + noise))
    assert (jsd >= 0).all()
    assert jsd.max() < 1e-7
    # The same numbers in float32 are where negative divergences come from.
    p, q = base.softmax(-1), (base + noise).softmax(-1)
    m = (p + q) / 2
    naive = 0.5 * ((p * (p / m).log()).sum(-1) + (q * (q / m).log()).sum(-1))
    assert (naive < 0).any()


def test_jsd_with_a_distribution_itself_is_zero(pairs):
    torch.testing.assert_close(
        js_divergence(pairs[0], pairs[0]), torch.zeros(200, dtype=torch.float64), atol=1e-15, rtol=0
    )


def test_jsd_is_finite_and_right_with_impossible_tokens():
    logits = torch.randn(2, 30, 40, generator=generator(), dtype=torch.float64)
    logits[torch.rand(logits.shape, generator=generator(1)) < 0.4] = -INF
    log_p, log_q = log_probs(logits[0]), log_probs(logits[1])
    expected = [jensenshannon(p, q) ** 2 for p, q in zip(log_p.exp().numpy(), log_q.exp().numpy(), strict=True)]
    np.testing.assert_allclose(js_divergence(log_p, log_q).numpy(), expected, atol=1e-12, rtol=0)


def test_jsd_broadcasts_a_clean_row_over_its_variants():
    clean = log_probs(torch.randn(4, 1, 30, generator=generator()))
    variants = log_probs(torch.randn(4, 6, 30, generator=generator(1)))
    jsd = js_divergence(clean, variants)
    assert jsd.shape == (4, 6)
    for probe in range(4):
        for variant in range(6):
            alone = js_divergence(variants[probe, variant], clean[probe, 0])
            assert jsd[probe, variant].item() == pytest.approx(alone.item(), abs=1e-14)


@pytest.mark.parametrize("limit", [1, 70, 400, 2000])
@pytest.mark.parametrize("shapes", [((5, 7), (5, 7)), ((5, 1), (5, 7)), ((1, 7), (5, 1)), ((7,), (5, 7))])
def test_slices_do_not_change_the_result(monkeypatch, limit, shapes):
    log_p, log_q = (log_probs(torch.randn(*s, 33, generator=generator(len(s)))) for s in shapes)
    whole = js_divergence(log_p, log_q), kl_divergence(log_p, log_q), entropy(log_p)
    monkeypatch.setattr(divergence, "CPU_SLICE", limit)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    sliced = js_divergence(log_p, log_q), kl_divergence(log_p, log_q), entropy(log_p)
    torch.testing.assert_close(sliced, whole, atol=1e-14, rtol=0)


def test_jsd_accepts_bfloat16_log_probabilities():
    logits = torch.randn(2, 64, generator=generator())
    exact = js_divergence(log_probs(logits[0]), log_probs(logits[1]))
    rounded = js_divergence(*logits.log_softmax(-1).bfloat16())
    assert rounded.dtype == torch.float64
    assert rounded.item() == pytest.approx(exact.item(), rel=0.05)


@pytest.mark.parametrize("measure", [js_divergence, kl_divergence])
def test_logits_in_place_of_log_probabilities_are_refused(measure):
    logits = torch.randn(3, 40, generator=generator(), dtype=torch.float64)
    with pytest.raises(InputError, match=r"instead of 1; pass log_probs\(logits\)"):
        measure(log_probs(logits), logits)
    with pytest.raises(InputError, match="instead of 1"):
        measure(log_probs(logits) * math.nan, log_probs(logits))


@pytest.mark.parametrize("measure", [js_divergence, kl_divergence])
def test_two_vocabularies_are_a_type_error(measure):
    with pytest.raises(TypeError):
        measure(log_probs(torch.zeros(64)), log_probs(torch.zeros(63)))


def test_integer_logits_are_a_type_error():
    with pytest.raises(TypeError):
        log_probs(torch.zeros(64, dtype=torch.int64))


def test_a_thousand_small_calls_take_less_than_a_second():
    log_p = log_probs(torch.randn(64, generator=generator()))
    js_divergence(log_p, log_p)
    start = time.process_time()
    for _ in range(1000):
        js_divergence(log_p, log_p)
    assert time.process_time() - start < 1


def test_results_carry_no_gradient():
    logits = torch.zeros(4, 8, requires_grad=True)
    assert not log_probs(logits).requires_grad
    assert not js_divergence(log_probs(logits), logits).requires_grad


# Kullback-Leibler divergence and entropy


def test_kl_equals_scipy_in_this_direction(pairs):
    expected = scipy_entropy(pairs[0].exp().numpy(), pairs[1].exp().numpy(), axis=-1)
    np.testing.assert_allclose(kl_divergence(*pairs).numpy(), expected, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(kl_divergence(*pairs), kl_divergence(*pairs[::-1]), rtol=0.1)


def test_kl_with_impossible_tokens():
    some = log_probs(torch.tensor([0.0, 0.0, -INF]))
    every = log_probs(torch.zeros(3))
    assert kl_divergence(some, every).item() == pytest.approx(math.log(3 / 2))
    assert kl_divergence(every, some).item() == INF
    assert kl_divergence(some, some).item() == 0
    # p underflows to 0 but is not 0: the divergence is infinite, not NaN.
    tiny = torch.tensor([0.0, -800.0], dtype=torch.float64)
    assert kl_divergence(tiny, torch.tensor([0.0, -INF], dtype=torch.float64)).item() == INF


def test_entropy_equals_scipy_and_knows_its_ends(pairs):
    expected = scipy_entropy(pairs[0].exp().numpy(), axis=-1)
    np.testing.assert_allclose(entropy(pairs[0]).numpy(), expected, atol=1e-12, rtol=0)
    assert entropy(log_probs(torch.zeros(49152))).item() == pytest.approx(math.log(49152))
    assert entropy(log_probs(torch.tensor([0.0, -INF, -INF]))).item() == 0


# Debiased CKA


def unbiased_hsic(k: np.ndarray, m: np.ndarray) -> float:
    """HSIC_1 of Song et al. (2012), equation 5, written term by term."""
    n = len(k)
    k, m = k - np.diag(np.diag(k)), m - np.diag(np.diag(m))
    one = np.ones(n)
    terms = np.trace(k @ m) + (one @ k @ one) * (one @ m @ one) / ((n - 1) * (n - 2))
    return (terms - 2 / (n - 2) * (one @ k @ m @ one)) / (n * (n - 3))


def test_cka_follows_the_unbiased_estimator():
    x = torch.randn(60, 20, generator=generator(), dtype=torch.float64)
    y = x[:, :7] + torch.randn(60, 7, generator=generator(1), dtype=torch.float64) + 5
    k, m = (x @ x.T).numpy(), (y @ y.T).numpy()
    expected = unbiased_hsic(k, m) / math.sqrt(unbiased_hsic(k, k) * unbiased_hsic(m, m))
    assert 0.1 < expected < 0.9
    assert debiased_cka(x, y) == pytest.approx(expected, abs=1e-10)


def test_cka_of_independent_noise_is_near_zero_where_the_biased_one_is_not():
    x, y = torch.randn(2, 60, 576, generator=generator(), dtype=torch.float64)
    assert abs(debiased_cka(x, y)) < 0.05
    x, y = x - x.mean(0), y - y.mean(0)
    biased = (x.T @ y).norm() ** 2 / ((x.T @ x).norm() * (y.T @ y).norm())
    assert biased > 0.8


def test_cka_is_one_with_itself_and_blind_to_rotation_scale_and_shift():
    x, y = torch.randn(2, 80, 32, generator=generator())
    y = y + 0.7 * x
    rotation = torch.linalg.qr(torch.randn(32, 32, generator=generator(1)))[0]
    moved = 3.7 * x @ rotation + 100 * torch.randn(32, generator=generator(2))
    assert debiased_cka(x, x) == pytest.approx(1, abs=1e-9)
    assert debiased_cka(x, moved) == pytest.approx(1, abs=1e-6)
    assert debiased_cka(moved, y) == pytest.approx(debiased_cka(x, y), abs=1e-6)
    assert debiased_cka(x[torch.randperm(80, generator=generator(3))], x) < 0.3


def test_cka_needs_fifty_rows():
    x = torch.randn(50, 8, generator=generator())
    assert debiased_cka(x, x) is not None
    assert debiased_cka(x[:49], x[:49]) is None
    assert cka_matrix(x[None, :49]) is None


def test_cka_matrix_holds_the_pairwise_values():
    streams = torch.randn(4, 64, 16, generator=generator()).cumsum(0)
    matrix = cka_matrix(streams)
    torch.testing.assert_close(matrix, matrix.T)
    for first in range(4):
        for second in range(4):
            pair = debiased_cka(streams[first], streams[second])
            assert matrix[first, second].item() == pytest.approx(pair, abs=1e-9)
    assert matrix[0, 1] > matrix[0, 3]


def test_cka_of_a_depth_that_is_the_same_for_all_prompts_is_undefined():
    streams = torch.randn(3, 64, 16, generator=generator())
    streams[0] = streams[0, :1]
    assert debiased_cka(streams[0], streams[1]) is None
    matrix = cka_matrix(streams)
    assert matrix[0].isnan().all()
    assert matrix[:, 0].isnan().all()
    assert not matrix[1:, 1:].isnan().any()


def test_cka_matrix_refuses_more_prompts_than_it_is_made_for():
    with pytest.raises(InputError, match="513 prompts; pass a seeded sample of at most 512"):
        cka_matrix(torch.zeros(2, 513, 4))


# Angular distance


def test_angular_distance_of_known_angles():
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [2.0, 2.0]])
    y = torch.tensor([[0.0, 3.0], [-5.0, 0.0], [1.0, 1.0], [2.0, 2.0]])
    torch.testing.assert_close(
        angular_distance(x, y), torch.tensor([0.5, 1.0, 0.25, 0.0], dtype=torch.float64), atol=1e-15, rtol=0
    )


def test_angular_distance_equals_arccos_and_keeps_small_angles():
    x, y = torch.randn(2, 3, 5, 64, generator=generator(), dtype=torch.float64)
    cosine = torch.nn.functional.cosine_similarity(x, y, dim=-1)
    torch.testing.assert_close(angular_distance(x, y), cosine.arccos() / math.pi)
    angle = 1e-10
    nearly = torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)
    start = torch.tensor([1.0, 0.0], dtype=torch.float64)
    assert angular_distance(start, nearly).item() == pytest.approx(angle / math.pi, rel=1e-6)


def test_angular_distance_at_zero_vectors():
    zero, other = torch.zeros(4), torch.ones(4)
    assert angular_distance(zero, other).item() == 0.5
    assert angular_distance(zero, zero).item() == 0
