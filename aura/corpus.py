"""Documents, one at a time and in bounded memory: from files, from the Hub, from the built-in sample."""

import codecs
import dataclasses
import gzip
import hashlib
import io
import itertools
import json
import math
import os
import re
import shlex
import stat
import statistics
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from aura import formats, hub, muestra
from aura.errors import UserError
from aura.files import NAME_BYTES, explain, path_called
from aura.formats import HEAD_BYTES, SUFFIXES, packed

SAMPLE_NAME = "muestra"
SAMPLE_BYTES = 4_000_000  # enough for the demo preset to learn from in a few minutes
DOCUMENT_BYTES = 8_000  # running text is cut at the first blank line after this many bytes ...
DOCUMENT_BYTES_MAX = 16_000  # ... or at the first line end after this many, or space in a longer line
RATE_BYTES = 4 << 20  # unpacked, from which the size of a packed file is estimated
CUT = DOCUMENT_BYTES, DOCUMENT_BYTES_MAX  # what a place in running text depends on
CHUNK_BYTES = 1 << 20  # longest piece read at once: a 10 GB line must not be a 10 GB string
RECORD_BYTES_MAX = 64 << 20
RECORD_TEXT_MAX = 4 << 20  # characters, from which a record is several documents: each token takes 36 bytes at first
HEAD_LINES = 2000  # looked at to tell running text from one document a line; CHUNK_BYTES at most
LINE_PER_DOCUMENT = 200  # median characters of a line from which a file without blank lines holds one document a line
NOT_UTF8 = "no es UTF-8 válido"
DAMAGE_LIMIT = 0.01
DAMAGE_CLUMP = 3  # damage comes in clumps: before the end this many times the root of the lines may be bad beyond it
# Repositories in Parquet or JSON: `datasets` 4 and later no longer runs loading scripts, which the first OSCAR needs.
HUB = {"wikipedia": ("wikimedia/wikipedia", "20231101.es"), "oscar": ("oscar-corpus/mOSCAR", "spa_Latn"),
       "c4": ("allenai/c4", "en"), "spanish": ("allenai/c4", "es")}
HUB_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?::(\w[\w.-]*))?")  # owner/name or owner/name:configuration
HUB_DEFAULT_TOKENS = 100_000_000
# A place in the documents. document: how many come before it. The rest is where to open the files again to get there,
# the last line start before it: the file's number, the byte offset in its decompressed content, the lines of the file
# before that; and what had been read by then of all files: documents (first), lines, and bad ones among them.
START = {"document": 0, "file": 0, "offset": 0, "line": 0, "first": 0, "lines": 0, "bad": 0}


@dataclass
class Damage:
    """Lines that were not valid UTF-8 or not valid JSON."""

    lines: int = 0
    bad: int = 0
    first: str = ""
    file: Path | None = None  # of the first
    way_out: str = "o indique otro corpus"  # from what is wrong with the first
    last: tuple | None = None  # (file, number) of the last bad line: one may be bad in more than one way

    def add(self, path, line, reason, way_out=formats.RECORDS):
        """Count a bad line, once; the first is remembered with its file, number, reason and way out."""
        if self.last == (path, line):
            return
        self.last = path, line
        self.bad += 1
        if not self.first:
            self.first, self.file, self.way_out = f"{path}, línea {line}: {reason}", path, way_out

    def check(self, path, ended=True):
        """Raise UserError when more than 1 % of the lines were bad or, where the file has not ended, when there are so
        many that they will hardly turn out to be few."""
        clump = 0 if ended else DAMAGE_CLUMP * math.sqrt(self.lines)
        if self.bad > DAMAGE_LIMIT * self.lines + clump:
            path = self.file or path  # of a folder, this is another than the one where it became too much
            raise UserError(f"líneas dañadas: {self.bad} de {self.lines} leídas, más del 1 % (la primera: "
                            f"{self.first}); corrija {str(path)!r} {self.way_out}")


@dataclass
class Corpus:
    """A source of documents that can be read more than once.

    name: the folder's name under --data-dir. source: what identifies the content, JSON-able. total_bytes: size on
    disk, None when unknown. unread: paths of files of the folder that are no text. progress: bytes of the source
    read so far. damage: what was wrong in the last reading.
    """

    name: str
    source: dict
    total_bytes: int | None = None
    unread: list = field(default_factory=list)
    progress: int = 0
    damage: Damage = field(default_factory=Damage)

    def text_bytes(self) -> int | None:
        """About how many bytes of text there are, None when unknown: packed files count unpacked, at the rate of their
        first megabytes."""
        if self.source["kind"] != "ficheros":
            return self.total_bytes
        return sum(_unpacked(path, size) if packed(path) else size
                   for path, size in zip(self.source["files"], self.source["bytes"], strict=True))

    def digest(self) -> str | None:
        """SHA-256 over the files' formats, lengths and bytes; None for what is not files. Reads all of them."""
        if self.source["kind"] != "ficheros":
            return None
        total = hashlib.sha256()
        for path, size in zip(self.source["files"], self.source["bytes"], strict=True):
            total.update(b"jsonl" if _records(path) else b"txt")
            total.update(size.to_bytes(8, "little"))
            try:
                with open(path, "rb") as file:
                    while part := file.read(CHUNK_BYTES):
                        total.update(part)
            except OSError as problem:
                raise _unreadable(path, problem) from problem
        return total.hexdigest()

    def fingerprint(self) -> str:
        """SHA-256 over what tells this source from others without reading it: names and sizes of the files wherever
        they lie, the sample's seed and size, the repository."""
        known = {key: value for key, value in self.source.items() if key != "modified_ns"}
        known["files"] = [Path(file).name for file in self.source.get("files", [])]
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode("utf-8")).hexdigest()

    def changed(self) -> bool:
        """Whether the files are no longer what they were when this corpus was opened: their sizes, or when they were
        last written. A new link or permission, as a backup makes them, also moves the time of the last change."""
        if self.source["kind"] != "ficheros":
            return False
        now = _state_of([Path(file) for file in self.source["files"]])
        written, was = ([modified for modified, _ in state["modified_ns"]] for state in (now, self.source))
        return now["bytes"] != self.source["bytes"] or written != was

    def documents(self) -> Iterator[str]:
        """Yield the documents as str, in the same order each time. Raises UserError for what cannot be read."""
        for document, _ in self.placed():
            yield document

    def placed(self, place=None, rank=0, world_size=1) -> Iterator[tuple[str, dict]]:
        """Yield (document, place after it) for one rank's share, in the same order each time, from `place` on.

        The shares of all ranks are disjoint and together the whole. A place is JSON-able and belongs to its rank and
        world size; one of files or of the sample may be continued under others, which then share out what is left.
        place: None for the beginning. Raises UserError for what cannot be read.
        """
        if self.source["kind"] == "hub":
            yield from _hub_documents(self.source, place, rank, world_size)
            return
        numbered = self._sample_documents if self.source["kind"] == "muestra" else self._all_documents
        place = place or START
        for document, after in numbered(place):
            if after["document"] > place["document"] and (after["document"] - 1) % world_size == rank:
                yield document, after

    def _sample_documents(self, _):
        for number, document in enumerate(muestra.documents(self.source["seed"], self.source["bytes"]), 1):
            yield document, {**START, "document": number}

    def _all_documents(self, place):
        """Every document of the files from the line that `place` names on, with the place after it."""
        number, at = place["first"], place
        # This reading's own: two may be under way. What is known of the first bad line stays true after it.
        known = self.damage if at["bad"] else Damage()
        damage = self.damage = dataclasses.replace(known, lines=at["lines"], bad=at["bad"], last=None)
        self.progress = sum(self.source["bytes"][:at["file"]])
        files = list(map(Path, self.source["files"]))
        for file, path in itertools.islice(enumerate(files), at["file"], None):
            for document, line_start in _file_documents(path, self, damage, at["offset"], at["line"]):
                number += 1
                if line_start:
                    at = _line_start(number, file, *line_start, damage)
                yield document, {**at, "document": number}
            damage.check(path, ended=file + 1 == len(files))
            at = _line_start(number, file + 1, 0, 0, damage)


def _records(path):
    """Whether a file holds JSON records, by its name."""
    return str(path).lower().removesuffix(".gz").endswith(".jsonl")


def _unreadable(path, problem):
    return UserError(f"{str(path)!r}: no se puede leer ({explain(problem)}); compruebe la ruta y sus permisos, o "
                     "indique otro corpus")


def _unpacked(path, size):
    """Bytes of text in a .gz file of `size` bytes; `size` for what is damaged, which whoever reads it all will say."""
    try:
        with open(path, "rb") as file, gzip.GzipFile(fileobj=file) as text:
            read = len(text.read(RATE_BYTES))
            return read if read < RATE_BYTES else round(size * read / file.tell())
    except (OSError, EOFError, zlib.error):
        return size


def open_corpus(name, max_tokens=None, flag="--dataset-name"):
    """The Corpus called `name`: 'muestra', a path to a file or folder that is there, one of HUB, or
    owner/name[:configuration] on the Hub. flag: the argument that error messages name. Of a folder every file is
    read once, however many symbolic links lead to it; each hard link is a file of its own.

    Raises UserError when there is no such file or nothing readable in the folder.
    """
    if name == SAMPLE_NAME:
        size = SAMPLE_BYTES if max_tokens is None else max(SAMPLE_BYTES, 8 * max_tokens)
        return Corpus(name, {"kind": "muestra", "seed": 0, "bytes": size}, size)
    path, on_hub = find(name, f"{flag} {name!r}")
    if not path.exists() and (name in HUB or on_hub):
        repository, configuration = HUB.get(name) or on_hub.groups()
        return Corpus(_plain_name(name), {"kind": "hub", "repository": repository, "configuration": configuration})
    if not path.exists():
        if re.match(r"[A-Za-z]+://", name):
            raise UserError(f"{flag} {name!r}: es una dirección; descargue antes el texto (curl -LO {shlex.quote(name)}"
                            ") e indique el fichero; un conjunto del Hub se indica como propietario/nombre")
        raise UserError(f"{flag} {name!r}: no existe; use {SAMPLE_NAME}, {', '.join(HUB)}, otro nombre del Hub como "
                        "propietario/nombre, o la ruta de un .txt, un .jsonl (también .gz) o una carpeta")
    try:
        files, others = _files_below(path)
        named = {}  # by what it really is; its format is that of its name here: a cache's links lead to nameless files
        for file in files:
            named.setdefault(file.resolve(), file.absolute())
        source = {"kind": "ficheros", **_state_of(list(named.values()))}
    except OSError as problem:
        raise UserError(f"{flag} {name!r}: no se puede leer {problem.filename!r} ({explain(problem)}); corrija sus "
                        "permisos o sáquelo de la carpeta") from problem
    return Corpus(_folder_name(path), source, sum(source["bytes"]), unread=others)


def find(name, named):
    """(path_called(), match of HUB_NAME or None): a slip in a path, in its folder too, must not wait for the Hub."""
    path = path_called(name, named)
    meant = os.path.lexists(path.parent) or str(path).lower().endswith((*SUFFIXES, ".json"))
    return path, None if meant else HUB_NAME.fullmatch(name)


def _state_of(files):
    """What changes when a file does: its size, its time, and the time of its last change, which nobody can set."""
    stats = [file.stat() for file in files]
    return {"files": [str(file) for file in files], "bytes": [stat.st_size for stat in stats],
            "modified_ns": [[stat.st_mtime_ns, stat.st_ctime_ns] for stat in stats]}


def _folder_name(path):
    return _plain_name(formats.bare(path.resolve().name))


def _plain_name(name):
    plain = re.sub(r"[^\w.-]+", "_", name).strip("._").encode("utf-8")
    return plain[:NAME_BYTES].decode("utf-8", "ignore") or "corpus"


def _files_below(path):
    """([files of text], [files that are left out for their format])."""
    if path.is_file():
        if not path.name.lower().endswith(SUFFIXES):
            known = formats.by_name(path) or (f"no se reconoce el formato; se leen {', '.join(SUFFIXES)}: si es texto, "
                                              "dele un nombre que acabe así",)
            raise UserError(f"{str(path)!r}: {'; '.join(known)}")
        return [path], []
    files, others, seen = [], [], set()
    for folder, folders, names in os.walk(path, onerror=_raise, followlinks=True):
        there = os.stat(folder)
        if (there.st_dev, there.st_ino) in seen:  # by a link: a second time, or in a circle
            folders.clear()
            continue
        seen.add((there.st_dev, there.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            if not name.startswith("."):
                if name.lower().endswith(SUFFIXES):
                    files.append(Path(folder, name))
                else:
                    others.append(Path(folder, name))
    files = sorted(file for file in files if stat.S_ISREG(file.stat().st_mode))
    if not files:
        way_out = next((f"{str(other)!r} {'; '.join(known)}" for other in sorted(others)
                        if (known := formats.by_name(other))),
                       "indique otra, o dé a los ficheros de texto un nombre que acabe así")
        raise UserError(f"la carpeta {str(path)!r} no contiene ningún fichero {', '.join(SUFFIXES)}; {way_out}")
    return files, sorted(others, key=lambda other: other.name)


def _raise(problem):
    """For os.walk, which else passes over a folder that it cannot read: its text would be left out without a word."""
    raise problem


def _line_start(documents, file, offset, line, damage):
    return {"document": documents, "file": file, "offset": offset, "line": line, "first": documents,
            "lines": damage.lines, "bad": damage.bad}


def _file_documents(path, corpus, damage, offset, line):
    """Yield (document, start of the next line) from byte `offset`, which `line` lines precede, on.

    The start is (byte offset, lines before it), or None where a document ends within a line.
    """
    records, start = _records(path), corpus.progress
    try:
        with open(path, "rb") as raw, (gzip.open(raw) if packed(path) else raw) as file:
            file = file if records else _with_line_ends(file)
            split = _json_documents if records else _text_splitter(_lines(file, path, Damage(), whole=False))
            file.seek(offset)
            lines = _lines(file, path, damage, records, offset, line)
            yield from split(_watched(lines, raw, path, corpus, damage), path, damage)
            corpus.progress = start + path.stat().st_size
    except (EOFError, gzip.BadGzipFile, zlib.error) as problem:
        raise UserError(f"{str(path)!r}: no es un gzip, o está dañado o incompleto; vuelva a descargarlo, o quítele "
                        ".gz del nombre si no está comprimido") from problem
    except OSError as problem:
        raise _unreadable(path, problem) from problem


class _OldMacText(io.RawIOBase):
    """A file of lines that end in \\r alone, as if they ended in \\n; every byte keeps its place."""

    def __init__(self, file):
        self._file = file

    def readable(self):
        return True

    def seekable(self):
        return True

    def seek(self, offset, whence=os.SEEK_SET):
        return self._file.seek(offset, whence)

    def readinto(self, buffer):
        part = self._file.read(len(buffer)).replace(b"\r", b"\n")
        buffer[:len(part)] = part
        return len(part)


def _with_line_ends(file):
    head = file.read(CHUNK_BYTES)
    head += file.read(head.endswith(b"\r"))  # a line end may be cut in two there
    file.seek(0)
    return io.BufferedReader(_OldMacText(file)) if b"\r" in head and b"\n" not in head else file


def _watched(lines, raw, path, corpus, damage):
    """The lines of a file, telling the corpus how far they are. Damage is checked on the way: the end of the file may
    be days away, or never be read."""
    start, untold = corpus.progress, 0
    for line in lines:
        damage.check(path, ended=False)
        untold += len(line[1])
        if untold >= DOCUMENT_BYTES_MAX:
            corpus.progress, untold = start + raw.tell(), 0
        yield line


def _lines(file, path, damage, whole, offset=0, number=0):
    """Yield (number, text, start of the next line as (byte offset, number) or None) for each line; bytes that are not
    UTF-8 become U+FFFD and their line is counted as bad.

    whole: lines must not be split (JSON records); otherwise very long ones come in pieces of CHUNK_BYTES, each but the
    last without a start. offset, number: where `file` stands, and the lines before.
    """
    limit = RECORD_BYTES_MAX if whole else CHUNK_BYTES
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    fresh = True
    while raw := file.readline(limit):
        if raw.endswith(b"\r") and file.peek(1).startswith(b"\n"):  # a piece must not end within a line end
            raw += file.read(1)
        offset += len(raw)
        if fresh:
            number += 1
            damage.lines += 1
            if offset == len(raw):  # at the file's beginning; ASCII in UTF-16 passes for valid UTF-8
                formats.check_head(path, raw + file.peek(HEAD_BYTES), whole)
            if whole and len(raw) >= limit and not raw.endswith(b"\n"):
                raise UserError(f"{str(path)!r}, línea {number}: un registro de más de {limit >> 20} MB; divídalo")
            if raw[0] == 0xEF:  # of a mark, also within: the file may be several put together
                raw = raw.removeprefix(codecs.BOM_UTF8)
        fresh, before = raw.endswith(b"\n"), decoder.getstate()
        try:
            text = decoder.decode(raw, final=fresh)
        except UnicodeDecodeError:
            lenient = codecs.getincrementaldecoder("utf-8")("replace")
            lenient.setstate(before)
            text = lenient.decode(raw, final=fresh)
            decoder.setstate(lenient.getstate())  # a character that the end of a piece cuts goes on in the next one
            damage.add(path, number, NOT_UTF8, formats.not_utf8(path))
        yield number, text.replace("\r\n", "\n"), (offset, number) if fresh else None
    if decoder.getstate()[0]:  # the file ends in the middle of a character
        damage.add(path, number, NOT_UTF8, formats.not_utf8(path))
        yield number, "\ufffd", None


def _json_documents(lines, path, damage):
    for number, line, after in lines:
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            text = record["text"]
            text.encode("utf-8")  # "\ud800" is valid JSON and not a character
        except UnicodeEncodeError:
            damage.add(path, number, "el texto contiene medio carácter (sustituto suelto)")
        except (ValueError, RecursionError):  # a number of thousands of digits is a plain ValueError
            damage.add(path, number, "no es JSON válido")
        except (KeyError, TypeError, AttributeError):
            damage.add(path, number, *formats.without_text(path, record))
        else:
            *parts, last = _pieces(text, RECORD_TEXT_MAX)
            for part, place in [*((part, None) for part in parts), (last, after)]:
                if part.strip():
                    yield part, place


def _text_splitter(lines):
    """One document a line, or running text cut at blank lines: told apart by the first pieces of the file."""
    head, size = [], 0
    for _, text, _ in itertools.islice(lines, HEAD_LINES):
        head.append(text)
        size += len(text)
        if size > CHUNK_BYTES:
            break
    head = re.findall(r".*\n|.+", "".join(head))  # lines, not pieces of lines
    lengths = [len(text) for text in head if text.strip()]
    blank = any(not text.strip() for text in head[:-1])
    one_a_line = len(lengths) > 1 and not blank and statistics.median(lengths) >= LINE_PER_DOCUMENT
    return _line_documents if one_a_line else _running_documents


def _line_documents(lines, path, damage):
    parts = []
    for _, text, after in lines:
        if sum(map(len, parts)) > DOCUMENT_BYTES_MAX:  # of a line that goes on: it ends at a space
            whole = "".join(parts)
            end = whole.rfind(" ") + 1 or len(whole)
            if whole[:end].strip():
                yield whole[:end], None
            parts = [whole[end:]]
        parts.append(text.rstrip("\n"))
        if text.endswith("\n"):
            if any(part.strip() for part in parts):
                yield "".join(parts), after
            parts = []
    if any(part.strip() for part in parts):
        yield "".join(parts), None


def _running_documents(lines, path, damage):
    parts, size = [], 0
    for text, after in _cut(lines):
        if parts or text.strip():
            parts.append(text)
            size += len(text)
        if size >= (DOCUMENT_BYTES_MAX if text.strip() else DOCUMENT_BYTES):
            yield "".join(parts).rstrip("\n"), after
            parts, size = [], 0
    rest = "".join(parts).rstrip("\n")
    if rest.strip():
        yield rest, None


def _cut(lines):
    """(text, after) of each line, of one longer than a document in pieces."""
    for _, text, after in lines:
        *parts, last = _pieces(text, DOCUMENT_BYTES_MAX)
        yield from ((part, None) for part in parts)
        yield last, after


def _pieces(text, size):
    """`text` in pieces of `size` characters or, to end at spaces, up to twice as many; the last is shorter."""
    begin = 0
    while len(text) - begin > size:
        end = text.find(" ", begin + size, begin + 2 * size) + 1 or begin + size
        yield text[begin:end]
        begin = end
    yield text[begin:]


def _hub_documents(source, place, rank, world_size):
    """Yield (document, place) of a repository on the Hub; the place is the state of its IterableDataset."""
    where = source["repository"]
    with hub.reading(where, "corpus", "un fichero de texto") as datasets:
        from datasets.distributed import split_dataset_by_node

        rows = datasets.load_dataset(where, source["configuration"], split="train", streaming=True)
        rows = split_dataset_by_node(rows, rank, world_size)
        if place:
            rows.load_state_dict(place)
        for row in rows:
            if "text" not in row:
                raise UserError(f"{where!r} de Hugging Face no tiene la columna «text»; sus columnas son "
                                f"{', '.join(row)}: use otro corpus, o expórtelo a un .jsonl con esa clave")
            text = row["text"] or ""
            if not isinstance(text, str):  # mOSCAR: the paragraphs of a page, each {"text": ...}
                text = "\n".join(part["text"] if isinstance(part, dict) else part for part in text)
            if text.strip():
                yield text, rows.state_dict()
