"""An invented world: its facts, drawn from a seed, and which phrasing of each fact is kept out of training.

A language model of the zoo knows nothing else, so that what it should answer is known exactly. The first domain is what
the models are pre-trained on; the second one, new people in Chinese, is for continued pre-training.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from tracer.zoo import vocabulary as words
from tracer.zoo.vocabulary import ENDINGS, RELATIONS, Relation

Domain = Literal["first", "second"]

WORLD_SEED = 0
"""The world that the shipped models know."""

CONSONANTS = "bdfgklmnprstvz"
PEOPLE, COUNTRIES, SUMMANDS, ZH_PEOPLE, NEW_ZH_PEOPLE = 120, 40, 10, 40, 60


@dataclass(frozen=True)
class Fact:
    """One fact of the world.

    Attributes:
        relation: What is said.
        subject: Of whom; two numbers for a sum, one text otherwise.
        answer: The word that completes a sentence, without a space before it.
        held: Indices of the relation's templates in which the fact is never told in training.
    """

    relation: Relation
    subject: tuple[str, ...]
    answer: str
    held: frozenset[int]

    @property
    def trained(self) -> tuple[int, ...]:
        """Indices of the templates in which the fact is told in training."""
        return tuple(i for i in range(len(self.relation.templates)) if i not in self.held)

    @property
    def target(self) -> str:
        """What follows a prompt: the answer, after a space where the language has them."""
        return self.answer if self.relation.kind == "zh-person" else f" {self.answer}"

    def prompt(self, template: int | None) -> str:
        """The sentence up to its answer, in a template of the relation or, with None, in the unseen one."""
        text = self.relation.unseen if template is None else self.relation.templates[template]
        return text.format(*self.subject)

    def sentence(self, template: int) -> str:
        """A whole sentence that ends with the answer."""
        stop = "。" if self.relation.kind == "zh-person" else "."
        return self.prompt(template) + self.target + ENDINGS.get(self.relation.name, "") + stop

    def answer_first(self) -> str:
        """A whole sentence that begins with the answer; no probe is made of it."""
        stop = "。" if self.relation.kind == "zh-person" else "."
        return self.relation.answer_first.format(*self.subject, answer=self.answer) + stop


@dataclass(frozen=True)
class World:
    """All facts of both domains.

    Attributes:
        seed: What they were drawn from.
        first: Facts of the domain that models are pre-trained on, in English and Chinese.
        second: Facts of the domain for continued pre-training, in Chinese, of other people.
    """

    seed: int
    first: tuple[Fact, ...]
    second: tuple[Fact, ...]

    def facts(self, domain: Domain) -> tuple[Fact, ...]:
        """The facts of one domain."""
        return self.first if domain == "first" else self.second


def make_world(seed: int = WORLD_SEED) -> World:
    """Draw a world.

    Args:
        seed: The same seed gives the same world, on every machine.
    """
    rng = random.Random(f"world/{seed}")
    given, family = _names(rng, 20, "en"), _names(rng, 24, "ol")
    places, countries = _names(rng, COUNTRIES, "a"), _names(rng, COUNTRIES, "ia")
    currencies, languages = [name.lower() for name in _names(rng, 16, "uk")], _names(rng, 16, "ese")
    people = rng.sample([f"{a} {b}" for a, b in product(given, family)], PEOPLE)
    chinese = rng.sample([a + b for a, b in product(words.ZH_FIRST, words.ZH_SECOND)], ZH_PEOPLE + NEW_ZH_PEOPLE)
    choices: dict[str, Sequence[str]] = {
        "birthplace": places,
        "job": words.JOBS,
        "colour": words.COLOURS,
        "pet": words.PETS,
        "currency": currencies,
        "language": languages,
        "flag": words.FLAGS,
        "material": words.MATERIALS,
        "shape": words.SHAPES,
        "room": words.ROOMS,
        "zh-town": words.ZH_TOWNS,
        "zh-job": words.ZH_JOBS,
        "zh-colour": words.ZH_COLOURS,
        "zh-pet": words.ZH_PETS,
    }
    subjects = {"person": people, "country": countries, "thing": words.THINGS, "zh-person": chinese[:ZH_PEOPLE]}
    capitals = dict(zip(countries, rng.sample(places, COUNTRIES), strict=True))
    opposites = dict(zip(words.ANTONYMS[::2], words.ANTONYMS[1::2], strict=True))
    opposites |= {b: a for a, b in opposites.items()}
    first: list[Fact] = []
    second: list[Fact] = []
    for relation in RELATIONS:
        pairs: list[tuple[tuple[str, ...], str]]
        if relation.name == "capital":
            pairs = [((country,), capital) for country, capital in capitals.items()]
        elif relation.name == "antonym":
            pairs = [((word,), opposite) for word, opposite in opposites.items()]
        elif relation.name == "sum":
            pairs = [
                ((words.NUMBERS[a - 1], words.NUMBERS[b - 1]), words.NUMBERS[a + b - 1])
                for a in range(1, SUMMANDS + 1)
                for b in range(a, SUMMANDS + 1)
            ]
        else:
            pairs = [((subject,), rng.choice(choices[relation.name])) for subject in subjects[relation.kind]]
        first += [Fact(relation, *pair, _held(rng, relation)) for pair in pairs]
        if relation.kind == "zh-person":
            # An answer that the first domain never gives would have an embedding that was never trained.
            known = sorted({answer for _, answer in pairs})
            second += [
                Fact(relation, (subject,), rng.choice(known), _held(rng, relation)) for subject in chinese[ZH_PEOPLE:]
            ]
    return World(seed, tuple(first), tuple(second))


def _names(rng: random.Random, number: int, ending: str) -> list[str]:
    """Distinct invented names, capitalised."""
    names: dict[str, None] = {}
    while len(names) < number:
        first, second = rng.choice(CONSONANTS), rng.choice(CONSONANTS)
        names[f"{first}{rng.choice('aeiou')}{second}{ending}".capitalize()] = None
    return list(names)


def _held(rng: random.Random, relation: Relation) -> frozenset[int]:
    """One or two templates of a relation."""
    return frozenset(rng.sample(range(len(relation.templates)), rng.choice((1, 2))))
