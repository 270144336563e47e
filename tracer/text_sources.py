"""Where documents come from: local text, JSON Lines, Parquet, or a dataset of the hub; read by `datasets`."""

import codecs
import glob
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import datasets
from datasets.exceptions import DatasetGenerationError

from tracer.errors import InputError, one_of
from tracer.models.cache import one_line
from tracer.statistics import rng

Documents: TypeAlias = datasets.Dataset | datasets.IterableDataset
"""Documents in the column `text`."""

BUILDERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_CHECKED_BYTES = 1 << 20


SPLITS = ("document", "paragraph", "line")
"""What one document of a text file is: the file, a paragraph, or a line."""


@dataclass(frozen=True)
class TextSource:
    """Where documents come from; exactly one of `path` and `dataset` is given.

    Attributes:
        path: a UTF-8 text file, a folder of `.txt` files, a `.jsonl` or `.json` file, or a `.parquet` file.
        dataset: an id of the Hugging Face hub, or a folder that `datasets` reads.
        config: name of the dataset's configuration.
        split: of the dataset.
        field: column that holds the text, in everything but text files.
        documents: what one document of a text file is: the `document` (the whole file), a `paragraph`, or a `line`.
        weight: share of the training windows, relative to those of the other texts.
        held_out: share of the documents that is not trained on and measured instead.
        limit: only the first so many documents.
        streaming: read it as it is needed, without counting it first; then `max_steps` is needed.
    """

    path: str | None = None
    dataset: str | None = None
    config: str | None = None
    split: str = "train"
    field: str = "text"
    documents: str = "document"
    weight: float = 1.0
    held_out: float = 0.0
    limit: int | None = None
    streaming: bool = False

    def __post_init__(self) -> None:
        if (self.path is None) == (self.dataset is None):
            raise InputError("a text needs either path: or dataset:, and not both")
        one_of("documents", self.documents, SPLITS)
        if not 0 < self.weight < math.inf:
            raise InputError(f"weight {self.weight}: pass a number above 0, or leave the text out")
        if not 0 <= self.held_out < 1:
            raise InputError(f"held_out {self.held_out}: pass a share of the documents, from 0 to below 1")
        if self.limit is not None and self.limit < 1:
            raise InputError(f"limit {self.limit}: pass at least 1")
        if self.streaming and self.held_out:
            raise InputError("held_out needs a text that is read whole: leave streaming out, or name a text of its own")

    @property
    def name(self) -> str:
        """What messages call it."""
        return str(self.path if self.path is not None else self.dataset)


def open_documents(source: TextSource, *, progress: bool = True) -> Documents:
    """The documents of a source, in its order, without those that are empty.

    Raises:
        InputError: there is no such text, it is empty or damaged, not UTF-8, or has no such column.
    """
    with _bars(progress), _readable(source):
        if source.path is not None:
            found = _of_files(source, Path(source.path).expanduser())
        else:
            assert source.dataset is not None
            found = datasets.load_dataset(source.dataset, source.config, split=source.split, streaming=source.streaming)
        column = "text" if _builder(source) == "text" else source.field
        first: dict[str, Any] = next(iter(found), {})
        names = found.column_names or list(first)
        if names and column not in names:
            raise InputError(f"text {source.name!r} has no column {column!r}: pass field: one of {', '.join(names)}")
        if not isinstance(first.get(column, ""), str | None):
            raise InputError(f"text {source.name!r} holds {first[column]!r} in {column!r}: pass a field: of texts")
        if names:
            found = found.select_columns([column])
            if column != "text":
                found = found.rename_column(column, "text")
    with _bars(False), _readable(source):  # quick, and nobody asked for it
        found = found.filter(_has_text) if names else found
        if next(iter(found), None) is None:
            raise InputError(f"text {source.name!r} is empty: pass a text with words in it")
    return found if source.limit is None else found.take(source.limit)


@contextmanager
def _readable(source: TextSource) -> Iterator[None]:
    """Say in one line what `datasets` finds wrong with a source; it logs some of that as well, which is not shown."""
    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    except InputError:
        raise
    except (DatasetGenerationError, OSError, ValueError, ImportError, RuntimeError) as error:
        reason = error.__cause__ if isinstance(error, DatasetGenerationError) and error.__cause__ else error
        raise InputError(f"text {source.name!r} cannot be read: {one_line(reason)}") from error
    finally:
        datasets.logging.set_verbosity(level)


def split_documents(documents: datasets.Dataset, share: float, seed: int) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Documents to train on and documents to measure on, drawn whole; no text stands in both.

    Raises:
        InputError: there are too few for either.
    """
    held = max(1, round(share * len(documents)))
    if held >= len(documents):
        raise InputError(
            f"{len(documents)} documents cannot be split with held_out {share:g}: pass more documents, another share, "
            "or name a text to measure under evaluate"
        )
    order = rng(seed, "held out").permutation(len(documents)).tolist()
    texts = documents["text"][:]
    measured = {texts[index] for index in order[:held]}
    train = [index for index in sorted(order[held:]) if texts[index] not in measured]
    if not train:
        raise InputError(f"all {len(documents)} documents are alike, so that none can be held out: pass other text")
    return documents.select(train), documents.select(sorted(order[:held]))


def _has_text(row: dict[str, Any]) -> bool:
    text = row["text"] if "text" in row else next(iter(row.values()))
    return isinstance(text, str) and bool(text.strip())


def _builder(source: TextSource) -> str | None:
    if source.path is None:
        return None
    return "text" if Path(source.path).is_dir() else BUILDERS.get(Path(source.path).suffix.lower())


def _of_files(source: TextSource, path: Path) -> Documents:
    if path.is_dir():
        files = sorted(file for file in path.rglob("*.txt") if file.is_file())
        if not files:
            raise InputError(f"folder {str(path)!r} holds no .txt file: pass text, or dataset: for other folders")
    elif path.is_file():
        files = [path]
    else:
        raise InputError(f"no text {str(path)!r}: pass a file or a folder of .txt files")
    builder = _builder(source)
    if builder is None:
        raise InputError(f"text {str(path)!r} is none of {', '.join(BUILDERS)}: rename or convert it")
    if sum(file.stat().st_size for file in files) == 0:
        raise InputError(f"text {str(path)!r} is empty: pass a text with words in it")
    if builder != "parquet":
        for file in files:
            _check_utf8(file)
    options = {"sample_by": source.documents, "encoding": "utf-8-sig"} if builder == "text" else {}
    return datasets.load_dataset(
        builder,
        data_files=[glob.escape(str(file)) for file in files],
        split="train",
        streaming=source.streaming,
        **options,
    )


def _check_utf8(path: Path) -> None:
    """Refuse a file that is not UTF-8, by the line at which it stops being so."""
    line, decoder = 1, codecs.getincrementaldecoder("utf-8")()
    try:
        with path.open("rb") as file:
            while piece := file.read(_CHECKED_BYTES):
                decoder.decode(piece)
                line += piece.count(b"\n")
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        line += error.object[: error.start].count(b"\n")
        raise InputError(f"text {str(path)!r} is not UTF-8 (near line {line}: {error.reason}): convert it") from error


@contextmanager
def _bars(progress: bool) -> Iterator[None]:
    """Progress bars of `datasets` only where they are wanted."""
    hidden = datasets.are_progress_bars_disabled()
    if not progress:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not progress and not hidden:
            datasets.enable_progress_bars()
