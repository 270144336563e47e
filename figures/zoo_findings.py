"""What the zoo shows about the papers' claims: `docs/FINDINGS.md` and its figures.

`python figures/zoo_findings.py` draws the figures and writes the page from the committed tables in `data/zoo`.
`python figures/zoo_findings.py --measure runs/zoo` first measures the tables again on what `make zoo` has trained.
"""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from transformers import AutoTokenizer
from zoo_page import page

from tracer import TracedModel, hooks, load, trace
from tracer.divergence import js_divergence
from tracer.evaluation.next_token import next_distributions
from tracer.models.plain import forward_logits
from tracer.plots import write_figures
from tracer.probes import read_probes, tokenize
from tracer.results import TraceResult
from tracer.statistics import pooled_interval
from tracer.zoo.families import RUNS, Run, untrained
from tracer.zoo.shelf import listing

HERE = Path(__file__).parent
DATA = HERE / "data" / "zoo"
PAGE, README = HERE.parent / "docs" / "FINDINGS.md", HERE.parent / "README.md"
BEGIN, END = "<!-- zoo:begin -->\n", "<!-- zoo:end -->"
PROBES, ABLATIONS, SEED = "zoo/held", ("zero", "mean"), 0
SIZES = ("transformer-4", "transformer-8", "transformer-12")
PARTS = 4
"""Equal parts of the depth that are skipped as a whole."""

Table = list[dict[str, object]]


def measure(trained: Path) -> None:
    """Trace every model and its twin with random weights, and write the tables."""
    tables: dict[str, Table] = {"models": [], "halves": [], "blocks": [], "groups": [], "sizes": []}
    skipped: dict[str, np.ndarray] = {}
    for run in RUNS.values():
        folder = trained / run.name
        model, twin = load(str(folder), backend="hooks", progress=False), _twin(run, folder)
        result, null = (trace(m, PROBES, ablations=ABLATIONS, seed=SEED, progress=False) for m in (model, twin))
        found = result.run["particle_block"]
        tables["models"].append(
            _about(run)
            | {"parameters": model.model.num_parameters(), "n": len(result.probes)}
            | {"answered": int(result.probes["answered"].sum())}
            | {"particle": found["estimate"], "particle_low": found["low"], "particle_high": found["high"]}
        )
        tables["halves"] += list(_halves(run, result, null))
        for name, traced in (("trained", result), ("random", null)):
            tables["blocks"] += list(_blocks(run, name, traced))
        tables["groups"] += [_about(run) | row for row in result.groups.to_dict("records")]
        if run.name in SIZES:
            single = result.arrays["jsd_zero"]
            skipped |= {f"{run.name} block": single.mean(axis=0), f"{run.name} part": _parts(model)}
            skipped |= {f"{run.name} block, without the first": single[1:].mean(axis=0)}
        print(f"{run.name}: particle block {found['estimate']}", flush=True)
    groups = result.probes["group"].tolist()
    tables["sizes"] = list(_sizes(skipped, groups))
    DATA.mkdir(parents=True, exist_ok=True)
    for name, rows in tables.items():
        pd.DataFrame(rows).to_csv(DATA / f"{name}.csv", index=False, float_format="%.6g", lineterminator="\n")


def _twin(run: Run, folder: Path) -> TracedModel:
    """The same architecture with the random weights that its training began with."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return load(untrained(run, len(tokenizer), tokenizer.bos_token_id).eval(), tokenizer)


def _about(run: Run) -> dict[str, object]:
    return {"name": run.name, "family": run.family.name, "blocks": run.blocks, "seed": run.seed} | {
        "embedding_std": run.embedding_std,
        "shipped": run.shipped,
    }


def _halves(run: Run, result: TraceResult, null: TraceResult) -> Iterator[dict[str, object]]:
    """Mean divergence of the shallow half less that of the deep half, per ablation, with block 0 and without.

    The twin's difference on the same probes is what a random network shows; `excess` is what training added to it.
    """
    groups, half = result.probes["group"].tolist(), run.blocks // 2
    for kind in result.ablations:
        for first in (0, 1):
            both = []
            for traced in (result, null):
                jsd = traced.arrays[f"jsd_{kind}"]
                both.append((jsd[first:half].mean(axis=0), jsd[half:].mean(axis=0)))
            (shallow, deep), (twin_shallow, twin_deep) = both
            row = _about(run) | {"ablation": kind, "block_0": first == 0}
            row |= {"shallow": shallow.mean(), "deep": deep.mean()}
            row |= {"twin_shallow": twin_shallow.mean(), "twin_deep": twin_deep.mean()}
            for name, values in (
                ("difference", shallow - deep),
                ("excess", shallow - deep - (twin_shallow - twin_deep)),
            ):
                row |= _interval(name, values, groups, run.name, kind, first)
            yield row


def _blocks(run: Run, weights: str, result: TraceResult) -> Iterator[dict[str, object]]:
    norms = result.arrays["norm"].mean(axis=1)
    for row in result.blocks.to_dict("records"):
        block = row["block"]
        yield (
            _about(run)
            | {"weights": weights, "block": block, "mixer": row["mixer"]}
            | {
                "norm_before": norms[block],
                "norm_after": norms[block + 1],
                "particles": row["particles"],
            }
            | {
                key: row[key]
                for kind in result.ablations
                for key in (f"jsd_{kind}", f"jsd_low_{kind}", f"jsd_high_{kind}")
            }
        )


def _parts(model: TracedModel) -> np.ndarray:
    """`[probes]` mean divergence when a quarter of the depth is skipped, over the four quarters."""
    prompts = [item.prompt_ids for item in tokenize(read_probes(PROBES), model.tokenizer).items]
    size = model.n_blocks // PARTS
    clean = _distributions(model, prompts)
    total = np.zeros(len(prompts))
    for part in range(PARTS):
        with hooks.ablate(model, block=list(range(part * size, (part + 1) * size))):
            total += js_divergence(clean, _distributions(model, prompts)).numpy() / PARTS
    return total


def _distributions(model: TracedModel, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    batches = list(next_distributions(partial(forward_logits, model.model), prompts))
    out = torch.empty(len(prompts), batches[0][1].shape[1], dtype=torch.float64)
    for rows, found in batches:
        out[rows] = found
    return out


def _sizes(skipped: dict[str, np.ndarray], groups: list[str]) -> Iterator[dict[str, object]]:
    """Mean divergence by size, and how it changes from one size to the next on the same probes."""
    for what in ("block", "block, without the first", "part"):
        for smaller, size in zip((None, *SIZES), SIZES, strict=False):
            values = skipped[f"{size} {what}"]
            row: dict[str, object] = {"skipped": what, "name": size} | _interval("jsd", values, groups, size, what)
            if smaller is not None:
                row |= _interval("change", values - skipped[f"{smaller} {what}"], groups, size, what)
            yield row


def _interval(name: str, values: np.ndarray, groups: list[str], *label: object) -> dict[str, object]:
    found = pooled_interval(values, groups, seed=SEED, label=("zoo", name, *label))
    return {name: found.estimate, f"{name}_low": found.low, f"{name}_high": found.high}


def figures(tables: dict[str, pd.DataFrame]) -> dict[str, "partial[Figure]"]:
    """The figures of the page, by name."""
    from zoo_plots import draw_claims, draw_norms, draw_profiles

    return {
        "families": partial(draw_profiles, tables, shipped_families(tables["models"])),
        "profiles": partial(draw_profiles, tables),
        "claims": partial(draw_claims, tables),
        "norms": partial(draw_norms, tables),
    }


def shipped_families(models: pd.DataFrame) -> list[str]:
    """The shipped model of every family, at the depth that all families have."""
    common = models.groupby("blocks")["family"].nunique().idxmax()
    return models.loc[models["shipped"] & (models["blocks"] == common), "name"].tolist()


def write_listing() -> None:
    """Bring the list of models in the README up to what is on the shelf."""
    readme = README.read_text(encoding="utf-8")
    start, end = readme.index(BEGIN) + len(BEGIN), readme.index(END)
    README.write_text(f"{readme[:start]}```text\n{listing()}\n```\n{readme[end:]}", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", metavar="FOLDER", type=Path, help="folder of the trained models (runs/zoo)")
    arguments = parser.parse_args()
    if arguments.measure is not None:
        measure(arguments.measure)
    found = {path.stem: pd.read_csv(path) for path in sorted(DATA.glob("*.csv"))}
    for path in write_figures(figures(found), HERE / "zoo_findings", force=True):
        print(path)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(found), encoding="utf-8")
    write_listing()
    print(PAGE, README, sep="\n")
