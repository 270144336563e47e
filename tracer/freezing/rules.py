"""Rules that choose the blocks to train, each with the evidence from a trace that it rests on."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracer.errors import InputError
from tracer.results import TraceResult
from tracer.statistics import rng

MIN_ANSWERED = 20
"""Fewest answered probes with a particle that rule `particle` rests on."""

WIDEST = 1 / 3
"""Widest interval of the particle block, as a share of the depth, that rule `particle` rests on."""


@dataclass(frozen=True)
class Choice:
    """What a rule says.

    Attributes:
        train: 0-based blocks to train, ascending.
        evidence: the numbers that it rests on, as plain data.
        why: these in words, one sentence each.
    """

    train: tuple[int, ...]
    evidence: Mapping[str, Any]
    why: tuple[str, ...]


def choose(n: int, result: TraceResult | None, rule: str, ablation: str | None = None) -> Choice:
    """The blocks that a rule trains.

    Args:
        n: number of blocks.
        result: a trace of the model; None for the rules that ask none.
        rule: `particle`, `full`, `fragile:K`, `robust:K`, `update-stable:K`, `shallow:K`, `deep:K`, `middle:K`,
            `random:K:SEED`, or blocks to train as `0-3,7`.
        ablation: for `fragile` and `robust`, which one of the trace counts; default its first one of whole blocks.

    Raises:
        InputError: the rule is unknown, its numbers do not fit the model, or the trace does not carry it.
    """
    name, *numbers = rule.strip().split(":")
    if name in RULE_NUMBERS:
        takes = RULE_NUMBERS[name]
        values = [_number(rule, number) for number in numbers]
        if len(values) != len(takes):
            wanted = ":".join((name, *takes))
            raise InputError(f"rule {rule!r} takes {len(takes)} numbers: pass {wanted}")
        if takes and not 0 < values[0] <= n:
            raise InputError(f"rule {rule!r}: {values[0]} of {n} blocks; pass a number from 1 to {n}")
        if name in _PLACED:
            return _PLACED[name](n, values)
        if result is None:
            raise InputError(f"rule {rule!r} needs a trace of the model: pass one, or a rule such as shallow:K")
        return _TRACED[name](result, values, ablation)
    if rule[:1].isdigit():
        train = block_list(rule, n)
        return Choice(train, {}, ("the blocks to train were named",))
    raise InputError(f"unknown rule {rule!r}: pass {', '.join(RULES)}, or blocks to train such as 0-3,7")


def block_list(text: str, n_blocks: int) -> tuple[int, ...]:
    """Blocks such as `0-3,7`, ascending and each once.

    Raises:
        InputError: it is none, or a block does not exist.
    """
    blocks: set[int] = set()
    for part in text.split(","):
        ends = part.strip().split("-")
        if len(ends) > 2 or not all(end.strip().isdecimal() for end in ends):
            raise InputError(f"blocks {text!r}: {part.strip()!r} is neither a block nor a span such as 0-3")
        first, last = int(ends[0]), int(ends[-1])
        if first > last or last >= n_blocks:
            raise InputError(f"blocks {text!r}: {part.strip()!r} does not lie in 0-{n_blocks - 1}")
        blocks.update(range(first, last + 1))
    return tuple(sorted(blocks))


def _number(rule: str, text: str) -> int:
    if not text.isdecimal():
        raise InputError(f"rule {rule!r}: {text!r} is not a whole number")
    return int(text)


def _particle(result: TraceResult, _numbers: Sequence[int], _ablation: str | None) -> Choice:
    found, n = result.run["particle_block"], len(result.blocks)
    lens = result.run["readout"]
    counted = {group["group"] for group in result.run["groups"] if group["why_not"] is None}
    answered = int((result.probes["answered"] & result.probes["group"].isin(counted)).sum())
    evidence: dict[str, Any] = {"lens": lens, "particle_block": found, "groups": len(counted), "answered": answered}
    if result.run["plain"] is not None:
        evidence["plain_lens"] = result.run["plain"]["particle_block"]
    if found["estimate"] is None:
        reasons = "; ".join(sorted({str(group["why_not"]) for group in result.run["groups"]}))
        raise InputError(f"rule 'particle' has no evidence: no group has a particle ({reasons}): pass other probes")
    words = f"block {found['estimate']:g} by the {lens} lens"
    if answered < MIN_ANSWERED:
        raise InputError(
            f"rule 'particle' has too little evidence: {words} rests on {answered} answered probes in {len(counted)} "
            f"groups, {MIN_ANSWERED} needed: trace on more probes that the model answers"
        )
    if found["low"] is None or found["high"] - found["low"] > WIDEST * n:
        interval = "no interval" if found["low"] is None else f"the interval {found['low']:g} to {found['high']:g}"
        raise InputError(
            f"rule 'particle' has too little evidence: {words} has {interval}, which may be at most a third of {n} "
            "blocks wide: trace on more groups of probes"
        )
    why = [
        f"the median task particle lies at {words}, 95 % {found['low']:g} to {found['high']:g}, over {len(counted)} "
        f"groups with {answered} answered probes"
    ]
    if "plain_lens" in evidence and evidence["plain_lens"]["estimate"] is not None:
        why.append(f"by the plain lens it lies at block {evidence['plain_lens']['estimate']:g}")
    first = math.ceil(found["estimate"])
    return Choice(tuple(range(first)), evidence, tuple(why))


def _by_jsd(result: TraceResult, ablation: str | None) -> tuple[str, np.ndarray]:
    whole = [kind for kind in result.ablations if not kind.endswith(("_mixer", "_mlp")) and kind != "perturb"]
    kind = ablation if ablation is not None else next(iter(whole), None)
    if kind is None or kind not in result.ablations:
        raise InputError(
            f"the trace has no ablation {kind or 'of whole blocks'}: pass one of "
            f"{', '.join(result.ablations) or 'none'}, or trace again with --ablations zero"
        )
    return kind, result.blocks[f"jsd_{kind}"].to_numpy(dtype=float)


def _ranked(result: TraceResult, kind: str, jsd: np.ndarray, number: int, *, largest: bool) -> tuple[int, ...]:
    if np.isnan(jsd).any():
        raise InputError(f"ablation {kind} was not measured at every block, so that they cannot be ranked")
    order = np.lexsort((np.arange(len(jsd)), -jsd if largest else jsd))
    return tuple(sorted(int(block) for block in order[:number]))


def _evidence(result: TraceResult, kind: str) -> dict[str, Any]:
    entry = next(entry for entry in result.run["fragility"] if entry["ablation"] == kind)
    table = result.blocks[[f"jsd_{kind}", f"jsd_low_{kind}", f"jsd_high_{kind}"]]
    return {"ablation": kind, "n": entry["n"], "fragile": entry["fragile"], "jsd": table.to_numpy().tolist()}


def _fragile(result: TraceResult, numbers: Sequence[int], ablation: str | None) -> Choice:
    kind, jsd = _by_jsd(result, ablation)
    train = _ranked(result, kind, jsd, numbers[0], largest=True)
    return Choice(train, _evidence(result, kind), (f"the {numbers[0]} most fragile blocks under {kind} are trained",))


def _robust(result: TraceResult, numbers: Sequence[int], ablation: str | None) -> Choice:
    kind, jsd = _by_jsd(result, ablation)
    frozen = _ranked(result, kind, jsd, numbers[0], largest=False)
    why = f"the {numbers[0]} least fragile blocks under {kind} are frozen"
    return Choice(_others(result, frozen), _evidence(result, kind), (why,))


def _update_stable(result: TraceResult, numbers: Sequence[int], _ablation: str | None) -> Choice:
    if "perturb" not in result.ablations:
        raise InputError("rule 'update-stable' needs a trace with --ablations perturb")
    frozen = _ranked(result, "perturb", result.blocks["jsd_perturb"].to_numpy(dtype=float), numbers[0], largest=False)
    why = f"the {numbers[0]} blocks that a perturbation of their weights moves the output least by are frozen"
    return Choice(_others(result, frozen), _evidence(result, "perturb"), (why,))


def _others(result: TraceResult, blocks: Sequence[int]) -> tuple[int, ...]:
    return tuple(block for block in range(len(result.blocks)) if block not in blocks)


def _at(first: Callable[[int, int], int], words: str) -> Callable[[int, Sequence[int]], Choice]:
    """A rule that trains K neighbouring blocks from `first(n, K)` on, whatever the trace says."""

    def rule(n: int, numbers: Sequence[int]) -> Choice:
        start = first(n, numbers[0])
        train = tuple(range(start, start + numbers[0]))
        return Choice(train, {}, (f"the {numbers[0]} {words} blocks are trained; no trace was asked",))

    return rule


def _random(n: int, numbers: Sequence[int]) -> Choice:
    number, seed = numbers
    chosen = rng(seed, "freeze plan").permutation(n)[:number]
    why = f"{number} blocks drawn with seed {seed} are trained; no trace was asked"
    return Choice(tuple(sorted(int(block) for block in chosen)), {"seed": seed}, (why,))


def _full(n: int, _numbers: Sequence[int]) -> Choice:
    return Choice(tuple(range(n)), {}, ("all blocks are trained",))


_TRACED: dict[str, Callable[[TraceResult, Sequence[int], str | None], Choice]] = {
    "particle": _particle,
    "fragile": _fragile,
    "robust": _robust,
    "update-stable": _update_stable,
}
_PLACED: dict[str, Callable[[int, Sequence[int]], Choice]] = {
    "full": _full,
    "shallow": _at(lambda n, k: 0, "shallowest"),
    "deep": _at(lambda n, k: n - k, "deepest"),
    "middle": _at(lambda n, k: (n - k) // 2, "middle"),
    "random": _random,
}
RULE_NUMBERS: dict[str, tuple[str, ...]] = {
    "particle": (),
    "full": (),
    **dict.fromkeys(("fragile", "robust", "update-stable", "shallow", "deep", "middle"), ("K",)),
    "random": ("K", "SEED"),
}
"""The numbers that each rule takes."""

RULES: tuple[str, ...] = tuple(":".join((name, *takes)) for name, takes in RULE_NUMBERS.items())
"""What rules look like."""
