"""The verb `eval`: how well a model answers probe sets, by whole forwards."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import binomtest
from tqdm import tqdm

from tracer.benchmarks import BENCHMARKS, FORMS, LETTERS, data_folder
from tracer.engine import DEFAULT_BATCH_TOKENS
from tracer.errors import InputError, one_of
from tracer.evaluation.harness import Harness
from tracer.evaluation.means import mean_answer
from tracer.evaluation.next_token import next_tokens
from tracer.evaluation.results import ALL, FILES, GROUPS, MACRO, SCHEMA, TEXT, EvalResult, asks_letters
from tracer.evaluation.texts import CONTEXT, ask_texts, context_of, is_text, read_text, text_row
from tracer.models.plain import evaluating
from tracer.models.traced import TracedModel, load
from tracer.partial import PartialRun
from tracer.probes import ProbeSet, TokenizedProbes, read_probes
from tracer.results import check_free
from tracer.runs import default_probes, usable_probes, versions
from tracer.statistics import Interval
from tracer.zoo.shelf import PREFIX, SUITES, read_card


def evaluate(
    model: object,
    suites: str | Path | ProbeSet | Sequence[str | Path | ProbeSet] | None = None,
    *,
    target: str = "single",
    skip_bad: bool = False,
    limit: int | None = None,
    every: int = 1,
    data: str | os.PathLike[str] | None = None,
    subjects: Sequence[str] | None = None,
    shots: int = 0,
    forms: Sequence[str] = tuple(FORMS),
    batch_size: int = 8,
    seed: int = 0,
    batch_tokens: int = DEFAULT_BATCH_TOKENS,
    context: int = CONTEXT,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    force: bool = False,
    progress: bool = True,
    load_options: Mapping[str, Any] | None = None,
) -> EvalResult:
    """Ask a model the probes of one or several sets, or the questions of benchmarks, or read texts to it.

    Of a probe: is the target the most likely token, and how likely is it? Of a question of C-Eval or CMMLU: which of
    the four letters is the most likely one, in each of two answer forms? Those are asked through
    lm-evaluation-harness, with its own prompts. Of a text: how many bits a byte does it need, which compares between
    tokenizers?

    Args:
        model: an opened model, or anything that `load` takes.
        suites: shipped sets or collections, JSONL or CSV files, as names separated by commas or as a sequence; each is
            a suite of its own. Default: `english`, and for a model of the zoo `zoo/train`, `zoo/held` and
            `zoo/new-template`. `ceval` and `cmmlu` are the benchmarks (`ceval:val` asks its questions as probes). A
            `.txt` file, a folder of them, and a `.jsonl`, `.json` or `.parquet` file with the key `text` are texts.
        target: how a target of several tokens is read: refused (`single`), or its `first` token.
        skip_bad: count unusable probes instead of refusing the set; shipped sets are treated so always.
        limit: only the first so many usable probes of each group, questions of each subject, or documents of a text.
        every: for benchmarks, only every so-manyth question of each subject: 10 asks a fixed tenth of them.
        data: for benchmarks, a folder with their CSV files in the official layout (`ceval/val/law_val.csv`,
            `cmmlu/test/law.csv`, and `dev` beside them), or one benchmark's own folder. Default: what the environment
            variable `LAYERTRACER_DATA` says, or else the Hugging Face hub.
        subjects: for benchmarks, only these.
        shots: for benchmarks, solved examples before each question.
        forms: for benchmarks, which of the answer forms `A` (the letter right after the prompt, as the benchmarks' own
            scripts have it) and `␣A` (a space between, as the harness has it).
        batch_size: for benchmarks, prompts of one forward.
        seed: of the bootstrap.
        batch_tokens: most tokens in one forward of probes or texts; does not change the result.
        context: for texts, most tokens that a prediction rests on; fewer where the model has fewer positions.
        out: folder to save the result in; answers to questions are kept there while others are asked.
        resume: go on with an interrupted evaluation in `out`.
        force: replace what `out` holds.
        progress: show a progress bar.
        load_options: keyword arguments of `load` for a model that is not opened yet.

    Returns:
        The result, already saved when `out` is given.

    Raises:
        InputError: arguments, probes or folder cannot be used; nothing has been written.
        ModelRefused: the model cannot be traced exactly.

    Example:
        >>> import tracer
        >>> result = tracer.evaluate("zoo/transformer-8", progress=False)
        >>> result.suites
        ('zoo/train', 'zoo/held', 'zoo/new-template')
    """
    one_of("target", target, ("single", "first"))
    forms = tuple(one_of("answer form", form, FORMS) for form in forms)
    if limit is not None and limit < 1:
        raise InputError(f"limit {limit}: pass at least 1")
    if context < 2:
        raise InputError(f"context {context}: pass at least 2 tokens, one to predict another from")
    if not forms or shots < 0 or batch_size < 1 or every < 1:
        raise InputError(
            f"forms {list(forms)}, shots {shots}, batch_size {batch_size}, every {every}: pass a form, shots of at "
            "least 0, and at least 1 for the others"
        )
    folder = None if out is None else Path(out)
    if folder is not None:
        check_free(folder, force=force or resume, files=FILES)
    if isinstance(suites, str):
        suites = [name.strip() for name in suites.split(",") if name.strip()]
    elif isinstance(suites, Path | ProbeSet):
        suites = [suites]
    asked = {
        name: BENCHMARKS[name].chosen(subjects) for name in suites or () if isinstance(name, str) and name in BENCHMARKS
    }
    if subjects is not None and not asked:
        raise InputError("subjects are those of ceval and cmmlu: name one of them as a suite, or leave subjects out")
    questions = data_folder(data)
    options = dict(load_options or {})
    if asked and options.get("backend", "auto") == "auto":
        options["backend"] = "hooks"  # the harness runs the model itself, not a bridge around it
    opened = model if isinstance(model, TracedModel) else load(model, progress=progress, **options)
    if suites is None:
        suites = SUITES if opened.opened.kind == "zoo" else [default_probes(opened)]
    texts = [read_text(opened, suite, limit=limit) for suite in suites if is_text(suite)]
    others = [suite for suite in suites if suite not in asked and not is_text(suite)]
    sets = [read_probes(suite, skip_bad=skip_bad, data=data) for suite in others]
    names = [*(probe_set.name for probe_set in sets), *asked, *(text.name for text in texts)]
    if not names or len(set(names)) < len(names) or len(names) < len(suites):
        raise InputError(f"suites {', '.join(map(str, suites)) or 'are empty'}: name each suite once")
    usable = [_usable(opened, probe_set, target, skip_bad, limit) for probe_set in sets]
    arguments = {
        "model": opened.name,
        "suites": names,
        "target": target,
        "limit": limit,
        "every": every,
        "seed": seed,
        "subjects": None if subjects is None else list(subjects),
        "shots": shots,
        "forms": list(forms),
        "batch_size": batch_size,
        "context": context_of(opened, context),
    }
    own = versions()
    plan = {"model": opened.fingerprint(), "dtype": opened.opened.dtype, "arguments": arguments, "versions": own}
    store = PartialRun(folder, plan, resume=resume, force=force)
    tables = [] if not sets else [_asked(opened, sets, usable, batch_tokens, progress)]
    benchmarks: dict[str, dict[str, Any]] = {}
    for name, chosen in asked.items():
        harness = Harness(opened, questions, shots, batch_size)
        tables.append(
            harness.ask(BENCHMARKS[name], chosen, forms, limit=limit, every=every, store=store, progress=progress)
        )
        number = len(tables[-1]) // len(forms)
        benchmarks[name] = {"subjects": list(chosen), "questions": number, "truncated": harness.truncated}
    probes = pd.concat(tables, ignore_index=True) if tables else EvalResult.probes_of([])
    letters = [f"log_p_{letter}" for letter in LETTERS]
    arrays: dict[str, np.ndarray] = {key: probes[key].to_numpy(dtype=np.float64) for key in ("log_p", "p_said", "mass")}
    if asked:
        arrays["log_p_letters"] = probes[letters].to_numpy(dtype=np.float64)
    probes = probes.drop(columns=letters, errors="ignore")
    documents = ask_texts(opened, texts, context=context, batch_tokens=batch_tokens, progress=progress)
    arrays |= {f"{TEXT}{name}": found for name, found in documents.items()}
    run = {
        "schema": SCHEMA,
        "arguments": arguments | {"suites": list(dict.fromkeys(probes["suite"]))},
        "model": opened.describe(),
        "versions": own,
        "skipped": {
            read.name: [asdict(skip) for skip in (*read.skipped, *part.skipped)]
            for read, part in zip(sets, usable, strict=True)
        },
        "warnings": [asdict(note) for part in usable for note in part.warnings],
        "benchmarks": benchmarks,
        "texts": [text_row(name, found, seed) for name, found in documents.items()],
        "card": _on_card(opened, [s.name for s in sets if s.shipped]) if limit is None else None,
    }
    result = EvalResult(run, probes, _groups(probes, arrays, seed), arrays)
    if folder is not None:
        result.save(folder, force=force or resume)
        store.remove()
    return result


def _usable(model: TracedModel, probes: ProbeSet, target: str, skip_bad: bool, limit: int | None) -> TokenizedProbes:
    """The probes of a set that can be asked."""
    if {ALL, MACRO} & set(probes.groups):
        raise InputError(f"a group is called {ALL!r} or {MACRO!r}, as pooled ones are: give it another name")
    return usable_probes(
        model, probes, target="first" if target == "first" else "single", limit=limit, skip_bad=skip_bad
    )


def _asked(
    model: TracedModel, sets: Sequence[ProbeSet], usable: Sequence[TokenizedProbes], batch_tokens: int, progress: bool
) -> pd.DataFrame:
    """One row a probe."""
    items = [item for part in usable for item in part.items]
    bar = tqdm(total=len(items), desc=f"Asking {model.name}", unit="probe", disable=not progress)
    with bar, evaluating(model.model):
        found = next_tokens(model.adapter.forward, items, batch_tokens=batch_tokens, seen=bar.update)
    return pd.DataFrame(
        {
            "suite": [read.name for read, part in zip(sets, usable, strict=True) for _ in part.items],
            "id": [item.probe.id for item in items],
            "group": [item.probe.group for item in items],
            "prompt": [item.probe.prompt for item in items],
            "target": [item.probe.target for item in items],
            "said": [None if model.tokenizer is None else model.tokenizer.decode([token]) for token in found.said],
            "answered": found.answered.numpy(),
            "log_p": found.log_p.numpy(),
            "p_said": found.p_said.numpy(),
            "mass": np.nan,
        }
    )


def _groups(probes: pd.DataFrame, arrays: Mapping[str, np.ndarray], seed: int) -> pd.DataFrame:
    """Accuracy and mean log-probability of each group, and of each suite as a whole."""
    rows = []
    for suite, table in probes.groupby("suite", sort=False):
        subjects = asks_letters(table)
        parts = {ALL: table.index, **table.groupby("group", sort=False).groups}
        if subjects:
            parts = {MACRO: table.index, **parts}
        for group, index in parts.items():
            answered, log_p = table.loc[index, "answered"].to_numpy(dtype=float), arrays["log_p"][index]
            of = table["group"].tolist() if group in (ALL, MACRO) and table["group"].nunique() > 1 else None
            scheme = _Scheme(of, subjects, group == MACRO, seed, (str(suite), str(group)))
            mean, (share, low, high) = scheme.mean(log_p), scheme.share(answered)
            rows.append(
                {
                    "suite": suite,
                    "group": group,
                    "n": len(index),
                    "answered": int(answered.sum()),
                    "accuracy": share,
                    "low": low,
                    "high": high,
                    "log_p": mean.estimate,
                    "log_p_low": mean.low,
                    "log_p_high": mean.high,
                    "p_said": scheme.plain_mean(arrays["p_said"][index]),
                    "mass": scheme.plain_mean(arrays["mass"][index]),
                }
            )
    numbers = ("low", "high", "log_p", "log_p_low", "log_p_high")
    return pd.DataFrame(rows, columns=list(GROUPS)).astype(dict.fromkeys(numbers, float))


@dataclass(frozen=True)
class _Scheme:
    """How a mean over some answers and its interval are made.

    Attributes:
        groups: of the answers; None where they are all of one.
        fixed: the groups are those of a benchmark, not some of many that there could be.
        macro: the mean over groups of their means.
        seed: of the resampling.
        label: what the answers are.
    """

    groups: Sequence[str] | None
    fixed: bool
    macro: bool
    seed: int
    label: tuple[str, str]

    def mean(self, values: np.ndarray, what: str = "log_p") -> Interval:
        label = (what, *self.label)
        return mean_answer(values, self.groups, subjects=self.fixed, macro=self.macro, seed=self.seed, label=label)

    def plain_mean(self, values: np.ndarray) -> float:
        if self.groups is not None and self.macro:
            return float(pd.Series(values).groupby(list(self.groups)).mean().mean())
        return float(values.mean())

    def share(self, answered: np.ndarray) -> tuple[float, float | None, float | None]:
        """A share and its 95 % interval: of one group by Wilson, of several by resampling.

        Where all answers agree, resampling would claim to be certain; then each group of a probe set counts as one
        observation, and of a benchmark each question.
        """
        share = self.plain_mean(answered)
        if self.groups is not None and answered.min() < answered.max():
            found = self.mean(answered, "accuracy")
            if found.low is not None:
                return share, found.low, found.high
        n = len(answered) if self.groups is None or self.fixed else len(set(self.groups))
        interval = binomtest(round(share * n), n).proportion_ci(method="wilson")
        return share, interval.low, interval.high


def _on_card(model: TracedModel, suites: Sequence[str]) -> dict[str, int] | None:
    """How many probes of each suite a model of the zoo answers according to its card; None for other models."""
    if model.opened.kind != "zoo":
        return None
    sets = read_card(model.name).facts["accuracy"]
    return {
        suite: sum(group["answered"] for group in sets[suite.removeprefix(PREFIX)].values())
        for suite in suites
        if suite.startswith(PREFIX) and suite.removeprefix(PREFIX) in sets
    }
