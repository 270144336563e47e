"""The command trial: freeze plans compared over rates and seeds."""

import re
import sys

import click

from tracer.cli.options import overrides, recipe_named
from tracer.errors import InputError


def _part(_context: click.Context, _option: click.Parameter, value: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", value)
    if found is None:
        raise InputError(f"--part {value!r}: pass K/N, e.g. 1/4")
    return int(found[1]), int(found[2])


@click.command()
@click.argument("recipe", required=False)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Replace a top-level key of the recipe.")
@click.option("--dry-run", is_flag=True, help="Check everything and print arms, prices and runs; train nothing.")
@click.option("--resume", is_flag=True, help="Go on with the trial in output_dir; finished trainings are kept.")
@click.option("--force", is_flag=True, help="Replace the trial in output_dir.")
@click.option("--jobs", default=1, show_default=True, help="Processes at once, each with one thread on a CPU.")
@click.option("--part", default="1/1", callback=_part, help="K/N: only the K-th of N parts, for several machines.")
@click.option("--report", is_flag=True, help="Only print, tabulate and draw what is finished.")
@click.option("--no-figures", is_flag=True, help="Write the numbers only.")
@click.option("--example", is_flag=True, help="Print a commented recipe that runs as it is.")
@click.option("--quiet", "-q", is_flag=True, help="No progress bars and no lines on the way.")
def trial(
    recipe: str | None,
    settings: tuple[str, ...],
    dry_run: bool,
    resume: bool,
    force: bool,
    jobs: int,
    part: tuple[int, int],
    report: bool,
    no_figures: bool,
    example: bool,
    quiet: bool,
) -> None:
    """Compare freeze plans as RECIPE (a YAML file) says: what each learns, keeps and costs.

    Every arm (a plan) is trained at every learning rate with every seed. Arms are compared where they have learned
    equally much, with differences paired over seeds, and hypotheses get a verdict.

    \b
    Examples:
      tracer trial --example > trial.yaml && tracer zoo --text text
      tracer trial trial.yaml --dry-run
      tracer trial trial.yaml --jobs 2
      tracer trial trial.yaml --resume --set seeds=8
      tracer trial trial.yaml --report
    """
    named = recipe_named(recipe, example, "trials")
    if named is None:
        return
    from tracer.trials import TrialResult
    from tracer.trials import trial as run_trial
    from tracer.trials.recipe import read_trial
    from tracer.trials.running import check_trial

    read = read_trial(named, overrides(settings))
    try:
        if dry_run:
            ready = check_trial(read, resume=resume, force=force, jobs=jobs, part=part, progress=not quiet)
            click.echo(ready.summary())
            return
        if report:
            result = TrialResult.load(read.folder)
        else:
            result = run_trial(read, resume=resume, force=force, jobs=jobs, part=part, progress=not quiet)
    except KeyboardInterrupt:
        click.echo("\ntracer: interrupted; finished trainings are kept, go on with --resume", err=True)
        sys.exit(130)
    click.echo(result.summary())
    tables = result.write_tables(read.folder / "tables")
    said = f"tables lie in {tables[0].parent}"
    if not no_figures:
        from tracer.plots import write_figures
        from tracer.plots.trial import FIGURES

        drawings = {name: lambda name=name: result.plot(name) for name in FIGURES}
        write_figures(drawings, read.folder / "figures", force=True)
        said += f", figures in {read.folder / 'figures'}"
    click.echo(f"\n{said}")
