"""Tuned lens (Belrose et al. 2023, arXiv 2303.08112): affine translators in front of the model's own tail.

The plain logit lens reads early streams as if they were last ones, which some families make unreliable. A tuned lens
first translates a stream by an affine map, trained so that the unembedded result comes near the model's output.
"""

from tracer.tuned_lens.lens import TunedLens, check_lens_path
from tracer.tuned_lens.text import Text, text_files
from tracer.tuned_lens.training import train_tuned_lens

__all__ = ["Text", "TunedLens", "check_lens_path", "text_files", "train_tuned_lens"]
