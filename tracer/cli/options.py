"""What commands share: errors as one line, the options of everything that opens a model, names in a list."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from tracer.errors import InputError, TracerError


class Refused(click.ClickException):
    """An error of ours as one line on stderr, with exit status 2."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        """Print it; called by click."""
        click.echo(f"tracer: {' '.join(self.message.split())}", err=True)


class Commands(click.Group):
    """Commands whose errors, when they are ours, are one line and not a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; called by click."""
        try:
            return super().invoke(ctx)
        except TracerError as error:
            raise Refused(str(error)) from error


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of everything that opens a model; they are `load`'s arguments."""
    options = (
        click.option("--dtype", help="float32, bfloat16 or float16 (default: as stored; the zoo in float32)."),
        click.option("--device", help="Where to put the model, e.g. cpu or cuda."),
        click.option("--device-map", help="As in transformers, e.g. auto."),
        click.option("--revision", help="Branch, tag or commit on the hub."),
        click.option("--trust-remote-code", is_flag=True, help="Run model code that comes with the checkpoint."),
        click.option(
            "--backend",
            default="auto",
            show_default=True,
            help="How to reach the streams: hooks (the model's own block calls), transformer_lens (a TransformerBridge "
            "booted around it), or auto (the bridge where TransformerLens lists the class and it is exact, or hooks).",
        ),
        click.option(
            "--blocks",
            callback=lambda _context, _option, value: value and [name.strip() for name in value.split(",")],
            help="Names of the block modules, separated by commas, where they are not found (hooks only).",
        ),
        click.option("--quiet", "-q", is_flag=True, help="No progress bars."),
    )
    for option in reversed(options):
        command = option(command)
    return command


LOAD_OPTIONS = ("dtype", "device", "device_map", "revision", "trust_remote_code", "backend", "blocks")
"""Those of them that are `load`'s arguments."""


def names_of(joined: str | None) -> list[str] | None:
    """Names separated by commas."""
    return None if joined is None else [name.strip() for name in joined.split(",") if name.strip()]


def overrides(settings: Sequence[str]) -> dict[str, Any]:
    """What `--set KEY=VALUE` says, each value as a recipe would hold it."""
    from tracer.recipes import yaml_value

    for setting in settings:
        if "=" not in setting:
            raise InputError(f"--set {setting!r}: pass KEY=VALUE")
    return {key: yaml_value(value) for key, value in (setting.split("=", 1) for setting in settings)}


def recipe_named(recipe: str | None, example: bool, package: str) -> str | None:
    """The recipe that a command was given; None where it was asked for an example, which is then printed.

    Args:
        recipe: as it was named.
        example: whether the commented recipe that comes along is wanted.
        package: the part of the package that it comes with.

    Raises:
        InputError: neither was named.
    """
    if example:
        path = Path(__file__).parents[1] / package / "example.yaml"
        click.echo(path.read_text(encoding="utf-8"), nl=False)
        return None
    if recipe is None:
        raise InputError("no recipe was named: pass a YAML file, or --example for one")
    return recipe
