"""What a continued pre-training returns, and the files that it leaves beside the model."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from tracer.errors import InputError
from tracer.results import plain_data
from tracer.summary import spans

SCHEMA = 1
RUN, CURVE = "training.json", "curve.csv"
"""The files of a result; the first one holds everything but the curve."""

MEASURES = ("loss", "perplexity", "bits_per_byte")
"""What is measured of a text: nats a token, its exponential, and bits a byte."""


@dataclass(frozen=True, eq=False)
class CptResult:
    """A finished continued pre-training.

    Attributes:
        run: the recipe, the plan (rule, blocks, counts), the price, what became of each text, the measures before and
            after, time and memory, versions, and the traces and answers on the way; what `training.json` holds.
        curve: one row per logged step: `step`, `loss` (nats a token, mean since the last row), `learning_rate`,
            `grad_norm`, `tokens`, `bytes`, `seconds` (so far, measuring and saving included), and per measured text
            `NAME_loss`, `NAME_perplexity` (a token) and `NAME_bits_per_byte`.
        folder: the model folder that it lies in.
    """

    run: dict[str, Any]
    curve: pd.DataFrame
    folder: Path

    @property
    def measured(self) -> tuple[str, ...]:
        """Names of the texts that were measured."""
        return tuple(self.run["measured"])

    def to_frame(self) -> pd.DataFrame:
        """The curve, as a copy."""
        return self.curve.copy()

    def contents(self) -> dict[str, bytes]:
        """The files of the result."""
        data = {"schema": SCHEMA, **plain_data(self.run)}
        return {
            CURVE: self.curve.to_csv(index=False, lineterminator="\n").encode(),
            RUN: (json.dumps(data, ensure_ascii=False, indent=1) + "\n").encode(),
        }

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> "CptResult":
        """Read the result of a finished training.

        Raises:
            InputError: there is none, or it is damaged, or a later version wrote it.
        """
        path = Path(folder)
        try:
            run = json.loads((path / RUN).read_text(encoding="utf-8"))
            if run.pop("schema") != SCHEMA:
                raise InputError(f"{str(path)!r} was written by another version: train again")
            return cls(run, pd.read_csv(path / CURVE), path)
        except FileNotFoundError as error:
            raise InputError(f"{str(path)!r} is no finished training: pass the output_dir of tracer cpt") from error
        except (OSError, ValueError, KeyError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{str(path)!r} is damaged ({error}): train again") from error

    def summary(self) -> str:
        """What was trained, what it cost, what was learned and what was kept, as text for a terminal."""
        return summary_of(self.run)

    def plot(self) -> Figure:
        """Draw the losses over the steps, and how the traces on the way moved."""
        from tracer.plots.training import draw_training

        return draw_training(self)


def summary_of(run: Mapping[str, Any]) -> str:
    """See `CptResult.summary`."""
    plan, counts = run["plan"], run["counts"]
    lines = [
        f"Continued pre-training of {run['recipe']['model']}: {run['steps']:,} steps, {run['tokens']:,} tokens "
        f"(about {run['bytes']:,} bytes) in {run['seconds']:,.0f} s",
        f"plan {plan['rule']}: train {spans(plan['train'])}, freeze {spans(plan['freeze'])}; embeddings "
        f"{plan['embeddings']}, norm {plan['norm']}, head {plan['head']}",
        f"{counts['trained']:,} of {counts['trained'] + counts['frozen']:,} parameters trained; "
        f"{counts['frozen_tensors']} frozen tensors are bit by bit what they were",
    ]
    if run["price"] is not None:
        lines.append(f"predicted time of a step: {run['price']['time_ratio']:.2f} of training everything")
    if run["measured"]:
        rows = [
            (name, *(_spelt(found[when], key) for key in MEASURES for when in WHEN))
            for name, found in run["measured"].items()
        ]
        columns = ["text", *(f"{key} {when}" for key in ("loss", "perplexity", "bits/byte") for when in WHEN)]
        lines += ["", pd.DataFrame(rows, columns=columns).to_string(index=False)]
    if run.get("asked"):  # results of earlier versions have no such key
        lines += ["", _asked(run["asked"])]
    if run["retraces"]:
        lines += ["", _retraces(run["retraces"])]
    if run["notes"]:
        lines += ["", *(f"! {note}" for note in run["notes"])]
    return "\n".join(lines)


WHEN = ("before", "after")


def _spelt(found: Mapping[str, float] | None, key: str) -> str:
    return "not measured" if found is None else f"{found[key]:.3f}"


ASKED_MEASURES = {"accuracy": "accuracy", "log_p": "log p", "loss": "loss", "bits_per_byte": "bits/byte"}
"""What is told of a suite that was asked: of probes the first two, of a text the others."""


def _asked(rows: Sequence[Mapping[str, Any]]) -> str:
    first, last = rows[0]["step"], rows[-1]["step"]
    found = {(row["step"], row["suite"]): row for row in rows}
    table = []
    for suite in dict.fromkeys(row["suite"] for row in rows):
        before, after = found[first, suite], found[last, suite]
        for key, words in ASKED_MEASURES.items():
            if key in before:
                values = (f"{before[key]:.3f}", f"{after[key]:.3f}")
                table.append((suite, before["n"], words, *values))
    return pd.DataFrame(table, columns=["asked", "n", "measure", *WHEN]).to_string(index=False)


def _retraces(rows: Sequence[Mapping[str, Any]]) -> str:
    table = pd.DataFrame(
        [
            {
                "step": row["step"],
                "answered": f"{row['answered']}/{row['n']}",
                "mean log p": f"{row['log_p']:.2f}",
                "particle block": "none"
                if row["particle_block"]["estimate"] is None
                else f"{row['particle_block']['estimate']:g}",
                "most fragile": ", ".join(
                    f"{kind} {max(range(len(jsd)), key=lambda b: jsd[b])}" for kind, jsd in row["jsd"].items()
                ),
                "cosine at the end": f"{row['cosine'][-1]:.3f}",
            }
            for row in rows
        ]
    )
    title = "Traces on the way; the cosine is that of the last stream with the one before training"
    return f"{title}\n{table.to_string(index=False)}"


def curve_of(history: Sequence[Mapping[str, Any]], measured: Sequence[str]) -> pd.DataFrame:
    """One row per step from what the Trainer has logged."""
    names = {"loss": "loss", "learning_rate": "learning_rate", "grad_norm": "grad_norm"}
    names |= {"num_input_tokens_seen": "tokens", "bytes_seen": "bytes", "seconds": "seconds"}
    for text in measured:
        names |= {f"eval_{text}_{key}": f"{text}_{key}" for key in MEASURES}
    rows: dict[int, dict[str, Any]] = {}
    for entry in history:
        found = {name: float(entry[key]) for key, name in names.items() if key in entry}
        if set(found) - {"tokens", "bytes", "seconds"}:
            rows.setdefault(entry["step"], {"step": entry["step"]}).update(found)
    return pd.DataFrame([rows[step] for step in sorted(rows)], columns=["step", *names.values()])


def measures_at(curve: pd.DataFrame, step: int, text: str) -> dict[str, float] | None:
    """The measures of a text at one step of a curve; None where it was not measured there."""
    found = curve.loc[curve["step"] == step, [f"{text}_{key}" for key in MEASURES]].dropna()
    return None if found.empty else dict(zip(MEASURES, found.iloc[0].tolist(), strict=True))
