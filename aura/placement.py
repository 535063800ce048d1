"""Which process am I? Found from flags, torchrun, SLURM or hand-made variables, in that order; no torch needed."""

import contextlib
import errno
import ipaddress
import itertools
import os
import re
import socket
import sys
from dataclasses import dataclass, replace

from aura.errors import UserError
from aura.words import counted

DEFAULT_PORT = 29500  # torchrun's own default
# Of netdevice(7), and of Darwin's sys/sockio.h.
SIOCGIFADDR, SIOCGIFMTU = (0xC0206921, 0xC0206933) if sys.platform == "darwin" else (0x8915, 0x8921)
VARIABLES = {"rank": "RANK", "world_size": "WORLD_SIZE", "local_rank": "LOCAL_RANK",
             "master_addr": "MASTER_ADDR", "master_port": "MASTER_PORT"}
SLURM_VARIABLES = {"rank": "SLURM_PROCID", "world_size": "SLURM_NTASKS", "local_rank": "SLURM_LOCALID"}


@dataclass(frozen=True)
class Placement:
    """One process's place. `source` tells who said so; `grouped` is False for a plain single process."""

    rank: int
    local_rank: int
    world_size: int
    master_addr: str
    master_port: int
    source: str
    grouped: bool = True


def find(args, env=None):
    """Return the Placement of this process.

    args: namespace with rank, world_size, local_rank, master_addr, master_port (None when not given), distributed.
    env: the environment (os.environ by default). Raises UserError naming every value that is missing or absurd.
    """
    env = os.environ if env is None else env
    flags = {name: getattr(args, name, None) for name in VARIABLES}
    flags = {name: value for name, value in flags.items() if value is not None}
    found, source = _from_environment(env)
    if source == "SLURM" and not {"rank", "world_size"} <= flags.keys():
        _require_srun(env)
    if flags:
        found, source = {**found, **flags}, "argumentos"
    if not {"rank", "world_size"} & found.keys():
        if getattr(args, "distributed", False) or flags:
            where = {name: found[name] for name in ("master_addr", "master_port") if name in found}
            if not _leads_here(where.get("master_addr", "127.0.0.1")):
                raise UserError(f"--master-addr (o MASTER_ADDR) {where['master_addr'][:80]!r} no es de esta máquina, "
                                "así que los procesos son varios: faltan --rank (o RANK) y --world-size (o WORLD_SIZE)")
            alone = _checked({"rank": 0, "world_size": 1, **where}, "un solo proceso")
            return alone if "master_port" in where else replace(alone, master_port=0)
        return Placement(0, 0, 1, "127.0.0.1", 0, "un solo proceso", grouped=False)
    return _checked(found, source)


def _from_environment(env):
    if "SLURM_PROCID" in env and env.get("SLURM_NTASKS", "1") not in ("", "1") and "TORCHELASTIC_RUN_ID" not in env \
            and not ("RANK" in env and "WORLD_SIZE" in env):
        return _from_slurm(env), "SLURM"
    found = {name: env[variable] for name, variable in VARIABLES.items() if env.get(variable)}
    return found, "torchrun" if "TORCHELASTIC_RUN_ID" in env else "variables de entorno"


def _leads_here(address):
    with socket.socket() as probe:
        try:
            probe.bind((socket.getaddrinfo(address, None, socket.AF_INET)[0][4][0], 0))
        except (OSError, UnicodeError):
            return address.strip("[]") == "::1"
    return True


def _require_srun(env):
    """Raise UserError in the batch script of a job of several tasks, or in a shell of salloc's: the variables say that
    this is task 0, and the others would never come."""
    if env.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        raise UserError(f"SLURM_NTASKS={env['SLURM_NTASKS'][:40]} son las tareas de este trabajo, y a este proceso no "
                        "lo lanzó srun: ponga srun delante de la orden o, si quiere un solo proceso, SLURM_NTASKS=1")


def _from_slurm(env):
    """Slurm's variables (srun manual, OUTPUT ENVIRONMENT VARIABLES); the port follows from the job's number so that
    two jobs on one node do not meet, and lies below those that Linux gives to connections (32768 on, ip(7))."""
    job = re.sub(r"\D", "", env.get("SLURM_JOB_ID", ""))[-9:] or 0
    return {**{name: env.get(variable, "0") for name, variable in SLURM_VARIABLES.items()},
            "master_addr": env.get("MASTER_ADDR") or hosts(_slurm_list(env) or "127.0.0.1")[0],
            "master_port": env.get("MASTER_PORT") or 20000 + int(job) % 12000}


def hosts(node_list):
    """Every host of a Slurm node list: 'gpu[03-05,9],login' gives gpu03, gpu04, gpu05, gpu9, login."""
    found = []
    try:
        for word in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", node_list):
            parts = [_numbers(part[1:-1]) if part.startswith("[") else [part]
                     for part in re.findall(r"\[[^\]]*\]|[^\[]+", word)]
            found += map("".join, itertools.product(*parts))
    except ValueError:
        found = []
    if not found:
        raise UserError(f"no se entiende la lista de nodos de SLURM {node_list!r}; indique --master-addr")
    return found


def _numbers(ranges):
    """'03-05,9' gives 03, 04, 05, 9."""
    found = []
    for item in ranges.split(","):
        first, _, last = item.partition("-")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return found


def slurm_nodes(env=None):
    """The hosts of this SLURM job step, [] outside of one."""
    env = os.environ if env is None else env
    return hosts(_slurm_list(env)) if _slurm_list(env) else []


def _slurm_list(env):
    """A step may run on some of its job's nodes only."""
    return env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")


def _checked(found, source):
    problems, values = [], {}
    for name in ("rank", "world_size", "local_rank", "master_port"):
        default = {"local_rank": 0, "master_port": DEFAULT_PORT}.get(name)
        raw = found.get(name, default)
        label = f"--{name.replace('_', '-')} (o {VARIABLES[name]})"
        if source == "SLURM":
            label = SLURM_VARIABLES.get(name, label)
        if raw is None:
            problems.append(f"falta {label}")
        elif not re.fullmatch(r"\d{1,18}", str(raw)):
            problems.append(f"{label}: {str(raw)[:40]!r} no es un número entero desde 0")
        else:
            values[name] = int(raw)
    rank, world_size = values.get("rank"), values.get("world_size")
    if world_size == 0:
        problems.append("WORLD_SIZE: 0 procesos no pueden entrenar; indique 1 o más")
    elif rank is not None and world_size is not None and rank >= world_size:
        problems.append(f"el rango {rank} no existe con {counted(world_size, 'proceso')} (se numeran desde 0)")
    if not 1 <= values.get("master_port", 1) <= 65535:
        problems.append(f"MASTER_PORT: {values['master_port']} no es un puerto (de 1 a 65535)")
    address = found.get("master_addr") or ("127.0.0.1" if world_size == 1 else None)
    if address is None:
        problems.append("falta --master-addr (o MASTER_ADDR): la dirección de la máquina del rango 0 "
                        "(127.0.0.1 si todos los procesos están en esta)")
    elif world_size != 1 and (problem := address_problem(address)):
        problems.append(f"--master-addr (o MASTER_ADDR): {problem}")
    if problems:
        raise UserError("; ".join(problems))
    return Placement(master_addr=address, source=source, **values)


def address_problem(address):
    """What is wrong with how the address of machine 0 is written, as a phrase with the way out; None where nothing is.
    gloo takes the first address of an interface, which is the IPv4 one."""
    way_out = "ponga la dirección IPv4 de la máquina 0, por ejemplo 192.168.1.10"
    if not re.fullmatch(r"[\w.:%\[\]-]+", address):
        return f"{address!r} no es una dirección: {way_out}"
    if address.strip("[]") in ("0.0.0.0", "::"):
        return f"{address!r} significa «todas las direcciones», y nadie puede conectarse a ella: {way_out}"
    if ":" not in address or address.strip("[]") == "::1":
        return None
    if re.fullmatch(r"[^:]+:\d+", address):
        return f"{address!r} lleva un puerto: escríbalo aparte, en --master-port (o MASTER_PORT)"
    try:
        ipaddress.IPv6Address(address.strip("[]"))
    except ValueError:
        return f"{address!r} no es una dirección: {way_out}"
    return f"{address!r} es una dirección IPv6, y entre máquinas se habla aquí IPv4: {way_out}"


def name_problem(name, own):
    """None when the `name` of machine 0 leads there, else why not, as a phrase with the way out. own: whether that is
    this machine. On another, 127.x or localhost, given as such, is a rehearsal and fine."""
    way_out = "ponga la IP de la máquina 0"
    try:
        every = socket.getaddrinfo(name, None)
    except (OSError, UnicodeError):  # UnicodeError: two dots side by side
        return f"{name!r} no se resuelve en esta máquina: {way_out}"
    found = next((address[0] for kind, *_, address in every if kind == socket.AF_INET), None)
    if found is None:
        return None if name.strip("[]") == "::1" else \
            f"{name!r} solo tiene aquí una dirección IPv6, y entre máquinas se habla IPv4: {way_out}"
    # Debian resolves a machine's own name so.
    itself = not own and found.startswith("127.") and name not in (found, "localhost")
    return f"{name!r} es aquí {found}, esta misma máquina: {way_out}" if itself else None


def port_problem(port, flag):
    """None when `port` can be listened on here, else why not. flag: how it is given, `--master-port ` or so."""
    with socket.socket() as probe, socket.socket() as other:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that was closed just now is free
        try:
            probe.bind(("", port))
        except OSError as problem:
            other.bind(("", 0))
            reason = {errno.EADDRINUSE: f"el puerto {port} ya está en uso en esta máquina",
                      errno.EACCES: "hace falta ser administrador"}
            return (f"{flag}{port}: {reason.get(problem.errno, problem.strerror)} (está libre {flag}"
                    f"{other.getsockname()[1]})")
    return None


def foreign_address(name, flag, others):
    """A warning where `name`, given as the address of machine 0, which is this one, is none of its own, or where there
    are `others` and none but this one gets there; else None. Behind a router that translates addresses the first may be
    right, and the second is in a rehearsal. flag: how it is given."""
    own = " o ".join(sorted({address for address in interface_addresses().values() if not address.startswith("127.")}))
    with socket.socket() as probe:
        try:
            probe.bind((socket.getaddrinfo(name, None, socket.AF_INET)[0][4][0], 0))
        except (OSError, UnicodeError) as problem:
            if getattr(problem, "errno", None) == errno.EADDRNOTAVAIL:
                return (f"{flag}{name} no es una dirección de esta máquina ({own or 'sin red'}), que es la 0: las "
                        "demás la buscarán allí")
            return None
        if others and probe.getsockname()[0].startswith("127."):
            return (f"{flag}{name} solo sirve para ensayar en esta máquina sola: desde otra se llega a ella por "
                    f"{own or 'una red, que ahora no tiene'}")
    return None


def told(verb, ranks, rest=""):
    """'falta el rango 1', 'faltan los rangos 1, 2': a verb whose plural takes an n, and the ranks it is about."""
    several = len(ranks) > 1
    return (f"{verb}{'n' * several} {rest and rest + ' '}{'los rangos' if several else 'el rango'} "
            f"{', '.join(map(str, ranks))}")


def address_towards(host, port):
    """This machine's IPv4 address on the route to `host`, or None when it cannot be told. Sends nothing."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port or 1))
            return probe.getsockname()[0]
    except (OSError, UnicodeError):
        return None


def _ask_interface(name, request):
    """What netdevice(7) says of the interface, as bytes; None where it says nothing, or there is no such system."""
    try:
        import fcntl
    except ImportError:  # Windows: gloo chooses by itself there
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        return fcntl.ioctl(probe.fileno(), request, name.encode()[:15].ljust(40, b"\0"))[16:]
    return None


def interface_addresses():
    """{name: IPv4 address} of the network interfaces that have one; {} where the system does not tell."""
    answers = {name: _ask_interface(name, SIOCGIFADDR) for _, name in socket.if_nameindex()}
    return {name: socket.inet_ntoa(answer[4:8]) for name, answer in answers.items() if answer}


def interface_mtu(name):
    """The largest packet of a network interface, in bytes, or None. (Linux's sysfs may show another namespace's.)"""
    answer = _ask_interface(name, SIOCGIFMTU)
    return int.from_bytes(answer[:4], sys.byteorder) if answer else None


def interface_of(address):
    """The name of the network interface that carries the IPv4 `address`; None where the system does not tell."""
    return next((name for name, carried in interface_addresses().items() if carried == address), None)


def interface_problem(name):
    """None when gloo finds the interfaces of GLOO_SOCKET_IFNAME here, whole names with commas between them, else why
    not, as a phrase with the way out."""
    present = [present for _, present in socket.if_nameindex()]
    wrong = [word for word in name.split(",") if word not in present]
    if not wrong:
        return None
    return (f"GLOO_SOCKET_IFNAME={name}: {wrong[0]!r} no es ninguna interfaz de red de esta máquina "
            f"({', '.join(present)}); ponga su nombre entero, o quite la variable (unset GLOO_SOCKET_IFNAME)")


def one_address(peers):
    """What is wrong where two machines have the same address, each in a network of its own, as a phrase with the way
    out; None where nothing is. Processes of one machine have one too, and it was started once (processes.boot)."""
    first = {}
    for rank, peer in sorted(peers.items()):
        address, boot = peer["address"] or "127.", (peer.get("start") or "").split(" ")[0]
        other, theirs = first.setdefault(address, (rank, boot))
        if boot and theirs and boot != theirs and not address.startswith("127."):
            return (f"los rangos {other} y {rank} ({peers[other]['host']} y {peer['host']}) están en máquinas "
                    f"distintas y tienen la misma dirección, {address}: es de una red interna de cada una (Docker, "
                    "NAT), por la que no se ven; use --network host, o red en puente si son máquinas virtuales")
    return None


def hidden_address(peers, rank, port):
    """This machine's address for the others where it is not the first of its interface, and so not the one that gloo
    takes; else None, also where the system does not tell. peers, port: as address_among() takes them."""
    address = address_among(peers, rank, port)
    carried = interface_addresses().values()
    return address if carried and address and not address.startswith("127.") and address not in carried else None


def interface_towards(place, peers):
    """The name of the interface on this process's route to the others, or None. A hostname that resolves to 127.x would
    hide it, and a second card (docker0, VPN) be taken for it. peers: {rank: {"address", ...}}, this one's too."""
    address = address_among(peers, place.rank, place.master_port)
    return interface_of(address) if address else None


def address_among(peers, rank, port):
    """The address at which the others reach this machine, even if it knows itself as 127.x alone; None where it knows
    none. peers: {rank: {"address", ...}}. port: as address_towards takes it."""
    address = peers[rank]["address"]
    others = [peer["address"] for peer in peers.values() if peer["address"] and not peer["address"].startswith("127.")]
    return address_towards(others[0], port) if others and (address or "127.").startswith("127.") else address
