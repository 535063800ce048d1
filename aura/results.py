"""What a training run leaves behind to be compared with others: one JSON file per run in a folder of results."""

import json
import math
import reprlib
import secrets
import types
import typing
from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from aura.errors import UserError
from aura.files import explain, write_json
from aura.words import counted

STRATEGIES = ("none", "ddp", "fp16", "diloco", "fsdp")  # none: one process; the next three: of --sync
EXCHANGING = ("ddp", "fsdp")  # whole gradients or weights in every step; what that costs is measured
PADDINGS = ("dynamic", "fixed")
COMPLETE, SIGNALLED = "completo", "señal"
CHOICES = {"strategy": STRATEGIES, "padding": PADDINGS, "exit": (COMPLETE, SIGNALLED)}
POSITIVE = ("nodes", "processes", "threads", "batch_size", "grad_accum", "global_batch", "steps", "seconds",
            "samples_per_s", "step_s")
LATER = ("weights_crc32", "recipe", "computing")  # files of before do not have these
BEYOND = 1e30  # no figure of a run is as large, or as small as its inverse; a file that says so is not of one


def _now():
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Result:
    """One training run. Times in seconds, None where something was not measured.

    strategy: of STRATEGIES. processes: in all. devices, hosts, peak_memory_gb: one per rank (GB: 1e9 bytes). threads:
    per process. batch_size: per process and micro-batch; global_batch: samples of one step. padding: of PADDINGS.
    epochs: trained by this run. seconds: wall time of training, without preparing and evaluating. step_s: median of a
    step. alone_step_s: the same step without any exchange, on all ranks at once. communication_s: (step_s -
    alone_step_s) * steps, at least 0. exchange_bytes: of the whole tensors that a step exchanges, whatever the number
    of processes: for ddp the gradients once; for fsdp the weights each time they are gathered, and the gradients.
    exchange_s: of that exchange alone, nothing overlapping. exact_match, f1: 0..100. exit: COMPLETE or SIGNALLED.
    versions: of aura, torch, python, cuda (None without). finished: ISO 8601, UTC, to the second. weights_crc32: of
    what --model held, in hexadecimal; None where it was random, since with another seed that is the same model.
    recipe: the values, by name, of what else decides how the model learns; {} where that is not known. computing:
    likewise, of what decides how fast a step is and what memory it takes, and nothing else.
    """

    strategy: str
    nodes: int
    processes: int
    devices: list[str]
    hosts: list[str]
    threads: int
    model: str
    parameters: int
    dataset: str
    dataset_sha256: str
    train_examples: int
    max_len: int
    batch_size: int
    grad_accum: int
    global_batch: int
    precision: str
    padding: str
    seed: int
    epochs: float
    steps: int
    resumed: bool
    seconds: float
    samples_per_s: float
    step_s: float
    alone_step_s: float | None
    communication_s: float | None
    exchange_bytes: int
    exchange_s: float | None
    peak_memory_gb: list[float]
    val_loss: float | None
    exact_match: float | None
    f1: float | None
    exit: str
    versions: dict[str, str | None]
    finished: str = field(default_factory=_now)
    weights_crc32: str | None = None
    recipe: dict[str, float] = field(default_factory=dict)
    computing: dict[str, str] = field(default_factory=dict)

    @property
    def whole(self):
        """Whether this run alone is a training from its beginning to its end."""
        return self.exit == COMPLETE and not self.resumed

    @property
    def layout(self):
        """'2x1', nodes and processes on each; '3p-2n', processes and nodes, where not all nodes have as many."""
        on_each = Counter(self.hosts)  # fewer than the nodes, where several lie on one machine
        uneven = len(on_each) == self.nodes and len(set(on_each.values())) > 1
        if uneven or self.processes % self.nodes:
            return f"{self.processes}p-{self.nodes}n"
        return f"{self.nodes}x{self.processes // self.nodes}"


def save(directory, result):
    """Write `result` into a file of its own in `directory`, made if needed; returns the path.

    The names sort by the time of the end; the random part is the system's, which the seed of a run does not repeat.
    Raises OSError as the file system reports it.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    when = datetime.fromisoformat(result.finished).strftime("%Y%m%d-%H%M%S")
    path = directory / f"{when}-{result.strategy}-{result.layout}-{secrets.token_hex(3)}.json"
    # A loss that diverged is no figure, and JSON has no word for it.
    write_json(path, {name: None if isinstance(value, float) and not math.isfinite(value) else value
                      for name, value in asdict(result).items()})
    return path


def read(directory):
    """(results, notes): the runs in `directory` by time, and one Spanish line for each other file, which is skipped.

    Raises UserError where the folder is missing, cannot be read, or holds no run at all.
    """
    found, notes = [], []
    for path in _files(directory):
        try:
            values = json.loads(path.read_text(encoding="utf-8")) if path.suffix == ".json" else None
            problem = _problem(values)
        except OSError as error:
            problem = explain(error)
        except (ValueError, RecursionError):  # not UTF-8, not JSON, or brackets without end
            problem = "no es JSON válido"
        if problem:
            name = path.name if path.name.isprintable() else repr(path.name)
            notes.append(f"{name}: {problem}; no se tiene en cuenta")
        else:
            found.append(Result(**{name: values[name] for name in KINDS if name in values}))
    if not found:
        raise UserError(f"no hay ningún resultado en {str(directory)!r}" + (f" ({notes[0]})" if notes else "")
                        + ": entrene con train_distributed.py, que deja uno por ejecución, o indique otra carpeta; "
                        "las ejecuciones de los otros scripts se comparan con tensorboard --logdir logs")
    return sorted(found, key=lambda result: result.finished), notes


def _files(directory):
    """The files of `directory` that are not hidden, by name."""
    try:
        return sorted(path for path in Path(directory).iterdir() if path.is_file() and not path.name.startswith("."))
    except NotADirectoryError as problem:
        raise UserError(f"{str(directory)!r} no es una carpeta: indique la que contiene los resultados") from problem
    except OSError as problem:
        raise UserError(f"no se puede leer la carpeta de resultados {str(directory)!r} ({explain(problem)}): entrene "
                        "con train_distributed.py, que la crea, o indique otra") from problem


KINDS = typing.get_type_hints(Result)


def _problem(values):
    """Why `values` (of a JSON file) is no Result, in a few Spanish words; None where it is one."""
    if not isinstance(values, dict) or not values.keys() & KINDS.keys():
        return "no es un resultado de una ejecución"
    missing = [name for name in KINDS if name not in values and name not in LATER]
    if missing:
        return f"no tiene {', '.join(missing[:3])}" + (f" y {len(missing) - 3} más" if len(missing) > 3 else "")
    for name in (name for name in KINDS if name in values):
        value = values[name]
        bad = not _fits(value, KINDS[name]) or (name in CHOICES and value not in CHOICES[name])
        if bad or (name in POSITIVE and value == 0):
            return f"{name} no puede ser {reprlib.repr(value)}"
    for name in ("devices", "hosts", "peak_memory_gb"):
        if len(values[name]) != values["processes"]:
            return f"{name} tiene {len(values[name])} valores y no uno por proceso ({values['processes']})"
    if values["nodes"] > values["processes"] or (values["strategy"] == "none" and values["processes"] > 1):
        return (f"no hay {values['strategy']} de {counted(values['processes'], 'proceso')} en "
                f"{counted(values['nodes'], 'nodo')}")
    try:
        datetime.fromisoformat(values["finished"])
    except ValueError:
        return f"finished no puede ser {reprlib.repr(values['finished'])}"
    return None


def _fits(value, kind):
    """Whether a value of a JSON file is of the type `kind`; numbers finite and not negative, texts on one line."""
    if isinstance(kind, types.UnionType):
        return any(_fits(value, one) for one in typing.get_args(kind))
    inner = typing.get_args(kind)
    if typing.get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(one, inner[0]) for one in value)
    if typing.get_origin(kind) is dict:
        return isinstance(value, dict) and all(_fits(key, str) and _fits(one, inner[1]) for key, one in value.items())
    if kind is str:
        return isinstance(value, str) and value.isprintable()
    if kind in (int, float):
        whole_or_any = int if kind is int else (int, float)
        return isinstance(value, whole_or_any) and not isinstance(value, bool) \
            and (value == 0 or 1 / BEYOND < value < BEYOND)
    return isinstance(value, kind)
