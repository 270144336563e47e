"""The joint trace from end to end: resume, reload, bad input, and what is kept where."""

import json
import re
import resource
from dataclasses import replace
from functools import partial

import numpy as np
import oracle
import pandas as pd
import pytest
import torch
from planted import planted
from tiny import VOCAB, tiny, word_tokenizer

import tracer
from tracer import ablations, logit_lens, measures, measuring
from tracer.probes import Probe
from tracer.results import FILES, PARTIAL
from tracer.tuned_lens import TunedLens

PROBES = [
    Probe(" ".join(f"w{3 + (i * j) % 50}" for j in range(1, 3 + i % 5)), f" w{60 + i % 12}", f"group-{i % 2}", f"p{i}")
    for i in range(24)
]
SETTINGS = {"ablations": ["zero", "mean", "resample", "noise"], "noise_samples": 8, "progress": False}


@pytest.fixture(scope="module")
def model() -> tracer.TracedModel:
    return tracer.load(tiny("llama"), word_tokenizer())


def same(a: tracer.TraceResult, b: tracer.TraceResult) -> None:
    assert a.arrays.keys() == b.arrays.keys()
    for name, array in a.arrays.items():
        assert np.array_equal(array, b.arrays[name], equal_nan=array.dtype.kind == "f"), name
    pd.testing.assert_frame_equal(a.probes, b.probes)
    pd.testing.assert_frame_equal(a.blocks, b.blocks)
    timeless = [{k: v for k, v in json.loads(json.dumps(r.run)).items() if k != "work"} for r in (a, b)]
    assert timeless[0] == timeless[1]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_saved_result_reloads_as_it_was(model, tmp_path):
    result = tracer.trace(model, PROBES, out=tmp_path / "run", **SETTINGS)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == sorted(FILES)
    again = tracer.TraceResult.load(tmp_path / "run")
    same(result, again)
    assert again.summary() == result.summary()
    assert again.run["arguments"]["noise_samples"] == 8
    assert again.run["model"]["anatomy"]["model_class"] == "LlamaForCausalLM"
    assert [row["id"] for row in lines(tmp_path / "run" / "probes.jsonl")] == [p.id for p in PROBES]


def test_a_missing_value_is_null(model, tmp_path):
    tracer.trace(model, PROBES, out=tmp_path / "run", progress=False)
    rows = lines(tmp_path / "run" / "probes.jsonl")
    assert all(row["particle"] is None for row in rows if not row["answered"] and row["rise"] is None)
    assert any(row["particle"] is None for row in rows)
    assert "NaN" not in (tmp_path / "run" / "run.json").read_text()


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, RuntimeError])
def test_interrupted_trace_goes_on_and_equals_an_uninterrupted_one(model, tmp_path, monkeypatch, interrupt):
    settings = SETTINGS | {"batch_tokens": 128}
    whole = tracer.trace(model, PROBES, out=tmp_path / "whole", **settings)
    assert whole.run["work"]["batches"] >= 4
    real, calls = measuring.run, []

    def breaks(*args, **kwargs):
        if len(calls) == 2:
            raise interrupt("Ctrl-C")
        calls.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(measuring, "run", breaks)
    with pytest.raises(interrupt):
        tracer.trace(model, PROBES, out=tmp_path / "run", **settings)
    assert len(list((tmp_path / "run" / PARTIAL).glob("*.safetensors"))) == 2
    with pytest.raises(tracer.InputError, match="not a finished result.*--resume"):
        tracer.TraceResult.load(tmp_path / "run")
    with pytest.raises(tracer.InputError, match="2 finished batches of an interrupted trace"):
        tracer.trace(model, PROBES, out=tmp_path / "run", **settings)
    with pytest.raises(tracer.InputError, match="begun with another arguments"):
        tracer.trace(model, PROBES, out=tmp_path / "run", resume=True, **(settings | {"seed": 1}))

    counted = []
    monkeypatch.setattr(measuring, "run", lambda *a, **k: counted.append(1) or real(*a, **k))
    resumed = tracer.trace(model, PROBES, out=tmp_path / "run", resume=True, **settings)
    assert len(counted) == whole.run["work"]["batches"] - 2
    same(whole, resumed)
    assert not (tmp_path / "run" / PARTIAL).exists()


def test_interrupted_replacement_keeps_the_old_result_and_can_be_resumed(model, tmp_path, monkeypatch):
    settings = {"batch_tokens": 128, "progress": False}
    old = tracer.trace(model, PROBES, out=tmp_path / "run", **settings)
    real, calls = measuring.run, []

    def breaks(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(measuring, "run", breaks)
    with pytest.raises(KeyboardInterrupt):
        tracer.trace(model, PROBES, out=tmp_path / "run", seed=4, force=True, **settings)
    same(old, tracer.TraceResult.load(tmp_path / "run"))
    new = tracer.trace(model, PROBES, out=tmp_path / "run", seed=4, resume=True, **settings)
    assert new.run["arguments"]["seed"] == 4
    same(new, tracer.TraceResult.load(tmp_path / "run"))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_trace_that_raises_in_the_middle_leaves_the_model_as_it_was(monkeypatch, error):
    live = tiny("llama").train()
    live.model.layers[1].register_forward_hook(lambda module, args, output: None)
    ids = torch.tensor([[5, 6, 7]])

    def state():
        with torch.no_grad():
            hooks = [
                (m.training, len(m._forward_hooks), len(m._forward_pre_hooks), *m.__dict__) for m in live.modules()
            ]
            return hooks, live(input_ids=ids, use_cache=False).logits

    *before, logits = state()
    opened = tracer.load(live, word_tokenizer())

    def breaks(*args, **kwargs):
        raise error("in the middle")

    monkeypatch.setattr(ablations.Edits, "apply", breaks)
    with pytest.raises(error):
        tracer.trace(opened, PROBES, progress=False)
    *after, again = state()
    assert after == before
    assert torch.equal(logits, again)


def test_finished_trace_is_loaded_not_repeated(model, tmp_path, monkeypatch):
    first = tracer.trace(model, PROBES, out=tmp_path / "run", progress=False)
    monkeypatch.setattr(measuring, "run", None)
    same(first, tracer.trace(model, PROBES, out=tmp_path / "run", resume=True, progress=False))
    with pytest.raises(tracer.InputError, match="holds a result with another arguments"):
        tracer.trace(model, PROBES, out=tmp_path / "run", positions="last", resume=True, progress=False)
    with pytest.raises(tracer.InputError, match="already holds a result"):
        tracer.trace(model, PROBES, out=tmp_path / "run", progress=False)


def test_result_of_another_folder_is_not_touched(model, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    for force in (False, True):
        with pytest.raises(tracer.InputError, match=r"holds other files \(thesis.tex\)"):
            tracer.trace(model, PROBES, out=tmp_path / "mine", force=force, progress=False)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "precious"


def test_full_disk_leaves_no_half_written_result(model, tmp_path, monkeypatch):
    import pathlib

    real = pathlib.Path.write_bytes

    def full(self, content):
        if self.name == "run.json":
            raise OSError(28, "No space left on device")
        return real(self, content)

    monkeypatch.setattr(pathlib.Path, "write_bytes", full)
    with pytest.raises(tracer.InputError, match="No space left on device"):
        tracer.trace(model, PROBES, out=tmp_path / "run", progress=False)
    monkeypatch.undo()
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert left == {PARTIAL}, "finished batches are kept, nothing else"
    tracer.trace(model, PROBES, out=tmp_path / "run", resume=True, progress=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ablations": ["zap"]}, "unknown ablation 'zap': pass one of zero, mean"),
        ({"positions": "first"}, "unknown positions 'first': pass one of all, not_first, last"),
        ({"groups": ["group-7"]}, "group-7"),
        ({"target": "all"}, "unknown target 'all'"),
        ({"engine": "fast"}, "unknown engine 'fast'"),
        ({"rule": "steep"}, "unknown particle rule 'steep'"),
        ({"min_rise": 2.0}, "min_rise is 2.0"),
        ({"noise_samples": 0}, "noise_samples is 0"),
        ({"noise_scale": float("nan")}, "noise_scale is nan: pass a finite number of at most 1e[+]06"),
        ({"noise_scale": float("inf")}, "noise_scale is inf: pass a finite number of at most 1e[+]06"),
        ({"noise_scale": 1e40}, "noise_scale is 1e[+]40: pass a finite number of at most 1e[+]06"),
        ({"noise_scale": -1.0}, "noise_scale is -1.0: pass a number of at least 0"),
        ({"target": "joint", "recovery": True}, "recovery reads one token of a target, not 'joint'"),
        ({"batch_tokens": 0}, "batch_tokens is 0"),
        ({"limit": 0}, "limit is 0"),
        ({"ablations": ""}, "unknown ablation ''"),
        ({"probes": [PROBES[0], PROBES[0]]}, "two probes with the id 'p0'|duplicate id"),
        ({"probes": []}, "no probes"),
        ({"probes": [Probe("w1 w2", " w3", "lonely", "x")], "ablations": ["resample"]}, "alone in its group"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(model, tmp_path, options, message):
    probes = options.pop("probes", PROBES)
    with pytest.raises(tracer.InputError, match=message) as caught:
        tracer.trace(model, probes, out=tmp_path / "run", progress=False, **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_unreadable_results_are_refused(model, tmp_path):
    with pytest.raises(tracer.InputError, match="no result folder"):
        tracer.TraceResult.load(tmp_path / "nowhere")
    tracer.trace(model, PROBES, out=tmp_path / "run", progress=False)
    arrays = tmp_path / "run" / "arrays.safetensors"
    arrays.write_bytes(arrays.read_bytes()[:-100])
    with pytest.raises(tracer.InputError, match="is damaged"):
        tracer.TraceResult.load(tmp_path / "run")


def test_intervals_and_tables_are_complete(model):
    result = tracer.trace(model, PROBES, **SETTINGS)
    for kind in result.ablations:
        jsd = result.arrays[f"jsd_{kind}"]
        assert np.allclose(result.blocks[f"jsd_{kind}"], jsd.mean(axis=1))
        assert (result.blocks[f"jsd_low_{kind}"] <= result.blocks[f"jsd_{kind}"]).all()
        assert (result.blocks[f"jsd_high_{kind}"] >= result.blocks[f"jsd_{kind}"]).all()
        assert np.allclose(result.blocks[f"jsd_share_{kind}"], jsd.mean(axis=1) / np.log(2))
        entry = next(e for e in result.run["fragility"] if e["ablation"] == kind)
        assert int(jsd.mean(axis=1).argmax()) in entry["fragile"]
        assert 0 not in entry["fragile_without_first"]
    by_draw = result.arrays["jsd_noise_by_sample"]
    assert by_draw.shape == (8, 4)
    assert np.allclose(by_draw.mean(axis=0), result.blocks["jsd_noise"])
    assert (result.blocks["jsd_noise_draw_low"] < result.blocks["jsd_noise"]).all()
    one = result.fragility("mean", "group-1")
    mine = result.arrays["jsd_mean"][:, result.probes["group"] == "group-1"]
    assert one.n == 12
    assert np.allclose(one.table["jsd"], mine.mean(axis=1))
    assert result.fragility("mean").table["jsd_low"].tolist() == result.blocks["jsd_low_mean"].tolist()
    assert result.to_frame("groups")["n"].tolist() == [12, 12]
    with pytest.raises(tracer.InputError, match="unknown table 'layers'"):
        result.to_frame("layers")


def test_ties_are_no_answers(model):
    """A uniform output has the target level with every other token: neither top nor kept, and of middle rank."""
    live = tiny("llama")
    with torch.no_grad():
        live.lm_head.weight.zero_()
    result = tracer.trace(tracer.load(live, word_tokenizer()), PROBES, progress=False)
    answered = result.probes["target_ids"].str[0] == 0  # arg-max of a tie is the first token
    assert (result.probes["answered"] == answered).all()
    assert (result.arrays["rank"] == VOCAB // 2).all()
    erased = tracer.trace(model, PROBES, ablations=["zero_stream"], progress=False)
    assert erased.arrays["answered_zero_stream"].max() == 0
    assert (erased.arrays["log2_rank_zero_stream"] > 1).all()


def test_changes_of_the_target_are_relative_to_the_clean_output(model):
    result = tracer.trace(model, PROBES, progress=False)
    change = result.arrays["log_p_zero"] - result.arrays["log_p"][-1]
    assert np.allclose(result.blocks["log_p_change_zero"], change.mean(axis=1))
    assert (result.blocks["log_p_change_low_zero"] <= result.blocks["log_p_change_zero"]).all()
    for column, array in (("entropy", "entropy_zero"), ("norm", "norm_zero")):
        moved = result.arrays[array] - result.arrays[column][-1]
        assert np.allclose(result.blocks[f"moved_{column}_zero"], np.median(moved, axis=1))
    by_group = {group["group"]: group["fragility"]["zero"]["jsd"] for group in result.run["groups"]}
    for group, profile in by_group.items():
        mine = result.arrays["jsd_zero"][:, result.probes["group"] == group]
        assert np.allclose(profile, mine.mean(axis=1))


def test_fingerprint_sees_every_weight(model):
    live = tiny("llama")
    before = tracer.load(live, word_tokenizer()).fingerprint()
    assert before == model.fingerprint()
    with torch.no_grad():
        live.model.layers[2].self_attn.o_proj.weight[:, 17] *= 0.5
    assert tracer.load(live, word_tokenizer()).fingerprint() != before


def test_prompts_with_odd_line_separators_reload(model, tmp_path):
    odd = [Probe(f"w{i}\u2028w{i + 1}\x85", " w5", "g\u2029", f"p{i}") for i in range(3, 15)]
    result = tracer.trace(model, odd, out=tmp_path / "run", skip_bad=True, progress=False)
    same(result, tracer.TraceResult.load(tmp_path / "run"))


def test_what_the_model_has_no_room_for_is_refused(tmp_path):
    live = tiny("gpt2")
    model = tracer.load(live, word_tokenizer(300))
    with pytest.raises(tracer.InputError, match=r"300 tokens.* has 256 positions"):
        tracer.trace(model, [Probe("w3 " * 299 + "w4", " w5", "g", "long")], out=tmp_path / "run", progress=False)
    with pytest.raises(tracer.InputError, match=r"token 200.*only 128"):
        tracer.trace(model, [Probe("w3 w4", " w200", "g", "strange")], out=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_models_without_a_head_are_refused():
    with pytest.raises(tracer.ModelRefused, match="no next-token logits"):
        tracer.load(tiny("llama").model)
    with pytest.raises(tracer.InputError, match="cannot open a Linear"):
        tracer.load(torch.nn.Linear(2, 2))


def test_router_losses_are_not_asked_for():
    live = tiny("mixtral")
    live.config.output_router_logits = True
    assert tracer.load(live).engine == "onepass"


def test_cka_appears_from_fifty_probes_on(model):
    many = [Probe(p.prompt + f" w{i % 40}", p.target, p.group, f"q{i}") for i, p in enumerate(PROBES * 3)]
    assert "cka" not in tracer.trace(model, many[:49], ablations=[], progress=False).arrays
    result = tracer.trace(model, many, ablations=[], progress=False)
    cka = result.arrays["cka"]
    assert cka.shape == (5, 5)
    assert np.allclose(np.diag(cka), 1, atol=1e-6)
    # and it is that of the streams which plain forwards give, whatever the batches were
    from oracle import streams

    from tracer.divergence import debiased_cka

    tokenizer = word_tokenizer()
    rows = [streams(model.model, tokenizer.encode(p.prompt)) for p in many]
    first, last = (torch.stack([row[depth][-1] for row in rows]) for depth in (1, 4))
    assert cka[1, 4] == pytest.approx(debiased_cka(first, last), abs=1e-4)


def test_flat_profile_warns_and_a_model_with_biases_is_not_flat(model):
    flat = tracer.trace(model, PROBES, ablations=["zero_stream"], progress=False)
    assert np.ptp(flat.arrays["jsd_zero_stream"], axis=0).max() < 1e-6
    assert any("flat" in note for note in flat.run["warnings"])
    assert any("erases everything" in note for note in flat.run["warnings"])
    biased = tracer.trace(
        tracer.load(tiny("gpt2"), word_tokenizer()), PROBES, ablations=["zero_stream"], progress=False
    )
    assert np.ptp(biased.blocks["jsd_zero_stream"]) > 1e-3
    assert not any("flat" in note for note in biased.run["warnings"])


def test_softmax_is_exact_in_low_precision():
    model = tracer.load(tiny("llama").to(torch.bfloat16), word_tokenizer())
    result = tracer.trace(model, PROBES, progress=False)
    assert result.run["model"]["dtype"] == "bfloat16"
    p = np.exp(result.arrays["rival_log_p/group-0"])
    assert (p.sum(axis=2) <= 1 + 1e-6).all()
    plain = tracer.trace(tracer.load(tiny("llama"), word_tokenizer()), PROBES, progress=False)
    assert np.abs(result.arrays["jsd_zero"] - plain.arrays["jsd_zero"]).max() < 0.1


def test_a_model_without_tokenizer_is_refused():
    with pytest.raises(tracer.InputError, match="no tokenizer"):
        tracer.trace(tracer.load(tiny("llama")), PROBES, progress=False)


def test_repeated_traces_do_not_grow():
    model = tracer.load(planted(2), word_tokenizer(64))
    probes = [Probe(f"w{i} w{i + 1}", f" w{i + 2}", "g", f"p{i}") for i in range(12)]
    tracer.trace(model, probes, progress=False)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(20):
        tracer.trace(model, probes, progress=False)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 1024


@pytest.mark.parametrize("rows", [1, 6, 1000])
def test_no_more_than_one_chunk_of_logits_at_a_time(model, monkeypatch, rows):
    """The lens never holds [depths, pos, vocab], and the size of a chunk changes no result."""
    whole = tracer.trace(model, PROBES, progress=False)
    chunks = []

    def counting(*args):
        logits = unembed(*args)
        assert logits.grad_fn is None
        chunks.append(len(logits))
        return logits

    unembed = logit_lens.unembed
    monkeypatch.setattr(logit_lens, "unembed", counting)
    monkeypatch.setattr(measuring, "measure", partial(measures.measure, max_logits=rows * VOCAB))
    chunked = tracer.trace(model, PROBES, progress=False)
    assert max(chunks) <= rows
    assert np.allclose(whole.arrays["jsd_zero"], chunked.arrays["jsd_zero"], atol=1e-6)
    assert np.allclose(whole.arrays["log_p"], chunked.arrays["log_p"], atol=1e-5)


PAIRS = [
    Probe(
        prompt=f"w{i} w{i + 7} w{2 * i}",
        target=f" w{i + 3}",
        group=f"group-{i % 2}",
        id=f"p{i}",
        corrupt=f"w{i + 1} w{i + 7} w{2 * i}",
        corrupt_target=f" w{i + 4}",
    )
    for i in range(20, 34)
]


def test_recovery_stands_beside_fragility(model, tmp_path):
    """The whole contribution of a block in the clean run, added in the corrupt run in place of its own, by hand."""
    planted_model = tracer.load(planted(2), word_tokenizer(64))
    probes = [
        Probe(f"w{i} w{i + 1}", f" w{i + 2}", "g", f"p{i}", corrupt=f"w{i} w{i + 5}", corrupt_target=f" w{i + 6}")
        for i in range(12)
    ]
    result = tracer.trace(planted_model, probes, recovery=True, progress=False, out=tmp_path / "run")
    recovery = result.blocks["recovery"]
    # Block 2 writes the answer, from what the embedding says: nothing else brings it back.
    assert recovery[2] > 0.9
    assert recovery.drop(2).abs().max() < 0.1
    assert result.run["recovery"]["n"] == 12
    again = tracer.TraceResult.load(tmp_path / "run")
    assert np.array_equal(again.arrays["recovery"], result.arrays["recovery"])
    assert "Recovery: share of the answer" in again.summary()
    assert "recovery" not in tracer.trace(planted_model, probes, progress=False).blocks


def test_recovery_needs_corrupt_prompts(model):
    with pytest.raises(tracer.InputError, match="none of the .* has a usable corrupt prompt"):
        tracer.trace(model, PROBES, recovery=True, progress=False)


def test_every_undefined_recovery_has_its_reason(tmp_path):
    planted_model = tracer.load(planted(2), word_tokenizer(64))

    def probe(name: str, corrupt: str | None = None, targets: tuple[int, int] = (12, 16)) -> Probe:
        corrupt_target = None if corrupt is None else f" w{targets[1]}"
        return Probe("w10 w11", f" w{targets[0]}", "g", name, corrupt=corrupt, corrupt_target=corrupt_target)

    probes = [
        *(probe(f"good{i}", f"w{i} w15") for i in range(10)),
        probe("none"),
        probe("longer", "w10 w15 w15"),
        probe("agrees", "w10 w15", (40, 50)),
        probe("reversed", "w10 w15", (16, 12)),
    ]
    result = tracer.trace(planted_model, probes, recovery=True, progress=False, out=tmp_path / "run")
    reasons = [
        "no usable corrupt prompt",
        "no usable corrupt prompt: corrupt prompt has 3 tokens where the prompt has 2",
        "clean and corrupt prompt agree",
        "the corrupt prompt makes the target likelier",
    ]
    assert result.probes["recovery_undefined"].tolist()[10:] == reasons
    assert np.isnan(result.arrays["recovery"]).all(axis=0).tolist() == [False] * 10 + [True] * 4
    assert result.run["recovery"]["n"] == 10
    assert result.run["recovery"]["undefined"] == dict.fromkeys(reasons, 1)
    assert [row["recovery_undefined"] for row in lines(tmp_path / "run" / "probes.jsonl")] == [None] * 10 + reasons
    again = tracer.TraceResult.load(tmp_path / "run")
    same(result, again)
    for part in (*reasons[:2], "n = 10", "1 undefined for other reasons"):
        assert part in " ".join(again.summary().split())
    again.plot("joint")
    all_defined = tracer.trace(planted_model, probes[:10], recovery=True, progress=False, out=tmp_path / "all")
    assert all_defined.probes["recovery_undefined"].isna().all()
    assert all_defined.run["recovery"]["undefined"] == {}
    same(all_defined, tracer.TraceResult.load(tmp_path / "all"))
    none_defined = tracer.trace(planted_model, probes[10:], recovery=True, progress=False, out=tmp_path / "none")
    assert "n = 0" in none_defined.summary()
    same(none_defined, tracer.TraceResult.load(tmp_path / "none"))
    assert "recovery_undefined" not in tracer.trace(planted_model, probes, progress=False).probes


def test_interrupted_recovery_goes_on(model, tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "RECOVERY_PROBES", 5)
    whole = tracer.trace(model, PAIRS, recovery=True, progress=False)
    assert whole.probes["recovery_undefined"].notna().any()
    real, calls = measuring.block_recovery, []

    def breaks(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(measuring, "block_recovery", breaks)
    with pytest.raises(KeyboardInterrupt):
        tracer.trace(model, PAIRS, recovery=True, progress=False, out=tmp_path / "run")
    monkeypatch.setattr(measuring, "run", None)  # every batch is done
    monkeypatch.setattr(measuring, "block_recovery", real)
    again = tracer.trace(model, PAIRS, recovery=True, progress=False, out=tmp_path / "run", resume=True)
    same(again, whole)


def lens_of(model: tracer.TracedModel, scale: float) -> TunedLens:
    """A lens that adds each entry to its neighbour, more at later depths; with scale 1 it changes nothing."""
    neighbour = torch.eye(64).roll(1, 0)
    weight = torch.stack([neighbour * (scale - 1) * (depth + 1) for depth in range(model.n_blocks)])
    bias = torch.zeros(model.n_blocks, 64)
    return TunedLens(weight, bias, model.tail_fingerprint(), model.name, {"depths": [], "dtype": "float32"})


def test_readout_by_a_tuned_lens_has_the_plain_one_beside_it(tmp_path):
    model = tracer.load(tiny("gpt2"), word_tokenizer())
    plain = tracer.trace(model, PROBES, progress=False)
    zero = tracer.trace(model, PROBES, readout="tuned", tuned_lens=lens_of(model, 1.0), progress=False)
    for name in ("log_p", "entropy", "kl_to_final", "rank"):
        assert np.allclose(zero.arrays[name], plain.arrays[name], atol=1e-5)
        assert np.allclose(zero.arrays[f"plain/{name}"], plain.arrays[name], atol=1e-5)
    lens = lens_of(model, 1.5)
    tuned = tracer.trace(model, PROBES, readout="tuned", tuned_lens=lens, progress=False, out=tmp_path / "run")
    assert np.allclose(tuned.arrays["plain/log_p"], plain.arrays["log_p"], atol=1e-5)
    assert np.allclose(tuned.arrays["log_p"][-1], plain.arrays["log_p"][-1], atol=1e-5)
    assert np.abs(tuned.arrays["log_p"][:-1] - plain.arrays["log_p"][:-1]).max() > 0.05
    assert np.allclose(tuned.arrays["jsd_zero"], plain.arrays["jsd_zero"], atol=1e-6), "the output has no lens"
    row, depth = 2, 1
    ids = [int(word[1:]) for word in PROBES[row].prompt.split()]
    stream = oracle.streams(model.model, ids)[depth]
    translated = oracle.lens(model.model, ids, stream + stream @ lens.weight[depth].T)[-1]
    target = int(PROBES[row].target.strip()[1:])
    assert tuned.arrays["log_p"][depth, row] == pytest.approx(translated[target].item(), abs=1e-4)
    assert tuned.run["readout"] == "tuned"
    assert len(tuned.run["plain"]["groups"]) == len(tuned.run["groups"])
    again = tracer.TraceResult.load(tmp_path / "run")
    assert "Both lenses: median particle block" in again.summary()
    again.plot("joint")
    again.plot("lens")


def test_tuned_readout_without_its_lens_or_on_another_model_is_refused(model):
    with pytest.raises(tracer.InputError, match="needs tuned_lens="):
        tracer.trace(model, PROBES, readout="tuned", progress=False)
    lens = lens_of(tracer.load(tiny("gpt2"), word_tokenizer()), 1.5)
    with pytest.raises(tracer.InputError, match="the readout is 'logit'"):
        tracer.trace(model, PROBES, tuned_lens=lens, progress=False)
    other = tiny("gpt2", seed=1)
    with pytest.raises(tracer.InputError, match="has the tail"):
        tracer.trace(tracer.load(other, word_tokenizer()), PROBES, readout="tuned", tuned_lens=lens, progress=False)


def test_a_tuned_lens_of_other_blocks_is_said():
    """The tail alone decides whether a lens fits, but translators of other blocks translate other streams."""
    own = tracer.load(tiny("gpt2"), word_tokenizer())
    lens = lens_of(own, 1.5)
    lens = replace(lens, record={**lens.record, "fingerprint": own.fingerprint()})
    changed = tiny("gpt2")
    with torch.no_grad():
        changed.transformer.h[1].mlp.c_proj.weight *= 1.5
    others = tracer.load(changed, word_tokenizer())

    def said(model: tracer.TracedModel) -> list[str]:
        result = tracer.trace(model, PROBES, ablations=[], readout="tuned", tuned_lens=lens, progress=False)
        return [note for note in result.run["warnings"] if "tuned lens was trained on other weights" in note]

    assert said(own) == []
    assert len(said(others)) == 1


@pytest.mark.parametrize(("writer", "late"), [(5, True), (2, False)])
def test_only_a_late_plain_lens_is_said_to_miss_earlier_answers(writer, late):
    """The tuned lens is late where the plain one is not, and the other way round."""
    model = tracer.load(planted(writer), word_tokenizer(64))
    probes = [Probe(f"w{i} w{i + 1}", f" w{i + 2}", "g", f"p{i}") for i in range(12)]
    weight = torch.zeros(6, 128, 128)
    if late:  # from depth 1 on, reads off the token what the last block will write
        weight[1:, 64 + torch.arange(64).roll(-1), torch.arange(64)] = 12.0
    else:
        weight -= torch.eye(128)
    lens = TunedLens(
        weight, torch.zeros(6, 128), model.tail_fingerprint(), model.name, {"depths": [], "dtype": "float32"}
    )
    plain = tracer.trace(model, probes, ablations=[], progress=False)
    tuned = tracer.trace(model, probes, ablations=[], readout="tuned", tuned_lens=lens, progress=False)
    assert tuned.run["particle_block"]["estimate"] == (0 if late else 5)
    assert tuned.run["plain"]["particle_block"]["estimate"] == writer
    for result in (plain, tuned):
        assert any("plain logit lens sees the answers late, at block 5" in n for n in result.run["warnings"]) == late
        assert any("lens sees the answers late" in note for note in result.run["warnings"]) == late


def test_the_plain_lens_of_a_tuned_trace_measures_no_ablated_stream(monkeypatch):
    model = tracer.load(tiny("gpt2"), word_tokenizer())
    seen, real = set(), measuring.measure

    def counted(anatomy, lens, streams, targets, variants):
        seen.add((variants, len(streams.ablated)))
        return real(anatomy, lens, streams, targets, variants)

    monkeypatch.setattr(measuring, "measure", counted)
    tracer.trace(model, PROBES, readout="tuned", tuned_lens=lens_of(model, 1.5), progress=False)
    assert seen == {(4, 4), (0, 0)}


def test_every_array_of_a_result_is_documented(tmp_path):
    model = tracer.load(tiny("gpt2"), word_tokenizer())
    lens = lens_of(model, 1.5)
    result = tracer.trace(
        model, PAIRS, ablations=["zero", "noise"], recovery=True, readout="tuned", tuned_lens=lens, progress=False
    )
    text = tracer.TraceResult.__doc__
    for name in result.arrays:
        name = re.sub(r"^plain/", "", name)
        shown = re.sub("_(zero|noise)(?=_|$)", "_KIND", re.sub("/.*", "/GROUP", name))
        assert f"`{shown}`" in text, shown
    for name in (*result.probes, "plain/"):
        assert f"`{name}`" in text or f"`{name}NAME`" in text, name
