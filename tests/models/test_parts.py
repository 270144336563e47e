"""Every parameter of a model belongs to the parts that use it, found without a table of names."""

import every_model
import pytest
from tiny import FAMILIES, FAULTY, TOWERS, tiny, with_tower, word_tokenizer

from tracer import load
from tracer.errors import InputError
from tracer.models.parts import Parts, parts_of
from tracer.models.selfcheck import open_plain


def parts(model) -> Parts:
    return parts_of(model, open_plain(model)[0])


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in FAULTY])
def test_every_parameter_is_in_one_part_unless_it_is_shared(family):
    model = tiny(family)
    found = parts(model)
    everything = [*found.blocks, found.embeddings, found.norm, found.head, found.idle]
    names = [name for part in everything for name in part.sizes]
    assert set(names) == {name for name, _ in model.named_parameters()}
    assert found.total == model.num_parameters()
    shared = {name for name in names if names.count(name) > 1}
    assert shared == (set(found.head.sizes) & set(found.embeddings.sizes))
    assert found.tied == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)
    for block, part in zip(open_plain(model)[0].anatomy.calls, found.blocks, strict=True):
        own = {name for name, _ in model.named_parameters() if name.startswith(f"{block.module}.")}
        assert set(part.sizes) == own
    assert not found.idle.sizes


def test_a_tied_head_is_the_embedding():
    found = parts(tiny("llama", tie_word_embeddings=True))
    assert found.tied
    assert found.head.sizes == found.embeddings.sizes == {"model.embed_tokens.weight": 128 * 64}


def test_what_runs_before_and_after_the_blocks_is_told_apart():
    found = parts(tiny("opt"))
    assert set(found.embeddings.sizes) == {
        f"model.decoder.{name}.weight" for name in ("embed_tokens", "embed_positions", "project_in")
    }
    assert set(found.norm.sizes) == {
        f"model.decoder.{name}" for name in ("final_layer_norm.weight", "final_layer_norm.bias", "project_out.weight")
    }


@pytest.mark.parametrize("name", TOWERS)
def test_a_tower_is_idle(name):
    model = with_tower(name)
    found = parts(model)
    assert found.idle.sizes
    assert all("language_model" not in name for name in found.idle.sizes)
    assert len(found.blocks) == 4


def test_the_parts_of_a_bridge_are_those_of_the_model_under_it(tmp_path):
    model = tiny("llama")
    expected = parts(model)
    model.save_pretrained(tmp_path)
    assert load(str(tmp_path), backend="transformer_lens", progress=False).parts == expected


def test_blocks_that_are_no_modules_have_no_parameters_of_their_own():
    names = [f"transformer.attentions.{i}:transformer.layer_norm2.{i}" for i in range(4)]
    opened = load(every_model.build("xlm"), word_tokenizer(), blocks=names)
    with pytest.raises(InputError, match="block 0 of XLMWithLMHeadModel is no module"):
        parts_of(opened.model, opened.adapter)
    assert opened.parts is None
    assert opened.describe()["parts"] is None
