"""Commands that ask a model questions and compare the answers: eval, compare."""

import sys
from pathlib import Path
from typing import Any

import click

from tracer.cli.options import LOAD_OPTIONS, model_options, names_of


@click.command("eval")
@click.argument("model")
@click.option(
    "--suite",
    help="Probe sets or files, ceval, cmmlu, texts (.txt, .jsonl with the key text, .parquet), separated by commas "
    "(default: english; for a model of the zoo zoo/train, zoo/held and zoo/new-template).",
)
@click.option("--target", default="single", show_default=True, help="Targets of several tokens: single or first.")
@click.option("--skip-bad", is_flag=True, help="Count unusable probes instead of refusing the set.")
@click.option("--limit", type=int, help="Only the first N usable probes of a group, questions, or documents.")
@click.option("--every", default=1, show_default=True, help="For ceval and cmmlu: only every N-th question.")
@click.option("--data", help="For ceval and cmmlu: a folder with their CSV files (default: the hub).")
@click.option("--subjects", help="For ceval and cmmlu: only these, separated by commas.")
@click.option(
    "--shots", default=0, show_default=True, help="For ceval and cmmlu: solved examples before each question."
)
@click.option("--batch-size", default=8, show_default=True, help="For ceval and cmmlu: prompts of one forward.")
@click.option("--seed", default=0, show_default=True, help="Of the bootstrap.")
@click.option("--batch-tokens", default=2048, show_default=True, help="Most tokens in one forward of probes or texts.")
@click.option("--context", default=1024, show_default=True, help="For texts: most tokens that a prediction rests on.")
@click.option("--out", help="Folder for the result and its figure (default: it is only printed).")
@click.option("--resume", is_flag=True, help="Go on with an interrupted evaluation in --out.")
@click.option("--force", is_flag=True, help="Replace the result in --out.")
@model_options
def evaluate(model: str, suite: str | None, subjects: str | None, out: str | None, quiet: bool, **options: Any) -> None:
    """Ask MODEL probes: how often the target is the most likely token, and how likely it is.

    The suites ceval and cmmlu are the benchmarks C-Eval (val) and CMMLU (test), asked through lm-evaluation-harness in
    both answer forms. Texts are read to it: their perplexity, and bits a byte, which compare between models.

    \b
    Examples:
      tracer eval zoo/mamba2-8
      tracer eval smollm2-135m-instruct-q4_1 --suite en-capitals,mine.jsonl --out runs/eval
      tracer eval Qwen/Qwen3-0.6B --suite ceval,cmmlu --shots 5 --out runs/qwen
      tracer eval ./continued --suite new.jsonl,old.txt --context 2048
      tracer eval ./continued --suite ceval --data benchmarks --subjects law,logic --out runs/law
    """
    from tracer.evaluation.evaluating import evaluate as run_evaluation

    load_options = {key: options.pop(key) for key in LOAD_OPTIONS}
    names = names_of(subjects)
    try:
        result = run_evaluation(
            model, suite, subjects=names, out=out, progress=not quiet, load_options=load_options, **options
        )
        click.echo(result.summary())
        if out is not None:
            said = f"\nsaved in {out}"
            if not result.probes.empty:
                from tracer.plots import write_figures

                write_figures({"accuracy": result.plot}, Path(out) / "figures", force=True)
                said += ", the figure in its folder figures"
            click.echo(said)
    except KeyboardInterrupt:
        kept = out is not None and (Path(out) / "partial").is_dir()
        said = f"; what is answered is kept, go on with: --out {out} --resume" if kept else ""
        click.echo(f"\ntracer: interrupted{said}", err=True)
        sys.exit(130)


@click.command()
@click.argument("runs", nargs=-1, required=True)
@click.option("--seed", default=0, show_default=True, help="Of the bootstrap.")
@click.option("--out", help="Folder for the tables of suites and groups (default: they are only printed).")
@click.option("--force", is_flag=True, help="Replace the comparison in --out.")
def compare(runs: tuple[str, ...], seed: int, out: str | None, force: bool) -> None:
    """Compare evaluations on the same questions with the first of RUNS (folders of tracer eval).

    \b
    Examples:
      tracer eval BASE --suite ceval --out runs/base && tracer eval ./continued --suite ceval --out runs/continued
      tracer compare runs/base runs/continued
    """
    from tracer.evaluation.comparing import compare as run_comparison

    found = run_comparison(runs, seed=seed)
    click.echo(found.summary())
    if out is not None:
        click.echo(f"\nsaved in {found.save(out, force=force)}")
