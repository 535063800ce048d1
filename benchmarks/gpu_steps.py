"""The training steps that benchmarks/gpu.py measures: gpt2 beside its peers, and the largest models of the scripts."""

import contextlib
import dataclasses
import functools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gpu_cases  # noqa: E402
import gpu_measure  # noqa: E402
import hrm_step  # noqa: E402
import train_step  # noqa: E402

import hrm_training_large_1b  # noqa: E402
import train_distributed  # noqa: E402
import train_tensordock  # noqa: E402
from aura import backend, ops, plan  # noqa: E402
from aura.models import bert, gpt, hrm  # noqa: E402

STEP_BATCH, STEP_LENGTH, STEP_TOLERANCE = 32, 1024, 0.02  # nats: by how much bfloat16 may change the first loss
BERT_BATCH, BERT_LENGTH = 32, 384
MODELS = "gpt2", "bert-base", "aura-72h-extended", "aura-72h-max", "hrm-1b"


@contextlib.contextmanager
def eager(context):
    """`context`, in which what torch.compile has wrapped runs eagerly."""
    with context(), torch.compiler.set_stance("force_eager"):
        yield


def ways(device, compiles=True):
    """{name: context}: our kernels and torch's, eager and, for a model that compiles, under torch.compile."""
    kernels = {"ours": functools.partial(ops.using, "fused", device), "sdpa": functools.partial(ops.using, "sdpa")}
    compiled = {gpu_cases.COMPILED: kernels["ours"], "sdpa, torch.compile": kernels["sdpa"]} if compiles else {}
    return {name: functools.partial(eager, context) for name, context in kernels.items()} | compiled


def steps_of(contestant, batch, micro_batches=1, compiles=True):
    """{name: (training step in bf16, its context)} of one model in all ways(), with the same weights and optimiser:
    weights change no time, and two of the largest would not fit a card."""
    run = contestant.model.compiled() if compiles else None
    step = functools.partial(contestant.step, batch, "bf16", micro_batches, run)
    return {name: (step, context) for name, context in ways(batch.device.type, compiles).items()}


def faster_first(samples, *others):
    """(samples, *others), all {name: anything}, where "ours" is the faster of compiled and eager, and the slower stands
    beside it."""
    names = {}
    if gpu_cases.COMPILED in samples and statistics.median(samples[gpu_cases.COMPILED]) < statistics.median(
            samples["ours"]):
        names = {gpu_cases.COMPILED: "ours", "ours": gpu_cases.EAGER}
    return tuple({names.get(name, name): value for name, value in found.items()} for found in (samples, *others))


def same_loss(losses):
    """Those of {name: loss} that equal torch's but for rounding; peers that do not are left out."""
    found = []
    for name, loss in losses.items():
        if abs(loss - losses["sdpa"]) <= STEP_TOLERANCE:
            found.append(name)
        else:
            gpu_measure.leave_out(name, gpu_measure.Rejected("resultado rechazado: las pérdidas antes del primer paso "
                                                             f"no coinciden: {losses}"))
    return found


def first_loss(contestant, batch):
    """The loss on a batch before anything is learnt."""
    with torch.no_grad(), train_step.autocast("bf16", batch.device.type):
        return contestant.loss(contestant.model, batch).item()


def losses_of(contestant, batch):
    """{name: first loss} with our kernels and with torch's."""
    found = {}
    for name, context in ways(batch.device.type, compiles=False).items():
        with context():
            found[name] = first_loss(contestant, batch)
    return found


def steps(args, device):
    """{name: (training step of gpt2 in bf16, its context)}: our model in all ways(), and nanoGPT's compiled."""
    mine = train_step.ours("ours", "fused", 0.0)
    peers = [train_step.nanogpt("nanoGPT, torch.compile", args.nanogpt, 0.0)] if args.nanogpt else []
    weights = mine.model.init_weights(gpu_cases.SEED).state_dict()
    tokens = torch.randint(train_step.CONFIG.vocab_size, (STEP_BATCH, STEP_LENGTH + 1), device=device)
    for contestant in (mine, *peers):
        contestant.load(weights)
        contestant.model.to(device)
    losses = losses_of(mine, tokens[:2]) | {peer.name: first_loss(peer, tokens[:2]) for peer in peers}
    alike, playing = same_loss(losses), steps_of(mine, tokens)
    for peer in peers:
        if peer.name in alike:
            peer.model.compile()
            playing[peer.name] = functools.partial(peer.step, tokens, "bf16"), peer.context
    return playing


@dataclasses.dataclass
class Training:
    """The training step of one model. shape: sequences and length. batch: its micro-batches as one, parts of which
    loss(model, part), a mean, takes. flop: of a step, by the model's own function. planned: bytes of tensors at the
    peak by aura/plan.py, None where it has no plan. compiles: whether torch.compile takes part."""

    name: str
    shape: tuple
    model: torch.nn.Module
    batch: torch.Tensor
    loss: Callable
    flop: float
    planned: int | None = None
    micro_batches: int = 1
    compiles: bool = True


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
    """A whole step of a preset of train_tensordock.py: all its micro-batches, and the optimiser's."""
    config, accum = preset.config, preset.grad_accum
    batch = preset.batch_size * accum
    model = on_device(lambda: gpt.GPT(config), device)
    model.grad_checkpointing = preset.grad_checkpointing
    job = plan.Job(config, preset.batch_size, accum, preset.grad_checkpointing, "bf16", "adamw",
                   "cpu" if device == "cpu" else "cuda", fused=True)
    planned = max(sum(parts.values()) - parts["reserve"] for parts in plan.phases(job).values())
    return Training(name, (batch, config.seq_len), model, some_tokens(config, batch, config.seq_len + 1, device),
                    train_step.our_loss, config.flops_per_token() * batch * config.seq_len, planned, accum)


def hrm_training(name, preset, device):
    """A micro-batch of a preset of the HRM scripts, with all the passes that gradients ever flow through. Not compiled:
    each of its two deep stacks would be a graph for each way in which gradients go through it."""
    config, batch = preset.config, preset.batch_size
    model = on_device(lambda: hrm.HRM(config), device)
    model.grad_checkpointing = preset.grad_checkpointing
    return Training(name, (batch, config.seq_len), model, some_tokens(config, batch, config.seq_len + 1, device),
                    hrm_step.our_loss, config.flops_per_token() * batch * config.seq_len, compiles=False)


def bert_training(name, config, device, batch=BERT_BATCH, length=BERT_LENGTH):
    """A training step of BERT on windows without padding, as a long text gives them."""
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
    yield functools.partial(hrm_training, "hrm-1b", hrm_training_large_1b.PRESETS["1b"], device)


@contextlib.contextmanager
def noting_peak(context, name, memory, device, held):
    """`context`, after which memory[name] is the peak of bytes within it (backend.peak_memory), without the `held` of
    others. Noted between samples, that costs neither a step nor measured time."""
    with context():
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        yield
        memory[name] = backend.peak_memory(device) - held


def training_rows(training, rounds, clock, ceilings, held=0):
    """A row for each way of training the same model other than ours. held: bytes on the device before the model was
    made."""
    device, memory = training.batch.device, {}
    contestant = train_step.Contestant("ours", training.model, None, training.loss)
    training.model.eval()  # dropout off
    same_loss(losses_of(contestant, training.batch.chunk(training.micro_batches)[0]))
    training.model.train()
    steps = steps_of(contestant, training.batch, training.micro_batches, training.compiles)
    playing = {name: (step, functools.partial(noting_peak, context, name, memory, device, held))
               for name, (step, context) in steps.items()}
    samples = gpu_measure.take_turns(playing, rounds, clock)
    eager = memory["ours"]  # as the plan has it
    samples, memory = faster_first(samples, memory)
    case = gpu_cases.Case(f"training step {training.name}", "bf16", training.shape, [], [], None, "matmul",
                          {gpu_cases.STEP: training.flop})
    rows = gpu_measure.rows_of(case, gpu_cases.STEP, samples, None, ceilings)
    for row in rows:
        row |= {"peak_bytes": memory["ours"], "peer_peak_bytes": memory[row["peer"]]}
        if training.planned:
            row |= {"planned_bytes": training.planned, "memory_ratio": eager / training.planned}
    return rows


def gpt2_rows(args, clock, ceilings):
    """A row for each peer of the training step of gpt2."""
    samples, = faster_first(gpu_measure.take_turns(steps(args, "cuda"), args.rounds, clock))
    config = dataclasses.replace(train_step.CONFIG, seq_len=STEP_LENGTH)
    case = gpu_cases.Case("training step gpt2", "bf16", (STEP_BATCH, STEP_LENGTH), [], [], None, "matmul",
                          {gpu_cases.STEP: config.flops_per_token() * STEP_BATCH * STEP_LENGTH})
    return gpu_measure.rows_of(case, gpu_cases.STEP, samples, None, ceilings)
