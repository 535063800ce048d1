"""What torch.compile and tensors without data see of an operator: its outputs' shapes."""

import functools

import torch
from torch import library


def register_fake(name):
    """torch's decorator of this name, which also makes the function raise RuntimeError, as the operator does, where
    floating-point tensors are on several devices: beside one without data it would return memory as it was."""

    def register(function):
        @functools.wraps(function)
        def checked(*arguments):
            devices = {str(x.device) for x in arguments if isinstance(x, torch.Tensor) and x.is_floating_point()}
            if len(devices) > 1:
                raise RuntimeError(f"{name}: tensors are on {' and '.join(sorted(devices))}")
            return function(*arguments)

        library.register_fake(name)(checked)
        return function

    return register
