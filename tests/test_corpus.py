"""Documents from files: formats, damage, bounded memory."""

import gzip
import json

import pytest

from aura import corpus
from aura.errors import UserError


def documents(path):
    return list(corpus.open_corpus(str(path)).documents())


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


def test_running_text_is_cut_at_blank_lines_and_nothing_is_lost(tmp_path):
    paragraphs = [f"Párrafo {i}.\nSegunda línea, ñandú." * 20 for i in range(100)]
    path = write(tmp_path / "libro.txt", "\n\n".join(paragraphs))
    found = documents(path)
    assert len(found) > 3
    assert "\n\n".join(found) == "\n\n".join(paragraphs)
    assert all(len(document) >= corpus.DOCUMENT_BYTES for document in found[:-1])


def test_long_lines_without_blanks_are_one_document_each(tmp_path):
    lines = [f"Documento {i}: " + "texto " * 60 for i in range(10)]
    assert documents(write(tmp_path / "d.txt", "\n".join(lines))) == lines


def test_a_text_without_newlines_is_read_in_pieces_that_join(tmp_path):
    text = "añil " * 500_000
    found = documents(write(tmp_path / "d.txt", text))
    assert len(found) > 1 and "".join(found) == text


def test_jsonl_gzip_and_folders(tmp_path):
    records = [{"text": f"uno {i}\n\ndos", "otra": 1} for i in range(5)]
    lines = "\n".join(json.dumps(record) for record in records)
    (tmp_path / "sub").mkdir()
    write(tmp_path / "a.jsonl", lines)
    (tmp_path / "sub" / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    write(tmp_path / "c.md", "no se lee")
    write(tmp_path / ".oculto.txt", "no se lee")
    found = corpus.open_corpus(str(tmp_path))
    assert list(found.documents()) == [record["text"] for record in records] * 2
    assert list(found.documents()) == [record["text"] for record in records] * 2, "it can be read again"


def test_bom_and_windows_line_ends(tmp_path):
    assert documents(write(tmp_path / "d.txt", b"\xef\xbb\xbfhola\r\nadi\xc3\xb3s\r\n")) == ["hola\nadiós"]


def test_invalid_utf8_is_counted_with_its_first_line(tmp_path):
    lines = [b"linea buena %d" % i for i in range(500)]
    lines[41] = b"mala \xff\xfe"
    lines[300] = b"cortada \xc3"
    found = corpus.open_corpus(str(write(tmp_path / "d.txt", b"\n".join(lines))))
    text = "\n".join(found.documents())
    assert found.damage.bad == 2 and "línea 42" in found.damage.first
    assert "mala \ufffd\ufffd" in text and "cortada \ufffd\n" in text


def test_a_file_that_ends_inside_a_character_is_damage(tmp_path):
    content = b"linea buena\n" * 300 + "ñ".encode()[:1]
    found = corpus.open_corpus(str(write(tmp_path / "d.txt", content)))
    assert "".join(found.documents()).endswith("buena\n\ufffd")
    assert found.damage.bad == 1 and "línea 301" in found.damage.first


def test_a_file_without_newlines_is_not_read_whole_to_learn_its_kind(tmp_path, monkeypatch):
    path = write(tmp_path / "d.txt", "añil " * 2_000_000)
    pieces, real = [], corpus._lines

    def counted(*rest, **options):
        for line in real(*rest, **options):
            pieces.append(line)
            yield line

    monkeypatch.setattr(corpus, "_lines", counted)
    next(corpus.open_corpus(str(path)).documents())
    assert len(pieces) <= 3


def test_more_than_one_percent_of_damage_is_an_error(tmp_path):
    lines = [json.dumps({"text": f"hola {i}"}) for i in range(200)]
    for i in (20, 50, 80):
        lines[i] = "{roto"
    with pytest.raises(UserError, match=r"3 de 200 líneas.*línea 21"):
        documents(write(tmp_path / "d.jsonl", "\n".join(lines)))


@pytest.mark.parametrize("record", ['{"texto": "x"}', '{"text": 7}', '[1]', '{"text": "\\ud800"}', "null"])
def test_records_without_a_text_are_damage(tmp_path, record):
    lines = [json.dumps({"text": "bueno"})] * 300 + [record]
    found = corpus.open_corpus(str(write(tmp_path / "d.jsonl", "\n".join(lines))))
    assert len(list(found.documents())) == 300 and found.damage.bad == 1


@pytest.mark.parametrize("cut", [5, 40, -4])
def test_a_broken_gzip_is_named(tmp_path, cut):
    whole = gzip.compress(b"hola que tal\n" * 5000)
    with pytest.raises(UserError, match=r"d\.txt\.gz.*gzip"):
        documents(write(tmp_path / "d.txt.gz", whole[:cut]))


def test_what_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(UserError, match="no existe.*muestra"):
        corpus.open_corpus(str(tmp_path / "nada.txt"))
    with pytest.raises(UserError, match=r"formato.*\.jsonl"):
        corpus.open_corpus(str(write(tmp_path / "x.pdf", "x")))
    (tmp_path / "vacía").mkdir()
    with pytest.raises(UserError, match="no contiene"):
        corpus.open_corpus(str(tmp_path / "vacía"))


def test_hub_corpora_stream_and_stop(tmp_path, monkeypatch):
    """The real `datasets` library, reading a repository that lies on this disk."""
    datasets = pytest.importorskip("datasets")
    rows = [{"text": f"Artículo {i}. " + "palabra " * 50} for i in range(50)]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "train.parquet"))
    monkeypatch.setitem(corpus.HUB, "wikipedia", (str(tmp_path), "default"))
    found = corpus.open_corpus("wikipedia").documents()
    assert next(found) == rows[0]["text"] and next(found) == rows[1]["text"]


def test_hub_without_the_extra_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(UserError, match="pip install datasets"):
        next(corpus.open_corpus("wikipedia").documents())


def test_the_sample_needs_no_file():
    found = corpus.open_corpus("muestra")
    first = next(iter(found.documents()))
    assert len(first) > 200 and first == next(iter(corpus.open_corpus("muestra").documents()))
