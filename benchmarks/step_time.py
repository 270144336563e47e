"""Step times under freeze plans against the prediction of `tracer.price`.

`python benchmarks/step_time.py` prints, for several plans on SmolLM2-135M, the time of a step (forward, backward,
AdamW) as a ratio of medians to that of `full`, with the quartiles of single rounds, beside the predicted ratio,
tokens a second, the bytes of the moments, and the most memory that a process under the plan alone holds. Plans
alternate in one process, so that what else the machine does slows them alike; of each turn's two steps the second one
counts, since the first pays for memory that the plan before had given back. The memory is measured in one process a
plan.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch

import tracer
from tracer.freezing.cost import price
from tracer.training.memory import peak_memory

FROZEN = {"embeddings": "freeze", "norm": "train", "head": "freeze"}
PLANS: dict[str, dict[str, str]] = {
    "full": {"rule": "full"},
    "shallow half": {"rule": "shallow:15"},
    "deep half": {"rule": "deep:15"},
    "shallow half, embeddings frozen": {"rule": "shallow:15", **FROZEN},
    "deep half, embeddings frozen": {"rule": "deep:15", **FROZEN},
    "deepest third, embeddings frozen": {"rule": "deep:10", **FROZEN},
}


class Stepper:
    """Steps of one plan with an optimizer of its own; the weights are shared and restored by nobody."""

    def __init__(self, model: tracer.TracedModel, plan: tracer.FreezePlan, ids: torch.Tensor):
        self.model, self.plan, self.ids = model, plan, ids
        plan.apply(model)
        trained = [parameter for parameter in model.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=True)

    def step(self) -> float:
        """Seconds of one step; the plan's gradients are forgotten afterwards."""
        self.plan.apply(self.model)
        began = time.perf_counter()
        self.model.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - began

    @property
    def moments(self) -> int:
        """Bytes of the optimizer's moments."""
        states = (state for state in self.optimizer.state.values())
        return sum(state[key].nbytes for state in states for key in ("exp_avg", "exp_avg_sq"))


def opened(name: str, batch: int, block_size: int) -> tuple[tracer.TracedModel, torch.Tensor]:
    model = tracer.load(name, backend="hooks", dtype="float32", progress=False)
    model.model.train()
    generator = torch.Generator().manual_seed(0)
    return model, torch.randint(0, model.anatomy.vocab, (batch, block_size), generator=generator)


def measure(name: str, batch: int, block_size: int, rounds: int) -> pd.DataFrame:
    """One row a plan."""
    model, ids = opened(name, batch, block_size)
    steppers = {label: Stepper(model, tracer.plan(model, **what), ids) for label, what in PLANS.items()}
    times: dict[str, list[float]] = {label: [] for label in PLANS}
    for number in range(rounds + 1):
        for label, stepper in steppers.items():
            stepper.step()
            if number:  # the first round makes the moments
                times[label].append(stepper.step())
    rows = []
    full = np.array(times["full"])
    for label, stepper in steppers.items():
        own = np.array(times[label])
        ratios = own / full
        predicted = price(stepper.plan, model.model, block_size=block_size, batch=batch)
        rows.append(
            {
                "plan": label,
                "trained": predicted.plan.trained,
                "predicted": predicted.time_ratio,
                "measured": np.median(own) / np.median(full),
                "q1": np.quantile(ratios, 0.25),
                "q3": np.quantile(ratios, 0.75),
                "tokens/s": batch * block_size / np.median(own),
                "moments": stepper.moments / 2**20,
                "moments predicted": predicted.plan.optimizer_bytes / 2**20,
                "peak memory": peak_of(label, name, batch, block_size) / 2**20,
            }
        )
    table = pd.DataFrame(rows)
    table["error"] = table["predicted"] - table["measured"]
    return table


def peak_of(label: str, name: str, batch: int, block_size: int) -> int:
    """Most bytes held by a process of its own that makes three steps under a plan."""
    command = [sys.executable, __file__, "--alone", label, "--model", name]
    command += ["--batch", str(batch), "--block-size", str(block_size), "--threads", str(torch.get_num_threads())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(json.loads(done.stdout.splitlines()[-1]))


def alone(label: str, name: str, batch: int, block_size: int) -> None:
    model, ids = opened(name, batch, block_size)
    stepper = Stepper(model, tracer.plan(model, **PLANS[label]), ids)
    for _ in range(3):
        stepper.step()
    print(json.dumps(peak_memory()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct-q4_1")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--block-size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="one varies least (default: 1)")
    parser.add_argument("--out", type=Path, help="also write the table as CSV")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.alone:
        alone(options.alone, options.model, options.batch, options.block_size)
        return
    table = measure(options.model, options.batch, options.block_size, options.rounds)
    size = f"{options.batch} x {options.block_size} tokens"
    print(f"{options.model}, steps of {size}, {options.rounds} rounds, float32, threads: {options.threads};")
    print("moments and peak memory in MiB\n")
    print(table.to_string(index=False, float_format=lambda number: f"{number:.3f}"))
    worst = table["error"].abs().max()
    naive = (1 - table["measured"]).abs().max()
    print(f"\nlargest |predicted - measured| {worst:.3f} of full; always predicting 1 would be off by {naive:.3f}")
    if options.out is not None:
        table.to_csv(options.out, index=False, lineterminator="\n")


if __name__ == "__main__":
    main()
