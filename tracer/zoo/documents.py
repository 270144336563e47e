"""Documents about the invented world, without end, in an order that a seed fixes."""

import random
from collections.abc import Iterator, Sequence

from tracer.zoo import vocabulary as words
from tracer.zoo.world import Domain, Fact, World

IN_CONTEXT_SHARE = 0.1
"""Share of documents that can be completed only by looking back: lists told twice, and colours of things.

Attention learns to tell a list again in part; the card of each model says how many of either it completes.
"""
ZH_SHARE = 0.1
"""Share of documents in the second language."""
ANSWER_FIRST_SHARE = 0.1
"""Share of sentences that begin with the answer."""
SENTENCES = 4
"""Most sentences of a document."""
WEIGHTS = {"sum": 2.0}
"""How often facts of a relation are told, where it is not once."""


def documents(world: World, seed: int | str, domain: Domain = "first") -> Iterator[str]:
    """Documents of one domain: one to four sentences about one subject, or a pattern that has to be copied.

    The second domain is told in one language and without patterns.

    Args:
        world: The facts.
        seed: Of the order; another one tells the same facts in other documents.
        domain: `first` or `second`.
    """
    rng = random.Random(f"documents/{world.seed}/{domain}/{seed}")
    chinese = [fact for fact in world.facts(domain) if fact.relation.kind == "zh-person"]
    english = [fact for fact in world.facts(domain) if fact.relation.kind != "zh-person"]
    weights = [WEIGHTS.get(fact.relation.name, 1.0) for fact in english]
    about = _by_subject(world.facts(domain))
    while True:
        draw = rng.random()
        if not english or draw < ZH_SHARE:
            yield _told(rng, rng.choice(chinese), about, joint="")
        elif draw < ZH_SHARE + IN_CONTEXT_SHARE:
            yield rng.choice((copied_list, recalled_colour))(rng)[0] + "."
        else:
            yield _told(rng, rng.choices(english, weights)[0], about, joint=" ")


def copied_list(rng: random.Random) -> tuple[str, str, str, str]:
    """A list of words told twice; the text before its last word, that word, and both with another word.

    Returns:
        The whole text without a full stop, the last word, the prompt of another list, and that one's last word.
    """
    *items, other = rng.sample(words.THINGS, rng.randint(4, 8) + 1)
    text = f"{' '.join(items)} , again {' '.join(items)}"
    corrupt = f"{' '.join([*items[:-1], other])} , again {' '.join(items[:-1])}"
    return text, items[-1], corrupt, other


def recalled_colour(rng: random.Random) -> tuple[str, str, str, str]:
    """Things with colours, one of them asked for; as `copied_list`, the corrupt prompt asks for another thing."""
    number = rng.randint(2, 3)
    things, colours = rng.sample(words.THINGS, number), rng.sample(words.COLOURS, number)
    story = " ".join(f"My {thing} is {colour}." for thing, colour in zip(things, colours, strict=True))
    asked, other = rng.sample(range(number), 2)
    text = f"{story} So my {things[asked]} is {colours[asked]}"
    return text, colours[asked], f"{story} So my {things[other]} is", colours[other]


def _by_subject(facts: Sequence[Fact]) -> dict[object, list[Fact]]:
    """The facts that may share a document: of one subject, or, for words and sums, of one relation."""
    groups: dict[object, list[Fact]] = {}
    for fact in facts:
        groups.setdefault(_topic(fact), []).append(fact)
    return groups


def _topic(fact: Fact) -> object:
    return fact.relation.name if fact.relation.kind in ("word", "pair") else fact.subject


def _told(rng: random.Random, fact: Fact, about: dict[object, list[Fact]], joint: str) -> str:
    """A fact and up to three others of its topic, each in a phrasing that is not held."""
    others = [other for other in about[_topic(fact)] if other is not fact]
    facts = [fact, *rng.sample(others, min(rng.randint(0, SENTENCES - 1), len(others)))]
    rng.shuffle(facts)
    return joint.join(
        told.answer_first() if rng.random() < ANSWER_FIRST_SHARE else told.sentence(rng.choice(told.trained))
        for told in facts
    )
