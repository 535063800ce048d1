"""Tiny runs of the benchmarks of kernels and of training steps: what they write, not what they measure."""

import dataclasses
import importlib.util
import json
import math
import re
import sys
from types import SimpleNamespace

import pytest
import torch

from aura import ops
from aura.errors import UserError
from tests.support import ROOT, run

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
    import kernels_cases
    from kernels_table import LINES

    monkeypatch.setattr(kernels_cases, "OURS", choice)
    monkeypatch.setattr(kernels_cases, "HEADS", 2)
    monkeypatch.setattr(kernels_cases, "NORM_SHAPES", ((300, 48),))
    monkeypatch.setattr(kernels_cases, "GELU_SHAPES", ((300, 48),))
    monkeypatch.setattr(kernels_cases, "LINEAR_SHAPES", ((64, 256, 256),))
    monkeypatch.setattr(kernels_cases, "QUICK_LOSS_SHAPE", (6, 16, 40))
    monkeypatch.setattr(kernels_cases.products, "onednn_is_better", lambda: choice == "fused")
    monkeypatch.setattr(kernels.start, "times_as_long", lambda dtype: 1.7)
    path = tmp_path / "kernels.json"
    kernels.main(["--quick", "--threads", "1", "--seq-len", "40,130", "--rounds", "1", "--seconds", "0", "--markdown",
                  "--json", str(path)])
    result = json.loads(path.read_text())
    check_rows(result)
    rows = result["rows"]
    assert {row["op"] for row in rows} == {"attention", "layer_norm", "rms_norm", "gelu_tanh", "linear_cross_entropy",
                                           *["linear"] * (choice == "fused")}
    assert {row["dtype"] for row in rows} == {"fp32", "bf16"}
    assert {row["peer"] for row in rows} >= {"sdpa MATH", "sdpa FLASH_ATTENTION", "sdpa, one document at a time"}
    for row in rows:  # every one, ours and the peers, computes what it should
        bound = 2e-5 if row["dtype"] == "fp32" else 2e-2
        assert row["error"] < bound, row
        assert row["peer_error"] < 5 * bound, row
    assert all(note.startswith("SDPA ") for note in result["notes"])
    table = capsys.readouterr().out
    assert table.startswith("| frente a torch | ida, 1 hilo | vuelta, 1 hilo |")
    for line in LINES:
        if line.targets:
            assert f"| {line.label} |" in table
    [causal] = [entry for entry in result["summary"]
                if (entry["line"], entry["direction"]) == ("atención fp32 causal", "forward")]
    long = [row for row in rows if (row["variant"], row["dtype"], row["direction"], row["shape"][1])
            == ("causal, packed", "fp32", "forward", 130)]
    assert causal["ratio"] == pytest.approx(min(long, key=lambda row: row["peer_ms"])["ratio"])


@pytest.mark.parametrize("name", [path.stem for path in sorted((ROOT / "benchmarks").glob("*.py"))
                                  if "def build_parser" in path.read_text(encoding="utf-8")])
def test_every_number_of_every_benchmark_is_checked(load, name):
    """And what it takes by default is what it would take if it were written."""
    parser = load(name).build_parser()
    for action in parser._actions:
        action.required = False
    taken = vars(parser.parse_args([]))
    for action in parser._actions:
        if action.type is None or action.default is None:
            continue
        flag, word = action.option_strings[-1], str(action.default)
        if not isinstance(action.default, list):
            assert vars(parser.parse_args([flag, word]))[action.dest] == taken[action.dest]
        if isinstance(taken[action.dest], int | float):
            for bad in ("-1", "uno", "nan"):
                with pytest.raises(UserError, match=f"{flag}: .*{bad}"):
                    parser.parse_args([f"{flag}={bad}"])
        with pytest.raises(UserError, match=flag):
            parser.parse_args([flag, "¿eh?"])


def test_a_bad_argument_of_a_benchmark_is_one_line_and_code_2(tmp_path):
    assert run([ROOT / "benchmarks" / "hrm_memory.py", "--batch-size", "24,uno", "--preset", "2b"], tmp_path) == (
        2, "error: --preset: '2b' no es una de las opciones demo, 100m, 1b; --batch-size: '24,uno' "
        "no es una lista de números separados por comas (las opciones: hrm_memory.py --help)\n")


def test_what_cannot_be_measured_or_written_is_said_first(load, tmp_path):
    for name, words, message in (("kernels", ["--json", str(tmp_path / "no" / "a.json")], "no se puede escribir en"),
                                 ("kernels", ["--json", str(tmp_path)], "no se puede escribir en"),
                                 ("kernels", ["--seq-len", "64,0"], "se cuenta desde 1"),
                                 ("kernels", ["--threads", "0"], "se cuenta desde 1"),
                                 ("train_step", ["--seq-len", "1025"], "gpt2 llega a 1024"),
                                 ("train_step", ["--nanogpt", str(tmp_path)], "no tiene model.py")):
        with pytest.raises(UserError, match=re.escape(message)):
            load(name).main(words)


def test_kernels_leaves_out_bfloat16_where_its_products_would_take_most_of_the_time(load, monkeypatch):
    kernels = load("kernels")
    monkeypatch.setattr(kernels.start, "times_as_long", lambda dtype: 22.4)
    dtypes, [why] = kernels.worthwhile()
    assert dtypes == ["fp32"] and "22 veces lo que" in why and "--dtype fp32,bf16" in why
    monkeypatch.setattr(kernels.start, "times_as_long", lambda dtype: 1.7)
    assert kernels.worthwhile() == (["fp32", "bf16"], [])


def test_kernels_finds_a_wrong_gradient(load, monkeypatch):
    kernels = load("kernels")
    from kernels_cases import gelu_case

    case = gelu_case("fp32", (8, 16))
    wrong = kernels.Contestant("wrong", lambda x: (torch.nn.functional.gelu(x.detach(), approximate="tanh") + 0 * x,))
    right, other = kernels.outcome(case, case.contestants[1]), kernels.outcome(case, wrong)
    assert right["forward"][0] < 1e-6 > other["forward"][0]
    assert right["backward"][0] < 1e-6 and other["backward"][0] > 0.9


@pytest.mark.parametrize("worst", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_what_is_no_number_is_the_greatest_error(load, capsys, worst, place):
    """Whichever tensor of several it is in, and whatever max() makes of it."""
    kernels = load("kernels")
    references = [torch.ones(3, dtype=torch.float64), torch.ones(2, dtype=torch.float64)]
    results = [reference.float() for reference in references]
    assert kernels.measure.errors(results, references) == (0, 0)
    results[place][1] = worst
    found = kernels.measure.errors(results, references)
    assert found == (math.inf, math.inf)
    row = {"op": "gelu_tanh", "dtype": "fp32", "variant": "plain", "direction": "forward", "peer": "F.gelu",
           "shape": [3], "error": found[0], "peer_error": 1e-7}
    kernels.print_errors([row])
    assert "en 1 de 1 comparaciones" in capsys.readouterr().out


def test_slow_peers_leave_early(load, monkeypatch):
    measure = load("kernels").measure
    now = [0.0]
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def function(seconds):
        def run():
            now[0] += seconds

        return run

    functions = {"ours": function(0.001), "fast": function(0.001), "slow": function(0.03)}
    kinds = {"ours": "ours", "fast": "torch", "slow": "torch"}
    samples = measure.take_turns(functions, kinds=kinds, rounds=4)
    assert [len(samples[name]) for name in functions] == [4, 4, 2]
    row = measure.comparison(samples["ours"], samples["slow"])
    assert row["rounds"] == 2 and row["ratio"] == pytest.approx(30)


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


# ---- Whole scripts --------------------------------------------------------------------------------------------------

# What train_script.py asks of a checkout of nanoGPT: these files; and of its train.py: these lines.
TRAIN = '''
import array, pickle, sys
given = dict(word.removeprefix("--").split("=") for word in sys.argv[1:])
folder = "data/" + given["dataset"] + "/"
vocabulary = pickle.load(open(folder + "meta.pkl", "rb"))["vocab_size"]
tokens = array.array("H", open(folder + "train.bin", "rb").read())
assert tokens.tolist() == [7, 8, 9] * 50 + [5] * 50 and vocabulary == 10, (tokens, vocabulary)
print("number of parameters: 0.01M")
for step in range(int(given["max_iters"]) + 1):
    print(f"iter {step}: loss {2.3 - step / 100:.4f}, time {4000 if step < 2 else 200:.2f}ms, mfu -100.00%")
'''


@pytest.fixture
def nanogpt(tmp_path):
    folder = tmp_path / "nanogpt"
    folder.mkdir()
    for name, text in {"train.py": TRAIN, "model.py": "", "configurator.py": ""}.items():
        (folder / name).write_text(text)
    return folder


class Board:
    """TensorBoard's writer, for nobody."""

    def add_scalar(self, *_):
        pass


@pytest.fixture
def our_script(load, monkeypatch):
    """train_script with our own script replaced by one that leaves what that one leaves; the commands it was given."""
    import train_tensordock
    from aura import dataset
    from aura.shards import ShardWriter

    script = load("train_script")
    started, asked = script.run, []

    def run(command, folder, threads):
        if command[1] == "train.py":
            return started(command, folder, threads)
        args = train_tensordock.build_parser().parse_args(command[2:])
        asked.append(args)
        if args.prepare:
            place = script.Path(args.data_dir, "muestra")
            splits = {}
            for split in ("train", "val"):
                with ShardWriter(place, split, 10, tokens_per_shard=150) as writer:
                    writer.write(torch.tensor([7, 8, 9] * 50 + [5] * 50).numpy())
                splits[split] = {"tokens": 200, "shards": writer.close()}
            ready = dataset.Dataset(place, {"splits": splits, "tokenizer": {"vocab_size": 10}})
            monkeypatch.setattr(script.dataset, "latest", lambda _: ready)
            return "", 1.0
        reporter = script.report.Reporter(args.output_dir, True, args.max_steps, name="training_log.csv")
        script.Path(args.output_dir).mkdir()
        with open(reporter.table, "w") as file:
            file.write(",".join(script.report.COLUMNS) + "\n")
        monkeypatch.setattr(reporter, "say", print)
        reporter.board, reporter.started, reporter.first = Board(), script.time.monotonic(), 0
        for step in range(1, args.max_steps + 1):
            reporter.count(args.batch_size * args.grad_accum * args.seq_len, 3.0 if step < 3 else 0.1)
            reporter.log(step, loss=2.31 - step / 100, **({"val_loss": 2.0} if step == args.max_steps else {}))
        return "", 2.0

    monkeypatch.setattr(script, "run", run)
    script.asked = asked
    return script


SMALL = ["--threads", "1", "--rounds", "2", "--steps", "6", "--skip", "2", "--seq-len", "16", "--batch-size", "2",
         "--grad-accum", "3", "--n-layer", "1", "--n-head", "1", "--n-embd", "8", "--vocab-size", "10"]


def test_train_script(our_script, nanogpt, tmp_path, capsys):
    path = tmp_path / "script.json"
    our_script.main([*SMALL, "--nanogpt", str(nanogpt), "--json", str(path)])
    [row] = json.loads(path.read_text())["rows"]
    assert row["ours_ms"] == pytest.approx(100) and row["peer_ms"] == pytest.approx(200)  # the first steps left out
    assert row["ratio"] == pytest.approx(2) and row["rounds"] == 2 and row["clock_ratio"] > 0
    assert row["ours_tokens_per_s"] == pytest.approx(2 * 3 * 16 / 0.1)
    assert row["loss_final"] == [pytest.approx(2.275), pytest.approx(2.275)]
    prepared, *trained = our_script.asked
    assert prepared.prepare and len(trained) == 2
    assert all((args.max_steps, args.seq_len, args.checkpoint_freq, args.sample_length) == (6, 16, 0, 0)
               for args in trained)
    assert "1 hilo: 960 tokens/s frente a 480" in capsys.readouterr().out


@pytest.mark.parametrize(("change", "message"), [
    (("2.3 - step", "9.3 - step"), "empieza con una pérdida de 9.300"),
    (("step / 100", "step / 10"), "pérdidas finales"),
    (("step / 100", "step * float('nan')"), "empieza con una pérdida de nan"),
    (('["max_iters"]) + 1', '["max_iters"])'), "informó de 5 pasos y no de 6"),
    (("import array", "raise SystemExit('avería')"), "avería"),
])
def test_train_script_refuses(our_script, nanogpt, tmp_path, change, message):
    """A run that did not train, or not as ours did, gives no figures."""
    assert change[0] in TRAIN
    (nanogpt / "train.py").write_text(TRAIN.replace(*change))
    path = tmp_path / "script.json"
    with pytest.raises(SystemExit, match=message):
        our_script.main([*SMALL, "--nanogpt", str(nanogpt), "--json", str(path)])
    assert not path.exists()


def test_train_script_same_learning_rate(load, nanogpt):
    """nanoGPT's formula (cosine with warmup), with the values it is given, against our schedule."""
    from aura import optim

    script = load("train_script")
    args = script.build_parser().parse_args(["--nanogpt", str(nanogpt)])
    command = script.their_command(args, nanogpt)
    given = dict(word.removeprefix("--").split("=") for word in command[2:])
    highest, lowest, end = (float(given[name]) for name in ("learning_rate", "min_lr", "lr_decay_iters"))
    assert [given[name] for name in ("warmup_iters", "compile", "device", "dtype")] == ["0", "False", "cpu", "float32"]
    for step in range(int(given["max_iters"]) + 1):
        theirs = lowest + 0.5 * (1 + math.cos(math.pi * step / end)) * (highest - lowest)
        ours = optim.warmup_cosine(step, steps=args.steps, warmup_steps=0, lr=script.LEARNING_RATE,
                                   min_lr=script.MIN_RATIO * script.LEARNING_RATE)
        assert ours == pytest.approx(theirs)


def test_train_script_arguments(load, nanogpt, tmp_path):
    script = load("train_script")
    for words, message in (
            (["--nanogpt", str(tmp_path)], "no es una copia de nanoGPT, le falta train.py, model.py, configurator.py"),
            (["--nanogpt", str(nanogpt), "--text", str(tmp_path / "nada.txt")], "no existe o no es un fichero"),
            (["--nanogpt", str(nanogpt), "--rounds", "0"], "--rounds: 0 está fuera de lo admitido (desde 1)"),
            (["--nanogpt", str(nanogpt), "--steps", "12"], "--steps 12: hacen falta al menos 3 más que --skip 10")):
        with pytest.raises(UserError, match=re.escape(message)):
            script.main(words)


def test_heartbeat_measures_the_beats_of_ranks_elsewhere(load, capfd, monkeypatch):
    """A thread that has met with an error tells it once, and goes on with its own beats."""
    heartbeat, written = load("heartbeat"), set()
    teller = heartbeat.heartbeat._Teller
    write = teller._write
    monkeypatch.setattr(teller, "_write", lambda self, rank, said: written.add(rank) or write(self, rank, said))
    assert heartbeat.beat_seconds(2, 5) > 0
    assert written == {0, 1, 2} and capfd.readouterr().out == ""
