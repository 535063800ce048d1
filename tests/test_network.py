"""Several machines, each with its own address and its own folders."""

import time
from contextlib import ExitStack

import pytest

from aura import heartbeat
from tests.hosts import PORT, Switch, ip, limits_work, namespaces_work
from tests.support import ROOT, Process, corpus_text, run

SCRIPT = ROOT / "train_gpt2_spanish.py"
SMALL = ["--preset", "demo", "--n-layer", "1", "--n-embd", "32", "--n-head", "2", "--seq-len", "32", "--vocab-size",
         "400", "--sample-length", "0", "--log-interval", "1", "--distributed", "--batch-size", "2"]

pytestmark = pytest.mark.skipif(not namespaces_work(), reason="network namespaces need root and iproute2")


@pytest.fixture
def folders(tmp_path):
    made = [tmp_path / name for name in ("first", "second", "third")]
    for folder in made:
        folder.mkdir()
    (tmp_path / "libro.txt").write_text(corpus_text(), encoding="utf-8")
    assert run([SCRIPT, *SMALL, "--prepare", "--dataset-name", tmp_path / "libro.txt"], made[0])[0] == 0
    return made


def test_two_machines_only_the_first_with_data_and_checkpoint(folders):
    for steps, expected in ((4, "No tiene los datos el rango 1"), (8, "Se reanuda en el paso 4")):
        with Switch(2) as switch, ExitStack() as stack:
            processes = switch.start(stack, [SCRIPT, *SMALL, "--max-steps", str(steps)], folders[:2])
            results = [process.finish() for process in processes]
        assert [code for code, _ in results] == [0, 0], results
        assert expected in results[0][1]
        beats = heartbeat.read(folders[0] / "logs")
        assert [(beat.rank, beat.step, beat.ended) for beat in beats] == [(rank, steps, "completo") for rank in (0, 1)]
        assert beats[1].received, "it came from the other machine"
    assert (folders[1] / "Data" / "libro" / "dataset.json").exists()
    assert not list(folders[1].glob("checkpoints/*.pt"))


@pytest.mark.skipif(not limits_work(), reason="closing ports needs nftables")
@pytest.mark.parametrize("verdict", ["drop", "reject with tcp reset"])
def test_machines_that_meet_and_cannot_connect_say_so_in_their_time(folders, verdict):
    with Switch(2) as switch, ExitStack() as stack:
        for host in (0, 1):
            switch.close(host, f"!= {PORT}", verdict)
        processes = switch.start(stack, [ROOT / "test_ddp.py", "--timeout", "6"], folders[:2])
        results = [process.finish(28) for process in processes]  # gloo by itself: 30 s
    for code, output in results:
        assert code == 2 and "Traceback" not in output, output
        assert "se encuentran en 10.77.0.1:29500, pero no consiguen conectarse entre sí por la interfaz eth0" in output


def test_a_machine_cut_off_in_the_middle_ends_the_others_in_time(folders):
    command = [SCRIPT, *SMALL, "--max-steps", "100000", "--checkpoint-freq", "5", "--dist-timeout", "15"]
    with Switch(3) as switch, ExitStack() as stack:
        processes = switch.start(stack, command, folders)
        processes[0].wait_for("paso 12/")
        switch.unplug(2)
        started = time.monotonic()
        results = [process.finish(60) for process in processes[:2]]
        assert time.monotonic() - started < 45
    for (code, output), saved in zip(results, ("último punto de control: checkpoints/ckpt-",
                                               "lo último que se acordó lo guarda el rango 0"), strict=True):
        assert code == 3 and "Traceback" not in output, output
        assert "no contesta el rango 2 " in output and saved in output


@pytest.mark.parametrize("rank, said", [(0, "no es una dirección de esta"), (1, "no hay camino hasta esa")])
def test_a_machine_with_no_network_at_all_says_so_in_its_time(tmp_path, rank, said):
    """Not even loopback: the store with which torch tests itself would wait for five minutes."""
    with Switch(1) as switch:
        for link in ("lo", "eth0"):
            ip("-n", switch.hosts[0], "link", "set", link, "down")
        with Process([ROOT / "test_ddp.py", "--timeout", 4], tmp_path, host=switch.hosts[0], RANK=rank, WORLD_SIZE=2,
                     MASTER_ADDR="10.77.0.9", MASTER_PORT=PORT) as process:
            code, output = process.finish(60)
    assert code == 2 and said in output and output.count("\n") == 1, output
