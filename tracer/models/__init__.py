"""A model, opened at its residual stream: where it comes from, its anatomy, and the proof of both."""
