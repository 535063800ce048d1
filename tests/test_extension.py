"""The build of the extension: once, never in anybody's way, and never missed when it cannot be had.

A stand-in compiler (a shell script that copies the module built before) keeps these tests fast; `load()` itself
builds with the real one.
"""

import errno
import fcntl
import os
import platform
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aura import compilation, extension

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="flock and process groups")

LOAD = "from aura import extension as e; m = e.load(); print(m is not None); print(e.status())"

COMPILER = """#!/bin/sh
case "$*" in
  *--version*) echo stand-in 1.0; exit 0;;
  *" -c "*) echo compile >> "{log}";;
  *) echo link $$ >> "{log}"; sleep {pause}; while [ -e "{hang}" ]; do sleep 0.1; done;;
esac
for last; do :; done
cp "{module}" "$last"
"""


@pytest.fixture
def workshop(tmp_path):
    """A stand-in compiler and an empty build directory: (environment, log of what it was asked, file to hang on)."""
    module = extension.load()
    if module is None:
        pytest.skip(extension.status())
    log, hang, compiler = tmp_path / "log", tmp_path / "hang", tmp_path / "cxx"
    compiler.write_text(COMPILER.format(log=log, hang=hang, pause=0.5, module=module.__file__))
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    environment = {**os.environ, "CXX": str(compiler), "AURA_BUILD_DIR": str(tmp_path / "builds")}
    environment.pop("AURA_EXTENSION", None)
    return environment, log, hang


def start(environment, code=LOAD, cwd=compilation.ROOT):
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def finish(process, timeout=60):
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"time-out: {out}{err}")
    return out, err


def units(native=True):
    return compilation.units(["g++"], native, compilation.instruction_sets())


def compiled(native):
    """How often a build calls the compiler: once for each unit, and to try the youngest instruction sets."""
    sets = compilation.instruction_sets()
    never_run = len(sets) - len(compilation.run_here(sets)) if native else 0
    return len(units(native)) - never_run + len(compilation.NEWEST.keys() & sets.keys())


def wait_for(condition, timeout=30):
    limit = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < limit, "time-out"
        time.sleep(0.02)


needs_jit = pytest.mark.skipif(extension._ahead_of_time() is not None, reason="built ahead of time: nothing to build")


@needs_jit
def test_race_of_four_builds_once(workshop):
    environment, log, _ = workshop
    processes, said = [start(environment) for _ in range(4)], []
    for process in processes:
        out, err = finish(process)
        assert out.startswith("True\n"), err
        said += err.splitlines()
    assert said == ["Se compila la extensión de C++, solo esta vez: puede tardar unos minutos."]
    assert log.read_text().split().count("link") == 1
    assert log.read_text().split().count("compile") == compiled(native=True)


@needs_jit
def test_killed_builder_blocks_nobody(workshop):
    environment, log, hang = workshop
    hang.touch()
    builder = start(environment)
    try:
        wait_for(lambda: log.exists() and "link" in log.read_text())
        os.kill(builder.pid, signal.SIGKILL)
        builder.wait(timeout=60)
        compiler = log.read_text().split()[-1]
        wait_for(lambda: not Path("/proc", compiler).exists())  # though it still hangs
        orphans = log.read_text().split().count("link")
        hang.unlink()
        out, err = finish(start(environment))
    finally:
        hang.unlink(missing_ok=True)
        builder.kill()
        finish(builder)
    assert out.startswith("True\n"), err
    assert log.read_text().split().count("link") == orphans + 1
    [build] = Path(environment["AURA_BUILD_DIR"]).iterdir()
    assert (build / "_C.so").exists()


@pytest.mark.parametrize("made", [True, False])
def test_who_may_not_write_where_another_user_builds_waits_for_him(tmp_path, monkeypatch, made):
    monkeypatch.setenv("AURA_BUILD_DIR", str(tmp_path))
    target, real = extension.build_folder("0" * 20) / "x.so", open
    target.parent.mkdir()
    holder = real(target.parent / "lock", "w")
    fcntl.flock(holder, fcntl.LOCK_EX)

    def refuse(path, mode="r", **options):
        if mode != "r":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, mode, **options)

    def end(_):
        if made:
            target.touch()
        holder.close()

    monkeypatch.setattr("builtins.open", refuse)
    monkeypatch.setattr(extension.time, "sleep", end)
    if made:
        assert extension.built_once("0" * 20, "x.so", pytest.fail) == target
        return
    with pytest.raises(compilation.Unavailable, match="no se puede compilar en .*permiso denegado; defina AURA"):
        extension.built_once("0" * 20, "x.so", pytest.fail)


def test_a_build_that_may_not_be_read_is_told_with_the_way_out(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/otra/_C.so")

    monkeypatch.setattr(extension, "_result", None)
    monkeypatch.setattr(extension, "_just_in_time", lambda: tmp_path / "_C.so")
    monkeypatch.setattr(extension, "_ahead_of_time", lambda: None)
    monkeypatch.setattr(extension, "_import_file", refuse)
    assert extension.load() is None
    assert "Motivo: /otra/_C.so: permiso denegado; corrija sus permisos, o defina AURA_BUILD_DIR con otra carpeta\n" \
        in capsys.readouterr().err


@needs_jit
def test_who_waits_for_a_build_that_fails_does_not_try_it_again(workshop):
    environment, log, hang = workshop
    compiler = Path(environment["CXX"])
    working = compiler.read_text()
    compiler.write_text(f"{working}case \"$*\" in *' -c '*) ;; *) echo 'error: no'; exit 1;; esac\n")
    hang.touch()
    first = start(environment)
    wait_for(lambda: log.exists() and "link" in log.read_text())
    others = [start(environment) for _ in range(2)]
    for other in others:
        wait_for(lambda pid=other.pid: any(os.path.realpath(file).endswith("/lock")
                                           for file in Path(f"/proc/{pid}/fd").iterdir()))
    hang.unlink()
    for process in [first, *others]:
        out, err = finish(process)
        assert out.startswith("False\n") and "error al compilar: error: no" in err
    assert log.read_text().split().count("link") == 1
    compiler.write_text(working)
    assert finish(start(environment))[0].startswith("True\n"), "who comes later tries again"


@needs_jit
def test_no_compiler_is_one_line_and_none(tmp_path):
    base = {key: value for key, value in os.environ.items() if key not in ("AURA_EXTENSION", "CXX")}
    base["AURA_BUILD_DIR"] = str(tmp_path)
    for change in ({"CXX": "/nonexistent"}, {"PATH": str(tmp_path)}):
        out, err = finish(start({**base, **change}, LOAD + "; e.load()"))
        assert out.startswith("False\n")
        assert "sin extensión de C++: no se encuentra un compilador" in out
        assert len(err.splitlines()) == 1
        assert err.startswith("Aviso: sin extensión de C++")


@needs_jit
@pytest.mark.parametrize("change, told", [({"CXX": "g++ '-O2"}, "CXX=\"g++ '-O2\""), ({"CXX": " "}, "CXX=' '")])
def test_an_environment_that_makes_no_sense_is_one_line_too(tmp_path, change, told):
    base = {key: value for key, value in os.environ.items() if key not in ("AURA_EXTENSION", "CXX")}
    out, err = finish(start({**base, "AURA_BUILD_DIR": str(tmp_path), **change}, LOAD + "; e.load()"))
    assert out.startswith("False\n") and told in err and len(err.splitlines()) == 1, err


@needs_jit
@pytest.mark.parametrize("folder, told", [("file", "una parte de la ruta no es una carpeta"),
                                          ("x" * 300, "el nombre es demasiado largo")])
def test_a_folder_that_cannot_hold_builds_is_named_with_the_way_out(tmp_path, workshop, folder, told):
    environment, log, _ = workshop
    (tmp_path / "file").touch()
    out, err = finish(start({**environment, "AURA_BUILD_DIR": str(tmp_path / folder)}))
    assert out.startswith("False\n")
    assert str(tmp_path / folder) in err and told in err and "defina AURA_BUILD_DIR" in err
    assert len(err.splitlines()) == 1 and not log.exists()


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    def nobody():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("AURA_BUILD_DIR", raising=False)
    monkeypatch.setattr(extension.Path, "home", nobody)
    with pytest.raises(compilation.Unavailable, match="AURA_BUILD_DIR"):
        extension.build_folder("x")


def test_a_folder_may_be_given_from_the_home_on(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AURA_BUILD_DIR", "~/builds")
    assert extension.build_folder("x") == tmp_path / "builds" / "x"


def test_a_compiler_given_from_here_on_is_found_from_elsewhere(monkeypatch, tmp_path):
    (tmp_path / "cxx").write_text("#!/bin/sh\n")
    (tmp_path / "cxx").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", "./cxx -O2")
    assert compilation.find_compiler() == [str(tmp_path / "cxx"), "-O2"]


def test_a_disk_from_which_nothing_is_run_is_called_that(monkeypatch, tmp_path):
    def refused(loader, spec):  # where CPython calls dlopen
        raise ImportError("x.so: failed to map segment from shared object")

    monkeypatch.delitem(sys.modules, compilation.MODULE, raising=False)
    monkeypatch.setattr(extension, "_mark", lambda *_: compilation.WITHOUT_TORCH)
    monkeypatch.setattr(extension, "_cut_short", lambda path: False)
    monkeypatch.setattr(extension.importlib.machinery.ExtensionFileLoader, "create_module", refused)
    with pytest.raises(compilation.Unavailable, match=r"_C.so está en un disco .*\(noexec\); defina AURA_BUILD_DIR"):
        extension._import_file(tmp_path / "_C.so")


@needs_jit
def test_compile_error_is_told_in_its_own_words(tmp_path, workshop):
    environment, _, _ = workshop
    failing = "#!/bin/sh\necho 'a.cpp:1: note: x'\necho 'a.cpp:3:4: error: no such luck'\nexit 1\n"
    Path(environment["CXX"]).write_text(failing)
    out, err = finish(start(environment))
    assert out.startswith("False\n")
    announced, warning = err.splitlines()
    assert announced.startswith("Se compila") and "error: no such luck" in warning
    [build] = (path for path in Path(environment["AURA_BUILD_DIR"]).iterdir() if path.is_dir())
    assert [path.name for path in build.iterdir()] == ["lock"]


@needs_jit
@pytest.mark.parametrize("script, told", [("exit 1", "error al compilar: el compilador no dice por qué"),
                                          ("echo 'nvcc fatal: unknown option'; echo more; exit 1",
                                           "error al compilar: nvcc fatal: unknown option\n"),
                                          ("echo \"x.s: can't write 9 bytes: 'No space left on device'\"; exit 1",
                                           "no queda espacio ahí o en la carpeta temporal; haga sitio, o defina"),
                                          ("exit 0", "el compilador no ha dejado nada")])
def test_a_command_that_is_no_compiler_is_told_in_one_line(workshop, script, told):
    environment, _, _ = workshop
    Path(environment["CXX"]).write_text(f"#!/bin/sh\n{script}\n")
    out, err = finish(start(environment))
    assert out.startswith("False\n")
    announced, warning = err.splitlines(keepends=True)
    assert announced.startswith("Se compila") and told in warning


@pytest.mark.parametrize("header,flag", [("#error C++17 or later compatible compiler", "-std=c++17"),
                                         ("#error C++20 or later compatible compiler", "-std=c++20"),
                                         ("// nothing is said", "-std=c++17"), (None, "-std=c++17")])
def test_the_standard_is_what_the_headers_of_torch_ask_for(tmp_path, header, flag):
    (tmp_path / "include" / "ATen").mkdir(parents=True)
    if header is not None:
        (tmp_path / "include" / "ATen" / "ATen.h").write_text(header)
    assert compilation.cxx_standard(compilation.Torch(tmp_path, "2.15.0")) == flag
    assert compilation.cxx_standard(None) == "-std=c++17"


def test_every_unit_is_built_by_that_standard(monkeypatch):
    monkeypatch.setattr(compilation, "cxx_standard", lambda torch: "-std=c++20")
    for unit in units():
        assert [flag for flag in unit.flags if flag.startswith("-std=")] == ["-std=c++20"]


def test_a_library_that_the_linker_misses_is_named():
    told = "g++ -shared -o _C.so\n/usr/bin/ld: cannot find -lcudart\ncollect2: error: ld returned 1 exit status\n"
    assert compilation._first_error(told) == "/usr/bin/ld: cannot find -lcudart"


def test_switched_off_is_silent():
    out, err = finish(start({**os.environ, "AURA_EXTENSION": "off"}))
    assert out == "False\nextensión de C++ desactivada (AURA_EXTENSION=off)\n"
    assert err == ""


def test_only_the_standard_library_is_imported():
    code = "import sys, aura.extension; print(sorted({'torch', 'numpy', 'pybind11'} & set(sys.modules)))"
    assert finish(start(dict(os.environ), code)) == ("[]\n", "")


def test_module_carries_the_hash_of_its_sources():
    module = extension.load()
    if module is None:
        pytest.skip(extension.status())
    assert module.source_hash == compilation.source_hash()
    assert compilation.HASH_MARK + module.source_hash.encode() in Path(module.__file__).read_bytes()
    assert extension.load() is module


def test_key_changes_with_sources_flags_torch_and_compiler(tmp_path, monkeypatch):
    compiler = tmp_path / "cxx"
    compiler.write_text("#!/bin/sh\necho 1.0\n")
    compiler.chmod(0o755)
    keys = []

    def key_is_new():
        keys.append(extension.build_key([str(compiler)]))
        return keys[-1] not in keys[:-1]

    assert key_is_new()
    assert not key_is_new()
    sources = tmp_path / "csrc"
    sources.mkdir()
    monkeypatch.setattr(compilation, "CSRC", sources)
    assert key_is_new()
    for name in ("a.h", "a.inl", "a.cpp"):
        (sources / name).write_text("int a;")
        assert key_is_new()
        (sources / name).write_text("int b;")
        assert key_is_new()
    monkeypatch.setattr(compilation, "KERNEL_FLAGS", ["-O0"])
    assert key_is_new()
    monkeypatch.setattr(compilation, "processor_flags", lambda: "flags: another processor")
    assert key_is_new()
    compiler.write_text("#!/bin/sh\necho 2.0\n")
    assert key_is_new()
    torch = compilation.find_torch()
    monkeypatch.setattr(compilation, "find_torch", lambda: torch._replace(version="2.99.0"))
    assert key_is_new()
    monkeypatch.setattr(compilation, "find_torch", lambda: None)
    assert key_is_new()


@pytest.mark.parametrize("native", [True, False])
def test_kernels_are_compiled_once_for_each_instruction_set(native):
    """A set forced with AURA_CPU_ISA must be genuine: its unit gets no other instructions, wherever it is compiled."""
    every = units(native)
    kernels = {unit.object: unit.flags for unit in every if unit.source == compilation.KERNELS_SOURCE}
    rest = [unit for unit in every if unit.source != compilation.KERNELS_SOURCE]
    assert len({unit.object for unit in every}) == len(every)
    assert all(any("native" in flag for flag in unit.flags) == native for unit in rest)
    assert all("-fopenmp" in unit.flags for unit in rest if unit.source == compilation.OPS_SOURCE)
    for flags in kernels.values():
        assert not any("native" in flag or flag == "-ffast-math" for flag in flags)
        assert {"-O3", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-ffp-contract=fast"} <= set(flags)
    if platform.machine() != "x86_64":
        assert list(kernels) == ["kernels-portable.o"]
        return
    # In link order: of an inline function that several hold, the first copy is kept, so it must run anywhere.
    assert [unit.object for unit in every[-5:]] == ["kernels-portable.o", "kernels-avx2.o", "kernels-avx512.o",
                                                    "kernels-avx512bf16.o", "kernels-amx.o"]
    avx512 = "-march=x86-64 -mavx2 -mfma -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512".split()
    machine = {name: [flag for flag in flags if flag.startswith("-m")] for name, flags in kernels.items()}
    assert machine == {
        "kernels-portable.o": ["-march=x86-64"],
        "kernels-avx2.o": ["-march=x86-64", "-mavx2", "-mfma"],
        "kernels-avx512.o": avx512,
        "kernels-avx512bf16.o": [*avx512, "-mavx512bf16"],
        "kernels-amx.o": [*avx512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
    }


def test_every_file_of_operators_is_compiled():
    included = re.findall(r'#include "(.+)"', (compilation.ROOT / compilation.OPS_SOURCE).read_text())
    assert included == sorted(path.name for path in compilation.CSRC.glob("ops*.cpp"))


def test_kernels_bring_no_inline_function_of_somebody_elses():
    """Of those the linker keeps one copy, which a smaller processor might not run: see csrc/cpu/vec.h."""
    files = (compilation.CSRC / "cpu").iterdir()
    headers = {name for path in files for name in re.findall(r"#include <(.+)>", path.read_text())}
    assert headers == {"cstdint", "cstring", "type_traits", "immintrin.h"}


@pytest.mark.skipif(not shutil.which("clang++"), reason="no clang++")
def test_clang_takes_every_file_and_makes_the_same_sets():
    """It defines other names for some sets, and does not know all that GCC can ask of a processor."""
    module_with_ops()
    units = list(compilation.units(["clang++"], native=True, isas=compilation.instruction_sets()))
    assert len(units) > 5
    for unit in units:
        command = ["clang++", *unit.flags, "-Werror", str(compilation.ROOT / unit.source)]
        subprocess.run([*command, "-fsyntax-only"], check=True, timeout=300)
        if unit.source == compilation.KERNELS_SOURCE:
            defined = subprocess.run([*command, "-dM", "-E"], check=True, timeout=120, capture_output=True, text=True)
            assert f"kernels-{re.search(r'AURA_ISA (.*)', defined.stdout)[1]}.o" == unit.object


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86")
@pytest.mark.parametrize("refused, left", [("*-mavx512bf16*", 3), ("*avx512bf16.cpp*|*amx.cpp*", 3),
                                           ("*-mamx-tile*", 4), ("*amx.cpp*", 4)])
def test_a_set_that_is_too_young_for_the_compiler_is_left_out(tmp_path, refused, left):
    """University clusters load a new compiler that calls the system's old assembler."""
    compiler = tmp_path / "cxx"
    refuse = f'case "$*" in\n{refused}) echo no such instruction >&2; exit 1;;\nesac'
    compiler.write_text(f'#!/bin/sh\n{refuse}\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    made = compilation._made_by([str(compiler)], tmp_path)
    assert list(made) == ["portable", "avx2", "avx512", "avx512bf16"][:left]
    assert list(compilation._made_by(compilation.find_compiler(), tmp_path)) == list(compilation.X86_ISAS)
    assert [path.name for path in tmp_path.iterdir()] == ["cxx"]
    [of_ops] = [unit for unit in compilation.units([str(compiler)], True, made)
                if unit.source == compilation.OPS_SOURCE]
    assert ("-DAURA_HAS_AVX512BF16" in of_ops.flags, "-DAURA_HAS_AMX" in of_ops.flags) == (left > 3, False)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86")
@pytest.mark.parametrize("flags, sets", [
    ("flags\t\t: fpu sse2 avx2 fma", 2), ("flags : avx2", 1), ("flags : avx2 fma avx512_bf16 amx_tile amx_bf16", 2),
    ("flags : avx2 fma avx512f avx512bw avx512dq avx512vl", 3), ("", 5), ("flags :", 5)])
def test_of_a_build_that_stays_here_no_set_is_made_that_never_runs(monkeypatch, tmp_path, flags, sets):
    monkeypatch.setattr(compilation, "processor_flags", lambda: flags)
    made = []
    monkeypatch.setattr(compilation, "run_build", lambda rules, output, target: made.append(rules))
    for native in (True, False):
        compilation.build(compilation.find_compiler(), tmp_path / "_C.so", native)
    names = list(compilation.X86_ISAS)
    for rules, left in zip(made, (names[:sets], names), strict=True):
        assert re.findall(r"build kernels-(\w+).o", rules) == left[::-1]
        assert re.findall(r"-DAURA_HAS_(\w+)", rules) == [name.upper() for name in left]


def test_this_processor_runs_every_set_that_was_made_for_it():
    assert set(module_with_ops().cpu_isas()) == set(compilation.run_here(compilation.instruction_sets()))


def test_without_torch_the_loader_alone_is_built(monkeypatch):
    monkeypatch.setattr(compilation, "find_torch", lambda: None)
    alone = units(native=False)
    assert [unit.source for unit in alone] == list(compilation.LOADER_SOURCES)
    assert all({"-DAURA_WITHOUT_TORCH", '-DAURA_TORCH_VERSION="none"'} <= set(unit.flags) for unit in alone)
    assert not any("torch" in flag for flag in compilation.link_flags())


def test_stale_module_built_at_installation_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(extension, "__file__", str(tmp_path / "extension.py"))
    built = tmp_path / ("_C" + extension.importlib.machinery.EXTENSION_SUFFIXES[0])

    def write(source_hash, torch_version):
        torch_mark = compilation.TORCH_MARK + torch_version.encode()
        built.write_bytes(b"...".join([b"", compilation.HASH_MARK + source_hash.encode() + b"\0", torch_mark + b"\0"]))

    current, torch_version = compilation.source_hash(), compilation.find_torch().version
    for source_hash, version in (("0" * 64, torch_version), (current, "2.0.0"), (current, compilation.WITHOUT_TORCH)):
        write(source_hash, version)
        assert extension._ahead_of_time() is None
    write(current, torch_version)
    assert extension._ahead_of_time() == built
    write("0" * 64, compilation.WITHOUT_TORCH)
    monkeypatch.setattr(compilation, "CSRC", tmp_path / "absent")
    assert extension._ahead_of_time() == built


@pytest.mark.parametrize("content, told", [
    ('c.HASH_MARK + b"0\\0" + c.TORCH_MARK + b"2.0.0\\0"',
     "se compiló para torch 2.0.0, y el de aquí es .*--no-build-isolation"),
    ('b""', "está dañado: bórrelo"),
    ('b"\\x7fELF\\x02".ljust(40, b"\\0") + bytes([0, 1]).ljust(24, b"\\0") + c.HASH_MARK + b"0\\0" + c.TORCH_MARK '
     '+ c.find_torch().version.encode() + b"\\0"', "está dañado: bórrelo")])  # its sections would begin at byte 256
def test_module_of_another_torch_or_none_is_refused_with_the_reason(tmp_path, content, told):
    """Where there are no sources to build another one from, as in site-packages."""
    code = f"""
from pathlib import Path
from aura import compilation as c, extension as e
folder = Path({str(tmp_path)!r})
built = folder / ("_C" + e.importlib.machinery.EXTENSION_SUFFIXES[0])
built.write_bytes({content})
e.__file__, c.CSRC = str(folder / "extension.py"), folder / "absent"
""" + LOAD.partition("; ")[2]
    out, err = finish(start({**os.environ, "AURA_EXTENSION": ""}, code))
    assert out.startswith("False\n")
    assert re.search(told, err) and len(err.splitlines()) == 1


def test_installation_builds_if_there_is_a_compiler(tmp_path, workshop):
    environment, log, _ = workshop
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(tmp_path / "lib")]

    def built(**change):
        subprocess.run(command, cwd=compilation.ROOT, env={**environment, **change}, check=True, timeout=60)
        return [path.name for path in (tmp_path / "lib").rglob("*") if path.is_file()]

    assert built() == ["_C" + extension.importlib.machinery.EXTENSION_SUFFIXES[0]]
    assert log.read_text().split().count("compile") == compiled(native=False)
    assert built(CXX="/nonexistent") == []  # not even the one built before


def test_builds_nobody_loads_are_removed(tmp_path):
    newest, recent, old, foreign = (tmp_path / name for name in ("0" * 20, "1" * 20, "2" * 20, "aura"))
    for folder in (newest, recent, old, foreign):
        folder.mkdir()
        (folder / compilation.OUTPUT).touch()
    long_ago = time.time() - extension.UNUSED_BUILD_S - 60
    for folder in (old, foreign):
        os.utime(folder / compilation.OUTPUT, (long_ago, long_ago))
    extension._remove_unused_builds(newest / compilation.OUTPUT)
    assert sorted(tmp_path.iterdir()) == [newest, recent, foreign]


def test_a_build_that_another_builder_removes_meanwhile_is_passed_over(tmp_path, monkeypatch):
    newest, other = (tmp_path / (digit * 20) / compilation.OUTPUT for digit in "01")
    other.parent.mkdir()
    other.touch()
    monkeypatch.setattr(extension.time, "time", lambda: other.unlink())
    extension._remove_unused_builds(newest)
    assert not other.exists()


def module_with_ops():
    module = extension.load()
    if not extension.has_ops(module):
        pytest.skip(extension.status())
    return module


def test_instruction_set_is_the_best_or_the_one_asked_for():
    module = module_with_ops()
    assert module.cpu_isas()[-1] == "portable"
    assert set(module.cpu_isas()) <= set(compilation.X86_ISAS)
    for wanted, used in (("", module.cpu_isas()[0]), *((isa, isa) for isa in module.cpu_isas())):
        out, err = finish(start({**os.environ, "AURA_CPU_ISA": wanted}, LOAD + "; print(m.cpu_isa())"))
        assert out.splitlines()[-1] == used, err


def test_instruction_set_it_has_not_is_a_user_error():
    module_with_ops()
    code = LOAD.partition("; ")[0] + """
from aura.errors import UserError
for _ in range(2):
    try: e.load()
    except UserError as error: print(error)
"""
    out, err = finish(start({**os.environ, "AURA_CPU_ISA": "avx3"}, code))
    assert re.fullmatch(r"(AURA_CPU_ISA='avx3': este procesador admite .*portable\n){2}", out), err


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_threads_are_those_of_torch():
    """Two OpenMP libraries would keep two pools of threads on the same cores."""
    module_with_ops()
    code = "import re, torch; " + LOAD + """
torch.ops.aura.gelu_tanh(torch.zeros(1 << 20))
print(*{line.split()[-1] for line in open('/proc/self/maps') if re.search('lib[gi]?omp', line)})
"""
    out, err = finish(start(dict(os.environ), code))
    assert len(out.splitlines()[-1].split()) == 1, out + err
