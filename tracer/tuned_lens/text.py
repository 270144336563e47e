"""Text as sequences of token ids, split into what a lens is trained on and what it is judged by."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from tracer.errors import InputError
from tracer.models.cache import one_line
from tracer.models.traced import TracedModel
from tracer.probes.tokenizing import token_ids
from tracer.statistics import rng

Text = str | os.PathLike[str] | Sequence[str]
"""A UTF-8 file, a folder of `.txt` files, or documents."""

MIN_DOCUMENTS = 8
"""Whole documents are held out where at least so many are, which an interval over documents takes; else sequences."""

MIN_SEQUENCES = 8
"""Fewer sequences cannot be split into three parts that mean anything."""

_CHARACTERS_PER_TOKEN = 16  # tokens are shorter than this on average in any text, so that no more needs to be read


@dataclass(frozen=True)
class TextSequence:
    """A run of tokens of one document.

    Attributes:
        ids: `[pos]`, begun as the tokenizer begins a document.
        skip: number of leading positions that are not read: what the tokenizer puts in front, at least one.
        unit: what it is held out together with: its document, or itself alone.
    """

    ids: tuple[int, ...]
    skip: int
    unit: int


@dataclass(frozen=True)
class SplitText:
    """Three parts without a common sequence.

    Attributes:
        train: what translators are fitted to.
        validation: what chooses between them.
        held_out: what they are judged by, seen by nothing before.
        name: what the text is called: file, folder, or the number of documents.
        unit: what is held out as a whole: `document` or `sequence`.
    """

    train: tuple[TextSequence, ...]
    validation: tuple[TextSequence, ...]
    held_out: tuple[TextSequence, ...]
    name: str
    unit: str

    @property
    def tokens(self) -> int:
        """Tokens of all parts."""
        return sum(len(item.ids) for part in (self.train, self.validation, self.held_out) for item in part)


def text_files(text: Text) -> list[Path] | None:
    """The files that a text is read from; None for documents.

    Raises:
        InputError: there is no such file, or no `.txt` file in the folder.
    """
    if not isinstance(text, str | os.PathLike):
        return None
    path = Path(text)
    if path.is_dir():
        files = sorted(path.rglob("*.txt"))
        if not files:
            raise InputError(f"folder {str(path)!r} holds no .txt file: pass a UTF-8 text file or a folder of them")
        return files
    if not path.is_file():
        raise InputError(f"no text {str(path)!r}: pass a UTF-8 text file, a folder of .txt files, or a list of texts")
    return [path]


def split_text(
    model: TracedModel, text: Text, *, tokens: int, seq_length: int, held_out: float, needed: int, seed: int
) -> SplitText:
    """Read a text, cut it into sequences and split them.

    Documents are taken in an order drawn by the seed, until there are `tokens` tokens. A sequence that occurs again is
    dropped, so that no part holds one of another.

    Args:
        model: whose tokenizer reads the text.
        text: what to read.
        tokens: most tokens.
        seq_length: most tokens of a sequence.
        held_out: share of the sequences that is held out; as many again are for validation.
        needed: fewest tokens.
        seed: of the order and of the split.

    Raises:
        InputError: the text cannot be read or is too short, or the model has no tokenizer.
    """
    files = text_files(text)
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise InputError(f"{model.name} has no tokenizer to read text with: pass tokenizer= to load")
    documents: Sequence[Path | str] = files if files is not None else [str(document) for document in text]  # type: ignore[union-attr]
    order = rng(seed, "tuned lens", "documents").permutation(len(documents))
    prefix = _prefix(tokenizer)
    skip = max(1, len(prefix))
    found: dict[tuple[int, ...], TextSequence] = {}
    left = tokens
    for index in order.tolist():
        if left < min(seq_length, tokens):
            break
        document, most = documents[index], _CHARACTERS_PER_TOKEN * left
        content = document[:most] if isinstance(document, str) else _read(document, most)
        for body in _pieces(tokenizer, content, seq_length - len(prefix)):
            ids = (*prefix, *body)
            if skip < len(ids) <= left and ids not in found:
                found[ids] = TextSequence(ids, skip, index)
                left -= len(ids)
    name = f"{len(documents)} documents" if files is None else Path(text).name  # type: ignore[arg-type]
    sequences = list(found.values())
    have = sum(len(item.ids) for item in sequences)
    if have < needed or len(sequences) < MIN_SEQUENCES:
        raise InputError(
            f"text {name!r} gives {have} tokens in {len(sequences)} different sequences, but a tuned lens of "
            f"{model.name} needs at least {needed} in {MIN_SEQUENCES}: pass more text"
            + (f", or more than tokens={tokens}" if tokens - have < seq_length else "")
        )
    _refuse_unknown(model, sequences)
    share = max(1, int(held_out * len(sequences)))
    parts = _drawn(sequences, share, seed)
    if parts is not None and len({item.unit for item in parts[2]}) >= MIN_DOCUMENTS:
        return SplitText(*parts, name=name, unit="document")
    parts = _drawn([replace(item, unit=i) for i, item in enumerate(sequences)], share, seed)
    assert parts is not None
    return SplitText(*parts, name=name, unit="sequence")


def _drawn(
    sequences: Sequence[TextSequence], share: int, seed: int
) -> tuple[tuple[TextSequence, ...], tuple[TextSequence, ...], tuple[TextSequence, ...]] | None:
    """Sequences for training, validation and holding out, by whole units; None where units are too unequal for it."""
    sizes = Counter(item.unit for item in sequences)
    parts: list[set[int]] = [set(), set()]
    counts = [0, 0]
    for unit in rng(seed, "tuned lens", "split").permutation(sorted(sizes)).tolist():
        part = next((i for i, count in enumerate(counts) if count < share), None)
        if part is not None and sizes[unit] <= share:
            parts[part].add(unit)
            counts[part] += sizes[unit]
    if min(counts) < share or sum(counts) > len(sequences) // 2:
        return None
    held_out, validation = (tuple(item for item in sequences if item.unit in part) for part in parts)
    return tuple(item for item in sequences if item.unit not in parts[0] | parts[1]), validation, held_out


def _read(path: Path, most: int) -> str:
    """The first characters of a file."""
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(most)
    except UnicodeDecodeError as error:
        raise InputError(f"{str(path)!r} is not UTF-8 text ({one_line(error)}): pass it in this encoding") from error
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be read: {error.strerror or error}") from error


def _prefix(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """What the tokenizer puts in front of every document."""
    body = tokenizer.encode("a", add_special_tokens=False)
    ids = token_ids(tokenizer, "a")
    return ids[: len(ids) - len(body)]


def _pieces(tokenizer: PreTrainedTokenizerBase, content: str, most: int) -> Iterator[tuple[int, ...]]:
    """Token ids of a document in pieces of at most `most` tokens."""
    # Not `encode`: it warns about documents that are longer than the model, which they are not when cut.
    ids = tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"]
    for start in range(0, len(ids), most):
        yield tuple(ids[start : start + most])


def _refuse_unknown(model: TracedModel, sequences: Sequence[TextSequence]) -> None:
    largest = max(max(item.ids) for item in sequences)
    known = min(model.anatomy.vocab, model.embeddings)
    if largest >= known:
        raise InputError(
            f"the tokenizer gives token {largest}, but {model.name} has {known} tokens: pass the tokenizer that "
            "belongs to the model"
        )
