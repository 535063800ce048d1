"""How benchmarks/gpu.py measures: a case against float64 first, then in turns by the card's clock, and its rows."""

import collections
import functools
import itertools
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gpu_cases  # noqa: E402
import measure  # noqa: E402

TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}  # relative, against float64
SAMPLE_MS = 20  # a sample repeats calls until it lasts about this long,
MOST_CALLS = 64  # but at most so many: the card's queue holds a thousand launches, and a call may make a dozen
CLOCK_HZ = 2e9  # of a card, about
SMALL_VALUES = 2**24  # 32 MiB in bfloat16: what a norm of 16,384 rows of 1024 reads, and what it writes
SMALL_PAIRS = 8  # of such tensors: more than a card's cache holds
MOST_PAUSE_S = 0.1  # before a sample


class Rejected(Exception):
    """A contestant has computed something wrong."""


def as_tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


def upstream_of(outputs):
    return [torch.randn_like(y) for y in outputs]


def reason(problem):
    """An exception in one line."""
    problem = getattr(problem, "inner_exception", problem)  # torch.compile's own begin with the name of a backend
    return (str(problem).strip() or repr(problem)).splitlines()[0]


def leave_out(name, problem):
    """Say why a peer is not measured. What is ours cannot be left out."""
    if name in ("ours", *gpu_cases.FURTHER) and name != gpu_cases.COMPILED:  # torch.compile may lack something here
        raise problem
    print(f"  {name} no se mide: {reason(problem)}", file=sys.stderr)


def check(case):
    """{contestant: (forward, backward error)} against float64; peers that are refused or wrong are left out of the
    case."""
    inputs = [x.detach() for x in case.inputs]
    wide = [x.double().requires_grad_() for x in inputs]
    exact = as_tuple(case.exact(*wide))
    torch.manual_seed(gpu_cases.SEED)
    upstream = [y.to(inputs[0].dtype) for y in upstream_of(exact)]
    backward = gpu_cases.BACKWARD in case.work
    exact_gradients = torch.autograd.grad(exact, wide, [y.double() for y in upstream]) if backward else ()
    found, playing = {}, []
    for contestant in case.contestants:
        leaves = [x.clone().requires_grad_() for x in inputs]
        try:
            with contestant.context():
                outputs = as_tuple(contestant.run(*leaves))
                gradients = torch.autograd.grad(outputs, leaves, upstream) if backward else ()
            errors = [measure.errors(got, want)[0] for got, want in ((outputs, exact), (gradients, exact_gradients))]
            if not all(error < TOLERANCE[inputs[0].dtype] for error in errors):
                raise Rejected(f"resultado rechazado: {contestant.name}, {case.op} {case.variant} {case.shape}, "
                               f"errores relativos {errors}")
        except Exception as problem:  # of compilers too, who have their own kinds
            leave_out(contestant.name, problem)
        else:
            found[contestant.name] = errors
            playing.append(contestant)
    case.contestants = playing
    return found


def timer(device):
    """A function (call, times) -> milliseconds of one call, by the device's own clock."""
    if device == "cpu":
        def wall(call, times):
            begin = time.perf_counter()
            for _ in range(times):
                call()
            return 1e3 * (time.perf_counter() - begin) / times
        return wall
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def events(call, times):
        if times > 1:  # beside a call as long as a sample a gap counts for nothing
            torch.cuda._sleep(pause(call, times))
        begin.record()
        for _ in range(times):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / times
    return events


def pause(call, times):
    """For how many cycles the card has to pause so that meanwhile so many calls are put into its queue."""
    # Behind a pause the calls wait in the queue until all of them are there. A card that began at once would wait for
    # Python between short kernels, and the clock would measure how fast Python is.
    began = time.perf_counter()
    call()
    return int(CLOCK_HZ * min(MOST_PAUSE_S, 2 * times * (time.perf_counter() - began)))


def cache_bytes(device):
    """The size of a card's last cache."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0


def input_sets(case):
    """The inputs of a case and so many copies that all together take twice the card's cache: otherwise a share of the
    memory's ceiling would be measured from the cache."""
    wanted = -(-2 * cache_bytes(case.inputs[0].device) // sum(x.nbytes for x in case.inputs))
    return [case.inputs, *([x.detach().clone().requires_grad_() for x in case.inputs] for _ in range(wanted - 1))]


def in_turn(functions):
    """A function that calls the next of `functions` each time. A result lives until its function is called again, so
    that the others write theirs elsewhere."""
    turns, results = itertools.cycle(functions), collections.deque(maxlen=len(functions))
    return lambda: results.append(next(turns)())


def calls(case, direction):
    """{contestant: (what is timed, its context)}. Backward is repeated over the same forwards, which are made here."""
    found, sets = {}, input_sets(case)
    for contestant in case.contestants:
        functions = []
        for inputs in sets:
            if direction != gpu_cases.BACKWARD:
                functions.append(functools.partial(contestant.run, *(x.detach() for x in inputs)))
                continue
            with contestant.context():
                outputs = as_tuple(contestant.run(*inputs))
            functions.append(functools.partial(torch.autograd.grad, outputs, inputs, upstream_of(outputs),
                                               retain_graph=True))
        found[contestant.name] = in_turn(functions), contestant.context
    return found


def takes_part(name, call, context):
    """Whether a first call succeeds: torch.compile needs triton, a C compiler and Python's headers."""
    try:
        with context():
            call()
    except Exception as problem:
        leave_out(name, problem)
        return False
    return True


def calls_of_a_sample(call, clock):
    """How many calls a sample takes, found out with few calls where they are long."""
    if clock(call, 1) >= SAMPLE_MS:
        return 1
    return max(1, min(MOST_CALLS, round(SAMPLE_MS / max(1e-3, clock(call, 3)))))


def take_turns(playing, rounds, clock):
    """{name: milliseconds of a call in each round}, every round in another order. The first two calls are not counted,
    nor the next three where they are short; peers whose first call fails are left out."""
    times = {}
    for name, (call, context) in playing.items():
        if takes_part(name, call, context):
            with context():
                times[name] = calls_of_a_sample(call, clock)
    samples, names = {name: [] for name in times}, list(times)
    for number in range(rounds):
        for name in names[number % len(names):] + names[:number % len(names)]:
            call, context = playing[name]
            with context():
                samples[name].append(clock(call, times[name]))
    return samples


def rows_of(case, direction, samples, errors, ceilings):
    """A row for each peer: times, their ratio, and what part of the ceiling ours reaches."""
    mine, rows = [1e-3 * sample for sample in samples["ours"]], []
    rate = case.work[direction] / statistics.median(mine)
    for name in samples:
        if name == "ours":
            continue
        which = int(direction == gpu_cases.BACKWARD)
        rows.append({"op": case.op, "variant": case.variant, "shape": list(case.shape), "direction": direction,
                     "peer": name, **measure.comparison(mine, [1e-3 * sample for sample in samples[name]]),
                     "rate": rate, "ceiling": case.ceiling, "share_of_ceiling": rate / ceilings[case.ceiling]})
        rows[-1]["peer_share_of_ceiling"] = rows[-1]["share_of_ceiling"] / rows[-1]["ratio"]
        if errors:
            rows[-1] |= {"error": errors["ours"][which], "peer_error": errors[name][which]}
    return rows


def small_copies(device):
    """A function that copies one small tensor, a different one each time."""
    tensors = [torch.ones(SMALL_VALUES, device=device, dtype=torch.bfloat16) for _ in range(2 * SMALL_PAIRS)]
    return in_turn([functools.partial(target.copy_, source)
                    for source, target in zip(tensors[::2], tensors[1::2], strict=True)])


def ceilings(clock):
    """Bytes per second (read and written) of a copy of a large tensor and of small ones, and FLOP per second of a
    product in bf16; the best of several tries."""
    source = torch.ones(2**28, device="cuda")
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    copy = min(clock(lambda: target.copy_(source), 5) for _ in range(8))
    copy_small = small_copies("cuda")
    small = min(clock(copy_small, MOST_CALLS) for _ in range(8))
    product = min(clock(lambda: a @ b, 5) for _ in range(8))
    return {"copy": 2 * source.nbytes / (1e-3 * copy), "small copy": 4 * SMALL_VALUES / (1e-3 * small),
            "matmul": 2 * 8192**3 / (1e-3 * product)}
