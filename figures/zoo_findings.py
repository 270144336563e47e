"""What the zoo shows about the papers' claims: `docs/FINDINGS.md` and its figures.

`python figures/zoo_findings.py` draws the figures and writes the page from the committed tables in `data/zoo`.
`python figures/zoo_findings.py --measure runs/zoo` first measures the tables again on what `make zoo` has trained.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from transformers import AutoTokenizer
from zoo_page import one_of_each_family, page

from tracer import TracedModel, hooks, load, trace
from tracer.divergence import js_divergence
from tracer.evaluation.next_token import next_distributions
from tracer.models.plain import forward_logits
from tracer.plots import write_figures
from tracer.plots.lens import particle_shares
from tracer.plots.style import answered
from tracer.probes import read_probes, tokenize
from tracer.results import TraceResult
from tracer.runs import first_of_each_group
from tracer.statistics import pooled_interval
from tracer.zoo.families import RUNS, Run, untrained
from tracer.zoo.shelf import CARD, listing

HERE = Path(__file__).parent
DATA = HERE / "data" / "zoo"
PAGE, README = HERE.parent / "docs" / "FINDINGS.md", HERE.parent / "README.md"
BEGIN, END = "<!-- zoo:begin -->\n", "<!-- zoo:end -->"
PROBES, ABLATIONS, SEED = "zoo/held", ("zero", "mean"), 0
LIMIT: int | None = None
"""Most probes of each relation; all of them for what is committed."""
SIZES = ("transformer-4", "transformer-8", "transformer-12")
PARTS = 4
"""Equal parts of the depth that are skipped as a whole."""
TWINS = 3
"""Networks with random weights that every model is compared with."""

Table = list[dict[str, object]]


def measure(trained: Path, data: Path, jobs: int = 1) -> None:
    """Trace every model and its twins with random weights, and write the tables.

    Args:
        trained: folder of the models.
        data: folder for the tables.
        jobs: models that are traced at once, by processes of their own on one thread each.
    """
    each = partial(_measured, trained)
    if jobs == 1:
        found = [each(run) for run in RUNS.values()]
    else:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_one_thread) as pool:
            found = list(pool.map(each, RUNS.values()))
    tables: dict[str, Table] = {name: [row for rows, _, _ in found for row in rows[name]] for name in found[0][0]}
    skipped = {name: values for _, own, _ in found for name, values in own.items()}
    tables["sizes"] = list(_sizes(skipped, found[0][2]))
    data.mkdir(parents=True, exist_ok=True)
    for name, rows in tables.items():
        pd.DataFrame(rows).to_csv(data / f"{name}.csv", index=False, float_format="%.6g", lineterminator="\n")


def _one_thread() -> None:
    torch.set_num_threads(1)


def _measured(trained: Path, run: Run) -> tuple[dict[str, Table], dict[str, np.ndarray], list[str]]:
    """Rows of one model for the tables, its divergences by what is skipped, and the relation of each probe."""
    folder = trained / run.name
    model = load(str(folder), dtype="float32", backend="hooks", progress=False)
    result = _traced(model)
    nulls = [_traced(_twin(run, folder, seed)) for seed in range(TWINS)]
    found = result.run["particle_block"]
    card = json.loads((folder / CARD).read_text(encoding="utf-8"))
    in_context = {name: counts["answered"] / counts["n"] for name, counts in card["accuracy"]["in-context"].items()}
    row = (
        _about(run)
        | {"parameters": model.model.num_parameters(), "n": len(result.probes)}
        | {"answered": int(result.probes["answered"].sum())}
        | {"particle": found["estimate"], "particle_low": found["low"], "particle_high": found["high"]}
        | in_context
    )
    tables: dict[str, Table] = {
        "models": [row],
        "halves": list(_halves(run, result, nulls)),
        "blocks": [*_blocks(run, "trained", result), *_blocks(run, "random", nulls[0])],
        "groups": [_about(run) | group for group in result.groups.to_dict("records")],
    }
    skipped = {}
    if run.name in SIZES:
        single = result.arrays["jsd_zero"]
        skipped = {
            f"{run.name} block": single.mean(axis=0),
            f"{run.name} block, without the first": single[1:].mean(axis=0),
            f"{run.name} part": _parts(model),
        }
    print(f"{run.name}: particle block {found['estimate']}", flush=True)
    return tables, skipped, result.probes["group"].tolist()


def _traced(model: TracedModel) -> TraceResult:
    return trace(model, PROBES, limit=LIMIT, ablations=ABLATIONS, seed=SEED, progress=False)


def _twin(run: Run, folder: Path, seed: int) -> TracedModel:
    """The same architecture with random weights: with seed 0 those that the training of the run began with."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    twin = replace(run, seed=run.seed + 1000 * seed)
    return load(untrained(twin, len(tokenizer), tokenizer.bos_token_id).eval(), tokenizer)


def _about(run: Run) -> dict[str, object]:
    return {"name": run.name, "family": run.family.name, "blocks": run.blocks, "seed": run.seed} | {
        "embedding_std": run.embedding_std,
        "shipped": run.shipped,
    }


def _halves(run: Run, result: TraceResult, nulls: Sequence[TraceResult]) -> Iterator[dict[str, object]]:
    """Mean divergence of the shallow half less that of the deep half, per ablation, with block 0 and without.

    The mean difference of the twins on the same probes is what a random network shows; `excess` is what training added
    to it, and `twin_least`, `twin_most` say how far single twins differ.
    """
    groups, half = result.probes["group"].tolist(), run.blocks // 2
    for kind in result.ablations:
        for first in (0, 1):
            halves = []
            for traced in (result, *nulls):
                jsd = traced.arrays[f"jsd_{kind}"]
                halves.append((jsd[first:half].mean(axis=0), jsd[half:].mean(axis=0)))
            (shallow, deep), *twins = halves
            random = [one - other for one, other in twins]
            row = _about(run) | {"ablation": kind, "block_0": first == 0}
            row |= {"shallow": shallow.mean(), "deep": deep.mean(), "twin": np.mean(random)}
            row |= {"twin_least": min(map(np.mean, random)), "twin_most": max(map(np.mean, random))}
            for name, values in (
                ("difference", shallow - deep),
                ("excess", shallow - deep - np.mean(random, axis=0)),
            ):
                row |= _interval(name, values, groups, run.name, kind, first)
            yield row


def _blocks(run: Run, weights: str, result: TraceResult) -> Iterator[dict[str, object]]:
    norms = result.arrays["norm"].mean(axis=1)
    counted = answered(result)
    shares = particle_shares(result, counted) if counted.any() else np.zeros(run.blocks)
    for row in result.blocks.to_dict("records"):
        block = row["block"]
        yield (
            _about(run)
            | {"weights": weights, "block": block, "mixer": row["mixer"]}
            | {
                "norm_before": norms[block],
                "norm_after": norms[block + 1],
                "particles": shares[block],
            }
            | {
                key: row[key]
                for kind in result.ablations
                for key in (f"jsd_{kind}", f"jsd_low_{kind}", f"jsd_high_{kind}")
            }
        )


def _parts(model: TracedModel) -> np.ndarray:
    """`[probes]` mean divergence when a quarter of the depth is skipped, over the four quarters."""
    items = first_of_each_group(tokenize(read_probes(PROBES), model.tokenizer).items, LIMIT)
    prompts = [item.prompt_ids for item in items]
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
        "families": partial(draw_profiles, tables, one_of_each_family(tables["models"])),
        "profiles": partial(draw_profiles, tables),
        "claims": partial(draw_claims, tables),
        "norms": partial(draw_norms, tables),
    }


def write_listing() -> None:
    """Bring the list of models in the README up to what is on the shelf."""
    readme = README.read_text(encoding="utf-8")
    start, end = readme.index(BEGIN) + len(BEGIN), readme.index(END)
    README.write_text(f"{readme[:start]}```text\n{listing()}\n```\n{readme[end:]}", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", metavar="FOLDER", type=Path, help="folder of the trained models (runs/zoo)")
    parser.add_argument("--jobs", type=int, default=2, help="models that are traced at once (default: 2)")
    arguments = parser.parse_args()
    if arguments.measure is not None:
        measure(arguments.measure, DATA, arguments.jobs)
    found = {path.stem: pd.read_csv(path) for path in sorted(DATA.glob("*.csv"))}
    for path in write_figures(figures(found), HERE / "zoo_findings", force=True):
        print(path)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(found), encoding="utf-8")
    write_listing()
    print(PAGE, README, sep="\n")
