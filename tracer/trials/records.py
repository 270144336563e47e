"""What is kept of each training of a trial: one small JSON file, from which everything else is computed."""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool

from tracer.errors import InputError
from tracer.evaluation.asking import Answers, Items
from tracer.trials.recipe import Run

SCHEMA = 1
RUNS = "runs"
"""Folder of the records."""

HALVES = ("validation", "test")
"""Points are chosen on the first and read on the second."""

DIGITS = 6


@dataclass(frozen=True)
class Record:
    """A finished training.

    Attributes:
        run: which one.
        plan: blocks that it trained (`train`), and what happened to `embeddings`, `norm` and `head`.
        steps: at which it was measured, from 0 on.
        measures: by name, half and quantity: `n` items, and a number for each of `steps`.
        loss: step and mean training loss (nats a token) since the one before.
        tokens: that it was trained on.
        seconds: that it took, measuring included; None of one that was stopped.
        stopped: why it was stopped before its end; None of others.
    """

    run: Run
    plan: Mapping[str, Any]
    steps: Sequence[int]
    measures: Mapping[str, Mapping[str, Mapping[str, Any]]]
    loss: Sequence[Sequence[float]]
    tokens: int | None
    seconds: float | None
    stopped: str | None

    def write(self, folder: Path) -> None:
        """Write it into the folder of a trial, whole or not at all.

        Raises:
            InputError: the folder cannot be written.
        """
        path = record_path(folder, self.run)
        content = json.dumps({"schema": SCHEMA, **asdict(self)}, ensure_ascii=False) + "\n"
        staging = path.with_suffix(".writing")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            staging.write_text(content, encoding="utf-8")
            os.replace(staging, path)
        except OSError as error:
            raise InputError(f"cannot write {str(path)!r}: {error.strerror or error}") from error

    @classmethod
    def read(cls, folder: Path, run: Run) -> "Record":
        """Read it from the folder of a trial.

        Raises:
            InputError: it is damaged, or a later version wrote it.
        """
        path = record_path(folder, run)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data.pop("schema") != SCHEMA:
                raise InputError(f"{str(path)!r} was written by another version: delete it and resume")
            return cls(**{**data, "run": Run(**data["run"])})
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{str(path)!r} is damaged ({error}): delete it and resume") from error


def record_path(folder: Path, run: Run) -> Path:
    """Where the record of a run lies."""
    return folder / RUNS / f"{run.name}.json"


def halves(items: Items) -> dict[str, Bool[np.ndarray, " item"]]:
    """Which items of a measure belong to which half: by turns within each group, and on from one group to the next."""
    sizes = Counter(items.groups)
    place = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))  # of each group's next item
    second = []
    for group in items.groups:
        second.append(place[group] % 2 == 1)
        place[group] += 1
    test = np.array(second, dtype=bool)
    return {"validation": ~test, "test": test}


def condensed(
    items: Mapping[str, Items], answers: Mapping[int, Mapping[str, Answers]]
) -> dict[str, dict[str, dict[str, Any]]]:
    """The measures of a record from all answers of a training.

    Args:
        items: of each measure.
        answers: by step and measure.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name, own in items.items():
        found[name] = {}
        for half, which in halves(own).items():
            rows = [own.measures(answers[step][name], which) for step in sorted(answers)]
            found[name][half] = {
                key: rows[0][key] if key == "n" else [round(row[key], DIGITS) for row in rows] for key in rows[0]
            }
    return found
