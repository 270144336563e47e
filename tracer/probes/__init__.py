"""Probes: short prompts with a known next token, read from files and turned into token ids.

A probe is a fact of the form "prompt, target". Every analysis asks at which block the model makes the target
likely, so the target's id must be the one that the model would really produce after the prompt. It is taken
from tokenizing prompt and target together, never from tokenizing the target alone.
"""

from tracer.probes.reading import (
    COLLECTIONS,
    PROBE_KEYS,
    Probe,
    ProbeSet,
    Skipped,
    read_probes,
    shipped_folder,
    shipped_names,
)
from tracer.probes.tokenizing import (
    MIN_USABLE,
    TargetReading,
    TokenizedProbe,
    TokenizedProbes,
    Tokenizer,
    token_ids,
    tokenize,
)

__all__ = [
    "COLLECTIONS",
    "MIN_USABLE",
    "PROBE_KEYS",
    "Probe",
    "ProbeSet",
    "Skipped",
    "TargetReading",
    "TokenizedProbe",
    "TokenizedProbes",
    "Tokenizer",
    "read_probes",
    "shipped_folder",
    "shipped_names",
    "token_ids",
    "tokenize",
]
