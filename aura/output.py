"""The model that a run hands over: its weights and, beside them, what another program needs to use them."""

import contextlib
import hashlib
import json
import os
import platform
import shlex
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import torch

import aura
from aura import tokenizer as tokenizers
from aura.checkpoint import found, read, save_file, step_of
from aura.errors import TrainingFault, UserError
from aura.files import MISSHAPEN, explain, path_called, regular, remove_partials, set_aside, write_bytes, write_json

DESCRIPTION = "model_config.json"  # in a folder of one model
DESCRIPTION_MOST = 10**6  # bytes; what is larger is no description, and among data there may be gigabytes of JSON


def plain_arguments(args):
    """The arguments that are plain values, as a dict."""
    return {key: value for key, value in vars(args).items() if isinstance(value, str | int | float | bool | None)}


def versions():
    """What a file written now depends on."""
    return {"aura": aura.__version__, "torch": torch.__version__.split("+")[0], "python": platform.python_version()}


def used(args, dist, precision, optimizer):
    """What a run was trained with where its arguments leave that open, or do not name it."""
    return {"precision": precision.name, "processes": dist.world_size,
            "sequences_per_step": args.batch_size * args.grad_accum * dist.world_size, "versions": versions(),
            **{name: optimizer.defaults[name] for name in ("betas", "eps") if name in optimizer.defaults}}


def save_output(args, weights, config, data, tokenizer, progress, description, named, used):
    """Write the weights to --output and, beside them, what another program needs: configuration and tokenizer.

    model.pth -> model.json, model.tokenizer.model (or .json); in a folder of one model, `description` and
    tokenizer.model. named: the checkpoint to go on from. used: as used() gives it. The model of another run is moved
    aside. Raises TrainingFault when the disk refuses.
    """
    path, beside = Path(args.output), _beside(args, description)
    vocabularies = dict(zip(tokenizers.NAMES, companions(args, description)[1:], strict=True))
    vocabulary = vocabularies[tokenizer.file_name]
    try:  # raises for another model that has ended since this one began
        other = other_run(args, description)
    except UserError as problem:
        raise TrainingFault(f"no se pudo guardar el modelo: {problem}, y repita la orden con él, que lo guardará; "
                            f"{named}") from problem
    try:
        if other or (path.exists() and not beside.exists()):
            moved = set_aside([path, beside, *vocabularies.values()], path.parent)
            whose = "de otra ejecución" if other else f"que sin {beside.name} no se sabe de qué ejecución es"
            print(f"Aviso: el modelo que había en {path}, {whose}, se ha movido a {moved}.")
        for each in (path, vocabulary, beside):
            real = Path(os.path.realpath(each))  # beside which it is written, as atomic_write() does
            remove_partials(real.parent, real.name)
        save_file(path, weights)
        write_bytes(vocabulary, tokenizer.model)
        write_json(beside, {
            "architecture": type(config).__name__.removesuffix("Config"), "config": asdict(config),
            "steps": progress.step, "tokens": progress.tokens,
            "dataset": data.meta["name"], "dataset_sha256": data.sha256,
            "tokenizer": vocabulary.name, "tokenizer_sha256": tokenizer.sha256,
            "parameters": config.parameters(), "arguments": plain_arguments(args), "used": used,
            "command": sys.argv})
    except OSError as problem:
        raise TrainingFault(f"no se pudo guardar {str(path)!r}: {explain(problem)}; corríjalo y "
                            f"repita la misma orden, que lo guardará; {named}") from problem
    print(f"Modelo guardado en {path}, con {beside.name} y {vocabulary.name}.")
    print(f"Pruébelo: python -m aura.generate --checkpoint {shlex.quote(str(path))} --prompt \"En un lugar\"")


def _beside(args, description):
    """Where the description of the model at --output lies. description: its name in a folder of one model, or None."""
    path = Path(args.output)
    if path.is_dir():  # of train_distributed.py
        return path / "metrics.json"
    return path.with_name(description) if description else path.with_suffix(".json")


def companions(args, description=None):
    """Where what another program needs lies beside the model at --output: its description, then its tokenizer under
    each of the names that it may have (tokenizer.NAMES)."""
    path = Path(args.output)
    named_as = path.with_name if description else lambda name: path.with_suffix(f".{name}")
    return [_beside(args, description), *map(named_as, tokenizers.NAMES)]


def require_room_beside(args, description=None):
    """Raise UserError where a folder or a pipe has the name of one of companions()."""
    for path in companions(args, description):
        if path.exists() and not path.is_file():
            raise UserError(f"--output {args.output!r}: a su lado se guarda {path.name!r}, y lo que ahí se llama así "
                            "no es un fichero: cámbielo de nombre, o indique otro --output")


def written_by(beside):
    """(name of the model, its --checkpoint-dir, the way there from the model's folder) in the description `beside`, or
    None where that is nothing that a run has written."""
    try:
        arguments = json.loads(beside.read_text(encoding="utf-8-sig"))["arguments"]
        model, run = Path(arguments["output"]), Path(arguments["checkpoint_dir"])
        return model.name, run, os.path.relpath(run, model.parent)
    except (OSError, *MISSHAPEN):
        return None


def other_run(args, description=None):
    """--checkpoint-dir of the run that wrote the model at --output, or None where that is the run of these arguments,
    perhaps moved as a whole, or there is no such model. description: as save_output() takes it.

    Raises UserError where the description there is another model's, which could not be used without it.
    """
    path, beside = Path(args.output), _beside(args, description)
    model, run, way = written_by(beside) or (path.name, args.checkpoint_dir, None)
    if model != path.name and path.with_name(model).exists():
        raise UserError(f"--output {args.output!r}: {beside.name!r} y su tokenizador son ahí de otro modelo, "
                        f"{model!r}, que sin ellos no serviría: indique un --output en otra carpeta")
    same = Path(run).resolve() == Path(args.checkpoint_dir).resolve() \
        or way == os.path.relpath(args.checkpoint_dir, path.parent)
    return run if path.exists() and not same else None


def leave_tokenizer(tokenizer, output_dir, anew, note):
    """Write the tokenizer's files into --output_dir, a folder of one model. anew: this run goes on from none of its
    checkpoints, so that a model there is another run's: it is moved aside, as its checkpoints will be, with all that
    it needs. Raises UserError where the system refuses."""
    folder = Path(output_dir)
    try:
        model, *_ = written_by(folder / DESCRIPTION) or [None]
        if anew and model and (folder / model).exists():
            moved = set_aside([folder / name for name in (model, DESCRIPTION, *tokenizers.NAMES)], folder)
            note(f"El modelo anterior y su tokenizador se han movido a {moved}.")
        tokenizers.export_files(tokenizer, folder, note)
    except OSError as problem:
        raise UserError(f"--output_dir {output_dir!r}: no se puede escribir el tokenizador ({explain(problem)}); "
                        "corríjalo o indique otra carpeta") from problem


def set_own_aside(args, description, note):
    """Move aside the model that an earlier run of these folders left at --output, as its checkpoints are: this run
    begins anew. Its tokenizer also stays where it is: this run's --tokenizer may name it. Raises UserError where the
    system refuses."""
    path = Path(args.output)
    if not path.is_file() or other_run(args, description):
        return
    beside, *vocabularies = companions(args, description)
    try:
        moved = set_aside([path, beside], path.parent)
    except OSError as problem:
        raise UserError(f"--output {args.output!r}: no se puede mover el modelo anterior ({explain(problem)}); "
                        "corríjalo o indique otro --output") from problem
    for vocabulary in filter(Path.exists, vocabularies):
        try:
            shutil.copy2(vocabulary, moved)
        except OSError as problem:
            raise UserError(f"--output {args.output!r}: el modelo anterior está ya en {moved}, pero su tokenizador, "
                            f"{str(vocabulary)!r}, no se puede copiar ahí ({explain(problem)}): cópielo, y repita la "
                            "orden") from problem
    note(f"El modelo anterior se ha movido a {moved}.")


def read_output(path, flag="--checkpoint"):
    """(config dict, weights dict, tokenizer, learnt_from() it) of a saved model or a checkpoint. flag: the argument
    that named it. Raises UserError naming the file."""
    path = path_called(path, f"{flag} {str(path)!r}")
    if not path.is_file():
        why = "es una carpeta" if path.is_dir() else "no existe"
        raise UserError(f"{flag} {str(path)!r}: {why}; indique el fichero de un modelo (gpt2_spanish.pth, "
                        "final_model.pt) o de un punto de control (ckpt-00000500.pt)")
    if path.suffix == ".safetensors":
        raise UserError(f"{flag} {str(path)!r}: es para otras herramientas, como transformers; indique el "
                        "fichero .pth o .pt del que se exportó")
    state = read(path, f"cópielo otra vez, o indique otro con {flag}")
    if isinstance(state.get("config"), dict):
        kinds = {"model": dict, "ema": dict, "tokenizer": torch.Tensor}
        state.setdefault("ema", {})
        if wrong := [name for name, kind in kinds.items() if not isinstance(state.get(name), kind)]:
            raise UserError(f"{flag} {str(path)!r} no es un punto de control de este proyecto: no tiene "
                            f"{', '.join(wrong)}, o no es lo que debe; indique otro")
        weights = {**state["model"], **state["ema"]}
        try:
            tokenizer = tokenizers.from_bytes(state["tokenizer"].numpy().tobytes())
        except UserError as problem:  # WordPiece's, if it is of train_distributed.py
            raise UserError(f"{flag} {str(path)!r}: su tokenizador no es de SentencePiece, así que no es de un "
                            "modelo que escriba texto; un BERT está ya en su --output, en el formato que leen "
                            "otras herramientas") from problem
        data = state.get("dataset") if isinstance(state.get("dataset"), dict) else {}
        return state["config"], weights, tokenizer, learnt_from(
            {"arguments": state.get("arguments"), "dataset": data.get("name"), "dataset_sha256": data.get("sha256")})
    if "own" in state:
        above = os.path.normpath(path.parent / "..")
        whole = next((str(each) for each in found(above) if step_of(each) == step_of(path)), None)
        raise UserError(f"{flag} {str(path)!r}: es lo que un proceso guarda solo para sí, sin el modelo: indique "
                        + (repr(whole) if whole else "el punto de control de ese paso, de la carpeta de encima"))
    beside = path.with_suffix(".json")
    if not beside.exists():
        beside = path.with_name(DESCRIPTION)
    try:
        description = json.loads(regular(beside).read_text(encoding="utf-8-sig"))
        config, vocabulary = description["config"], path.with_name(description["tokenizer"])
        known = description.get("tokenizer_sha256")
    except PermissionError as problem:
        raise UserError(f"{str(beside)!r} no se puede leer ({explain(problem)}): corrija sus permisos") from problem
    except (OSError, *MISSHAPEN) as problem:
        named = repr(beside.name)
        if not beside.exists():  # the two scripts call it differently: which of them wrote the model is not known
            expected = path.with_suffix(".json").name
            named = f"{expected!r} (de train_tensordock.py, {named})"
            if len(others := _descriptions(path.parent)) == 1:
                # Not renamed: its own model may lie there too, and could not be used without it.
                raise UserError(f"falta {named} junto a {str(path)!r}: si es {others[0]!r}, cópielo con el nombre "
                                f"{expected!r}") from problem
        raise UserError(f"falta {named} junto a {str(path)!r}, o está dañado: cópielo también, con el "
                        "tokenizador") from problem
    return config, state, _own_tokenizer(path, vocabulary, known, flag), learnt_from(description)


def learnt_from(description):
    """What `description` (dict) says of a training: {"arguments": dict, "dataset": name, "dataset_sha256": str}, empty
    or None where it does not."""
    kinds = {"arguments": dict, "dataset": str, "dataset_sha256": str}
    known = {name: value for name, kind in kinds.items() if isinstance(value := description.get(name), kind)}
    return {"arguments": {}, "dataset": None, "dataset_sha256": None, **known}


def _descriptions(folder):
    """Names of the files in `folder` that describe a model as save_output() does."""
    names = []
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(OSError, *MISSHAPEN):
            if regular(path).stat().st_size < DESCRIPTION_MOST:
                description = json.loads(path.read_text(encoding="utf-8-sig"))
                if isinstance(description["config"], dict) and isinstance(description["tokenizer"], str):
                    names.append(path.name)
    return names


def _own_tokenizer(path, vocabulary, known, flag):
    """The tokenizer in the file `vocabulary` of the model `path`, whose sha256 is `known`, None where the description
    does not say. Another model's pieces would make nonsense of the text. Raises UserError."""
    why = "no está" if not vocabulary.exists() else "no es el suyo, o está dañado"
    try:
        if known in (None, hashlib.sha256(vocabulary.read_bytes()).hexdigest()):
            return tokenizers.load(vocabulary)
    except PermissionError as problem:
        raise UserError(f"{str(vocabulary)!r} no se puede leer ({explain(problem)}): corrija sus permisos") from problem
    except (OSError, UserError):  # which advises to name another, and that cannot be done here
        pass
    wanted = f"{flag} {str(path)!r}: su tokenizador, {vocabulary.name!r}, {why}"
    for other in path.parent.glob(f"*tokenizer{vocabulary.suffix}") if not vocabulary.exists() else ():
        with contextlib.suppress(OSError):
            if hashlib.sha256(regular(other).read_bytes()).hexdigest() == known:
                raise UserError(f"{wanted}; {other.name!r} es el mismo: cópielo con ese nombre, {vocabulary.name!r}")
    raise UserError(f"{wanted}: cópielo a su lado desde donde se entrenó")
