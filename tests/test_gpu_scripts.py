"""The command lines of tests/gpu, which a machine without a card would never try: each is parsed by its own script, and
one runs to its end."""

import pytest
import torch

from tests.gpu import test_scripts
from tests.support import ROOT
from tests.test_guides import check_arguments, load


@pytest.mark.parametrize("attention", ["auto", "fused"])
@pytest.mark.parametrize("script", test_scripts.SCRIPTS)
def test_every_command_line_is_accepted(script, attention):
    check_arguments(load(ROOT / script), test_scripts.words(script, "fp16", attention), script)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu does it on the card")
def test_one_of_them_trains_in_bf16_here(book, tmp_path, monkeypatch):
    monkeypatch.setattr(test_scripts, "ON_CPU", True)
    test_scripts.trains(tmp_path, "hrm_training_large_1b.py", "bf16", "auto")
