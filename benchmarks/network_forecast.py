"""Whether training waits as long as test_ddp.py --full foretells: two machines on links of different speed.

    sudo python benchmarks/network_forecast.py --json network_forecast.json
    sudo python benchmarks/network_forecast.py --mbit 120,35 --steps 6

The machines are network namespaces of this one with a link that is limited by tc (Linux, root). On each link the doctor
examines the pair, then train_gpt2_spanish.py trains there; its heartbeat says how long each step waited for the other
rank. The forecast is `waiting_s`, what backward does not hide. One thread for each process.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import measure  # noqa: E402

from aura import cli, forecast, heartbeat  # noqa: E402
from aura.models import gpt  # noqa: E402
from tests.hosts import PORT, Switch, limits_work  # noqa: E402

CLOSE = 0.25  # of what is measured
LIMIT_S = 1800
WINDOW_S = 2  # steps that take longer are a window each, shorter ones share it


def on_each(switch, folders, words):
    """Run one python command on every machine of the switch; returns rank 0's standard output."""
    with ExitStack() as stack:
        children = [stack.enter_context(subprocess.Popen(
            ["ip", "netns", "exec", host, sys.executable, *map(str, words)], cwd=folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": "0",
                 "WORLD_SIZE": str(len(folders)), "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(PORT)}))
            for rank, (host, folder) in enumerate(zip(switch.hosts, folders, strict=True))]
        try:
            return [child.communicate(timeout=LIMIT_S)[0] for child in children][0]
        finally:
            for child in children:
                child.kill()


def compare(mbit, args, folder):
    """A row: what the doctor foretells for the preset on a link of `mbit` Mbit/s, and what training waited for."""
    folders = [Path(folder, name) for name in ("first", "second")]
    for each in folders:
        each.mkdir()
    with Switch(2) as switch:
        switch.limit(1, mbit)
        said = json.loads(on_each(switch, folders, [ROOT / "test_ddp.py", "--backend", "gloo", "--full", "--json"]))
        on_each(switch, folders, [
            ROOT / "train_gpt2_spanish.py", "--distributed", "--preset", args.preset, "--dataset-name", "muestra",
            "--batch-size", forecast.SEQUENCES, "--max-steps", args.steps, "--sample-length", 0, "--checkpoint-freq", 0,
            "--eval-windows", forecast.SEQUENCES])
    (told,) = (row for row in said["training"] if row["preset"] == args.preset)
    beats = heartbeat.read(folders[0] / "logs")
    # A rank also waits for a slower one: the exchange itself is the time that both of them waited.
    waits = [min(pair) for pair in zip(*([window.communication for window in beat.windows[1:]] for beat in beats),
                                         strict=False)]
    if not waits:
        raise SystemExit(f"no hubo bastantes pasos de {WINDOW_S} s o más: suba --steps")
    measured = statistics.median(waits)
    return {"what": args.preset, "mbit": mbit, "ours": told["waiting_s"], "all": told["communication_s"],
            "peer": measured, "fastest": min(waits), "slowest": max(waits), "ratio": told["waiting_s"] / measured}


def build_parser():
    parser = cli.Parser(description="Compara lo que test_ddp.py --full predice con lo que se espera al "
                                    "entrenar, en enlaces de varias velocidades (Linux, root).")
    parser.add_argument("--mbit", type=measure.sizes, default="50,200,1000", metavar="N,N,...",
                        help="velocidades de los enlaces en Mbit/s")
    parser.add_argument("--preset", type=cli.choice(*gpt.PRESETS), default="demo", help="preset que se entrena")
    parser.add_argument("--steps", type=cli.number(int, low=1), default=12, help="pasos de cada entrenamiento")
    parser.add_argument("--json", type=measure.file, metavar="FICHERO", help="dónde escribir los resultados")
    return parser


def main(argv=None):
    args = build_parser().parse_args(argv)
    if not limits_work():
        raise SystemExit("hacen falta root, iproute2 (ip, tc) y nftables")
    rows = []
    print(f"{'Mbit/s':>8} {'en la red':>10} {'predicho':>10} {'medido':>10} {'(mín-máx)':>16} {'razón':>6}")
    for mbit in args.mbit:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row := compare(mbit, args, folder))
        spread = f"({row['fastest']:.2f}-{row['slowest']:.2f})"
        print(f"{mbit:8} {row['all']:8.2f} s {row['ours']:8.2f} s {row['peer']:8.2f} s {spread:>16} "
              f"{row['ratio']:6.2f}{'' if abs(row['ratio'] - 1) <= CLOSE else '  fuera del 25 %'}", flush=True)
    measure.write(args.json, {"benchmark": "network_forecast", "environment": measure.environment(), "rows": rows})


if __name__ == "__main__":
    cli.run(main)
