"""Checkpoints of a training that was interrupted: which is the last, and whether it is whole."""

import json
import re
import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open

from tracer.errors import InputError
from tracer.models.cache import one_line

_NAME = re.compile(r"^checkpoint-(\d+)$")
STATE = "trainer_state.json"
"""Written last by the Trainer."""


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the last one last."""
    if not folder.is_dir():
        return []
    found = {int(match[1]): path for path in folder.iterdir() if (match := _NAME.match(path.name))}
    return [found[step] for step in sorted(found)]


def last_checkpoint(folder: Path) -> Path | None:
    """The last checkpoint; None where there is none.

    Raises:
        InputError: it is cut off or damaged; names the one before it.
    """
    found = checkpoints(folder)
    if not found:
        return None
    fault = checkpoint_fault(found[-1])
    if fault is not None:
        whole = next((path for path in reversed(found[:-1]) if checkpoint_fault(path) is None), None)
        then = f"delete it to go on from {whole.name}" if whole else "delete it and begin anew"
        raise InputError(f"checkpoint {str(found[-1])!r} is cut off or damaged ({fault}): {then}")
    return found[-1]


def checkpoint_fault(folder: Path) -> str | None:
    """What is wrong with a checkpoint; None where a training can go on from it."""
    try:
        json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"{STATE}: {one_line(error)}"
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        return "it has no weights"
    for file in weights:
        try:
            with safe_open(file, "pt"):  # refuses a file of another length than its header says
                pass
        except (OSError, SafetensorError) as error:
            return f"{file.name}: {one_line(error)}"
    sharded = ("optimizer.bin", "pytorch_model_fsdp.bin")  # what FSDP leaves and goes on from
    states = sharded if any((folder / name).exists() for name in sharded) else ("optimizer.pt",)
    for name in (*states, "scheduler.pt"):
        if not zipfile.is_zipfile(folder / name):  # looks for the directory at the end
            return f"{name} is missing or cut off"
    return None
