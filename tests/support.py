"""What several tests share: real processes that can never hang the suite, and a small corpus."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from aura import extension

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 120


def environment(**extra):
    """The environment of a child: this checkout importable, no variables of a launcher, one thread."""
    clean = {key: value for key, value in os.environ.items()
             if not key.startswith(("SLURM_", "TORCHELASTIC_", "MASTER_", "AURA_INJECT"))
             and key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **{k: str(v) for k, v in extra.items()}}


class Process:
    """A child in a session of its own whose whole group is killed when the block ends."""

    def __init__(self, command, cwd, prefix=(), **extra):
        command = [*prefix, sys.executable, *map(str, command)]
        self.child = subprocess.Popen(command, cwd=cwd, env=environment(**extra), start_new_session=True, text=True,
                                      stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.lines = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self.child.wait()
        self.child.stdout.close()

    def wait_for(self, text, limit=LIMIT):
        """Read until a line holds `text`; returns it. Fails when the output or the time ends before."""
        alarm = threading.Timer(limit, self.kill)
        alarm.start()
        try:
            for line in self.child.stdout:
                self.lines.append(line)
                if text in line:
                    return line
        finally:
            alarm.cancel()
        raise AssertionError(f"no {text!r} within {limit} s in:\n{''.join(self.lines)}")

    def kill(self):
        """Kill the child and all its descendants, those in sessions of their own too."""
        for pid in [*descendants(self.child.pid), self.child.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)

    def finish(self, limit=LIMIT):
        """(exit code, all output)."""
        try:
            rest, _ = self.child.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            self.kill()
            rest, _ = self.child.communicate(timeout=10)
            raise AssertionError(f"did not end within {limit} s:\n{''.join(self.lines)}{rest}") from None
        return self.child.returncode, "".join(self.lines) + rest


def descendants(pid):
    """Pids of the children of process `pid`, of their children, and so on."""
    found = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, listed.read_text().split()):
                found += [child, *descendants(child)]
    return found


def run(command, cwd, limit=LIMIT, **extra):
    """Run one python command to its end; (exit code, output)."""
    with Process(command, cwd, **extra) as process:
        return process.finish(limit)


def free_port():
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def ranks(command, cwds, **extra):
    """One process per folder of `cwds`, started by hand as ranks of one group; yields the Processes."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Process(command, cwd, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=len(cwds),
                                           MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **extra))
               for rank, cwd in enumerate(cwds)]


def run_ranks(command, cwds, limit=LIMIT, **extra):
    """Run a group to its end; [(exit code, output)] in rank order."""
    deadline = time.monotonic() + limit
    with ranks(command, cwds, **extra) as processes:
        return [process.finish(max(1, deadline - time.monotonic())) for process in processes]


def check_on(isa, module, check):
    """Call module.check() in a child whose kernels use the instruction set `isa`, or skip the test."""
    if isa not in extension.load().cpu_isas():
        pytest.skip(f"this processor has no {isa}")
    code, output = run(["-c", f"import {module} as t; t.{check}()"], ROOT, AURA_CPU_ISA=isa)
    assert code == 0, output


def most_allocated(work):
    """The most bytes of CPU tensors, beyond those there were, that exist at one time in work(), as torch's allocator
    reports them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


def assert_same_weights(a, b):
    """Two files of weights hold the same, bit for bit."""
    a, b = torch.load(a, weights_only=True), torch.load(b, weights_only=True)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def corpus_text(documents=60):
    """A small Spanish-looking corpus, the same every time, blank lines between documents."""
    people = ["Ana", "Luis", "Marta", "Pedro", "Inés", "Raúl"]
    acts = ["compró pan", "miró el río", "cerró la puerta", "cantó una canción", "escribió una carta", "volvió tarde"]
    places = ["en la plaza", "junto al mar", "en su casa", "bajo el puente", "en el mercado", "al pie del monte"]
    parts = []
    for i in range(documents):
        sentences = [f"{people[(i + j) % 6]} {acts[(i * 5 + j * 3) % 6]} {places[(i * 7 + j) % 6]} "
                     f"el día {(i + j) % 31}." for j in range(160)]
        parts.append(" ".join(sentences))
    return "\n\n".join(parts) + "\n"
