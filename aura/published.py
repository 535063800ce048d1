"""A model as the transformers library keeps it, in a folder or on the Hub: where it lies, its settings, its tensors.

Weights are read from safetensors alone: a format without code in it.
"""

import json
import re
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from aura import hub
from aura.errors import UserError
from aura.files import explain, path_called

WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"


def find(name, flag, held, files, instead, revisions=None, note=print):
    """The folder that `name` means: itself, or a copy of what the Hub has under `owner/name[@revision]`.

    flag: the argument that error messages name. held: Spanish for what such a folder holds. files: the names to fetch.
    instead: Spanish for what else could be given. revisions: {name: the one that is known to hold what we expect}; of
    others the newest is taken. Raises UserError when there is no such folder, or the Hub cannot be asked.
    """
    path = path_called(name, f"{flag} {name!r}")
    if path.is_dir():
        return path
    plain, _, revision = name.partition("@")
    a_path = name.startswith((".", "/", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", plain, re.ASCII)
    if path.exists() or a_path:
        raise UserError(f"{flag} {name!r}: no es una carpeta con {held}, ni un nombre del Hub; {instead}")
    revision = revision or (revisions or {}).get(plain)
    try:
        from huggingface_hub import snapshot_download
    except ImportError as problem:
        raise UserError(f"{flag} {name!r}: no hay una carpeta con ese nombre, y para traerlo del Hub hace falta el "
                        f"paquete huggingface_hub: pip install huggingface_hub; {instead}") from problem
    hub.quiet()
    note(f"Modelo {plain} del Hub{f', revisión {revision[:12]}' if revision else ', la última revisión'}...")
    try:
        return Path(snapshot_download(plain, revision=revision, allow_patterns=files))
    except Exception as problem:  # its HTTP client raises types that change from version to version
        raise UserError(f"{flag} {name!r}: no hay una carpeta con ese nombre, y el Hub no lo da "
                        f"({hub.reason(problem)}); compruebe el nombre y la red, o indique una carpeta") from problem


def settings(folder, kind, flag, held):
    """What config.json in `folder` says of a model of the type `kind` (dict). Raises UserError where it cannot be read,
    or is another type's. flag, held: as find() takes them."""
    path = Path(folder, CONFIG)
    try:
        given = json.loads(path.read_text(encoding="utf-8-sig"))  # Windows' Notepad writes a byte order mark
    except (OSError, ValueError, RecursionError) as problem:
        why = explain(problem) if isinstance(problem, OSError) else "no es JSON válido"
        raise UserError(f"{flag}: no se puede leer {str(path)!r} ({why}): la carpeta debe tener {held}; "
                        "cópielos otra vez o indique otra") from problem
    if not isinstance(given, dict) or given.get("model_type", kind) != kind:
        found = given.get("model_type") if isinstance(given, dict) else type(given).__name__
        raise UserError(f"{flag}: {str(path)!r} describe un modelo {found!r}, y aquí solo sirve un {kind}")
    return given


def tensors(path, flag, loader):
    """{name: tensor} of a safetensors file. loader: the class of transformers that opens such a model, for who has its
    weights in another form. Raises UserError when the file is missing, cut short or not safetensors."""
    try:
        open(path, "rb").close()  # safetensors takes what may not be read for what is not there
        return load_file(path)
    except PermissionError as problem:
        raise UserError(f"{flag}: {str(path)!r} no se puede leer ({explain(problem)}): corrija sus permisos"
                        ) from problem
    except FileNotFoundError as problem:
        raise UserError(f"{flag}: falta {str(path)!r}; los pesos se leen solo de safetensors, en un fichero: si están "
                        f"de otra forma, transformers los escribe así con {loader}.from_pretrained("
                        "CARPETA).save_pretrained(OTRA)") from problem
    except (SafetensorError, OSError, ValueError, RuntimeError) as problem:  # safetensors says why in English
        raise UserError(f"{flag}: {str(path)!r} está incompleto, no se puede leer o no es un fichero safetensors: "
                        "cópielo otra vez") from problem
