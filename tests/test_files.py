"""Files are whole or not there."""

import contextlib
import errno
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from aura import files
from aura.errors import UserError
from tests.support import Process


def test_what_cannot_be_moved_aside_leaves_no_empty_folder(tmp_path, monkeypatch):
    def refused(*_):
        raise PermissionError(errno.EPERM, "no")

    (tmp_path / "a").touch()
    monkeypatch.setattr(os, "replace", refused)
    with pytest.raises(PermissionError):
        files.set_aside([tmp_path / "a"], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_failed_write_leaves_the_old_file_and_no_trace(tmp_path):
    path = tmp_path / "a.json"
    files.write_json(path, {"v": 1})
    with pytest.raises(RuntimeError), files.atomic_write(path) as file:
        file.write(b"half")
        raise RuntimeError
    assert path.read_text() == '{\n  "v": 1\n}\n'
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_link_where_the_partial_file_would_be_leads_nowhere(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("whole")
    (tmp_path / f".a.json.{os.getpid()}{files.PARTIAL_SUFFIX}").symlink_to(victim)
    files.write_json(tmp_path / "a.json", {"v": 1})
    assert victim.read_text() == "whole" and not (tmp_path / "a.json").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "victim"]


def test_a_file_is_on_the_disk_before_its_name_and_that_before_anyone_is_told(tmp_path, monkeypatch):
    done, sync, replace = [], os.fsync, os.replace

    def noted(descriptor):
        assert os.fstat(descriptor).st_size
        done.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "replace", lambda *names: done.append("renamed") or replace(*names))
    files.write_json(tmp_path / "a.json", {"año": 1})
    assert done == [f".a.json.{os.getpid()}.parcial", "renamed", tmp_path.name]
    assert "año" in (tmp_path / "a.json").read_text(encoding="utf-8")


def test_a_link_stays_one_and_what_it_leads_to_is_written(tmp_path):
    (tmp_path / "disco").mkdir()
    (tmp_path / "enlace").symlink_to("disco/a.json")
    for value in (1, 2):
        files.write_json(tmp_path / "enlace", value)
    assert (tmp_path / "enlace").is_symlink() and (tmp_path / "disco" / "a.json").read_text() == "2\n"
    assert [path.name for path in (tmp_path / "disco").iterdir()] == ["a.json"]


def test_what_cannot_become_a_file_is_refused_before_the_work(tmp_path):
    (tmp_path / "enlace").symlink_to("no está/a.json")
    os.mkfifo(tmp_path / "tubo")
    for name, why in ((".", "es una carpeta"), ("tubo", "no es un fichero"), ("ñ" * 100, "180 bytes"),
                      ("enlace", "falte montar el disco")):
        with pytest.raises(UserError, match=f"^--csv '.*{why}"):
            files.require_writable_file(str(tmp_path / name), "--csv")
    assert files.require_writable_file(str(tmp_path / "nueva" / ("ñ" * 90)), "--csv").parent.is_dir()
    assert not (tmp_path / "no está").exists()


def test_a_pipe_where_a_file_is_read_unasked_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "tubo")
    for path in (tmp_path, tmp_path / "falta"):  # for open() to say what is wrong
        assert files.regular(path) == path
    with pytest.raises(OSError, match="no es un fichero") as problem:
        files.regular(tmp_path / "tubo")
    assert files.explain(problem.value) == "no es un fichero"


def test_a_circle_of_links_is_not_called_a_disk_that_is_missing(tmp_path):
    (tmp_path / "lazo").symlink_to("lazo")
    with pytest.raises(UserError, match="los enlaces forman un círculo.; indique otra carpeta con --log-dir"):
        files.require_writable_directory(tmp_path / "lazo", "--log-dir")


def test_what_is_set_aside_may_be_read_by_whom_the_umask_lets(tmp_path):
    (tmp_path / "a").touch()
    before = os.umask(0o027)
    try:
        folder = files.set_aside([tmp_path / "a"], tmp_path)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o750


def test_set_aside_keeps_everything(tmp_path):
    (tmp_path / "x").write_text("1")
    folder = files.set_aside([tmp_path / "x", tmp_path / "missing"], tmp_path)
    assert (folder / "x").read_text() == "1"
    assert not (tmp_path / "x").exists()
    assert files.set_aside([tmp_path / "x"], tmp_path) is None


def test_unwritable_places_are_named_with_the_flag(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="una parte de la ruta no es una carpeta.*--log-dir"):
        files.require_writable_directory(tmp_path / "file" / "logs", "--log-dir")
    with pytest.raises(UserError, match="/proc/nada"):
        files.require_writable_directory("/proc/nada", "--log-dir")
    with pytest.raises(UserError, match="UTF-8.*--log-dir"):
        files.require_writable_directory(tmp_path / "sal\udcf1", "--log-dir")
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(files.tempfile, "TemporaryFile", Mock(side_effect=full))
    with pytest.raises(UserError, match="disco.; libere espacio o indique otra carpeta con --log-dir"):
        files.require_writable_directory(tmp_path, "--log-dir")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_may_be_written_into_but_not_read_is_refused_before_anything_is_made(tmp_path, monkeypatch):
    """The system would refuse to anyone but root, after hours of training that are to be saved there."""
    real = os.open

    def denied(path, how, *rest, **options):
        if not how & (os.O_RDWR | os.O_WRONLY):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, how, *rest, **options)

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(UserError, match="no se puede escribir en '.*' .permiso denegado.; .* --output"):
        files.require_writable_directory(tmp_path, "--output")


HOLD = """
import sys, time
from aura import files
files.hold(sys.argv[1], "--output-dir")
print("mía", flush=True)
time.sleep(100)
"""


def test_a_folder_belongs_to_one_process_until_it_dies(tmp_path):
    (tmp_path / "hold.py").write_text(HOLD)
    with Process([tmp_path / "hold.py", tmp_path], tmp_path) as process:
        process.wait_for("mía")
        with pytest.raises(UserError, match="otra ejecución.*--output-dir"):
            files.hold(tmp_path, "--output-dir")
    files.hold(tmp_path, "--output-dir")


def test_a_lock_that_leads_nowhere_is_none(tmp_path):
    (tmp_path / files.IN_USE).symlink_to(files.IN_USE)
    files.hold(tmp_path, "--output-dir")
    files.keep_held(tmp_path)


def test_a_folder_in_use_by_another_user_is_not_taken(tmp_path, monkeypatch):
    """A run in a container leaves a lock that is root's: who may write into the folder may only read that."""
    opened = os.open

    def as_another_user(path, how, *mode):
        if how & os.O_RDWR:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return opened(path, how, *mode)

    (tmp_path / "hold.py").write_text(HOLD)
    with Process([tmp_path / "hold.py", tmp_path], tmp_path) as process:
        process.wait_for("mía")
        monkeypatch.setattr(files.os, "open", as_another_user)
        with pytest.raises(UserError, match="otra ejecución.*--output-dir"):
            files.hold(tmp_path, "--output-dir")


def test_a_lock_whose_holder_has_just_removed_it_is_not_taken(tmp_path, monkeypatch):
    opened = os.open

    def and_removed(path, *how):
        descriptor = opened(path, *how)
        os.unlink(path)
        return descriptor

    monkeypatch.setattr(files.os, "open", and_removed)
    with pytest.raises(UserError, match="otra ejecución está usando"):
        files.hold(tmp_path, "--checkpoint-dir")


def opened_below(folder):
    """The files in `folder` that this process has open: other tests in this process have files of their own."""
    paths = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            paths.append(os.readlink(link))
    return [path for path in paths if path.startswith(str(folder))]


def test_what_is_being_built_is_not_taken_for_abandoned(tmp_path):
    (tmp_path / ".a.dead.parcial").mkdir()
    with files.building(tmp_path / "a") as first, files.building(tmp_path / "a") as second:
        assert first != second and opened_below(tmp_path)
        files.remove_abandoned(tmp_path)
        files.remove_partials(tmp_path)  # which is for files
        assert {path.name for path in tmp_path.iterdir()} == {first.name, second.name}
        (first / "x").write_text("1")
        files.put_in_place(first, tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a" / "x").read_text() == "1"
    assert not opened_below(tmp_path), "locks are given up"


@pytest.mark.parametrize("removed", ["before it is locked", "while it is locked"])
def test_who_looks_for_abandoned_folders_takes_none_that_has_just_been_made(tmp_path, monkeypatch, removed):
    lock, seen = files.lock, []

    def raced(path):
        seen.append(path)
        if len(seen) > 1:
            return lock(path)
        if removed == "before it is locked":
            path.rmdir()
            return lock(path)
        theirs = lock(path)
        try:
            return lock(path)
        finally:
            path.rmdir()
            os.close(theirs)

    monkeypatch.setattr(files, "lock", raced)
    with files.building(tmp_path / "a") as partial:
        (partial / "x").touch()
        assert seen[1:] == [partial, partial / files.IN_USE] and list(tmp_path.iterdir()) == [partial]
        assert opened_below(tmp_path)


@pytest.mark.parametrize("races", [1, files.ATTEMPTS])
def test_two_take_the_same_name_at_the_same_time(tmp_path, monkeypatch, races):
    rename, calls = os.rename, []
    for name in ("a", ".mine.parcial"):
        (tmp_path / name).mkdir()
    (tmp_path / ".mine.parcial" / "x").write_text("mine")

    def raced(source, target):
        calls.append(target)
        if len(calls) in range(2, 2 * races + 1, 2):  # between the two of ours
            (tmp_path / "a").mkdir()
            (tmp_path / "a" / "x").write_text("theirs")
        rename(source, target)

    monkeypatch.setattr(os, "rename", raced)
    if races == files.ATTEMPTS:
        with pytest.raises(OSError, match="otros procesos escriben en la misma carpeta") as found:
            files.put_in_place(tmp_path / ".mine.parcial", tmp_path / "a")
        assert files.explain(found.value) == "otros procesos escriben en la misma carpeta"
        return
    files.put_in_place(tmp_path / ".mine.parcial", tmp_path / "a")
    assert (tmp_path / "a" / "x").read_text() == "mine" and [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_folder_on_another_disk_stays_there(tmp_path):
    (tmp_path / "disk/data").mkdir(parents=True)
    (tmp_path / "data").symlink_to(tmp_path / "disk/data")
    (tmp_path / "disk/data/old").touch()
    (tmp_path / "disk/.data.dead.parcial").mkdir()  # of one that was killed
    with files.building(tmp_path / "data") as partial:
        assert partial.parent == tmp_path / "disk"
        (partial / "new").touch()
        files.put_in_place(partial, tmp_path / "data")
    assert (tmp_path / "data").is_symlink() and [path.name for path in (tmp_path / "disk/data").iterdir()] == ["new"]
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["data"]


def test_a_name_that_cannot_be_taken_leaves_the_old_folder(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(FileNotFoundError):
        files.put_in_place(tmp_path / "missing", tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_link_to_a_disk_that_is_not_there_is_called_that(tmp_path):
    (tmp_path / "ck").symlink_to(tmp_path / "disco" / "ck")
    with pytest.raises(UserError, match=r"'.*/ck' \(es un enlace a '.*/disco/ck', que no está; quizá falte montar"):
        files.require_writable_directory(tmp_path / "ck", "--checkpoint-dir")


def test_the_folder_of_a_mounted_disk_cannot_be_renamed_and_it_says_so():
    assert files.explain(OSError(errno.EBUSY, "Device or resource busy")) == "está en uso o es un punto de montaje"


def test_what_another_machine_is_building_on_nfs_is_neither_removed_nor_taken_up(tmp_path, monkeypatch):
    """There the lock of a folder is seen by its machine alone, that of a file by all."""
    real = files.lock
    monkeypatch.setattr(files, "lock", lambda path, shared=False: (
        os.open(path, os.O_RDONLY) if path.is_dir() else real(path, shared)))
    with files.building(tmp_path / "a", lambda _: True) as theirs:
        with files.building(tmp_path / "a", lambda _: True) as ours:
            assert theirs.is_dir() and ours != theirs
        (theirs / files.UNFINISHED).touch()
        with files.building(tmp_path / "a", lambda _: True) as ours:
            assert ours != theirs
        files.remove_abandoned(tmp_path, "a", lambda _: True)
        files.put_in_place(theirs, tmp_path / "a")
    assert [path.name for path in tmp_path.rglob("*")] == ["a"]
