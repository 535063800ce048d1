"""All ranks and machines of a group examined together: `test_ddp.py --full`.

Rank 0 gathers over the store what each rank has to say, and everyone goes by what it has gathered. A rank that
does not answer in time is left out and named: then what is known so far is the verdict.
"""

import contextlib
import json
import os
import sys
import threading
import time
from dataclasses import asdict

from aura import (
    allreduce,
    backend,
    dashboard,
    diagnosis,
    distributed,
    facts,
    forecast,
    links,
    rendezvous,
    sources,
    verdict,
)
from aura.errors import EXIT_FAULT, EXIT_OK, PeerLost, TrainingFault, UserError, agreed, one_line
from aura.findings import named

MARGIN_SECONDS = 5  # how much longer the others wait for what rank 0 has gathered than rank 0 waits for them
PEER_SECONDS = 3  # that the survey of the network takes for each machine
ATTEMPTS = 3  # at measuring a slow rank: a program that ran beside it once is no trouble yet
# With one of these no group can be formed, or none that lasts.
STOP = {"world-size", "missing", "silent", "port", "interface", "same-address"}
LOG_FOLDER = "./logs"
WIDTH = 120
KINDS = {"wifi": "Wi-Fi", "cable": "cable", "loopback": "", "virtual": "virtual", None: ""}


def examine(args):
    """Examine the group that this process belongs to; every rank calls it. Rank 0 prints the verdict.

    args: what distributed.session needs, and json, checkpoint_dir, data_dir. Returns EXIT_OK when all is well, else
    raises TrainingFault, on every rank. Raises UserError when rank 0 cannot be reached at all.
    """
    exam = Examination(args)
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        exam.run()
    if exam.rank == 0:
        lines = [json.dumps(exam.results(), ensure_ascii=False)] if args.json else report(exam)
        print("\n".join(lines), flush=True)
    problems = exam.close()
    if not problems:
        return EXIT_OK
    raise agreed(TrainingFault, f"problemas encontrados: {problems}" + ("" if exam.rank == 0 else
                                                                       "; los dice la consola del rango 0"))


class Examination:
    """One rank's part. peers: those that came, as the session tells them; present: those that still answer. facts,
    survey, votes, curve, speed: what was found, the same on every rank. findings: what is wrong. alone: whether rank 0
    has stopped answering, after which its store is not asked again."""

    def __init__(self, args):
        self.args, self.timeout, self.rank, self.dist = args, args.dist_timeout, 0, None
        self.group_started = self.group_formed = self.alone = False
        self.peers, self.present, self.facts, self.votes, self.speed = {}, set(), {}, {}, {}
        self.findings, self.curve, self.survey = [], [], links.Survey()
        self.watch = threading.Timer(0, int)

    def run(self):
        """Everything up to the verdict."""
        wrong = reason = None
        try:
            with distributed.session(self.args, self.before_group) as dist:
                self.watch.cancel()
                self.group_formed = self.group_started
                if self.group_formed:
                    wrong, reason = self.in_group(dist)
        except (UserError, TrainingFault, RuntimeError) as problem:
            if self.dist is None or self.alone or (self.rank and 0 in self.dist.silent):
                raise
            self.watch.cancel()
            reason = one_line(problem)
        if self.group_started:
            self.judge_group(wrong, reason)
            if not reason and self.kinds().isdisjoint(STOP):
                self.measure_speed()

    def kinds(self):
        """The kinds of what has been found so far."""
        return {finding.kind for finding in self.findings}

    # ---- Asking all ranks -------------------------------------------------------------------------------------------

    def gather(self, topic, value, limit=None, late=0):
        """{rank: value} of the ranks that answered within `limit` seconds, as rank 0 has gathered it; the others become
        a finding. late: seconds by which rank 0 may begin after us. Raises PeerLost when rank 0 does not answer."""
        limit = limit or self.timeout
        if self.rank == 0:
            found = self._collect(topic, value, limit)
            self.dist.store.set(f"doctor/{topic}", json.dumps(found))
        else:
            found = self._from_rank_0(topic, late + limit + MARGIN_SECONDS, value)
        found = {int(rank): value for rank, value in found.items()}
        silent = self.present - found.keys()
        self.present -= silent
        if silent:
            self.findings.append(verdict.silent(silent, self.peers, topic, limit))
        return found

    def _collect(self, topic, own, limit):
        keys = {rank: f"doctor/{topic}/{rank}" for rank in sorted(self.present - {0})}
        self._wait(list(keys.values()), limit)
        return {0: own, **{rank: json.loads(self.dist.store.get(key)) for rank, key in keys.items()
                           if self.dist.store.check([key])}}

    def _from_rank_0(self, topic, limit, own=None):
        def ask():
            self.dist.store.set(f"doctor/{topic}/{self.rank}", json.dumps(own))
            if not self._wait([f"doctor/{topic}"], limit):
                raise TimeoutError
            return json.loads(self.dist.store.get(f"doctor/{topic}"))

        try:
            return backend.within(limit + 1, ask)
        except (RuntimeError, TimeoutError) as problem:
            raise self._lost_rank_0(topic) from problem

    def _wait(self, keys, limit):
        """Whether all keys are in the store within `limit` seconds."""
        return links.wait(self.dist.store, keys, time.monotonic() + limit, every=True)

    def _lost_rank_0(self, topic):
        self.alone = True
        who = named([0], self.peers) if 0 in self.peers else "rango 0"
        topic = "procesos" if topic == "peers" else topic  # the store's keys are those of every version
        return PeerLost(f"el {who} dejó de contestar ({topic}): mire en su máquina si el proceso sigue en marcha, y si "
                        "la red pierde los paquetes grandes (ping -M do -s 1472 DIRECCIÓN)")

    # ---- Before there is a group ------------------------------------------------------------------------------------

    def before_group(self, dist, place, peers):
        """Compare the facts and measure the network; returns whether a group can be formed."""
        # An earlier version does not say; that it is one is among what the examination finds.
        told = {rank: peer for rank, peer in peers.items() if "full" in peer.get("arguments", {})}
        if 0 in told:
            rendezvous.require_same(told)
        self.dist, self.rank = dist, dist.rank
        if dist.main:
            self.peers = peers
            dist.store.set("doctor/peers", json.dumps(peers))
        else:
            self.peers = {int(rank): peer for rank, peer in self._from_rank_0("peers", 2 * self.timeout).items()}
        expected = self.peers[0].get("world_size", dist.world_size)
        if expected <= self.rank:
            self.alone = True
            self._leave()
            raise TrainingFault(f"este proceso es el rango {self.rank}, con WORLD_SIZE={dist.world_size}, y el rango 0 "
                                f"se lanzó con WORLD_SIZE={expected}: use el mismo en todos")
        if self.rank not in self.peers:
            self.alone = True
            raise TrainingFault(f"este proceso llegó tarde: el rango 0 ya no lo esperaba ({self.timeout:g} s)")
        self.present = set(self.peers)
        self.findings += verdict.world_sizes(self.peers)
        if self.findings:
            return False
        missing = sorted(set(range(dist.world_size)) - self.present)
        if missing:
            self.findings.append(verdict.missing(missing, self.peers, place, self.timeout))
        self.findings += verdict.one_address(self.peers)
        self._compare_facts(place)
        if self.kinds().isdisjoint({"missing", "silent", "same-address"}):
            self.dist.print("Se mide la red entre las máquinas.")
            self._measure_network()
        self.group_started = self.kinds().isdisjoint(STOP)
        if self.rank and self.group_started:
            self._watch()
        return self.group_started

    def _watch(self):
        """End this process when rank 0 stops while the group starts: torch then asks its store for ever."""
        def end():
            print(f"error: {self._lost_rank_0('grupo')}", file=sys.stderr, flush=True)
            os._exit(EXIT_FAULT)

        probe = backend.NCCL_PROBE_SECONDS if self.dist.device.type == "cuda" else 0
        self.watch = threading.Timer(2 * self.timeout + probe + 3 * MARGIN_SECONDS, end)
        self.watch.daemon = True
        self.watch.start()

    def _compare_facts(self, place):
        folders = {"--checkpoint-dir": self.args.checkpoint_dir, "--data-dir": self.args.data_dir,
                   "--log-dir": LOG_FOLDER}
        self.dist.print(f"Se comparan los procesos: {len(self.peers)}.")
        self.facts = self.gather("datos", facts.collect(place, self.peers, self.dist.device, folders))
        right, others = verdict.odd({rank: fact["code"]["hash"] for rank, fact in self.facts.items()})
        if others:
            model = min(rank for rank, fact in self.facts.items() if fact["code"]["hash"] == right)
            asked = {model, *(rank for ranks in others.values() for rank in ranks)}
            files = self.gather("código", sources.source_files() if self.rank in asked else None)
            for rank in asked & files.keys():
                self.facts[rank]["code"]["files"] = files[rank]
        self.findings += verdict.compare(self.facts)

    def _measure_network(self):
        limit = 2 * self.timeout + PEER_SECONDS * len(self.peers) + MARGIN_SECONDS
        try:
            self.survey = backend.within(
                limit, lambda: links.survey(self.dist.store, self.rank, self.peers, self.timeout))
        except TimeoutError:
            self.survey = links.Survey(silent=[0])
        if 0 in self.survey.silent and self.rank:
            raise self._lost_rank_0("red")
        self.findings += links.findings(self.survey, self.peers)

    # ---- With the group ---------------------------------------------------------------------------------------------

    def in_group(self, dist):
        """all_reduce, checked and timed; returns what is wrong with its sum and why the group broke, or None."""
        try:
            backend.check_all_reduce(dist.rank, dist.world_size, dist.device)
            self.dist.print("Se mide all_reduce.")
            self.curve = allreduce.exchange_curve(dist)
        except TrainingFault as problem:
            return str(problem), None
        except RuntimeError as problem:  # leaving the group at once tells those that wait in it
            said = one_line(problem)
            return (None, said) if distributed.is_communication_error(problem) else (said, None)
        return None, None

    def judge_group(self, wrong, reason):
        """What all ranks say of the group once it is over. reason: why it broke here."""
        vote = {"wrong": wrong, "reason": reason, "backend": self.dist.backend, "fallback": self.dist.fallback}
        limit = MARGIN_SECONDS if reason and self.group_formed else self.timeout
        self.votes = self.gather("grupo", vote, limit, late=self.timeout + MARGIN_SECONDS if reason else 0)
        self.findings += verdict.group(self.votes, self.peers, self.facts)

    def measure_speed(self):
        """How fast each rank computes, one after another; one counts as slow if it is so in every attempt."""
        self.dist.print("Se mide el cálculo de cada proceso, uno tras otro.")
        slow = set(self.peers)
        for attempt in range(1, ATTEMPTS + 1):
            for rank in sorted(self.peers):
                mine = forecast.compute_speed(self.dist.device) if rank == self.rank else None
                told = self.gather(f"cálculo {attempt}.{rank}", mine)
                if len(told) < len(self.peers):
                    return
                self.speed[rank] = told[rank]
            slow &= diagnosis.stragglers({rank: speed["seconds"] for rank, speed in self.speed.items()})
            if not slow:
                return
        self.findings += verdict.slow(slow, self.speed, self.peers)

    # ---- The verdict ------------------------------------------------------------------------------------------------

    def results(self):
        """Everything found, for json.dumps."""
        return {"ok": not self.findings, "processes": self.dist.world_size,
                "findings": [{**asdict(finding), "line": finding.line()} for finding in self.findings],
                "facts": self.facts, "network": asdict(self.survey), "group": self.votes.get(0),
                "all_reduce": self.curve, "speed": self.speed, "training": self.training()}

    def training(self):
        """What it means for training: forecast.rows, [] when not all was measured."""
        return forecast.rows(self.curve, self.speed) if self.curve and self.speed else []

    def close(self):
        """Tell all ranks how many problems there are; returns that. Rank 0, whose process may hold the store, leaves
        last."""
        store = self.dist.store
        if self.rank:
            problems = self._from_rank_0("veredicto", self.timeout + MARGIN_SECONDS)
            self._leave()
            return problems
        store.set("doctor/veredicto", json.dumps(len(self.findings)))
        most = max(peer.get("world_size", 0) for peer in self.peers.values())
        beyond = {rank for rank in range(self.dist.world_size, most) if store.check([f"joined/{rank}"])}
        self._wait([f"doctor/left/{rank}" for rank in (self.present | beyond) - {0}], MARGIN_SECONDS)
        return len(self.findings)

    def _leave(self):
        """Tell rank 0 that this rank has read what it had to."""
        with contextlib.suppress(RuntimeError):  # rank 0 has not waited
            self.dist.store.set(f"doctor/left/{self.rank}", "1")


# ---- What rank 0 prints ---------------------------------------------------------------------------------------------


def report(exam):
    """The lines of the verdict: what was compared and measured, what it means, what is wrong."""
    sections = {"Procesos": _ranks(exam), "Red entre máquinas": _pairs(exam), "all_reduce": _curve(exam),
                "Qué supone para entrenar": forecast.lines(exam.training(), exam.facts, WIDTH)}
    lines = [line for title, body in sections.items() if body for line in ("", f"{title}:", *body)]
    if exam.findings:
        return [*lines, "", f"Problemas ({len(exam.findings)}):", *(f"- {found.line()}" for found in exam.findings)]
    return [*lines, "", "Todo correcto: los procesos se ven, suman bien y son iguales."]


def _ranks(exam):
    columns = [("rango", 9, True), ("máquina", 9, False), ("dirección", 8, False), ("dispositivo", 5, False),
               ("hilos", 4, True), ("GFLOP/s", 7, True), ("torch", 6, False), ("commit", 6, False),
               ("interfaz", 5, False), ("MTU", 4, True), ("libre", 3, True)]
    rows = []
    for rank, fact in sorted(exam.facts.items()):
        gpu, processor, network, code = fact["gpu"], fact["processor"], fact["network"], fact["code"]
        speed = exam.speed.get(rank)
        rows.append((
            str(rank), fact["host"], fact["address"] or "-", (gpu["modelo"] if gpu else processor["name"])[:30],
            f"{processor['threads']} de {processor['cores']}", f"{speed['flops'] / 1e9:.0f}" if speed else "-",
            fact["versions"]["torch"], (code["commit"] or "-") + ("+" if code["changed"] else ""),
            f"{network['interface'] or '-'} {KINDS.get(network.get('kind'), '')}".strip(),
            str(network.get("mtu") or "-"), dashboard.size(fact["disks"][0]["free"])))
    return dashboard.table(columns, rows, WIDTH) if rows else []


def _pairs(exam):
    columns = [("de", 9, False), ("a", 9, False), ("ida y vuelta", 8, True), ("ida", 8, True), ("vuelta", 8, True),
               ("repetido", 6, True), ("reloj", 5, True)]
    rows = []
    for pair in exam.survey.pairs:
        offset = exam.survey.clocks.get(pair.b) if pair.a == 0 else None
        rows.append((named([pair.a], exam.peers), named([pair.b], exam.peers), f"{pair.rtt_s * 1e3:.2f} ms",
                     f"{pair.rate_ab * 8e-6:.0f} Mbit/s", f"{pair.rate_ba * 8e-6:.0f} Mbit/s",
                     "-" if pair.retransmitted is None else f"{100 * pair.retransmitted:.2f} %",
                     f"{offset[0]:+.3f} s" if offset else "-"))
    return dashboard.table(columns, rows, WIDTH) if rows else []


def _curve(exam):
    columns = [("tamaño", 9, True), ("tiempo", 9, True), ("velocidad", 8, True)]
    rows = [(f"{size / 1024:.0f} KB" if size < 1 << 20 else f"{size / (1 << 20):.0f} MB",
             f"{seconds * 1e3:.2f} ms" if seconds else "-",
             f"{size / seconds / 1e6:.1f} MB/s" if seconds else "tardaría demasiado") for size, seconds in exam.curve]
    return dashboard.table(columns, rows, WIDTH) if rows and len(exam.peers) > 1 else []
