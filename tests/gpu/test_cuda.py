"""What only a GPU can show: the pinned loader, NCCL and its fall-back as the cluster's check sees them."""

import numpy as np
import pytest
import torch

from aura import tokens
from aura.shards import ShardWriter
from tests.gpu import NEEDS_CARD
from tests.support import ROOT, free_port, run, run_ranks

pytestmark = NEEDS_CARD


@pytest.mark.parametrize("vocab_size", [60_000, 70_000])
def test_batches_on_the_device_equal_those_on_the_cpu(tmp_path, vocab_size):
    writer = ShardWriter(tmp_path, "train", vocab_size)
    writer.write(np.random.default_rng(0).integers(0, vocab_size, 50_000))
    paths = [tmp_path / shard["file"] for shard in writer.close()]
    options = {"vocab_size": vocab_size, "seed": 3, "grad_accum": 2}
    with tokens.TokenLoader(paths, 64, 4, device="cuda", **options) as ours, \
            tokens.TokenLoader(paths, 64, 4, **options) as plain:
        for _ in range(500):
            assert torch.equal(ours.next().cpu(), plain.next())


def test_nccl_with_one_process(tmp_path):
    code, output = run(["-m", "torch.distributed.run", "--nproc_per_node=1", f"--master_port={free_port()}",
                        ROOT / "test_ddp.py", "--backend", "nccl"], tmp_path)
    assert code == 0 and "backend=nccl" in output, output


def test_two_processes_on_one_card_fall_back_together(tmp_path):
    outputs = run_ranks([ROOT / "test_ddp.py"], [tmp_path] * 2, CUDA_VISIBLE_DEVICES=0)
    assert all(code == 0 and "backend=gloo" in output for code, output in outputs), outputs
    assert "fallback=gloo: dos procesos comparten la misma GPU" in outputs[0][1]
