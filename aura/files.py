"""Files that are either whole or not there: written beside their final name, flushed to disk, then renamed; and what
is wrong with a path, in Spanish."""

import contextlib
import errno
import glob
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from pathlib import Path

from aura.errors import UserError

ATTEMPTS = 20  # to take a name that others take at the same time
UNFINISHED = "unfinished.json"  # how far a folder that is being made has come; where it is, the folder may be taken up
PARTIAL_SUFFIX = ".parcial"  # what an interrupted writer may leave behind; but for those, removed by the next writer
IN_USE = ".en-uso"
# What reading a file that holds other JSON than ours runs into: not JSON, of another shape, too deep.
MISSHAPEN = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
NAME_BYTES = 180  # of a name, to which names in a folder or beside a file add as much as 60: file systems take 255
_held = {}  # the path of each lock of hold()'s: its descriptor, and the flag of its folder
_made = []  # the folders and the locks in them that were not there before this process, for take_back()


def sync_directory(directory):
    """Make renames inside `directory` durable (a no-op where directories cannot be opened, as on Windows)."""
    if os.name != "nt":
        sync_to_disk(directory, os.O_RDONLY)


def sync_to_disk(path, how=os.O_RDWR):
    """Make what a file, or a folder that is opened for reading, has been given durable."""
    descriptor = os.open(path, how)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _not_through_links(path, flags):
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


@contextlib.contextmanager
def atomic_write(path, mode="wb"):
    """Yield a file open for writing that takes the name `path` only if the block ends without an exception.

    Raises OSError as the file system reports it (no space, read-only); the old file, if any, is then untouched. Where
    `path` is a link, the file is the one it leads to, perhaps on another disk.
    """
    path = Path(os.path.realpath(path))
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL_SUFFIX}")
    try:
        # A file name that is not UTF-8 goes into JSON as escapes, from which Python gets its bytes back.
        text = {} if "b" in mode else {"encoding": "utf-8", "errors": "backslashreplace"}
        partial.unlink(missing_ok=True)  # of a process of the same number
        with open(partial, mode, opener=_not_through_links, **text) as file:
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


def remove_partials(directory, name=None):
    """Remove what killed writers of `directory` left behind; `name`: only of the file called so, where others may be
    writing theirs."""
    for partial in Path(directory).glob(f".{'*' if name is None else glob.escape(name) + '.*'}{PARTIAL_SUFFIX}"):
        if partial.is_file():
            partial.unlink(missing_ok=True)


def lock(path, shared=False):
    """Take the lock of the file or folder `path`: a descriptor, whose closing or the end of this process gives it up.
    shared: others may have it too, if they share it.

    Raises BlockingIOError when another process has it, and OSError where there are no locks, as on NFS without a lock
    server.
    """
    try:
        import fcntl
    except ImportError:
        raise OSError(errno.ENOLCK, "no locks") from None
    folder = os.path.isdir(path) or str(path).endswith(PARTIAL_SUFFIX)  # which may be gone by now
    how = os.O_RDONLY if folder else os.O_RDWR | os.O_CREAT  # NFS locks what may be written
    try:
        descriptor = os.open(path, how, 0o666)
    except PermissionError:  # another user's, as root's of a container is: elsewhere what may be read can be locked
        descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        if not os.fstat(descriptor).st_nlink:  # whoever had it has removed it since it was opened (see take_back)
            raise BlockingIOError(errno.EAGAIN, "in use")
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def building(final, is_ours=None):
    """A new folder beside `final` to make it in (see put_in_place), removed at the end where it is still there. As long
    as it is locked nobody takes it for abandoned, on whatever machine or in whatever container. Where `final` is a
    link, that is beside what it leads to, perhaps on another disk. is_ours: where it is given, a folder with a file
    UNFINISHED stays, and the next block for `final` whose is_ours(folder) is true is given that, as it is; where there
    are no locks none stays, since nobody could tell that it is left."""
    final = Path(os.path.realpath(final))
    remove_abandoned(final.parent, final.name)
    partial, locks = is_ours and unfinished(final, is_ours) or _locked_partial(final)
    try:
        yield partial
    finally:
        if not (is_ours and locks and (partial / UNFINISHED).exists()):
            shutil.rmtree(partial, ignore_errors=True)
        give_up(locks)


def _take(folder):
    """Descriptors of the locks of a folder that is being made: its own, which on NFS this machine alone sees, and that
    of a file in it. Raises as lock()."""
    own = lock(folder)
    try:
        return own, lock(folder / IN_USE)
    except OSError:
        os.close(own)
        raise


def give_up(locks):
    """Close what unfinished() has taken."""
    for descriptor in locks:
        os.close(descriptor)


def unfinished(final, is_ours):
    """(folder, descriptors of its locks) of what a block of building() left to be taken up, or None."""
    final = Path(os.path.realpath(final))
    for mark in sorted(final.parent.glob(f".{glob.escape(final.name)}.*{PARTIAL_SUFFIX}/{UNFINISHED}")):
        with contextlib.suppress(OSError):  # another process is at it, or there are no locks
            locks = _take(mark.parent)
            if is_ours(mark.parent):
                return mark.parent, locks
            give_up(locks)
    return None


def _locked_partial(final):
    """(new folder, descriptors of its locks, none where there are no locks)."""
    for _ in range(ATTEMPTS):
        partial = final.with_name(f".{final.name}.{secrets.token_hex(4)}{PARTIAL_SUFFIX}")
        partial.mkdir()
        try:
            return partial, _take(partial)
        except (BlockingIOError, FileNotFoundError):  # somebody who saw no lock yet is removing it
            continue
        except OSError:
            break
    return partial, ()


def put_in_place(partial, final):
    """Rename a whole folder; an older one of that name, or that a link of that name leads to, is moved out of the way
    first and removed last. What is in place is no longer UNFINISHED."""
    final = Path(os.path.realpath(final))
    for _ in range(ATTEMPTS):
        old = final.with_name(f".{final.name}.{secrets.token_hex(4)}{PARTIAL_SUFFIX}")
        try:
            with contextlib.suppress(FileNotFoundError):
                os.rename(final, old)
            os.rename(partial, final)
        except BaseException as problem:  # of a signal too
            if getattr(problem, "errno", None) not in (errno.ENOTEMPTY, errno.EEXIST):
                with contextlib.suppress(OSError):
                    os.rename(old, final)
                raise
        for path in (final / UNFINISHED, old / UNFINISHED, final / IN_USE):  # not before: what is killed is taken up
            with contextlib.suppress(OSError):
                path.unlink()
        shutil.rmtree(old, ignore_errors=True)
        if not partial.exists():  # else another process has put its own there in between
            sync_directory(final.parent)
            return
    raise OSError(0, "otros procesos escriben en la misma carpeta", str(final))


def remove_abandoned(directory, name=None, is_ours=None):
    """Remove the folders that killed processes were building in `directory` and nobody can take up; `name`: only those
    to be called so, beside what that leads to where it is a link. is_ours: an unfinished one as well, where
    is_ours(folder) is true. Where there are no locks they stay."""
    if name is not None:
        directory, name = os.path.split(os.path.realpath(Path(directory, name)))
    for partial in Path(directory).glob(f".{'*' if name is None else glob.escape(name) + '.*'}{PARTIAL_SUFFIX}"):
        with contextlib.suppress(OSError):
            if partial.is_dir() and (is_ours or not (partial / UNFINISHED).exists()):
                locks = _take(partial)
                if not (partial / UNFINISHED).exists() or is_ours and is_ours(partial):
                    shutil.rmtree(partial, ignore_errors=True)
                give_up(locks)


def set_aside(paths, into):
    """Move the files `paths` into a new dated folder inside `into`, so that a new run never mixes with an old one.

    Returns the folder, or None when there was nothing to move.
    """
    paths = [path for path in map(Path, paths) if path.exists()]
    if not paths:
        return None
    stamp = time.strftime("anterior-%Y%m%d-%H%M%S")
    folder = Path(into, f"{stamp}-{secrets.token_hex(4)}")
    folder.mkdir()  # tempfile's would be closed to all but its owner, and what lies here may be another user's
    try:
        for path in paths:
            os.replace(path, folder / path.name)
    except OSError:
        with contextlib.suppress(OSError):  # where some have been moved it stays
            folder.rmdir()
        raise
    return folder


def hold(directory, flag):
    """Take the lock of `directory`, where this process does not have it yet, for as long as it lives, so that two runs
    never write into one folder.

    Raises UserError naming `flag` when another process has it. A file system or a Windows without locks has none.
    """
    path = Path(directory, IN_USE)
    known = os.path.realpath(path)
    if known in _held:
        return
    new = not path.exists()
    try:
        _held[known] = lock(path), flag
        _made.extend([path] * new)
    except BlockingIOError:
        raise UserError(f"otra ejecución está usando {str(directory)!r}: espere a que termine, deténgala, o indique "
                        f"otra carpeta con {flag}") from None
    except OSError:  # NFS without a lock server
        return


def keep_held(directory):
    """Take the lock of hold() again where somebody has removed it, with the folder, and another run could have begun
    in a new one. Raises UserError where one has."""
    path = os.path.realpath(Path(directory, IN_USE))
    if path not in _held:
        return
    descriptor, flag = _held[path]
    try:
        same = os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        same = False
    if not same:
        del _held[path]
        os.close(descriptor)  # first: where a file system numbers its files anew as it likes, it is the same one
        hold(directory, flag)


def require_writable_directory(directory, flag):
    """Create `directory` if needed and prove that files can be made in it, as atomic_write() makes them: in a folder
    that one may write into but not read no rename can be made durable.

    Raises UserError naming `flag`, the path and the reason.
    """
    try:
        os.fspath(directory).encode()  # what is no UTF-8 neither torch nor TensorBoard takes
        folder = Path(directory)
        new = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        _made.extend(new)
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(b"x")
            probe.flush()
        sync_directory(directory)
    except (OSError, UnicodeEncodeError) as problem:
        why = explain(problem) if isinstance(problem, OSError) else "el nombre no está en UTF-8"
        room = "libere espacio o " if getattr(problem, "errno", None) in (errno.ENOSPC, errno.EDQUOT) else ""
        raise UserError(f"no se puede escribir en {str(directory)!r} ({why}); {room}indique otra carpeta con {flag}"
                        ) from problem


def require_writable_file(name, flag):
    """Prove that a file called `name` can be written, as atomic_write() does; returns its path. Raises UserError."""
    named = f"{flag} {name!r}"
    path = path_called(name, named, "indique otro nombre")
    if path.is_dir():
        raise UserError(f"{named} es una carpeta: indique el nombre de un fichero")
    if len(os.fsencode(path.name)) > NAME_BYTES:
        raise UserError(f"{named}: el nombre pasa de {NAME_BYTES} bytes, y el de lo que se guarda a su lado sería "
                        "demasiado largo; indique uno más corto")
    require_writable_directory(path.parent, flag)
    if path.is_symlink():
        leads = Path(os.path.realpath(path))
        if not leads.parent.is_dir():
            raise UserError(f"{named}: es un enlace a {str(leads)!r}, y esa carpeta no está; quizá falte montar el "
                            "disco")
        require_writable_directory(leads.parent, flag)
    return path


def take_back():
    """Remove the locks and the empty folders that were made for a run that is refused."""
    for path in sorted(_made, key=lambda path: len(path.parts), reverse=True):
        with contextlib.suppress(OSError):  # what holds something stays
            path.unlink() if path.name == IN_USE else path.rmdir()


def path_called(name, named, otherwise="guarde su contenido en un fichero e indíquelo"):
    """The path `name`, its ~ expanded, whether or not there is such a file. named: how the error message calls it.
    otherwise: Spanish for what to do about a device or a pipe.

    Raises UserError where the system refuses to say (Path.exists() and its kin answer False there from Python 3.14 on)
    and for a device or a pipe: they can be read once at most, opening a pipe waits in silence for somebody to write
    into it, and a file that is renamed to one replaces it.
    """
    try:
        path = Path(name).expanduser()
        kind = path.stat().st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
            raise UserError(f"{named}: no es un fichero ni una carpeta; {otherwise}")
    except (FileNotFoundError, NotADirectoryError):
        if os.name == "posix" and re.match(r"[A-Za-z]:", str(name)):
            raise UserError(f"{named}: es una ruta de Windows; en WSL, C:\\Users\\Ana es /mnt/c/Users/Ana") from None
    except OSError as problem:
        raise UserError(f"{named}: no se puede leer ({explain(problem)}); compruebe la ruta y sus permisos"
                        ) from problem
    except RuntimeError as problem:
        raise UserError(f"{named}: no hay un usuario con esa carpeta personal; escriba la ruta entera") from problem
    return path


def regular(path):
    """`path`, which a program reads without having been told to. Raises OSError where it is there and no file: opening
    a pipe would wait in silence for somebody to write into it."""
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise OSError(errno.ENXIO, "no es un fichero", str(path))
    return path


def nearest(folder):
    """`folder`, or where that does not exist yet the nearest of those above it that does."""
    path = Path(folder).absolute()
    return next(each for each in (path, *path.parents) if os.path.exists(each))


def explain(problem):
    """One Spanish phrase for an OSError."""
    if problem.errno == errno.EEXIST and problem.filename and os.path.islink(problem.filename) \
            and not os.path.exists(problem.filename):
        try:
            os.stat(problem.filename)
        except OSError as found:
            if found.errno != errno.ENOENT:  # a circle of links, say
                return explain(found)
        return f"es un enlace a {os.readlink(problem.filename)!r}, que no está; quizá falte montar el disco"
    phrases = {
        errno.ENOSPC: "no queda espacio en el disco",
        errno.EDQUOT: "se ha agotado la cuota de disco",
        errno.EROFS: "el sistema de ficheros es de solo lectura",
        errno.EACCES: "permiso denegado",
        errno.EPERM: "operación no permitida",
        errno.ENOENT: "no existe",
        errno.ENOTDIR: "una parte de la ruta no es una carpeta",
        errno.EEXIST: "ya existe y no es una carpeta",
        errno.EISDIR: "es una carpeta",
        errno.EBUSY: "está en uso o es un punto de montaje",
        errno.EIO: "error de lectura o escritura del disco",
        errno.ELOOP: "los enlaces forman un círculo",
        errno.ENXIO: "no es un fichero",
        errno.ENAMETOOLONG: "el nombre es demasiado largo",
        errno.ESTALE: "el servidor de ficheros ya no conoce el fichero",
        errno.EMFILE: "este proceso tiene demasiados ficheros abiertos; ulimit -n dice cuántos puede",
        errno.ENOMEM: "no queda memoria para este proceso; ulimit -v dice cuánta puede tener",
        errno.EAGAIN: "el sistema no da más hilos ni procesos, o memoria para ellos; ulimit -u y -v dicen cuánto",
        errno.EFBIG: "el fichero sería mayor de lo que se admite; ulimit -f lo dice",
    }
    return phrases.get(problem.errno, problem.strerror or str(problem))
