"""The training steps that benchmarks/gpu.py measures: gpt2 beside its peers, and the largest models of the scripts."""

import dataclasses
import functools
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

STEP_BATCH, STEP_LENGTH, STEP_TOLERANCE = 32, 1024, 0.02  # nats: what bfloat16 may change of the first loss
BERT_BATCH, BERT_LENGTH = 32, 384


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
            gpu_measure.leave_out(name, gpu_measure.Rejected("resultado rechazado: las pérdidas antes del primer paso "
                                                             f"no coinciden: {losses}"))
    return found


def steps(args):
    """{name: (training step of gpt2 in bf16, its context)}: with our kernels, with torch's, with torch's compiled, and
    nanoGPT's compiled."""
    ours = dataclasses.replace(train_step.ours("ours", "fused", 0.0), context=ways("cuda")["ours"])
    plain = train_step.ours("sdpa", "sdpa", 0.0)
    compiled = [train_step.ours("sdpa, torch.compile", "sdpa", 0.0)]
    if args.nanogpt:
        compiled.append(train_step.nanogpt("nanoGPT, torch.compile", args.nanogpt, 0.0))
    playing = [ours, plain, *compiled]
    weights = gpt.GPT(train_step.CONFIG).init_weights(gpu_cases.SEED).state_dict()
    tokens = torch.randint(train_step.CONFIG.vocab_size, (STEP_BATCH, STEP_LENGTH + 1), device="cuda")
    losses = {}
    for contestant in playing:
        contestant.load(weights)
        contestant.model.cuda()
        with contestant.context(), torch.no_grad(), train_step.autocast("bf16", "cuda"):
            losses[contestant.name] = contestant.loss(contestant.model, tokens[:2]).item()
    for contestant in compiled:
        contestant.model.compile()
    alike = same_loss(losses)
    return {contestant.name: (functools.partial(contestant.step, tokens, "bf16"), contestant.context)
            for contestant in playing if contestant.name in alike}


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
    playing = {name: (step, context) for name, context in ways(device.type).items()}
    samples = gpu_measure.take_turns(playing, rounds, clock)
    case = gpu_cases.Case(f"training step {training.name}", "bf16", training.shape, [], [], None, "matmul",
                          {gpu_cases.STEP: training.flop})
    rows, memory = gpu_measure.rows_of(case, gpu_cases.STEP, samples, None, ceilings), {}
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
    samples = gpu_measure.take_turns(steps(args), args.rounds, clock)
    config = dataclasses.replace(train_step.CONFIG, seq_len=STEP_LENGTH)
    case = gpu_cases.Case("training step gpt2", "bf16", (STEP_BATCH, STEP_LENGTH), [], [], None, "matmul",
                          {gpu_cases.STEP: config.flops_per_token() * STEP_BATCH * STEP_LENGTH})
    return gpu_measure.rows_of(case, gpu_cases.STEP, samples, None, ceilings)
