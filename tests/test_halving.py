"""Gradients that travel as float16: two real processes, whose means are compared with the exact ones."""

import pytest
import torch
import torch.distributed as c10d

from aura import halving, sharding
from aura.halving import Halved
from aura.loop import Precision
from aura.session import Session
from tests.test_diloco import together

SIZES = (700, 3000, 64, 5000, 1)
ROUNDING = 2.0**-10  # of a float16, twice: before the sum and in it
MANY = 100
TINY = 1e-9
SCALES = (1.0, 1e6, 1.0, 65536.0, 1e-9, 65536e-9, 1e-9, 1.0, 1.0, 1.0)


class Weights(torch.nn.Module):
    """Parameters whose gradients are what is put in."""

    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.ones(size) for size in SIZES)

    def forward(self, gradients):
        pairs = zip(self.parts, gradients, strict=True)
        return sum((part * gradient).sum() for part, gradient in pairs if gradient is not None)


def gradients(rank, seed=0):
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return [torch.randn(size, generator=generator) for size in SIZES]


def wide(rank):
    """Values of very different sizes: beside the large ones, float16 keeps one digit of the small ones."""
    found = [1e-5 * part for part in gradients(rank)]
    for part in found:
        part[0] = 1000.0
    return found


# ---- In the processes ---------------------------------------------------------------------------------------------


def exchange(model, *micro_batches):
    """The mean gradients of a step as one vector."""
    model.zero_grad(set_to_none=True)
    for number, micro_batch in enumerate(micro_batches, 1):
        with sharding.exchanging(model, number == len(micro_batches)):
            model(micro_batch).backward()
    return torch.cat([parameter.grad for parameter in model.parameters()])


def over_many(dist, feedback):
    model, total = Halved(Weights(), dist), torch.zeros(sum(SIZES), dtype=torch.float64)
    for _ in range(MANY):
        total += exchange(model, wide(dist.rank))
        if not feedback:
            for residual in model.residuals:
                residual.zero_()
    return total / MANY


def accumulated(dist):
    """(mean gradients of a step of three micro-batches, how often the ranks have exchanged something in it)."""
    model, real, calls = Halved(Weights(), dist), c10d.all_reduce, []
    exchange(model, gradients(dist.rank))
    for residual in model.residuals:
        residual.zero_()
    c10d.all_reduce = lambda *words, **options: calls.append(words) or real(*words, **options)
    try:
        return exchange(model, *(gradients(dist.rank, seed) for seed in range(3))), len(calls)
    finally:
        c10d.all_reduce = real


def incomplete(dist):
    """The loss depends on the fourth part on no rank, and on the second on rank 1 alone."""
    model, part = Halved(Weights(), dist), gradients(dist.rank)
    part[3] = None
    if dist.rank == 0:
        part[1] = None
    return exchange(model, part)


def spoilt(dist):
    """Gradients, and residuals, of steps with a NaN, an infinity and nothing wrong on rank 1. So small that the scale
    from before has to outlive them."""
    model, seen = Halved(Weights(), dist), []
    for wrong in (None, float("nan"), float("inf"), None):
        part = [TINY * values for values in gradients(dist.rank)]
        if wrong and dist.rank == 1:
            part[1][5] = wrong
        seen.append((exchange(model, part), torch.cat(model.residuals)))
    return seen


def continued(dist):
    """The last three of six steps, at once and with another process's memory in the middle, from where the gradients
    are so small that another scale would round them otherwise."""
    model = Halved(Weights(), dist)
    for seed in range(3):
        exchange(model, gradients(dist.rank, seed))
    kept = {name: [tensor.clone() for tensor in tensors] for name, tensors in model.own_state().items()}
    again = Halved(Weights(), dist, kept)
    small = [[1e-6 * part for part in gradients(dist.rank, seed)] for seed in range(3, 6)]
    return [torch.cat([exchange(one, part) for part in small]) for one in (model, again)]


def two(dist, folder):
    halving.FIRST_BUCKET_BYTES, halving.BUCKET_BYTES = 4096, 8192
    model = Halved(Weights(), dist)
    sized = [exchange(model, [scale * part for part in gradients(dist.rank)]) for scale in SCALES]
    torch.save({"once": exchange(Halved(Weights(), dist), gradients(dist.rank)), "sized": torch.stack(sized),
                "tiny": exchange(Halved(Weights(), dist), [TINY * part for part in gradients(dist.rank)]),
                "fed back": over_many(dist, True), "forgotten": over_many(dist, False),
                "accumulated": accumulated(dist), "buckets": len(model.buckets), "incomplete": incomplete(dist),
                "spoilt": spoilt(dist), "continued": continued(dist)}, folder / f"{dist.rank}.pt")


# ---- Here ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What each of two ranks has saved."""
    folder = tmp_path_factory.mktemp("halving")
    together(2, two, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def test_a_scale_is_the_power_of_two_by_the_bits_alone():
    """Next to some powers a logarithm is off by one, and which ones these are differs between devices."""
    before = torch.tensor(3.0)
    for power in range(-100, 127):
        just = torch.tensor(2.0**power)
        for peak, wanted in ((just, 2.0**(6 - power)), (just.nextafter(torch.tensor(0.0)), 2.0**(6 - power)),
                             (just.nextafter(torch.tensor(float("inf"))), 2.0**(5 - power))):
            assert halving._scale(peak, before) == wanted, (power, peak)
    for peak in (0.0, float("inf"), float("nan")):
        assert halving._scale(torch.tensor(peak), before) == before


def mean(make=gradients, **options):
    return sum(torch.cat(make(rank, **options)).double() for rank in range(2)) / 2


def test_the_same_bits_arrive_everywhere_and_are_near_the_mean(runs):
    def bits(tree):
        return [tree.nan_to_num(7.0)] if isinstance(tree, torch.Tensor) else \
            [tensor for part in tree for tensor in bits(part)] if isinstance(tree, list | tuple) else []

    for name in runs[0].keys() - {"spoilt"}:
        assert all(torch.equal(a, b) for a, b in zip(bits(runs[0][name]), bits(runs[1][name]), strict=True)), name
    size = torch.cat(gradients(0)).abs() + torch.cat(gradients(1)).abs()
    assert ((runs[0]["once"] - mean()).abs() <= ROUNDING * size + 1e-6).all()
    assert runs[0]["buckets"] == 3 and runs[0]["once"].dtype == torch.float32


def test_over_many_steps_the_mean_is_exact_and_without_feedback_it_is_not(runs):
    fed_back, forgotten = ((runs[0][name] - mean(wide)).abs() for name in ("fed back", "forgotten"))
    small = mean(wide) < 1
    assert fed_back[small].max() < 1.2e-8 and forgotten[small].median() > 1e-7
    assert fed_back.max() <= 1000 * ROUNDING


def test_micro_batches_add_up_and_are_exchanged_once(runs):
    found, calls = runs[0]["accumulated"]
    exact = sum(mean(seed=seed) for seed in range(3))
    assert (found - exact).abs().max() < 10 * ROUNDING and calls == runs[0]["buckets"]


def test_what_the_loss_does_not_depend_on_is_zero_and_holds_up_nothing(runs):
    parts, exact = runs[0]["incomplete"].split(SIZES), list(mean().float().split(SIZES))
    exact[3] = torch.zeros(SIZES[3])
    exact[1] = gradients(1)[1] / 2
    for found, right in zip(parts, exact, strict=True):
        torch.testing.assert_close(found, right, atol=4 * ROUNDING, rtol=0)
    assert not parts[3].any()


def test_huge_and_tiny_gradients_arrive_whole_in_the_end(runs):
    found = runs[0]["sized"].double()
    assert found.isfinite().all()
    exact, peak = mean() * sum(SCALES), max(SCALES)
    assert (found.sum(0) - exact).abs().max() < 4 * ROUNDING * peak
    away = (runs[0]["tiny"].double() - TINY * mean()).abs()
    assert away.max() < 4 * ROUNDING * TINY


def test_what_is_not_finite_on_one_rank_is_noticed_by_all_and_owed_by_none(runs):
    for (found, residual), good in zip(runs[0]["spoilt"], (True, False, False, True), strict=True):
        assert bool(found.isfinite().all()) == good and residual.isfinite().all()
        assert found.isfinite().any()
        if good:
            assert (found - TINY * mean()).abs().max() < 4 * ROUNDING * TINY
    for (ours, _), (theirs, residual) in zip(runs[0]["spoilt"], runs[1]["spoilt"], strict=True):
        assert torch.equal(ours, theirs) or torch.equal(ours.isnan(), theirs.isnan())
        assert residual.isfinite().all()


@pytest.mark.parametrize("size", range(2, 65))
def test_what_is_limited_adds_up_to_something_finite(size):
    total = half = halving.halve(torch.tensor([1e9]), torch.ones(()), size)[0]
    for _ in range(size - 1):
        total = total + half
    assert total.isfinite() and size * half.double() > 0.96 * halving.LARGEST


def test_with_what_was_kept_it_goes_on_bit_for_bit(runs):
    assert torch.equal(*runs[0]["continued"])


def test_what_another_precision_has_kept_is_not_taken_over():
    """fp16's is multiplied by the scale of its losses."""
    settings = [halving.Fp16(Session(), Precision(name, torch.device("cpu"))).setting for name in ("fp16", "fp32")]
    assert settings[0] != settings[1]
