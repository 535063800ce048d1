"""DiLoCo: processes that take many steps of their own between two agreements (Douillard et al. 2023), for networks over
which gradients would travel longer than they take to compute.

Every process trains a copy of the model. After `every` steps it sends by how much its weights have left the agreed
ones; the mean over the processes is the gradient of an outer step, Nesterov's, that moves the agreed weights. As in
Streaming DiLoCo (Douillard et al. 2025) the weights are cut into fragments that take turns, one leaving every
every / FRAGMENTS steps, and travel while computing goes on: what arrives replaces what was sent, and the progress made
meanwhile stays. Differences travel in 8 bits (aura/averaging.py); what rounding takes off one is added to the next
(Seide et al. 2014).
"""

import contextlib
import itertools
import math
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as c10d

from aura import averaging
from aura.backend import within
from aura.ema import swapped
from aura.sync import SYNC_LR, SYNC_MOMENTUM, Known, name_run

FRAGMENTS = 8
FORMAT = 2  # of own_state(): since 2 it tells what the means owe
PATIENCE_S = 10.0  # for the others, once this rank was asked to stop: torchrun kills 30 s after it has passed that on
ASK_S = 2.0  # between two looks at the store while waiting; shorter than session.FAREWELL_SECONDS
POLL_S = 0.001
LAG = 2  # steps that a message about a step has to arrive, before all ranks act on it at the same one


@dataclass
class Flight:
    """One fragment on its way. payload: what this rank sends of it. local: this rank's weights there when it left, to
    tell what they have gained since. average: averaging.start() of the payload. begun: when it left, moved later by
    pauses that do not count (see agreed()); None once it has arrived and its time is noted."""

    fragment: int
    payload: torch.Tensor
    local: torch.Tensor
    average: object = None
    begun: float | None = field(default_factory=time.monotonic)


class DiLoCo:
    """What loop.train and start call a sync (see sync.Exact), where ranks agree every `every` steps.

    module: the same weights on every rank. lr, momentum: of the outer step. Takes 12 bytes a parameter on its device:
    the agreed weights, the outer momentum and what rounding still owes, flat in the order of module.parameters(). Of
    n > 2 ranks each keeps 4 / n bytes more in host memory: what rounding owes of the means that it sends.
    """

    method = "diloco"

    def __init__(self, dist, module, every, lr=SYNC_LR, momentum=SYNC_MOMENTUM):
        self.dist, self.every, self.parameters = dist, every, list(module.parameters())
        self.outer_lr, self.outer_momentum = lr, momentum
        self.setting = {"method": "diloco", "every": every, "processes": dist.world_size, "format": FORMAT}
        self.run = self.origin = name_run(dist)
        self.agreed_flat = torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters])
        self.momentum, self.residual = (torch.zeros_like(self.agreed_flat) for _ in range(2))
        self.weights = self._split(self.agreed_flat)
        fragments, size = min(FRAGMENTS, every), len(self.agreed_flat)
        self.cuts = [size * number // fragments for number in range(fragments + 1)]
        self.due = {(number + 1) * every // fragments % every: number for number in range(fragments)}
        self.talk, self.wire = self._connect()
        self.owed = [averaging.nothing_owed(end - begin, dist.world_size)
                     for begin, end in itertools.pairwise(self.cuts)]
        self.flight, self.messages, self.heard, self.own = None, deque(), [], None
        self.request, self.begun, self.step_s = None, None, deque(maxlen=every)
        self.flight_s = deque(maxlen=FRAGMENTS)

    def _connect(self):
        """The groups that messages and fragments have for themselves: one gloo group carries two things at a time, and
        a message must not wait for a fragment. A slow rank takes up what a fast one sends LAG steps later or more; that
        time counts for gloo's time-out, and not for _wait()'s."""
        seconds = (LAG + 2) * self.dist.timeout
        try:  # Ctrl+C is heard meanwhile
            return within(4 * self.dist.timeout, lambda: (
                c10d.new_group(backend="gloo", timeout=timedelta(seconds=seconds)), averaging.connect(seconds)))
        except TimeoutError as problem:
            raise c10d.DistNetworkError(str(problem)) from problem

    def wrap(self, model):
        """`model` as it is: nothing of it travels in backward."""
        return model

    # ---- What the loop calls ----------------------------------------------------------------------------------------

    def weigh(self, loss, count, request, clock):
        """Mean loss per token of this rank, and what a sum over its tokens is multiplied by to be their mean."""
        self.own, self.request = (loss.item(), float(count), request.number), request
        mean = self.own[0] / self.own[1] if count else math.nan
        return mean, 1 / max(1.0, self.own[1])

    def advance(self, step, trouble, clock, *, settle=False, last=False):
        """After `step`: tell the others of it, take what has arrived, send what is due. trouble: what was wrong with
        this rank's step, "" if nothing. last: agree on everything, to the end.

        Returns the Knowns of earlier steps, each LAG steps after it; of all of them when `settle` or `last`, or when
        one asks to stop. Every rank gets the same at the same step.
        """
        now, before = time.monotonic(), self.begun
        self.begun = now
        if before is not None:
            self.step_s.append(now - before)
        with clock.phase("communication"), self._own_if_alone(last):
            self._tell(step, trouble)
            if self.flight:
                self.flight.average.advance()
                self._time_flight()
            if step % self.every in self.due and not last:
                self._arrive()
                self._depart(self.due[step % self.every])
            if last:
                self._finish()
            settle = settle or last
            while self.messages and (settle or len(self.messages) > LAG):
                self.heard.append(self._hear(*self.messages[0]))
                self.messages.popleft()  # heard: one that a lost rank keeps from it stays
                settle = settle or self.heard[-1].stop
            if settle and self.flight:  # or another rank would wait for this one's half through an evaluation
                self.flight.average.share()
        known, self.heard = self.heard, []
        return known

    def unheard(self):
        waiting = self.dist.world_size * sum(count for _, count, *_ in self.messages)
        return int(waiting + sum(known.count for known in self.heard))

    def retreat(self):
        """Put the agreed weights in place of this rank's own."""
        self._put(slice(None), self.agreed_flat)
        if self.flight:
            self.flight.local = self.agreed_flat[self._place(self.flight.fragment)].clone()

    @contextlib.contextmanager
    def agreed(self):
        """A block in which the module holds the agreed weights."""
        begun = time.monotonic()
        with swapped(self.weights, self.parameters):
            yield
        # What is done with them, an evaluation or a checkpoint, is no part of a step, nor of a fragment's way.
        now = time.monotonic()
        self.begun = self.begun and now
        if self.flight and self.flight.begun:
            self.flight.begun += now - begun

    def close(self):
        """Let what is under way arrive before the group ends; it is forgotten, own_state() has told of it."""
        self.request = None  # all is saved, and there is time
        self._forget()

    # ---- What is kept -----------------------------------------------------------------------------------------------

    def state(self):
        """What a checkpoint keeps of the agreement, besides the weights. origin: the name of the run that began it all,
        whatever was started again since."""
        return {**self.setting, "run": self.run, "origin": self.origin, "momentum": self.momentum}

    def own_state(self):
        """What this rank alone knows: with it the run goes on bit for bit."""
        flight = self.flight and {name: getattr(self.flight, name) for name in ("fragment", "payload", "local")}
        return {"local": self._local(slice(None)), "residual": self.residual, "owed": self.owed, "flight": flight}

    @torch.no_grad()
    def restore(self, state, own):
        """Go on from the agreed weights, which the module holds, and the state() stored with them; from where this
        very rank was with its own_state(), None where that is not to be had."""
        self.agreed_flat.copy_(self._local(slice(None)))
        self.residual.zero_()
        self.origin = state.get("origin", self.origin)
        if state.get("method") == "diloco":
            self.momentum.copy_(state["momentum"])
        if own:
            self._put(slice(None), own["local"].to(self.agreed_flat.device))
            self.residual.copy_(own["residual"])
            self.owed = own["owed"]
            if own["flight"]:
                self.flight = Flight(own["flight"]["fragment"], own["flight"]["payload"],
                                     own["flight"]["local"].to(self.agreed_flat.device))
                self._launch()

    # ---- Messages ---------------------------------------------------------------------------------------------------

    def _tell(self, step, trouble):
        """Let all ranks know of this one's step, some time."""
        loss, count, signal_number = self.own
        faults, signals = ([0.0] * self.dist.world_size for _ in range(2))
        faults[self.dist.rank], signals[self.dist.rank] = float(bool(trouble)), float(signal_number)
        message = torch.tensor([*((0.0, 0.0) if trouble else (loss, count)), *faults, *signals], dtype=torch.float64)
        work = c10d.all_reduce(message, group=self.talk, async_op=True)
        self.messages.append((step, 0 if trouble else count, message, work))

    def _hear(self, step, _, message, work):
        self._wait(work)
        (loss, count), faults, signals = message.tolist()[:2], *message[2:].view(2, -1).tolist()
        ranks = [str(rank) for rank, fault in enumerate(faults) if fault]
        trouble = f"pérdida o gradiente no finitos en el rango {', '.join(ranks)}" if ranks else ""
        return Known(step, loss / count if count else math.nan, count, int(max(signals)), trouble)

    # ---- Fragments --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _depart(self, fragment):
        """Send what this rank would change of a fragment. One that is not finite never leaves: its place is taken by
        the agreed weights, and it does not count."""
        place = self._place(fragment)
        local = self._local(place)
        change = self.agreed_flat[place] - local + self.residual[place]
        finite = bool(change.isfinite().all())
        if not finite:
            local = self.agreed_flat[place].clone()
            self._put(place, local)
            change = torch.zeros_like(change)
        payload, sent = averaging.pack_all(change, float(finite), self.dist.world_size)
        self.residual[place] = change - sent
        self.flight = Flight(fragment, payload, local)
        self._launch()

    def _launch(self):
        flight = self.flight
        flight.average = averaging.start(flight.payload, len(flight.local), self.wire, self.owed[flight.fragment],
                                         self._wait)

    def _wait(self, work):
        """work.wait(), but raises DistNetworkError when nothing is heard of the others for the session's time-out.
        Sooner if one has said that it failed, for it is about to leave; and if this process was asked to stop, after
        _patience(), or it might be killed before it has saved anything."""
        asked = last = time.monotonic()
        patience, heard = self._patience(), 0
        while not work.is_completed():
            now = time.monotonic()
            arrived = sum(message.is_completed() for *_, message in self.messages)  # of steps before this rank's
            if arrived > heard:
                heard, last = arrived, now
            if self.request and self.request.number and now - last > patience:
                raise c10d.DistNetworkError(f"no llegó nada en {patience:.0f} s, y se pidió parar")
            if now - last > self.dist.timeout:
                raise c10d.DistNetworkError(f"no llegó nada en {self.dist.timeout:g} s")
            if now - asked > ASK_S:
                if self.dist.failure():
                    raise c10d.DistNetworkError("otro proceso ha fallado")
                asked = now
            time.sleep(POLL_S)
        work.wait()

    def _patience(self):
        """Seconds for which ranks that are well may be silent, as far as steps and fragments have been timed; the
        session's time-out before the first step or, where one is under way, the first fragment has been."""
        if not self.step_s or (self.flight and not self.flight_s):
            return self.dist.timeout
        return max(PATIENCE_S, 2 * max(self.step_s), 2 * max(self.flight_s, default=0.0))

    def _time_flight(self):
        """Note how long what is under way has taken, once it is over."""
        if self.flight.begun and self.flight.average.is_over():
            self.flight_s.append(time.monotonic() - self.flight.begun)
            self.flight.begun = None

    def _arrive(self):
        """Wait for what is under way, if anything, and take the outer step with it: Nesterov's as torch.optim.SGD
        writes it. One operation after another, since some processors fuse two of them and round once: all ranks must
        find the same bits."""
        if self.flight is None:
            return
        mean, place = self._received()
        if mean is not None:
            self.momentum[place].mul_(self.outer_momentum).add_(mean)
            step = self.momentum[place].mul(self.outer_momentum).add_(mean).mul_(self.outer_lr)
            self.agreed_flat[place].sub_(step)
        self._land(place)

    @torch.no_grad()
    def _received(self):
        """(mean change over the ranks that had one, None if none had; the place of the fragment)."""
        flight = self.flight
        mean = flight.average.mean(self.agreed_flat.device)
        self._time_flight()
        self.owed[flight.fragment] = flight.average.owed
        return mean, self._place(flight.fragment)

    @torch.no_grad()
    def _land(self, place):
        """The agreed weights, and on top what this rank has learnt since the fragment left."""
        self._put(place, self.agreed_flat[place] + (self._local(place) - self.flight.local))
        self.flight = None

    def _forget(self):
        """Wait for what is under way, if anything, and take nothing from it."""
        if self.flight:
            self.flight.average.mean(self.agreed_flat.device)
            self.flight = None

    @torch.no_grad()
    def _finish(self):
        """Agree on all weights as they are now: on their mean, without the momentum, which no later step would put
        right. What is under way is told again."""
        self._forget()
        for fragment in range(len(self.cuts) - 1):
            self._depart(fragment)
            mean, place = self._received()
            if mean is not None:
                self.agreed_flat[place].sub_(mean)
            self._land(place)

    @contextlib.contextmanager
    def _own_if_alone(self, last):
        """When another rank is lost in the last step of all, this rank's weights are the agreed ones: where they are
        not yet, no later step would learn again what they have."""
        try:
            yield
        except RuntimeError:
            own = self._local(slice(None))
            if last and own.isfinite().all():
                self.agreed_flat.copy_(own)
            raise

    # ---- One vector of all weights ----------------------------------------------------------------------------------

    def _place(self, fragment):
        return slice(self.cuts[fragment], self.cuts[fragment + 1])

    def _split(self, flat):
        """`flat` as one view for each parameter."""
        parts = flat.split([parameter.numel() for parameter in self.parameters])
        return [part.view_as(parameter) for part, parameter in zip(parts, self.parameters, strict=True)]

    def _pieces(self, place):
        """The parts of the parameters that lie in a place of the vector, as 1-D views."""
        first, last, _ = place.indices(len(self.agreed_flat))
        pieces, begin = [], 0
        for parameter in self.parameters:
            end = begin + parameter.numel()
            if begin < last and end > first:
                pieces.append(parameter.detach().view(-1)[max(first - begin, 0):last - begin])
            begin = end
        return pieces

    def _local(self, place):
        """This rank's weights there, a copy."""
        return torch.cat(self._pieces(place))

    @torch.no_grad()
    def _put(self, place, values):
        pieces = self._pieces(place)
        torch._foreach_copy_(pieces, list(values.split([len(piece) for piece in pieces])))
