"""tqdm, with a lock for the threads of one process.

tqdm's own lock also keeps out other processes. For such a lock Python starts another process from 3.14 on, which warns,
in English and after our last line, when this one exits without cleaning up (cli.run() after a failure).
"""

import atexit
import threading

from tqdm import tqdm

tqdm.set_lock(threading.RLock())


@atexit.register
def _wait_for_monitor():
    """tqdm wakes its monitor as the process exits, but does not wait for it: a thread that gives up Python's lock while
    the interpreter goes down may find its state freed (drop_gil of 3.11), and a run that is done ends by SIGSEGV.
    Registered before tqdm's own function, and so called after it."""
    if tqdm.monitor:
        tqdm.monitor.join(timeout=5)
