"""Who am I: flags, torchrun, SLURM, hand-made variables, in that order."""

import socket
from types import SimpleNamespace

import pytest

from aura import placement
from aura.errors import UserError


def args(**given):
    names = ("rank", "world_size", "local_rank", "master_addr", "master_port", "distributed")
    return SimpleNamespace(**{name: given.get(name) for name in names})


TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1",
            "MASTER_PORT": "29400"}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_NODELIST": "gpu[03-05,9],login",
         "SLURM_JOB_ID": "1234567", "SLURM_STEP_NUM_TASKS": "8"}


def test_alone():
    place = placement.find(args(), {})
    assert (place.rank, place.world_size, place.grouped) == (0, 1, False)


def test_torchrun():
    place = placement.find(args(), TORCHRUN)
    assert (place.rank, place.local_rank, place.world_size, place.source) == (3, 1, 4, "torchrun")
    assert (place.master_addr, place.master_port) == ("10.0.0.1", 29400)


def test_slurm_takes_the_first_host_and_a_port_of_the_job():
    place = placement.find(args(), SLURM)
    assert (place.rank, place.local_rank, place.world_size, place.source) == (5, 1, 8, "SLURM")
    assert (place.master_addr, place.master_port) == ("gpu03", 20000 + 1234567 % 12000)


def test_slurm_step_on_some_nodes_of_its_job():
    assert placement.find(args(), {**SLURM, "SLURM_STEP_NODELIST": "gpu[05,9]"}).master_addr == "gpu05"


def test_torchrun_inside_slurm_wins():
    assert placement.find(args(), {**SLURM, **TORCHRUN}).source == "torchrun"


def test_variables_put_by_hand_inside_slurm_win():
    by_hand = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}
    place = placement.find(args(), {**SLURM, **by_hand})
    assert (place.rank, place.world_size, place.source) == (1, 2, "variables de entorno")


def test_slurm_with_one_task_is_alone():
    assert not placement.find(args(), {**SLURM, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}).grouped


@pytest.mark.parametrize("shell", [{}, {"SLURM_STEP_NUM_TASKS": "1"}], ids=["sbatch", "salloc"])
def test_without_srun_nobody_is_waited_for(shell):
    job = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "n1", **shell}
    for given in ({}, {"master_port": 1234}, {"rank": 0}):
        with pytest.raises(UserError, match="SLURM_NTASKS=8 son las tareas .* no lo lanzó srun: ponga srun delante"):
            placement.find(args(**given), job)
    assert placement.find(args(rank=0, world_size=1), job).world_size == 1


def test_flags_win():
    place = placement.find(args(rank=0, world_size=2, master_addr="h", master_port=1234), TORCHRUN)
    assert (place.rank, place.world_size, place.master_addr, place.master_port) == (0, 2, "h", 1234)
    assert place.source == "argumentos"


@pytest.mark.parametrize("hosts, first", [
    ("n1", "n1"), ("n1,n2", "n1"), ("n[1-2]", "n1"), ("gpu-a[007,9]", "gpu-a007"), ("a[1-2]b,c", "a1b"),
    ("tux-3.uni.es,tux-4.uni.es", "tux-3.uni.es")])
def test_first_host(hosts, first):
    assert placement.hosts(hosts)[0] == first


def test_hosts_of_a_job():
    assert placement.hosts("gpu[03-05,9],login") == ["gpu03", "gpu04", "gpu05", "gpu9", "login"]
    assert placement.hosts("r[1-2]n[1-2]") == ["r1n1", "r1n2", "r2n1", "r2n2"]
    assert placement.slurm_nodes({**SLURM, "SLURM_STEP_NODELIST": "n[1-2]"}) == ["n1", "n2"]
    assert placement.slurm_nodes({}) == []
    with pytest.raises(UserError, match="no se entiende la lista"):
        placement.hosts("n[a-b]")


@pytest.mark.parametrize("env, pieces", [
    ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, ["rango 2"]),
    ({"RANK": "0"}, ["WORLD_SIZE"]),
    ({"WORLD_SIZE": "2", "MASTER_ADDR": "h"}, ["RANK"]),
    ({"RANK": "a", "WORLD_SIZE": "-3", "MASTER_ADDR": "h"}, ["'a'", "'-3'"]),
    ({"RANK": "0", "WORLD_SIZE": "2"}, ["MASTER_ADDR"]),
    ({"RANK": "0", "WORLD_SIZE": "0", "MASTER_ADDR": "h"}, ["WORLD_SIZE", "0"]),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "65536"}, ["65536 no es un puerto"]),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h:29500"}, ["'h:29500'", "MASTER_PORT"]),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "fd00::1"}, ["'fd00::1'", "IPv4"]),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "0.0.0.0"}, ["'0.0.0.0' significa"]),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "http://h"}, ["'http://h' no es una dirección"]),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a\nb"}, ["'a\\nb' no es una dirección"]),
    ({"RANK": "9" * 5000, "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, ["(o RANK): '9999"]),
    ({**SLURM, "SLURM_NTASKS": "dos", "SLURM_JOB_ID": ""}, ["SLURM_NTASKS: 'dos'"]),
    ({**SLURM, "SLURM_PROCID": "x", "SLURM_JOB_ID": "7" * 5000}, ["SLURM_PROCID: 'x'"]),
])
def test_absurd_values_are_named(env, pieces):
    with pytest.raises(UserError) as problem:
        placement.find(args(), env)
    for piece in pieces:
        assert piece in str(problem.value)


def test_a_lone_process_needs_no_port_but_a_good_one():
    alone = SimpleNamespace(**{**vars(args()), "distributed": True})
    assert placement.find(args(rank=0, world_size=1, master_addr="fd00::1"), {}).grouped  # whom nobody calls
    assert placement.find(alone, {}).master_port == 0 and placement.find(alone, {"MASTER_PORT": "7"}).master_port == 7
    with pytest.raises(UserError, match="MASTER_PORT.*'abc'"):
        placement.find(alone, {"MASTER_PORT": "abc"})
    assert placement.address_towards("192.168..10", 29500) is None


@pytest.mark.parametrize("given, env", [({"distributed": True}, True), ({}, False)])
def test_who_names_another_machine_is_not_alone(given, env):
    """Or it would wait for that machine, which knows nothing of it."""
    for address in ("127.0.0.1", "localhost", "::1"):
        assert placement.find(args(master_addr=address), {}).world_size == 1
    for address in ("192.0.2.7", "pc-de-ana.invalid", "ñ" * 300):
        with pytest.raises(UserError, match=r"no es de esta máquina, .* faltan --rank \(o RANK\) y --world-size"):
            if env:
                placement.find(SimpleNamespace(**{**vars(args()), **given}), {"MASTER_ADDR": address})
            else:
                placement.find(args(master_addr=address), {})
    assert not placement.find(args(), {"MASTER_ADDR": "192.0.2.7"}).grouped  # nobody has asked for others


@pytest.mark.parametrize("address, boots, apart", [
    ("172.17.0.2", "ab", True), ("172.17.0.2", "aa", False), ("127.0.0.1", "ab", False),
    ("172.17.0.2", ["a", ""], False)])
def test_machines_of_one_address_are_told(address, boots, apart):
    peers = {rank: {"host": f"pc{rank}", "address": address, "start": f"{boot} 17"} for rank, boot in enumerate(boots)}
    peers[2] = {"host": "pc2", "address": "10.0.0.9", "start": "c 9"}
    problem = placement.one_address(peers)
    assert problem.startswith("los rangos 0 y 1 (pc0 y pc1) están en máquinas dis") if apart else problem is None


@pytest.mark.parametrize("answers, problem", [
    (["fd00::1"], "'pc0' solo tiene aquí una dirección IPv6"), (["fd00::1", "10.0.0.7"], None),
    (["::1", "127.0.0.1"], "'pc0' es aquí 127.0.0.1, esta misma máquina")])
def test_a_name_leads_where_its_ipv4_address_does(monkeypatch, answers, problem):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [
        (socket.AF_INET6 if ":" in address else socket.AF_INET, 1, 6, "", (address, 0)) for address in answers])
    found = placement.name_problem("pc0", own=False)
    assert found.startswith(problem) if problem else found is None


def test_machine_0_may_know_its_name_as_loopback_and_a_rehearsal_is_given_it(monkeypatch):
    """As Debian does (127.0.1.1), where the others are told otherwise."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(socket.AF_INET, 1, 6, "", ("127.0.1.1", 0))])
    assert placement.name_problem("pc0", own=True) is None
    for name in ("127.0.1.1", "localhost"):
        assert placement.name_problem(name, own=False) is None


def test_a_machine_that_knows_itself_as_loopback_is_reached_by_its_way_to_the_others(monkeypatch):
    """Or gloo would listen at lo, where nobody comes."""
    monkeypatch.setattr(placement, "address_towards", lambda *to: {("10.0.0.2", 29500): "10.0.0.1"}[to])
    for own, reached in (("127.0.1.1", "10.0.0.1"), (None, "10.0.0.1"), ("10.0.0.7", "10.0.0.7")):
        assert placement.address_among({0: {"address": own}, 1: {"address": "10.0.0.2"}}, 0, 29500) == reached


def test_a_port_whose_connection_was_closed_just_now_is_free():
    """What the same order, given again at once, finds."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            accepted.close()  # first: this end is the one that has to wait
            assert client.recv(1) == b""
    assert placement.port_problem(port, "--master-port ") is None


def test_gloo_is_given_whole_names_of_interfaces():
    assert placement.interface_problem("lo") is None
    for name, wrong in (("l", "'l'"), ("^docker0,lo", "'^docker0'"), ("lo,eth77", "'eth77'")):
        assert f"GLOO_SOCKET_IFNAME={name}: {wrong} no es ninguna" in placement.interface_problem(name)


def test_an_address_that_gloo_does_not_take_is_noticed(monkeypatch):
    peers = {0: {"address": "10.0.0.1"}, 1: {"address": "10.0.0.2"}}
    for carried, hidden in (({"eth0": "192.168.5.7"}, "10.0.0.1"), ({"eth0": "10.0.0.1"}, None), ({}, None)):
        monkeypatch.setattr(placement, "interface_addresses", lambda carried=carried: carried)
        assert placement.hidden_address(peers, 0, 29500) == hidden


def test_interface_towards_loopback():
    address = placement.address_towards("127.0.0.1", 29500)
    assert address == "127.0.0.1"
    assert placement.interface_of(address) == "lo"
    assert placement.interface_of("203.0.113.77") is None
    place = SimpleNamespace(rank=0, master_port=29500)
    assert placement.interface_towards(place, {0: {"address": "127.0.0.1"}, 1: {"address": "127.0.0.1"}}) == "lo"
    assert placement.interface_towards(place, {0: {"address": None}}) is None
