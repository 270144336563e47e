"""Suites that are asked of a model again and again while it is trained: read once, answered item by item."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float

from tracer.engine import DEFAULT_BATCH_TOKENS
from tracer.errors import InputError
from tracer.evaluation.next_token import next_tokens
from tracer.evaluation.texts import (
    CONTEXT,
    TokenizedText,
    bits_per_byte,
    context_of,
    document_log_p,
    is_text,
    read_text,
)
from tracer.models.plain import evaluating
from tracer.models.traced import TracedModel
from tracer.probes import TokenizedProbe, read_probes
from tracer.runs import usable_probes


@dataclass(frozen=True)
class AskedSuite:
    """What is asked.

    Attributes:
        suite: a probe set, as in `tracer.read_probes`, or a text: a `.txt` file, a folder of them, `.jsonl`, `.json` or
            `.parquet`.
        groups: of a probe set, only these.
        limit: only the first so many probes of each group, or documents of a text.
        data: for the questions of a benchmark (`ceval:val`), the folder of a local copy, as in `tracer.evaluate`.
    """

    suite: str
    groups: list[str] | None = None
    limit: int | None = None
    data: str | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise InputError(f"limit {self.limit}: pass at least 1")


@dataclass(frozen=True)
class Answers:
    """What a model made of a suite.

    Attributes:
        log_p: `[item]` log-probability (nats) of each probe's target, or of each document.
        answered: `[item]` whether a probe's target is the most likely token; None for a text.
    """

    log_p: Float[np.ndarray, " item"]
    answered: Bool[np.ndarray, " item"] | None


@dataclass(frozen=True)
class Items:
    """What a suite is made of, as one model reads it.

    Attributes:
        kind: of its items.
        names: of each item: a probe's id, or the number of a document.
        groups: of each probe; of documents always the same.
        tokens: of each document; 1 for a probe.
        bytes: of each document in UTF-8; 0 for a probe.
    """

    kind: Literal["probes", "text"]
    names: tuple[str, ...]
    groups: tuple[str, ...]
    tokens: tuple[int, ...]
    bytes: tuple[int, ...]

    def measures(self, answers: Answers, which: Bool[np.ndarray, " item"] | None = None) -> dict[str, Any]:
        """Means over some items, or over all.

        Returns:
            Of probes `n`, `accuracy` and mean `log_p` (nats); of a text `n` (documents), `loss` (nats a token) and
            `bits_per_byte`.
        """
        kept = np.arange(len(self.names)) if which is None else np.flatnonzero(which)
        log_p = answers.log_p[kept]
        if answers.answered is not None:
            return {
                "n": len(kept),
                "accuracy": float(answers.answered[kept].mean()),
                "log_p": float(log_p.mean()),
            }
        total = float(log_p.sum())
        return {
            "n": len(kept),
            "loss": -total / float(np.array(self.tokens)[kept].sum()),
            "bits_per_byte": bits_per_byte(total, float(np.array(self.bytes)[kept].sum())),
        }


class Questions:
    """Suites as one model reads them, to be asked at any state of its weights.

    Args:
        model: has the tokenizer, and answers.
        suites: by name.
        context: tokens that a prediction in a text rests on at most.

    Attributes:
        items: what each suite is made of.

    Raises:
        InputError: a suite cannot be read, or not by this model; names the suite.
    """

    def __init__(self, model: TracedModel, suites: Mapping[str, AskedSuite], context: int = CONTEXT):
        self.model = model
        self.context = context_of(model, context)
        self._probes: dict[str, tuple[TokenizedProbe, ...]] = {}
        self._texts: dict[str, TokenizedText] = {}
        self.items: dict[str, Items] = {}
        for name, asked in suites.items():
            try:
                self._read(name, asked)
            except InputError as error:
                raise InputError(f"{name}: {error}") from error

    def _read(self, name: str, asked: AskedSuite) -> None:
        if is_text(asked.suite):
            if asked.groups is not None:
                raise InputError(f"{asked.suite!r} is a text, which has no groups: leave them out")
            text = read_text(self.model, asked.suite, limit=asked.limit)
            self._texts[name] = text
            number = len(text.documents)
            self.items[name] = Items(
                "text",
                tuple(map(str, range(number))),
                ("all",) * number,
                tuple(text.tokens.tolist()),
                tuple(text.bytes.tolist()),
            )
            return
        read = read_probes(asked.suite, skip_bad=True, groups=asked.groups, data=asked.data)
        found = usable_probes(self.model, read, target="single", limit=asked.limit, skip_bad=True).items
        self._probes[name] = found
        self.items[name] = Items(
            "probes",
            tuple(item.probe.id for item in found),
            tuple(item.probe.group for item in found),
            (1,) * len(found),
            (0,) * len(found),
        )

    def ask(self, batch_tokens: int = DEFAULT_BATCH_TOKENS) -> dict[str, Answers]:
        """What the model makes of each suite now.

        Args:
            batch_tokens: most tokens in one forward.
        """
        found = {}
        with evaluating(self.model.model):
            for name in self.items:
                if name in self._texts:
                    log_p = document_log_p(
                        self.model.adapter.forward, self._texts[name], context=self.context, batch_tokens=batch_tokens
                    )
                    found[name] = Answers(log_p, None)
                    continue
                said = next_tokens(self.model.adapter.forward, self._probes[name], batch_tokens=batch_tokens)
                found[name] = Answers(said.log_p.numpy(), said.answered.numpy())
        return found
