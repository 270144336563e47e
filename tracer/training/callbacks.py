"""What watches a training: gradients, divergence, progress, and how the model's layers move."""

import json
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tracer.drifting.streams import all_streams, cosine
from tracer.errors import Diverged, TrainingStopped
from tracer.evaluation.asking import Questions
from tracer.models.plain import evaluating
from tracer.models.traced import TracedModel
from tracer.results import TraceResult
from tracer.tracing import trace
from tracer.training.asked import write_asked
from tracer.training.recipe import Retrace


class Gradients(TrainerCallback):
    """Every trained parameter gets a finite gradient in the first step, and no frozen one does.

    Args:
        fp16: whether gradients are scaled, so that infinite ones are skipped by the scaler.

    Attributes:
        zero: trained parameters whose first gradient was zero throughout.
    """

    def __init__(self, fp16: bool):
        self.fp16 = fp16
        self.zero: tuple[str, ...] = ()
        self._checked = False

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Called by the Trainer when all gradients of a step are there.

        Raises:
            TrainingStopped: a gradient is missing or should not be there; `Diverged`: it is not finite.
        """
        model: nn.Module = kwargs["model"]
        if not self._checked:
            self._check_first(model)
            self._checked = True
        if self.fp16:
            return
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and not torch.isfinite(_local(parameter.grad)).all():
                raise Diverged(f"the gradient of {name} is not finite at step {state.global_step + 1}")

    def _check_first(self, model: nn.Module) -> None:
        without, frozen, zero = [], [], []
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                if parameter.requires_grad:
                    without.append(name)
            elif not parameter.requires_grad:
                frozen.append(name)
            elif not _local(parameter.grad).any():
                zero.append(name)
        if without:
            raise TrainingStopped(
                f"{len(without)} trained parameters got no gradient in the first step ({', '.join(without[:3])}): the "
                "loss does not depend on them; freeze the part that they belong to"
            )
        if frozen:
            raise TrainingStopped(f"{len(frozen)} frozen parameters got a gradient ({', '.join(frozen[:3])})")
        # Of a sharded gradient each process sees a part.
        everywhere: list[set[str]] = gather_object([set(zero)])
        self.zero = tuple(name for name in zero if all(name in part for part in everywhere))


def _local(tensor: Tensor) -> Tensor:
    """This process's part of a sharded tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Divergence(TrainerCallback):
    """Stops a training whose loss has risen far above its best.

    The last checkpoint that was written while the loss was near its best is the Trainer's `best_model_checkpoint`,
    which is not deleted when later ones are.

    Args:
        most: nats.
    """

    def __init__(self, most: float):
        self.most = most
        self.best = math.inf
        self.last = math.inf

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Called by the Trainer before the first step; one that goes on knows its losses."""
        losses = [float(entry["loss"]) for entry in state.log_history if "loss" in entry]
        if losses:
            self.best, self.last = min(losses), losses[-1]
        # A checkpoint is written before it is known as good, and the folder may have been moved since.
        good = f"checkpoint-{state.global_step}" if self._is_good() else Path(state.best_model_checkpoint or "").name
        path = Path(str(args.output_dir)) / good
        state.best_model_checkpoint = str(path) if good and path.is_dir() else None

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Called by the Trainer whenever it logs.

        Raises:
            Diverged: the mean loss since the last time is too high.
        """
        loss = kwargs["logs"].get("loss")
        if loss is None:
            return
        self.last = float(loss)
        self.best = min(self.best, self.last)
        if not self.last - self.best <= self.most:
            raise Diverged(
                f"the training diverges: its loss rose from {self.best:.3f} to {self.last:.3f} by step "
                f"{state.global_step}, more than max_loss_rise {self.most:g}"
            )

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Called by the Trainer whenever it has written a checkpoint."""
        if self._is_good() or state.global_step >= state.max_steps:
            state.best_model_checkpoint = str(Path(str(args.output_dir)) / f"checkpoint-{state.global_step}")

    def _is_good(self) -> bool:
        return self.last == math.inf or self.last - self.best <= self.most / 2


class Progress(TrainerCallback):
    """A progress bar and a line whenever something is logged."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Called by the Trainer before the first step."""
        if state.is_world_process_zero:
            self._bar = tqdm(total=state.max_steps, initial=state.global_step, desc="training", unit="step")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Called by the Trainer after each step."""
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Called by the Trainer whenever it logs."""
        line = log_line(state.global_step, kwargs["logs"])
        if self._bar is not None and line:
            self._bar.write(line, file=sys.stderr)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Called by the Trainer after the last step."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def log_line(step: int, logs: Mapping[str, Any]) -> str:
    """What the Trainer logs as a line to read; empty for what is not worth one."""
    parts = []
    if "loss" in logs:
        parts.append(f"loss {float(logs['loss']):.3f}, learning rate {float(logs['learning_rate']):.2e}")
        if "num_input_tokens_seen" in logs:
            parts.append(f"{logs['num_input_tokens_seen']:,} tokens")
    for key, value in logs.items():
        if key.endswith("_perplexity"):
            parts.append(f"perplexity {key.removeprefix('eval_').removesuffix('_perplexity')} {value:.2f}")
    return f"step {step}: {', '.join(parts)}" if parts else ""


class OnTheWay(TrainerCallback, ABC):
    """Does something before the first step, every so many steps, and after the last one, in one process.

    Args:
        every: steps between two times.
    """

    def __init__(self, every: int):
        self.every = every

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Called by the Trainer before the first step."""
        if state.global_step == 0:
            self._stop(0)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Called by the Trainer after each step."""
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            self._stop(state.global_step)

    def _stop(self, step: int) -> None:
        if PartialState().is_main_process:
            self.at(step)
        PartialState().wait_for_everyone()

    @abstractmethod
    def at(self, step: int) -> None:
        """What is done when so many steps have been made."""


class Asking(OnTheWay):
    """Asks the model suites, and keeps what it made of each item.

    Args:
        questions: the suites, as the model that is trained reads them.
        every: steps between two times.
        folder: for the answers; see `tracer.training.asked`.
    """

    def __init__(self, questions: Questions, every: int, folder: Path):
        super().__init__(every)
        self.questions = questions
        self.folder = folder

    def at(self, step: int) -> None:
        """Ask, and write down the answers."""
        write_asked(self.folder, step, self.questions.items, self.questions.ask())


class Retracing(OnTheWay):
    """Traces the model.

    Args:
        model: the opened model that is being trained.
        retrace: how.
        folder: for the traces, one folder each, and for the streams before the first step.
    """

    def __init__(self, model: TracedModel, retrace: Retrace, folder: Path):
        super().__init__(retrace.every)
        self.model = model
        self.retrace = retrace
        self.folder = folder

    @property
    def _first(self) -> Path:
        return self.folder / "streams.safetensors"

    def at(self, step: int) -> None:
        """Trace, and write down how the layers have moved."""
        result = trace(
            self.model,
            self.retrace.probes,
            limit=self.retrace.limit,
            ablations=self.retrace.ablations,
            out=self.folder / f"step-{step:06d}",
            force=True,
            skip_bad=True,
            progress=False,
        )
        self._record(step, result)

    def _record(self, step: int, result: TraceResult) -> None:
        with evaluating(self.model.model):
            streams = all_streams(self.model, [list(ids) for ids in result.probes["prompt_ids"]])
        if step == 0:
            save_file({"streams": np.ascontiguousarray(streams)}, self._first)
        near = cosine(load_file(self._first)["streams"], streams).mean(axis=1)
        row = {
            "step": step,
            "n": len(result.probes),
            "answered": int(result.probes["answered"].sum()),
            "log_p": float(result.arrays["log_p"][-1].mean()),
            "particle_block": result.run["particle_block"],
            "jsd": {kind: result.blocks[f"jsd_{kind}"].tolist() for kind in result.ablations},
            "cosine": near.tolist(),
        }
        rows = [*(old for old in read_retraces(self.folder) if old["step"] < step), row]
        (self.folder / RETRACES).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


RETRACES = "retraces.json"
"""One entry per trace: the step, how many probes are answered, the mean log-probability of the target (nats), the
median particle block, the mean JSD of each block, and the mean cosine of the stream at each depth with that of
step 0."""


def read_retraces(folder: Path) -> list[dict[str, Any]]:
    """The entries of `RETRACES`; empty where there are none."""
    file = folder / RETRACES
    rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
    return rows
