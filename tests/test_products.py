"""Linear layers whose weight's gradient is added up in float32 by the product itself."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from aura import extension, products, sharding
from aura.models import gpt, hrm
from tests.support import run_ranks

BATCHES = 3

RANKS = """
from types import SimpleNamespace

import torch
from torch import nn

from aura import cli, distributed, products, sharding

products.DEVICES = ("cpu",)
products.WEIGHT_ROWS = 7


def main():
    args = SimpleNamespace(backend="gloo", dist_timeout=60.0)
    with distributed.session(args) as dist:
        torch.manual_seed(1)
        module = nn.Sequential(products.Linear(24, 33), nn.GELU(), products.Linear(33, 5))
        batches = torch.randn(dist.world_size, 3, 19, 24)
        model = dist.wrap(module)
        with products.step(model):
            for number, batch in enumerate(batches[dist.rank]):
                with sharding.exchanging(model, number == 2):
                    with torch.autocast("cpu", torch.bfloat16):
                        loss = model(batch).float().square().mean()
                    loss.backward()
        torch.save([parameter.grad for parameter in module.parameters()], f"{dist.rank}.pt")
        del model
        module.zero_grad()
        for batch in batches.flatten(0, 1):
            with torch.autocast("cpu", torch.bfloat16):
                loss = module(batch).float().square().mean() / dist.world_size
            loss.backward()
        torch.save([parameter.grad for parameter in module.parameters()], "whole.pt")


cli.run(main)
"""


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(products, "DEVICES", ("cpu",))
    monkeypatch.setattr(products, "WEIGHT_ROWS", 7)


def layer(bias=True, device="cpu"):
    torch.manual_seed(1)
    return products.Linear(24, 33, bias=bias).to(device)


def inputs(device="cpu"):
    torch.manual_seed(2)
    return [(torch.randn(2, 19, 24).to(device), torch.randn(2, 19, 33).to(device)) for _ in range(BATCHES)]


def no_step(_):
    """Without products.step()."""
    return contextlib.nullcontext()


def trained(module, step=products.step, adding=True, dtype=torch.bfloat16):
    """Outputs and gradients of the inputs; those of the parameters are in `module`."""
    found, device = [], module.weight.device.type
    with step(module), products.adding(adding):
        for x, dy in inputs(device):
            x.requires_grad_()
            with torch.autocast(device, dtype):
                y = module(x)
            y.backward(dy.to(dtype))
            found.append((y.detach(), x.grad))
    return found


def error(gradient, exact):
    return float((gradient - exact).norm() / exact.norm())


def check_sums(adding, bias, limit, device="cpu", dtype=torch.bfloat16):
    """The same as torch's, but its gradients, all of float32, nearer to the exact ones: within `limit`."""
    ours, theirs = layer(bias, device), layer(bias, device)
    found = trained(ours, adding=adding, dtype=dtype)
    wanted = trained(theirs, no_step, dtype=dtype)
    low = [[values.to(dtype).double().flatten(0, 1) for values in pair] for pair in inputs(device)]
    weight = ours.weight.detach().to(dtype).double()
    for (y, dx), (their_y, their_dx), (_, dy) in zip(found, wanted, low, strict=True):
        torch.testing.assert_close(y, their_y)
        exact = (dy @ weight).view_as(dx)
        assert error(dx, exact) <= min(limit, 1.01 * error(their_dx, exact))
    exact = sum(dy.T @ x for x, dy in low)
    assert error(ours.weight.grad, exact) <= min(limit, 1.01 * error(theirs.weight.grad, exact))
    if bias:
        exact = sum(dy.sum(0) for _, dy in low)
        assert error(ours.bias.grad, exact) < 1e-6 < error(theirs.bias.grad, exact)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("adding", [True, False])
def test_sums_are_those_of_torch_but_not_rounded(adding, bias):
    check_sums(adding, bias, limit=5e-3)  # on a CPU each product is rounded


def test_what_is_added_to_a_gradient_is_not_rounded_before():
    ours = layer()
    ours.weight.grad = torch.zeros_like(ours.weight)
    trained(ours)
    low = [[values.bfloat16().double().flatten(0, 1) for values in pair] for pair in inputs()]
    assert error(ours.weight.grad, sum(dy.T @ x for x, dy in low)) < 1e-6


def check_column_sums(device="cpu", dtypes=(torch.float32, torch.bfloat16, torch.float16)):
    """Of matrices with and without whole vectors, in parts or in one, and with rows that do not begin on 16 bytes."""
    for rows, columns in ((1, 1), (3, 7), (70, 264), (777, 40), (1030, 520)):
        for dtype in dtypes:
            for start in (0, 1):
                x = torch.randn(start + rows * columns, generator=torch.Generator().manual_seed(rows)).to(device, dtype)
                x = x[start:].view(rows, columns)
                sums = torch.ops.aura.column_sums(x)
                assert sums.dtype == torch.float32 and error(sums, x.double().sum(0)) < 1e-6, (rows, columns, dtype)
    assert torch.equal(torch.ops.aura.column_sums(x.t()[:7].t()), torch.ops.aura.column_sums(x[:, :7].contiguous()))
    assert torch.equal(torch.ops.aura.column_sums(x[:0]), torch.zeros(columns, device=device))


def test_sums_of_columns():
    assert extension.load()
    check_column_sums()
    with pytest.raises(RuntimeError, match=r"x must be \[rows, C\]"):
        torch.ops.aura.column_sums(torch.ones(3))


@pytest.mark.parametrize("adding", [True, False])
def test_autograd_sees_the_gradient_where_it_is_not_added(adding):
    seen, module = [], layer()
    module.weight.register_hook(seen.append)
    trained(module, adding=adding)
    assert [gradient.dtype for gradient in seen if gradient is not None] == [torch.float32] * BATCHES * (not adding)


class Waiting(products.Linear):
    """Like DistributedDataParallel, it waits for gradients except in no_sync()."""

    no_sync = staticmethod(contextlib.nullcontext)


@pytest.mark.parametrize(("model", "wanted", "added"), [
    (products.Linear(1, 1), False, True), (products.Linear(1, 1), True, True),
    (Waiting(1, 1), False, True), (Waiting(1, 1), True, False)])
def test_nothing_is_added_where_somebody_waits_for_the_gradient(model, wanted, added):
    with sharding.exchanging(model, wanted):
        assert products._adds == added
    assert not products._adds


def test_parameters_are_cast_once_a_step(monkeypatch):
    module, made = layer(), []
    cast = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda low, wide: made.append(len(low)) or cast(low, wide))
    trained(module)
    assert made == [2] and products._copies is None
    with torch.no_grad():
        module.weight.zero_()
        module.bias.fill_(0.5)
    assert all((y == 0.5).all() for y, _ in trained(module))


def test_a_step_that_fails_leaves_no_copies():
    with pytest.raises(RuntimeError), products.step(layer()), products.adding(True):
        raise RuntimeError
    assert products._copies is None and not products._adds


@pytest.mark.parametrize("context", [
    contextlib.nullcontext,  # no autocast
    lambda: torch.autocast("cpu", torch.bfloat16, enabled=False)])
def test_elsewhere_it_is_torchs(context):
    module, x = layer(), torch.randn(5, 24)
    with products.step(module), context():
        assert torch.equal(module(x), F.linear(x, module.weight, module.bias))
        assert not products._copies.made
    assert products.Linear(3, 4).state_dict().keys() == torch.nn.Linear(3, 4).state_dict().keys()


def refuse(*_, **__):
    """As builds of torch 2.10 from before its release do."""
    raise RuntimeError("self and mat2 must have the same dtype, but got Float and BFloat16")


@pytest.mark.parametrize("where, name, what", [(products, "add_product", refuse), (extension, "load", lambda: None)])
def test_without_such_products_or_the_extension_it_is_torchs(monkeypatch, where, name, what):
    monkeypatch.setattr(where, name, what)
    products._can_add.cache_clear()
    ours, theirs = layer(), layer()
    try:
        trained(ours)
    finally:
        products._can_add.cache_clear()
    trained(theirs, no_step)
    assert torch.equal(ours.weight.grad, theirs.weight.grad)


def test_weights_that_are_not_whole_are_not_copied():
    """As all are under FSDP."""
    ours, theirs = layer().bfloat16(), layer().bfloat16()
    trained(ours)
    trained(theirs, no_step)
    assert torch.equal(ours.weight.grad, theirs.weight.grad)


def test_second_derivatives_are_refused():
    module, x = layer(), torch.randn(5, 24, requires_grad=True)
    with products.step(module), torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(y.float().sum(), x, create_graph=True)


def test_frozen_weights_and_inference():
    module, x = layer(), torch.randn(2, 5, 24)
    with products.step(module), products.adding(True), torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            y = module(x)
        module.requires_grad_(False)
        again = module(x.requires_grad_())
        again.sum().backward()
    assert torch.equal(y, again) and not y.requires_grad and x.grad is not None and module.weight.grad is None


def test_a_bias_beside_a_frozen_weight_has_its_gradient():
    ours, theirs = layer(), layer()
    for module in (ours, theirs):
        module.weight.requires_grad_(False)
    trained(ours)
    trained(theirs, no_step)
    assert ours.bias.grad is not None and torch.equal(ours.bias.grad, theirs.bias.grad) and ours.weight.grad is None


def test_the_operator_computes_a_frozen_weight_again():
    """In a checkpoint, whose own backward asks: there is no node of the weight to ask for what it kept."""
    x, low = torch.randn(5, 24, requires_grad=True), torch.randn(33, 24).bfloat16()

    def block(x):
        return torch.ops.aura.linear(x, low.float(), None, low, None, True).float().tanh()

    (plain,), (again,) = (torch.autograd.grad(y.sum(), x) for y in (
        block(x), torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)))
    assert torch.equal(plain, again)


@pytest.mark.parametrize("adding", [True, False])
def test_a_gradient_that_is_not_asked_for_is_not_added(adding):
    module, x = layer(), torch.randn(5, 24, requires_grad=True)
    with products.step(module), products.adding(adding), torch.autocast("cpu", torch.bfloat16):
        loss = module(x).float().sum()
    with Products() as found:
        torch.autograd.grad(loss, x, retain_graph=True)
    assert found.count == 1 and module.weight.grad is None and x.grad is None
    loss.backward(inputs=[module.weight])
    assert module.weight.grad is not None and x.grad is None


GPT = gpt.GPT(gpt.GPTConfig(vocab_size=101, seq_len=24, n_layer=3, n_head=2, n_embd=32, dropout=0.1))
HRM = hrm.HRM(hrm.HRMConfig(vocab_size=101, seq_len=24, n_layer=2, n_head=2, n_embd=32, n_ff=48))


@pytest.mark.parametrize(("model", "again"), [
    (GPT, False), (GPT, "full"), (GPT, "selective"), (HRM, False), (HRM, True)])
def test_models_have_the_gradients_of_torch(model, again):
    """With blocks computed again and, in an HRM, weights that several passes share, some of them without gradients."""
    model.init_weights(1).train()
    model.grad_checkpointing = again
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(101, (3, 18), generator=generator) for _ in range(BATCHES)]

    def gradients(step):
        model.zero_grad()
        torch.manual_seed(0)
        with step(model), products.adding(True):
            for tokens in batches:
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(tokens[:, :-1], tokens[:, 1:])
                loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    found, wanted = gradients(products.step), gradients(no_step)
    assert max(error(found[name], wanted[name]) for name in found) < 1e-2


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function._schema.name in ("aten::mm", "aten::addmm", "aten::linear")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("step", [products.step, no_step])
@pytest.mark.parametrize(("model", "mode", "products_again"), [
    (GPT, "full", 3 * 3), (GPT, "selective", 3), (HRM, True, 10 * 3)])
def test_the_last_product_of_a_block_is_not_computed_again(model, mode, products_again, step):
    """The last of a block's four, or of an MLP's two: only the next block adds its result. Gradients flow through an
    HRM's two blocks in each of five passes."""
    model.init_weights(1).train()
    tokens, counts = torch.randint(101, (3, 18)), []
    for again in (False, mode):
        model.grad_checkpointing = again
        with step(model), products.adding(True):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(tokens[:, :-1], tokens[:, 1:])
            with Products() as found:
                loss.backward()
        counts.append(found.count)
    assert counts[1] - counts[0] == products_again


def test_the_last_micro_batch_is_exchanged(tmp_path):
    """DistributedDataParallel waits for gradients that autograd sees; those of earlier micro-batches are there too."""
    (tmp_path / "program.py").write_text(RANKS)
    outputs = run_ranks([tmp_path / "program.py"], [tmp_path] * 2)
    assert [code for code, _ in outputs] == [0, 0], outputs
    first, second, whole = (torch.load(tmp_path / name, weights_only=True) for name in ("0.pt", "1.pt", "whole.pt"))
    assert all(map(torch.equal, first, second))
    assert max(error(*pair) for pair in zip(first, whole, strict=True)) < 1e-2
