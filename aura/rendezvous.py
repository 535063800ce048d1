"""The processes of a group meet at the store before there is a group: who comes, and whether all run the same."""

import json
import os
import socket
import time
import uuid

from aura import placement, sources, waiting
from aura.backend import OVER, within
from aura.errors import PeerLost, UserError, agreed
from aura.processes import start_of

POLL_SECONDS = 0.2
ANSWER_SECONDS = 5  # what the store may take to answer, besides the waiting itself
# The arguments that must be the same in all processes: those that decide the model, the steps and when processes talk.
# Not those that name files, which may lie elsewhere on another machine.
SAME_EVERYWHERE = (
    "preset", "n_layer", "n_head", "n_embd", "n_ff", "h_cycles", "l_cycles", "segments", "seq_len", "dropout",
    "ponder_price", "reinject", "exit_weights", "document_attention", "vocab_size", "max_len", "doc_stride",
    "question_len", "padding", "max_train_examples", "max_val_examples", "stream", "benchmark", "precision",
    "batch_size", "grad_accum", "epochs", "max_steps", "lr", "min_lr_ratio", "beta2", "weight_decay", "warmup_ratio",
    "grad_clip", "ema", "seed", "nan_policy", "eval_interval", "eval_windows", "sample_length", "sample_prompt",
    "checkpoint_freq", "prepare", "backend", "strategy", "fsdp", "sync", "sync_every", "sync_lr", "sync_momentum",
    "full")


class RankTaken(UserError):
    """Another process is this one's rank: nothing that the group has to hear of, which may be at work."""


def join(place, dist, args):
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
        if store.check([OVER]):
            raise PeerLost(f"las demás máquinas de {place.master_addr}:{place.master_port} han vuelto a empezar sin "
                           "esta: con --max-restarts, vuelve a arrancar y se une a ellas; si no, pare la orden en "
                           "todas y repítala en todas")
        if store.check(["complete"]):
            raise RankTaken(f"el grupo de {place.master_addr}:{place.master_port}, de {store.get('complete').decode()} "
                            f"procesos, está completo y en marcha sin este, el rango {place.rank} de "
                            f"{place.world_size}: si se lanzó dos veces la misma orden, deje una; si es otro "
                            "entrenamiento, elija otro --master-port (o MASTER_PORT) en todas; si este se perdió, "
                            "repita la orden cuando los demás lo hayan notado")
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
            if len(came) == place.world_size and not apart:
                # Nobody who has been here looks any more at who calls himself the same.
                if (first := store.compare_set(f"member/{place.rank}", "", mine).decode()) != mine:
                    raise taken(first)
                return came
            if apart or patience.waited() > dist.timeout:
                return came
            away = [rank for rank in range(place.world_size) if rank not in came]
            patience.wait(POLL_SECONDS, f"a {len(away)} de los {place.world_size} procesos: "
                                        f"{placement.told('falta', away)}.")

    try:
        return within(dist.timeout + ANSWER_SECONDS, wait)
    except TimeoutError as problem:
        raise PeerLost(f"el rango 0, en {place.master_addr}:{place.master_port}, dejó de contestar: mire en su máquina "
                       "si el proceso está parado o bloqueado") from problem


def _compared(args):
    """{name: value} of the arguments in which processes may not differ; of --resume only whether it is none, and of
    --init-from whether it was given, since rank 0 decides which checkpoint and which model are meant."""
    compared = {name: getattr(args, name) for name in SAME_EVERYWHERE if hasattr(args, name)}
    if hasattr(args, "resume"):
        compared["resume"] = "none" if args.resume == "none" else "distinto de none"
    if hasattr(args, "init_from"):
        compared["init_from"] = "algo" if args.init_from else "nada"
    return compared


def require_all(peers, place, timeout):
    """Raise UserError that names who did not come, or counts on another number of processes."""
    for rank, peer in peers.items():
        if peer.get("world_size", place.world_size) != place.world_size:
            raise UserError(f"WORLD_SIZE={place.world_size} en el rango {place.rank} y {peer['world_size']} en el "
                            f"rango {rank}: use el mismo en todas las máquinas, el número de procesos de todas juntas")
    missing = sorted(set(range(place.world_size)) - peers.keys())
    if missing:
        raise UserError(f"han pasado {timeout:g} s y {placement.told('falta', missing)} de {place.world_size}: "
                        f"compruebe que se lanzaron con el mismo MASTER_ADDR, MASTER_PORT y WORLD_SIZE, y que el "
                        "cortafuegos de la máquina 0 les deja entrar")


def require_same(peers):
    """Raise UserError that names the arguments in which processes differ: what was typed on each machine by hand, and
    would train something else on each or leave one waiting for another."""
    others = [rank for rank, peer in peers.items() if "arguments" not in peer] or [  # as of old
        rank for rank, peer in peers.items() if peer["arguments"].keys() != peers[0]["arguments"].keys()]
    if others:
        raise UserError(f"el rango {others[0]} ejecuta otro programa u otra versión de este: lance el mismo en todas "
                        "las máquinas (git rev-parse HEAD ha de dar lo mismo)")
    first, differing = peers[0]["arguments"], {}
    for rank, peer in sorted(peers.items()):
        for name, value in peer["arguments"].items():
            if value != first[name]:
                differing.setdefault(name, (rank, value))
    if differing:
        told = "; ".join(f"--{name.replace('_', '-')} es {first[name]} en el rango 0 y {value} en el rango {rank}"
                         for name, (rank, value) in sorted(differing.items()))
        raise agreed(UserError, f"{told}: lance todos los procesos con las mismas opciones")


def warn_of_other_code(dist, peers):
    """Say whose program is not rank 0's: one that was edited on one machine alone may train something else there."""
    if others := [rank for rank, peer in sorted(peers.items()) if peer.get("code") != peers[0].get("code")]:
        hosts = ", ".join(dict.fromkeys(peers[rank]["host"] for rank in others))
        dist.print(f"Aviso: el código del rango 0 no es el de {hosts}: si no es a propósito, deje el mismo en todas "
                   "las máquinas (git pull); test_ddp.py --full dice en qué ficheros difiere.")
