"""Suites that are asked while a model is trained, against evaluations of the model that it leaves."""

from pathlib import Path

import numpy as np
import pytest
from small_training import model_folder, recipe, text_file
from small_trial import probe_file

import tracer
from tracer.errors import InputError
from tracer.training.asked import read_asked


def asking(folder: Path, **changes: object) -> dict[str, object]:
    """A recipe that asks a probe set and a text every two steps."""
    suites = {
        "facts": {"suite": str(probe_file(folder / "facts.jsonl")), "groups": ["g1"], "limit": 4},
        "book": {"suite": str(text_file(folder / "book.txt", 3, seed=4))},
    }
    return recipe(folder, model_folder(folder / "model"), ask={"every": 2, "suites": suites}, **changes)


def test_what_is_asked_is_what_an_evaluation_finds(tmp_path: Path) -> None:
    result = tracer.cpt(asking(tmp_path), progress=False)
    items, steps = read_asked(tmp_path / "out" / "asked")
    assert sorted(steps) == [0, 2, 4, 6]
    assert set(items["facts"].groups) == {"g1"}
    probes = tracer.read_probes(tmp_path / "facts.jsonl", groups=["g1"])
    for step, model in ((0, tmp_path / "model"), (6, tmp_path / "out")):
        found = tracer.evaluate(model, [probes, tmp_path / "book.txt"], limit=4, progress=False)
        assert items["facts"].names == tuple(found.probes["id"])
        np.testing.assert_allclose(steps[step]["facts"].log_p, found.arrays["log_p"], atol=1e-5)
        assert steps[step]["facts"].answered.tolist() == found.probes["answered"].tolist()
        rows = {row["suite"]: row for row in result.run["asked"] if row["step"] == step}
        assert rows["book"]["bits_per_byte"] == pytest.approx(found.texts["bits_per_byte"].iloc[0], abs=1e-6)
        assert rows["facts"]["log_p"] == pytest.approx(found.probes["log_p"].mean(), abs=1e-6)
    assert not np.array_equal(steps[0]["facts"].log_p, steps[6]["facts"].log_p)
    assert "bits_per_byte" not in result.summary()
    assert "bits/byte" in result.summary()


def test_asking_changes_nothing_of_the_training(tmp_path: Path) -> None:
    plain, asked = tmp_path / "plain", tmp_path / "asked"
    for folder in (plain, asked):
        folder.mkdir()
    data = asking(asked)
    one = tracer.cpt(data, progress=False, priced=False)
    other = tracer.cpt({**data, "ask": None, "output_dir": str(plain / "out")}, progress=False, priced=False)
    np.testing.assert_array_equal(one.curve["loss"], other.curve["loss"])
    assert (one.folder / "model.safetensors").read_bytes() == (other.folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        ({"every": 0, "suites": {"a": {"suite": "zoo/held"}}}, "ask: every 0: pass at least 1 step"),
        ({"every": 2, "suites": {}}, "ask: suites are empty"),
        ({"every": 2}, "ask: suites is missing"),
        ({"every": 2, "suites": {"a": {"suit": "zoo/held"}}}, "ask.suites.a: unknown key 'suit'; did you mean suite"),
        ({"every": 2, "suites": {"a": {"suite": "zoo/held", "limit": 0}}}, "ask.suites.a: limit 0"),
        ({"every": 2, "suites": {"a": {"suite": "zoo/hold"}}}, "a: unknown probe set 'zoo/hold'"),
        ({"every": 2, "suites": {"a": {"suite": "BOOK", "groups": ["x"]}}}, "a: .* is a text, which has no groups"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_is_written(tmp_path: Path, ask: dict, why: str) -> None:
    data = asking(tmp_path)
    for suite in ask.get("suites", {}).values():
        if suite.get("suite") == "BOOK":
            suite["suite"] = str(tmp_path / "book.txt")
    with pytest.raises(InputError, match=why):
        tracer.cpt({**data, "ask": ask}, progress=False)
    assert not (tmp_path / "out").exists()
