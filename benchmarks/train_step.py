"""One training step of gpt2: ours with our kernels, ours with torch's attention and norms, and nanoGPT's model.

    python benchmarks/train_step.py --json train_step.json
    git clone https://github.com/karpathy/nanoGPT
    python benchmarks/train_step.py --nanogpt nanoGPT --dtype fp32,bf16

A step is forward, loss, backward, clipping of the gradients and fused AdamW, for everybody the same, from the same
weights, on the same tokens, in one process, in turns. Before anything is timed the logits of each are compared with
float64. nanoGPT's model is taken as it is, but for its GELU: GPT-2's is the tanh form, nanoGPT's the exact one, so for
the same function it is replaced (`nanoGPT`); the model left as it is takes part too (`nanoGPT, exact GELU`). The peak
of resident memory is that of a process that does a few steps with one of the models alone.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import measure  # noqa: E402

import train_gpt2_spanish  # noqa: E402
from aura import cli, ops, optim, products  # noqa: E402
from aura.models import gpt  # noqa: E402

CONFIG = dataclasses.replace(gpt.PRESETS["gpt2"], vocab_size=50_257)
BATCH = 2
SEED = 1234
LEARNING_RATE, WEIGHT_DECAY, CLIP = 6e-4, 0.1, 1.0
DROPOUT, DROPOUT_LENGTH = 0.1, 512
MEMORY_STEPS = 3
LONG_S = 60.0  # a comparison that has taken this long ends after 3 rounds
TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}  # relative RMS error of the logits
OURS_CHOICE = "fused"  # what is measured as ours, a mode of ops.using
OURS, SDPA, NANOGPT, EXACT = "ours", "ours with sdpa", "nanoGPT", "nanoGPT, exact GELU"


@dataclasses.dataclass
class Contestant:
    """A model that takes part. loss(model, batch) is the mean cross-entropy of a batch [B, T + 1]; rename gives its
    name for a tensor of ours."""

    name: str
    model: nn.Module
    logits: Callable
    loss: Callable
    context: Callable = contextlib.nullcontext
    rename: Callable = lambda name: name

    def __post_init__(self):
        self.optimizer = optim.adamw(self.model, LEARNING_RATE, WEIGHT_DECAY)

    def load(self, weights: dict) -> None:
        """Take the weights of our model, by our names."""
        self.model.load_state_dict({self.rename(name): tensor for name, tensor in weights.items()}, strict=False)

    def step(self, batch: torch.Tensor, dtype: str, micro_batches: int = 1, run: nn.Module | None = None):
        """Take a step; returns the norm of the gradients. micro_batches: how many parts of the batch go through the
        model one after another. run: what is called in the model's place, such as torch.compile of it."""
        self.optimizer.zero_grad(set_to_none=True)
        with products.step(self.model), products.adding(True):
            for part in batch.chunk(micro_batches):
                with autocast(dtype, batch.device.type):
                    loss = self.loss(self.model if run is None else run, part) / micro_batches
                loss.backward()
        parameters = list(self.model.parameters())
        norm = ops.total_norm([p.grad for p in parameters if p.grad is not None])
        nn.utils.clip_grads_with_norm_(parameters, CLIP, norm)
        self.optimizer.step()
        return norm


def autocast(dtype: str, device: str = "cpu"):
    return torch.autocast(device, torch.bfloat16, enabled=dtype == "bf16")


def our_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss, count = train_gpt2_spanish.next_token_loss(model, batch)
    return loss / count


def ours(name: str, choice: str, dropout: float) -> Contestant:
    model = gpt.GPT(dataclasses.replace(CONFIG, dropout=dropout))
    return Contestant(name, model, lambda model, tokens: model(tokens), our_loss, lambda: ops.using(choice))


@functools.cache
def nanogpt_module(folder: str):
    """nanoGPT's model.py, imported from a checkout."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(folder, "model.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks its module up there
    spec.loader.exec_module(module)
    return module


def nanogpt(name: str, folder: str, dropout: float) -> Contestant:
    theirs = nanogpt_module(folder)
    sizes = {"vocab_size": CONFIG.vocab_size, "block_size": CONFIG.seq_len, "n_layer": CONFIG.n_layer,
             "n_head": CONFIG.n_head, "n_embd": CONFIG.n_embd}
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its number of parameters
        model = theirs.GPT(theirs.GPTConfig(**sizes, dropout=dropout, bias=True))
    if name != EXACT:
        for module in model.modules():
            if isinstance(module, nn.GELU):
                module.approximate = "tanh"

    def logits(model, tokens):  # without targets it returns only those of the last position
        return model(tokens, tokens.contiguous())[0]

    def loss(model, batch):
        return model(batch[:, :-1], batch[:, 1:].contiguous())[1]

    return Contestant(name, model, logits, loss, rename="transformer.{}".format)


def contestants(args, dropout: float, wanted: list[str] | None = None) -> list[Contestant]:
    """Everybody, or those `wanted`; ours first."""
    makers = {OURS: lambda: ours(OURS, OURS_CHOICE, dropout), SDPA: lambda: ours(SDPA, "sdpa", dropout)}
    if args.nanogpt:
        for name in (NANOGPT, EXACT):
            makers[name] = functools.partial(nanogpt, name, args.nanogpt, dropout)
    return [make() for name, make in makers.items() if wanted is None or name in wanted]


def tokens(length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(CONFIG.vocab_size, (BATCH, length + 1), generator=generator)


# ---- Measuring ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def same_start(playing: list[Contestant], batch: torch.Tensor, dtype: str) -> dict[str, float]:
    """Give all the same fresh weights. Returns the relative RMS error of each one's logits against our model's with
    attention written out, in float64; ends the program where one computes a different function."""
    model = gpt.GPT(CONFIG).init_weights(SEED)
    for contestant in playing:
        contestant.load(model.state_dict())
    with ops.using("reference"):
        exact = model.double().eval()(batch[:, :-1])
    found = {}
    for contestant in playing:
        contestant.model.eval()
        with contestant.context(), autocast(dtype):
            logits = contestant.logits(contestant.model, batch[:, :-1])
        contestant.model.train()
        found[contestant.name], _ = measure.errors([logits], [exact])
        if contestant.name != EXACT and not found[contestant.name] < TOLERANCE[dtype]:
            raise SystemExit(f"{contestant.name} no calcula lo mismo: error relativo {found[contestant.name]:.1e}")
    return found


def measure_steps(playing, length, dtype, dropout, threads, ceilings, errors, args) -> list[dict]:
    batch = tokens(length)
    steps = {c.name: functools.partial(c.step, batch, dtype) for c in playing}
    for contestant in playing:
        if not contestant.optimizer.state:  # made in the first step
            with contestant.context():
                steps[contestant.name]()
    samples = measure.take_turns(steps, {c.name: c.context for c in playing}, rounds=args.rounds, long_s=LONG_S)
    flops = dataclasses.replace(CONFIG, seq_len=length).flops_per_token() * BATCH * length
    ceiling = max(measure.product_ceilings(dtype), key=ceilings.__getitem__)
    mine = playing[0].name
    rows = []
    for peer in playing[1:]:
        times = measure.comparison(samples[mine], samples[peer.name])
        rows.append({
            "op": "training step gpt2", "dtype": dtype, "variant": f"dropout {dropout}", "direction": "step",
            "shape": [BATCH, length], "threads": threads, "peer": peer.name, **times,
            "ours_tokens_per_s": BATCH * length / times["ours_ms"] * 1e3,
            "peer_tokens_per_s": BATCH * length / times["peer_ms"] * 1e3,
            "error": errors[mine], "peer_error": errors[peer.name],
            "share_of_ceiling": flops / (times["ours_ms"] / 1e3) / (ceilings[ceiling] * 1e9), "ceiling": ceiling,
        })
    return rows


def peak_memory(args, name: str, length: int, dtype: str) -> int:
    """Peak resident memory, in MiB, of a process that does a few steps with one model alone (Linux)."""
    command = [sys.executable, __file__, "--memory-of", name, "--seq-len", str(length), "--dtype", dtype,
               "--threads", str(max(args.threads))]
    command += ["--nanogpt", args.nanogpt] if args.nanogpt else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"no se pudo medir la memoria de {name}: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout)


def own_peak(args) -> int:
    """In the child: a few steps with one model, then the high-water mark of this process."""
    torch.set_num_threads(max(args.threads))
    [contestant] = contestants(args, 0.0, [args.memory_of])
    batch = tokens(args.seq_len[0])
    with contestant.context():
        for _ in range(MEMORY_STEPS):
            contestant.step(batch, args.dtype[0])
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) // 1024


def print_row(row: dict) -> None:
    ratio = f"{row['ratio']:.2f} ({row['ratio_min']:.2f}-{row['ratio_max']:.2f})"
    times = " ".join(f"{row[name]:>7.0f}" for name in ("ours_ms", "ours_min", "ours_p90"))
    theirs = " ".join(f"{row[name]:>7.0f}" for name in ("peer_ms", "peer_min", "peer_p90"))
    print(f"{row['dtype']} {row['variant']:11} {row['shape'][0]}x{row['shape'][1]:<4} {row['threads']:>2} {times}"
          f" {row['ours_tokens_per_s']:>8.0f} {row['peer']:19} {theirs} {row['peer_tokens_per_s']:>8.0f} {ratio:>17}"
          f" {row['error']:.1e} {row['peer_error']:.1e} {row['share_of_ceiling']:>5.0%}", flush=True)


def print_heads() -> None:
    times = f"{'mediana':>7} {'mínimo':>7} {'p90':>7} {'tokens/s':>8}"
    print(f"tipo {'variante':11} {'B x T':6} h. {times} {'rival':19} {times} {'razón (mín-máx)':>17} {'error':7} "
          f"{'su err.':7} techo")


def race(args) -> dict:
    """Measure what the arguments ask for, printing as it goes; returns what goes into the JSON file."""
    neighbours = measure.Neighbours()
    ceilings = {}
    for threads in args.threads:
        torch.set_num_threads(threads)
        ceilings[threads] = measure.ceilings()
    result = {"benchmark": "train_step", **measure.environment(), "ceilings": ceilings}
    print(f"{result['device']}; {result['extension']} ({result['instruction_set']}); torch {torch.__version__} "
          f"({result['torch_instruction_set']}); milisegundos por paso")
    if not args.nanogpt:
        print("Sin nanoGPT: git clone https://github.com/karpathy/nanoGPT y --nanogpt nanoGPT")
    memory = result["peak_memory_mib"] = []
    if not args.no_memory and Path("/proc/self/status").exists():
        for length in args.seq_len:
            for name in [OURS, SDPA, *([NANOGPT, EXACT] if args.nanogpt else [])]:
                memory.append({"model": name, "dtype": args.dtype[0], "shape": [BATCH, length],
                               "mib": peak_memory(args, name, length, args.dtype[0])})
                print(f"memoria residente máxima, {name}, T {length}: {memory[-1]['mib']} MiB", flush=True)
    print_heads()
    rows = result["rows"] = []
    cases = [(0.0, length) for length in args.seq_len]
    cases += [(DROPOUT, length) for length in args.seq_len if length == DROPOUT_LENGTH]
    playing, built = [], None
    for dropout, length in cases:
        if dropout != built:
            playing.clear()  # before the next models take their gigabytes
            playing, built = contestants(args, dropout), dropout
        for dtype in args.dtype:
            torch.set_num_threads(max(args.threads))
            errors = same_start(playing, tokens(length), dtype)
            for threads in args.threads:
                torch.set_num_threads(threads)
                for row in measure_steps(playing, length, dtype, dropout, threads, ceilings[threads], errors, args):
                    rows.append(row)
                    print_row(row)
    result["others_share"] = neighbours.warn()
    return result


def markdown(rows: list[dict]) -> str:
    """A line for each peer, type, length and number of threads."""
    lines = ["| un paso de gpt2 | hilos | nuestro | rival | | razón (mín-máx) |", "|---|---|---|---|---|---|"]
    for row in rows:
        lines.append(f"| {row['dtype']}, T {row['shape'][1]}, {row['variant']} | {row['threads']} "
                     f"| {row['ours_ms']:.0f} ms, {row['ours_tokens_per_s']:.0f} tokens/s | {row['peer']} "
                     f"| {row['peer_ms']:.0f} ms, {row['peer_tokens_per_s']:.0f} tokens/s "
                     f"| {row['ratio']:.2f} ({row['ratio_min']:.2f}-{row['ratio_max']:.2f}) |")
    return "\n".join(lines)


def build_parser() -> cli.Parser:
    parser = cli.Parser(description="Mide un paso de entrenamiento de gpt2, en la CPU.")
    parser.add_argument("--json", type=measure.file, metavar="FICHERO", help="dónde escribir los resultados")
    parser.add_argument("--markdown", action="store_true", help="escribe al final una tabla de Markdown")
    parser.add_argument("--nanogpt", metavar="CARPETA",
                        help="copia de https://github.com/karpathy/nanoGPT; sin ella, su modelo no participa")
    parser.add_argument("--threads", type=measure.threads, default="1,2", help="números de hilos")
    parser.add_argument("--seq-len", type=measure.sizes, default="128,512", help="longitudes")
    parser.add_argument("--dtype", type=measure.names(*measure.DTYPES), default="fp32",
                        help="fp32, y bf16 con autocast")
    parser.add_argument("--rounds", type=cli.number(int, low=1), default=5, help="rondas, 3 si duran mucho")
    parser.add_argument("--no-memory", action="store_true", help="sin medir la memoria, que pide un proceso por modelo")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)  # the child's side of peak_memory
    return parser


def main(argv: list[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse_args(argv)
    if max(args.seq_len) > CONFIG.seq_len:
        parser.error(f"--seq-len: gpt2 llega a {CONFIG.seq_len}")
    if args.nanogpt and not Path(args.nanogpt, "model.py").is_file():
        parser.error(f"--nanogpt {args.nanogpt!r}: no tiene model.py; es una copia de https://github.com/karpathy/nanoGPT")
    measure.settle()
    with measure.restored():
        if args.memory_of:
            print(own_peak(args))
            return
        result = race(args)
    if args.markdown:
        print(markdown(result["rows"]))
    measure.write(args.json, result)


if __name__ == "__main__":
    cli.run(main)
