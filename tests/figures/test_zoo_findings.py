"""The page of findings and the list in the README say what the committed tables and models say."""

import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from tracer.zoo import training
from tracer.zoo.build import build
from tracer.zoo.families import FAMILIES, RUNS, Run
from tracer.zoo.shelf import SHELF, listing, read_card, zoo_names

ROOT = Path(__file__).parents[2]
TABLES = ROOT / "figures" / "data" / "zoo"


@pytest.fixture(scope="module")
def tables() -> dict[str, pd.DataFrame]:
    return {path.stem: pd.read_csv(path) for path in TABLES.glob("*.csv")}


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "figures"))
    import zoo_page

    yield zoo_page
    for name in ("zoo_page", "zoo_plots", "zoo_findings"):
        sys.modules.pop(name, None)


def test_the_page_is_made_from_the_tables(words, tables):
    assert (ROOT / "docs" / "FINDINGS.md").read_text(encoding="utf-8") == words.page(tables)


def test_the_readme_lists_the_models():
    assert f"```text\n{listing()}\n```" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_run_was_measured_and_answers_what_its_card_says(tables):
    models = tables["models"].set_index("name")
    assert list(models.index) == list(RUNS)
    for name in zoo_names():
        card = read_card(name)
        held = sum(group["answered"] for group in card.facts["accuracy"]["held"].values())
        assert models.loc[name.removeprefix("zoo/"), "answered"] == held
        assert (SHELF / name.removeprefix("zoo/")).is_dir()


@pytest.mark.parametrize(
    ("low", "high", "verdict"), [(0.1, 0.2, "shallow"), (-0.2, -0.1, "deep"), (-0.1, 0.1, "undecided")]
)
def test_a_verdict_needs_an_interval_on_one_side(words, low, high, verdict):
    assert words.verdict_on_difference(low, high) == verdict


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(4, 6, "deep"), (3, 6, "undecided"), (3.5, 6, "undecided"), (1, 3, "shallow"), (float("nan"), 7, "undecided")],
)
def test_particles_are_deep_only_beyond_the_middle(words, low, high, verdict):
    row = pd.Series({"blocks": 8, "particle_low": low, "particle_high": high})
    assert words.verdict_on_particles(row) == verdict


def test_what_is_measured_fills_the_page(words, tmp_path, monkeypatch):
    import zoo_findings
    import zoo_plots

    monkeypatch.setattr(training, "EVALUATE_EVERY", 1)
    short = {
        name: replace(run, family=replace(run.family, steps=1))
        for name, run in RUNS.items()
        if name in ("transformer-4", "transformer-8")
    }
    short |= {"mamba2-8": Run(replace(FAMILIES["mamba2"], steps=1))}
    for name, run in short.items():
        build(run, tmp_path / name)
    monkeypatch.setattr(zoo_findings, "RUNS", short)
    monkeypatch.setattr(zoo_findings, "SIZES", ("transformer-4", "transformer-8"))
    monkeypatch.setattr(zoo_findings, "TWINS", 2)
    monkeypatch.setattr(zoo_findings, "LIMIT", 2)
    zoo_findings.measure(tmp_path, tmp_path / "data")
    tables = {path.stem: pd.read_csv(path) for path in (tmp_path / "data").glob("*.csv")}
    assert set(tables["models"]["name"]) == set(short)
    assert len(tables["halves"]) == 3 * 2 * 2
    assert len(tables["blocks"]) == 2 * (4 + 8 + 8)
    # The twin with the run's own seed is what the run was before its one step.
    blocks = tables["blocks"].set_index(["name", "weights", "block"])["norm_before"]
    assert blocks["mamba2-8", "random", 0] == pytest.approx(blocks["mamba2-8", "trained", 0], rel=0.05)
    halves = tables["halves"]
    assert (halves["difference"] - (halves["shallow"] - halves["deep"])).abs().max() < 1e-5
    assert (halves["excess"] - (halves["difference"] - halves["twin"])).abs().max() < 1e-5
    part = tables["sizes"].set_index(["skipped", "name"])["jsd"]
    assert part["part", "transformer-4"] == pytest.approx(part["block", "transformer-4"], rel=1e-4), (
        "a quarter of 4 is one"
    )
    assert "| none |" in words.page(tables)
    assert zoo_plots.draw_profiles(tables).axes
    assert zoo_plots.draw_claims(tables).axes
    assert zoo_plots.draw_norms(tables).axes
