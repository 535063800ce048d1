"""The checkpoints of a run: saved and rotated while it trains, and found again by themselves.

    checkpoints/ckpt-00000500.pt                written by rank 0
    checkpoints/rank-00001/ckpt-00000500.pt     what rank 1 alone knew then, where ranks differ (see aura/sync.py)
    checkpoints/.origen                         which run the folder belongs to, before it has a checkpoint
    checkpoints/.arranque                       which launch began it, for its later attempts

Rank 0 alone reads and writes the one; the others receive. Only where rank 0 was lost does another write it, on its own
disk, and the next start finds it there.
"""

import contextlib
import math
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from aura.checkpoint import Names, choose, damage, found, load_unchecked, path_of, peek, read, save_file, step_of
from aura.errors import TrainingFault, UserError, first_line
from aura.files import explain, keep_held, remove_partials, set_aside, write_bytes
from aura.session import is_communication_error
from aura.sharding import whole
from aura.words import amount, counted

ORIGIN = ".origen"
LAUNCH = ".arranque"


class _HostCopy:
    """A copy of a state in host memory, into the same buffers every time; pinned where it comes from a GPU, which is
    several times as fast."""

    def __init__(self):
        self.buffers = {}

    def take(self, tree, place=()):
        """`tree` with every tensor replaced by its copy, and nothing weights_only would refuse."""
        if isinstance(tree, torch.Tensor):
            tree = whole(tree.detach())
            buffer = self.buffers.get(place)
            if buffer is None or buffer.shape != tree.shape or buffer.dtype != tree.dtype:
                buffer = torch.empty(tree.shape, dtype=tree.dtype, pin_memory=tree.is_cuda)
                self.buffers[place] = buffer
            return buffer.copy_(tree)
        if isinstance(tree, dict):
            return {key: self.take(part, (*place, key)) for key, part in tree.items()}
        if isinstance(tree, list | tuple):
            return [self.take(part, (*place, number)) for number, part in enumerate(tree)]
        return cpu_copy(tree)


def asked(resume, directory, dist):
    """What --resume `resume` means in this attempt of a launch; on rank 0 alone. Who starts the group again repeats
    arguments that were meant for the first attempt. A later one takes 'auto' if an earlier one has saved in the folder
    or, having begun anew and signed it, may have saved on another rank's disk."""
    directory = Path(directory)
    with contextlib.suppress(OSError):  # who uses the folder next says what is wrong with it
        if (directory / LAUNCH).read_bytes() == dist.launch.encode() and (
                found(directory) or resume == "none" and _signature(directory)):
            return "auto"
    return resume


def _signature(directory):
    return (directory / ORIGIN).read_text(encoding="utf-8", errors="replace")


class Checkpointer:
    """Saves, rotates and restores the checkpoints of one run, on every rank alike.

    constants: what does not change during the run (configuration, tokenizer, versions), stored in each checkpoint.
    The newest `keep` stay, and those whose step is a multiple of keep_every (0: none). background: save() copies the
    state to host memory and a thread writes it while training goes on; a failure is raised by the next poll().
    last: path of the checkpoint this run has written or read last, in words when it lies on another rank's disk; None
    before. source: its (path, rank on whose disk it is). The same on all ranks: the others take it that rank 0 will
    write what it is yet to write. loaded: last, as of when one was read. left_to: the rank that saves for this one what
    those that are left last agreed on, None before.
    """

    def __init__(self, directory, dist, keep=3, constants=None, *, names=None, keep_every=0, background=False):
        self.directory, self.dist, self.keep, self.keep_every = Path(directory), dist, keep, keep_every
        self.constants, self.names = constants or {}, names or Names()
        self.host = _HostCopy() if background else None
        self.last = self.source = self.loaded = self.writing = self.failure = self.left_to = None
        self.own = self.directory / f"rank-{dist.rank:05d}"
        self.crowded = False  # an old one cannot be removed, and that has been said
        self.writer = _thread() if background else None

    def start_fresh(self):
        """Move the checkpoints of an earlier run aside, with what each rank had written for itself, so that 'the
        newest' always belongs to this one; to be called on all ranks."""

        def move():  # first, what ranks on this disk had written: there may have been more of them
            with self._writing():
                folder = set_aside([*found(self.directory), *self.directory.glob("rank-*")], self.directory)
            if folder:
                self.dist.print(f"Los puntos de control anteriores se han movido a {folder}.")

        self.dist.run_on_main(move)
        if not self.dist.main:
            with self._writing():
                set_aside([self.own], self.directory)

    def branch_off(self):
        """Move aside the checkpoints of a way that this run leaves, which would pass for its newest: those of a higher
        step than the one that was loaded or, when that came from another folder, all that are in this one. Returns the
        folder they are in now, on rank 0; None where there were none."""
        folder, (path, holder) = None, self.source
        if self.dist.main and not holder:
            path, others = Path(path), found(self.directory)
            if path.parent.resolve() == self.directory.resolve():
                others = [other for other in others if step_of(other) > (step_of(path) or 0)]
            with self._writing():
                folder = set_aside(others, self.directory)
            if folder:
                self.dist.print(f"Los puntos de control que no llevan a {path} se han movido a {folder}.")
        return folder

    def begin(self, resume):
        """Leave word that what lies in the folder is of this launch, for a later attempt to know."""
        if self.dist.main and resume != "auto":
            with self._writing():
                write_bytes(self.directory / LAUNCH, self.dist.launch.encode())

    def save(self, step, state, interrupted=False, own=None):
        """Write the checkpoint of `step` on rank 0, verify it and only then remove the oldest; in the background where
        that was asked for, unless the run is being interrupted. own: what this rank alone knows, for a file of its own
        that load() finds again; if it cannot be written, there is a warning and no more. Returns the seconds that
        training stood still.

        Raises TrainingFault naming the reason and the last good checkpoint when it, or the one before, cannot be
        written.
        """
        started = time.perf_counter()
        self.finish()
        name = self.names.interrupted if interrupted else self.names.regular
        files = {}
        if own is not None:  # with it the other ranks need nothing from rank 0 to go on
            sync = {key: value for key, value in state["sync"].items() if not isinstance(value, torch.Tensor)}
            files[path_of(self.own, step)] = {"own": own, **({"sync": sync} if self.dist.main else
                                                             {**self.constants, **state})}
        if self.dist.main:  # last: killed in between, the run goes on from the one before, of which all is there
            files[path_of(self.directory, step, name)] = state
        else:
            self._came_from(path_of(self.directory, step, name))
        if not files:
            collect(state, self.dist)
        elif self.host is None or interrupted:
            # Into the buffers of the last save, where there is one: a second copy may be more than the machine holds.
            again = self.host is not None and self.host.buffers
            self._write({path: self.host.take(part, (path.parent.name,)) if again else cpu_copy(part)
                         for path, part in files.items()})
            self.poll()
        else:
            self._write_behind(files)
        return time.perf_counter() - started

    def save_alone(self, step, state):
        """Write the checkpoint of `step` on this rank, whichever it is, for those who are left when another is lost;
        where that fails, the one before is the last. One that rank 0 wrote in this run at this very step, on a disk
        that this rank sees, stays: the agreed weights in it are the same, and rank 0's optimiser is in none but that.
        """
        self.settle()
        if self.source and step_of(self.source[0]) == step and _run_of(self.source[0]) == state["sync"].get("run"):
            return
        path = path_of(self.directory, step, self.names.interrupted)
        alone = {**state, "sync": {**state["sync"], "run": None}}  # no rank's own file goes with it
        self._write({path: cpu_copy(alone)})
        self.failure = None

    def _write_behind(self, files):
        try:
            copied = {path: self.host.take(part, (path.parent.name,)) for path, part in files.items()}
        except RuntimeError as problem:  # what torch raises when there is no room
            if is_communication_error(problem):
                raise
            if self.dist.sharded:  # the other ranks have given their parts and will not do so again
                raise TrainingFault("en la memoria del proceso 0 no cabe una copia del estado entero "
                                    f"({first_line(problem)})") from problem
            self.dist.print_each("Aviso: no cabe una copia del estado en la memoria "
                                 f"({first_line(problem)}): el entrenamiento esperará a que se guarde "
                                 "cada punto de control.")
            self.host = None
            self._write(files)
            self.poll()
            return
        if self.writer:
            self.writing = self.writer.submit(self._write, copied)
        else:  # training waits for this one
            self._write(copied)
            self.poll()

    def _write(self, files):
        """Write {path: state} in this order, each whole or not at all."""
        warning = None
        for path, state in files.items():
            try:
                path.parent.mkdir(exist_ok=True)
                if path.parent == self.directory:
                    keep_held(path.parent)
                remove_partials(path.parent)
                save_file(path, {**self.constants, **state} if path.parent == self.directory else state)
                wrong = damage(path)
                if wrong:
                    raise OSError(0, wrong)
                if path.parent == self.directory:
                    self._came_from(path, self.dist.rank)
                    self._rotate(path)
                else:
                    _keep_two(path)
            except OSError as problem:
                if path.parent == self.directory:
                    self.failure = TrainingFault(f"no se pudo guardar {str(path)!r}: {explain(problem)}")
                    return
                warning = (f"Aviso: no se pudo guardar {str(path)!r} ({explain(problem)}): si se reanuda, será desde "
                           "los pesos acordados.")
            except Exception as problem:  # it happens in a thread, and belongs to whoever waits for it
                self.failure = problem
                return
        if warning:  # else the run ends, and goes on from the one before
            self.dist.print_each(warning)

    def _came_from(self, path, holder=0):
        self.source, self.last = (str(path), holder), str(path)

    def _rotate(self, written):
        for old in [path for path in found(self.directory) if path != written][max(0, self.keep - 1):]:
            if not (self.keep_every and step_of(old) % self.keep_every == 0):
                try:
                    old.unlink(missing_ok=True)
                except OSError as problem:  # another user's, say: what has been written is safe all the same
                    if not self.crowded:
                        self.dist.print_each(f"Aviso: no se puede borrar {str(old)!r} ({explain(problem)}): hay más "
                                             "puntos de control de los pedidos, y ocupan disco.")
                    self.crowded = True

    def poll(self):
        """Raise what went wrong in the last save, if anything."""
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def finish(self):
        """Wait until nothing is being written; raises as poll()."""
        self.settle()
        self.poll()

    def settle(self):
        """Wait until nothing is being written; what went wrong is left for poll()."""
        if self.writing is not None:
            self.writing.result()

    def has_any(self):
        """Whether this run has written or read a checkpoint, as rank 0 knows; to be called on all ranks."""
        self.settle()
        return self.dist.broadcast_tree(self.source is not None if self.dist.main else None)

    def named(self):
        """The phrase that tells where to go on from, once nothing is being written any more."""
        self.settle()
        if self.left_to is not None:
            return f"lo último que se acordó lo guarda el rango {self.left_to}, que dice dónde"
        if not self.last:
            return "todavía no había ningún punto de control"
        path, holder = self.source
        lost = not holder and not os.path.exists(path)
        if lost and self.dist.first_has_left:  # before it had written that one
            path = next(map(str, found(self.directory)), self.loaded)
            return f"último punto de control: {path}" if path else "todavía no había ningún punto de control"
        machines = self.dist.machines
        where = ", que ya no está ahí" if self.dist.main else (
            " (en la máquina del rango 0)" if machines and machines[0] != machines[self.dist.rank] else "")
        return f"último punto de control: {self.last}{where * lost}"

    def load(self, resume="auto", keep=None, setting=None):
        """The state to resume from, received by every rank, or None.

        resume: a path, or 'auto', the newest that verifies: rank 0's or, where another rank's disk has one of the same
        run that is further, that one. keep: what a rank keeps of each tensor, as Session.broadcast_tree takes it.
        setting: the sync's. Where it is as it was then, and every rank still has the file it wrote itself with that
        checkpoint, each goes on from its own, which adds "own" to the state, and nothing is sent.

        Raises UserError for a path that does not exist or is damaged.
        """
        self.settle()
        path = state = None
        sync, holder = {}, 0

        def chosen():  # what is wrong with it, all ranks end with; and no time-out limits the reading of a large one
            nonlocal path, state
            path = choose(resume, self.directory, self.dist.print)
            state = path and read(path)

        self.dist.run_on_main(chosen)
        if self.dist.main:
            sync = dict(state.get("sync", {})) if path else {}
            sync["origin"] = self._signed() or sync.get("origin")
            if resume != "auto":  # a path that was given is taken as it is
                sync.pop("origin", None)
        path, run, origin, found_by_us = self.dist.broadcast_tree(
            (str(path) if path else None, sync.get("run"), sync.get("origin"), resume == "auto"))
        if origin:
            further, holder = self._further(path, origin)
            if holder:
                path, run, state = further, None, load_unchecked(further) if self.dist.rank == holder else None
        if found_by_us and not origin:
            self._tell_of_others(path)
        if path is None:
            return None
        own = self._read_own(path, {**setting, "run": run}) if setting and run else None
        if setting and self.dist.sum([own is not None])[0] == self.dist.world_size:
            state = {**own, **(state or {})}
        else:
            state = self.dist.broadcast_tree(state, keep, holder)
        if origin:  # a way that began from this checkpoint may have a name of its own by now
            state["sync"] = {**state.get("sync", {}), "origin": origin}
        self._came_from(path, holder)
        if holder:
            self.last += f" (en la máquina del rango {holder})"
        self.loaded = self.last
        return state

    def reload(self, keep=None):
        """The state of the checkpoint this run has written or read last or, where that is damaged by now, of the newest
        that verifies, received by every rank; None when there is none. keep: as load() takes it."""
        self.settle()
        state, (path, holder) = None, self.source or (None, 0)
        if path and self.dist.rank == holder:
            wrong = damage(path)
            state = None if wrong else load_unchecked(path)
            if wrong:
                self.dist.print_each(f"Aviso: se descarta {path}: {wrong}.")
        if not self.dist.sum([state is not None])[0]:
            return self.load("auto", keep)
        return self.dist.broadcast_tree(state, keep, holder)

    def sign(self, origin):
        """Leave a sync's origin in the folder of its run: if rank 0 is lost before it has saved anything, load() knows
        by it which checkpoints of other ranks belong to the run."""
        if self.dist.main and origin:
            with self._writing():
                write_bytes(self.directory / ORIGIN, origin.encode())
        elif self.dist.main:
            (self.directory / ORIGIN).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _writing(self):
        """A block that writes to the folder before the training: what the disk refuses there is a UserError."""
        try:
            yield
        except OSError as problem:
            raise UserError(f"--checkpoint-dir {str(self.directory)!r}: no se puede escribir ahí ({explain(problem)}); "
                            "haga sitio o indique otra carpeta") from problem

    def _signed(self):
        with contextlib.suppress(FileNotFoundError):
            return _signature(self.directory)

    def _further(self, path, origin):
        """(path, rank) of the furthest checkpoint that verifies, of the run that began as `origin`, on another rank's
        disk, where those who were left saved it when rank 0 was lost. (None, 0) when none is further than rank 0's own
        at `path`."""
        found_here = None
        if not self.dist.main:
            reached = step_of(path) if path else -1
            found_here = next((str(each) for each in found(self.directory) if step_of(each) > reached
                               and _origin_of(each) == origin and damage(each) is None), None)
        every = [(step_of(each), -rank, each) for rank, each in enumerate(self.dist.gather_objects(found_here)) if each]
        _, rank, further = max(every, default=(0, 0, None))
        return further, -rank

    def _tell_of_others(self, path):
        """Say so when another rank's disk has a checkpoint further than `path`, perhaps None, and rank 0's has not: the
        machines may have changed places since."""
        here, reached = list(found(self.directory)), step_of(path) if path else -1
        every = self.dist.gather_objects(next((str(each) for each in here if step_of(each) > reached), None))
        known = {each.name for each in here}
        rank = next((rank for rank, each in enumerate(every) if each and Path(each).name not in known), None)
        if rank is not None:
            begins = f"se sigue desde {path}" if path else "se empieza de cero"
            self.dist.print(f"Aviso: {begins}, aunque en la máquina del rango {rank}, y no en la del 0, está "
                            f"{every[rank]}. Si es de este entrenamiento, pare con Ctrl+C y haga que esa máquina sea "
                            "la 0, o cópielo a la carpeta de la 0.")

    def _read_own(self, path, setting):
        """What this rank wrote itself with the checkpoint `path` in this setting, None where that is not to be had."""
        step = step_of(path)
        if step is None or not path_of(self.own, step).exists():
            return None
        try:
            state = read(path_of(self.own, step), "sin él se parte de los pesos acordados")
        except UserError as problem:
            self.dist.print_each(f"Aviso: {problem}.")
            return None
        return state if all(state["sync"].get(name) == value for name, value in setting.items()) else None

    def say_if_room_is_short(self, size, steps, last, own=0):
        """Tell when rank 0's disk has no room for what saves of `size` bytes come to: those that stay, and the last one
        before the oldest goes. steps: a range of the steps they are due at, before the `last`. own: bytes of what rank
        0 writes for itself with each; two stay."""
        if not self.dist.main:
            return
        there = {step_of(path) for path in found(self.directory)}
        newest = sorted(there | {*steps[-self.keep - 1:], last})[-self.keep - 1:]
        older = (there | {last}) - {*newest}
        stay = sum(1 for step in older if self.keep_every and step % self.keep_every == 0 and step not in steps)
        if self.keep_every:  # counted, not listed: there may be more steps than memory
            apart = math.lcm(self.keep_every, steps.step)
            stay += len(range(-(-steps.start // apart) * apart, min(newest[0], steps.stop), apart))
        more = len(newest) + stay - len(there)
        free = shutil.disk_usage(self.directory).free
        owns = max(0, min(3 - len(found(self.own)), len(steps) + 1)) if own else 0
        if free < more * size + owns * own:
            self.dist.print(f"Aviso: en {str(self.directory)!r} quedan {amount(free)} y llegará a haber "
                            f"{counted(more, 'punto')} de control más, de {amount(size + own)}: libere espacio o "
                            "baje --keep-checkpoints, o se parará cuando no quepa el siguiente.")


def _thread():
    """An executor of one thread, which is there from now on: one that is begun when memory is short may die before it
    has told Python so, which would wait for that for ever. None where no thread is to be had."""
    executor = ThreadPoolExecutor(1)
    try:
        executor.submit(int).result()
    except RuntimeError:  # no room for its stack, or as many threads as there may be
        return None
    return executor


def _origin_of(path):
    """DiLoCo.origin of the run that wrote a checkpoint, None where there is none."""
    with contextlib.suppress(UserError):
        return peek(path).get("sync", {}).get("origin")


def _run_of(path):
    """DiLoCo.run of the run that wrote a checkpoint, "" where there is none that is whole."""
    with contextlib.suppress(UserError):
        return read(path).get("sync", {}).get("run", "")
    return ""


def _keep_two(written):
    """Remove all but `written`, the last, and the file beside it that was written before it."""
    others = [path for path in found(written.parent) if path != written]
    stamps = [path.lstat().st_mtime_ns for path in others]
    last = max([written.lstat().st_mtime_ns, *(stamp + 1 for stamp in stamps)])  # also where the clock was set back
    os.utime(written, ns=(last, last))
    for path in sorted(others, key=lambda path: path.lstat().st_mtime_ns, reverse=True)[1:]:
        path.unlink(missing_ok=True)

def collect(tree, dist):
    """cpu_copy of a state on rank 0, whole, one tensor after another; None on the others, which give their shards."""
    if dist.main:
        return cpu_copy(tree)
    if isinstance(tree, torch.Tensor):
        whole(tree.detach())
    elif isinstance(tree, dict | list | tuple):
        for part in tree.values() if isinstance(tree, dict) else tree:
            collect(part, dist)
    return None


def cpu_copy(tree):
    """A nested structure with its tensors detached and on the CPU, and nothing weights_only would refuse."""
    if isinstance(tree, torch.Tensor):
        return whole(tree.detach()).cpu()
    if isinstance(tree, dict):
        return {key: cpu_copy(part) for key, part in tree.items()}
    if isinstance(tree, list | tuple):
        return [cpu_copy(part) for part in tree]
    return tree
