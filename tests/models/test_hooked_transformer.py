"""A live `HookedTransformer` of TransformerLens 3.9; `make test-hooked-transformer` runs this with that version."""

import numpy as np
import pytest
import torch
from tiny import tiny, word_tokenizer

import tracer
from tracer.probes import Probe

try:
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.pretrained.weight_conversions import convert_gpt2_weights, convert_llama_weights
except ImportError:
    pytest.skip("needs TransformerLens 3.9: make test-hooked-transformer", allow_module_level=True)

PROBES = [
    Probe(" ".join(f"w{3 + (7 * i + 5 * j) % 120}" for j in range(4 + i % 4)), f" w{20 + i % 9}", "g", f"p{i}")
    for i in range(18)
]
COMMON = {"n_layers": 4, "d_model": 64, "n_ctx": 256, "d_head": 16, "n_heads": 4, "d_vocab": 128, "device": "cpu"}
PROCESSING = ("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases")


def hooked(family: str, processed: bool = False) -> HookedTransformer:
    model = tiny(family)
    if family == "llama":
        config = HookedTransformerConfig(
            **COMMON,
            n_key_value_heads=2,
            d_mlp=96,
            act_fn="silu",
            normalization_type="RMS",
            positional_embedding_type="rotary",
            rotary_dim=16,
            rotary_adjacent_pairs=False,
            final_rms=True,
            gated_mlp=True,
            eps=model.config.rms_norm_eps,
            rotary_base=10000,
            original_architecture="LlamaForCausalLM",
            init_weights=False,
        )
        weights = convert_llama_weights(model, config)
    else:
        config = HookedTransformerConfig(
            **COMMON,
            d_mlp=256,
            act_fn="gelu_new",
            normalization_type="LN",
            eps=model.config.layer_norm_epsilon,
            original_architecture="GPT2LMHeadModel",
            init_weights=False,
        )
        weights = convert_gpt2_weights(model, config)
    lens = HookedTransformer(config)
    # Values are not centred for RMS norms, which know no mean.
    steps = dict.fromkeys(PROCESSING, processed) | ({"center_writing_weights": False} if family == "llama" else {})
    lens.load_and_process_state_dict(weights, **steps)
    return lens.eval()


def traced(model: object) -> tracer.TraceResult:
    return tracer.trace(tracer.load(model, word_tokenizer()), PROBES, ablations=["zero", "mean"], progress=False)


@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_it_gives_the_numbers_of_plain_hooks_with_and_without_processing(family, processed):
    ours, theirs = traced(hooked(family, processed)), traced(tiny(family))
    assert ours.run["model"]["backend"] == "transformer_lens"
    assert ours.run["model"]["anatomy"]["model_class"] == "HookedTransformer"
    assert np.abs(np.exp(ours.arrays["log_p"]) - np.exp(theirs.arrays["log_p"])).max() <= 1e-5
    for kind in ("zero", "mean"):
        assert np.abs(ours.arrays[f"jsd_{kind}"] - theirs.arrays[f"jsd_{kind}"]).max() <= 1e-5
    assert ours.probes["particle"].equals(theirs.probes["particle"])
    if not processed:
        assert np.allclose(ours.arrays["norm"], theirs.arrays["norm"], rtol=1e-5)


def test_a_model_of_a_folder_is_booted_as_the_bridge_of_this_version(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    bridged = tracer.load(tmp_path, progress=False)
    assert bridged.backend == "transformer_lens"
    assert bridged.opened.notes == ("booted as TransformerBridge: attention runs in its eager form",)
    ours, theirs = (
        tracer.trace(model, PROBES, progress=False) for model in (bridged, tracer.load(tiny("llama"), word_tokenizer()))
    )
    assert np.abs(ours.arrays["jsd_zero"] - theirs.arrays["jsd_zero"]).max() <= 1e-5
    assert ours.run["model"]["fingerprint"] == tracer.load(tmp_path, backend="hooks", progress=False).fingerprint()


def test_a_hook_on_resid_post_changes_residuals_ablations_and_lens():
    shift = torch.randn(64, generator=torch.Generator().manual_seed(0))
    model, plain = hooked("llama"), tiny("llama")
    model.add_hook("blocks.1.hook_resid_post", lambda resid, hook: resid + shift)
    plain.model.layers[1].register_forward_hook(lambda module, args, output: output + shift)
    ours, edited, untouched = traced(model), traced(plain), traced(tiny("llama"))
    assert np.abs(ours.arrays["jsd_zero"] - edited.arrays["jsd_zero"]).max() <= 1e-5
    assert np.allclose(ours.arrays["norm"], edited.arrays["norm"], rtol=1e-5)
    assert np.abs(ours.arrays["jsd_zero"] - untouched.arrays["jsd_zero"]).max() > 1e-3
