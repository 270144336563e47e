"""The page docs/TRIALS.md: what the committed trials found, written by `zoo_trials.py` and `gemma_trial.py`."""

from pathlib import Path

import tracer
from tracer.statistics import MIN_SEEDS

HERE = Path(__file__).parent
DATA = HERE / "data" / "trials"
PAGE = HERE.parent / "docs" / "TRIALS.md"

SECTIONS = {
    "transformer-8": ("The zoo's Transformer", "python figures/zoo_trials.py --measure transformer-8"),
    "gdn-attention-8": (
        "The zoo's Gated DeltaNet with attention",
        "python figures/zoo_trials.py --measure gdn-attention-8",
    ),
    "gemma3-270m": (
        "Gemma 3 270M on Chinese technical text",
        "python figures/gemma_trial.py --measure --data FOLDER",
    ),
}
INTRODUCTION = """# Trials of freeze plans

*Freeze Deep, Train Shallow* (arXiv 2605.11416) recommends to train the shallow blocks. Here that is a claim, tried on
one checkpoint at a time: the arm `shallow` trains the shallow half, `deep` the deep half, `-frozen` arms freeze
embeddings, norm and head as well. How a trial compares is told in the
[README](../README.md#which-plan-is-better-the-controlled-trial). The models of the zoo learn 240 facts about new
people in Chinese (`acquisition`); what they should keep are facts in English, and the old facts in Chinese, which
share language and wordings with the new ones.

This page is written by the scripts that it names, from the trainings under `figures/data/trials/`; `--measure` makes
those that are missing.
"""


def page() -> str:
    """docs/TRIALS.md, from whatever trials are there."""
    parts = [INTRODUCTION]
    for name, (title, command) in SECTIONS.items():
        if not (DATA / name).is_dir():
            continue
        result = tracer.TrialResult.load(DATA / name)
        seeds = len(result.seeds)
        state = "" if seeds >= MIN_SEEDS else f" **{seeds} of {MIN_SEEDS} seeds: no verdict yet.**"
        figures = [
            f"![{figure.stem}](../{figure.relative_to(PAGE.parent.parent).as_posix()})"
            for figure in sorted((HERE / "trials" / name).glob("*.png"))
        ]
        parts += [
            f"## {title}\n",
            f"`{command}`{state}\n",
            f"```text\n{result.summary()}\n```\n",
            *(f"{figure}\n" for figure in figures),
        ]
    return "\n".join(parts)


def write_page() -> Path:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    return PAGE
