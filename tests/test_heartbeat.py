"""Heartbeats: every rank tells what it does and where its time goes, whatever becomes of it."""

import errno
import importlib.util
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from aura import clock, heartbeat, processes
from aura.checkpointer import Checkpointer
from aura.clock import Clock
from aura.errors import TrainingFault
from aura.session import Session
from tests.hosts import Switch, namespaces_work
from tests.support import ROOT, ranks
from tests.test_loop import Run, shards  # noqa: F401

SLOW_S, STUCK_AT = 0.05, 5  # what the slow rank sleeps in each loss, and the step whose data never come
SLOW_MBIT = 50
PROGRAM = """
import json, sys, time
from types import SimpleNamespace
import torch
import aura.clock
from aura import cli, distributed, heartbeat, loop, sharding
from aura.checkpointer import Checkpointer
from aura.ema import Average
from aura.sync import Exact

case, slow_s, stuck_at = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
heartbeat.INTERVAL_SECONDS, aura.clock.WINDOW_SECONDS = 0.1, 0.0 if case == "slow" else 0.3
reporter = SimpleNamespace(count=lambda *values: None, log=lambda step, **values: None, keep=lambda: None)


class Loader:
    epoch = samples = calls = 0
    windows, epoch_ended, state_dict = 1, False, dict

    def next(self):
        self.calls += 1
        if case == "stuck" and dist.rank == 1 and self.calls == stuck_at:
            print("atascado", flush=True)
            time.sleep(1000)
        return torch.ones(4, width)


class Net(torch.nn.Sequential):
    def blocks(self):
        return [self]


def answer(model, batch):
    loss = model(batch).square().sum()
    if case == "slow" and dist.rank == 1:
        time.sleep(slow_s)
    return loss, 4


def waited(model):
    model.logger.set_runtime_stats_and_log()
    data = model._get_ddp_logging_data()
    return (data.get("backward_comm_time", 0) - data.get("backward_compute_comm_overlap_time", 0)) / 1e9


def train(steps, clock):
    torch.manual_seed(0)
    model, ddp = Net(*(torch.nn.Linear(width, width) for _ in range(4))).to(dist.device), []
    optimizer = torch.optim.AdamW(model.parameters())
    sharding.shard(model, optimizer, dist)
    wrapped = dist.wrap(model)
    if not dist.sharded:
        wrapped._set_ddp_runtime_logging_sample_rate(1)
    run = loop.Run(model, optimizer, loop.Precision("fp32", dist.device), Loader(), Average(model), Exact(dist))
    loop.train(wrapped, run, answer, lambda step: 1e-4, Checkpointer(".", dist), reporter,
               loop.Policy(steps, 4, grad_accum=2, log_interval=0, eval_interval=10), dist, clock=clock,
               evaluate=lambda _: {"val_loss": time.sleep(0.05) or 0},
               begin_step=lambda step: None if dist.sharded else ddp.append(waited(wrapped)))
    return [vars(window) for window in clock.windows], ddp


def main():
    global dist, width
    width = 256 if case == "far" else 64
    args = SimpleNamespace(backend="gloo", dist_timeout=60.0, distributed=True, fsdp=False)
    with distributed.session(args) as dist:
        with heartbeat.beating(".", dist) as clock:
            found = train(10 if case == "slow" else 100_000, clock)
        if dist.device.type == "cpu":
            dist.shards = 2
            found = *found, train(8, aura.clock.Clock(dist))[0]
        print("tiempos", json.dumps(found))
    return 0


cli.run(main)
"""


def program(folder, case):
    """The command of a rank of PROGRAM."""
    (folder / "program.py").write_text(PROGRAM)
    return [folder / "program.py", case, SLOW_S, STUCK_AT]


def wait_until(happened, limit=60):
    """Ask until it has happened; its answer."""
    deadline = time.monotonic() + limit
    while not (answer := happened()):
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.02)
    return answer


def beats_of(folder, condition):
    """The beats of two ranks, once they fulfil condition(first, second)."""
    def look():
        beats = heartbeat.read(folder)
        return len(beats) == 2 and condition(*beats) and beats

    return wait_until(look)


def total(window):
    return window["compute"] + window["data"] + window["communication"] + window["save"]


def run_one(folder, shards, **options):  # noqa: F811
    """A short run of one process whose every step is a window; returns its only Beat."""
    folder.mkdir(exist_ok=True)
    with heartbeat.beating(folder, Session()) as clock:
        Run(folder, shards, **options).go(clock=clock)
    (beat,) = heartbeat.read(folder)
    return beat


@pytest.fixture
def every_step(monkeypatch):
    monkeypatch.setattr(clock, "WINDOW_SECONDS", 0.0)


# ---- One process ----------------------------------------------------------------------------------------------------


def test_a_beat_that_cannot_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(heartbeat.os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        heartbeat._Teller(tmp_path, Session(), None)._write(0, b"{}")
    assert not list((tmp_path / heartbeat.FOLDER).iterdir())


def test_the_beat_of_a_run_says_where_its_time_went(tmp_path, shards, every_step, monkeypatch):  # noqa: F811
    save, started = Checkpointer.save, time.time()
    monkeypatch.setattr(Checkpointer, "save", lambda *args, **words: time.sleep(0.03) or save(*args, **words))
    beat = run_one(tmp_path, shards, eval_interval=1)
    assert (beat.rank, beat.world_size, beat.pid, beat.device) == (0, 1, os.getpid(), "cpu")
    assert (beat.step, beat.steps, beat.phase, beat.ended) == (12, 12, "end", "completo") and not beat.failed
    assert started <= beat.time <= time.time() and beat.received is None and 0 < beat.memory < beat.memory_total
    assert [window.step for window in beat.windows] == list(range(5, 13))
    for window in beat.windows:
        assert window.steps == 1 and total(vars(window)) == pytest.approx(window.seconds)
        assert window.tokens_per_s == pytest.approx(64 / window.seconds)
    assert all(window.save >= 0.03 for window in beat.windows if window.step in (8, 12)), "their checkpoints took time"


def test_time_spent_evaluating_is_in_no_window(tmp_path, shards, every_step, monkeypatch):  # noqa: F811
    found, phases, now = Clock(Session()), [], [100.0]
    Run(tmp_path, shards, eval_interval=4).go(clock=found, evaluate=lambda _: phases.append(found.now()[0]) or {})
    assert phases == ["evaluate"] * 3
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    found.begin(0, 1)
    now[0] += 2.0
    with found.phase("evaluate"), found.phase("communication"):
        now[0] += 50.0
    found.lap(1)
    assert found.windows[-1].seconds == pytest.approx(2.0)


@pytest.mark.parametrize("on_a_card", [False, True])
def test_what_follows_backward_until_all_is_exchanged_is_waiting(monkeypatch, on_a_card):
    """As halving.Halved waits; on a card its events tell, which here are stand-ins that are never behind."""
    now = [100.0]

    class Event:
        def record(self, stream):
            self.at = now[0]

        def elapsed_time(self, other):
            return 1000 * (other.at - self.at)

    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    found = Clock(Session())
    found.exchanges, found.stream = True, None
    found.events = (Event(), Event()) if on_a_card else ()
    found.begin(0, 1)
    for last in (False, True):
        found.backward(torch.ones(1, requires_grad=True).sum(), last)
        now[0] += 3.0
        found.exchanged(last)
        now[0] += 20.0
    found.lap(1)
    assert found.windows[-1].communication == pytest.approx(3.0) and found.windows[-1].compute == pytest.approx(43.0)


def test_a_run_that_a_signal_ends_says_so(tmp_path, shards):  # noqa: F811
    assert run_one(tmp_path, shards, signal_at=9).ended == "detenido por SIGTERM en el paso 5"


def test_a_fault_is_the_last_word(tmp_path):
    with pytest.raises(TrainingFault), heartbeat.beating(tmp_path, Session()):
        raise TrainingFault("se acabó el disco")
    (beat,) = heartbeat.read(tmp_path)
    assert beat.ended == "se acabó el disco" and beat.failed
    with pytest.raises(KeyboardInterrupt), heartbeat.beating(tmp_path, Session()):
        raise KeyboardInterrupt
    assert not heartbeat.read(tmp_path)[0].failed, "somebody wanted it to end"


@pytest.mark.parametrize("said, heard", [
    ("se perdió la red" + " ¡ay!" * 20 + ": siguen encendidas; lo que dijo la red: " + "x" * 90,
     "se perdió la red" + " ¡ay!" * 20 + ": siguen encendidas"),
    ("corto; " + "una palabra " * 14, ("corto; " + "una palabra " * 12 + "una")),
    ("x" * 161, "x" * 160), ("x " + "y" * 400, "x " + "y" * 158), ("justo; " + "x" * 153, "justo; " + "x" * 153),
])
def test_a_long_last_word_ends_with_a_whole_one(tmp_path, said, heard):
    with pytest.raises(TrainingFault), heartbeat.beating(tmp_path, Session()):
        raise TrainingFault(said)
    assert heartbeat.read(tmp_path)[0].ended == heard


def test_only_the_newest_run_counts_and_the_next_one_clears_the_folder(tmp_path, shards):  # noqa: F811
    first = run_one(tmp_path, shards)
    folder = tmp_path / heartbeat.FOLDER
    older = {**vars(first), "rank": 7, "windows": []}
    (folder / "rank-00007.json").write_text(json.dumps(older))
    for name, text in (("rank-00001.json", "{"), ("rank-00002.json", "[]"), ("rank-00003.json", '{"run": 3}'),
                       ("rank-00004.json", json.dumps({**older, "time": "ayer"})), ("notas.json", "{}")):
        (folder / name).write_text(text)
    huge = {name: 10**400 if type(value) in (int, float) else value for name, value in older.items()}
    for number, values in enumerate((huge, {**older, "time": float("inf")}, {**older, "rank": -5}), 10):
        (folder / f"rank-{number:05d}.json").write_text(json.dumps(values))
    (folder / "rank-00005.json").write_text(json.dumps({**older, "rank": 5, "run": "otra", "time": first.time - 9}))
    assert [beat.rank for beat in heartbeat.read(tmp_path)] == [0, 7]
    assert first.started == processes.start_of(os.getpid()) and first.started
    old = {name: value for name, value in older.items() if name not in ("started", "pids")}
    (folder / "rank-00007.json").write_text(json.dumps(old))
    assert heartbeat.read(tmp_path)[1].started is None, "and an older version's beat is one"
    for loss in (float("nan"), float("inf"), 1e38):
        (folder / "rank-00007.json").write_text(json.dumps({**older, "loss": loss}))
        assert len(heartbeat.read(tmp_path)) == 2, "a run that diverges is still heard"
    second = run_one(tmp_path, shards)
    assert second.run != first.run
    assert sorted(path.name for path in folder.iterdir()) == ["notas.json", "rank-00000.json"]


def test_a_folder_that_cannot_be_written_is_told_once(tmp_path, shards, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setattr(heartbeat, "INTERVAL_SECONDS", 0.02)
    (tmp_path / heartbeat.FOLDER).write_text("no es una carpeta")
    write, tried = heartbeat._Teller._write, []
    monkeypatch.setattr(heartbeat._Teller, "_write", lambda *words: tried.append(words) or write(*words))
    with heartbeat.beating(tmp_path, Session()) as clock:
        wait_until(lambda: len(tried) > 2)  # beats, and before the first of them the folder, which fails as well
        run = Run(tmp_path, shards).go(clock=clock)
    assert run.result[0].step == 12 and heartbeat.read(tmp_path) == []
    printed = capsys.readouterr()
    assert printed.out.count("monitor.py no verá bien") == 1 and "Traceback" not in printed.out + printed.err


def test_a_folder_that_is_removed_while_the_run_is_on_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "INTERVAL_SECONDS", 0.02)
    with heartbeat.beating(tmp_path, Session()):
        wait_until(lambda: heartbeat.read(tmp_path))
        shutil.rmtree(tmp_path / heartbeat.FOLDER, ignore_errors=True)
        wait_until(lambda: heartbeat.read(tmp_path))
    assert heartbeat.read(tmp_path)[0].ended == "completo"


def test_a_store_that_fails_leaves_the_file(tmp_path, shards, capsys):  # noqa: F811
    class Broken:
        def clone(self):
            raise RuntimeError("Broken pipe")

    with heartbeat.beating(tmp_path, Session(store=Broken())):
        wait_until(lambda: heartbeat.read(tmp_path))
    printed = capsys.readouterr()
    assert printed.out.count("Broken pipe") == 1 and "Traceback" not in printed.out + printed.err
    assert heartbeat.read(tmp_path)[0].ended == "completo"


def test_a_store_that_is_gone_is_asked_once(tmp_path, capsys):
    asked, dist = [], Session(rank=1, world_size=2)

    def gone(key, _):
        asked.append(key)
        raise RuntimeError("Broken pipe")

    teller = heartbeat._Teller(tmp_path, dist, Clock(dist))
    teller._introduce()
    teller.store = SimpleNamespace(set=gone)
    for _ in range(3):
        teller._beat()
    assert asked == ["heartbeat/1"] and heartbeat.read(tmp_path)[0].number == 3
    assert capsys.readouterr().out.count("Broken pipe") == 1


class Board(dict):
    """A store without a network. To ask for what nobody has said is an error here, and a long wait in a real one."""

    set = dict.__setitem__

    def clone(self):
        return self

    def compare_set(self, key, _, value):
        return self.setdefault(key, value.encode())

    def check(self, keys):
        return all(key in self for key in keys)

    def multi_get(self, keys):
        return [self[key] for key in keys]


def test_last_words_of_other_machines_are_waited_for_whatever_becomes_of_their_disks(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "INTERVAL_SECONDS", 0.02)
    monkeypatch.setattr(heartbeat, "FAREWELL_SECONDS", 60.0)
    monkeypatch.setattr(heartbeat, "JOIN_SECONDS", 60.0)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / heartbeat.FOLDER).write_text("no es una carpeta")
    common = {"world_size": 3, "store": Board(), "machines": ["a", "b", "b"]}
    others = [heartbeat.beating(tmp_path / "there", Session(rank=rank, **common)) for rank in (1, 2)]
    with heartbeat.beating(tmp_path, Session(**common)):
        for count, other in enumerate(others, 2):
            other.__enter__()
            wait_until(lambda: len(heartbeat.read(tmp_path)) == count)  # noqa: B023
        leaving = [threading.Timer(0.3, other.__exit__, (None, None, None)) for other in others]
        for each in leaving:
            each.start()
        begun = time.monotonic()
    assert time.monotonic() - begun < 30.0 and [beat.ended for beat in heartbeat.read(tmp_path)] == ["completo"] * 3
    for each in leaving:
        each.join()


def test_age_counts_from_when_it_was_heard(tmp_path):
    with heartbeat.beating(tmp_path, Session()):
        pass
    values = {**vars(heartbeat.read(tmp_path)[0]), "time": 1000.0}
    assert heartbeat.Beat(**values).age(1004.0) == 4.0
    assert heartbeat.Beat(**{**values, "received": 1003.0}).age(1004.0) == 1.0
    assert heartbeat.Beat(**values).age(900.0) == 100.0  # the clock was set back, and nothing has been said since
    assert heartbeat.Beat(**{**values, "received": 1003.0}).age(900.0) == 0.0


def test_on_a_shared_disk_another_machine_s_clock_does_not_matter(tmp_path, monkeypatch):
    with heartbeat.beating(tmp_path, Session()):
        pass
    [file] = (tmp_path / "heartbeat").glob("rank-*.json")
    os.utime(file, (5000.0, 5000.0))
    assert heartbeat.read(tmp_path)[0].received is None
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    assert heartbeat.read(tmp_path)[0].received == 5000.0


def test_the_benchmark_writes_what_it_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    spec = importlib.util.spec_from_file_location("heartbeat_benchmark", ROOT / "benchmarks" / "heartbeat.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    benchmark.main(["--remote", "0,2", "--beats", "5", "--rounds", "3", "--step-rounds", "1", "--json",
                    str(tmp_path / "heartbeat.json")])
    step, *beats = json.loads((tmp_path / "heartbeat.json").read_text())["rows"]
    assert step["share"] == pytest.approx(step["us_per_step"] / step["step_ms"] / 1000)
    assert [beat["remote"] for beat in beats] == [0, 2] and all(beat["us_per_beat"] > 0 for beat in beats)
    assert heartbeat.INTERVAL_SECONDS == 1.0


# ---- Several --------------------------------------------------------------------------------------------------------


def test_a_slow_rank_is_slow_in_compute_and_the_other_waits(tmp_path):
    with ExitStack() as stack:
        processes = stack.enter_context(ranks(program(tmp_path, "slow"), [tmp_path] * 2))
        lines = [process.wait_for("tiempos") for process in processes]
        assert [process.finish()[0] for process in processes] == [0, 0]
    (fast, ddp, *fast_shards), (slow, _, *slow_shards) = (json.loads(line.split(" ", 1)[1]) for line in lines)
    for quick, late in ((fast, slow), *zip(fast_shards, slow_shards, strict=True)):
        for busy, idle, phase in ((late, quick, "compute"), (quick, late, "communication")):
            # A busy machine only lengthens times, of either rank: the longest step of one, the shortest of the other.
            longest, shortest = max(window[phase] for window in busy), min(window[phase] for window in idle)
            assert longest > shortest + 1.5 * SLOW_S, "of the two micro-batches of a step"
        for window in (*quick, *late):
            assert total(window) == pytest.approx(window["seconds"])
    waited = sum(window["communication"] for window in fast if window["step"] < len(ddp))
    assert waited > 0.9 * sum(ddp[fast[0]["step"]:]) > SLOW_S / 2, "DistributedDataParallel has measured it as well"
    beats = heartbeat.read(tmp_path)
    assert [beat.rank for beat in beats] == [0, 1] and beats[0].run == beats[1].run
    assert [beat.ended for beat in beats] == ["completo"] * 2 and [beat.received for beat in beats] == [None] * 2
    assert [vars(window) for window in beats[1].windows] == slow


def test_a_rank_that_hangs_still_beats_and_one_that_is_stopped_or_killed_does_not(tmp_path):
    with ExitStack() as stack:
        processes = stack.enter_context(ranks(program(tmp_path, "stuck"), [tmp_path] * 2))
        processes[1].wait_for("atascado")
        waiting, stuck = beats_of(tmp_path, lambda waiting, stuck: stuck.phase == "data" and stuck.phase_s > 0.3
                                  and waiting.phase == "communication" and waiting.phase_s > 0.3)
        assert stuck.step == waiting.step == STUCK_AT // 2
        later = beats_of(tmp_path, lambda _, beat: beat.number >= stuck.number + 3)
        assert later[1].phase_s > stuck.phase_s and later[1].phase == "data"
        assert later[0].phase == "communication" and later[0].phase_s >= waiting.phase_s
        stopped = silence(tmp_path, processes[1], signal.SIGSTOP)
        processes[1].child.send_signal(signal.SIGCONT)
        beats_of(tmp_path, lambda _, beat: beat.number > stopped.number)
        assert silence(tmp_path, processes[1], signal.SIGKILL).ended is None


def silence(folder, process, number):
    """Send a signal after which rank 1 says nothing more; its last Beat."""
    process.child.send_signal(number)
    wait_until(lambda: still(process.child.pid))
    before = heartbeat.read(folder)
    after = beats_of(folder, lambda other, _: other.number > before[0].number + 3)
    assert after[1] == before[1]
    return after[1]


def still(pid):
    """Whether none of its threads runs any more: a busy machine takes its time to stop them."""
    for task in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # it has ended
            if task.read_text().rpartition(")")[2].split()[0] not in "TZX":
                return False
    return True


@pytest.mark.skipif(not namespaces_work(), reason="network namespaces need root and iproute2")
def test_beats_of_another_machine_come_through_the_store(tmp_path):
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    with Switch(2) as switch, ExitStack() as stack:
        switch.limit(1, SLOW_MBIT)
        switch.start(stack, program(tmp_path, "far"), folders)
        here, there = beats_of(folders[0], lambda here, there: len(here.windows) > 2 and len(there.windows) > 2
                               and there.received is not None)
        assert (here.address, there.address) == ("10.77.0.1", "10.77.0.2") and here.received is None
        assert there.time <= there.received <= time.time(), "by the clock of this machine, which is that of both"
        assert heartbeat.read(folders[1])[0].received is None, "its own file is there as well"
        sent = 4 * 4 * (256 * 256 + 256) * 8 / SLOW_MBIT / 1e6  # of two ranks each sends as many bytes as there are
        for beat in (here, there):
            # A busy machine lengthens any time, and a rank that it delays finds what the other has sent meanwhile.
            least, longest = (choose(getattr(window, phase) for window in beat.windows)
                              for choose, phase in ((min, "compute"), (max, "communication")))
            assert least < 0.8 * sent < longest
            assert all(total(vars(window)) == pytest.approx(window.seconds) for window in beat.windows)
        beats_of(folders[0], lambda _, beat: beat.received > there.received)
        switch.unplug(1)
        last = heartbeat.read(folders[0])[0].number
        here, before = beats_of(folders[0], lambda here, _: here.number > last + 2 * heartbeat.REMOTE_BEATS)
        own = heartbeat.read(folders[1])[0].number
        now = beats_of(folders[0], lambda beat, _: beat.number > here.number + 2 * heartbeat.REMOTE_BEATS)
        assert now[1] == before
        wait_until(lambda: heartbeat.read(folders[1])[0].number > own)
