"""An exponential moving average of the weights, which generalises better than the last of them (Polyak and Juditsky
1992; Izmailov et al. 2018)."""

import contextlib

import torch


class Average:
    """The average of a module's parameters over its steps. Takes 4 bytes a parameter, in shards where the module is.

    decay: how much of the average stays at each step; with 0 there is no average, and every method does nothing.
    weights: parameter name -> float32 tensor.
    """

    def __init__(self, module, decay=0.0):
        named = dict(module.named_parameters()) if decay else {}
        self.decay, self.parameters = decay, list(named.values())
        self.weights = {name: parameter.detach().clone() for name, parameter in named.items()}

    @torch.no_grad()
    def update(self, step, weights=None):
        """Take in the weights after the 1-based `step`: the module's, or these, in its order. The decay rises with the
        steps, min(decay, (1 + step) / (10 + step)), or the first weights would stay for long (num_updates of
        TensorFlow's ExponentialMovingAverage)."""
        if self.weights:
            kept = min(self.decay, (1 + step) / (10 + step))
            torch._foreach_lerp_(_local(self.weights.values()), _local(weights or self.parameters), 1 - kept)

    def applied(self):
        """A block in which the module holds the average."""
        return swapped(self.weights.values(), self.parameters)

    @torch.no_grad()
    def load(self, weights=None):
        """Go on from stored `weights`, or from the module's own where none were stored."""
        for (name, average), own in zip(self.weights.items(), self.parameters, strict=True):
            average.copy_(weights[name] if weights else own)


@contextlib.contextmanager
def swapped(others, parameters):
    """A block in which `parameters` have the values of `others`, and these theirs; undone after it, whatever
    happens."""
    _swap(others, parameters)
    try:
        yield
    finally:
        _swap(others, parameters)


@torch.no_grad()
def _swap(others, parameters):
    # In place and one at a time: others hold these very tensors, and there may be no room for a third copy.
    for other, weight in zip(_local(others), _local(parameters), strict=True):
        kept = weight.clone()
        weight.copy_(other)
        other.copy_(kept)


def _local(tensors):
    """The tensors, or what this rank holds of them: what is done to each element needs nobody else."""
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
