"""SIGINT, SIGTERM and SIGUSR1 ask for an orderly stop; a second Ctrl+C leaves at once."""

import contextlib
import signal
import sys
import threading

from aura.errors import EXIT_SIGNAL_BASE

ORDERLY = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)]


class StopRequest:
    """`number` is the signal that asked this process to stop, 0 while none has."""

    def __init__(self):
        self.number = 0

    def _handle(self, number, _frame):
        if self.number == signal.SIGINT == number:
            sys.exit(EXIT_SIGNAL_BASE + number)
        self.number = number


@contextlib.contextmanager
def orderly_stop():
    """Yield a StopRequest that the signals set; the handlers of before are put back at the end.

    Outside the main thread, where Python allows no handlers, nothing ever sets it.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request._handle) for number in ORDERLY}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
