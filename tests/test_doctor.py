"""test_ddp.py --full: what it compares, and real groups in which something is wrong."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch

from aura import (
    backend,
    corpus,
    diagnosis,
    distributed,
    doctor,
    facts,
    forecast,
    preparation,
    rendezvous,
    sources,
    verdict,
)
from aura.errors import UserError
from tests.support import ROOT, Process, corpus_text, free_port, run

DOCTOR = ROOT / "test_ddp.py"


# ---- Comparing ------------------------------------------------------------------------------------------------------


def fact(rank, **changes):
    """What a healthy rank says of itself, each on a machine of its own; a dict in `changes` is merged."""
    said = {
        "host": f"pc{rank}", "address": f"10.0.0.{rank + 1}", "node": None, "pid": 100 + rank, "device": "cuda:0",
        "versions": {"Python": "3.12", "torch": "2.13.0", "CUDA": "13.0", "NCCL": "2.28", "numpy": "2.4.6"},
        "code": {"hash": "a", "commit": "abc", "changed": False}, "kernels": True,
        "data": {"name": "libro", "sha256": "d1", "tokenizer": "t1", "bytes": 5_000_000},
        "gpu": {"modelo": "L4", "memoria": "24 GB", "driver": "580.1", "count": 1},
        "disks": [{"flag": flag, "folder": "x", "device": 1, "free": 5e10, "problem": None}
                  for flag in ("--checkpoint-dir", "--data-dir", "--log-dir")],
        "network": {"interface": "eth0", "wrong": [], "mtu": 1500, "kind": "cable", "speed_mbit": 1000},
        "processor": {"name": "x", "cores": 8, "threads": 8, "nice": 0}}
    for name, value in changes.items():
        said[name] = {**said[name], **value} if isinstance(value, dict) and said[name] else value
    return said


def disks(**changes):
    return [{**disk, **changes} for disk in fact(0)["disks"]]


ODD = [
    ({2: {"versions": {"torch": "2.12.0"}}}, "versions", "rango 2 (pc2, 10.0.0.3)", "torch 2.12.0 y los demás 2.13.0"),
    ({1: {"versions": {"NCCL": None}}}, "versions", "rango 1", "NCCL ninguno y los demás 2.28"),
    ({0: {"code": {"hash": "b", "commit": "old", "changed": True, "files": {"aura/a.py": "1", "aura/b.py": "1"}}},
      1: {"code": {"files": {"aura/a.py": "1", "aura/b.py": "2", "aura/c.py": "3"}}}},
     "code", "rango 0", "en aura/b.py, aura/c.py (commit old con cambios sin confirmar; los demás, commit abc)"),
    ({1: {"kernels": "no hay compilador", "gpu": None}, 0: {"gpu": None}, 2: {"gpu": None}}, "versions", "rango 1",
     "no hay compilador"),
    ({1: {"data": {"sha256": "d2"}}}, "data", "rango 1", "'libro'"),
    ({1: {"data": {"sha256": "d2", "tokenizer": "t2"}}}, "tokenizer", "rango 1", "tokenizador"),
    ({1: {"data": {"problem": "está dañado", "name": ""}}}, "data", "rango 1", "está dañado"),
    ({2: {"gpu": None, "device": "cpu"}}, "gpu", "rango 2", "no ve ninguna GPU"),
    ({2: {"gpu": {"modelo": "T4"}}}, "gpu", "rango 2", "modelo de la GPU: T4, y en los demás L4"),
    ({1: {"gpu": {"driver": "570"}}}, "gpu", "rango 1", "controlador de la GPU: 570"),
    ({0: {"disks": disks(free=2e9)}}, "disk", "rango 0", "quedan 2.0 GB en 'x' (--checkpoint-dir)"),
    ({1: {"disks": disks(free=5e7)}}, "disk", "rango 1", "quedan 50 MB"),
    ({1: {"disks": disks(free=1.02e8), "data": None}}, "disk", "rango 1", "105 MB"),
    ({1: {"disks": disks(problem="permiso denegado")}}, "disk", "rango 1", "permiso denegado"),
    ({1: {"network": {"wrong": [["GLOO_SOCKET_IFNAME", "docker0", True]]}}}, "interface", "rango 1",
     "GLOO_SOCKET_IFNAME=docker0, puesta a mano, no es la interfaz que lleva a los demás, que es eth0"),
    ({2: {"network": {"mtu": 9000}}}, "interface", "rango 2", "MTU 9000 en eth0, y en los demás 1500"),
    ({2: {"processor": {"nice": 19}}}, "slow-rank", "rango 2", "nice 19"),
    ({0: {"processor": {"nice": 10}}}, "slow-rank", "rango 0", "nice 10"),
]


@pytest.mark.parametrize("changes, kind, who, text", ODD, ids=[f"{case[1]}-{case[3][:20]}" for case in ODD])
def test_one_odd_rank_is_named_and_nothing_else(changes, kind, who, text):
    (found,) = verdict.compare({rank: fact(rank, **changes.get(rank, {})) for rank in range(3)})
    assert found.kind == kind and who in found.who and text in found.text and found.remedy
    assert "\n" not in found.line()


def test_what_is_no_trouble():
    """Equal ranks; data on one alone; different cores; less space where nothing is saved; shared folders; CPU kernels
    that a rank with a GPU does not have."""
    healthy = {rank: fact(rank) for rank in range(4)}
    healthy[1]["kernels"] = "no hay compilador"
    healthy[1]["data"] = healthy[2]["data"] = None
    healthy[3]["processor"] = {"name": "y", "cores": 2, "threads": 2, "nice": 0}
    healthy[3]["disks"] = disks(free=1.02e8)
    healthy[2]["network"] = {"interface": "lo", "wrong": [], "mtu": 65536, "kind": "loopback", "speed_mbit": None}
    assert verdict.compare(healthy) == []


def test_in_a_tie_rank_0_is_right_and_machines_are_told_apart():
    said = {rank: fact(rank, host="pc", code={"hash": "old" if rank in (1, 3) else "new"}) for rank in range(4)}
    (found,) = verdict.compare(said)
    assert found.who == "rango 1 (pc, 10.0.0.2) y rango 3 (pc, 10.0.0.4)"


@pytest.mark.parametrize("low", [0, 1])
def test_of_two_ranks_either_may_have_the_low_priority(low):
    said = {rank: fact(rank, processor={"nice": 10 * (rank == low)}) for rank in range(2)}
    (found,) = verdict.compare(said)
    assert f"rango {low} (" in found.who and "nice 10, y otros 0" in found.text
    assert verdict.compare({rank: fact(rank, processor={"nice": rank - 5}) for rank in range(2)}) == []


def test_each_folder_that_cannot_be_written_is_named_and_a_full_disk_once():
    here = disks()
    here[0].update(folder="f1", problem="no es una carpeta")
    here[1].update(folder="f2", problem="no es una carpeta")
    found = [found.text for found in verdict.compare({0: fact(0, disks=here), 1: fact(1)})]
    assert len(found) == 2 and "'f1' (--checkpoint-dir)" in found[0] and "'f2' (--data-dir)" in found[1]
    full = [{**disk, "free": 0, "problem": "no queda espacio"} for disk in here]
    assert len(verdict.compare({0: fact(0, disks=full)})) == 1
    assert len(verdict.compare({rank: fact(rank, host="pc", disks=full) for rank in range(2)})) == 2


@pytest.mark.parametrize("rank, data, remedy", [
    (0, {"sha256": "d2"}, "el rango 0 reparte los suyos"), (1, {"sha256": "d2"}, "se sustituirán por los del rango 0"),
    (1, {"sha256": "d2", "name": "otro"}, "junto a estos, que no se usarán")])
def test_what_becomes_of_other_data_is_told(rank, data, remedy):
    (found,) = verdict.compare({0: fact(0), 1: fact(1), 2: fact(2), rank: fact(rank, data=data)})
    assert remedy in found.remedy


def test_data_that_will_be_replaced_need_room_as_new_ones_do():
    said = {0: fact(0), 1: fact(1, data={"sha256": "d2"}, disks=disks(free=1.02e8)), 2: fact(2)}
    assert {found.kind for found in verdict.compare(said)} == {"data", "disk"}


def test_what_the_group_shows():
    peers = {rank: fact(rank) for rank in range(3)}
    well = {"wrong": None, "reason": None, "backend": "nccl", "fallback": None}

    def kinds(votes):
        return [(found.kind, found.who.split(" (")[0]) for found in verdict.group(votes, peers, peers)]

    assert kinds(dict.fromkeys(range(3), well)) == []
    assert kinds({0: well, 1: {**well, "wrong": "da 3"}, 2: well}) == [("wrong-sum", "rango 1")]
    assert kinds({0: well, 1: {**well, "reason": "no route"}, 2: well}) == [("backend", "rango 1")]
    assert kinds({0: {**well, "reason": "lost"}, 1: well}) == []  # rank 2 fell silent, which is told elsewhere
    assert kinds({rank: {**well, "fallback": "la prueba falló"} for rank in range(3)}) == [("backend",
                                                                                          "todos los rangos")]
    mixed = {0: fact(0), 1: fact(1, gpu=None)}  # gloo is the only one there is
    assert not list(verdict.group({0: {**well, "fallback": "sin NCCL"}}, peers, mixed))


def test_a_version_that_does_not_say_its_number_of_processes_is_not_judged():
    said, silent = fact(0, world_size=2), fact(1)
    assert verdict.world_sizes({0: said, 1: silent}) == verdict.world_sizes({0: silent, 1: said}) == []


def test_slurm_nodes_from_which_nobody_came(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NODELIST", "n[1-3]")
    peers = {0: {"host": "n1", "address": "10.0.0.1", "node": "n1"}, 2: {"host": "n3", "address": None, "node": "n3"}}
    found = verdict.missing([1], peers, SimpleNamespace(source="SLURM"), 5)
    assert found.who == "rango 1" and "de n2 no llegó nadie" in found.text


@pytest.mark.parametrize("value, carries", [
    ("eth0", True), ("eth", True), ("=eth0", True), ("=eth", False), ("eth1", False), ("eth1,eth0", True),
    ("^docker", True), ("^eth", False)])
def test_interfaces_as_nccl_reads_them(value, carries):
    here = {"eth0": "10.0.0.1", "eth1": "10.0.1.1"}
    assert facts._carries("NCCL_SOCKET_IFNAME", value, "eth0", here, alone=False) is carries


@pytest.mark.parametrize("value, alone, carries", [
    ("eth0", False, True), ("eth0,eth1", False, True), ("eth1", False, False), ("eth1", True, True),
    ("eth", True, False),
    ("=eth0", False, False), ("^docker", False, False), ("eth0,docker0", False, False)])
def test_interfaces_as_gloo_reads_them(value, alone, carries):
    here = {"eth0": "10.0.0.1", "eth1": "10.0.1.1"}
    assert facts._carries("GLOO_SOCKET_IFNAME", value, "eth0", here, alone) is carries


def test_sources_are_the_same_whatever_their_line_ends(tmp_path):
    for name in ("setup.py", "aura/a.py", "csrc/a.cpp", "csrc/a.o"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"a\nb\n")
    first = sources.source_files(tmp_path)
    assert list(first) == ["aura/a.py", "csrc/a.cpp", "setup.py"]
    (tmp_path / "aura/a.py").write_bytes(b"a\r\nb\r\n")
    assert sources.source_files(tmp_path) == first
    (tmp_path / "aura/a.py").write_bytes(b"a\nc\n")
    assert sources.source_files(tmp_path)["aura/a.py"] != first["aura/a.py"]


def test_what_an_editor_leaves_among_the_sources_is_none(tmp_path):
    (tmp_path / "aura" / ".ipynb_checkpoints").mkdir(parents=True)
    (tmp_path / "aura" / "folder.py").mkdir()
    (tmp_path / "aura" / ".#a.py").symlink_to("user@pc.1:17")  # Emacs' lock points nowhere
    for name in ("a.py", ".a.py", ".ipynb_checkpoints/a.py"):
        (tmp_path / "aura" / name).write_text("")
    assert list(sources.source_files(tmp_path)) == ["aura/a.py"]


def test_a_busy_neighbour_makes_a_rank_slow_and_is_the_reason(monkeypatch):
    core = min(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    loop = f"import os; os.sched_setaffinity(0, [{core}])\nprint(flush=True)\nwhile True: pass"
    os.sched_setaffinity(0, [core])
    try:
        with monkeypatch.context() as patch:  # CPU time instead: as if alone, whoever else is busy on the core
            patch.setattr(forecast, "time", SimpleNamespace(perf_counter=time.process_time))
            alone = forecast.compute_speed(torch.device("cpu"))
        with ExitStack() as stack:
            for _ in range(2):
                stack.enter_context(Process(["-c", loop], ROOT)).wait_for("")
            taken = forecast.compute_speed(torch.device("cpu"))
    finally:
        os.sched_setaffinity(0, before)
    speed = {0: alone, 1: taken, 2: alone}
    assert diagnosis.stragglers({rank: one["seconds"] for rank, one in speed.items()}) == {1}
    (found,) = verdict.slow({1}, speed, {rank: fact(rank) for rank in range(3)})
    assert found.kind == "slow-rank" and taken["waited"] > 0.4 and "otro programa le quita el" in found.text


def test_what_the_network_means_for_training():
    speed = {0: {"flops": 2e12}, 1: {"flops": 1e12}}
    slow, fast = ([(size, 1e-4 + size / rate) for size in (1 << 10, 1 << 20, 64 << 20)] for rate in (5e6, 500e6))
    for here, there in zip(forecast.rows(slow, speed), forecast.rows(fast, speed), strict=True):
        assert here["communication_s"] > 20 * there["communication_s"] and here["compute_s"] == there["compute_s"]
        assert here["waiting_s"] < here["communication_s"] and here["share"] > there["share"]
        accumulated = here["accumulate"] * here["compute_s"]
        assert here["waiting_s"] / (here["waiting_s"] + accumulated) <= 0.2 + 1e-6
    wired = {rank: fact(rank) for rank in range(2)}
    wireless = {0: fact(0), 1: fact(1, network={"kind": "wifi"})}
    assert "--grad-accum" in "".join(forecast.lines(forecast.rows(slow, speed), wired, 120))
    assert "Wi-Fi" not in "".join(forecast.lines(forecast.rows(slow, speed), wired, 120))
    assert "Va por Wi-Fi el rango 1" in forecast.lines(forecast.rows(slow, speed), wireless, 120)[-1]


def test_a_group_that_breaks_without_a_word_is_broken(monkeypatch):
    def breaks(*_):
        raise RuntimeError

    monkeypatch.setattr(backend, "check_all_reduce", breaks)
    dist = distributed.Session()
    assert doctor.Examination(SimpleNamespace(dist_timeout=1)).in_group(dist) == ("RuntimeError", None)


# ---- Real groups ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Three folders for --data-dir: a data set, one of other text with the same tokenizer, one of another tokenizer."""
    folder = tmp_path_factory.mktemp("datos")
    (folder / "libro.txt").write_text(corpus_text(20), encoding="utf-8")
    quiet = {"note": lambda *_: None, "threads": 1}

    def prepare(name, text, **how):
        (folder / name).mkdir()
        (folder / name / "libro.txt").write_text(text, encoding="utf-8")
        return preparation.prepare(corpus.open_corpus(str(folder / name / "libro.txt")), folder / name, **how, **quiet)

    first = prepare("a", corpus_text(20), vocab_size=300)
    prepare("b", corpus_text(21), tokenizer=first.load_tokenizer())
    prepare("c", corpus_text(20), vocab_size=310)
    return [folder / name for name in "abc"]


def test_a_tokenizer_that_was_changed_among_the_data_is_another(data, tmp_path):
    shutil.copytree(data[0], tmp_path / "a")
    before = facts._data(tmp_path / "a")
    next((tmp_path / "a").glob("*/tokenizer.model")).write_bytes(b"otro")
    after = facts._data(tmp_path / "a")
    assert before["name"] == "libro" and {name for name in before if before[name] != after[name]} == {"tokenizer"}


@pytest.fixture
def full_disk(tmp_path):
    """A folder on a disk of its own with no room left."""
    folder = tmp_path / "lleno"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, timeout=20).returncode:
        yield None
        return
    with contextlib.suppress(OSError):
        (folder / "relleno").write_bytes(b"x" * (1 << 17))
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)


def test_two_healthy_ranks(tmp_path, data):
    """Only rank 1 lacks data. stdout, here without stderr, holds nothing but the JSON."""
    port = free_port()
    with ExitStack() as stack:
        launched = []
        for rank in range(2):
            command = [DOCTOR, "--full", "--json", "--timeout", 30, "--data-dir", data[0] if rank == 0 else "nada"]
            launched.append(stack.enter_context(Process(command, tmp_path, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=2,
                                                        MASTER_ADDR="127.0.0.1", MASTER_PORT=port)))
        (code, output), (other, quiet) = [process.finish(60) for process in launched]
    assert (code, other) == (0, 0), output + quiet
    said = json.loads(output.splitlines()[-1])
    assert said["ok"] and said["findings"] == [] and said["group"]["backend"] == "gloo"
    assert set(said["facts"]) == {"0", "1"} and said["facts"]["1"]["data"] is None and said["speed"]["1"]["flops"] > 1e8
    assert [row["preset"] for row in said["training"]][:2] == ["demo", "gpt2"] and len(said["all_reduce"]) > 2
    assert not (tmp_path / "checkpoints").exists() and not (tmp_path / "nada").exists()


@pytest.mark.parametrize("full", [0, 1])
def test_the_whole_examination_of_one_machine_alone_is_no_fault_of_the_network(tmp_path, full):
    port = free_port()
    with ExitStack() as stack:
        launched = [stack.enter_context(Process([DOCTOR, *["--full"] * (rank == full)], tmp_path, RANK=rank,
                                                LOCAL_RANK=rank, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1",
                                                MASTER_PORT=port)) for rank in range(2)]
        for code, output in [process.finish(60) for process in launched]:
            assert code == 2 and output == (f"error: --full es {full == 0} en el rango 0 y {full == 1} en el rango 1: "
                                            "lance todos los procesos con las mismas opciones\n")


def test_an_earlier_version_is_examined_like_any_difference():
    said = {0: {"backend": "auto", "full": True}, 1: {"backend": "auto"}}
    peers = {rank: {"arguments": said[rank], "host": f"pc{rank}", "address": f"10.0.0.{rank}", "world_size": 2 + rank}
             for rank in said}
    exam = doctor.Examination(SimpleNamespace(dist_timeout=1.0))
    dist = SimpleNamespace(main=True, rank=0, world_size=2, store=torch.distributed.HashStore())
    assert not exam.before_group(dist, None, peers) and exam.kinds() == {"world-size"}, "and not at once refused"


def test_everything_that_differs_is_named_with_its_rank_and_nothing_else(tmp_path, data, full_disk):
    """Rank 1: an older copy, another tokenizer. Rank 2: other data, a wrong interface, a full disk, low priority."""
    copied = tmp_path / "copia"
    shutil.copytree(ROOT, copied, ignore=shutil.ignore_patterns(".*", "build", "docs", "tests", "*.egg-info"))
    with open(copied / "aura" / "optim.py", "a") as file:
        file.write("# as it was before\n")
    port, healthy = free_port(), tmp_path / "sitio"
    healthy.mkdir()
    scripts = [DOCTOR, copied / "test_ddp.py", DOCTOR]
    with ExitStack() as stack:
        launched = []
        for rank in range(3):
            own = {"GLOO_SOCKET_IFNAME": "nohay0"} if rank == 2 else {}
            folder = full_disk if rank == 2 and full_disk else healthy
            launched.append(stack.enter_context(Process(
                [scripts[rank], "--full", "--timeout", 20, "--data-dir", (data[0], data[2], data[1])[rank],
                 "--checkpoint-dir", folder], healthy, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=3,
                MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **own)))
        results = [process.finish(60) for process in launched]
    assert [code for code, _ in results] == [3, 3, 3], results
    problems = [line for line in results[0][1].splitlines() if line.startswith("- ")]
    expected = {"rango 1": ["otra versión de este código en aura/optim.py (", "el tokenizador de sus datos"],
                "rango 2": ["el contenido de sus datos", "GLOO_SOCKET_IFNAME=nohay0"] + ["lleno"] * bool(full_disk)}
    for who, texts in expected.items():
        for text in texts:
            assert any(line.startswith(f"- {who} (") and text in line for line in problems), (text, problems)
    assert len(problems) == sum(map(len, expected.values())), problems
    assert f"Problemas ({len(problems)}):" in results[0][1]
    assert "los dice la consola del rango 0" in results[1][1]


def test_rank_0_that_never_came_or_has_the_address_of_another_machine_is_one_line(tmp_path):
    code, output = run([DOCTOR, "--full", "--timeout", "1"], tmp_path, RANK=1, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1",
                       MASTER_PORT=free_port())
    assert code == 2 and output.count("\n") == 1 and "no se pudo llegar al rango 0" in output
    code, output = run([DOCTOR, "--timeout", "1"], tmp_path, RANK=0, WORLD_SIZE=2, MASTER_ADDR="203.0.113.9",
                       MASTER_PORT=free_port())
    assert code == 2 and output.count("\n") == 1 and "MASTER_ADDR=203.0.113.9 no es una dirección de esta" in output
    assert run([DOCTOR, "--json"], tmp_path) == (2, "error: --json solo sirve con --full: añádalo\n")


@pytest.mark.parametrize("sizes, ranks", [((2, 3), (0, 1)), ((3, 2), (0, 1)), ((2, 3), (0, 1, 2))])
def test_another_number_of_processes_is_named_at_once(tmp_path, sizes, ranks):
    port, launched = free_port(), {}
    with ExitStack() as stack:
        for rank in sorted(ranks, key=lambda rank: rank == 1):  # with rank 1 there are two, and they wait for no third
            if rank == 1 and len(ranks) == 3:
                backend.connect_store(SimpleNamespace(master_addr="127.0.0.1", master_port=port, rank=2),
                                      60).wait(["joined/2"])
                os.kill(launched[2].child.pid, signal.SIGSTOP)  # it reads the reason late, and the others wait for it
            launched[rank] = stack.enter_context(Process(
                [DOCTOR, "--full", "--timeout", 200], tmp_path, RANK=rank, LOCAL_RANK=rank, MASTER_ADDR="127.0.0.1",
                WORLD_SIZE=sizes[min(rank, 1)], MASTER_PORT=port))
        results = {1: launched[1].finish(60)}
        if len(ranks) == 3:
            time.sleep(1)
            os.kill(launched[2].child.pid, signal.SIGCONT)
        results |= {rank: launched[rank].finish(60) for rank in ranks if rank != 1}
    assert all(code == 3 for code, _ in results.values()), results
    (line,) = [line for line in results[0][1].splitlines() if line.startswith("- ")]
    assert "Procesos:" not in results[0][1], "an empty table says nothing"
    assert "rango 1 (" in line and f"WORLD_SIZE={sizes[1]}, y en el rango 0 {sizes[0]}" in line
    with pytest.raises(UserError, match=f"WORLD_SIZE={sizes[0]} en el rango 0 y {sizes[1]} en el rango 1"):
        rendezvous.require_all({1: {"world_size": sizes[1]}}, SimpleNamespace(rank=0, world_size=sizes[0]), 20)
    assert len(ranks) == 2 or "el rango 2, con WORLD_SIZE=3, y el rango 0 se lanzó con WORLD_SIZE=2" in results[2][1]


def test_another_program_at_the_port_is_told_from_nobody(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        code, output = run([DOCTOR, "--timeout", "2"], tmp_path, RANK=1, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1",
                           MASTER_PORT=other.getsockname()[1])
    assert code == 2 and output.count("\n") == 1 and "no es el rango 0, o está parado" in output, output


def test_ranks_that_never_come_or_stop_are_named_in_time(tmp_path):
    """Three groups at once, as most of it is waiting: rank 1 of 3 never comes; rank 1, and rank 0, stop in the middle.
    """
    def group(stack, world_size, came):
        port = free_port()
        return [stack.enter_context(Process(
            [DOCTOR, "--full", "--timeout", 3], tmp_path, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size,
            MASTER_ADDR="127.0.0.1", MASTER_PORT=port)) for rank in came]

    def stop(process, mark, first):
        first.wait_for(mark)
        process.child.send_signal(signal.SIGSTOP)

    with ExitStack() as stack:
        one, two = group(stack, 2, [0, 1]), group(stack, 2, [0, 1])
        stop(one[1], "Se mide all_reduce", one[0])
        stop(two[0], "Se mide el cálculo", two[0])
        absent, started = group(stack, 3, [0, 2]), time.monotonic()
        results = [process.finish(60) for process in (one[0], two[1], *absent)]
        assert time.monotonic() - started < 40
    assert [code for code, _ in results] == [3, 3, 3, 3] and "Traceback" not in str(results), results

    def problem(output):
        (line,) = [line for line in output.splitlines() if line.startswith("- ")]
        return line

    assert problem(results[0][1]).startswith("- rango 1 (") and "sin respuesta en" in problem(results[0][1])
    assert "el rango 0 (" in results[1][1] and "dejó de contestar" in results[1][1]
    assert problem(results[2][1]).startswith("- rango 1: sin noticias en 3 s") and "rangos 0, 2 (" in results[2][1]
