"""Commands about models: check, fetch, zoo."""

import sys
from pathlib import Path
from typing import Any

import click

from tracer.cli.options import model_options
from tracer.errors import ModelRefused


@click.command()
@click.argument("model")
@model_options
def check(model: str, quiet: bool, **options: Any) -> None:
    """Open MODEL, print its anatomy and prove that it can be traced exactly.

    MODEL is a name of the catalogue or the zoo, a folder, a GGUF file or a Hugging Face id. Exit 0: it can be traced;
    1: a check failed; 2: it cannot be opened.

    \b
    Example:
      tracer check smollm2-135m-instruct-q4_1
    """
    from tracer.models.traced import load

    try:
        click.echo(str(load(model, all_checks=True, progress=not quiet, **options)))
    except ModelRefused as refusal:
        click.echo(f"no: {refusal}")
        sys.exit(1)


@click.command()
@click.argument("name")
@click.option("--force", is_flag=True, help="Fetch again although the cache holds it.")
@click.option("--quiet", "-q", is_flag=True, help="No progress bars.")
def fetch(name: str, force: bool, quiet: bool) -> None:
    """Fetch the pinned model NAME of the catalogue into the cache and convert it once.

    \b
    Example:
      tracer fetch smollm2-135m-instruct-q4_1
    """
    from tracer.models.catalogue import fetch as fetch_model

    click.echo(str(fetch_model(name, progress=not quiet, force=force)))


@click.command()
@click.argument("name", required=False)
@click.option("--text", "folder", help="Write texts of the invented world into this folder, to continue training on.")
def zoo(name: str | None, folder: str | None) -> None:
    """List the small trained models that come with LayerTracer, or print the card of NAME.

    Each knows one invented world and nothing else, so that what it should answer is known exactly. They open offline.

    \b
    Examples:
      tracer zoo
      tracer zoo zoo/mamba2-8
      tracer trace zoo/mamba2-8 --out runs/mamba2
      tracer zoo --text text
    """
    from tracer.zoo.shelf import listing, read_card

    if folder is not None:
        from tracer.zoo.texts import write_texts

        for path, what in write_texts(Path(folder)).items():
            click.echo(f"{path}: {what}")
        return
    click.echo(listing() if name is None else str(read_card(name)))
