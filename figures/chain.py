"""The whole chain on a model of the zoo: trace, plan, continued pre-training, evaluation, trace again.

`python figures/chain.py` teaches zoo/transformer-8 facts that it has never seen, under the plan that its own trace
gives, and shows in one table and one figure what was known, what was learned and what was kept. About a minute and a
half on two cores; `--out` says where the runs go.
"""

import argparse
import contextlib
import sys
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

import tracer
from tracer.plots import write_figures
from tracer.plots.style import BLUE, ORANGE, style, write_caption
from tracer.zoo.texts import write_texts

KNOWN, LEARNED, PHRASED = "zoo/held", "zoo/second-train", "zoo/second-held"
WORDS = {KNOWN: "known facts", LEARNED: "new facts, as told", PHRASED: "new facts, told otherwise"}


def run_chain(
    out: Path,
    *,
    model: str = "zoo/transformer-8",
    rule: str = "particle",
    steps: int = 200,
    limit: int | None = 20,
    progress: bool = True,
) -> pd.DataFrame:
    """Everything, each step from what the one before has saved.

    Returns:
        One row a suite: `suite`, `what`, `n`, and the share of probes answered `before` and `after` with intervals.
    """
    texts = out / "text"
    write_texts(texts)
    tracer.trace(model, limit=limit, out=out / "trace", force=True, progress=progress)
    plan = tracer.plan(out / "trace", rule, out=out / "plan.json", force=True)
    trained = tracer.cpt(
        {
            "model": model,
            "plan": str(out / "plan.json"),
            "text": {
                "new": {"path": str(texts / "new.jsonl"), "weight": 0.8, "held_out": 0.05},
                "replay": {"path": str(texts / "old.jsonl"), "weight": 0.2},
            },
            "evaluate": {"retention": {"path": str(texts / "retention.jsonl")}},
            "block_size": 64,
            "output_dir": str(out / "model"),
            "max_steps": steps,
            "per_device_train_batch_size": 16,
            "learning_rate": 2e-3,
            "lr_scheduler_type": "linear",
            "weight_decay": 0.1,
            "eval_steps": max(1, steps // 4),
            "save_steps": steps,
            "seed": 0,
        },
        force=True,
        progress=progress,
    )
    before, after = (
        tracer.evaluate(which, list(WORDS), out=out / name, force=True, progress=progress)
        for which, name in ((model, "before"), (str(out / "model"), "after"))
    )
    again = tracer.trace(out / "model", KNOWN, limit=limit, out=out / "trace-after", force=True, progress=progress)
    drift = tracer.drift(model, out / "model", KNOWN, limit=limit, out=out / "drift", force=True, progress=progress)
    rows = []
    for suite, what in WORDS.items():
        row = {"suite": suite, "what": what}
        for name, result in (("before", before), ("after", after)):
            found = result.groups.query("suite == @suite and group == 'all'").iloc[0]
            row |= {
                "n": found["n"],
                name: found["accuracy"],
                f"{name}_low": found["low"],
                f"{name}_high": found["high"],
            }
        rows.append(row)
    table = pd.DataFrame(rows)
    write_figures({"chain": lambda: draw(table, trained)}, out / "figures", force=True)
    print(plan.summary().split("\n\n")[0])
    print(trained.summary())
    print(f"particle block {again.run['particle_block']['estimate']} after; {drift.summary().splitlines()[1]}")
    print(f"\n{spelt(table)}\n\nfigure: {out / 'figures' / 'chain.png'}")
    return table


def spelt(table: pd.DataFrame) -> str:
    """The table as text."""

    def share(row: pd.Series, name: str) -> str:
        return f"{row[name]:.1%} [{row[f'{name}_low']:.1%}, {row[f'{name}_high']:.1%}]"

    shown = pd.DataFrame(
        [(row["what"], row["n"], share(row, "before"), share(row, "after")) for _, row in table.iterrows()],
        columns=["share of probes answered", "n", "before", "after"],
    )
    return shown.to_string(index=False)


def draw(table: pd.DataFrame, trained: tracer.CptResult) -> Figure:
    """What is answered before and after on the left, the losses on the way on the right."""
    with style():
        figure = Figure(figsize=(8.4, 3.4), layout="constrained")
        answered, losses = figure.subplots(1, 2)
        for name, shift, colour, marker in (("before", -0.1, BLUE, "o"), ("after", 0.1, ORANGE, "s")):
            rows = table.index + shift
            answered.hlines(rows, table[f"{name}_low"], table[f"{name}_high"], color=colour)
            answered.plot(table[name], rows, marker, color=colour, label=name)
        answered.set_yticks(table.index, table["what"])
        answered.set_ylim(len(table) - 0.5, -0.5)
        answered.set_xlim(-0.03, 1.03)
        answered.set_xlabel("share of probes answered")
        answered.legend(loc="lower left", fontsize=7)
        for name, colour, marker in (("new", ORANGE, "s"), ("retention", BLUE, "o")):
            curve = trained.curve.dropna(subset=[f"{name}_loss"])
            losses.plot(curve["step"], curve[f"{name}_loss"], marker=marker, color=colour, label=f"{name} text")
        losses.set_xlabel("step")
        losses.set_ylabel("loss (nats a token)")
        losses.legend(fontsize=7)
        plan = trained.run["plan"]
        write_caption(
            figure,
            [
                f"{plan['model']['name']} after {trained.run['steps']} steps on new facts and a fifth of old text, "
                f"plan {plan['rule']}: {len(plan['train'])} blocks trained, {len(plan['freeze'])} frozen",
                f"n = {', '.join(str(n) for n in table['n'])} probes, 95 % intervals; one training",
            ],
        )
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/chain"))
    with contextlib.suppress(KeyboardInterrupt):
        run_chain(parser.parse_args().out)
        sys.exit(0)
    sys.exit(130)
