"""The CUDA kernels on a card, by the tests of the CPU's: values, gradients, torch's own checks, streams, graphs."""

import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import library

from aura import compilation, ops
from tests import test_activation, test_attention, test_loss, test_norms, test_rotary
from tests.gpu import ENDS_HUNG_KERNELS, NEEDS_CARD

pytestmark = [NEEDS_CARD, ENDS_HUNG_KERNELS]
HALVES = (torch.bfloat16, torch.float16)
FLOAT = torch.float32
NORM_DTYPES = ((FLOAT,) * 3, *((half, *rest) for half in HALVES
                               for rest in ((half, half), (half, FLOAT), (FLOAT, FLOAT))))


@pytest.fixture(scope="module", autouse=True)
def fused(kernels):
    with ops.using("fused", "cuda"):
        yield


@pytest.fixture(autouse=True)
def half_precision(monkeypatch):
    for tests in (test_norms, test_attention):
        monkeypatch.setitem(tests.LIMITS, torch.float16, 2e-3)
    for tests in (test_activation, test_rotary):
        monkeypatch.setitem(tests.TOLERANCE, torch.float16, 2**-11)
    monkeypatch.setitem(test_loss.NORM_ERROR, torch.float16, 2**-9)


@pytest.fixture(params=["the card's own", "sm_80"])
def instructions(request, monkeypatch):
    """Attention with what the card alone has (wgmma and TMA on Hopper), and with what all cards have."""
    if request.param == "sm_80":
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("this card has no others")
        monkeypatch.setenv("AURA_CUDA_ISA", request.param)


def only(limits):
    """Those of the dtypes that the kernels take."""
    return {dtype: limits[dtype] for dtype in (FLOAT, *HALVES)}


def drawn(kind, rows, columns, dtypes):
    operands = test_norms.drawn(kind, rows, columns, dtypes)
    return [operand.detach().cuda().requires_grad_() for operand in operands]


def qkv(*shape, dtype=torch.bfloat16):
    return [x.cuda().requires_grad_() for x in test_attention.qkv(*shape, dtype)]


# ---- Values and gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", NORM_DTYPES, ids=lambda dtypes: "-".join(str(d)[6:] for d in dtypes))
@pytest.mark.parametrize("kind", test_norms.KINDS)
def test_norms_against_the_formula(kind, dtypes):
    from aura.fused import norms

    if not kind.startswith("add") and dtypes[0] != dtypes[1]:
        pytest.skip("there is no residual")
    for columns in (1, 7, 40, 65, 768, 1000, 1024, 4096, 5120, 16384, 16392):
        for rows in (0, 1, 37, 300):
            test_norms.compare(norms, kind, drawn(kind, rows, columns, dtypes))
        if kind.startswith("add"):
            keep = test_norms.multipliers(11, 0.3, 6, columns).cuda()
            for like_x in (False, True):
                test_norms.compare(norms, kind, drawn(kind, 6, columns, dtypes), keep=keep, dropout=0.3,
                                   seed=torch.tensor(11), like_x=like_x)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_norm_in_both_dtypes(dtype):
    """Gradients of one output alone come from another kernel, whose products may be contracted otherwise."""
    from aura.fused import norms

    def same(got, wanted):
        torch.testing.assert_close(got, wanted)
        return True

    for columns in (1, 7, 65, 768, 1000, 1024, 4096, 8200, 16392):
        for rows in (0, 1, 37, 300):
            test_norms.check_post_norm(norms, rows, columns, dtype, "cuda", same)
    test_norms.check_post_norm(norms, 300, 768, dtype, "cuda", same, dropout=0.3, seed=torch.tensor(11))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("width", [8, 32, 40, 64, 80, 96, 120, 128])
def test_attention_against_the_formula(instructions, width, causal, dtype):
    seed, bounds = torch.tensor([5]), torch.tensor([0, 3, 3, 60, 131, 132, 600])
    for options in (test_attention.NONE, (0.2, seed, None, None), (0.0, None, torch.tensor([300, 0]), None),
                    (0.2, seed, torch.tensor([17, 129]), None), (0.0, None, None, bounds), (0.2, seed, None, bounds)):
        for packed in (True, False):
            test_attention.agree(test_attention.qkv(2, 300, 3, width, dtype), causal, options, packed=packed,
                                 device="cuda")
    for rows in (1, 7, 64, 65, 127, 1000):
        test_attention.agree(test_attention.qkv(1, rows, 2, width, dtype), causal, device="cuda")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("width", [64, 128])
def test_more_attention_than_multiprocessors(instructions, width, causal):
    """Blocks of Hopper's kernels then do one piece of work after another, some of no tiles, some of many."""
    seed, lengths = torch.tensor([5]), torch.tensor([400, 0, 40, 128, 129, 256, 300, 399])
    bounds = torch.cat((torch.arange(0, 700, 50), torch.tensor([700, 701, 1000, 1200])))
    for shape, options in (((8, 400, 8), test_attention.NONE), ((8, 400, 8), (0.2, seed, lengths, None)),
                           ((1, 1200, 12), (0.0, None, None, bounds))):
        test_attention.agree(test_attention.qkv(*shape, width, torch.bfloat16), causal, options, device="cuda")


def test_more_keys_than_queries_and_fewer(instructions):
    for rows, keys in ((1, 100), (100, 1), (70, 144), (5, 0)):
        test_attention.agree(test_attention.qkv(2, rows, 3, 64, torch.bfloat16, keys), causal=False, device="cuda")


@pytest.mark.parametrize("width", [64, 128])
def test_what_lies_beyond_a_sequence_does_not_matter(instructions, width):
    """The tiles of Hopper are brought whole, with what lies beyond the keys of a batch entry or a document in them."""
    lengths, bounds = torch.tensor([20, 300], device="cuda"), torch.tensor([0, 20, 300, 600], device="cuda")
    for foul, names, options in ((slice(20, 300), "kv", {"lengths": lengths}),
                                 (slice(20, 300), "qkv", {"cu_seqlens": bounds})):
        clean = [x.detach() for x in qkv(2, 300, 3, width)]
        dirty = [x.clone() for x in clean]
        for name, x, worst in zip("qkv", dirty, (torch.nan, torch.inf, torch.nan), strict=True):
            if name in names:
                x.view(600, 3, width)[foul] = worst
        found = []
        for inputs in (dirty, clean):
            inputs = [x.requires_grad_() for x in inputs]
            out = ops.attention(*inputs, **options)
            found.append([out, *torch.autograd.grad(out[0, :20].sum() + out[1].sum(), inputs)])
        for got, want in zip(*found, strict=True):
            got, want = (x.reshape(600, -1) for x in (got, want))
            assert torch.equal(got[:20], want[:20]) and torch.equal(got[300:], want[300:])


def test_activations_against_the_formula():
    shapes = [*test_activation.SHAPES, (3000, 1000), (70_001, 264), (3, 2_000_003)]
    test_activation.check_values(only(test_activation.TOLERANCE), shapes, "cuda")


def test_rotary_against_complex_numbers():
    shapes = [*test_rotary.SHAPES, (4, 512, 12, 64), (2, 300, 7, 80), (1, 100, 3, 34), (70_000, 1, 1, 2)]
    test_rotary.check_values(only(test_rotary.TOLERANCE), shapes, "cuda")


def test_cross_entropy_against_torch():
    test_loss.check_rows(only(test_loss.NORM_ERROR), (*test_loss.WIDTHS, 8192, 50_257, 131_072), "cuda")


@pytest.mark.parametrize("dtype", (FLOAT, *HALVES), ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_the_head_with_its_loss(monkeypatch, autocast, dtype):
    """In several chunks, and under autocast with a weight in float32; as exact as torch's logits in float32."""
    test_loss.small_chunks(monkeypatch, rows=64, classes=5003, size=2)
    hidden, weight, targets = (t.detach().cuda() for t in test_loss.example(300, 5003, width=96))
    low = torch.bfloat16 if dtype == FLOAT else dtype
    inputs = [(t if autocast else t.to(dtype)).requires_grad_() for t in (hidden, weight)]
    exact = test_loss.with_gradients(test_loss.reference, *test_loss.doubles(*inputs), targets)
    with torch.autocast("cuda", dtype=low, enabled=autocast):
        value = ops.linear_cross_entropy(*inputs, targets)
    found = value.detach(), *torch.autograd.grad(value, inputs)
    limit = test_loss.NORM_ERROR[low if autocast else dtype]
    for value, wanted in zip(found, exact, strict=True):
        assert test_loss.error(value, wanted) < limit
    assert [g.dtype for g in found[1:]] == [x.dtype for x in inputs]


def test_a_target_that_is_no_class_fails_an_assertion():
    """In a process of its own, whose device is of no more use afterwards."""
    code = ("import torch; from aura import ops; ops.use('fused', 'cuda'); from aura.fused import loss; "
            "torch.ops.aura.cross_entropy_chunk_(torch.zeros(2, 11, device='cuda'), "
            "torch.tensor([3, 11], device='cuda'), -100, True); torch.cuda.synchronize()")
    ran = subprocess.run([sys.executable, "-c", code], cwd=compilation.ROOT, capture_output=True, text=True,
                         timeout=250)
    assert ran.returncode != 0 and "a target is neither a class nor ignored" in ran.stdout + ran.stderr
    assert "device-side assert triggered" in ran.stderr


# ---- What torch asks of an operator ----------------------------------------------------------------------------------


def test_opcheck():
    x, residual, weight, bias = drawn("add_layer_norm", 5, 40, (FLOAT,) * 3)
    mixed = drawn("add_layer_norm", 5, 40, (torch.bfloat16, FLOAT, FLOAT))
    seed, lengths = torch.tensor([3]), torch.tensor([7, 0], device="cuda")
    for name, arguments in (("layer_norm", (x, weight, bias, 1e-5)), ("rms_norm", (x, weight, 1e-5)),
                            ("add_layer_norm", (x, residual, weight, bias, 1e-5, 0.2, seed)),
                            ("add_rms_norm", (x, residual, weight, 1e-5, 0.0, None)),
                            ("post_layer_norm", (*mixed, 1e-5, 0.2, seed)),
                            ("total_norm", ([x.detach(), weight.detach()],)),
                            ("attention", (*qkv(2, 9, 2, 64), True, 0.1, 0.2, seed, lengths, None))):
        library.opcheck(getattr(torch.ops.aura, name).default, arguments)
    packed, cosine, sine = (t.cuda() for t in test_rotary.example((2, 5, 2, 12)))
    head = torch.randn(50, 40, device="cuda", requires_grad=True)
    targets = torch.tensor([3, test_loss.IGNORED, 0, 39, 7], device="cuda")
    for name, arguments in (("gelu_tanh", (x,)), ("swiglu", (x,)), ("sigmoid_gate", (x, residual)),
                            ("rotary", (packed.requires_grad_(), cosine, sine, False)),
                            ("cross_entropy_chunk_", (x.detach(), targets, test_loss.IGNORED, True)),
                            ("linear_cross_entropy", (x, head, targets, test_loss.IGNORED, True, True))):
        library.opcheck(getattr(torch.ops.aura, name).default, arguments)


def test_lengths_on_the_device_are_those_in_host_memory():
    inputs, lengths = qkv(2, 70, 2, 64), torch.tensor([70, 33])
    here, there = (ops.attention(*inputs, causal=False, lengths=each) for each in (lengths, lengths.cuda()))
    assert torch.equal(here, there)


def test_the_same_bits_every_time(instructions):
    inputs = qkv(2, 500, 3, 64)
    first, second = (torch.autograd.grad(ops.attention(*inputs).sum(), inputs) for _ in range(2))
    assert all(map(torch.equal, first, second))
    operands = drawn("layer_norm", 3000, 768, (torch.bfloat16,) * 3)
    first, second = (torch.autograd.grad(ops.layer_norm(*operands).float().square().sum(), operands) for _ in range(2))
    assert all(map(torch.equal, first, second))
    logits, targets = torch.randn(30, 50_257, device="cuda"), torch.arange(30, device="cuda")
    first, second = logits.clone(), logits.clone()
    losses = [test_loss.CHUNK(each, targets, test_loss.IGNORED, True) for each in (first, second)]
    assert torch.equal(*losses) and torch.equal(first, second)
    exact = F.cross_entropy(logits.double(), targets, reduction="none")
    torch.testing.assert_close(losses[0], exact, rtol=1e-6, atol=1e-6)


def test_another_stream_and_a_graph(instructions):
    """Work goes where torch's does, and can be recorded and played again with other values."""
    static = [x.detach() for x in qkv(1, 130, 2, 64)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        beside = ops.attention(*static)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(beside, ops.attention(*static))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = ops.attention(*static)
    for x in static:
        x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(recorded, ops.attention(*static))


def test_norms_in_a_graph():
    """Whose kernels are made ready while those before are at work, in a recording too."""
    def both(x, weight, bias, dy):
        y, mean, rstd = torch.ops.aura.layer_norm(x, weight, bias, 1e-5)
        return y, *torch.ops.aura.layer_norm_backward(dy, x, weight, mean, rstd, True)

    static = [t.detach() for t in drawn("layer_norm", 3000, 1024, (torch.bfloat16,) * 3)]
    static.append(torch.randn_like(static[0]))
    both(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = both(*static)
    for t in static:
        t.copy_(torch.randn_like(t))
    graph.replay()
    assert all(map(torch.equal, recorded, both(*static)))


def test_a_thread_that_has_not_used_the_card_yet(instructions):
    inputs, found = [x.detach() for x in qkv(1, 130, 2, 64)], []
    thread = threading.Thread(target=lambda: found.append(ops.attention(*inputs)))
    thread.start()
    thread.join(60)
    assert torch.equal(found[0], ops.attention(*inputs))


def test_what_the_kernels_do_not_take_goes_to_torch():
    for x in (*qkv(1, 30, 2, 44), *qkv(1, 30, 2, 64, dtype=FLOAT)):
        assert not ops._takes_heads(x, True, None, 1.0)
    q, k, v = qkv(1, 30, 2, 44)
    assert ops.attention(q, k, v).isfinite().all()
