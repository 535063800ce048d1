"""What is said while machines wait for one another."""

import socket
from types import SimpleNamespace

import pytest

from aura import launch, waiting
from aura.errors import UserError
from tests.support import free_port


@pytest.fixture
def sleeping(monkeypatch):
    """What is called with the seconds since the test began after every sleep, of which none takes any time."""
    now, told = [1000.0], []

    def sleep(seconds):
        now[0] += seconds
        for each in told:
            each(now[0] - 1000.0)

    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    return told


def test_who_comes_late_is_waited_for_and_what_for_is_said(sleeping):
    said, port = [], free_port()
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        sleeping.append(lambda seconds: seconds > 140 and server.listen())
        assert waiting.until_open("127.0.0.1", port, 900, "a la máquina 0", said.append) is None
    assert said == [f"Esperando desde hace {seconds} s a la máquina 0 en 127.0.0.1:{port}: {waiting.REFUSED}."
                    for seconds in (10, 70, 130)]


def test_who_is_there_is_not_waited_for():
    said = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert waiting.until_open("127.0.0.1", server.getsockname()[1], 0, "x", said.append) is None
    assert not said


def test_who_never_comes_is_given_up_with_the_reason(sleeping, monkeypatch, capsys):
    monkeypatch.setattr(waiting, "TORCHRUN_SECONDS", 60)
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


def test_a_launch_reminds_until_its_first_rank_begins(sleeping, monkeypatch):
    here, said = launch.Launch(1, 0, False, "2 con esta"), []
    here.torchrun = type("Running", (), {"poll": lambda self: None})()
    monkeypatch.setattr(here, "warn", lambda line: (said.append(line), len(said) == 2 and here.event(0, pid=1)))
    here.remind()
    assert len(said) == 2 and all("a las otras máquinas (2 con esta)." in line for line in said)
