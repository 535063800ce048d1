"""What `python -m aura.ops` prints: what carries out each operation here, why, and how exact it is."""

import torch

from aura import backend, cli, extension, ops, products
from aura.errors import UserError


def post_layer_norm(x, *wide):
    """ops.post_layer_norm() of an x of 16 bits beside float32, as autocast makes them; both outputs in one tensor."""
    wide = (each.to(torch.promote_types(each.dtype, torch.float32)) for each in wide)
    return torch.cat([y.to(x.dtype) for y in ops.post_layer_norm(x, *wide)])


ANGLES = torch.linspace(0, 40, 800).view(40, 20)
TURNS = ANGLES.cos(), ANGLES.sin()
# name, function of a tuple of inputs, their shapes. Every input but integer ones is differentiated.
CASES = [
    ("attention", lambda qkv: ops.attention_packed(qkv, causal=False), [(2, 65, 3, 2, 40)]),
    ("attention, causal", lambda qkv: ops.attention_packed(qkv), [(2, 100, 3, 2, 64)]),
    ("attention, q k v aparte", lambda q, k, v: ops.attention(q, k, v), [(1, 50, 2, 64)] * 3),
    ("attention, lengths", lambda qkv: ops.attention_packed(qkv, lengths=torch.tensor([0, 33])), [(2, 65, 3, 1, 64)]),
    ("attention, cu_seqlens", lambda qkv: ops.attention_packed(qkv, cu_seqlens=torch.tensor([0, 7, 7, 130])),
     [(2, 65, 3, 1, 64)]),
    ("layer_norm", ops.layer_norm, [(33, 200), (200,), (200,)]),
    ("rms_norm", ops.rms_norm, [(33, 200), (200,)]),
    ("add_layer_norm", lambda *inputs: torch.cat(ops.add_layer_norm(*inputs)), [(33, 200), (33, 200), (200,), (200,)]),
    ("post_layer_norm", post_layer_norm, [(33, 200), (33, 200), (200,), (200,)]),
    ("add_rms_norm", lambda *inputs: torch.cat(ops.add_rms_norm(*inputs)), [(33, 200), (33, 200), (200,)]),
    ("gelu_tanh", ops.gelu_tanh, [(33, 200)]),
    ("swiglu", ops.swiglu, [(33, 200)]),
    ("sigmoid_gate", ops.sigmoid_gate, [(33, 200), (33, 200)]),
    ("rotary", lambda qkv: ops.rotary_packed(qkv, *(turn.to(qkv.device) for turn in TURNS)), [(2, 40, 3, 2, 40)]),
    ("linear_cross_entropy", lambda h, w: ops.linear_cross_entropy(h, w, torch.arange(33, device=h.device)),
     [(33, 64), (100, 64)]),
]
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
GPU_LIMITS = {torch.bfloat16: 2e-2, torch.float16: 3e-3}


def relative_error(got, exact):
    """|got - exact| / |exact| in the Euclidean norm; both sequences of tensors."""
    difference = sum((a.double() - b).square().sum() for a, b in zip(got, exact, strict=True))
    return float((difference / sum(b.square().sum() for b in exact)).sqrt())


def outputs(function, inputs):
    """([result], its gradients by the inputs under a random gradient), computed with what ops is set to, where the
    inputs are, and brought to the CPU."""
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    result = function(*inputs)
    direction = torch.randn(result.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    gradients = torch.autograd.grad(result, inputs, direction.to(result))
    return [result.detach().cpu()], [gradient.cpu() for gradient in gradients]


def errors(function, shapes, dtype, device="cpu"):
    """Relative errors of result and gradients against the formula in float64, from inputs rounded to `dtype`."""
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    got = outputs(function, [tensor.to(device) for tensor in inputs])
    with ops.using("reference"):
        exact = outputs(function, [tensor.double() for tensor in inputs])
    return [relative_error(a, b) for a, b in zip(got, exact, strict=True)]


def main():
    """Print the report; returns 0, or 1 when a kernel is wrong."""
    cli.Parser(prog="python -m aura.ops", description="Dice qué núcleos se usan aquí y los compara con float64; código "
               "1 si alguno falla.").parse_args()
    device = backend.local_device(0)
    ops.use("auto", device)
    print(f"{extension.status()}")
    module = extension.load()
    if extension.has_ops(module):
        print(f"Instrucciones: {module.cpu_isa()}; este procesador admite {', '.join(module.cpu_isas())} "
              "(AURA_CPU_ISA=NOMBRE impone uno)")
        if products.onednn_is_better():
            print("Productos de matrices en float32: por oneDNN, que en este procesador los hace antes que MKL")
    print(f"En {device.type}: {ops.describe(device)}")
    wrong = check(CASES, LIMITS, "cpu")
    if torch.cuda.is_available():
        wrong |= check_gpu()
    print("Los errores son relativos, contra la fórmula en float64, en la CPU. "
          + ("Hay núcleos que fallan: avise, y use --attention sdpa." if wrong else "Todo correcto."))
    return int(wrong)


def check_gpu():
    """Check our CUDA kernels, which it builds; returns whether one is wrong."""
    try:
        ops.use("fused", "cuda")
    except UserError as problem:
        print(f"En la GPU no hay núcleos propios: {problem}")
        return False
    print(f"En {torch.cuda.get_device_name()}:")
    return check(CASES, GPU_LIMITS, "cuda")


def check(cases, limits, device):
    """Print the errors of each case in each dtype; returns whether one is beyond its limit."""
    print(f"{'operación':26} {'tipo':9} {'error del resultado':>20} {'de los gradientes':>18}")
    wrong = False
    for name, function, shapes in cases:
        for dtype, limit in limits.items():
            result, gradient = errors(function, shapes, dtype, device)
            bad = not (result <= limit and gradient <= limit)  # NaN is bad, which max() may pass over
            wrong |= bad
            print(f"{name:26} {str(dtype).removeprefix('torch.'):9} {result:20.1e} {gradient:18.1e}"
                  f"{'  MAL: más de ' + str(limit) if bad else ''}")
    return wrong
