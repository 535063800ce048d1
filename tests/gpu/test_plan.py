"""The plan of a run against what torch's allocator counts on a card."""

import gc

import pytest
import torch

from aura import ops, plan
from aura.models import gpt
from tests.gpu import ENDS_HUNG_KERNELS, NEEDS_CARD
from tests.test_plan import estimated_peak, training

pytestmark = [NEEDS_CARD, ENDS_HUNG_KERNELS]
# Large enough that cuBLAS's workspace, which the plan counts as its reserve, is little beside it.
CONFIG = gpt.GPTConfig(vocab_size=32_000, seq_len=512, n_layer=8, n_head=8, n_embd=512, dropout=0.1)


@pytest.fixture(params=["fused", "sdpa"])
def attention(request):
    """Who carries out the operations, the kernels built before the time of a test begins."""
    if request.param == "fused":
        request.getfixturevalue("kernels")
    return request.param


@pytest.mark.parametrize("optimizer,grad_accum", [("adamw", 1), ("adafactor", 2)])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("checkpointing", [False, "selective", "full"], ids=["kept", "selective", "full"])
def test_the_estimate_is_what_the_card_holds(attention, checkpointing, precision, optimizer, grad_accum):
    job = plan.Job(CONFIG, 8, grad_accum, checkpointing, precision, optimizer, "cuda", attention == "fused")
    # From the first products on cuBLAS keeps a workspace for each thread, of which backward has one of its own.
    torch.nn.Linear(8, 8, device="cuda")(torch.ones(8, 8, device="cuda")).sum().backward()
    gc.collect()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated()
    with ops.using(attention, "cuda"):
        _, _, step = training(job, torch.device("cuda"))
        step()
        torch.cuda.reset_peak_memory_stats()
        step()
    assert torch.cuda.max_memory_allocated() - held == pytest.approx(estimated_peak(job), rel=0.1)
