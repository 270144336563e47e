"""Measures how many probes of each shipped set a model answers, and writes the table of README.md.

    python probes/measure.py smollm2-135m-instruct-q4_1 gemma3-270m-q4_k_m
    python probes/measure.py --check smollm2-135m-instruct-q4_1 gemma3-270m-q4_k_m
    python probes/measure.py --wordings smollm2-135m-instruct-q4_1 gemma3-270m-q4_k_m

A model is a name of the catalogue, a folder or a Hugging Face id. A probe is answered if the target is the most
probable next token. `--wordings` measures every wording that was tried, on its group's development facts, none of
which is in a set.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from scipy.stats import binomtest

from tracer.errors import InputError
from tracer.evaluation.next_token import next_tokens
from tracer.models.loading import OpenedModel, open_model
from tracer.models.plain import forward_logits
from tracer.probes import (
    MIN_USABLE,
    Probe,
    ProbeSet,
    TokenizedProbe,
    TokenizedProbes,
    read_probes,
    shipped_names,
    tokenize,
)

FOLDER = Path(__file__).parent
README = FOLDER / "README.md"
WORDINGS = FOLDER / "wordings.json"
TABLE = re.compile(r"(?<=<!-- measured -->\n).*?(?=<!-- /measured -->)", re.DOTALL)


def count_answered(opened: OpenedModel, items: Sequence[TokenizedProbe]) -> int:
    """Number of probes whose target is the most probable next token."""
    return int(next_tokens(partial(forward_logits, opened.model), items).answered.sum())


def share(answered: int, usable: int) -> str:
    """Answered share in per cent with its 95 % Wilson interval."""
    interval = binomtest(answered, usable).proportion_ci(method="wilson")
    return f"{answered} = {answered / usable:.0%} ({interval.low:.0%} to {interval.high:.0%})"


def tokenized(opened: OpenedModel, probes: ProbeSet) -> TokenizedProbes:
    """The probes under the model's tokenizer."""
    if opened.tokenizer is None:
        raise InputError(f"model {opened.name} has no tokenizer: pass a folder that holds one")
    return tokenize(probes, opened.tokenizer)


def set_rows(opened: OpenedModel) -> Iterator[str]:
    """One row of the table per shipped set about the real world."""
    for name in (name for name in shipped_names() if "/" not in name):
        items = tokenized(opened, read_probes(name))
        corrupt = sum(item.corrupt_ids is not None for item in items)
        measurable = len(items) >= MIN_USABLE
        answered = share(count_answered(opened, items.items), len(items)) if measurable else "not measurable"
        lines = len(items) + len(items.skipped)
        yield f"| {name} | {Path(opened.name).name} | {lines} | {len(items)} | {corrupt} | {answered} |"


def wording_rows(opened: OpenedModel) -> Iterator[str]:
    """One row per group and tried wording; the chosen one carries a star."""
    for group, entry in json.loads(WORDINGS.read_text(encoding="utf-8")).items():
        for wording in entry["tried"]:
            probes = tuple(
                Probe(wording.format(subject), target, group, f"{group}-{number}")
                for number, (subject, target) in enumerate(entry["development"])
            )
            items = tokenized(opened, ProbeSet(group, probes, shipped=True))
            answered = share(count_answered(opened, items.items), len(items)) if len(items) else "none"
            star = "*" if wording == entry["chosen"] else " "
            yield f"{star} {group} {Path(opened.name).name} {len(items)} usable, {answered}: {wording!r}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, then write, compare or print. Returns 1 if `--check` finds another table than the README has."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="MODEL")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="compare with the README, write nothing")
    mode.add_argument("--wordings", action="store_true", help="measure the tried wordings, write nothing")
    options = parser.parse_args(arguments)
    rows: list[str] = []
    for model in options.models:
        opened = open_model(model, dtype="float32")
        for row in wording_rows(opened) if options.wordings else set_rows(opened):
            rows.append(row)
            print(row, flush=True)
    if options.wordings:
        return 0
    head = ["| group | model | lines | usable | with corrupt | answered |", "| --- | --- | --: | --: | --: | --- |"]
    table = "\n".join([*head, *sorted(rows)]) + "\n"
    readme = README.read_text(encoding="utf-8")
    updated = TABLE.sub(lambda _: table, readme)
    if options.check:
        if updated != readme:
            print("the table in probes/README.md is out of date: run this without --check", file=sys.stderr)
        return int(updated != readme)
    README.write_text(updated, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
