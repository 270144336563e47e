"""The verb `compare`: evaluations on the same questions, paired."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import norm

from tracer.errors import InputError
from tracer.evaluation.means import mean_answer, ratio_of_sums
from tracer.evaluation.results import TEXT, EvalResult, asks_letters
from tracer.results import check_free, write_folder
from tracer.runs import versions
from tracer.statistics import Interval, holm, mcnemar
from tracer.summary import bounds

FILES = ("groups.csv", "suites.csv", "texts.csv", "run.json")
"""The files of a saved comparison."""

TEXT_COLUMNS = ("model", "text", "documents", "base", "this", "difference", "low", "high")

POWER = 0.8
"""Share of comparisons in which a difference is found, for the smallest one that is called detectable."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """Evaluations beside the first of them, on the same questions.

    Attributes:
        names: of the models; the first one is what the others are compared with.
        suites: one row per other model and suite: `model`, `suite`, `n`, accuracies (`accuracy_base`, `accuracy`), the
            questions that only one of the two answers (`only_base`, `only_this`), the exact McNemar p-value
            (`p_value`), what difference would count (`limit`: an observed difference of this size is significant at
            5 %; `detectable`: a true one of this size is found in 80 % of comparisons, both from the share of
            questions that only one answers), and differences with 95 % intervals: `accuracy_difference`, `log_p`, and
            for benchmarks their means over subjects, `macro_accuracy`, `macro_log_p` (`NAME_low`, `NAME_high`).
            `log_p` (nats, of the right answer) is the primary outcome; of benchmarks `macro_log_p`.
        groups: one row per other model, suite and group or subject: `n`, `accuracy_difference`, `log_p`, `p_value` and
            `p_holm`, corrected for the number of groups of the suite.
        texts: one row per other model and text: `model`, `text`, `documents`, bits a byte (`base`, `this`), their
            `difference` and its 95 % interval over documents (`low`, `high`; null for few documents). Fewer are better.
    """

    names: tuple[str, ...]
    suites: pd.DataFrame
    groups: pd.DataFrame
    texts: pd.DataFrame

    def to_frame(self) -> pd.DataFrame:
        """The table of suites, as a copy."""
        return self.suites.copy()

    def save(self, folder: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Write the tables, and what was compared, as a folder.

        Raises:
            InputError: the folder is in use, unless `force`, or cannot be written.
        """
        target = Path(folder)
        check_free(target, force=force, files=FILES)
        run = {"models": list(self.names), "versions": versions()}
        contents = (
            self.groups.to_csv(index=False, lineterminator="\n").encode(),
            self.suites.to_csv(index=False, lineterminator="\n").encode(),
            self.texts.to_csv(index=False, lineterminator="\n").encode(),
            (json.dumps(run, ensure_ascii=False, indent=1) + "\n").encode(),
        )
        return write_folder(target, dict(zip(FILES, contents, strict=True)))

    def summary(self) -> str:
        """The comparison as text for a terminal."""
        return _summary_of(self)


def compare(runs: Sequence[EvalResult | str | os.PathLike[str]], *, seed: int = 0) -> Comparison:
    """Compare evaluations question by question.

    Args:
        runs: results of `tracer.evaluate` or their folders, two or more; the first one is what the others are compared
            with.
        seed: of the bootstrap.

    Raises:
        InputError: fewer than two, or their questions, shots or answer forms differ.

    Example:
        >>> import tracer
        >>> runs = [tracer.evaluate(f"zoo/transformer-{n}", "zoo/held", limit=5, progress=False) for n in (4, 8)]
        >>> tracer.compare(runs).suites["n"].tolist()
        [85]
    """
    found = [run if isinstance(run, EvalResult) else EvalResult.load(run) for run in runs]
    if len(found) < 2:
        raise InputError(f"{len(found)} evaluation to compare: pass two or more")
    names = [str(run.run["model"]["name"]) for run in found]
    if len(set(names)) < len(names):
        names = [f"{name} ({number})" for number, name in enumerate(names)]
    base, suites, groups, texts = found[0], [], [], []
    for name, other in zip(names[1:], found[1:], strict=True):
        _check_same(base, other, names[0], name)
        for suite in base.suites:
            rows = (base.probes["suite"] == suite).to_numpy()
            pair = _Pair(base, other, rows, seed, (name, suite))
            suites.append({"model": name, "suite": suite, **pair.suite()})
            groups += [{"model": name, "suite": suite, **row} for row in pair.groups()]
        texts += [{"model": name, **_text(base, other, text, seed)} for text in base.texts["text"]]
    return Comparison(
        tuple(names), pd.DataFrame(suites), pd.DataFrame(groups), pd.DataFrame(texts, columns=list(TEXT_COLUMNS))
    )


def _check_same(base: EvalResult, other: EvalResult, name: str, other_name: str) -> None:
    """Refuse evaluations that did not ask the same."""
    if base.suites != other.suites:
        raise InputError(
            f"{name} was asked {', '.join(base.suites)} and {other_name} {', '.join(other.suites)}: evaluate both on "
            "the same suites and answer forms"
        )
    for key in ("shots", "target"):
        mine, others = (run.run["arguments"][key] for run in (base, other))
        if mine != others:
            raise InputError(f"{name} was asked with {key} {mine} and {other_name} with {others}: evaluate both alike")
    mine, others = (run.texts[["text", "documents", "bytes"]].to_dict("records") for run in (base, other))
    if mine != others or any(
        not np.array_equal(base.arrays[f"{TEXT}{row['text']}"][:, 2], other.arrays[f"{TEXT}{row['text']}"][:, 2])
        for row in mine
    ):
        raise InputError(f"{name} and {other_name} did not read the same texts: evaluate both on the same documents")
    columns = ["suite", "id", "prompt", "target"]
    mine, others = (run.probes[columns].to_dict("records") for run in (base, other))
    differing = next((a for a, b in zip(mine, others, strict=False) if a != b), None)
    if differing is None and len(mine) != len(others):
        differing = max(mine, others, key=len)[min(len(mine), len(others))]
    if differing is not None:
        raise InputError(
            f"{name} and {other_name} were not asked the same: they differ at {differing['id']!r} of "
            f"{differing['suite']}; evaluate both on the same questions in the same order"
        )


def _text(base: EvalResult, other: EvalResult, name: str, seed: int) -> dict[str, Any]:
    """How many bits a byte of a text another model needs more, document by document."""
    mine, others = (run.arrays[f"{TEXT}{name}"] for run in (base, other))
    more = (mine[:, 0] - others[:, 0]) / np.log(2)
    found = ratio_of_sums(more, mine[:, 2], seed=seed, label=("bits_per_byte difference", name))
    bits = [run.texts.set_index("text")["bits_per_byte"].to_dict()[name] for run in (base, other)]
    return {
        "text": name,
        "documents": len(mine),
        "base": bits[0],
        "this": bits[1],
        "difference": found.estimate,
        "low": found.low,
        "high": found.high,
    }


class _Pair:
    """The answers of two models to the questions of one suite."""

    def __init__(self, base: EvalResult, other: EvalResult, rows: np.ndarray, seed: int, label: tuple[str, str]):
        self.of = base.probes.loc[rows, "group"].tolist()
        self.right = [run.probes.loc[rows, "answered"].to_numpy(dtype=bool) for run in (base, other)]
        self.gain = self.right[1].astype(float) - self.right[0]
        self.log_p = other.arrays["log_p"][rows] - base.arrays["log_p"][rows]
        self.subjects = asks_letters(base.probes[rows])
        self.seed, self.label = seed, label

    def suite(self) -> dict[str, Any]:
        n = len(self.gain)
        only_base, only_this = int((self.gain < 0).sum()), int((self.gain > 0).sum())
        # The variance of a difference of paired shares is that of values -1, 0 and 1.
        error = float(np.sqrt(self.gain.var() / n)) if only_base + only_this else 0.0
        limit, power = norm.ppf(0.975), norm.ppf(POWER)
        row: dict[str, Any] = {
            "n": n,
            "accuracy_base": float(self.right[0].mean()),
            "accuracy": float(self.right[1].mean()),
            "only_base": only_base,
            "only_this": only_this,
            "p_value": mcnemar(only_base, only_this),
            "limit": limit * error,
            "detectable": (limit + power) * error,
        }
        means = {"accuracy_difference": (self.gain, False), "log_p": (self.log_p, False)}
        if self.subjects:
            means |= {"macro_accuracy": (self.gain, True), "macro_log_p": (self.log_p, True)}
        for name, (values, macro) in means.items():
            found = self._mean(values, macro, name)
            row |= {name: found.estimate, f"{name}_low": found.low, f"{name}_high": found.high}
        return row

    def _mean(self, values: np.ndarray, macro: bool, name: str) -> Interval:
        label = (name, *self.label)
        return mean_answer(values, self.of, subjects=self.subjects, macro=macro, seed=self.seed, label=label)

    def groups(self) -> list[dict[str, Any]]:
        rows = []
        for group in dict.fromkeys(self.of):
            own = np.array([name == group for name in self.of])
            gain = self.gain[own]
            rows.append(
                {
                    "group": group,
                    "n": int(own.sum()),
                    "accuracy_difference": float(gain.mean()),
                    "log_p": float(self.log_p[own].mean()),
                    "p_value": mcnemar(int((gain < 0).sum()), int((gain > 0).sum())),
                }
            )
        for row, corrected in zip(rows, holm([row["p_value"] for row in rows]), strict=True):
            row["p_holm"] = corrected
        return rows


def _summary_of(comparison: Comparison) -> str:
    parts = [
        f"Compared with {comparison.names[0]}, question by question; differences with 95 % intervals; log p of the "
        "right answer, in nats, decides"
    ]
    for row in comparison.suites.to_dict("records"):
        primary = "macro_log_p" if not np.isnan(row.get("macro_log_p", np.nan)) else "log_p"
        low, high = row[f"{primary}_low"], row[f"{primary}_high"]
        verdict = "cannot be told apart"
        if low is not None and not np.isnan(low) and (low > 0 or high < 0):
            verdict = "better" if low > 0 else "worse"
        lines = [
            f"{row['model']} on {row['suite']} ({row['n']} questions): {verdict}",
            f"  log p {_ends(row, primary)}" + (" (mean over subjects)" if primary.startswith("macro") else ""),
            f"  accuracy {row['accuracy_base']:.3f} to {row['accuracy']:.3f}, difference "
            f"{_ends(row, 'accuracy_difference')}; only the first right {row['only_base']}, only this one "
            f"{row['only_this']}, McNemar p {row['p_value']:.3g}",
            f"  differences in accuracy below {row['limit']:.3f} cannot be told from none here; true ones of "
            f"{row['detectable']:.3f} are found four times in five",
        ]
        groups = comparison.groups
        own = groups[(groups["model"] == row["model"]) & (groups["suite"] == row["suite"])]
        found = own[own["p_holm"] < 0.05]
        if len(own) > 1:
            names = ", ".join(f"{one.group} ({one.accuracy_difference:+.2f})" for one in found.itertuples())
            lines.append(f"  groups that differ in accuracy after Holm's correction for {len(own)}: {names or 'none'}")
        parts.append("\n".join(lines))
    for row in comparison.texts.astype({"low": float, "high": float}).to_dict("records"):
        verdict = "cannot be told apart"
        if not np.isnan(row["low"]) and (row["high"] < 0 or row["low"] > 0):
            verdict = "better" if row["high"] < 0 else "worse"
        parts.append(
            f"{row['model']} on the text {row['text']} ({row['documents']} documents): {verdict}\n"
            f"  bits a byte, of which fewer are better: {row['base']:.4f} to {row['this']:.4f}, difference "
            f"{row['difference']:+.4f} {bounds(row['low'], row['high'], '+.4f')}".rstrip()
        )
    return "\n\n".join(parts)


def _ends(row: Mapping[Any, Any], name: str) -> str:
    return f"{row[name]:+.3f} {bounds(row[f'{name}_low'], row[f'{name}_high'], '+.3f')}".rstrip()
