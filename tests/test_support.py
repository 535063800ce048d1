"""The tests' own means: a child that never speaks, or leaves others behind, does not hold the suite."""

import os
import time

import pytest

from tests.support import ROOT, Process

SILENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
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


def test_leaving_the_block_ends_those_in_sessions_of_their_own():
    with Process(["-c", SILENT], ROOT) as process:
        grandchild = int(process.wait_for("\n"))
    assert ended(grandchild)
