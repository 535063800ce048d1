"""Start the group of processes, agree on a backend, and leave nothing behind.

    with distributed.session(args) as dist:
        model = dist.wrap(model)
        (total,) = dist.sum([local_count])
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
from datetime import timedelta

import torch.distributed as c10d

from aura import backend as backends
from aura import placement, rendezvous, sharding, sync
from aura.backend import within
from aura.errors import OutOfMemory, PeerLost, TrainingFault, UserError, agreed
from aura.files import explain
from aura.processes import watch
from aura.session import FAREWELL_SECONDS, POLL_SECONDS, Session, is_communication_error
from aura.signals import LISTENED, die_with_parent

LOOK_SECONDS = 1.0  # between two looks whether somebody asks who is left


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
            lost = dist.peer_left(told)
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
