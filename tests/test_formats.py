"""What a file holds that is not text as it is read: known by its name or its first bytes, and what is told of it."""

import bz2
import gzip
import io
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from aura import corpus, formats
from aura.errors import UserError
from tests.support import ROOT
from tests.test_corpus import documents, write


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_another_form_of_unicode_is_named(tmp_path, encoding):
    """Of letters without accents every byte is valid UTF-8."""
    path = write(tmp_path / "d.txt", ("\ufeff" + "This is a line\n" * 300).encode(encoding))
    with pytest.raises(UserError, match=f"d.txt.* está en {(name := encoding[:6].upper())}; .* iconv -f {name} -t"):
        documents(path)


@pytest.mark.parametrize("text", ["¿Qué? —No— «ñandú»\n" * 300, "This is a line\n" * 300, "\n\nhola", "a" * 3_000_000])
@pytest.mark.parametrize("name", ["d.txt", "d.txt.gz"])
@pytest.mark.parametrize("form", ["UTF-16LE", "UTF-16BE"])
def test_utf_16_without_a_mark_is_named(tmp_path, form, name, text):
    content = text.encode(form)
    path = write(tmp_path / name, gzip.compress(content) if name.endswith("gz") else content)
    with pytest.raises(UserError, match=f"{name}.* está en {form}; .* iconv -f {form} -t"):
        documents(path)


@pytest.mark.parametrize("name, told", [
    ("t.csv", "es una tabla; .* < {0}/t.csv > {0}/t.jsonl .. rm {0}/t.jsonl"),
    ("t.JSON", "es JSON; .* < {0}/t.JSON > {0}/t.jsonl .. rm {0}/t.jsonl"),
    ("t.txt.zst", "es un fichero zstd; descomprímalo: zstd -dc < {0}/t.txt.zst > {0}/t.txt .. rm {0}/t.txt"),
    ("t.csv.gz", "gzip -dc < {0}/t.csv.gz > {0}/t.csv .. rm {0}/t.csv"),
    ("t.zip", "unzip {0}/t.zip -d {0}/t"), ("t.parquet", "python -c .* {0}/t.parquet {0}/t.jsonl"),
    ("mi tesis.docx", "pandoc -t plain -o '{0}/mi tesis.txt' '{0}/mi tesis.docx'"),
    ("t.pdf", "es un PDF; conviértalo en un .txt: pdftotext -enc UTF-8 {0}/t.pdf {0}/t.txt")])
def test_a_file_of_another_kind_is_told_how_to_become_text(tmp_path, name, told):
    """By its path, or as all that there is in a folder."""
    for path in (write(tmp_path / name, "x"), tmp_path):
        with pytest.raises(UserError, match=told.format(tmp_path) + "$"):
            corpus.open_corpus(str(path))


def zipped(name, content="hola"):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, content)
    return file.getvalue()


NOT_TEXT = {
    ".zst": b"\x28\xb5\x2f\xfd\x04\x00hola", ".xz": lzma.compress(b"hola"), ".bz2": bz2.compress(b"hola", 1),
    ".gz": gzip.compress(b"hola"), ".pdf": b"%PDF-1.4\n", ".parquet": b"PAR1\x15\x04", ".zip": zipped("d.txt"),
    ".docx": zipped("[Content_Types].xml"), ".odt": zipped("mimetype"), ".epub": zipped("mimetype", "application/epub")}


@pytest.mark.parametrize("ending", NOT_TEXT)
def test_what_is_not_text_is_known_under_the_name_of_a_text(tmp_path, ending):
    content = NOT_TEXT[ending]
    for name in ("d.txt", "d.jsonl"):
        path = write(tmp_path / name, content)
        what, _ = formats.by_name(Path(f"d{ending}"))
        with pytest.raises(UserError, match=f"{name}': {what} con otro nombre; dele uno que acabe en {ending}, y se "):
            documents(path)
    path = write(tmp_path / "e.txt.gz", gzip.compress(content))
    with pytest.raises(UserError, match=f"gz': lo comprimido {what}; descomprímalo .gzip -d {path}. y dele un nombre "
                       f"que acabe en {ending}, "):
        documents(path)


def follow(path):
    """Paste the command with which the complaint about a corpus ends; its exit status."""
    with pytest.raises(UserError) as caught:
        documents(path)
    command = re.search(r"(iconv|python3|gzip -t|xz -|bzip2 -|unzip) ?.*", str(caught.value))[0]
    where = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(["sh", "-c", command], env=where, stderr=subprocess.DEVNULL).returncode


@pytest.mark.parametrize("name, content", [
    ("d.txt.XZ", lzma.compress(b"hola")), ("d.txt.Bz2", bz2.compress(b"hola")),
    ("-d.txt.bz2", bz2.compress(b"hola"))])
def test_what_is_compressed_is_unpacked_as_told(tmp_path, monkeypatch, name, content):
    """With an ending that its program does not know, and with a name that looks like an option."""
    if not shutil.which(program := "xz" if name.endswith("XZ") else "bzip2"):
        pytest.skip(f"no {program}")
    monkeypatch.chdir(tmp_path)
    write(tmp_path / name, content)
    assert follow(name) == 0 and documents(tmp_path) == ["hola"]
    write(tmp_path / name, content[:-4])
    follow(name)
    assert documents(tmp_path) == ["hola"], "half a text is none"


def test_a_name_is_no_option():
    assert formats.by_name(Path("-t.zip"))[1].endswith(": unzip ./-t.zip -d ./-t")


@pytest.mark.parametrize("name, content, others", [
    ("d.csv", "text\nhola\n", ["d.jsonl"]), ("d.json", '[{"text": "hola"}]', ["d.jsonl", "d-2.jsonl"])])
def test_nothing_that_is_there_is_overwritten_or_in_the_way(tmp_path, name, content, others):
    for other in others:
        write(tmp_path / other, "valioso")
    path = write(tmp_path / name, content)
    with pytest.raises(UserError) as caught:
        documents(path)
    subprocess.run(["sh", "-c", re.search("python3 .*", str(caught.value))[0]], check=True)
    assert [(tmp_path / other).read_text() for other in others] == ["valioso"] * len(others)
    made = [file for file in tmp_path.rglob("*") if file.is_file() and file.name not in (*others, path.name)]
    assert any("hola" in file.read_text("latin-1") for file in made)


@pytest.mark.parametrize("name, content", [
    ("d.csv", b"text\ncami\xf3n\n"), ("d.json", b'{"text": "a"}\n{"text": "b"}')])
def test_what_cannot_be_converted_leaves_nothing_behind(tmp_path, name, content):
    follow(write(tmp_path / name, content))
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_texts_that_are_under_their_key_stay(tmp_path):
    records = [{"text": f"Bueno {i}.", "title": f"Uno {i}"} for i in range(9)] + [{"text": None, "title": "Dos"}]
    path = write(tmp_path / "d.jsonl", "\n".join(map(json.dumps, records)))
    assert follow(path) == 0 and documents(path) == [*(record["text"] for record in records[:-1]), "Dos"]


def test_half_of_a_packed_text_does_not_take_its_place(tmp_path):
    content = gzip.compress("".join(f"El ñandú {i} corrió.\n" for i in range(300_000)).encode("cp1252"))
    content = content[:len(content) // 2]
    path = write(tmp_path / "d.txt.gz", content)
    assert follow(path) != 0 and path.read_bytes() == content


RECORDS = [{"título": f"Uno {i}", "d'autor": f"El «ñandú» {i}\nno es; 'él'", "n": i} for i in range(30)]
LINES = "\n".join(json.dumps(record, ensure_ascii=False) for record in RECORDS)


@pytest.mark.parametrize("name", ["d.jsonl", "d.jsonl.gz"])
def test_a_text_under_another_key_is_named_and_put_under_its_own(tmp_path, name):
    content = f"\ufeff{LINES}\n\n".encode()
    path = write(tmp_path / f"un 'libro' {name}", gzip.compress(content) if name.endswith("gz") else content)
    with pytest.raises(UserError, match="línea 1: falta la clave «text» con un texto; tiene «título» y «d'autor».; "):
        documents(path)
    assert follow(path) == 0 and documents(tmp_path) == [record["d'autor"] for record in RECORDS]
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("indent", [None, 1])
def test_a_list_of_records_becomes_lines_of_them(tmp_path, indent):
    texts = [{"text": record["d'autor"]} for record in RECORDS]
    for name in ("a.jsonl", "b.json"):
        path = write(tmp_path / name, json.dumps(texts, indent=indent))
        assert follow(path) == 0 and documents(path.with_suffix(".jsonl")) == [text["text"] for text in texts]


def test_a_list_is_known_before_it_is_too_long_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "RECORD_BYTES_MAX", 2000)
    with pytest.raises(UserError, match="es una lista JSON"):
        documents(write(tmp_path / "d.jsonl", json.dumps(RECORDS)))


def test_a_text_is_no_list_for_its_bracket_nor_utf_16_for_a_few_nuls(tmp_path):
    text = "[Capítulo I]\n" + "En un lugar de la Mancha.\n" * 20
    for beginning in ("", "a\0b\0c\0\n"):
        assert "".join(documents(write(tmp_path / "d.txt", beginning + text))).endswith(text.rstrip())


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_table_becomes_records(tmp_path, separator):
    rows = [separator.join(["cuerpo", "título"]), *(separator.join([f'"El ""ñandú"" {i},\ny; más\t"', '"Uno"'])
                                                     for i in range(30)), separator.join(["a" * 200_000, ""])]
    assert follow(write(tmp_path / "d.csv", "\ufeff" + "\r\n".join(rows))) == 0
    assert follow(tmp_path / "d.jsonl") == 0
    assert documents(tmp_path / "d.jsonl") == [*(f'El "ñandú" {i},\ny; más\t' for i in range(30)), "a" * 200_000]


@pytest.mark.parametrize("ending", ["txt", "txt.gz"])
@pytest.mark.parametrize("encoding", ["cp1252", "utf-16-le"])
def test_a_text_in_another_encoding_is_replaced_by_one_that_is_read(tmp_path, encoding, ending):
    """What is put beside it would not do in a folder: the one that is there would still be read."""
    for number in range(2):
        content = f"El ñandú {number} corrió.\n".encode(encoding) * 30
        write(tmp_path / f"mi libro {number}.{ending}", gzip.compress(content) if ending.endswith("gz") else content)
    assert follow(tmp_path) == 0 and follow(tmp_path) == 0
    assert [document[:10] for document in documents(tmp_path)] == ["El ñandú 0", "El ñandú 1"]


def test_the_guide_converts_the_texts_of_windows_and_no_others(tmp_path):
    texts = {f"{encoding} {number}.txt": f"El ñandú {number}.\n".encode(encoding)
             for encoding in ("utf-8", "cp1252", "utf-16") for number in range(2)}
    (tmp_path / "textos").mkdir()
    for name, content in texts.items():
        write(tmp_path / "textos" / name, content)
    loop = re.search(r"^for f in textos/.*?^done$", (ROOT / "docs" / "tensordock.md").read_text(), re.M | re.S)[0]
    subprocess.run(["sh", "-c", loop], cwd=tmp_path, check=True)
    texts.update({name: texts[name.replace("cp1252", "utf-8")] for name in texts if "cp1252" in name})
    assert {path.name: path.read_bytes() for path in (tmp_path / "textos").iterdir()} == texts


@pytest.mark.parametrize("name", ["d.txt", "d.txt.gz"])
def test_a_text_that_cannot_be_converted_stays_as_it_is(tmp_path, name):
    content = "ñandú".encode("cp1252") + b" \x81\n"
    path = write(tmp_path / name, gzip.compress(content) if name.endswith("gz") else content)
    before = path.read_bytes()
    assert follow(path) != 0 and path.read_bytes() == before
