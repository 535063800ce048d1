"""The CPU kernels under the address sanitizer: see kernels_sanitized.cpp."""

import platform
import subprocess
from pathlib import Path

import pytest

from aura import compilation, extension

SOURCE = Path(__file__).with_name("kernels_sanitized.cpp")
FLAGS = ["-std=c++17", "-O0", "-fsanitize=address", *compilation.KERNEL_FLAGS]


def run(command, **options):
    return subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=240, **options)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    """A compiler that has the sanitizer's library, which is a package of its own on some systems."""
    try:
        command = compilation.find_compiler()
    except compilation.Unavailable as problem:
        pytest.skip(str(problem))
    folder = tmp_path_factory.mktemp("probe")
    probe = folder / "probe.cpp"
    probe.write_text("int main() {}\n")
    if run([*command, *FLAGS, probe, "-o", folder / "probe"]).returncode or run([folder / "probe"]).returncode:
        pytest.skip("no address sanitizer")
    return command


def instruction_set():
    """The widest one that the kernels have here."""
    module = extension.load()
    return module.cpu_isa() if extension.has_ops(module) else "portable"


def test_no_kernel_leaves_its_buffers(compiler, tmp_path):
    isa = instruction_set()
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    flags = ["-march=x86-64", *compilation.X86_ISAS[isa]] if x86 else []
    program = tmp_path / "kernels"
    built = run([*compiler, *FLAGS, *flags, f"-DSANITIZED_ISA={isa}", f"-I{compilation.CSRC}",
                 compilation.ROOT / compilation.KERNELS_SOURCE, SOURCE, "-o", program])
    assert built.returncode == 0, built.stdout
    ran = run([program])
    assert (ran.returncode, ran.stdout) == (0, f"{isa}: nothing found\n"), ran.stdout
