"""Rotary positions: what torch.compile needs to know of csrc/ops_rotary.cpp."""

import torch

from aura.fused.fake import register_fake

_ops = torch.ops.aura


def rotary_packed(qkv, cosine, sine):
    """q and k turned by the angles of their positions (Su et al. 2021, section 3.4.2), pairs made of the two halves of
    a head; v as it is.

    qkv: [B, T, 3, H, D] with D even; float32, bfloat16 (computed in float32), float64 or, on a GPU in its place,
    float16; copied where its rows are not evenly apart. cosine, sine: [T, D / 2], float32, or float64 for float64.
    Returns the same, contiguous.
    """
    return _ops.rotary(qkv, cosine, sine, False)


@register_fake("aura::rotary")
def _fake(qkv, cosine, sine, back):
    return qkv.new_empty(qkv.shape)
