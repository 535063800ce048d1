"""HRM-Text1: two transformer stacks, H (slow) and L (fast), that run in cycles over the same tokens, both causal.

    z_H = embedding, z_L = a fixed random vector
    for each H cycle:   L_cycles times z_L = L(z_L + z_H), then z_H = H(z_H + z_L)
    logits = (z_H * head weight) @ embedding.T

The hierarchy, the two states and deep supervision in segments are from HRM (Wang et al. 2025, arXiv:2506.21734); causal
stacks, pre-norm with a norm at each stack's exit, gated attention and the growing number of passes that gradients flow
through are from HRM-Text (github.com/sapientinc/HRM-Text). docs/hrm.md says what differs.

Shapes: B batch, T tokens, C width, H heads of D = C / H, V vocabulary.
"""

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

MIN_BP_PASSES, MAX_BP_PASSES, BP_WARMUP = 2, 5, 0.2
EXIT_PROBABILITY = 0.5  # generation stops thinking about a token once it has probably halted


@dataclass(frozen=True)
class HRMConfig:
    """Sizes of an HRM-Text1. n_layer: blocks of each of the two stacks. segments: how often all cycles are run, each
    with a loss of its own. reinject: add the embedding to z_H again before each pass of L, as the first HRM did.
    ponder_price: nats of loss that one more segment must save a token to be worth it. exit_weights: the norms at the
    stacks' exits have weights, as in all models before there was this field; HRM-Text's have none, and here only what
    the head reads is then weighted."""

    vocab_size: int = 32_000
    seq_len: int = 512
    n_layer: int = 5
    n_head: int = 6
    n_embd: int = 768
    n_ff: int = 2048
    h_cycles: int = 2
    l_cycles: int = 3
    segments: int = 1
    reinject: bool = False
    ponder_price: float = 0.01
    rope_theta: float = 10_000.0
    exit_weights: bool = True

    def check(self):
        """Raise UserError when the heads do not divide the width into even parts."""
        if self.n_embd % (2 * self.n_head):
            raise UserError(f"--n-embd {self.n_embd} no es múltiplo del doble de --n-head {self.n_head}; por ejemplo "
                            f"--n-embd {math.ceil(self.n_embd / self.n_head / 2) * self.n_head * 2}")

    @property
    def passes(self):
        """Passes through a stack in one segment."""
        return self.h_cycles * (self.l_cycles + 1)

    @property
    def input_learns(self):
        """Whether the passes with gradients, once they are MAX_BP_PASSES, reach back to one that reads the embedding:
        from the first of H on, 1 + (h_cycles - 1) * (l_cycles + 1) passes remain."""
        return self.reinject or 1 + (self.h_cycles - 1) * (self.l_cycles + 1) <= MAX_BP_PASSES

    def parameters(self):
        """Number of trainable parameters (embedding and head are one; a halting head where there are segments)."""
        width = self.n_embd
        block = 5 * width * width + 3 * width * self.n_ff + 2 * width
        weighted = 2 if self.exit_weights else 1
        return ((self.vocab_size + weighted) * width + 2 * self.n_layer * block
                + (width + 1 if self.segments > 1 else 0))

    def flops_per_token(self, bp_passes=MAX_BP_PASSES):
        """Matrix-multiplication FLOPs of one training step per token: forward through all passes, backward (twice as
        many) through the last `bp_passes` of each segment.

        2 per weight used in a product, plus 4 * seq_len * n_embd per layer and pass for q k^T and its product with v,
        without the causal saving (Kaplan et al. 2020, appendix B). Recomputed blocks are not counted.
        """
        width = self.n_embd
        layer = 2 * (5 * width * width + 3 * width * self.n_ff) + 4 * self.seq_len * width
        stack = self.n_layer * layer
        head = 3 * 2 * self.vocab_size * width
        halting = 2 * 2 * width * (self.segments - 1)  # no gradient flows from it into the states
        return self.segments * ((self.passes + 2 * min(bp_passes, self.passes)) * stack + head) + halting


PRESETS = {
    "demo": HRMConfig(vocab_size=8192, seq_len=128, n_layer=2, n_head=2, n_embd=256, n_ff=768, exit_weights=False),
    "100m": HRMConfig(exit_weights=False),
    "1b": HRMConfig(seq_len=1024, n_layer=16, n_head=12, n_embd=1536, n_ff=3840, exit_weights=False),
}


def bp_passes(step, steps):
    """How many of the last stack passes gradients flow through in the 0-based `step` of `steps`: from 2 to 5 over the
    first fifth of training (HRM-Text)."""
    done = min(1.0, step / (BP_WARMUP * steps))
    return MIN_BP_PASSES + int(done * (MAX_BP_PASSES - MIN_BP_PASSES))


class RMSNorm(nn.Module):
    """Root mean square normalisation, computed in float32. weighted: with a weight of width `width`. like_branch: its
    output is read by products alone, and has the dtype of the branch."""

    def __init__(self, width, like_branch=True, weighted=True):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width)) if weighted else None
        self.like_branch = like_branch

    def add(self, branch, x):
        """(norm(new), new) with new = x + branch."""
        weight = x.new_ones(x.shape[-1]) if self.weight is None else self.weight
        return ops.add_rms_norm(branch, x, weight, like_x=self.like_branch)


class Attention(nn.Module):
    """Causal self-attention with rotary positions, its output gated by a sigmoid; one projection for gate, q, k, v."""

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.gqkv = Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.out = Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x, rotation, cache, slot, cu_seqlens):
        batch, length, width = x.shape
        gate, qkv = self.gqkv(x).split((width, 3 * width), dim=-1)
        qkv = ops.rotary_packed(qkv.view(batch, length, 3, self.n_head, width // self.n_head), *rotation)
        if cache is None:
            y = ops.attention_packed(qkv, cu_seqlens=cu_seqlens, rows_apart=True)
        else:
            q, k, v = qkv.unbind(2)
            y = ops.attention(q, *cache.extend(slot, k, v), causal=length > 1)
        return self.out(ops.sigmoid_gate(gate, y.reshape(batch, length, width)))


class MLP(nn.Module):
    """SwiGLU: two matrices side by side, one back."""

    def __init__(self, config):
        super().__init__()
        self.gate_up = Linear(config.n_embd, 2 * config.n_ff, bias=False)
        self.down = Linear(config.n_ff, config.n_embd, bias=False)

    def forward(self, x):
        return self.down(ops.swiglu(self.gate_up(x)))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); each addition fused with the norm that follows it, so that it ends
    with a branch for the next one to add, as in GPT."""

    def __init__(self, config):
        super().__init__()
        self.norm_1 = RMSNorm(config.n_embd)
        self.attn = Attention(config)
        self.norm_2 = RMSNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, branch, x, rotation, cache=None, slot=0, cu_seqlens=None):
        normed, x = self.norm_1.add(branch, x)
        normed, x = self.norm_2.add(self.attn(normed, rotation, cache, slot, cu_seqlens), x)
        return self.mlp(normed), x


class Stack(nn.Module):
    """The blocks of H or of L. Call with its own state and what is added to it, [B, T, C]; returns the new state."""

    def __init__(self, config):
        super().__init__()
        self.grad_checkpointing = False
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        # Gives the state, to which others are added.
        self.exit_norm = RMSNorm(config.n_embd, like_branch=False, weighted=config.exit_weights)
        self.run = blocks.as_it_is

    def forward(self, state, injected, rotation, cache=None, slot=0, cu_seqlens=None):
        branch, x = state, injected
        again = self.grad_checkpointing and torch.is_grad_enabled()
        for block in self.blocks:
            if self.training and cache is None:
                branch, x = blocks.train(self.run, again, block, branch, x, rotation, None, 0, cu_seqlens)
            else:
                branch, x = block(branch, x, rotation, cache, slot, cu_seqlens)
            slot += 1
        return self.exit_norm.add(branch, x)[0]


class HRM(nn.Module):
    """HRM-Text1. Call with tokens [B, T] (integers, T <= seq_len); returns logits [B, T, V] of the last segment.

    With targets [B, T] too it returns the summed cross-entropy of the last segment in nats; its gradient is that of
    the mean over the segments and of what the halting head costs (`_objective`). cu_seqlens: int [documents + 1],
    bounds of documents in the flattened tokens, one beginning with each row; tokens see their own document alone
    (rotary positions are relative, so they need no reset). cache: of empty_cache(), for generation.

    bp_passes: through how many of the last stack passes of each segment gradients flow; set before each step.
    early_exit: with a cache, a token stops at the segment by which it has probably halted.
    """

    def __init__(self, config):
        super().__init__()
        config.check()
        self.config = config
        self.bp_passes = MAX_BP_PASSES
        self.early_exit = False
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.h = Stack(config)
        self.l = Stack(config)
        self.head_weight = None if config.exit_weights else nn.Parameter(torch.ones(config.n_embd))
        self.halt = nn.Linear(config.n_embd, 1) if config.segments > 1 else None
        self.register_buffer("start", torch.zeros(config.n_embd))

    @property
    def grad_checkpointing(self):
        """Whether each block keeps only its input while training, and is computed again in backward."""
        return self.h.grad_checkpointing

    @grad_checkpointing.setter
    def grad_checkpointing(self, value):
        self.h.grad_checkpointing = self.l.grad_checkpointing = value

    def blocks(self):
        """The parts that may each be sharded by itself."""
        return [*self.l.blocks, *self.h.blocks]

    def compiled(self):
        """This model with its blocks under torch.compile for training."""
        # As bp_passes grows there are versions for the first block of a stack and for the others, without gradients and
        # with those of either input or none: more than the default of 8.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)
        self.l.run = self.h.run = blocks.compiled()
        return self

    @torch.no_grad()
    def init_weights(self, seed):
        """Truncated LeCun normal: standard deviation 1 / sqrt(fan in), cut at two of them (HRM); weights of norms
        and of what the head reads 1, halting head 0, start of z_L normal. The same seed gives the same weights on every
        device."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2 and not name.startswith("halt"):
                std = parameter.shape[1] ** -0.5 / 0.87962566103423978  # of a normal cut at two deviations
                value = torch.empty(parameter.shape)
                parameter.copy_(nn.init.trunc_normal_(value, 0, std, -2 * std, 2 * std, generator=generator))
            else:
                parameter.fill_(1.0 if "norm" in name or name == "head_weight" else 0.0)
        self.start.copy_(torch.empty(self.start.shape).normal_(generator=generator))
        return self

    def empty_cache(self):
        """A KVCache as of a GPT: a slot for each segment, stack pass and layer."""
        return KVCache(self.config.segments * self.config.passes * self.config.n_layer, self.config.seq_len)

    def forward(self, tokens, targets=None, cache=None, cu_seqlens=None):
        states = self.states(tokens, cache, cu_seqlens)
        if targets is not None:
            return self._objective(states, targets.flatten())
        if self.early_exit and cache is not None and tokens.shape[1] == 1:
            last = self._first_to_halt(states, cache)
        else:
            *_, last = states
        if cache is not None:
            cache.advance(tokens.shape[1])
        return F.linear(self._read(last), self.wte.weight)

    def _read(self, state):
        """What the head reads of a state of H [..., C]."""
        return state if self.head_weight is None else state * self.head_weight

    def states(self, tokens, cache=None, cu_seqlens=None):
        """Yield z_H [B, T, C] after each segment."""
        config = self.config
        embedded = self.wte(tokens) * math.sqrt(config.n_embd)
        start = 0 if cache is None else cache.length
        rotation = self._rotation(start, tokens.shape[1], embedded.device)
        if cu_seqlens is not None:
            torch._dynamo.maybe_mark_dynamic(cu_seqlens, 0)  # or the first batch's length has graphs of its own
        z_h, z_l = embedded, self.start.to(embedded.dtype).expand_as(embedded)
        for segment in range(config.segments):
            if segment:  # from the states of the one before, without their gradients, and from the text again
                z_h, z_l = z_h.detach() + embedded, z_l.detach()
            z_h, z_l = self._segment(embedded, z_h, z_l, rotation, cache, segment, cu_seqlens)
            yield z_h

    def _segment(self, embedded, z_h, z_l, rotation, cache, segment, cu_seqlens):
        config, wanted = self.config, torch.is_grad_enabled()
        first = config.passes - self.bp_passes  # of those through which gradients flow
        for number in range(config.passes):
            slot = 0 if cache is None else (segment * config.passes + number) * config.n_layer
            with torch.set_grad_enabled(wanted and number >= first):
                if number == first and torch.is_autocast_cache_enabled():
                    torch.clear_autocast_cache()  # holds weights cast without gradients (pytorch issue 158232)
                if (number + 1) % (config.l_cycles + 1):
                    injected = z_h + embedded if config.reinject else z_h
                    z_l = self.l(*_seen(z_l, injected), rotation, cache, slot, cu_seqlens)
                else:
                    z_h = self.h(*_seen(z_h, z_l), rotation, cache, slot, cu_seqlens)
        return z_h, z_l

    def _rotation(self, start, length, device):
        """(cosine, sine) [T, D / 2] of positions start ... start + length - 1 (Su et al. 2021, section 3.2.2)."""
        width = self.config.n_embd // self.config.n_head
        powers = torch.arange(0, width, 2, device=device, dtype=torch.float32) / width
        positions = torch.arange(start, start + length, device=device, dtype=torch.float32)
        angles = torch.outer(positions, self.config.rope_theta ** -powers)
        return angles.cos(), angles.sin()

    def _objective(self, states, targets):
        """The last segment's summed cross-entropy, with the gradient of mean cross-entropy plus ponder loss.

        The halting head says after each segment with what probability a token stops there; the last one takes the
        rest. Ponder loss: the expected cross-entropy of the segment a token stops at, plus ponder_price for each
        segment it has used. Its gradient reaches the halting head alone.
        """
        losses, ponder, going_on = [], 0.0, 1.0
        for number, z_h in enumerate(states, 1):
            hidden = z_h.flatten(0, 1)
            loss, rows = ops.linear_cross_entropy_rows(self._read(hidden), self.wte.weight, targets)
            losses.append(loss)
            if self.halt is not None:
                stopping = self._stopping(hidden) if number < self.config.segments else 1.0
                price = self.config.ponder_price * number * (targets >= 0)
                ponder = ponder + (going_on * stopping * (rows + price)).sum()
                going_on = going_on * (1 - stopping)
        if len(losses) == 1 or not torch.is_grad_enabled():
            return losses[-1]
        objective = sum(losses) / len(losses) + ponder
        return losses[-1].detach() + (objective - objective.detach())

    def _first_to_halt(self, states, cache):
        """z_H [B, 1, C] of the segment by which each token has halted with EXIT_PROBABILITY. Once all have, later ones
        are not run; in the cache they get, for each token, the keys and values of the last segment it used."""
        slots = self.config.passes * self.config.n_layer
        for number, z_h in enumerate(states, 1):
            stopping = self._stopping(z_h) if number < self.config.segments else z_h.new_ones(z_h.shape[:2])
            if number == 1:
                last, going_on, used = z_h.clone(), torch.ones_like(stopping), torch.zeros_like(stopping, dtype=int)
            running = used == 0
            going_on = going_on * (1 - stopping)
            last = torch.where(running[..., None], z_h, last)
            used = torch.where(running & (going_on <= 1 - EXIT_PROBABILITY), number, used)
            if (used > 0).all():
                break
        for row, number in enumerate(used.flatten().tolist()):
            cache.repeat(row, slots * number, slots)
        return last

    def _stopping(self, z_h):
        """Probability, float32, that each of z_h [..., C] stops, given that it has come so far."""
        return self.halt(z_h.detach()).float().sigmoid().squeeze(-1)


def _seen(*tensors):
    """`tensors`, as constants where gradients are off: torch.compile would make a version for each combination."""
    return tensors if torch.is_grad_enabled() else tuple(tensor.detach() for tensor in tensors)
