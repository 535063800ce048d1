"""BERT's WordPiece (Wu et al. 2016, Devlin et al. 2019): words cut into the longest pieces of a vocabulary.

    tokenizer = load("bert-base-uncased")                  a folder with vocab.txt or tokenizer.json, or such a file
    tokenizer = WordPiece(learn(texts, 4000))              a small vocabulary of one's own
    ids, starts, ends = tokenizer.encode("¿Dónde está?")   text[starts[i]:ends[i]] is what token i stands for

Ids and offsets are those of Hugging Face's `tokenizers`, with two exceptions. That library knows Unicode 8, this module
the version of the running Python: with 3.11, which has version 14, 503 newer marks, format characters and signs of
punctuation are removed or set apart here and not there. And where NFD changes the order of two marks, the library's
offsets name the other mark.
"""

import hashlib
import itertools
import json
import os
import re
import unicodedata
from collections import Counter

import numpy as np

from aura.errors import UserError
from aura.files import MISSHAPEN, explain, path_called

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORD_CHARACTERS = 100  # a longer word is unknown
CACHED_WORDS = 1 << 16
CACHED_CHARACTERS = 32  # longer words hardly come again
ASCII_PUNCTUATION = r"!-/:-@\[-`{-~"
WHITE = " \t\n\r\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
# No word reaches across white space or punctuation; other characters that end a word are found later.
PARTS = re.compile(f"[{WHITE}]+|[{ASCII_PUNCTUATION}]|[^{ASCII_PUNCTUATION}{WHITE}]+")
WORDS = re.compile("[^ ]+")
# Each is a word of its own. 2B920 is what `tokenizers` has; BERT's first code began at 2B820.
IDEOGRAPHS = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002b81f"
                        "\U0002b920-\U0002ceaf\U0002f800-\U0002fa1f]")
PUNCTUATION = re.compile(f"[{ASCII_PUNCTUATION}]")
# What the tokenizer.json of a BERT says, besides its vocabulary and whether it lowercases.
BERT = {"model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": WORD_CHARACTERS},
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"}}


class WordPiece:
    """A vocabulary and the rules of BERT.

    vocab: {piece: id}. lowercase: for an uncased vocabulary. strip_accents: None as BERT does it, with lowercase only.
    pad_id, unk_id, cls_id, sep_id: ids of the special tokens. sha256: of the vocabulary and the rules. Raises UserError
    when a special token but [MASK] is missing.
    """

    def __init__(self, vocab, lowercase=True, strip_accents=None):
        missing = [token for token in SPECIAL[:4] if token not in vocab]
        if missing:
            raise UserError(f"el vocabulario WordPiece no tiene {', '.join(missing)}: use el de un modelo BERT")
        self.vocab = vocab
        self.vocab_size = max(vocab.values()) + 1
        self.pad_id, self.unk_id, self.cls_id, self.sep_id = map(vocab.get, SPECIAL[:4])
        self.lowercase = lowercase
        self.strip_accents = lowercase if strip_accents is None else strip_accents
        identity = [self.lowercase, self.strip_accents, list(vocab.items())]
        self.sha256 = hashlib.sha256(json.dumps(identity).encode("utf-8")).hexdigest()
        self._characters = _Characters(self.lowercase, self.strip_accents)
        self._longest = max(map(len, vocab))
        self._parts = _Parts(self)

    def encode(self, text):
        """(ids, starts, ends) of `text`, int32 [tokens] each, without [CLS] and [SEP].

        starts, ends: places in `text` as given of each token's first character, and after its last. A character that
        normalisation takes apart may belong to several tokens, one that it removes to none. Text never becomes a
        special token, not even text that spells its name.
        """
        if len(self._parts) > CACHED_WORDS:
            self._parts.clear()
        parts = PARTS.findall(text)
        found = list(map(self._parts.__getitem__, parts))
        begins = np.zeros(len(parts), np.int32)
        np.cumsum(np.fromiter(map(len, parts[:-1]), np.int32, max(0, len(parts) - 1)), out=begins[1:])
        sizes = np.fromiter(map(len, found), np.int32, len(parts)) // _Parts.TOKEN_BYTES
        table = np.frombuffer(b"".join(found), np.int32).reshape(-1, 3)
        begins = np.repeat(begins, sizes)
        return table[:, 0].copy(), table[:, 1] + begins, table[:, 2] + begins

    def tokens_of(self, part):
        """(id, start, end) of each token in a text without white space, the long way."""
        for word, at in _words(part, self._characters):
            pieces = self._cut(word)
            for number, first, last in pieces or [(self.unk_id, 0, len(word))]:
                yield number, at[first], at[last - 1] + 1

    def _cut(self, word):
        """[(id, start, end)] of the longest pieces from left to right; None when they do not make up the word."""
        pieces, start = [], 0
        if len(word) > WORD_CHARACTERS:
            return None
        while start < len(word):
            head = "##" if start else ""
            for end in range(min(len(word), start + self._longest), start, -1):
                number = self.vocab.get(head + word[start:end])
                if number is not None:
                    break
            else:
                return None
            pieces.append((number, start, end))
            start = end
        return pieces


class _Parts(dict):
    """What is known of the parts of texts: their tokens' (id, start, end) as the bytes of int32 [tokens, 3]."""

    TOKEN_BYTES = 12

    def __init__(self, tokenizer):
        super().__init__()
        self.tokenizer = tokenizer

    def __missing__(self, part):
        tokens = list(self.tokenizer.tokens_of(part))
        result = np.array(tokens, np.int32).tobytes()
        if len(part) <= CACHED_CHARACTERS:
            self[part] = result
        return result


class _Characters(dict):
    """What becomes of each character: nothing, a space, or text; with spaces around what is a word of its own."""

    def __init__(self, lowercase, strip_accents):
        super().__init__()
        self.lowercase, self.strip_accents = lowercase, strip_accents

    def __missing__(self, character):
        self[character] = result = self._normal(character)
        return result

    def _normal(self, character):
        category = unicodedata.category(character)
        if character in "\t\n\r" or category[0] == "Z":
            return " "
        if character == "\ufffd" or category in ("Cc", "Cf", "Co", "Cs"):
            return ""
        result = character
        if self.strip_accents:
            result = "".join(c for c in unicodedata.normalize("NFD", result) if unicodedata.category(c) != "Mn")
        if self.lowercase:  # one by one: lower() of a whole word makes its last sigma another letter
            result = result.lower()
        result = "".join(f" {c} " if _is_punctuation(c) else c for c in result)
        return f" {result} " if IDEOGRAPHS.match(character) else result


def _is_punctuation(character):
    """BERT's: every ASCII sign, and what Unicode calls punctuation."""
    return bool(PUNCTUATION.match(character)) or unicodedata.category(character)[0] == "P"


def _words(text, characters):
    """Yield (normalised word, the place in `text` that each of its characters comes from)."""
    normal = [characters[character] for character in text]
    at = [place for place, result in enumerate(normal) for _ in result]
    for word in WORDS.finditer("".join(normal)):
        yield word[0], at[word.start():word.end()]


# ---- Vocabularies ---------------------------------------------------------------------------------------------------


def load(path):
    """The WordPiece of a folder, or of one of its files: a vocab.txt, with the tokenizer_config.json beside it if there
    is one, or else a tokenizer.json, which is all that version 5 of transformers saves.

    Whether text is lowercased the configuration says or, where it does not, the vocabulary: one without capitals is
    uncased.
    Raises UserError naming the file and what is wrong with it.
    """
    path = path_called(path, repr(str(path)))
    files = [path / "vocab.txt", path / "tokenizer.json"] if os.path.isdir(path) else [path]
    file = next(filter(os.path.isfile, files), files[0])
    if file.suffix == ".json":
        vocab, config = _read_document(file)
    else:
        vocab = _read_vocab(file)  # first, as its message says best why a folder cannot be entered
        config = _read_object(file.with_name("tokenizer_config.json"))
        if config.get("tokenize_chinese_chars") is False:
            raise UserError(f"{str(file)!r}: su tokenizer_config.json pide tokenize_chinese_chars false, y aquí cada "
                            "ideograma es una palabra; indique una carpeta con otro tokenizador")
    lowercase = config.get("do_lower_case")
    if lowercase is None:
        lowercase = all(piece == piece.lower() for piece in vocab if not piece.startswith("["))
    try:
        return WordPiece(vocab, lowercase, config.get("strip_accents"))
    except UserError as problem:
        raise UserError(f"{str(file)!r}: {problem}") from problem


def _read_document(file):
    """(vocabulary, rules by the names of tokenizer_config.json) of a tokenizer.json."""
    if not file.is_file():
        raise UserError(f"{str(file)!r}: no existe; indique una carpeta con un vocab.txt o un tokenizer.json")
    document = _read_object(file)
    parts = {name: part if isinstance(part := document.get(name), dict) else {} for name in BERT}
    if "vocab" in parts["model"]:
        parts["model"].setdefault("type", "WordPiece")  # which the library's first versions did not write
    if others := [f"{name}.{key} {parts[name].get(key)!r}" for name, expected in BERT.items()
                  for key, value in expected.items() if parts[name].get(key) != value]:
        raise UserError(f"{str(file)!r}: no es el tokenizador de un BERT ({', '.join(others[:3])}); indique una "
                        "carpeta con el suyo")
    vocab = parts["model"].get("vocab")
    try:
        vocab = dict(sorted(vocab.items(), key=lambda item: item[1]))
        if [*vocab.values()] != [*range(len(vocab))]:
            raise ValueError("gaps")
        added = [token["content"] for token in document.get("added_tokens") or [] if token["content"] not in vocab]
    except MISSHAPEN as problem:
        raise UserError(f"{str(file)!r}: su vocabulario está dañado, o sus piezas no están numeradas de 0 en adelante; "
                        "vuelva a descargarlo") from problem
    if added:
        raise UserError(f"{str(file)!r}: tiene {len(added)} piezas añadidas a su vocabulario ({', '.join(added[:3])}), "
                        "que aquí no se leen; indique una carpeta con el tokenizador sin ellas")
    normalizer = parts["normalizer"]
    return vocab, {"do_lower_case": normalizer.get("lowercase"), "strip_accents": normalizer.get("strip_accents")}


def _read_vocab(file):
    try:
        content = file.read_bytes()
        lines = content.decode("utf-8-sig").removesuffix("\n").split("\n")
    except OSError as problem:
        raise UserError(f"{str(file)!r}: no se puede leer el vocabulario WordPiece ({explain(problem)}); indique una "
                        "carpeta con un vocab.txt o un tokenizer.json") from problem
    except UnicodeDecodeError as problem:
        line = content.count(b"\n", 0, problem.start) + 1
        raise UserError(f"{str(file)!r}, línea {line}: no es UTF-8 válido; vuelva a descargarlo") from problem
    vocab = {}
    for number, line in enumerate(lines):
        known = vocab.setdefault(line.removesuffix("\r"), number)
        if known != number:
            raise UserError(f"{str(file)!r}, línea {number + 1}: repite {line!r}, que ya está en la línea {known + 1}; "
                            "vuelva a descargarlo")
    return vocab


def _read_object(file):
    """The JSON object in a file; {} where there is no such file."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8-sig"))
        if not isinstance(found, dict):
            raise ValueError("no object")
    except OSError as problem:
        raise UserError(f"{str(file)!r}: no se puede leer ({explain(problem)}); compruebe sus permisos") from problem
    except (ValueError, RecursionError) as problem:
        raise UserError(f"{str(file)!r}: no es JSON válido; vuelva a descargarlo") from problem
    return found


def learn(texts, size, lowercase=True):
    """A vocabulary {piece: id} of at most `size` pieces from `texts` (iterable of str), the same each time.

    It holds the special tokens, every character (so none of these texts has an [UNK]) and, as far as there is room,
    those words, and those beginnings and endings of several words, that cover most text. Raises UserError when `size`
    does not hold the characters.
    """
    characters = _Characters(lowercase, lowercase)
    words = Counter()
    for part, count in Counter(itertools.chain.from_iterable(map(PARTS.findall, texts))).items():
        for word, _ in _words(part, characters):
            if len(word) <= WORD_CHARACTERS:
                words[word] += count
    alphabet = sorted({character for word in words for character in word})
    vocab = [*SPECIAL, *alphabet, *(f"##{character}" for character in alphabet)]
    if size < len(vocab):
        raise UserError(f"un vocabulario de {size} piezas no basta: solo los caracteres del texto son {len(vocab)}")
    covered, owners = Counter(words), Counter()
    for word, count in words.items():
        for cut in range(1, len(word)):
            for piece in (word[:cut], f"##{word[cut:]}"):
                covered[piece] += count
                owners[piece] += 1
    useful = {piece for piece in covered if piece in words or owners[piece] > 1} - set(vocab)
    chosen = sorted(useful, key=lambda piece: (-covered[piece] * len(piece.removeprefix("##")), piece))
    return {piece: number for number, piece in enumerate(itertools.islice(itertools.chain(vocab, chosen), size))}
