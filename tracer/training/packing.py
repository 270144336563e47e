"""From documents to the windows of tokens that a model is trained on."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tracer.errors import InputError
from tracer.models.plain import evaluating
from tracer.text_sources import Documents
from tracer.training.recipe import Packing

IGNORED = -100
"""The label of a position that is not learned from."""

AT_ONCE = 256
"""Documents that are tokenized together."""

SAMPLE = 512
"""Documents of a streamed text by which its bytes a token are told."""

LEAK = 1e-3
"""Largest difference in log-probability by which a document that should not be seen may move a prediction."""


@dataclass(frozen=True)
class TextCount:
    """What became of a text.

    Attributes:
        documents: number of documents; None of a streamed text.
        bytes: their bytes in UTF-8; None of a streamed text.
        tokens: their tokens, end-of-text tokens included; None of a streamed text.
        windows: windows that they were cut into; None of a streamed text.
        dropped: tokens at the end that filled no window; None of a streamed text.
        bytes_per_token: bytes a token; of a streamed text in the first documents that are drawn, at most `SAMPLE`.
        digest: of the tokens in their order; likewise.
        largest: the largest token id; likewise.
    """

    documents: int | None
    bytes: int | None
    tokens: int | None
    windows: int | None
    dropped: int | None
    bytes_per_token: float
    digest: str
    largest: int


class _Counted:
    """Counts documents that pass by.

    Args:
        cutter: tokenizes them.
    """

    def __init__(self, cutter: "Cutter"):
        self.cutter = cutter
        self.documents = self.bytes = self.tokens = self.largest = 0
        self._digest = hashlib.sha256()

    def of(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """Token ids of texts, which are counted as they are asked for."""
        rest = iter(texts)
        while some := list(islice(rest, AT_ONCE)):
            self.documents += len(some)
            self.bytes += sum(len(text.encode()) for text in some)
            for ids in self.cutter.tokens(some):
                self.tokens += len(ids)
                self.largest = max(self.largest, max(ids))
                self._digest.update(np.array(ids, dtype="<i8").tobytes())
                yield ids

    @property
    def known(self) -> dict[str, Any]:
        """What is told of a text however it is read."""
        return {
            "bytes_per_token": self.bytes / self.tokens,
            "digest": self._digest.hexdigest()[:16],
            "largest": self.largest,
        }


class Cutter:
    """Cuts documents into windows.

    Args:
        tokenizer: of the model.
        block_size: tokens of a window.
        packing: see `tracer.training.recipe.PACKINGS`.

    Raises:
        InputError: the tokenizer has no token that ends a document.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, block_size: int, packing: Packing):
        if tokenizer.eos_token_id is None:
            raise InputError("the tokenizer has no end-of-text token, so that documents cannot be told apart: set one")
        self.tokenizer = tokenizer
        self.end = int(tokenizer.eos_token_id)
        self.front = tokenizer("", verbose=False)["input_ids"][:1] == [self.end]
        self.block_size = block_size
        self.packing = packing

    def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of documents as the tokenizer makes them, each with one end-of-text token.

        Where the tokenizer puts that token in front of a document by itself, it is put behind it as well only if
        documents are kept apart, which would otherwise never teach the model to end one.
        """
        found = []
        for ids in self.tokenizer(list(texts), verbose=False)["input_ids"]:
            marked = ids and (ids[-1] == self.end or (self.front and self.packing == "packed"))
            found.append(ids if marked else [*ids, self.end])
        return found

    def windows(self, documents: Iterable[Sequence[int]]) -> Iterator[dict[str, list[int]]]:
        """Windows with `input_ids`, `labels`, and for isolated documents `position_ids`.

        With packing `none`, windows are as long as what is left of the document; else all are of `block_size`, and
        what does not fill the last one is dropped.
        """
        if self.packing == "none":
            for ids in documents:
                for start in range(0, len(ids), self.block_size):
                    piece = list(ids[start : start + self.block_size])
                    if len(piece) > 1:  # one token predicts nothing
                        yield {"input_ids": piece, "labels": piece}
            return
        ids_left: list[int] = []
        places_left: list[int] = []
        for ids in documents:
            ids_left += ids
            places_left += range(len(ids))
            whole = len(ids_left) - len(ids_left) % self.block_size
            for start in range(0, whole, self.block_size):
                end = start + self.block_size
                yield self._packed(ids_left[start:end], places_left[start:end])
            del ids_left[:whole], places_left[:whole]

    def _packed(self, ids: list[int], places: list[int]) -> dict[str, list[int]]:
        if self.packing == "packed":
            return {"input_ids": ids, "labels": ids}
        # A document that began before the window begins anew in it; the first token of one is not predicted.
        start, positions = 0, []
        for index, place in enumerate(places):
            if place == 0:
                start = index
            positions.append(index - start)
        labels = [IGNORED if position == 0 else token for token, position in zip(ids, positions, strict=True)]
        return {"input_ids": ids, "labels": labels, "position_ids": positions}

    def cut(self, documents: datasets.Dataset, name: str) -> tuple[datasets.Dataset, TextCount]:
        """All windows of a text, and what became of it.

        Raises:
            InputError: it fills no window.
        """
        counted = _Counted(self)
        windows = list(self.windows(counted.of(documents["text"][:])))
        if not windows:
            raise InputError(
                f"text {name!r} has {counted.tokens} tokens, which fill no window of {self.block_size}: pass more "
                "text or a smaller block_size"
            )
        return self._whole(windows, counted)

    def _whole(self, windows: list[dict[str, list[int]]], counted: _Counted) -> tuple[datasets.Dataset, TextCount]:
        kept = sum(len(window["input_ids"]) for window in windows)
        count = TextCount(
            documents=counted.documents,
            bytes=counted.bytes,
            tokens=counted.tokens,
            windows=len(windows),
            dropped=counted.tokens - kept,
            **counted.known,
        )
        return _dataset(windows), count

    def cut_evenly(self, documents: datasets.Dataset, name: str) -> tuple[datasets.Dataset, TextCount]:
        """As `cut`, into windows of one length at most `block_size`, for texts that are measured.

        Equal windows make the mean over windows the mean over tokens, and hardly a token is dropped. With packing
        `none` they are packed here as well, so that a text is measured over all its tokens.

        Raises:
            InputError: it has fewer than two tokens.
        """
        packing: Packing = "packed" if self.packing == "none" else self.packing
        counted = _Counted(Cutter(self.tokenizer, self.block_size, packing))
        tokens = list(counted.of(documents["text"][:]))
        number = -(-counted.tokens // self.block_size)
        length = max(counted.tokens // number, min(counted.tokens, 2))
        if length < 2:
            raise InputError(f"text {name!r} has {counted.tokens} tokens: pass more text to measure")
        cutter = Cutter(self.tokenizer, length, packing)
        return cutter._whole(list(cutter.windows(tokens)), counted)

    def stream(self, documents: datasets.IterableDataset) -> tuple[datasets.IterableDataset, TextCount]:
        """Windows of a text that is read as it is needed."""

        def generated() -> Iterator[dict[str, list[int]]]:
            yield from self.windows(ids for row in documents for ids in self.tokens([row["text"]]))

        counted = _Counted(self)
        for _ in counted.of(row["text"] for row in documents.take(SAMPLE)):
            pass
        if not counted.tokens:
            raise InputError("a streamed text is empty: pass a text with words in it")
        keys = ["input_ids", "labels", *(["position_ids"] if self.packing == "isolated" else [])]
        windows = datasets.IterableDataset.from_generator(generated, features=_features(keys))
        return windows, TextCount(None, None, None, None, None, **counted.known)


def _dataset(windows: Sequence[Mapping[str, list[int]]]) -> datasets.Dataset:
    return datasets.Dataset.from_list([dict(window) for window in windows], features=_features(windows[0]))


def _features(keys: Iterable[str]) -> datasets.Features:
    """The same for windows in memory and streamed ones, so that they mix."""
    return datasets.Features({key: datasets.Sequence(datasets.Value("int64")) for key in keys})


def mixed(parts: Mapping[str, tuple[Documents, float]], seed: int) -> Documents:
    """Windows of several texts, drawn by weight; every window of each comes up before one text comes to its end.

    Args:
        parts: windows and weight of each text.
        seed: of the drawing.
    """
    parts = dict(sorted(parts.items()))  # the order in the recipe is not to matter
    windows = [part for part, _ in parts.values()]
    if len(windows) == 1:
        return windows[0]
    if len({isinstance(part, datasets.Dataset) for part in windows}) > 1:
        windows = [p.to_iterable_dataset() if isinstance(p, datasets.Dataset) else p for p in windows]
    total = sum(weight for _, weight in parts.values())
    shares = [weight / total for _, weight in parts.values()]
    return datasets.interleave_datasets(windows, probabilities=shares, seed=seed, stopping_strategy="all_exhausted")


class Collate:
    """Puts windows into a batch, `[batch, pos]`; shorter ones are padded on the right and masked.

    Args:
        pad: the token to pad with, which is not learned from.
        length: of all batches, which then all have a mask; default that of the longest window of each.
    """

    def __init__(self, pad: int, length: int | None = None):
        self.pad = pad
        self.length = length

    def __call__(self, windows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """The batch of some windows."""
        longest = self.length or max(len(window["input_ids"]) for window in windows)
        fill = {"input_ids": self.pad, "labels": IGNORED, "position_ids": 0}
        batch = {
            key: torch.tensor(
                [[*window[key], *[fill[key]] * (longest - len(window[key]))] for window in windows], dtype=torch.int64
            )
            for key in windows[0]
        }
        lengths = [len(window["input_ids"]) for window in windows]
        if self.length is not None or min(lengths) < longest:
            batch["attention_mask"] = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
        return batch


def isolation_gap(model: PreTrainedModel, vocab: int) -> float:
    """By how much a prediction in a packed document depends on the document before it.

    Two documents of random tokens run packed, with positions that begin anew, and the second one alone.

    Args:
        model: in float32.
        vocab: number of tokens to draw from.

    Returns:
        The largest difference in log-probability, of any token after any position; infinite where the model takes no
        positions.
    """
    generator = torch.Generator().manual_seed(0)
    before, alone = (torch.randint(0, vocab, (2, n), generator=generator).to(model.device) for n in (7, 6))
    positions = torch.cat([torch.arange(7), torch.arange(6)]).expand(2, -1).to(model.device)
    with evaluating(model):
        try:
            packed = model(input_ids=torch.cat([before, alone], dim=1), position_ids=positions, use_cache=False).logits[
                :, 7:
            ]
        except (TypeError, ValueError):
            return float("inf")
        own = model(input_ids=alone, use_cache=False).logits
    gap: float = (packed.double().log_softmax(-1) - own.double().log_softmax(-1)).abs().max().item()
    return gap
