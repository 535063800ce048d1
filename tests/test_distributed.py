"""Real groups of processes: agreement, fall-back, failures that name their reason."""

import errno
import json
import os
import re
import signal
import socket
import threading
import time
from contextlib import ExitStack
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as c10d

from aura import backend, distributed, files, rendezvous, session, share
from aura.dataset import Dataset
from aura.errors import TrainingFault, UserError
from tests.support import ROOT, Process, free_port, ranks, run, run_ranks

DOCTOR = ROOT / "test_ddp.py"

PROGRAM = """
import json, os, sys, torch
from types import SimpleNamespace
from aura import cli, distributed
from aura.errors import UserError

def main():
    args = SimpleNamespace(backend="gloo", dist_timeout=20.0, distributed=True)
    with distributed.session(args) as dist:
        {body}
    assert not torch.distributed.is_initialized()
    return 0

cli.run(main)
"""


def program(tmp_path, body):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.replace("{body}", body.replace("\n", "\n        ")))
    return path


def test_by_hand_two_processes_add_up(tmp_path):
    for rank, (code, output) in enumerate(run_ranks([DOCTOR, "--backend", "auto"], [tmp_path] * 2)):
        assert code == 0, output
        assert f"rank={rank} local_rank={rank} world_size=2 backend=gloo" in output
        assert "suma=1" in output and "fallback" not in output


@pytest.mark.parametrize("late", [False, True], ids=["together", "rank 0 joins last"])
def test_processes_started_with_different_options_say_so_and_end(tmp_path, late):
    """As happens when they are typed on two machines: nothing is trained, and neither waits for the other."""
    path = program(tmp_path, "print('entra')")
    rank = 'int(os.environ["RANK"])'
    if late:  # and has seen all that is wrong before rank 1 looks again
        path.write_text(path.read_text().replace("def main():", f"""import time
join = distributed.rendezvous.join
if {rank}:
    distributed.rendezvous.POLL_SECONDS = 3
else:
    distributed.rendezvous.join = lambda *words: time.sleep(1) or join(*words)

def main():"""))
    path.write_text(path.read_text().replace("distributed=True", f"distributed=True, seed=7, log_dir=str({rank}), "
                                                                 f"sync_every=56 + {rank}, lr=[1e-3, 2e-3][{rank}], "
                                                                 f"init_from=[None, 'a.pth'][{rank}], "
                                                                 f"resume=['otro.pt', 'none'][{rank}]"))
    for code, output in run_ranks([path], [tmp_path] * 2):
        assert code == 2 and "Traceback" not in output and "entra" not in output
        assert ("--init-from es nada en el rango 0 y algo en el rango 1; --lr es 0.001 en el rango 0 y 0.002 en el "
                "rango 1; --resume es distinto de none en el rango 0 y none en el rango 1; --sync-every es 56 en el "
                "rango 0 y 57 en") in output
        assert output.count("lance todos los procesos con las mismas opciones") == 1 and "log-dir" not in output


def test_another_code_on_one_machine_is_told(tmp_path):
    path = program(tmp_path, "pass")
    path.write_text(path.read_text().replace("def main():", """
distributed.rendezvous.sources.fingerprint = lambda: {"0": "a", "1": "b", "2": "a"}[os.environ["RANK"]]
def main():"""))
    (code, output), *others = run_ranks([path], [tmp_path] * 3)
    assert code == 0 and output.count(f"Aviso: el código del rango 0 no es el de {socket.gethostname()}: ") == 1
    assert all(code == 0 and "Aviso" not in output for code, output in others)


def test_an_older_program_on_another_machine_is_named():
    with pytest.raises(UserError, match="el rango 1 ejecuta otro programa u otra versión de este"):
        rendezvous.require_same({0: {"host": "uno", "arguments": {}}, 1: {"host": "dos"}})


def test_nccl_that_is_not_there_falls_back_together(tmp_path):
    outputs = run_ranks([DOCTOR, "--backend", "nccl"], [tmp_path] * 2)
    assert all(code == 0 and "backend=gloo" in output for code, output in outputs)
    assert re.search("fallback=gloo: .*(NCCL|GPU)", outputs[0][1]), outputs  # torch may have it where no card is


def test_torchrun(tmp_path):
    code, output = run(["-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}", DOCTOR],
                       tmp_path)
    assert code == 0 and output.count("all_reduce correcto") == 2 and "según torchrun" in output


@pytest.mark.parametrize("wrong", ["an argument", "a file"])
def test_torchrun_does_not_end_who_has_yet_to_say_what_is_wrong(tmp_path, wrong):
    path = program(tmp_path, """
def fail():
    raise UserError("x.txt está vacío")
dist.run_on_main(fail)
""")
    text = path.read_text().replace("def main():", """import time
last_words = cli._last_words
cli._last_words = lambda text: time.sleep(1.5) or last_words(text)

def main():""")
    if wrong == "an argument":
        text = text.replace("    args = ", "    cli.Parser().parse_args(['--no'])\n    args = ")
    path.write_text(text)
    command = ["-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}", path]
    code, output = run(command, tmp_path)
    assert code == 1 and len(re.findall("^error: ", output, re.MULTILINE)) == 1, output


def test_torchrun_killed_its_processes_stop_in_order(tmp_path):
    body = """
import time
from pathlib import Path
from aura.signals import orderly_stop
with orderly_stop() as request:
    print("listo")
    end = time.monotonic() + 20
    while not request.number and time.monotonic() < end:
        time.sleep(0.05)
    dist.wait_for_main()  # torchrun's store is gone
Path(f"oyó.{dist.rank}").write_text(str(request.number))"""
    command = ["-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    with Process([*command, program(tmp_path, body)], tmp_path) as process:
        for _ in range(2):
            process.wait_for("listo")
        os.kill(process.child.pid, signal.SIGKILL)
        process.finish()  # when none of them has its output open any more
    assert [int((tmp_path / f"oyó.{rank}").read_text()) for rank in range(2)] == [signal.SIGTERM] * 2


def test_no_save_is_promised_once_a_rank_is_lost():
    """torchrun's SIGTERM comes then, too. Each machine has a console of its own."""
    said = {(local_rank, broken): distributed.Session(local_rank=local_rank, broken=broken).tells_of_signals()
            for local_rank in (0, 1) for broken in (False, True)}
    assert [place for place, tells in said.items() if tells] == [(0, False)]


def test_gradients_travel_by_rows_where_all_ranks_have_cpus():
    """Or the ranks would exchange different things."""
    module = SimpleNamespace(row_gradients=lambda: ["tabla"])
    for devices, rows in ((["cpu", "cpu"], ["tabla"]), (["cpu", "cuda"], []), ([], ["tabla"])):
        assert distributed.Session(devices=devices).by_rows(module) == rows


def test_slurm_variables(tmp_path):
    variables = {"SLURM_NTASKS": 1, "SLURM_PROCID": 0}
    code, output = run([DOCTOR], tmp_path, **variables)
    assert code == 0 and "un solo proceso" in output


def test_a_missing_rank_is_named_in_time(tmp_path):
    started = time.monotonic()
    code, output = run([DOCTOR, "--timeout", "2"], tmp_path, RANK=0, WORLD_SIZE=3, MASTER_ADDR="127.0.0.1",
                       MASTER_PORT=free_port())
    assert code == 2 and "faltan los rangos 1, 2 de 3" in output and output.count("\n") == 1
    assert time.monotonic() - started < 40


def test_an_order_that_is_typed_twice_is_refused_and_harms_nobody(tmp_path):
    path = program(tmp_path, "while dist.sum([not os.path.exists('ya')])[0]:\n    pass\nassert not dist.failure()")
    path.write_text(path.read_text().replace("dist_timeout=20.0", "dist_timeout=200.0"))  # which nobody waits for
    port = free_port()

    def start(rank):
        return stack.enter_context(Process([path], tmp_path, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=3,
                                           MASTER_ADDR="127.0.0.1", MASTER_PORT=port))

    with ExitStack() as stack:
        first, *twice = [start(rank) for rank in (0, 1, 1)]
        for code, output in [process.finish(100) for process in twice]:
            assert code == 2 and "(127.0.0.1), dice que es el rango 1, como este: " in output, output
        group = [first, start(1), start(2)]
        first.wait_for("world_size=3")
        for rank in (0, 1, 2):
            code, output = start(rank).finish(100)
            assert code == 2 and ("en uso" if rank == 0 else "completo y en marcha sin este, el rango") in output
        (tmp_path / "ya").touch()
        assert [process.finish(100)[0] for process in group] == [0] * 3


def test_a_machine_that_comes_back_after_the_others_began_again_starts_once_more(tmp_path):
    """torchrun's store outlives an attempt, and a machine whose torchrun is new is at its first. Code 3 is what a
    launcher starts again, as the next attempt, in which the others are."""
    port = free_port()
    store = c10d.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    store.set("aura/0/complete", "2")
    group = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": 0,
             "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "x"}
    with Process([DOCTOR], tmp_path, RANK=0, TORCHELASTIC_RESTART_COUNT=1, **group):
        store.wait(["aura/1/joined/0"], timedelta(seconds=60))
        code, output = run([DOCTOR], tmp_path, RANK=1, TORCHELASTIC_RESTART_COUNT=0, **group)
    assert code == 3 and "han vuelto a empezar sin esta: con --max-restarts, vuelve a arrancar" in output, output


@pytest.mark.parametrize("address, hint", [("127.0.0.1", "en ese puerto no escucha nadie"),
                                           ("no.invalid", "'no.invalid' no se resuelve en")])
def test_an_unreachable_master_is_named_in_time(tmp_path, address, hint):
    port = free_port()
    code, output = run([DOCTOR, "--timeout", "2"], tmp_path, RANK=1, WORLD_SIZE=2, MASTER_ADDR=address,
                       MASTER_PORT=port)
    assert code == 2 and f"{address}:{port} en 2 s: {hint}" in output and output.count("\n") == 1


def test_a_busy_port_is_named(tmp_path):
    with ranks([DOCTOR, "--timeout", "20"], [tmp_path] * 2) as (first, second):
        first.wait_for("rank=0")
    import socket
    with socket.socket() as busy:
        busy.bind(("0.0.0.0", 0))
        busy.listen()
        port = busy.getsockname()[1]
        code, output = run([DOCTOR, "--timeout", "3"], tmp_path, RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1",
                           MASTER_PORT=port)
    assert code == 2 and f"el puerto {port} ya está en uso" in output


def test_a_wrong_sum_is_found(monkeypatch):
    monkeypatch.setattr(backend.c10d, "all_reduce", lambda tensor, group=None: tensor.add_(1))
    with pytest.raises(RuntimeError, match="all_reduce ha dado"):
        backend.check_all_reduce(0, 1, backend.torch.device("cpu"))


@pytest.mark.parametrize("version, problem, shown, told", [
    (None, None, None, "es el que solo sabe usar el procesador; desinstálelo"),
    ("13.0", RuntimeError("The NVIDIA driver on your system is too old (found version 12040). Please\n"), None,
     "(dice «The NVIDIA driver on your system is too old (found version 12040)»): trae CUDA 13.0, y nvidia-smi"),
    ("13.0", RuntimeError("No CUDA GPUs are available"), "9", "(dice «No CUDA GPUs are available»)"),
    ("13.0", RuntimeError("No CUDA GPUs are available"), "GPU-x", "(dice «No CUDA GPUs are available»)"),
    ("13.0", None, "", None), (None, None, "-1", None)])
def test_why_a_card_goes_unused(monkeypatch, version, problem, shown, told):
    def init():
        if problem:
            raise problem

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(backend.gpus, "present", lambda: True)
    why = backend.unused_card(torch.device("cpu"))
    assert told in why and why.startswith("hay una tarjeta de NVIDIA") if told else why is None
    assert backend.unused_card(torch.device("cuda")) is None
    monkeypatch.setattr(backend.gpus, "present", lambda: False)
    assert backend.unused_card(torch.device("cpu")) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card, and it is used")
def test_a_card_that_goes_unused_is_told_once_a_machine_and_not_when_it_is_hidden(tmp_path, monkeypatch):
    seen = "from aura import gpus; gpus.SIGNS = ('/',)\nimport runpy, sys\nsys.argv = [sys.argv[1]]\n"
    command = ["-c", f"{seen}runpy.run_path(sys.argv[0], run_name='__main__')", DOCTOR]
    warning = "Aviso: se usa el procesador; hay una tarjeta de NVIDIA y torch"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (code, first), (_, second) = run_ranks(command, [tmp_path] * 2)
    assert code == 0 and f"[rango 0] {warning}" in first and "Aviso" not in second, first + second
    code, alone = run(command, tmp_path)
    assert code == 0 and alone.startswith(f"[rango 0] {warning}"), alone
    assert "Aviso" not in run(command, tmp_path, CUDA_VISIBLE_DEVICES="")[1]


def test_one_process_tells_of_a_card_that_goes_unused_too(monkeypatch, capsys):
    monkeypatch.setattr(backend, "unused_card", lambda device: "hay una tarjeta")
    with distributed.session(SimpleNamespace(dist_timeout=1.0)):
        assert capsys.readouterr().out == "Aviso: se usa el procesador; hay una tarjeta.\n"


@pytest.mark.parametrize("said, capability, told", [
    ("CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors might", (7, 0),
     "no trae código para V100, de capacidad 7.0: instale el de CUDA 12.6"),
    ("CUDA error: no kernel image is available", (12, 0), "de capacidad 12.0: instale el de un CUDA más nuevo"),
    ("CUDA error: out of memory", (8, 0), r"no calcula nada \(torch dice «CUDA error: out of memory»\).*nvidia-smi"),
    ("CUDA error: all CUDA-capable devices are busy", (8, 0), "are busy»")])
def test_a_card_that_computes_nothing_is_refused_at_once(monkeypatch, said, capability, told):
    def ones(*size, device):
        raise RuntimeError(said)

    monkeypatch.setattr(backend, "local_device", lambda rank: torch.device("cuda", rank))
    monkeypatch.setattr(torch, "ones", ones)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "V100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(UserError, match=told):
        backend.take_device(0, print)


def test_builds_without_libuv_set_the_variable_before_the_rendezvous(monkeypatch):
    def no_libuv(*args, use_libuv=True, **options):
        raise RuntimeError("use_libuv was requested but PyTorch was built without libuv support")

    monkeypatch.delenv("USE_LIBUV", raising=False)
    monkeypatch.setattr(backend.c10d, "TCPStore", no_libuv)
    backend.choose_libuv()
    assert os.environ.pop("USE_LIBUV") == "0"


def test_objects_tensors_and_work_on_main(tmp_path):
    path = program(tmp_path, """
tree = {"a": [torch.arange(5), {"b": torch.ones(2, 0)}], "n": None, "t": (1, "ñ"), "h": torch.ones(3).bfloat16()}
got = dist.broadcast_tree(tree if dist.main else None)
assert torch.equal(got["a"][0], tree["a"][0]) and got["a"][1]["b"].shape == (2, 0) and got["t"] == (1, "ñ")
assert torch.equal(got["h"], tree["h"]) and got["n"] is None
assert dist.run_on_main(lambda: {"rank": dist.rank}) == {"rank": 0}
assert dist.sum([dist.rank, 1]) == [3.0, 3.0]
assert dist.gather_objects(dist.rank) == [0, 1, 2]
assert dist.devices == [dist.device.type] * 3
module = torch.nn.BatchNorm1d(2)
for tensor in module.state_dict().values():
    tensor.fill_(dist.rank)
dist.broadcast_weights(module)
assert not any(tensor.any() for tensor in module.state_dict().values()), "buffers too"
dist.print_each("bien")
""")
    for code, output in run_ranks([path], [tmp_path] * 3):
        assert code == 0 and "bien" in output, output


def test_all_ranks_leave_an_evaluation_at_the_same_batch(tmp_path):
    path = program(tmp_path, """
from aura import sharding
from aura.signals import Abandoned
request, seen = SimpleNamespace(number=0), []
assert list(sharding.in_step(range(9 - dist.rank), dist, request)) == list(range(9 - dist.rank))
try:
    for batch in sharding.in_step(range(90 + dist.rank), dist, request):
        seen.append(batch)
        request.number = 15 * (dist.rank == 1 and batch > 4)
except Abandoned:
    dist.print_each(f"hasta {seen[-1]}")
""")
    for rank, (code, output) in enumerate(run_ranks([path], [tmp_path] * 2)):
        assert code == 0 and f"[rango {rank}] hasta 7" in output, output


def test_memory_that_is_short_before_or_after_the_steps_is_one_line_too(tmp_path):
    path, alone = program(tmp_path, "dist.rank or torch.empty(2**60)\ndist.barrier()"), tmp_path / "alone.py"
    alone.write_text(path.read_text().replace("distributed=True", "distributed=False"))
    for code, output in [run([alone], tmp_path), *run_ranks([path], [tmp_path] * 2)]:
        assert code == 3 and "Traceback" not in output, output
        assert output.splitlines()[-1].startswith("error: ") and "no basta la memoria de la máquina" in output, output


def test_a_thread_that_cannot_be_started_is_one_line_too(tmp_path):
    path = program(tmp_path, """
import threading
threading.stack_size(1 << 50)
threading.Thread(target=print).start()
""")
    path.write_text(path.read_text().replace("distributed=True", "distributed=False"))
    code, output = run([path], tmp_path)
    assert code == 3 and output.startswith("error: el sistema no da más hilos") and output.count("\n") == 1, output


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind, code", [("UserError", 2), ("TrainingFault", 3)])
def test_a_failure_on_rank_0_is_told_to_all(tmp_path, kind, code, late):
    """Also to who had other work meanwhile, and comes when rank 0 and its store are gone."""
    path = program(tmp_path, f"""
from aura import processes
from aura.errors import TrainingFault
def work():
    raise {kind}("el fichero «x» está roto")
assert not ({late} and dist.rank) or processes.has_ended(dist.first, 60)
dist.run_on_main(lambda: None)
{late} or dist.barrier()  # so that the work that fails is what the others wait for
dist.run_on_main(work)
""")
    outputs = run_ranks([path], [tmp_path] * 2)
    assert [each for each, _ in outputs] == [code] * 2
    assert all("el fichero «x» está roto" in output for _, output in outputs)


@pytest.mark.parametrize("resume, code", [("cortado.pt", 2), ("auto", 0)])
def test_a_checkpoint_that_rank_0_cannot_use_is_as_bad_an_argument_on_all_ranks(tmp_path, resume, code):
    (tmp_path / "cortado.pt").write_bytes(b"PK")
    path = program(tmp_path, f"""
import time
from aura import checkpointer, session
whole, session.FAREWELL_SECONDS = checkpointer.choose, 1
distributed.FAREWELL_SECONDS = 1
def slow(*words):  # a large one takes longer to read than anybody waits for a machine
    time.sleep(3)
    return whole(*words)
checkpointer.choose = slow
print(checkpointer.Checkpointer(".", dist).load("{resume}"))
""")
    path.write_text(path.read_text().replace("def main():", """
start = distributed._start_group
def hasty(dist, *words):  # only once they have met
    dist.timeout = 2.0
    start(dist, *words)
distributed._start_group = hasty

def main():"""))
    outputs = run_ranks([path], [tmp_path] * 2)
    assert [each for each, _ in outputs] == [code] * 2, "\n".join(output for _, output in outputs)
    assert all(("'cortado.pt'" if code else "None") in output for _, output in outputs), outputs


def test_an_error_of_the_system_reaches_the_others_in_words(tmp_path):
    path = program(tmp_path, """
if dist.rank:
    open("falta.txt")
dist.barrier()
""")
    (first, output), (second, own) = run_ranks([path], [tmp_path] * 2)
    assert (first, second) == (3, 1) and "FileNotFoundError" in own, own
    assert "otro proceso se ha detenido: rango 1: 'falta.txt': no existe" in output, output
    path = program(tmp_path, """
dist.run_on_main(lambda: open("falta.txt"))
""")
    assert "el rango 0 se ha detenido: 'falta.txt': no existe" in run_ranks([path], [tmp_path] * 2)[1][1]


def test_the_reason_of_a_rank_that_leaves_reaches_the_others(tmp_path):
    path = program(tmp_path, """
if dist.rank == 1:
    raise UserError("mi disco está lleno")
dist.barrier()
""")
    outputs = run_ranks([path], [tmp_path] * 3)
    assert [code for code, _ in outputs] == [3, 2, 3]
    assert all("rango 1: mi disco está lleno" in outputs[rank][1] for rank in (0, 2))


def test_who_is_left_when_a_rank_has_said_why_it_failed():
    class Store(dict):
        def compare_set(self, key, expected, value):
            assert expected == ""
            self.setdefault(key, value.encode())

        def check(self, keys):
            return set(keys) <= self.keys()

    problem = TrainingFault("mi disco está lleno; último punto de control: a.pt")
    problem.reason = "mi disco está lleno"
    store = Store()
    for rank in (0, 2):
        distributed.Session(rank=rank, world_size=3, store=store).post_failure(problem)
    dist = distributed.Session(rank=1, world_size=3, store=store)
    assert str(dist.peer_lost(RuntimeError())) == "otro proceso se ha detenido: rango 0: mi disco está lleno"
    assert dist.gather_objects("uno") == [None, "uno", None]


def test_of_a_failure_in_many_lines_the_others_are_told_one():
    fault = TrainingFault("no cabe; último punto de control: c/ckpt.pt")
    fault.reason = "no cabe " * 50
    assert session._reason(fault) == fault.reason
    told = session._reason(RuntimeError("CppCompileError:\n\n" + "  aviso\n" * 1000))
    assert told.startswith("CppCompileError: aviso aviso") and len(told) == 300


def test_ctrl_c_on_rank_0_is_nobodys_bad_argument():
    store = c10d.HashStore()
    first, other = (distributed.Session(rank=rank, world_size=2, store=store) for rank in range(2))

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.run_on_main(interrupted)
    with pytest.raises(TrainingFault, match="el rango 0 se ha detenido: lo interrumpió Ctrl.C"):
        other.run_on_main(None)


def test_an_order_typed_twice_is_refused_even_when_all_have_met():
    """Though those who have met no longer look, and the group is not complete yet."""
    store = c10d.HashStore()
    store.set("joined/0", "{}")
    place, dist = SimpleNamespace(rank=1, world_size=2, master_addr="127.0.0.1", master_port=1), SimpleNamespace(
        store=store, timeout=5.0, print=print)
    assert set(rendezvous.join(place, dist, SimpleNamespace())) == {0, 1}
    with pytest.raises(rendezvous.RankTaken, match="dice que es el rango 1, como este"):
        rendezvous.join(place, dist, SimpleNamespace())


@pytest.mark.parametrize("gone, how", [(0, "fails"), (1, "fails"), (0, "is killed")])
def test_who_leaves_while_the_group_connects_is_no_firewall(tmp_path, gone, how):
    path = program(tmp_path, "dist.barrier()")
    leaves = {"fails": "os.environ['GLOO_SOCKET_IFNAME'] = 'nohay0'",
              "is killed": "distributed._settle = lambda *_: os.kill(os.getpid(), 9)"}[how]
    path.write_text(path.read_text().replace("def main():", f"""if int(os.environ["RANK"]) == {gone}:
    {leaves}

def main():"""))
    outputs = run_ranks([path], [tmp_path] * 2)
    (first, _), (code, output) = outputs[gone], outputs[1 - gone]
    assert (first, code) == {"fails": (2, 2), "is killed": (-9, 3)}[how] and "cortafuegos" not in output, output
    assert {"fails": "'nohay0' no es ninguna interfaz", "is killed": "no contesta el rango 0"}[how] in output, output


def test_who_neither_sends_data_nor_lacks_them_waits_without_a_time_limit(tmp_path, monkeypatch):
    """It is the last of three ranks, of which the second lacks them."""
    meta, done = {"name": "libro", "sha256": "1", "splits": {}}, []
    monkeypatch.setattr(c10d, "new_group", lambda ranks, use_local_synchronization=False, **_: (
        done.append(ranks) if use_local_synchronization else done.append("splits NCCL's communicator")))
    monkeypatch.setattr(share, "_has_intact", lambda *_: True)
    monkeypatch.setattr(share, "read", lambda folder: Dataset(folder, meta))
    dist = SimpleNamespace(main=False, rank=2, timeout=9.0, print=lambda *_: None,
                           broadcast_tree=lambda _: (meta, "libro"),
                           gather_objects=lambda mine: [(True, "a"), (False, "b"), mine],
                           run_on_main=lambda work: done.append("main"), barrier=lambda: done.append("barrier"))
    assert share.share_out(dist, None, tmp_path).meta == meta and done == [[0, 1], "main", "barrier"]


def test_data_that_a_training_reads_here_are_not_replaced_by_rank_0s(tmp_path):
    (tmp_path / "libro").mkdir()
    held = files.lock(tmp_path / "libro", shared=True)
    dist = SimpleNamespace(main=False, rank=1, broadcast_tree=lambda _: ({"sha256": "1"}, "libro"))
    with pytest.raises(UserError, match="está entrenando con los datos de '.*/libro', que se .* otra --data-dir"):
        share.share_out(dist, None, tmp_path)
    os.close(held)


def test_who_has_no_room_for_the_data_is_told_the_way_out(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(share, "building", full)
    with pytest.raises(UserError, match="rango 1. '.*no queda espacio.*; haga sitio, o indique otra .* --data-dir$"):
        share._transfer(SimpleNamespace(main=False, rank=1), {}, None, tmp_path / "libro", None)


def test_copies_of_one_virtual_machine_are_two_machines(tmp_path, monkeypatch):
    """They have one name, and the same numbers on their disks."""
    assert share.boot()
    monkeypatch.setattr(share, "boot", lambda: "another")
    there = share._place(tmp_path)
    monkeypatch.undo()
    assert there != share._place(tmp_path) == share._place(tmp_path)


@pytest.mark.parametrize(("gone", "savers"), [
    ([1], [0]), ([2, 3], [0]), ([0], [1, 2]), ([0, 1], [2]), ([0, 2], [1, 3])])
def test_who_saves_when_others_are_lost(gone, savers):
    ranks = [distributed.Session(rank=rank, world_size=4, machines=["a", "a", "b", "b"], silent=gone[:1],
                                 failed=gone[1:]) for rank in range(4) if rank not in gone]
    assert [dist.rank for dist in ranks if dist.rank == dist.saver] == savers


def test_a_first_rank_has_left_when_it_said_so_or_is_gone_and_a_silent_one_has_a_moment_to_go(monkeypatch):
    asked = []
    monkeypatch.setattr(session, "has_ended", lambda first, seconds: asked.append(seconds))

    def left(**known):
        return distributed.Session(rank=1, world_size=3, **known).first_has_left

    assert not left(failed=[0]), "from another machine nobody knows"
    assert left(first=7, failed=[0]) and not asked
    assert not left(first=7, silent=[0]) and not left(first=7, failed=[2])
    assert asked == [session.ENDING_SECONDS, 0]


def test_a_killed_rank_is_named_by_the_others(tmp_path):
    path = program(tmp_path, """
dist.print_each("dentro")
if dist.rank == 1:
    import time
    time.sleep(100)
dist.barrier()
""")
    with ranks([path], [tmp_path] * 3) as processes:
        for process in processes:
            process.wait_for("dentro")
        os.killpg(processes[1].child.pid, signal.SIGKILL)
        results = [processes[rank].finish(60) for rank in (0, 2)]
    for code, output in results:
        assert code == 3 and "se ha perdido la comunicación" in output
        assert "no contesta el rango 1 " in output


@pytest.mark.parametrize("waits", ["dist.run_on_main(lambda: 1)", "dist.barrier()"])
def test_who_waits_for_the_first_rank_is_told_why_it_left(tmp_path, waits):
    """And not told that the network is down, though the store goes with that rank."""
    path = program(tmp_path, f"""
if dist.main:
    raise UserError("la carpeta está ocupada")
{waits}
""")
    (first, _), (second, output) = run_ranks([path], [tmp_path] * 2)
    assert (first, second) == (2, 3) and "otro proceso se ha detenido: rango 0: la carpeta está ocupada" in output


@pytest.mark.parametrize(("busy", "killed", "named"), [
    ({1, 2}, True, "no contesta el rango 1 "), ({2}, False, "no ha llegado a este punto el rango 2 ")])
def test_a_rank_at_work_is_not_taken_for_the_one_that_is_gone(tmp_path, busy, killed, named):
    """Rank 2 computes for longer than anybody waits for an answer; where no rank is gone, it is named as waited for."""
    path = program(tmp_path, f"""
import time
dist.print_each("dentro")
if dist.rank in {busy}:
    time.sleep(60)
dist.barrier()
""")
    path.write_text(path.read_text().replace("dist_timeout=20.0", "dist_timeout=10.0"))
    with ranks([path], [tmp_path] * 3) as processes:
        for process in processes:
            process.wait_for("dentro")
        if killed:
            os.killpg(processes[1].child.pid, signal.SIGKILL)
        code, output = processes[0].finish(60)
    assert code == 3 and named in output, output


def test_who_comes_when_the_others_have_gone_for_a_lost_rank_names_that_one(tmp_path):
    """And not rank 0, whose store has gone with it."""
    path = program(tmp_path, """
from aura import processes
dist.barrier()
if dist.rank == 1:
    os.kill(os.getpid(), 9)
assert dist.rank != 2 or processes.has_ended(dist.first, 60)
dist.barrier()
""")
    for rank, (code, output) in enumerate(run_ranks([path], [tmp_path] * 3)):
        assert code == (-9 if rank == 1 else 3), output
        assert rank == 1 or "no contesta el rango 1 " in output, output


def test_a_first_rank_that_is_killed_while_it_prepares_is_told_in_one_line(tmp_path):
    path = program(tmp_path, """
import time
dist.print_each("dentro")
dist.run_on_main(lambda: time.sleep(100))
""")
    with ranks([path], [tmp_path] * 2) as (first, second):
        first.wait_for("[rango 0] dentro")
        second.wait_for("[rango 1] dentro")
        os.killpg(first.child.pid, signal.SIGKILL)
        code, _ = second.finish(60)
    said = second.lines[next(n for n, line in enumerate(second.lines) if "dentro" in line) + 1:]
    assert code == 3 and len(said) == 1 and "no contesta el rango 0" in said[0], said


def test_a_first_rank_that_is_killed_is_told_though_torchrun_keeps_the_store(tmp_path):
    """torchrun sends the others SIGTERM, which they take for a request to stop in order, and SIGKILL 30 s later."""
    body = """
from aura.signals import orderly_stop
with orderly_stop():
    dist.run_on_main(lambda: os.kill(os.getpid(), 9))"""
    command = ["-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    code, output = run([*command, program(tmp_path, body)], tmp_path)
    assert code == 1 and "error: otro proceso se ha detenido: rango 0: ha muerto sin decir por qué" in output, output


def test_gradients_add_up_in_the_same_order_from_the_first_step(tmp_path):
    """With three ranks or more the rounding depends on the order: if that changed, no run would resume bit for bit."""
    body = """import copy

def gradients(model, step):
    model.zero_grad()
    torch.manual_seed(10 * step + dist.rank)
    model(torch.randn(16, 37)).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]

module = torch.nn.Sequential(*(torch.nn.Linear(37, 37) for _ in range(4)))
going, resumed = dist.wrap(copy.deepcopy(module)), dist.wrap(module)
gradients(going, 0)
print("iguales:", all(map(torch.equal, gradients(going, 1), gradients(resumed, 1))))"""
    for code, output in run_ranks([program(tmp_path, body)], [tmp_path] * 3):
        assert code == 0 and "iguales: True" in output, output


@pytest.mark.skipif(torch.__version__ < (2, 11), reason="gloo's threads have no name")
def test_no_thread_of_the_group_outlives_a_run(tmp_path):
    names = """import atexit, pathlib
def name_threads():
    comms = [(task / "comm").read_text().strip() for task in pathlib.Path("/proc/self/task").iterdir()]
    print("vivos:", [name for name in comms if "gloo" in name])
atexit.register(name_threads)
model = dist.wrap(torch.nn.Linear(3, 3))
model(torch.ones(2, 3)).sum().backward()
model.cycle = [model]
name_threads()"""
    for code, output in run_ranks([program(tmp_path, names)], [tmp_path] * 2, fresh=True):
        during, after = [line for line in output.splitlines() if line.startswith("vivos:")]
        assert code == 0 and "gloo" in during and after == "vivos: []", output


def test_a_model_that_outlives_its_group_is_freed(tmp_path):
    """A thread of gloo's may still need the GIL for what it sent, and whoever frees the group waits for that thread."""
    code, output = run(["-c", """import torch
from torch import distributed as c10d
from aura.session import Session

for _ in range(300):
    c10d.init_process_group("gloo", store=c10d.HashStore(), rank=0, world_size=1)
    model = Session(store="una tienda").wrap(torch.nn.Linear(3, 3))
    model(torch.ones(2, 3)).sum().backward()
    c10d.destroy_process_group()
    del model
"""], tmp_path, limit=60)
    # The gloo of torch 2.10 prints a line for each group.
    assert code == 0 and all(line.startswith("[Gloo]") for line in output.splitlines()), output


def test_a_failure_does_not_wait_for_a_collective_nobody_joins(tmp_path):
    path = program(tmp_path, """import time
if not dist.main:
    time.sleep(300)
pending = torch.distributed.all_reduce(torch.ones(3), async_op=True)
raise UserError("aquí se acaba")""")
    path.write_text(path.read_text().replace("dist_timeout=20.0", "dist_timeout=300.0"))
    with ranks([path], [tmp_path] * 2) as (first, _):
        code, output = first.finish(limit=60)
    assert code == 2 and "aquí se acaba" in output


def test_a_store_that_never_answers_is_not_waited_for():
    def fail():
        raise RuntimeError("rota")

    assert backend.within(5, lambda: 7) == 7
    with pytest.raises(RuntimeError, match="rota"):
        backend.within(5, fail)
    answered = threading.Event()
    with pytest.raises(TimeoutError):
        backend.within(0.05, lambda: answered.wait(60))
    answered.set()


def test_a_store_that_is_gone_writes_no_stack_trace_of_its_own(tmp_path):
    program = """import os
os.environ.pop("TORCH_CPP_LOG_LEVEL")
import aura.distributed
store = aura.distributed.c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
other = aura.distributed.c10d.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
del store
try:
    other.get("nada")
except RuntimeError:
    print("perdido")
"""
    assert run(["-c", program], tmp_path, fresh=True) == (0, "perdido\n")


def test_the_environment_is_restored(tmp_path):
    path = tmp_path / "env.py"
    path.write_text("""
import json, os
from types import SimpleNamespace
from aura import distributed
before = dict(os.environ)
for _ in range(2):  # and a second session in the same process works
    with distributed.session(SimpleNamespace(backend="gloo", dist_timeout=20.0, distributed=True)) as dist:
        assert dist.grouped and dist.sum([2]) == [2.0]
print(json.dumps([key for key in set(before) | set(os.environ) if before.get(key) != os.environ.get(key)]))
""")
    code, output = run([path], tmp_path)
    assert code == 0 and json.loads(output.splitlines()[-1]) == []


def test_rank_0_that_stands_still_while_groups_connect_is_named(tmp_path):
    """Its process has the store, which then answers to nothing any more."""
    path = program(tmp_path, """import signal
from aura import averaging
from aura.diloco import DiLoCo
if dist.main:
    averaging.connect = lambda seconds: os.kill(os.getpid(), signal.SIGSTOP)
dist.timeout = 1.0
DiLoCo(dist, torch.nn.Linear(2, 2), 8)""")
    with ranks([path], [tmp_path] * 2) as processes:
        code, output = processes[1].finish()
    assert code == 3 and output.count("error: se ha perdido la comunicación con otro proceso") == 1
    assert "no contesta el rango 0" in output and "Traceback" not in output and "terminate" not in output, output
