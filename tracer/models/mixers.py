"""What kind of sequence mixer a block has, by the names of its modules. Nothing but labels depends on this."""

import re

from torch import nn

# Kinds of sequence mixers by the words that class names and `layer_types` use for them.
_WORDS = (
    (r"gated_?delta_?net|deltanet|gdn", "gated_deltanet"),
    (r"delta_?attention|kimi_?delta|\bkda\b", "delta_attention"),
    (r"mamba_?2", "mamba2"),
    (r"mamba", "mamba"),
    (r"rwkv", "rwkv"),
    (r"m?lstm", "xlstm"),
    (r"rg_?lru|recurrentblock", "rg_lru"),
    (r"lightning|linear_?attention", "linear_attention"),
    (r"short_?conv|convmixer", "convolution"),
    (r"attention|attn", "attention"),
)


def mixer_word(words: str) -> str | None:
    """The kind of sequence mixer that a module's name or class speaks of, or None; a label only."""
    words = words.lower()
    if re.search(r"norm\b|rotary|mlp|feed_?forward|ffn|embeddings?\b|connection", words):
        return None
    return next((kind for pattern, kind in _WORDS if re.search(pattern, words)), None)


def mixer_kind(block: nn.Module) -> str | None:
    """Name the sequence mixers of a block after its modules, or None where no name speaks of one; a label only."""
    found: list[tuple[str, str]] = []
    for name, module in block.named_modules():
        inner = any(name.startswith(outer + ".") for outer, _ in found)
        if module is block or inner or name.count(".") > 1 or isinstance(module, nn.Linear | nn.ModuleList):
            continue
        kind = mixer_word(f"{name.rpartition('.')[2]} {type(module).__name__}")
        if kind is not None:
            found.append((name, kind))
    return "+".join(sorted({kind for _, kind in found})) or None
