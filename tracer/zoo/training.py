"""Training of one model of the zoo on documents of the invented world, on one thread, resumable."""

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from tracer.evaluation.next_token import next_tokens
from tracer.models.plain import forward_logits
from tracer.probes import ProbeSet, tokenize
from tracer.zoo.documents import documents
from tracer.zoo.families import Run, untrained
from tracer.zoo.mamba_scan import linear_backward
from tracer.zoo.questions import probe_sets
from tracer.zoo.world import World

WINDOW, BATCH = 64, 16
"""Tokens of a training window, and windows of a step. Windows are cut from the stream of documents where they fall."""
WARMUP_STEPS, DECAY_SHARE = 50, 0.4
"""Steps of linear warm-up, and the share of all steps in which the learning rate falls linearly to 0."""
EVALUATE_EVERY = 100


@dataclass(frozen=True)
class Training:
    """What came out of a training.

    Attributes:
        model: On the CPU, in float32, in eval mode.
        tokens: Tokens seen.
        cpu_seconds: Time of the process, of all of them where it was interrupted.
        curve: One entry per `EVALUATE_EVERY` steps: `step`, mean training `loss` since the last one (nats a token), and
            `held`, the share of held probes answered.
    """

    model: PreTrainedModel
    tokens: int
    cpu_seconds: float
    curve: tuple[Mapping[str, int | float], ...]


def windows(world: World, tokenizer: PreTrainedTokenizerFast, seed: int, number: int) -> Tensor:
    """`[number, WINDOW]` Token ids of a stream of documents, each after a BOS."""

    def stream() -> Iterator[int]:
        for document in documents(world, seed):
            yield from tokenizer(document)["input_ids"]

    return torch.tensor(list(islice(stream(), number * WINDOW))).reshape(number, WINDOW)


def train(run: Run, world: World, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Training:
    """Train a model from nothing, or go on from the last checkpoint in a folder; prints a line now and then.

    Args:
        run: What is trained.
        world: What it learns.
        tokenizer: Of the world.
        folder: For checkpoints.
    """
    model = untrained(run, len(tokenizer), tokenizer.bos_token_id)
    data = windows(world, tokenizer, run.seed, run.family.steps * BATCH)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=run.family.steps,
        per_device_train_batch_size=BATCH,
        learning_rate=run.family.learning_rate,
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": int(DECAY_SHARE * run.family.steps), "decay_type": "linear"},
        warmup_steps=WARMUP_STEPS,
        weight_decay=0.1,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        logging_steps=EVALUATE_EVERY,
        save_steps=EVALUATE_EVERY,
        save_total_limit=1,
        seed=run.seed,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    spent = _Spent(folder / "cpu_seconds")
    trainer = Trainer(
        model,
        arguments,
        train_dataset=[{"input_ids": window, "labels": window} for window in data],
        callbacks=[_Held(run.name, world, tokenizer), spent],
    )
    trainer.remove_callback(PrinterCallback)
    scan = linear_backward() if run.family.name == "mamba1" else contextlib.nullcontext()
    with scan:
        trainer.train(resume_from_checkpoint=get_last_checkpoint(folder) if folder.is_dir() else None)
    curve = tuple(
        {"step": entry["step"], "loss": entry["loss"], "held": entry["held"]}
        for entry in trainer.state.log_history
        if "held" in entry
    )
    return Training(model.eval(), data.numel(), spent.seconds, curve)


class _Spent(TrainerCallback):
    """Keeps the time of the process beside the checkpoints, so that an interrupted training knows all of it."""

    def __init__(self, file: Path):
        self.file = file
        self.before = float(file.read_text()) if file.is_file() else 0.0
        self.started = time.process_time()

    @property
    def seconds(self) -> float:
        """Time of this process and of those before it, up to their last checkpoints."""
        return self.before + time.process_time() - self.started

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Called by the Trainer whenever it has written a checkpoint."""
        self.file.write_text(str(self.seconds))


class _Held(TrainerCallback):
    """Adds the share of held probes that are answered to what the Trainer logs, and prints both."""

    def __init__(self, name: str, world: World, tokenizer: PreTrainedTokenizerFast):
        self.name = name
        self.probes = tokenize(ProbeSet("held", probe_sets(world)["held"]), tokenizer).items

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Called by the Trainer whenever it logs; `kwargs` holds the model and what it logs."""
        model, logs = kwargs["model"], kwargs["logs"]
        if "loss" not in logs:  # the summary at the end
            return
        training, _ = model.training, model.eval()
        found = next_tokens(partial(forward_logits, model), self.probes)
        model.train(training)
        held = state.log_history[-1]["held"] = found.answered.double().mean().item()
        print(
            f"{self.name}: step {state.global_step} of {state.max_steps}, loss {float(logs['loss']):.3f}, "
            f"{held:.1%} of the held probes answered",
            file=sys.stderr,
        )
