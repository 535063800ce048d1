"""Results of runs: files that are read back or named, tables whose figures one can work out by hand, the model."""

import csv
import dataclasses
import json
import re

import pytest

from aura import compare, results
from aura.errors import UserError
from tests.support import Process

SHA = "ab" * 32


def run(strategy="none", nodes=1, processes=1, **changes):
    """A Result: a step of 1 s without exchange on every process, 0.5 s of exchange of which half is hidden behind it.

    The wire carries 2 (n-1)/n 1 GB for ddp and 1.5 (n-1)/n 2 GB = 3 (n-1)/n 1 GB for fsdp, at 2 or 3 GB/s.
    """
    step = 1.25 if processes > 1 else 1.0
    values = {
        "strategy": strategy, "nodes": nodes, "processes": processes, "devices": ["cpu"] * processes,
        "hosts": [f"n{rank * nodes // processes}" for rank in range(processes)], "threads": 1, "model": "bert",
        "parameters": 100, "dataset": "squad", "dataset_sha256": SHA, "train_examples": 1000, "max_len": 384,
        "batch_size": 4, "grad_accum": 1, "global_batch": 4 * processes, "precision": "fp32", "padding": "dynamic",
        "seed": 1, "epochs": 2.0, "steps": 120, "resumed": False, "seconds": 120 * step,
        "samples_per_s": 4 * processes / step, "step_s": step, "alone_step_s": 1.0 if processes > 1 else None,
        "communication_s": 120 * 0.25 if processes > 1 else None,
        "exchange_bytes": 0 if processes == 1 else 10**9 if strategy == "ddp" else 3 * 10**9,
        "exchange_s": 0.5 if processes > 1 else None, "peak_memory_gb": [2.0 + rank for rank in range(processes)],
        "val_loss": 1.5, "exact_match": 70.0, "f1": 80.0, "exit": results.COMPLETE,
        "versions": {"aura": "1", "torch": "2.13.0", "python": "3.11", "cuda": None}}
    return results.Result(**{**values, **changes})


def rows(table, kind):
    return {(row["strategy"], row["nodes"], row["processes"]): row for row in table.rows if row["kind"] == kind}


def warned(*runs):
    """The warnings of the console about runs of one table."""
    table = compare.tabulate(list(runs))
    return "\n".join(compare.warnings(table.runs, table.base[0]))


def grouped(*runs):
    """The runs of each table."""
    return compare._apart(runs, lambda one: [value(one) for _, value in compare.GROUPED])


def test_what_is_saved_is_read_back_in_the_order_of_time(tmp_path):
    late = run(finished="2026-11-21T19:50:12+00:00", val_loss=float("nan"))
    early = run("ddp", 2, 4, finished="2026-11-21T09:50:12+00:00")
    uneven = [run("ddp", 2, len(hosts), hosts=list(hosts)) for hosts in ("abb", "abbb", "aaaa", "aaa")]
    assert [one.layout for one in uneven] == ["3p-2n", "4p-2n", "2x2", "3p-2n"]
    paths = [results.save(tmp_path / "new" / "results", one) for one in (late, early, early)]
    assert len({path.name for path in paths}) == 3
    assert paths[0].name.startswith("20261121-195012-none-1x1-") and "ddp-2x2" in paths[1].name
    assert sorted(paths)[-1] == paths[0]
    assert results.read(paths[0].parent) == ([early, early, dataclasses.replace(late, val_loss=None)], [])


def test_other_files_are_named_and_skipped(tmp_path):
    kept = results.save(tmp_path, run())
    values = json.loads(kept.read_text())
    wrong = {"steps": "many", "resumed": 1, "samples_per_s": 0, "seconds": float("nan"), "devices": [], "f1": -1,
             "padding": "none", "versions": {"torch": 2}, "model": "a\nb", "finished": "yesterday", "nodes": 2,
             "weights_crc32": 1, "recipe": {"lr": "1e-3"}, "computing": {"--compile": True}, "precision": None,
             "parameters": True, "peak_memory_gb": [None], "step_s": 1e-40}
    for name, value in wrong.items():
        (tmp_path / f"wrong-{name}.json").write_text(json.dumps(values | {name: value}))
    (tmp_path / "two.json").write_text(json.dumps(dataclasses.asdict(run("ddp", 2, 2)) | {"strategy": "none"}))
    (tmp_path / "missing.json").write_text(json.dumps({name: values[name] for name in values if name != "f1"}))
    (tmp_path / "cut.json").write_bytes(kept.read_bytes()[:100])
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    for name, text in (("list.json", "[1]"), ("other.json", '{"a": 1}'), ("tabla.md", "# Tabla"), (".keep", "")):
        (tmp_path / name).write_text(text)
    found, notes = results.read(tmp_path)
    assert found == [run(finished=values["finished"])]
    told = dict(note.split(": ", 1) for note in notes)
    assert sorted(told) == sorted(path.name for path in tmp_path.iterdir() if path not in (kept, tmp_path / ".keep"))
    assert not any("\n" in note for note in notes)
    assert "no tiene f1;" in told["missing.json"] and "steps no puede ser 'many'" in told["wrong-steps.json"]
    assert "no hay none de 2 procesos en 2 nodos" in told["two.json"]
    assert "no es JSON" in told["cut.json"] and "no es JSON" in told["deep.json"]
    assert "no es un resultado" in told["tabla.md"] and "no es un resultado" in told["other.json"]
    assert all(name in told[f"wrong-{name}.json"] for name in wrong if name != "nodes")


def test_what_was_written_before_is_read_and_compared_with_its_own(tmp_path):
    for number, one in enumerate((run(), run(), run(weights_crc32="0a1b2c3d", recipe={"lr": 3e-5}))):
        values = dataclasses.asdict(one)
        if not one.recipe:
            del values["weights_crc32"], values["recipe"], values["computing"]
        (tmp_path / f"{number}.json").write_text(json.dumps(values))
    found, notes = results.read(tmp_path)
    assert not notes and [len(runs) for runs in grouped(*found)] == [2, 1]
    assert warned(*found) == "", "a recipe that is not known is no other one"


def test_models_of_one_name_are_not_repeats_of_each_other():
    runs = [run(model="best", weights_crc32=crc32, seed=seed) for seed in (1, 2) for crc32 in ("0a1b2c3d", "4e5f6a7b")]
    assert [len(each) for each in grouped(*runs)] == [2, 2]
    assert "## best, 100 parámetros, crc32 0a1b2c3d; " in "\n".join(compare._lines(compare.tabulate(runs[::2])))
    assert compare.tabulate(runs[::2]).rows[0]["weights_crc32"] == "0a1b2c3d"
    random = [run(model="random:tiny", seed=seed) for seed in (1, 2)]
    assert grouped(*random) == [random]


def test_folders_without_results_say_the_way_out(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "bad.json").write_text("{")
    (tmp_path / "empty").mkdir()
    for name, reason in (("file", "file' no es una carpeta"), ("missing", r"missing' \(no existe\)"),
                         ("empty", "no hay ningún resultado en '.*empty'"), ("only", r"only' \(bad.json: no es JSON")):
        with pytest.raises(UserError, match=rf"{reason}.*(entrene|indique)"):
            results.read(tmp_path / name)


def test_the_figures_of_the_table():
    slow, fast = run(samples_per_s=2.0), run(samples_per_s=5.0)
    ddp = run("ddp", 2, 2)
    cut = run("ddp", 2, 2, samples_per_s=6.0, exit=results.SIGNALLED, f1=1.0, seconds=15.0, communication_s=0.0)
    measured = rows(compare.tabulate([ddp, fast, run(), cut, slow]), compare.MEASURED)
    one, two = measured["none", 1, 1], measured["ddp", 2, 2]
    assert [one[name] for name in ("runs", "minutes", "samples_per_s", "samples_per_s_min", "samples_per_s_max",
                                   "speedup_max", "communication", "f1")] == [3, 2.0, 4.0, 2.0, 5.0, 1.25, None, 80.0]
    assert two["samples_per_s"] == pytest.approx(6.2) and two["speedup"] == pytest.approx(1.55)
    assert two["speedup_min"] == 1.5 and two["speedup_max"] == 1.6 and two["efficiency"] == pytest.approx(0.775)
    assert two["communication"] == pytest.approx((0.25 / 1.25 + 0) / 2) and two["peak_memory_gb"] == 3.0
    assert two["minutes"] == two["minutes_max"] == 2.5 and two["f1_min"] == 80.0  # of the run that is whole


def test_without_one_process_the_smallest_counts_and_it_is_said():
    table = compare.tabulate([run("ddp", 2, 4), run("ddp", 1, 2)])
    four = rows(table, compare.MEASURED)["ddp", 2, 4]
    assert four["speedup"] == 2.0 and four["efficiency"] == 1.0
    assert "falta la ejecución de un proceso; la aceleración es frente a ddp 1x2" in warned(*table.runs)


@pytest.mark.parametrize("changes, text", [
    ({"precision": "bf16"}, r"la precisión .*fp32: none 1x1; bf16: ddp 2x1"),
    ({"global_batch": 64}, r"el lote global .*4: none 1x1; 64: ddp 2x1.*el entrenamiento es otro"),
    ({"batch_size": 8}, r"el lote por proceso .*8x1"),
    ({"versions": {"torch": "2.10"}}, r"la versión de torch .*2\.10: ddp"),
    ({"devices": ["cpu", "NVIDIA H200"]}, r"el dispositivo .*NVIDIA H200, cpu: ddp"),
    ({"threads": 2}, "el número de hilos"),
    ({"epochs": 1.0}, "la duración .*1000 ejemplos x 1 época: ddp.*la aceleración, sí"),
    ({"resumed": True, "epochs": 0.5}, r"reanudadas \(ddp 2x1\)"),
    ({"exit": results.SIGNALLED, "epochs": 0.5}, r"interrumpidas \(ddp 2x1\)"),
    ({"seconds": 120 * 1.25 * 1.6}, r"que duran mucho más .* \(ddp 2x1\); quizá estuvieron paradas"),
    ({"hosts": ["a", "a"]}, r"varios nodos en una misma máquina \(ddp 2x1\)"),
])
def test_runs_that_do_not_compare_are_told(changes, text):
    alike = {"global_batch": 4}
    assert warned(run(), run("ddp", 2, 2, **alike)) == ""
    (line,) = warned(run(), run("ddp", 2, 2, **{**alike, **changes})).splitlines()
    assert re.search(text, line)


def test_repeats_of_another_recipe_are_told_by_what_differs():
    ours = {"lr": 3e-5, "ema": 0.0, "dropout": 0.1}
    first, again = run(recipe=ours), run(recipe={**ours, "dropout": 0, "lr": 5e-5})
    (line,) = warned(first, first, again).splitlines()
    assert line == ("la receta no es igual en todas (lr 3e-05, dropout 0.1: none 1x1; lr 5e-05, dropout 0: none 1x1); "
                    "con otra receta el entrenamiento es otro, y también su F1")
    assert len(rows(compare.tabulate([first, again]), compare.MEASURED)) == 1, "it is only told"
    diloco = {"global_batch": 4, "recipe": {**ours, "sync_every": 56}}
    assert warned(first, run("diloco", 2, 2, **diloco)) == "", "what others do not have is no difference"


def test_repeats_that_were_computed_otherwise_are_told():
    first, again = (run(computing={"--compile": compiled, "--attention": "auto"}) for compiled in ("no", "sí"))
    assert warned(first, again, run()) == (
        "la manera de calcular no es igual en todas (--compile no: none 1x1; --compile sí: none 1x1); la aceleración "
        "no se debe solo al número de procesos")


def test_the_model_predicts_what_it_says():
    table = compare.tabulate([run(), run("ddp", 2, 2), run("fsdp", 2, 4, exchange_s=0.75)], [2, 4, 8])
    ddp, fsdp = table.models["ddp"], table.models["fsdp"]
    assert ddp.bandwidth == {True: 2e9, False: None} and fsdp.bandwidth[True] == 3e9
    assert ddp.hidden == 0.5 and fsdp.hidden == pytest.approx(2 / 3)
    modelled = rows(table, compare.MODELLED)
    assert sorted(modelled) == [("ddp", 4, 4), ("ddp", 8, 8), ("fsdp", 1, 2), ("fsdp", 4, 8)]
    # ddp, 8 processes: 2 * 7/8 GB at 2 GB/s are 0.875 s, half of them hidden.
    eight = modelled["ddp", 8, 8]
    assert ddp.step(8) == 1.4375 and eight["samples_per_s"] == pytest.approx(8 * 4 / 1.4375)
    assert eight["speedup"] == pytest.approx(8 / 1.4375) and eight["efficiency"] == pytest.approx(1 / 1.4375)
    assert eight["minutes"] == pytest.approx(2.5 * 2 / 8 * 1.4375 / 1.25)  # four times less work for each process
    assert eight["communication"] == pytest.approx(0.4375 / 1.4375) and eight["f1"] is None
    # fsdp: 3 * 7/8 GB at 3 GB/s, two thirds of them hidden.
    assert fsdp.step(8) == pytest.approx(1 + 0.875 / 3)


def test_no_more_is_hidden_than_there_is_computation():
    (slow,) = compare.points([run("ddp", 2, 2, step_s=10.0, exchange_s=10.0)], [])
    model = compare.fit([slow])
    assert model.hidden == pytest.approx(0.1)
    assert compare.Model([slow], {True: 1e8, False: None}, 0.5).step(4) == 15.0  # 1 + 15 - min(7.5, 1)
    late, early = (compare.fit(compare.points([run("ddp", 2, 2, step_s=step)], [])) for step in (3.0, 0.9))
    assert (late.hidden, early.hidden) == (0.0, 1.0)
    for each in (late, early):  # a step that the model does not explain is still the measured one
        assert each.rate(2) == pytest.approx(each.points[-1].rate) and each.rate(4) <= 2 * each.rate(2)


def test_the_error_on_measured_sizes_with_and_without_them():
    runs = [run("ddp", 2, 2), run("ddp", 2, 4, exchange_s=0.75, step_s=1.75), run("ddp", 1, 2, exchange_s=0.1)]
    model = compare.fit(compare.points(runs, runs))
    assert model.bandwidth == {True: pytest.approx(2e9), False: pytest.approx(1e10)}
    # Least squares of shown time against exchange: (.25*.1 + .25*.5 + .75*.75) / (.1^2 + .5^2 + .75^2).
    shown = 0.7125 / 0.8225
    assert model.hidden == pytest.approx(1 - shown)
    found = {(point.run.nodes, point.run.processes): rest for point, *rest in compare.errors(model)}
    step, error, unseen = found[2, 4]
    assert step == pytest.approx(1 + 0.75 * shown) and error == pytest.approx(step / 1.75 - 1)
    assert unseen == pytest.approx((1 + 0.75 * (0.15 / 0.26)) / 1.75 - 1)


def test_too_few_measurements_are_said_instead_of_a_guess():
    unmeasured = run("ddp", 2, 2, exchange_s=None)
    without_step = run("fsdp", 2, 2, alone_step_s=None, batch_size=8)
    table = compare.tabulate([run(), unmeasured, without_step])
    text = "\n".join(compare._lines(table))
    assert table.models == {"ddp": None, "fsdp": None} and not rows(table, compare.MODELLED)
    assert "Sin modelo de ddp" in text and "Sin modelo de fsdp" in text
    table = compare.tabulate([run(), run("diloco", 2, 2, exchange_s=None)])  # diloco never measures its exchange
    assert table.models == {} and "Sin modelo: no hay ejecuciones de varios" in "\n".join(compare._lines(table))
    assert "no hay ejecuciones de varios procesos" in "\n".join(compare._lines(compare.tabulate([run()])))
    # One process's step stands in for the step without exchange, where batch and precision are the same.
    model = compare.tabulate([run(step_s=0.9), run("ddp", 2, 2, alone_step_s=None)]).models["ddp"]
    assert model.points[-1].compute == 0.9
    assert "es la única medida: el modelo sale de" in "\n".join(compare._model_lines({"ddp": model}))


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """(exit code, console, folder) of the command on two kinds of runs and a broken file, all files asked for."""
    folder = tmp_path_factory.mktemp("compare")
    for one in (run(), run("ddp", 2, 2), run("fsdp", 2, 2), run(max_len=512, model="$b_{$")):
        results.save(folder / "results", one)
    (folder / "results" / "cut.json").write_text("{")
    words = ["-m", "aura.compare", "results", "--markdown", "new/t.md", "--csv", "t.csv", "--png", "t.png"]
    with Process(words, folder) as process:
        return *process.finish(), folder


def test_the_command_prints_and_keeps_the_tables(command):
    code, console, folder = command
    assert code == 0 and "Aviso: cut.json: no es JSON válido; no se tiene en cuenta." in console
    text = (folder / "new" / "t.md").read_text(encoding="utf-8")
    assert console.endswith(text) and max(map(len, text.splitlines())) < 1000
    assert text.count("\n## ") == 2 and "la longitud máxima no es igual en todas: una tabla para cada uno" in text
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    assert cells[0] == list(compare.HEADER)
    assert ["ddp", "2", "2", "1", "2.50", "6.40", "1.60", "80.0 %", "20.0 %", "3.00", "80.00"] in cells
    assert ["ddp", "8", "8", "modelo", "0.72", "22.26", "5.57", "69.6 %", "30.4 %", "-", "-"] in cells
    assert "Patarasuk" in text and "Rajbhandari" in text and "muestras/s entre las de none 1x1" in text


def test_csv_and_picture_are_what_other_tools_read(command):
    import matplotlib.image

    with open(command[2] / "t.csv", newline="", encoding="utf-8") as file:
        kept = list(csv.DictReader(file))
    assert tuple(kept[0]) == compare.COLUMNS and {row["dataset_sha256"] for row in kept} == {SHA}
    (two,) = (row for row in kept if (row["strategy"], row["processes"]) == ("ddp", "2"))
    assert (two["kind"], float(two["speedup"]), float(two["efficiency"])) == ("medido", 1.6, 0.8)
    assert len([row for row in kept if row["kind"] == "modelo"]) == 4 and kept[0]["communication"] == ""
    picture = matplotlib.image.imread(command[2] / "t.png", format="png")
    assert picture.shape == (1000, 800, 4) and picture.min() < 0.9


def test_bad_arguments_say_what_and_how(command, monkeypatch, capsys):
    folder = command[2]
    (folder / "taken.png").mkdir(exist_ok=True)
    monkeypatch.setattr("sys.argv", ["compare", " "])
    with pytest.raises(UserError, match="CARPETA ' '"):
        compare.main()
    for words, text in ((["--predict", "4,x"], "--predict '4,x'"), (["--predict", "1"], "desde 2"),
                        (["--png", str(folder / "taken.png")], "--png .* es una carpeta"),
                        (["--csv", "/dev/null"], "--csv '/dev/null': no es un fichero"),
                        (["--csv", str(folder / "t.csv"), "--markdown", str(folder / "." / "t.csv")], "el mismo"),
                        (["--csv", str(folder / "results" / "a.json")], "son los resultados de las ejecuciones"),
                        (["--csv", "/proc/no/t.csv"], "--csv"), (["--marcdown", "a"], "¿quiso decir --markdown")):
        monkeypatch.setattr("sys.argv", ["compare", str(folder / "results"), *words])
        with pytest.raises(UserError, match=text):
            compare.main()
    monkeypatch.setattr("sys.argv", ["compare", str(folder / "results"), "--predict", "6,2"])
    assert compare.main() == 0
    assert "| ddp        |     6 |              6 |      modelo |" in capsys.readouterr().out
