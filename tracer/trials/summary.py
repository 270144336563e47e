"""A trial as text for a terminal."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from tracer.statistics import MIN_SEEDS
from tracer.summary import bounds, spans
from tracer.trials.recipe import ACQUISITION

if TYPE_CHECKING:
    from tracer.trials.results import TrialResult


def summary_of(result: "TrialResult") -> str:
    """See `TrialResult.summary`."""
    recipe = result.recipe
    number = len(list(recipe.runs()))
    stopped = [record for record in result.records if record.stopped]
    parts = [scope_of(result.about), arms_table(result.about)]
    done = f"{len(result.records)} of {number} trainings are finished, {_seeds(len(result.seeds), 'whole ')}"
    if stopped:
        names = ", ".join(f"{r.run.arm} at {r.run.rate:g} (seed {r.run.seed})" for r in stopped[:3])
        done += f"; {len(stopped)} diverged and count up to there: {names}{' ...' if len(stopped) > 3 else ''}"
    parts.append(done)
    if not result.seeds:
        parts.append("nothing can be compared yet: no seed has all arms at all rates")
        return "\n\n".join(parts)
    parts += [endpoints_table(result), *(_budget(result, budget) for budget in recipe.budgets)]
    if recipe.claims:
        parts.append(verdicts_text(result))
    return "\n\n".join(parts)


def scope_of(about: Mapping[str, Any]) -> str:
    """What a trial speaks of, and what it does not."""
    recipe = about["recipe"]
    texts = ", ".join(about["texts"])
    rates = ", ".join(f"{rate:g}" for rate in recipe["rates"])
    return (
        f"Trial of {len(recipe['arms'])} arms on {about['model']['name']} ({about['model']['class']}), text {texts}: "
        f"rates {rates}, {_seeds(recipe['seeds'])}\n"
        "One base checkpoint: seeds vary the order of the data, so that nothing is said of other checkpoints or texts."
    )


def arms_table(about: Mapping[str, Any]) -> str:
    """The plans of the arms and their prices."""
    rows = []
    for name, arm in about["arms"].items():
        price, outer = arm["price"], {arm[part] for part in ("embeddings", "norm", "head")}
        drawn = str(about["recipe"]["arms"][name].get("rule", "")).startswith("random:")
        rows.append(
            {
                "arm": name,
                "rule": arm["rule"] or "a file",
                "trained blocks": "drawn by seed" if drawn else spans(arm["train"]),
                "embeddings, norm, head": outer.pop()
                if len(outer) == 1
                else ", ".join(arm[part] for part in ("embeddings", "norm", "head")),
                "trained": f"{arm['trained'] / arm['total']:.0%}",
                "FLOPs": "" if price is None else f"{price['flops'] / price['flops_full']:.2f}",
                "memory": "" if price is None else f"{price['bytes'] / price['bytes_full']:.2f}",
            }
        )
    table = pd.DataFrame(rows).to_string(index=False)
    return f"{table}\nFLOPs and memory: predicted, as a share of training everything"


def endpoints_table(result: "TrialResult") -> str:
    """Every measure before and after the longest budget, arm by arm and rate by rate."""
    steps = result.recipe.steps
    table = result.endpoints[result.endpoints["budget"] == steps]
    measures = list(result.about["measures"])
    before = table.groupby("measure")["before"].mean()
    rows = [{"arm": "before", "rate": "", **{name: f"{before[name]:.3f}" for name in measures}}]
    for arm in result.recipe.arms:
        for rate in result.recipe.rates:
            after = table[(table["arm"] == arm) & (table["rate"] == rate)].set_index("measure")["after"].to_dict()
            told = {name: f"{after[name]:.3f}" if name in after else "diverged" for name in measures}
            rows.append({"arm": arm, "rate": f"{rate:g}", **told})
    title = f"Before, and after {steps} steps: all items, mean over seeds"
    return f"{title}\n{_scores(result, measures)}\n{pd.DataFrame(rows).to_string(index=False)}"


def _scores(result: "TrialResult", names: Sequence[str]) -> str:
    """What some measures are told in."""
    return "; ".join(f"{name}: {result.about['measures'][name]['score'].replace('_', ' ')}" for name in names)


def _seeds(number: int, kind: str = "") -> str:
    return f"{number} {kind}{'seed' if number == 1 else 'seeds'}"


def _budget(result: "TrialResult", budget: int) -> str:
    """What every arm learned and kept within one budget."""
    values = result.values[result.values["budget"] == budget]
    table = result.differences[result.differences["budget"] == budget]
    differences = {(row["better"], row["measure"]): row for row in table.to_dict("records")}
    level = values.groupby("seed")["level"].first()
    means = values.groupby(["arm", "measure"])["value"].mean().to_dict()
    rows = []
    for arm in result.recipe.arms:
        row = {"arm": arm}
        for name in (ACQUISITION, *result.recipe.retention):
            row[name] = f"{means[arm, name]:.3f}"
            if arm != result.recipe.baseline:
                found = differences[arm, name]
                interval = bounds(found["low"], found["high"], "+.3f")
                row[name] += f"  {found['difference']:+.3f} {interval}".rstrip()
        rows.append(row)
    told = _scores(result, (ACQUISITION, *result.recipe.retention))
    title = (
        f"Within {budget} steps, mean over {_seeds(len(level))}, and the paired difference to {result.recipe.baseline}"
        f"{' with its 95 % interval' if len(level) >= MIN_SEEDS else ''}\n"
        "acquisition: the highest; the others: the most that is kept where acquisition reaches A* = "
        f"{level.mean():.3f} (mean over seeds),\n"
        f"the highest level that all arms reach; chosen on one half of the items, read on the other\n{told}"
    )
    return f"{title}\n{pd.DataFrame(rows).to_string(index=False)}"


def verdicts_text(result: "TrialResult") -> str:
    """The verdicts in words."""
    lines = ["Verdicts (95 % each, not corrected for their number)"]
    for row in result.claims.to_dict("records"):
        about = "learns more" if row["measure"] == ACQUISITION else f"keeps more of {row['measure']} at A*"
        numbers = f"{row['difference']:+.3f}"
        if pd.notna(row["low"]):
            numbers += f" {bounds(row['low'], row['high'], '+.3f')}, n = {row['n']}"
        reason = f" ({row['reason']})" if row["reason"] else ""
        lines.append(
            f"  {row['better']} {about} than {row['than']}, {row['budget']} steps: {row['verdict']}{reason}; {numbers}"
        )
    return "\n".join(lines)
