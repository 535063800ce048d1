"""What the benchmarks of kernels and of training steps share: taking turns, ceilings, errors, rows.

Fair play is here, in one place: everybody runs in this process, under the same allocator settings and the same number
of threads, in turns, round by round, each round in another order; the first call of each is not counted.
"""

import argparse
import contextlib
import gc
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch._functorch.config

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


from aura import backend, cgroup, extension, products, start  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SAMPLE_S = 0.002  # a sample repeats short calls until it lasts about this long, so that reading the clock costs nothing
SLOW_RATIO, SLOW_ROUNDS = 1.5, 2  # a peer this far behind another of its kind leaves after 2 rounds,
SLOW_S, VERY_SLOW_S = 0.02, 0.1  # if a call takes more than 20 ms; if more than 100 ms, before them, with one sample
MOST_ROUNDS = 200
CACHED_BYTES = 12 * 2**20  # 4096 x 768 in fp32
SLOW_PRODUCT_S = 0.1
LONG_S, LONG_ROUNDS = 2.0, 3  # a comparison that has taken this long ends after 3 rounds


def settle() -> None:
    """The allocator settings that training uses, for everybody."""
    start.tune_allocator(torch.device("cpu"), sparing=False)


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """A block after which the number of threads and the compiler's settings are as before, whatever happens."""
    before = torch.get_num_threads()
    try:
        # Without this, what torch.compile makes refuses a second backward over the same forward.
        with torch._functorch.config.patch(donated_buffer=False):
            yield
    finally:
        torch.set_num_threads(before)


# ---- Arguments ------------------------------------------------------------------------------------------------------


def threads(text: str) -> list[int]:
    """'1,2' as numbers, without those beyond the cores this process may use."""
    cores = cgroup.cores()
    return [n for n in sizes(text) if n <= cores] or [cores]


def sizes(text: str) -> list[int]:
    """numbers(), each at least 1."""
    found = numbers(text)
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: se cuenta desde 1")
    return found


def numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} no es una lista de números separados por comas") from None


def file(text: str) -> str:
    """A file for the results, checked before they are measured, and not only when they are written at the end."""
    if Path(text).is_dir() or not os.access(Path(text).parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"no se puede escribir en {text!r}; indique otro fichero")
    return text


def existing(text: str) -> Path:
    """A file that is there, by its whole path, as children run in other folders."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text!r} no existe o no es un fichero")
    return Path(text).resolve()


def names(*known: str) -> Callable[[str], list[str]]:
    """A type for argparse: a comma-separated list of some of `known`."""

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} no existe; hay: {', '.join(known)}")
        return chosen

    return parse


# ---- Time -----------------------------------------------------------------------------------------------------------


def seconds(function: Callable, repeats: int, context: Callable) -> float:
    """Time of one call, from `repeats` in a row. What `context` does on entering is not counted."""
    with context():
        begin = time.perf_counter()
        for _ in range(repeats):
            function()
        return (time.perf_counter() - begin) / repeats


def take_turns(
    functions: dict[str, Callable],
    contexts: dict[str, Callable] | None = None,
    kinds: dict[str, str] | None = None,
    *,
    rounds: int,
    budget_s: float = 0.0,
    long_s: float = LONG_S,
) -> dict[str, list[float]]:
    """Seconds per call of each function, one sample a round: at least `rounds` rounds (3 if they take `long_s`), and
    more until `budget_s`.

    kinds: of several slow functions of one kind only the fastest stays to the end; the lists of the rest are shorter.
    Every function must have been called before, so that its first call here has nothing to make or compile.
    """
    contexts, kinds = contexts or {}, kinds or {}
    context = {name: contexts.get(name, contextlib.nullcontext) for name in functions}
    first = {name: seconds(function, 1, context[name]) for name, function in functions.items()}
    repeats = {}
    for name, function in functions.items():
        short = first[name] < VERY_SLOW_S  # then its first call may have cost more than a repeated one
        repeats[name] = math.ceil(SAMPLE_S / (seconds(function, 1, context[name]) if short else first[name]))
    samples = {name: [time_taken] for name, time_taken in first.items()}
    racing = _leaders(list(functions), samples, kinds, VERY_SLOW_S)
    rounds_done = int(min(first.values()) >= VERY_SLOW_S)  # if all are slow, that was a round
    if not rounds_done:
        for name in racing:
            samples[name].clear()
    collecting = gc.isenabled()
    gc.disable()
    begin = time.perf_counter()
    try:
        for done in range(rounds_done, MOST_ROUNDS):
            spent = time.perf_counter() - begin
            if (done >= rounds and spent >= budget_s) or (done >= LONG_ROUNDS and spent >= long_s):
                break
            if done == SLOW_ROUNDS:
                racing = _leaders(racing, samples, kinds, SLOW_S)
            for name in racing[done % len(racing) :] + racing[: done % len(racing)]:
                samples[name].append(seconds(functions[name], repeats[name], context[name]))
    finally:
        if collecting:
            gc.enable()
    return samples


def _leaders(racing, samples, kinds, least):
    """Those who stay: not slower than `least` seconds, or not far behind the best of their kind."""
    best = {}
    for name in racing:
        kind = kinds.get(name, name)
        best[kind] = min(best.get(kind, math.inf), min(samples[name]))
    return [n for n in racing if min(samples[n]) <= max(least, SLOW_RATIO * best[kinds.get(n, n)])]


def percentile(values: list[float], share: float) -> float:
    """Linear interpolation between the two nearest ranks."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def comparison(ours: list[float], peer: list[float]) -> dict:
    """The times of a row in ms and the ratio of the medians, over the rounds in which both took part. ratio_min and
    ratio_max: the least and the greatest ratio of one round."""
    ours = ours[: len(peer)]
    ratios = [theirs / mine for mine, theirs in zip(ours, peer, strict=True)]
    return {
        "ours_ms": 1e3 * statistics.median(ours),
        "ours_min": 1e3 * min(ours),
        "ours_p90": 1e3 * percentile(ours, 0.9),
        "peer_ms": 1e3 * statistics.median(peer),
        "peer_min": 1e3 * min(peer),
        "peer_p90": 1e3 * percentile(peer, 0.9),
        "ratio": statistics.median(peer) / statistics.median(ours),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "rounds": len(ratios),
    }


# ---- Errors ---------------------------------------------------------------------------------------------------------


def errors(results, references) -> tuple[float, float]:
    """(relative RMS error, greatest absolute error) against float64: the worst of several tensors, and inf where one is
    NaN, so that no comparison lets it pass."""
    found = [(0.0, 0.0)]
    for result, reference in zip(results, references, strict=True):
        difference = result.detach().double() - reference
        found.append(((difference.norm() / reference.norm()).item(), difference.abs().max().item()))
    return tuple(max(math.inf if math.isnan(error) else error for error in each) for each in zip(*found, strict=True))


def product_ceilings(dtype: str) -> tuple[str, ...]:
    """The ceilings of matrix products: in bf16 one may also widen and multiply in fp32, which some machines do
    faster."""
    return ("matmul_fp32_gflops",) if dtype == "fp32" else ("matmul_fp32_gflops", "matmul_bf16_gflops")


# ---- Machine --------------------------------------------------------------------------------------------------------


def ceilings(quick: bool = False) -> dict[str, float]:
    """What the machine gives at the present number of threads: a product of 2048^3 in GFLOP/s (by the faster of torch's
    libraries; of 512^3 where that is slow already), and GB/s (read and written) of a copy of 512 MB and of one that a
    large cache holds; the best of several tries."""
    result = {}
    tries = 3 if quick else 8
    for name, dtype in DTYPES.items():
        for size in (512, 2048):
            a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
            space = products.space(a, b, size)
            products.mm(a, b, space)
            best = min(seconds(lambda a=a, b=b, to=space: products.mm(a, b, to), 1, contextlib.nullcontext)
                       for _ in range(tries))
            result[f"matmul_{name}_gflops"] = 2 * size**3 / best / 1e9
            if best > SLOW_PRODUCT_S:  # 64 of them would take minutes, as in bfloat16 without AVX-512
                break
    for name, size in (("copy_gbs", 2**26 if quick else 2**27), ("copy_cached_gbs", CACHED_BYTES // 4)):
        source = torch.ones(size)
        target = torch.zeros_like(source)
        repeats = max(1, 2**23 // size)
        best = min(seconds(lambda a=source, b=target: b.copy_(a), repeats, contextlib.nullcontext)
                   for _ in range(tries))
        result[name] = 2 * size * 4 / best / 1e9
    return result


def environment() -> dict:
    """Versions, device, and the instruction sets that our kernels and torch's have chosen."""
    module = extension.load()
    return {
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "device": backend.device_name(torch.device("cpu")),
        "extension": extension.status(),
        "instruction_set": module.cpu_isa() if module else None,
        "torch_instruction_set": torch.backends.cpu.get_cpu_capability(),
    }


class Neighbours:
    """How busy other processes keep the machine's cores meanwhile (Linux; elsewhere unknown)."""

    def __init__(self):
        self.begin = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """(seconds on the clock, CPU seconds of all processes, those of this one and its children)."""
        path = Path("/proc/stat")
        ticks = [int(word) for word in path.read_text().split("\n", 1)[0].split()[1:]] if path.exists() else [0] * 8
        idle = ticks[3] + ticks[4]  # with the time waiting for disks; guests' time is part of user time
        own = os.times()
        return time.monotonic(), (sum(ticks[:8]) - idle) / os.sysconf("SC_CLK_TCK"), sum(own[:4])

    def share(self) -> float | None:
        """Of all cores' time since the beginning, the part that others took."""
        if not Path("/proc/stat").exists():
            return None
        wall, everyone, own = (after - before for before, after in zip(self.begin, self._now(), strict=True))
        return max(0.0, everyone - own) / (wall * (os.cpu_count() or 1))

    def warn(self) -> float | None:
        share = self.share()
        if share is not None and share > 0.03:
            print(f"Aviso: otros procesos ocuparon un {share:.0%} de la máquina mientras tanto; repítalo sin ellos.")
        return share


def write(path: str | None, result: dict) -> None:
    if path:
        Path(path).write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
