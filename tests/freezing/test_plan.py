"""Freeze plans: what the rules choose, what a plan makes of a model, and what is refused."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import VOCAB, tiny, with_tower, word_tokenizer

import tracer
from tracer.cli import main
from tracer.errors import InputError
from tracer.freezing.rules import block_list

PROBES = [
    tracer.Probe(f"w{i} w{(3 * i) % 90 + 3} w{(7 * i) % 90 + 3}", f" w{i % 9 + 3}", f"g{i % 2}", f"p{i}")
    for i in range(24)
]


@pytest.fixture(scope="module")
def model() -> tracer.TracedModel:
    return tracer.load(tiny("llama", num_hidden_layers=12), word_tokenizer())


@pytest.fixture(scope="module")
def result(model) -> tracer.TraceResult:
    return tracer.trace(model, PROBES, ablations=["zero", "mean"], progress=False)


def with_particle(result: tracer.TraceResult, answered: int = 24, **found: float | None) -> tracer.TraceResult:
    """The result as if the median particle were there."""
    run = json.loads(json.dumps(result.run))
    run["particle_block"] |= found
    for group in run["groups"]:
        group["why_not"] = None
    probes = result.probes.assign(answered=np.arange(24) < answered)
    return replace(result, run=run, probes=probes)


def test_positions_choose_blocks_whatever_the_trace_says(result):
    expected = {
        "shallow:4": (0, 1, 2, 3),
        "deep:3": (9, 10, 11),
        "middle:4": (4, 5, 6, 7),
        "full": tuple(range(12)),
        "0-1, 5,7-8": (0, 1, 5, 7, 8),
    }
    for rule, train in expected.items():
        plan = tracer.plan(result, rule)
        assert plan.train == train
        assert plan.freeze == tuple(block for block in range(12) if block not in train)
    first, again, other = (tracer.plan(result, f"random:5:{seed}").train for seed in (0, 0, 1))
    assert first == again != other
    assert len(first) == 5


@pytest.mark.parametrize("kind", ["zero", "mean"])
def test_fragility_ranks_the_blocks(result, kind):
    jsd = result.blocks[f"jsd_{kind}"].to_numpy()
    order = np.argsort(-jsd)
    plan = tracer.plan(result, "fragile:3", ablation=kind)
    assert set(plan.train) == set(order[:3])
    assert plan.evidence["jsd"][plan.train[0]][0] == jsd[plan.train[0]]
    assert set(tracer.plan(result, "robust:3", ablation=kind).freeze) == set(order[-3:])
    assert plan.to_frame()["jsd"].tolist() == jsd.tolist()


@pytest.mark.parametrize(("block", "train"), [(6.0, range(6)), (6.5, range(7)), (2.0, range(2))])
def test_the_particle_and_what_follows_are_frozen(result, block, train):
    plan = tracer.plan(with_particle(result, estimate=block, low=block - 1, high=block + 1))
    assert plan.train == tuple(train)
    assert f"block {block:g} by the logit lens" in plan.summary()
    assert plan.evidence["particle_block"]["low"] == block - 1
    assert plan.evidence["answered"] == 24


@pytest.mark.parametrize(
    ("found", "answered", "why"),
    [
        ({"estimate": None, "low": None, "high": None}, 24, "no group has a particle"),
        ({"estimate": 6.0, "low": 5.0, "high": 7.0}, 19, "rests on 19 answered probes in 2 groups, 20 needed"),
        ({"estimate": 6.0, "low": 2.0, "high": 7.0}, 24, "the interval 2 to 7, which may be at most a third of 12"),
        ({"estimate": 6.0, "low": None, "high": None}, 24, "has no interval"),
        ({"estimate": 11.0, "low": 11.0, "high": 11.0}, 24, "freezes 1 of 12 .* the plain logit lens is the likely"),
        ({"estimate": 1.0, "low": 1.0, "high": 1.0}, 24, "freezes 11 of 12 blocks"),
    ],
)  # fmt: skip
def test_a_particle_without_evidence_is_refused_with_the_evidence(result, found, answered, why):
    with pytest.raises(InputError, match=why):
        tracer.plan(with_particle(result, answered, **found))


def test_degenerate_plans_need_permission(result):
    for rule in ("shallow:11", "deep:1", "robust:12"):
        with pytest.raises(InputError, match="pass another rule, or allow_degenerate"):
            tracer.plan(result, rule)
        assert tracer.plan(result, rule, allow_degenerate=True).rule == rule
    with pytest.raises(InputError, match="trains nothing"):
        tracer.plan(result, "robust:12", embeddings="freeze", norm="freeze", head="freeze", allow_degenerate=True)


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ("deepest:3", "unknown rule 'deepest:3': pass particle, full"),
        ("fragile", "takes 1 numbers: pass fragile:K"),
        ("random:3", "pass random:K:SEED"),
        ("shallow:x", "'x' is not a whole number"),
        ("shallow:13", "13 of 12 blocks"),
        ("shallow:0", "pass a number from 1 to 12"),
        ("3-12", "'3-12' does not lie in 0-11"),
        ("5-3", "does not lie in"),
        ("1-2-3", "neither a block nor a span"),
        ("update-stable:2", "needs a trace with --ablations perturb"),
    ],
)
def test_rules_that_cannot_be_followed_are_refused(result, rule, why):
    with pytest.raises(InputError, match=why):
        tracer.plan(result, rule)


def test_an_ablation_that_was_not_run_is_refused(result):
    with pytest.raises(InputError, match="the trace has no ablation noise: pass one of zero, mean"):
        tracer.plan(result, "fragile:3", ablation="noise")
    with pytest.raises(InputError, match="unknown decision on the head 'thaw': pass one of train, freeze"):
        tracer.plan(result, "shallow:3", head="thaw")


def test_blocks_are_read_in_spans():
    assert block_list("0-3,7, 5", 8) == (0, 1, 2, 3, 5, 7)


OUTER = {"embeddings": "model.embed_tokens.", "norm": "model.norm.", "head": "lm_head."}


@pytest.mark.parametrize("frozen", [(), ("embeddings",), ("norm", "head"), ("embeddings", "norm", "head")])
def test_exactly_what_the_plan_says_is_trained(model, result, frozen):
    plan = tracer.plan(result, "1,10-11", **dict.fromkeys(frozen, "freeze"))
    live = tiny("llama", num_hidden_layers=12)
    for parameter in live.parameters():
        parameter.grad = torch.zeros_like(parameter)
    applied = plan.apply(live)
    starts = [f"model.layers.{block}." for block in (1, 10, 11)]
    starts += [start for name, start in OUTER.items() if name not in frozen]
    expected = {name for name, _ in live.named_parameters() if name.startswith(tuple(starts))}
    assert {name for name, parameter in live.named_parameters() if parameter.requires_grad} == expected
    assert set(applied.trained) == expected
    assert {name for name, parameter in live.named_parameters() if parameter.grad is None} == set(applied.frozen)
    assert applied.n_trained + applied.n_frozen == live.num_parameters()
    assert plan.parameters == {"trained": applied.n_trained, "total": live.num_parameters()}


def test_the_patterns_for_axolotl_match_what_is_trained(model, result):
    plan = tracer.plan(result, "1,3", embeddings="freeze")
    live = tiny("llama", num_hidden_layers=12)
    trained = set(plan.apply(live).trained)
    patterns = [re.compile(pattern) for pattern in plan.axolotl()]
    assert {name for name, _ in live.named_parameters() if any(p.match(name) for p in patterns)} == trained
    assert not any(pattern.match("model.layers.11.mlp.up_proj.weight") for pattern in patterns)


def test_peft_gets_the_trained_blocks(result):
    assert tracer.plan(result, "1,10-11").peft() == {"layers_to_transform": [1, 10, 11], "layers_pattern": "layers"}


def test_a_tied_head_gets_one_decision():
    traced = tracer.load(tiny("llama", tie_word_embeddings=True), word_tokenizer())
    result = tracer.trace(traced, PROBES, progress=False)
    with pytest.raises(InputError, match="embeddings='train' and head='freeze' contradict each other"):
        tracer.plan(result, "shallow:2", head="freeze")
    plan = tracer.plan(result, "shallow:2", embeddings="freeze", head="freeze")
    assert "the head is the embedding, one tensor" in plan.summary()
    live = tiny("llama", tie_word_embeddings=True)
    applied = plan.apply(live)
    assert applied.n_trained + applied.n_frozen == live.num_parameters()
    assert not live.get_output_embeddings().weight.requires_grad
    plan = tracer.plan(result, "shallow:2")
    assert plan.parameters["trained"] == plan.apply(live).n_trained
    assert "model.embed_tokens.weight" in plan.apply(live).trained


@pytest.mark.parametrize("family", ["gpt2", "mamba2", "falcon_h1", "qwen3_5", "nemotron_h"])
def test_a_plan_works_on_any_architecture(family):
    live = tiny(family)
    result = tracer.trace(tracer.load(live, word_tokenizer()), PROBES, progress=False)
    plan = tracer.plan(result, "1,3")
    applied = plan.apply(live)
    modules = [block["module"] for block in result.run["model"]["anatomy"]["blocks"]]
    for block, module in enumerate(modules):
        found = {p.requires_grad for name, p in live.named_parameters() if name.startswith(f"{module}.")}
        assert found == {block in (1, 3)}
    assert applied.n_trained == plan.parameters["trained"]


def test_what_text_does_not_run_through_is_frozen():
    live = with_tower("llava")
    result = tracer.trace(tracer.load(live, word_tokenizer()), PROBES, progress=False)
    tracer.plan(result, "full").apply(live)
    frozen = {name for name, parameter in live.named_parameters() if not parameter.requires_grad}
    assert frozen
    assert all("vision" in name or "multi_modal" in name for name in frozen)


def test_a_block_that_is_called_twice_gets_one_decision():
    live = tiny("llama")
    live.model.layers[2] = live.model.layers[1]
    result = tracer.trace(tracer.load(live, word_tokenizer()), PROBES, progress=False)
    with pytest.raises(InputError, match="belongs to parts of which one is trained and the other frozen"):
        tracer.plan(result, "0-1").apply(live)
    plan = tracer.plan(result, "1-2")
    assert plan.apply(live).n_trained == plan.parameters["trained"]


def test_a_plan_comes_back_from_its_file(result, tmp_path):
    plan = tracer.plan(result, "fragile:4", out=tmp_path / "plan.json")
    again = tracer.FreezePlan.load(tmp_path / "plan.json")
    assert again == plan
    assert again.summary() == plan.summary()
    with pytest.raises(InputError, match="exists: pass another file, or force"):
        plan.save(tmp_path / "plan.json")
    plan.save(tmp_path / "plan.json", force=True)
    for content in ("{", "[]", '{"schema": 1}', '{"schema": 9}'):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(InputError, match="is no freeze plan|has plan schema 9"):
            tracer.FreezePlan.load(tmp_path / "bad.json")
    with pytest.raises(InputError, match="cannot read the plan"):
        tracer.FreezePlan.load(tmp_path / "nowhere.json")


def test_a_plan_for_another_model_is_refused(result):
    plan = tracer.plan(result, "shallow:3")
    for other in (
        tiny("llama"),
        tiny("qwen3", num_hidden_layers=12),
        tiny("llama", num_hidden_layers=12, vocab_size=VOCAB + 8),
    ):
        with pytest.raises(InputError, match="trace this model and plan anew"):
            plan.apply(other)


def test_a_bridge_is_planned_for_the_model_under_it(tmp_path):
    tiny("llama").save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    bridge = tracer.load(str(tmp_path / "model"), backend="transformer_lens", progress=False)
    plan = tracer.plan(tracer.trace(bridge, PROBES, progress=False), "shallow:2")
    assert plan.apply(tiny("llama")).n_trained == plan.parameters["trained"]
    with pytest.raises(InputError, match="backend='hooks'"):
        plan.apply(bridge)


def test_the_command_prints_saves_draws_and_exports(result, tmp_path, capsys):
    result.save(tmp_path / "run")
    out, figure = tmp_path / "plan.json", tmp_path / "plan.png"
    arguments = ["plan", str(tmp_path / "run"), "--rule", "shallow:4"]

    def run(*more: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main([*arguments, *more])
        return stop.value.code or 0, *capsys.readouterr()

    status, printed, _ = run("--out", str(out), "--figure", str(figure))
    assert status == 0
    assert printed.strip() == tracer.FreezePlan.load(out).summary()
    assert tracer.FreezePlan.load(out).evidence["run"]["folder"] == str(tmp_path / "run")
    assert figure.stat().st_size > 0
    assert "layers_to_transform:" in run("--export", "peft")[1]
    assert run("--export", "axolotl")[1].startswith("unfrozen_parameters:")
    status, _, error = run("--out", str(out))
    assert (status, error.count("\n")) == (2, 1)
    other = tmp_path / "other.json"
    for more, why in (
        (("--figure", str(tmp_path / "plan.doc")), "pass a name that ends in .png, .svg, .pdf"),
        (("--figure", str(tmp_path / "none" / "plan.png")), "there is no folder"),
        (("--figure", str(figure)), "exists: pass another file"),
        (("--export", "peft", "--price"), "pass one of them at a time"),
    ):
        status, _, error = run("--out", str(other), *more)
        assert (status, error.count("\n")) == (2, 1)
        assert why in error
        assert not other.exists()
    assert run("--figure", str(figure), "--force")[0] == 0
