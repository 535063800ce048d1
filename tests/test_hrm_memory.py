"""What benchmarks/hrm_memory.py computes is what torch allocates."""

import dataclasses
import sys

import pytest
import torch

from aura import ops, optim, products
from aura.models import hrm
from tests.support import ROOT, most_allocated

sys.path.insert(0, str(ROOT / "benchmarks"))

import hrm_memory

CONFIG = dataclasses.replace(hrm.PRESETS["demo"], n_layer=1, vocab_size=1000, seq_len=64)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("grad_checkpointing", [False, True])
def test_the_estimate_is_what_torch_allocates(precision, grad_checkpointing):
    model = hrm.HRM(CONFIG).init_weights(0)
    model.grad_checkpointing = grad_checkpointing
    optimizer = optim.adamw(model, 1e-3, 0.1)
    batch = torch.randint(CONFIG.vocab_size, (4, CONFIG.seq_len + 1))

    def step():
        with products.step(model), products.adding(True):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = model(batch[:, :-1], batch[:, 1:])
            (loss / batch.numel()).backward()
        torch._foreach_mul_([p.grad for p in model.parameters()], 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    with ops.using("sdpa"), hrm_memory.as_on_a_gpu():
        step()
        before = sum(p.nbytes for p in model.parameters())
        before += sum(t.nbytes for state in optimizer.state.values() for t in state.values())
        measured = before + most_allocated(step)
    computed = hrm_memory.step_bytes(CONFIG, 4, grad_checkpointing, precision)
    assert computed == pytest.approx(measured, rel=0.01)
