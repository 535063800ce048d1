"""Which device, which store, which backend: what must be settled before a process group can start."""

import contextlib
import errno
import gc
import io
import json
import os
import platform
import re
import socket
import subprocess
import sys
import threading
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as c10d

from aura import cgroup, gpus, placement, waiting
from aura.errors import UserError, first_line

CPU_FULL = ("DefaultCPUAllocator", "std::bad_alloc", os.strerror(errno.ENOMEM))  # in what torch says of the host
ONEDNN_FULL = "could not create a primitive"  # all that it says; what it has no code for has more words
OVER = "over"  # the key that says of an attempt's keys that a later one has begun
HOPE_SECONDS = 0.5  # between two looks whether there is still anything to wait for
NCCL_PROBE_SECONDS = 90  # a first NCCL communicator over many hosts takes tens of seconds; a hang takes for ever


def local_device(local_rank):
    """The process's device, made the current one: a card by its number on this machine, else the CPU."""
    warnings.filterwarnings("ignore", "CUDA initialization")  # what unused_card tells
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def unused_card(device):
    """Why the process's device is the CPU although there is an NVIDIA card, as a phrase with the way out. None where
    there is none, or CUDA_VISIBLE_DEVICES hides every one."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    if device.type != "cpu" or not re.match(r"\d|GPU-|MIG-", shown) or not gpus.present():
        return None
    here = f"hay una tarjeta de NVIDIA y torch {torch.__version__} no la usa"
    if torch.version.cuda is None:
        return (f"{here}: es el que solo sabe usar el procesador; desinstálelo (pip uninstall torch) e instale el que "
                "trae CUDA (https://pytorch.org/get-started/locally)")
    try:
        torch.cuda.init()
        said = "no ve ninguna"
    except RuntimeError as problem:
        said = re.split(r"\. |\n", str(problem))[0]
    return (f"{here} (dice «{said}»): trae CUDA {torch.version.cuda}, y nvidia-smi muestra el controlador y hasta qué "
            "CUDA admite; actualícelo, o instale un torch para ese CUDA (https://pytorch.org/get-started/locally)")


def _require_kernels(device):
    """Raise UserError unless the card carries out a kernel of torch's: each build has those of some cards, and another
    program may hold the card, or all of its memory."""
    try:
        torch.ones(1, device=device)
    except RuntimeError as problem:
        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        if "no kernel image" not in str(problem):
            raise UserError(f"{device} ({name}) no calcula nada (torch dice «{first_line(problem)}»): mire en "
                            "nvidia-smi qué programa la tiene, o entrene en el procesador (CUDA_VISIBLE_DEVICES=)"
                            ) from problem
        right = "CUDA 12.6" if capability < (7, 5) else "un CUDA más nuevo"  # torch.cuda.PYTORCH_RELEASES_CODE_CC
        raise UserError(f"torch {torch.__version__} no trae código para {name}, de capacidad {capability[0]}."
                        f"{capability[1]}: instale el de {right} (https://pytorch.org/get-started/locally), o entrene "
                        "en el procesador (CUDA_VISIBLE_DEVICES=)") from problem


def take_device(local_rank, tell):
    """local_device(); of a card that goes unused, the first process of its machine tells, by `tell`. Raises UserError
    for one that computes nothing."""
    device = local_device(local_rank)
    if device.type == "cuda":
        _require_kernels(device)
    if local_rank == 0 and (why := unused_card(device)):
        tell(f"Aviso: se usa el procesador; {why}.")
    return device


def out_of_memory(problem):
    """Spanish for whose memory an exception says is not enough, None where it says no such thing. torch has a type of
    its own for tensors on a GPU alone; a context, a kernel or a library that does not fit is any CUDA error."""
    text = str(problem)
    on_card = "out of memory" in text or "CUBLAS_STATUS_ALLOC_FAILED" in text
    if isinstance(problem, torch.OutOfMemoryError) or isinstance(problem, RuntimeError) and on_card:
        return "la GPU"
    if isinstance(problem, MemoryError) or text == ONEDNN_FULL or any(mark in text for mark in CPU_FULL):
        return "la máquina"
    return None


def release_memory(device):
    """Give back what a failed attempt held: an exception and the frames of its traceback hold one another, and with
    them the model, until they are collected; torch's cache holds what was freed on the card."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def limit_threads():
    """Compute on no more threads than can be kept busy (cgroup.cores): torch takes one for each core of the machine,
    and in a container with less processor time they would wait for each other. OMP_NUM_THREADS has the last word."""
    cores = cgroup.cores()
    if not os.environ.get("OMP_NUM_THREADS") and torch.get_num_threads() > cores:
        torch.set_num_threads(cores)


def choose_libuv():
    """Set USE_LIBUV=0 where this build of torch has no libuv (Windows), before anything meets at a TCPStore."""
    if "USE_LIBUV" in os.environ:
        return
    try:
        with quiet_stderr():
            c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=True,
                          timeout=timedelta(seconds=waiting.ANSWER_SECONDS))
    except RuntimeError as problem:
        if "libuv" in str(problem):
            os.environ["USE_LIBUV"] = "0"
        elif not isinstance(problem, c10d.DistNetworkError):  # no loopback: what connects next says what is wrong
            raise


def within(seconds, work, hopeless=None):
    """work(), which only connects to the store or asks it; raises TimeoutError when that takes longer, or hopeless() is
    true meanwhile. A TCPStore whose server is stopped never answers, whatever its time-out, nor does it answer the next
    question; and while the main thread waits for it in C++, Python hears no Ctrl+C."""
    answer = []

    def ask():
        try:
            answer.append((work(), None))
        except Exception as problem:
            answer.append((None, problem))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    deadline = time.monotonic() + seconds
    while thread.is_alive() and (left := deadline - time.monotonic()) > 0 and not (hopeless and hopeless()):
        thread.join(min(left, HOPE_SECONDS) if hopeless else left)
    if not answer:
        raise TimeoutError(f"sin respuesta en {seconds:g} s")
    value, problem = answer[0]
    if problem:
        raise problem
    return value


def connect_store(place, timeout):
    """The TCPStore of the group: torchrun's own where there is one, else hosted by rank 0."""
    choose_libuv()
    hosted_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    where = f"{place.master_addr}:{place.master_port}"

    def connect():
        return c10d.TCPStore(place.master_addr, place.master_port, is_master=place.rank == 0 and not hosted_by_agent,
                             timeout=timedelta(seconds=timeout), wait_for_workers=False, multi_tenant=True,
                             use_libuv=os.environ.get("USE_LIBUV", "1") != "0")

    def say(line):
        print(f"[rango {place.rank}] {line}", file=sys.stderr, flush=True)

    if place.rank and not hosted_by_agent:  # torch would wait in silence, and then write a stack trace
        reason = waiting.until_open(place.master_addr, place.master_port, timeout, "al rango 0", say)
        if reason:
            wrong = placement.name_problem(place.master_addr, own=False)
            raise UserError(f"no se pudo llegar al rango 0 en {where} en {timeout:g} s: {wrong or reason}")
    try:
        with quiet_stderr():
            store = within(timeout + 2, connect)  # torch's own message, when it gives up, is still to be hidden
    except (RuntimeError, TimeoutError) as problem:
        if "EADDRINUSE" in str(problem) or "address already in use" in str(problem):
            raise UserError(f"el puerto {place.master_port} ya está en uso en esta máquina; elija otro con "
                            "--master-port (o MASTER_PORT) en todas") from problem
        # Rank 0 listens here, and still looks for itself where the others will.
        host = place.rank == 0 and not hosted_by_agent
        if host and (foreign := placement.foreign_address(place.master_addr, "MASTER_ADDR=", others=False)):
            raise UserError(f"el rango 0, que es este, no está en {where} (espera máxima {timeout:g} s): {foreign}; "
                            "ponga en todas la IP de esta máquina") from problem
        if waiting.closed(place.master_addr, place.master_port) is None:
            raise UserError(f"lo que contesta en {where} no es el rango 0, o está parado (espera máxima {timeout:g} "
                            "s): mire qué programa usa ese puerto en su máquina, o elija otro con --master-port (o "
                            "MASTER_PORT) en todas") from problem
        wrong = placement.name_problem(place.master_addr, place.rank == 0)
        raise UserError(f"no se pudo llegar al rango 0 en {where} en {timeout:g} s{f' ({wrong})' if wrong else ''}: "
                        "compruebe que está en marcha, que MASTER_ADDR es la dirección de su máquina y que el "
                        "cortafuegos deja pasar ese puerto") from problem
    if hosted_by_agent:
        c10d.PrefixStore(attempt_prefix(ago=1), store).set(OVER, "")
    return c10d.PrefixStore(attempt_prefix(), store)


def attempt_prefix(ago=0):
    """The prefix of the keys of this attempt, or of one some attempts ago. It names it in torchrun's own store, which
    outlives it. A store that rank 0 hosts begins and ends with the attempt, and there the number could differ:
    torchrun counts attempts on each machine, and one that joins later is at its first."""
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return f"aura/{int(os.environ['TORCHELASTIC_RESTART_COUNT']) - ago}" if shared else "aura"


@contextlib.contextmanager
def quiet_stderr():
    """Hide the stack traces that torch's C++ socket code writes as errors when nobody answers; the reason is reported
    by us."""
    try:
        number = sys.stderr.fileno()
    except (io.UnsupportedOperation, AttributeError):  # captured by a test or a notebook: nothing to redirect
        yield
        return
    sys.stderr.flush()
    saved = os.dup(number)
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), number)
    try:
        yield
    finally:
        os.dup2(saved, number)
        os.close(saved)


def agree_backend(place, store, wanted, device, timeout):
    """Return (backend, reason for falling back or None), the same on every rank.

    A rank that cannot use NCCL, two ranks on one card, or a probe that fails or hangs takes all of them to gloo.
    """
    if wanted == "gloo":
        return "gloo", None
    able = _post(place, store, "able", _nccl_ability(device), timeout)
    reasons = [f"{vote['reason']} (rango {rank})" for rank, vote in enumerate(able) if vote["reason"]]
    cards = [vote["card"] for vote in able]
    if not reasons and len(set(cards)) < len(cards):
        reasons = ["dos procesos comparten la misma GPU"]
    if not reasons:
        probes = _post(place, store, "probe", _probe_nccl(place), timeout + NCCL_PROBE_SECONDS)
        reasons = [f"{reason} (rango {rank})" for rank, reason in enumerate(probes) if reason]
    if not reasons:
        return "nccl", None
    if wanted == "auto" and not any(vote["gpu"] for vote in able):
        return "gloo", None  # nothing was lost: machines without GPUs were never going to use NCCL
    more = f" y otros {len(reasons) - 1}" if len(reasons) > 1 else ""
    return "gloo", reasons[0] + more


def _post(place, store, topic, verdict, timeout):
    """Post this rank's verdict and return everyone's, in rank order."""
    store.set(f"vote/{topic}/{place.rank}", json.dumps(verdict))
    keys = [f"vote/{topic}/{rank}" for rank in range(place.world_size)]
    store.wait(keys, timedelta(seconds=timeout))
    return [json.loads(store.get(key)) for key in keys]


def _nccl_ability(device):
    if not c10d.is_nccl_available():
        return {"gpu": False, "reason": "esta instalación de torch no trae NCCL", "card": None}
    if device.type != "cuda":
        return {"gpu": False, "reason": "no hay ninguna GPU visible", "card": None}
    card = f"{socket.gethostname()}/{torch.cuda.get_device_properties(device).uuid}"
    return {"gpu": True, "reason": None, "card": card}


def _probe_nccl(place):
    """Try a value-checked NCCL all_reduce in a child process, which can be killed when it hangs; None if it worked."""
    command = [sys.executable, "-m", "aura.backend", str(place.rank), str(place.world_size), str(place.local_rank),
               place.master_addr, str(place.master_port)]
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    try:
        done = subprocess.run(command, timeout=NCCL_PROBE_SECONDS, capture_output=True, text=True, env=environment)
    except subprocess.TimeoutExpired:
        return f"la prueba de NCCL no terminó en {NCCL_PROBE_SECONDS} s"
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        return f"la prueba de NCCL falló: {lines[-1][:160] if lines else f'código {done.returncode}'}"
    return None


def _nccl_probe_child(rank, world_size, local_rank, address, port):
    device = local_device(local_rank)
    store = c10d.TCPStore(address, port, is_master=False, wait_for_workers=False)
    c10d.init_process_group("nccl", store=c10d.PrefixStore(f"{attempt_prefix()}/nccl_probe", store), rank=rank,
                            world_size=world_size, device_id=device, timeout=timedelta(seconds=NCCL_PROBE_SECONDS))
    check_all_reduce(rank, world_size, device)
    c10d.destroy_process_group()


def check_all_reduce(rank, world_size, device):
    """Sum a vector over all ranks and check every value. Raises RuntimeError on a wrong sum; returns the sum."""
    vector = torch.arange(1024, device=device, dtype=torch.float32) + rank
    c10d.all_reduce(vector)
    right = torch.arange(1024, dtype=torch.float32) * world_size + world_size * (world_size - 1) / 2
    if not torch.equal(vector.cpu(), right):
        raise RuntimeError(f"all_reduce ha dado {vector[0].item()} en vez de {right[0].item()}")
    return vector[0].item()


def device_memory(device):
    """Bytes this process can have: the card's, or on a CPU the machine's memory or the control group's limit."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return cgroup.memory_total()


def device_name(device):
    """The name of the card or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def wait(device):
    """Wait until everything queued on a CUDA device is done; a CPU queues nothing."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(device):
    """Most bytes this process has had: allocated on a CUDA device, resident (getrusage(2)) on a CPU; 0 on Windows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    _nccl_probe_child(*map(int, sys.argv[1:4]), sys.argv[4], int(sys.argv[5]))
