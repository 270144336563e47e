"""The figures of a trace of SmolLM2-135M; `first_trace/joint.png` is the figure of the README.

`python figures/first_trace.py` draws them from the committed result; the README of this folder says how that was made.
"""

from pathlib import Path

from tracer import TraceResult
from tracer.plots import save_figures

HERE = Path(__file__).parent

if __name__ == "__main__":
    for path in save_figures(TraceResult.load(HERE / "data" / "smollm2_english"), HERE / "first_trace", force=True):
        print(path)
