"""Evaluation on probe sets, against distributions that are computed one prompt at a time."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import binomtest
from tiny import tiny, word_tokenizer

import tracer
from tracer.cli import main
from tracer.errors import InputError
from tracer.evaluation.results import FILES, EvalResult
from tracer.probes import shipped_folder

PROBES = [
    tracer.Probe(prompt=" ".join(f"w{(7 * i + j) % 100 + 3}" for j in range(2 + i % 4)), target=f" w{i % 9 + 3}",
                 group=f"g{i % 3}", id=f"p{i}")
    for i in range(36)
]  # fmt: skip


@pytest.fixture(scope="module", params=["llama", "mamba2"])
def model(request: pytest.FixtureRequest) -> tracer.TracedModel:
    return tracer.load(tiny(request.param), word_tokenizer())


@pytest.fixture
def probes(tmp_path):
    path = tmp_path / "mine.jsonl"
    keys = ("prompt", "target", "group", "id")
    path.write_text("".join(json.dumps({key: getattr(probe, key) for key in keys}) + "\n" for probe in PROBES))
    return str(path)


def test_numbers_are_those_of_each_prompt_alone(model, probes):
    result = tracer.evaluate(model, probes, batch_tokens=30, progress=False)
    tokenizer = model.tokenizer
    for i, probe in enumerate(PROBES):
        ids = tokenizer(probe.prompt + probe.target)["input_ids"]
        with torch.no_grad():
            log_p = model.model(torch.tensor([ids[:-1]]), use_cache=False).logits[0, -1].double().log_softmax(-1)
        row = result.probes.loc[i]
        assert row["id"] == probe.id
        assert result.arrays["log_p"][i] == pytest.approx(log_p[ids[-1]].item(), abs=1e-4)
        assert row["said"] == f"w{log_p.argmax()}"
        assert row["answered"] == (log_p.argmax().item() == ids[-1])
        assert result.arrays["p_said"][i] == pytest.approx(log_p.max().exp().item(), abs=1e-4)


def test_groups_are_the_means_of_their_probes(model, probes):
    result = tracer.evaluate(model, probes, progress=False)
    table = result.groups.set_index("group")
    for group in ("g0", "g1", "g2"):
        own = (result.probes["group"] == group).to_numpy()
        assert table.loc[group, "n"] == own.sum() == 12
        assert table.loc[group, "accuracy"] == result.probes["answered"][own].mean()
        assert table.loc[group, "log_p"] == pytest.approx(result.arrays["log_p"][own].mean())
    assert table.loc["all", "n"] == 36
    assert (table["low"] <= table["accuracy"]).all()
    assert (table["high"] >= table["accuracy"]).all()


def test_answers_that_agree_make_nothing_certain(model):
    said = tracer.evaluate(model, [tracer.ProbeSet("mine", tuple(PROBES))], progress=False).probes["said"]
    right = tuple(replace(probe, target=f" {word}") for probe, word in zip(PROBES, said, strict=True))
    table = tracer.evaluate(model, [tracer.ProbeSet("right", right)], progress=False).groups.set_index("group")
    assert (table["accuracy"] == 1).all()
    assert table.loc["g0", "low"] == pytest.approx(binomtest(12, 12).proportion_ci(method="wilson").low)
    assert table.loc["all", "low"] == pytest.approx(binomtest(3, 3).proportion_ci(method="wilson").low), "three groups"


def test_a_result_comes_back_from_its_folder(model, probes, tmp_path):
    result = tracer.evaluate(model, probes, out=tmp_path / "run", progress=False)
    assert {path.name for path in (tmp_path / "run").iterdir()} == set(FILES)
    again = EvalResult.load(tmp_path / "run")
    pd.testing.assert_frame_equal(again.groups, result.groups, check_exact=False)
    assert again.probes["said"].tolist() == result.probes["said"].tolist()
    assert again.summary() == result.summary()
    np.testing.assert_array_equal(again.arrays["log_p"], result.arrays["log_p"])
    with pytest.raises(InputError, match="already holds a result"):
        tracer.evaluate(model, probes, out=tmp_path / "run", progress=False)
    tracer.evaluate(model, probes, out=tmp_path / "run", force=True, progress=False)


def test_several_suites_stand_apart_and_limit_counts_per_group(model, probes, tmp_path):
    other = tmp_path / "other.csv"
    other.write_text("prompt,target\nw3 w4, w5\n")
    result = tracer.evaluate(model, f"{probes},{other}", limit=2, progress=False)
    assert result.suites == ("mine", "other")
    assert result.groups[["suite", "group", "n"]].to_numpy().tolist() == [
        ["mine", "all", 6], ["mine", "g0", 2], ["mine", "g1", 2], ["mine", "g2", 2], ["other", "all", 1],
        ["other", "other", 1],
    ]  # fmt: skip
    figure = result.plot()
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["all", "g0", "g1", "g2", "other"]


@pytest.mark.parametrize(
    ("suites", "why"),
    [
        ("nowhere", "unknown probe set 'nowhere'"),
        ("", "suites are empty"),
        ("en-capitals,en-capitals", "name each suite once"),
        ("zoo/in-contxt", "did you mean zoo/in-context"),
        ([tracer.ProbeSet("x", (replace(PROBES[0], group="all"),))], "a group is called 'all'"),
        ([tracer.ProbeSet("x", (replace(PROBES[0], target=" w3 w4"),))], "has 2 tokens"),
    ],
)
def test_unusable_suites_are_refused(model, suites, why):
    with pytest.raises(InputError, match=why):
        tracer.evaluate(model, suites, progress=False)


def test_unusable_probes_are_counted_or_read_by_their_first_token(model):
    long = tracer.ProbeSet("mine", (*PROBES, tracer.Probe("w5 w6", " w7 w8", "g0", "long")))
    left_out = tracer.evaluate(model, [long], skip_bad=True, progress=False)
    assert len(left_out.probes) == 36
    assert "1 probes are not usable and were left out, e.g. long" in left_out.summary()
    assert len(tracer.evaluate(model, [long], target="first", progress=False).probes) == 37
    with pytest.raises(InputError, match="unknown target 'joint'"):
        tracer.evaluate(model, [long], target="joint", progress=False)


def test_only_the_shipped_sets_are_compared_with_a_card(tmp_path):
    file = tmp_path / "held.jsonl"
    file.write_text((shipped_folder() / "zoo" / "held.jsonl").read_text())
    result = tracer.evaluate("zoo/transformer-4", str(file), limit=None, progress=False)
    assert "card" not in result.summary()


def test_the_command_prints_and_saves(probes, tmp_path, capsys):
    folder = tmp_path / "model"
    tiny("llama").save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    with pytest.raises(SystemExit) as stop:
        main(["eval", str(folder), "--suite", probes, "--out", str(tmp_path / "run"), "-q", "--backend", "hooks"])
    assert not stop.value.code
    printed = capsys.readouterr().out
    assert EvalResult.load(tmp_path / "run").summary() in printed
    assert (tmp_path / "run" / "figures" / "accuracy.svg").is_file()
    with pytest.raises(SystemExit) as stop:
        main(["eval", str(folder), "--suite", "nowhere", "--out", str(tmp_path / "other"), "-q"])
    assert stop.value.code == 2
    assert not (tmp_path / "other").exists()
