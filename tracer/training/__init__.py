"""Continued pre-training under a freeze plan, on the Hugging Face Trainer."""

from tracer.training.continuing import cpt
from tracer.training.results import CptResult

__all__ = ["CptResult", "cpt"]
