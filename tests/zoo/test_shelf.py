"""The models of the zoo as they are shipped: whole, known, and answering what their cards say."""

import shutil
import socket
from pathlib import Path

import numpy as np
import pytest

import tracer
from tracer.cli import main
from tracer.errors import InputError
from tracer.models.transformer_lens import why_no_bridge
from tracer.zoo import shelf
from tracer.zoo.families import RUNS
from tracer.zoo.shelf import SUITES, read_card, zoo_folder, zoo_names

NAMES = [f"zoo/{run.name}" for run in RUNS.values() if run.shipped]
FAMILIES = [f"zoo/{run.name}" for run in RUNS.values() if run.shipped and run.blocks == 8]
EXACT = {"rtol": 0, "atol": 1e-4}


def test_every_shipped_run_is_on_the_shelf():
    assert list(zoo_names()) == NAMES
    assert sum(file.stat().st_size for file in shelf.SHELF.rglob("*") if file.is_file()) <= 40e6


@pytest.mark.parametrize("name", NAMES)
def test_a_model_opens_in_float32_with_what_is_known_about_it(name):
    model, card = tracer.load(name, progress=False), read_card(name).facts
    assert (model.opened.kind, model.opened.dtype, model.backend) == ("zoo", "float32", "hooks")
    assert model.opened.revision.startswith("sha256:")
    assert model.n_blocks == card["blocks"]
    assert model.model.num_parameters() == card["parameters"]
    assert model.anatomy.model_class == card["class"]


@pytest.mark.parametrize("name", NAMES)
def test_a_model_answers_as_its_card_says(name):
    result = tracer.evaluate(name, "zoo/held", progress=False)
    found = result.groups[result.groups["group"] != "all"].set_index("group")["answered"].to_dict()
    assert found == {group: counts["answered"] for group, counts in read_card(name).facts["accuracy"]["held"].items()}
    assert "as on its card" in result.summary()
    assert read_card(name).share("held") >= (0.95 if name.startswith("zoo/transformer") else 0.85)


def test_the_default_suites_of_a_zoo_model_are_those_about_its_world():
    result = tracer.evaluate("zoo/transformer-4", progress=False)
    assert result.suites == SUITES
    assert result.summary().count("as on its card") == 3


@pytest.mark.parametrize("name", FAMILIES)
def test_one_pass_equals_whole_forwards(name):
    model = tracer.load(name, progress=False)
    assert model.engine == "onepass"
    found = [
        tracer.trace(model, limit=1, ablations=["zero", "mean"], engine=engine, progress=False)
        for engine in ("onepass", "full")
    ]
    assert found[0].run["arguments"]["probes"] == "zoo/held"
    for key in ("log_p", "jsd_zero", "jsd_mean"):
        np.testing.assert_allclose(found[0].arrays[key], found[1].arrays[key], **EXACT)
    assert found[0].arrays["jsd_zero"].max() > 0.1


@pytest.mark.parametrize("name", FAMILIES)
def test_both_adapters_agree_where_transformer_lens_lists_the_class(name):
    plain = tracer.load(name, progress=False)
    if why_no_bridge(plain.model) is not None:
        pytest.skip(f"TransformerLens does not list {plain.anatomy.model_class}")
    bridge = tracer.load(name, backend="transformer_lens", progress=False)
    found = [tracer.trace(model, limit=1, progress=False) for model in (plain, bridge)]
    for key in ("log_p", "jsd_zero"):
        np.testing.assert_allclose(found[0].arrays[key], found[1].arrays[key], **EXACT)


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(shelf.SHELF, tmp_path / "models")
    monkeypatch.setattr(shelf, "SHELF", tmp_path / "models")
    return tmp_path / "models"


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json", "card.json"])
def test_a_file_with_one_flipped_bit_is_refused(copied, file):
    path = copied / "mamba2-8" / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match=rf"zoo/mamba2-8 cannot be opened: its file {file} has changed"):
        tracer.load("zoo/mamba2-8", progress=False)
    assert tracer.load("zoo/transformer-4", progress=False).n_blocks == 4, "the others are as they were"


def test_a_missing_file_is_refused(copied, capsys):
    (copied / "mamba2-8" / "model.safetensors").unlink()
    with pytest.raises(SystemExit) as stop:
        main(["trace", "zoo/mamba2-8", "--out", str(copied.parent / "run"), "-q"])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert "tracer: zoo/mamba2-8 cannot be opened: its file model.safetensors is missing" in error
    assert not (copied.parent / "run").exists()


def test_a_file_that_is_not_listed_is_refused(copied):
    (copied / "mamba2-8" / "more.txt").write_text("")
    with pytest.raises(InputError, match="its file more.txt is not in SHA256SUMS"):
        zoo_folder("zoo/mamba2-8")


@pytest.mark.parametrize("change", [lambda text: text.replace("mamba2-8/model", "mamba2-8/other"), lambda _: "short\n"])
def test_a_damaged_list_is_refused(copied, change):
    sums = copied / "SHA256SUMS"
    sums.write_text(change(sums.read_text()))
    with pytest.raises(InputError, match="is missing|is not in SHA256SUMS|SHA256SUMS cannot be read"):
        zoo_folder("zoo/mamba2-8")


def test_a_model_opens_without_a_network(monkeypatch):
    def refused(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)
    assert tracer.load("zoo/gdn-attention-8", progress=False).n_blocks == 8


def test_an_unknown_name_is_refused_with_the_close_ones():
    with pytest.raises(InputError, match="no model 'zoo/mamba-2' in the zoo; did you mean zoo/mamba2-8"):
        zoo_folder("zoo/mamba-2")
    with pytest.raises(InputError, match="pass one of zoo/transformer-8"):
        tracer.load("zoo/x", progress=False)
    with pytest.raises(InputError, match="revision='main' means a commit"):
        tracer.load("zoo/mamba2-8", revision="main", progress=False)


def test_a_folder_called_zoo_is_reached_by_its_path(tmp_path, monkeypatch):
    shutil.copytree(zoo_folder("zoo/transformer-4"), tmp_path / "zoo" / "transformer-4")
    monkeypatch.chdir(tmp_path)
    opened = tracer.load("./zoo/transformer-4", backend="hooks", progress=False).opened
    assert (opened.kind, opened.dtype) == ("folder", "float16")


def test_the_list_and_a_card_are_printed(capsys):
    for arguments in (["zoo"], ["zoo", "zoo/mamba2-8"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert not stop.value.code
    printed = capsys.readouterr().out
    assert all(name in printed for name in NAMES)
    assert (zoo_folder("zoo/mamba2-8") / "README.md").read_text() in printed
