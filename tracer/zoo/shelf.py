"""The models of the zoo as they lie in the package: their names, their cards, and proof that no byte has changed."""

import json
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tracer.errors import InputError
from tracer.models.cache import file_sha256

PREFIX = "zoo/"
"""What the names of zoo models begin with."""

SHELF = Path(__file__).parent / "models"
"""One folder per shipped model, and their checksums."""

SUITES = (f"{PREFIX}train", f"{PREFIX}held", f"{PREFIX}new-template")
"""The probe sets about what the models were trained on."""

CARD, README, CHECKSUMS = "card.json", "README.md", "SHA256SUMS"


@dataclass(frozen=True)
class Card:
    """What is known about a model of the zoo; `facts` holds everything that `card.json` says.

    Attributes:
        name: As `tracer.load` takes it.
        facts: Class, size, seed, data, training with its curve, accuracy by set and relation, versions.
    """

    name: str
    facts: dict[str, Any]

    def share(self, probes: str) -> float:
        """Share of the probes of one set that it answers."""
        groups = self.facts["accuracy"][probes].values()
        return sum(group["answered"] for group in groups) / sum(group["n"] for group in groups)

    def __str__(self) -> str:
        """The card as Markdown."""
        facts, data, training = self.facts, self.facts["data"], self.facts["training"]
        sets = facts["accuracy"]
        first, last = training["curve"][0], training["curve"][-1]
        lines = [
            f"# {self.name}",
            "",
            f"{facts['class']} with {facts['blocks']} blocks and {facts['parameters']:,} parameters, trained from "
            f"nothing on the invented world of LayerTracer (world seed {data['world_seed']}, {data['facts']} facts). "
            "It knows nothing else. No text about real people or places was used.",
            "",
            f"- data: {data['tokens']:,} tokens of generated documents, {data['second_language_share']:.0%} of them in "
            f"Chinese and {data['in_context_share']:.0%} patterns to copy; windows of {data['window']} tokens, "
            f"{data['batch']} a step",
            f"- training: seed {facts['seed']}, {training['steps']} steps of AdamW, learning rate "
            f"{training['learning_rate']:g} after {training['warmup_steps']} steps of warm-up, falling linearly to 0 "
            f"in the last {training['decay_share']:.0%}; embedding initialised with standard deviation "
            f"{facts['embedding_std']:g}; {training['cpu_seconds'] / 60:.0f} CPU-minutes on one thread",
            f"- loss: {first['loss']:.2f} nats a token in the first {first['step']} steps, {last['loss']:.2f} in the "
            "last ones",
            "- weights: float16 on disk, opened as float32",
            f"- {seeds(facts)}",
            "",
            "Accuracy: the target is the most likely of all tokens after the prompt.",
            "",
            f"| relation | {' | '.join(sets)} |",
            f"| --- |{' --- |' * len(sets)}",
        ]
        for relation in dict.fromkeys(name for groups in sets.values() for name in groups):
            cells = (_cell(groups.get(relation)) for groups in sets.values())
            lines.append(f"| {relation} | {' | '.join(cells)} |")
        totals = (_cell(_total(groups)) for groups in sets.values())
        lines += [f"| **all** | {' | '.join(totals)} |", ""]
        lines += ["| step | loss | held probes answered |", "| --- | --- | --- |"]
        lines += [f"| {entry['step']} | {entry['loss']:.3f} | {entry['held']:.1%} |" for entry in training["curve"]]
        return "\n".join(lines)


def seeds(facts: dict[str, Any]) -> str:
    """How much one model says about its family."""
    number = facts["seeds_of_family"]
    if number == 1:
        return "one model: what it shows need not hold for its family"
    return f"one of {number} seeds of its family that were trained and measured"


def zoo_names() -> tuple[str, ...]:
    """Names of the models in the package, in the order in which they are listed."""
    return tuple(f"{PREFIX}{name}" for name in dict.fromkeys(path.split("/")[0] for path in _checksums()))


def zoo_folder(name: str) -> Path:
    """The folder of a model, whose every file has the recorded SHA-256.

    Raises:
        InputError: There is no such model, or a file is missing or changed.
    """
    if name not in zoo_names():
        close = get_close_matches(name, zoo_names(), n=2)
        hint = f"did you mean {' or '.join(close)}?" if close else f"pass one of {', '.join(zoo_names())}"
        raise InputError(f"no model {name!r} in the zoo; {hint}")
    folder = SHELF / name.removeprefix(PREFIX)
    expected = {SHELF / path: digest for path, digest in _checksums().items() if (SHELF / path).is_relative_to(folder)}
    for file in sorted({*expected, *(path for path in folder.rglob("*") if path.is_file())}):
        fault = None
        if not file.is_file():
            fault = "is missing"
        elif file not in expected:
            fault = f"is not in {CHECKSUMS}"
        elif file_sha256(file) != expected[file]:
            fault = "has changed"
        if fault is not None:
            raise InputError(f"{name} cannot be opened: its file {file.name} {fault}; reinstall layertracer")
    return folder


def read_card(name: str) -> Card:
    """The card of a model of the zoo.

    Raises:
        InputError: As `zoo_folder`.
    """
    return Card(name, json.loads((zoo_folder(name) / CARD).read_text(encoding="utf-8")))


def listing() -> str:
    """All models as a table: class, size, tokens seen, and the share of probes answered."""
    header = ("name", "class", "parameters", "tokens seen", "train", "held", "new-template", "")
    rows = []
    for card in map(read_card, zoo_names()):
        facts = card.facts
        shares = (f"{card.share(probes):.1%}" for probes in header[4:7])
        rows.append(
            (
                card.name,
                facts["class"],
                f"{facts['parameters'] / 1e6:.1f} M",
                f"{facts['data']['tokens'] / 1e6:.1f} M",
                *shares,
                f"{facts['seeds_of_family']} seeds" if facts["seeds_of_family"] > 1 else "one model",
            )
        )
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    return "\n".join(
        [
            *(line.rstrip() for line in lines),
            "",
            "train, held, new-template: share of probes answered in a phrasing that the model has seen of the fact,",
            "has seen of other facts, has never seen. `tracer zoo NAME` prints a card.",
        ]
    )


def write_readme(folder: Path, facts: dict[str, Any]) -> None:
    """Write what a card says as Markdown into the folder of its model."""
    (folder / README).write_text(f"{Card(PREFIX + facts['name'], facts)}\n", encoding="utf-8")


def write_checksums(order: tuple[str, ...]) -> None:
    """Record the SHA-256 of every file of the models on the shelf, in the format of `sha256sum`.

    Args:
        order: Models in the order in which they are to be listed.
    """
    files = [file for name in order for file in sorted((SHELF / name).rglob("*")) if file.is_file()]
    lines = (f"{file_sha256(file)}  {file.relative_to(SHELF).as_posix()}\n" for file in files)
    (SHELF / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def _checksums() -> dict[str, str]:
    """Path below the shelf to SHA-256."""
    try:
        lines = (SHELF / CHECKSUMS).read_text(encoding="utf-8").splitlines()
        return {path: digest for digest, path in (line.split(maxsplit=1) for line in lines)}
    except (OSError, ValueError) as error:
        raise InputError(f"the zoo's {CHECKSUMS} cannot be read ({error}): reinstall layertracer") from error


def _total(groups: dict[str, dict[str, int]]) -> dict[str, int]:
    return {key: sum(group[key] for group in groups.values()) for key in ("n", "answered")}


def _cell(counts: dict[str, int] | None) -> str:
    return "" if counts is None else f"{counts['answered'] / counts['n']:.0%} of {counts['n']}"
