"""SIGINT, SIGTERM, SIGUSR1 and SIGHUP ask for an orderly stop; a second Ctrl+C leaves at once.

A thread listens, because Python runs its handlers only when the main thread is back from C++: a process that waits for
a machine that is gone would never hear the second one, and who pressed once would see nothing until a long step ends,
and press again. A process that another of ours started asks the system for a signal when that one dies: killed, it
could not send any itself.
"""

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time

from aura.errors import EXIT_SIGNAL_BASE, Stopped

ORDERLY = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP") if hasattr(signal, name)]
JOB = "AURA_JOB"  # the name of a job that may be started again, from distributed.slurm
LISTENED = "AURA_LAUNCHER"  # the name of a launch, for processes whose standard error launch.py reads
SPEAK_SECONDS = 10  # for rank 0 to say what all ranks found wrong, before a silent rank's end makes torchrun kill it
SAME_KEY_SECONDS = 0.3  # one Ctrl+C may come twice: from the terminal and from a launcher (`timeout`) that passes it on


class Abandoned(Exception):
    """An evaluation that every rank left at the same batch, since one of them was asked to stop."""


class StopRequest:
    """`number` is the signal that asked this process to stop, 0 while none has."""

    def __init__(self):
        self.number = 0

    def handle(self, number, _frame):
        """The signal handler: note the wish, the loop acts on it at the end of its step."""
        self.number = number

    @staticmethod
    def listen(reader, tells):
        """Watch the signal numbers that arrive at a socket until its other end is closed: say so of the first, where
        tells() has this process do so; exit at a second Ctrl+C."""
        first, told = None, False
        while arrived := reader.recv(1):
            if not told and arrived[0] in ORDERLY and tells():
                wait = " Espere: otro Ctrl+C saldría en el acto, sin guardar." * (arrived[0] == signal.SIGINT)
                _tell(f"Recibida {signal.Signals(arrived[0]).name}: se guarda y se sale en cuanto acabe lo que está en "
                      f"marcha.{wait}")
                told = True
            if arrived[0] != signal.SIGINT:
                continue
            if first is not None and time.monotonic() - first > SAME_KEY_SECONDS:
                os._exit(EXIT_SIGNAL_BASE + signal.SIGINT)
            first = first or time.monotonic()


def _tell(line):
    """Write to standard error, if there is one and it takes a line at once: the listener must not wait for a pipe that
    nobody reads."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: it was closed
        if sys.__stderr__ and select.select([], [sys.__stderr__], [], 0)[1]:
            os.write(sys.__stderr__.fileno(), f"{line}\n".encode())


def ignored(number):
    """Whether a signal is SIGHUP under nohup, which is to end nothing."""
    return signal.Signals(number).name == "SIGHUP" and signal.getsignal(number) is signal.SIG_IGN


@contextlib.contextmanager
def orderly_stop(tells=lambda: False):
    """Yield a StopRequest that the signals set; at the end the former handlers are put back or, if a stop was asked
    for, only that of Ctrl+C: the other signals then do nothing more. Inside another such block, yield its request.
    tells() -> whether this process says on the console, at once, that it heard a signal; asked when one arrives.

    Outside the main thread, where Python allows no handlers, nothing ever sets it.
    """
    outer = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
    if isinstance(outer, StopRequest):
        yield outer
        return
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = {number: signal.signal(number, request.handle) for number in ORDERLY if not ignored(number)}
    before_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    listener = threading.Thread(target=request.listen, args=(reader, tells), daemon=True)
    listener.start()
    try:
        yield request
    finally:
        signal.set_wakeup_fd(before_fd)
        for number, handler in before.items():
            # Whoever asked may ask again while this process ends, as Slurm does: it signals the job and its step.
            asked_again = request.number and number != signal.SIGINT
            signal.signal(number, request.handle if asked_again else handler)
        writer.close()
        listener.join()
        reader.close()


@contextlib.contextmanager
def leaving_at_signals():
    """A block that SIGTERM, SIGUSR1 and SIGHUP leave by Stopped, as Ctrl+C leaves it by KeyboardInterrupt, so that it
    can put in order what it was making. For the main thread."""

    def leave(number, _frame):
        raise Stopped(number)

    before = {number: signal.signal(number, leave) for number in ORDERLY
              if number != signal.SIGINT and not ignored(number)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def leaving_it_to_main(dist):
    """A block in which all wait for rank 0 to prepare data: SIGUSR1, which that hears as well, ends nobody else."""
    number = getattr(signal, "SIGUSR1", None)
    waits = number and not dist.main and signal.getsignal(number) is signal.SIG_DFL
    if waits:
        signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        if waits:
            signal.signal(number, signal.SIG_DFL)


def die_with_parent(number, parent):
    """A function that makes the process calling it receive `number` when its parent, pid `parent`, dies (Linux)."""
    # Loaded here: between fork and exec, where subprocess calls ask(), as little as possible should be done. Windows
    # has no such library.
    library, set_death_signal = ctypes.CDLL(None) if sys.platform == "linux" else None, 1  # PR_SET_PDEATHSIG, prctl(2)

    def ask():
        if library:
            library.prctl(set_death_signal, number)
        if os.getppid() != parent:  # it died before we asked
            os.kill(os.getpid(), number)

    return ask
