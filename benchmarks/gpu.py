"""Our CUDA kernels against torch's and against what the card can do: norms, activations, rotary positions, loss,
attention, documents, a training step.

    python benchmarks/gpu.py --json gpu.json --markdown gpu.md
    python benchmarks/gpu.py --learn                    # from then on --attention auto knows what is faster here
    python benchmarks/gpu.py --only attention --seq-len 1024,4096 --nanogpt ../nanoGPT

Everybody works in one process, in turns, timed by the card's own events around many calls, after a warm-up, on copies
of the inputs that the card's cache does not hold together. Before a case is timed, everybody's results and gradients
are compared with float64: a peer that is wrong, or that torch refuses, is left out with a line; where ours fails it is
noted in the row's place, the rest is measured, and the exit code is 1. torch.compile takes part in norms of 1024 and
4096 columns, and in activations, rotary positions and the loss. The ceilings are measured in the same run: a copy of
1 GiB, read and written, and torch.mm of 8192^3. The FLOP of attention are 4 T S D a head forward and 10 back,
half of it where it is causal, whoever computes more, and on Hopper our kernels with the instructions of all cards
(mma.sync) take part beside those of its own (wgmma); the bytes of all the others are each input read and each output
written once. The loss is that of logits that exist, timed together with its gradient, which ours writes in their place.
A training step is of gpt2, and of the largest models the scripts train; its FLOP are those of the model's own
function, and of a GPT the memory it takes is put beside what aura/plan.py says.
"""

import argparse
import collections
import contextlib
import dataclasses
import faulthandler
import functools
import gc
import itertools
import os
import statistics
import sys
import time
import traceback
import unittest.mock
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import hrm_step  # noqa: E402
import measure  # noqa: E402
import train_step  # noqa: E402

import hrm_training_large_1b  # noqa: E402
import train_distributed  # noqa: E402
import train_tensordock  # noqa: E402
from aura import backend, cuda_extension, extension, ops, plan, speeds  # noqa: E402
from aura.models import bert, gpt, hrm  # noqa: E402

SEED, EPS = 1234, 1e-5
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}  # relative, against float64
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NORM_ROWS, NORM_COLUMNS = 16_384, (768, 1024, 2048, 4096, 8192)
COMPILED_COLUMNS = 1024, 4096  # of norms: compiling is what takes longest
ACTIVATION_COLUMNS, LOSS_ROWS, VOCABULARIES = (3072, 8192), 8192, (32_000, 50_257)
ATTENTION_TOKENS, ATTENTION_WIDTH = 16_384, 2048  # B T, and H D: heads of 64 and of 128
EXACT_SCORES = 2**26  # of attention in float64 at one time: 512 MiB, so that a card of 4 GB has room
STEP_BATCH, STEP_LENGTH, STEP_TOLERANCE = 32, 1024, 0.02  # nats: what bfloat16 may change of the first loss
MODEL_ROUNDS = 3  # a step of the largest takes seconds
BERT_BATCH, BERT_LENGTH = 32, 384
PART_SECONDS = 300  # that a case may take, its compilation included
SAMPLE_MS = 20  # a sample repeats calls until it lasts about this long,
MOST_CALLS = 64  # or so often: of a thousand launches the card's queue holds no more, and a call may make a dozen
CLOCK_HZ = 2e9  # of a card, about
MOST_PAUSE_S = 0.1  # before a sample
FORWARD, BACKWARD, BOTH, STEP = "forward", "backward", "both", "step"
WITHOUT_CARD = "Omitido: hace falta una GPU de NVIDIA con torch para CUDA y nvcc"


class Rejected(Exception):
    """What somebody has computed is wrong."""


@dataclasses.dataclass
class Contestant:
    """One who takes part. run maps the inputs to a tensor or a tuple of them."""

    name: str
    run: Callable
    context: Callable = contextlib.nullcontext


@dataclasses.dataclass
class Case:
    """One problem and all who solve it, ours first. work: FLOP or bytes of each direction; ceiling: of which."""

    op: str
    variant: str
    shape: tuple
    inputs: list
    contestants: list
    exact: Callable  # of the inputs in float64
    ceiling: str
    work: dict


def ours(run):
    return Contestant("ours", run, lambda: ops.using("fused", "cuda"))


@contextlib.contextmanager
def instructions_of_all_cards():
    """Our kernels without those that Hopper alone has."""
    with ops.using("fused", "cuda"), unittest.mock.patch.dict(os.environ, {"AURA_CUDA_ISA": "sm_80"}):
        yield


def our_attentions(run, device):
    """Ours, and on Hopper ours by both ways."""
    if device == "cpu" or torch.cuda.get_device_capability() != (9, 0):
        return [ours(run)]
    return [ours(run), Contestant(speeds.OTHER_KERNELS, run, instructions_of_all_cards)]


def type_name(dtype):
    return str(dtype).removeprefix("torch.")


def drawn(*shape, dtype, device, seed=0):
    """A leaf with a gradient, drawn on a card where it is for one: the CPU's generator takes seconds for a tensor."""
    place = device if device == "cuda" else "cpu"
    values = torch.randn(shape, generator=torch.Generator(place).manual_seed(SEED + seed), device=place)
    return values.to(device, dtype).requires_grad_()


# ---- Cases ----------------------------------------------------------------------------------------------------------


def norm_case(kind, rows, columns, dtype, device, compiled=True):
    """layer_norm or rms_norm, or their form with a residual before them."""
    added, rms = kind.startswith("add"), "rms" in kind
    shapes = [(rows, columns)] * (1 + added) + [(columns,)] * (1 if rms else 2)
    inputs = [drawn(*shape, dtype=dtype, device=device, seed=i) for i, shape in enumerate(shapes)]

    def plain(x, *rest):
        new = rest[0] + x if added else x
        weights = rest[1:] if added else rest
        y = (F.rms_norm(new, weights[0].shape, weights[0], EPS) if rms
             else F.layer_norm(new, weights[0].shape, *weights, EPS))
        return (y, new) if added else y

    def run(*inputs):
        return getattr(ops, kind)(*inputs, EPS)

    peers = eager_and_compiled(plain, compiled)
    big = inputs[0].nbytes  # forward reads x (and residual) and writes y (and new)
    work = {FORWARD: (4 if added else 2) * big, BACKWARD: (4 if added else 3) * big}
    return Case(kind, type_name(dtype), (rows, columns), inputs, [ours(run), *peers], plain, "copy", work)


def eager_and_compiled(plain, compiled):
    """torch's way as it is and, where that is wanted, compiled."""
    peers = [Contestant("torch", plain)]
    if compiled:
        peers.append(Contestant("torch.compile", torch.compile(plain, dynamic=False, fullgraph=True)))
    return peers


def activation_case(kind, rows, columns, dtype, device, compiled=True):
    """gelu_tanh of [rows, columns], or swiglu of [rows, 2 columns]."""
    parts = 2 if kind == "swiglu" else 1
    x = drawn(rows, parts * columns, dtype=dtype, device=device)

    def plain(x):
        if kind == "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    one = x.nbytes // parts  # forward reads x and writes y; backward reads dy and x and writes dx
    work = {FORWARD: (parts + 1) * one, BACKWARD: (2 * parts + 1) * one}
    return Case(kind, type_name(dtype), (rows, columns), [x],
                [ours(lambda x: getattr(ops, kind)(x)), *eager_and_compiled(plain, compiled)], plain, "copy", work)


def rotary_case(length, width, dtype, device, tokens=ATTENTION_TOKENS, compiled=True):
    batch, heads = max(1, tokens // length), ATTENTION_WIDTH // width
    qkv = drawn(batch, length, 3, heads, width, dtype=dtype, device=device)
    angles = torch.arange(length)[:, None] * 1e4 ** -(torch.arange(width // 2) / (width // 2))
    cosine, sine = angles.cos().to(device), angles.sin().to(device)

    def plain(qkv):
        return ops.rotary_packed(qkv, cosine, sine)

    peers = [dataclasses.replace(peer, context=lambda: ops.using("sdpa"))
             for peer in eager_and_compiled(plain, compiled)]
    return Case("rotary", type_name(dtype), (batch, length, heads, width), [qkv], [ours(plain), *peers], plain, "copy",
                {FORWARD: 2 * qkv.nbytes, BACKWARD: 2 * qkv.nbytes})


def loss_case(rows, classes, dtype, device, compiled=True):
    """The losses of logits that exist, and their gradient, which ours writes in their place."""
    logits = drawn(rows, classes, dtype=dtype, device=device)
    targets = torch.randint(classes, (rows,), generator=torch.Generator().manual_seed(SEED)).to(device)

    def plain(logits):
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(wide, targets, reduction="sum")

    def with_gradient(run):
        def both(logits):
            logits = logits.detach().requires_grad_()
            value = run(logits)
            return value.detach(), *torch.autograd.grad(value, logits)

        return both

    def fused(logits):
        logits = logits.detach()
        return torch.ops.aura.cross_entropy_chunk_(logits, targets, -100, True).sum(), logits

    peers = [dataclasses.replace(peer, run=with_gradient(peer.run)) for peer in eager_and_compiled(plain, compiled)]
    return Case("cross_entropy", type_name(dtype), (rows, classes), [logits], [ours(fused), *peers],
                with_gradient(plain), "copy", {BOTH: 2 * logits.nbytes})


def sdpa(causal, allowed=None):
    """Attention of a packed projection by torch, by whatever way it chooses."""
    def run(qkv):
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=causal and allowed is None
                                              ).transpose(1, 2)

    return run


def in_parts(run, length):
    """run(qkv), a few heads of one batch entry at a time, in backward too."""
    heads = max(1, EXACT_SCORES // length**2)

    def exact(qkv):
        return torch.cat([torch.cat([checkpoint(run, part, use_reentrant=False, preserve_rng_state=False)
                                     for part in entry.split(heads, dim=3)], dim=2) for entry in qkv.split(1)])

    return exact


def sdpa_peers(causal):
    """torch's backends, each alone, those that take the tensors of the case."""
    backends = {"sdpa flash": SDPBackend.FLASH_ATTENTION, "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
                "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION}
    return [Contestant(name, sdpa(causal), functools.partial(sdpa_kernel, [backend]))
            for name, backend in backends.items()]


def attention_case(length, width, causal, dtype, device, tokens=ATTENTION_TOKENS):
    batch, heads = max(1, tokens // length), ATTENTION_WIDTH // width
    qkv = drawn(batch, length, 3, heads, width, dtype=dtype, device=device)
    flop = 4 * batch * heads * length * length * width / (2 if causal else 1)
    return Case("attention", f"{type_name(dtype)}, {'causal' if causal else 'full'}",
                (batch, length, heads, width), [qkv],
                [*our_attentions(lambda qkv: ops.attention_packed(qkv, causal=causal), device), *sdpa_peers(causal)],
                in_parts(sdpa(causal), length), "matmul", {FORWARD: flop, BACKWARD: 2.5 * flop})


def documents_case(length, width, dtype, device, tokens=ATTENTION_TOKENS):
    """Four documents a row, against torch's attention with the mask of them."""
    batch, heads, documents = max(1, tokens // length), ATTENTION_WIDTH // width, 4
    qkv = drawn(batch, length, 3, heads, width, dtype=dtype, device=device)
    bounds = torch.arange(batch * documents + 1, device=device) * (length // documents)
    number = torch.arange(length, device=device) // (length // documents)
    allowed = (number[:, None] == number).tril()
    flop = 2 * batch * heads * documents * (length // documents) ** 2 * width
    masked = Contestant("sdpa with a mask", sdpa(True, allowed))

    def run(qkv):
        return ops.attention_packed(qkv, cu_seqlens=bounds, rows_apart=True)

    return Case("attention", f"{type_name(dtype)}, documents",
                (batch, length, heads, width), [qkv],
                [*our_attentions(run, device), masked],
                in_parts(sdpa(True, allowed), length), "matmul", {FORWARD: flop, BACKWARD: 2.5 * flop})


def cases(args):
    """(section, a function that makes the case), in the order they are measured."""
    for name in args.dtype:
        dtype = DTYPES[name]
        for kind in ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"):
            for columns in NORM_COLUMNS:
                yield "norms", functools.partial(norm_case, kind, NORM_ROWS, columns, dtype, "cuda",
                                                 compiled=columns in COMPILED_COLUMNS)
        for kind in ("gelu_tanh", "swiglu"):
            for columns in ACTIVATION_COLUMNS:
                yield "activations", functools.partial(activation_case, kind, NORM_ROWS, columns, dtype, "cuda")
        for classes in VOCABULARIES:
            yield "loss", functools.partial(loss_case, LOSS_ROWS, classes, dtype, "cuda")
        for width in (64, 128):
            yield "rotary", functools.partial(rotary_case, 2048, width, dtype, "cuda")
            for causal in (True, False):
                for length in args.seq_len:
                    yield "attention", functools.partial(attention_case, length, width, causal, dtype, "cuda")
            yield "documents", functools.partial(documents_case, 2048, width, dtype, "cuda")


# ---- Measuring ------------------------------------------------------------------------------------------------------


def as_tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


def upstream_of(outputs):
    return [torch.randn_like(y) for y in outputs]


def reason(problem):
    """An exception in one line."""
    return (str(problem).strip() or repr(problem)).splitlines()[0]


def leave_out(name, problem):
    """Say why a peer is not measured. What is ours cannot be left out."""
    if name in ("ours", speeds.OTHER_KERNELS):
        raise problem
    print(f"  {name} no se mide: {reason(problem)}", file=sys.stderr)


def check(case):
    """{contestant: (forward, backward error)} against float64; peers that are refused or wrong are left out of the
    case."""
    inputs = [x.detach() for x in case.inputs]
    wide = [x.double().requires_grad_() for x in inputs]
    exact = as_tuple(case.exact(*wide))
    torch.manual_seed(SEED)
    upstream = [y.to(inputs[0].dtype) for y in upstream_of(exact)]
    backward = BACKWARD in case.work
    exact_gradients = torch.autograd.grad(exact, wide, [y.double() for y in upstream]) if backward else ()
    found, playing = {}, []
    for contestant in case.contestants:
        leaves = [x.clone().requires_grad_() for x in inputs]
        try:
            with contestant.context():
                outputs = as_tuple(contestant.run(*leaves))
                gradients = torch.autograd.grad(outputs, leaves, upstream) if backward else ()
            errors = [measure.errors(got, want)[0] for got, want in ((outputs, exact), (gradients, exact_gradients))]
            if not all(error < TOLERANCE[inputs[0].dtype] for error in errors):
                raise Rejected(f"resultado rechazado: {contestant.name}, {case.op} {case.variant} {case.shape}, "
                               f"errores relativos {errors}")
        except Exception as problem:  # of compilers too, who have their own kinds
            leave_out(contestant.name, problem)
        else:
            found[contestant.name] = errors
            playing.append(contestant)
    case.contestants = playing
    return found


def timer(device):
    """A function (call, times) -> milliseconds of one call, by the device's own clock."""
    if device == "cpu":
        def wall(call, times):
            begin = time.perf_counter()
            for _ in range(times):
                call()
            return 1e3 * (time.perf_counter() - begin) / times
        return wall
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def events(call, times):
        if times > 1:  # a call as long as a sample leaves no gap worth the time of another
            torch.cuda._sleep(pause(call, times))
        begin.record()
        for _ in range(times):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / times
    return events


def pause(call, times):
    """Cycles of the card in which so many calls are put into its queue."""
    # Behind a pause the calls wait until all of them are there. A card that began at once would be waiting for Python
    # between short kernels, and the clock would tell how fast Python is.
    began = time.perf_counter()
    call()
    return int(CLOCK_HZ * min(MOST_PAUSE_S, 2 * times * (time.perf_counter() - began)))


def cache_bytes(device):
    """The size of a card's last cache."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0


def input_sets(case):
    """The inputs of a case, with so many copies of them that all take twice the card's cache: the share of a ceiling
    that is the memory's would be that of the cache."""
    wanted = -(-2 * cache_bytes(case.inputs[0].device) // sum(x.nbytes for x in case.inputs))
    return [case.inputs, *([x.detach().clone().requires_grad_() for x in case.inputs] for _ in range(wanted - 1))]


def in_turn(functions):
    """A function that calls one of them after another. Results live until their turn comes again, so that the next are
    written elsewhere."""
    turns, results = itertools.cycle(functions), collections.deque(maxlen=len(functions))
    return lambda: results.append(next(turns)())


def calls(case, direction):
    """{contestant: (what is timed, its context)}. Backward goes over the same forwards, made here, again and again."""
    found, sets = {}, input_sets(case)
    for contestant in case.contestants:
        functions = []
        for inputs in sets:
            if direction != BACKWARD:
                functions.append(functools.partial(contestant.run, *(x.detach() for x in inputs)))
                continue
            with contestant.context():
                outputs = as_tuple(contestant.run(*inputs))
            functions.append(functools.partial(torch.autograd.grad, outputs, inputs, upstream_of(outputs),
                                               retain_graph=True))
        found[contestant.name] = in_turn(functions), contestant.context
    return found


def takes_part(name, call, context):
    """Whether a first call succeeds: torch.compile asks for triton, a C compiler and Python's headers."""
    try:
        with context():
            call()
    except Exception as problem:
        leave_out(name, problem)
        return False
    return True


def take_turns(playing, rounds, clock):
    """{name: milliseconds of a call in each round}, every round in another order; the first calls are not counted, and
    peers whose first call fails are left out."""
    times = {}
    for name, (call, context) in playing.items():
        if takes_part(name, call, context):
            with context():
                times[name] = max(1, min(MOST_CALLS, round(SAMPLE_MS / max(1e-3, clock(call, 3)))))
    samples, names = {name: [] for name in times}, list(times)
    for number in range(rounds):
        for name in names[number % len(names):] + names[:number % len(names)]:
            call, context = playing[name]
            with context():
                samples[name].append(clock(call, times[name]))
    return samples


def rows_of(case, direction, samples, errors, ceilings):
    """A row for each peer: times, their ratio, and what part of the ceiling ours reaches."""
    mine, rows = [1e-3 * sample for sample in samples["ours"]], []
    rate = case.work[direction] / statistics.median(mine)
    for name in samples:
        if name == "ours":
            continue
        which = int(direction == BACKWARD)
        rows.append({"op": case.op, "variant": case.variant, "shape": list(case.shape), "direction": direction,
                     "peer": name, **measure.comparison(mine, [1e-3 * sample for sample in samples[name]]),
                     "rate": rate, "ceiling": case.ceiling, "share_of_ceiling": rate / ceilings[case.ceiling]})
        rows[-1]["peer_share_of_ceiling"] = rows[-1]["share_of_ceiling"] / rows[-1]["ratio"]
        if errors:
            rows[-1] |= {"error": errors["ours"][which], "peer_error": errors[name][which]}
    return rows


def ceilings(clock):
    """Bytes a second of a copy, read and written, and FLOP a second of a product in bf16; the best of several."""
    source = torch.ones(2**28, device="cuda")
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    copy = min(clock(lambda: target.copy_(source), 5) for _ in range(8))
    product = min(clock(lambda: a @ b, 5) for _ in range(8))
    return {"copy": 2 * source.nbytes / (1e-3 * copy), "matmul": 2 * 8192**3 / (1e-3 * product)}


# ---- A training step ------------------------------------------------------------------------------------------------


def ways(device):
    """{name: context}: our kernels, and torch's."""
    return {"ours": functools.partial(ops.using, "fused", device), "sdpa": functools.partial(ops.using, "sdpa")}


def same_loss(losses):
    """Those of {name: loss} that are torch's but for rounding; peers that are not are left out."""
    found = []
    for name, loss in losses.items():
        if abs(loss - losses["sdpa"]) <= STEP_TOLERANCE:
            found.append(name)
        else:
            leave_out(name, Rejected("resultado rechazado: las pérdidas antes del primer paso no coinciden: "
                                     f"{losses}"))
    return found


def steps(args):
    """{name: (training step of gpt2 in bf16, its context)}: with our kernels, with torch's, with torch's compiled, and
    nanoGPT's compiled."""
    fused, plain = ways("cuda").values()
    playing = {"ours": (train_step.ours("ours", "fused", 0.0), fused, False),
               "sdpa": (train_step.ours("sdpa", "sdpa", 0.0), plain, False),
               "sdpa, torch.compile": (train_step.ours("sdpa", "sdpa", 0.0), plain, True)}
    if args.nanogpt:
        theirs = train_step.nanogpt(train_step.NANOGPT, args.nanogpt, 0.0)
        playing["nanoGPT, torch.compile"] = theirs, contextlib.nullcontext, True
    weights = gpt.GPT(train_step.CONFIG).init_weights(SEED).state_dict()
    tokens = torch.randint(train_step.CONFIG.vocab_size, (STEP_BATCH, STEP_LENGTH + 1), device="cuda")
    found, losses = {}, {}
    for name, (contestant, context, compile_it) in playing.items():
        contestant.load(weights)
        contestant.model.cuda()
        with context(), torch.no_grad(), train_step.autocast("bf16", "cuda"):
            losses[name] = contestant.loss(contestant.model, tokens[:2]).item()
        if compile_it:
            contestant.model.compile()
        found[name] = functools.partial(contestant.step, tokens, "bf16"), context
    return {name: found[name] for name in same_loss(losses)}


@dataclasses.dataclass
class Training:
    """The training step of one model. shape: batch and length. batch: what loss(model, batch), a mean, takes. flop: of
    a step, by the model's own function. planned: bytes of tensors at the peak by aura/plan.py, None where it has no
    plan."""

    name: str
    shape: tuple
    model: torch.nn.Module
    batch: torch.Tensor
    loss: Callable
    flop: float
    planned: int | None = None


def on_device(make, device):
    """make()'s module, its matrices from N(0, 0.02), made on the device: the generator that scripts use, the CPU's,
    takes minutes for billions of weights."""
    with torch.device(device):
        module = make()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02)
    return module


def some_tokens(config, batch, length, device):
    return torch.randint(config.vocab_size, (batch, length), device=device)


def gpt_training(name, preset, device):
    """A micro-batch of a preset of train_tensordock.py, and the optimiser's step."""
    config, batch = preset.config, preset.batch_size
    model = on_device(lambda: gpt.GPT(config), device)
    model.grad_checkpointing = preset.grad_checkpointing
    job = plan.Job(config, batch, 1, preset.grad_checkpointing, "bf16", "adamw", "cpu" if device == "cpu" else "cuda")
    planned = max(sum(parts.values()) - parts["reserve"] for parts in plan.phases(job).values())
    return Training(name, (batch, config.seq_len), model, some_tokens(config, batch, config.seq_len + 1, device),
                    train_step.our_loss, config.flops_per_token() * batch * config.seq_len, planned)


def hrm_training(name, preset, device):
    """A micro-batch of a preset of the HRM scripts, with all the passes that gradients ever flow through."""
    config, batch = preset.config, preset.batch_size
    model = on_device(lambda: hrm.HRM(config), device)
    model.grad_checkpointing = preset.grad_checkpointing
    return Training(name, (batch, config.seq_len), model, some_tokens(config, batch, config.seq_len + 1, device),
                    hrm_step.our_loss, config.flops_per_token() * batch * config.seq_len)


def bert_training(name, config, device, batch=BERT_BATCH, length=BERT_LENGTH):
    """Windows without padding, as those of a long text are."""
    model = on_device(lambda: bert.QuestionAnswering(config), device)
    tokens = some_tokens(config, batch, length, device)
    rest = (torch.zeros_like(tokens), torch.full((batch,), length, device=device),
            torch.randint(length, (batch, 2), device=device))

    def loss(model, tokens):
        total, count = train_distributed.answer_loss(model, (tokens, *rest))
        return total / count

    return Training(name, (batch, length), model, tokens, loss, config.flops(length) * batch)


def trainings(device):
    """Functions that make a Training each, the smallest first."""
    yield functools.partial(bert_training, "bert-base", bert.PRESETS["base"], device)
    for name in ("aura-72h-extended", "aura-72h-max"):
        yield functools.partial(gpt_training, name, train_tensordock.PRESETS[name], device)
    yield functools.partial(hrm_training, "hrm 1b", hrm_training_large_1b.PRESETS["1b"], device)


def step_memory(step, device, held):
    """The most bytes there are in a step (backend.peak_memory), without those that others hold."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    step()
    return backend.peak_memory(device) - held


def training_rows(training, rounds, clock, ceilings, held=0):
    """A row for torch's operators beside ours, on one and the same model: weights change no time, and two of the
    largest would not fit a card. held: bytes that there were on the device before the model."""
    device = training.batch.device
    contestant = train_step.Contestant("ours", training.model, None, training.loss)
    step, losses = functools.partial(contestant.step, training.batch, "bf16"), {}
    training.model.eval()  # dropout off
    for name, context in ways(device.type).items():
        with context(), torch.no_grad(), train_step.autocast("bf16", device.type):
            losses[name] = training.loss(training.model, training.batch).item()
    same_loss(losses)
    training.model.train()
    samples = take_turns({name: (step, context) for name, context in ways(device.type).items()}, rounds, clock)
    case = Case(f"training step {training.name}", "bf16", training.shape, [], [], None, "matmul",
                {STEP: training.flop})
    rows, memory = rows_of(case, STEP, samples, None, ceilings), {}
    for name, context in ways(device.type).items():
        with context():
            memory[name] = step_memory(step, device, held)
    for row in rows:
        row |= {"peak_bytes": memory["ours"], "peer_peak_bytes": memory[row["peer"]]}
        if training.planned:
            row |= {"planned_bytes": training.planned, "memory_ratio": memory["ours"] / training.planned}
    return rows


def gpt2_rows(args, clock, ceilings):
    """A row for each peer of the training step of gpt2."""
    samples = take_turns(steps(args), args.rounds, clock)
    config = dataclasses.replace(train_step.CONFIG, seq_len=STEP_LENGTH)
    case = Case("training step gpt2", "bf16", (STEP_BATCH, STEP_LENGTH), [], [], None, "matmul",
                {STEP: config.flops_per_token() * STEP_BATCH * STEP_LENGTH})
    return rows_of(case, STEP, samples, None, ceilings)


# ---- Everything -----------------------------------------------------------------------------------------------------


def case_rows(make, rounds, clock, ceilings):
    """The rows of a case, checked first."""
    case = make()
    errors = check(case)
    return [row for direction in case.work
            for row in rows_of(case, direction, take_turns(calls(case, direction), rounds, clock), errors, ceilings)]


def model_rows(make, rounds, clock, ceilings):
    """The rows of a Training, made beside what others hold."""
    held = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    return training_rows(make(), rounds, clock, ceilings, held)


def parts(args, clock, ceilings):
    """(name, function that gives its rows) of all that is asked for, in the order it is measured."""
    for section, make in cases(args):
        if section in args.only:
            name = " ".join([section, *map(str, make.args)])
            yield name, functools.partial(case_rows, make, args.rounds, clock, ceilings)
    if "step" in args.only:
        yield "gpt2", functools.partial(gpt2_rows, args, clock, ceilings)
        for make in trainings("cuda"):
            yield make.args[0], functools.partial(model_rows, make, min(args.rounds, MODEL_ROUNDS), clock, ceilings)


def rows_with_room(name, make_rows):
    """make_rows(); none where the card has no room for them, and a row that says why where they fail. A kernel that
    hangs ends the program."""
    torch.compiler.reset()  # closures of one function share a limit of eight compilations
    gc.collect()  # cycles of what was measured before hold its memory
    torch.cuda.empty_cache()
    # Python's own signals would wait as long as the card.
    faulthandler.dump_traceback_later(PART_SECONDS, exit=True, file=sys.__stderr__)
    try:
        return make_rows()
    except torch.OutOfMemoryError as refusal:
        print(f"  {name} no se mide: {reason(refusal)}", file=sys.stderr)
        return []
    except Exception as problem:  # whatever it is, the others can be measured
        traceback.print_exc()
        return [{"op": name, "failed": reason(problem)}]
    finally:
        faulthandler.cancel_dump_traceback_later()


def lost_card():
    """Why this process has no more use of the card, as after a kernel that wrote out of bounds; "" where it has."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as problem:
        return reason(problem)
    return ""


# ---- Telling --------------------------------------------------------------------------------------------------------


def markdown(result):
    """The rows as a table: the fastest peer of each case and direction, and both their parts of the ceiling."""
    lines = ["| operación | forma | sentido | propio, ms | mejor rival | rival, ms | razón | del techo | el rival |",
             "| --- | --- | --- | ---: | --- | ---: | ---: | ---: | ---: |"]
    groups = {}
    measured, failed = split(result["rows"])
    for row in measured:
        groups.setdefault((row["op"], row["variant"], tuple(row["shape"]), row["direction"]), []).append(row)
    for (op, variant, shape, direction), rows in groups.items():
        peers = sorted((row for row in rows if row["peer"] != speeds.OTHER_KERNELS), key=lambda row: row["peer_ms"])
        for row in (*peers[:1], *(row for row in rows if row["peer"] == speeds.OTHER_KERNELS)):
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
    """What a training step took of it, and what part of the plan that is; "" for other rows."""
    if "peak_bytes" not in row:
        return ""
    ratio = f", {row['memory_ratio']:.2f} de lo previsto" if "planned_bytes" in row else ""
    return f"; memoria {row['peak_bytes'] / 1e9:.1f} GB{ratio}"


def write(args, result):
    """The files that were asked for."""
    measure.write(args.json, result)
    if args.markdown:
        Path(args.markdown).write_text(markdown(result), encoding="utf-8")


def learn(rows):
    """Keep which operations are faster in our kernels on this card, for --attention auto; nothing where a part failed:
    auto would go by the sizes beside it."""
    if split(rows)[1]:
        print("No se guarda nada para --attention auto: hay partes que fallan.")
        return
    path, known = cuda_extension.speeds_file(), speeds.learnt(rows)
    speeds.write(path, known)
    print(f"--attention auto usará en esta tarjeta los núcleos propios de: {', '.join(known.operations()) or 'nada'} "
          f"({path})")


SECTIONS = ("norms", "activations", "rotary", "loss", "attention", "documents", "step")


def build_parser():
    parser = argparse.ArgumentParser(description="Mide los núcleos de CUDA frente a los de torch, en una GPU.")
    parser.add_argument("--only", type=measure.names(*SECTIONS), default=list(SECTIONS), metavar="PARTES",
                        help=f"solo estas partes, separadas por comas: {', '.join(SECTIONS)}")
    parser.add_argument("--dtype", type=measure.names(*DTYPES), default=["bf16"],
                        help="tipos de los tensores (por defecto: bf16)")
    parser.add_argument("--seq-len", type=measure.numbers, default="512,1024,2048,4096", metavar="T,T,...",
                        help="longitudes de la atención (por defecto: 512,1024,2048,4096)")
    parser.add_argument("--rounds", type=int, default=7, help="rondas de cada comparación (por defecto: 7)")
    parser.add_argument("--learn", action="store_true",
                        help="guarda qué es más rápido en esta tarjeta, para --attention auto")
    parser.add_argument("--nanogpt", metavar="CARPETA", help="copia de nanoGPT, rival del paso de entrenamiento")
    parser.add_argument("--json", metavar="FICHERO", help="dónde escribir los resultados")
    parser.add_argument("--markdown", metavar="FICHERO", help="dónde escribir la tabla")
    return parser


def race(args):
    """Measure what the arguments ask for, telling it as it goes; returns what goes into the JSON file."""
    began, clock = time.perf_counter(), timer("cuda")
    found = ceilings(clock)
    result = {"benchmark": "gpu", **measure.environment(), "device": torch.cuda.get_device_name(),
              "capability": torch.cuda.get_device_capability(), "cuda": torch.version.cuda,
              "cache_bytes": cache_bytes(torch.device("cuda")), "ceilings": found, "seconds": 0.0, "rows": []}
    print(f"{result['device']}, torch {torch.__version__}: copia {found['copy'] / 1e9:.0f} GB/s, torch.mm en bf16 "
          f"{found['matmul'] / 1e12:.0f} TFLOP/s")
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
    except extension.Unavailable as problem:
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
    sys.exit(main())
