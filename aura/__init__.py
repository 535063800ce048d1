"""The rooms that must be the same in every training script of the collection."""

import os
import sys

__version__ = "0.1.0"

# Read when torch is imported. Its C++ warns, with a stack trace, of each process that is gone: we say so in one line.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _interrupted(kind, problem, trace, others=sys.excepthook):
    """sys.excepthook, with one line for a Ctrl+C before cli.run() can hear it: to import torch takes seconds."""
    if issubclass(kind, KeyboardInterrupt):
        print("Interrumpido.", file=sys.stderr)
    else:
        others(kind, problem, trace)


sys.excepthook = _interrupted
