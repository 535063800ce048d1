"""How a model carries out its blocks while it trains: compiled or as they are, kept or computed again."""

import torch
from torch.utils.checkpoint import checkpoint


def as_it_is(block, *inputs):
    """What carries a block out where it is not compiled."""
    return block(*inputs)


def compiled(dynamic=None):
    """What carries blocks out under torch.compile. dynamic: one graph for all shapes from the first, as torch.compile
    has it.

    As a whole, a model of some ten blocks takes minutes to compile, or torch's compiler gives up (its recursion is as
    deep as the model). Here the block is an argument of what is compiled, so that all blocks share one graph, but for
    those whose inputs have another dtype or need no gradient. Nor is anything lost with gradient checkpointing, which
    would end the graph at the same place."""
    return torch.compile(as_it_is, dynamic=dynamic)


def train(run, again, block, *inputs):
    """run(block, *inputs). again: keep only the inputs for backward, and compute the rest once more there (Chen et al.
    2016). Gradients do not change by a bit, dropout included: the random state of the forward pass is put back."""
    if again:
        return checkpoint(run, block, *inputs, use_reentrant=False)
    return run(block, *inputs)
