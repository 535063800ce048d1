"""The network measured: between namespaces with real limits and between threads of this process; and judged."""

import json
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as c10d

from aura import allreduce, forecast, links, wire
from aura.links import Pair, Survey
from aura.models import gpt
from tests.hosts import Switch, limits_work

GBIT = 1e9 / 8
needs_hosts = pytest.mark.skipif(not limits_work(), reason="limited links need root, iproute2 (ip, tc) and nftables")

# A machine of the tests: surveys the network, its clock wrong where that is asked for.
MACHINE = """
import json, sys, time
from argparse import Namespace
from aura import distributed, links


def survey(dist, place, peers):
    right, ahead = time.time, float(sys.argv[1])
    time.time = lambda: right() + ahead * (dist.rank == 1)
    for rank in peers:
        peers[rank]["host"] = f"pc{rank}"
    seen = links.survey(dist.store, dist.rank, peers, 20)
    print(json.dumps([[[finding.kind, finding.who] for finding in links.findings(seen, peers)], str(seen)]))


with distributed.session(Namespace(backend="gloo", dist_timeout=20.0), survey):
    pass
"""


def cluster(hosts, set_up, tmp_path, ahead=0):
    """[findings as [kind, who], all the figures] of machines after set_up(switch)."""
    with Switch(hosts) as switch, ExitStack() as stack:
        set_up(switch)
        processes = switch.start(stack, ["-c", MACHINE, str(ahead)], [tmp_path] * hosts)
        results = [process.finish(60) for process in processes]
    assert [code for code, _ in results] == [0] * hosts, results
    said = [json.loads(output.splitlines()[-1]) for _, output in results]
    assert all(one == said[0] for one in said), said  # every rank knows the same
    return said[0]


@needs_hosts
def test_a_link_of_a_gigabit_is_well_and_the_wrong_clock_is_named(tmp_path):
    found, figures = cluster(2, lambda switch: switch.limit(1, 1000), tmp_path, ahead=100)  # ten times what is slow
    assert found == [["clock", "rango 1 (pc1, 10.77.0.2)"]], figures


@needs_hosts
def test_fifty_megabits_are_slow_but_lose_nothing(tmp_path):
    found, figures = cluster(2, lambda switch: switch.limit(1, 50), tmp_path)
    assert found == [["slow-link", "rango 0 (pc0, 10.77.0.1) con rango 1 (pc1, 10.77.0.2)"]], figures


@needs_hosts
def test_among_three_the_one_with_closed_ports_and_the_one_that_loses_packets_are_named(tmp_path):
    def trouble(switch):
        for host in range(3):
            switch.limit(host, 1000)
        switch.close(1, "1024-29000", "reject with tcp reset")
        switch.close(1, "30000-65535", "reject with tcp reset")
        switch.lose(2, 2)

    found, figures = cluster(3, trouble, tmp_path)
    assert found == [["port", "rango 1 (pc1, 10.77.0.2)"], ["loss", "rango 2 (pc2, 10.77.0.3)"]], figures


def survey_in_threads(addresses, present, timeout=20.0, here=()):
    """What links.survey returns on the ranks that are `present`, each a thread with an address of the loopback. here:
    what others have said of themselves."""
    store, results, wait = c10d.HashStore(), {}, links.wait

    def patient(store, keys, deadline, every=False):
        """Whoever is present is waited for, however late a busy machine lets him come: limits are for the others."""
        keys = list(keys)
        if every:
            wait(store, [key for key in keys if int(key.split("/")[-1]) in present], time.monotonic() + 50, every)
        return wait(store, keys, deadline, every)

    for rank, card in dict(here).items():
        store.set(f"links/here/{rank}", json.dumps(card))
    peers = {rank: {"host": "pc", "address": address} for rank, address in enumerate(addresses)}

    def one(rank):
        results[rank] = links.survey(store, rank, peers, timeout)
        if rank == 0:
            results["read"] = [other for other in present[1:] if store.check([f"links/read/{other}"])]

    threads = [threading.Thread(target=one, args=[rank]) for rank in present]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "wait", patient)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    return results


def test_only_the_first_rank_of_each_machine_measures_and_a_rank_that_never_came_is_silent():
    results = survey_in_threads(["127.0.0.1", "127.0.0.1", "127.0.0.2", "127.0.0.3"], [0, 1, 2], timeout=2)
    assert results[0] == results[1] == results[2]
    seen = results[0]
    assert [(pair.a, pair.b) for pair in seen.pairs] == [(0, 2)] and seen.silent == [3] and not seen.unreachable
    (pair,) = seen.pairs
    assert pair.rtt_s < 0.1 and min(pair.rate_ab, pair.rate_ba) > 1e7 and pair.retransmitted == 0
    assert abs(seen.clocks[2][0]) < 0.1


def test_another_program_is_not_taken_for_a_leader():
    with wire.Desk(0, "127.0.0.1") as desk, wire.Desk(1, "127.0.0.1") as other:
        assert other.dial(0, {**desk.card, "token": "00" * 8}) and not desk.accepted
        assert other.dial(0, desk.card) is None and list(desk.accepted) == [1]
    with socket.create_server(("127.0.0.1", 0)) as server, wire.Desk(0, "127.0.0.1") as desk:
        threading.Thread(target=lambda: server.accept()[0].sendall(b"220 smtp"), daemon=True).start()
        card = {"address": "127.0.0.1", "port": server.getsockname()[1], "token": "00" * 8}
        assert desk.dial(1, card) == "contesta otro programa"


def test_a_machine_that_stops_answering_is_silent_and_the_others_go_on(monkeypatch):
    monkeypatch.setattr(links, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(wire, "CONNECT_SECONDS", 0.3)
    monkeypatch.setattr(wire, "RATE_SECONDS", 0.2)
    monkeypatch.setattr(wire, "MESSAGES", 10)
    with socket.create_server(("127.0.0.2", 0)) as stopped:  # connections wait in its kernel, and nobody says a word
        card = {"address": "127.0.0.2", "port": stopped.getsockname()[1], "token": "00" * 8}
        results = survey_in_threads(["127.0.0.1", "127.0.0.2", "127.0.0.3"], [0, 2], here={1: card})
    assert results[0] == results[2]
    assert results[0].silent == [1] and not results[0].unreachable
    assert [(pair.a, pair.b, pair.retransmitted) for pair in results[0].pairs] == [(0, 2, None)]


def test_a_direction_in_which_too_little_was_sent_is_measured_again(monkeypatch):
    """It may be the one that loses packets; the other, which loses none, says nothing about it."""
    monkeypatch.setattr(links, "PAIR_SECONDS", 5)
    said = [{"rate": 1e8, "retransmitted": 0.0, "rtt": 1e-5, "offset": 0.0, "uncertainty": 1e-5}] * 2
    said += [{"rate": 1e8, "retransmitted": share} for share in (None, 0.02)]
    asked = []

    def ask(order, who, seconds):
        asked.append(order["measure"])
        return {0: said[len(asked) - 1], 1: said[len(asked) + 1]}

    seen, ways, deadline = Survey(), [(0, 1, 0)], time.monotonic() + 60
    assert links._measure(ask, {0: {}, 1: {}}, ways, seen, deadline) == {(0, 1)} and seen.pairs[0].retransmitted == 0
    assert not links._measure(ask, {0: {}, 1: {}}, ways, seen, deadline) and seen.pairs[0].retransmitted == 0.02


def test_one_machine_alone_measures_nothing():
    assert survey_in_threads(["127.0.0.1"] * 2, [0, 1])[1] == Survey(clocks={0: (0.0, 0.0)})


def test_who_leads_leaves_when_all_have_read():
    """When it leaves it may take the store along."""
    assert survey_in_threads(["127.0.0.1"] * 3, [0, 1, 2])["read"] == [1, 2]


def test_a_store_that_does_not_answer_is_rank_zero_silent():
    class Gone:
        def set(self, key, value):
            raise c10d.DistNetworkError("Connection reset by peer")

    assert links.survey(Gone(), 1, {0: {"host": "a", "address": "127.0.0.1"},
                                    1: {"host": "b", "address": "127.0.0.2"}}, 1).silent == [0]


def test_a_tournament_has_every_pair_once_and_nobody_twice_in_a_round():
    for count in range(2, 9):
        players, played = list(range(0, 3 * count, 3)), []
        for together in links.rounds(players):
            assert len({one for pair in together for one in pair}) == 2 * len(together)
            played += together
        assert sorted(played) == [(a, b) for a in players for b in players if a < b]


def judge(count=3, **seen):
    peers = {rank: {"host": f"pc{rank}", "address": f"10.0.0.{rank}"} for rank in range(count)}
    return [(finding.kind, finding.who) for finding in links.findings(Survey(**seen), peers)]


def pairs(rates, lost=None):
    """Pairs from {(a, b): Gbit/s of both or of each direction}."""
    return [Pair(a, b, 1e-4, *(GBIT * rate for rate in (both if isinstance(both, tuple) else (both, both))),
                 (lost or {}).get((a, b), 0.0)) for (a, b), both in rates.items()]


PC = [f"rango {rank} (pc{rank}, 10.0.0.{rank})" for rank in range(3)]


@pytest.mark.parametrize(("count", "seen", "right"), [
    (3, {"pairs": pairs({(0, 1): 1, (0, 2): 0.8, (1, 2): 0.7})}, []),
    (3, {"pairs": pairs({(0, 1): 1, (0, 2): 0.05, (1, 2): 0.05})}, [("slow-link", PC[2])]),
    (3, {"pairs": pairs({(0, 1): 1, (0, 2): (1, 0.1), (1, 2): (1, 0.1)})}, [("slow-link", PC[2])]),
    (3, {"pairs": pairs({(0, 1): 0.05, (0, 2): 0.05, (1, 2): 0.05})}, [("slow-link", "todas las máquinas")]),
    (3, {"pairs": pairs({(0, 1): 1, (0, 2): 0.3, (1, 2): 1})}, [("slow-link", f"{PC[0]} con {PC[2]}")]),
    (2, {"pairs": pairs({(0, 1): 0.05})}, [("slow-link", f"{PC[0]} con {PC[1]}")]),
    (2, {"pairs": pairs({(0, 1): (0.94, 0.3)})}, [("slow-link", f"{PC[0]} con {PC[1]}")]),
    (2, {"pairs": pairs({(0, 1): 0.05}, {(0, 1): 0.02})}, [("loss", f"{PC[0]} con {PC[1]}")]),
    (3, {"pairs": pairs({(0, 1): 1, (0, 2): 1, (1, 2): 1}, {(0, 2): 0.02, (1, 2): 0.01})},
     [("loss", PC[2])]),
    (3, {"pairs": pairs({(0, 1): 1}) + [Pair(0, 2, 1e-4, GBIT, GBIT, None)]}, []),
    (3, {"unreachable": [(0, 1, "no contesta"), (2, 1, "no contesta")]}, [("port", PC[1])]),
    (3, {"unreachable": [(1, 0, "no contesta"), (1, 2, "no contesta")]}, [("port", PC[1])]),
    (3, {"unreachable": [(0, 1, "no contesta"), (2, 1, "x"), (0, 2, "x"), (1, 2, "x")]},
     [("port", PC[1]), ("port", PC[2])]),
    (4, {"unreachable": [(0, 1, "no contesta")]}, [("port", f"{PC[0]} hacia {PC[1]}")]),
    (3, {"unreachable": [(0, 2, "no contesta")], "silent": [1]}, [("silent", PC[1]),
                                                                ("port", PC[2])]),
    (2, {"clocks": {0: (0, 0), 1: (-3.0, 0.001)}}, [("clock", PC[1])]),
    (3, {"clocks": {0: (0, 0), 1: (9.0, 0.001), 2: (9.1, 0.001)}}, [("clock", PC[0])]),
    (2, {"clocks": {0: (0, 0), 1: (1.5, 0.8)}}, []),
])
def test_the_machine_that_figures_speak_of_is_named_and_no_other(count, seen, right):
    assert judge(count, **seen) == right


def test_a_finding_names_both_directions():
    peers = {rank: {"host": f"pc{rank}", "address": f"10.0.0.{rank}"} for rank in range(2)}
    (finding,) = links.findings(Survey(unreachable=[(0, 1, "rechaza la conexión")]), peers)
    assert finding.line().startswith(f"{PC[1]}: no le llegan las conexiones de {PC[0]}, y las suyas sí llegan (rechaza "
                                     "la conexión); abra en su cortafuegos")


@pytest.mark.parametrize(("files", "right"), [
    ({"type": "1", "speed": "1000", "device": None}, ("cable", 1000)),
    ({"type": "1", "phy80211": None, "device": None}, ("wifi", None)),
    ({"type": "1", "speed": "-1"}, ("virtual", None)),
    ({"type": "772"}, ("loopback", None)),
    (None, (None, None)),
])
def test_interface_facts(tmp_path, monkeypatch, files, right):
    monkeypatch.setattr(links, "INTERFACES", tmp_path)
    if files is not None:
        (tmp_path / "x").mkdir()
        for name, content in files.items():
            (tmp_path / "x" / name).mkdir() if content is None else (tmp_path / "x" / name).write_text(content + "\n")
    facts = links.interface_facts("x")
    assert (facts["kind"], facts["speed_mbit"]) == right and facts["mtu"] is None
    assert links.interface_facts("lo")["mtu"] == int(Path("/sys/class/net/lo/mtu").read_text())


@pytest.mark.parametrize("preset", ["demo", "gpt2", "gpt2-medium"])
def test_buckets_are_those_of_the_reducer(preset):
    with torch.device("meta"):
        parameters = list(gpt.GPT(gpt.PRESETS[preset]).parameters())[::-1]
    groups, _ = c10d._compute_bucket_assignment_by_size(parameters, [allreduce.FIRST_BUCKET_BYTES,
                                                                     allreduce.BUCKET_BYTES])
    made = allreduce.buckets(forecast.gpt_gradients(gpt.PRESETS[preset]))
    assert [size for size, _ in made] == [4 * sum(parameters[i].numel() for i in group) for group in groups]
    shares = [share for _, share in made]
    assert shares == sorted(shares) and shares[-1] == pytest.approx(1)
    config = gpt.PRESETS[preset]
    # Of the head, a little less than here, where attention's products are not counted.
    head = 2 * 3 * config.vocab_size * config.n_embd / config.flops_per_token()
    assert head < shares[0] < head + 2 / config.n_layer


def test_what_backward_hides_is_not_exposed():
    curve = [(1 << 10, 0.001), (1 << 20, 0.01), (64 << 20, 0.64), (256 << 20, None)]
    assert allreduce.seconds_for(curve, 512) == 0.001
    assert allreduce.seconds_for(curve, 32.5 * 2**20) == pytest.approx(0.325)
    assert allreduce.seconds_for(curve, 128 << 20) == pytest.approx(1.28)
    gradients = forecast.gpt_gradients(gpt.PRESETS["gpt2"])
    sizes = [size for size, _ in allreduce.buckets(gradients)]
    all_of_it = sum(allreduce.seconds_for(curve, size) for size in sizes)
    assert allreduce.step_seconds(curve, gradients) == pytest.approx(all_of_it)
    assert allreduce.step_seconds(curve, gradients, 1e3) == pytest.approx(allreduce.seconds_for(curve, sizes[-1]))
    assert all_of_it > allreduce.step_seconds(curve, gradients, 1.0) > all_of_it - 1.0
