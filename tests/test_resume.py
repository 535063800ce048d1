"""Which checkpoints a run goes on from, and what it says of those it does not."""

import contextlib
import os
from types import SimpleNamespace

import pytest
import torch

from aura import checkpoint, loop, recall, resume
from aura.checkpointer import Checkpointer
from aura.errors import UserError
from aura.session import Session
from aura.sync import Exact


def run_of_nothing():
    return loop.Run(torch.nn.Linear(1, 1), SimpleNamespace(param_groups=[]), None, None, None, Exact(Session()))


def test_damaged_checkpoints_do_not_take_the_place_of_new_ones(tmp_path, capsys):
    for step in (500, 600):
        (tmp_path / f"ckpt-{step:08d}.pt").write_bytes(b"PK")
    keeper = Checkpointer(tmp_path, Session(), keep=2)
    run = run_of_nothing()
    resume.restore(SimpleNamespace(resume="auto"), Session(), keeper, run)
    assert run.progress.step == 0
    for step in (1, 2):
        keeper.save(step, {"step": step})
    assert [checkpoint.step_of(path) for path in checkpoint.found(tmp_path)] == [2, 1]
    assert len(list(tmp_path.glob("anterior-*/*.pt"))) == 2 and "se han movido a" in capsys.readouterr().out


def test_a_checkpoint_of_another_script_is_called_that(tmp_path):
    keeper = Checkpointer(tmp_path, Session())

    def go_on(theirs):
        pieces = torch.zeros(1, dtype=torch.uint8)
        keeper.constants = {"config": theirs, "tokenizer": pieces}
        keeper.save(1, {})
        keeper.constants = {"config": {"n_layer": 2, "h_cycles": 2, "exit_weights": True}, "tokenizer": pieces}
        resume.restore(SimpleNamespace(resume="auto"), Session(), keeper, run_of_nothing())

    with pytest.raises(UserError, match=r"otro de los scripts, .*_weights, h_cycles\): reanúdelo con aquel") as found:
        go_on({"n_layer": 2})
    assert found.value.same_everywhere  # eight processes do not say it eight times
    with pytest.raises(UserError, match=r"es de otro modelo: n_layer=3 \(ahora 2\)") as found:
        go_on({"n_layer": 3, "h_cycles": 2})
    assert found.value.same_everywhere


def test_dropout_may_be_another_than_before():
    tokenizer = torch.zeros(1, dtype=torch.uint8)
    before, now = ({"config": {"width": 1, "dropout": rate, "attention_dropout": rate}, "tokenizer": tokenizer}
                   for rate in (0.1, 0.2))
    resume._require_same(before, "c.pt", now)


def test_a_checkpoint_of_another_project_is_called_that():
    about = {"config": {}, "tokenizer": torch.zeros(1, dtype=torch.uint8), "dataset": {}}
    for name, theirs in (("config", [1]), ("tokenizer", "abc"), ("dataset", None)):
        with pytest.raises(UserError, match=rf"c.pt no es .* proyecto \(no es lo que debe: {name}\); indique otro"):
            resume._require_same({**about, name: theirs}, "c.pt", about)


def test_an_hrm_of_before_exit_norms_could_be_without_weights_goes_on_with_them():
    vocabulary = torch.frombuffer(bytearray(b"piezas"), dtype=torch.uint8)
    before = {"config": {"n_layer": 2, "h_cycles": 2}, "tokenizer": vocabulary}
    resume._require_same(before, "c.pt", {**before, "config": {**before["config"], "exit_weights": True}})
    with pytest.raises(UserError, match=r"exit_weights=True \(ahora False\); siga con --exit-weights; si no, use"):
        resume._require_same(before, "c.pt", {**before, "config": {**before["config"], "exit_weights": False}})


def test_a_checkpoint_that_somebody_has_made_smaller_is_called_that(tmp_path):
    about = {"config": {}, "tokenizer": torch.frombuffer(bytearray(b"piezas"), dtype=torch.uint8)}
    keeper = Checkpointer(tmp_path, Session(), constants=about)
    keeper.save(1, {"model": {}, "progress": 1, "dataset": {}})
    with pytest.raises(UserError, match="no tiene optimizer, scaler, loader, progress: no es .* indique otro") as found:
        resume.restore(SimpleNamespace(resume="auto"), Session(), keeper, run_of_nothing())
    assert found.value.same_everywhere


def test_the_tokenizer_of_a_text_that_has_changed_is_named_where_it_is_at_hand(tmp_path):
    def about(vocabulary):
        return {"config": {}, "tokenizer": torch.frombuffer(bytearray(vocabulary), dtype=torch.uint8)}

    files_at_hand = [tmp_path / "no", tmp_path / "tokenizer.model"]
    files_at_hand[1].write_bytes(b"de antes")
    for theirs, named in ((b"de antes", True), (b"de otro", False)):
        with pytest.raises(UserError, match="con otro tokenizador; ") as found:
            resume._require_same(about(theirs), "c.pt", about(b"de ahora"), files_at_hand)
        assert (f"con el tokenizador de antes, --tokenizer {files_at_hand[1]}; si no, use" in str(found.value)) == named
    smaller = {**about(b"de ahora"), "config": {"vocab_size": 5}}
    with pytest.raises(UserError, match=r"otro modelo: vocab_size=6 \(ahora 5\); para seguir con este texto, prep"):
        resume._require_same({**about(b"de antes"), "config": {"vocab_size": 6}}, "c.pt", smaller, files_at_hand)
    deeper = {**about(b"de ahora"), "config": {"vocab_size": 5, "n_layer": 2}}
    with pytest.raises(UserError, match=r"n_layer=3 \(ahora 2\); use las mismas opciones"):  # another preset
        resume._require_same({**about(b"de antes"), "config": {"vocab_size": 6, "n_layer": 3}}, "c.pt", deeper,
                             files_at_hand)


def test_the_tokenizers_of_the_prepared_data_are_at_hand(tmp_path):
    for folder in ("libro", "otro", ".parcial"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tokenizer.model").write_bytes(b"")
    os.mkfifo(tmp_path / "otro" / "tokenizer.json")
    found = resume._tokenizers_at_hand(SimpleNamespace(data_dir=str(tmp_path)))
    assert [str(path.relative_to(tmp_path)) for path in found] == [
        "libro/tokenizer.model", "otro/tokenizer.model", "otro/tokenizer.json"]
    assert [resume._bytes_of(path) for path in found] == [b"", b"", None], "nobody writes into the pipe"
    assert not resume._tokenizers_at_hand(SimpleNamespace(data_dir=str(tmp_path), output_dir="salida"))
    assert not resume._tokenizers_at_hand(SimpleNamespace())


@pytest.mark.parametrize("name, given, told", [("otro", True, True), ("libro", True, False), ("otro", False, False)])
def test_of_a_text_of_another_name_it_is_said_that_it_may_be_another(book, tmp_path, name, given, told):
    said, args = [], SimpleNamespace(data_dir=str(tmp_path), resume="c.pt", dataset_name=str(book),
                                     dataset_max_tokens=None, given={"dataset_name"} if given else set())
    assert recall.data(args, {"dataset": {"sha256": "0", "name": name}}, said.append) is None
    assert len(said) == 1 and ("no es el mismo texto ('otro'), no se podrá seguir" in said[0]) == told


def test_another_folder_is_no_way_out_of_a_checkpoint_that_was_asked_for_by_name(tmp_path):
    now = {"config": {}, "tokenizer": torch.zeros(1, dtype=torch.uint8)}
    for asked, told in (("auto", True), ("a/c.pt", False)):
        then, now = ({**now, "config": {"width": width}} for width in (1, 2))
        now["arguments"] = {"resume": asked}
        with pytest.raises(UserError, match="es de otro modelo: width=1") as found:
            resume._require_same(then, tmp_path / "a" / "c.pt", now)
        assert ("otra --checkpoint-dir, o --resume none" in str(found.value)) == told


def test_a_finished_model_is_told_from_a_checkpoint(tmp_path):
    torch.save({"wte.weight": torch.zeros(2)}, tmp_path / "gpt.pth")
    now = {"config": {}, "tokenizer": torch.zeros(1, dtype=torch.uint8)}
    with pytest.raises(UserError, match="guarda solo los pesos de un modelo, y para seguir hace falta un punto de"):
        resume._require_same(torch.load(tmp_path / "gpt.pth"), tmp_path / "gpt.pth", now)
    with pytest.raises(UserError, match="guarda solo los pesos de un modelo, .*: indique un checkpoint-step-N.pt, o"):
        recall.recorded(SimpleNamespace(resume=str(tmp_path / "gpt.pth"), checkpoint_dir=str(tmp_path)))


def test_the_log_of_a_way_that_is_left_is_kept(tmp_path, capsys):
    for name in ("train.csv", "loss.png", "events.log"):
        (tmp_path / "l" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "l" / name).write_text(name)
    (tmp_path / "anterior").mkdir()
    args = SimpleNamespace(log_dir=str(tmp_path / "l"), output="m.pth")
    resume._keep_log(args, Session(), tmp_path / "anterior")
    assert {path.name: path.read_text() for path in (tmp_path / "anterior").iterdir()} == {
        "train.csv": "train.csv", "loss.png": "loss.png"} and (tmp_path / "l" / "train.csv").exists()
    assert "(m.pth)" in capsys.readouterr().out
    with pytest.raises(UserError, match="no se puede copiar el registro .* haga sitio, y repita la orden"):
        resume._keep_log(args, Session(), tmp_path / "no" / "hay")


@pytest.mark.parametrize("theirs, ours, told", [(5, 6, True), (5, 5, False), (None, 6, False), (5, None, False)])
def test_a_run_that_began_with_other_published_weights_is_not_gone_on_with(theirs, ours, told):
    before, after = ({"config": {}, "tokenizer": torch.zeros(1, dtype=torch.uint8), "begun_with": weights,
                      "arguments": {"model": "m/qa"}} for weights in (theirs, ours))
    refused = pytest.raises(UserError, match="c.pt empezó con otros pesos, los de --model 'm/qa', que ya no son los")
    with refused if told else contextlib.nullcontext():
        resume._require_same(before, "c.pt", after)


@pytest.mark.parametrize("now, layers, told", [("base.pth", 2, ", que ya no son los que hay ahí .*: indique aquellos"),
                                               ("base.pth", 3, ", que ya no son los que hay ahí .*: indique aquellos"),
                                               ("otro.pth", 3, ": indique aquellos")])
def test_that_another_model_took_the_place_of_the_first_is_told_even_if_of_another_size(now, layers, told):
    before, after = ({"config": {"n_layer": count}, "tokenizer": torch.zeros(1, dtype=torch.uint8), "begun_with": crc,
                      "arguments": {"init_from": name}} for name, count, crc in (("base.pth", 2, 5), (now, layers, 6)))
    with pytest.raises(UserError, match=f"c.pt empezó con otros pesos, los de --init-from 'base.pth'{told}"):
        resume._require_same(before, "c.pt", after)


@pytest.mark.parametrize("theirs, ours, told", [
    (("random:tiny", None), ("m/qa", 6), True), (("m/qa", 6), ("random:tiny", None), True),
    (("random:tiny", None), ("random:tiny", None), False), (("m/qa", 6), ("m/qa", 6), False),
    (("m/qa", None), ("m/qa", 6), False)])  # the last of before there were checksums
def test_random_weights_are_not_taken_for_published_ones(theirs, ours, told):
    before, after = ({"config": {}, "tokenizer": torch.zeros(1, dtype=torch.uint8), "begun_with": weights,
                      "arguments": {"model": model}} for model, weights in (theirs, ours))
    refused = pytest.raises(UserError, match=f"c.pt empezó con otros pesos, los de --model '{theirs[0]}': indique aque")
    with refused if told else contextlib.nullcontext():
        resume._require_same(before, "c.pt", after)


@pytest.mark.parametrize("now, told", [("otros", True), ("libro", False), (None, False)])
def test_the_data_whose_tokenizer_is_meant_are_named(now, told):
    before, after = ({"config": {}, "tokenizer": torch.tensor([number], dtype=torch.uint8)} for number in range(2))
    before["dataset"] = {"name": "libro"}
    with pytest.raises(UserError, match="con otro tokenizador; ") as found:
        resume._require_same(before, "c.pt", after | ({"dataset": {"name": now}} if now else {}))
    way_out = "los datos eran 'libro' y ahora son 'otros': indique aquellos, o use las mismas"
    assert (way_out in str(found.value)) == told


def test_other_data_are_refused_where_that_is_asked_for(tmp_path):
    constants = {"config": {}, "tokenizer": torch.zeros(1, dtype=torch.uint8)}
    keeper = Checkpointer(tmp_path, Session())
    for name in ("antes", "ahora"):
        keeper.constants = {**constants, "dataset": {"name": name, "sha256": name}}
        if name == "antes":
            keeper.save(1, {part: {} for part in resume.PARTS if part != "dataset"})
    with pytest.raises(UserError, match=r"ckpt-00000001\.pt se entrenó con otros datos \('antes'\)"):
        resume.restore(SimpleNamespace(resume="auto"), Session(), keeper, run_of_nothing(), strict=True)


@pytest.mark.parametrize("dataset, lr, seed, told, untold", [
    ("libro", 1e-3, 1, ["multiplicada por 0.25"], ["distintos de los de antes", "--seed", "otros"]),
    ("libro", 2e-3, 2, ["--lr 0.002 (antes 0.001)", "el de --seed 1,"], ["multiplicada", "otros"]),
    ("otro", 1e-3, 2, ["multiplicada por 0.25", "Los datos son otros (antes 'libro')", "--max-steps 9"],
     ["--seed", "--epochs"])])
def test_what_is_not_as_it_was_is_told_and_what_is_owed_to_other_data_is_not_paid(tmp_path, capsys, dataset, lr, seed,
                                                                                  told, untold):
    constants = {"config": {}, "tokenizer": torch.zeros(1, dtype=torch.uint8)}
    keeper, run = Checkpointer(tmp_path, Session()), run_of_nothing()
    keeper.constants = {**constants, "dataset": {"name": "libro", "sha256": "libro"}}
    keeper.save(3, {**dict.fromkeys(resume.PARTS[:-1], {}), "loader": {"seed": 1},
                    "arguments": {"lr": 1e-3, "seed": 1, "epochs": 3, "max_steps": None}})
    keeper.constants = {**constants, "dataset": {"name": "libro", "sha256": dataset}}  # a text that was written anew
    run.restore = lambda *_: setattr(run, "progress", loop.Progress(3, lr_scale=0.25, epoch_tokens=9, owed={"lr": 1}))
    most = 9 if dataset == "otro" else None
    args = SimpleNamespace(resume="auto", lr=lr, seed=seed, epochs=1 if most else 3, max_steps=most)
    resume.restore(args, Session(), keeper, run)
    same, said = dataset == "libro", capsys.readouterr().out
    assert (run.progress.owed, run.progress.epoch_tokens) == (({"lr": 1}, 9) if same else (None, 0))
    assert run.progress.lr_scale == (0.25 if lr == 1e-3 else 1.0) and "Se reanuda en el paso 3 desde " in said
    assert all(piece in said for piece in told) and not any(piece in said for piece in untold), said
    went_on, had_ended = (resume.as_learnt(args, run, 3, steps) for steps in (4, 3))
    assert went_on.lr == lr and had_ended.lr == 1e-3 and went_on.seed == had_ended.seed == (1 if same else seed)


@pytest.mark.parametrize("epoch, samples, batch, steps, fewer", [
    (2, 40, 50, 100, 98),  # more than is asked for is done: nothing is left
    (9, 100, 10, 10, 0),  # and likewise, with steps as they are now
    (0, 40, 10, 106, 96), (0, 40, 30, 102, 99)])
def test_what_is_left_of_the_epochs(epoch, samples, batch, steps, fewer, capsys):
    args = SimpleNamespace(max_steps=None, epochs=1, batch_size=batch, grad_accum=1)
    loader = SimpleNamespace(epoch=epoch, samples=samples, windows=100, steps_per_epoch=100 // batch)
    assert resume.length(args, Session(), loader, SimpleNamespace(step=100)) == (steps, fewer)
    told = capsys.readouterr().out
    assert told.endswith(f" y faltan {steps - 100}.\n") if fewer else not told
