"""Whole scripts side by side: our train_tensordock.py and nanoGPT's train.py, as their users run them, on the CPU.

    git clone https://github.com/karpathy/nanoGPT
    python benchmarks/train_script.py --nanogpt nanoGPT --json train_script.json
    python benchmarks/train_script.py --nanogpt nanoGPT --text corpus.txt --threads 2 --n-layer 6 --n-embd 384

Each run is a process of its own; they take turns: ours, theirs, ours, theirs... Both get the same sizes, the same
tokens (those our script prepares; nanoGPT's copy lacks the header), the same learning rate at every step, the same
weight decay and clipping, fp32, no torch.compile, no evaluation and no checkpoint among the steps that count. What is
each one's own stays: the kernels, the optimiser's variant (nanoGPT's is not fused on a CPU), the GELU (tanh in ours,
exact in nanoGPT's), the initial weights, the order of the data. nanoGPT's three files are copied, never changed.

tokens/s is what each script itself says of its steps, the median of a run, its first steps left out. nanoGPT's time
includes writing its line of the log; ours does not, so `clock_ratio` compares the time from one report to the next.
The losses are compared too: the result is refused where the two do not train alike.
"""

import argparse
import dataclasses
import math
import os
import pickle
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import measure  # noqa: E402

from aura import cli, dataset, report  # noqa: E402
from aura.models import gpt  # noqa: E402
from aura.shards import HEADER_BYTES, token_width  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
NANOGPT_FILES = ("train.py", "model.py", "configurator.py")
PEER, FOLDER = "nanoGPT train.py", "aura"  # FOLDER: its data set's name
LEARNING_RATE, MIN_RATIO, WEIGHT_DECAY, CLIP = 1e-3, 0.1, 0.1, 1.0
SEED = 1234
LAST = 10  # nanoGPT tells the loss of a step's last micro-batch alone, so a final loss is the mean of this many steps
START_TOLERANCE = END_TOLERANCE = 0.05  # relative: from ln(vocabulary), from each other
ITERATION = re.compile(r"^iter (\d+): loss (\S+), time (\S+)ms", re.MULTILINE)


@dataclasses.dataclass
class Run:
    """What one process did. steps: seconds of each optimiser step, as the script reports it. clock: the same with all
    that the script does between two steps. losses: of every step. whole: seconds of the process."""

    steps: list[float]
    clock: list[float]
    losses: list[float]
    whole: float = 0.0

    def final(self) -> float:
        return statistics.fmean(self.losses[-LAST:])


# ---- The two scripts ------------------------------------------------------------------------------------------------


def our_command(args, data_dir: Path, output_dir: Path, *more: str) -> list[str]:
    options = {
        "output_dir": output_dir, "data_dir": data_dir, "dataset_path": args.text or args.data,
        "model_preset": "manual", "n_layer": args.n_layer, "n_head": args.n_head, "n_embd": args.n_embd,
        "seq_len": args.seq_len, "dropout": 0, "vocab_size": args.vocab_size, "batch_size": args.batch_size,
        "grad_accum": args.grad_accum, "precision": "fp32", "max_steps": args.steps, "schedule": "cosine",
        "lr": LEARNING_RATE, "min_lr_ratio": MIN_RATIO, "warmup_steps": 0, "weight_decay": WEIGHT_DECAY,
        "grad_clip": CLIP, "optimizer": "adamw", "seed": SEED, "log_interval": 1, "eval_interval": args.steps + 1,
        "eval_windows": args.batch_size, "save_steps": 0, "sample_length": 0, "resume": "none",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [sys.executable, str(ROOT / "train_tensordock.py"), *words, "--no-grad_checkpointing", *more]


def their_command(args, output_dir: Path) -> list[str]:
    """nanoGPT's command; its configurator wants each value in the type of its default. Without warmup, and with the
    last iteration as the end of the decay, its learning rate is optim.warmup_cosine's."""
    options = {
        "out_dir": output_dir, "dataset": FOLDER, "device": "cpu", "compile": False, "dtype": "float32",
        "eval_interval": 10**9, "eval_iters": 1, "log_interval": 1, "always_save_checkpoint": False,
        "gradient_accumulation_steps": args.grad_accum, "batch_size": args.batch_size, "block_size": args.seq_len,
        "n_layer": args.n_layer, "n_head": args.n_head, "n_embd": args.n_embd, "dropout": 0.0, "bias": True,
        "learning_rate": LEARNING_RATE, "min_lr": MIN_RATIO * LEARNING_RATE, "warmup_iters": 0,
        "lr_decay_iters": args.steps - 1, "max_iters": args.steps - 1, "weight_decay": WEIGHT_DECAY,
        "grad_clip": CLIP,
    }
    return [sys.executable, "train.py", *(f"--{name}={value}" for name, value in options.items())]


def run(command: list[str], folder: Path, threads: int) -> tuple[str, float]:
    """(standard output, seconds) of a child on the CPU; ends the program with its last lines where it fails."""
    count = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env={**os.environ, **count, "CUDA_VISIBLE_DEVICES": ""},
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, encoding="utf-8", check=False)
    seconds = time.perf_counter() - begin
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-5:])
        raise SystemExit(f"{Path(command[1]).name} terminó con el código {done.returncode}:\n{tail}")
    return done.stdout, seconds


def read_ours(table: Path, tokens_per_step: int) -> Run:
    """The Run of a training_log.csv with a row for every step. A row that also evaluated has no clock time."""
    rows = report.read_table(table)
    clock = [float(row["seconds"]) - float(before["seconds"])
             for before, row in zip(rows, rows[1:], strict=False) if not row["val_loss"]]
    return Run([tokens_per_step / float(row["tokens_per_s"]) for row in rows], clock,
               [float(row["loss"]) for row in rows])


def read_theirs(text: str) -> Run:
    """The Run of nanoGPT's standard output. Its times go from the end of one step to the end of the next."""
    found = ITERATION.findall(text)
    times = [float(milliseconds) / 1e3 for _, _, milliseconds in found]
    return Run(times, times[1:], [float(loss) for _, loss, _ in found])


def give_data(data: dataset.Dataset, args, folder: Path) -> None:
    """Put nanoGPT's files and the tokens, as it reads them, into `folder`."""
    if token_width(data.vocab_size) != 2:
        raise SystemExit(f"nanoGPT lee tokens de 16 bits y el vocabulario tiene {data.vocab_size}: --vocab-size menor")
    for name in NANOGPT_FILES:
        shutil.copy(Path(args.nanogpt, name), folder)
    place = folder / "data" / FOLDER
    place.mkdir(parents=True)
    # It evaluates one batch before its first step, and could not with a validation text shorter than a window.
    validation = "val" if data.tokens("val") > args.seq_len else "train"
    for name, split in (("train.bin", "train"), ("val.bin", validation)):
        with open(place / name, "wb") as target:
            for shard in data.shards(split):
                with open(shard, "rb") as source:
                    source.seek(HEADER_BYTES)
                    shutil.copyfileobj(source, target)
    (place / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": data.vocab_size}))


# ---- Measuring ------------------------------------------------------------------------------------------------------


def trains_alike(ours: Run, theirs: Run, vocab_size: int, steps: int) -> None:
    """End the program unless both have done `steps` steps and learnt about the same."""
    for name, result in (("el nuestro", ours), (PEER, theirs)):
        if len(result.losses) != steps:
            raise SystemExit(f"resultado rechazado: {name} informó de {len(result.losses)} pasos y no de {steps}")
        start = math.log(vocab_size)
        if not abs(result.losses[0] / start - 1) < START_TOLERANCE:
            raise SystemExit(f"resultado rechazado: {name} empieza con una pérdida de {result.losses[0]:.3f}, lejos de "
                             f"ln({vocab_size}) = {start:.3f}")
    if not abs(ours.final() / theirs.final() - 1) < END_TOLERANCE:
        raise SystemExit(f"resultado rechazado: las pérdidas finales son {ours.final():.3f} la nuestra y "
                         f"{theirs.final():.3f} la de {PEER}, que se diferencian en más de un {END_TOLERANCE:.0%}")


def take_turns(args, data, folder: Path, threads: int) -> tuple[list[Run], list[Run]]:
    """The runs of both at one number of threads, a line printed for each round."""
    mine, peers = [], []
    per_step = args.batch_size * args.grad_accum * args.seq_len
    for number in range(args.rounds):
        place = folder / f"{threads}-{number}"
        _, whole = run(our_command(args, Path(data.directory).parent, place), ROOT, threads)
        ours = dataclasses.replace(read_ours(place / "training_log.csv", per_step), whole=whole)
        text, whole = run(their_command(args, folder / "out"), folder, threads)
        theirs = dataclasses.replace(read_theirs(text), whole=whole)
        shutil.rmtree(place)  # with its final model
        trains_alike(ours, theirs, data.vocab_size, args.steps)
        mine.append(ours)
        peers.append(theirs)
        ours_s, peer_s = (statistics.median(result.steps[args.skip:]) for result in (ours, theirs))
        print(f"{threads:>5} {number + 1:>5} {per_step / ours_s:>9.0f} {per_step / peer_s:>9.0f} "
              f"{peer_s / ours_s:>6.2f} {ours.losses[0]:>7.3f} {theirs.losses[0]:>8.3f} {ours.final():>7.3f} "
              f"{theirs.final():>8.3f} {ours.whole:>8.1f} {theirs.whole:>8.1f}", flush=True)
    return mine, peers


def make_row(args, config, mine: list[Run], peers: list[Run], threads: int, ceilings: dict) -> dict:
    per_step = args.batch_size * args.grad_accum * args.seq_len

    def medians(runs, what, skip):
        return [statistics.median(getattr(result, what)[skip:]) for result in runs]

    times = measure.comparison(medians(mine, "steps", args.skip), medians(peers, "steps", args.skip))
    # The first interval of the clock ends with the second step.
    clock = measure.comparison(medians(mine, "clock", args.skip - 1), medians(peers, "clock", args.skip - 1))
    ours_rate, peer_rate = (per_step / times[name] * 1e3 for name in ("ours_ms", "peer_ms"))
    return {
        "op": "training script", "dtype": "fp32", "variant": f"{config.n_layer} x {config.n_embd}",
        "direction": "step", "shape": [args.batch_size, args.seq_len], "grad_accum": args.grad_accum,
        "threads": threads, "peer": PEER, **times, "ours_tokens_per_s": ours_rate, "peer_tokens_per_s": peer_rate,
        "clock_ratio": clock["ratio"], "clock_ratio_min": clock["ratio_min"], "clock_ratio_max": clock["ratio_max"],
        "ours_clock_ms": clock["ours_ms"], "peer_clock_ms": clock["peer_ms"],
        "loss_first": [mine[0].losses[0], peers[0].losses[0]],
        "loss_final": [statistics.fmean(result.final() for result in runs) for runs in (mine, peers)],
        "whole_s": [statistics.median(result.whole for result in runs) for runs in (mine, peers)],
        "share_of_ceiling": config.flops_per_token() * ours_rate / (ceilings["matmul_fp32_gflops"] * 1e9),
        "ceiling": "matmul_fp32_gflops",
    }


def race(args) -> dict:
    """Measure what the arguments ask for, printing as it goes; returns what goes into the JSON file."""
    neighbours = measure.Neighbours()
    result = {"benchmark": "train_script", **measure.environment(), "ceilings": {}, "rows": []}
    print(f"{result['device']}; {result['extension']} ({result['instruction_set']}); torch {torch.__version__} "
          f"({result['torch_instruction_set']}); {args.steps} pasos, sin contar los {args.skip} primeros")
    with tempfile.TemporaryDirectory(prefix="train_script_") as name:
        folder = Path(name)
        run(our_command(args, folder / "datos", folder / "prepare", "--prepare"), ROOT, max(args.threads))
        data = dataset.latest(folder / "datos")
        config = gpt.GPTConfig(data.vocab_size, args.seq_len, args.n_layer, args.n_head, args.n_embd, 0.0)
        result["model"] = dataclasses.asdict(config)
        give_data(data, args, folder)
        print(f"{config.parameters() / 1e6:.2f} M parámetros, vocabulario {data.vocab_size}, {data.tokens('train')} "
              f"tokens; pérdida del primer paso y media de los últimos {LAST}; segundos del proceso entero\n"
              f"{'hilos':>5} {'ronda':>5} {'nuestro':>9} {'nanoGPT':>9} {'razón':>6} {'primera':>7} {'suya':>8} "
              f"{'final':>7} {'suya':>8} {'segundos':>8} {'suyos':>8}")
        for threads in args.threads:
            torch.set_num_threads(threads)
            ceilings = result["ceilings"][threads] = measure.ceilings(quick=True)
            mine, peers = take_turns(args, data, folder, threads)
            row = make_row(args, config, mine, peers, threads, ceilings)
            result["rows"].append(row)
            print_row(row)
    result["others_share"] = neighbours.warn()
    return result


def print_row(row: dict) -> None:
    unit = "hilo" if row["threads"] == 1 else "hilos"
    ours, theirs = row["loss_final"]
    print(f"{row['threads']} {unit}: {row['ours_tokens_per_s']:.0f} tokens/s frente a {row['peer_tokens_per_s']:.0f} "
          f"de {row['peer']}: {row['ratio']:.2f} ({row['ratio_min']:.2f}-{row['ratio_max']:.2f}); de informe a informe "
          f"{row['clock_ratio']:.2f} ({row['clock_ratio_min']:.2f}-{row['clock_ratio_max']:.2f}); pérdida final "
          f"{ours:.3f} y {theirs:.3f}", flush=True)


# ---- Arguments ------------------------------------------------------------------------------------------------------


def checkout(text: str) -> str:
    missing = [name for name in NANOGPT_FILES if not Path(text, name).is_file()]
    if missing:
        raise argparse.ArgumentTypeError(f"{text!r} no es una copia de nanoGPT, le falta {', '.join(missing)}: "
                                         "git clone https://github.com/karpathy/nanoGPT")
    return text


def build_parser() -> cli.Parser:
    parser = cli.Parser(description="Mide train_tensordock.py entero frente al train.py de nanoGPT, en la CPU.")
    parser.add_argument("--json", type=measure.file, metavar="FICHERO", help="dónde escribir los resultados")
    parser.add_argument("--nanogpt", metavar="CARPETA", type=checkout, required=True,
                        help="copia de https://github.com/karpathy/nanoGPT")
    parser.add_argument("--threads", type=measure.threads, default="1,2", help="números de hilos")
    parser.add_argument("--rounds", type=cli.number(int, low=1), default=3, help="rondas")
    parser.add_argument("--steps", type=cli.number(int, low=1), default=40, help="pasos de cada ronda")
    parser.add_argument("--skip", type=cli.number(int, low=1), default=10, help="primeros pasos que no cuentan")
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--data", type=cli.choice("muestra"), default="muestra", help="el texto incluido")
    text.add_argument("--text", type=measure.existing, metavar="FICHERO", help="un .txt o .jsonl en vez de la muestra")
    for name, value, what in (
            ("n-layer", 4, "bloques"), ("n-head", 4, "cabezas de atención"), ("n-embd", 256, "ancho"),
            ("seq-len", 128, "longitud de las secuencias"), ("batch-size", 4, "secuencias por microlote"),
            ("grad-accum", 4, "microlotes por paso"), ("vocab-size", 8192, "piezas del tokenizador")):
        parser.add_argument(f"--{name}", type=cli.number(int, low=1), default=value, help=what)
    return parser


def main(argv: list[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.steps < args.skip + 3:  # the last one has no clock time, because it evaluates
        parser.error(f"--steps {args.steps}: hacen falta al menos 3 más que --skip {args.skip}")
    with measure.restored():
        result = race(args)
    measure.write(args.json, result)


if __name__ == "__main__":
    cli.run(main)
