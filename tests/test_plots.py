import math
import re
import xml.etree.ElementTree as ET
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.image
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from tracer.errors import InputError
from tracer.plots import FIGURES, draw, draw_families, save_figures
from tracer.plots.lens import draw_lens
from tracer.results import TraceResult

MISSING = {"estimate": None, "low": None, "high": None}


def made(
    n_blocks: int = 4,
    groups: dict[str, tuple[int, int]] | None = None,
    kinds: tuple[str, ...] = ("zero", "mean"),
    *,
    name: str = "org/tiny-model",
    mixers: tuple[str, ...] = ("attention",),
    cka: bool = True,
    intervals: bool = True,
    size: float = 0.3,
    both: bool = False,
    seed: int = 0,
) -> TraceResult:
    """A result by hand; `groups` maps a name to (probes, answered), `size` is the divergence of block 1.

    With `both`, the lens is a tuned one with the plain one beside it, and recovery was measured.
    """
    rng = np.random.default_rng(seed)
    groups = {"capitals": (12, 9), "antonyms": (10, 3), "plurals": (8, 0)} if groups is None else groups
    names = [group for group, (n, _) in groups.items() for _ in range(n)]
    answered = np.array([i < a for n, a in groups.values() for i in range(n)], dtype=bool)
    n, depths = len(names), n_blocks + 1

    particles = rng.integers(n_blocks // 2, n_blocks, n)
    level = np.where(answered, rng.uniform(0.4, 0.9, n), rng.uniform(0, 0.1, n))
    steps = 1 / (1 + np.exp(-4 * (np.arange(depths)[:, None] - particles - 0.5)))
    arrays: dict[str, np.ndarray] = {"log_p": np.log(1e-6 + level * steps)}
    arrays["norm"] = np.exp(np.linspace(1, 5, depths)[:, None] + rng.normal(0, 0.1, (depths, n)))
    arrays["angle"] = rng.uniform(0, 0.3, (depths, n))
    arrays["entropy"] = rng.uniform(0, 5, (depths, n))
    arrays["kl_to_final"] = np.linspace(12, 0, depths)[:, None] * rng.uniform(0.5, 1.5, n)
    arrays["rank"] = 1 + (1000 * (1 - steps) * rng.uniform(0.5, 1.5, n)).astype(int)
    if cka:
        distance = np.abs(np.subtract.outer(np.arange(depths), np.arange(depths)))
        arrays["cka"] = np.exp(-3 * distance / depths) - 0.05 * (distance > 0.8 * depths)
    for group in groups:
        arrays[f"null_low/{group}"] = np.zeros(depths)
        arrays[f"null_high/{group}"] = np.linspace(0, 0.12, depths)

    blocks = pd.DataFrame({"block": np.arange(n_blocks), "mixer": [mixers[b % len(mixers)] for b in range(n_blocks)]})
    fragility = []
    for kind in kinds:
        jsd = np.minimum(0.68, size * rng.gamma(2, 0.5, n_blocks))
        jsd[0] = 0.62
        blocks[f"jsd_{kind}"] = jsd
        blocks[f"jsd_low_{kind}"] = jsd * rng.uniform(0.5, 0.9, n_blocks) if intervals else math.nan
        blocks[f"jsd_high_{kind}"] = np.minimum(0.69, jsd * rng.uniform(1.1, 1.5, n_blocks)) if intervals else math.nan
        blocks[f"kept_{kind}"] = 1 - jsd / 0.69 if answered.any() else math.nan
        entry = {"ablation": kind, "n": n, "n_answered": int(answered.sum()), "ceiling": 0.64 if n else None}
        entry |= {"fragile": [0], "fragile_without_first": [0] if n_blocks == 1 else [1, n_blocks - 1]}
        fragility.append(entry | {"flat": False, "intervals": "percentile bootstrap over items"})

    found = []
    for group, (size_of, right) in groups.items():
        mine = particles[answered & (np.array(names) == group)]
        good = right >= 6
        block = MISSING
        if good:
            middle = float(np.median(mine))
            spread = {"low": max(0.0, middle - 1), "high": min(n_blocks - 1.0, middle + 1)}
            block = {"estimate": middle} | (spread if intervals else {"low": None, "high": None})
        why = None if good else f"{right} of {size_of} probes answered, 6 needed"
        found.append({"group": group, "n": size_of, "answered": right, "block": block, "why_not": why})
    medians = [group["block"]["estimate"] for group in found if group["why_not"] is None]
    run: dict[str, Any] = {
        "arguments": {
            "probes": "mine",
            "ablations": list(kinds),
            "positions": "all",
            "rule": "first_rise",
            "min_rise": 0.05,
            "rel_rise": 0.25,
        },
        "model": {"name": name, "kind": "hub", "dtype": "bfloat16"},
        "engine": "onepass",
        "readout": "tuned" if both else "logit",
        "plain": None,
        "recovery": None,
        "groups": found,
        "particle_block": {"estimate": float(np.median(medians)) if medians else None, "low": None, "high": None},
        "fragility": fragility,
    }
    if both:
        arrays["plain/log_p"] = arrays["log_p"] - 1
        run["plain"] = {"groups": found, "particle_block": run["particle_block"]}
        run["recovery"] = {"n": n - 3, "undefined": {"no usable corrupt prompt": 1, "the prompts agree": 2}}
        recovery = rng.uniform(0, 1, n_blocks)
        recovery[-1] = math.nan
        ends = {"recovery": recovery, "recovery_low": recovery - 0.1, "recovery_high": recovery + 0.1}
        blocks = blocks.assign(**ends)
    probes = pd.DataFrame({"group": names, "answered": answered, "particle": particles}).astype({"particle": "Int64"})
    return TraceResult(run, probes, blocks, arrays)


@cache
def usual(figure: str) -> Figure:
    """A figure of `made()`, drawn once for all tests that only look at it."""
    return draw(made(), figure)


def lines(figure: Figure) -> list[np.ndarray]:
    """`[2, points]` of every line that is drawn."""
    return [np.array(line.get_data(), dtype=float) for axes in figure.axes for line in axes.get_lines()]


def holds(curves: list[np.ndarray], x: np.ndarray, y: np.ndarray) -> bool:
    return any(c.shape == (2, len(x)) and np.allclose(c, [x, y], rtol=1e-12, atol=0) for c in curves)


def bars(axes: Any) -> dict[float, float]:
    return {round(bar.get_x() + bar.get_width() / 2, 6): bar.get_height() for c in axes.containers for bar in c}


def whiskers(axes: Any) -> np.ndarray:
    """`[whiskers, 3]` x, low, high."""
    segments = [s for c in axes.collections if hasattr(c, "get_segments") for s in c.get_segments()]
    return np.array([[s[0, 0], s[0, 1], s[1, 1]] for s in segments])


def visible_texts(figure: Figure) -> list[Text]:
    """Every text that is drawn; ticks outside the limits and their labels are not."""
    everything = figure.findobj(Text)
    ticks = [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]
    labels = {label for axis in ticks for label in axis.findobj(Text) if label is not axis.label}
    inside = {
        label
        for axis in ticks
        for tick in axis._update_ticks()
        for label, on in ((tick.label1, tick.label1.get_visible()), (tick.label2, tick.label2.get_visible()))
        if on
    }
    return [t for t in everything if t.get_visible() and t.get_text() and (t not in labels or t in inside)]


def words(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in visible_texts(figure))


SHAPES = {
    "one block": (lambda: made(1, {"one": (12, 9)}, ("zero",)), FIGURES),
    "96 blocks": (
        lambda: made(96, {"a": (9, 9)}, mixers=("gated_deltanet", "attention"), size=0.004),
        ("joint", "fragility", "evolution"),
    ),
    "12 groups": (lambda: made(18, {f"a group with a long name {i}": (100, 100) for i in range(12)}), ("lens",)),
    "wide names": (
        lambda: made(4, {f"{'W' * 30} {i}": (30, 20) for i in range(12)}, name="W" * 60),
        ("lens", "evolution"),
    ),
    "nothing measured": (lambda: made(3, {"one": (12, 0)}, (), cka=False, intervals=False), FIGURES),
    "no intervals": (lambda: made(3, {"one": (12, 9)}, intervals=False), ("lens", "fragility")),
    "both lenses": (lambda: made(7, mixers=("mamba", "attention"), both=True), ("joint", "lens")),
    "five ablations": (
        lambda: made(6, None, ("zero", "mean", "resample", "noise", "zero_stream"), mixers=("mamba", "attention")),
        ("joint", "fragility"),
    ),
}


@pytest.mark.parametrize(("shape", "figure"), [(shape, figure) for shape in SHAPES for figure in SHAPES[shape][1]])
def test_every_figure_of_every_shape_fits(shape, figure):
    check_fit(draw(SHAPES[shape][0](), figure))


@pytest.mark.parametrize("figure", FIGURES)
def test_the_usual_figures_fit(figure):
    check_fit(usual(figure))


SIDE_BY_SIDE = {
    "one": lambda: [made()],
    "no ablation": lambda: [made(kinds=()), made(5, kinds=())],
    "many": lambda: [made(blocks, name=f"org/model-{blocks}", seed=blocks) for blocks in (1, 4, 8, 12, 30, 96)],
    "nothing measured": lambda: [made(3, {"one": (12, 0)}, ("zero",), intervals=False), made(4)],
    "wide names": lambda: [made(4, name="W" * 60), made(6, name="$a_b$")],
}


@pytest.mark.parametrize("shape", SIDE_BY_SIDE)
def test_models_side_by_side_fit(shape):
    check_fit(draw_families(SIDE_BY_SIDE[shape]()))


def test_models_side_by_side_show_the_results_numbers_over_relative_depth():
    results = [made(4), made(8, seed=1)]
    panels = np.array(draw_families(results, "mean").axes).reshape(2, 2)
    for result, (particles, fragility) in zip(results, panels, strict=True):
        n = len(result.blocks)
        x = [round((block + 0.5) / n, 6) for block in range(n)]
        assert list(bars(fragility)) == x
        assert list(bars(fragility).values()) == result.blocks["jsd_mean"].tolist()
        counted = result.probes["answered"].to_numpy()
        found = result.probes["particle"][counted].value_counts()
        assert list(bars(particles).values()) == [found.get(block, 0) / counted.sum() for block in range(n)]
        median = result.run["particle_block"]["estimate"]
        assert particles.get_lines()[0].get_xdata()[0] == pytest.approx((median + 0.5) / n)


def test_models_side_by_side_draw_an_ablation_that_all_have():
    with pytest.raises(InputError, match="pass at least one"):
        draw_families([])
    with pytest.raises(InputError, match="'mean' is not in all traces: pass one of zero"):
        draw_families([made(kinds=("zero", "mean")), made(kinds=("zero",))], "mean")
    assert len(draw_families([made(kinds=("mean",)), made(kinds=("zero",))]).axes) == 2, "particles alone"


def check_fit(drawn: Figure) -> None:
    drawn.draw_without_rendering()
    page = drawn.bbox.padded(1)
    panels = [axes.get_window_extent() for axes in drawn.axes]
    for text in visible_texts(drawn):
        assert text.get_fontsize() >= 8
        box = text.get_window_extent()
        assert page.containsx(box.x0), text
        assert page.containsx(box.x1), text
        assert page.containsy(box.y0), text
        assert page.containsy(box.y1), text
    for legend in drawn.legends:
        assert legend.get_window_extent().y0 >= max(panel.y1 for panel in panels)
    caption = next(text for text in drawn.texts if "probes" in text.get_text())
    assert caption.get_window_extent().y1 <= min(panel.y0 for panel in panels)
    titles = [axes._left_title.get_window_extent() for axes in drawn.axes if axes.get_title("left")]
    for i, one in enumerate(titles):
        assert not any(one.overlaps(other) for other in titles[:i])
    # No two panels lie on each other, and together they take most of the page.
    for i, one in enumerate(panels):
        assert not any(one.overlaps(other) for other in panels[:i])
    assert max(panel.y1 for panel in panels) - min(panel.y0 for panel in panels) > page.height / 3


def test_lens_curves_are_means_over_answered_and_over_all_probes():
    result = made()
    figure = usual("lens")
    curves = lines(figure)
    p = np.exp(result.arrays["log_p"])
    x = np.arange(5) - 0.5
    capitals, antonyms, plurals = np.arange(12), 12 + np.arange(10), 22 + np.arange(8)
    assert holds(curves, x, p[:, capitals[:9]].mean(axis=1))
    assert holds(curves, x, p[:, capitals].mean(axis=1))
    assert holds(curves, x, p[:, antonyms[:3]].mean(axis=1))
    assert holds(curves, x, p[:, plurals].mean(axis=1))
    assert not holds(curves, x, p[:, :12][:, 9:].mean(axis=1))


def test_a_rise_stands_over_the_block_that_made_it():
    result = made(6, {"one": (12, 12)}, ())
    # Block 4 alone lifts the target, from depth 4 to depth 5.
    result.arrays["log_p"][:] = np.log(np.where(np.arange(7) >= 5, 0.9, 0.1))[:, None]
    result.probes["particle"] = pd.array([4] * 12, dtype="Int64")
    for name, panel in (("lens", 0), ("joint", 0)):
        figure = draw(result, name)
        x, y = next(c for c in map(np.array, (a.get_data() for a in figure.axes[panel].get_lines())) if c.shape[1] == 7)
        low, high = x[y < 0.5].max(), x[y > 0.5].min()
        assert (low + high) / 2 == 4
        assert bars(figure.axes[panel + 1]) == {float(b): float(b == 4) for b in range(6)}


def test_lens_particles_are_shares_of_answered_probes_and_only_of_groups_that_have_one():
    result = made()
    figure = usual("lens")
    (capitals, antonyms, _) = figure.axes[1::2]
    found = result.probes["particle"][:9].to_numpy(dtype=int)
    assert bars(capitals) == pytest.approx({float(b): (found == b).sum() / 9 for b in range(4)})
    assert bars(antonyms) == {}
    assert "3 of 10 probes answered, 6 needed" in words(figure).replace("\n", " ")


def test_lens_marks_the_median_block_and_its_interval():
    result = made()
    block = result.run["groups"][0]["block"]
    curve = usual("lens").axes[0]
    assert [block["estimate"]] * 2 in [list(line.get_xdata()) for line in curve.get_lines()]
    span = next(patch for patch in curve.patches)
    assert (span.get_x(), span.get_x() + span.get_width()) == (block["low"] - 0.5, block["high"] + 0.5)


def test_the_null_band_is_the_one_of_the_group():
    result = made()
    result.arrays["null_low/capitals"] = np.array([0.01, 0.02, 0.03, 0.04, 0.05])
    result.arrays["null_high/capitals"] = np.array([0.11, 0.32, 0.23, 0.24, 0.15])
    (band,) = draw(result, "lens").axes[0].collections
    x, y = band.get_paths()[0].vertices.T
    for depth in range(5):
        at = y[x == depth - 0.5]
        assert at.min() == result.arrays["null_low/capitals"][depth]
        assert at.max() == result.arrays["null_high/capitals"][depth]


def test_a_group_without_probes_and_without_a_null_band_is_named():
    result = made()
    why = "not measurable: 0 usable probes, 10 needed"
    result.run["groups"].append({"group": "empty", "n": 0, "answered": 0, "block": MISSING, "why_not": why})
    text = words(draw(result, "lens")).replace("\n", " ")
    assert "empty" in text
    assert why in text


@pytest.mark.parametrize("kind", ["zero", "mean"])
def test_fragility_points_and_whiskers_are_the_results_numbers(kind):
    result = made()
    axes = usual("fragility").axes[2 * ("zero", "mean").index(kind)]
    table = result.blocks
    assert holds([np.array(a.get_data(), dtype=float) for a in axes.get_lines()], np.arange(4), table[f"jsd_{kind}"])
    np.testing.assert_allclose(
        whiskers(axes), table[["block", f"jsd_low_{kind}", f"jsd_high_{kind}"]].to_numpy(dtype=float), rtol=1e-12
    )
    kept = usual("fragility").axes[2 * ("zero", "mean").index(kind) + 1]
    assert list(bars(kept).values()) == pytest.approx(list(table[f"kept_{kind}"]))


def test_fragile_blocks_are_filled_and_those_without_block_0_half_filled():
    axes = draw(made(8, kinds=("zero",)), "fragility").axes[0]
    marked = {}
    for line in axes.get_lines():
        if line.get_linestyle() == "None":
            look = "hollow" if line.get_markerfacecolor() == "white" else line.get_fillstyle()
            marked[look] = list(line.get_xdata())
    assert marked == {"full": [0], "bottom": [1, 7], "hollow": [2, 3, 4, 5, 6]}


def test_a_flat_profile_marks_no_block():
    result = made(8, kinds=("zero_stream",))
    result.run["fragility"][0]["flat"] = True
    figure = draw(result, "fragility")
    assert {line.get_markerfacecolor() for line in figure.axes[0].get_lines() if line.get_marker() == "o"} == {"white"}
    assert "flat" in words(figure)


def test_ceiling_and_ln_2_are_drawn_where_they_are():
    figure = usual("fragility")
    heights = {line.get_ydata()[0] for line in figure.axes[0].get_lines() if list(line.get_xdata()) == [0, 1]}
    assert heights == {0.64, math.log(2)}
    assert "0.640" in words(figure)
    assert "0.693" in words(figure)


def test_missing_intervals_leave_no_whiskers():
    result = made(intervals=False)
    assert whiskers(draw(result, "fragility").axes[0]).size == 0
    assert whiskers(draw(result, "joint").axes[2]).size == 0


@pytest.mark.parametrize(("size", "scale"), [(0.3, "linear"), (0.002, "symlog")])
def test_small_divergences_get_a_logarithmic_axis_that_says_so(size, scale):
    for figure, panel in (("fragility", 0), ("joint", 2)):
        axes = draw(made(40, size=size), figure).axes[panel]
        assert axes.get_yscale() == scale
        assert ("log" in axes.get_ylabel()) == (scale == "symlog")
        assert axes.get_ylim()[0] == 0


def test_joint_mean_is_over_groups_not_over_probes():
    result = made(6, {"large": (40, 40), "small": (8, 8)}, ("zero",))
    p = np.exp(result.arrays["log_p"])
    large, small = p[:, :40].mean(axis=1), p[:, 40:].mean(axis=1)
    curves = lines(draw(result, "joint"))
    x = np.arange(7) - 0.5
    assert holds(curves, x, (large + small) / 2)
    assert holds(curves, x, large)
    assert not holds(curves, x, p.mean(axis=1))


def test_joint_histogram_leaves_out_groups_without_a_particle():
    result = made()
    found = result.probes["particle"][:9].to_numpy(dtype=int)  # capitals; the three answered antonyms do not count
    assert bars(usual("joint").axes[1]) == pytest.approx({float(b): (found == b).sum() / 9 for b in range(4)})


def test_joint_has_the_divergences_side_by_side_and_names_those_left_out():
    kinds = ("zero", "mean", "resample", "noise")
    result = made(6, None, kinds)
    figure = draw(result, "joint")
    panel = figure.axes[2]
    drawn = {line.get_label(): line for line in panel.get_lines() if line.get_label() in kinds}
    assert list(drawn) == ["zero", "mean", "resample"]
    for kind, line in drawn.items():
        np.testing.assert_array_equal(line.get_ydata(), result.blocks[f"jsd_{kind}"])
        assert np.abs(line.get_xdata() - np.arange(6)).max() < 0.5
    assert "Not drawn here: noise" in words(figure)


def test_mixers_are_shown_when_there_are_several():
    mixers = ("mamba2", "mamba2", "attention")
    figure = draw(made(6, mixers=mixers), "joint")
    assert len(figure.axes) == 4
    looks = [(bar.get_facecolor(), bar.get_hatch()) for c in figure.axes[3].containers for bar in c]
    assert looks[0] == looks[1] == looks[3] == looks[4] != looks[2] == looks[5]
    assert looks[0][1] != looks[2][1]
    assert {"mamba2", "attention"} <= set(words(figure).split("\n"))
    assert len(usual("joint").axes) == 3


def test_recovery_and_the_plain_lens_stand_beside_the_rest():
    result = made(7, both=True)
    figure = draw(result, "joint")
    panel = next(axes for axes in figure.axes if axes.get_ylabel() == "recovery")
    points = next(line for line in panel.get_lines() if len(line.get_xdata()) == 7)
    assert np.array_equal(points.get_ydata(), result.blocks["recovery"], equal_nan=True)
    expected = result.blocks[["block", "recovery_low", "recovery_high"]].to_numpy()
    assert np.allclose(whiskers(panel), expected[:-1])
    assert "undefined for 3" in words(figure).replace("\n", " ")
    for name in ("joint", "lens"):
        drawn = draw(result, name)
        assert "plain logit lens" in words(drawn)
        p = np.exp(result.arrays["plain/log_p"][:, :9]).mean(axis=1)
        if name == "lens":
            assert holds(lines(drawn), np.arange(8) - 0.5, p)
    assert not any(axes.get_ylabel() == "recovery" for axes in usual("joint").axes)


def test_evolution_draws_medians_and_quartiles():
    result = made()
    figure = usual("evolution")
    curves = lines(figure)
    for name in ("norm", "kl_to_final", "rank", "entropy"):
        assert holds(curves, np.arange(5), np.median(result.arrays[name], axis=1)), name
    # Nothing lies before depth 0, so there is no distance to it.
    assert holds(curves, np.arange(1, 5), np.median(result.arrays["angle"][1:], axis=1))
    (band,) = figure.axes[0].collections
    x, y = band.get_paths()[0].vertices.T
    low, high = np.quantile(result.arrays["norm"][3], [0.25, 0.75])
    assert (y[x == 3].min(), y[x == 3].max()) == pytest.approx((low, high))
    assert [axes.get_yscale() for axes in figure.axes[:5]] == ["log", "linear", "linear", "log", "linear"]


def test_cka_is_drawn_or_missing_with_the_reason():
    (image,) = usual("evolution").axes[5].get_images()
    np.testing.assert_array_equal(image.get_array(), made().arrays["cka"])
    figure = draw(made(6, cka=False), "evolution")
    assert not figure.axes[5].get_images()
    assert "needs 50 probes, this trace has 30" in words(figure).replace("\n", " ")


@pytest.mark.parametrize("figure", FIGURES)
def test_the_caption_says_what_the_numbers_depend_on(figure):
    text = " ".join(usual(figure).get_supxlabel().split())
    for part in (
        "org/tiny-model",
        "bfloat16",
        "n = 30 probes, 12 answered, in 3 groups: capitals, antonyms, plurals",
        "zero, mean (positions: all)",
        "first_rise (min_rise 0.05, rel_rise 0.25)",
        "logit lens",
        "onepass",
    ):
        assert part in text


def test_figures_say_that_no_ablation_was_run():
    for figure in ("joint", "fragility"):
        assert "no ablation was run" in words(draw(made(kinds=()), figure))


def test_the_folder_of_a_local_model_is_not_shown():
    result = made(name="/home/somebody/secret/my-model")
    result.run["model"]["kind"] = "folder"
    text = words(draw(result, "joint"))
    assert "my-model" in text
    assert "secret" not in text


def test_users_text_is_no_mathematics(quickly, tmp_path):
    # Taken as mathematics, each of the first two is an error.
    groups = {r"$\nosuch$": (12, 9), r"\$ $\nosuch$": (12, 9), "two\nlines\x07": (12, 9)}
    result = made(4, groups, name=r"$\none$ <&>")
    _, svg = save_figures(result, tmp_path)
    text = "".join(ET.parse(svg).getroot().itertext())
    for part in (r"$\none$ <&>", r"$\nosuch$, \$ $\nosuch$, two lines"):
        assert part in text
    assert r"\$\none\$" not in text


def test_names_of_mixers_are_no_mathematics():
    assert r"\$\nosuch\$" in words(draw(made(mixers=(r"$\nosuch$", "attention")), "joint"))


@pytest.mark.filterwarnings("ignore:Glyph")
def test_chinese_names_are_drawn_with_any_font(quickly, tmp_path):
    result = made(4, {"省会城市": (12, 9)}, name="模型/小模型")
    for path in save_figures(result, tmp_path):
        if path.suffix == ".svg":
            assert "模型/小模型" in "".join(ET.parse(path).getroot().itertext())


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> list[Path]:
    return save_figures(made(), tmp_path_factory.mktemp("saved") / "new" / "figures")


def test_saved_figures_are_whole(saved):
    assert [path.name for path in saved] == [f"{f}.{kind}" for f in FIGURES for kind in ("png", "svg")]
    new = saved[0].parent.parent
    assert sorted(path.name for path in new.rglob("*")) == sorted(["figures", *(path.name for path in saved)])
    for path in saved:
        if path.suffix == ".png":
            pixels = matplotlib.image.imread(path)[..., :3]
            assert pixels.shape[1] >= 150 * 6
            assert (pixels[:5] == 1).all()  # a white page
            assert 0.005 < (pixels.min(axis=-1) < 0.9).mean() < 0.5
        else:
            root = ET.parse(path).getroot()
            assert root.tag == "{http://www.w3.org/2000/svg}svg"
            text = "".join(root.itertext())
            assert "org/tiny-model" in text
            assert "n = 30 probes" in text


def test_same_numbers_same_bytes_whatever_the_callers_style(saved, tmp_path):
    with matplotlib.rc_context(
        {"font.size": 20, "lines.linewidth": 9, "svg.hashsalt": "other", "svg.fonttype": "none"}
    ):
        before = dict(matplotlib.rcParams)
        second = save_figures(made(), tmp_path / "second")
        assert dict(matplotlib.rcParams) == before
    assert [path.read_bytes() for path in saved] == [path.read_bytes() for path in second]
    for path in saved:
        assert not re.search(rb"20\d\d-\d\d-\d\d|Matplotlib v", path.read_bytes())


@pytest.fixture
def quickly(monkeypatch):
    """Only one figure, where it does not matter what is drawn."""
    monkeypatch.setattr("tracer.plots._DRAWERS", {"lens": draw_lens})
    monkeypatch.setattr("tracer.plots.FIGURES", ("lens",))


def test_figures_are_replaced_only_by_force(quickly, tmp_path):
    (tmp_path / "lens.svg").write_text("mine")
    with pytest.raises(InputError, match=r"already holds lens\.svg"):
        save_figures(made(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lens.svg"]
    assert (tmp_path / "lens.svg").read_text() == "mine"
    save_figures(made(), tmp_path, force=True)
    assert "<svg" in (tmp_path / "lens.svg").read_text()


def test_a_folder_that_cannot_be_written_is_refused_and_left_alone(quickly, tmp_path):
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match="cannot write"):
            save_figures(made(), folder)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


def test_unknown_figures_are_refused():
    with pytest.raises(InputError, match="no figure 'heatmap': pass one of joint, lens, fragility, evolution"):
        draw(made(), "heatmap")


def test_a_callers_dark_style_does_not_reach_the_figure():
    with plt.style.context("dark_background"):
        figure = draw(made(), "evolution")
        figure.draw_without_rendering()
    assert figure.get_facecolor() == (1, 1, 1, 1)
    labels = [label for axes in figure.axes for label in axes.get_xticklabels() if label.get_text()]
    assert {matplotlib.colors.to_hex(label.get_color()) for label in labels} == {"#000000"}


def test_pyplot_holds_no_figures(saved):
    assert plt.get_fignums() == []
