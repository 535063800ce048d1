"""ddp_launch.sh: the command it composes, the values it refuses, a real launch and the signals that reach it."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aura import placement
from tests.support import free_port

ROOT = Path(__file__).resolve().parent.parent
LAUNCHER = ROOT / "ddp_launch.sh"
OURS = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "GPUS_PER_NODE", "SCRIPT", "PYTHON", "OMP_NUM_THREADS",
        "CUDA_VISIBLE_DEVICES", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@pytest.fixture
def here(tmp_path):
    """A folder with a python that shows its arguments, one word a line, and a script to launch."""
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\ncase "$1$2" in *torchrun*) ;; *) exit 0 ;; esac\n'
                    'printf "%s\\n" "$@" "OMP=$OMP_NUM_THREADS" "CUDA=${CUDA_VISIBLE_DEVICES-unset}"\n')
    fake.chmod(0o755)
    (tmp_path / "work.py").write_text("print('ok')\n")
    return tmp_path


def launch(folder, *arguments, bin_first=None, **variables):
    environment = {name: value for name, value in os.environ.items() if name not in OURS}
    environment.update(PYTHON=str(folder / "python"), SCRIPT="work.py")
    environment.update(variables)
    if bin_first:
        environment["PATH"] = f"{bin_first}{os.pathsep}{environment['PATH']}"
    return subprocess.run([str(LAUNCHER), *arguments], cwd=folder, env=environment, capture_output=True, text=True,
                          timeout=120)


def composed(folder, *arguments, **options):
    done = launch(folder, *arguments, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_one_machine_by_default(here):
    words = composed(here, CUDA_VISIBLE_DEVICES="")
    assert words[0] == "-c" and words[1].endswith("torch.distributed.run as torchrun; torchrun.main()")
    for word in ("--nnodes=1", "--node-rank=0", "--nproc-per-node=1", "--master-addr=127.0.0.1", "--master-port=29500"):
        assert word in words
    assert words[words.index("work.py") + 1] == "--distributed"
    assert {"SIGTERM", "SIGINT", "SIGUSR1"} <= forwarded(words)


def test_a_name_that_leads_nowhere_is_told_where_there_is_no_getent_too(here, monkeypatch):
    """As on a Mac: Python is asked then."""
    tools = here / "tools"
    tools.mkdir()
    for name in ("bash", "env", "dirname", "awk", "timeout", "nproc", "cat", "sed", "grep", "tr", "seq", "uname", "id"):
        if path := shutil.which(name):
            (tools / name).symlink_to(path)
    monkeypatch.setenv("PATH", str(tools))
    done = launch(here, PYTHON=sys.executable, NNODES="2", NODE_RANK="0", MASTER_ADDR="no-hay.invalid",
                  CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and "MASTER_ADDR='no-hay.invalid' no se resuelve en esta máquina" in done.stderr
    assert done.stderr.count("MASTER_ADDR=") == 1, done.stderr


def forwarded(words):
    word = next(word for word in words if word.startswith("--signals-to-handle="))
    return set(word.split("=")[1].split(","))


@pytest.mark.parametrize("handler, heard", [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
def test_what_nohup_ignores_is_not_listened_to(here, handler, heard):
    before = signal.signal(signal.SIGHUP, handler)
    try:
        words = composed(here, CUDA_VISIBLE_DEVICES="")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert "SIGTERM" in forwarded(words) and ("SIGHUP" in forwarded(words)) == heard


def test_several_machines_and_arguments_of_the_script(here):
    words = composed(here, "--sample-prompt", "En un lugar", "--batch-size=8", NNODES="3", NODE_RANK="02",
                     MASTER_ADDR="192.168.1.10", MASTER_PORT="29501", GPUS_PER_NODE="2", CUDA_VISIBLE_DEVICES="0,1")
    for word in ("--nnodes=3", "--node-rank=2", "--nproc-per-node=2", "--master-addr=192.168.1.10",
                 "--master-port=29501"):
        assert word in words
    after = words.index("work.py") + 1
    assert words[after:after + 4] == ["--distributed", "--sample-prompt", "En un lugar", "--batch-size=8"]


def test_distributed_is_passed_once(here):
    assert composed(here, "--seed", "1", "--distributed", CUDA_VISIBLE_DEVICES="").count("--distributed") == 1


def test_the_connectivity_check_has_no_such_flag(here):
    words = composed(here, SCRIPT="test_ddp.py", CUDA_VISIBLE_DEVICES="")
    assert str(ROOT / "test_ddp.py") in words  # found beside the launcher from any folder
    assert "--distributed" not in words


def test_what_torchrun_is_given_it_accepts(here):
    run = pytest.importorskip("torch.distributed.run")
    words = [word for word in composed(here, CUDA_VISIBLE_DEVICES="")[2:] if not word.startswith(("OMP=", "CUDA="))]
    assert run.get_args_parser().parse_args(words).training_script_args == ["--distributed"]


@pytest.mark.parametrize("cards, asked, processes, visible", [
    (2, None, 2, "unset"), (0, None, 1, "unset"), (2, "1", 1, "unset"), (2, "0", 1, ""), (0, "3", 3, "unset"),
    (2, "", 2, "unset"),
])
def test_processes_of_a_machine(here, cards, asked, processes, visible):
    tools = here / "bin"
    tools.mkdir()
    smi = tools / "nvidia-smi"
    lines = "".join(f"GPU {card}: a card (UUID: x)\\n  MIG 1g.10gb Device 0: (UUID: y)\\n" for card in range(cards))
    smi.write_text(f'#!/bin/sh\nprintf "{lines}"\n' + ("" if cards else "exit 9\n"))
    smi.chmod(0o755)
    words = composed(here, bin_first=tools, **({} if asked is None else {"GPUS_PER_NODE": asked}))
    assert f"--nproc-per-node={processes}" in words
    assert f"CUDA={visible}" in words
    assert f"OMP={max(1, len(os.sched_getaffinity(0)) // processes)}" in words


def test_threads_of_the_user_stay(here):
    assert "OMP=7" in composed(here, OMP_NUM_THREADS="7", CUDA_VISIBLE_DEVICES="")


BAD = [
    ({"NNODES": "dos"}, "NNODES"), ({"NNODES": "0"}, "NNODES"), ({"NNODES": "-1"}, "NNODES"),
    ({"NNODES": "1.5"}, "NNODES"), ({"NNODES": "99999999999999999999"}, "NNODES"),
    ({"NNODES": "1\n2"}, "NNODES"), ({"NNODES": "1:2"}, "NNODES"),
    ({"NODE_RANK": "-1"}, "NODE_RANK"), ({"NODE_RANK": "uno"}, "NODE_RANK"), ({"NODE_RANK": "1"}, "NODE_RANK"),
    ({"NNODES": "2", "MASTER_ADDR": "192.168.1.10", "NODE_RANK": "2"}, "NODE_RANK"),
    ({"NNODES": "2", "MASTER_ADDR": "192.168.1.10"}, "NODE_RANK"),
    ({"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR"),
    ({"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": ""}, "MASTER_ADDR"),
    ({"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.1.1"}, "MASTER_ADDR"),
    ({"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "localhost"}, "MASTER_ADDR"),
    ({"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "0.0.0.0"}, "MASTER_ADDR"),
    ({"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "192.168.1.999"}, "MASTER_ADDR"),
    ({"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "192.168.1"}, "MASTER_ADDR"),
    ({"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "192.168.1.10:29500"}, "MASTER_PORT=29500"),
    ({"MASTER_ADDR": "http://a"}, "MASTER_ADDR"), ({"MASTER_ADDR": "a b"}, "MASTER_ADDR"),
    ({"MASTER_ADDR": "-x"}, "MASTER_ADDR"), ({"MASTER_ADDR": "fd00::1"}, "IPv4"),
    ({"MASTER_ADDR": "a..b"}, "no se resuelve"),
    ({"MASTER_PORT": "0"}, "MASTER_PORT"), ({"MASTER_PORT": "65536"}, "MASTER_PORT"),
    ({"MASTER_PORT": "x"}, "MASTER_PORT"),
    ({"GPUS_PER_NODE": "-2"}, "GPUS_PER_NODE"), ({"GPUS_PER_NODE": "todas"}, "GPUS_PER_NODE"),
    ({"GPUS_PER_NODE": "100000"}, "GPUS_PER_NODE"),
    ({"GPUS_PER_NODE": "3", "CUDA_VISIBLE_DEVICES": "0,1"}, "GPUS_PER_NODE"),
    ({"SCRIPT": "no_existe.py"}, "SCRIPT"), ({"SCRIPT": "."}, "SCRIPT"),
    ({"PYTHON": "/no/existe/python"}, "PYTHON"), ({"PYTHON": "false"}, "torch"),
]


@pytest.mark.parametrize("variables, named", BAD, ids=[str(list(bad.items())) for bad, _ in BAD])
def test_a_bad_value_is_named_in_one_line(here, variables, named):
    done = launch(here, **{"CUDA_VISIBLE_DEVICES": "", **variables})
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert named in done.stderr
    assert done.stderr.count(";") == 0  # this value alone


def test_what_is_in_the_way_of_the_others_is_said_before_anything_starts(here):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        done = launch(here, "--preset", "demo", PYTHON=sys.executable, MASTER_PORT=port, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1, done.stderr
    assert re.search(rf"MASTER_PORT={port}: el puerto {port} ya está en uso .*está libre MASTER_PORT=\d+", done.stderr)
    (here / "python").write_text('#!/bin/sh\ncase "$2" in *torchrun*) ;; *) exec ' + sys.executable + ' "$@" ;; esac\n')
    for address, warned in (("203.0.113.9", True), ("127.0.0.1", False)):
        done = launch(here, MASTER_ADDR=address, MASTER_PORT=port, CUDA_VISIBLE_DEVICES="")
        assert ("Aviso: MASTER_ADDR=203.0.113.9 no es una dirección de esta" in done.stderr) == warned, done.stderr


def test_all_bad_values_at_once(here):
    done = launch(here, NNODES="x", NODE_RANK="y", MASTER_ADDR="a b", MASTER_PORT="z", GPUS_PER_NODE="w",
                  SCRIPT="no_existe.py", PYTHON="/no/existe/python")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    for name in ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "GPUS_PER_NODE", "SCRIPT", "PYTHON"):
        assert f'{name}="' in done.stderr


def test_accents_survive_a_plain_locale(here):
    assert "dirección" in launch(here, MASTER_ADDR="a b", LC_ALL="C").stderr


def test_help(here):
    done = launch(here, "--help", NNODES="x")
    assert done.returncode == 0
    assert done.stdout.startswith("Uso:")
    assert all(name in done.stdout for name in ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "GPUS_PER_NODE"))


WORKER = """
import os, signal, sys, time
import torch, torch.distributed as dist

def leave(number, frame):
    open(f"signal.{os.environ['RANK']}", "w").write(str(number))
    sys.exit(128 + number)

signal.signal(signal.SIGUSR1, leave)
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
open(f"sum.{dist.get_rank()}", "w").write(f"{total.item():g} {sys.argv[1:]}")
deadline = time.monotonic() + 60
while "--wait" in sys.argv and time.monotonic() < deadline:
    time.sleep(0.1)
dist.destroy_process_group()
"""


@pytest.fixture
def worker(here):
    pytest.importorskip("torch")
    (here / "work.py").write_text(WORKER)
    return {"PYTHON": sys.executable, "GPUS_PER_NODE": "2", "CUDA_VISIBLE_DEVICES": "", "MASTER_PORT": str(free_port())}


def test_two_real_processes(here, worker):
    done = launch(here, "--hola", **worker)
    assert done.returncode == 0, done.stderr
    assert {(here / f"sum.{rank}").read_text() for rank in range(2)} == {"2 ['--distributed', '--hola']"}


def signalled(here, worker):
    """Launch two workers, send SIGUSR1 to the launcher once both work, wait for its end; returns what it wrote."""
    environment = {name: value for name, value in os.environ.items() if name not in OURS}
    with open(here / "log", "w") as log:
        running = subprocess.Popen([str(LAUNCHER), "--wait"], cwd=here, stdout=log, stderr=log,
                                   env={**environment, "SCRIPT": "work.py", **worker})
    try:
        deadline = time.monotonic() + 90
        while not all((here / f"sum.{rank}").exists() for rank in range(2)):
            assert running.poll() is None and time.monotonic() < deadline, (here / "log").read_text()
            time.sleep(0.1)
        running.send_signal(signal.SIGUSR1)
        assert running.wait(timeout=60) != 0
    finally:
        if running.poll() is None:
            running.terminate()
            running.wait(timeout=60)
    return (here / "log").read_text()


def test_sigusr1_reaches_the_workers(here, worker):
    # torchrun has an instant, before its clock starts, in which it fails at a signal and sends the workers SIGTERM.
    if "UnboundLocalError: cannot access local variable 'start'" in signalled(here, worker):
        for rank in range(2):
            (here / f"sum.{rank}").unlink()
        signalled(here, worker)
    assert [(here / f"signal.{rank}").read_text() for rank in range(2)] == [str(int(signal.SIGUSR1))] * 2


def listens(address, port):
    with socket.socket() as probe:
        return probe.connect_ex((address, port)) == 0


@pytest.mark.parametrize("number", [0, 1])
def test_a_machine_that_waits_for_another_says_so_and_hears_ctrl_c(here, worker, number):
    address = next((own for own in placement.interface_addresses().values() if not own.startswith("127.")), None)
    if address is None:
        pytest.skip("this machine has no address on a network")
    environment = {name: value for name, value in os.environ.items() if name not in OURS}
    environment |= {**worker, "SCRIPT": "work.py", "NNODES": "2", "NODE_RANK": str(number), "MASTER_ADDR": address}
    with open(here / "log", "w") as log:
        running = subprocess.Popen([str(LAUNCHER)], cwd=here, stdout=log, stderr=log, env=environment,
                                   start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        expected = [f"espera a las otras, todas con MASTER_ADDR={address} ", f"a la máquina 0 en {address}:"][number]
        while expected not in (here / "log").read_text():
            assert running.poll() is None and time.monotonic() < deadline, (here / "log").read_text()
            time.sleep(0.1)
        while number == 0 and not listens(address, int(worker["MASTER_PORT"])):  # then torchrun goes to wait
            assert time.monotonic() < deadline, (here / "log").read_text()
            time.sleep(0.1)
        os.killpg(running.pid, signal.SIGINT)
        assert running.wait(timeout=60) in (-signal.SIGINT, 128 + signal.SIGINT)
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait(timeout=60)
    assert "Traceback" not in (here / "log").read_text()


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck():
    done = subprocess.run(["shellcheck", str(LAUNCHER)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_the_launcher_can_be_executed():
    assert os.access(LAUNCHER, os.X_OK)
    assert re.match(r"#!/usr/bin/env bash\n", LAUNCHER.read_text(encoding="utf-8"))
