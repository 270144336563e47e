"""Commands that look into a model: trace, patch, tuned-lens."""

import sys
from pathlib import Path
from typing import Any

import click

from tracer.cli.options import LOAD_OPTIONS, model_options, names_of
from tracer.errors import InputError


@click.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option(
    "--probes",
    help="Shipped set or collection, JSONL or CSV file, ceval:val or cmmlu:test (default: english; zoo/held for the "
    "zoo).",
)
@click.option("--groups", help="Only these groups, separated by commas; of a benchmark, these subjects.")
@click.option("--data", help="For ceval:val and cmmlu:test: a folder with their CSV files (default: the hub).")
@click.option("--limit", type=int, help="Only the first N usable probes of each group.")
@click.option(
    "--ablations",
    default="zero",
    show_default=True,
    help="Of zero (skip), mean, resample, noise, perturb, swap_weights, zero_stream, or none.",
)
@click.option("--parts", default="block", show_default=True, help="What is ablated: block, mixer, mlp.")
@click.option("--positions", default="all", show_default=True, help="Where ablations act: all, not_first or last.")
@click.option(
    "--target", default="single", show_default=True, help="Targets of several tokens: single, first or joint."
)
@click.option("--rule", default="first_rise", show_default=True, help="Particle: first_rise, half_final or max_rise.")
@click.option("--min-rise", default=0.05, show_default=True, help="Smallest rise in probability that counts.")
@click.option("--rel-rise", default=0.25, show_default=True, help="Smallest rise as a share of the probe's largest.")
@click.option("--noise-samples", default=8, show_default=True, help="Draws for noise and perturb.")
@click.option("--noise-scale", default=1.0, show_default=True, help="Noise in standard deviations of the contribution.")
@click.option("--perturb-scale", default=0.1, show_default=True, help="Noise on weights as a share of their norm.")
@click.option("--swap-from", help="For swap_weights: another checkpoint of the same architecture.")
@click.option("--seed", default=0, show_default=True, help="Of donors, noise, permutations and bootstrap.")
@click.option("--recovery", is_flag=True, help="Also patch each block into the run on the corrupt prompt.")
@click.option("--readout", default="logit", show_default=True, help="Lens that particles are read by: logit or tuned.")
@click.option("--tuned-lens", help="For --readout tuned: the file that tracer tuned-lens has written.")
@click.option("--engine", help="onepass or full (default: what the self-check allows).")
@click.option("--batch-tokens", default=2048, show_default=True, help="Most tokens in one call of a block.")
@click.option(
    "--out", required=True, help="Folder for the result and its figures; of several models, for one folder each."
)
@click.option("--resume", is_flag=True, help="Go on with an interrupted trace; a finished one is shown again.")
@click.option("--force", is_flag=True, help="Replace the result in --out.")
@click.option("--skip-bad", is_flag=True, help="Count unusable probes instead of refusing the set.")
@click.option("--no-figures", is_flag=True, help="Write the numbers only.")
@model_options
def trace(models: tuple[str, ...], out: str, no_figures: bool, quiet: bool, **options: Any) -> None:
    """Trace MODEL on probes: where it executes them (logit lens) and where it is fragile (ablations).

    Several models are traced one after the other, each into a folder of its own name, and then drawn side by side.

    \b
    Examples:
      tracer trace zoo/mamba2-8 --out runs/mamba2
      tracer trace zoo/transformer-8 zoo/mamba2-8 zoo/gdn-attention-8 --out runs/families
      tracer trace ./my-model --probes my.jsonl --ablations zero,mean --dtype bfloat16 --out runs/mine
      tracer trace gemma3-270m-q4_k_m --probes chinese --groups zh-capitals --out runs/zh
      tracer trace Qwen/Qwen3-0.6B --probes ceval:val --groups law,logic --data benchmarks --out runs/ceval
    """
    from tracer.results import PARTIAL, check_free
    from tracer.zoo.shelf import PREFIX, zoo_folder

    options["load_options"] = {key: options.pop(key) for key in LOAD_OPTIONS}
    folders = {model: Path(out) for model in models}
    if len(models) > 1:
        folders = {model: Path(out) / folder_name(model) for model in models}
        if len(set(folders.values())) < len(models):
            raise InputError(f"two of {', '.join(models)} would be saved under one name: trace them apart")
    try:
        # What costs nothing is checked before any model is opened.
        for model, folder in folders.items():
            if model.startswith(PREFIX):
                zoo_folder(model)
            check_free(folder, force=options["force"] or options["resume"])
        results = [
            _traced(model, folder, figures=not no_figures, quiet=quiet, **options) for model, folder in folders.items()
        ]
        if len(models) == 1:
            click.echo(results[0].summary())
        else:
            from tracer.summary import side_by_side

            click.echo(side_by_side(results))
            if not no_figures:
                from tracer.plots import draw_families, write_figures

                write_figures({"families": lambda: draw_families(results)}, Path(out) / "figures", force=True)
                click.echo(f"\nside by side: {Path(out) / 'figures' / 'families.png'}")
    except KeyboardInterrupt:
        kept = any((folder / PARTIAL).exists() or (folder / "run.json").exists() for folder in folders.values())
        said = f"what is finished is kept, go on with: --out {out} --resume" if kept else "nothing is lost"
        click.echo(f"\ntracer: interrupted; {said}", err=True)
        sys.exit(130)
    click.echo(f"\nsaved in {out}" + ("" if no_figures else ", figures in its folder figures"))


def _traced(model: str, folder: Path, *, figures: bool, quiet: bool, **options: Any) -> Any:
    """Trace one model and draw its figures."""
    from tracer.tracing import trace as run_trace

    groups = options.pop("groups")
    result = run_trace(
        model,
        groups=names_of(groups),
        out=folder,
        progress=not quiet,
        **options,
    )
    last = folder / "figures" / "joint.svg"
    current = last.exists() and last.stat().st_mtime >= (folder / "run.json").stat().st_mtime
    if figures and not (options["resume"] and current):
        from tracer.plots import save_figures

        save_figures(result, folder / "figures", force=True)
    return result


def folder_name(model: str) -> str:
    """What the folder of a model is called: of a folder or file its own name, else the model's without slashes."""
    is_path = model.startswith((".", "/", "~")) or (not model.startswith("zoo/") and Path(model).exists())
    return Path(model).expanduser().resolve().name if is_path else model.replace("/", "-")


@click.command()
@click.argument("model")
@click.option("--probes", help="Shipped set or collection, JSONL or CSV file (default: english; zoo/held for the zoo).")
@click.option("--components", default="resid,mixer,mlp", show_default=True, help="Of resid, block, mixer and mlp.")
@click.option(
    "--direction", default="denoise", show_default=True, help="denoise (clean into corrupt) or noise (the reverse)."
)
@click.option(
    "--positions", default="all", show_default=True, help="all, last, together, or columns from the last token (-1,-2)."
)
@click.option("--position-map", help="Column of the patched run to column of the other one, e.g. -1:-1,-2:-3.")
@click.option("--metric", default="logit_diff", show_default=True, help="logit_diff, log_p or p of the target.")
@click.option("--min-gap", type=float, help="Least clean - corrupt of the metric (default: 1 nat, for p 0.1).")
@click.option("--groups", help="Only these groups, separated by commas.")
@click.option("--limit", type=int, help="Only the first N usable pairs of each group.")
@click.option("--target", default="single", show_default=True, help="Targets of several tokens: single or first.")
@click.option("--seed", default=0, show_default=True, help="Of the bootstrap.")
@click.option("--engine", help="onepass or full (default: what the self-check allows).")
@click.option("--batch-tokens", default=2048, show_default=True, help="Most tokens in one call of a block.")
@click.option("--out", required=True, help="Folder for the result and its figure.")
@click.option("--force", is_flag=True, help="Replace the result in --out.")
@click.option("--skip-bad", is_flag=True, help="Count probes that cannot be patched instead of refusing the set.")
@click.option("--no-figures", is_flag=True, help="Write the numbers only.")
@model_options
def patch(model: str, out: str, no_figures: bool, quiet: bool, groups: str | None, **options: Any) -> None:
    """Patch runs of MODEL on pairs of prompts: at which depth and position it holds the answer.

    Probes need a corrupt prompt with another answer (corrupt, corrupt_target), of equal length unless a position map
    says which token stands for which.

    \b
    Examples:
      tracer patch smollm2-135m-instruct-q4_1 --probes en-capitals --out runs/patch
      tracer patch ./my-model --probes my.jsonl --components resid --position-map=-1:-1 --out runs/last
      tracer patch gemma3-270m-q4_k_m --probes zh-capitals --direction noise --positions=-1,-2 --out runs/noise
    """
    from tracer.patch_results import FILES
    from tracer.patching import patch as run_patch
    from tracer.results import check_free

    folder, done = Path(out), False
    load_options = {key: options.pop(key) for key in LOAD_OPTIONS}
    try:
        # What costs nothing is checked before the model is opened.
        check_free(folder, force=options["force"], files=FILES)
        result = run_patch(
            model,
            groups=names_of(groups),
            out=out,
            progress=not quiet,
            load_options=load_options,
            **options,
        )
        done = True
        click.echo(result.summary())
        if not no_figures:
            from tracer.plots import write_figures

            write_figures({"patching": result.plot}, folder / "figures", force=True)
    except KeyboardInterrupt:
        click.echo(f"\ntracer: interrupted; {'the numbers are saved' if done else 'nothing was written'}", err=True)
        sys.exit(130)
    click.echo(f"\nsaved in {out}" + ("" if no_figures else ", the figure in its folder figures"))


@click.command("tuned-lens")
@click.argument("model")
@click.option("--text", required=True, help="UTF-8 text file, or a folder of .txt files.")
@click.option("--out", required=True, help="File for the lens (.safetensors).")
@click.option("--tokens", default=32768, show_default=True, help="Most tokens of the text that are read.")
@click.option("--seq-length", default=128, show_default=True, help="Most tokens of one sequence.")
@click.option("--steps", default=192, show_default=True, help="Gradient steps after the regression.")
@click.option("--batch", default=32, show_default=True, help="Positions of one gradient step.")
@click.option("--held-out", default=0.1, show_default=True, help="Share of the text that judges the lens.")
@click.option("--seed", default=0, show_default=True, help="Of the split, the batches and the bootstrap.")
@click.option("--force", is_flag=True, help="Replace the lens in --out.")
@model_options
def tuned_lens(model: str, text: str, out: str, force: bool, quiet: bool, **options: Any) -> None:
    """Train a tuned lens for MODEL on a text: affine translators that bring every depth near the model's output.

    The plain logit lens is unreliable in early layers of some models. The lens is saved with a hash of the tail that
    it belongs to, and refused on another model. Printed is the KL to the output on held-out text, before and after.

    \b
    Example:
      tracer tuned-lens smollm2-135m-instruct-q4_1 --text book.txt --out smollm2-lens.safetensors
      tracer trace smollm2-135m-instruct-q4_1 --readout tuned --tuned-lens smollm2-lens.safetensors --out runs/tuned
    """
    from tracer.models.traced import load
    from tracer.tuned_lens import check_lens_path, text_files, train_tuned_lens

    load_options = {key: options.pop(key) for key in LOAD_OPTIONS}
    try:
        # What costs nothing is checked before the model is opened.
        check_lens_path(out, force=force)
        text_files(text)
        opened = load(model, progress=not quiet, **load_options)
        lens = train_tuned_lens(opened, text, out=out, force=force, progress=not quiet, **options)
    except KeyboardInterrupt:
        click.echo("\ntracer: interrupted; nothing was written", err=True)
        sys.exit(130)
    click.echo(f"{lens.summary()}\n\nsaved in {out}")
