"""Logs: full precision, the picture, no wrong MFU."""

import math
import sys
import threading
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from aura import report
from aura.errors import UserError
from tests.support import run


def reporter(tmp_path, **options):
    made = report.Reporter(tmp_path, True, 10, **options)
    made.start(0)
    return made


@pytest.mark.parametrize("unit, other", [("tokens", "samples"), ("samples", "tokens")])
def test_rows_have_full_precision_and_the_promised_columns(tmp_path, capsys, unit, other):
    log = reporter(tmp_path, unit=unit)
    log.count(100, 0.5)
    log.log(1, loss=1 / 3, lr=1e-3, grad_norm=2.0, epoch=0.1, tokens=700)
    log.event(1, "NaN")
    log.close()
    assert "AVISO, paso 1: NaN" in capsys.readouterr().out
    (row,), (board,) = report.read_table(tmp_path / "train.csv"), tmp_path.glob("events.out.tfevents.*")
    assert b"grad_norm" in board.read_bytes()
    assert float(row["loss"]) == 1 / 3 and float(row[f"{unit}_per_s"]) == 200.0
    assert row[unit] == "700" and not row[other] and not row[f"{other}_per_s"]
    for column in ("step", "epoch", "loss", "val_loss", "bits_per_byte", "lr", "grad_norm", "tokens_per_s"):
        assert column in row


def test_a_table_that_is_removed_while_the_run_is_on_begins_anew(tmp_path):
    log = reporter(tmp_path)
    log.log(1, loss=3.0)
    log.table.unlink()
    log.log(2, loss=2.5)
    log.log(3, loss=2.0)
    assert [(row["step"], row["loss"]) for row in report.read_table(log.table)] == [("2", "2.5"), ("3", "2.0")]


def test_the_curve_is_drawn_without_a_word_where_the_home_may_not_be_written(tmp_path):
    (tmp_path / "home").write_text("")
    code = "from aura import report; report.draw_curve([{'step': '1', 'loss': '3'}], 'loss.png')"
    assert run(["-c", code], tmp_path, HOME=tmp_path / "home", fresh=True) == (0, "")
    assert (tmp_path / "loss.png").stat().st_size


def test_the_curve_is_a_png_even_with_nan(tmp_path):
    log = reporter(tmp_path)
    log.log(1, loss=3.0)
    log.log(2, loss=math.nan, val_loss=2.5)
    log.close()
    assert (tmp_path / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_picture_never_costs_the_model(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MPLBACKEND", "module://no_existe.backend")  # as a notebook's kernel leaves it
    log = reporter(tmp_path)
    log.log(1, loss=3.0)
    log.close()
    assert (tmp_path / "loss.png").exists() and "Aviso" not in capsys.readouterr().out
    log = reporter(tmp_path)
    log.log(2, loss=3.0)
    log.table.write_text(log.table.read_text().replace("3.0", "tres"))
    log.close()
    assert "Aviso: no se pudo dibujar la curva de pérdida (ValueError" in capsys.readouterr().out


def test_mfu_only_where_the_peak_is_known(tmp_path):
    assert report.peak_flops("NVIDIA H200", "bf16") == 989.4e12
    assert report.peak_flops("NVIDIA H200", "fp32") is None
    assert report.peak_flops("Intel(R) Xeon(R)", "bf16") is None
    log = reporter(tmp_path, flops_per_token=1e9, peak=1e12)
    log.count(100, 1.0)
    log.log(1, loss=1.0)
    log.close()
    assert float(report.read_table(tmp_path / "train.csv")[0]["mfu"]) == 0.1


@pytest.mark.parametrize("step, now, before, said", [
    (2, 1800, 0, "faltan 2 h 00 min | NO cumple las 2 h (total 2 h 30 min)"),
    (9, 3600, 0, "faltan 6 min 40 s | cumple las 2 h (total 1 h 06 min)"),
    (9, 3600, 3600, "faltan 6 min 40 s | NO cumple las 2 h (total 2 h 06 min)"), (10, 3600, 0, "eficiencia 80.0 %")])
def test_a_line_says_what_waiting_costs_and_whether_it_will_be_in_time(tmp_path, monkeypatch, capsys, step, now, before,
                                                                       said):
    clock = iter([0, now, now])
    monkeypatch.setattr(report, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    log = reporter(tmp_path, target_hours=2, ideal=250, unexchanged=400)
    log.count(100, 0.5)
    log.log(step, loss=1.0, total_seconds=before + now)
    line = capsys.readouterr().out.strip()
    assert "comunicación 50.0 % | eficiencia 80.0 %" in line and line.endswith(said)
    log.count(300, 0.5)
    clock = iter([now, now])
    log.log(step, loss=1.0)
    assert "comunicación 0.0 %" in capsys.readouterr().out


def test_a_new_run_keeps_the_old_table(tmp_path, capsys):
    for _ in range(2):
        log = reporter(tmp_path)
        log.log(1, loss=1.0)
        log.close()
    assert len(report.read_table(tmp_path / "train.csv")) == 1
    [kept] = tmp_path.glob("anterior-*/train.csv")
    assert capsys.readouterr().out.count(f"El registro que había se ha movido a {kept.parent}.") == 1


@pytest.fixture
def begun(tmp_path):
    """A Reporter that has written two rows, and what it gave for the last."""
    log = reporter(tmp_path)
    log.log(5, loss=1 / 3)
    last = log.log(10, loss=math.nan)
    log.close()
    return log, last


@pytest.mark.parametrize("other", ["a run", "utf-16", "a folder"])
def test_a_table_of_another_run_or_of_nobody_is_set_aside_and_not_lost(tmp_path, begun, other, capsys):
    log, last = begun
    log.table.rename(tmp_path / "kept.csv")
    if other == "a folder":
        log.table.mkdir()
    elif other == "utf-16":
        log.table.write_text((tmp_path / "kept.csv").read_text(), encoding="utf-16")
    else:
        log.table.write_text((tmp_path / "kept.csv").read_text().replace("10,", "20,"))
    theirs = log.table.is_file() and log.table.read_bytes()
    log.start(10, None if other == "utf-16" else last)
    log.close()
    assert report.read_table(log.table) == [] and "otra ejecución o no se puede leer" in capsys.readouterr().out
    (kept,) = tmp_path.glob("anterior-*/train.csv")
    assert kept.is_dir() or kept.read_bytes() == theirs


def test_a_run_cut_short_before_its_first_row_goes_on_in_its_own_log(tmp_path, capsys):
    log = reporter(tmp_path)
    log.event(1, "se interrumpe")
    log.close()
    log.start(1)
    log.close()
    assert "otra ejecución" not in capsys.readouterr().out and not list(tmp_path.glob("anterior-*"))
    assert "se interrumpe" in (tmp_path / "events.log").read_text()


@pytest.mark.parametrize("told", [True, False], ids=["", "by a checkpoint that does not say"])
def test_the_table_of_the_run_itself_goes_on(tmp_path, begun, told):
    log, last = begun
    log.start(10, last if told else None)
    log.close()
    assert [row["step"] for row in report.read_table(log.table)] == ["5", "10"]
    assert not list(tmp_path.glob("anterior-*"))


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
@pytest.mark.parametrize("name", ["train.csv", "events.out.tfevents.*"])
def test_a_disk_that_fills_up_costs_the_log_and_not_the_training(tmp_path, capfd, monkeypatch, name):
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    log = reporter(tmp_path)
    writer = log.board.file_writer.event_writer._async_writer._worker
    writer._flush_secs = writer._next_flush_time = 0
    (path,) = tmp_path.glob(name)
    path.unlink()
    path.symlink_to("/dev/full")
    tries = next(step for step in range(1, 10_000) if log.log(step, loss=1.0) is None)
    path.unlink()
    assert log.log(tries, loss=1.0) is None and not path.exists()
    log.event(tries, "NaN")
    log.sample(tries, "texto")
    log.close()
    said = capfd.readouterr()
    assert said.out.count(f"Aviso: no se puede escribir en --log-dir '{tmp_path}' (no queda espacio") == 1
    assert "Traceback" not in said.out + said.err


@pytest.mark.parametrize("module, problem, shown", [
    ("tensorboard.summary", OSError(), False), ("tensorboard.summary", ValueError(), True), ("aura", OSError(), True)])
def test_of_what_fails_in_a_thread_only_tensorboard_s_disk_is_not_shown(module, problem, shown):
    seen, thread = [], type("Writer", (threading.Thread,), {"__module__": module})()
    report._without_tensorboard(SimpleNamespace(thread=thread, exc_value=problem), seen.append)
    assert bool(seen) == shown


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_a_disk_that_is_full_at_the_start_is_named(tmp_path, monkeypatch):
    real = open
    monkeypatch.setattr("builtins.open", lambda path, *rest, **options: real(
        "/dev/full" if str(path).endswith(".parcial") else path, *rest, **options))
    with pytest.raises(UserError, match="--log-dir .*no queda espacio"):
        reporter(tmp_path)


def test_what_was_noted_of_a_past_that_is_undone_is_followed_by_where_the_run_goes_on(tmp_path):
    log = reporter(tmp_path)
    log.log(1, loss=2.0)
    log.log(8, loss=1.0)
    log.event(9, "se detiene el entrenamiento")
    log.close()
    again = report.Reporter(tmp_path, True, 10)
    again.start(8)
    again.close()
    first, second = (tmp_path / "events.log").read_text(encoding="utf-8").splitlines()
    assert first.endswith(" paso 9: se detiene el entrenamiento") and " paso 8: se reanuda aquí: " in second


def test_a_row_that_a_killed_run_left_half_is_dropped(tmp_path):
    log = reporter(tmp_path)
    log.log(100, loss=1.0)
    log.close()
    with open(tmp_path / "train.csv", "a") as file:
        file.write("12,0.3")
    assert [row["step"] for row in report.read_table(tmp_path / "train.csv")] == ["100"]


def test_a_run_killed_before_the_row_that_it_owes_still_knows_its_table(tmp_path, capsys):
    log = reporter(tmp_path)
    log.log(1, loss=3.0)
    log.count(100, 0.5)
    last = log.log(2, loss=2.0)
    log.close()
    for _ in range(2):  # the first is killed in the evaluation
        log = report.Reporter(tmp_path, True, 10)
        log.start(2, last, again=True)
    log.log(2, loss=2.0, val_loss=5.0)
    log.log(3, loss=1.0)
    log.close()
    found = [tuple(row[column] for column in ("step", "loss", "val_loss", "tokens_per_s"))
             for row in report.read_table(tmp_path / "train.csv")]
    assert found == [("1", "3.0", "", ""), ("2", "2.0", "5.0", "200.0"), ("3", "1.0", "", "")]
    board = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in board.Scalars("loss")] == [1, 2, 3]
    assert "Aviso" not in capsys.readouterr().out and not list(tmp_path.glob("anterior-*"))


def test_the_time_left_is_reckoned_from_the_steps_of_this_run_alone(tmp_path, monkeypatch, capsys):
    clock = iter([0, 600, 600])
    monkeypatch.setattr(report, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    log = report.Reporter(tmp_path, True, 10)
    log.start(6)
    log.log(8, loss=1.0)
    assert capsys.readouterr().out.strip().endswith("faltan 10 min 00 s")
