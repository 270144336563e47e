"""The errors that LayerTracer raises on purpose.

Every message is one line that says what was wrong, the value, and what to pass instead. The command line prints
it without a traceback and exits with status 2.
"""

from collections.abc import Iterable


class TracerError(Exception):
    """Base of all errors raised on purpose."""


class InputError(TracerError, ValueError):
    """Unusable input: a wrong path, a broken line, an unknown name, a contradiction between options."""


def one_of(what: str, value: object, options: Iterable[str]) -> str:
    """The value, when it is one of the options.

    Raises:
        InputError: it is not.
    """
    names = tuple(options)
    if value not in names:
        raise InputError(f"unknown {what} {value!r}: pass one of {', '.join(names)}")
    return str(value)


class ModelRefused(TracerError):
    """The model was opened but cannot be traced exactly; carries the check that failed and the measured gap."""


class HookError(TracerError, RuntimeError):
    """Something that should have run inside the model did not, or ran more often than it should."""


class TrainingStopped(TracerError, RuntimeError):
    """A training that went wrong and was stopped; names the last good checkpoint."""


class Diverged(TrainingStopped):
    """A training that was stopped since its loss or a gradient is not finite, or its loss has risen far."""
