"""launch_distributed.py: the command it composes, what it refuses, real launches, and every way they can end."""

import contextlib
import errno
import io
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as c10d

import launch_distributed
from aura import backend, launch, signals
from aura.errors import UserError
from tests.support import ROOT, Process, assert_same_weights, free_port, run, run_ranks

LAUNCHER = ROOT / "launch_distributed.py"
TRAINING = ["--preset", "demo", "--n-layer", "1", "--n-embd", "32", "--n-head", "2", "--seq-len", "32",
            "--vocab-size", "400", "--sample-length", "0", "--log-interval", "1", "--eval-windows", "20"]


PLAIN = {"AURA_EXTENSION": "off"}  # a build of the kernels, here or beside us, would upset what is timed


def command(script, *rest, processes=2, options=()):
    return [LAUNCHER, "--script", script, "--cpu", processes, "--master-port", free_port(), *options, "--", *rest]


@contextlib.contextmanager
def launched(folder, *words, **options):
    """A launch whose processes are all found again by their environment, and killed in the end."""
    token = f"LAUNCH_TEST={folder}"
    try:
        with Process(command(*words, **options), folder, fresh=True, LAUNCH_TEST=folder, **PLAIN) as process:
            yield process
    finally:
        for pid in alive(token):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def alive(token, script=""):
    """Pids of the processes with `token` in their environment that run `script`, not counting zombies."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if words != [b""] and token.encode() in (folder / "environ").read_bytes().split(b"\0") and (
                    not script or words[2:3] == [str(script).encode()]):
                found.append(int(folder.name))
    return found


def nobody_left(folder, limit=40):  # less than what runs would take to end by itself
    deadline = time.monotonic() + limit
    while left := alive(f"LAUNCH_TEST={folder}"):
        assert time.monotonic() < deadline, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]
        time.sleep(0.1)
    return True


def rank_pid(folder, script, rank):
    """The pid of the process that runs `script` as `rank`."""
    (pid,) = [pid for pid in alive(f"LAUNCH_TEST={folder}", script)
              if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
    return pid


def script(folder, body):
    """A script for the ranks. The launcher's -u makes print() two writes, which mix with those of the other rank."""
    path = folder / "work.py"
    path.write_text("import os, signal, sys, time\nsys.stdout.reconfigure(write_through=False, line_buffering=True)\n"
                    f"rank = int(os.environ['RANK'])\n{body}\n")
    return path


# --- the command and what is refused ---------------------------------------------------------------------------------
@pytest.fixture
def main(monkeypatch, tmp_path, capsys):
    """Call the launcher in this process, on a machine with two GPUs; returns what it prints."""
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "NCCL_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch_distributed, "gpus_present", lambda: (2, ""))
    monkeypatch.setattr(launch_distributed.placement, "DEFAULT_PORT", free_port())  # somebody may be using the real one
    (tmp_path / "hola mundo.py").write_text("")

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["launch_distributed.py", *map(str, words)])
        assert launch_distributed.main() == 0
        return capsys.readouterr()

    return call


def test_what_torch_says_of_a_card_that_it_does_not_use_is_what_the_launcher_says(main, monkeypatch):
    monkeypatch.setattr(launch_distributed, "gpus_present", lambda: (0, "hay una tarjeta y torch no la usa"))
    with pytest.raises(UserError, match="--gpus 2: aquí hay una tarjeta y torch no la usa; o, para un ensayo sin GPU, "
                                        "--cpu 2$"):
        main("--script", "hola mundo.py", "--gpus", 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_the_launcher_asks_torch_itself(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert launch_distributed.gpus_present() == (0, backend.unused_card(torch.device("cpu")) or "")


def test_a_card_whose_driver_torch_is_too_new_for_is_none(monkeypatch, tmp_path):
    """The driver's own library counts it all the same."""
    (tmp_path / "sitecustomize.py").write_text("import torch\ntorch.cuda.device_count = lambda: 8\n"
                                               "torch.cuda.is_available = lambda: False\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert launch_distributed.gpus_present()[0] == 0


def test_dry_run_prints_the_whole_command(main):
    out = main("--dry-run", "--script", "hola mundo.py", "--nodes=3", "--node_rank", 2, "--master-addr", "10.0.0.1",
               "--master-port", free_port(), "--backend", "gloo", "--max-restarts", 4,
               "--", "--x", "a b", "--", "-y").out
    assert out.count("\n") == 1
    assert "CUDA_VISIBLE_DEVICES=0,1 " in out and "OMP_NUM_THREADS=" in out
    for word in ("-m torch.distributed.run", "--nnodes=3", "--node-rank=2", "--nproc-per-node=2", "--max-restarts=4",
                 "--master-addr=10.0.0.1", "--as-rank 'hola mundo.py' --backend gloo --x 'a b' -- -y\n"):
        assert word in out
    assert not re.search("NCCL_(IB|P2P)_DISABLE", out)


@pytest.mark.parametrize("job", ["prueba-7", None])
def test_all_starts_of_a_job_are_one_launch(monkeypatch, job):
    names = []

    def refused(command, env, **_):
        names.append(env[signals.LISTENED])
        raise OSError

    monkeypatch.setattr(launch.subprocess, "Popen", refused)
    monkeypatch.setattr(launch.signal, "signal", lambda *_: None)
    if job:
        monkeypatch.setenv(signals.JOB, job)
    for _ in range(2):
        with pytest.raises(OSError):
            launch.Launch(1, 0, False, False).run(["torchrun"], {})
    assert names == [job] * 2 if job else names[0] != names[1]


def test_what_torchrun_is_given_it_accepts():
    parser = pytest.importorskip("torch.distributed.run").get_args_parser()
    args, rest = launch_distributed.parse(["--cpu", "2", "--", "--seed", "1"])
    words = launch_distributed.torchrun_command(args, "work.py", 2, rest)[3:]
    assert parser.parse_args(words).training_script_args == ["--as-rank", "work.py", "--seed", "1"]


@pytest.mark.parametrize("options, visible, cards", [
    (["--gpus", "1"], None, "0"), ([], "3,5", "3,5"), (["--gpus", "1"], "3,5", "3"), (["--cpu", "2"], "3,5", "''"),
])
def test_the_first_cards_of_those_visible(main, monkeypatch, options, visible, cards):
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert f"CUDA_VISIBLE_DEVICES={cards} " in main("--dry-run", "--script", "hola mundo.py", *options).out


def test_threads_of_the_user_stay_and_verbose_says_why(main, monkeypatch):
    words = ["--dry-run", "--verbose", "--script", "hola mundo.py", "--cpu", 1]
    cores = len(os.sched_getaffinity(0))
    assert f"OMP_NUM_THREADS={cores}: {cores} núcleos entre 1 proceso" in main(*words).out
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert "OMP_NUM_THREADS" not in main(*words).out


BAD = [
    (["--script", "hola mundos.py"], ["--script 'hola mundos.py'", "¿quiso decir hola mundo.py"]),
    (["--script", "."], ["--script '.': es una carpeta"]),
    (["--gpus", "8"], ["--gpus 8", "hay 2", "--gpus 2", "--cpu 2"]),
    (["--gpus"], ["falta el valor de --gpus"]),
    (["--gpus", "0"], ["--gpus: 0"]),
    (["--cpu", "muchas"], ["--cpu: 'muchas'"]),
    (["--gpus", "1", "--cpu", "1"], ["--gpus 1 y --cpu 1"]),
    (["--nodes", "2", "--node-rank", "2", "--master-addr", "10.0.0.1"], ["--node-rank 2", "--nodes 2"]),
    (["--nodes", "2", "--node-rank", "0"], ["--master-addr"]),
    (["--nodes", "2", "--master-addr", "10.0.0.1"], ["falta --node-rank"]),
    (["--nodes", "2", "--node-rank", "1", "--master-addr", "no.existe.invalid"], ["no.existe.invalid", "la IP"]),
    (["--nodes", "2", "--node-rank", "1", "--master-addr", "10.0..1"], ["10.0..1", "la IP"]),
    (["--master-addr", "10.0.0.1:29500"], ["'10.0.0.1:29500'", "--master-port"]),
    (["--nodes", "2", "--node-rank", "1", "--master-addr", "fd00::1"], ["'fd00::1'", "IPv4"]),
    (["--master-port", "70000"], ["--master-port: 70000"]),
    (["--backend", "ncl"], ["--backend: 'ncl'", "'nccl'"]),
    (["--max-steps", "3"], ["--max-steps", "detrás de --"]),
]


@pytest.mark.parametrize("options, pieces", BAD, ids=[" ".join(options) for options, _ in BAD])
def test_bad_input_is_one_line_with_the_way_out(main, options, pieces):
    with pytest.raises(UserError) as problem:
        main(*(["--script", "hola mundo.py"] if "--script" not in options else []), *options)
    assert "\n" not in str(problem.value) and all(piece in str(problem.value) for piece in pieces), str(problem.value)


def test_a_script_that_may_not_be_read_is_one_line(main, monkeypatch):
    with pytest.raises(UserError, match="^--script 'aaa.*': no se puede leer .el nombre es demasiado largo."):
        main("--script", "a" * 300, "--cpu", 1)  # as anyone but root gets in a folder that one may not enter
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UserError, match="^--script 'hola mundo.py': no se puede leer .permiso denegado.; compruebe"):
        main("--script", "hola mundo.py", "--cpu", 1)


def test_a_busy_port_is_named_and_a_free_one_offered(main):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        told = rf"--master-port {port}: .* ya está en uso .*está libre --master-port \d+"
        with pytest.raises(UserError, match=told) as problem:
            main("--script", "hola mundo.py", "--master-port", port)
        assert f"Aviso: {problem.value}".split("(")[0] in main("--dry-run", "--script", "hola mundo.py",
                                                               "--master-port", port).err


def test_an_address_of_another_machine_is_noticed_at_machine_0(main):
    words = ["--dry-run", "--script", "hola mundo.py", "--master-addr"]
    assert "Aviso: --master-addr 203.0.113.9 no es una dirección de esta máquina" in main(*words, "203.0.113.9").err
    for address in ("127.0.0.1", "localhost"):
        assert not main(*words, address).err
        assert f"Aviso: --master-addr {address} solo sirve para ensayar" in main(*words, address, "--nodes", 2,
                                                                                 "--node-rank", 0).err
        assert not main(*words, address, "--nodes", 2, "--node-rank", 1).err


def test_python_without_torch(main, monkeypatch):
    monkeypatch.setattr(launch_distributed.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="no tiene torch.*pip install"):
        main("--script", "hola mundo.py", "--cpu", 1)


def test_cards_that_are_not_there_as_a_user_meets_it(tmp_path):
    code, output = run([LAUNCHER, "--script", "test_ddp.py", "--gpus", "8"], tmp_path, CUDA_VISIBLE_DEVICES="")
    assert code == 2 and output.count("\n") == 1 and "--gpus 8" in output and "--cpu 2" in output


# --- launches --------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder of prepared data, so that each training begins at once."""
    from tests.support import corpus_text

    folder = tmp_path_factory.mktemp("data")
    (folder / "libro.txt").write_text(corpus_text(), encoding="utf-8")
    code, output = run([ROOT / "train_gpt2_spanish.py", *TRAINING, "--prepare", "--dataset-name", "libro.txt"], folder,
                       **PLAIN)
    assert code == 0, output
    return folder / "Data"


def training(data, steps, *options):
    return ["train_gpt2_spanish.py", *TRAINING, "--data-dir", data, "--max-steps", steps, *options]


def test_a_killed_worker_costs_no_data(tmp_path, data):
    """Nor does the next attempt begin anew, though the first was told to."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    words = training(data, 100, "--checkpoint-freq", 5)
    assert [code for code, _ in run_ranks([ROOT / words[0], *words[1:]], [whole] * 2, **PLAIN)] == [0, 0]
    shutil.copytree(whole / "checkpoints", cut / "checkpoints")
    with launched(cut, *words, "--resume", "none", options=["--max-restarts", 1]) as process:
        process.wait_for("se han movido")
        process.wait_for("paso 12/")
        os.kill(rank_pid(cut, ROOT / words[0], 1), signal.SIGKILL)
        code, output = process.finish()
    assert code == 0 and "SIGKILL" in output and "Se reanuda en el paso" in output
    when = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.search(rf"Aviso: rango 1.*; se reinicia el grupo \(1 de 1\), {when}\.\n", output), output
    assert output.count("se han movido") == 1, output
    assert output.count("Todos los procesos completaron el entrenamiento") == 2, output
    assert_same_weights(whole / "gpt2_spanish.pth", cut / "gpt2_spanish.pth")
    assert nobody_left(cut)


def test_a_machine_that_is_lost_and_comes_back_goes_on_with_the_other(tmp_path, data):
    folders, port = [tmp_path / "first", tmp_path / "second"], free_port()
    for folder in folders:
        folder.mkdir()

    def node(number):
        options = ["--nodes", 2, "--master-addr", "127.0.0.1", "--master-port", port, "--max-restarts", 2,
                   "--node-rank", number]
        words = training(data, 100, "--checkpoint-freq", 5, "--dist-timeout", 60)
        return launched(folders[number], *words, processes=1, options=options)

    with node(0) as first:
        with node(1):
            first.wait_for("paso 12/")  # then all of the other's processes are killed
        store = c10d.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        store.wait([f"aura/0/{backend.OVER}"], timedelta(seconds=60))  # the first is in its second attempt
        with node(1) as second:
            code, output = first.finish()
            assert code == 0 and "Se reanuda en el paso" in output, output
            code, output = second.finish()
            assert code == 0 and output.count("han vuelto a empezar sin esta") == 1, output


def test_a_signal_saves_and_ends_with_its_code(tmp_path, data):
    with launched(tmp_path, *training(data, 100000), options=["--max-restarts", 2]) as process:
        process.wait_for("paso 3/")
        process.child.send_signal(signal.SIGUSR1)
        code, output = process.finish(60)
    assert code == 138 and "La misma orden lo reanuda" in output and "error" not in output, output
    assert len(list(tmp_path.glob("checkpoints/*.pt"))) == 1 and nobody_left(tmp_path)


@pytest.mark.parametrize("number, to", [(signal.SIGINT, "the launcher"), (signal.SIGTERM, "one rank")])
def test_other_signals_too_whoever_gets_them(tmp_path, number, to):
    """A script that stops as loop.train does: all ranks act on what one hears, and rank 0 saves a while longer."""
    body = ("from aura.signals import orderly_stop\n"
            "with orderly_stop() as request:\n"
            "    print('listo')\n"
            "    while not os.path.exists('stop'):\n"
            "        time.sleep(0.05)\n"
            "        if request.number: open('stop', 'w')\n"
            "    if rank == 0: time.sleep(1.5); open('saved', 'w').write(str(int(request.number)))\n"
            f"sys.exit(128 + {int(number)})")
    path = script(tmp_path, body)
    with launched(tmp_path, path, options=["--max-restarts", 2]) as process:
        process.wait_for("listo")
        process.wait_for("listo")
        os.kill(process.child.pid if to == "the launcher" else rank_pid(tmp_path, path, 1), number)
        code, output = process.finish(60)
    assert code == 128 + number and "error" not in output and nobody_left(tmp_path), output
    # The rank that saves hears no more than what it was sent: torchrun, which kills later, does not step in.
    assert (tmp_path / "saved").read_text() == ("0" if to == "one rank" else str(int(number)))
    assert "reinicia" not in output


def test_two_machines(tmp_path):
    options = ["--nodes", 2, "--master-addr", "127.0.0.1", "--master-port", free_port(), "--node-rank"]
    with launched(tmp_path, "test_ddp.py", processes=1, options=[*options, 1]) as second:
        code, output = run(command("test_ddp.py", processes=1, options=[*options, 0]), tmp_path)
        assert code == 0 and "Todo correcto" in output, output
        assert second.finish()[0] == 0 and nobody_left(tmp_path)


def test_what_all_ranks_find_wrong_is_said_once_by_rank_0_and_not_tried_again(tmp_path):
    """As cli.run does with a bad argument: rank 1 leaves in silence, long before rank 0 has said why."""
    body = "if rank == 0: time.sleep(1.5); print('error: --x 3 no vale', file=sys.stderr)\nos._exit(2)"
    with launched(tmp_path, script(tmp_path, body), options=["--max-restarts", 3]) as process:
        code, output = process.finish()
    assert code == 2 and len(output.splitlines()) == 2 and "--x 3 no vale (código 2)" in output, output


FAILURES = {
    "an error line": (0, "print('error: no hay disco', file=sys.stderr); os._exit(3)", 3, "no hay disco (código 3)"),
    "an exception": (1, "raise ValueError('boom')", 1, "ValueError: boom (código 1)"),
    "a signal": (1, "os.kill(os.getpid(), signal.SIGSEGV)", 139, "lo mató la señal SIGSEGV (código 139)"),
}


def test_long_lines_of_several_ranks_arrive_whole_and_unmixed(capfd, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as file:
        file.write(("á" * 2500 + "\n" + "b" * 1000 + "\n\nfin\n").encode())
    launch.relay_errors(os.fdopen(reader, "rb"))
    records = capfd.readouterr().err.split(launch.MARK)[1:]
    assert [len(record) for record in records] == [1003, 1003, 503, 1003, 3, 6] and all(
        record.startswith("3 ") and len(record.encode()) < select.PIPE_BUF for record in records)
    assert "".join(record[2:].rstrip("\n") for record in records) == "á" * 2500 + "b" * 1000 + "fin"


@pytest.mark.parametrize("name", FAILURES)
def test_the_failing_rank_its_reason_and_its_code_come_back(tmp_path, name):
    rank, end, wanted, reason = FAILURES[name]
    with launched(tmp_path, script(tmp_path, f"if rank == {rank}:\n    {end}\ntime.sleep(60)")) as process:
        code, output = process.finish()
    assert code == wanted and nobody_left(tmp_path), output
    assert output.splitlines()[-1] == f"error: rango {rank} (máquina {socket.gethostname()}): {reason}"
    assert output.count(reason.split(" (")[0]) == (2 if "Traceback" in output else 1)
    assert "torch/distributed" not in output.split("\n", 1)[1]


def test_the_cause_is_told_not_its_echo(tmp_path):
    body = ("time.sleep(1 - rank)\nwhy = ['sin espacio', 'otro proceso se ha detenido: rango 0: sin espacio'][rank]\n"
            "print(f'error: {why}', file=sys.stderr)\nos._exit(2 + rank)")
    with launched(tmp_path, script(tmp_path, body), options=["--max-restarts", 1]) as process:
        code, output = process.finish()
    assert code == 2 and output.endswith("rango 0 (máquina " + socket.gethostname() + "): sin espacio (código 2)\n")
    assert "rango 1" not in output and "Aviso" not in output


def test_of_ranks_that_lost_another_the_one_that_has_saved_is_heard():
    """It ends last, and the others know of no newer checkpoint than the last regular one."""
    group = launch.Launch(3, 0, False)
    lost = "se ha perdido la comunicación con otro proceso; no contesta el rango 3; último punto de control: ckpt-{}.pt"
    group.ranks = {rank: launch.Rank(1, 3, lost.format(40 if rank else 51)) for rank in range(3)}
    group.ended = [2, 1, 0]
    assert group.culprit() == 0 and "ckpt-51.pt" in group.reason(0)
    group.ranks[2].error = "no queda espacio"
    assert group.culprit() == 2


def test_an_error_line_that_was_not_the_last_is_shown_and_a_signal_is_told(capsys):
    group = launch.Launch(2, 0, False)
    group.ranks = {rank: launch.Rank(1) for rank in range(2)}
    for text in ("uno", "dos"):
        group.heard(1, f"error: {text}\n")
    assert capsys.readouterr().err == "[rango 1] error: uno\n"
    group.ranks[1].code = 137
    assert "lo mató la señal SIGKILL (si no fue usted, faltó memoria: dmesg lo dice); antes dijo: dos (" \
        in group.reason(1)


@pytest.mark.parametrize("problem, why", [
    (BlockingIOError(errno.EAGAIN, "no"), "el sistema no da más hilos ni procesos"),
    (RuntimeError("can't start new thread"), "el sistema no da más hilos")])
def test_where_there_is_no_process_to_be_had_that_is_said(monkeypatch, capfd, problem, why):
    def refuse(*_, **__):
        raise problem

    before = {number: signal.getsignal(number) for number in signals.ORDERLY}
    monkeypatch.setattr(launch.subprocess, "Popen", refuse)
    monkeypatch.setattr(launch, "die_with_parent", lambda *_: lambda: None)
    for name in (signals.LISTENED, "RANK", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.setenv(name, "1")
    try:
        assert launch.run_rank(["work.py"]) == 2
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    _, said, ended, _ = capfd.readouterr().err.split("\n")
    assert said.startswith(f"{launch.MARK}1 error: no se pudo arrancar el script ({why}") and '"code": 2' in ended


def test_a_stop_that_comes_before_the_script_is_there_is_handed_down(monkeypatch, capfd):
    """The launcher sends one to a rank that begins once a stop was asked for."""
    sent = []

    def begin(*_, **__):
        os.kill(os.getpid(), signal.SIGTERM)
        return SimpleNamespace(pid=0, stderr=io.BytesIO(), send_signal=sent.append, wait=lambda: 128 + signal.SIGTERM)

    before = {number: signal.getsignal(number) for number in signals.ORDERLY}
    monkeypatch.setattr(launch.subprocess, "Popen", begin)
    monkeypatch.setattr(launch.os, "killpg", lambda *_: None)
    monkeypatch.setattr(launch, "die_with_parent", lambda *_: lambda: None)
    monkeypatch.setattr(launch, "SAVE_SECONDS", 0)
    for name in (signals.LISTENED, "RANK", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.setenv(name, "1")
    try:
        assert launch.run_rank(["work.py"]) == 128 + signal.SIGTERM and sent == [signal.SIGTERM]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert '"code": 143' in capfd.readouterr().err


@pytest.mark.parametrize("code, left", [(3, True), (128 + signal.SIGTERM, False)])
def test_who_stays_after_a_stop_leaves_when_another_has_failed(monkeypatch, code, left):
    """Nobody asked for one: torchrun stops those that are left, and waits."""
    sent, group = [], launch.Launch(3, 0, False)
    monkeypatch.setattr(launch, "send_signal", lambda pid, number: sent.append((pid, number)))
    group.ranks = {rank: launch.Rank(rank + 1) for rank in range(3)}
    group.event(rank=1, code=code)
    group.event(rank=0, code=128 + signal.SIGTERM)
    assert sent == ([(1, signal.SIGTERM)] if left else [])


@pytest.mark.parametrize("written", [True, False])
def test_a_killed_rank_ends_with_the_checkpoint_that_the_others_name(tmp_path, monkeypatch, capsys, written):
    """It could not name one itself, and what they say of it is kept back. One that it was killed in writing is none."""
    monkeypatch.chdir(tmp_path)
    for name in ("ckpt-51.pt", "ckpt-52.pt") if written else ():
        Path(name).touch()
    group = launch.Launch(3, 0, False)
    lost = "se ha perdido la comunicación con otro proceso; no contesta el rango 0; último punto de control: ckpt-{}.pt"
    group.ranks = {rank: launch.Rank(1, 3, lost.format(50 + rank)) for rank in range(3)}
    group.ranks[0], group.ended = launch.Rank(1, 128 + signal.SIGKILL), [0, 2, 1]
    assert group.conclude(1) == 137
    assert capsys.readouterr().err.endswith("(código 137)" + "; último punto de control: ckpt-51.pt" * written + "\n")


@pytest.mark.parametrize("asked", [[], [signal.SIGTERM]])
def test_a_rank_that_hung_and_that_torchrun_killed_is_told_as_such(tmp_path, monkeypatch, capsys, asked):
    """Nobody looks for a lack of memory. One that was killed first of all, with the process beside it, is another
    matter."""
    monkeypatch.chdir(tmp_path)
    Path("ckpt-8.pt").touch()
    lost = "se ha perdido la comunicación con otro proceso; no contesta el rango 1; último punto de control: ckpt-8.pt"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        for hangs in (True, False):
            group = launch.Launch(2, 0, False)
            group.event(rank=0, pid=os.getpid())
            group.event(rank=1, pid=other.pid)
            group.asked = asked
            group.heard(0, f"error: {lost}\n")
            if not hangs:
                other.kill()
                other.wait()
            group.event(rank=0, code=3)
            assert group.conclude(1) == (3 if hangs else 137)
            said = capsys.readouterr().err
            assert ("no contesta el rango 1" in said) == hangs and ("SIGKILL" in said) != hangs
            assert "último punto de control: ckpt-8.pt" in said


def test_a_stop_while_ranks_begin_is_no_lost_machine(capsys):
    """Rank 0 does not listen yet and dies of the signal; rank 1 does, and ends once it has lost rank 0."""
    group = launch.Launch(2, 0, False)
    lost = "se ha perdido la comunicación con otro proceso; no contesta el rango 0"
    group.ranks = {0: launch.Rank(1, 128 + signal.SIGTERM), 1: launch.Rank(1, 3, lost)}
    group.ended, group.asked = [0, 1], [signal.SIGTERM]
    assert group.conclude(1) == 128 + signal.SIGTERM and not capsys.readouterr().err
    group.ranks[0].code = 128 + signal.SIGKILL
    assert group.conclude(1) == 137 and "rango 0" in capsys.readouterr().err
    group.ranks[0], group.ranks[1].error = launch.Rank(1, 128 + signal.SIGTERM), "no queda espacio"
    assert group.conclude(1) == 3 and "no queda espacio" in capsys.readouterr().err
    group.ranks[1].error, group.asked = lost, []
    assert group.conclude(1) == 3 and "no contesta el rango 0" in capsys.readouterr().err


@pytest.mark.parametrize("code, over", [(2, True), (128 + signal.SIGTERM, True), (3, False), (137, False)])
def test_what_a_restart_would_not_change_is_not_started_again(code, over):
    ended, group = [], launch.Launch(2, 3, False)
    group.torchrun = SimpleNamespace(terminate=lambda: ended.append(True))
    group.ranks = {rank: launch.Rank(rank + 1, error="mal") for rank in range(2)}
    group.event(rank=1, code=code)
    assert not group.over, "the other may say why"
    group.event(rank=0, code=code)
    assert group.over == over and len(ended) == over


def test_what_torchrun_begins_again_once_all_is_over_is_not_waited_for(tmp_path):
    """torchrun stops it as well, and whoever is told twice before its script has ended stays as long as one saves."""
    body = "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), os._exit(143)))\nprint('lista')\ntime.sleep(60)"
    variables = {signals.LISTENED: "x", "RANK": 0, "LOCAL_RANK": 0, "TORCHELASTIC_RESTART_COUNT": 1}
    group = launch.Launch(1, 1, False)
    group.over = True
    with Process([LAUNCHER, "--as-rank", script(tmp_path, body)], tmp_path, **variables) as process:
        process.wait_for("lista")
        process.child.send_signal(signal.SIGTERM)
        group.event(rank=0, pid=process.child.pid, attempt=1)
        assert process.finish()[0] == -signal.SIGKILL


@pytest.mark.parametrize("handler, heard", [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
def test_a_launch_under_nohup_outlives_its_terminal(monkeypatch, handler, heard):
    group, found = launch.Launch(1, 0, False), []
    monkeypatch.setattr(launch.console, "outlive", lambda: None)
    monkeypatch.setattr(launch.subprocess, "Popen", lambda *_, **__: SimpleNamespace(
        stderr=io.BytesIO(), wait=lambda: found.append(signal.getsignal(signal.SIGHUP)) or 0))
    before = {number: signal.getsignal(number) for number in signals.ORDERLY}
    signal.signal(signal.SIGHUP, handler)
    try:
        assert group.run(["torchrun"], {}) == 0
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
    assert found == [group.pass_on if heard else signal.SIG_IGN]


def test_how_a_launch_that_was_stopped_or_never_began_is_told(monkeypatch, capsys):
    sent, group = [], launch.Launch(2, 0, False, "las demás")
    monkeypatch.setattr(launch, "send_signal", lambda pid, number: sent.append((pid, number)))
    group.chatter.append("Timed out after 301 seconds waiting for clients. 1/2 clients joined.")
    with pytest.raises(UserError, match=r"no han llegado todas las máquinas \(1 de 2\).*las demás"):
        group.conclude(1)
    group.chatter.append("torch.distributed.DistNetworkError: [...] port: 29500, code: -98, name: EADDRINUSE")
    with pytest.raises(UserError, match="ha tomado el puerto de --master-port .* repita la orden"):
        group.conclude(1)
    group.torchrun = SimpleNamespace(kill=lambda: sent.append("torchrun"))
    group.pass_on(signal.SIGUSR1, None)
    assert group.conclude(-9) == 128 + signal.SIGUSR1, "before any rank began"
    group.event(rank=0, pid=7)
    assert sent == ["torchrun", (7, signal.SIGTERM)]
    group.ranks = {0: launch.Rank(7, 128 + signal.SIGTERM), 1: launch.Rank(8)}
    group.pass_on(signal.SIGUSR1, None)
    assert sent[2:] == [(8, signal.SIGUSR1)], "the other has ended"
    group.ranks[1].code, group.ended = 128 + signal.SIGTERM, [0, 1]
    assert group.conclude(1) == 128 + signal.SIGUSR1, "what was asked for, whatever ended them"
    group.asked = []
    assert group.conclude(-9) == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "error: torchrun murió por la señal 9, y sus procesos pararon\n"


def test_saving_may_take_long_after_the_others_left(tmp_path):
    """Rank 1 leaves at once, rank 0 goes on for two seconds: nobody ends it. Its failure counts, not the signal."""
    body = ("signal.signal(signal.SIGTERM, lambda *_: saving.append(1)); saving = []\nprint('listo')\n"
            "while not saving: time.sleep(0.05)\n"
            "if rank == 0:\n"
            "    time.sleep(2); print('error: no queda espacio', file=sys.stderr); os._exit(3)\n"
            "os._exit(143)")
    with launched(tmp_path, script(tmp_path, body)) as process:
        process.wait_for("listo")
        process.wait_for("listo")
        process.child.send_signal(signal.SIGTERM)
        code, output = process.finish()
    assert code == 3 and "rango 0" in output.splitlines()[-1] and "no queda espacio" in output, output


def test_three_interrupts_leave_no_orphans(tmp_path):
    body = ("heard = []\nsignal.signal(signal.SIGINT, lambda *_: heard.append(1)); print('listo')\n"
            "for times in 1, 2, 3:\n"
            "    while len(heard) < times: time.sleep(0.05)\n"
            "    print(f'oída {times}')\nos._exit(130)")
    with launched(tmp_path, script(tmp_path, body)) as process:
        process.wait_for("listo")
        process.wait_for("listo")
        for times in (1, 2, 3):  # one that comes before the last was heard is not heard
            process.child.send_signal(signal.SIGINT)
            process.wait_for(f"oída {times}")
            process.wait_for(f"oída {times}")
        assert process.finish()[0] == 130 and nobody_left(tmp_path)


@pytest.mark.parametrize("victim", ["launcher", "torchrun"])
def test_whoever_is_killed_the_script_saves_and_ends(tmp_path, victim):
    body = ("def leave(*_):\n    open(f'saved.{rank}', 'w'); os._exit(143)\nsignal.signal(signal.SIGTERM, leave)\n"
            "print('listo')\ntime.sleep(60)")
    path = script(tmp_path, body)
    with launched(tmp_path, path) as process:
        process.wait_for("listo")
        process.wait_for("listo")
        (torchrun,) = alive(f"LAUNCH_TEST={tmp_path}", "torch.distributed.run")
        os.kill(process.child.pid if victim == "launcher" else torchrun, signal.SIGKILL)
        assert nobody_left(tmp_path) and len(list(tmp_path.glob("saved.*"))) == 2
        if victim == "torchrun":
            code, output = process.finish()
            assert code == 143 and "torchrun murió" in output


def test_a_rank_that_hangs_does_not_outlive_the_process_beside_it(tmp_path):
    """When the latter does not end, torchrun kills it, and the rank itself gets no SIGTERM: it would keep its card."""
    body = ("from types import SimpleNamespace\nfrom aura import distributed\n"
            "with distributed.session(SimpleNamespace(backend='gloo', dist_timeout=60.0, distributed=True)):\n"
            "    print('listo')\n    os.kill(os.getpid(), signal.SIGSTOP) if rank else time.sleep(60)")
    path = script(tmp_path, body)
    with launched(tmp_path, path) as process:
        process.wait_for("listo")
        process.wait_for("listo")
        pid = rank_pid(tmp_path, path, 1)
        os.kill(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
        deadline = time.monotonic() + 60
        while pid in alive(f"LAUNCH_TEST={tmp_path}", path):
            assert time.monotonic() < deadline, "it is left behind"
            time.sleep(0.1)


def test_an_interrupt_before_anything_has_started(tmp_path):
    with launched(tmp_path, script(tmp_path, "time.sleep(60)")) as process:
        while not alive(f"LAUNCH_TEST={tmp_path}", "torch.distributed.run"):
            assert process.child.poll() is None
        process.child.send_signal(signal.SIGINT)
        code, output = process.finish(30)
    assert code == 130 and len(output.splitlines()) == 1 and nobody_left(tmp_path), output


def test_what_a_process_leaves_running_dies_with_it(tmp_path):
    body = "import subprocess\nsubprocess.Popen(['sleep', '60'])\nsys.exit(5)"
    with launched(tmp_path, script(tmp_path, body), processes=1) as process:
        code, output = process.finish(30)
        assert code == 5 and "terminó sin decir por qué (código 5)" in output and nobody_left(tmp_path)


def test_where_the_system_tells_no_child_of_its_parent(monkeypatch):
    """As on Windows, where the process has no C library to load."""
    monkeypatch.setattr(signals.sys, "platform", "win32")
    monkeypatch.setattr(signals.ctypes, "CDLL", None)
    signals.die_with_parent(signal.SIGTERM, os.getppid())()
