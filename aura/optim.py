"""Optimisers by name, parameter groups and learning-rate schedules."""

import importlib
import math

import torch

from aura.errors import UserError

NAMES = ("adamw", "adamw8bit", "adafactor")  # by the memory of their state, largest first
BETAS = (0.9, 0.95)  # GPT-3's (Brown et al. 2020, appendix B)


def build(name, model, lr, weight_decay, betas=BETAS):
    """The optimiser `name` of NAMES over the model's parameters, with decay on matrices only.

    lr means the same to all three; betas are for the two kinds of AdamW. Raises UserError for another name, or where
    bitsandbytes cannot be had.
    """
    if name == "adafactor":
        return adafactor(model, lr, weight_decay)
    makers = {"adamw": adamw, "adamw8bit": adamw8bit}
    if name not in makers:
        raise UserError(f"--optimizer {name!r}: se espera {', '.join(NAMES)}")
    return makers[name](model, lr, weight_decay, betas)


def require(name, device):
    """Raise UserError where the optimiser `name` of NAMES cannot be had for weights on `device`."""
    if name != "adamw8bit":
        return
    if device.type == "cpu":
        raise UserError("--optimizer adamw8bit necesita una GPU de NVIDIA y aquí se entrena en la CPU: use adamw o "
                        "adafactor")
    try:
        importlib.import_module("bitsandbytes.optim")
    except ImportError as problem:
        raise UserError("--optimizer adamw8bit necesita el paquete bitsandbytes: pip install bitsandbytes, o use "
                        "--optimizer adafactor") from problem


def _groups(model, weight_decay):
    """Decay for matrices; norms and biases are left alone."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [{"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}]


def adamw(model, lr, weight_decay, betas=BETAS):
    """AdamW (Loshchilov and Hutter 2019), 8 bytes of state a parameter. Fused: one pass over it instead of a dozen."""
    return torch.optim.AdamW(_groups(model, weight_decay), lr=lr, betas=betas, eps=1e-8, fused=True)


def adamw8bit(model, lr, weight_decay, betas=BETAS):
    """AdamW with both moments in 8 bits, quantised in blocks (Dettmers et al. 2022), about 2 bytes a parameter.

    From the optional package bitsandbytes, whose kernels want a GPU. Raises UserError as require() does.
    """
    require("adamw8bit", next(model.parameters()).device)
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(_groups(model, weight_decay), lr=lr, betas=betas, eps=1e-8)


def adafactor(model, lr, weight_decay):
    """Adafactor (Shazeer and Stern 2018): of a matrix's second moment the row and column sums alone, no first moment.

    Decay of the second moment 1 - step^-0.8 and clipping threshold 1 are the paper's (sections 7.2 and 6). The step is
    max(eps2, RMS of the weights) * lr (section 8); eps2 = 1 lifts it above the weights' own size, so that lr is the
    size of a step, as it is for AdamW; torch keeps it below 1 / sqrt(step), which for the rates of the presets is after
    more steps than anybody takes. eps1 keeps squares from 0: small enough not to reach the gradients of billions
    of weights whose norm is 1, large enough for its square to be a float32. foreach would need a copy of all weights.
    """
    return torch.optim.Adafactor(_groups(model, weight_decay), lr=lr, beta2_decay=-0.8, eps=(1e-16, 1.0), d=1.0,
                                 foreach=False)


def warmup_cosine(step, *, steps, warmup_steps, lr, min_lr):
    """Learning rate of the 0-based `step`: linear from lr / warmup_steps to lr, then half a cosine to min_lr at the
    last of `steps` steps (Loshchilov and Hutter 2017). A pure function, so that resuming needs no state."""
    return _warmup_then(lambda done: 0.5 * (1 + math.cos(math.pi * done)), step, steps, warmup_steps, lr, min_lr)


def warmup_linear(step, *, steps, warmup_steps, lr, min_lr):
    """warmup_cosine with a straight line down to min_lr in place of the half cosine (Devlin et al. 2019)."""
    return _warmup_then(lambda done: 1 - done, step, steps, warmup_steps, lr, min_lr)


def _warmup_then(decay, step, steps, warmup_steps, lr, min_lr):
    """decay(share of the way down, 0..1) -> share of lr - min_lr that is left."""
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, steps - 1 - warmup_steps)
    return min_lr + (lr - min_lr) * decay(min(1.0, done))
