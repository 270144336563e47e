"""C-Eval and CMMLU asked of two small models: how far from chance they are, in either answer form.

`python figures/benchmarks.py` draws the figure and writes docs/BENCHMARKS.md from the committed results. With
`--measure --data FOLDER`, where FOLDER holds the official CSV files (`ceval/val/law_val.csv`, `cmmlu/test/law.csv`,
`dev` beside them; without `--data` they come from the Hugging Face hub), it asks all questions of C-Eval's `val` and
every tenth one of CMMLU's `test`, without shots, about three hours on one thread; interrupted, it goes on where it was.
The questions are not committed, only what became of them.
"""

import argparse
import json
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

import tracer
from tracer.benchmarks import BENCHMARKS, CHANCE
from tracer.evaluation.results import ALL, MACRO, EvalResult
from tracer.plots import write_figures
from tracer.plots.style import BLACK, BLUE, ORANGE, style, write_caption

HERE = Path(__file__).parent
DATA = HERE / "data" / "benchmarks"
PAGE = HERE.parent / "docs" / "BENCHMARKS.md"
MODELS = {"gemma3-270m-q4_k_m": "Gemma 3 270M", "smollm2-135m-instruct-q4_1": "SmolLM2-135M-Instruct"}
SUITES = {"ceval": 1, "cmmlu": 10}
"""Benchmark to one question in how many."""


def measure(out: Path, data: Path | None) -> None:
    for model in MODELS:
        for suite, every in SUITES.items():
            folder = out / model / suite
            if (folder / "run.json").is_file():
                result = EvalResult.load(folder)
            else:
                result = tracer.evaluate(model, suite, data=data, every=every, batch_size=16, out=folder, resume=True)
            print(result.summary())
            target = DATA / model / suite
            target.mkdir(parents=True, exist_ok=True)
            result.groups.to_csv(target / "groups.csv", index=False, lineterminator="\n")
            kept = ["suite", "id", "target", "said", "answered", "log_p", "mass"]
            rounded = result.probes[kept].round({"log_p": 5, "mass": 5})
            rounded.to_csv(target / "questions.csv", index=False, lineterminator="\n")
            about = {key: result.run[key] for key in ("arguments", "benchmarks", "versions")}
            about["model"] = {key: result.run["model"][key] for key in ("name", "revision", "dtype", "device")}
            (target / "run.json").write_text(json.dumps(about, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def pooled() -> pd.DataFrame:
    """The rows of each model and benchmark as a whole."""
    tables = []
    for model, title in MODELS.items():
        for suite in SUITES:
            if not (DATA / model / suite).is_dir():
                continue  # not asked yet
            table = pd.read_csv(DATA / model / suite / "groups.csv")
            tables.append(table[table["group"].isin((ALL, MACRO))].assign(model=title, benchmark=suite))
    found = pd.concat(tables, ignore_index=True)
    found["form"] = found["suite"].str.split().str[1]
    return found


def draw(table: pd.DataFrame) -> Figure:
    """Macro accuracy on the left, the probability of the four letters on the right, both by answer form."""
    macro = table[table["group"] == MACRO]
    rows = list(dict.fromkeys(zip(macro["model"], macro["benchmark"], strict=True)))
    with style():
        figure = Figure(figsize=(8.4, 2.6), layout="constrained")
        right, letters = figure.subplots(1, 2, sharey=True)
        for form, colour, marker, shift in (("A", BLUE, "o", -0.12), ("␣A", ORANGE, "s", 0.12)):
            own = macro[macro["form"] == form].set_index(["model", "benchmark"]).loc[rows]
            at = [row + shift for row in range(len(rows))]
            right.hlines(at, own["low"], own["high"], color=colour)
            right.plot(own["accuracy"], at, marker, color=colour, label="letter" if form == "A" else "space, letter")
            letters.plot(own["mass"], at, marker, color=colour)
        right.axvline(CHANCE, color=BLACK, linestyle=":", label="chance")
        right.set_yticks(range(len(rows)), [f"{model}, {BENCHMARKS[suite].title}" for model, suite in rows])
        right.set_ylim(len(rows) - 0.5, -0.5)
        right.set_xlabel("accuracy (mean over subjects)")
        letters.set_xlabel("probability of the four letters together")
        letters.set_xlim(-0.02, 1.02)
        figure.legend(loc="outside upper left", ncols=3)
        numbers = [table.query("model == @model and benchmark == @suite")["n"].iloc[0] for model, suite in rows]
        write_caption(
            figure,
            [
                "No shots; lines: 95 % intervals, questions drawn anew within subjects; n = "
                + ", ".join(f"{n:,}" for n in numbers),
                "C-Eval: all of its val split; CMMLU: every tenth question of its test split",
            ],
        )
    return figure


def spelt(table: pd.DataFrame) -> str:
    """The table as text."""
    shown = pd.DataFrame(
        {
            "model": table["model"],
            "benchmark": [
                f"{BENCHMARKS[suite].title} {form}"
                for suite, form in zip(table["benchmark"], table["form"], strict=True)
            ],
            "mean over": table["group"].map({MACRO: "subjects", ALL: "questions"}),
            "n": table["n"],
            "accuracy": [f"{a:.3f} [{b:.3f}, {c:.3f}]" for a, b, c in table[["accuracy", "low", "high"]].to_numpy()],
            "log p": [
                f"{a:.3f} [{b:.3f}, {c:.3f}]" for a, b, c in table[["log_p", "log_p_low", "log_p_high"]].to_numpy()
            ],
            "four letters": table["mass"].map("{:.3f}".format),
        }
    )
    return shown.to_string(index=False)


def page(table: pd.DataFrame) -> str:
    """docs/BENCHMARKS.md."""
    return f"""# C-Eval and CMMLU of two small models

`python figures/benchmarks.py --measure --data FOLDER`, without shots: all questions of C-Eval's `val`, and every
tenth one of each subject of CMMLU's `test`. Chance is {CHANCE:.2f}. A model whose interval holds it has not shown
that it knows anything here; where the four letters together have little probability, it does not answer in that form,
and what it would rather say is not looked at. `log p` is that of the right letter (nats).

```text
{spelt(table)}
```

![Accuracy, and the probability of the four letters](../figures/benchmarks/accuracy.png)
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="ask anew")
    parser.add_argument("--data", type=Path, help="folder of the questions")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"))
    options = parser.parse_args()
    if options.measure:
        measure(options.out, options.data)
    table = pooled()
    print(spelt(table))
    for path in write_figures({"accuracy": lambda: draw(table)}, HERE / "benchmarks", force=True):
        print(path)
    PAGE.write_text(page(table), encoding="utf-8")
    print(PAGE)
