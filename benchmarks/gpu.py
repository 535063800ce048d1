"""Our CUDA kernels against torch's and against what the card can do: norms, activations, rotary positions, loss,
attention, documents, a training step.

    python benchmarks/gpu.py --json gpu.json --markdown gpu.md
    python benchmarks/gpu.py --learn                    # from then on --attention auto knows what is faster here
    python benchmarks/gpu.py --only attention --seq-len 1024,4096 --head-width 80,96
    python benchmarks/gpu.py --only step --nanogpt ../nanoGPT

Everybody works in one process, in turns, timed by the card's own events around many calls, after a warm-up, on several
copies of the inputs, more than the card's cache holds together. Before a case is timed, everybody's results and
gradients are compared with float64: a peer that is wrong, or that torch refuses, is left out with a line; where ours
fails, the row says so, the rest is measured, and the exit code is 1. torch.compile takes part in norms of 1024 and 4096
columns, in activations, rotary positions and the loss, and in all training steps but HRM's; there "ours" is the faster
of our kernels with and without torch.compile, and the slower one is told beside the best rival. The ceilings are
measured in the same run: a copy of 1 GiB, read and written, and torch.mm of 8192^3; and, told beside the first, a copy
of 32 MiB, as much as a norm of 1024 columns reads. The FLOP of attention are 4 T S D per head forward and 10 T S D
backward, half of that where it is causal, even for those who compute more; on Hopper our kernels of mma.sync, which all
cards have, take part beside those of wgmma. The bytes of all other cases are those of each input read once and each
output written once. The loss is that of existing logits, timed together with its gradient, which ours writes in their
place. Training steps are of gpt2 and of the largest models the scripts train, with all micro-batches for a preset of
train_tensordock.py; FLOP are by the model's own function, and for these presets the memory is put beside what
aura/plan.py says.
"""

import argparse
import contextlib
import faulthandler
import functools
import gc
import sys
import time
import traceback
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import gpu_cases  # noqa: E402
import gpu_measure  # noqa: E402
import gpu_steps  # noqa: E402
import measure  # noqa: E402

from aura import cli, compilation, cuda_extension, ops, speeds  # noqa: E402
from aura.errors import UserError  # noqa: E402

MODEL_ROUNDS = 3  # a step of the largest takes seconds
PART_SECONDS = 420  # that a case may take, its compilation included
WITHOUT_CARD = "Omitido: hace falta una GPU de NVIDIA con torch para CUDA y nvcc"


def case_rows(make, rounds, clock, ceilings):
    """The rows of a case, checked first."""
    case = make()
    errors = gpu_measure.check(case)
    rows = []
    for direction in case.work:
        samples = gpu_measure.take_turns(gpu_measure.calls(case, direction), rounds, clock)
        rows += gpu_measure.rows_of(case, direction, samples, errors, ceilings)
    return rows


def model_rows(make, rounds, clock, ceilings):
    """The rows of a Training, made beside what others hold."""
    held = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    return gpu_steps.training_rows(make(), rounds, clock, ceilings, held)


def parts(args, clock, ceilings):
    """(name, function that gives its rows) of all that is asked for, in the order it is measured."""
    for section, make in gpu_cases.cases(args):
        if section in args.only:
            name = " ".join([section, *map(str, make.args)])
            yield name, functools.partial(case_rows, make, args.rounds, clock, ceilings)
    if "step" not in args.only:
        return
    if "gpt2" in args.models:
        yield "gpt2", functools.partial(gpu_steps.gpt2_rows, args, clock, ceilings)
    for make in gpu_steps.trainings("cuda"):
        if make.args[0] in args.models:
            yield make.args[0], functools.partial(model_rows, make, min(args.rounds, MODEL_ROUNDS), clock, ceilings)


def rows_with_room(name, make_rows):
    """make_rows(); no rows where the card has no room for them, and one that says why where they fail. A kernel that
    hangs ends the program."""
    torch.compiler.reset()  # closures of one function share a limit of eight compilations
    gc.collect()  # cycles of what was measured before hold its memory
    torch.cuda.empty_cache()
    # Python's own signals would wait as long as the card.
    faulthandler.dump_traceback_later(PART_SECONDS, exit=True, file=sys.__stderr__)
    try:
        return make_rows()
    except torch.OutOfMemoryError as refusal:
        print(f"  {name} no se mide: {gpu_measure.reason(refusal)}", file=sys.stderr)
        return []
    except Exception as problem:  # whatever it is, the others can be measured
        traceback.print_exc()
        return [{"op": name, "failed": gpu_measure.reason(problem)}]
    finally:
        faulthandler.cancel_dump_traceback_later()


def lost_card():
    """Why this process can no longer use the card, as after a kernel that wrote out of bounds; "" where it can."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as problem:
        return gpu_measure.reason(problem)
    return ""


# ---- Telling --------------------------------------------------------------------------------------------------------


def markdown(result):
    """The rows as a table: the fastest peer of each case and direction, and what part of the ceiling it and ours
    reach."""
    lines = ["| operación | forma | sentido | propio, ms | mejor rival | rival, ms | razón | del techo | el rival |",
             "| --- | --- | --- | ---: | --- | ---: | ---: | ---: | ---: |"]
    groups = {}
    measured, failed = split(result["rows"])
    for row in measured:
        groups.setdefault((row["op"], row["variant"], tuple(row["shape"]), row["direction"]), []).append(row)
    for (op, variant, shape, direction), rows in groups.items():
        peers = sorted((row for row in rows if row["peer"] not in gpu_cases.FURTHER), key=lambda row: row["peer_ms"])
        for row in (*peers[:1], *(row for row in rows if row["peer"] in gpu_cases.FURTHER)):
            lines.append(f"| {op}, {variant} | {' x '.join(map(str, shape))} | {direction} | {row['ours_ms']:.3f} | "
                         f"{row['peer']} | {row['peer_ms']:.3f} | {row['ratio']:.2f} ({row['ratio_min']:.2f}-"
                         f"{row['ratio_max']:.2f}) | {row['share_of_ceiling']:.0%} | "
                         f"{row['peer_share_of_ceiling']:.0%} |")
    if failed:
        lines += ["", "Fallan:", "", *(f"- {row['op']}: {row['failed']}" for row in failed)]
    return "\n".join(lines) + "\n"


def split(rows):
    """(rows that were measured, those that failed)."""
    return [row for row in rows if "failed" not in row], [row for row in rows if "failed" in row]


def print_row(row):
    if "failed" in row:
        print(f"{row['op']}: FALLA: {row['failed']}", flush=True)
        return
    print(f"{row['op']:18} {row['variant']:22} {'x'.join(map(str, row['shape'])):20} {row['direction']:9} "
          f"{row['ours_ms']:9.3f} ms  {row['peer']:22} {row['peer_ms']:9.3f} ms  x {row['ratio']:5.2f}  "
          f"{row['share_of_ceiling']:4.0%} de {row['ceiling']}, el rival {row['peer_share_of_ceiling']:.0%}"
          f"{told_memory(row)}", flush=True)


def told_memory(row):
    """How much memory a training step took, and what part of the plan that is; "" for other rows."""
    if "peak_bytes" not in row:
        return ""
    ratio = f" (sin compilar, {row['memory_ratio']:.2f} de lo previsto)" if "planned_bytes" in row else ""
    return f"; memoria {row['peak_bytes'] / 1e9:.1f} GB{ratio}, el rival {row['peer_peak_bytes'] / 1e9:.1f} GB"


def write(args, result):
    """The files that were asked for."""
    measure.write(args.json, result)
    if args.markdown:
        Path(args.markdown).write_text(markdown(result), encoding="utf-8")


def learn(rows):
    """Save which operations our kernels do faster on this card, for --attention auto, and keep what was known of those
    not measured now. Nothing is saved where a part failed: auto would go by the neighbouring sizes."""
    if split(rows)[1]:
        print("No se guarda nada para --attention auto: hay partes que fallan.")
        return
    path, before = cuda_extension.speeds_file(), None
    with contextlib.suppress(UserError):  # a damaged file, in whose place a new one comes
        before = cuda_extension.known_speeds()
    known = speeds.Speeds({**(before.cells if before else {}), **speeds.learnt(rows).cells})
    speeds.write(path, known)
    print(f"--attention auto usará en esta tarjeta los núcleos propios de: {', '.join(known.operations()) or 'nada'} "
          f"({path})")


SECTIONS = ("norms", "activations", "rotary", "loss", "attention", "documents", "gradients", "step")


def head_widths(text):
    """A type for argparse: widths of heads that there are kernels for."""
    for width in (found := measure.sizes(text)):
        if width not in ops.GPU_WIDTHS:
            raise argparse.ArgumentTypeError(f"{width} no es un múltiplo de 8 hasta {ops.GPU_WIDTHS[-1]}")
    return found


def build_parser():
    parser = cli.Parser(description="Mide los núcleos de CUDA frente a los de torch, en una GPU.")
    parser.add_argument("--only", type=measure.names(*SECTIONS), default=",".join(SECTIONS), metavar="PARTES",
                        help="solo estas partes")
    parser.add_argument("--dtype", type=measure.names(*gpu_cases.DTYPES), default="bf16",
                        help="tipos de los tensores")
    parser.add_argument("--seq-len", type=measure.sizes, default="512,1024,2048,4096", metavar="T,T,...",
                        help="longitudes de la atención")
    parser.add_argument("--head-width", type=head_widths, default=",".join(map(str, gpu_cases.HEAD_WIDTHS)),
                        metavar="D,D,...", help="anchos de las cabezas de la atención y las rotaciones")
    parser.add_argument("--columns", type=measure.sizes, default=",".join(map(str, gpu_cases.NORM_COLUMNS)),
                        metavar="N,N,...", help="anchos de las normas")
    parser.add_argument("--models", type=measure.names(*gpu_steps.MODELS), default=",".join(gpu_steps.MODELS),
                        metavar="MODELOS", help="modelos de los pasos de entrenamiento")
    parser.add_argument("--rounds", type=cli.number(int, low=1), default=7, help="rondas de cada comparación")
    parser.add_argument("--learn", action="store_true",
                        help="guarda qué es más rápido en esta tarjeta, para --attention auto")
    parser.add_argument("--nanogpt", metavar="CARPETA", help="copia de nanoGPT, rival del paso de entrenamiento")
    parser.add_argument("--json", type=measure.file, metavar="FICHERO", help="dónde escribir los resultados")
    parser.add_argument("--markdown", type=measure.file, metavar="FICHERO", help="dónde escribir la tabla")
    return parser


def race(args):
    """Measure what the arguments ask for, telling it as it goes; returns what goes into the JSON file."""
    began, clock = time.perf_counter(), gpu_measure.timer("cuda")
    found = gpu_measure.ceilings(clock)
    result = {"benchmark": "gpu", **measure.environment(), "device": torch.cuda.get_device_name(),
              "capability": torch.cuda.get_device_capability(), "cuda": torch.version.cuda,
              "cache_bytes": gpu_measure.cache_bytes(torch.device("cuda")), "ceilings": found, "seconds": 0.0,
              "rows": []}
    print(f"{result['device']}, torch {torch.__version__}: copia {found['copy'] / 1e9:.0f} GB/s "
          f"({found['small copy'] / 1e9:.0f} si mueve 64 MiB), torch.mm en bf16 {found['matmul'] / 1e12:.0f} TFLOP/s")
    for name, make_rows in parts(args, clock, found):
        rows = rows_with_room(name, make_rows)
        for row in rows:
            print_row(row)
        result["rows"] += rows
        result["seconds"] = time.perf_counter() - began
        write(args, result)  # each time: a run that is cut off keeps what it has measured
        lost = lost_card() if split(rows)[1] else ""
        if lost:
            print(f"La tarjeta ya no responde a este proceso ({lost}): no se mide lo que falta.")
            break
    return result


def main(argv=None):
    """Returns the exit code: 1 where something of ours fails."""
    args = build_parser().parse_args(argv)
    try:
        cuda_extension.load()
    except compilation.Unavailable as problem:
        print(f"{WITHOUT_CARD}: {problem}.")
        return 0
    with measure.restored():
        result = race(args)
    failed = split(result["rows"])[1]
    print(f"Todo en {result['seconds']:.0f} s{f'; fallan {len(failed)}' if failed else ''}.")
    if args.learn:
        learn(result["rows"])
    return int(bool(failed))


if __name__ == "__main__":
    cli.run(main)
