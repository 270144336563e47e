"""The tokenizer of the zoo: byte-level BPE, trained on the world's own text."""

from collections.abc import Iterator
from itertools import islice

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tracer.zoo import vocabulary as words
from tracer.zoo.documents import documents
from tracer.zoo.world import World

VOCABULARY = 1600
"""Tokens, at most: fewer where all words of the world are whole before."""
BOS = "<s>"
"""Begins every document, and every prompt."""

DOCUMENTS, COPIES = 20_000, 2_000


def make_tokenizer(world: World) -> PreTrainedTokenizerFast:
    """Train the tokenizer on documents of both domains.

    Every word begins with its space, also the first one of a text. Chinese characters stand alone. The world's names,
    answers and things are repeated so often that each becomes one token.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Prepend(" ")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[\u3000-\u9fff\uff00-\uffef]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_text(world), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=BOS, pad_token=BOS, clean_up_tokenization_spaces=False
    )


def _text(world: World) -> Iterator[str]:
    yield from islice(documents(world, "tokenizer"), DOCUMENTS)
    yield from islice(documents(world, "tokenizer", "second"), DOCUMENTS // 10)
    named = {part for fact in world.first for text in (*fact.subject, fact.answer) for part in text.split()}
    for word in sorted(named | {*words.THINGS, *words.COLOURS, *words.NUMBERS}):
        yield f"{word} " * COPIES
