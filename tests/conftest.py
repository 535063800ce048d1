"""What every test has: one thread, and a small book.

One thread each: several tests and their children share two cores, and spinning threads cost more than they give.
"""

import pytest
import torch

from tests.support import corpus_text

torch.set_num_threads(1)


@pytest.fixture
def book(tmp_path):
    """A text of sixty documents."""
    path = tmp_path / "libro.txt"
    path.write_text(corpus_text(), encoding="utf-8")
    return path
