"""Arguments: every bad value in one line, dashes and underscores alike, Spanish help."""

import argparse
import socket
import subprocess
import sys

import pytest

import train_gpt2_spanish as script
from aura import cli
from aura.errors import UserError
from tests.support import ROOT, environment, run


def parse(*words):
    return script.build_parser().parse_args(list(words))


def test_underscores_are_dashes():
    assert parse("--batch_size", "3", "--max_steps=7").batch_size == 3
    assert parse("--batch_size", "3", "--max_steps=7").max_steps == 7


def test_underscores_in_values_stay():
    assert parse("--sample_prompt=a_b", "--data-dir", "x_y").sample_prompt == "a_b"
    assert parse("--data-dir", "x_y").data_dir == "x_y"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a folder in use cannot be removed, or keeps its name")
@pytest.mark.parametrize("name", ["train_gpt2_spanish.py", "monitor.py"])
def test_a_folder_that_is_gone_is_named(tmp_path, name):
    gone = tmp_path / "gone"
    gone.mkdir()
    start = f"os.execv(sys.executable, ['python', {str(ROOT / name)!r}, '--help'])"
    code, said = run(["-c", f"import os, sys; os.rmdir(os.getcwd()); {start}"], gone)
    assert (code, said.splitlines()) == (2, [
        "error: la carpeta desde la que se ejecuta ya no está: entre en otra con cd"])


@pytest.mark.parametrize("words, pieces", [
    (["--batch-size", "0"], ["--batch-size", "0", "desde 1"]),
    (["--batch-size", "dos"], ["'dos'", "entero"]),
    (["--lr", "nan"], ["--lr", "nan", "finito"]),
    (["--lr", "inf"], ["--lr", "inf", "(mayor que 0, finito)"]),
    (["--max-steps", "9" * 400], ["--max-steps", "fuera de lo admitido"]),
    (["--epochs", str(2**63)], ["--epochs", f"fuera de lo admitido (desde 1, hasta {2**63 - 1})"]),
    (["--sample-prompt", "ma\udcf1ana"], ["--sample-prompt", r"'ma\udcf1ana' no está en UTF-8"]),
    (["--dropout", "1.5"], ["--dropout", "1.5"]),
    (["--precision", "bf61"], ["'bf61'", "¿quiso decir 'bf16'?"]),
    (["--presett", "demo"], ["--presett", "¿quiso decir --preset?"]),
    (["--lr"], ["falta el valor", "--lr=VALOR"]), (["--lr", "-1e-3"], ["--lr: -1e-3 está fuera"]),
    (["--lr=--"], ["--lr: '--' no es un número"]), (["--data-dir=--", "--max-steps=--"], ["--max-steps: '--'"]),
    (["--dataset-nme", __file__], ["¿quiso decir --dataset-name?", f"de más: {__file__!r} (las opciones:"]),
    (["sobra"], ["de más", "'sobra'"]), ([__file__], ["de más", "; de varios ficheros, indique su carpeta (las"]),
    (["a.txt", "--nope", *"bcdefg"], ["--nope; argumentos de más: 'a.txt', 'b', 'c', 'd' y 3 más (las opciones:"]),
    (["--block_size=32"], ["desconocido --block-size=32; ¿quiso decir --seq-len?"]),
    (["--learning_rate", "1e-3"], ["¿quiso decir --lr?"]), (["--dtype", "bf16"], ["¿quiso decir --precision?"]),
    (["--steps", "3"], ["¿quiso decir --max-steps?"]), (["--do-train"], ["desconocido --do-train (las opciones:"]),
    (["--check", "3"], ["¿quiso decir --checkpoint-dir?"]),
    (["--batch", "3"], ["¿quiso decir --batch-size?"]), (["--clip", "1"], ["¿quiso decir --grad-clip?"]),
    (["--model_preset", "demo"], ["¿quiso decir --preset?"]), (["--lora"], ["desconocido --lora (las opciones:"]),
    (["-n"], ["desconocido -n (las opciones:"]),
    (["--batch-size", "-1", "--lr", "x", "--nope"], ["--batch-size", "--lr", "--nope"]),
])
def test_bad_values_are_named_together(words, pieces):
    with pytest.raises(UserError) as problem:
        parse(*words)
    assert "\n" not in str(problem.value)
    for piece in pieces:
        assert piece in str(problem.value)


def test_every_numeric_flag_refuses_words_and_every_choice_refuses_others():
    parser = script.build_parser()
    checked = [action for action in parser._actions if action.type not in (None, str, cli.path)]
    assert len(checked) > 20
    for action in checked:
        with pytest.raises(UserError, match=action.option_strings[-1]):
            parser.parse_args([action.option_strings[-1], "¿eh?"])


def test_every_place_refuses_an_empty_name():
    parser = script.build_parser()
    places = [action for action in parser._actions if action.type is cli.path]
    assert len(places) == 8
    for action in places:
        with pytest.raises(UserError, match=action.option_strings[-1]):
            parser.parse_args([action.option_strings[-1], ""])


def parser_of_lists():
    def even(text):
        if int(text) % 2:
            raise argparse.ArgumentTypeError(f"{text!r} es impar")
        return int(text)

    parser = cli.Parser(prog="p")
    parser.add_argument("--numbers", type=lambda text: [even(part) for part in text.split(",")], default="2,4",
                        help="pares")
    parser.add_argument("--files", nargs="+", type=even)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=even, default=8)
    length.add_argument("--quick", dest="steps", action="store_const", const=2)
    return parser


def test_defaults_in_words_are_read_as_values_are():
    assert vars(parser_of_lists().parse_args([])) == {"numbers": [2, 4], "files": None, "steps": 8, "given": set()}
    assert parser_of_lists().parse_args(["--quick"]).steps == 2
    assert "(por defecto: 2,4)" in parser_of_lists().format_help()


@pytest.mark.parametrize("words, told", [
    (["--numbers", "4,5", "--files", "2", "3", "7"],
     "--numbers: '5' es impar; --files: '3' es impar; --files: '7' es impar"),
    (["--steps", "4", "--quick"], "--quick no se puede usar junto con --steps"),
])
def test_types_that_raise_and_arguments_that_exclude_each_other(words, told):
    with pytest.raises(UserError, match=told):
        parser_of_lists().parse_args(words)


def test_help_is_spanish_and_shows_defaults():
    text = " ".join(script.build_parser().format_help().split())
    assert text.startswith("uso:")
    assert "(por defecto: ./checkpoints)" in text
    for english in ("usage", "default:", "show this help", "options:"):
        assert english not in text


def test_bad_argument_ends_with_one_line_and_code_2(tmp_path):
    for module in ("aura.ops", "aura.extension"):
        code, output = run(["-m", module, "--nada"], tmp_path)
        assert code == 2 and f"--nada (las opciones: python -m {module} --help)" in output
    code, output = run([ROOT / "train_gpt2_spanish.py", "--preset", "gtp2"], tmp_path)
    assert code == 2
    assert output.count("\n") == 1
    assert output.startswith("error: --preset: 'gtp2'")
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_is_not_there_is_told_first_and_by_the_name_of_the_guide(tmp_path):
    """Before anything is prepared for it, or made."""
    for name, flag in (("train_gpt2_spanish.py", "--resume"), ("train_tensordock.py", "--resume-from")):
        code, output = run([ROOT / name, flag, "nada"], tmp_path)
        assert code == 2 and output.startswith(f"error: {flag} 'nada': no existe; use auto, none, un punto")
        assert output.count("\n") == 1 and list(tmp_path.iterdir()) == []


def test_a_missing_value_is_told_with_the_name_that_the_guide_gives(tmp_path):
    assert run([ROOT / "hrm_training_small_100m.py", "--dataset"], tmp_path) == (
        2, "error: falta el valor de --dataset (si empieza por un guion, escriba --dataset=VALOR)\n")


def test_a_value_that_is_two_dashes_is_one():
    assert parse("--sample-prompt=--").sample_prompt == "--" and parse("--lr", "1E-3").lr == 1e-3


def test_control_characters_of_a_value_neither_break_the_line_nor_colour_it(tmp_path):
    code, output = run([ROOT / "train_gpt2_spanish.py", "--x\ny\x1b[31m", "--dropout=3\n"], tmp_path)
    assert code == 2 and output.count("\n") == 1 and r"--x\ny\x1b[31m" in output, output


def test_run_turns_exceptions_into_codes(tmp_path):
    path = tmp_path / "fails.py"
    path.write_text("""from aura import cli
from aura.errors import UserError

def main():
    print("antes", end="")
    raise UserError("el valor 7 no sirve; use 8")

cli.run(main)
""")
    assert run([path], tmp_path) == (2, "anteserror: el valor 7 no sirve; use 8\n")


def test_a_path_that_the_system_does_not_look_at_is_one_line(tmp_path):
    """A folder that one may not enter would do as well, but for root."""
    name, export = "a" * 300, ["-m", "aura.export", "--checkpoint"]
    assert run([*export, name, "--to", "hf", "salida"], tmp_path) == (
        2, f"error: --checkpoint {name!r}: no se puede leer (el nombre es demasiado largo); compruebe la ruta y sus "
           "permisos\n")
    assert run([*export, "falta.pth", "--to", "hf", name], tmp_path)[1].startswith(f"error: --to hf {name!r}: no se")
    for flag in ("--resume", "--output"):
        code, output = run([ROOT / "train_gpt2_spanish.py", "--preset", "demo", flag, f"{name}.pth"], tmp_path)
        assert code == 2 and output.startswith(f"error: {flag} '{name}.pth': no se puede leer (el nombre es"), output
    assert not list(tmp_path.iterdir())
    (tmp_path / "looks.py").write_text(f"import os\nfrom aura import cli\ncli.run(lambda: os.stat({name!r}))")
    assert run(["looks.py"], tmp_path) == (2, f"error: {name!r}: el nombre es demasiado largo; corrija la ruta o los "
                                              "permisos de sus carpetas\n")


def test_a_folder_that_has_gone_is_one_line(tmp_path):
    (tmp_path / "gone.py").write_text("import os\nos.mkdir('va'); os.chdir('va'); os.rmdir('../va')\n"
                                      "from aura import cli\ncli.run(lambda: 0)")
    code, output = run(["gone.py"], tmp_path)
    assert code == 2 and output.startswith("error: la carpeta desde la que se ejecuta ya no está"), output
    assert output.count("\n") == 1


def test_without_a_temporary_folder_programs_run_and_who_needs_one_says_so(tmp_path):
    """No file may grow, as on full disks: what torch imports looks for such a folder by writing into it."""
    def limited(*words):
        return run(["-c", "import os, resource, sys\nresource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
                          "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])", *words], tmp_path, fresh=True)

    code, output = limited(ROOT / "train_gpt2_spanish.py", "--preset", "nano")
    assert code == 2 and output.startswith("error: --preset: 'nano' no es una de las opciones"), output
    code, output = limited(ROOT / "launch_distributed.py", "--gpus", "2")
    assert code == 2 and output.splitlines()[-1].startswith("error: no se puede escribir en la carpeta de fich"), output


def test_too_few_open_files_are_one_line(tmp_path):
    (tmp_path / "opens.py").write_text("import resource\nfrom aura import cli\n"
                                       "def main():\n"
                                       "    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))\n"
                                       "    import socket\n    socket.socketpair()\n"
                                       "cli.run(main)")
    code, output = run(["opens.py"], tmp_path)
    assert code == 2 and output.startswith("error: este proceso tiene demasiados ficheros abiertos"), output


def test_the_home_folder_is_found_where_no_shell_looks(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cli.path("~/modelo.pth") == f"{tmp_path}/modelo.pth" and cli.path("a~/b") == "a~/b"


def test_a_ctrl_c_while_modules_are_imported_is_one_line(tmp_path):
    program = "import signal, aura.cli\nsignal.raise_signal(signal.{})\n1 / 0"
    assert run(["-c", program.format("SIGINT")], tmp_path, fresh=True) == (-2, "Interrumpido.\n")
    code, output = run(["-c", program.format("SIGCHLD")], tmp_path)
    assert code == 1 and "Traceback" in output and "ZeroDivisionError" in output


@pytest.mark.parametrize("words", [
    ["train_gpt2_spanish.py"], ["train_tensordock.py"], ["train_distributed.py"], ["hrm_training_small_100m.py"],
    ["hrm_training_large_1b.py"], ["test_ddp.py"], ["-m", "aura.generate"], ["-m", "aura.evaluate"],
    ["-m", "aura.export"], ["-m", "aura.compare"], ["-m", "aura.ops"]], ids=lambda words: words[-1])
def test_a_python_outside_the_environment_is_one_line(words):
    """-S takes site-packages away: what a newcomer sees who forgot to activate .venv."""
    code, output = run(["-S", *words], ROOT, fresh=True)
    assert (code, output.count("\n")) == (2, 1) and output.startswith("error: a este Python ("), output
    assert ".venv/bin/activate" in output and "pip install -r requirements.txt" in output
    code, output = run(["-S", "-c", "import aura, nada_de_esto"], ROOT, fresh=True)
    assert code == 1 and "ModuleNotFoundError: No module named 'nada_de_esto'" in output


def test_in_a_notebooks_own_process_nothing_is_run(tmp_path):
    """Whose console is not a file's: the process goes on, and is not ours to end."""
    program = """import io, sys
from aura import cli
console, sys.stdout = sys.stdout, io.StringIO()
try:
    cli.run(lambda: print("hecho"))
except SystemExit as left:
    print(left.code, sys.stdout.getvalue(), file=console)"""
    code, output = run(["-c", program], tmp_path)
    assert code == 0 and output.startswith("2 error: en un cuaderno, ") and "hecho" not in output, output


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_that_comes_while_the_interpreter_leaves_changes_nothing(tmp_path, name):
    program = f"""import atexit, signal
from aura import cli
atexit.register(lambda: signal.raise_signal(signal.{name}))
cli.run(lambda: print("hecho") or 0)"""
    assert run(["-c", program], tmp_path) == (0, "hecho\n")


def test_who_is_left_behind_in_a_wait_for_the_store_does_not_wake_in_a_dying_interpreter(tmp_path):
    """Which aborts the process, though all is done."""
    code, output = run(["-c", """import atexit, contextlib, threading
from aura import cli
from aura.backend import within
atexit.register(lambda: print("despedida"))
def main():
    with contextlib.suppress(TimeoutError):
        within(0.1, threading.Event().wait)
    print("hecho")
    return 0
cli.run(main)"""], tmp_path)
    assert (code, output) == (0, "hecho\n")


@pytest.mark.parametrize("spoken, variables", [
    (True, {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "LOCAL_RANK": "0"}),  # the first of the second machine
    (True, {"SLURM_PROCID": "0"}),
    (False, {"SLURM_PROCID": "1", "SLURM_LOCALID": "0"}),
    (True, {"RANK": "1"}),  # by hand
])
def test_what_all_know_is_said_once_on_each_console(tmp_path, spoken, variables):
    words = ["-c", "from aura import cli, distributed\ncli.SPEAK_SECONDS = 0\n"
             "cli.run(lambda: cli.Parser().parse_args(['--no']))"]
    code, output = run(words, tmp_path, **variables)
    assert code == 2 and output.count("\n") == output.count("error: argumento desconocido --no") == spoken


@pytest.mark.parametrize("ended", [True, False])
def test_under_torchrun_what_one_rank_alone_has_found_is_said_once_nobody_else_speaks(tmp_path, ended):
    """As soon as the first rank has said the same and left, torchrun ends the others; else that one found nothing."""
    words = ["-c", "import os, signal\nfrom aura import cli\ncli.SPEAK_SECONDS = 0\n"
             f"cli.time.sleep = lambda _: {ended} and os.kill(os.getpid(), signal.SIGTERM)\n"
             "cli.run(lambda: cli.Parser().parse_args(['--no']))"]
    code, output = run(words, tmp_path, TORCHELASTIC_RUN_ID="x", RANK="1", LOCAL_RANK="1")
    assert code == 2 and output.count("error: argumento desconocido --no") == (not ended), output


@pytest.mark.parametrize("flags", [["-u"], []])
def test_a_line_is_one_write_so_that_lines_of_several_processes_do_not_mix(flags):
    """A datagram socket keeps every write apart."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    program = ("import sys\nfrom aura import cli\n"
               "def main():\n    print('una', 'línea')\n    print('otra', file=sys.stderr)\ncli.run(main)")
    with ours, theirs:
        done = subprocess.run([sys.executable, *flags, "-c", program], env=environment(), stdout=theirs,
                              stderr=theirs, timeout=60)
        ours.setblocking(False)
        assert done.returncode == 0
        assert [ours.recv(100) for _ in range(2)] == ["una línea\n".encode(), b"otra\n"]
