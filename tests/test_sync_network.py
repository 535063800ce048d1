"""--sync between machines on slow links that fail: each with its own address and its own folders."""

import os
import re
import shutil
import signal
import time
from contextlib import ExitStack

import pytest
import torch

from aura import checkpoint
from tests.hosts import Switch, limits_work
from tests.support import ROOT, corpus_text, run

SCRIPT = ROOT / "train_gpt2_spanish.py"
SMALL = ["--preset", "demo", "--n-layer", "1", "--n-embd", "32", "--n-head", "2", "--seq-len", "32", "--vocab-size",
         "400", "--sample-length", "0", "--log-interval", "1", "--batch-size", "2", "--dropout", "0"]
DILOCO = ["--distributed", "--sync", "diloco", "--sync-every", "10"]
ENDLESS = [*DILOCO, "--max-steps", "1000000", "--checkpoint-freq", "20", "--dist-timeout", "6"]

pytestmark = pytest.mark.skipif(not limits_work(), reason="limited links need root, iproute2 (ip, tc) and nftables")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with the data."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "libro.txt").write_text(corpus_text(), encoding="utf-8")
    assert run([SCRIPT, *SMALL, "--prepare", "--dataset-name", folder / "libro.txt"], folder)[0] == 0
    return folder / "Data"


class Machines:
    """The script on machines that are 50 Mbit/s away from the switch, each in its own folder."""

    def __init__(self, folder, prepared, options, hosts=2, mbit=50):
        self.folders = [folder / f"pc{host}" for host in range(hosts)]
        self.command = [SCRIPT, *SMALL, *options, "--data-dir", prepared]
        self.mbit = mbit

    def __enter__(self):
        with ExitStack() as stack:
            self.switch = stack.enter_context(Switch(len(self.folders)))
            for host, folder in enumerate(self.folders):
                folder.mkdir(exist_ok=True)
                self.switch.limit(host, self.mbit)
            self.processes = self.switch.start(stack, self.command, self.folders)
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *problem):
        return self.stack.__exit__(*problem)

    def send(self, rank, number):
        os.killpg(self.processes[rank].child.pid, number)


def last_good(folder, output):
    """The checkpoint in `folder` that the last line of an output names."""
    named = re.search(r"último punto de control: checkpoints/ckpt-(\d{8})\.pt$", output.strip())
    assert named, output[-2000:]
    state = checkpoint.read(checkpoint.path_of(folder / "checkpoints", int(named[1])))
    assert state["progress"]["step"] == int(named[1]) and state["sync"]["method"] == "diloco"
    assert all(torch.isfinite(tensor).all() for tensor in state["model"].values())
    return state


def shown(output):
    """The last step that a console told of."""
    return int(re.findall(r"paso (\d+)/", output)[-1])


def test_three_machines_wait_for_one_that_stops_and_for_a_cable_that_is_put_back(prepared, tmp_path):
    with Machines(tmp_path, prepared, [*DILOCO, "--max-steps", "250"], hosts=3) as machines:
        first = machines.processes[0]
        first.wait_for("paso 20/")
        machines.send(1, signal.SIGSTOP)
        time.sleep(2)
        machines.send(1, signal.SIGCONT)
        first.wait_for("paso 60/")
        machines.switch.unplug(2)
        time.sleep(5)
        machines.switch.plug(2)
        results = [process.finish() for process in machines.processes]
    for rank, (code, output) in enumerate(results):
        assert code == 0 and f"[rango {rank}] Todos los procesos completaron el entrenamiento" in output, output
    assert shown(results[0][1]) == 250 and "validación" in results[0][1]


@pytest.mark.parametrize("lost, hosts", [("cable", 2), (1, 2), (0, 2), (2, 3)])
def test_who_is_left_saves_what_was_last_agreed_on(prepared, tmp_path, lost, hosts):
    with Machines(tmp_path, prepared, ENDLESS, hosts=hosts) as machines:
        machines.processes[0].wait_for("paso 47/")
        if lost == "cable":
            machines.switch.unplug(1)
        else:
            machines.send(lost, signal.SIGKILL)
        results = [process.finish(60) for process in machines.processes]
    reached = shown(results[0][1])
    for rank, (code, output) in enumerate(results):
        if rank == lost:
            continue
        assert code == 3 and "Traceback" not in output and "se ha perdido la comunicación" in output, output
        assert f"no contesta el rango {1 - rank if lost == 'cable' else lost} " in output
        if rank and hosts == 3:
            assert output.strip().endswith("; lo último que se acordó lo guarda el rango 0, que dice dónde"), output
            continue
        step = last_good(machines.folders[rank], output)["progress"]["step"]
        assert 0 <= step - reached <= 1 if rank == 0 else abs(step - reached) <= 4
        others = [checkpoint.step_of(path) for path in checkpoint.found(machines.folders[rank] / "checkpoints")[1:]]
        assert others == [] if rank else others[0] == (step - 1) // 20 * 20
    if lost == 0:
        come_back(prepared, tmp_path, step)
        code, output = run([SCRIPT, *SMALL, "--data-dir", prepared, "--max-steps", step + 2], machines.folders[1])
        assert code == 0 and f"Se reanuda en el paso {step} desde checkpoints" in output, output


def come_back(prepared, folder, step):
    """Both go on from what rank 1 saved, where rank 0 was lost with an older checkpoint or before it had any; a rank 0
    that knows nothing of that run begins another."""
    mine = folder / "pc0" / "checkpoints"
    saved = f"{checkpoint.path_of('checkpoints', step)} (en la máquina del rango 1)"
    for known in ("older", "name", "nothing"):
        for path in checkpoint.found(mine) if known == "name" else ():
            path.unlink()
        if known == "nothing":
            shutil.rmtree(mine)
        with Machines(folder, prepared, [*DILOCO, "--max-steps", step + 2]) as machines:
            (code, output), (other, _) = [process.finish(60) for process in machines.processes]
        assert code == other == 0, output
        assert (f"Se reanuda en el paso {step} desde {saved}." in output) == (known != "nothing"), output
        assert (f"paso {step}/" in output) == (known == "nothing") and f"paso {step + 1}/" in output


def test_auto_measures_a_slow_link_and_all_take_diloco(prepared, tmp_path):
    with Machines(tmp_path, prepared, ["--distributed", "--max-steps", "4", "--sync-every", "2"], mbit=1) as machines:
        results = [process.finish() for process in machines.processes]
    assert [code for code, _ in results] == [0, 0], results
    network = re.search(r"^Red: ([\d.]+) Mbit/s, .*; un paso: .*; los gradientes pesan \d.* MB\.$", results[0][1], re.M)
    assert 0.5 < float(network[1]) < 1.5, network[0]
    assert re.search(r"^--sync auto elige diloco \(.*ddp.*fp16.*una sola máquina.*\): ", results[0][1], re.M)
    for folder in machines.folders:
        assert checkpoint.found(folder / "checkpoints" / f"rank-{machines.folders.index(folder):05d}")
    assert "--sync auto" not in results[1][1]
