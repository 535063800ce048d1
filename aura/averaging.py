"""The mean of a vector over the ranks, 8 bits a value, while computing goes on.

Two ranks send each other all they have. More share the work, as in a ring all_reduce (Patarasuk and Yuan 2009): each
takes one part of the vector from all of them, and sends them the mean of it. So of n ranks each sends 2 (n - 1) / n
bytes a value, of two ranks 1 and of a hundred 2, where sending everything to everyone would be n - 1.
"""

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
    head = payload[:size].view(torch.float32)
    values = torch.nn.functional.pad(payload[size:].view(torch.int8), (0, -count % BLOCK)).to(device).float()
    return float(head[0]), values.view(-1, BLOCK).mul_(head[1:, None].to(device)).flatten()[:count]


def nothing_owed(count, world_size):
    """What rounding owes of means of `count` values before the first, as start() takes it."""
    return torch.zeros(0 if world_size == 2 else _part_size(count, world_size))


def pack_all(values, weight, world_size):
    """pack() of float32 [n] for all the ranks: of each part by itself where there are more than two."""
    if world_size == 2:
        return pack(values, weight)
    size = _part_size(len(values), world_size)
    parts = torch.nn.functional.pad(values, (0, size * world_size - len(values))).split(size)
    payloads, sent = zip(*(pack(part, weight) for part in parts), strict=True)
    return torch.cat(payloads), torch.cat(sent)[:len(values)]


def start(payload, count, group, owed, wait):
    """The mean over the ranks of `group` of what each has put into pack_all(): an object with advance() and mean().

    count: of the values. owed: the last object's, nothing_owed() before the first. wait(work): until a c10d.Work ends.
    """
    return (Gathered if group.size() == 2 else Parted)(payload, count, group, owed, wait)


class Gathered:
    """Everything from everyone: of two ranks as little as can be sent, and rounded once."""

    def __init__(self, payload, count, group, owed, wait):
        self.count, self.owed, self.wait = count, owed, wait
        self.payloads = [torch.empty_like(payload) for _ in range(group.size())]
        self.work = c10d.all_gather(self.payloads, payload, group=group, async_op=True)

    def advance(self):
        """There is nothing to do on the way."""

    def mean(self, device):
        """float32 [count] on the device, the same bits on every rank; None where nobody's weight is above 0. Waits."""
        self.wait(self.work)
        return _mean(self.payloads, self.count, device)[1]


class Parted:
    """One part from everyone, and its mean to everyone.

    owed: what rounding will have taken off the mean of this rank's part, once mean() has returned.
    """

    def __init__(self, payload, count, group, owed, wait):
        self.count, self.group, self.owed, self.wait = count, group, owed, wait
        self.size = _part_size(count, group.size())
        self.payloads, self.means = payload.new_empty(group.size(), len(payload) // group.size()), None
        self.work = c10d.all_to_all_single(self.payloads.view(-1), payload, group=group, async_op=True)

    def advance(self):
        """Send the mean of this rank's part if all of it has arrived. To be called now and then."""
        if self.means is None and self.work.is_completed():
            self._send()

    def mean(self, device):
        """float32 [count] on the device, the same bits on every rank; None where nobody's weight is above 0. Waits."""
        if self.means is None:
            self._send()
        self.wait(self.work)
        weights, parts = zip(*(unpack(payload, self.size, device) for payload in self.means), strict=True)
        return torch.cat(parts)[:self.count] if weights[0] else None

    def _send(self):
        self.wait(self.work)
        total, mean = _mean(self.payloads, self.size, self.payloads.device)
        wanted = self.owed if mean is None else mean.add_(self.owed)
        payload, sent = pack(wanted, float(total > 0))
        if total:
            self.owed = wanted - sent
        self.means = [torch.empty_like(payload) for _ in range(self.group.size())]
        self.work = c10d.all_gather(self.means, payload, group=self.group, async_op=True)


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
