"""The command line. Heavy modules are imported inside the commands, so that `tracer --help` answers at once."""

from collections.abc import Sequence

import click

from tracer.cli import evaluating, measuring, models, training, trials
from tracer.cli.options import Commands


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="layertracer", prog_name="tracer")
def cli() -> None:
    """Find where a language model executes tasks and where it is fragile, block by block.

    \b
    Start with a model that comes along:
      tracer zoo
      tracer trace zoo/gdn-attention-8 --out runs/gdn
    or a larger one:
      tracer fetch smollm2-135m-instruct-q4_1
      tracer trace smollm2-135m-instruct-q4_1 --probes en-capitals --out runs/capitals
    """


for command in (
    *(models.check, models.fetch, models.zoo),
    *(measuring.trace, measuring.patch, measuring.tuned_lens),
    *(evaluating.evaluate, evaluating.compare),
    *(training.plan, training.cpt, training.drift, trials.trial),
):
    cli.add_command(command)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; exits with 0 done, 1 the answer is no, 2 unusable input, 130 interrupted."""
    cli.main(args=None if args is None else list(args), prog_name="tracer")
