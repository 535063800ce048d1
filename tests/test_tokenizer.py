"""SentencePiece: no character is ever lost."""

import io
import random

import numpy as np
import pytest
import sentencepiece

from aura.errors import UserError
from aura.tokenizer import Tokenizer, train
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


def test_same_text_same_model(tokenizer):
    assert train([corpus_text()], 400).sha256 == tokenizer.sha256


def test_vocabulary_shrinks_with_a_note_where_the_text_is_small():
    notes = []
    small = train(["hola mundo cruel"], 5000, notes.append)
    assert small.vocab_size < 5000 and str(small.vocab_size) in notes[0] and "5000" in notes[0]


def test_too_small_a_vocabulary_names_the_least():
    with pytest.raises(UserError, match=r"--vocab-size 50.*al menos \d+"):
        train([corpus_text(1)], 50)


def test_empty_text():
    with pytest.raises(UserError, match="vacío"):
        train([" \n \n"], 300)


def test_a_model_without_padding_receives_it_and_keeps_its_ids(tmp_path):
    path = foreign(tmp_path, pad_id=-1, bos_id=-1, eos_id=-1)
    before = sentencepiece.SentencePieceProcessor(model_file=str(path))
    tokenizer = Tokenizer.load(path)
    assert before.pad_id() == -1 and before.eos_id() == -1
    assert sorted([tokenizer.pad_id, tokenizer.eos_id]) == [before.get_piece_size(), before.get_piece_size() + 1]
    assert tokenizer.encode("Ana compró pan") == before.encode("Ana compró pan")
    assert not tokenizer.lossless, "no byte fallback: said so, not hidden"


def test_what_is_not_a_model_is_named(tmp_path):
    (tmp_path / "x.model").write_bytes(b"\x00nada")
    for path in (tmp_path / "x.model", tmp_path / "falta.model"):
        with pytest.raises(UserError, match=path.name):
            Tokenizer.load(path)
