"""Fitting translators: a weighted ridge regression first, then gradient steps through the model's own tail.

The regression from `resid[d]` to `resid[L]` is closed and does most of the work. The gradient steps then minimise what
the lens is judged by, the mean of KL(output || lens) (Belrose et al. 2023, section 3, arXiv 2303.08112).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from tqdm import tqdm

from tracer.divergence import kl_divergence, log_probs
from tracer.errors import InputError
from tracer.measures import MAX_LOGITS
from tracer.models.streams import unembed
from tracer.models.traced import TracedModel
from tracer.statistics import bootstrap_profile, rng
from tracer.tuned_lens.lens import MEASURES, stream_width, translated
from tracer.tuned_lens.positions import Positions, drawn_positions, joined
from tracer.tuned_lens.regression import Moments, relative
from tracer.tuned_lens.text import SplitText, TextSequence

VALIDATION_POSITIONS = 256
"""Most positions that choose between translators."""

HELD_OUT_POSITIONS = 512
"""Most positions that judge them."""

EVALUATIONS = 4
"""How often the gradient steps are compared on the validation part; the best translator of each depth is kept."""

PATIENCE = 2
"""A depth is trained no further after so many evaluations without a better translator."""

LEARNING_RATE = 0.06
"""Of Adam, over the width; for inputs of unit variance and outputs in units of the last residual's size."""

WARM_UP = 5
"""Steps until the learning rate is full; after them it falls to 0 in a straight line."""


BAR = "{l_bar}{bar}| {elapsed}<{remaining}"
"""The bar counts work in units that say nothing; its times do."""


@dataclass
class _Depth:
    """What is known of the translator of one depth while it is trained.

    Attributes:
        start: what the gradient steps began with, `regression` or `identity`.
        ridge: penalty of the regression, None for `identity`.
        best: its mean cross-entropy with the output on the validation part, nats.
        steps: gradient steps of the translator that is kept.
        failed: evaluations since then.
    """

    start: str
    ridge: float | None
    best: float
    steps: int = 0
    failed: int = 0


@dataclass
class Correction:
    """What gradient steps add to a translator: `size * (weight z + bias)`, with z the standardised input."""

    mean: Tensor
    scale: Tensor
    size: float
    weight: nn.Parameter
    bias: nn.Parameter

    def __call__(self, h: Tensor) -> Tensor:
        """`[positions, d]` what is added for inputs of this shape."""
        return self.size * linear((h - self.mean) / self.scale, self.weight, self.bias)

    def folded(self) -> tuple[Tensor, Tensor]:
        """Weight and bias for inputs as they are."""
        weight = self.size * self.weight.detach() / self.scale
        return weight, self.size * self.bias.detach() - weight @ self.mean


class Fit:
    """One training run, to go through once; `weight` and `bias` hold the best translators so far.

    Args:
        model: the opened model, in eval mode and without gradients.
        split: the text.
        steps: gradient steps.
        batch: positions of a step.
        seed: of everything drawn.

    Attributes:
        fitted: positions that the regression is fitted to.
    """

    def __init__(self, model: TracedModel, split: SplitText, steps: int, batch: int, seed: int):
        self.adapter, self.anatomy = model.adapter, model.anatomy
        self.split, self.steps, self.batch, self.seed = split, steps, batch, seed
        self.n_depths, self.width = model.n_blocks, stream_width(model.anatomy)
        self.fitted = sum(len(item.ids) - item.skip for item in split.train)
        self.rows_per_call = max(1, MAX_LOGITS // model.anatomy.vocab)
        # The bar counts rows through the tail, which take most of the time; a token through the blocks counts by size.
        tail = model.anatomy.d_model * model.anatomy.vocab
        self.rows_per_token = max(0.0, sum(p.numel() for p in model.model.parameters()) / tail - 1)

    def run(self, progress: bool) -> tuple[Tensor, Tensor, list[dict[str, Any]]]:
        """`[depths, d, d]` weights, `[depths, d]` biases, and a row of measures for every depth."""
        total = round(self._work())
        with tqdm(total=total, desc="tuned lens", bar_format=BAR, disable=not progress) as self.bar:
            moments, pool = self._read_train()
            validation = self._read(self.split.validation, VALIDATION_POSITIONS, "validation")
            device = validation.streams[-1].device
            self.weight = torch.zeros(self.n_depths, self.width, self.width, device=device)
            self.bias = torch.zeros(self.n_depths, self.width, device=device)
            depths = self._regress(moments, validation)
            trained = [self._correction(each, pool) for each in moments]
            moments.clear()
            if self.steps:
                self._descend(pool, validation, trained, depths)
            measured = self._judge(self._read(self.split.held_out, HELD_OUT_POSITIONS, "held out"))
            self.bar.update(total - self.bar.n)
        table = [
            {"depth": depth, **row, "start": known.start, "ridge": known.ridge, "steps": known.steps}
            for depth, (row, known) in enumerate(zip(measured, depths, strict=True))
        ]
        return self.weight.cpu(), self.bias.cpu(), table

    def _work(self) -> float:
        judged = (2 + EVALUATIONS) * VALIDATION_POSITIONS + 4 * HELD_OUT_POSITIONS
        return self.rows_per_token * self.split.tokens + self.n_depths * (judged + 2 * self.steps * self.batch)

    def _read_train(self) -> tuple[list[Moments], Positions]:
        """The sums of the regression over all positions, and the positions of the gradient steps."""
        moments: list[Moments] = []
        pool: list[Positions] = []
        most = max(1, self.steps * self.batch)
        for found, drawn in drawn_positions(self.adapter, self.split.train, most, self.seed, "steps"):
            rows = [self._rows(stream) for stream in found.streams]
            moments = moments or [Moments(self.width, rows[-1].device) for _ in range(self.n_depths)]
            for sums, h in zip(moments, rows, strict=False):
                sums.add(h, rows[-1])
            pool += [] if drawn is None else [drawn]
            self.bar.update(self.rows_per_token * len(found))
        return moments, joined(self.anatomy, pool)

    def _read(self, sequences: Sequence[TextSequence], most: int, label: str) -> Positions:
        parts = []
        for found, drawn in drawn_positions(self.adapter, sequences, most, self.seed, label):
            parts += [] if drawn is None else [drawn]
            self.bar.update(self.rows_per_token * len(found))
        return joined(self.anatomy, parts)

    def _rows(self, stream: Tensor) -> Tensor:
        """`[positions, d]` float32, which translators are trained in, from single positions of any layout."""
        return self.anatomy.rows_first(stream).flatten(1).float()

    def _logits(self, streams: Sequence[Tensor], tokens: Tensor) -> Tensor:
        """`[streams, positions, vocab]` by the model's own tail."""
        stacked = torch.cat(list(streams), self.anatomy.batch_dim)
        return unembed(self.adapter, stacked, tokens.repeat(len(streams))).unflatten(0, (len(streams), -1))

    def _lens(
        self, positions: Positions, depths: Sequence[int], *, plain: bool
    ) -> Iterator[tuple[Tensor, Iterator[tuple[int, Tensor]], np.ndarray]]:
        """For a slice of the positions at a time: the output's logits, those of each depth, and the slice."""
        for part in torch.arange(len(positions)).split(max(1, self.rows_per_call // 2)):
            some = positions.at(self.anatomy, part)
            yield self._logits(some.streams[-1:], some.tokens)[0], self._each(some, depths, plain), part.numpy()

    def _each(self, some: Positions, depths: Sequence[int], plain: bool) -> Iterator[tuple[int, Tensor]]:
        for i, depth in enumerate(depths):
            stream = some.streams[depth]
            if not plain:
                stream = translated(self.anatomy, stream, self.weight[depth], self.bias[depth])
            yield i, self._logits([stream], some.tokens)[0]

    def _cross_entropies(self, positions: Positions, depths: Sequence[int], *, plain: bool = False) -> list[float]:
        """`[depths]` mean cross-entropy of output and lens in nats: the KL and a constant, in a third of the time."""
        sums = [0.0] * len(depths)
        for output, lenses, _ in self._lens(positions, depths, plain=plain):
            share = output.float().softmax(-1)
            for i, logits in lenses:
                # A token that cannot occur (-inf) adds nothing, not NaN.
                sums[i] += cross_entropy(logits.float().clamp(min=-1e30), share, reduction="sum").item()
                self.bar.update(len(logits))
        return [total / len(positions) for total in sums]

    def _kl(self, positions: Positions, *, plain: bool = False) -> np.ndarray:
        """`[positions, depths]` KL(output || lens) in nats of the translators, or of the plain lens."""
        found = np.empty((len(positions), self.n_depths))
        for output, lenses, rows in self._lens(positions, range(self.n_depths), plain=plain):
            log_p = log_probs(output)
            for depth, logits in lenses:
                found[rows, depth] = kl_divergence(log_p, log_probs(logits)).cpu().numpy()
                self.bar.update(2 * len(rows))
        return found

    def _regress(self, moments: Sequence[Moments], validation: Positions) -> list[_Depth]:
        """Begin every depth with the regression, or with the plain lens where that is better."""
        last = self._rows(validation.streams[-1]).double()
        counts = relative(last)
        ridges = []
        for depth, sums in enumerate(moments):
            h = self._rows(validation.streams[depth]).double()
            errors: dict[float, float] = {}
            for ridge, weight, bias in sums.solutions():
                error = (counts * (h + h @ weight.T + bias - last).square().sum(1)).sum().item()
                if error < min(errors.values(), default=np.inf):
                    self.weight[depth], self.bias[depth] = weight.float(), bias.float()
                errors[ridge] = error
            ridges.append(min(errors, key=lambda ridge: errors[ridge]))
        everywhere = range(self.n_depths)
        plain, fitted = (self._cross_entropies(validation, everywhere, plain=p) for p in (True, False))
        known = []
        for depth, (without, with_it) in enumerate(zip(plain, fitted, strict=True)):
            if with_it < without:
                known.append(_Depth("regression", ridges[depth], with_it))
            else:
                self.weight[depth], self.bias[depth] = 0, 0
                known.append(_Depth("identity", None, without))
        return known

    def _correction(self, sums: Moments, pool: Positions) -> Correction:
        last = self._rows(pool.streams[-1])
        return Correction(
            sums.mean.float(),
            sums.scale.float(),
            last.square().mean(1).sqrt().mean().item(),
            nn.Parameter(torch.zeros(self.width, self.width, device=last.device)),
            nn.Parameter(torch.zeros(self.width, device=last.device)),
        )

    def _descend(
        self, pool: Positions, validation: Positions, trained: Sequence[Correction], depths: Sequence[_Depth]
    ) -> None:
        """Adam on the KL of every depth, all on the same positions."""
        start = self.weight.clone(), self.bias.clone()
        parameters = [parameter for each in trained for parameter in (each.weight, each.bias)]
        adam = torch.optim.Adam(parameters, lr=LEARNING_RATE / self.width, betas=(0.9, 0.99), eps=1e-12)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            adam, lambda step: min(1.0, (step + 1) / WARM_UP) * (1 - step / self.steps)
        )
        generator = rng(self.seed, "tuned lens", "order")
        order = np.empty(0, dtype=np.int64)
        active = list(range(self.n_depths))
        evaluations = {round(self.steps * (i + 1) / EVALUATIONS) for i in range(EVALUATIONS)} - {0}
        for step in range(1, self.steps + 1):
            if len(order) < min(self.batch, len(pool)):
                order = np.concatenate([order, generator.permutation(len(pool))])
            now, order = order[: self.batch], order[self.batch :]
            adam.zero_grad()  # depths that are done have no gradients then, and Adam leaves them alone
            self._backward(pool.at(self.anatomy, torch.from_numpy(now)), start, trained, active)
            adam.step()
            schedule.step()
            if step not in evaluations:
                continue
            kept = {depth: (self.weight[depth].clone(), self.bias[depth].clone()) for depth in active}
            for depth in active:
                weight, bias = trained[depth].folded()
                self.weight[depth], self.bias[depth] = start[0][depth] + weight, start[1][depth] + bias
            for depth, found in zip(active, self._cross_entropies(validation, active), strict=True):
                known = depths[depth]
                if found < known.best:
                    known.best, known.steps, known.failed = found, step, 0
                else:
                    known.failed += 1
                    self.weight[depth], self.bias[depth] = kept[depth]
            active = [depth for depth in active if depths[depth].failed < PATIENCE]
            if not active:
                return

    def _backward(
        self, some: Positions, start: tuple[Tensor, Tensor], trained: Sequence[Correction], active: Sequence[int]
    ) -> None:
        """Gradients of the mean KL, a group of depths at a time."""
        output = self._logits(some.streams[-1:], some.tokens)[0].float().softmax(-1)
        size = max(1, self.rows_per_call // len(some))
        for group in (active[i : i + size] for i in range(0, len(active), size)):
            with torch.enable_grad():
                streams = []
                for depth in group:
                    h = self._rows(some.streams[depth])
                    moved = h + linear(h, start[0][depth], start[1][depth]) + trained[depth](h)
                    streams.append(self._as_stream(moved, some.streams[depth]))
                logits = self._logits(streams, some.tokens)
            if not logits.requires_grad:
                raise InputError("no gradient passes through the tail of this model: use the logit lens")
            # The gradient of KL(output || softmax(logits)); autograd would keep the softmax and its logarithm.
            slope = logits.detach().float().softmax(-1).sub_(output).div_(len(some))
            logits.backward(slope.to(logits.dtype))
            self.bar.update(2 * len(group) * len(some))

    def _as_stream(self, rows: Tensor, like: Tensor) -> Tensor:
        return self.anatomy.as_model(rows.view(self.anatomy.rows_first(like).shape)).to(like.dtype)

    def _judge(self, held_out: Positions) -> list[dict[str, Any]]:
        """Per depth the mean KL of plain and tuned lens and their difference, with intervals over units."""
        everywhere = range(self.n_depths)
        plain, tuned = (self._kl(held_out, plain=p) for p in (True, False))
        units = [str(unit) for unit in held_out.units.tolist()]
        rows: list[dict[str, Any]] = [{} for _ in everywhere]
        for name, values in zip(MEASURES, (plain, tuned, plain - tuned), strict=True):
            found = bootstrap_profile(values, units, seed=self.seed, label=("tuned lens", name))
            for depth, row in enumerate(rows):
                row[name] = float(values[:, depth].mean())
                row[f"{name}_low"] = None if found.low is None else float(found.low[depth])
                row[f"{name}_high"] = None if found.high is None else float(found.high[depth])
        return [row | {"n": len(held_out), "n_units": len(set(units))} for row in rows]
