"""The controlled trial of freeze plans on two models of the zoo: what each arm learns, keeps and costs.

`python figures/zoo_trials.py` draws the figures, prints the tables, and writes down for `tracer plan` what was found,
all from the committed trainings. With `--measure`, from the top of the tree, it makes those that are missing, about a
minute each on one core for the Transformer and two for the hybrid, 27 for each of eight seeds; interrupted, it goes on
where it was.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from trials_page import write_page

import tracer
from tracer.freezing.findings import FILE
from tracer.plots import write_figures
from tracer.plots.trial import FIGURES
from tracer.zoo.texts import write_texts

HERE = Path(__file__).parent
DATA = HERE / "data" / "trials"
FINDINGS = HERE.parent / "tracer" / "freezing" / FILE
TEXT = Path("runs/zoo-text")
TRACES = Path("runs/zoo-traces")
FROZEN = {"embeddings": "freeze", "norm": "freeze", "head": "freeze"}
ENGLISH = [
    *("birthplace", "job", "colour", "pet", "capital", "currency", "language", "flag", "material", "shape", "room"),
    *("antonym", "sum"),
]
CHINESE = ["zh-town", "zh-job", "zh-colour", "zh-pet"]
MEASURED: dict[str, dict[str, str]] = {
    # On the Transformer rule particle gives blocks 0-3, and on the hybrid fragile:4 does: those are the arm shallow.
    "transformer-8": {"fragile": "fragile:4"},
    "gdn-attention-8": {"particle": "particle"},
}
"""Arms whose blocks come from a trace, by model."""


def recipe(model: str) -> dict[str, Any]:
    """The trial of a model of the zoo."""
    arms: dict[str, dict[str, Any]] = {
        "full": {"rule": "full"},
        "shallow": {"rule": "shallow:4"},
        "deep": {"rule": "deep:4"},
        "middle": {"rule": "middle:4"},
        "random": {"rule": "random:4"},
        "full-frozen": {"rule": "full", **FROZEN},
        "shallow-frozen": {"rule": "shallow:4", **FROZEN},
        "deep-frozen": {"rule": "deep:4", **FROZEN},
    }
    arms |= {name: {"run": str(TRACES / model), "rule": rule} for name, rule in MEASURED[model].items()}
    return {
        "model": f"zoo/{model}",
        "text": {"new": {"path": str(TEXT / "new.jsonl")}},
        "block_size": 64,
        "per_device_train_batch_size": 16,
        "warmup_steps": 20,
        "arms": arms,
        "rates": [5e-4, 1e-3, 2e-3],
        "seeds": 8,
        "budgets": [60, 150],
        "every": 15,
        "acquisition": {"suite": "zoo/second-held"},
        "retention": {
            "english": {"suite": "zoo/held", "groups": ENGLISH},
            "chinese": {"suite": "zoo/held", "groups": CHINESE},
        },
        "also": {
            "new-text": {"suite": str(TEXT / "new-held.jsonl"), "limit": 60},
            "old-text": {"suite": str(TEXT / "retention.jsonl"), "limit": 40},
        },
        "claims": [
            {"better": "shallow", "than": "full"},
            {"better": "shallow", "than": "deep"},
            {"better": "deep", "than": "full"},
        ],
        "output_dir": str(DATA / model),
    }


def measure(model: str, jobs: int) -> None:
    """Make the trainings that are missing."""
    if not TEXT.is_dir():
        write_texts(TEXT)
    if not (TRACES / model).is_dir():
        tracer.trace(f"zoo/{model}", "zoo/held", out=TRACES / model)
    tracer.trial(recipe(model), resume=True, jobs=jobs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="make the trainings that are missing")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("models", nargs="*", default=list(MEASURED), help=f"of {', '.join(MEASURED)}")
    options = parser.parse_args()
    for model in options.models:
        if options.measure:
            measure(model, options.jobs)
    found = []
    for model in MEASURED:
        if not (DATA / model).is_dir():
            continue
        result = tracer.TrialResult.load(DATA / model)
        print(result.summary(), end="\n\n")
        figures = {name: lambda draw=draw, own=result: draw(own) for name, draw in FIGURES.items()}
        for path in write_figures(figures, HERE / "trials" / model, force=True):
            print(path)
        found.append(result.finding())
    FINDINGS.write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(FINDINGS)
    print(write_page())
