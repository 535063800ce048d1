"""--sync auto: what a step and the network take here, the tokens/s that every method would give, and the choice.

    name, lines = pace.found(dist, module, loss_fn, batch, precision, grad_accum, every)
"""

import statistics
import time
from dataclasses import dataclass

import torch

from aura import allreduce, backend, optim
from aura.allreduce import GRADIENT_BYTES
from aura.averaging import BLOCK
from aura.diloco import FRAGMENTS
from aura.halving import halve
from aura.sync import METHODS
from aura.words import span

REPETITIONS = 20  # of a micro-batch, at most
HALF_BYTES = 2  # of an element, with fp16
TIMED_ELEMENTS = 1 << 22  # at most, of what is timed in proportion: more than a processor's cache holds
SCALE_BYTES = 4  # of each block, with diloco
TIE = 0.05  # so much faster something less exact, or one machine alone, has to be to be preferred
LONGEST_SECONDS = 4.0  # of allreduce.exchange_curve: 8 s in all, however slow the network


@dataclass(frozen=True)
class Pace:
    """What a step takes here without any network.

    compute_s: seconds of all its micro-batches and of AdamW's step, backward_s: of the backward of one, both of the
    slowest rank. own_s: compute_s of every rank. tokens: that each rank takes in a step. ready: for each parameter the
    share of backward after which its gradient is complete; () where backward is taken to go from the last parameter to
    the first and to spend on each in proportion to its elements. by_rows: numbers of the parameters of whose gradients
    ddp sends next to nothing (see exchange.py). halving_s: seconds that fp16 computes besides, of the slowest rank.
    """

    compute_s: float
    backward_s: float
    own_s: list
    tokens: list
    ready: tuple = ()
    by_rows: tuple = ()
    halving_s: float = 0.0


def measure(dist, module, loss_fn, batch, precision, grad_accum, most_seconds=5.0):
    """The Pace of training `module`, which nothing has wrapped yet, on all ranks at once; all of them call it.

    batch: one micro-batch as loss_fn(module, batch) -> (sum of losses, how many count) takes it. Forward and backward
    run once to warm up and then as often as fits into most_seconds, once at least and REPETITIONS times at most; the
    median counts. Where only one run fits, and it took longer than the warm-up, there is a second, and the shorter
    counts. Weights, random state and every part's train() or eval() stay as they were; gradients are None.
    """
    parameters, modes = list(module.parameters()), {part: part.training for part in module.modules()}
    complete = {}  # when, by number of the parameter

    def watch(number, parameter):
        return parameter.register_post_accumulate_grad_hook(
            lambda _: complete.__setitem__(number, time.perf_counter()))

    hooks = [watch(number, parameter) for number, parameter in enumerate(parameters) if parameter.requires_grad]
    dist.barrier()
    try:
        with torch.random.fork_rng([dist.device] if dist.device.type == "cuda" else []):
            module.train()
            warm, first = (_micro_batch(dist, module, loss_fn, batch, precision) for _ in range(2))
            fitting = min(REPETITIONS, int(most_seconds / min(warm[0], first[0])))
            more = max(int(first[0] > warm[0]), fitting - 1)
            taken = [first, *(_micro_batch(dist, module, loss_fn, batch, precision) for _ in range(more))]
    finally:
        for hook in hooks:
            hook.remove()
        for part, mode in modes.items():
            part.training = mode
    middle, launched, count = taken[-1][2:]
    ready = tuple((complete.get(number, launched) - middle) / (launched - middle) for number in range(len(parameters)))
    whole, backward = (statistics.median_low(times) for times in zip(*(one[:2] for one in taken), strict=True))
    elements = sum(parameter.numel() for parameter in parameters)
    update, halving = _update_seconds(elements, dist.device), _halving_seconds(elements, dist.device)
    ranks = dist.gather_objects((whole * grad_accum + update, backward, count * grad_accum, halving, ready))
    own, backwards, tokens, halvings, _ = (list(values) for values in zip(*ranks, strict=True))
    return Pace(max(own), max(backwards), own, tokens, ranks[0][-1], _by_rows(dist, module, parameters), max(halvings))


def _micro_batch(dist, module, loss_fn, batch, precision):
    """(seconds of forward and backward, of backward alone, when backward began, when it was launched, tokens)."""
    started = time.perf_counter()
    with precision.autocast():
        loss, count = loss_fn(module, batch)
    backend.wait(dist.device)
    middle = time.perf_counter()
    (loss / count).backward()
    launched = time.perf_counter()
    backend.wait(dist.device)
    ended = time.perf_counter()
    module.zero_grad(set_to_none=True)
    return ended - started, ended - middle, middle, launched, float(count)


def _update_seconds(elements, device):
    """Seconds of the norm of so many gradients and of AdamW's step with them. In a step of few tokens they are a good
    part of it."""
    part = torch.nn.ParameterList([torch.ones(min(elements, TIMED_ELEMENTS), device=device)])
    optimizer = optim.adamw(part, 1e-3, 0.1)
    part[0].grad = torch.ones_like(part[0])

    def update():
        torch.nn.utils.clip_grad_norm_(part.parameters(), 1.0)
        optimizer.step()

    return _seconds(update, device) * elements / len(part[0])


def _halving_seconds(elements, device):
    """Seconds to round so many gradients to float16 and back, keeping what rounding takes off, as fp16 does for each
    step (see halving.py)."""
    part, scale = torch.ones(min(elements, TIMED_ELEMENTS), device=device), torch.ones((), device=device)

    def halved():
        half, owed = halve(part.div(2).add_(part), scale, 2)
        (half.float() / scale).add_(owed).abs().amax()

    return _seconds(halved, device) * elements / len(part)


def _seconds(work, device):
    """Median seconds of work(), which has run once before."""
    work()
    backend.wait(device)
    taken = []
    for _ in range(3):
        started = time.perf_counter()
        work()
        backend.wait(device)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def _by_rows(dist, module, parameters):
    """Numbers of the parameters that dist.wrap keeps from DistributedDataParallel."""
    apart = set(map(id, dist.by_rows(module)))
    return tuple(number for number, parameter in enumerate(parameters) if id(parameter) in apart)


def estimate(curve, parameters, pace, every):
    """{"ddp": seconds a step, "fp16": ..., "diloco": ...}.

    curve: of allreduce.exchange_curve. parameters: their elements, in the order of module.parameters(). every: steps
    between two agreements of diloco. With the first two a step waits for what backward does not hide and ends with a
    small sum, and fp16 computes more; with diloco it waits for what the steps until the next fragment do not hide.
    """
    agree = allreduce.seconds_for(curve, 0)
    exact = allreduce.step_seconds(curve, _gradients(parameters, pace, pace.by_rows), pace.backward_s)
    halved = allreduce.step_seconds(curve, _gradients(parameters, pace), pace.backward_s, HALF_BYTES)
    fragments = min(FRAGMENTS, every)
    payload = sum(parameters) / fragments * (1 + SCALE_BYTES / BLOCK)
    averaged = allreduce.seconds_for(curve, payload)  # as many bytes as averaging.start() moves, in as many turns
    hidden = every / fragments * pace.compute_s
    return {"ddp": pace.compute_s + exact + agree, "fp16": pace.compute_s + pace.halving_s + halved + agree,
            "diloco": pace.compute_s + max(0.0, averaged - hidden) * fragments / every}


def _gradients(parameters, pace, without=()):
    """What allreduce.buckets takes, without some numbers of parameters."""
    found = list(zip(parameters, pace.ready, strict=True)) if pace.ready else allreduce.in_turn(parameters)
    return [gradient for number, gradient in enumerate(found) if number not in without]


def choose(seconds):
    """The name of the fastest method of estimate(); of those at most TIE slower the most exact."""
    enough = min(seconds.values()) * (1 + TIE)
    return next(name for name in METHODS if seconds[name] <= enough)


def found(dist, module, loss_fn, batch, precision, grad_accum, every, unit="tokens"):
    """(method, [line, line]), the same on all ranks, which all call it: what was measured, what is best and why.

    Arguments as measure() and estimate() take them. unit: Spanish for what loss_fn counts. Takes two or three micro-
    batches, or one and 5 s where those are shorter, and about 8 s on the network at most, however slow it is; where a
    machine stops meanwhile, as long more.
    """
    pace = measure(dist, module, loss_fn, batch, precision, grad_accum)
    curve = allreduce.exchange_curve(dist, LONGEST_SECONDS)
    decision = None
    if dist.main:
        parameters = [parameter.numel() for parameter in module.parameters()]
        seconds = estimate(curve, parameters, pace, every)
        decision = choose(seconds), lines(curve, parameters, pace, seconds, dist.machines, unit)
    return dist.broadcast_tree(decision)


def lines(curve, parameters, pace, seconds, machines, unit="tokens"):
    """Two lines of Spanish: what was measured; what choose() takes and why. seconds: of estimate(). machines: address
    of every rank's machine."""
    name = choose(seconds)
    rates = {method: sum(pace.tokens) / taken for method, taken in seconds.items()}
    alone = _alone(pace, machines)
    others = ", ".join(f"{method} {_figure(rate)}" for method, rate in rates.items() if method != name)
    network = allreduce.step_seconds(curve, _gradients(parameters, pace, pace.by_rows))
    rows = 1e-6 * GRADIENT_BYTES * sum(parameters[number] for number in pace.by_rows)
    whole = "los que viajan enteros" if rows else "los gradientes enteros"
    why = (f"por esta red {whole} tardarían {span(network)} en cada paso" if name != "ddp" else
           f"es exacto, y ninguno de los otros iría más de un {100 * TIE:.0f} % más rápido")
    gain = rates[name] / alone
    slower = (" Aviso: una sola máquina, sin las demás, iría más rápido." if gain < 1 / (1 + TIE) else
              " Aviso: una sola máquina, sin las demás, iría casi igual de rápido." if gain <= 1 + TIE else "")
    mbit, megabytes = 8e-6 * _rate(curve, len(machines)), 1e-6 * GRADIENT_BYTES * sum(parameters)
    apart = f", y {_figure(rows)} de ellos, con ddp, viajan solo por filas" if rows else ""
    return [f"Red: {_figure(mbit)} Mbit/s, {span(curve[0][1])}; un paso: {span(pace.compute_s)} de cálculo; los "
            f"gradientes pesan {_figure(megabytes)} MB{apart}.",
            f"--sync auto elige {name} ({_figure(rates[name])} {unit}/s previstos; {others}, una sola máquina "
            f"{_figure(alone)}): {why}.{slower}"]


def _rate(curve, world_size):
    """Bytes/s through a rank's link in the largest all_reduce that was measured."""
    size, seconds = [point for point in curve if point[1] is not None][-1]
    return 2 * (world_size - 1) / world_size * size / seconds


def _alone(pace, machines):
    """Tokens/s of the machine that is fastest without the others."""
    return max(sum(pace.tokens[rank] for rank in ranks) / max(pace.own_s[rank] for rank in ranks)
               for ranks in ([rank for rank, here in enumerate(machines) if here == machine] for machine in machines))


def _figure(value):
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"
