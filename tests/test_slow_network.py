"""The benchmark of slow networks: what it measures between, what its rows and tables say; not what it measures."""

import argparse
import json
import re
import time

import pytest

from aura.errors import UserError
from aura.sync import SYNC_EVERY


@pytest.fixture
def slow(benchmark):
    """The benchmark as a module."""
    return benchmark("slow_network")


@pytest.fixture
def crews(benchmark):
    """The module of its machines and processes."""
    return benchmark("slow_network_crew")


@pytest.fixture
def table(benchmark):
    """The module of what it shows."""
    return benchmark("slow_network_table")


@pytest.fixture
def rows(slow, crews):
    """Of a network on which diloco wins and auto takes it."""
    cells = {"one": [slow.Cell(1000.0, 1.0, 0.0, 20)], "control": [slow.Cell(1950.0, 1.0, 0.0, 20)],
             "ddp": [slow.Cell(100.0, 20.0, 50_000.0, 2), slow.Cell(120.0, 16.0, 50_000.0, 2)],
             "diloco": [slow.Cell(1900.0, 1.1, 125.0, 100)],
             "auto": [slow.Cell(1880.0, 1.1, 125.0, 100, choice="diloco", expected={"ddp": 19.0, "diloco": 1.0})]}
    return slow.rows_of(crews.network("50"), cells, {"fp16": "el proceso 1 ha terminado"}, 2)


def by_method(rows):
    return {row["method"]: row for row in rows}


def test_networks_are_read(crews, table):
    assert crews.networks("50,50/10,200%2,12.5/3%1") == [
        crews.Network("50", 50, 50), crews.Network("50/10", 50, 10), crews.Network("200%2", 200, 200, 2),
        crews.Network("12.5/3%1", 12.5, 3, 1)]
    assert [table.title(name) for name in ("50/10", "200%2")] == ["50/10 Mbit/s", "200 Mbit/s, 2 % de pérdida"]
    for text in ("", "0", "50x", "50/0", "-1", "50%2.5", "50%99"):
        with pytest.raises(argparse.ArgumentTypeError, match="no es una red"):
            crews.network(text)


def test_links_get_the_rates_of_the_first_machine_and_lose_frames(crews, monkeypatch):
    done = []

    class Switch:
        hosts = ["a", "b", "c"]

        def limit(self, *words):
            done.append(("limit", *words))

        def lose(self, *words):
            done.append(("lose", *words))

    monkeypatch.setattr(crews, "ip", lambda *words: done.append(words[:2]))
    crews.limit(Switch(), None)
    assert done == []
    crews.limit(Switch(), crews.network("10/50"))
    assert done == [("limit", 0, 10, 50), ("limit", 1, 50, 50), ("limit", 2, 50, 50)]
    done.clear()
    crews.limit(Switch(), crews.network("200%2"))
    assert ("lose", 0, 2) in done and ("lose", 2, 2) in done and ("-n", "b") in done


def test_a_window_leaves_out_the_start_and_holds_whole_rounds(slow):
    marks = [(0.5 * number, 0) for number in range(400)]
    assert slow.window(marks, 1, 20) == (6, 46)  # 3 s are left out, 20 s measured
    assert slow.window(marks[:46], 1, 20) is None
    assert slow.window(marks, 100, 20) == (13, 113)  # and the steps of the first fragment
    assert slow.window(marks, 100, 60) == (13, 213)
    assert slow.window(marks[:213], 100, 60) is None
    slow_link = [(40.0 * number, 0) for number in range(9)]
    assert slow.window(slow_link, 1, 20) == (1, 3)  # two steps at least
    assert slow.window([], 1, 20) is None


def test_rates_add_up_and_bytes_are_those_of_the_window(slow):
    first = [(0.0, 1_000_000), (1.0, 1_000_100), (3.0, 1_000_500)]
    second = [(0.0, 0), (0.5, 7), (1.5, 700), (2.5, 1007), (4.5, 5000)]
    cell = slow.measured([first, second], [(1, 2), (1, 3)], 1000)
    assert cell.tokens_per_s == 1000 / 2 + 1000 / 1  # each at its own pace
    assert cell.step_s == 2 and cell.steps == 1
    assert cell.sent == (400 + 500) / 2000


def test_half_a_line_does_not_count(crews, tmp_path):
    path = tmp_path / "steps.txt"
    assert crews.read_marks(path) == []
    path.write_text("1.5 10\n2.5 20\n3.")
    assert crews.read_marks(path) == [(1.5, 10), (2.5, 20)]


def test_rows(rows):
    found = by_method(rows)
    assert found["diloco"]["to_one"] == 1.9 and found["one"]["machines"] == 1 and found["ddp"]["machines"] == 2
    assert (found["ddp"]["tokens_per_s"], found["ddp"]["tokens_per_s_min"], found["ddp"]["rounds"]) == (110, 100, 2)
    assert found["diloco"]["bytes_ddp_ratio"] == 400 and "bytes_ddp_ratio" not in found["one"]
    assert found["ddp"]["predicted_s"] == 19 and found["ddp"]["predicted_ratio"] == pytest.approx(19 / 18)
    assert found["auto"]["predicted_s"] == 1 and found["diloco"]["predicted_ratio"] == pytest.approx(1 / 1.1)
    assert found["auto"]["choice"] == found["auto"]["fastest"] == "diloco" and found["auto"]["right"]
    assert found["fp16"] == {"op": "train", "network": "50", "method": "fp16", "failed": "el proceso 1 ha terminado"}


def test_auto_is_right_within_what_cannot_be_told_apart(slow):
    def judged(choices, **rates):
        return slow.judged([slow.Cell(1.0, 1.0, 0.0, 1, choice=choice) for choice in choices], rates)["right"]

    assert judged(["ddp"], one=1000, ddp=1910, diloco=2000)
    assert not judged(["ddp"], one=1000, ddp=1890, diloco=2000)
    assert not judged(["diloco", "ddp"], one=1000, ddp=1000, diloco=2000)
    assert not judged(["fp16"], one=1000, ddp=500, fp16=900)
    assert judged(["diloco"]) and not judged(["diloco"], ddp=2.0)  # not measured by itself: as fast as auto with it


def test_losses_must_be_finite_and_fall(slow, crews):
    slow.check_losses({1: 7.0, 2: 7.1})  # too few to tell
    slow.check_losses({1: 7.0, 40: 6.0})
    for losses in ({}, {1: 7.0, 2: float("nan")}, {1: 7.0, 40: 7.0}):
        with pytest.raises(crews.Failed, match="pérdida"):
            slow.check_losses(losses)


def test_tables_and_charts(crews, table, rows, tmp_path, capsys):
    table.print_speeds(crews.network("50"), rows)
    said = capsys.readouterr().out
    assert "1.90" in said and "400.0" in said and "elige diloco; lo más rápido fue diloco\n" in said and "falló" in said
    text = table.markdown({"rows": rows})
    assert "| red | una máquina | sin intercambio | ddp | diloco | auto |" in text
    assert "| 50 Mbit/s | 1000 | 1950 (x 1.95) | 110 (x 0.11) | 1900 (x 1.90) | 1880 (x 1.88) diloco |" in text
    assert "| 50 Mbit/s | 50000 | 125 (1/400) | 125 (1/400) |" in text
    table.draw({"rows": rows, "machines": 2, "gradient_mb": 52.0}, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_quality_compares_seed_by_seed(slow, table, tmp_path):
    losses = {("ddp", 1): 4.0, ("ddp", 2): 5.0, ("diloco", 1): 4.04, ("diloco", 2): 5.0, ("one", 1): 5.05,
              ("one", 2): 5.0}
    rows = [{"method": method, "seed": seed, "tokens": 3_000_000, "val_loss": loss,
             "curve": [[1_000_000, 6.0], [3_000_000, loss]]} for (method, seed), loss in losses.items()]
    args = slow.build_parser().parse_args(["--quality", "--seeds", "1,2"])
    found = slow.summary(rows, {"one": 1000.0, "diloco": 1900.0}, args)
    assert [(pair["method"], pair["to"]) for pair in found["ratios"]] == [("diloco", "ddp"), ("diloco", "one")]
    assert found["ratios"][0]["ratio_min"] == 1 and found["ratios"][0]["ratio_max"] == pytest.approx(1.01)
    assert found["ratios"][1]["ratio"] == pytest.approx((0.8 + 1) / 2)
    result = {"rows": rows, "seeds": [1, 2], "summary": found}
    assert "| diloco | 4.0400 | 5.0000 | 3.00 M |" in table.markdown(result)
    table.draw(result, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_speeds_of_an_earlier_result(slow, rows, tmp_path):
    path, parser = tmp_path / "speeds.json", slow.build_parser()

    def speeds(*words):
        return slow.speeds(parser.parse_args(["--speeds", str(path), *words]), parser)

    path.write_text(json.dumps({**slow.sizes(parser.parse_args([])), "rows": rows}))
    assert speeds()["diloco"] == 1900
    for words, problem in ((("--at", "10"), "no tiene one y diloco en la red 10; elija otra con --at"),
                           (("--machines", "3"), "se midió con otros valores (machines: 2 y no 3)")):
        with pytest.raises(UserError, match=re.escape(problem)):
            speeds(*words)
    for text in ("no es JSON", "[]", json.dumps({"rows": [{"op": "quality", "method": "one"}]})):
        path.write_text(text)
        with pytest.raises(UserError, match="no es un resultado de velocidad"):
            speeds()


def test_losses_of_methods_that_are_not_trained_are_refused(slow):
    with pytest.raises(UserError, match="--methods control,auto: --quality entrena one, ddp, fp16 o diloco"):
        slow.main(["--quality", "--methods", "control,auto"])


def test_a_crew_tells_how_it_failed_and_leaves_nothing(crews, tmp_path, monkeypatch):
    program = tmp_path / "program.py"
    program.write_text("import sys, time\nif sys.argv[4] == 'fails':\n    sys.exit('no data')\ntime.sleep(100)\n")
    monkeypatch.setattr(crews, "PROGRAM", program)
    begun = time.monotonic()
    with crews.Crew("ours", [["waits"], ["fails"]], crews.places(tmp_path, "ab")) as crew:
        with pytest.raises(crews.Failed, match="proceso 1 ha terminado con el código 1:\nno data"):
            crew.watch(lambda: None, 60)
        assert crew.children[0].poll() is None
    assert [child.returncode for child in crew.children] == [-9, 1] and time.monotonic() - begun < 30
    alone = crews.Crew("ours", [["waits"]], [tmp_path / "c"])
    with alone as crew, pytest.raises(crews.Failed, match="no ha acabado en 0"):
        crew.watch(lambda: None, 0)


def test_a_training_that_fails_ends_the_program_with_what_it_said(slow, crews, tmp_path, monkeypatch):
    program = tmp_path / "program.py"
    program.write_text("import sys\nsys.exit('--lr -1: must be above 0')\n")
    monkeypatch.setattr(crews, "PROGRAM", program)
    monkeypatch.setattr(slow, "prepare", lambda args, folder: None)
    with pytest.raises(SystemExit, match="^falló: .*ha terminado con el código 1:\n--lr -1: must be above 0"):
        slow.main(["--quality", "--methods", "diloco", "--seeds", "1"])


@pytest.fixture
def trains(slow, crews, tmp_path, monkeypatch):
    """Runs the program with trainings that write down their arguments and go on from the loss of the last time."""
    program = tmp_path / "program.py"
    program.write_text("import pathlib, sys\npathlib.Path('logs').mkdir(exist_ok=True)\n"
                       "table = pathlib.Path('logs/train.csv')\n"
                       "text = table.read_text() if table.exists() else 'step,tokens,val_loss\\n'\n"
                       "table.write_text(text + f'1,10,{len(text.splitlines())}\\n')\n"
                       "pathlib.Path('words').write_text(' '.join(sys.argv))\n")
    monkeypatch.setattr(crews, "PROGRAM", program)
    monkeypatch.setattr(slow, "prepare", lambda args, folder: None)

    def run(*words):
        slow.main(["--quality", "--methods", "one,diloco", "--json", str(tmp_path / "json"), *words])
        found = json.loads((tmp_path / "json").read_text())["rows"]
        return {(row["method"], row["seed"]): row["val_loss"] for row in found}

    return run


def test_trainings_that_are_kept_go_on(slow, trains, tmp_path):
    work = tmp_path / "new" / "work"
    kept = ("--work", str(work), "--seeds")
    assert trains(*kept, "1") == {("diloco", 1): 1, ("one", 1): 1}
    assert trains(*kept, "1,2") == {("diloco", 1): 2, ("diloco", 2): 1, ("one", 1): 2, ("one", 2): 1}
    steps = 9_000_000 // (2 * 128)
    words = (work / f"one-{steps}" / "2" / "words").read_text()
    assert "--resume auto --checkpoint-freq" in words and "--checkpoint-freq 0" not in words
    with pytest.raises(UserError, match="tokens: 9000000 y no 10000; lr: 0.0004 y no 0.5.; dé otra carpeta"):
        trains(*kept, "1", "--lr", "0.5", "--tokens", "10000")
    text = tmp_path / "text.txt"
    text.write_text("otro")
    with pytest.raises(UserError, match=r"corpus: \[\] y no \[\['text.txt', 4\]\]"):
        trains(*kept, "1", "--corpus", str(text))
    with pytest.raises(UserError, match="--work: es de --quality"):
        slow.main(["--work", str(work)])


def test_trainings_that_are_not_kept_leave_nothing(trains, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    for _ in range(2):
        assert trains("--seeds", "1") == {("diloco", 1): 1, ("one", 1): 1}
    assert list((tmp_path / "temporary").iterdir()) == []


def test_without_root_it_says_so_and_ends_well(slow, monkeypatch, capsys):
    monkeypatch.setattr(slow, "limits_work", lambda: False)
    slow.main([])
    assert capsys.readouterr().out.startswith("Omitido: hacen falta root")


def test_command_lines_are_those_of_the_script(slow, tmp_path):
    import train_gpt2_spanish

    args = slow.build_parser().parse_args([])
    assert [net.name for net in args.networks] == ["1000", "200", "50", "10", "200%2"] and args.seeds == [1, 2, 3]
    for method in slow.METHODS:
        words = slow.speed_words(args, tmp_path, method)
        parsed = train_gpt2_spanish.build_parser().parse_args(list(map(str, words)))
        assert parsed.sync == (method if method in ("ddp", "fp16", "diloco", "auto") else "auto")
    args = slow.build_parser().parse_args(["--beta2", "0.95", "--precision", "bf16"])
    words = slow.quality_words(args, tmp_path, "diloco", 3, 1464)
    parsed = train_gpt2_spanish.build_parser().parse_args(list(map(str, words)))
    assert (parsed.seed, parsed.sync_every, parsed.eval_interval, parsed.max_steps) == (3, SYNC_EVERY, 97, 1464)
    assert parsed.precision == slow.sizes(args)["precision"] == "bf16"
    assert slow.sizes(args)["gradient_mb"] > 50 and slow.sizes(args)["beta2"] == parsed.beta2 == 0.95
    few = ["--quality", "--tokens", "3000000", "--batch-size", "8"]
    for words, outer in (([], (0.7, 0.9)), (["--quality"], (0.7, 0.9)), (few, (0.9, 0.5)),
                         ([*few, "--sync-lr", "1"], (1.0, 0.5))):
        about = slow.sizes(slow.build_parser().parse_args(words))
        assert (about["sync_lr"], about["sync_momentum"]) == outer
