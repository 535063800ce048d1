"""GPT-2 as published: pre-norm, learned positions, tanh GELU, tied head (Radford et al. 2019; openai/gpt-2)."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from aura import ops
from aura.errors import UserError
from aura.models import blocks
from aura.models.cache import KVCache
from aura.products import Linear


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT-2. seq_len is the longest context, the length of the position table."""

    vocab_size: int = 32_000
    seq_len: int = 1024
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.1

    def check(self):
        """Raise UserError when the heads do not divide the width."""
        if self.n_embd % self.n_head:
            raise UserError(f"--n-embd {self.n_embd} no es múltiplo de --n-head {self.n_head}; por ejemplo "
                            f"--n-embd {math.ceil(self.n_embd / self.n_head) * self.n_head}")

    def parameters(self):
        """Number of trainable parameters (the tied head counts once)."""
        width = self.n_embd
        block = 12 * width * width + 13 * width  # four matrices with their biases, two norms
        return (self.vocab_size + self.seq_len) * width + self.n_layer * block + 2 * width

    def flops_per_token(self):
        """Matrix-multiplication FLOPs of one training step per token: forward once, backward twice.

        2 per weight used in a product, plus 4 * seq_len * n_embd per layer for q k^T and its product with v, counted
        without the causal saving (Kaplan et al. 2020, appendix B; Chowdhery et al. 2022, appendix B).
        """
        products = self.n_layer * 12 * self.n_embd**2 + self.vocab_size * self.n_embd
        return 3 * (2 * products + 4 * self.n_layer * self.seq_len * self.n_embd)


PRESETS = {
    "demo": GPTConfig(vocab_size=8192, seq_len=128, n_layer=4, n_head=4, n_embd=256, dropout=0.0),
    "gpt2": GPTConfig(),
    "gpt2-medium": GPTConfig(n_layer=24, n_head=16, n_embd=1024),
    "gpt2-large": GPTConfig(n_layer=36, n_head=20, n_embd=1280),
    "gpt2-xl": GPTConfig(n_layer=48, n_head=25, n_embd=1600),
}


class LayerNorm(nn.Module):
    """Layer normalisation with weight and bias of width `width`."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return ops.layer_norm(x, self.weight, self.bias)

    def add(self, branch, x, dropout):
        """(norm(new), new) with new = x + dropout(branch); the norm, for products alone, in the branch's dtype."""
        return ops.add_layer_norm(branch, x, self.weight, self.bias, dropout=dropout, like_x=True)


class Attention(nn.Module):
    """Causal self-attention with one packed projection for q, k and v."""

    def __init__(self, config):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = Linear(config.n_embd, config.n_embd)

    def forward(self, x, cache, layer):
        batch, length, width = x.shape
        qkv = self.c_attn(x).view(batch, length, 3, self.n_head, width // self.n_head)
        if cache is None:
            y = ops.attention_packed(qkv, dropout=self.dropout if self.training else 0.0)
        else:
            q, k, v = qkv.unbind(2)
            y = ops.attention(q, *cache.extend(layer, k, v), causal=length > 1)
        return self.c_proj(y.reshape(batch, length, width))


class MLP(nn.Module):
    """Two matrices, four times as wide in the middle, tanh-approximated GELU."""

    def __init__(self, config):
        super().__init__()
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        return self.c_proj(ops.gelu_tanh(self.c_fc(x)))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    Each addition is fused with the norm that follows it, so a block returns its last branch for the next one to add,
    and takes that of the one before, None in the first. It ends with a product, then, whose result its own backward
    does not need: a block that is computed again leaves it out. selective: the second half is computed again.
    """

    def __init__(self, config):
        super().__init__()
        self.dropout = config.dropout
        self.ln_1 = LayerNorm(config.n_embd)
        self.attn = Attention(config)
        self.ln_2 = LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, branch, x, cache=None, layer=0, selective=False):
        normed, x = (self.ln_1(x), x) if branch is None else self.ln_1.add(branch, x, self._dropout())
        return blocks.train(blocks.as_it_is, selective, self._second, self.attn(normed, cache, layer), x)

    def _second(self, branch, x):
        normed, x = self.ln_2.add(branch, x, self._dropout())
        return self.mlp(normed), x

    def _dropout(self):
        return self.dropout if self.training else 0.0


class GPT(nn.Module):
    """GPT-2. Call with tokens [B, T] (integers, T <= seq_len); returns logits [B, T, vocab_size].

    With targets [B, T] too it returns their summed cross-entropy in nats instead; the logits never exist as a whole.

    grad_checkpointing: what is computed again in backward while training (blocks.train): "full" or another true value:
    whole blocks; "selective": of each the MLP with the norm before it, which is more than half of what a block keeps
    and, without its last product, a third of what it computes, and nothing of attention.
    """

    def __init__(self, config):
        super().__init__()
        config.check()
        self.config = config
        self.grad_checkpointing = False
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.seq_len, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = LayerNorm(config.n_embd)
        self.run = blocks.as_it_is

    @torch.no_grad()
    def init_weights(self, seed):
        """N(0, 0.02) everywhere; the two matrices that write to the residual stream scaled by 1 / sqrt(2 n_layer)
        (Radford et al. 2019, section 2.3); biases 0, norms 1. The same seed gives the same weights on every device."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = 0.02 / math.sqrt(2 * self.config.n_layer) if "c_proj" in name else 0.02
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, scale, generator=generator))
            else:
                parameter.fill_(1.0 if "ln_" in name and name.endswith("weight") else 0.0)
        return self

    def blocks(self):
        """The parts that may be sharded each for itself."""
        return list(self.h)

    def compiled(self):
        """This model with its blocks under torch.compile for training: a graph for the first, whose norm is float32
        under autocast, and one for all others."""
        self.run = blocks.compiled()
        return self

    def empty_cache(self):
        """A KVCache for generating texts, as many at a time as it is first given."""
        return KVCache(self.config.n_layer, self.config.seq_len)

    def forward(self, tokens, targets=None, cache=None):
        hidden = self._hidden(tokens, cache)
        if cache is not None:
            cache.advance(tokens.shape[1])
        if targets is None:
            return F.linear(hidden, self.wte.weight)
        return ops.linear_cross_entropy(hidden.flatten(0, 1), self.wte.weight, targets.flatten())

    def _hidden(self, tokens, cache):
        """What the head reads, [B, T, C]."""
        start = 0 if cache is None else cache.length
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        branch, x = None, self.drop(self.wte(tokens) + self.wpe(positions))
        again, selective = self.grad_checkpointing, self.grad_checkpointing == "selective"
        for layer, block in enumerate(self.h):
            if self.training and cache is None:
                branch, x = blocks.train(self.run, again and not selective, block, branch, x, None, 0, selective)
            else:
                branch, x = block(branch, x, cache, layer)
        return self.ln_f.add(branch, x, self.config.dropout if self.training else 0.0)[0]
