"""Texts as suites: how well a model predicts documents, in bits a byte, which compare between tokenizers."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tracer.errors import InputError
from tracer.evaluation.means import ratio_of_sums
from tracer.models.plain import evaluating
from tracer.models.tokens import TokenBatch
from tracer.models.traced import TracedModel
from tracer.probes.reading import is_shipped
from tracer.runs import token_bar
from tracer.text_sources import BUILDERS, TextSource, open_documents

CONTEXT = 1024
"""Most tokens that a prediction rests on, by default."""

SLICE = 256
"""Positions whose distributions are looked at together."""


@dataclass(frozen=True)
class TokenizedText:
    """Documents as token ids.

    Attributes:
        name: of the text.
        documents: `[document][token]`.
        bytes: of each document, in UTF-8.
        start: the token before a document: the model's beginning-of-text token, or its end-of-text token.
    """

    name: str
    documents: tuple[tuple[int, ...], ...]
    bytes: Int[np.ndarray, " document"]
    start: int

    @property
    def tokens(self) -> Int[np.ndarray, " document"]:
        """Tokens of each document."""
        return np.array([len(document) for document in self.documents], dtype=np.int64)


def is_text(suite: object) -> TypeGuard[str | Path]:
    """Whether a suite is a text, and not a set of probes: by its name, of JSON Lines by the keys of the first."""
    if not isinstance(suite, str | Path) or (isinstance(suite, str) and is_shipped(suite)):
        return False
    path = Path(suite).expanduser()
    if path.suffix.lower() != ".jsonl":
        return path.is_dir() or path.suffix.lower() in BUILDERS
    try:
        with path.open(encoding="utf-8-sig") as file:
            first = json.loads(next((line for line in file if line.strip()), ""))
        return isinstance(first, dict) and "text" in first and "prompt" not in first
    except (OSError, ValueError):  # the reader of probes says what is wrong
        return False


def read_text(model: TracedModel, path: str | Path, *, limit: int | None = None) -> TokenizedText:
    """The documents of a text as the tokenizer of a model reads them, without tokens that it would add.

    Args:
        model: has the tokenizer.
        path: a `.txt` file (one document), a folder of them (one each), or a `.jsonl`, `.json` or `.parquet` file with
            the column `text`.
        limit: only the first so many documents.

    Raises:
        InputError: the text cannot be read, or the tokenizer cannot be used.
    """
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise InputError(f"{model.name} has no tokenizer, which a text needs: add its files to the checkpoint")
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if start is None:
        raise InputError(f"the tokenizer of {model.name} has neither a beginning- nor an end-of-text token: set one")
    found = open_documents(TextSource(path=str(path), limit=limit), progress=False)
    texts = list(found["text"])
    ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    largest, known = max(max(document, default=0) for document in ids), min(model.anatomy.vocab, model.embeddings)
    if largest >= known:
        raise InputError(f"{str(path)!r} has token {largest}, but {model.name} has only {known}: pass its tokenizer")
    sizes = np.array([len(text.encode()) for text in texts], dtype=np.int64)
    return TokenizedText(Path(path).stem, tuple(map(tuple, ids)), sizes, int(start))


def rolling_windows(document: Sequence[int], start: int, length: int) -> Iterator[tuple[list[int], list[int]]]:
    """Windows in which every token of a document is predicted once: what the model reads, and what should follow.

    The first window begins with `start`; later ones begin with the last token of the one before, and the last one as
    far before that as fits. So does lm-evaluation-harness.

    Args:
        document: token ids.
        start: the token before it.
        length: tokens of a window.

    Yields:
        At most `length` token ids, and the tokens that should follow the last so many of them.
    """
    whole = [start, *document]
    for first in range(0, len(document), length):
        end = min(first + length, len(document))
        yield whole[max(0, end - length) : end], list(document[first:end])


def document_log_p(
    forward: Callable[[TokenBatch], Tensor],
    text: TokenizedText,
    *,
    context: int = CONTEXT,
    batch_tokens: int = 2048,
    seen: Callable[[int], object] = lambda number: None,
) -> Float[np.ndarray, " document"]:
    """Log-probability of each document (nats), the sum over its tokens.

    Args:
        forward: gives the logits `[batch, pos, vocab]` of a batch.
        text: the documents.
        context: tokens of a window.
        batch_tokens: most tokens of one forward, padding included.
        seen: called with the number of tokens after each forward, e.g. to move a progress bar.
    """
    windows = [
        (number, read, wanted)
        for number, document in enumerate(text.documents)
        for read, wanted in rolling_windows(document, text.start, context)
    ]
    windows.sort(key=lambda window: -len(window[1]))
    found = np.zeros(len(text.documents))
    while windows:
        size = max(1, batch_tokens // len(windows[0][1]))
        some, windows = windows[:size], windows[size:]
        batch = TokenBatch.from_rows([read for _, read, _ in some])
        with torch.inference_mode():
            logits = forward(batch)
            for row, (number, read, wanted) in enumerate(some):
                found[number] += _log_p(logits[row, len(read) - len(wanted) : len(read)], wanted)
        seen(sum(len(wanted) for _, _, wanted in some))
    return found


def _log_p(logits: Tensor, wanted: Sequence[int]) -> float:
    """Sum of the log-probabilities of tokens, of which each position gives one."""
    targets = torch.tensor(wanted, dtype=torch.int64, device=logits.device)
    total = 0.0
    for scores, own in zip(logits.split(SLICE), targets.split(SLICE), strict=True):
        total -= nn.functional.cross_entropy(scores.float(), own, reduction="none").double().sum().item()
    return total


def ask_texts(
    model: TracedModel, texts: Sequence[TokenizedText], *, context: int, batch_tokens: int, progress: bool
) -> dict[str, Float[np.ndarray, "document 3"]]:
    """Log-probability (nats), tokens and bytes of each document of some texts.

    Args:
        model: that reads them.
        texts: by one tokenizer, which is the model's.
        context: tokens of a window; at most what the model has positions for.
        batch_tokens: most tokens of one forward.
        progress: show a progress bar.
    """
    found = {}
    length = context_of(model, context)
    total = int(sum(text.tokens.sum() for text in texts))
    with token_bar(total, f"Reading {model.name}", progress) as seen, evaluating(model.model):
        for text in texts:
            log_p = document_log_p(model.adapter.forward, text, context=length, batch_tokens=batch_tokens, seen=seen)
            found[text.name] = np.stack([log_p, text.tokens, text.bytes], axis=1).astype(np.float64)
    return found


def text_row(name: str, documents: Float[np.ndarray, "document 3"], seed: int) -> dict[str, Any]:
    """What a text is told in, from what `ask_texts` gives.

    Returns:
        `text`, `documents`, `tokens`, `bytes`, `loss` (nats a token), `perplexity` (a token), and `bits_per_byte` with
        a 95 % interval over documents (`low`, `high`; None for few documents).
    """
    log_p, tokens, n_bytes = documents.T
    loss = float(-log_p.sum() / tokens.sum())
    bits = ratio_of_sums(-log_p / math.log(2), n_bytes, seed=seed, label=("bits_per_byte", name))
    return {
        "text": name,
        "documents": len(documents),
        "tokens": int(tokens.sum()),
        "bytes": int(n_bytes.sum()),
        "loss": loss,
        "perplexity": perplexity(loss),
        "bits_per_byte": bits.estimate,
        "low": bits.low,
        "high": bits.high,
    }


def perplexity(loss: float) -> float:
    """The exponential of a loss in nats a token; infinite where it leaves the range of numbers."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def context_of(model: TracedModel, context: int) -> int:
    """Tokens of a window that a model can read."""
    return context if model.positions is None else min(context, model.positions)


def bits_per_byte(log_p: float, n_bytes: float) -> float:
    """Bits a byte of text with a log-probability in nats."""
    return -log_p / (math.log(2) * n_bytes)
