"""Attention that never holds the matrix of scores: what torch.compile and autocast need to know of ops_attention.cpp.

Shapes: B batch, H heads, T queries, S keys, D head width from 1 to 256; any strides as long as D is contiguous, else a
copy is made. Dtypes, the same for q, k and v: float32, bfloat16 (computed in float32) and float64 or, on a GPU, float16
and bfloat16 with D a multiple of 8 up to 128; anything else is a RuntimeError, as are shapes that disagree. Under
autocast on the CPU float32 becomes bfloat16. First derivatives only.
"""

import torch
from torch import library

from aura.fused.fake import register_fake

_ops = torch.ops.aura


def attention(q, k, v, causal, scale, dropout, seed, lengths, cu_seqlens):
    """softmax(scale * q k^T) v for each head (Vaswani et al. 2017, section 3.2.1; computed as Dao et al. 2022 do).

    q: [B, T, H, D]; k, v: [B, S, H, D]. causal: position t sees 0..t; needs T == S.
    dropout: probability of dropping a weight, in steps of 1/65536; it needs seed: int64, one element, on the CPU.
    The mask is a function of the seed and of the weight's place alone: philox.h under the counter (row of the query in
    the flattened [B, T], key // 8 counted from the start of its sequence, head, 0).
    lengths: int [B], how many keys of each batch entry count; a query that sees none gives zeros.
    cu_seqlens: int [documents + 1], bounds of documents in the flattened [B * T]; tokens see their own document alone.
    Returns [B, T, H, D], contiguous.
    """
    return _ops.attention(q, k, v, causal, scale, dropout, seed, lengths, cu_seqlens)[0]


def attention_packed(qkv, causal, scale, dropout, seed, lengths, cu_seqlens):
    """The same for q, k and v in one projection [B, T, 3, H, D], whose gradient is one tensor too."""
    return _ops.attention_packed(qkv, causal, scale, dropout, seed, lengths, cu_seqlens)[0]


def _fake_outputs(q):
    statistics = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=statistics)


@register_fake("aura::attention")
def _(q, k, v, causal, scale, dropout, seed, lengths, cu_seqlens):
    return _fake_outputs(q)


@register_fake("aura::attention_packed")
def _(qkv, causal, scale, dropout, seed, lengths, cu_seqlens):
    return _fake_outputs(qkv.select(2, 0))


@register_fake("aura::attention_backward")
def _(dout, q, k, v, out, lse, causal, scale, dropout, seed, lengths, cu_seqlens):
    return tuple(t.new_empty(t.shape) for t in (q, k, v))


@register_fake("aura::attention_packed_backward")
def _(dout, qkv, out, lse, causal, scale, dropout, seed, lengths, cu_seqlens):
    return qkv.new_empty(qkv.shape)


for _name in ("attention", "attention_packed"):
    library.register_autocast(f"aura::{_name}", "cpu", torch.bfloat16)
