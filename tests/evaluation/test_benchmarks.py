"""C-Eval and CMMLU through the harness: on copies of their layout, with a model whose answers are known."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from tiny import tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import tracer
from tracer.benchmarks import BENCHMARKS, LETTERS
from tracer.cli import main
from tracer.errors import InputError
from tracer.evaluation import harness
from tracer.evaluation.results import EvalResult
from tracer.statistics import stratified_interval

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'layertracer[eval]'")
SIZES = {"law": 10, "logic": 90}


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and each letter after a space as one token, as large tokenizers have it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spaced = [f"Ġ{letter}" for letter in LETTERS]
    vocabulary = {token: number for number, token in enumerate([*alphabet, *spaced, "<end>"])}
    model = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ġ", letter) for letter in LETTERS]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>", model_max_length=4096)


@pytest.fixture
def model() -> tracer.TracedModel:
    return tracer.load(tiny("llama", vocab_size=261, max_position_embeddings=4096), tokenizer())


def write(folder: Path, benchmark: str, split: str, subject: str, rows: list[dict[str, str]]) -> Path:
    path = folder / benchmark / split / BENCHMARKS[benchmark].file.format(subject=subject, split=split)
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_csv(path)
    return path


def questions(benchmark: str, number: int, *, marked: bool = True) -> list[dict[str, str]]:
    """Questions that end in their own answer, `[B]`, or in a wrong one."""
    spec = BENCHMARKS[benchmark]
    rows = []
    for i in range(number):
        gold = LETTERS[(3 * i + 1) % 4]
        said = gold if marked else LETTERS[(3 * i + 2) % 4]
        choices = {letter: f"选{letter}{i}" for letter in LETTERS}
        rows.append({spec.question: f"第{i}题 [{said}]", **choices, spec.answer: gold})
    return rows


@pytest.fixture
def data(tmp_path) -> Path:
    folder = tmp_path / "data"
    for benchmark, spec in BENCHMARKS.items():
        for subject, size in (SIZES if benchmark == "ceval" else {"agronomy": 3}).items():
            write(folder, benchmark, spec.split, subject, questions(benchmark, size, marked=subject != "logic"))
            shots = [row | {"explanation": "因为"} for row in questions(benchmark, 5)]
            write(folder, benchmark, "dev", subject, shots)  # C-Eval's has a column more
    return folder


@pytest.fixture
def oracle(model, monkeypatch) -> Iterator[tracer.TracedModel]:
    """A model that says the letter of the last `[X]` that it has read, and never one after a space."""
    live, read = model.model, tokenizer()
    letters = {read.convert_tokens_to_ids(letter): letter for letter in LETTERS}
    opening = read.convert_tokens_to_ids("[")
    forward = live.forward

    def knowing(*args, **kwargs):
        found = forward(*args, **kwargs)
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        for row, tokens in enumerate(ids.tolist()):
            said = [b for a, b in pairwise(tokens) if a == opening and b in letters]
            if said:
                found.logits[row, :, said[-1]] = 60.0
        return found

    monkeypatch.setattr(live, "forward", knowing)
    return model


def test_both_means_and_both_forms_are_as_counted_by_hand(oracle, data):
    result = tracer.evaluate(oracle, "ceval", data=data, subjects=list(SIZES), progress=False)
    table = result.groups.set_index(["suite", "group"])
    assert result.suites == ("ceval A", "ceval ␣A")
    assert table.loc[("ceval A", "macro"), "accuracy"] == pytest.approx(0.5)
    assert table.loc[("ceval A", "all"), "accuracy"] == pytest.approx(0.1)
    assert table.loc[("ceval A", "all"), "n"] == 100
    assert table.loc[("ceval A", "law"), ["n", "answered"]].tolist() == [10, 10]
    assert table.loc[("ceval A", "all"), "mass"] == pytest.approx(1)
    assert table.loc[("ceval ␣A", "all"), "mass"] < 1e-6
    said = result.summary()
    assert "the four letters hold 0.0% of the probability" in said
    assert said.count("  ! ") == 1
    assert "chance is 0.25" in said
    result.plot()


def test_each_letter_is_as_likely_as_in_a_plain_forward(model, data):
    """The ids are those of prompt and letter tokenized together; each prompt runs alone, without the harness."""
    read = tokenizer()
    for shots in (0, 2):
        result = tracer.evaluate(
            model, "ceval", data=data, subjects=["law"], shots=shots, limit=2, progress=False, batch_size=3
        )
        assert len(result.probes) == 4
        for number, row in result.probes.iterrows():
            space = "" if row["suite"].endswith(" A") else " "
            assert row["prompt"].startswith("以下是中国关于")
            assert row["prompt"].endswith("答案：")
            assert row["prompt"].count(f"答案：{space}") >= shots
            ids = [read(f"{row['prompt']}{space}{letter}")["input_ids"] for letter in LETTERS]
            assert len({tuple(one[:-1]) for one in ids}) == 1
            with torch.no_grad():
                logits = model.model(torch.tensor([ids[0][:-1]])).logits[0, -1]
            expected = logits.double().log_softmax(-1)[[one[-1] for one in ids]]
            np.testing.assert_allclose(result.arrays["log_p_letters"][number], expected, atol=1e-4)
            assert row["log_p"] == pytest.approx(expected[LETTERS.index(row["target"])].item(), abs=1e-4)
            assert row["mass"] == pytest.approx(expected.exp().sum().item(), rel=1e-3)


def test_cmmlu_is_read_in_its_own_layout(model, data):
    result = tracer.evaluate(model, "cmmlu", data=data / "cmmlu", subjects=["agronomy"], forms=["A"], progress=False)
    assert result.probes["id"].tolist() == ["agronomy/0", "agronomy/1", "agronomy/2"]
    assert result.probes["target"].tolist() == ["B", "A", "D"]


def test_a_run_twice_is_the_same_and_an_interrupted_one_goes_on(model, data, tmp_path, monkeypatch):
    arguments = {"data": data, "subjects": list(SIZES), "limit": 20, "progress": False}
    whole = tracer.evaluate(model, "ceval", **arguments)
    pd.testing.assert_frame_equal(tracer.evaluate(model, "ceval", **arguments).probes, whole.probes, check_exact=True)
    ask, asked = harness.Harness._log_p, []

    def interrupted(self, tasks, numbers):
        if len(asked) == 2:
            raise KeyboardInterrupt
        asked.append(numbers)
        return ask(self, tasks, numbers)

    monkeypatch.setattr(harness.Harness, "_log_p", interrupted)
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        tracer.evaluate(model, "ceval", out=out, **arguments)
    assert asked == [list(range(10)), list(range(16))]
    monkeypatch.setattr(harness.Harness, "_log_p", ask)
    with pytest.raises(InputError, match="resume it, or force"):
        tracer.evaluate(model, "ceval", out=out, **arguments)
    with pytest.raises(InputError, match="was begun with another arguments"):
        tracer.evaluate(model, "ceval", out=out, resume=True, **arguments | {"shots": 1})
    tracer.evaluate(model, "ceval", out=out, resume=True, **arguments)
    saved = EvalResult.load(out)
    pd.testing.assert_frame_equal(saved.probes, whole.probes)
    pd.testing.assert_frame_equal(saved.groups, whole.groups)
    assert not (out / "partial").exists()
    assert saved.summary() == whole.summary()


def test_benchmarks_and_probes_make_one_result(model, data, tmp_path):
    mine = tmp_path / "mine.jsonl"
    rows = [{"prompt": f"x{i}", "target": "y", "group": "g", "id": f"p{i}"} for i in range(3)]
    mine.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = tracer.evaluate(model, f"{mine},ceval", data=data, subjects=["law"], limit=3, progress=False)
    assert len(result.suites) == 3
    assert result.probes["mass"].isna().tolist() == [True] * 3 + [False] * 6
    assert "form" in result.summary()


def test_bad_input_is_one_line(model, data, tmp_path, capsys):
    def refused(**changes) -> str:
        arguments = {"data": data, "subjects": ["law"], "progress": False} | changes
        with pytest.raises(InputError) as error:
            tracer.evaluate(model, "ceval", **arguments)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "C-Eval has no subject 'lav': pass law" in refused(subjects=["lav"])
    assert "no file 'val/physician_val.csv' of C-Eval" in refused(subjects=["physician"])
    assert "no folder" in refused(data=tmp_path / "none")
    assert "unknown answer form 'B'" in refused(forms=["B"])
    assert "shots -1" in refused(shots=-1)
    rows = questions("ceval", 4)
    rows[2]["answer"] = ""
    write(data, "ceval", "val", "law", rows)
    assert "question 2: its answer is '', none of A, B, C, D: pass the split 'val'" in refused()
    write(data, "ceval", "val", "law", [{key: row[key] for key in row if key != "answer"} for row in rows])
    assert "has no column 'answer'" in refused()
    with pytest.raises(InputError, match="subjects are those of ceval and cmmlu"):
        tracer.evaluate(model, "english", subjects=["law"], progress=False)
    with pytest.raises(SystemExit) as stopped:
        main(["eval", "zoo/transformer-4", "--suite", "ceval", "--data", str(data), "--subjects", "lav", "-q"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_harness_names_all_subjects():
    assert {name: len(benchmark.subjects()) for name, benchmark in BENCHMARKS.items()} == {"ceval": 52, "cmmlu": 67}


@pytest.mark.parametrize("macro", [True, False])
def test_intervals_cover_further_questions_on_the_same_subjects(macro):
    draw = np.random.default_rng(0)
    sizes, shares = draw.integers(15, 60, 12), draw.uniform(0.2, 0.8, 12)
    strata = [f"s{i}" for i, size in enumerate(sizes) for _ in range(size)]
    truth = shares.mean() if macro else (shares * sizes).sum() / sizes.sum()
    covered = 0
    for number in range(1000):
        values = draw.random(len(strata)) < np.repeat(shares, sizes)
        found = stratified_interval(
            values.astype(float), strata, macro=macro, seed=number, label="coverage", n_resamples=200
        )
        assert found.low is not None
        covered += found.low <= truth <= found.high
    assert 0.93 <= covered / 1000 <= 0.97


def test_questions_are_probes_with_the_same_prompts_and_log_p(model, data, monkeypatch):
    asked = tracer.evaluate(model, "ceval", data=data, subjects=["law"], forms=["A"], progress=False).probes
    probes = tracer.read_probes("ceval:val", groups=["law"], data=data)
    assert [probe.prompt for probe in probes] == asked["prompt"].tolist()
    assert [(probe.id, probe.target, probe.group) for probe in probes] == list(
        asked[["id", "target", "group"]].itertuples(index=False)
    )
    result = tracer.trace(model, "ceval:val", groups=["law"], data=data, ablations="none", progress=False)
    np.testing.assert_allclose(result.arrays["log_p"][-1], asked["log_p"], atol=1e-4)
    monkeypatch.setenv("LAYERTRACER_DATA", str(data))
    assert tracer.read_probes("ceval:val", groups="law") == probes
    for source, groups, why in (
        ("ceval:test", None, "of C-Eval the split val is asked: pass ceval:val"),
        ("ceval:val", ["lav"], "no subject 'lav': pass law"),
        ("ceval:val", ["accountant"], "no file"),
    ):
        with pytest.raises(InputError, match=why):
            tracer.read_probes(source, groups=groups)
    monkeypatch.setenv("LAYERTRACER_DATA", str(data / "none"))
    with pytest.raises(InputError, match="no folder .*LAYERTRACER_DATA"):
        tracer.read_probes("ceval:val", groups=["law"])


def test_a_fixed_part_of_the_questions_is_asked(model, data):
    arguments = {"data": data, "subjects": ["law"], "forms": ["A"], "progress": False}
    part = tracer.evaluate(model, "ceval", every=3, limit=8, **arguments).probes
    assert part["id"].tolist() == ["law/0", "law/3", "law/6"]
    prompts = {probe.id: probe.prompt for probe in tracer.read_probes("ceval:val", groups=["law"], data=data)}
    assert part["prompt"].tolist() == [prompts[name] for name in part["id"]]
    with pytest.raises(InputError, match="every 0"):
        tracer.evaluate(model, "ceval", every=0, **arguments)
