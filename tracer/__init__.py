"""LayerTracer: where a language model executes tasks and where it is fragile, block by block.

Everything public can be reached from here; modules are imported when a name is first used, so that `import tracer`
and `tracer --help` stay fast.

Example:
    >>> import tracer
    >>> model = tracer.load("smollm2-135m-instruct-q4_1", dtype="float32")  # doctest: +SKIP
    >>> result = tracer.trace(model, "en-capitals")  # doctest: +SKIP
    >>> print(result.summary())  # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracer import hooks
    from tracer.drifting import DriftResult, drift
    from tracer.errors import Diverged, HookError, InputError, ModelRefused, TracerError, TrainingStopped
    from tracer.evaluation import Comparison, EvalResult, compare, evaluate
    from tracer.freezing.cost import Prices, price
    from tracer.freezing.plan import FreezePlan, plan
    from tracer.models.catalogue import fetch
    from tracer.models.traced import TracedModel, load
    from tracer.particle import ParticleRule
    from tracer.patch_results import PatchResult
    from tracer.patching import patch
    from tracer.probes import Probe, ProbeSet, read_probes
    from tracer.results import TraceResult
    from tracer.tracing import trace
    from tracer.training import CptResult, cpt
    from tracer.trials import TrialResult, trial
    from tracer.tuned_lens import TunedLens, train_tuned_lens

_HOME = {
    "DriftResult": "tracer.drifting",
    "drift": "tracer.drifting",
    "Diverged": "tracer.errors",
    "HookError": "tracer.errors",
    "InputError": "tracer.errors",
    "ModelRefused": "tracer.errors",
    "TracerError": "tracer.errors",
    "TrainingStopped": "tracer.errors",
    "Comparison": "tracer.evaluation",
    "compare": "tracer.evaluation",
    "EvalResult": "tracer.evaluation",
    "evaluate": "tracer.evaluation",
    "FreezePlan": "tracer.freezing.plan",
    "plan": "tracer.freezing.plan",
    "Prices": "tracer.freezing.cost",
    "price": "tracer.freezing.cost",
    "fetch": "tracer.models.catalogue",
    "TracedModel": "tracer.models.traced",
    "load": "tracer.models.traced",
    "ParticleRule": "tracer.particle",
    "PatchResult": "tracer.patch_results",
    "patch": "tracer.patching",
    "Probe": "tracer.probes",
    "ProbeSet": "tracer.probes",
    "read_probes": "tracer.probes",
    "TraceResult": "tracer.results",
    "TunedLens": "tracer.tuned_lens",
    "train_tuned_lens": "tracer.tuned_lens",
    "trace": "tracer.tracing",
    "CptResult": "tracer.training",
    "cpt": "tracer.training",
    "TrialResult": "tracer.trials",
    "trial": "tracer.trials",
}

__all__ = [
    "Comparison",
    "CptResult",
    "Diverged",
    "DriftResult",
    "EvalResult",
    "FreezePlan",
    "HookError",
    "InputError",
    "ModelRefused",
    "ParticleRule",
    "PatchResult",
    "Prices",
    "Probe",
    "ProbeSet",
    "TraceResult",
    "TracedModel",
    "TracerError",
    "TrainingStopped",
    "TrialResult",
    "TunedLens",
    "compare",
    "cpt",
    "drift",
    "evaluate",
    "fetch",
    "hooks",
    "load",
    "patch",
    "plan",
    "price",
    "read_probes",
    "trace",
    "train_tuned_lens",
    "trial",
]


def __getattr__(name: str) -> Any:
    if name == "hooks":  # the one submodule that is used by its own name
        return import_module("tracer.hooks")
    if name not in _HOME:
        raise AttributeError(f"module 'tracer' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
