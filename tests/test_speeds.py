"""aura/speeds.py, and what --attention auto makes of it."""

import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from aura import compilation, cuda_extension, extension, ops, selfcheck, speeds
from aura.errors import UserError
from aura.models import bert, gpt, hrm

H200 = Path(speeds.__file__).with_name("speeds-NVIDIA-H200.json")
HALF = torch.bfloat16
NORM, CAUSAL = ("layer_norm", HALF, "", 0), ("attention", HALF, "causal", 64)


def row(op, variant, shape, direction, peer, ours_ms, peer_ms):
    return {"op": op, "variant": variant, "shape": list(shape), "direction": direction, "peer": peer,
            "ours_ms": ours_ms, "peer_ms": peer_ms}


def test_forward_and_backward_count_together_against_the_fastest_that_has_both():
    shape, case = (8, 2048, 32, 64), ("attention", "bfloat16, causal")
    rows = [row(*case, shape, "forward", "sdpa flash", 1.0, 2.0), row(*case, shape, "backward", "sdpa flash", 3.0, 2.4),
            row(*case, shape, "forward", "sdpa cudnn", 1.0, 1.5), row(*case, shape, "backward", "sdpa cudnn", 3.0, 2.7),
            row(*case, shape, "forward", "sdpa efficient", 1.0, 0.1),
            row(*case, shape, "forward", speeds.OTHER_KERNELS, 1.0, 0.1),
            row(*case, shape, "backward", speeds.OTHER_KERNELS, 3.0, 0.1),
            row("layer_norm", "bfloat16", (16, 768), "forward", "torch", 1.0, 2.0),
            row("layer_norm", "bfloat16", (16, 768), "forward", "torch.compile", 1.0, 0.1),
            row("layer_norm", "bfloat16", (16, 4096), "forward", "torch", 1.0, 0.5),
            row("training step gpt2", "bf16", (32, 1024), "step", "sdpa", 1.0, 2.0)]
    cells = speeds.learnt(rows).cells
    assert cells == {CAUSAL: [(2048, pytest.approx(4.2 / 4))], NORM: [(768, 2.0), (4096, 0.5)]}


def test_the_nearest_measured_size_decides_and_what_was_not_measured_is_torchs(tmp_path):
    path = tmp_path / "speeds.json"
    assert speeds.read(path) is None
    speeds.write(path, speeds.Speeds({NORM: [(768, 2.0), (4096, 0.5)], CAUSAL: [(512, 0.9)]}))
    known = speeds.read(path)
    assert [known.wins(NORM, size) for size in (0, 1, 768, 1700, 1800, 9000)] == [True, True, True, True, False, False]
    assert not known.wins(CAUSAL, 512) and not known.wins(("rms_norm", HALF, "", 0), 768)
    assert not known.wins(("layer_norm", torch.float16, "", 0), 768)
    assert known.operations() == ["layer_norm"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_model_can_ask(monkeypatch, dynamic):
    monkeypatch.setattr(ops, "_gpu", speeds.Speeds({NORM: [(4096, 0.5), (768, 2.0)]}))

    def ask(x):
        return x + ops._gpu.wins(("layer_norm", x.dtype, "", 0), x.shape[-1])

    torch._dynamo.reset()
    compiled = torch.compile(ask, backend="eager", fullgraph=True, dynamic=dynamic)
    assert [compiled(torch.zeros(2, size, dtype=HALF))[0, 0] for size in (700, 1700, 1800, 9000)] == [1, 1, 0, 0]


def test_a_compiled_model_can_ask_what_we_measured(monkeypatch, autocast_to):
    monkeypatch.setattr(ops, "_gpu", speeds.read(H200))
    monkeypatch.setattr(ops, "_choice", "fused")
    kinds, sizes = list(ops._gpu.cells), (1, 700, 1500, 50_257)
    given = [on_card(8, dtype=torch.float32 if (op, dtype) == ("cross_entropy", HALF) else dtype)
             for op, dtype, *_ in kinds]
    autocast_to(HALF)

    def ask(x):
        return x, [ops._takes(op, like, size, form=form, width=width)
                   for like, (op, _, form, width) in zip(given, kinds, strict=True) for size in sizes]

    torch._dynamo.reset()
    answers = torch.compile(ask, backend="eager", fullgraph=True)(torch.zeros(1))[1]
    assert answers == [ops._gpu.wins(kind, size) for kind in kinds for size in sizes]


def test_what_we_measured_is_what_models_under_autocast_ask_for(monkeypatch):
    asked, takes = set(), ops._takes

    def heard(op, x, size, *, form="", width=0, **rest):
        # Of float32 are the norms of what no product of 16 bits has just made, and the loss, which asks by its logits.
        if x.dtype == HALF:
            asked.add((op, HALF, form, width))
        return takes(op, x, size, form=form, width=width, **rest)

    monkeypatch.setattr(ops, "_takes", heard)
    tokens, lengths = torch.zeros(2, 16, dtype=torch.long), torch.tensor([16, 9])
    documents = torch.tensor([0, 5, 16, 32])
    with torch.no_grad(), torch.autocast("cpu", HALF):
        for heads in (2, 1):  # of 64, of 128
            sizes = {"vocab_size": 31, "n_layer": 1, "n_head": heads, "n_embd": 128}
            gpt.GPT(gpt.GPTConfig(**sizes, seq_len=16))(tokens, tokens)
            hrm.HRM(hrm.HRMConfig(**sizes, seq_len=16, n_ff=32))(tokens, tokens, cu_seqlens=documents)
            bert.Bert(bert.BertConfig(**sizes, n_ff=32))(tokens, tokens, lengths)
    known = set(speeds.read(H200).cells)
    assert len(asked) > 10 and asked - known == {("sigmoid_gate", HALF, "", 0)}  # which nobody measures
    assert ("cross_entropy", HALF, "", 0) in known


def test_what_we_measured_is_installed(tmp_path):
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", tmp_path]
    subprocess.run(command, cwd=compilation.ROOT, check=True, timeout=60)
    installed, ours = ({path.name for path in folder.glob("*.json")} for folder in (tmp_path / "aura", H200.parent))
    assert installed == ours and H200.name in ours


@pytest.mark.parametrize("content", ["", "[[1]]", "[[1, 2, 3, 4, 5]]", "7", '[["rms_norm", "half_", "", 0, []]]',
                                     "[" * 200_000], ids=lambda content: content[:40])
def test_a_damaged_file_is_one_line_with_the_way_out(tmp_path, content):
    path = tmp_path / "speeds.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"speeds.json' está dañado: bórrelo, o mida otra vez"):
        speeds.read(path)


@pytest.fixture
def card(tmp_path, monkeypatch):
    """A card of which nothing is known, whose kernels need no building. Gives the file of its speeds, and how often its
    kernels were loaded."""
    if not extension.has_ops(extension.load()):
        pytest.skip(extension.status())
    loaded = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Una tarjeta")
    monkeypatch.setattr(cuda_extension, "speeds_file", lambda: tmp_path / "speeds.json")
    monkeypatch.setattr(cuda_extension, "load", lambda: loaded.append(True))
    return SimpleNamespace(file=tmp_path / "speeds.json", loaded=loaded)


def on_card(*shape, dtype=HALF):
    """What the choice looks at in a tensor on a GPU."""
    return SimpleNamespace(shape=shape, dtype=dtype, device=torch.device("cuda"), is_cuda=True)


def test_auto_goes_by_what_was_measured_on_the_card(card):
    speeds.write(card.file, speeds.Speeds({NORM: [(768, 2.0), (4096, 0.5)], CAUSAL: [(512, 1.2)]}))
    with ops.using("auto", "cuda"):
        assert card.loaded == [True]
        told = ops.describe(torch.device("cuda"))
        assert told == ("por lo medido en esta tarjeta, núcleos propios de CUDA donde son más rápidos (attention, "
                        "layer_norm), torch en lo demás")
        assert ops._takes("layer_norm", on_card(8, 768), 768) and not ops._takes("layer_norm", on_card(8, 8192), 8192)
        assert not ops._takes("rms_norm", on_card(8, 768), 768)
        q = on_card(2, 600, 3, 4, 64)
        assert ops._takes_heads(q, True, None, 1.0) and not ops._takes_heads(q, False, None, 1.0)
        assert not ops._takes_heads(q, True, torch.zeros(2), 1.0)
        assert not ops._takes_heads(on_card(2, 600, 4, 128), True, None, 1.0)
        assert not any(ops._takes_heads(q, True, None, scale) for scale in (0.0, -0.1, math.inf))
        assert ops._takes("layer_norm", torch.ones(1), 8192)  # on the CPU nothing changes
    with ops.using("fused", "cuda"):
        assert ops._takes("rms_norm", on_card(8, 8192), 8192)


@pytest.fixture
def autocast_to():
    """A function that turns on a card's autocast for a dtype, here where there is no card."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")

    def turn_on(dtype):
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", dtype)

    yield turn_on
    torch.set_autocast_enabled("cuda", before[0])
    torch.set_autocast_dtype("cuda", before[1])


def test_the_loss_asks_by_the_dtype_of_its_logits(card, autocast_to):
    """Models end in a norm that autocast leaves in float32, and its product with the head is in 16 bits."""
    speeds.write(card.file, speeds.Speeds({("cross_entropy", HALF, "", 0): [(32_000, 9.0)], NORM: [(768, 2.0)]}))
    hidden = on_card(8, 768, dtype=torch.float32)
    with ops.using("auto", "cuda"):
        assert not ops._takes("cross_entropy", hidden, 50_257)
        autocast_to(HALF)
        assert ops._takes("cross_entropy", hidden, 50_257) and not ops._takes("layer_norm", hidden, 768)
        autocast_to(torch.float16)
        assert not ops._takes("cross_entropy", hidden, 50_257)


def test_auto_builds_nothing_where_nobody_has_measured_or_nothing_is_faster(card):
    for known in (None, speeds.Speeds({NORM: [(768, 0.9)]})):
        if known:
            speeds.write(card.file, known)
        with ops.using("auto", "cuda"):
            assert not card.loaded and not ops._takes("layer_norm", on_card(8, 768), 768)
            assert "benchmarks/gpu.py --learn" in ops.describe(torch.device("cuda"))


def test_a_card_we_have_measured_need_not_be_until_its_owner_does(card, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    qkv = on_card(2, 2048, 3, 4, 64)
    with ops.using("auto", "cuda"):
        told = ops.describe(torch.device("cuda"))
        assert told.startswith("por lo medido en una NVIDIA H200, núcleos propios de CUDA donde son más rápidos (")
        assert card.loaded and ops._takes_heads(qkv, True, torch.zeros(2), 1.0)
    speeds.write(card.file, speeds.Speeds({NORM: [(768, 2.0)]}))
    with ops.using("auto", "cuda"):
        assert "esta tarjeta" in ops.describe(torch.device("cuda"))
        assert not ops._takes_heads(qkv, True, torch.zeros(2), 1.0)
    card.file.unlink()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200 NVL")
    with ops.using("auto", "cuda"):
        assert "--learn" in ops.describe(torch.device("cuda")) and not ops._takes_heads(qkv, True, torch.zeros(2), 1.0)


def test_the_report_tells_what_auto_does_on_the_card(card, monkeypatch, capsys):
    for name in ("_choice", "_gpu"):
        monkeypatch.setattr(ops, name, getattr(ops, name))
    monkeypatch.setattr(selfcheck.backend, "local_device", lambda rank: torch.device("cuda"))
    monkeypatch.setattr(selfcheck, "CASES", [])
    monkeypatch.setattr(sys, "argv", ["aura.ops"])
    speeds.write(card.file, speeds.Speeds({NORM: [(768, 2.0)]}))
    assert selfcheck.main() == 0
    assert "En cuda: por lo medido en esta tarjeta, núcleos propios" in capsys.readouterr().out


def test_auto_does_without_kernels_that_cannot_be_had(card, monkeypatch):
    def nothing():
        raise compilation.Unavailable("no se encuentra nvcc")

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(cuda_extension, "speeds_file", nothing)
    with ops.using("auto", "cuda"):
        assert not ops._takes("layer_norm", on_card(8, 768), 768)
