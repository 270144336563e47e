"""SmolLM2-135M continued on Chinese technical text that it has hardly seen: everything trained, and the measured plan.

`python figures/smollm2_cpt.py` draws the figure from the committed results. With `--measure`, from the top of the tree,
it first fetches the text (the Debian Reference in Chinese, from Debian's archive by apt-get), and trains twice, with
the same tokens: everything, and the blocks before the median task particle of `data/smollm2_both_lenses` (tuned lens).
What is kept is measured on English prose, three help topics of Python. About half an hour on an idle core.
"""

import argparse
import gzip
import json
import re
import shutil
import subprocess
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

import tracer
from tracer.plots import write_figures
from tracer.plots.style import BLUE, ORANGE, style, write_caption
from tracer.summary import spans
from tracer.training.results import CURVE, RUN

HERE = Path(__file__).parent
DATA = HERE / "data" / "smollm2_cpt"
MODEL = "smollm2-135m-instruct-q4_1"
PACKAGE, INSIDE = "debian-reference-zh-cn", "usr/share/debian-reference/debian-reference.zh-cn.txt.gz"
ARMS = {
    "full": {"rule": "full"},
    "particle": {"run": "figures/data/smollm2_both_lenses", "rule": "particle"},
}


def fetch_texts(folder: Path) -> dict[str, Path]:
    """Write `new.jsonl` (sections of the Debian Reference) and `retention.jsonl`; the package is not kept."""
    folder.mkdir(parents=True, exist_ok=True)
    work = folder / "package"
    work.mkdir(exist_ok=True)
    if shutil.which("apt-get") is None:
        raise SystemExit(f"the text comes from Debian's archive: run this on Debian, or unpack {PACKAGE} into {work}")
    if not (work / INSIDE).is_file():
        subprocess.run(["apt-get", "download", PACKAGE], cwd=work, check=True)
        (archive,) = work.glob(f"{PACKAGE}_*.deb")
        subprocess.run(["dpkg-deb", "-x", archive.name, "."], cwd=work, check=True)
    text = gzip.decompress((work / INSIDE).read_bytes()).decode("utf-8")
    # After the number of a section's heading stands a space that does not break; in tables of contents another one.
    sections = re.split(r"(?m)^(?=\d+(?:\.\d+)+\.\u00a0)", text)[1:]
    new = [re.sub(r"(?m)^ {4}", "", section).strip() for section in sections]
    from pydoc_data.topics import topics

    found = {"new": new, "retention": list(topics.values())}
    for name, documents in found.items():
        lines = (json.dumps({"text": document}, ensure_ascii=False) + "\n" for document in documents)
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return {name: folder / f"{name}.jsonl" for name in found}


def measure(out: Path, steps: int) -> None:
    texts = fetch_texts(out / "text")
    for arm, plan in ARMS.items():
        result = tracer.cpt(
            {
                "model": MODEL,
                "plan": plan,
                "text": {"new": {"path": str(texts["new"]), "held_out": 0.02}},
                "evaluate": {"retention": {"path": str(texts["retention"]), "limit": 3}},
                "block_size": 256,
                "output_dir": str(out / arm),
                "max_steps": steps,
                "per_device_train_batch_size": 1,
                "learning_rate": 2e-4,
                "lr_scheduler_type": "cosine",
                "warmup_steps": 10,
                "weight_decay": 0.1,
                "eval_steps": max(1, steps // 3),
                "save_strategy": "no",
                "seed": 0,
            },
            force=True,
        )
        print(result.summary())
        target = DATA / arm
        target.mkdir(parents=True, exist_ok=True)
        for name in (RUN, CURVE):
            shutil.copy(out / arm / name, target / name)


def draw(results: dict[str, tracer.CptResult]) -> Figure:
    with style():
        figure = Figure(figsize=(8.4, 3.4), layout="constrained")
        panels = figure.subplots(1, 2)
        looks = {"full": (BLUE, "o", "-"), "particle": (ORANGE, "s", "--")}
        for axes, text, title in zip(panels, ("new", "retention"), ("new text", "retention text"), strict=True):
            for arm, result in results.items():
                colour, marker, line = looks[arm]
                curve = result.curve.dropna(subset=[f"{text}_perplexity"])
                axes.plot(
                    curve["step"], curve[f"{text}_perplexity"], color=colour, marker=marker, linestyle=line, label=arm
                )
            axes.set_title(title, loc="left", fontsize=8)
            axes.set_xlabel("step")
            axes.set_ylabel("perplexity (a token)")
        panels[0].legend()
        run = results["particle"].run
        write_caption(
            figure,
            [
                f"SmolLM2-135M continued on the Debian Reference in Chinese, {run['tokens']:,} tokens, all of it "
                f"trained (full) and by the measured plan (particle): blocks {spans(run['plan']['freeze'])} frozen, "
                "everything else trained",
                f"New text: {run['measured_texts']['new']['documents']} sections that were not trained on, "
                f"{run['measured_texts']['new']['tokens']:,} tokens",
                "Retention: three help topics of Python, in English. One training an arm, with one seed and one "
                "learning rate, so that the two arms cannot be ranked",
            ],
        )
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="train anew")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--out", type=Path, default=Path("runs/smollm2-cpt"))
    options = parser.parse_args()
    if options.measure:
        measure(options.out, options.steps)
    results = {arm: tracer.CptResult.load(DATA / arm) for arm in ARMS}
    table = pd.DataFrame(
        [
            {
                "arm": arm,
                "text": text,
                **{when: run.run["measured"][text][when]["perplexity"] for when in ("before", "after")},
            }
            for arm, run in results.items()
            for text, found in run.run["measured"].items()
        ]
    )
    print(table.to_string(index=False, float_format=lambda number: f"{number:.2f}"))
    for path in write_figures({"perplexity": lambda: draw(results)}, HERE / "smollm2_cpt", force=True):
        print(path)
