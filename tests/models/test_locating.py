"""Blocks are found by what they hand on, wherever the model keeps them; or its user names them."""

import copy

import every_model
import numpy as np
import oracle
import pytest
import torch
from planted import PlantedConfig, PlantedModel
from tiny import tiny, word_tokenizer
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

import tracer
from tracer.models.selfcheck import open_plain


class Attributes(PlantedModel):
    """Blocks as attributes of the model, in no list."""

    def __init__(self, config: PlantedConfig):
        super().__init__(config)
        blocks = list(self.blocks)
        del self.blocks
        for index, block in enumerate(blocks):
            setattr(self, f"block_{index}", block)

    def forward(self, input_ids, attention_mask=None):
        hidden = self.embedding(input_ids)
        for index in range(self.config.n_blocks):
            hidden = getattr(self, f"block_{index}")(hidden)
        return CausalLMOutput(logits=self.head(hidden))


class Odd(nn.Module):
    """A block of a class of its own, so that nothing about siblings tells what it is."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        return self.inner(hidden)


class Different(Attributes):
    """As before, but every block has another class."""

    def __init__(self, config: PlantedConfig):
        super().__init__(config)
        for index in range(config.n_blocks):
            inner = getattr(self, f"block_{index}")
            setattr(self, f"block_{index}", type(f"Odd{index}", (Odd,), {})(inner))


class TwoLists(PlantedModel):
    """The blocks in two lists that are called one after the other."""

    def __init__(self, config: PlantedConfig):
        super().__init__(config)
        self.upper = nn.ModuleList(list(self.blocks)[2:])
        self.blocks = nn.ModuleList(list(self.blocks)[:2])

    def forward(self, input_ids, attention_mask=None):
        hidden = self.embedding(input_ids)
        for block in (*self.blocks, *self.upper):
            hidden = block(hidden)
        return CausalLMOutput(logits=self.head(hidden))


def names(model: nn.Module, **options) -> list[str]:
    return [call.module for call in open_plain(model, **options)[0].anatomy.calls]


def test_blocks_that_are_attributes_are_found():
    model = Attributes(PlantedConfig(writer=2, n_blocks=5)).eval()
    assert names(model) == [f"block_{i}" for i in range(5)]
    assert open_plain(model)[1].engine == "onepass"


def test_two_lists_in_a_row_are_one_row_of_blocks():
    model = TwoLists(PlantedConfig(writer=2, n_blocks=5)).eval()
    assert names(model) == ["blocks.0", "blocks.1", "upper.0", "upper.1", "upper.2"]
    assert open_plain(model)[1].engine == "onepass"


def test_blocks_can_be_named():
    model = Different(PlantedConfig(writer=2, n_blocks=5)).eval()
    with pytest.raises(tracer.ModelRefused, match=r"name them: blocks=\[...\]"):
        open_plain(model)
    wanted = [f"block_{i}" for i in range(5)]
    assert names(model, blocks=wanted) == wanted
    with torch.no_grad():
        logits = model(torch.tensor([[3, 4]])).logits
    assert logits.argmax(-1).tolist() == [[4, 5]]
    traced = tracer.load(model, blocks=wanted)
    assert traced.n_blocks == 5


def test_a_part_of_the_blocks_can_be_named():
    """Then everything after them is the tail; it moves information between positions, which is said."""
    model = tiny("llama")
    adapter, check = open_plain(model, blocks=["model.layers.0", "model.layers.1"])
    assert adapter.anatomy.n_blocks == 2
    assert check.tail == "whole"
    assert any("move information between positions" in note for note in check.notes)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (["model.layers.7"], "has no module 'model.layers.7'"),
        (["model.norm"], "hand no hidden state from one to the next"),
        (["model.layers.0.mlp", "model.layers.2.mlp"], "hand no hidden state from one to the next"),
    ],
)
def test_wrong_names_are_refused(blocks, message):
    with pytest.raises(tracer.InputError, match=message):
        open_plain(tiny("llama"), blocks=blocks)


XLM = [f"transformer.attentions.{i}:transformer.layer_norm2.{i}" for i in range(4)]


def test_blocks_that_lie_in_their_parents_forward_can_be_named():
    """XLM keeps attention, norms and MLPs in four lists, and adds them up in between."""
    model = every_model.build("xlm")
    traced = tracer.load(model, word_tokenizer(), blocks=XLM)
    assert traced.engine == "full"
    assert traced.anatomy.tail == ("pred_layer",)
    probes = [tracer.Probe(f"w{i} w{i + 7} w{2 * i}", f" w{i + 3}", "g", f"p{i}") for i in range(20, 29)]
    result = tracer.trace(traced, probes, progress=False)
    for row, ids in enumerate([20 + i, 27 + i, 40 + 2 * i] for i in range(9)):
        clean = oracle.forward(model, ids)[-1]
        assert result.arrays["log_p"][-1, row] == pytest.approx(clean[23 + row].item(), abs=1e-4)
        for block in range(4):
            shorter = copy.deepcopy(model)
            for name in ("attentions", "layer_norm1", "ffns", "layer_norm2"):
                del getattr(shorter.transformer, name)[block]
            shorter.transformer.n_layers = 3
            expected = oracle.jsd(clean, oracle.forward(shorter, ids)[-1])
            assert result.arrays["jsd_zero"][block, row] == pytest.approx(expected, abs=1e-5)
    assert np.min(result.arrays["jsd_zero"].max(axis=1)) > 1e-3
    with pytest.raises(tracer.InputError, match="not the exact sum"):
        tracer.trace(traced, probes, parts=["mixer"], progress=False)
    with pytest.raises(tracer.InputError, match="has no module 'transformer.layer_norm3.0'"):
        tracer.load(model, blocks=["transformer.attentions.0:transformer.layer_norm3.0"])
