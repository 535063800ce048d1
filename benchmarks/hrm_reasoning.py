"""HRM-Text1 against GPTs of equal parameters and of equal FLOPs on three small reasoning tasks, on the CPU.

    python benchmarks/hrm_reasoning.py --markdown --json hrm_reasoning.json
    python benchmarks/hrm_reasoning.py --quick
    python benchmarks/hrm_reasoning.py --seeds 3,4,5

Tasks are texts over small vocabularies, fresh in every batch. Answers are asked for and never shown: no token of the
input holds one, so that all steps to an answer are taken inside the model, and none can rely on an earlier answer.

    saltos    a permutation of 8 symbols that is one cycle: a word "x>y" for each pair, in any order; then questions, a
              word "kx" each: which symbol is k = 1..4 hops from x
    paridad   32 bits: after each, the parity of all so far
    sudoku    a 4 x 4 Sudoku with one solution, written twice: in the second, the digit of each empty cell. A seed keeps
              48 of the 288 solved boards for its evaluation alone

The same for all: the data and their order, AdamW, schedule, steps, batch, float32. Each gets its best learning rate of
one grid, chosen on a seed that is not reported. "HRM sin ciclos" is HRM with one pass of each stack: it shows how much
of the difference between HRM and a GPT is left when nothing recurs.
"""

import argparse
import dataclasses
import functools
import itertools
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import measure  # noqa: E402

from aura import cli, ops, optim  # noqa: E402
from aura.models import gpt, hrm  # noqa: E402

WIDTH, HEADS, FF = 32, 2, 80
BATCH, EVAL_SEQUENCES = 32, 1024
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
STEPS, QUICK_STEPS = 400, 40
MIN_RATIO, WARMUP, WEIGHT_DECAY, CLIP = 0.1, 0.05, 0.1, 1.0
VALIDATION_SEED, EVAL_OFFSET = 1000, 1_000_000  # EVAL_OFFSET: from a seed to the one of its evaluation's data
TOLERANCE = 0.05  # relative, between sizes that are called equal
SEGMENTS = 3
IGNORED = -100
HRM, SAME_SIZE, SAME_FLOPS = "HRM", "GPT, mismos parámetros", "GPT, mismos FLOP"
NO_CYCLES, WITH_SEGMENTS = "HRM sin ciclos", f"HRM, {SEGMENTS} segmentos"

# ---- Tasks ----------------------------------------------------------------------------------------------------------

SYMBOLS, HOPS, QUESTIONS = 8, 4, 16
PAIRS = SYMBOLS * (1 + HOPS)  # words: the symbols, the questions by k and symbol, the pairs
BITS = 32
SIDE, BOX, HELD_OUT, MIN_GIVENS, MAX_GIVENS = 4, 2, 48, 4, 12


def shuffled(rows, columns, generator):
    """int64 [rows, columns]: in each row 0 ... columns - 1 in random order."""
    return torch.rand(rows, columns, generator=generator).argsort(1)


def hops(count, generator, seed, evaluating):
    """(tokens, targets, levels): `count` permutations with QUESTIONS questions each; levels are k."""
    cycle = shuffled(count, SYMBOLS, generator)
    pairs = PAIRS + SYMBOLS * cycle + cycle.roll(-1, 1)
    table = pairs.gather(1, shuffled(count, SYMBOLS, generator))
    question = shuffled(count, HOPS * SYMBOLS, generator)[:, :QUESTIONS]
    hop, place = question // SYMBOLS + 1, question % SYMBOLS
    asked = SYMBOLS * hop + cycle.gather(1, place)
    answers = cycle.gather(1, (place + hop) % SYMBOLS)
    return torch.cat([table, asked], 1), F.pad(answers, (SYMBOLS, 0), value=IGNORED), F.pad(hop, (SYMBOLS, 0))


def parity(count, generator, seed, evaluating):
    """(tokens, targets, levels): `count` strings of bits; levels are positions, from 1."""
    bits = torch.randint(2, (count, BITS), generator=generator)
    return bits, bits.cumsum(1) % 2, torch.arange(1, BITS + 1).expand_as(bits)


@functools.cache
def every_board():
    """int64 [288, 16]: all boards with each of the digits 1 ... 4 once in every row, column and box."""
    boards = []
    for board in itertools.product(itertools.permutations(range(1, SIDE + 1)), repeat=SIDE):
        columns = zip(*board, strict=True)
        if all(len(set(column)) == SIDE for column in columns) and all(
                len({*board[row][column:column + BOX], *board[row + 1][column:column + BOX]}) == SIDE
                for row in (0, BOX) for column in (0, BOX)):
            boards.append(sum(board, ()))
    return torch.tensor(boards)


@functools.cache
def boards_of(seed, evaluating):
    """The solved boards that a seed evaluates on, or those it trains on."""
    boards = every_board()
    order = torch.randperm(len(boards), generator=torch.Generator().manual_seed(seed))
    return boards[order[:HELD_OUT] if evaluating else order[HELD_OUT:]]


def sudoku(count, generator, seed, evaluating):
    """(tokens, targets, levels): `count` puzzles, 0 for an empty cell; levels are how many of those a puzzle has."""
    boards = boards_of(seed, evaluating)
    solution = boards[torch.randint(len(boards), (count,), generator=generator)]
    givens = keep_unique(solution, torch.randint(MIN_GIVENS, MAX_GIVENS + 1, (count,), generator=generator), generator)
    puzzle = solution * givens
    targets = F.pad(solution.masked_fill(givens, IGNORED), (SIDE * SIDE, 0), value=IGNORED)
    return torch.cat([puzzle, puzzle], 1), targets, (~givens).sum(1, keepdim=True).expand_as(targets)


def keep_unique(solution, wanted, generator):
    """bool [B, 16]: which cells of each solution [B, 16] to give. Cells are removed in random order, except those whose
    removal would allow a second solution, until `wanted` [B] are left or no more can go."""
    differs = solution[:, None] != every_board()
    rows, givens = torch.arange(len(solution)), torch.ones_like(solution, dtype=torch.bool)
    conflicts = differs.sum(2)  # [B, 288]: how many of the givens each board contradicts
    for cell in shuffled(*solution.shape, generator).T:
        without = conflicts - differs[rows, :, cell].int()
        goes = (givens.sum(1) > wanted) & ((without == 0).sum(1) == 1)
        conflicts = torch.where(goes[:, None], without, conflicts)
        givens[rows, cell] = ~goes
    return givens


@dataclasses.dataclass(frozen=True)
class Task:
    """make(count, generator, seed, evaluating) -> (tokens, targets, levels), int64 [count, seq_len] each: the targets
    are IGNORED where nothing is asked, the levels say how hard an answer is. groups: (name, lowest level, highest).
    whole: the name of all answers of a sequence together, where they make one thing."""

    make: Callable
    vocab_size: int
    seq_len: int
    groups: tuple
    whole: str | None = None


TASKS = {
    "saltos": Task(hops, PAIRS + SYMBOLS**2, SYMBOLS + QUESTIONS,
                   tuple((f"k = {k}", k, k) for k in range(1, HOPS + 1))),
    "paridad": Task(parity, 2, BITS, tuple((f"bits {i}-{i + 7}", i, i + 7) for i in range(1, BITS, 8)),
                    "cadenas enteras"),
    "sudoku": Task(sudoku, SIDE + 1, 2 * SIDE * SIDE,
                   tuple((f"{low}-{high} vacías", low, high) for low, high in ((4, 6), (7, 8), (9, 10), (11, 12))),
                   "tableros enteros"),
}


def data(task, count, seed, evaluating=False):
    """Endless batches of a task; a seed gives the same to everybody, and others to its evaluation."""
    generator = torch.Generator().manual_seed(seed + EVAL_OFFSET * evaluating)
    while True:
        yield task.make(count, generator, seed, evaluating)


# ---- Contestants ----------------------------------------------------------------------------------------------------


def training_flops(config):
    """FLOPs per token of the mean step: at first gradients flow through fewer passes of an HRM, for the same share of
    the steps however many there are."""
    if isinstance(config, gpt.GPTConfig):
        return config.flops_per_token()
    return statistics.fmean(config.flops_per_token(hrm.bp_passes(step, 1000)) for step in range(1000))


def matched(like, size, wanted):
    """The GPT as wide as `like` with the number of layers that brings size(config) nearest to `wanted`."""
    configs = [gpt.GPTConfig(like.vocab_size, like.seq_len, layers, like.n_head, like.n_embd, 0.0)
               for layers in range(1, 65)]
    best = min(configs, key=lambda config: abs(size(config) - wanted))
    if abs(size(best) / wanted - 1) > TOLERANCE:
        raise SystemExit(f"ningún GPT de ancho {like.n_embd} se acerca a {wanted:.0f} en un {TOLERANCE:.0%}")
    return best


def contestants(task):
    """{name: config} of those who take part in a task."""
    base = hrm.HRMConfig(task.vocab_size, task.seq_len, n_layer=1, n_head=HEADS, n_embd=WIDTH, n_ff=FF)
    return {
        HRM: base,
        SAME_SIZE: matched(base, gpt.GPTConfig.parameters, base.parameters()),
        SAME_FLOPS: matched(base, gpt.GPTConfig.flops_per_token, training_flops(base)),
        NO_CYCLES: dataclasses.replace(base, h_cycles=1, l_cycles=1),
        WITH_SEGMENTS: dataclasses.replace(base, segments=SEGMENTS),
    }


# ---- One run --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    """What one process is to do."""

    task: str
    name: str
    seed: int
    rate: float
    steps: int


def carry_out(run):
    """Train and evaluate one model; returns what goes into a row. Called in a process of its own."""
    torch.set_num_threads(1)
    task, begin = TASKS[run.task], time.perf_counter()
    model = train(run, contestants(task)[run.name])
    found = evaluate(model, task, next(data(task, EVAL_SEQUENCES, run.seed, evaluating=True)))
    return {**dataclasses.asdict(run), "seconds": time.perf_counter() - begin, **found}


def train(run, config):
    """A fresh model of `config` after the steps of `run`."""
    model = (gpt.GPT if isinstance(config, gpt.GPTConfig) else hrm.HRM)(config).init_weights(run.seed).train()
    optimizer = optim.adamw(model, run.rate, WEIGHT_DECAY)
    batches = data(TASKS[run.task], BATCH, run.seed)
    for step in range(run.steps):
        model.bp_passes = hrm.bp_passes(step, run.steps)
        for group in optimizer.param_groups:
            group["lr"] = optim.warmup_cosine(step, steps=run.steps, warmup_steps=round(WARMUP * run.steps),
                                              lr=run.rate, min_lr=MIN_RATIO * run.rate)
        tokens, targets, _ = next(batches)
        loss = model(tokens, targets) / (targets != IGNORED).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


class Halts:
    """Stands in for a key-value cache, and notes at which segment each token has halted."""

    def __init__(self):
        self.segments = []

    def repeat(self, _, first, slots):
        self.segments.append(first // slots)


@torch.no_grad()
def evaluate(model, task, batch):
    """Loss in nats per answer, and shares of right answers: of all, by group, of whole sequences. With segments also
    the first two after each segment, and the mean number of segments until a token halts, by group. Halting follows the
    rule of generation, but all tokens go on to the last segment, as in training."""
    tokens, targets, levels = batch
    asked = targets != IGNORED
    groups = {name: asked & (levels >= low) & (levels <= high) for name, low, high in task.groups}
    states = list(model.states(tokens)) if isinstance(model, hrm.HRM) else []
    logits = [F.linear(z_h, model.wte.weight) for z_h in states] or [model(tokens)]
    right = [each.argmax(-1) == targets for each in logits]

    def shares(values):
        return {name: values[group].float().mean().item() for name, group in groups.items()}

    found = {"loss": F.cross_entropy(logits[-1].flatten(0, 1), targets.flatten(), ignore_index=IGNORED).item(),
             "right": right[-1][asked].float().mean().item(), "groups": shares(right[-1]),
             "whole": (right[-1] | ~asked).all(1).float().mean().item()}
    if len(states) > 1:
        halts = Halts()
        last = F.linear(model._first_to_halt(states, halts), model.wte.weight)
        used = torch.tensor(halts.segments).view_as(targets)
        found |= {"after_segment": [each[asked].float().mean().item() for each in right],
                  "groups_after_segment": [shares(each) for each in right],
                  "right_halted": (last.argmax(-1) == targets)[asked].float().mean().item(),
                  "segments_used": used[asked].float().mean().item(), "groups_segments_used": shares(used)}
    return found


# ---- All runs -------------------------------------------------------------------------------------------------------


def together(runs, pool):
    """The result of each of `runs`, in the order given; a line is printed as each ends."""
    found, waiting = {}, {pool.submit(carry_out, run): run for run in runs}
    for done in as_completed(waiting):
        row = found[waiting[done]] = done.result()
        print(f"{len(found):>3}/{len(runs)} {row['task']:<8} {row['name']:<23} semilla {row['seed']:>4}  tasa "
              f"{row['rate']:.0e}  pérdida {row['loss']:.3f}  aciertos {row['right']:>6.1%}  {row['seconds']:.0f} s",
              flush=True)
    return [found[run] for run in runs]


def choose_rates(args, pool):
    """(the runs on the validation seed, {(task, name): the rate with the least loss there}). HRM with segments takes
    HRM's rate, as it is compared with nobody."""
    runs = [Run(task, name, VALIDATION_SEED, rate, args.steps)
            for task in args.tasks for name in contestants(TASKS[task]) if name != WITH_SEGMENTS
            for rate in RATES]
    rows = together(runs, pool)
    chosen = {}
    for row in sorted(rows, key=lambda row: (math.isfinite(row["loss"]), -row["loss"])):
        chosen[row["task"], row["name"]] = row["rate"]
    for task in args.tasks:
        chosen[task, WITH_SEGMENTS] = chosen[task, HRM]
    return rows, chosen


def spread(values):
    """{"median", "min", "max"} over the seeds."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def summary(task, name, rows, steps):
    """The row of one contestant at one task, from those of its seeds."""
    config = contestants(TASKS[task])[name]
    row = {"task": task, "name": name, "seeds": [row["seed"] for row in rows], "rate": rows[0]["rate"], "steps": steps,
           "layers": config.n_layer, "parameters": config.parameters(), "flops": training_flops(config),
           **{key: spread([row[key] for row in rows]) for key in ("loss", "right", "whole", "seconds")},
           "groups": {group: spread([row["groups"][group] for row in rows]) for group in rows[0]["groups"]}}
    if name != WITH_SEGMENTS:
        return row
    numbers = range(SEGMENTS)
    return {
        **row,
        "after_segment": [spread([row["after_segment"][i] for row in rows]) for i in numbers],
        "groups_after_segment": {group: [spread([row["groups_after_segment"][i][group] for row in rows])
                                         for i in numbers] for group in row["groups"]},
        "groups_segments_used": {group: spread([row["groups_segments_used"][group] for row in rows])
                                 for group in row["groups"]},
        **{key: spread([row[key] for row in rows]) for key in ("right_halted", "segments_used")},
    }


def announce(args, result):
    """Say what will be run, and how large everybody is."""
    print(f"{result['device']}; {result['extension']}; torch {torch.__version__}; {args.jobs} procesos de un hilo; "
          f"{args.steps} pasos de {BATCH} secuencias; ancho {WIDTH}\nTasas de aprendizaje: "
          f"{', '.join(f'{rate:.0e}' for rate in RATES)}, cada uno la mejor con la semilla {VALIDATION_SEED}")
    for task in args.tasks:
        for name, config in contestants(TASKS[task]).items():
            print(f"{task:<8} {name:<23} {config.n_layer:>2} capas {config.parameters():>7} parámetros "
                  f"{training_flops(config) / 1e6:.3f} MFLOP por token", flush=True)


def race(args):
    """Measure what the arguments ask for, printing as it goes; returns what goes into the JSON file."""
    begin = time.perf_counter()
    result = {"benchmark": "hrm_reasoning", **measure.environment(), "rates": RATES, "validation_seed": VALIDATION_SEED}
    announce(args, result)
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn"), initializer=measure.settle) as pool:
        try:
            result["validation"], rates = choose_rates(args, pool)
            runs = [Run(task, name, seed, rate, args.steps) for (task, name), rate in rates.items()
                    for seed in args.seeds]
            runs.sort(key=lambda run: run.name != WITH_SEGMENTS)  # the longest first, so that no core waits at the end
            result["runs"] = rows = together(runs, pool)
        except BaseException:  # a Ctrl+C, say: nobody waits for the others
            for worker in multiprocessing.active_children():
                worker.kill()
            raise
    result["rows"] = [summary(task, name, [row for row in rows if (row["task"], row["name"]) == (task, name)],
                              args.steps) for task in args.tasks for name in contestants(TASKS[task])]
    result["minutes"] = (time.perf_counter() - begin) / 60
    return result


# ---- Tables ---------------------------------------------------------------------------------------------------------


def share(value):
    """'71 (69-74)', in per cent."""
    return f"{100 * value['median']:.0f} ({100 * value['min']:.0f}-{100 * value['max']:.0f})"


def table(heads, lines):
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in (heads, ["---"] * len(heads), *lines))


def tables(result):
    """Markdown: how often each one is right at each task, and what segments change."""
    parts = []
    for task in dict.fromkeys(row["task"] for row in result["rows"]):
        rows, whole = [row for row in result["rows"] if row["task"] == task], TASKS[task].whole
        groups = list(rows[0]["groups"])
        heads = [f"{task}: aciertos en %", "parámetros", "MFLOP por token", "tasa", "todos",
                 *([whole] if whole else []), *groups]
        lines = [[row["name"], row["parameters"], f"{row['flops'] / 1e6:.2f}", f"{row['rate']:.0e}",
                  share(row["right"]), *([share(row["whole"])] if whole else []),
                  *(share(row["groups"][group]) for group in groups)] for row in rows]
        parts.append(table(heads, lines))
        row = next(row for row in rows if row["name"] == WITH_SEGMENTS)
        heads = [f"{task}, {row['name']}", *(f"tras el {i}.º" for i in range(1, SEGMENTS + 1)), "segmentos hasta parar"]
        used = {**row["groups_segments_used"], "todos": row["segments_used"]}
        after = {**row["groups_after_segment"], "todos": row["after_segment"]}
        parts.append(table(heads, [[group, *map(share, after[group]),
                                    "{median:.2f} ({min:.2f}-{max:.2f})".format_map(used[group])] for group in used]))
    return "\n\n".join(parts)


# ---- Arguments ------------------------------------------------------------------------------------------------------


def seeds(text):
    """Distinct seeds, none of which chose the learning rates."""
    found = measure.numbers(text)
    if VALIDATION_SEED in found or len(set(found)) < len(found) or not all(0 <= seed < EVAL_OFFSET for seed in found):
        raise argparse.ArgumentTypeError(f"{text!r}: se esperan semillas distintas de 0 a {EVAL_OFFSET - 1}, sin la "
                                         f"{VALIDATION_SEED}, con la que se eligen las tasas")
    return found


def build_parser():
    parser = cli.Parser(description="Compara HRM-Text1 con GPT de sus parámetros y de sus FLOP en tres "
                                    "tareas de razonamiento, en la CPU.")
    parser.add_argument("--json", type=measure.file, metavar="FICHERO", help="dónde escribir los resultados")
    parser.add_argument("--markdown", action="store_true", help="imprime al final las tablas en Markdown")
    parser.add_argument("--tasks", type=measure.names(*TASKS), default=",".join(TASKS),
                        help="tareas")
    parser.add_argument("--seeds", type=seeds, default="0,1,2", help="semillas")
    parser.add_argument("--jobs", type=cli.number(int, low=1), default=os.cpu_count() or 1,
                        help="procesos, de un hilo cada uno")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=cli.number(int, low=1), default=STEPS, help="pasos")
    length.add_argument("--quick", dest="steps", action="store_const", const=QUICK_STEPS,
                        help=f"{QUICK_STEPS} pasos: funciona, pero nadie aprende mucho")
    return parser


def main(argv=None):
    args = build_parser().parse_args(argv)
    ops.use("auto")  # builds our kernels once, before there are several processes
    result = race(args)
    print(f"{result['minutes']:.1f} minutos")
    if args.markdown:
        print(f"\n{tables(result)}")
    measure.write(args.json, result)


if __name__ == "__main__":
    cli.run(main)
