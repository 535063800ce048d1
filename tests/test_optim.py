"""Parameter groups and schedule."""

import pytest

from aura import optim
from aura.models import gpt


def test_decay_is_for_matrices_only():
    model = gpt.GPT(gpt.GPTConfig(vocab_size=50, seq_len=8, n_layer=1, n_head=2, n_embd=8))
    decayed, plain = optim.adamw(model, 1e-3, 0.1).param_groups
    assert all(p.dim() >= 2 for p in decayed["params"]) and decayed["weight_decay"] == 0.1
    assert all(p.dim() == 1 for p in plain["params"]) and plain["weight_decay"] == 0.0
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))


def test_warmup_then_cosine():
    rates = [optim.warmup_cosine(step, steps=100, warmup_steps=10, lr=1.0, min_lr=0.1) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == pytest.approx(1.0) and rates[99] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_no_warmup_and_one_step():
    assert optim.warmup_cosine(0, steps=1, warmup_steps=0, lr=2.0, min_lr=0.1) == pytest.approx(2.0)
