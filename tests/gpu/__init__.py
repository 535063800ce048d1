"""What only a card can show."""

import os

import pytest
import torch

NEEDS_CARD = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
ON_CPU = os.environ.get("AURA_GPU_TESTS") == "cpu"
SECONDS = "AURA_GPU_TEST_SECONDS"  # the variable that gives the tests of kernels more time than they need by themselves
# By a thread: while Python waits for a kernel that hangs, no signal reaches it. nvcc works in a fixture, and as long as
# it must.
ENDS_HUNG_KERNELS = pytest.mark.timeout(int(os.environ.get(SECONDS, 120)), method="thread", func_only=True)
