"""Several machines: network namespaces on one switch, each with its own address and its own folders."""

import os
import shutil
import subprocess
import time
from contextlib import ExitStack

import pytest

from tests.support import ROOT, Process, corpus_text, run

SCRIPT = ROOT / "train_gpt2_spanish.py"
SMALL = ["--preset", "demo", "--n-layer", "1", "--n-embd", "32", "--n-head", "2", "--seq-len", "32", "--vocab-size",
         "400", "--sample-length", "0", "--log-interval", "1", "--distributed", "--batch-size", "2"]


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


class Switch:
    """Hosts 10.77.0.1, .2, ... on one bridge; `unplug(i)` pulls the cable of host i."""

    def __init__(self, hosts):
        self.tag = f"aura{os.getpid() % 100000}"
        self.hosts = [f"{self.tag}h{i}" for i in range(hosts)]

    def __enter__(self):
        ip("netns", "add", self.tag)
        ip("-n", self.tag, "link", "add", "br0", "type", "bridge")
        ip("-n", self.tag, "link", "set", "br0", "up")
        for i, host in enumerate(self.hosts):
            ip("netns", "add", host)
            ip("link", "add", "eth0", "netns", host, "type", "veth", "peer", "name", f"p{i}", "netns", self.tag)
            ip("-n", self.tag, "link", "set", f"p{i}", "master", "br0")
            ip("-n", self.tag, "link", "set", f"p{i}", "up")
            ip("-n", host, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "eth0")
            ip("-n", host, "link", "set", "eth0", "up")
            ip("-n", host, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_):
        for name in (*self.hosts, self.tag):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)

    def unplug(self, host):
        """Take the link of `host` down at the switch: no reset, no goodbye, just silence."""
        ip("-n", self.tag, "link", "set", f"p{host}", "down")

    def start(self, stack, command, folders):
        """One process a host, each in its folder."""
        return [stack.enter_context(Process(command, folder, host=host, RANK=rank, LOCAL_RANK=0,
                                            WORLD_SIZE=len(folders), MASTER_ADDR="10.77.0.1", MASTER_PORT=29500))
                for rank, (host, folder) in enumerate(zip(self.hosts, folders, strict=True))]


def namespaces_work():
    if os.geteuid() != 0 or not shutil.which("ip"):
        return False
    try:
        with Switch(1):
            return True
    except subprocess.CalledProcessError:
        return False


pytestmark = pytest.mark.skipif(not namespaces_work(), reason="network namespaces need root and iproute2")


@pytest.fixture
def folders(tmp_path):
    made = [tmp_path / name for name in ("first", "second", "third")]
    for folder in made:
        folder.mkdir()
    (tmp_path / "libro.txt").write_text(corpus_text(), encoding="utf-8")
    assert run([SCRIPT, *SMALL, "--prepare", "--dataset-name", tmp_path / "libro.txt"], made[0])[0] == 0
    return made


def test_two_machines_only_the_first_with_data_and_checkpoint(folders):
    for steps, expected in ((4, "rangos 1 no tienen los datos"), (8, "Se reanuda en el paso 4")):
        with Switch(2) as switch, ExitStack() as stack:
            processes = switch.start(stack, [SCRIPT, *SMALL, "--max-steps", str(steps)], folders[:2])
            results = [process.finish() for process in processes]
        assert [code for code, _ in results] == [0, 0], results
        assert expected in results[0][1]
    assert (folders[1] / "Data" / "libro" / "dataset.json").exists()
    assert not list(folders[1].glob("checkpoints/*.pt"))


def test_a_machine_cut_off_in_the_middle_ends_the_others_in_time(folders):
    command = [SCRIPT, *SMALL, "--max-steps", "100000", "--checkpoint-freq", "5", "--dist-timeout", "15"]
    with Switch(3) as switch, ExitStack() as stack:
        processes = switch.start(stack, command, folders)
        processes[0].wait_for("paso 12/")
        switch.unplug(2)
        started = time.monotonic()
        results = [process.finish(60) for process in processes[:2]]
        assert time.monotonic() - started < 45
    for code, output in results:
        assert code == 3 and "Traceback" not in output, output
        assert "no contestan los rangos 2 " in output
        assert "último punto de control: checkpoints/ckpt-" in output
