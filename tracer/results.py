"""What a trace returns, and the folder that it is saved as.

A saved result is a folder: `run.json` (arguments, versions, model, statistics), `probes.jsonl` (one line a probe),
`blocks.csv` (one line a block) and `arrays.safetensors` (everything per depth and probe). It is written whole or not
at all.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from tracer.errors import InputError, one_of
from tracer.fragility import Fragility, fragility

SCHEMA = 2
FILES = ("arrays.safetensors", "blocks.csv", "probes.jsonl", "run.json")
"""The files of a result; `run.json` is moved in last, so that a folder that has it is complete."""


R = TypeVar("R", bound="SavedResult")


class SavedResult:
    """A result that is saved as a folder and read back; its fields are `run`, `probes`, one more table, and `arrays`.

    Attributes:
        files: of the folder, as `packed` names them.
        schema: that this version writes and reads.
        verb: that makes such a result, for messages.
        table: name of the field that is neither `run`, `probes` nor `arrays`.
        types: of columns of that table that do not follow from their values.
    """

    files: ClassVar[tuple[str, ...]]
    schema: ClassVar[int]
    verb: ClassVar[str]
    table: ClassVar[str]
    types: ClassVar[Mapping[str, Any]]

    run: dict[str, Any]
    probes: pd.DataFrame
    arrays: dict[str, np.ndarray]

    @staticmethod
    def probes_of(rows: list[dict[str, Any]]) -> pd.DataFrame:
        """The table of probes from its saved rows."""
        return pd.DataFrame(rows)

    def save(self, folder: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Write the result as a folder.

        Args:
            folder: must not hold a result yet, unless `force`.
            force: replace the result in it.

        Raises:
            InputError: the folder is in use, or cannot be written; then nothing is left behind.
        """
        target = Path(folder)
        check_free(target, force=force, files=self.files)
        contents = packed(self.files, self.arrays, getattr(self, self.table), self.probes, self.run)
        return write_folder(target, contents)

    @classmethod
    def load(cls: type[R], folder: str | os.PathLike[str]) -> R:
        """Read a saved result.

        Raises:
            InputError: there is none, it is unfinished or damaged, or a later version wrote it.
        """
        arrays, table, probes, run = unpacked(Path(folder), cls.files, cls.schema, cls.verb, cls.types, cls.probes_of)
        return cls(run, probes, table, arrays)  # type: ignore[call-arg]


@dataclass(frozen=True, eq=False)
class TraceResult(SavedResult):
    """The joint trace of one model on one set of probes.

    Attributes:
        run: arguments, seed, versions, model (fingerprint, anatomy, self-check), engine, time, warnings, and the
            statistics of groups (with their own fragility profiles) and ablations; what `run.json` holds.
        probes: one row per usable probe: `id`, `group`, `prompt`, `target`, `prompt_ids`, `target_ids`, `n_tokens`,
            `answered`, `answer`, `answer_id`, `p_final`, `rank_final`, `particle` (block, missing where there is none),
            `rise`, `jsd_max`, `jsd_max_block`, and with recovery `recovery_undefined` (why it has none, missing where
            it has one).
        blocks: one row per block: `block`, `mixer`, `module`, `particles`, per ablation `jsd_KIND` with its interval
            and companions, the stream after the block (`norm`, `angle`, `entropy`, `kl_to_final`, `rank`), and with
            recovery its mean over probes (`recovery`) with its interval.
        arrays: `log_p`, `rank`, `entropy`, `kl_to_final`, `norm`, `angle` as `[depths, probes]`; per ablation
            `jsd_KIND`, `log_p_KIND`, `log2_rank_KIND`, `answered_KIND`, `entropy_KIND`, `kl_KIND`, `angle_KIND`,
            `norm_KIND` as `[blocks, probes]`, and for noise the mean JSD of each draw, `jsd_KIND_by_sample`
            `[draws, blocks]`; `ceiling` `[probes]`; `cka` `[depths, depths]`; per group `null_low/GROUP`,
            `null_high/GROUP` `[depths]` and `rival_log_p/GROUP` `[depths, probes, targets]`; with recovery `recovery`
            `[blocks, probes]`, NaN where undefined. With the readout `tuned`, `log_p`, `rank`, `entropy`,
            `kl_to_final`, the nulls and the rivals come through the tuned lens, and the same seven through the plain
            logit lens are called `plain/NAME`.
    """

    run: dict[str, Any]
    probes: pd.DataFrame
    blocks: pd.DataFrame
    arrays: dict[str, np.ndarray]

    files: ClassVar = FILES
    schema: ClassVar = SCHEMA
    verb: ClassVar = "trace"
    table: ClassVar = "blocks"
    types: ClassVar = {"mixer": str, "module": str}

    @staticmethod
    def probes_of(rows: list[dict[str, Any]]) -> pd.DataFrame:
        """The table of probes with the types that do not follow from the values, which may all be missing."""
        return typed_probes(rows)

    @property
    def groups(self) -> pd.DataFrame:
        """One row per group: n, answered, p-value, median particle block with interval, and why there is none."""
        rows = []
        for group in self.run["groups"]:
            block = group["block"]
            flat = {key: value for key, value in group.items() if key not in ("block", "fragility")}
            rows.append(flat | {"block": block["estimate"], "block_low": block["low"], "block_high": block["high"]})
        numbers = ("block", "block_low", "block_high", "depth", "p_value")
        return pd.DataFrame(rows).astype(dict.fromkeys(numbers, float))

    @property
    def ablations(self) -> tuple[str, ...]:
        """The ablations that were run: the kind alone for whole blocks, `zero_mixer` and the like for parts."""
        return tuple(entry["ablation"] for entry in self.run["fragility"])

    def fragility(self, kind: str, group: str | None = None) -> Fragility:
        """Fragility of every block under one ablation, for all probes or one group.

        Args:
            kind: one of `ablations`.
            group: only the probes of this group.
        """
        kind = one_of("ablation of this result", kind, self.ablations)
        mixers = self.blocks["mixer"].tolist()
        groups = self.probes["group"].to_numpy()
        chosen = np.ones(len(groups), dtype=bool)
        if group is not None:
            chosen = groups == one_of("group", group, dict.fromkeys(groups))
        arrays = self.arrays
        return fragility(
            kind,
            arrays[f"jsd_{kind}"][:, chosen],
            (arrays[f"log_p_{kind}"] - arrays["log_p"][-1])[:, chosen],
            arrays[f"answered_{kind}"][:, chosen],
            self.probes["answered"].to_numpy(dtype=bool)[chosen],
            arrays["ceiling"][chosen],
            list(groups[chosen]),
            mixers,
            seed=self.run["arguments"]["seed"],
        )

    def to_frame(self, of: str = "blocks") -> pd.DataFrame:
        """One of the tables `blocks`, `probes` and `groups`, as a copy."""
        return getattr(self, one_of("table", of, ("blocks", "probes", "groups"))).copy()

    def summary(self) -> str:
        """The result as text for a terminal."""
        from tracer.summary import summary_of

        return summary_of(self)

    def plot(self, figure: str = "joint") -> Figure:
        """Draw one figure: `joint`, `lens`, `fragility` or `evolution`."""
        from tracer.plots import draw

        return draw(self, figure)


PARTIAL = "partial"
"""Folder of finished batches inside the folder of a result that is not finished."""

WRITING = ".writing"
"""Folder in which files are staged; left only by a process that was killed, and removed by the next."""


def check_free(folder: Path, *, force: bool = False, files: Sequence[str] = FILES) -> None:
    """Raise InputError when `folder` cannot take a result: in use by one (unless `force`), or by something else."""
    try:
        if not folder.exists():
            return
        if not folder.is_dir():
            raise InputError(f"{str(folder)!r} is a file: pass a folder that does not exist yet")
        names = {path.name for path in folder.iterdir()} - {PARTIAL, WRITING, "figures"}
    except OSError as error:
        raise InputError(f"{str(folder)!r} cannot be used: {error.strerror or error}") from error
    if names - set(files):
        raise InputError(
            f"{str(folder)!r} holds other files ({sorted(names - set(files))[0]}): pass a folder of its own"
        )
    if "run.json" in names and not force:
        raise InputError(f"{str(folder)!r} already holds a result: pass another folder, or force to replace it")


def typed_probes(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """The table of probes with the types that do not follow from the values, which may all be missing."""
    table = pd.DataFrame(rows).astype({"particle": "Int64", "rise": float})
    return table.astype({"recovery_undefined": "str"}) if "recovery_undefined" in table else table


def packed(
    files: Sequence[str],
    arrays: Mapping[str, np.ndarray],
    table: pd.DataFrame,
    probes: pd.DataFrame,
    run: Mapping[str, Any],
) -> dict[str, bytes]:
    """Contents of the files of a result, in the order in which they are named: arrays, table, probes and run."""
    lines = (json.dumps(plain_data(row), ensure_ascii=False) + "\n" for row in probes.to_dict("records"))
    contents = (
        save({key: np.ascontiguousarray(array) for key, array in arrays.items()}),
        table.to_csv(index=False, lineterminator="\n").encode(),
        "".join(lines).encode(),
        (json.dumps(plain_data(run), ensure_ascii=False, indent=1) + "\n").encode(),
    )
    return dict(zip(files, contents, strict=True))


def unpacked(
    folder: Path,
    files: Sequence[str],
    schema: int,
    verb: str,
    types: Mapping[str, Any],
    probes_of: Callable[[list[dict[str, Any]]], pd.DataFrame],
) -> tuple[dict[str, np.ndarray], pd.DataFrame, pd.DataFrame, dict[str, Any]]:
    """Arrays, table, probes and run of a saved result; see `packed`.

    Args:
        folder: of the result.
        files: its files.
        schema: that this version reads.
        verb: that makes such a result, for messages.
        types: of columns of the table that do not follow from their values.
        probes_of: from rows to the table of probes.

    Raises:
        InputError: there is none, it is unfinished or damaged, or a later version wrote it.
    """
    if not folder.is_dir():
        raise InputError(f"no result folder {str(folder)!r}: pass the --out folder of a finished {verb}")
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        unfinished = f"; its {verb} was interrupted, go on with --resume" if (folder / PARTIAL).is_dir() else ""
        raise InputError(f"{str(folder)!r} is not a finished result ({missing[0]} is missing){unfinished}")
    arrays, table, probes, run = (folder / name for name in files)
    try:
        about = json.loads(run.read_text(encoding="utf-8"))
        if about["schema"] != schema:
            raise InputError(
                f"{str(folder)!r} has result schema {about['schema']}, this version reads {schema}: {verb} again"
            )
        # Not splitlines: a prompt may hold a line separator that JSON leaves as it is.
        rows = [json.loads(line) for line in probes.read_text(encoding="utf-8").split("\n") if line]
        # Only an empty cell is missing: a group or a mixer may be called "nan".
        frame = pd.read_csv(table, dtype=dict(types), keep_default_na=False, na_values=[""])
        return load_file(arrays), frame, probes_of(rows), about
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{str(folder)!r} is damaged ({error}): {verb} again with --force") from error


def write_folder(folder: Path, contents: Mapping[str, bytes]) -> Path:
    """Write files into `folder` so that all of them appear or none.

    The files are first written into a hidden folder inside and then moved out, in the given order, the last one being
    the sign that the folder is complete.

    Raises:
        InputError: the disk is full or the place cannot be written.
    """
    staging = folder / WRITING
    new = not folder.exists()
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        for name, content in contents.items():
            (staging / name).write_bytes(content)
        (folder / list(contents)[-1]).unlink(missing_ok=True)
        for name in contents:
            os.replace(staging / name, folder / name)
    except OSError as error:
        if new:
            shutil.rmtree(folder, ignore_errors=True)
        raise InputError(f"cannot write {str(folder)!r}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder


def plain_data(value: Any) -> Any:
    """Plain JSON data: numpy scalars as Python's, and null for every missing value."""
    if isinstance(value, Mapping):
        return {key: plain_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(item) for item in value]
    if value is pd.NA:
        return None
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
