"""Linear layers of a training step on a card, whose products are added in float32 as they are made."""

import pytest
import torch

from aura import ops
from tests import test_products, test_total_norm
from tests.gpu import NEEDS_CARD

pytestmark = NEEDS_CARD


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("adding", [True, False])
def test_sums_are_exact_but_for_float32(adding, bias, dtype):
    test_products.check_sums(adding, bias, 1e-6, "cuda", dtype)


def test_sums_of_columns(kernels):
    test_products.check_column_sums("cuda")


def test_the_norm_of_many_tensors(kernels):
    test_total_norm.check_total_norm("cuda")


def test_gradients_go_to_the_kernel(kernels, monkeypatch):
    from aura.fused import gradients

    some, seen, norm = [torch.ones(3, device="cuda"), torch.ones((), device="cuda")], [], gradients.total_norm
    monkeypatch.setattr(gradients, "total_norm", lambda tensors: seen.append(tensors) or norm(tensors))
    for choice, expected in (("sdpa", []), ("fused", [some])):
        with ops.using(choice, "cuda"):
            assert ops.total_norm(some).item() == 2 and seen == expected
