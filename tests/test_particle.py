"""Task particles: found where they were planted, and nowhere else."""

import numpy as np
import pytest
from planted import planted
from tiny import word_tokenizer

import tracer
from tracer.particle import NO_BLOCK, ParticleRule, group_particle, task_particles
from tracer.probes import Probe

PROBES = [Probe(f"w{(5 * i) % 60} w{i}", f" w{i + 1}", "successor", f"p{i}") for i in range(2, 42)]


def traced(model, probes=PROBES, **options):
    return tracer.trace(tracer.load(model, word_tokenizer(64)), probes, progress=False, **options)


@pytest.mark.parametrize("block", range(6))
def test_particle_is_found_in_the_block_that_writes_the_answer(block):
    result = traced(planted(block))
    assert result.probes["answered"].all()
    assert (result.probes["particle"] == block).all()
    group = result.groups.iloc[0]
    assert (group["block"], group["block_low"], group["block_high"]) == (block, block, block)
    assert group["depth"] == block / 5
    assert result.blocks["particles"].tolist() == [40 if b == block else 0 for b in range(6)]
    # the same block is where the model breaks
    assert result.blocks["jsd_zero"].idxmax() == block


def test_model_that_knows_nothing_has_no_particle():
    result = traced(planted(-1))
    group = result.groups.iloc[0]
    assert np.isnan(group["block"])
    assert "answered" in group["why_not"]
    assert result.run["particle_block"]["estimate"] is None
    assert any("no group has a particle" in note for note in result.run["warnings"])


def test_model_that_always_gives_one_answer_has_none_although_it_answers_a_quarter():
    """Four-way questions, of which a constant answer is right on every fourth."""
    probes = [Probe(f"w{i} w{i + 7}", f" w{50 + i % 4}", "four-way", f"q{i}") for i in range(2, 42)]
    result = traced(planted(3, constant=51), probes)
    group = result.groups.iloc[0]
    assert group["answered"] == 10
    assert group["p_value"] > 0.05
    assert np.isnan(group["block"])
    assert "different answers" in group["why_not"]


@pytest.mark.parametrize(
    ("curve", "block"),
    [
        ([0.0, 0.0, 0.6, 0.6, 0.6], 1),
        ([0.0, 0.04, 0.6, 0.6, 0.6], 1),  # a rise under min_rise does not count
        ([0.0, 0.1, 0.9, 0.9, 0.9], 1),  # nor one under a quarter of the largest
        ([0.0, 0.3, 0.9, 0.9, 0.9], 0),
        ([0.0, 0.5, 0.1, 0.1, 0.9], 3),  # a rise that is lost again does not count
        ([0.0, 0.5, 0.2, 0.2, 0.2], 0),  # a quarter of it kept is enough
        ([0.9, 0.9, 0.9, 0.9, 0.9], NO_BLOCK),  # what the embedding says is no block's work
        ([0.0, 0.01, 0.01, 0.02, 0.02], NO_BLOCK),
    ],
)
def test_first_rise_as_defined(curve, block):
    p = np.array(curve)[:, None]
    assert task_particles(p, np.zeros(5)).tolist() == [block]


def test_rise_must_leave_the_null_band():
    p = np.array([0.0, 0.3, 0.7, 0.7])[:, None]
    assert task_particles(p, np.array([0, 0.1, 0.1, 0.1])).tolist() == [0]
    assert task_particles(p, np.array([0, 0.4, 0.1, 0.1])).tolist() == [1]
    assert task_particles(p, None).tolist() == [NO_BLOCK]


def test_other_rules():
    p = np.array([[0.0, 0.1, 0.5, 0.6, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0]]).T
    band = np.zeros(5)
    assert task_particles(p, band, ParticleRule("half_final")).tolist() == [1, NO_BLOCK]
    assert task_particles(p, band, ParticleRule("max_rise")).tolist() == [1, NO_BLOCK]
    with pytest.raises(tracer.InputError, match="unknown particle rule 'steepest'"):
        ParticleRule("steepest")


def test_group_reasons():
    generator = np.random.default_rng(1)
    own = np.arange(12) % 4
    chance = np.log(generator.dirichlet(np.ones(4), (5, 12)))
    knows = chance.copy()
    knows[3:, np.arange(12), own] = -0.01
    particles = np.full(12, 2)

    def why(log_p, n=12, answered=12):
        right = np.arange(n) < answered
        return group_particle("g", log_p[:, :n], own[:n], right, particles[:n], seed=0).why_not

    assert why(knows) is None
    assert "not measurable: 9 usable" in why(knows, n=9)
    assert "5 of 12 probes answered" in why(knows, answered=5)
    assert "does not tell the prompts apart" in why(chance)


def test_targets_of_several_tokens_read_jointly():
    """The joint probability is the product of teacher-forced ones, also for the null."""
    probes = [Probe(f"w{i}", f" w{i + 1} w{i + 2}", "pairs", f"p{i}") for i in range(2, 32)]
    model = planted(2)
    with pytest.raises(tracer.InputError, match="pass target='first' or 'joint'"):
        traced(model, probes)
    joint = traced(model, probes, target="joint")
    first = traced(model, [Probe(f"w{i}", f" w{i + 1}", "a", f"p{i}") for i in range(2, 32)])
    second = traced(model, [Probe(f"w{i} w{i + 1}", f" w{i + 2}", "a", f"p{i}") for i in range(2, 32)])
    assert np.allclose(joint.arrays["log_p"], first.arrays["log_p"] + second.arrays["log_p"], atol=1e-5)
    assert (joint.probes["particle"] == 2).all()
    assert joint.groups.iloc[0]["block"] == 2
    null = joint.arrays["rival_log_p/pairs"]
    assert null.shape == (7, 30, 30)
    assert np.allclose(null[:, np.arange(30), np.arange(30)], joint.arrays["log_p"], atol=1e-5)
    assert np.allclose(joint.arrays["jsd_zero"], first.arrays["jsd_zero"], atol=1e-6)
