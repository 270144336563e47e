"""Two processes on the CPU train what one process trains."""

import os
import subprocess
import sys
from pathlib import Path

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


def launched(data: dict, path: Path, processes: int) -> tracer.CptResult:
    file = path / "recipe.yaml"
    file.write_text(yaml.safe_dump(data))
    command = [sys.executable, "-m"]
    if processes > 1:
        command += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    command += ["tracer", "cpt", str(file), "--quiet", "--no-figures"]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Continued pre-training of") == 1
    return tracer.CptResult.load(data["output_dir"])


@pytest.mark.parametrize("family", ["llama", "mamba2"])
def test_ddp_follows_the_curve_of_one_process(tmp_path, family):
    base = model_folder(tmp_path / "base", family)
    plan = {"rule": "1-2", "embeddings": "freeze", "head": "freeze"}
    data = recipe(tmp_path, base, plan=plan, activation_checkpointing=family == "llama")
    del data["use_cpu"]
    alone = launched(data, tmp_path, 1)
    before = AutoModelForCausalLM.from_pretrained(base).state_dict()
    for name, more in (("ddp", {}), ("plain", {"activation_checkpointing": False})):
        out = str(tmp_path / name)
        both = launched({**data, **more, "output_dir": out, "per_device_train_batch_size": 2}, tmp_path, 2)
        assert both.run["processes"] == 2
        for column in ("loss", "new_loss", "old_loss"):
            assert both.curve["step"].tolist() == alone.curve["step"].tolist()
            np.testing.assert_allclose(both.curve[column], alone.curve[column], rtol=0, atol=1e-4)
        assert both.run["tokens"] == alone.run["tokens"]
        after = AutoModelForCausalLM.from_pretrained(out).state_dict()
        trained = {name for name in before if ".layers.1." in name or ".layers.2." in name or "norm_f" in name}
        trained |= {name for name in before if name == "model.norm.weight"}
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        assert moved == trained
        assert (tmp_path / name / "checkpoint-6/model.safetensors").is_file()


def test_what_a_frozen_plan_needs_is_set(tmp_path, monkeypatch):
    base = model_folder(tmp_path / "base", "mamba2")
    plain = prepare(read_recipe(recipe(tmp_path, base)), progress=False).arguments
    assert plain.ddp_find_unused_parameters is False
    with pytest.raises(InputError, match="on CPUs accelerate would run DDP instead"):
        prepare(read_recipe(recipe(tmp_path, base, fsdp=True)), progress=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    sharded = prepare(read_recipe(recipe(tmp_path, base, fsdp=True)), progress=False).arguments
    assert sharded.fsdp_config["version"] == 2
    assert sharded.fsdp_config["transformer_layer_cls_to_wrap"] == ["Mamba2Block"]
    with pytest.raises(InputError, match="ddp_find_unused_parameters is always False here"):
        read_recipe(recipe(tmp_path, base, ddp_find_unused_parameters=True))
    with pytest.raises(InputError, match="retrace needs whole blocks"):
        prepare(read_recipe(recipe(tmp_path, base, fsdp=True, retrace={"every": 2})), progress=False)


def test_a_training_of_two_processes_goes_on(tmp_path):
    base = model_folder(tmp_path / "base")
    data = recipe(tmp_path, base, per_device_train_batch_size=2, lr_scheduler_type="constant")
    del data["use_cpu"]
    data["learning_rate"] = 1e-3
    whole = launched({**data, "output_dir": str(tmp_path / "whole")}, tmp_path, 2)
    launched({**data, "max_steps": 3}, tmp_path, 2)
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(data))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command += ["tracer", "cpt", str(file), "--quiet", "--no-figures", "--resume"]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    again = tracer.CptResult.load(data["output_dir"])
    np.testing.assert_allclose(again.curve["loss"], whole.curve["loss"], rtol=0, atol=1e-5)


def test_bad_input_ends_every_process_with_one_line(tmp_path):
    base = model_folder(tmp_path / "base")
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe(tmp_path, base, block_size=100_000)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    done = subprocess.run(
        [*command, "tracer", "cpt", str(file), "--quiet"], env=os.environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode != 0
    assert "tracer: block_size 100000 is more than the" in done.stderr
    assert not (tmp_path / "out").exists()
