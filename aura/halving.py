"""Gradients that travel as float16, half the bytes, with what rounding takes off one added to the next (error feedback:
Seide et al. 2014; Karimireddy et al. 2019).

DistributedDataParallel's hook for this keeps no such account, and one written in Python runs in a thread that holds up
the others. So buckets of gradients leave from here as backward completes them.
"""

import contextlib

import torch
import torch.distributed as c10d

from aura.allreduce import BUCKET_BYTES, FIRST_BUCKET_BYTES, GRADIENT_BYTES
from aura.sync import Exact, name_run

LARGEST = torch.finfo(torch.float16).max
USUAL = 64.0  # a bucket's greatest mean gradient is scaled to it: 1000 times more still fits, a millionth is exact


class Fp16(Exact):
    """The sync (see sync.Exact) that trains a Halved model, whose account of what rounding took off is each rank's own:
    a run goes on bit for bit where every rank still has it."""

    method = "fp16"

    def __init__(self, dist, precision):
        super().__init__(dist)
        self.setting = {"method": self.method, "processes": dist.world_size,
                        "precision": precision.name}  # what is kept is in units of the scale of fp16's losses
        self.run, self.kept = name_run(dist), None

    def wrap(self, model):
        self.model = Halved(model, self.dist, self.kept)
        self.kept = None  # copied, and as large as the gradients
        return self.model

    def state(self):
        return {**super().state(), **self.setting, "run": self.run}

    def own_state(self):
        return self.model.own_state()

    def restore(self, state, own):
        super().restore(state, own)
        self.kept = own


class Halved(torch.nn.Module):
    """`module`, the same weights on every rank, whose gradients are averaged over the ranks as backward ends, as under
    DistributedDataParallel: the same bits everywhere. Takes 4 bytes a parameter on its device.

    A gradient that is not finite arrives as NaN on every rank.
    """

    def __init__(self, module, dist, kept=None):
        super().__init__()
        self.module, self.world_size = module, dist.world_size
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad][::-1]
        self.buckets = _grouped(parameters)
        self.residuals = [torch.cat([torch.zeros_like(p).view(-1) for p in bucket]) for bucket in self.buckets]
        self.scales = [None] * len(self.buckets)  # powers of two, from what arrived last: the same on every rank
        self.wanted = True
        self._expect()
        if kept:
            for residual, stored in zip(self.residuals, kept["residuals"], strict=True):
                residual.copy_(stored)
            self.scales = [scale.to(dist.device) for scale in kept["scales"]]
        for number, bucket in enumerate(self.buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(lambda _, number=number: self._ready(number))

    def forward(self, *inputs, **options):
        """module(...)."""
        return self.module(*inputs, **options)

    @contextlib.contextmanager
    def no_sync(self):
        """A block whose gradients stay here and add up."""
        self.wanted = False
        try:
            yield
        finally:
            self.wanted = True

    def own_state(self):
        """What this rank alone knows: with it the run goes on bit for bit."""
        return {"residuals": self.residuals, "scales": self.scales}

    def _expect(self):
        self.missing, self.sent = [len(bucket) for bucket in self.buckets], []

    def _ready(self, number):
        """A gradient of a bucket is complete. Buckets leave in their order, which is the same on every rank."""
        if self.wanted:
            self.missing[number] -= 1
            while len(self.sent) < len(self.buckets) and not self.missing[len(self.sent)]:
                self._send()

    @torch.no_grad()
    def _send(self):
        number = len(self.sent)
        mean = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).view(-1) for p in self.buckets[number]])
        mean.div_(self.world_size).add_(self.residuals[number])
        if self.scales[number] is None:
            peak = mean.abs().amax().nan_to_num(nan=0.0, posinf=0.0)
            c10d.all_reduce(peak, op=c10d.ReduceOp.MAX)
            self.scales[number] = _scale(peak, torch.ones_like(peak))
        half, self.residuals[number] = halve(mean, self.scales[number], self.world_size)
        self.sent.append((half, c10d.all_reduce(half, async_op=True)))

    @torch.no_grad()
    def arrive(self):
        """Wait until the gradients of this step have come and put the means into .grad."""
        while len(self.sent) < len(self.buckets):  # buckets that the loss did not wholly depend on
            self._send()
        for number, (half, work) in enumerate(self.sent):
            work.wait()
            mean, bucket = half.float() / self.scales[number], self.buckets[number]
            self.scales[number] = _scale(mean.abs().amax(), self.scales[number])
            for parameter, part in zip(bucket, mean.split([p.numel() for p in bucket]), strict=True):
                parameter.grad = part.view_as(parameter)
        self._expect()


def halve(values, scale, world_size):
    """(values * scale as float16, so limited that the sum over the ranks is finite; what that took off `values`). When
    one of the values is not finite, the first is all NaN and the second 0."""
    limit = LARGEST / (world_size * (1 + 2**-11) ** world_size)  # each addition, and the limit, may be rounded up
    half = (values * scale).clamp_(-limit, limit).add_(values.sum() * 0).half()
    return half, (values - half.float() / scale).nan_to_num_(nan=0.0)


def _grouped(parameters):
    """Lists of `parameters`, in their order, as large as DistributedDataParallel's buckets."""
    groups, size = [[]], 0
    for parameter in parameters:
        if size >= (BUCKET_BYTES if len(groups) > 1 else FIRST_BUCKET_BYTES):
            groups, size = [*groups, []], 0
        groups[-1].append(parameter)
        size += parameter.numel() * GRADIENT_BYTES
    return groups


def _scale(peak, before):
    """The largest power of two that puts `peak` at or below USUAL; `before` where there is no peak."""
    wanted = USUAL / peak
    # Its highest bit. A logarithm of a power of two may fall short of it, on one rank's device and not on another's.
    scale = wanted / (2 * torch.frexp(wanted).mantissa)
    return torch.where(wanted.isfinite() & (wanted > 0), scale, before)
