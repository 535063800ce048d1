"""Backward passes that are not differentiable themselves."""

import functools

import torch


def once_differentiable(backward):
    """`backward`, raising RuntimeError where its gradients would be differentiated. torch's decorator of this name lets
    them pass for constants where the incoming gradient is one, as that of a plain sum."""

    @functools.wraps(backward)
    def checked(ctx, *gradients):
        if torch.is_grad_enabled():
            raise RuntimeError("the fused operators have no second derivatives; --attention sdpa has them")
        return backward(ctx, *gradients)

    return checked
