"""GELU, SwiGLU and a sigmoid gate: what torch.compile needs to know of csrc/ops_activation.cpp.

F half the last dimension of a packed projection.
"""

import torch

from aura.fused.fake import register_fake

_ops = torch.ops.aura


def gelu_tanh(x):
    """x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), GPT-2's GELU (Hendrycks and Gimpel 2016, section 2).

    x: float32, bfloat16, float64 or, on a GPU alone, float16, of any shape. Returns the same shape and dtype.
    """
    return _ops.gelu_tanh(x)


def swiglu(x):
    """SiLU(gate) * up (Shazeer 2020, equation 6, without the projections).

    x: [..., 2F], gate in the first F of a row and up in the rest; dtypes of gelu_tanh. Returns [..., F].
    """
    return _ops.swiglu(x)


def sigmoid_gate(gate, x):
    """sigmoid(gate) * x. Both [..., C] of one dtype, those of gelu_tanh; copied unless rows are evenly apart."""
    return _ops.sigmoid_gate(gate, x)


@register_fake("aura::gelu_tanh")
def _gelu_tanh_fake(x):
    return x.new_empty(x.shape)


@register_fake("aura::gelu_tanh_backward")
@register_fake("aura::swiglu_backward")
def _backward_fake(dy, x):
    return x.new_empty(x.shape)


@register_fake("aura::swiglu")
def _swiglu_fake(x):
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@register_fake("aura::sigmoid_gate")
def _sigmoid_gate_fake(gate, x):
    return x.new_empty(x.shape)


@register_fake("aura::sigmoid_gate_backward")
def _sigmoid_gate_backward_fake(dy, gate, x):
    return x.new_empty(x.shape), x.new_empty(x.shape)
