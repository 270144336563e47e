"""Models of TransformerLens 4 give the numbers of plain hooks, and their own hook points take part."""

import copy
import re
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import oracle
import pytest
import torch
import transformers
from tiny import older_than, reinitialised, tiny, word_tokenizer
from transformer_lens.model_bridge import TransformerBridge, sources
from transformer_lens.model_bridge.sources import build_bridge_from_module

import tracer
from tracer.models import loading, traced
from tracer.models.selfcheck import open_plain
from tracer.models.streams import read_streams
from tracer.models.tokens import TokenBatch
from tracer.models.transformer_lens import bridge_weights
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
    "qwen3",
    "qwen3_5",
    "jamba",
    "nemotron_h",
    "olmo_hybrid",
)


def bridge(family: str) -> TransformerBridge:
    if family == "jamba" and older_than("5.13"):
        pytest.skip(
            f"TransformerLens does not fit the Mamba blocks of {family} in transformers {transformers.__version__}"
        )
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
    batch = TokenBatch.from_rows([word_tokenizer().encode(probe.prompt) for probe in PROBES])
    with torch.no_grad():
        streams, expected = (read_streams(model.adapter, batch).states for model in (bridged, plain))
    for (ours_at_depth, *_), (theirs_at_depth, *_) in zip(streams, expected, strict=True):
        for row, length in enumerate(batch.lengths):
            mine, other = ours_at_depth[row, :length], theirs_at_depth[row, :length]
            assert ((mine - other).norm(dim=-1) <= 1e-5 * other.norm(dim=-1)).all()


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


# --- backend="auto" --------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny("llama").save_pretrained(tmp_path / "llama")
    word_tokenizer().save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def boot(monkeypatch: pytest.MonkeyPatch, after: Callable[[TransformerBridge], object]) -> None:
    """Let something happen to every bridge that is booted from now on."""

    def build(*args, **kwargs):
        made = build_bridge_from_module(*args, **kwargs)
        after(made)
        return made

    monkeypatch.setattr(sources, "build_bridge_from_module", build)


def by_hooks(folder: Path, reason: str, **options) -> tracer.TracedModel:
    """Open a folder and see that plain hooks were taken for this reason, on the weights that were saved."""
    opened = tracer.load(folder, progress=False, **options)
    assert opened.backend == "hooks"
    assert type(opened.model).__module__.startswith("transformers.")
    *_, note = opened.opened.notes
    assert re.search(reason, note), note
    assert note.endswith(": opened by plain hooks")
    assert "\n" not in note
    assert opened.engine == "onepass"
    assert opened.fingerprint() == tracer.load(folder, progress=False, backend="hooks").fingerprint()
    return opened


def fails(*args: object) -> None:
    raise RuntimeError("broken\nin the middle")


@pytest.mark.parametrize("family", ["gemma2", "opt", "mamba", "qwen3_5", "mixtral"])
def test_what_is_opened_by_folder_is_booted_and_gives_the_numbers_of_plain_hooks(tmp_path, family):
    if family == "gemma2" and older_than("5.21"):
        pytest.skip("before transformers 5.21, Gemma 2 loses the soft-cap of its attention unless that is eager")
    tiny(family).save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    bridged = tracer.load(tmp_path, progress=False)
    assert isinstance(bridged.model, TransformerBridge)
    assert bridged.backend == "transformer_lens"
    # Mamba has no attention, and that of Gemma 2 is always computed so.
    eager = ": attention runs in its eager form" if family not in ("mamba", "gemma2") else ""
    assert bridged.opened.notes == (f"booted as TransformerBridge{eager}",)
    assert bridged.anatomy.calls[2].module == "blocks.2"
    plain = tracer.load(tmp_path, backend="hooks", progress=False)
    assert plain.backend == "hooks"
    assert plain.opened.notes == ()
    for name in ("engine", "n_blocks", "embeddings", "positions", "device"):
        assert getattr(bridged, name) == getattr(plain, name), name
    assert bridged.anatomy.mixers == plain.anatomy.mixers
    assert bridged.anatomy.tied == plain.anatomy.tied
    assert bridged.anatomy.model_class == f"TransformerBridge of {plain.anatomy.model_class}"
    ours, theirs = (tracer.trace(model, PROBES, progress=False) for model in (bridged, plain))
    assert np.abs(ours.arrays["jsd_zero"] - theirs.arrays["jsd_zero"]).max() <= 1e-5
    assert np.abs(np.exp(ours.arrays["log_p"]) - np.exp(theirs.arrays["log_p"])).max() <= 1e-5
    assert ours.run["model"]["fingerprint"] == theirs.run["model"]["fingerprint"]
    assert ours.run["model"]["notes"] == list(bridged.opened.notes)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_is_not_taken_for_another_model(folder, dtype):
    bridged = tracer.load(folder, dtype=dtype, progress=False)
    assert (bridged.backend, bridged.engine, bridged.opened.dtype) == ("transformer_lens", "onepass", dtype)


def test_a_bridge_is_booted_on_request(folder):
    bridged = tracer.load(folder, backend="transformer_lens", all_checks=True, progress=False)
    assert isinstance(bridged.model, TransformerBridge)
    assert bridged.anatomy.mixers == ("attention",) * 4
    assert [check.name for check in bridged.self_check.checks if "resume" in check.name] == [
        f"resume {depth}" for depth in (1, 2, 3)
    ]


def test_fingerprint_of_a_bridge_is_that_of_the_model_and_sees_every_weight():
    """Also weights that have no name of TransformerLens, such as those of experts."""
    for family, weight in (("mixtral", "model.layers.2.mlp.experts.gate_up_proj"), ("gpt2", "transformer.wpe.weight")):
        live = tracer.load(bridge(family))
        before = live.fingerprint()
        assert before == tracer.load(tiny(family)).fingerprint()
        with torch.no_grad():
            next(t for n, t in bridge_weights(live.model).items() if n == weight)[1] *= 0.5
        assert live.fingerprint() != before
    fused = tracer.load(bridge("gpt_neox"))
    before = fused.fingerprint()
    with torch.no_grad():
        fused.model.blocks[1].attn.q.weight[3] *= 0.5
    assert fused.fingerprint() != before


def test_a_class_that_transformer_lens_does_not_list_is_opened_by_hooks(tmp_path):
    config = transformers.PersimmonConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4
    )
    reinitialised(transformers.PersimmonForCausalLM(config)).save_pretrained(tmp_path)
    by_hooks(tmp_path, "^TransformerLens does not list PersimmonForCausalLM: opened by")
    with pytest.raises(tracer.InputError, match="does not list PersimmonForCausalLM; pass backend='hooks'"):
        tracer.load(tmp_path, backend="transformer_lens", progress=False)


def test_without_a_bridge_to_import_models_are_opened_by_hooks(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_lens.factories.architecture_adapter_factory", None)
    by_hooks(folder, r"^no TransformerBridge can be imported \(ModuleNotFoundError: .*\): opened")
    with pytest.raises(tracer.InputError, match="no TransformerBridge can be imported.*pass backend='hooks'"):
        tracer.load(folder, backend="transformer_lens", progress=False)


def test_a_bridge_that_fails_is_left_for_hooks(folder, monkeypatch):
    """The model is read again, after the one that was taken over is gone."""
    opened = []
    read = loading.read_causal_lm

    def reading(*args, **kwargs):
        assert [model() for model in opened] == [None] * len(opened), "two copies in memory"
        model, unplaced = read(*args, **kwargs)
        opened.append(weakref.ref(model))
        return model, unplaced

    boot(monkeypatch, fails)
    with monkeypatch.context() as patch:
        patch.setattr(loading, "read_causal_lm", reading)
        kept = tracer.load(folder, progress=False)
    assert len(opened) == 2
    assert opened[1]() is kept.model
    by_hooks(folder, r"^TransformerLens cannot boot LlamaForCausalLM \(RuntimeError: broken in the middle\): opened")
    with pytest.raises(tracer.InputError, match="cannot boot LlamaForCausalLM.*; pass backend='hooks'"):
        tracer.load(folder, backend="transformer_lens", progress=False)


def test_a_bridge_with_other_outputs_than_the_model_is_not_used(folder, monkeypatch):
    """It is consistent in itself, and would pass the self-check."""
    boot(monkeypatch, lambda made: made.blocks[1].hook_out.add_hook(lambda resid, hook: resid * 1.01))
    by_hooks(folder, r"^the TransformerBridge of LlamaForCausalLM is not this model: its probabilities differ by 0\.0")
    with pytest.raises(tracer.ModelRefused, match="is not this model.*pass backend='hooks'"):
        tracer.load(folder, backend="transformer_lens", progress=False)
    boot(monkeypatch, lambda made: made.blocks[1].hook_out.add_hook(lambda resid, hook: resid * torch.nan))
    by_hooks(folder, "differ by nan")


def test_a_bridge_that_the_self_check_refuses_is_not_used(folder, monkeypatch):
    """One that gives the model's outputs in its first forward and others later."""
    calls = count()

    def drifts(made: TransformerBridge) -> None:
        made.blocks[1].register_forward_hook(lambda module, args, output: output + 0.01 * next(calls))

    boot(monkeypatch, drifts)
    by_hooks(folder, "TransformerBridge cannot be traced: check '")


def test_a_bridge_with_the_slower_engine_is_not_used_where_hooks_have_the_faster_one(folder, monkeypatch):
    def slower(model, *args, **kwargs):
        adapter, check = open_plain(model, *args, **kwargs)
        slow = isinstance(model, TransformerBridge) or everything
        return adapter, replace(check, engine="full", reason="as said") if slow else check

    monkeypatch.setattr(traced, "open_plain", slower)
    everything = False
    by_hooks(folder, r"^a TransformerBridge allows the slower engine 'full' only \(as said\)")
    everything = True
    bridged = tracer.load(folder, progress=False)
    assert (bridged.backend, bridged.engine) == ("transformer_lens", "full")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"device_map": "cpu"}, "its weights are dispatched over devices"),
        ({"trust_remote_code": True}, "it may run model code of its own"),
        ({"blocks": [f"model.layers.{i}" for i in range(4)]}, "its blocks are named"),
    ],
)
def test_what_is_not_taken_over_is_opened_by_hooks(folder, monkeypatch, options, reason):
    monkeypatch.setattr(traced, "why_no_bridge", fails)  # nor is TransformerLens imported for it
    by_hooks(folder, f"^{reason}", **options)


def test_a_live_model_is_left_as_it_is(monkeypatch):
    monkeypatch.setattr(traced, "why_no_bridge", fails)
    live = tiny("llama")
    weights, modules = copy.deepcopy(live.state_dict()), [type(module) for module in live.modules()]
    opened = tracer.load(live, word_tokenizer())
    assert opened.model is live
    assert opened.backend == "hooks"
    assert opened.opened.notes == ("a live model is left as it is: opened by plain hooks",)
    with pytest.raises(tracer.InputError, match="takes a live model over"):
        tracer.load(live, word_tokenizer(), backend="transformer_lens")
    assert [type(module) for module in live.modules()] == modules
    assert all(torch.equal(tensor, weights[name]) for name, tensor in live.state_dict().items())


def test_a_model_of_transformer_lens_is_read_through_its_own_blocks():
    with pytest.raises(tracer.InputError, match="read through its own blocks"):
        tracer.load(bridge("llama"), word_tokenizer(), backend="hooks")
    with pytest.raises(tracer.InputError, match="blocks= names modules for plain hooks"):
        tracer.load(bridge("llama"), blocks=["blocks.1"])
