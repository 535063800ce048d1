"""GELU, SwiGLU and the sigmoid gate against float64, on every instruction set the processor has."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import library
from torch.autograd import gradcheck

from aura import extension
from tests import support

if not extension.has_ops(extension.load()):
    pytest.skip(extension.status(), allow_module_level=True)

from aura.fused import activation

EXTREMES = [0.0, -0.0, 1e-30, -5.0, -9.5, 9.5, -70.0, 1e4, -1e4, 3e38, -3e38, float("inf"), -float("inf")]
# One element, a part of a vector, vectors with and without a rest, more than one thread's share.
SHAPES = [(0,), (3, 0), (1,), (2,), (15,), (64,), (3, 5, 33), (300, 257)]
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float64: 1e-14}


def gate(x):
    """The two halves of x, as gate and what it lets through: the rows of either lie apart, as in the models."""
    return activation.sigmoid_gate(*x.chunk(2, -1))


def gate_reference(x):
    gate, through = x.chunk(2, -1)
    return gate.sigmoid() * through


def gelu_reference(x):
    return F.gelu(x, approximate="tanh")


def swiglu_reference(x):
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


FUNCTIONS = {"gelu": (activation.gelu_tanh, gelu_reference), "swiglu": (activation.swiglu, swiglu_reference),
             "gate": (gate, gate_reference)}


def normal(shape, dtype=torch.float32, seed=0, scale=3.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale).to(dtype)


def with_gradient(function, x, dy):
    x = x.detach().requires_grad_()
    y = function(x)
    return y.detach(), torch.autograd.grad(y, x, dy)[0]


def check_values(tolerances=TOLERANCE, shapes=SHAPES, device="cpu"):
    """All functions, dtypes and shapes, forward and gradient. Also run by itself, for one instruction set."""
    for ours, reference in FUNCTIONS.values():
        for dtype, tolerance in tolerances.items():
            for shape in shapes:
                if ours is not activation.gelu_tanh:
                    shape = (*shape[:-1], 2 * shape[-1])
                x = normal(shape, dtype).to(device)
                dy = normal(reference(x).shape, dtype, seed=1, scale=1.0).to(device)
                found = with_gradient(ours, x, dy)
                expected = with_gradient(reference, x.double(), dy.double())
                for value, exact in zip(found, expected, strict=True):
                    assert value.dtype == dtype and value.shape == exact.shape
                    torch.testing.assert_close(value.double(), exact, rtol=4 * tolerance, atol=tolerance)
    check_extremes(tolerances, device)


def check_extremes(dtypes, device):
    for dtype in dtypes:
        x = torch.tensor([*EXTREMES, float("nan")], device=device).to(dtype)
        limit = torch.where(x > 9, x, torch.zeros_like(x))  # of x itself, or of nothing, far from 0
        far = x.abs() > 9
        y, dx = with_gradient(activation.gelu_tanh, x, torch.ones_like(x))
        assert torch.isnan(y[-1]) and torch.isnan(dx[-1]) and not torch.isnan(y[:-1]).any()
        torch.testing.assert_close(y[far], limit[far], rtol=0, atol=1e-20)
        torch.testing.assert_close(dx[far], (x[far] > 0).to(dtype), rtol=0, atol=1e-20)

        packed = torch.stack([x, torch.ones_like(x)], -1)
        y, dx = with_gradient(activation.swiglu, packed, torch.ones_like(x)[:, None])
        far = x.abs() > 64
        assert torch.isnan(y[-1]).all() and torch.isnan(dx[-1]).all() and not torch.isnan(y[:-1]).any()
        torch.testing.assert_close(y[far, 0], limit[far], rtol=0, atol=1e-20)
        torch.testing.assert_close(dx[far], torch.stack([(x[far] > 0).to(dtype), limit[far]], -1), rtol=0, atol=1e-20)

        y, dx = with_gradient(gate, packed, torch.ones_like(x)[:, None])
        assert torch.isnan(y[-1]).all() and torch.isnan(dx[-1]).all() and not torch.isnan(y[:-1]).any()
        torch.testing.assert_close(y[far, 0], (x[far] > 0).to(dtype), rtol=0, atol=1e-20)
        torch.testing.assert_close(dx[far, 0], torch.zeros_like(x[far]), rtol=0, atol=1e-20)


def test_values():
    check_values()


def test_values_by_several_threads(threads):
    threads(3)
    check_values({torch.float32: TOLERANCE[torch.float32]}, SHAPES[-1:])


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
def test_instruction_sets(isa):
    support.check_on(isa, __name__, "check_values")


def test_relative_precision_where_the_textbook_form_cancels():
    x = torch.linspace(-8, -3, 101)
    exact = x.double() * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x.double() + 0.044715 * x.double() ** 3))
    torch.testing.assert_close(activation.gelu_tanh(x).double(), exact, rtol=2e-5, atol=0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_non_contiguous(name):
    ours, reference = FUNCTIONS[name]
    x = normal((12, 7, 10)).transpose(0, 1)[:, ::2]
    dy = torch.ones(1).expand(reference(x).shape)
    for value, expected in zip(with_gradient(ours, x, dy), with_gradient(reference, x, dy), strict=True):
        torch.testing.assert_close(value, expected)


def test_a_gate_with_rows_as_far_apart_as_no_others():
    gate, x, dy = (normal((5, width), seed=width)[:, :9].requires_grad_() for width in (9, 20, 30))
    expected = gate.sigmoid() * x
    y = activation.sigmoid_gate(gate, x)
    torch.testing.assert_close(y, expected)
    found = torch.autograd.grad(y, (gate, x), dy.detach())
    torch.testing.assert_close(found, torch.autograd.grad(expected, (gate, x), dy.detach()))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradcheck(name):
    assert gradcheck(FUNCTIONS[name][0], (normal((3, 22), torch.float64).requires_grad_(),))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_opcheck(dtype):
    x = normal((3, 34), dtype)
    ops = torch.ops.aura
    for op in (ops.gelu_tanh, ops.swiglu):
        library.opcheck(op.default, (x.clone().requires_grad_(),))
    library.opcheck(ops.gelu_tanh_backward.default, (x, x))
    library.opcheck(ops.swiglu_backward.default, (normal((3, 17), dtype), x))
    library.opcheck(ops.sigmoid_gate.default, (x.clone().requires_grad_(), normal((3, 34), dtype).requires_grad_()))
    library.opcheck(ops.sigmoid_gate_backward.default, (x, x, x))


def test_compiled():
    def both(x):
        return activation.swiglu(activation.gelu_tanh(x) * 2).sum()

    x = normal((5, 18)).requires_grad_()
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x), torch.autograd.grad(both(x), x))


def test_refusals():
    with pytest.raises(RuntimeError, match="float32, bfloat16 or float64"):
        activation.gelu_tanh(torch.zeros(3, dtype=torch.float16))
    for x in (torch.zeros(2, 3), torch.zeros(())):
        with pytest.raises(RuntimeError, match="2F"):
            torch.ops.aura.swiglu(x)
    for op in (torch.ops.aura.gelu_tanh_backward, torch.ops.aura.swiglu_backward):
        for dy in (torch.zeros(2, 5), torch.zeros(2, 2, dtype=torch.float64)):
            with pytest.raises(RuntimeError, match="dy must be"):
                op(dy, torch.zeros(2, 4))
    for gate, x in ((torch.zeros(2, 3), torch.zeros(2, 4)), (torch.zeros(2), torch.zeros(2).double())):
        with pytest.raises(RuntimeError, match="alike"):
            activation.sigmoid_gate(gate, x)
