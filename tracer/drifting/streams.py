"""Residual streams and outputs at the last token of many prompts."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from tracer.batches import token_batches
from tracer.divergence import log_probs
from tracer.engine import DEFAULT_BATCH_TOKENS
from tracer.errors import InputError
from tracer.measures import rows_of_stream
from tracer.models.streams import positions_of, read_streams
from tracer.models.traced import TracedModel


def last_streams(
    model: TracedModel,
    prompts: Sequence[Sequence[int]],
    *,
    batch_tokens: int = DEFAULT_BATCH_TOKENS,
    on_prompts: Callable[[int], object] = lambda number: None,
) -> Iterator[tuple[list[int], np.ndarray, Tensor]]:
    """The stream at every depth and the next-token distribution after each prompt, batch by batch.

    The model must be in eval mode and without gradients.

    Args:
        model: the opened model.
        prompts: token ids.
        batch_tokens: most tokens of one forward.
        on_prompts: called with the number of prompts after each batch.

    Yields:
        Which prompts a batch holds, their streams `[depths, rows, d]` float32, and `[rows, vocab]` float64
        log-probabilities on the CPU.

    Raises:
        InputError: the positions of the model's stream are not tokens.
    """
    anatomy = model.anatomy
    if anatomy.position_dim is None:
        raise InputError(f"{model.name} is read at positions that are not tokens: its streams cannot be compared")
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    start = 0
    for batch in token_batches([prompts[i] for i in order], batch_tokens):
        rows = order[start : start + len(batch)]
        start += len(batch)
        found = read_streams(model.adapter, batch)
        index, last = torch.arange(len(batch)), torch.tensor(batch.lengths) - 1
        streams = []
        for state in found.states:
            assert state[0] is not None
            streams.append(rows_of_stream(anatomy, positions_of(anatomy, state[0], index, last)).float().numpy())
        yield rows, np.stack(streams), log_probs(found.logits[index, last].float().cpu())
        on_prompts(len(rows))


def all_streams(model: TracedModel, prompts: Sequence[Sequence[int]]) -> np.ndarray:
    """`[depths, prompts, d]` float32 of `last_streams`, in the order of the prompts."""
    found: np.ndarray | None = None
    for rows, streams, _ in last_streams(model, prompts):
        found = placed(found, rows, streams, len(prompts))
    assert found is not None
    return found


def placed(found: np.ndarray | None, rows: Sequence[int], streams: np.ndarray, prompts: int) -> np.ndarray:
    """`[depths, prompts, d]` float32, in which the streams of some prompts are put in place; made at the first call."""
    if found is None:
        found = np.zeros((len(streams), prompts, streams.shape[2]), dtype=np.float32)
    found[:, rows] = streams
    return found


def cosine(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Cosine between vectors, `[...]` float64, of arrays `[..., d]`; 0 where one is zero."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    norms = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
    return np.divide((x * y).sum(-1), norms, out=np.zeros_like(norms), where=norms > 0)
