"""The console, which may go away while a model trains: a terminal that is closed, the `tee` that Ctrl+C ended too."""

import errno
import os

GONE = (errno.EPIPE, errno.EIO)  # a pipe that nobody reads, a terminal that is closed


class Console:
    """A stream of the console that, once outlive() was called, drops what nobody can read any more."""

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
            if not Console.outlived or problem.errno not in GONE:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())  # what the stream still holds goes there as well
            os.close(nowhere)
            return None


def outlive():
    """From now on, to the end of the process, a console that is gone ends nothing."""
    Console.outlived = True
