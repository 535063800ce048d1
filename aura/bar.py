"""Progress bars: tqdm's, with a lock for the threads of one process and without its monitor.

tqdm's own lock also keeps out other processes. For such a lock Python starts another process from 3.14 on, which warns,
in English and after our last line, when this one exits without cleaning up (cli.run() after a failure).

Its monitor is a thread that redraws a bar which waits for more updates than come. It is woken, but not waited for, when
the process exits (4.70.1): a thread that gives up Python's lock while the interpreter goes down may find its state
freed, and a training that was done has ended by SIGSEGV there (drop_gil of 3.11). Bars that are redrawn by time need
none.
"""

import threading

from tqdm import tqdm

tqdm.set_lock(threading.RLock())
tqdm.monitor_interval = 0  # of every bar here, those of libraries too: a disabled one would start the thread as well


def bar(**options):
    """A tqdm that is redrawn by time, however many updates that takes."""
    return tqdm(miniters=1, **options)
