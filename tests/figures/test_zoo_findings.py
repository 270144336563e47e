"""The page of findings and the list in the README say what the committed tables and models say."""

import sys
from pathlib import Path

import pandas as pd
import pytest

from tracer.zoo.families import RUNS
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
    del sys.modules["zoo_page"]


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
