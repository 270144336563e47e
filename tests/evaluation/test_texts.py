"""Texts as suites: bits a byte against the harness and plain forwards, and every place that a result of texts goes."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from small_training import model_folder, text_file
from tiny import tiny
from transformers import AutoModelForCausalLM

import tracer
from tracer.cli import main
from tracer.errors import InputError
from tracer.evaluation.means import FEWEST, ratio_of_sums
from tracer.evaluation.results import EvalResult
from tracer.evaluation.texts import document_log_p, is_text, read_text, rolling_windows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("texts")
    lines = text_file(found / "lines.txt", 9).read_text(encoding="utf-8").splitlines()
    documents = [f"{lines[0]} {line}" for line in lines]
    (found / "new.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    model_folder(found / "model")
    return found


def documents_of(folder: Path) -> list[str]:
    return [json.loads(line)["text"] for line in (folder / "new.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("family", ["llama", "mamba2"])
@pytest.mark.parametrize("context", [8, 64])
def test_log_p_is_that_of_the_harness(folder: Path, family: str, context: int) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model = tracer.load(
        tiny(family), tokenizer=tracer.load(folder / "model", progress=False).tokenizer, backend="hooks"
    )
    lm = HFLM(pretrained=model.model, tokenizer=model.tokenizer, batch_size=1, max_length=context)
    lm.tok_encode = lambda text, **_: model.tokenizer(text, add_special_tokens=False)["input_ids"]
    asked = [Instance("loglikelihood_rolling", {}, (text,), i) for i, text in enumerate(documents_of(folder))]
    wanted = lm.loglikelihood_rolling(asked, disable_tqdm=True)
    text = read_text(model, folder / "new.jsonl")
    found = document_log_p(model.adapter.forward, text, context=context, batch_tokens=100)
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert max(text.tokens) > 8  # else the shorter context is no other one


def test_bits_a_byte_are_those_of_a_plain_forward(folder: Path, tmp_path: Path) -> None:
    result = tracer.evaluate(folder / "model", folder / "new.jsonl", progress=False, out=tmp_path / "run")
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    tokenizer = tracer.load(folder / "model", progress=False).tokenizer
    total, tokens = 0.0, 0
    for text in documents_of(folder):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([[127, *ids]])).logits[0, :-1].double()  # w127 ends a text
        total += float(logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).sum())
        tokens += len(ids)
    row = result.texts.iloc[0]
    n_bytes = sum(len(text.encode()) for text in documents_of(folder))
    assert (row["text"], row["documents"], row["tokens"], row["bytes"]) == ("new", 9, tokens, n_bytes)
    assert row["loss"] == pytest.approx(-total / tokens, rel=1e-5)
    assert row["perplexity"] == pytest.approx(math.exp(-total / tokens), rel=1e-5)
    assert row["bits_per_byte"] == pytest.approx(-total / math.log(2) / n_bytes, rel=1e-5)
    assert row["low"] < row["bits_per_byte"] < row["high"]
    again = EvalResult.load(tmp_path / "run")
    assert again.texts.equals(result.texts)
    assert again.summary() == result.summary()
    np.testing.assert_array_equal(again.arrays["text/new"], result.arrays["text/new"])
    assert result.suites == result.benchmarks == ()
    with pytest.raises(InputError, match="only texts were read"):
        again.plot()


def test_texts_and_probes_make_one_result(folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.jsonl"
    mine.write_text("".join(json.dumps({"prompt": f"w{i}", "target": f" w{i + 1}"}) + "\n" for i in range(3, 20)))
    suites = [mine, folder / "new.jsonl", folder / "lines.txt"]
    result = tracer.evaluate(folder / "model", suites, progress=False, limit=4, out=tmp_path / "run")
    assert result.suites == ("mine",)
    assert len(result.probes) == 4
    assert result.texts["documents"].tolist() == [4, 1]
    assert result.texts["low"].isna().all()  # too few documents
    text = result.summary()
    assert "bits/byte" in text
    assert "expected calibration error" in text
    result.plot()
    same = tracer.compare([result, tmp_path / "run"])
    assert same.texts["difference"].tolist() == [0.0, 0.0]


def test_a_pair_of_models_is_compared_document_by_document(folder: Path, tmp_path: Path) -> None:
    model = tracer.load(folder / "model", progress=False, backend="hooks")
    base = tracer.evaluate(model, folder / "new.jsonl", progress=False)
    with torch.no_grad():
        model.model.lm_head.weight.mul_(0.1)  # nearer to a guess
    other = tracer.evaluate(model, folder / "new.jsonl", progress=False)
    found = tracer.compare([base, other])
    row = found.texts.iloc[0]
    assert row["difference"] == pytest.approx(row["this"] - row["base"], abs=1e-12)
    assert row["low"] <= row["difference"] <= row["high"]
    assert ("better" if row["high"] < 0 else "worse" if row["low"] > 0 else "apart") in found.summary()
    assert {path.name for path in found.save(tmp_path / "out").iterdir()} >= {"texts.csv", "run.json"}
    (tmp_path / "new.jsonl").write_text((folder / "new.jsonl").read_text().replace("w1", "w22"))
    changed = tracer.evaluate(model, tmp_path / "new.jsonl", progress=False)
    with pytest.raises(InputError, match="did not read the same texts"):
        tracer.compare([base, changed])


def test_windows_predict_every_token_once_and_see_as_much_as_fits() -> None:
    found = list(rolling_windows([1, 2, 3, 4, 5, 6, 7], 0, 3))
    assert found == [([0, 1, 2], [1, 2, 3]), ([3, 4, 5], [4, 5, 6]), ([4, 5, 6], [7])]


def test_an_interval_of_a_ratio_covers_it_and_weighs_items_by_size() -> None:
    draw = np.random.default_rng(0)
    covered = 0
    for number in range(400):
        sizes = draw.integers(1, 20, 60).astype(float)
        found = ratio_of_sums(sizes * draw.normal(2.0, 0.5, 60), sizes, seed=0, label=number)
        covered += found.low <= 2.0 <= found.high
    assert 0.90 <= covered / 400 <= 0.98
    assert ratio_of_sums(np.array([1.0, 0.0]), np.array([1.0, 9.0]), seed=0, label="x").estimate == 0.1
    assert ratio_of_sums(np.ones(FEWEST - 1), np.ones(FEWEST - 1), seed=0, label="x").low is None


def test_what_is_a_text(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("english", "ceval", "zoo/held", "mine"):  # folders that happen to be called so
        (tmp_path / name).mkdir(parents=True)
        assert is_text(name) is (name == "mine")
        assert is_text(f"./{name}")
    (tmp_path / "probes.jsonl").write_text('{"prompt": "a", "target": "b"}\n')
    for name, wanted in (("new.jsonl", True), ("lines.txt", True), ("zoo/held", False), ("ceval", False)):
        assert is_text(str(folder / name) if "." in name else name) is wanted
    assert not is_text(tmp_path / "probes.jsonl")
    assert is_text(folder)


def test_bad_input_is_one_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "new.txt").write_text("w1 w2 w3")
    for arguments, why in (
        (["--suite", str(tmp_path / "empty.txt")], "is empty"),
        (["--suite", str(tmp_path / "none.txt")], "no text"),
        (["--suite", f"{folder / 'new.jsonl'},{tmp_path / 'new.txt'}"], "name each suite once"),
        (["--suite", str(folder / "new.jsonl"), "--context", "1"], "context 1: pass at least 2"),
    ):
        with pytest.raises(SystemExit) as done:
            main(["eval", str(folder / "model"), "-q", "--out", str(tmp_path / "run"), *arguments])
        found = capsys.readouterr()
        assert done.value.code == 2
        assert why in found.err
        assert found.err.count("\n") == 1
    assert not (tmp_path / "run").exists()
    with pytest.raises(SystemExit) as done:
        main(
            ["eval", str(folder / "model"), "-q", "--out", str(tmp_path / "run"), "--suite", str(folder / "new.jsonl")]
        )
    assert done.value.code == 0
    assert "figure" not in capsys.readouterr().out
