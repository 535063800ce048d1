"""The processes of a machine: those of a run and of this collection, and whoever else is busy."""

import functools
import os
import select
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

SCRIPTS = frozenset({"train_gpt2_spanish.py", "train_tensordock.py", "hrm_training_small_100m.py",
                     "hrm_training_large_1b.py", "train_distributed.py", "launch_distributed.py", "test_ddp.py"})
LAUNCHERS = frozenset({"torchrun", "torch.distributed.run", "torch.distributed.launch"})
BUSY = 25.0  # percent of a core, above which a process is listed whoever it belongs to
TICKS, PAGE = (os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")) if hasattr(os, "sysconf") else (100, 4096)
STATUSES = {b"R": "running", b"S": "sleeping", b"D": "disk-sleep", b"T": "stopped", b"t": "tracing-stop",
            b"Z": "zombie", b"X": "dead", b"x": "dead", b"K": "wake-kill", b"W": "waking", b"I": "idle", b"P": "parked"}


@dataclass(frozen=True)
class Activity:
    """One process. cpu: percent of one core since the sample before. memory: resident bytes. status: as psutil names
    it (running, sleeping, stopped, zombie...). ours: whether it belongs to this collection or to the run watched.
    started: as start_of() has it."""

    pid: int
    name: str
    cpu: float | None
    memory: int
    status: str
    ours: bool
    started: str | None = None


def ask(sensor, *arguments):
    """What a sensor says; None where it cannot, whatever the reason: a monitor outlives what it watches."""
    try:
        return sensor(*arguments)
    except Exception:
        return None


class _Stat(NamedTuple):
    """A process now. started: with the pid, identifies it. cpu: seconds."""

    started: float
    parent: int
    name: str | bytes
    status: str
    cpu: float
    memory: int


class _Known(NamedTuple):
    """A process with its name to show. said: what it was read from. script: it runs one of ours. launcher: it starts
    the processes of a run."""

    said: bytes | _Stat
    stat: _Stat
    name: str
    script: bool
    launcher: bool


def _proc_pids():
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _proc_read(pid):
    """/proc's stat in one read, an eighth of psutil's time: a machine may have thousands of processes."""
    file = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    try:
        return os.read(file, 4096)
    finally:
        os.close(file)


def _proc_stat(text):
    name, _, rest = text.rpartition(b")")  # the name may hold any character
    fields = rest.split(None, 22)
    return _Stat(int(fields[19]), int(fields[1]), name.partition(b"(")[2], STATUSES.get(fields[0], "?"),
                 (int(fields[11]) + int(fields[12])) / TICKS, int(fields[21]) * PAGE)


def start_of(pid):
    """A text that, with the pid, tells a process from all that ever have that pid, also across reboots; None where
    /proc does not say."""
    said = ask(_proc_read, pid)
    return said and _start(_proc_stat(said))


def watch(pid, start):
    """A descriptor, for has_ended() and for the caller to close, of the process with this pid and start_of(); None
    where this machine, or this container, has no such process, or the system is not Linux."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        found = os.pidfd_open(pid)
    except OSError:
        return None
    if start_of(pid) == start:
        return found
    os.close(found)
    return None


def has_ended(watched, seconds=0):
    """Whether the process of a watch() is gone, or will be in so many seconds."""
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def _start(stat):
    return f"{boot()} {stat.started}"


@functools.cache
def boot():
    """The name that Linux gives to each start of a machine; "" elsewhere."""
    return (ask(Path("/proc/sys/kernel/random/boot_id").read_text) or "").strip()


def _proc_command(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]


def _psutil_stat(psutil, pid):
    process = psutil.Process(pid)
    with process.oneshot():
        times = process.cpu_times()
        return _Stat(process.create_time(), process.ppid(), process.name(), process.status(),
                     times.user + times.system, process.memory_info().rss)


def _program(arguments):
    """The script or module that a Python with these arguments runs; None for -c and for a prompt."""
    arguments = iter(arguments)
    for argument in arguments:
        if argument == "-m":
            return next(arguments, None)
        if argument == "-c":
            return None
        if argument in ("-X", "-W"):
            next(arguments, None)
        elif not argument.startswith("-"):
            return os.path.basename(argument)
    return None


def describe(command, name):
    """(name to show, whether it runs one of our scripts, whether it starts the processes of a run).

    command: a process's arguments from the program on, or None. name: the system's for it.
    """
    name = name.decode(errors="replace") if isinstance(name, bytes) else name
    if not command or not os.path.basename(command[0]).lower().startswith("python"):
        return name, False, False
    program = _program(command[1:]) or name
    script = program.startswith("aura.") or any(os.path.basename(word) in SCRIPTS for word in command[1:])
    return program, script, script or program in LAUNCHERS


class Processes:
    """The processes of this machine, sample after sample; those that have ended are forgotten."""

    def __init__(self, psutil):
        if os.path.exists("/proc/self/stat"):
            self._pids, self._read, self._stat, self._command = _proc_pids, _proc_read, _proc_stat, _proc_command
        elif psutil:
            self._pids, self._read, self._stat = psutil.pids, functools.partial(_psutil_stat, psutil), lambda stat: stat
            self._command = lambda pid: psutil.Process(pid).cmdline()
        else:
            self._pids = list
        self.known, self._clock = {}, None

    def sample(self, ours=()):
        """[Activity]: those of the run of the pids `ours`, those of this collection, and whoever is busy."""
        before, since = self.known, self._clock
        self._clock = time.monotonic()
        told = {pid: ask(self._read, pid) for pid in ask(self._pids) or ()}
        self.known = {pid: self._recognise(pid, said, before.get(pid)) for pid, said in told.items() if said}
        mine, found = self._ours(set(ours)), []
        for pid, process in self.known.items():
            stat, old, cpu = process.stat, before.get(pid), None
            if old and old.stat.started == stat.started and self._clock > since:
                cpu = max(0.0, 100 * (stat.cpu - old.stat.cpu) / (self._clock - since))
            if pid in mine or (cpu is not None and cpu > BUSY and pid != os.getpid()):
                found.append(Activity(pid, process.name, cpu, stat.memory, stat.status, pid in mine,
                                      _start(stat)))
        return sorted(found, key=lambda activity: (not activity.ours, activity.pid))

    def _recognise(self, pid, said, old):
        """The _Known of a process. Its command line is read once for each start and name: with another of either it is
        another process, or runs another program."""
        if old and old.said == said:
            return old
        stat = self._stat(said)
        if old and (old.stat.started, old.stat.name) == (stat.started, stat.name):
            return _Known(said, stat, *old[2:])
        return _Known(said, stat, *describe(ask(self._command, pid), stat.name))

    def _ours(self, asked):
        """The pids of the run: those asked for with their launchers, our scripts, and all that they have started; not
        this process, unless it was asked for."""
        mine = {pid for pid, process in self.known.items() if pid in asked or process.script}
        for pid in asked & self.known.keys():
            parent = self.known[pid].stat.parent
            while parent in self.known and self.known[parent].launcher:
                mine.add(parent)
                parent = self.known[parent].stat.parent
        children = {}
        for pid, process in self.known.items():
            children.setdefault(process.stat.parent, []).append(pid)
        excluded = {os.getpid()} - asked
        mine -= excluded
        waiting = list(mine)
        while waiting:
            new = set(children.get(waiting.pop(), ())) - mine - excluded
            mine |= new
            waiting += new
        return mine


def pid_namespace():
    """The name of the pid namespace, the same for processes that see the same pids: a container has its own. None where
    the system has none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def pids_apart():
    """Whether this process is in a container, where the driver may tell other pids than those seen here."""
    return pid_namespace() not in (None, "pid:[4026531836]")  # PROC_PID_INIT_INO, the machine's own
