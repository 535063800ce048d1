"""pip install .   (builds the C++ extension if there is a compiler, and installs without it if there is none)"""

import importlib.util
import re
import sys
from pathlib import Path

from setuptools import Extension, setup

HERE = Path(__file__).resolve().parent


def extension_room():
    """aura/extension.py by its path: importing the package would ask for torch, which a build does not need."""
    spec = importlib.util.spec_from_file_location("aura_extension", HERE / "aura" / "extension.py")
    room = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(room)
    return room


def extensions():
    if sys.platform == "win32":
        return []
    room = extension_room()
    return [
        Extension(
            room.MODULE,
            sources=list(room.SOURCES),
            depends=[str(path.relative_to(HERE)) for path in sorted(room.CSRC.rglob("*.h"))],
            include_dirs=room.include_dirs(),
            # Portable instructions only: what is installed may be used on another node of the cluster.
            extra_compile_args=room.compile_flags(native=False),
            define_macros=[("AURA_SOURCE_HASH", f'"{room.source_hash()}"')],
            language="c++",
            optional=True,
        )
    ]


setup(
    name="aura-entrenamiento",
    version=re.search(r'__version__ = "([^"]+)"', (HERE / "aura" / "__init__.py").read_text())[1],
    description="Entrenamiento de modelos de lenguaje en español con PyTorch",
    packages=["aura", "aura.models", "aura.muestra"],
    python_requires=">=3.10",
    install_requires=["torch>=2.10", "numpy", "sentencepiece", "protobuf", "tqdm", "tensorboard", "matplotlib"],
    extras_require={"hub": ["datasets"]},
    ext_modules=extensions(),
)
