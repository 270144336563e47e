"""Answers that a training has kept on its way: a file for each step, and one that says what was asked."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tracer.errors import InputError
from tracer.evaluation.asking import Answers, Items

ITEMS = "items.json"
"""Suite to what it is made of, `Items` by its fields."""


def write_asked(folder: Path, step: int, items: Mapping[str, Items], answers: Mapping[str, Answers]) -> None:
    """Keep the answers of a step: `SUITE/log_p` and, of probes, `SUITE/answered`, each `[item]`."""
    folder.mkdir(parents=True, exist_ok=True)
    if step == 0:
        about = {name: asdict(own) for name, own in items.items()}
        (folder / ITEMS).write_text(json.dumps(about, ensure_ascii=False) + "\n", encoding="utf-8")
    arrays = {}
    for name, found in answers.items():
        arrays[f"{name}/log_p"] = found.log_p
        if found.answered is not None:
            arrays[f"{name}/answered"] = found.answered
    unfinished = folder / "unfinished"
    save_file(arrays, unfinished)
    os.replace(unfinished, folder / f"step-{step:06d}.safetensors")


def read_asked(folder: Path) -> tuple[dict[str, Items], dict[int, dict[str, Answers]]]:
    """What was asked, by suite, and what came of it, by step and suite.

    Raises:
        InputError: there is nothing, or it is damaged.
    """
    try:
        about = json.loads((folder / ITEMS).read_text(encoding="utf-8"))
        items = {
            name: Items(own.pop("kind"), **{key: tuple(value) for key, value in own.items()})
            for name, own in about.items()
        }
        steps = {}
        for file in sorted(folder.glob("step-*.safetensors")):
            arrays = load_file(file)
            steps[int(file.stem.removeprefix("step-"))] = {name: _answers(arrays, name) for name in items}
        return items, steps
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{str(folder)!r} holds no answers of a training, or damaged ones ({error})") from error


def _answers(arrays: Mapping[str, np.ndarray], name: str) -> Answers:
    return Answers(arrays[f"{name}/log_p"], arrays.get(f"{name}/answered"))


def asked_rows(folder: Path) -> list[dict[str, Any]]:
    """One row a step and suite: `step`, `suite`, and what `Items.measures` says; empty where nothing was asked."""
    if not (folder / ITEMS).is_file():
        return []
    items, steps = read_asked(folder)
    return [
        {"step": step, "suite": name, **items[name].measures(answers)}
        for step, found in steps.items()
        for name, answers in found.items()
    ]
