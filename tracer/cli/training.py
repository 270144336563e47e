"""Commands around a continued pre-training: plan, cpt, drift."""

import sys
import time
from pathlib import Path
from typing import Any

import click

from tracer.cli.options import LOAD_OPTIONS, model_options, names_of, overrides, recipe_named
from tracer.errors import InputError


@click.command()
@click.argument("run")
@click.option(
    "--rule",
    default="particle",
    show_default=True,
    help="particle, fragile:K, robust:K, update-stable:K, shallow:K, deep:K, middle:K, random:K:SEED, full, or the "
    "blocks to train as 0-3,7.",
)
@click.option("--ablation", help="For fragile and robust, which one of the trace counts (default: its first one).")
@click.option("--embeddings", default="train", show_default=True, help="train or freeze what runs before the blocks.")
@click.option("--norm", default="train", show_default=True, help="train or freeze the final norm.")
@click.option("--head", default="train", show_default=True, help="train or freeze the unembedding.")
@click.option("--allow-degenerate", is_flag=True, help="Accept a plan that freezes nearly nothing or everything.")
@click.option("--out", help="File for the plan, .json (default: it is only printed).")
@click.option("--figure", help="File for a figure of the plan, e.g. plan.png.")
@click.option("--export", type=click.Choice(["axolotl", "peft"]), help="Print the plan in the words of another tool.")
@click.option("--price", "priced", is_flag=True, help="Also print what a step costs, beside training everything.")
@click.option("--model", help="For --price: the model, where it does not lie where the trace found it.")
@click.option("--block-size", default=512, show_default=True, help="For --price: tokens of a sequence.")
@click.option("--batch", default=1, show_default=True, help="For --price: sequences of a step.")
@click.option("--dtype", help="For --price: what is trained in (default: that of the trace).")
@click.option("--force", is_flag=True, help="Replace the files in --out and --figure.")
def plan(
    run: str,
    figure: str | None,
    export: str | None,
    priced: bool,
    model: str | None,
    block_size: int,
    batch: int,
    dtype: str | None,
    **options: Any,
) -> None:
    """Turn the trace in RUN into a freeze plan: which blocks are trained, and which stay as they are.

    fragile, shallow, deep, middle and random name the blocks that are trained; robust and update-stable those that
    are frozen; particle freezes the median task particle's block and everything after it.

    \b
    Examples:
      tracer plan runs/gdn --out plan.json
      tracer plan runs/gdn --rule fragile:3 --embeddings freeze --out plan.json
      tracer plan runs/gdn --rule shallow:4 --export axolotl
      tracer plan runs/gdn --rule deep:4 --embeddings freeze --head freeze --price --block-size 1024
    """
    import yaml

    from tracer.freezing.plan import plan as make_plan

    if export is not None and priced:
        raise InputError("--export prints a file for another tool, --price a table: pass one of them at a time")
    picture = None
    if figure is not None:
        from tracer.plots import figure_file, write_figure

        picture = figure_file(figure, force=options["force"])
    made = make_plan(run, **options)
    if export is None:
        click.echo(made.summary())
    else:
        fields = {"unfrozen_parameters": made.axolotl()} if export == "axolotl" else made.peft()
        click.echo(yaml.safe_dump(fields, sort_keys=False).rstrip())
    if picture is not None:
        write_figure(made.plot(), picture)
    if priced:
        from tracer.freezing.cost import price
        from tracer.models.loading import open_model

        opened = open_model(model or made.model["name"], dtype=dtype or made.model["dtype"], progress=False)
        click.echo(f"\n{price(made, opened.model, block_size=block_size, batch=batch).summary()}")


@click.command()
@click.argument("recipe", required=False)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Replace a top-level key of the recipe.")
@click.option("--dry-run", is_flag=True, help="Check everything and print plan, price and texts; train nothing.")
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint in output_dir.")
@click.option("--force", is_flag=True, help="Replace what an earlier training left in output_dir.")
@click.option("--no-figures", is_flag=True, help="Write the numbers only.")
@click.option("--example", is_flag=True, help="Print a commented recipe that runs as it is.")
@click.option("--quiet", "-q", is_flag=True, help="No progress bars and no lines on the way.")
def cpt(
    recipe: str | None,
    settings: tuple[str, ...],
    dry_run: bool,
    resume: bool,
    force: bool,
    no_figures: bool,
    example: bool,
    quiet: bool,
) -> None:
    """Continue the pre-training of a model under a freeze plan, as RECIPE (a YAML file) says.

    The recipe names the model, the plan (a file of tracer plan, or a rule), texts, and any of transformers'
    TrainingArguments under its own name. The result is a model folder with a card, the curve and the figure.

    \b
    Examples:
      tracer cpt --example > recipe.yaml && tracer zoo --text text
      tracer cpt recipe.yaml --dry-run
      tracer cpt recipe.yaml
      tracer cpt recipe.yaml --set learning_rate=3e-4 --set output_dir=runs/slower
      tracer cpt recipe.yaml --resume
      torchrun --nproc-per-node 2 -m tracer cpt recipe.yaml
    """
    named = recipe_named(recipe, example, "training")
    if named is None:
        return
    from accelerate import PartialState

    from tracer.training.continuing import check_training
    from tracer.training.continuing import cpt as continue_training
    from tracer.training.output import BEGUN
    from tracer.training.recipe import read_recipe

    read = read_recipe(named, overrides(settings))
    began = time.time()
    try:
        if dry_run:
            ready, checkpoint = check_training(read, resume=resume, force=force, progress=not quiet)
            if PartialState().is_main_process:
                start = "" if checkpoint is None else f"\n\nit would go on from {checkpoint}"
                click.echo(f"{ready.summary()}{start}")
            return
        result = continue_training(read, resume=resume, force=force, progress=not quiet)
    except KeyboardInterrupt:
        mark = read.output_dir / BEGUN  # of this training, unless it is an earlier one that is not replaced yet
        begun = not dry_run and mark.is_file() and (resume or mark.stat().st_mtime >= began)
        then = "go on from the last checkpoint with --resume" if begun else "nothing was written"
        if PartialState().is_main_process:
            click.echo(f"\ntracer: interrupted; {then}", err=True)
        sys.exit(130)
    if not PartialState().is_main_process:
        return
    click.echo(result.summary())
    if not no_figures:
        from tracer.plots import write_figures

        write_figures({"training": result.plot}, result.folder / "figures", force=True)
    click.echo(f"\nthe model lies in {result.folder}, its card is README.md")


@click.command()
@click.argument("base")
@click.argument("continued")
@click.option("--probes", help="Shipped set or collection, JSONL or CSV file (default: english; zoo/held for the zoo).")
@click.option("--groups", help="Only these groups, separated by commas.")
@click.option("--limit", type=int, help="Only the first N usable probes of each group.")
@click.option("--seed", default=0, show_default=True, help="Of permutations and bootstrap.")
@click.option("--engine", help="onepass or full (default: what the self-check allows).")
@click.option("--batch-tokens", default=2048, show_default=True, help="Most tokens in one call of a block.")
@click.option("--out", help="Folder for the result and its figure (default: it is only printed).")
@click.option("--force", is_flag=True, help="Replace the result in --out.")
@click.option("--skip-bad", is_flag=True, help="Count unusable probes instead of refusing the set.")
@model_options
def drift(base: str, continued: str, out: str | None, groups: str | None, quiet: bool, **options: Any) -> None:
    """Compare two checkpoints of one architecture: how far CONTINUED has moved from BASE, depth by depth.

    Streams and outputs on the same probes, task particles before and after, how far the weights of each block moved,
    and what each block's new weights do to the output of BASE on their own.

    \b
    Examples:
      tracer drift zoo/transformer-8 runs/cpt --probes zoo/held --out runs/drift
      tracer drift HuggingFaceTB/SmolLM2-135M ./continued --limit 20
    """
    from tracer.drifting import drift as compare

    options["load_options"] = {key: options.pop(key) for key in LOAD_OPTIONS}
    if options["load_options"]["backend"] == "auto":
        options["load_options"]["backend"] = "hooks"  # two bridges would cost twice the time to boot
    try:
        result = compare(base, continued, groups=names_of(groups), out=out, progress=not quiet, **options)
    except KeyboardInterrupt:
        click.echo("\ntracer: interrupted", err=True)
        sys.exit(130)
    click.echo(result.summary())
    if out is not None:
        from tracer.plots import write_figures

        write_figures({"drift": result.plot}, Path(out) / "figures", force=True)
        click.echo(f"\nsaved in {out}, the figure in its folder figures")
