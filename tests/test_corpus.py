"""Documents from files: formats, damage, bounded memory."""

import gzip
import json
import os
from pathlib import Path

import pytest

from aura import corpus, preparation
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


@pytest.mark.parametrize("end", ["\n", ""])
def test_a_document_of_several_megabytes_is_cut_between_words(tmp_path, end):
    lines = [f"Documento {number}: " + "texto " * 60 for number in range(9)]
    long = "palabras " * 300_000
    found = documents(write(tmp_path / "d.txt", "\n".join([*lines, long, "otra " * 80 + "acaba"]) + end))
    assert found[:9] == lines and found[-1] == "otra " * 80 + "acaba" and "".join(found[9:-1]) == long
    assert all(document.endswith("palabras ") for document in found[9:-1]) and len(found) == 13
    tail = documents(write(tmp_path / "e.txt", "\n".join([*lines, long + "acaba"]) + end))[-1]
    assert tail.endswith("palabras acaba")
    assert "".join(documents(write(tmp_path / "f.txt", "\n".join([*lines, "漢" * 10**6])))[9:]) == "漢" * 10**6


def test_a_text_without_newlines_is_read_in_pieces_that_join(tmp_path):
    text = "añil " * 500_000
    found = documents(write(tmp_path / "d.txt", text))
    assert "".join(found) == text
    sizes = [len(document) for document in found]
    assert min(sizes[:-1]) > corpus.DOCUMENT_BYTES_MAX and max(sizes) < 2 * corpus.DOCUMENT_BYTES_MAX + 10
    assert all(document.endswith(" ") for document in found[:2])
    assert len(documents(write(tmp_path / "d.txt", "漢字" * 100_000))) == 13


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


@pytest.mark.parametrize("packed", [False, True])
def test_the_line_ends_of_an_old_mac_give_the_same_documents(tmp_path, packed):
    text = "\n\n".join(f"Párrafo {i}.\nSegunda línea, ñandú." * 200 for i in range(12)) + "\nfin"
    expected = list(corpus.open_corpus(str(write(tmp_path / "d.txt", text))).placed())
    content = text.replace("\n", "\r").encode()
    name = "m.txt.gz" if packed else "m.txt"
    path = write(tmp_path / name, gzip.compress(content) if packed else content)
    assert list(corpus.open_corpus(str(path)).placed()) == expected and len(expected) > 3
    assert documents(write(tmp_path / "e.txt", "uno\rdos\ntres")) == ["uno\rdos\ntres"], "no line end among others"


def test_invalid_utf8_is_counted_with_its_first_line(tmp_path):
    lines = [b"linea buena %d" % i for i in range(500)]
    lines[41] = b"mala \xff\xfe"
    lines[300] = b"cortada \xc3"
    found = corpus.open_corpus(str(write(tmp_path / "d.txt", b"\n".join(lines))))
    text = "\n".join(found.documents())
    assert found.damage.bad == 2 and "línea 42" in found.damage.first
    assert "mala \ufffd\ufffd" in text and "cortada \ufffd\n" in text


@pytest.mark.parametrize("size", range(5, 16))
def test_a_bad_byte_of_a_long_line_costs_no_character_that_is_good(tmp_path, monkeypatch, size):
    monkeypatch.setattr(corpus, "CHUNK_BYTES", size)
    line = b"\xff" + "ñandú 漢字 😀 ".encode() * 4 + b"\xf0\x9f fin"
    found = corpus.open_corpus(str(write(tmp_path / "d.txt", line + b"\n" + b"buena\n" * 300)))
    assert "".join(found.documents()).startswith(line.decode("utf-8", "replace") + "\nbuena\n")
    assert found.damage.bad == 1


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
    with pytest.raises(UserError, match=r"dañadas: 3 de 200 leídas.*línea 21"):
        documents(write(tmp_path / "d.jsonl", "\n".join(lines)))


def test_the_file_to_mend_is_the_one_named_as_the_first(tmp_path):
    """In a folder, the damage may become too much only in a later file."""
    write(tmp_path / "a.txt", b"ca\xf1a\n" * 2)
    write(tmp_path / "b.jsonl", "roto\n" * 20)
    with pytest.raises(UserError, match=r"la primera: .*a\.txt, línea 1: .* corrija '.*a\.txt' o conviértalo a UTF-8 "):
        documents(tmp_path)


@pytest.mark.parametrize("ending", [b"\xff hola \xc3", b"\xff\xc3", b"{roto \xff", b'{"text": "a"}\xc3'])
@pytest.mark.parametrize("name", ["d.txt", "d.jsonl"])
def test_a_line_that_is_bad_in_more_than_one_way_is_one(tmp_path, name, ending):
    found = corpus.open_corpus(str(write(tmp_path / name, b'{"text": "bueno"}\n' * 300 + ending)))
    assert list(found.documents()) and (found.damage.bad, found.damage.lines) == (1, 301)


def test_a_text_in_another_encoding_is_an_error_before_much_of_it_is_read(tmp_path):
    line = "El ñandú corrió por la pampa húmeda.\n"
    write(tmp_path / "a.txt", line * 20)
    write(tmp_path / "b.txt", (line * 50_000).encode("latin-1"))
    found = corpus.open_corpus(str(tmp_path))
    reading = found.documents()
    assert next(reading) == (line * 20).rstrip("\n")
    with pytest.raises(UserError, match=r"dañadas: 20 de \d\d leídas.*b\.txt, línea 1: no es UTF-8 válido.*-f CP1252"):
        next(reading)


def test_a_byte_order_mark_is_one_at_the_beginning_of_a_line(tmp_path):
    """As where several files from Windows were joined into one."""
    text = write(tmp_path / "d.txt", "\ufeffuno\r\n" * 3)
    records = write(tmp_path / "d.jsonl", '\ufeff{"text": "uno"}\r\n' * 3)
    assert documents(text) == ["uno\nuno\nuno"] and documents(records) == ["uno"] * 3


def test_within_a_line_a_byte_order_mark_is_a_character(tmp_path, monkeypatch):
    """Also where a piece of a long line begins with it."""
    monkeypatch.setattr(corpus, "CHUNK_BYTES", 9)
    path = write(tmp_path / "d.txt", "\ufeffabcdef\ufeffghi")
    assert "".join(corpus.open_corpus(str(path)).documents()) == "abcdef\ufeffghi"


@pytest.mark.parametrize("size", range(2, 12))
def test_a_piece_of_a_long_line_does_not_end_within_a_line_end(tmp_path, monkeypatch, size):
    monkeypatch.setattr(corpus, "CHUNK_BYTES", size)
    path = write(tmp_path / "d.txt", "uno\r\ndos años\r\r\ntres\rcuatro\r\n\r\ncinco\r")
    assert documents(path) == ["uno\ndos años\r\ntres\rcuatro\n\ncinco\r"]


def test_records_none_of_which_has_a_text_are_not_all_read(tmp_path):
    path = write(tmp_path / "d.jsonl", '{"n": 7}\n' * 50_000)
    with pytest.raises(UserError, match="dañadas: .* de 1. leídas.*falta la clave «text» con.*en la clave «text»$"):
        next(corpus.open_corpus(str(path)).documents())


def test_a_long_record_is_several_documents(tmp_path, monkeypatch):
    """What one document takes in tokens is bounded; a reading may be continued behind each record, and not within."""
    monkeypatch.setattr(corpus, "RECORD_TEXT_MAX", 100)
    texts = ["palabra " * 60, "corto", "sinespacios" * 30 + " fin"]
    found = corpus.open_corpus(str(write(tmp_path / "d.jsonl", "\n".join(json.dumps({"text": t}) for t in texts))))
    parts, places = zip(*found.placed(), strict=True)
    assert "".join(parts) == "".join(texts) and max(map(len, parts)) < 200
    assert all(part.endswith(" ") for part in parts[:4]) and "corto" in parts
    for number, place in enumerate(places, 1):
        assert [part for part, _ in found.placed(place)] == list(parts[number:])


@pytest.mark.parametrize("name, line, rest", [
    ("d.jsonl", json.dumps({"text": "x" * 300_000}), ""), ("d.txt", "x" * 300_000, "fin")])
def test_how_far_it_is_does_not_wait_for_many_lines(tmp_path, name, line, rest):
    found = corpus.open_corpus(str(write(tmp_path / name, f"{line}\n" * 40 + rest)))
    told = [found.progress / found.total_bytes for _ in found.documents()]
    assert found.progress == found.total_bytes and told == sorted(told)
    assert {round(part, 1) for part in told} >= {tenth / 10 for tenth in range(1, 10)}


@pytest.mark.parametrize("clump", [range(400, 460), range(0, 20_000, 105), range(9)])
def test_little_damage_is_accepted_wherever_it_lies(tmp_path, clump):
    lines = [b"\xff" if number in clump else b"linea buena" for number in range(20_000)]
    found = corpus.open_corpus(str(write(tmp_path / "d.txt", b"\n".join(lines))))
    assert list(found.documents()) and found.damage.bad == len(clump)


@pytest.mark.parametrize("record", [
    '{"text": "x", "n": ' + "9" * 5000 + "}", '{"texto": "x"}', '{"text": 7}', '[1]', '{"text": "\\ud800"}', "null"])
def test_records_without_a_text_are_damage(tmp_path, record):
    lines = [json.dumps({"text": "bueno"})] * 300 + [record]
    found = corpus.open_corpus(str(write(tmp_path / "d.jsonl", "\n".join(lines))))
    assert len(list(found.documents())) == 300 and found.damage.bad == 1


@pytest.mark.parametrize("cut", [5, 40, -4])
def test_a_broken_gzip_is_named(tmp_path, cut):
    whole = gzip.compress(b"hola que tal\n" * 5000)
    with pytest.raises(UserError, match=r"d\.txt\.gz': no es un gzip, o está [^(]*; vuelva a descargarlo"):
        documents(write(tmp_path / "d.txt.gz", whole[:cut]))


def test_what_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(UserError, match="no existe.*muestra"):
        corpus.open_corpus(str(tmp_path / "nada.txt"))
    with pytest.raises(UserError, match=r"antes el texto \(curl -LO 'https://a.es/l\?a=1&b=2'\) e indique el fichero"):
        corpus.open_corpus("https://a.es/l?a=1&b=2")
    with pytest.raises(UserError, match=r"ruta de Windows; en WSL, C:\\Users\\Ana es /mnt/c/Users/Ana$"):
        corpus.open_corpus(r"D:\libros\un libro.txt")
    with pytest.raises(UserError, match=r"formato.*\.jsonl.gz: si es texto, dele un nombre que acabe así$"):
        corpus.open_corpus(str(write(tmp_path / "x.md", "x")))
    (tmp_path / "vacía").mkdir()
    with pytest.raises(UserError, match="no contiene"):
        corpus.open_corpus(str(tmp_path / "vacía"))
    os.mkfifo(tmp_path / "tubería.txt")
    for name in (os.devnull, str(tmp_path / "tubería.txt")):
        with pytest.raises(UserError, match=f"--dataset '{name}': no es un fichero ni una carpeta"):
            corpus.open_corpus(name, flag="--dataset")


@pytest.mark.parametrize("name", ["x" * 300 + ".txt", "~no-hay-tal-usuario/libro.txt"])
def test_a_path_that_cannot_be_looked_at_is_named(name):
    with pytest.raises(UserError, match=f"--dataset '{name}': (no se puede leer .el nombre es dem|no hay un usuario)"):
        corpus.open_corpus(name, flag="--dataset")


def test_a_path_inside_a_closed_folder_is_named(tmp_path, monkeypatch):
    def denied(self, **_):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "stat", denied)
    with pytest.raises(UserError, match=r"libro\.txt': no se puede leer .permiso denegado."):
        corpus.open_corpus(str(tmp_path / "libro.txt"))


def test_no_text_of_a_folder_is_passed_over(tmp_path, monkeypatch):
    """Of one that may not be read, or of a link to where nothing is; what is hidden is not looked at."""
    for name in ("abierta", "cerrada", ".oculta"):
        (tmp_path / name).mkdir()
    write(tmp_path / "abierta" / "d.txt", "hola")
    real = os.scandir

    def denied(folder):
        if Path(folder).name in ("cerrada", ".oculta"):
            raise PermissionError(13, "Permission denied", str(folder))
        return real(folder)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(UserError, match="no se puede leer '.*cerrada' .permiso denegado."):
        corpus.open_corpus(str(tmp_path))
    (tmp_path / "cerrada").rmdir()
    assert documents(tmp_path) == ["hola"]
    (tmp_path / "z.txt").symlink_to("nada.txt")
    with pytest.raises(UserError, match=r"no se puede leer '.*z\.txt' .no existe."):
        corpus.open_corpus(str(tmp_path))


def test_no_text_of_a_folder_is_passed_over_for_its_name_or_behind_a_link(tmp_path):
    where, real = tmp_path / "textos", tmp_path / "real"
    for folder in (where, real):
        folder.mkdir()
    write(where / "a.txt", "uno")
    write(where / "LIBRO.TXT", "dos")
    write(where / "x.JSONL", '{"text": "tres"}')
    with gzip.open(where / "y.Txt.GZ", "wb") as file:
        file.write(b"cuatro")
    write(real / "b.txt", "cinco")
    (where / "enlace").symlink_to(real)
    (real / "vuelta").symlink_to(where)
    (where / "otra").symlink_to(real)
    assert sorted(documents(where)) == ["cinco", "cuatro", "dos", "tres", "uno"]
    assert corpus.open_corpus(str(where / "LIBRO.TXT")).name == "LIBRO"


def test_a_file_of_a_folder_is_read_once_whatever_links_lead_to_it(tmp_path):
    (tmp_path / "sub").mkdir()
    write(tmp_path / "b.txt", "uno")
    write(tmp_path / "sub" / "real.txt", "dos")
    (tmp_path / "a.txt").symlink_to("sub/real.txt")
    (tmp_path / "c.txt").symlink_to("b.txt")
    assert documents(tmp_path) == ["dos", "uno"]


def test_the_format_of_a_link_is_that_of_its_own_name(tmp_path):
    """A cache of the Hub's keeps files under the hash of their content."""
    write(tmp_path / "0a1b2c", '{"text": "tres"}')
    (tmp_path / "datos").mkdir()
    (tmp_path / "datos" / "train.jsonl").symlink_to("../0a1b2c")
    assert documents(tmp_path / "datos") == documents(tmp_path / "datos" / "train.jsonl") == ["tres"]


def test_one_bad_line_counts_the_same_in_whatever_file_it_is(tmp_path):
    for bad, good in (("a", "b"), ("b", "a")):
        write(tmp_path / f"{bad}.txt", b"buena\n" * 20 + b"mala \xff\n")
        write(tmp_path / f"{good}.txt", b"buena\n" * 10_000)
        found = corpus.open_corpus(str(tmp_path))
        assert "mala" in "".join(found.documents()) and found.damage.bad == 1


@pytest.fixture
def folder(tmp_path):
    """Every kind of file, with what makes positions hard: a mark at the start, \\r\\n, bad bytes, very long lines."""
    records = [json.dumps({"text": f"uno {i} ñ"}, ensure_ascii=False) for i in range(300)]
    write(tmp_path / "a.jsonl", "\ufeff" + "\r\n".join([*records[:200], "", "{roto", *records[200:]]))
    write(tmp_path / "b.jsonl.gz", gzip.compress("\n".join(records).encode()))
    write(tmp_path / "c.txt", "\r\n\r\n".join(f"Párrafo {i}.\r\nSegunda línea, ñandú." * 200 for i in range(12)))
    write(tmp_path / "d.txt.gz", gzip.compress(("ñandú " * 300_000 + "\n\nfin\n\n").encode() * 2))
    write(tmp_path / "f.txt", "\r\r".join(f"Párrafo {i}.\rOtra línea." * 400 for i in range(12)))
    write(tmp_path / "g.txt", "ñandú " * 300_000)
    write(tmp_path / "e.txt", b"\n".join(b"linea %d " % i + b"texto " * 60 + b"\xff" * (i == 3) for i in range(20)))
    return tmp_path


def test_reading_goes_on_from_every_place(folder):
    found = corpus.open_corpus(str(folder))
    whole = list(found.placed())
    damage = found.damage
    assert len(whole) > 630 and [place["document"] for _, place in whole] == list(range(1, len(whole) + 1))
    for number in [*range(1, len(whole) - 120, 60), *range(len(whole) - 120, len(whole) + 1, 3)]:
        place = json.loads(json.dumps(whole[number - 1][1]))
        assert list(found.placed(place)) == whole[number:]
        assert found.damage.bad == damage.bad


def test_the_shares_are_disjoint_and_together_the_whole(folder):
    found = corpus.open_corpus(str(folder))
    shares = [list(found.placed(rank=rank, world_size=3)) for rank in range(3)]
    whole = list(found.documents())
    assert [[document for document, _ in share] for share in shares] == [whole[rank::3] for rank in range(3)]
    assert list(found.placed(shares[1][100][1], 1, 3)) == shares[1][101:]


@pytest.mark.parametrize("name", ["d.jsonl", "d.jsonl.gz", "d.txt"])
def test_what_lies_before_a_place_is_not_read_again(tmp_path, monkeypatch, name):
    content = "\n".join(json.dumps({"text": f"uno {i} " + "texto " * 50}) for i in range(500)).encode()
    found = corpus.open_corpus(str(write(tmp_path / name, gzip.compress(content) if ".gz" in name else content)))
    place = list(found.placed())[-10][1]
    read, real = [], corpus._lines

    def counted(file, path, damage, *rest, **options):
        for line in real(file, path, damage, *rest, **options):
            if damage is found.damage:
                read.append(line)
            yield line

    monkeypatch.setattr(corpus, "_lines", counted)
    assert len(list(found.placed(place))) == len(read) == 9


def test_the_share_of_bad_lines_is_that_of_all_that_was_read(tmp_path):
    lines = [json.dumps({"text": f"hola {i}"}) for i in range(200)]
    lines[198] = "{roto"
    found = corpus.open_corpus(str(write(tmp_path / "d.jsonl", "\n".join(lines))))
    place = list(found.placed())[190][1]
    assert len(list(found.placed(place))) == 8 and found.damage.bad == 1 and found.damage.lines == 200


def test_the_sample_goes_on_from_a_place(monkeypatch):
    monkeypatch.setattr(corpus, "SAMPLE_BYTES", 30_000)
    found = corpus.open_corpus("muestra")
    whole = list(found.placed())
    assert list(found.placed(whole[3][1])) == whole[4:]


@pytest.mark.parametrize("name", ["a" * 251, "ñ" * 125])
def test_the_longest_file_name_there_can_be_makes_a_folder(tmp_path, name):
    path = tmp_path / f"{name}.txt"
    path.write_text("hola, qué tal\n")
    found = preparation.prepare(corpus.open_corpus(str(path)), tmp_path / "Data", vocab_size=400, note=lambda _: None)
    assert name.startswith(found.directory.name) and len(found.directory.name.encode()) == 180


def test_links_in_a_circle_are_told_in_spanish(tmp_path):
    (tmp_path / "a.txt").symlink_to("a.txt")
    with pytest.raises(UserError, match=r"a\.txt' .los enlaces forman un círculo."):
        corpus.open_corpus(str(tmp_path))


def test_a_fingerprint_tells_sources_apart_without_reading_them(tmp_path):
    prints = set()
    for place, text in (("a", "hola"), ("b", "hola"), ("c", "holas")):
        (tmp_path / place).mkdir()
        prints.add(corpus.open_corpus(str(write(tmp_path / place / "d.txt", text))).fingerprint())
    assert len(prints) == 2
    for name in ("c4", "allenai/c4:en", "spanish", "allenai/c4", "muestra"):
        prints.add(corpus.open_corpus(name).fingerprint())
    assert len(prints) == 6


def test_a_line_of_spaces_behind_documents_is_none(tmp_path):
    lines = [letter * corpus.LINE_PER_DOCUMENT for letter in "abc"]
    opened = corpus.open_corpus(str(write(tmp_path / "a.txt", "\n".join([*lines, "  \n"]))))
    assert list(opened.documents()) == lines


def test_a_digest_tells_texts_from_records(tmp_path):
    digests = {corpus.open_corpus(str(write(tmp_path / name, '{"text": "hola"}\n'))).digest()
               for name in ("a.txt", "b.txt", "c.jsonl")}
    assert len(digests) == 2


def test_a_digest_tells_where_one_text_ends_and_the_next_begins(tmp_path):
    digests = set()
    for folder, texts in (("uno", ["holatxtadiós"]), ("dos", ["hola", "adiós"])):
        (tmp_path / folder).mkdir()
        for number, text in enumerate(texts):
            write(tmp_path / folder / f"{number}.txt", text)
        digests.add(corpus.open_corpus(str(tmp_path / folder)).digest())
    assert len(digests) == 2


def test_a_text_as_long_as_before_has_changed_too(tmp_path):
    opened = corpus.open_corpus(str(write(tmp_path / "a.txt", "hola")))
    os.link(tmp_path / "a.txt", tmp_path / "copia")  # as backups do
    os.chmod(tmp_path / "a.txt", 0o600)
    assert not opened.changed() and corpus.open_corpus(str(tmp_path / "a.txt")).source != opened.source
    write(tmp_path / "a.txt", "sola")
    os.utime(tmp_path / "a.txt", ns=(1, 1))  # a file system may count time in ticks
    assert opened.changed()


def test_names_on_the_hub_and_slips_in_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert corpus.open_corpus("spanish").source == {"kind": "hub", "repository": "allenai/c4", "configuration": "es"}
    found = corpus.open_corpus("dueño/mis-textos.v2:20231101.es")
    assert found.source == {"kind": "hub", "repository": "dueño/mis-textos.v2", "configuration": "20231101.es"}
    assert found.name == "dueño_mis-textos.v2_20231101.es"
    assert corpus.open_corpus("yo/textos").source["configuration"] is None
    (tmp_path / "datos").mkdir()
    (tmp_path / "fichero").write_bytes(b"")
    (tmp_path / "colgado").symlink_to("falta")
    for slip in ("datos/libro", "fichero/x", "colgado/x", "datos/libro.txt",
                 "datso/libro.TXT", "datso/libro.jsonl.gz", "c5", "a/b/c"):
        with pytest.raises(UserError, match=f"--dataset '{slip}': no existe"):
            corpus.open_corpus(slip, flag="--dataset")
    write(tmp_path / "datos" / "d.txt", "hola")
    (tmp_path / "datos").rename(tmp_path / "spanish")
    assert corpus.open_corpus("spanish").source["files"] == [str(tmp_path / "spanish" / "d.txt")], "what is here wins"


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
