"""Trains the zoo from nothing: `make zoo`, or `python -m tracer.zoo.build --help`.

Each model is trained by a process of its own on one thread. What is finished is kept, and an interrupted training goes
on from its last checkpoint. Of every run a folder is left with the model in float16, its tokenizer and its card; those
of the shipped models are copied into the package.
"""

import json
import shutil
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from tracer.evaluation.next_token import next_tokens
from tracer.models.plain import forward_logits
from tracer.probes import ProbeSet, tokenize
from tracer.runs import versions
from tracer.zoo import training
from tracer.zoo.documents import IN_CONTEXT_SHARE, ZH_SHARE
from tracer.zoo.families import RUNS, Run
from tracer.zoo.questions import probe_sets, write_probe_sets
from tracer.zoo.shelf import CARD, SHELF, write_checksums, write_readme
from tracer.zoo.tokenizer import make_tokenizer
from tracer.zoo.world import WORLD_SEED, World, make_world

PROBES = SHELF.parents[2] / "probes" / "zoo"
"""Where a checkout keeps the probe sets of the zoo."""


def build(run: Run, folder: Path) -> dict[str, Any]:
    """Train, save and evaluate one model; returns its card.

    Args:
        run: What is trained.
        folder: Where the model goes, with its checkpoints beside it while it trains. A finished one is left alone.
    """
    if (folder / CARD).is_file():
        return json.loads((folder / CARD).read_text(encoding="utf-8"))
    world = make_world()
    tokenizer = make_tokenizer(world)
    started = time.process_time()
    trained = training.train(run, world, tokenizer, folder / "training")
    seconds = time.process_time() - started
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
            "world_seed": WORLD_SEED,
            "facts": len(world.first),
            "second_language_share": ZH_SHARE,
            "in_context_share": IN_CONTEXT_SHARE,
            "tokens": trained.tokens,
            "window": training.WINDOW,
            "batch": training.BATCH,
        },
        "training": {
            "steps": run.family.steps,
            "learning_rate": run.family.learning_rate,
            "warmup_steps": training.WARMUP_STEPS,
            "decay_share": training.DECAY_SHARE,
            "cpu_seconds": round(seconds),
            "curve": trained.curve,
        },
        "accuracy": accuracy(model, world, tokenizer),
        "versions": versions(),
    }
    (folder / CARD).write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
    write_readme(folder)
    shutil.rmtree(folder / "training")
    return card


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


def _quiet_worker() -> None:
    """One thread, and none of the many lines and bars that transformers shows while it trains and saves."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


@click.command()
@click.argument("names", nargs=-1)
@click.option("--out", default="runs/zoo", show_default=True, help="Folder for what is trained.")
@click.option("--jobs", default=2, show_default=True, help="Models trained at once, one thread each.")
def main(names: tuple[str, ...], out: str, jobs: int) -> None:
    """Train the models NAMES, or all of them, evaluate them, and put those that are shipped into the package."""
    unknown = [name for name in names if name not in RUNS]
    if unknown:
        raise click.UsageError(f"no model {unknown[0]!r}; pass some of {', '.join(RUNS)}")
    wanted = [RUNS[name] for name in names or RUNS]
    write_probe_sets(make_world(), PROBES)
    context = get_context("spawn")
    with (
        ProcessPoolExecutor(jobs, mp_context=context, initializer=_quiet_worker) as pool,
        tqdm(total=len(wanted), desc="Training the zoo", unit="model", file=sys.stderr) as bar,
    ):
        futures = {pool.submit(build, run, Path(out) / run.name): run for run in wanted}
        try:
            for future in as_completed(futures):
                run, card = futures[future], future.result()
                held = card["accuracy"]["held"].values()
                share = sum(group["answered"] for group in held) / sum(group["n"] for group in held)
                bar.write(f"{run.name}: {share:.1%} of the held probes answered", file=sys.stderr)
                if run.shipped:
                    shutil.copytree(Path(out) / run.name, SHELF / run.name, dirs_exist_ok=True)
                    write_checksums(tuple(name for name in RUNS if (SHELF / name / CARD).is_file()))
                bar.update()
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


if __name__ == "__main__":
    main()
