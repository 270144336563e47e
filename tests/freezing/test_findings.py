"""What trials found, as it is told beside a plan."""

import pytest

from tracer.freezing import findings as module
from tracer.freezing.findings import findings, findings_for

CLAIM = {
    "better": "shallow",
    "than": "full",
    "measure": "acquisition",
    "difference": -0.2,
    "low": -0.3,
    "high": -0.1,
    "verdict": "does not hold",
}


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    entry = {"model": "zoo/x", "mixers": ["attention", "mamba2"], "steps": 60, "seeds": 8, "claims": [CLAIM]}
    found = [entry, {**entry, "mixers": ["attention"], "seeds": 3}]
    monkeypatch.setattr(module, "findings", lambda: found)
    return found


@pytest.mark.usefixtures("known")
def test_a_finding_is_told_to_models_of_its_kind_only() -> None:
    (told,) = findings_for(["mamba2", "attention", "mamba2"])
    assert told == (
        "a trial on zoo/x (attention and mamba2; 60 steps, 8 seeds) found: shallow learns more than full: does not "
        "hold (-0.200 [-0.300, -0.100])"
    )
    assert findings_for(["mamba2"]) == []


@pytest.mark.usefixtures("known")
def test_too_few_seeds_tell_nothing() -> None:
    assert findings_for(["attention"]) == [
        "a trial on zoo/x (attention; 60 steps) has 3 of 8 seeds: nothing can be told apart yet"
    ]


def test_what_comes_along_is_whole() -> None:
    for entry in findings():
        assert set(entry) == {"model", "mixers", "steps", "seeds", "claims"}
        assert entry["mixers"] == sorted(set(entry["mixers"]))
        assert all(set(claim) == set(CLAIM) for claim in entry["claims"])
        assert entry["seeds"] < 8 or all(claim["low"] is not None for claim in entry["claims"])
