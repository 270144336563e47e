"""What controlled trials found for models of a kind: told beside a plan, since a rule is a hypothesis."""

import json
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any

from tracer.statistics import MIN_SEEDS

FILE = "findings.json"
"""One entry a trial, as `tracer.TrialResult.finding` gives it."""


@cache
def findings() -> tuple[dict[str, Any], ...]:
    """The trials that come with LayerTracer."""
    return tuple(json.loads(files("tracer.freezing").joinpath(FILE).read_text(encoding="utf-8")))


def findings_for(mixers: Iterable[str]) -> list[str]:
    """What trials on models with the same kinds of mixers found, a sentence each.

    Args:
        mixers: of the blocks of a model.
    """
    kinds = sorted(set(mixers))
    return [_sentence(finding) for finding in findings() if finding["mixers"] == kinds]


def _sentence(finding: dict[str, Any]) -> str:
    where = f"a trial on {finding['model']} ({' and '.join(finding['mixers'])}; {finding['steps']} steps"
    if finding["seeds"] < MIN_SEEDS:
        return f"{where}) has {finding['seeds']} of {MIN_SEEDS} seeds: nothing can be told apart yet"
    told = [
        f"{claim['better']} {_verb(claim['measure'])} than {claim['than']}: {claim['verdict']} "
        f"({claim['difference']:+.3f} [{claim['low']:+.3f}, {claim['high']:+.3f}])"
        for claim in finding["claims"]
    ]
    return f"{where}, {finding['seeds']} seeds) found: {'; '.join(told)}"


def _verb(measure: str) -> str:
    return "learns more" if measure == "acquisition" else f"keeps more {measure}"
