"""tqdm, with a lock for the threads of one process.

Its own locks out other processes too. For such a lock Python starts another process from 3.14 on, and that one warns,
in English and after our last line, when this one leaves without good-byes (cli.run() after a failure).
"""

import threading

from tqdm import tqdm

tqdm.set_lock(threading.RLock())
