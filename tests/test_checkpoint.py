"""Checkpoints: whole or not there, verified, rotated, found again."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from aura import checkpoint, checkpointer, files, processes
from aura.checkpointer import Checkpointer, asked
from aura.errors import TrainingFault, UserError
from aura.session import Session
from tests.support import Process, run


def state(step):
    generator = torch.Generator().manual_seed(step)
    return {"step": step, "model": {"w": torch.randn(50, 50, generator=generator)}, "name": "ñ", "none": None}


def saved(directory, *steps, keep=10):
    keeper = Checkpointer(directory, Session(), keep)
    for step in steps:
        keeper.save(step, state(step))
    return keeper


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(content)


def test_round_trip_with_weights_only(tmp_path):
    saved(tmp_path, 7)
    loaded = torch.load(checkpoint.path_of(tmp_path, 7), weights_only=True)
    assert loaded["step"] == 7 and torch.equal(loaded["model"]["w"], state(7)["model"]["w"])


def test_rotation_keeps_the_newest(tmp_path):
    saved(tmp_path, 5, 10, 15, 20, keep=2)
    assert [path.name for path in checkpoint.found(tmp_path)] == ["ckpt-00000020.pt", "ckpt-00000015.pt"]


def test_an_old_one_that_cannot_be_removed_spoils_no_new_one(tmp_path, monkeypatch, capsys):
    remove = Path.unlink

    def refused(path, **named):
        if checkpoint.step_of(path):  # another user's
            raise PermissionError(errno.EPERM, "no", str(path))
        remove(path, **named)

    monkeypatch.setattr(Path, "unlink", refused)
    keeper = saved(tmp_path, 5, 10, 15, 20, keep=2)
    assert len(checkpoint.found(tmp_path)) == 4 and keeper.last.endswith("20.pt")
    assert capsys.readouterr().out.count("Aviso: no se puede borrar ") == 1


def test_a_folder_that_was_removed_is_no_other_runs_to_write_into(tmp_path, monkeypatch):
    """Both would rotate each other's checkpoints away."""
    keeper = Checkpointer(tmp_path / "c", Session())
    (tmp_path / "c").mkdir()
    files.hold(tmp_path / "c", "--checkpoint-dir")
    keeper.save(1, state(1))
    shutil.rmtree(tmp_path / "c")
    keeper.save(2, state(2))
    with pytest.raises(BlockingIOError):
        files.lock(tmp_path / "c" / files.IN_USE)
    with monkeypatch.context() as elsewhere:  # sshfs and its kin number a file anew when it is opened again
        elsewhere.setattr(files.os.path, "samestat", lambda *_: False)
        keeper.save(3, state(3))
    with pytest.raises(BlockingIOError):
        files.lock(tmp_path / "c" / files.IN_USE)
    shutil.rmtree(tmp_path / "c")
    (tmp_path / "c").mkdir()
    other = files.lock(tmp_path / "c" / files.IN_USE)
    with pytest.raises(UserError, match="otra ejecución está usando '.*c': .* otra carpeta con --checkpoint-dir"):
        keeper.save(4, state(4))
    assert not checkpoint.found(tmp_path / "c")
    os.close(other)


def test_every_flipped_bit_of_the_tensors_is_found(tmp_path):
    saved(tmp_path, 1)
    path = checkpoint.path_of(tmp_path, 1)
    data = path.read_bytes()
    start = data.index(state(1)["model"]["w"].numpy().tobytes()[:64])
    for position in range(start, start + 50 * 50 * 4, 997):
        flip(path, position)
        assert checkpoint.damage(path), position
        flip(path, position)
    assert checkpoint.damage(path) is None


def test_any_flipped_bit_is_found_or_harmless(tmp_path):
    saved(tmp_path, 1)
    path, right = checkpoint.path_of(tmp_path, 1), state(1)["model"]["w"]
    whole = path.read_bytes()
    start, size = whole.index(right.numpy().tobytes()[:64]), right.numel() * right.element_size()
    for position in [*range(start), *range(start + size, len(whole))]:  # outside the tensors: each byte has its bit
        spoiled = bytearray(whole)
        spoiled[position] ^= 1 << position % 8
        path.write_bytes(spoiled)
        if checkpoint.damage(path) is None:
            assert torch.equal(checkpoint.read(path)["model"]["w"], right), position


@pytest.mark.parametrize("offset, bit", [(8, 1), (10, 1), (38, 0x10)], ids=["encrypted", "packed", "a folder"])
def test_what_the_archive_s_directory_says_of_a_tensor_is_read_too(tmp_path, offset, bit):
    saved(tmp_path, 1)
    path = checkpoint.path_of(tmp_path, 1)
    content = bytearray(path.read_bytes())
    entry = content.rindex(b"archive/data/0") - 46  # of the central directory, whose fixed part is that long
    assert content[entry:entry + 4] == b"PK\1\2"
    content[entry + offset] ^= bit
    path.write_bytes(content)
    assert checkpoint.damage(path) and "\n" not in checkpoint.damage(path)
    assert checkpoint.newest_good(tmp_path, note=lambda _: None) is None


def test_the_one_before_a_damaged_one_is_taken(tmp_path):
    keeper = saved(tmp_path, 1, 2, 3)
    flip(checkpoint.path_of(tmp_path, 3), 6000)
    path = checkpoint.path_of(tmp_path, 2)
    path.write_bytes(path.read_bytes()[:-100])
    notes = []
    assert checkpoint.newest_good(tmp_path, notes.append) == checkpoint.path_of(tmp_path, 1)
    assert "ckpt-00000003" in notes[0] and "ckpt-00000002" in notes[1]
    assert keeper.load("auto")["step"] == 1
    with pytest.raises(UserError, match="dañado"):
        keeper.load(str(checkpoint.path_of(tmp_path, 3)))


def test_no_memory_to_read_a_checkpoint_does_not_make_it_a_damaged_one(tmp_path, monkeypatch):
    saved(tmp_path, 5)

    def full(path, **_):
        raise RuntimeError(f"unable to mmap 3467616 bytes from file <{path}>: Cannot allocate memory (12)")

    monkeypatch.setattr(torch, "load", full)
    with pytest.raises(UserError, match=r"ckpt-00000005\.pt.*no basta la memoria"):
        checkpoint.newest_good(tmp_path)


def test_what_is_compressed_is_refused_before_it_is_unpacked(tmp_path):
    """A kilobyte of bzip2 can be gigabytes."""
    with zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("archive/data.pkl", bytes(10**6))
    before = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(before.replace(b"BZh", b"BZx"))  # unpacking it would fail in another way
    assert checkpoint.damage(tmp_path / "a.pt") == "el registro archive/data.pkl está dañado"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE])
def test_a_checkpoint_that_may_not_be_read_is_not_passed_over(tmp_path, monkeypatch, number):
    saved(tmp_path, 5, 10)
    real = zipfile.ZipFile

    def refused(path):
        if path.name == "ckpt-00000010.pt":
            raise OSError(number, os.strerror(number), str(path))
        return real(path)

    monkeypatch.setattr(zipfile, "ZipFile", refused)
    with pytest.raises(UserError, match=r"ckpt-00000010\.pt' no se puede leer \((permiso denegado|este proceso)"):
        checkpoint.newest_good(tmp_path)


def test_a_folder_that_may_not_be_looked_into_is_not_taken_for_an_empty_one(tmp_path, monkeypatch):
    saved(tmp_path, 5)

    def denied(folder):
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr(os, "listdir", denied)
    monkeypatch.setattr(os, "scandir", denied)
    for resume in ("auto", str(tmp_path)):
        with pytest.raises(UserError, match=r"puntos de control en '.*' \(permiso denegado\); compruebe la ruta"):
            checkpoint.choose(resume, tmp_path)


def test_a_link_to_a_checkpoint_that_is_no_longer_there_is_named_and_passed_over(tmp_path):
    keeper = saved(tmp_path, 1)
    checkpoint.path_of(tmp_path, 9).symlink_to("otro-disco.pt")
    notes = []
    assert checkpoint.newest_good(tmp_path, notes.append) == checkpoint.path_of(tmp_path, 1)
    assert "ckpt-00000009.pt: no existe" in notes[0] and keeper.load("auto")["step"] == 1


def test_a_folder_that_is_asked_for_gives_the_newest_of_its_own(tmp_path):
    there, here = tmp_path / "there", tmp_path / "here"
    saved(there, 1, 2)
    keeper = saved(here, 9)
    assert checkpoint.choose(str(there), here) == checkpoint.path_of(there, 2)
    flip(checkpoint.path_of(there, 2), 6000)
    assert keeper.load(str(there))["step"] == 1 and keeper.last == str(checkpoint.path_of(there, 1))


def test_what_is_not_a_checkpoint_is_named(tmp_path):
    keeper = saved(tmp_path)
    assert keeper.load("auto") is None
    with pytest.raises(UserError, match="no existe"):
        keeper.load(str(tmp_path / "falta.pt"))
    with pytest.raises(UserError, match="la carpeta no contiene ningún punto de control válido; si la ejecución paró"):
        keeper.load(str(tmp_path))
    (tmp_path / "x.pt").write_bytes(b"hola")
    with pytest.raises(UserError, match=r"x\.pt': no es un fichero de PyTorch.*dañado; use otro .con --resume auto"):
        keeper.load(str(tmp_path / "x.pt"))
    torch.save({"step": object}, tmp_path / "y.pt")
    with pytest.raises(UserError, match="no se carga: indique otro"):
        keeper.load(str(tmp_path / "y.pt"))


def test_a_checkpoint_holds_a_dict(tmp_path):
    torch.save([1, 2], tmp_path / "lista.pt")
    for call in (checkpoint.read, checkpoint.peek):
        with pytest.raises(UserError, match="no es un punto de control.*list"):
            call(tmp_path / "lista.pt")


@pytest.mark.parametrize("size", [0, 4, 900])
def test_a_cut_checkpoint_is_told_alike_whoever_looks_into_it(tmp_path, size):
    keeper = saved(tmp_path, 1)
    path = Path(keeper.last)
    path.write_bytes(path.read_bytes()[:size])
    for call in (checkpoint.read, checkpoint.peek):
        with pytest.raises(UserError, match="00001.pt': no es un fichero de PyTorch, o está incompleto o dañado; use "
                                            "otro .con --resume auto"):
            call(path)


def test_going_back_leaves_the_other_way_aside(tmp_path, capsys):
    keeper = Checkpointer(tmp_path, Session(), keep=2)
    saved(tmp_path, 20, 40, 50, 60)
    keeper.load(str(checkpoint.path_of(tmp_path, 40)))
    keeper.branch_off()
    assert "Los puntos de control que no llevan a" in capsys.readouterr().out
    assert len(list(tmp_path.glob("anterior-*/*.pt"))) == 2
    keeper.save(45, state(45))
    assert [checkpoint.step_of(path) for path in checkpoint.found(tmp_path)] == [45, 40]
    assert keeper.load("auto")["step"] == 45


def test_what_comes_from_elsewhere_leaves_all_that_was_there_aside(tmp_path):
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    saved(tmp_path / "old", 60)
    saved(tmp_path / "new", 10, 5000)
    keeper = Checkpointer(tmp_path / "new", Session(), keep=1)
    keeper.load(str(checkpoint.path_of(tmp_path / "old", 60)))
    keeper.branch_off()
    assert checkpoint.found(tmp_path / "new") == [] and len(checkpoint.found(tmp_path / "old")) == 1
    assert keeper.reload()["step"] == 60


def test_the_one_just_written_stays_whatever_lies_beside_it(tmp_path):
    saved(tmp_path, 1037)
    keeper = saved(tmp_path, 1010, keep=1)
    assert [checkpoint.step_of(path) for path in checkpoint.found(tmp_path)] == [1010]
    assert keeper.last.endswith("ckpt-00001010.pt")


def test_what_somebody_has_put_aside_under_a_longer_name_is_none_of_the_runs(tmp_path):
    aside = [tmp_path / f"{name}ckpt-00000001.pt{more}" for name, more in (("", ".bak"), ("", "~"), ("my-", ""))]
    for path in aside:
        path.write_bytes(b"mine")
    saved(tmp_path, 1, 2, 3, keep=1)
    assert all(path.read_bytes() == b"mine" for path in aside)
    assert [checkpoint.step_of(path) for path in checkpoint.found(tmp_path)] == [3]


def test_reload_gives_what_was_loaded_or_saved_last_and_else_what_verifies(tmp_path):
    keeper = saved(tmp_path, 1, 2, 3)
    reader = Checkpointer(tmp_path, Session())
    assert reader.reload()["step"] == 3, "nothing loaded yet: the newest"
    reader.load(str(checkpoint.path_of(tmp_path, 1)))
    assert reader.reload()["step"] == 1 and reader.loaded == reader.last == str(checkpoint.path_of(tmp_path, 1))
    flip(checkpoint.path_of(tmp_path, 3), 6000)
    assert keeper.reload()["step"] == 2 and keeper.last.endswith("ckpt-00000002.pt")
    (tmp_path / "empty").mkdir()
    assert saved(tmp_path / "empty").reload() is None


def test_a_later_attempt_of_one_launch_goes_on_from_the_earlier_one(tmp_path):
    keeper = saved(tmp_path, 1)

    def meant(resume):
        return asked(resume, tmp_path, keeper.dist)

    for resume in ("none", "otro.pt"):
        keeper.dist.launch = resume
        assert meant(resume) == resume, "what lies there is of another launch"
        keeper.begin(resume)
        assert meant(resume) == "auto"
    keeper.start_fresh()
    assert meant("otro.pt") == "otro.pt", "it had saved nothing yet"
    keeper.dist.launch = "none"
    keeper.begin("none")
    assert meant("none") == "none", "nor has another rank, of a run that is not signed"
    keeper.sign("a")
    assert meant("none") == "auto"
    keeper.sign(None)
    assert meant("none") == "none", "what is there is of no run that others may have saved any more"
    assert Session().launch != Session().launch


def test_a_fresh_start_moves_the_old_ones_aside(tmp_path):
    """Also what ranks had written for themselves, whether or not there are as many ranks now."""
    keeper = saved(tmp_path, 1, 2)
    for rank in range(2):
        (tmp_path / f"rank-{rank:05d}").mkdir()
        shutil.copy(checkpoint.path_of(tmp_path, 2), tmp_path / f"rank-{rank:05d}")
    keeper.start_fresh()
    assert checkpoint.found(tmp_path) == [] and not list(tmp_path.glob("rank-*"))
    assert len(list(tmp_path.glob("anterior-*/ckpt-*.pt"))) == 2
    assert len(list(tmp_path.glob("anterior-*/rank-*/ckpt-*.pt"))) == 2


SAVE_FOR_EVER = """
import sys, torch
from aura.checkpointer import Checkpointer
from aura.session import Session
keeper = Checkpointer(sys.argv[1], Session(), keep=2, background=sys.argv[3] == "background")
step = int(sys.argv[2])
while True:
    step += 1
    keeper.save(step, {"step": step, "w": torch.full((300_000,), float(step))})
    if step < 2:
        keeper.finish()  # or the first kill could come before there is any
    print("saved", step, flush=True)
"""


@pytest.mark.parametrize("where", ["foreground", "background"])
def test_kill_9_during_saves_always_leaves_a_valid_checkpoint(tmp_path, where):
    script = tmp_path / "save.py"
    script.write_text(SAVE_FOR_EVER)
    folder = tmp_path / "ckpt"
    folder.mkdir()
    step = 0
    for attempt in range(6):
        with Process([script, folder, step, where], tmp_path) as process:
            process.wait_for("saved")
            time.sleep(0.003 * attempt)  # another moment of the save each time
            os.killpg(process.child.pid, signal.SIGKILL)
            process.child.wait()
        path = checkpoint.newest_good(folder, note=pytest.fail)
        found = checkpoint.read(path)
        assert found["step"] >= step + (where == "foreground") and torch.all(found["w"] == found["step"])
        step = found["step"]
    keeper = Checkpointer(folder, Session(), keep=2)
    keeper.save(step + 1, state(1))
    assert sorted(path.suffix for path in folder.iterdir()) == [".pt", ".pt"], "no debris is left"


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_a_full_disk_names_the_reason_and_the_last_good_one(tmp_path, monkeypatch):
    keeper = saved(tmp_path, 1)
    real = open
    monkeypatch.setattr("builtins.open", lambda path, *rest, **options: real(
        "/dev/full" if str(path).endswith(".parcial") else path, *rest, **options))
    with pytest.raises(TrainingFault, match="no queda espacio"):
        keeper.save(2, state(2))
    monkeypatch.undo()
    assert keeper.named().endswith("ckpt-00000001.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt-00000001.pt"]
    (tmp_path / "ckpt-00000001.pt").unlink()
    assert keeper.named().endswith("ckpt-00000001.pt, que ya no está ahí")


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="elsewhere nobody knows")
def test_what_rank_0_died_in_writing_no_other_rank_names(tmp_path):
    """As long as it lives, it may be writing: then they name what comes."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as first:
        watched = processes.watch(first.pid, processes.start_of(first.pid))
        other = Checkpointer(tmp_path, Session(rank=1, world_size=2, first=watched))
        for step in (4, 8):
            other.save(step, state(step))
        saved(tmp_path, 4)
        assert other.named().endswith("ckpt-00000008.pt")
        other.dist.silent = [0]  # its connections have gone first
        threading.Timer(0.3, first.kill).start()
        assert other.named().endswith("ckpt-00000004.pt")
    assert other.named().endswith("ckpt-00000004.pt")
    saved(tmp_path, 8)
    assert other.named().endswith("ckpt-00000008.pt")
    for path in checkpoint.found(tmp_path):
        path.unlink()
    assert other.named() == "todavía no había ningún punto de control"
    other.loaded = "otra/ckpt-00000001.pt"
    assert other.named().endswith(": otra/ckpt-00000001.pt")
    os.close(watched)


def test_a_pipe_called_as_a_checkpoint_is_discarded(tmp_path, capsys):
    os.mkfifo(checkpoint.path_of(tmp_path, 7))
    assert checkpoint.newest_good(tmp_path) is None
    assert "se descarta" in (told := capsys.readouterr().out) and "no es un fichero" in told


def test_too_little_room_is_said_before_training(tmp_path):
    with pytest.raises(UserError, match="libere espacio o indique otra carpeta con --checkpoint-dir"):
        checkpoint.require_room(tmp_path, 10**18)


def test_who_has_no_room_to_go_on_is_told_to_take_the_checkpoint_along(tmp_path):
    for step in (3, 7):
        checkpoint.path_of(tmp_path, step).touch()
    with pytest.raises(UserError, match="o copie ckpt-00000007.pt a otra carpeta e indíquela con --checkpoint-dir"):
        checkpoint.require_room(tmp_path, 10**18)


@pytest.mark.parametrize("there, steps, every, more", [
    ((), range(1, 10), 0, 4), ((), range(1, 5), 0, 4), ((), range(1, 4), 0, None), ((1, 2), range(3, 9), 0, None),
    ((), range(1, 11), 2, 7), ((2, 4, 5, 6), range(7, 11), 2, None), ((10,), range(10, 11), 0, None),
    ((), range(2, 10**15, 2), 5, 10**14 + 3), ((5, 7), range(6, 19, 2), 2, 5)])
def test_room_for_one_but_not_for_those_that_stay_is_told(tmp_path, monkeypatch, capsys, there, steps, every, more):
    """Three stay, and the oldest goes when the next one has been written; here 3.5 fit."""
    for step in there:
        checkpoint.path_of(tmp_path, step).touch()
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: SimpleNamespace(free=35e9))
    Checkpointer(tmp_path, Session(), keep=3, keep_every=every).say_if_room_is_short(10**10, steps[:-1],
                                                                                                  steps[-1])
    told = capsys.readouterr().out
    assert f"quedan 35.00 GB y llegará a haber {more} puntos" in told if more else not told


@pytest.mark.parametrize("steps, own, there, told", [
    (1, 24, 0, False), (1, 26, 0, True), (2, 8, 0, True), (2, 8, 2, False), (4, 0, 0, True)])
def test_what_rank_0_writes_for_itself_takes_room_too(tmp_path, monkeypatch, capsys, steps, own, there, told):
    keeper = Checkpointer(tmp_path, Session(), keep=3)
    keeper.own.mkdir()
    for step in range(there):
        checkpoint.path_of(keeper.own, step).touch()
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: SimpleNamespace(free=35e9))
    keeper.say_if_room_is_short(10**10, range(1, steps), steps, own * 10**9)
    assert ("libere espacio" in capsys.readouterr().out) == told


@pytest.mark.parametrize("average", [False, True])
def test_the_room_that_is_asked_for_is_what_a_checkpoint_takes(tmp_path, average):
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    weights = model.state_dict()
    checkpoint.save_file(tmp_path / "a.pt", {
        "model": weights, "optimizer": optimizer.state_dict(),
        "ema": {name: tensor.clone() for name, tensor in weights.items()} if average else {}})
    size = checkpoint.size_of(sum(tensor.numel() for tensor in weights.values()), average)
    assert (tmp_path / "a.pt").stat().st_size == pytest.approx(size, rel=0.02)


def test_of_its_own_files_a_rank_keeps_those_it_wrote_last(tmp_path):
    """A higher step may be of a way that was left."""
    for step, when in ((9, 1), (4, 2), (5, 3)):
        checkpoint.path_of(tmp_path, step).touch()
        os.utime(checkpoint.path_of(tmp_path, step), (when, when))
    checkpointer._keep_two(checkpoint.path_of(tmp_path, 5))
    assert [checkpoint.step_of(path) for path in checkpoint.found(tmp_path)] == [5, 4]
    for step, when in ((6, 2), (7, 1)):  # of a clock that is set back twice
        checkpoint.path_of(tmp_path, step).touch()
        os.utime(checkpoint.path_of(tmp_path, step), (when, when))
        checkpointer._keep_two(checkpoint.path_of(tmp_path, step))
        assert sorted(map(checkpoint.step_of, checkpoint.found(tmp_path))) == [step - 1, step]


def test_of_two_of_one_step_the_one_written_last_is_the_newest(tmp_path):
    names = ["interrupt-step-7.pt", "checkpoint-step-7.pt"]
    for order in (names, names[::-1]):
        for when, name in enumerate(order):
            (tmp_path / name).touch()
            os.utime(tmp_path / name, (when, when))
        assert [path.name for path in checkpoint.found(tmp_path)] == order[::-1]


def test_a_checkpoint_that_its_run_rotates_away_meanwhile_is_passed_over(tmp_path, monkeypatch):
    (tmp_path / "ckpt-00000002.pt").touch()
    monkeypatch.setattr(checkpoint.os, "listdir", lambda _: ["ckpt-00000001.pt", "ckpt-00000002.pt"])
    assert checkpoint.found(tmp_path) == [tmp_path / "ckpt-00000002.pt"]


def test_every_nth_stays_beside_the_newest(tmp_path):
    keeper = Checkpointer(tmp_path, Session(), keep=1, keep_every=10,
                                     names=checkpoint.Names("checkpoint-step-{}.pt", "interrupt-step-{}.pt"))
    for step in (5, 10, 15, 20, 25):
        keeper.save(step, state(step))
    keeper.save(27, state(27), interrupted=True)
    assert [path.name for path in checkpoint.found(tmp_path)] == ["interrupt-step-27.pt", "checkpoint-step-20.pt",
                                                                  "checkpoint-step-10.pt"]
    assert keeper.load("auto")["step"] == 27


def test_in_the_background_it_is_the_state_of_that_moment_that_is_written(tmp_path, monkeypatch):
    keeper = Checkpointer(tmp_path, Session(), background=True)
    held, real = threading.Event(), checkpoint.save_file
    monkeypatch.setattr("aura.checkpointer.save_file", lambda *words: held.wait(60) and real(*words))
    weights = torch.ones(1000)
    keeper.save(1, {"w": weights, "list": [weights[:2], "x", -weights[:2]]})
    weights.zero_()  # training goes on while the disk is slow
    assert keeper.last is None and checkpoint.found(tmp_path) == []
    held.set()
    keeper.finish()
    assert keeper.last.endswith("ckpt-00000001.pt")
    loaded = checkpoint.read(keeper.last)
    assert torch.all(loaded["w"] == 1) and [
        part.tolist() if torch.is_tensor(part) else part for part in loaded["list"]] == [[1, 1], "x", [-1, -1]]
    weights.fill_(2)
    keeper.save(2, {"w": weights, "list": [weights[:2], "x"]})
    assert keeper.named().endswith("ckpt-00000002.pt")
    assert torch.all(checkpoint.read(keeper.last)["w"] == 2)
    monkeypatch.setattr("aura.checkpointer.cpu_copy", lambda value: pytest.fail("a second copy")
                        if torch.is_tensor(value) or isinstance(value, dict) else value)
    weights.fill_(3)
    keeper.save(3, {"w": weights, "list": [weights[:5], "x", weights[:2].half()]}, interrupted=True)
    loaded = checkpoint.read(keeper.last)
    assert loaded["list"][2].dtype == torch.float16
    assert torch.all(loaded["w"] == 3) and torch.equal(loaded["list"][0], weights[:5]), "of another size than before"


def test_whether_there_is_one_is_known_when_what_is_being_written_is_there(tmp_path, monkeypatch):
    """Else a fault meanwhile would begin anew, although there is something to go back to."""
    keeper = Checkpointer(tmp_path, Session(), background=True)
    held, real, settle = threading.Event(), checkpoint.save_file, keeper.settle
    monkeypatch.setattr("aura.checkpointer.save_file", lambda *words: held.wait(60) and real(*words))
    keeper.save(1, state(1))
    monkeypatch.setattr(keeper, "settle", lambda: held.set() or settle())
    assert keeper.has_any()
    keeper.finish()


def test_no_copy_is_taken_before_the_one_before_has_been_written(tmp_path):
    """It would go into the same memory, and what is on the disk would be of both steps."""
    keeper, seen = Checkpointer(tmp_path, Session(), background=True), []
    keeper.save(1, {"w": torch.ones(9)})
    keeper.finish()
    (copy,) = keeper.host.buffers.values()
    keeper.writing = SimpleNamespace(result=lambda: seen.append(copy.tolist()))
    keeper.save(2, {"w": torch.zeros(9)})
    assert seen == [[1.0] * 9]
    keeper.finish()


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_a_disk_that_fills_up_in_the_background_is_told_once(tmp_path, monkeypatch):
    keeper = Checkpointer(tmp_path, Session(), keep=1, background=True)
    keeper.save(1, state(1))
    keeper.finish()
    real = open
    monkeypatch.setattr("builtins.open", lambda path, *rest, **options: real(
        "/dev/full" if str(path).endswith(".parcial") else path, *rest, **options))
    keeper.save(2, state(2))
    with pytest.raises(TrainingFault, match="no queda espacio"):
        keeper.finish()  # as the loop does when the run ends: the last one is not lost in silence
    monkeypatch.undo()
    keeper.poll()  # once is enough
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt-00000001.pt"]
    assert keeper.load("auto")["step"] == 1


def test_a_disk_that_fills_up_before_the_first_step_is_told_in_one_line(tmp_path, monkeypatch):
    keeper = saved(tmp_path, 1, 2)
    keeper.source = (str(checkpoint.path_of(tmp_path, 1)), 0)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("aura.checkpointer.write_bytes", full)
    monkeypatch.setattr("aura.checkpointer.set_aside", full)
    for step in (lambda: keeper.sign("a"), lambda: keeper.begin("none"), keeper.start_fresh, keeper.branch_off):
        with pytest.raises(UserError, match="^--checkpoint-dir '.*no queda espacio en el disco.; haga sitio o indique"):
            step()


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
@pytest.mark.parametrize("background", [False, True])
def test_all_of_the_checkpoint_before_is_there_where_rank_0_ends_between_its_two_files(
        tmp_path, monkeypatch, capsys, background):
    keeper, own = Checkpointer(tmp_path, Session(), background=background), {"own": torch.ones(2)}
    keeper.save(1, {**state(1), "sync": {"run": "a"}}, own=own)
    keeper.finish()
    real = open
    monkeypatch.setattr("builtins.open", lambda path, *rest, **options: real(
        "/dev/full" if str(path).startswith(str(tmp_path / ".ckpt-00000002")) else path, *rest, **options))
    with pytest.raises(TrainingFault, match="no queda espacio"):
        keeper.save(2, {**state(2), "sync": {"run": "a"}}, own=own)
        keeper.finish()
    monkeypatch.undo()
    assert [path.name for path in checkpoint.found(keeper.own)] == ["ckpt-00000002.pt", "ckpt-00000001.pt"]
    loaded = keeper.load("auto", setting={"run": "a"})
    assert loaded["step"] == 1 and torch.equal(loaded["own"]["own"], torch.ones(2)) and not capsys.readouterr().out


def test_the_old_one_stays_when_the_new_one_does_not_verify(tmp_path, monkeypatch):
    keeper = saved(tmp_path, 1, keep=1)
    monkeypatch.setattr("aura.checkpointer.damage", lambda path: "el registro data/0 está dañado")
    with pytest.raises(TrainingFault, match="data/0"):
        keeper.save(2, state(2))
    monkeypatch.undo()
    assert checkpoint.path_of(tmp_path, 1).exists()


def test_no_room_for_a_copy_saves_without_one(tmp_path, monkeypatch, capsys):
    keeper = Checkpointer(tmp_path, Session(), background=True)

    def full(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(keeper.host, "take", full)
    for step in (1, 2):
        keeper.save(step, state(step))
        assert checkpoint.read(checkpoint.path_of(tmp_path, step))["step"] == step
    assert capsys.readouterr().out.count("no cabe una copia") == 1


@pytest.mark.parametrize("there", [True, False])
def test_a_thread_is_begun_while_there_is_memory_or_there_is_none(tmp_path, monkeypatch, there):
    """Begun for a checkpoint, when memory was short, it died in its first lines, and the run waited for it for ever."""
    def refuse(_):
        raise RuntimeError("can't start new thread")

    before = Checkpointer(tmp_path, Session(), background=True)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    keeper = before if there else Checkpointer(tmp_path, Session(), background=True)
    for step in (1, 2):
        keeper.save(step, state(step))
        assert keeper.named().endswith(f"ckpt-0000000{step}.pt") and (keeper.writing is not None) == there
        assert checkpoint.read(keeper.last)["step"] == step


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize("room", [0, 1_000_000])
def test_a_save_ends_somehow_where_memory_is_used_up(tmp_path, room):
    code, said = run(["-c", f"""import resource, torch
from aura.checkpointer import Checkpointer
from aura.session import Session
keeper, state = Checkpointer("fuera", Session(), background=True), {{"w": torch.ones(1000)}}
keeper.save(1, state)
keeper.finish()
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, [pages * resource.getpagesize() + {room}] * 2)
eaten = []
try:
    while True:
        eaten.append(bytes(100))
except MemoryError:
    del eaten[-3:]
try:
    keeper.save(2, state)
    keeper.finish()
    del eaten
    print("guardado")
except Exception as problem:
    del eaten
    print(type(problem).__name__)
"""], tmp_path, limit=30)
    assert code == 0 and said in ("guardado\n", "MemoryError\n", "UserError\n", "TrainingFault\n"), said


def test_what_rank_0_has_saved_of_this_step_is_not_replaced_by_who_is_left(tmp_path):
    main, left = (Checkpointer(tmp_path, Session(rank=rank)) for rank in (0, 1))
    for step, way in ((1, "before"), (2, "ours")):
        for keeper in (main, left):
            keeper.save(step, {"by": keeper.dist.rank, "sync": {"run": way}}, own={})
        left.save_alone(step, {"by": 1, "sync": {"run": "ours"}})
    assert [checkpoint.read(path)["by"] for path in checkpoint.found(tmp_path)] == [0, 1]
    assert checkpoint.read(checkpoint.path_of(tmp_path, 1))["sync"]["run"] is None
    left.save(3, {"by": 1, "sync": {"run": "ours"}}, own={})
    assert [checkpoint.step_of(path) for path in checkpoint.found(left.own)] == [3, 2]


def test_no_room_for_what_others_gave_a_part_of_ends_the_run(tmp_path, monkeypatch):
    keeper = Checkpointer(tmp_path, Session(shards=2), background=True)
    problems = [RuntimeError("DefaultCPUAllocator: can't allocate memory"), RuntimeError("Connection closed by peer")]

    def fail(*_):
        raise problems.pop(0)

    monkeypatch.setattr(keeper.host, "take", fail)
    with pytest.raises(TrainingFault, match="proceso 0 no cabe"):
        keeper.save(1, state(1))
    with pytest.raises(RuntimeError, match="peer"):  # another rank is gone: that is for the loop to say
        keeper.save(1, state(1))
    assert checkpoint.found(tmp_path) == []
