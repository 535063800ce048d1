"""The operations the models are built on: one entrance each, whatever carries them out.

    ops.use("auto")                    once, before training: our kernels where they run, else torch's
    python -m aura.ops                 what is used here, why, and a check of every kernel against float64

Shapes: B batch, H heads, T queries, S keys, D head width, C = H * D, V vocabulary.
"""

import contextlib
import math

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from aura import compilation, extension
from aura.errors import UserError

CHOICES = ("auto", "fused", "sdpa", "reference")
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float64)
KERNEL_WIDTH = 256  # of an attention head, at most
GPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GPU_ATTENTION_DTYPES = (torch.bfloat16, torch.float16)
GPU_WIDTHS = range(8, 129, 8)  # of an attention head
LOGITS_BYTES = 512 << 20
# Where cuBLAS multiplies 16 bits by older and slower kernels if rows of logits do not begin on 16 bytes.
ALIGNED_DEVICES = ("cuda",)

_choice = None  # of CHOICES once use() has been called, "auto" resolved to one of the others
_fused = None  # the package of our kernels, once loaded
_gpu = False  # True: tensors on a GPU go to our kernels too, those that they take; speeds.Speeds: where ours are faster


def use(choice="auto", device="cpu"):
    """Choose what carries out the operations: fused (our kernels), sdpa (torch's), reference (attention written out).

    auto is fused where the extension can be built, else sdpa; on a GPU each operation goes to whichever was faster
    when `benchmarks/gpu.py --learn` measured this card or, failing that, when we measured one of its name; where nobody
    has, all go to torch. Builds and loads the extension if need be, and its kernels for a device "cuda" where they are
    wanted. Tensors our kernels do not take (float16 and heads wider than 256 on a CPU; float64, attention in float32
    and heads of no width of GPU_WIDTHS on a GPU; other devices) go to torch's in any case. Returns the choice made.
    Raises UserError where fused cannot be had.
    """
    global _choice, _gpu
    if choice not in CHOICES:
        raise UserError(f"--attention {choice!r}: se espera {', '.join(CHOICES)}")
    gpu = False
    if choice in ("auto", "fused"):
        reason = _load()
        if not reason and torch.device(device).type == "cuda":
            gpu, reason = _load_gpu(choice)
        if reason and choice == "fused":
            raise UserError(f"--attention fused: {reason}; use --attention auto o sdpa")
        choice = "sdpa" if reason else "fused"
    _choice, _gpu = choice, gpu
    return choice


def expects_kernels(choice, device_type, precision, width):
    """Whether use(choice) will give our kernels the tensors of a model whose attention heads are so wide, as far as can
    be told before anything is built. With auto a GPU may do without."""
    if device_type != "cpu":
        return choice == "fused"
    if precision == "fp16" or width > KERNEL_WIDTH or choice not in ("auto", "fused"):
        return False
    try:
        extension.require_buildable()
    except compilation.Unavailable:
        return choice == "fused"  # which use() refuses
    return True


@contextlib.contextmanager
def using(choice, device="cpu"):
    """use(choice, device) for the length of a block."""
    global _choice, _gpu
    before = _choice, _gpu
    use(choice, device)
    try:
        yield
    finally:
        _choice, _gpu = before


def _load():
    """Load our kernels; returns None, or why there are none."""
    global _fused
    if _fused is None:
        module = extension.load()
        if not extension.has_ops(module):
            return extension.status()
        from aura import fused  # its operators exist only once the extension is loaded

        _fused = fused
    return None


def _load_gpu(choice):
    """(what _gpu becomes, None or why there are no kernels for the GPU). Loads them for fused, and for auto where they
    are known to be faster at something; for auto the second is always None."""
    from aura import cuda_extension  # asks for a compiler and a toolkit that only this needs

    try:
        if choice == "fused":
            cuda_extension.load()
            return True, None
        known = cuda_extension.known_speeds()
        if known is None or not known.operations():
            return False, None
        cuda_extension.load()
        return known, None
    except (compilation.Unavailable, OSError) as problem:
        return False, " ".join(str(problem).split()) if choice == "fused" else None


def _takes(op, x, size, *, on_gpu=GPU_DTYPES, form="", width=0):
    """Whether our kernels are chosen for tensors like x and take them. on_gpu: the dtypes that those of a GPU take.
    op, size, form, width: the operation, as speeds.Speeds describes it."""
    if _choice is None:
        use()
    if _choice != "fused" or torch.autograd.forward_ad._current_level >= 0:  # ours would give tangents of zero
        return False
    if torch._C._functorch.maybe_current_level() is not None:  # torch.func's transforms take no autograd::Function
        return False
    if x.device.type == "cpu":
        return x.dtype in KERNEL_DTYPES
    if not (_gpu and x.is_cuda and x.dtype in on_gpu):
        return False
    if _gpu is True:
        return True
    dtype = x.dtype
    if op == "cross_entropy" and dtype == torch.float32 and torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")  # that of the logits counts, whatever dtype hidden has
    return _gpu.wins((op, dtype, form, width), size)


def _takes_norm(op, x, weight, residual=None):
    """_takes() of a norm, whose kernels know one dtype for all, and float32 beside an x of 16 bits: for the weight, or
    for both."""
    stream = (x if residual is None else residual).dtype
    wide = x.element_size() == 2 and weight.dtype == torch.float32
    alike = weight.dtype == x.dtype or wide
    return alike and (stream == x.dtype or wide and stream == torch.float32) and _takes(op, x, x.shape[-1])


def _takes_heads(q, causal, cu_seqlens, scale):
    """Whether our kernels are chosen and take heads like those of q, [B, T, ..., H, D]."""
    width = q.shape[-1]
    if width > KERNEL_WIDTH or q.is_cuda and (width not in GPU_WIDTHS or not 0 < scale < math.inf):
        return False
    form = "documents" if cu_seqlens is not None else "causal" if causal else "full"
    return _takes("attention", q, q.shape[1], on_gpu=GPU_ATTENTION_DTYPES, form=form, width=width)


def _seed(dropout):
    """A seed for one mask, from torch's generator, so that the same random state gives the same mask."""
    return torch.randint(-2**63, 2**63 - 1, (1,), device="cpu") if dropout > 0 else None


def attention(q, k, v, *, causal=True, scale=None, dropout=0.0, lengths=None, cu_seqlens=None, rows_apart=False):
    """softmax(scale * q k^T) v for each head (Vaswani et al. 2017, section 3.2.1).

    q: [B, T, H, D]; k, v: [B, S, H, D], same dtype, any strides. causal: position t sees 0..t; needs T == S.
    scale: 1 / sqrt(D) unless given. dropout: probability of dropping an attention weight.
    lengths: int [B], how many keys of each batch entry count; a query that sees none gives zeros.
    cu_seqlens: int [documents + 1], from 0 to B * T: bounds of documents in the flattened [B * T]; tokens see their own
    document alone. On a GPU they are not checked: output outside all documents is left as the memory was.
    rows_apart: no document runs on into the next batch entry; torch's way, whose masks hold every pair of tokens, then
    leaves out the pairs of different entries. Returns [B, T, H, D].
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if _takes_heads(q, causal, cu_seqlens, scale):
        return _fused.attention.attention(q, k, v, causal, scale, dropout, _seed(dropout), lengths, cu_seqlens)
    together = cu_seqlens is not None and not rows_apart
    mask = _mask(q, k, causal, lengths, cu_seqlens, together)
    plain = _written_out if _choice == "reference" else F.scaled_dot_product_attention
    if together:  # one long batch entry
        shape, (q, k, v) = q.shape, (x.reshape(1, -1, *x.shape[2:]) for x in (q, k, v))
        return plain(*_heads_first(q, k, v), attn_mask=mask, dropout_p=dropout, scale=scale).transpose(1, 2).view(shape)
    # Without a mask of our own torch may take a faster way.
    is_causal = causal and lengths is None and cu_seqlens is None
    return plain(*_heads_first(q, k, v), attn_mask=None if is_causal else mask, dropout_p=dropout, is_causal=is_causal,
                 scale=scale).transpose(1, 2)


def attention_packed(qkv, *, causal=True, scale=None, dropout=0.0, lengths=None, cu_seqlens=None, rows_apart=False):
    """attention() of one projection [B, T, 3, H, D] with q, k and v side by side, not copied. Returns [B, T, H, D]."""
    scale = qkv.shape[-1] ** -0.5 if scale is None else scale
    if not _takes_heads(qkv, causal, cu_seqlens, scale):
        return attention(*qkv.unbind(2), causal=causal, scale=scale, dropout=dropout, lengths=lengths,
                         cu_seqlens=cu_seqlens, rows_apart=rows_apart)
    return _fused.attention.attention_packed(qkv, causal, scale, dropout, _seed(dropout), lengths, cu_seqlens)


def _heads_first(*tensors):
    return tuple(x.transpose(1, 2) for x in tensors)


def _mask(q, k, causal, lengths, cu_seqlens, together):
    """True where a query sees a key, [B or 1, 1, T, S] (T = S = B * T when together), or None where all see all."""
    rows = q.shape[0] * q.shape[1] if together else q.shape[1]
    keys = rows if together else k.shape[1]
    query, key = torch.arange(rows, device=q.device)[:, None], torch.arange(keys, device=q.device)
    parts = []
    if causal:
        parts.append(key <= query)
    if lengths is not None:
        parts.append(key < lengths.to(q.device)[:, None, None, None])
    if cu_seqlens is not None:
        tokens = torch.arange(q.shape[0] * q.shape[1], device=q.device)
        document = torch.bucketize(tokens, cu_seqlens.to(q.device)[1:], right=True)
        document = document.view(1 if together else q.shape[0], 1, 1, rows)
        parts.append(document.transpose(-1, -2) == document)
    mask = None
    for part in parts:
        mask = part if mask is None else mask & part
    return mask


def _written_out(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    """F.scaled_dot_product_attention as its formula says. q, k, v: [B, H, T or S, D]; rows that see nothing are 0."""
    scores = (q @ k.transpose(-1, -2)).float() * scale if q.dtype != torch.float64 else q @ k.transpose(-1, -2) * scale
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf)
        scores = scores.masked_fill(~attn_mask.any(-1, keepdim=True), 0.0)  # softmax of nothing would be NaN
    weights = scores.softmax(-1)
    if attn_mask is not None:
        weights = weights.masked_fill(~attn_mask, 0.0)
    return F.dropout(weights, dropout_p).to(q.dtype) @ v


def layer_norm(x, weight, bias, eps=1e-5):
    """Layer normalisation over the last axis (Ba et al. 2016). x: [..., C]; weight, bias: [C]. Returns [..., C]."""
    if _takes_norm("layer_norm", x, weight):
        return _fused.norms.layer_norm(x, weight, bias, eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def rms_norm(x, weight, eps=1e-6):
    """Root mean square normalisation (Zhang and Sennrich 2019). x: [..., C]; weight: [C]. Returns [..., C]."""
    if _takes_norm("rms_norm", x, weight):
        return _fused.norms.rms_norm(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


def add_layer_norm(x, residual, weight, bias, eps=1e-5, dropout=0.0, like_x=False):
    """One step of a pre-norm model: the branch x, with dropout, goes into the residual stream, which is normalised.

    x, residual: [..., C]; weight, bias: [C]. like_x: the norm serves only products in the dtype of x, and comes
    in that dtype where the stream's is wider. Returns (layer_norm(new), new) with new = residual + dropout(x).
    """
    if _takes_norm("add_layer_norm", x, weight, residual):
        return _fused.norms.add_layer_norm(x, residual, weight, bias, eps, dropout, _seed(dropout), like_x)
    new = residual + F.dropout(x, dropout)
    y = F.layer_norm(new, weight.shape, weight, bias, eps)
    return y.to(x.dtype) if like_x else y, new


def post_layer_norm(x, residual, weight, bias, eps=1e-5, dropout=0.0):
    """One step of a post-norm model (Vaswani et al. 2017, section 3.1): y = layer_norm(residual + dropout(x)).

    x, residual: [..., C]; weight, bias: [C]. Returns y twice, in the dtype of the residual, for the next step, and in
    that of x, for the products before it: one tensor where both are the same.
    """
    if x.dtype != residual.dtype and _takes_norm("add_layer_norm", x, weight, residual):
        return _fused.norms.post_layer_norm(x, residual, weight, bias, eps, dropout, _seed(dropout))
    y = add_layer_norm(x, residual, weight, bias, eps, dropout)[0]
    return y, y.to(x.dtype)


def add_rms_norm(x, residual, weight, eps=1e-6, dropout=0.0, like_x=False):
    """add_layer_norm with rms_norm: returns (rms_norm(new), new) with new = residual + dropout(x)."""
    if _takes_norm("add_rms_norm", x, weight, residual):
        return _fused.norms.add_rms_norm(x, residual, weight, eps, dropout, _seed(dropout), like_x)
    new = residual + F.dropout(x, dropout)
    y = F.rms_norm(new, weight.shape, weight, eps)
    return y.to(x.dtype) if like_x else y, new


def rotary_packed(qkv, cosine, sine):
    """q and k turned by rotary positions (Su et al. 2021, section 3.4.2), pairs made of the two halves of a head.

    qkv: [B, T, 3, H, D]; cosine, sine: float32 [T, D / 2]. Computed in float32 at least. Returns the same, v as it is.
    """
    wide = torch.promote_types(qkv.dtype, torch.float32)
    learnt = torch.is_grad_enabled() and (cosine.requires_grad or sine.requires_grad)  # ours has no gradient for them
    if not learnt and _takes("rotary", qkv, qkv.shape[1], width=qkv.shape[-1]):
        return _fused.rotary.rotary_packed(qkv, cosine.to(wide), sine.to(wide))
    first, second = qkv[:, :, :2].to(wide).chunk(2, dim=-1)
    cosine, sine = cosine[:, None, None], sine[:, None, None]
    turned = torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)
    return torch.cat((turned.to(qkv.dtype), qkv[:, :, 2:]), dim=2)


def gelu_tanh(x):
    """GELU in the tanh form of GPT-2 (Hendrycks and Gimpel 2016, section 2). x: any shape."""
    if _takes("gelu_tanh", x, x.shape[-1] if x.dim() else 1):
        return _fused.activation.gelu_tanh(x)
    return F.gelu(x, approximate="tanh")


def gelu(x):
    """GELU, x times the normal distribution function of x (Hendrycks and Gimpel 2016, section 2). x: any shape."""
    return F.gelu(x)


def swiglu(x):
    """silu(gate) * up (Shazeer 2020). x: [..., 2 F], gate first. Returns [..., F]."""
    if _takes("swiglu", x, x.shape[-1] // 2):
        return _fused.activation.swiglu(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def sigmoid_gate(gate, x):
    """sigmoid(gate) * x. Both [..., C]."""
    if _takes("sigmoid_gate", x, x.shape[-1]):
        return _fused.activation.sigmoid_gate(gate, x)
    return gate.sigmoid() * x


def linear_cross_entropy(hidden, weight, targets, ignore_index=-100):
    """Summed cross-entropy in nats of the targets under the logits hidden @ weight.T, which never exist as a whole in
    our kernels, nor on a GPU where they would take more than LOGITS_BYTES.

    hidden: [N, C]; weight: [V, C]; targets: int64 [N], each in [0, V) or ignore_index. Returns a scalar.
    """
    return linear_cross_entropy_rows(hidden, weight, targets, ignore_index)[0]


def linear_cross_entropy_rows(hidden, weight, targets, ignore_index=-100):
    """(linear_cross_entropy(), the losses [N] it is the sum of, 0 where ignored, through which no gradient flows)."""
    if _takes("cross_entropy", hidden, len(weight)):
        return _fused.loss.linear_cross_entropy(hidden, weight, targets, ignore_index)
    rows = loss_rows(len(weight), hidden.device.type)
    if len(hidden) <= rows:
        losses = _plain_losses(hidden, weight, targets, ignore_index)
    else:
        losses = losses_in_chunks(hidden, weight, targets, ignore_index, rows)
    return losses.sum(), losses.detach()


def loss_rows(vocabulary, device_type):
    """How many rows of logits torch's way of linear_cross_entropy has at a time: on a GPU those whose float32 logits,
    log-softmax and gradient fit into LOGITS_BYTES; on a CPU, where our kernels are at hand, all of them."""
    return max(1, LOGITS_BYTES // (12 * vocabulary)) if device_type == "cuda" else 2**63


def _plain_losses(hidden, weight, targets, ignore_index):
    classes, kind = len(weight), hidden.device.type
    if classes % 8 and kind in ALIGNED_DEVICES and torch.is_autocast_enabled(kind):
        padded = F.pad(weight.to(torch.get_autocast_dtype(kind)), (0, 0, 0, -classes % 8))
        logits = F.linear(hidden, padded)[:, :classes]
    else:
        logits = F.linear(hidden, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="none")


def losses_in_chunks(hidden, weight, targets, ignore_index, rows):
    """The losses [N] of linear_cross_entropy, `rows` rows at a time: backward computes each chunk's logits again."""
    parts = zip(hidden.split(rows), targets.split(rows), strict=True)
    return torch.cat([checkpoint(_plain_losses, part, weight, wanted, ignore_index, use_reentrant=False)
                      for part, wanted in parts])


def total_norm(tensors):
    """Euclidean norm of all tensors (a list, as of gradients) together: a scalar on their device."""
    if tensors and _takes("total_norm", tensors[0], sum(map(torch.numel, tensors)), on_gpu=(torch.float32,)) \
            and tensors[0].is_cuda and all(map(_plain, tensors)):
        return _fused.gradients.total_norm(tensors)
    return torch.nn.utils.get_total_norm(tensors)


def _plain(tensor):
    """Whether it is float32 as a whole and without gaps: not one that fully_shard has cut."""
    return type(tensor) is torch.Tensor and tensor.dtype == torch.float32 and tensor.is_contiguous()


def multiplies_bfloat16():
    """Whether our kernels use this processor's products of bfloat16: a step then takes about half the time."""
    if _choice is None:
        use()
    return _choice == "fused" and extension.load().cpu_isa() in ("avx512bf16", "amx")


def describe(device):
    """A short Spanish phrase for the log: what carries out attention, norms and loss on this device."""
    if _choice is None:
        use()
    if _choice == "fused" and device.type == "cpu":
        return f"atención, normas y pérdida: núcleos propios ({extension.load().cpu_isa()})"
    if _gpu and device.type == "cuda":
        if _gpu is True:
            return "atención, normas y pérdida: núcleos propios de CUDA"
        return (f"por lo medido en {_gpu.card}, núcleos propios de CUDA donde son más rápidos ("
                f"{', '.join(_gpu.operations())}), torch en lo demás")
    names = {"reference": "la fórmula en torch", "sdpa": "scaled_dot_product_attention de torch"}
    why = f" (núcleos propios en {device.type}: solo con --attention fused)" if _choice == "fused" else ""
    if why and device.type == "cuda":
        why = why[:-1] + ", o donde benchmarks/gpu.py --learn los mida más rápidos en esta tarjeta)"
    return f"atención: {names.get(_choice, names['sdpa'])}{why}; normas y pérdida: torch"


if __name__ == "__main__":
    from aura import cli, selfcheck

    cli.run(selfcheck.main)
