"""The CUDA kernels: a library of their own, which nvcc builds for the card that is here when they are first asked for.

    CUDA_HOME=DIR           the CUDA toolkit to build with (default: see find_nvcc)
    AURA_CUDA_ISA=sm_80     attention with the instructions that all cards have, where the card has Hopper's too

The operators are the extension's: it is handed the library's table of kernels, and without it knows the CPU alone. So
what fails here takes nothing away from a run on the CPU.
"""

import ctypes
import itertools
import os
import re
import shutil
from pathlib import Path

import torch

from aura import compilation, extension, speeds
from aura.compilation import CSRC, Unavailable, escaped, quoted
from aura.errors import UserError

LEAST_CAPABILITY = (8, 0)  # Ampere: mma.sync of bfloat16, cp.async
OUTPUT = "cuda.so"
ISA, LEAST_ISA = "AURA_CUDA_ISA", "sm_80"
USUAL_NVCC = Path("/usr/local/cuda/bin/nvcc")
LAUNCHERS = ("ccache", "sccache", "distcc", "icecc")  # before a compiler in $CXX; nvcc calls the compiler itself
# What nvcc consists of in pip, from CUDA 13 on. Not named, the last two come in a newer version, which nvcc refuses.
PIP_PACKAGES, LEAST_PIP_MAJOR = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt"), 13

_loaded = None  # the library: it must not be unloaded


def load():
    """Build and load the kernels for the current card, if need be. Raises Unavailable, with the reason, and UserError
    if AURA_CUDA_ISA has an unknown value."""
    global _loaded
    asked = os.environ.get(ISA) or LEAST_ISA
    if asked != LEAST_ISA:
        raise UserError(f"{ISA}={asked!r}: se espera {LEAST_ISA}; sin esa variable se usa lo mejor de cada tarjeta")
    if _loaded:
        return
    rules, key = _plan()
    library = ctypes.CDLL(str(extension.built_once(key, OUTPUT, lambda at: compilation.run_build(rules, OUTPUT, at))))
    hand_over(library)
    _loaded = library


def speeds_file():
    """The file that keeps which of these kernels are faster than torch on the current card. It lies beside them, so
    that nobody believes what was measured with others. Raises Unavailable."""
    return extension.build_folder(_plan()[1]) / _speeds_name()


def known_speeds():
    """The speeds.Speeds measured on the current card or, where there are none, those that this package brings for cards
    of its name; None where there are neither. Raises Unavailable, and UserError for a damaged file."""
    own, shipped = speeds_file(), Path(__file__).with_name(_speeds_name())
    return speeds.read(own) or speeds.read(shipped, f"una {torch.cuda.get_device_name()}")


def _speeds_name():
    card = re.sub(r"\W+", "-", torch.cuda.get_device_name())
    return f"speeds-{card}.json"


def _plan():
    """(ninja file, key) of the build for the current card. Raises Unavailable."""
    module = extension.load()
    if not extension.has_ops(module):
        raise Unavailable(extension.status())
    if not CSRC.is_dir():
        raise Unavailable("faltan las fuentes de los núcleos (csrc/): use una copia del repositorio")
    if not torch.cuda.is_available() or torch.version.cuda is None:  # AMD's cards answer to torch.cuda too
        raise Unavailable("no hay ninguna GPU de NVIDIA que torch pueda usar")
    capability = torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        raise Unavailable(f"{torch.cuda.get_device_name()} es de capacidad {capability[0]}.{capability[1]}, y los "
                          "núcleos de CUDA piden 8.0 o más")
    nvcc, compiler = find_nvcc(), compilation.find_compiler()
    rules = ninja_file(nvcc, compiler, capability)
    key = extension.digest([rules, compilation.source_hash((".cu", ".cuh", ".h", ".cpp")), torch.__version__,
                            version_of(nvcc), compilation.output_of([*compiler, "--version"])])
    return rules, key


def hand_over(library):
    """Give the table of kernels of a library to the operators."""
    library.aura_cuda_kernels.restype = ctypes.c_void_p
    extension.load().load_gpu_kernels(library.aura_cuda_kernels())


def find_nvcc():
    """The nvcc of a CUDA toolkit of the version torch was built with, as far as the first number goes: that of
    CUDA_HOME, or else the first of PATH, of the usual folder and of pip's packages beside torch.

    Nothing else of the toolkit is looked for: what stands in PATH is often a script that calls the real one, and conda
    and pip keep headers elsewhere than NVIDIA's installer does. nvcc knows its own.
    """
    wanted, named = torch.version.cuda, os.environ.get("CUDA_HOME")
    major = wanted.partition(".")[0]
    if named:
        places = [Path(named, "bin", "nvcc")]
    else:
        in_path = shutil.which("nvcc")
        packages = compilation.find_torch().folder.parent / "nvidia" / f"cu{major}" / "bin" / "nvcc"
        places = [*([Path(in_path)] if in_path else []), USUAL_NVCC, packages]
    found = {nvcc: re.search(r"release (\d+)\.(\d+)", version_of(nvcc)) for nvcc in places}
    fitting = [nvcc for nvcc, version in found.items() if version and version[1] == major]
    if fitting:
        return fitting[0]
    others = [f"{nvcc} es de CUDA {version[1]}.{version[2]}" for nvcc, version in found.items() if version]
    from_pip = "" if int(major) < LEAST_PIP_MAJOR else (
        ", o aquí mismo: pip install " + " ".join(f"{name}~={wanted}.0" for name in PIP_PACKAGES))
    raise Unavailable(f"no hay un nvcc de CUDA {wanted}, la versión de torch ("
                      f"{'; '.join(others) or 'no se encuentra ' + str(places[0])}): instale ese CUDA toolkit y defina "
                      f"CUDA_HOME{from_pip}")


def version_of(nvcc):
    """What `nvcc --version` prints, "" where there is none."""
    return compilation.output_of([str(nvcc), "--version"])


def architecture(capability):
    """The words that make nvcc build for a compute capability (major, minor) alone."""
    name = "{}{}".format(*capability) + ("a" if capability == (9, 0) else "")
    return ["-gencode", f"arch=compute_{name},code=sm_{name}"]


def ninja_file(nvcc, compiler, capability):
    """The ninja file that builds OUTPUT. The source that includes torch goes through nvcc too, which hands C++ to the
    compiler and adds its own headers. The CUDA runtime is the one that torch brings, by way of libc10_cuda."""
    torch_here = compilation.find_torch()
    headers, libraries = torch_here.folder / "include", torch_here.folder / "lib"
    host, *flags = list(itertools.dropwhile(lambda word: Path(word).name in LAUNCHERS, compiler)) or compiler
    command = [str(nvcc), "-ccbin", host, *itertools.chain.from_iterable(("-Xcompiler", flag) for flag in flags)]
    every = [*command, "-O3", f"-I{CSRC}", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
    kernel = [*every, "-std=c++17", *architecture(capability)]
    plain = [*every, compilation.cxx_standard(torch_here), "-isystem", str(headers)]
    link = ["-shared", "-cudart", "none", f"-L{libraries}", f"-Xlinker=-rpath,{libraries}", "-lc10_cuda", "-lc10"]
    sources = sorted((CSRC / "cuda").glob("*.cu"))
    return "\n".join([
        "rule kernel", f"  command = {quoted(kernel)} -c $in -o $out",
        "rule plain", f"  command = {quoted(plain)} -c $in -o $out",
        "rule link", f"  command = {quoted(command)} $in {quoted(link)} -o $out",
        *(f"build {source.stem}.o: kernel {escaped(source)}" for source in sources),
        f"build library.o: plain {escaped(CSRC / 'cuda' / 'library.cpp')}",
        f"build {OUTPUT}: link {' '.join(source.stem + '.o' for source in sources)} library.o",
    ]) + "\n"
