"""Linear layers of a training step on a card, whose products are added in float32 as they are made."""

import pytest
import torch

from tests import test_products
from tests.gpu import NEEDS_CARD

pytestmark = NEEDS_CARD


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("adding", [True, False])
def test_sums_are_exact_but_for_float32(adding, bias, dtype):
    test_products.check_sums(adding, bias, 1e-6, "cuda", dtype)


def test_sums_of_columns(kernels):
    test_products.check_column_sums("cuda")
