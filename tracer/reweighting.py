"""A block run with other weights than its own, which come back bit by bit."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tracer.errors import InputError
from tracer.statistics import rng


@contextmanager
def reweighted(block: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Run with these weights of a block inside; its parameters stay the same objects in the same memory.

    Args:
        block: the block.
        weights: by the names that the parameters have in it; the others are left alone.
    """
    parameters = dict(block.named_parameters())
    own = {name: parameters[name].detach().clone() for name in weights}
    try:
        with torch.no_grad():
            for name, tensor in weights.items():
                parameters[name].copy_(tensor)
        yield
    finally:
        with torch.no_grad():
            for name, tensor in own.items():
                parameters[name].copy_(tensor)


def perturbation(block: nn.Module, scale: float, seed: int, *label: object) -> dict[str, Tensor]:
    """Every weight matrix of a block plus Gaussian noise whose norm is about `scale` times that of the matrix.

    Vectors (norms, biases, decays) are left alone.

    Args:
        block: the block.
        scale: norm of the noise as a share of the matrix's Frobenius norm.
        seed: of the noise.
        label: what the noise is for; the same seed and label give the same noise.

    Raises:
        InputError: the weights are not at hand, or are quantised.
    """
    perturbed: dict[str, Tensor] = {}
    for name, parameter in block.named_parameters():
        if parameter.dim() < 2:
            continue
        if parameter.is_meta or not parameter.is_floating_point():
            raise InputError(
                f"the weights of {type(block).__name__} are offloaded or quantised, so they cannot be perturbed: open "
                "the model without device_map or quantisation"
            )
        generator = torch.Generator().manual_seed(int(rng(seed, *label, name).integers(2**62)))
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        size = scale * parameter.detach().float().norm() / parameter.numel() ** 0.5
        perturbed[name] = (parameter.detach().float() + size * noise).to(parameter.dtype)
    return perturbed
