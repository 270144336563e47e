"""Task particles of SmolLM2-135M through a tuned lens, with the plain logit lens beside it.

`python figures/both_lenses.py` draws the figure from the committed result. With `--measure` it first trains the lens,
on the help topics of Python's standard library (English prose with code), and traces the model anew: about a quarter of
an hour on two cores.
"""

import sys
from pathlib import Path

from tracer import TraceResult
from tracer.plots import write_figures

HERE = Path(__file__).parent
DATA = HERE / "data" / "smollm2_both_lenses"


def measure() -> None:
    from pydoc_data.topics import topics

    import tracer

    model = tracer.load("smollm2-135m-instruct-q4_1", dtype="float32", backend="hooks")
    lens = tracer.train_tuned_lens(model, list(topics.values()))
    print(lens.summary())
    result = tracer.trace(model, "english", limit=20, readout="tuned", tuned_lens=lens)
    print(result.summary())
    result.save(DATA, force=True)


if __name__ == "__main__":
    if "--measure" in sys.argv[1:]:
        measure()
    result = TraceResult.load(DATA)
    for path in write_figures({"lens": lambda: result.plot("lens")}, HERE / "both_lenses", force=True):
        print(path)
