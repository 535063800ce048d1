"""What a training run of a GPT needs and costs, computed before anything is allocated.

    job = plan.Job(gpt.PRESETS["gpt2-xl"], batch_size=8, grad_checkpointing="selective", precision="bf16")
    plan.peak(job), backend.device_memory(device)              bytes
    plan.hours(job, tokens, plan.device_flops(device, "bf16"))

Sizes below: B batch, T length, C width, H heads, V vocabulary, N = B T rows, L layers; w bytes of a value inside a
block, 2 under autocast and 4 otherwise. The residual stream, the norms and their outputs are float32 either way.
"""

import functools
import itertools
import math
import time
from dataclasses import dataclass, replace

import torch

from aura import backend, ops, optim, products, report
from aura.models import gpt
from aura.words import counted, duration

# The share of its peak FLOP/s that a device really carries out, counting what it computes twice. An assumption, a
# little below the 0.44 to 0.52 of tuned runs on A100s (Narayanan et al. 2021, table 1, which counts alike).
UTILISATION = 0.4
USUAL_TOKENS = 20  # for each parameter, where computing is best spent: https://arxiv.org/abs/2203.15556
SHORTEST = 128  # tokens of context below which alternatives() does not go
LARGEST_BATCH = 65_536  # the batch size above which it does not look either
# Assumed, not derived. CONTEXT: on a GPU, CUDA's context with the libraries' kernels and cuBLAS's workspace; on a CPU,
# the interpreter with torch. FRAGMENTS: the share of all the rest that the allocator (torch's caching one, on a CPU the
# C library's) may lose to fragmentation; SCATTERED: on a CPU with torch's own operations and all activations kept.
CONTEXT = {"cuda": 1.0e9, "cpu": 0.4e9}
FRAGMENTS = {"cuda": 0.04, "cpu": 0.15}
SCATTERED = 0.5

PARTS = {"weights": "pesos", "copies": "copias de los pesos en 16 bits", "gradients": "gradientes",
         "optimizer": "optimizador", "average": "media de los pesos (EMA)", "copy": "copia para guardar",
         "activations": "activaciones", "loss": "logits y pérdida",
         "reserve": "entorno y fragmentación (supuesto)"}
PHASES = {"forward": "al final de la pasada hacia delante", "loss": "al calcular la pérdida",
          "loss_backward": "al calcular los gradientes de la pérdida",
          "last_block": "al calcular los gradientes del último bloque",
          "first_block": "al calcular los gradientes del primer bloque",
          "embedding": "al calcular los gradientes de los embeddings",
          "step": "en el paso del optimizador"}


@dataclass(frozen=True)
class Job:
    """One training run on one device, as far as memory and time depend on it.

    config.seq_len is the length of the sequences. fused: whether our kernels carry out the operations (ops.use), which
    matters to the loss, and where there is dropout.
    """

    config: gpt.GPTConfig
    batch_size: int = 1
    grad_accum: int = 1
    grad_checkpointing: str | bool = False  # as a gpt.GPT takes it
    precision: str = "fp32"  # bf16 | fp16 | fp32
    optimizer: str = "adamw"  # of optim.NAMES
    device_type: str = "cuda"
    fused: bool = False
    ema: bool = False  # an average of the weights is kept
    saves: bool = False  # checkpoints are written in the background, from a copy in host memory: on a CPU its own

    @property
    def selective(self):
        """Whether only one half of each block is computed again."""
        return self.grad_checkpointing == "selective"

    @property
    def tokens_per_step(self):
        """Tokens of one optimiser step."""
        return self.batch_size * self.grad_accum * self.config.seq_len

    def steps_per_epoch(self, tokens):
        """Steps in which a tokens.TokenLoader delivers `tokens` tokens once."""
        return max(0, tokens - 1) // self.config.seq_len // (self.batch_size * self.grad_accum)


@functools.lru_cache(maxsize=256)
def _shapes(config):
    """The shapes of all parameters, from the module itself; the meta device allocates nothing."""
    with torch.device("meta"):
        return tuple(tuple(parameter.shape) for parameter in gpt.GPT(config).parameters())


def optimizer_bytes(name, shapes):
    """(state, largest temporary of a step) in bytes, for float32 parameters of these shapes.

    adamw: two moments, updated in place by the fused kernel. adamw8bit: two moments of a byte with one float32 scale
    each for 256 values, float32 for tensors below 4096 values (bitsandbytes, min_8bit_size and its block size).
    adafactor: sums of rows and of columns of a matrix, the whole second moment of a vector; its step makes one update
    of the size of one parameter while that of the parameter before still exists (torch.optim.Adafactor, no foreach).
    """
    sizes = [math.prod(shape) for shape in shapes]
    if name == "adamw":
        return sum(8 * size for size in sizes), 0
    if name == "adamw8bit":
        return sum(2 * size + 8 * -(-size // 256) if size >= 4096 else 8 * size for size in sizes), 0
    state = sum(4 * sum(shape) if len(shape) == 2 else 4 * size for shape, size in zip(shapes, sizes, strict=True))
    matrices = [size for shape, size in zip(shapes, sizes, strict=True) if len(shape) == 2]
    return state, 4 * max(map(sum, itertools.pairwise(matrices)))


@functools.cache
def _emulates_bfloat16():
    """Whether this CPU has AVX-512 but no products of bfloat16: there oneDNN makes them in a float32 buffer of
    the result's size, which torch allocates."""
    cpu = torch.cpu
    return cpu._is_avx512_supported() and not (cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported())


def _wide(job):
    """Bytes of each value of a product while it is made, beside those of the result."""
    return 4 if job.device_type == "cpu" and job.precision == "bf16" and _emulates_bfloat16() else 0


def _turned(job):
    """Bytes of each value of a gradient that is copied, turned, for the product which makes that of a weight: oneDNN
    wants its rows one after the other."""
    return 4 if job.device_type == "cpu" and job.precision == "fp32" and products.onednn_is_better() else 0


def _loss_bytes(job, rows, width, low):
    """(forward, backward) of the head with its loss: bytes at the worst moment, gradients of the head included.

    Fused (aura/fused/loss.py): both gradients are made in forward, the weight's in float32, beside one chunk of logits
    and, under autocast, the weight in 16 bits and on a CPU a part of its gradient; where oneDNN makes it, in float32,
    such a part too, with what the logits have of it, turned. torch's way (ops.linear_cross_entropy): forward holds
    float32 logits and their log-softmax; backward the log-softmax with two gradients of its size, or, if that is more,
    the gradients of the product: of the logits, of hidden and of the weight, this one in both precisions under
    autocast, where the head's own 16-bit copy lives as long as the graph. On a GPU both go in chunks of ops.loss_rows
    rows; beside them is then the sum of the chunks' gradients of the weight.
    """
    vocabulary = job.config.vocab_size
    logits, head, hidden = rows * vocabulary, vocabulary * width, rows * width
    if job.fused:
        at_once = -(-rows // max(1, -(-logits * low // products.CHUNK_BYTES)))
        part = min(products.WEIGHT_ROWS, vocabulary) if job.device_type == "cpu" else 0
        forward = low * hidden + 4 * head + low * at_once * vocabulary + _turned(job) * part * (at_once + width)
        if low == 2:
            forward += 2 * head + max(_wide(job) * at_once * vocabulary, (2 + _wide(job)) * part * width)
        return forward, low * hidden + 4 * head
    copy = 2 * head if low == 2 else 0
    chunk = min(rows, ops.loss_rows(vocabulary, job.device_type))
    so_far = 4 * head if chunk < rows else 0
    logits, hidden = chunk * vocabulary, chunk * width
    product = low * (logits + hidden + head) + _wide(job) * head
    if low == 2:
        product = max(product, 2 * hidden + 6 * head)
    return copy + 8 * logits, copy + so_far + max(12 * logits, product)


class _Sizes:
    """Bytes of what phases() counts, for one job.

    Kept by one block for backward, from the operators' save_for_backward, in bytes over N C: the normed input (w),
    q, k, v (3 w) and the output of attention (w), which is also what its projection keeps; the residual after attention
    (4), its norm (w), the MLP's projection (4 w) and its GELU (4 w), the residual after the MLP (4): 14 w + 8. Beside
    them mean and rstd of two norms and the log-sum-exp of attention in float32: 16 N + 4 N H. torch's operators and
    ours keep the same, except for dropout: ours keep seeds, torch's a mask each (w bytes a value on the CPU, 1 on
    CUDA), and on the CPU torch then materialises attention: three float32 tensors of B H T T, and float32 copies of q,
    k and v.
    With full checkpointing a block keeps its two inputs, the branch to be added (w; the first has none) and the
    residual (4), and its backward computes all of the above again. With selective checkpointing it keeps that branch
    and residual and what attention keeps, 6 w + 4, and computes the rest again.
    """

    def __init__(self, job):
        config = job.config
        rows, width = job.batch_size * config.seq_len, config.n_embd
        self.rows, self.width, self.layers = rows, width, config.n_layer
        self.low = 4 if job.precision == "fp32" else 2
        self.mixed = self.low == 2
        self.wide = _wide(job)
        self.branch, self.stream, norm = self.low * rows * width, 4 * rows * width, 8 * rows
        self.head, self.square = 4 * config.vocab_size * width, width * width
        self.weights = 4 * config.parameters()
        self.tokens = 8 * (2 * rows + job.batch_size + config.seq_len)  # batch, contiguous targets, positions
        self.first = self.tokens
        if config.dropout:
            self.first += rows * width * (1 if job.device_type == "cuda" else 4)
        # A float32 norm that has yet to be rounded: all but our kernels on a GPU write it.
        self.widened = self.stream if self.mixed and not (job.fused and job.device_type == "cuda") else 0
        block = self._block(job, norm)
        self.selective, self.full = job.selective, job.grad_checkpointing and not job.selective
        if self.full:
            self.first -= self.branch
            self.kept, self.again = self.stream + self.branch, block
            self.inside = 2 * self.stream + 8 * self.branch
        elif self.selective:
            second = 9 * self.branch + self.stream + norm
            self.kept, self.again = block - second + self.branch, second
            self.inside = self.stream + 8 * self.branch
        else:
            self.first += norm + self.stream  # the embeddings' sum, which the first norm keeps
            self.kept, self.again = block, 0
            self.inside = self.stream + self.branch + self.widened
        self.block_copies = 24 * self.square if self.mixed else 0
        # Those of them that the graph keeps for a block's backward; what is computed again makes its own.
        self.held_copies = 0 if self.full else self.block_copies // (3 if self.selective else 1)
        # On a GPU products are added to float32 gradients as they are made, and copies live as long as the step
        # (products.py).
        self.direct = self.mixed and job.device_type == "cuda"
        self.copies = self.layers * self.block_copies if self.direct else 0
        self.stored = self.first + self.layers * self.kept

    def _block(self, job, norm):
        rows, heads = self.rows, job.config.n_head
        mask = 0
        if job.config.dropout and not job.fused:
            mask = rows * self.width * (1 if job.device_type == "cuda" else self.low)
        block = 14 * self.branch + 2 * self.stream + 2 * norm + 4 * rows * heads + 2 * mask
        if mask and job.device_type == "cpu":
            block += 12 * rows * heads * job.config.seq_len + 3 * (self.stream - self.branch) - 4 * rows * heads
        return block


def _block_backward(job, sizes, blocks, before, made):
    """Bytes by part while backward is in the MLP of the last of the `blocks` blocks that are left. before: of the
    gradients that earlier micro-batches left, 0 in the first; made: in the first, of those of later blocks."""
    branch, stream, square, mixed = sizes.branch, sizes.stream, sizes.square, sizes.mixed
    # The gradient of a matrix of the MLP, 4 C C values: made in w, then beside its float32.
    product, widest = sizes.low * 4 * square, (24 if mixed else 16) * square
    if sizes.direct:
        product, widest = 0, 0 if before else 16 * square
    apart = branch if mixed or job.config.dropout else 0  # else branch and residual have one gradient
    new = 0 if before else 16 * square  # the second projection's gradient, from where it exists
    used = 8 * square if mixed and not sizes.direct else 0  # a 16-bit copy, free once its product is done
    wide = 4 * sizes.wide  # of the MLP's own width, 4 C
    moments = [(4 * branch + apart + wide * sizes.rows * sizes.width, 0, 0),  # of the second projection's input
               (4 * branch + apart, new if sizes.direct else product + wide * square, 0),  # of its weight
               (0, widest, used),  # widened; the GELU's output is gone
               (4 * branch, new, used),  # of the GELU
               (-3 * branch, new + product + wide * square, used),  # of the first projection's weight
               (-3 * branch, new + widest, 2 * used)]  # widened
    activations, gradients, freed = max(moments, key=lambda moment: moment[0] + moment[1] - moment[2])
    if job.grad_checkpointing and blocks > 1:
        activations += stream  # the residual's gradient, of whose size the first block keeps nothing new
    return {"activations": sizes.first + blocks * sizes.kept + sizes.again + activations,
            "gradients": (before or made) + sizes.head + gradients,
            "copies": sizes.copies or sizes.held_copies * (blocks - 1) + sizes.block_copies - freed}


def phases(job):
    """Bytes by part in each phase of a step once the optimiser's state, and the copy for checkpoints, exist:
    {phase: {part: bytes}}.

    Gradients are set to None after each step: the first micro-batch makes them one by one in backward, so that they
    grow while the activations shrink; later ones find them all. The head is tied: its gradient waits for the
    embedding's, and at the end of backward both exist, with their sum where the head's is a transposed view (torch's,
    float32).
    autocast keeps a 16-bit copy of each matrix until forward ends, and the graph those of the blocks whose backward is
    to come; what is computed again makes its own. On a GPU they are kept for the whole step.

    CUDA: the same by reasoning; tests/gpu/test_plan.py compares it with what a card holds. torch's fused attention
    keeps q, k, v, the output and its log-sum-exp as well, layer_norm its float32 input and statistics.
    """
    sizes = _Sizes(job)
    stream, branch, mixed, head = sizes.stream, sizes.branch, sizes.mixed, sizes.head
    state, update = optimizer_bytes(job.optimizer, _shapes(job.config))
    copies = sizes.copies or sizes.layers * (sizes.block_copies + (18 * sizes.width if mixed else 0))
    before = sizes.weights if job.grad_accum > 1 else 0
    made = 4 * (sizes.layers - 1) * (12 * sizes.square + 13 * sizes.width)
    loss, loss_backward = _loss_bytes(job, sizes.rows, sizes.width, sizes.low)
    hidden = branch + (stream if job.grad_checkpointing else 0)  # the last norm keeps the residual
    tied = stream if job.fused or mixed else max(stream, head)
    found = {
        "forward": {"activations": sizes.stored + sizes.inside, "gradients": before, "copies": copies},
        "loss": {"activations": sizes.stored + hidden, "gradients": before, "loss": loss, "copies": copies},
        "loss_backward": {"activations": sizes.stored + hidden, "gradients": before, "loss": loss_backward,
                          "copies": sizes.copies or sizes.layers * sizes.held_copies},
        "last_block": _block_backward(job, sizes, sizes.layers, before, 0),
        "first_block": _block_backward(job, sizes, 1, before, made),
        "embedding": {"activations": sizes.tokens, "gradients": (before or sizes.weights - head) + 2 * head + tied,
                      "copies": sizes.copies},
        "step": {"gradients": sizes.weights, "optimizer": update},
    }
    scattered = job.device_type == "cpu" and not job.fused and not job.grad_checkpointing
    fragments = SCATTERED if scattered else FRAGMENTS[job.device_type]
    for parts in found.values():
        parts["weights"] = sizes.weights
        parts["average"] = sizes.weights if job.ema else 0
        parts["optimizer"] = parts.get("optimizer", 0) + state
        if job.saves and job.device_type == "cpu":
            parts["copy"] = parts["weights"] + state + parts["average"]
        parts["reserve"] = CONTEXT[job.device_type] + fragments * sum(parts.values())
    return {phase: {part: round(parts.get(part, 0)) for part in PARTS} for phase, parts in found.items()}


def worst_phase(job):
    """(name in PHASES, bytes by part) of the phase that needs most."""
    return max(phases(job).items(), key=lambda item: sum(item[1].values()))


def peak(job):
    """The most bytes a step holds at one time."""
    return sum(worst_phase(job)[1].values())


@dataclass(frozen=True)
class Card:
    """The device that is planned for. memory: bytes. flops: peak FLOP/s, None where unknown."""

    type: str
    name: str
    memory: float
    precision: str
    flops: float | None


def card_of(device, precision):
    """The Card of a device of this machine."""
    return Card(device.type, backend.device_name(device), backend.device_memory(device), precision,
                device_flops(device, precision))


def imagined_card(name, memory, precision):
    """The Card of a GPU that is not here, of `memory` bytes."""
    return Card("cuda", name, memory, precision, report.peak_flops(name, precision))


def _settings(job, presets, begun=False):
    """Other settings for the job, from near to far: [(Job, flags that name what changed)]."""
    config, total = job.config, job.batch_size * job.grad_accum
    lighter, configs = [job.optimizer], [(config, "")]
    if not begun:
        lighter = [name for name in optim.NAMES[optim.NAMES.index(job.optimizer):]
                   if name != "adamw8bit" or job.device_type != "cpu"]
        length = config.seq_len // 2
        while length >= SHORTEST:
            configs.append((replace(config, seq_len=length), f" --seq_length {length}"))
            length //= 2
        configs += [(smaller, f" {flags}") for flags, smaller in presets if smaller.parameters() < config.parameters()]
    batches = [size for size in range(min(job.batch_size, LARGEST_BATCH), 0, -1) if total % size == 0]
    runs = [(job.grad_checkpointing, job.batch_size)]
    if not job.grad_checkpointing:
        runs.append(("selective", job.batch_size))
    runs += [("full", size) for size in batches]
    for other, config_flags in configs:
        for optimizer in lighter:
            for checkpointing, size in runs:
                flags, is_preset = config_flags, "--model_preset" in config_flags  # a preset has a recipe of its own
                flags += f" --optimizer {optimizer}" if optimizer != job.optimizer else ""
                if checkpointing and (is_preset or checkpointing != job.grad_checkpointing):
                    flags += f" --gradient_checkpointing {checkpointing}"
                if size != job.batch_size or is_preset:
                    flags += f" --batch_size {size} --gradient_accumulation_steps {total // size}"
                yield replace(job, config=other, optimizer=optimizer, grad_checkpointing=checkpointing, batch_size=size,
                              grad_accum=total // size), flags.strip()


def alternatives(job, available, presets=(), begun=False):
    """(the nearest Job that fits into `available` bytes or None, one Spanish line with the flags that lead to it).

    Tried in this order, each step keeping the ones before: checkpointing; smaller batches with as many sequences a
    step; a lighter optimiser; half, a quarter... of the length; a smaller preset. presets: (flags that lead to it,
    config), large to small. begun: the model and the optimiser are a checkpoint's and stay. The job itself when it
    fits.
    """
    for other, flags in _settings(job, presets, begun):
        if peak(other) <= available:
            if not flags:
                return other, "cabe tal como está"
            return other, f"cabe con {flags} ({peak(other) / 1e9:.1f} GB)"
    could = "a una ejecución empezada (lote, gradient checkpointing)" if begun else (
        "(lote, optimizador, longitud, preset)")
    return None, (f"nada de lo que se puede cambiar {could} cabe en {available / 1e9:.1f} GB: hace falta un "
                  "dispositivo con más memoria")


def hardware_flops_per_token(job):
    """FLOPs a device carries out per token: the model's (config.flops_per_token) and, with checkpointing, what is
    computed again: the MLP's first product and, if it is full, the attention before it as well. Only the model's count
    towards MFU (Chowdhery et al. 2022, appendix B)."""
    config = job.config
    model = config.flops_per_token()
    if not job.grad_checkpointing:
        return model
    product = 8 * config.n_layer * config.n_embd**2
    if job.selective:
        return model + product
    return model + model // 3 - 2 * config.vocab_size * config.n_embd - product


def device_flops(device, precision):
    """Peak FLOP/s of a known card, a measured rate of products on a CPU, or None."""
    if device.type == "cpu":
        return measured_flops(precision)
    return report.peak_flops(backend.device_name(device), precision)


def measured_flops(precision="fp32", seconds=0.3):
    """FLOP/s of matrix products of this CPU, the best of those that fit into `seconds` and of three at least: the first
    is slow, and one in 16 bits takes 0.2 s where there is no AVX-512."""
    dtype, size = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision], 512
    a = torch.ones(size, size, dtype=dtype)
    space = products.space(a, a, size)
    times = []
    while len(times) < 3 or sum(times) < seconds:
        started = time.perf_counter()
        products.mm(a, a, space)
        times.append(time.perf_counter() - started)
    return 2 * size**3 / min(times)


def hours(job, tokens, peak_flops):
    """Hours to train on `tokens` tokens, on a device that carries out UTILISATION of peak_flops (FLOP/s)."""
    return tokens * hardware_flops_per_token(job) / (peak_flops * UTILISATION) / 3600


def told(needed):
    """Hours as Spanish text: '69.2 h' or, of less than one, '43 min 20 s'."""
    return f"{needed:.1f} h" if round(3600 * needed) >= 3600 else duration(3600 * needed)


def fitting_steps(job, target_hours, peak_flops):
    """How many whole optimiser steps fit into target_hours."""
    flops = job.tokens_per_step * hardware_flops_per_token(job)
    return int(target_hours * 3600 * peak_flops * UTILISATION // flops)


def verdict(job, steps, steps_per_epoch, peak_flops, target_hours, by_steps=False):
    """One Spanish line: whether `steps` steps meet target_hours, and if not how many epochs, or else steps, would.
    by_steps: whether --max_steps was given, which overrides --epochs."""
    needed = hours(job, steps * job.tokens_per_step, peak_flops)
    most = fitting_steps(job, target_hours, peak_flops)
    if steps <= most:
        return f"CUMPLE: {told(needed)} de las {target_hours:g} h disponibles"
    late = f"NO CUMPLE: pide {told(needed)} y hay {target_hours:g} h"
    epochs = most // steps_per_epoch
    if epochs and not by_steps:
        fits = hours(job, epochs * steps_per_epoch * job.tokens_per_step, peak_flops)
        return f"{late}; con --epochs {epochs} serían {told(fits)}"
    if not most:
        return f"{late}; no cabe ni un paso"
    none = "" if epochs else "no cabe ni una época: "
    return (f"{late}; {none}caben {most * job.tokens_per_step} tokens, --max_steps {most} "
            f"({100 * most / steps_per_epoch:.0f} % de una época)")


def _computing_less(job, card, tokens):
    """One Spanish line: memory and time of the job if it computed nothing twice or, where that does not fit, less; none
    where that would save nothing to speak of. As a list."""
    lighter = [(replace(job, grad_checkpointing=False), "--no_gradient_checkpointing")]
    if not job.selective:
        lighter.append((replace(job, grad_checkpointing="selective"), "--gradient_checkpointing selective"))
    for other, flags in lighter:
        if peak(other) <= card.memory:
            saved = f"{100 * (1 - hardware_flops_per_token(other) / hardware_flops_per_token(job)):.0f}"
            if saved == "0":
                return []
            time = f": {told(hours(other, tokens, card.flops))}" if card.flops else ""
            return [f"Consejo: sobra memoria; con {flags} también cabe ({peak(other) / 1e9:.2f} GB) y el cálculo es un "
                    f"{saved} % menor{time}"]
    return [f"Sin gradient checkpointing pediría {peak(lighter[0][0]) / 1e9:.2f} GB: no cabe"]


def _share(value):
    return "menos de 0.01" if value < 0.01 else f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def lines(job, card, *, steps, steps_per_epoch, target_hours=72.0, presets=(), by_steps=False, begun=False,
          trained=False):
    """The plan as Spanish console lines: memory by part against that of the card, tokens, FLOPs, hours, verdict.
    presets, begun: as alternatives() takes them. by_steps: as verdict() takes it. trained: the model has learnt from
    another text before."""
    config = job.config
    phase, parts = worst_phase(job)
    total = sum(parts.values())
    fits = total <= card.memory
    width = max(map(len, PARTS.values()))
    shown = [
        f"Modelo: {config.parameters() / 1e6:.1f} M parámetros; {config.n_layer} bloques, ancho {config.n_embd}, "
        f"{config.n_head} cabezas, vocabulario {config.vocab_size}, longitud {config.seq_len}",
        f"Receta: {job.precision}, {job.optimizer}, lote {job.batch_size} x acumulación {job.grad_accum}, "
        + (f"con gradient checkpointing ({'selective' if job.selective else 'full'})" if job.grad_checkpointing
           else "sin gradient checkpointing"),
        f"Memoria en el peor momento, {PHASES[phase]}:",
        *(f"  {PARTS[part]:<{width}} {size / 1e9:8.2f} GB" for part, size in parts.items() if size),
        f"  {'total':<{width}} {total / 1e9:8.2f} GB de {card.memory / 1e9:.2f} GB "
        f"({100 * total / card.memory:.0f} %): {'cabe' if fits else 'NO CABE'}"]
    if not fits:
        shown.append("  " + alternatives(job, card.memory, presets, begun)[1])
    tokens = steps * job.tokens_per_step
    model, hardware = config.flops_per_token(), hardware_flops_per_token(job)
    shown.append(f"Tokens: {job.tokens_per_step} por paso x {counted(steps, 'paso')} = {tokens} "
                 f"({steps / steps_per_epoch:.2f} épocas); {_share(tokens / config.parameters())} por parámetro")
    if not trained and (text := steps_per_epoch * job.tokens_per_step) < config.parameters():
        shown.append(f"  Poco texto para este modelo: {_share(text / config.parameters())} tokens distintos por "
                     f"parámetro; lo que más rinde son unos {USUAL_TOKENS} (Hoffmann et al. 2022)")
    shown.append(f"FLOP: {tokens * model:.3g} del modelo" + (
        f", {tokens * hardware:.3g} en el dispositivo (gradient checkpointing calcula dos veces parte de cada bloque)"
        if hardware > model else ""))
    if card.flops is None:
        shown.append(f"Tiempo: no se conoce la potencia de este dispositivo en {job.precision}; unos pasos de prueba "
                     "(--max_steps 20) lo dirán")
    else:
        mfu = 100 * UTILISATION * model / hardware
        needed = hours(job, tokens, card.flops)
        shown.append(f"Tiempo: {told(needed)} a {card.flops / 1e12:.4g} TFLOP/s con un uso supuesto del "
                     f"{100 * UTILISATION:.0f} % (MFU {mfu:.0f} %)")
        shown.append(f"Veredicto: {verdict(job, steps, steps_per_epoch, card.flops, target_hours, by_steps)}")
    if job.grad_checkpointing and fits:
        shown += _computing_less(job, card, tokens)
    return shown
