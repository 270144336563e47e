"""The Hugging Face Trainer with the few things that a freeze plan asks of it; the loop is its own."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from tracer.errors import TrainingStopped

UNDECAYED = ("A_log", "D", "dt_bias")
"""Parameters of recurrent mixers that are rates, not weights; weight decay would pull the rates to fixed values."""


class PlannedTrainer(Trainer):
    """Trains what requires a gradient, without decaying what is no weight matrix, and stops at the first NaN."""

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Parameters that weight decay applies to: matrices, but no norms, biases, or rates of recurrences."""
        sizes = {name: parameter.dim() for name, parameter in model.named_parameters()}
        return [
            name
            for name in super().get_decay_parameter_names(model)
            if sizes.get(name, 2) >= 2 and name.rpartition(".")[2] not in UNDECAYED
        ]

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """One forward and backward.

        Raises:
            TrainingStopped: the loss is not finite; the weights are those of the last step.
        """
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not torch.isfinite(loss).all():
            raise TrainingStopped(f"the loss is {loss.item()} at step {self.state.global_step + 1}")
        return loss


def perplexity(loss: float) -> float:
    """The exponential of a loss in nats a token; infinite where it leaves the range of numbers."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
