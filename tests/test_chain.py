"""The whole chain on a model of the zoo: trace, plan from the saved run, training, evaluation, trace again."""

import sys
from pathlib import Path

import pytest

import tracer

ROOT = Path(__file__).parents[1]


@pytest.fixture
def chain(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "figures"))
    import chain

    yield chain
    sys.modules.pop("chain", None)


def test_new_facts_are_learned_under_a_plan_and_old_ones_mostly_kept(chain, tmp_path, capsys):
    table = chain.run_chain(
        tmp_path, model="zoo/transformer-4", rule="fragile:2", steps=160, limit=5, progress=False
    ).set_index("suite")
    known, learned = table.loc[chain.KNOWN], table.loc[chain.LEARNED]
    assert known["before"] > 0.98
    assert learned["before"] < 0.25  # a guess among the answers of a relation
    assert learned["after_low"] > learned["before_high"]
    assert known["after"] > 0.3
    plan = tracer.FreezePlan.load(tmp_path / "plan.json")
    drift = tracer.DriftResult.load(tmp_path / "drift")
    moved = drift.depths.dropna(subset=["block"]).set_index("block")
    assert {int(block) for block in moved.index if moved.loc[block, "weights"] > 0} == set(plan.train)
    assert (moved.loc[list(plan.freeze), "jsd"] < 1e-9).all()
    assert (moved.loc[list(plan.train), "jsd"] > 1e-5).all()
    assert drift.run["answered"]["only_base"] > 0
    out = capsys.readouterr().out
    assert "new facts, as told" in out
    assert (tmp_path / "figures/chain.png").is_file()
