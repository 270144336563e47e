"""How far two checkpoints of one architecture are from each other, depth by depth."""

from tracer.drifting.comparing import drift
from tracer.drifting.results import DriftResult

__all__ = ["DriftResult", "drift"]
