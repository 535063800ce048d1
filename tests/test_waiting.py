"""What is said while machines wait for one another."""

import socket
import threading

import pytest

from aura import launch, waiting
from aura.errors import UserError
from tests.support import free_port


@pytest.fixture
def impatient(monkeypatch):
    """Every wait is short, and said at once."""
    for name in ("FIRST_SECONDS", "POLL_SECONDS"):
        monkeypatch.setattr(waiting, name, 0.05)
    monkeypatch.setattr(waiting, "AGAIN_SECONDS", 0.2)


def test_who_comes_late_is_waited_for_and_what_for_is_said(impatient):
    said, port = [], free_port()
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        late = threading.Timer(0.6, server.listen)
        late.start()
        assert waiting.until_open("127.0.0.1", port, 30, "a la máquina 0", said.append) is None
        late.join()
    assert 2 <= len(said) <= 4, said  # the first time, and every 0.2 s of 0.6
    assert all(line.endswith(f"s a la máquina 0 en 127.0.0.1:{port}: {waiting.REFUSED}.") for line in said)


def test_who_is_there_is_not_waited_for():
    said = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert waiting.until_open("127.0.0.1", server.getsockname()[1], 0, "x", said.append) is None
    assert not said


def test_who_never_comes_is_given_up_with_the_reason(impatient, monkeypatch, capsys):
    monkeypatch.setattr(waiting, "TORCHRUN_SECONDS", 0.3)
    port = free_port()
    with pytest.raises(UserError, match=f"sin encontrar la máquina 0 en 127.0.0.1:{port}: en ese puerto no escucha"):
        waiting.for_machine_0("127.0.0.1", port)
    assert f"a la máquina 0 en 127.0.0.1:{port}" in capsys.readouterr().err


@pytest.mark.parametrize(("problem", "reason"), [
    (ConnectionRefusedError(), waiting.REFUSED), (TimeoutError(), waiting.MUTE),
    (OSError(113, "No route to host"), waiting.NO_WAY), (socket.gaierror(-2, "not known"), waiting.UNKNOWN),
    (UnicodeError("label empty or too long"), waiting.UNKNOWN)])
def test_the_reason_tells_apart_what_can_be_done(monkeypatch, problem, reason):
    def fail(*_):
        raise problem

    monkeypatch.setattr(waiting.socket, "create_connection", fail)
    assert reason in waiting.closed("10.0.0.1", 29500)


def test_a_launch_whose_other_machines_never_came_says_what_they_need():
    given = "2 con esta, todas con --nodes 2"
    here = launch.Launch(1, 0, False, given)
    here.chatter.append("torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 1/2 "
                        "clients joined.")
    with pytest.raises(UserError, match=rf"en 15 minutos no han llegado todas las máquinas \(1 de 2\): .*{given}"):
        here.conclude(1)


def test_a_launch_reminds_until_its_first_rank_begins(impatient, monkeypatch):
    here, said = launch.Launch(1, 0, False, "2 con esta"), []
    here.torchrun = type("Running", (), {"poll": lambda self: None})()
    monkeypatch.setattr(here, "warn", lambda line: (said.append(line), len(said) == 2 and here.event(0, pid=1)))
    here.remind()
    assert len(said) == 2 and all("a las otras máquinas (2 con esta)." in line for line in said)
