"""The processes behind launch_distributed.py: one beside each rank's script, and the launcher that listens to them.

torchrun starts `launch_distributed.py --as-rank SCRIPT` once per process. That process runs the script as its child,
hands signals down, and tells the launcher through its standard error how the script ended: torchrun itself forgets
the exit codes of workers it was asked to stop, kills those still saving 30 s after the first has left (2.10, 2.11:
always), and leaves them behind when it is killed.
"""

import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from aura import console, waiting
from aura.errors import EXIT_BAD_INPUT, EXIT_FAULT, EXIT_OK, EXIT_SIGNAL_BASE, UserError
from aura.files import explain
from aura.signals import JOB, LISTENED, ORDERLY, SPEAK_SECONDS, die_with_parent, ignored

MARK = "\x1e"  # begins each line of a rank's standard error; twice, a message to the launcher
PIECE = 1000  # characters that are written at once, up to 4 bytes each: the pipe would mix longer ones of two ranks
SAVE_SECONDS = 600  # for the last checkpoint, once a stop was asked for
STOPPED = {EXIT_SIGNAL_BASE + number for number in ORDERLY}
CHECKPOINT = re.compile(r"último punto de control: (.*)")  # see Checkpointer.named
ECHOES = ("otro proceso se ha detenido", "se ha perdido la comunicación", "el rango 0 se ha detenido")


# ---- One rank, under torchrun ---------------------------------------------------------------------------------------


def run_rank(command):
    """Run one rank's script to its end and tell the launcher how it went; returns its exit code, 128 + n for signal n.

    The script has a session of its own: a signal for this process reaches it once, and what it leaves running dies
    with it.
    """
    if LISTENED not in os.environ:  # somebody typed the printed command: no launcher to talk to
        os.execv(sys.executable, [sys.executable, "-u", *command])
    told, child = [], None

    def pass_on(number, _frame):
        told.append(number)
        if child is not None:
            child.send_signal(number)

    for number in ORDERLY:
        signal.signal(number, pass_on)
    torchrun = os.getppid()
    die_with_parent(signal.SIGTERM, torchrun)()
    tell(pid=os.getpid(), attempt=int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    try:
        child = subprocess.Popen([sys.executable, "-u", *command], stderr=subprocess.PIPE, start_new_session=True,
                                 preexec_fn=die_with_parent(signal.SIGKILL, os.getpid()))
        relay = threading.Thread(target=relay_errors, args=(child.stderr,), daemon=True)
        relay.start()
    except (OSError, RuntimeError) as problem:  # RuntimeError: no thread is to be had
        if child is not None:
            child.kill()
        why = explain(problem) if isinstance(problem, OSError) else "el sistema no da más hilos"
        send(f"{os.environ['RANK']} error: no se pudo arrancar el script ({why}): suba ese límite, también el del "
             "contenedor si lo hay, o use menos procesos\n")
        tell(code=EXIT_BAD_INPUT)
        return EXIT_BAD_INPUT
    if told:
        child.send_signal(told[-1])
    code = child.wait()
    heard = len(told)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    relay.join(1)  # something that left the session may hold the pipe
    if tell(code=code if code >= 0 else EXIT_SIGNAL_BASE - code):
        # torchrun kills the rest within 30 s of the first that leaves: stay while rank 0 saves, or has yet to speak.
        agreed = code in (EXIT_BAD_INPUT, EXIT_FAULT) and os.environ["LOCAL_RANK"] != "0"
        deadline = time.monotonic() + (SAVE_SECONDS if code in STOPPED else SPEAK_SECONDS if agreed else 0)
        while len(told) == heard and os.getppid() == torchrun and time.monotonic() < deadline:
            time.sleep(0.05)
    return code if code >= 0 else EXIT_SIGNAL_BASE - code


def relay_errors(stream):
    """Pass on what the script writes to its standard error, each line or redrawn line marked with the rank."""
    for line in io.TextIOWrapper(stream, encoding=sys.stderr.encoding, errors="replace", newline=""):
        text = line.rstrip("\r\n")
        for start in range(0, max(1, len(text)), PIECE):
            last = start + PIECE >= len(text)
            send(f"{os.environ['RANK']} {text[start:start + PIECE]}" + (line[len(text):] or "\n" if last else "\n"))


def tell(**event):
    """Send the launcher a message of this rank; returns whether there is still somebody to read it."""
    return send(f"{MARK}{json.dumps({'rank': int(os.environ['RANK']), **event})}\n")


def send(text):
    """Write a marked line to stderr, which the launcher reads; returns whether there is still somebody to read it."""
    with contextlib.suppress(BrokenPipeError):
        return os.write(2, (MARK + text).encode()) > 0
    return False


# ---- The launcher ---------------------------------------------------------------------------------------------------


@dataclass
class Rank:
    """One process of the present attempt. code: None while it runs. error: its own "error: ..." line, kept back.
    outstayed: whether it still ran when another had failed. hung: torchrun killed it then, since it did not end."""

    pid: int
    code: int | None = None
    error: str = ""
    last: str = ""
    outstayed: bool = False
    hung: bool = False


def send_signal(pid, number):
    """Signal a process, if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def is_running(pid):
    """Whether a process is there and no zombie (Linux; elsewhere False)."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] != "Z"
    return False


def require_temporary_folder():
    """torch and torchrun need one, and would say so in English. Raises UserError."""
    try:
        with tempfile.TemporaryFile() as probe:
            probe.write(b"x")
            probe.flush()
    except OSError as problem:
        raise UserError(f"no se puede escribir en la carpeta de ficheros temporales, {tempfile.gettempdir()!r} "
                        f"({explain(problem)}): haga sitio, o indique otra con TMPDIR=CARPETA") from problem


class Launch:
    """torchrun and the ranks of this machine, as their messages tell. others: Spanish for what the other machines must
    have been given; None where there are none."""

    def __init__(self, processes, restarts, verbose, others=None):
        self.processes, self.restarts, self.verbose, self.others = processes, restarts, verbose, others
        self.ranks, self.ended, self.asked, self.attempt, self.over = {}, [], [], 0, False
        self.torchrun, self.chatter = None, deque(maxlen=50)

    def run(self, command, variables):
        """Run torchrun until nothing of it is left; returns the exit code of the script."""
        console.outlive()
        for number in ORDERLY:
            if not ignored(number):
                signal.signal(number, self.pass_on)
        name = os.environ.get(JOB) or uuid.uuid4().hex
        self.torchrun = subprocess.Popen(command, env={**os.environ, **variables, LISTENED: name},
                                         stderr=subprocess.PIPE, start_new_session=True,
                                         preexec_fn=die_with_parent(signal.SIGTERM, os.getpid()))
        if self.asked:
            self.torchrun.kill()
        if self.others:
            threading.Thread(target=self.remind, daemon=True).start()
        for line in io.TextIOWrapper(self.torchrun.stderr, encoding="utf-8", errors="replace", newline=""):
            if line.startswith(MARK + MARK):
                self.event(**json.loads(line[2:]))
            elif line.startswith(MARK):
                rank, _, text = line[1:].partition(" ")
                self.heard(int(rank), text)
            else:
                self.chatter.append(line.strip())
                if self.verbose:
                    self.warn(line, end="")
        return self.conclude(self.torchrun.wait())

    def remind(self):
        """Say, until the first rank begins, that torchrun waits for the other machines: it says nothing itself."""
        patience = waiting.Patience(self.warn)
        while not self.ranks and self.torchrun.poll() is None:
            patience.wait(waiting.POLL_SECONDS, f"a las otras máquinas ({self.others}).")

    @staticmethod
    def warn(text, end="\n"):
        """Write to the standard error at once."""
        print(text, end=end, file=sys.stderr, flush=True)

    def pass_on(self, number, _frame):
        """Hand a signal to the ranks: torchrun would give them little time and, at the second, leave them behind."""
        self.asked.append(number)
        running = [rank.pid for rank in self.ranks.values() if rank.code is None]
        for pid in running:
            send_signal(pid, number)
        if not running and self.torchrun:  # nothing to be saved yet, or any more
            self.torchrun.kill()

    def heard(self, number, line):
        """Show a line of a rank's standard error, but keep back the one that says why it ends: that comes last."""
        rank = self.ranks[number]
        rank.last = line.strip() or rank.last
        if line.startswith("error: "):
            if rank.error:  # it was not the last
                self.warn(f"[rango {number}] " * (number > 0) + f"error: {rank.error}")
            rank.error = line[len("error: "):].strip()
        else:
            self.warn(f"[rango {number}] " * (number > 0) + line, end="")

    def event(self, rank, pid=None, attempt=0, code=None):
        """A rank has begun (pid, attempt) or its script has ended (code)."""
        if self.over:
            if pid:  # of a restart that torchrun had begun; told to stop twice, by both of us, it would stay to save
                send_signal(pid, signal.SIGKILL)
            return
        if pid and self.asked:
            send_signal(pid, signal.SIGTERM)
        if pid:
            if attempt > self.attempt:
                when = time.strftime("%Y-%m-%d %H:%M:%S")  # a night has many lines, and this one says what it cost
                self.warn(f"Aviso: {self.reason(self.culprit())}; se reinicia el grupo ({attempt} de {self.restarts}), "
                          f"{when}.")
                self.attempt, self.ranks, self.ended = attempt, {}, []
            self.ranks[rank] = Rank(pid)
            return
        self.ranks[rank].code = code
        self.ended.append(rank)
        if not self.asked and any(other.code and other.code not in STOPPED for other in self.ranks.values()):
            for other in self.ranks.values():  # nobody saves for long now: torchrun, which stops them, has set a limit
                if other.code in STOPPED:
                    send_signal(other.pid, signal.SIGTERM)
        for other in self.ranks.values() if code else ():
            other.outstayed |= other.code is None and is_running(other.pid)
        if not code and self.ranks[rank].error:
            self.warn(f"error: {self.ranks[rank].error}")
        culprit = self.culprit() if len(self.ended) == self.processes else None
        if culprit is not None and (self.asked or self.ranks[culprit].code in {EXIT_BAD_INPUT, *STOPPED}):
            self.over = True  # a restart would change nothing
            self.torchrun.terminate()

    def culprit(self):
        """The rank whose end made the others end; None when none failed."""
        for number, rank in self.ranks.items():
            if rank.code is None:  # killed together with the process that would have told us
                rank.code, rank.hung = EXIT_SIGNAL_BASE + signal.SIGKILL, rank.outstayed
                self.ended.append(number)
        failed = [number for number in self.ended if self.ranks[number].code]
        if any(self.ranks[number].error.startswith(ECHOES) for number in failed):  # and names the one that hung
            failed = [number for number in failed if not self.ranks[number].hung]

        def secondary(number):
            rank = self.ranks[number]
            silent = rank.code in (EXIT_BAD_INPUT, EXIT_FAULT) and not rank.error  # rank 0 speaks for all of them
            echo = rank.error.startswith(ECHOES)
            # After a stop that was asked for, no machine is lost: a rank that says one is, because that one stopped
            # before it could tell, comes after it. Of several that say so, the lowest is the one that saves, and so
            # knows the last checkpoint; it ends last.
            return 2 * (echo and bool(self.asked)) or rank.code in STOPPED, echo, silent, number if echo else 0

        return min(failed, default=None, key=secondary)

    def reason(self, number):
        """One line that says why a rank failed."""
        rank = self.ranks[number]
        killer = {int(one): one.name for one in signal.Signals}.get(rank.code - EXIT_SIGNAL_BASE)
        why = rank.error or ("" if killer else rank.last or "terminó sin decir por qué")
        if killer:
            hint = " (si no fue usted, faltó memoria: dmesg lo dice)" * (killer == "SIGKILL")
            why = f"lo mató la señal {killer}{hint}" + f"; antes dijo: {why}" * bool(why)
        return f"rango {number} (máquina {socket.gethostname()}): {why} (código {rank.code})"

    def saved(self, culprit):
        """The checkpoint to go on from that those name who lost the rank `culprit`, which could not, or nothing: one
        that is not here they have named before rank 0, now killed, could write it."""
        if self.ranks[culprit].error:
            return ""
        lost = [rank.error for _, rank in sorted(self.ranks.items()) if rank.error.startswith(ECHOES)]
        told = [found for found in map(CHECKPOINT.search, lost) if found and Path(found[1]).exists()]
        return f"; {told[0][0]}" if told else ""

    def conclude(self, torchrun_code):
        """Say why the run failed, if it did; returns the exit code."""
        if not torchrun_code:
            return EXIT_OK
        if not self.ranks and not self.asked:
            said = next((line for line in reversed(self.chatter) if line), "sin explicación")
            if came := re.search(r"(\d+)/(\d+) clients joined", said):
                raise UserError(f"en {waiting.TORCHRUN_SECONDS // 60} minutos no han llegado todas las máquinas "
                                f"({came[1]} de {came[2]}): compruebe que en las otras se ha lanzado lo mismo "
                                f"({self.others})")
            if "EADDRINUSE" in said:  # since launch_distributed.py looked
                raise UserError("otro programa ha tomado el puerto de --master-port mientras torchrun arrancaba: "
                                "repita la orden, que dirá uno libre si sigue ocupado")
            raise UserError(f"torchrun no pudo arrancar los procesos: {said[:300]} (--verbose lo muestra entero)")
        culprit = self.culprit()
        if culprit is None:
            return EXIT_SIGNAL_BASE + self.asked[0] if not self.ranks else EXIT_OK
        code = self.ranks[culprit].code
        if code not in STOPPED:
            self.warn(f"error: {self.reason(culprit)}{self.saved(culprit)}")
            return code
        if torchrun_code < 0 and not self.asked:
            self.warn(f"error: torchrun murió por la señal {-torchrun_code}, y sus procesos pararon")
        return EXIT_SIGNAL_BASE + self.asked[0] if self.asked else code
