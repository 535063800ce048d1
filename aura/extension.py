"""The one C++ extension: what it is built from, how it is built just in time, and what is in use and why.

    AURA_EXTENSION=off     do without it
    AURA_BUILD_DIR=DIR     where builds are kept (default: ~/.cache/aura)
    CXX=COMPILER           compiler to use (default: the first of c++, g++, clang++)

setup.py reads this file alone, in an environment without torch: only the standard library is imported here.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
SOURCES = ("csrc/bindings.cpp", "csrc/token_loader.cpp")
MODULE = "aura._C"
HASH_MARK = b"aura-source-hash:"

BUILD_LIMIT_S = 900
WAIT_LIMIT_S = 1200  # a little longer than a build may take, so that who waits sees its end
WAIT_NOTICE_S = 5


class Unavailable(Exception):
    """Why there is no extension: one line in Spanish, kept by `status()`."""


def compile_flags(native: bool) -> list[str]:
    """Compiler flags; `native` adds this processor's instructions, for a build that stays on this machine."""
    if os.name == "nt":
        return ["/std:c++17", "/O2"]
    flags = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra"]
    if native:
        flags.append("-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native")
    return flags


def link_flags() -> list[str]:
    return ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared", "-pthread"]


def include_dirs() -> list[str]:
    """csrc/, pybind11's headers (its own package, else the copy inside torch) and Python's."""
    found = importlib.util.find_spec("pybind11")
    inside = found or importlib.util.find_spec("torch")
    if inside is None or inside.origin is None:
        raise Unavailable("faltan las cabeceras de pybind11 (pip install pybind11)")
    return [str(CSRC), str(Path(inside.origin).parent / "include"), sysconfig.get_path("include")]


def source_hash() -> str:
    """sha256 over the names and contents of everything in csrc/ that a compiler may read."""
    digest = hashlib.sha256()
    for path in sorted(p for p in CSRC.rglob("*") if p.suffix in (".cpp", ".h", ".cu", ".cuh")):
        digest.update(path.relative_to(CSRC).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _output(command: list[str]) -> str:
    """What a version query prints, or "" when the command is absent or fails: then it is simply another key."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _compiler() -> list[str]:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    for name in names:
        command = shlex.split(name)
        path = shutil.which(command[0])
        if path:
            return [path, *command[1:]]
    raise Unavailable(f"no se encuentra un compilador de C++ ({', '.join(names)}); instale g++ o defina CXX")


def _ninja() -> str:
    path = shutil.which("ninja") or shutil.which("ninja", path=os.path.dirname(sys.executable))
    if path is None:
        raise Unavailable("no se encuentra ninja (pip install ninja)")
    return path


def _instruction_sets() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    lines = cpuinfo.read_text(errors="replace").splitlines()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), "")


def _torch_version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "none"


def build_key(compiler: list[str]) -> str:
    """Name of the folder of a build: another source, flag, tool or processor is another folder."""
    nvcc = shutil.which("nvcc")
    parts = {
        "sources": source_hash(),
        "flags": [compile_flags(native=True), link_flags(), include_dirs()],
        "torch": _torch_version(),
        "python": [sys.version, sysconfig.get_config_var("SOABI")],
        "compiler": [compiler, _output([*compiler, "--version"])],
        "cuda": _output([nvcc, "--version"]) if nvcc else "none",
        "machine": [platform.machine(), _instruction_sets()],
    }
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]


def _build_root() -> Path:
    return Path(os.environ.get("AURA_BUILD_DIR") or Path.home() / ".cache" / "aura")


@contextmanager
def _locked(path: Path):
    """Hold an exclusive lock that the kernel frees when its holder dies, whatever killed it."""
    try:
        import fcntl
    except ImportError as error:
        raise Unavailable("en este sistema no se construye la extensión (use Linux o WSL2)") from error
    started, told = time.monotonic(), False
    with open(path, "a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = time.monotonic() - started
            if waited > WAIT_LIMIT_S:
                raise Unavailable(f"otro proceso lleva más de {WAIT_LIMIT_S} s construyendo la extensión ({path})")
            if waited > WAIT_NOTICE_S and not told:
                print(f"Otro proceso construye la extensión C++: se le espera {WAIT_LIMIT_S} s.", file=sys.stderr)
                told = True
            time.sleep(0.1)
        yield


def _ninja_file(compiler: list[str], target: str) -> str:
    flags = [*compile_flags(native=True), *(f"-I{path}" for path in include_dirs())]
    flags.append(f'-DAURA_SOURCE_HASH="{source_hash()}"')

    def quoted(words: list[str]) -> str:
        return shlex.join(words).replace("$", "$$")

    def escaped(path: str) -> str:
        return path.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")

    objects = [f"{index}-{Path(source).stem}.o" for index, source in enumerate(SOURCES)]
    lines = [
        "rule compile",
        f"  command = {quoted([*compiler, *flags])} -c $in -o $out",
        "rule link",
        f"  command = {quoted([*compiler, *link_flags()])} $in -o $out",
        *(f"build {o}: compile {escaped(str(ROOT / s))}" for o, s in zip(objects, SOURCES, strict=True)),
        f"build {target}: link {' '.join(objects)}",
    ]
    return "\n".join(lines) + "\n"


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if any("Python.h" in line for line in lines):
        return "faltan las cabeceras de Python (en Debian y Ubuntu: apt install python3-dev)"
    told = (line for line in lines if re.search(r"(^|\s)error: |undefined reference", line))
    return next(told, lines[-1] if lines else "sin mensaje")


def _run_ninja(ninja: str, folder: Path) -> None:
    environment = {**os.environ, "LC_ALL": "C"}  # _first_error looks for English words
    with subprocess.Popen(
        [ninja], cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            output, _ = process.communicate(timeout=BUILD_LIMIT_S)
        except BaseException as error:
            process.terminate()  # ninja ends its compilers before it leaves
            if isinstance(error, subprocess.TimeoutExpired):
                raise Unavailable(f"la compilación no terminó en {BUILD_LIMIT_S} s") from error
            raise
    if process.returncode != 0:
        raise Unavailable(f"error al compilar: {_first_error(output)}")


def _build(compiler: list[str], target: Path) -> None:
    """Build beside `target`, flush, rename: what bears the final name is whole."""
    ninja = _ninja()
    for leftover in target.parent.glob("tmp-*"):
        # A killed builder's compiler may still be writing there: what cannot go now goes with the next build.
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="tmp-", dir=target.parent, ignore_cleanup_errors=True) as folder:
        built = Path(folder, target.name)
        Path(folder, "build.ninja").write_text(_ninja_file(compiler, target.name))
        _run_ninja(ninja, Path(folder))
        with open(built, "rb+") as file:
            os.fsync(file.fileno())
        os.rename(built, target)


def _import_file(path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_file_location(MODULE, str(path), loader=loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[MODULE] = module
    return module


def _ahead_of_time() -> Path | None:
    """The module that `pip install` built, unless csrc/ has changed since."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).with_name("_C" + suffix)
        if path.exists():
            current = not CSRC.is_dir() or HASH_MARK + source_hash().encode() in path.read_bytes()
            return path if current else None
    return None


def _just_in_time() -> Path:
    if not CSRC.is_dir():
        raise Unavailable("se instaló sin compilar y sin sus fuentes (reinstala con un compilador de C++)")
    compiler = _compiler()
    folder = _build_root() / build_key(compiler)
    target = folder / "_C.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock"):
            if not target.exists():
                _build(compiler, target)
    return target


_once = threading.Lock()
_result: tuple[ModuleType | None, str] | None = None


def _disabled() -> bool:
    return os.environ.get("AURA_EXTENSION", "").lower() == "off"


def load() -> ModuleType | None:
    """The extension's module, built now if need be, or None (after one warning, the first time) where it cannot be.

    None is an answer, not a failure: every caller has a version of its own in Python.
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
                _result = _import_file(path), f"{how}: {path}"
            except (Unavailable, OSError, ImportError) as error:
                reason = " ".join(str(error).split())
                _result = None, reason
                print(
                    f"Aviso: sin extensión C++, se usa la versión en Python, más lenta. Motivo: {reason}",
                    file=sys.stderr,
                )
        return _result[0]


def status() -> str:
    """What is in use and why, in a few words of Spanish; builds nothing."""
    if _disabled():
        return "extensión C++ desactivada (AURA_EXTENSION=off)"
    if _result is None:
        return "extensión C++ aún sin cargar"
    module, note = _result
    return f"extensión C++ {note}" if module else f"sin extensión C++: {note}"


if __name__ == "__main__":
    load()
    print(status())
