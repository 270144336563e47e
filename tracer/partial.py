"""Finished batches of a trace that is still running, so that an interrupt loses none of them."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from tracer.errors import InputError
from tracer.results import PARTIAL

PLAN = "plan.json"


class PartialRun:
    """Arrays by name, kept in `FOLDER/partial` (or in memory without a folder) until the result is written.

    Args:
        folder: folder of the result, or None.
        plan: everything that the arrays depend on; a later run may only go on with the same.
        resume: go on with what the folder holds.
        force: begin anew although it holds something.

    Raises:
        InputError: the folder holds batches and neither is set, or they belong to another plan.
    """

    def __init__(self, folder: Path | None, plan: Mapping[str, Any], *, resume: bool, force: bool):
        self._memory: dict[str, dict[str, np.ndarray]] = {}
        self._folder = None if folder is None else folder / PARTIAL
        if self._folder is None:
            return
        self._plan = json.dumps(plan, sort_keys=True, ensure_ascii=False, indent=1).encode()
        known = self._folder / PLAN
        if not known.exists():
            return
        if resume:
            try:
                earlier = json.loads(known.read_text(encoding="utf-8"))
            except ValueError as error:
                raise InputError(f"{str(known)!r} is damaged: force to begin anew") from error
            changed = differing(plan, earlier)
            if changed is not None:
                raise InputError(
                    f"{str(folder)!r} was begun with another {changed}: resume with the same arguments and versions, "
                    "or force to begin anew"
                )
        elif force:
            shutil.rmtree(self._folder, ignore_errors=True)
        else:
            raise InputError(
                f"{str(folder)!r} holds {len(list(self._folder.glob('*.safetensors')))} finished batches of an "
                "interrupted trace: resume it, or force to begin anew"
            )

    def __contains__(self, name: str) -> bool:
        return name in self._memory or (self._folder is not None and self._path(name).exists())

    def __getitem__(self, name: str) -> dict[str, np.ndarray]:
        if name in self._memory:
            return self._memory[name]
        try:
            return load_file(self._path(name))
        except SafetensorError as error:
            raise InputError(f"{str(self._path(name))!r} is damaged ({error}): delete it and resume") from error

    def __setitem__(self, name: str, arrays: Mapping[str, np.ndarray]) -> None:
        if self._folder is None:
            self._memory[name] = dict(arrays)
        else:
            if not (self._folder / PLAN).exists():
                self._write(self._folder / PLAN, self._plan)
            self._write(self._path(name), save({k: np.ascontiguousarray(v) for k, v in arrays.items()}))

    def remove(self) -> None:
        """Delete the batches, once the result that holds them is written."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{name}.safetensors"

    @staticmethod
    def _write(path: Path, content: bytes) -> None:
        """Whole or not at all."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            staging = path.with_suffix(".writing")
            staging.write_bytes(content)
            os.replace(staging, path)
        except OSError as error:
            raise InputError(f"cannot write {str(path)!r}: {error.strerror or error}") from error


def differing(plan: Mapping[str, Any], earlier: Mapping[str, Any]) -> str | None:
    """Name of the first entry in which two plans differ, or None; compared as the JSON that they are stored as."""
    plain = json.loads(json.dumps(plan))
    return next((key for key in plain if earlier.get(key) != plain[key]), None)
