"""monitor.py: piped, in a terminal, recorded and replayed, with sensors missing."""

import contextlib
import csv
import dataclasses
import fcntl
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest

import monitor
from aura import dashboard, diagnosis, heartbeat, sensors
from aura.errors import UserError
from aura.processes import Activity, pid_namespace, start_of
from tests.support import ROOT, environment, run
from tests.test_diagnosis import GB, NOW, beat, cards, cluster, gpu, sample

SCRIPT = ROOT / "monitor.py"
LIMIT = 120


@pytest.fixture
def main(monkeypatch, tmp_path, capsys):
    """Call monitor.main() in this process in an empty folder; returns (exit code, output)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(monitor, "RATES_SECONDS", 0.05)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["monitor.py", *map(str, words)])
        code = monitor.main()
        return code, capsys.readouterr().out

    return call


def record(path, readings):
    """Write readings, (sample, beats) each, as --json writes them."""
    path.write_text("".join(dashboard.record(sample, beats, []) + "\n" for sample, beats in readings), encoding="utf-8")
    return path


def eight_cards(**hot):
    """Eight readings of a machine with eight cards, four of them with a rank."""
    return [(sample(place, gpus=[gpu(index, **(hot if index == 6 else {})) for index in range(8)]),
             cards(rank6=None) + [beat(rank, device=f"cuda:{rank}", gpu_uuid=f"GPU-{rank}", memory=60 * GB,
                                       memory_total=140 * GB) for rank in range(4, 8)]) for place in range(8)]


def live(folder, **values):
    """Beats of a run of two ranks, on this machine and on one that is gone, in the --log-dir `folder`."""
    now = time.time()
    beats = [beat(0, world=2, host=socket.gethostname(), pid=os.getpid(), time=now + 4, received=None,
                  pids=pid_namespace(), **values),
             beat(1, world=2, host="nodo2", received=now - 40, phase="data")]
    target = folder / heartbeat.FOLDER
    target.mkdir(parents=True)
    for one in beats:
        (target / f"rank-{one.rank:05d}.json").write_text(json.dumps(dataclasses.asdict(one)))
    return folder


# --- as lines --------------------------------------------------------------------------------------------------------
def test_piped(tmp_path):
    live(tmp_path / "logs")
    code, output = run([SCRIPT, "--count", 2, "--interval", 0.2, "--cluster"], tmp_path, LIMIT, fresh=True)
    assert code == 0 and "\x1b" not in output
    assert len(re.findall(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ", output, re.M)) == 2
    for piece in ("CPU ", " núcleos", "RAM ", "disco ./checkpoints: ", "libres de", "80/300", "cálculo", "datos",
                  "0.50 s", "2.5000", "AVISO: rango 1 (nodo2): sin noticias desde hace "):
        assert piece in output, output
    assert len(re.findall(r"^ *1  nodo2 .* sin noticias \d\d s$", output, re.M)) == 2, output


def test_the_disk_of_a_rented_machine_is_the_one_its_run_fills(main):
    for folder in ("salida", "logs"):
        os.mkdir(folder)
    with open("salida/training_log.csv", "w"):
        pass
    for words, told in ((["--run", "salida"], "salida"), (["--run", "logs"], "./checkpoints"), ([], "./checkpoints"),
                        (["--run", "salida", "--disk", "."], ".")):
        assert f"disco {told}: " in main("--once", *words)[1]


def test_a_reader_that_goes_away(tmp_path):
    piped = f"{sys.executable} {SCRIPT} --interval 0.1 | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", piped], cwd=tmp_path, env=environment(), capture_output=True,
                          text=True, timeout=LIMIT)
    assert done.stdout.count("\n") == 1 and done.stderr == "" and done.returncode == 128 + signal.SIGPIPE


def test_without_psutil_nvml_and_torch(tmp_path):
    for name in ("psutil", "pynvml", "torch"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('no hay {name}')")
    code, output = run([SCRIPT, "--once", "--run", live(tmp_path / "logs")], tmp_path, LIMIT, fresh=True,
                       PYTHONPATH=f"{tmp_path}:{ROOT}", PATH="/nowhere")
    assert code == 0 and "pip install psutil" in output and "80/300" in output and "RAM " in output, output


def test_torch_is_not_imported(tmp_path):
    words = "import sys, monitor; sys.argv[1:] = ['--once']; monitor.main(); print('torch' in sys.modules)"
    code, output = run(["-c", words], tmp_path, LIMIT, fresh=True)
    assert code == 0 and output.endswith("\nFalse\n")


def test_json_and_csv_that_goes_on(tmp_path, main):
    begun, folder = time.time(), live(tmp_path / "logs")
    code, output = main("--json", "--count", 3, "--interval", 0.1, "--csv", "uso.csv", "--run", folder)
    lines = output.splitlines()
    assert code == 0 and len(lines) == 3
    records = [json.loads(line) for line in lines]
    assert [one["kind"] for one in records[0]["findings"]] == ["gone"] and records[0]["beats"][1]["host"] == "nodo2"
    times = [sensors.typed(one["sample"], sensors.Sample).time for one in records]
    assert times[2] - begun >= 0.05 + 2 * 0.1 and times == sorted(times)  # any of them may be late, none is early
    (tmp_path / "grabado").write_text(output)
    assert main("--json", "--replay", "grabado") == (0, output)
    with open("uso.csv", "a") as file:
        file.write("2026,half a r")  # of a monitor that was killed
    main("--once", "--csv", "uso.csv")
    with open("uso.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["80", "80", "80", None, ""] and rows[0]["findings"] == "gone"
    assert rows[0]["tokens_per_s"] == "2000.0" and float(rows[0]["memory_total"]) > 0


def test_json_has_no_nan():
    line = dashboard.record(sample(), [beat(loss=float("nan"))], [])
    assert json.loads(line, parse_constant=pytest.fail)["beats"][0]["loss"] is None


def test_csv_on_a_full_disk_holds_whole_rows(tmp_path):
    """A part of a number would be taken for the number."""
    code, output = run(["-c", """import resource, sys
from aura import cli, dashboard
resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))
table = dashboard.CsvFile("uso.csv")
def main():
    while True:
        table.add({"gpu": 3, "memory": 762941440})
cli.run(main)"""], tmp_path)
    assert code == 2 and output.startswith("error: --csv 'uso.csv': no se puede escribir (") and output.count("\n") == 1
    assert (tmp_path / "uso.csv").read_text() == "gpu,memory\n" + 3 * "3,762941440\n"


def test_csv_that_is_no_file(main):
    with pytest.raises(UserError, match="--csv '/dev/full': no es un fichero"):
        main("--once", "--csv", "/dev/full")


def test_csv_with_other_columns(tmp_path, main):
    (tmp_path / "notas.csv").write_text("a,b\n")
    with pytest.raises(UserError, match="notas.csv.*otras columnas"):
        main("--once", "--csv", "notas.csv")
    assert (tmp_path / "notas.csv").read_text() == "a,b\n"
    (tmp_path / "notas.csv").write_bytes(b"a\rb\n")
    with pytest.raises(UserError, match="notas.csv.*otras columnas"):
        main("--once", "--csv", "notas.csv")
    with pytest.raises(UserError, match="no hay/u.csv.*no existe"):
        main("--once", "--csv", "no hay/u.csv")


# --- recorded samples of eight cards ---------------------------------------------------------------------------------
def test_check_of_eight_cards(tmp_path, main):
    well = record(tmp_path / "bien.jsonl", eight_cards())
    code, output = main("--check", "--replay", well)
    assert (code, output) == (0, "Todo correcto en nodo1; rangos vistos: 8.\n")
    hot = record(tmp_path / "mal.jsonl", eight_cards(throttle=["hw_thermal"], temperature=91.0, clock=1005.0))
    code, output = main("--check", "--replay", hot)
    assert code == 3 and output.startswith("throttled: GPU 6 (nodo1, rango 6): frenada (temperatura) en 8 de 8 ")
    assert "91 °C" in output and "1005 de 1980 MHz" in output and output.count("\n") == 1
    code, output = main("--check", "--json", "--replay", hot)
    assert code == 3 and json.loads(output)["findings"][0]["kind"] == "throttled"
    assert main("--check", "--replay", hot, "--gpus", "0,1")[0] == 0
    few = ("Todo correcto en nodo1; rangos vistos: 8 (con menos de 5 muestras no se juzgan los problemas "
           "intermitentes).\n")
    assert main("--check", "--count", 4, "--replay", hot) == (0, few)


def test_replay_shows_what_was(tmp_path, main):
    code, output = main("--replay", record(tmp_path / "r.jsonl", eight_cards(utilisation=3.0)))
    assert code == 0 and output.count("97 %") == 7 * 8 and output.count("AVISO: GPU 6") == 4
    bare = tmp_path / "muestras.jsonl"
    bare.write_text(json.dumps(dataclasses.asdict(eight_cards()[0][0])) + "\n" + '{"torn')
    assert main("--replay", bare)[1].count("NVIDIA H200") == 8


def test_check_of_a_run(tmp_path, main):
    logs = live(tmp_path / "logs")
    code, output = main("--check", "--count", 1, "--run", logs)
    assert code == 3 and output.startswith("gone: rango 1 (nodo2): sin noticias")
    (logs / heartbeat.FOLDER / "rank-00001.json").unlink()
    code, output = main("--check", "--count", 1, "--run", logs)
    well = f"Todo correcto en {socket.gethostname()}; rangos vistos: 1"
    assert (code, output) == (0, f"{well} (con menos de 5 muestras no se juzgan los problemas intermitentes).\n")
    with pytest.raises(UserError, match="ningún rango da señales"):
        main("--check", "--count", 1, "--run", tmp_path / "otra")


def test_a_run_that_may_not_be_looked_into_is_not_taken_for_one_without_ranks(tmp_path, main, monkeypatch):
    logs, real = live(tmp_path / "logs"), os.listdir

    def denied(folder="."):
        if Path(folder).name == heartbeat.FOLDER:
            raise PermissionError(13, "Permission denied", str(folder))
        return real(folder)

    monkeypatch.setattr(os, "listdir", denied)
    with pytest.raises(UserError, match=r"--run '.*logs': no se puede leer .permiso denegado.; compruebe la ruta"):
        main("--check", "--count", 1, "--run", logs)


def test_another_process_with_the_pid_of_a_rank_is_not_that_rank(tmp_path, main):
    logs = live(tmp_path / "logs")
    path = logs / heartbeat.FOLDER / "rank-00001.json"
    path.unlink()
    for started, dead in ((start_of(os.getppid()), False), ("otro arranque 17", True)):
        one = beat(0, world=1, host=socket.gethostname(), pid=os.getppid(), time=time.time() - 8, pids=pid_namespace(),
                   started=started, received=None)
        path.with_name("rank-00000.json").write_text(json.dumps(dataclasses.asdict(one)))
        output = main("--check", "--count", 1, "--run", logs)[1]
        assert (f"su proceso ha muerto (pid {os.getppid()})" in output) == dead, output


@pytest.mark.parametrize("change", [{"phase_s": None}, {"ended": 3}, {"windows": [{}]}, {"received": "ayer"},
                                    {"step": 10**400}, {"rank": -5}, {"loss": 10**400}, {"time": float("inf")}])
def test_a_recorded_beat_of_another_kind_is_one_line(tmp_path, main, change):
    path = record(tmp_path / "r.jsonl", [(sample(), cluster())])
    line = json.loads(path.read_text())
    line["beats"][1].update(change)
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(UserError, match="línea 1: no es lo que escribe monitor.py --json"):
        main("--replay", path)


@pytest.mark.parametrize("line", ["", "[]", "nada", "{}", '{"time": 1}', "[" * 100_000, "null"])
def test_a_recorded_line_of_rubbish_is_one_line(tmp_path, main, line):
    (tmp_path / "r.jsonl").write_text(line + "\n")
    with pytest.raises(UserError) as refused:
        main("--replay", tmp_path / "r.jsonl")
    assert "línea 1: no es lo que escribe monitor.py --json" in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("change", [{"time": 1e300}, {"time": 10**400}, {"time": float("nan")},
                                    {"memory_total": 10**400}, {"cores": -1}])
def test_a_recorded_sample_of_numbers_that_nobody_measures_is_one_line(tmp_path, main, change):
    (tmp_path / "r.jsonl").write_text(json.dumps({**dataclasses.asdict(sample()), **change}) + "\n")
    with pytest.raises(UserError, match="línea 1: no es lo que escribe monitor.py --json"):
        main("--replay", tmp_path / "r.jsonl")


BAD = [
    (["--interval", "0"], "--interval: 0"), (["--interval", "pronto"], "'pronto' no es un número"),
    (["--count", "0"], "--count: 0"), (["--once", "--count", "3"], "--once y --count 3"),
    (["--gpus", "0,x"], "--gpus '0,x'"), (["--gpus", ""], "--gpus ''"), (["--gpus", "99"], "99"),
    (["--gpus", "9" * 5000], "--gpus '999"),
    (["--run", ""], "--run: ''"), (["--run", "fichero"], "--run 'fichero' no es una carpeta"),
    (["--replay", "nada"], "--replay 'nada': no se puede leer (no existe); compruebe la ruta"),
    (["--replay", "fichero"], "--replay 'fichero', línea 1: no es lo que escribe"),
    (["--replay", "vacío"], "--replay 'vacío': no contiene ninguna muestra"),
    (["--colour"], "argumento desconocido --colour"), (["--inteval", "3"], "¿quiso decir --interval?"),
]


@pytest.mark.parametrize("words, piece", BAD, ids=[" ".join(words) for words, _ in BAD])
def test_bad_arguments(tmp_path, main, words, piece):
    (tmp_path / "fichero").write_text("{}\n")
    (tmp_path / "vacío").touch()
    with pytest.raises(UserError) as problem:
        main(*words)
    assert piece in str(problem.value) and "\n" not in str(problem.value)


def test_bad_arguments_end_with_one_line(tmp_path):
    code, output = run([SCRIPT, "--count", "-1"], tmp_path, LIMIT, fresh=True)
    assert code == 2 and output.startswith("error: --count: -1") and output.count("\n") == 1


def test_ctrl_c(main, monkeypatch):
    """It ends well what has no other end, and interrupts what has one."""
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(diagnosis, "diagnose", interrupt)
    assert main()[0] == 0
    with pytest.raises(KeyboardInterrupt):
        main("--check")


# --- time and memory -------------------------------------------------------------------------------------------------
def test_samples_do_not_drift(monkeypatch):
    """Each sample takes 0.3 s, one no time, one 12 s; they are taken at multiples of 5 s all the same."""
    clock, taken = [99.2], []

    class Slow:
        def __init__(self, **_):
            pass

        def sample(self, ours=()):
            taken.append(clock[0])
            clock[0] += {3: 0, 4: 12}.get(len(taken), 0.3)

    monkeypatch.setattr(sensors, "Sensors", Slow)
    monkeypatch.setattr(monitor.time, "monotonic", lambda: clock[0])
    args = monitor.build_parser().parse_args([])
    args.gpus = None

    def wait(seconds):
        clock[0] += seconds

    moments = monitor.measured(args, wait)
    for _ in range(6):
        next(moments)
    first = taken[1]
    assert [round(at - first, 6) for at in taken[1:]] == [0, 5, 10, 25, 30, 35]


def test_only_the_last_samples_are_kept(tmp_path, main, monkeypatch):
    kept = []
    monkeypatch.setattr(diagnosis, "diagnose", lambda *given: kept.append(tuple(map(len, given[:2]))) or [])
    main("--replay", record(tmp_path / "r.jsonl", [(sample(), cluster())] * 20))
    assert kept[-1] == (8, 8) and len(kept) == 20


# --- lines of a width ------------------------------------------------------------------------------------------------
def test_no_line_is_wider_than_asked():
    full = eight_cards(name="日本語の名前 " * 9, throttle=["sw_power_cap", "hw_thermal"])[0]
    many = dataclasses.replace(full[0], host="máquina\x1b[2J" * 9, notes=["nota " * 40],
                               links=[sensors.Link("enp0s31f6", 12e6, 3e6)] * 3,
                               processes=[Activity(1, "\x1b[31m漢字\n", 3.0, GB, "x", True)])
    found = diagnosis.diagnose([many] * 8, [cluster(rank3={"received": NOW - 33.0})] * 8, NOW)
    for width in range(12, 200, 3):
        body, told = dashboard.lines(many, cluster(), found, width, cluster=True, run="logs")
        for line, _ in body + told:
            assert dashboard.width_of(line) <= width and line.isprintable(), (width, line)


def test_what_matters_stays_at_60_columns():
    beats = cluster(rank3={"received": NOW - 33.0, "phase": "communication"})
    body, _ = dashboard.lines(sample(), beats, [], 60, cluster=True, run="logs")
    (header,) = [line for line, _ in body if line.startswith("rango")]
    for word in ("paso", "fase", "estado", "máquina"):
        assert word in header
    (gone,) = [line for line, style in body if style == "bad"]
    assert "nodo2" in gone and "comunicación" in gone and gone.endswith("sin noticias 33 s")
    assert len([line for line, _ in body if "en marcha" in line]) == 3
    beats = [*beats[:3], dataclasses.replace(beats[3], ended="se ha perdido la comunicación con otro proceso")]
    body, _ = dashboard.lines(sample(), beats, [], 60, cluster=True, run="logs")
    assert any(line.endswith("  se ha perdido la c…") for line, _ in body)
    body, _ = dashboard.lines(sample(), beats, [], run="logs")  # without --cluster those of this machine
    assert len([line for line, _ in body if "/300" in line]) == 2
    body, _ = dashboard.lines(sample(), beats[2:], [], run="logs")
    assert any("Ningún rango de 'logs' está en esta máquina, sino en nodo2: --cluster" in line for line, _ in body)
    body, _ = dashboard.lines(sample(), [], [], run="logs")
    assert any("Sin noticias de ningún rango en 'logs'" in line for line, _ in body)


def test_wide_characters_are_not_cut_in_half():
    assert dashboard.clip("日本語", 4) == "日…" and dashboard.clip("日本語", 6) == "日本語"
    assert dashboard.pad("日", 4, right=True) == "  日" and dashboard.width_of("é" + "e\u0301") == 2
    assert dashboard.flow(["aa", "bb", "cc"], 7) == ["aa | bb", "cc"]
    assert dashboard.wrap("uno dos tres", 8) == ["uno dos", "  tres"]


# --- in a terminal ---------------------------------------------------------------------------------------------------
class Terminal:
    """monitor.py in a pseudo-terminal of its own."""

    def __init__(self, words, folder, columns=60, rows=40, **extra):
        self.end, theirs = pty.openpty()
        self.resize(columns, rows)
        self.before, self.output = termios.tcgetattr(self.end), ""
        # The terminal must be the child's own: the kernel then sends it Ctrl+C and changes of the window.
        code = (f"import fcntl, os, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
                f"os.execv({sys.executable!r}, {[sys.executable, str(SCRIPT), *map(str, words)]!r})")
        self.child = subprocess.Popen([sys.executable, "-S", "-c", code], cwd=folder, start_new_session=True,
                                      stdin=theirs, stdout=theirs, stderr=theirs,
                                      env=environment(TERM="xterm", **extra))
        os.close(theirs)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()
        os.close(self.end)

    def resize(self, columns, rows):
        fcntl.ioctl(self.end, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def frames(self):
        """What was drawn: a list of lines each."""
        return [frame.split("\x1b[J")[0].split("\r\n") for frame in self.output.split("\x1b[H")[1:]
                if "\x1b[J" in frame]

    def read_until(self, done):
        """Read until done() or the end of the output."""
        deadline = time.monotonic() + LIMIT
        while not done():
            assert time.monotonic() < deadline, self.output
            if select.select([self.end], [], [], 0.1)[0]:
                try:
                    self.output += os.read(self.end, 65536).decode()
                except OSError:  # the last process has closed it
                    return

    def leave(self, act):
        """Do `act`, read to the end; returns the exit code."""
        act()
        self.read_until(lambda: False)
        return self.child.wait(LIMIT)


def plain(line):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line)


def assert_restored(terminal, times=1):
    """Cursor, wrapping and screen are those of before, and the last figures stand below."""
    for on, off in (("?25l", "?25h"), ("?7l", "?7h"), ("?1049h", "?1049l")):
        assert terminal.output.count(f"\x1b[{on}") == terminal.output.count(f"\x1b[{off}") == times
    assert "RAM " in terminal.output.partition("\x1b[?1049l")[2] and "Traceback" not in terminal.output
    assert termios.tcgetattr(terminal.end) == terminal.before


def test_redrawn_in_a_terminal_of_60_columns(tmp_path):
    live(tmp_path / "logs")
    with Terminal(["--interval", 300, "--cluster"], tmp_path) as terminal:
        terminal.read_until(lambda: len(terminal.frames()) == 1)
        terminal.resize(45, 6)
        terminal.read_until(lambda: len(terminal.frames()) == 2)  # at once, not after five minutes
        assert terminal.leave(lambda: os.write(terminal.end, b"\x03")) == 0
        wide, narrow = terminal.frames()
        for frame, columns, rows in ((wide, 60, 40), (narrow, 45, 6)):
            assert max(dashboard.width_of(plain(line)) for line in frame) <= columns and len(frame) <= rows, frame
            assert any("AVISO: rango 1" in line for line in frame)
        assert any("sin noticias " in line and line.startswith("\x1b[1;31m") for line in wide)
        assert socket.gethostname() in narrow[0] and "líneas más" in plain(narrow[2])
        assert_restored(terminal)


def test_a_terminal_is_restored_when_it_is_told_to_end(tmp_path):
    with Terminal(["--interval", 300], tmp_path, NO_COLOR=1) as terminal:
        terminal.read_until(terminal.frames)
        assert terminal.leave(terminal.child.terminate) == 143
        assert "\x1b[1m" not in terminal.output and "\x1b[0m" not in terminal.output
        assert_restored(terminal)


def test_ctrl_z_leaves_the_terminal_and_fg_draws_again(tmp_path):
    def stopped():
        return Path(f"/proc/{terminal.child.pid}/stat").read_text().rpartition(") ")[2][0] == "T"

    with Terminal(["--interval", 300], tmp_path) as terminal:
        terminal.read_until(terminal.frames)
        os.write(terminal.end, b"\x1a")
        terminal.read_until(stopped)
        terminal.read_until(lambda: "RAM " in terminal.output.partition("\x1b[?1049l")[2])
        assert_restored(terminal)
        terminal.child.send_signal(signal.SIGCONT)
        terminal.read_until(lambda: len(terminal.frames()) == 2)
        assert terminal.leave(lambda: os.write(terminal.end, b"\x03")) == 0
        assert_restored(terminal, times=2)


def test_a_signal_that_interrupts_no_call_ends_the_wait(capsys):
    """As one that comes just before the wait starts: here another thread receives it."""
    def send():
        time.sleep(0.2)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, monitor.leave)
    try:
        started = time.monotonic()
        threading.Thread(target=send).start()
        with dashboard.Screen(color=False) as screen, pytest.raises(SystemExit, match="143"):
            screen.wait(2 * LIMIT)
        assert time.monotonic() - started < LIMIT
    finally:
        signal.signal(signal.SIGTERM, before)
    assert signal.set_wakeup_fd(-1) == -1 and signal.getsignal(signal.SIGWINCH) == signal.SIG_DFL
