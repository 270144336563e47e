"""Questions of C-Eval and CMMLU as probes, whose target is the right letter."""

import os
from collections.abc import Sequence

from tracer.benchmarks import BENCHMARKS, LETTERS, data_folder, quiet_harness
from tracer.errors import InputError
from tracer.probes.reading import Probe, ProbeSet

FORM = "A"
"""The letter right after the prompt, as in the benchmarks' own scripts."""


def read_questions(
    source: str, *, subjects: Sequence[str] | None = None, data: str | os.PathLike[str] | None = None
) -> ProbeSet:
    """The questions of a benchmark in the words of lm-evaluation-harness, without shots.

    Args:
        source: `ceval:val` or `cmmlu:test`.
        subjects: only these; each is a group.
        data: folder of a local copy, as in `tracer.evaluate`.

    Raises:
        InputError: no such benchmark, split or subject, or the questions cannot be read.
    """
    name, _, split = source.partition(":")
    benchmark = BENCHMARKS[name]
    if split != benchmark.split:
        raise InputError(
            f"{source!r}: of {benchmark.title} the split {benchmark.split} is asked: pass {name}:{benchmark.split}"
        )
    folder, chosen = data_folder(data), benchmark.chosen(subjects)
    from lm_eval.tasks import TaskManager

    with quiet_harness():
        manager = TaskManager(include_defaults=False)
    probes = []
    for subject in chosen:
        task = benchmark.open(subject, FORM, folder, 0, manager)
        for number, doc in enumerate(task.eval_docs):
            letter = doc[benchmark.answer]
            if letter not in LETTERS:
                raise InputError(f"{subject}/{number} of {source} has the answer {letter!r}: pass a copy with answers")
            probes.append(
                Probe(prompt=task.fewshot_context(doc, 0), target=letter, id=f"{subject}/{number}", group=subject)
            )
    return ProbeSet(source, tuple(probes), shipped=True)
