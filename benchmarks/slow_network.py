"""Training over slow networks: one machine against several, with --sync ddp, fp16, diloco, auto and torch's own ways.

    sudo python benchmarks/slow_network.py --json slow_network.json --markdown slow_network.md --chart slow_network.png
    sudo python benchmarks/slow_network.py --networks 35,120,50/10 --machines 3 --methods one,ddp,diloco
    python benchmarks/slow_network.py --quality --corpus quijote.txt --speeds slow_network.json --json quality.json

The machines are network namespaces of this one on a switch whose links are limited by tc (Linux, root), one process of
one thread in each. A network is a rate in Mbit/s; `50/10`: the first machine sends at 50 and receives at 10; `200%2`:
2 % of the packets, which have the size of a frame, are lost. Every contestant trains the same model on the same batches
for --seconds, its first steps not counted, and for at least one whole round of --sync-every steps where it averages in
rounds; they take turns. "control" is as many machines that never exchange anything: processes on one computer share its
memory, and no exchange can make them faster than that. Bytes are those that the interfaces have sent, with headers and
retransmissions.

The peers are torch's DistributedDataParallel and its PostLocalSGDOptimizer, as they come, around our module and our
optimiser. Before anything is timed the losses of the first steps of our ddp and of torch's must be equal.

--quality instead trains one machine, ddp, fp16 and diloco to the end, over a link without limits, and compares the
validation losses at equal tokens; with --speeds, one machine trains for the time that diloco takes on the network --at.
That takes hours: with --work the same command, given again, goes on from where it was interrupted, also with other
--methods and --seeds.
"""

import contextlib
import json
import math
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import measure  # noqa: E402
import slow_network_crew  # noqa: E402
import slow_network_table  # noqa: E402
from slow_network_crew import CONTROL, METHODS, ONE, OURS_TOGETHER  # noqa: E402
from slow_network_peers import EXPECTED, OURS, TORCH_DDP, TORCH_LOCAL  # noqa: E402

from aura import cli, corpus, dataset, files, report  # noqa: E402
from aura.diloco import FRAGMENTS  # noqa: E402
from aura.models import gpt  # noqa: E402
from aura.pace import TIE  # noqa: E402
from aura.sync import SYNC_EVERY, outer_step  # noqa: E402
from tests.hosts import Switch, limits_work  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
IN_ROUNDS = ("diloco", TORCH_LOCAL)  # exchange once in --sync-every steps
SEED, SPEED_LR = 1234, 5e-4
ENDLESS = 10**6  # steps of a run that is killed
CHECKED, TOLERANCE = 4, 1e-4  # steps whose losses must agree, and how well
WARM_S = 3.0  # not measured: that long, and of a round of steps the first fragment
LEAST_STEPS = 2
LIMIT_S, QUALITY_LIMIT_S = 1800, 5 * 3600  # for one training
EVALUATIONS = 15
SETTING = ("machines", "tokens", "n_layer", "n_embd", "n_head", "vocab_size", "seq_len", "batch_size", "lr", "beta2",
           "precision", "sync_every", "sync_lr", "sync_momentum")  # of all trainings of a --work
KEPT = "setting.json"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CHOSEN = re.compile(r"--sync auto elige (\w+)")


# ---- Speed ----------------------------------------------------------------------------------------------------------


@dataclass
class Cell:
    """What one run of one method on one network gave. step_s: seconds of a step of the slowest process. sent: bytes per
    token. steps: how many were measured on the first process. choice, expected: of auto."""

    tokens_per_s: float
    step_s: float
    sent: float
    steps: int
    losses: dict = field(default_factory=dict)
    choice: str | None = None
    expected: dict = field(default_factory=dict)


def window(marks, unit, seconds):
    """(first, last) of the marks between which a process is measured, None while it has not come far enough.

    The first WARM_S seconds are left out and, where there are rounds of `unit` steps, the steps of the first fragment.
    Between the two marks lie whole rounds, at least LEAST_STEPS steps and at least `seconds`.
    """
    first = next((number for number, (at, _) in enumerate(marks)
                  if number > unit // FRAGMENTS and at - marks[0][0] >= WARM_S), None)
    if first is None:
        return None
    least = max(unit, LEAST_STEPS)
    return next(((first, last) for last in range(first + unit, len(marks), unit)
                 if last - first >= least and marks[last][0] - marks[first][0] >= seconds), None)


def measured(marks, windows, step_tokens):
    """A Cell from all processes' marks, each within its own window. step_tokens: tokens of one process in a step."""
    seconds, sent = zip(*([(end - begin) / (last - first) for begin, end in zip(own[first], own[last], strict=True)]
                          for own, (first, last) in zip(marks, windows, strict=True)), strict=True)
    return Cell(tokens_per_s=sum(step_tokens / each for each in seconds), step_s=max(seconds),
                sent=statistics.fmean(sent) / step_tokens, steps=windows[0][1] - windows[0][0])


def run_cell(method, net, args, folder):
    """The Cell of `method` on `net`; Failed where it does not train."""
    together = method != ONE
    with Switch(args.machines) as switch:
        slow_network_crew.limit(switch, net)
        contestant = method if method in (TORCH_DDP, TORCH_LOCAL) else OURS
        count, words = args.machines if together else 1, speed_words(args, folder, method)
        folders = slow_network_crew.places(folder / "run", range(count))
        with slow_network_crew.Crew(contestant, [words] * count, folders, hosts=switch.hosts,
                                    grouped=together and method != CONTROL, every=args.sync_every) as crew:
            cell = crew.watch(lambda: progress(crew, method, args), LIMIT_S)
            cell.losses = crew.losses()
            expected = crew.folders[0] / EXPECTED
            if method == "auto" and expected.exists():
                cell.expected = json.loads(expected.read_text(encoding="utf-8"))
    check_losses(cell.losses)
    return cell


def progress(crew, method, args):
    """The Cell of a crew that has come far enough, else None."""
    choice = None
    if method == "auto":
        found = CHOSEN.search(crew.said(0))
        if found is None:
            return None
        choice = found[1]
    unit = args.sync_every if (choice or method) in IN_ROUNDS else 1
    marks = crew.marks()
    windows = [window(own, unit, args.seconds) for own in marks]
    if None in windows:
        return None
    cell = measured(marks, windows, args.batch_size * args.seq_len)
    cell.choice = choice
    return cell


def check_losses(losses):
    """Failed when a loss is not finite, or when they do not fall over 30 steps."""
    values = list(losses.values())
    if not values or not all(map(math.isfinite, values)):
        raise slow_network_crew.Failed(f"pérdidas: {values}")
    if max(losses) >= 30 and values[-1] >= values[0]:
        raise slow_network_crew.Failed(f"la pérdida no baja: {values[0]:.3f}, y al final {values[-1]:.3f}")


def check_exact(args, folder):
    """{name: losses of the first steps} of our ddp and torch's, which must be equal; ends the program if not."""
    found = {}
    for name, contestant in (("ddp", OURS), (TORCH_DDP, TORCH_DDP)):
        words = [*speed_words(args, folder, name), "--log-interval", 1]
        folders = slow_network_crew.places(folder / "run", range(2))
        with Switch(2) as switch, slow_network_crew.Crew(contestant, [words] * 2, folders, hosts=switch.hosts) as crew:
            found[name] = crew.watch(lambda crew=crew: first_losses(crew.losses()), LIMIT_S)
        shutil.rmtree(folder / "run")
        print(f"pérdidas de los primeros pasos, {name}: {' '.join(f'{loss:.5f}' for loss in found[name])}", flush=True)
    difference = max(abs(a - b) for a, b in zip(*found.values(), strict=True))
    if not difference < TOLERANCE:
        raise SystemExit(f"resultado rechazado: {TORCH_DDP} no entrena igual que ddp, difieren en {difference:.1e}")
    return found


def first_losses(losses):
    wanted = range(1, CHECKED + 1)
    return [losses[step] for step in wanted] if all(step in losses for step in wanted) else None


def contest(net, args, folder):
    """({method: its Cells}, {method: why it failed}) of all rounds on one network; the methods take turns."""
    cells, failed = {method: [] for method in args.methods}, {}
    for number in range(args.rounds):
        first = number % len(args.methods)
        for method in args.methods[first:] + args.methods[:first]:
            begun = time.monotonic()
            try:
                cells[method].append(cell := run_cell(method, net, args, folder))
                told = f"{cell.tokens_per_s:.0f} tokens/s, {cell.steps} pasos de {cell.step_s:.2f} s"
                told += f", elige {cell.choice}" if cell.choice else ""
            except slow_network_crew.Failed as problem:
                failed[method] = told = f"falló: {problem}"
            finally:
                shutil.rmtree(folder / "run", ignore_errors=True)
            print(f"  {net.name}, {method}: {told} ({time.monotonic() - begun:.0f} s en total)", flush=True)
    return {method: own for method, own in cells.items() if own}, failed


def rows_of(net, cells, failed, machines):
    """Flat rows, one a method, of what contest() found on a network."""
    middle = {method: statistics.median(cell.tokens_per_s for cell in own) for method, own in cells.items()}
    sent = {method: statistics.median(cell.sent for cell in own) for method, own in cells.items()}
    rows = []
    for method, own in cells.items():
        rates = [cell.tokens_per_s for cell in own]
        row = {"op": "train", "network": net.name, "mbit": net.mbit, "back": net.back, "loss_percent": net.loss,
               "machines": 1 if method == ONE else machines, "method": method, "tokens_per_s": middle[method],
               "tokens_per_s_min": min(rates), "tokens_per_s_max": max(rates), "rounds": len(own),
               "steps": own[0].steps, "step_s": statistics.median(cell.step_s for cell in own),
               "bytes_per_token": sent[method]}
        row |= {f"to_{name}": middle[method] / middle[name] for name in (ONE, CONTROL, TORCH_DDP) if name in middle}
        if "ddp" in sent and method not in (ONE, CONTROL):
            row["bytes_ddp_ratio"] = sent["ddp"] / sent[method]
        forecasts = [cell.expected.get(cell.choice if method == "auto" else method) for cell in cells.get("auto", ())]
        known = [seconds for seconds in forecasts if seconds]
        if known:
            row["predicted_s"] = statistics.median(known)
            row["predicted_ratio"] = row["predicted_s"] / row["step_s"]
        if method == "auto":
            row |= judged(own, middle)
        rows.append(row)
    return rows + [{"op": "train", "network": net.name, "method": method, "failed": why}
                   for method, why in failed.items()]


def judged(own, middle):
    """What auto chose, which of the four was fastest, and whether these are the same, within TIE."""
    choices = [cell.choice for cell in own]
    rivals = {cell.choice: cell.tokens_per_s for cell in own}  # counts where the chosen one was not measured by itself
    rivals |= {name: middle[name] for name in (ONE, "ddp", "fp16", "diloco") if name in middle}
    fastest = max(rivals, key=rivals.get)
    right = all(rivals[choice] >= (1 - TIE) * rivals[fastest] for choice in choices)
    return {"choice": statistics.mode(choices), "choices": choices, "fastest": fastest, "right": right}


def speed(args, folder):
    """The rows of every network; printed, and written, as they come."""
    result = {"benchmark": "slow_network", **measure.environment(), **sizes(args), "rows": []}
    neighbours = measure.Neighbours()
    result["losses"] = check_exact(args, folder)
    for net in args.networks:
        rows = rows_of(net, *contest(net, args, folder), args.machines)
        result["rows"] += rows
        slow_network_table.print_speeds(net, rows)
        measure.write(args.json, result)
    result["others_share"] = neighbours.warn()
    return result


# ---- Quality --------------------------------------------------------------------------------------------------------


def quality(args, folder):
    """Validation losses over tokens: a curve for each method and seed, and what follows for diloco."""
    result = {"benchmark": "slow_network_quality", **measure.environment(), **sizes(args), "tokens": args.tokens,
              "seeds": args.seeds, "rows": []}
    rates = args.speeds or {}
    step = args.batch_size * args.seq_len
    for method in (method for method in args.methods if method in ("ddp", "fp16", "diloco")):
        for seed in args.seeds:
            words = quality_words(args, folder, method, seed, args.tokens // (step * args.machines))
            folders = slow_network_crew.places(folder / f"{method}-{seed}", range(args.machines))
            result["rows"] += curves(method, [seed], [words] * args.machines, folders, args)
            measure.write(args.json, result)
    if ONE in args.methods:
        seen = args.tokens * (rates[ONE] / rates["diloco"] if rates else 1)  # in the time that diloco takes
        steps = int(seen / step)
        alone = [quality_words(args, folder, ONE, seed, steps) for seed in args.seeds]
        folders = slow_network_crew.places(folder / f"{ONE}-{steps}", args.seeds)
        result["rows"] += curves(ONE, args.seeds, alone, folders, args)
    result["summary"] = summary(result["rows"], rates, args)
    return result


def speeds(args, parser):
    """{method: tokens/s} on the network --at of the result --speeds; an error of the arguments where that has none, or
    is of another training."""
    try:
        result = json.loads(args.speeds.read_text(encoding="utf-8"))
        rows = [row for row in result["rows"] if row["network"] == args.at and "failed" not in row]
        found = {row["method"]: row["tokens_per_s"] for row in rows}
        theirs = {name: result[name] for name in ("step_tokens", "machines", "sync_every", "precision")}
    except (ValueError, KeyError, TypeError):
        parser.error(f"--speeds {args.speeds}: no es un resultado de velocidad de este programa (--json)")
    if not {ONE, "diloco"} <= found.keys():
        parser.error(f"--speeds {args.speeds}: no tiene one y diloco en la red {args.at}; elija otra con --at")
    ours = {"step_tokens": args.batch_size * args.seq_len, "machines": args.machines, "sync_every": args.sync_every,
            "precision": args.precision}
    if other := [f"{name}: {value} y no {ours[name]}" for name, value in theirs.items() if value != ours[name]]:
        parser.error(f"--speeds {args.speeds}: se midió con otros valores ({'; '.join(other)}); dé los mismos")
    return found


def curves(method, seeds, words, folders, args):
    """Train to the end; a row {"method", "seed", "curve": [[tokens, validation loss]], ...} for each seed. With method
    ONE there is a process for each seed, all at the same time. "seconds": of this call."""
    begun = time.monotonic()
    with slow_network_crew.Crew(OURS, words, folders, grouped=method != ONE, every=args.sync_every) as crew:
        crew.finish(QUALITY_LIMIT_S)
        tables = [report.read_table(each / "logs" / "train.csv") for each in folders[:len(seeds)]]
    if not args.work:
        shutil.rmtree(folders[0].parent)
    rows = []
    for seed, told in zip(seeds, tables, strict=True):
        curve = [[int(float(row["tokens"])), float(row["val_loss"])] for row in told if row.get("val_loss")]
        rows.append({"op": "quality", "method": method, "seed": seed, "tokens": curve[-1][0], "val_loss": curve[-1][1],
                     "curve": curve, "seconds": time.monotonic() - begun})
        print(f"  {method}, semilla {seed}: pérdida de validación {curve[-1][1]:.4f} tras {curve[-1][0]} tokens "
              f"({rows[-1]['seconds']:.0f} s)", flush=True)
    return rows


def summary(rows, rates, args):
    """The ratio of each method's last validation loss to ddp's, and of diloco's to what one machine has in the same
    time where rates are known; each with its least and greatest seed."""
    last = {}
    for row in rows:
        last.setdefault(row["method"], {})[row["seed"]] = row["val_loss"]
    pairs = [(method, "ddp") for method in ("fp16", "diloco")] + ([("diloco", ONE)] if rates else [])
    found = {"network": args.at, "tokens_per_s": rates, "ratios": []}
    for method, other in pairs:
        if method in last and other in last:
            ratios = [last[method][seed] / last[other][seed] for seed in args.seeds]
            found["ratios"].append({"method": method, "to": other, "ratio": statistics.fmean(ratios),
                                    "ratio_min": min(ratios), "ratio_max": max(ratios)})
    return found


# ---- Command lines and data -----------------------------------------------------------------------------------------


def model_words(args, folder):
    return ["--preset", "demo", "--n-layer", args.n_layer, "--n-embd", args.n_embd, "--n-head", args.n_head,
            "--seq-len", args.seq_len, "--batch-size", args.batch_size, "--grad-accum", 1, "--dropout", 0,
            "--precision", args.precision, "--beta2", args.beta2, "--data-dir", folder / "Data", "--sample-length", 0]


def sync_words(args, method):
    outer = {"--sync-every": args.sync_every, "--sync-lr": args.sync_lr, "--sync-momentum": args.sync_momentum}
    given = [word for name, value in outer.items() if value is not None for word in (name, value)]
    return ["--sync", method, *(given if method in ("diloco", "auto") else ())] if method in OURS_TOGETHER else []


def speed_words(args, folder, method):
    """The arguments of a run that goes on until it is killed, at one learning rate and without evaluations."""
    return [*model_words(args, folder), "--lr", SPEED_LR, "--min-lr-ratio", 1, "--warmup-ratio", 0, "--seed", SEED,
            "--max-steps", ENDLESS, "--eval-interval", ENDLESS, "--eval-windows", 1, "--resume", "none",
            "--checkpoint-freq", 0, *sync_words(args, method)]


def quality_words(args, folder, method, seed, steps):
    every = max(1, steps // EVALUATIONS)
    return [*model_words(args, folder), "--lr", args.lr, "--warmup-ratio", 0.05, "--seed", seed, "--max-steps", steps,
            "--eval-interval", every, "--resume", "auto", "--checkpoint-freq", every if args.work else 0,
            *sync_words(args, method)]


def setting(args, parser):
    """What all trainings of --work share; an error of the arguments where those found there have another setting."""
    shared = {name: getattr(args, name) for name in SETTING}
    shared["corpus"] = [[path.name, path.stat().st_size] for path in args.corpus or ()]
    kept = args.work / KEPT
    known = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else shared
    if other := [f"{name}: {known.get(name)} y no {value}" for name, value in shared.items()
                 if known.get(name) != value]:
        parser.error(f"--work {args.work}: es de otros entrenamientos ({'; '.join(other)}); dé otra carpeta")
    return shared


def prepare(args, folder):
    """Put the tokens where every process finds them: the built-in sample, with --corpus both."""
    name = corpus.SAMPLE_NAME
    if args.corpus:
        name = folder / "texto"
        name.mkdir(exist_ok=True)
        for number, path in enumerate(args.corpus):
            shutil.copyfile(path, name / f"{number}-{path.name}")
        documents = corpus.open_corpus(corpus.SAMPLE_NAME).documents()
        (name / "muestra.txt").write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    command = [sys.executable, ROOT / "train_gpt2_spanish.py", "--prepare", "--dataset-name", name, "--vocab-size",
               args.vocab_size, "--data-dir", folder / "Data"]
    done = subprocess.run(list(map(str, command)), cwd=folder, timeout=LIMIT_S, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise SystemExit("no se pudieron preparar los datos:\n" + done.stdout)
    args.vocab_size = dataset.latest(folder / "Data").vocab_size  # as many pieces as the text gave


def sizes(args):
    """What is trained, for the result."""
    config = gpt.GPTConfig(args.vocab_size, args.seq_len, args.n_layer, args.n_head, args.n_embd, 0.0)
    tokens = args.batch_size * args.seq_len
    lr, momentum = outer_step(args, args.tokens // (tokens * args.machines) if args.quality else ENDLESS)
    return {"parameters": config.parameters(), "gradient_mb": 4e-6 * config.parameters(), "machines": args.machines,
            "step_tokens": tokens, "sync_every": args.sync_every, "sync_lr": lr, "sync_momentum": momentum,
            "beta2": args.beta2, "precision": args.precision, "threads": 1}


# ---- Arguments ------------------------------------------------------------------------------------------------------


def build_parser():
    parser = cli.Parser(description="Compara una máquina con varias unidas por redes lentas: --sync ddp, "
                                    "fp16, diloco y auto, y lo que trae torch (Linux, root).")
    parser.add_argument("--networks", type=slow_network_crew.networks, default="1000,200,50,10,200%2",
                        metavar="RED,RED,...",
                        help="Mbit/s; 50/10: la primera máquina envía a 50 y recibe a 10; 200%%2: se pierde el 2 %%")
    parser.add_argument("--methods", type=measure.names(*METHODS), default=",".join(METHODS), metavar="NOMBRE,...",
                        help="los que se comparan")
    parser.add_argument("--quality", action="store_true",
                        help="compara la pérdida de validación en lugar de la velocidad")
    parser.add_argument("--seeds", type=measure.numbers, default="1,2,3",
                        help="semillas de --quality")
    parser.add_argument("--corpus", type=measure.existing, nargs="+", metavar="FICHERO",
                        help="textos que se añaden a la muestra incluida")
    parser.add_argument("--lr", type=cli.number(float, above=0), default=4e-4,
                        help="tasa de aprendizaje de --quality; menos, con menos tokens por paso")
    parser.add_argument("--beta2", type=cli.number(float, low=0, high=0.99999), default=0.999, metavar="X",
                        help="la de AdamW; más, con menos tokens por paso")
    parser.add_argument("--precision", type=cli.choice(*measure.DTYPES), default="fp32",
                        help="en la que se calcula")
    for name, what in (("sync-lr", "tasa"), ("sync-momentum", "inercia")):
        parser.add_argument(f"--{name}", type=cli.number(float, low=0), metavar="X",
                            help=f"{what} de los acuerdos de diloco (por defecto: la de los scripts)")
    parser.add_argument("--work", type=lambda text: Path(text).resolve(), metavar="CARPETA",
                        help="dónde guardar los entrenamientos de --quality; la misma orden sigue donde quedó")
    parser.add_argument("--speeds", type=measure.existing, metavar="FICHERO",
                        help="resultado anterior (--json) del que --quality toma los tokens/s de --at")
    parser.add_argument("--at", default="50", metavar="RED", help="red de --speeds")
    for name, value, what in (
            ("machines", 2, "máquinas"), ("rounds", 1, "rondas de cada red"),
            ("seconds", 20, "lo que se mide, en segundos"), ("sync-every", SYNC_EVERY, "pasos entre dos acuerdos"),
            ("tokens", 9_000_000, "tokens de cada entrenamiento de --quality"), ("n-layer", 6, "bloques"),
            ("n-embd", 384, "ancho"), ("n-head", 6, "cabezas"), ("vocab-size", 6400, "piezas del tokenizador"),
            ("seq-len", 128, "longitud de las secuencias"), ("batch-size", 2, "secuencias por proceso y paso")):
        parser.add_argument(f"--{name}", type=cli.number(int, low=1), default=value, metavar="N", help=what)
    parser.add_argument("--json", type=measure.file, metavar="FICHERO", help="dónde escribir los resultados")
    parser.add_argument("--markdown", type=measure.file, metavar="FICHERO",
                        help="dónde escribir las tablas de la guía")
    parser.add_argument("--chart", type=measure.file, metavar="FICHERO.png", help="dónde dibujar el resultado")
    return parser


def main(argv=None):
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.machines < 2:
        parser.error("--machines: hacen falta al menos 2")
    if args.work and not args.quality:
        parser.error("--work: es de --quality; quítelo o añada --quality")
    if args.quality and not {ONE, "ddp", "fp16", "diloco"} & set(args.methods):
        parser.error(f"--methods {','.join(args.methods)}: --quality entrena one, ddp, fp16 o diloco; dé alguno")
    if args.speeds:
        args.speeds = speeds(args, parser)
    if not args.quality and not limits_work():
        print("Omitido: hacen falta root, iproute2 (ip, tc) y nftables para hacer redes de prueba.")
        return
    shared = setting(args, parser) if args.work else None
    with contextlib.ExitStack() as stack:
        folder = args.work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slow_network_")))
        folder.mkdir(parents=True, exist_ok=True)
        prepare(args, folder)
        if shared:
            files.write_json(folder / KEPT, shared)
        about = sizes(args)
        print(f"{about['parameters'] / 1e6:.2f} M parámetros, gradientes de {about['gradient_mb']:.1f} MB; "
              f"{args.machines} máquinas de un hilo, {about['step_tokens']} tokens por máquina y paso", flush=True)
        try:
            result = quality(args, folder) if args.quality else speed(args, folder)
        except slow_network_crew.Failed as problem:
            raise SystemExit(f"falló: {problem}") from None
    if args.quality:
        slow_network_table.print_summary(result["summary"])
    measure.write(args.json, result)
    if args.markdown:
        Path(args.markdown).write_text(slow_network_table.markdown(result), encoding="utf-8")
    good = [row for row in result["rows"] if "failed" not in row]
    if args.chart and good:
        slow_network_table.draw(result, args.chart)
    if len(good) < len(result["rows"]):
        raise SystemExit(1)


def leave(signal_number, _):
    """Leave by an exception, so that namespaces and processes are removed, and ignore later signals meanwhile."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + signal_number)


if __name__ == "__main__":
    for each in SIGNALS:
        if signal.getsignal(each) is not signal.SIG_IGN:  # nohup's SIGHUP
            signal.signal(each, leave)
    cli.run(main)
