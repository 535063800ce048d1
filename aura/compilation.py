"""What the C++ extension is compiled from, by which tools, and one build of it.

It holds the token loader and, where torch is there to build against, the torch operators of csrc/ops*.cpp with their
CPU kernels; those for a GPU are in aura/cuda_extension.py. setup.py reads this file alone, in an environment that may
lack torch: only the standard library is imported here.

    CXX=COMPILER           compiler to use (default: the first of g++, c++, clang++)
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import itertools
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

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


class Unavailable(Exception):
    """Why there is no extension: one line in Spanish, kept by extension.status()."""


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


def torch_version() -> str:
    """Of the torch to build against; WITHOUT_TORCH where there is none."""
    torch = find_torch()
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


def run_here(isas: dict[str, list[str]]) -> dict[str, list[str]]:
    """Those of `isas` that this processor has, all where the system does not say: of a build that stays here, the
    others take 20 s of a core each, and would never run."""
    has = set(processor_flags().partition(":")[2].split())
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
    marks = [f'-DAURA_SOURCE_HASH="{source_hash()}"', f'-DAURA_TORCH_VERSION="{torch_version()}"']
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


def find_ninja() -> str:
    """The path of ninja. Raises Unavailable."""
    path = shutil.which("ninja") or shutil.which("ninja", path=os.path.dirname(sys.executable))
    if path is None:
        raise Unavailable("no se encuentra ninja (pip install ninja)")
    return path


def processor_flags() -> str:
    """What the system says that this processor can do, one line; what it is called where it says no more."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    lines = cpuinfo.read_text(errors="replace").splitlines()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), "")


def quoted(words: list[str]) -> str:
    """A command of a ninja file."""
    return shlex.join(words).replace("$", "$$")


def escaped(path: Path) -> str:
    """A path in a ninja file."""
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def ninja_file(compiler: list[str], native: bool, isas: dict[str, list[str]]) -> str:
    """The ninja file that builds OUTPUT; the arguments as units() takes them."""
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
    run_build(ninja_file(compiler, native, run_here(isas) if native else isas), OUTPUT, target)


def run_build(rules: str, output: str, target: Path) -> None:
    """Build the file `output` of a ninja file beside `target`, flush, rename: a file of the final name is whole."""
    ninja = find_ninja()
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

