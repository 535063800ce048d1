"""Parameter groups and learning-rate schedules."""

import math

import torch


def adamw(model, lr, weight_decay, betas=(0.9, 0.95)):
    """AdamW (Loshchilov and Hutter 2019) with decay on matrices only; norms and biases are left alone.

    betas are GPT-3's (Brown et al. 2020, appendix B). Fused: one pass over the state instead of a dozen.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
              {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=1e-8, fused=True)


def warmup_cosine(step, *, steps, warmup_steps, lr, min_lr):
    """Learning rate of the 0-based `step`: linear from lr / warmup_steps to lr, then half a cosine to min_lr at the
    last of `steps` steps (Loshchilov and Hutter 2017). A pure function, so that resuming needs no state."""
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, steps - 1 - warmup_steps)
    return min_lr + 0.5 * (lr - min_lr) * (1 + math.cos(math.pi * min(1.0, done)))
