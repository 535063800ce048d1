"""Token shards: a 64-byte little-endian header and then the tokens, u16 where the vocabulary fits, else u32."""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aura.errors import UserError
from aura.files import explain, sync_directory

MAGIC = b"AURATOK\0"
FORMAT_VERSION = 1
HEADER = struct.Struct("<8sIIQQI24xI")  # magic, version, bytes per token, vocabulary, tokens, crc32, own crc32
HEADER_BYTES = 64
CHUNK_TOKENS = 2**22
DTYPES = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


@dataclass(frozen=True)
class ShardHeader:
    """What stands before a shard's tokens."""

    width: int  # bytes per token
    vocab_size: int
    tokens: int
    crc32: int  # of the tokens' bytes

    def pack(self) -> bytes:
        """The header as HEADER lays it out, its own CRC-32 last."""
        fields = (MAGIC, FORMAT_VERSION, self.width, self.vocab_size, self.tokens, self.crc32)
        own = zlib.crc32(HEADER.pack(*fields, 0)[:-4])
        return HEADER.pack(*fields, own)


def token_width(vocab_size: int) -> int:
    """Bytes per token on disk."""
    return 2 if vocab_size <= 2**16 else 4


class ShardWriter:
    """Writes a stream of tokens as shards of `tokens_per_shard`; the memory it takes does not grow.

    A shard's header is written last, after its tokens have reached the disk: an interrupted one is never valid.
    As a context manager it closes on a clean exit and leaves the open shard without a header on an exception.
    """

    def __init__(self, directory: str | os.PathLike, prefix: str, vocab_size: int, tokens_per_shard: int = 2**27):
        if not 1 <= vocab_size <= 2**32:
            raise ValueError(f"vocab_size must be in 1 ... 2^32, not {vocab_size}")
        if tokens_per_shard < 1:
            raise ValueError(f"tokens_per_shard must be positive, not {tokens_per_shard}")
        self.directory = Path(directory)
        self.prefix = prefix
        self.vocab_size = vocab_size
        self.tokens_per_shard = tokens_per_shard
        self._dtype = DTYPES[token_width(vocab_size)]
        self._shards: list[dict] = []
        self._file = None
        self.directory.mkdir(parents=True, exist_ok=True)

    def write(self, tokens: np.ndarray) -> None:
        """Append `tokens`, 1-D and of any integer dtype.

        Raises UserError for a token outside the vocabulary, TypeError for anything but integers.
        """
        tokens = np.asarray(tokens)
        if tokens.size == 0:
            return
        if tokens.dtype.kind not in "iu" or tokens.ndim != 1:
            raise TypeError(f"tokens must be a 1-D array of integers, not {tokens.ndim}-D of {tokens.dtype}")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise UserError(f"El token {bad} no cabe en el vocabulario de {self.vocab_size}: revise el tokenizador.")
        tokens = tokens.astype(self._dtype, copy=False)
        while tokens.size:
            if self._file is None:
                self._open()
            part = tokens[: self.tokens_per_shard - self._tokens]
            tokens = tokens[part.size :]
            self._append(part)
            if self._tokens == self.tokens_per_shard:
                self._finish()

    def state(self) -> dict:
        """What resume() needs, JSON-able; what has been written so far is on the disk when this returns."""
        if self._file is None:
            return {"shards": self._shards, "tokens": 0, "crc32": 0}
        _flush(self._file)
        return {"shards": self._shards, "tokens": self._tokens, "crc32": self._crc}

    def resume(self, state: dict) -> None:
        """Go on where a writer of the same directory, prefix and vocabulary gave this state, whatever it wrote since.

        Raises UserError when a file does not hold what it held then, OSError when one cannot be read.
        """
        for shard in state["shards"]:
            if read_header(self.directory / shard["file"], self.vocab_size).crc32 != shard["crc32"]:
                raise UserError(f"{self.directory / shard['file']} es de otros datos: vuelva a generarlo.")
        self._shards = list(state["shards"])
        if state["tokens"]:
            self._open("r+b")
            while missing := state["tokens"] - self._tokens:
                data = self._file.read(min(missing, CHUNK_TOKENS) * self._dtype.itemsize)
                if not data:
                    break
                self._count(np.frombuffer(data, self._dtype))
            if (self._tokens, self._crc) != (state["tokens"], state["crc32"]):
                raise UserError(f"{self._path} está dañado: no guarda los {state['tokens']} tokens que se escribieron.")
            self._file.truncate()

    def close(self) -> list[dict]:
        """Finish the last shard; one {"file", "tokens", "crc32", "sha256", "bytes"} per shard, in order.

        "file" is the name within the directory, "crc32" and "sha256" are of the tokens' bytes (all that follows the
        header), "bytes" is the size of the whole file.
        """
        if self._file is not None:
            self._finish()
        return list(self._shards)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind, value, traceback) -> None:
        if kind is None:
            self.close()
        elif self._file is not None:
            self._file.close()

    def _open(self, mode: str = "wb") -> None:
        self._path = self.directory / f"{self.prefix}-{len(self._shards):05d}.bin"
        self._file = open(self._path, mode, buffering=2**20)  # noqa: SIM115 (open until _finish)
        self._file.write(bytes(HEADER_BYTES))
        self._tokens, self._crc, self._sha = 0, 0, hashlib.sha256()

    def _append(self, part: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(part).data.cast("B"))
        self._count(part)

    def _count(self, part: np.ndarray) -> None:
        data = np.ascontiguousarray(part).data.cast("B")
        self._crc = zlib.crc32(data, self._crc)
        self._sha.update(data)
        self._tokens += part.size

    def _finish(self) -> None:
        file, self._file = self._file, None
        header = ShardHeader(self._dtype.itemsize, self.vocab_size, self._tokens, self._crc)
        with file:
            _flush(file)
            file.seek(0)
            file.write(header.pack())
            _flush(file)
        sync_directory(self.directory)
        self._shards.append(
            {
                "file": self._path.name,
                "tokens": self._tokens,
                "crc32": self._crc,
                "sha256": self._sha.hexdigest(),
                "bytes": HEADER_BYTES + self._tokens * self._dtype.itemsize,
            }
        )


def _flush(file) -> None:
    file.flush()
    os.fsync(file.fileno())


def read_header(path: str | os.PathLike, vocab_size: int | None = None) -> ShardHeader:
    """Header of a shard, checked against itself, the file's size and the vocabulary; reads 64 bytes.

    Raises UserError naming the file when it cannot be read, is no shard, is of another version, is cut short or too
    long, or holds tokens of a larger vocabulary than `vocab_size`.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise UserError(f"No se puede leer {path}: {explain(error)}.") from error
    return _parse_header(path, data, size, vocab_size)


def _parse_header(path, data: bytes, size: int, vocab_size: int | None) -> ShardHeader:
    if len(data) == HEADER_BYTES and not any(data):
        raise UserError(f"{path} está incompleto: su escritura se interrumpió; vuelva a generarlo.")
    if data[: len(MAGIC)] != MAGIC:
        raise UserError(f"{path} no es un fichero de tokens (los primeros {len(MAGIC)} bytes no son los esperados); "
                        "vuelva a generarlo.")
    if len(data) < HEADER_BYTES:
        raise UserError(f"{path} está cortado: mide {size} bytes y solo la cabecera ocupa {HEADER_BYTES}; "
                        "vuelva a generarlo.")
    _, version, width, vocabulary, tokens, crc, own = HEADER.unpack(data)
    if version != FORMAT_VERSION:
        raise UserError(f"{path} es de la versión {version} del formato y aquí se lee la {FORMAT_VERSION}; vuelva "
                        "a generarlo.")
    if own != zlib.crc32(data[:-4]) or width not in DTYPES:
        raise UserError(f"{path} tiene la cabecera dañada (bytes 0 a {HEADER_BYTES - 1}); vuelva a generarlo.")
    expected = HEADER_BYTES + tokens * width
    if size != expected:
        fault = "está cortado" if size < expected else "sobra algo al final"
        raise UserError(f"{path}: {fault}; mide {size} bytes y debería medir {expected}; vuelva a generarlo.")
    if vocab_size is not None and vocabulary > vocab_size:
        raise UserError(f"{path} usa un vocabulario de {vocabulary} tokens y el modelo solo tiene {vocab_size}.")
    return ShardHeader(width, vocabulary, tokens, crc)


def verify_shard(path: str | os.PathLike, vocab_size: int | None = None) -> ShardHeader:
    """Read a whole shard in pieces and check its sum and every token; returns its header.

    Raises UserError with one line naming the file and the place, for everything `read_header` finds and for a wrong
    checksum or a token outside the vocabulary (the smaller of the header's and `vocab_size`).
    """
    header = read_header(path, vocab_size)
    dtype = DTYPES[header.width]
    crc, position, bad = 0, 0, None
    try:
        with open(path, "rb") as file:
            file.seek(HEADER_BYTES)
            while data := file.read(CHUNK_TOKENS * header.width):
                crc = zlib.crc32(data, crc)
                tokens = np.frombuffer(data, dtype, count=len(data) // header.width)
                if bad is None and tokens.max(initial=0) >= header.vocab_size:
                    first = int(np.argmax(tokens >= header.vocab_size))
                    bad = (int(tokens[first]), position + first)
                position += tokens.size
    except OSError as error:
        raise UserError(f"No se puede leer {path} (token {position}): {explain(error)}.") from error
    if crc != header.crc32:
        raise UserError(
            f"{path} está dañado: la suma de sus {header.tokens} tokens es {crc:08x} y debería ser {header.crc32:08x}."
        )
    if bad is not None:
        raise UserError(beyond_vocabulary(path, *bad, header.vocab_size))
    return header


def beyond_vocabulary(path, token: int, position: int, vocab_size: int) -> str:
    """Spanish for a token that the vocabulary does not have."""
    return f"{path}: el token {token} de la posición {position} no cabe en el vocabulario de {vocab_size}."
