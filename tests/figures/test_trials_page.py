"""The page of trials, and what `tracer plan` tells of them, say what the committed trainings say."""

import sys
from pathlib import Path

import pytest

import tracer
from tracer.freezing.findings import findings

ROOT = Path(__file__).parents[2]
DATA = ROOT / "figures" / "data" / "trials"


def test_the_page_is_made_from_the_trainings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "figures"))
    import trials_page

    try:
        assert (ROOT / "docs" / "TRIALS.md").read_text(encoding="utf-8") == trials_page.page()
    finally:
        sys.modules.pop("trials_page")


def test_findings_are_those_of_the_trainings() -> None:
    for finding in findings():
        result = tracer.TrialResult.load(DATA / finding["model"].removeprefix("zoo/"))
        assert result.finding() == finding


def test_trainings_hold_no_path_of_a_machine() -> None:
    for path in DATA.rglob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert '"/' not in text, path
        assert "C:\\" not in text, path
