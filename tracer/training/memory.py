"""How much memory a training has held."""

import re
import resource
import sys
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")


def peak_memory() -> int:
    """Most bytes held so far: of the accelerator where there is one, else of this process.

    Linux is asked for the peak of the program that runs now; `getrusage` also counts what the process was before it
    became this program, as where a large parent has started it.
    """
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    if STATUS.is_file() and (found := re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text(encoding="ascii"))):
        return int(found[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
