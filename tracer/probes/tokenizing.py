"""Probes as token ids, under the tokenizer of one model."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, cast, get_args, runtime_checkable

from tracer.errors import InputError
from tracer.probes.reading import Probe, ProbeSet, Skipped

TargetReading = Literal["single", "first", "joint"]
"""How a target is read: exactly one token, the first of several, or all of them (teacher-forced product)."""

MIN_USABLE = 10
"""A group with fewer usable probes than this is reported as not measurable."""

_SENTENCE_MARKS = ",;:.!?)"


@runtime_checkable
class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that probes need."""

    bos_token_id: int | None
    unk_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, token_ids: list[int]) -> Any:
        """Text of token ids; annotated loosely, since a Hugging Face tokenizer also decodes batches."""
        ...


@dataclass(frozen=True)
class TokenizedProbe:
    """A probe as token ids.

    Attributes:
        probe: The probe.
        prompt_ids: `[pos]`, with the BOS that the tokenizer intends (none or one), never an EOS; as given where the
            probe is token ids.
        target_ids: `[n_target]`, the ids that follow `prompt_ids`; one id unless the reading is `joint`.
        corrupt_ids: `[pos]`, as long as `prompt_ids` unless unequal pairs were asked for, or None where the probe has
            no usable corrupt prompt.
        corrupt_target_id: The single id of the corrupt target; None together with `corrupt_ids`.
    """

    probe: Probe
    prompt_ids: tuple[int, ...]
    target_ids: tuple[int, ...]
    corrupt_ids: tuple[int, ...] | None = None
    corrupt_target_id: int | None = None


@dataclass(frozen=True)
class TokenizedProbes:
    """A probe set under one tokenizer.

    Attributes:
        items: The usable probes, in the order of the set.
        skipped: Probes that this tokenizer cannot represent, with the reason.
        reading: How targets were read.
        groups: All groups of the set, also those without a usable probe.
        warnings: Probes that are kept although something about them is suspect.
        corrupt_skipped: Probes that are kept without their corrupt prompt, with the reason.
    """

    items: tuple[TokenizedProbe, ...]
    skipped: tuple[Skipped, ...]
    reading: TargetReading
    groups: tuple[str, ...]
    warnings: tuple[Skipped, ...] = ()
    corrupt_skipped: tuple[Skipped, ...] = ()

    def usable(self) -> dict[str, int]:
        """Number of usable probes per group, in the order of the set."""
        counts = dict.fromkeys(self.groups, 0)
        for item in self.items:
            counts[item.probe.group] += 1
        return counts

    @property
    def unmeasurable(self) -> tuple[str, ...]:
        """Groups with fewer than `MIN_USABLE` usable probes."""
        return tuple(group for group, count in self.usable().items() if count < MIN_USABLE)

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[TokenizedProbe]:
        return iter(self.items)


def token_ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Ids `[pos]` of a text as a language model reads the start of a document.

    The special tokens that the tokenizer puts in front are kept, once: a BOS that the text already holds is
    not doubled. What it appends (EOS, SEP) is dropped, since the text goes on.

    Raises:
        InputError: The text has no tokens of its own, or they change when special tokens are added.
    """
    body = list(tokenizer.encode(text, add_special_tokens=False))
    full = list(tokenizer.encode(text, add_special_tokens=True))
    if not body:
        raise InputError(f"{text!r} has no tokens")
    starts = range(len(full) - len(body) + 1)
    start = next((i for i in starts if full[i : i + len(body)] == body), None)
    if start is None:
        raise InputError(f"the tokenizer reads {text!r} differently when it adds special tokens")
    # A text that was saved with its special tokens, from a chat template for instance, needs no second set of them.
    ids = body if body[:start] == full[:start] else full[:start] + body
    while len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        ids.pop(0)
    return tuple(ids)


def tokenize(
    probes: ProbeSet,
    tokenizer: Tokenizer | None,
    *,
    target: TargetReading = "single",
    skip_bad: bool = False,
    unequal: bool = False,
) -> TokenizedProbes:
    """Turn probes into token ids.

    The ids of prompt and target come from tokenizing both together; the prompt's own ids must be a prefix. Probes that
    are token ids already are taken as they are.

    Args:
        probes: The probes.
        tokenizer: A Hugging Face tokenizer; None where there is none, and every probe is token ids.
        target: `single` refuses a target of several tokens, `first` keeps the first one (also of the corrupt target),
            `joint` all.
        skip_bad: Skip and count unusable probes also in a set that is not shipped.
        unequal: Keep corrupt prompts that are not as long as their prompt.

    Raises:
        InputError: A probe of a user's set is unusable: the prompt's ids are no prefix of the joint ids (a
            trailing space, for instance), prompt or target has no tokens, the target is not in the vocabulary
            or has several tokens under `single`. Or a probe is text where there is no tokenizer.
    """
    if target not in get_args(TargetReading):
        raise InputError(f"target={target!r}: pass one of {', '.join(get_args(TargetReading))}")
    text = next((probe for probe in probes if probe.prompt_ids is None), None)
    if tokenizer is None and text is not None:
        raise InputError(
            f"probe {text.id} is text and the model has no tokenizer: pass tokenizer= to load, or probes as token ids "
            "(prompt_ids and target_id)"
        )
    prefixes_space = tokenizer is not None and _prefixes_space(tokenizer)
    items: list[TokenizedProbe] = []
    skipped: list[Skipped] = []
    warnings: list[Skipped] = []
    corrupt_skipped: list[Skipped] = []
    for probe in probes:
        try:
            prompt_ids, target_ids = _ids_of(probe, tokenizer, prefixes_space)
            if target == "single" and len(target_ids) > 1:
                tokens = " ".join(str(t) if tokenizer is None else repr(tokenizer.decode([t])) for t in target_ids)
                raise InputError(
                    f"target {probe.target or probe.target_ids!r} has {len(target_ids)} tokens ({tokens}): "
                    "pass target='first' or 'joint', or a target of one token"
                )
        except InputError as error:
            if not (probes.shipped or skip_bad):
                raise InputError(f"probe {probe.id}: {error}") from error
            skipped.append(Skipped(probe.id, str(error)))
            continue
        if target == "first":
            target_ids = target_ids[:1]
        if tokenizer is not None and probe.prompt_ids is None:
            warnings += [Skipped(probe.id, reason) for reason in _suspicions(tokenizer, probe, prompt_ids, target_ids)]
        item = TokenizedProbe(probe, prompt_ids, target_ids)
        try:
            pair = _corrupt_ids_of(probe, tokenizer, prefixes_space)
            if pair is not None:
                corrupt_ids, corrupt_target_ids = pair
                corrupt_target_ids = corrupt_target_ids[:1] if target == "first" else corrupt_target_ids
                item = _with_corrupt(item, corrupt_ids, corrupt_target_ids, unequal)
        except InputError as error:
            corrupt_skipped.append(Skipped(probe.id, str(error)))
        items.append(item)
    return TokenizedProbes(tuple(items), tuple(skipped), target, probes.groups, tuple(warnings), tuple(corrupt_skipped))


def _ids_of(probe: Probe, tokenizer: Tokenizer | None, prefixes_space: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids of prompt and target."""
    if probe.prompt_ids is not None:
        return tuple(probe.prompt_ids), tuple(probe.target_ids or (cast(int, probe.target_id),))
    assert tokenizer is not None
    assert probe.prompt is not None
    assert probe.target is not None
    return _joint_ids(tokenizer, probe.prompt, probe.target, prefixes_space)


def _corrupt_ids_of(
    probe: Probe, tokenizer: Tokenizer | None, prefixes_space: bool
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Ids of the corrupt prompt and its target, where the probe has them."""
    if probe.corrupt_ids is not None and probe.corrupt_target_id is not None:
        return tuple(probe.corrupt_ids), (probe.corrupt_target_id,)
    if probe.corrupt is None or probe.corrupt_target is None or tokenizer is None:
        return None
    return _joint_ids(tokenizer, probe.corrupt, probe.corrupt_target, prefixes_space)


def _prefixes_space(tokenizer: Tokenizer) -> bool:
    """Whether a text's start is read as a word's start (the dummy prefix of SentencePiece)."""

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    word = ids("a")
    return ids("b a")[-len(word) :] == word != ids("ba")[-len(word) :]


def _runs_into(prompt: str, target: str) -> bool:
    """Whether the target lacks the space that its script would put after the prompt's end."""
    last, first = prompt[-1], target[0]
    if last in _SENTENCE_MARKS:
        return _in_word(first) and first.isalpha()
    return _in_word(last) and _in_word(first) and not (last.isdigit() and first.isdigit())


def _in_word(character: str) -> bool:
    # Scripts from Latin to Malayalam put spaces between words; Thai (U+0E00) and most after it do not.
    return character.isalnum() and ord(character) < 0x0E00


def _joint_ids(
    tokenizer: Tokenizer, prompt: str, target: str, prefixes_space: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids of a prompt, and of the target as it follows this prompt."""
    # Such a tokenizer reads "Paris" alone as " Paris", so the two must mean the same target here too.
    space = " " if prefixes_space and _runs_into(prompt, target) else ""
    prompt_ids = token_ids(tokenizer, prompt)
    joint = token_ids(tokenizer, prompt + space + target)
    if joint[: len(prompt_ids)] != prompt_ids:
        if prompt[-1].isspace():
            raise InputError(
                f"the prompt {prompt!r} ends with a space that the tokenizer joins to the target {target!r}: "
                "move the space to the beginning of the target"
            )
        raise InputError(
            f"the tokenizer joins the end of the prompt {prompt!r} to the target {target!r}: "
            "end the prompt where a token ends (targets of most languages begin with a space)"
        )
    target_ids = joint[len(prompt_ids) :]
    if not target_ids:
        raise InputError(f"target {target!r} adds no token to the prompt")
    if tokenizer.bos_token_id is not None and tokenizer.bos_token_id in target_ids:
        raise InputError(f"target {target!r} holds the beginning-of-text token: leave it out")
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in target_ids:
        raise InputError(f"target {target!r} is not in the tokenizer's vocabulary")
    return prompt_ids, target_ids


def _suspicions(
    tokenizer: Tokenizer, probe: Probe, prompt_ids: tuple[int, ...], target_ids: tuple[int, ...]
) -> Iterator[str]:
    assert probe.prompt is not None
    assert probe.target is not None
    if probe.prompt[-1] in " \t":
        yield "the prompt ends with a space: targets usually begin with it"
    if _runs_into(probe.prompt, probe.target):
        yield f"target {probe.target!r} begins without a space after {probe.prompt[-1]!r}"
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in prompt_ids:
        yield "the prompt holds words that are not in the tokenizer's vocabulary"
    if len(target_ids) == 1 and "\ufffd" in tokenizer.decode(list(target_ids)):
        yield f"token {target_ids[0]} is a fragment of a character, shared by many targets"


def _with_corrupt(
    item: TokenizedProbe, corrupt_ids: tuple[int, ...], corrupt_target_ids: tuple[int, ...], unequal: bool
) -> TokenizedProbe:
    if len(corrupt_ids) != len(item.prompt_ids) and not unequal:
        raise InputError(f"corrupt prompt has {len(corrupt_ids)} tokens where the prompt has {len(item.prompt_ids)}")
    if len(corrupt_target_ids) != 1:
        raise InputError(f"corrupt target {item.probe.corrupt_target!r} has {len(corrupt_target_ids)} tokens")
    if corrupt_ids == item.prompt_ids or corrupt_target_ids == item.target_ids[:1]:
        raise InputError("corrupt prompt or corrupt target equals the clean one")
    return replace(item, corrupt_ids=corrupt_ids, corrupt_target_id=corrupt_target_ids[0])
