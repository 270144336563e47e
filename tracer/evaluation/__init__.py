"""How well a model answers, by whole forwards without any hook."""

from tracer.evaluation.comparing import Comparison, compare
from tracer.evaluation.evaluating import evaluate
from tracer.evaluation.results import EvalResult

__all__ = ["Comparison", "EvalResult", "compare", "evaluate"]
