"""The controlled trial of freeze plans: what each learns, keeps and costs, at equal levels, over seeds."""

from tracer.trials.results import TrialResult
from tracer.trials.running import trial

__all__ = ["TrialResult", "trial"]
