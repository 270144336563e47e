"""Hashes that tell models apart: short, exact, and made in one pass over the weights."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# Integers of the size of a weight, whose sums do not depend on the order of summation.
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def weights_digest(made_with: Any, weights: Iterable[tuple[str, Tensor]]) -> str:
    """16 hexadecimal digits, equal for equal weights that are made into equal models.

    Weights count by exact sums over their bits, row by row, and by scattered samples, which costs one pass over the
    memory. Tensors that are offloaded count by name and shape only.

    Args:
        made_with: plain data that belongs to the weights, e.g. a configuration.
        weights: names and tensors; their order counts.
    """
    digest = hashlib.sha256()
    digest.update(json.dumps(made_with, sort_keys=True, default=str).encode())
    for name, tensor in weights:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.device.type == "meta" or not tensor.numel() or tensor.dtype.is_complex:
            continue
        bits = tensor.detach().contiguous().view(_BITS.get(tensor.element_size(), torch.uint8))
        flat = bits.reshape(-1)
        places = torch.arange(64, device=flat.device) * 7_919_999 % flat.numel()
        rows = bits.reshape(len(bits) if bits.dim() > 1 else 1, -1)
        for part in (flat[places].long(), rows.sum(1, dtype=torch.int64)):
            digest.update(part.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
