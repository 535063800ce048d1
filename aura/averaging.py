"""The mean of a vector over the ranks, 8 bits a value, while computing goes on.

Two ranks send each other all they have. More share the work, as in a ring all_reduce (Patarasuk and Yuan 2009): each
takes one part of the vector from all of them, and sends them the mean of it. So each of n ranks sends 2 (n - 1) / n
bytes a value: 1 with two ranks, 2 with a hundred, where sending everything to everyone would take n - 1.
"""

from datetime import timedelta

import torch
import torch.distributed as c10d

BLOCK = 1024  # values that share a scale


def pack(values, weight):
    """(payload, values as the receiver will read them) of float32 [n]: a weight, a scale for each BLOCK of values and
    each value in 8 bits, as uint8 in host memory."""
    blocks = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True) / 127
    rounded = (blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)).round_()
    head = torch.cat([scales.new_tensor([weight]), scales.flatten()])
    payload = torch.cat([head.view(torch.uint8), rounded.to(torch.int8).flatten()[:len(values)].view(torch.uint8)])
    return payload.cpu(), rounded.mul_(scales).flatten()[:len(values)]


def unpack(payload, count, device):
    """(weight, float32 [count] on the device) of what pack() made."""
    size = 4 * (1 + -(-count // BLOCK))
    head = payload[:size].clone().view(torch.float32)  # one of several rows may begin where no float32 may
    values = torch.nn.functional.pad(payload[size:].view(torch.int8), (0, -count % BLOCK)).to(device).float()
    return float(head[0]), values.view(-1, BLOCK).mul_(head[1:, None].to(device)).flatten()[:count]


def nothing_owed(count, world_size):
    """The `owed` that start() takes for the first mean of `count` values: nothing has been rounded yet."""
    return torch.zeros(0 if world_size == 2 else _part_size(count, world_size))


def pack_all(values, weight, world_size):
    """pack() of float32 [n] for all the ranks; where there are more than two, each rank's part by itself."""
    if world_size == 2:
        return pack(values, weight)
    size = _part_size(len(values), world_size)
    parts = torch.nn.functional.pad(values, (0, size * world_size - len(values))).split(size)
    payloads, sent = zip(*(pack(part, weight) for part in parts), strict=True)
    return torch.cat(payloads), torch.cat(sent)[:len(values)]


def connect(seconds):
    """The groups of all ranks that start() takes: what goes to a higher rank travels by the first, the rest by the
    second. seconds: time-out.

    gloo tells the other end that it is ready to receive over the same connection on which it sends. With one group, on
    a slow network, that message waits behind the data: 1.6 MB each way at 10 Mbit/s took 2.06 s instead of 1.4.
    """
    return [c10d.new_group(backend="gloo", timeout=timedelta(seconds=seconds)) for _ in range(2)]


def start(payload, count, groups, owed, wait):
    """The mean over the ranks of what each has put into pack_all(): an object with advance(), share(), is_over() and
    mean().

    count: of the values. groups: connect()'s. owed: that of the object before, nothing_owed() for the first.
    wait(work): waits until a c10d.Work ends.
    """
    return (Gathered if groups[0].size() == 2 else Parted)(payload, count, groups, owed, wait)


class _Exchange:
    """Row r of `rows`, [ranks, bytes], on its way to each rank r; `received` becomes what each has sent here."""

    def __init__(self, rows, groups):
        rank = groups[0].rank()
        below, above = slice(rank), slice(rank + 1, None)
        self.received = rows.clone()
        self.works = [self._launch(rows, above, below, groups[0]), self._launch(rows, below, above, groups[1])]

    def _launch(self, rows, sent, received, group):
        """Send the rows `sent`, receive the rows `received`, both slices."""
        def sizes(part):
            return [rows.shape[1] * (rank in range(len(rows))[part]) for rank in range(len(rows))]

        return c10d.all_to_all_single(self.received[received].view(-1), rows[sent].reshape(-1), sizes(received),
                                      sizes(sent), group=group, async_op=True)

    def is_over(self):
        return all(work.is_completed() for work in self.works)

    def wait(self, wait):
        """`received`, once wait() has ended for all that is under way."""
        for work in self.works:
            wait(work)
        return self.received


class Gathered:
    """Everything from everyone: with two ranks no less can be sent, and values are rounded only once."""

    def __init__(self, payload, count, groups, owed, wait):
        self.count, self.owed, self.wait = count, owed, wait
        self.exchange = _Exchange(payload.expand(2, -1), groups)

    def advance(self):
        """There is nothing to do on the way."""

    share = advance

    def is_over(self):
        """Whether mean() would not wait."""
        return self.exchange.is_over()

    def mean(self, device):
        """float32 [count] on the device, the same bits on every rank; None where nobody's weight is above 0. Waits."""
        return _mean(self.exchange.wait(self.wait), self.count, device)[1]


class Parted:
    """One part from everyone, and its mean to everyone.

    owed: what rounding will have taken off the mean of this rank's part, once mean() has returned.
    """

    def __init__(self, payload, count, groups, owed, wait):
        self.count, self.groups, self.owed, self.wait, ranks = count, groups, owed, wait, groups[0].size()
        self.size, self.means = _part_size(count, ranks), None
        self.exchange = _Exchange(payload.view(ranks, -1), groups)

    def advance(self):
        """Send the mean of this rank's part if all of it has arrived. To be called now and then."""
        if self.exchange.is_over():
            self.share()

    def share(self):
        """Wait for this rank's part and send its mean: from here on no other rank waits for anything that this one has
        to do."""
        if self.means is None:
            self._send()

    def is_over(self):
        """Whether mean() would not wait."""
        return self.means is not None and self.means.is_over()

    def mean(self, device):
        """float32 [count] on the device, the same bits on every rank; None where nobody's weight is above 0. Waits."""
        self.share()
        means = self.means.wait(self.wait)
        weights, parts = zip(*(unpack(payload, self.size, device) for payload in means), strict=True)
        return torch.cat(parts)[:self.count] if weights[0] else None

    def _send(self):
        payloads = self.exchange.wait(self.wait)
        total, mean = _mean(payloads, self.size, payloads.device)
        wanted = self.owed if mean is None else mean.add_(self.owed)
        payload, sent = pack(wanted, float(total > 0))
        if total:
            self.owed = wanted - sent
        self.means = _Exchange(payload.expand(len(payloads), -1), self.groups)


def _part_size(count, world_size):
    """Values of the part that each of more than two ranks averages, padded at the end. A multiple of 4: the scales of
    the next payload begin where a float32 may."""
    return 4 * -(-count // (4 * world_size))


def _mean(payloads, count, device):
    """(sum of the weights, mean of the values whose weight is above 0 or None), added up in the order of the ranks."""
    total, mean = 0.0, torch.zeros(count, device=device)
    for payload in payloads:
        weight, values = unpack(payload, count, device)
        total += weight
        if weight:
            mean.add_(values)
    return total, mean.div_(total) if total else None
