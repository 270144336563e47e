"""An evaluation as text for a terminal."""

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
        if result.run["skipped"][suite]:
            lines.append(f"  ! {result.run['skipped'][suite]} probes are not usable with this tokenizer")
        card = (result.run["card"] or {}).get(suite)
        if card is not None:
            found = int(table.loc[table["group"] == ALL, "answered"].iloc[0])
            lines.append(f"as on its card ({card})" if found == card else f"  ! its card says {card} answered")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _interval(mean: float, low: float, high: float) -> str:
    return f"{mean:.3f}" + ("" if np.isnan(low) else f" [{low:.3f}, {high:.3f}]")
