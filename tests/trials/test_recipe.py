"""Recipes of trials: what is refused before a model is opened, and what each training is told."""

from pathlib import Path
from typing import Any

import pytest

from tracer.errors import InputError
from tracer.trials.recipe import Measure, Run, read_trial

BASE: dict[str, Any] = {
    "model": "zoo/transformer-4",
    "text": {"new": {"path": "new.jsonl"}},
    "weight_decay": 0.1,
    "arms": {"full": {"rule": "full"}, "drawn": {"rule": "random:2", "head": "freeze"}},
    "rates": [1e-3, 2e-3],
    "seeds": 3,
    "budgets": [20, 60],
    "every": 10,
    "acquisition": {"suite": "zoo/second-held"},
    "retention": {"old": {"suite": "zoo/held", "groups": ["job"], "limit": 5, "score": "log_p"}},
    "output_dir": "out",
}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"learning_rate": 1e-3}, "learning_rate cannot be set in a trial: each run has one of rates"),
        ({"seed": 1}, "seed cannot be set in a trial"),
        ({"lr_scheduler_type": "cosine"}, "lr_scheduler_type cannot be set in a trial: it is always constant_with_war"),
        ({"max_steps": 10}, "max_steps cannot be set in a trial: the longest of budgets"),
        ({"plan": {"rule": "full"}}, "plan cannot be set in a trial: each arm has its own"),
        ({"evaluate": {}}, "evaluate cannot be set in a trial"),
        ({"armes": {}}, "unknown key 'armes'; did you mean arms"),
        ({"arms": {"full": {"rule": "full"}}}, "arms: name at least two"),
        ({"arms": {"full": {}, "a/b": {}}}, "arm 'a/b': pass a name of letters"),
        ({"arms": ["full"]}, r"arms is \['full'\]: pass keys and values"),
        ({"baseline": "fulll"}, "unknown arm 'fulll': pass one of full, drawn"),
        ({"claims": [{"better": "deep", "than": "full"}]}, "unknown arm 'deep'"),
        ({"claims": {"better": "drawn"}}, "claims is .*: pass a list"),
        ({"claims": [{"better": "drawn"}]}, "claims: than is missing"),
        ({"rates": []}, r"rates \[\]: pass learning rates above 0"),
        ({"rates": [1e-3, -1.0]}, "pass learning rates above 0"),
        ({"rates": [1e-3, 0.00100000001]}, "pass each once"),
        ({"rates": ["fast"]}, "rates is 'fast': pass a number"),
        ({"rates": 1e-3}, "rates is 0.001: pass a list"),
        ({"seeds": 0}, "seeds 0, every 10: pass at least 1"),
        ({"every": 0}, "seeds 3, every 0: pass at least 1"),
        ({"budgets": [25]}, r"budgets \[25\]: pass numbers of steps that every 10 divides"),
        ({"budgets": []}, r"budgets \[\]: pass numbers of steps"),
        ({"retention": {}}, "retention is empty"),
        ({"also": {"old": {"suite": "x.txt"}}}, "'old' names two measures"),
        ({"also": {"acquisition": {"suite": "x.txt"}}}, "'acquisition' names two measures"),
        ({"retention": {"old": {"suite": "zoo/held", "score": "f1"}}}, "retention.old: score is 'f1'"),
        ({"retention": {"old": {"suites": "zoo/held"}}}, "retention.old: unknown key 'suites'; did you mean suite"),
        ({"acquisition": {"suite": "zoo/held", "limit": 0}}, "acquisition: limit 0: pass at least 1"),
        ({"text": {"new": {"path": "new.jsonl", "held_out": 0.1}}}, "text.new: held_out draws other documents for"),
        ({"block_size": 1}, "block_size 1: pass at least 2"),
        ({"per_device_train_batch_size": "many"}, "per_device_train_batch_size is 'many'"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        read_trial(BASE | changes)


@pytest.mark.parametrize("key", ["model", "text", "arms", "rates", "seeds", "budgets", "every", "acquisition"])
def test_what_is_missing_is_named(key: str) -> None:
    with pytest.raises(InputError, match=f"{key} is missing"):
        read_trial({name: value for name, value in BASE.items() if name != key})


def test_runs_go_seed_by_seed() -> None:
    runs = list(read_trial(BASE).runs())
    assert len(set(runs)) == len(runs) == 2 * 2 * 3
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)
    assert runs[0] == Run("full", 1e-3, 0)
    assert runs[0].name == "full_0.001_0"


def test_a_training_is_told_its_arm_rate_and_seed() -> None:
    recipe = read_trial(BASE)
    training = recipe.training_of(Run("drawn", 2e-3, 2), Path("work"))
    assert training.plan == {"rule": "random:2:2", "head": "freeze"}
    said = {key: training.arguments[key] for key in ("learning_rate", "seed", "max_steps", "weight_decay")}
    assert said == {"learning_rate": 2e-3, "seed": 2, "max_steps": 60, "weight_decay": 0.1}
    assert training.arguments["lr_scheduler_type"] == "constant_with_warmup"
    assert training.ask is not None
    assert training.ask.every == 10
    assert list(training.ask.suites) == ["acquisition", "old"]
    assert training.ask.suites["old"].groups == ["job"]
    assert recipe.measures["old"] == Measure("zoo/held", ["job"], 5, score="log_p")


def test_arms_differ_in_nothing_but_their_plans() -> None:
    recipe = read_trial(BASE)
    one, other = (recipe.training_of(Run(arm, 1e-3, 1), Path("work")) for arm in recipe.arms)
    assert one.plan != other.plan
    assert one.binding() | {"plan": None} == other.binding() | {"plan": None}
