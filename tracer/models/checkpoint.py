"""Reading a checkpoint through transformers: quietly, and never with random weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub.utils as hub_utils
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from tracer.errors import InputError


def read_causal_lm(
    path: str | Path, what: str, *, auto_class: Any = AutoModelForCausalLM, **options: Any
) -> tuple[PreTrainedModel, list[str]]:
    """Reads a causal language model all of whose weights are in the checkpoint.

    Args:
        path: A folder, or an id of the Hugging Face hub.
        what: The checkpoint, for messages.
        auto_class: The class of transformers that knows which model belongs to the config.
        options: Passed to `from_pretrained`.

    Returns:
        The model in eval mode, and the names of weights of the checkpoint that have no place in it.

    Raises:
        InputError: Weights are missing and would be random (tied ones that are stored once are not missing),
            or have another shape than the config says.
    """
    # The return type of from_pretrained does not know of output_loading_info.
    loaded: Any = auto_class.from_pretrained(path, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise InputError(
            f"{what} lacks {len(missing)} weights of its model ({first_few(missing)}), which would be "
            "random; pass a complete checkpoint of a causal language model"
        )
    mismatched = sorted(
        f"{name} {tuple(stored)} instead of {tuple(needed)}" for name, stored, needed in info["mismatched_keys"]
    )
    if mismatched:
        raise InputError(
            f"{what} has {len(mismatched)} weights of another shape than its config.json says "
            f"({first_few(mismatched)}); pass a checkpoint and the config that belongs to it"
        )
    return model, sorted(info["unexpected_keys"])


@contextmanager
def transformers_output(progress: bool) -> Iterator[None]:
    """Inside the block transformers and huggingface_hub log errors only, and draw bars only if `progress`.

    What is worth a warning (missing weights, dtype) is reported by our own errors and notes.
    """
    verbosity = transformers_logging.get_verbosity()
    hub_verbosity = hub_utils.logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    hub_bars = not hub_utils.are_progress_bars_disabled()
    transformers_logging.set_verbosity_error()
    hub_utils.logging.set_verbosity_error()
    if not progress:
        transformers_logging.disable_progress_bar()
        hub_utils.disable_progress_bars()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        hub_utils.logging.set_verbosity(hub_verbosity)
        if bars and not progress:
            transformers_logging.enable_progress_bar()
        if hub_bars and not progress:
            hub_utils.enable_progress_bars()


def first_few(names: list[str]) -> str:
    """The first three names, for a message."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
