"""TransformerLens models, read at their own blocks.

A `TransformerBridge` (TransformerLens 4) or `HookedTransformer` (3.9) is run by its own forward, and its own block
modules are intercepted, with everything that their hook points do: a hook on `blocks.k.hook_resid_post` edits what the
block returns, and so our residuals, ablations and particles. The Hugging Face model underneath is not unwrapped.

Booting a bridge takes the model over: submodules are replaced in place and attention is switched to the eager form.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tracer.errors import InputError
from tracer.models.cache import one_line
from tracer.models.tokens import TokenBatch


def is_transformer_lens(model: object) -> bool:
    """Whether an object is a model of TransformerLens; does not import it."""
    return isinstance(model, nn.Module) and any(
        c.__module__.startswith("transformer_lens.") for c in type(model).__mro__
    )


def transformer_lens_logits(model: Any, batch: TokenBatch) -> Tensor:
    """The model's logits `[batch, pos, vocab]` for right-padded tokens."""
    device = next(model.parameters()).device
    options: dict[str, Any] = {"attention_mask": batch.mask.to(device), "return_type": "logits"}
    if hasattr(model, "original_model"):  # a bridge hands what it does not know to the Hugging Face model
        options["use_cache"] = False
    else:
        options["padding_side"] = "right"
    return model(batch.ids.to(device), **options)


def transformer_lens_config(model: Any) -> dict[str, Any]:
    """What the model was made with, as plain data."""
    original = getattr(model, "original_model", None)
    return original.config.to_dict() if original is not None else vars(model.cfg)


def booted_bridge(model: PreTrainedModel, name: str) -> nn.Module:
    """Wrap a Hugging Face model in a `TransformerBridge`, without a tokenizer and without the hub.

    Args:
        model: is taken over by the bridge.
        name: what it is called.

    Raises:
        InputError: TransformerLens has no adapter for its class, or fails on it.
    """
    from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    architecture = type(model).__name__
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise InputError(f"TransformerLens has no adapter for {architecture}: pass backend='hooks'")
    try:
        with torch.no_grad():
            bridge = build_bridge_from_module(model, architecture, hf_config=model.config, model_name=name)
    except Exception as error:  # whatever fails inside, the bridge cannot be had
        raise InputError(
            f"TransformerLens cannot boot {architecture} ({type(error).__name__}: {one_line(error)}): "
            "pass backend='hooks'"
        ) from error
    return bridge.eval()
