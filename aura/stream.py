"""Streaming data: documents tokenised, packed and shuffled while the model trains, and found again where they stopped.

    data = stream.open_stream(corpus.open_corpus("c4"), "Data", dist)
    loader = stream.StreamLoader(data.corpus, data.load_tokenizer(), 512, 64, dist=dist, val_fraction=0.002)
    validation = stream.held_out(data.corpus, data.load_tokenizer(), 512, dist=dist, val_fraction=0.002, limit=200)

Each rank reads its share of the documents and ends each with the end token, the separator. Window w of what comes out
is tokens [w*T, w*T + T], T inputs and one more for the last target, as in the shards. Windows are shuffled within
blocks, in an order that is a pure function of (seed, epoch, rank, number of the block); so the state of a rank is the
place where its block begins and how much of it has been delivered. A resumed run makes that one block again.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import queue
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from aura import preparation
from aura import tokenizer as tokenizers
from aura.corpus import CUT, Corpus
from aura.errors import UserError, agreed
from aura.files import explain, require_writable_directory, write_bytes
from aura.tokens import permute
from aura.words import counted

CLOSE_SECONDS = 5  # a thread that waits for the network is left behind after this long: it ends with the process
CUT_BEFORE = [8000, 64_000]  # of states that do not tell
HELD_OUT_DOCUMENTS = 50_000  # read at most to find the validation windows: about 100 MB of web text


@dataclass(frozen=True)
class Streamed:
    """Stands in for a prepared Dataset where the text is tokenised while the model trains. val_fraction: share of the
    documents kept for validation."""

    corpus: Corpus
    tokenizer: object
    val_fraction: float

    @property
    def meta(self):
        """As much of a dataset.json as a stream can have."""
        return {"name": self.corpus.name}

    @property
    def vocab_size(self):
        """Size of the vocabulary, control tokens included."""
        return self.tokenizer.vocab_size

    @property
    def sha256(self):
        """A hash that identifies the source and its tokenizer; nothing of the text itself is read for it."""
        return hashlib.sha256(f"{self.corpus.fingerprint()} {self.tokenizer.sha256}".encode()).hexdigest()

    def load_tokenizer(self):
        """The Tokenizer."""
        return self.tokenizer


def open_stream(corpus: Corpus, data_dir, dist, *, vocab_size=32_000, tokenizer_path=None, tokenizer=None,
                val_fraction=None):
    """The Streamed `corpus`, on all ranks together, with rank 0's `tokenizer` or that of `tokenizer_path`, else the one
    that an earlier run with this source and vocabulary kept in data_dir, else one trained on the first documents for
    training and kept there.

    Raises UserError for what cannot be read or written.
    """
    def on_main():
        threshold = float(preparation.validation_threshold(corpus, val_fraction))
        kept = Path(data_dir) / f"{corpus.name}.{vocab_size}.{corpus.fingerprint()[:12]}.tokenizer.model"
        try:
            if tokenizer or tokenizer_path:
                chosen = tokenizer or tokenizers.load(tokenizer_path)
            elif kept.is_file():
                try:
                    chosen = tokenizers.load(kept, "el tokenizador guardado")
                except UserError as problem:
                    raise UserError(f"{problem}; bórrelo, y se entrenará de nuevo") from problem
            else:
                require_writable_directory(data_dir, "--data-dir")
                dist.print(f"Entrenando el tokenizador con el principio de {corpus.name!r} ({vocab_size} piezas)...")
                chosen = tokenizers.train(preparation.training_documents(corpus, threshold), vocab_size, dist.print,
                                          f"el corpus {corpus.name!r}")
                write_bytes(kept, chosen.model)
        except OSError as problem:
            raise UserError(f"{str(kept)!r}: no se puede guardar ahí el tokenizador ({explain(problem)}); indique otra "
                            "carpeta con --data-dir") from problem
        model = torch.frombuffer(bytearray(chosen.model), dtype=torch.uint8)
        return model, threshold

    model, threshold = dist.broadcast_tree(dist.made_on_main(on_main))
    sources = dist.gather_objects(corpus.fingerprint())
    if others := [rank for rank, source in enumerate(sources) if source != sources[0]]:
        raise agreed(UserError, f"el corpus {corpus.name!r} no es el mismo en el rango 0 y en el {others[0]}: sus "
                                "ficheros tienen otros nombres o tamaños; cópielos de nuevo, o use --no-stream, que "
                                "los prepara y los envía")
    return Streamed(corpus, tokenizers.from_bytes(model.numpy().tobytes()), threshold)


@dataclass(frozen=True)
class _Place:
    """Where a block begins: its number in the epoch, the corpus's place of the document it begins in (None: the first)
    and the tokens of that document that come before it."""

    epoch: int = 0
    block: int = 0
    document: dict | None = None
    token: int = 0


def _plain(place: _Place, delivered: int) -> dict:
    """A position as plain values, for state_dict()."""
    return {**asdict(place), "delivered": delivered}


@dataclass(frozen=True)
class _Share:
    """What determines the blocks of one rank."""

    corpus: Corpus
    tokenizer: object
    seq_len: int
    shuffle_windows: int
    seed: int
    rank: int
    world_size: int
    val_fraction: float
    threads: int | None


class StreamLoader:
    """Micro-batches of one rank, for ever: a rank whose documents end begins its next epoch by itself.

    So `epoch` may differ between ranks, and `epoch_ended` is never true: no step ends an epoch for all. `epoch` and
    `samples` (windows of it that this rank has delivered) are the position after the last complete global batch. The
    numbers of `windows` and `steps_per_epoch` are unknown: math.inf and None.
    """

    windows = math.inf
    steps_per_epoch = None
    epoch_ended = False

    def __init__(self, corpus: Corpus, tokenizer, seq_len: int, batch_size: int, *, dist, seed: int = 0,
                 grad_accum: int = 1, device: str | torch.device = "cpu", shuffle_windows: int = 1024,
                 threads: int | None = None, val_fraction: float = 0.0):
        """Begin to read, on all ranks together, and wait for the first block.

        shuffle_windows: windows in a block; memory holds two more than the one in use. threads: for tokenising, all
        cores by default. val_fraction: documents whose share lies below it are left to `held_out`.
        Raises UserError on every rank when one of them cannot read or has too little text for a window.
        """
        if min(seq_len, batch_size, grad_accum, shuffle_windows) < 1:
            raise ValueError(f"{seq_len=} {batch_size=} {grad_accum=} {shuffle_windows=}")
        self._share = _Share(corpus, tokenizer, seq_len, shuffle_windows, seed, dist.rank, dist.world_size,
                             val_fraction, threads)
        self._batch_size, self._grad_accum = batch_size, grad_accum
        self._dist, self._device = dist, torch.device(device)
        self._start([(_Place(), 0)] * dist.world_size)
        self._agree()

    def _start(self, positions: list[tuple[_Place, int]]) -> None:
        """Begin to read at this rank's (place, windows delivered since). positions: those of all ranks."""
        self._known = [_plain(*position) for position in positions]
        place, delivered = positions[self._dist.rank]
        self._place, self._block, self._at, self._micro = place, None, delivered, 0
        self._commit()
        self._reader = _Reader(self._share, place)

    def _agree(self) -> None:
        """Wait for the first block, and raise on every rank what went wrong on any."""
        problem = None
        try:
            self._load_block()
        except UserError as found:
            problem = str(found)
        problems = [(rank, text) for rank, text in enumerate(self._dist.gather_objects(problem)) if text]
        if problems:
            self.close()
            raise agreed(UserError, f"rango {problems[0][0]}: {problems[0][1]}" if self._dist.grouped else problem)

    def next(self) -> torch.Tensor:
        """The next micro-batch, int64 [batch_size, T+1] on the device, a new tensor: inputs batch[:, :-1], targets
        batch[:, 1:]. Raises UserError with the reason when the corpus can be read no further."""
        parts, wanted = [], self._batch_size
        while wanted:
            if self._block is None or self._at >= len(self._block):
                self._load_block()
            parts.append(self._block[self._at:self._at + wanted])
            self._at += len(parts[-1])
            wanted -= len(parts[-1])
        self._micro += 1
        if self._micro == self._grad_accum:
            self._micro = 0
            self._commit()
        rows = parts[0] if len(parts) == 1 else torch.cat(parts)
        return rows.to(self._device, non_blocking=True).to(torch.int64)

    def _load_block(self) -> None:
        place, windows = self._reader.take()
        # A copy from pinned memory does not block the CPU, and torch reuses that memory only when the copy is over.
        windows = windows.pin_memory() if self._device.type == "cuda" else windows
        self._at = self._at if self._block is None else 0
        self._place, self._block = place, windows

    def _commit(self) -> None:
        self._done = (self._place, self._at)
        self.epoch = self._place.epoch
        self.samples = self._place.block * self._share.shuffle_windows + self._at

    def state_dict(self) -> dict:
        """The positions of all ranks, which call this together at the same step; plain values only. A rank
        that is left alone gives, for the others, the positions that they last told."""
        told = self._dist.gather_objects(_plain(*self._done))
        self._known = [position or before for position, before in zip(told, self._known, strict=True)]
        share = self._share
        return {"seed": share.seed, "seq_len": share.seq_len, "shuffle_windows": share.shuffle_windows,
                "val_fraction": float(share.val_fraction), "cut": list(CUT), "ranks": self._known}

    def load_state_dict(self, state: dict) -> None:
        """Go to a saved position. Rank 0 prints what is not exact about it.

        With as many ranks, as long a window and as large a block as before it is exact: bit for bit for files and the
        sample, for the Hub as long as the repository stays the same.
        """
        self.close()
        self._share = replace(self._share, seed=state["seed"])
        held_out_before = state.get("val_fraction", self._share.val_fraction)  # older states do not tell
        if self._share.val_fraction > held_out_before:
            self._dist.print(f"Aviso: la validación era el {100 * held_out_before:g} % de los documentos y ahora es el "
                             f"{100 * self._share.val_fraction:g} %: puede incluir documentos con los que ya se ha "
                             "entrenado, y su pérdida parecerá mejor de lo que es.")
        if state.get("cut", CUT_BEFORE) != list(CUT) and self._share.corpus.source["kind"] == "ficheros":
            self._dist.print("Aviso: otra versión de este programa cortaba de otra manera los textos sin líneas en "
                             "blanco: si este es así, puede repetirse una parte de lo ya leído.")
        delivered = [rank["delivered"] for rank in state["ranks"]]
        places = [_Place(**{key: value for key, value in rank.items() if key != "delivered"})
                  for rank in state["ranks"]]
        if len(places) != self._dist.world_size:
            self._start([(self._meeting_point(places, delivered), 0)] * self._dist.world_size)
            return
        if any(state[key] != getattr(self._share, key) for key in ("seq_len", "shuffle_windows")):
            self._dist.print("Aviso: la longitud de secuencia o el bloque de barajado son otros: cada proceso empieza "
                             "de nuevo el bloque que tenía a medias; hay que repetir "
                             f"{counted(sum(delivered), 'secuencia')} de {state['seq_len']}.")
            places, delivered = [replace(place, block=0) for place in places], [0] * len(places)
        elif self._share.corpus.source["kind"] == "hub":
            self._dist.print("Corpus del Hub: se sigue en el mismo documento según el estado que guarda `datasets`, "
                             "que es exacto mientras el repositorio no cambie.")
        self._start(list(zip(places, delivered, strict=True)))

    def _meeting_point(self, places: list[_Place], delivered: list[int]) -> _Place:
        """Where another number of ranks goes on: the first document that not all of the earlier ranks had passed."""
        epoch = min(place.epoch for place in places)
        change = f"Aviso: el número de procesos era {len(places)} y ahora es {self._dist.world_size}"
        if self._share.corpus.source["kind"] == "hub":
            self._dist.print(f"{change}: el reparto del Hub es otro y la época {epoch} empieza de nuevo.")
            return _Place(epoch)
        behind = [place for place in places if place.epoch == epoch]
        numbers = [place.document["document"] if place.document else 0 for place in behind]
        first = min(numbers)
        repeated = sum(math.ceil((number - first) / len(places)) + (place.token > 0)
                       for number, place in zip(numbers, behind, strict=True))
        ahead = "" if len(behind) == len(places) else ", además de lo que otros leyeron ya de épocas posteriores"
        self._dist.print(f"{change}: se sigue desde el documento {first} de la época {epoch}; hay que repetir como "
                         f"mucho {counted(repeated, 'documento')} y {counted(sum(delivered), 'secuencia')}{ahead}.")
        return _Place(epoch, document=behind[numbers.index(first)].document)

    def close(self) -> None:
        """Stop the reading thread; next() may not be called again."""
        self._reader.close()

    def __enter__(self) -> StreamLoader:
        return self

    def __exit__(self, *_) -> None:
        self.close()


class _Stopped(Exception):
    """The thread is asked to end."""


class _Reader:
    """The blocks of one rank from a place on, for ever, made in a thread: one waits while the next is being made."""

    def __init__(self, share: _Share, place: _Place):
        self._share = share
        self._ready: queue.Queue = queue.Queue(maxsize=1)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(place,), daemon=True)
        self._thread.start()

    def take(self) -> tuple[_Place, torch.Tensor]:
        """Where the next block begins, and its windows in the order of delivery: int32 [n, T+1], n = shuffle_windows
        in all but the last block of an epoch. Raises UserError with the reason when there is none."""
        item = self._ready.get()
        if isinstance(item, UserError):
            self._ready.put(item)
            raise item
        return item

    def close(self) -> None:
        """End the thread: at once, unless it is tokenising a batch of text or waiting for the network."""
        self._stop.set()
        while self._thread.is_alive() and not self._ready.empty():
            self._ready.get_nowait()  # it may be waiting for room
        self._thread.join(CLOSE_SECONDS)

    def _run(self, place: _Place) -> None:
        try:
            for block in self._blocks(place):
                self._ready.put(block)
                self._heed()
        except _Stopped:
            pass
        except UserError as problem:
            self._ready.put(problem)
        except Exception as problem:  # whatever it is, whoever waits for the next block must hear of it
            error = UserError(f"no se puede seguir leyendo el corpus {self._share.corpus.name!r}: "
                              f"{type(problem).__name__}: {problem}")
            error.__cause__ = problem
            self._ready.put(error)

    def _heed(self) -> None:
        if self._stop.is_set():
            raise _Stopped

    def _blocks(self, place: _Place) -> Iterator[tuple[_Place, torch.Tensor]]:
        share = self._share
        while True:
            whole, some = place == _Place(place.epoch), False
            for block in self._blocks_of_epoch(place):
                some = True
                yield block
            if whole and not some:
                each, fewer = ((f"a cada uno de los {share.world_size} procesos ", ", menos procesos")
                               if share.world_size > 1 else ("", ""))
                raise UserError(f"el corpus {share.corpus.name!r} no da {each}una secuencia de {share.seq_len} + 1 "
                                f"tokens: use más texto{fewer} o un --seq-len menor")
            place = _Place(place.epoch + 1)

    def _blocks_of_epoch(self, place: _Place) -> Iterator[tuple[_Place, torch.Tensor]]:
        share = self._share
        step = share.shuffle_windows * share.seq_len
        held: deque[tuple[dict | None, np.ndarray]] = deque()  # documents, from the one the block begins in
        size = -place.token  # tokens in hand from the block's first one on
        for before, ids in self._encoded(place.document):
            held.append((before, ids))
            size += len(ids)
            while size > step:
                place = replace(place, document=held[0][0])
                yield place, self._shuffled(place, held, step)
                size -= step
                start = place.token + step
                while start >= len(held[0][1]):
                    start -= len(held.popleft()[1])
                place = replace(place, token=start, block=place.block + 1)
        windows = (size - 1) // share.seq_len
        if windows > 0:
            place = replace(place, document=held[0][0])
            yield place, self._shuffled(place, held, windows * share.seq_len)

    def _shuffled(self, place: _Place, held: deque, step: int) -> torch.Tensor:
        parts, first, left = [], place.token, step + 1
        for _, ids in held:  # no more than is wanted: one document may hold many blocks
            parts.append(ids[first:first + left])
            first, left = max(0, first - len(ids)), left - len(parts[-1])  # the one it began in may be several by now
            if not left:
                break
        tokens = np.concatenate(parts)
        windows = _windows(tokens, self._share.seq_len)
        key = place.epoch << 48 | self._share.rank << 32 | place.block  # no two blocks of a run have the same
        order = permute(np.arange(len(windows)), len(windows), self._share.seed, key)
        return torch.from_numpy(windows[order.astype(np.int64)])

    def _encoded(self, place: dict | None) -> Iterator[tuple[dict | None, np.ndarray]]:
        """(place before it, int32 tokens with the end token) of each training document of this rank."""
        share = self._share
        places: deque[dict | None] = deque()

        def training():
            before = place
            for document, after in share.corpus.placed(place, share.rank, share.world_size):
                self._heed()
                if preparation.document_share(document) >= share.val_fraction:
                    places.append(before)
                    yield document
                before = after

        for batch in preparation.batches(training()):
            for ids in share.tokenizer.encode_batch(batch, share.threads):
                yield places.popleft(), np.array([*ids, share.tokenizer.eos_id], dtype=np.int32)


def _windows(tokens: np.ndarray, seq_len: int) -> np.ndarray:
    """A view [n, T+1] of all the full windows of `tokens`; neighbours share one token."""
    return np.lib.stride_tricks.sliding_window_view(tokens, seq_len + 1)[::seq_len]


def held_out(corpus: Corpus, tokenizer, seq_len: int, *, dist, val_fraction: float, limit: int,
             documents: int = HELD_OUT_DOCUMENTS) -> torch.Tensor | None:
    """The first `limit` windows of the documents that a StreamLoader with this `val_fraction` leaves out, the same on
    every rank: int64 [<= limit, T+1] on the CPU.

    Rank 0 reads the first `documents` documents at most and sends what it finds. None, with a warning, where they do
    not fill a window. Raises UserError on every rank for what cannot be read.
    """
    windows = dist.broadcast_tree(dist.made_on_main(
        lambda: _held_out_windows(corpus, tokenizer, seq_len, val_fraction, limit, documents)))
    if windows is None:
        dist.print(f"Aviso: entre los primeros {documents} documentos no hay una secuencia de validación; no habrá "
                   "pérdida de validación.")
    return windows


def _held_out_windows(corpus, tokenizer, seq_len, val_fraction, limit, documents):
    tokens = []
    for document, _ in itertools.islice(corpus.placed(), documents):
        if preparation.document_share(document) < val_fraction:
            tokens += [*tokenizer.encode(document), tokenizer.eos_id]
        if len(tokens) > limit * seq_len:
            break
    if len(tokens) <= seq_len:
        return None
    return torch.from_numpy(_windows(np.array(tokens, dtype=np.int64), seq_len)[:limit].copy())
