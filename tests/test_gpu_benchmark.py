"""benchmarks/gpu.py as far as it goes without a card: its cases with the CPU's kernels, its rows and its table."""

import contextlib
import json
import os

import pytest
import torch

from aura import ops, speeds


def on_the_cpu(case):
    case.contestants[0].context = lambda: ops.using("fused")
    return case


def cases(gpu):
    bfloat16 = torch.bfloat16
    for kind in ("layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm"):
        yield gpu.norm_case(kind, 8, 40, bfloat16, "cpu", compiled=False)
    for kind in ("gelu_tanh", "swiglu"):
        yield gpu.activation_case(kind, 8, 40, bfloat16, "cpu", compiled=False)
    yield gpu.loss_case(8, 41, bfloat16, "cpu", compiled=False)
    yield gpu.rotary_case(32, 64, bfloat16, "cpu", tokens=64, compiled=False)
    for causal in (True, False):
        yield gpu.attention_case(32, 64, causal, bfloat16, "cpu", tokens=64)
    yield gpu.documents_case(32, 64, bfloat16, "cpu", tokens=64)


def test_every_case_is_checked_timed_and_told(gpu):
    rows, ceilings = [], {"copy": 1e9, "matmul": 1e9}
    for case in map(on_the_cpu, cases(gpu)):
        errors = gpu.check(case)
        assert "ours" in errors and len(errors) > 1
        assert max(error[0] for error in errors.values()) > 0
        for direction in case.work:
            samples = gpu.take_turns(gpu.calls(case, direction), 1, gpu.timer("cpu"))
            found = gpu.rows_of(case, direction, samples, errors, ceilings)
            assert [row["peer"] for row in found] == [name for name in errors if name != "ours"]
            assert all(row["ratio"] > 0 and row["share_of_ceiling"] > 0 for row in found)
            rows += found
    table = gpu.markdown({"rows": rows})
    assert len(table.splitlines()) == 2 + 2 * 10 + 1 and "attention, bfloat16, documents" in table


@pytest.mark.parametrize("scores", [1, 2 * 32**2, 2**26])
def test_the_exact_attention_is_the_same_in_parts(gpu, monkeypatch, scores):
    monkeypatch.setattr(gpu, "EXACT_SCORES", scores)
    case = gpu.attention_case(32, 64, True, torch.float64, "cpu", tokens=64)
    whole, parts = gpu.sdpa(True)(*case.inputs), case.exact(*case.inputs)
    upstream = torch.randn_like(whole)
    for got, wanted in ((parts, whole), (torch.autograd.grad(parts, case.inputs, upstream)[0],
                                         torch.autograd.grad(whole, case.inputs, upstream)[0])):
        assert torch.allclose(got, wanted, rtol=1e-12, atol=1e-12)


def test_a_run_that_is_cut_off_keeps_what_it_has_measured(gpu, monkeypatch, tmp_path, capsys):
    def refused():
        raise SystemExit("resultado rechazado")

    row = {"op": "rms_norm", "variant": "bfloat16", "shape": [8, 40], "direction": "forward", "peer": "torch",
           "ours_ms": 1.0, "peer_ms": 2.0, "ratio": 2.0, "ratio_min": 1.0, "ratio_max": 3.0, "ceiling": "copy",
           "share_of_ceiling": 0.5, "peer_share_of_ceiling": 0.25}
    monkeypatch.setattr(gpu.cuda_extension, "load", lambda: None)
    monkeypatch.setattr(gpu.torch.cuda, "get_device_name", lambda: "una tarjeta")
    monkeypatch.setattr(gpu.torch.cuda, "get_device_capability", lambda: (8, 6))
    monkeypatch.setattr(gpu, "timer", lambda device: None)
    monkeypatch.setattr(gpu, "ceilings", lambda clock: {"copy": 1e9, "matmul": 1e9})
    monkeypatch.setattr(gpu, "parts", lambda *args: [("uno", lambda: [row]), ("dos", refused)])
    files = tmp_path / "gpu.json", tmp_path / "gpu.md"
    with pytest.raises(SystemExit):
        gpu.main(["--json", str(files[0]), "--markdown", str(files[1])])
    assert json.loads(files[0].read_text())["rows"] == [row] and "8 x 40" in files[1].read_text()
    assert "x  2.00" in capsys.readouterr().out


def test_what_is_learnt_has_the_names_by_which_the_operations_ask(gpu, monkeypatch, tmp_path, capsys):
    asked, takes = {}, ops._takes

    def heard(op, x, size, *, on_gpu=(), form="", width=0):
        asked[op, x.dtype, form, width] = size
        return takes(op, x, size, form=form, width=width)

    monkeypatch.setattr(ops, "_takes", heard)
    monkeypatch.setattr(gpu.cuda_extension, "speeds_file", lambda: tmp_path / "speeds.json")
    rows = []
    for case in map(on_the_cpu, cases(gpu)):
        for direction in case.work:
            samples = {contestant.name: [1.0 if contestant.name == "ours" else 2.0] for contestant in case.contestants}
            rows += gpu.rows_of(case, direction, samples, None, {"copy": 1e9, "matmul": 1e9})
        if case.op != "cross_entropy":  # whose case has the logits, and not what they are made of
            case.contestants = case.contestants[:1]
            gpu.calls(case, gpu.BACKWARD)
    hidden, weight = torch.ones(8, 16, dtype=torch.bfloat16), torch.ones(41, 16, dtype=torch.bfloat16)
    with ops.using("fused"):
        ops.linear_cross_entropy(hidden, weight, torch.zeros(8, dtype=torch.int64))
    gpu.learn(rows)
    assert "gelu_tanh" in capsys.readouterr().out
    known = speeds.read(tmp_path / "speeds.json")
    assert {kind: [(size, 2.0)] for kind, size in asked.items()} == known.cells


def test_hopper_is_measured_with_and_without_what_it_alone_has(gpu, monkeypatch):
    monkeypatch.setattr(gpu.ops, "using", lambda *_: contextlib.nullcontext())
    for capability, names in (((9, 0), ["ours", speeds.OTHER_KERNELS]), ((8, 6), ["ours"])):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        contestants = gpu.our_attentions(lambda qkv: os.environ.get("AURA_CUDA_ISA"), "cuda")
        assert [contestant.name for contestant in contestants] == names
        for contestant, wanted in zip(contestants, (None, "sm_80"), strict=False):
            with contestant.context():
                assert contestant.run(None) == wanted
        assert "AURA_CUDA_ISA" not in os.environ
    rows = [{"op": "attention", "variant": "bf16", "shape": [1], "direction": "forward", "peer": peer, "ours_ms": 1.0,
             "peer_ms": 1.0 / ratio, "ratio": ratio, "ratio_min": ratio, "ratio_max": ratio, "share_of_ceiling": 0.5,
             "peer_share_of_ceiling": 0.5 * ratio}
            for peer, ratio in ((speeds.OTHER_KERNELS, 1.6), ("sdpa flash", 0.9), ("sdpa cudnn", 0.8))]
    assert [line.split(" | ")[4] for line in gpu.markdown({"rows": rows}).splitlines()[2:]] == ["sdpa flash",
                                                                                                speeds.OTHER_KERNELS]


def test_a_wrong_result_is_refused(gpu):
    case = on_the_cpu(gpu.norm_case("rms_norm", 8, 40, torch.bfloat16, "cpu", compiled=False))
    case.contestants[1].run = lambda x, weight: 1.1 * x * weight
    with pytest.raises(SystemExit, match="resultado rechazado: torch, rms_norm"):
        gpu.check(case)


def test_a_wrong_gradient_of_the_loss_is_refused(gpu):
    case = on_the_cpu(gpu.loss_case(8, 41, torch.bfloat16, "cpu", compiled=False))
    case.contestants[1].run = lambda logits: (gpu.F.cross_entropy(logits.float(), torch.zeros(8).long()), logits)
    with pytest.raises(SystemExit, match="resultado rechazado: torch, cross_entropy"):
        gpu.check(case)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_says_so(gpu, capsys):
    gpu.main([])
    assert capsys.readouterr().out.startswith("Omitido: hace falta una GPU")
