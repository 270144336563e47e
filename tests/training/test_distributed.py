"""Two processes on the CPU train what one process trains, whether each holds all weights or a part of them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from small_training import model_folder, recipe
from transformers import AutoModelForCausalLM

import tracer
from tracer.errors import InputError
from tracer.training.preparing import prepare
from tracer.training.recipe import read_recipe

# The last one has one tensor for embeddings and head.
FAMILIES = ("llama", "mamba2", "gemma2")
MODES = ("ddp", "fsdp")
TRAININGS = """
import json, sys, tracer
for data, resume in json.load(open(sys.argv[1])):
    tracer.cpt(data, resume=resume, progress=False, priced=False)
"""


def launch(*command: str) -> subprocess.CompletedProcess:
    """Run something in two processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run([*launcher, *command], env=os.environ, capture_output=True, text=True, timeout=500)


def shared(data: dict[str, Any], mode: str, out: Path, **changes: Any) -> dict[str, Any]:
    """A recipe for two processes that see in all what one process would see."""
    batch = data["per_device_train_batch_size"] // 2
    more = {"fsdp": True} if mode == "fsdp" else {}
    found = {**data, **more, "output_dir": str(out), "per_device_train_batch_size": batch, **changes}
    del found["use_cpu"]
    return found


def streamed(data: dict[str, Any], packing: str) -> dict[str, Any]:
    text = {"new": {"path": data["text"]["new"]["path"], "documents": "line", "streaming": True}}
    return {**data, "text": text, "packing": packing}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder of trainings of two processes, all from one start of them."""
    place = tmp_path_factory.mktemp("distributed")
    trainings: list[tuple[dict[str, Any], bool]] = []
    for family in FAMILIES:
        base = model_folder(place / family, family)
        # In the first one the activations of a block are computed again on the way back.
        plan = {"rule": "1-2", "embeddings": "freeze", "head": "freeze"}
        data = recipe(place, base, plan=plan, activation_checkpointing=family == "llama")
        (place / f"{family}.json").write_text(json.dumps(data))
        trainings += [(shared(data, mode, place / f"{family}-{mode}"), False) for mode in MODES]
    data = recipe(place, place / "llama", lr_scheduler_type="constant", learning_rate=1e-3)
    for mode in MODES:
        whole, parts = (shared(data, mode, place / f"{name}-{mode}") for name in ("whole", "parts"))
        trainings += [(whole, False), ({**parts, "max_steps": 3}, False), (parts, True)]
    for packing in ("packed", "none"):
        # Windows of 7 tokens: with packing none some are full and others are not.
        data = recipe(place, place / "llama", lr_scheduler_type="constant", learning_rate=1e-3, block_size=7)
        (place / f"{packing}.json").write_text(json.dumps(streamed(data, packing)))
        trainings.append((shared(streamed(data, packing), "ddp", place / packing), False))
    (place / "trainings.json").write_text(json.dumps(trainings))
    (place / "trainings.py").write_text(TRAININGS)
    done = launch(str(place / "trainings.py"), str(place / "trainings.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    return place


def alone(place: Path, name: str, out: Path) -> tracer.CptResult:
    """The same training by one process."""
    data = json.loads((place / f"{name}.json").read_text())
    return tracer.cpt({**data, "output_dir": str(out)}, progress=False, priced=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_follow_the_curve_of_one(place, tmp_path, family):
    one = alone(place, family, tmp_path / "one")
    folders = (place / family, tmp_path / "one", *(place / f"{family}-{mode}" for mode in MODES))
    before, other, *afters = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in folders)
    norm = "backbone.norm_f.weight" if family == "mamba2" else "model.norm.weight"
    trained = {name for name in before if ".layers.1." in name or ".layers.2." in name} | {norm}
    for mode, after in zip(MODES, afters, strict=True):
        both = tracer.CptResult.load(place / f"{family}-{mode}")
        assert both.run["processes"] == 2
        assert both.curve["step"].tolist() == one.curve["step"].tolist()
        for column in ("loss", "grad_norm", "new_loss", "old_loss"):
            np.testing.assert_allclose(both.curve[column], one.curve[column], rtol=0, atol=1e-4)
        assert both.run["tokens"] == one.run["tokens"]
        assert both.run["counts"] == one.run["counts"]
        assert both.run["notes"] == one.run["notes"]
        assert {name for name in before if not torch.equal(before[name], after[name])} == trained
        for name in trained:
            torch.testing.assert_close(after[name], other[name], rtol=0, atol=2e-3)  # AdamW magnifies tiny gradients
        # Sharding leaves its own file of the optimizer, so that it cannot have been DDP.
        kept = place / f"{family}-{mode}" / "checkpoint-6"
        assert (kept / ("optimizer.bin" if mode == "fsdp" else "optimizer.pt")).is_file()


@pytest.mark.parametrize("mode", MODES)
def test_a_training_of_two_processes_goes_on(place, mode):
    whole, parts = (tracer.CptResult.load(place / f"{name}-{mode}") for name in ("whole", "parts"))
    np.testing.assert_allclose(parts.curve["loss"], whole.curve["loss"], rtol=0, atol=1e-5)
    assert parts.curve["step"].tolist() == whole.curve["step"].tolist()
    assert (parts.curve["seconds"].diff().dropna() > 0).all()


@pytest.mark.parametrize("packing", ["packed", "none"])
def test_a_streamed_text_is_shared_between_processes(place, tmp_path, packing):
    one, both = alone(place, packing, tmp_path / "one"), tracer.CptResult.load(place / packing)
    np.testing.assert_allclose(both.curve["loss"], one.curve["loss"], rtol=0, atol=1e-4)
    assert both.run["tokens"] == one.run["tokens"]


def test_one_process_does_not_go_on_with_the_training_of_two(place):
    data = json.loads((place / "trainings.json").read_text())[-1][0]
    with pytest.raises(InputError, match="was begun with number of processes: 2, not 1"):
        tracer.cpt(data, resume=True, progress=False, priced=False)


def test_what_a_frozen_plan_needs_is_set(tmp_path, monkeypatch):
    base = model_folder(tmp_path / "base", "mamba2")
    plain = prepare(read_recipe(recipe(tmp_path, base)), progress=False).arguments
    assert plain.ddp_find_unused_parameters is False
    with pytest.raises(InputError, match="fsdp shards over processes, and this is one"):
        prepare(read_recipe(recipe(tmp_path, base, fsdp=True)), progress=False)
    monkeypatch.setattr("tracer.training.preparing.PartialState", lambda: SimpleNamespace(num_processes=2))
    sharded = prepare(read_recipe(recipe(tmp_path, base, fsdp=True)), progress=False).arguments
    assert sharded.fsdp_config["version"] == 2
    assert sharded.fsdp_config["transformer_layer_cls_to_wrap"] == ["Mamba2Block"]
    with pytest.raises(InputError, match="ddp_find_unused_parameters is always False here"):
        read_recipe(recipe(tmp_path, base, ddp_find_unused_parameters=True))
    with pytest.raises(InputError, match="retrace needs whole blocks"):
        prepare(read_recipe(recipe(tmp_path, base, fsdp=True, retrace={"every": 2})), progress=False)
    asked = {"every": 2, "suites": {"facts": {"suite": "zoo/held"}}}
    with pytest.raises(InputError, match="ask needs whole blocks"):
        prepare(read_recipe(recipe(tmp_path, base, fsdp=True, ask=asked)), progress=False)


def test_the_command_speaks_with_one_voice(tmp_path):
    file = tmp_path / "recipe.yaml"
    data = recipe(tmp_path, model_folder(tmp_path / "base"), per_device_train_batch_size=2)
    file.write_text(yaml.safe_dump(data))
    done = launch("-m", "tracer", "cpt", str(file), "--quiet", "--no-figures")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Continued pre-training of") == 1
    file.write_text(yaml.safe_dump(data | {"block_size": 100_000, "output_dir": str(tmp_path / "other")}))
    done = launch("-m", "tracer", "cpt", str(file), "--quiet")
    assert done.returncode != 0
    assert "tracer: block_size 100000 is more than the" in done.stderr
    assert not (tmp_path / "other").exists()
