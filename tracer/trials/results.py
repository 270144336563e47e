"""What a trial returns: read from the records of its trainings, whichever are finished."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from tracer.errors import InputError, one_of
from tracer.results import plain_data
from tracer.trials.levels import Points, common_level, curve, learned, retained
from tracer.trials.recipe import ACQUISITION, Run, TrialRecipe, read_trial
from tracer.trials.records import HALVES, Record, record_path
from tracer.trials.verdicts import verdict

TRIAL = "trial.json"
"""What a trial is; its records lie beside it."""

LEVELS = 25
"""Levels of acquisition at which the curve is told."""

TABLES = ("points", "endpoints", "values", "differences", "claims", "curve")


@dataclass(frozen=True, eq=False)
class TrialResult:
    """The finished trainings of a trial.

    Attributes:
        about: recipe, model, texts, measures, arms with their prices, and versions; what `trial.json` holds.
        records: of all finished trainings.
    """

    about: Mapping[str, Any]
    records: tuple[Record, ...]

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> "TrialResult":
        """Read the folder of a trial.

        Raises:
            InputError: there is none, or it is damaged.
        """
        path = Path(folder)
        try:
            about = json.loads((path / TRIAL).read_text(encoding="utf-8"))
            recipe = recipe_in(about)
        except FileNotFoundError as error:
            raise InputError(f"{str(path)!r} is no trial: pass the output_dir of tracer trial") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{str(path / TRIAL)!r} is damaged ({error}): begin anew with --force") from error
        found = [Record.read(path, run) for run in recipe.runs() if record_path(path, run).is_file()]
        return cls(about, tuple(found))

    @cached_property
    def recipe(self) -> TrialRecipe:
        """What was asked for."""
        return recipe_in(self.about)

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of which every arm is finished at every rate; only those are compared."""
        done = {record.run for record in self.records}
        return tuple(
            seed
            for seed in range(self.recipe.seeds)
            if all(Run(arm, rate, seed) in done for arm in self.recipe.arms for rate in self.recipe.rates)
        )

    def arms(self, seed: int, budget: int) -> dict[str, Points]:
        """What each arm has reached with one seed within one budget."""
        return {name: points.within(budget) for name, points in self._points[seed].items()}

    @cached_property
    def _points(self) -> dict[int, dict[str, Points]]:
        found: dict[int, dict[str, list[Record]]] = {}
        for record in self.records:
            found.setdefault(record.run.seed, {}).setdefault(record.run.arm, []).append(record)
        return {seed: {arm: self._pooled(found[seed][arm]) for arm in self.recipe.arms} for seed in self.seeds}

    def _pooled(self, records: list[Record]) -> Points:
        """The points of one arm and seed, over its rates."""
        halves: list[dict[str, np.ndarray]] = []
        for half in HALVES:
            scores = {}
            for name, about in self.about["measures"].items():
                sign = -1.0 if about["score"] == "bits_per_byte" else 1.0
                values = [record.measures[name][half][about["score"]] for record in records]
                scores[name] = sign * np.concatenate([np.array(own, dtype=float) for own in values])
            halves.append(scores)
        rate = np.concatenate([np.full(len(record.steps), record.run.rate) for record in records])
        step = np.concatenate([np.array(record.steps, dtype=np.int64) for record in records])
        return Points(rate, step, *halves)

    @cached_property
    def points(self) -> pd.DataFrame:
        """One row a training, step, measure and half: `arm`, `rate`, `seed`, `step`, `measure`, `half`, `n`, `score`.

        The score is as measured: an accuracy, a mean log-probability (nats), or bits a byte, of which fewer are better.
        """
        rows = [
            (
                record.run.arm,
                record.run.rate,
                record.run.seed,
                step,
                name,
                half,
                record.measures[name][half]["n"],
                score,
            )
            for record in self.records
            for name, about in self.about["measures"].items()
            for half in HALVES
            for step, score in zip(record.steps, record.measures[name][half][about["score"]], strict=True)
        ]
        return pd.DataFrame(rows, columns=["arm", "rate", "seed", "step", "measure", "half", "n", "score"])

    @cached_property
    def endpoints(self) -> pd.DataFrame:
        """Every measure before and after, at equal steps, one row an arm, rate, budget and measure.

        `arm`, `rate`, `budget`, `measure`, `n` (items of both halves), `seeds` (that have been measured at that step),
        and the scores `before` and `after`, means over items and seeds, as measured.
        """
        table = self.points.assign(total=lambda t: t["score"] * t["n"])
        sums = table.groupby(["arm", "rate", "seed", "step", "measure"], sort=False)[["total", "n"]].sum().reset_index()
        sums["score"] = sums["total"] / sums["n"]
        keys = ["arm", "rate", "measure"]
        found = []
        for budget in self.recipe.budgets:
            after = sums[sums["step"] == budget]
            before = sums[(sums["step"] == 0)].merge(after[[*keys, "seed"]], on=[*keys, "seed"])
            means = after.groupby(keys, sort=False).agg(
                n=("n", "first"), seeds=("seed", "count"), after=("score", "mean")
            )
            means["before"] = before.groupby(keys)["score"].mean()
            found.append(means.reset_index().assign(budget=budget))
        columns = ["arm", "rate", "budget", "measure", "n", "seeds", "before", "after"]
        return pd.concat(found, ignore_index=True)[columns]

    @cached_property
    def values(self) -> pd.DataFrame:
        """What each arm learned and kept, one row a budget, seed, arm and measure.

        `budget`, `seed`, `level` (A*, the highest acquisition that all arms reach with this seed), `arm`, `measure`,
        `value`: for the acquisition its highest score, for what should be kept the score at the level, both chosen on
        the validation half and read on the test half; more is better, so that bits a byte are negative.
        """
        rows: list[tuple[int, int, float, str, str, float | None]] = []
        for budget in self.recipe.budgets:
            for seed in self.seeds:
                arms = self.arms(seed, budget)
                level = common_level(arms)
                for arm, points in arms.items():
                    rows.append((budget, seed, level, arm, ACQUISITION, learned(points)))
                for name in self.recipe.retention:
                    rows += [
                        (budget, seed, level, arm, name, kept) for arm, kept in retained(arms, level, name).items()
                    ]
        table = pd.DataFrame(rows, columns=["budget", "seed", "level", "arm", "measure", "value"])
        return table.astype({"value": float})

    @cached_property
    def differences(self) -> pd.DataFrame:
        """Every arm against the baseline, one row a budget, arm and measure; see `claims` for the columns."""
        others = [arm for arm in self.recipe.arms if arm != self.recipe.baseline]
        return self._against([(arm, self.recipe.baseline) for arm in others])

    @cached_property
    def claims(self) -> pd.DataFrame:
        """The verdicts, one row a claim, budget and measure.

        `budget`, `better`, `than`, `measure`, `n` (seeds), `difference` (mean over seeds of the paired differences in
        `value`), `low` and `high` (95 % t interval; null with fewer than 8 seeds), `verdict` and `reason`.
        """
        return self._against([(claim.better, claim.than) for claim in self.recipe.claims])

    def _against(self, pairs: list[tuple[str, str]]) -> pd.DataFrame:
        rows = []
        for (budget, measure), table in self.values.groupby(["budget", "measure"], sort=False):
            by_arm = table.pivot(index="seed", columns="arm", values="value")
            for better, than in pairs:
                found = verdict((by_arm[better] - by_arm[than]).to_numpy(dtype=float))
                rows.append(
                    {
                        "budget": budget,
                        "better": better,
                        "than": than,
                        "measure": measure,
                        "n": found.n,
                        "difference": found.difference,
                        "low": found.low,
                        "high": found.high,
                        "verdict": found.words,
                        "reason": found.reason,
                    }
                )
        columns = ["budget", "better", "than", "measure", "n", "difference", "low", "high", "verdict", "reason"]
        return pd.DataFrame(rows, columns=columns).astype({"low": float, "high": float})

    @cached_property
    def curve(self) -> pd.DataFrame:
        """What arms keep along the levels of acquisition, mean over seeds, within the longest budget.

        `level`, `measure`, and for each arm a column; null where a seed of the arm does not reach the level.
        """
        seeds = [self.arms(seed, self.recipe.steps) for seed in self.seeds]
        if not seeds:
            return pd.DataFrame(columns=["level", "measure", *self.recipe.arms])
        lowest = max(float(points.validation[ACQUISITION][0]) for arms in seeds for points in arms.values())
        highest = max(min(arms[name].best_level for arms in seeds) for name in self.recipe.arms)
        levels = np.linspace(lowest, max(lowest, highest), LEVELS)
        tables = [
            pd.DataFrame({"level": levels, "measure": name, **curve(seeds, levels, name)})
            for name in self.recipe.retention
        ]
        return pd.concat(tables, ignore_index=True)

    def flops(self, arm: str) -> float | None:
        """Predicted floating-point operations of a step under an arm; None where they could not be counted."""
        price = self.about["arms"][arm]["price"]
        tokens = [record.tokens / record.steps[-1] for record in self.records if record.tokens]
        return None if price is None or not tokens else float(price["flops"] * tokens[0])

    def finding(self) -> dict[str, Any]:
        """What the trial found, in short, as `tracer plan` tells it to those who plan for a model of this kind."""
        claims = self.claims[self.claims["budget"] == self.recipe.steps]
        keys = ["better", "than", "measure", "difference", "low", "high", "verdict"]
        return plain_data(
            {
                "model": self.about["model"]["name"],
                "mixers": sorted(set(self.about["model"]["mixers"])),
                "steps": self.recipe.steps,
                "seeds": len(self.seeds),
                "claims": claims[keys].round(3).to_dict("records"),
            }
        )

    def to_frame(self, of: str = "claims") -> pd.DataFrame:
        """One of the tables, as a copy."""
        found: pd.DataFrame = getattr(self, one_of("table", of, TABLES))
        return found.copy()

    def summary(self) -> str:
        """Arms, what they learned and kept, and the verdicts, as text for a terminal."""
        from tracer.trials.summary import summary_of

        return summary_of(self)

    def plot(self, figure: str = "frontier") -> Figure:
        """Draw `frontier` (kept against learned), `cost` (learned against operations), or `differences`."""
        from tracer.plots.trial import FIGURES

        return FIGURES[one_of("figure", figure, FIGURES)](self)

    def write_tables(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write the tables but the points as CSV files into a folder, replacing older ones.

        Raises:
            InputError: it cannot be written.
        """
        written = []
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            for name in TABLES[1:]:
                path = Path(folder) / f"{name}.csv"
                self.to_frame(name).round(6).to_csv(path, index=False, lineterminator="\n")
                written.append(path)
        except OSError as error:
            raise InputError(f"cannot write into {str(folder)!r}: {error.strerror or error}") from error
        return written


def recipe_in(about: Mapping[str, Any]) -> TrialRecipe:
    """The recipe that `trial.json` holds; keys that a later version has added have their default."""
    data = dict(about["recipe"])
    return read_trial({**data.pop("training"), **data, "output_dir": "."})
