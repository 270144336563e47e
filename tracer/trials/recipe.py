"""The recipe of a trial: a YAML file that names the arms, the grid, what is measured, and how all arms are trained."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from tracer.errors import InputError, one_of
from tracer.evaluation.asking import AskedSuite
from tracer.recipes import built, check_keys, mapping, named, read_yaml, typed
from tracer.training.recipe import Recipe, recipe_of, training_keys

SCORES = ("accuracy", "log_p", "bits_per_byte")
"""What a measure is read by: of probes the share that is answered, or the mean log-probability of the target in nats;
of a text the bits a byte, of which fewer are better."""

ACQUISITION = "acquisition"
"""What the measure of the new domain is called."""

REFUSED: Mapping[str, str] = {
    "plan": "each arm has its own: name them under arms",
    "learning_rate": "each run has one of rates",
    "seed": "each run has its own: say how many under seeds",
    "max_steps": "the longest of budgets is trained",
    "num_train_epochs": "the longest of budgets is trained",
    "lr_scheduler_type": "it is always constant_with_warmup, so that the points along a training are comparable",
    "ask": "name what is measured under acquisition, retention and also",
    "evaluate": "name what is measured under acquisition, retention and also",
    "retrace": "trace the models of single trainings with tracer cpt",
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]*")
_RANDOM = re.compile(r"random:\d+")


@dataclass(frozen=True)
class Measure(AskedSuite):
    """What is measured.

    Attributes:
        score: one of `SCORES`; default `accuracy` for probes, and `bits_per_byte` for a text.
    """

    score: Literal["accuracy", "log_p", "bits_per_byte"] | None = None

    @property
    def asked(self) -> AskedSuite:
        """Without the score."""
        return AskedSuite(self.suite, self.groups, self.limit, self.data)


@dataclass(frozen=True)
class Claim:
    """A hypothesis about two arms.

    Attributes:
        better: the arm that is said to be better.
        than: the other one.
    """

    better: str
    than: str


@dataclass(frozen=True)
class Run:
    """One training of a trial.

    Attributes:
        arm: its name.
        rate: learning rate.
        seed: of the order of the data, and of a plan that is drawn at random.
    """

    arm: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """What its files are called."""
        return f"{self.arm}_{self.rate:g}_{self.seed}"


@dataclass(frozen=True)
class TrialRecipe:
    """A trial.

    Attributes:
        arms: plans by name, each the arguments of `tracer.plan` as in the recipe of `tracer cpt`. `random:K` draws
            other blocks for every seed.
        rates: learning rates; an arm is the whole grid of them.
        seeds: number of seeds, from 0 on.
        budgets: numbers of steps at which arms are compared; the shorter ones are prefixes of the longest.
        every: steps between two measures.
        acquisition: what the new text should teach.
        retention: what should be kept, by name; each is judged on its own.
        training: all other keys of the recipe: those of `tracer cpt`.
        output_dir: where the results go.
        baseline: the arm that the others are compared with.
        claims: hypotheses to give a verdict on.
        also: what else is measured, without being judged.
    """

    arms: Mapping[str, Mapping[str, Any]]
    rates: list[float]
    seeds: int
    budgets: list[int]
    every: int
    acquisition: Measure
    retention: Mapping[str, Measure]
    training: Mapping[str, Any]
    output_dir: str
    baseline: str = "full"
    claims: list[Claim] = field(default_factory=list)
    also: Mapping[str, Measure] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.arms) < 2:
            raise InputError("arms: name at least two")
        for name in self.arms:
            if not _NAME.fullmatch(name):
                raise InputError(f"arm {name!r}: pass a name of letters, digits, dots, + and -, since files bear it")
        for name in (self.baseline, *(arm for claim in self.claims for arm in (claim.better, claim.than))):
            one_of("arm", name, self.arms)
        if not self.rates or not all(0 < rate < math.inf for rate in self.rates):
            raise InputError(f"rates {self.rates}: pass learning rates above 0")
        if len({f"{rate:g}" for rate in self.rates}) < len(self.rates):
            raise InputError(f"rates {self.rates}: pass each once, apart in six digits")
        if self.seeds < 1 or self.every < 1:
            raise InputError(f"seeds {self.seeds}, every {self.every}: pass at least 1")
        if not self.budgets or any(budget < 1 or budget % self.every for budget in self.budgets):
            raise InputError(f"budgets {self.budgets}: pass numbers of steps that every {self.every} divides")
        if not self.retention:
            raise InputError("retention is empty: name at least one thing that should be kept")
        names = [ACQUISITION, *self.retention, *self.also]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise InputError(f"{twice[0]!r} names two measures: give each a name of its own")

    @property
    def folder(self) -> Path:
        """Where the results go."""
        return Path(self.output_dir).expanduser()

    @property
    def steps(self) -> int:
        """Steps of every training."""
        return max(self.budgets)

    @property
    def measures(self) -> dict[str, Measure]:
        """All that is measured, by name."""
        return {ACQUISITION: self.acquisition, **self.retention, **self.also}

    def runs(self) -> Iterator[Run]:
        """All trainings, seed by seed, so that an interrupted trial has whole seeds."""
        for seed in range(self.seeds):
            for rate in self.rates:
                for arm in self.arms:
                    yield Run(arm, rate, seed)

    def plan_of(self, run: Run) -> Mapping[str, Any]:
        """The plan of a run, as the recipe of a training holds it."""
        plan = dict(self.arms[run.arm])
        if _RANDOM.fullmatch(str(plan.get("rule"))):
            plan["rule"] = f"{plan['rule']}:{run.seed}"
        return plan

    def training_of(self, run: Run, output_dir: Path) -> Recipe:
        """The recipe of one of the trainings.

        Raises:
            InputError: the recipe cannot be one of a training; names the key.
        """
        suites = {name: measure.asked for name, measure in self.measures.items()}
        data = {
            "logging_steps": self.every,
            "save_strategy": "no",  # a run of hours may say otherwise
            **self.training,
            "plan": self.plan_of(run),
            "learning_rate": run.rate,
            "seed": run.seed,
            "max_steps": self.steps,
            "lr_scheduler_type": "constant_with_warmup",
            "ask": {"every": self.every, "suites": suites},
            "output_dir": str(output_dir),
        }
        return recipe_of(data, "the recipe")


def read_trial(source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> TrialRecipe:
    """Read the recipe of a trial.

    Args:
        source: a YAML file, or what such a file holds.
        overrides: top-level keys that replace those of the file.

    Raises:
        InputError: no such file, not YAML, an unknown key, a value of a wrong type, or a contradiction.
    """
    if isinstance(source, Mapping):
        where, data = "the recipe", dict(source)
    else:
        where, data = str(source), read_yaml(Path(source))
    data |= overrides or {}
    for key in data:
        if key in REFUSED:
            raise InputError(f"{where}: {key} cannot be set in a trial: {REFUSED[key]}")
    own = {item.name for item in fields(TrialRecipe)} - {"training"}
    check_keys(where, data, own | training_keys())
    values: dict[str, Any] = {key: data[key] for key in data if key in own}
    values["training"] = {key: value for key, value in data.items() if key not in own}
    if "arms" in values:
        arms = mapping(f"{where}: arms", values["arms"])
        values["arms"] = {str(name): dict(mapping(f"{where}: arms.{name}", plan)) for name, plan in arms.items()}
    if "acquisition" in values:
        values["acquisition"] = built(Measure, f"{where}: acquisition", values["acquisition"])
    for key in ("retention", "also"):
        if key in values:
            values[key] = named(Measure, f"{where}: {key}", values[key])
    if "claims" in values:
        claims = typed(f"{where}: claims", values["claims"], list)
        values["claims"] = [built(Claim, f"{where}: claims", claim) for claim in claims]
    if "rates" in values:
        rates = typed(f"{where}: rates", values["rates"], list)
        values["rates"] = [typed(f"{where}: rates", rate, float) for rate in rates]
    found: TrialRecipe = built(TrialRecipe, where, values)
    for name, text in mapping(f"{where}: text", found.training.get("text", {})).items():
        if isinstance(text, Mapping) and text.get("held_out"):
            raise InputError(
                f"{where}: text.{name}: held_out draws other documents for every seed: measure a text of "
                "its own under also"
            )
    found.training_of(next(found.runs()), found.folder)
    return found
