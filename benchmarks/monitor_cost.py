"""What monitor.py costs: processor and memory of the real program at its interval, and of one sample by part.

    python benchmarks/monitor_cost.py --json monitor_cost.json
    python benchmarks/monitor_cost.py --samples 720                 an hour: its memory must stay flat
    python benchmarks/monitor_cost.py --processes 3000              on a machine as full as that
    python benchmarks/monitor_cost.py --interval 1 --samples 5      quick look

The share is of one core, between the first and the last sample of one run. It does not include start-up; it includes
the programs that monitor.py starts (nvidia-smi, where there is no nvidia-ml-py).
"""

import contextlib
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import measure  # noqa: E402

from aura import backend, cli, dashboard, processes, sensors  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 0.01  # of one core, at the default interval
PARTS = {"processor": "procesador", "memory": "memoria", "disk": "disco", "network": "red", "processes": "procesos",
         "gpus": "GPU", "json": "escrita como JSON", "all": "una muestra entera"}


@contextlib.contextmanager
def company(count):
    """`count` idle processes until the block or this process ends, however it does."""
    code = (f"import os, signal, sys\nfor _ in range({count}):\n    os.fork() or signal.pause()\n"
            "print(flush=True)\nsys.stdin.read()\nos.killpg(0, signal.SIGKILL)")
    with subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          start_new_session=True) as first:
        first.stdout.readline()
        yield


def spent(pid):
    """(CPU seconds of all threads of the process and of children that have ended, resident bytes) (Linux)."""
    running = sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = (int(fields[13]) + int(fields[14])) / processes.TICKS
    return running / 1e9 + children, int(fields[21]) * processes.PAGE


def watch(interval, samples):
    """Share of a core and resident bytes of monitor.py over `samples` samples."""
    command = [sys.executable, str(ROOT / "monitor.py"), "--interval", str(interval), "--count", str(samples + 2),
               "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        moments = []
        try:
            for _ in range(samples + 1):
                if not child.stdout.readline():
                    raise SystemExit("monitor.py terminó antes de tiempo")
                time.sleep(min(0.05, interval / 10))  # the rest of what it does with a sample
                moments.append((time.monotonic(), *spent(child.pid)))
        finally:
            child.kill()
    (begin, cpu_first, _), (end, cpu_last, _) = moments[0], moments[-1]
    memory = [resident for _, _, resident in moments]
    return {"interval": interval, "samples": samples, "seconds": end - begin,
            "share": (cpu_last - cpu_first) / (end - begin),
            "cpu_ms_per_sample": 1000 * (cpu_last - cpu_first) / samples, "resident_first": memory[0],
            "resident_last": memory[-1], "resident_most": max(memory)}


def cpu_ms(function, repeats):
    """CPU milliseconds of one call, after one that is not counted."""
    function()
    begin = time.process_time()
    for _ in range(repeats):
        function()
    return 1000 * (time.process_time() - begin) / repeats


def by_part(repeats):
    """({part: CPU milliseconds}, processes seen) of one sample in this process; children (nvidia-smi) do not count."""
    watched = sensors.Sensors()
    processes, (read_gpus, _) = sensors.Processes(watched.psutil), sensors.gpu_reader()
    sample = watched.sample()
    functions = {"processor": watched.processor, "memory": watched.memory, "disk": watched.disk,
                 "network": watched.links, "processes": processes.sample, "gpus": lambda: read_gpus(None),
                 "json": lambda: dashboard.record(sample, [], []), "all": watched.sample}
    return {part: cpu_ms(function, repeats) for part, function in functions.items()}, len(watched.processes.known)


def table(result):
    print(f"{result['device']}; {result['processes']} procesos, {result['gpus']} GPU")
    for row in result["rows"]:
        print(f"{PARTS[row['what']]:20} {row['ours']:8.3f} ms de CPU")
    run = result["run"]
    print(f"monitor.py cada {run['interval']:g} s, {run['samples']} muestras: {run['share']:.3%} de un núcleo "
          f"({run['cpu_ms_per_sample']:.1f} ms por muestra); se admite un {LIMIT:.0%}")
    print(f"memoria residente: {run['resident_first'] / 2**20:.1f} MiB en la primera muestra, "
          f"{run['resident_last'] / 2**20:.1f} en la última, {run['resident_most'] / 2**20:.1f} como mucho")


def build_parser():
    parser = cli.Parser(description="Mide lo que cuesta monitor.py (Linux).")
    parser.add_argument("--json", type=measure.file, metavar="FICHERO", help="dónde escribir los resultados")
    parser.add_argument("--interval", type=cli.number(float, low=0.1), default=5.0, metavar="S",
                        help="segundos entre muestras")
    parser.add_argument("--samples", type=cli.number(int, low=1), default=24, help="muestras de monitor.py")
    parser.add_argument("--repeats", type=cli.number(int, low=1), default=100, help="repeticiones de cada parte")
    parser.add_argument("--processes", type=cli.number(int, low=0), default=0, metavar="N",
                        help="llena antes la máquina con N procesos parados")
    return parser


def main(argv=None):
    args = build_parser().parse_args(argv)
    with company(args.processes):
        parts, seen = by_part(args.repeats)
        run = watch(args.interval, args.samples)
    result = {"benchmark": "monitor_cost", "device": backend.device_name(torch.device("cpu")), "processes": seen,
              "versions": {"python": platform.python_version(), "psutil": version("psutil")},
              "gpus": len(sensors.gpu_reader()[0](None)[0]), "run": run,
              "rows": [{"what": part, "unit": "ms", "ours": cost} for part, cost in parts.items()]}
    table(result)
    measure.write(args.json, result)


if __name__ == "__main__":
    cli.run(main)
