"""What every rank of a run says of itself while it trains, for monitor.py to read; no torch needed to read it.

    with heartbeat.beating(args.log_dir, dist) as clock:
        loop.train(..., clock=clock)
    heartbeat.read("./logs")                      # [Beat], one a rank

A rank writes its own file in the folder heartbeat of --log-dir. Rank 0 also writes there what ranks on other machines
send through the group's store, so that no shared disk is needed.
"""

import contextlib
import json
import math
import os
import re
import secrets
import socket
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from aura import cgroup, sensors
from aura.clock import Clock, Window
from aura.errors import first_line
from aura.files import PARTIAL_SUFFIX, explain
from aura.processes import pid_namespace, start_of

FOLDER = "heartbeat"  # inside --log-dir
NAME = re.compile(r"rank-\d{5,}\.json")
INTERVAL_SECONDS = 1.0
REMOTE_BEATS = 2  # rank 0 looks for other machines' once in so many of its own: they cost it most
FAREWELL_SECONDS = 1.0  # how long rank 0 waits for the last beats of other machines
JOIN_SECONDS = 3.0  # a thread that a dead disk or network holds is left behind


@dataclass(frozen=True)
class Beat:
    """What one rank said last. phase: start, compute, data, communication, save, evaluate or end; phase_s: seconds in
    it without getting any further. memory, memory_total: bytes, of the card on CUDA, of this process and the machine
    otherwise. time: when it was said (Unix time there); received: when rank 0 took a new one from another machine (Unix
    time at rank 0) or, on a disk shared with that, when its file was written; None for what this machine's own ranks
    wrote. pids: the pid_namespace() that gave the pid. started: its processes.start_of()."""

    run: str
    rank: int
    world_size: int
    local_rank: int
    host: str
    address: str | None
    pid: int
    device: str
    gpu_uuid: str | None
    number: int
    time: float
    step: int
    steps: int
    phase: str
    phase_s: float
    cpu_s: float
    loss: float | None
    memory: int
    memory_total: int
    windows: list[Window] = field(default_factory=list)
    ended: str | None = None  # how the run of this rank ended, in words; None while it goes on
    failed: bool = False  # whether that was an error
    received: float | None = None
    pids: str | None = None
    started: str | None = None
    unit: str = "tokens"  # of which windows tell how many a second, in Spanish

    @property
    def heard(self):
        """When the rank was last heard of (Unix time here)."""
        return self.time if self.received is None else self.received

    def age(self, now):
        """Seconds at `now` (Unix time) since then. Where this machine's clock was set back, a rank that is alive soon
        says a time that has come; another machine's disk may always be ahead."""
        return abs(now - self.heard) if self.received is None else max(0.0, now - self.heard)


# ---- Reading --------------------------------------------------------------------------------------------------------


def read(log_dir):
    """The last Beat of every rank of the newest run that left any in `log_dir`, by rank; [] when there are none. Files
    that are no beats are ignored."""
    beats = []
    for path in Path(log_dir, FOLDER).glob("*.json"):
        if NAME.fullmatch(path.name):
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
                beat = sensors.typed(json.loads(path.read_text(encoding="utf-8")), Beat)
                if beat.received is None and beat.host != socket.gethostname():  # on a shared disk, whose clock is one
                    beat = replace(beat, received=path.stat().st_mtime)
                beats.append((float(beat.heard), beat))
    newest = max(beats, key=lambda pair: pair[0], default=(0, None))[1]
    return sorted((beat for _, beat in beats if beat.run == newest.run), key=lambda beat: beat.rank)


# ---- Telling --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def beating(log_dir, dist):
    """A block during which this process tells every second how it is, whatever its main thread does; yields the Clock
    for loop.train. The last beat says how the block ended.

    A disk or a store that fails meanwhile is reported once and hurts nothing else.
    """
    clock = Clock(dist)
    teller = _Teller(log_dir, dist, clock)
    thread = threading.Thread(target=teller.run, daemon=True)
    thread.start()
    try:
        yield clock
        teller.ended = clock.ended or "completo"
    except BaseException as problem:
        teller.ended = first_line(problem)
        teller.failed = not isinstance(problem, SystemExit | KeyboardInterrupt)
        raise
    finally:
        teller.over.set()
        thread.join(JOIN_SECONDS)


class _Teller:
    """The thread of beating()."""

    def __init__(self, log_dir, dist, clock):
        self.folder, self.dist, self.clock = Path(log_dir, FOLDER), dist, clock
        self.ended, self.failed, self.over, self.number, self.told = None, False, threading.Event(), 0, set()
        self.run_id, self.address = secrets.token_hex(8), None
        self.store = None  # of a rank on another machine than rank 0's, and of a rank 0 that has such
        self.remote, self.copied = [], {}  # ranks on other machines, and what they said last as it came
        self.constants = {}

    def run(self):
        """Beat until the block is over, and once more."""
        for prepare in (self._meet, self._introduce, self._clear_folder):
            with self._harmless():
                prepare()
        self._beat()
        while not self.over.wait(INTERVAL_SECONDS):
            self._beat()
        self._beat()
        deadline = time.monotonic() + FAREWELL_SECONDS
        while self.remote and time.monotonic() < deadline and not all(map(self._has_ended, self.remote)):
            time.sleep(INTERVAL_SECONDS / 20)
            with self._harmless():
                self._copy_remote()

    def _beat(self):
        with self._harmless():
            said = self._said()
            try:
                self._write(self.dist.rank, said)
            finally:
                if self.store is not None and not self.dist.main:
                    self.store.set(f"heartbeat/{self.dist.rank}", said)
        if self.number % REMOTE_BEATS == 0 or self.ended:
            with self._harmless():
                self._copy_remote()

    @contextlib.contextmanager
    def _harmless(self):
        """Say once what goes wrong in the block, and go on, without the store if that was the cause."""
        try:
            yield
        except OSError as problem:
            self._tell("disk", f"no se puede escribir en {str(self.folder)!r} ({explain(problem)})")
        except Exception as problem:  # c10d raises RuntimeErrors of several kinds; no beat is worth a training
            self.store, self.remote = None, []
            self._tell("store", first_line(problem))

    def _tell(self, what, reason):
        if what not in self.told and not self.over.is_set():
            with contextlib.suppress(OSError, ValueError):  # nobody reads our output any more
                self.dist.print_each(f"Aviso: monitor.py no verá bien esta ejecución: {reason}.")
        self.told.add(what)

    def _meet(self):
        """Agree on the run's name, and learn who is on another machine."""
        if not self.dist.grouped:
            return
        store = self.dist.store.clone()  # a connection of its own: the main thread's may be waiting for something
        self.run_id = store.compare_set("heartbeat/run", "", self.run_id).decode()
        machines = self.dist.machines
        self.address = machines[self.dist.rank]
        if self.dist.main:
            self.remote = [rank for rank, machine in enumerate(machines) if machine != self.address]
        if self.remote or self.address != machines[0]:
            self.store = store

    def _introduce(self):
        """Set what is the same in every beat."""
        dist = self.dist
        self.constants = {
            "run": self.run_id, "rank": dist.rank, "world_size": dist.world_size, "local_rank": dist.local_rank,
            "host": socket.gethostname(), "address": self.address, "pid": os.getpid(),
            "pids": pid_namespace(), "started": start_of(os.getpid()), "device": str(dist.device),
            "gpu_uuid": _card(dist.device), "memory_total": _memory_total(dist.device)}

    def _clear_folder(self):
        """Make the folder; rank 0 removes what earlier runs left in it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.glob("*.json") if self.dist.main else ():
            if NAME.fullmatch(path.name) and f'"run": "{self.run_id}"'.encode() not in path.read_bytes():
                path.unlink()

    def _said(self):
        """The present Beat as JSON, in bytes, without `received`, which its receiver adds."""
        self.number += 1
        clock, (phase, phase_s) = self.clock, self.clock.now()
        beat = Beat(**self.constants, number=self.number, time=time.time(), step=clock.step, steps=clock.steps,
                    phase="end" if self.ended else phase, phase_s=phase_s, cpu_s=time.process_time(), loss=clock.loss,
                    memory=_memory_used(self.dist.device), windows=[vars(window) for window in clock.windows],
                    ended=self.ended, failed=self.failed, unit=clock.unit)
        return json.dumps({name: value for name, value in vars(beat).items() if name != "received"},
                          ensure_ascii=False).encode()

    def _write(self, rank, said):
        """Replace the file of `rank`; a reader sees the old one or the new one. Not flushed to disk: a second later it
        is worth nothing."""
        name = f"rank-{rank:05d}.json"
        partial = f"{self.folder}/.{name}.{self.dist.rank}{PARTIAL_SUFFIX}"
        os.makedirs(self.folder, exist_ok=True)  # somebody may have removed it while the run is on
        try:
            with open(partial, "wb") as file:
                file.write(said)
            os.replace(partial, f"{self.folder}/{name}")
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise

    def _copy_remote(self):
        """Write what ranks on other machines have said since, with the time at which it was found here."""
        known = [rank for rank in self.remote if rank in self.copied or self.store.check([f"heartbeat/{rank}"])]
        for rank, said in zip(known, self.store.multi_get([f"heartbeat/{rank}" for rank in known]) if known else (),
                              strict=True):
            if said != self.copied.get(rank):
                self.copied[rank] = said
                self._write(rank, said[:-1] + f', "received": {time.time()}}}'.encode())

    def _has_ended(self, rank):
        return b'"ended": null' not in self.copied.get(rank, b'"ended": null')


def _memory_total(device):
    """All bytes there are: of the card; on a CPU of the machine or the container, 0 on Windows."""
    if device.type == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[1]
    total = cgroup.memory_total()
    return int(total) if math.isfinite(total) else 0


def _memory_used(device):
    """Bytes in use: of the card, by whomever; on a CPU of this process."""
    if device.type == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info(device)
        return total - free
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # no Linux
        from aura import backend

        return backend.peak_memory(device)


def _card(device):
    """The card's name for NVML, None on a CPU."""
    if device.type != "cuda":
        return None
    import torch

    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
