"""What the facts of all ranks say when they are compared: who differs, in what, and the way out. Pure."""

import statistics

from aura import placement
from aura.findings import Finding, named

FILES_NAMED = 3
CHECKPOINTS_BYTES = 2 * 12 * 124.4e6  # weights and AdamW's moments of GPT-2 as published, the old one and the new one
OTHERS_BYTES = 100e6  # logs and heartbeats of a rank that saves nothing
TAKEN = 0.1  # share of the processor that other programs take: from here on it explains a slow rank


def odd(values):
    """(right, {other: [ranks]}) of {rank: hashable value}: what most ranks have is right, in a tie what rank 0 has."""
    groups = {}
    for rank, value in sorted(values.items()):
        groups.setdefault(value, []).append(rank)
    right = max(groups, key=lambda value: (len(groups[value]), -groups[value][0]), default=None)
    return right, {value: ranks for value, ranks in groups.items() if value != right}


def compare(facts):
    """What is wrong with the ranks' facts, {rank: dict of facts.collect()}: a list of Finding. The odd ranks and one of
    the others have code["files"], as sources.source_files() gives them, to name the files that differ."""
    return [*_compare_versions(facts), *_compare_code(facts), *_compare_kernels(facts), *_compare_data(facts),
            *_compare_gpus(facts), *_judge_disks(facts), *_judge_interfaces(facts), *_compare_priority(facts)]


def _compare_versions(facts):
    found = {}
    for name in next(iter(facts.values()))["versions"]:
        right, others = odd({rank: fact["versions"].get(name) for rank, fact in facts.items()})
        for value, ranks in others.items():
            found.setdefault(tuple(ranks), []).append((name, value or "ninguno", right or "ninguno"))
    for ranks, differences in found.items():
        yield Finding("versions", named(ranks, facts),
                      "; ".join(f"{name} {value} y los demás {right}" for name, value, right in differences),
                      "instale lo mismo en todas las máquinas con pip install -r requirements.txt")


def _compare_code(facts):
    right, others = odd({rank: fact["code"]["hash"] for rank, fact in facts.items()})
    model = next((rank for rank in sorted(facts) if facts[rank]["code"]["hash"] == right), None)
    for ranks in others.values():
        theirs, ours = facts[ranks[0]]["code"], facts[model]["code"]
        names = sorted({name for name, _ in set(theirs.get("files", {}).items()) ^ set(ours.get("files", {}).items())})
        more = f" y {len(names) - FILES_NAMED} más" if len(names) > FILES_NAMED else ""
        yield Finding("code", named(ranks, facts),
                      f"otra versión de este código en {', '.join(names[:FILES_NAMED])}{more} "
                      f"({_commit(theirs)}; los demás, {_commit(ours)})",
                      "deje la misma en todas (git pull, o copie la carpeta entera)")


def _commit(code):
    changed = {True: " con cambios sin confirmar", False: "", None: ""}[code["changed"]]
    return f"commit {code['commit']}{changed}" if code["commit"] else "sin git"


def _compare_kernels(facts):
    on_cpu = {rank: fact["kernels"] for rank, fact in facts.items() if not fact["gpu"]}
    reasons = {}
    for rank, able in on_cpu.items():
        if able is not True and True in on_cpu.values():
            reasons.setdefault(able, []).append(rank)
    for reason, ranks in reasons.items():
        yield Finding("versions", named(ranks, facts), f"sin los núcleos propios de CPU, que los demás usan: {reason}",
                      "compílelos también ahí (python -m aura.extension), o los demás tendrán que esperarlos")


def _compare_data(facts):
    """Ranks without data are no trouble: rank 0 sends them its own when training begins."""
    have = {rank: fact["data"] for rank, fact in facts.items() if fact["data"]}
    for rank in [rank for rank, data in have.items() if "problem" in data]:
        yield Finding("data", named([rank], facts), f"no se pueden leer sus datos preparados: {have[rank]['problem']}",
                      "prepárelos de nuevo con --prepare")
        del have[rank]
    _, tokenizers = odd({rank: data["tokenizer"] for rank, data in have.items()})
    explained = [rank for ranks in tokenizers.values() for rank in ranks]
    for ranks in tokenizers.values():
        yield _other_data("tokenizer", "el tokenizador de sus datos", ranks, have, facts)
    _, contents = odd({rank: data["sha256"] for rank, data in have.items() if rank not in explained})
    for ranks in contents.values():
        yield _other_data("data", "el contenido de sus datos", ranks, have, facts)


def _other_data(kind, what, ranks, have, facts):
    """A Finding for ranks with other data; its way out is what share.share_out() does about them in training."""
    name = have[ranks[0]]["name"]
    if 0 in ranks:
        remedy = ("al entrenar, el rango 0 reparte los suyos a todos: si los buenos son los de los demás, cópielos a "
                  "su --data-dir")
    elif 0 in have and have[0]["name"] == name:
        remedy = "al entrenar se sustituirán por los del rango 0: guarde antes en otro sitio lo que quiera conservar"
    else:
        remedy = "al entrenar recibirá los del rango 0 junto a estos, que no se usarán: bórrelos si sobran"
    return Finding(kind, named(ranks, facts), f"{what} ({name!r}) no es el de los demás "
                   f"({have[ranks[0]][{'data': 'sha256'}.get(kind, kind)][:10]}...)", remedy)


def _compare_gpus(facts):
    cards = {rank: fact["gpu"] for rank, fact in facts.items()}
    without = [rank for rank, card in cards.items() if card is None]
    if without and len(without) < len(cards):
        yield Finding("gpu", named(without, facts), "torch no ve ninguna GPU, y en los demás sí",
                      "instale ahí el controlador y el torch con CUDA, o deje esa máquina fuera del grupo")
    cards = {rank: card for rank, card in cards.items() if card}
    for name in ("modelo", "memoria", "driver"):
        right, others = odd({rank: card[name] for rank, card in cards.items() if card[name]})
        for value, ranks in others.items():
            shown = "controlador" if name == "driver" else name
            yield Finding("gpu", named(ranks, facts), f"{shown} de la GPU: {value}, y en los demás {right}",
                          "actualice el controlador para que sea el mismo" if name == "driver" else
                          "la GPU menor marca el ritmo y la memoria de todos: ajuste --batch-size a ella")


def _judge_disks(facts):
    """A Finding for each disk of each machine that is full and each folder that cannot be written, once for all ranks
    that share it."""
    told = set()
    wanted = facts[0]["data"] if 0 in facts else None
    for rank, fact in sorted(facts.items()):
        for disk in fact["disks"]:
            lacks = disk["flag"] == "--data-dir" and wanted and "bytes" in wanted and (
                not fact["data"] or fact["data"].get("sha256") != wanted["sha256"])
            needed = CHECKPOINTS_BYTES if rank == 0 and disk["flag"] == "--checkpoint-dir" else OTHERS_BYTES
            needed += wanted["bytes"] if lacks else 0
            full = disk["free"] < needed
            key = (fact["host"], fact["address"], disk["device"], None if full else disk["folder"])
            if (disk["problem"] or full) and key not in told:
                told.add(key)
                yield _bad_disk(rank, facts, disk, needed)


def _bad_disk(rank, facts, disk, needed):
    where = f"{disk['folder']!r} ({disk['flag']})"
    if disk["problem"]:
        text = f"no se puede escribir en {where}: {disk['problem']} ({disk['free'] / 1e9:.1f} GB libres)"
    elif needed >= CHECKPOINTS_BYTES:
        text = (f"quedan {disk['free'] / 1e9:.1f} GB en {where}, y dos puntos de control de gpt2 (124.4 M parámetros, "
                f"con 50 257 piezas, x 12 bytes cada uno) ocupan {CHECKPOINTS_BYTES / 1e9:.1f} GB")
    else:
        text = (f"quedan {disk['free'] / 1e6:.0f} MB en {where}, y hacen falta {needed / 1e6:.0f} MB para datos y "
                "registro")
    return Finding("disk", named([rank], facts), text, f"libere espacio o permisos, o indique otra carpeta con "
                   f"{disk['flag']}")


def _judge_interfaces(facts):
    wrong = {}
    for rank, fact in facts.items():
        for variable, value, exists in fact["network"]["wrong"]:
            wrong.setdefault((variable, value, exists, fact["network"]["interface"]), []).append(rank)
    for (variable, value, exists, right), ranks in wrong.items():
        text = (f"no es la interfaz que lleva a los demás, que es {right}" if exists
                else f"no existe ahí o no tiene dirección: a los demás lleva {right}")
        yield Finding("interface", named(ranks, facts), f"{variable}={value}, puesta a mano, {text}",
                      f"quítela (unset {variable}), o ponga {variable}={right}")
    right, others = odd({rank: fact["network"]["mtu"] for rank, fact in facts.items()
                         if fact["network"].get("mtu") and fact["network"].get("kind") != "loopback"})
    for mtu, ranks in others.items():
        name = facts[ranks[0]]["network"]["interface"]
        yield Finding("interface", named(ranks, facts), f"MTU {mtu} en {name}, y en los demás {right}: los paquetes "
                      "grandes pueden perderse", f"iguálelas (ip link set {name} mtu {right})")


def _compare_priority(facts):
    """Compared with the highest priority, not with what most have: of two ranks, rank 0 may have the low one."""
    values = {rank: fact["processor"]["nice"] or 0 for rank, fact in facts.items()}
    usual = max(0, min(values.values()))
    for nice in sorted({nice for nice in values.values() if nice > usual}):
        yield Finding("slow-rank", named([rank for rank in values if values[rank] == nice], facts),
                      f"prioridad baja (nice {nice}, y otros {usual}): otros programas irán antes en el procesador",
                      "no use nice al lanzar")


# ---- What only the group as a whole shows ---------------------------------------------------------------------------


def world_sizes(peers):
    """Ranks that count on another number of processes than rank 0; another version of the code may not say it."""
    right, others = peers[0].get("world_size"), {}
    for rank, peer in peers.items():
        others.setdefault(peer.get("world_size"), []).append(rank)
    return [Finding("world-size", named(ranks, peers), f"WORLD_SIZE={size}, y en el rango 0 {right}",
                    "use el mismo en todas las máquinas: el número de procesos de todas juntas")
            for size, ranks in others.items() if size != right and None not in (size, right)]


def missing(ranks, peers, place, timeout):
    """Ranks that never came, with the SLURM nodes from which nobody did."""
    empty = [node for node in placement.slurm_nodes() if node not in {peer["node"] for peer in peers.values()}
             ] if place.source == "SLURM" else []
    nodes = f" (de {', '.join(empty)} no llegó nadie)" if empty else ""
    return Finding("missing", f"{'rango' if len(ranks) == 1 else 'rangos'} {', '.join(map(str, ranks))}",
                   f"sin noticias en {timeout:g} s{nodes}; presentes: {named(peers, peers)}",
                   "compruebe que se lanzaron con el mismo MASTER_ADDR, MASTER_PORT y WORLD_SIZE, y que ven la "
                   "máquina del rango 0")


def silent(ranks, peers, stage, limit):
    """Ranks that stopped answering."""
    return Finding("silent", named(ranks, peers), f"sin respuesta en {limit:g} s (fase: {stage})",
                   "mire en su máquina si el proceso está parado o bloqueado, y si la red sigue en pie y no pierde los "
                   "paquetes grandes (ping -M do -s 1472 DIRECCIÓN)")


def one_address(peers):
    """Machines that have the same address, each in a network of its own: [Finding] or []."""
    problem = placement.one_address(peers)
    return [Finding("same-address", "red", *problem.split("; ", 1))] if problem else []


def group(votes, peers, facts):
    """What came of the group. votes: {rank: {"wrong", "reason", "backend", "fallback"}} of those that still answered:
    what was wrong with its sum and why the group broke there, or None."""
    wrong = [rank for rank, vote in votes.items() if vote["wrong"]]
    broken = [rank for rank, vote in votes.items() if vote["reason"]]
    backend, fallback = votes[0]["backend"], votes[0]["fallback"]
    if wrong:
        yield Finding("wrong-sum", named(wrong, peers), f"la suma de prueba llega mal con backend={backend}: "
                      f"{votes[wrong[0]]['wrong']}", "la red o el backend corrompen los datos: pruebe con --backend "
                      "gloo, y cambie cable o tarjeta de red")
    if broken and votes.keys() == peers.keys():  # else the rank that stopped answering is the reason
        yield Finding("backend", named(broken, peers), f"el grupo no funciona: {votes[broken[0]]['reason']}",
                      "compruebe que el cortafuegos deja pasar todos los puertos entre las máquinas")
    elif fallback and all(fact["gpu"] for fact in facts.values()):
        yield Finding("backend", "todos los rangos", f"NCCL no funciona y se usaría gloo, mucho más lento con GPU: "
                      f"{fallback}", "NCCL_DEBUG=INFO dice más; iguale controladores y torch, y compruebe la interfaz")


def slow(ranks, speed, peers):
    """Ranks that compute slower than the others. speed: {rank: forecast.compute_speed()}."""
    usual = statistics.median(one["flops"] for one in speed.values())
    for rank in sorted(ranks):
        taken = speed[rank]["waited"] or 0
        text = f"calcula a {speed[rank]['flops'] / 1e9:.1f} GFLOP/s, y la mediana del grupo es {usual / 1e9:.1f}"
        if taken > TAKEN:
            yield Finding("slow-rank", named([rank], peers), f"{text}: otro programa le quita el {100 * taken:.0f} % "
                          "del procesador", "busque ese programa con monitor.py y ciérrelo")
        else:
            yield Finding("slow-rank", named([rank], peers), text, "mire temperatura, plan de energía y núcleos de esa "
                          "máquina; el grupo va al paso del más lento")
