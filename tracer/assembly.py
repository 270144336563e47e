"""From everything that a trace has measured to its result."""

from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from tracer.ablations import label_of
from tracer.measuring import PLAIN, Measured, Settings
from tracer.models.selfcheck import Engine
from tracer.models.traced import TracedModel
from tracer.particle import NO_BLOCK, overall_block
from tracer.probes import ProbeSet, TokenizedProbes
from tracer.results import SCHEMA, TraceResult
from tracer.tables import (
    block_table,
    by_kind,
    fragilities,
    group_fragilities,
    particles_of,
    probe_table,
    recovery_columns,
    recovery_reasons,
    warnings_of,
)
from tracer.tuned_lens import TunedLens


def assembled(
    model: TracedModel,
    probe_set: ProbeSet,
    tokenized: TokenizedProbes,
    settings: Settings,
    engine: Engine,
    tuned_lens: TunedLens | None,
    plan: dict[str, Any],
    measured: Measured,
) -> TraceResult:
    """The result of a trace.

    Args:
        model: the opened model.
        probe_set: as read.
        tokenized: the probes that were run.
        settings: what was measured.
        engine: what it was measured by.
        tuned_lens: what it was read through, for the readout `tuned`.
        plan: everything that the numbers depend on.
        measured: the numbers per probe.
    """
    anatomy, measures = model.anatomy, measured.measures
    kinds = tuple(label_of(kind, part) for kind in settings.ablations for part in settings.parts)
    groups = [item.probe.group for item in tokenized.items]
    answered = measures.answered
    arrays = by_kind(measures, measured.variants, anatomy.n_blocks)
    unusable = [group for group, count in tokenized.usable().items() if count == 0]
    find = partial(particles_of, tokenized.items, measured.table, unusable, answered, settings.rule, settings.seed)
    particles, found = find(arrays, measured.rivals)
    block = overall_block(found, seed=settings.seed)
    plain, plain_block = None, block
    if measured.plain is not None:
        own, plain_rivals = dict(measured.plain[0]), measured.plain[1]
        plain_particles, plain_found = find(own, plain_rivals)
        plain_block = overall_block(plain_found, seed=settings.seed)
        arrays |= {f"{PLAIN}{name}": array for name, array in own.items()}
        plain = {
            "groups": [group.as_dict() for group in plain_found],
            "particle_block": plain_block.as_dict(),
            "particles": [None if block == NO_BLOCK else int(block) for block in plain_particles],
        }
    fragile = fragilities(kinds, arrays, answered, groups, anatomy.mixers, settings.seed)
    if measured.cka is not None:
        arrays["cka"] = measured.cka
    counted = answered & np.isin(groups, [group.group for group in found if group.why_not is None])
    by_group = group_fragilities(kinds, arrays, answered, groups, anatomy.mixers, settings.seed)
    tokens = measured.calibration_tokens
    recovered, undefined = None, None
    blocks = block_table(anatomy, arrays, fragile, particles, counted)
    if measured.recovery is not None:
        arrays["recovery"] = measured.recovery.values
        undefined = recovery_reasons(tokenized, measured.recovery.undefined)
        columns, recovered = recovery_columns(measured.recovery.values, undefined, groups, settings.seed)
        blocks = blocks.join(columns)
    warnings = [*model.self_check.notes, *warnings_of(anatomy, found, plain_block.estimate, fragile)]
    trained_on = None if tuned_lens is None else tuned_lens.record.get("fingerprint")
    if trained_on is not None and trained_on != plan["model"]:
        warnings.append(
            f"the tuned lens was trained on other weights ({trained_on}) than those traced ({plan['model']}), with the "
            "same tail: its translators may not fit the streams of these blocks"
        )
    run_data = {
        "schema": SCHEMA,
        "arguments": plan["arguments"],
        "model": {"fingerprint": plan["model"], **model.describe()},
        "engine": engine,
        "readout": settings.readout,
        "plain": plain,
        "calibration": tokens and {"tokens_first_and_other": tokens},
        "plan": {key: value for key, value in plan.items() if key not in ("arguments", "versions")},
        "versions": plan["versions"],
        "work": measured.work,
        "skipped": [asdict(skip) for skip in (*probe_set.skipped, *tokenized.skipped)],
        "probe_warnings": [asdict(note) for note in tokenized.warnings],
        "groups": [group.as_dict() | {"fragility": by_group.get(group.group, {})} for group in found],
        "particle_block": block.as_dict(),
        "fragility": [
            {
                "ablation": entry.kind,
                "n": entry.n,
                "n_answered": entry.n_answered,
                "ceiling": entry.ceiling,
                "fragile": list(entry.fragile),
                "fragile_without_first": list(entry.fragile_without_first),
                "flat": entry.flat,
                "by_mixer": entry.by_mixer.to_dict("records"),
                "intervals": entry.method,
            }
            for entry in fragile
        ],
        "recovery": recovered,
        "warnings": warnings,
    }
    return TraceResult(
        run=run_data,
        probes=probe_table(
            tokenized.items, arrays, measures.answer, answered, particles, kinds, undefined, model.tokenizer
        ),
        blocks=blocks,
        arrays=arrays,
    )
