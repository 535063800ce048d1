"""Checkpoints: written whole or not at all, verified before use, found again by themselves.

    checkpoints/ckpt-00000500.pt      one zip archive, readable with torch.load(weights_only=True)

Every record of the archive carries a CRC-32 that torch.load does not check; `verify` does, so a flipped bit is found
and the checkpoint before it is taken. Rank 0 alone reads and writes; the others receive.
"""

import os
import re
import shutil
import zipfile
import zlib
from pathlib import Path

import torch

from aura.errors import TrainingFault, UserError
from aura.files import atomic_write, explain, remove_partials, set_aside

NAME = re.compile(r"ckpt-(\d{8})\.pt$")


def path_of(directory, step):
    """Where the checkpoint of `step` lives."""
    return Path(directory) / f"ckpt-{step:08d}.pt"


def found(directory):
    """Paths of all checkpoints in `directory`, newest (highest step) first; not verified."""
    return sorted((path for path in Path(directory).glob("ckpt-*.pt") if NAME.search(path.name)), reverse=True)


def damage(path):
    """None when every record of the archive is whole, else a Spanish phrase that says what is wrong."""
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
            return f"el registro {broken} está dañado" if broken else None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError) as problem:
        return f"el archivo está incompleto o dañado ({problem})"
    except OSError as problem:
        return explain(problem)


def read(path):
    """Verify and load one checkpoint to the CPU. Raises UserError naming the file and what is wrong with it."""
    wrong = damage(path)
    if wrong:
        raise UserError(f"punto de control {str(path)!r}: {wrong}; use --resume auto para tomar el anterior")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, KeyError, ValueError, EOFError, OSError) as problem:
        raise UserError(f"{str(path)!r} no es un punto de control de este proyecto "
                        f"({str(problem).splitlines()[0][:120]})") from problem
    except Exception as problem:  # pickle.UnpicklingError, whose text weights_only fills with advice not meant for us
        raise UserError(f"{str(path)!r} contiene objetos que no son tensores ni valores simples: no se carga"
                        ) from problem


def newest_good(directory, note=print):
    """The newest checkpoint that verifies, or None; each damaged one is named."""
    for path in found(directory):
        wrong = damage(path)
        if wrong is None:
            return path
        note(f"Aviso: se descarta {path}: {wrong}.")
    return None


def save_file(path, state):
    """Write `state` with torch.save, atomically. Raises OSError when the disk refuses."""
    with atomic_write(path) as file:
        writer = _Remembering(file)
        try:
            torch.save(state, writer)
        except RuntimeError as problem:  # torch reports a full disk as a RuntimeError of its archive writer
            raise writer.problem or OSError(str(problem).splitlines()[0]) from problem


class _Remembering:
    """A file that remembers the OSError a write met, since torch's archive writer replaces it."""

    def __init__(self, file):
        self.file, self.problem = file, None

    def write(self, data):
        """Write `data`; returns the number of bytes."""
        try:
            return self.file.write(data)
        except OSError as problem:
            self.problem = problem
            raise

    def flush(self):
        """Flush the file."""
        self.file.flush()


class Checkpointer:
    """Saves, rotates and restores the checkpoints of one run, on every rank alike.

    constants: what does not change during the run (configuration, tokenizer, versions), stored in each checkpoint.
    last: path of the newest checkpoint this run has written or read, None before; the same on all ranks.
    """

    def __init__(self, directory, dist, keep=3, constants=None):
        self.directory, self.dist, self.keep = Path(directory), dist, keep
        self.constants = constants or {}
        self.last = None

    def start_fresh(self):
        """Move the checkpoints of an earlier run aside so that 'the newest' always belongs to this one."""
        if self.dist.main:
            folder = set_aside(found(self.directory), self.directory)
            if folder:
                self.dist.print(f"Los puntos de control anteriores se han movido a {folder}.")

    def save(self, step, state):
        """Write the checkpoint of `step` on rank 0 and remove the oldest beyond `keep`.

        Raises TrainingFault naming the reason and the last good checkpoint when it cannot be written.
        """
        path = path_of(self.directory, step)
        if self.dist.main:
            try:
                remove_partials(self.directory)
                save_file(path, {**self.constants, **state})
            except OSError as problem:
                raise TrainingFault(f"no se pudo guardar {str(path)!r}: {explain(problem)}") from problem
            for old in found(self.directory)[self.keep:]:
                old.unlink(missing_ok=True)
        self.last = str(path)

    def named(self):
        """The phrase that tells where to go on from."""
        return f"último punto de control: {self.last}" if self.last else "todavía no había ningún punto de control"

    def load(self, resume="auto"):
        """The state to resume from, received by every rank, or None. resume: 'auto' (newest that verifies) or a path.

        Raises UserError for a path that does not exist or is damaged.
        """
        path = None
        if self.dist.main:
            path = newest_good(self.directory, self.dist.print) if resume == "auto" else _existing(resume)
        path = self.dist.broadcast_tree(str(path) if path else None)
        if path is None:
            return None
        state = self.dist.broadcast_tree(read(path) if self.dist.main else None)
        self.last = path
        return state

    def require_room(self, state_bytes, flag="--checkpoint-dir"):
        """Raise UserError when the disk cannot hold one more checkpoint of `state_bytes`."""
        free = shutil.disk_usage(self.directory).free
        if self.dist.main and free < state_bytes:
            raise UserError(f"en {str(self.directory)!r} quedan {free / 1e9:.2f} GB y un punto de control ocupa "
                            f"{state_bytes / 1e9:.2f} GB: libere espacio o indique otra carpeta con {flag}")


def _existing(path):
    path = Path(path)
    if path.is_dir():
        newest = newest_good(path)
        if newest is None:
            raise UserError(f"--resume {str(path)!r}: la carpeta no contiene ningún punto de control válido")
        return newest
    if not path.is_file():
        raise UserError(f"--resume {str(path)!r}: no existe; use auto, none o la ruta de un ckpt-*.pt")
    return path


def state_bytes(model, optimizer_states=2):
    """Size of a checkpoint: the weights and AdamW's two moments of each parameter."""
    weights = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    return weights * (1 + optimizer_states)


def cpu_copy(tree):
    """A nested structure with its tensors detached and on the CPU, and nothing weights_only would refuse."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().cpu()
    if isinstance(tree, dict):
        return {key: cpu_copy(part) for key, part in tree.items()}
    if isinstance(tree, list | tuple):
        return [cpu_copy(part) for part in tree]
    if isinstance(tree, os.PathLike):
        return os.fspath(tree)
    return tree
