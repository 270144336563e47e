"""Probes and probe sets: what they are, and how they are read from files."""

import csv
import difflib
import io
import json
import operator
import os
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tracer.errors import InputError

COLLECTIONS: dict[str, tuple[str, ...]] = {"english": ("en-",), "chinese": ("zh-",), "all": ("en-", "zh-")}
"""Names for several shipped sets at once, and the prefixes of their names; sets about invented worlds are in none."""

QUESTIONS = ("ceval", "cmmlu")
"""Benchmarks whose questions are read as probes, by `NAME:SPLIT`."""


@dataclass(frozen=True)
class Probe:
    """One prompt with what should follow it: as text, or as the token ids of one model; never both in one probe.

    Ids are used as they are: no beginning-of-text token is added to them. Any sequence of integers is kept as a tuple.

    Attributes:
        prompt: Text before the target, without a trailing space.
        target: Text that follows at once; in a language with spaces it begins with the space (`" Paris"`).
        group: Task that the probe belongs to; statistics are made per group.
        id: Name of the probe, unique in its set; `read_probes` names those without one `<group>-<number>`.
        corrupt: Prompt of the same length with another answer, for activation patching.
        corrupt_target: The answer to `corrupt`; both are given or neither.
        prompt_ids: `[pos]` Token ids of the prompt.
        target_id: Id of the one token that follows them.
        target_ids: `[n_target]` Instead of `target_id`, a target of several tokens.
        corrupt_ids: `[pos]` Token ids of another prompt of the same length, for activation patching.
        corrupt_target_id: The answer to `corrupt_ids`; both are given or neither.

    Raises:
        InputError: A field has the wrong type or is empty, one is missing, only one of the corrupt fields is given,
            or text and ids come together.
    """

    prompt: str | None = None
    target: str | None = None
    group: str = "probes"
    id: str = ""
    corrupt: str | None = None
    corrupt_target: str | None = None
    prompt_ids: Sequence[int] | None = None
    target_id: int | None = None
    target_ids: Sequence[int] | None = None
    corrupt_ids: Sequence[int] | None = None
    corrupt_target_id: int | None = None

    def __post_init__(self) -> None:
        given = [name for name in (*TEXT_KEYS, *ID_KEYS) if getattr(self, name) is not None]
        for name in (*given, "group", *(["id"] if self.id != "" else [])):
            object.__setattr__(self, name, _checked(name, getattr(self, name)))
        by_ids = [name for name in given if name in ID_KEYS]
        by_text = [name for name in given if name in TEXT_KEYS]
        if by_ids and by_text:
            raise InputError(
                f"{by_text[0]} and {by_ids[0]} in one probe: pass prompt and target as text, or prompt_ids and "
                "target_id, not both"
            )
        if "target_id" in given and "target_ids" in given:
            raise InputError("target_id and target_ids in one probe: pass the one that holds the whole target")
        needed = ("prompt_ids", "target_ids" if "target_ids" in given else "target_id") if by_ids else TEXT_KEYS[:2]
        missing = [name for name in needed if name not in given]
        if missing:
            raise InputError(f"missing key {missing[0]!r}")
        pair = ID_KEYS[-2:] if by_ids else TEXT_KEYS[-2:]
        if len(set(pair) - set(given)) == 1:
            raise InputError(f"{pair[0]} and {pair[1]} come together: give both or neither")


TEXT_KEYS = ("prompt", "target", "corrupt", "corrupt_target")
"""The keys of a probe that is text, beside `group` and `id`."""

ID_KEYS = ("prompt_ids", "target_id", "target_ids", "corrupt_ids", "corrupt_target_id")
"""The keys of a probe that is token ids, beside `group` and `id`."""

PROBE_KEYS: tuple[str, ...] = tuple(field.name for field in fields(Probe))
"""The keys of a line in a probe file."""

CSV_KEYS: tuple[str, ...] = tuple(name for name in PROBE_KEYS if name not in ID_KEYS)
"""The columns of a CSV file, which holds text alone."""


def _checked(name: str, value: object) -> str | int | tuple[int, ...]:
    """The value of a key in the type that a probe keeps it in."""
    if name in ("target_id", "corrupt_target_id"):
        return _token_id(name, value)
    if name in ID_KEYS:
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise InputError(f"{name} must be a list of token ids, got {type(value).__name__} {value!r}")
        ids = tuple(_token_id(name, item) for item in value)
        if not ids:
            raise InputError(f"{name} is empty")
        return ids
    if not isinstance(value, str):
        raise InputError(f"{name} must be text, got {type(value).__name__} {value!r}")
    if not value.strip():
        raise InputError(f"{name} is empty")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise InputError(f"{name} is not valid UTF-8: {value!r}")
    return value


def _token_id(name: str, value: Any) -> int:
    try:
        # Integers of numpy and torch are as good; true and false are not meant as 1 and 0.
        token = -1 if isinstance(value, bool) else operator.index(value)
    except (TypeError, ValueError):  # a tensor of several items is no index
        token = -1
    if token < 0:
        shown = textwrap.shorten(repr(value), 60, placeholder=" ...")
        raise InputError(f"{name} must hold token ids, integers from 0 on, got {type(value).__name__} {shown}")
    return token


@dataclass(frozen=True)
class Skipped:
    """Something that was left out or is worth a look: where (`file:line` or a probe's id), and why."""

    where: str
    reason: str


@dataclass(frozen=True)
class ProbeSet:
    """Probes read from one source.

    Attributes:
        name: Shipped name, collection, or stem of the file.
        probes: The probes in the order of the source.
        shipped: Whether the set comes with LayerTracer or is a benchmark: its unusable probes are then skipped and
            counted per tokenizer, where those of a user's set are refused.
        skipped: Bad lines left out under `skip_bad`.
    """

    name: str
    probes: tuple[Probe, ...]
    shipped: bool = False
    skipped: tuple[Skipped, ...] = ()

    def __post_init__(self) -> None:
        """Refuse two probes of one id, which donors and noise are drawn by."""
        twice = [name for name, count in Counter(probe.id for probe in self.probes).items() if count > 1]
        if twice:
            raise InputError(f"probe set {self.name!r} has two probes with the id {twice[0]!r}: give each its own")

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups in order of first appearance."""
        return tuple(dict.fromkeys(probe.group for probe in self.probes))

    def select(self, groups: Sequence[str]) -> "ProbeSet":
        """Keep the probes of some groups.

        Args:
            groups: Names of groups; one text may hold several names separated by commas.

        Raises:
            InputError: A group is not in the set, or none is named.
        """
        wanted = _split(groups) if isinstance(groups, str) else list(groups)
        unknown = [group for group in wanted if group not in self.groups]
        if unknown or not wanted:
            what = f"no group {unknown[0]!r}" if unknown else "no group was named"
            raise InputError(f"{what} in probe set {self.name!r}: pass some of {', '.join(self.groups)}")
        return replace(self, probes=tuple(probe for probe in self.probes if probe.group in wanted))

    def __len__(self) -> int:
        return len(self.probes)

    def __iter__(self) -> Iterator[Probe]:
        return iter(self.probes)


def shipped_folder() -> Path:
    """The folder of the shipped probe sets: inside an installed package, or `probes/` of a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "probe_sets", package.parent / "probes"):
        if any(folder.rglob("*.jsonl")):
            return folder
    raise InputError(f"no shipped probe sets beside {package}: reinstall layertracer or pass a probe file")


def shipped_names() -> tuple[str, ...]:
    """Names of the shipped probe sets, sorted; those in a folder are called `folder/stem`."""
    folder = shipped_folder()
    paths = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.jsonl"))
    return tuple(sorted(path.as_posix() for path in paths))


def read_probes(
    source: str | Path | ProbeSet | Sequence[Probe | Mapping[str, object]],
    *,
    skip_bad: bool = False,
    groups: Sequence[str] | None = None,
    data: str | os.PathLike[str] | None = None,
) -> ProbeSet:
    """Read probes from a shipped set, a file, a benchmark or a sequence.

    Args:
        source: A shipped name (`en-capitals`), a collection (`english`, `chinese`, `all`), several of these
            separated by commas, the path of a `.jsonl` or `.csv` file (UTF-8), the questions of a benchmark
            (`ceval:val`, `cmmlu:test`, each subject a group), or a sequence of `Probe` or mappings. In a file `id`
            defaults to `<group>-<line>` and `group` to the file's stem. JSON Lines may hold lists of token ids
            (`prompt_ids`) where a CSV file holds text alone; a null stands for an absent key.
        skip_bad: Count bad lines in `skipped` instead of raising.
        groups: Keep these groups only.
        data: For a benchmark, the folder of a local copy, as in `tracer.evaluate`.

    Raises:
        InputError: The source is unknown, missing or empty, a group is unknown, or a line is bad (the message
            names the file, the line and the reason).
    """
    if isinstance(source, ProbeSet):
        probe_set = source
    elif isinstance(source, Path):
        probe_set = _read_files(source.stem, [source], skip_bad=skip_bad, shipped=False)
    elif not isinstance(source, str):
        records = [(f"probe {number}", number, record) for number, record in enumerate(source, start=1)]
        probes, skipped = _parse(records, default_group="probes", skip_bad=skip_bad)
        probe_set = ProbeSet("probes", probes, skipped=skipped)
    elif source.partition(":")[0] in QUESTIONS and ":" in source:
        from tracer.probes.questions import read_questions  # which takes the harness along

        return read_questions(source, subjects=_split(groups) if isinstance(groups, str) else groups, data=data)
    elif (paths := _shipped_paths(source)) is not None:
        probe_set = _read_files(source, paths, skip_bad=False, shipped=True)
    else:
        probe_set = _read_files(Path(source).stem, [_user_path(source)], skip_bad=skip_bad, shipped=False)
    if not probe_set.probes:
        bad = f" ({len(probe_set.skipped)} bad: {probe_set.skipped[0].reason})" if probe_set.skipped else ""
        raise InputError(f"no probes in {source if isinstance(source, str | Path) else 'the sequence'}{bad}")
    return probe_set if groups is None else probe_set.select(groups)


def is_shipped(source: str) -> bool:
    """Whether a text names shipped sets or a benchmark, whatever files of that name lie around."""
    return source.partition(":")[0] in QUESTIONS or _shipped_paths(source) is not None


def _split(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def _shipped_paths(source: str) -> list[Path] | None:
    """Files of a shipped name, a collection or a list of those; None if a part of the text is neither."""
    paths: dict[Path, None] = {}
    names = shipped_names()
    parts = _split(source)
    for part in parts:
        found = [name for name in names if part == name or name.startswith(COLLECTIONS.get(part, ()))]
        if not found:
            return None
        paths |= dict.fromkeys(shipped_folder() / f"{name}.jsonl" for name in found)
    return list(paths) if parts else None


def _user_path(source: str) -> Path:
    path = Path(source)
    known = [*COLLECTIONS, *shipped_names()]
    folders = {name.split("/")[0] for name in known if "/" in name}
    in_folder = len(path.parts) > 1 and path.parts[0] not in folders
    if path.exists() or path.suffix in (".jsonl", ".csv") or in_folder:
        return path
    unknown = next((part for part in _split(source) if part not in known), source)
    close = difflib.get_close_matches(unknown, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"pass one of {', '.join(known)}"
    raise InputError(f"unknown probe set {unknown!r}: {hint} Or pass the path of a .jsonl or .csv file.")


def _read_files(name: str, paths: Sequence[Path], *, skip_bad: bool, shipped: bool) -> ProbeSet:
    probes: list[Probe] = []
    skipped: list[Skipped] = []
    for path in paths:
        parsed, bad = _parse(_records(path), default_group=path.stem, skip_bad=skip_bad)
        probes += parsed
        skipped += bad
    return ProbeSet(name, tuple(probes), shipped=shipped, skipped=tuple(skipped))


def _records(path: Path) -> Iterator[tuple[str, int, object]]:
    """Where, line number and content of each line; the content of an unreadable line is its `InputError`."""
    if path.suffix not in (".jsonl", ".csv"):
        raise InputError(f"{path} is no probe file: pass a .jsonl or .csv file")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror}): pass an existing .jsonl or .csv file") from error
    # Bytes that are no UTF-8 become surrogates, which the check of each line then reports with its number.
    text = data.decode("utf-8-sig", errors="surrogateescape")
    yield from _csv_records(path, text) if path.suffix == ".csv" else _jsonl_records(path, text)


def _jsonl_records(path: Path, text: str) -> Iterator[tuple[str, int, object]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            content: object = json.loads(line)
        except (ValueError, RecursionError) as error:
            content = InputError(f"not JSON ({error})")
        yield f"{path}:{number}", number, content


def _csv_records(path: Path, text: str) -> Iterator[tuple[str, int, object]]:
    reader = csv.reader(io.StringIO(text, newline=""))
    header: list[str] | None = None
    while True:
        # A quoted cell may span lines; a row is known by its first one.
        number = reader.line_num + 1
        where = f"{path}:{number}"
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield where, number, InputError(f"not CSV ({error})")
            continue
        if not any(row):
            continue
        if header is None:
            header = [name.strip() for name in row]
            unknown = [name for name in header if name not in CSV_KEYS]
            if unknown or len(set(header)) < len(header) or not {"prompt", "target"} <= set(header):
                raise InputError(
                    f"{where}: the header is {','.join(row)!r}: pass prompt,target and "
                    f"optionally {', '.join(CSV_KEYS[2:])}, each once"
                )
        elif len(row) != len(header):
            yield where, number, InputError(f"{len(row)} columns where the header has {len(header)}")
        else:
            # An empty cell of an optional column means that the key is absent.
            cells = zip(header, row, strict=True)
            yield where, number, {key: cell for key, cell in cells if cell or key in ("prompt", "target")}


def _parse(
    records: Iterable[tuple[str, int, object]], *, default_group: str, skip_bad: bool
) -> tuple[tuple[Probe, ...], tuple[Skipped, ...]]:
    probes: dict[str, Probe] = {}
    skipped: list[Skipped] = []
    for where, number, content in records:
        try:
            probe = _probe(content, number, default_group)
            if probe.id in probes:
                raise InputError(f"duplicate id {probe.id!r}")
            probes[probe.id] = probe
        except InputError as error:
            if not skip_bad:
                raise InputError(f"{where}: {error}") from error
            skipped.append(Skipped(where, str(error)))
    return tuple(probes.values()), tuple(skipped)


def _probe(content: object, number: int, default_group: str) -> Probe:
    if isinstance(content, Probe):
        return content if content.id else replace(content, id=f"{content.group}-{number}")
    if isinstance(content, InputError):
        raise content
    if not isinstance(content, Mapping):
        raise InputError(f"not an object with the keys prompt and target, but {type(content).__name__}")
    unknown = [key for key in content if key not in PROBE_KEYS]
    if unknown:
        raise InputError(f"unknown key {unknown[0]!r}: pass only {', '.join(PROBE_KEYS)}")
    # A null stands for a key that is absent, as tables that hold text beside ids have it.
    given = {key: _checked(key, value) for key, value in content.items() if value is not None}
    group = given.get("group", default_group)
    arguments: dict[str, Any] = {"id": f"{group}-{number}", **given, "group": group}
    return Probe(**arguments)
