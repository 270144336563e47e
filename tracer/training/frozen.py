"""Proof that what a plan freezes stays as it is, bit by bit."""

import hashlib
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from tracer.errors import TrainingStopped


def frozen_digests(model: nn.Module, trained: Collection[str]) -> dict[str, str]:
    """SHA-256 of every parameter and buffer of a model that is not trained, by name.

    Args:
        model: whole, on any device; not yet sharded.
        trained: names of the trained parameters.
    """
    learned = {parameter.data_ptr() for name, parameter in model.named_parameters() if name in trained}
    return {
        name: digest(tensor)
        for name, tensor in model.state_dict().items()
        if name not in trained and not (tensor.numel() and tensor.data_ptr() in learned)  # a tied head is trained
    }


def digest(tensor: Tensor) -> str:
    """SHA-256 of shape, dtype and bytes."""
    data = tensor.detach().cpu().contiguous()
    head = f"{tuple(data.shape)} {data.dtype} ".encode()
    return hashlib.sha256(head + data.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def check_unchanged(before: Mapping[str, str], after: nn.Module) -> None:
    """Compare frozen tensors with what they were.

    Raises:
        TrainingStopped: one has changed or is gone; nothing that a caller could do makes such a model right.
    """
    state = after.state_dict()
    moved = [name for name, known in before.items() if name not in state or digest(state[name]) != known]
    if moved:
        raise TrainingStopped(
            f"{len(moved)} frozen tensors have changed in training ({', '.join(moved[:3])}): the model was not saved"
        )
