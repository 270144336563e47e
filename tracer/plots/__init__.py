"""Figures, drawn without pyplot and without touching anybody's settings."""

from collections.abc import Callable, Mapping
from functools import partial
from io import BytesIO
from os import PathLike
from pathlib import Path

from matplotlib.figure import Figure

from tracer.errors import InputError
from tracer.plots.evolution import draw_evolution
from tracer.plots.families import draw_families
from tracer.plots.fragility import draw_fragility
from tracer.plots.joint import draw_joint
from tracer.plots.lens import draw_lens
from tracer.plots.style import style
from tracer.results import TraceResult, write_folder

_DRAWERS: Mapping[str, Callable[[TraceResult], Figure]] = {
    "joint": draw_joint,
    "lens": draw_lens,
    "fragility": draw_fragility,
    "evolution": draw_evolution,
}

FIGURES = tuple(_DRAWERS)
"""Names of the figures."""

DPI = 200

KINDS = (".png", ".svg", ".pdf")
"""Kinds of pictures that a single figure is written as."""

__all__ = [
    "DPI",
    "FIGURES",
    "KINDS",
    "draw",
    "draw_families",
    "figure_file",
    "save_figures",
    "write_figure",
    "write_figures",
]


def draw(result: TraceResult, figure: str = "joint") -> Figure:
    """Draw one figure of a result.

    Args:
        result: of a trace.
        figure: `joint` (lens, particles and fragility on one axis of blocks), `lens` (every group), `fragility`
            (every ablation) or `evolution` (the residual stream over depth).

    Returns:
        A figure that no pyplot state knows of; `figure.savefig(...)` writes it, a notebook shows it.

    Raises:
        InputError: unknown name.
    """
    if figure not in _DRAWERS:
        raise InputError(f"no figure {figure!r}: pass one of {', '.join(FIGURES)}")
    with style():
        return _DRAWERS[figure](result)


def save_figures(result: TraceResult, folder: str | PathLike[str], *, force: bool = False) -> list[Path]:
    """Write every figure of a trace as PNG and SVG; see `write_figures`."""
    return write_figures({name: partial(draw, result, name) for name in FIGURES}, folder, force=force)


def write_figures(
    drawers: Mapping[str, Callable[[], Figure]], folder: str | PathLike[str], *, force: bool = False
) -> list[Path]:
    """Write figures as PNG and SVG; the same numbers give the same bytes.

    Text in the SVG files is drawn as paths, so that they look the same where the font is missing; the title and the
    caption are also in their metadata.

    Args:
        drawers: by name of the figure what draws it.
        folder: made where it does not exist.
        force: replace figures that are there.

    Returns:
        The files, `joint.png`, `joint.svg`, `lens.png` and so on.

    Raises:
        InputError: figures are there already, or the folder cannot be written; then nothing is left half-written.
    """
    target = Path(folder)
    there = [f"{name}.{kind}" for name in drawers for kind in ("png", "svg") if (target / f"{name}.{kind}").exists()]
    if there and not force:
        raise InputError(f"{str(target)!r} already holds {there[0]}: pass another folder, or force to replace it")
    contents: dict[str, bytes] = {}
    with style():
        for name, drawer in drawers.items():
            drawn = drawer()
            contents[f"{name}.png"] = _rendered(drawn, "png", {"Software": None})
            drawn.set_layout_engine("none")  # the layout is made; making it again would take most of the time
            words = " ".join(drawn.get_supxlabel().replace(r"\$", "$").split())
            title = {"Title": f"LayerTracer: {name}", "Description": words}
            contents[f"{name}.svg"] = _rendered(drawn, "svg", {"Date": None, "Creator": None, **title})
    write_folder(target, contents)
    return [target / name for name in contents]


def figure_file(path: str | PathLike[str], *, force: bool = False) -> Path:
    """A file that a figure may be written to.

    Raises:
        InputError: it is no kind of picture, it exists already, or its folder does not.
    """
    target = Path(path)
    if target.suffix.lower() not in KINDS:
        raise InputError(f"figure {str(target)!r}: pass a name that ends in {', '.join(KINDS)}")
    if target.exists() and not force:
        raise InputError(f"figure {str(target)!r} exists: pass another file, or force to replace it")
    if not target.parent.is_dir():
        raise InputError(f"figure {str(target)!r}: there is no folder {str(target.parent)!r}: pass one that exists")
    return target


def write_figure(figure: Figure, path: Path) -> None:
    """Write one figure to a file that `figure_file` allows.

    Raises:
        InputError: it cannot be written.
    """
    try:
        path.write_bytes(_rendered(figure, path.suffix.lower().removeprefix("."), {}))
    except OSError as error:
        raise InputError(f"figure {str(path)!r} cannot be written: {error.strerror or error}") from error


def _rendered(figure: Figure, kind: str, metadata: dict[str, str | None]) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format=kind, dpi=DPI, metadata=metadata)
    return buffer.getvalue()
