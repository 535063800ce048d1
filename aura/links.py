"""The network between the machines of a group, measured before any backend uses it: which ports answer, and of each
pair round trip, rates, loss and clocks.

    seen = links.survey(store, rank, peers, timeout)      # on every rank, the same result on each
    for finding in links.findings(seen, peers): print(finding.line())

Rank 0 gives orders through the store and gathers the answers, so that a machine that has stopped answering keeps nobody
waiting: it is left out of what comes next, and named.
"""

import contextlib
import itertools
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from aura import placement, wire
from aura.files import explain
from aura.findings import Finding, named

POLL_SECONDS = 0.02
PAIR_SECONDS = 12  # for the 3 s that a pair takes
ANSWER_SECONDS = 3  # beyond that, for an answer to arrive in the store

CLOCK_SECONDS = 1.0  # of difference: from here dates of checkpoints, files and logs contradict each other. Kerberos and
# munge (SLURM) refuse tickets only at 5 min, but clocks that nobody sets go on drifting apart.
LOST_SHARE = 0.005  # of the segments: a healthy link, Wi-Fi too since it repeats by itself, loses below 0.001
SLOW_BYTES_PER_S = 100e6 / 8  # an old switch, a bad cable or Wi-Fi; wired links of this century do 940 Mbit/s
SLOW_SHARE = 0.5  # of what the machine in the middle does: the speed of links goes in steps of 2.5 and more
PLENTY_BYTES_PER_S = 2e9 / 8  # beyond, the rate of one connection is that of processors: such links are alike
ONE_WAY_SHARE = 0.4  # of the rate the other way: a duplex mismatch, an asymmetric uplink; Wi-Fi differs by less
INTERFACES = Path("/sys/class/net")
LOOPBACK_TYPE = 772  # ARPHRD_LOOPBACK of linux/if_arp.h


@dataclass(frozen=True)
class Pair:
    """The link between leaders a < b. rtt_s: median round trip. rate_ab, rate_ba: bytes/s that arrive, from a to b and
    back. retransmitted: share of the segments that TCP sent twice at a low rate, the worse direction; None if unknown.
    """

    a: int
    b: int
    rtt_s: float
    rate_ab: float
    rate_ba: float
    retransmitted: float | None


@dataclass
class Survey:
    """pairs: [Pair]. clocks: {leader: (seconds ahead of rank 0's, uncertainty)}. unreachable: [(from, to, reason)]
    between leaders, reasons in Spanish. silent: ranks that did not answer in time."""

    pairs: list = field(default_factory=list)
    clocks: dict = field(default_factory=dict)
    unreachable: list = field(default_factory=list)
    silent: list = field(default_factory=list)


def leaders(peers):
    """The first rank of each machine, in rank order. peers: {rank: {"host", "address"}}."""
    first = {}
    for rank in sorted(peers):
        first.setdefault(peers[rank]["address"] or peers[rank]["host"], rank)
    return sorted(first.values())


def survey(store, rank, peers, timeout):
    """Measure the network between the machines; every rank calls it. Returns the same Survey on every rank.

    store: a torch Store. peers: {rank: {"host", "address"}}. timeout: seconds that any wait lasts at most; all of it
    takes about as long at most, and 3 s for each other machine when all answer. A rank that finds rank 0, or the store,
    silent returns a Survey that says so.
    """
    first = leaders(peers)
    address = placement.address_among(peers, rank, placement.DEFAULT_PORT)
    with contextlib.ExitStack() as stack:
        desk = stack.enter_context(wire.Desk(rank, address)) if rank in first and len(first) > 1 else None
        try:
            store.set(f"links/here/{rank}", json.dumps(desk.card if desk else None))
            if rank == 0:
                return _lead(store, desk, peers, first, time.monotonic() + timeout)
            return _follow(store, desk, rank, timeout)
        except RuntimeError:  # the store lives on rank 0's machine
            return Survey(silent=[0])


def _obey(desk, order):
    """Carry out an order of rank 0; returns the JSON-able answer."""
    if "connect" in order:
        others = {int(rank): card for rank, card in order["connect"].items() if int(rank) != desk.rank}
        with ThreadPoolExecutor(len(others)) as pool:
            return list(zip(others, pool.map(desk.dial, others, others.values()), strict=True))
    a, b, dialler = next(pair for pair in order["measure"] if desk.rank in pair[:2])
    other = b if desk.rank == a else a
    try:
        connection = (desk.dialled if desk.rank == dialler else desk.accepted)[other]
        return wire.measure(connection, desk.rank == a, PAIR_SECONDS)
    except (OSError, KeyError) as problem:
        return {"problem": explain(problem) if isinstance(problem, OSError) else "la conexión se ha perdido"}


def _follow(store, desk, rank, timeout):
    """What every rank but 0 does: what it is told. Rank 0 may begin as late as others may, and then takes its time."""
    deadline, number = time.monotonic() + 2 * timeout + PAIR_SECONDS + ANSWER_SECONDS, 0
    while True:
        key = f"links/order/{number}" if desk else "links/survey"
        wait(store, [key, "links/survey"], deadline)
        if store.check(["links/survey"]):
            result = _from_json(store.get("links/survey"))
            with contextlib.suppress(RuntimeError):  # rank 0 has given up waiting, and left
                store.set(f"links/read/{rank}", "1")
            return result
        if not store.check([key]):
            return Survey(silent=[0])
        order = json.loads(store.get(key))
        if rank in order["who"]:
            store.set(f"links/answer/{number}/{rank}", json.dumps(_obey(desk, order)))
        number += 1


def _lead(store, desk, peers, first, deadline):
    """What rank 0 does: find out who is there, let them connect, then measure one another, and tell the result."""
    result, here = Survey(), {rank: f"links/here/{rank}" for rank in peers}
    arrived = time.monotonic() + (deadline - time.monotonic()) / 2  # the other half is for those who are there
    wait(store, here.values(), arrived, every=True)
    result.silent = [rank for rank, key in here.items() if not store.check([key])]
    cards = {rank: json.loads(store.get(here[rank])) for rank in first if rank not in result.silent}
    numbers = itertools.count()

    def ask(order, who, seconds):
        number = next(numbers)
        store.set(f"links/order/{number}", json.dumps({**order, "who": who}))
        answers = {0: _obey(desk, order)} if 0 in who else {}
        keys = {rank: f"links/answer/{number}/{rank}" for rank in who if rank}
        wait(store, keys.values(), time.monotonic() + seconds + ANSWER_SECONDS, every=True)
        for rank, key in keys.items():
            if store.check([key]):
                answers[rank] = json.loads(store.get(key))
            else:
                result.silent.append(rank)
                cards.pop(rank, None)
        return answers

    result.clocks = {0: (0.0, 0.0)}
    if len(cards) > 1:
        ways = _connect(ask, cards, result)
        half_told = _measure(ask, cards, ways, result, deadline)
        doubtful = _doubtful(result.pairs) | half_told
        _measure(ask, cards, [way for way in ways if way[:2] in doubtful], result, deadline)
    result.pairs.sort(key=lambda pair: (pair.a, pair.b))
    result.silent.sort()
    text = json.dumps(asdict(result))
    store.set("links/survey", text)
    # Whoever leads may leave at once, and take the store along: not before the others, over a bad link, have read it.
    readers = [f"links/read/{rank}" for rank in peers if rank and rank not in result.silent]
    wait(store, readers, time.monotonic() + ANSWER_SECONDS, every=True)
    return _from_json(text)


def _connect(ask, cards, result):
    """Let every leader connect to every other; returns the pairs that can talk, as (a, b, which of them dialled)."""
    answers = ask({"connect": cards}, list(cards), wire.CONNECT_SECONDS)
    tried = [(a, b, reason) for a, answer in answers.items() for b, reason in answer if b in cards]
    result.unreachable = [entry for entry in tried if entry[2]]
    reached = {(a, b) for a, b, reason in tried if not reason}
    return [(a, b, a if (a, b) in reached else b) for a in cards for b in cards
            if a < b and {(a, b), (b, a)} & reached]


def _measure(ask, cards, wanted, result, deadline):
    """Let the `wanted` pairs (a, b, who dials) measure one another, disjoint ones at once, and note what they say.
    Returns the pairs of which loss is known in one direction only: in the other, a busy machine sent too little."""
    dialler, half_told = {(a, b): who for a, b, who in wanted}, set()
    for together in rounds(list(cards)):
        pairs = [(a, b, dialler[a, b]) for a, b in together if (a, b) in dialler and a in cards and b in cards]
        if pairs and (not result.pairs or time.monotonic() < deadline):
            answers = ask({"measure": pairs}, [rank for pair in pairs for rank in pair[:2]], PAIR_SECONDS)
            for a, b, _ in pairs:
                if a in answers and b in answers:
                    _note(result, a, b, answers[a], answers[b])
                    if (answers[a].get("retransmitted") is None) != (answers[b].get("retransmitted") is None):
                        half_told.add((a, b))
    return half_told


def _note(result, a, b, at_a, at_b):
    """Put down what the ends of a pair measured. A second measurement counts where it saw more: others took the
    processors, or the network, the first time."""
    if "problem" in at_a or "problem" in at_b:
        reason = at_a.get("problem") or at_b["problem"]
        result.unreachable.append((a, b, f"se corta al enviar datos, como con distinta MTU: {reason}"))
        return
    shares = [answer["retransmitted"] for answer in (at_a, at_b) if answer["retransmitted"] is not None]
    pair = Pair(a, b, at_a["rtt"], at_b["rate"], at_a["rate"], max(shares, default=None))
    for old in [old for old in result.pairs if (old.a, old.b) == (a, b)]:
        lost = max((share for share in (old.retransmitted, *shares) if share is not None), default=None)
        pair = replace(old, rate_ab=max(old.rate_ab, pair.rate_ab), rate_ba=max(old.rate_ba, pair.rate_ba),
                       retransmitted=lost)
        result.pairs.remove(old)
    result.pairs.append(pair)
    if a == 0:
        result.clocks[b] = (at_a["offset"], at_a["uncertainty"])


def _doubtful(pairs):
    """The pairs that are slow in one direction or both, compared with the best direction of all pairs."""
    best = max((_capped(rate) for pair in pairs for rate in (pair.rate_ab, pair.rate_ba)), default=0)
    return {(pair.a, pair.b) for pair in pairs if min(pair.rate_ab, pair.rate_ba) < SLOW_SHARE * best}


def _capped(rate):
    return min(rate, PLENTY_BYTES_PER_S)


def rounds(players):
    """A tournament: lists of disjoint pairs (a, b), a < b, that are played at once; every pair once (circle method)."""
    ring = sorted(players) + [None] * (len(players) % 2)
    for _ in range(len(ring) - 1):
        pairs = [(ring[i], ring[-1 - i]) for i in range(len(ring) // 2)]
        yield [tuple(sorted(pair)) for pair in pairs if None not in pair]
        ring.insert(1, ring.pop())


def wait(store, keys, deadline, every=False):
    """Whether one of `keys`, or every one, is in the store before the deadline. (A store's own wait() tells stderr of
    each time-out.)"""
    keys = list(keys)
    while not (all if every else any)(store.check([key]) for key in keys):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _from_json(text):
    """A Survey from its JSON."""
    values = json.loads(text)
    return Survey([Pair(**pair) for pair in values["pairs"]],
                  {int(rank): tuple(clock) for rank, clock in values["clocks"].items()},
                  [tuple(entry) for entry in values["unreachable"]], values["silent"])


def findings(seen, peers):
    """What is wrong in a Survey: a list of Finding, of the kinds silent, port, clock, loss and slow-link."""
    def name(leader):
        return named([rank for rank in peers if peers[rank]["address"] == peers[leader]["address"]], peers)

    first = [rank for rank in leaders(peers) if rank not in seen.silent]
    silent = [Finding("silent", named([rank], peers), "no contestó al medir la red",
                      "mire en esa máquina si el programa sigue en marcha y conserva la red") for rank in seen.silent]
    lossy = [pair for pair in seen.pairs if (pair.retransmitted or 0) >= LOST_SHARE]
    healthy = [pair for pair in seen.pairs if pair not in lossy]  # loss explains a low rate
    return [*silent, *_closed(seen.unreachable, first, name), *_clocks(seen.clocks, name),
            *_losses(lossy, name), *_slow(healthy, name)]


def _closed(unreachable, first, name):
    """Machines that nobody else can connect to, those that can connect to no other, then single pairs."""
    why, told, found = {(a, b): reason for a, b, reason in unreachable}, set(), []
    remedy = "abra en su cortafuegos todos los puertos TCP a las demás; mire también cable, dirección e interfaz"

    def tell(who, text, ways):
        told.update(ways)
        found.append(Finding("port", who, f"{text} ({', '.join(sorted({why[way] for way in ways}))})", remedy))

    for rank in first:
        ways = [(other, rank) for other in first if other != rank]
        if ways and all(way in why for way in ways):
            back = any((b, a) in why for a, b in ways)
            tell(name(rank), f"no le llegan las conexiones de {_all(ways, 0, name)}, y las suyas "
                             f"{'tampoco llegan' if back else 'sí llegan'}", ways)
    shut = {b for _, b in told}
    for rank in first:
        ways = [(rank, other) for other in first if other != rank and other not in shut]
        if ways and all(way in why for way in ways):
            tell(name(rank), f"sus conexiones no llegan a {_all(ways, 1, name)}, y al revés sí llegan", ways)
    for a, b in why.keys() - told:
        tell(f"{name(a)} hacia {name(b)}", "la conexión no llega, y con otras máquinas sí", [(a, b)])
    return found


def _all(ways, end, name):
    return name(ways[0][end]) if len(ways) == 1 else f"ninguna de las otras {len(ways)}"


def _clocks(clocks, name):
    """Clocks that are off those of most machines; of two, the one that is not rank 0's is named."""
    usual = statistics.median_low(offset for offset, _ in clocks.values()) if len(clocks) > 2 else 0.0
    return [Finding("clock", name(rank),
                    f"su reloj va {abs(offset - usual):.1f} s {'adelantado' if offset > usual else 'atrasado'} "
                    f"respecto {'a los demás' if len(clocks) > 2 else 'al del rango 0'} (±{uncertainty * 1e3:.1f} ms)",
                    "póngalo en hora por red (sudo timedatectl set-ntp true)")
            for rank, (offset, uncertainty) in clocks.items() if abs(offset - usual) > CLOCK_SECONDS + uncertainty]


def _losses(lossy, name):
    """One finding: the machine common to all lossy pairs, or else these pairs."""
    if not lossy:
        return []
    common = set.intersection(*({pair.a, pair.b} for pair in lossy))
    who = name(common.pop()) if len(common) == 1 else "; ".join(f"{name(pair.a)} con {name(pair.b)}" for pair in lossy)
    shares = ", ".join(f"{100 * pair.retransmitted:.1f} %" for pair in lossy)
    return [Finding("loss", who, f"se pierden paquetes: {shares} se envían dos veces",
                    "cambie el cable o el puerto del switch, o use cable en vez de Wi-Fi; 'ip -s link' cuenta los "
                    "errores")]


def _slow(pairs, name):
    """Machines far below the others, pairs far below their machines, or a network slow as a whole."""
    advice = ("use cable y un switch de 1 Gbit/s o más; mientras tanto, --sync diloco, o --grad-accum o --batch-size "
              "mayores")
    sends, receives = {}, {}
    for pair in pairs:
        for source, target, rate in ((pair.a, pair.b, pair.rate_ab), (pair.b, pair.a, pair.rate_ba)):
            sends[source] = max(rate, sends.get(source, 0))
            receives[target] = max(rate, receives.get(target, 0))
    able = {rank: _capped(min(sends[rank], receives[rank])) for rank in sends}
    usual = statistics.median(able.values()) if able else 0
    found = []
    slow = {rank for rank in able if len(able) > 2 and able[rank] < SLOW_SHARE * usual}
    for rank in sorted(slow):
        found.append(Finding("slow-link", name(rank),
                             f"envía a {_mbit(sends[rank])} y recibe a {_mbit(receives[rank])}, y lo usual es "
                             f"{_mbit(usual)}{' o más' if usual == PLENTY_BYTES_PER_S else ''}",
                             "compruebe su cable, su puerto del switch y que no vaya por Wi-Fi"))
    if len(able) > 2 and usual < SLOW_BYTES_PER_S:
        found.append(Finding("slow-link", "todas las máquinas", f"la red va a {_mbit(usual)}", advice))
    for pair in pairs:
        low, high = sorted((_capped(pair.rate_ab), _capped(pair.rate_ba)))
        rates = f"de {name(pair.a)} a {name(pair.b)} {_mbit(pair.rate_ab)}, y al revés {_mbit(pair.rate_ba)}"
        who = f"{name(pair.a)} con {name(pair.b)}"
        if len(able) == 2 and low < SLOW_BYTES_PER_S:
            found.append(Finding("slow-link", who, f"enlace lento: {rates}", advice))
        elif not {pair.a, pair.b} & slow and low < SLOW_SHARE * min(able[pair.a], able[pair.b]):
            found.append(Finding("slow-link", who, f"enlace más lento que con otras máquinas: {rates}", advice))
        elif not {pair.a, pair.b} & slow and low < ONE_WAY_SHARE * high:
            found.append(Finding("slow-link", who, f"un sentido va mucho más lento: {rates}",
                                 "compruebe cable, puerto del switch y su negociación (ethtool)"))
    return found


def _mbit(rate):
    """Bytes/s, in words."""
    return f"{rate * 8 / 1e6:.3g} Mbit/s" if rate < 1e9 / 8 * 0.9995 else f"{rate * 8 / 1e9:.3g} Gbit/s"


def interface_facts(name):
    """{"mtu", "kind", "speed_mbit"} of a network interface on Linux. mtu: bytes. kind: wifi, cable,
    loopback or virtual. Values are None where the system does not tell."""
    folder = INTERFACES / name

    def read(what):
        try:
            return int((folder / what).read_text())
        except (OSError, ValueError):  # a link that is down has no speed
            return None

    kind = None
    if folder.exists():
        kind = ("loopback" if read("type") == LOOPBACK_TYPE else "wifi" if (folder / "phy80211").exists()
                else "cable" if (folder / "device").exists() else "virtual")
    speed = read("speed")
    return {"mtu": placement.interface_mtu(name), "kind": kind, "speed_mbit": speed if speed and speed > 0 else None}
