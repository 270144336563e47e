"""The tuned lens against oracles: a model whose lens is known exactly, a slow plain way, and real weights."""

import json
import random
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics

import every_model
import numpy as np
import oracle
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import VOCAB, tiny, word_tokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

import tracer
from tracer.cli import main
from tracer.models.anatomy import Anatomy
from tracer.models.catalogue import cached_folder
from tracer.models.streams import positions_of, read_streams, unembed
from tracer.models.tokens import TokenBatch
from tracer.tuned_lens import TunedLens, fitting, regression, train_tuned_lens
from tracer.tuned_lens import lens as lens_module
from tracer.tuned_lens.regression import Moments
from tracer.tuned_lens.text import split_text

D = 32
SMOLLM2 = "smollm2-135m-instruct-q4_1"


def words(seed: int, n: int, size: int = VOCAB) -> str:
    generator = random.Random(seed)
    return " ".join(f"w{generator.randrange(size)}" for _ in range(n))


TEXT = [words(seed, 150) for seed in range(12)]
SMALL = {"tokens": 1500, "seq_length": 24, "steps": 24, "batch": 24, "progress": False}


class RotatingConfig(PretrainedConfig):
    model_type = "rotating"


class Rotation(nn.Module):
    """Turns the whole stream by a fixed rotation and shifts it."""

    def __init__(self, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.turn = nn.Linear(D, D)
        with torch.no_grad():
            self.turn.weight.copy_(torch.linalg.qr(torch.randn(D, D, generator=generator))[0])
            self.turn.bias.copy_(torch.randn(D, generator=generator))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.turn(hidden)


class RotatingModel(PreTrainedModel):
    """Every block is a known affine map, so that the translator of every depth is known exactly."""

    config_class = RotatingConfig

    def __init__(self, config: RotatingConfig):
        super().__init__(config)
        generator = torch.Generator().manual_seed(7)
        self.embedding = nn.Embedding(VOCAB, D)
        self.blocks = nn.ModuleList(Rotation(seed) for seed in range(3))
        self.head = nn.Linear(D, VOCAB, bias=False)
        with torch.no_grad():
            self.embedding.weight.copy_(torch.randn(VOCAB, D, generator=generator))
            self.head.weight.copy_(0.5 * torch.randn(VOCAB, D, generator=generator))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """The weights are known, not drawn."""

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> CausalLMOutput:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return CausalLMOutput(logits=self.head(hidden))


@pytest.fixture(scope="module")
def llama() -> tracer.TracedModel:
    return tracer.load(tiny("llama"), word_tokenizer(), progress=False)


@pytest.fixture(scope="module")
def llama_lens(llama) -> TunedLens:
    return train_tuned_lens(llama, TEXT, **SMALL)


# --- against known answers -----------------------------------------------------------------------------------------


def test_lens_of_a_model_that_rotates_its_stream_is_the_rotation():
    model = RotatingModel(RotatingConfig()).eval()
    traced = tracer.load(model, word_tokenizer(), progress=False)
    lens = train_tuned_lens(traced, TEXT, **SMALL)
    table = lens.to_frame()
    assert (table["kl_plain"] > 1).all()
    assert (table["kl_tuned"] < 1e-4).all()
    assert (table["drop_low"] > 1).all()
    weight, bias = torch.eye(D), torch.zeros(D)
    for depth in (2, 1, 0):
        turn = model.blocks[depth].turn
        weight, bias = weight @ turn.weight.detach(), weight @ turn.bias.detach() + bias
        assert torch.allclose(lens.weight[depth] + torch.eye(D), weight, atol=2e-3)
        assert torch.allclose(lens.bias[depth], bias, atol=2e-3)


def test_numbers_on_held_out_text_by_whole_forwards(llama, llama_lens):
    """The reported KL of both lenses, position by position, from the model alone."""
    arguments = {"tokens": 1500, "seq_length": 24, "held_out": 0.1, "needed": 256, "seed": 0}
    split = split_text(llama, TEXT, **arguments)
    model, expected = llama.model, {depth: [] for depth in range(4)}
    for item in split.held_out:
        ids = list(item.ids)
        log_p = oracle.forward(model, ids)
        for depth, stream in enumerate(oracle.streams(model, ids)[:-1]):
            moved = stream + stream @ llama_lens.weight[depth].T + llama_lens.bias[depth]
            both = [oracle.lens(model, ids, x)[item.skip :] for x in (stream, moved)]
            expected[depth].append([(log_p.exp()[item.skip :] * (log_p[item.skip :] - q)).sum(-1) for q in both])
    table = llama_lens.to_frame()
    assert table["n"].tolist() == [sum(len(item.ids) - 1 for item in split.held_out)] * 4
    for depth, found in expected.items():
        plain, tuned = (torch.cat([part[i] for part in found]).mean().item() for i in (0, 1))
        assert table.loc[depth, "kl_plain"] == pytest.approx(plain, abs=1e-5)
        assert table.loc[depth, "kl_tuned"] == pytest.approx(tuned, abs=1e-5)
        assert table.loc[depth, "drop"] == pytest.approx(plain - tuned, abs=1e-5)
    for name in ("kl_plain", "kl_tuned", "drop"):
        assert (table[f"{name}_low"] < table[name]).all()
        assert (table[name] < table[f"{name}_high"]).all()


def test_regression_is_weighted_least_squares(monkeypatch):
    monkeypatch.setattr(regression, "RIDGES", (0.0, 1e-3, 1.0))
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(400, 6, generator=generator) @ torch.randn(6, 6, generator=generator) + 3
    last = h @ torch.randn(6, 6, generator=generator) + torch.randn(400, 6, generator=generator)
    sums = Moments(6, torch.device("cpu"))
    for part in range(0, 400, 64):
        sums.add(h[part : part + 64], last[part : part + 64])
    counts = last.double().norm(dim=1) ** -1
    design = torch.cat([h.double(), torch.ones(400, 1, dtype=torch.float64)], 1)
    exact = torch.linalg.lstsq(design * counts[:, None], (last - h).double() * counts[:, None]).solution
    ridge, weight, bias = next(iter(sums.solutions()))
    assert ridge == 0
    assert torch.allclose(weight, exact[:-1].T, atol=1e-6)
    assert torch.allclose(bias, exact[-1], atol=1e-6)
    sizes = [weight.norm().item() for _, weight, _ in sums.solutions()]
    assert sizes == sorted(sizes, reverse=True)


def test_gradient_steps_go_below_the_regression_and_bad_ones_are_not_kept(llama, llama_lens, monkeypatch):
    regression = train_tuned_lens(llama, TEXT, **SMALL | {"steps": 0})
    assert (regression.to_frame()["steps"] == 0).all()
    assert (llama_lens.to_frame()["steps"] > 0).all()
    assert llama_lens.to_frame()["kl_tuned"].mean() < regression.to_frame()["kl_tuned"].mean() - 0.02
    monkeypatch.setattr(fitting, "LEARNING_RATE", 1e4)
    wild = train_tuned_lens(llama, TEXT, **SMALL)
    assert (wild.to_frame()["steps"] == 0).all()
    assert torch.equal(wild.weight, regression.weight)
    assert torch.equal(wild.bias, regression.bias)


def test_correction_is_the_same_map_in_both_forms():
    parts = [torch.randn(6), torch.rand(6) + 0.5, 3.0, nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6))]
    correction = fitting.Correction(*parts)
    h = 5 + torch.randn(9, 6)
    weight, bias = correction.folded()
    assert torch.allclose(correction(h).detach(), h @ weight.T + bias, atol=1e-4)


def test_a_regression_that_is_worse_than_the_plain_lens_is_not_used(llama, monkeypatch):
    mirrored = -2 * torch.eye(64, dtype=torch.float64)
    monkeypatch.setattr(Moments, "solutions", lambda self: iter([(1.0, mirrored, mirrored.new_zeros(64))]))
    lens = train_tuned_lens(llama, TEXT, **SMALL | {"steps": 0})
    table = lens.to_frame()
    assert (table["start"] == "identity").all()
    assert table["ridge"].isna().all()
    assert not lens.weight.any()
    assert not lens.bias.any()
    assert table["kl_tuned"].tolist() == table["kl_plain"].tolist()
    assert "NOT lower at depth 0, 1, 2, 3" in lens.summary()


def test_where_the_plain_lens_is_exact_nothing_is_translated():
    """Blocks that do nothing: the regression fits rounding at best, and the gradient steps cannot improve on 0."""
    model = tiny("llama")
    with torch.no_grad():
        for block in model.model.layers[2:]:
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
    lens = train_tuned_lens(tracer.load(model, word_tokenizer(), progress=False), TEXT, **SMALL)
    assert lens.to_frame()["kl_plain"][2:].tolist() == pytest.approx([0, 0], abs=1e-9)
    assert lens.to_frame()["kl_tuned"][2:].tolist() == pytest.approx([0, 0], abs=1e-6)
    assert lens.lowered[:2] == (True, True)


# --- translating ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 1, 8), (1, 5, 8), (5, 1, 2, 4)])
def test_zeros_translate_to_the_very_same_stream(dtype, shape):
    batch_dim = 1 if shape[0] == 1 else 0
    anatomy = layout(shape, batch_dim)
    stream = 1000 * torch.randn(shape, dtype=torch.float64).to(dtype)
    lens = TunedLens(torch.zeros(3, 8, 8), torch.zeros(3, 8), "", "", {})
    for depth in range(4):
        assert torch.equal(lens.translate(anatomy, depth, stream), stream)
    for depth in (-1, 4):
        with pytest.raises(tracer.InputError, match=f"no depth {depth}: this tuned lens has depths 0 to 3"):
            lens.translate(anatomy, depth, stream)


@pytest.mark.parametrize("shape", [(5, 1, 8), (1, 5, 8), (5, 1, 2, 4)])
def test_translation_is_affine_in_all_inner_dimensions(shape):
    anatomy = layout(shape, 1 if shape[0] == 1 else 0)
    lens = TunedLens(torch.randn(2, 8, 8), torch.randn(2, 8), "", "", {})
    stream = torch.randn(shape)
    moved = lens.translate(anatomy, 1, stream)
    assert moved.shape == stream.shape
    for h, found in zip(stream.reshape(5, 8), moved.reshape(5, 8), strict=True):
        assert torch.allclose(found, h + lens.weight[1] @ h + lens.bias[1], atol=1e-5)


def layout(shape: tuple[int, ...], batch_dim: int) -> Anatomy:
    """Where batch and positions are; nothing else of the anatomy is asked for."""
    anatomy = tracer.load(tiny("llama"), progress=False).anatomy
    return replace(anatomy, batch_dim=batch_dim, position_dim=1 - batch_dim, stream_shape=shape)


def test_read_through_the_models_own_norm_and_head(llama, llama_lens):
    model, anatomy = llama.model, llama.anatomy
    batch = TokenBatch.from_rows([[5, 6, 7, 8]])
    rows, positions = torch.zeros(4, dtype=torch.int64), torch.arange(4)
    with torch.no_grad():
        for depth, state in enumerate(read_streams(llama.adapter, batch).states):
            stream = positions_of(anatomy, state[0], rows, positions)
            logits = unembed(llama.adapter, llama_lens.translate(anatomy, depth, stream), batch.ids[0])
            h = state[0][0]
            moved = h if depth == 4 else h + h @ llama_lens.weight[depth].T + llama_lens.bias[depth]
            assert torch.allclose(logits, model.lm_head(model.model.norm(moved)), atol=1e-5)
    assert torch.allclose(logits.log_softmax(-1).double(), oracle.forward(model, [5, 6, 7, 8]), atol=1e-4)


# --- every kind of model -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gemma2", "mamba2", "gpt2"])
def test_families(family):
    """A soft-cap, a recurrence, biases."""
    lens = train_tuned_lens(tracer.load(tiny(family), word_tokenizer(), progress=False), TEXT, **SMALL)
    assert lens.lowered == (True,) * 4
    assert (lens.to_frame()["start"] == "regression").all()


@pytest.mark.parametrize("model_type", ["deepseek_v4", "gemma4_text"])
def test_stream_of_four_dimensions_and_blocks_that_share_state(model_type):
    traced = tracer.load(every_model.build(model_type), word_tokenizer(), progress=False)
    assert len(traced.anatomy.stream_shape) == (4 if model_type == "deepseek_v4" else 3)
    assert traced.engine == ("onepass" if model_type == "deepseek_v4" else "full")
    lens = train_tuned_lens(traced, TEXT, **SMALL)
    assert lens.bias.shape == (traced.n_blocks, int(np.prod(traced.anatomy.stream_shape[2:])))
    assert all(lens.lowered)
    lens.check(traced)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_translators_are_float32_for_every_data_type(dtype):
    traced = tracer.load(tiny("llama").to(dtype), word_tokenizer(), progress=False)
    lens = train_tuned_lens(traced, TEXT, **SMALL)
    assert lens.weight.dtype == torch.float32
    assert all(lens.lowered)


def test_a_tail_that_cannot_be_replayed_is_refused():
    traced = tracer.load(every_model.build("inkling2_text"), word_tokenizer(), progress=False)
    with pytest.raises(tracer.InputError, match="no tuned lens for .*: the tail needs more than the last residual"):
        train_tuned_lens(traced, TEXT, **SMALL)


def test_a_tail_without_gradients_is_refused():
    model = tiny("llama")
    head = model.lm_head.forward
    model.lm_head.forward = lambda x: head(x.detach())
    with pytest.raises(tracer.InputError, match="no gradient passes through the tail"):
        train_tuned_lens(tracer.load(model, word_tokenizer(), progress=False), TEXT, **SMALL)


# --- what is left of a training ------------------------------------------------------------------------------------


def state_of(model: nn.Module) -> list[object]:
    modules = list(model.modules())
    return [
        [(name, tensor.clone()) for name, tensor in model.state_dict().items()],
        [(p.requires_grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()],
        [module.training for module in modules],
        [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in modules],
        [sorted(module.__dict__) for module in modules],
    ]


def same(x: object, y: object) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return torch.equal(x, y)
    if isinstance(x, list | tuple) and isinstance(y, list | tuple):
        return len(x) == len(y) and all(map(same, x, y))
    return x == y


@pytest.mark.parametrize("broken_off", [False, True])
def test_the_model_is_left_as_it_was(broken_off, monkeypatch, tmp_path):
    model = tiny("llama").train()
    model.model.layers[1].eval()
    model.model.norm.weight.requires_grad_(False)
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    traced = tracer.load(model, word_tokenizer(), progress=False)
    before = state_of(model)
    if broken_off:
        monkeypatch.setattr(torch.optim.Adam, "step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train_tuned_lens(traced, TEXT, out=tmp_path / "new" / "lens.safetensors", **SMALL)
        assert list(tmp_path.iterdir()) == []
    else:
        train_tuned_lens(traced, TEXT, **SMALL)
    assert same(state_of(model), before)
    assert torch.is_grad_enabled()


def interrupt(*args: object, **kwargs: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["save_file", "replace"])
def test_broken_off_while_writing(where, llama_lens, monkeypatch, tmp_path):
    target = tmp_path / "lens.safetensors"
    monkeypatch.setattr(
        *{"save_file": (lens_module, "save_file"), "replace": (lens_module.os, "replace")}[where], interrupt
    )
    with pytest.raises(KeyboardInterrupt):
        llama_lens.save(target)
    assert list(tmp_path.iterdir()) == []


def test_same_seed_same_lens(llama, llama_lens):
    again = train_tuned_lens(llama, TEXT, **SMALL)
    assert torch.equal(again.weight, llama_lens.weight)
    assert torch.equal(again.bias, llama_lens.bias)
    assert again.to_frame().equals(llama_lens.to_frame())
    other = train_tuned_lens(llama, TEXT, seed=1, **SMALL)
    assert not torch.equal(other.weight, llama_lens.weight)


# --- the file ------------------------------------------------------------------------------------------------------


def test_saved_and_loaded_bit_by_bit(llama_lens, tmp_path):
    path = llama_lens.save(tmp_path / "new" / "lens.safetensors")
    assert [file.name for file in path.parent.iterdir()] == ["lens.safetensors"]
    again = TunedLens.load(path)
    assert torch.equal(again.weight, llama_lens.weight)
    assert torch.equal(again.bias, llama_lens.bias)
    assert (again.tail_hash, again.model) == (llama_lens.tail_hash, llama_lens.model)
    assert again.record == json.loads(json.dumps(llama_lens.record))
    assert again.to_frame().equals(llama_lens.to_frame())
    assert again.summary() == llama_lens.summary()
    assert set(load_file(path)) == {"weight", "bias"}


def test_only_force_replaces(llama_lens, tmp_path):
    path = tmp_path / "lens.safetensors"
    path.write_text("mine")
    with pytest.raises(tracer.InputError, match="is there already: pass another file, or force"):
        llama_lens.save(path)
    assert path.read_text() == "mine"
    llama_lens.save(path, force=True)
    assert torch.equal(TunedLens.load(path).weight, llama_lens.weight)
    with pytest.raises(tracer.InputError, match="is a folder: pass a file"):
        llama_lens.save(tmp_path, force=True)
    with pytest.raises(tracer.InputError, match="cannot write"):
        llama_lens.save(path / "under-a-file.safetensors")


def test_files_that_are_no_lens(llama_lens, tmp_path):
    other, cut, later = (tmp_path / f"{name}.safetensors" for name in ("other", "cut", "later"))
    save_file({"weight": torch.zeros(1)}, other)
    cut.write_bytes(llama_lens.save(tmp_path / "whole.safetensors").read_bytes()[:-100])
    save_file({"weight": torch.zeros(1)}, later, {"format": lens_module.FORMAT, "schema": "99"})
    for path, message in (
        (tmp_path / "none", "no tuned lens .*none"),
        (other, "is not a tuned lens"),
        (cut, "is damaged"),
        (later, "has tuned-lens schema 99, this version reads 1"),
    ):
        with pytest.raises(tracer.InputError, match=message):
            TunedLens.load(path)


# --- which models it belongs to ------------------------------------------------------------------------------------


def opened(model: nn.Module, **options: object) -> tracer.TracedModel:
    return tracer.load(model, progress=False, **options)


@pytest.fixture(scope="module")
def folder(llama, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    llama.model.save_pretrained(path)
    word_tokenizer().save_pretrained(path)
    return path


@pytest.mark.parametrize("backend", ["hooks", "auto"])
def test_the_same_weights_opened_again_are_accepted(backend, llama_lens, folder):
    """With a bridge of TransformerLens around them or not."""
    llama_lens.check(opened(str(folder), backend=backend, dtype="float32"))


@pytest.mark.parametrize("tied", [False, True])
def test_a_bridge_has_the_tail_of_the_model_under_it(tied, tmp_path):
    tiny("llama", tie_word_embeddings=tied).save_pretrained(tmp_path)
    plain, bridged = (opened(str(tmp_path), backend=backend) for backend in ("hooks", "auto"))
    if bridged.backend != "transformer_lens":
        pytest.skip("needs a TransformerBridge")
    assert bridged.tail_fingerprint() == plain.tail_fingerprint()


def test_a_checkpoint_whose_blocks_changed_is_accepted(llama_lens):
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight.add_(0.1)
        model.model.embed_tokens.weight.add_(0.1)
    llama_lens.check(opened(model))


@pytest.mark.parametrize("changed", ["model.norm.weight", "lm_head.weight"])
def test_another_norm_or_head_is_refused(changed, llama_lens):
    model = tiny("llama")
    with torch.no_grad():
        model.get_parameter(changed).flatten()[3] += 1e-3
    with pytest.raises(tracer.InputError, match=f"with the tail {llama_lens.tail_hash}, but .* has the tail"):
        llama_lens.check(opened(model))


def test_a_head_that_is_tied_to_the_embedding_counts():
    lenses = []
    for shift in (0.0, 0.1):
        model = tiny("llama", tie_word_embeddings=True)
        with torch.no_grad():
            model.model.embed_tokens.weight[3] += shift
        lenses.append(opened(model).tail_fingerprint())
    assert lenses[0] != lenses[1]


def test_the_same_weights_under_another_soft_cap_are_another_tail():
    weights, hashes = tiny("gemma2").state_dict(), []
    for cap in (3.0, 3.0, 30.0):
        model = tiny("gemma2", final_logit_softcapping=cap)
        model.load_state_dict(weights)
        hashes.append(opened(model).tail_fingerprint())
    assert hashes[0] == hashes[1] != hashes[2]


def test_another_shape_or_data_type_is_refused(llama_lens):
    for options, message in (
        ({"num_hidden_layers": 3}, "with 4 blocks and a stream of width 64, but .* has 3 blocks and width 64"),
        ({"hidden_size": 32}, "with 4 blocks and a stream of width 64, but .* has 4 blocks and width 32"),
    ):
        with pytest.raises(tracer.InputError, match=message):
            llama_lens.check(opened(tiny("llama", **options)))
    with pytest.raises(tracer.InputError, match=r"\(float32\) .* \(bfloat16\) .* in the same data type"):
        llama_lens.check(opened(tiny("llama").bfloat16()))


# --- text ----------------------------------------------------------------------------------------------------------


def split(model: tracer.TracedModel, text: object, **options: object):
    return split_text(
        model, text, **{"tokens": 3000, "seq_length": 24, "held_out": 0.1, "needed": 256, "seed": 0} | options
    )


def test_parts_have_no_sequence_in_common(llama):
    text = [words(seed % 3, 200) for seed in range(12)]  # every document four times
    parts = split(llama, text)
    found = [{item.ids for item in part} for part in (parts.train, parts.validation, parts.held_out)]
    assert sum(map(len, found)) == len(set().union(*found)) == 3 * 9
    assert parts.unit == "sequence"
    assert parts.tokens == 3 * 200
    assert [len(part) for part in found] == [23, 2, 2]
    assert split(llama, text) == parts
    assert split(llama, text, seed=1) != parts


def test_whole_documents_are_held_out_where_there_are_enough(llama):
    text = [words(seed, 60) for seed in range(90)]
    parts = split(llama, text, tokens=90 * 60)
    assert parts.unit == "document"
    units = [{item.unit for item in part} for part in (parts.train, parts.validation, parts.held_out)]
    assert [len(part) for part in units] == [72, 9, 9]
    assert len(set().union(*units)) == 90


def test_one_large_document_among_small_ones_is_for_training(llama):
    text = [words(99, 3000), *(words(seed, 30) for seed in range(90))]
    for seed in range(8):
        parts = split(llama, text, tokens=6000, seed=seed)
        assert parts.unit == "document"
        assert sum(len(item.ids) for item in parts.train) > 3000


def test_sequences_begin_as_documents_do_and_that_is_not_read(llama):
    tokenizer = word_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "w1"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="w1 $A", special_tokens=[("w1", 1)])
    traced = replace(llama, opened=replace(llama.opened, tokenizer=tokenizer))
    parts = split(traced, [words(0, 600)])
    assert all(item.ids[0] == 1 and item.skip == 1 and len(item.ids) <= 24 for item in parts.train)
    assert all(item.skip == 1 for item in split(llama, [words(0, 600)]).train)


def test_files_and_folders_are_read_like_documents(llama, tmp_path):
    for name, text in zip("abc", TEXT, strict=False):
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    (tmp_path / "notes.md").write_text("w1 " * 1000)
    parts = split(llama, tmp_path)
    assert parts.tokens == 450
    assert parts.name == tmp_path.name
    assert {item.ids for item in parts.train} == {item.ids for item in split(llama, TEXT[:3]).train}
    assert split(llama, str(tmp_path / "a.txt"), needed=100, seq_length=12).tokens == 150


def test_no_more_is_read_than_asked_for(llama):
    assert 576 <= split(llama, [words(0, 5000)], tokens=600).tokens <= 600
    repeated = [*[words(0, 300)] * 30, words(1, 300)]
    assert split(llama, repeated, tokens=600).tokens == 600


def test_text_that_cannot_be_used(llama, tmp_path):
    empty, binary, folder = tmp_path / "empty.txt", tmp_path / "binary.txt", tmp_path / "folder"
    empty.write_text("")
    binary.write_bytes("w1 é".encode("latin-1") * 999)
    folder.mkdir()
    short = words(0, 100)
    for text, message in (
        (tmp_path / "none.txt", "no text .*none.txt"),
        (str(tmp_path / "none.txt"), "no text .*none.txt"),
        (folder, "holds no .txt file"),
        (empty, "gives 0 tokens in 0 different sequences, but .* needs at least 256 in 8: pass more text"),
        ([], "'0 documents' gives 0 tokens"),
        ([short], "gives 100 tokens in 5 different sequences, but .* needs at least 256 in 8"),
        ([short] * 100, "gives 100 tokens in 5 different"),
        (binary, "is not UTF-8 text"),
    ):
        with pytest.raises(tracer.InputError, match=message) as error:
            train_tuned_lens(llama, text, **SMALL)
        assert "\n" not in str(error.value)
    with pytest.raises(tracer.InputError, match="pass more text, or more than tokens=100"):
        train_tuned_lens(llama, TEXT, **SMALL | {"tokens": 100})


def test_arguments_that_cannot_be_used(llama, tmp_path):
    used = tmp_path / "used.safetensors"
    used.write_text("")
    for options, message in (
        ({"seq_length": 300}, "seq_length=300: .* has 256 positions"),
        ({"seq_length": 1}, "seq_length=1: pass at least 4"),
        ({"tokens": 0}, "tokens=0: pass at least 1"),
        ({"steps": -1}, "steps=-1: pass at least 0"),
        ({"batch": 0}, "batch=0: pass 1 to"),
        ({"held_out": 0.0}, "held_out=0.0: pass a share above 0"),
        ({"held_out": 0.5}, "held_out=0.5: pass a share above 0 and up to 0.25"),
        ({"out": used}, "is there already"),
    ):
        with pytest.raises(tracer.InputError, match=message):
            train_tuned_lens(llama, TEXT, **SMALL | options)
    with pytest.raises(tracer.InputError, match="has no tokenizer to read text with"):
        train_tuned_lens(opened(tiny("llama")), TEXT, **SMALL)
    with pytest.raises(tracer.InputError, match="gives token 199, but .* has 128 tokens"):
        train_tuned_lens(opened(tiny("llama"), tokenizer=word_tokenizer(200)), [words(1, 2000, 200)], **SMALL)


# --- showing it ----------------------------------------------------------------------------------------------------


def test_summary_says_what_was_lowered(llama_lens):
    text = llama_lens.summary()
    for row in llama_lens.record["depths"]:
        assert f"{row['kl_plain']:.3f} [" in text
    assert "Lower at every depth below the last" in text
    assert "95 % intervals" in text
    assert max(map(len, text.splitlines())) <= 120
    rows = [row | {"drop": -1.0} if row["depth"] == 2 else row for row in llama_lens.record["depths"]]
    worse = replace(llama_lens, record=llama_lens.record | {"depths": rows})
    assert worse.lowered == (True, True, False, True)
    assert "NOT lower at depth 2" in worse.summary()
    rows = [row | {"drop_low": -1.0} if row["depth"] == 1 else row for row in llama_lens.record["depths"]]
    unsure = replace(llama_lens, record=llama_lens.record | {"depths": rows})
    assert "Lower by less than the interval tells at depth 1" in unsure.summary()


def test_figure_shows_both_lenses(llama_lens, tmp_path):
    figure = llama_lens.plot()
    axes = figure.axes[0]
    table = llama_lens.to_frame()
    for line, name in zip(axes.lines, ("kl_plain", "kl_tuned"), strict=True):
        assert line.get_xdata().tolist() == [0, 1, 2, 3]
        assert line.get_ydata().tolist() == table[name].tolist()
    assert axes.get_yscale() == "log"
    assert len(axes.collections) == 2
    assert str(table["n"][0]) in figure.get_supxlabel()
    figure.savefig(tmp_path / "lens.png")


# --- the command ---------------------------------------------------------------------------------------------------


def test_command_trains_saves_and_reports(capsys, folder, tmp_path):
    text, out = tmp_path / "text.txt", tmp_path / "lens.safetensors"
    text.write_text("\n\n".join(TEXT))
    options = ["--tokens", "1500", "--seq-length", "24", "--steps", "8", "--dtype", "float32", "-q"]
    command = ["tuned-lens", str(folder), "--text", str(text), "--out", str(out), *options]
    with pytest.raises(SystemExit) as stop:
        main(command)
    assert not stop.value.code
    shown = capsys.readouterr().out
    lens = TunedLens.load(out)
    lens.check(opened(str(folder), dtype="float32"))
    assert lens.record["steps"] == 8
    assert lens.summary() in shown
    assert f"saved in {out}" in shown
    for wrong, message in (
        (command, "is there already"),
        ([*command[:3], str(tmp_path / "none.txt"), *command[4:], "--force"], "no text"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(wrong)
        assert stop.value.code == 2
        lines = capsys.readouterr().err.splitlines()
        assert [line for line in lines if line.startswith("tracer: ")] == lines[-1:]
        assert message in lines[-1]


def test_command_that_is_broken_off_writes_nothing(capsys, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(fitting.Fit, "_descend", interrupt)
    text = tmp_path / "text.txt"
    text.write_text("\n".join(TEXT))
    with pytest.raises(SystemExit) as stop:
        main(["tuned-lens", str(folder), "--text", str(text), "--out", str(tmp_path / "lens.safetensors"), "-q"])
    assert stop.value.code == 130
    assert "nothing was written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


# --- real weights --------------------------------------------------------------------------------------------------


def test_smollm2_is_nearer_to_its_output_at_every_depth(monkeypatch):
    """English prose with code; fewer tokens, steps and positions than by default."""
    if cached_folder(SMOLLM2) is None:
        pytest.skip(f"needs the weights: tracer fetch {SMOLLM2}")
    monkeypatch.setattr(fitting, "VALIDATION_POSITIONS", 64)
    monkeypatch.setattr(fitting, "HELD_OUT_POSITIONS", 128)
    model = tracer.load(SMOLLM2, dtype="float32", backend="hooks", progress=False)
    lens = train_tuned_lens(model, list(topics.values()), tokens=4000, steps=2, progress=False)
    table = lens.to_frame()
    assert table["depth"].tolist() == list(range(30))
    assert lens.lowered == (True,) * 30
    assert (table["drop_low"] > 0).all()
    assert (table["kl_tuned"] < 4).all()
