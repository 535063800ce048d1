"""Every command of ours that a guide or a README shows is one that exists and that its real parser accepts."""

import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GUIDES = sorted([*ROOT.glob("README*.md"), *(ROOT / "docs").glob("*.md")])
COMMAND_FENCES = {"", "bash", "sh", "shell", "console"}  # what other fences hold is not for this shell
OPERATORS = {"&&", "||", "|", ";", "&"}
WRAPPERS = {"sudo": 0, "nohup": 0, "time": 0, "exec": 0, "timeout": 1, "watch": 2, "env": 0}  # and their own arguments
COMPOSE_VALUE_FLAGS = {"--name", "-e", "--env", "-v", "--volume", "-u", "--user", "-w", "--workdir", "--entrypoint",
                       "-f", "--file", "--profile", "--env-file"}
INLINE_STARTS = ("python ", "python3 ", "torchrun ", "./ddp_launch.sh", "make ", "docker compose ")
BACKEND_VARIABLES = ("CUDA_", "NCCL_", "GLOO_", "USE_LIBUV")  # read by torch itself
IMAGE_VARIABLES = ("BASE_IMAGE", "UID", "GID")  # read by compose itself
FOREIGN_FLAGS = {"--rm", "--gpus"}  # flags of other programs that prose may mention


class Wrong(Exception):
    """What is wrong with a command, for a test's message."""


# --- reading a guide -------------------------------------------------------------------------------------------------


def fences(text):
    """Yield (language, lines) of each fenced block."""
    for found in re.finditer(r"^```([\w-]*)[^\n]*\n(.*?)^```", text, re.M | re.S):
        yield found[1].lower(), found[2].splitlines()


def commands_in(text):
    """The shell lines of the fenced blocks, continuation lines joined, comments and prompts taken off."""
    for language, lines in fences(text):
        if language not in COMMAND_FENCES:
            continue
        whole = re.sub(r"\\\n\s*", "", "\n".join(lines))
        for line in whole.splitlines():
            line = line.strip().removeprefix("$ ")
            if line and not line.startswith("#"):
                yield line


def spans_in(text):
    """Inline code outside the fenced blocks; a span may run over a line's end."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", outside)]


def inline_commands(text):
    """Inline code that is a whole command of ours (with an ellipsis it is only a sketch)."""
    return [span for span in spans_in(text) if span.startswith(INLINE_STARTS) and "..." not in span and "…" not in span]


def simple_commands(line):
    """The words of each command of a line: `a && b | c > file` holds three. An unbalanced quote is prose, not a
    command."""
    lexer = shlex.shlex(re.sub(r" > \S+", "", line), posix=True, punctuation_chars="&|;")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    try:
        words = list(lexer)
    except ValueError:
        return
    command = []
    for word in [*words, ";"]:
        if word in OPERATORS:
            if command:
                yield command
            command = []
        else:
            command.append(word)


# --- checking a command ----------------------------------------------------------------------------------------------


def load(path):
    """The module of a script, imported under a name of its own."""
    name = f"guide_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]


def partition(words, separator):
    """str.partition for a list."""
    at = words.index(separator) if separator in words else len(words)
    return words[:at], words[at:at + 1], words[at + 1:]


def check_arguments(module, arguments, what):
    """The arguments are accepted by the module's own parser, none of them abbreviated."""
    if not hasattr(module, "build_parser"):
        if arguments:
            raise Wrong(f"{what} takes no arguments")
        return
    parser = module.build_parser()
    known = {option.replace("_", "-") for option in parser._option_string_actions}
    for word in arguments:
        flag = word.split("=")[0].replace("_", "-")
        if flag.startswith("--") and flag not in known:
            raise Wrong(f"{what} has no {flag}")
    try:
        parser.parse_args(arguments)
    except SystemExit as left:
        if left.code not in (0, None):
            raise Wrong(f"{what} refuses its arguments") from left
    except Exception as problem:
        raise Wrong(f"{what}: {problem}") from problem


def check_script(root, path, arguments):
    if path.startswith(("-", "/")):
        return
    if not (root / path).is_file():
        raise Wrong(f"{path} does not exist")
    if root == ROOT:
        own, _, script_arguments = map(list, partition(arguments, "--"))
        check_arguments(load(root / path), own, path)
        if script_arguments:  # of launch_distributed.py
            script = load(root / path).parse(own)[0].script
            check_script(root, script, script_arguments)


def check_python(root, arguments):
    if arguments[:1] == ["-m"] and len(arguments) > 1:
        name, rest = arguments[1], arguments[2:]
        if name == "torch.distributed.run":
            check_torchrun(root, rest)
        elif name.split(".")[0] == "aura":
            if not (root / (name.replace(".", "/") + ".py")).is_file():
                raise Wrong(f"there is no module {name}")
            check_arguments(importlib.import_module(name), rest, name)
    elif arguments and arguments[0].endswith(".py"):
        check_script(root, arguments[0], arguments[1:])


def check_torchrun(root, arguments):
    from torch.distributed.run import get_args_parser

    try:
        parsed = get_args_parser().parse_args(arguments)
    except SystemExit as left:
        if left.code:
            raise Wrong("torchrun refuses its arguments") from left
        return
    check_script(root, parsed.training_script, parsed.training_script_args)


def check_launch(root, variables, arguments):
    launcher = root / "ddp_launch.sh"
    if not launcher.is_file():
        raise Wrong("ddp_launch.sh does not exist")
    told = subprocess.run([str(launcher), "--help"], capture_output=True, text=True, timeout=60).stdout
    known = set(re.findall(r"\b[A-Z_]{3,}\b", told))
    unknown = [name for name in variables if name not in known and not name.startswith(BACKEND_VARIABLES)]
    if unknown:
        raise Wrong(f"ddp_launch.sh does not read {', '.join(unknown)}")
    # `true` in python's place accepts every probe and every command: what remains are the launcher's own checks.
    environment = {name: value for name, value in os.environ.items() if name not in known}
    done = subprocess.run([str(launcher), *arguments], cwd=root, capture_output=True, text=True, timeout=60,
                          env={**environment, "CUDA_VISIBLE_DEVICES": "", **variables, "PYTHON": "true"})
    if done.returncode:
        raise Wrong(done.stderr.strip())
    if arguments[:1] not in (["-h"], ["--help"]):
        script = variables.get("SCRIPT", "train_gpt2_spanish.py")
        check_script(root, script, [] if script == "test_ddp.py" and not arguments else arguments)


def services(root):
    text = (root / "docker-compose.yml").read_text(encoding="utf-8")
    return set(re.findall(r"^  ([\w-]+):", text.split("\nservices:", 1)[1], re.M))


def check_compose(root, variables, arguments):
    if not arguments or arguments[0] not in ("run", "build", "up"):
        return
    rest = arguments[1:]
    while rest and rest[0].startswith("-"):
        rest = rest[2:] if rest[0] in COMPOSE_VALUE_FLAGS else rest[1:]
    if not rest:
        return
    if rest[0] not in services(root):
        raise Wrong(f"docker-compose.yml has no service {rest[0]}")
    passed = (root / "docker-compose.yml").read_text(encoding="utf-8")
    lost = [name for name in variables if not re.search(rf"\b{name}\b", passed)]
    if lost:
        raise Wrong(f"docker-compose.yml does not pass on {', '.join(lost)}")
    if arguments[0] == "run" and rest[1:2] == ["bash"]:
        check(root, rest[-1], {name: value for name, value in variables.items() if name not in IMAGE_VARIABLES})
    elif arguments[0] == "run":
        check_words(root, rest[1:], {})


def check_make(root, arguments):
    makefile = root / "Makefile"
    rules = makefile.read_text(encoding="utf-8") if makefile.exists() else ""
    targets = re.findall(r"^([\w.-]+)\s*:(?!=)", rules, re.M)
    for word in arguments:
        if not word.startswith("-") and "=" not in word and word not in targets:
            raise Wrong(f"Makefile has no target {word}")


def check_words(root, words, inherited):
    variables = dict(inherited)
    while words:
        if re.match(r"^[A-Z_]+=", words[0]):
            name, _, value = words[0].partition("=")
            variables[name] = value
            words = words[1:]
        elif words[0] in WRAPPERS:
            words = words[1 + WRAPPERS[words[0]]:]
        else:
            break
    if not words:
        return
    program = words[0].rsplit("/", 1)[-1]
    if program in ("python", "python3"):
        check_python(root, words[1:])
    elif program == "torchrun":
        check_torchrun(root, words[1:])
    elif program == "ddp_launch.sh":
        check_launch(root, variables, words[1:])
    elif program == "make":
        check_make(root, words[1:])
    elif program == "sbatch":
        check_sbatch(root, variables, words[1:])
    elif words[:2] == ["docker", "compose"]:
        check_compose(root, variables, words[2:])
    elif program == "docker-compose":
        check_compose(root, variables, words[1:])


def check_sbatch(root, variables, words):
    """Options of sbatch that distributed.slurm has a line for, then its name, then the words of the script."""
    place = next((at for at, word in enumerate(words) if word.endswith("distributed.slurm")), None)
    if place is None:
        return
    for word in words[:place]:
        if word.startswith("--") and word.split("=")[0] not in sbatch_flags(root):
            raise Wrong(f"distributed.slurm has no line for {word}")
    check_python(root, [variables.get("SCRIPT", "train_distributed.py"), *words[place + 1:]])


def sbatch_flags(root):
    """The options of sbatch that distributed.slurm sets, or shows how to set."""
    return set(re.findall(r"^##?SBATCH (--[\w-]+)", (root / "distributed.slurm").read_text(encoding="utf-8"), re.M))


def check(root, line, variables=None):
    """Raise Wrong if a command of ours in `line` cannot be run as written."""
    for words in simple_commands(line):
        check_words(root, words, variables or {})


def shown_commands():
    return [pytest.param(line, id=f"{guide.name}: {line[:90]}") for guide in GUIDES
            for text in [guide.read_text(encoding="utf-8")] for line in [*commands_in(text), *inline_commands(text)]]


# --- the tests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", shown_commands())
def test_command_of_a_guide_parses(line):
    check(ROOT, line)


def test_flags_named_in_prose_exist():
    """`--lr` in a sentence is a flag of some script of ours, of torchrun or of a program we name."""
    from torch.distributed.run import get_args_parser

    known = set(FOREIGN_FLAGS) | sbatch_flags(ROOT) | set(get_args_parser()._option_string_actions)
    paths = [*ROOT.glob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    modules = [path for path in paths if "def build_parser" in path.read_text(encoding="utf-8")]
    for path in modules:
        known |= set(load(path).build_parser()._option_string_actions)
    for path in (ROOT / "aura").glob("*.py"):
        if "def build_parser" in path.read_text(encoding="utf-8"):
            known |= set(importlib.import_module(f"aura.{path.stem}").build_parser()._option_string_actions)
    named = {(guide.name, flag) for guide in GUIDES for span in spans_in(guide.read_text(encoding="utf-8"))
             if span.startswith("--") for flag in [re.split(r"[ =]", span)[0].replace("_", "-")]}
    wrong = sorted(f"{guide}: {flag}" for guide, flag in named if flag not in known)
    assert not wrong


def test_readmes_show_the_same_commands():
    english, spanish = ROOT / "README.md", ROOT / "README.es.md"
    if not (english.exists() and spanish.exists()):
        pytest.skip("one of the two READMEs is missing")
    shown = [list(commands_in(path.read_text(encoding="utf-8"))) for path in (english, spanish)]
    assert shown[0] == shown[1]


@pytest.mark.parametrize("guide", ["docker.md", "wsl2.md"])
def test_guides_show_commands(guide):
    """A guide whose commands are not found would pass every other test."""
    lines = list(commands_in((ROOT / "docs" / guide).read_text(encoding="utf-8")))
    assert any("train_gpt2_spanish.py" in line for line in lines)
    assert any("test_ddp.py" in line for line in lines)
    assert any("ddp_launch.sh" in line for line in lines)


@pytest.mark.parametrize("line, complaint", [
    ("sbatch --nodes=2 distributed.slurm --no-such-flag", "no --no-such-flag"),
    ("sbatch --bodes=2 distributed.slurm --strategy ddp", "--bodes=2"),
    ("SCRIPT=train_gpt2_spanish.py sbatch distributed.slurm --strategy ddp", "no --strategy"),
    ("python test_ddp.py --backend auto --no-such-flag", "no --no-such-flag"),
    ("python test_ddp.py --back auto", "no --back"),
    ("python test_ddp.py --backend cuda", "cuda"),
    ("python test_dpp.py", "does not exist"),
    ("cd x && .venv/bin/python test_ddp.py --no-such-flag", "no --no-such-flag"),
    ("torchrun --nproc_per_node=1 test_ddp.py --no-such-flag", "no --no-such-flag"),
    ("torchrun --no-such-flag test_ddp.py", "torchrun refuses"),
    ("python -m torch.distributed.run --nproc-per-node=1 test_ddp.py --no-such-flag", "no --no-such-flag"),
    ("python -m aura.nothing --prompt x", "no module aura.nothing"),
    ("make no-such-target", "no target"),
    ("SCRIPT=test_ddp.py ./ddp_launch.sh --no-such-flag", "no --no-such-flag"),
    ("NODES=2 SCRIPT=test_ddp.py ./ddp_launch.sh", "does not read NODES"),
    ("NNODES=2 SCRIPT=test_ddp.py ./ddp_launch.sh", "falta NODE_RANK"),
    ("docker compose run --rm trainr bash -lc 'python test_ddp.py'", "no service trainr"),
    ("docker compose run --rm -e X=1 trainer bash -lc 'python test_ddp.py --no-such-flag'", "no --no-such-flag"),
    ("NODES=2 docker compose run --rm trainer nvidia-smi", "does not pass on NODES"),
])
def test_a_wrong_command_is_found(line, complaint):
    with pytest.raises(Wrong, match=complaint):
        check(ROOT, line)


def test_reading_of_a_guide():
    text = ("```bash\n# a comment\n$ python a.py \\\n    --x 1\n\n```\nand `make\ntrain`, `python b.py ...`\n"
            "```powershell\npython c.py\n```\n```\nmake test\n```\n")
    assert list(commands_in(text)) == ["python a.py --x 1", "make test"]
    assert inline_commands(text) == ["make train"]
    assert list(simple_commands("A=1 b 'c d' && e | f; g # h")) == [["A=1", "b", "c d"], ["e"], ["f"], ["g"]]
