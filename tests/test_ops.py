"""The fronts of aura.ops: the same result whoever carries an operation out, and what is said when nobody can."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from aura import extension, ops, selfcheck
from aura.errors import UserError
from tests import support

CPU = torch.device("cpu")
ROWS, WIDTH, CLASSES = 33, 72, 50
TARGETS = torch.arange(ROWS) * 7 % CLASSES
TARGETS[4] = -1
QKV = ((2, 60, 3, 2, 24),)
SEPARATE = ((2, 60, 2, 24),) * 3
LENGTHS = torch.tensor([0, 37])
# With an empty document, and one that runs from the first batch entry into the second.
DOCUMENTS = torch.tensor([0, 7, 7, 80, 81, 120])
DOCUMENTS_OF_ROWS = torch.tensor([0, 7, 7, 60, 81, 120])
TURNS = torch.linspace(0, 3, 15).view(5, 3).cos(), torch.linspace(0, 3, 15).view(5, 3).sin()

# name: (function of tensors, their shapes)
CASES = {
    "attention": (ops.attention, SEPARATE),
    "attention full": (partial(ops.attention, causal=False), SEPARATE),
    "attention scale": (partial(ops.attention, scale=0.7), SEPARATE),
    "attention other keys": (partial(ops.attention, causal=False), ((2, 5, 2, 24), (2, 60, 2, 24), (2, 60, 2, 24))),
    "attention other keys, lengths": (partial(ops.attention, causal=False, lengths=LENGTHS),
                                      ((2, 5, 2, 24), (2, 60, 2, 24), (2, 60, 2, 24))),
    "attention lengths": (partial(ops.attention, lengths=LENGTHS), SEPARATE),
    "attention lengths, full": (partial(ops.attention, causal=False, lengths=LENGTHS.int()), SEPARATE),
    "attention documents": (partial(ops.attention, cu_seqlens=DOCUMENTS), SEPARATE),
    "attention documents, full": (partial(ops.attention, causal=False, cu_seqlens=DOCUMENTS.int()), SEPARATE),
    "packed": (ops.attention_packed, QKV),
    "packed full": (partial(ops.attention_packed, causal=False, scale=0.7), QKV),
    "packed lengths": (partial(ops.attention_packed, lengths=LENGTHS), QKV),
    "packed documents": (partial(ops.attention_packed, cu_seqlens=DOCUMENTS), QKV),
    "packed documents, rows apart": (partial(ops.attention_packed, cu_seqlens=DOCUMENTS_OF_ROWS, rows_apart=True),
                                     QKV),
    "layer_norm": (ops.layer_norm, ((2, 5, WIDTH), (WIDTH,), (WIDTH,))),
    "layer_norm eps": (partial(ops.layer_norm, eps=0.5), ((5, WIDTH), (WIDTH,), (WIDTH,))),
    "layer_norm without bias": (lambda x, weight: ops.layer_norm(x, weight, None), ((5, WIDTH), (WIDTH,))),
    "rms_norm": (ops.rms_norm, ((2, 5, WIDTH), (WIDTH,))),
    "rms_norm eps": (partial(ops.rms_norm, eps=0.5), ((5, WIDTH), (WIDTH,))),
    "add_layer_norm": (lambda *x: torch.cat(ops.add_layer_norm(*x)), ((5, WIDTH), (5, WIDTH), (WIDTH,), (WIDTH,))),
    "post_layer_norm": (selfcheck.post_layer_norm, ((5, WIDTH), (5, WIDTH), (WIDTH,), (WIDTH,))),
    "add_layer_norm eps": (lambda *x: torch.cat(ops.add_layer_norm(*x, eps=0.5)),
                           ((5, WIDTH), (5, WIDTH), (WIDTH,), (WIDTH,))),
    "add_rms_norm": (lambda *x: torch.cat(ops.add_rms_norm(*x)), ((5, WIDTH), (5, WIDTH), (WIDTH,))),
    "add_rms_norm eps": (lambda *x: torch.cat(ops.add_rms_norm(*x, eps=0.5)), ((5, WIDTH), (5, WIDTH), (WIDTH,))),
    "gelu_tanh": (ops.gelu_tanh, ((3, 5, WIDTH),)),
    "swiglu": (ops.swiglu, ((3, 5, WIDTH),)),
    "sigmoid_gate": (ops.sigmoid_gate, ((3, 5, WIDTH), (3, 5, WIDTH))),
    "rotary_packed": (lambda qkv: ops.rotary_packed(qkv, *TURNS), ((2, 5, 3, 2, 6),)),
    "linear_cross_entropy": (lambda h, w: ops.linear_cross_entropy(h, w, TARGETS.clamp(min=0)),
                             ((ROWS, WIDTH), (CLASSES, WIDTH))),
    "linear_cross_entropy ignored": (lambda h, w: ops.linear_cross_entropy(h, w, TARGETS, ignore_index=-1),
                                     ((ROWS, WIDTH), (CLASSES, WIDTH))),
}


@pytest.fixture(autouse=True)
def _restored():
    """The choice is a module's variable: what one test sets must not reach the next."""
    with ops.using("reference"):
        yield


@pytest.fixture
def fused():
    if not extension.has_ops(extension.load()):
        pytest.skip(extension.status())


def drawn(shapes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def result_and_gradients(function, inputs):
    leaves = [x.detach().requires_grad_() for x in inputs]
    result = function(*leaves)
    direction = torch.randn(result.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return result.dtype, [result.detach(), *torch.autograd.grad(result, leaves, direction.to(result.dtype))]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype,limit", [(torch.float32, 1e-5), (torch.float64, 1e-12), (torch.bfloat16, 3e-2)],
                         ids=["float32", "float64", "bfloat16"])
def test_all_agree(fused, name, dtype, limit):
    function, shapes = CASES[name]
    inputs = drawn(shapes, dtype)
    _, exact = result_and_gradients(function, [x.double() for x in inputs])
    kinds = set()
    for choice in ("fused", "sdpa", "reference"):
        with ops.using(choice):
            kind, got = result_and_gradients(function, inputs)
        kinds.add(kind)
        for part, want in zip(got, exact, strict=True):
            assert part.shape == want.shape
            assert float((part.double() - want).norm()) <= limit * float(want.norm()), choice
    assert len(kinds) == 1  # and one dtype


TURNS_OF_EIGHT = torch.linspace(0, 3, 4)[None].cos(), torch.linspace(0, 3, 4)[None].sin()
FAR = {  # where rows may be apart, how many elements one has
    "attention": (lambda x: ops.attention(*[x.view(2, 1, 3, 1, 8)[:, :, i] for i in range(3)]), 24),
    "packed": (lambda x: ops.attention_packed(x.view(2, 1, 3, 1, 8)), 24),
    "rotary_packed": (lambda x: ops.rotary_packed(x.view(2, 1, 3, 1, 8), *TURNS_OF_EIGHT), 24),
    "sigmoid_gate": (lambda x: ops.sigmoid_gate(x[:, :12], x[:, 12:]), 24),
    "cross_entropy_chunk_": (lambda x: torch.ops.aura.cross_entropy_chunk_(x, torch.tensor([3, 5]), -1, True), 24),
}


@pytest.mark.parametrize("name", FAR)
def test_rows_further_apart_than_31_bits_count(fused, tmp_path, name):
    function, width = FAR[name]
    apart = 2**31 + 8
    memory = torch.from_file(str(tmp_path / "sparse"), shared=True, size=apart + width, dtype=torch.bfloat16)
    far = memory.as_strided((2, width), (apart, 1))  # takes no room on the disk, nor in memory, but for two pages
    near, = drawn(((2, width),), torch.bfloat16)
    far.copy_(near)
    with ops.using("fused"):
        assert torch.equal(function(far), function(near)) and torch.equal(far, near)


@pytest.mark.parametrize("choice", ["fused", "sdpa", "reference"])
def test_rows_that_see_nothing_are_zero(fused, choice):
    inputs = [x.requires_grad_() for x in drawn(SEPARATE, torch.float32)]
    for causal in (True, False):
        with ops.using(choice):
            out = ops.attention(*inputs, causal=causal, lengths=LENGTHS)
        assert not out[0].any()
        for gradient in torch.autograd.grad(out.square().sum(), inputs):
            assert not gradient[0].any() and gradient[1].isfinite().all()


DROPOUTS = {
    "attention": (partial(ops.attention, dropout=0.4), SEPARATE),
    "attention documents": (partial(ops.attention, cu_seqlens=DOCUMENTS, dropout=0.4), SEPARATE),
    "attention_packed": (partial(ops.attention_packed, dropout=0.4), QKV),
    "add_layer_norm": (lambda *x: torch.cat(ops.add_layer_norm(*x, dropout=0.4)), CASES["add_layer_norm"][1]),
    "add_rms_norm": (lambda *x: torch.cat(ops.add_rms_norm(*x, dropout=0.4)), CASES["add_rms_norm"][1]),
}


@pytest.mark.parametrize("choice", ["fused", "sdpa", "reference"])
@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout_follows_the_generator_of_torch(fused, name, choice):
    """The same random state gives the same mask, and every call another."""
    function, shapes = DROPOUTS[name]
    inputs = drawn(shapes, torch.float32)
    with ops.using(choice), torch.random.fork_rng():
        torch.manual_seed(1)
        first, second = function(*inputs), function(*inputs)
        torch.manual_seed(1)
        again = function(*inputs)
        plain = CASES[name if name in CASES else "packed"][0](*inputs)
    assert torch.equal(first, again) and not torch.equal(first, second) and not torch.equal(first, plain)


@pytest.mark.parametrize("choice", ["fused", "sdpa", "reference"])
def test_without_dropout_no_random_number_is_drawn(fused, choice):
    inputs = drawn(QKV, torch.float32)
    before = torch.get_rng_state()
    with ops.using(choice):
        ops.attention_packed(*inputs)
        ops.add_rms_norm(*drawn(CASES["add_rms_norm"][1], torch.float32))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", CASES)
def test_second_derivatives_are_refused_not_wrong(fused, name):
    function, shapes = CASES[name]
    inputs = [x.requires_grad_() for x in drawn(shapes)]
    with ops.using("fused"), pytest.raises(RuntimeError):
        gradients = torch.autograd.grad(function(*inputs).square().sum(), inputs, create_graph=True)
        torch.autograd.grad(sum(x.square().sum() for x in gradients), inputs)


class Noted(TorchDispatchMode):
    """What torch carries out, by name."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CASES)
def test_backward_makes_no_zeros_for_what_has_no_gradient(fused, name):
    """Statistics of rows have no gradient: on a GPU, zeros for each would be a kernel as long as a short norm's."""
    function, shapes = CASES[name]
    with ops.using("fused"):
        out = function(*(x.requires_grad_() for x in drawn(shapes)))
        with Noted() as noted:
            out.backward(torch.ones_like(out))
    assert noted.names and not [name for name in noted.names if "zeros" in name]


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_leaves_nothing_behind(fused, name):
    """Once it has all that it needs, it ends the second forward by an exception, while tensors are being saved."""
    function, shapes = CASES[name]
    inputs = [x.requires_grad_() for x in drawn(shapes)]
    found = torch.zeros(())

    def step():
        out = checkpoint(function, *inputs, use_reentrant=False)
        found.copy_(torch.autograd.grad(out, inputs, torch.ones_like(out))[0].sum())

    with ops.using("fused"):
        step()
        assert sum(support.allocations(step)) == 0
        assert torch.equal(found, torch.autograd.grad(function(*inputs).sum(), inputs)[0].sum().float())


@pytest.mark.parametrize(("function", "name"), [
    (ops.attention, "attention"), (ops.attention_packed, "packed"),
    (lambda *x: ops.add_layer_norm(*x)[1], "add_layer_norm"), (lambda *x: ops.add_rms_norm(*x)[1], "add_rms_norm")])
def test_an_output_that_is_written_over_before_backward_is_refused(fused, function, name):
    with ops.using("fused"):
        out = function(*(x.requires_grad_() for x in drawn(CASES[name][1])))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.mul_(2).sum().backward()


@pytest.mark.parametrize("name", CASES)
def test_second_derivatives_by_a_constant_gradient_are_refused_too(fused, name):
    """torch's once_differentiable lets these pass for zeros."""
    function, shapes = CASES[name]
    inputs = [x.requires_grad_() for x in drawn(shapes)]
    with ops.using("fused"), pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(function(*inputs).sum(), inputs, create_graph=True)


@pytest.mark.parametrize("name", CASES)
def test_forward_derivatives_are_torchs(fused, name):
    """Ours have none, and torch takes those of an operator that says nothing for zeros."""
    function, shapes = CASES[name]
    inputs = tuple(drawn(shapes))
    directions = tuple(torch.ones_like(x) for x in inputs)
    with ops.using("fused"):
        try:
            _, along = torch.func.jvp(lambda *x: function(*x).sum(), inputs, directions)
        except NotImplementedError as refused:  # its attention on a CPU
            assert "forward AD" in str(refused)
            return
        gradients = torch.autograd.grad(function(*(x.requires_grad_() for x in inputs)).sum(), inputs)
    assert abs(float(along - sum(x.sum() for x in gradients))) < 1e-6 and along


@pytest.mark.parametrize("name", CASES)
def test_transforms_of_functions_are_torchs(fused, name):
    function, shapes = CASES[name]
    inputs = tuple(drawn(shapes))

    def total(*x):
        return function(*x).sum()

    every = tuple(range(len(inputs)))
    with ops.using("fused"):
        found = torch.func.grad(total, every)(*inputs)
    with ops.using("sdpa"):
        wanted = torch.func.grad(total, every)(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_angles_that_are_learnt_have_gradients(fused):
    found = {}
    for choice in ("fused", "sdpa"):
        (qkv,), angles = drawn([(2, 3, 3, 2, 4)], torch.float32), torch.linspace(0, 1, 6).view(3, 2).requires_grad_()
        with ops.using(choice):
            ops.rotary_packed(qkv, angles.cos(), angles.sin())[..., 0].sum().backward()
        found[choice] = angles.grad
    assert torch.equal(*found.values()) and found["sdpa"].abs().sum() > 0


@pytest.mark.parametrize("x, residual, weight", [
    (torch.float32, torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32, torch.bfloat16),
    (torch.float32, torch.float64, torch.float32), (torch.float64, torch.float64, torch.float32)])
def test_norms_of_dtypes_that_the_kernels_do_not_take_together_go_to_torch(fused, x, residual, weight):
    found = {}
    for choice in ("fused", "sdpa"):
        stream, branch = drawn([(2, 8), (2, 8)], torch.float64)
        with ops.using(choice):
            found[choice] = [ops.rms_norm(branch.to(x), torch.ones(8, dtype=weight)),
                             *ops.add_rms_norm(branch.to(x), stream.to(residual), torch.ones(8, dtype=weight))]
    for ours, theirs in zip(*found.values(), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def test_the_norm_of_a_post_norm_model_has_its_eps_in_mixed_precision(fused):
    x, *wide = drawn(CASES["post_layer_norm"][1], torch.float32)
    with ops.using("fused"):
        found = ops.post_layer_norm(x.bfloat16(), *wide, eps=0.5)[0]
    torch.testing.assert_close(found, F.layer_norm(x.bfloat16() + wide[0], (WIDTH,), *wide[1:], eps=0.5))


def test_what_the_kernels_do_not_take_goes_to_torch(fused):
    """float16: no kernel of ours."""
    packed = drawn(QKV, torch.float16)[0]
    with ops.using("fused"):
        out = ops.attention_packed(packed)
        assert ops.gelu_tanh(packed).dtype == torch.float16
    with ops.using("sdpa"):
        assert torch.equal(out, ops.attention_packed(packed))


def test_other_devices_go_to_torch(fused):
    packed = torch.empty(2, 60, 3, 2, 24, device="meta")
    with ops.using("fused"):
        assert ops.attention_packed(packed).shape == (2, 60, 2, 24)
        assert "meta" in ops.describe(torch.device("meta"))


# ---- The choice ------------------------------------------------------------------------------------------------------


def test_heads_too_wide_for_the_kernels_go_to_torch(fused):
    inputs = torch.randn(1, 9, 3, 2, 300, generator=torch.Generator().manual_seed(0))
    with ops.using("fused"):
        found = ops.attention_packed(inputs)
    with ops.using("reference"):
        torch.testing.assert_close(found, ops.attention_packed(inputs))


def test_an_unknown_choice_is_refused():
    with pytest.raises(UserError, match="'flash'.*auto, fused, sdpa, reference"):
        ops.use("flash")


def test_using_restores(fused):
    ops.use("reference")
    with ops.using("fused"):
        assert "núcleos propios" in ops.describe(CPU)
        with ops.using("sdpa"):
            assert "scaled_dot_product_attention" in ops.describe(CPU)
        assert "núcleos propios" in ops.describe(CPU)
    assert "fórmula" in ops.describe(CPU)
    with pytest.raises(ZeroDivisionError), ops.using("sdpa"):
        math.log(1 / 0)
    assert "fórmula" in ops.describe(CPU)


def test_auto_takes_the_kernels_and_says_which(fused):
    with ops.using("auto"):
        assert f"núcleos propios ({extension.load().cpu_isa()})" in ops.describe(CPU)


def python(code, tmp_path, **environment):
    return support.run(["-c", code], tmp_path, **environment)


NO_EXTENSION = """
import torch
import torch.nn.functional as F
from aura import ops
from aura.errors import UserError
try:
    ops.use("fused")
except UserError as problem:
    print("problem:", problem)
ops.use("auto")
print(ops.describe(torch.device("cpu")))
print(tuple(ops.attention_packed(torch.zeros(1, 5, 3, 2, 8)).shape))
"""


def test_without_extension(tmp_path):
    code, output = python(NO_EXTENSION, tmp_path, AURA_EXTENSION="off")
    problem, described, shape = output.splitlines()
    assert code == 0 and shape == "(1, 5, 2, 8)"
    assert problem.startswith("problem: --attention fused: ") and "AURA_EXTENSION=off" in problem
    assert "scaled_dot_product_attention" in described and "núcleos propios" not in described


def test_without_compiler(tmp_path):
    extension.load()
    if "compilada al instalar" in extension.status():
        pytest.skip("needs no compiler")
    code, output = python(NO_EXTENSION, tmp_path, AURA_BUILD_DIR=tmp_path / "builds", CXX="no-such-compiler")
    warning, problem, described, _ = output.splitlines()
    assert code == 0 and warning.startswith("Aviso: ") and "no-such-compiler" in problem
    assert "scaled_dot_product_attention" in described


@pytest.mark.parametrize("choice, device, precision, width, buildable, expected", [
    ("auto", "cpu", "fp32", 64, True, True), ("auto", "cpu", "fp32", 64, False, False),
    ("fused", "cpu", "bf16", 64, False, True), ("auto", "cpu", "fp16", 64, True, False),
    ("auto", "cpu", "fp32", 257, True, False), ("sdpa", "cpu", "fp32", 64, True, False),
    ("auto", "cuda", "bf16", 64, True, False), ("fused", "cuda", "bf16", 64, True, True)])
def test_what_will_most_probably_have_our_kernels(monkeypatch, choice, device, precision, width, buildable, expected):
    monkeypatch.setenv("AURA_EXTENSION", "on" if buildable else "off")
    assert ops.expects_kernels(choice, device, precision, width) is expected


def test_importing_builds_and_loads_nothing(tmp_path):
    builds = tmp_path / "builds"
    code, output = python("import sys, aura.ops, aura.tokens, aura.models.gpt; print('aura._C' in sys.modules)",
                          tmp_path, AURA_BUILD_DIR=builds)
    assert (code, output) == (0, "False\n")
    assert not builds.exists()


def test_an_instruction_set_there_is_not(fused, tmp_path):
    code, output = support.run(["-m", "aura.ops"], tmp_path, AURA_CPU_ISA="sse9")
    assert code != 0 and len(output.splitlines()) == 1
    assert output.startswith("error: AURA_CPU_ISA='sse9': este procesador admite ") and "portable" in output


OPERATIONS = ("attention", "layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm", "gelu_tanh", "swiglu",
              "sigmoid_gate", "rotary", "linear_cross_entropy")


@pytest.mark.parametrize("environment", [{}, {"AURA_EXTENSION": "off"}], ids=["kernels", "torch"])
def test_the_report(tmp_path, environment):
    """python -m aura.ops says what is used, checks every operation, and ends well."""
    code, output = support.run(["-m", "aura.ops"], tmp_path, **environment)
    assert code == 0, output
    lines = output.splitlines()
    for name in OPERATIONS:
        assert any(line.startswith(name) for line in lines), name
    assert "Todo correcto" in lines[-1] and "MAL" not in output
    if environment:
        assert "AURA_EXTENSION=off" in output and "scaled_dot_product_attention" in output


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("name, function", [
    ("result", lambda x: x + math.nan), ("gradient", lambda x: x + (x - x).sqrt()), ("both", lambda x: x * math.nan)])
def test_the_report_lets_no_nan_pass(capsys, name, function, wrong):
    cases = [(name, function if wrong else torch.sin, [(3,)])]
    assert selfcheck.check(cases, {torch.float32: 1e-5}, "cpu") is wrong
    assert ("MAL" in capsys.readouterr().out) == wrong


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_torchs_way_in_chunks_is_the_whole(rows):
    torch.manual_seed(0)
    hidden, weight = torch.randn(20, 8, dtype=torch.float64), torch.randn(11, 8, dtype=torch.float64)
    targets = torch.randint(0, 11, (20,))
    targets[3] = -1
    results = []
    for losses in (lambda h, w: ops.losses_in_chunks(h, w, targets, -1, rows), lambda h, w: ops._plain_losses(
            h, w, targets, -1)):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        values = losses(*leaves)
        results.append((values, *torch.autograd.grad(values.sum(), leaves)))
    for chunked, whole in zip(*results, strict=True):
        torch.testing.assert_close(chunked, whole)


@pytest.mark.parametrize("classes", [16, 11])
def test_rows_of_logits_that_begin_on_16_bytes_are_the_same_logits(monkeypatch, classes):
    """As under autocast on a GPU: the zeros behind the last class are in no loss and no gradient."""
    torch.manual_seed(0)
    leaves = torch.randn(20, 8).requires_grad_(), torch.randn(classes, 8).requires_grad_()
    targets, widths, found = torch.randint(0, classes, (20,)), [], []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda hidden, weight: widths.append(len(weight)) or linear(hidden, weight))
    for devices in ((), ("cpu",)):
        monkeypatch.setattr(ops, "ALIGNED_DEVICES", devices)
        with torch.autocast("cpu", torch.bfloat16):
            losses = ops.losses_in_chunks(*leaves, targets, -100, 7)
        found.append((losses, *torch.autograd.grad(losses.sum(), leaves)))
    for plain, padded in zip(*found, strict=True):
        assert (padded - plain).norm() < 2**-8 * plain.norm()  # gradients of chunks are rounded to bfloat16
    assert set(widths[:6]) == {classes} and set(widths[6:]) == {16}


@pytest.mark.parametrize("choice", ["auto", "sdpa"])
def test_the_losses_of_the_rows(choice):
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(20, 8), torch.randn(11, 8), torch.randint(0, 11, (20,))
    targets[3] = -100
    with ops.using(choice):
        total, rows = ops.linear_cross_entropy_rows(hidden.requires_grad_(), weight, targets)
    torch.testing.assert_close(rows, F.cross_entropy(hidden.detach() @ weight.t(), targets, reduction="none"))
    torch.testing.assert_close(rows.sum(), total.detach())
    assert total.requires_grad and not rows.requires_grad


def test_a_gpu_has_so_many_rows_of_logits_at_a_time():
    rows = ops.loss_rows(32_000, "cuda")
    assert 12 * 32_000 * rows <= ops.LOGITS_BYTES < 12 * 32_000 * (rows + 1)
    assert ops.loss_rows(32_000, "cpu") > 10**12


@pytest.mark.parametrize("name", [name for name, (_, shapes) in CASES.items() if len(shapes) > 1])
def test_a_tensor_without_data_beside_others_is_refused(fused, name):
    """It is part of a model that has not been given its weights; the result would be uninitialised memory."""
    function, shapes = CASES[name]
    for without in range(1, len(shapes)):
        inputs = [torch.randn(shape, device="meta" if i == without else "cpu") for i, shape in enumerate(shapes)]
        with ops.using("fused"), pytest.raises(RuntimeError, match="meta"):
            function(*inputs)


@pytest.mark.parametrize("name", ["reference", "sdpa", "auto"])
@pytest.mark.parametrize("batch, length", [(0, 4), (2, 0)])
def test_documents_of_no_tokens_have_an_empty_output(name, batch, length):
    with ops.using(name):
        found = ops.attention_packed(torch.zeros(batch, length, 3, 2, 8), cu_seqlens=torch.tensor([0, 0]))
    assert found.shape == (batch, length, 2, 8)
