"""Tokenizers: no character is ever lost, and what others trained is taken as it is."""

import io
import json
import os
import random
import sys

import numpy as np
import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from aura import cgroup, corpus, hf_tokenizer, preparation
from aura import tokenizer as tokenizers
from aura.errors import UserError
from aura.tokenizer import from_bytes, load, same_pieces, train
from tests.support import corpus_text


@pytest.fixture(scope="module")
def tokenizer():
    return train([corpus_text()], 400)


def foreign(tmp_path, **options):
    """A model trained elsewhere, as users bring it."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(corpus_text(3).split(".")), model_writer=model,
                                             vocab_size=60, minloglevel=2, **options)
    path = tmp_path / "otro.model"
    path.write_bytes(model.getvalue())
    return path


@pytest.mark.parametrize("text", [
    "", " ", "  dos  espacios ", "\n\t\r\n", "\x00\x01\x7f", "😀👍🏽👨\u200d👩\u200d👧", "▁▁ a▁b▁",
    "<pad></s><unk><0x41>", "e\u0301 é \ufb01 ①", "\u200b\ufeff\u202e", "\U0010ffff\ue000", "¿Qué? ¡Ñandú!",
    "漢字かな한국어 العربية"])
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_round_trip_of_random_characters(tokenizer):
    dice = random.Random(0)
    alphabet = [*range(0x250), 0x2581, *range(0x1F300, 0x1F400), 0xD7FF, 0xE000, 0xFFFD, 0xFFFF, 0x10FFFF]
    for _ in range(2000):
        text = "".join(chr(dice.choice(alphabet)) for _ in range(dice.randrange(30)))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_batches_equal_single_texts_on_any_number_of_threads(tokenizer):
    texts = [corpus_text(2), "", "▁x▁", "hola " * 100_000]
    single = [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_batch(texts, threads=3) == single
    assert tokenizer.decode(single[3]) == texts[3]


def test_control_tokens(tokenizer):
    assert tokenizer.lossless
    assert 0 <= tokenizer.pad_id != tokenizer.eos_id >= 0
    assert tokenizer.decode([tokenizer.eos_id, *tokenizer.encode("a"), tokenizer.pad_id]) == "a"


def test_token_bytes_add_up(tokenizer):
    for text in (corpus_text(2), "ñ 😀▁\x00"):
        assert tokenizer.token_bytes()[tokenizer.encode(text)].sum() == len(text.encode("utf-8"))
    assert tokenizer.token_bytes()[tokenizer.eos_id] == 0
    assert tokenizer.token_bytes().dtype == np.int64


def test_token_bytes_are_not_known_where_a_token_stands_for_any_character(tmp_path):
    assert load(foreign(tmp_path)).token_bytes() is None


def test_same_text_same_model(tokenizer):
    assert train([corpus_text()], 400).sha256 == tokenizer.sha256


def with_threads(model, threads):
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    proto.trainer_spec.num_threads = threads
    return proto.SerializeToString()


def test_same_text_same_model_on_another_number_of_cores(tokenizer, monkeypatch):
    monkeypatch.setattr(cgroup, "cores", lambda: 7)
    assert train([corpus_text()], 400).model == tokenizer.model
    older = with_threads(tokenizer.model, 2)
    assert older != tokenizer.model and same_pieces(older, tokenizer.model)
    assert same_pieces(older, with_threads(tokenizer.model, 64))


def test_other_pieces_are_told_apart(tokenizer, tmp_path):
    others = [train([corpus_text()], 401).model, train([corpus_text(2)], 400).model, load(byte_level(tmp_path)).model]
    for other in (*others, b"", b"{", b"nada"):
        assert not same_pieces(tokenizer.model, other) and not same_pieces(other, tokenizer.model)
        assert same_pieces(other, bytes(other))
    assert not same_pieces(b"{", b"nada")


def test_vocabulary_shrinks_with_a_note_where_the_text_is_small():
    notes = []
    small = train(["hola mundo cruel"], 5000, notes.append)
    assert small.vocab_size < 5000 and str(small.vocab_size) in notes[0] and "5000" in notes[0]


@pytest.mark.parametrize("size", [1, 50])
def test_too_small_a_vocabulary_names_the_least(size):
    with pytest.raises(UserError, match=rf"--vocab-size {size}: .*al menos \d\d\d piezas"):
        train([corpus_text(1)], size)


def test_too_large_a_vocabulary_names_the_most():
    with pytest.raises(UserError, match="--vocab-size 3000000000: .*como mucho 2147483647 piezas"):
        train([corpus_text(1)], 3_000_000_000)


@pytest.mark.parametrize("text", ["\n".join(corpus_text(3).split()), corpus_text(3).replace(" ", "\t"),
                                  "漢字かな\n" * 50])
def test_spaces_survive_that_the_text_has_not(text):
    tokenizer = train([text], 5000, lambda _: None)
    for later in ("En un lugar de la Mancha", "  ▁ a▁b "):
        assert tokenizer.decode(tokenizer.encode(later)) == later
    assert tokenizer.lossless


def test_of_text_with_spaces_nothing_else_is_learned(tokenizer, monkeypatch):
    real = sentencepiece.SentencePieceTrainer.train
    monkeypatch.setattr(sentencepiece.SentencePieceTrainer, "train",
                        lambda **options: real(**{**options, "required_chars": ""}))
    assert train([corpus_text()], 400).model == tokenizer.model


@pytest.mark.parametrize("text", ["ñandú " * 9000, "ñandú de la pampa\n" * 3000])
def test_the_sample_ends_within_a_text_too(monkeypatch, text):
    monkeypatch.setattr(tokenizers, "SAMPLE_BYTES", 40_000)
    sizes = [len(line.encode()) for line in tokenizers._bounded_lines([text])]
    assert 30_000 < sum(sizes) <= 40_000


def test_empty_text():
    with pytest.raises(UserError, match="vacío"):
        train([" \n \n"], 300)


def test_a_model_without_padding_receives_it_and_keeps_its_ids(tmp_path):
    path = foreign(tmp_path, pad_id=-1, bos_id=-1, eos_id=-1)
    before = sentencepiece.SentencePieceProcessor(model_file=str(path))
    tokenizer = load(path)
    assert before.pad_id() == -1 and before.eos_id() == -1
    assert sorted([tokenizer.pad_id, tokenizer.eos_id]) == [before.get_piece_size(), before.get_piece_size() + 1]
    assert tokenizer.encode("Ana compró pan") == before.encode("Ana compró pan")
    assert not tokenizer.lossless, "no byte fallback: said so, not hidden"


def test_a_long_text_is_cut_where_no_piece_reaches_across(tokenizer, monkeypatch):
    text = corpus_text(1) + "漢字" * 30
    whole = tokenizer.encode(text)
    monkeypatch.setattr(tokenizers, "ENCODE_CHARACTERS", 37)
    assert tokenizer.encode(text) == whole
    assert [len(chunk) <= 37 for chunk in tokenizer._chunks(text)].count(True) > len(text) / 37


def test_a_normalising_model_sees_the_text_as_sentencepiece_does(tmp_path):
    path = foreign(tmp_path)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(path))
    for text in ("  Ana   compró ▁pan  ", "▁", "", "día\tdía"):
        assert load(path).encode(text) == theirs.encode(text)


# tokenizer.json


def byte_level(tmp_path, name="tokenizer.json", **options):
    """A byte-level BPE in a tokenizer.json, as GPT-2's."""
    tokenizers_library = pytest.importorskip("tokenizers")
    made = tokenizers_library.ByteLevelBPETokenizer()
    made.train_from_iterator([corpus_text(3)], **{"vocab_size": 300, "show_progress": False, **options})
    made.save(str(tmp_path / name))
    return tmp_path / name


def test_a_byte_level_tokenizer_receives_what_it_lacks_and_keeps_its_ids(tmp_path):
    path = byte_level(tmp_path)
    import tokenizers as library

    before = library.Tokenizer.from_file(str(path))
    tokenizer = load(path)
    size = before.get_vocab_size()
    assert sorted([tokenizer.eos_id, tokenizer.pad_id]) == [size, size + 1] and tokenizer.vocab_size == size + 2
    assert list(tokenizer.vocabulary().values()) == list(range(size + 2))
    assert tokenizer.lossless and tokenizer.file_name == "tokenizer.json"
    for text in (corpus_text(1), "  ñ 😀▁\x00\n", "", "<|endoftext|><pad>"):
        ids = tokenizer.encode(text)
        assert ids == before.encode(text).ids and max(ids, default=0) < size
        assert tokenizer.decode([tokenizer.eos_id, *ids, tokenizer.pad_id]) == text
        assert tokenizer.token_bytes()[ids].sum() == len(text.encode("utf-8"))
    assert tokenizer.encode_batch(["Ana", "", "ñ"], threads=1) == [tokenizer.encode(text) for text in ("Ana", "", "ñ")]
    assert not tokenizer.token_bytes()[[tokenizer.eos_id, tokenizer.pad_id]].any()
    assert tokenizer.token_bytes().dtype == np.int64 and len(tokenizer.token_bytes()) == tokenizer.vocab_size


@pytest.mark.parametrize("config", [{}, {"eos_token": "<|endoftext|>"}, {"eos_token": None, "pad_token": None}])
def test_a_word_of_the_text_is_no_end_where_none_is_configured(tmp_path, config):
    library = pytest.importorskip("tokenizers")
    made = library.ByteLevelBPETokenizer()
    made.train_from_iterator(["None of us"] * 9, vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load(tmp_path)
    assert "None" in tokenizer.vocabulary() and tokenizer.vocabulary()["<|endoftext|>"] == tokenizer.eos_id
    assert tokenizer.decode(tokenizer.encode("None of us")) == "None of us"


@pytest.mark.parametrize("model", ["BPE", "WordLevel"])
def test_pieces_that_do_not_tell_where_the_spaces_are_have_no_sizes(model):
    pytest.importorskip("tokenizers")
    of_words = {"BPE": {"merges": [], "end_of_word_suffix": "</w>", "vocab": {"a": 0, "a</w>": 1}},
                "WordLevel": {"unk_token": "a", "vocab": {"a": 0, "b": 1}}}[model]
    for kind in ({"type": model}, {}):  # GPT-2's own file does not say
        document = {"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": {**kind, **of_words}}
        assert from_bytes(hf_tokenizer.complete(json.dumps(document), {})).token_bytes() is None


@pytest.mark.parametrize(("in_bytes", "sizes"), [(True, [2, 0]), (False, None)])
def test_what_is_unknown_to_a_unigram_has_no_size(in_bytes, sizes):
    """Without bytes no piece has one: the unknown may stand for any text."""
    pytest.importorskip("tokenizers")
    document = {"version": "1.0", "decoder": None,
                "model": {"type": "Unigram", "unk_id": 1, "byte_fallback": in_bytes,
                          "vocab": [["ñ", -1.0], ["desconocido", 0.0]]}}
    known = from_bytes(hf_tokenizer.complete(json.dumps(document), {})).token_bytes()
    assert (None if known is None else known[:2].tolist()) == sizes


def test_bytes_of_both_kinds_are_told_apart_and_stay_the_same(tokenizer, tmp_path):
    other = load(byte_level(tmp_path))
    for kind in (tokenizer, other):
        again = from_bytes(kind.model)
        assert type(again) is type(kind) and again.sha256 == kind.sha256
        (tmp_path / kind.file_name).write_bytes(kind.model)
        assert load(tmp_path / kind.file_name).sha256 == kind.sha256


def test_what_would_change_a_text_is_switched_off(tmp_path):
    path = byte_level(tmp_path, special_tokens=["<s>", "<|endoftext|>"])
    document = json.loads(path.read_text("utf-8"))
    document["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    document["post_processor"] = {
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                                                 {"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}}
    path.write_text(json.dumps(document), "utf-8")
    tokenizer = load(path)
    assert tokenizer.decode(tokenizer.encode(corpus_text(1))) == corpus_text(1)
    assert tokenizer.eos_id == 1 and tokenizer.pad_id == tokenizer.vocab_size - 1
    assert 0 not in tokenizer.encode("<s>hola"), "text never becomes a special token"


def test_a_folder_says_which_tokens_have_a_role(tokenizer, tmp_path):
    byte_level(tmp_path, special_tokens=["<fin>", "<hueco>", "<|endoftext|>"])
    config = {"eos_token": {"content": "<fin>", "lstrip": False}, "pad_token": "<hueco>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        assert (load(name).eos_id, load(name).pad_id) == (0, 1)
    assert from_bytes(load(tmp_path).model).eos_id == 0, "the bytes alone know it"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<fin>", "pad_token": "<fin>"}))
    assert load(tmp_path).pad_id not in (0, load(tmp_path).eos_id), "padding is never the end of a document"
    (tmp_path / "tokenizer.model").write_bytes(tokenizer.model)
    assert load(tmp_path).sha256 == tokenizer.sha256


def test_two_pieces_of_one_number_are_refused(tmp_path):
    """The end token that is added would be the last piece of a vocabulary with gaps."""
    library = pytest.importorskip("tokenizers")
    pieces = dict(zip("abcdef", (0, 1, 2, 3, 5, 6), strict=True))
    library.Tokenizer(library.models.BPE(vocab=pieces, merges=[])).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="dos piezas tienen el mismo número"):
        load(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_the_older_pair_of_files(tmp_path, end):
    document = json.loads(byte_level(tmp_path, "otro.json").read_text("utf-8"))
    vocab, merges = document["model"]["vocab"], document["model"]["merges"]
    vocab["##"] = max(vocab.values()) + 1
    merges.append(["#", "#"])  # a line that begins as the first one does
    (tmp_path / "otro.json").write_text(json.dumps(document), "utf-8")
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    lines = ["#version: 0.2", *(f"{a} {b}" for a, b in merges), ""]
    (tmp_path / "merges.txt").write_bytes(end.join(lines).encode())
    text = corpus_text(1) + " ñ 😀 ##"
    assert vocab["##"] in load(tmp_path).encode(text)
    assert load(tmp_path).encode(text) == load(tmp_path / "otro.json").encode(text)


@pytest.mark.parametrize(("piece", "kept"), [
    ("ñ", False), ("<|yo|>", True), ("  ", True), ({"lstrip": True}, False), ({"rstrip": True}, False)])
def test_an_added_piece_that_does_not_come_back_is_not_hidden(piece, kept, tmp_path):
    path = byte_level(tmp_path)
    import tokenizers as library

    changed = library.Tokenizer.from_file(str(path))
    if isinstance(piece, dict):
        piece = library.AddedToken("<|yo|>", **piece)
    changed.add_tokens([piece])
    changed.save(str(path))
    tokenizer = load(path)
    text = f"a {getattr(piece, 'content', piece)} b"
    assert tokenizer.lossless == (tokenizer.decode(tokenizer.encode(text)) == text) == kept


def test_byte_fallback_counts_its_bytes(tokenizer, tmp_path):
    pytest.importorskip("tokenizers")
    tokenizers.export_files(tokenizer, tmp_path)
    theirs = load(tmp_path / "tokenizer.json")
    assert (theirs.eos_id, theirs.pad_id) == (tokenizer.eos_id, tokenizer.pad_id)
    assert (theirs.token_bytes() == tokenizer.token_bytes()).all() and theirs.lossless


def test_data_are_prepared_with_it(tmp_path):
    path = byte_level(tmp_path)
    (tmp_path / "libro.txt").write_text(corpus_text(3), "utf-8")
    made = preparation.prepare(corpus.open_corpus(str(tmp_path / "libro.txt")), tmp_path / "Data",
                           tokenizer=load(path), note=lambda line: None)
    assert made.load_tokenizer().sha256 == load(path).sha256
    assert (made.directory / "tokenizer.json").is_file() and made.vocab_size == load(path).vocab_size
    made.verify()


class Hub:
    """huggingface_hub.hf_hub_download over a folder."""

    def __init__(self, folder, missing):
        self.folder, self.missing, self.asked = folder, missing, []

    def __call__(self, name, file):
        self.asked.append((name, file))
        if not (self.folder / file).exists():
            raise self.missing
        return str(self.folder / file)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    library = pytest.importorskip("huggingface_hub")
    from huggingface_hub.errors import EntryNotFoundError

    made = Hub(tmp_path, EntryNotFoundError("404"))
    monkeypatch.setattr(library, "hf_hub_download", made)
    return made


def test_a_name_of_the_hub(hub, tmp_path):
    path, model = byte_level(tmp_path), tmp_path / "tokenizer.model"
    model.write_text("sin las piezas que se le añadieron")
    assert load("datificate/gpt2-small-spanish").sha256 == load(path).sha256
    assert ("datificate/gpt2-small-spanish", "tokenizer.json") in hub.asked
    path.unlink()
    model.unlink()
    with pytest.raises(UserError, match="--otra 'datificate/x'.*no tiene tokenizer.json"):
        load("datificate/x", flag="--otra")


def test_the_hub_out_of_reach(hub):
    from huggingface_hub.errors import LocalEntryNotFoundError

    unreached = "no se pudo conectar con el Hub"
    for missing, told in ((LocalEntryNotFoundError("no net\nmore"), unreached), (ConnectionError("no net"), unreached),
                          (OSError("sin\nred"), "sin red")):
        hub.missing = missing
        with pytest.raises(UserError, match=rf"'a/b'.*no se pudo descargar del Hub \({told}\); compruebe"):
            load("a/b")


@pytest.mark.parametrize(("library", "name"), [("tokenizers", "tokenizer.json"), ("huggingface_hub", "a/b")])
def test_an_optional_library_that_is_missing_is_named(library, name, tmp_path, monkeypatch):
    name = byte_level(tmp_path) if library == "tokenizers" else name
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UserError, match=f"pip install {library}"):
        load(name)


def test_what_is_not_a_tokenizer_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # no test may reach for the network
    (tmp_path / "x.model").write_bytes(b"\x00nada")
    (tmp_path / "vacío.model").write_bytes(b"")
    (tmp_path / "roto.json").write_text("{")
    (tmp_path / "hondo.json").write_text('{"a":' * 100_000)
    (tmp_path / "lista.json").write_text("[1]")
    (tmp_path / "ajeno.json").write_text('{"a": 1}')
    (tmp_path / "raro.json").write_text('{"model": {"type": "Nada", "vocab": {"a": 0}}}')
    (tmp_path / "vocabulario.json").write_text('{"model": {"type": "BPE", "vocab": 3}}')
    (tmp_path / "carpeta").mkdir()
    os.mkfifo(tmp_path / "tubería.model")  # nobody writes into it
    names = ["x.model", "vacío.model", "roto.json", "hondo.json", "lista.json", "ajeno.json", "raro.json",
             "vocabulario.json", "falta.model", "falta.json", "carpeta", "una/ruta/falta", "tubería.model"]
    for name in names:
        with pytest.raises(UserError) as caught:
            load(tmp_path / name, flag="--tokenizer-name-or-path")
        line = str(caught.value)
        assert name in line and line.startswith("--tokenizer-name-or-path ") and "\n" not in line, line


@pytest.mark.parametrize("model", [b"", b"\x00nada", b'{"model": ', b'{"a": \xff}', b'{"a":' * 100_000])
def test_damaged_bytes_are_one_line(model, capfd):
    with pytest.raises(UserError, match="no es un modelo de SentencePiece válido|está dañado: no es JSON válido"):
        from_bytes(model)
    assert capfd.readouterr() == ("", "")


def test_an_unreadable_file_is_named(tmp_path, monkeypatch):
    path = byte_level(tmp_path)

    def denied(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "read_bytes", denied)
    with pytest.raises(UserError, match=r"tokenizer\.json.*permiso denegado.; compruebe la ruta y sus permisos"):
        load(path)
