"""train_gpt2_spanish.py as a user runs it: real processes, real files."""

import json
import os
import re
import signal

import pytest
import torch

from aura import dataset, files, report
from tests.support import ROOT, Process, assert_same_weights, free_port, ranks, run, run_ranks

SCRIPT = ROOT / "train_gpt2_spanish.py"
SMALL = ["--preset", "demo", "--n-layer", "1", "--n-embd", "32", "--n-head", "2", "--seq-len", "32",
         "--vocab-size", "400", "--sample-length", "5", "--log-interval", "1", "--dropout", "0", "--eval-windows", "20"]


def train(cwd, *options, **extra):
    code, output = run([SCRIPT, *SMALL, *map(str, options)], cwd, **extra)
    return code, output


def losses(folder):
    return [(int(row["step"]), float(row["loss"])) for row in report.read_table(folder / "logs" / "train.csv")]


def weights(path):
    return torch.load(path, weights_only=True)


def test_from_text_to_a_model_that_writes(book, tmp_path):
    code, output = train(tmp_path, "--dataset-name", book, "--max-steps", 12)
    assert code == 0, output
    for expected in ("paso 12/12", "bits/byte", "muestra del paso 12", "gpt2_spanish.pth", "Reparto de los datos"):
        assert expected in output
    assert (tmp_path / "logs" / "loss.png").exists() and list((tmp_path / "logs").glob("events.out.tfevents.*"))
    assert losses(tmp_path)[-1][1] < losses(tmp_path)[0][1]
    assert not any(name.startswith(("module.", "_orig_mod.")) for name in weights(tmp_path / "gpt2_spanish.pth"))
    for source in ("gpt2_spanish.pth", "checkpoints/ckpt-00000012.pt"):
        command = ["-m", "aura.generate", "--checkpoint", source, "--prompt", "Ana compró", "--length", "8"]
        code, text = run(command, tmp_path, fresh=True)
        assert code == 0 and text.startswith("Ana compró")
        assert run(command, tmp_path)[1].splitlines()[:-1] == text.splitlines()[:-1]
    described = (tmp_path / "gpt2_spanish.json").read_text(encoding="utf-8")
    again = train(tmp_path, "--max-steps", 12, "--lr", 0.5, "--seed", 9, "--precision", "bf16")
    assert again[0] == 0 and "ya estaba completo" in again[1]
    before, now = (json.loads(text)["arguments"] for text in (described, (tmp_path / "gpt2_spanish.json").read_text(
        encoding="utf-8")))
    assert all(now[name] == before[name] != asked for name, asked in (("lr", 0.5), ("seed", 9), ("precision", "bf16")))
    further = train(tmp_path, "--max-steps", 13, "--lr", 1e-5, "--seed", 9)
    now = json.loads((tmp_path / "gpt2_spanish.json").read_text(encoding="utf-8"))["arguments"]
    assert further[0] == 0 and now["lr"] == 1e-5 and now["seed"] == before["seed"], further
    gone = book.with_name("no está.txt")
    book.rename(gone)
    code, output = train(tmp_path, "--dataset-name", book, "--max-steps", 14)
    gone.rename(book)
    assert code == 2 and "no existe; " in output and output.endswith(
        f"; o quite --dataset-name: lo que se preparó con él sigue en 'Data/{book.stem}', y se usará\n"), output


def test_a_job_that_comes_back_needs_no_more_the_checkpoint_it_began_from(book, tmp_path):
    """distributed.slurm repeats its arguments, and by then that one may have been rotated away."""
    assert train(tmp_path, "--dataset-name", book, "--max-steps", 2)[0] == 0
    words = "--dataset-name", book, "--checkpoint-freq", 1, "--resume", "checkpoints/ckpt-00000002.pt"
    for steps, begins in ((6, 2), (7, 6)):
        code, output = train(tmp_path, *words, "--max-steps", steps, AURA_JOB="prueba-1")
        assert code == 0 and f"Se reanuda en el paso {begins} " in output, output
    code, output = train(tmp_path, *words, "--max-steps", 7, AURA_JOB="prueba-2")
    assert code == 2 and "--resume 'checkpoints/ckpt-00000002.pt': no existe" in output, output


def test_prepare_then_train_on_the_last_prepared(book, tmp_path):
    code, output = train(tmp_path, "--prepare", "--dataset-name", book)
    assert code == 0 and "Datos preparados" in output and not (tmp_path / "checkpoints").exists()
    before = dataset.latest(tmp_path / "Data").meta["prepared_at"]
    code, output = train(tmp_path, "--prepare", "--dataset-name", book, "--seq-len", 199_999)
    assert code == 0 and "Datos ya preparados en Data/libro" in output
    assert "de entrenamiento no llenan una secuencia de 199999 + 1: añada texto" in output, output
    assert dataset.latest(tmp_path / "Data").meta["prepared_at"] > before
    code, output = train(tmp_path, "--max-steps", 1)
    assert code == 0 and "'libro', los últimos preparados" in output
    code, output = train(tmp_path, "--max-steps", 1, "--vocab-size", 300)
    assert code == 2 and "--vocab-size 300 solo sirve al preparar" in output and "tienen 400 piezas" in output, output
    (tmp_path / "Data" / "libro").rename(tmp_path / "Data" / "cervantes")
    code, output = train(tmp_path, "--max-steps", 2)
    assert code == 0 and "'cervantes', los últimos preparados" in output, output


def test_the_preset_decides_beta2_and_what_is_given_wins_also_when_resuming(book, tmp_path):
    """A rate given anew is not lowered by a NaN of before; the order of the data stays that of the first seed."""
    given = ["--beta2", "0.5", "--seed", "9"]
    for step, options, new, beta2, scale in ((2, [], "", 0.99, 0.5), (4, given, "--beta2 0.5 (antes 0.99)", 0.5, 0.25),
                                             (5, [*given, "--lr", "1e-4"], "--lr 0.0001 (antes 0.001)", 0.5, 1.0)):
        code, output = train(tmp_path, "--dataset-name", book, "--max-steps", step, *options, AURA_INJECT_NAN="0:1")
        assert code == 0, output
        assert ("sigue siendo el de --seed 1234," in output) == bool(options)
        told = f"ahora, distintos de los de antes: {new}, --max-steps {step} (antes {step - 1 - (step == 4)}).\n"
        assert (told in output) == bool(new), output
        assert ("sigue siendo la prevista multiplicada por 0.5," in output) == (step == 4), output
        saved = weights(tmp_path / "checkpoints" / f"ckpt-{step:08d}.pt")
        assert [tuple(group["betas"]) for group in saved["optimizer"]["param_groups"]] == [(0.9, beta2)] * 2
        assert saved["progress"]["lr_scale"] == scale


def test_signal_and_the_same_command_again_equal_an_uninterrupted_run(book, tmp_path, number=signal.SIGUSR1):
    whole, cut = tmp_path / "a", tmp_path / "b"
    whole.mkdir()
    cut.mkdir()
    options = ["--dataset-name", book, "--max-steps", 100, "--dropout", "0.1"]
    assert train(whole, *options)[0] == 0
    with Process([SCRIPT, *SMALL, *map(str, options)], cut) as process:
        process.wait_for("paso 7/")
        process.child.send_signal(number)
        code, output = process.finish()
    assert code == 128 + number and f"Recibida {number.name}" in output and "La misma orden lo reanuda" in output
    assert train(cut, *options)[0] == 0
    assert losses(cut) == losses(whole) and len(losses(cut)) == 100
    assert_same_weights(whole / "gpt2_spanish.pth", cut / "gpt2_spanish.pth")


STOPPED_AFTERWARDS = """
import os, signal
import train_gpt2_spanish as script
from aura import cli, output, report
def asked_before(work, number):
    def then(*words):
        os.kill(os.getpid(), number)
        return work(*words)
    return then
report.Reporter.close = asked_before(report.Reporter.close, signal.SIGTERM)
output.save_output = asked_before(output.save_output, signal.SIGINT)
cli.run(script.main)
"""


def test_a_signal_after_the_last_step_ends_nothing(book, tmp_path):
    (tmp_path / "stopped.py").write_text(STOPPED_AFTERWARDS)
    code, output = run([tmp_path / "stopped.py", *SMALL, "--dataset-name", book, "--max-steps", 2], tmp_path)
    assert code == 0 and "Modelo guardado en gpt2_spanish.pth" in output, output
    assert (tmp_path / "logs" / "loss.png").exists()


STOPPED_IN_THE_END = """
import os, signal
import train_gpt2_spanish as script
from aura import cli, pretrain
make = pretrain.make_evaluate
def asked_before(*words):
    evaluate = make(*words)
    def then(request):
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(request)
    return then
pretrain.make_evaluate = asked_before
cli.run(script.main)
"""


def test_a_stop_in_the_last_validation_leaves_it_for_the_next_start(book, tmp_path):
    (tmp_path / "stopped.py").write_text(STOPPED_IN_THE_END)
    code, output = run([tmp_path / "stopped.py", *SMALL, "--dataset-name", book, "--max-steps", 2], tmp_path)
    assert code == 143 and "en el paso 2; último punto de control" in output, output
    assert not (tmp_path / "gpt2_spanish.pth").exists()
    assert train(tmp_path, "--max-steps", 2)[0] == 0 and (tmp_path / "gpt2_spanish.pth").exists()
    assert [bool(row["val_loss"]) for row in report.read_table(tmp_path / "logs" / "train.csv")] == [False, True]


def test_a_flipped_bit_in_the_newest_checkpoint_takes_the_one_before(book, tmp_path):
    options = ["--dataset-name", book, "--max-steps", 8, "--checkpoint-freq", 4]
    assert train(tmp_path, *options)[0] == 0
    before = losses(tmp_path)
    path = tmp_path / "checkpoints" / "ckpt-00000008.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)
    for name in ("logs/.train.csv", "logs/.loss.png", ".gpt2_spanish.pth", ".gpt2_spanish.json", ".another.pth"):
        (tmp_path / f"{name}.1.parcial").write_bytes(b"of a killed run")
    code, output = train(tmp_path, *options)
    assert code == 0 and "se descarta" in output and "Se reanuda en el paso 4" in output
    assert losses(tmp_path) == before
    assert [path.name for path in tmp_path.glob("**/.*.parcial")] == [".another.pth.1.parcial"]


def test_more_processes_see_the_same_data_and_losses(book, tmp_path, size=4, batch=2):
    one, many = tmp_path / "one", tmp_path / "many"
    one.mkdir()
    many.mkdir()
    options = ["--dataset-name", str(book), "--max-steps", "6", "--data-dir", str(tmp_path / "Data")]
    assert train(one, *options, "--batch-size", 8)[0] == 0
    outputs = run_ranks([SCRIPT, *SMALL, *options, "--distributed", "--batch-size", batch], [many] * size)
    for rank, (code, output) in enumerate(outputs):
        assert code == 0, output
        assert f"[rango {rank}] Sincronización inicial" in output
        assert f"[rango {rank}] Todos los procesos completaron el entrenamiento" in output
        assert ("paso 1/" in output) == (rank == 0)
    for (_, a), (_, b) in zip(losses(one), losses(many), strict=True):
        assert a == pytest.approx(b, abs=1e-5)
    rows = [report.read_table(folder / "logs" / "train.csv")[-1] for folder in (one, many)]
    assert float(rows[0]["val_loss"]) == pytest.approx(float(rows[1]["val_loss"]), abs=1e-5)


def test_machines_without_data_or_checkpoint_receive_them(book, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    command = [SCRIPT, *SMALL, "--distributed", "--batch-size", "2"]
    assert train(first, "--prepare", "--dataset-name", book)[0] == 0
    outputs = run_ranks([*command, "--max-steps", "4"], [first, second])
    assert [code for code, _ in outputs] == [0, 0], outputs
    assert "No tiene los datos el rango 1" in outputs[0][1]
    for path in (first / "Data" / "libro").iterdir():
        assert (second / "Data" / "libro" / path.name).read_bytes() == path.read_bytes()
    assert not list(second.glob("checkpoints/*.pt")) and not (second / "gpt2_spanish.pth").exists()
    assert "hay otros datos preparados" not in outputs[1][1]
    outputs = run_ranks([*command, "--max-steps", "8"], [first, second])
    assert [code for code, _ in outputs] == [0, 0], outputs
    assert "Se reanuda en el paso 4" in outputs[0][1] and "los datos el rango" not in outputs[0][1]


def test_an_epoch_ends_where_its_text_does_whatever_number_of_processes_read_it(book, tmp_path):
    """Five steps of one process are as much text as two and a half of two: the others are still to do."""
    def rates(folder, first):
        rows = report.read_table(folder / "logs" / "train.csv")
        return {int(row["step"]) - first: row["lr"] for row in rows}, rows[-1]

    whole, changed = tmp_path / "whole", tmp_path / "changed"
    epoch = ["--dataset-name", book, "--epochs", "1", "--batch-size", "32"]
    for folder in (whole, changed):
        folder.mkdir()
    assert train(changed, *epoch, "--max-steps", 5)[0] == 0
    for folder in (whole, changed):
        outputs = run_ranks([SCRIPT, *SMALL, *epoch, "--distributed"], [folder] * 2)
        assert [code for code, _ in outputs] == [0, 0], outputs
    expected, last = rates(whole, 0)
    steps = max(expected)
    seen = 2  # and a half, which the epoch's ragged tail makes up for
    found, end = rates(changed, 5 - seen)
    assert f"lo ya visto equivale a {seen} de los {steps} pasos de ahora, y faltan {steps - seen}." in outputs[0][1]
    assert max(found) == steps > 5 and all(found[step] == expected[step] for step in range(4, steps + 1))
    assert float(last["epoch"]) - 0.1 < float(end["epoch"]) <= 1
    (code, output), _ = run_ranks([SCRIPT, *SMALL, *epoch, "--distributed"], [changed] * 2)
    assert code == 0 and "ya estaba completo" in output, output


def test_other_data_are_read_as_often_as_was_asked(book, tmp_path):
    other = tmp_path / "otro.txt"
    other.write_text(book.read_text(encoding="utf-8")[:30_000], encoding="utf-8")
    options = ["--epochs", "1", "--batch-size", "32", "--tokenizer", "Data/libro/tokenizer.model"]
    assert train(tmp_path, "--prepare", "--dataset-name", book)[0] == 0
    assert train(tmp_path, "--dataset-name", book, *options, "--max-steps", 3)[0] == 0
    code, output = train(tmp_path, "--dataset-name", other, *options)
    steps = len(losses(tmp_path)) - 3
    assert code == 0 and steps > 0, output
    assert f"lo ya visto equivale a 0 de los {steps} pasos de ahora, y faltan {steps}." in output
    assert f"paso {steps + 3}/" in output


def test_compilation_that_cannot_work_is_refused_before_anything_is_done(book, tmp_path):
    code, output = train(tmp_path, "--dataset-name", book, "--compile", fresh=True, CXX="/bin/false",
                         AURA_EXTENSION="off", TORCHINDUCTOR_CACHE_DIR=tmp_path / "inductor")
    assert code == 2 and re.fullmatch(r"error: --compile: .*C\+\+ compiler.*, o quite --compile\n", output), output
    assert not (tmp_path / "Data").exists()


def test_a_damaged_copy_on_another_machine_is_sent_again(book, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        assert train(folder, "--prepare", "--dataset-name", book)[0] == 0
    shard = second / "Data" / "libro" / "train-00000.bin"
    content = bytearray(shard.read_bytes())
    content[500] ^= 1
    shard.write_bytes(content)
    # LOCAL_RANK as on two machines: each process is the first of its own
    outputs = run_ranks([SCRIPT, *SMALL, "--distributed", "--max-steps", "2", "--local-rank", "0"], [first, second])
    assert [code for code, _ in outputs] == [0, 0], outputs
    assert "Aviso" in outputs[1][1] and "No tiene los datos el rango 1" in outputs[0][1]
    assert shard.read_bytes() == (first / "Data" / "libro" / "train-00000.bin").read_bytes()


def test_other_data_of_the_same_name_on_another_machine_are_replaced_and_it_says_so(book, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    (second / "otro").mkdir(parents=True)
    first.mkdir()
    (second / "otro" / book.name).write_text("Otro texto, que no es el mismo. " * 400, encoding="utf-8")
    assert train(first, "--prepare", "--dataset-name", book)[0] == 0
    assert train(second, "--prepare", "--dataset-name", second / "otro" / book.name, "--vocab-size", 300)[0] == 0
    outputs = run_ranks([SCRIPT, *SMALL, "--distributed", "--max-steps", "2", "--local-rank", "0"], [first, second])
    assert [code for code, _ in outputs] == [0, 0], outputs
    assert "[rango 1] Aviso: en 'Data/libro' hay otros datos preparados: se sustituyen" in outputs[1][1]


def test_data_that_do_not_match_their_hash_are_refused(book, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    assert train(first, "--prepare", "--dataset-name", book)[0] == 0
    path = first / "Data" / "libro" / "dataset.json"
    meta = json.loads(path.read_text())
    meta["splits"]["train"]["shards"][0]["sha256"] = "0" * 64
    path.write_text(json.dumps(meta))
    outputs = run_ranks([SCRIPT, *SMALL, "--distributed", "--max-steps", "2"], [first, second])
    assert all(code == 2 and "train-00000.bin" in output and "sha256" in output for code, output in outputs), outputs
    assert list(second.iterdir()) == []


def test_a_signal_to_one_rank_stops_all_and_other_world_size_goes_on(book, tmp_path):
    command = [SCRIPT, *SMALL, "--dataset-name", book, "--max-steps", "400", "--distributed", "--log-interval", "5"]
    with ranks([*command, "--batch-size", "2"], [tmp_path] * 2) as processes:
        processes[0].wait_for("paso 10/")
        processes[1].child.send_signal(signal.SIGUSR1)
        assert [process.finish()[0] for process in processes] == [138, 138]
    (path,) = (tmp_path / "checkpoints").glob("*.pt")
    step = int(path.stem[5:])
    code, output = run([*command, "--batch-size", "4", "--max-steps", str(step + 3)], tmp_path)
    assert code == 0 and f"Se reanuda en el paso {step}" in output


def test_a_machine_that_dies_ends_the_others_with_the_checkpoint_named(book, tmp_path):
    command = [SCRIPT, *SMALL, "--dataset-name", book, "--max-steps", "5000", "--distributed", "--batch-size", "2",
               "--checkpoint-freq", "5", "--dist-timeout", "20"]
    with ranks(command, [tmp_path] * 2) as processes:
        processes[0].wait_for("paso 12/")
        os.killpg(processes[1].child.pid, signal.SIGKILL)
        code, output = processes[0].finish(90)
    assert code == 3 and "se ha perdido la comunicación" in output and "último punto de control: checkpoints/" in output


KILLED_AS_IT_SAVES = """
import os, signal, time
from pathlib import Path
import train_gpt2_spanish as script
from aura import checkpointer, cli, distributed
save, wait = checkpointer.save_file, distributed.Session.wait_for_main
def killed(path, state):
    if path.name == "ckpt-00000004.pt" and not int(os.environ["RANK"]):
        end = time.monotonic() + 60
        while not Path("waits").exists() and time.monotonic() < end:
            time.sleep(0.05)
        os.kill({"rank 0": os.getpid, "torchrun": os.getppid}[os.environ["KILLED"]](), signal.SIGKILL)
    save(path, state)
def told(dist):
    if dist.rank:
        Path("waits").touch()
    return wait(dist)
checkpointer.save_file, distributed.Session.wait_for_main = killed, told
cli.run(script.main)
"""


def test_a_first_rank_that_dies_in_the_last_save_leaves_the_others_the_one_before(book, tmp_path):
    (tmp_path / "killed.py").write_text(KILLED_AS_IT_SAVES)
    command = [tmp_path / "killed.py", *SMALL, "--dataset-name", book, "--max-steps", "4", "--distributed",
               "--batch-size", "2", "--checkpoint-freq", "2"]
    _, (code, output) = run_ranks(command, [tmp_path] * 2, KILLED="rank 0")
    assert code == 3 and output.endswith("último punto de control: checkpoints/ckpt-00000002.pt\n"), output


@pytest.mark.parametrize("killed", ["rank 0", "torchrun"])
def test_what_dies_in_the_last_save_under_torchrun(killed, book, tmp_path):
    """Rank 0: the others, who agree on their weights in some steps only, save them. torchrun, and its store with it:
    that is a signal like another, though the steps are all done."""
    (tmp_path / "killed.py").write_text(KILLED_AS_IT_SAVES)
    command = ["-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}",
               tmp_path / "killed.py", *SMALL, "--dataset-name", book, "--max-steps", "4", "--distributed",
               "--batch-size", "2", "--checkpoint-freq", "2", "--sync", "diloco", "--sync-every", "2"]
    _, output = run(command, tmp_path, KILLED=killed)
    if killed == "rank 0":
        assert "ha muerto sin decir por qué" in output
        assert "último punto de control: checkpoints/ckpt-00000004.pt" in output, output
    else:
        assert "Detenido por una señal en el paso 4; último punto de control: checkpoints/ckpt-00000004.pt" in output
        assert "error:" not in output and not (tmp_path / "gpt2_spanish.pth").exists(), output


@pytest.mark.parametrize("policy, code", [("restart", 0), ("skip", 0), ("stop", 3)])
def test_nan_on_one_rank_is_noticed_by_all(book, tmp_path, policy, code):
    command = [SCRIPT, *SMALL, "--dataset-name", book, "--max-steps", "8", "--distributed", "--batch-size", "2",
               "--checkpoint-freq", "3", "--nan-policy", policy]
    outputs = run_ranks(command, [tmp_path] * 2, AURA_INJECT_NAN="1:5")
    assert [got for got, _ in outputs] == [code, code], outputs
    if policy != "stop":
        assert "AVISO, paso 5" in outputs[0][1]
        assert torch.isfinite(weights(tmp_path / "gpt2_spanish.pth")["wte.weight"]).all()
    else:
        assert "paso 5" in outputs[0][1] and "ckpt-00000003.pt" in outputs[0][1]


def test_a_rehearsal_of_nothing_is_refused_before_a_former_log_is_moved(book, tmp_path):
    code, output = train(tmp_path, "--dataset-name", book, "--max-steps", 1, AURA_INJECT_NAN="1;3")
    assert code == 2 and "AURA_INJECT_NAN='1;3'" in output and "RANGO:MICROLOTE" in output, output
    assert not list(tmp_path.rglob("train.csv"))


def test_a_run_that_diverges_hands_nothing_over(book, tmp_path):
    code, output = train(tmp_path, "--dataset-name", book, "--max-steps", 1, "--lr", "1e20", "--warmup-ratio", 0,
                         "--sample-length", 5)
    assert code == 3 and "Traceback" not in output, output
    assert "sin muestra: no se puede elegir ningún token" in output and "--lr menor" in output
    assert not (tmp_path / "gpt2_spanish.pth").exists()


@pytest.mark.parametrize("options, pieces", [
    (["--dataset-name", "nada.txt"], ["nada.txt", "no existe"]),
    (["--seq-len", "100000"], ["--seq-len"]),
    (["--batch-size", "99999"], ["--batch-size", "99999"]),
    (["--n-embd", "33"], ["--n-embd 33", "34"]),
    (["--checkpoint-dir", "/proc/x"], ["/proc/x", "--checkpoint-dir"]),
    (["--log-dir", "/proc/x"], ["/proc/x", "--log-dir"]),
    (["--output", "/proc/x/y.pth"], ["/proc/x", "--output"]),
    (["--data-dir", "/proc/x"], ["/proc/x", "--data-dir"]),
    (["--tokenizer", "falta.model"], ["falta.model", "--tokenizer"]),
    (["--resume", "falta.pt"], ["falta.pt", "--resume"]),
    (["--vocab-size", "20"], ["--vocab-size 20"]),
    (["--beta2", "1"], ["--beta2", "1", "0.99999"]),
    (["--vocab-size", str(2**40)], [f"--vocab-size {2**40}"]),
    (["--n-embd", "4000000"], ["GB", "--n-embd"]),
    (["--dataset-name", ""], ["--dataset-name", "''"]),
])
def test_bad_input_is_one_line_with_the_way_out(book, tmp_path, options, pieces):
    code, output = train(tmp_path, "--dataset-name", book, "--max-steps", 1, *options)
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert code == 2 and len(errors) == 1 and "Traceback" not in output, output
    for piece in pieces:
        assert piece in errors[0]
    left = [path for path in tmp_path.rglob("*") if path.is_dir() and not list(path.iterdir()) or path.name[0] == "."]
    assert not left, "no folder that is empty, no lock, nothing half-written"


def test_what_only_matters_when_preparing_needs_a_source(book, tmp_path):
    assert train(tmp_path, "--prepare", "--dataset-name", book)[0] == 0
    options = ["--max-steps", 1, "--tokenizer", "Data/libro/tokenizer.model"]
    code, output = train(tmp_path, *options)
    assert code == 2 and "--dataset-name" in output
    code, output = train(tmp_path, *options, "--dataset-name", book)
    assert code == 0, output


def test_another_model_in_the_checkpoint_folder_is_refused_then_set_aside(book, tmp_path):
    assert train(tmp_path, "--dataset-name", book, "--max-steps", 1)[0] == 0
    before = dataset.latest(tmp_path / "Data")
    code, output = train(tmp_path, "--max-steps", 1, "--n-layer", 2, "--dataset-name", book, "--vocab-size", 300)
    assert code == 2 and "vocab_size=400 (ahora 300), n_layer=1 (ahora 2)" in output and "--resume none" in output
    assert dataset.latest(tmp_path / "Data") == before, "a run that is refused replaces nothing"
    model = (tmp_path / "gpt2_spanish.pth").read_bytes()
    again = ["--n-layer", 2, "--dataset-name", book, "--tokenizer", "gpt2_spanish.tokenizer.model"]
    code, output = train(tmp_path, "--max-steps", 2, *again, "--resume", "none", "--checkpoint-freq", 1)
    assert code == 0 and len(list(tmp_path.glob("checkpoints/anterior-*/*.pt"))) == 1
    [earlier] = tmp_path.glob("anterior-*/gpt2_spanish.pth")
    assert earlier.read_bytes() == model != (tmp_path / "gpt2_spanish.pth").read_bytes(), output
    assert train(tmp_path, "--max-steps", 3, *again)[0] == 0 and [*tmp_path.glob("anterior-*/*.pth")] == [earlier]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_ends_clearly_and_keeps_the_last_checkpoint(book, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.system(f"mount -t tmpfs -o size=2m tmpfs {disk}"):
        pytest.skip("this machine does not allow mounts")
    try:
        code, output = train(tmp_path, "--dataset-name", book, "--max-steps", 400, "--checkpoint-freq", 2,
                             "--keep-checkpoints", 50, "--checkpoint-dir", disk)
        assert code == 3 and "no queda espacio" in output, output
        left = sorted(path.name for path in disk.iterdir() if path.name != ".en-uso")
        assert left and all(name.startswith("ckpt-") for name in left) and left[-1] in output
    finally:
        os.system(f"umount {disk}")


def test_our_kernels_and_the_formula_train_alike_and_the_log_says_which(book, tmp_path):
    curves = {}
    for choice, told in (("fused", "núcleos propios"), ("sdpa", "scaled_dot_product"), ("reference", "la fórmula")):
        folder = tmp_path / choice
        folder.mkdir()
        code, output = train(folder, "--dataset-name", book, "--max-steps", 30, "--attention", choice)
        assert code == 0 and told in output, output
        curves[choice] = [loss for _, loss in losses(folder)]
    for choice in ("fused", "sdpa"):
        assert curves[choice] == pytest.approx(curves["reference"], abs=1e-4)


def test_fused_without_an_extension_is_refused_and_auto_goes_on(book, tmp_path):
    command = ["--dataset-name", book, "--max-steps", 2]
    code, output = train(tmp_path, *command, "--attention", "fused", AURA_EXTENSION="off")
    assert code == 2 and "--attention fused" in output and output.strip().count("error:") == 1, output
    code, output = train(tmp_path, *command, AURA_EXTENSION="off")
    assert code == 0 and "scaled_dot_product_attention de torch" in output, output


def test_two_runs_do_not_share_a_folder_of_tables(book, tmp_path):
    words = [SCRIPT, *SMALL, "--dataset-name", str(book), "--max-steps", "5000"]
    with Process([*words, "--checkpoint-dir", "a"], tmp_path) as process:
        process.wait_for("paso 2/")
        code, output = run([*words, "--checkpoint-dir", "b"], tmp_path)
        assert code == 2 and "--log-dir" in output and len(output.splitlines()) == 1, output


def test_a_model_that_cannot_be_written_names_the_checkpoint(book, tmp_path):
    out = tmp_path / "salida"
    with Process([SCRIPT, *SMALL, "--dataset-name", str(book), "--max-steps", "30", "--output", "salida/m.pth"],
                 tmp_path) as process:
        process.wait_for("paso 2/")
        out.rmdir()
        code, output = process.finish()
    assert code == 3 and "repita la misma orden, que lo guardará" in output, output
    assert "ckpt-00000030.pt" in output.splitlines()[-1], output


def test_a_group_whose_folder_is_in_use_leaves_nothing(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    held = files.lock(tmp_path / "checkpoints" / files.IN_USE)
    try:
        outputs = run_ranks([SCRIPT, *SMALL, "--distributed"], [tmp_path] * 2)
    finally:
        os.close(held)
    assert all(code == 2 and "ejecución está usando './checkpoints'" in output for code, output in outputs), outputs
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


@pytest.mark.parametrize("script, options", [
    (SCRIPT, ["--preset", "gpt2", "--n-layer", "900", "--n-embd", "9600"]),
    (ROOT / "hrm_training_large_1b.py", ["--n-layer", "900", "--n-embd", "9600", "--n-ff", "9600"])])
def test_a_model_too_large_whatever_its_vocabulary_is_refused_before_the_data_are_prepared(tmp_path, script, options):
    data = "--dataset" if script != SCRIPT else "--dataset-name"
    code, output = run([script, *options, data, "muestra"], tmp_path)
    assert code == 2 and "GB para pesos, gradientes" in output and "elija un --preset menor" in output, output
    assert len(output.splitlines()) == 1 and not list(tmp_path.iterdir()), output


@pytest.mark.parametrize("script", ["train_gpt2_spanish.py", "hrm_training_small_100m.py", "train_distributed.py"])
def test_kernels_that_cannot_be_had_are_refused_before_the_data_take_their_time(tmp_path, script):
    data = "--dataset-name" if script == SCRIPT.name else "--dataset"
    code, output = run([ROOT / script, data, "no_existe.txt", "--attention", "fused"], tmp_path, AURA_EXTENSION="off")
    assert code == 2 and "--attention fused: " in output and len(output.splitlines()) == 1, output
    assert not list(tmp_path.iterdir())


def test_the_name_of_the_model_ends_as_those_beside_it_expect(tmp_path):
    for name in ("m-0.1", "modelo.json"):
        code, output = train(tmp_path, "--output", name)
        assert code == 2 and f"--output '{name}'" in output and len(output.splitlines()) == 1, output


def test_going_back_to_an_earlier_checkpoint_is_another_way(book, tmp_path):
    words = ["--dataset-name", book, "--checkpoint-freq", 2, "--keep-checkpoints", 2, "--keep-every", 2]
    assert train(tmp_path, *words, "--max-steps", 8)[0] == 0
    back = ["--resume", tmp_path / "checkpoints" / "ckpt-00000004.pt"]
    with Process([SCRIPT, *SMALL, *map(str, [*words, *back, "--max-steps", 5000])], tmp_path,
                 AURA_INJECT_NAN="0:1") as process:
        process.wait_for("paso 9/")
        process.child.send_signal(signal.SIGTERM)
        code, output = process.finish()
    assert code == 143 and "ckpt-00000004.pt se han movido a" in output, output
    (kept,) = (tmp_path / "checkpoints").glob("anterior-*/train.csv")
    assert len(report.read_table(kept)) == 8, "the log goes on without the rows of the other way"
    assert "se restauran los pesos de" in output and "ckpt-00000004.pt; desde ahora la tasa" in output, output
    assert "Para seguir, la misma orden con --resume auto." in output
    last = re.search(r"último punto de control: (\S+\.pt)", output)[1]
    assert (tmp_path / last).exists()
    code, output = train(tmp_path, *words, "--resume", "auto", "--max-steps", 9)
    assert code == 0 and f"desde {last}" in output
