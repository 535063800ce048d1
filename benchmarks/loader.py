"""Token loader against numpy.memmap loops and nanoGPT-style sampling, on one core.

    python benchmarks/loader.py --json loader.json
    python benchmarks/loader.py --megabytes 20 --rounds 3      quick look

Everybody reads the same windows of the same u16 file in the same order, in one process pinned to one core (our
reading thread included), taking turns round by round; results are compared before anything is timed. The peers are
given their list of windows, ours computes it. The file is in the page cache for all.

In rows "int64 x, y" all deliver the same: inputs and targets, int64 tensors on the CPU. Ours lends a buffer that stays
unchanged until the next call; the peers return new tensors, except "preallocated", which reuses one as ours does. Rows
"uint16 batch" compare the delivery of something else: the narrow batch that is copied to a GPU and widened there.
"""

import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import measure  # noqa: E402

from aura import backend, cli, extension, tokens  # noqa: E402
from aura.shards import HEADER_BYTES, ShardWriter, read_header, verify_shard  # noqa: E402

VOCAB = 50_257
BATCH = 16
SIZES = (128, 512, 1024)


# ---- Peers: each makes a batch from a list of 16 window numbers -----------------------------------------------------


def memmap_loop(data, seq_len):
    """The plain loop: slice, convert, stack."""

    def batch(windows):
        rows = [data[w * seq_len : w * seq_len + seq_len + 1].astype(np.int64) for w in windows]
        both = torch.from_numpy(np.stack(rows))
        return both[:, :-1], both[:, 1:]

    return batch


def memmap_one_conversion(data, seq_len):
    """The loop with one conversion for the whole batch."""

    def batch(windows):
        rows = np.stack([data[w * seq_len : w * seq_len + seq_len + 1] for w in windows])
        both = torch.from_numpy(rows.astype(np.int64))
        return both[:, :-1], both[:, 1:]

    return batch


def preallocated(data, seq_len):
    """As fast as numpy gets: no memmap subclass, no allocation, no slicing of tensors."""
    plain = np.asarray(data)
    rows = np.empty((BATCH, seq_len + 1), np.int64)
    both = torch.from_numpy(rows)
    pair = both[:, :-1], both[:, 1:]

    def batch(windows):
        for row, w in enumerate(windows):
            rows[row] = plain[w * seq_len : w * seq_len + seq_len + 1]
        return pair

    return batch


def nanogpt(data, seq_len):
    """nanoGPT's way: inputs and targets converted window by window, then stacked apart."""

    def batch(windows):
        starts = [w * seq_len for w in windows]
        x = torch.stack([torch.from_numpy(data[i : i + seq_len].astype(np.int64)) for i in starts])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + seq_len].astype(np.int64)) for i in starts])
        return x, y

    return batch


def memmap_narrow(data, seq_len):
    def batch(windows):
        return torch.from_numpy(np.stack([data[w * seq_len : w * seq_len + seq_len + 1] for w in windows]))

    return batch


PEERS: dict[str, Callable] = {
    "numpy.memmap loop": memmap_loop,
    "numpy.memmap one conversion": memmap_one_conversion,
    "numpy preallocated": preallocated,
    "nanoGPT-style": nanogpt,
}


def narrow_reader(module, path, header, seq_len, windows):
    """(restart, next batch) of the host's side of the CUDA path: uint16 batches, requested ahead and taken in order."""
    buffers = torch.empty(8, BATCH, seq_len + 1, dtype=torch.uint16).unbind()
    reader = module.WindowReader(
        files=[(path, header.tokens)],
        addresses=[buffer.data_ptr() for buffer in buffers],
        header_bytes=HEADER_BYTES,
        seq_len=seq_len,
        vocab_size=VOCAB,
        file_width=2,
        buffer_width=2,
    )
    asked, taken = 0, 0

    def restart():
        nonlocal asked, taken
        reader.cancel()
        asked, taken = 0, 0

    def batch():
        nonlocal asked, taken
        while asked < taken + len(buffers) - 1:
            reader.submit(asked % len(buffers), 0, 0, asked * BATCH % (windows - BATCH), BATCH)
            asked += 1
        slot = taken % len(buffers)
        reader.wait(slot)
        taken += 1
        return buffers[slot]

    return restart, batch


# ---- Measuring ------------------------------------------------------------------------------------------------------


def resident() -> dict[str, int]:
    """Resident memory in KiB: the process's own (RssAnon), and pages of mapped files, which the kernel can reclaim."""
    lines = Path("/proc/self/status").read_text().splitlines()
    values = dict(line.split(":", 1) for line in lines)
    return {name: int(values[name].split()[0]) for name in ("RssAnon", "RssFile")}


def grown(before: dict[str, int]) -> dict[str, int]:
    return {name: value - before[name] for name, value in resident().items()}


def seconds(function: Callable, arguments: list[tuple]) -> float:
    begin = time.perf_counter()
    for each in arguments:
        function(*each)
    return time.perf_counter() - begin


def percentiles(function: Callable, arguments: list[tuple]) -> dict[str, float]:
    times = []
    for each in arguments:
        begin = time.perf_counter_ns()
        function(*each)
        times.append((time.perf_counter_ns() - begin) / 1000)
    return {"p50_us": float(np.percentile(times, 50)), "p99_us": float(np.percentile(times, 99))}


def compare(what, dtype, seq_len, ours, restart, peers, orders, rounds) -> list[dict]:
    """One row per peer: medians over the rounds, in which everybody takes a turn."""
    calls, empty = [(order,) for order in orders], [()] * len(orders)
    volume = len(orders) * BATCH * seq_len
    speed = {name: [] for name in ("ours", *peers)}
    for _ in range(rounds):
        restart()
        speed["ours"].append(volume / seconds(ours, empty))
        for name, peer in peers.items():
            speed[name].append(volume / seconds(peer, calls))
    restart()
    latency = percentiles(ours, empty)
    rows = []
    for name, peer in peers.items():
        ratios = [a / b for a, b in zip(speed["ours"], speed[name], strict=True)]
        rows.append(
            {
                "what": what,
                "shape": [BATCH, seq_len],
                "dtype": dtype,
                "direction": "read",
                "threads": 1,
                "unit": "tokens/s",
                "ours": statistics.median(speed["ours"]),
                "peer_name": name,
                "peer": statistics.median(speed[name]),
                "ratio": statistics.median(ratios),
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
                "ours_latency": latency,
                "peer_latency": percentiles(peer, calls),
            }
        )
    return rows


def equal(ours: Callable, peers: dict[str, Callable], orders) -> None:
    for order in orders:
        mine = ours()
        for name, peer in peers.items():
            theirs = peer(order)
            same = torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else all(map(torch.equal, mine, theirs))
            if not same:
                raise SystemExit(f"{name} no da los mismos tokens")


def race(path: str, seq_len: int, batches: int, rounds: int) -> list[dict]:
    header = read_header(path)
    data = np.memmap(path, np.uint16, "r", offset=HEADER_BYTES)
    with tokens.TokenLoader([path], seq_len, BATCH, vocab_size=VOCAB) as loader:
        batches = min(batches, loader.steps_per_epoch - 1)
        orders = tokens.permute(np.arange(batches * BATCH), loader.windows, 0, 0).reshape(-1, BATCH).tolist()
        start = loader.state_dict()
        peers = {name: make(data, seq_len) for name, make in PEERS.items()}
        equal(loader.next_pair, peers, orders)

        def restart():
            loader.load_state_dict(start)

        rows = compare("int64 x, y", "int64", seq_len, loader.next_pair, restart, peers, orders, rounds)
        sliced = {"numpy.memmap loop": peers["numpy.memmap loop"], "nanoGPT-style": peers["nanoGPT-style"]}

        def sliced_here():
            batch = loader.next()
            return batch[:, :-1], batch[:, 1:]

        rows += compare(
            "int64 x, y (sliced by the caller)", "int64", seq_len, sliced_here, restart, sliced, orders, rounds
        )
        module = extension.load()
        if module is not None:
            again, batch = narrow_reader(module, path, header, seq_len, loader.windows)
            narrow = {"numpy.memmap loop, narrow": memmap_narrow(data, seq_len)}
            equal(batch, narrow, orders)
            rows += compare("uint16 batch", "uint16", seq_len, batch, again, narrow, orders, rounds)
    return rows


def memory(path: str) -> dict[str, dict[str, int]]:
    """What one pass over the file adds to the process, ours first: each maps the file for itself."""
    result = {}
    before = resident()
    with tokens.TokenLoader([path], 512, BATCH, vocab_size=VOCAB) as loader:
        for _ in range(loader.steps_per_epoch):
            loader.next()
        result["ours"] = grown(before)
        windows = loader.windows
    before = resident()
    peer = memmap_loop(np.memmap(path, np.uint16, "r", offset=HEADER_BYTES), 512)
    for first in range(0, windows - BATCH, BATCH):
        peer(range(first, first + BATCH))
    result["numpy.memmap loop"] = grown(before)
    return result


def same_order(path: str) -> dict[str, bool]:
    """Whether the ranks of each world size together read what one process reads."""

    def read(rank, world_size):
        arguments = {"vocab_size": VOCAB, "rank": rank, "world_size": world_size}
        with tokens.TokenLoader([path], 128, 30 // world_size, **arguments) as loader:
            return torch.stack([loader.next().clone() for _ in range(50)])

    whole = read(0, 1)
    return {str(n): torch.equal(torch.cat([read(r, n) for r in range(n)], dim=1), whole) for n in (1, 2, 3, 5)}


def make_file(folder: str, megabytes: int) -> str:
    with ShardWriter(folder, "train", VOCAB, tokens_per_shard=megabytes * 500_000) as writer:
        generator = np.random.default_rng(0)
        for _ in range(megabytes):
            writer.write(generator.integers(0, VOCAB, 500_000, dtype=np.uint16))
        [shard] = writer.close()
    return os.path.join(folder, shard["file"])


def table(result: dict) -> None:
    print(f"{result['device']}, un núcleo; {result['extension']}")
    heads = f"{'qué':34} {'T':>5} {'nuestro':>12} {'rival':28} {'tokens/s':>12} {'razón (mín-máx)':>20}"
    print(heads, f"{'p50/p99 µs':>14}")
    for row in result["rows"]:
        ratio = f"{row['ratio']:.1f} ({row['ratio_min']:.1f}-{row['ratio_max']:.1f})"
        late = f"{row['ours_latency']['p50_us']:.1f}/{row['ours_latency']['p99_us']:.1f}"
        print(
            f"{row['what']:34} {row['shape'][1]:>5} {row['ours'] / 1e6:>10.0f} M {row['peer_name']:28}"
            f" {row['peer'] / 1e6:>10.0f} M {ratio:>20} {late:>14}"
        )
    for name, growth in result["memory_growth_kib"].items():
        print(f"memoria tras una pasada, {name}: {growth['RssAnon']} KiB propios, {growth['RssFile']} KiB del fichero")
    print("mismo orden con otros números de procesos:", result["same_order"])


def build_parser() -> cli.Parser:
    parser = cli.Parser(description="Mide el lector de tokens frente a otros, en un solo núcleo.")
    parser.add_argument("--json", type=measure.file, metavar="FICHERO", help="dónde escribir los resultados")
    parser.add_argument("--megabytes", type=cli.number(int, low=1), default=200, help="tamaño del fichero de tokens")
    parser.add_argument("--rounds", type=cli.number(int, low=1), default=9, help="rondas")
    parser.add_argument("--batches", type=cli.number(int, low=1), default=5000, help="lotes por ronda")
    return parser


def main() -> None:
    arguments = build_parser().parse_args()
    if sys.platform != "linux":
        sys.exit("error: este programa se ata a un núcleo y lee /proc, y para eso hace falta Linux")
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = make_file(folder, arguments.megabytes)
        verify_shard(path, VOCAB)
        extension.load()
        result = {
            "benchmark": "loader",
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
            "device": backend.device_name(torch.device("cpu")),
            "extension": extension.status(),
            "file_megabytes": arguments.megabytes,
            "memory_growth_kib": memory(path),
            "same_order": same_order(path),
            "rows": [row for t in SIZES for row in race(path, t, arguments.batches, arguments.rounds)],
        }
    table(result)
    measure.write(arguments.json, result)


if __name__ == "__main__":
    cli.run(main)
