"""The lens by whole forwards: the same function as the replayed tail, and the only one where the tail needs more."""

import every_model
import numpy as np
import oracle
import pytest
import torch
from tiny import tiny, word_tokenizer

import tracer
from tracer.ablations import Edits, sweep
from tracer.engine import Reads, run
from tracer.logit_lens import open_lens
from tracer.models.plain import evaluating
from tracer.models.selfcheck import open_plain
from tracer.models.tokens import TokenBatch
from tracer.plots import save_figures

PROBES = [
    tracer.Probe(" ".join(f"w{3 + (7 * i + 5 * j) % 100}" for j in range(4 + i % 4)), f" w{20 + i % 9}", "g", f"p{i}")
    for i in range(54)
]
BATCH = TokenBatch.from_rows([[5, 6, 7, 8, 9], [10, 11, 12]])
READS = Reads(torch.tensor([0, 1, 1]), torch.tensor([4, 1, 2]))


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "mamba2", "qwen3_next"])
def test_whole_forwards_and_the_replayed_tail_are_one_function(family):
    model = tiny(family)
    adapter, _ = open_plain(model)
    variants = sweep(["zero"], range(4), 1)
    edits = Edits(adapter, BATCH.mask.bool(), ("a", "b"), BATCH.lengths)
    with evaluating(model):
        streams = run(adapter, BATCH, READS, variants, edits, engine="onepass")
        both = [
            open_lens(tail, adapter, BATCH, READS, variants, edits, streams).logits(range(9), [0, 1, 2])
            for tail in ("replayed", "whole")
        ]
    assert both[0].shape == (9, 3, adapter.anatomy.vocab)
    assert torch.allclose(both[0].log_softmax(-1), both[1].log_softmax(-1), atol=1e-4)
    assert not torch.allclose(both[0][0].log_softmax(-1), both[0][4].log_softmax(-1), atol=0.1)


@pytest.mark.parametrize("model_type", ["reformer", "inkling2_text", "blt"])
def test_trace_of_models_whose_tail_needs_more_than_the_last_residual(model_type, tmp_path):
    model = every_model.build(model_type)
    traced = tracer.load(model, word_tokenizer())
    assert traced.self_check.tail == "whole"
    result = tracer.trace(traced, PROBES, progress=False, out=tmp_path / "run")
    for row in (0, 3, 7):
        ids = [int(word[1:]) for word in PROBES[row].prompt.split()]
        clean = oracle.forward(model, ids)[-1]
        assert result.arrays["log_p"][-1, row] == pytest.approx(clean[20 + row % 9].item(), abs=1e-4)
    again = tracer.TraceResult.load(tmp_path / "run")
    tokens = traced.anatomy.position_dim is not None
    assert np.isnan(again.arrays["norm"]).all() != tokens
    assert ("cka" in again.arrays) == tokens
    assert any("not tokens" in note for note in again.run["warnings"]) != tokens
    save_figures(again, tmp_path / "figures")
    if not tokens:
        for options in ({"ablations": ["mean"]}, {"positions": "last"}):
            with pytest.raises(tracer.InputError, match="positions that are not tokens"):
                tracer.trace(traced, PROBES, progress=False, **options)


def test_a_tail_that_moves_information_between_positions_is_said():
    check = open_plain(every_model.build("blt"))[1]
    assert any("local_decoder" in note and "between positions" in note for note in check.notes)
    assert open_plain(every_model.build("inkling2_text"))[1].notes == ()
