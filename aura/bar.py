"""tqdm, with a lock for the threads of one process.

tqdm's own lock also keeps out other processes. For such a lock Python starts another process from 3.14 on, which warns,
in English and after our last line, when this one exits without cleaning up (cli.run() after a failure).
"""

import threading

from tqdm import tqdm

tqdm.set_lock(threading.RLock())
