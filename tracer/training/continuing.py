"""The verb `cpt`: continued pre-training of a model by a recipe."""

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate import PartialState
from transformers import PrinterCallback, ProgressCallback, TrainerCallback, set_seed

from tracer.errors import InputError, TrainingStopped
from tracer.freezing.plan import Applied
from tracer.models.cache import one_line
from tracer.models.checkpoint import transformers_output
from tracer.models.loading import text_config
from tracer.models.traced import TracedModel
from tracer.results import plain_data
from tracer.runs import versions
from tracer.training.asked import asked_rows
from tracer.training.callbacks import Asking, Divergence, Gradients, Progress, Retracing, read_retraces
from tracer.training.checkpoints import checkpoint_fault, checkpoints, last_checkpoint
from tracer.training.frozen import frozen_digests
from tracer.training.memory import peak_memory
from tracer.training.output import ASKED, TRACES, begin, check_output, check_same, recipe_data, save_model
from tracer.training.packing import Collate
from tracer.training.preparing import Prepared, machine_settings, prepare, tokenizer_of
from tracer.training.recipe import Recipe, read_recipe
from tracer.training.results import CptResult, curve_of, measures_at
from tracer.training.trainer import CheckpointError, PlannedTrainer


def cpt(
    recipe: str | Path | Mapping[str, Any] | Recipe,
    *,
    resume: bool = False,
    force: bool = False,
    progress: bool = True,
    priced: bool = True,
) -> CptResult:
    """Continue the pre-training of a model under a freeze plan.

    Under `torchrun` or `accelerate launch` every process calls it; one of them writes.

    Args:
        recipe: a YAML file, what it holds, or a recipe that is read already.
        resume: go on from the last checkpoint in the output folder; from the start where there is none.
        force: replace what an earlier training left in the output folder.
        progress: show progress bars and a line per log.
        priced: also predict what a step costs, which takes some seconds.

    Returns:
        The result; the model lies in the recipe's `output_dir`.

    Raises:
        InputError: the recipe, the plan, a text or the folder cannot be used; no model has been written.
        ModelRefused: the model's blocks cannot be found exactly.
        TrainingStopped: the loss is not a number or diverges, a trained parameter gets no gradient, or a frozen one
            has changed; names the last good checkpoint.

    Example:
        >>> import tracer
        >>> result = tracer.cpt("recipe.yaml")  # doctest: +SKIP
        >>> print(result.summary())  # doctest: +SKIP
    """
    read = recipe if isinstance(recipe, Recipe) else read_recipe(recipe)
    ready, checkpoint = check_training(read, resume=resume, force=force, progress=progress, priced=priced)
    state, folder = PartialState(), read.output_dir
    if progress and state.is_main_process:
        print(ready.summary(), end="\n\n", file=sys.stderr)
    frozen = frozen_digests(ready.model.model, ready.plan.trained_names())
    applied = ready.plan.apply(ready.model)
    state.wait_for_everyone()  # every process has looked at the folder before one writes into it
    if state.is_main_process:
        begin(folder, ready, resume=resume)
    state.wait_for_everyone()
    with transformers_output(False), _environment_kept():  # it draws a bar for every file that it writes
        with _without_cache(ready.model):
            gradients = Gradients(bool(ready.arguments.fp16))
            trainer = _trainer(ready, gradients, resumed=checkpoint is not None)
            _train(trainer, folder, checkpoint)
        notes = (f"the first gradient of {name} was zero throughout" for name in gradients.zero)
        result = _result(ready, trainer, applied, len(frozen), [*ready.notes, *notes])
        save_model(trainer, tokenizer_of(ready.model), read, frozen, result)
    return result


def check_training(
    recipe: Recipe, *, resume: bool, force: bool, progress: bool, priced: bool = True
) -> tuple[Prepared, Path | None]:
    """All that `cpt` checks before it writes anything.

    Args:
        recipe: of the training.
        resume: as in `cpt`.
        force: likewise.
        progress: likewise.
        priced: likewise.

    Returns:
        A training that could begin, and the checkpoint that it would go on from.

    Raises:
        InputError: the recipe, the plan, a text or the folder cannot be used.
        ModelRefused: the model's blocks cannot be found exactly.
    """
    if resume and force:
        raise InputError("resume goes on and force begins anew: pass one of them")
    # Wrong settings cost nothing to find; and it lets the processes find each other.
    recipe.training_arguments(progress=False, **machine_settings())
    folder = recipe.output_dir
    check_output(folder, resume=resume, force=force)
    _check_outside(recipe, folder)
    checkpoint = last_checkpoint(folder) if resume else None
    ready = prepare(recipe, progress=progress and PartialState().is_main_process, priced=priced)
    if resume:
        check_same(folder, ready)
    return ready, checkpoint


def _check_outside(recipe: Recipe, folder: Path) -> None:
    """Refuse inputs inside the output folder, which is emptied before the first step."""
    plan = recipe.plan if isinstance(recipe.plan, str) else recipe.plan.get("run")
    sources = [source.path for source in (*recipe.text.values(), *recipe.evaluate.values())]
    for name in (recipe.model, plan, *sources):
        if isinstance(name, str) and Path(name).expanduser().exists():
            place = Path(name).expanduser().resolve()
            if place.is_relative_to(folder.resolve()):
                raise InputError(f"{name!r} lies in output_dir {str(folder)!r}: pass another output_dir")


def _trainer(ready: Prepared, gradients: Gradients, *, resumed: bool) -> PlannedTrainer:
    recipe, texts, arguments = ready.recipe, ready.texts, ready.arguments
    set_seed(arguments.seed)
    if resumed:
        arguments.eval_on_start = False
    callbacks: list[TrainerCallback] = [gradients, Divergence(recipe.max_loss_rise)]
    if recipe.retrace is not None:
        callbacks.append(Retracing(ready.model, recipe.retrace, recipe.output_dir / TRACES))
    if recipe.ask is not None:
        assert ready.questions is not None
        callbacks.append(Asking(ready.questions, recipe.ask.every, recipe.output_dir / ASKED))
    # Windows of a streamed text are dealt out by one process, which needs batches of one form.
    dealt = isinstance(texts.train, datasets.IterableDataset) and PartialState().num_processes > 1
    alike = dealt and recipe.packing == "none"
    trainer = PlannedTrainer(
        ready.model.model,
        arguments,
        Collate(int(tokenizer_of(ready.model).eos_token_id), recipe.block_size if alike else None),
        train_dataset=texts.train,
        eval_dataset=dict(texts.measured) or None,
        callbacks=callbacks,
        bytes_per_token=texts.bytes_per_token,
        measured={name: count.bytes_per_token for name, count in texts.measured_counts.items()},
    )
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    if not arguments.disable_tqdm:
        trainer.add_callback(Progress())
    return trainer


def _train(trainer: PlannedTrainer, folder: Path, checkpoint: Path | None) -> None:
    try:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        if trainer.eval_dataset is not None and not _measured_at(trainer.state.log_history, trainer.state.global_step):
            trainer.evaluate()
    except TrainingStopped as error:
        good = trainer.state.best_model_checkpoint or checkpoint
        named = f"the last good checkpoint is {str(good)!r}" if good else "no checkpoint was written before"
        raise type(error)(f"{error}; {named}") from error
    except CheckpointError as error:
        _remove_unfinished(folder)
        last = checkpoints(folder)
        kept = f"{last[-1].name} is kept: free space and pass --resume" if last else "free space and begin anew"
        raise InputError(f"a checkpoint cannot be written to {str(folder)!r}: {one_line(error)}; {kept}") from error
    except OSError as error:
        raise InputError(f"the training broke off, since something cannot be read: {one_line(error)}") from error
    except torch.OutOfMemoryError as error:
        raise InputError(
            "a step does not fit into the memory of the device: pass a smaller per_device_train_batch_size or "
            "block_size, or gradient_checkpointing: true"
        ) from error


def _result(
    ready: Prepared, trainer: PlannedTrainer, applied: Applied, frozen_tensors: int, notes: list[str]
) -> CptResult:
    recipe, plan, texts, prices, state = ready.recipe, ready.plan, ready.texts, ready.prices, trainer.state
    curve = curve_of(state.log_history, list(texts.measured))
    tokens = int(state.num_input_tokens_seen)
    measured = {
        name: {"before": measures_at(curve, 0, name), "after": measures_at(curve, state.global_step, name)}
        for name in texts.measured
    }
    run = {
        "recipe": recipe_data(recipe),
        "plan": {
            **{key: getattr(plan, key) for key in ("rule", "train", "freeze", "embeddings", "norm", "head")},
            "model": {key: plan.model[key] for key in ("name", "fingerprint", "class")},
            "why": plan.evidence["why"],
        },
        "counts": {"trained": applied.n_trained, "frozen": applied.n_frozen, "frozen_tensors": frozen_tensors},
        "price": None
        if prices is None
        else {"plan": asdict(prices.plan), "full": asdict(prices.full), "time_ratio": prices.time_ratio},
        "texts": {name: asdict(count) for name, count in texts.counts.items()},
        "shares": dict(texts.shares),
        "measured_texts": {name: asdict(count) for name, count in texts.measured_counts.items()},
        "measured": measured,
        "steps": state.global_step,
        "tokens": tokens,
        "bytes": round(tokens * texts.bytes_per_token),
        "seconds": trainer.seconds,
        "peak_memory_bytes": peak_memory(),
        "processes": PartialState().num_processes,
        "device": str(trainer.args.device),
        "retraces": read_retraces(recipe.output_dir / TRACES),
        "asked": asked_rows(recipe.output_dir / ASKED),
        "versions": versions(),
        "notes": notes,
    }
    return CptResult(plain_data(run), curve, recipe.output_dir)


@contextmanager
def _environment_kept() -> Iterator[None]:
    """Forget that accelerate was told to shard, which would hold for every later training of this process."""
    before = os.environ.get(_SHARDS)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_SHARDS, None)


_SHARDS = "ACCELERATE_USE_FSDP"


@contextmanager
def _without_cache(model: TracedModel) -> Iterator[None]:
    """No cache of keys and values in training, where nobody reads it; the Trainer leaves the config so, we do not."""
    config = text_config(model.model.config)
    before = getattr(config, "use_cache", None)
    if before is not None:
        config.use_cache = False
    try:
        yield
    finally:
        if before is not None:
            config.use_cache = before


def _measured_at(history: list[dict[str, Any]], step: int) -> bool:
    return any(entry["step"] == step and any(key.startswith("eval_") for key in entry) for entry in history)


def _remove_unfinished(folder: Path) -> None:
    """Delete the checkpoint that was being written."""
    with suppress(InputError, IndexError):
        last = checkpoints(folder)[-1]
        if checkpoint_fault(last) is not None:
            shutil.rmtree(last, ignore_errors=True)
