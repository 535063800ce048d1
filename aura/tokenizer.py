"""SentencePiece: train on a bounded sample, load, add what is missing, encode and decode without losing a character."""

import hashlib
import io
import os
import re
from pathlib import Path

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from aura.errors import UserError

SPACE = "▁"  # U+2581, how SentencePiece writes a space; a real one in the text travels as its three bytes
SPACE_BYTES = SPACE.encode("utf-8")
SAMPLE_BYTES = 32_000_000  # text the tokenizer is trained on at most: BPE needs about ten times that in memory
LINE_CHARACTERS = 4000  # longer ones the trainer would leave out without a word
ENCODE_CHARACTERS = 1 << 18  # longest piece handed to SentencePiece at once, for flat memory
CONTROLS = (("<pad>", "pad"), ("</s>", "eos"))


class Tokenizer:
    """A SentencePiece model as bytes, with a padding and an end-of-document token.

    model: the serialised ModelProto. Raises UserError if it is not one.
    """

    def __init__(self, model):
        self.model = bytes(model)
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=self.model)
        except (RuntimeError, TypeError) as problem:
            raise UserError("el tokenizador no es un modelo de SentencePiece válido; indique otro con --tokenizer"
                            ) from problem
        self.vocab_size = self._processor.get_piece_size()
        self.eos_id = self._processor.eos_id()
        self.pad_id = self._processor.pad_id()
        self.sha256 = hashlib.sha256(self.model).hexdigest()
        self._space_ids = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_BYTES]
        if not all(self._processor.is_byte(token) for token in self._space_ids):
            self._space_ids = [self._processor.unk_id()]

    @classmethod
    def load(cls, path):
        """Read a model file and add a padding or end token that it lacks. Raises UserError naming the file."""
        try:
            model = Path(path).read_bytes()
        except OSError as problem:
            raise UserError(f"--tokenizer {str(path)!r}: no se puede leer ({problem.strerror})") from problem
        proto = sentencepiece_model_pb2.ModelProto()
        try:
            proto.ParseFromString(model)
        except Exception as problem:  # protobuf's DecodeError has no stable import path across its versions
            raise UserError(f"--tokenizer {str(path)!r}: no es un modelo de SentencePiece") from problem
        return cls(_with_controls(proto).SerializeToString())

    @property
    def lossless(self):
        """Whether every text survives encoding and decoding (byte fallback and no normalisation)."""
        probe = "  Ñandú ﬁ①\t\n\r\x00😀 é e\u0301 ▁ \u200b漢 "
        return self.decode(self.encode(probe)) == probe

    def encode(self, text):
        """The token ids (list of int) of `text`, without an end token."""
        return self.encode_batch([text], threads=1)[0]

    def encode_batch(self, texts, threads=None):
        """The token ids of each text, as a list of lists, on `threads` cores (all by default)."""
        pieces, owners = [], []
        for owner, text in enumerate(texts):
            for number, part in enumerate(text.split(SPACE)):
                for start in range(0, len(part), ENCODE_CHARACTERS):
                    pieces.append(part[start:start + ENCODE_CHARACTERS])
                    owners.append((owner, number))
        encoded = self._processor.encode(pieces, num_threads=threads or os.cpu_count() or 1)
        results, at = [[] for _ in texts], [0] * len(texts)
        for (owner, number), ids in zip(owners, encoded, strict=True):
            results[owner] += self._space_ids * (number - at[owner])
            at[owner] = number
            results[owner] += ids
        for owner, text in enumerate(texts):
            results[owner] += self._space_ids * (text.count(SPACE) - at[owner])
        return results

    def decode(self, ids):
        """The text of a list of token ids; ids of control tokens leave nothing."""
        return "".join(_unescape(piece) for piece in self._runs(ids))

    def _runs(self, ids):
        """Cut `ids` so that byte tokens, which spell characters together, stand apart from whole pieces."""
        run, in_bytes = [], False
        for token in map(int, ids):
            is_byte = self._processor.is_byte(token)
            if run and is_byte != in_bytes:
                yield in_bytes, self._text(run, in_bytes)
                run = []
            run.append(token)
            in_bytes = is_byte
        if run:
            yield in_bytes, self._text(run, in_bytes)

    def _text(self, run, in_bytes):
        if in_bytes:
            return bytes(int(self._processor.id_to_piece(token)[3:5], 16) for token in run).decode("utf-8", "replace")
        hidden = (self._processor.is_control(token) or self._processor.is_unknown(token) for token in run)
        return "".join("" if skip else self._processor.id_to_piece(token)
                       for token, skip in zip(run, hidden, strict=True))

    def token_bytes(self):
        """How many UTF-8 bytes each token stands for, as int64 [vocab_size]; 0 for control tokens."""
        sizes = np.zeros(self.vocab_size, dtype=np.int64)
        for token in range(self.vocab_size):
            if self._processor.is_byte(token):
                sizes[token] = 1
            elif not self._processor.is_control(token) and not self._processor.is_unknown(token):
                sizes[token] = len(self._processor.id_to_piece(token).replace(SPACE, " ").encode("utf-8"))
        return sizes


def _unescape(run):
    in_bytes, text = run
    return text if in_bytes else text.replace(SPACE, " ")


def _with_controls(proto):
    """Add the control pieces that `proto` lacks, at the end, so that no existing id changes."""
    names = {piece.piece for piece in proto.pieces}
    for name, role in CONTROLS:
        wanted = getattr(proto.trainer_spec, f"{role}_piece") or name
        if wanted not in names:
            proto.pieces.add(piece=wanted, score=0.0, type=sentencepiece_model_pb2.ModelProto.SentencePiece.CONTROL)
        setattr(proto.trainer_spec, f"{role}_piece", wanted)
        setattr(proto.trainer_spec, f"{role}_id", [piece.piece for piece in proto.pieces].index(wanted))
    proto.trainer_spec.vocab_size = len(proto.pieces)
    return proto


def train(texts, vocab_size, note=print):
    """Train a BPE model with byte fallback and no normalisation on an iterator of texts.

    At most SAMPLE_BYTES of text are used. Where the text cannot carry `vocab_size` pieces, as many as it can, with a
    note. Source of the method: Kudo and Richardson 2018, "SentencePiece". Raises UserError for an empty text or a
    vocabulary too small for the alphabet. Returns a Tokenizer.
    """
    lines = _bounded_lines(texts)
    if not lines:
        raise UserError("el corpus está vacío: no hay texto con que entrenar el tokenizador")
    try:
        model = _train(lines, vocab_size)
    except (RuntimeError, ValueError) as problem:
        largest = re.search(r"value <= (\d+)", str(problem))
        smallest = re.search(rf"{vocab_size} vs (\d+)", str(problem))
        if smallest:
            raise UserError(f"--vocab-size {vocab_size}: el alfabeto de este corpus necesita al menos "
                            f"{smallest.group(1)} piezas") from problem
        if not largest:
            raise UserError(f"--vocab-size {vocab_size}: no se puede entrenar el tokenizador: {problem}") from problem
        note(f"El corpus no da para {vocab_size} piezas: el vocabulario queda en {largest.group(1)}.")
        model = _train(lines, int(largest.group(1)))
    return Tokenizer(model)


def _bounded_lines(texts):
    lines, size = [], 0
    for text in texts:
        for line in text.split("\n"):
            if line.strip():
                lines += [line[start:start + LINE_CHARACTERS] for start in range(0, len(line), LINE_CHARACTERS)]
                size += len(line)
        if size >= SAMPLE_BYTES:
            break
    return lines


def _train(lines, vocab_size):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, model_type="bpe", vocab_size=vocab_size, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False,
        character_coverage=0.9995, max_sentence_length=4 * LINE_CHARACTERS, num_threads=os.cpu_count() or 1,
        minloglevel=2, pad_id=0, unk_id=1, bos_id=-1, eos_id=2, pad_piece="<pad>", eos_piece="</s>")
    return model.getvalue()
