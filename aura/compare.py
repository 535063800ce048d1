"""The table of runs: speed-up and efficiency against one process, and what a model says of sizes that nobody ran.

    python -m aura.compare results/
    python -m aura.compare results/ --markdown tabla.md --csv tabla.csv --png tabla.png --predict 4,8,16

Speed-up is a ratio of samples/s, so that runs of different lengths compare. The model, for n processes:

    step(n)     = compute + exchange(n) - min(hidden * exchange(n), compute)
    exchange(n) = bytes(n) / bandwidth
    bytes(n)    = 2 (n-1)/n G for ddp: ring all-reduce of the gradients G (Patarasuk and Yuan 2009, JPDC 69(2));
                  3 (n-1)/n P for fsdp: two gathers of the weights P (for each micro-batch), a scatter of the
                  gradients (Rajbhandari et al. 2020, ZeRO, SC20)

compute: a step without exchange, in which the processes of a machine still hinder each other; bandwidth: from the
exchange measured alone; hidden: the share of the exchange behind computation, fitted by least squares within 0..1.
"""

import csv
import io
import math
import os
import statistics
from dataclasses import dataclass
from pathlib import Path

from aura import cli, report, results
from aura.errors import EXIT_OK, UserError
from aura.files import atomic_write, explain, require_writable_file

SETTING = ("model", "parameters", "weights_crc32", "dataset", "dataset_sha256", "max_len", "padding", "strategy")
SPREAD = ("minutes", "samples_per_s", "speedup", "f1")  # medians; the extremes are columns with _min and _max
# kind: MEASURED or MODELLED. efficiency, communication: shares. peak_memory_gb: of the rank that needs most.
COLUMNS = (*SETTING, "nodes", "processes", "kind", "runs",
           *(name + end for name in SPREAD for end in ("", "_min", "_max")),
           "efficiency", "communication", "peak_memory_gb")
HEADER = ("estrategia", "nodos", "GPU o procesos", "ejecuciones", "minutos", "muestras/s", "aceleración", "eficiencia",
          "comunicación", "GB por rango", "F1")
MEASURED, MODELLED = "medido", "modelo"
PAUSED = 1.5  # times the median step that its steps took on average, from which a run is told to have waited
FEW_STEPS = 10  # of which the first may take a good part
# Runs that differ in one of these are in different tables.
GROUPED = (
    # Two models may have a name in common: best is the name of every folder of a best model.
    ("el modelo", lambda run: f"{run.model}, {run.parameters} parámetros"
     + (f", crc32 {run.weights_crc32}" if run.weights_crc32 else "")),
    ("el conjunto de datos", lambda run: f"{run.dataset}, sha256 {run.dataset_sha256[:12]}"),
    ("la longitud máxima", lambda run: f"max_len {run.max_len}"),
    ("el relleno", lambda run: f"padding {run.padding}"))
# Runs of one table that differ in one of these, and what follows; a run without a value has no say.
NOT_ONLY_SIZE = "la aceleración no se debe solo al número de procesos"
OTHER_TRAINING = "el entrenamiento es otro, y también su F1"
WARNED = (
    ("la precisión", lambda run: run.precision, NOT_ONLY_SIZE),
    ("el lote por proceso", lambda run: f"{run.batch_size}x{run.grad_accum}", NOT_ONLY_SIZE),
    ("el lote global", lambda run: run.global_batch, f"con otro lote global {OTHER_TRAINING}"),
    ("la versión de torch", lambda run: run.versions.get("torch"), NOT_ONLY_SIZE),
    ("el dispositivo", lambda run: ", ".join(sorted(set(run.devices))), NOT_ONLY_SIZE),
    ("el número de hilos por proceso", lambda run: run.threads, NOT_ONLY_SIZE),
    ("la duración", lambda run: f"{run.train_examples} ejemplos x {run.epochs:.4g} época{'s' * (run.epochs != 1)}"
     if run.whole else None, "los minutos y el F1 no se comparan; la aceleración, sí"))


def build_parser():
    """The arguments of this command."""
    parser = cli.Parser(prog="python -m aura.compare",
                        description="Compara ejecuciones: aceleración, eficiencia, comunicación, memoria y F1.")
    parser.add_argument_group("argumentos").add_argument("results", metavar="CARPETA",
                                                         help="donde cada ejecución dejó su resultado")
    parser.add_argument("--markdown", type=cli.path, metavar="FICHERO", help="guarda también las tablas en Markdown")
    parser.add_argument("--csv", type=cli.path, metavar="FICHERO", help="guarda también las cifras sin redondear")
    parser.add_argument("--png", type=cli.path, metavar="FICHERO", help="guarda también la gráfica de la aceleración")
    parser.add_argument("--predict", metavar="N,N,...",
                        help="procesos que predice el modelo (si no se indica, el doble y el cuádruple de los que "
                             "más se midieron)")
    return parser


def main():
    """Read the results, print the tables, write the files; returns the exit code."""
    args = build_parser().parse_args()
    if not args.results.strip():
        raise UserError(f"CARPETA {args.results!r}: no es el nombre de una carpeta")
    wanted = None if args.predict is None else _sizes(args.predict)
    places, folder = [], Path(os.path.realpath(args.results))
    for flag, path in (("--markdown", args.markdown), ("--csv", args.csv), ("--png", args.png)):
        if path:
            places.append(require_writable_file(path, flag).resolve())
    if len({*places}) < len(places):
        raise UserError("--markdown, --csv y --png: dos de ellos son el mismo fichero, y quedaría solo el último; "
                        "indique ficheros distintos")
    if taken := [path for path in places if path.parent == folder and path.suffix == ".json"]:
        raise UserError(f"{str(taken[0])!r}: los .json de {args.results!r} son los resultados de las ejecuciones; "
                        "indique otro nombre u otra carpeta")
    found, notes = results.read(args.results)
    for note in notes:
        print(f"Aviso: {note}.")
    tables = [tabulate(runs, wanted) for runs in _apart(found, lambda run: [value(run) for _, value in GROUPED])]
    text = "\n".join([*_opening(found), *(line for table in tables for line in _lines(table))]) + "\n"
    print(text, end="")
    for flag, path, write in (("--markdown", args.markdown, lambda file: file.write(text.encode())),
                              ("--csv", args.csv, lambda file: file.write(_csv(tables).encode())),
                              ("--png", args.png, lambda file: draw(tables, file))):
        if path:
            _deliver(flag, path, write)
    return EXIT_OK


def _sizes(text):
    """The numbers of processes in '4,8,16'."""
    try:
        found = sorted({int(word) for word in text.split(",")})
    except ValueError:
        found = [0]
    if found[0] < 2 or found[-1] > 1_000_000:
        raise UserError(f"--predict {text!r}: se esperan números de procesos desde 2, separados por comas (por "
                        "ejemplo, --predict 4,8,16)")
    return found


def _deliver(flag, path, write):
    try:
        with atomic_write(path) as file:
            write(file)
    except OSError as problem:
        raise UserError(f"{flag} {path!r}: no se puede escribir ({explain(problem)}); indique otro") from problem


def _apart(runs, key):
    """Lists of the runs with the same key, by key."""
    found = {}
    for run in runs:
        found.setdefault(tuple(key(run)), []).append(run)
    return [found[key] for key in sorted(found)]


def _size(run):
    """What the runs of one row have in common; rows are sorted by it."""
    return results.STRATEGIES.index(run.strategy), run.processes, run.nodes


def _label(run):
    return f"{run.strategy} {run.layout}"


def _median(values):
    """The median of those that were measured; None where none was."""
    values = [value for value in values if value is not None]
    return statistics.median(values) if values else None


@dataclass(frozen=True)
class Table:
    """Runs that can stand side by side. rows: dicts by COLUMNS; base: the runs that speed-up counts from; models:
    {strategy: Model, or None where too little was measured}, those of results.EXCHANGING."""

    runs: list
    base: list
    rows: list
    models: dict


def tabulate(runs, wanted=None):
    """The Table of `runs`, which are alike in all that is GROUPED.

    wanted: numbers of processes to model, by default twice and four times the largest; measured ones are left out.
    """
    runs = sorted(runs, key=_size)
    sizes = _apart(runs, _size)
    base = min(sizes, key=lambda size: (size[0].processes, _size(size[0])))
    rows, models = [_measured(size, base) for size in sizes], {}
    largest = max(run.processes for run in runs)
    for strategy in results.EXCHANGING:
        own = [run for run in runs if run.strategy == strategy]
        if own:
            model = models[strategy] = fit(points(own, runs))
            known = {run.processes for run in own}
            untested = [size for size in wanted or (2 * largest, 4 * largest) if size not in known]
            rows += [_modelled(own[0], model, size, base) for size in untested if model]
    return Table(runs, base, rows, models)


def _measured(runs, base):
    """The row of the runs of one size."""
    whole = [run for run in runs if run.whole]
    shares = [run.communication_s / run.seconds for run in runs if run.communication_s is not None]
    return _row(runs[0], base, kind=MEASURED, runs=len(runs), nodes=runs[0].nodes, processes=runs[0].processes,
                minutes=[run.seconds / 60 for run in whole], rates=[run.samples_per_s for run in runs],
                f1=[run.f1 for run in whole if run.f1 is not None], communication=_median(shares),
                peak_memory_gb=_median(max(run.peak_memory_gb) for run in runs))


def _modelled(run, model, processes, base):
    """The row of a size that nobody ran, trained on as many samples as the largest that was measured."""
    last, rate = model.points[-1], model.rate(processes)
    return _row(run, base, kind=MODELLED, nodes=model.nodes(processes), processes=processes, rates=[rate], f1=[],
                minutes=[] if last.minutes is None else [last.minutes * last.rate / rate],
                communication=1 - last.compute / model.step(processes))


def _row(run, base, *, minutes, rates, f1, **values):
    """A dict by COLUMNS; minutes, rates, f1: those of all runs of the row."""
    unit = statistics.median(one.samples_per_s for one in base)
    row = dict.fromkeys(COLUMNS) | {name: getattr(run, name) for name in SETTING} | values
    for name, figures in zip(SPREAD, (minutes, rates, [rate / unit for rate in rates], f1), strict=True):
        if figures:
            row |= {name: statistics.median(figures), f"{name}_min": min(figures), f"{name}_max": max(figures)}
    row["efficiency"] = row["speedup"] * base[0].processes / row["processes"]
    return row


@dataclass(frozen=True)
class Point:
    """Medians of the runs of one size: seconds of a step, of the step without exchange (compute) and of the exchange
    alone; bytes on the wire per process; samples/s; minutes of the runs that are whole, or None."""

    run: results.Result
    step: float
    compute: float
    exchange: float
    bytes: float
    rate: float
    minutes: float | None


def points(own, runs):
    """The Points of one strategy by size. own: its runs among `runs`; those count that measured the exchange, with the
    batch per process and precision of the largest. compute is one process's step where it was not measured."""
    own = [run for run in own if run.processes > 1 and run.exchange_s and run.exchange_bytes]
    if not own:
        return []
    work = _work(max(own, key=_size))
    alone = _median(run.step_s for run in runs if run.processes == 1 and _work(run) == work)
    found = []
    for size in _apart([run for run in own if _work(run) == work], _size):
        compute = _median(run.alone_step_s for run in size) or alone
        if compute:
            found.append(Point(size[0], _median(run.step_s for run in size), compute,
                               _median(run.exchange_s for run in size),
                               _median(wire(run, run.processes) for run in size),
                               _median(run.samples_per_s for run in size),
                               _median(run.seconds / 60 for run in size if run.whole)))
    return found


def _work(run):
    return run.batch_size, run.grad_accum, run.precision


def wire(run, processes):
    """Bytes that each of `processes` processes sends in a step of `run`: an all-reduce goes twice around the ring, to
    sum and to hand out; what fsdp gathers or scatters goes once."""
    passes = 2 if run.strategy == "ddp" else 1
    return passes * (processes - 1) / processes * run.exchange_bytes


@dataclass(frozen=True)
class Model:
    """The model of the module's docstring. bandwidth: bytes/s by whether several machines take part; hidden: share."""

    points: list
    bandwidth: dict
    hidden: float

    def step(self, processes, point=None):
        """Seconds of a step of that many processes; compute is that of `point`, of the largest measured by default."""
        point = point or self.points[-1]
        exchange = wire(point.run, processes) / self.speed(self.nodes(processes, point) > 1)
        return point.compute + exchange - min(self.hidden * exchange, point.compute)

    def rate(self, processes):
        """Samples/s of `processes` processes with the same batch each."""
        last = self.points[-1]
        modelled = self.step(last.run.processes)  # not the measured step, which no hidden share in 0..1 may give
        return last.rate * modelled / self.step(processes) * processes / last.run.processes

    def nodes(self, processes, point=None):
        """Machines that `processes` processes need: one if one was measured, else with as many on each as measured."""
        run = (point or self.points[-1]).run
        return 1 if run.nodes == 1 else math.ceil(processes * run.nodes / run.processes)

    def speed(self, several):
        """Bytes/s among several machines or within one; where only one of the two was measured, that one."""
        return self.bandwidth.get(several) or self.bandwidth[not several]


def fit(found):
    """The Model of the Points `found`, or None where there is none."""
    if not found:
        return None
    bandwidth = {several: _median(one.bytes / one.exchange for one in found if (one.run.nodes > 1) == several)
                 for several in (False, True)}
    model = Model(found, bandwidth, 0.0)
    exchange = [one.bytes / model.speed(one.run.nodes > 1) for one in found]
    shown = sum((one.step - one.compute) * seconds for one, seconds in zip(found, exchange, strict=True))
    hidden = 1 - shown / sum(seconds * seconds for seconds in exchange)
    return Model(found, bandwidth, min(1.0, max(0.0, hidden)))


def errors(model):
    """(point, step of the model, its error, the error of a model that was fitted without this point or None) of each
    measured size; an error is predicted/measured - 1."""
    found = []
    for point in model.points:
        others = fit([one for one in model.points if one is not point])
        step, unseen = (one and one.step(point.run.processes, point) for one in (model, others))
        found.append((point, step, step / point.step - 1, unseen and unseen / point.step - 1))
    return found


def _opening(runs):
    lines = ["# Comparación de ejecuciones", ""]
    lines += [f"- Aviso: {what} no es igual en todas: una tabla para cada uno."
              for what, value in GROUPED if len({value(run) for run in runs}) > 1]
    return lines


def _lines(table):
    """The Markdown of one table: title, rows, how to read them, warnings, model."""
    base, devices = table.base[0], sorted({device for run in table.runs for device in run.devices})
    per = "los procesos" if base.processes == 1 else f"los procesos, de {base.processes} en {base.processes}"
    return ["", "## " + "; ".join(value(base) for _, value in GROUPED), "",
            *_grid([HEADER, *(_cells(row) for row in table.rows)]), "",
            "- Medianas de las ejecuciones (mínimo-máximo); GB del rango que más usa; «ddp 2x1»: 2 nodos con 1 proceso "
            f"cada uno; «ddp 3p-2n»: 3 procesos en 2 nodos desiguales. Dispositivos: {', '.join(devices)}.",
            f"- Aceleración: muestras/s entre las de {_label(base)}, para que se comparen ejecuciones de distinta "
            f"duración. Eficiencia: aceleración dividida por {per}.",
            *(f"- Aviso: {warning}." for warning in warnings(table.runs, base)),
            *_model_lines(table.models)]


def _cells(row):
    """The texts of one row of the Markdown table."""
    def spread(name):
        low, middle, high = (row[name + end] for end in ("_min", "", "_max"))
        if middle is None:
            return "-"
        return f"{middle:.2f}" + (f" ({low:.2f}-{high:.2f})" if low < high else "")

    memory = row["peak_memory_gb"]
    return (row["strategy"], str(row["nodes"]), str(row["processes"]),
            MODELLED if row["kind"] == MODELLED else str(row["runs"]), spread("minutes"), spread("samples_per_s"),
            spread("speedup"), _percent(row["efficiency"]), _percent(row["communication"]),
            "-" if memory is None else f"{memory:.2f}", spread("f1"))


def _percent(share):
    return "-" if share is None else f"{100 * share:.1f} %"


def _grid(rows):
    """Lines of a Markdown table, aligned for the console; the first row is the header, the first column a text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) + " |" for row in rows]
    return [lines[0], "|" + "-" * (widths[0] + 2) + "|" + "".join("-" * (width + 1) + ":|" for width in widths[1:]),
            *lines[1:]]


def _apart_in(field, runs):
    """A function like those of WARNED, whose value is what a run does not share with all of `runs` of a dict, its
    `field`."""
    values = {}
    for run in runs:
        for name, value in getattr(run, field).items():
            values.setdefault(name, set()).add(value)
    differing = [name for name in values if len(values[name]) > 1]
    return lambda run: ", ".join(
        f"{name} {getattr(run, field)[name]}" for name in differing if name in getattr(run, field)) or None


def warnings(runs, base):
    """What to know before one compares `runs`, a Spanish phrase each."""
    found = []
    if base.processes > 1:
        found.append(f"falta la ejecución de un proceso; la aceleración es frente a {_label(base)}")
    for what, value, so in (*WARNED, ("la receta", _apart_in("recipe", runs), f"con otra receta {OTHER_TRAINING}"),
                            ("la manera de calcular", _apart_in("computing", runs), NOT_ONLY_SIZE)):
        values = {}
        for run in runs:
            if value(run) is not None:
                values.setdefault(str(value(run)), {})[_label(run)] = None
        if len(values) > 1:
            listed = "; ".join(f"{one}: {', '.join(labels)}" for one, labels in values.items())
            found.append(f"{what} no es igual en todas ({listed}); {so}")
    for which, what, so in (
            (lambda run: run.resumed, "reanudadas", "los minutos y el F1 son solo de las enteras"),
            (lambda run: run.exit != results.COMPLETE, "interrumpidas", "los minutos y el F1 son solo de las enteras"),
            (lambda run: run.steps >= FEW_STEPS and run.seconds > PAUSED * run.steps * run.step_s,
             "que duran mucho más que sus pasos por la mediana de uno",
             "quizá estuvieron paradas, o dejaron sitio a otro programa, y sus minutos y muestras/s lo cuentan"),
            (lambda run: len(set(run.hosts)) < run.nodes, "con varios nodos en una misma máquina",
             "no miden la red")):
        labels = dict.fromkeys(_label(run) for run in runs if which(run))
        if labels:
            found.append(f"ejecuciones {what} ({', '.join(labels)}); {so}")
    return found


ASSUMED = (
    f"Las filas «{MODELLED}» no se han medido. Un paso dura el cálculo más la parte del intercambio que no se oculta "
    "tras él. Bytes por proceso: con DDP, 2 (n-1)/n G, el all-reduce en anillo de los gradientes G (Patarasuk y Yuan, "
    "2009); con FSDP, 3 (n-1)/n P, dos recogidas de los pesos P (por microlote) y un reparto de los gradientes (ZeRO: "
    "Rajbhandari et al., 2020). Supone la misma red, sin latencia; el mismo lote por proceso; y tantos procesos por "
    "nodo como se midieron (si solo se midió un nodo, todos en él, cada uno con sus núcleos o su GPU).")


def _model_lines(models):
    """What the model assumes, its figures for each strategy, and how wrong it is where there are measurements."""
    if not models:
        return ["", "Sin modelo: no hay ejecuciones de varios procesos con ddp o fsdp."]
    lines = ["", ASSUMED, ""] if any(models.values()) else [""]
    for strategy, model in models.items():
        if model is None:
            lines.append(f"- Sin modelo de {strategy}: falta una ejecución de varios procesos que mida el intercambio, "
                         "y el paso sin él (o el de un proceso con el mismo lote y precisión).")
            continue
        last = model.points[-1]
        speeds = [f"{model.bandwidth[several] / 1e9:.3g} GB/s {where}"
                  for several, where in ((False, "dentro de una máquina"), (True, "entre máquinas"))
                  if model.bandwidth[several]]
        lines.append(f"- Modelo de {strategy}: {last.compute:.4g} s de cálculo por paso; "
                     f"{last.run.exchange_bytes / 1e6:.4g} MB de intercambio, a {' y '.join(speeds)}; oculto, "
                     f"{_percent(model.hidden)}.")
        for point, step, error, unseen in errors(model):
            alone = "; es la única medida: el modelo sale de sus tiempos tomados aparte"
            tail = alone if unseen is None else f" ({100 * unseen:+.1f} % si se ajusta sin esta medida)"
            lines.append(f"  - {_label(point.run)}: modelo {step:.4g} s por paso, medido {point.step:.4g} s, error "
                         f"{100 * error:+.1f} %{tail}.")
    return lines


def _csv(tables):
    """The rows of all tables; what was not measured is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(row for table in tables for row in table.rows)
    return text.getvalue()


def draw(tables, file):
    """Draw the speed-up of each table by processes into the open PNG `file`: ideal, measured, modelled."""
    figure, grid = report.new_figure(len(tables), figsize=(8, 5 * len(tables)), squeeze=False, layout="constrained")
    for table, axes in zip(tables, grid[:, 0], strict=True):
        base, largest = table.base[0], max(row["processes"] for row in table.rows)
        axes.plot([0, largest], [0, largest / base.processes], ":", color="gray", label="ideal")
        for number, strategy in enumerate(results.STRATEGIES):
            rows = [row for row in table.rows if (row["strategy"], row["kind"]) == (strategy, MEASURED)]
            if rows:
                heights = [row["speedup"] for row in rows]
                around = [[row["speedup"] - row["speedup_min"] for row in rows],
                          [row["speedup_max"] - row["speedup"] for row in rows]]
                axes.errorbar([row["processes"] for row in rows], heights, around, fmt="o", capsize=3,
                              color=f"C{number}", label=f"{strategy}, medido")
            if model := table.models.get(strategy):
                sizes = sorted({round(largest ** (step / 60)) for step in range(61)})
                unit = statistics.median(run.samples_per_s for run in table.base)
                axes.plot(sizes, [model.rate(size) / unit for size in sizes], "--", color=f"C{number}",
                          label=f"{strategy}, {MODELLED}")
        axes.set(xlabel="GPU o procesos", ylabel=f"aceleración frente a {_label(base)}",
                 title="\n".join(value(base).replace("$", r"\$") for _, value in GROUPED[:2]))
        axes.locator_params(axis="x", integer=True)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file, format="png", dpi=100)


if __name__ == "__main__":
    cli.run(main)
