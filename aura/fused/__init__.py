"""Our kernels as torch operators, one module a family. Import it after extension.load(), which registers them."""

from aura.fused import activation, attention, gradients, loss, norms, rotary

__all__ = ["activation", "attention", "gradients", "loss", "norms", "rotary"]
