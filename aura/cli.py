"""Arguments: one name everywhere, Spanish help, and every bad value said at once in one line."""

import argparse
import difflib
import errno
import gc
import math
import os
import re
import signal
import sys
import threading
import time

from aura.console import Console, outlive
from aura.errors import (
    EXIT_BAD_INPUT,
    EXIT_NO_READER,
    EXIT_OK,
    EXIT_SIGNAL_BASE,
    Stopped,
    TrainingFault,
    UserError,
    found_by_all,
)
from aura.files import explain, take_back
from aura.signals import LISTENED, ORDERLY, SPEAK_SECONDS
from aura.sync import FEW_LR, FEW_MOMENTUM, METHODS, SYNC_EVERY, SYNC_LR, SYNC_MOMENTUM
from aura.words import first_of

ALIKE = 0.85  # of difflib's ratio of two arguments from which on one is taken for a slip of the other
# What nanoGPT, litgpt and transformers call arguments that we have, for the hint of the one who comes from there.
ELSEWHERE = {
    "--bf16": ["--precision"], "--fp16": ["--precision"], "--dtype": ["--precision"],
    "--block-size": ["--seq-len"], "--max-seq-length": ["--max-len", "--seq-len"],
    "--learning-rate": ["--lr"], "--max-iters": ["--max-steps"], "--num-train-epochs": ["--epochs"],
    "--gradient-accumulation-steps": ["--grad-accum"], "--per-device-train-batch-size": ["--batch-size"],
    "--micro-batch-size": ["--batch-size"], "--save-steps": ["--checkpoint-freq"],
    "--out-dir": ["--output-dir", "--checkpoint-dir"],
    "--max-new-tokens": ["--length"], "--start": ["--prompt"], "--model-name-or-path": ["--model"],
    "--train-file": ["--dataset", "--dataset-name"]}


class _Bad(str):
    """A value that failed its check; kept through parsing so that all of them are reported together."""


def number(kind, low=None, high=None, above=None):
    """A checker for int or float arguments: `low <= value <= high` and `value > above`; finite."""
    limits = [text for bound, text in ((low, f"desde {low}"), (above, f"mayor que {above}"), (high, f"hasta {high}"))
              if bound is not None]
    noun = "un número entero" if kind is int else "un número"
    most = 2**63 if kind is int else math.inf

    def check(text):
        try:
            value = kind(text)
        except ValueError:
            return _Bad(f"{text!r} no es {noun}" + (f" ({', '.join(limits)})" if limits else ""))
        outside = ((low is not None and value < low) or (high is not None and value > high)
                   or (above is not None and value <= above))
        if outside or not abs(value) < most:
            unsaid = [] if outside else [f"hasta {most - 1}" if kind is int else "finito"]
            return _Bad(f"{text} está fuera de lo admitido ({', '.join(limits + unsaid)})")
        return value

    return check


def choice(*names):
    """A checker for arguments that take one of `names`."""

    def check(text):
        if text in names:
            return text
        near = difflib.get_close_matches(text, names, n=1)
        hint = f"; ¿quiso decir {near[0]!r}?" if near else ""
        return _Bad(f"{text!r} no es una de las opciones {', '.join(names)}{hint}")

    return check


def words(text):
    """A checker for text: Python keeps bytes that are no UTF-8 as surrogates, which no tokenizer and no file takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return _Bad(f"{text!r} no está en UTF-8: ponga el terminal en UTF-8 (locale dice en qué está)")
    return text


def path(text):
    """A checker for files and folders: an empty name would quietly mean the current folder, and no shell expands
    the ~ of --output=~/modelo."""
    return os.path.expanduser(text) if text.strip() else _Bad(f"{text!r} no es el nombre de un fichero o carpeta")


_UNSET = object()
NEGATIVE = re.compile(r"-(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$", re.IGNORECASE)  # Python 3.11's argparse knows no exponents


class _Formatter(argparse.HelpFormatter):
    """Help in Spanish with every default shown."""

    def add_usage(self, usage, actions, groups, prefix=None):
        return super().add_usage(usage, actions, groups, prefix or "uso: ")

    def _get_help_string(self, action):
        text = action.help or ""
        shown = action.default not in (None, False, "", argparse.SUPPRESS) and "%(default)" not in text
        return text + (" (por defecto: %(default)s)" if shown else "")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that takes dashes and underscores alike and reports all problems in one UserError. aliases:
    {house's name: the guide's} of the parsers of this process."""

    aliases = {}

    def __init__(self, **options):
        super().__init__(formatter_class=_Formatter, allow_abbrev=False, add_help=False, **options)
        self.register("type", None, words)
        self.add_argument("-h", "--help", action="help", help="muestra esta ayuda y termina")
        self._optionals.title, self._positionals.title = "opciones", "argumentos"
        self._negative_number_matcher = NEGATIVE

    def error(self, message):
        """Raise UserError with argparse's message in Spanish."""
        raise UserError(_translate(message))

    def _get_value(self, action, arg_string):
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as problem:  # of a type that raises ArgumentTypeError
            return _Bad(problem.message)

    def _get_values(self, action, arg_strings):
        # Python 3.11's argparse takes the value of --prompt=-- for what ends the options, and gives a list.
        if action.option_strings and action.nargs is None and arg_strings == ["--"]:
            return self._get_value(action, "--")
        return super()._get_values(action, arg_strings)

    def alias(self, flag, *names):
        """Let `names` mean the same as `flag`, and let run() name the argument by the last of them: one that a
        guide calls otherwise keeps the house's name too."""
        Parser.aliases[flag] = names[-1]
        action = self._option_string_actions[flag]
        action.option_strings = [*action.option_strings, *names]
        self._option_string_actions |= dict.fromkeys(names, action)

    @found_by_all
    def parse_args(self, args=None):
        """Parse `args` (sys.argv[1:] by default); `given` is the set of the names that were there, not filled in.

        Raises UserError naming every bad value and unknown argument.
        """
        words = list(sys.argv[1:] if args is None else args)
        actions = {}
        for action in self._actions:  # of several for one value, as --steps and a shorthand, the one that takes it
            if action.dest != "help" and (action.dest not in actions or actions[action.dest].nargs == 0):
                actions[action.dest] = action
        unset = argparse.Namespace(**dict.fromkeys(actions, _UNSET))
        parsed, unknown = self.parse_known_args([_dashed(word) for word in words], unset)
        parsed.given = {name for name, value in vars(parsed).items() if value is not _UNSET}
        for name in actions.keys() - parsed.given:
            value = actions[name].default
            setattr(parsed, name, self._get_value(actions[name], value) if isinstance(value, str) else value)
        flags = {name: (action.option_strings or [action.metavar or name])[-1] for name, action in actions.items()}
        problems = [f"{flags[name]}: {value}" for name, found in vars(parsed).items()
                    for value in (found if isinstance(found, list) else [found]) if isinstance(value, _Bad)]
        surplus = [word for word in unknown if not word.startswith("-")]
        problems += [self._unknown(word) for word in unknown if word.startswith("-")]
        if surplus:  # a pattern that the shell has made hundreds of names of
            problems.append(f"argumento{'s' if len(surplus) > 1 else ''} de más: "
                            f"{first_of(list(map(repr, surplus)), 4)}")
        if surplus == unknown and any(map(os.path.isfile, unknown)) and {"dataset", "dataset_name"} & actions.keys():
            problems.append("de varios ficheros, indique su carpeta")
        if problems:
            raise UserError("; ".join(problems) + f" (las opciones: {self.prog} --help)")
        return parsed

    def _unknown(self, word):
        near = self._near(word.split("=")[0])
        return f"argumento desconocido {word}" + (f"; ¿quiso decir {near[0]}?" if near else "")

    def _near(self, name):
        """The options that may be meant by `name`, the likeliest first."""
        if not name.startswith("--"):
            return []
        known = [flag for flag in self._option_string_actions if flag.startswith("--")]
        return [flag for flag in ELSEWHERE.get(name, ()) if flag in known] or [
            flag for flag in known if flag.startswith(f"{name}-") or name.startswith(f"{flag}-")
            or flag.endswith(name[1:]) or name.endswith(flag[1:])
        ] or [flag for flag in known if flag.startswith(name)] or difflib.get_close_matches(
            name, known, n=1, cutoff=ALIKE)


def _dashed(word):
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _translate(message):
    """Spanish for what argparse itself finds wrong."""
    head = message.removeprefix("argument ").partition(": ")[0].rpartition("/")[2]  # of several names, the guide's
    if "expected one argument" in message or "expected at least one argument" in message:
        return f"falta el valor de {head} (si empieza por un guion, escriba {head}=VALOR)"
    if message.startswith("the following arguments are required: "):
        return f"falta indicar {message.split(': ', 1)[1]} (--help lo explica)"
    if "not allowed with argument" in message:
        return f"{head} no se puede usar junto con {message.rpartition(' ')[2].rpartition('/')[2]}"
    if "ignored explicit argument" in message:
        return f"{head} no lleva valor"
    return message


def run(main):
    """Call `main()` and leave with its exit code, or with one line and the code that belongs to the problem."""
    # What importing torch has made stays: to look for garbage in it took a quarter of a short command's time.
    if "triton" not in sys.modules:  # whose bindings would report at the end that what is frozen leaks
        gc.freeze()
    # A log that is piped to a file must not lag behind by pages, nor die of a character its console lacks; and a line
    # is one write, also under `python -u`, or lines of several processes mix.
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (as long as the process)
        if not hasattr(stream, "reconfigure"):  # a notebook's: the console is not ours, nor the process ours to end
            print("error: en un cuaderno, esto se ejecuta en un proceso aparte (README.es.md dice cómo), no con %run",
                  file=stream)
            sys.exit(EXIT_BAD_INPUT)
        stream.reconfigure(line_buffering=True, write_through=False, errors="replace")
        setattr(sys, name, Console(stream))
    # What all know is said once: on each machine's console under torchrun, in the one log of all under SLURM.
    first = "LOCAL_RANK" if "TORCHELASTIC_RUN_ID" in os.environ else "SLURM_PROCID"
    spokesman = os.environ.get(first, "0") == "0"
    try:
        code = main()
        sys.stdout.flush()
    except (UserError, TrainingFault) as problem:
        if isinstance(problem, UserError):
            take_back()
        if spokesman or not getattr(problem, "same_everywhere", False):
            _last_words(f"error: {_as_called(str(problem))}")
        elif LISTENED not in os.environ:  # launch_distributed.py waits by itself
            _let_speak(problem.exit_code)
            if first == "LOCAL_RANK":  # torchrun would have ended us by now: this process alone has found it
                _last_words(f"error: {_as_called(str(problem))}")
        _leave_now(problem.exit_code)
    except KeyboardInterrupt as problem:
        _last_words("Interrumpido.")
        _leave_now(EXIT_SIGNAL_BASE + (problem.number if isinstance(problem, Stopped) else signal.SIGINT))
    except BrokenPipeError:  # whoever read our output went away, as `| head` does
        _leave_now(EXIT_NO_READER)
    except OSError as problem:  # of Path.exists() and its kin: any path that was given may lead here
        if problem.errno in (errno.EMFILE, errno.ENFILE):
            take_back()
            _last_words(f"error: {explain(problem)}; suba ese límite")
            _leave_now(EXIT_BAD_INPUT)
        if problem.filename is None or problem.errno not in (errno.EACCES, errno.ENAMETOOLONG):
            raise
        take_back()
        _last_words(f"error: {problem.filename!r}: {explain(problem)}; corrija la ruta o los permisos de sus carpetas")
        _leave_now(EXIT_BAD_INPUT)
    for number in ORDERLY:  # all is done: a signal would cut the interpreter's exit short, with another code
        signal.signal(number, signal.SIG_IGN)
    # A thread of gloo's that frees a tensor of Python's while the interpreter goes down aborts the process ("terminate
    # called without an active exception"). Those threads end with their group, which a cycle may keep alive.
    gc.collect()
    # So may any thread that nobody waits for: one of ours that a store was silent to and answers now, a library's.
    if any(thread.daemon for thread in threading.enumerate()):
        _leave_now(code or EXIT_OK)
    sys.exit(code)


def _as_called(text):
    """The message `text` with its arguments named as in the script's guide."""
    for flag, name in Parser.aliases.items():
        text = re.sub(rf"(?<![\w-]){flag}(?![\w-])", name, text)
    return text


def _last_words(text):
    outlive()  # the exit code is to come out, whatever became of the console
    sys.stdout.flush()
    # A value with control characters would break the line, or colour the terminal.
    print("".join(each if each.isprintable() else repr(each)[1:-1] for each in text), file=sys.stderr)


def _let_speak(code):
    """Stay for a while before leaving in silence: torchrun, and srun where it was told so, kill the others as soon as
    one is gone, and the one that says why may be slower. Once that one has left, they end us."""
    for number in ORDERLY:
        signal.signal(number, lambda *_: os._exit(code))
    time.sleep(SPEAK_SECONDS)


def _leave_now(code):
    """Leave without the interpreter's good-byes: a thread of gloo's may be stuck in a collective that nobody will ever
    join, or abort the process on the way out."""
    outlive()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def add_distributed(parser, strategy=False):
    """Arguments that say where this process stands among the others. strategy: --strategy ddp|fsdp in place of --fsdp,
    for a script that compares the two; it gives args.fsdp as well."""
    group = parser.add_argument_group("varios procesos y máquinas")
    group.add_argument("--distributed", action="store_true",
                       help="entrena con todos los procesos lanzados por torchrun, srun o a mano")
    group.add_argument("--backend", type=choice("auto", "nccl", "gloo"), default="auto",
                       help="auto, nccl o gloo; auto: NCCL con GPU, gloo sin ella; si NCCL no funciona, todos a gloo")
    if strategy:
        group.add_argument("--strategy", type=choice("ddp", "fsdp"), default="ddp",
                           help="ddp: cada proceso tiene el modelo entero; fsdp: reparte pesos, gradientes y "
                                "optimizador entre los procesos (con GPU necesita NCCL)")
    else:
        group.add_argument("--fsdp", action="store_true",
                           help="reparte pesos, gradientes y optimizador entre los procesos, para modelos que no caben "
                                "en una GPU (con GPU necesita NCCL); con un solo proceso no cambia nada")
    group.add_argument("--sync", type=choice("auto", *METHODS), default="auto", metavar="auto|ddp|fp16|diloco",
                       help="cómo aprenden unos procesos de otros. ddp: promedian los gradientes en cada paso; fp16: "
                            "igual, con la mitad de los bytes; diloco: cada uno da --sync-every pasos por su cuenta y "
                            "después acuerdan los pesos, para redes lentas; auto: ddp dentro de una máquina, y entre "
                            "varias lo más rápido según se mide al empezar")
    group.add_argument("--sync-every", type=number(int, low=1, high=1_000_000), default=SYNC_EVERY, metavar="PASOS",
                       help="con diloco, pasos de cada proceso entre dos acuerdos")
    group.add_argument("--sync-lr", type=number(float, above=0, high=10), metavar="TASA",
                       help="con diloco, qué parte del avance medio se toma en cada acuerdo (por defecto: "
                            f"de {FEW_LR} a {SYNC_LR}, menor cuantos más acuerdos haya en todo el entrenamiento)")
    group.add_argument("--sync-momentum", type=number(float, low=0, high=0.999), metavar="M",
                       help=f"con diloco, inercia de los acuerdos (por defecto: de {FEW_MOMENTUM} a "
                            f"{SYNC_MOMENTUM}, mayor cuantos más acuerdos haya)")
    add_placement(group)
    group.add_argument("--dist-timeout", type=number(float, above=0, high=1e6), default=600.0, metavar="SEGUNDOS",
                       help="cuánto se espera a una máquina que no responde")


def add_placement(group):
    """The flags of a process that is started by hand."""
    group.add_argument("--rank", type=number(int, low=0), help="número global de este proceso")
    group.add_argument("--world-size", type=number(int, low=1), help="cuántos procesos hay en total")
    group.add_argument("--local-rank", type=number(int, low=0), help="número de este proceso dentro de su máquina")
    group.add_argument("--master-addr", help="dirección de la máquina del proceso 0")
    group.add_argument("--master-port", type=number(int, low=1, high=65535), help="puerto libre en esa máquina")


def add_data(parser):
    """Arguments that choose and prepare the text."""
    group = parser.add_argument_group("datos")
    group.add_argument("--dataset-name", type=path, metavar="NOMBRE|RUTA",
                       help="muestra (incluida); la ruta de un .txt o .jsonl (también .gz) o de una carpeta; si no la "
                            "hay, wikipedia, oscar, c4, spanish u otro del Hub, propietario/nombre; sin ella, lo "
                            "último que se preparó en --data-dir")
    group.add_argument("--dataset-max-tokens", type=number(int, low=1), metavar="N",
                       help="al preparar, se detiene al llegar a N tokens, también contando los de validación, que son "
                            "así menos (del Hub, 100 millones si no se indica)")
    group.add_argument("--data-dir", type=path, default="./Data", help="carpeta de los datos preparados")
    group.add_argument("--tokenizer", type=path, metavar="RUTA|NOMBRE",
                       help="modelo de SentencePiece o tokenizer.json, una carpeta con uno de ellos, o un nombre de "
                            "Hugging Face")
    group.add_argument("--vocab-size", type=number(int, low=1), help="piezas del tokenizador (según el preset)")
    group.add_argument("--val-fraction", type=number(float, low=0, high=0.5), metavar="F",
                       help="parte de los documentos para validación (según el tamaño del corpus)")
    group.add_argument("--num-workers", type=number(int, low=0, high=1024), default=0, metavar="N",
                       help="hilos que pasan el texto a tokens; 0: todos los núcleos")
    group.add_argument("--prepare", action="store_true", help="prepara los datos y termina")


def add_training(parser, untrained=None):
    """Arguments of the recipe; None means that the preset decides. Returns their group, for those of one script.
    untrained: Spanish for what --max-steps 0 does, in a script that takes it."""
    group = parser.add_argument_group("entrenamiento (lo que no se indica lo decide el preset)")
    group.add_argument("--epochs", type=number(int, low=1), help="vueltas al corpus")
    group.add_argument("--max-steps", type=number(int, low=0 if untrained else 1), metavar="N",
                       help="pasos; si se indica, no cuenta --epochs" + (f"; 0: {untrained}" if untrained else ""))
    group.add_argument("--batch-size", type=number(int, low=1), help="secuencias por proceso y microlote")
    group.add_argument("--grad-accum", type=number(int, low=1), help="microlotes por paso")
    group.add_argument("--lr", type=number(float, above=0), help="tasa de aprendizaje máxima")
    group.add_argument("--min-lr-ratio", type=number(float, low=0, high=1), default=0.1,
                       help="tasa de aprendizaje final, como fracción de la máxima")
    group.add_argument("--weight-decay", type=number(float, low=0), default=0.1,
                       help="decaimiento de los pesos, solo en las matrices")
    group.add_argument("--warmup-ratio", type=number(float, low=0, high=1),
                       help="fracción de los pasos en que la tasa sube")
    group.add_argument("--grad-clip", type=number(float, low=0), default=1.0,
                       help="norma máxima del gradiente; 0: sin límite")
    group.add_argument("--ema", type=number(float, low=0, high=0.999999), default=0.0, metavar="FRACCIÓN",
                       help="valida y guarda la media móvil de los pesos, de la que cada paso conserva esta parte (p. "
                            "ej. 0.999; 4 bytes más por parámetro); 0: sin media")
    group.add_argument("--precision", type=choice("auto", "bf16", "fp16", "fp32"), default="auto",
                       help="auto, bf16, fp16 o fp32; auto: bf16 o fp16 con GPU, fp32 en CPU")
    group.add_argument("--attention", type=choice("auto", "fused", "sdpa", "reference"), default="auto",
                       help="fused: núcleos propios para atención, normas y pérdida; sdpa: los de torch; reference: "
                       "la fórmula escrita en torch; auto: fused donde se puedan compilar, si no sdpa; en GPU, "
                       "sdpa o lo más rápido según benchmarks/gpu.py --learn; la H200 viene medida")
    group.add_argument("--seed", type=number(int, low=0, high=2**63 - 1), default=1234,
                       help="semilla de todo lo aleatorio")
    group.add_argument("--compile", action="store_true", help="usa torch.compile")
    group.add_argument("--nan-policy", type=choice("restart", "skip", "stop"), default="restart",
                       help="ante un NaN: restart (restaura los pesos), skip (se salta el paso) o stop (se detiene)")
    return group


def add_beta2(group):
    """AdamW's second beta, of scripts whose presets choose it by the tokens of a step."""
    group.add_argument("--beta2", type=number(float, low=0, high=0.99999),
                       help="parte del segundo momento de AdamW que conserva cada paso; mayor si un paso tiene pocos "
                            "tokens")


def add_logging(parser, validated="cada época, o cada 500 pasos si llega antes"):
    """Arguments of what a run tells. validated: Spanish for how often it validates by default."""
    group = parser.add_argument_group("registro")
    group.add_argument("--log-interval", type=number(int, low=1), default=10, metavar="PASOS",
                       help="cada cuánto se informa")
    group.add_argument("--log-dir", type=path, default="./logs", help="train.csv, loss.png y TensorBoard")
    group.add_argument("--eval-interval", type=number(int, low=1), metavar="PASOS",
                       help=f"cada cuánto se valida, además de al acabar una época (por defecto: {validated})")


def add_samples(parser):
    """Arguments of what a language model shows as it learns."""
    group = parser.add_argument_group("validación y muestras")
    group.add_argument("--eval-windows", type=number(int, low=0), default=400, metavar="N",
                       help="secuencias de validación, repartidas por igual; 0: todas")
    group.add_argument("--sample-prompt", default="En un lugar", help="principio del texto de muestra")
    group.add_argument("--sample-length", type=number(int, low=0), default=80, metavar="TOKENS",
                       help="longitud de la muestra de cada época; 0: ninguna")


def add_checkpoints(parser, output, handed="modelo final; a su lado, configuración y tokenizador"):
    """Arguments of what a run keeps. output: default name of the final model. handed: Spanish for what it is."""
    group = parser.add_argument_group("puntos de control")
    group.add_argument("--checkpoint-dir", type=path, default="./checkpoints",
                       help="carpeta de los puntos de control")
    group.add_argument("--checkpoint-freq", type=number(int, low=0), default=500, metavar="PASOS",
                       help="cada cuánto se guarda uno; 0: solo al final o al parar")
    group.add_argument("--keep-checkpoints", type=number(int, low=1), default=3, metavar="N",
                       help="cuántos se conservan")
    group.add_argument("--keep-every", type=number(int, low=0), default=0, metavar="PASOS",
                       help="conserva además uno cada tantos pasos; 0: ninguno")
    group.add_argument("--resume", type=path, default="auto", metavar="auto|none|RUTA",
                       help="auto: el último que esté entero; none: empezar de cero")
    group.add_argument("--output", type=path, default=output, help=handed)
