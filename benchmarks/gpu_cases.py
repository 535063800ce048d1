"""The problems of benchmarks/gpu.py: an operation on inputs of one size, all who solve it, and the same in float64."""

import contextlib
import dataclasses
import functools
import os
import sys
import unittest.mock
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from aura import ops, speeds  # noqa: E402
from aura.models import bert  # noqa: E402

SEED, EPS = 1234, 1e-5
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NORM_ROWS, NORM_COLUMNS = 16_384, (768, 1024, 2048, 4096, 8192)
COMPILED_COLUMNS = 1024, 4096  # of norms: compiling is what takes longest
ACTIVATION_COLUMNS, LOSS_ROWS, VOCABULARIES = (3072, 8192), 8192, (32_000, 50_257)
ATTENTION_TOKENS, ATTENTION_WIDTH = 16_384, 2048  # B T, and H D, rounded down to whole heads
HEAD_WIDTHS = 64, 128
EXACT_SCORES = 2**26  # of attention in float64 at one time: 512 MiB, so that a card of 4 GB has room
EAGER, COMPILED = "ours, eager", "ours, torch.compile"  # a training step of ours in the slower of the two ways
FURTHER = speeds.OTHER_KERNELS, EAGER, COMPILED  # of ours: told beside the best rival, and never counted as it
FORWARD, BACKWARD, BOTH, STEP = "forward", "backward", "both", "step"


@dataclasses.dataclass
class Contestant:
    """One who takes part. run maps the inputs to a tensor or a tuple of them."""

    name: str
    run: Callable
    context: Callable = contextlib.nullcontext


@dataclasses.dataclass
class Case:
    """One problem and all who solve it, ours first. work: FLOP or bytes of each direction; ceiling: which limits
    them."""

    op: str
    variant: str
    shape: tuple
    inputs: list
    contestants: list
    exact: Callable  # of the inputs in float64
    ceiling: str
    work: dict


def ours(run):
    return Contestant("ours", run, lambda: ops.using("fused", "cuda"))


@contextlib.contextmanager
def instructions_of_all_cards():
    """Our kernels without those that Hopper alone has."""
    with ops.using("fused", "cuda"), unittest.mock.patch.dict(os.environ, {"AURA_CUDA_ISA": "sm_80"}):
        yield


def our_attentions(run, device):
    """Our attention; on Hopper, both by its own instructions and by those of all cards."""
    if device == "cpu" or torch.cuda.get_device_capability() != (9, 0):
        return [ours(run)]
    return [ours(run), Contestant(speeds.OTHER_KERNELS, run, instructions_of_all_cards)]


def type_name(dtype):
    return str(dtype).removeprefix("torch.")


def drawn(*shape, dtype, device, seed=0):
    """A leaf that requires a gradient, drawn on the card if it is for one: the CPU's generator takes seconds for it."""
    place = device if device == "cuda" else "cpu"
    values = torch.randn(shape, generator=torch.Generator(place).manual_seed(SEED + seed), device=place)
    return values.to(device, dtype).requires_grad_()


def norm_case(kind, rows, columns, dtype, device, compiled=True):
    """layer_norm or rms_norm, or their form with a residual before them."""
    added, rms = kind.startswith("add"), "rms" in kind
    shapes = [(rows, columns)] * (1 + added) + [(columns,)] * (1 if rms else 2)
    inputs = [drawn(*shape, dtype=dtype, device=device, seed=i) for i, shape in enumerate(shapes)]

    def plain(x, *rest):
        new = rest[0] + x if added else x
        weights = rest[1:] if added else rest
        y = (F.rms_norm(new, weights[0].shape, weights[0], EPS) if rms
             else F.layer_norm(new, weights[0].shape, *weights, EPS))
        return (y, new) if added else y

    def run(*inputs):
        return getattr(ops, kind)(*inputs, EPS)

    peers = eager_and_compiled(plain, compiled)
    big = inputs[0].nbytes  # forward reads x (and residual) and writes y (and new)
    work = {FORWARD: (4 if added else 2) * big, BACKWARD: (4 if added else 3) * big}
    return Case(kind, type_name(dtype), (rows, columns), inputs, [ours(run), *peers], plain, "copy", work)


def eager_and_compiled(plain, compiled):
    """torch's way eager and, if wanted, compiled."""
    peers = [Contestant("torch", plain)]
    if compiled:
        peers.append(Contestant("torch.compile", torch.compile(plain, dynamic=False, fullgraph=True)))
    return peers


def activation_case(kind, rows, columns, dtype, device, compiled=True):
    """gelu_tanh of [rows, columns], or swiglu of [rows, 2 columns]."""
    parts = 2 if kind == "swiglu" else 1
    x = drawn(rows, parts * columns, dtype=dtype, device=device)

    def plain(x):
        if kind == "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    one = x.nbytes // parts  # forward reads x and writes y; backward reads dy and x and writes dx
    work = {FORWARD: (parts + 1) * one, BACKWARD: (2 * parts + 1) * one}
    return Case(kind, type_name(dtype), (rows, columns), [x],
                [ours(lambda x: getattr(ops, kind)(x)), *eager_and_compiled(plain, compiled)], plain, "copy", work)


def rotary_case(length, width, dtype, device, tokens=ATTENTION_TOKENS, compiled=True):
    batch, heads = max(1, tokens // length), ATTENTION_WIDTH // width
    qkv = drawn(batch, length, 3, heads, width, dtype=dtype, device=device)
    angles = torch.arange(length)[:, None] * 1e4 ** -(torch.arange(width // 2) / (width // 2))
    cosine, sine = angles.cos().to(device), angles.sin().to(device)

    def plain(qkv):
        return ops.rotary_packed(qkv, cosine, sine)

    peers = [dataclasses.replace(peer, context=lambda: ops.using("sdpa"))
             for peer in eager_and_compiled(plain, compiled)]
    return Case("rotary", type_name(dtype), (batch, length, heads, width), [qkv], [ours(plain), *peers], plain, "copy",
                {FORWARD: 2 * qkv.nbytes, BACKWARD: 2 * qkv.nbytes})


def loss_case(rows, classes, dtype, device, compiled=True):
    """The losses of existing logits, and the gradient, which ours writes in their place."""
    logits = drawn(rows, classes, dtype=dtype, device=device)
    targets = torch.randint(classes, (rows,), generator=torch.Generator().manual_seed(SEED)).to(device)

    def plain(logits):
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(wide, targets, reduction="sum")

    def with_gradient(run):
        def both(logits):
            logits = logits.detach().requires_grad_()
            value = run(logits)
            return value.detach(), *torch.autograd.grad(value, logits)

        return both

    def fused(logits):
        logits = logits.detach()
        return torch.ops.aura.cross_entropy_chunk_(logits, targets, -100, True).sum(), logits

    peers = [dataclasses.replace(peer, run=with_gradient(peer.run)) for peer in eager_and_compiled(plain, compiled)]
    return Case("cross_entropy", type_name(dtype), (rows, classes), [logits], [ours(fused), *peers],
                with_gradient(plain), "copy", {BOTH: 2 * logits.nbytes})


def sdpa(causal, allowed=None):
    """torch's attention of a packed projection, with whatever backend it chooses."""
    def run(qkv):
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=causal and allowed is None
                                              ).transpose(1, 2)

    return run


def in_parts(run, length):
    """A function that computes run(qkv) for a few heads of one batch entry at a time, in backward too."""
    heads = max(1, EXACT_SCORES // length**2)

    def exact(qkv):
        return torch.cat([torch.cat([checkpoint(run, part, use_reentrant=False, preserve_rng_state=False)
                                     for part in entry.split(heads, dim=3)], dim=2) for entry in qkv.split(1)])

    return exact


def sdpa_peers(causal):
    """torch's backends that take the tensors of the case, each by itself."""
    backends = {"sdpa flash": SDPBackend.FLASH_ATTENTION, "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
                "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION}
    return [Contestant(name, sdpa(causal), functools.partial(sdpa_kernel, [backend]))
            for name, backend in backends.items()]


def attention_case(length, width, causal, dtype, device, tokens=ATTENTION_TOKENS):
    batch, heads = max(1, tokens // length), ATTENTION_WIDTH // width
    qkv = drawn(batch, length, 3, heads, width, dtype=dtype, device=device)
    flop = 4 * batch * heads * length * length * width / (2 if causal else 1)
    return Case("attention", f"{type_name(dtype)}, {'causal' if causal else 'full'}",
                (batch, length, heads, width), [qkv],
                [*our_attentions(lambda qkv: ops.attention_packed(qkv, causal=causal), device), *sdpa_peers(causal)],
                in_parts(sdpa(causal), length), "matmul", {FORWARD: flop, BACKWARD: 2.5 * flop})


def documents_case(length, width, dtype, device, tokens=ATTENTION_TOKENS):
    """Four documents in a row, against torch's attention with their mask."""
    batch, heads, documents = max(1, tokens // length), ATTENTION_WIDTH // width, 4
    qkv = drawn(batch, length, 3, heads, width, dtype=dtype, device=device)
    bounds = torch.arange(batch * documents + 1, device=device) * (length // documents)
    number = torch.arange(length, device=device) // (length // documents)
    allowed = (number[:, None] == number).tril()
    flop = 2 * batch * heads * documents * (length // documents) ** 2 * width
    masked = Contestant("sdpa with a mask", sdpa(True, allowed))

    def run(qkv):
        return ops.attention_packed(qkv, cu_seqlens=bounds, rows_apart=True)

    return Case("attention", f"{type_name(dtype)}, documents",
                (batch, length, heads, width), [qkv],
                [*our_attentions(run, device), masked],
                in_parts(sdpa(True, allowed), length), "matmul", {FORWARD: flop, BACKWARD: 2.5 * flop})


def gradients_case(config, device):
    """The norm of all gradients of a BERT, by which they are clipped."""
    with torch.device("meta"):
        shapes = [parameter.shape for parameter in bert.QuestionAnswering(config).parameters()]
    gradients = [drawn(*shape, dtype=torch.float32, device=device, seed=i) for i, shape in enumerate(shapes)]

    @torch.no_grad()
    def run(*gradients):
        return ops.total_norm(list(gradients))

    @torch.no_grad()
    def plain(*gradients):
        return torch.nn.utils.get_total_norm(gradients)

    return Case("total_norm", "float32", (len(shapes), sum(x.numel() for x in gradients)), gradients,
                [ours(run), Contestant("torch", plain)], plain, "copy", {FORWARD: sum(x.nbytes for x in gradients)})


def cases(args):
    """(section, a function that makes the case), in the order they are measured."""
    for name in args.dtype:
        dtype = DTYPES[name]
        for kind in ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"):
            for columns in args.columns:
                yield "norms", functools.partial(norm_case, kind, NORM_ROWS, columns, dtype, "cuda",
                                                 compiled=columns in COMPILED_COLUMNS)
        for kind in ("gelu_tanh", "swiglu"):
            for columns in ACTIVATION_COLUMNS:
                yield "activations", functools.partial(activation_case, kind, NORM_ROWS, columns, dtype, "cuda")
        for classes in VOCABULARIES:
            yield "loss", functools.partial(loss_case, LOSS_ROWS, classes, dtype, "cuda")
        for width in args.head_width:
            yield "rotary", functools.partial(rotary_case, 2048, width, dtype, "cuda")
            for causal in (True, False):
                for length in args.seq_len:
                    yield "attention", functools.partial(attention_case, length, width, causal, dtype, "cuda")
            yield "documents", functools.partial(documents_case, 2048, width, dtype, "cuda")
    yield "gradients", functools.partial(gradients_case, bert.PRESETS["base"], "cuda")
