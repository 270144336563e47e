"""`train_tuned_lens`: from an opened model and a text to a tuned lens."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from tracer.errors import InputError
from tracer.measures import MAX_LOGITS
from tracer.models.plain import evaluating
from tracer.models.traced import TracedModel
from tracer.runs import versions
from tracer.tuned_lens.fitting import Fit
from tracer.tuned_lens.lens import TunedLens, check_lens_path, stream_width
from tracer.tuned_lens.text import Text, split_text


def train_tuned_lens(
    model: TracedModel,
    text: Text,
    *,
    tokens: int = 32768,
    seq_length: int = 128,
    steps: int = 192,
    batch: int = 32,
    held_out: float = 0.1,
    seed: int = 0,
    progress: bool = True,
    out: str | os.PathLike[str] | None = None,
    force: bool = False,
) -> TunedLens:
    """Train affine translators for every depth below the last.

    The model is only run: its weights, gradients, modes and flags stay as they are. A depth ends with the best of the
    plain lens, the regression and what the gradient steps made of it, as a validation part of the text says; the
    numbers that are reported come from a third part, which nothing has seen before. The first position of a sequence
    is left out everywhere: attention sinks stand there, whose streams are of another size.

    For L blocks and a stream of width d the memory, besides the model, is about `24 L d^2` bytes for the sums of the
    regression and later the translators and Adam, and `(L + 1) d` numbers for each of the `steps * batch` positions of
    the gradient steps.

    Args:
        model: the opened model.
        text: a UTF-8 file, a folder of `.txt` files, or documents. Best is text of the kind that the lens will read.
        tokens: most tokens to read.
        seq_length: most tokens of a sequence.
        steps: gradient steps; 0 leaves the regression as it is.
        batch: positions of one gradient step, each used once as long as there are enough.
        held_out: share of the sequences that judges the lens, at most 0.25; as many are for validation.
        seed: of everything drawn; the same seed gives the same lens.
        progress: show a progress bar.
        out: file to save the lens in.
        force: replace `out`.

    Raises:
        InputError: text, arguments or `out` cannot be used, or this model cannot have a tuned lens; nothing has been
            written.

    Example:
        >>> import tracer
        >>> model = tracer.load("smollm2-135m-instruct-q4_1", dtype="float32")  # doctest: +SKIP
        >>> lens = train_tuned_lens(model, "text.txt", out="smollm2.safetensors")  # doctest: +SKIP
    """
    began = time.monotonic()
    if out is not None:
        check_lens_path(out, force=force)
    _check_arguments(model, tokens, seq_length, steps, batch, held_out)
    split = split_text(
        model,
        text,
        tokens=tokens,
        seq_length=seq_length,
        held_out=held_out,
        # With fewer rows for the d unknowns of each output, the regression fits noise.
        needed=4 * stream_width(model.anatomy),
        seed=seed,
    )
    with evaluating(model.model), _frozen(model.model):
        fit = Fit(model, split, steps, batch, seed)
        weight, bias, depths = fit.run(progress)
    record = {
        "text": split.name,
        "tokens": split.tokens,
        "unit": split.unit,
        "positions": fit.fitted,
        "seq_length": seq_length,
        "steps": steps,
        "batch": batch,
        "held_out": held_out,
        "seed": seed,
        "kind": model.opened.kind,
        "dtype": model.opened.dtype,
        "fingerprint": model.fingerprint(),
        "versions": versions(),
        "seconds": round(time.monotonic() - began, 1),
        "depths": depths,
    }
    lens = TunedLens(weight, bias, model.tail_fingerprint(), model.name, record)
    if out is not None:
        lens.save(out, force=force)
    return lens


def _check_arguments(model: TracedModel, tokens: int, seq_length: int, steps: int, batch: int, held_out: float) -> None:
    if model.self_check.tail == "whole":
        raise InputError(
            f"no tuned lens for {model.name}: {model.self_check.reason}, so that translators cannot be trained through "
            "it; use the logit lens"
        )
    for name, value, least in (("tokens", tokens, 1), ("seq_length", seq_length, 4), ("steps", steps, 0)):
        if value < least:
            raise InputError(f"{name}={value}: pass at least {least}")
    if model.positions is not None and seq_length > model.positions:
        raise InputError(f"seq_length={seq_length}: {model.name} has {model.positions} positions, pass at most these")
    most = max(1, MAX_LOGITS // model.anatomy.vocab)
    if not 1 <= batch <= most:
        raise InputError(f"batch={batch}: pass 1 to {most} positions, whose logits fit into memory")
    if not 0 < held_out <= 0.25:
        raise InputError(f"held_out={held_out}: pass a share above 0 and up to 0.25")


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """No weight asks for a gradient while inside; every flag is restored."""
    asking = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in asking:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in asking:
            parameter.requires_grad_(True)
