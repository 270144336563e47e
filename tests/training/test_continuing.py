"""Continued pre-training end to end on tiny models: what moves, what stays, what is saved, and what goes on."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from small_training import model_folder, recipe, text_file
from tiny import tiny
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerControl, TrainerState, TrainingArguments

import tracer
from tracer.cli import main
from tracer.errors import InputError, TrainingStopped
from tracer.training.callbacks import Gradients
from tracer.training.trainer import PlannedTrainer


def weights(folder: Path | str) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def cpt(data: dict, **options) -> tracer.CptResult:
    return tracer.cpt(data, progress=False, **{"priced": False, **options})  # the price takes longer than the training


def equal(x: dict[str, torch.Tensor], y: dict[str, torch.Tensor]) -> bool:
    return x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mamba", "mamba2", "qwen3_next", "falcon_h1"])
def test_exactly_what_the_plan_trains_moves(tmp_path, family):
    base = model_folder(tmp_path / "base", family)
    result = cpt(recipe(tmp_path, base, plan={"rule": "1,3", "embeddings": "freeze", "head": "freeze"}), priced=True)
    unpriced = any(note.startswith("no price") for note in result.run["notes"])  # experts are chosen by values
    assert unpriced == (family == "qwen3_next")
    assert unpriced or 0 < result.run["price"]["time_ratio"] < 1
    before, after = weights(base), weights(tmp_path / "out")
    parts = tracer.load(base, progress=False, backend="hooks").parts
    trained = {*parts.blocks[1].sizes, *parts.blocks[3].sizes, *parts.norm.sizes}
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved <= trained
    unmoved = trained - moved
    assert not [name for name in unmoved if not name.endswith(("gate.weight", "bias"))], unmoved
    assert result.run["counts"]["trained"] == sum(tensor.numel() for name, tensor in before.items() if name in trained)
    assert result.run["measured"]["new"]["after"]["loss"] < result.run["measured"]["new"]["before"]["loss"]
    optimizer = torch.load(tmp_path / "out/checkpoint-6/optimizer.pt", weights_only=True)
    assert sum(state["exp_avg"].numel() for state in optimizer["state"].values()) == result.run["counts"]["trained"]


@pytest.mark.parametrize("tied", [True, False])
def test_the_output_is_a_model_folder_with_a_card(tmp_path, tied):
    base = model_folder(tmp_path / "base", tie_word_embeddings=tied)
    result = cpt(recipe(tmp_path, base))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()) is tied
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("w5 w7")["input_ids"] == [5, 7]
    assert model.config.use_cache is True
    card = (tmp_path / "out/README.md").read_text()
    for words in ("continued pre-training", "plan shallow:2: train 0-1, freeze 2-3", "learning_rate: 0.005", "new.txt"):
        assert words in card
    again = tracer.CptResult.load(tmp_path / "out")
    assert again.summary() == result.summary()
    assert again.to_frame().equals(result.to_frame().astype(again.to_frame().dtypes))
    assert not list((tmp_path / "out").glob("*.bin"))
    assert again.run["tokens"] == 6 * 4 * 16
    tracer.load(tmp_path / "out", progress=False)


@pytest.mark.parametrize("kind", ["whole", "mixture", "streamed", "none"])
def test_going_on_gives_the_same_bits(tmp_path, kind):
    base = model_folder(tmp_path / "base", attention_dropout=0.2)  # the state of the generator counts too
    data = recipe(tmp_path, base, lr_scheduler_type="linear", gradient_accumulation_steps=2)
    text = data["text"]["new"]
    if kind == "mixture":
        replay = {"path": str(text_file(tmp_path / "replay.txt", 30, seed=2)), "documents": "line", "weight": 0.5}
        data["text"] = {"new": text, "replay": replay}
    if kind == "streamed":
        data["text"] = {"new": {key: text[key] for key in ("path", "documents")} | {"streaming": True}}
    if kind == "none":
        data["packing"] = "none"
    cpt(data)
    whole = weights(tmp_path / "out")
    interrupted = tmp_path / "interrupted"
    interrupted.mkdir()
    for name in ("checkpoint-3", "begun.json", "plan.json", "recipe.yaml"):
        source = tmp_path / "out" / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, interrupted / name)
    result = cpt({**data, "output_dir": str(interrupted)}, resume=True)
    assert equal(whole, weights(interrupted))
    assert result.curve["step"].tolist() == tracer.CptResult.load(tmp_path / "out").curve["step"].tolist()


def test_a_training_goes_on_only_as_it_began(tmp_path):
    base = model_folder(tmp_path / "base")
    data = recipe(tmp_path, base)
    cpt(data)
    for change, why in (
        ({"plan": {"rule": "deep:2"}}, "was begun with another plan"),
        ({"learning_rate": 1e-3}, "was begun with learning_rate: 0.005, not 0.001"),
        ({"max_steps": 9}, "was begun with max_steps: 6, not 9"),
        ({"block_size": 8}, "was begun with block_size: 16, not 8"),
        ({"model": str(model_folder(tmp_path / "other", seed=1))}, "was begun with another model"),
    ):
        with pytest.raises(InputError, match=why):
            cpt(data | change, resume=True)
    words = Path(data["text"]["new"]["path"])
    before = words.read_text()
    words.write_text(before.replace("w", "w1", 1))
    with pytest.raises(InputError, match="was begun with other words in text new"):
        cpt(data, resume=True)
    words.write_text(before)
    with pytest.raises(InputError, match="holds a finished training: pass --resume, --force"):
        cpt(data)
    with pytest.raises(InputError, match="resume goes on and force begins anew: pass one of them"):
        cpt(data, resume=True, force=True)
    cpt(data | {"logging_steps": 2, "save_total_limit": 1}, resume=True)
    forced = cpt(data | {"plan": {"rule": "deep:2"}}, force=True)
    assert forced.run["plan"]["train"] == [2, 3]


def test_a_constant_rate_makes_the_short_training_the_beginning_of_the_long_one(tmp_path):
    base = model_folder(tmp_path / "base")
    data = recipe(tmp_path, base, lr_scheduler_type="constant", learning_rate=1e-3)
    cpt(data | {"output_dir": str(tmp_path / "long"), "max_steps": 9})
    cpt(data)
    cpt(data | {"max_steps": 9}, resume=True)
    assert equal(weights(tmp_path / "long"), weights(tmp_path / "out"))


def test_tracing_on_the_way_is_recorded_and_changes_nothing(tmp_path):
    base = model_folder(tmp_path / "base", attention_dropout=0.2)
    data = recipe(tmp_path, base)
    cpt(data)
    plain = weights(tmp_path / "out")
    probes = tmp_path / "probes.jsonl"
    rows = [{"prompt": f"w{i} w{i + 9}", "target": f" w{i + 3}", "group": f"g{i % 2}"} for i in range(3, 15)]
    probes.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = cpt(data | {"retrace": {"every": 4, "probes": str(probes)}}, force=True)
    assert equal(plain, weights(tmp_path / "out"))
    traced = result.run["retraces"]
    assert [row["step"] for row in traced] == [0, 4, 6]
    assert traced[0]["cosine"] == pytest.approx([1.0] * 5, abs=1e-6)
    assert traced[-1]["cosine"][-1] < 0.999
    saved = tracer.TraceResult.load(tmp_path / "out/traces/step-000006")
    assert traced[-1]["jsd"]["zero"] == pytest.approx(saved.blocks["jsd_zero"].tolist())
    now = tracer.trace(tracer.load(tmp_path / "out", progress=False), probes, progress=False)
    assert now.blocks["jsd_zero"].tolist() == pytest.approx(saved.blocks["jsd_zero"].tolist(), abs=1e-6)
    result.plot()
    assert "Traces on the way" in result.summary()


@pytest.mark.parametrize("plan", [{"rule": "2-3", "embeddings": "freeze", "head": "freeze"}, {"rule": "0,3"}])
def test_checkpointed_activations_give_the_same_weights(tmp_path, plan):
    base = model_folder(tmp_path / "base")
    found = []
    for name, more in (("plain", {}), ("checkpointed", {"gradient_checkpointing": True})):
        data = recipe(tmp_path, base, plan=plan, output_dir=str(tmp_path / name), **more)
        cpt(data)
        found.append(weights(tmp_path / name))
    for name, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][name], rtol=0, atol=1e-6)
    reentrant = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(InputError, match="use_reentrant leaves trained blocks without gradients"):
        cpt(recipe(tmp_path, base, **reentrant))


def test_no_rate_norm_or_bias_is_decayed():
    def decayed(family: str) -> set[str]:
        return set(PlannedTrainer.get_decay_parameter_names(PlannedTrainer.__new__(PlannedTrainer), tiny(family)))

    for family in ("mamba", "mamba2", "qwen3_next", "jamba", "falcon_h1", "llama", "gpt2"):
        names = decayed(family)
        for name, parameter in tiny(family).named_parameters():
            last = name.rpartition(".")[2]
            kept = last in ("A_log", "D", "dt_bias", "bias") or parameter.dim() < 2
            assert (name in names) is not kept, name
    assert tiny("mamba").backbone.layers[0].mixer.A_log.dim() == 2  # a matrix, so that its shape would not tell


def test_a_loss_that_is_no_number_stops_with_the_last_good_checkpoint(tmp_path):
    base = model_folder(tmp_path / "base")
    data = recipe(tmp_path, base, learning_rate=1e12, max_grad_norm=0.0, warmup_steps=4, save_steps=1, max_steps=30)
    with pytest.raises(TrainingStopped, match=r"(is nan|is inf|not finite|diverges).*; the last good checkpoint is .*"):
        cpt(data | {"max_loss_rise": 1e6})
    assert not (tmp_path / "out/config.json").exists()
    good = sorted((tmp_path / "out").glob("checkpoint-*"))
    assert good
    for tensor in weights(good[0]).values():
        assert tensor.isfinite().all()


def test_the_last_good_checkpoint_outlives_later_ones(tmp_path, monkeypatch):
    """The loss rises slowly: for many checkpoints it is neither near its best nor so far off that training stops."""
    step, losses = PlannedTrainer.training_step, [1.0, 0.5, 1.2, 1.2, 1.2, 1.2, 2.0]

    def rising(self, *args, **kwargs):
        step(self, *args, **kwargs)
        return torch.tensor(losses[self.state.global_step])

    monkeypatch.setattr(PlannedTrainer, "training_step", rising)
    data = recipe(tmp_path, model_folder(tmp_path / "base"), save_steps=1, max_steps=7, max_loss_rise=1.0)
    match = r"rose from 0\.500 to 2\.000 by step 7.*; the last good checkpoint is .*checkpoint-2'"
    with pytest.raises(TrainingStopped, match=match):
        cpt(data)
    assert {path.name for path in (tmp_path / "out").glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-6"}
    with pytest.raises(TrainingStopped, match=match):  # one that goes on knows what was good
        cpt(data, resume=True)
    shutil.rmtree(tmp_path / "out/checkpoint-6")  # the good one itself
    losses[2:] = [9.0] * 5
    with pytest.raises(TrainingStopped, match=r"rose from 0\.500 to 9\.000 by step 3.*checkpoint-2'"):
        cpt(data, resume=True)
    shutil.move(tmp_path / "out", tmp_path / "moved")
    with pytest.raises(TrainingStopped, match=r"the last good checkpoint is .*moved/checkpoint-2'"):
        cpt({**data, "output_dir": str(tmp_path / "moved")}, resume=True)


def test_the_last_checkpoint_is_kept_whatever_its_loss(tmp_path, monkeypatch):
    step, losses = PlannedTrainer.training_step, [0.5, 1.2, 1.2, 1.2, 1.2, 1.2]

    def rising(self, *args, **kwargs):
        step(self, *args, **kwargs)
        return torch.tensor(losses[self.state.global_step])

    monkeypatch.setattr(PlannedTrainer, "training_step", rising)
    data = recipe(tmp_path, model_folder(tmp_path / "base"), save_steps=1, save_total_limit=1, max_loss_rise=1.0)
    cpt(data)
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-6"]


def test_what_is_logged_holds_the_measures(tmp_path):
    """As those see it who report it elsewhere, whatever the order of callbacks."""
    cpt(recipe(tmp_path, model_folder(tmp_path / "base")))
    history = json.loads((tmp_path / "out/checkpoint-6/trainer_state.json").read_text())["log_history"]
    losses = [entry["eval_old_loss"] for entry in history if "eval_old_loss" in entry]
    perplexities = [entry["eval_old_perplexity"] for entry in history if "eval_old_perplexity" in entry]
    assert len(losses) == 3
    assert perplexities == pytest.approx([math.exp(loss) for loss in losses])
    assert not any("nll" in key for entry in history for key in entry)
    assert all(entry["seconds"] > 0 for entry in history)


def test_a_diverging_loss_stops(tmp_path):
    base = model_folder(tmp_path / "base")
    with pytest.raises(
        TrainingStopped, match=r"diverges: its loss rose from .* more than max_loss_rise 0\.5; no check"
    ):
        cpt(recipe(tmp_path, base, learning_rate=3.0, max_steps=20, save_steps=100, max_loss_rise=0.5))
    assert not (tmp_path / "out/model.safetensors").exists()


def test_parameters_without_a_gradient_are_named(tmp_path):
    model = tiny("llama")
    model.model.layers[0].stray = torch.nn.Linear(3, 3)
    watch = Gradients(fp16=False)
    state = (TrainingArguments(output_dir=str(tmp_path), use_cpu=True), TrainerState(), TrainerControl())
    out = model(input_ids=torch.zeros(1, 4, dtype=torch.long), labels=torch.zeros(1, 4, dtype=torch.long))
    out.loss.backward()
    with pytest.raises(TrainingStopped, match=r"2 trained parameters got no gradient .*layers\.0\.stray"):
        watch.on_pre_optimizer_step(*state, model=model)
    model.model.layers[0].stray.requires_grad_(False)
    model.model.layers[1].requires_grad_(False)
    with pytest.raises(TrainingStopped, match="frozen parameters got a gradient"):
        watch.on_pre_optimizer_step(*state, model=model)


def test_a_frozen_tensor_that_moves_fails_the_training(tmp_path, monkeypatch):
    base = model_folder(tmp_path / "base")
    step = PlannedTrainer.training_step

    def meddling(self, model, *args, **kwargs):
        with torch.no_grad():
            model.model.layers[3].mlp.up_proj.weight[0, 0] += 1e-3
        return step(self, model, *args, **kwargs)

    monkeypatch.setattr(PlannedTrainer, "training_step", meddling)
    with pytest.raises(TrainingStopped, match=r"1 frozen tensors have changed .*layers\.3\.mlp\.up_proj"):
        cpt(recipe(tmp_path, base))
    assert not (tmp_path / "out/config.json").exists()


def test_frozen_buffers_count_as_frozen(tmp_path):
    """A running statistic in a frozen block moves without any gradient."""
    from tracer.training.frozen import check_unchanged, frozen_digests

    model = tiny("llama")
    model.model.layers[2].register_buffer("seen", torch.zeros(3))
    trained = {name for name, _ in model.named_parameters() if ".layers.0." in name}
    before = frozen_digests(model, trained)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.add_(1)
    check_unchanged(before, model)
    model.model.layers[2].seen += 1
    with pytest.raises(TrainingStopped, match="seen"):
        check_unchanged(before, model)


def test_a_plan_is_for_one_model(tmp_path):
    base, other = model_folder(tmp_path / "base"), model_folder(tmp_path / "other", seed=3)
    opened = tracer.load(base, backend="hooks", progress=False)
    tracer.plan(opened, "shallow:2", out=tmp_path / "plan.json")
    data = recipe(tmp_path, base, plan=str(tmp_path / "plan.json"))
    result = cpt(data)
    assert result.run["plan"]["train"] == [0, 1]
    with pytest.raises(InputError, match="made for other weights than those of"):
        cpt(data | {"model": str(other), "output_dir": str(tmp_path / "out2")})
    wide = model_folder(tmp_path / "wide", intermediate_size=40)
    with pytest.raises(InputError, match="whose blocks differ"):
        cpt(data | {"model": str(wide), "output_dir": str(tmp_path / "out2")})
    half = tracer.plan(tracer.load(base, backend="hooks", dtype="bfloat16", progress=False), "shallow:2")
    half.save(tmp_path / "half.json")
    cpt(data | {"plan": str(tmp_path / "half.json"), "output_dir": str(tmp_path / "out3")})
    assert not (tmp_path / "out2").exists()


def test_bfloat16_and_mixed_precision_train(tmp_path):
    base = model_folder(tmp_path / "base")
    for number, more in enumerate(({"dtype": "bfloat16"}, {"bf16": True})):
        data = recipe(tmp_path, base, output_dir=str(tmp_path / f"out{number}"), **more)
        result = cpt(data)
        assert result.run["measured"]["new"]["after"]["loss"] < result.run["measured"]["new"]["before"]["loss"]
    dtypes = [{t.dtype for t in weights(tmp_path / f"out{n}").values()} for n in range(2)]
    assert dtypes == [{torch.bfloat16}, {torch.float32}]


def test_a_dry_run_says_what_a_training_would_do(tmp_path, capsys):
    data = recipe(tmp_path, model_folder(tmp_path / "base"), packing="isolated")
    data["text"]["replay"] = {"path": str(text_file(tmp_path / "replay.txt", 30, seed=2)), "weight": 0.25}
    data["evaluate"]["new again"] = {"path": data["text"]["new"]["path"], "documents": "line", "limit": 40}
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(data))
    with pytest.raises(SystemExit) as stopped:
        main(["cpt", str(file), "--dry-run", "-q"])
    assert not stopped.value.code
    said = capsys.readouterr().out
    assert re.search(r"text replay: 1 documents, .* 20% of the windows drawn, about \d+\.\d times in an epoch", said)
    assert re.search(r"! \d+ of the \d+ different documents of new again are trained on in new", said)
    assert "documents of old are trained" not in said
    assert not (tmp_path / "out").exists()
    result = cpt(data)
    assert any("different documents of new again are trained on in new" in note for note in result.run["notes"])
    with pytest.raises(SystemExit) as stopped:
        main(["cpt", str(file), "--dry-run", "-q", "--resume"])
    assert not stopped.value.code
    assert "it would go on from" in capsys.readouterr().out
