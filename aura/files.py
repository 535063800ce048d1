"""Files that are either whole or not there: written beside their final name, flushed to disk, then renamed."""

import contextlib
import errno
import json
import os
import tempfile
import time
from pathlib import Path

from aura.errors import UserError

PARTIAL_SUFFIX = ".parcial"  # what an interrupted writer may leave behind; never read, removed by the next writer


def sync_directory(directory):
    """Make renames inside `directory` durable (a no-op where directories cannot be opened, as on Windows)."""
    if os.name == "nt":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def atomic_write(path, mode="wb"):
    """Yield a file open for writing that takes the name `path` only if the block ends without an exception.

    Raises OSError as the file system reports it (no space, read-only); the old file, if any, is then untouched.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL_SUFFIX}")
    try:
        with open(partial, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync_directory(path.parent)


def write_bytes(path, content):
    """Write `content`, atomically."""
    with atomic_write(path) as file:
        file.write(content)


def write_json(path, value):
    """Write `value` as indented UTF-8 JSON, atomically."""
    with atomic_write(path, "w") as file:
        json.dump(value, file, ensure_ascii=False, indent=2)
        file.write("\n")


def remove_partials(directory):
    """Remove what killed writers of `directory` left behind."""
    for partial in Path(directory).glob(f".*{PARTIAL_SUFFIX}"):
        if partial.is_file():
            partial.unlink(missing_ok=True)


def has_ended(pid):
    """Whether process `pid` is gone, or is a zombie that nobody has waited for (Linux; elsewhere True)."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return status.rpartition(")")[2].split()[0] == "Z"


def set_aside(paths, into):
    """Move the files `paths` into a new dated folder inside `into`, so that a new run never mixes with an old one.

    Returns the folder, or None when there was nothing to move.
    """
    paths = [path for path in map(Path, paths) if path.exists()]
    if not paths:
        return None
    stamp = time.strftime("anterior-%Y%m%d-%H%M%S")
    folder = Path(tempfile.mkdtemp(prefix=f"{stamp}-", dir=into))
    for path in paths:
        os.replace(path, folder / path.name)
    return folder


def hold(directory, flag):
    """Take the lock of `directory` for as long as this process lives, so that two runs never write into one folder.

    Raises UserError naming `flag` when another process has it. A file system or a Windows without locks has none.
    """
    try:
        import fcntl
    except ImportError:
        return
    descriptor = os.open(Path(directory) / ".en-uso", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(f"otra ejecución está usando {str(directory)!r}: espere a que termine, deténgala, o indique "
                        f"otra carpeta con {flag}") from None
    except OSError:  # NFS without a lock server
        os.close(descriptor)


def require_writable_directory(directory, flag):
    """Create `directory` if needed and prove, by writing, that files can be made in it.

    Raises UserError naming `flag`, the path and the reason.
    """
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(b"x")
            probe.flush()
    except OSError as problem:
        raise UserError(f"no se puede escribir en {str(directory)!r} ({explain(problem)}); "
                        f"indique otra carpeta con {flag}") from problem


def explain(problem):
    """One Spanish phrase for an OSError."""
    phrases = {
        errno.ENOSPC: "no queda espacio en el disco",
        errno.EDQUOT: "se ha agotado la cuota de disco",
        errno.EROFS: "el sistema de archivos es de solo lectura",
        errno.EACCES: "permiso denegado",
        errno.EPERM: "operación no permitida",
        errno.ENOENT: "no existe",
        errno.ENOTDIR: "una parte de la ruta no es una carpeta",
        errno.EEXIST: "ya existe y no es una carpeta",
        errno.EISDIR: "es una carpeta",
        errno.EIO: "error de lectura o escritura del disco",
        errno.ENAMETOOLONG: "el nombre es demasiado largo",
    }
    return phrases.get(problem.errno, problem.strerror or str(problem))
