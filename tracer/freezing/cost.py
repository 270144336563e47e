"""What one training step costs under a freeze plan, counted before any is made and without any arithmetic.

A copy of the model without memory (fake tensors) runs one step. PyTorch's counter adds up its floating-point
operations, and autograd's own hooks tell which activations it keeps. So the count holds for every architecture, and
for whatever autograd really skips: gradients of frozen weights are not computed, but those of activations still flow
through frozen blocks down to the lowest parameter that is trained.
"""

import logging
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from transformers import PreTrainedModel

from tracer.errors import InputError, one_of
from tracer.freezing.plan import FreezePlan
from tracer.models.loading import DTYPES

MOMENTS = 2
"""Numbers that AdamW keeps for each trained one, in the parameter's dtype."""


@dataclass(frozen=True)
class Price:
    """What one step costs.

    Attributes:
        trained: numbers in trained parameters.
        total: numbers in all parameters.
        weight_bytes: bytes of all weights.
        gradient_bytes: bytes of the gradients.
        optimizer_bytes: bytes of AdamW's two moments.
        activation_bytes: bytes that autograd keeps from forward to backward, at the batch that was priced.
        forward_flops: floating-point operations a token, forward.
        backward_flops: likewise backward.
    """

    trained: int
    total: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    forward_flops: float
    backward_flops: float

    @property
    def flops(self) -> float:
        """Floating-point operations a token, forward and backward."""
        return self.forward_flops + self.backward_flops

    @property
    def bytes(self) -> int:
        """Bytes of weights, gradients, optimizer and activations."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes


@dataclass(frozen=True)
class Prices:
    """The price of a plan beside that of training everything.

    Attributes:
        plan: of the plan.
        full: of all blocks, embeddings, norm and head.
        batch: sequences of the step.
        block_size: tokens of a sequence.
        dtype: of weights, gradients and moments.
    """

    plan: Price
    full: Price
    batch: int
    block_size: int
    dtype: str

    @property
    def time_ratio(self) -> float:
        """Predicted time of a step as a share of that of `full`: the ratio of the operations of matrix products.

        It leaves out what is no matrix product and the optimizer's own work, which matter for few tokens a step.
        """
        return self.plan.flops / self.full.flops

    def to_frame(self) -> pd.DataFrame:
        """One row a quantity: of the plan, of `full`, and their ratio."""
        rows = {}
        for name in (*asdict(self.plan), "flops", "bytes"):
            plan, full = getattr(self.plan, name), getattr(self.full, name)
            rows[name] = {"plan": plan, "full": full, "ratio": plan / full if full else float("nan")}
        return pd.DataFrame.from_dict(rows, orient="index")

    def summary(self) -> str:
        """The prices as text for a terminal."""
        numbers = [(words, name, getattr(self.plan, name), getattr(self.full, name)) for name, words in _WORDS.items()]
        shown = pd.DataFrame(
            [
                (words, _spell(name, plan), _spell(name, full), f"{plan / full:.2f}")
                for words, name, plan, full in numbers
            ],
            columns=["", "plan", "full", "ratio"],
        )
        title = f"One step of {self.batch} x {self.block_size} tokens in {self.dtype} with AdamW"
        return f"{title}\n{shown.to_string(index=False)}"


_WORDS = {
    "trained": "trained parameters",
    "weight_bytes": "weights",
    "gradient_bytes": "gradients",
    "optimizer_bytes": "optimizer",
    "activation_bytes": "activations",
    "bytes": "memory in all",
    "forward_flops": "forward, FLOP a token",
    "backward_flops": "backward, FLOP a token",
    "flops": "both: predicted time",
}


def price(
    plan: FreezePlan,
    model: PreTrainedModel,
    *,
    block_size: int = 512,
    batch: int = 1,
    dtype: str | None = None,
    full: Price | None = None,
) -> Prices:
    """Count what a step costs under a plan and when everything is trained.

    Args:
        plan: which parts are trained.
        model: the model, or one like it; it is not run and not changed.
        block_size: tokens of a sequence.
        batch: sequences of a step.
        dtype: what it is trained in, e.g. `bfloat16`; default that of its weights.
        full: the price of training everything, where an earlier plan for the same step has given it.

    Raises:
        InputError: the plan is for another model, or the model cannot be run without values, as with experts that
            are chosen by them.
    """
    wanted = model.dtype if dtype is None else DTYPES[one_of("dtype", dtype, DTYPES)]
    if block_size < 1 or batch < 1:
        raise InputError(f"block_size {block_size} and batch {batch}: both must be at least 1")
    blocks = tuple(range(len(plan.blocks)))
    everything = replace(plan, train=blocks, freeze=(), embeddings="train", norm="train", head="train")
    if full is None:
        full = _counted(everything, model, wanted, block_size=block_size, batch=batch)
    planned = full
    if plan.trained_names() != everything.trained_names():
        planned = _counted(plan, model, wanted, block_size=block_size, batch=batch)
    return Prices(planned, full, batch, block_size, str(wanted).removeprefix("torch."))


def _counted(plan: FreezePlan, model: PreTrainedModel, dtype: torch.dtype, *, block_size: int, batch: int) -> Price:
    trained = plan.trained_names()
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    try:
        logger.setLevel(logging.CRITICAL)  # it would print whole traces of what we report in one line
        with FakeTensorMode():
            fake = type(model)._from_config(deepcopy(model.config), dtype=dtype).train()
            for name, parameter in fake.named_parameters():
                parameter.requires_grad_(name in trained)
            return _step(fake, block_size=block_size, batch=batch)
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"a step of {type(model).__name__} in {dtype} cannot be counted without running it ({reason}): pass "
            "another dtype, such as bfloat16"
        ) from error
    finally:
        logger.setLevel(level)


def _step(model: nn.Module, *, block_size: int, batch: int) -> Price:
    parameters = list(model.parameters())
    weights = {parameter.untyped_storage()._cdata for parameter in parameters}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    ids = torch.zeros(batch, block_size, dtype=torch.int64)
    with FlopCounterMode(display=False, custom_mapping=_ATTENTION_ON_CPU) as counter:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        forward = counter.get_total_flops()
        if loss.requires_grad:
            loss.backward()
        backward = counter.get_total_flops() - forward
    tokens = batch * block_size
    learned = [parameter for parameter in parameters if parameter.requires_grad]
    gradients = sum(parameter.numel() * parameter.element_size() for parameter in learned)
    return Price(
        trained=sum(parameter.numel() for parameter in learned),
        total=sum(parameter.numel() for parameter in parameters),
        weight_bytes=sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        gradient_bytes=gradients,
        optimizer_bytes=MOMENTS * gradients,
        activation_bytes=sum(kept.values()),
        forward_flops=forward / tokens,
        backward_flops=backward / tokens,
    )


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(gradient, query, key, value)


# PyTorch's counter knows the kernels of attention on other devices only.
_ATTENTION_ON_CPU: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def _spell(name: str, number: int | float) -> str:
    if name.endswith("bytes"):
        return f"{number / 2**20:,.1f} MiB"
    return f"{number:,.0f}"
