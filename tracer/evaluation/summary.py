"""An evaluation as text for a terminal."""

import textwrap

import numpy as np
import pandas as pd

from tracer.evaluation.results import ALL, EvalResult


def summary_of(result: EvalResult) -> str:
    """Accuracy and mean log-probability of every group of every suite."""
    model = result.run["model"]
    parts = [
        f"{model['name']}  ({model['anatomy']['model_class']}, {len(model['anatomy']['blocks'])} blocks, "
        f"{model['dtype']}, {model['device']})\n"
        "accuracy: the target is the most likely of all tokens; 95 % intervals; log p in nats; p said: mean "
        "probability\nof the most likely token, which equals the accuracy of a calibrated model"
    ]
    for suite in result.suites:
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
        lines = [suite, shown.to_string(index=False, justify="right")]
        skipped = result.run["skipped"][suite]
        if skipped:
            first = textwrap.shorten(f"{skipped[0]['where']}: {skipped[0]['reason']}", 90, placeholder=" ...")
            lines.append(f"  ! {len(skipped)} probes are not usable and were left out, e.g. {first}")
        card = (result.run["card"] or {}).get(suite)
        if card is not None:
            found = int(table.loc[table["group"] == ALL, "answered"].iloc[0])
            lines.append(f"as on its card ({card})" if found == card else f"  ! its card says {card} answered")
        parts.append("\n".join(lines))
    if result.run["warnings"]:
        first = textwrap.shorten("{where}: {reason}".format(**result.run["warnings"][0]), 90, placeholder=" ...")
        parts.append(f"  ! {len(result.run['warnings'])} probes are kept but suspect, e.g. {first}")
    return "\n\n".join(parts)


def _interval(mean: float, low: float, high: float) -> str:
    return f"{mean:.3f}" + ("" if np.isnan(low) else f" [{low:.3f}, {high:.3f}]")
