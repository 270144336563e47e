"""What all figures share: the style, the words beneath, and the axis of blocks."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import PurePath
from typing import Any

import matplotlib
import matplotlib.style
import numpy as np
from jaxtyping import Bool, Float
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, fontManager
from matplotlib.textpath import text_to_path
from matplotlib.ticker import MaxNLocator

from tracer.results import TraceResult

# Okabe and Ito's palette, told apart with every kind of colour vision; shades of grey differ as well as they can, and
# every use of a colour goes with a marker, a line style or a hatch of its own.
BLACK, ORANGE, SKY, GREEN, BLUE, VERMILLION, PURPLE = (
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
)
GREY = "#767676"
SMALL = 8.0

# Tried in this order for characters that the main font lacks; only those that are installed.
_WIDE_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans SC",
    "Source Han Sans SC",
    "PingFang SC",
    "Hiragino Sans GB",
    "Microsoft YaHei",
    "SimHei",
    "WenQuanYi Zen Hei",
    "WenQuanYi Micro Hei",
    "Arial Unicode MS",
)

PLAIN_LENS = "plain/"
"""Before the names of a result's arrays of the plain logit lens, where its own lens is a tuned one."""

PLAIN_CURVE: dict[str, Any] = {"color": VERMILLION, "linestyle": (0, (4, 1.5)), "linewidth": 1.2}

BLOCK_LABEL = "block b (depth d stands at d − 1/2: a rise over b is the work of block b)"
READING = "Depth d, the output of block d − 1, stands at d − 1/2, so that a rise over a block is its work"


def style() -> AbstractContextManager[None]:
    """Context with the figures' settings in place of the caller's, which come back afterwards."""
    installed = set(fontManager.get_font_names())
    settings: dict[str, Any] = {
        "font.family": ["DejaVu Sans", *(font for font in _WIDE_FONTS if font in installed)],
        "font.size": SMALL,
        "axes.titlesize": 9,
        "axes.labelsize": SMALL,
        "xtick.labelsize": SMALL,
        "ytick.labelsize": SMALL,
        "legend.fontsize": SMALL,
        "legend.frameon": False,
        "legend.handlelength": 2.4,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.8,
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "grid.color": "#DDDDDD",
        "grid.linewidth": 0.6,
        "lines.linewidth": 1.4,
        "hatch.linewidth": 0.6,
        "svg.fonttype": "path",
        "svg.hashsalt": "layertracer",
    }
    return matplotlib.style.context(settings, after_reset=True)


def plain(text: str, most: int = 60) -> str:
    """Somebody's text as it is: no mathematics between dollar signs, one line, at most `most` characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    if len(line) > most:
        line = line[: most - 1] + "…"
    return line.replace("$", r"\$")


def model_name(run: Mapping[str, Any]) -> str:
    """The model's name in a result; of a path only its last part: the rest says where it lay and not what it is."""
    name = str(run["model"]["name"])
    path = PurePath(name)
    is_path = run["model"]["kind"] in ("folder", "gguf") or path.is_absolute()
    return plain(path.name or name if is_path else name)


def add_caption(figure: Figure, result: TraceResult, about: str, *more: str) -> None:
    """Write beneath the figure what it shows and everything that its numbers depend on."""
    run, arguments = result.run, result.run["arguments"]
    groups = [plain(group["group"], 24) for group in run["groups"]]
    settings = f" (min_rise {arguments['min_rise']:g}, rel_rise {arguments['rel_rise']:g})"
    ablations = "no ablation"
    if result.ablations:
        kinds = "ablations" if len(result.ablations) > 1 else "ablation"
        ablations = f"{kinds} {', '.join(result.ablations)} (positions: {arguments['positions']})"
    sentences = [
        about,
        f"{model_name(run)}, {run['model']['dtype']}",
        f"n = {len(result.probes)} probes, {int(result.probes['answered'].sum())} answered, in "
        f"{len(groups)} {'group' if len(groups) == 1 else 'groups'}: {', '.join(groups)}",
        f"Particle rule {arguments['rule']}{settings if arguments['rule'] == 'first_rise' else ''}, "
        f"{run['readout']} lens; {ablations}; engine {run['engine']}",
        *more,
    ]
    write_caption(figure, sentences)


def write_caption(figure: Figure, sentences: Sequence[str]) -> None:
    """Write sentences beneath the figure, in lines as wide as it is."""
    text = re.sub(r"(\w) ([=−]) (\w)", "\\1\N{NO-BREAK SPACE}\\2\N{NO-BREAK SPACE}\\3", ". ".join(sentences) + ".")
    text = _wrapped(text, 0.94 * 72 * figure.get_figwidth())
    figure.supxlabel(text, x=0.01, ha="left", fontsize=SMALL, linespacing=1.3)


def text_width(text: str, size: float = SMALL, weight: str = "normal") -> float:
    """Width in points of one line in the figures' font."""
    font = FontProperties(family=matplotlib.rcParams["font.family"], size=size, weight=weight)
    width: float = text_to_path.get_text_width_height_descent(text, font, ismath=False)[0]
    return width


def _wrapped(text: str, points: float) -> str:
    """Lines of at most this width; counting characters would not do, since they differ too much in width."""
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}".lstrip()
        if text_width(longer) <= points:
            lines[-1] = longer
        else:
            lines.append(word)
    return "\n".join(lines)


def add_legend(figure: Figure, handles: Sequence[Artist]) -> None:
    """One legend above all panels, where no data are."""
    columns = max(1, int(figure.get_figwidth() / 2.6))
    figure.legend(handles=list(handles), loc="outside upper left", ncols=columns, columnspacing=1.4)


def set_block_axis(axes: Axes, n_blocks: int) -> None:
    """Block b stands at x = b and takes x = b - 1/2 to b + 1/2; depth d stands at x = d - 1/2."""
    margin = 0.5 + max(0.3, 0.015 * n_blocks)
    axes.set_xlim(-margin, n_blocks - 1 + margin)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, min_n_ticks=1))


def probability_axis(axes: Axes) -> None:
    """From 0 to the largest probability drawn; nearly nothing stays nearly nothing."""
    axes.set_ylim(0, max(0.05, axes.get_ylim()[1]))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10], min_n_ticks=2))


def share_axis(axes: Axes, largest: float) -> None:
    """From 0 to a round share above the largest one drawn."""
    top = next(limit for limit in (0.05, 0.1, 0.2, 0.5, 1.0) if largest <= limit + 1e-9)
    axes.set_ylim(0, 1.04 * top)
    axes.set_yticks([0, top / 2, top], ["0", f"{top / 2:g}", f"{top:g}"])


def depth_positions(n_depths: int) -> Float[np.ndarray, "depths"]:
    """`[depths]` where the depths 0..L stand on the axis of blocks."""
    return np.arange(n_depths) - 0.5


def say(axes: Axes, text: str, width: int = 60) -> None:
    """Write in an empty panel why it is empty."""
    axes.grid(False)
    axes.text(
        0.5,
        0.5,
        textwrap.fill(text, width),
        transform=axes.transAxes,
        ha="center",
        va="center",
        color="#404040",
        fontsize=SMALL,
    )


def mean_probability(
    result: TraceResult, chosen: Bool[np.ndarray, "probes"], lens: str = ""
) -> Float[np.ndarray, "depths"]:
    """`[depths]` mean probability of the target over the chosen probes, of which there is at least one.

    `lens` is `PLAIN_LENS` for what the plain logit lens reads where the result's own lens is a tuned one.
    """
    return np.exp(result.arrays[f"{lens}log_p"][:, chosen]).mean(axis=1)


def in_group(result: TraceResult, group: str) -> Bool[np.ndarray, "probes"]:
    """`[probes]` which probes belong to a group."""
    return (result.probes["group"] == group).to_numpy(dtype=bool)


def answered(result: TraceResult) -> Bool[np.ndarray, "probes"]:
    """`[probes]` which probes the model answers."""
    return result.probes["answered"].to_numpy(dtype=bool)
