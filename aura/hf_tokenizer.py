"""tokenizer.json, the format of Hugging Face's `tokenizers`: read one, or write one that equals a SentencePiece model.

Reading needs the optional package `tokenizers`; writing is plain JSON and needs nothing.
"""

import base64
import hashlib
import json
import re
from collections import Counter

import numpy as np

from aura.errors import UserError, first_line

SPACE = "▁"  # U+2581, how SentencePiece writes a space inside a piece
EOS_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|eot_id|>", "<|im_end|>", "[SEP]")
PAD_NAMES = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>")
UNIGRAM, BPE, CHAR = 1, 2, 4  # TrainerSpec.ModelType
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # ModelProto.SentencePiece.Type
PROBE = "  Ñandú ﬁ①\t\n\r\x00😀 é e\u0301 ▁ \u200b漢 "  # survives only an encoder that loses nothing


class HuggingFaceTokenizer:
    """A tokenizer.json as bytes, with a padding and an end-of-document token (see `complete`).

    Text never becomes a special token, not even text that spells its name. Raises UserError where the package
    `tokenizers` is missing or refuses the file.
    """

    file_name = "tokenizer.json"

    def __init__(self, model):
        self.model = bytes(model)
        try:
            self._document = json.loads(self.model)
        except (ValueError, RecursionError) as problem:
            raise UserError("el tokenizer.json está dañado: no es JSON válido; indique otro tokenizador") from problem
        try:
            import tokenizers
        except ImportError as problem:
            raise UserError("para usar un tokenizer.json falta la biblioteca tokenizers: pip install tokenizers"
                            ) from problem
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(self.model.decode("utf-8"))
        except Exception as problem:  # the package raises bare Exception for whatever it cannot read
            raise UserError(f"el tokenizer.json no es válido ({first_line(problem)}); indique otro tokenizador"
                            ) from problem
        self._tokenizer.encode_special_tokens = True
        self._ids = self._tokenizer.get_vocab(with_added_tokens=True)
        if len(set(self._ids.values())) < len(self._ids):  # the library numbers an added piece by how many there are
            raise UserError("en el tokenizer.json dos piezas tienen el mismo número, porque los de su vocabulario no "
                            "son seguidos; indique otro tokenizador")
        self.vocab_size = max(self._ids.values()) + 1
        roles = _roles(self._document)
        self.eos_id, self.pad_id = self._ids[roles["eos"]], self._ids[roles["pad"]]
        self.sha256 = hashlib.sha256(self.model).hexdigest()

    @property
    def lossless(self):
        """Whether every text survives encoding and decoding."""
        # Added pieces too: one like "ñ" the library's byte-level decoder takes for a byte, others swallow spaces.
        added = [token["content"] for token in self._document["added_tokens"] if not token["special"]]
        text = " ".join([PROBE, *added, ""])
        return self.decode(self.encode(text)) == text

    def encode(self, text):
        """The token ids (list of int) of `text`, without an end token."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts, threads=None):
        """The token ids of each text, as a list of lists; `threads` is up to the library (RAYON_NUM_THREADS)."""
        return [found.ids for found in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids):
        """The text of a list of token ids; ids of special tokens leave nothing."""
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=True)

    def token_bytes(self):
        """How many UTF-8 bytes each token stands for, as int64 [vocab_size]; 0 for special tokens. None where tokens do
        not tell, as in WordPiece, where no token holds the spaces, or without bytes, where the unknown one may stand
        for any, and what has no token is left out."""
        model = self._document["model"]
        kind = type(self._tokenizer.model).__name__  # which the files of the library's first versions do not say
        byte_level = "ByteLevel" in _types(self._document["decoder"])
        in_bytes = byte_level or model.get("byte_fallback")
        if kind in ("WordPiece", "WordLevel") or model.get("end_of_word_suffix") or not in_bytes:
            return None
        added = {token["content"]: token["special"] for token in self._document["added_tokens"]}
        sizes = np.zeros(self.vocab_size, dtype=np.int64)
        for token, number in self._ids.items():
            if added.get(token) or token == model.get("unk_token") or number == model.get("unk_id"):
                continue
            if model.get("byte_fallback") and re.fullmatch("<0x[0-9A-F]{2}>", token):
                sizes[number] = 1
            elif byte_level and token not in added:  # one character of GPT-2's alphabet is one byte
                sizes[number] = len(token)
            else:
                sizes[number] = len(token.replace(SPACE, " ").encode("utf-8"))
        return sizes

    def to_json(self, note=print):
        """The tokenizer.json as a dict."""
        return self._document

    def vocabulary(self):
        """{piece: id}, in the order of the ids."""
        return vocabulary(self._document)


def complete(model, config):
    """The bytes of a tokenizer.json as HuggingFaceTokenizer wants it.

    A padding or end-of-document token that is missing goes to the end, so that no id changes; the post-processor
    names both, and no longer adds anything to a text; truncation and padding are switched off.
    config: what a tokenizer_config.json says (dict, may be empty). Raises ValueError where it is no tokenizer.json.
    """
    document = json.loads(model)
    if not isinstance(document, dict) or not isinstance(document.get("model"), dict):
        raise ValueError("no model in it")
    if not document["model"].get("vocab"):
        raise ValueError("no vocabulary in it")
    document.setdefault("decoder", None)
    document["added_tokens"] = list(document.get("added_tokens") or [])
    ids = vocabulary(document)
    roles = _roles(document)
    for role, names in (("eos", EOS_NAMES), ("pad", PAD_NAMES)):
        wanted = config.get(f"{role}_token")
        wanted = wanted.get("content") if isinstance(wanted, dict) else wanted
        wanted = wanted if isinstance(wanted, str) else None  # "None" is a word, and a piece of many vocabularies
        known = [name for name in (roles.get(role), wanted, *names) if name in ids]
        found = [name for name in known if role == "eos" or name != roles["eos"]]
        roles[role] = found[0] if found else names[0]
        _make_special(document, ids, roles[role])
    document |= {"truncation": None, "padding": None, "post_processor": _template(roles, ids)}
    return json.dumps(document, ensure_ascii=False).encode("utf-8")


def from_vocab_and_merges(vocab, merges):
    """The bytes of a tokenizer.json for GPT-2's older pair of files, vocab.json and merges.txt (bytes, bytes)."""
    lines = [line for line in merges.decode("utf-8").split("\n") if line.strip() and not line.startswith("#version")]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return json.dumps({
        "version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": json.loads(vocab), "merges": [line.rstrip("\r").split(" ") for line in lines]}
    }, ensure_ascii=False).encode("utf-8")


def vocabulary(document):
    """{piece: id} of a tokenizer.json as a dict, in the order of the ids."""
    pieces = document["model"]["vocab"]
    if isinstance(pieces, list):
        pieces = {piece: number for number, (piece, _) in enumerate(pieces)}
    pieces = pieces | {token["content"]: token["id"] for token in document["added_tokens"]}
    return dict(sorted(pieces.items(), key=lambda item: item[1]))


def _make_special(document, ids, name):
    ids.setdefault(name, max(ids.values()) + 1)
    listed = [token for token in document["added_tokens"] if token["content"] == name]
    if listed:
        listed[0]["special"] = True
    else:
        document["added_tokens"].append(_added(ids[name], name, special=True))


def _added(number, content, special):
    return {"id": number, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": special}


def _template(roles, ids):
    """A post-processor that leaves a text as it is and names the tokens of `roles` {role: piece}."""
    def sequence(name, kind):
        return {"Sequence": {"id": name, "type_id": kind}}

    return {"type": "TemplateProcessing", "single": [sequence("A", 0)], "pair": [sequence("A", 0), sequence("B", 1)],
            "special_tokens": {role: {"id": role, "ids": [ids[piece]], "tokens": [piece]}
                               for role, piece in roles.items()}}


def _roles(document):
    """{role: piece} as _template wrote it; empty for a file that is not ours."""
    tokens = (document.get("post_processor") or {}).get("special_tokens") or {}
    if not isinstance(tokens, dict) or tokens.keys() != {"eos", "pad"}:
        return {}
    return {role: token["tokens"][0] for role, token in tokens.items()}


def _types(part):
    """The types of a component of a tokenizer.json and of what it is made of."""
    if not isinstance(part, dict):
        return set()
    inner = part.get("decoders", []) + part.get("pretokenizers", []) + part.get("normalizers", [])
    return {part.get("type")}.union(*map(_types, inner))


def from_sentencepiece(proto, verbatim, note=print):
    """A tokenizer.json (dict) that encodes and decodes as tokenizer.Tokenizer does with the same model.

    verbatim: the model keeps every character and encodes a real U+2581 as its bytes; pieces then hold a plain space.
    What the format cannot express exactly is told to `note`; where it would be plainly wrong the result is None.
    One difference remains for ids that spell no valid UTF-8, which no text encodes to: `tokenizers` gives one U+FFFD
    for each byte of such a run, we give one for each bad sequence in it.
    """
    obstacle = _obstacle(proto)
    if obstacle:
        note(f"Aviso: no se escribe tokenizer.json, porque no puede expresar este modelo: {obstacle}. "
             "Use tokenizer.model.")
        return None
    names = piece_names(proto, verbatim)
    by_type = {kind: [name for name, piece in zip(names, proto.pieces, strict=True) if piece.type == kind]
               for kind in (NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE)}
    ids = {name: number for number, name in enumerate(names)}
    if proto.trainer_spec.model_type == UNIGRAM:
        model, pre_tokenizer = _unigram(proto, names, by_type, note)
    else:
        model, pre_tokenizer = _bpe(proto, ids, by_type, note), None
    hidden = "|".join(re.escape(name) for name in by_type[CONTROL] + by_type[UNKNOWN])
    decoders = [{"type": "Replace", "pattern": {"Regex": rf"\A(?:{hidden})\z"}, "content": ""}]
    if not verbatim:
        decoders.append({"type": "Replace", "pattern": {"String": SPACE}, "content": " "})
    decoders += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    # Control tokens are not listed as added tokens: those would be found in a text that spells them.
    spec = proto.trainer_spec
    roles = {role: piece for role, piece in (("eos", spec.eos_piece), ("pad", spec.pad_piece)) if piece in ids}
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [_added(ids[name], name, special=False) for name in by_type[USER_DEFINED]],
        "normalizer": None if verbatim else _normalizer(proto.normalizer_spec, note), "pre_tokenizer": pre_tokenizer,
        "post_processor": _template(roles, ids), "decoder": {"type": "Sequence", "decoders": decoders}, "model": model}


def piece_names(proto, verbatim):
    """The pieces of a SentencePiece model as tokenizer.json and vocab.json name them, in the order of their ids."""
    kinds = (NORMAL, USER_DEFINED, UNUSED) if verbatim else ()
    return [piece.piece.replace(SPACE, " ") if piece.type in kinds else piece.piece for piece in proto.pieces]


def _obstacle(proto):
    """Why no tokenizer.json can stand for this model, as a Spanish phrase; None where one can."""
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    kinds = {piece.type for piece in proto.pieces}
    changes = (normalizer.precompiled_charsmap or normalizer.add_dummy_prefix or normalizer.remove_extra_whitespaces)
    if trainer.model_type not in (UNIGRAM, BPE, CHAR):
        return "es de tipo word"
    if not normalizer.escape_whitespaces:
        return "no marca los espacios (escape_whitespaces=false)"
    if trainer.treat_whitespace_as_suffix and normalizer.add_dummy_prefix:
        return "pone el espacio detrás de las palabras (treat_whitespace_as_suffix)"
    if UNUSED in kinds:
        return "tiene piezas desactivadas"
    if USER_DEFINED in kinds and (trainer.model_type == UNIGRAM or changes):
        return "tiene símbolos propios (user_defined_symbols) junto con unigram o normalización"
    if trainer.model_type == BPE:
        pieces = {piece.piece for piece in proto.pieces if piece.type == NORMAL}
        lonely = next((piece for piece in pieces if len(piece) > 1 and not pieces.issuperset(piece)), None)
        if lonely:
            return f"la pieza {lonely!r} tiene un carácter que no es una pieza"
    return None


def _bpe(proto, ids, by_type, note):
    """The BPE model; without merges it is SentencePiece's CHAR.

    SentencePiece ranks a merge by the piece it makes, so every way to cut a piece in two takes the rank of its score.
    """
    pieces, merges = set(by_type[NORMAL]), []
    if proto.trainer_spec.model_type == BPE:
        made = [name for name in by_type[NORMAL] if len(name) > 1]
        made.sort(key=lambda name: (-proto.pieces[ids[name]].score, ids[name]))
        merges = [[name[:cut], name[cut:]] for name in made for cut in range(1, len(name))
                  if name[:cut] in pieces and name[cut:] in pieces]
        scores = Counter(proto.pieces[ids[name]].score for name in made)
        if scores and max(scores.values()) > 1:
            note("Aviso: hay piezas con la misma puntuación; tokenizer.json las une por orden de número y no de "
                 "izquierda a derecha, así que puede dividir algún texto de otra manera.")
    return {"type": "BPE", "dropout": None, "unk_token": by_type[UNKNOWN][0], "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": proto.trainer_spec.byte_fallback,
            "ignore_merges": False, "vocab": ids, "merges": merges}


def _unigram(proto, names, by_type, note):
    """(Unigram model, pre-tokenizer). The library looks for every name in the text, control and byte tokens included,
    so such a name is cut in two beforehand, after its first character, where no piece reaches across."""
    note("Aviso: en un modelo unigram, SentencePiece suma las puntuaciones con 32 bits y tokenizers con 64: donde dos "
         "divisiones casi empatan pueden elegir distinta (en textos muy largos es más probable).")
    byte_fallback = proto.trainer_spec.byte_fallback
    reserved = by_type[CONTROL] + by_type[UNKNOWN] + by_type[BYTE]
    starts = {name[:2] for name in reserved}
    crossed = {start for start in starts if any(start in piece for piece in by_type[NORMAL])}
    if not byte_fallback:  # a run of unknown characters is one token, and a cut would make it two
        crossed |= {start for start in starts if not set(start) & set(by_type[NORMAL])}
    if crossed:
        note(f"Aviso: un texto que contenga el nombre de una pieza especial que empiece por "
             f"{', '.join(map(repr, sorted(crossed)))} puede codificarse de otra manera con tokenizer.json.")
    rests = {}
    for name in reserved:
        rests.setdefault(name[:1], []).append(re.escape(name[1:]))
    pattern = "|".join(f"{re.escape(first)}(?=(?:{'|'.join(rest)}))" for first, rest in rests.items())
    scores = [piece.score for piece in proto.pieces]
    model = {"type": "Unigram", "unk_id": names.index(by_type[UNKNOWN][0]), "byte_fallback": byte_fallback,
             "vocab": [list(pair) for pair in zip(names, scores, strict=True)]}
    return model, {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "MergedWithPrevious", "invert": False}


def _normalizer(spec, note):
    """What SentencePiece does to a text before it looks for pieces, in its order (Normalizer::Normalize)."""
    steps = []
    if spec.precompiled_charsmap:
        note(f"Aviso: este modelo normaliza el texto ({spec.name or 'tabla propia'}); tokenizer.json lleva la misma "
             "tabla, pero tokenizers la aplica por grafemas: con un signo combinado tras una ligadura, varios o "
             "invisibles tras una letra, katakana de media anchura o \\r\\n el resultado puede ser otro.")
        charsmap = base64.b64encode(spec.precompiled_charsmap).decode("ascii")
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if spec.remove_extra_whitespaces:
        steps += [_replace(r"\A +", ""), _replace(" {2,}", " ")]
    if spec.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": SPACE})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    if spec.remove_extra_whitespaces:
        steps.append(_replace(rf"{SPACE}+\z", ""))
    return {"type": "Sequence", "normalizers": steps}


def _replace(pattern, content):
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}
