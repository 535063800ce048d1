"""How the CUDA kernels are built, as far as that shows without a card, and what is said where they cannot be."""

import shlex
import subprocess

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from aura import compilation, cuda_extension, extension, ops
from aura.errors import UserError
from aura.extension import Unavailable


def put_nvcc(folder, version):
    """An nvcc that says it is of a version of CUDA."""
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.88'\n")
    nvcc.chmod(0o755)
    return nvcc


@pytest.fixture
def nvcc(tmp_path, monkeypatch):
    """An nvcc of CUDA 13.0, named by CUDA_HOME; torch is of 13.0 too."""
    nvcc = put_nvcc(tmp_path / "con espacio", "13.0")
    monkeypatch.setenv("CUDA_HOME", str(nvcc.parent.parent))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return nvcc


def test_the_toolkit_is_that_of_torch(nvcc, monkeypatch):
    assert cuda_extension.find_nvcc() == nvcc
    monkeypatch.setattr(torch.version, "cuda", "13.2")  # the same first number
    assert cuda_extension.find_nvcc() == nvcc
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(Unavailable, match=r"nvcc de CUDA 12\.8, .*nvcc es de CUDA 13\.0\): .* defina CUDA_HOME$"):
        cuda_extension.find_nvcc()
    monkeypatch.setenv("CUDA_HOME", str(nvcc.parent / "nada"))
    with pytest.raises(Unavailable, match="no se encuentra .*nada/bin/nvcc"):
        cuda_extension.find_nvcc()


def test_the_first_toolkit_that_fits_is_taken(nvcc, monkeypatch, tmp_path):
    """In this order: that of PATH, even a script without headers beside it, of the usual folder, of pip's packages."""
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", f"{nvcc.parent}:/usr/bin:/bin")
    usual, site = tmp_path / "usual", tmp_path / "site-packages"
    monkeypatch.setattr(cuda_extension, "USUAL_NVCC", usual / "bin" / "nvcc")
    monkeypatch.setattr(compilation, "find_torch", lambda: compilation.Torch(site / "torch", "2.11.0"))
    other = put_nvcc(usual, "13.0")
    assert cuda_extension.find_nvcc() == nvcc
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.93'\n")
    assert cuda_extension.find_nvcc() == other
    other.unlink()
    with pytest.raises(Unavailable, match=r"12\.8\): .*: pip install nvidia-cuda-nvcc~=13\.0\.0 nvidia-nvvm"):
        cuda_extension.find_nvcc()
    packages = put_nvcc(site / "nvidia" / "cu13", "13.0")
    assert cuda_extension.find_nvcc() == packages


@pytest.mark.parametrize("capability,name", [((8, 0), "80"), ((8, 6), "86"), ((9, 0), "90a"), ((12, 0), "120")])
def test_only_for_the_card_that_is_here(capability, name):
    assert cuda_extension.architecture(capability) == ["-gencode", f"arch=compute_{name},code=sm_{name}"]


def test_every_source_is_built_and_linked(nvcc, tmp_path):
    """As ninja itself reads the file, with spaces in paths."""
    rules = cuda_extension.ninja_file(nvcc, compilation.find_compiler(), (8, 6))
    (tmp_path / "build.ninja").write_text(rules)
    told = subprocess.run([compilation.find_ninja(), "-n", "-v"], cwd=tmp_path, capture_output=True, text=True,
                          timeout=60, check=True).stdout
    sources = [*(compilation.CSRC / "cuda").glob("*.cu"), compilation.CSRC / "cuda" / "library.cpp"]
    assert len(sources) > 3 and all(told.count(f"{source} -o {source.stem}.o") == 1 for source in sources), told
    assert told.count("arch=compute_86,code=sm_86") == len(sources) - 1
    (link,) = [line for line in told.splitlines() if line.endswith(f"-o {cuda_extension.OUTPUT}")]
    assert all(f"{source.stem}.o" in link for source in sources) and "-lc10_cuda" in link
    assert "-cudart none" in link  # torch has brought one; pip's toolkit has none to link with


@pytest.mark.parametrize("compiler, given", [
    (["/usr/bin/ccache", "g++", "-m64"], "-ccbin g++ -Xcompiler -m64"), (["/usr/bin/g++"], "-ccbin /usr/bin/g++")])
def test_nvcc_is_given_the_compiler_and_not_what_calls_it(nvcc, compiler, given):
    rules = cuda_extension.ninja_file(nvcc, compiler, (8, 6))
    commands = [line for line in rules.splitlines() if line.startswith("  command = ")]
    assert len(commands) == 3 and all(f"{nvcc.name}' {given} " in line or f"{nvcc} {given} " in line
                                      for line in commands), rules


@pytest.mark.parametrize("told, said", [
    ("host_config.h:137:2: error: #error -- unsupported GNU version! gcc versions later than 15 are not supported!",
     r"no admite un g\+\+ posterior al 15: .*apt install g\+\+-15\) y defina CXX=g\+\+-15$"),
    ("nvcc fatal   : Unsupported gpu architecture 'compute_120'", "no conoce la tarjeta.* más nuevo, .* CUDA_HOME$"),
    ("/usr/include/bits/mathcalls.h(206): error: exception specification is incompatible with that of \"rsqrt\"",
     "es anterior a la biblioteca de C .* más nuevo, .* CUDA_HOME$"),
    ("a.cu(3): error: no such thing", "error al compilar: .*no such thing")])
def test_what_nvcc_refuses_is_told_with_the_way_out(nvcc, tmp_path, told, said):
    nvcc.write_text(f"#!/bin/sh\necho {shlex.quote(told)} >&2\nexit 1\n")
    with pytest.raises(Unavailable, match=said):
        compilation.run_build(cuda_extension.ninja_file(nvcc, ["c++"], (12, 0)), "cuda.so", tmp_path / "cuda.so")


def test_what_knows_torch_is_built_by_the_standard_of_its_headers(nvcc, monkeypatch):
    monkeypatch.setattr(compilation, "cxx_standard", lambda torch: "-std=c++20")
    rules = cuda_extension.ninja_file(nvcc, compilation.find_compiler(), (8, 6))
    kernel, plain, _ = (line for line in rules.splitlines() if line.startswith("  command = "))
    assert "-std=c++17" in kernel and "-std=c++20" in plain and "-std=c++17" not in plain


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_fused_says_so_and_nothing_else_is_lost():
    before = ops._choice, ops._gpu
    with pytest.raises(UserError, match="--attention fused: no hay ninguna GPU .*--attention auto o sdpa"):
        ops.use("fused", "cuda")
    assert (ops._choice, ops._gpu) == before
    with ops.using("auto", "cuda"):
        assert ops.describe(torch.device("cuda")).startswith("atención: scaled_dot_product_attention de torch")


def test_instructions_that_are_none_are_said(monkeypatch):
    monkeypatch.setenv("AURA_CUDA_ISA", "sm_89")
    with pytest.raises(UserError, match="AURA_CUDA_ISA='sm_89': se espera sm_80"):
        ops.use("fused", "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_goes_to_our_kernels(monkeypatch, dtype):
    """Shown with tensors without memory: on a GPU every operation but attention takes these dtypes."""
    if not extension.has_ops(extension.load()):
        pytest.skip(extension.status())
    seen = set()

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "aura":
                seen.add(func.__name__.removesuffix(".default"))
            return func(*args, **(kwargs or {}))

    with ops.using("fused"), FakeTensorMode(), Seen():
        monkeypatch.setattr(ops, "_gpu", True)
        x, weight = (torch.empty(shape, device="cuda", dtype=dtype) for shape in ((4, 8), (8,)))
        angles = torch.empty(4, 4, device="cuda")
        ops.layer_norm(x, weight, weight)
        ops.gelu_tanh(x)
        ops.swiglu(x)
        ops.sigmoid_gate(x, x)
        ops.rotary_packed(torch.empty(1, 4, 3, 2, 8, device="cuda", dtype=dtype), angles, angles)
        ops.linear_cross_entropy(x, x, torch.empty(4, device="cuda", dtype=torch.int64))
        assert not ops._takes("gelu_tanh", torch.empty(4, device="cuda", dtype=torch.float64), 4)
    assert seen == {"layer_norm", "gelu_tanh", "swiglu", "sigmoid_gate", "rotary", "linear_cross_entropy"}
