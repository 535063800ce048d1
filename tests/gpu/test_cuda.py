"""What only a GPU can show: the pinned loader, mixed precision, NCCL and its fall-back, the script itself."""

import numpy as np
import pytest
import torch

from aura import report, tokens
from tests.support import ROOT, corpus_text, free_port, run, run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SCRIPT = ROOT / "train_gpt2_spanish.py"
SMALL = ["--preset", "demo", "--vocab-size", "400", "--batch-size", "4", "--max-steps", "20", "--log-interval", "1",
         "--sample-length", "5"]


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "libro.txt"
    path.write_text(corpus_text(), encoding="utf-8")
    return path


@pytest.mark.parametrize("vocab_size", [60_000, 70_000])
def test_batches_on_the_device_equal_those_on_the_cpu(tmp_path, vocab_size):
    writer = tokens.ShardWriter(tmp_path, "train", vocab_size)
    writer.write(np.random.default_rng(0).integers(0, vocab_size, 50_000))
    paths = [tmp_path / shard["file"] for shard in writer.close()]
    options = {"vocab_size": vocab_size, "seed": 3, "grad_accum": 2}
    with tokens.TokenLoader(paths, 64, 4, device="cuda", **options) as ours, \
            tokens.TokenLoader(paths, 64, 4, **options) as plain:
        for _ in range(500):
            assert torch.equal(ours.next().cpu(), plain.next())


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_twenty_steps_in_each_precision(book, tmp_path, precision):
    code, output = run([SCRIPT, *SMALL, "--dataset-name", book, "--precision", precision], tmp_path)
    assert code == 0, output
    losses = [float(row["loss"]) for row in report.read_table(tmp_path / "logs" / "train.csv")]
    assert losses[-1] < losses[0]


def test_nccl_with_one_process(tmp_path):
    code, output = run(["-m", "torch.distributed.run", "--nproc_per_node=1", f"--master_port={free_port()}",
                        ROOT / "test_ddp.py", "--backend", "nccl"], tmp_path)
    assert code == 0 and "backend=nccl" in output, output


def test_two_processes_on_one_card_fall_back_together(tmp_path):
    outputs = run_ranks([ROOT / "test_ddp.py"], [tmp_path] * 2, CUDA_VISIBLE_DEVICES=0)
    assert all(code == 0 and "backend=gloo" in output for code, output in outputs), outputs
    assert "fallback=gloo: dos procesos comparten la misma GPU" in outputs[0][1]
