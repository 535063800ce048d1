"""The build of the extension: once, never in anybody's way, and never missed when it cannot be had.

A stand-in compiler (a shell script that copies the module built before) keeps these tests fast; `load()` itself
builds with the real one.
"""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aura import extension

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="flock and process groups")

LOAD = "from aura import extension as e; m = e.load(); print(m is not None); print(e.status())"

COMPILER = """#!/bin/sh
case "$*" in
  *--version*) echo stand-in 1.0; exit 0;;
  *" -c "*) echo compile >> "{log}";;
  *) echo link >> "{log}"; sleep {pause}; while [ -e "{hang}" ]; do sleep 0.1; done;;
esac
for last; do :; done
cp "{module}" "$last"
"""


@pytest.fixture
def workshop(tmp_path):
    """A stand-in compiler and an empty build directory: (environment, log of what it was asked, file to hang on)."""
    module = extension.load()
    if module is None:
        pytest.skip(extension.status())
    log, hang, compiler = tmp_path / "log", tmp_path / "hang", tmp_path / "cxx"
    compiler.write_text(COMPILER.format(log=log, hang=hang, pause=0.5, module=module.__file__))
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    environment = {**os.environ, "CXX": str(compiler), "AURA_BUILD_DIR": str(tmp_path / "builds")}
    environment.pop("AURA_EXTENSION", None)
    return environment, log, hang


def start(environment, code=LOAD, cwd=extension.ROOT):
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def finish(process, timeout=60):
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"time-out: {out}{err}")
    return out, err


def wait_for(condition, timeout=30):
    limit = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < limit, "time-out"
        time.sleep(0.02)


needs_jit = pytest.mark.skipif(extension._ahead_of_time() is not None, reason="built ahead of time: nothing to build")


@needs_jit
def test_race_of_three_builds_once(workshop):
    environment, log, _ = workshop
    processes = [start(environment) for _ in range(3)]
    for process in processes:
        out, err = finish(process)
        assert out.startswith("True\n"), err
        assert err == ""
    assert log.read_text().split().count("link") == 1
    assert log.read_text().split().count("compile") == len(extension.SOURCES)


@needs_jit
def test_killed_builder_blocks_nobody(workshop):
    environment, log, hang = workshop
    hang.touch()
    builder = start(environment)
    try:
        wait_for(lambda: log.exists() and "link" in log.read_text())
        os.kill(builder.pid, signal.SIGKILL)
        builder.wait(timeout=10)
        # Its compiler is still at work, in a folder nobody will look into.
        orphans = log.read_text().split().count("link")
        hang.unlink()
        out, err = finish(start(environment))
    finally:
        hang.unlink(missing_ok=True)
        builder.kill()
        finish(builder)
    assert out.startswith("True\n"), err
    assert log.read_text().split().count("link") == orphans + 1
    [build] = Path(environment["AURA_BUILD_DIR"]).iterdir()
    assert (build / "_C.so").exists()


@needs_jit
def test_no_compiler_is_one_line_and_none(tmp_path):
    base = {key: value for key, value in os.environ.items() if key not in ("AURA_EXTENSION", "CXX")}
    base["AURA_BUILD_DIR"] = str(tmp_path)
    for change in ({"CXX": "/nonexistent"}, {"PATH": str(tmp_path)}):
        out, err = finish(start({**base, **change}, LOAD + "; e.load()"))
        assert out.startswith("False\n")
        assert "sin extensión C++: no se encuentra un compilador" in out
        assert len(err.splitlines()) == 1
        assert err.startswith("Aviso: sin extensión C++")


@needs_jit
def test_compile_error_is_told_in_its_own_words(tmp_path, workshop):
    environment, _, _ = workshop
    failing = "#!/bin/sh\necho 'a.cpp:1: note: x'\necho 'a.cpp:3:4: error: no such luck'\nexit 1\n"
    Path(environment["CXX"]).write_text(failing)
    out, err = finish(start(environment))
    assert out.startswith("False\n")
    assert len(err.splitlines()) == 1
    assert "error: no such luck" in err
    [build] = (path for path in Path(environment["AURA_BUILD_DIR"]).iterdir() if path.is_dir())
    assert [path.name for path in build.iterdir()] == ["lock"]


def test_switched_off_is_silent():
    out, err = finish(start({**os.environ, "AURA_EXTENSION": "off"}))
    assert out == "False\nextensión C++ desactivada (AURA_EXTENSION=off)\n"
    assert err == ""


def test_nothing_is_built_on_import(tmp_path):
    finish(start({**os.environ, "AURA_BUILD_DIR": str(tmp_path)}, "import aura.extension, aura.tokens"))
    assert list(tmp_path.iterdir()) == []


def test_only_the_standard_library_is_imported():
    code = "import sys, aura.extension; print(sorted({'torch', 'numpy', 'pybind11'} & set(sys.modules)))"
    assert finish(start(dict(os.environ), code)) == ("[]\n", "")


def test_module_carries_the_hash_of_its_sources():
    module = extension.load()
    if module is None:
        pytest.skip(extension.status())
    assert module.source_hash == extension.source_hash()
    assert extension.HASH_MARK + module.source_hash.encode() in Path(module.__file__).read_bytes()
    assert extension.load() is module


def test_key_changes_with_sources_and_flags(tmp_path, monkeypatch):
    compiler = [sys.executable]
    keys = {extension.build_key(compiler)}
    monkeypatch.setattr(extension, "CSRC", tmp_path)
    keys.add(extension.build_key(compiler))
    (tmp_path / "a.h").write_text("int a;")
    keys.add(extension.build_key(compiler))
    (tmp_path / "a.h").write_text("int b;")
    keys.add(extension.build_key(compiler))
    monkeypatch.setattr(extension, "compile_flags", lambda native: ["-O0"])
    keys.add(extension.build_key(compiler))
    assert len(keys) == 5


def test_stale_module_built_at_installation_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(extension, "__file__", str(tmp_path / "extension.py"))
    built = tmp_path / ("_C" + extension.importlib.machinery.EXTENSION_SUFFIXES[0])
    built.write_bytes(b"..." + extension.HASH_MARK + b"0" * 64)
    assert extension._ahead_of_time() is None
    built.write_bytes(b"..." + extension.HASH_MARK + extension.source_hash().encode())
    assert extension._ahead_of_time() == built
    built.write_bytes(b"...")
    monkeypatch.setattr(extension, "CSRC", tmp_path / "absent")
    assert extension._ahead_of_time() == built
