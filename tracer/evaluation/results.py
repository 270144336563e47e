"""What an evaluation returns, and the folder that it is saved as (see `tracer.results` for the format)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from tracer.errors import one_of
from tracer.results import SavedResult

SCHEMA = 2
FILES = ("arrays.safetensors", "groups.csv", "probes.jsonl", "run.json")
"""The files of a result; `run.json` is moved in last, so that a folder that has it is complete."""

ALL, MACRO = "all", "macro"
"""Names in `groups` of a suite's pooled rows: of all its answers alike, and of the mean over a benchmark's subjects."""


def asks_letters(probes: pd.DataFrame) -> bool:
    """Whether answers are those to questions of a benchmark, which are one of four letters."""
    return bool(probes["mass"].notna().all())


@dataclass(frozen=True, eq=False)
class EvalResult(SavedResult):
    """How one model answers one or several suites of probes.

    Attributes:
        run: arguments, versions, model, unusable probes by suite, warnings about kept ones, and for a model of the zoo
            what its card says; what `run.json` holds.
        probes: one row per usable probe, or per question of a benchmark and answer form: `suite`, `id`, `group` (a
            benchmark's subject), `prompt`, `target`, `said` (the most likely token, or of the four letters the most
            likely one), `answered` (whether it is the target), `log_p` (log-probability of the target, nats),
            `p_said` (probability of what was said) and `mass` (that of the four letters together, missing for probes).
        groups: one row per suite and group, one of each suite as a whole (`all`), and of a benchmark one of the mean
            over subjects (`macro`): `n`, `answered`, `accuracy` with its 95 % interval (`low`, `high`), mean
            log-probability of the target in nats `log_p` (`log_p_low`, `log_p_high`), `p_said`, the mean probability
            of what was said, which for probes is what the accuracy would be if the model were calibrated, and `mass`.
            The pooled rows of probe sets speak of further groups and probes, those of benchmarks of further questions
            on the same subjects.
        arrays: `log_p` `[probes]` log-probability of the target (nats), `p_said` and `mass` `[probes]`, and of
            benchmarks `log_p_letters` `[probes, 4]`.
    """

    run: dict[str, Any]
    probes: pd.DataFrame
    groups: pd.DataFrame
    arrays: dict[str, np.ndarray]

    files: ClassVar = FILES
    schema: ClassVar = SCHEMA
    verb: ClassVar = "eval"
    table: ClassVar = "groups"
    types: ClassVar = {"suite": str, "group": str}

    @property
    def suites(self) -> tuple[str, ...]:
        """Names of the suites."""
        return tuple(self.run["arguments"]["suites"])

    @property
    def benchmarks(self) -> tuple[str, ...]:
        """Those of the suites that are a benchmark in one answer form."""
        return tuple(str(suite) for suite, table in self.probes.groupby("suite", sort=False) if asks_letters(table))

    def to_frame(self, of: str = "groups") -> pd.DataFrame:
        """One of the tables `groups` and `probes`, as a copy."""
        return getattr(self, one_of("table", of, ("groups", "probes"))).copy()

    def summary(self) -> str:
        """The result as text for a terminal."""
        from tracer.evaluation.summary import summary_of

        return summary_of(self)

    def plot(self) -> Figure:
        """Draw the accuracy of every group in every suite."""
        from tracer.plots.accuracy import draw_accuracy

        return draw_accuracy(self)
