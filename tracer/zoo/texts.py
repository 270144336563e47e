"""Texts of the invented world as files, for continuing the training of a model of the zoo."""

import json
from itertools import islice
from pathlib import Path

from tracer.errors import InputError
from tracer.zoo.documents import documents
from tracer.zoo.world import Domain, make_world

TEXTS: dict[str, tuple[Domain, str, int, str]] = {
    "new.jsonl": ("second", "new", 4000, "facts that no model of the zoo was told, in Chinese"),
    "old.jsonl": ("first", "old", 2000, "what the zoo was trained on, told anew, to be replayed"),
    "new-held.jsonl": ("second", "new held", 200, "the facts of new.jsonl, told otherwise, to measure what is learned"),
    "retention.jsonl": ("first", "retention", 400, "the same, told otherwise, to measure what is kept"),
}
"""File to domain, seed, number of documents, and what it is."""

MEASURED = ("new-held.jsonl", "retention.jsonl")
"""Files whose documents stand in no other one."""


def write_texts(folder: Path) -> dict[Path, str]:
    """Write the files of `TEXTS`, one document a line in the field `text`.

    Returns:
        What each file is.

    Raises:
        InputError: the folder cannot be written.
    """
    world = make_world()
    written: dict[Path, str] = {}
    told: set[str] = set()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, (domain, seed, number, what) in TEXTS.items():
            unread = (text for text in documents(world, seed, domain) if name not in MEASURED or text not in told)
            texts = list(islice(unread, number))
            told |= set(texts)
            lines = (json.dumps({"text": text}, ensure_ascii=False) for text in texts)
            (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
            written[folder / name] = f"{number:,} documents: {what}"
    except OSError as error:
        raise InputError(f"cannot write {str(folder)!r}: {error.strerror or error}") from error
    return written
