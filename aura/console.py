"""The console, which may go away while a model trains: a terminal that is closed, the `tee` that Ctrl+C ended too, a
file on a disk that is full."""

import os

from aura.errors import UserError
from aura.files import explain

# What would move the cursor, colour the terminal or name its window, in names and texts that others have written.
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def harmless(text):
    """`text` with its control characters, but for ends of lines and tabs, as Python writes them."""
    return text.translate(_CONTROL)


class Console:
    """A stream of the console that, once outlive() was called, drops what it cannot take any more. Until then that is
    a UserError, or a BrokenPipeError where the reader left."""

    outlived = False

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        """Write `text`; returns the number of characters."""
        return self._try(self.stream.write, text) or len(text)

    def flush(self):
        """Flush the stream."""
        self._try(self.stream.flush)

    def _try(self, work, *words):
        try:
            return work(*words)
        except OSError as problem:
            if not Console.outlived:
                if isinstance(problem, BrokenPipeError):
                    raise
                raise UserError(f"no se puede escribir en la consola, o en el fichero al que va ({explain(problem)}): "
                                "haga sitio o mándela a otro") from problem
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())  # what the stream still holds goes there as well
            os.close(nowhere)
            return None


def outlive():
    """From now on, to the end of the process, a console that is gone ends nothing."""
    Console.outlived = True
