"""Products of 16 bits that are added up in float32, and the linear layers of a training step made of them.

Under autocast torch casts each weight again in every micro-batch, and once more where a block is computed again; the
gradient comes rounded to 16 bits, is cast to float32 and only then added to that of the micro-batches before. With few
tokens in a micro-batch that is a good part of its time: 32 bytes through memory for each weight. In step() a weight is
cast once, and its gradient added in float32 by the product itself (as Megatron-LM's gradient accumulation fusion does;
Narayanan et al. 2021), without the rounding.
"""

import contextlib
import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

WEIGHT_ROWS = 2048  # of a product that a CPU makes at one time before it is added
# Where a product can be added to float32 as it is made.
DEVICES = ("cuda",) if torch.version.cuda else ()

_copies = None  # of weights and biases, by id and dtype, while a step() lasts
_adds = False


@contextlib.contextmanager
def step():
    """A block of one optimiser step, in which no parameter changes: a Linear keeps 16-bit copies of its
    parameters, and its weight's gradient comes in float32."""
    global _copies
    _copies = {}
    try:
        yield
    finally:
        _copies = None


@contextlib.contextmanager
def adding(wanted):
    """A block in whose backward a Linear adds to its weight's `.grad` itself, where that is wanted. Autograd sees no
    gradient then: not for models with hooks that wait for one, as DistributedDataParallel has where it exchanges."""
    global _adds
    before, _adds = _adds, wanted
    try:
        yield
    finally:
        _adds = before


def add_product(sums, a, b, fresh):
    """sums += a @ b, or = where it is fresh. A GPU adds products of 16 bits to float32 sums unrounded. On the CPU they
    are rounded to 16 bits first, and made in parts that stay in the cache."""
    beta = 0 if fresh else 1
    if sums.dtype == a.dtype:
        sums.addmm_(a, b, beta=beta)
        return
    if a.is_cuda:
        torch.addmm(sums, a, b, out_dtype=sums.dtype, beta=beta, out=sums)
        return
    part = a.new_empty(min(WEIGHT_ROWS, len(sums)), sums.shape[1])
    for to, rows in zip(sums.split(WEIGHT_ROWS), a.split(WEIGHT_ROWS), strict=True):
        product = torch.mm(rows, b, out=part[:len(rows)])
        if fresh:
            to.copy_(product)
        else:
            to += product


class Linear(nn.Linear):
    """nn.Linear, whose weight's gradient in step() under autocast is that of adding()."""

    def forward(self, x):
        if torch.compiler.is_compiling() or not self._taken(x.device.type):
            return super().forward(x)
        x = x.to(torch.get_autocast_dtype(x.device.type))
        if torch.is_grad_enabled() and self.weight.requires_grad:
            return _Product.apply(x, self.weight, self.bias, _kept_before(x, self.weight))
        return _product(x, self.weight, self.bias)

    def _taken(self, device_type):
        # Gathered by fully_shard, the weight has 16 bits already.
        return (_copies is not None and device_type in DEVICES and torch.is_autocast_enabled(device_type) and
                self.weight.dtype == torch.float32 and not hasattr(self.weight, "full_tensor") and
                _can_add(device_type, torch.get_autocast_dtype(device_type)))


@functools.cache
def _can_add(device_type, dtype):
    """Whether torch adds products of dtype to float32 there: builds of 2.10 from before its release refuse it."""
    values = torch.zeros(8, 8, device=device_type, dtype=dtype)
    try:
        add_product(torch.zeros(8, 8, device=device_type), values, values, fresh=False)
    except RuntimeError:
        return False
    return True


def _copy(parameter, dtype):
    key = id(parameter), dtype
    if key not in _copies:
        _copies[key] = parameter.detach().to(dtype)
    return _copies[key]


def _product(x, weight, bias):
    return F.linear(x, _copy(weight, x.dtype), None if bias is None else _copy(bias, x.dtype))


def _kept_before(x, weight):
    """While a checkpoint computes again, a tensor whose node keeps what _Product needs, else None. A Function keeps its
    tensors when it is done, torch's own products before they begin: a block that ends with one of those is computed
    again without it and, with this node, so is one that ends with ours."""
    if torch._C._current_graph_task_id() == -1:
        return None
    return _Kept.apply(weight, x, _copy(weight, x.dtype))


class _Kept(torch.autograd.Function):
    """Keeps `tensors` for the backward of another node. weight is an input so that autograd records this one."""

    @staticmethod
    def forward(ctx, weight, *tensors):
        ctx.save_for_backward(*tensors)
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx, _):
        return None, None, None


class _Product(torch.autograd.Function):
    """x [..., C] @ weight [N, C] transposed, + bias [N], in the 16 bits of x; weight and bias float32. kept: of
    _kept_before()."""

    @staticmethod
    def forward(ctx, x, weight, bias, kept):
        if kept is None:
            ctx.save_for_backward(x, _copy(weight, x.dtype))
        ctx.weight, ctx.elsewhere = weight, None if kept is None else kept.grad_fn
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, low = (ctx if ctx.elsewhere is None else ctx.elsewhere).saved_tensors
        weight, rows = ctx.weight, dy.flatten(0, -2)
        sums = weight.grad if _adds else None
        fresh = sums is None
        if fresh:
            sums = torch.empty_like(weight)
        add_product(sums, rows.t(), x.flatten(0, -2), fresh)
        if _adds:
            weight.grad = sums
        dx = dy @ low if ctx.needs_input_grad[0] else None
        dbias = rows.sum(0, dtype=weight.dtype) if ctx.needs_input_grad[2] else None
        return dx, None if _adds else sums, dbias, None
