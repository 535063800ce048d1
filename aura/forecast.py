"""How fast a rank computes, and what this and the measured network mean for training."""

import contextlib
import math
import statistics
import time
from pathlib import Path

import torch

from aura import allreduce, backend, dashboard, placement
from aura.models import gpt
from aura.products import mm, space
from aura.words import span

WINDOWS, WINDOW_SECONDS = 8, 0.03
SIZES = {"cpu": 512, "cuda": 4096}  # of the square matrices: large enough for full speed
SEQUENCES = 8  # of a micro-batch on each process, as the guides train
BACKWARD = 2 / 3  # of the FLOPs of a step
SHARE = 0.2  # of a step: what waiting for the network should stay below


def compute_speed(device):
    """{"flops": FLOP/s of a matrix product (float32 on a CPU, 16 bits on CUDA), "seconds": of each window per 1e9
    FLOPs, "waited": share of its busiest thread's time in which others had the processor, None where unknown}."""
    size = SIZES[device.type]
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        dtype = torch.bfloat16
    a = torch.ones(size, size, dtype=dtype, device=device)
    result = space(a, a, size)

    def window():
        products, started = 0, time.perf_counter()
        while (passed := time.perf_counter() - started) < WINDOW_SECONDS:
            mm(a, a, result)
            backend.wait(device)
            products += 1
        return passed / (products * 2e-9 * size**3)

    window()  # wakes the threads and the clocks
    before = _scheduled()
    seconds = [window() for _ in range(WINDOWS)]
    return {"flops": 1e9 / statistics.median(seconds), "seconds": seconds,
            "waited": _waited(before, _scheduled()) if device.type == "cpu" else None}


def _scheduled():
    """{thread: (nanoseconds on a processor, nanoseconds ready and waiting for one)} of this process (Linux)."""
    found = {}
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # a thread that has ended
            found[path.parent.name] = tuple(map(int, path.read_text().split()[:2]))
    return found


def _waited(before, after):
    """The waiting share of the thread that wanted a processor most; threads that do not compute want little."""
    spent = [(now[0] - before[thread][0], now[1] - before[thread][1]) for thread, now in after.items()
             if thread in before]
    ran, waited = max(spent, key=sum, default=(0, 0))
    return waited / (ran + waited) if ran else None


def rows(curve, speed):
    """A dict per preset of gpt.PRESETS, for one micro-batch of SEQUENCES a process and step: "preset", "gradient_mb",
    "communication_s" on the network, "waiting_s" of it that backward does not hide, "compute_s", "share" of the step
    that is waiting, "accumulate": micro-batches a step with which this is below SHARE.

    curve: as allreduce.exchange_curve gives it. speed: {rank: compute_speed()}; the slowest sets the pace.
    """
    flops = min(one["flops"] for one in speed.values())
    found = []
    for name, config in gpt.PRESETS.items():
        compute = SEQUENCES * config.seq_len * config.flops_per_token() / flops
        gradients = gpt_gradients(config)
        waiting = allreduce.step_seconds(curve, gradients, BACKWARD * compute)
        found.append({"preset": name, "gradient_mb": 4e-6 * config.parameters(),
                      "communication_s": allreduce.step_seconds(curve, gradients), "waiting_s": waiting,
                      "compute_s": compute, "share": waiting / (waiting + compute),
                      "accumulate": max(1, math.ceil(waiting * (1 - SHARE) / (SHARE * compute)))})
    return found


def lines(found, facts, width):
    """`found` of rows() as a table of at most `width` cells, with advice; [] for one process, which sends nothing."""
    if not found or len(facts) < 2:
        return []
    columns = [("preset", 9, False), ("gradientes", 5, True), ("comunicación", 8, True), ("sin ocultar", 7, True),
               ("cálculo", 7, True), ("parte", 8, True), ("consejo", 9, False)]
    told = dashboard.table(columns, [(
        row["preset"], f"{row['gradient_mb']:.0f} MB", span(row["communication_s"]), span(row["waiting_s"]),
        span(row["compute_s"]), f"{100 * row['share']:.0f} %", _advice(row)) for row in found], width)
    told.append(f"Por paso de {SEQUENCES} secuencias por proceso, con el cálculo al ritmo de los productos de matrices "
                "del más lento.")
    wifi = sorted(rank for rank, fact in facts.items() if fact["network"].get("kind") == "wifi")
    if wifi:
        told.append(f"{placement.told('Va', wifi, 'por Wi-Fi')}: un cable acorta la comunicación.")
    return told


def _advice(row):
    if row["accumulate"] == 1:
        return "la red no frena"
    return f"--grad-accum {row['accumulate']}, o --batch-size {SEQUENCES * row['accumulate']} si cabe"


def gpt_gradients(config):
    """A gpt.GPT's gradients as allreduce.buckets() takes them. Backward begins with the head, whose weights are the
    embedding's, to which both ends of the model add; so their gradient, of the first parameter, is complete last."""
    with torch.device("meta"):
        model = gpt.GPT(config)
    inside = {id(parameter) for parameter in model.h.parameters()}
    parameters = list(model.parameters())
    products = [parameter.numel() if id(parameter) in inside else 0 for parameter in parameters]
    return allreduce.in_turn([parameter.numel() for parameter in parameters], products,
                             before=config.vocab_size * config.n_embd)
