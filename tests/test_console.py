"""A console that goes away: a training goes on without it, other programs end as ever."""

import io
import os
import signal
import subprocess
import sys

import pytest

from aura import console, dashboard, report
from aura.errors import UserError
from aura.session import Session
from aura.signals import orderly_stop
from tests.support import ROOT, environment, run


@pytest.fixture
def pipe(monkeypatch):
    """(Console at one end of a pipe, the other end)."""
    monkeypatch.setattr(console.Console, "outlived", False)
    reader, writer = os.pipe()
    stream = io.TextIOWrapper(os.fdopen(writer, "wb"), line_buffering=True)
    yield console.Console(stream), reader
    stream.close()


def test_what_others_have_written_does_not_move_the_cursor(tmp_path, capsys):
    """A file, a machine and a piece of a vocabulary may be called anything."""
    hostile = "ñ\x1b[2J\x9b2J\r\a\x7f\tb\nc"
    tame = "ñ\\x1b[2J\\x9b2J\\x0d\\x07\\x7f\tb\nc"
    Session().print(hostile)
    Session().print_each(hostile)
    log = report.Reporter(tmp_path, main=True, steps=1)
    log.say(hostile)
    assert capsys.readouterr().out == f"{tame}\n[rango 0] {tame}\n{tame}\n"
    assert dashboard.paint("a\x1b[2Jb", "bad", color=False) == "a?[2Jb"


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


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_a_console_that_goes_to_a_full_disk_ends_what_does_not_train(monkeypatch):
    monkeypatch.setattr(console.Console, "outlived", False)
    with open("/dev/full", "w", encoding="utf-8", buffering=1) as full:
        stream = console.Console(full)
        with pytest.raises(UserError, match="consola.*no queda espacio"):
            stream.write("hola\n")
        console.outlive()
        assert [stream.write("hola\n") for _ in range(2)] == [5, 5]
        stream.flush()


FULL = """
import sys
from aura import cli, console
def main():
    {body}
    return 0
cli.run(main)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
@pytest.mark.parametrize("body, redirected, code, said", [
    ("print('hola')", ">/dev/full", 2, "error: no se puede escribir en la consola"),
    ("print('hola', end='')", ">/dev/full", 2, "error: no se puede escribir en la consola"),
    ("print('hola', file=sys.stderr)", "2>/dev/full", 2, ""),
    ("print('hola')", ">/dev/full 2>&1", 2, ""),
    ("console.outlive(); print('hola')", ">/dev/full 2>&1", 0, ""),
    ("cli.Parser().parse_args(['--nada'])", ">/dev/full", 2, "error: argumento desconocido --nada"),
    ("cli.Parser().parse_args(['--help'])", ">/dev/full", 2, "error: no se puede escribir en la consola")])
def test_the_exit_code_comes_out_whatever_became_of_the_console(tmp_path, body, redirected, code, said):
    (tmp_path / "full.py").write_text(FULL.replace("{body}", body))
    done = subprocess.run(["sh", "-c", f'exec "$@" {redirected}', "sh", sys.executable, tmp_path / "full.py"],
                          env=environment(), stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == code and done.stderr.startswith(said) and len(done.stderr.splitlines()) == bool(said)


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


def test_no_process_warns_of_a_bar_after_the_last_line(tmp_path):
    """Python 3.14 makes the locks of multiprocessing so."""
    (tmp_path / "fails.py").write_text("""import multiprocessing
multiprocessing.set_start_method("forkserver")
from aura import cli, preparation, report
from aura.errors import UserError

def main():
    preparation.bar(total=2, disable=True)
    report.tqdm.write("antes")
    raise UserError("el valor 7 no sirve; use 8")

cli.run(main)
""")
    assert run(["fails.py"], tmp_path) == (2, "antes\nerror: el valor 7 no sirve; use 8\n")
