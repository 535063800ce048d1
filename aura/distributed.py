"""Start the group of processes, agree on a backend, talk, and leave nothing behind.

    with distributed.session(args) as dist:
        model = dist.wrap(model)
        (total,) = dist.sum([local_count])

The store (TCPStore) is the control plane: who joined, what each can do, who failed and why. It works before any
collective does, so every wait ends with the names of those who are missing.
"""

import contextlib
import errno
import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
import uuid
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as c10d

from aura import backend as backends
from aura import placement, sharding, sources, sync, waiting
from aura.backend import within
from aura.errors import OutOfMemory, PeerLost, TrainingFault, UserError, agreed, first_line
from aura.files import explain
from aura.launch import LISTENED
from aura.processes import has_ended, start_of, watch
from aura.signals import die_with_parent

POLL_SECONDS = 0.2
LOOK_SECONDS = 1.0  # between two looks whether somebody asks who is left
# The arguments that must be the same in all processes: those that decide the model, the steps and when processes talk.
# Not those that name files, which may lie elsewhere on another machine.
SAME_EVERYWHERE = (
    "preset", "n_layer", "n_head", "n_embd", "n_ff", "h_cycles", "l_cycles", "segments", "seq_len", "dropout",
    "ponder_price", "reinject", "document_attention", "vocab_size", "max_len", "doc_stride", "question_len", "padding",
    "max_train_examples", "max_val_examples", "stream", "benchmark", "precision", "batch_size", "grad_accum", "epochs",
    "max_steps", "lr", "min_lr_ratio", "beta2", "weight_decay", "warmup_ratio", "grad_clip", "ema", "seed",
    "nan_policy", "eval_interval", "eval_windows", "sample_length", "sample_prompt", "checkpoint_freq", "backend",
    "strategy", "fsdp", "sync", "sync_every", "sync_lr", "sync_momentum")
ENDING_SECONDS = 2  # what a killed process may take from its last connection to its end
FAREWELL_SECONDS = 5  # how long a failing rank 0 keeps the store open so that the others can read why


@dataclass
class Session:
    """What a script needs to know about its group. `fallback`: why NCCL was left for gloo, None where it was not.
    `shards`: into how many parts the model is cut, 1 when each process holds all of it. `launch`: a name shared by all
    attempts of one launch_distributed.py; without that launcher, of this session alone."""

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
    turns: int = 0  # of run_on_main
    first: int | None = None  # processes.watch() of rank 0's process, where that is another of this machine
    broken: bool = False  # peer_lost() was called: no collective will ever end again
    mesh: object = None  # the group as shards know it
    launch: str = field(default_factory=lambda: os.environ.get(LISTENED) or uuid.uuid4().hex)

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
            print(*words, flush=True)

    def print_each(self, text):
        """Print one line from every rank, in one write so that lines of different processes never mix."""
        sys.stdout.write(f"[rango {self.rank}] {text}\n")
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
                fault = isinstance(problem, TrainingFault)
                self.store.set(key, json.dumps({"error": _reason(problem), "fault": fault}))
                raise problem
            self.store.set(key, json.dumps({"result": result}))
            return result
        while not self._stored(key):
            # A rank 0 that is killed posts no failure, and a store of torchrun's outlives it without noticing, so its
            # process is watched as well. This is asked before the store is: what rank 0 posted before it went is there.
            gone = self.first is not None and has_ended(self.first)
            told = self.failure() or (gone and (0, "ha muerto sin decir por qué (si no lo mató usted, pudo faltar "
                                                   "memoria: dmesg lo dice)"))
            if told and not self._stored(key):
                raise self._left(told)
            time.sleep(POLL_SECONDS)
        answer = json.loads(self.store.get(key))
        if "error" in answer:
            kind = TrainingFault if answer["fault"] else UserError
            raise agreed(kind, f"el rango 0 se ha detenido: {answer['error']}")
        return answer["result"]

    def wait_for_main(self):
        """Wait until rank 0 comes here too, however long it takes: torchrun kills who is left 30 s after the first
        process has gone. Where torchrun itself was killed, and with it the store, dist_timeout limits the wait."""
        with contextlib.suppress(c10d.DistError):
            self.run_on_main(lambda: None)
        self.barrier()

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

    def post_failure(self, problem):
        """Leave the reason of our own end where the others look when they lose us; the first reason stays."""
        if self.grouped:
            # The store may be what is gone; our problem is already on its way.
            with contextlib.suppress(RuntimeError, TimeoutError):
                reason = json.dumps([self.rank, _reason(problem)])
                within(FAREWELL_SECONDS, lambda: self.store.compare_set("failed", "", reason))

    def failure(self):
        """(rank, reason) of the first process that has posted its failure; None where none has, or the store is out of
        reach."""
        if self.told:
            return self.told
        with contextlib.suppress(RuntimeError, TimeoutError):
            said = within(2, lambda: self.store.get("failed").decode() if self.store.check(["failed"]) else None)
            return said and json.loads(said)

    def peer_lost(self, problem):
        """A PeerLost that gives the reason another process left, or what the network said."""
        self.broken = True
        if told := self.failure():
            return self._left(told)
        return PeerLost(f"se ha perdido la comunicación con otro proceso{self._silent_ranks()} (espera máxima "
                        f"{self.timeout:g} s): compruebe que todas las máquinas siguen encendidas y en red; lo que "
                        f"dijo la red: {first_line(problem)}")

    def _left(self, told):
        """A PeerLost that gives the reason of failure()."""
        self.broken, self.failed = True, told[:1]
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
            return away, [rank for rank in away if not self.store.check([f"alive/{rank}"])]

        try:
            away, silent = within(FAREWELL_SECONDS + 2, ask)
        except (RuntimeError, TimeoutError):  # the store itself is out of reach, and it lives on rank 0's machine
            away = silent = [0] if self.rank else []
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
    def saves_alone(self):
        """Whether this rank is one that saves now that others are lost: rank 0 or, where that is lost itself, the first
        rank left on each machine, since without rank 0's store no machine knows whether the others are there."""
        gone = self.silent + self.failed
        if 0 not in gone:
            return self.main
        return self.rank == next(rank for rank, machine in enumerate(self.machines)
                                 if machine == self.machines[self.rank] and rank not in gone)

    def by_rows(self, module):
        """The parameters whose gradients travel by rows (see exchange.py): where all ranks have CPUs, since all of them
        must exchange alike."""
        on_cpus = set(self.devices or [self.device.type]) == {"cpu"}
        return module.row_gradients() if on_cpus and hasattr(module, "row_gradients") else []

    def wrap(self, module):
        """`module` under DistributedDataParallel, or itself when there is no group or it is cut."""
        if not self.grouped or self.sharded:
            return module
        devices = [self.device.index] if self.device.type == "cuda" else None
        by_rows = self.by_rows(module)
        apart = set(map(id, by_rows))
        _Parallel._set_params_and_buffers_to_ignore_for_model(
            module, [name for name, parameter in module.named_parameters() if id(parameter) in apart])
        for parameter in by_rows:
            c10d.broadcast(parameter.detach(), src=0)
        wrapped = _Parallel(module, device_ids=devices, gradient_as_bucket_view=True)
        wrapped.order_buckets()
        wrapped.broadcast_buffers = False  # no step changes one; it would be a wait for rank 0 inside every forward
        wrapped.by_rows = by_rows
        return wrapped


class _Parallel(torch.nn.parallel.DistributedDataParallel):
    """DistributedDataParallel whose buckets never change, and which does not hang when it is freed after its group.

    By itself it lays out the buckets anew after its first backward, and where a gradient lies in its bucket decides in
    which order those of more than two ranks are added up: the first step after a resume would round otherwise than the
    same step of a run that was never stopped.

    What the last backward sent is freed by gloo's threads, which need the GIL for it; whoever frees the group joins
    those threads. The reducer does so with the GIL held, and both wait for ever; Python's own reference lets go of it
    (https://github.com/pytorch/pytorch/issues/56297). So the reducer goes first, while self.process_group is there."""

    def _build_params_for_reducer(self):
        parameters, sparse = super()._build_params_for_reducer()
        return parameters[::-1], sparse[::-1]  # about as backward completes their gradients

    def order_buckets(self):
        """Lay out the buckets for good, before there are gradients."""
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()

    def __del__(self):
        for holder in ("logger", "reducer"):  # the logger has the reducer, too
            vars(self).pop(holder, None)


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


@contextlib.contextmanager
def session(args, before_group=None):
    """Yield this process's Session; the group is closed and the environment restored on any exit.

    args: namespace with backend, dist_timeout and the placement flags (see cli.add_distributed), perhaps fsdp and sync.
    before_group(dist, place, peers): what to do once the processes have met at the store and have no group yet. peers:
    {rank: {"host", "address"}} of those that came in time, which may be fewer than there should be. It says whether to
    start the group; without one the Session has no backend.
    Raises UserError for a bad or unreachable address and TrainingFault, naming who is missing, when others do not come
    or leave in the middle.
    """
    sharded = getattr(args, "fsdp", False)
    sync.check(getattr(args, "sync", "auto"), args, sharded)
    place = placement.find(args)
    backends.limit_threads()
    dist = Session(place.rank, place.local_rank, place.world_size, timeout=args.dist_timeout,
                   shards=place.world_size if sharded else 1)
    if not place.grouped:
        if idle := sync.idle_alone(args):
            dist.print(f"Aviso: con un solo proceso no tiene efecto {idle}.")
        dist.device = backends.local_device(place.local_rank)
        with _shortage_told():
            yield dist
        return
    # torchrun killed tells nobody, and its processes would go on without it. Under launch_distributed.py the process in
    # between says so, and who has not ended when that is killed in its turn (see launch.run_rank) hears no SIGTERM.
    if place.source == "torchrun" and LISTENED not in os.environ:
        die_with_parent(signal.SIGTERM, os.getppid())()
    before = dict(os.environ)
    try:
        dist.store = backends.connect_store(place, dist.timeout)
        with _failures_told(dist), _shortage_told():
            peers = _join(place, dist, args)
            if before_group is None:
                _require_all(peers, place, dist.timeout)
                _require_same(peers)
                _warn_of_other_code(dist, peers)
            _settle(dist, place, peers)
            if before_group is None or before_group(dist, place, peers):
                dist.machines = [peers[rank]["address"] for rank in range(place.world_size)]
                _start_group(dist, place, peers, args.backend)
            with _answering(dist):
                yield dist
    finally:
        sharding.release(dist.mesh)
        if c10d.is_initialized():
            c10d.destroy_process_group()
        if dist.store is not None and isinstance(problem := sys.exc_info()[1], Exception) \
                and not isinstance(problem, RankTaken):
            _say_farewell(dist)
        if dist.first is not None:
            os.close(dist.first)
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _answering(dist):
    """A block during which this process answers others who ask who is left (see Session._silent_ranks), and hears why
    one leaves, though its main thread is at work and finds out later: in a collective, not before that one's process is
    gone, with rank 0's the store."""
    over = threading.Event()

    def answer():
        with contextlib.suppress(RuntimeError):  # without the store nobody can ask
            store = dist.store.clone()  # a connection of its own: the main thread's may be waiting for something
            while not over.wait(LOOK_SECONDS):
                if not dist.told and store.check(["failed"]):
                    dist.told = json.loads(store.get("failed"))
                    store.set(f"left/{dist.rank}", "1")  # for _say_farewell
                if store.check(["lost"]):
                    store.set(f"alive/{dist.rank}", "1")
                    return

    thread = threading.Thread(target=answer, name="answers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(LOOK_SECONDS)  # a store that is stopped may hold it


def _say_farewell(dist):
    """After a failure: rank 0, whose process may hold the store, leaves last, so that the others can read why."""
    if 0 in dist.silent:  # and its store with it
        return

    def leave():
        dist.store.set(f"left/{dist.rank}", "1")
        deadline = time.monotonic() + FAREWELL_SECONDS
        keys = [f"left/{rank}" for rank in range(dist.world_size)
                if rank not in dist.silent and dist.store.check([f"joined/{rank}"])]
        while dist.main and time.monotonic() < deadline and not dist.store.check(keys):
            time.sleep(POLL_SECONDS)

    with contextlib.suppress(RuntimeError, TimeoutError):
        within(FAREWELL_SECONDS + 2, leave)


@contextlib.contextmanager
def _failures_told(dist):
    """Tell the others why we leave, and turn a broken collective into one line that says who left and why."""
    try:
        yield
    except (PeerLost, RankTaken):
        raise
    except Exception as problem:
        if isinstance(problem, RuntimeError) and is_communication_error(problem):
            raise dist.peer_lost(problem) from problem
        dist.post_failure(problem)
        raise


@contextlib.contextmanager
def _shortage_told():
    """Turn a lack of memory before the first step or after the last one into one line, as while the model is built on a
    card that another program fills; of one in between loop.train says more. The same for a lack of threads."""
    try:
        yield
    except (RuntimeError, MemoryError) as problem:
        if whose := backends.out_of_memory(problem):
            raise OutOfMemory(f"no basta la memoria de {whose} fuera de los pasos del entrenamiento: libere la que "
                              "usan otros programas (nvidia-smi y free -h la muestran), o elija un modelo o un lote "
                              "menor; la misma orden continúa desde el último punto de control, si lo hay") from problem
        if "can't start new thread" in str(problem):  # Python's, which gives no errno
            raise TrainingFault(f"{explain(OSError(errno.EAGAIN, ''))}; suba ese límite, o cierre otros programas, y "
                                "repita la misma orden") from problem
        raise


def _reason(problem):
    """Why a process leaves, as the others are told."""
    if isinstance(problem, OSError):
        where = f"{str(problem.filename)!r}: " if problem.filename else ""
        return where + explain(problem)
    return str(getattr(problem, "reason", problem)) or type(problem).__name__


def is_communication_error(problem):
    """Whether a RuntimeError came from a peer that is gone; gloo has no exception type of its own."""
    marks = ("gloo", "Connection closed by peer", "Connection reset by peer", "Timed out waiting", "NCCL",
             "Broken pipe", "Socket Timeout", "No route to host", "Application timeout")
    return isinstance(problem, c10d.DistError) or any(mark in str(problem) for mark in marks)


class RankTaken(UserError):
    """Another process is this one's rank: nothing that the group has to hear of, which may be at work."""


def _join(place, dist, args):
    """Say who we are, wait for the others; returns {rank: {"host", "address", "pid", "start", "node", "world_size",
    "arguments", "code"}} of those that came in time, and at once when one of them counts on another number of
    processes. Raises RankTaken where the same order was typed twice."""
    address, store = placement.address_towards(place.master_addr, place.master_port), dist.store
    own, key = uuid.uuid4().hex, f"joined/{place.rank}"
    mine = json.dumps({"process": own, "host": socket.gethostname(), "address": address,
                       "pid": os.getpid(), "start": start_of(os.getpid()),
                       "node": os.environ.get("SLURMD_NODENAME"), "world_size": place.world_size,
                       "arguments": _compared(args), "code": sources.fingerprint()})
    patience = waiting.Patience(dist.print)

    def taken(other):
        other = json.loads(other)
        return RankTaken(f"otro proceso, en la máquina {other['host']} ({other['address']}), dice que es el rango "
                         f"{place.rank}, como este: dé a cada uno su número (RANK, NODE_RANK o --node_rank)")

    def wait():
        came = {}
        if store.check(["complete"]):
            raise RankTaken(f"el grupo de {place.master_addr}:{place.master_port}, de {store.get('complete').decode()} "
                            f"procesos, está completo y en marcha sin este, el rango {place.rank} de "
                            f"{place.world_size}: si se lanzó dos veces la misma orden, deje una; si es otro "
                            "entrenamiento, elija otro --master-port (o MASTER_PORT) en todas")
        store.set(key, mine)
        while True:
            if (latest := store.get(key).decode()) != mine:  # who came after us waits as well, and is told
                store.set(f"taken/{json.loads(latest)['process']}", mine)
                time.sleep(3 * POLL_SECONDS)
                raise taken(latest)
            if store.check([f"taken/{own}"]):
                raise taken(store.get(f"taken/{own}"))
            came |= {rank: json.loads(store.get(f"joined/{rank}")) for rank in range(place.world_size)
                     if rank not in came and store.check([f"joined/{rank}"])}
            apart = any(peer.get("world_size", place.world_size) != place.world_size for peer in came.values())
            if len(came) == place.world_size or apart or patience.waited() > dist.timeout:
                return came
            away = [rank for rank in range(place.world_size) if rank not in came]
            patience.wait(POLL_SECONDS, f"a {len(away)} de los {place.world_size} procesos: "
                                        f"{placement.told('falta', away)}.")

    try:
        return within(dist.timeout + FAREWELL_SECONDS, wait)
    except TimeoutError as problem:
        raise PeerLost(f"el rango 0, en {place.master_addr}:{place.master_port}, dejó de contestar: mire en su máquina "
                       "si el proceso está parado o bloqueado") from problem


def _compared(args):
    """{name: value} of the arguments in which processes may not differ; of --resume only whether it is none, since
    rank 0 decides which checkpoint is meant."""
    compared = {name: getattr(args, name) for name in SAME_EVERYWHERE if hasattr(args, name)}
    if hasattr(args, "resume"):
        compared["resume"] = "none" if args.resume == "none" else "distinto de none"
    return compared


def _require_all(peers, place, timeout):
    """Raise UserError that names who did not come, or counts on another number of processes."""
    for rank, peer in peers.items():
        if peer.get("world_size", place.world_size) != place.world_size:
            raise UserError(f"WORLD_SIZE={place.world_size} en el rango {place.rank} y {peer['world_size']} en el "
                            f"rango {rank}: use el mismo en todas las máquinas, el número de procesos de todas juntas")
    missing = sorted(set(range(place.world_size)) - peers.keys())
    if missing:
        hint = "; con SLURM, lance el programa con srun" if place.source == "SLURM" else ""
        raise UserError(f"han pasado {timeout:g} s y {placement.told('falta', missing)} de {place.world_size}: "
                        f"compruebe que se lanzaron con el mismo MASTER_ADDR, MASTER_PORT y WORLD_SIZE{hint}")


def _require_same(peers):
    """Raise UserError that names the arguments in which processes differ: what was typed on each machine by hand, and
    would train something else on each or leave one waiting for another."""
    others = [rank for rank, peer in peers.items() if "arguments" not in peer]
    if others:
        raise UserError(f"el rango {others[0]} tiene una versión anterior de este programa: actualícelo en todas las "
                        "máquinas (git rev-parse HEAD ha de dar lo mismo)")
    first, differing = peers[0]["arguments"], {}
    for rank, peer in sorted(peers.items()):
        for name in first.keys() | peer["arguments"].keys():
            if peer["arguments"].get(name) != first.get(name):
                differing.setdefault(name, (rank, peer["arguments"].get(name)))
    if differing:
        told = "; ".join(f"--{name.replace('_', '-')} es {first.get(name)} en el rango 0 y {value} en el rango {rank}"
                         for name, (rank, value) in sorted(differing.items()))
        raise agreed(UserError, f"{told}: lance todos los procesos con las mismas opciones")


def _warn_of_other_code(dist, peers):
    """Say whose program is not rank 0's: one that was edited on one machine alone may train something else there."""
    if others := [rank for rank, peer in sorted(peers.items()) if peer.get("code") != peers[0].get("code")]:
        hosts = ", ".join(dict.fromkeys(peers[rank]["host"] for rank in others))
        dist.print(f"Aviso: el código del rango 0 no es el de {hosts}: si no es a propósito, deje el mismo en todas "
                   "las máquinas (git pull); test_ddp.py --full dice en qué ficheros difiere.")


def _settle(dist, place, peers):
    """Set the environment variables, the network interface and the device of this process, and watch rank 0's where it
    is on this machine."""
    os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.world_size), LOCAL_RANK=str(place.local_rank))
    name = placement.interface_towards(place, peers)
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        if name != "lo":
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
    dist.device = backends.local_device(place.local_rank)
    if not dist.main and 0 in peers and peers[0].get("start"):  # an earlier version does not say
        dist.first = watch(peers[0]["pid"], peers[0]["start"])


def _start_group(dist, place, peers, wanted):
    dist.backend, dist.fallback = backends.agree_backend(place, dist.store, wanted, dist.device, dist.timeout)
    # Its default arguments are bound on import to the group of that moment, which then never ends (see cli.run).
    importlib.import_module("torch.distributed.nn.functional")
    limit = timedelta(seconds=dist.timeout)
    options = {"device_id": dist.device} if dist.backend == "nccl" else {}

    def connect():
        backends.local_device(place.local_rank)  # the current card is a thread's own
        c10d.init_process_group(dist.backend, store=c10d.PrefixStore(f"group/{dist.backend}", dist.store),
                                rank=place.rank, world_size=place.world_size, timeout=limit, **options)
        dist.control = c10d.new_group(backend="gloo", timeout=limit) if dist.backend == "nccl" else c10d.group.WORLD

    try:  # gloo would try five times as long, and hear no Ctrl+C
        with backends.quiet_stderr() if dist.backend == "gloo" else contextlib.nullcontext():
            within(dist.timeout, connect)
    except (TimeoutError, RuntimeError) as problem:
        if isinstance(problem, RuntimeError) and (not is_communication_error(problem) or dist.failure()):
            raise
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        through = f" por la interfaz {interface}" if interface else ""
        raise UserError(f"los procesos se encuentran en {place.master_addr}:{place.master_port}, pero no consiguen "
                        f"conectarse entre sí{through} en {dist.timeout:g} s: deje pasar en el cortafuegos todo el "
                        "TCP entre las máquinas, y no solo ese puerto, o elija otra red con GLOO_SOCKET_IFNAME"
                        ) from problem
    dist.devices = dist.gather_objects(dist.device.type)
    if dist.main:
        dist.store.set("complete", str(place.world_size))
    dist.print_each(f"rank={dist.rank} local_rank={dist.local_rank} world_size={dist.world_size} "
                    f"backend={dist.backend} dispositivo={dist.device} ({backends.device_name(dist.device)}) "
                    f"máquina={peers[dist.rank]['host']} según {place.source}")
    if dist.fallback:
        dist.print(f"fallback=gloo: {dist.fallback}")
