"""The training steps of benchmarks/gpu.py without a card: tiny models, the kernels and clock of a CPU."""

import argparse
import dataclasses
import functools

import pytest
import torch

from aura import ops, plan
from aura.models import bert, gpt, hrm
from tests.support import ROOT, run

GPT = gpt.GPTConfig(vocab_size=64, seq_len=16, n_layer=2, n_head=2, n_embd=32, dropout=0.0)
HRM = hrm.HRMConfig(vocab_size=64, seq_len=16, n_layer=1, n_head=2, n_embd=32, n_ff=48)
BERT = dataclasses.replace(bert.PRESETS["tiny"], vocab_size=64, seq_len=16)
CEILINGS = {"copy": 1e9, "matmul": 1e9}


def makers(gpu_steps):
    sizes = {"batch_size": 2, "grad_checkpointing": True}
    for kind, name, presets, config in ((gpu_steps.gpt_training, "gpt", gpu_steps.train_tensordock.PRESETS, GPT),
                                        (gpu_steps.hrm_training, "hrm", gpu_steps.hrm_training_large_1b.PRESETS, HRM)):
        preset = dataclasses.replace(next(iter(presets.values())), config=config, **sizes)
        yield functools.partial(kind, name, preset, "cpu")
    yield functools.partial(gpu_steps.bert_training, "bert", BERT, "cpu", 2, 16)


def test_a_row_for_each_model_with_its_own_flop_and_the_planned_memory(gpu, gpu_cases, gpu_measure, gpu_steps, capsys):
    rows = [row for make in makers(gpu_steps) for row in gpu.model_rows(make, 1, gpu_measure.timer("cpu"), CEILINGS)]
    assert [(row["op"], row["peer"], row["shape"]) for row in rows] == [
        (f"training step {name}", "sdpa", [2, 16]) for name in ("gpt", "hrm", "bert")]
    flop = (GPT.flops_per_token() * 32, HRM.flops_per_token() * 32, BERT.flops(16) * 2)
    for row, work in zip(rows, flop, strict=True):
        assert row["rate"] == pytest.approx(work / row["ours_ms"] * 1e3)
        assert row["share_of_ceiling"] == pytest.approx(row["rate"] / 1e9)
        assert row["peak_bytes"] > 0 and row["peer_peak_bytes"] > 0 and row["direction"] == gpu_cases.STEP
        gpu.print_row(row)
    job = plan.Job(GPT, 2, 1, True, "bf16", "adamw", "cpu")
    assert 0 < rows[0]["planned_bytes"] < plan.peak(job) - plan.CONTEXT["cpu"] + 1
    assert rows[0]["memory_ratio"] == rows[0]["peak_bytes"] / rows[0]["planned_bytes"]
    assert "planned_bytes" not in rows[1] and "planned_bytes" not in rows[2]
    told = capsys.readouterr().out.splitlines()
    assert "de lo previsto" in told[0] and "GB" in told[1] and "previsto" not in told[1]
    assert "training step hrm, bf16 | 2 x 16 | step" in gpu.markdown({"rows": rows})


def test_gpt2_comes_first_and_large_models_take_few_rounds(gpu, gpu_measure, gpu_steps, monkeypatch):
    playing = {name: (lambda: None, context) for name, context in gpu_steps.ways("cpu").items()}
    monkeypatch.setattr(gpu_steps, "steps", lambda args: playing)
    monkeypatch.setattr(gpu_steps, "trainings", lambda device: list(makers(gpu_steps))[-1:])
    monkeypatch.setattr(gpu_measure, "SAMPLE_MS", 0)
    args = argparse.Namespace(only=["step"], rounds=5, dtype=["bf16"], seq_len=[512])
    rows = [row for _, make_rows in gpu.parts(args, gpu_measure.timer("cpu"), CEILINGS) for row in make_rows()]
    assert [(row["op"], row["rounds"]) for row in rows] == [("training step gpt2", 5), ("training step bert", 3)]


def test_what_others_hold_is_not_the_models_memory(gpu_measure, gpu_steps, monkeypatch):
    monkeypatch.setattr(gpu_steps.backend, "peak_memory", lambda device: 100)
    (row,) = gpu_steps.training_rows(next(makers(gpu_steps))(), 1, gpu_measure.timer("cpu"), CEILINGS, held=40)
    assert row["peak_bytes"] == row["peer_peak_bytes"] == 60


def test_what_has_no_room_is_told_and_left_out(gpu, capsys):
    def too_large():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")

    assert gpu.rows_with_room("enorme", too_large) == [] and gpu.rows_with_room("otro", lambda: [1]) == [1]
    assert capsys.readouterr().err == "  enorme no se mide: CUDA out of memory. Tried to allocate\n"


def test_who_cannot_be_compiled_is_told_and_left_out(gpu_measure, gpu_steps, capsys):
    def step():
        if ops._choice == "sdpa":
            raise RuntimeError("no triton\nhere")

    assert not gpu_measure.takes_part("compilado", step, gpu_steps.ways("cpu")["sdpa"])
    assert capsys.readouterr().err == "  compilado no se mide: no triton\n"
    assert gpu_measure.takes_part("propio", step, gpu_steps.ways("cpu")["ours"]) and not capsys.readouterr().err


def test_a_kernel_that_hangs_ends_the_benchmark(tmp_path):
    """While it does, Python stands in a call that no signal gets it out of."""
    program = tmp_path / "hang.py"
    program.write_text(f"""
import ctypes, sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "benchmarks")!r}]
import gpu
gpu.PART_SECONDS = 0.5
print(gpu.rows_with_room("bien", lambda: ["se midió"]))
gpu.rows_with_room("cuelga", lambda: ctypes.PyDLL(None).sleep(60))
""")
    code, output = run([program], tmp_path, 50)
    assert code == 1 and "['se midió']" in output and "Timeout" in output and "rows_with_room" in output, output


def test_kernels_that_train_another_model_are_refused(gpu_measure, gpu_steps, monkeypatch):
    training = next(makers(gpu_steps))()
    losses = iter((2.0, 2.1))
    training.loss = lambda model, batch: torch.tensor(next(losses))
    with pytest.raises(gpu_measure.Rejected, match="resultado rechazado: las pérdidas"):
        gpu_steps.training_rows(training, 1, gpu_measure.timer("cpu"), CEILINGS)


def test_the_models_are_those_of_the_scripts(gpu_steps):
    """Sizes of what would be measured on a card, on the meta device."""
    found = [make() for make in gpu_steps.trainings("meta")]
    assert [(training.name, *training.shape) for training in found] == [
        ("bert-base", 32, 384), ("aura-72h-extended", 2, 2048), ("aura-72h-max", 2, 2048), ("hrm 1b", 24, 1024)]
    for training in found:
        size = sum(parameter.numel() for parameter in training.model.parameters())
        assert size == training.model.config.parameters() and size > 1e8
    assert all(training.model.grad_checkpointing for training in found[1:])
    assert [bool(training.planned) for training in found] == [False, True, True, False]
