"""What benchmarks/kernels.py measures: problems of one shape, dtype and variant, with everybody who solves them."""

import contextlib
import dataclasses
import functools
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import measure  # noqa: E402

from aura import ops, products  # noqa: E402

OURS = "fused"  # what is measured as ours, a mode of ops.using
SEED = 1234
DROPOUT = 0.1
EPS = 1e-5

BATCH, HEADS = 2, 12
LENGTHS = (64, 127, 128, 256, 512, 1000, 1024, 2048)
QUICK_LENGTHS = (128, 512)
SEPARATE_LENGTHS = (128, 512, 1024)
HEAD_DIMS = (64, 128)
DOCUMENTS = (0.1, 0.2, 0.3, 0.4)  # shares of the sequence
COMPILED_LENGTHS = (512,)
FLEX_LENGTHS = (1024,)
NORM_SHAPES = ((4096, 768), (16384, 2048))
GELU_SHAPES = ((1024, 3072), (4096, 3072))
CALL_SHAPE, CALL_LENGTH = (8, 64), 8  # next to no work
LINEAR_SHAPES = ((1024, 768, 3072), (1024, 3072, 768), (4096, 768, 2304))
LOSS_SHAPE, QUICK_LOSS_SHAPE = (1024, 768, 50_257), (128, 768, 50_257)

FORWARD, BACKWARD, INFERENCE, BOTH = "forward", "backward", "forward, no gradient", "forward + backward"


@dataclasses.dataclass
class Contestant:
    """One who takes part. `run` maps input tensors to a tuple of outputs."""

    name: str
    run: Callable
    kind: str = "torch"  # of several slow ones of a kind only the fastest is timed to the end
    context: Callable = contextlib.nullcontext
    directions: tuple[str, ...] = (FORWARD, BACKWARD)
    keep_scale: float = 1 / (1 - DROPOUT)  # what it multiplies kept values with
    keep_mask: Callable | None = None  # inputs -> what its dropout keeps; found by probing where it is None


@dataclasses.dataclass
class Case:
    """A problem of one shape, dtype and variant, with everybody who solves it; the first is ours."""

    op: str
    dtype: str
    variant: str
    shape: tuple[int, ...]
    inputs: tuple[torch.Tensor, ...]
    upstream: tuple[torch.Tensor, ...]
    contestants: list[Contestant]
    expect: Callable  # contestant -> (outputs, gradients), in float64, of the part that `part` looks at
    work: dict[str, tuple[tuple[str, ...], float]]  # direction -> (ceilings, FLOPs or bytes)
    part: Callable = lambda tensor: tensor
    random: bool = False  # whether what is right depends on the mask that each one drew
    exact: tuple | None = None

    def expected(self, contestant: Contestant):
        """expect(contestant), worked out once where it is the same for all."""
        if self.random:
            return self.expect(contestant)
        if self.exact is None:
            self.exact = self.expect(contestant)
        return self.exact
    directions: tuple[str, ...] = (FORWARD, BACKWARD)


def ours(run: Callable, **more) -> Contestant:
    threshold = round(DROPOUT * 65536)  # probabilities are 16 bits wide in our kernels
    return Contestant("ours", run, "ours", lambda: ops.using(OURS), keep_scale=65536 / (65536 - threshold), **more)


def random(*shape: int, dtype: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(SEED + seed)
    return torch.randn(shape, generator=generator).to(measure.DTYPES[dtype])


def leaves(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.detach().clone().requires_grad_() for tensor in tensors)


def compiled(run: Callable) -> Callable:
    return torch.compile(run, dynamic=False, fullgraph=True)


def torch_peer(name: str, run: Callable, compile_it: bool) -> Contestant:
    return Contestant(f"torch.compile {name}", compiled(run), "compile") if compile_it else Contestant(name, run)


def copies(tensor: torch.Tensor) -> tuple[str, ...]:
    """The ceiling of moving tensors of this size."""
    return ("copy_cached_gbs" if tensor.nbytes <= 2 * measure.CACHED_BYTES else "copy_gbs",)


# ---- Attention ------------------------------------------------------------------------------------------------------


def spans(length: int) -> list[tuple[int, int]]:
    """Where the documents of one sequence begin and end."""
    ends = [round(length * sum(DOCUMENTS[: i + 1])) for i in range(len(DOCUMENTS))]
    return list(zip([0, *ends], ends, strict=False))


def allowed(length: int, causal: bool, documents: bool) -> torch.Tensor:
    """bool [T, T]: which keys each position sees."""
    mask = torch.ones(length, length, dtype=torch.bool)
    if documents:
        number = torch.empty(length, dtype=torch.int64)
        for i, (begin, end) in enumerate(spans(length)):
            number[begin:end] = i
        mask = number[:, None] == number[None, :]
    return mask.tril() if causal else mask


def heads_first(inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """q, k, v as views [B, H, T, D]."""
    parts = inputs[0].unbind(2) if len(inputs) == 1 else inputs
    return [part.transpose(1, 2) for part in parts]


def joined(y: torch.Tensor) -> torch.Tensor:
    """[B, H, T, D] -> [B, T, H * D]; a view if the peer has laid it out with positions before heads, else a copy."""
    return y.transpose(1, 2).flatten(2)


def backends() -> list[tuple[str, SDPBackend]]:
    return [(name, backend) for name, backend in SDPBackend.__members__.items() if name != "ERROR"]


@functools.cache
def refusal(backend: SDPBackend, dtype: str, causal: bool, masked: bool, dropout: float) -> str:
    """Why torch cannot run a backend here, or ''."""
    q = torch.randn(1, 16, 3, 2, 64, dtype=measure.DTYPES[dtype]).requires_grad_()
    mask = torch.ones(16, 16, dtype=torch.bool) if masked else None
    with warnings.catch_warnings(), sdpa_kernel([backend]):
        warnings.simplefilter("ignore")
        try:
            F.scaled_dot_product_attention(*heads_first((q,)), attn_mask=mask, dropout_p=dropout, is_causal=causal)
        except RuntimeError as error:
            return str(error).splitlines()[0]
    return ""


def refusals(dtypes: list[str]) -> list[str]:
    """Backends of SDPA that torch does not have here, and where: causal, full, with a mask, with dropout."""
    told: dict[tuple[str, str], list[str]] = {}
    uses = {"causal": (True, False, 0.0), "completa": (False, False, 0.0), "con máscara": (False, True, 0.0),
            "con dropout": (True, False, DROPOUT)}
    for name, backend in backends():
        for dtype in dtypes:
            for use, arguments in uses.items():
                why = refusal(backend, dtype, *arguments)
                if why:
                    told.setdefault((name, why), []).append(f"{dtype} {use}")
    return [f"SDPA {name} no se mide ({', '.join(where)}): {why}" for (name, why), where in told.items()]


def sdpa_peers(dtype: str, causal: bool, mask: torch.Tensor | None, dropout: float) -> list[Contestant]:
    def run(*inputs):
        y = F.scaled_dot_product_attention(*heads_first(inputs), attn_mask=mask, dropout_p=dropout,
                                           is_causal=causal and mask is None)
        return (joined(y),)

    def keep_mask(*inputs):  # of the math backend, the only one with dropout on the CPU
        torch.manual_seed(SEED)
        with torch.no_grad():
            weights = torch.ops.aten._scaled_dot_product_attention_math(*heads_first(inputs), None, dropout, causal)[1]
        return weights != 0

    def context(backend):
        stack = contextlib.ExitStack()
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(sdpa_kernel([backend]))
        return stack

    return [Contestant(f"sdpa {name}", run, "torch", functools.partial(context, backend), keep_mask=keep_mask)
            for name, backend in backends()
            if not refusal(backend, dtype, causal and mask is None, mask is not None, dropout)]


def sdpa_compiled(causal: bool, dropout: float) -> Contestant:
    @compiled
    def run(*inputs):
        y = F.scaled_dot_product_attention(*heads_first(inputs), dropout_p=dropout, is_causal=causal)
        return (joined(y),)

    return Contestant("torch.compile sdpa", run, "compile")


def sdpa_loop(length: int) -> Contestant:
    """SDPA document by document: without a mask, and without computing anything outside a document."""

    def run(*inputs):
        parts = [part.split([end - begin for begin, end in spans(length)], 2) for part in heads_first(inputs)]
        pieces = [F.scaled_dot_product_attention(*one, is_causal=True) for one in zip(*parts, strict=True)]
        return (torch.cat([piece.transpose(1, 2) for piece in pieces], 1).flatten(2),)

    return Contestant("sdpa, one document at a time", run, "loop")


def flex(length: int) -> Contestant:
    """flex_attention, forward alone, as it has no backward on the CPU; making its block mask is not timed."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = allowed(length, True, True)
    blocks = create_block_mask(lambda b, h, q, k: mask[q, k], None, None, length, length, device="cpu")
    attend = compiled(flex_attention)

    def run(*inputs):
        q, k, v = heads_first([tensor.detach() for tensor in inputs])
        return (joined(attend(q, k, v, block_mask=blocks)),)

    return Contestant("flex_attention", run, "flex", directions=(FORWARD,))


def probe_attention(contestant: Contestant, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """What dropout keeps, [B, H, T, T], read from the output with unit vectors as values, on which no mask depends."""
    packed = len(inputs) == 1
    batch, length, width = inputs[0].shape[0], inputs[0].shape[1], inputs[0].shape[-1]
    mask = torch.empty(batch, HEADS, length, length, dtype=torch.bool)
    with torch.no_grad(), contestant.context():
        for begin in range(0, length, width):
            probe = [tensor.detach().clone() for tensor in inputs]
            values = probe[0][:, :, 2] if packed else probe[2]
            values.zero_()
            count = min(width, length - begin)
            values[:, begin : begin + count, :, :count] = torch.eye(count)[None, :, None]
            torch.manual_seed(SEED)
            [weights] = contestant.run(*probe)
            weights = weights.view(batch, length, HEADS, width).transpose(1, 2)
            mask[..., begin : begin + count] = weights[..., :count] != 0
    return mask


def some_heads(chosen: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """[B, T, H * D], [B, T, H, D] or [B, T, 3, H, D] -> [pairs, T, D] or [pairs, T, 3, D] of the chosen pairs of row
    and head."""
    if tensor.dim() == 3:
        tensor = tensor.unflatten(2, (HEADS, -1))
    return tensor.movedim(-2, 1).flatten(0, 1)[chosen]


def exact_attention(inputs: tuple[torch.Tensor, ...], upstream: torch.Tensor, mask: torch.Tensor, chosen: torch.Tensor,
                    dropout: float, contestant: Contestant):
    """Output and gradients of the chosen heads in float64, with what the contestant's dropout keeps."""
    keep = 1.0
    if dropout:
        found = contestant.keep_mask(*inputs) if contestant.keep_mask else probe_attention(contestant, inputs)
        share = found.double().sum() / (mask.sum() * BATCH * HEADS)
        if abs(share - (1 - dropout)) > 0.02:
            raise SystemExit(f"{contestant.name}: el dropout deja pasar {share:.3f}")
        keep = found.flatten(0, 1)[chosen] * contestant.keep_scale
    exact = [some_heads(chosen, tensor.detach()).double().requires_grad_() for tensor in inputs]
    q, k, v = exact[0].unbind(2) if len(inputs) == 1 else exact
    scores = (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])).masked_fill_(~mask, -math.inf)
    y = (scores.softmax(-1) * keep) @ v
    return [y.detach()], torch.autograd.grad(y, exact, some_heads(chosen, upstream).double())


def attention_case(dtype: str, length: int, width: int, *, causal=True, packed=True, dropout=0.0, documents=False,
                   peer: Contestant | None = None) -> Case:
    """`peer`: the only one, instead of every backend of SDPA."""
    qkv = random(BATCH, length, 3, HEADS, width, dtype=dtype)
    inputs = leaves(qkv) if packed else leaves(*(part.contiguous() for part in qkv.unbind(2)))
    mask = allowed(length, causal, documents)
    bounds = None
    if documents:
        ends = [row * length + end for row in range(BATCH) for _, end in spans(length)]
        bounds = torch.tensor([0, *ends], dtype=torch.int32)

    def run(*inputs):
        attend = ops.attention_packed if packed else ops.attention
        return (attend(*inputs, causal=causal, dropout=dropout, cu_seqlens=bounds).flatten(2),)

    # Heads are independent, so float64 computes only some of them where all would take longer than the timing.
    pairs = BATCH * HEADS
    chosen = torch.arange(pairs - 1, -1, -max(1, round(pairs / max(4, pairs * (512 / length) ** 2))))
    upstream = random(BATCH, length, HEADS * width, dtype=dtype, seed=1)
    expect = functools.partial(exact_attention, inputs, upstream, mask, chosen, dropout)
    scored = mask.sum().item() * pairs
    ceiling = measure.product_ceilings(dtype)
    words = ["causal" if causal else "full", "packed" if packed else "separate"]
    words += [f"dropout {dropout}"] * bool(dropout) + [f"{len(DOCUMENTS)} documents"] * documents
    peers = [peer] if peer else sdpa_peers(dtype, causal, mask if documents else None, dropout)
    if documents and not peer:
        peers.append(sdpa_loop(length))
    return Case("attention", dtype, ", ".join(words), (BATCH, length, HEADS, width), inputs, (upstream,),
                [ours(run), *peers], expect, {FORWARD: (ceiling, 4.0 * width * scored),
                                             BACKWARD: (ceiling, 10.0 * width * scored)},
                functools.partial(some_heads, chosen), random=bool(dropout))


def attention_cases(args) -> Iterator[Callable[[], Case]]:
    for dtype in args.dtype:
        for width in HEAD_DIMS[: 1 if args.quick else None]:
            for causal in (True, False):
                for length in args.seq_len:
                    yield functools.partial(attention_case, dtype, length, width, causal=causal)


def separate_cases(args) -> Iterator[Callable[[], Case]]:
    for dtype in args.dtype:
        for causal in (True, False):
            for length in SEPARATE_LENGTHS:
                yield functools.partial(attention_case, dtype, length, HEAD_DIMS[0], causal=causal, packed=False)


def dropout_cases(args) -> Iterator[Callable[[], Case]]:
    for dtype in args.dtype:
        for length in args.seq_len:
            yield functools.partial(attention_case, dtype, length, HEAD_DIMS[0], dropout=DROPOUT)


def documents_cases(args) -> Iterator[Callable[[], Case]]:
    for dtype in args.dtype:
        for length in args.seq_len:
            yield functools.partial(attention_case, dtype, length, HEAD_DIMS[0], documents=True)


def compile_cases(args) -> Iterator[Callable[[], Case]]:
    """The same against torch.compile; few shapes, since compiling takes long."""
    for dtype in args.dtype:
        for length in COMPILED_LENGTHS:
            for dropout in (0.0, DROPOUT):
                yield lambda dtype=dtype, length=length, dropout=dropout: attention_case(
                    dtype, length, HEAD_DIMS[0], dropout=dropout, peer=sdpa_compiled(True, dropout))
    for length in FLEX_LENGTHS:
        yield lambda length=length: attention_case("fp32", length, HEAD_DIMS[0], documents=True, peer=flex(length))
    for dtype in args.dtype:
        for kind, residual in (("rms", False), ("layer", True)):
            yield functools.partial(norm_case, kind, residual, dtype, NORM_SHAPES[0], compile_it=True)
        yield functools.partial(gelu_case, dtype, GELU_SHAPES[0], compile_it=True)


# ---- Norms ----------------------------------------------------------------------------------------------------------


def some_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Some rows, as they are independent and float64 need not compute all; what has no rows stays as it is."""
    return tensor[:: max(1, len(tensor) // 2048)] if tensor.dim() == 2 else tensor


def normalized(kind: str, x: torch.Tensor) -> torch.Tensor:
    if kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def exact_norm(kind: str, inputs: tuple[torch.Tensor, ...], upstream: tuple[torch.Tensor, ...], dropout: float,
               contestant: Contestant):
    """Outputs and gradients in float64, with what the contestant's dropout keeps. inputs: one stream, or two that are
    added, then the parameters. upstream: a gradient for each stream."""
    streams, residual, keep = inputs[: len(upstream)], len(upstream) == 2, 1.0
    if dropout:  # added to a stream of zeros, a dropped value is zero
        probe = [torch.ones_like(streams[0]), torch.zeros_like(streams[0]), *inputs[2:]]
        torch.manual_seed(SEED)
        with torch.no_grad(), contestant.context():
            found = contestant.run(*probe)[1] != 0
        if abs(found.double().mean() - (1 - dropout)) > 0.02:
            raise SystemExit(f"{contestant.name}: el dropout deja pasar {found.double().mean():.3f}")
        keep = found * contestant.keep_scale
    exact = [some_rows(tensor).detach().double().requires_grad_() for tensor in inputs]
    stream = exact[0] * (some_rows(keep) if dropout else 1) + exact[1] if residual else exact[0]
    y = normalized(kind, stream) * exact[1 + residual] + (exact[-1] if kind == "layer" else 0)
    outputs = (y, stream)[: 1 + residual]
    given = torch.autograd.grad(outputs, exact[: 1 + residual], [some_rows(tensor).double() for tensor in upstream])
    with torch.no_grad():  # the parameters' gradients are sums over all rows
        stream = inputs[0] * keep + inputs[1].double() if residual else inputs[0].double()
        rest = [(normalized(kind, stream) * upstream[0]).sum(0), upstream[0].double().sum(0)]
    return [tensor.detach() for tensor in outputs], [*given, *rest[: len(inputs) - len(streams)]]


def norm_case(kind: str, residual: bool, dtype: str, shape: tuple[int, int], dropout=0.0, compile_it=False) -> Case:
    width = shape[-1]
    parameters = [1 + random(width, dtype=dtype, seed=2) / 10, random(width, dtype=dtype, seed=3) / 10]
    if kind == "rms":
        parameters.pop()
    streams = [random(*shape, dtype=dtype, seed=i) for i in range(1 + residual)]
    inputs = leaves(*streams, *parameters)
    upstream = tuple(random(*shape, dtype=dtype, seed=4 + i) for i in range(1 + residual))

    def norm(x, *parameters):
        if kind == "rms":
            return F.rms_norm(x, (width,), *parameters, EPS)
        return F.layer_norm(x, (width,), *parameters, EPS)

    def torchs(x, *others):
        if not residual:
            return (norm(x, *others),)
        stream = others[0] + (F.dropout(x, dropout) if dropout else x)
        return norm(stream, *others[1:]), stream

    def run(*inputs):
        if not residual:
            return (getattr(ops, f"{kind}_norm")(*inputs, EPS),)
        return getattr(ops, f"add_{kind}_norm")(*inputs, EPS, dropout)

    peer = torch_peer(f"F.{kind}_norm" + ", x + r first" * residual, torchs, compile_it)
    size = streams[0].nbytes
    # Tensors of this size that must be read or written: x, y; x, r, y, x + r. Backward: x, dy, dx; x + r, dy, d(x + r),
    # and one gradient for both x and r unless dropout makes two of it.
    moved = {FORWARD: 4 if residual else 2, BACKWARD: (5 if dropout else 4) if residual else 3}
    variant = ("residual" if residual else "plain") + (f", dropout {dropout}" if dropout else "")
    return Case(f"{kind}_norm", dtype, variant, shape, inputs, upstream, [ours(run), peer],
                functools.partial(exact_norm, kind, inputs, upstream, dropout),
                {direction: (copies(streams[0]), float(count * size)) for direction, count in moved.items()},
                some_rows, random=bool(dropout))


def norms_cases(args) -> Iterator[Callable[[], Case]]:
    for dtype in args.dtype:
        for shape in NORM_SHAPES[: 1 if args.quick else None]:
            for kind in ("layer", "rms"):
                for residual, dropout in ((False, 0.0), (True, 0.0), (True, DROPOUT)):
                    yield functools.partial(norm_case, kind, residual, dtype, shape, dropout)


# ---- Activation and loss --------------------------------------------------------------------------------------------


def gelu_case(dtype: str, shape: tuple[int, int], compile_it=False) -> Case:
    inputs = leaves(random(*shape, dtype=dtype))
    upstream = random(*shape, dtype=dtype, seed=1)

    def torchs(x):
        return (F.gelu(x, approximate="tanh"),)

    def expect(contestant):
        x = inputs[0].detach().double().requires_grad_()
        y = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        return [y.detach()], torch.autograd.grad(y, x, upstream.double())

    peer = torch_peer("F.gelu", torchs, compile_it)
    size = float(inputs[0].nbytes)
    return Case("gelu_tanh", dtype, "plain", shape, inputs, (upstream,),
                [ours(lambda x: (ops.gelu_tanh(x),)), peer], expect,
                {FORWARD: (copies(inputs[0]), 2 * size), BACKWARD: (copies(inputs[0]), 3 * size)})


def activation_cases(args) -> Iterator[Callable[[], Case]]:
    for dtype in args.dtype:
        for shape in GELU_SHAPES[: 1 if args.quick else None]:
            yield functools.partial(gelu_case, dtype, shape)


def linear_case(shape: tuple[int, int, int]) -> Case:
    """x [rows, width] @ weight [columns, width] transposed, as products.Linear has it where oneDNN is the faster."""
    count, width, columns = shape
    inputs = leaves(random(count, width, dtype="fp32"), random(columns, width, dtype="fp32", seed=1) / width**0.5)
    upstream = random(count, columns, dtype="fp32", seed=2)

    def expect(contestant):
        x, weight = (tensor.detach().double().requires_grad_() for tensor in inputs)
        y = F.linear(x, weight)
        return [y.detach()], torch.autograd.grad(y, (x, weight), upstream.double())

    def run(x, weight):
        return (torch.ops.aura.linear(x, weight, None, weight, None, False),)

    flops = 2.0 * count * width * columns
    ceiling = measure.product_ceilings("fp32")
    return Case("linear", "fp32", "", shape, inputs, (upstream,),
                [ours(run), Contestant("F.linear", lambda *given: (F.linear(*given),))], expect,
                {FORWARD: (ceiling, flops), BACKWARD: (ceiling, 2 * flops)})


def linear_cases(args) -> Iterator[Callable[[], Case]]:
    if "fp32" in args.dtype and products.onednn_is_better():
        for shape in LINEAR_SHAPES[: 1 if args.quick else None]:
            yield functools.partial(linear_case, shape)


def loss_case(dtype: str, shape: tuple[int, int, int]) -> Case:
    """Forward and backward are timed together: ours computes gradients in forward and has next to no backward."""
    count, width, vocabulary = shape
    inputs = leaves(random(count, width, dtype=dtype), random(vocabulary, width, dtype=dtype, seed=1) / 50)
    targets = torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(SEED))
    upstream = torch.tensor(1.0)

    def expect(contestant):
        hidden, weight = (tensor.detach().double().requires_grad_() for tensor in inputs)
        loss = F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum")
        return [loss.detach()], torch.autograd.grad(loss, (hidden, weight))

    def torchs(hidden, weight):
        return (F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum").float(),)

    def widened(hidden, weight):
        return (F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum"),)

    peers = [Contestant("F.cross_entropy(F.linear)", torchs)]
    if dtype != "fp32":
        peers.append(Contestant("F.cross_entropy(F.linear.float)", widened))
    flops = 2.0 * count * width * vocabulary
    ceiling = measure.product_ceilings(dtype)
    return Case("linear_cross_entropy", dtype, "summed", shape, inputs, (upstream,),
                [ours(lambda *given: (ops.linear_cross_entropy(*given, targets),)), *peers], expect,
                {INFERENCE: (ceiling, flops), BOTH: (ceiling, 3 * flops)}, directions=(INFERENCE, BOTH))


def loss_cases(args) -> Iterator[Callable[[], Case]]:
    for dtype in args.dtype:
        yield functools.partial(loss_case, dtype, QUICK_LOSS_SHAPE if args.quick else LOSS_SHAPE)


def call_case(make: Callable[[], Case]) -> Case:
    case = make()
    return dataclasses.replace(case, variant=f"{case.variant}, call")


def call_cases(args) -> Iterator[Callable[[], Case]]:
    """What a call costs besides its work. On a GPU, which works while the next calls are made, that is what a step of
    small kernels takes."""
    for dtype in args.dtype:
        yield functools.partial(call_case, functools.partial(attention_case, dtype, CALL_LENGTH, HEAD_DIMS[0]))
        yield functools.partial(call_case, functools.partial(gelu_case, dtype, CALL_SHAPE))
        for kind in ("layer", "rms"):
            for residual in (False, True):
                yield functools.partial(call_case, functools.partial(norm_case, kind, residual, dtype, CALL_SHAPE))


SECTIONS = {"attention": attention_cases, "separate": separate_cases, "dropout": dropout_cases,
            "documents": documents_cases, "norms": norms_cases, "activation": activation_cases, "linear": linear_cases,
            "loss": loss_cases, "compile": compile_cases, "call": call_cases}
