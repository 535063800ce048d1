"""The key-value cache of every model that has one."""

import pytest
import torch

from aura import ops
from aura.models import gpt, hrm

MODELS = {
    "gpt": lambda: gpt.GPT(gpt.GPTConfig(vocab_size=31, seq_len=8, n_layer=2, n_head=2, n_embd=16, dropout=0.0)),
    "hrm": lambda: hrm.HRM(hrm.HRMConfig(vocab_size=31, seq_len=8, n_layer=1, n_head=2, n_embd=16, n_ff=32)),
}


@pytest.mark.parametrize("name", MODELS)
def test_keys_and_values_have_the_dtype_of_the_queries_and_not_that_of_the_weights(name, monkeypatch):
    """As our attention requires: on a GPU, a sharded model writes its samples with matrices of 16 bits."""
    model, seen = MODELS[name]().init_weights(1).eval(), []
    attention = ops.attention

    def heard(q, k, v, **options):
        seen.append((q.dtype, k.dtype, v.dtype))
        return attention(q, k, v, **options)

    monkeypatch.setattr(ops, "attention", heard)
    cache = model.empty_cache()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for length in (3, 1):
            model(torch.zeros(2, length, dtype=torch.long), cache=cache)
    assert cache.length == 4 and set(seen) == {(torch.bfloat16,) * 3}
