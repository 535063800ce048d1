"""What several tests share: real processes that can never hang the suite, and a small corpus."""

import contextlib
import functools
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from aura import extension

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 120
# Those of the workers of pytest are disjoint: what one is about to listen at, no other takes meanwhile.
PORTS = itertools.islice(itertools.cycle(range(
    15_000 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 16, 32_768, 16)),
    random.SystemRandom().randrange(1000), None)


def environment(**extra):
    """The environment of a child: this checkout can be imported and is compiled once for all of them, there are no
    variables of a launcher, it has one thread, and a crash says where it was."""
    clean = {key: value for key, value in os.environ.items()
             if not key.startswith(("SLURM_", "TORCHELASTIC_", "MASTER_", "AURA_INJECT"))
             and key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTHONDONTWRITEBYTECODE")}
    return {**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1",
            **{k: str(v) for k, v in extra.items()}}


@functools.cache
def fork_server():
    """(tests/forks.py running in a process that ends with this one, the socket on which it is asked)."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with theirs:
        server = subprocess.Popen([sys.executable, ROOT / "tests" / "forks.py", str(theirs.fileno())],
                                  env=environment(), pass_fds=[theirs.fileno()], start_new_session=True, text=True,
                                  stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return server, ours


class Fork:
    """The part of subprocess.Popen's interface that is needed here, for a child that the fork server makes."""

    def __init__(self, command, cwd, env, host):
        server, requests = fork_server()
        self._status, status = socket.socketpair(type=socket.SOCK_SEQPACKET)
        output, theirs = os.pipe()
        self.stdout, self.returncode = os.fdopen(output, encoding="utf-8"), None
        request = json.dumps({"command": command, "cwd": str(cwd), "env": env, "host": host}).encode()
        socket.send_fds(requests, [request], [theirs, status.fileno()])
        os.close(theirs)
        status.close()
        told = self._status.recv(16)
        assert told, server.stdout.read()
        self.pid = int(told)

    def wait(self, timeout=None):
        """The exit code; raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            self._status.settimeout(timeout)
            try:
                self.returncode = int(self._status.recv(16))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("python", timeout) from None
        return self.returncode

    def poll(self):
        """The exit code, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)

    def send_signal(self, number):
        """Send it, unless the child has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def close(self):
        """Let go of the pid; on return no process has it."""
        self._status.settimeout(LIMIT)
        self._status.shutdown(socket.SHUT_WR)
        while self._status.recv(16):
            pass
        self._status.close()


class Notes:
    """A reporter that remembers. rows: what log() was given, each with its step. events: 'STEP: TEXT'."""

    def __init__(self):
        self.rows, self.events = [], []

    def count(self, tokens, seconds):
        pass

    def log(self, step, **values):
        self.rows.append({"step": step, **values})

    def keep(self):
        pass

    def event(self, step, text):
        self.events.append(f"{step}: {text}")

    def fault(self, step, text):
        pass


class Process:
    """A child in a session of its own whose whole group is killed when the block ends.

    fresh: in a Python of its own, and not in one forked from a Python that has imported torch, which saves 4 s of a
    processor. host: a network namespace to run in.
    """

    def __init__(self, command, cwd, fresh=False, host=None, **extra):
        command, env = list(map(str, command)), environment(**extra)
        if fresh or torch.cuda.is_available():  # once CUDA has been initialised, forks cannot use it
            inside = ["ip", "netns", "exec", host] if host else []
            self.child = subprocess.Popen([*inside, sys.executable, *command], cwd=cwd, env=env, start_new_session=True,
                                          text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        else:
            self.child = Fork(command, cwd, env, host)
        self.lines = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self.child.wait()
        self.child.stdout.close()
        if isinstance(self.child, Fork):
            self.child.close()

    def wait_for(self, text, limit=LIMIT):
        """Read until a line holds `text`; returns that line. Fails when the output or the time ends before."""
        with self._limited(limit):
            for line in self.child.stdout:
                self.lines.append(line)
                if text in line:
                    return line
        raise AssertionError(f"no {text!r} within {limit} s in:\n{''.join(self.lines)}")

    def finish(self, limit=LIMIT):
        """(exit code, all output)."""
        with self._limited(limit) as alarm:
            self.lines += self.child.stdout
            code = self.child.wait()
            in_time = alarm.is_alive()
        assert in_time, f"did not end within {limit} s:\n{''.join(self.lines)}"
        return code, "".join(self.lines)

    @contextlib.contextmanager
    def _limited(self, limit):
        """Kill the child, which ends its output, if the block takes longer."""
        alarm = threading.Timer(limit, self.kill)
        alarm.start()
        try:
            yield alarm
        finally:
            alarm.cancel()

    def kill(self):
        """Kill the child and all its descendants, those in sessions of their own too."""
        for pid in [*descendants(self.child.pid), self.child.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)


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
    """A TCP port that was free a moment ago, below the range from which Linux picks ports itself."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", next(PORTS)))
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


def repeat_with(isa, tests):
    """Run test functions again, in a process whose kernels are those of another instruction set."""
    module = extension.load()
    # Unless asked for by name, this set leaves attention to another one where that is faster.
    used = module.cpu_isa() if module.cpu_isa() != "avx512bf16" else None
    if isa not in module.cpu_isas() or isa == used:
        pytest.skip(f"{isa}: not of this processor, or what every other test uses")
    names = [f"{test.__module__.replace('.', '/')}.py::{test.__name__}" for test in tests]
    code, output = run(["-m", "pytest", "-n", "0", "-x", "-p", "no:cacheprovider", *names], ROOT, AURA_CPU_ISA=isa)
    assert code == 0, output


def allocations(work):
    """The bytes of CPU tensors that work() takes, or gives back (negative), in the order in which torch's allocator
    reports them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def most_allocated(work):
    """The most bytes of CPU tensors that exist at one time in work(), beyond those that existed before."""
    return max(itertools.accumulate(allocations(work), initial=0))


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


def philox(seed, counter, rounds=7):
    """Philox4x32 (Salmon et al. 2011) of a tuple of four uint64 arrays that broadcast; four arrays of 32 bits."""
    low32 = np.uint64(0xFFFFFFFF)
    a, b, c, d = np.broadcast_arrays(*counter)
    key = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for _ in range(rounds):
        first, second = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = (second >> np.uint64(32) ^ b ^ np.uint64(key[0]), second & low32,
                      first >> np.uint64(32) ^ d ^ np.uint64(key[1]), first & low32)
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return a, b, c, d
