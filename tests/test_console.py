"""A console that goes away: a training goes on without it, other programs end as ever."""

import errno
import io
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from aura import console
from aura.signals import orderly_stop
from tests.support import ROOT


@pytest.fixture
def pipe(monkeypatch):
    """(Console at one end of a pipe, the other end)."""
    monkeypatch.setattr(console.Console, "outlived", False)
    reader, writer = os.pipe()
    stream = io.TextIOWrapper(os.fdopen(writer, "wb"), line_buffering=True)
    yield console.Console(stream), reader
    stream.close()


def test_what_is_read_arrives(pipe):
    stream, reader = pipe
    assert stream.write("hola\n") == 5 and os.read(reader, 10) == b"hola\n" and stream.encoding
    os.close(reader)
    console.outlive()


def test_a_pipe_that_nobody_reads_ends_what_does_not_train(pipe):
    stream, reader = pipe
    os.close(reader)
    with pytest.raises(BrokenPipeError):
        stream.write("hola\n")
    console.outlive()
    assert [stream.write("hola\n") for _ in range(2)] == [5, 5]
    stream.flush()


def test_a_full_disk_is_no_console_that_is_gone(monkeypatch):
    def full(text):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(console.Console, "outlived", True)
    with pytest.raises(OSError, match="full"):
        console.Console(SimpleNamespace(write=full)).write("hola\n")


def test_a_training_whose_terminal_is_closed_saves_and_says_how_it_ended(book, tmp_path):
    words = ["--preset", "demo", "--n-layer", "1", "--n-embd", "32", "--n-head", "2", "--seq-len", "32", "--vocab-size",
             "400", "--max-steps", "100000", "--log-interval", "1", "--dataset-name", str(book)]
    with subprocess.Popen([sys.executable, ROOT / "train_gpt2_spanish.py", *words], cwd=tmp_path, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)) as child:  # as without nohup
        try:
            for line in child.stdout:
                if line.startswith("paso 3/"):
                    break
            child.stdout.close()
            child.stderr.close()
            child.send_signal(signal.SIGHUP)
            assert child.wait(60) == 129
        finally:
            child.kill()
    assert len(list((tmp_path / "checkpoints").glob("ckpt-*.pt"))) == 1


def test_a_console_that_was_closed_from_the_beginning_is_no_fault(tmp_path):
    words = [sys.executable, str(ROOT / "train_gpt2_spanish.py"), "--lr", "nada"]
    done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *words], cwd=tmp_path, stderr=subprocess.PIPE, text=True,
                          timeout=60, check=False)
    assert done.returncode == 2 and done.stderr.startswith("error: --lr") and len(done.stderr.splitlines()) == 1


def test_under_nohup_a_terminal_may_be_closed():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with orderly_stop() as request:
            os.kill(os.getpid(), signal.SIGHUP)
            assert request.number == 0
    finally:
        signal.signal(signal.SIGHUP, before)
