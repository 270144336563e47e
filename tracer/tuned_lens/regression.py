"""Ridge regression from the residual at one depth to what is still added to it, from sums over the positions."""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Float64
from torch import Tensor

RIDGES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Penalties that are tried, for inputs of unit variance."""

_TINY = 1e-30


class Moments:
    """Sums over positions, in float64, that the regression follows from; memory `2 d^2` numbers.

    Positions count by the inverse square of the length of the last residual: a final norm divides by that length, so
    that it is the relative error that reaches the logits.
    """

    def __init__(self, width: int, device: torch.device):
        self._count = 0.0
        self._h, self._y = (torch.zeros(width, dtype=torch.float64, device=device) for _ in range(2))
        self._hh, self._hy = (torch.zeros(width, width, dtype=torch.float64, device=device) for _ in range(2))

    def add(self, h: Float[Tensor, "positions d"], last: Float[Tensor, "positions d"]) -> None:
        """Add positions.

        Args:
            h: `[positions, d]` the residual at this depth.
            last: `[positions, d]` the residual at the last depth.
        """
        h, last = h.double(), last.double()
        y, counts = last - h, relative(last)
        weighted = counts[:, None] * h
        self._count += counts.sum().item()
        self._h += weighted.sum(0)
        self._y += counts @ y
        self._hh += weighted.T @ h
        self._hy += weighted.T @ y

    @property
    def mean(self) -> Float64[Tensor, " d"]:
        """`[d]` mean of the inputs."""
        return self._h / self._count

    @property
    def scale(self) -> Float64[Tensor, " d"]:
        """`[d]` standard deviation of the inputs; of dimensions that hardly vary a small number, not 0."""
        deviation = (self._hh.diagonal() / self._count - self.mean**2).clamp_min(0).sqrt()
        return deviation.clamp_min(1e-4 * deviation.square().mean().sqrt()).clamp_min(_TINY)

    def solutions(self) -> Iterator[tuple[float, Float64[Tensor, "d d"], Float64[Tensor, " d"]]]:
        """For every penalty the map `y = weight h + bias`, as (penalty, weight, bias)."""
        mean, scale, mean_y = self.mean, self.scale, self._y / self._count
        covariance = (self._hh / self._count - torch.outer(mean, mean)) / torch.outer(scale, scale)
        across = (self._hy / self._count - torch.outer(mean, mean_y)) / scale[:, None]
        values, vectors = torch.linalg.eigh(covariance)
        turned = vectors.T @ across
        for ridge in RIDGES:
            weight = ((vectors / (values.clamp_min(0) + ridge)) @ turned / scale[:, None]).T
            yield ridge, weight, mean_y - weight @ mean


def relative(last: Float[Tensor, "positions d"]) -> Float[Tensor, " positions"]:
    """What each position counts: the inverse square of its length."""
    return last.square().sum(1).clamp_min(_TINY).reciprocal()
