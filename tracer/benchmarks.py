"""C-Eval and CMMLU: their questions from local files, asked by the task definitions of lm-evaluation-harness.

Prompts, descriptions and shots are those of the harness's own tasks `ceval-valid_SUBJECT` and `cmmlu_SUBJECT`; only
where the questions come from and what stands between prompt and letter is decided here. C-Eval's test answers are not
public, so that its `val` split is asked.
"""

import difflib
import io
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import yaml

from tracer.errors import InputError
from tracer.models.cache import one_line

LETTERS = ("A", "B", "C", "D")
SHOTS = "dev"
"""The split that shots come from."""
CHANCE = 1 / len(LETTERS)

DATA = "LAYERTRACER_DATA"
"""Environment variable with the folder of a local copy."""

FORMS: Mapping[str, str] = {"A": "", "␣A": " "}
"""What stands between the prompt and the letter, in the shots too, by how it is called: nothing, as in the benchmarks'
own scripts, or a space, as the harness does where a task does not say otherwise."""


@dataclass(frozen=True)
class Benchmark:
    """A benchmark of questions with four choices.

    Attributes:
        name: as a suite.
        title: for people.
        split: that is asked.
        question: column of the question.
        answer: column of the right letter.
        tasks: folder of the harness's task files, and also that of the questions in a local copy.
        prefix: of the harness's tasks.
        file: name of a local file, from `subject` and `split`.
    """

    name: str
    title: str
    split: str
    question: str
    answer: str
    tasks: str
    prefix: str
    file: str

    def subjects(self) -> tuple[str, ...]:
        """All subjects, by their names in files.

        Raises:
            InputError: lm-evaluation-harness is not installed.
        """
        files = _harness_tasks(self.tasks).glob(f"{self.prefix}*.yaml")
        return tuple(sorted(path.stem.removeprefix(self.prefix) for path in files))

    def chosen(self, names: Sequence[str] | None) -> tuple[str, ...]:
        """Some of the subjects, or all.

        Raises:
            InputError: one is unknown.
        """
        known = self.subjects()
        if names is None:
            return known
        for name in names:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                raise InputError(f"{self.title} has no subject {name!r}: pass {near[0] if near else known[0]}, ...")
        if not names:
            raise InputError(f"no subject of {self.title} was named: pass {known[0]}, ... or leave it out for all")
        return tuple(dict.fromkeys(names))

    def task(self, subject: str, form: str, folder: Path | None) -> dict[str, Any]:
        """The harness's task of a subject in one answer form.

        Args:
            subject: one of `subjects`.
            form: one of `FORMS`.
            folder: of a local copy; None for the data set of the hub that the harness names.
        """
        own = yaml.safe_load((_harness_tasks(self.tasks) / f"{self.prefix}{subject}.yaml").read_text("utf-8"))
        shared = yaml.safe_load((_harness_tasks(self.tasks) / own.pop("include")).read_text("utf-8"))
        task = {**shared, **own, "task": task_name(self, subject, form), "target_delimiter": FORMS[form]}
        if folder is None:
            return task
        at_hub = ("dataset_path", "dataset_name")
        return {key: value for key, value in task.items() if key not in at_hub} | {
            "custom_dataset": _loader(self, subject, folder)
        }

    def open(self, subject: str, form: str, folder: Path | None, shots: int, manager: Any) -> Any:
        """The harness's task object of a subject in one answer form, with its questions read.

        Args:
            subject: one of `subjects`.
            form: one of `FORMS`.
            folder: of a local copy; None for the hub.
            shots: solved examples before each question.
            manager: the harness's `TaskManager`.

        Raises:
            InputError: the questions cannot be read.
        """
        try:
            with quiet_harness():
                config = self.task(subject, form, folder) | {"num_fewshot": shots}
                return manager.load([config])["tasks"][task_name(self, subject, form)]
        except InputError:
            raise
        except (OSError, ValueError, RuntimeError) as error:
            raise InputError(
                f"{self.title} cannot be read from the hub ({one_line(error)}): pass data= a folder with its CSV files"
            ) from error

    def read(self, folder: Path, subject: str, split: str) -> pd.DataFrame:
        """The questions of a subject in a local copy: the columns `question`, `A` to `D`, `answer` of the benchmark.

        Args:
            folder: of a local copy: holds `SPLIT/FILE`, or the benchmark's own folder that does.
            subject: one of `subjects`.
            split: the one that is asked, or `SHOTS`.

        Raises:
            InputError: no such file, it is damaged, a column or an answer is missing.
        """
        name = Path(split) / self.file.format(subject=subject, split=split)
        path = next((place / name for place in (folder / self.tasks, folder) if (place / name).is_file()), None)
        if path is None:
            raise InputError(
                f"no file {str(name)!r} of {self.title} in {str(folder)!r}: pass data= a folder with its CSV files, or "
                "leave the subject out"
            )
        try:
            table = pd.read_csv(path, dtype=str, keep_default_na=False, encoding="utf-8-sig")
        except (OSError, ValueError) as error:
            raise InputError(f"{str(path)!r} cannot be read: {one_line(error)}") from error
        columns = [self.question, *LETTERS, self.answer]
        missing = [column for column in columns if column not in table]
        if missing:
            raise InputError(
                f"{str(path)!r} has no column {missing[0]!r}: pass the split {self.split!r}, which has answers, in the "
                "official layout"
            )
        for number, letter in enumerate(table[self.answer]):
            if letter not in LETTERS:
                raise InputError(
                    f"{str(path)!r}, question {number}: its answer is {letter!r}, none of {', '.join(LETTERS)}: "
                    f"pass the split {self.split!r}, whose answers are public"
                )
        if table.empty:
            raise InputError(f"{str(path)!r} holds no question")
        return table[columns]


def task_name(benchmark: Benchmark, subject: str, form: str) -> str:
    """What the harness calls a subject in one answer form."""
    return f"{benchmark.prefix}{subject} {form}"


def suite_name(benchmark: Benchmark, form: str) -> str:
    """What a result calls a benchmark in one answer form."""
    return f"{benchmark.name} {form}"


@contextmanager
def quiet_harness() -> Iterator[None]:
    """Without the harness's own bars and remarks; what goes wrong is raised."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


def data_folder(data: str | os.PathLike[str] | None) -> Path | None:
    """Where a local copy of the benchmarks lies: what was passed, or else what `LAYERTRACER_DATA` says.

    Returns:
        None for the hub.

    Raises:
        InputError: there is no such folder.
    """
    said = os.environ.get(DATA) if data is None else data
    if not said:
        return None
    if not Path(said).is_dir():
        where = f" (of {DATA})" if data is None else ""
        raise InputError(f"no folder {str(said)!r}{where} of questions: pass data= one that holds ceval or cmmlu")
    return Path(said)


def _loader(benchmark: Benchmark, subject: str, folder: Path) -> Callable[..., dict[str, Any]]:
    def loaded(**_: Any) -> dict[str, datasets.Dataset]:
        tables = {split: benchmark.read(folder, subject, split) for split in (benchmark.split, SHOTS)}
        return {split: datasets.Dataset.from_pandas(table, preserve_index=False) for split, table in tables.items()}

    return loaded


def _harness_tasks(folder: str) -> Path:
    found = find_spec("lm_eval")
    if found is None or not found.submodule_search_locations:
        raise InputError("C-Eval and CMMLU need lm-evaluation-harness: pip install 'layertracer[eval]'")
    return Path(found.submodule_search_locations[0]) / "tasks" / folder


BENCHMARKS: Mapping[str, Benchmark] = {
    "ceval": Benchmark(
        "ceval", "C-Eval", "val", "question", "answer", "ceval", "ceval-valid_", "{subject}_{split}.csv"
    ),
    "cmmlu": Benchmark("cmmlu", "CMMLU", "test", "Question", "Answer", "cmmlu", "cmmlu_", "{subject}.csv"),
}
"""The benchmarks, by name."""
