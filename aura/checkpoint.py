"""One checkpoint on the disk: its name, whole or not at all, verified before use, found again by itself.

    checkpoints/ckpt-00000500.pt                one zip archive, readable with torch.load(weights_only=True)

Every record of the archive carries a CRC-32 that torch.load does not check; `damage` does, so a flipped bit is found
and the checkpoint before it is taken. Those of a run: aura/checkpointer.py.
"""

import contextlib
import errno
import os
import pickle
import re
import shutil
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

from aura.backend import out_of_memory
from aura.errors import UserError, first_line
from aura.files import atomic_write, explain, path_called, regular
from aura.words import amount

NAME = re.compile(r"(?:ckpt-|checkpoint-step-|interrupt-step-)(\d+)\.pt")
UNREAD = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE)  # what says nothing about the file itself
WEIGHTS_ALONE = "guarda solo los pesos de un modelo, y para seguir hace falta un punto de control"
ENCRYPTED = 1  # of a record's flags (APPNOTE 6.3.10, 4.4.4)


@dataclass(frozen=True)
class Names:
    """How checkpoints are called, as format strings of their step: the regular ones, and the last one of a run that a
    signal ended."""

    regular: str = "ckpt-{:08d}.pt"
    interrupted: str = "ckpt-{:08d}.pt"


def path_of(directory, step, name=Names.regular):
    """Where the checkpoint of `step` lives."""
    return Path(directory) / name.format(step)


def step_of(path):
    """The step in a checkpoint's name, None when it is not such a name."""
    match = NAME.fullmatch(Path(path).name)
    return int(match.group(1)) if match else None


def found(directory):
    """Paths of all checkpoints in `directory`, newest (highest step) first; not verified. Raises OSError for a folder
    that may not be looked into: Path.glob() finds nothing there, and a run would begin anew."""
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        names = []
    steps = {}
    for path in (Path(directory, name) for name in names if step_of(name) is not None):
        with contextlib.suppress(FileNotFoundError):  # the run that writes there has rotated it away
            steps[path] = step_of(path), path.lstat().st_mtime_ns
    return sorted(steps, key=steps.get, reverse=True)


def damage(path):
    """None when every record of the archive is whole and torch finds it, else a Spanish phrase that says what is wrong.

    A record's CRC does not cover its entry in the archive's directory, which torch reads in its own way: a record whose
    entry was damaged so that it passes for a folder, or for compressed, loads with other values. Raises UserError where
    there is not the memory, or not the permission, to find out: a run must not begin anew for that reason.
    """
    try:
        with zipfile.ZipFile(regular(path)) as archive:
            odd = (record.filename for record in archive.infolist() if record.external_attr or record.compress_type
                   or record.flag_bits & ENCRYPTED)
            broken = next(odd, None) or archive.testzip()  # which unpacks: of a compressed record, gigabytes
        if broken:
            return f"el registro {broken} está dañado"
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:  # whole, and not ours: for read() to say
        return None
    except OSError as problem:
        if problem.errno in UNREAD:
            raise UserError(f"{str(path)!r} no se puede leer ({explain(problem)}), y puede estar entero: corríjalo, o "
                            "apártelo de ahí para seguir sin él") from problem
        return explain(problem)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError, LookupError,
            MemoryError) as problem:  # they say why in English
        if out_of_memory(problem):  # it may well be whole: a run must not begin anew for that
            raise UserError(f"{str(path)!r}: no basta la memoria de esta máquina, o la que se admite a un proceso "
                            "(ulimit -v), para leerlo; libere memoria o suba ese límite") from problem
        return "no es un fichero de PyTorch, o está incompleto o dañado"
    return None


def read(path, way_out="use otro (con --resume auto se toma el anterior que esté bien)"):
    """Verify and load one checkpoint to the CPU. Raises UserError naming the file, what is wrong with it and the way
    out, which is not the same for who trains and who reads a model."""
    wrong = damage(path)
    if wrong:
        raise UserError(f"{str(path)!r}: {wrong}; {way_out}")
    return load_unchecked(path)


def peek(path):
    """A checkpoint with its tensors left on the disk, unverified: for what is written beside the weights.

    Raises UserError for what is no checkpoint."""
    try:
        return load_unchecked(path, mmap=True)
    except UserError:  # of a damaged file in torch's English: read() knows what is wrong with it
        return read(path)


def holds_weights_alone(state):
    """Whether what a file holds is a finished model and no checkpoint."""
    return bool(state) and all(isinstance(tensor, torch.Tensor) for tensor in state.values())


def load_unchecked(path, **how):
    """The content of a checkpoint, on the CPU, whose records have been checked, or need not be. how: for torch.load.
    Raises UserError for what is none of ours."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, **how)
        if not isinstance(state, dict):
            raise ValueError(f"contiene {type(state).__name__}")
        return state
    except (RuntimeError, LookupError, ValueError, EOFError, OSError) as problem:
        raise UserError(f"{str(path)!r} no es un punto de control de este proyecto "
                        f"({first_line(problem)}); indique otro") from problem
    except Exception as problem:  # pickle.UnpicklingError, whose text weights_only fills with advice not meant for us
        raise UserError(f"{str(path)!r} contiene objetos que no son tensores ni valores simples, y no se carga: "
                        "indique otro") from problem


def newest_good(directory, note=print):
    """The newest checkpoint that verifies, or None; each damaged one is named. Raises UserError where the folder cannot
    be read."""
    try:
        paths = found(directory)
    except OSError as problem:
        raise UserError(f"no se pueden buscar puntos de control en {str(directory)!r} ({explain(problem)}); compruebe "
                        "la ruta y sus permisos") from problem
    for path in paths:
        wrong = damage(path)
        if wrong is None:
            return path
        note(f"Aviso: se descarta {path}: {wrong}.")
    return None


def choose(resume, directory, note=print):
    """The checkpoint that `resume` means: 'auto', the newest of `directory` that verifies, or None; else a file, or a
    folder's newest. Raises UserError when there is no such file, or nothing valid in the folder."""
    if resume == "auto":
        return newest_good(directory, note)
    path = path_called(resume, f"--resume {resume!r}")
    if path.is_dir():
        newest = newest_good(path, note)
        if newest is None:
            raise UserError(f"--resume {str(path)!r}: la carpeta no contiene ningún punto de control válido; si la "
                            "ejecución paró antes de guardar el primero, repita la orden con que empezó")
        return newest
    if not path.is_file():
        raise UserError(f"--resume {str(path)!r}: no existe; use auto, none, un punto de control .pt o su carpeta; si "
                        "la ejecución paró antes de guardar el primero, repita la orden con que empezó")
    return path


def save_file(path, state):
    """Write `state` with torch.save, atomically. Raises OSError when the disk refuses."""
    with atomic_write(path) as file:
        writer = _Remembering(file)
        try:
            torch.save(state, writer)
        except RuntimeError as problem:  # torch reports a full disk as a RuntimeError of its archive writer
            raise writer.problem or OSError(first_line(problem)) from problem


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


def require_room(directory, size):
    """Raise UserError when the disk of `directory` cannot hold one more checkpoint of `size` bytes."""
    free = shutil.disk_usage(directory).free
    if free < size:
        newest = next(iter(found(directory)), None)  # another folder that lacks it would begin anew
        other = f"copie {newest.name} a otra carpeta e indíquela" if newest else "indique otra carpeta"
        raise UserError(f"en {str(directory)!r} quedan {amount(free)} y un punto de control ocupa {amount(size)}: "
                        f"libere espacio o {other} con --checkpoint-dir")


def size_of(parameters, average):
    """Bytes of a checkpoint: the weights, AdamW's two moments of each and, where there is one, their average."""
    return 4 * parameters * (4 if average else 3)
