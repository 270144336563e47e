"""Questions with four choices, asked through lm-evaluation-harness."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tqdm import tqdm

from tracer.benchmarks import LETTERS, Benchmark, quiet_harness, suite_name
from tracer.errors import InputError
from tracer.models.plain import evaluating
from tracer.models.traced import TracedModel
from tracer.partial import PartialRun

AT_ONCE = 16
"""Questions that are asked together, and kept when what follows is interrupted."""


class Harness:
    """Asks a model the questions of benchmarks.

    Args:
        model: reached by hooks, with a tokenizer.
        folder: of a local copy of the benchmarks; None for the hub.
        shots: solved examples before each question.
        batch_size: prompts of one forward.

    Raises:
        InputError: the model cannot be asked so.
    """

    def __init__(self, model: TracedModel, folder: Path | None, shots: int, batch_size: int):
        if model.tokenizer is None:
            raise InputError(f"{model.name} has no tokenizer, which questions need: add its files to the checkpoint")
        if model.backend != "hooks":
            raise InputError(f"questions are asked by the model itself: open {model.name} with backend 'hooks'")
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager

        self.folder, self.shots, self.model = folder, shots, model
        with quiet_harness():
            self._lm = HFLM(pretrained=model.model, tokenizer=model.tokenizer, batch_size=batch_size)
            self._tasks = TaskManager(include_defaults=False)
        self.truncated = 0

    def ask(
        self,
        benchmark: Benchmark,
        subjects: Sequence[str],
        forms: Sequence[str],
        *,
        limit: int | None,
        every: int,
        store: PartialRun,
        progress: bool,
    ) -> pd.DataFrame:
        """Every question in every answer form.

        Args:
            benchmark: whose.
            subjects: some of its subjects.
            forms: some of `tracer.benchmarks.FORMS`.
            limit: only the first so many questions of each subject.
            every: of these only every so-manyth, beginning with the first one.
            store: for what is answered already.
            progress: show a progress bar.

        Returns:
            One row a question and form: `suite`, `id`, `group` (the subject), `prompt` (with description and shots),
            `target`, `said` (letters), `answered`, `log_p` (of the right letter, nats), `p_said` and `mass`
            (probabilities of the letter that was said and of all four), `log_p_A` to `log_p_D`.
        """
        built = {
            (subject, form): benchmark.open(subject, form, self.folder, self.shots, self._tasks)
            for subject in tqdm(subjects, desc=f"reading {benchmark.title}", unit="subject", disable=not progress)
            for form in forms
        }
        asked = {subject: list(range(len(built[subject, forms[0]].eval_docs)))[:limit:every] for subject in subjects}
        rows: list[dict[str, Any]] = []
        total = sum(map(len, asked.values()))
        bar = tqdm(total=total, desc=f"Asking {benchmark.title}", unit="question", disable=not progress)
        with bar, evaluating(self.model.model):
            for subject, own in asked.items():
                for start in range(0, len(own), AT_ONCE):
                    numbers = own[start : start + AT_ONCE]
                    tasks = {form: built[subject, form] for form in forms}
                    rows += self._some(benchmark, subject, numbers, tasks, store)
                    bar.update(len(numbers))
        return pd.DataFrame(rows)

    def _some(
        self, benchmark: Benchmark, subject: str, numbers: list[int], tasks: dict[str, Any], store: PartialRun
    ) -> Iterator[dict[str, Any]]:
        """Rows of some questions of one subject."""
        name = f"{benchmark.name}-{subject}-{numbers[0]:05d}"
        if name not in store:
            store[name] = self._log_p(tasks, numbers)
        found = store[name]
        for form, task in tasks.items():
            for number, log_p in zip(numbers, found[form], strict=True):
                doc = task.eval_docs[number]
                prompt = task.fewshot_context(doc, self.shots)
                self.truncated += len(self._lm.tok_encode(prompt)) > self._lm.max_length
                gold, said = LETTERS.index(doc[benchmark.answer]), int(log_p.argmax())
                yield {
                    "suite": suite_name(benchmark, form),
                    "id": f"{subject}/{number}",
                    "group": subject,
                    "prompt": prompt,
                    "target": LETTERS[gold],
                    "said": LETTERS[said],
                    "answered": gold == said,
                    "log_p": float(log_p[gold]),
                    "p_said": float(np.exp(log_p[said])),
                    "mass": float(np.exp(log_p).sum()),
                    **{f"log_p_{letter}": float(value) for letter, value in zip(LETTERS, log_p, strict=True)},
                }

    def _log_p(self, tasks: dict[str, Any], numbers: list[int]) -> dict[str, np.ndarray]:
        """`[questions, 4]` log-probabilities of the letters after each prompt, by answer form.

        All forms are asked at once, so that a prompt that they share is run once.
        """
        from lm_eval import simple_evaluate

        names = {form: task.config.task for form, task in tasks.items()}
        with quiet_harness():
            found = simple_evaluate(
                model=self._lm,
                tasks=list(tasks.values()),
                num_fewshot=self.shots,
                samples=dict.fromkeys(names.values(), numbers),
                bootstrap_iters=0,
                log_samples=True,
                task_manager=self._tasks,
            )
        answers = {}
        for form, name in names.items():
            by_number = {sample["doc_id"]: sample["filtered_resps"] for sample in found["samples"][name]}
            answers[form] = np.array([[log_p for log_p, _ in by_number[number]] for number in numbers])
        return answers
