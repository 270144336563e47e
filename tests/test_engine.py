"""The one-pass engine against whole forwards of single prompts, for every ablation and in every kind of model."""

import copy

import numpy as np
import oracle
import pytest
import torch
from tiny import BLOCKS, CORE, FAMILIES, tiny, word_tokenizer

import tracer
from tracer.ablations import Calibration, Edits, Variant, donor_positions
from tracer.models.selfcheck import open_plain
from tracer.probes import Probe
from tracer.statistics import rng

LENGTHS = (5, 11, 8, 5, 13)
PROMPTS = [[3 + (7 * row + 5 * i) % 120 for i in range(length)] for row, length in enumerate(LENGTHS)]
TARGETS = [20, 21, 22, 23, 24]
PROBES = [
    Probe(" ".join(f"w{i}" for i in ids), f" w{target}", "g", f"p{row}")
    for row, (ids, target) in enumerate(zip(PROMPTS, TARGETS, strict=True))
]
KINDS = ("zero", "mean", "resample", "noise", "zero_stream")


def opened(family: str) -> tracer.TracedModel:
    return tracer.load(tiny(family), word_tokenizer())


@pytest.fixture(scope="module")
def models() -> dict[str, tracer.TracedModel]:
    return {family: opened(family) for family in CORE}


def reference_edit(kind: str, model: torch.nn.Module, block: int, row: int, positions: str, seed: int):
    """The definition of an ablation, written out for one prompt."""
    ids = PROMPTS[row]
    contribution = [oracle.contributions(model, prompt) for prompt in PROMPTS]
    first = np.stack([c[block, 0] for c in contribution])
    others = np.concatenate([c[block, 1:] for c in contribution])
    donor = sorted(set(range(len(PROMPTS))) - {row})[int(rng(seed, "donor", f"p{row}").integers(len(PROMPTS) - 1))]
    acts = {"all": range(len(ids)), "not_first": range(1, len(ids)), "last": [len(ids) - 1]}[positions]
    noise = rng(seed, "noise", block, 0, f"p{row}").standard_normal((len(ids), others.shape[1]), dtype=np.float32)

    def edit(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        new = after.clone()
        for position in acts:
            mine = first if position == 0 else others
            x, y = before[0, position].double(), after[0, position].double()
            if kind == "zero":
                value = x
            elif kind == "zero_stream":
                value = torch.zeros_like(x)
            elif kind == "mean":
                value = x + torch.from_numpy(mine.mean(0))
            elif kind == "noise":
                value = y + torch.from_numpy(mine.std(0) * noise[position])
            else:
                place = 0 if position == 0 else position - len(ids) + len(PROMPTS[donor])
                if position > 0 and place < 1:
                    continue
                value = x + torch.from_numpy(contribution[donor][block, place])
            new[0, position] = value
        return new

    return edit


@pytest.mark.parametrize("family", CORE)
@pytest.mark.parametrize("kind", KINDS)
def test_every_ablation_equals_a_whole_forward_of_each_prompt_alone(models, family, kind):
    traced = models[family]
    result = tracer.trace(traced, PROBES, ablations=[kind], noise_samples=1, seed=3, progress=False)
    for row, ids in enumerate(PROMPTS):
        clean = oracle.forward(traced.model, ids)[-1]
        for block in range(BLOCKS):
            edit = reference_edit(kind, traced.model, block, row, "all", 3)
            ablated = oracle.forward(traced.model, ids, block, edit)[-1]
            assert result.arrays[f"jsd_{kind}"][block, row] == pytest.approx(oracle.jsd(clean, ablated), abs=1e-5)
            assert result.arrays[f"log_p_{kind}"][block, row] == pytest.approx(ablated[TARGETS[row]].item(), abs=2e-4)
            entropy = -(ablated.exp() * ablated).sum().item()
            assert result.arrays[f"entropy_{kind}"][block, row] == pytest.approx(entropy, abs=1e-3)
            rank = 1 + int((ablated > ablated[TARGETS[row]]).sum())
            if kind != "zero_stream":  # where all tokens are alike, rounding decides their order
                assert 2 ** result.arrays[f"log2_rank_{kind}"][block, row] == pytest.approx(rank, abs=1.01)
                kept = bool(ablated.argmax() == TARGETS[row])
                assert result.arrays[f"answered_{kind}"][block, row] == kept
            kl = (ablated.exp() * (ablated - clean)).sum().item()
            assert result.arrays[f"kl_{kind}"][block, row] == pytest.approx(kl, abs=1e-3)

        assert result.arrays[f"jsd_{kind}"].max() > 1e-3, "the ablation does nothing: the check would be vacuous"


@pytest.mark.parametrize("positions", ["not_first", "last"])
@pytest.mark.parametrize("kind", KINDS)
def test_ablations_act_only_at_the_chosen_positions(models, kind, positions):
    traced = models["llama"]
    result = tracer.trace(
        traced, PROBES, ablations=[kind], positions=positions, noise_samples=1, seed=1, progress=False
    )
    for row, ids in enumerate(PROMPTS):
        clean = oracle.forward(traced.model, ids)[-1]
        for block in range(BLOCKS):
            edit = reference_edit(kind, traced.model, block, row, positions, 1)
            ablated = oracle.forward(traced.model, ids, block, edit)[-1]
            assert result.arrays[f"jsd_{kind}"][block, row] == pytest.approx(oracle.jsd(clean, ablated), abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_lens_equals_a_forward_whose_last_block_returns_the_stream(family):
    traced = opened(family)
    result = tracer.trace(traced, PROBES, ablations=[], progress=False)
    for row, ids in enumerate(PROMPTS):
        for depth, stream in enumerate(oracle.streams(traced.model, ids)):
            expected = oracle.lens(traced.model, ids, stream)[-1]
            assert result.arrays["log_p"][depth, row] == pytest.approx(expected[TARGETS[row]].item(), abs=1e-4)
            entropy = -(expected.exp() * expected).sum().item()
            assert result.arrays["entropy"][depth, row] == pytest.approx(entropy, abs=1e-4)
            rank = 1 + int((expected > expected[TARGETS[row]]).sum())
            assert abs(result.arrays["rank"][depth, row] - rank) <= 1
            assert result.arrays["norm"][depth, row] == pytest.approx(stream[-1].norm().item(), rel=1e-4)
            angle = oracle.angle(oracle.streams(traced.model, ids)[max(0, depth - 1)][-1], stream[-1])
            assert result.arrays["angle"][depth, row] == pytest.approx(angle, abs=1e-4)
        final = oracle.forward(traced.model, ids)[-1]
        assert result.arrays["log_p"][-1, row] == pytest.approx(final[TARGETS[row]].item(), abs=1e-4)
        first = oracle.lens(traced.model, ids, oracle.streams(traced.model, ids)[0])[-1]
        to_final = (first.exp() * (first - final)).sum().item()
        assert result.arrays["kl_to_final"][0, row] == pytest.approx(to_final, abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_onepass_equals_full_and_does_not_depend_on_batching(family):
    traced = opened(family)
    settings = {"ablations": KINDS, "noise_samples": 2, "progress": False}
    onepass = tracer.trace(traced, PROBES, **settings)
    assert onepass.run["engine"] == "onepass"
    full = tracer.trace(traced, PROBES, engine="full", **settings)
    one_by_one = tracer.trace(traced, PROBES, batch_tokens=1, **settings)
    reordered = tracer.trace(traced, PROBES[::-1], **settings)
    for kind in KINDS:
        jsd = onepass.arrays[f"jsd_{kind}"]
        assert np.abs(jsd - full.arrays[f"jsd_{kind}"]).max() <= 1e-5
        assert np.abs(jsd - one_by_one.arrays[f"jsd_{kind}"]).max() <= 1e-5
        assert np.abs(jsd - reordered.arrays[f"jsd_{kind}"][:, ::-1]).max() <= 1e-5
    for other in (full, one_by_one):
        assert np.abs(np.exp(onepass.arrays["log_p"]) - np.exp(other.arrays["log_p"])).max() <= 1e-5


@pytest.mark.parametrize("positions", ["not_first", "last"])
@pytest.mark.parametrize("family", CORE)
def test_onepass_equals_full_at_chosen_positions(models, family, positions):
    settings = {"ablations": KINDS, "noise_samples": 1, "positions": positions, "progress": False}
    onepass, full = (tracer.trace(models[family], PROBES, engine=e, **settings) for e in ("onepass", "full"))
    for kind in KINDS:
        assert np.abs(onepass.arrays[f"jsd_{kind}"] - full.arrays[f"jsd_{kind}"]).max() <= 1e-5


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "bloom", "gemma2", "granite", "olmo2", "mamba2"])
def test_skip_equals_a_model_with_the_block_deleted(family):
    traced = opened(family)
    result = tracer.trace(traced, PROBES, ablations=["skip"], progress=False)
    for block in range(BLOCKS):
        shorter = copy.deepcopy(traced.model)
        del oracle.blocks_of(shorter)[block]
        for row, ids in enumerate(PROMPTS):
            expected = oracle.jsd(oracle.forward(traced.model, ids)[-1], oracle.forward(shorter, ids)[-1])
            assert result.arrays["jsd_zero"][block, row] == pytest.approx(expected, abs=1e-5)


def test_one_block_alone_gives_the_same_noise_as_in_a_sweep(models):
    """The draw depends on (seed, block, sample, probe), not on what else is swept; the global state is not touched."""
    traced = models["llama"]
    state = torch.get_rng_state()
    edits = Edits(
        traced.adapter,
        torch.ones(1, 4, dtype=torch.bool),
        ("p0",),
        (4,),
        seed=5,
        calibration=_unit_calibration(),
    )
    before, after = torch.zeros(1, 4, 64), torch.ones(1, 4, 64)
    noisy = edits.apply(Variant("noise", 2, 0), None, before, after)
    edits.apply(Variant("noise", 1, 0), None, before, after)
    assert torch.equal(noisy, edits.apply(Variant("noise", 2, 0), None, before, after))
    assert not torch.equal(noisy, edits.apply(Variant("noise", 2, 1), None, before, after))
    assert torch.equal(state, torch.get_rng_state())
    result = tracer.trace(traced, PROBES, ablations=["noise"], noise_samples=2, seed=1, progress=False)
    other = tracer.trace(traced, PROBES, ablations=["noise"], noise_samples=2, seed=2, progress=False)
    silent = tracer.trace(traced, PROBES, ablations=["noise"], noise_scale=0.0, noise_samples=1, progress=False)
    assert np.abs(result.arrays["jsd_noise"] - other.arrays["jsd_noise"]).max() > 1e-4
    assert silent.arrays["jsd_noise"].max() < 1e-9


def _unit_calibration() -> Calibration:
    summands = [(block, None) for block in range(4)]
    mean, std = ({s: torch.full((2, 64), value) for s in summands} for value in (0.0, 1.0))
    return Calibration(mean, std, (1, 1))


def test_donor_positions_never_cross_the_first_position():
    # probe of 5 tokens, donor of 3: first with first, the last two aligned, the rest keep their own
    assert donor_positions(5, 3, 6).tolist() == [0, -1, -1, 1, 2, -1]
    assert donor_positions(3, 5, 3).tolist() == [0, 3, 4]


def test_identical_prompts_in_one_batch_stay_identical_under_ablation():
    """A tuple output must not be mistaken for a batch: both rows change, and alike."""
    for family in ("bloom", "falcon_h1", "mixtral", "llama"):
        ids = PROMPTS[1]
        twins = [Probe(" ".join(f"w{i}" for i in ids), " w20", "g", name) for name in ("a", "b")]
        jsd = tracer.trace(opened(family), twins, progress=False).arrays["jsd_zero"]
        assert np.allclose(jsd[:, 0], jsd[:, 1], atol=1e-6)
        assert (jsd > 1e-6).all()


def test_work_is_counted_as_one_pass(models):
    result = tracer.trace(models["llama"], PROBES[:1], progress=False)
    runs = BLOCKS + BLOCKS * (BLOCKS - 1) // 2
    assert result.run["work"]["block_tokens"] == runs * LENGTHS[0]


def test_blocks_really_run_that_often_and_no_more(models):
    """Count the calls of the block modules themselves with a user's hooks."""
    traced = models["llama"]
    rows = [0] * BLOCKS
    handles = [
        block.register_forward_hook(lambda m, a, o, i=i: rows.__setitem__(i, rows[i] + o.shape[0]))
        for i, block in enumerate(oracle.blocks_of(traced.model))
    ]
    try:
        tracer.trace(traced, PROBES[:1], progress=False)
    finally:
        for handle in handles:
            handle.remove()
    assert rows == [1, 2, 3, 4]


def test_the_adapter_refuses_a_trace_inside_a_trace():
    model = tiny("llama")
    adapter, _ = open_plain(model)
    with pytest.raises(tracer.HookError, match="already intercepted"):
        adapter.run(_batch(), lambda site: adapter.run(_batch(), lambda inner: inner.run()))
    assert all("_call_impl" not in block.__dict__ for block in oracle.blocks_of(model))


def _batch():
    from tracer.models.tokens import TokenBatch

    return TokenBatch.from_rows([[5, 6, 7]])
