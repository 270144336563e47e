"""Model-free distances: divergences of next-token distributions, CKA and angles of residual streams.

All divergences take log-probabilities, are computed in float64 and are in nats. They carry no gradient.
Temporaries are bounded by one slice of rows, so that `[1000, 262144]` inputs cost their own memory and little
more.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from tracer.errors import InputError

MAX_JSD = math.log(2)
"""The largest Jensen-Shannon divergence, in nats: that of distributions without a common token."""

MIN_CKA_ROWS = 50
MAX_CKA_ROWS = 512

# exp(-700) is 1e-304: nothing in a sum of probabilities, but a normal double, so that p log p needs no case
# for p = 0 (where -inf would give NaN) and never meets the slow subnormal numbers.
LOG_FLOOR = -700.0
# Elements of one temporary: small enough for the cache of a CPU, large enough to keep an accelerator busy.
CPU_SLICE = 1 << 17
DEVICE_SLICE = 1 << 26


@torch.no_grad()
def log_probs(logits: Float[Tensor, "*batch vocab"]) -> Float64[Tensor, "*batch vocab"]:
    """Log-softmax over the vocabulary in float64.

    Args:
        logits: `[..., vocab]` of any floating type; `-inf` is a token that cannot occur.

    Returns:
        `[..., vocab]` log-probabilities in nats.

    Raises:
        InputError: A row that holds NaN or +inf, or nothing but -inf.
    """
    log_p = torch.log_softmax(logits, dim=-1, dtype=torch.float64)
    # One bad entry makes the normaliser NaN, and with it every entry of its row.
    bad = log_p[..., 0].isnan()
    if bad.any():
        row = bad.flatten().nonzero()[0].item()
        raise InputError(
            f"{int(bad.sum())} of {bad.numel()} rows of logits (first: row {row}) hold NaN, +inf"
            " or nothing but -inf; pass finite logits, computed in a type that does not overflow"
        )
    return log_p


@torch.no_grad()
def js_divergence(
    log_p: Float[Tensor, "*#batch vocab"], log_q: Float[Tensor, "*#batch vocab"]
) -> Float64[Tensor, "..."]:
    """Jensen-Shannon divergence JSD(p, q) = KL(p||m) / 2 + KL(q||m) / 2 with m = (p + q) / 2.

    In nats, without a square root, between 0 and ln 2 (`MAX_JSD`), which is reached where p and q have no
    token in common. Symmetric in p and q.

    Args:
        log_p: `[..., vocab]` log-probabilities; `-inf` is allowed. Leading dimensions broadcast. A type below
            float64 is normalised anew in float64, because bfloat16 log-probabilities do not sum to one.
        log_q: `[..., vocab]`, likewise.

    Returns:
        `[...]` divergences.

    Raises:
        InputError: Rows that are not log-probabilities (their exponentials do not sum to one).

    Source: Lin (1991), "Divergence measures based on the Shannon entropy", IEEE Transactions on Information
    Theory 37.
    """
    jsd = _by_slice(_js_of_slice, _normalised(log_p), _normalised(log_q))
    # Each term of the sum is >= 0 by convexity, so anything beyond rounding is a fault of this function.
    assert not (jsd < -1e-9).any(), "JSD below 0"
    assert not (jsd > MAX_JSD + 1e-6).any(), "JSD above ln 2"
    return jsd.clamp_(0.0, MAX_JSD)


@torch.no_grad()
def kl_divergence(
    log_p: Float[Tensor, "*#batch vocab"], log_q: Float[Tensor, "*#batch vocab"]
) -> Float64[Tensor, "..."]:
    """Kullback-Leibler divergence KL(p||q) = sum of p (log p - log q), in nats.

    Args:
        log_p: `[..., vocab]` log-probabilities of the reference p, over which the mean is taken. Leading
            dimensions broadcast; types below float64 are normalised anew in float64.
        log_q: `[..., vocab]` log-probabilities of q.

    Returns:
        `[...]` divergences >= 0; `inf` where q is 0 and p is not. A token with p = 0 adds 0.

    Raises:
        InputError: Rows that are not log-probabilities.
    """
    kl = _by_slice(_kl_of_slice, _normalised(log_p), _normalised(log_q))
    assert not (kl < -1e-9).any(), "KL below 0"
    return kl.clamp_(min=0.0)


@torch.no_grad()
def entropy(log_p: Float[Tensor, "*batch vocab"]) -> Float64[Tensor, "*batch"]:
    """Shannon entropy, in nats, with 0 log 0 = 0.

    Args:
        log_p: `[..., vocab]` log-probabilities; types below float64 are normalised anew in float64.

    Returns:
        `[...]` entropies between 0 and ln(vocab).

    Raises:
        InputError: Rows that are not log-probabilities.
    """
    return _by_slice(_entropy_of_slice, _normalised(log_p)).clamp_(min=0.0)


@torch.no_grad()
def debiased_cka(x: Float[Tensor, "n d1"], y: Float[Tensor, "n d2"]) -> float | None:
    """Linear centred kernel alignment with the unbiased estimator of HSIC.

    1 for streams that agree up to rotation and scale, about 0 (also slightly negative) for independent ones.
    The usual, biased estimator reads 0.95 on independent noise where the dimension is large against n.

    Args:
        x: `[n, d1]` one row per prompt.
        y: `[n, d2]` the same prompts in the same order.

    Returns:
        The alignment, or `None` with fewer than 50 rows, or where x or y is the same for every prompt.

    Source: Nguyen, Raghu & Kornblith (2021), "Do Wide and Deep Networks Learn the Same Things?", section 3
    (arXiv 2010.15327); HSIC_1 of Song et al. (2012), "Feature Selection via Dependence Maximization", JMLR
    13; the U-centred form of Szekely & Rizzo (2014), "Partial distance correlation with methods for
    dissimilarities".
    """
    if x.shape[0] < MIN_CKA_ROWS:
        return None
    cosine = (_unit_gram(x) * _unit_gram(y)).sum().item()
    return None if math.isnan(cosine) else cosine


@torch.no_grad()
def cka_matrix(streams: Float[Tensor, "depths n d"]) -> Float64[Tensor, "depths depths"] | None:
    """`debiased_cka` between all depths, each Gram matrix computed once.

    Args:
        streams: `[depths, n, d]` residual streams of the same n prompts.

    Returns:
        `[depths, depths]`, symmetric, 1 on the diagonal; `None` with fewer than 50 prompts. A depth where the
        stream is the same for every prompt (the embedding of a shared last token) has no CKA: its row and
        column, diagonal included, are NaN, to be stored as null.

    Raises:
        InputError: More than 512 prompts, whose Gram matrices would not fit beside a model.
    """
    n = streams.shape[1]
    if n < MIN_CKA_ROWS:
        return None
    if n > MAX_CKA_ROWS:
        raise InputError(f"CKA between depths got {n} prompts; pass a seeded sample of at most {MAX_CKA_ROWS}")
    grams = torch.stack([_unit_gram(stream).flatten() for stream in streams])
    return grams @ grams.T


@torch.no_grad()
def angular_distance(
    x: Float[Tensor, "*#batch d_model"], y: Float[Tensor, "*#batch d_model"]
) -> Float64[Tensor, "..."]:
    """Angle between two vectors in units of pi: arccos(cosine similarity) / pi.

    0 for the same direction, 0.5 for orthogonal vectors, 1 for opposite ones. A zero vector has no direction:
    0.5 against any other vector, 0 against another zero vector.

    Args:
        x: `[..., d_model]`; leading dimensions broadcast.
        y: `[..., d_model]`.

    Returns:
        `[...]` distances between 0 and 1.

    Source: Gromov et al. (2024), "The Unreasonable Ineffectiveness of the Deeper Layers", section 3
    (arXiv 2403.17887).
    """
    u, v = _direction(x), _direction(y)
    # arccos loses half of the digits near 0, where consecutive depths lie; this form of the angle does not.
    return 2 * torch.atan2((u - v).norm(dim=-1), (u + v).norm(dim=-1)) / math.pi


def _normalised(log_p: Tensor) -> Tensor:
    return log_p if log_p.dtype == torch.float64 else log_probs(log_p)


def _by_slice(reduce_vocab: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """Reduce the last dimension of broadcast `[..., vocab]` tensors, a slice of rows at a time."""
    batch = torch.broadcast_shapes(*(tensor.shape[:-1] for tensor in rows))
    rows = tuple(tensor[(None,) * (len(batch) + 1 - tensor.ndim)] for tensor in rows)
    out = torch.empty(batch, dtype=torch.float64, device=rows[0].device)
    _fill(out, reduce_vocab, rows)
    return out


def _fill(out: Tensor, reduce_vocab: Callable[..., Tensor], rows: tuple[Tensor, ...]) -> None:
    limit = CPU_SLICE * torch.get_num_threads() if out.device.type == "cpu" else DEVICE_SLICE
    elements = out.numel() * rows[0].shape[-1]
    if out.ndim == 0 or elements <= limit:
        out.copy_(reduce_vocab(*rows))
        return
    step = limit * len(out) // elements
    for start in range(0, len(out), max(step, 1)):
        # A dimension of size 1 stays as it is: a clean row is then exponentiated once for all its variants.
        if step:
            part = slice(start, start + step)
            _fill(out[part], reduce_vocab, tuple(t if len(t) == 1 else t[part] for t in rows))
        else:
            _fill(out[start], reduce_vocab, tuple(t[0] if len(t) == 1 else t[start] for t in rows))


def _probabilities(log_p: Tensor) -> Tensor:
    """exp(log p); refuses rows that are not distributions."""
    p = log_p.exp()
    mass = p.sum(dim=-1)
    # Written so that NaN fails too.
    wrong = ~((mass - 1).abs() <= 1e-6)
    if wrong.any():
        raise InputError(
            f"a row of log-probabilities sums to {mass[wrong].flatten()[0].item():.6g} instead of 1;"
            " pass log_probs(logits)"
        )
    return p


def _js_of_slice(log_p: Tensor, log_q: Tensor) -> Tensor:
    log_p, log_q = log_p.clamp(min=LOG_FLOOR), log_q.clamp(min=LOG_FLOOR)
    p, q = _probabilities(log_p), _probabilities(log_q)
    negative_entropies = torch.linalg.vecdot(p, log_p) + torch.linalg.vecdot(q, log_q)
    mixture = (p + q).mul_(0.5)
    return 0.5 * negative_entropies - torch.linalg.vecdot(mixture, mixture.log())


def _kl_of_slice(log_p: Tensor, log_q: Tensor) -> Tensor:
    _probabilities(log_q)
    # The floor keeps log p finite, so that only log q can make a term infinite, as it should where p > 0.
    finite_log_p = log_p.clamp(min=LOG_FLOOR)
    terms = _probabilities(finite_log_p) * (finite_log_p - log_q)
    return terms.masked_fill_(log_p == -math.inf, 0.0).sum(dim=-1)


def _entropy_of_slice(log_p: Tensor) -> Tensor:
    return -torch.linalg.vecdot(_probabilities(log_p), log_p.clamp(min=LOG_FLOOR))


def _unit_gram(x: Tensor) -> Tensor:
    """`[n, n]` U-centred Gram matrix of the rows, of norm 1; NaN where all rows are equal up to rounding.

    The scalar product of two U-centred Gram matrices is n (n - 3) times the unbiased HSIC, so that of two
    unit ones is the debiased CKA.
    """
    x = x.to(torch.float64)
    n = x.shape[0]
    largest = x.abs().amax(dim=0)
    # U-centring is blind to a shift of all rows; removing it first keeps the digits that the shift would
    # take.
    x = x - x.mean(dim=0)
    if (x.abs().amax(dim=0) <= 1e-6 * largest).all():
        return torch.full((n, n), math.nan, dtype=torch.float64, device=x.device)
    gram = (x @ x.T).fill_diagonal_(0.0)
    rows = gram.sum(dim=0) / (n - 2)
    gram += rows.sum() / (n - 1) - rows[:, None] - rows[None, :]
    gram.fill_diagonal_(0.0)
    return gram / gram.norm()


def _direction(x: Tensor) -> Tensor:
    x = x.to(torch.float64)
    norm = x.norm(dim=-1, keepdim=True)
    return x / norm.masked_fill(norm == 0, 1.0)
