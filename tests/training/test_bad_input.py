"""What cannot be used: one line, exit status 2, and nothing half-written."""

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from small_training import model_folder, recipe
from transformers import AutoModelForCausalLM

import tracer
from tracer.cli import main
from tracer.training.checkpoints import checkpoint_fault


def refused(capsys: pytest.CaptureFixture[str], data: dict, path: Path, *options: str) -> str:
    """The line that `tracer cpt` ends with."""
    file = path / "recipe.yaml"
    file.write_text(yaml.safe_dump(data))
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(["cpt", str(file), "--quiet", *options])
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "base", tie_word_embeddings=True)


def test_every_bad_recipe_is_one_line_and_writes_nothing(capsys, tmp_path, base):
    good = recipe(tmp_path, base)
    empty, latin = tmp_path / "empty.txt", tmp_path / "latin.txt"
    empty.write_text("")
    latin.write_bytes("Köln liegt am Rhein\n".encode("latin-1"))
    for change, why in (
        ({"text": {"new": {"path": str(tmp_path / "none.txt")}}}, "no text"),
        ({"text": {"new": {"path": str(empty)}}}, "is empty"),
        ({"text": {"new": {"path": str(latin)}}}, "is not UTF-8"),
        ({"block_size": 100_000}, "block_size 100000 is more than the"),
        ({"learning_rat": 1.0}, "unknown key 'learning_rat'; did you mean learning_rate?"),
        ({"learning_rate": "fast"}, "learning_rate is 'fast': pass a number"),
        ({"max_steps": 1.5}, "max_steps is 1.5: pass a whole number"),
        ({"plan": {"rule": "shallow:9"}}, "9 of 4 blocks"),
        ({"plan": {"rule": "particle"}}, "rule 'particle' needs a trace of the model"),
        ({"plan": {"rule": "full", "heads": "train"}}, "heads"),
        ({"plan": str(tmp_path / "none.json")}, "cannot read the plan"),
        ({"plan": {"rule": "full", "embeddings": "freeze"}}, "contradict each other"),
        ({"model": str(tmp_path / "none")}, "no such folder"),
        ({"packing": "tight"}, "unknown packing 'tight': pass one of packed, isolated, none"),
        ({"dtype": "float64"}, "unknown dtype 'float64'"),
        ({"optim": "sgdd"}, "the Trainer refuses the recipe"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "lr_scheduler_type reduce_lr_on_plateau: it follows one"),
        ({"save_strategy": "best"}, "save_strategy best"),
        ({"fsdp": True}, "fsdp shards over processes, and this is one"),
        ({"text": {"new": {**good["text"]["new"], "held_out": 0.999}}}, "cannot be split"),
        ({"output_dir": str(empty)}, "is a file"),
        ({"retrace": {"every": 2}}, "none of the 432 probes of 'english' can be used"),
        ({"retrace": {"every": 2, "ablations": "swap_weights"}}, "compare the two models with tracer drift"),
    ):
        for options in ((), ("--dry-run",)):
            line = refused(capsys, good | change, tmp_path, *options)
            assert line.startswith("tracer: "), line
            assert why in line, line
    assert not (tmp_path / "out").exists()
    frozen = {"rule": "robust:4", "embeddings": "freeze", "norm": "freeze", "head": "freeze", "allow_degenerate": True}
    run = tmp_path / "run"
    tracer.trace(
        base, [tracer.Probe(f"w{i}", f" w{i + 1}", "g", f"p{i}") for i in range(5, 9)], out=run, progress=False
    )
    assert "trains nothing" in refused(capsys, good | {"plan": {"run": str(run), **frozen}}, tmp_path)


def test_a_model_without_a_tokenizer_is_refused(capsys, tmp_path, base):
    bare = tmp_path / "bare"
    shutil.copytree(base, bare)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).unlink()
    assert "has no tokenizer" in refused(capsys, recipe(tmp_path, bare), tmp_path)


def test_isolated_documents_are_refused_where_they_leak(capsys, tmp_path):
    mamba = model_folder(tmp_path / "mamba", "mamba2")
    line = refused(capsys, recipe(tmp_path, mamba, packing="isolated"), tmp_path)
    assert "packing 'isolated' is not possible" in line
    assert "pass packing: packed, or none" in line
    result = tracer.cpt(recipe(tmp_path, model_folder(tmp_path / "llama"), packing="isolated"), progress=False)
    assert result.run["steps"] == 6


def test_a_folder_of_others_is_left_alone(capsys, tmp_path, base):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    for option in ((), ("--force",), ("--resume",), ("--dry-run",)):
        assert "holds other files (thesis.tex)" in refused(capsys, recipe(tmp_path, base), tmp_path, *option)
    assert (out / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "trainer_state.json"])
def test_a_checkpoint_that_is_cut_off_is_named_with_the_one_before(capsys, tmp_path, base, name):
    data = recipe(tmp_path, base)
    tracer.cpt(data, progress=False)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    file = tmp_path / "out/checkpoint-6" / name
    file.write_bytes(file.read_bytes()[:-100])
    line = refused(capsys, data, tmp_path, "--resume")
    assert "checkpoint-6' is cut off or damaged" in line
    assert "delete it to go on from checkpoint-3" in line
    shutil.rmtree(tmp_path / "out/checkpoint-6")
    tracer.cpt(data, resume=True, progress=False)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert "is cut off" not in (checkpoint_fault(tmp_path / "out/checkpoint-6") or "")


@pytest.mark.parametrize("largest", [100_000, 700_000])
def test_a_full_disk_ends_in_one_line_without_a_half_model(tmp_path, base, largest):
    """The weights have about 550 kB and the optimizer's state 700 kB, so that one limit stops either of them."""
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe(tmp_path, base, plan={"rule": "full"})))

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))

    done = subprocess.run(
        [sys.executable, "-m", "tracer", "cpt", str(file), "--quiet"],
        env=os.environ | {"HF_DATASETS_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        preexec_fn=limit,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "cannot be written" in done.stderr
    assert not (tmp_path / "out/config.json").exists()
    assert not [p for p in (tmp_path / "out").glob("checkpoint-*") if checkpoint_fault(p) is not None]
