"""Evaluations compared question by question."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest

import tracer
from tracer.cli import main
from tracer.errors import InputError
from tracer.evaluation.comparing import FILES
from tracer.evaluation.results import EvalResult
from tracer.statistics import holm, mcnemar

SUITE = "ceval A"


def evaluation(right: np.ndarray, log_p: np.ndarray, subjects: list[str], name: str) -> EvalResult:
    """A result of a benchmark with given answers."""
    n = len(right)
    probes = pd.DataFrame(
        {
            "suite": SUITE,
            "id": [f"{subject}/{i}" for i, subject in enumerate(subjects)],
            "group": subjects,
            "prompt": [f"question {i}" for i in range(n)],
            "target": "A",
            "said": np.where(right, "A", "B"),
            "answered": right.astype(bool),
            "log_p": log_p,
            "p_said": 0.5,
            "mass": 1.0,
        }
    )
    run = {"arguments": {"suites": [SUITE], "shots": 0, "target": "single"}, "model": {"name": name}, "texts": []}
    arrays = {"log_p": log_p, "p_said": np.full(n, 0.5), "mass": np.ones(n)}
    return EvalResult(run, probes, pd.DataFrame(), arrays)


@pytest.fixture
def pair() -> tuple[EvalResult, EvalResult]:
    draw = np.random.default_rng(0)
    subjects = ["law"] * 10 + ["logic"] * 30
    right = draw.random((2, 40)) < 0.5
    right[1, 10:] |= right[0, 10:]
    log_p = draw.normal(-1.5, 0.5, (2, 40))
    return tuple(evaluation(r, p, subjects, name) for r, p, name in zip(right, log_p, ("a", "b"), strict=True))


def test_the_numbers_are_those_counted_by_hand(pair):
    a, b = pair
    found = tracer.compare(pair)
    row = found.suites.iloc[0]
    gain = b.probes["answered"].astype(int) - a.probes["answered"].astype(int)
    assert (row["only_base"], row["only_this"]) == ((gain < 0).sum(), (gain > 0).sum())
    assert row["p_value"] == pytest.approx(binomtest(int((gain < 0).sum()), int((gain != 0).sum())).pvalue)
    assert row["accuracy_difference"] == pytest.approx(gain.mean())
    law = (a.probes["group"] == "law").to_numpy()
    moved = b.arrays["log_p"] - a.arrays["log_p"]
    assert row["macro_log_p"] == pytest.approx((moved[law].mean() + moved[~law].mean()) / 2)
    assert row["log_p"] == pytest.approx(moved.mean())
    assert row["macro_accuracy"] == pytest.approx((gain[law].mean() + gain[~law].mean()) / 2)
    assert row["macro_log_p_low"] < row["macro_log_p"] < row["macro_log_p_high"]
    groups = found.groups.set_index("group")
    assert groups.loc["law", "n"] == 10
    assert groups.loc["logic", "accuracy_difference"] == pytest.approx(gain[~law].mean())
    assert groups["p_holm"].tolist() == holm(groups["p_value"].tolist())
    assert "b on ceval A (40 questions)" in found.summary()


def test_a_model_is_not_told_apart_from_itself(pair):
    found = tracer.compare([pair[0], pair[0]])
    row = found.suites.iloc[0]
    assert found.names == ("a (0)", "a (1)")
    assert (row["accuracy_difference"], row["log_p"], row["p_value"]) == (0, 0, 1)
    assert "cannot be told apart" in found.summary()


def test_mcnemar_and_holm_agree_with_worked_examples():
    assert mcnemar(0, 0) == 1
    assert mcnemar(1, 9) == pytest.approx(2 * (1 + 10) / 2**10)
    assert mcnemar(9, 1) == mcnemar(1, 9)
    # Holm's procedure by hand: 3 x 0.01, 2 x 0.02, and 0.03 which must not be below the one before it.
    assert holm([0.03, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([0.9, 0.8]) == [1, 1]
    assert holm([]) == []


def test_six_points_are_found_at_the_size_of_ceval():
    """1,346 questions, 30 % of which only one of two models answers: 18 % one and 12 % the other."""
    draw = np.random.default_rng(0)
    found = same = 0
    for _ in range(1000):
        better, worse, _ = draw.multinomial(1346, [0.18, 0.12, 0.70])
        found += mcnemar(int(worse), int(better)) < 0.05
        better, worse, _ = draw.multinomial(1346, [0.15, 0.15, 0.70])
        same += mcnemar(int(worse), int(better)) < 0.05
    assert found >= 900
    assert same <= 70


def test_the_smallest_difference_is_said_as_it_is():
    """With 30 % of 1,346 questions answered by one only, under about three points cannot be seen."""
    right = np.zeros((2, 1346), dtype=bool)
    right[0, :202] = right[1, 202:404] = True
    runs = [evaluation(r, np.zeros(1346), ["law"] * 1346, name) for r, name in zip(right, "ab", strict=True)]
    row = tracer.compare(runs).suites.iloc[0]
    assert row["limit"] == pytest.approx(1.96 * np.sqrt(0.3 / 1346), rel=0.01)
    assert row["limit"] == pytest.approx(0.029, abs=1e-3)
    assert row["detectable"] == pytest.approx(0.042, abs=1e-3)


def test_what_was_not_asked_alike_is_refused(pair):
    a, b = pair

    def refused(other: EvalResult) -> str:
        with pytest.raises(InputError) as error:
            tracer.compare([a, other])
        assert "\n" not in str(error.value)
        return str(error.value)

    def asked(**changes) -> EvalResult:
        return replace(b, run={**b.run, "arguments": {**b.run["arguments"], **changes}})

    assert "asked with shots 0 and b with 5" in refused(asked(shots=5))
    assert "same suites and answer forms" in refused(asked(suites=["ceval ␣A"]))
    assert "they differ at 'law/3'" in refused(
        replace(b, probes=b.probes.assign(id=b.probes["id"].replace("law/3", "x")))
    )
    assert "they differ at 'logic/39'" in refused(replace(b, probes=b.probes.iloc[:-1]))
    with pytest.raises(InputError, match="pass two or more"):
        tracer.compare([a])


def test_the_command_reads_folders_and_saves_the_tables(tmp_path: Path, capsys):
    for size in (4, 8):
        tracer.evaluate(f"zoo/transformer-{size}", "zoo/held", limit=4, out=tmp_path / str(size), progress=False)
    arguments = ["compare", str(tmp_path / "4"), str(tmp_path / "8")]

    def run(*more: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main([*arguments, *more])
        return stopped.value.code or 0, *capsys.readouterr()

    status, said, _ = run("--out", str(tmp_path / "both"))
    assert status == 0
    assert "zoo/transformer-8 on zoo/held (68 questions)" in said
    assert {path.name for path in (tmp_path / "both").iterdir()} == set(FILES)
    status, _, error = run("--out", str(tmp_path / "both"))
    assert (status, error.count("\n")) == (2, 1)
    arguments[2] = str(tmp_path / "none")
    status, _, error = run()
    assert (status, error.count("\n")) == (2, 1)
    assert "no result folder" in error
