"""Tiny runs of the benchmarks of kernels and of training steps: what they write, not what they measure."""

import dataclasses
import importlib.util
import json
import math
import sys

import pytest
import torch

from aura import ops
from aura.errors import UserError
from tests.support import ROOT

# What nanoGPT's model.py must offer to take part, by another implementation: a stand-in for a checkout of it.
NANOGPT = '''
from dataclasses import dataclass
import torch.nn.functional as F
from torch import nn
from aura.models import gpt

@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool

class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.transformer = gpt.GPT(gpt.GPTConfig(c.vocab_size, c.block_size, c.n_layer, c.n_head, c.n_embd, c.dropout))
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
        self.gelu = nn.GELU()
        print("a line of its own")

    def forward(self, tokens, targets=None):
        logits = self.transformer(tokens)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.view(-1))
'''


@pytest.fixture
def load(monkeypatch):
    """A function that gives a fresh module of benchmarks/; sys.path and sys.modules are put back afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def fresh(name):
        for other in ("loader", "measure", name):
            monkeypatch.delitem(sys.modules, other, raising=False)
        spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        monkeypatch.setattr(module.measure, "ceilings", lambda quick=False: dict.fromkeys(
            ("matmul_fp32_gflops", "matmul_bf16_gflops", "copy_gbs", "copy_cached_gbs"), 1.0))
        return module

    return fresh


@pytest.fixture
def choice():
    """Our kernels where they can be built, else torch's in their place: the contract is the same."""
    try:
        with ops.using("fused"):
            return "fused"
    except UserError:
        return "sdpa"


def check_rows(result):
    assert {"benchmark", "versions", "device", "instruction_set", "ceilings", "rows"} <= set(result)
    assert result["versions"]["torch"] == torch.__version__
    for row in result["rows"]:
        assert {"op", "dtype", "variant", "direction", "shape", "threads", "peer"} <= set(row)
        figures = [row[name] for name in ("ours_ms", "ours_min", "ours_p90", "peer_ms", "peer_min", "peer_p90", "ratio",
                                          "ratio_min", "ratio_max", "share_of_ceiling")]
        assert all(math.isfinite(figure) and figure > 0 for figure in figures)
        assert row["ratio"] == pytest.approx(row["peer_ms"] / row["ours_ms"])
        assert row["ratio_min"] <= row["ratio"] * 1.0001 and row["ratio"] <= row["ratio_max"] * 1.0001
        assert row["ours_min"] <= row["ours_ms"] <= row["ours_p90"] * 1.0001
        assert math.isfinite(row["error"]) and math.isfinite(row["peer_error"])


def test_kernels(load, choice, tmp_path, capsys, monkeypatch):
    kernels = load("kernels")
    monkeypatch.setattr(kernels, "OURS", choice)
    monkeypatch.setattr(kernels, "HEADS", 2)
    monkeypatch.setattr(kernels, "NORM_SHAPES", ((300, 48),))
    monkeypatch.setattr(kernels, "GELU_SHAPES", ((300, 48),))
    monkeypatch.setattr(kernels, "QUICK_LOSS_SHAPE", (6, 16, 40))
    path = tmp_path / "kernels.json"
    kernels.main(["--quick", "--threads", "1", "--seq-len", "40,130", "--rounds", "1", "--seconds", "0", "--markdown",
                  "--json", str(path)])
    result = json.loads(path.read_text())
    check_rows(result)
    rows = result["rows"]
    assert {row["op"] for row in rows} == {"attention", "layer_norm", "rms_norm", "gelu_tanh", "linear_cross_entropy"}
    assert {row["dtype"] for row in rows} == {"fp32", "bf16"}
    assert {row["peer"] for row in rows} >= {"sdpa MATH", "sdpa FLASH_ATTENTION", "sdpa, one document at a time"}
    for row in rows:  # every one, ours and the peers, computes what it should
        bound = 2e-5 if row["dtype"] == "fp32" else 2e-2
        assert row["error"] < bound, row
        assert row["peer_error"] < 5 * bound, row
    assert all(note.startswith("SDPA ") for note in result["notes"])
    table = capsys.readouterr().out
    assert table.startswith("| frente a torch | ida, 1 hilo | vuelta, 1 hilo |")
    for line in kernels.LINES:
        if line.targets:
            assert f"| {line.label} |" in table
    [causal] = [entry for entry in result["summary"]
                if (entry["line"], entry["direction"]) == ("atención fp32 causal", "forward")]
    long = [row for row in rows if (row["variant"], row["dtype"], row["direction"], row["shape"][1])
            == ("causal, packed", "fp32", "forward", 130)]
    assert causal["ratio"] == pytest.approx(min(long, key=lambda row: row["peer_ms"])["ratio"])


def test_kernels_finds_a_wrong_gradient(load, monkeypatch):
    kernels = load("kernels")
    case = kernels.gelu_case("fp32", (8, 16))
    wrong = kernels.Contestant("wrong", lambda x: (torch.nn.functional.gelu(x.detach(), approximate="tanh") + 0 * x,))
    right, other = kernels.outcome(case, case.contestants[1]), kernels.outcome(case, wrong)
    assert right["forward"][0] < 1e-6 > other["forward"][0]
    assert right["backward"][0] < 1e-6 and other["backward"][0] > 0.9


def test_slow_peers_leave_early(load):
    measure = load("kernels").measure
    calls = []

    def function(name, pause):
        def run():
            calls.append(name)
            measure.time.sleep(pause)

        return run

    functions = {"ours": function("ours", 0.001), "fast": function("fast", 0.001), "slow": function("slow", 0.03)}
    kinds = {"ours": "ours", "fast": "torch", "slow": "torch"}
    samples = measure.take_turns(functions, kinds=kinds, rounds=4)
    assert [len(samples[name]) for name in functions] == [4, 4, 2]
    row = measure.comparison(samples["ours"], samples["slow"])
    assert row["rounds"] == 2 and row["ratio"] > 5


def test_train_step(load, choice, tmp_path, monkeypatch, capsys):
    train_step = load("train_step")
    monkeypatch.setattr(train_step, "OURS_CHOICE", choice)
    monkeypatch.setattr(train_step, "DROPOUT_LENGTH", 12)
    monkeypatch.setattr(train_step, "CONFIG", dataclasses.replace(
        train_step.CONFIG, vocab_size=96, seq_len=16, n_layer=2, n_head=2, n_embd=32))
    (tmp_path / "model.py").write_text(NANOGPT)
    path = tmp_path / "step.json"
    train_step.main(["--threads", "1", "--seq-len", "12", "--rounds", "1", "--no-memory", "--dtype", "fp32,bf16",
                     "--nanogpt", str(tmp_path), "--json", str(path), "--markdown"])
    result = json.loads(path.read_text())
    check_rows(result)
    assert len(result["rows"]) == 2 * 2 * 3  # dropout or not, two types, three peers
    assert {row["peer"] for row in result["rows"]} == {"ours with sdpa", "nanoGPT", "nanoGPT, exact GELU"}
    assert all(row["error"] < (1e-5 if row["dtype"] == "fp32" else 3e-2) for row in result["rows"])
    out = capsys.readouterr().out
    assert "a line of its own" not in out and "| fp32, T 12, dropout 0.0 |" in out


def test_train_step_measures_memory_in_a_child(load, choice, tmp_path, monkeypatch):
    """The child builds the real gpt2, so only its command is looked at here."""
    train_step = load("train_step")
    asked = []

    def run(command, **_):
        asked.append(train_step.build_parser().parse_args(command[2:]))
        return train_step.subprocess.CompletedProcess(command, 0, stdout="123\n", stderr="")

    monkeypatch.setattr(train_step.subprocess, "run", run)
    args = train_step.build_parser().parse_args(["--threads", "1", "--nanogpt", str(tmp_path)])
    assert train_step.peak_memory(args, train_step.EXACT, 128, "bf16") == 123
    [child] = asked
    assert (child.memory_of, child.seq_len, child.dtype, child.nanogpt) == (
        train_step.EXACT, [128], ["bf16"], str(tmp_path))
