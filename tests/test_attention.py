"""Attention on the CPU against the formula in float64: shapes, layouts, masks, dropout, extremes, threads, errors."""

import math
import os
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import library

from aura import extension
from tests import support

ops = torch.ops.aura
NONE = (0.0, None, None, None)  # no dropout, seed, lengths, cu_seqlens
FLOATS = (torch.float32, torch.bfloat16, torch.float64)
# Relative to the largest value of a tensor. In bfloat16 the output is rounded, and with it the gradient of the softmax.
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float64: 1e-13}


@pytest.fixture(scope="module", autouse=True)
def _kernels():
    if not extension.has_ops(extension.load()):
        pytest.skip(extension.status())
    import aura.fused  # noqa: F401  registers what autograd and torch.compile need


# ---- What is right ---------------------------------------------------------------------------------------------------


def kept_weights(seed, probability, rows, keys, heads):
    """True where a weight is kept, [heads, rows, keys]: eight halves of 16 bits a counter, the low one first."""
    zero = np.zeros(1, np.uint64)
    words = support.philox(seed, (np.arange(rows, dtype=np.uint64)[None, :, None],
                                  np.arange(-(-keys // 8), dtype=np.uint64)[None, None, :],
                                  np.arange(heads, dtype=np.uint64)[:, None, None], zero))
    halves = [part for word in words for part in (word & np.uint64(0xFFFF), word >> np.uint64(16))]
    bits = np.stack(halves, -1).reshape(heads, rows, -(-keys // 8) * 8)[..., :keys]
    return torch.from_numpy(bits >= round(probability * 65536))


def reference(q, k, v, causal, scale, dropout, seed, lengths, cu_seqlens):
    """(output [B, T, H, D], log-sum-exp [B, T, H] to base 2) by the formula, in float64, differentiable."""
    shape = q.shape
    q, k, v = (x.double() for x in (q, k, v))
    if cu_seqlens is not None:
        q, k, v = (x.flatten(0, 1)[None] for x in (q, k, v))
    (batch, rows, heads, _), keys = q.shape, k.shape[1]
    key = torch.arange(keys)
    seen = torch.ones(batch, rows, keys, dtype=torch.bool)
    start = torch.zeros(rows, dtype=torch.long)  # of the sequence of each row
    if causal:
        seen &= key <= torch.arange(rows)[:, None]
    if lengths is not None:
        seen &= key < lengths[:, None, None]
    if cu_seqlens is not None:
        document = torch.empty(rows, dtype=torch.long)
        bounds = cu_seqlens.tolist()
        for i, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            document[begin:end], start[begin:end] = i, begin
        seen &= document[:, None] == document
    seen = seen[:, None]  # [B, 1, T, S]
    blind = ~seen.any(-1, keepdim=True)
    scores = torch.einsum("bthd,bshd->bhts", q, k) * scale
    scores = scores.masked_fill(~seen, -math.inf).masked_fill(blind, 0.0)
    lse = scores.logsumexp(-1, keepdim=True)
    weights = (scores - lse).exp().masked_fill(~seen, 0.0)
    if dropout:
        kept = kept_weights(int(seed) % 2**64, dropout, batch * rows, keys, heads)
        kept = kept.unflatten(1, (batch, rows)).transpose(0, 1)
        place = (key - start[:, None]).clamp(min=0).expand(batch, heads, rows, keys)  # counted within the sequence
        weights = weights * kept.gather(3, place) / (1 - round(dropout * 65536) / 65536)
    v = v.masked_fill((~seen).all(2)[:, 0, :, None, None], 0.0)  # padding, whatever it holds, counts nothing
    out = torch.einsum("bhts,bshd->bthd", weights, v)
    lse = lse.masked_fill(blind, -math.inf).squeeze(-1).transpose(1, 2) / math.log(2)
    return out.reshape(shape), lse.reshape(shape[:3])


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qkv(batch, rows, heads, width, dtype=torch.float32, keys=None):
    """q [B, T, H, D], k and v [B, S, H, D]."""
    keys = rows if keys is None else keys
    return [normal(batch, n, heads, width, dtype=dtype, seed=i) for i, n in enumerate((rows, keys, keys))]


def close(got, want, limit):
    """Whether no element is further off than `limit` times the largest of `want`; NaN and inf in the same places."""
    got, want = got.double(), want.double()
    assert got.shape == want.shape
    finite = want.isfinite()
    assert torch.equal(got.isfinite(), finite)
    assert torch.equal(got[~finite].nan_to_num(nan=7.0), want[~finite].nan_to_num(nan=7.0))
    if finite.any():
        want = want[finite]
        # Where the exact answer is 0 (one key: softmax has no gradient), the result is the rounding of terms of order
        # 1.
        assert float((got[finite] - want).abs().max()) <= limit * max(float(want.abs().max()), 1.0)


def agree(inputs, causal, options=NONE, scale=None, limit=None, packed=False, device="cpu"):
    """Compare outputs, log-sum-exps and gradients, computed on a device, with the reference; returns (output,
    gradients) of the kernels, in host memory."""
    q = inputs[0]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    limit = limit or LIMITS[q.dtype]
    dout = normal(*q.shape, dtype=q.dtype, seed=9)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    want, want_lse = reference(*exact, causal, scale, *options)
    wanted = torch.autograd.grad(want, exact, dout.double())
    if packed:
        x = torch.stack(inputs, 2).detach().to(device).requires_grad_()
        out, lse = ops.attention_packed(x, causal, scale, *options)
        gradients = torch.autograd.grad(out, x, dout.to(device))[0].unbind(2)
    else:
        leaves = [x.detach().to(device).requires_grad_() for x in inputs]
        out, lse = ops.attention(*leaves, causal, scale, *options)
        gradients = torch.autograd.grad(out, leaves, dout.to(device))
    assert out.dtype == q.dtype and out.is_contiguous() and not lse.requires_grad
    assert lse.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
    out, lse, gradients = out.detach().cpu(), lse.cpu(), [gradient.cpu() for gradient in gradients]
    close(out, want.detach(), limit)
    close(lse, want_lse.detach(), limit if lse.dtype == q.dtype else LIMITS[lse.dtype])
    for got, exactly in zip(gradients, wanted, strict=True):
        assert got.dtype == q.dtype
        close(got, exactly, limit)
    return out, gradients


# ---- Shapes and layouts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 47, 48, 49, 65, 127, 200])
def test_any_length_and_width(rows, causal, dtype):
    for width in (8, 32, 33, 40, 64, 80, 128):
        agree(qkv(1, rows, 1 + width % 3, width, dtype), causal, packed=width % 16 == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_widths_at_the_ends_of_what_is_allowed(causal, dtype):
    for width in (1, 3, 255, 256):
        agree(qkv(2, 50, 1, width, dtype), causal)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-60, 0.7])
def test_any_scale(scale, causal, dtype):
    """Also a scale that makes the largest score the smallest, or all scores equal."""
    agree(qkv(1, 75, 2, 40, dtype), causal, scale=scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_a_thousand_rows(causal, dtype):
    agree(qkv(1, 1000, 1, 40, dtype), causal)
    agree(qkv(2, 1000, 1, 64, dtype), causal, packed=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("step", [-1.0, -0.01, 0.01, 0.1, 1.0])
def test_logits_that_grow_or_fall_along_the_keys(step, causal, dtype):
    """Every block of keys outweighs the one before, a little or entirely, or hardly counts beside it."""
    q, k, v = qkv(1, 400, 2, 40, dtype)
    k = k.clone()
    q[..., 0] = 1
    k[..., 0] = step * torch.arange(400)[:, None]
    out, lse = ops.attention(q, k, v, causal, 1.0, *NONE)
    want, want_lse = reference(q.double(), k.double(), v.double(), causal, 1.0, *NONE)
    close(out, want, LIMITS[dtype] * (1 if dtype == torch.bfloat16 else 10))  # logits of 400 have two digits less
    close(lse, want_lse, 1e-5)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_more_keys_than_queries_and_fewer(dtype):
    for rows, keys in ((1, 100), (100, 1), (7, 49), (49, 7), (96, 144), (5, 0)):
        agree(qkv(2, rows, 3, 40, dtype, keys), causal=False)


@pytest.mark.parametrize("layout", ["heads first", "packed heads first", "part of a larger one", "width not last",
                                    "one batch entry for all", "every other row", "one column"])
@pytest.mark.parametrize("packed_documents", [False, True])
def test_any_layout(layout, packed_documents):
    batch, rows, heads, width = 2, 70, 3, 1 if layout == "one column" else 40
    inputs = qkv(batch, rows, heads, width)
    if layout == "heads first":
        views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    elif layout == "packed heads first":
        views = torch.stack(inputs).permute(1, 3, 0, 2, 4).contiguous().permute(2, 0, 3, 1, 4).unbind(0)
    elif layout == "part of a larger one":
        views = [torch.nn.functional.pad(x, (3, 5, 1, 1, 2, 0))[:, 2:, 1:-1, 3:-5] for x in inputs]
    elif layout == "width not last":
        views = [x.movedim(3, 1).contiguous().movedim(1, 3) for x in inputs]
    elif layout == "one batch entry for all":
        views = [x[:1].expand(batch, -1, -1, -1) for x in inputs]
    elif layout == "every other row":
        views = [x.repeat_interleave(2, dim=1)[:, ::2] for x in inputs]
    else:
        views = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in inputs]
    assert layout == "one column" or not any(x.is_contiguous() for x in views)
    options = (0.0, None, None, torch.tensor([0, 33, 90, batch * rows])) if packed_documents else NONE
    agree(views, True, options)


def test_pairs_of_bfloat16_that_do_not_lie_on_words():
    """Rows an odd number of elements apart, else as they would be read without being copied."""
    views = [torch.nn.functional.pad(x, (0, 1))[..., :32] for x in qkv(2, 64, 3, 32, torch.bfloat16)]
    assert views[0].stride(1) % 2 == 1
    agree(views, True)


def test_a_gradient_of_any_layout():
    inputs = [x.requires_grad_() for x in qkv(2, 50, 2, 40)]
    out = ops.attention(*inputs, True, 0.3, *NONE)[0]
    heads_first, every_other = normal(2, 2, 50, 40).transpose(1, 2), normal(2, 50, 2, 80)[..., ::2]
    for dout in (torch.ones(()).expand(2, 50, 2, 40), heads_first, every_other):
        got = torch.autograd.grad(out, inputs, dout, retain_graph=True)
        plain = torch.autograd.grad(out, inputs, dout.contiguous(), retain_graph=True)
        assert all(map(torch.equal, got, plain))


@pytest.mark.parametrize("shape", [(0, 5, 2, 8), (2, 0, 2, 8), (2, 5, 0, 8)], ids=["batch", "tokens", "heads"])
def test_nothing_in_nothing_out(shape):
    seed = torch.tensor([1])
    for options in (NONE, (0.5, seed, None, None), (0.0, None, torch.zeros(shape[0], dtype=torch.long), None),
                    (0.0, None, None, torch.tensor([0, shape[0] * shape[1]]))):
        agree(qkv(*shape), True, options)
        agree(qkv(*shape), True, options, packed=True)


# ---- Masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_key_padding(causal, packed, dtype):
    for rows, lengths in ((65, [65, 0, 1, 47]), (127, [48, 49, 126, 127]), (1, [0, 1, 0, 1])):
        for integer in (torch.int32, torch.int64):
            lengths_of = torch.tensor(lengths, dtype=integer)
            agree(qkv(4, rows, 2, 40, dtype), causal, (0.0, None, lengths_of, None), packed=packed)


@pytest.mark.parametrize("rows,keys,lengths",
                         [(5, 100, [50, 100]), (100, 60, [60, 0]), (3, 4, [3, 4]), (64, 64, [3, 9])])
def test_key_padding_of_other_keys_than_the_queries(rows, keys, lengths):
    """The gradients of keys nobody sees are 0, however many queries there are."""
    _, (_, dk, dv) = agree(qkv(2, rows, 2, 32, keys=keys), False, (0.0, None, torch.tensor(lengths), None))
    for b, length in enumerate(lengths):
        assert not dk[b, length:].any() and not dv[b, length:].any()


def test_the_longest_of_a_batch_need_not_be_the_last():
    """A thread's memory is for the longest."""
    agree(qkv(2, 1, 1, 8, keys=100_000), False, (0.0, None, torch.tensor([100_000, 1]), None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [20, 21])  # an odd one leaves a pair of keys half full
def test_what_lies_in_padding_does_not_matter(length, causal, dtype):
    """It may hold NaN, in tokens that nobody has set."""
    q, k, v = qkv(2, 65, 2, 40, dtype)
    k[0, length:], v[0, length:] = math.nan, math.inf
    options = (0.0, None, torch.tensor([length, 65]), None)
    got = [x.requires_grad_() for x in (q, k, v)]
    out = ops.attention(*got, causal, 0.2, *options)[0]
    gradients = torch.autograd.grad(out.sum(), got)
    assert all(x.isfinite().all() for x in (out, *gradients))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_documents(causal, packed, dtype):
    for integer, bounds in ((torch.int64, [0, 1, 1, 1, 50, 50, 51, 100, 148, 195]),
                            (torch.int32, [0, 0, 0, 195, 195]), (torch.int64, [*range(196)])):
        agree(qkv(3, 65, 2, 40, dtype), causal, (0.0, None, None, torch.tensor(bounds, dtype=integer)), packed=packed)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_memory_is_written_before_it_is_read(causal, dtype):
    """It may hold anything, and here holds NaN."""
    torch.use_deterministic_algorithms(True)  # at::empty fills what it gives
    try:
        assert torch.empty(1).isnan()
        for lengths, bounds in ((torch.tensor([0, 37]), None), (None, torch.tensor([0, 21, 21, 84, 130]))):
            agree(qkv(2, 65, 2, 40, dtype), causal, (0.0, None, lengths, bounds))
    finally:
        torch.use_deterministic_algorithms(False)


def test_documents_are_as_if_alone():
    inputs = qkv(2, 100, 2, 64)
    bounds = [0, 48, 48, 49, 130, 200]
    out = ops.attention(*inputs, True, 0.1, 0.0, None, None, torch.tensor(bounds))[0].flatten(0, 1)
    for begin, end in zip(bounds, bounds[1:], strict=False):
        alone = [x.flatten(0, 1)[None, begin:end] for x in inputs]
        assert torch.equal(ops.attention(*alone, True, 0.1, *NONE)[0][0], out[begin:end])


def test_bounds_need_not_be_contiguous():
    inputs = qkv(2, 30, 1, 8)
    spread = torch.tensor([30, 99, 7, 99])[::2]
    agree(inputs, True, (0.0, None, spread, None))


# ---- Dropout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mask", ["all", "lengths", "documents"])
def test_dropout_is_the_mask_of_the_generator(mask, causal, dtype):
    lengths = torch.tensor([65, 0, 37]) if mask == "lengths" else None
    documents = torch.tensor([0, 3, 3, 60, 131, 132, 195]) if mask == "documents" else None
    for probability, seed in ((0.1, -1), (0.5, 2**62 + 12345), (1e-4, 0)):
        options = (probability, torch.tensor([seed]), lengths, documents)
        agree(qkv(3, 65, 2, 40, dtype), causal, options)
        agree(qkv(3, 65, 2, 40, dtype), causal, options, packed=True)


def test_dropout_in_long_sequences_and_of_other_keys():
    agree(qkv(1, 300, 2, 32), True, (0.2, torch.tensor([5]), None, None))
    agree(qkv(2, 9, 2, 32, keys=130), False, (0.2, torch.tensor([5]), torch.tensor([130, 101]), None))


def test_nearly_everything_dropped():
    agree(qkv(2, 130, 2, 32), True, (0.999, torch.tensor([3]), None, None))


def dropped(probability, seed, rows=512):
    """The weights of one head, [B, rows, 128], read from the output: the values are the rows of the unit matrix."""
    q, k = torch.zeros(2, rows, 1, 128), torch.zeros(2, 128, 1, 128)
    v = torch.eye(128)[None, :, None].expand(2, -1, -1, -1)
    return ops.attention(q, k, v, False, 1.0, probability, torch.tensor([seed]), None, None)[0][:, :, 0]


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.999])
def test_dropout_keeps_its_share(probability):
    weights = dropped(probability, 11)
    kept = weights != 0
    assert torch.equal(kept.flatten(0, 1), kept_weights(11, probability, 1024, 128, 1)[0])
    expected, count = 1 - round(probability * 65536) / 65536, kept.numel()
    assert abs(int(kept.sum()) - expected * count) <= 5 * math.sqrt(count * expected * (1 - expected))
    assert torch.allclose(weights[kept], torch.tensor(1 / 128 / expected), rtol=1e-6)
    assert torch.equal(weights, dropped(probability, 11))
    assert not torch.equal(kept, dropped(probability, 12) != 0)
    assert not torch.equal(kept, dropped(probability, 11 + 2**32) != 0)  # the upper half of the seed counts


def test_too_little_dropout_to_count_is_none():
    inputs = qkv(1, 20, 1, 8)
    assert torch.equal(ops.attention(*inputs, True, 1.0, 1e-6, None, None, None)[0],
                       ops.attention(*inputs, True, 1.0, *NONE)[0])


# ---- Extremes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_huge_logits(causal, dtype):
    q, k, v = qkv(1, 100, 2, 32, dtype)
    limit = {torch.float32: 2e-2, torch.float64: 1e-10}[dtype]  # a logit of 1e4 has three digits after the point
    scale = 1e4 / float(torch.einsum("bthd,bshd->bhts", q, k).abs().max())
    agree((q, k, v), causal, scale=scale, limit=limit)
    for sign in (1, -1):  # identical logits of +-1e4
        agree((torch.full_like(q, 100.0), torch.full_like(q, sign * 100 / 32), v), causal, scale=1.0, limit=limit)


@pytest.mark.parametrize("causal", [True, False])
def test_logits_so_huge_that_one_key_alone_counts_lose_no_digits(causal):
    """A weight of 1 is 1 in backward too, however large the logit that made it."""
    q, k, v = qkv(1, 100, 2, 64)
    inputs = [x.requires_grad_() for x in (q * 1e4, k, v)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    dout = normal(*q.shape, seed=9)
    got = torch.autograd.grad(ops.attention(*inputs, causal, 0.125, *NONE)[0], v, dout)[0]
    close(got, torch.autograd.grad(reference(*exact, causal, 0.125, *NONE)[0], exact[2], dout.double())[0], 1e-6)


def test_huge_logits_in_bfloat16():
    q, k, v = qkv(1, 100, 2, 32, torch.bfloat16)
    agree((q * 40, k * 40, v), True, scale=1.0, limit=3e-2)


def test_huge_identical_logits_beyond_all_precision():
    """1e30: no exponential overflows, since no logit is above the greatest."""
    v = normal(1, 100, 1, 8)
    inputs = [x.requires_grad_() for x in (torch.full_like(v, 1e15), torch.full_like(v, 1e15), v)]
    out, _ = ops.attention(*inputs, False, 1.0, *NONE)
    close(out.detach(), v.mean(1, keepdim=True).expand_as(v).detach(), 1e-5)


def test_numbers_below_the_normal_ones_are_zero_for_the_kernels_alone():
    """What weighs less than 2^-126 is 0 in bfloat16, and the caller's own arithmetic stays as it was."""
    inputs = [x.requires_grad_() for x in qkv(1, 40, 1, 32, torch.bfloat16)]
    out, _ = ops.attention(inputs[0] * 6, inputs[1] * 6, inputs[2], True, 1.0, *NONE)
    out.sum().backward()
    assert (torch.full((64,), 1e-39) * 0.5).min() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_rows_that_see_nothing_are_zero(causal, dtype):
    inputs = [x.requires_grad_() for x in qkv(2, 50, 2, 40, dtype)]
    out, lse = ops.attention(*inputs, causal, 1.0, 0.0, None, torch.tensor([0, 50]), None)
    assert not out[0].any() and (lse[0] == -math.inf).all() and lse[1].isfinite().all()
    for gradient in torch.autograd.grad(out, inputs, normal(2, 50, 2, 40, dtype=dtype, seed=9)):
        assert not gradient[0].any() and gradient[1].isfinite().all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_bad_query_spoils_its_own_row_alone(dtype, value):
    q, k, v = qkv(2, 100, 2, 40, dtype)
    q[1, 60, 1, 3] = value
    for causal in (True, False):
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = ops.attention(*inputs, causal, 0.2, *NONE)
        bad = torch.zeros(2, 100, 2, dtype=torch.bool)
        bad[1, 60, 1] = True
        assert torch.equal(out.isnan().all(-1), bad) and torch.equal(out.isnan().any(-1), bad)
        assert torch.equal(lse.isfinite(), ~bad)
        dq, _, dv = torch.autograd.grad(out.float().sum(), inputs)  # dk: a sum over all queries in the formula too
        assert torch.equal(dq.isnan().any(-1), bad)
        spoilt = torch.zeros_like(bad)  # every key that query sees
        spoilt[1, :61 if causal else 100, 1] = True
        assert torch.equal(dv.isnan().any(-1), spoilt)


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1])
def test_every_nan_stays_one(bits):
    """Also one with low bits set, as CUDA makes them."""
    q, k, v = qkv(1, 60, 1, 40)
    k[0, 20, 0, 5] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    for causal in (True, False):
        out = ops.attention(q, k, v, causal, 0.2, *NONE)[0]
        assert torch.equal(out.isnan().any(-1)[0, :, 0], torch.arange(60) >= (20 if causal else 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("first", [0, 30, 48, 61, 100])
@pytest.mark.parametrize("causal", [True, False])
def test_logits_of_minus_infinity_are_keys_unseen(causal, first, dtype):
    """Keys 0 to `first` are masked by their own value, in some cases a whole block of them."""
    q, k, v = qkv(1, 100, 1, 40, dtype)
    q[..., 0] = 1.0
    k[:, :first, :, 0] = -math.inf
    v.requires_grad_()
    out, lse = ops.attention(q, k, v, causal, 0.2, *NONE)
    sighted = range(first, 100) if causal else range(100 if first < 100 else 0)
    for row in range(100):
        seen = slice(first, row + 1 if causal else 100) if row in sighted else slice(0)
        want, want_lse = reference(q[:, row:row + 1], k[:, seen], v[:, seen], False, 0.2, *NONE)
        close(out[:, row:row + 1].detach(), want.detach(), LIMITS[dtype])
        close(lse[:, row:row + 1], want_lse.detach(), 1e-5)
    dout = normal(*out.shape, dtype=dtype, seed=9)
    dv, = torch.autograd.grad(out, v, dout)
    assert not dv[:, :first].any()
    close(dv.double().sum(1), dout[:, sighted.start:sighted.stop].double().sum(1), LIMITS[dtype])  # weights add up to 1


# ---- Threads ---------------------------------------------------------------------------------------------------------


def run(inputs, causal, options):
    leaves = [x.detach().requires_grad_() for x in inputs]
    out, lse = ops.attention(*leaves, causal, 0.2, *options)
    return [out.detach(), lse, *torch.autograd.grad(out, leaves, normal(*out.shape, dtype=out.dtype, seed=9))]


@pytest.mark.parametrize("options", [NONE, (0.1, torch.tensor([4]), None, None),
                                     (0.0, None, None, torch.tensor([0, 100, 101, 300, 450]))],
                         ids=["plain", "dropout", "documents"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_change_nothing(threads, dtype, options):
    """Where there are heads enough for every thread, nothing is split."""
    inputs = qkv(3, 150, 4, 40, dtype)
    for causal in (True, False):
        threads(1)
        alone = run(inputs, causal, options)
        for count in (2, 3):
            threads(count)
            assert all(map(torch.equal, run(inputs, causal, options), alone))


@pytest.mark.parametrize("options", [NONE, (0.1, torch.tensor([4]), None, None),
                                     (0.0, None, None, torch.tensor([0, 5, 5, 600])),
                                     (0.1, torch.tensor([4]), torch.tensor([401]), None)],
                         ids=["plain", "dropout", "documents", "lengths"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_head_split_over_threads(threads, dtype, options):
    """Forward is the same to the bit; dq is added up in another order."""
    inputs = qkv(1, 600, 1, 40, dtype)
    limit = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float64: 1e-14}[dtype]
    for causal in (True, False):
        threads(1)
        alone = run(inputs, causal, options)
        for count in (2, 3):
            threads(count)
            split = run(inputs, causal, options)
            assert all(map(torch.equal, split[:2], alone[:2]))
            for got, want in zip(split[2:], alone[2:], strict=True):
                close(got, want, limit)
            assert all(map(torch.equal, run(inputs, causal, options), split))


def test_few_heads_of_odd_lengths_over_threads(threads):
    threads(3)
    for rows in (1, 49, 97, 200, 337):
        for causal in (True, False):
            agree(qkv(1, rows, 1, 33), causal)
            agree(qkv(1, rows, 2, 64, torch.bfloat16), causal, packed=True)
            agree(qkv(2, rows, 1, 64), causal, (0.1, torch.tensor([8]), torch.tensor([rows // 2, rows]), None))
    agree(qkv(1, 20, 1, 32, keys=500), False, (0.0, None, torch.tensor([470]), None))


# ---- What torch needs to know ----------------------------------------------------------------------------------------

CHECKED = {
    "plain": NONE,
    "dropout": (0.25, torch.tensor([3]), None, None),
    "lengths": (0.0, None, torch.tensor([0, 9]), None),
    "documents": (0.25, torch.tensor([3]), None, torch.tensor([0, 1, 1, 18])),
}


@pytest.mark.parametrize("case", CHECKED)
def test_opcheck(case):
    options = CHECKED[case]
    inputs = [x.requires_grad_() for x in qkv(2, 9, 2, 8)]
    packed = torch.stack(inputs, 2).detach().requires_grad_()
    library.opcheck(ops.attention.default, (*inputs, True, 0.3, *options))
    library.opcheck(ops.attention_packed.default, (packed, True, 0.3, *options))


@pytest.mark.parametrize("case", ["plain", "documents"])
def test_opcheck_of_the_backwards(case):
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = qkv(2, 9, 2, 8, dtype)
        packed = torch.stack([q, k, v], 2)
        results = ops.attention(q, k, v, True, 0.3, *CHECKED[case])
        rest = (*results, True, 0.3, *CHECKED[case])
        library.opcheck(ops.attention_backward.default, (normal(*q.shape, dtype=dtype), q, k, v, *rest))
        library.opcheck(ops.attention_packed_backward.default, (normal(*q.shape, dtype=dtype), packed, *rest))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_opcheck_of_views(dtype):
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in qkv(2, 7, 2, 8, dtype))
    library.opcheck(ops.attention.default, (q, k, v, False, 0.3, *NONE),
                    test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("case", CHECKED)
def test_gradcheck(case, causal):
    options = CHECKED[case]
    inputs = [x.requires_grad_() for x in qkv(2, 9, 1, 3, torch.float64)]
    assert torch.autograd.gradcheck(lambda *x: ops.attention(*x, causal, 0.5, *options)[0], inputs)
    packed = torch.stack(inputs, 2).detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: ops.attention_packed(x, causal, 0.5, *options)[0], packed)


@pytest.mark.parametrize("causal", [True, False])
def test_gradcheck_over_several_blocks(causal):
    inputs = [x.requires_grad_() for x in qkv(1, 65, 1, 40, torch.float64)]
    assert torch.autograd.gradcheck(lambda *x: ops.attention(*x, causal, 0.2, 0.1, torch.tensor([1]), None, None)[0],
                                    inputs, fast_mode=True)


def test_a_compiled_function_is_one_graph():
    def function(x, weight):
        packed = (x @ weight).unflatten(-1, (3, 2, 16))
        return ops.attention_packed(packed, True, 0.25, *NONE)[0].flatten(2).relu().sum()

    inputs = [normal(2, 20, 32).requires_grad_(), normal(32, 96, seed=1).requires_grad_()]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for got, want in zip(torch.autograd.grad(compiled(*inputs), inputs), torch.autograd.grad(function(*inputs), inputs),
                         strict=True):
        close(got, want, 1e-6)


def test_autocast():
    inputs = [x.requires_grad_() for x in qkv(1, 20, 2, 16)]
    packed = torch.stack(inputs, 2).detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = ops.attention(*inputs, True, 0.25, *NONE)
        same, _ = ops.attention_packed(packed, True, 0.25, *NONE)
        double, _ = ops.attention(*(x.double() for x in inputs), True, 0.25, *NONE)
    rounded = [x.bfloat16() for x in inputs]
    assert torch.equal(out, ops.attention(*rounded, True, 0.25, *NONE)[0]) and torch.equal(same, out)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32 and double.dtype == torch.float64
    assert all(x.dtype == torch.float32 for x in torch.autograd.grad(out.sum(), inputs))


def test_second_derivatives_are_refused():
    """Better than wrong."""
    inputs = [x.requires_grad_() for x in qkv(1, 9, 1, 8)]
    packed = torch.stack(inputs, 2).detach().requires_grad_()
    for out, x in ((ops.attention(*inputs, True, 1.0, *NONE)[0], inputs[0]),
                   (ops.attention_packed(packed, True, 1.0, *NONE)[0], packed)):
        for loss in (out.sum(), out.square().sum()):
            with pytest.raises(RuntimeError, match="second derivatives"):
                torch.autograd.grad(loss, x, create_graph=True, retain_graph=True)


# ---- What is refused -------------------------------------------------------------------------------------------------


def call(*shapes, dtypes=(torch.float32,) * 3, causal=False, dropout=0.0, seed=None, lengths=None, cu_seqlens=None):
    inputs = [torch.zeros(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    return ops.attention(*inputs, causal, 1.0, dropout, seed, lengths, cu_seqlens)


SAME = ((2, 6, 1, 8),) * 3
REFUSED = [
    (partial(call, (6, 1, 8), (6, 1, 8), (6, 1, 8)), r"must be \[B, T, H, D\]"),
    (partial(call, (2, 6, 1, 8), (2, 6, 1, 8), (2, 5, 1, 8)), "k and v must have the same shape"),
    (partial(call, (2, 6, 1, 8), (1, 6, 1, 8), (1, 6, 1, 8)), "agree in batch, heads and head width"),
    (partial(call, (2, 6, 2, 8), (2, 6, 1, 8), (2, 6, 1, 8)), "agree in batch, heads and head width"),
    (partial(call, (2, 6, 1, 8), (2, 6, 1, 9), (2, 6, 1, 9)), "agree in batch, heads and head width"),
    (partial(call, *SAME, dtypes=(torch.float32, torch.bfloat16, torch.bfloat16)), "must have the same dtype"),
    (partial(call, *SAME, dtypes=(torch.float32, torch.float32, torch.float64)), "must have the same dtype"),
    (partial(call, *SAME, dtypes=(torch.float16,) * 3), "dtype Half is not float32, bfloat16 or float64"),
    (partial(call, *SAME, dtypes=(torch.int64,) * 3), "dtype Long is not float32, bfloat16 or float64"),
    (partial(call, *((2, 6, 1, 257),) * 3), "head width 257 is not between 1 and 256"),
    (partial(call, *((2, 6, 1, 0),) * 3), "head width 0 is not between 1 and 256"),
    (partial(call, (2, 5, 1, 8), (2, 6, 1, 8), (2, 6, 1, 8), causal=True), "causal needs as many queries as keys"),
    (partial(call, *SAME, lengths=torch.tensor([6])), "one entry for each batch entry"),
    (partial(call, *SAME, lengths=torch.tensor([6, 7])), r"lengths\[1\] = 7 is not between 0 and 6"),
    (partial(call, *SAME, lengths=torch.tensor([-1, 6])), r"lengths\[0\] = -1 is not between 0 and 6"),
    (partial(call, *SAME, lengths=torch.tensor([[6, 6]])), "lengths must be a one-dimensional tensor on the CPU"),
    (partial(call, *SAME, lengths=torch.tensor([6.0, 6.0])), "lengths must hold int32 or int64"),
    (partial(call, *SAME, cu_seqlens=torch.tensor([0, 6, 11])), "begin with 0 and end with 12, the number of tokens"),
    (partial(call, *SAME, cu_seqlens=torch.tensor([1, 12])), "begin with 0 and end with 12"),
    (partial(call, *SAME, cu_seqlens=torch.tensor([], dtype=torch.long)), "begin with 0 and end with 12"),
    (partial(call, *SAME, cu_seqlens=torch.tensor([0, 13, 12])), "must not decrease: 13, 12"),
    (partial(call, *SAME, cu_seqlens=torch.tensor([0, 7, 6, 12])), "must not decrease: 7, 6"),
    (partial(call, *SAME, cu_seqlens=torch.tensor([0, -1, 12])), "must not decrease: 0, -1"),
    (partial(call, *SAME, cu_seqlens=torch.tensor([0.0, 12.0])), "cu_seqlens must hold int32 or int64"),
    (partial(call, *SAME, cu_seqlens=torch.tensor([0, 12]), lengths=torch.tensor([6, 6])), "excludes lengths"),
    (partial(call, (2, 5, 1, 8), (2, 6, 1, 8), (2, 6, 1, 8), cu_seqlens=torch.tensor([0, 10])),
     "needs as many queries as keys"),
    (partial(call, *SAME, dropout=0.1), "dropout needs a seed"),
    (partial(call, *SAME, dropout=0.1, seed=torch.tensor([1, 2])), "dropout needs a seed"),
    (partial(call, *SAME, dropout=0.1, seed=torch.tensor([1.0])), "dropout needs a seed"),
    (partial(call, *SAME, dropout=1.0, seed=torch.tensor([1])), r"dropout 1 is not in \[0, 1\)"),
    (partial(call, *SAME, dropout=-0.1, seed=torch.tensor([1])), r"dropout -0.1 is not in \[0, 1\)"),
    (partial(call, *SAME, dropout=math.nan, seed=torch.tensor([1])), r"dropout nan is not in \[0, 1\)"),
    (partial(call, *SAME, dropout=0.999999, seed=torch.tensor([1])), "leaves nothing"),
]


@pytest.mark.parametrize("wrong,message", REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_refused(wrong, message):
    with pytest.raises(RuntimeError, match=message):
        wrong()


def test_a_projection_that_is_none_is_refused():
    for shape in ((2, 6, 1, 8), (2, 6, 2, 1, 8)):
        with pytest.raises(RuntimeError, match=r"packed projection must be \[B, T, 3, H, D\]"):
            ops.attention_packed(torch.zeros(shape), True, 1.0, *NONE)


@pytest.mark.parametrize("wrong", ["dout", "dout dtype", "out", "out dtype", "lse", "lse dtype"])
def test_a_backward_of_another_forward_is_refused(wrong):
    """It would be read beyond its end."""
    q, k, v = qkv(2, 30, 1, 8)
    given = {"dout": q, "out": q, "lse": torch.zeros(2, 30, 1)}
    name, _, dtype = wrong.partition(" ")
    given[name] = given[name].double() if dtype else given[name][:, :1]
    results = given["out"], given["lse"]
    with pytest.raises(RuntimeError):
        ops.attention_backward(given["dout"], q, k, v, *results, True, 1.0, *NONE)
    with pytest.raises(RuntimeError):
        ops.attention_packed_backward(given["dout"], torch.stack((q, k, v), 2), *results, True, 1.0, *NONE)


# ---- Instruction sets ------------------------------------------------------------------------------------------------

CORE = (test_any_length_and_width, test_more_keys_than_queries_and_fewer, test_any_scale, test_key_padding,
        test_numbers_below_the_normal_ones_are_zero_for_the_kernels_alone,
        test_documents, test_dropout_is_the_mask_of_the_generator, test_dropout_keeps_its_share, test_huge_logits,
        test_huge_logits_in_bfloat16, test_a_bad_query_spoils_its_own_row_alone, test_every_nan_stays_one,
        test_logits_of_minus_infinity_are_keys_unseen, test_a_head_split_over_threads)


def test_the_instruction_set_asked_for():
    module = extension.load()
    assert module.cpu_isa() == (os.environ.get("AURA_CPU_ISA") or module.cpu_isas()[0])
    assert module.cpu_isas()[-1] == "portable"


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512", "avx512bf16", "amx"])
def test_other_instruction_sets(isa):
    support.repeat_with(isa, (*CORE, test_the_instruction_set_asked_for))


def print_bits():
    """Prints the bits by which the ways differ: kernels with pairs round the weights, in tiles as well."""
    import aura.fused  # noqa: F401
    out, _ = ops.attention(*qkv(1, 100, 2, 64, torch.bfloat16), True, 0.125, *NONE)
    print("bits", zlib.crc32(out.view(torch.uint8).numpy()))


def test_pairs_of_bfloat16_are_for_the_processors_that_are_faster_with_them():
    isas = extension.load().cpu_isas()
    if "avx512bf16" not in isas:
        pytest.skip("this processor has no pairs of bfloat16")
    bits = {}
    for isa in ("", *isas[:isas.index("avx512") + 1]):
        code = "from aura import extension; extension.load(); from tests import test_attention as t; t.print_bits()"
        status, output = support.run(["-c", code], support.ROOT, AURA_CPU_ISA=isa)
        assert status == 0, output
        bits[isa] = output.splitlines()[-1]
    amd = "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    default = bits.pop("")
    assert default == bits["amx" if "amx" in bits else "avx512bf16" if amd else "avx512"]
    assert bits["avx512"] != bits["avx512bf16"]
