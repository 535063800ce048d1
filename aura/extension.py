"""The one C++ extension: where its builds are kept, and what is in use and why.

    AURA_EXTENSION=off     do without it
    AURA_CPU_ISA=NAME      instruction set of the CPU kernels: portable, avx2, avx512, avx512bf16 or amx (default: the
                           best there is)
    AURA_BUILD_DIR=DIR     where builds are kept (default: ~/.cache/aura)

What it is built from and how is in aura/compilation.py.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import platform
import shutil
import struct
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import TextIO

from aura import compilation
from aura.compilation import Unavailable
from aura.errors import UserError
from aura.files import explain

WAIT_LIMIT_S = 1200  # a little longer than a build may take, so that a process that waits sees its end
WAIT_NOTICE_S = 5
UNUSED_BUILD_S = 30 * 24 * 3600


def build_key(compiler: list[str]) -> str:
    """Name of the folder of a build: another source, flag, tool or processor gets another folder."""
    nvcc, isas = shutil.which("nvcc"), compilation.run_here(compilation.instruction_sets())
    parts = {
        "sources, flags and torch": compilation.ninja_file(compiler, True, isas),
        "python": [sys.version, sysconfig.get_config_var("SOABI")],
        "compiler": compilation.output_of([*compiler, "--version"]),
        "cuda": compilation.output_of([nvcc, "--version"]) if nvcc else "none",
        "machine": [platform.machine(), compilation.processor_flags()],
    }
    return digest(parts)


def digest(parts: object) -> str:
    """A name for the folder of a build that these parts decide."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]


def _build_root() -> Path:
    try:
        given = os.environ.get("AURA_BUILD_DIR")
        return Path(given).expanduser() if given else Path.home() / ".cache" / "aura"
    except RuntimeError:  # a user without a name, as services and containers have them
        raise Unavailable("no se sabe cuál es su carpeta personal; defina HOME o AURA_BUILD_DIR") from None


def build_folder(key: str) -> Path:
    """Where the build of this key is, or would be."""
    return _build_root() / key


@contextmanager
def _locked(path: Path):
    """Hold an exclusive lock that the kernel frees when its holder dies, whatever killed it. Yields its file, and
    whether another held it."""
    try:
        import fcntl
    except ImportError as error:
        raise Unavailable("en este sistema no se compila la extensión (use Linux o WSL2)") from error
    started, waited, told = time.monotonic(), 0.0, False
    how = {"encoding": "utf-8", "errors": "backslashreplace"}
    try:
        file = open(path, "a+", **how)  # noqa: SIM115 (closed below)
    except PermissionError:  # another user's, who may be building: what he leaves can be used
        file = open(path, **how)  # noqa: SIM115
    with file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = time.monotonic() - started
            if waited > WAIT_LIMIT_S:
                raise Unavailable(f"otro proceso lleva más de {WAIT_LIMIT_S} s compilando la extensión ({path})")
            if waited > WAIT_NOTICE_S and not told:
                print(f"Otro proceso compila la extensión de C++: se le espera como mucho {WAIT_LIMIT_S} s.",
                      file=sys.stderr)
                told = True
            time.sleep(0.1)
        yield file, waited > 0


def _mark(path: Path, mark: bytes) -> str:
    """What a module says of itself after `mark`, read without running it."""
    return path.read_bytes().partition(mark)[2].partition(b"\0")[0].decode(errors="replace")


def _cut_short(path: Path) -> bool:
    """Whether an ELF file ends before its table of sections, which comes last: to load one may end the process."""
    with open(path, "rb") as file:
        header = file.read(64)
        size = os.fstat(file.fileno()).st_size
    if header[:5] != b"\x7fELF\x02":  # of another system
        return False
    (start,), (entry, entries) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
    return start + entry * entries > size


def _import_file(path: Path) -> ModuleType:
    if compilation.MODULE in sys.modules:  # a second import would register its operators twice, which ends the process
        return sys.modules[compilation.MODULE]
    wanted, present = _mark(path, compilation.TORCH_MARK), compilation.torch_version()
    if not wanted or _cut_short(path):
        raise Unavailable(f"{path} está dañado: bórrelo y se compilará otra vez")
    if wanted != compilation.WITHOUT_TORCH:
        if wanted != present:
            raise Unavailable(
                f"{path} se compiló para torch {wanted}, y el de aquí es {present} (pip install --no-build-isolation .)"
            )
        importlib.import_module("torch")  # brings the libraries that the module is linked with
    loader = importlib.machinery.ExtensionFileLoader(compilation.MODULE, str(path))
    spec = importlib.util.spec_from_file_location(compilation.MODULE, str(path), loader=loader)
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as problem:
        if "failed to map segment" not in str(problem):
            raise
        raise Unavailable(f"{path} está en un disco del que no se puede ejecutar nada (noexec); defina AURA_BUILD_DIR "
                          "con otra carpeta") from problem
    sys.modules[compilation.MODULE] = module
    return module


def _ahead_of_time() -> Path | None:
    """The module that `pip install` built, unless csrc/ is here and it, or torch, is not what that was built from."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).with_name("_C" + suffix)
        if path.exists():
            built_from = _mark(path, compilation.HASH_MARK), _mark(path, compilation.TORCH_MARK)
            if not compilation.CSRC.is_dir() or built_from == (compilation.source_hash(), compilation.torch_version()):
                return path
    return None


def _remove_unused_builds(newest: Path) -> None:
    """Remove builds that nobody has loaded for long; loading one sets its time."""
    for built in newest.parent.parent.glob("[0-9a-f]" * 20 + "/" + newest.name):
        with suppress(OSError):  # another builder removes the same ones
            if time.time() - built.stat().st_mtime > UNUSED_BUILD_S:
                shutil.rmtree(built.parent, ignore_errors=True)


def _just_in_time() -> Path:
    if not compilation.CSRC.is_dir():
        raise Unavailable("se instaló sin compilar y sin sus fuentes (reinstale con un compilador de C++)")
    compiler = compilation.find_compiler()
    return built_once(build_key(compiler), compilation.OUTPUT,
                      lambda target: compilation.build(compiler, target, native=True))


def built_once(key: str, output: str, make: Callable[[Path], None]) -> Path:
    """The file `output` of the build of this key; make(its path) where there is none, one process at a time."""
    target = build_folder(key) / output
    try:
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            with _locked(target.parent / "lock") as (lock, waited):
                if not target.exists():
                    _make(target, make, lock, waited)
                    _remove_unused_builds(target)
    except OSError as problem:
        raise Unavailable(f"no se puede compilar en {str(target.parent)!r}: {explain(problem)}; defina AURA_BUILD_DIR "
                          "con otra carpeta") from problem
    with suppress(OSError):  # another user's, or read only
        os.utime(target)
    return target


def _make(target: Path, make: Callable[[Path], None], lock: TextIO, waited: bool) -> None:
    """make(target). Where it fails, the lock's file says why: those that waited would fail alike, one by one."""
    lock.seek(0)
    if waited and (reason := lock.read()):
        raise Unavailable(reason)
    if not lock.writable():
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target))
    lock.truncate(0)
    try:
        make(target)
    except Unavailable as problem:
        lock.write(str(problem))
        raise


_once = threading.Lock()
_result: tuple[ModuleType | None, str] | None = None


def require_buildable() -> None:
    """Raise Unavailable where there is neither an extension nor a way to build one; builds nothing."""
    if _disabled():
        raise Unavailable("AURA_EXTENSION=off")
    if _ahead_of_time() is None:
        compilation.find_compiler()
        compilation.find_ninja()


def _disabled() -> bool:
    return os.environ.get("AURA_EXTENSION", "").lower() == "off"


def _check_isa(module: ModuleType) -> None:
    try:
        module.cpu_isa()
    except ValueError as problem:
        raise UserError(
            f"AURA_CPU_ISA={os.environ.get('AURA_CPU_ISA')!r}: este procesador admite {', '.join(module.cpu_isas())}"
        ) from problem


def load() -> ModuleType | None:
    """The extension's module, built now if need be, or None (after one warning, the first time) where it cannot be.

    None is an answer, not a failure: every caller has a version of its own in Python. Where `has_ops` is true of the
    module, torch.ops.aura holds its operators. Raises UserError if AURA_CPU_ISA names what this processor cannot run.
    """
    global _result
    if _disabled():
        return None
    with _once:
        if _result is None:
            try:
                path = _ahead_of_time()
                how = "compilada al instalar" if path else "compilada en esta máquina"
                path = path or _just_in_time()
                module = _import_file(path)
                missing = "" if has_ops(module) else "; sin núcleos de CPU (pip install --no-build-isolation .)"
                _result = module, f"{how}: {path}{missing}"
            except (Unavailable, OSError, ImportError) as error:
                reason = " ".join(str(error).split())
                if isinstance(error, OSError) and error.filename:
                    reason = (f"{error.filename}: {explain(error)}; corrija sus permisos, o defina AURA_BUILD_DIR con "
                              "otra carpeta")
                _result = None, reason
                print(
                    f"Aviso: sin extensión de C++, se usa la versión en Python, más lenta. Motivo: {reason}",
                    file=sys.stderr,
                )
    module = _result[0]
    if has_ops(module):
        _check_isa(module)
    return module


def has_ops(module: ModuleType | None) -> bool:
    """Whether torch.ops.aura holds the operators: not without extension, nor in one that was built without torch."""
    return hasattr(module, "cpu_isa")


def status() -> str:
    """What is in use and why, in a few words of Spanish; builds nothing."""
    if _disabled():
        return "extensión de C++ desactivada (AURA_EXTENSION=off)"
    if _result is None:
        return "extensión de C++ aún sin cargar"
    module, note = _result
    return f"extensión de C++ {note}" if module else f"sin extensión de C++: {note}"


if __name__ == "__main__":
    from aura import cli, extension  # itself, under the name the others know it by

    def main() -> int:
        cli.Parser(prog="python -m aura.extension", description="Dice si en esta máquina se puede usar la extensión "
                   "de C++, cuál es y, si no, por qué; si hace falta, la compila.").parse_args()
        extension.load()
        print(extension.status())
        return 0

    cli.run(main)
