"""Freeze plans compared once on Gemma 3 270M with Chinese technical text: everything, the shallow and the deep half.

`python figures/gemma_trial.py` draws the figures and prints the tables from the committed trainings. With `--measure
--data FOLDER`, from the top of the tree, it fetches the text (the Debian Reference in Chinese, from Debian's archive by
apt-get), trains the three arms with the same tokens, and measures the new text, English prose (help topics of Python)
and C-Eval (a question of each subject) before and after; FOLDER holds C-Eval's CSV files, without it they come from the
hub. About an hour on one core; interrupted, it goes on with the arms that are missing. One rate and one seed: what it
shows is that a real model goes through the same trial, not which plan is better.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from smollm2_cpt import fetch_texts
from trials_page import write_page

import tracer
from tracer.benchmarks import DATA as DATA_VARIABLE
from tracer.plots import write_figures

HERE = Path(__file__).parent
DATA = HERE / "data" / "trials" / "gemma3-270m"
TEXT = Path("runs/gemma-text")
EVERY_HELD = 12
"""One section of the new text in so many is measured and not trained on."""


def texts() -> dict[str, str]:
    """Write the texts: what is trained on, and what is measured of the new and of the old kind."""
    found = fetch_texts(TEXT)
    sections = [json.loads(line) for line in found["new"].read_text("utf-8").splitlines()]
    parts = {
        "train": [section for number, section in enumerate(sections) if number % EVERY_HELD],
        "held": sections[::EVERY_HELD],
    }
    for name, part in parts.items():
        lines = (json.dumps(section, ensure_ascii=False) + "\n" for section in part)
        (TEXT / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return {name: str(TEXT / f"{name}.jsonl") for name in (*parts, "retention")}


def recipe() -> dict[str, Any]:
    """The trial."""
    where = texts()
    return {
        "model": "gemma3-270m-q4_k_m",
        "text": {"debian": {"path": where["train"]}},
        "block_size": 256,
        "per_device_train_batch_size": 1,
        "warmup_steps": 10,
        "arms": {"full": {"rule": "full"}, "shallow": {"rule": "shallow:9"}, "deep": {"rule": "deep:9"}},
        "rates": [1e-4],
        "seeds": 1,
        "budgets": [80],
        "every": 80,
        "acquisition": {"suite": where["held"], "limit": 10},
        "retention": {"english": {"suite": where["retention"], "limit": 4}},
        "also": {"ceval": {"suite": "ceval:val", "limit": 1, "score": "log_p"}},
        "claims": [{"better": "shallow", "than": "full"}, {"better": "shallow", "than": "deep"}],
        "output_dir": str(DATA),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="make the trainings that are missing")
    parser.add_argument("--data", help="folder of C-Eval's questions")
    options = parser.parse_args()
    if options.measure:
        if options.data is not None:
            os.environ[DATA_VARIABLE] = options.data  # the recipe, which is committed, is not to hold the path
        tracer.trial(recipe(), resume=True)
    result = tracer.TrialResult.load(DATA)
    print(result.summary())
    drawn = {"differences": lambda: result.plot("differences")}
    for path in write_figures(drawn, HERE / "trials" / "gemma3-270m", force=True):
        print(path)
    print(write_page())
