"""The probe sets of the invented world: what is asked, in which phrasing, and with which corrupt prompt.

They are installed as `zoo/<set>`; `make zoo` writes them.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from tracer.probes import Probe
from tracer.zoo.documents import copied_list, recalled_colour
from tracer.zoo.world import Fact, World

PER_RELATION = 40
"""Most probes of one relation in one set."""


def probe_sets(world: World) -> dict[str, tuple[Probe, ...]]:
    """The probe sets of a world, by name.

    `train`: fact and phrasing were both seen together in training. `held`: the phrasing was seen with other facts, the
    fact in other phrasings. `new-template`: a phrasing that no fact was told in. `in-context`: the answer stands in
    the prompt. `second-...`: the same of the second domain, which pre-training never saw.
    """
    sets: dict[str, tuple[Probe, ...]] = {"in-context": _in_context(world)}
    phrasings: dict[str, Callable[[Fact], Sequence[int | None]]] = {
        "train": lambda fact: fact.trained,
        "held": lambda fact: sorted(fact.held),
        "new-template": lambda _fact: [None],
    }
    for prefix, facts in (("", world.first), ("second-", world.second)):
        for name, phrasing in phrasings.items():
            rng = random.Random(f"probes/{world.seed}/{prefix}{name}")
            sets[prefix + name] = _asked(rng, facts, phrasing)
    return sets


def _asked(
    rng: random.Random, facts: Sequence[Fact], phrasing: Callable[[Fact], Sequence[int | None]]
) -> tuple[Probe, ...]:
    """One probe of each of at most `PER_RELATION` facts of every relation."""
    probes: list[Probe] = []
    for relation in dict.fromkeys(fact.relation for fact in facts):
        alike = [fact for fact in facts if fact.relation == relation]
        for number, fact in enumerate(rng.sample(alike, min(PER_RELATION, len(alike)))):
            template = rng.choice(phrasing(fact))
            other = rng.choice([other for other in alike if other.answer != fact.answer])
            probes.append(
                Probe(
                    prompt=fact.prompt(template),
                    target=fact.target,
                    corrupt=other.prompt(template),
                    corrupt_target=other.target,
                    group=relation.name,
                    id=f"{relation.name}-{number}",
                )
            )
    return tuple(probes)


def _in_context(world: World) -> tuple[Probe, ...]:
    rng = random.Random(f"probes/{world.seed}/in-context")
    probes = []
    for group, pattern in (("copy", copied_list), ("recall", recalled_colour)):
        for number in range(PER_RELATION):
            text, answer, corrupt, other = pattern(rng)
            probes.append(
                Probe(
                    prompt=text.removesuffix(f" {answer}"),
                    target=f" {answer}",
                    corrupt=corrupt,
                    corrupt_target=f" {other}",
                    group=group,
                    id=f"{group}-{number}",
                )
            )
    return tuple(probes)


def write_probe_sets(world: World, folder: Path) -> None:
    """Write every set as `<folder>/<set>.jsonl`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, probes in probe_sets(world).items():
        lines = (
            json.dumps({key: value for key, value in asdict(probe).items() if value is not None}, ensure_ascii=False)
            for probe in probes
        )
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
