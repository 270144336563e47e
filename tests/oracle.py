"""The slow, plain way, written against Hugging Face models alone: one whole forward per probe and ablation.

Nothing here uses the package under test. Blocks are found by the attribute names of the families in `tiny.py`.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy.spatial.distance import jensenshannon
from torch import Tensor, nn


def blocks_of(model: nn.Module) -> nn.ModuleList:
    paths = ("model.layers", "model.decoder.layers", "transformer.h", "gpt_neox.layers", "backbone.layers")
    for path in (*paths, "model.language_model.layers"):
        try:
            return model.get_submodule(path)
        except AttributeError:
            continue
    raise AssertionError(type(model))


def hidden(output: object) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def forward(model: nn.Module, ids: Sequence[int], block: int | None = None, edit: Callable | None = None) -> Tensor:
    """Log-probabilities `[pos, vocab]` float64 of one prompt, with one block's output edited."""
    handles = []
    if block is not None:

        def hook(module: nn.Module, args: tuple, kwargs: dict, output: object) -> object:
            before = args[0] if args else kwargs["hidden_states"]
            new = edit(before, hidden(output))
            return (new, *output[1:]) if isinstance(output, tuple) else new

        handles.append(blocks_of(model)[block].register_forward_hook(hook, with_kwargs=True))
    try:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    return logits[0].double().log_softmax(-1)


def streams(model: nn.Module, ids: Sequence[int]) -> list[Tensor]:
    """`resid[0..L]`, each `[pos, d_model]`."""
    found: list[Tensor] = []

    def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
        found.append((args[0] if args else kwargs["hidden_states"])[0].clone())

    def after(module: nn.Module, args: tuple, output: object) -> None:
        found.append(hidden(output)[0].clone())

    blocks = blocks_of(model)
    handles = [block.register_forward_pre_hook(before, with_kwargs=True) for block in blocks]
    handles.append(blocks[-1].register_forward_hook(after))
    try:
        with torch.no_grad():
            model(input_ids=torch.tensor([list(ids)]), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found


def lens(model: nn.Module, ids: Sequence[int], stream: Tensor) -> Tensor:
    """Log-probabilities `[pos, vocab]` when the last block returns `stream`."""
    last = len(blocks_of(model)) - 1
    return forward(model, ids, last, lambda before, after: stream[None])


def jsd(log_p: Tensor, log_q: Tensor) -> float:
    return float(jensenshannon(log_p.exp().numpy(), log_q.exp().numpy()) ** 2)


def angle(x: Tensor, y: Tensor) -> float:
    """In units of pi."""
    return float(torch.arccos(torch.cosine_similarity(x.double(), y.double(), dim=0).clamp(-1, 1)) / torch.pi)


def contributions(model: nn.Module, ids: Sequence[int]) -> np.ndarray:
    """`[blocks, pos, d_model]`."""
    residual = torch.stack(streams(model, ids)).double().numpy()
    return np.diff(residual, axis=0)
