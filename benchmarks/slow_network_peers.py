"""One process of one contestant of slow_network.py, which starts it; not a program for people.

    python benchmarks/slow_network_peers.py PARENT CONTESTANT EVERY [arguments of train_gpt2_spanish.py]

PARENT is the number of the process that starts it, without which it does not go on. CONTESTANT is ours, the script
itself, or one of two plain programs around the same module, loader and optimiser, so that the exchange is all that
differs: "torch DDP", DistributedDataParallel as it comes, and "torch local SGD", torch's PostLocalSGDOptimizer, which
averages the weights every EVERY steps. Each leaves behind, in the current folder, a line of STEPS at the beginning of
every step, the losses in logs/train.csv, and what auto expected in EXPECTED.
"""

import ctypes
import dataclasses
import json
import os
import signal
import sys
import time
import types
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_gpt2_spanish  # noqa: E402
from aura import cli, dataset, loop, ops, optim, pace, pretrain, start  # noqa: E402
from aura.models import gpt  # noqa: E402

OURS, TORCH_DDP, TORCH_LOCAL = "ours", "torch DDP", "torch local SGD"
STEPS, EXPECTED = "steps.txt", "expected.json"
INTERFACE = "eth0"  # of a machine of tests/hosts.py
DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG, prctl(2)


class Marks:
    """The file STEPS: at each call a line with the time in seconds and the bytes that the interface has sent."""

    def __init__(self):
        self.file = open(STEPS, "w", buffering=1, encoding="utf-8")  # noqa: SIM115 (open as long as the process)
        self.counter = Path("/sys/class/net", INTERFACE, "statistics", "tx_bytes")

    def __call__(self, *_):
        sent = int(self.counter.read_text()) if self.counter.exists() else 0
        self.file.write(f"{time.monotonic()} {sent}\n")


def ours(words):
    """train_gpt2_spanish.py, watched at the beginning of its steps; leaves the process."""
    train, mark = loop.train, Marks()

    def watched(*args, begin_step=None, **options):
        def begin(step):
            if begin_step is not None:
                begin_step(step)
            mark()

        return train(*args, begin_step=begin, **options)

    loop.train = watched
    keep_expectation()
    sys.argv[1:] = words
    cli.run(train_gpt2_spanish.main)


def keep_expectation():
    """Have what auto expects, {method: seconds per step}, written to EXPECTED."""
    estimate = pace.estimate

    def kept(*args, **options):
        expected = estimate(*args, **options)
        Path(EXPECTED).write_text(json.dumps(expected), encoding="utf-8")
        return expected

    pace.estimate = kept


def peer(name, every, words):
    """A plain training loop with torch's own exchange."""
    args = train_gpt2_spanish.build_parser().parse_args(words)
    config = train_gpt2_spanish.complete(args)
    start.tune_allocator(torch.device("cpu"), sparing=False)
    torch.distributed.init_process_group("gloo")
    place = types.SimpleNamespace(rank=torch.distributed.get_rank(), world_size=torch.distributed.get_world_size(),
                                  device=torch.device("cpu"), print=lambda *_: None)
    data = dataset.latest(args.data_dir)
    ops.use(args.attention)
    module = gpt.GPT(dataclasses.replace(config, vocab_size=data.vocab_size)).init_weights(args.seed).train()
    loader, _ = pretrain.make_loaders(args, place, data)
    betas = optim.BETAS[0], args.beta2
    model, optimizer = module, optim.adamw(module, args.lr, args.weight_decay, betas)
    if name == TORCH_DDP:
        model = torch.nn.parallel.DistributedDataParallel(module)
    else:
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        optimizer = PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(every))
    mark, precision = Marks(), start.choose_precision(args.precision, place.device)
    table = Path(args.log_dir, "train.csv")
    table.parent.mkdir(parents=True)
    with open(table, "w", buffering=1, encoding="utf-8") as file:
        file.write("step,loss\n")
        for step in range(1, args.max_steps + 1):
            mark()
            batch = loader.next()
            with precision.autocast():
                loss = model(batch[:, :-1], batch[:, 1:]) / batch[:, 1:].numel()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), args.grad_clip)
            optimizer.step()
            optimizer.zero_grad()
            file.write(f"{step},{loss.item()}\n")


def main():
    parent, name, every, *words = sys.argv[1:]
    ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != int(parent):  # gone while torch was imported
        sys.exit(1)
    if name == OURS:
        ours(words)
    peer(name, int(every), words)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
