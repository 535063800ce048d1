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
import sys
import threading
import time
import uuid
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as c10d

from aura import backend as backends
from aura import ddp, placement, rendezvous, sharding, sync
from aura.backend import within
from aura.console import harmless
from aura.errors import OutOfMemory, PeerLost, TrainingFault, UserError, agreed, first_line, one_line
from aura.files import explain
from aura.processes import has_ended, watch
from aura.signals import JOB, LISTENED, die_with_parent

POLL_SECONDS = 0.2
LOOK_SECONDS = 1.0  # between two looks whether somebody asks who is left
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
                raise self._left(told)
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
            return self._left(told)
        return PeerLost(f"se ha perdido la comunicación con otro proceso{self._silent_ranks()} (espera máxima "
                        f"{self.timeout:g} s): compruebe que todas las máquinas siguen encendidas y en red; lo que "
                        f"dijo la red: {first_line(problem)}")

    def _left(self, told):
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
            dist.print(f"Aviso: con un solo proceso, sin efecto: {idle}.")
        dist.device = backends.take_device(dist.local_rank, dist.print)
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
            peers = rendezvous.join(place, dist, args)
            if before_group is None:
                rendezvous.require_all(peers, place, dist.timeout)
                rendezvous.require_same(peers)
                _require_reachable(peers)
                rendezvous.warn_of_other_code(dist, peers)
            _settle(dist, place, peers)
            with _answering(dist):
                if before_group is None or before_group(dist, place, peers):
                    dist.machines = [peers[rank]["address"] for rank in range(place.world_size)]
                    _start_group(dist, place, peers, args.backend)
                yield dist
    finally:
        sharding.release(dist.mesh)
        if c10d.is_initialized():
            c10d.destroy_process_group()
        if dist.store is not None and isinstance(problem := sys.exc_info()[1], Exception) \
                and not isinstance(problem, rendezvous.RankTaken):
            _say_farewell(dist)
        if dist.first is not None:
            os.close(dist.first)
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _answering(dist):
    """A block during which this process answers others who ask who is left (see Session._silent_ranks), and hears why
    one leaves or who is lost, though its main thread is at work and finds out later: in a collective, not before that
    one's process is gone, with rank 0's the store."""
    over = threading.Event()

    def answer():
        with contextlib.suppress(RuntimeError):  # without the store nobody can ask
            store = dist.store.clone()  # a connection of its own: the main thread's may be waiting for something
            alive = False
            while not over.wait(LOOK_SECONDS):
                if not dist.told and store.check(["failed"]):
                    dist.told = json.loads(store.get("failed"))
                    store.set(f"left/{dist.rank}", "1")  # for _say_farewell
                if not dist.missed and store.check(["silent"]):
                    dist.missed = [rank for rank in json.loads(store.get("silent")) if rank != dist.rank]
                    store.set(f"left/{dist.rank}", "1")
                if not alive and store.check(["lost"]):
                    store.set(f"alive/{dist.rank}", "1")
                    alive = True

    thread = threading.Thread(target=answer, daemon=True)
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
    except (PeerLost, rendezvous.RankTaken):
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


def _require_reachable(peers):
    """Raise UserError for what would keep processes that have met from connecting to each other."""
    if problem := placement.one_address(peers):
        raise agreed(UserError, problem)
    if (name := os.environ.get("GLOO_SOCKET_IFNAME")) and (problem := placement.interface_problem(name)):
        raise UserError(problem)


def _require_store(dist):
    """Raise PeerLost unless the store answers: without rank 0 it is no firewall that keeps processes apart."""
    try:
        # By a connection of its own: that of dist.store may be waiting for what another process has yet to say.
        within(FAREWELL_SECONDS, lambda: dist.store.clone().check(["failed"]))
    except (RuntimeError, TimeoutError) as problem:
        raise dist.peer_lost(problem) from problem


def _settle(dist, place, peers):
    """Set the environment variables, the network interface and the device of this process, and watch rank 0's where it
    is on this machine."""
    os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.world_size), LOCAL_RANK=str(place.local_rank))
    name = placement.interface_towards(place, peers)
    hidden = None if "GLOO_SOCKET_IFNAME" in os.environ else placement.hidden_address(
        peers, place.rank, place.master_port)
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        if name != "lo":
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
    if hidden:
        dist.print_each(f"Aviso: {hidden}, la dirección de esta máquina para las demás, no es la primera de su "
                        "interfaz de red, y gloo usa la primera: si los procesos no consiguen conectarse entre sí, "
                        "quite la otra, o dé como --master-addr (o MASTER_ADDR) una dirección de la red de la primera.")
    dist.device = backends.take_device(dist.local_rank, dist.print_each)
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
            within(dist.timeout, connect, lambda: dist.told)
    except (TimeoutError, RuntimeError) as problem:
        if told := dist.failure():  # before there is a group, the bad argument of one is that of all
            lost = dist._left(told)
            raise lost if told[3] else UserError(str(lost)) from problem
        if isinstance(problem, RuntimeError) and not is_communication_error(problem):
            raise
        _require_store(dist)
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
