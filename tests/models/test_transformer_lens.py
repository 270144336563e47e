"""Models of TransformerLens 4 give the numbers of plain hooks, and their own hook points take part."""

import copy

import numpy as np
import oracle
import pytest
import torch
from tiny import tiny, word_tokenizer
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources import build_bridge_from_module

import tracer
from tracer.probes import Probe

PROBES = [
    Probe(" ".join(f"w{3 + (7 * i + 5 * j) % 120}" for j in range(4 + i % 4)), f" w{20 + i % 9}", "g", f"p{i}")
    for i in range(18)
]
FAMILIES = (
    "llama",
    "gpt2",
    "gpt_neox",
    "bloom",
    "gemma2",
    "gemma3",
    "granite",
    "olmo2",
    "mamba",
    "mamba2",
    "qwen3_next",
    "falcon_h1",
)


def bridge(family: str) -> TransformerBridge:
    model = tiny(family)
    return build_bridge_from_module(
        model, type(model).__name__, hf_config=model.config, model_name=f"tiny-{family}"
    ).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_bridge_gives_the_numbers_of_plain_hooks(family):
    plain = tracer.load(tiny(family, attn_implementation="eager"), word_tokenizer())
    bridged = tracer.load(bridge(family), word_tokenizer(), all_checks=True)
    assert bridged.backend == "transformer_lens"
    assert bridged.engine == "onepass"
    assert isinstance(bridged.model, TransformerBridge)
    settings = {"ablations": ["zero", "mean", "noise"], "noise_samples": 1, "progress": False}
    ours, theirs = (tracer.trace(model, PROBES, **settings) for model in (bridged, plain))
    assert np.abs(np.exp(ours.arrays["log_p"]) - np.exp(theirs.arrays["log_p"])).max() <= 1e-5
    for kind in ("zero", "mean", "noise"):
        assert np.abs(ours.arrays[f"jsd_{kind}"] - theirs.arrays[f"jsd_{kind}"]).max() <= 1e-5
    assert ours.probes["particle"].equals(theirs.probes["particle"])
    assert ours.run["model"]["backend"] == "transformer_lens"


@pytest.mark.parametrize("family", ["llama", "mamba2", "granite"])
def test_a_hook_on_resid_post_changes_residuals_ablations_and_lens(family):
    """As if the block of a plain model returned the edited stream."""
    shift = torch.randn(64, generator=torch.Generator().manual_seed(0))
    bridged = bridge(family)
    bridged.blocks[1].hook_out.add_hook(lambda resid, hook: resid + shift)
    assert bridged.hook_dict["blocks.1.hook_resid_post"] is bridged.blocks[1].hook_out
    plain = tiny(family, attn_implementation="eager")
    oracle.blocks_of(plain)[1].register_forward_hook(lambda module, args, output: output + shift)
    ours, edited, untouched = (
        tracer.trace(tracer.load(model, word_tokenizer()), PROBES, progress=False)
        for model in (bridged, plain, tiny(family))
    )
    assert np.abs(ours.arrays["jsd_zero"] - edited.arrays["jsd_zero"]).max() <= 1e-5
    assert np.abs(ours.arrays["norm"] - edited.arrays["norm"]).max() <= 1e-3
    assert np.allclose(ours.arrays["norm"][1], untouched.arrays["norm"][1], rtol=1e-5)
    assert np.abs(ours.arrays["jsd_zero"] - untouched.arrays["jsd_zero"]).max() > 1e-3


def test_model_opened_by_folder_is_booted_on_request(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    bridged = tracer.load(tmp_path, backend="transformer_lens", progress=False)
    assert isinstance(bridged.model, TransformerBridge)
    assert bridged.anatomy.calls[2].module == "blocks.2"
    assert any("TransformerBridge" in note for note in bridged.opened.notes)
    plain = tracer.load(tmp_path, progress=False)
    assert plain.backend == "hooks"
    ours, theirs = (tracer.trace(model, PROBES, progress=False) for model in (bridged, plain))
    assert np.abs(ours.arrays["jsd_zero"] - theirs.arrays["jsd_zero"]).max() <= 1e-5


def test_what_cannot_be_bridged_is_refused(tmp_path):
    live = tiny("llama")
    weights = copy.deepcopy(live.state_dict())
    with pytest.raises(tracer.InputError, match="takes a live model over"):
        tracer.load(live, word_tokenizer(), backend="transformer_lens")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in live.state_dict().items())
    with pytest.raises(tracer.InputError, match="read through its own blocks"):
        tracer.load(bridge("llama"), word_tokenizer(), backend="hooks")
