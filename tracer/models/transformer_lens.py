"""TransformerLens models, read at their own blocks.

A `TransformerBridge` (TransformerLens 4) or `HookedTransformer` (3.9) is run by its own forward, and its own block
modules are intercepted, with everything that their hook points do: a hook on `blocks.k.hook_resid_post` edits what the
block returns, and so our residuals, ablations and particles. The Hugging Face model underneath is not unwrapped.

Booting a bridge takes the model over: submodules are replaced in place, and attention is computed in the eager form.
"""

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tracer.errors import InputError, ModelRefused
from tracer.models.anatomy import PROBE_LENGTH, PROBE_ROWS
from tracer.models.cache import one_line
from tracer.models.plain import evaluating, forward_logits
from tracer.models.selfcheck import MAX_GAP, token_count
from tracer.models.tokens import TokenBatch


def is_transformer_lens(model: object) -> bool:
    """Whether an object is a model of TransformerLens; does not import it."""
    return isinstance(model, nn.Module) and any(
        c.__module__.startswith("transformer_lens.") for c in type(model).__mro__
    )


def bridged_model(model: Any) -> PreTrainedModel | None:
    """The Hugging Face model that a bridge stands on; None for a `HookedTransformer`, which stands on none."""
    return getattr(model, "original_model", None)


def transformer_lens_logits(model: Any, batch: TokenBatch) -> Tensor:
    """The model's logits `[batch, pos, vocab]` for right-padded tokens."""
    device = next(model.parameters()).device
    options: dict[str, Any] = {"attention_mask": batch.mask.to(device), "return_type": "logits"}
    if bridged_model(model) is not None:  # a bridge hands what it does not know to the Hugging Face model
        options["use_cache"] = False
    else:
        options["padding_side"] = "right"
    return model(batch.ids.to(device), **options)


def bridge_weights(bridge: Any) -> dict[str, Tensor]:
    """The weights of the model under a bridge, by the names that they have without the bridge.

    After them come the copies that some bridges make of a fused projection, and compute with.
    """
    original = bridge.original_model
    tensors: dict[str, Tensor] = {}
    for name, tensor in original.state_dict().items():
        tensors.setdefault(name.replace("_original_component.", ""), tensor)
    try:
        with torch.device("meta"):  # nothing but the names of the same model as it was before
            names = list(type(original)(original.config).state_dict())
        own = {name: tensors[name] for name in names}
    except Exception:  # a model that cannot be built so is known by all names that it has
        return tensors
    places = {tensor.untyped_storage().data_ptr() for tensor in own.values()}
    rest = {name: tensor for name, tensor in tensors.items() if name not in own}
    # The other names are further names of the same weights, or biases of zero that the bridge adds.
    return own | {n: t for n, t in rest.items() if t.untyped_storage().data_ptr() not in places and t.count_nonzero()}


def why_no_bridge(model: PreTrainedModel) -> str | None:
    """Why no bridge can be booted around a model, found out without changing it; None where TransformerLens knows it.

    Imports TransformerLens, which takes seconds.
    """
    try:
        _, listed = _bridging()
    except Exception as error:  # an old version has none, and a new one may not fit the other packages
        return f"no TransformerBridge can be imported ({type(error).__name__}: {one_line(error)})"
    architecture = type(model).__name__
    return None if architecture in listed else f"TransformerLens does not list {architecture}"


def _bridging() -> tuple[Callable[..., Any], Container[str]]:
    """What boots a bridge around a live model, and the classes that it knows."""
    from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    return build_bridge_from_module, SUPPORTED_ARCHITECTURES


def booted_bridge(model: PreTrainedModel, name: str) -> Any:
    """Boot a `TransformerBridge` around a Hugging Face model, without a tokenizer and without the hub.

    Args:
        model: is taken over by the bridge, also when this fails.
        name: what it is called.

    Raises:
        InputError: TransformerLens does not list its class, or fails on it.
        ModelRefused: the bridge gives other outputs than the model did; names the measured gap.
    """
    reason = why_no_bridge(model)
    if reason is not None:
        raise InputError(reason)
    build, _ = _bridging()
    architecture = type(model).__name__
    generator = torch.Generator().manual_seed(0)
    size = token_count(model)
    # Tokens from the upper part of the vocabulary: special tokens tend to have the lowest ids.
    tokens = torch.randint(size // 4, size, (PROBE_ROWS, PROBE_LENGTH), generator=generator)
    batch = TokenBatch.from_rows(tokens.tolist())
    try:
        with evaluating(model):
            # Else rounding hides in half precision what the bridge does otherwise: it computes attention in this form.
            model.set_attn_implementation("eager")
            own = forward_logits(model, batch)
            bridge = build(model, architecture, hf_config=model.config, model_name=name).eval()
            theirs = transformer_lens_logits(bridge, batch)
    except Exception as error:  # whatever fails inside, the bridge cannot be had
        raise InputError(
            f"TransformerLens cannot boot {architecture} ({type(error).__name__}: {one_line(error)})"
        ) from error
    gap = (theirs.double().softmax(-1) - own.double().softmax(-1)).abs().max().item()
    limit = MAX_GAP if own.dtype in (torch.float32, torch.float64) else 4 * torch.finfo(own.dtype).eps
    if not gap <= limit:  # a gap that is no number is none that can be accepted
        raise ModelRefused(
            f"the TransformerBridge of {architecture} is not this model: its probabilities differ by {gap:.3g}, limit "
            f"{limit:.1g}"
        )
    return bridge
