"""aura/bar.py: what of tqdm's must not outlive a run."""

import subprocess
import sys

from tests.support import ROOT

SCRIPT = """
import atexit, io, sys, threading
atexit.register(lambda: print(*(thread.name for thread in threading.enumerate())))  # the first is called last
from aura.bar import tqdm
for _ in tqdm(range(2), file=io.StringIO()):
    pass
assert tqdm.monitor.is_alive()
sys.setswitchinterval(9)  # who does not wait for the monitor leaves before it has its turn
"""


def test_no_thread_of_tqdm_runs_on_while_the_interpreter_goes_down():
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "MainThread\n"
