"""The operations the models are built on: one entrance each, whatever carries them out.

Reference versions in plain torch. Shapes: B batch, H heads, T positions, D head width, C = H * D.
"""

import torch.nn.functional as F


def attention(q, k, v, *, causal=True, dropout=0.0):
    """softmax(q k^T / sqrt(D)) v (Vaswani et al. 2017, section 3.2.1).

    q: [B, H, T, D]; k, v: [B, H, S, D], same dtype. causal: position t sees 0..t; needs T == S.
    dropout: probability of dropping an attention weight. Returns [B, H, T, D].
    """
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal)


def layer_norm(x, weight, bias, eps=1e-5):
    """Layer normalisation over the last axis (Ba et al. 2016). x: [..., C]; weight, bias: [C]. Returns [..., C]."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def describe():
    """A short Spanish phrase for the log: what carries out attention and norms."""
    return "atención: scaled_dot_product_attention de torch; normas: layer_norm de torch"
