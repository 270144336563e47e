"""The price of a plan, against a real step of the same model."""

import copy

import pytest
import torch
from tiny import tiny, word_tokenizer
from torch.utils.flop_counter import FlopCounterMode

import tracer
from tracer.errors import InputError
from tracer.freezing.cost import _ATTENTION_ON_CPU, price

PROBES = [tracer.Probe(f"w{i} w{i + 5} w{2 * i % 90}", f" w{i % 9 + 3}", f"g{i % 2}", f"p{i}") for i in range(3, 15)]
FAMILIES = ("llama", "gpt2", "gemma2", "mamba", "mamba2", "qwen3_5", "falcon_h1")


def planned(family: str, rule: str, **decisions: str) -> tuple[tracer.FreezePlan, torch.nn.Module]:
    model = tiny(family)
    result = tracer.trace(tracer.load(model, word_tokenizer()), PROBES, progress=False)
    return tracer.plan(result, rule, **decisions), model


def real_step(model: torch.nn.Module, batch: int, length: int) -> tuple[float, float]:
    """Operations a token of a real step, forward and backward."""
    ids = torch.randint(0, 100, (batch, length))
    with FlopCounterMode(display=False, custom_mapping=_ATTENTION_ON_CPU) as counter:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        forward = counter.get_total_flops()
        loss.backward()
    return forward / ids.numel(), (counter.get_total_flops() - forward) / ids.numel()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_count_is_that_of_a_real_step(family):
    plan, model = planned(family, "1,3")
    prices = price(plan, model, block_size=24, batch=3)
    for one, applied in ((prices.plan, plan), (prices.full, None)):
        live = copy.deepcopy(model).train()
        if applied is not None:
            applied.apply(live)
        assert (one.forward_flops, one.backward_flops) == pytest.approx(real_step(live, 3, 24))
        trained = [p for p in live.parameters() if p.requires_grad]
        assert one.trained == sum(p.numel() for p in trained)
        assert one.gradient_bytes == 4 * one.trained
        optimizer = torch.optim.AdamW(trained)
        optimizer.step()
        moments = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
        assert one.optimizer_bytes == sum(t.numel() * t.element_size() for t in moments)
        assert one.total == model.num_parameters()
    assert prices.plan.flops < prices.full.flops
    assert prices.plan.activation_bytes < prices.full.activation_bytes


def test_gradients_flow_through_frozen_blocks_down_to_the_lowest_trained_parameter():
    ratios = {}
    for rule, embeddings in (("shallow:2", "train"), ("deep:2", "train"), ("deep:2", "freeze")):
        plan, model = planned("llama", rule, embeddings=embeddings)
        ratios[rule, embeddings] = price(plan, model, block_size=32, batch=2).time_ratio
    assert ratios["shallow:2", "train"] == pytest.approx(ratios["deep:2", "train"])
    assert ratios["deep:2", "freeze"] < ratios["deep:2", "train"] - 0.1, "the graph ends above the frozen blocks"
    assert ratios["shallow:2", "train"] < 1


def test_the_model_is_neither_run_nor_changed():
    plan, model = planned("llama", "shallow:2")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.forward = None
    prices = price(plan, model, dtype="bfloat16", block_size=16)
    assert prices.dtype == "bfloat16"
    assert prices.plan.gradient_bytes == 2 * prices.plan.trained
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert "both: predicted time" in prices.summary()


def test_experts_are_counted_in_bfloat16():
    plan, model = planned("mixtral", "shallow:2")
    assert price(plan, model, dtype="bfloat16", block_size=16).plan.flops > 0
    with pytest.raises(InputError, match="pass another dtype, such as bfloat16"):
        price(plan, model, block_size=16)


@pytest.mark.parametrize(
    ("arguments", "why"), [({"dtype": "int7"}, "unknown dtype"), ({"block_size": 0}, "at least 1")]
)
def test_bad_arguments_are_refused(arguments, why):
    plan, model = planned("llama", "shallow:2")
    with pytest.raises(InputError, match=why):
        price(plan, model, **arguments)
