"""The tests' own means: a child that never speaks, or leaves others behind, does not hold the suite."""

import itertools
import os
import signal
import subprocess
import time

import numpy as np
import pytest

from tests import hosts
from tests.support import ROOT, Process, philox, run

SILENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""


FACTS = """
import atexit, os, sys
atexit.register(print, "at the end")
print(__name__, sys.argv, sys.path[0], os.getcwd(), os.getsid(0) == os.getpid(), len(os.listdir("/proc/self/task")))
print([name for name in sys.modules if name.startswith("aura")], os.environ["A"], len(os.environ))
print(sys.stdout.seekable(), sys.stdout.line_buffering, sys.stderr.line_buffering, file=sys.stderr)
print(sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:3], flush=True)
os.kill(os.getpid(), int(sys.argv[1])) if len(sys.argv) > 1 else sys.exit(3)
"""


def ended(pid):
    """Whether the process is gone, or a zombie, within five seconds."""
    for _ in range(50):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("wait", [lambda process: process.wait_for("never", limit=1),
                                  lambda process: process.finish(limit=1)])
def test_a_silent_child_is_given_up_and_all_that_it_started_dies(wait):
    with Process(["-c", SILENT], ROOT) as process:
        grandchild = int(process.wait_for("\n"))
        assert os.path.exists(f"/proc/{grandchild}")
        with pytest.raises(AssertionError, match="within 1 s"):
            wait(process)
        assert ended(grandchild)


@pytest.mark.skipif(not hosts.namespaces_work(), reason="needs root and iproute2")
@pytest.mark.parametrize("at", [1, 5, 9])
def test_no_machine_is_left_of_a_switch_that_was_interrupted(monkeypatch, at):
    done, ip = itertools.count(1), hosts.ip

    def interrupted(*words):
        if next(done) == at:
            raise KeyboardInterrupt
        ip(*words)

    switch = hosts.Switch(2)
    monkeypatch.setattr(hosts, "ip", interrupted)
    with pytest.raises(KeyboardInterrupt), switch:
        pass
    assert switch.tag not in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(not hosts.namespaces_work(), reason="needs root and iproute2")
def test_no_machine_is_left_where_leaving_is_interrupted(monkeypatch):
    run, done = subprocess.run, itertools.count(1)

    def interrupted(*words, **options):
        if next(done) == 2:
            raise KeyboardInterrupt
        return run(*words, **options)

    with pytest.raises(KeyboardInterrupt), hosts.Switch(2) as switch:
        monkeypatch.setattr(subprocess, "run", interrupted)
    assert switch.tag not in run(["ip", "netns"], capture_output=True, text=True, check=True).stdout


def test_leaving_the_block_ends_those_in_sessions_of_their_own():
    with Process(["-c", SILENT], ROOT) as process:
        grandchild = int(process.wait_for("\n"))
    assert ended(grandchild)


@pytest.mark.parametrize("how", ["script", "module", "program"])
@pytest.mark.parametrize("number", [None, signal.SIGKILL])
def test_a_fork_meets_what_a_python_of_its_own_does(tmp_path, how, number):
    (tmp_path / "facts.py").write_text(FACTS)
    command = {"script": [tmp_path / "facts.py"], "module": ["-m", "facts"], "program": ["-c", FACTS]}[how]
    command += [int(number)] if number else []
    code, output = run(command, tmp_path, A="b")
    assert code == (-number if number else 3) and ("at the end" in output) == (not number), output
    assert (code, output) == run(command, tmp_path, fresh=True, A="b")


def test_philox_is_the_published_generator():
    """The test vectors of Random123 for seven rounds."""
    ones, zero = np.full(1, 0xFFFFFFFF, np.uint64), np.zeros(1, np.uint64)
    assert [int(x[0]) for x in philox(0, (zero,) * 4)] == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    assert [int(x[0]) for x in philox(2**64 - 1, (ones,) * 4)] == [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]
