"""torchrun's elastic mode with --sync diloco: a machine dies, the other goes on from the last agreement, the dead one
comes back; rank 0's process dies, and both go on from what the other has saved."""

import re
from contextlib import ExitStack

import psutil
import pytest
import torch

from aura.checkpoint import found
from tests.hosts import PORT, Switch, namespaces_work
from tests.support import ROOT, Process, corpus_text, run

SCRIPT = ROOT / "train_gpt2_spanish.py"
SMALL = ["--preset", "demo", "--n-layer", "1", "--n-embd", "32", "--n-head", "2", "--seq-len", "32", "--vocab-size",
         "400", "--attention", "sdpa", "--sample-length", "0", "--batch-size", "2"]
TRAINING = [SCRIPT, *SMALL, "--distributed", "--sync", "diloco", "--sync-every", "8", "--max-steps", "1000000",
            "--log-interval", "20", "--eval-interval", "1000000", "--eval-windows", "4", "--checkpoint-freq", "0",
            "--dist-timeout", "30"]

pytestmark = pytest.mark.skipif(not namespaces_work(), reason="network namespaces need root and iproute2")


def elastic(switch, number, folder):
    """torchrun on one machine of two, of which one may be missing."""
    words = ["-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=5",
             "--rdzv-backend=c10d", f"--rdzv-endpoint=10.77.0.1:{PORT}", "--rdzv-id=aura",
             f"--local-addr=10.77.0.{number + 1}", f"--rdzv-conf=is_host={int(number == 0)},last_call_timeout=2,"
             "keep_alive_interval=1,keep_alive_max_attempt=5"]
    return Process([*words, *TRAINING], folder, host=switch.hosts[number], TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)


def test_who_is_left_goes_on_and_who_was_lost_comes_back(tmp_path):
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    (tmp_path / "libro.txt").write_text(corpus_text(), encoding="utf-8")
    assert run([SCRIPT, *SMALL, "--prepare", "--dataset-name", tmp_path / "libro.txt"], folders[0])[0] == 0
    with Switch(2) as switch, ExitStack() as stack:
        first, second = [stack.enter_context(elastic(switch, number, folders[number])) for number in range(2)]
        first.wait_for("world_size=2")
        first.wait_for("paso 40/")
        second.kill()
        assert "no contesta el rango 1 " in first.wait_for("error: ")
        first.wait_for("world_size=1")
        went_on = int(re.search(r"paso (\d+)", first.wait_for("Se reanuda en el paso"))[1])
        assert went_on >= 40, "no regular checkpoint was ever due: this is what was agreed on when the machine died"
        kept = torch.load(found(folders[0] / "checkpoints")[0], weights_only=True)
        assert kept["progress"]["step"] == went_on and kept["sync"]["method"] == "diloco"

        stack.enter_context(elastic(switch, 1, folders[1]))
        first.wait_for("paso ")
        left_off = int(re.search(r"paso (\d+)", first.wait_for("Detenido por una señal en el paso"))[1])
        first.wait_for("world_size=2")
        assert f"Se reanuda en el paso {left_off} " in first.wait_for("Se reanuda")
        first.wait_for(f"paso {left_off // 20 * 20 + 40}/")

        [worker] = psutil.Process(first.child.pid).children()
        worker.kill()
        first.wait_for("world_size=2")
        resumed = first.wait_for("Se reanuda")
        assert resumed.endswith("(en la máquina del rango 1).\n")
        assert int(re.search(r"paso (\d+)", resumed)[1]) > left_off
        first.wait_for("paso ")
