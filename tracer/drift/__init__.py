"""How far two checkpoints of one architecture are from each other, depth by depth."""

from tracer.drift.comparing import drift
from tracer.drift.results import DriftResult

__all__ = ["DriftResult", "drift"]
