"""The invented world: what is told in training, what is held back, and the probe sets made of both."""

from collections import Counter
from itertools import islice

import pytest
from transformers import PreTrainedTokenizerFast

from tracer.probes import ProbeSet, read_probes, tokenize
from tracer.zoo.documents import documents
from tracer.zoo.questions import PER_RELATION, probe_sets, write_probe_sets
from tracer.zoo.tokenizer import make_tokenizer
from tracer.zoo.vocabulary import RELATIONS
from tracer.zoo.world import World, make_world

TOLD = 10_000


@pytest.fixture(scope="module")
def world() -> World:
    return make_world()


@pytest.fixture(scope="module")
def told(world: World) -> str:
    return "\n".join(islice(documents(world, 0), TOLD))


@pytest.fixture(scope="module")
def tokenizer(world: World) -> PreTrainedTokenizerFast:
    return make_tokenizer(world)


def test_a_seed_gives_one_world_and_another_seed_another(world):
    assert make_world(0) == world
    assert make_world(1).first != world.first
    assert list(islice(documents(world, 3), 50)) == list(islice(documents(world, 3), 50))
    assert list(islice(documents(world, 3), 50)) != list(islice(documents(world, 4), 50))


def test_there_are_a_thousand_facts_of_every_relation(world):
    counts = Counter(fact.relation.name for fact in world.first)
    assert sum(counts.values()) >= 1000
    assert set(counts) == {relation.name for relation in RELATIONS}
    assert min(counts.values()) >= PER_RELATION
    asked = [(fact.relation.name, fact.subject) for fact in (*world.first, *world.second)]
    assert len(set(asked)) == len(asked), "one answer per question"


def test_a_fact_is_never_told_in_a_phrasing_that_is_held(world, told):
    sentences = {sentence for line in told.split("\n") for sentence in _sentences(line)}
    held = {fact.sentence(template) for fact in world.first for template in fact.held}
    trained = {fact.sentence(template) for fact in world.first for template in fact.trained}
    assert not held & sentences
    assert len(trained & sentences) > 0.98 * len(trained), "and nearly every other phrasing is told"


def _sentences(line: str) -> list[str]:
    end = "。" if "。" in line else "."
    return [part.strip() + end for part in line.split(end) if part.strip()]


def test_the_unseen_phrasings_are_never_told_but_their_words_are(world, told, tokenizer):
    known = {token for ids in tokenizer(told.split("\n"))["input_ids"] for token in ids}
    for fact in world.first:
        assert fact.prompt(None) + fact.target not in told, "not even inside another phrasing"
        assert set(tokenizer(fact.prompt(None))["input_ids"]) <= known


def test_the_second_domain_speaks_of_others(world, told):
    assert not {fact.subject for fact in world.first} & {fact.subject for fact in world.second}
    assert not [fact for fact in world.second if fact.subject[0] in told]
    answers = {fact.target for fact in world.second}
    assert answers <= {fact.target for fact in world.first}, "so that its answers have trained embeddings"
    second = "\n".join(islice(documents(world, 0, "second"), 5000))
    held = {fact.prompt(template) + fact.target for fact in world.second for template in fact.held}
    assert not [sentence for sentence in held if sentence in second]


def test_every_target_is_one_token_and_corrupt_prompts_are_as_long(world, tokenizer):
    for name, probes in probe_sets(world).items():
        found = tokenize(ProbeSet(name, probes), tokenizer)
        assert len(found.items) == len(probes)
        assert not found.corrupt_skipped
        assert not found.warnings
        for item in found.items:
            assert len(item.corrupt_ids) == len(item.prompt_ids)
            assert item.corrupt_target_id != item.target_ids[0]
            assert item.prompt_ids.count(tokenizer.bos_token_id) == 1


def test_the_tokenizer_gives_back_any_text(tokenizer):
    for text in ("Dalen Vabol was born in Taba.", "露安的家乡是竹城。", "ünknown wörds 🙂, 3.14\ttabs"):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == f" {text}"


def test_in_context_answers_stand_in_the_prompt(world):
    for probe in probe_sets(world)["in-context"]:
        assert probe.target in f" {probe.prompt}".replace(".", " ").replace(",", " ")
        assert probe.corrupt_target in f" {probe.corrupt}".replace(".", " ")
        if probe.group == "copy":
            first, again = (half.split() for half in probe.prompt.split(" , again "))
            assert first == [*again, probe.target.strip()]


def test_the_shipped_sets_are_those_of_the_world(world, tmp_path):
    write_probe_sets(world, tmp_path)
    for path in tmp_path.glob("*.jsonl"):
        shipped = read_probes(f"zoo/{path.stem}")
        assert shipped.shipped
        assert shipped.probes == read_probes(path).probes, "make zoo writes the probe sets anew"


def test_collections_of_language_leave_the_zoo_out():
    assert not [probe for probe in read_probes("all") if probe.group in {relation.name for relation in RELATIONS}]
