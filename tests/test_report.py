"""Logs: full precision, the picture, no wrong MFU."""

import math

from aura import report


def reporter(tmp_path, **options):
    made = report.Reporter(tmp_path, True, 10, **options)
    made.start(0)
    return made


def test_rows_have_full_precision_and_the_promised_columns(tmp_path):
    log = reporter(tmp_path)
    log.count(100, 0.5)
    log.log(1, loss=1 / 3, lr=1e-3, grad_norm=2.0, epoch=0.1)
    log.close()
    (row,) = report.read_table(tmp_path / "train.csv")
    assert float(row["loss"]) == 1 / 3 and float(row["tokens_per_s"]) == 200.0
    for column in ("step", "epoch", "loss", "val_loss", "bits_per_byte", "lr", "grad_norm", "tokens_per_s"):
        assert column in row


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


def test_a_new_run_keeps_the_old_table(tmp_path):
    for _ in range(2):
        log = reporter(tmp_path)
        log.log(1, loss=1.0)
        log.close()
    assert len(report.read_table(tmp_path / "train.csv")) == 1
    assert len(list(tmp_path.glob("anterior-*/train.csv"))) == 1


def test_a_row_that_a_killed_run_left_half_is_dropped(tmp_path):
    log = reporter(tmp_path)
    log.log(100, loss=1.0)
    log.close()
    with open(tmp_path / "train.csv", "a") as file:
        file.write("12,0.3")
    assert [row["step"] for row in report.read_table(tmp_path / "train.csv")] == ["100"]


def test_durations():
    assert [report.duration(s) for s in (45, 200, 7500)] == ["45 s", "3 min 20 s", "2 h 05 min"]
