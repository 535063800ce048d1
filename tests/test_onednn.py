"""Products of float32 on a CPU by oneDNN instead of MKL: right, whoever asks for them, on any processor."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from aura import extension, ops, products
from aura.models import gpt
from tests.support import run_ranks

if not extension.has_ops(extension.load()):
    pytest.skip("the kernels cannot be built here", allow_module_level=True)
if not torch.backends.mkldnn.is_available():
    pytest.skip("this torch has no oneDNN", allow_module_level=True)

from aura.fused import loss  # noqa: E402 - needs the operators

BETTER = products.onednn_is_better
RANKS = """
from types import SimpleNamespace

import torch

from aura import cli, distributed, extension, optim, products, sharding
from aura.models import gpt

extension.load()
products.onednn_is_better = lambda: {onednn}
CONFIG = gpt.GPTConfig(vocab_size=300, seq_len=64, n_layer=2, n_head=2, n_embd=128, dropout=0.0)


def main():
    args = SimpleNamespace(backend="gloo", dist_timeout=60.0)
    with distributed.session(args) as dist:
        module = gpt.GPT(CONFIG).init_weights(1)
        dist.shards = {shards}
        if dist.shards > 1:
            sharding.shard(module, optim.adamw(module, 1e-3, 0.1), dist, None)
            model = module
        else:
            model = dist.wrap(module)
        batches = torch.randint(300, (dist.world_size, 3, 8, 65), generator=torch.Generator().manual_seed(0))
        for number, batch in enumerate(batches[dist.rank]):
            with sharding.exchanging(model, number == 2):
                model(batch[:, :-1], batch[:, 1:]).backward()
        whole = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in module.parameters()]
        torch.save(whole, f"{{dist.rank}}.pt")


cli.run(main)
"""


CPUINFO = """processor\t: 0
vendor_id\t: {vendor}
cpu family\t: {family}
flags\t\t: fpu {flags} sse2
bugs\t\t:

processor\t: 1
vendor_id\t: another
"""


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")
@pytest.mark.parametrize("vendor, family, flags, better", [
    ("AuthenticAMD", 26, "avx512f avx512dq avx512bw avx512vl", True),  # Zen 5
    ("AuthenticAMD", 25, "avx512f avx512dq avx512bw avx512vl", True),  # Zen 4
    ("AuthenticAMD", 25, "avx2", False),  # Zen 3
    ("AuthenticAMD", 26, "avx512f", False),  # the rest hidden by a virtual machine
    ("GenuineIntel", 26, "avx512f avx512dq avx512bw avx512vl", False)])
def test_where_it_is_better_is_read_off_the_processor(tmp_path, vendor, family, flags, better):
    (tmp_path / "cpuinfo").write_text(CPUINFO.format(vendor=vendor, family=family, flags=flags))
    assert BETTER(tmp_path / "cpuinfo") == better


def test_where_nothing_is_known_of_the_processor_it_is_not(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd\n")  # ARM
    assert not BETTER(tmp_path / "cpuinfo") and not BETTER(tmp_path / "none")


@pytest.fixture(autouse=True)
def by_onednn(monkeypatch):
    monkeypatch.setattr(products, "onednn_is_better", lambda: True)


class Calls(TorchDispatchMode):
    """Names of the operators that multiply matrices, in turn."""

    def __enter__(self):
        self.names = []
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if (name := function._schema.name.split("::")[1]) in ("mm", "addmm", "linear", "_linear_pointwise"):
            self.names.append(name)
            # What is transposed that operator would copy by one thread.
            assert name != "_linear_pointwise" or args[0].is_contiguous() or args[0].stride(0) != 1
        return function(*args, **(kwargs or {}))


def error(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


def pair(columns, inner, bias=True):
    """A layer, and the same in float64, which is torch's."""
    torch.manual_seed(1)
    ours = products.Linear(inner, columns, bias=bias)
    exact = torch.nn.Linear(inner, columns, bias=bias).double()
    exact.load_state_dict(ours.state_dict())
    return ours, exact


def gradients(layer, x, dy):
    y = layer(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], dy)]


LARGE = ((3, 80, 256), (65, 1040), (16400,))  # shapes of x beside 256 columns: 2**22 multiplications and more


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", LARGE)
def test_results_and_gradients_are_right(shape, bias):
    ours, exact = pair(256, shape[-1], bias)
    torch.manual_seed(2)
    x, dy = torch.randn(shape, requires_grad=True), torch.randn(*shape[:-1], 256)
    with Calls() as calls:
        found = gradients(ours, x, dy)
    assert calls.names == ["_linear_pointwise"] * 3
    wanted = gradients(exact, x.detach().double().requires_grad_(), dy.double())
    assert [value.shape for value in found] == [value.shape for value in wanted]
    assert max(map(error, found, wanted)) < 1e-6


@pytest.mark.parametrize("shape", [(3, 79, 256), (0, 256), (5, 24)])
def test_what_is_small_is_torchs(shape):
    ours, exact = pair(69, shape[-1])
    x, dy = torch.randn(shape, requires_grad=True), torch.randn(*shape[:-1], 69)
    with Calls() as calls:
        found = gradients(ours, x, dy)
    assert "_linear_pointwise" not in calls.names
    wanted = gradients(exact, x.detach().double().requires_grad_(), dy.double())
    for value, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(value, right.float(), rtol=1e-5, atol=1e-4)


def test_tensors_in_any_order():
    """Columns, rows with gaps, rows that share their memory, and the one row of all of a gradient that sum() gives."""
    ours, exact = pair(256, 300)
    for x in (torch.randn(300, 80).t(), torch.randn(80, 600)[:, ::2], torch.randn(80, 400)[:, :300],
              torch.randn(1, 300).expand(80, 300), torch.randn(379).as_strided((80, 300), (1, 1))):
        for dy in (torch.ones(1).expand(80, 256), torch.randn(256).expand(80, 256), torch.randn(256, 80).t()):
            found = gradients(ours, x.detach().requires_grad_(), dy)
            wanted = gradients(exact, x.detach().double().requires_grad_(), dy.double())
            assert max(map(error, found, wanted)) < 1e-6


@pytest.mark.parametrize("rows, columns", [(1, 1), (1, 40), (40, 1), (16, 16), (15, 33), (257, 300), (0, 5), (5, 0)])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_transposed_copy(rows, columns, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for x in (torch.randn(rows, columns), torch.randn(rows, columns + 7)[:, 3:columns + 3]):
            found = torch.ops.aura.transposed(x)
            assert torch.equal(found, x.t()) and found.is_contiguous()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("x", [torch.zeros(4, 6, dtype=torch.float64), torch.zeros(4, 6).t(), torch.zeros(6)])
def test_what_is_not_copied_transposed(x):
    with pytest.raises(RuntimeError, match="float32.*its rows whole"):
        torch.ops.aura.transposed(x)


def test_second_derivatives():
    ours, exact = pair(256, 300)
    x = torch.randn(80, 300)

    def second(layer, x):
        x.requires_grad_()
        given = [x, *layer.parameters()]
        first = torch.autograd.grad(layer(x).sin().square().sum(), given, create_graph=True)
        return torch.autograd.grad(sum(gradient.square().sum() for gradient in first), given)

    assert max(map(error, second(ours, x.clone()), second(exact, x.double()))) < 2e-6


def test_what_is_not_float32_or_not_here_is_torchs():
    layer, x = products.Linear(256, 256), torch.randn(80, 256)
    with Calls() as calls, torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        assert layer.double()(x.double()).dtype == torch.float64
        assert layer.to("meta")(x.to("meta")).is_meta
    assert "_linear_pointwise" not in calls.names


def test_a_bias_is_taken_as_torch_takes_it():
    x, weight = torch.randn(80, 256), torch.randn(256, 256)
    for bias in (torch.randn(1).expand(256), torch.randn(512)[::2], torch.randn(1), torch.randn(256)):
        found = torch.ops.aura.linear(x, weight, bias, weight, bias, False)
        torch.testing.assert_close(found, F.linear(x, weight) + bias, rtol=1e-5, atol=1e-4)


def test_of_batches_of_many_sizes_torch_makes_the_products():
    model = gpt.GPT(gpt.GPTConfig(vocab_size=300, seq_len=64, n_layer=2, n_head=2, n_embd=128))
    products.batches_vary(model)
    with Calls() as calls, torch.no_grad():
        model(torch.randint(300, (8, 64)))
    assert calls.names and "_linear_pointwise" not in calls.names


def test_tensors_without_data():
    with FakeTensorMode():
        layer, x = products.Linear(256, 256), torch.randn(80, 256, requires_grad=True)
        layer(x).backward(torch.randn(80, 256))
    assert layer.weight.grad.shape == (256, 256) and x.grad.shape == (80, 256)


def test_without_autograd():
    """In inference mode no tensor has autograd's part of an operator."""
    layer, x = products.Linear(256, 256), torch.randn(80, 256)
    for without in (torch.inference_mode, torch.no_grad):
        with without():
            y = layer(x)
            assert not y.requires_grad and torch.allclose(y, F.linear(x, layer.weight, layer.bias), atol=1e-5)


def test_a_frozen_weight_gets_no_gradient():
    layer, x = products.Linear(256, 256), torch.randn(80, 256, requires_grad=True)
    layer.weight.requires_grad_(False)
    with Calls() as calls:
        layer(x).sum().backward()
    assert layer.weight.grad is None and layer.bias.grad is not None and x.grad is not None and len(calls.names) == 2


def test_wrong_shapes_are_refused():
    with pytest.raises(RuntimeError, match=r"x is \[80, 257\], the weight \[256, 256\]"):
        products.Linear(256, 256)(torch.randn(80, 257))


def test_the_last_product_of_a_block_is_not_computed_again():
    layers = torch.nn.Sequential(products.Linear(256, 256), torch.nn.Tanh(), products.Linear(256, 256))
    x = torch.randn(80, 256, requires_grad=True)
    found, counts = [], []
    for again in (False, True):
        y = checkpoint(layers, x, use_reentrant=False) if again else layers(x)
        with Calls() as calls:
            found.append(torch.autograd.grad(y.sum(), [x, *layers.parameters()]))
        counts.append(len(calls.names))
    assert counts == [4, 5] and all(map(torch.equal, *found))


@pytest.mark.parametrize("chunk", [2**30, 200_000])
def test_the_loss_in_one_chunk_and_in_several(monkeypatch, chunk):
    monkeypatch.setattr(loss, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(products, "WEIGHT_ROWS", 130)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = ((torch.randn(n, 600, generator=generator) / 5).requires_grad_() for n in (301, 257))
    targets = torch.randint(257, (301,), generator=generator)
    targets[::7] = -100
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    wanted = F.cross_entropy(F.linear(*exact), targets, reduction="sum")
    made = []
    monkeypatch.setattr(loss, "mm", lambda a, b, space: made.append(space) or products.mm(a, b, space))
    with ops.using("fused"):
        found = ops.linear_cross_entropy(hidden, weight, targets)
        found.backward()
    wanted.backward()
    assert made == [None] * -(-301 * 257 * 4 // chunk)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert max(error(a.grad, b.grad) for a, b in zip((hidden, weight), exact, strict=True)) < 2e-6


def test_a_product_with_the_transpose_of_another_is_added():
    logits, hidden, sums = torch.randn(80, 300), torch.randn(80, 256), torch.randn(300, 256)
    wanted = sums.double() + logits.t().double() @ hidden.double()
    with Calls() as calls:
        products.add_product(sums, logits.t(), hidden, fresh=False)
    assert calls.names == ["_linear_pointwise"] and error(sums, wanted) < 1e-6


def test_autocast_has_no_part_in_a_product():
    a, b, into = torch.randn(80, 256), torch.randn(256, 256), torch.empty(80, 256)
    with torch.autocast("cpu", torch.bfloat16):
        found = products.mm(a, b, products.space(a, b, 80))
        products.write_product(into, a, b)
    assert found.dtype == torch.float32 and torch.equal(found, into)
    assert error(found, a.double() @ b.double()) < 1e-6


def test_a_model_learns_what_it_learns_by_torch(monkeypatch):
    config = gpt.GPTConfig(vocab_size=300, seq_len=64, n_layer=2, n_head=2, n_embd=128, dropout=0.0)
    batch = torch.randint(300, (8, 65), generator=torch.Generator().manual_seed(0))

    def losses():
        model, found = gpt.GPT(config).init_weights(1), []
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        for _ in range(5):
            total = model(batch[:, :-1], batch[:, 1:])
            total.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(total.item() / batch[:, 1:].numel())
        return found

    with Calls() as calls:
        ours = losses()
    assert calls.names.count("_linear_pointwise") >= 5 * 2 * 4 * 3
    monkeypatch.setattr(products, "onednn_is_better", lambda: False)
    assert ours == pytest.approx(losses(), rel=1e-5) and ours[-1] < ours[0]


@pytest.mark.parametrize("shards", [1, 2], ids=["ddp", "fsdp"])
def test_processes_exchange_the_gradients(tmp_path, shards):
    found = {}
    for onednn in (True, False):
        folder = tmp_path / str(onednn)
        folder.mkdir()
        (folder / "program.py").write_text(RANKS.format(onednn=onednn, shards=shards))
        outputs = run_ranks([folder / "program.py"], [folder] * 2)
        assert [code for code, _ in outputs] == [0, 0], outputs
        found[onednn] = torch.load(folder / "0.pt", weights_only=True)
        assert all(map(torch.equal, found[onednn], torch.load(folder / "1.pt", weights_only=True)))
    assert max(error(a, b.double()) for a, b in zip(found[True], found[False], strict=True)) < 1e-6
    assert not all(map(torch.equal, found[True], found[False]))
