"""The time of an all_reduce by size, measured, and from it what exchanging the gradients of a training step takes, and
how much of that backward hides."""

import statistics
import time

import torch
import torch.distributed as c10d

from aura import backend
from aura.errors import TrainingFault, agreed

SIZES = [4**power << 10 for power in range(9)]  # bytes, 1 KB to 64 MB
LONGEST_SECONDS = 15.0  # a size that is expected to take longer is not tried, unless another limit is given
REPETITIONS, REPEATING_SECONDS = 20, 2.0  # at most, of each size and of all sizes together
# Of DistributedDataParallel (its defaults in torch 2.13): a bucket leaves when it holds that much or more. The first is
# small so that sending starts early.
FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20
GRADIENT_BYTES = 4  # float32, whatever the precision of the products


def exchange_curve(dist, longest_seconds=LONGEST_SECONDS):
    """[(bytes, seconds or None)] of an all_reduce of float32 over all ranks of `dist`, which all call it, for 1 KB to
    64 MB: of the times of the slowest rank the median, or the lower of the middle two. All values are checked.

    Each size is tried once at least, as long as that is expected to take less than longest_seconds, and from there on
    the seconds are None. What takes longer than the size before lets expect is tried again: a machine that stopped for
    a moment is no slow network. Raises TrainingFault on a wrong sum.
    """
    curve, expected = [], 0.0
    _timed(dist, torch.empty(SIZES[0] // 4, device=dist.device))  # the first one opens the connections
    for size in SIZES:
        if expected > longest_seconds:
            curve.append((size, None))
            continue
        tensor = torch.empty(size // 4, device=dist.device)
        first = _timed(dist, tensor)
        more = max(int(first > expected), min(REPETITIONS, int(REPEATING_SECONDS / len(SIZES) / first)))
        seconds = statistics.median_low([first, *(_timed(dist, tensor) for _ in range(more))])
        curve.append((size, seconds))
        expected = 4 * seconds
    return curve


def _timed(dist, tensor):
    """Seconds, on the slowest rank, of one checked all_reduce of `tensor`; the same on every rank."""
    tensor.fill_(dist.rank + 1)
    backend.wait(dist.device)
    dist.barrier()
    started = time.perf_counter()
    c10d.all_reduce(tensor)
    backend.wait(dist.device)
    seconds = time.perf_counter() - started
    right = dist.world_size * (dist.world_size + 1) / 2
    results = dist.gather_objects((seconds, bool((tensor == right).all())))
    wrong = [rank for rank, (_, good) in enumerate(results) if not good]
    if wrong:
        raise agreed(TrainingFault, f"all_reduce de {tensor.numel() * 4} bytes suma mal en los rangos "
                                    f"{', '.join(map(str, wrong))}: la red o el backend {dist.backend} corrompen los "
                                    "datos; pruebe con --backend gloo")
    return max(seconds for seconds, _ in results)


def seconds_for(curve, size):
    """Seconds of an all_reduce of `size` bytes: between two measured sizes in proportion, beyond the largest at its
    rate."""
    known = [(there, seconds) for there, seconds in curve if seconds is not None]
    if size >= known[-1][0]:
        return known[-1][1] * size / known[-1][0]
    low = max((point for point in known if point[0] <= size), default=(0, known[0][1]))
    high = min(point for point in known if point[0] > size)
    return low[1] + (high[1] - low[1]) * (size - low[0]) / (high[0] - low[0])


def step_seconds(curve, gradients, backward_s=0.0, element_bytes=GRADIENT_BYTES):
    """What exchanging the gradients adds to a training step over several processes, in seconds: what is left of it when
    backward has ended. With backward_s = 0 nothing is hidden, and it is all the time on the network.

    curve: of exchange_curve. gradients: as buckets() takes them. backward_s: seconds of the backward pass of the
    micro-batch that the gradients leave with, the last one. element_bytes: of an element on the network. A bucket
    leaves when its gradients are there and the one before has arrived.
    """
    arrived = 0.0
    for size, share in buckets(gradients):
        sent = size * element_bytes // GRADIENT_BYTES
        arrived = max(arrived, share * backward_s) + seconds_for(curve, sent)
    return max(0.0, arrived - backward_s)


def buckets(gradients):
    """[(bytes in float32, share of backward after which it is complete)] of the buckets that DistributedDataParallel
    makes, in the order in which they leave.

    gradients: [(elements, share of backward after which it is complete)] in the order of module.parameters(); of those
    that are complete at the same time the last leaves first.
    """
    ordered = sorted(gradients, key=lambda gradient: -gradient[1])[::-1]
    made, size = [], 0
    for number, (elements, share) in enumerate(ordered, 1):
        size += elements * GRADIENT_BYTES
        if size >= (BUCKET_BYTES if made else FIRST_BUCKET_BYTES) or number == len(ordered):
            made.append((size, share))
            size = 0
    return made


def in_turn(parameters, products=None, before=0):
    """`gradients` of buckets() of a model whose backward goes from its last parameter to its first.

    parameters: their elements. products: for each of them the elements that backward multiplies, which takes its time;
    by default all. before: of the same, what backward begins with.
    """
    products = parameters if products is None else products
    total, done, found = before + sum(products), before, []
    for elements, part in zip(parameters[::-1], products[::-1], strict=True):
        done += part
        found.append((elements, done / total))
    return found[::-1]
