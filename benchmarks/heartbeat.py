"""What heartbeats cost a run: in the training thread for each step, and in the thread that sends them, each second.

    python benchmarks/heartbeat.py --json heartbeat.json

The training thread's part is the difference between two steps that compute next to nothing, one with the calls of
loop.train to its Clock and one without, in turns; it is given as a share of a real step of a GPT preset. The sending
thread's part is its processor time on rank 0, which also has to fetch the beats of ranks on other machines from the
store.
"""

import contextlib
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as c10d

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import measure  # noqa: E402
import train_step  # noqa: E402

import train_gpt2_spanish  # noqa: E402
from aura import cli, heartbeat  # noqa: E402
from aura.clock import WINDOWS, Clock, Window  # noqa: E402
from aura.models import gpt  # noqa: E402
from aura.session import Session  # noqa: E402

SHORT_INTERVAL, WARMUP = 0.01, 20  # seconds between beats, and how many are not counted
BEAT_BYTES = 2500  # of a beat with all its windows


def clock_seconds(grad_accum, rounds):
    """Samples, in seconds, of what loop.train's calls to its Clock take in a step."""
    weight, clock = torch.ones(1, requires_grad=True), Clock(Session(store=object()))
    clock.begin(0, 1)

    def bare():
        for _ in range(grad_accum):
            weight.sum().backward()

    def clocked():
        for micro in range(grad_accum):
            with clock.phase("data"):
                pass
            clock.backward(weight.sum(), micro == grad_accum - 1)
            clock.enter("compute")
        for _ in range(2):  # the norm of shards; what the ranks agree on
            with clock.phase("communication"):
                pass
        clock.step, clock.loss = clock.step + 1, 1.0
        clock.lap(1)

    samples = measure.take_turns({"clocked": clocked, "bare": bare}, rounds=rounds)
    return [a - b for a, b in zip(samples["clocked"], samples["bare"], strict=True)]


def step_seconds(preset, rounds):
    """Samples, in seconds, of a training step of a GPT preset with its own batch."""
    config, batch_size = gpt.PRESETS[preset], train_gpt2_spanish.RECIPES[preset]["batch_size"]
    contestant = train_step.Contestant(preset, gpt.GPT(config).init_weights(train_step.SEED), None, train_step.our_loss)
    batch = torch.randint(config.vocab_size, (batch_size, config.seq_len + 1))
    return measure.take_turns({preset: lambda: contestant.step(batch, "fp32")}, rounds=rounds)[preset]


def beat_seconds(remote, beats):
    """Processor seconds of the sending thread for one beat of rank 0, in a group with `remote` ranks elsewhere."""
    store = c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    session = Session(world_size=remote + 1, store=store, machines=["10.0.0.0"] + remote * ["10.0.0.1"])
    before = set(threading.enumerate())
    with tempfile.TemporaryDirectory() as folder, faster(), heartbeat.beating(folder, session) as clock:
        clock.windows = (Window(1, 1, *[1 / 3] * 5, 1e4),) * WINDOWS
        (thread,) = {*threading.enumerate()} - before
        processor, started = time.pthread_getcpuclockid(thread.ident), None
        while started is None or number(folder) < started[0] + beats:
            time.sleep(heartbeat.INTERVAL_SECONDS)
            said = b"%d" % time.monotonic_ns() + b" " * BEAT_BYTES + b"}"
            for rank in range(1, remote + 1):
                store.set(f"heartbeat/{rank}", said)
            if started is None and number(folder) > WARMUP:
                started = number(folder), time.clock_gettime(processor)
        return (time.clock_gettime(processor) - started[1]) / (number(folder) - started[0])


def number(folder):
    """How many beats there have been."""
    return max((beat.number for beat in heartbeat.read(folder)), default=0)


@contextlib.contextmanager
def faster():
    """A block with many beats a second, which does not change what one costs."""
    usual = heartbeat.INTERVAL_SECONDS, heartbeat.FAREWELL_SECONDS
    heartbeat.INTERVAL_SECONDS, heartbeat.FAREWELL_SECONDS = SHORT_INTERVAL, 0.0
    try:
        yield
    finally:
        heartbeat.INTERVAL_SECONDS, heartbeat.FAREWELL_SECONDS = usual


def race(args):
    """Measure, printing as it goes; returns what goes into the JSON file."""
    neighbours = measure.Neighbours()
    result = {"benchmark": "heartbeat", **measure.environment(), "rows": []}
    clock, step = (statistics.median(samples) for samples in (
        clock_seconds(args.grad_accum, args.rounds), step_seconds(args.preset, args.step_rounds)))
    result["rows"].append({"op": "heartbeat", "variant": "training thread", "preset": args.preset,
                           "grad_accum": args.grad_accum, "us_per_step": 1e6 * clock, "step_ms": 1e3 * step,
                           "share": clock / step})
    print(f"Entrenamiento: {1e6 * clock:.1f} µs por paso, el {100 * clock / step:.4f} % de un paso de {args.preset} "
          f"({1e3 * step:.0f} ms)")
    for remote in args.remote:
        beat = beat_seconds(remote, args.beats)
        result["rows"].append({"op": "heartbeat", "variant": "telling thread", "remote": remote, "us_per_beat":
                               1e6 * beat, "share": beat / heartbeat.INTERVAL_SECONDS})
        print(f"Latidos con {remote} procesos en otras máquinas: {1e3 * beat:.2f} ms de procesador por segundo, el "
              f"{100 * beat / heartbeat.INTERVAL_SECONDS:.3f} % de un núcleo")
    result["others_share"] = neighbours.warn()
    return result


def build_parser():
    parser = cli.Parser(description="Mide lo que cuestan los latidos de un entrenamiento, en la CPU.")
    parser.add_argument("--json", type=measure.file, metavar="FICHERO", help="dónde escribir los resultados")
    parser.add_argument("--preset", type=cli.choice(*gpt.PRESETS), default="demo",
                        help="con cuyo paso se compara")
    parser.add_argument("--grad-accum", type=cli.number(int, low=1), default=1, help="microlotes por paso")
    parser.add_argument("--remote", type=measure.numbers, default="0,8",
                        help="procesos en otras máquinas")
    parser.add_argument("--beats", type=cli.number(int, low=1), default=300, help="latidos que se miden")
    parser.add_argument("--rounds", type=cli.number(int, low=1), default=50, help="rondas de las llamadas")
    parser.add_argument("--step-rounds", type=cli.number(int, low=1), default=5, help="pasos del preset")
    return parser


def main(argv=None):
    args = build_parser().parse_args(argv)
    measure.settle()
    with measure.restored():
        result = race(args)
    measure.write(args.json, result)


if __name__ == "__main__":
    cli.run(main)
