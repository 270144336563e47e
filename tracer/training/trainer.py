"""The Hugging Face Trainer with the few things that a freeze plan asks of it; the loop is its own."""

import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import EvalPrediction, Trainer

from tracer.errors import Diverged
from tracer.evaluation.texts import perplexity
from tracer.models.cache import one_line
from tracer.training.packing import IGNORED

UNDECAYED = ("A_log", "D", "dt_bias")
"""Parameters of recurrent mixers that are rates, not weights; weight decay would pull the rates to fixed values."""


class CheckpointError(OSError):
    """A checkpoint could not be written."""


class PlannedTrainer(Trainer):
    """Trains what requires a gradient, without decaying what is no weight matrix, and stops at the first NaN.

    What it logs, to `report_to` as well, holds the seconds of training, the bytes seen, and of each measured text the
    loss, perplexity and bits a byte.

    Args:
        bytes_per_token: of the training text.
        measured: bytes a token of each text that is measured, by name.
    """

    def __init__(self, *args: Any, bytes_per_token: float, measured: Mapping[str, float], **kwargs: Any):
        self.bytes_per_token = bytes_per_token
        self.measured = measured
        self._began = time.perf_counter()
        self._earlier: float | None = None
        kwargs |= {"preprocess_logits_for_metrics": window_losses, "compute_metrics": mean_token_loss}
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Also shards over processes on CPUs, where accelerate by itself would run DDP whatever the settings say."""
        state = PartialState()
        on_cpus = bool(self.args.fsdp) and state.distributed_type is DistributedType.MULTI_CPU
        then = state.distributed_type
        if on_cpus:  # it looks for sharding only among what it takes for accelerators
            state.distributed_type = DistributedType.MULTI_GPU
        try:
            super().create_accelerator_and_postprocess()
            then = DistributedType.FSDP if on_cpus else state.distributed_type
        finally:
            state.distributed_type = then

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's, by the clock."""
        self._began = time.perf_counter()
        return super().train(*args, **kwargs)

    @property
    def seconds(self) -> float:
        """Seconds so far, measuring and saving included, and those before the checkpoint that it goes on from."""
        if self._earlier is None:
            self._earlier = max((entry.get("seconds", 0.0) for entry in self.state.log_history), default=0.0)
        return self._earlier + time.perf_counter() - self._began

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Pass on what is logged, in the measures of this package."""
        logs["seconds"] = round(self.seconds, 3)
        logs["bytes_seen"] = round(self.bytes_per_token * self.state.num_input_tokens_seen)
        for name, share in self.measured.items():
            loss = logs.pop(f"eval_{name}_nll", None)
            if loss is not None:
                logs[f"eval_{name}_loss"] = loss
                logs[f"eval_{name}_perplexity"] = perplexity(loss)
                logs[f"eval_{name}_bits_per_byte"] = loss / math.log(2) / share
        super().log(logs, start_time)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._save_checkpoint(*args, **kwargs)
        except (OSError, SafetensorError, RuntimeError) as error:  # torch raises the last one when the disk is full
            raise CheckpointError(one_line(error)) from error

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
            Diverged: the loss is not finite; the weights are those of the last step.
        """
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not torch.isfinite(loss).all():
            raise Diverged(f"the loss is {loss.item()} at step {self.state.global_step + 1}")
        return loss


def window_losses(logits: Tensor | tuple[Tensor, ...], labels: Tensor) -> Tensor:
    """`[batch, 2]` Sum of the losses (nats) of each window's next tokens, and how many there are.

    The Trainer's own mean over batches is none over tokens where batches or windows differ, and another one on another
    number of processes.

    Args:
        logits: `[batch, pos, vocab]`, alone or before other outputs.
        labels: `[batch, pos]`.
    """
    scores = logits[0] if isinstance(logits, tuple) else logits
    wanted = labels[:, 1:]
    losses = torch.nn.functional.cross_entropy(
        scores[:, :-1].float().flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="none"
    ).view_as(wanted)
    return torch.stack([losses.sum(1), (wanted != IGNORED).sum(1).to(losses.dtype)], dim=1)


def mean_token_loss(found: EvalPrediction) -> dict[str, float]:
    """The mean loss of a token over all windows, as `nll` (nats)."""
    sums, numbers = np.asarray(found.predictions, dtype=np.float64).T
    return {"nll": float(sums.sum() / numbers.sum())}
