"""Processor, memory, disk, network and GPUs of this machine, the ranks of a run, and what is wrong with them.

    python monitor.py --interval 5
    python monitor.py --run logs                              # and the run that trains here with --log-dir logs
    python monitor.py --cluster                               # on rank 0's machine: all ranks of all machines
    python monitor.py --run logs --check                      # 8 samples; exit code 3 if anything is wrong
    python monitor.py --once --json
    python monitor.py --cluster --json > noche.jsonl          # record a night...
    python monitor.py --cluster --replay noche.jsonl | less   # ...and look at it in the morning
    python monitor.py --interval 60 --csv uso.csv --gpus 0,1

Exit code 0 at the end and, where no number of samples was asked for, after Ctrl+C (else 130); 2 for bad values; 3 when
--check found something; 141, as any program's in a shell, when nobody reads its output any more.
"""

import collections
import dataclasses
import functools
import json
import math
import os
import re
import signal
import sys
import time

from aura import cli, dashboard, diagnosis, heartbeat, processes, sensors
from aura.clock import WINDOWS
from aura.errors import EXIT_FAULT, EXIT_OK, EXIT_SIGNAL_BASE, UserError
from aura.files import MISSHAPEN, explain, path_called

RATES_SECONDS = 0.5  # measured before the first sample is shown: rates are differences


def build_parser():
    """The arguments of this script."""
    parser = cli.Parser(prog="monitor.py", description="Muestra el uso de la máquina y de sus GPU, los procesos de un "
                        "entrenamiento, y qué va mal. Ctrl+C termina.")
    parser.add_argument("--interval", type=cli.number(float, low=0.1, high=86400), default=5.0, metavar="S",
                        help="segundos entre dos muestras")
    parser.add_argument("--count", type=cli.number(int, low=1), metavar="N", help="termina tras N muestras")
    parser.add_argument("--once", action="store_true", help="una sola muestra")
    group = parser.add_argument_group("qué se mira")
    group.add_argument("--run", type=cli.path, metavar="CARPETA",
                       help="el --log-dir de un entrenamiento: muestra sus rangos de esta máquina")
    group.add_argument("--cluster", action="store_true",
                       help="en la máquina del rango 0: los rangos de todas las máquinas (sin --run: los de ./logs)")
    group.add_argument("--gpus", metavar="N,N,...", help="solo estas GPU (por defecto: todas)")
    group.add_argument("--disk", type=cli.path, metavar="CARPETA",
                       help="donde se guardan, o se guardarán, los puntos de control (por defecto, ./checkpoints; con "
                            "la --output_dir de train_tensordock.py en --run, esa)")
    group.add_argument("--replay", type=cli.path, metavar="FICHERO",
                       help="en vez de medir, muestra y juzga lo que se grabó con --json")
    group = parser.add_argument_group("cómo se muestra")
    group.add_argument("--json", action="store_true", help="un objeto JSON por línea")
    group.add_argument("--csv", type=cli.path, metavar="FICHERO", help="añade además una fila por muestra")
    group.add_argument("--no-color", action="store_true", help="sin colores (también con NO_COLOR)")
    group.add_argument("--check", action="store_true",
                       help=f"tras {WINDOWS} muestras (o las de --count) dice solo qué va mal; código 3 si "
                            "hay algo")
    return parser


def parse():
    """The arguments, with what follows from them. Raises UserError."""
    args = build_parser().parse_args()
    if args.once and args.count:
        raise UserError(f"--once y --count {args.count} se excluyen: indique uno de los dos")
    if args.once or (args.check and not args.replay):
        args.count = 1 if args.once else args.count or WINDOWS
    if args.gpus is not None:
        args.gpus = cards(args.gpus)
    if args.cluster and not args.run:
        args.run = "./logs"
    if args.disk is None:  # train_tensordock.py keeps its checkpoints beside its log, which has this name
        own = args.run and os.path.exists(os.path.join(args.run, "training_log.csv"))
        args.disk = args.run if own else "./checkpoints"
    run = args.run and path_called(args.run, f"--run {args.run!r}", "indique el --log-dir del entrenamiento")
    if run and run.exists() and not run.is_dir():
        raise UserError(f"--run {args.run!r} no es una carpeta: indique el --log-dir del entrenamiento")
    if run:
        try:  # a folder that may not be looked into would seem to be one without ranks
            os.listdir(run / heartbeat.FOLDER)
        except PermissionError as problem:
            raise UserError(f"--run {args.run!r}: no se puede leer ({explain(problem)}); compruebe la ruta y sus "
                            "permisos") from problem
        except OSError:  # nobody has made it yet
            pass
    return args


def cards(text):
    """[0, 1] for '0,1'. Raises UserError."""
    words = text.split(",")
    if not all(re.fullmatch(r"\s*\d{1,9}\s*", word) for word in words):
        raise UserError(f"--gpus {text!r}: se esperan números de GPU desde 0, separados por comas (por ejemplo, --gpus "
                        "0,1)")
    return sorted({int(word) for word in words})


def measured(args, wait):
    """Yield (Sample, [Beat]) of this machine, at fixed intervals from the first on. wait(seconds) passes the time."""
    source = sensors.Sensors(disk=args.disk, gpus=args.gpus)
    source.sample()
    wait(RATES_SECONDS)
    start, tick = time.monotonic(), 0
    while True:
        beats = heartbeat.read(args.run) if args.run else []
        # With this process among them the list is never empty where processes can be listed at all.
        ours = [os.getpid(), *(beat.pid for beat in beats if beat.host == source.host and beat.ended is None
                               and beat.pids == processes.pid_namespace()
                               and beat.started in (None, processes.start_of(beat.pid)))]
        yield source.sample(ours), beats
        # After a machine slept, the samples it missed are not made up for.
        tick = max(tick + 1, math.ceil((time.monotonic() - start) / args.interval))
        wait(max(0.0, start + tick * args.interval - time.monotonic()))


def recorded(args):
    """Yield (Sample, [Beat]) of each line of --replay. Raises UserError."""
    try:
        with open(args.replay, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith("\n") and number > 1:
                    return  # the monitor that recorded it was killed in the middle of a line
                try:
                    yield parse_record(line, args.gpus)
                except MISSHAPEN as problem:
                    raise UserError(f"--replay {args.replay!r}, línea {number}: no es lo que escribe monitor.py --json"
                                    ) from problem
    except OSError as problem:
        raise UserError(f"--replay {args.replay!r}: no se puede leer ({explain(problem)}); compruebe la ruta y "
                        "sus permisos") from problem
    except UnicodeDecodeError as problem:
        raise UserError(f"--replay {args.replay!r}: no es un fichero de texto; indique uno de "
                        "monitor.py --json") from problem


def parse_record(line, gpus):
    """(Sample, [Beat]) of a line that --json wrote, or of a Sample alone; of the cards `gpus` only, None for all."""
    values = json.loads(line)
    sample = sensors.typed(values.get("sample", values), sensors.Sample)
    if gpus is not None:
        sample = dataclasses.replace(sample, gpus=[gpu for gpu in sample.gpus if gpu.index in gpus])
    return sample, [sensors.typed(beat, heartbeat.Beat) for beat in values.get("beats", [])]


def watch(args, view):
    """Show sample after sample; returns the exit code."""
    samples, readings = (collections.deque(maxlen=WINDOWS) for _ in range(2))
    moments = recorded(args) if args.replay else measured(args, view.wait)
    table = dashboard.CsvFile(args.csv) if args.csv else None
    seen, found = 0, []
    for sample, beats in moments:
        seen += 1
        samples.append(sample)
        readings.append(beats)
        found = diagnosis.diagnose(list(samples), list(readings), sample.time)
        if table:
            table.add(dashboard.csv_row(sample, beats, found))
        if args.json and not args.check:
            print(dashboard.record(sample, beats, found))
        elif not args.check:
            run = args.run or (args.replay if beats else None)
            view.show(functools.partial(dashboard.lines, sample, beats, found, cluster=args.cluster, run=run))
        if seen == args.count:
            break
    if not seen:
        raise UserError(f"--replay {args.replay!r}: no contiene ninguna muestra; indique un fichero de "
                        "monitor.py --json")
    return verdict(args, samples[-1], readings[-1], found, seen) if args.check else EXIT_OK


def verdict(args, sample, beats, found, seen):
    """Print what --check found in `seen` samples; returns the exit code."""
    least = diagnosis.LIMITS.hits
    if args.run and not beats:
        raise UserError(f"--run {args.run!r}: ningún rango da señales ahí; indique el --log-dir del entrenamiento")
    if args.json:
        print(dashboard.record(sample, beats, found))
    elif not found:
        few = f" (con menos de {least} muestras no se juzgan los problemas intermitentes)" if seen < least else ""
        ranks = f"; rangos vistos: {len(beats)}" if beats else ""
        print(f"Todo correcto en {dashboard.clean(sample.host)}{ranks}{few}.")
    else:
        print(*(dashboard.clean(f"{finding.kind}: {finding.line()}") for finding in found), sep="\n")
    return EXIT_FAULT if found else EXIT_OK


def leave(number, _frame):
    """End on a signal as on an exception, so that the terminal is put back in order."""
    sys.exit(EXIT_SIGNAL_BASE + number)


def main():
    """Show or check; returns the exit code."""
    args = parse()
    terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    color = terminal and not args.no_color and not os.environ.get("NO_COLOR")
    view = dashboard.Pipe(color)
    if args.check and not args.replay and args.count > 1 and sys.stderr.isatty():
        print(f"Midiendo: {args.count} muestras, {(args.count - 1) * args.interval:.0f} s...", file=sys.stderr)
    try:
        if not terminal or args.json or args.check or args.replay or args.count == 1:
            return watch(args, view)
        signal.signal(signal.SIGTERM, leave)
        with dashboard.Screen(color) as screen:
            return watch(args, screen)
    except KeyboardInterrupt:
        if args.count:
            raise
        return EXIT_OK


if __name__ == "__main__":
    cli.run(main)
