"""The CUDA kernels under NVIDIA's compute-sanitizer: tests/gpu/test_kernels.py once for each of its tools.

    python tests/gpu/sanitize.py
    python tests/gpu/sanitize.py --tool racecheck --only attention

In Python because aura.cuda_extension knows what is missing, and builds the kernels before anything watches them. The
options are those of NVIDIA's Compute Sanitizer manual, section "Command Line Options".
What racecheck reports of Hopper's keys_kernel is no race: docs/kernels.md, section 15, says why.
Exit codes: 0 nothing found, 1 something found or a test failed, 2 no card or no compute-sanitizer.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from aura import cli, compilation, cuda_extension  # noqa: E402
from aura.errors import EXIT_OK, UserError  # noqa: E402
from tests.gpu import SECONDS  # noqa: E402

TESTS = "tests/gpu/test_kernels.py"
FOUND = 9  # the sanitizer's exit code where the tests passed and it found something; pytest's own are 1 to 5
TEST_LIMIT = 1800  # seconds for one test, which takes ten to a hundred times what it does unwatched
# Kernels are told apart by their mangled names, in which the namespace aura stands. initcheck watches all of them: what
# torch's kernels have written, unwatched, might count as never written.
OURS = ["--kernel-name", "kns=aura"]
TOOLS = {
    # Failed calls of the driver's interface are torch asking what there is. A tensor's end would lie at the beginning
    # of the next one without padding.
    "memcheck": [*OURS, "--report-api-errors", "no", "--padding", "4096"],
    "racecheck": OURS,
    "initcheck": [],
    "synccheck": OURS,
}


def build_parser():
    """The arguments of this script."""
    parser = cli.Parser(prog="sanitize.py", description="Pasa los núcleos de CUDA por compute-sanitizer, en una GPU.")
    parser.add_argument("--tool", type=cli.choice(*TOOLS), metavar="HERRAMIENTA",
                        help=f"solo esta: {', '.join(TOOLS)}")
    parser.add_argument("--only", metavar="EXPRESIÓN", help="solo las pruebas que elige -k de pytest")
    return parser


def find_sanitizer():
    """compute-sanitizer of PATH or of the CUDA toolkit, None where there is none."""
    toolkit = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.path.join(toolkit, "bin"))


def what_is_missing(sanitizer):
    """What there is not, in words; builds and loads the kernels."""
    missing = []
    if sanitizer is None:
        missing.append("no se encuentra compute-sanitizer (viene con el CUDA toolkit: póngalo en PATH o defina "
                       "CUDA_HOME)")
    try:
        cuda_extension.load()
    except compilation.Unavailable as problem:
        missing.append(str(problem))
    return missing


def command(sanitizer, tool, only=None):
    """The words that run the tests under one tool."""
    tests = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", TESTS]
    # Without torch's cache of memory (see watch) no graph can be recorded.
    tests += ["-k", f"({only or 'test'}) and not graph"]
    return [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), "--target-processes", "application-only",
            *TOOLS[tool], *tests]


def watch(sanitizer, tool, only):
    """The exit code of the tests under one tool. torch's cache of memory is off: a tensor out of whose bounds a kernel
    reads would lie within the cache's block."""
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", SECONDS: str(TEST_LIMIT)}
    return subprocess.run(command(sanitizer, tool, only), cwd=ROOT, env=environment, check=False).returncode


def main():
    """Run the tools one after another; returns the exit code."""
    args = build_parser().parse_args()
    sanitizer = find_sanitizer()
    missing = what_is_missing(sanitizer)
    if missing:
        raise UserError(f"no se pueden examinar los núcleos: {'; '.join(missing)}")
    failed = []
    for tool in [args.tool] if args.tool else TOOLS:
        print(f"== {tool}", flush=True)
        code = watch(sanitizer, tool, args.only)
        if code:
            reason = "ha encontrado algo" if code == FOUND else f"las pruebas terminaron con el código {code}"
            failed.append(f"{tool}: {reason}")
    print("Con fallos: " + "; ".join(failed) if failed else "compute-sanitizer no ha encontrado nada.")
    return 1 if failed else EXIT_OK


if __name__ == "__main__":
    cli.run(main)
