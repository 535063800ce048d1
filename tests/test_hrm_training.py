"""The HRM scripts as a user runs them: real processes, real files."""

import argparse
import contextlib
import csv
import json
import signal
from types import SimpleNamespace

import pytest
import torch

import hrm_training_large_1b
import hrm_training_small_100m
from aura import distributed, hrm_training, scaling, tokenizer
from aura.errors import UserError
from aura.session import Session
from tests.hub import Hub
from tests.support import ROOT, Process, assert_same_weights, corpus_text, run, run_ranks

SMALL, LARGE = ROOT / "hrm_training_small_100m.py", ROOT / "hrm_training_large_1b.py"
TINY = ["--preset", "demo", "--n-embd", "32", "--n-layer", "1", "--n-ff", "48", "--seq-len", "32",
        "--vocab-size", "400", "--sample-length", "0", "--log-interval", "5", "--lr", "1e-3"]


def train(cwd, *options, script=SMALL, **extra):
    return run([script, *map(str, options)], cwd, **extra)


def losses(folder, column="loss"):
    with open(folder / "logs" / "train.csv", newline="", encoding="utf-8") as file:
        return [float(row[column]) for row in csv.DictReader(file) if row[column]]


def test_the_presets_are_those_of_the_guide():
    small, large = hrm_training_small_100m.PRESETS["100m"], hrm_training_large_1b.PRESETS["1b"]
    assert (small.batch_size, small.grad_accum, small.effective_batch, small.config.seq_len) == (64, 2, 1024, 512)
    assert (large.batch_size, large.grad_accum, large.effective_batch, large.config.seq_len) == (24, 4, 768, 1024)
    assert large.grad_checkpointing and not small.grad_checkpointing and small.max_steps == large.max_steps == 15_000


@pytest.mark.parametrize(("options", "expected"), [([], 0.95), (["--preset", "demo"], 0.99),
                                                   (["--preset", "demo", "--beta2", "0.5"], 0.5)])
def test_beta2_goes_with_the_tokens_of_a_step(options, expected):
    args = hrm_training_small_100m.build_parser().parse_args(options)
    hrm_training.complete(args, hrm_training_small_100m.PRESETS)
    assert args.beta2 == expected


@pytest.mark.parametrize(("given", "world_size", "expected"), [
    ({}, 8, (64, 2)), ({}, 1, (64, 16)), ({"batch_size": 32}, 8, (32, 4)), ({"batch_size": 32}, 2, (32, 16)),
    ({"grad_accum": 1}, 1, (64, 1)), ({}, 16, (64, 1)), ({}, 64, (16, 1)), ({}, 3, (64, 5))])
def test_the_effective_batch_is_kept(given, world_size, expected):
    args, said = argparse.Namespace(**{"batch_size": None, "grad_accum": None, **given}), []
    hrm_training.keep_effective_batch(args, hrm_training_small_100m.PRESETS["100m"], world_size, said.append)
    assert (args.batch_size, args.grad_accum) == expected
    assert bool(said) == (expected != (64, 2) and "grad_accum" not in given)
    assert world_size != 3 or "960 secuencias, y no las 1024" in said[0]


def test_documents_begin_with_each_row_and_after_each_end():
    tokens = torch.tensor([[5, 9, 6, 7, 9], [9, 1, 2, 3, 4]])
    assert hrm_training.document_bounds(tokens, 9).tolist() == [0, 2, 5, 6, 10]


def test_from_text_to_a_model_that_writes(book, tmp_path):
    options = ["--dataset", book, *TINY, "--max_steps", 12, "--segments", 2, "--reinject", "--document-attention"]
    code, output = train(tmp_path, *options, script=LARGE, fresh=True)
    assert code == 0, output
    for line in ("World size: 1", "Total de GPUs: 0", "Backend: ", "Batch size por proceso: 8",
                 "Gradient accumulation steps: 1", "Effective batch size: 8", "Total training steps: 12",
                 "Steps por época: ", "paso 12/12"):
        assert line in output, line
    assert "añada --reinject" not in output
    kept = torch.load(tmp_path / "checkpoints" / "ckpt-00000012.pt", weights_only=True)
    assert [tuple(group["betas"]) for group in kept["optimizer"]["param_groups"]] == [(0.9, 0.99)] * 2
    command = ["-m", "aura.generate", "--prompt", "Ana", "--length", "5", "--checkpoint", "hrm.pth"]
    code, text = run(command, tmp_path)
    assert code == 0 and text.startswith("Ana")
    code, text = run([*command, "--early-exit"], tmp_path)
    assert code == 0 and text.startswith("Ana")


def test_a_trained_hrm_goes_on_with_another_text(book, tmp_path):
    """On one process, on two of which one has the model, and by a stream, which gets its tokenizer too."""
    folders = [tmp_path / name for name in ("base", "one", "two", "other", "stream")]
    for folder in folders:
        folder.mkdir()
    base, one, two, other, streamed = folders
    kept = [*TINY, "--log-interval", 1, "--segments", 2, "--reinject"]
    code, said = train(base, "--dataset", book, *kept, "--max_steps", 40, "--lr", 5e-3)
    assert code == 0, said
    whole, text = losses(base), tmp_path / "otro.txt"
    assert whole[0] - whole[-1] > 1
    text.write_text(corpus_text(70)[40_000:], encoding="utf-8")
    words = ["--preset", "demo", "--init-from", base / "hrm.pth", "--dataset", text, "--sample-length", 0,
             "--log-interval", 1, "--max_steps", 4]
    code, said = train(one, *words)
    assert code == 0 and "--lr 0.0001: la décima parte" in said and "contexto 32, vocabulario 400." in said, said
    assert abs(losses(one)[0] - whole[-1]) < 0.5
    described = [json.loads((folder / "hrm.json").read_text())["config"] for folder in (base, one)]
    assert described[0] == described[1] and described[0]["segments"] == 2
    results = run_ranks([SMALL, *map(str, words), "--batch-size", "4"], [two, other])
    assert [code for code, _ in results] == [0, 0], results
    assert losses(two) == pytest.approx(losses(one), abs=1e-4)
    # Of the moving average, which each process has made of the weights that it began with.
    assert losses(two, "val_loss") == pytest.approx(losses(one, "val_loss"), abs=1e-4)
    assert torch.load(one / "checkpoints" / "ckpt-00000004.pt", weights_only=True)["begun_with"]
    code, said = train(streamed, *words, "--stream")
    assert code == 0 and "Entrenando el tokenizador" not in said and abs(losses(streamed)[0] - whole[-1]) < 0.5, said
    code, said = train(one, *words[:-1], 6, "--seq-len", 32)
    assert code == 0 and "Se reanuda en el paso 4" in said, said
    code, said = train(one, *words[:-1], 1, "--ponder-price", 0.2, "--checkpoint-dir", "otra", "--output", "otro.pth")
    assert code == 0 and json.loads((one / "otro.json").read_text())["config"]["ponder_price"] == 0.2, \
        "the preset has one segment, the model has two: " + said


def test_what_a_trained_hrm_is_cannot_be_chosen_anew(book, tmp_path):
    code, said = train(tmp_path, "--dataset", book, *TINY, "--max_steps", 1)
    assert code == 0, said
    words = ["--preset", "demo", "--init-from", "hrm.pth", "--output", "otro.pth", "--checkpoint-dir", "otra",
             "--log-dir", "otra", "--max_steps", 1, "--sample-length", 0]
    for options, why in ((["--segments", 2], "--segments 2: el modelo de --init-from tiene 1; quite --segments"),
                         (["--reinject"], "--reinject: el modelo de --init-from no es así; quítelo"),
                         (["--exit-weights"], "--exit-weights: el modelo de --init-from no es así"),
                         (["--n-ff", 64], "--n-ff 64: el modelo de --init-from tiene 48"),
                         (["--n-head", 3], "--n-head 3: el modelo de --init-from tiene 2; quite --n-head"),
                         (["--ponder-price", 3], "solo hay uno: quite esa opción\n"),
                         (["--tokenizer", "t.model"], "con --init-from el tokenizador es el de ese modelo")):
        code, said = train(tmp_path, *words, *options)
        assert code == 2 and why in said, said
    (tmp_path / "hf").mkdir()
    for name, why in (("hrm.pht", "'hrm.pht': no existe; indique el fichero de un modelo"),
                      ("hf", "'hf': es una carpeta; indique el fichero de un modelo")):  # the Hub has none for it
        code, said = train(tmp_path, *words, "--init-from", name)
        assert code == 2 and why in said and "Hub" not in said, said
    code, said = run([ROOT / "train_gpt2_spanish.py", *map(str, words)], tmp_path)
    assert code == 2 and "'hrm.pth': es un HRM, y este programa entrena un GPT-2" in said, said
    code, said = train(tmp_path, *words, "--seq-len", 48, "--segments", 1)
    assert code == 0 and json.loads((tmp_path / "otro.json").read_text())["config"]["seq_len"] == 48, said


def test_cycles_that_leave_the_text_without_gradients_are_told(book, tmp_path):
    code, output = train(tmp_path, "--dataset", book, *TINY, "--max_steps", 1, "--l-cycles", 4)
    assert code == 0 and "Aviso: con --h-cycles 2 y --l-cycles 4, las 5 últimas pasadas" in output, output


def test_two_processes_learn_what_one_does(book, tmp_path):
    options = ["--dataset", book, *TINY, "--max_steps", 10, "--log-interval", 1, "--grad-accum", 2]
    (tmp_path / "one").mkdir()
    assert train(tmp_path / "one", *options, "--batch-size", 4)[0] == 0
    for name in ("two", "other"):
        (tmp_path / name).mkdir()
    results = run_ranks([SMALL, *map(str, options), "--batch-size", "2"], [tmp_path / "two", tmp_path / "other"])
    assert [code for code, _ in results] == [0, 0], results
    assert "World size: 2" in results[0][1]
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-4)


def test_a_stream_stopped_and_resumed_is_as_uninterrupted(book, tmp_path):
    options = ["--dataset", book, *TINY, "--max_steps", 60, "--stream", "--val-fraction", 0.1]
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    code, output = train(tmp_path / "whole", *options)
    assert code == 0 and "el texto se lee al entrenar" in output and "validación" in output, output
    with Process([SMALL, *map(str, options)], tmp_path / "stopped") as process:
        process.wait_for("paso 10/")
        process.child.send_signal(signal.SIGTERM)
        assert process.finish()[0] == 143
    assert train(tmp_path / "stopped", *options)[0] == 0
    assert_same_weights(tmp_path / "whole" / "hrm.pth", tmp_path / "stopped" / "hrm.pth")
    assert losses(tmp_path / "whole") == losses(tmp_path / "stopped")
    code, output = run(["-m", "aura.generate", "--early-exit", "--checkpoint", "whole/hrm.pth"], tmp_path)
    assert code == 2 and "no tiene cabeza de parada" in output
    code, output = run(["-m", "aura.export", "--checkpoint", "whole/hrm.pth", "--to", "hf", "fuera"], tmp_path)
    assert code == 0 and "desde la versión 5.9" in output, output


def test_two_processes_train_on_the_hub(tmp_path):
    pytest.importorskip("datasets")
    folder = tmp_path / "hub" / "alguien" / "textos"
    folder.mkdir(parents=True)
    documents = [text for text in corpus_text(80).split("\n\n") if text.strip()]
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    with Hub(tmp_path / "hub") as hub:
        options = ["--dataset", "alguien/textos", *TINY, "--batch-size", "2", "--max_steps", "6"]
        (tmp_path / "other").mkdir()
        results = run_ranks([SMALL, *options], [tmp_path, tmp_path / "other"], **hub.environment(tmp_path / "cache"))
    assert [code for code, _ in results] == [0, 0], results
    assert "paso 6/6" in results[0][1]


@pytest.mark.parametrize("stream", [False, True])
def test_text_that_only_the_first_machine_has(book, tmp_path, stream):
    """Where it is missing, its path is the name of a repository on the Hub."""
    first, second = tmp_path / "first", tmp_path / "second"
    (first / "datos").mkdir(parents=True)
    second.mkdir()
    book.rename(first / "datos" / "libro.txt")
    options = ["--dataset", "datos/libro.txt", *TINY, "--batch-size", "2", "--max_steps", "2"]
    results = run_ranks([SMALL, *options, *["--stream"] * stream, "--local-rank", "0"], [first, second])
    if stream:
        assert results[1][0] == 2 and "'datos/libro.txt': está en la máquina del rango 0" in results[1][1], results
    else:
        assert [code for code, _ in results] == [0, 0], results
        assert "No tiene los datos el rango 1" in results[0][1]
    assert not any("Traceback" in output for _, output in results)


def test_a_name_of_the_hub_that_is_a_folder_on_one_machine_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spanish").mkdir()
    (tmp_path / "spanish" / "d.txt").write_text("hola")
    args = hrm_training_small_100m.build_parser().parse_args(["--dataset", "spanish"])
    elsewhere = argparse.Namespace(run_on_main=lambda _: "hub")
    with pytest.raises(UserError, match="'spanish': es del Hub en la máquina del rango 0, y en esta un .*de nombre, o"):
        hrm_training.load_data(args, elsewhere, None)


def test_a_stream_has_no_epochs(book, tmp_path):
    code, output = train(tmp_path, "--dataset", book, *TINY, "--stream", "--epochs", 2)
    assert code == 2 and "--epochs 2" in output and "--max-steps" in output and len(output.splitlines()) == 1


@pytest.mark.parametrize("words, said", [
    (["--stream", "--dataset-max-tokens", "300"], "--dataset-max-tokens 300"),
    (["--stream", "--prepare"], "--stream y --prepare"),
    (["--benchmark", "--fsdp"], "quite --fsdp"),
    (["--benchmark", "--prepare"], "--benchmark y --prepare"),
    (["--ponder-price", "3"], "--ponder-price 3 es el precio de un segmento más, y solo hay uno: quite"),
])
def test_what_would_be_without_effect_is_refused(book, tmp_path, words, said):
    code, output = train(tmp_path, "--dataset", book, *TINY, *words)
    assert code == 2 and said in output and len(output.splitlines()) == 1, output


@pytest.mark.parametrize("way", [["--stream"], ["--prepare"]])
def test_a_tokenizer_of_another_size_than_was_asked_for_is_refused(book, tmp_path, way):
    model = tmp_path / "t.model"
    model.write_bytes(tokenizer.train([corpus_text()], 400).model)

    def load(*words):
        words = ["--dataset", book, "--tokenizer", model, "--data-dir", tmp_path / "Data", *way, *words]
        args = hrm_training_small_100m.build_parser().parse_args(list(map(str, words)))
        config = hrm_training.complete(args, hrm_training_small_100m.PRESETS)
        return hrm_training.load_data(args, distributed.Session(), config)

    with pytest.raises(UserError, match="--vocab-size 500: --tokenizer '.*t.model' tiene 400 piezas; quite"):
        load("--vocab-size", 500)
    assert load("--vocab-size", 400).vocab_size == load().vocab_size == 400, "a preset's size counts for nothing"


def test_what_exchanging_costs_is_measured_and_told(book, tmp_path):
    options = ["--dataset", book, *TINY, "--batch-size", "2", "--benchmark"]
    code, output = train(tmp_path, *options)
    assert code == 0 and "Rendimiento con 1 proceso: " in output, output
    (tmp_path / "other").mkdir()
    results = run_ranks([SMALL, *map(str, options)], [tmp_path, tmp_path / "other"])
    output = results[0][1]
    assert [code for code, _ in results] == [0, 0] and "Comunicación: " in output, output
    assert "Eficiencia de escala: " in output and "de 2 veces un proceso" in output
    options = [*options[:-1], "--max_steps", "6"]
    results = run_ranks([SMALL, *map(str, options)], [tmp_path, tmp_path / "other"])
    assert "comunicación " in results[0][1] and "eficiencia " in results[0][1], results[0][1]
    [kept] = tmp_path.rglob("benchmark.json")
    for text in ("{", '{"dos": 2}'):
        kept.write_text(text)
        code, output = train(tmp_path, *options)
        assert code == 2 and "benchmark.json" in output and "bórrelo" in output, output


def test_the_figures_are_those_of_the_slowest_rank_and_of_all_tokens(monkeypatch):
    """By hand: two ranks of which the other one takes 2 s for each step of 2 x 3 sequences of 8 tokens."""
    exchanged, found = [], []

    class Loader(contextlib.nullcontext):
        def next(self):
            return torch.ones(1, 1)

    @contextlib.contextmanager
    def exchanging(_, wanted):
        exchanged.append(wanted)
        yield

    monkeypatch.setattr(scaling.sharding, "exchanging", exchanging)
    monkeypatch.setattr(scaling, "setting", lambda *_: {})
    monkeypatch.setattr(scaling, "_tell", lambda *given: found.append(given[-1]))
    dist = SimpleNamespace(world_size=2, device=torch.device("cpu"), wrap=lambda model: model, barrier=lambda: None,
                           gather_objects=lambda mine: [mine, 2.0])
    args = argparse.Namespace(lr=1e-3, weight_decay=0.1, compile=False, batch_size=2, grad_accum=3, seq_len=8)
    scaling.benchmark(args, dist, Loader(), SimpleNamespace(autocast=contextlib.nullcontext), None,
                      torch.nn.Linear(1, 1), lambda model, batch: (model(batch).sum(), 1))
    [figures] = found
    assert figures["tokens_per_s"] == figures["without_exchange"] == 48.0
    assert figures["fastest_s"] == figures["slowest_s"] == 2.0
    assert exchanged == [False, False, True, False, False, False] * (scaling.WARMUP + scaling.ROUNDS)


def test_communication_is_what_it_takes_off_and_efficiency_is_of_so_many_times_one(tmp_path, monkeypatch):
    one, two = {"tokens_per_s": 100.0}, {"tokens_per_s": 150.0, "without_exchange": 200.0}
    monkeypatch.setattr(scaling, "recorded", lambda *_: {1: one})
    lines = []
    dist = SimpleNamespace(world_size=2, device=None, main=False, print=lines.append)
    scaling._tell(None, dist, None, {**two, "fastest_s": 1.0, "slowest_s": 2.0})
    assert lines[0].startswith("Rendimiento con 2 procesos: 150 tokens/s ")
    assert lines[1].startswith("Comunicación: 25.0 % ") and lines[2].startswith("Eficiencia de escala: 75.0 % de 2 ")
    assert scaling.yardsticks({1: one, 2: two}, 2) == {"ideal": 200.0, "unexchanged": 200.0}
    assert scaling.yardsticks({1: one, 2: two}, 1) == {"ideal": None, "unexchanged": None}


def test_figures_of_each_setting_are_kept_and_unlike_ones_not_compared(tmp_path):
    options = ["--log-dir", str(tmp_path), "--preset", "demo"]
    model = hrm_training_small_100m.PRESETS["demo"].config

    def given(*words, accum=None):
        args = hrm_training_small_100m.build_parser().parse_args([*options, *words])
        args.grad_accum = args.grad_accum or accum  # as the number of processes has it
        return args, model, torch.device("cpu")

    def measured(of, rate):
        scaling._tell(of[0], Session(), model, {"tokens_per_s": rate, "without_exchange": rate, "fastest_s": 1,
                                                "slowest_s": 1, "setting": scaling.setting(*of)})

    def told(of):
        return {processes: figures["tokens_per_s"] for processes, figures in scaling.recorded(*of).items()}

    four, eight = given("--batch-size", "4", accum=16), given("--batch-size", "8")
    for of, rate in ((four, 1.0), (eight, 2.0), (four, 3.0)):
        measured(of, rate)
    assert told(four) == {1: 3.0} and told(eight) == {1: 2.0}
    assert told(given("--batch-size", "4", accum=8)) == {1: 3.0}, "so many go with two processes"
    for other in (["--attention", "sdpa"], ["--grad-accum", "2"], ["--grad-checkpointing"], ["--document-attention"]):
        assert told(given("--batch-size", "4", *other)) == {}, other
    kept = tmp_path / "benchmark.json"
    [[before, _]] = json.loads(kept.read_text()).values()
    kept.write_text(json.dumps({"1": before}))  # as a version wrote it that kept one
    measured(four, 4.0)
    assert told(four) == {1: 4.0} and told(eight) == {1: 2.0}


def test_a_width_that_does_not_fit(book, tmp_path):
    code, output = train(tmp_path, "--dataset", book, *TINY, "--n-head", 3)
    assert code == 2 and "--n-embd 32" in output and len(output.splitlines()) == 1


def test_what_agreeing_now_and_then_costs_is_not_measured(book, tmp_path):
    code, output = train(tmp_path, "--dataset", book, *TINY, "--benchmark", "--sync", "diloco")
    assert code == 2 and "--benchmark" in output and "quite --sync diloco" in output and len(output.splitlines()) == 1
