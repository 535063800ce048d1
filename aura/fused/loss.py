"""The last projection and its cross-entropy together, in chunks of rows, so that the logits never exist as a whole.

N rows (tokens), C width, V classes (vocabulary).
"""

import torch
from torch import Tensor, library

from aura.fused.fake import register_fake
from aura.products import CHUNK_BYTES, add_product, mm, space, write_product

DTYPES = {  # of hidden and weight
    "cpu": {(torch.float32, torch.float32), (torch.float64, torch.float64), (torch.bfloat16, torch.bfloat16),
            (torch.bfloat16, torch.float32)},
    "cuda": {(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32),
             (torch.float16, torch.float16), (torch.float16, torch.float32)},
}
# Logits have a multiple of so many columns: on a GPU, rows that do not begin on 16 bytes are multiplied by kernels of
# older cards.
COLUMNS = {"cpu": 1, "cuda": 8}


def linear_cross_entropy(hidden, weight, targets, ignore_index=-100):
    """Cross-entropy, in nats, of softmax(hidden @ weight.T) against targets: the sum, and that of each row.

    hidden: [N, C], float32, bfloat16 or float64; on a GPU float16 in place of float64. weight: [V, C], of the same
    dtype, or float32 beside 16 bits. targets: int64 [N], each in [0, V), or ignore_index for a row that does not count;
    any other is an IndexError, or on a GPU a failed assertion, as torch has it. Products are in the dtype of hidden, or
    in 16 bits under autocast to them; the logits, of that dtype, are taken to float32 for the softmax, and the weight's
    gradient is added up in float32. Returns (the sum, float32, the losses of the rows, float32 [N], through which no
    gradient flows); float64 for float64.

    Gradients are computed with the loss, while a chunk's logits exist, and kept until backward. There are no second
    derivatives.
    """
    device = hidden.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    if hidden.dtype == torch.float32 and (autocast, torch.float32) in DTYPES[device]:
        hidden = hidden.to(autocast)
    recorded = torch.is_grad_enabled()
    loss, _, _, rows = _linear_cross_entropy(hidden, weight, targets, ignore_index, recorded and hidden.requires_grad,
                                             recorded and weight.requires_grad)
    return loss, rows


def _in_chunks(hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, hidden_gradient: bool,
               weight_gradient: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, its gradient by hidden, by weight, the rows' losses); a gradient not asked for is empty."""
    _check(hidden, weight, targets)
    rows, classes = len(hidden), len(weight)
    loss, dhidden, dweight, losses = _empty_results(hidden, weight, hidden_gradient, False)
    matrix = _with_columns(weight, hidden.dtype)
    if weight_gradient:
        sums = weight.new_empty(matrix.shape, dtype=weight.dtype if weight.itemsize > 2 else torch.float32)
    chunks = -(-rows * classes * hidden.element_size() // CHUNK_BYTES)
    chunk = -(-rows // max(chunks, 1))
    buffer = space(hidden, matrix.t(), chunk)
    found = [losses.new_zeros(0, dtype=torch.float64)]
    for first in range(0, rows, chunk or 1):
        part = hidden[first:first + chunk]
        logits = mm(part, matrix.t(), buffer)
        found.append(torch.ops.aura.cross_entropy_chunk_(logits[:, :classes], targets[first:first + chunk],
                                                         ignore_index, hidden_gradient or weight_gradient))
        if hidden_gradient:
            write_product(dhidden[first:first + chunk], logits, matrix)
        if weight_gradient:
            add_product(sums, logits.t(), part, fresh=first == 0)
        del logits  # before those of the next chunk are made
    found = torch.cat(found)  # once for all chunks: on a GPU each of these steps is a kernel
    losses.copy_(found)
    if weight_gradient:
        # Without the rows added for COLUMNS, and no view, which autograd would copy to keep it.
        dweight = sums.resize_(weight.shape).to(weight.dtype) if rows else weight.new_zeros(weight.shape)
    return loss.copy_(found.sum()), dhidden, dweight, losses


def _with_columns(weight, dtype):
    """weight in the dtype of the products, with rows of zeros at its end up to a multiple of COLUMNS: nobody sees their
    logits, which are 0, and to the gradients they add 0 times 0."""
    missing = -len(weight) % COLUMNS[weight.device.type]
    if not missing:
        return weight.to(dtype)
    matrix = weight.new_empty(len(weight) + missing, weight.shape[1], dtype=dtype)
    matrix[:len(weight)] = weight
    matrix[len(weight):] = 0
    return matrix


def _check(hidden, weight, targets):
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden must be [N, C] and weight [V, C], are {list(hidden.shape)} and {list(weight.shape)}")
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(f"targets must be int64 [{len(hidden)}], is {targets.dtype} {list(targets.shape)}")
    if (hidden.dtype, weight.dtype) not in DTYPES[hidden.device.type]:
        raise ValueError(f"no products of {hidden.dtype} with {weight.dtype}")


def _empty_results(hidden, weight, hidden_gradient, weight_gradient):
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    return (hidden.new_empty((), dtype=dtype), hidden.new_empty(hidden.shape if hidden_gradient else 0),
            weight.new_empty(weight.shape if weight_gradient else 0), hidden.new_empty(hidden.shape[:1], dtype=dtype))


_linear_cross_entropy = library.custom_op("aura::linear_cross_entropy", _in_chunks, mutates_args=(),
                                          device_types=("cpu", "cuda"))


@register_fake("aura::linear_cross_entropy")
def _(hidden, weight, targets, ignore_index, hidden_gradient, weight_gradient):
    return _empty_results(hidden, weight, hidden_gradient, weight_gradient)


def _save(ctx, inputs, output):
    hidden, weight, targets, *ctx.options = inputs
    ctx.save_for_backward(hidden, weight, targets)
    ctx.gradients = output[1:3]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # no zeros of the size of dweight for _backward to ignore


def _backward(ctx, gradient, *_):
    if torch.is_grad_enabled():  # create_graph: the gradients would pass for constants
        raise RuntimeError("linear_cross_entropy has no second derivatives")
    if gradient is None:
        return (None,) * 6
    found, ctx.gradients = ctx.gradients, None
    if found is None:  # backward came before (retain_graph) and gave them away: compute them again
        found = _linear_cross_entropy(*ctx.saved_tensors, *ctx.options)[1:3]
    dhidden, dweight = (_scaled(g, gradient) if needed else None
                        for g, needed in zip(found, ctx.options[1:], strict=True))
    return dhidden, dweight, None, None, None, None


def _scaled(tensor, factor):
    """In place, as the weight's gradient is large; tensors that torch.compile traces are not written to."""
    return tensor.mul_(factor) if type(tensor) is Tensor else tensor * factor


_linear_cross_entropy.register_autograd(_backward, setup_context=_save)


@register_fake("aura::cross_entropy_chunk_")
def _(logits, targets, ignore_index, gradient):
    return logits.new_empty(logits.shape[:1], dtype=torch.float64)
