"""Known numbers of real pretrained models. Skipped where the catalogue's files have not been fetched."""

import csv
from pathlib import Path

import numpy as np
import oracle
import pytest
import torch

import tracer
from tracer.models.catalogue import cached_folder
from tracer.probes import Probe

SMOLLM2 = "smollm2-135m-instruct-q4_1"
GEMMA = "gemma3-270m-q4_k_m"
PARIS = Probe("The capital of France is", " Paris", "capitals", "paris")
HI = Probe("Hi", " there", "capitals", "hi")


def loaded(name: str, **options) -> tracer.TracedModel:
    if cached_folder(name) is None:
        pytest.skip(f"needs the weights: tracer fetch {name}")
    return tracer.load(name, progress=False, **options)


@pytest.fixture(scope="module")
def smollm2() -> tracer.TracedModel:
    """By plain hooks, so that the oracle can run the same model."""
    return loaded(SMOLLM2, dtype="float32", backend="hooks")


@pytest.fixture(scope="module")
def gemma() -> tracer.TracedModel:
    return loaded(GEMMA, dtype="float32", backend="hooks")


@pytest.fixture(scope="module")
def paris(smollm2) -> tracer.TraceResult:
    return tracer.trace(smollm2, [PARIS, HI], ablations=["skip", "zero_stream"], progress=False)


def test_lens_probabilities(paris):
    p = np.exp(paris.arrays["log_p"][:, 0])
    assert paris.probes.loc[0, "answer"] == " Paris"
    assert p[30] == pytest.approx(0.7725, rel=0.02)
    assert p[29] == pytest.approx(0.0703, rel=0.02)
    assert p[27] == pytest.approx(0.0003, rel=0.2)
    assert paris.probes.loc[0, "particle"] is not None


def test_bridge_gives_the_numbers_of_plain_hooks(smollm2, paris):
    bridged = loaded(SMOLLM2, dtype="float32")
    assert bridged.backend == "transformer_lens"
    assert bridged.opened.notes[-1] == "booted as TransformerBridge: attention runs in its eager form"
    assert bridged.fingerprint() == smollm2.fingerprint()
    result = tracer.trace(bridged, [PARIS, HI], ablations=["skip"], progress=False)
    assert np.abs(np.exp(result.arrays["log_p"]) - np.exp(paris.arrays["log_p"])).max() <= 1e-5
    assert np.abs(result.arrays["jsd_zero"] - paris.arrays["jsd_zero"]).max() <= 1e-5
    assert result.probes["particle"].equals(paris.probes["particle"])


def test_skip_divergences(paris):
    jsd = paris.arrays["jsd_zero"][:, 0]
    assert jsd[[0, 1, 10, 28, 29]] == pytest.approx([0.671, 0.629, 0.0345, 0.142, 0.374], abs=2e-3)


def test_zeroing_the_whole_stream_is_degenerate(paris):
    assert paris.arrays["jsd_zero_stream"][:, 0] == pytest.approx(0.6631, abs=1e-3)
    assert np.ptp(paris.arrays["jsd_zero_stream"], axis=0).max() < 1e-6
    assert any("zero_stream profile is flat" in note for note in paris.run["warnings"])


def test_short_prompt_beside_a_long_one_reads_as_it_does_alone(smollm2, paris):
    alone = tracer.trace(smollm2, [HI], progress=False)
    assert paris.arrays["jsd_zero"][:, 1] == pytest.approx(alone.arrays["jsd_zero"][:, 0], abs=1e-5)
    assert np.exp(paris.arrays["log_p"][:, 1]) == pytest.approx(np.exp(alone.arrays["log_p"][:, 0]), abs=1e-5)


def test_skip_equals_the_model_without_the_block(smollm2, paris):
    ids = smollm2.tokenizer.encode(PARIS.prompt)
    clean = oracle.forward(smollm2.model, ids)[-1]
    blocks = smollm2.model.model.layers
    for block in (1, 17, 29):
        smollm2.model.model.layers = torch.nn.ModuleList(b for i, b in enumerate(blocks) if i != block)
        try:
            without = oracle.forward(smollm2.model, ids)[-1]
        finally:
            smollm2.model.model.layers = blocks
        assert paris.arrays["jsd_zero"][block, 0] == pytest.approx(oracle.jsd(clean, without), abs=1e-5)


def test_target_of_three_byte_fragments_is_the_product_of_three_forwards(smollm2):
    ids = smollm2.tokenizer.encode("The Chinese word for water is")
    fragments = smollm2.tokenizer.encode("The Chinese word for water is水")[len(ids) :]
    assert len(fragments) == 3
    probe = Probe("The Chinese word for water is", "水", "zh", "water")
    with pytest.raises(tracer.InputError, match="3 tokens"):
        tracer.trace(smollm2, [probe], ablations=[], progress=False)
    joint = tracer.trace(smollm2, [probe], ablations=[], target="joint", progress=False)
    expected = sum(
        oracle.forward(smollm2.model, ids + fragments[:i])[-1][fragments[i]].item() for i in range(len(fragments))
    )
    assert joint.arrays["log_p"][-1, 0] == pytest.approx(expected, abs=1e-3)


def test_half_precision_finds_the_same_particle(paris):
    model = loaded(SMOLLM2, dtype="bfloat16")
    assert any("bfloat16" in str(x) for x in (model.opened.dtype, *model.opened.notes))
    result = tracer.trace(model, [PARIS, HI], ablations=[], progress=False)
    rule = tracer.ParticleRule("max_rise")
    from tracer.particle import task_particles

    found = [task_particles(np.exp(r.arrays["log_p"]), None, rule)[0] for r in (paris, result)]
    assert found[0] == found[1]


def test_norm_is_applied_exactly_once(smollm2):
    """Without the final norm this model gives Paris nothing at any depth; with it twice 0.0055."""
    ids = smollm2.tokenizer.encode(PARIS.prompt)
    last = oracle.streams(smollm2.model, ids)[-1][-1]
    head, norm = smollm2.model.lm_head, smollm2.model.model.norm
    with torch.no_grad():
        p = [head(x).softmax(-1)[7042].item() for x in (last, norm(last), norm(norm(last)))]
    assert p == pytest.approx([0.0, 0.7725, 0.0055], abs=1e-3)


def test_embedding_scale_is_read_from_the_stream(gemma):
    """The stream before block 0 is the scaled embedding; the row of the table is 25.3 times too small."""
    ids = gemma.tokenizer.encode("法国的首都是")
    assert ids.count(gemma.tokenizer.bos_token_id) == 1
    result = tracer.trace(gemma, [Probe("法国的首都是", "巴黎", "zh", "fr")], ablations=[], progress=False)
    row = gemma.model.get_input_embeddings().weight[ids[-1]].norm().item()
    assert result.arrays["norm"][0, 0] == pytest.approx(25.298 * row, rel=1e-3)
    assert result.probes.loc[0, "target_ids"] == [142253]
    assert result.probes.loc[0, "p_final"] == pytest.approx(0.034, abs=2e-3)
    assert result.probes.loc[0, "rank_final"] == 2


def test_model_that_says_the_same_to_every_question_has_no_particle(gemma):
    """On four-way questions a small model is right by chance; that is not knowledge, and has no block."""
    folder = Path(__file__).parents[2] / "shared" / "data" / "ceval" / "val"
    files = sorted(folder.glob("*.csv"))
    if not files:
        pytest.skip("needs C-Eval's val files")
    probes = []
    for path in files:
        with path.open(encoding="utf-8-sig") as lines:
            for row in list(csv.DictReader(lines))[:1]:
                question = "\n".join([row["question"], *(f"{letter}. {row[letter]}" for letter in "ABCD"), "答案："])
                probes.append(Probe(question, row["answer"], "ceval", f"{path.stem}-{row['id']}"))
    result = tracer.trace(gemma, probes[:40], ablations=[], progress=False)
    group = result.groups.iloc[0]
    assert np.isnan(group["block"])
    assert group["why_not"] is not None
