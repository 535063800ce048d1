"""The machines of slow_network.py and the processes that train on them: the networks and what limits their links, and
the start, the watching and the end of a crew of processes."""

import argparse
import contextlib
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slow_network_peers import INTERFACE, STEPS, TORCH_DDP, TORCH_LOCAL  # noqa: E402

from aura import report  # noqa: E402
from tests.hosts import PORT, ip  # noqa: E402
from tests.support import free_port  # noqa: E402

PROGRAM = Path(__file__).resolve().parent / "slow_network_peers.py"
ONE, CONTROL = "one", "control"
OURS_TOGETHER = ("ddp", "fp16", "diloco", "auto")
METHODS = (ONE, CONTROL, *OURS_TOGETHER, TORCH_DDP, TORCH_LOCAL)
POLL_S = 0.2


class Failed(Exception):
    """A contestant did not do what it should; the message becomes a line of the result."""


# ---- Networks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """mbit: what the first machine sends at, in Mbit/s. back: what it receives at. loss: percent of the packets."""

    name: str
    mbit: float
    back: float
    loss: int = 0


def network(text):
    """'50', '50/10', '200%2' or '50/10%2' as a Network; ArgumentTypeError for what is none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(?:/(\d+(?:\.\d+)?))?(?:%(\d+))?", text)
    mbit, back, loss = found.groups() if found else ("0", None, None)
    chosen = Network(text, float(mbit), float(back or mbit), int(loss or 0))
    if min(chosen.mbit, chosen.back) <= 0 or chosen.loss > 50:
        raise argparse.ArgumentTypeError(f"{text!r} no es una red: se espera 50 (Mbit/s), 50/10 (al enviar y al "
                                         "recibir) o 200%2 (con un 2 % de pérdida)")
    return chosen


def networks(text):
    return [network(part) for part in text.split(",")]


def limit(switch, net):
    """Give the links of the switch's machines the rates and losses of `net`, or no limits without one."""
    if net is None:
        return
    for number, host in enumerate(switch.hosts):
        rates = (net.mbit, net.back) if number == 0 else 2 * (max(net.mbit, net.back),)
        switch.limit(number, *rates)
        if net.loss:  # so that a frame is lost, and not the 64 KB that the kernel hands on as one
            ip("-n", host, "link", "set", INTERFACE, "gso_max_segs", "1")
            switch.lose(number, net.loss)


# ---- Processes ------------------------------------------------------------------------------------------------------


class Crew:
    """Processes that train, in sessions of their own; killed when the block ends.

    contestant: OURS or a peer. words: of train_gpt2_spanish.py, a list for each process. folders: where each runs.
    hosts: the namespaces they run in, None for none. grouped: whether they are ranks of one group.
    """

    def __init__(self, contestant, words, folders, *, hosts=None, grouped=True, every=1):
        self.folders = folders
        self.hosts = hosts[:len(words)] if hosts else [None] * len(words)
        self.commands = [[sys.executable, str(PROGRAM), str(os.getpid()), contestant, str(every), *map(str, each)]
                         for each in words]
        self.address = ("10.77.0.1", PORT) if hosts else ("127.0.0.1", free_port())
        self.grouped, self.children = grouped and len(words) > 1, []

    def __enter__(self):
        try:
            for rank, (command, host, folder) in enumerate(zip(self.commands, self.hosts, self.folders, strict=True)):
                folder.mkdir(parents=True, exist_ok=True)
                inside = ["ip", "netns", "exec", host] if host else []
                with open(folder / "log", "wb") as log:
                    self.children.append(subprocess.Popen([*inside, *command], cwd=folder, env=self._environment(rank),
                                                          stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                                          start_new_session=True))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for child in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        for child in self.children:
            child.wait()

    def _environment(self, rank):
        own = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        if self.grouped:
            own |= {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": len(self.folders), "MASTER_ADDR": self.address[0],
                    "MASTER_PORT": self.address[1], "GLOO_SOCKET_IFNAME": INTERFACE if self.hosts[0] else "lo"}
        return {**os.environ, **{name: str(value) for name, value in own.items()}}

    def said(self, rank):
        return (self.folders[rank] / "log").read_text(encoding="utf-8", errors="replace")

    def watch(self, done, limit_s):
        """The first true result of done(); Failed if a process ends with an error, or after limit_s seconds."""
        deadline = time.monotonic() + limit_s
        while True:
            codes = [child.poll() for child in self.children]  # before done(): what has ended has written all it will
            if (found := done()) is not None:
                return found
            ended = [(rank, code) for rank, code in enumerate(codes) if code is not None]
            wrong = [(rank, code) for rank, code in ended if code] or (ended if len(ended) == len(codes) else [])
            if wrong or time.monotonic() > deadline:
                rank, code = wrong[0] if wrong else (0, None)
                how = f"no ha acabado en {limit_s:g} s" if code is None else f"ha terminado con el código {code}"
                raise Failed(f"el proceso {rank} {how}:\n" + "\n".join(self.said(rank).strip().splitlines()[-12:]))
            time.sleep(POLL_S)

    def finish(self, limit_s):
        """Wait until all have ended without an error."""
        self.watch(lambda: True if all(child.poll() == 0 for child in self.children) else None, limit_s)

    def marks(self):
        """For each process [(seconds, bytes sent)] at the beginning of each of its steps so far."""
        return [read_marks(folder / STEPS) for folder in self.folders]

    def losses(self):
        """Mean over the processes that tell them, {step: loss}."""
        tables = [{int(row["step"]): float(row["loss"]) for row in report.read_table(folder / "logs" / "train.csv")}
                  for folder in self.folders]
        tables = [table for table in tables if table]
        common = set.intersection(*map(set, tables)) if tables else ()
        return {step: statistics.fmean(table[step] for table in tables) for step in sorted(common)}


def places(folder, names):
    return [Path(folder, str(name)) for name in names]


def read_marks(path):
    """[(seconds, bytes sent)] of the whole lines of a STEPS file; [] while there is none."""
    if not path.exists():
        return []
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
    return [(float(seconds), int(sent)) for seconds, sent in map(str.split, whole.splitlines())]
