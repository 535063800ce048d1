"""What one machine measures of itself: processor, memory, disk, network, GPUs, processes; no torch needed.

    sensors = Sensors(disk="checkpoints")
    sample = sensors.sample(ours=[pid])

psutil and nvidia-ml-py (the module pynvml) are imported if they are there. A sensor that does not answer is None, and
never an exception.
"""

import dataclasses
import functools
import math
import os
import shutil
import socket
import time
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path

from aura.cgroup import group_limit, group_used
from aura.errors import UserError
from aura.files import nearest
from aura.gpus import Gpu, gpu_reader, optional
from aura.processes import Activity, Processes, ask, pid_namespace, pids_apart

LOOPBACK = ("lo", "lo0")
COUNTS = 0, 2**64  # recorded whole numbers; a disk of an object store says 16 EiB
MEASURES = -1e16, 1e16  # other recorded numbers: as Unix times, years that strftime can still print


@dataclass(frozen=True)
class Link:
    """One network interface; bytes per second since the sample before."""

    interface: str
    received: float
    sent: float


@dataclass(frozen=True)
class Sample:
    """One machine at one moment; None where it cannot be measured. time: Unix. cpu: percent of all cores. Memory, swap
    and disk: bytes. notes: what is missing here and how to get it, in Spanish."""

    time: float
    host: str
    cores: int
    cpu: float | None
    load: float | None
    memory_used: int | None
    memory_total: int | None
    swap_used: int | None
    swap_total: int | None
    disk: str
    disk_free: int | None
    disk_total: int | None
    links: list[Link] = field(default_factory=list)
    processes: list[Activity] = field(default_factory=list)
    gpus: list[Gpu] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    pids: str | None = None  # the pid_namespace() of the processes


# ---- One sample -----------------------------------------------------------------------------------------------------


class Sensors:
    """The sensors of this machine. disk: a folder whose file system's space is reported; it need not exist yet.
    gpus: NVML's numbers of the cards wanted (CUDA_VISIBLE_DEVICES does not change them), None for all.

    Raises UserError for a card that is not there.
    """

    def __init__(self, disk=".", gpus=None):
        self.psutil, _ = optional("psutil")
        self._gpus, self._notes = gpu_reader()
        if not self.psutil:
            self._notes = ["sin psutil no se ve cuánto trabajan el procesador y la red: pip install psutil",
                           *self._notes]
        self._disk, self._wanted = str(disk), gpus
        self.host, self._cores = socket.gethostname(), os.cpu_count() or 1
        self.processes = Processes(self.psutil)
        self._apart = pids_apart()
        self._times = self._counters = self._clock = None
        self._check()

    def _check(self):
        if self._wanted:
            gpus, notes = self._gpus(None)
            there = [gpu.index for gpu in gpus]
            missing = [index for index in self._wanted if index not in there]
            if missing:
                known = f"indique alguna de {', '.join(map(str, there))}" if there else "aquí no se puede leer ninguna"
                raise UserError(f"no hay GPU {', '.join(map(str, missing))}: {'; '.join([known, *notes])}")

    def sample(self, ours=()):
        """A Sample now. ours: pids of the run watched; what started them or what they started is ours as well."""
        used, total, swap_used, swap_total = self.memory()
        disk = ask(self.disk)
        cpu, links = self.processor(), self.links()
        activities = self.processes.sample(ours)
        gpus, notes = self._gpus(self._wanted)
        if self._apart:
            gpus = [dataclasses.replace(gpu, processes={pid: held for pid, held in gpu.processes.items()
                                                        if pid in self.processes.known}) for gpu in gpus]
        return Sample(time=time.time(), host=self.host, cores=self._cores, cpu=cpu,
                      load=ask(lambda: os.getloadavg()[0]), memory_used=used, memory_total=total,
                      swap_used=swap_used, swap_total=swap_total, disk=self._disk, disk_free=disk and disk.free,
                      disk_total=disk and disk.total, links=links, processes=activities, gpus=gpus,
                      notes=self._notes + notes, pids=pid_namespace())

    def processor(self):
        """Percent of all cores since the call before."""
        before, self._times = self._times, ask(_cpu_times, self.psutil)
        if not before or not self._times or self._times[1] <= before[1]:
            return None
        busy, everything = (now - then for now, then in zip(self._times, before, strict=True))
        return min(100.0, max(0.0, 100 * busy / everything))

    def memory(self):
        """(used, total, swap used, swap total) in bytes, of the control group where it has less than the machine."""
        used, total, *swap = (ask(_meminfo) or ask(_psutil_memory, self.psutil)
                              or (None, ask(_physical), None, None))
        limit = ask(group_limit) or math.inf
        if total and limit < total:
            used, total = ask(group_used), limit
        return used, total, *swap

    def disk(self):
        """shutil.disk_usage of the file system on which the folder is, or will be."""
        return shutil.disk_usage(nearest(self._disk))

    def links(self):
        """[Link] of the interfaces whose counters have gone on since the call before."""
        before, since = self._counters, self._clock
        self._clock = time.monotonic()
        self._counters = ask(_counters, self.psutil) or {}
        if not before or self._clock <= since:
            return []
        seconds, found = self._clock - since, []
        for name, now in sorted(self._counters.items()):
            received, sent = (after - then for after, then in zip(now, before.get(name, now), strict=True))
            if name in before and received >= 0 and sent >= 0:  # less than before: another interface of that name
                found.append(Link(name, received / seconds, sent / seconds))
        return found


def _cpu_times(psutil):
    """(busy, all) seconds of all cores. The time of guests is part of user time, waiting for disks is idle."""
    times = psutil.cpu_times()
    everything = sum(times) - getattr(times, "guest", 0) - getattr(times, "guest_nice", 0)
    return everything - times.idle - getattr(times, "iowait", 0), everything


def _meminfo():
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    kib = {words[0]: int(words[1]) for words in lines}
    total, swap = kib["MemTotal:"], kib["SwapTotal:"]
    return tuple(1024 * n for n in (total - kib["MemAvailable:"], total, swap - kib["SwapFree:"], swap))


def _psutil_memory(psutil):
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    return memory.total - memory.available, memory.total, swap.used, swap.total


def _physical():
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _counters(psutil):
    """{interface: (bytes received, sent)} of all that are up but loopback."""
    up = psutil.net_if_stats()
    return {name: (counted.bytes_recv, counted.bytes_sent)
            for name, counted in psutil.net_io_counters(pernic=True, nowrap=False).items()
            if name in up and up[name].isup and name not in LOOPBACK}


# ---- Recorded samples -----------------------------------------------------------------------------------------------


_hints = functools.cache(typing.get_type_hints)


def typed(value, kind, bounded=True):
    """`value`, as json.loads gives it, as a `kind`, a Sample or a heartbeat.Beat: a field that an older version did not
    write has its default. Raises TypeError, KeyError or ValueError where it is not one, or is a number that nobody
    measures."""
    if dataclasses.is_dataclass(kind):  # the loss of a run that diverges may be any number, or NaN
        return kind(**{name: typed(value[name], hint, name != "loss") for name, hint in _hints(kind).items()
                       if name in value})
    if typing.get_origin(kind) is list:
        return [typed(each, *typing.get_args(kind)) for each in value]
    if typing.get_origin(kind) is dict:
        _, inside = typing.get_args(kind)
        return {int(key): typed(each, inside) for key, each in value.items()}
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if type(value) not in kinds and not (type(value) is int and float in kinds):
        raise TypeError(value)
    low, high = MEASURES if float in kinds else COUNTS
    if (type(value) is int or type(value) is float and bounded) and not low <= value <= high:
        raise ValueError(value)
    return value
