"""Mixer and MLP of a block: found without a table, proven as an exact sum, ablated like an output hook would."""

from contextlib import ExitStack

import every_model
import numpy as np
import oracle
import pytest
import torch
from planted import PlantedConfig, PlantedModel
from tiny import BLOCKS, FAMILIES, tiny, word_tokenizer
from torch import nn
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers.modeling_outputs import CausalLMOutput

import tracer
from tracer.ablations import CalibrationSums
from tracer.models.plain import evaluating
from tracer.models.selfcheck import open_plain
from tracer.models.sublayers import Sublayers, find_sublayers
from tracer.models.tokens import TokenBatch
from tracer.probes import Probe

# Per family the modules that write to the stream, mixers first; the output is what is added, up to a scale.
WRITERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "llama": (("self_attn",), ("mlp",)),
    "gpt2": (("attn",), ("mlp",)),
    "gpt_neox": (("attention",), ("mlp",)),
    "gpt_neox_sequential": (("attention",), ("mlp",)),
    "gptj": (("attn",), ("mlp",)),
    "phi": (("self_attn",), ("mlp",)),
    "opt": (("self_attn",), ("fc2",)),
    "gemma2": (("post_attention_layernorm",), ("post_feedforward_layernorm",)),
    "gemma3": (("post_attention_layernorm",), ("post_feedforward_layernorm",)),
    "granite": (("self_attn",), ("mlp",)),
    "cohere": (("self_attn",), ("mlp",)),
    "olmo2": (("post_attention_layernorm",), ("post_feedforward_layernorm",)),
    "mixtral": (("self_attn",), ("mlp",)),
    "mamba": (("mixer",), ()),
    "mamba2": (("mixer",), ()),
    "qwen3_next": (("linear_attn", "self_attn"), ("mlp",)),
    "falcon_h1": (("mamba", "self_attn"), ("feed_forward",)),
}
PROMPTS = [[3 + (7 * row + 5 * i) % 120 for i in range(length)] for row, length in enumerate((5, 9, 7))]
PROBES = [Probe(" ".join(f"w{i}" for i in ids), f" w{20 + row}", "g", f"p{row}") for row, ids in enumerate(PROMPTS)]


def found(model: nn.Module) -> Sublayers:
    with evaluating(model):
        return find_sublayers(open_plain(model)[0])


def without(model: nn.Module, block: int, names: tuple[str, ...], ids: list[int]) -> torch.Tensor:
    """Log-probabilities when the named modules of a block return nothing, by plain hooks."""

    def nothing(module: nn.Module, args: tuple, output: object) -> object:
        if isinstance(output, tuple):
            return (torch.zeros_like(output[0]), *output[1:])
        return torch.zeros_like(output)

    with ExitStack() as stack:
        for name in names:
            module = getattr(oracle.blocks_of(model)[block], name, None)
            if module is not None:
                stack.callback(module.register_forward_hook(nothing).remove)
        return oracle.forward(model, ids)[-1]


@pytest.mark.parametrize("family", WRITERS)
def test_ablated_parts_equal_plain_output_hooks(family):
    # The logit scale of Cohere would leave the distributions nearly uniform.
    model = tracer.load(tiny(family, **{"logit_scale": 0.5} if family == "cohere" else {}), word_tokenizer())
    parts = {part: names for part, names in zip(("mixer", "mlp"), WRITERS[family], strict=True) if names}
    result = tracer.trace(model, PROBES, parts=list(parts), progress=False)
    for part, names in parts.items():
        jsd = result.arrays[f"jsd_zero_{part}"]
        for row, ids in enumerate(PROMPTS):
            clean = oracle.forward(model.model, ids)[-1]
            for block in range(BLOCKS):
                expected = oracle.jsd(clean, without(model.model, block, names, ids))
                assert jsd[block, row] == pytest.approx(expected, abs=1e-5), f"{part} of block {block}"
        assert jsd.max() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_contributions_of_the_parts_sum_to_that_of_the_block(family):
    model = tiny(family)
    adapter, _ = open_plain(model)
    with evaluating(model):
        sublayers = find_sublayers(adapter)
        sums = CalibrationSums(adapter, sublayers)
        sums.add(TokenBatch.from_rows([PROMPTS[1]]))
    assert sublayers.exact, sublayers.gaps
    means = sums.calibration().mean
    for block in range(BLOCKS):
        parts = [means[block, number] for number in range(len(sublayers.blocks[block]))]
        whole = means[block, None]
        assert torch.allclose(sum(parts), whole, atol=1e-5 * whole.abs().max().item())


def test_bloom_adds_the_stream_inside_its_sublayers():
    """What its attention returns already holds the stream: zero output would erase everything before."""
    model = tiny("bloom")
    sublayers = found(model)
    assert sublayers.exact
    assert all(s.residual_path is not None for block in sublayers.blocks for s in block)
    result = tracer.trace(tracer.load(model, word_tokenizer()), PROBES, parts=["mixer"], progress=False)

    def keep(module: nn.Module, args: tuple, kwargs: dict, output: tuple) -> tuple:
        return (args[1] if len(args) > 1 else kwargs["residual"], *output[1:])

    for block in range(BLOCKS):
        handle = oracle.blocks_of(model)[block].self_attention.register_forward_hook(keep, with_kwargs=True)
        try:
            ablated = oracle.forward(model, PROMPTS[0])[-1]
        finally:
            handle.remove()
        expected = oracle.jsd(oracle.forward(model, PROMPTS[0])[-1], ablated)
        assert result.arrays["jsd_zero_mixer"][block, 0] == pytest.approx(expected, abs=1e-5)


def test_scale_of_the_residual_multiplier_is_found():
    sublayers = found(tiny("granite"))
    assert {round(s.scale, 4) for block in sublayers.blocks for s in block} == {0.3}


@pytest.mark.parametrize("kind", ["mean", "resample", "noise"])
@pytest.mark.parametrize("family", ["llama", "granite", "bloom", "qwen3_next"])
def test_other_ablations_of_parts_agree_between_engines_and_batchings(family, kind):
    model = tracer.load(tiny(family), word_tokenizer())
    settings = {"ablations": [kind], "parts": ["mixer", "mlp"], "noise_samples": 2, "progress": False}
    onepass = tracer.trace(model, PROBES, **settings)
    full = tracer.trace(model, PROBES, engine="full", **settings)
    alone = tracer.trace(model, PROBES, batch_tokens=1, **settings)
    for part in ("mixer", "mlp"):
        jsd = onepass.arrays[f"jsd_{kind}_{part}"]
        assert np.abs(jsd - full.arrays[f"jsd_{kind}_{part}"]).max() <= 1e-5
        assert np.abs(jsd - alone.arrays[f"jsd_{kind}_{part}"]).max() <= 1e-5
        assert jsd.max() > 1e-4


@pytest.mark.parametrize("positions", ["all", "last"])
def test_mean_of_a_part_is_its_mean_over_the_probes(positions):
    """Written out with plain hooks: the output of the MLP of block 2 becomes its mean, the first position apart."""
    model = tiny("llama")
    outputs: list[torch.Tensor] = []
    mlp = oracle.blocks_of(model)[2].mlp
    handle = mlp.register_forward_hook(lambda module, args, output: outputs.append(output[0]))
    for ids in PROMPTS:
        oracle.forward(model, ids)
    handle.remove()
    first = torch.stack([x[0] for x in outputs]).mean(0)
    others = torch.cat([x[1:] for x in outputs]).mean(0)

    def edit(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        new = output.clone()
        if positions == "all":
            new[:, 0], new[:, 1:] = first, others
        else:
            new[:, -1] = others
        return new

    result = tracer.trace(
        tracer.load(model, word_tokenizer()),
        PROBES,
        ablations=["mean"],
        parts=["mlp"],
        positions=positions,
        progress=False,
    )
    for row, ids in enumerate(PROMPTS):
        clean = oracle.forward(model, ids)[-1]
        handle = mlp.register_forward_hook(edit)
        try:
            expected = oracle.jsd(clean, oracle.forward(model, ids)[-1])
        finally:
            handle.remove()
        assert result.arrays["jsd_mean_mlp"][2, row] == pytest.approx(expected, abs=1e-5)


def test_parts_of_a_block_that_is_no_sum_are_refused_with_the_gap():
    model = tracer.load(every_model.build("openai-gpt"), word_tokenizer())
    with pytest.raises(
        tracer.InputError, match=r"not the exact sum .* off by 0\.\d+ .* ablate or patch the whole block"
    ):
        tracer.trace(model, PROBES, parts=["mixer"], progress=False)
    with pytest.raises(tracer.InputError, match="erases the whole stream"):
        tracer.trace(model, PROBES, ablations=["zero_stream"], parts=["mlp"], progress=False)
    with pytest.raises(tracer.InputError, match="unknown part 'attention'"):
        tracer.trace(model, PROBES, parts=["attention"], progress=False)


def test_a_part_that_no_block_has_is_refused():
    model = tracer.load(tiny("mamba"), word_tokenizer())
    with pytest.raises(tracer.InputError, match="no block of MambaForCausalLM has a part 'mlp'"):
        tracer.trace(model, PROBES, parts=["mixer", "mlp"], progress=False)


def test_a_part_that_a_block_lacks_is_missing_not_zero(tmp_path):
    """Nemotron-H has blocks that are nothing but a mixer, and blocks that are nothing but an MLP."""
    model = tiny("nemotron_h")
    lacking = [not found(model).of(block, "mlp") for block in range(BLOCKS)]
    assert any(lacking)
    assert not all(lacking)
    result = tracer.trace(
        tracer.load(model, word_tokenizer()), PROBES, parts=["block", "mlp"], progress=False, out=tmp_path / "run"
    )
    assert np.isnan(result.arrays["jsd_zero_mlp"]).all(axis=1).tolist() == lacking
    assert result.blocks["jsd_zero_mlp"].isna().tolist() == lacking
    assert not result.blocks["fragile_zero_mlp"][lacking].any()
    assert result.blocks["jsd_zero"].notna().all()
    again = tracer.TraceResult.load(tmp_path / "run")
    assert again.ablations == ("zero", "zero_mlp")
    assert again.summary() == result.summary()
    for figure in ("joint", "fragility"):
        again.plot(figure)


def test_fragility_by_kind_of_mixer():
    result = tracer.trace(tracer.load(tiny("qwen3_next"), word_tokenizer()), PROBES, progress=False)
    table = result.fragility("zero").by_mixer.set_index("mixer")
    assert table["blocks"].to_dict() == {"gated_deltanet": 3, "attention": 1}
    assert table.loc["attention", "jsd"] == pytest.approx(result.arrays["jsd_zero"][3].mean())
    assert table.loc["gated_deltanet", "jsd"] == pytest.approx(result.arrays["jsd_zero"][:3].mean())


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "bloom", "falcon_h1", "opt"])
def test_parts_through_a_bridge_of_transformer_lens(family):
    """The bridge wraps the block, its attention and its MLP; what they add is the same."""
    live = tiny(family)
    bridge = build_bridge_from_module(live, type(live).__name__, hf_config=live.config, model_name="tiny").eval()
    options = {"parts": ["mixer", "mlp"], "progress": False}
    ours = tracer.trace(tracer.load(bridge, word_tokenizer()), PROBES, **options)
    theirs = tracer.trace(tracer.load(tiny(family, attn_implementation="eager"), word_tokenizer()), PROBES, **options)
    for part in ("mixer", "mlp"):
        assert np.abs(ours.arrays[f"jsd_zero_{part}"] - theirs.arrays[f"jsd_zero_{part}"]).max() <= 1e-5
        assert theirs.arrays[f"jsd_zero_{part}"].max() > 1e-3


def test_a_large_stream_does_not_hide_a_small_part():
    """Where the stream is thousands of times as large as what is added, its rounding is not held against the sum."""
    model = tiny("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(3000)
    sublayers = found(model)
    assert sublayers.exact, sublayers.gaps
    assert all([s.role for s in block] == ["mixer", "mlp"] for block in sublayers.blocks)
    assert {s.scale for block in sublayers.blocks for s in block} == {1.0}


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "granite", "bloom", "qwen3_next", "falcon_h1", "opt"])
def test_low_precision_finds_the_same_sublayers(family):
    exact, rounded = found(tiny(family)), found(tiny(family).to(torch.bfloat16))
    assert rounded.exact
    for block, other in zip(exact.blocks, rounded.blocks, strict=True):
        assert [(s.role, s.module, s.residual_path) for s in block] == [
            (s.role, s.module, s.residual_path) for s in other
        ]
        assert [s.scale for s in block] == pytest.approx([s.scale for s in other], rel=2e-3)


class History(PlantedModel):
    """Blocks that write what their mixer adds to a list, which later blocks read."""

    def __init__(self, config: PlantedConfig):
        super().__init__(config)
        width = 2 * config.vocab_size
        self.blocks = nn.ModuleList(HistoryBlock(width, index) for index in range(config.n_blocks))

    def forward(self, input_ids, attention_mask=None):
        hidden, history = self.embedding(input_ids), []
        for block in self.blocks:
            hidden = block(hidden, history)
        return CausalLMOutput(logits=self.head(hidden))


class Mean(nn.Module):
    """The mean over the positions so far, mixed."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return self.linear(x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[None, :, None])


class HistoryBlock(nn.Module):
    def __init__(self, width: int, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.self_attn = Mean(width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x, history):
        earlier = sum(history) / len(history) if history else torch.zeros_like(x)
        added = self.self_attn(x + earlier)
        history.append(added)
        return x + added + self.mlp(x + added)


def test_a_block_that_writes_to_what_others_read_runs_once_in_a_forward():
    """Otherwise the ablated part would stand in the history beside the one that it replaces."""
    model = History(PlantedConfig(n_blocks=4)).eval()
    traced = tracer.load(model, word_tokenizer(64))
    assert traced.engine == "full"
    ids = [5, 6, 7, 8, 9]
    probe = Probe(prompt_ids=tuple(ids), target_id=9, group="g", id="p")
    result = tracer.trace(traced, [probe], parts=["mixer", "mlp"], progress=False)
    for part, name in (("mixer", "self_attn"), ("mlp", "mlp")):
        for block in range(4):
            module = getattr(model.blocks[block], name)
            handle = module.register_forward_hook(lambda module, args, output: torch.zeros_like(output))
            with torch.no_grad():
                expected = model(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)[9].item()
            handle.remove()
            assert result.arrays[f"log_p_zero_{part}"][block, 0] == pytest.approx(expected, abs=1e-5)
