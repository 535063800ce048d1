"""Sharded training: the same losses and checkpoints as one process and as DistributedDataParallel."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch

from aura import checkpoint, loop, optim, output, report, sharding, tokens
from aura.checkpointer import Checkpointer, collect
from aura.ema import Average
from aura.errors import UserError
from aura.models import gpt
from aura.session import Session
from aura.shards import ShardWriter
from aura.sync import Exact
from tests.support import ROOT, Notes, run_ranks

CONFIG = gpt.GPTConfig(vocab_size=65, seq_len=8, n_layer=2, n_head=2, n_embd=10, dropout=0.0)  # nothing divides by 3
STEPS, BATCH, ACCUM, CUT = 6, 12, 2, 3


def next_token_loss(model, batch):
    targets = batch[:, 1:]
    return model(batch[:, :-1], targets), targets.numel()


def train(dist, folder, shards, *, shard, precision="fp32", checkpointing=False, spoil=None, freq=CUT):
    """Train to STEPS, from the newest checkpoint in `folder` if there is one; returns Notes. spoil: (rank, call)."""
    dist.shards = dist.world_size if shard else 1
    model = gpt.GPT(CONFIG).init_weights(0)
    model.grad_checkpointing = checkpointing
    optimizer, precision = optim.adamw(model, 1e-2, 0.1), loop.Precision(precision, dist.device)
    sharding.shard(model, optimizer, dist, precision.dtype)
    average, notes, calls = Average(model, 0.9), Notes(), [0]
    keeper = Checkpointer(folder, dist, keep=9, background=True)
    loader = tokens.TokenLoader(shards, 8, BATCH // ACCUM // dist.world_size, vocab_size=65, seed=7, rank=dist.rank,
                                world_size=dist.world_size, grad_accum=ACCUM)
    state = keeper.load("auto", sharding.own_part(model, optimizer))
    run = loop.Run(model, optimizer, precision, loader, average, Exact(dist))
    if state:
        run.restore(state)

    def loss_fn(model, batch):
        calls[0] += 1
        loss, count = next_token_loss(model, batch)
        return loss * (float("nan") if (dist.rank, calls[0]) == spoil else 1.0), count

    @torch.no_grad()
    def evaluate(request):
        with precision.autocast():
            return {"val_loss": next_token_loss(model.eval(), torch.arange(36).view(4, 9))[0].item()}

    policy = loop.Policy(STEPS, BATCH * 8 // ACCUM // dist.world_size, grad_accum=ACCUM, log_interval=1,
                         eval_interval=1, checkpoint_freq=freq, grad_clip=0.5)
    with loader:
        loop.train(dist.wrap(model), run, loss_fn, lambda step: 1e-2 / (1 + step), keeper, notes, policy, dist,
                   evaluate=evaluate,
                   reinitialise=lambda: sharding.load_whole(model, gpt.GPT(CONFIG).init_weights(1).state_dict()))
    return notes


def prepare(folder, name, source):
    """A folder for a run, which goes on from the middle of another one if `source` names it."""
    (folder / name).mkdir()
    if source:
        shutil.copy(checkpoint.path_of(folder / source, CUT), folder / name)


def gradients_of(dist, model, shard, prepare=lambda model: None):
    """The gradients of two micro-batches of each rank, averaged over the ranks: one vector, float32."""
    prepare(model)
    optimizer = optim.adamw(model, 1e-2, 0.1)
    if shard:
        sharding.shard(model, optimizer, dist)
    for micro in range(2):
        for rank in [dist.rank] if shard else range(dist.world_size):
            batch = torch.randint(0, 65, (3, 9), generator=torch.Generator().manual_seed(10 * micro + rank))
            with sharding.exchanging(model, micro == 1):
                (next_token_loss(model, batch)[0] / (1 if shard else dist.world_size)).backward()
    found = {name: sharding.whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    state = collect({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, dist)
    assert (state is None) == (not dist.main)
    return found


def newest(folder):
    return checkpoint.read(checkpoint.found(folder)[0])


def same(a, b):
    """Two trees of a checkpoint are equal bit for bit, their clocks apart."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a if key != "seconds")
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


PROGRAM = """
import atexit, json, sys, torch
from pathlib import Path
from types import SimpleNamespace
from aura import cli, distributed, sharding
from aura.errors import TrainingFault
from aura.models import gpt, hrm
from tests import test_fsdp as t

@atexit.register
def name_threads():
    comms = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    print("vivos:", [name for name in comms if "gloo" in name])

def main():
    folder = Path(sys.argv[1])
    args = SimpleNamespace(backend="gloo", dist_timeout=30.0, distributed=True, fsdp=True)
    with distributed.session(args) as dist:
        def run(name, source=None, **options):
            if dist.main:
                t.prepare(folder, name, source)
            dist.barrier()
            notes = t.train(dist, folder / name, [folder / "train-00000.bin"], **options)
            if dist.main:
                (folder / f"{name}.json").write_text(json.dumps([notes.rows, notes.events]))
        {body}
    return 0

cli.run(main)
"""
TWO = """
run("ddp", shard=False)
run("fsdp", shard=True)
run("fsdp_again", "fsdp", shard=True)
run("fsdp_as_ddp", "fsdp", shard=False)
run("bf16_ddp", shard=False, precision="bf16")
scatter, sent = sharding.SCATTER, set()
sharding.SCATTER = lambda into, data, **options: (sent.add(data.dtype), scatter(into, data, **options))[1]
run("bf16_fsdp", shard=True, precision="bf16", checkpointing=True)
assert sent == {torch.float32}, sent
sharding.SCATTER = scatter
run("nan_fp16", shard=True, precision="fp16", spoil=(1, 8))
run("nan_first", shard=True, spoil=(1, 2), freq=0)
"""
THREE = """
run("fsdp_as_three", "fsdp", shard=True)
run("one_as_three", "one", shard=True)
dist.shards = 3

class Spare(gpt.GPT):
    def __init__(self, config):
        super().__init__(config)
        self.spare = torch.nn.Parameter(torch.ones(2))

def shallow(model):
    model.bp_passes = 3

def checkpointed(model):
    model.grad_checkpointing = True

def partly(model):
    model.grad_checkpointing = "selective"

config = hrm.HRMConfig(65, 8, n_layer=2, n_head=1, n_embd=10, n_ff=14, segments=2, exit_weights=False)
for make, prepare in ((lambda: Spare(t.CONFIG), checkpointed), (lambda: gpt.GPT(t.CONFIG), partly),
                      (lambda: hrm.HRM(config), shallow), (lambda: hrm.HRM(config), checkpointed)):
    one, three = (t.gradients_of(dist, make().init_weights(0), cut, prepare) for cut in (False, True))
    assert one.keys() == three.keys() and "spare" not in one
    for name in one:
        assert torch.allclose(one[name], three[name], rtol=1e-4, atol=1e-5), name

model = gpt.GPT(t.CONFIG).init_weights(dist.rank)  # rank 0's weights are the ones that count
sharding.shard(model, t.optim.adamw(model, 1e-2, 0.1), dist)
twin = gpt.GPT(t.CONFIG).init_weights(0)
assert all(torch.equal(sharding.whole(tensor), twin.state_dict()[name]) for name, tensor in model.state_dict().items())
disagreed = torch.full((1, 4), dist.rank)
with torch.no_grad():
    with sharding.same_output(model):
        logits = model(disagreed)
    assert torch.equal(logits, model(disagreed)) == dist.main  # afterwards each has its own again
assert torch.equal(logits, twin(torch.zeros(1, 4, dtype=int)))

name, real = sharding.SCATTER.__name__, sharding.SCATTER
setattr(torch.distributed, name, lambda **options: real(**{**options, "op": torch.distributed.ReduceOp.SUM}))
try:
    sharding.shard(twin, None, dist)
except TrainingFault as problem:
    print("fault:", problem)
"""


def launch(folder, size, body):
    path = folder / f"program{size}.py"
    path.write_text(PROGRAM.replace("{body}", body.replace("\n", "\n        ")))
    outputs = run_ranks([path, folder], [folder] * size)
    assert [code for code, _ in outputs] == [0] * size, "\n".join(output[-3000:] for _, output in outputs)
    assert all("vivos: []" in output for _, output in outputs), "a thread of the group outlives it"
    return outputs[0][1]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with the runs of one, two and three processes, over the same global batches."""
    folder = tmp_path_factory.mktemp("fsdp")
    writer = ShardWriter(folder, "train", 65)
    writer.write(np.arange(4000) * 7 % 65)
    (shard,) = writer.close()
    assert shard["file"] == "train-00000.bin"
    launch(folder, 2, TWO)
    for name, source in (("one", None), ("fsdp_as_one", "fsdp")):
        prepare(folder, name, source)
        notes = train(Session(), folder / name, [folder / "train-00000.bin"], shard=False)
        (folder / f"{name}.json").write_text(json.dumps([notes.rows, notes.events]))
    (folder / "three.txt").write_text(launch(folder, 3, THREE))
    return folder


def rows(runs, name):
    found = json.loads((runs / f"{name}.json").read_text())[0]
    return np.array([[row[key] for key in ("loss", "grad_norm", "val_loss")] for row in found])


def test_one_process_ddp_and_shards_agree(runs):
    one, ddp, fsdp = (rows(runs, name) for name in ("one", "ddp", "fsdp"))
    assert one.shape == (STEPS, 3) and one[-1, 0] < one[0, 0]
    np.testing.assert_allclose(ddp, one, rtol=0, atol=1e-4)
    np.testing.assert_allclose(fsdp, one, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["fsdp_as_one", "fsdp_as_three", "fsdp_as_ddp", "one_as_three"])
def test_a_checkpoint_opens_on_any_number_of_processes(runs, name):
    np.testing.assert_allclose(rows(runs, name), rows(runs, "one")[CUT:], rtol=0, atol=1e-4)


def test_resumed_shards_go_on_bit_for_bit(runs):
    assert np.array_equal(rows(runs, "fsdp_again"), rows(runs, "fsdp")[CUT:])
    assert same(newest(runs / "fsdp_again"), newest(runs / "fsdp"))


def test_checkpoints_are_those_of_one_process(runs):
    ours, theirs = newest(runs / "fsdp"), newest(runs / "one")
    assert ours["model"].keys() == theirs["model"].keys() and ours["ema"].keys() == theirs["ema"].keys()
    assert ours["optimizer"]["state"].keys() == theirs["optimizer"]["state"].keys()
    for part in ("model", "ema"):
        for name, tensor in theirs[part].items():
            assert type(ours[part][name]) is torch.Tensor
            torch.testing.assert_close(ours[part][name], tensor, rtol=0, atol=1e-4)
    assert any(not torch.equal(ours["model"][name], ours["ema"][name]) for name in ours["ema"])


def test_bf16_follows_ddp(runs):
    exact, ddp, fsdp = (rows(runs, name) for name in ("fsdp", "bf16_ddp", "bf16_fsdp"))
    assert not np.array_equal(exact[:, 0], fsdp[:, 0])
    np.testing.assert_allclose(fsdp[:, 0], ddp[:, 0], rtol=0, atol=2e-3)
    np.testing.assert_allclose(fsdp[:, 0], exact[:, 0], rtol=0, atol=2e-2)


@pytest.mark.parametrize("name, said", [("nan_fp16", "ckpt-00000003.pt"), ("nan_first", "se reinician los pesos")])
def test_a_nan_on_one_rank_restores_all_shards(runs, name, said):
    _, events = json.loads((runs / f"{name}.json").read_text())
    assert len(events) == 1 and said in events[0]
    losses = rows(runs, name)[:, 0]
    assert np.isnan(losses).sum() == 1 and losses[-1] < losses[np.isfinite(losses)][0]
    state = newest(runs / name)
    assert all(torch.isfinite(tensor).all() for part in ("model", "ema") for tensor in state[part].values())


def test_the_script_of_three_shards_evaluates_writes_and_saves_the_average(book, tmp_path):
    options = ["--preset", "demo", "--n-layer", 1, "--n-embd", 32, "--n-head", 2, "--seq-len", 32, "--vocab-size", 400,
               "--dropout", 0, "--batch-size", 4, "--dataset-name", book, "--max-steps", 3, "--eval-windows", 17,
               "--sample-length", 4, "--precision", "bf16", "--ema", 0.9, "--fsdp", "--distributed"]
    outputs = run_ranks([ROOT / "train_gpt2_spanish.py", *options], [tmp_path] * 3)
    assert [code for code, _ in outputs] == [0] * 3, outputs
    assert "muestra del paso 3" in outputs[0][1] and "[rango 2] Sincronización inicial: una de las 3" in outputs[2][1]
    config, weights, _, _ = output.read_output(tmp_path / "gpt2_spanish.pth")
    assert same(weights, newest(tmp_path / "checkpoints")["ema"])
    assert same(weights, output.read_output(checkpoint.found(tmp_path / "checkpoints")[0])[1])
    assert json.loads((tmp_path / "gpt2_spanish.json").read_text())["architecture"] == "GPT"
    model = gpt.GPT(gpt.GPTConfig(**config)).eval()
    model.load_state_dict(weights)
    losses = []
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for batch in tokens.evaluation_batches(sorted(tmp_path.glob("Data/libro/val*.bin")), 32, 4,
                                               vocab_size=config["vocab_size"], limit=17):
            losses.append(next_token_loss(model, batch))
    loss, count = (sum(part) for part in zip(*losses, strict=True))
    row = report.read_table(tmp_path / "logs" / "train.csv")[-1]
    assert float(row["val_loss"]) == pytest.approx(loss.item() / count, abs=1e-4)


def test_a_group_that_sums_where_it_should_average_is_refused(runs):
    assert "fault: el grupo gloo no promedia" in (runs / "three.txt").read_text()


def test_cuda_without_nccl_is_refused_with_the_reason():
    dist = Session(0, 0, 2, device=torch.device("cuda"), backend="gloo", fallback="falta NCCL", shards=2)
    with pytest.raises(UserError, match="necesita NCCL.*falta NCCL"):
        sharding.shard(gpt.GPT(CONFIG), None, dist)


def test_one_process_has_nothing_to_cut():
    model = gpt.GPT(dataclasses.replace(CONFIG))
    sharding.shard(model, None, Session())
    assert Session().wrap(model) is model and not any(map(sharding.is_shard, model.parameters()))
