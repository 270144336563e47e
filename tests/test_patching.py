"""Activation patching against hooks on the models themselves, cell by cell; and what happens where it is undefined."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import every_model
import numpy as np
import oracle
import pandas as pd
import pytest
import torch
from planted import planted
from tiny import BLOCKS, tiny, word_tokenizer
from torch import Tensor, nn

import tracer
from tracer import patch_edits, patching
from tracer import patcher as patcher_module
from tracer.cli import main
from tracer.patch_edits import PatchEdits
from tracer.patch_results import FILES, PatchResult, cell_table
from tracer.patcher import AGREE, REVERSED, Patcher
from tracer.plots import write_figures
from tracer.probes import Probe, ProbeSet, read_probes, tokenize
from tracer.recovery import NO_PAIR, UNEQUAL, block_recovery, block_recovery_tokens
from tracer.statistics import bootstrap_profile, pooled_interval

LENGTHS = (5, 9, 6, 5)
"""Of the prompts, which share a batch: some have columns that others have not."""

WRITERS = {
    "llama": ("self_attn", "mlp"),
    "gpt2": ("attn", "mlp"),
    "mamba2": ("mixer", None),
    "qwen3_next": ("self_attn|linear_attn", "mlp"),
    "bloom": ("self_attention.dense", "mlp.dense_4h_to_h"),
    "granite": ("self_attn", "mlp"),
}
"""Modules of a block whose outputs the mixer and the MLP add to the stream."""


def pair(row: int, length: int) -> tuple[list[int], list[int]]:
    """A clean and a corrupt prompt that differ in the third token."""
    clean = [3 + (7 * row + 5 * i) % 120 for i in range(length)]
    return clean, [*clean[:2], (clean[2] + 50) % 120 + 3, *clean[3:]]


def pairs_of(model: nn.Module, lengths: Sequence[int] = LENGTHS) -> list[Probe]:
    """Pairs of prompts with the two answers by which the model tells them apart best."""
    probes = []
    for row, length in enumerate(lengths):
        clean, corrupt = pair(row, length)
        probes.append(told_apart(model, clean, corrupt, group=f"g{row % 2}", id=f"p{row}"))
    return probes


def told_apart(model: nn.Module, clean: list[int], corrupt: list[int], **others: str) -> Probe:
    difference = oracle.forward(model, clean)[-1] - oracle.forward(model, corrupt)[-1]
    target, corrupt_target = int(difference.argmax()), int(difference.argmin())
    return Probe(prompt_ids=clean, target_id=target, corrupt_ids=corrupt, corrupt_target_id=corrupt_target, **others)


# --- the slow and plain way ------------------------------------------------------------------------------------------


def module_of(block: nn.Module, names: str) -> nn.Module:
    return next(block.get_submodule(name) for name in names.split("|") if hasattr(block, name.split(".")[0]))


def outputs_of(model: nn.Module, ids: Sequence[int], modules: Sequence[nn.Module]) -> list[Tensor]:
    """What modules return in one forward, `[pos, d_model]` each."""
    found: dict[nn.Module, Tensor] = {}
    handles = [
        module.register_forward_hook(lambda m, args, out: found.__setitem__(m, oracle.hidden(out)[0].clone()))
        for module in modules
    ]
    try:
        oracle.forward(model, ids)
    finally:
        for handle in handles:
            handle.remove()
    return [found[module] for module in modules]


def overwritten(
    model: nn.Module,
    ids: Sequence[int],
    module: nn.Module,
    edit: Callable[[Tensor, Tensor], Tensor],
    *,
    before: bool = False,
) -> Tensor:
    """Log-probabilities `[pos, vocab]` when `edit` has changed what a module receives or returns, `[pos, d_model]`."""

    def pre(m: nn.Module, args: tuple, kwargs: dict) -> tuple:
        if args:
            return (edit(args[0][0], args[0][0])[None], *args[1:]), kwargs
        return args, kwargs | {"hidden_states": edit(kwargs["hidden_states"][0], kwargs["hidden_states"][0])[None]}

    def post(m: nn.Module, args: tuple, kwargs: dict, output: object) -> object:
        received = (args[0] if args else kwargs["hidden_states"])[0]
        new = edit(received, oracle.hidden(output)[0])[None]
        return (new, *output[1:]) if isinstance(output, tuple) else new

    register = module.register_forward_pre_hook if before else module.register_forward_hook
    handle = register(pre if before else post, with_kwargs=True)
    try:
        return oracle.forward(model, ids)
    finally:
        handle.remove()


def at(positions: Sequence[int], values: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """An edit that puts values into some positions."""

    def edit(received: Tensor, own: Tensor) -> Tensor:
        new = own.clone()
        for position in positions:
            new[position] = values[position]
        return new

    return edit


class Hooks:
    """Patches of one pair by hooks alone: the base's run with values of the giver's, of equal length."""

    def __init__(self, model: nn.Module, base: Sequence[int], giver: Sequence[int]):
        self.model, self.base, self.blocks = model, base, oracle.blocks_of(model)
        self.streams = oracle.streams(model, giver)
        family = next(f for f in WRITERS if f.replace("_", "") in type(model).__name__.lower())
        self.modules = {
            role: [module_of(block, names) for block in self.blocks]
            for role, names in zip(("mixer", "mlp"), WRITERS[family], strict=True)
            if names
        }
        self.outputs = {role: outputs_of(model, giver, modules) for role, modules in self.modules.items()}

    def log_p(self, component: str, place: int, positions: Sequence[int]) -> Tensor:
        """Log-probabilities `[vocab]` at the last token of the base."""
        if component == "resid":
            inside = place < len(self.blocks)
            module = self.blocks[place if inside else -1]
            return overwritten(self.model, self.base, module, at(positions, self.streams[place]), before=inside)[-1]
        if component == "block":
            given = self.streams[place + 1] - self.streams[place]

            def edit(received: Tensor, own: Tensor) -> Tensor:
                return at(positions, received + given)(received, own)

            return overwritten(self.model, self.base, self.blocks[place], edit)[-1]
        edit = at(positions, self.outputs[component][place])
        return overwritten(self.model, self.base, self.modules[component][place], edit)[-1]


def expected(probe: Probe, model: nn.Module, direction: str) -> Callable[[Tensor], float]:
    """The recovery, by its definition, of the logit difference."""

    def metric(found: Tensor) -> float:
        return (found[probe.target_id] - found[probe.corrupt_target_id]).item()

    clean, corrupt = (metric(oracle.forward(model, ids)[-1]) for ids in (probe.prompt_ids, probe.corrupt_ids))
    if direction == "denoise":
        return lambda log_p: (metric(log_p) - corrupt) / (clean - corrupt)
    return lambda log_p: (clean - metric(log_p)) / (clean - corrupt)


@pytest.mark.parametrize(
    ("family", "direction"), [*((f, "denoise") for f in WRITERS), ("llama", "noise"), ("qwen3_next", "noise")]
)
def test_every_cell_equals_a_hook_that_overwrites_one_position(family, direction):
    traced = tracer.load(tiny(family), word_tokenizer())
    probes = pairs_of(traced.model)
    components = ("resid", "block", "mixer", "mlp")[: 4 if WRITERS[family][1] else 3]
    result = tracer.patch(traced, probes, components=components, direction=direction, min_gap=0.1, progress=False)
    assert result.probes["undefined"].isna().all()
    assert result.run["engine"] == "onepass"
    columns = result.run["positions"]
    assert columns == list(range(-max(LENGTHS), 0))
    for i, probe in enumerate(probes):
        base, giver = probe.corrupt_ids, probe.prompt_ids
        base, giver = (base, giver) if direction == "denoise" else (giver, base)
        hooks, share = Hooks(traced.model, base, giver), expected(probe, traced.model, direction)
        for component in components:
            found = result.arrays[f"recovery_{component}"]
            assert found.shape == (BLOCKS + (component == "resid"), max(LENGTHS), len(probes))
            assert np.isnan(found[:, : -len(base), i]).all()
            for place in range(len(found)):
                for position in range(len(base)):
                    cell = found[place, position - len(base), i]
                    assert cell == pytest.approx(share(hooks.log_p(component, place, [position])), abs=1e-5)


@pytest.mark.parametrize("metric", ["logit_diff", "log_p", "p"])
def test_metrics_are_those_of_the_model_itself(metric):
    traced = tracer.load(tiny("llama"), word_tokenizer())
    probes = pairs_of(traced.model, (5, 6))
    result = tracer.patch(traced, probes, components="resid", metric=metric, min_gap=1e-6, progress=False)

    def measured(log_p: Tensor, probe: Probe) -> float:
        target, corrupt_target = log_p[probe.target_id], log_p[probe.corrupt_target_id]
        return {"logit_diff": target - corrupt_target, "log_p": target, "p": target.exp()}[metric].item()

    for i, probe in enumerate(probes):
        clean, corrupt = (oracle.forward(traced.model, ids)[-1] for ids in (probe.prompt_ids, probe.corrupt_ids))
        row = result.probes.iloc[i]
        ends = measured(clean, probe), measured(corrupt, probe)
        assert (row["m_clean"], row["m_corrupt"]) == pytest.approx(ends, abs=1e-5)
        assert row["gap"] == pytest.approx(ends[0] - ends[1], abs=1e-5)
        assert row["answered"] == (int(clean.argmax()) == probe.target_id)
        assert row["corrupt_answered"] == (int(corrupt.argmax()) == probe.corrupt_target_id)
        patched = measured(Hooks(traced.model, probe.corrupt_ids, probe.prompt_ids).log_p("resid", 2, [-1]), probe)
        share = (patched - ends[1]) / (ends[0] - ends[1])
        assert result.arrays["recovery_resid"][2, -1, i] == pytest.approx(share, abs=1e-4)


@pytest.mark.parametrize("family", ["llama", "mamba2", "bloom"])
def test_block_recovery_puts_a_whole_contribution_in(family):
    traced = tracer.load(tiny(family), word_tokenizer())
    unequal = Probe(prompt_ids=[5, 6, 7], target_id=8, corrupt_ids=[5, 6], corrupt_target_id=9, id="unequal")
    probes = [*pairs_of(traced.model), unequal, Probe(prompt_ids=[5, 6, 7], target_id=8, id="no pair")]
    items = tokenize(ProbeSet("probes", tuple(probes)), None, unequal=True).items
    n = len(items) - 2
    seen = []
    recovery = block_recovery(traced, items, min_gap=0.1, on_tokens=seen.append)
    assert sum(seen) == block_recovery_tokens(traced, items)
    assert recovery.undefined == (*[None] * n, UNEQUAL, NO_PAIR)
    found = recovery.values
    assert np.isnan(found[:, n:]).all()
    for i, probe in enumerate(probes[:n]):
        hooks, share = (
            Hooks(traced.model, probe.corrupt_ids, probe.prompt_ids),
            expected(probe, traced.model, "denoise"),
        )
        for block in range(BLOCKS):
            log_p = hooks.log_p("block", block, range(len(probe.prompt_ids)))
            assert found[block, i] == pytest.approx(share(log_p), abs=1e-5)
    together = tracer.patch(traced, probes[:n], components="block", positions="together", min_gap=0.1, progress=False)
    assert np.array_equal(together.arrays["recovery_block"][:, 0], found[:, :n])
    assert together.cells["position"].isna().all()
    everything = block_recovery(traced, items, min_gap=1e6)
    assert np.isnan(everything.values).all()
    assert everything.undefined == (*[AGREE] * n, UNEQUAL, NO_PAIR)
    assert block_recovery_tokens(traced, items[n:]) == 0
    assert np.isnan(block_recovery(traced, items[n:]).values).all()


def test_stream_patches_equal_those_of_transformer_lens():
    from transformer_lens.model_bridge.sources import build_bridge_from_module
    from transformer_lens.patching import get_act_patch_resid_pre

    model = tiny("llama", attn_implementation="eager")
    bridge = build_bridge_from_module(model, type(model).__name__, hf_config=model.config, model_name="tiny").eval()
    bridged = tracer.load(bridge, word_tokenizer())
    assert bridged.backend == "transformer_lens"
    [probe, *_] = pairs_of(tiny("llama", attn_implementation="eager"))
    result = tracer.patch(bridged, [probe], components="resid,mixer,mlp", min_gap=0.1, progress=False)
    clean, corrupt = (torch.tensor([ids]) for ids in (probe.prompt_ids, probe.corrupt_ids))

    def metric(logits: Tensor) -> Tensor:
        return logits[0, -1, probe.target_id] - logits[0, -1, probe.corrupt_target_id]

    with torch.no_grad():
        ends = [metric(bridge(ids)) for ids in (clean, corrupt)]
        _, cache = bridge.run_with_cache(clean)
        theirs = get_act_patch_resid_pre(bridge, corrupt, cache, metric)  # [layer, pos]
    share = ((theirs - ends[1]) / (ends[0] - ends[1])).numpy()
    assert np.abs(result.arrays["recovery_resid"][:-1, :, 0] - share).max() <= 1e-5


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_result_depends_on_neither_engine_nor_batches(family):
    traced = tracer.load(tiny(family), word_tokenizer())
    probes = pairs_of(traced.model, (5, 7, 6))
    settings = {"components": "resid,mixer", "min_gap": 0.1, "progress": False}
    result = tracer.patch(traced, probes, **settings)
    others = [
        tracer.patch(traced, probes, engine="full", **settings),
        tracer.patch(traced, probes, batch_tokens=1, **settings),
        tracer.patch(traced, probes[::-1], **settings),
    ]
    for name, values in result.arrays.items():
        for other, order in zip(others, (slice(None), slice(None), slice(None, None, -1)), strict=True):
            assert np.allclose(other.arrays[name][..., order], values, atol=1e-5, equal_nan=True)
    chosen = tracer.patch(traced, probes, positions=[-1, -4], **settings)
    assert chosen.run["positions"] == [-4, -1]
    columns = [result.run["positions"].index(position) for position in (-4, -1)]
    for name, values in result.arrays.items():
        assert np.allclose(chosen.arrays[name], values[:, columns], atol=1e-5, equal_nan=True)


def test_one_pass_a_column_and_none_where_nothing_can_change(monkeypatch):
    """Up to the first token that differs both runs are the same, so that nothing is run there; recovery is 0."""
    traced = tracer.load(tiny("llama"), word_tokenizer())
    probes = pairs_of(traced.model, (6, 6, 6))
    passes, real, tokens = [], patcher_module.run, []

    def counted(adapter, batch, reads, variants, edits, **settings):
        passes.append({variant.position for variant in variants})
        assert len(variants) == (3 if None in passes[-1] else 3 * BLOCKS + 1)
        return real(adapter, batch, reads, variants, edits, **settings)

    monkeypatch.setattr(patcher_module, "run", counted)
    result = tracer.patch(traced, probes, min_gap=0.1, progress=False)
    assert passes == [{None}, {-4}, {-3}, {-2}, {-1}]  # the first is the end checks
    for values in result.arrays.values():
        assert (values[:, :2] == 0).all()
        assert (np.abs(values[:, 2:]) > 1e-6).any()
    monkeypatch.undo()
    items = tokenize(ProbeSet("probes", tuple(probes)), None).items
    patcher = Patcher(traced, items, ("resid", "mlp"), (-6, -1))
    patcher.run(tokens.append)
    assert sum(tokens) == patcher.tokens


# --- prompts of different lengths ------------------------------------------------------------------------------------


def uneven(model: nn.Module) -> Probe:
    return told_apart(model, [9, 30, 12, 41, 17], [9, 30, 55, 12, 60, 41, 17], id="uneven")


def test_unequal_lengths_are_refused_before_any_forward_unless_mapped(monkeypatch):
    traced = tracer.load(tiny("llama"), word_tokenizer())
    probe = uneven(traced.model)
    with monkeypatch.context() as patch:
        patch.setattr(type(traced.adapter), "run", lambda *args, **kwargs: pytest.fail("a forward ran"))
        message = r"probe uneven cannot be patched: its prompt has 5 tokens and its corrupt prompt 7: .*\{-1: -1\}"
        with pytest.raises(tracer.InputError, match=message):
            tracer.patch(traced, [probe], progress=False)
        with pytest.raises(tracer.InputError, match=r"position_map takes -1 from -6, .*7 tokens.*one 5"):
            tracer.patch(traced, [probe], position_map={-1: -6}, progress=False)
    streams = oracle.streams(traced.model, probe.prompt_ids)
    result = tracer.patch(traced, [probe], position_map={-1: -1, -2: -3}, min_gap=0.1, progress=False)
    assert result.run["positions"] == [-2, -1]
    assert result.run["arguments"]["position_map"] == [[-2, -3], [-1, -1]]
    for depth in range(BLOCKS + 1):
        for column, (position, source) in enumerate(((-2, -3), (-1, -1))):
            module = oracle.blocks_of(traced.model)[min(depth, BLOCKS - 1)]

            def edit(received, own, position=position, value=streams[depth][source]):
                new = own.clone()
                new[position] = value
                return new

            log_p = overwritten(traced.model, probe.corrupt_ids, module, edit, before=depth < BLOCKS)[-1]
            cell = result.arrays["recovery_resid"][depth, column, 0]
            assert cell == pytest.approx(expected(probe, traced.model, "denoise")(log_p), abs=1e-5)
    as_text = tracer.patch(traced, [probe], position_map="-1:-1", min_gap=0.1, progress=False)
    assert as_text.run["positions"] == [-1]
    assert np.allclose(as_text.arrays["recovery_mlp"][:, 0], result.arrays["recovery_mlp"][:, 1], atol=1e-6)


def test_unequal_pairs_of_a_set_are_counted_with_skip_bad():
    traced = tracer.load(tiny("llama"), word_tokenizer())
    probes = [*pairs_of(traced.model), uneven(traced.model), Probe(prompt_ids=[5, 6], target_id=7, id="alone")]
    with pytest.raises(tracer.InputError, match="probe alone cannot be patched: it has no corrupt prompt"):
        tracer.patch(traced, probes, position_map={-1: -1}, progress=False)
    result = tracer.patch(traced, probes, positions="last", components="resid", skip_bad=True, progress=False)
    assert [skip["where"] for skip in result.run["skipped"]] == ["uneven", "alone"]
    assert "2 probes cannot be patched and were left out, e.g. uneven: its prompt has 5 tokens" in result.summary()
    with pytest.raises(tracer.InputError, match=r"none of the 1 probes of 'probes' can be patched \(the first: it has"):
        tracer.patch(traced, probes[-1:], skip_bad=True, progress=False)


def test_shipped_sets_skip_unequal_pairs():
    """The word tokenizer makes of every text a list of unknown words, as long as it has words."""
    shipped = read_probes("en-colours")
    tokenizer = word_tokenizer()
    items = tokenize(shipped, tokenizer, unequal=True).items
    assert len(items) == 0  # no target is in this vocabulary, and a shipped set does not raise
    mine = ProbeSet("mine", (Probe("w1 w2", " w3", corrupt="w1 w2 w4", corrupt_target=" w5", id="a"),), shipped=True)
    [item] = tokenize(mine, tokenizer, unequal=True)
    assert (item.corrupt_ids, item.corrupt_target_id) == ((1, 2, 4), 5)
    long = ProbeSet("long", (Probe("w1 w2", " w3 w8", corrupt="w1 w4", corrupt_target=" w5 w6", id="a"),), shipped=True)
    [item] = tokenize(long, tokenizer, target="first")
    assert (item.target_ids, item.corrupt_target_id) == ((3,), 5)
    [item] = tokenize(long, tokenizer, target="joint")
    assert item.corrupt_ids is None
    traced = tracer.load(tiny("llama"), tokenizer)
    with pytest.raises(tracer.InputError, match="none of the 1 probes"):
        tracer.patch(traced, mine, progress=False)


# --- models whose answer has a known place ---------------------------------------------------------------------------


def mover(writer: int, n_blocks: int = 5) -> nn.Module:
    """Token w at one position is answered by w + 1 at the next one, written by block `writer` from one to the other."""
    model = planted(writer, n_blocks)
    size = model.config.vocab_size
    with torch.no_grad():
        for index, block in enumerate(model.blocks):
            block.mix.weight[size:, :size] *= index == writer  # the others disturb what no answer is read from
            block.mix.weight[size:, :size].round_(decimals=0)
    block = model.blocks[writer]
    block.forward = lambda hidden: hidden + block.mix(torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], 1))
    return model


@pytest.mark.parametrize("writer", [1, 3])
@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_an_answer_is_recovered_where_it_is_known_to_be(writer, direction):
    traced = tracer.load(mover(writer), word_tokenizer(64))
    probes = [
        Probe(prompt_ids=[4, 5, 10 + i, 8], target_id=11 + i, corrupt_ids=[4, 5, 40 + i, 8], corrupt_target_id=41 + i)
        for i in range(3)
    ]
    result = tracer.patch(traced, probes, components="resid,block", direction=direction, progress=False)
    assert result.probes["answered_both"].all()
    resid, block = result.heat_map("resid"), result.heat_map("block")
    moved = np.arange(6) > writer
    assert np.allclose(resid[-1], moved, atol=1e-4)
    assert np.allclose(resid[-2], ~moved, atol=1e-4)
    assert (resid[[-4, -3]] == 0).all(axis=None)
    assert np.allclose(block[-1], np.arange(5) == writer, atol=1e-4)
    assert np.allclose(block[[-4, -3, -2]], 0, atol=0.2)


def test_recovery_is_missing_where_both_prompts_agree_or_the_model_prefers_the_wrong_one(tmp_path):
    traced = tracer.load(mover(2), word_tokenizer(64))

    def probe(name: str, clean: int, corrupt: int, target: int, corrupt_target: int) -> Probe:
        ids = {"prompt_ids": [4, clean, 8], "corrupt_ids": [4, corrupt, 8]}
        return Probe(**ids, target_id=target, corrupt_target_id=corrupt_target, id=name, group="mixed")

    probes = [
        probe("good", 10, 20, 11, 21),
        probe("good2", 12, 30, 13, 31),
        probe("agrees", 10, 20, 50, 51),
        probe("reversed", 10, 20, 21, 11),
    ]
    result = tracer.patch(traced, probes, components="resid", out=tmp_path / "run", progress=False)
    assert result.probes["undefined"].tolist()[2:] == [AGREE, REVERSED]
    assert result.probes["undefined"].isna().tolist() == [True, True, False, False]
    assert np.isnan(result.arrays["recovery_resid"][..., 2:]).all()
    assert np.isfinite(result.arrays["recovery_resid"][..., :2]).all()
    assert (result.cells["n"] == 2).all()
    assert result.run["groups"] == [
        {"group": "mixed", "n": 4, "answered_both": 2, "undefined": {AGREE: 1, REVERSED: 1}}
    ]
    for reason in (AGREE, REVERSED):
        assert f"1 undefined: {reason}" in result.summary()
    rows = [json.loads(line) for line in (tmp_path / "run" / "probes.jsonl").read_text().splitlines()]
    assert [row["undefined"] for row in rows] == [None, None, AGREE, REVERSED]
    nothing = tracer.patch(traced, probes[2:], components="resid,block", out=tmp_path / "none", progress=False)
    assert nothing.cells["recovery"].isna().all()
    assert "no pair has a recovery" in nothing.summary()
    cells = (tmp_path / "none" / "cells.csv").read_text().splitlines()
    assert cells[1] == "resid,0,-3,all,0,,,,0,,,"
    assert "no recovery is defined" in " ".join(texts(nothing.plot()).split())


# --- the end checks --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama() -> tracer.TracedModel:
    return tracer.load(tiny("llama"), word_tokenizer())


def test_end_checks_are_run_and_kept(llama):
    result = tracer.patch(llama, pairs_of(llama.model), components="resid,mixer", min_gap=0.1, progress=False)
    assert set(result.run["checks"]) == {"own_streams", "last_depth", "limit"}
    assert 0 <= result.run["checks"]["own_streams"] <= 1e-4
    assert 0 <= result.run["checks"]["last_depth"] <= 1e-4


def test_an_edit_that_does_nothing_fails_the_first_end_check(llama, monkeypatch):
    monkeypatch.setattr(PatchEdits, "_put", lambda self, variant, own, given, onto=None: own)
    with pytest.raises(tracer.HookError, match=r"last stream in does not give its output \(gap \d.*, limit 0.0001\)"):
        tracer.patch(llama, pairs_of(llama.model), components="resid", progress=False)


@pytest.mark.parametrize("component", ["block", "mixer", "mlp"])
def test_values_from_the_wrong_position_fail_the_second_end_check(llama, monkeypatch, component):
    real = patch_edits.given_by

    def shifted(adapter, tokens, sources, streams, variants, sublayers=None):
        wanted = [variant for variant in variants if variant.component != component]
        given = real(adapter, tokens, sources, streams, variants, sublayers)
        assert len(wanted) < len(variants) or variants[0].giver == "aligned"
        moved = {key: value.roll(1, 1) for key, value in given.contributions.items()}
        return patch_edits.Given(given.mapped, given.streams, moved)

    monkeypatch.setattr(patcher_module, "given_by", shifted)
    with pytest.raises(tracer.HookError, match=r"putting a run's own streams in changes its output \(gap"):
        tracer.patch(llama, pairs_of(llama.model), components=component, progress=False)


def test_lower_precision_is_held_to_the_rounding_of_the_model_itself():
    traced = tracer.load(tiny("llama").to(torch.bfloat16), word_tokenizer())
    result = tracer.patch(traced, pairs_of(tiny("llama")), min_gap=0.5, progress=False)
    assert result.run["checks"]["limit"] > 1e-4
    exact = tracer.patch(
        tracer.load(tiny("llama"), word_tokenizer()), pairs_of(tiny("llama")), min_gap=0.5, progress=False
    )
    assert np.nanmax(np.abs(result.arrays["recovery_resid"] - exact.arrays["recovery_resid"])) < 0.3


def test_models_with_other_positions_or_other_tails():
    bytes_model = tracer.load(every_model.build("blt"))
    probes = pairs_of(tiny("llama"), (5, 6))
    with pytest.raises(tracer.InputError, match="positions of the stream of BltForCausalLM are not tokens"):
        tracer.patch(bytes_model, probes, progress=False)
    together = tracer.patch(bytes_model, probes, components="block", positions="together", min_gap=1e-3, progress=False)
    assert together.run["checks"]["last_depth"] is None
    assert any("more than the last residual" in warning for warning in together.run["warnings"])
    stateful = tracer.load(every_model.build("gemma4_text"))
    probes = pairs_of(stateful.model, (5, 6))
    result = tracer.patch(stateful, probes, components="resid,mlp", min_gap=1e-3, progress=False)
    assert result.run["engine"] == "full"
    assert result.arrays["recovery_resid"][-1, -1] == pytest.approx(1.0, abs=1e-3)


def test_a_depth_is_what_its_block_returned_where_the_parent_changes_it_on_the_way():
    looped = tracer.load(every_model.build("hrm_text"))
    result = tracer.patch(looped, pairs_of(tiny("llama"), (5, 6)), components="resid", min_gap=1e-3, progress=False)
    assert result.run["checks"]["own_streams"] <= 1e-4


def test_a_component_that_no_block_has_is_refused():
    traced = tracer.load(tiny("mamba2"), word_tokenizer())
    with pytest.raises(tracer.InputError, match="no block of .* has a sub-layer 'mlp': leave it out"):
        tracer.patch(traced, pairs_of(traced.model), components="mlp", progress=False)


# --- tables, files, figures ------------------------------------------------------------------------------------------


def test_cells_are_means_with_the_intervals_of_the_statistics():
    generator = np.random.default_rng(0)
    values = generator.normal(size=(2, 3, 12))
    values[:, 0, 8:] = np.nan  # short prompts
    values[1, :, :] = np.nan  # a block without such a sub-layer
    groups, both = ["a"] * 6 + ["b"] * 6, np.arange(12) % 2 == 0
    cells = cell_table({"mixer": values}, (-3, -2, -1), groups, both, seed=3)
    assert list(cells["group"].unique()) == ["all", "a", "b"]

    def cell(place: int, position: int, group: str) -> pd.Series:
        chosen = cells["place"].eq(place) & cells["position"].eq(position) & cells["group"].eq(group)
        [found] = cells[chosen].to_dict("records")
        return found

    own = bootstrap_profile(np.ascontiguousarray(values[0, :, :6].T), None, seed=3, label=("recovery", "a"))
    found = cell(0, -2, "a")
    assert (found["n"], found["recovery"]) == (6, pytest.approx(values[0, 1, :6].mean()))
    assert (found["low"], found["high"]) == (pytest.approx(own.low[1]), pytest.approx(own.high[1]))
    assert (found["n_both"], found["recovery_both"]) == (3, pytest.approx(values[0, 1, [0, 2, 4]].mean()))
    pooled = pooled_interval(values[0, 0, :8], groups[:8], seed=3, label=("recovery", "all"))
    found = cell(0, -3, "all")
    assert (found["n"], found["low"], found["high"]) == (8, pytest.approx(pooled.low), pytest.approx(pooled.high))
    missing = cell(1, -1, "b")
    assert missing["n"] == 0
    assert np.isnan([missing["recovery"], missing["low"], missing["recovery_both"]]).all()


def same(a: PatchResult, b: PatchResult) -> None:
    assert a.arrays.keys() == b.arrays.keys()
    for name, array in a.arrays.items():
        assert np.array_equal(array, b.arrays[name], equal_nan=True)
    pd.testing.assert_frame_equal(a.cells, b.cells)
    pd.testing.assert_frame_equal(a.probes, b.probes)
    assert json.loads(json.dumps(a.run)) == json.loads(json.dumps(b.run))


def test_saved_result_reloads_as_it_was(llama, tmp_path):
    result = tracer.patch(llama, pairs_of(llama.model), min_gap=0.1, out=tmp_path / "run", progress=False)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == sorted(FILES)
    again = PatchResult.load(tmp_path / "run")
    same(result, again)
    assert again.summary() == result.summary()
    assert again.to_frame("probes").equals(result.probes)
    with pytest.raises(tracer.InputError, match="already holds a result"):
        tracer.patch(llama, pairs_of(llama.model), out=tmp_path / "run", progress=False)
    forced = tracer.patch(
        llama, pairs_of(llama.model), components="resid", min_gap=0.1, out=tmp_path / "run", force=True, progress=False
    )
    same(forced, PatchResult.load(tmp_path / "run"))
    with pytest.raises(tracer.InputError, match=r"is not a finished result \(blocks.csv is missing\)"):
        tracer.TraceResult.load(tmp_path / "run")
    (tmp_path / "run" / "probes.jsonl").write_text("{}\n")
    with pytest.raises(tracer.InputError, match="is damaged .* patch again with --force"):
        PatchResult.load(tmp_path / "run")


def test_an_interrupt_leaves_nothing(llama, tmp_path, monkeypatch):
    def interrupted(*args: object, **kwargs: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(patcher_module, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tracer.patch(llama, pairs_of(llama.model), out=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()
    assert all("_call_impl" not in block.__dict__ for block in oracle.blocks_of(llama.model))


def texts(figure) -> str:
    return " ".join(text.get_text() for text in figure.findobj(lambda a: hasattr(a, "get_text")))


def test_figure_shows_the_means_by_place_and_position(llama, tmp_path):
    probes = pairs_of(llama.model, (6, 6, 6, 6))
    result = tracer.patch(llama, probes, components="resid,mlp", min_gap=0.1, progress=False)
    figure = result.plot()
    panels = [axes for axes in figure.axes if axes.get_ylim() == (-1, BLOCKS)]
    maps = [axes.collections[0] for axes in panels]
    assert len(maps) == 4  # two groups, two components
    drawn = [np.asarray(mesh.get_array()) for mesh in maps]
    for values, (group, component) in zip(drawn, [(g, c) for g in ("g0", "g1") for c in ("resid", "mlp")], strict=True):
        # The first two columns, where both prompts are the same, are left out.
        assert np.allclose(values, result.heat_map(component, group).to_numpy()[:, 2:])
    assert all(mesh.norm.vmin == -mesh.norm.vmax for mesh in maps)
    # Depth d lies between the blocks that it separates, as in all figures.
    assert [mesh.get_coordinates()[0, 0, 1] for mesh in maps[:2]] == [-1.0, -0.5]
    assert [mesh.get_coordinates()[-1, 0, 1] for mesh in maps[:2]] == [BLOCKS, BLOCKS - 0.5]
    assert next(label.get_text() for label in panels[0].get_xticklabels()) == "−4"
    words = " ".join(texts(figure).split())
    assert "n = 2" in words
    assert "Columns where patching changes nothing are left out" in words
    pooled = result.plot("all")
    assert "all" in texts(pooled)
    with pytest.raises(tracer.InputError, match="unknown group 'g7'"):
        result.plot("g7")
    files = write_figures({"patching": result.plot}, tmp_path)
    again = write_figures({"patching": result.plot}, tmp_path / "again")
    assert [path.name for path in files] == ["patching.png", "patching.svg"]
    assert [path.read_bytes() for path in files] == [path.read_bytes() for path in again]


def test_columns_are_named_by_the_token_that_all_prompts_share(llama):
    answer = {"target": " w20", "corrupt_target": " w21"}
    texts_of = [("w5 w6 w7 w9", "w5 w6 w8 w9"), ("w5 w6 w1 w9", "w5 w6 w2 w9")]
    probes = [Probe(prompt=clean, corrupt=corrupt, **answer, id=clean) for clean, corrupt in texts_of]
    result = tracer.patch(llama, probes, components="resid", min_gap=1e-6, progress=False)
    panel = result.plot().axes[0]
    assert [label.get_text() for label in panel.get_xticklabels()] == ["−2", "w9 −1"]


@pytest.mark.parametrize("positions", ["last", "together"])
def test_a_single_column_is_drawn_as_a_profile(llama, positions):
    result = tracer.patch(
        llama, pairs_of(llama.model), components="block", positions=positions, min_gap=0.1, progress=False
    )
    [first, second] = result.plot().axes
    [_, _, line] = first.lines
    assert np.allclose(line.get_xdata(), result.heat_map("block", "g0").to_numpy()[:, 0])
    assert line.get_ydata().tolist() == [0, 1, 2, 3]
    assert second.get_xlabel() == "recovery"


# --- bad arguments and the command line ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"components": "resid,attention"}, "unknown component 'attention': pass one of resid, block, mixer, mlp"),
        ({"components": []}, "no component to patch"),
        ({"direction": "both"}, "unknown direction 'both': pass one of denoise, noise"),
        ({"metric": "kl"}, "unknown metric 'kl'"),
        ({"target": "joint"}, "unknown target 'joint'"),
        ({"positions": [0]}, "positions has 0: pass numbers below 0"),
        ({"positions": "first"}, "positions has 'first': pass numbers below 0"),
        ({"positions": []}, "no positions to patch"),
        ({"positions": [-40]}, "no position -40 to patch: pass some of -9, -8"),
        ({"positions": [-2], "position_map": {-1: -1}}, "no position -2 to patch: pass some of -1"),
        ({"position_map": "-1"}, "position map '-1' is no list of pairs"),
        ({"position_map": "-1:-1,-1:-2"}, "must name columns, each once"),
        ({"position_map": {}}, "must name columns, each once"),
        ({"position_map": {-1: 2}}, "position_map has 2: pass numbers below 0"),
        ({"position_map": {-1: -30}}, "position_map takes -1 from -30"),
        ({"min_gap": 0.0}, "min_gap is 0.0: pass a finite number above 0"),
        ({"min_gap": float("inf")}, "min_gap is inf: pass a finite number above 0"),
        ({"min_gap": float("nan")}, "min_gap is nan: pass a finite number above 0"),
        ({"limit": 0}, "limit is 0: pass a number of at least 1"),
        ({"batch_tokens": 0}, "batch_tokens is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"engine": "fast"}, "unknown engine 'fast'"),
        ({"groups": ["g9"]}, "no group 'g9'"),
    ],
)
def test_bad_arguments_are_refused_before_any_forward(llama, monkeypatch, tmp_path, settings, message):
    probes = pairs_of(llama.model)
    monkeypatch.setattr(type(llama.adapter), "run", lambda *args, **kwargs: pytest.fail("a forward ran"))
    with pytest.raises(tracer.InputError, match=re.escape(message)):
        tracer.patch(llama, probes, out=tmp_path / "run", progress=False, **settings)
    assert not (tmp_path / "run").exists()


def test_probes_that_do_not_fit_are_refused(llama):
    [probe, *_] = pairs_of(llama.model)
    foreign = Probe(
        prompt_ids=probe.prompt_ids, target_id=7, corrupt_ids=[3, 500, 4, 4, 4], corrupt_target_id=9, id="foreign"
    )
    with pytest.raises(tracer.InputError, match=r"probe foreign \(corrupt\) has token 500"):
        tracer.patch(llama, [foreign], progress=False)
    pooled = Probe(**{**vars(probe), "group": "all"})
    with pytest.raises(tracer.InputError, match="a group is called 'all'"):
        tracer.patch(llama, [pooled], progress=False)
    twin = Probe(prompt_ids=[5, 6], target_id=7, corrupt_ids=[5, 6], corrupt_target_id=9, id="twin")
    with pytest.raises(
        tracer.InputError, match="probe twin cannot be patched: corrupt prompt or corrupt target equals"
    ):
        tracer.patch(llama, [twin], progress=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny("llama").save_pretrained(path)
    word_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    rows = [
        {"prompt": f"w4 w{i} w9", "target": f" w{i + 1}", "corrupt": f"w4 w{i + 40} w9", "corrupt_target": f" w{i + 2}"}
        for i in range(3, 9)
    ]
    path.write_text("".join(json.dumps(row | {"group": f"g{i % 2}"}) + "\n" for i, row in enumerate(rows)))
    return path


def command(capsys: pytest.CaptureFixture, *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return stop.value.code or 0, out, err


def test_command_writes_a_result_with_its_figure(capsys, folder, file, tmp_path):
    out = tmp_path / "run"
    options = ["--components", "resid,block", "--min-gap", 0.01, "--position-map=-1:-1,-2:-2", "--limit", 2, "-q"]
    status, text, _ = command(capsys, "patch", folder, "--probes", file, "--out", out, *options)
    assert status == 0
    assert {path.name for path in out.iterdir()} == {*FILES, "figures"}
    assert {path.name for path in (out / "figures").iterdir()} == {"patching.png", "patching.svg"}
    result = PatchResult.load(out)
    assert result.probes["group"].value_counts().to_dict() == {"g0": 2, "g1": 2}
    assert result.run["arguments"]["position_map"] == [[-2, -2], [-1, -1]]
    for part in ("4 pairs in 2 groups (pairs)", "denoise: resid, block", "Recovery by block", str(out)):
        assert part in text
    assert max(len(line) for line in text.splitlines() if not line.startswith("saved in")) <= 120


def test_command_refuses_with_one_line(capsys, folder, file, tmp_path, monkeypatch):
    out = tmp_path / "run"
    short = tmp_path / "short.jsonl"
    short.write_text('{"prompt": "w1 w2 w3", "target": " w4", "corrupt": "w1 w2", "corrupt_target": " w5"}\n')
    for options, part in (
        ((folder, "--probes", file, "--components", "heads"), "unknown component 'heads'"),
        ((folder, "--probes", short), "3 tokens and its corrupt prompt 2"),
        ((folder, "--probes", file, "--position-map=1:1"), "position_map has '1'"),
        ((folder, "--probes", file, "--backend", "magic"), "unknown backend"),
        (("no-such-model", "--probes", file), "no-such-model"),
    ):
        status, _, err = command(capsys, "patch", *options, "--out", out, "-q")
        lines = [line for line in err.splitlines() if line.startswith("tracer: ")]
        assert (status, len(lines)) == (2, 1)
        assert part in lines[0]
        assert "Traceback" not in err
        assert not out.exists()
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    assert "notes.txt" in command(capsys, "patch", folder, "--probes", file, "--out", out)[2]
    (out / "notes.txt").unlink()
    out.rmdir()

    def interrupted(*args: object, **kwargs: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(patching.Patcher, "run", interrupted)
    status, _, err = command(capsys, "patch", folder, "--probes", file, "--out", out, "-q")
    assert (status, out.exists()) == (130, False)
    assert "interrupted; nothing was written" in err


def test_help_has_examples():
    script = "from tracer.cli import main; main(['patch', '--help'])"
    text = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "Examples:" in text
    assert "--position-map" in text
