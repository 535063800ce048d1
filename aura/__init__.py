"""The rooms that must be the same in every training script of the collection."""

import os
import sys
import tempfile

from aura.errors import EXIT_BAD_INPUT

__version__ = "0.1.0"

# Read when torch is imported. Its C++ warns, with a stack trace, of each process that is gone: we say so in one line.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
try:
    os.getcwd()
except OSError:  # importing torch there ends the process, and MKL's last words are of a library
    print("error: la carpeta desde la que se ejecuta ya no está: entre en otra con cd", file=sys.stderr)
    sys.exit(EXIT_BAD_INPUT)
try:
    tempfile.gettempdir()
except OSError:  # none can be written in, and what torch imports asks which it is: who really needs it is told then
    tempfile.tempdir = os.path.abspath("/tmp")
# What a Python without this project's environment lacks: to forget to activate it is the first mistake there is.
_REQUIRED = ("torch", "numpy", "sentencepiece", "safetensors", "tqdm")


def _in_one_line(kind, problem, trace, others=sys.excepthook):
    """sys.excepthook, with one line for what happens before cli.run() can hear it: a Ctrl+C, as importing torch takes
    seconds, and an import that finds nothing."""
    if issubclass(kind, KeyboardInterrupt):
        print("Interrumpido.", file=sys.stderr)
    elif issubclass(kind, ModuleNotFoundError) and problem.name in _REQUIRED:
        print(f"error: a este Python ({sys.executable}) le falta {problem.name}: active el entorno (source "
              ".venv/bin/activate) o instale en él los requisitos (pip install -r requirements.txt)", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    else:
        others(kind, problem, trace)


sys.excepthook = _in_one_line
