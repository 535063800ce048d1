"""Layer and RMS normalisation in one pass over memory, alone or after a residual addition with dropout.

Layer normalisation: Ba et al. 2016, "Layer normalization", equation 4. RMS normalisation: Zhang and Sennrich 2019,
"Root mean square layer normalization", equation 4.

Shapes: x, residual [..., C], C >= 1, any strides; weight, bias [C]. Dtypes: all float32, all bfloat16 or all float64;
x bfloat16 with weight and bias float32; x bfloat16 with residual, weight and bias float32, as autocast makes them. On a
GPU float16 is taken wherever bfloat16 is, and float64 is not. Anything else is a RuntimeError. y has the dtype of the
residual, or that of x where there is none or like_x asks for it: a y that only products in the dtype of x read
need not be written wider, nor its gradient read wider. Autocast changes nothing: dtypes are taken as they come, and
mean and variance are float32 (float64 for float64) in every case.

dropout is the probability of dropping an element of x; kept ones are scaled by 1 / (1 - dropout), where dropout counts
in steps of 1/65536. The mask is a function of `seed` (int64, one element, on the CPU; needed when dropout > 0) and of
the element's row and column alone: philox.h under the counter (row, column // 8, 0, 1).
"""

import math

import torch

from aura.fused.fake import register_fake

_ops = torch.ops.aura


def layer_norm(x, weight, bias=None, eps=1e-5):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last axis. Returns [..., C]."""
    return _ops.layer_norm(x, weight, bias, eps)[0]


def rms_norm(x, weight, eps=1e-6):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis. Returns [..., C]."""
    return _ops.rms_norm(x, weight, eps)[0]


def add_layer_norm(x, residual, weight, bias=None, eps=1e-5, dropout=0.0, seed=None, like_x=False):
    """new_residual = residual + dropout(x); y = layer_norm(new_residual). Returns (y, new_residual), each [..., C]."""
    return _ops.add_layer_norm(x, residual, weight, bias, eps, dropout, seed, like_x)[:2]


def post_layer_norm(x, residual, weight, bias=None, eps=1e-5, dropout=0.0, seed=None):
    """y = layer_norm(residual + dropout(x)), for an x of 16 bits with float32 for the rest. Returns y twice, each
    [..., C]: in float32, and in the dtype of x for products. One pass adds up the gradients of both."""
    return _ops.post_layer_norm(x, residual, weight, bias, eps, dropout, seed)[:2]


def add_rms_norm(x, residual, weight, eps=1e-6, dropout=0.0, seed=None, like_x=False):
    """new_residual = residual + dropout(x); y = rms_norm(new_residual). Returns (y, new_residual), each [..., C]."""
    return _ops.add_rms_norm(x, residual, weight, eps, dropout, seed, like_x)[:2]


def _statistic(x):
    """Like mean or rstd of x: [rows]."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(math.prod(x.shape[:-1]), dtype=dtype)


def _like(x, dtype=None):
    """An empty tensor like x, contiguous whatever its strides."""
    return x.new_empty(x.shape, dtype=dtype)


@register_fake("aura::layer_norm")
def _(x, weight, bias, eps):
    return _like(x), _statistic(x), _statistic(x)


@register_fake("aura::rms_norm")
def _(x, weight, eps):
    return _like(x), _statistic(x)


@register_fake("aura::add_layer_norm")
def _(x, residual, weight, bias, eps, dropout, seed, like_x=False):
    return _like(x if like_x else residual), _like(residual), _statistic(x), _statistic(x)


@register_fake("aura::post_layer_norm")
def _(x, residual, weight, bias, eps, dropout, seed):
    return _like(residual), _like(x), _like(residual), _statistic(x), _statistic(x)


@register_fake("aura::add_rms_norm")
def _(x, residual, weight, eps, dropout, seed, like_x=False):
    return _like(x if like_x else residual), _like(residual), _statistic(x)


def _same_gradient(new_residual, x_dtype, dropout):
    """Whether x and the residual have one and the same gradient: the ops then return it once, as dresidual."""
    return x_dtype == new_residual.dtype and math.floor(dropout * 65536 + 0.5) == 0


def _fake_dx(new_residual, x_dtype, dropout):
    empty = _same_gradient(new_residual, x_dtype, dropout)
    return new_residual.new_empty(0) if empty else _like(new_residual, x_dtype)


@register_fake("aura::layer_norm_backward")
def _(dy, x, weight, mean, rstd, has_bias):
    return _like(x), _like(weight), weight.new_empty(len(weight) if has_bias else 0)


@register_fake("aura::rms_norm_backward")
def _(dy, x, weight, rstd):
    return _like(x), _like(weight)


@register_fake("aura::add_layer_norm_backward")
def _(dy, d_new_residual, new_residual, weight, mean, rstd, has_bias, x_dtype, dropout, seed):
    dbias = weight.new_empty(len(weight) if has_bias else 0)
    return _fake_dx(new_residual, x_dtype, dropout), _like(new_residual), _like(weight), dbias


@register_fake("aura::post_layer_norm_backward")
def _(dy, dy_like_x, total, weight, mean, rstd, has_bias, x_dtype, dropout, seed):
    dbias = weight.new_empty(len(weight) if has_bias else 0)
    return _like(total, x_dtype), _like(total), _like(weight), dbias


@register_fake("aura::add_rms_norm_backward")
def _(dy, d_new_residual, new_residual, weight, rstd, x_dtype, dropout, seed):
    return _fake_dx(new_residual, x_dtype, dropout), _like(new_residual), _like(weight)
