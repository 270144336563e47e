"""Trials on a tiny model: records against single trainings, going on, several processes, and what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from small_trial import small
from transformers import AutoModelForCausalLM, AutoTokenizer

import tracer
from tracer.cli import main
from tracer.errors import InputError
from tracer.evaluation.asking import Items
from tracer.trials.recipe import Run, read_trial
from tracer.trials.records import Record, halves
from tracer.trials.results import TrialResult
from tracer.trials.running import check_same


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished trial and all that it was made from."""
    found = tmp_path_factory.mktemp("trial")
    tracer.trial(small(found), progress=False)
    return found


@pytest.fixture(scope="module")
def result(folder: Path) -> TrialResult:
    return TrialResult.load(folder / "trial")


def recipe(folder: Path, **changes: Any) -> dict[str, Any]:
    """The trial of `folder` said again, without writing its inputs anew."""
    data = json.loads((folder / "trial" / "trial.json").read_text(encoding="utf-8"))["recipe"]
    return {**data.pop("training"), **data, "output_dir": str(folder / "trial"), **changes}


def log_p(model: torch.nn.Module, ids: list[int], wanted: list[int]) -> float:
    """Log-probability of tokens after others, by one plain forward."""
    logits = model(input_ids=torch.tensor([[*ids, *wanted]])).logits[0].double().log_softmax(-1)
    return sum(float(logits[len(ids) - 1 + i, token].detach()) for i, token in enumerate(wanted))


def test_a_record_is_what_a_single_training_gives(folder: Path, tmp_path: Path, result: TrialResult) -> None:
    run = Run("shallow", 2e-2, 1)
    tracer.cpt(result.recipe.training_of(run, tmp_path / "out"), progress=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    probes = [json.loads(line) for line in (folder / "new.jsonl").read_text("utf-8").splitlines()]
    texts = [json.loads(line)["text"] for line in (folder / "held.jsonl").read_text("utf-8").splitlines()]
    by_group: dict[str, list[float]] = {}
    for probe in probes:
        prompt, target = (
            tokenizer(probe[key].strip(), add_special_tokens=False).input_ids for key in ("prompt", "target")
        )
        by_group.setdefault(probe["group"], []).append(log_p(model, prompt, target))
    record = Record.read(folder / "trial", run)
    for half, first in (("validation", 0), ("test", 1)):
        wanted = np.mean([value for values in by_group.values() for value in values[first::2]])
        assert record.measures["acquisition"][half]["log_p"][-1] == pytest.approx(wanted, abs=2e-5)
        assert record.measures["acquisition"][half]["n"] == 6
        own = texts[first::2]
        total = sum(
            log_p(model, [tokenizer.eos_token_id], tokenizer(text, add_special_tokens=False).input_ids) for text in own
        )
        bits = -total / math.log(2) / sum(len(text.encode()) for text in own)
        assert record.measures["old"][half]["bits_per_byte"][-1] == pytest.approx(bits, abs=2e-5)
    assert record.plan == {"train": [0, 1], "embeddings": "train", "norm": "train", "head": "freeze"}
    assert record.steps == [0, 2, 4]
    assert (record.tokens, record.stopped) == (4 * 4 * 16, None)


def test_all_arms_begin_alike_and_none_of_the_models_is_kept(folder: Path, result: TrialResult) -> None:
    assert len(result.records) == 8
    first = [json.dumps({k: v["test"]["n"] for k, v in record.measures.items()}) for record in result.records]
    assert len(set(first)) == 1
    begin = {record.measures["acquisition"]["test"]["log_p"][0] for record in result.records}
    assert len(begin) == 1
    end = {record.measures["acquisition"]["test"]["log_p"][-1] for record in result.records}
    assert len(end) == 8
    assert not list((folder / "trial" / "work").glob("*"))


def test_tables_are_those_of_the_records(result: TrialResult) -> None:
    assert result.seeds == (0, 1)
    assert len(result.points) == 8 * 3 * 2 * 2
    values = result.values
    assert len(values) == 2 * 2 * 2 * 2
    one = values.query("budget == 4 and seed == 1 and arm == 'full' and measure == 'acquisition'").iloc[0]
    own = [record for record in result.records if (record.run.arm, record.run.seed) == ("full", 1)]
    pairs = [
        pair
        for record in own
        for pair in zip(
            *(record.measures["acquisition"][half]["log_p"] for half in ("validation", "test")), strict=True
        )
    ]
    assert one["value"] == max(pairs, key=lambda pair: pair[0])[1]
    kept = values.query("budget == 2 and measure == 'old'")["value"]
    assert (kept < 0).all()  # bits a byte, of which fewer are better
    claims = result.claims
    assert set(claims["verdict"]) == {"cannot be told apart"}
    assert claims["reason"].tolist() == ["2 of 8 seeds"] * 4
    assert claims[["low", "high"]].isna().all(axis=None)
    wanted = values.query("budget == 4 and measure == 'old'").pivot(index="seed", columns="arm", values="value")
    assert claims.query("budget == 4 and measure == 'old'")["difference"].iloc[0] == pytest.approx(
        (wanted["shallow"] - wanted["full"]).mean()
    )


def test_endpoints_are_means_over_items_and_seeds(result: TrialResult) -> None:
    table = result.endpoints
    assert len(table) == 2 * 2 * 2 * 2
    row = table.query("arm == 'shallow' and rate == 0.02 and budget == 4 and measure == 'old'").iloc[0]
    assert (row["n"], row["seeds"]) == (7, 2)
    own = [record for record in result.records if (record.run.arm, record.run.rate) == ("shallow", 2e-2)]
    for key, place in (("before", 0), ("after", -1)):
        halves_of = [record.measures["old"] for record in own]
        means = [sum(half["n"] * half["bits_per_byte"][place] for half in halves.values()) / 7 for halves in halves_of]
        assert row[key] == pytest.approx(np.mean(means))


def test_the_command_line_tells_draws_and_refuses(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as done:
        main(["trial", "--example"])
    example = capsys.readouterr().out
    assert done.value.code == 0
    (folder / "example.yaml").write_text(example, encoding="utf-8")
    assert read_trial(folder / "example.yaml").rates == [5e-4, 1e-3, 2e-3]
    path = folder / "trial.yaml"
    path.write_text(yaml.safe_dump(recipe(folder)), encoding="utf-8")
    for arguments, code, said in (
        ([str(path), "--report"], 0, "Verdicts"),
        ([str(path)], 2, "holds a trial"),
        ([str(path), "--part", "3"], 2, "--part '3': pass K/N"),
        ([str(path), "--set", "rates"], 2, "--set 'rates': pass KEY=VALUE"),
        ([], 2, "no recipe was named"),
        ([str(folder / "none.yaml")], 2, "cannot read the recipe"),
    ):
        with pytest.raises(SystemExit) as done:
            main(["trial", *arguments])
        found = capsys.readouterr()
        assert (done.value.code, said in found.out + found.err) == (code, True), arguments
        assert code == 0 or found.err.count("\n") == 1
    assert {path.name for path in (folder / "trial" / "tables").iterdir()} == {
        f"{name}.csv" for name in ("endpoints", "values", "differences", "claims", "curve")
    }
    assert (folder / "trial" / "figures" / "frontier.png").stat().st_size > 10_000


def test_the_summary_says_scope_plans_and_what_is_missing(result: TrialResult) -> None:
    text = result.summary()
    for part in ("One base checkpoint", "shallow:2", "train, train, freeze", "2 of 8 seeds", "8 of 8 trainings"):
        assert part in text, part
    for name in ("frontier", "cost", "differences"):
        result.plot(name)
    with pytest.raises(InputError, match="unknown figure 'pie'"):
        result.plot("pie")


def test_a_trial_goes_on_in_processes_with_another_seed_arm_and_rate_that_diverges(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = {path.name: path.read_bytes() for path in (folder / "trial" / "runs").iterdir()}
    with pytest.raises(InputError, match="holds a trial with 8 finished trainings: pass --resume"):
        tracer.trial(recipe(folder), progress=False)
    found = tracer.trial(recipe(folder, rates=[5e-3, 2e-2, 1e30], seeds=1), resume=True, jobs=2, progress=False)
    assert len(found.records) == 6
    assert all((folder / "trial" / "runs" / name).read_bytes() == content for name, content in before.items())
    stopped = [record for record in found.records if record.stopped]
    assert {record.run.rate for record in stopped} == {1e30}
    assert all(record.steps[0] == 0 for record in stopped)
    assert "diverged" in found.summary()
    assert found.seeds == (0,)
    assert "Traceback" not in capfd.readouterr().err


def test_another_trial_does_not_go_on(folder: Path) -> None:
    with pytest.raises(InputError, match="begun with another training"):
        tracer.trial(recipe(folder, block_size=8), resume=True, progress=False)


@pytest.mark.parametrize(
    ("part", "key", "value", "what"),
    [
        ("model", "fingerprint", "0", "another model"),
        ("texts", "new", {}, "another text"),
        ("measures", "old", {}, "other measures"),
        ("recipe", "every", 1, "another every"),
        ("recipe", "budgets", [2, 6], "another longest budget"),
        ("recipe", "arms", {"shallow": {"rule": "shallow:1"}}, "another plan of arm shallow"),
    ],
)
def test_what_must_be_as_it_was(folder: Path, part: str, key: str, value: Any, what: str) -> None:
    about = json.loads((folder / "trial" / "trial.json").read_text(encoding="utf-8"))
    check_same(folder / "trial", about)
    known = about["recipe"]["acquisition"].pop("data")
    older = folder / "older"  # by a version whose measures had a key less
    older.mkdir(exist_ok=True)
    (older / "trial.json").write_text(json.dumps(about), encoding="utf-8")
    about["recipe"]["acquisition"]["data"] = known
    check_same(older, about)
    about[part][key] = value
    with pytest.raises(InputError, match=f"begun with {what}: resume with the same"):
        check_same(folder / "trial", about)


@pytest.mark.parametrize(
    ("options", "changes", "why"),
    [
        ({"resume": True, "force": True}, {}, "pass one of them"),
        ({"jobs": 0}, {}, "jobs 0, part 1/1"),
        ({"part": (3, 2)}, {}, "part 3/2"),
        ({}, {"retention": {"old": {"suite": "nowhere.jsonl"}}}, "old: .*nowhere"),
        ({}, {"acquisition": {"suite": "held.jsonl", "score": "accuracy"}}, "score 'accuracy' does not go with text"),
        ({}, {"retention": {"old": {"suite": "held.jsonl", "limit": 1}}}, "old has 1 items"),
        ({}, {"arms": {"full": {"rule": "full"}, "shallow": {"rule": "deep:99"}}}, "arm shallow: rule 'deep:99'"),
    ],
)
def test_bad_input_writes_nothing(
    tmp_path: Path, options: dict[str, Any], changes: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = small(tmp_path) | changes
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=why):
        tracer.trial(data, progress=False, **options)
    assert not (tmp_path / "trial").exists()


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    data = small(tmp_path)
    (tmp_path / "trial").mkdir()
    (tmp_path / "trial" / "mine.txt").write_text("x")
    with pytest.raises(InputError, match="holds other files"):
        tracer.trial(data, force=True, progress=False)
    assert (tmp_path / "trial" / "mine.txt").read_text() == "x"
    with pytest.raises(InputError, match="is no trial"):
        TrialResult.load(tmp_path / "trial")


def test_halves_go_by_turns_within_groups(result: TrialResult) -> None:
    items = Items("probes", ("a", "b", "c", "d", "e"), ("x", "y", "x", "x", "y"), (1,) * 5, (0,) * 5)
    found = halves(items)
    assert found["validation"].tolist() == [
        True,
        False,
        False,
        True,
        True,
    ]  # the second group goes on with the other half
    assert (found["test"] == ~found["validation"]).all()
    single = Items("probes", tuple("abcd"), tuple("wxyz"), (1,) * 4, (0,) * 4)
    assert halves(single)["validation"].tolist() == [True, False, True, False]


def test_the_recipe_of_a_result_reads_again(result: TrialResult, folder: Path) -> None:
    assert read_trial(recipe(folder)).measures == result.recipe.measures
