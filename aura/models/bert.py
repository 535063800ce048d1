"""BERT (Devlin et al. 2019) from its parts: post-norm transformer encoder, and the head that answers questions."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from aura import ops
from aura.errors import UserError
from aura.models import blocks
from aura.products import Linear


@dataclass(frozen=True)
class BertConfig:
    """Sizes of an encoder. n_ff: width between the two matrices of an MLP; n_types: kinds of segments."""

    vocab_size: int = 30_522
    seq_len: int = 512
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    n_ff: int = 3072
    n_types: int = 2
    dropout: float = 0.1
    attention_dropout: float = 0.1
    norm_eps: float = 1e-12

    def check(self):
        """Raise UserError when the heads do not divide the width."""
        if self.n_embd % self.n_head:
            raise UserError(f"--model: {self.n_embd} de ancho no se reparten entre {self.n_head} cabezas de atención")

    def parameters(self):
        """Number of trainable parameters of QuestionAnswering."""
        width, inner = self.n_embd, self.n_ff
        embeddings = (self.vocab_size + self.seq_len + self.n_types) * width + 2 * width
        attention = 4 * (width + 1) * width + 2 * width
        mlp = (width + 1) * inner + (inner + 1) * width + 2 * width
        return embeddings + self.n_layer * (attention + mlp) + 2 * (width + 1)

    def flops(self, length):
        """Matrix-multiplication FLOPs of one training step of one sequence of `length` tokens, forward once, backward
        twice: 2 per weight and token, and 4 * length * n_embd per token and layer for q k^T and its product with v
        (Chowdhery et al. 2022, appendix B)."""
        weights = self.n_layer * (4 * self.n_embd**2 + 2 * self.n_embd * self.n_ff) + 2 * self.n_embd
        return 3 * length * (2 * weights + 4 * self.n_layer * length * self.n_embd)


PRESETS = {  # tiny and small: Turc et al. 2019, table 1 (their BERT-Tiny and BERT-Small)
    "base": BertConfig(),
    "small": BertConfig(n_layer=4, n_head=8, n_embd=512, n_ff=2048),
    "tiny": BertConfig(n_layer=2, n_head=2, n_embd=128, n_ff=512),
}


class LayerNorm(nn.Module):
    """Layer normalisation; add() is a post-norm model's step."""

    def __init__(self, width, eps):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return ops.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, branch, x, dropout):
        """norm(x + dropout(branch)), in the dtype of x and, for the branch after it, in that of the branch."""
        return ops.post_layer_norm(branch, x, self.weight, self.bias, self.eps, dropout)


class Attention(nn.Module):
    """Self-attention over the tokens that are not padding, with one packed projection for q, k and v."""

    def __init__(self, config):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.attention_dropout
        self.qkv = Linear(config.n_embd, 3 * config.n_embd)
        self.output = Linear(config.n_embd, config.n_embd)

    def forward(self, x, lengths):
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.n_head, width // self.n_head)
        y = ops.attention_packed(qkv, causal=False, lengths=lengths, dropout=self.dropout if self.training else 0.0)
        return self.output(y.reshape(batch, length, width))


class MLP(nn.Module):
    """Two matrices with the exact (erf) GELU between them."""

    def __init__(self, config):
        super().__init__()
        self.inner = Linear(config.n_embd, config.n_ff)
        self.output = Linear(config.n_ff, config.n_embd)

    def forward(self, x):
        return self.output(ops.gelu(self.inner(x)))


class Block(nn.Module):
    """x = norm(x + attention(x)), then x = norm(x + mlp(x)). Takes and returns x and its copy for the branches."""

    def __init__(self, config):
        super().__init__()
        self.dropout = config.dropout
        self.attention = Attention(config)
        self.norm_1 = LayerNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)
        self.norm_2 = LayerNorm(config.n_embd, config.norm_eps)

    def forward(self, x, copy, lengths):
        dropout = self.dropout if self.training else 0.0
        x, copy = self.norm_1.add(self.attention(copy, lengths), x, dropout)
        return self.norm_2.add(self.mlp(copy), x, dropout)


class Bert(nn.Module):
    """The encoder. Call with tokens and types (int64 [B, T], T <= seq_len) and lengths (int [B]), how many tokens of
    each row are not padding; returns [B, T, n_embd], whose values behind a row's length mean nothing."""

    def __init__(self, config):
        super().__init__()
        config.check()
        self.config = config
        self.grad_checkpointing = False
        self.tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.positions = nn.Embedding(config.seq_len, config.n_embd)
        self.types = nn.Embedding(config.n_types, config.n_embd)
        self.norm = LayerNorm(config.n_embd, config.norm_eps)
        self.drop = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.run = blocks.as_it_is

    def forward(self, tokens, types, lengths):
        positions = self.positions.weight[:tokens.shape[1]]
        x = copy = self.drop(self.norm(self.tokens(tokens) + positions + self.types(types)))
        for layer in self.layers:
            if self.training:
                x, copy = blocks.train(self.run, self.grad_checkpointing, layer, x, copy, lengths)
            else:
                x, copy = layer(x, copy, lengths)
        return x


class QuestionAnswering(nn.Module):
    """Bert with a head that scores each token as the first and as the last of the answer (section 4.2).

    Call with tokens, types [B, T] and lengths [B]; returns logits [B, T, 2], minus infinity on padding. With positions
    (int64 [B, 2], first and last token of the answer) it returns the summed loss in nats instead: of each row, the mean
    of the two cross-entropies.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.bert = Bert(config)
        self.head = nn.Linear(config.n_embd, 2)

    @torch.no_grad()
    def init_weights(self, seed):
        """Matrices from N(0, 0.02) cut at two standard deviations (appendix A.2 and the published code), biases 0,
        norms 1. The same seed gives the same weights on every device."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                values = torch.empty(parameter.shape)
                nn.init.trunc_normal_(values, 0.0, 0.02, -0.04, 0.04, generator=generator)
                parameter.copy_(values)
            else:
                parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
        return self

    def blocks(self):
        """The parts that may each be sharded by itself."""
        return list(self.bert.layers)

    def row_gradients(self):
        """The parameters in whose gradient a batch touches few rows (see exchange.py)."""
        return [self.bert.tokens.weight]

    def compiled(self):
        """This model with its blocks under torch.compile for training: one graph for all lengths of a batch."""
        self.bert.run = blocks.compiled(dynamic=True)
        return self

    def forward(self, tokens, types, lengths, positions=None):
        logits = self.head(self.bert(tokens, types, lengths)).float()
        padding = torch.arange(tokens.shape[1], device=tokens.device) >= lengths[:, None]
        logits = logits.masked_fill(padding[..., None], -math.inf)
        if positions is None:
            return logits
        return F.cross_entropy(logits, positions, reduction="sum") / 2
