"""What the processes of a group say to one another: sums, trees of tensors, what rank 0 has done, why one leaves.

The store (TCPStore) is the control plane: who joined, what each can do, who failed and why. It works before any
collective does, so every wait ends with the names of those who are missing.
"""

import contextlib
import json
import os
import sys
import time
import uuid
from dataclasses import dataclass, field

import torch
import torch.distributed as c10d

from aura import ddp, placement, sharding
from aura.backend import within
from aura.console import harmless
from aura.errors import PeerLost, TrainingFault, UserError, agreed, first_line, one_line
from aura.files import explain
from aura.processes import has_ended
from aura.signals import JOB, LISTENED

POLL_SECONDS = 0.2
ENDING_SECONDS = 2  # what a killed process may take from its last connection to its end
FAREWELL_SECONDS = 5  # how long a failing rank 0 keeps the store open so that the others can read why


@dataclass
class Session:
    """What a script needs to know about its group. `fallback`: why NCCL was left for gloo, None where it was not.
    `shards`: into how many parts the model is cut, 1 when each process holds all of it. `launch`: a name shared by all
    attempts of one launch_distributed.py or of one job of distributed.slurm; without them, of this session alone."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str = "ninguno"
    fallback: str | None = None
    timeout: float = 600.0
    shards: int = 1
    store: object = None
    control: object = None  # a gloo group for objects and CPU tensors, whatever carries the gradients
    machines: list = field(default_factory=list)  # the address of every rank's machine
    devices: list = field(default_factory=list)  # the type of every rank's device
    silent: list = field(default_factory=list)  # ranks that did not answer when a collective failed
    failed: list = field(default_factory=list)  # the rank that said why it left
    told: list | None = None  # failure() as it was heard while the main thread was at work
    missed: list = field(default_factory=list)  # the ranks that others found silent, heard in the same way
    turns: int = 0  # of run_on_main
    first: int | None = None  # processes.watch() of rank 0's process, where that is another of this machine
    broken: bool = False  # peer_lost() was called: no collective will ever end again
    mesh: object = None  # the group as shards know it
    launch: str = field(default_factory=lambda: os.environ.get(LISTENED) or os.environ.get(JOB) or uuid.uuid4().hex)

    @property
    def main(self):
        """Whether this process is the one that prints, saves and shows progress."""
        return self.rank == 0

    @property
    def grouped(self):
        """Whether there is a process group at all."""
        return self.store is not None

    @property
    def sharded(self):
        """Whether a forward pass takes all ranks, each of which holds a part of the weights."""
        return self.shards > 1

    def build(self, make, fill):
        """fill(make()), a module with its weights, on the device. A model that is going to be cut may not fit there
        whole: rank 0 keeps it in host memory, and the other ranks get it empty, on the meta device."""
        if self.sharded and not self.main:
            with torch.device("meta"):
                return make()
        module = fill(make())
        return module if self.sharded else module.to(self.device)

    def print(self, *words):
        """Print on rank 0 only."""
        if self.main:
            print(harmless(" ".join(map(str, words))), flush=True)

    def print_each(self, text):
        """Print one line from every rank, in one write so that lines of different processes never mix."""
        sys.stdout.write(harmless(f"[rango {self.rank}] {text}\n"))
        sys.stdout.flush()

    def sum(self, values):
        """Sum a short list of numbers over all ranks, in float64 on the CPU. Returns a list of floats."""
        if not self.grouped:
            return [float(value) for value in values]
        tensor = torch.tensor([float(value) for value in values], dtype=torch.float64)
        c10d.all_reduce(tensor, group=self.control)
        return tensor.tolist()

    def barrier(self):
        """Wait for every rank."""
        self.sum([0])

    def gather_objects(self, value):
        """Every rank's `value` (picklable), in rank order, on every rank. Once the group is broken, None in place of
        the others'."""
        if not self.grouped:
            return [value]
        values = [None] * self.world_size
        if self.broken:
            values[self.rank] = value
            return values
        c10d.all_gather_object(values, value, group=self.control)
        return values

    def broadcast_tree(self, tree, keep=None, source=0):
        """The nested dicts, lists and tuples of CPU tensors and plain values of rank `source`, on every rank.

        Tensors travel one at a time, so no rank holds the tree twice. The argument is ignored on other ranks.
        keep(place, tensor) -> what this rank keeps of a tensor; place: the keys that lead to it.
        """
        if not self.grouped:
            return tree
        box = [_skeleton(tree) if self.rank == source else None]
        c10d.broadcast_object_list(box, src=source, group=self.control)
        return self._fill(box[0], tree, keep or (lambda place, tensor: tensor), source)

    def _fill(self, shape, tree, keep, source, place=()):
        sending = self.rank == source

        def part(key):
            return self._fill(shape[key], tree[key] if sending else None, keep, source, (*place, key))

        if isinstance(shape, _TensorShape):
            tensor = tree.contiguous() if sending else torch.empty(shape.size, dtype=shape.dtype)
            if tensor.numel():
                c10d.broadcast(tensor.reshape(-1).view(torch.uint8), src=source, group=self.control)
            return keep(place, tensor)
        if isinstance(shape, dict):
            return {key: part(key) for key in shape}
        if isinstance(shape, list | tuple):
            return type(shape)(part(number) for number in range(len(shape)))
        return shape

    def broadcast_weights(self, module):
        """Send rank 0's parameters and buffers to every process, in place; shards, which nobody else has, stay."""
        if self.grouped:
            for tensor in module.state_dict().values():
                if not sharding.is_shard(tensor):
                    c10d.broadcast(tensor, src=0, group=self.control if tensor.device.type == "cpu" else None)

    def run_on_main(self, work):
        """Run `work()` on rank 0 alone, however long it takes, and return its JSON-able result on every rank.

        The others ask the store instead of waiting in a collective, so no time-out limits the work; if rank 0 fails,
        they fail with its reason.
        """
        if not self.grouped:
            return work()
        self.turns += 1
        key = f"main/{self.turns}"
        if self.main:
            try:
                result = work()
            except BaseException as problem:
                if isinstance(problem, RuntimeError) and is_communication_error(problem):
                    problem = self.peer_lost(problem)
                self.post_failure(problem, self.turns)
                raise problem
            self.store.set(key, json.dumps(result))
            return result
        while True:
            # A rank 0 that is killed posts no failure, and a store of torchrun's outlives it without noticing, so its
            # process is watched as well. This is asked before the store is: what rank 0 posted before it went is there.
            gone = self.first is not None and has_ended(self.first)
            told = self.failure() or (gone and [0, "ha muerto sin decir por qué (si no lo mató usted, pudo faltar "
                                                   "memoria: dmesg lo dice)", None, True])
            if told and told[2] is not None and told[2] >= self.turns:
                _, reason, _, fault = told
                raise agreed(TrainingFault if fault else UserError, f"el rango 0 se ha detenido: {reason}")
            if self._stored(key):
                return json.loads(self.store.get(key))
            if told:
                raise self.peer_left(told)
            time.sleep(POLL_SECONDS)

    def wait_for_main(self):
        """Wait until rank 0 comes here too, however long it takes: torchrun kills who is left 30 s after the first
        process has gone. Where torchrun itself was killed, and with it the store, dist_timeout limits the wait. Returns
        whether the store was still there for all, without which run_on_main can do nothing more."""
        answered = False
        with contextlib.suppress(c10d.DistError):
            self.run_on_main(lambda: None)
            answered = True
        return self.sum([answered])[0] == self.world_size

    def made_on_main(self, work):
        """What `work()` makes, of whatever type, on rank 0, which alone runs it as run_on_main does; None on the
        others."""
        made = []
        self.run_on_main(lambda: made.append(work()))
        return made[0] if made else None

    def _stored(self, key):
        try:
            return within(self.timeout, lambda: self.store.check([key]))
        except TimeoutError as problem:
            raise c10d.DistNetworkError(f"el rango 0 no contesta: {problem}") from problem

    def post_failure(self, problem, turn=None):
        """Leave the reason of our own end where the others look when they lose us; the first reason stays. turn: of
        run_on_main, whose failures are those of all."""
        if self.grouped:
            # The store may be what is gone; our problem is already on its way.
            with contextlib.suppress(RuntimeError, TimeoutError):
                fault = isinstance(problem, TrainingFault | KeyboardInterrupt)
                reason = json.dumps([self.rank, _reason(problem), turn, fault])
                within(FAREWELL_SECONDS, lambda: self.store.compare_set("failed", "", reason))

    def failure(self):
        """[rank, reason, turn of run_on_main or None, whether it is a fault] of the first process that has posted its
        failure; None where none has, or the store is out of reach."""
        if self.told:
            return self.told
        with contextlib.suppress(RuntimeError, TimeoutError):
            said = within(2, lambda: self.store.get("failed").decode() if self.store.check(["failed"]) else None)
            return said and json.loads(said)

    def peer_lost(self, problem):
        """A PeerLost that gives the reason another process left, or what the network said."""
        self.broken = True
        if told := self.failure():
            return self.peer_left(told)
        return PeerLost(f"se ha perdido la comunicación con otro proceso{self._silent_ranks()} (espera máxima "
                        f"{self.timeout:g} s): compruebe que todas las máquinas siguen encendidas y en red; lo que "
                        f"dijo la red: {first_line(problem)}")

    def peer_left(self, told):
        """A PeerLost that gives the reason of failure()."""
        self.broken, self.failed = True, [told[0]]
        return PeerLost(f"otro proceso se ha detenido: rango {told[0]}: {told[1]}")

    def _silent_ranks(self):
        """A phrase that names the ranks that do not answer at the store after a collective has failed or, where all of
        them do, those that have not reached that collective, busy or stuck as they may be."""
        def ask():
            self.store.set(f"survivor/{self.rank}", "1")
            self.store.set("lost", "1")
            away, deadline = list(range(self.world_size)), time.monotonic() + FAREWELL_SECONDS
            while away and time.monotonic() < deadline:
                away = [rank for rank in away if not self.store.check([f"survivor/{rank}"])]
                time.sleep(POLL_SECONDS)
            silent = [rank for rank in away if not self.store.check([f"alive/{rank}"])]
            if silent:  # for who comes when the store is gone with us
                self.store.set("silent", json.dumps(silent))
            return away, silent

        try:
            away, silent = within(FAREWELL_SECONDS + 2, ask)
        except (RuntimeError, TimeoutError):  # the store itself is out of reach, and it lives on rank 0's machine
            away = silent = self.missed or ([0] if self.rank else [])
        self.silent = silent or away
        how = ("no contesta",) if silent else ("no ha", "llegado a este punto")
        return f"; {placement.told(how[0], self.silent, *how[1:])}" if self.silent else ""

    @property
    def first_has_left(self):
        """Whether rank 0, in another process of this machine, is known to have died or given up: what it was writing
        is written or never will be."""
        if self.first is None:
            return False
        # One that is killed loses its connections a moment before it is gone.
        return 0 in self.failed or has_ended(self.first, ENDING_SECONDS if 0 in self.silent else 0)

    @property
    def saver(self):
        """The rank that saves for this one now that others are lost: rank 0 or, where that is lost itself, the first
        rank left on this machine, since without rank 0's store no machine knows whether the others are there."""
        gone = self.silent + self.failed
        return 0 if 0 not in gone else next(rank for rank, machine in enumerate(self.machines)
                                            if machine == self.machines[self.rank] and rank not in gone)

    def tells_of_signals(self):
        """Whether to say that a signal will be obeyed: one process of each machine does, as long as none is lost."""
        return self.local_rank == 0 and not self.broken

    def by_rows(self, module):
        """The parameters whose gradients travel by rows (see exchange.py): where all ranks have CPUs, since all of them
        must exchange alike."""
        on_cpus = set(self.devices or [self.device.type]) == {"cpu"}
        return module.row_gradients() if on_cpus and hasattr(module, "row_gradients") else []

    def wrap(self, module):
        """`module` under DistributedDataParallel, or itself when there is no group or it is cut."""
        if not self.grouped or self.sharded:
            return module
        return ddp.wrap(module, self.device, self.by_rows(module))


@dataclass(frozen=True)
class _TensorShape:
    size: tuple
    dtype: torch.dtype


def _skeleton(tree):
    if isinstance(tree, torch.Tensor):
        return _TensorShape(tuple(tree.shape), tree.dtype)
    if isinstance(tree, dict):
        return {key: _skeleton(part) for key, part in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_skeleton(part) for part in tree)
    return tree


def _reason(problem):
    """Why a process leaves, as the others are told."""
    if isinstance(problem, KeyboardInterrupt):
        return "lo interrumpió Ctrl+C"
    if isinstance(problem, OSError):
        where = f"{str(problem.filename)!r}: " if problem.filename else ""
        return where + explain(problem)
    if isinstance(problem, UserError | TrainingFault):
        return str(getattr(problem, "reason", problem))
    return one_line(problem)  # torch's compilers tell of all that they were given


def is_communication_error(problem):
    """Whether a RuntimeError came from a peer that is gone; gloo has no exception type of its own."""
    marks = ("gloo", "Connection closed by peer", "Connection reset by peer", "Timed out waiting", "NCCL",
             "Broken pipe", "Socket Timeout", "No route to host", "Application timeout")
    return isinstance(problem, c10d.DistError) or any(mark in str(problem) for mark in marks)
