"""The tokenizer: train a SentencePiece model on a bounded sample, load one of any kind, hand it over to other tools.

    load("otro.model")   load("carpeta")   load("tokenizer.json")   load("datificate/gpt2-small-spanish")

What is loaded encodes and decodes alike whatever its kind, and has a padding and an end-of-document token.
"""

import functools
import hashlib
import io
import json
import re
from pathlib import Path

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from aura import cgroup, hf_tokenizer, hub
from aura.errors import UserError
from aura.files import MISSHAPEN, explain, path_called, set_aside, write_bytes
from aura.hf_tokenizer import PROBE, SPACE, HuggingFaceTokenizer

SPACE_BYTES = SPACE.encode("utf-8")
SAMPLE_BYTES = 32_000_000  # text the tokenizer is trained on at most: BPE needs about ten times that in memory
LINE_CHARACTERS = 4000  # the trainer would leave out longer ones without a word
ENCODE_CHARACTERS = 1 << 18  # longest piece handed to SentencePiece at once, for flat memory
VOCAB_MOST = 2**31 - 1  # the trainer's int
CONTROLS = (("<pad>", "pad"), ("</s>", "eos"))
NAMES = ("tokenizer.model", "tokenizer.json", "vocab.json")
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")  # owner/name, or the bare name of an old model
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Tokenizer:
    """A SentencePiece model as bytes, with a padding and an end-of-document token.

    A model that keeps every character is given a real U+2581 as its three bytes; any other sees the text as
    SentencePiece itself does, where U+2581 is a space. model: the serialised ModelProto. Raises UserError if it is not
    one.
    """

    file_name = "tokenizer.model"

    def __init__(self, model):
        self.model = bytes(model)
        try:
            self._processor = sentencepiece.SentencePieceProcessor()
            self._processor.load_from_serialized_proto(self.model)  # the constructor takes b"" for no model at all
        except RuntimeError as problem:
            raise UserError("no es un modelo de SentencePiece válido; indique otro tokenizador") from problem
        self.vocab_size = self._processor.get_piece_size()
        self.eos_id = self._processor.eos_id()
        self.pad_id = self._processor.pad_id()
        self.sha256 = hashlib.sha256(self.model).hexdigest()
        self._space_ids = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_BYTES]
        self._verbatim = _keeps_every_character(self._proto())

    def _proto(self):
        return _parsed(self.model)

    @property
    def lossless(self):
        """Whether every text survives encoding and decoding (byte fallback and no normalisation)."""
        return self.decode(self.encode(PROBE)) == PROBE

    def encode(self, text):
        """The token ids (list of int) of `text`, without an end token."""
        return self.encode_batch([text], threads=1)[0]

    def encode_batch(self, texts, threads=None):
        """The token ids of each text, as a list of lists, on `threads` cores (all by default)."""
        threads = threads or cgroup.cores()
        if not self._verbatim:
            return self._processor.encode(list(texts), num_threads=threads)
        pieces, owners = [], []
        for owner, text in enumerate(texts):
            for number, part in enumerate(text.split(SPACE)):
                for piece in self._chunks(part):
                    pieces.append(piece)
                    owners.append((owner, number))
        encoded = self._processor.encode(pieces, num_threads=threads)
        results, at = [[] for _ in texts], [0] * len(texts)
        for (owner, number), ids in zip(owners, encoded, strict=True):
            results[owner] += self._space_ids * (number - at[owner])
            at[owner] = number
            results[owner] += ids
        for owner, text in enumerate(texts):
            results[owner] += self._space_ids * (text.count(SPACE) - at[owner])
        return results

    def _chunks(self, text):
        """Cut a text of more than ENCODE_CHARACTERS where no piece reaches across, so that the ids stay the same."""
        start = 0
        while len(text) - start > ENCODE_CHARACTERS:
            last = start + ENCODE_CHARACTERS
            end = next((at for at in range(last, start, -1) if text[at - 1:at + 1] not in self._neighbours), last)
            yield text[start:end]
            start = end
        if start < len(text):
            yield text[start:]

    @functools.cached_property
    def _neighbours(self):
        """Every two characters that stand side by side within some piece."""
        pieces = (piece.piece.replace(SPACE, " ") for piece in self._proto().pieces)
        return {piece[at:at + 2] for piece in pieces for at in range(len(piece) - 1)}

    def decode(self, ids):
        """The text of a list of token ids; ids of control tokens leave nothing."""
        return "".join(text if in_bytes else text.replace(SPACE, " ") for in_bytes, text in self._runs(ids))

    def _runs(self, ids):
        """(whether they are byte tokens, text) of each run of `ids`, cut so that byte tokens, which spell characters
        together, stand apart from whole pieces."""
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
        """How many UTF-8 bytes each token stands for, as int64 [vocab_size], 0 for control tokens; None of a model
        without bytes, whose unknown token may stand for any."""
        if not any(map(self._processor.is_byte, range(self.vocab_size))):
            return None
        sizes = np.zeros(self.vocab_size, dtype=np.int64)
        for token in range(self.vocab_size):
            if self._processor.is_byte(token):
                sizes[token] = 1
            elif not self._processor.is_control(token) and not self._processor.is_unknown(token):
                sizes[token] = len(self._processor.id_to_piece(token).replace(SPACE, " ").encode("utf-8"))
        return sizes

    def to_json(self, note=print):
        """The tokenizer.json (dict) that equals this tokenizer, or None where there can be none; `note` is told why,
        and what may differ."""
        return hf_tokenizer.from_sentencepiece(self._proto(), self._verbatim, note)

    def vocabulary(self):
        """{piece: id}, in the order of the ids."""
        names = hf_tokenizer.piece_names(self._proto(), self._verbatim)
        return {name: number for number, name in enumerate(names)}


def load(name_or_path, flag="--tokenizer"):
    """The tokenizer in a SentencePiece .model, a tokenizer.json, a folder that holds one, or on the Hugging Face Hub.

    A padding or end-of-document token that it lacks is added at the end, so that no id changes. flag: the argument that
    error messages name. Raises UserError.
    """
    named = f"{flag} {str(name_or_path)!r}"
    path = path_called(name_or_path, named)
    try:
        if path.is_dir():
            model, config = _from_directory(path, named)
        elif path.exists():
            model, config = path.read_bytes(), {}
            if path.name == "tokenizer.json" and (path.parent / "tokenizer_config.json").is_file():
                config = _read_config((path.parent / "tokenizer_config.json").read_bytes())
        else:
            model, config = _from_hub(str(name_or_path), named)
    except OSError as problem:
        raise UserError(f"{named}: no se puede leer ({explain(problem)}); compruebe la ruta y sus permisos, o "
                        "indique otro") from problem
    model = model.removeprefix(BYTE_ORDER_MARK)
    try:
        return from_bytes(hf_tokenizer.complete(model, config) if model[:1] == b"{" else _with_controls(model))
    except UserError as problem:
        raise UserError(f"{named}: {problem}") from problem
    except MISSHAPEN as problem:
        way_out = ("indique uno, o quite esa opción para que se entrene con el texto" if flag == "--tokenizer" else
                   "recupere los ficheros que se publicaron con el modelo, o indique otro")
        raise UserError(f"{named}: no es un modelo de SentencePiece ni un tokenizer.json; {way_out}") from problem


def from_bytes(model):
    """The tokenizer whose `model` these bytes are, of either kind. Raises UserError."""
    return HuggingFaceTokenizer(model) if model[:1] == b"{" else Tokenizer(model)


def export_files(tokenizer, directory, note=print):
    """Write tokenizer.json and vocab.json, and tokenizer.model of a SentencePiece model, into `directory`.

    Older files of these names that are not written anew are set aside. note: is told in Spanish what tokenizer.json
    cannot say exactly. Returns the names of the files. Raises OSError.
    """
    files = {tokenizer.file_name: tokenizer.model}
    document = tokenizer.to_json(note)
    if document is not None:
        files["tokenizer.json"] = json.dumps(document, ensure_ascii=False).encode("utf-8")
    files["vocab.json"] = json.dumps(tokenizer.vocabulary(), ensure_ascii=False, indent=0).encode("utf-8")
    # load() would take what another run left here for this one's.
    set_aside([Path(directory) / name for name in NAMES if name not in files], directory)
    for name, content in files.items():
        write_bytes(Path(directory) / name, content)
    return list(files)


def _from_directory(directory, named):
    """(model bytes, tokenizer_config.json as a dict) of a folder."""
    return _from_files(lambda name: (directory / name).read_bytes() if (directory / name).is_file() else None,
                       NAMES[:2], f"{named}: la carpeta no tiene tokenizer.model ni tokenizer.json; "
                       "indique otra")


def _from_files(read, names, nothing):
    """(model bytes, config dict) of what read(name) gives: bytes, or None where there is no such file.

    names: the files to look for, best first. Raises UserError(nothing) where there is no tokenizer.
    """
    config = _read_config(read("tokenizer_config.json"))
    for name in names:
        model = read(name)
        if model is not None:
            return model, config
    vocab, merges = read("vocab.json"), read("merges.txt")
    if vocab is None or merges is None:
        raise UserError(nothing)
    try:
        return hf_tokenizer.from_vocab_and_merges(vocab, merges), config
    except ValueError as problem:
        raise UserError(f"{nothing}, y su vocab.json o su merges.txt están dañados") from problem


def _read_config(content):
    try:
        config = json.loads(content or b"{}")
    except (ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _from_hub(name, named):
    """(model bytes, config dict) of a repository of the Hugging Face Hub, by way of its cache."""
    if not HUB_NAME.fullmatch(name) or name.endswith((".model", ".json")):
        raise UserError(f"{named}: no existe; indique un .model de SentencePiece, un tokenizer.json, una carpeta que "
                        "los contenga o un nombre del Hub como datificate/gpt2-small-spanish")
    try:
        import huggingface_hub
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    except ImportError as problem:
        raise UserError(f"{named}: no es un fichero ni una carpeta, y para buscarlo en el Hub falta huggingface_hub: "
                        "pip install huggingface_hub") from problem

    hub.quiet()

    def read(file):
        try:
            return Path(huggingface_hub.hf_hub_download(name, file)).read_bytes()
        except LocalEntryNotFoundError:  # no network, and not in the cache: nobody knows whether the Hub has it
            raise
        except EntryNotFoundError:
            return None

    try:
        # On the Hub tokenizer.json is the whole tokenizer; tokenizer.model may lack the tokens that were added later.
        return _from_files(read, ("tokenizer.json", "tokenizer.model"),
                           f"{named}: ese repositorio del Hub no tiene tokenizer.json ni tokenizer.model")
    except UserError:
        raise
    except Exception as problem:  # the network, the Hub and its cache fail in dozens of ways
        raise UserError(f"{named}: no es un fichero ni una carpeta, y no se pudo descargar del Hub "
                        f"({hub.reason(problem)}); compruebe el nombre y la red") from problem


def _keeps_every_character(proto):
    spec = proto.normalizer_spec
    changes = spec.precompiled_charsmap or spec.add_dummy_prefix or spec.remove_extra_whitespaces
    bytes_known = sum(piece.type == hf_tokenizer.BYTE for piece in proto.pieces) == 256
    return bool(not changes and spec.escape_whitespaces and proto.trainer_spec.byte_fallback and bytes_known)


def same_pieces(a, b):
    """Whether two tokenizers (bytes of either kind) are the same, except for the number of cores that trained them:
    SentencePiece writes it into a model, and ours used to keep it."""
    if a == b:
        return True
    try:
        return _untold(a, "num_threads") == _untold(b, "num_threads")
    except ValueError:
        return False


def _untold(model, *fields):
    """The bytes of a ModelProto without these settings of its training. Raises ValueError where they are none."""
    proto = _parsed(model)
    for field in fields:
        proto.trainer_spec.ClearField(field)
    return proto.SerializeToString()


def _parsed(model):
    """The ModelProto of these bytes. Raises ValueError where they are none."""
    try:
        return sentencepiece_model_pb2.ModelProto.FromString(model)
    except Exception as problem:  # protobuf's DecodeError has no stable import path across its versions
        raise ValueError("not a ModelProto") from problem


def _with_controls(model):
    """The bytes of a ModelProto with the control pieces that it lacks added at the end, so that no existing id changes.

    Raises ValueError where they are no model.
    """
    proto = _parsed(model)
    names = {piece.piece for piece in proto.pieces}
    for name, role in CONTROLS:
        wanted = getattr(proto.trainer_spec, f"{role}_piece") or name
        if wanted not in names:
            proto.pieces.add(piece=wanted, score=0.0, type=sentencepiece_model_pb2.ModelProto.SentencePiece.CONTROL)
        setattr(proto.trainer_spec, f"{role}_piece", wanted)
        setattr(proto.trainer_spec, f"{role}_id", [piece.piece for piece in proto.pieces].index(wanted))
    proto.trainer_spec.vocab_size = len(proto.pieces)
    return proto.SerializeToString()


def train(texts, vocab_size, note=print, named="el corpus"):
    """Train a BPE model with byte fallback and no normalisation on an iterator of texts.

    At most SAMPLE_BYTES of text are used. Where the text is too little for `vocab_size` pieces, it gets as many as
    it allows, and `note` is told. Source of the method: Kudo and Richardson 2018, "SentencePiece". named: how the error
    message calls the texts. Raises UserError for an empty text or a vocabulary too small for the alphabet. Returns a
    Tokenizer, the same one from the same texts on every machine.
    """
    if vocab_size > VOCAB_MOST:
        raise UserError(f"--vocab-size {vocab_size}: son demasiadas; indique como mucho {VOCAB_MOST} piezas")
    lines = _bounded_lines(texts)
    if not lines:
        raise UserError(f"{named} está vacío o solo tiene bytes nulos: no hay texto con que entrenar el tokenizador; "
                        "corríjalo o indique otro")
    tried = max(vocab_size, 3)  # asked for fewer, the trainer does not say how many it needs
    try:
        model = _train(lines, tried)
    except (RuntimeError, ValueError) as problem:
        largest = re.search(r"value <= (\d+)", str(problem))
        smallest = re.search(rf"{tried} vs (\d+)", str(problem))
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
    pieces = (line[start:start + LINE_CHARACTERS] for text in texts for line in text.split("\n")
              if line.strip() and line.strip("\0")  # the trainer learns nothing from a NUL
              for start in range(0, len(line), LINE_CHARACTERS))
    for piece in pieces:
        size += len(piece.encode("utf-8"))
        if size > SAMPLE_BYTES:  # also within a text: one record may be longer
            break
        lines.append(piece)
    return lines


def _train(lines, vocab_size):
    # A text with one word a line has no space to learn; without a piece for it, later spaces would become U+2581.
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, model_type="bpe", vocab_size=vocab_size, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False,
        character_coverage=0.9995, required_chars=SPACE, max_sentence_length=4 * LINE_CHARACTERS,
        num_threads=cgroup.cores(), minloglevel=2, pad_id=0, unk_id=1, bos_id=-1, eos_id=2, pad_piece="<pad>",
        eos_piece="</s>")
    return _untold(model.getvalue(), "num_threads", "required_chars")
