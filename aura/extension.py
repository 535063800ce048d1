"""The one C++ extension: what it is built from, how it is built, and what is in use and why.

    AURA_EXTENSION=off     do without it
    AURA_CPU_ISA=NAME      instruction set of the CPU kernels: portable, avx2, avx512, avx512bf16 or amx (default: the
                           best there is)
    AURA_BUILD_DIR=DIR     where builds are kept (default: ~/.cache/aura)
    CXX=COMPILER           compiler to use (default: the first of g++, c++, clang++)

It holds the token loader and, where torch is there to build against, the torch operators of csrc/ops*.cpp with their
CPU kernels; those for a GPU are in aura/cuda_extension.py. setup.py reads this file alone, in an environment that may
lack torch: only the standard library is imported here.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, TextIO

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
LOADER_SOURCES = ("csrc/bindings.cpp", "csrc/token_loader.cpp")
OPS_SOURCE = "csrc/operators.cpp"
KERNELS_SOURCE = "csrc/cpu/kernels.cpp"
MODULE = "aura._C"
HASH_MARK = b"aura-source-hash:"
TORCH_MARK = b"aura-torch-version:"
WITHOUT_TORCH = "none"
OUTPUT = "_C.so"

KERNEL_FLAGS = ["-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-ffp-contract=fast"]
# Flags that follow -march=x86-64, which overrides a -march in CXX: a set must have its own instructions and no more.
AVX512 = [
    *("-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
    "-mprefer-vector-width=512",
]
X86_ISAS = {
    "portable": [],
    "avx2": ["-mavx2", "-mfma"],
    "avx512": AVX512,
    "avx512bf16": [*AVX512, "-mavx512bf16"],
    "amx": [*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
}
# What Linux calls the instructions of a set, beyond those of the one before; csrc/ops.cpp asks the processor again.
X86_FEATURES = {
    "portable": set(),
    "avx2": {"avx2", "fma"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx512bf16": {"avx512_bf16"},
    "amx": {"amx_tile", "amx_bf16"},
}
# An instruction that shows whether a compiler, or the assembler it calls, is too old for a set.
NEWEST = {"avx512bf16": "vdpbf16ps %zmm0, %zmm1, %zmm2", "amx": "tdpbf16ps %tmm0, %tmm1, %tmm2"}

BUILD_LIMIT_S = 900
WAIT_LIMIT_S = 1200  # a little longer than a build may take, so that a process that waits sees its end
WAIT_NOTICE_S = 5
UNUSED_BUILD_S = 30 * 24 * 3600


class Unavailable(Exception):
    """Why there is no extension: one line in Spanish, kept by `status()`."""


class Torch(NamedTuple):
    """The torch to build against; only its files are looked at, as importing it costs seconds."""

    folder: Path
    version: str


class Unit(NamedTuple):
    """One file to compile, into an object of this name, with these flags."""

    source: str
    object: str
    flags: list[str]


def find_torch() -> Torch | None:
    """The torch that is installed with its headers, without importing it; None where there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None or not Path(spec.origin).with_name("include").is_dir():
        return None
    try:
        return Torch(Path(spec.origin).parent, importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        return None


def _version(torch: Torch | None) -> str:
    return torch.version if torch else WITHOUT_TORCH


def cxx_standard(torch: Torch | None) -> str:
    """The flag for the C++ that torch's headers ask for: 17 in 2.10 to 2.13, 20 from 2.14 on."""
    found = None
    with suppress(OSError):
        demand = (torch.folder / "include/ATen/ATen.h").read_text(errors="replace") if torch else ""
        found = re.search(r"C\+\+(\d\d) or later", demand)
    return f"-std=c++{found[1] if found else 17}"


def _is_clang(compiler: list[str]) -> bool:
    return "clang" in output_of([*compiler, "--version"])


def _include_flags(torch: Torch | None) -> list[str]:
    """csrc/, pybind11's headers (its own package, else the copy inside torch), Python's, torch's."""
    found = importlib.util.find_spec("pybind11")
    folders = [Path(found.origin).parent / "include"] if found and found.origin else []
    if torch:
        folders += [torch.folder / "include", torch.folder / "include/torch/csrc/api/include"]
    if not folders:
        raise Unavailable("faltan las cabeceras de pybind11 (pip install pybind11)")
    folders.append(Path(sysconfig.get_path("include")))
    return [f"-I{CSRC}", *(word for folder in folders for word in ("-isystem", str(folder)))]


def instruction_sets() -> dict[str, list[str]]:
    """The sets that there are kernels for on this kind of processor, the narrowest first, with their flags."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return {"portable": []}
    made = {isa: ["-march=x86-64", *flags] for isa, flags in X86_ISAS.items()}
    if sys.platform != "linux":  # the system has to be asked for the tiles, and only Linux is
        del made["amx"]
    return made


def _run_here(isas: dict[str, list[str]]) -> dict[str, list[str]]:
    """Those of `isas` that this processor has, all where the system does not say: of a build that stays here, the
    others take 20 s of a core each, and would never run."""
    has = set(_processor_flags().partition(":")[2].split())
    if not has or platform.machine().lower() not in ("x86_64", "amd64"):
        return isas
    return dict(itertools.takewhile(lambda isa: X86_FEATURES[isa[0]] <= has, isas.items()))


def _made_by(compiler: list[str], folder: Path) -> dict[str, list[str]]:
    """instruction_sets() without those that the compiler, or the assembler it calls, is too old for: AVX-512 BF16 asks
    for GCC 10 or clang 9 and binutils 2.33, AMX for GCC 11 or newer ones of the other two. `folder`: where to try."""
    found = instruction_sets()
    with tempfile.TemporaryDirectory(prefix="tmp-", dir=folder, ignore_cleanup_errors=True) as trial:
        for isa, instruction in NEWEST.items():
            if isa not in found:
                continue
            source, made = Path(trial, f"{isa}.cpp"), Path(trial, f"{isa}.o")
            source.write_text(f'void newest() {{ asm("{instruction}"); }}\n')
            output_of([*compiler, *found[isa], "-c", str(source), "-o", str(made)])
            if not made.exists():
                del found[isa]
    return found


def units(compiler: list[str], native: bool, isas: dict[str, list[str]]) -> list[Unit]:
    """Every file to compile, in the order they are linked; `native` is for a module that stays on this machine, `isas`
    the flags of each instruction set.

    The units of the instruction sets come last and the widest at the end: of an inline function that several units
    hold, the linker keeps the first copy, which any processor must be able to run.
    """
    torch = find_torch()
    every = [cxx_standard(torch), "-O3", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra"]
    every += _include_flags(torch)
    arm = platform.machine() in ("aarch64", "arm64")
    here = ["-mcpu=native" if arm else "-march=native"] if native else []
    marks = [f'-DAURA_SOURCE_HASH="{source_hash()}"', f'-DAURA_TORCH_VERSION="{_version(torch)}"']
    if torch is None:
        marks.append("-DAURA_WITHOUT_TORCH")
    found = [Unit(source, f"{Path(source).stem}.o", [*every, *here, *marks]) for source in LOADER_SOURCES]
    if torch is None:
        return found

    threads = ["-D_GLIBCXX_USE_CXX11_ABI=1"]
    # at::parallel_for is a template: its threads are made by the code compiled here, with torch's own run-time library.
    # On Linux clang asks for another one, whose threads know nothing of torch's; without it, one thread.
    if not _is_clang(compiler):
        threads.append("-fopenmp")
    elif sys.platform == "darwin":  # Apple's has no such option, and torch brings omp.h and the library
        threads += ["-Xclang", "-fopenmp"]
    chosen_from = [f"-DAURA_HAS_{isa.upper()}" for isa in isas]
    found.append(Unit(OPS_SOURCE, "operators.o", [*every, *here, *threads, *chosen_from]))
    for isa, flags in isas.items():
        found.append(Unit(KERNELS_SOURCE, f"kernels-{isa}.o", [*every, *KERNEL_FLAGS, *flags]))
    return found


def link_flags() -> list[str]:
    """No -fopenmp: GOMP_parallel is to be found in the library that torch brings, not in the system's."""
    flags = ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared", "-pthread"]
    torch = find_torch()
    if torch:
        lib = torch.folder / "lib"
        flags += [f"-L{lib}", f"-Wl,-rpath,{lib}", "-ltorch_cpu", "-lc10"]
    return flags


def source_hash(suffixes: tuple[str, ...] = (".cpp", ".h", ".inl")) -> str:
    """sha256 over the names and contents of everything in csrc/ that a C++ compiler may read, or nvcc."""
    digest = hashlib.sha256()
    for path in sorted(p for p in CSRC.rglob("*") if p.suffix in suffixes):
        digest.update(path.relative_to(CSRC).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def output_of(command: list[str]) -> str:
    """What a query of a tool prints, or "" when the command is absent or hangs: that is an answer too."""
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def find_compiler() -> list[str]:
    """The command of a C++ compiler: $CXX, else the first of the usual ones. Raises Unavailable."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]
    for name in names:
        try:
            command = shlex.split(name)
            path = shutil.which(command[0])
        except (ValueError, IndexError):
            raise Unavailable(f"CXX={name!r} no es la orden de un compilador; corríjala o quítela") from None
        if path:
            return [os.path.abspath(path), *command[1:]]  # ninja runs it in another folder
    raise Unavailable(f"no se encuentra un compilador de C++ ({', '.join(names)}); instale g++ o defina CXX")


def _ninja() -> str:
    path = shutil.which("ninja") or shutil.which("ninja", path=os.path.dirname(sys.executable))
    if path is None:
        raise Unavailable("no se encuentra ninja (pip install ninja)")
    return path


def _processor_flags() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    lines = cpuinfo.read_text(errors="replace").splitlines()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), "")


def build_key(compiler: list[str]) -> str:
    """Name of the folder of a build: another source, flag, tool or processor gets another folder."""
    nvcc = shutil.which("nvcc")
    parts = {
        "sources, flags and torch": _ninja_file(compiler, True, _run_here(instruction_sets())),
        "python": [sys.version, sysconfig.get_config_var("SOABI")],
        "compiler": output_of([*compiler, "--version"]),
        "cuda": output_of([nvcc, "--version"]) if nvcc else "none",
        "machine": [platform.machine(), _processor_flags()],
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


def quoted(words: list[str]) -> str:
    """A command of a ninja file."""
    return shlex.join(words).replace("$", "$$")


def escaped(path: Path) -> str:
    """A path in a ninja file."""
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _ninja_file(compiler: list[str], native: bool, isas: dict[str, list[str]]) -> str:
    lines = [
        "rule compile",
        f"  command = {quoted(compiler)} $flags -c $in -o $out",
        "rule link",
        # Libraries come after the objects that need them, or --as-needed, the default of some systems, drops them.
        f"  command = {quoted(compiler)} $in {quoted(link_flags())} -o $out",
    ]
    compiled = units(compiler, native, isas)
    longest_first = compiled[::-1]
    longest_first.sort(key=lambda unit: unit.source != OPS_SOURCE)  # which reads torch's headers
    for unit in longest_first:  # begun in this order
        lines += [
            f"build {unit.object}: compile {escaped(ROOT / unit.source)}",
            f"  flags = {quoted(unit.flags)}",
        ]
    lines.append(f"build {OUTPUT}: link {' '.join(unit.object for unit in compiled)}")
    return "\n".join(lines) + "\n"


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if any("Python.h" in line for line in lines):
        return "faltan las cabeceras de Python (en Debian y Ubuntu: apt install python3-dev)"
    if newest := re.search(r"gcc versions later than (\d+) are not supported", output):
        older = f"g++-{newest[1]}"
        return (f"este nvcc no admite un g++ posterior al {newest[1]}: instálelo (en Debian y Ubuntu: apt install "
                f"{older}) y defina CXX={older}")
    newer = "instale un CUDA toolkit más nuevo, con el mismo primer número que el de torch, y defina CUDA_HOME"
    if "Unsupported gpu architecture" in output:
        return f"este nvcc no conoce la tarjeta, que es posterior: {newer}"
    if re.search("/mathcalls.*exception specification is incompatible", output):
        return f"este CUDA toolkit es anterior a la biblioteca de C del sistema: {newer}"
    told = next((line for line in lines if re.search(r"(^|\s)error: |undefined reference|cannot find", line)), None)
    # ninja repeats the command that failed; what it said, if anything, comes after.
    said = re.search(r"^FAILED: .*\n.*\n(?!ninja: |FAILED: |\[)\s*(\S.*)", output, re.MULTILINE)
    return told or (said[1].rstrip() if said else "el compilador no dice por qué; ¿es CXX uno de C++?")


def _run_ninja(ninja: str, folder: Path) -> None:
    environment = {**os.environ, "LC_ALL": "C"}  # _first_error looks for English words
    try:
        from aura.signals import die_with_parent

        with_us = die_with_parent(signal.SIGTERM, os.getpid())
    except ImportError:  # setup.py reads this file alone
        with_us = None
    with subprocess.Popen([ninja], cwd=folder, env=environment, text=True, errors="replace", stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, preexec_fn=with_us) as process:
        try:
            output, _ = process.communicate(timeout=BUILD_LIMIT_S)
        except BaseException as error:
            process.terminate()  # ninja ends its compilers before it leaves
            if isinstance(error, subprocess.TimeoutExpired):
                raise Unavailable(f"la compilación no terminó en {BUILD_LIMIT_S} s") from error
            raise
    if process.returncode != 0:
        if re.search("No space left on device|Disk quota exceeded", output):
            raise Unavailable(f"no se puede compilar en {str(folder.parent)!r}: no queda espacio ahí o en la carpeta "
                              "temporal; haga sitio, o defina AURA_BUILD_DIR y TMPDIR con otras")
        raise Unavailable(f"error al compilar: {_first_error(output)}")


def build(compiler: list[str], target: Path, native: bool) -> None:
    """Build the extension at `target`; `native`: for this machine alone."""
    isas = _made_by(compiler, target.parent)
    run_build(_ninja_file(compiler, native, _run_here(isas) if native else isas), OUTPUT, target)


def run_build(rules: str, output: str, target: Path) -> None:
    """Build the file `output` of a ninja file beside `target`, flush, rename: a file of the final name is whole."""
    ninja = _ninja()
    for leftover in target.parent.glob("tmp-*"):
        # A killed builder's compiler may still be writing there: what cannot go now goes with the next build.
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="tmp-", dir=target.parent, ignore_cleanup_errors=True) as folder:
        print("Se compila la extensión de C++, solo esta vez: puede tardar unos minutos.", file=sys.stderr, flush=True)
        built = Path(folder, output)
        Path(folder, "build.ninja").write_bytes(os.fsencode(rules))  # folders as the system names them
        _run_ninja(ninja, Path(folder))
        if not built.exists():
            raise Unavailable("el compilador no ha dejado nada; ¿es CXX uno de C++?")
        with open(built, "rb+") as file:
            os.fsync(file.fileno())
        os.rename(built, target)


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
    if MODULE in sys.modules:  # a second import would register its operators twice, which ends the process
        return sys.modules[MODULE]
    wanted, present = _mark(path, TORCH_MARK), _version(find_torch())
    if not wanted or _cut_short(path):
        raise Unavailable(f"{path} está dañado: bórrelo y se compilará otra vez")
    if wanted != WITHOUT_TORCH:
        if wanted != present:
            raise Unavailable(
                f"{path} se compiló para torch {wanted}, y el de aquí es {present} (pip install --no-build-isolation .)"
            )
        importlib.import_module("torch")  # brings the libraries that the module is linked with
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_file_location(MODULE, str(path), loader=loader)
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as problem:
        if "failed to map segment" not in str(problem):
            raise
        raise Unavailable(f"{path} está en un disco del que no se puede ejecutar nada (noexec); defina AURA_BUILD_DIR "
                          "con otra carpeta") from problem
    sys.modules[MODULE] = module
    return module


def _ahead_of_time() -> Path | None:
    """The module that `pip install` built, unless csrc/ is here and it, or torch, is not what that was built from."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).with_name("_C" + suffix)
        if path.exists():
            built_from = _mark(path, HASH_MARK), _mark(path, TORCH_MARK)
            if not CSRC.is_dir() or built_from == (source_hash(), _version(find_torch())):
                return path
    return None


def _remove_unused_builds(newest: Path) -> None:
    """Remove builds that nobody has loaded for long; loading one sets its time."""
    for built in newest.parent.parent.glob("[0-9a-f]" * 20 + "/" + newest.name):
        with suppress(OSError):  # another builder removes the same ones
            if time.time() - built.stat().st_mtime > UNUSED_BUILD_S:
                shutil.rmtree(built.parent, ignore_errors=True)


def _just_in_time() -> Path:
    if not CSRC.is_dir():
        raise Unavailable("se instaló sin compilar y sin sus fuentes (reinstale con un compilador de C++)")
    compiler = find_compiler()
    return built_once(build_key(compiler), OUTPUT, lambda target: build(compiler, target, native=True))


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
        from aura.files import explain  # setup.py reads this file alone

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
        find_compiler()
        _ninja()


def _disabled() -> bool:
    return os.environ.get("AURA_EXTENSION", "").lower() == "off"


def _check_isa(module: ModuleType) -> None:
    try:
        module.cpu_isa()
    except ValueError as problem:
        from aura.errors import UserError

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
                    from aura.files import explain

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
