"""A freeze plan: which blocks are trained and which are frozen, and the same for embeddings, final norm and head."""

import hashlib
import json
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import pandas as pd
from matplotlib.figure import Figure
from torch import nn

from tracer.errors import InputError, one_of
from tracer.freezing.findings import findings_for
from tracer.freezing.rules import Choice, choose
from tracer.models.parts import OUTER, Parts, parts_of
from tracer.models.selfcheck import open_plain
from tracer.models.traced import TRANSFORMER_LENS, TracedModel
from tracer.results import TraceResult, plain_data
from tracer.summary import spans

Decision = Literal["train", "freeze"]

SCHEMA = 1
FEWEST = 0.1
"""Smallest share of the blocks that a plan may freeze, or train, unless it is allowed to."""

WIDTH = 100


@dataclass(frozen=True)
class Applied:
    """What a plan has made of a model.

    Attributes:
        trained: names of the parameters that are trained.
        frozen: names of those that are not.
        n_trained: numbers in the former, each counted once.
        n_frozen: numbers in the latter.
    """

    trained: tuple[str, ...]
    frozen: tuple[str, ...]
    n_trained: int
    n_frozen: int


@dataclass(frozen=True)
class FreezePlan:
    """Which parts of a model are trained; made by `tracer.plan`.

    Attributes:
        rule: the rule that chose the blocks.
        train: 0-based blocks that are trained, ascending.
        freeze: those that are not.
        embeddings: what happens to everything before the blocks. Where the head is tied to it, to both.
        norm: likewise to the final norm.
        head: likewise to the unembedding.
        model: of which model: `name`, `kind`, `fingerprint`, `class`, `tied`, and its `parts`, as `Parts.as_dict` gives
            them.
        evidence: what the choice rests on: `run` (folder and digest of the trace, if one was asked), the rule's
            numbers, and `why`.
        blocks: one row a block: `block`, `mixer`, `particles` (share of the answered probes whose particle it is),
            `jsd` (of the ablation that the evidence names, or the first of the trace), `decision`, `parameters`.
    """

    rule: str
    train: tuple[int, ...]
    freeze: tuple[int, ...]
    embeddings: Decision
    norm: Decision
    head: Decision
    model: Mapping[str, Any]
    evidence: Mapping[str, Any]
    blocks: Sequence[Mapping[str, Any]]

    def apply(self, model: nn.Module | TracedModel) -> Applied:
        """Set `requires_grad` of every parameter, and forget the gradients of those that are frozen.

        Before it is wrapped, compiled or dispatched, and after its vocabulary is resized. What text does not run
        through, such as a vision tower, is frozen.

        Args:
            model: the model that the plan is for, or one with the same parts, such as a later checkpoint of it.

        Raises:
            InputError: the model has other parts than the plan says.
            ModelRefused: its blocks cannot be found.
        """
        root, parts = _parts(model)
        self.check_parts(parts)
        decisions: dict[str, Decision] = dict.fromkeys(parts.idle.sizes, "freeze")
        for names, decision in self._decided(parts):
            for name in names:
                if decisions.setdefault(name, decision) != decision:
                    raise InputError(
                        f"{name} belongs to parts of which one is trained and the other frozen: decide alike on both"
                    )
        for name, parameter in root.named_parameters():
            trained = decisions[name] == "train"
            parameter.requires_grad_(trained)
            if not trained:
                parameter.grad = None
        sizes = {name: parameter.numel() for name, parameter in root.named_parameters()}
        trained_names = tuple(name for name in sizes if decisions[name] == "train")
        frozen_names = tuple(name for name in sizes if decisions[name] == "freeze")
        counts = [sum(sizes[name] for name in names) for names in (trained_names, frozen_names)]
        return Applied(trained_names, frozen_names, *counts)

    def check_parts(self, parts: Parts) -> None:
        """Raise InputError when a model has other parts than the one that the plan was made for."""
        planned, found = self.model["parts"], parts.as_dict()
        for key in ("blocks", *OUTER):
            if planned[key] != json.loads(json.dumps(found[key])):
                raise InputError(
                    f"the plan was made for {self.model['name']} ({self.model['class']}), whose {key} differ from "
                    "those of this model: trace this model and plan anew"
                )

    def _decided(self, parts: Parts) -> list[tuple[tuple[str, ...], Decision]]:
        train = set(self.train)
        blocks: list[tuple[tuple[str, ...], Decision]] = [
            (tuple(part.sizes), "train" if block in train else "freeze") for block, part in enumerate(parts.blocks)
        ]
        return [*blocks, *((tuple(getattr(parts, name).sizes), getattr(self, name)) for name in OUTER)]

    @property
    def parameters(self) -> dict[str, int]:
        """Numbers in the parameters that are trained, and in all of them (`trained`, `total`), each counted once."""
        counted = {name: size for part in self._trained() for name, size in part["sizes"].items()}
        return {"trained": sum(counted.values()), "total": self.model["parts"]["total"]}

    def trained_names(self) -> frozenset[str]:
        """Names of the parameters that are trained."""
        return frozenset(name for part in self._trained() for name in part["sizes"])

    def _trained(self) -> list[Mapping[str, Any]]:
        """The parts that are trained, as `Parts.as_dict` gives them."""
        parts = self.model["parts"]
        blocks = [parts["blocks"][block] for block in self.train]
        return [*blocks, *(parts[name] for name in OUTER if getattr(self, name) == "train")]

    def axolotl(self) -> list[str]:
        """`unfrozen_parameters` of axolotl: patterns that match exactly the parameters that are trained."""
        patterns: list[str] = []
        for part in self._trained():
            if part["module"] is not None and all(name.startswith(f"{part['module']}.") for name in part["sizes"]):
                patterns.append(f"^{re.escape(part['module'])}\\.")
            else:  # a tied head has the name of the embedding
                patterns += [f"^{re.escape(name)}$" for name in part["sizes"]]
        return list(dict.fromkeys(patterns))

    def peft(self) -> dict[str, Any]:
        """`layers_to_transform` and `layers_pattern` of PEFT, whose adapters then stand in the trained blocks only.

        Raises:
            InputError: the blocks are not the items of one list.
        """
        names = [part["module"] for part in self.model["parts"]["blocks"]]
        lists = {name.rpartition(".")[0] for name in names}
        if len(lists) > 1 or [name.rpartition(".")[2] for name in names] != [str(i) for i in range(len(names))]:
            raise InputError(f"the blocks of {self.model['class']} are not the items of one list, which PEFT needs")
        return {"layers_to_transform": list(self.train), "layers_pattern": lists.pop().rpartition(".")[2]}

    def to_frame(self) -> pd.DataFrame:
        """One row a block."""
        return pd.DataFrame([dict(row) for row in self.blocks])

    def summary(self) -> str:
        """The plan as text for a terminal."""
        table = self.to_frame()
        shown = pd.DataFrame(
            {
                "block": table["block"],
                "mixer": table["mixer"],
                "particles": ["" if pd.isna(share) else f"{share:.0%}" for share in table["particles"]],
                "JSD": ["" if pd.isna(jsd) else f"{jsd:.3f}" for jsd in table["jsd"]],
                "decision": table["decision"],
                "parameters": [f"{number:,}" for number in table["parameters"]],
            }
        )
        counts = self.parameters
        parts = self.model["parts"]
        sizes = {name: sum(parts[name]["sizes"].values()) for name in OUTER}
        outer = ", ".join(f"{name} {getattr(self, name)} ({sizes[name]:,})" for name in OUTER)
        tied = "; the head is the embedding, one tensor" if self.model["tied"] else ""
        lines = [
            f"Freeze plan {self.rule} for {self.model['name']} ({self.model['class']})",
            f"train {spans(self.train)}; freeze {spans(self.freeze)}",
            f"{outer}{tied}",
            f"{counts['trained']:,} of {counts['total']:,} parameters are trained "
            f"({counts['trained'] / counts['total']:.1%})",
            *(textwrap.fill(f"because {why}", WIDTH, subsequent_indent="  ") for why in self.evidence["why"]),
        ]
        found = [
            textwrap.fill(f"A plan is a hypothesis: {sentence}", WIDTH, subsequent_indent="  ")
            for sentence in findings_for(table["mixer"])
        ]
        return "\n".join([*lines, "", shown.to_string(index=False), *(["", *found] if found else [])])

    def plot(self) -> Figure:
        """Draw the plan over the blocks, with the numbers that it rests on."""
        from tracer.plots.plan import draw_plan

        return draw_plan(self)

    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Write the plan as JSON.

        Raises:
            InputError: there is a file already, unless `force`, or it cannot be written.
        """
        target = Path(path)
        if target.exists() and not force:
            raise InputError(f"{str(target)!r} exists: pass another file, or force to replace it")
        data = {"schema": SCHEMA, **plain_data(asdict(self))}
        staged = target.with_name(f".{target.name}.writing")
        try:
            staged.write_text(json.dumps(data, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
            os.replace(staged, target)
        except OSError as error:
            staged.unlink(missing_ok=True)
            raise InputError(f"cannot write {str(target)!r}: {error.strerror or error}") from error
        return target

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "FreezePlan":
        """Read a saved plan.

        Raises:
            InputError: there is none, it is damaged, or a later version wrote it.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            schema = data.pop("schema")
            if schema != SCHEMA:
                raise InputError(f"{str(path)!r} has plan schema {schema}, this version reads {SCHEMA}: plan again")
            return cls(**data | {"train": tuple(data["train"]), "freeze": tuple(data["freeze"])})
        except OSError as error:
            raise InputError(f"cannot read the plan {str(path)!r}: {error.strerror or error}") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{str(path)!r} is no freeze plan ({error}): pass a file of tracer plan") from error


def plan(
    run: TraceResult | TracedModel | str | os.PathLike[str],
    rule: str = "particle",
    *,
    ablation: str | None = None,
    embeddings: str = "train",
    norm: str = "train",
    head: str = "train",
    allow_degenerate: bool = False,
    out: str | os.PathLike[str] | None = None,
    force: bool = False,
) -> FreezePlan:
    """Turn a trace into a freeze plan.

    Args:
        run: a trace, or the folder that it is saved in; for the rules that ask none, also an opened model.
        rule: which blocks are trained: `particle` (those before the median task particle, as in *Freeze Deep, Train
            Shallow*, arXiv 2605.11416), `fragile:K` (the K most fragile), `robust:K` (all but the K least fragile),
            `update-stable:K` (all but the K that a perturbation of their weights moves least), `shallow:K`, `deep:K`,
            `middle:K`, `random:K:SEED`, `full`, or blocks as `0-3,7`.
        ablation: for `fragile` and `robust`, which one of the trace counts; default its first one.
        embeddings: `train` or `freeze` everything before the blocks.
        norm: likewise the final norm.
        head: likewise the unembedding; where it is tied to the embedding both get one decision.
        allow_degenerate: accept a plan that freezes under 10 % or over 90 % of the blocks.
        out: file to save the plan in.
        force: replace the file.

    Raises:
        InputError: the rule is unknown, the trace does not carry it, decisions contradict each other, or the plan
            freezes nearly nothing or nearly everything.

    Example:
        >>> import tracer
        >>> result = tracer.trace("zoo/transformer-4", limit=4, progress=False)
        >>> plan = tracer.plan(result, "shallow:2", embeddings="freeze")
        >>> plan.train, plan.freeze
        ((0, 1), (2, 3))
    """
    traced = isinstance(run, TracedModel)
    result = None if traced else run if isinstance(run, TraceResult) else TraceResult.load(run)  # type: ignore[arg-type]
    if result is None:
        assert isinstance(run, TracedModel)
        model = run.describe() | {"fingerprint": run.fingerprint()}
    else:
        model = result.run["model"]
    parts = model.get("parts")
    if parts is None:
        raise InputError(
            f"it is not known which parameters the blocks of {model['name']} have: "
            + ("open it with backend='hooks'" if traced else "trace again")
        )
    outer = {"embeddings": embeddings, "norm": norm, "head": head}
    decisions = {name: one_of(f"decision on the {name}", value, get_args(Decision)) for name, value in outer.items()}
    tied = bool(parts["head"]["sizes"].keys() & parts["embeddings"]["sizes"].keys())
    if tied and embeddings != head:
        raise InputError(
            f"embeddings={embeddings!r} and head={head!r} contradict each other: they are one tied tensor in "
            f"{model['name']}; decide alike on both"
        )
    n = len(parts["blocks"])
    choice = choose(n, result, rule, ablation)
    freeze = tuple(block for block in range(n) if block not in choice.train)
    if not allow_degenerate and rule != "full" and not FEWEST <= len(freeze) / n <= 1 - FEWEST:
        raise InputError(_degenerate(result, rule, choice.why, len(freeze), n))
    made = FreezePlan(
        rule,
        choice.train,
        freeze,
        **decisions,  # type: ignore[arg-type]
        model={
            "name": model["name"],
            "kind": model["kind"],
            "fingerprint": model["fingerprint"],
            "dtype": model["dtype"],
            "class": model["anatomy"]["model_class"],
            "tied": tied,
            "parts": parts,
        },
        evidence=plain_data(
            {
                "run": None
                if result is None
                else {"folder": None if isinstance(run, TraceResult) else str(run), "digest": _digest(result)},
                "readout": None if result is None else result.run["readout"],
                "probes": None if result is None else result.run["arguments"]["probes"],
                **choice.evidence,
                "why": list(choice.why),
            }
        ),
        blocks=plain_data(_rows(model, result, choice)),
    )
    if not made.train and "train" not in decisions.values():
        raise InputError(f"rule {rule!r} with embeddings, norm and head frozen trains nothing: train something")
    if out is not None:
        made.save(out, force=force)
    return made


def _rows(model: Mapping[str, Any], result: TraceResult | None, choice: Choice) -> list[dict[str, Any]]:
    """One row a block, with what the trace says about it."""
    kind = None
    answered = 0
    if result is not None:
        kind = choice.evidence.get("ablation", next(iter(result.ablations), None))
        answered = int(result.probes["answered"].sum())
    rows = []
    for number, (call, part) in enumerate(zip(model["anatomy"]["blocks"], model["parts"]["blocks"], strict=True)):
        traced = None if result is None else result.blocks.iloc[number]
        rows.append(
            {
                "block": number,
                "mixer": call["mixer"],
                "particles": None if traced is None else traced["particles"] / answered if answered else 0.0,
                "jsd": None if traced is None or kind is None else traced[f"jsd_{kind}"],
                "decision": "train" if number in choice.train else "freeze",
                "parameters": sum(part["sizes"].values()),
            }
        )
    return rows


def _degenerate(result: TraceResult | None, rule: str, why: Sequence[str], frozen: int, n: int) -> str:
    text = f"rule {rule!r} freezes {frozen} of {n} blocks ({'; '.join(why)})"
    if result is not None and rule == "particle" and frozen < FEWEST * n and result.run["readout"] == "logit":
        text += (
            "; the plain logit lens is the likely cause, since it sees late what earlier blocks write in directions "
            "that the unembedding does not read: trace with a tuned lens"
        )
    return f"{text}; pass another rule, or allow_degenerate (--allow-degenerate) if this is meant"


def _digest(result: TraceResult) -> str:
    """A hash of everything that the numbers of a trace depend on."""
    depends = [result.run[key] for key in ("plan", "arguments", "versions")]
    return hashlib.sha256(json.dumps(plain_data(depends), sort_keys=True).encode()).hexdigest()[:16]


def _parts(model: nn.Module | TracedModel) -> tuple[nn.Module, Parts]:
    if not isinstance(model, TracedModel):
        return model, parts_of(model, open_plain(model)[0])
    if model.backend == TRANSFORMER_LENS or model.parts is None:
        raise InputError(
            f"{model.name} cannot be trained as it is opened: pass the Hugging Face model, backend='hooks'"
        )
    return model.model, model.parts
