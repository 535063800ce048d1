"""SIGINT, SIGTERM and SIGUSR1 ask for an orderly stop; a second Ctrl+C leaves at once.

A thread listens, because Python runs its own handlers only when the main thread is back from C++: a process that waits
for a machine that is gone would never hear the second Ctrl+C.
"""

import contextlib
import os
import signal
import socket
import threading

from aura.errors import EXIT_SIGNAL_BASE

ORDERLY = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)]


class StopRequest:
    """`number` is the signal that asked this process to stop, 0 while none has."""

    def __init__(self):
        self.number = 0

    def listen(self, reader):
        """Take the numbers of arriving signals from a socket until its other end is closed."""
        while arrived := reader.recv(1):
            if self.number == signal.SIGINT == arrived[0]:
                os._exit(EXIT_SIGNAL_BASE + signal.SIGINT)
            if arrived[0] in ORDERLY:
                self.number = arrived[0]


@contextlib.contextmanager
def orderly_stop():
    """Yield a StopRequest that the signals set; the handlers of before are put back at the end.

    Outside the main thread, where Python allows no handlers, nothing ever sets it.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = {number: signal.signal(number, lambda *_: None) for number in ORDERLY}
    before_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    listener = threading.Thread(target=request.listen, args=(reader,), daemon=True)
    listener.start()
    try:
        yield request
    finally:
        signal.set_wakeup_fd(before_fd)
        for number, handler in before.items():
            signal.signal(number, handler)
        writer.close()
        listener.join()
        reader.close()
