"""How well several processes do against one: `--benchmark` measures it, training reports against it.

Kept in benchmark.json of --log-dir, by number of processes and setting: tokens/s of training steps, and of the same
steps without exchanging gradients. Scaling efficiency is tokens/s over those of one process times the number of
processes; the share of communication is what exchanging takes off the tokens/s.
"""

import contextlib
import json
import statistics
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as c10d

from aura import backend, optim, products, sharding
from aura.errors import OutOfMemory, UserError, agreed, first_line
from aura.files import MISSHAPEN, write_json
from aura.signals import Abandoned
from aura.words import counted

FILE = "benchmark.json"
WARMUP, ROUNDS, EXCHANGES = 2, 8, 3
# Arguments that must be equal where figures are compared.
SETTING = ("batch_size", "precision", "compile", "attention", "grad_checkpointing", "document_attention")


def setting(args, config, device):
    """What must be equal for two figures to be comparable."""
    # A --grad-accum that was not given follows from the number of processes (hrm_training.keep_effective_batch).
    accum = args.grad_accum if "grad_accum" in args.given else None
    return {"config": asdict(config), "device": backend.device_name(device), "grad_accum": accum,
            **{name: getattr(args, name) for name in SETTING}}


def recorded(args, config, device):
    """{number of processes: figures} measured before with the same setting. Raises UserError for a damaged file."""
    ours = setting(args, config, device)
    return {processes: figures for processes, several in _kept(args).items() for figures in several
            if figures["setting"] == ours}


def _kept(args):
    """{number of processes: [figures of each setting]} of the file. Raises UserError for a damaged one."""
    path = Path(args.log_dir, FILE)
    try:
        return {int(processes): [each for each in (several if isinstance(several, list) else [several])  # an older file
                                 if each["setting"]]
                for processes, several in json.loads(path.read_text(encoding="utf-8")).items()}
    except FileNotFoundError:
        return {}
    except (OSError, *MISSHAPEN) as problem:
        raise UserError(f"{str(path)!r} no se puede leer o está dañado ({first_line(problem)}): bórrelo, y mida otra "
                        "vez con --benchmark") from problem


def benchmark(args, dist, loader, precision, config, module, loss_fn):
    """Time training steps with and without exchanging gradients, in turns; print and keep the medians.

    Not for --fsdp, whose weights travel as well. The weights that it trains are not kept.
    """
    optimizer = optim.adamw(module, args.lr, args.weight_decay)
    model = dist.wrap(module.compiled() if args.compile else module)
    times = {True: [], False: []}  # by whether gradients are exchanged
    with loader:
        for number in range(WARMUP + ROUNDS):
            for exchange, seconds in times.items():
                dist.barrier()
                started = time.perf_counter()
                _accumulate(model, loss_fn, loader, args.grad_accum, precision, exchange)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                backend.wait(dist.device)
                slowest = max(dist.gather_objects(time.perf_counter() - started))
                if number >= WARMUP:
                    seconds.append(slowest)
    tokens = args.batch_size * args.seq_len * args.grad_accum * dist.world_size
    _tell(args, dist, config, {
        "tokens_per_s": tokens / statistics.median(times[True]),
        "without_exchange": tokens / statistics.median(times[False]),
        "fastest_s": min(times[True]), "slowest_s": max(times[True]), "setting": setting(args, config, dist.device)})


@contextlib.contextmanager
def enough_memory(dist):
    """A block in which no rank waits for another. Raises OutOfMemory on all where the memory of one is not enough."""
    short = None
    try:
        yield
    except (RuntimeError, MemoryError) as problem:
        short = backend.out_of_memory(problem)
        if not short:
            raise
    if whose := next(filter(None, dist.gather_objects(short)), None):
        raise agreed(OutOfMemory, f"no basta la memoria de {whose}")


def step_seconds(dist, model, loss_fn, loader, grad_accum, precision, request, alone=False):
    """Median time, on the slowest rank, of forward and backward of a step. Gradients are forgotten. alone: whether
    `model` exchanges nothing; then it raises as enough_memory() does. Raises Abandoned on all ranks once one was asked
    to stop, as its `request` tells."""
    times = []
    for _ in range(1 + ROUNDS):
        dist.barrier()
        with enough_memory(dist) if alone else contextlib.nullcontext():
            started = time.perf_counter()
            _accumulate(model, loss_fn, loader, grad_accum, precision, exchange=True)
            backend.wait(dist.device)
            seconds = time.perf_counter() - started
        times.append(_slowest(dist, seconds, request))
        model.zero_grad(set_to_none=True)
    return statistics.median(times[1:])  # the first one allocates


def _slowest(dist, seconds, request):
    several, asked = zip(*dist.gather_objects((seconds, request.number)), strict=True)
    if any(asked):
        raise Abandoned
    return max(several)


def exchange_seconds(dist, parameters, grad_accum, dtype, request):
    """(bytes, median seconds on the slowest rank) of what a step of a model with so many parameters exchanges, with
    nothing else to do meanwhile: gradients in float32, added up over the ranks; if it is cut, also its weights, as
    dtype, gathered for forward and backward of each micro-batch. Raises as enough_memory() and step_seconds() do."""
    share_of, times = -(-parameters // dist.world_size), []
    with enough_memory(dist):
        whole = torch.zeros(share_of * dist.world_size, device=dist.device)
        weights = whole.to(dtype or torch.float32)
        part, cut = weights[:share_of].clone(), torch.empty_like(whole[:share_of])
    gathers = 2 * grad_accum if dist.sharded else 0
    for _ in range(1 + EXCHANGES):
        dist.barrier()
        started = time.perf_counter()
        for _ in range(gathers):
            sharding.GATHER(weights, part)
        if dist.sharded:
            sharding.SCATTER(cut, whole)
        else:
            c10d.all_reduce(whole)
        backend.wait(dist.device)
        times.append(_slowest(dist, time.perf_counter() - started, request))
    return parameters * (4 + gathers * weights.element_size()), statistics.median(times[1:])


def _accumulate(model, loss_fn, loader, grad_accum, precision, exchange):
    with products.step(model):
        for micro in range(grad_accum):
            with sharding.exchanging(model, exchange and micro == grad_accum - 1):
                with precision.autocast():
                    loss, tokens = loss_fn(model, loader.next())
                (loss / tokens / grad_accum).backward()


def _tell(args, dist, config, figures):
    known = recorded(args, config, dist.device)
    one, rate = known.get(1), figures["tokens_per_s"]
    dist.print(f"Rendimiento con {counted(dist.world_size, 'proceso')}: {rate:.0f} tokens/s (pasos de "
               f"{figures['fastest_s']:.3f} a {figures['slowest_s']:.3f} s)")
    if dist.world_size > 1:
        alone = figures["without_exchange"]
        dist.print(f"Comunicación: {100 * max(0.0, 1 - rate / alone):.1f} % (sin intercambiar gradientes, {alone:.0f} "
                   "tokens/s)")
        dist.print(f"Eficiencia de escala: {100 * rate / dist.world_size / one['tokens_per_s']:.1f} % de "
                   f"{dist.world_size} veces un proceso ({one['tokens_per_s']:.0f} tokens/s)" if one else
                   "Eficiencia de escala: falta la cifra de un proceso; repita la orden con uno solo y --benchmark")
    if dist.main:
        kept = _kept(args)
        others = [each for each in kept.get(dist.world_size, []) if each["setting"] != figures["setting"]]
        kept[dist.world_size] = [*others, figures]
        write_json(Path(args.log_dir, FILE), {str(processes): several for processes, several in sorted(kept.items())})


def yardsticks(measured, world_size):
    """What report.Reporter compares tokens/s with, from recorded()."""
    one, these = measured.get(1), measured.get(world_size)
    return {"ideal": world_size * one["tokens_per_s"] if one and world_size > 1 else None,
            "unexchanged": these["without_exchange"] if these and world_size > 1 else None}
