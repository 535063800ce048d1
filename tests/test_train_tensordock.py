"""train_tensordock.py as a user runs it: real processes, real files."""

import csv
import gzip
import json
import os
import random
import re
import shutil
import signal
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

import train_tensordock as script
from aura import budget, cgroup, checkpoint, corpus, files, plan, recall
from aura.errors import TrainingFault, UserError
from aura.models import gpt
from aura.output import read_output
from aura.session import Session
from tests.support import ROOT, Process, assert_same_weights, corpus_text, run
from tests.test_tokenizer import byte_level

SCRIPT = ROOT / "train_tensordock.py"
SMALL = ["--model_preset", "manual", "--num_layers", "1", "--embed_size", "32", "--num_heads", "2", "--seq_length",
         "32", "--vocab_size", "400", "--batch_size", "2", "--gradient_accumulation_steps", "2", "--sample_length", "0",
         "--log_interval", "5", "--learning_rate", "1e-3"]


def train(cwd, *options, **extra):
    return run([SCRIPT, *map(str, options)], cwd, **extra)


def rows(folder):
    with open(folder / "training_log.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_from_text_to_a_folder_with_everything(book, tmp_path):
    options = ["--dataset_path", book, "--output_dir", "salida", *SMALL, "--max_steps", 20, "--save_steps", 10]
    code, output = train(tmp_path, *options, fresh=True)
    assert code == 0, output
    for expected in ("Veredicto", "paso 20/20", "cumple las 72 h", "memoria"):
        assert expected in output
    folder = tmp_path / "salida"
    names = {path.name for path in folder.iterdir()}
    assert {"checkpoint-step-10.pt", "checkpoint-step-20.pt", "training_log.csv", "final_model.pt", "model_config.json",
            "tokenizer.model", "tokenizer.json", "vocab.json", "loss.png"} <= names
    described = json.loads((folder / "model_config.json").read_text())
    assert described["config"]["n_embd"] == 32 and described["arguments"]["lr"] == 1e-3
    used = described["used"]
    assert (used["precision"], used["processes"], used["sequences_per_step"]) == ("fp32", 1, 4)
    assert used["betas"] == [0.9, 0.99] and used["eps"] > 0 and used["versions"]["torch"] in torch.__version__
    command = ["-m", "aura.generate", "--checkpoint", "salida/final_model.pt", "--prompt", "Ana", "--length", "5"]
    code, text = run(command, tmp_path)
    assert code == 0 and text.startswith("Ana")
    code, output = train(tmp_path, "--resume_from", "salida")
    assert code == 0 and "ya estaba completo" in output


def test_a_row_for_each_interval_and_each_epoch_and_none_twice(book, tmp_path):
    options = ["--dataset_path", book, "--output_dir", "salida", *SMALL, "--seq_length", 256, "--epochs", 2,
               "--validation_split", 0.2]
    code, output = train(tmp_path, *options)
    assert code == 0, output
    found = rows(tmp_path / "salida")
    steps = [int(row["step"]) for row in found]
    assert len(set(steps)) == len(steps)
    epochs = [row for row in found if row["epoch_loss"]]
    assert len(epochs) == 2 and all(row["val_loss"] for row in epochs)
    per_epoch = steps[-1] // 2
    assert [int(row["step"]) for row in epochs] == [per_epoch, 2 * per_epoch]
    assert {5 * i for i in range(1, steps[-1] // 5 + 1)} <= set(steps)


def test_stopped_again_and_again_and_resumed_without_flags_equals_uninterrupted(book, tmp_path):
    options = ["--dataset_path", book, *SMALL, "--max_steps", 200, "--dropout", 0.1, "--save_steps", 40]
    assert train(tmp_path, *options, "--output_dir", "a")[0] == 0
    command = [*options, "--output_dir", "b", "--data_dir", "a/datos"]
    stops, moments = 0, ["Veredicto", "paso 5/", "paso 60/"]  # before the first step, in the first ones, later
    while True:
        with Process([SCRIPT, *map(str, command)], tmp_path) as process:
            if stops < 3:
                process.wait_for(moments[stops])
                process.child.send_signal(signal.SIGINT)
            code, output = process.finish()
        assert "Entrenando el tokenizador" not in output  # a resumed run knows where its data lie
        if code == 0:
            break
        if checkpoint.found(tmp_path / "b"):
            command = ["--resume_from", "b"]
        assert code == 130, output
        stops += 1
    assert stops >= 2
    assert_same_weights(tmp_path / "a" / "final_model.pt", tmp_path / "b" / "final_model.pt")
    assert [row["loss"] for row in rows(tmp_path / "a")] == [row["loss"] for row in rows(tmp_path / "b")]


def test_a_trained_model_goes_on_with_another_text_and_its_run_without_it(book, tmp_path):
    (tmp_path / "otro.txt").write_text(corpus_text(8), encoding="utf-8")
    assert train(tmp_path, "--dataset_path", book, "--output_dir", "base", *SMALL, "--max_steps", 3)[0] == 0
    command = ["--init_from", "base/final_model.pt", "--dataset_path", "otro.txt", "--output_dir", "otra",
               "--sample_length", 0, "--batch_size", 2]
    code, output = train(tmp_path, *command, "--dry_run", "--gpu_gb", 80)
    assert code == 0 and "1 bloques, ancho 32, 2 cabezas, vocabulario 400, longitud 32" in output, output
    assert "Preset: aura-cpu, el de medidas más parecidas" in output, "not the largest that fits"
    assert "--lr 0.0001: la décima parte" in output and "Poco texto" not in output and not (tmp_path / "otra").exists()
    assert not script.ladder(SimpleNamespace(init_from="base/final_model.pt"), None), "no other sizes are a way out"
    code, output = train(tmp_path, *command, "--seq_length", 16, "--max_steps", 1, "--learning_rate", 1e-12)
    assert code == 0 and "Se parte de base/final_model.pt" in output, output
    ours, theirs = (torch.load(tmp_path / name / "final_model.pt", weights_only=True) for name in ("otra", "base"))
    theirs["wpe.weight"] = theirs["wpe.weight"][:16]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)
    pieces = [(tmp_path / name / "tokenizer.model").read_bytes() for name in ("otra", "base")]
    assert pieces[0] == pieces[1]
    code, output = train(tmp_path, "--resume_from", "otra", "--max_steps", 2)
    assert code == 0 and "longitud 16" in output and "Se reanuda en el paso 1" in output, output
    shutil.rmtree(tmp_path / "base")
    shutil.rmtree(tmp_path / "otra" / "datos")  # they are prepared again with the pieces of before
    code, output = train(tmp_path, "--resume_from", "otra", "--max_steps", 3)
    assert code == 0 and "'base/final_model.pt' ya no se puede leer; se sigue sin él" in output, output
    assert "Se reanuda en el paso 2" in output and "la décima parte" not in output, output


def test_an_interrupted_run_says_so_in_the_name(book, tmp_path):
    command = [SCRIPT, "--dataset_path", book, "--output_dir", "s", *SMALL, "--max_steps", 5000]
    with Process(command, tmp_path) as process:
        process.wait_for("paso 10/")
        process.child.send_signal(signal.SIGTERM)
        code, output = process.finish()
    assert code == 143 and re.search(r"interrupt-step-\d+\.pt", output)
    (path,) = (tmp_path / "s").glob("interrupt-step-*.pt")
    assert checkpoint.read(path)["progress"]["step"] == checkpoint.step_of(path)


def test_what_a_resumed_run_says_to_go_on_with_goes_on(book, tmp_path):
    options = ["--dataset_path", book, "--output_dir", "otra", *SMALL]
    assert train(tmp_path, *options, "--max_steps", 4)[0] == 0
    with Process([SCRIPT, "--resume_from", "otra/checkpoint-step-4.pt", "--max_steps", "5000"], tmp_path) as process:
        process.wait_for("paso 10/")
        process.child.send_signal(signal.SIGTERM)
        code, output = process.finish()
    said = re.search(r"en el paso (\d+); .* Para seguir, la misma orden con (--resume_from \S+)\.$", output.strip())
    assert code == 143 and said, output
    code, output = train(tmp_path, *said[2].split(), "--max_steps", int(said[1]) + 1)
    assert code == 0 and f"Se reanuda en el paso {said[1]} desde otra" in output, output


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    (folder / "libro.txt").write_text(corpus_text(), encoding="utf-8")
    code, output = train(folder, "--dataset_path", "libro.txt", "--output_dir", "salida", *SMALL, "--max_steps", 4)
    assert code == 0, output
    return folder


@pytest.fixture
def trained(trained_once, book, tmp_path):
    """A finished run of four steps on `book`, as it was before any test went on with it."""
    shutil.copytree(trained_once / "salida", tmp_path / "salida")
    return tmp_path / "salida"


def test_a_resumed_run_refuses_what_it_cannot_change(trained):
    code, output = train(trained.parent, "--resume_from", "salida", "--embed_size", "64", "--model_preset", "aura-cpu",
                         "--seed", "5", "--optimizer", "adafactor", "--dataset_max_tokens", "900")
    assert code == 2
    for piece in ("--embed_size 64 (antes 32)", "--model_preset aura-cpu (antes manual)", "--seed 5",
                  "--optimizer adafactor", "--dataset_max_tokens 900"):
        assert piece in output.splitlines()[-1]


def test_a_checkpoint_of_before_there_was_a_choice_goes_on_as_it_began(trained):
    path = checkpoint.found(trained)[0]
    state = torch.load(path, weights_only=True)
    state["arguments"]["grad_checkpointing"] = True
    del state["arguments"]["beta2"]
    torch.save(state, path)
    code, output = train(trained.parent, "--resume_from", "salida", "--gradient_checkpointing", "full",
                         "--max_steps", 5)
    assert code == 0 and "con gradient checkpointing (full)" in output and "Cambia" not in output.replace(
        "Cambia respecto al punto de control: --max_steps 4 -> 5", "")
    newest = torch.load(checkpoint.found(trained)[0], weights_only=True)
    assert [group["betas"][1] for group in newest["optimizer"]["param_groups"]] == [0.95] * 2


def test_a_resumed_run_takes_what_it_can_change_and_says_so(trained):
    path = checkpoint.found(trained)[0]
    state = torch.load(path, weights_only=True)
    state["arguments"]["attention"] = "sdpa"
    torch.save(state, path)
    code, output = train(trained.parent, "--resume_from", "salida", "--max_steps", 6, "--log_interval", 1,
                         "--warmup_steps", 9, "--auto_oom", "--attention", "auto", "--tokenizer", "auto")
    for change in ("--warmup_steps sin indicar -> 9", "--auto_oom no -> sí", "--attention sdpa -> auto"):
        assert f"Cambia respecto al punto de control: {change}.\n" in output
    assert "Se usan los valores indicados ahora" not in output  # which would say it twice
    assert code == 0 and "--log_interval 5 -> 1" in output and "--max_steps 4 -> 6" in output and "paso 6/6" in output
    assert not list(trained.glob("anterior-*")), "the model of 4 steps is its own"
    assert "Aviso: con --warmup_steps 9 la tasa de aprendizaje no llega a bajar en 6 pasos" in output
    assert re.search(r"Por hacer: 2 de los 6 pasos, \d+ s\b", output), output


@pytest.mark.parametrize(("before", "now", "same"), [("tk", "./tk", True), ("./tk/", "tk", True), ("tk", "tq", False),
                                                     (None, "tk", False)])
def test_a_tokenizer_is_the_same_however_its_path_is_written(before, now, same, tmp_path):
    args = script.build_parser().parse_args(["--tokenizer_name_or_path", now, "--checkpoint_dir", str(tmp_path)])
    args.resume = "c.pt"
    state = {"arguments": {**vars(args), "tokenizer": before, "dataset_name": "libro.txt"}}
    told = f"--tokenizer_name_or_path {now} .antes {before or 'sin indicar'}"
    with pytest.raises(UserError, match=told) if not same else nullcontext():
        recall.arguments(args, state, script.FIXED, script.flag, pytest.fail)


def test_what_is_to_be_done_now_is_no_change(tmp_path):
    args = script.build_parser().parse_args(["--prepare", "--dry_run", "--checkpoint_dir", str(tmp_path)])
    before = {**vars(args), "prepare": False, "dry_run": False, "dataset_name": "libro.txt"}
    recall.arguments(args, {"arguments": before}, script.FIXED, script.flag, pytest.fail)
    assert args.prepare and args.dry_run


def test_what_has_been_moved_is_not_written_where_it_was(tmp_path):
    for folder, output in (("antes", "salida de antes"), ("copia", "salida")):
        args = script.build_parser().parse_args(["--checkpoint_dir", str(tmp_path / folder)])
        args.output_dir = "salida"
        before = {**vars(args), "checkpoint_dir": str(tmp_path / "antes"), "output_dir": "salida de antes",
                  "dataset_name": "libro.txt", "lr": 0.5}
        recall.arguments(args, {"arguments": before}, script.FIXED, script.flag, pytest.fail)
        assert args.output_dir == output and args.lr == 0.5


@pytest.mark.parametrize("words, steps", [(["--warmup_ratio", "0.9"], None), (["--warmup_steps", "5"], 5), ([], 2)])
def test_a_ratio_of_warmup_replaces_recorded_steps(tmp_path, words, steps):
    notes = []
    args = script.build_parser().parse_args([*words, "--checkpoint_dir", str(tmp_path)])
    before = {**vars(args), "warmup_ratio": 0.03, "warmup_steps": 2, "dataset_name": "libro.txt"}
    recall.arguments(args, {"arguments": before}, script.FIXED, script.flag, notes.append)
    assert args.warmup_steps == steps
    dropped = "Cambia respecto al punto de control: --warmup_steps 2 -> sin indicar."
    assert (dropped in notes) == (steps is None), notes


def test_auto_is_what_was_recorded_and_epochs_replace_steps(trained):
    words = ["--resume_from", "salida", "--model_preset", "auto", "--epochs", 1, "--seq_len", 32, "--dry_run"]
    code, output = train(trained.parent, *words, "--batch_size", 4)
    assert code == 0 and "Preset:" not in output and "(1.00 épocas)" in output, output
    left, steps = map(int, re.search(r"Por hacer: (\d+) de los (\d+) pasos, \d+ s$", output, re.MULTILINE).groups())
    assert steps - left == 2, "four steps of half the batch"


def test_another_corpus_is_refused_and_the_same_one_elsewhere_is_not(trained, book):
    other = book.with_name("otro.txt")
    other.write_text(corpus_text(50), encoding="utf-8")
    code, output = train(trained.parent, "--resume_from", "salida", "--dataset_path", other)
    assert code == 2 and "otro.txt" in output and "no es el corpus" in output
    moved = book.with_name("mudado.txt")
    moved.write_bytes(book.read_bytes())
    code, output = train(trained.parent, "--resume_from", "salida", "--dataset_path", moved, "--max_steps", 5)
    assert code == 0, output


def test_changed_text_is_never_taken_for_the_old_one(trained, book):
    before = book.stat()
    text = book.read_text(encoding="utf-8")
    book.write_text(text.replace("pan", "sal"), encoding="utf-8")  # as long as before, and as old
    os.utime(book, ns=(before.st_atime_ns, before.st_mtime_ns))
    code, output = train(trained.parent, "--resume_from", "salida", "--dataset_path", book)
    assert code == 2 and "no es el corpus" in output


def test_damaged_data_are_prepared_again(trained, book):
    (shard,) = (trained.parent / "salida").rglob("train-00000.bin")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    code, output = train(trained.parent, "--resume_from", "salida", "--dataset_path", book, "--max_steps", 5)
    assert code == 0 and "Se preparan de nuevo" in output and "Se reanuda en el paso 4" in output, output


def test_more_of_the_sample_is_the_same_corpus(tmp_path, monkeypatch, capsys):
    args = script.build_parser().parse_args(["--dataset_path", "muestra", "--dataset_max_tokens", "600000"])
    made = corpus.open_corpus("muestra", max_tokens=600_000)
    known = SimpleNamespace(sha256="a", meta={"source": made.source}, verify=lambda: None)
    monkeypatch.setattr(recall.dataset, "prepared", lambda *_: [known])
    args.resume = "c"
    assert recall.data(args, {"dataset": {"sha256": "a", "name": "muestra"}}, print) is known


def test_an_empty_text_is_named(dry_run, tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "vacio.txt"
    path.write_text("")
    assert "está vacío" in dry_run("--dataset_path", path)[0]
    assert dry_run("--dataset_path", path.with_name("falta.txt"))[0].startswith("--dataset_path '")


def test_two_runs_in_one_folder(book, tmp_path):
    options = ["--dataset_path", book, "--output_dir", "s", *SMALL, "--max_steps", 100_000]
    with Process([SCRIPT, *map(str, options)], tmp_path) as first:
        first.wait_for("paso 5/")
        code, output = train(tmp_path, *options)
        assert code == 2 and "otra ejecución" in output and "'s'" in output
        assert "Plan para" not in output  # which would be of a checkpoint that the first one is about to leave behind
        first.child.send_signal(signal.SIGINT)
        assert first.finish()[0] == 130
    assert train(tmp_path, *options[:-1], 5)[0] == 0


def test_checkpoints_in_use_elsewhere_are_called_as_they_were_given(book, tmp_path):
    (tmp_path / "c").mkdir()
    lock = files.lock(tmp_path / "c" / files.IN_USE)
    code, output = train(tmp_path, "--dataset_path", book, "--checkpoint_dir", "c", *SMALL)
    os.close(lock)
    assert code == 2 and output.endswith("usando 'c': espere a que termine, deténgala, o indique otra carpeta con "
                                         "--checkpoint-dir\n")


def test_a_folder_of_the_run_before_goes_on(trained):
    before = torch.load(trained / "final_model.pt", weights_only=True)
    code, output = train(trained.parent, "--resume_from", trained / "checkpoint-step-4.pt", "--max_steps", 8)
    assert code == 0 and "Se reanuda en el paso 4" in output
    after = torch.load(trained / "final_model.pt", weights_only=True)
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_a_later_start_of_one_job_goes_on_from_what_an_earlier_one_has_saved(trained):
    command = "--resume_from", trained / "checkpoint-step-4.pt", "--max_steps", 6, "--no_gradient_checkpointing"
    for job, begins in (("a", 4), ("a", 6), ("b", 4)):
        code, output = train(trained.parent, *command, AURA_JOB=job)
        assert code == 0 and f"Se reanuda en el paso {begins} desde " in output, output
        assert ("--gradient_checkpointing selective -> no." in output) == (begins == 4)
    assert "Los puntos de control que no llevan a" in output


def test_a_second_model_in_the_folder_of_a_finished_one_is_refused_before_anything_is_done(trained, book):
    before = {path.name for path in trained.iterdir()}
    code, output = train(trained.parent, "--dataset_path", book, "--output_dir", "otra", "--output", "salida/dos.pt",
                         *SMALL)
    assert code == 2 and "'model_config.json' y su tokenizador son ahí de otro" in output.splitlines()[-1], output
    assert {path.name for path in trained.iterdir()} == before and not (trained.parent / "otra").exists()


def test_the_model_of_an_earlier_run_goes_aside_with_its_tokenizer(trained, book):
    """Otherwise it could not be used from the new run's first step on, and would be gone with its last."""
    other = book.with_name("otro.txt")
    other.write_text(corpus_text(50), encoding="utf-8")
    for resume, text, steps in (("none", other, 1), ("anterior-*/checkpoint-step-4.pt", book, 5)):
        names = ("final_model.pt", "model_config.json", "tokenizer.model", "tokenizer.json", "vocab.json")
        was = {name: (trained / name).read_bytes() for name in names}
        code, output = train(trained.parent, *SMALL, "--dataset_path", text, "--output_dir", "salida", "--max_steps",
                             steps, "--resume", next(trained.glob(resume), resume))
        told = re.search(r"El modelo anterior y su tokenizador se han movido a (\S+)\.\n", output)
        assert code == 0 and told, output
        aside = trained.parent / told[1]
        assert {path.name: path.read_bytes() for path in aside.iterdir()} == was
        for folder in (aside, trained):
            read_output(folder / "final_model.pt")


@pytest.fixture
def dry_run(tmp_path, monkeypatch, capsys):
    """A dry run in this process: (exit code or error, what it printed)."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        monkeypatch.setattr("sys.argv", ["train_tensordock.py", "--dry_run", *map(str, words)])
        try:
            code = script.main()
        except UserError as problem:
            code = str(problem)
        assert not list(tmp_path.iterdir()), "a dry run writes nothing"
        return code, capsys.readouterr().out

    return call


@pytest.mark.parametrize("gigabytes, preset", [(80, "aura-72h-max"), (40, "aura-72h-extended"), (24, "aura-24gb"),
                                               (16, "aura-16gb"), (8, "aura-8gb")])
def test_auto_takes_the_largest_that_fits(dry_run, gigabytes, preset):
    code, output = dry_run("--dataset_path", "muestra", "--gpu_gb", gigabytes)
    assert code == 0 and f"Preset: {preset}," in output, output


def test_several_processes_are_refused(dry_run, monkeypatch):
    """They would take each other for another run in the same folder."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    told, _ = dry_run("--dataset_path", "muestra", "--gpu_gb", 8)
    assert "WORLD_SIZE=2" in told and "sin torchrun" in told and "train_gpt2_spanish.py" in told
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert dry_run("--dataset_path", "muestra", "--gpu_gb", 8)[0] == 0


def test_no_more_threads_than_cores_that_it_may_use(dry_run, monkeypatch):
    """In other scripts the session sees to it: in a container torch counts the cores of the whole machine."""
    asked = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10_000)
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    assert dry_run("--dataset_path", "muestra", "--gpu_gb", 8)[0] == 0 and asked == [cgroup.cores()]


@pytest.mark.parametrize("times, words, said", [(22.4, ["--precision", "bf16"], True),
                                                (1.7, ["--precision", "bf16"], False), (22.4, [], False),
                                                (22.4, ["--precision", "bf16", "--gpu_gb", 8], False)])
def test_the_plan_says_that_products_of_16_bits_are_slow_here(dry_run, monkeypatch, times, words, said):
    """Its hours alone do not: a laptop's 60 h of bf16 are 0.8 of fp32."""
    monkeypatch.setattr(script.backend, "local_device", lambda rank: torch.device("cpu"))
    monkeypatch.setattr(script.start, "times_as_long", lambda dtype: times)
    code, output = dry_run("--dataset_path", "muestra", *words)
    assert code == 0 and ("22 veces más despacio" in output) == said, output


@pytest.mark.parametrize("typed, meant", [
    ("A100 80GB", "'NVIDIA A100-SXM4-80GB' o 'NVIDIA A100 80GB PCIe'"), ("rtx 4090", "'NVIDIA GeForce RTX 4090'"),
    ("a40", "'NVIDIA A40'"), ("NVIDIA L4", None), ("NVIDIA B300", None)])
def test_half_a_name_of_a_card_is_told_the_whole_one(dry_run, typed, meant):
    code, output = dry_run("--dataset_path", "muestra", "--gpu_gb", 80, "--gpu", typed, "--model_preset", "aura-8gb")
    told = f"--gpu {typed!r}: si es {meant}, escriba ese nombre y el plan dirá el tiempo." if meant else "escriba ese"
    assert code == 0 and (told in output) == bool(meant)


def test_where_nothing_fits_auto_does_not_say_that_it_does(dry_run):
    error, output = dry_run("--dataset_path", "muestra", "--gpu_gb", 0.3)
    assert error.startswith("el modelo no cabe") and "Preset: aura-cpu, el menor: ninguno cabe en " in output


def test_what_the_first_preset_of_the_guide_asks_for(dry_run):
    code, output = dry_run("--dataset_path", "muestra", "--gpu_gb", "80", "--gpu", "NVIDIA A100-SXM4-80GB",
                           "--dataset_max_tokens", "2000000000", "--dropout", "0.1")
    assert code == 0
    for expected in ("lote 2 x acumulación 16", "65536 por paso", "con gradient checkpointing", "Se usa lo indicado: "
                     "--dropout 0.1", "Veredicto"):
        assert expected in output


@pytest.mark.parametrize("given, planned", [
    ((), "con gradient checkpointing (selective)"),
    (("--gradient_checkpointing",), "con gradient checkpointing (selective)"),
    (("--grad-checkpointing=full",), "con gradient checkpointing (full)"),
    (("--no_grad_checkpointing",), "sin gradient checkpointing"),
    (("--gradient_checkpointing", "full", "--no-gradient-checkpointing"), "sin gradient checkpointing"),
    (("--no_gradient_checkpointing", "--gradient_checkpointing"), "con gradient checkpointing (selective)")])
def test_what_is_computed_again_is_what_was_asked_for(dry_run, given, planned):
    code, output = dry_run("--dataset_path", "muestra", "--gpu_gb", 8, *given)
    assert code == 0 and planned in output
    used = "Se usa lo indicado: --no_gradient_checkpointing (el preset pone selective).\n"
    assert (used in output) == planned.startswith("sin")


def test_what_cannot_be_computed_again_is_named(dry_run):
    error, _ = dry_run("--dataset_path", "muestra", "--gradient_checkpointing", "bloques")
    assert error.startswith("--gradient-checkpointing: 'bloques' no es una de las opciones selective, full")


@pytest.mark.parametrize("given, said", [
    (("--attention", "reference"), "--attention reference sirve para comprobar las otras, y guarda"),
    (("--optimizer", "adafactor", "--beta2", "0.5"), "--beta2 0.5 es de AdamW: quítelo, o quite --optimizer adafactor"),
    (("--target_hours", 1e308), "--target-hours: 1e+308")])
def test_what_cannot_be_planned_is_refused(dry_run, given, said):
    error, _ = dry_run("--dataset_path", "muestra", "--gpu_gb", 24, *given)
    assert error.startswith(said)


def test_what_cannot_fit_is_refused_with_the_nearest_that_does(dry_run):
    error, _ = dry_run("--dataset_path", "muestra", "--gpu_gb", 24, "--model_preset", "aura-72h-max")
    assert re.match(r"el modelo no cabe .*24\.0 GB.*cabe con --", error)


LARGEST = ("--model_preset", "aura-72h-max", "--seq_length", 2048)
WIDE = ("--embed_size", 2048, "--num_heads", 16)
BY_HAND = ("--model_preset", "manual", *WIDE, "--num_layers", 24, "--seq_length", 2048)


@pytest.mark.parametrize("gigabytes, given", [
    *((gigabytes, LARGEST) for gigabytes in (3.1, 3.8, 5.4, 6.1, 8.2, 10, 11.6, 12, 20)),
    (7, ("--model_preset", "aura-72h-max", *WIDE)), (10, BY_HAND), (3, BY_HAND), (1.9, BY_HAND),
    (6.5, (*LARGEST, "--dropout", 0.1)), (8, (*LARGEST, "--vocab_size", 200_000, "--ema", 0.999))])
def test_the_way_out_that_is_named_fits_when_it_is_added(dry_run, gigabytes, given):
    command = ["--dataset_path", "muestra", "--gpu_gb", gigabytes, *given]
    error, _ = dry_run(*command)
    flags = re.search(r"cabe con (--.*) \(", error)[1].split()
    code, output = dry_run(*command, *flags)
    assert code == 0, (flags, output)


@pytest.mark.parametrize("gigabytes, given", [(60, ("--ema", 0.999)), (24, ("--vocab_size", 400_000)),
                                              (40, ("--batch_size", 32)), (8, ("--seq_length", 4096))])
def test_auto_looks_for_what_fits_with_all_that_was_given(dry_run, gigabytes, given):
    code, output = dry_run("--dataset_path", "muestra", "--gpu_gb", gigabytes, *given)
    assert code == 0 and "Preset: aura-" in output and "Preset: aura-cpu" not in output, output


@pytest.mark.parametrize("gigabytes, preset", [(8, "aura-8gb"), (1.1, "aura-8gb"), (3, "aura-72h-max")])
def test_a_tokenizer_that_is_given_decides_on_the_plan(dry_run, tmp_path_factory, gigabytes, preset):
    """Also on the way out, which from the largest leads to a smaller one."""
    path = byte_level(tmp_path_factory.mktemp("tokenizer"))
    command = ["--dataset_path", "muestra", "--model_preset", preset, "--tokenizer_name_or_path", path]
    code, output = dry_run(*command, "--gpu_gb", gigabytes)
    assert "vocabulario 302, " in output and (code == 0) == (gigabytes == 8), (code, output)
    if code:
        flags = re.search(r"cabe con (--.*) \((.*) GB\)", code)
        code, output = dry_run(*command, "--gpu_gb", gigabytes, *flags[1].split())
        assert code == 0 and abs(float(re.search(r"total +(\S+) GB", output)[1]) - float(flags[2])) < 0.051, output
    assert "vocabulario 400, " in dry_run(*command[:4], "--gpu_gb", 80, "--vocab_size", 400)[1]


@pytest.mark.parametrize("given", [("--embed_size", 10**10, "--num_heads", 1), ("--seq_length", 10**19),
                                   ("--num_layers", 10**8), ("--vocab_size", 10**18), ("--batch_size", 10**20),
                                   ("--vocab_size", 10**18, "--gpu_gb", 24)])
def test_absurd_sizes_are_one_line_at_once(dry_run, given):
    error, _ = dry_run("--dataset_path", "muestra", *given)
    assert str(given[1]) in error and "\n" not in error


def test_the_plan_has_the_steps_of_the_run(book, tmp_path):
    options = ["--dataset_path", book, "--output_dir", "s", *SMALL, "--seq_length", 128, "--validation_split", 0,
               "--dataset_max_tokens", 128 * 40, "--epochs", 1]  # a window has a token more: 39 are 9 steps of four
    code, output = train(tmp_path, *options)
    assert code == 0 and "paso 9/9" in output, output
    assert re.findall(r"por paso x (\d+) pasos", output) == ["9", "9"]


@pytest.mark.parametrize("asked", ["--max_steps", "--epochs"])
def test_what_takes_too_long_is_told_by_what_was_asked_for(dry_run, asked):
    code, output = dry_run("--dataset_path", "muestra", "--gpu", "NVIDIA A100-SXM4-80GB", "--gpu_gb", 80, asked, 10**6)
    told = next(line for line in output.splitlines() if line.startswith("Veredicto: "))
    assert code == 0 and "NO CUMPLE" in told and re.findall(r"--\w+", told) == [asked]


def test_what_excludes_each_other_is_refused(dry_run):
    assert "--prepare prepara los datos: quite uno de los dos" in dry_run("--prepare")[0]
    both = dry_run("--warmup_steps", 2, "--warmup_ratio", 0.1)[0]
    assert both == "--warmup_steps y --warmup_ratio dicen lo mismo de dos maneras: quite una"


def test_too_few_tokens_for_a_step_are_no_plan(dry_run):
    error, output = dry_run("--dataset_path", "muestra", "--model_preset", "aura-cpu", "--dataset_max_tokens", 300)
    assert "dan 2 secuencias y cada paso usa 4" in error and "--batch_size" in error and "CUMPLE" not in output


def test_packed_text_is_planned_unpacked(dry_run, tmp_path_factory):
    words = corpus_text().split()
    text = "".join(f"{word}\n\n" for word in random.Random(0).choices(words, k=1_000_000))
    folder = tmp_path_factory.mktemp("text")
    (folder / "libro.txt").write_text(text, encoding="utf-8")
    with gzip.open(folder / "libro.txt.gz", "wb", 1) as file:
        file.write(text.encode())
    steps = [int(re.search(r"por paso x (\d+) pasos", dry_run("--dataset_path", folder / name)[1])[1])
             for name in ("libro.txt", "libro.txt.gz")]
    assert steps[1] == pytest.approx(steps[0], rel=0.1)


@pytest.mark.parametrize("script, file", [("train_gpt2_spanish.py", "ckpt-00000001.pt")])
def test_a_checkpoint_of_another_script_is_refused(book, tmp_path, script, file):
    words = ["--preset", "demo", "--n-layer", 1, "--n-embd", 32, "--n-head", 2, "--seq-len", 32, "--vocab-size", 400,
             "--sample-length", 0, "--max-steps", 1, "--dataset-name", book]
    assert run([ROOT / script, *map(str, words)], tmp_path)[0] == 0
    code, output = run([SCRIPT, "--resume_from", f"checkpoints/{file}"], tmp_path)
    assert code == 2 and "es de otro de los scripts" in output and len(output.splitlines()) == 1, output


def test_an_optimizer_that_cannot_be_had_is_refused_before_the_data_are_prepared(book, tmp_path):
    words = ["--dataset_path", book, "--output_dir", "salida", "--model_preset", "aura-cpu", "--optimizer", "adamw8bit"]
    code, output = run([SCRIPT, *words], tmp_path)
    assert code == 2 and output.splitlines()[-1].startswith("error: --optimizer adamw8bit necesita una GPU"), output
    assert not list(tmp_path.rglob("*.bin")) and "Entrenando el tokenizador" not in output


def test_our_kernels_are_planned_where_they_are_asked_for(dry_run):
    """auto may leave the loss of a GPU, the largest of these moments, to torch."""
    def total(*words):
        code, output = dry_run("--dataset_path", "muestra", *words)
        assert code == 0, output
        return float(re.search(r"total +([\d.]+) GB", output)[1])

    card = ("--gpu_gb", 8, "--model_preset", "aura-8gb", "--batch_size", 8, "--attention")
    assert total(*card, "fused") < total(*card, "auto") == total(*card, "sdpa")


def test_on_a_cpu_the_copy_for_checkpoints_is_part_of_the_plan(dry_run):
    assert re.search("copia para guardar +0.06 GB", dry_run("--dataset_path", "muestra")[1])
    assert "copia para guardar" not in dry_run("--dataset_path", "muestra", "--gpu_gb", 8)[1]


def test_what_is_missing_is_said(dry_run):
    error, _ = dry_run("--dataset_path", "muestra", "--model_preset", "manual", "--embed_size", 64)
    assert "--num_layers, --num_heads, --seq_length" in error
    assert "--dataset_path" in dry_run()[0]
    assert "--gpu_gb" in dry_run("--gpu", "NVIDIA L4", "--dataset_path", "muestra")[0]


SHORT_OF_MEMORY = """
import gc, os, signal, sys, torch, weakref
import train_tensordock as script
from aura import cli, report
real, draw, models = script.next_token_loss, report.draw_curve, weakref.WeakSet()
gc.disable()  # or chance would have it that nothing is left
def loss(model, batch):
    models.add(model)
    assert len(models) == 1, "the attempt before is in memory still"
    if len(batch) > 1:  # a batch that a smaller device could not hold
        if os.environ.get("STOP") == "early":
            os.kill(os.getpid(), signal.SIGTERM)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
    return real(model, batch)
def last_drawn(*words):  # when the attempt has failed already
    if os.environ.get("STOP") == "late":
        os.kill(os.getpid(), signal.SIGTERM)
    return draw(*words)
script.next_token_loss, report.draw_curve = loss, last_drawn
cli.run(script.main)
"""


def test_out_of_memory_names_the_way_out_or_takes_it(book, tmp_path):
    (tmp_path / "short.py").write_text(SHORT_OF_MEMORY)
    options = ["--dataset_path", book, "--output_dir", "s", *SMALL, "--max_steps", "3"]
    code, output = run([tmp_path / "short.py", *map(str, options)], tmp_path)
    assert code == 3 and "--batch_size 1 --gradient_accumulation_steps 4" in output.splitlines()[-1]
    options.append("--auto_oom")
    for moment in ("early", "late"):
        code, output = run([tmp_path / "short.py", *map(str, options)], tmp_path, STOP=moment)
        assert code == 143 and output.splitlines()[-1].startswith("Detenido por una señal; no basta la memoria ")
    code, output = run([tmp_path / "short.py", *map(str, options)], tmp_path)
    assert code == 0 and "se sigue con --batch_size 1 --gradient_accumulation_steps 4" in output
    assert int(rows(tmp_path / "s")[-1]["tokens"]) == 3 * 4 * 32, "as many sequences a step as before"
    for steps, sequences, more in ((4, 16, []), (5, 20, ["--batch_size", 1, "--gradient_accumulation_steps", 4]),
                                   (6, 28, ["--gradient_accumulation_steps", 4, "--batch_size", 2])):
        code, output = train(tmp_path, *options, "--max_steps", steps, *more)
        assert code == 0 and int(rows(tmp_path / "s")[-1]["tokens"]) == sequences * 32, output
        assert ("Se sigue con --batch_size 1 --gradient_accumulation_steps 4," in output) == (steps < 6)
        assert ("Cambia respecto al punto de control: --gradient_acc" in output) == (steps == 6)
    options[3:4] = ["otra", "--init_from", "s/final_model.pt"]  # whose weights the second attempt needs again
    code, output = run([tmp_path / "short.py", *map(str, options)], tmp_path)
    assert code == 0 and "se sigue con --batch_size 1" in output, output


def test_a_smaller_batch_keeps_the_sequences_of_a_step():
    args, tried = SimpleNamespace(batch_size=6, grad_accum=1, auto_oom=True), []

    def run_out():
        tried.append((args.batch_size, args.grad_accum))
        raise MemoryError

    with pytest.raises(TrainingFault, match="con --batch_size 1 --gradient_accumulation_steps 6: use"):
        budget.run_within(args, Session(), run_out)
    assert tried == [(6, 1), (3, 2), (2, 3), (1, 6)]


def test_what_is_kept_for_validation_is_not_planned_and_an_average_is(tmp_path, monkeypatch):
    (tmp_path / "libro.txt").write_text("a" * 43_000, encoding="utf-8")
    asked = SimpleNamespace(dataset_name=str(tmp_path / "libro.txt"), dataset_max_tokens=None, val_fraction=0.1)
    assert budget.planned_tokens(asked) == (9000, False)
    monkeypatch.setattr(budget.dataset, "latest", lambda _: SimpleNamespace(tokens={"train": 90, "val": 10}.get))
    assert budget.planned_tokens(SimpleNamespace(dataset_name=None, data_dir="datos")) == (90, True)
    args = SimpleNamespace(batch_size=1, grad_accum=1, grad_checkpointing=False, attention="sdpa", optimizer="adamw")
    config, card = gpt.GPTConfig(n_layer=1, n_head=1, n_embd=8), plan.imagined_card("X", 1e9, "fp32")
    for decay in (0.0, 0.9):
        args.ema = decay
        assert budget.job_of(args, config, card).ema == bool(decay)
