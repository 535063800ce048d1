"""What several tests on a card need."""

import pytest
import torch

from aura import compilation, cuda_extension, ops
from tests.gpu import ON_CPU


@pytest.fixture(scope="session", autouse=True)
def what_auto_builds():
    """On a card that comes measured, before the time of a test begins that asks for auto."""
    if torch.cuda.is_available():
        with ops.using("auto", "cuda"):
            pass


@pytest.fixture(scope="session")
def kernels():
    """Our kernels, built before the time of a test begins. What is not there skips it; a build that fails does not."""
    if ON_CPU:
        return
    if torch.version.cuda is None or torch.cuda.get_device_capability() < cuda_extension.LEAST_CAPABILITY:
        pytest.skip("there are no kernels of ours for this card")
    try:
        cuda_extension.find_nvcc()
    except compilation.Unavailable as problem:
        pytest.skip(str(problem))
    cuda_extension.load()
