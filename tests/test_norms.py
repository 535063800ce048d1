"""Layer and RMS normalisation, alone and after a residual addition with dropout, against float64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck
from torch.library import opcheck

from aura import extension
from tests import support
from tests.test_attention import philox

if not extension.has_ops(extension.load()):
    pytest.skip(extension.status(), allow_module_level=True)

from aura.fused import norms

LIMIT = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float64: 1e-13}
# One column, less than a vector, vectors with and without a rest, longer than a few blocks of columns.
SHAPES = [(1, 1), (3, 7), (5, 40), (2, 3, 65), (33, 768), (700, 48), (9, 5000)]
SEED = torch.tensor([-987654321987654321])


def normal(shape, dtype=torch.float32, seed=0, shift=0.0):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (values * 1.5 + shift).to(dtype)


def kept(shape, probability, seed=SEED):
    """True where an element is kept: the counter is (row, column // 8, 0, 1), eight halves of 16 bits each."""
    columns = shape[-1]
    rows = int(np.prod(shape[:-1]))
    groups = -(-columns // 8)
    zero = np.zeros(1, np.uint64)
    words = philox(int(seed) % 2**64, (np.arange(rows, dtype=np.uint64)[:, None],
                                       np.arange(groups, dtype=np.uint64)[None], zero, zero + np.uint64(1)))
    halves = [part for word in words for part in (word & np.uint64(0xFFFF), word >> np.uint64(16))]
    bits = np.stack(halves, -1).reshape(rows, groups * 8)[:, :columns]
    return torch.from_numpy(bits >= round(probability * 65536)).view(shape)


def dropped(x, probability):
    scale = 65536 / (65536 - round(probability * 65536))
    return x * kept(x.shape, probability) * scale if probability else x


def layer(x, weight, bias):
    return F.layer_norm(x, weight.shape, weight, bias, 1e-5)


def rms(x, weight):
    return F.rms_norm(x, weight.shape, weight, 1e-6)


def added(norm):
    def reference(x, residual, *parameters, dropout=0.0):
        new = residual + dropped(x, dropout)
        return norm(new, *parameters), new

    return reference


# name: (ours, the formula, how many inputs are [..., C]; the others are [C])
OPS = {"layer": (norms.layer_norm, layer, 1, 2), "rms": (norms.rms_norm, rms, 1, 1),
       "add layer": (norms.add_layer_norm, added(layer), 2, 2), "add rms": (norms.add_rms_norm, added(rms), 2, 1)}


def inputs_of(name, shape, dtype, parameters=None):
    _, _, tensors, vectors = OPS[name]
    return [normal(shape, dtype, seed=i, shift=3.0) for i in range(tensors)] + [
        normal(shape[-1:], parameters or dtype, seed=10 + i) for i in range(vectors)]


def with_gradients(function, inputs):
    """(results, gradients by all inputs under fixed directions)."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    results = function(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    directions = [normal(y.shape, torch.float64, seed=20 + i).to(y.dtype) for i, y in enumerate(results)]
    return [y.detach() for y in results], torch.autograd.grad(results, inputs, directions)


def agree(name, inputs, dropout=0.0, limit=None):
    ours, reference, _, _ = OPS[name]
    options = {"dropout": dropout, "seed": SEED} if dropout else {}
    exact = with_gradients(lambda *x: reference(*x, **({"dropout": dropout} if dropout else {})),
                           [x.double() for x in inputs])
    found = with_gradients(lambda *x: ours(*x, **options), inputs)
    for got, want in zip(found[0] + list(found[1]), exact[0] + list(exact[1]), strict=True):
        assert got.shape == want.shape
        assert (got.double() - want).norm() <= (limit or LIMIT[inputs[0].dtype]) * (want.norm() + 0.1)
    return found


def check_values():
    """Everything once more, for an instruction set that was asked for."""
    for name in OPS:
        for shape in SHAPES:
            for dtype in LIMIT:
                if shape[-1] > 1 or "layer" not in name:
                    agree(name, inputs_of(name, shape, dtype))
        if "add" in name:
            agree(name, inputs_of(name, (33, 77), torch.float32), dropout=0.3)


def test_values_and_gradients():
    check_values()


@pytest.mark.parametrize("name", ["add layer", "add rms"])
@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("shape", [(1, 1), (4, 13), (2, 5, 64), (70, 100)])
def test_dropout_is_the_mask_of_the_generator(name, dtype, shape):
    if shape[-1] == 1 and "layer" in name:
        pytest.skip("a single column has no variance")
    agree(name, inputs_of(name, shape, dtype), dropout=0.25)


def test_a_single_column_is_its_bias():
    x, weight, bias = normal((4, 1)), torch.ones(1), torch.full((1,), 0.5)
    assert norms.layer_norm(x, weight, bias).eq(0.5).all()


@pytest.mark.parametrize("name", OPS)
def test_bfloat16_with_float32_parameters(name):
    agree(name, inputs_of(name, (20, 96), torch.bfloat16, parameters=torch.float32))


@pytest.mark.parametrize("name", ["add layer", "add rms"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_bfloat16_branch_into_a_float32_stream(name, dropout):
    branch, *rest = inputs_of(name, (20, 96), torch.float32)
    (y, new), gradients = agree(name, [branch.bfloat16(), *rest], dropout, limit=1e-2)
    assert y.dtype == new.dtype == torch.float32 and gradients[0].dtype == torch.bfloat16


@pytest.mark.parametrize("name", OPS)
def test_any_layout(name):
    wide = [normal((6, 50), seed=i).t() if i < OPS[name][2] else x
            for i, x in enumerate(inputs_of(name, (50, 6), torch.float32))]
    agree(name, wide)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 5)])
def test_no_rows(name, shape):
    results, gradients = with_gradients(OPS[name][0], inputs_of(name, shape, torch.float32))
    assert all(y.shape == shape for y in results)
    assert all(g.eq(0).all() for g in gradients[OPS[name][2]:])


@pytest.mark.parametrize("name", OPS)
def test_large_values_and_a_large_mean(name):
    _, _, tensors, _ = OPS[name]
    inputs = [x * 1e4 if i < tensors else x for i, x in enumerate(inputs_of(name, (9, 300), torch.float32))]
    agree(name, inputs, limit=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_row_spoils_itself_alone(value):
    x, weight, bias = inputs_of("layer", (5, 70), torch.float32)
    clean = norms.layer_norm(x, weight, bias)
    x[2, 33] = value
    spoiled = norms.layer_norm(x, weight, bias)
    assert spoiled[2].isnan().any()
    assert torch.equal(spoiled[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


def test_one_result_without_gradient():
    x, residual, weight, bias = (t.requires_grad_() for t in inputs_of("add layer", (4, 30), torch.float32))
    norms.add_layer_norm(x, residual, weight, bias)[1].sum().backward()
    assert x.grad.eq(1).all() and residual.grad.eq(1).all() and weight.grad.eq(0).all()
    for tensor in (x, residual):
        tensor.grad = None
    norms.add_layer_norm(x, residual, weight, bias)[0].sum().backward()
    assert torch.equal(x.grad, residual.grad)


def test_results_do_not_depend_on_threads():
    inputs = inputs_of("add layer", (300, 200), torch.float32)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results, gradients = with_gradients(
                lambda *x: norms.add_layer_norm(*x, dropout=0.1, seed=SEED), inputs)
            found.append([*results, *gradients])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0][:4], other[:4], strict=True))
        for a, b in zip(found[0][4:], other[4:], strict=True):  # sums over rows
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradcheck(name, dropout):
    ours, _, tensors, _ = OPS[name]
    if dropout and tensors == 1:
        pytest.skip("no dropout without a residual")
    options = {"dropout": dropout, "seed": SEED} if dropout else {}
    inputs = [x.requires_grad_() for x in inputs_of(name, (3, 11), torch.float64)]
    assert gradcheck(lambda *x: ours(*x, **options), inputs)


def test_opcheck():
    x, residual, weight, bias = (t.requires_grad_() for t in inputs_of("add layer", (3, 20), torch.float32))
    for op, arguments in (("layer_norm", (x, weight, bias, 1e-5)), ("layer_norm", (x, weight, None, 1e-5)),
                          ("rms_norm", (x, weight, 1e-6)),
                          ("add_layer_norm", (x, residual, weight, bias, 1e-5, 0.1, SEED)),
                          ("add_rms_norm", (x, residual, weight, 1e-6, 0.0, None))):
        opcheck(getattr(torch.ops.aura, op).default, arguments)


def test_a_compiled_function_is_one_graph():
    x, residual, weight, bias = inputs_of("add layer", (8, 32), torch.float32)

    def step(x, residual, weight, bias):
        return norms.add_layer_norm(torch.sin(x), residual, weight, bias)

    found = with_gradients(torch.compile(step, fullgraph=True, backend="aot_eager"), [x, residual, weight, bias])
    for got, want in zip(found, with_gradients(step, [x, residual, weight, bias]), strict=True):
        torch.testing.assert_close(list(got), list(want))


@pytest.mark.parametrize("wrong, message", [
    (lambda x, w: norms.layer_norm(x, w[:-1]), "x must be"),
    (lambda x, w: norms.layer_norm(x.half(), w.half()), "no kernel"),
    (lambda x, w: norms.add_layer_norm(x, x[:-1], w), "residual"),
    (lambda x, w: norms.add_layer_norm(x, x, w, dropout=0.5), "seed"),
    (lambda x, w: norms.add_rms_norm(x, x, w, dropout=1.0, seed=SEED), "dropout")])
def test_what_is_refused(wrong, message):
    with pytest.raises(RuntimeError, match=message):
        wrong(*inputs_of("rms", (4, 30), torch.float32))


@pytest.mark.parametrize("isa", ["portable", "avx2"])
def test_other_instruction_sets(isa, tmp_path):
    if isa not in extension.load().cpu_isas():
        pytest.skip(f"this processor has no {isa}")
    code = "from tests import test_norms\ntest_norms.check_values()\nprint(test_norms.extension.load().cpu_isa())"
    exit_code, output = support.run(["-c", code], tmp_path, AURA_CPU_ISA=isa)
    assert exit_code == 0 and output.splitlines()[-1] == isa, output
