"""The training steps of benchmarks/gpu.py without a card: tiny models, the kernels and clock of a CPU."""

import argparse
import dataclasses
import functools
import types

import pytest
import torch

from aura import ops, plan
from aura.models import bert, gpt, hrm
from tests.support import ROOT, run

GPT = gpt.GPTConfig(vocab_size=64, seq_len=16, n_layer=2, n_head=2, n_embd=32, dropout=0.0)
HRM = hrm.HRMConfig(vocab_size=64, seq_len=16, n_layer=1, n_head=2, n_embd=32, n_ff=48)
BERT = dataclasses.replace(bert.PRESETS["tiny"], vocab_size=64, seq_len=16)
CEILINGS = {"copy": 1e9, "matmul": 1e9}


COMPILE = torch.compile


@pytest.fixture(autouse=True)
def quick_compiler(monkeypatch):
    """torch.compile without generated code, for which a test would have to wait for a C++ compiler."""
    monkeypatch.setattr(torch, "compile", functools.partial(COMPILE, backend="aot_eager"))
    yield
    torch.compiler.reset()


@pytest.fixture
def ran(monkeypatch):
    """The choice of kernels with which each run of a compiled graph was made."""
    found = []

    def backend(graph, _):
        return lambda *inputs: found.append(ops._choice) or graph(*inputs)

    monkeypatch.setattr(torch, "compile", functools.partial(COMPILE, backend=backend))
    return found


def makers(gpu_steps):
    sizes = {"batch_size": 2, "grad_accum": 3, "grad_checkpointing": True}
    for kind, name, presets, config in ((gpu_steps.gpt_training, "gpt", gpu_steps.train_tensordock.PRESETS, GPT),
                                        (gpu_steps.hrm_training, "hrm", gpu_steps.hrm_training_large_1b.PRESETS, HRM)):
        preset = dataclasses.replace(next(iter(presets.values())), config=config, **sizes)
        yield functools.partial(kind, name, preset, "cpu")
    yield functools.partial(gpu_steps.bert_training, "bert", BERT, "cpu", 2, 16)


def test_a_row_for_each_model_with_its_own_flop_and_the_planned_memory(gpu, gpu_cases, gpu_steps, ran, capsys):
    def clock(call, times):
        ran.clear()
        call()
        return 1.0 if ran else 2.0  # what is compiled is faster

    rows = [row for make in makers(gpu_steps) for row in gpu.model_rows(make, 1, clock, CEILINGS)]
    everybody = ["sdpa", gpu_cases.EAGER, "sdpa, torch.compile"]
    found = {}
    for row in rows:
        found.setdefault((row["op"], *row["shape"]), []).append(row["peer"])
    assert {case: sorted(peers) for case, peers in found.items()} == {
        ("training step gpt", 6, 16): sorted(everybody), ("training step hrm", 2, 16): ["sdpa"],
        ("training step bert", 2, 16): sorted(everybody)}
    flop = {"gpt": GPT.flops_per_token() * 96, "hrm": HRM.flops_per_token() * 32, "bert": BERT.flops(16) * 2}
    for row in rows:
        work = flop[row["op"].split()[-1]]
        assert row["rate"] == pytest.approx(work / row["ours_ms"] * 1e3)
        assert row["share_of_ceiling"] == pytest.approx(row["rate"] / 1e9)
        assert row["peak_bytes"] > 0 and row["peer_peak_bytes"] > 0 and row["direction"] == gpu_cases.STEP
        gpu.print_row(row)
    job = plan.Job(GPT, 2, 3, True, "bf16", "adamw", "cpu", fused=True)
    planned = [sum(parts.values()) - parts["reserve"] for parts in plan.phases(job).values()]
    assert rows[0]["planned_bytes"] == max(planned)
    eager, = (row["peer_peak_bytes"] for row in rows[:3] if row["peer"] == gpu_cases.EAGER)
    assert rows[0]["memory_ratio"] == eager / rows[0]["planned_bytes"]
    assert ["planned_bytes" in row for row in rows] == [True] * 3 + [False] * 4
    told = capsys.readouterr().out.splitlines()
    assert "de lo previsto" in told[0] and "GB" in told[3] and "previsto" not in told[3]
    lines = gpu.markdown({"rows": rows}).splitlines()[2:]
    assert [line.split(" | ")[1:5:3] for line in lines[2:3]] == [["2 x 16", "sdpa"]] and len(lines) == 5
    assert [gpu_cases.EAGER in line for line in lines] == [False, True, False, False, True]


def test_gpt2_comes_first_and_large_models_take_few_rounds(gpu, gpu_measure, gpu_steps, monkeypatch):
    playing = {name: (lambda: None, context) for name, context in gpu_steps.ways("cpu").items()}
    monkeypatch.setattr(gpu_steps, "steps", lambda args, device: playing)
    monkeypatch.setattr(gpu_steps, "trainings", lambda device: list(makers(gpu_steps))[-1:])
    monkeypatch.setattr(gpu_measure, "SAMPLE_MS", 0)
    args = gpu.build_parser().parse_args(["--only", "step", "--rounds", "5"])
    args.models = ["gpt2", "bert"]
    rows = [row for _, make_rows in gpu.parts(args, gpu_measure.timer("cpu"), CEILINGS) for row in make_rows()]
    assert list(dict.fromkeys((row["op"], row["rounds"]) for row in rows)) == [("training step gpt2", 5),
                                                                                ("training step bert", 3)]


def test_gpt2_is_raced_in_every_way_and_against_nanogpt(gpu_cases, gpu_steps, ran, monkeypatch, capsys):
    """nanoGPT's model is left out where it computes something else."""
    monkeypatch.setattr(gpu_steps.train_step, "CONFIG", GPT)
    monkeypatch.setattr(gpu_steps, "STEP_BATCH", 2)
    monkeypatch.setattr(gpu_steps, "STEP_LENGTH", GPT.seq_len)
    ways = {"ours": set(), "sdpa": set(), gpu_cases.COMPILED: {"fused"}, "sdpa, torch.compile": {"sdpa"}}
    for factor, names in ((1, [*ways, "nanoGPT, torch.compile"]), (2, list(ways))):
        def peer(name, folder, dropout, factor=factor):
            model = gpt.GPT(GPT)
            return gpu_steps.train_step.Contestant(
                name, model, None, lambda model, batch: factor * gpu_steps.train_step.our_loss(model, batch))

        monkeypatch.setattr(gpu_steps.train_step, "nanogpt", peer)
        playing = gpu_steps.steps(argparse.Namespace(nanogpt="nanoGPT"), "cpu")
        assert list(playing) == names
        for name, (step, context) in playing.items():
            ran.clear()
            with context():
                step()
            assert name not in ways or set(ran) == ways[name]
            assert name in ways or ran
    assert "nanoGPT, torch.compile no se mide" in capsys.readouterr().err


def test_what_others_hold_is_not_the_models_memory(gpu_measure, gpu_steps, monkeypatch):
    monkeypatch.setattr(gpu_steps.backend, "peak_memory", lambda device: 100)
    rows = gpu_steps.training_rows(next(makers(gpu_steps))(), 1, gpu_measure.timer("cpu"), CEILINGS, held=40)
    assert all(row["peak_bytes"] == row["peer_peak_bytes"] == 60 for row in rows)


def test_the_memory_of_a_way_is_the_peak_of_its_own_samples(gpu_measure, gpu_steps, monkeypatch):
    peaks, begun = {"sdpa": 7, "fused": 5}, []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", begun.append)
    monkeypatch.setattr(gpu_steps.backend, "peak_memory", lambda device: peaks[ops._choice] + len(begun))
    memory, card = {}, torch.device("cuda")
    for number, name in enumerate(("sdpa", "ours"), 1):
        with gpu_steps.noting_peak(gpu_steps.ways("cpu")[name], name, memory, card, 2):
            assert begun == [card] * number and name not in memory
    assert memory == {"sdpa": 6, "ours": 5}


def test_a_step_is_all_micro_batches_of_the_preset(gpu_steps):
    """Its gradient is that of their mean, each computed by itself."""
    training = next(makers(gpu_steps))()
    contestant, seen = gpu_steps.train_step.Contestant("ours", training.model, None, training.loss), []
    contestant.loss = lambda model, batch: seen.append(tuple(batch.shape)) or training.loss(model, batch)
    contestant.optimizer = types.SimpleNamespace(zero_grad=training.model.zero_grad, step=lambda: None)
    with ops.using("sdpa"):
        training.loss(training.model, training.batch).backward()
        wanted = torch.nn.utils.get_total_norm([parameter.grad for parameter in training.model.parameters()])
        norm = contestant.step(training.batch, "fp32", training.micro_batches)
    assert seen == [(2, 17)] * 3
    torch.testing.assert_close(norm, wanted)


@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_each_way_runs_what_it_says_in_one_model(gpu_cases, gpu_steps, ran, kind):
    training = next(make for make in makers(gpu_steps) if make.args[0] == kind)()
    contestant, found = gpu_steps.train_step.Contestant("ours", training.model, None, training.loss), {}
    for name, (step, context) in gpu_steps.steps_of(contestant, training.batch, training.micro_batches).items():
        before = next(training.model.parameters()).detach().clone()
        ran.clear()
        with context():
            step()
        found[name] = set(ran)
        assert not torch.equal(before, next(training.model.parameters())), name
    assert found == {"ours": set(), "sdpa": set(), gpu_cases.COMPILED: {"fused"},
                     "sdpa, torch.compile": {"sdpa"}}


@pytest.mark.parametrize(("compiled", "ours", "beside"), [(1.0, 1.0, ("ours, eager", 3.0)),
                                                          (5.0, 3.0, ("ours, torch.compile", 5.0))])
def test_ours_is_what_is_faster_and_the_other_stands_beside(gpu_measure, gpu_steps, ran, compiled, ours, beside):
    """Times show which one is which."""
    ms = {False: {"fused": 3.0, "sdpa": 4.0}, True: {"fused": compiled, "sdpa": 2.0}}

    def clock(call, times):
        ran.clear()
        call()
        return ms[bool(ran)][ops._choice]

    rows = gpu_steps.training_rows(next(makers(gpu_steps))(), 1, clock, CEILINGS)
    assert {(row["ours_ms"], row["peer"], row["peer_ms"]) for row in rows} == {
        (ours, *beside), (ours, "sdpa", 4.0), (ours, "sdpa, torch.compile", 2.0)}


def test_without_a_compiler_ours_is_eager_and_stands_alone(gpu_measure, gpu_steps, monkeypatch, capsys):
    def no_compiler(graph, _):
        raise RuntimeError("no triton")

    monkeypatch.setattr(torch, "compile", functools.partial(COMPILE, backend=no_compiler))
    (row,) = gpu_steps.training_rows(next(makers(gpu_steps))(), 1, gpu_measure.timer("cpu"), CEILINGS)
    assert row["peer"] == "sdpa" and row["peak_bytes"] > 0
    told = capsys.readouterr().err.splitlines()
    assert [line.split(" no se mide: ")[0] for line in told] == ["  ours, torch.compile", "  sdpa, torch.compile"]
    assert all("no triton" in line for line in told)


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
    """While it hangs, Python is inside a call that no signal interrupts."""
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
        ("bert-base", 32, 384), ("aura-72h-extended", 32, 2048), ("aura-72h-max", 32, 2048), ("hrm-1b", 24, 1024)]
    for training in found:
        size = sum(parameter.numel() for parameter in training.model.parameters())
        assert size == training.model.config.parameters() and size > 1e8
    assert all(training.model.grad_checkpointing for training in found[1:])
    assert [training.micro_batches for training in found] == [1, 16, 16, 1]
    assert [bool(training.planned) for training in found] == [False, True, True, False]
