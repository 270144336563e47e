"""An evaluation as text for a terminal."""

import textwrap

import pandas as pd

from tracer.benchmarks import BENCHMARKS, CHANCE, suite_name
from tracer.evaluation.calibration import calibration_error
from tracer.evaluation.results import ALL, MACRO, EvalResult
from tracer.summary import bounds

LEAST_MASS = 0.5
"""Probability on the four letters below which a model is said not to answer in a form."""


def summary_of(result: EvalResult) -> str:
    """Accuracy and mean log-probability of every group of every suite."""
    model = result.run["model"]
    parts = [
        f"{model['name']}  ({model['anatomy']['model_class']}, {len(model['anatomy']['blocks'])} blocks, "
        f"{model['dtype']}, {model['device']})"
    ]
    if not result.probes.empty:
        parts[0] += (
            "\naccuracy with 95 % intervals: the target is the most likely of all tokens, or of the four letters of a "
            "question;\nlog p: of the target, in nats; p said: mean probability of what was said, which for probes "
            "equals the accuracy of\na calibrated model"
        )
    calibration = result.calibration()
    benchmarks = result.benchmarks
    if benchmarks:
        parts.append(_benchmarks(result))
    for suite in result.suites:
        if suite in benchmarks:
            continue
        table = result.groups[result.groups["suite"] == suite]
        if len(table) == 2:  # one group, which is all
            table = table[table["group"] == ALL]
        shown = pd.DataFrame(
            {
                "group": table["group"],
                "probes": table["n"],
                "answered": table["answered"],
                "accuracy": [_interval(*row) for row in table[["accuracy", "low", "high"]].to_numpy()],
                "log p": [_interval(*row) for row in table[["log_p", "log_p_low", "log_p_high"]].to_numpy()],
                "p said": [f"{p:.2f}" for p in table["p_said"]],
            }
        )
        bins = calibration[calibration["suite"] == suite]
        lines = [
            suite,
            shown.to_string(index=False, justify="right"),
            f"expected calibration error {calibration_error(bins):.3f}: how far p said and accuracy are apart, in "
            f"{len(bins)} {'bin' if len(bins) == 1 else 'bins'} by p said",
        ]
        skipped = result.run["skipped"][suite]
        if skipped:
            first = textwrap.shorten(f"{skipped[0]['where']}: {skipped[0]['reason']}", 90, placeholder=" ...")
            lines.append(f"  ! {len(skipped)} probes are not usable and were left out, e.g. {first}")
        card = (result.run["card"] or {}).get(suite)
        if card is not None:
            found = int(table.loc[table["group"] == ALL, "answered"].iloc[0])
            lines.append(f"as on its card ({card})" if found == card else f"  ! its card says {card} answered")
        parts.append("\n".join(lines))
    if len(result.texts):
        parts.append(_texts(result))
    if result.run["warnings"]:
        first = textwrap.shorten("{where}: {reason}".format(**result.run["warnings"][0]), 90, placeholder=" ...")
        parts.append(f"  ! {len(result.run['warnings'])} probes are kept but suspect, e.g. {first}")
    return "\n\n".join(parts)


def _texts(result: EvalResult) -> str:
    """The texts, and what their numbers are."""
    table = result.texts
    shown = pd.DataFrame(
        {
            "text": table["text"],
            "documents": table["documents"],
            "tokens": [f"{number:,}" for number in table["tokens"]],
            "bytes": [f"{number:,}" for number in table["bytes"]],
            "loss": [f"{loss:.3f}" for loss in table["loss"]],
            "perplexity": [f"{number:.2f}" for number in table["perplexity"]],
            "bits/byte": [_interval(*row) for row in table[["bits_per_byte", "low", "high"]].to_numpy()],
        }
    )
    title = (
        f"texts, in windows of at most {result.run['arguments']['context']:,} tokens; loss and perplexity per token, "
        "of this tokenizer;\nbits a byte compare between models; fewer are better; intervals are over documents"
    )
    return f"{title}\n{shown.to_string(index=False, justify='right')}"


def _benchmarks(result: EvalResult) -> str:
    """The benchmarks as wholes, answer forms side by side, and what should make a reader careful."""
    groups, arguments = result.groups, result.run["arguments"]
    rows, notes = [], []
    for name, about in result.run["benchmarks"].items():
        for form in arguments["forms"]:
            table = groups[groups["suite"] == suite_name(BENCHMARKS[name], form)].set_index("group")
            micro, macro = table.loc[ALL], table.loc[MACRO]
            rows.append(
                {
                    "benchmark": name,
                    "form": form,
                    "subjects": len(about["subjects"]),
                    "questions": about["questions"],
                    "macro": _interval(*macro[["accuracy", "low", "high"]]),
                    "micro": _interval(*micro[["accuracy", "low", "high"]]),
                    "log p (macro)": _interval(*macro[["log_p", "log_p_low", "log_p_high"]]),
                    "four letters": f"{micro['mass']:.3f}",
                }
            )
            if micro["mass"] < LEAST_MASS:
                notes.append(
                    f"{name} {form}: the four letters hold {micro['mass']:.1%} of the probability after the prompt, so "
                    "that the model does not answer in this form"
                )
        if about["truncated"]:
            notes.append(
                f"{name}: {about['truncated']} prompts are longer than the model reads and lost their beginning"
            )
    shown = pd.DataFrame(rows).to_string(index=False, justify="right")
    title = (
        f"{arguments['shots']} shots; chance is {CHANCE:.2f}; macro: mean over subjects, as the benchmarks report; "
        "micro: over questions;\nform A: the letter right after the prompt, ␣A: a space between"
    )
    return "\n".join([title, shown, *(f"  ! {note}" for note in notes)])


def _interval(mean: float, low: float, high: float) -> str:
    return f"{mean:.3f} {bounds(low, high, '.3f')}".rstrip()
