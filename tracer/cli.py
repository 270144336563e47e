"""The command line. Heavy modules are imported inside the commands, so that `tracer --help` answers at once."""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from tracer.errors import InputError, ModelRefused, TracerError


class _Refused(click.ClickException):
    """An error of ours as one line on stderr, with exit status 2."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        click.echo(f"tracer: {' '.join(self.message.split())}", err=True)


class _Commands(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except TracerError as error:
            raise _Refused(str(error)) from error


def _model_options(command: Callable[..., Any]) -> Callable[..., Any]:
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


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
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


@cli.command()
@click.argument("model")
@_model_options
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


@cli.command()
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


@cli.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option("--probes", help="Shipped set or collection, JSONL or CSV file (default: english; zoo/held for the zoo).")
@click.option("--groups", help="Only these groups, separated by commas.")
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
@_model_options
def trace(models: tuple[str, ...], out: str, no_figures: bool, quiet: bool, **options: Any) -> None:
    """Trace MODEL on probes: where it executes them (logit lens) and where it is fragile (ablations).

    Several models are traced one after the other, each into a folder of its own name, and then drawn side by side.

    \b
    Examples:
      tracer trace zoo/mamba2-8 --out runs/mamba2
      tracer trace zoo/transformer-8 zoo/mamba2-8 zoo/gdn-attention-8 --out runs/families
      tracer trace ./my-model --probes my.jsonl --ablations zero,mean --dtype bfloat16 --out runs/mine
      tracer trace gemma3-270m-q4_k_m --probes chinese --groups zh-capitals --out runs/zh
    """
    from tracer.results import PARTIAL, check_free
    from tracer.zoo.shelf import PREFIX, zoo_folder

    options["load_options"] = {key: options.pop(key) for key in _LOAD_OPTIONS}
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


def _names(joined: str | None) -> list[str] | None:
    """Names separated by commas."""
    return None if joined is None else [name.strip() for name in joined.split(",") if name.strip()]


def _traced(model: str, folder: Path, *, figures: bool, quiet: bool, **options: Any) -> Any:
    """Trace one model and draw its figures."""
    from tracer.tracing import trace as run_trace

    groups = options.pop("groups")
    result = run_trace(
        model,
        groups=_names(groups),
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


@cli.command()
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
@_model_options
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
    load_options = {key: options.pop(key) for key in _LOAD_OPTIONS}
    try:
        # What costs nothing is checked before the model is opened.
        check_free(folder, force=options["force"], files=FILES)
        result = run_patch(
            model,
            groups=_names(groups),
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


@cli.command("tuned-lens")
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
@_model_options
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

    load_options = {key: options.pop(key) for key in _LOAD_OPTIONS}
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


@cli.command("eval")
@click.argument("model")
@click.option(
    "--suite",
    help="Probe sets or files, ceval, cmmlu, separated by commas (default: english; for a model of the zoo zoo/train, "
    "zoo/held and zoo/new-template).",
)
@click.option("--target", default="single", show_default=True, help="Targets of several tokens: single or first.")
@click.option("--skip-bad", is_flag=True, help="Count unusable probes instead of refusing the set.")
@click.option("--limit", type=int, help="Only the first N usable probes of each group, or questions of each subject.")
@click.option("--every", default=1, show_default=True, help="For ceval and cmmlu: only every N-th question.")
@click.option("--data", help="For ceval and cmmlu: a folder with their CSV files (default: the hub).")
@click.option("--subjects", help="For ceval and cmmlu: only these, separated by commas.")
@click.option(
    "--shots", default=0, show_default=True, help="For ceval and cmmlu: solved examples before each question."
)
@click.option("--batch-size", default=8, show_default=True, help="For ceval and cmmlu: prompts of one forward.")
@click.option("--seed", default=0, show_default=True, help="Of the bootstrap.")
@click.option("--batch-tokens", default=2048, show_default=True, help="Most tokens in one forward of probes.")
@click.option("--out", help="Folder for the result and its figure (default: it is only printed).")
@click.option("--resume", is_flag=True, help="Go on with an interrupted evaluation in --out.")
@click.option("--force", is_flag=True, help="Replace the result in --out.")
@_model_options
def evaluate(model: str, suite: str | None, subjects: str | None, out: str | None, quiet: bool, **options: Any) -> None:
    """Ask MODEL probes: how often the target is the most likely token, and how likely it is.

    The suites ceval and cmmlu are the benchmarks C-Eval (val) and CMMLU (test), asked through lm-evaluation-harness in
    both answer forms.

    \b
    Examples:
      tracer eval zoo/mamba2-8
      tracer eval smollm2-135m-instruct-q4_1 --suite en-capitals,mine.jsonl --out runs/eval
      tracer eval Qwen/Qwen3-0.6B --suite ceval,cmmlu --shots 5 --out runs/qwen
      tracer eval ./continued --suite ceval --data benchmarks --subjects law,logic --out runs/law
    """
    from tracer.evaluation.evaluating import evaluate as run_evaluation

    load_options = {key: options.pop(key) for key in _LOAD_OPTIONS}
    names = _names(subjects)
    try:
        result = run_evaluation(
            model, suite, subjects=names, out=out, progress=not quiet, load_options=load_options, **options
        )
        click.echo(result.summary())
        if out is not None:
            from tracer.plots import write_figures

            write_figures({"accuracy": result.plot}, Path(out) / "figures", force=True)
            click.echo(f"\nsaved in {out}, the figure in its folder figures")
    except KeyboardInterrupt:
        kept = out is not None and (Path(out) / "partial").is_dir()
        said = f"; what is answered is kept, go on with: --out {out} --resume" if kept else ""
        click.echo(f"\ntracer: interrupted{said}", err=True)
        sys.exit(130)


@cli.command()
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


@cli.command()
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


@cli.command()
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


@cli.command()
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
    if example:
        click.echo(Path(__file__).with_name("training").joinpath("example.yaml").read_text(encoding="utf-8"), nl=False)
        return
    if recipe is None:
        raise InputError("no recipe was named: pass a YAML file, or --example for one")
    from accelerate import PartialState

    from tracer.training.continuing import check_training
    from tracer.training.continuing import cpt as continue_training
    from tracer.training.output import BEGUN
    from tracer.training.recipe import read_recipe, yaml_value

    bare = [setting for setting in settings if "=" not in setting]
    if bare:
        raise InputError(f"--set {bare[0]!r}: pass KEY=VALUE")
    pairs = (setting.split("=", 1) for setting in settings)
    read = read_recipe(recipe, {key: yaml_value(value) for key, value in pairs})
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


@cli.command()
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
@_model_options
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

    options["load_options"] = {key: options.pop(key) for key in _LOAD_OPTIONS}
    if options["load_options"]["backend"] == "auto":
        options["load_options"]["backend"] = "hooks"  # two bridges would cost twice the time to boot
    try:
        result = compare(base, continued, groups=_names(groups), out=out, progress=not quiet, **options)
    except KeyboardInterrupt:
        click.echo("\ntracer: interrupted", err=True)
        sys.exit(130)
    click.echo(result.summary())
    if out is not None:
        from tracer.plots import write_figures

        write_figures({"drift": result.plot}, Path(out) / "figures", force=True)
        click.echo(f"\nsaved in {out}, the figure in its folder figures")


_LOAD_OPTIONS = ("dtype", "device", "device_map", "revision", "trust_remote_code", "backend", "blocks")


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; exits with 0 done, 1 the answer is no, 2 unusable input, 130 interrupted."""
    cli.main(args=None if args is None else list(args), prog_name="tracer")
