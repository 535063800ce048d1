"""The last projection with its cross-entropy: against torch, in bounded memory, and wherever it has to work."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import library
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from aura import extension, products
from tests import support

if not extension.has_ops(extension.load()):
    pytest.skip(extension.status(), allow_module_level=True)

from aura.fused import loss as fused

IGNORED = -100
CHUNK = torch.ops.aura.cross_entropy_chunk_
WIDTHS = (1, 2, 15, 16, 64, 67, 1000, 40_001)
NORM_ERROR = {torch.float32: 2e-6, torch.bfloat16: 2**-6, torch.float64: 1e-14}


def example(rows, classes, width=24, dtype=torch.float32, seed=0):
    """(hidden, weight, targets), about a fifth of the targets ignored."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = (torch.randn(classes, width, generator=generator, dtype=torch.float64) / 3).to(dtype).requires_grad_()
    targets = torch.randint(0, classes, (rows,), generator=generator)
    return hidden, weight, targets.masked_fill(torch.rand(rows, generator=generator) < 0.2, IGNORED)


def linear_cross_entropy(hidden, weight, targets):
    return fused.linear_cross_entropy(hidden, weight, targets)[0]


def reference(hidden, weight, targets):
    """torch's version, in the dtype given; float16 and bfloat16 logits are widened to float32."""
    logits = F.linear(hidden, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


def with_gradients(function, hidden, weight, targets):
    value = function(hidden, weight, targets)
    return value.detach(), *torch.autograd.grad(value, (hidden, weight))


def doubles(*tensors):
    return [t.detach().double().requires_grad_() for t in tensors]


def error(value, exact):
    return float((value.double() - exact).norm() / exact.norm().clamp_min(1e-300))


def small_chunks(monkeypatch, rows, classes, size=4):
    monkeypatch.setattr(fused, "CHUNK_BYTES", rows * classes * size)
    monkeypatch.setattr(products, "WEIGHT_ROWS", 50)


def check_rows(limits=NORM_ERROR, widths=WIDTHS, device="cpu"):
    """The kernel alone: odd widths, strided rows, extremes. Also run by itself, for one instruction set."""
    generator = torch.Generator().manual_seed(0)
    for dtype, limit in limits.items():
        for classes in widths:
            wide = torch.randn(5, classes + 3, generator=generator, dtype=torch.float64).mul_(4).to(device, dtype)
            logits = wide[:, :classes]
            logits[1, ::2] = -math.inf
            logits[1, -1] = 0.0
            logits[2] += 1e4
            logits[3] *= 1e3
            logits[4] -= 1e4  # none is as large as what a part of a vector may be filled up with
            targets = torch.tensor([0, classes - 1, classes // 2, IGNORED, classes // 3], device=device)
            exact = logits.double().requires_grad_()
            expected = F.cross_entropy(exact, targets, reduction="none")
            expected.sum().backward()
            before = wide.clone()
            torch.testing.assert_close(CHUNK(logits, targets, IGNORED, False), expected.detach(), rtol=1e-6, atol=1e-6)
            assert torch.equal(wide, before)
            losses = CHUNK(logits, targets, IGNORED, True)
            torch.testing.assert_close(losses, expected.detach(), rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(logits.double(), exact.grad, rtol=limit * 4, atol=1e-7)
            assert torch.equal(wide[:, classes:], before[:, classes:])

        rows = torch.zeros(4, 37, dtype=dtype, device=device)
        rows[0, 5] = math.nan
        rows[1] = -math.inf
        rows[2, 3] = math.inf
        rows[3, 2] = -math.inf
        losses = CHUNK(rows, torch.full((4,), 2, device=device), IGNORED, True)
        assert torch.isnan(losses[:3]).all() and losses[3] == math.inf
        assert torch.isnan(rows[:3]).all() and not torch.isnan(rows[3]).any()
        nothing = torch.full((1, 3), math.nan, dtype=dtype, device=device)
        assert CHUNK(nothing, torch.tensor([IGNORED], device=device), IGNORED, True).item() == 0 and not nothing.any()


def test_rows():
    check_rows()


def test_rows_by_several_threads(threads):
    threads(3)
    check_rows(widths=(67,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("classes", [333, 336])
def test_columns_beyond_the_classes_change_nothing(monkeypatch, dtype, classes):
    """As on a GPU, where logits have a multiple of eight columns; gradients are of the weight's size all the same."""
    small_chunks(monkeypatch, rows=10, classes=classes, size=dtype.itemsize)
    hidden, weight, targets = example(25, classes, dtype=dtype)
    expected = with_gradients(linear_cross_entropy, hidden, weight, targets)
    monkeypatch.setitem(fused.COLUMNS, "cpu", 8)
    found = with_gradients(linear_cross_entropy, hidden, weight, targets)
    assert found[2].shape == weight.shape and found[2].is_contiguous()
    for value, wanted in zip(found, expected, strict=True):
        assert error(value, wanted.double()) < NORM_ERROR[dtype]


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
def test_instruction_sets(isa):
    support.check_on(isa, __name__, "check_rows")


@pytest.mark.parametrize("dtype", NORM_ERROR)
@pytest.mark.parametrize("rows", [1, 7, 8, 23])
def test_against_torch(monkeypatch, dtype, rows):
    small_chunks(monkeypatch, rows=8, classes=131, size=torch.finfo(dtype).bits // 8)
    hidden, weight, targets = example(rows, 131, dtype=dtype)
    targets[0] = 3
    found = with_gradients(linear_cross_entropy, hidden, weight, targets)
    expected = with_gradients(reference, *doubles(hidden, weight), targets)
    for value, exact in zip(found, expected, strict=True):
        assert error(value, exact) < NORM_ERROR[dtype]
    assert found[0].dtype == torch.promote_types(dtype, torch.float32)
    assert [g.dtype for g in found[1:]] == [dtype, dtype]


def test_gradcheck(monkeypatch):
    small_chunks(monkeypatch, rows=2, classes=9, size=8)
    hidden, weight, targets = example(5, 9, width=4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda h, w: 3 * linear_cross_entropy(h, w, targets), (hidden, weight))


@pytest.mark.parametrize("autocast, dtype, allowed", [(True, torch.float32, 1.05), (False, torch.bfloat16, 1.35)])
def test_bfloat16_as_exact_as_torch(monkeypatch, autocast, dtype, allowed):
    """The weight's gradient is added up in float32, whatever its own dtype; into bfloat16 it is then rounded again."""
    small_chunks(monkeypatch, rows=16, classes=301, size=2)
    hidden, weight, targets = example(100, 301, dtype=dtype)
    exact = with_gradients(reference, *doubles(hidden, weight), targets)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        ours, theirs = linear_cross_entropy(hidden, weight, targets), reference(hidden, weight, targets)
    torch.testing.assert_close(ours, theirs)
    ours, theirs = (torch.autograd.grad(value, (hidden, weight)) for value in (ours, theirs))
    for mine, other, true in zip(ours, theirs, exact[1:], strict=True):
        assert mine.dtype == dtype
        assert error(mine, true) < allowed * error(other, true) < 0.02


def test_autocast_to_float16_keeps_products_in_float32():
    hidden, weight, targets = example(9, 31)
    expected = linear_cross_entropy(hidden, weight, targets)
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(linear_cross_entropy(hidden, weight, targets), expected)


def test_the_logits_never_exist_as_a_whole(monkeypatch):
    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aura.linear_cross_entropy.default:
                with self:  # a mode sees an operator, not what it is made of
                    return fused._in_chunks(*args)
            result = func(*args, **(kwargs or {}))
            sizes = [t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
            self.elements = max(self.elements, *sizes, 0)
            return result

    rows, classes, chunk = 640, 200, 16
    small_chunks(monkeypatch, rows=chunk, classes=classes)
    hidden, weight, targets = example(rows, classes, width=5)
    for with_gradient in (True, False):
        with torch.set_grad_enabled(with_gradient), Largest() as seen:
            value = linear_cross_entropy(hidden, weight, targets)
            if with_gradient:
                value.backward()
        assert chunk * classes <= seen.elements == max(chunk * classes, hidden.numel())
    with Largest() as seen:
        reference(hidden, weight, targets)
    assert seen.elements == rows * classes


def test_only_what_is_asked_for(monkeypatch):
    calls = []

    def operator(*args):
        calls.append((args, torch.ops.aura.linear_cross_entropy(*args)))
        return calls[-1][1]

    monkeypatch.setattr(fused, "_linear_cross_entropy", operator)
    hidden, weight, targets = example(6, 11)
    expected = with_gradients(reference, hidden, weight, targets)
    for wanted in ((True, False), (False, True), (False, False)):
        inputs = (hidden.detach().requires_grad_(wanted[0]), weight.detach().requires_grad_(wanted[1]))
        value = linear_cross_entropy(*inputs, targets)
        torch.testing.assert_close(value, expected[0])
        assert [t.numel() > 0 for t in calls[-1][1][1:3]] == list(wanted)
        for found, right, asked in zip(calls[-1][1][1:3], expected[1:], wanted, strict=True):
            torch.testing.assert_close(found, right if asked else right.new_empty(0))
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(hidden, weight, targets), expected[0])
    assert calls[-1][0][-2:] == (False, False)


def test_nothing_to_count():
    for rows in (0, 5):
        hidden, weight, targets = example(rows, 11)
        targets.fill_(IGNORED)
        value, dhidden, dweight = with_gradients(linear_cross_entropy, hidden, weight, targets)
        assert value.item() == 0 and dhidden.shape == hidden.shape and dweight.shape == weight.shape
        assert not dhidden.any() and not dweight.any()


def test_backward_twice_and_a_tied_weight():
    """What backward returns is shared with nobody: changing it changes neither a second backward nor .grad."""
    hidden, weight, targets = example(9, 11)
    value = linear_cross_entropy(hidden, weight, targets) * 0.25
    value.backward(retain_graph=True)
    once = weight.grad.clone()
    torch.testing.assert_close(once, torch.autograd.grad(reference(hidden, weight, targets), weight)[0] / 4)
    weight.grad.mul_(2)
    value.backward()
    torch.testing.assert_close(weight.grad, 3 * once)
    with pytest.raises(RuntimeError, match="second time"):
        value.backward()

    results = []
    for function in (linear_cross_entropy, reference):
        weight.grad = None
        function(F.embedding(targets.clamp(0), weight) + hidden, weight, targets).backward()
        results.append(weight.grad)
    torch.testing.assert_close(*results)


def test_no_second_derivatives():
    hidden, weight, targets = example(3, 11)
    value = linear_cross_entropy(hidden, weight, targets)
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(value, hidden, create_graph=True)


def test_opcheck():
    for dtype in NORM_ERROR:
        hidden, weight, targets = example(5, 11, dtype=dtype)
        for gradient in (True, False):
            library.opcheck(CHUNK.default, (torch.randn(5, 11).to(dtype), targets, IGNORED, gradient))
    hidden, weight, targets = example(5, 11)
    for wanted in ((True, True), (False, True), (True, False)):
        inputs = (hidden.detach().requires_grad_(wanted[0]), weight.detach().requires_grad_(wanted[1]))
        library.opcheck(torch.ops.aura.linear_cross_entropy.default, (*inputs, targets, IGNORED, *wanted))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled(precision):
    hidden, weight, targets = example(7, 13)

    def step(hidden, weight, targets):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            return linear_cross_entropy(hidden * 2, weight, targets) / 7

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for found, expected in zip(with_gradients(compiled, hidden, weight, targets),
                               with_gradients(step, hidden, weight, targets), strict=True):
        torch.testing.assert_close(found, expected)
    with torch.no_grad():
        torch.testing.assert_close(compiled(hidden, weight, targets), step(hidden, weight, targets))


def test_another_number_of_rows_is_not_compiled_anew():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    weight = example(1, 13)[1]
    step = torch.compile(lambda hidden, targets: linear_cross_entropy(hidden, weight, targets), fullgraph=True,
                         dynamic=True, backend=backend)
    for rows in (5, 8, 21):
        hidden, _, targets = example(rows, 13)
        torch.testing.assert_close(step(hidden, targets), linear_cross_entropy(hidden, weight, targets))
    assert len(graphs) == 1


def test_distributed_data_parallel(tmp_path):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding.from_pretrained(torch.ones(11, 6), freeze=False)

        def forward(self, tokens, targets):
            return linear_cross_entropy(self.embedding(tokens), self.embedding.weight, targets)

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = Tied()
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        tokens = torch.arange(11)
        for _ in range(2):
            model.zero_grad()
            wrapped(tokens, tokens.flip(0)).backward()
        found = model.embedding.weight.grad
        del wrapped  # before its group, or who frees the group may wait for ever (see ddp.Parallel)
    finally:
        torch.distributed.destroy_process_group()
    weight = torch.ones(11, 6, requires_grad=True)
    reference(F.embedding(tokens, weight), weight, tokens.flip(0)).backward()
    torch.testing.assert_close(found, weight.grad)


def test_refusals():
    hidden, weight, targets = example(4, 11)
    for bad in (11, -1, -101, 2**40, -2**62):
        for last in (0, 3):
            wrong = torch.zeros(4, dtype=torch.int64)
            wrong[last] = bad
            with pytest.raises(IndexError, match=str(bad)):
                linear_cross_entropy(hidden, weight, wrong)
    for arguments in ((hidden, weight, targets[:3]), (hidden, weight, targets.int()), (hidden, weight[:, :5], targets),
                      (hidden[0], weight, targets), (hidden.half(), weight, targets),
                      (hidden, weight.bfloat16(), targets), (hidden.double(), weight, targets)):
        with pytest.raises(ValueError, match="targets|hidden|products"):
            linear_cross_entropy(*arguments)
    with pytest.raises(RuntimeError, match="contiguous rows"):
        CHUNK(torch.zeros(11, 4).t(), targets, IGNORED, True)
    with pytest.raises(RuntimeError, match="targets must be"):
        CHUNK(torch.zeros(4, 11), targets[:3], IGNORED, True)
