"""train_distributed.py: one training by one process, DDP and FSDP, stopped, resumed elsewhere, and what it leaves."""

import contextlib
import errno
import io
import json
import math
import shutil
import signal
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import train_distributed as script
from aura import checkpoint, distributed, finetune, loop, products, report, results, squad, start, wordpiece
from aura.errors import TrainingFault, UserError
from aura.models import bert
from aura.output import other_run
from aura.session import Session
from aura.signals import StopRequest
from aura.words import counted
from tests.support import ROOT, Process, run, run_ranks

SCRIPT = ROOT / "train_distributed.py"
# 12 windows a step, whoever has them; dropout is on.
OPTIONS = ["--model", "random:tiny", "--dataset", "muestra", "--max-len", 128, "--doc-stride", 64, "--question-len", 32,
           "--batch-size", 2, "--max-steps", 6, "--lr", 1e-3, "--log-interval", 1, "--checkpoint-freq", 3,
           "--keep-checkpoints", 9, "--max-val-examples", 12, "--eval-interval", 4]
CUT = 3
LAYOUTS = {"one": (1, 6, "ddp"), "ddp2": (2, 3, "ddp"), "fsdp2": (2, 3, "fsdp")}


def train(folder, ranks, accum, strategy, *more):
    """Run the script with `ranks` processes, a single one in this process; [(exit code, output)] in rank order."""
    options = [SCRIPT, *OPTIONS, "--grad-accum", accum, "--strategy", strategy, *more]
    if ranks == 1:
        said = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
            patch.setattr(report, "peak_flops", lambda *_: 1e12)  # as on a card that is known
            patch.chdir(folder)
            patch.setattr("sys.argv", list(map(str, options)))
            return [(script.main(), said.getvalue())]
    others = [folder.with_name(f"{folder.name}-{rank}") for rank in range(1, ranks)]
    for other in others:
        other.mkdir()
    return run_ranks(options, [folder, *others])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{name: (folder, output of each rank)} of the uninterrupted runs of LAYOUTS."""
    made = {}
    for name, layout in LAYOUTS.items():
        folder = tmp_path_factory.mktemp("runs") / name
        folder.mkdir()
        outputs = train(folder, *layout)
        assert [code for code, _ in outputs] == [0] * len(outputs), outputs
        made[name] = folder, [output for _, output in outputs]
    return made


def curve(folder, column="loss"):
    return [float(row[column]) for row in report.read_table(folder / "logs" / "train.csv") if row[column]]


def scores(folder):
    return json.loads((folder / "bert_squad" / "metrics.json").read_text())


def checksum(model, *words):
    """What the script says of the weights of --model."""
    args = script.build_parser().parse_args(["--model", str(model), *words])
    return script.read_model(args, squad.open_data("muestra")[0], Session())[2]


@pytest.mark.parametrize("name", ["ddp2", "fsdp2"])
def test_two_processes_train_as_one_does(runs, name):
    one, other = runs["one"][0], runs[name][0]
    assert curve(other) == pytest.approx(curve(one), abs=1e-4) and len(curve(one)) == 6
    assert curve(other, "val_loss") == pytest.approx(curve(one, "val_loss"), abs=1e-4)
    assert scores(other)["f1"] == scores(one)["f1"] and scores(one)["f1"] > 0
    answers = [json.loads((folder / "bert_squad" / "predictions.json").read_text()) for folder in (one, other)]
    assert answers[0] == answers[1] and len(answers[0]) >= 12
    assert curve(one)[-1] < curve(one)[0]


def test_every_cell_of_the_table_is_a_number(runs):
    """As TensorBoard reads them, MFU too."""
    folder, outputs = runs["one"]
    assert len(curve(folder, "mfu")) == 6 and "MFU" in outputs[0]
    for column in report.COLUMNS:
        assert all(map(math.isfinite, curve(folder, column)))


def test_each_rank_says_its_memory_and_its_part(runs):
    outputs = runs["fsdp2"][1]
    for rank, output in enumerate(outputs):
        assert f"[rango {rank}] Memoria máxima: " in output and f"[rango {rank}] Sincronización inicial: una de las 2"
    assert "estrategia fsdp" in outputs[0] and "paso" not in outputs[1]


@pytest.mark.parametrize("ranks, accum, strategy", [(1, 6, "ddp"), (3, 2, "fsdp"), (2, 3, "ddp")])
def test_a_checkpoint_of_two_shards_goes_on_elsewhere(runs, tmp_path, ranks, accum, strategy):
    whole, folder = runs["fsdp2"][0], tmp_path / "on"
    (folder / "checkpoints" / "best").mkdir(parents=True)
    (folder / "checkpoints" / "best" / "metrics.json").write_text('{"val_loss": 0.0, "exact_match": 99.0, "f1": 99.5}')
    shutil.copy(checkpoint.path_of(whole / "checkpoints", CUT), folder / "checkpoints")
    outputs = train(folder, ranks, accum, strategy)
    assert [code for code, _ in outputs] == [0] * ranks, outputs
    assert f"Se reanuda en el paso {CUT}" in outputs[0][1]
    assert "El mejor por pérdida de validación: EM 99.00, F1 99.50" in outputs[0][1]
    assert curve(folder) == pytest.approx(curve(whole)[CUT:], abs=1e-4) and len(curve(folder)) == 6 - CUT
    (result,), notes = results.read(folder / "results")
    assert result.resumed and result.steps == 6 - CUT and not notes


def test_stopped_and_resumed_is_as_uninterrupted(runs, tmp_path):
    options = [SCRIPT, *OPTIONS, "--grad-accum", 6]
    with Process(options, tmp_path) as process:
        process.wait_for("paso 1/")
        process.child.send_signal(signal.SIGTERM)
        code, output = process.finish()
    assert code == 143 and "Recibida SIGTERM" in output and "La misma orden lo reanuda" in output, output
    (stopped,), _ = results.read(tmp_path / "results")
    assert stopped.exit == results.SIGNALLED and 1 <= stopped.steps < 6
    assert run(options, tmp_path)[0] == 0
    whole = runs["one"][0]
    assert curve(tmp_path) == curve(whole)
    for folder in ("bert_squad", "checkpoints/best"):
        assert (tmp_path / folder / "model.safetensors").read_bytes() == (
            whole / folder / "model.safetensors").read_bytes()
    a, b = (checkpoint.read(checkpoint.path_of(folder / "checkpoints", 6)) for folder in (tmp_path, whole))
    assert all(torch.equal(a["model"][name], b["model"][name]) for name in b["model"])
    assert a["loader"] == b["loader"]


STOPPED_IN_THE_END = """
import os, signal
import train_distributed as script
from aura import cli, finetune
forward = finetune.Evaluation._forward
def asked(self, request=None):
    if self.clock.step == 6:
        os.kill(os.getpid(), signal.SIGTERM)
    return forward(self, request)
finetune.Evaluation._forward = asked
cli.run(script.main)
"""


STOPPED_AFTERWARDS = """
import os, signal
import train_distributed as script
from aura import cli, finetune, report
def asked_before(work):
    def then(*words, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        return work(*words, **options)
    return then
report.Reporter.close = asked_before(report.Reporter.close)
script.finish = asked_before(script.finish)
finetune.record = asked_before(finetune.record)
cli.run(script.main)
"""


def test_a_signal_after_the_last_step_ends_nothing_and_in_a_late_scoring_that(runs, tmp_path):
    path, options = tmp_path / "stopped.py", [*OPTIONS, "--grad-accum", 6]
    path.write_text(STOPPED_AFTERWARDS)
    code, output = run([path, *options], tmp_path)
    assert code == 0 and "Cifras de esta ejecución" in output, output
    assert scores(tmp_path) == scores(runs["one"][0])
    shutil.rmtree(tmp_path / "bert_squad")
    path.write_text(STOPPED_IN_THE_END)
    code, output = run([path, *options], tmp_path)
    assert code == 143 and "ya estaba completo" in output and "La misma orden lo reanuda" in output, output
    assert not [*(tmp_path / "bert_squad").glob("[!.]*")]


def test_a_stop_in_the_last_evaluation_leaves_it_for_the_next_start(tmp_path):
    path, options = tmp_path / "stopped.py", [*OPTIONS, "--grad-accum", 6]
    path.write_text(STOPPED_IN_THE_END)
    code, output = run([path, *options], tmp_path)
    assert code == 143 and "en el paso 6" in output and not [*(tmp_path / "bert_squad").glob("[!.]*")], output
    assert run([SCRIPT, *options], tmp_path)[0] == 0
    assert scores(tmp_path)["val_loss"] > 0


def test_a_nan_before_the_first_checkpoint_begins_again_with_the_first_weights(tmp_path, monkeypatch):
    """Step 3 after it has the loss of a run that has never moved. A step later it would be too late to begin again."""
    for name, rate, spoiled in (("still", 1e-12, ""), ("nan", 1e-3, "0:2")):
        (tmp_path / name).mkdir()
        monkeypatch.setenv("AURA_INJECT_NAN", spoiled)
        ((code, output),) = train(tmp_path / name, 1, 1, "ddp", "--lr", rate, "--max-steps", 4, "--checkpoint-freq", 0)
        assert code == 0 and ("se reinician los pesos" in output) == bool(spoiled)
    assert curve(tmp_path / "nan")[2] == pytest.approx(curve(tmp_path / "still")[2], abs=1e-6)


def test_the_figures_of_each_run_are_left(runs, tmp_path):
    for number, (folder, _) in enumerate(runs.values()):
        for file in (folder / "results").glob("*.json"):
            shutil.copy(file, tmp_path / f"{number}-{file.name}")
    found, notes = results.read(tmp_path)
    by_layout = {(result.strategy, result.processes): result for result in found}
    assert not notes and by_layout.keys() == {("none", 1), ("ddp", 2), ("fsdp", 2)}
    for result in found:
        assert result.steps == 6 and result.global_batch == 12 and not result.resumed and result.nodes == 1
        assert result.f1 == scores(runs["one"][0])["f1"] and result.samples_per_s > 0
        assert len(result.peak_memory_gb) == result.processes and min(result.peak_memory_gb) > 0.1
        assert result.weights_crc32 is None, "of another seed it is the same model"
        assert result.recipe == {"lr": 1e-3, "min_lr_ratio": 0.0, "warmup_ratio": 0.1, "weight_decay": 0.01,
                                 "grad_clip": 1.0, "ema": 0.0, "dropout": 0.1, "attention_dropout": 0.1}
        assert result.computing == {"--attention": "auto", "--compile": "no", "--grad-checkpointing": "no"}
    parameters = by_layout["ddp", 2].parameters
    assert by_layout["none", 1].communication_s is None
    tokens = bert.PRESETS["tiny"].vocab_size * bert.PRESETS["tiny"].n_embd  # whose gradient travels by rows
    assert by_layout["ddp", 2].exchange_bytes == 4 * (parameters - tokens)
    assert by_layout["fsdp", 2].exchange_bytes == 4 * parameters * (2 * 3 + 1)  # gathered twice a micro-batch
    assert all(by_layout[kind, 2].exchange_s > 0 and by_layout[kind, 2].alone_step_s > 0 for kind in ("ddp", "fsdp"))


@pytest.mark.parametrize("stopped", [0, signal.SIGTERM])
def test_the_figures_are_of_the_steps_of_this_run_alone(tmp_path, monkeypatch, stopped):
    args = script.build_parser().parse_args(["--results-dir", str(tmp_path), "--batch-size", "2", "--grad-accum", "3"])
    task = SimpleNamespace(config=bert.BertConfig(), dataset="muestra", sha256="a", questions=5, checksum=10)
    run = SimpleNamespace(progress=SimpleNamespace(step=10), loader=SimpleNamespace(steps_per_epoch=4),
                          precision=SimpleNamespace(name="fp32"), sync=SimpleNamespace(method="ddp"))
    monkeypatch.setattr(finetune, "strategy", lambda *_: "ddp")
    monkeypatch.setattr(finetune, "exchange_figures", lambda *_: {"alone_step_s": 1.5, "exchange_bytes": 8})
    finetune.record(args, Session(), task, SimpleNamespace(run=run, model=None), None,
                    SimpleNamespace(step_times=[1.0, 1.0, 2.0, 2.0, 2.0, 16.0]), {"f1": 7.0}, first=4, stopped=stopped,
                    request=StopRequest())
    (found,), notes = results.read(tmp_path)
    assert not notes and (found.steps, found.epochs, found.resumed, found.train_examples) == (6, 1.5, True, 5)
    assert (found.seconds, found.step_s, found.samples_per_s, found.global_batch) == (24.0, 2.0, 6 * 6 / 24, 6)
    assert (found.f1, found.val_loss, found.weights_crc32, found.nodes) == (7.0, None, "0000000a", 1)
    assert found.exit == (results.SIGNALLED if stopped else results.COMPLETE)
    assert (found.alone_step_s, found.communication_s) == ((None, None) if stopped else (1.5, 0.5 * 6)), "in a hurry"


def test_the_recipe_is_what_has_effect():
    args = script.build_parser().parse_args(["--lr", "1e-4", "--sync", "diloco"])
    task = SimpleNamespace(config=bert.BertConfig(dropout=0.3, attention_dropout=0.2))
    exact = finetune.recipe(args, task, SimpleNamespace(method="ddp"))
    assert (exact["lr"], exact["dropout"], exact["attention_dropout"]) == (1e-4, 0.3, 0.2)
    few = SimpleNamespace(method="diloco", every=8, outer_lr=0.9, outer_momentum=0.5)
    assert finetune.recipe(args, task, few) == {**exact, "sync_every": 8, "sync_lr": 0.9, "sync_momentum": 0.5}


def test_the_best_model_is_kept_and_what_is_left_can_be_trained_on(runs, tmp_path):
    folder, _ = runs["one"]
    best = json.loads((folder / "checkpoints" / "best" / "metrics.json").read_text())
    assert best["val_loss"] == min(curve(folder, "val_loss")) and len(curve(folder, "val_loss")) > 1
    answers = json.loads((folder / "bert_squad" / "predictions.json").read_text())
    examples, _, _ = squad.open_data("muestra")
    chosen = [example for example in examples if example.id in answers]
    assert squad.evaluate(chosen, answers)["f1"] == pytest.approx(scores(folder)["f1"])
    ((code, output),) = train(tmp_path, 1, 1, "ddp", "--model", folder / "bert_squad", "--max-steps", 1, "--padding",
                              "fixed")
    assert code == 0 and "tensores cargados" in output and "nuevos" not in output, output
    (result,), _ = results.read(tmp_path / "results")
    ours, theirs = (checksum(runs[name][0] / "bert_squad") for name in ("one", "fsdp2"))
    assert result.weights_crc32 == f"{ours:08x}" != f"{theirs:08x}"
    bare = tmp_path / "bare"
    shutil.copytree(folder / "bert_squad", bare)
    tensors = load_file(bare / "model.safetensors")
    save_file({name: tensors[name] for name in tensors if "qa_outputs" not in name}, bare / "model.safetensors")
    assert checksum(bare) == checksum(bare, "--seed", "7") == ours, "a fresh head is another one for each seed"
    for copy in ("other", "third"):
        shutil.copytree(tmp_path / "checkpoints", tmp_path / copy / "checkpoints")
    with pytest.raises(UserError, match=f"empezó con otros pesos, los de --model '{folder}/bert_squad': indique aque"):
        train(tmp_path / "other", 1, 1, "ddp", "--model", runs["fsdp2"][0] / "bert_squad", "--max-steps", 2,
              "--padding", "fixed")
    with pytest.raises(UserError, match="empezó con --padding fixed, que también decide el orden .*: indique ese"):
        train(tmp_path / "third", 1, 1, "ddp", "--model", folder / "bert_squad", "--max-steps", 2)


@pytest.mark.parametrize("padding, one_size", [("dynamic", False), ("fixed", True)])
def test_products_of_batches_of_any_length_are_not_compiled_for_each(padding, one_size):
    task = SimpleNamespace(module=bert.QuestionAnswering(bert.PRESETS["tiny"]))
    module = script.build(SimpleNamespace(padding=padding), Session(), task)
    assert {layer.one_size for layer in module.modules() if isinstance(layer, products.Linear)} == {one_size}


def test_a_model_that_diverges_is_no_best_one_and_is_not_handed_over(tmp_path):
    with pytest.raises(TrainingFault, match="tras el último paso, .* y no hay nada que entregar"):
        train(tmp_path, 1, 1, "ddp", "--lr", "1e30", "--warmup-ratio", 0, "--grad-clip", 0, "--max-steps", 1)
    assert not (tmp_path / "checkpoints" / "best").exists() and not (tmp_path / "bert_squad" / "metrics.json").exists()


def test_who_is_about_to_replace_the_model_of_another_run_is_told(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(runs["one"][0])
    monkeypatch.setattr(start, "hold", lambda *_: None)  # that run was this process's
    args = SimpleNamespace(output="bert_squad", checkpoint_dir="checkpoints", log_dir=tmp_path / "l", resume="auto")
    assert other_run(args) is None
    args.checkpoint_dir = tmp_path / "c"
    start.check_places(args, Session(), folder=True)
    assert "'bert_squad' tiene el modelo de otra ejecución, la de --checkpoint-dir 'checkpoints'" in \
        capsys.readouterr().out


def test_links_in_a_circle_are_one_line(tmp_path):
    (tmp_path / "lazo").symlink_to("lazo")
    code, output = run([ROOT / "train_distributed.py", "--model", "random:tiny", "--output", "lazo"], tmp_path)
    assert code == 2 and output.count("\n") == 1 and "'lazo' (los enlaces forman un círculo)" in output, output


def test_the_best_of_other_questions_or_a_damaged_one_does_not_count(tmp_path):
    task = SimpleNamespace(validation_sha256="a")
    args = SimpleNamespace(batch_size=1, checkpoint_dir=tmp_path)
    described = tmp_path / "best" / "metrics.json"
    scored = '"val_loss": 1.0, "exact_match": 50, "f1": 60.0'
    ours = f'{{{scored}, "validation_sha256": "a", "step": 5}}'
    for text, first, counts in ((f'{{{scored}, "validation_sha256": "b"}}', 9, False), ("{", 9, False),
                                ("[]", 9, False), (ours, 9, True), (ours, 5, True), (ours, 4, False), (ours, 0, False),
                                (f"{{{scored}}}", 1, True), ('{"step": 1}', 9, False),
                                (f'{{{scored}, "step": "x"}}', 9, False), ('{"val_loss": [], "f1": null}', 9, False)):
        (tmp_path / "best").mkdir(exist_ok=True)
        described.write_text(text)
        before = len(list(tmp_path.glob("anterior-*/best/metrics.json")))
        evaluation = finetune.Evaluation(args, Session(), task, None, None, first, None)
        assert (evaluation.best is not None) == counts == described.exists(), (text, first)
        assert evaluation.since == (0 if counts else first)
        assert len(list(tmp_path.glob("anterior-*/best/metrics.json"))) == before + (not counts), "nothing is lost"


def test_where_the_questions_to_validate_come_from_and_how_many_are_not_used_is_told(tmp_path, capsys):
    for part in ("train", "dev"):
        shutil.copy(squad.SAMPLE, tmp_path / f"{part}.json")
    file, everything = squad.SAMPLE, len(squad.read(squad.SAMPLE)[0])
    for dataset, limits, taken, left in ((file, (0, 12), True, 0), (file, (9, 12), True, everything - 21),
                                         (tmp_path, (9, 6), False, 2 * everything - 15), (tmp_path, (0, 0), False, 0)):
        words = ["--model", "random:tiny", "--dataset", str(dataset), "--max-train-examples", str(limits[0]),
                 "--max-val-examples", str(limits[1])]
        task = script.read_task(script.build_parser().parse_args(words), Session())
        said = capsys.readouterr().out
        assert ("Las de validar se han sacado de las de entrenar" in said) == taken, said
        assert (f"Sin usar, ni en unas ni en otras: {left} preguntas" in said) == bool(left), said
        assert left or "Sin usar" not in said and task.questions + len(task.examples) == everything * (2 - taken)


def test_a_training_stays_the_same_with_other_questions_to_validate(tmp_path):
    """And its validation figures are those of the other questions."""
    for part in ("train", "dev"):
        shutil.copy(squad.SAMPLE, tmp_path / f"{part}.json")
    said = []
    for questions in (6, 3):
        code, output = run([SCRIPT, *OPTIONS, "--dataset", tmp_path, "--max-train-examples", 9, "--max-steps", 2,
                            "--max-val-examples", questions], tmp_path)
        assert code == 0, output
        said.append(output)
    assert "ya estaba completo: paso 2 de 2" in said[1] and "Los datos son otros" not in said[1], said[1]
    assert "El mejor modelo de antes se ha movido" in said[1] and len(curve(tmp_path)) == 2
    answers = json.loads((tmp_path / "bert_squad" / "predictions.json").read_text())
    assert len(answers) == 3


def test_a_best_that_cannot_be_moved_is_left_and_named(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    described = tmp_path / "best" / "metrics.json"
    described.parent.mkdir()
    described.write_text('{"val_loss": 1.0, "exact_match": 50, "f1": 60.0}')
    monkeypatch.setattr("pathlib.Path.mkdir", full)
    args = SimpleNamespace(batch_size=1, checkpoint_dir=tmp_path)
    with pytest.raises(TrainingFault, match="no queda espacio en el disco; corríjalo y repita la misma orden"):
        finetune.Evaluation(args, Session(), SimpleNamespace(validation_sha256="a"), None, None, 0, None)
    assert described.exists()


def test_accents_are_left_as_the_model_reads_them(runs, tmp_path):
    source = tmp_path / "m"
    shutil.copytree(runs["one"][0] / "bert_squad", source)
    described = source / "tokenizer_config.json"
    described.write_text(json.dumps({**json.loads(described.read_text()), "strip_accents": False}))
    ((code, output),) = train(tmp_path, 1, 1, "ddp", "--model", source, "--max-steps", 1)
    assert code == 0, output
    for folder in ("bert_squad", "checkpoints/best"):
        assert wordpiece.load(source).strip_accents is wordpiece.load(tmp_path / folder).strip_accents is False


def test_a_model_is_scored_without_a_step(runs, tmp_path):
    """On every question of a file, by --model though there is a checkpoint, and nothing of what is there changes."""
    shutil.copytree(runs["one"][0], tmp_path / "one")
    folder = tmp_path / "one"
    examples, before = squad.read(squad.SAMPLE)[0], {
        path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    best, found = folder / "checkpoints" / "best", []
    for name, ranks, strategy in (("alone", 1, "ddp"), ("ddp2", 2, "ddp"), ("fsdp2", 2, "fsdp")):
        other = tmp_path / f"{name}-1"
        other.mkdir()
        outputs = run_ranks([SCRIPT, "--model", best, "--dataset", "muestra", "--max-len", 128, "--doc-stride", 64,
                             "--question-len", 32, "--max-steps", 0, "--strategy", strategy,
                             "--output", tmp_path / name], [folder, other][:ranks])
        assert [code for code, _ in outputs] == [0] * ranks, outputs
        assert f"0 preguntas para entrenar, en 0 ventanas, y {len(examples)} para validar" in outputs[0][1], outputs
        assert not list(other.iterdir())
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == ["metrics.json", "predictions.json"]
        metrics, answers = (json.loads((tmp_path / name / f"{file}.json").read_text()) for file in (
            "metrics", "predictions"))
        assert squad.evaluate(examples, answers)["f1"] == pytest.approx(metrics["f1"]) and metrics["model"] == str(best)
        assert metrics["questions"] == metrics["answered"] == len(examples) and metrics["precision"] == "fp32"
        assert [metrics[name] for name in ("max_len", "doc_stride", "question_len")] == [128, 64, 32]
        found.append((metrics.pop("val_loss"), metrics, answers))
    assert all(each[0] == pytest.approx(found[0][0], abs=1e-5) and each[1:] == found[0][1:] for each in found)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_without_a_step_validation_questions_that_come_apart_are_scored_and_no_others(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copy(squad.SAMPLE, "train.json")
    asked = {"context": "En Soria.", "question": "¿Dónde?", "answers": {"text": ["Soria"], "answer_start": [3]}}
    (tmp_path / "dev.json").write_text(json.dumps({"data": [{"id": str(number), **asked} for number in range(501)]}))
    for more, count in (([], 501), (["--max-val-examples", "3"], 3)):
        monkeypatch.setattr("sys.argv", [str(SCRIPT), "--model", "random:tiny", "--dataset", str(tmp_path),
                                         "--max-steps", "0", *more])
        assert script.main() == 0
        assert len(json.loads((tmp_path / "respuestas" / "predictions.json").read_text())) == count
        assert ("Sin usar" in (said := capsys.readouterr().out)) == bool(more) and "en ./respuestas." in said
        assert "Sin respuesta" not in said


def test_questions_that_nobody_has_answered_are_asked_and_change_no_figure(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    known = squad.some(squad.read(squad.SAMPLE)[0], 6)
    rows = [{"id": e.id, "context": e.context, "question": e.question} for e in known]
    answered = [{**row, "answers": {"text": [e.answers[0][0]], "answer_start": [e.answers[0][1]]}}
                for row, e in zip(rows, known, strict=True)]
    figures, digests = [], set()
    other = {"text": [known[0].answers[0][0], known[0].context[:9]], "answer_start": [known[0].answers[0][1], 0]}
    for scored, asked in ((answered[:4], []), (answered[:4], rows[4:]), ([], rows), (answered, []),
                          ([{**answered[0], "answers": other}, *answered[1:]], [])):
        (tmp_path / "mías.jsonl").write_text("\n".join(map(json.dumps, scored + asked)))
        monkeypatch.setattr("sys.argv", [str(SCRIPT), "--model", str(runs["one"][0] / "bert_squad"), "--dataset",
                                         "mías.jsonl", "--max-steps", "0", "--batch-size", "1"])
        assert script.main() == 0
        said = capsys.readouterr().out
        assert f"{len(scored + asked)} para validar" in said
        assert (f"sin puntuar: {counted(len(asked), 'pregunta')}." in said) == bool(asked), said
        assert ("no hay respuestas con que comparar" in said) == (not scored)
        assert len(json.loads((tmp_path / "respuestas" / "predictions.json").read_text())) == len(scored + asked)
        metrics = json.loads((tmp_path / "respuestas" / "metrics.json").read_text())
        figures.append([metrics.get(name) for name in ("val_loss", "exact_match", "f1")])
        digests.add((metrics["dataset_sha256"], metrics["validation_sha256"]))
    assert figures[1] == [pytest.approx(figures[0][0]), *figures[0][1:]] and figures[2] == [None] * 3
    assert len(digests) == len(figures)  # of the same windows other figures
    (tmp_path / "otras.jsonl").write_text((tmp_path / "mías.jsonl").read_text())
    kept = (tmp_path / "respuestas" / "predictions.json").read_text()
    monkeypatch.setattr("sys.argv", [word.replace("mías", "otras") for word in sys.argv])
    assert script.main() == 0
    (moved,) = (tmp_path / "respuestas").glob("anterior-*")
    assert f"bert_squad a mías.jsonl que había en ./respuestas se han movido a {moved.relative_to(tmp_path)}" \
        in capsys.readouterr().out
    assert (moved / "predictions.json").read_text() == kept and (moved / "metrics.json").exists()


@pytest.mark.parametrize("part, same", [("train", [False, True, True]), ("dev", [False, False, True])])
def test_where_the_right_answers_are_others_the_data_are_others(tmp_path, part, same):
    """dev: the same windows. train: a checkpoint is gone on with though an answer ends elsewhere now."""
    tasks = []
    for number, text in enumerate(("Soria", "Soria desde 2019")):
        for name in ("train", "dev"):
            answers = {"text": [text if name == part else "Soria"], "answer_start": [12]}
            row = {"id": name, "context": "Ana vive en Soria desde 2019.", "question": "¿Dónde?", "answers": answers}
            (tmp_path / str(number)).mkdir(exist_ok=True)
            (tmp_path / str(number) / f"{name}.json").write_text(json.dumps([row]))
        args = script.build_parser().parse_args(["--model", "random:tiny", "--dataset", str(tmp_path / str(number))])
        tasks.append(script.read_task(args, Session()))
    first, second = tasks
    assert [getattr(first, name) == getattr(second, name)
            for name in ("sha256", "validation_sha256", "train_sha256")] == same


def test_the_next_step_is_told_in_the_end(runs):
    line = next(line for line in runs["one"][1][0].splitlines() if line.startswith("Pruébelo: "))
    assert line == ("Pruébelo: python train_distributed.py --model ./bert_squad --dataset mis_preguntas.json "
                    "--max-steps 0")


@pytest.mark.parametrize("words, said", [
    (["--max-len", "64", "--question-len", "64"], "no deja sitio al contexto"),
    (["--model", "modelo", "--output", "./x/../modelo"], "--output './x/../modelo' es la carpeta de --model"),
    (["--model", "m", "--max-steps", "0", "--output", "m"], "--output 'm' es la carpeta de --model"),
    (["--model", "m", "--max-steps", "0", "--resume", "c/ckpt-1.pt"], "se puntúa --model, no un punto de control"),
    (["--max-steps", "-1"], "-1 está fuera de lo admitido (desde 0)"),
    (["--output", "c/x/../best", "--checkpoint-dir", "./c"], "--output 'c/x/../best' es donde se guarda el mejor"),
    (["--max-len", "128", "--doc-stride", "128"], "use --doc-stride 61 o menos"),
    (["--model", "random:huge"], "al azar hay random:base"),
    (["--model", "no/hay/nada"], "--model 'no/hay/nada'"),
    (["--dataset", "no-hay.json"], "no-hay.json"),
    (["--max-len", "640", "--model", "random:tiny"], "el modelo solo tiene 512 posiciones; indique --max-len 512"),
    (["--strategy", "zero"], "--strategy"),
    (["--model", "random:tiny", "--max-train-examples", "3", "--grad-accum", "9"], "baje --batch-size o --grad-accum"),
])
def test_bad_input_is_one_line_and_leaves_nothing(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(SCRIPT), "--dataset", "muestra", *words])
    with pytest.raises(UserError) as problem:
        script.main()
    assert said in str(problem.value) and "\n" not in str(problem.value) and problem.value.exit_code == 2
    assert not list(tmp_path.rglob("*.pt")) and not list(tmp_path.rglob("*.safetensors"))


def test_answers_do_not_replace_those_of_another_model(runs, monkeypatch):
    monkeypatch.chdir(runs["one"][0])
    monkeypatch.setattr("sys.argv", [str(SCRIPT), "--model", "random:tiny", "--dataset", "muestra", "--max-steps", "0",
                                     "--output", "bert_squad"])
    with pytest.raises(UserError, match="--output 'bert_squad' contiene un modelo, cuyas cifras y respuestas se perd"):
        script.main()


def test_a_loss_that_is_no_number_does_not_stay_the_best(tmp_path, monkeypatch):
    losses, saved = iter([(float("nan"), 1), (3.0, 1), (float("nan"), 1), (4.0, 1), (2.0, 1)]), []
    monkeypatch.setattr(finetune.Evaluation, "_forward", lambda self, request: (next(losses), []))
    monkeypatch.setattr(finetune.Evaluation, "_score", lambda self, logits: {})
    monkeypatch.setattr(finetune, "save_model", lambda *args: saved.append(args[-1]["val_loss"]))
    args = SimpleNamespace(batch_size=1, checkpoint_dir=tmp_path)
    evaluation = finetune.Evaluation(args, distributed.Session(), SimpleNamespace(validation_sha256="a"), None, None, 0,
                                     SimpleNamespace(step=7))
    for _ in range(5):
        evaluation()
    assert saved == [3.0, 2.0] and evaluation.best == {"val_loss": 2.0, "step": 7}


def test_a_model_that_cannot_be_written_names_the_way_out(tmp_path):
    (tmp_path / "m").write_bytes(b"")
    config = bert.PRESETS["tiny"]
    task = SimpleNamespace(config=config, vocabulary=b"[PAD]\n", lowercase=True, strip_accents=None, sha256="a",
                           validation_sha256="b")
    with pytest.raises(TrainingFault, match="m/m': una parte de la ruta no es una carpeta; .* repita la misma orden"):
        finetune.save_model(tmp_path / "m" / "m", Session(), task, bert.QuestionAnswering(config), {})
    with pytest.raises(TrainingFault, match="repita la misma orden, que lo guardará; último punto de control: a.pt"):
        finetune.save_model(tmp_path / "m" / "m", Session(), task, bert.QuestionAnswering(config), {},
                            named="último punto de control: a.pt")


FULL = """
import os, sys
import train_distributed as script
from aura import cli, finetune, scaling
def full(*_, **__):
    raise MemoryError
def measured(*words):
    finetune.bert.QuestionAnswering = full
    return measure(*words)
def accumulate(model, *words, **options):
    return (work if hasattr(model, "no_sync") else full)(model, *words, **options)
measure, work = finetune.exchange_figures, scaling._accumulate
if os.environ["RANK"] == "1":
    if "fsdp" in sys.argv:
        finetune.exchange_figures = measured
    else:
        scaling._accumulate = accumulate
cli.run(script.main)
"""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_no_room_to_measure_on_one_rank_costs_a_finished_training_nothing_else(tmp_path, strategy):
    """There the whole model cannot be built (fsdp), or cannot take a step (ddp)."""
    path, folders = tmp_path / "full.py", [tmp_path / "0", tmp_path / "1"]
    path.write_text(FULL)
    for folder in folders:
        folder.mkdir()
    outputs = run_ranks([path, *OPTIONS, "--max-steps", 1, "--strategy", strategy], folders)
    assert [code for code, _ in outputs] == [0, 0], outputs
    assert "medir lo que cuesta el intercambio (no basta la memoria de la máquina)" in outputs[0][1], outputs
    (result,), _ = results.read(folders[0] / "results")
    assert result.strategy == strategy and result.exchange_bytes == 0 and result.f1 is not None
    assert result.alone_step_s is result.communication_s is result.exchange_s is None


STOPPED_WHILE_MEASURING = """
import os, signal
import train_distributed as script
from aura import cli, scaling
def asked(*words, **options):
    print("un paso medido", flush=True)
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    return work(*words, **options)
work, scaling._accumulate = scaling._accumulate, asked
cli.run(script.main)
"""


def test_a_signal_ends_the_measuring_at_its_next_step_and_the_other_figures_are_left(tmp_path):
    """torchrun and Slurm kill after 30 seconds, and measuring a model of some size takes longer."""
    path, folders = tmp_path / "stopped.py", [tmp_path / "0", tmp_path / "1"]
    path.write_text(STOPPED_WHILE_MEASURING)
    for folder in folders:
        folder.mkdir()
    outputs = run_ranks([path, *OPTIONS, "--max-steps", 1], folders)
    assert [code for code, _ in outputs] == [0, 0], outputs
    assert [output.count("un paso medido") for _, output in outputs] == [1, 1], outputs
    assert "no se mide lo que cuesta el intercambio" in outputs[0][1], outputs
    (result,), _ = results.read(folders[0] / "results")
    assert result.f1 is not None and result.exit == results.COMPLETE
    assert result.alone_step_s is result.communication_s is result.exchange_s is None


@pytest.mark.parametrize("together, alone, left", [(3.0, 2.0, 4.0), (2.0, 3.0, 5.0), (9.0, 2.0, 1e-9)])
def test_a_step_alone_takes_what_exchanging_does_not(monkeypatch, together, alone, left):
    """Timed apart from the training, whose step took 5 s: contradictory measurements give no negative figure."""
    seconds, timed = iter([together, alone]), []
    monkeypatch.setattr(finetune, "make_loader", lambda *_: None)
    monkeypatch.setattr(finetune.scaling, "step_seconds", lambda _, one, *__, **___: timed.append(one) or next(seconds))
    monkeypatch.setattr(finetune.scaling, "exchange_seconds", lambda dist, count, *_: (4 * count, 0.5))
    config = bert.BertConfig(vocab_size=8, seq_len=8, n_layer=1, n_head=1, n_embd=4, n_ff=4)
    model = bert.QuestionAnswering(config)
    model.by_rows = [torch.ones(5)]  # which travel otherwise
    args, precision = SimpleNamespace(grad_accum=1, compile=False, grad_checkpointing=True), SimpleNamespace(dtype=None)
    task = SimpleNamespace(config=config)
    found = finetune.exchange_figures(args, Session(), task, model, None, precision, 5.0, None)
    assert found == {"alone_step_s": left, "exchange_bytes": 4 * (config.parameters() - 5), "exchange_s": 0.5}
    assert timed[0] is model and timed[1].bert.grad_checkpointing, "no more and no less to compute than in training"


# Two windows, of 3 and 4 tokens, with a context of 2 in each and an answer in it.
TWO = SimpleNamespace(ids=np.arange(1, 8), offsets=np.array([0, 3, 7]), lengths=np.array([3, 4]),
                      context_at=np.array([1, 2]), start=np.array([1, 2]), end=np.array([2, 3]))


def test_a_window_s_types_and_answer_are_where_its_context_is():
    tokens, types, lengths, positions = finetune.collate(TWO, np.array([1, 0]), 9, torch.device("cpu"))
    assert tokens.tolist() == [[4, 5, 6, 7], [1, 2, 3, 9]] and types.tolist() == [[0, 0, 1, 1], [0, 1, 1, 0]]
    assert lengths.tolist() == [4, 3] and positions.tolist() == [[2, 3], [1, 2]]


def test_a_validation_is_without_dropout_and_its_loss_the_mean_of_both_ends():
    config = bert.BertConfig(10, 8, 1, 2, 8, 16, dropout=0.5, attention_dropout=0.5)
    module = bert.QuestionAnswering(config).init_weights(1).train()
    task, precision = SimpleNamespace(validation=TWO, pad_id=0), loop.Precision("fp32", torch.device("cpu"))
    evaluation = finetune.Evaluation(SimpleNamespace(batch_size=1), Session(), task, module, precision)
    (nats, count), logits = evaluation._forward(None)
    *batch, positions = finetune.collate(TWO, np.array([0, 1]), 0, torch.device("cpu"))
    found = module.eval()(*batch).detach()
    ends = [F.cross_entropy(found[..., end], positions[:, end], reduction="sum").item() for end in range(2)]
    assert (nats, count) == (pytest.approx(sum(ends) / 2), 2) and [number for number, _ in logits] == [0, 1]
    for number, row in logits:
        np.testing.assert_allclose(row, found[number, :TWO.lengths[number]], atol=1e-6)


def test_windows_go_to_a_card_without_a_wait(monkeypatch):
    """A copy from memory that is not pinned ends when all that the card had to do before it has ended."""
    pinned, copied = [], []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda part: pinned.append(id(part)) or part)
    monkeypatch.setattr(torch.Tensor, "to", lambda part, _, non_blocking=False: copied.append(
        (id(part), non_blocking)) or part)
    parts = finetune.collate(TWO, np.array([0, 1]), 0, torch.device("cuda"))
    assert len(parts) == 4 and pinned == list(map(id, parts)) and copied == [(each, True) for each in pinned]
