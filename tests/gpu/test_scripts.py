"""Twenty steps of every training script on a card, in each precision, with torch's operators and with our kernels.

    AURA_GPU_TESTS=cpu python -m pytest -n 0 tests/gpu/test_scripts.py      # the same commands where there is no card
"""

import math
import statistics
import sysconfig
from pathlib import Path

import pytest
import torch

from aura import report
from tests.gpu import ON_CPU
from tests.support import ROOT, run

pytestmark = [pytest.mark.skipif(not (torch.cuda.is_available() or ON_CPU), reason="needs a CUDA device"),
              pytest.mark.timeout(300, func_only=True)]  # without what nvcc takes
STEPS, LIMIT = 20, 240
# Heads of 32 and, of random:tiny, of 64: widths that our kernels take on a card.
SIZES = ["--n-layer", "1", "--n-embd", "64", "--n-head", "2", "--seq-len", "64", "--vocab-size", "400",
         "--sample-length", "5", "--lr", "3e-3"]
HRM = ["--preset", "demo", *SIZES, "--n-ff", "128", "--dataset", "libro.txt"]
SCRIPTS = {
    "train_gpt2_spanish.py": ["--preset", "demo", *SIZES, "--dropout", "0", "--dataset-name", "libro.txt"],
    "train_tensordock.py": ["--preset", "manual", *SIZES, "--dataset-name", "libro.txt", "--log-dir", "logs"],
    "hrm_training_small_100m.py": HRM,
    "hrm_training_large_1b.py": HRM,
    # Four questions again and again: with new ones in each batch the loss of twenty steps does not fall.
    "train_distributed.py": ["--model", "random:tiny", "--dataset", "muestra", "--max-train-examples", "4",
                             "--max-val-examples", "4", "--max-len", "128", "--doc-stride", "64", "--question-len",
                             "32", "--dropout", "0", "--lr", "1e-3"],
}


def words(script, precision, attention):
    """The command line of one run: a tiny model, STEPS steps."""
    return [*SCRIPTS[script], "--batch-size", "4", "--grad-accum", "1", "--max-steps", str(STEPS), "--log-interval",
            "1", "--precision", precision, "--attention", attention]


def losses_of(folder):
    """The training loss of each step that a run in `folder` has noted, in a table of numbers alone."""
    (table,) = (folder / "logs").glob("t*.csv")  # train.csv, training_log.csv
    rows = [{name: float(cell) for name, cell in row.items() if cell} for row in report.read_table(table)]
    return [row["loss"] for row in rows if "loss" in row]


def assert_learnt(losses, steps=STEPS):
    assert len(losses) == steps and all(map(math.isfinite, losses)), losses
    assert statistics.mean(losses[-5:]) < 0.95 * statistics.mean(losses[:5]), losses


def trains(folder, script, precision, attention, *more):
    code, output = run([ROOT / script, *words(script, precision, attention), *more], folder, LIMIT)
    assert code == 0 and f"precisión {precision}" in output, output
    assert "núcleos propios de CUDA" in output or attention != "fused" or ON_CPU, output
    assert_learnt(losses_of(folder))


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_twenty_steps(book, tmp_path, script, precision):
    trains(tmp_path, script, precision, "auto")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_twenty_steps_with_our_kernels(book, tmp_path, kernels, script, precision):
    trains(tmp_path, script, precision, "fused")


@pytest.mark.skipif(not Path(sysconfig.get_path("include"), "Python.h").exists(), reason="torch.compile needs Python.h")
def test_twenty_compiled_steps_with_our_kernels(book, tmp_path, kernels):
    trains(tmp_path, "train_gpt2_spanish.py", "bf16", "fused", "--compile")
