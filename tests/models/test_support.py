"""The table of what works: every row is measured, complete, and what the README says.

The sweep (`test_every_architecture.py`) compares each model with its row.
"""

import io
import json
import re
import tomllib

import pandas as pd
import pytest
import support_table
from every_model import ENTRIES, UNBUILDABLE, build
from support_table import FLOOR, ROOT, bridge_fault, is_current, listed, recorded, versions
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tracer.models.support import supported

TABLE = supported()
BRIDGED = TABLE.loc[TABLE["adapter"] == "hooks+transformer_lens", "model_type"].tolist()
FAULTY = TABLE.loc[(TABLE["adapter"] == "hooks") & (TABLE["transformer_lens"] == "listed"), "model_type"].tolist()


@pytest.fixture
def current() -> None:
    if not is_current():
        pytest.skip(
            f"the table was measured with transformers {TABLE['transformers'][0]}, not {versions()['transformers']}: "
            "no model is compared with its row, but every other check is made"
        )


@pytest.fixture
def same_transformer_lens(current: None) -> None:
    if set(TABLE["transformer_lens_version"]) != {versions()["transformer_lens_version"]}:
        pytest.skip(f"the table was measured with TransformerLens {TABLE['transformer_lens_version'][0]}")


@pytest.mark.usefixtures("current")
def test_table_has_one_row_for_every_entry():
    assert tuple(TABLE["model_type"]) == ENTRIES
    assert dict(zip(TABLE["model_type"], TABLE["class"], strict=True)) == dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert TABLE.loc[TABLE["outcome"] == "not buildable"].set_index("model_type")["why"].to_dict() == UNBUILDABLE


def test_table_was_measured_with_the_pinned_versions():
    pinned = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").split() if "==" in line
    )
    columns = {"transformers": "transformers", "torch": "torch", "transformer_lens_version": "transformer-lens"}
    for column, package in columns.items():
        assert set(TABLE[column]) == {pinned[package]}, f"make support, after {package} has changed"


def test_what_is_null_in_the_table():
    assert tuple(TABLE.columns) == support_table.COLUMNS
    assert TABLE["blocks"].dtype == "Int64"
    null = TABLE.set_index("outcome")[["blocks", "stream_shape", "engine", "adapter"]].isna()
    assert not null.loc["traced"].any(axis=None)
    assert null.drop("traced").all(axis=None)
    may_lack_a_reason = (TABLE["engine"] == "onepass") & ~TABLE["model_type"].isin(FAULTY)
    assert TABLE["why"].isna().equals(may_lack_a_reason)
    assert TABLE.drop(columns=["blocks", "stream_shape", "engine", "adapter", "why"]).notna().all(axis=None)


def test_reasons_are_the_same_on_every_machine():
    reasons = TABLE["why"].dropna()
    assert not reasons.str.contains(r"\d\.\d|\de[-+]\d|nan|\n").any()


def test_table_is_the_same_when_it_is_written_again():
    again = TABLE.to_csv(index=False, lineterminator="\n")
    assert again == support_table.TABLE.read_text(encoding="utf-8")
    assert pd.read_csv(io.StringIO(again))["blocks"].sum() == TABLE["blocks"].sum()


@pytest.mark.usefixtures("same_transformer_lens")
def test_what_transformer_lens_lists():
    assert TABLE["model_type"].map(listed).equals(TABLE["transformer_lens"])


@pytest.mark.usefixtures("same_transformer_lens")
@pytest.mark.parametrize("model_type", [*FAULTY, *BRIDGED[::12]])
def test_bridge_opens_where_the_table_says_so(model_type):
    fault = bridge_fault(build(model_type))
    assert (fault is None) == (model_type in BRIDGED)
    assert fault is None or fault in recorded()["why"][model_type]


@pytest.mark.usefixtures("current")
def test_readme_sums_up_the_table():
    floor = json.loads(FLOOR.read_text(encoding="utf-8"))
    assert support_table.readme_block() == support_table.summary(TABLE, floor), "make support"


@pytest.mark.usefixtures("current")
def test_declared_floor_is_the_one_that_was_tried():
    floor = json.loads(FLOOR.read_text(encoding="utf-8"))["transformers"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (declared,) = (
        item.removeprefix("transformers>=") for item in project["dependencies"] if item.startswith("transformers>=")
    )
    assert floor.removesuffix(".0") == declared.removesuffix(".0")
    assert re.search(rf"^FLOOR := {re.escape(floor)}$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
