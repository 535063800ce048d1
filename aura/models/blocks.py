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
    deep as the model). All blocks of a model share one graph, as the block is an argument of what is compiled, but for
    those whose inputs have another dtype or need no gradient; and a graph that ends where a checkpoint does loses
    nothing by it."""
    return torch.compile(as_it_is, dynamic=dynamic)


def train(run, again, block, *inputs):
    """run(block, *inputs), where `again` keeping the inputs alone and computing the rest once more in backward (Chen et
    al. 2016). Gradients do not change by a bit, dropout included: the random state of the forward is put back."""
    if again:
        return checkpoint(run, block, *inputs, use_reentrant=False)
    return run(block, *inputs)
