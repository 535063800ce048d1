"""Where the time of a rank that trains goes: to computing, or to waiting for data, for other ranks, for the disk."""

import contextlib
import signal
import time
from dataclasses import dataclass

WINDOW_SECONDS = 2.0
WINDOWS = 8  # how many of the last windows are kept
STEP_PHASES = ("compute", "data", "communication", "save")  # what the time of a step is divided into


@dataclass(frozen=True)
class Window:
    """A few consecutive steps of one rank. step: the last of them. steps: how many. The times are seconds per step and
    add up to `seconds`, which leaves evaluations out. communication: waiting for other ranks and sending, as far as it
    was not hidden behind computing, None where it cannot be told apart from compute (shards on CUDA). save: writing
    checkpoints and logs. tokens_per_s: of this rank; samples, where the script counts those."""

    step: int
    steps: int
    seconds: float
    compute: float
    data: float
    communication: float | None
    save: float
    tokens_per_s: float


class Clock:
    """Where the time of the training thread goes: every instant belongs to one phase, to compute unless told otherwise.

    dist: the Session. step, steps, loss: assigned by the loop. windows: of Window, the last ones. ended: how an
    ordinary end came about, in words. unit: Spanish for what a step counts.
    """

    def __init__(self, dist):
        self.step = self.steps = 0
        self.loss = self.ended = None
        self.unit = "tokens"
        self.windows, self.events = (), ()
        self.at = "start", time.perf_counter()  # one tuple, so that another thread never sees half a change
        self.spent = dict.fromkeys(STEP_PHASES, 0.0)
        self.exchanges = dist.grouped and not dist.sharded  # once, at the end of backward
        self.blind = dist.sharded and dist.device.type == "cuda"  # what shards wait for is then in the card's queue
        if self.exchanges and dist.device.type == "cuda":
            import torch

            self.events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self.stream = torch.cuda.current_stream(dist.device)

    def begin(self, step, steps):
        """The steps begin, after `step` of `steps` in all."""
        self.step, self.steps = step, steps
        self.enter("compute")
        self._open()

    def enter(self, phase):
        """What comes now belongs to `phase`, until the next call."""
        now = time.perf_counter()
        left, since = self.at
        if left in self.spent:
            self.spent[left] += now - since
        self.at = phase, now

    @contextlib.contextmanager
    def phase(self, name):
        """A block whose time belongs to `name`; inside any phase but compute it still belongs to that one."""
        if self.at[0] != "compute":
            yield
            return
        self.enter(name)
        try:
            yield
        finally:
            self.enter("compute")

    def backward(self, loss, last):
        """loss.backward(). In the last micro-batch of a step all that follows the last gradient is waiting for other
        ranks, until exchanged() is called: autograd runs queued callbacks in order, and this one is queued before
        DistributedDataParallel's own wait. On CUDA, where that wait is in the card's queue, events stand
        before and behind it."""
        if self.exchanges and last:
            from torch.autograd import Variable

            loss.register_hook(lambda gradient: Variable._execution_engine.queue_callback(self._computed))
        loss.backward()

    def exchanged(self, last):
        """What follows backward() is computing again; in the last micro-batch of a step the gradients are exchanged."""
        if self.events and last:
            self.events[1].record(self.stream)
        self.enter("compute")

    def _computed(self):
        if self.events:
            self.events[0].record(self.stream)
        else:
            self.enter("communication")

    def now(self):
        """(phase, seconds in it), for the thread of heartbeat."""
        phase, since = self.at
        if self.events and phase == "compute" and self.events[0].query() and not self.events[1].query():
            phase = "communication"
        return phase, time.perf_counter() - since

    def lap(self, count):
        """A step has ended, in which this rank saw `count` tokens or samples; by now the card has done all that
        was queued before sync.weigh()."""
        self.enter(self.at[0])
        if self.events:
            waited = self.events[0].elapsed_time(self.events[1]) / 1000
            self.spent["communication"] += waited
            self.spent["compute"] -= waited
        self.laps += 1
        self.count += count
        if self.at[1] - self.opened >= WINDOW_SECONDS:
            self._close()
            self._open()

    def _open(self):
        self.laps = self.count = 0
        self.spent, self.opened = dict.fromkeys(STEP_PHASES, 0.0), self.at[1]

    def _close(self):
        seconds = sum(self.spent.values())
        share = {name: spent / self.laps for name, spent in self.spent.items()}
        if self.blind:
            share |= {"compute": share["compute"] + share["communication"], "communication": None}
        window = Window(self.step, self.laps, seconds / self.laps, tokens_per_s=self.count / seconds, **share)
        self.windows = (*self.windows, window)[-WINDOWS:]

    def end(self, signal_number=0):
        """The steps are over; signal_number: of the signal that asked for it, 0 when all of them are done."""
        self.enter("end")
        if signal_number:
            self.ended = f"detenido por {signal.Signals(signal_number).name} en el paso {self.step}"
