"""The CUDA kernels on the processor, by the tests of the CPU's: csrc/cuda/*.cu compiled against tests/cuda_on_cpu,
whose threads are fibers. What only a card can show is in tests/gpu."""

import ctypes
import subprocess

import pytest
import torch
from torch import library as torch_library

from aura import compilation, cuda_extension, extension
from tests import (
    test_activation,
    test_attention,
    test_loss,
    test_norms,
    test_ops,
    test_products,
    test_rotary,
    test_total_norm,
)

HERE = compilation.ROOT / "tests" / "cuda_on_cpu"
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-shared", f"-I{HERE}", f"-I{compilation.CSRC}", "-Wno-unknown-pragmas",
         # An address that is not aligned to the access is an error on a card, and none on most processors.
         "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error",
         "-U_FORTIFY_SOURCE",  # whose longjmp allows no stack but the process's own
         "-Wno-psabi"]  # notes on how tensor maps are passed, which nobody else is to agree with
LIMIT_S = 300
HALF, BFLOAT16, FLOAT = torch.float16, torch.bfloat16, torch.float32
DTYPES = (FLOAT, BFLOAT16, HALF)
NORM_DTYPES = ((FLOAT,) * 3, (HALF,) * 3, (BFLOAT16, BFLOAT16, FLOAT), (BFLOAT16, FLOAT, FLOAT))


@pytest.fixture(scope="module", autouse=True)
def kernels(tmp_path_factory):
    """The operators carry out every tensor with the emulated kernels while this lasts."""
    module = extension.load()
    if not extension.has_ops(module):
        pytest.skip(extension.status())
    library = tmp_path_factory.mktemp("cuda") / "emulated.so"
    sources = [*sorted((compilation.CSRC / "cuda").glob("*.cu")), *sorted(HERE.glob("*.cpp"))]
    objects = [library.with_name(f"{source.stem}.o") for source in sources]
    with_flags = [*compilation.find_compiler(), *FLAGS]
    running = [subprocess.Popen([*with_flags, "-c", "-x", "c++", source, "-o", to])
               for source, to in zip(sources, objects, strict=True)]
    assert [each.wait(LIMIT_S) for each in running] == [0] * len(running)
    subprocess.run([*with_flags, *objects, "-o", library], check=True, timeout=LIMIT_S)
    loaded = ctypes.CDLL(str(library))
    cuda_extension.hand_over(loaded)
    yield loaded
    module.load_gpu_kernels(0)


@pytest.fixture(autouse=True)
def half_precision(monkeypatch):
    """The limits of the CPU's tests, with those of float16 added."""
    for tests in (test_norms, test_attention):
        monkeypatch.setitem(tests.LIMITS, HALF, 2e-3)
    for tests in (test_activation, test_rotary):
        monkeypatch.setitem(tests.TOLERANCE, HALF, 2**-11)
    monkeypatch.setitem(test_loss.NORM_ERROR, HALF, 2**-9)


def only(limits):
    """The limits of the dtypes that a GPU has kernels for."""
    return {dtype: limits[dtype] for dtype in DTYPES}


# ---- Norms ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", NORM_DTYPES, ids=lambda dtypes: "-".join(str(d)[6:] for d in dtypes))
@pytest.mark.parametrize("kind", test_norms.KINDS)
def test_norms_of_every_type(kind, dtypes):
    from aura.fused import norms

    if not kind.startswith("add") and dtypes[0] != dtypes[1]:
        pytest.skip("there is no residual")
    # 256, 512 and 1024: rows of just as many elements as their threads have.
    for rows, columns in ((0, 40), (3, 7), (33, 40), (2, 264), (2, 776), (5, 256), (3, 512), (2, 1024)):
        test_norms.compare(norms, kind, test_norms.drawn(kind, rows, columns, dtypes))
    if kind.startswith("add"):
        for columns in (7, 40):
            keep = test_norms.multipliers(11, 0.3, 6, columns)
            operands = test_norms.drawn(kind, 6, columns, dtypes)
            for like_x in (False, True):
                test_norms.compare(norms, kind, operands, keep=keep, dropout=0.3, seed=torch.tensor(11), like_x=like_x)


@pytest.mark.parametrize("dtype", [BFLOAT16, HALF], ids=str)
def test_a_norm_in_both_dtypes(dtype):
    from aura.fused import norms

    for rows, columns in ((0, 40), (3, 7), (33, 40), (2, 264), (2, 776), (3, 512)):
        test_norms.check_post_norm(norms, rows, columns, dtype)
    for columns in (8200, 16388, 8201) if dtype == BFLOAT16 else ():  # slow here, and alike but for conversions
        test_norms.check_post_norm(norms, 1, columns, dtype, alone=False)
    test_norms.check_post_norm(norms, 6, 40, dtype, dropout=0.3, seed=torch.tensor(11), eps=0.5)


def test_wide_and_unaligned_rows():
    from aura.fused import norms

    test_norms.compare(norms, "add_layer_norm", test_norms.drawn("add_layer_norm", 2, 2056, (BFLOAT16,) * 3))
    for like_x in (False, True):
        operands = test_norms.drawn("add_rms_norm", 1, 8200, (BFLOAT16, FLOAT, FLOAT))
        test_norms.compare(norms, "add_rms_norm", operands, like_x=like_x)
    test_norms.compare(norms, "layer_norm", test_norms.drawn("layer_norm", 1, 16392, (BFLOAT16,) * 3))
    x = torch.randn(41 * 3 + 1)[1:].view(3, 41)[:, :40].contiguous()
    for operands in ([torch.randn(3 * 40 + 1)[1:].view(3, 40), torch.ones(40)], [x, torch.randn(41)[1:]],
                     [torch.randn(3 * 512 + 1)[1:].view(3, 512), torch.ones(512)]):
        test_norms.compare(norms, "rms_norm", [t.requires_grad_() for t in operands])


def test_rows_of_several_warps_one_after_another():
    """In backward a block has several rows at a time, which do not wait for one another, and others after them."""
    from aura.fused import norms

    for columns, dtype in ((776, FLOAT), (1032, HALF)):
        for kind in ("layer_norm", "rms_norm"):
            test_norms.compare(norms, kind, test_norms.drawn(kind, 70, columns, (dtype,) * 3))


def test_partial_sums_of_a_card_with_more_multiprocessors_than_most(monkeypatch):
    """There are more of them than are loaded together."""
    from aura.fused import norms

    monkeypatch.setenv("AURA_EMULATED_MULTIPROCESSORS", "170")
    test_norms.compare(norms, "layer_norm", test_norms.drawn("layer_norm", 170 * 4 * 16, 7, (FLOAT,) * 3))


def test_a_large_mean_costs_no_digits():
    from aura.fused import norms

    x = torch.randn(4, 768) + 1e4
    exact = torch.nn.functional.layer_norm(x.double(), (768,))
    assert (norms.layer_norm(x, torch.ones(768), None).double() - exact).abs().max() < 2e-3


# ---- Linear layers --------------------------------------------------------------------------------------------------


def test_sums_of_columns():
    test_products.check_column_sums(dtypes=DTYPES)


# ---- Gradients ------------------------------------------------------------------------------------------------------


def test_the_norm_of_many_tensors():
    test_total_norm.check_total_norm()
    torch_library.opcheck(torch.ops.aura.total_norm.default, ([torch.ones(3, 4), torch.ones(5)],))


# ---- Attention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width,dtype", [(8, BFLOAT16), (32, BFLOAT16), (40, BFLOAT16), (64, HALF), (72, HALF),
                                         (96, BFLOAT16), (120, BFLOAT16), (128, HALF)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_attention_of_every_width(causal, width, dtype):
    for rows in (1, 130):
        test_attention.agree(test_attention.qkv(1, rows, 1, width, dtype), causal, packed=rows == 130)


@pytest.mark.parametrize("width", [64, 80, 128])
@pytest.mark.parametrize("causal,dropout", [(True, 0.3), (False, 0.0)])
def test_key_padding_and_documents_of_wide_heads(causal, dropout, width):
    seed = torch.tensor([7]) if dropout else None
    lengths, bounds = torch.tensor([140, 0, 37]), torch.tensor([0, 3, 3, 60, 131, 132, 420])
    for options in ((dropout, seed, lengths, None), (dropout, seed, None, bounds)):
        test_attention.agree(test_attention.qkv(3, 140, 1, width, HALF), causal, options, packed=True)


@pytest.mark.parametrize("sm", ["86", "90"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_query_spoils_its_own_row_alone(monkeypatch, bad, sm):
    monkeypatch.setenv("AURA_EMULATED_SM", sm)

    def results(q, k, v):
        v.requires_grad_()
        out, lse = torch.ops.aura.attention(q, k, v, True, 0.1, *test_attention.NONE)
        return out[0].detach(), lse[0], torch.autograd.grad(out, v, torch.ones_like(out))[0][0]

    good = test_attention.qkv(1, 200, 1, 64, BFLOAT16)
    spoilt = [x.clone() for x in good]
    spoilt[0][0, 77] = bad
    others = torch.arange(200) != 77
    for got, want in zip(results(*spoilt)[:2], results(*good)[:2], strict=True):
        assert not got[77].isfinite().all() and torch.equal(got[others], want[others])
    assert torch.equal(results(*spoilt)[2][78:], results(*good)[2][78:])  # of keys that it does not see


@pytest.mark.parametrize("sm", ["86", "90"])
def test_scores_of_minus_infinity_are_keys_unseen(monkeypatch, sm):
    """Those of the first tile too, before which there is no score."""
    monkeypatch.setenv("AURA_EMULATED_SM", sm)
    q, k, v = test_attention.qkv(1, 200, 1, 64, BFLOAT16)
    q[..., 0], k[:, :150, :, 0] = 1, -torch.inf
    out, lse = torch.ops.aura.attention(q, k, v, False, 0.1, *test_attention.NONE)
    wanted, wanted_lse = test_attention.reference(q, k[:, 150:], v[:, 150:], False, 0.1, *test_attention.NONE)
    test_attention.close(out, wanted, test_attention.LIMITS[BFLOAT16])
    test_attention.close(lse, wanted_lse, 1e-5)


def rising(rows, heads, width, dtype):
    """q, k and v whose scores grow along the keys, to some tens: by less than 8 powers of 2 from most tiles to the next
    (see Softmax::kSlack), and now and then by more."""
    q, k, v = test_attention.qkv(1, rows, heads, width, dtype)
    return q, k * torch.linspace(0.1, 9, rows).pow(2).view(1, -1, 1, 1).to(dtype) / 2, v


@pytest.mark.parametrize("causal", [True, False])
def test_scores_that_rise_from_tile_to_tile(causal):
    for width in (32, 64):
        test_attention.agree(rising(300, 1, width, BFLOAT16), causal)


def test_heads_whose_blocks_are_numbered_together():
    """Half the emulated card's cache holds 5 of these heads: 7 come as 4 and then 3, and 2 together."""
    for batch, rows, heads in ((1, 150, 7), (1, 270, 2)):
        test_attention.agree(test_attention.qkv(batch, rows, heads, 32, BFLOAT16), causal=True)


def test_more_keys_than_queries_and_fewer():
    for rows, keys in ((1, 100), (20, 144), (5, 0)):
        test_attention.agree(test_attention.qkv(1, rows, 1, 32, BFLOAT16, keys), causal=False)


@pytest.mark.parametrize("causal,dropout", [(True, 0.3), (True, 0.7), (False, 0.0)])
def test_key_padding_and_documents(causal, dropout):
    seed = torch.tensor([7]) if dropout else None
    lengths, bounds = torch.tensor([65, 0, 37]), torch.tensor([0, 3, 3, 60, 131, 132, 195])
    for options in ((dropout, seed, lengths, None), (dropout, seed, None, bounds)):
        test_attention.agree(test_attention.qkv(3, 65, 1, 32, BFLOAT16), causal, options, packed=True)


def test_what_lies_in_padding_does_not_matter():
    q, k, v = test_attention.qkv(2, 65, 2, 32, BFLOAT16)
    k[0, 20:], v[0, 20:] = torch.nan, torch.inf
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = torch.ops.aura.attention(*inputs, True, 0.2, 0.0, None, torch.tensor([20, 65]), None)[0]
    assert all(x.isfinite().all() for x in (out, *torch.autograd.grad(out.sum(), inputs)))


@pytest.mark.parametrize("sm", ["86", "90"])
@pytest.mark.parametrize("width", [40, 104])
def test_what_lies_beside_a_head_does_not_matter(monkeypatch, width, sm):
    """A head with fewer columns than the kernels' tiles: beyond them is the next head, here full of NaN."""
    monkeypatch.setenv("AURA_EMULATED_SM", sm)
    plain = test_attention.qkv(1, 150, 2, width, BFLOAT16)
    beside = [torch.cat((x, torch.full_like(x[:, :, :1], torch.nan)), 2)[:, :, :2] for x in plain]
    found, wanted = (attention_of(*inputs, options=test_attention.NONE) for inputs in (beside, plain))
    assert all(map(torch.equal, found, wanted))


def test_heads_that_do_not_begin_at_16_bytes_or_lie_too_far_apart():
    """The kernels read 16 bytes at a time, and count within a tile in 32 bits: these tensors are copied for them."""
    plain = test_attention.qkv(2, 20, 3, 32, BFLOAT16)
    wide = [torch.cat((x, torch.zeros(2, 20, 3, 1, dtype=x.dtype)), -1)[..., :32] for x in plain]
    moved = [later(x.shape, x.dtype).copy_(x) for x in plain]
    one = [x[:, :1] for x in plain]
    far = [x.contiguous().as_strided(x.shape, (96, 2**25, 32, 1)) for x in one]
    options = (0.0, None, None, None)
    for inputs, near in ((wide, plain), (moved, plain), (far, one)):
        leaves = [x.detach().requires_grad_() for x in inputs]
        out, _ = torch.ops.aura.attention(*leaves, True, 0.2, *options)
        dout = later(out.shape, out.dtype).copy_(out.detach())
        found = out, *torch.autograd.grad(out, leaves, dout)
        same = [x.detach().requires_grad_() for x in near]
        out, _ = torch.ops.aura.attention(*same, True, 0.2, *options)
        assert all(map(torch.equal, found, (out, *torch.autograd.grad(out, same, out.detach()))))


@pytest.mark.parametrize("lengths,bounds", [([3], None), ([3, 2, 1], None), ([3.0, 2.0], None), ([[3, 2]], None),
                                            (None, [0]), (None, []), (None, [0.0, 40.0]), (None, [[0, 40]])], ids=str)
def test_bad_lengths_and_bounds_are_refused(lengths, bounds):
    options = [None if given is None else torch.tensor(given) for given in (lengths, bounds)]
    with pytest.raises(RuntimeError, match="lengths|cu_seqlens"):
        torch.ops.aura.attention(*test_attention.qkv(2, 20, 1, 32, BFLOAT16), True, 1.0, 0.0, None, *options)


@pytest.mark.parametrize("sm", ["86", "90"])
@pytest.mark.parametrize("bounds", [[0, -1000, 500], [300, 500], [0, 400, 200, 500], [130, 140, 9000], [-5, 2**40],
                                    [500, 0], [0, 2**31 + 200, 2**33, 500]], ids=str)
def test_wrong_bounds_on_a_gpu_stay_within_the_tensors(kernels, monkeypatch, bounds, sm):
    """Nobody checks them there: results may be anything, but nothing may be written that is not the call's."""
    monkeypatch.setenv("AURA_EMULATED_SM", sm)
    rows, around, width = 500, 1200, 64
    memory = [torch.full((rows + 2 * around, each), 7.0, dtype=dtype) for each, dtype in
              ((3 * width, HALF), (width, HALF), (3 * width, HALF), (width, HALF), (1, FLOAT))]
    inside = [each[around:around + rows] for each in memory]
    for each in inside[:2]:
        each.normal_()
    limits = torch.tensor(bounds)
    call = kernels.attention_with_bounds
    call.restype = ctypes.c_char_p
    call.argtypes = [*[ctypes.c_void_p] * 6, *[ctypes.c_int64] * 4]
    assert call(*(each.data_ptr() for each in (*inside, limits)), len(bounds) - 1, rows, 1, width) is None
    for each in memory:
        assert each[:around].eq(7).all() and each[around + rows:].eq(7).all()


def test_what_the_kernels_do_not_take_is_refused():
    for width, dtype in ((36, BFLOAT16), (136, BFLOAT16), (64, FLOAT)):
        with pytest.raises(RuntimeError, match=f"head width {width}|float16 or bfloat16"):
            torch.ops.aura.attention(*test_attention.qkv(1, 8, 1, width, dtype), True, 1.0, *test_attention.NONE)


# ---- Attention on Hopper --------------------------------------------------------------------------------------------


@pytest.fixture(params=["late", "copies"])
def hopper(request, monkeypatch):
    """A card of capability 9.0; what is asynchronous comes as late as it may, or copies come as early as they may."""
    monkeypatch.setenv("AURA_EMULATED_SM", "90")
    if request.param != "late":
        monkeypatch.setenv("AURA_EMULATED_EAGER", request.param)


def attention_of(q, k, v, options):
    """(out, lse, dq, dk, dv), the gradients of the sum of squares."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = torch.ops.aura.attention(*inputs, True, q.shape[-1] ** -0.5, *options)
    return out, lse, *torch.autograd.grad(out.float().square().sum(), inputs)


@pytest.mark.parametrize("causal", [True, False])
def test_hopper_of_every_width(hopper, causal):
    for rows, width, dtype in ((1, 64, BFLOAT16), (300, 64, HALF), (300, 128, BFLOAT16), (150, 40, BFLOAT16),
                               (150, 72, HALF), (150, 96, BFLOAT16)):
        test_attention.agree(test_attention.qkv(1, rows, 1, width, dtype), causal, packed=rows == 300)


@pytest.mark.parametrize("causal", [True, False])
def test_hopper_with_key_padding_and_documents(hopper, causal):
    lengths, bounds = torch.tensor([130, 0, 37]), torch.tensor([0, 3, 3, 60, 131, 132, 390])
    for width, options in ((64, (0.0, None, lengths, None)), (128, (0.0, None, None, bounds))):
        test_attention.agree(test_attention.qkv(3, 130, 1, width, BFLOAT16), causal, options, packed=True)


@pytest.mark.parametrize("causal", [True, False])
def test_hopper_with_dropout(hopper, causal):
    seed, bounds = torch.tensor([7]), torch.tensor([0, 3, 3, 200])
    for width, last in ((64, None), (128, bounds)):
        test_attention.agree(test_attention.qkv(1, 200, 2, width, BFLOAT16), causal, (0.3, seed, None, last))


def test_hopper_with_more_work_than_multiprocessors(hopper):
    """The emulated card has three: a block does one piece after another, of no tiles, one, two and three, some empty;
    and where there is one piece more than blocks."""
    lengths = (0.0, None, torch.tensor([260, 0, 100]), None)
    documents = (0.3, torch.tensor([7]), None, torch.tensor([0, 0, 150, 151, 410, 410, 520]))
    plain = test_attention.NONE
    for batch, rows, width, options in ((3, 260, 64, lengths), (1, 520, 128, documents), (2, 200, 64, plain)):
        test_attention.agree(test_attention.qkv(batch, rows, 1, width, BFLOAT16), True, options)


def test_hopper_with_scores_that_rise_from_tile_to_tile(hopper):
    test_attention.agree(rising(600, 1, 64, BFLOAT16), causal=True)


def test_hopper_with_more_keys_than_queries_and_fewer(hopper):
    for rows, keys in ((1, 200), (140, 20), (5, 0)):
        test_attention.agree(test_attention.qkv(1, rows, 2, 64, BFLOAT16, keys), causal=False)


def test_hopper_and_what_lies_beyond_a_sequence(hopper):
    """TMA brings it all the same, and it may be anything."""
    lengths, bounds = torch.tensor([20, 70]), torch.tensor([0, 20, 90, 140])
    for rows, foul, options in ((slice(20, 70), "kv", (0.0, None, lengths, None)),
                                (slice(20, 90), "qkv", (0.0, None, None, bounds))):
        good = test_attention.qkv(2, 70, 1, 64, BFLOAT16)
        bad = [x.detach().clone() for x in good]
        for name, x, worst in zip("qkv", bad, (torch.nan, torch.inf, torch.nan), strict=True):
            if name in foul:
                x.view(140, 64)[rows] = worst
        for got, want in zip(attention_of(*bad, options=options), attention_of(*good, options=options), strict=True):
            got, want = (x.reshape(140, -1) for x in (got, want))
            if "q" in foul:
                got, want = (torch.cat((x[:rows.start], x[rows.stop:])) for x in (got, want))
            assert torch.equal(got, want)


def test_hopper_takes_what_tma_can_read_and_leaves_the_rest(monkeypatch):
    """The result is right with either kernel; which one it was shows in the last bits."""
    def bits(sm, inputs, isa=""):
        monkeypatch.setenv("AURA_EMULATED_SM", sm)
        monkeypatch.setenv("AURA_CUDA_ISA", isa)
        return torch.ops.aura.attention(*inputs, True, 0.2, *test_attention.NONE)[0]

    plain = test_attention.qkv(1, 150, 2, 64, BFLOAT16)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in plain]
    narrow = test_attention.qkv(1, 150, 1, 32, BFLOAT16)
    for inputs, taken in ((plain, True), (heads_first, False), (narrow, False)):
        everywhere = bits("86", inputs)
        assert torch.equal(bits("90", inputs, "sm_80"), everywhere)
        assert torch.equal(bits("90", inputs), everywhere) != taken


@pytest.mark.parametrize("name", test_ops.FAR)
def test_rows_further_apart_than_31_bits_count(tmp_path, name):
    test_ops.test_rows_further_apart_than_31_bits_count(None, tmp_path, name)


# ---- Activations, rotary positions, loss ----------------------------------------------------------------------------


def later(shape, dtype):
    """A contiguous tensor that begins one element after a multiple of 16 bytes."""
    size = torch.Size(shape).numel()
    return test_activation.normal((size + 1,), dtype)[1:].view(shape)


def test_activations():
    test_activation.check_values(only(test_activation.TOLERANCE))
    for name in test_activation.FUNCTIONS:
        test_activation.test_non_contiguous(name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", test_activation.FUNCTIONS)
def test_activations_of_wide_and_unaligned_rows(name, dtype):
    ours, reference = test_activation.FUNCTIONS[name]
    tolerance = test_activation.TOLERANCE[dtype]
    wide = test_activation.normal((3, 4 * 640), dtype)
    for x in (later((3, 80), dtype), wide, wide[:, 640:-640], test_activation.normal((70, 16), dtype)):
        dy = later(reference(x).shape, dtype)
        exact = test_activation.with_gradient(reference, x.double(), dy.double())
        for value, wanted in zip(test_activation.with_gradient(ours, x, dy), exact, strict=True):
            torch.testing.assert_close(value.double(), wanted, rtol=4 * tolerance, atol=tolerance)


def test_rotary_positions():
    test_rotary.check_values(only(test_rotary.TOLERANCE), [*test_rotary.SHAPES, (1, 2, 12, 64), (1, 1, 1, 4128)])
    test_rotary.test_rows_apart_and_any_strides()
    qkv, cosine, sine = test_rotary.example((2, 5, 3, 32))
    whole, flat = test_rotary.rotary_packed(qkv, cosine, sine), torch.zeros(qkv.numel() + 1)
    flat[1:] = qkv.flatten()
    apart = torch.cat((qkv.flatten(2), torch.zeros(2, 5, 3)), -1)[..., :-3].view(qkv.shape)
    for same in (flat[1:].view(qkv.shape), apart):
        assert torch.equal(test_rotary.rotary_packed(same, cosine, sine), whole)


def test_cross_entropy():
    test_loss.check_rows(only(test_loss.NORM_ERROR), (*test_loss.WIDTHS, 4096))
    # As many as need all threads of a block, and more than these hold.
    test_loss.check_rows({BFLOAT16: test_loss.NORM_ERROR[BFLOAT16]}, (33_001, 65_571))
    none = torch.zeros(0, dtype=torch.int64)
    assert test_loss.CHUNK(torch.zeros(0, 40), none, test_loss.IGNORED, True).shape == (0,)


@pytest.mark.parametrize("gradient", [True, False])
def test_a_target_that_is_no_class_fails_an_assertion(gradient, capfd):
    for target in (11, -1, -101, 2**40, -2**62):
        targets = torch.tensor([3, 0, test_loss.IGNORED, target])
        with pytest.raises(RuntimeError, match="cross_entropy_chunk_: device-side assert triggered"):
            test_loss.CHUNK(torch.zeros(4, 11), targets, test_loss.IGNORED, gradient)
        assert "a target is neither a class nor ignored" in capfd.readouterr().err


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_head_with_its_loss(monkeypatch, dtype):
    monkeypatch.setitem(test_loss.fused.DTYPES, "cpu", test_loss.fused.DTYPES["cuda"])
    for rows in (1, 23):
        test_loss.test_against_torch(monkeypatch, dtype, rows)
    test_loss.test_nothing_to_count()
    test_loss.test_backward_twice_and_a_tied_weight()


def test_other_types_are_refused():
    for op in (torch.ops.aura.gelu_tanh, torch.ops.aura.swiglu):
        with pytest.raises(RuntimeError, match="is not float32, bfloat16 or float16, on a GPU"):
            op(torch.zeros(3, 4, dtype=torch.float64))
