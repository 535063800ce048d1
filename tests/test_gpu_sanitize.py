"""tests/gpu/sanitize.py without a card: what it says is missing, and what it does with a stand-in for
compute-sanitizer."""

import sys

import pytest
import torch

from aura import cuda_extension
from aura.errors import UserError
from tests.gpu import sanitize
from tests.support import ROOT, run

STAND_IN = """#!/bin/sh
{ printf '%s\\n' "$@"; echo "seconds: $AURA_GPU_TEST_SECONDS"
  echo "cache off: $PYTORCH_NO_CUDA_MEMORY_CACHING"; } >"FOLDER/$2"
test "$2" != "FAILING" || exit CODE
"""


@pytest.fixture
def examine(tmp_path, monkeypatch):
    """main() with a stand-in that fails with `code` for the tool `failing`, and kernels that need no building."""
    def call(*words, failing="none", code=0):
        path = tmp_path / "compute-sanitizer"
        path.write_text(STAND_IN.replace("FOLDER", str(tmp_path)).replace("FAILING", failing)
                        .replace("CODE", str(code)))
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        monkeypatch.setattr(cuda_extension, "load", lambda: None)
        monkeypatch.setattr(sys, "argv", ["sanitize.py", *words])
        return sanitize.main()

    return call


def words_of(folder, tool):
    return (folder / tool).read_text().splitlines()


def test_every_tool_runs_the_tests_of_the_kernels(examine, tmp_path, capsys):
    assert examine() == 0 and "no ha encontrado nada" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"compute-sanitizer", *sanitize.TOOLS}
    assert list(sanitize.TOOLS) == ["memcheck", "racecheck", "initcheck", "synccheck"]
    for tool in sanitize.TOOLS:
        words = words_of(tmp_path, tool)
        own, tests = words[:words.index(sys.executable)], words[words.index(sys.executable) + 1:]
        assert own[:6] == ["--tool", tool, "--error-exitcode", "9", "--target-processes", "application-only"]
        assert ("kns=aura" in own) == (tool != "initcheck")
        assert tests[:4] == ["-m", "pytest", "-n", "0"] and "tests/gpu/test_kernels.py" in tests
        assert words[-3:] == ["(test) and not graph", f"seconds: {sanitize.TEST_LIMIT}", "cache off: 1"]
    assert (ROOT / sanitize.TESTS).is_file()


@pytest.mark.parametrize("code, said", [(9, "ha encontrado algo"), (1, "las pruebas terminaron con el código 1"),
                                        (139, "código 139")])
def test_what_one_of_them_finds_is_told_and_the_others_still_run(examine, tmp_path, capsys, code, said):
    assert examine(failing="memcheck", code=code) == 1 and (tmp_path / "synccheck").exists()
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.startswith("Con fallos: memcheck: ") and told.endswith(said) and "racecheck" not in told


def test_one_tool_and_some_of_the_tests(examine, tmp_path):
    assert examine("--tool", "racecheck", "--only", "attention or norms") == 0
    assert words_of(tmp_path, "racecheck")[-3] == "(attention or norms) and not graph"
    assert not (tmp_path / "memcheck").exists()


def test_the_sanitizer_of_the_toolkit_is_found(tmp_path, monkeypatch):
    path = tmp_path / "bin" / "compute-sanitizer"
    path.parent.mkdir()
    path.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert sanitize.find_sanitizer() == str(path)
    path.unlink()
    assert sanitize.find_sanitizer() is None
    monkeypatch.setattr(cuda_extension, "load", lambda: None)
    monkeypatch.setattr(sys, "argv", ["sanitize.py"])
    with pytest.raises(UserError, match="no se encuentra compute-sanitizer") as problem:
        sanitize.main()
    assert problem.value.exit_code == 2 and ";" not in str(problem.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_is_one_line(tmp_path):
    code, output = run([ROOT / "tests" / "gpu" / "sanitize.py"], tmp_path)
    assert code == 2 and len(output.splitlines()) == 1 and "no hay ninguna GPU" in output, output
