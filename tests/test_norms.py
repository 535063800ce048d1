"""Norms on the CPU against their formulas in float64: shapes, dtypes, dropout, extremes, threads, errors."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import library

from aura import extension
from tests import support

BFLOAT16, FLOAT, DOUBLE = torch.bfloat16, torch.float32, torch.float64
KINDS = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")
WIDTHS = (1, 7, 40, 65, 768, 1000)
# Dtypes of x, residual, weight.
DTYPES = ((FLOAT,) * 3, (BFLOAT16,) * 3, (BFLOAT16, BFLOAT16, FLOAT), (BFLOAT16, FLOAT, FLOAT), (DOUBLE,) * 3)
# Relative to the largest value of a tensor. In bfloat16 it is the outputs that are rounded.
LIMITS = {FLOAT: 2e-6, BFLOAT16: 1e-2, DOUBLE: 1e-14}


@pytest.fixture(scope="module", autouse=True)
def norms():
    if not extension.has_ops(extension.load()):
        pytest.skip(extension.status())
    from aura.fused import norms

    return norms


# ---- What is right ---------------------------------------------------------------------------------------------------


def multipliers(seed, probability, rows, columns):
    """What dropout multiplies with, float64 [rows, columns]: eight halves of 16 bits a counter, the low one first."""
    row, group = np.arange(rows, dtype=np.uint64)[:, None], np.arange(-(-columns // 8), dtype=np.uint64)
    words = np.stack(support.philox(seed, (row, group, np.uint64(0), np.uint64(1))), -1).reshape(rows, -1)
    bits = np.stack([words & np.uint64(0xFFFF), words >> np.uint64(16)], -1).reshape(rows, -1)[:, :columns]
    threshold = round(probability * 65536)
    return torch.from_numpy((bits >= threshold) * (65536 / (65536 - threshold)))


def formula(kind, operands, eps, keep=1.0):
    """What the public function returns, a list, by the formula; differentiable."""
    x, *rest = operands
    new = x
    if kind.startswith("add"):
        new = rest.pop(0) + x * keep
    weight, bias = rest[0], rest[1] if len(rest) > 1 else 0.0
    centred = new if "rms" in kind else new - new.mean(-1, keepdim=True)
    y = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight + bias
    return [y, new] if kind.startswith("add") else [y]


def drawn(kind, rows, columns, dtypes=DTYPES[0], bias=True, seed=0):
    """x, then residual, weight, bias where the kind has them; leaves that require a gradient."""
    generator = torch.Generator().manual_seed(seed)
    x, residual, weight = dtypes
    parts = [((rows, columns), x), ((rows, columns), residual), ((columns,), weight), ((columns,), weight)]
    if not kind.startswith("add"):
        del parts[1]
    if "rms" in kind or not bias:
        del parts[-1]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape, dtype in parts]


def called(norms, kind, operands, **options):
    """The outputs of the public function, a list."""
    outputs = getattr(norms, kind)(*operands, **options)
    return list(outputs) if kind.startswith("add") else [outputs]


def compare(norms, kind, operands, eps=1e-5, keep=1.0, **options):
    """Outputs and all gradients against the formula in float64, on the operands' device."""
    exact = [x.detach().double().requires_grad_() for x in operands]
    outputs, wanted = called(norms, kind, operands, eps=eps, **options), formula(kind, exact, eps, keep)
    assert outputs[0].dtype == operands[1 if kind.startswith("add") and not options.get("like_x") else 0].dtype
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(y.shape, generator=generator).to(y) for y in outputs]
    gradients = torch.autograd.grad(outputs, operands, upstream)
    wanted_gradients = torch.autograd.grad(wanted, exact, [g.double() for g in upstream])
    # A gradient is a difference of terms of about dy * weight * rstd, which may cancel.
    new = wanted[-1] if kind.startswith("add") else exact[0]
    centred = new if "rms" in kind else new - new.mean(-1, keepdim=True)
    term = ((centred.square().mean(-1) + eps).rsqrt() * 5.0).max().item() if new.numel() else 1.0
    limit = LIMITS[BFLOAT16 if BFLOAT16 in [x.dtype for x in operands] else operands[0].dtype]
    for got, want, scale in (*((y, w, 1.0) for y, w in zip(outputs, wanted, strict=True)),
                             *((g, w, term) for g, w in zip(gradients, wanted_gradients, strict=True))):
        assert got.shape == want.shape and got.is_contiguous()
        if want.numel():
            assert (got.double() - want).abs().max() <= limit * max(scale, want.abs().max().item())
    for gradient, operand in zip(gradients, operands, strict=True):
        assert gradient.dtype == operand.dtype


def check_post_norm(norms, rows, columns, dtype, device="cpu", same=torch.equal, alone=True, **options):
    """post_layer_norm against add_layer_norm, whose output is rounded here, for gradients of both outputs and, where
    that is wanted, of each alone. same(a, b): whether two gradients agree."""
    operands = [x.detach().to(device).requires_grad_()
                for x in drawn("add_layer_norm", rows, columns, (dtype, FLOAT, FLOAT))]
    y, like_x = norms.post_layer_norm(*operands, **options)
    plain, _ = norms.add_layer_norm(*operands, **options)
    assert torch.equal(y, plain) and like_x.dtype == dtype and torch.equal(like_x, plain.to(dtype))
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(y.shape, generator=generator).to(output) for output in (y, like_x)]
    each = (([y], upstream[:1]), ([like_x], upstream[1:])) if alone else ()
    for outputs, given in (([y, like_x], upstream), *each):
        got = torch.autograd.grad(outputs, operands, given, retain_graph=True)
        wanted = torch.autograd.grad(plain, operands, sum(gradient.float() for gradient in given), retain_graph=True)
        assert all(map(same, got, wanted)) and [x.dtype for x in got] == [x.dtype for x in operands]


# ---- Values and gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda dtypes: "-".join(str(d)[6:] for d in dtypes))
@pytest.mark.parametrize("kind", KINDS)
def test_formula_in_float64(norms, kind, dtypes):
    if not kind.startswith("add") and dtypes[0] != dtypes[1]:
        pytest.skip("there is no residual")
    for columns in WIDTHS:
        for rows in (0, 1, 3, 70):
            compare(norms, kind, drawn(kind, rows, columns, dtypes))


@pytest.mark.parametrize("kind", KINDS[2:])
def test_a_norm_of_the_dtype_of_the_branch(norms, kind):
    """The same values rounded once more, and a gradient that comes rounded."""
    for dtypes in DTYPES:
        for columns in (1, 40, 1000):
            compare(norms, kind, drawn(kind, 5, columns, dtypes), like_x=True)
    wide, narrow = (called(norms, kind, drawn(kind, 5, 40, DTYPES[3]), like_x=like_x) for like_x in (False, True))
    assert torch.equal(wide[0].bfloat16(), narrow[0]) and torch.equal(wide[1], narrow[1])


def test_a_norm_in_both_dtypes(norms):
    for columns in (1, 40, 1000):
        for rows in (0, 1, 70):
            check_post_norm(norms, rows, columns, BFLOAT16)
    check_post_norm(norms, 5, 40, BFLOAT16, dropout=0.3, seed=torch.tensor(11), eps=0.5)


@pytest.mark.parametrize("kind", ["layer_norm", "add_layer_norm"])
def test_without_bias(norms, kind):
    compare(norms, kind, drawn(kind, 5, 40, bias=False))


def test_eps(norms):
    for kind in KINDS:
        compare(norms, kind, drawn(kind, 5, 40), eps=0.5)


@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda dtypes: "-".join(str(d)[6:] for d in dtypes))
@pytest.mark.parametrize("kind", KINDS[2:])
def test_dropout_against_the_formula(norms, kind, dtypes):
    """The mask of the backward is that of the forward, and both are those of the generator."""
    for columns in WIDTHS:
        keep = multipliers(11, 0.3, 6, columns)
        compare(norms, kind, drawn(kind, 6, columns, dtypes), keep=keep, dropout=0.3, seed=torch.tensor(11))


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 1 << 32])
def test_mask_is_the_generators(norms, seed):
    for columns in WIDTHS:
        ones, zeros = torch.ones(2, columns), torch.zeros(2, columns)
        _, new = norms.add_rms_norm(ones, zeros, torch.ones(columns), dropout=0.25, seed=torch.tensor([seed]))
        assert torch.equal(new.double(), multipliers(seed, 0.25, 2, columns).float().double())


def test_masks_of_two_seeds_differ(norms):
    ones, zeros = torch.ones(64, 1000), torch.zeros(64, 1000)
    first, second = (norms.add_rms_norm(ones, zeros, torch.ones(1000), dropout=0.2, seed=torch.tensor(seed))[1] > 0
                     for seed in (1, 2))
    for seed, mask in enumerate((first, second), 1):
        assert torch.equal(mask, multipliers(seed, 0.2, 64, 1000) > 0)  # enough for some at the threshold itself
        assert abs(mask.double().mean() - 0.8) < 5 * math.sqrt(0.2 * 0.8 / mask.numel())
    assert abs((first == second).double().mean() - 0.68) < 0.01  # independent: 0.8^2 + 0.2^2


def test_dropout_too_small_for_its_steps_drops_nothing(norms):
    compare(norms, "add_layer_norm", drawn("add_layer_norm", 3, 40), dropout=1e-6, seed=torch.tensor(1))


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(norms, kind):
    function = partial(getattr(norms, kind), eps=0.1)
    torch.autograd.gradcheck(function, drawn(kind, 3, 5, DTYPES[-1]))
    if kind.startswith("add"):
        function = partial(function, dropout=0.4, seed=torch.tensor(3))
        torch.autograd.gradcheck(function, drawn(kind, 3, 5, DTYPES[-1]))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("kind", KINDS[2:])
def test_one_output_used(norms, kind, dropout):
    """The gradient of an output that nobody uses is zero."""
    options = {"dropout": dropout, "seed": torch.tensor(5) if dropout else None, "eps": 1e-5}
    keep = multipliers(5, dropout, 3, 40) if dropout else 1.0
    for used in (0, 1):
        operands = drawn(kind, 3, 40)
        exact = [x.detach().double().requires_grad_() for x in operands]
        got = torch.autograd.grad(called(norms, kind, operands, **options)[used].square().sum(), operands)
        want = torch.autograd.grad(formula(kind, exact, 1e-5, keep)[used].square().sum(), exact,
                                   allow_unused=True, materialize_grads=True)
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g.double(), w, rtol=1e-5, atol=1e-4)


def test_shared_gradient_is_not_shared_memory(norms):
    """x and residual have the same gradient, but what accumulates in one must not show in the other."""
    x, residual, *rest = drawn("add_layer_norm", 3, 8)
    norms.add_layer_norm(x, residual, *rest)[0].square().sum().backward()
    assert torch.equal(x.grad, residual.grad)
    x.grad.zero_()
    assert residual.grad.abs().max() > 0


# ---- Layouts, extremes, threads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_any_shape_and_strides(norms, kind):
    flat = drawn(kind, 6, 40)
    tensors = 2 if kind.startswith("add") else 1
    rows = [x.detach() for x in flat[:tensors]]
    wanted = called(norms, kind, flat)
    for other in ([x.view(2, 3, 40) for x in rows], [x.view(6, 40).t().contiguous().t() for x in rows],
                  [x.view(1, 6, 1, 40) for x in rows], [x.repeat(1, 2)[:, :40] for x in rows]):
        got = called(norms, kind, [*other, *flat[tensors:]])
        for y, want in zip(got, wanted, strict=True):
            assert y.shape == other[0].shape and y.is_contiguous() and torch.equal(y.view(6, 40), want)
    one = called(norms, kind, [x[0] for x in flat[:tensors]] + flat[tensors:])
    for y, want in zip(one, wanted, strict=True):
        assert torch.equal(y, want[0])


def test_gradient_with_strides(norms):
    x, weight, bias = drawn("layer_norm", 6, 40)
    upstream = torch.randn(40, 6)
    y = norms.layer_norm(x, weight, bias)
    got, want = (torch.autograd.grad(y, x, dy, retain_graph=True)[0]
                 for dy in (upstream.t(), upstream.t().contiguous()))
    assert torch.equal(got, want)
    assert torch.isfinite(torch.autograd.grad(y.sum(), x)[0]).all()  # an expanded gradient


def test_large_mean(norms):
    """One pass with E[x^2] - E[x]^2 has no correct digit here."""
    x = (torch.randn(4, 768) + 1e4).requires_grad_()
    y, mean, rstd = torch.ops.aura.layer_norm(x, torch.ones(768), None, 0.0)
    exact = x.detach().double()
    torch.testing.assert_close(mean.double(), exact.mean(-1), rtol=1e-6, atol=0)
    torch.testing.assert_close(rstd.double(), 1 / exact.std(-1, correction=0), rtol=1e-5, atol=0)
    assert (y.double() - formula("layer_norm", [exact, 1.0], 0.0)[0]).abs().max() < 2e-3


@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT16])
@pytest.mark.parametrize("kind", KINDS)
def test_infinite_and_nan_rows_stay_alone(norms, kind, dtype):
    operands = drawn(kind, 5, 65, (dtype,) * 3)
    wanted = [y.detach() for y in called(norms, kind, operands)]
    with torch.no_grad():
        operands[0][1, 3], operands[0][3, 64] = math.inf, math.nan
        got = called(norms, kind, operands)
    for y, want in zip(got, wanted, strict=True):
        assert torch.equal(y[[0, 2, 4]], want[[0, 2, 4]])
        assert y[3].isnan()[64 if y is not got[0] else slice(None)].all()
        assert not y[1].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_sizes(norms, kind):
    for scale in (1e-20, 1e-4, 1e4, 1e18):
        operands = drawn(kind, 3, 65)
        with torch.no_grad():
            for x in operands[:2 if kind.startswith("add") else 1]:
                x *= scale
        y = called(norms, kind, operands)[0]
        want = formula(kind, [x.detach().double() for x in operands], 1e-5 if "layer" in kind else 1e-6)[0]
        torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)
    constant = torch.full((2, 65), 3.0)
    assert torch.equal(norms.layer_norm(constant, torch.ones(65)), torch.zeros(2, 65))


@pytest.mark.parametrize("rows, columns", [(700, 96), (2200, 600)])  # the second: columns are shared out, too
def test_number_of_threads_changes_no_bit(norms, threads, rows, columns):
    results = []
    for count in (1, 2, 3):
        threads(count)
        operands = drawn("add_layer_norm", rows, columns)
        outputs = called(norms, "add_layer_norm", operands, dropout=0.1, seed=torch.tensor(4))
        results.append([*outputs, *torch.autograd.grad(sum(y.square().sum() for y in outputs), operands)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


# ---- torch's own checks ----------------------------------------------------------------------------------------------


def test_opcheck(norms):
    ops, seed = torch.ops.aura, torch.tensor([7])
    for dtypes in (DTYPES[0], DTYPES[3]):
        x, residual, weight, bias = drawn("add_layer_norm", 3, 12, dtypes)
        for like_x in (False, True):
            library.opcheck(ops.add_layer_norm, (x, residual, weight, bias, 1e-5, 0.3, seed, like_x))
    library.opcheck(ops.add_layer_norm, (x, residual, weight, None, 1e-5, 0.0, None))
    library.opcheck(ops.post_layer_norm, (x, residual, weight, bias, 1e-5, 0.3, seed))
    library.opcheck(ops.post_layer_norm, (x, residual, weight, None, 1e-5, 0.0, None))
    library.opcheck(ops.add_rms_norm, (*drawn("add_rms_norm", 3, 12), 1e-5, 0.0, None))
    library.opcheck(ops.layer_norm, (*drawn("layer_norm", 3, 12), 1e-5))
    library.opcheck(ops.rms_norm, (*drawn("rms_norm", 3, 12), 1e-5))


def test_opcheck_of_the_backwards(norms):
    ops, check = torch.ops.aura, partial(library.opcheck, test_utils=("test_schema", "test_faketensor"))
    x, dy, past, weight = torch.randn(3, 12), torch.randn(3, 12), torch.randn(3, 12), torch.randn(12)
    _, mean, rstd = ops.layer_norm(x, weight, None, 1e-5)
    for has_bias in (False, True):
        check(ops.layer_norm_backward, (dy, x, weight, mean, rstd, has_bias))
    check(ops.rms_norm_backward, (dy, x, weight, rstd))
    for x_dtype, dropout, seed in ((FLOAT, 0.0, None), (BFLOAT16, 0.0, None), (FLOAT, 0.3, torch.tensor(1))):
        check(ops.add_layer_norm_backward, (dy, past, x, weight, mean, rstd, True, x_dtype, dropout, seed))
        check(ops.add_rms_norm_backward, (dy, None, x, weight, rstd, x_dtype, dropout, seed))
    check(ops.post_layer_norm_backward, (dy, dy.bfloat16(), x, weight, mean, rstd, False, BFLOAT16, 0.0, None))


def test_compiled(norms):
    def step(x, residual, weight, bias, seed):
        y, new = norms.add_layer_norm(x, residual, weight, bias, dropout=0.3, seed=seed)
        return norms.rms_norm(y, weight), norms.add_rms_norm(y, new, weight)[1]

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        operands = drawn("add_layer_norm", 3, 24)
        outputs = function(*operands, torch.tensor([9]))
        results.append([*outputs, *torch.autograd.grad([y.sum() for y in outputs], operands)])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=1e-6)


def test_autocast_changes_nothing(norms):
    x, residual, weight, bias = drawn("add_layer_norm", 3, 24, DTYPES[3])
    with torch.autocast("cpu", dtype=BFLOAT16):
        y, new = norms.add_layer_norm(x, residual, weight, bias)
        plain = norms.layer_norm(x, weight, bias)
    assert y.dtype == new.dtype == FLOAT and plain.dtype == BFLOAT16
    assert torch.equal(y, norms.add_layer_norm(x, residual, weight, bias)[0])


# ---- Errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case, message", [
    (lambda n: n.layer_norm(torch.ones(2, 3), torch.ones(4)), r"x must be \[\.\.\., 4\], is \[2, 3\]"),
    (lambda n: n.layer_norm(torch.tensor(1.0), torch.ones(1)), "x must be"),
    (lambda n: n.rms_norm(torch.ones(2, 0), torch.ones(0)), "C >= 1"),
    (lambda n: n.rms_norm(torch.ones(2, 3), torch.ones(1, 3)), "weight must be"),
    (lambda n: n.layer_norm(torch.ones(2, 3), torch.ones(3), torch.ones(2)), "bias must have"),
    (lambda n: n.layer_norm(torch.ones(2, 3), torch.ones(3), torch.ones(3).bfloat16()), "bias must have"),
    (lambda n: n.rms_norm(torch.ones(2, 3), torch.ones(3).bfloat16()), "no kernel for x"),
    (lambda n: n.rms_norm(torch.ones(2, 3).half(), torch.ones(3).half()), "no kernel for x"),
    (lambda n: n.add_rms_norm(torch.ones(2, 3), torch.ones(2, 3).bfloat16(), torch.ones(3)), "no kernel for x"),
    (lambda n: n.add_rms_norm(torch.ones(2, 3), torch.ones(3), torch.ones(3)), "residual"),
    (lambda n: n.add_rms_norm(torch.ones(2, 3), torch.ones(2, 3), torch.ones(3), dropout=0.1), "needs a seed"),
    (lambda n: n.add_rms_norm(torch.ones(2, 3), torch.ones(2, 3), torch.ones(3), dropout=1.0, seed=torch.tensor(1)),
     "dropout 1 is not"),
    (lambda n: n.post_layer_norm(torch.ones(2, 3), torch.ones(2, 3), torch.ones(3)), "x must be of 16 bits"),
    (lambda n: n.post_layer_norm(torch.ones(2, 3).bfloat16(), torch.ones(2, 3).double(), torch.ones(3).double()),
     "no kernel for x"),
    (lambda n: torch.ops.aura.post_layer_norm_backward(
        torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 3), torch.ones(3), torch.ones(2), torch.ones(2), True,
        BFLOAT16, 0.0, None), "the gradient of y_like_x"),
])
def test_errors(norms, case, message):
    with pytest.raises(RuntimeError, match=message):
        case(norms)


# ---- Instruction sets ------------------------------------------------------------------------------------------------

CORE = (test_formula_in_float64, test_dropout_against_the_formula, test_mask_is_the_generators,
        test_infinite_and_nan_rows_stay_alone, test_extreme_sizes)


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
def test_other_instruction_sets(isa):
    support.repeat_with(isa, CORE)
