"""What every test has: one thread, and a small book.

One thread each: several tests and their children share two cores, and spinning threads cost more than they give.
"""

import importlib
import signal
import sys

import pytest
import torch

from aura import extension
from tests.support import ROOT, corpus_text

torch.set_num_threads(1)
# A shell script's background jobs ignore Ctrl+C; started from one, so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
# A worker takes a whole file at a time: those that take minutes begin first, or one would run alone at the end.
LONGEST_FIRST = ("test_cuda_emulated.py", "test_launch_distributed.py", "test_train_gpt2.py", "test_sync_network.py",
                 "test_train_tensordock.py", "test_attention.py", "test_doctor.py", "test_train_distributed.py",
                 "test_slurm.py", "test_sanitized.py", "test_elastic.py", "test_network.py", "test_distributed.py",
                 "test_hrm_training.py", "test_extension.py", "test_norms.py", "test_console.py",
                 "test_gpu_benchmark.py", "test_sync.py", "test_hrm.py", "test_plan.py", "test_fsdp.py")


def pytest_configure(config):
    """Build the kernels before the tests begin: their children have no minutes to wait for them."""
    if not hasattr(config, "workerinput"):
        extension.load()


def pytest_collection_modifyitems(items):
    """Long files first, the others as they were."""
    items.sort(key=lambda item: LONGEST_FIRST.index(item.path.name) if item.path.name in LONGEST_FIRST
               else len(LONGEST_FIRST))


@pytest.fixture
def book(tmp_path):
    """A text of sixty documents."""
    path = tmp_path / "libro.txt"
    path.write_text(corpus_text(), encoding="utf-8")
    return path


@pytest.fixture
def benchmark(monkeypatch):
    """benchmark(name) gives a module of benchmarks/; sys.path and sys.modules are put back afterwards."""
    names = [path.stem for path in (ROOT / "benchmarks").glob("*.py")]
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def gpu(benchmark):
    """benchmarks/gpu.py with the kernels of the CPU, as there is no card."""
    if not extension.has_ops(extension.load()):
        pytest.skip(extension.status())
    return benchmark("gpu")


@pytest.fixture
def gpu_cases(gpu):
    return gpu.gpu_cases


@pytest.fixture
def gpu_measure(gpu):
    return gpu.gpu_measure


@pytest.fixture
def gpu_steps(gpu):
    return gpu.gpu_steps


@pytest.fixture
def threads():
    """torch.set_num_threads, undone at the end."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
