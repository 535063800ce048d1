"""Linear layers and what they are made of: products of 16 bits that are added up in float32, and those of float32 by
the faster of torch's libraries.

Under autocast torch casts each weight again in every micro-batch, and once more where a block is computed again; the
gradient comes rounded to 16 bits, is cast to float32 and only then added to that of the micro-batches before. With few
tokens in a micro-batch that is a good part of its time: 32 bytes through memory for each weight. In step() a weight is
cast once, and its gradient added in float32 by the product itself (as Megatron-LM's gradient accumulation fusion does;
Narayanan et al. 2021), without the rounding. csrc/ops_linear.cpp has the layer's forward and backward.

On a CPU torch gives products of float32 to MKL, which on AMD's Zen 5 takes twice as long as oneDNN and on Zen 4
somewhat longer. There they go to oneDNN, which torch has too (csrc/ops_products.cpp).
"""

import contextlib
import functools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from aura import extension

# Of logits that exist at one time, for fused/loss.py and the plan; many, as each chunk takes weight and gradient
# through memory.
CHUNK_BYTES = 128 * 2**20
AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}  # what oneDNN's kernels of 512 bits need
WEIGHT_ROWS = 2048  # of a product that a CPU makes at one time before it is added
WORTHWHILE = 2**22  # multiplications of a product; of fewer, the way to oneDNN takes too long
# Where a product can be added to float32 as it is made.
DEVICES = ("cuda",) if torch.version.cuda else ()

_copies = None  # while a step() lasts
_adds = False


@contextlib.contextmanager
def step(model):
    """A block of one optimiser step, in which no parameter changes: a Linear of the model has 16-bit copies of its
    parameters, and its weight's gradient comes in float32. Without the C++ extension it is torch's own."""
    global _copies
    _copies = _Copies(model)
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


@functools.cache
def onednn_is_better(cpuinfo="/proc/cpuinfo"):
    """Whether this processor multiplies float32 faster by oneDNN than by MKL, and torch has both. So it was on AMD's
    Zen 4 and Zen 5, which are all that has AVX-512 of theirs."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
            and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    try:
        lines = Path(cpuinfo).read_text().split("\n\n")[0].splitlines()
    except OSError:  # only Linux has it
        return False
    said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return said.get("vendor_id") == "AuthenticAMD" and set(said["flags"].split()) >= AVX512


def by_onednn(*tensors):
    """Whether the product of these goes to oneDNN."""
    return all(t.dtype == torch.float32 and t.is_cpu for t in tensors) and onednn_is_better()


def space(a, b, rows):
    """Where mm() is to write products of `rows` rows, [rows, N]; None where oneDNN makes them, which takes its own."""
    return None if by_onednn(a, b) else a.new_empty(rows, b.shape[1])


def mm(a, b, space):
    """a [M, K] @ b [K, N], of one dtype, in the first rows of a space(). Autograd and autocast have no part in it."""
    return _onednn(a, b) if space is None else torch.mm(a, b, out=space[:len(a)])


def _onednn(a, b):
    if a.stride(0) == 1 and not a.is_contiguous():  # it wants rows, and would have them copied by one thread
        a = torch.ops.aura.transposed(a.t())
    return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")


def write_product(to, a, b):
    """to [M, N] = a [M, K] @ b [K, N], of one dtype, as mm()."""
    if by_onednn(a, b):
        to.copy_(_onednn(a, b))
    else:
        torch.mm(a, b, out=to)


def add_product(sums, a, b, fresh):
    """sums += a @ b, or = where it is fresh. A GPU adds products of 16 bits to float32 sums unrounded. On the CPU they
    are rounded to 16 bits first. What cannot be added as it is made is made in parts that stay in the cache."""
    beta = 0 if fresh else 1
    if sums.dtype == a.dtype and not by_onednn(a, b):
        sums.addmm_(a, b, beta=beta)
        return
    if a.is_cuda:
        torch.addmm(sums, a, b, out_dtype=sums.dtype, beta=beta, out=sums)
        return
    part = space(a, b, min(WEIGHT_ROWS, len(sums)))
    for to, rows in zip(sums.split(WEIGHT_ROWS), a.split(WEIGHT_ROWS), strict=True):
        product = mm(rows, b, part)
        if fresh:
            to.copy_(product)
        else:
            to += product
        del product  # before the next is made


class _Copies:
    """Copies of the parameters of a model's Linears. The first that is asked for brings all, in one launch or two: made
    one by one they would be a launch each."""

    def __init__(self, model):
        self.model, self.made = model, {}

    def of(self, layer, device_type, dtype):
        """(weight, bias or None) of a Linear in dtype; None where it is torch's own."""
        key = device_type, dtype
        if key not in self.made:
            self.made[key] = self._make(dtype) if _can_add(*key) else {}
        return self.made[key].get(id(layer))

    @torch.no_grad()
    def _make(self, dtype):
        layers = [module for module in self.model.modules() if isinstance(module, Linear) and module.whole()]
        wide = [p for layer in layers for p in (layer.weight, layer.bias) if p is not None]
        low = [torch.empty_like(p, dtype=dtype) for p in wide]
        if low:
            torch._foreach_copy_(low, wide)
        copies = iter(low)
        return {id(layer): (next(copies), None if layer.bias is None else next(copies)) for layer in layers}


class Linear(nn.Linear):
    """nn.Linear, whose weight's gradient in step() under autocast is that of adding(), and whose products of float32 on
    a CPU are those of the faster library."""

    one_size = True  # of its batches, or few

    def forward(self, x):
        kind = x.device.type
        if torch.compiler.is_compiling():
            return super().forward(x)
        if kind == "cpu" and self._by_onednn(x):
            return torch.ops.aura.linear(x, self.weight, self.bias, self.weight, self.bias, False)
        if _copies is None or kind not in DEVICES or not torch.is_autocast_enabled(kind):
            return super().forward(x)
        copies = _copies.of(self, kind, torch.get_autocast_dtype(kind))
        if copies is None:
            return super().forward(x)
        weight, low = self.weight, copies[0]
        if torch.is_grad_enabled() and weight.requires_grad:
            return torch.ops.aura.linear(x, weight, self.bias, *copies, _adds)
        return F.linear(x, low, self.bias)  # not its copy, which would end the gradient of one that is trained

    def _by_onednn(self, x):
        return (self.one_size and x.numel() * len(self.weight) >= WORTHWHILE and by_onednn(x, self.weight)
                and _has_ops() and not torch.is_autocast_enabled("cpu"))

    def whole(self):
        """Whether the weight is there in float32. Where fully_shard has cut it, it comes in 16 bits already."""
        return self.weight.dtype == torch.float32 and not hasattr(self.weight, "full_tensor")


def batches_vary(model):
    """Leave the products of a model's Linears to torch's MKL: its batches have hundreds of sizes, and oneDNN compiles
    for each, and keeps what it has compiled: up to a megabyte for each product of each size."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.one_size = False


def _has_ops():
    return extension.has_ops(extension.load())


@functools.cache
def _can_add(device_type, dtype):
    """Whether there is an operator for it and torch adds products of dtype to float32 there: builds of 2.10 from before
    its release refuse it."""
    if not _has_ops():
        return False
    values = torch.zeros(8, 8, device=device_type, dtype=dtype)
    try:
        add_product(torch.zeros(8, 8, device=device_type), values, values, fresh=False)
    except RuntimeError:
        return False
    return True
