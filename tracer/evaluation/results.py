"""What an evaluation returns, and the folder that it is saved as (see `tracer.results` for the format)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from tracer.errors import InputError, one_of
from tracer.evaluation.calibration import calibration_of
from tracer.results import SavedResult

SCHEMA = 3
FILES = ("arrays.safetensors", "groups.csv", "probes.jsonl", "run.json")
"""The files of a result; `run.json` is moved in last, so that a folder that has it is complete."""

PROBES = ("suite", "id", "group", "prompt", "target", "said", "answered", "log_p", "p_said", "mass")
GROUPS = (
    *("suite", "group", "n", "answered", "accuracy", "low", "high", "log_p", "log_p_low", "log_p_high"),
    *("p_said", "mass"),
)
TEXTS = ("text", "documents", "tokens", "bytes", "loss", "perplexity", "bits_per_byte", "low", "high")
"""Columns of the tables of probes, of groups and of texts."""

TEXT = "text/"
"""Before the names of the arrays of texts."""

ALL, MACRO = "all", "macro"
"""Names in `groups` of a suite's pooled rows: of all its answers alike, and of the mean over a benchmark's subjects."""


def asks_letters(probes: pd.DataFrame) -> bool:
    """Whether answers are those to questions of a benchmark, which are one of four letters."""
    return bool(probes["mass"].notna().all())


@dataclass(frozen=True, eq=False)
class EvalResult(SavedResult):
    """How one model answers one or several suites of probes.

    Attributes:
        run: arguments, versions, model, unusable probes by suite, warnings about kept ones, texts, and for a model of
            the zoo what its card says; what `run.json` holds.
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
            benchmarks `log_p_letters` `[probes, 4]`. Of each text `text/NAME` `[documents, 3]`: log-probability of a
            document (nats), its tokens and its bytes.
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

    @staticmethod
    def probes_of(rows: list[dict[str, Any]]) -> pd.DataFrame:
        """The table of probes from its saved rows, of which there are none where only texts were read."""
        return pd.DataFrame(rows, columns=list(rows[0]) if rows else list(PROBES))

    @property
    def texts(self) -> pd.DataFrame:
        """One row a text.

        `text`, `documents`, `tokens`, `bytes`, `loss` (nats a token), `perplexity` (a token), and `bits_per_byte` with
        its 95 % interval over documents (`low`, `high`; null for few documents).
        """
        return pd.DataFrame(self.run["texts"], columns=list(TEXTS)).astype({"low": float, "high": float})

    @property
    def suites(self) -> tuple[str, ...]:
        """Names of the suites of probes and questions."""
        return tuple(self.run["arguments"]["suites"])

    @property
    def benchmarks(self) -> tuple[str, ...]:
        """Those of the suites that are a benchmark in one answer form."""
        return tuple(str(suite) for suite, table in self.probes.groupby("suite", sort=False) if asks_letters(table))

    def to_frame(self, of: str = "groups") -> pd.DataFrame:
        """One of the tables `groups`, `probes` and `texts`, as a copy."""
        found: pd.DataFrame = getattr(self, one_of("table", of, ("groups", "probes", "texts")))
        return found.copy()

    def calibration(self) -> pd.DataFrame:
        """How often a model is right that is so sure, one row a suite of probes and bin; see `calibration_of`.

        Questions of a benchmark have four answers only, and are not part of it.
        """
        tables = [
            calibration_of(table["p_said"].to_numpy(float), table["answered"].to_numpy(bool)).assign(suite=suite)
            for suite, table in self.probes.groupby("suite", sort=False)
            if not asks_letters(table)
        ]
        columns = ["suite", "bin", "n", "p_said", "accuracy", "low", "high"]
        return pd.concat(tables, ignore_index=True)[columns] if tables else pd.DataFrame(columns=columns)

    def summary(self) -> str:
        """The result as text for a terminal."""
        from tracer.evaluation.summary import summary_of

        return summary_of(self)

    def plot(self) -> Figure:
        """Draw the accuracy of every group in every suite.

        Raises:
            InputError: only texts were read.
        """
        if self.probes.empty:
            raise InputError("only texts were read, of which there is no accuracy to draw: see the table texts")
        from tracer.plots.accuracy import draw_accuracy

        return draw_accuracy(self)
