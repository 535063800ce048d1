"""benchmarks/gpu.py as far as it goes without a card: its cases with the CPU's kernels, its rows and its table."""

import contextlib
import functools
import json
import math
import os
import re
from unittest.mock import MagicMock

import pytest
import torch

from aura import ops, speeds
from aura.errors import UserError
from aura.models import bert


def on_the_cpu(case):
    case.contestants[0].context = lambda: ops.using("fused")
    return case


def cases(gpu_cases):
    bfloat16 = torch.bfloat16
    for kind in ("layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm"):
        yield gpu_cases.norm_case(kind, 8, 40, bfloat16, "cpu", compiled=False)
    for kind in ("gelu_tanh", "swiglu"):
        yield gpu_cases.activation_case(kind, 8, 40, bfloat16, "cpu", compiled=False)
    yield gpu_cases.loss_case(8, 41, bfloat16, "cpu", compiled=False)
    yield gpu_cases.rotary_case(32, 64, bfloat16, "cpu", tokens=64, compiled=False)
    for causal in (True, False):
        yield gpu_cases.attention_case(32, 64, causal, bfloat16, "cpu", tokens=64)
    yield gpu_cases.documents_case(32, 64, bfloat16, "cpu", tokens=64)
    yield gpu_cases.gradients_case(bert.BertConfig(vocab_size=64, seq_len=8, n_layer=1, n_head=1, n_embd=8, n_ff=16),
                                   "cpu")


def test_every_case_is_checked_timed_and_told(gpu, gpu_cases, gpu_measure):
    rows, ceilings = [], {"copy": 1e9, "matmul": 1e9}
    for case in map(on_the_cpu, cases(gpu_cases)):
        errors = gpu_measure.check(case)
        assert "ours" in errors and len(errors) > 1
        assert max(error[0] for error in errors.values()) > 0
        for direction in case.work:
            samples = gpu_measure.take_turns(gpu_measure.calls(case, direction), 1, gpu_measure.timer("cpu"))
            found = gpu_measure.rows_of(case, direction, samples, errors, ceilings)
            assert [row["peer"] for row in found] == [name for name in errors if name != "ours"]
            assert all(row["ratio"] > 0 and row["share_of_ceiling"] > 0 for row in found)
            rows += found
    table = gpu.markdown({"rows": rows})
    assert len(table.splitlines()) == 2 + 2 * 10 + 1 + 1 and "attention, bfloat16, documents" in table


@pytest.mark.parametrize("scores", [1, 2 * 32**2, 2**26])
def test_the_exact_attention_is_the_same_in_parts(gpu_cases, monkeypatch, scores):
    monkeypatch.setattr(gpu_cases, "EXACT_SCORES", scores)
    case = gpu_cases.attention_case(32, 64, True, torch.float64, "cpu", tokens=64)
    whole, parts = gpu_cases.sdpa(True)(*case.inputs), case.exact(*case.inputs)
    upstream = torch.randn_like(whole)
    for got, wanted in ((parts, whole), (torch.autograd.grad(parts, case.inputs, upstream)[0],
                                         torch.autograd.grad(whole, case.inputs, upstream)[0])):
        assert torch.allclose(got, wanted, rtol=1e-12, atol=1e-12)


ROW = {"op": "rms_norm", "variant": "bfloat16", "shape": [8, 40], "direction": "forward", "peer": "torch",
       "ours_ms": 1.0, "peer_ms": 2.0, "ratio": 2.0, "ratio_min": 1.0, "ratio_max": 3.0, "ceiling": "copy",
       "share_of_ceiling": 0.5, "peer_share_of_ceiling": 0.25}


@pytest.fixture
def measured(gpu, gpu_measure, monkeypatch, tmp_path):
    """main() of these parts on a card that is a stand-in: (exit code, what the JSON file holds, the table)."""
    monkeypatch.setattr(gpu.cuda_extension, "load", lambda: None)
    monkeypatch.setattr(gpu.torch.cuda, "get_device_name", lambda: "una tarjeta")
    monkeypatch.setattr(gpu.torch.cuda, "get_device_capability", lambda: (8, 6))
    monkeypatch.setattr(gpu.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gpu_measure, "cache_bytes", lambda device: 0)
    monkeypatch.setattr(gpu_measure, "timer", lambda device, timer=gpu_measure.timer: timer("cpu"))
    monkeypatch.setattr(gpu_measure, "ceilings", lambda clock: {"copy": 4e12, "small copy": 3e12, "matmul": 1e9})

    def call(parts, *words):
        monkeypatch.setattr(gpu, "parts", lambda *args: parts)
        files = tmp_path / "gpu.json", tmp_path / "gpu.md"
        code = gpu.main(["--json", str(files[0]), "--markdown", str(files[1]), *words])
        return code, json.loads(files[0].read_text()), files[1].read_text()

    return call


def raising(problem):
    def make_rows():
        raise problem

    return make_rows


def test_a_run_that_is_cut_off_keeps_what_it_has_measured(measured, tmp_path, capsys):
    with pytest.raises(KeyboardInterrupt):
        measured([("uno", lambda: [ROW]), ("dos", raising(KeyboardInterrupt()))])
    assert json.loads((tmp_path / "gpu.json").read_text())["rows"] == [ROW]
    told = capsys.readouterr().out
    assert "8 x 40" in (tmp_path / "gpu.md").read_text() and "x  2.00" in told
    assert "copia 4000 GB/s (3000 si mueve 64 MiB)" in told


def test_a_part_that_fails_is_noted_and_the_next_ones_are_measured(measured, capsys):
    parts = [("uno", raising(ValueError("no es\nasí"))), ("dos", lambda: [ROW]), ("tres", raising(AssertionError()))]
    code, result, table = measured(parts, "--learn")
    assert code == 1 and result["rows"] == [{"op": "uno", "failed": "no es"}, ROW,
                                            {"op": "tres", "failed": "AssertionError()"}]
    assert "8 x 40" in table and table.endswith("\n- uno: no es\n- tres: AssertionError()\n")
    told = capsys.readouterr()
    assert "uno: FALLA: no es" in told.out and "fallan 2" in told.out and "Traceback" in told.err
    assert "No se guarda nada" in told.out
    code, _, table = measured([("dos", lambda: [ROW])])
    assert code == 0 and "Fallan" not in table


def test_a_lost_card_ends_the_run(gpu, measured, monkeypatch, capsys):
    lost = RuntimeError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(gpu.torch.cuda, "synchronize", raising(lost))
    code, result, _ = measured([("uno", lambda: [ROW]), ("dos", raising(lost)), ("tres", lambda: [ROW])])
    assert code == 1 and result["rows"] == [ROW, {"op": "dos", "failed": str(lost)}]
    assert "ya no responde a este proceso (CUDA error: an illegal memory" in capsys.readouterr().out


def test_ours_without_a_peer_is_a_table_too(gpu):
    own = {**ROW, "peer": speeds.OTHER_KERNELS}
    assert len(gpu.markdown({"rows": [own]}).splitlines()) == 3 and len(gpu.markdown({"rows": []}).splitlines()) == 2


def test_more_compiled_cases_than_one_function_may_have(gpu, gpu_cases, gpu_measure, measured, monkeypatch):
    """Their closures share one code object, of which torch compiles eight at most; and backward repeats over a
    forward."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(gpu_cases, "ours", lambda run: gpu_cases.Contestant("ours", run, lambda: ops.using("fused")))
    makers = [functools.partial(gpu_cases.activation_case, "swiglu", 8, 8 * columns, torch.bfloat16, "cpu")
              for columns in range(1, 6)]
    makers += [functools.partial(gpu_cases.norm_case, "add_rms_norm", 8, 40, torch.bfloat16, "cpu"),
               functools.partial(gpu_cases.loss_case, 8, 41, torch.bfloat16, "cpu"),
               functools.partial(gpu_cases.rotary_case, 32, 64, torch.bfloat16, "cpu", tokens=64)]
    parts = [(str(number), functools.partial(gpu.case_rows, make, 1, gpu_measure.timer("cpu"), {"copy": 1e9}))
             for number, make in enumerate(makers)]
    code, result, _ = measured(parts)
    assert code == 0, [row for row in result["rows"] if "failed" in row]
    peers = [row["peer"] for row in result["rows"]]
    assert peers.count("torch.compile") == peers.count("torch") == 2 * len(makers) - 1


# ---- Time ------------------------------------------------------------------------------------------------------------


def test_a_sample_waits_in_the_queue_until_it_is_whole(gpu_measure, monkeypatch):
    """Otherwise the time measured for short kernels would be Python's."""
    done, now = [], [0.0]

    def call():
        done.append("call")
        now[0] += 1e-3

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            done.append("event")

        synchronize = elapsed_time = lambda *_: 5.0

    monkeypatch.setattr(gpu_measure.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", done.append)
    clock = gpu_measure.timer("cuda")
    assert clock(call, 10) == 0.5
    assert done == ["call", done[1], "event", *["call"] * 10, "event"]
    assert 10 * 1e-3 < done[1] / gpu_measure.CLOCK_HZ < gpu_measure.MOST_PAUSE_S
    done.clear()
    clock(call, 1)  # for a single long call there is nothing to wait for, nor time to lose
    assert done == ["event", "call", "event"]
    done.clear()
    clock(call, 5000)
    assert isinstance(done[1], int) and done[1] == gpu_measure.CLOCK_HZ * gpu_measure.MOST_PAUSE_S


def test_a_sample_of_short_calls_fits_into_the_queue(gpu_measure):
    asked, playing = [], {"ours": (lambda: None, contextlib.nullcontext)}
    gpu_measure.take_turns(playing, 2, lambda call, times: asked.append(times) or 1e-4)
    assert asked == [1, 3, gpu_measure.MOST_CALLS, gpu_measure.MOST_CALLS]


@pytest.mark.parametrize("ms, times", [(1e4, [1, 1, 1]), (5.0, [1, 3, 4, 4])])
def test_what_lasts_long_is_called_no_oftener_than_needed(gpu_measure, ms, times):
    asked, called = [], []

    def clock(call, times):
        asked.append(times)
        for _ in range(times):
            call()
        return ms

    gpu_measure.take_turns({"ours": (lambda: called.append(1), contextlib.nullcontext)}, 2, clock)
    assert asked == times and len(called) == 1 + sum(times)


def test_small_copies_go_around_among_more_than_the_cache_holds(gpu_measure, monkeypatch):
    monkeypatch.setattr(gpu_measure, "SMALL_VALUES", 8)
    moved = []
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, other: moved.append((self.data_ptr(), other.data_ptr())))
    copy = gpu_measure.small_copies("cpu")
    for _ in range(2 * gpu_measure.SMALL_PAIRS):
        copy()
    pairs = moved[:gpu_measure.SMALL_PAIRS]
    assert len({pointer for pair in pairs for pointer in pair}) == 2 * gpu_measure.SMALL_PAIRS and moved == pairs * 2


@pytest.mark.parametrize("share, sets", [(0.0, 1), (0.4, 1), (0.6, 2), (2.5, 5)])
def test_what_a_call_reads_and_writes_has_left_the_cache(gpu_cases, gpu_measure, monkeypatch, share, sets):
    """share: how much of the inputs the card's cache holds."""
    case = on_the_cpu(gpu_cases.activation_case("swiglu", 8, 40, torch.bfloat16, "cpu", compiled=False))
    (x,), read, wrote = case.inputs, [], []
    monkeypatch.setattr(gpu_measure, "cache_bytes", lambda device: int(share * x.nbytes))
    case.contestants = [gpu_cases.Contestant("ours", lambda x: read.append(x.data_ptr()) or 2 * x)]
    grad = torch.autograd.grad

    def gradients(outputs, inputs, upstream, **options):
        read.append(upstream[0].data_ptr())
        found = grad(outputs, inputs, upstream, **options)
        wrote.append(found[0].data_ptr())
        return found

    monkeypatch.setattr(torch.autograd, "grad", gradients)
    for direction in case.work:
        (call, _), = gpu_measure.calls(case, direction).values()
        read.clear()
        for _ in range(3 * sets):
            call()
        assert len(set(read)) == sets == len(set(read[:sets])) and read[:sets] * 3 == read
    assert all(len(set(wrote[first:first + sets])) == sets for first in range(2 * sets))


@pytest.mark.parametrize("device, place", [("cuda", "cuda"), ("cpu", "cpu"), ("meta", "cpu")])
def test_numbers_for_a_card_are_drawn_there(gpu_cases, monkeypatch, device, place):
    generator, randn = MagicMock(), MagicMock()
    monkeypatch.setattr(torch, "Generator", generator)
    monkeypatch.setattr(torch, "randn", randn)
    gpu_cases.drawn(2, 3, dtype=torch.bfloat16, device=device)
    assert generator.call_args.args == (place,) and randn.call_args.kwargs["device"] == place
    randn.return_value.to.assert_called_once_with(device, torch.bfloat16)


@pytest.mark.parametrize("kind, drawn", [("rms_norm", 2), ("layer_norm", 3), ("add_rms_norm", 3),
                                         ("add_layer_norm", 4)])
def test_no_residual_is_drawn_for_nothing(gpu_cases, monkeypatch, kind, drawn):
    shapes, draw = [], gpu_cases.drawn
    monkeypatch.setattr(gpu_cases, "drawn", lambda *shape, **options: shapes.append(shape) or draw(*shape, **options))
    case = gpu_cases.norm_case(kind, 8, 40, torch.bfloat16, "cpu", compiled=False)
    assert len(shapes) == drawn == len(case.inputs)


def test_few_norms_are_compiled(gpu, gpu_cases):
    """Two of the five widths, so that everything takes minutes."""
    made = [make for section, make in gpu_cases.cases(gpu.build_parser().parse_args([])) if section == "norms"]
    widths = {make.args[2] for make in made if make.keywords.get("compiled", True)}
    assert widths == set(gpu_cases.COMPILED_COLUMNS) < set(gpu_cases.NORM_COLUMNS) == {make.args[2] for make in made}


def test_other_widths_and_some_models_alone(gpu, gpu_cases, gpu_steps):
    """What there is little time for on a rented card."""
    args = gpu.build_parser().parse_args(["--only", "norms,step", "--columns", "40,5120", "--models", "bert-base"])
    assert [name for name, _ in gpu.parts(args, None, {}) if "norm" not in name] == ["bert-base"]
    assert {make.args[2] for section, make in gpu_cases.cases(args) if section == "norms"} == {40, 5120}
    assert {make.args[0] for make in gpu_steps.trainings("cpu")} == {*gpu_steps.MODELS} - {"gpt2"}
    args = gpu.build_parser().parse_args(["--head-width", "40,80", "--seq-len", "64"])
    made = [make for section, make in gpu_cases.cases(args) if section in ("attention", "documents", "rotary")]
    assert {make.args[1] for make in made} == {40, 80}
    for flag, value, told in (("--models", "gpt3", "'gpt3' no existe; hay: gpt2, bert-base"),
                              ("--head-width", "64,33", "33 no es un múltiplo de 8 hasta 128")):
        with pytest.raises(UserError, match=re.escape(told)):
            gpu.build_parser().parse_args([flag, value])


def test_what_is_learnt_has_the_names_by_which_the_operations_ask(gpu, gpu_cases, gpu_measure, monkeypatch,
                                                                      tmp_path, capsys):
    asked, takes = {}, ops._takes

    def heard(op, x, size, *, on_gpu=(), form="", width=0):
        asked[op, x.dtype, form, width] = size
        return takes(op, x, size, form=form, width=width)

    monkeypatch.setattr(ops, "_takes", heard)
    monkeypatch.setattr(gpu.cuda_extension, "speeds_file", lambda: tmp_path / "speeds.json")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Una tarjeta")
    rows = []
    for case in map(on_the_cpu, cases(gpu_cases)):
        for direction in case.work:
            samples = {contestant.name: [1.0 if contestant.name == "ours" else 2.0] for contestant in case.contestants}
            rows += gpu_measure.rows_of(case, direction, samples, None, {"copy": 1e9, "matmul": 1e9})
        if case.op == "total_norm":
            with case.contestants[0].context():
                case.contestants[0].run(*case.inputs)
        elif case.op != "cross_entropy":  # its case has the logits, and not what they are computed from
            case.contestants = case.contestants[:1]
            gpu_measure.calls(case, gpu_cases.BACKWARD)
    hidden, weight = torch.ones(8, 16, dtype=torch.bfloat16), torch.ones(41, 16, dtype=torch.bfloat16)
    with ops.using("fused"):
        ops.linear_cross_entropy(hidden, weight, torch.zeros(8, dtype=torch.int64))
    gpu.learn(rows)
    assert "gelu_tanh" in capsys.readouterr().out
    known = speeds.read(tmp_path / "speeds.json")
    assert {kind: [(size, 2.0)] for kind, size in asked.items()} == known.cells
    norm = next(row for row in rows if row["op"] == "rms_norm")
    gpu.learn([{**norm, "peer_ms": norm["ours_ms"] / 2}])
    changed = speeds.read(tmp_path / "speeds.json").cells
    assert [kind[0] for kind in known.cells if known.cells[kind] != changed[kind]] == ["rms_norm"]
    (tmp_path / "speeds.json").write_text("7")  # damaged: what is measured now takes its place
    gpu.learn([norm])
    assert [kind[0] for kind in speeds.read(tmp_path / "speeds.json").cells] == ["rms_norm"]


def test_hopper_is_measured_with_and_without_what_it_alone_has(gpu, gpu_cases, monkeypatch):
    monkeypatch.setattr(ops, "using", lambda *_: contextlib.nullcontext())
    for capability, names in (((9, 0), ["ours", speeds.OTHER_KERNELS]), ((8, 6), ["ours"])):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        contestants = gpu_cases.our_attentions(lambda qkv: os.environ.get("AURA_CUDA_ISA"), "cuda")
        assert [contestant.name for contestant in contestants] == names
        for contestant, wanted in zip(contestants, (None, "sm_80"), strict=False):
            with contestant.context():
                assert contestant.run(None) == wanted
        assert "AURA_CUDA_ISA" not in os.environ
    rows = [{"op": "attention", "variant": "bf16", "shape": [1], "direction": "forward", "peer": peer, "ours_ms": 1.0,
             "peer_ms": 1.0 / ratio, "ratio": ratio, "ratio_min": ratio, "ratio_max": ratio, "share_of_ceiling": 0.5,
             "peer_share_of_ceiling": 0.5 * ratio}
            for peer, ratio in ((speeds.OTHER_KERNELS, 1.6), ("sdpa flash", 0.9), (gpu_cases.EAGER, 1.2),
                                ("sdpa cudnn", 0.8))]
    assert [line.split(" | ")[4] for line in gpu.markdown({"rows": rows}).splitlines()[2:]] == [
        "sdpa flash", speeds.OTHER_KERNELS, gpu_cases.EAGER]


WRONG = {
    "result": lambda x, weight: 1.1 * x * weight,
    "result that is NaN": lambda x, weight: x * weight * math.nan,
    "gradient": lambda x, weight: torch.nn.functional.rms_norm(x.detach(), weight.shape, weight, 1e-5) + 0 * x,
    "gradient that is NaN": lambda x, weight: torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-5) + (
        (weight - weight).sqrt()),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_peer_that_is_wrong_is_left_out(gpu_cases, gpu_measure, capsys, wrong):
    case = on_the_cpu(gpu_cases.norm_case("rms_norm", 8, 40, torch.bfloat16, "cpu", compiled=False))
    case.contestants.append(gpu_cases.Contestant("other", WRONG[wrong]))
    assert list(gpu_measure.check(case)) == ["ours", "torch"] == [contestant.name for contestant in case.contestants]
    assert capsys.readouterr().err.startswith("  other no se mide: resultado rechazado: other, rms_norm bfloat16")


@pytest.mark.parametrize("name", ["ours", speeds.OTHER_KERNELS])
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_ours_and_wrong_fails(gpu, gpu_cases, gpu_measure, wrong, name):
    case = on_the_cpu(gpu_cases.norm_case("rms_norm", 8, 40, torch.bfloat16, "cpu", compiled=False))
    case.contestants[1] = gpu_cases.Contestant(name, WRONG[wrong])
    (row,) = gpu.rows_with_room("normas", lambda: gpu.case_rows(lambda: case, 1, gpu_measure.timer("cpu"), {}))
    assert row["op"] == "normas" and row["failed"].startswith(f"resultado rechazado: {name}, rms_norm")


def test_a_wrong_gradient_of_the_loss_is_left_out(gpu_cases, gpu_measure, capsys):
    case = on_the_cpu(gpu_cases.loss_case(8, 41, torch.bfloat16, "cpu", compiled=False))
    case.contestants[1].run = lambda logits: (gpu_cases.F.cross_entropy(logits.float(), torch.zeros(8).long()), logits)
    assert list(gpu_measure.check(case)) == ["ours"] and "rechazado: torch, cross_entropy" in capsys.readouterr().err


@pytest.mark.parametrize("losses", [(2.0, 2.1), (math.nan, 2.0), (2.0, math.nan), (math.inf, math.inf)])
def test_other_losses_than_torchs_are_refused(gpu_measure, gpu_steps, capsys, losses):
    with pytest.raises(gpu_measure.Rejected, match="las pérdidas antes del primer paso no coinciden"):
        gpu_steps.same_loss(dict(zip(("ours", "sdpa"), losses, strict=True)))
    assert gpu_steps.same_loss({"ours": 2.0, "sdpa": 2.01, "nanoGPT": losses[1] + 0.1}) == ["ours", "sdpa"]
    assert "nanoGPT no se mide" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_says_so(gpu, capsys):
    assert gpu.main([]) == 0
    assert capsys.readouterr().out.startswith("Omitido: hace falta una GPU")
