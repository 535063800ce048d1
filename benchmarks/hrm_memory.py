"""Memory and speed of a training step of HRM-Text1, computed: nothing is allocated, no GPU is needed.

    python benchmarks/hrm_memory.py --preset 1b --batch-size 24,12

The step runs on tensors without data (FakeTensorMode). The bytes of all that exist are added up, and the most at any
moment is kept: weights, gradients, AdamW's moments, the average of the weights (EMA), activations, logits. As on a GPU,
torch carries out the operations, in bfloat16 by autocast, and the loss is computed in chunks. What the CUDA context,
cuBLAS and fragmentation take is not included. Tokens/s follow from FLOPs per token, a card's peak and an assumed share
of it.
"""

import contextlib
import sys
import weakref
from pathlib import Path
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import measure  # noqa: E402

from aura import cli, ops, optim, products, report  # noqa: E402
from aura.models import hrm  # noqa: E402

CARDS = ("NVIDIA A100-SXM4-80GB", "NVIDIA H200")
ASSUMED_USE = 0.4


loss_rows = ops.loss_rows


@contextlib.contextmanager
def as_on_a_gpu():
    """A block in which the CPU carries out a step as a GPU would."""
    with (mock.patch.object(ops, "loss_rows", lambda vocabulary, _: loss_rows(vocabulary, "cuda")),
          mock.patch.object(products, "DEVICES", ("cpu",))):
        yield


class Live(TorchDispatchMode):
    """Adds up the bytes of the tensors that exist; `most` is the most there were."""

    def __init__(self):
        super().__init__()
        self.known, self.bytes, self.most = weakref.WeakSet(), 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor)
        return result

    def see(self, tensor):
        storage = tensor.untyped_storage()
        if storage not in self.known:
            self.known.add(storage)
            self.change(storage.nbytes())
            weakref.finalize(storage, self.change, -storage.nbytes())

    def change(self, count):
        self.bytes += count
        self.most = max(self.most, self.bytes)


def step_bytes(config, batch_size, grad_checkpointing, precision="bf16"):
    """The most bytes at any moment of a step, without EMA: of the second step, since then the optimiser has its
    state."""
    live = Live()
    with FakeTensorMode(), live, ops.using("sdpa"), as_on_a_gpu():
        model = hrm.HRM(config)
        model.grad_checkpointing = grad_checkpointing
        optimizer = optim.adamw(model, 1e-3, 0.1)
        batch = torch.zeros(batch_size, config.seq_len + 1, dtype=torch.int64)
        for _ in range(2):
            with products.step(model), products.adding(True):
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                    loss = model(batch[:, :-1], batch[:, 1:])
                loss.backward()
            torch._foreach_mul_([p.grad for p in model.parameters()], 0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return live.most


def build_parser():
    parser = cli.Parser(description="Calcula la memoria y la velocidad de un paso de HRM-Text1.")
    parser.add_argument("--preset", type=cli.choice(*hrm.PRESETS), default="1b", help=", ".join(hrm.PRESETS))
    parser.add_argument("--batch-size", type=measure.sizes, default="24,12", help="secuencias de cada lote")
    parser.add_argument("--seq-len", type=cli.number(int, low=1), help="longitud (por defecto: la del preset)")
    return parser


def main(argv=None):
    args = build_parser().parse_args(argv)
    config = hrm.PRESETS[args.preset]
    if args.seq_len:
        config = type(config)(**{**vars(config), "seq_len": args.seq_len})
    ema = 4 * config.parameters()
    print(f"{args.preset}: {config.parameters() / 1e6:.0f} M parámetros, longitud {config.seq_len}, bf16, AdamW y EMA; "
          "calculado, no medido en una GPU")
    for card in CARDS:
        rate = ASSUMED_USE * report.PEAK_FLOPS[card] / config.flops_per_token()
        flops = config.flops_per_token()
        print(f"{card}: {flops / 1e9:.2f} GFLOP por token ({flops / 6 / config.parameters():.1f} veces 6N); con un uso "
              f"supuesto del {ASSUMED_USE:.0%}, {rate:.0f} tokens/s por GPU")
    print(f"{'lote':>4} {'sin recalcular':>15} {'recalculando':>13}")
    for batch_size in args.batch_size:
        whole, again = (step_bytes(config, batch_size, checkpointing) + ema for checkpointing in (False, True))
        print(f"{batch_size:>4} {whole / 1e9:>12.1f} GB {again / 1e9:>10.1f} GB")


if __name__ == "__main__":
    cli.run(main)
