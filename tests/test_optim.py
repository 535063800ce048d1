"""Optimisers, parameter groups and schedules."""

import sys
import types

import pytest
import torch

from aura import optim
from aura.errors import UserError
from aura.models import gpt

SIZES = gpt.GPTConfig(vocab_size=50, seq_len=8, n_layer=1, n_head=2, n_embd=8, dropout=0.0)


def test_decay_is_for_matrices_only():
    model = gpt.GPT(SIZES)
    decayed, plain = optim.adamw(model, 1e-3, 0.1).param_groups
    assert all(p.dim() >= 2 for p in decayed["params"]) and decayed["weight_decay"] == 0.1
    assert all(p.dim() == 1 for p in plain["params"]) and plain["weight_decay"] == 0.0
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))
    assert decayed["eps"] == 1e-8


def test_warmup_then_cosine():
    rates = [optim.warmup_cosine(step, steps=100, warmup_steps=10, lr=1.0, min_lr=0.1) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == pytest.approx(1.0) and rates[99] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    halfway, beyond = (optim.warmup_cosine(step, steps=101, warmup_steps=20, lr=1.0, min_lr=0.2) for step in (40, 150))
    assert halfway == pytest.approx(0.2 + 0.8 * (1 + 0.5**0.5) / 2) and beyond == 0.2


def test_no_warmup_and_one_step():
    assert optim.warmup_cosine(0, steps=1, warmup_steps=0, lr=2.0, min_lr=0.1) == pytest.approx(2.0)


def test_warmup_then_a_line():
    rates = [optim.warmup_linear(step, steps=101, warmup_steps=1, lr=1.0, min_lr=0.0) for step in range(101)]
    assert rates[0] == 1.0 and rates[1] == 1.0 and rates[51] == pytest.approx(1 - 50 / 99) and rates[100] == 0.0
    warm = {"steps": 100, "warmup_steps": 20, "lr": 3.0, "min_lr": 0.3}
    assert [optim.warmup_linear(step, **warm) for step in range(20)] == [
        optim.warmup_cosine(step, **warm) for step in range(20)]


def test_build_knows_the_names_and_nothing_else():
    model = gpt.GPT(SIZES)
    assert isinstance(optim.build("adamw", model, 1e-3, 0.1), torch.optim.AdamW)
    assert isinstance(optim.build("adafactor", model, 1e-3, 0.1), torch.optim.Adafactor)
    with pytest.raises(UserError, match="'sgd': se espera adamw, adamw8bit, adafactor"):
        optim.build("sgd", model, 1e-3, 0.1)


def test_adafactor_steps_by_lr_whatever_the_size_of_gradients_and_weights():
    def change(scale, gradient_scale):
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 32, bias=False)
        optimizer = optim.build("adafactor", model, 1e-3, 0.0)
        with torch.no_grad():
            model.weight.mul_(scale)
        before = model.weight.detach().clone()
        model.weight.grad = gradient_scale * torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
        model.weight.grad[3] = 0.0  # a token that no text had
        optimizer.step()
        return model.weight.detach() - before

    plain, small = change(1.0, 1.0), change(1.0, 1e-6)
    assert plain.square().mean().sqrt().item() == pytest.approx(1e-3, rel=0.05)
    assert plain[3].eq(0).all()
    torch.testing.assert_close(small, plain, rtol=1e-2, atol=1e-6)
    torch.testing.assert_close(change(0.01, 1.0), plain, rtol=1e-2, atol=1e-6)


def test_adafactor_decays_matrices_only():
    optimizer = optim.build("adafactor", gpt.GPT(SIZES), 1e-3, 0.1)
    assert (optimizer.defaults["beta2_decay"], optimizer.defaults["d"]) == (-0.8, 1.0), "as published"
    decayed, plain = optimizer.param_groups
    assert decayed["weight_decay"] == 0.1 and plain["weight_decay"] == 0.0
    assert all(p.dim() == 1 for p in plain["params"])


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_training_lowers_the_loss(name):
    model = gpt.GPT(SIZES).init_weights(0)
    optimizer = optim.build(name, model, 1e-2, 0.1)
    tokens = torch.randint(50, (4, 9), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(30):
        loss = model(tokens[:, :-1], tokens[:, 1:]) / 32
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


def test_adamw8bit_is_bitsandbytes(monkeypatch):
    with torch.device("meta"):
        model = gpt.GPT(SIZES)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # an import of it fails
    monkeypatch.delitem(sys.modules, "bitsandbytes.optim", raising=False)
    with pytest.raises(UserError, match="pip install bitsandbytes"):
        optim.build("adamw8bit", model, 1e-3, 0.1)
    theirs = types.SimpleNamespace(AdamW8bit=lambda groups, **options: (groups, options))
    monkeypatch.setitem(sys.modules, "bitsandbytes", types.ModuleType("bitsandbytes"))
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", theirs)
    groups, options = optim.build("adamw8bit", model, 1e-3, 0.1)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert options == {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}
    assert optim.build("adamw8bit", model, 1e-3, 0.1, (0.9, 0.99))[1]["betas"] == (0.9, 0.99)
    assert optim.build("adamw", model, 1e-3, 0.1, (0.9, 0.99)).defaults["betas"] == (0.9, 0.99)
    with pytest.raises(UserError, match="necesita una GPU"):
        optim.build("adamw8bit", gpt.GPT(SIZES), 1e-3, 0.1)
