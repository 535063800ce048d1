"""A prepared data set: a folder of token shards with its tokenizer and a JSON that is written last.

    Data/quijote/train-00000.bin ...  val-00000.bin ...  tokenizer.model  dataset.json

preparation.py makes such folders.
"""

import contextlib
import hashlib
import itertools
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from aura import tokenizer as tokenizers
from aura.errors import UserError
from aura.files import MISSHAPEN, explain, lock, remove_partials, write_json
from aura.shards import verify_shard

FORMAT = 1
AGAIN = "prepare los datos de nuevo con --prepare y su --dataset-name"


@dataclass(frozen=True)
class Dataset:
    """A prepared folder and what its dataset.json says."""

    directory: Path
    meta: dict

    def shards(self, split):
        """Paths of the shards of 'train' or 'val'."""
        return [self.directory / shard["file"] for shard in self.meta["splits"][split]["shards"]]

    def tokens(self, split):
        """How many tokens 'train' or 'val' has."""
        return self.meta["splits"][split]["tokens"]

    @property
    def vocab_size(self):
        """Size of the vocabulary, control tokens included."""
        return self.meta["tokenizer"]["vocab_size"]

    @property
    def sha256(self):
        """A hash over the shards and the tokenizer: the same content has the same hash on every machine."""
        return self.meta["sha256"]

    def load_tokenizer(self):
        """The Tokenizer the shards were written with. Raises UserError when the file is another or cannot be read."""
        path = self.directory / self.meta["tokenizer"]["file"]
        try:
            model = path.read_bytes()
        except OSError as problem:
            raise UserError(f"{str(path)!r}: no se puede leer ({explain(problem)}): corrija sus permisos, o {AGAIN}"
                            ) from problem
        if hashlib.sha256(model).hexdigest() != self.meta["tokenizer"]["sha256"]:
            raise UserError(f"{str(path)!r} está dañado o no es el tokenizador con que se prepararon estos datos: "
                            f"{AGAIN}")
        return tokenizers.from_bytes(model)

    def files(self):
        """[(name, sha256)] of everything but dataset.json."""
        shards = [shard for split in self.meta["splits"].values() for shard in split["shards"]]
        return [(shard["file"], shard["sha256"]) for shard in shards] + [
            (self.meta["tokenizer"]["file"], self.meta["tokenizer"]["sha256"])]

    def hold(self):
        """Keep other processes from replacing the folder for as long as this one lives; raises as require_same()."""
        for _ in range(10):
            try:
                lock(self.directory, shared=True)
                break
            except BlockingIOError:  # somebody is looking whether it is in use, or replaces it
                time.sleep(0.1)
            except OSError:  # no locks there
                break
        self.require_same()

    def require_same(self):
        """Raise UserError when the folder is gone, or another preparation has taken it since."""
        now = read(self.directory)
        if now is None:
            raise UserError(f"en {str(self.directory)!r} ya no están los datos con que se empezó a entrenar: "
                            f"devuélvalos a su sitio, o {AGAIN}")
        if now.sha256 != self.sha256:
            raise UserError(f"{str(self.directory)!r} ya no guarda los datos con que se empezó a entrenar: otra "
                            "ejecución ha preparado ahí otros del mismo nombre; prepare de nuevo aquellos, y los "
                            "otros en otra --data-dir")

    def verify(self, *splits):
        """Read every shard, of `splits` alone where they are given, and compare checksums. Raises UserError naming the
        file and the place."""
        self.load_tokenizer()
        wanted = splits or self.meta["splits"]
        for shard in itertools.chain(*(self.meta["splits"][split]["shards"] for split in wanted)):
            path = self.directory / shard["file"]
            try:
                header = verify_shard(path, self.vocab_size)
            except UserError as problem:
                if isinstance(problem.__cause__, PermissionError):  # maybe whole
                    raise UserError(f"{str(path)!r}: no se puede leer (permiso denegado); corrija sus permisos, o "
                                    "indique otra carpeta con --data-dir") from problem.__cause__
                told = str(problem).rstrip(".").removesuffix("; vuelva a generarlo")
                raise UserError(f"{told}; {AGAIN}") from problem
            if (header.tokens, header.crc32) != (shard["tokens"], shard["crc32"]):
                raise UserError(f"{str(path)!r} está entero, pero es de otros datos: {AGAIN}")


def size_of(meta):
    """Bytes of the shards that a Dataset's `meta` describes."""
    return sum(shard["bytes"] for split in meta["splits"].values() for shard in split["shards"])


def read(directory):
    """The Dataset in `directory`, or None when there is none. Raises UserError for a dataset.json that is broken or may
    not be read."""
    path = Path(directory) / "dataset.json"
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        if meta["format"] != FORMAT:
            raise UserError(f"{str(path)!r} es de otra versión ({meta['format']}): {AGAIN}")
        found = Dataset(Path(directory), meta)
        _require_whole(found)
        return found
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as problem:
        raise UserError(f"{str(path)!r}: no se puede leer ({explain(problem)}); corrija sus permisos, o indique otra "
                        "carpeta con --data-dir") from problem
    except (OSError, *MISSHAPEN) as problem:
        raise UserError(f"{str(path)!r} está dañado: {AGAIN}") from problem


def _require_whole(found):
    """Raise one of the errors that read() expects where the meta lacks something that is needed later."""
    meta = found.meta
    texts = [meta["name"], meta["source"]["kind"], found.sha256, *itertools.chain(*found.files())]
    numbers = [meta["options"]["vocab_size"], found.vocab_size, size_of(meta),
               found.tokens("train"), found.tokens("val"),
               *(shard[key] for split in meta["splits"].values() for shard in split["shards"]
                 for key in ("tokens", "crc32"))]
    if not all(isinstance(text, str) for text in texts) or not all(isinstance(each, int) for each in numbers):
        raise TypeError(meta)
    if not isinstance(meta["prepared_at"], int | float) or not 0 <= meta["prepared_at"] < 1e12:
        raise ValueError(meta["prepared_at"])
    # They are written in this folder, also on other machines: nothing that leads out of it, nor what nobody can type.
    if bad := [name for name, _ in found.files() if not name or Path(name).name != name or not name.isprintable()
               or name.startswith(".")]:
        raise ValueError(bad)


def prepared(data_dir, note=None):
    """Every Dataset in `data_dir`. One that cannot be read is left out, and `note` is told; without `note` it raises
    UserError, since it might be the one that is meant."""
    found = []
    # Not what glob() finds: that passes over a folder that may not be entered, and other data would be taken.
    for folder in sorted(Path(data_dir).glob("[!.]*")):
        if folder.name == "lost+found":  # root's, on a disk of its own
            continue
        try:
            found += filter(None, [read(folder)])  # none where it is being replaced
        except UserError as problem:
            if note is None:
                raise
            note(f"Aviso: {problem}.")
    return found


def latest(data_dir, note=None):
    """The Dataset prepared last in `data_dir`, or None. note: as prepared() takes it."""
    return max(prepared(data_dir, note), key=lambda dataset: dataset.meta["prepared_at"], default=None)


@contextlib.contextmanager
def unused(final):
    """A block in which no other process begins to train on the data in the folder `final`, if there are any, which are
    about to be replaced. Raises UserError where one already does."""
    descriptor, tries = None, 10
    while descriptor is None and final.is_dir():
        try:
            descriptor = lock(final)
        except BlockingIOError:
            tries -= 1
            if not tries:
                raise UserError(f"otra ejecución está entrenando con los datos de {str(final)!r}, que se reemplazarían"
                                ": espere a que termine, o indique otra --data-dir") from None
            time.sleep(0.1)  # somebody may just be putting others there
        except OSError:  # no locks there
            break
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def same_text(existing, corpus):
    """Whether `existing` was made from what `corpus` is now: the same files untouched, or others of the same bytes."""
    if existing.meta["source"] == corpus.source:
        return True
    digest = existing.meta.get("source_sha256")
    if digest is None or digest != corpus.digest():
        return False
    existing.meta["source"] = corpus.source
    write_back(existing)  # so that the next run need not read them
    return True


def write_back(existing):
    """Write the changed meta of a Dataset into its folder, where that is permitted."""
    with contextlib.suppress(OSError):
        remove_partials(existing.directory, "dataset.json")
        write_json(existing.directory / "dataset.json", existing.meta)
