"""Rotary positions against complex numbers in float64, on every instruction set the processor has."""

import pytest
import torch
from torch import library
from torch.autograd import gradcheck

from aura import extension
from tests import support

if not extension.has_ops(extension.load()):
    pytest.skip(extension.status(), allow_module_level=True)

from aura.fused.rotary import rotary_packed

# One pair, a part of a vector, vectors with and without a rest, more than one thread's share; nothing at all.
SHAPES = [(1, 1, 1, 2), (2, 3, 2, 6), (2, 5, 3, 32), (1, 7, 2, 66), (3, 90, 2, 128), (0, 4, 2, 8), (2, 0, 1, 8)]
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float64: 1e-14}


def example(shape, dtype=torch.float32, seed=0):
    batch, length, heads, width = shape
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(batch, length, 3, heads, width, generator=generator, dtype=torch.float64).to(dtype)
    angles = torch.randn(length, width // 2, generator=generator, dtype=torch.float64) * 3
    wide = torch.promote_types(dtype, torch.float32)
    return qkv, angles.cos().to(wide), angles.sin().to(wide)


def reference(qkv, cosine, sine):
    turns = torch.complex(cosine, sine)[:, None, None]
    turned = torch.complex(*qkv[:, :, :2].chunk(2, -1)) * turns
    return torch.cat((torch.cat((turned.real, turned.imag), -1), qkv[:, :, 2:]), 2)


def check_values(tolerances=TOLERANCE, shapes=SHAPES, device="cpu"):
    """All dtypes and shapes, forward and gradient. Also run by itself, for one instruction set."""
    for dtype, tolerance in tolerances.items():
        for shape in shapes:
            qkv, cosine, sine = (t.to(device) for t in example(shape, dtype))
            dy, found = example(shape, dtype, seed=1)[0].to(device), []
            for function, cast in ((rotary_packed, lambda t: t), (reference, lambda t: t.double())):
                leaf = cast(qkv).requires_grad_()
                y = function(leaf, cast(cosine), cast(sine))
                found.append((y.detach(), *torch.autograd.grad(y, leaf, cast(dy))))
            for ours, exact in zip(*found, strict=True):
                assert ours.dtype == dtype and ours.is_contiguous()
                torch.testing.assert_close(ours.double(), exact, rtol=4 * tolerance, atol=4 * tolerance)


def test_values():
    check_values()


def test_values_by_several_threads(threads):
    threads(3)
    check_values(shapes=[(3, 90, 2, 128)])


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
def test_instruction_sets(isa):
    support.check_on(isa, __name__, "check_values")


def test_rows_apart_and_any_strides():
    wide = torch.randn(2, 5, 4 * 24)
    cosine, sine = example((2, 5, 2, 12))[1:]
    part = wide[..., 24:].view(2, 5, 3, 2, 12)
    for qkv in (part, part.transpose(0, 1).contiguous().transpose(0, 1), part[..., :8][:, :, :, :, ::2]):
        half = qkv.shape[-1] // 2
        angles = cosine[:, :half], sine[:, :half]
        torch.testing.assert_close(rotary_packed(qkv, *angles), reference(qkv, *angles))


def test_gradcheck():
    qkv, cosine, sine = example((2, 3, 2, 6), torch.float64)
    assert gradcheck(lambda x: rotary_packed(x, cosine, sine), qkv.requires_grad_())


def test_opcheck():
    for dtype in TOLERANCE:
        qkv, cosine, sine = example((2, 5, 2, 12), dtype)
        library.opcheck(torch.ops.aura.rotary, (qkv.requires_grad_(), cosine, sine, False))


def test_refusals():
    qkv, cosine, sine = example((2, 5, 2, 12))
    for wrong in ((qkv[:, :, :2], cosine, sine), (qkv[..., :11], cosine, sine), (qkv, cosine[:4], sine),
                  (qkv, cosine, sine.double()), (qkv.half(), cosine, sine)):
        with pytest.raises(RuntimeError, match="rotary"):
            rotary_packed(*wrong)
