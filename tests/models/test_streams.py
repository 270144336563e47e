"""The lens replays the model's own tail: norm once, bias, scale and soft-cap exactly once, at every depth."""

import oracle
import pytest
import torch
from tiny import VOCAB, tiny

from tracer.models.selfcheck import open_plain
from tracer.models.streams import positions_of, read_streams, unembed
from tracer.models.tokens import TokenBatch

BATCH = TokenBatch.from_rows([[5, 6, 7, 8, 9, 10, 11]])


def lens(model: torch.nn.Module, edit=lambda x: x, depth: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of every position at a depth by the model's own tail, and the (edited) stream they come from."""
    adapter, _ = open_plain(model)
    with torch.no_grad():
        stream = edit(read_streams(adapter, BATCH).states[depth][0])
        rows, positions = torch.zeros(7, dtype=torch.int64), torch.arange(7)
        return unembed(adapter, positions_of(adapter.anatomy, stream, rows, positions), BATCH.ids[0]), stream[0]


def by_hand(model: torch.nn.Module, stream: torch.Tensor) -> torch.Tensor:
    """Final norm and head, without what the model does to the logits afterwards."""
    body = getattr(model, model.base_model_prefix)
    norm = next(getattr(body, n) for n in ("norm", "final_layernorm", "ln_f", "norm_f") if hasattr(body, n))
    with torch.no_grad():
        return model.get_output_embeddings()(norm(stream))


@pytest.mark.parametrize("family", ["llama", "olmo2", "granite", "gemma2", "mamba"])
def test_rms_norm_is_computed_on_each_depths_own_stream(family):
    """A lens with the cached scale of the last depth would change when the stream is multiplied."""
    model = tiny(family)
    plain, _ = lens(model)
    scaled, _ = lens(model, lambda x: 7 * x)
    assert torch.allclose(plain.log_softmax(-1), scaled.log_softmax(-1), atol=1e-3)


def test_soft_cap_is_applied_exactly_once_at_every_depth():
    model = tiny("gemma2", final_logit_softcapping=1.0)
    for depth in range(5):
        ours, stream = lens(model, depth=depth)
        raw = by_hand(model, stream)
        capped = torch.tanh(raw)
        assert torch.allclose(ours, capped, atol=1e-5)
        assert not torch.allclose(ours, raw, atol=0.1)
        assert not torch.allclose(ours, torch.tanh(capped), atol=0.1)


@pytest.mark.parametrize(("family", "scale"), [("granite", 1 / 8), ("falcon_h1", 0.5), ("cohere", 1 / 16)])
def test_logit_scale_is_applied_exactly_once_however_often_the_model_is_opened(family, scale):
    model = tiny(family)
    for _ in range(2):
        ours, stream = lens(model)
        assert torch.allclose(ours, scale * by_hand(model, stream), atol=1e-4)


@pytest.mark.parametrize("family", ["phi", "gptj"])
def test_head_bias_counts_at_every_depth(family):
    model = tiny(family)
    with torch.no_grad():
        model.lm_head.bias.normal_(0, 3, generator=torch.Generator().manual_seed(0))
        norm = model.model.final_layernorm if family == "phi" else model.transformer.ln_f
        norm.bias.zero_()
    of_nothing, _ = lens(model, torch.zeros_like)
    assert torch.allclose(of_nothing, model.lm_head.bias.expand(7, VOCAB), atol=1e-5)


def test_norm_weight_that_is_one_plus_w():
    """With a zero weight Gemma's norm is the identity scale, not zero."""
    model = tiny("gemma3")
    with torch.no_grad():
        model.model.norm.weight.zero_()
    assert open_plain(model)[1].engine == "onepass"
    logits, _ = lens(model, depth=4)
    assert torch.allclose(logits.double().log_softmax(-1), oracle.forward(model, BATCH.ids[0].tolist()), atol=1e-4)
    assert logits.std() > 0.1


def test_what_was_read_is_not_changed_by_later_edits_in_place():
    model = tiny("llama")
    adapter, _ = open_plain(model)
    with torch.no_grad():
        before = read_streams(adapter, BATCH).states[1][0]

    def zeroes_in_place(module, args):
        args[0][:, -1] = 0

    handle = oracle.blocks_of(model)[1].register_forward_pre_hook(zeroes_in_place)
    try:
        with torch.no_grad():
            after = read_streams(adapter, BATCH).states[1][0]
    finally:
        handle.remove()
    assert torch.equal(before, after)


def test_a_recorder_changes_nothing():
    model = tiny("bloom")
    adapter, _ = open_plain(model)
    with torch.no_grad():
        plain = model(input_ids=BATCH.ids, attention_mask=BATCH.mask, use_cache=False).logits
        assert torch.equal(read_streams(adapter, BATCH).logits, plain)
