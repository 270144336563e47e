"""Trains the zoo from nothing: `make zoo`, or `python -m tracer.zoo.build --help`.

Each model is trained by a process of its own on one thread. What is finished is kept, and an interrupted training goes
on from its last checkpoint; neither is taken for a training with other settings. Of every run a folder is left with the
model in float16, its tokenizer and its card; those of the shipped models are copied into the package.
"""

import hashlib
import json
import os
import shutil
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import click
import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from tracer.errors import InputError
from tracer.evaluation.next_token import next_tokens
from tracer.models.plain import forward_logits
from tracer.probes import ProbeSet, tokenize
from tracer.runs import versions
from tracer.zoo import documents, training
from tracer.zoo.families import RUNS, WIDTH, Run
from tracer.zoo.questions import probe_sets, write_probe_sets
from tracer.zoo.shelf import CARD, SHELF, Card, write_checksums, write_readme
from tracer.zoo.tokenizer import make_tokenizer
from tracer.zoo.world import World, make_world

PROBES = SHELF.parents[2] / "probes" / "zoo"
"""Where a checkout keeps the probe sets of the zoo."""

UNFINISHED, SETTINGS = "training", "settings.sha256"
"""Folder of a training that is not finished, and the file in it that says what is trained."""


def build(run: Run, folder: Path) -> dict[str, Any]:
    """Train, save and evaluate one model; returns its card.

    Args:
        run: What is trained.
        folder: Where the model goes, with its checkpoints in it while it trains. A finished one is left alone.

    Raises:
        InputError: The folder holds a model, or half of one, that was trained with other settings.
    """
    world = make_world()
    tokenizer = make_tokenizer(world)
    digest = settings_digest(run, world, tokenizer.backend_tokenizer.to_str())
    if (folder / CARD).is_file():
        known: dict[str, Any] = json.loads((folder / CARD).read_text(encoding="utf-8"))
        _check_settings(folder, known["settings"], digest)
        return known
    unfinished = folder / UNFINISHED
    unfinished.mkdir(parents=True, exist_ok=True)
    if (unfinished / SETTINGS).is_file():
        _check_settings(folder, (unfinished / SETTINGS).read_text(encoding="utf-8"), digest)
    (unfinished / SETTINGS).write_text(digest, encoding="utf-8")
    trained = training.train(run, world, tokenizer, unfinished)
    trained.model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # What is evaluated is what was written, as it is opened: float16 on disk, float32 in use.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    card = {
        "name": run.name,
        "family": run.family.name,
        "class": run.family.classes[1],
        "blocks": run.blocks,
        "parameters": model.num_parameters(),
        "seed": run.seed,
        "seeds_of_family": sum(replace(other, seed=run.seed) == run for other in RUNS.values()),
        "embedding_std": run.embedding_std,
        "data": {
            "world_seed": world.seed,
            "facts": len(world.first),
            "second_language_share": documents.ZH_SHARE,
            "in_context_share": documents.IN_CONTEXT_SHARE,
            "tokens": trained.tokens,
            "window": training.WINDOW,
            "batch": training.BATCH,
        },
        "training": {
            "steps": run.family.steps,
            "learning_rate": run.family.learning_rate,
            "warmup_steps": training.WARMUP_STEPS,
            "decay_share": training.DECAY_SHARE,
            "cpu_seconds": round(trained.cpu_seconds),
            "curve": trained.curve,
        },
        "accuracy": accuracy(model, world, tokenizer),
        "versions": versions(),
        "settings": digest,
    }
    write_readme(folder, card)
    shutil.rmtree(unfinished)
    # Last, since a folder with a card counts as finished.
    staged = folder / f".{CARD}"
    staged.write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
    os.replace(staged, folder / CARD)
    return card


def settings_digest(run: Run, world: World, tokenizer: str) -> str:
    """A hash of all that a training and its evaluation depend on, beside the code and the versions of libraries.

    Args:
        run: What is trained.
        world: What it learns.
        tokenizer: The tokenizer as JSON.
    """
    facts = [
        [asdict(fact.relation), fact.subject, fact.answer, sorted(fact.held)] for fact in world.first + world.second
    ]
    shares = (documents.IN_CONTEXT_SHARE, documents.ZH_SHARE, documents.ANSWER_FIRST_SHARE, documents.WEIGHTS)
    steps = (training.WINDOW, training.BATCH, training.WARMUP_STEPS, training.DECAY_SHARE)
    content = [asdict(run), WIDTH, facts, shares, documents.SENTENCES, steps, tokenizer]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _check_settings(folder: Path, found: str, wanted: str) -> None:
    if found != wanted:
        raise InputError(f"{str(folder)!r} was trained with other settings: delete it, or pass another folder as --out")


def accuracy(model: Any, world: World, tokenizer: Any) -> dict[str, dict[str, dict[str, int]]]:
    """How many probes of every relation of every set a model answers: `[set][relation]` to `n` and `answered`."""
    table: dict[str, dict[str, dict[str, int]]] = {}
    for name, probes in probe_sets(world).items():
        items = tokenize(ProbeSet(name, probes), tokenizer).items
        answered = next_tokens(partial(forward_logits, model), items).answered.tolist()
        groups = table.setdefault(name, {})
        for item, right in zip(items, answered, strict=True):
            counts = groups.setdefault(item.probe.group, {"n": 0, "answered": 0})
            counts["n"] += 1
            counts["answered"] += right
    return table


def _build_quietly(run: Run, folder: Path) -> None:
    """`build` in a process of its own: one thread, and none of the bars of transformers; its parent ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        build(run, folder)
    except InputError as error:
        print(f"{run.name}: {error}", file=sys.stderr)
        sys.exit(2)


def build_all(runs: Sequence[Run], out: Path, jobs: int, finished: Callable[[Run], None]) -> list[str]:
    """Build models, several at once; returns the names of those that failed.

    Args:
        runs: What is trained.
        out: Folder of their folders.
        jobs: Processes at a time.
        finished: Called with each run that is finished.
    """
    context = get_context("spawn")
    waiting, failed = deque(runs), []
    running: dict[int, tuple[Run, Any]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                run = waiting.popleft()
                process = context.Process(target=_build_quietly, args=(run, out / run.name), daemon=True)
                process.start()
                running[process.sentinel] = (run, process)
            for sentinel in wait(list(running)):
                run, process = running.pop(sentinel)  # type: ignore[arg-type]
                process.join()
                if process.exitcode == 0:
                    finished(run)
                else:
                    failed.append(run.name)
    finally:
        for _, process in running.values():
            process.terminate()
    return failed


@click.command()
@click.argument("names", nargs=-1)
@click.option("--out", default="runs/zoo", show_default=True, help="Folder for what is trained.")
@click.option("--jobs", default=2, show_default=True, help="Models trained at once, one thread each.")
def main(names: tuple[str, ...], out: str, jobs: int) -> None:
    """Train the models NAMES, or all of them, evaluate them, and put those that are shipped into the package."""
    unknown = [name for name in names if name not in RUNS]
    if unknown:
        raise click.UsageError(f"no model {unknown[0]!r}; pass some of {', '.join(RUNS)}")
    if not PROBES.parent.is_dir():
        raise click.UsageError(
            f"no folder {PROBES.parent}: the zoo is trained in a checkout, not in an installed package"
        )
    wanted = [RUNS[name] for name in names or RUNS]
    write_probe_sets(make_world(), PROBES)
    with tqdm(total=len(wanted), desc="Training the zoo", unit="model", file=sys.stderr) as bar:

        def finished(run: Run) -> None:
            card = Card(run.name, json.loads((Path(out) / run.name / CARD).read_text(encoding="utf-8")))
            bar.write(f"{run.name}: {card.share('held'):.1%} of the held probes answered", file=sys.stderr)
            if run.shipped:
                shelve(Path(out) / run.name)
            bar.update()

        failed = build_all(wanted, Path(out), jobs, finished)
    if failed:
        click.echo(f"not trained: {', '.join(failed)}; the others are kept, run this again", err=True)
        sys.exit(1)


def shelve(folder: Path) -> None:
    """Put a finished model into the package."""
    shutil.rmtree(SHELF / folder.name, ignore_errors=True)
    shutil.copytree(folder, SHELF / folder.name)
    write_checksums(tuple(name for name in RUNS if (SHELF / name / CARD).is_file()))


if __name__ == "__main__":
    main()
