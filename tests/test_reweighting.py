"""Blocks run with other weights: exactly those, and afterwards exactly their own."""

import copy

import numpy as np
import oracle
import pytest
import torch
from tiny import tiny, word_tokenizer

import tracer
from tracer.ablations import Variant
from tracer.errors import InputError
from tracer.reweighting import perturbation, reweighted

FAMILIES = ("llama", "gpt2", "mamba2", "qwen3_next", "gemma2")
PROBES = [
    tracer.Probe(
        " ".join(f"w{(7 * i + j) % 100 + 3}" for j in range(2 + i % 3)), f" w{i % 9 + 3}", f"g{i % 2}", f"p{i}"
    )
    for i in range(8)
]


def blocks(model: tracer.TracedModel) -> list[torch.nn.Module]:
    return [model.adapter.modules[call.module] for call in model.anatomy.calls]


@pytest.mark.parametrize("engine", ["onepass", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_perturb_equals_a_copy_of_the_model_with_these_weights(family, engine):
    live = tiny(family)
    model = tracer.load(live, word_tokenizer())
    before = {name: value.clone() for name, value in live.state_dict().items()}
    settings = {"noise_samples": 2, "perturb_scale": 0.3, "seed": 5, "engine": engine, "batch_tokens": 64}
    result = tracer.trace(model, PROBES, ablations=["perturb"], progress=False, **settings)
    assert all(torch.equal(value, before[name]) for name, value in live.state_dict().items())
    tokenizer = word_tokenizer()
    jsd = np.zeros((2, 4, len(PROBES)))
    for sample in range(2):
        for block in range(4):
            other = copy.deepcopy(live)
            own = dict(other.named_modules())[model.anatomy.calls[block].module]
            weights = perturbation(own, 0.3, 5, "perturb", block, sample)
            with torch.no_grad():
                for name, parameter in own.named_parameters():
                    parameter.copy_(weights.get(name, parameter))
            for row, probe in enumerate(PROBES):
                ids = tokenizer(probe.prompt)["input_ids"]
                clean, moved = (oracle.forward(m, ids)[-1] for m in (live, other))
                jsd[sample, block, row] = oracle.jsd(clean, moved)
    np.testing.assert_allclose(result.arrays["jsd_perturb"], jsd.mean(axis=0), rtol=0, atol=2e-5)
    np.testing.assert_allclose(result.arrays["jsd_perturb_by_sample"], jsd.mean(axis=2), rtol=0, atol=2e-5)
    assert jsd.max() > 0.01


def test_the_noise_has_the_size_that_was_asked_for_and_only_matrices_get_it():
    block = blocks(tracer.load(tiny("mamba2")))[1]
    found = perturbation(block, 0.2, 0, "x")
    for name, parameter in block.named_parameters():
        if parameter.dim() < 2:
            assert name not in found
        else:
            size = ((found[name] - parameter).norm() / parameter.norm()).item()
            assert size == pytest.approx(0.2, rel=5 / parameter.numel() ** 0.5)
    same, other = perturbation(block, 0.2, 0, "x"), perturbation(block, 0.2, 0, "y")
    assert all(torch.equal(found[name], same[name]) for name in found)
    assert not any(torch.equal(found[name], other[name]) for name in found)


def test_weights_come_back_after_an_error_to_the_same_memory():
    block = blocks(tracer.load(tiny("llama")))[0]
    places = [parameter.data_ptr() for parameter in block.parameters()]
    before = [parameter.clone() for parameter in block.parameters()]
    with pytest.raises(RuntimeError, match="shapes"), reweighted(block, perturbation(block, 1.0, 0)):
        block.self_attn.q_proj(torch.zeros(1, 3))
    assert places == [parameter.data_ptr() for parameter in block.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, block.parameters(), strict=True))


def test_what_cannot_be_perturbed_is_refused():
    model = tracer.load(tiny("llama"), word_tokenizer())
    with pytest.raises(InputError, match="'perturb' changes weights, which act at all positions"):
        tracer.trace(model, PROBES, ablations=["perturb"], positions="last", progress=False)
    with pytest.raises(InputError, match="'perturb' has no parts"):
        tracer.trace(model, PROBES, ablations=["perturb"], parts=["mixer"], progress=False)
    with pytest.raises(InputError, match="perturb_scale is -1.0"):
        tracer.trace(model, PROBES, ablations=["perturb"], perturb_scale=-1.0, progress=False)
    with torch.device("meta"):
        away = type(model.model)(model.model.config).model.layers[0]
    with pytest.raises(InputError, match="offloaded or quantised"):
        perturbation(away, 0.1, 0)


def test_no_noise_moves_nothing_and_more_moves_more():
    model = tracer.load(tiny("llama"), word_tokenizer())
    means = []
    for scale in (0.0, 0.05, 0.5):
        settings = {"ablations": ["perturb"], "perturb_scale": scale, "noise_samples": 2, "progress": False}
        means.append(tracer.trace(model, PROBES, **settings).arrays["jsd_perturb"].mean())
    assert means[0] < 1e-9
    assert means[0] < means[1] < means[2]
    assert Variant("perturb", 1, 3).depth == 2


@pytest.mark.parametrize("engine", ["onepass", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_swapped_weights_equal_a_model_with_that_block_of_the_other(family, engine):
    live, other = tiny(family), tiny(family, seed=1)
    model, donor = tracer.load(live, word_tokenizer()), tracer.load(other, word_tokenizer())
    before = {name: value.clone() for name, value in live.state_dict().items()}
    result = tracer.trace(
        model, PROBES, ablations=["swap_weights"], swap_from=donor, engine=engine, batch_tokens=64, progress=False
    )
    assert all(torch.equal(value, before[name]) for name, value in live.state_dict().items())
    tokenizer = word_tokenizer()
    jsd = np.zeros((4, len(PROBES)))
    for block in range(4):
        mixed = copy.deepcopy(live)
        name = model.anatomy.calls[block].module
        dict(mixed.named_modules())[name].load_state_dict(donor.blocks[block].state_dict())
        for row, probe in enumerate(PROBES):
            ids = tokenizer(probe.prompt)["input_ids"]
            jsd[block, row] = oracle.jsd(*(oracle.forward(m, ids)[-1] for m in (live, mixed)))
    np.testing.assert_allclose(result.arrays["jsd_swap_weights"], jsd, rtol=0, atol=2e-5)
    assert jsd.min() > 1e-4


def test_swapping_with_itself_changes_nothing_and_other_architectures_are_refused():
    model = tracer.load(tiny("llama"), word_tokenizer())
    settings = {"ablations": ["swap_weights"], "progress": False}
    same = tracer.trace(model, PROBES, swap_from=tiny("llama"), **settings)
    assert same.arrays["jsd_swap_weights"].max() < 1e-9
    assert same.run["arguments"]["swap_from"] == "LlamaForCausalLM"
    for other, why in (
        (tiny("qwen3"), "differ in their class"),
        (tiny("llama", num_hidden_layers=5), r"number of blocks \(4, 5\)"),
        (tiny("llama", intermediate_size=40), r"block 0 .* differ in mlp\.down_proj\.weight"),
    ):
        with pytest.raises(InputError, match=why):
            tracer.trace(model, PROBES, swap_from=other, **settings)
    with pytest.raises(InputError, match="'swap_weights' needs swap_from="):
        tracer.trace(model, PROBES, **settings)
    with pytest.raises(InputError, match="without the ablation 'swap_weights'"):
        tracer.trace(model, PROBES, swap_from=tiny("llama"), progress=False)
    with pytest.raises(InputError, match="'swap_weights' changes weights, which act at all positions"):
        tracer.trace(model, PROBES, swap_from=tiny("llama"), positions="last", **settings)


def test_the_stablest_blocks_are_frozen():
    model = tracer.load(tiny("llama"), word_tokenizer())
    result = tracer.trace(model, PROBES, ablations=["perturb"], noise_samples=2, progress=False)
    plan = tracer.plan(result, "update-stable:2")
    assert set(plan.freeze) == set(np.argsort(result.blocks["jsd_perturb"].to_numpy())[:2])
    assert "moves the output least" in plan.summary()
