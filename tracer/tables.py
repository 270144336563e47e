"""From the numbers per probe of a whole trace to its tables and statistics."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from tracer.ablations import DRAWN, Variant
from tracer.batches import TargetTable
from tracer.divergence import MAX_JSD
from tracer.evolution import DEPTH_MEASURES, evolution_table, stability_table
from tracer.fragility import Fragility, fragility
from tracer.measures import Measures
from tracer.models.anatomy import Anatomy
from tracer.particle import NO_BLOCK, GroupParticle, ParticleRule, group_null, group_particle, task_particles
from tracer.patcher import MIN_GAP
from tracer.probes import TokenizedProbe, TokenizedProbes, Tokenizer
from tracer.recovery import NO_PAIR
from tracer.results import typed_probes
from tracer.statistics import MIN_SEEDS, bootstrap_profile, t_interval

LATE_SHARE = 0.9
"""Particles beyond this share of the depth may say more about the lens than about the model."""


def by_kind(measures: Measures, variants: Sequence[Variant], n_blocks: int) -> dict[str, np.ndarray]:
    """Arrays of a result from the measures of all probes: one `[blocks, probes]` array a measure and ablation.

    Draws of noise are averaged per probe (the divergences, not the distributions); `jsd_noise_by_sample` keeps the
    mean of every draw as `[samples, blocks]`, and likewise for `perturb`. A part that a block does not have is missing.
    """
    arrays: dict[str, np.ndarray] = {name: getattr(measures, name) for name in ("log_p", "ceiling", *DEPTH_MEASURES)}
    averaged = {
        "jsd": measures.jsd,
        "log_p": measures.ablated_log_p,
        "log2_rank": np.log2(measures.ablated_rank),
        "answered": measures.ablated_answered.astype(float),
        "entropy": measures.ablated_entropy,
        "kl": measures.ablated_kl,
        "angle": measures.ablated_angle,
        "norm": measures.ablated_norm,
    }
    for label in dict.fromkeys(variant.label for variant in variants):
        rows = [row for row, variant in enumerate(variants) if variant.label == label]
        blocks = [variants[row].block for row in rows]
        samples = 1 + max(variants[row].sample for row in rows)
        for name, values in averaged.items():
            filled = np.full((n_blocks, samples, values.shape[1]), np.nan)
            filled[blocks, [variants[row].sample for row in rows]] = values[rows]
            arrays[f"{name}_{label}"] = filled.mean(axis=1)
            if name == "jsd" and variants[rows[0]].kind in DRAWN:
                arrays[f"jsd_{label}_by_sample"] = np.ascontiguousarray(filled.mean(axis=2).T)
    return arrays


def particles_of(
    items: Sequence[TokenizedProbe],
    table: TargetTable,
    unusable: Sequence[str],
    answered: np.ndarray,
    rule: ParticleRule,
    seed: int,
    arrays: dict[str, np.ndarray],
    rivals: Mapping[str, np.ndarray],
) -> tuple[np.ndarray, list[GroupParticle]]:
    """Particles per probe and per group; adds every group's null band and rivals to `arrays`.

    Args:
        items: the probes.
        table: the targets of each group.
        unusable: groups without a usable probe.
        answered: per probe.
        rule: which block is a particle.
        seed: of the permutations and the bootstrap.
        arrays: `log_p` `[depths, probes]`, through one lens.
        rivals: per group the log-probability of its targets `[depths, probes, targets]`, through the same lens.
    """
    groups = np.array([item.probe.group for item in items])
    particles = np.full(len(items), NO_BLOCK)
    results = []
    for group, log_p in rivals.items():
        index = np.flatnonzero(groups == group)
        own = table.own[index]
        band = group_null(log_p, own)
        p = np.exp(arrays["log_p"][:, index])
        particles[index] = task_particles(p, None if band is None else band[1], rule)
        results.append(group_particle(group, log_p, own, answered[index], particles[index], seed=seed))
        arrays[f"rival_log_p/{group}"] = log_p.astype(np.float32)
        if band is not None:
            arrays[f"null_low/{group}"], arrays[f"null_high/{group}"] = band
    return particles, results + [GroupParticle.unmeasured(group) for group in unusable]


def fragilities(
    kinds: Sequence[str],
    arrays: Mapping[str, np.ndarray],
    answered: np.ndarray,
    groups: Sequence[str],
    mixers: Sequence[str],
    seed: int,
) -> list[Fragility]:
    """Fragility of every block under every ablation, pooled over groups."""
    return [
        fragility(
            kind,
            arrays[f"jsd_{kind}"],
            arrays[f"log_p_{kind}"] - arrays["log_p"][-1],
            arrays[f"answered_{kind}"],
            answered,
            arrays["ceiling"],
            groups,
            mixers,
            seed=seed,
        )
        for kind in kinds
    ]


def group_fragilities(
    kinds: Sequence[str],
    arrays: Mapping[str, np.ndarray],
    answered: np.ndarray,
    groups: Sequence[str],
    mixers: Sequence[str],
    seed: int,
) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Mean JSD of every block with its interval, group by group and ablation by ablation, as plain data."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for group in dict.fromkeys(groups):
        chosen = np.array(groups) == group
        own = {name: array[..., chosen] for name, array in arrays.items() if array.shape[-1:] == chosen.shape}
        for entry in fragilities(kinds, own, answered[chosen], [group] * int(chosen.sum()), mixers, seed):
            columns = ("jsd", "jsd_low", "jsd_high")
            found.setdefault(group, {})[entry.kind] = {name: entry.table[name].tolist() for name in columns}
    return found


def probe_table(
    items: Sequence[TokenizedProbe],
    arrays: Mapping[str, np.ndarray],
    answers: np.ndarray,
    answered: np.ndarray,
    particles: np.ndarray,
    kinds: Sequence[str],
    undefined: Sequence[str | None] | None,
    tokenizer: Tokenizer | None,
) -> pd.DataFrame:
    """One row per usable probe; texts are missing where a probe is token ids and there is no tokenizer.

    Args:
        items: the probes.
        arrays: of the result.
        answers: top-1 token per probe.
        answered: per probe.
        particles: per probe.
        kinds: the ablations; the first one gives the largest divergence.
        undefined: why a probe has no recovery, None where it has one; None where recovery was not asked for.
        tokenizer: for texts of ids.
    """

    def text(given: str | None, ids: Sequence[int]) -> str | None:
        return given if given is not None or tokenizer is None else tokenizer.decode(list(ids))

    p = np.exp(arrays["log_p"])
    rows = []
    for i, item in enumerate(items):
        found = particles[i] != NO_BLOCK
        row: dict[str, Any] = {
            "id": item.probe.id,
            "group": item.probe.group,
            "prompt": text(item.probe.prompt, item.prompt_ids),
            "target": text(item.probe.target, item.target_ids),
            "prompt_ids": list(item.prompt_ids),
            "target_ids": list(item.target_ids),
            "n_tokens": len(item.prompt_ids),
            "answered": bool(answered[i]),
            "answer": text(None, [int(answers[i])]),
            "answer_id": int(answers[i]),
            "p_final": float(p[-1, i]),
            "rank_final": int(arrays["rank"][-1, i]),
            "particle": int(particles[i]) if found else None,
            "rise": float(p[particles[i] + 1, i] - p[particles[i], i]) if found else None,
        }
        if kinds:
            jsd = arrays[f"jsd_{kinds[0]}"][:, i]
            row |= {"jsd_max": float(np.nanmax(jsd)), "jsd_max_block": int(np.nanargmax(jsd))}
        if undefined is not None:
            row["recovery_undefined"] = undefined[i]
        rows.append(row)
    return typed_probes(rows)


def block_table(
    anatomy: Anatomy,
    arrays: Mapping[str, np.ndarray],
    fragile: Sequence[Fragility],
    particles: np.ndarray,
    counted: np.ndarray,
) -> pd.DataFrame:
    """One row per block.

    Args:
        anatomy: of the model.
        arrays: of the result.
        fragile: one entry per ablation.
        particles: per probe.
        counted: which probes count in the particle histogram.
    """
    n_blocks = anatomy.n_blocks
    table = pd.DataFrame(
        {
            "block": np.arange(n_blocks),
            "mixer": list(anatomy.mixers),
            "module": [call.module for call in anatomy.calls],
            "particles": np.bincount(particles[counted & (particles != NO_BLOCK)], minlength=n_blocks),
        }
    )
    for entry in fragile:
        kind = entry.kind
        table = table.join(entry.table.add_suffix(f"_{kind}"))
        table = table.join(stability_table(arrays, kind).add_suffix(f"_{kind}"))
        draws = arrays.get(f"jsd_{kind}_by_sample")
        if draws is not None and len(draws) >= MIN_SEEDS:
            seeds = [t_interval(column) for column in draws.T]
            table[f"jsd_{kind}_draw_low"] = [interval.low for interval in seeds]
            table[f"jsd_{kind}_draw_high"] = [interval.high for interval in seeds]
    after = evolution_table(arrays).drop(columns="depth").iloc[1:].reset_index(drop=True)
    return table.join(after)


def recovery_reasons(tokenized: TokenizedProbes, undefined: Sequence[str | None]) -> list[str | None]:
    """Why each probe has no recovery; a corrupt prompt that the tokenizer cannot represent is said with its reason."""
    skipped = {skip.where: f"{NO_PAIR}: {skip.reason}" for skip in tokenized.corrupt_skipped}
    return [
        skipped.get(item.probe.id, reason) if reason == NO_PAIR else reason
        for item, reason in zip(tokenized.items, undefined, strict=True)
    ]


def recovery_columns(
    recovery: np.ndarray, undefined: Sequence[str | None], groups: Sequence[str], seed: int
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The mean recovery of every block with its interval, how many probes it comes from, and why others have none.

    Args:
        recovery: `[blocks, probes]`, missing for probes where it is undefined.
        undefined: why it is, per probe; None where it is defined.
        groups: group of each probe.
        seed: of the bootstrap.
    """
    defined = np.array([reason is None for reason in undefined])
    of = [group for group, chosen in zip(groups, defined, strict=True) if chosen]
    found = bootstrap_profile(np.ascontiguousarray(recovery[:, defined].T), of, seed=seed, label="recovery")
    ends = {"recovery": found.mean, "recovery_low": found.low, "recovery_high": found.high}
    nothing = np.full(len(recovery), np.nan)
    about = {
        "metric": "logit_diff",
        "min_gap": MIN_GAP["logit_diff"],
        "n": int(defined.sum()),
        "undefined": dict(Counter(reason for reason in undefined if reason is not None)),
        "intervals": found.method,
    }
    return pd.DataFrame({name: nothing if end is None else end for name, end in ends.items()}), about


def warnings_of(
    anatomy: Anatomy, groups: Sequence[GroupParticle], plain_block: float | None, fragile: Sequence[Fragility]
) -> list[str]:
    """What a reader must know before believing the numbers.

    Args:
        anatomy: of the model.
        groups: through the chosen lens.
        plain_block: particle block over groups through the plain lens, also where the chosen one is tuned.
        fragile: one entry per ablation.
    """
    notes = []
    n_blocks = anatomy.n_blocks
    if plain_block is not None and plain_block >= LATE_SHARE * (n_blocks - 1):
        notes.append(
            f"the plain logit lens sees the answers late, at block {plain_block:.3g} of 0..{n_blocks - 1}: it is known "
            "to miss what earlier blocks write in directions that the unembedding does not read yet"
        )
    for entry in fragile:
        if entry.flat:
            notes.append(
                f"the {entry.kind} profile is flat (all blocks within 1e-6 nats): its largest block means nothing"
            )
        if entry.kind == "zero_stream":
            notes.append(
                "zero_stream erases everything that came before: on models without biases it leaves the uniform "
                "distribution at every block"
            )
        at = [int(b) for b in np.flatnonzero(entry.table["at_ceiling"])]
        if at and not entry.flat:
            notes.append(
                f"{entry.kind} of block {', '.join(map(str, at))} leaves nothing of the output: JSD is at the ceiling "
                f"of {entry.ceiling:.3f} nats (ln 2 = {MAX_JSD:.3f})"
            )
    if groups and all(group.why_not for group in groups):
        notes.append("no group has a particle: this result says nothing about where the tasks are executed")
    return notes
