"""Groups on one card: NCCL as it is probed, gloo where NCCL cannot be had, shards of FSDP that only NCCL carries.

    AURA_GPU_TESTS=cpu python -m pytest -n 0 tests/gpu/test_distributed.py      # the same programs over gloo, no card
"""

import statistics

import pytest

from tests.gpu import ON_CPU, test_scripts
from tests.gpu.test_scripts import LIMIT, STEPS, assert_learnt, losses_of, words
from tests.support import ROOT, free_port, run, run_ranks

pytestmark = test_scripts.pytestmark
GPT, HRM, BERT = "train_gpt2_spanish.py", "hrm_training_small_100m.py", "train_distributed.py"

GROUP = """
import os
from types import SimpleNamespace
from aura import backend, cli, distributed
{patch}

def main():
    args = SimpleNamespace(backend="auto", dist_timeout=60.0, distributed=True)
    with distributed.session(args) as dist:
        total = backend.check_all_reduce(dist.rank, dist.world_size, dist.device)
        dist.print_each(f"suma={total:g} backend={dist.backend} motivo={dist.fallback}")
    return 0

cli.run(main)
"""
# Each process claims a card of its own, which leaves it to NCCL to find out, as on machines that hide their cards.
CLAIMS = 'backend._nccl_ability = lambda device: {"gpu": True, "reason": None, "card": os.environ["RANK"]}'
# A group of one has nothing to cut; here it is cut all the same, into one part, by the code that cuts for many.
CUT = """
import runpy, sys
from aura import distributed
distributed.Session.sharded = property(lambda self: self.grouped)
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def grouped(folder, size, patch=""):
    """The outputs of so many processes on the first card, which have formed a group and summed over it."""
    path = folder / "group.py"
    path.write_text(GROUP.replace("{patch}", patch))
    outputs = run_ranks([path], [folder] * size, LIMIT, CUDA_VISIBLE_DEVICES="" if ON_CPU else 0)
    assert [code for code, _ in outputs] == [0] * size, outputs
    return [output for _, output in outputs]


def test_a_healthy_nccl_is_chosen_and_nothing_is_said_of_gloo(tmp_path):
    (output,) = grouped(tmp_path, 1)
    assert f"suma=0 backend={'gloo' if ON_CPU else 'nccl'} motivo=None" in output and "fallback" not in output


def test_a_probe_that_nccl_refuses_takes_both_to_gloo(tmp_path):
    outputs = grouped(tmp_path, 2, CLAIMS)
    assert "fallback=gloo: la prueba de NCCL " in outputs[0] and "(rango " in outputs[0], outputs
    assert all("suma=1 backend=gloo motivo=la prueba de NCCL " in output for output in outputs), outputs


@pytest.mark.parametrize("sync", [["ddp"], ["fp16"], ["diloco", "--sync-every", 8]], ids=lambda words: words[0])
def test_two_processes_on_one_card_train_over_gloo(book, tmp_path, sync):
    command = [ROOT / GPT, *words(GPT, "bf16", "auto"), "--distributed", "--sync", *sync]
    outputs = run_ranks(command, [tmp_path] * 2, LIMIT, CUDA_VISIBLE_DEVICES="" if ON_CPU else 0)
    assert [code for code, _ in outputs] == [0, 0], outputs
    assert ("fallback=gloo: dos procesos comparten la misma GPU" in outputs[0][1]) == (not ON_CPU), outputs
    assert_learnt(losses_of(tmp_path))


@pytest.mark.skipif(ON_CPU, reason="on the CPU gloo carries shards")
def test_shards_without_nccl_are_refused_in_a_line(book, tmp_path):
    command = [ROOT / GPT, *words(GPT, "bf16", "auto"), "--distributed", "--fsdp"]
    outputs = run_ranks(command, [tmp_path] * 2, LIMIT, CUDA_VISIBLE_DEVICES=0)
    assert [code for code, _ in outputs] == [2, 2] and all("Traceback" not in output for _, output in outputs), outputs
    assert "--fsdp con GPU necesita NCCL" in outputs[0][1] and not list(tmp_path.glob("**/*.pt"))


@pytest.mark.parametrize("script, asked, precision, attention", [
    (BERT, ["--strategy", "fsdp"], "bf16", "auto"), (HRM, ["--fsdp", "--distributed"], "bf16", "fused"),
    (GPT, ["--fsdp", "--distributed"], "fp16", "fused")])
def test_shards_on_one_card_and_their_checkpoint_without_shards(book, tmp_path, kernels, script, asked, precision,
                                                                attention):
    program = tmp_path / "cut.py"
    program.write_text(CUT)
    options = words(script, precision, attention)
    code, output = run(["-m", "torch.distributed.run", "--nproc_per_node=1", f"--master_port={free_port()}", program,
                        ROOT / script, *options, *asked], tmp_path, LIMIT)
    assert code == 0 and f"backend={'gloo' if ON_CPU else 'nccl'}" in output, output
    assert "Sincronización inicial: una de las" in output, output
    assert_learnt(losses_of(tmp_path))
    code, output = run([ROOT / script, *options, "--max-steps", STEPS + 4], tmp_path, LIMIT)
    assert code == 0 and f"Se reanuda en el paso {STEPS}" in output and "Sincronización" not in output, output
    losses = losses_of(tmp_path)
    assert len(losses) == STEPS + 4 and max(losses[STEPS:]) < statistics.mean(losses[:5]), losses
