"""The two ways a run can end badly, and the exit codes that scripts, schedulers and people rely on."""

import functools
import re
import signal

EXIT_OK = 0
EXIT_BAD_INPUT = 2
EXIT_FAULT = 3
EXIT_SIGNAL_BASE = 128  # plus the signal's number, as shells report it: 130 SIGINT, 138 SIGUSR1, 143 SIGTERM
EXIT_NO_READER = EXIT_SIGNAL_BASE + 13  # SIGPIPE, which Windows has no name for
SHORT = re.compile(r".{,160}$|.{80,160}(?=[;.] )|.{80,160}(?= )|.{160}")  # all; or phrases; or words


class UserError(Exception):
    """A bad argument, file or environment: one line in Spanish that names the value and the way out (exit code 2)."""

    exit_code = EXIT_BAD_INPUT


class TrainingFault(Exception):
    """A run that began well and cannot go on: the line names the last good checkpoint (exit code 3)."""

    exit_code = EXIT_FAULT


class OutOfMemory(TrainingFault):
    """A step asked for more memory than there is, on the device or the host. request: the run's signals.StopRequest,
    if it had one: who could try again with less is not to begin what was asked to end, even while it ended."""

    request = None


class PeerLost(TrainingFault):
    """Another process is gone, or has said why it stops."""


class Stopped(KeyboardInterrupt):
    """A signal, whose `number` it has, ends this process where there is nothing to save yet."""

    def __init__(self, number):
        super().__init__(f"recibió {signal.Signals(number).name}")
        self.number = number


def agreed(kind, text):
    """An exception of this kind that every rank raises alike, so that only one of them has to tell it."""
    problem = kind(text)
    problem.same_everywhere = True
    return problem


def found_by_all(check):
    """Decorator of what looks at nothing but the arguments: its UserErrors are those of agreed()."""
    @functools.wraps(check)
    def checked(*words, **named):
        try:
            return check(*words, **named)
        except UserError as problem:
            problem.same_everywhere = True
            raise

    return checked


def first_line(problem):
    """The first line of what an exception says, as much as fits into 160 characters without cutting a phrase or at
    least a word; its type where it says nothing."""
    return SHORT.match((str(problem).strip().splitlines() or [type(problem).__name__])[0])[0]


def one_line(problem, most=300):
    """All that an exception says in one line, `most` characters at most; its type where it says nothing."""
    return (" ".join(str(problem).split()) or type(problem).__name__)[:most]
