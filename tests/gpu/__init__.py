"""What only a card can show."""

import pytest
import torch

NEEDS_CARD = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# By a thread: while Python waits for a kernel that hangs, no signal reaches it.
ENDS_HUNG_KERNELS = pytest.mark.timeout(120, method="thread")
