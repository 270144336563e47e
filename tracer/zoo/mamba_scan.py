"""Mamba-1's recurrence for training on a CPU: the loop of transformers without its quadratic backward.

transformers takes step t out of a tensor of all steps, `x[:, :, t]`, in every step; its backward makes a tensor of all
steps for each, which is quadratic in length. Taking all steps out at once (`unbind`) has a linear backward and the
same maths.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.mamba import modeling_mamba


def selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    delta_bias: Tensor,
    delta_softplus: bool,
    return_last_state: bool = False,
    **unused: Any,
) -> Tensor:
    """What `transformers.models.mamba.modeling_mamba.mamba_selective_scan` returns in training.

    Args:
        hidden_states: `[batch, d_inner, pos]`.
        dt: `[batch, d_inner, pos]` Step sizes before bias and softplus.
        A: `[d_inner, d_state]`.
        B: `[batch, d_state, pos]`.
        C: `[batch, d_state, pos]`.
        D: `[d_inner]`.
        z: `[batch, d_inner, pos]` Gate.
        delta_bias: `[d_inner]`.
        delta_softplus: Must be true.
        return_last_state: Must be false.
        unused: Switches between implementations.
    """
    assert delta_softplus
    assert not return_last_state
    dt = nn.functional.softplus(dt + delta_bias[:, None])
    decay = torch.exp(A[:, None] * dt[..., None])  # [batch, d_inner, pos, d_state]
    added = (dt * hidden_states)[..., None] * B.transpose(1, 2)[:, None]
    state = torch.zeros_like(added[:, :, 0])
    states = []
    for kept, new in zip(decay.unbind(2), added.unbind(2), strict=True):
        state = kept * state + new
        states.append(state)
    read = torch.einsum("bdln,bnl->bdl", torch.stack(states, dim=2), C)
    return (read + hidden_states * D[:, None]) * nn.functional.silu(z)


@contextmanager
def linear_backward() -> Iterator[None]:
    """Train Mamba-1 inside with `selective_scan`."""
    original = modeling_mamba.mamba_selective_scan
    modeling_mamba.mamba_selective_scan = selective_scan
    try:
        yield
    finally:
        modeling_mamba.mamba_selective_scan = original
