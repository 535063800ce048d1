"""pip install .   (builds the C++ extension if there is a compiler, and installs without it if there is none)

pip builds where there is no torch, so the extension holds the token loader alone. With the CPU kernels:

    pip install --no-build-isolation .
"""

import importlib.util
import re
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

HERE = Path(__file__).resolve().parent


def compilation_room():
    """aura/compilation.py by its path: importing the package would ask for torch, which a build does not need."""
    spec = importlib.util.spec_from_file_location("aura_compilation", HERE / "aura" / "compilation.py")
    room = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(room)
    return room


ROOM = compilation_room()


class BuildWithNinja(build_ext):
    """The build of aura/compilation.py, so that files and flags are written once."""

    def build_extension(self, ext):
        """Build where setuptools expects it; raises CompileError where that cannot be done."""
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)  # should this build fail, an older one must not be installed in its place
        try:
            # Portable instructions only: what is installed may be used on another node of the cluster.
            ROOM.build(ROOM.find_compiler(), target, native=False)
        except ROOM.Unavailable as reason:
            raise CompileError(str(reason)) from reason


def extensions():
    """What to build: nothing on Windows."""
    if sys.platform == "win32":
        return []
    files = sorted(str(path.relative_to(HERE)) for path in ROOM.CSRC.rglob("*") if path.is_file())
    return [Extension(ROOM.MODULE, sources=files, optional=True)]


setup(
    name="aura-entrenamiento",
    version=re.search(r'__version__ = "([^"]+)"', (HERE / "aura" / "__init__.py").read_text())[1],
    description="Entrenamiento de modelos de lenguaje en español con PyTorch",
    packages=["aura", "aura.fused", "aura.models", "aura.muestra"],
    package_data={"aura": ["squad_sample.json", "speeds-*.json"]},
    python_requires=">=3.10",
    install_requires=["torch>=2.10", "numpy", "sentencepiece>=0.2.3", "safetensors", "protobuf>=7.36.1", "tqdm",
                      "tensorboard", "matplotlib", "psutil", "nvidia-ml-py"],
    extras_require={"hub": ["datasets", "huggingface_hub", "tokenizers"]},
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildWithNinja},
)
