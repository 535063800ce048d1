"""Our kernels against torch's on the CPU: attention, norms, activation, linear layer, loss.

    python benchmarks/kernels.py --json kernels.json
    python benchmarks/kernels.py --quick                                         under two minutes
    python benchmarks/kernels.py --only attention,dropout --dtype bf16 --seq-len 512,1024 --threads 2
    python benchmarks/kernels.py --only call --threads 1                         what a call costs beside its work

Everybody works in one process, in turns, round by round, under the allocator settings that training uses. Before a
case is timed its results are compared with float64, with the dropout mask that each has drawn. Attention starts from
what a GPT has, the packed projection [B, T, 3, H, D] or three tensors [B, T, H, D], and ends with [B, T, H * D]. Its
backward ends with the gradient of the same tensors: a peer that makes three gradients has to stack them within the
measured time for a packed tensor ('packed'), but not for three ('separate'). Backward is timed alone, after one forward
that is not. The time that torch.compile and flex_attention take to compile is not counted.
"""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import measure  # noqa: E402
from kernels_cases import (  # noqa: E402
    BACKWARD,
    BOTH,
    FORWARD,
    INFERENCE,
    LENGTHS,
    QUICK_LENGTHS,
    SECTIONS,
    SEED,
    Case,
    Contestant,
    refusals,
)
from kernels_table import markdown, print_errors, summarize  # noqa: E402

from aura import cli, start  # noqa: E402

SLOW_PRODUCTS = 4  # times what float32 takes: bfloat16 is then left out, whose few products would take most of the time


def outcome(case: Case, contestant: Contestant) -> dict[str, tuple[float, float]]:
    """Direction -> errors against float64."""
    outputs, gradients = case.expected(contestant)
    torch.manual_seed(SEED)
    with contestant.context():
        results = contestant.run(*case.inputs)
    found = {FORWARD: measure.errors(map(case.part, results), outputs)}
    if contestant.directions != (FORWARD,):
        given = torch.autograd.grad(results, case.inputs, case.upstream)
        found[BACKWARD] = measure.errors(map(case.part, given), gradients)
    found[INFERENCE], found[BOTH] = found[FORWARD], found.get(BACKWARD)
    return found


def action(case: Case, contestant: Contestant, direction: str) -> Callable:
    """What the clock runs."""
    run, inputs, upstream = contestant.run, case.inputs, case.upstream
    if direction == FORWARD:
        return lambda: run(*inputs)
    if direction == INFERENCE:
        return torch.no_grad()(lambda: run(*inputs))
    if direction == BOTH:
        return lambda: torch.autograd.grad(run(*inputs), inputs, upstream)
    with contestant.context():
        outputs = run(*inputs)
    return lambda: torch.autograd.grad(outputs, inputs, upstream, retain_graph=True)


def measure_case(case: Case, threads: int, errors: dict, ceilings: dict[str, float], args) -> list[dict]:
    rows = []
    mine = case.contestants[0]
    for direction in case.directions:
        playing = [c for c in case.contestants if direction in c.directions or case.directions == (INFERENCE, BOTH)]
        actions = {c.name: action(case, c, direction) for c in playing}
        for contestant in playing:
            if contestant.kind in ("compile", "flex"):  # compiled anew for each number of threads
                with contestant.context():
                    actions[contestant.name]()
        samples = measure.take_turns(
            actions,
            {c.name: c.context for c in playing},
            {c.name: c.kind for c in playing},
            rounds=args.rounds, budget_s=args.seconds)
        limits, amount = case.work[direction]
        ceiling = max(limits, key=ceilings.__getitem__)
        for peer in playing[1:]:
            times = measure.comparison(samples[mine.name], samples[peer.name])
            rows.append({
                "op": case.op, "dtype": case.dtype, "variant": case.variant, "direction": direction,
                "shape": list(case.shape), "threads": threads, "peer": peer.name, "peer_kind": peer.kind, **times,
                "error": errors[mine.name][direction][0], "peer_error": errors[peer.name][direction][0],
                "max_error": errors[mine.name][direction][1], "peer_max_error": errors[peer.name][direction][1],
                "share_of_ceiling": amount / (times["ours_ms"] / 1e3) / (ceilings[ceiling] * 1e9),
                "ceiling": ceiling,
            })
    return rows


def print_row(row: dict) -> None:
    shape = "x".join(map(str, row["shape"]))
    ratio = f"{row['ratio']:.2f} ({row['ratio_min']:.2f}-{row['ratio_max']:.2f})"
    times = " ".join(f"{row[name]:>8.3f}" for name in ("ours_ms", "ours_min", "ours_p90"))
    theirs = " ".join(f"{row[name]:>8.3f}" for name in ("peer_ms", "peer_min", "peer_p90"))
    print(f"{row['op']:20} {row['dtype']} {row['variant']:27} {row['direction']:20} {shape:15} {row['threads']:>2}"
          f" {times} {row['peer']:31} {theirs} {ratio:>19} {row['error']:.2e} {row['peer_error']:.2e}"
          f" {row['max_error']:.1e} {row['peer_max_error']:.1e} {row['share_of_ceiling']:>5.0%}", flush=True)


def print_heads() -> None:
    times = f"{'mediana':>8} {'mínimo':>8} {'p90':>8}"
    print(f"{'operación':20} tipo {'variante':27} {'sentido':20} {'forma':15} {'h.':>2} {times} {'rival':31} {times}"
          f" {'razón (mín-máx)':>19} {'error':8} {'su error':8} {'máximo':7} {'su máx.':7} techo")


def worthwhile() -> tuple[list[str], list[str]]:
    """(the dtypes that somebody trains in on this processor, why another is left out)."""
    times = start.times_as_long(torch.bfloat16)
    if times < SLOW_PRODUCTS:
        return list(measure.DTYPES), []
    return ["fp32"], [f"bf16 no se mide: un producto tarda {times:.0f} veces lo que en fp32, y nadie entrena así; con "
                      "--dtype fp32,bf16 se mide"]


def build_parser() -> cli.Parser:
    parser = cli.Parser(description="Mide las operaciones propias frente a las de torch, en la CPU.")
    parser.add_argument("--json", type=measure.file, metavar="FICHERO", help="dónde escribir los resultados")
    parser.add_argument("--markdown", action="store_true",
                        help="a la salida solo la tabla del resumen; lo demás, a la de errores")
    parser.add_argument("--only", type=measure.names(*SECTIONS), default=None, metavar="PARTES",
                        help=f"solo estas partes, separadas por comas: {', '.join(SECTIONS)}")
    parser.add_argument("--threads", type=measure.threads, default="1,2", help="números de hilos")
    parser.add_argument("--dtype", type=measure.names(*measure.DTYPES), default=None,
                        help="tipos de los tensores (por defecto: fp32 y, si el procesador no lo multiplica mucho más "
                             "despacio, bf16)")
    parser.add_argument("--seq-len", type=measure.sizes, default=None,
                        help=f"longitudes T de la atención (por defecto: {','.join(map(str, LENGTHS))})")
    parser.add_argument("--rounds", type=cli.number(int, low=1), default=5, help="rondas como mínimo, 3 si duran mucho")
    parser.add_argument("--seconds", type=cli.number(float, low=0), default=None,
                        help="tiempo mínimo por comparación (por defecto: 0.2; con --quick, 0.05)")
    parser.add_argument("--quick", action="store_true", help="menos formas y menos tiempo: menos de dos minutos")
    return parser


def race(args) -> dict:
    """Measure what the arguments ask for, printing as it goes; returns what goes into the JSON file."""
    neighbours = measure.Neighbours()
    ceilings = {}
    for threads in args.threads:
        torch.set_num_threads(threads)
        ceilings[threads] = measure.ceilings(args.quick)
    left_out = []
    if args.dtype is None:
        args.dtype, left_out = worthwhile()
    notes = left_out + refusals(args.dtype)
    result = {"benchmark": "kernels", **measure.environment(), "notes": notes, "ceilings": ceilings}
    print(f"{result['device']}; {result['extension']} ({result['instruction_set']}); torch {torch.__version__} "
          f"({result['torch_instruction_set']})")
    for threads, found in ceilings.items():
        print(f"techo con {threads} hilos: " + ", ".join(f"{name} {value:.0f}" for name, value in found.items()))
    print("\n".join(result["notes"]))
    print_heads()
    rows = result["rows"] = []
    for section in args.only or [name for name in SECTIONS if not args.quick or name not in ("compile", "separate")]:
        for make in SECTIONS[section](args):
            case = make()
            torch.set_num_threads(max(args.threads))
            errors = {contestant.name: outcome(case, contestant) for contestant in case.contestants}
            for threads in args.threads:
                torch.set_num_threads(threads)
                torch._dynamo.reset()  # what is compiled is compiled for a number of threads
                for row in measure_case(case, threads, errors, ceilings[threads], args):
                    rows.append(row)
                    print_row(row)
    print_errors(rows)
    result["others_share"] = neighbours.warn()
    result["summary"] = summarize(rows)
    return result


def main(argv: list[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    args.seq_len = args.seq_len or list(QUICK_LENGTHS if args.quick else LENGTHS)
    args.seconds = args.seconds if args.seconds is not None else (0.05 if args.quick else 0.2)
    measure.settle()
    with measure.restored(), contextlib.redirect_stdout(sys.stderr if args.markdown else sys.stdout):
        result = race(args)
    print(markdown(result["summary"]))
    measure.write(args.json, result)


if __name__ == "__main__":
    cli.run(main)
