"""What a file holds that is not text as it is read here, and the commands that make it so."""

import codecs
import itertools
import json
import os
import re
import shlex

from aura.errors import UserError
from aura.words import first_of

SUFFIXES = (".txt", ".jsonl", ".txt.gz", ".jsonl.gz")
HEAD_BYTES = 1000  # looked at to tell what a file is
RECORDS = "para que cada línea sea un objeto JSON con su texto en la clave «text»"
KEY_MAX = 40  # characters of a key that a message names
OTHER_MARKS = ((codecs.BOM_UTF32_LE, "UTF-32"), (codecs.BOM_UTF32_BE, "UTF-32"),  # the first begins as UTF-16's
               (codecs.BOM_UTF16_LE, "UTF-16"), (codecs.BOM_UTF16_BE, "UTF-16"))
# Each writes JSON lines, of whatever keys: which of them is the text, the complaint about the result asks.
LIST = "import json,sys; [print(json.dumps(r)) for r in json.load(sys.stdin.buffer)]"
TABLE = ('import csv,io,json; csv.field_size_limit(1<<30); t=open(0,encoding="utf-8-sig",newline="").read(); '
         '[print(json.dumps(r)) for r in csv.DictReader(io.StringIO(t,newline=""),'
         r'delimiter=max(",;\t",key=t.split("\n")[0].count))]')
PARQUET = "import datasets,sys; datasets.Dataset.from_parquet(sys.argv[1]).to_json(sys.argv[2])"
# By endings: what such a file is, and the way out; stem is its path without the ending, txt and jsonl what it becomes,
# none of them there before.
OTHERS = {
    ".csv .tsv": ("es una tabla", "conviértala en un .jsonl, con un objeto {\"text\": ...} por línea (si es de Excel, "
                  f"guárdela antes como «CSV UTF-8»): python3 -c {shlex.quote(TABLE)} < %(file)s > %(jsonl)s "
                  "|| rm %(jsonl)s"),
    ".json": ("es JSON", "hace falta un .jsonl, con un objeto {\"text\": ...} por línea: si ya es así, dele ese "
              f"nombre; si es una lista: python3 -c {shlex.quote(LIST)} < %(file)s > %(jsonl)s || rm %(jsonl)s"),
    ".zst .zstd": ("es un fichero zstd", "descomprímalo: zstd -dc < %(file)s > %(stem)s || rm %(stem)s"),
    ".xz": ("es un fichero xz", "descomprímalo: xz -dc < %(file)s > %(stem)s || rm %(stem)s"),
    ".bz2": ("es un fichero bzip2", "descomprímalo: bzip2 -dc < %(file)s > %(stem)s || rm %(stem)s"),
    ".gz .tgz": ("es un fichero gzip", "descomprímalo: gzip -dc < %(file)s > %(stem)s || rm %(stem)s"),
    ".zip": ("es un zip", "descomprímalo en una carpeta e indique esta: unzip %(file)s -d %(stem)s"),
    ".tar": ("es un tar",
             "descomprímalo en una carpeta e indique esta: mkdir %(stem)s && tar -xf %(file)s -C %(stem)s"),
    ".pdf": ("es un PDF", "conviértalo en un .txt: pdftotext -enc UTF-8 %(file)s %(txt)s"),
    ".docx .odt .epub .rtf .html .htm": (
        "es un documento con formato", "conviértalo en un .txt: pandoc -t plain -o %(txt)s %(file)s"),
    ".parquet": ("es una tabla Parquet", "conviértala en un .jsonl (pip install datasets): "
                 f"python -c {shlex.quote(PARQUET)} %(file)s %(jsonl)s"),
}
MAGIC = {  # what a file begins with, and the ending that its name should have; a zip last, as documents are zips too
    rb"\x28\xb5\x2f\xfd": ".zst", rb"\xfd7zXZ\0": ".xz", rb"BZh[1-9]1AY&SY": ".bz2", rb"\x1f\x8b": ".gz",
    rb"%PDF-": ".pdf", rb"PAR1\x15": ".parquet", rb"PK\x03\x04.{26}\[Content_Types\]": ".docx",
    rb"PK\x03\x04.{26}mimetypeapplication/epub": ".epub", rb"PK\x03\x04.{26}mimetype": ".odt", rb"PK\x03\x04": ".zip"}


def packed(path):
    """Whether a file is compressed, by its name."""
    return str(path).lower().endswith(".gz")


def bare(name):
    """A file's name or path without the endings of what is read."""
    for suffix in (".gz", ".txt", ".jsonl"):
        name = name[:-len(suffix)] if name.lower().endswith(suffix) else name
    return name


def by_name(path):
    """(what a file is that is not read, the way out) by the ending of its name; None for an ending that tells nothing.
    """
    stem, ending = str(path)[:-len(path.suffix) or None], path.suffix.lower()
    free = {"stem": stem, "txt": f"{bare(stem)}.txt", "jsonl": f"{bare(stem)}.jsonl"}
    names = {"file": _word(path), **{key: _word(_free(name)) for key, name in free.items()}}
    return next(((what, way_out % names) for endings, (what, way_out) in OTHERS.items() if ending in endings.split()),
                None)


def _word(path):
    """A path as a word of a command, in which it is no option."""
    return shlex.quote(f"./{path}" if str(path).startswith("-") else str(path))


def _free(path):
    """The path or, where something is there, one like it that leads to nothing."""
    folder, name = os.path.split(path)
    stem, dot, endings = name.partition(".")
    names = (os.path.join(folder, f"{stem}-{number}{dot}{endings}") for number in itertools.count(2))
    return next(free for free in itertools.chain([path], names) if not os.path.lexists(free))


def misnamed(path, head, unpacked=False):
    """The UserError for a file that begins so, once `unpacked` if it is, and should be text; None for what may be."""
    ending = next((ending for magic, ending in MAGIC.items() if re.match(magic, head, re.DOTALL)), None)
    if ending is None:
        return None
    if path.suffix.lower() == ending and not unpacked:
        return UserError(f"{str(path)!r}: {'; '.join(by_name(path))}")
    what, _ = by_name(path.with_suffix(ending))
    step = f"; descomprímalo (gzip -d {_word(path)}) y dele un nombre" if unpacked else " con otro nombre; dele uno"
    return UserError(f"{str(path)!r}: {'lo comprimido ' * unpacked}{what}{step} que acabe en {ending}, y se dirá cómo "
                     "se convierte en texto")


def check_head(path, head, records):
    """Raise UserError for a file that begins so and is not UTF-8 text or, where it should hold records, is a list."""
    head = head[:HEAD_BYTES]
    if problem := misnamed(path, head, packed(path)):
        raise problem
    if problem := other_unicode(path, head):
        raise problem
    if records and head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        raise UserError(f"{str(path)!r}: es una lista JSON, y hace falta un objeto {{\"text\": ...}} por línea; "
                        f"conviértala: {in_place(path, f'python3 -c {shlex.quote(LIST)}')}")


def other_unicode(path, head):
    """The UserError of a file that begins so and is in another form of Unicode, or None: by its mark or, where every
    other byte is a NUL, as of Latin letters in UTF-16, without one."""
    form = next((name for mark, name in OTHER_MARKS if head.startswith(mark)), None)
    even, odd = head[::2].count(0), head[1::2].count(0)
    if not form and not min(even, odd) and max(even, odd) > max(1, len(head) // 4):
        form = "UTF-16BE" if even else "UTF-16LE"
    return form and UserError(
        f"{str(path)!r}: está en {form}; conviértalo: {in_place(path, f'iconv -f {form} -t UTF-8')}")


def in_place(path, command):
    """The shell command that puts in a file's place what `command` makes of its text, unless that fails."""
    file, new, new_gz = (_word(f"{path}{ending}") for ending in ("", ".nuevo", ".nuevo.gz"))
    if packed(path):  # the status of a pipe is that of its end
        return f"gzip -t < {file} && gzip -dc < {file} | {command} > {new} && gzip {new} && mv {new_gz} {file}"
    return f"{command} < {file} > {new} && mv {new} {file}"


def not_utf8(path):
    """The way out for a file of text in another encoding, which most often is that of Windows."""
    return ("o conviértalo a UTF-8 (si hay muchos así, vea docs/tensordock.md); si viene de Windows: "
            f"{in_place(path, 'iconv -f CP1252 -t UTF-8')}")


def without_text(path, record):
    """(what is wrong, the way out) with a record that has no text under «text», but may have one under another key."""
    wrong = "falta la clave «text» con un texto"
    sizes = {key: len(value) for key, value in record.items() if isinstance(value, str) and key.isprintable()
             and len(key) <= KEY_MAX} if isinstance(record, dict) else {}
    if not sizes:
        return wrong, RECORDS
    longest = max(sizes, key=sizes.get)
    code = ('import json,sys; [print(json.dumps({**(r:=json.loads(l)),"text":t if type(t:=r.get("text"))is str else '
            f'r.get({json.dumps(longest, ensure_ascii=False)})}})) for l in sys.stdin.buffer if l.strip()]')
    return (f"{wrong}; tiene {first_of([f'«{key}»' for key in sizes], 6)}",
            f"{RECORDS}; si es «{longest}»: {in_place(path, f'python3 -c {shlex.quote(code)}')}")
