"""Models with a vision or audio tower are traced through their language model, on text."""

import numpy as np
import oracle
import pytest
import torch
import transformers
from tiny import BLOCKS, TOWERS, VOCAB, tiny, with_tower, word_tokenizer

import tracer
from tracer.probes import Probe

PROMPTS = [[5 + (7 * n + 5 * i) % 120 for i in range(4 + n % 4)] for n in range(8)]
PROBES = [Probe(prompt_ids=ids, target_id=20 + n % 5, id=f"p{n}") for n, ids in enumerate(PROMPTS)]


def check(model: tracer.TracedModel, oracle_model: torch.nn.Module) -> None:
    """The lens at the last depth is the model's own output on text, and a skip that of hooks of our own."""
    result = tracer.trace(model, PROBES, progress=False)
    blocks = oracle.blocks_of(oracle_model)
    assert len(blocks) == result.run["model"]["anatomy"]["blocks"][-1]["block"] + 1 == BLOCKS
    for n, ids in enumerate(PROMPTS):
        clean = oracle.forward(oracle_model, ids)[-1]
        p = np.exp(result.arrays["log_p"][-1, n])
        assert p == pytest.approx(clean[PROBES[n].target_id].exp().item(), abs=1e-5)
        for block in range(BLOCKS):
            skipped = oracle.forward(oracle_model, ids, block, lambda before, after: before)[-1]
            assert result.arrays["jsd_zero"][block, n] == pytest.approx(oracle.jsd(clean, skipped), abs=1e-5)
    assert result.arrays["jsd_zero"].max() > 1e-3


@pytest.mark.parametrize("name", TOWERS)
def test_a_live_model_is_traced_through_its_language_model(name):
    live = with_tower(name)
    opened = tracer.load(live)
    assert opened.backend == "hooks"
    assert opened.engine == "onepass"
    assert [call.module for call in opened.anatomy.calls] == [f"model.language_model.layers.{i}" for i in range(BLOCKS)]
    assert opened.anatomy.tail == ("model.language_model.norm", "lm_head")
    assert (opened.positions, opened.embeddings, opened.anatomy.vocab) == (256, VOCAB, VOCAB)
    assert opened.opened.notes[0] == (
        f"traced on text, through the language model of {type(live).__name__}; its other parts do not run"
    )
    check(opened, live)


@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.parametrize("backend", ["auto", "hooks"])
def test_a_folder_is_opened_with_all_its_weights(name, backend, tmp_path):
    live = with_tower(name)
    live.save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    opened = tracer.load(tmp_path, backend=backend, progress=False)
    assert opened.tokenizer is not None
    assert any(note.startswith("traced on text, through the language model of") for note in opened.opened.notes)
    assert not any("no place in the model" in note for note in opened.opened.notes)
    if backend == "hooks":
        weights = opened.model.state_dict()
        assert all(torch.equal(tensor, weights[key]) for key, tensor in live.state_dict().items())
    assert opened.positions == 256
    check(opened, live)


def test_a_language_model_that_transformers_opens_alone_is_said(tmp_path):
    """Where it has a class for it, the tower is not even read."""
    family, arguments = "qwen3_5", {"vision_config": {"depth": 2, "hidden_size": 32, "num_heads": 4}}
    text = tiny(family)
    config = transformers.Qwen3_5Config(text_config=text.config.to_dict(), **arguments)
    whole = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(tmp_path)
    opened = tracer.load(tmp_path, backend="hooks", progress=False)
    assert type(opened.model).__name__ == "Qwen3_5ForCausalLM"
    assert any(
        note == "the language model of a Qwen3_5ForConditionalGeneration, opened alone as Qwen3_5ForCausalLM"
        for note in opened.opened.notes
    )
    check(opened, whole)


def test_a_model_that_needs_an_image_is_refused(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.BlipConfig(
        text_config=sizes | {"vocab_size": 64}, vision_config=sizes | {"image_size": 28, "patch_size": 14}
    )
    live = transformers.BlipForConditionalGeneration(config)
    live.save_pretrained(tmp_path)
    for source in (live, tmp_path):
        with pytest.raises(tracer.ModelRefused, match=r"cannot be run on text alone .*pixel_values") as caught:
            tracer.load(source, progress=False)
        assert "\n" not in str(caught.value)
