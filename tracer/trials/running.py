"""The verb `trial`: every arm at every rate with every seed, each a training of its own, in one process or several."""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from tracer.errors import Diverged, InputError, TracerError
from tracer.evaluation.asking import Items
from tracer.freezing.cost import price
from tracer.freezing.plan import FreezePlan
from tracer.models.checkpoint import transformers_output
from tracer.results import plain_data
from tracer.runs import versions
from tracer.training.asked import read_asked
from tracer.training.continuing import cpt
from tracer.training.output import ASKED, BEGUN
from tracer.training.output import PLAN as PLAN_FILE
from tracer.training.preparing import Prepared, plan_for, prepare
from tracer.trials.recipe import Run, TrialRecipe, read_trial
from tracer.trials.records import HALVES, RUNS, Record, condensed, halves, record_path
from tracer.trials.results import TRIAL, TrialResult, recipe_in

WORK = "work"
"""Folder of the trainings that are running; each is deleted when its record is written."""

POLL = 1.0
"""Seconds between two looks at what other processes have finished."""


def trial(
    recipe: str | Path | Mapping[str, Any] | TrialRecipe,
    *,
    resume: bool = False,
    force: bool = False,
    jobs: int = 1,
    part: tuple[int, int] = (1, 1),
    progress: bool = True,
) -> TrialResult:
    """Train every arm of a trial at every rate with every seed, and compare them.

    Args:
        recipe: a YAML file, what it holds, or a recipe that is read already.
        resume: go on with the trial in the output folder; finished trainings are kept.
        force: replace what the folder holds.
        jobs: processes at once, each with one thread where there is no accelerator.
        part: `(k, n)`: only the k-th of n parts of the trainings, for several machines; bring their folders `runs`
            together afterwards.
        progress: show a progress bar and a line for each finished training.

    Returns:
        The result: of all trainings that are finished.

    Raises:
        InputError: the recipe, an arm, a text or the folder cannot be used; nothing has been written.
        ModelRefused: the model's blocks cannot be found exactly.

    Example:
        >>> import tracer
        >>> result = tracer.trial("trial.yaml", jobs=2)  # doctest: +SKIP
        >>> print(result.summary())  # doctest: +SKIP
    """
    read = recipe if isinstance(recipe, TrialRecipe) else read_trial(recipe)
    ready = check_trial(read, resume=resume, force=force, jobs=jobs, part=part, progress=progress)
    _begin(ready, force=force)
    if ready.waiting:
        with _reporting(ready, progress) as report:
            if jobs == 1:
                for run in ready.waiting:
                    run_one(read, run)
                    report()
            else:
                _in_processes(ready, jobs, report)
    return TrialResult.load(read.folder)


@dataclass(frozen=True)
class ReadyTrial:
    """A trial that could begin or go on.

    Attributes:
        recipe: what it was made from.
        about: what the result says about the trial, as plain data; `trial.json` holds it.
        arms: one line each for people: blocks, share of parameters, predicted time.
        runs: trainings of this part.
        waiting: those of them that are not finished.
    """

    recipe: TrialRecipe
    about: Mapping[str, Any]
    runs: Sequence[Run]
    waiting: Sequence[Run]

    def summary(self) -> str:
        """The arms and what is to be done, as text for a terminal."""
        from tracer.trials.summary import arms_table, scope_of

        measured = ", ".join(
            f"{name} {part['validation']}+{part['test']}" for name, part in self.about["measures"].items()
        )
        return "\n".join(
            [
                scope_of(self.about),
                "",
                arms_table(self.about),
                "",
                f"measured every {self.recipe.every} steps, items for choosing + for reading: {measured}",
                f"{len(self.runs)} trainings of {self.recipe.steps} steps, {len(self.runs) - len(self.waiting)} of "
                "them finished",
            ]
        )


def check_trial(
    recipe: TrialRecipe, *, resume: bool, force: bool, jobs: int, part: tuple[int, int], progress: bool
) -> ReadyTrial:
    """All that `trial` checks before it writes anything; see there for arguments and errors."""
    if resume and force:
        raise InputError("resume goes on and force begins anew: pass one of them")
    if jobs < 1 or not 1 <= part[0] <= part[1]:
        raise InputError(f"jobs {jobs}, part {part[0]}/{part[1]}: pass at least 1 job, and part K/N with K from 1 to N")
    folder = recipe.folder
    _check_folder(folder, resume=resume, force=force)
    runs = list(recipe.runs())[part[0] - 1 :: part[1]]
    first = next(recipe.runs())
    ready = prepare(recipe.training_of(first, folder / WORK / first.name), progress=progress)
    about = _about(recipe, ready)
    if resume and (folder / TRIAL).is_file():
        check_same(folder, about)
    waiting = [run for run in runs if force or not _finished(folder, run, recipe)]
    return ReadyTrial(recipe, about, runs, waiting)


def _check_folder(folder: Path, *, resume: bool, force: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise InputError(f"output_dir {str(folder)!r} is a file: pass a folder that does not exist yet")
    holds = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    if holds and TRIAL not in holds:
        raise InputError(f"output_dir {str(folder)!r} holds other files ({holds[0]}): pass a folder of its own")
    if holds and not (resume or force):
        number = len(list((folder / RUNS).glob("*.json")))
        raise InputError(
            f"output_dir {str(folder)!r} holds a trial with {number} finished trainings: pass --resume, --force, or "
            "another folder"
        )


def _about(recipe: TrialRecipe, ready: Prepared) -> dict[str, Any]:
    """All that is known of a trial before its first step."""
    assert ready.questions is not None
    measures = {}
    for name, items in ready.questions.items.items():
        numbers = {half: int(which.sum()) for half, which in halves(items).items()}
        if not all(numbers.values()):
            raise InputError(
                f"{name} has {len(items.names)} items, of which some are chosen by and others read: pass at least 2"
            )
        score = recipe.measures[name].score or ("accuracy" if items.kind == "probes" else "bits_per_byte")
        if (score == "bits_per_byte") != (items.kind == "text"):
            raise InputError(f"{name}: score {score!r} does not go with {items.kind}: leave it out")
        measures[name] = {"kind": items.kind, "score": score, **numbers, "digest": _digest(items)}
    model = ready.model
    return plain_data(
        {
            "recipe": {**asdict(recipe), "output_dir": None},
            "model": {
                "name": model.name,
                "fingerprint": model.fingerprint(),
                "class": model.anatomy.model_class,
                "mixers": list(model.anatomy.mixers),
            },
            "texts": {
                name: {"digest": count.digest, "documents": count.documents, "tokens": count.tokens}
                for name, count in ready.texts.counts.items()
            },
            "measures": measures,
            "arms": {name: _arm(recipe, ready, name) for name in recipe.arms},
            "versions": versions(),
        }
    )


def _arm(recipe: TrialRecipe, ready: Prepared, name: str) -> dict[str, Any]:
    """Plan and price of an arm; of one that is drawn at random those of the first seed."""
    run = Run(name, recipe.rates[0], 0)
    training = recipe.training_of(run, recipe.folder / WORK / run.name)
    try:
        plan = plan_for(training, ready.model, progress=False)
    except InputError as error:
        raise InputError(f"arm {name}: {error}") from error
    found = {"rule": recipe.arms[name].get("rule"), **_decisions(plan), **plan.parameters, "price": None}
    if ready.prices is not None:
        batch = int(training.arguments.get("per_device_train_batch_size", 8))
        known = ready.prices.full
        prices = price(plan, ready.model.model, block_size=training.block_size, batch=batch, full=known)
        found["price"] = {
            "flops": prices.plan.flops,
            "bytes": prices.plan.bytes,
            "flops_full": prices.full.flops,
            "bytes_full": prices.full.bytes,
        }
    return found


def _decisions(plan: FreezePlan) -> dict[str, Any]:
    return {key: getattr(plan, key) for key in ("train", "embeddings", "norm", "head")}


def _digest(items: Items) -> str:
    return sha256(json.dumps(asdict(items), ensure_ascii=False).encode()).hexdigest()[:16]


FREE = ("seeds", "budgets", "claims", "baseline", "output_dir", "arms", "rates")
"""Keys of a recipe that may change between two sittings; finished trainings are compared with their own arms."""


def check_same(folder: Path, about: Mapping[str, Any]) -> None:
    """Refuse to go on with a trial that was begun otherwise."""
    try:
        earlier = json.loads((folder / TRIAL).read_text(encoding="utf-8"))
        before = plain_data(asdict(recipe_in(earlier)))
        pairs = [(earlier["model"]["fingerprint"], about["model"]["fingerprint"], "another model")]
        pairs += [(earlier["texts"], about["texts"], "another text")]
        pairs += [(earlier["measures"], about["measures"], "other measures")]
        pairs += [(before[key], value, f"another {key}") for key, value in about["recipe"].items() if key not in FREE]
        pairs.append((max(before["budgets"]), max(about["recipe"]["budgets"]), "another longest budget"))
        pairs += [
            (plan, about["recipe"]["arms"].get(name, plan), f"another plan of arm {name}")
            for name, plan in before["arms"].items()
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{str(folder / TRIAL)!r} is damaged ({error}): pass --force to begin anew") from error
    for then, now, what in pairs:
        if then != now:
            raise InputError(f"{str(folder)!r} was begun with {what}: resume with the same, or pass --force")


def _finished(folder: Path, run: Run, recipe: TrialRecipe) -> bool:
    if not record_path(folder, run).is_file():
        return False
    record = Record.read(folder, run)
    return record.stopped is not None or record.steps[-1] == recipe.steps


def _begin(ready: ReadyTrial, *, force: bool) -> None:
    folder = ready.recipe.folder
    staging = folder / f"{TRIAL}.writing"
    try:
        if force and folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        staging.write_text(json.dumps(ready.about, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        os.replace(staging, folder / TRIAL)
    except OSError as error:
        raise InputError(f"output_dir {str(folder)!r} cannot be written: {error.strerror or error}") from error


def run_one(recipe: TrialRecipe, run: Run) -> Record:
    """Make one training and keep its record; what an interrupt left of it is gone on with.

    Args:
        recipe: of the trial.
        run: one of its trainings.

    Raises:
        InputError: it cannot be made.
    """
    work = recipe.folder / WORK / run.name
    stopped, loss, tokens, seconds = None, [], None, None
    with transformers_output(False):
        try:
            begun = (work / BEGUN).is_file()
            result = cpt(recipe.training_of(run, work), resume=begun, progress=False, priced=False)
            rows = result.curve[["step", "loss"]].dropna().round(6)
            loss, tokens, seconds = rows.to_numpy().tolist(), result.run["tokens"], round(result.run["seconds"], 1)
        except Diverged as error:  # as the highest of the rates may; what it reached before counts
            stopped = str(error)
    items, answers = read_asked(work / ASKED)
    record = Record(
        run,
        _decisions(FreezePlan.load(work / PLAN_FILE)),
        sorted(answers),
        condensed(items, answers),
        loss,
        tokens,
        seconds,
        stopped,
    )
    record.write(recipe.folder)
    shutil.rmtree(work, ignore_errors=True)
    return record


@contextmanager
def _reporting(ready: ReadyTrial, progress: bool) -> Iterator[Any]:
    """A progress bar over trainings; yields what looks for newly finished ones."""
    waiting = list(ready.waiting)
    number = len(ready.runs)
    with tqdm(
        total=number, initial=number - len(waiting), desc="trial", unit="run", disable=not progress, file=sys.stderr
    ) as bar:
        yield _Reporter(ready, waiting, bar)


class _Reporter:
    """Says what is newly finished."""

    def __init__(self, ready: ReadyTrial, waiting: list[Run], bar: Any):
        self.ready, self.waiting, self.bar = ready, waiting, bar

    def __call__(self) -> None:
        folder = self.ready.recipe.folder
        for run in [run for run in self.waiting if record_path(folder, run).is_file()]:
            self.waiting.remove(run)
            if not self.bar.disable:
                self.bar.write(self._line(Record.read(folder, run)), file=sys.stderr)
            self.bar.update()

    def _line(self, record: Record) -> str:
        """What came of a training: every measure at its end, over all items."""
        parts = []
        for name, about in self.ready.about["measures"].items():
            own = record.measures[name]
            total = sum(own[half]["n"] for half in HALVES)
            mean = sum(own[half]["n"] * own[half][about["score"]][-1] for half in HALVES) / total
            parts.append(f"{name} {mean:.3f}")
        end = record.stopped or f"{record.seconds:.0f} s"
        run = record.run
        return f"{run.arm}, rate {run.rate:g}, seed {run.seed}: {', '.join(parts)} ({end})"


def _in_processes(ready: ReadyTrial, jobs: int, report: Any) -> None:
    """Make the waiting trainings in several processes, each of which has its share of them."""
    context = get_context("spawn")
    shares = [list(ready.waiting[first::jobs]) for first in range(min(jobs, len(ready.waiting)))]
    processes = [context.Process(target=_work, args=(ready.recipe, share), daemon=True) for share in shares]
    try:
        for process in processes:
            process.start()
        while any(process.is_alive() for process in processes):
            wait([process.sentinel for process in processes if process.is_alive()], timeout=POLL)
            report()
            time.sleep(POLL if any(process.is_alive() for process in processes) else 0)
        report()
    finally:
        for process in processes:
            process.terminate()
    bad = [process.exitcode for process in processes if process.exitcode]
    if bad:
        raise InputError(
            f"{len(bad)} of {jobs} processes ended before their last training (exit code {bad[0]}; what they said is "
            "above): finished trainings are kept, go on with --resume"
        )


def _work(recipe: TrialRecipe, runs: Sequence[Run]) -> None:
    """Make some trainings in a process of its own; its parent ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not torch.accelerator.is_available():
        torch.set_num_threads(1)
    try:
        for run in runs:
            run_one(recipe, run)
    except TracerError as error:
        print(f"tracer: {error}", file=sys.stderr)
        sys.exit(2)
