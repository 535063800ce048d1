"""The order of the tokens, and the loader that reads them from shards.

Several shards are one stream; window w of it is tokens [w*T, w*T + T], T inputs and one more for the last target.
Sequence number n of epoch e is window perm(seed, e)(n), and the global batch that starts at position `samples` holds
the numbers samples ... samples + B - 1. So the order depends on (seed, epoch, samples) alone, however many processes
read it.

csrc/token_loader.cpp reads ahead in a thread of its own; where the extension cannot be loaded, `_NumpyReader` reads the
same batches, each when it is waited for. Which windows are read, and when, is decided here for both.
"""

from __future__ import annotations

import contextlib
import errno
import os
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import torch

from aura import extension
from aura.errors import TrainingFault, UserError, agreed
from aura.files import explain
from aura.shards import DTYPES, HEADER_BYTES, beyond_vocabulary, read_header
from aura.words import counted

_TORCH_DTYPES = {2: torch.uint16, 4: torch.uint32}

# ---- Order ----------------------------------------------------------------------------------------------------------

_ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = 2**64 - 1


def _mix64(x):
    """SplitMix64's finaliser, on uint64 arrays (whose products wrap around) or on masked Python integers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK64
    return x ^ (x >> 31)


def permute(n: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """Windows (uint64, shape of `n`) that hold the sequence numbers `n` < count of an epoch with `count` windows.

    The numpy version of `Permutation` in csrc/token_loader.h, which names the sources of the construction.
    """
    if not 1 <= count <= 2**62:
        raise ValueError(f"count must be in 1 ... 2^62, not {count}")
    values = np.array(n, dtype=np.uint64)
    if values.size and int(values.max()) >= count:
        raise IndexError("sequence number beyond the count")
    bits = (count - 1).bit_length()
    low_bits = np.uint64(bits - bits // 2)
    low_mask, high_mask = np.uint64((1 << int(low_bits)) - 1), np.uint64((1 << bits // 2) - 1)
    base = _mix64(_mix64((seed + _GOLDEN) & _MASK64) + epoch & _MASK64)
    keys = [np.uint64(_mix64(base + _GOLDEN * (i + 1) & _MASK64)) for i in range(_ROUNDS)]
    flat = values.reshape(-1)
    walking = np.arange(flat.size)
    while walking.size:
        high, low = flat[walking] >> low_bits, flat[walking] & low_mask
        for i in range(0, _ROUNDS, 2):
            low ^= _mix64(high + keys[i]) & low_mask
            high ^= _mix64(low + keys[i + 1]) & high_mask
        flat[walking] = high << low_bits | low
        walking = walking[flat[walking] >= count]
    return flat.reshape(np.shape(n))


# ---- Reading --------------------------------------------------------------------------------------------------------


class _Stream:
    """Shards as one stream: paths, widths and the number of windows, checked by their headers alone."""

    def __init__(self, paths: Sequence[str | os.PathLike], seq_len: int, vocab_size: int):
        self.paths = [os.fspath(path) for path in paths]
        if not self.paths:
            raise UserError("No hay ningún fichero de tokens que leer.")
        headers = [read_header(path, vocab_size) for path in self.paths]
        for path, header in zip(self.paths, headers, strict=True):
            if header.width != headers[0].width:
                raise UserError(f"{path} guarda tokens de {header.width} bytes y {self.paths[0]} de otro tamaño.")
        self.width = headers[0].width
        self.tokens = [header.tokens for header in headers]
        self.seq_len, self.vocab_size = seq_len, vocab_size
        self.windows = max(sum(self.tokens) - 1, 0) // seq_len
        if self.windows == 0:
            raise agreed(
                UserError,
                f"{self.paths[0]}: {sum(self.tokens)} tokens no llenan una secuencia de {seq_len} + 1; "
                "use más texto o un --seq-len menor.",
            )


class _NumpyReader:
    """What the extension's WindowReader does, without looking ahead: a batch is read when it is waited for."""

    def __init__(self, stream: _Stream, buffers: list[torch.Tensor]):
        self._stream = stream
        self._buffers = [buffer.numpy() for buffer in buffers]
        dtype = DTYPES[stream.width]
        self._maps = [
            np.memmap(path, dtype, "r", offset=HEADER_BYTES, shape=(tokens,)) if tokens else np.empty(0, dtype)
            for path, tokens in zip(stream.paths, stream.tokens, strict=True)
        ]
        self._opened = [os.stat(path) for path in stream.paths]
        self._starts = [0, *accumulate(stream.tokens)]
        self._jobs: dict[int, np.ndarray | tuple] = {}

    def submit(self, slot: int, seed: int, epoch: int, first: int, count: int) -> None:
        self._jobs[slot] = (np.arange(first, first + count, dtype=np.uint64), self._stream.windows, seed, epoch)

    def submit_windows(self, slot: int, windows: list[int]) -> None:
        self._jobs[slot] = np.array(windows, np.uint64)

    def wait(self, slot: int) -> tuple | None:
        job = self._jobs.pop(slot)
        windows = permute(*job) if isinstance(job, tuple) else job
        for row, window in zip(self._buffers[slot], windows.tolist(), strict=False):
            fault = self._copy_window(window, row)
            if fault is not None:
                self._jobs[slot] = job
                return fault
        return None

    def _shrunk(self, shard: int) -> bool:
        """Whether the mapped file has become shorter; False if its name is another's by now: then it is unchanged."""
        with contextlib.suppress(FileNotFoundError):
            now = os.stat(self._stream.paths[shard])
            return (os.path.samestat(now, self._opened[shard])
                    and now.st_size < HEADER_BYTES + self._maps[shard].nbytes)
        return False

    def _copy_window(self, window: int, row: np.ndarray) -> tuple | None:
        at, filled = window * self._stream.seq_len, 0
        shard = bisect_right(self._starts, at) - 1
        while filled < row.size:
            position = at + filled - self._starts[shard]
            if self._shrunk(shard):
                return "shrunk", shard, position, 0
            part = self._maps[shard][position : position + row.size - filled]
            if part.max(initial=0) >= self._stream.vocab_size:
                bad = int(np.argmax(part >= self._stream.vocab_size))
                return "token", shard, position + bad, int(part[bad])
            row[filled : filled + part.size] = part
            filled += part.size
            shard += 1
        return None

    def cancel(self) -> None:
        self._jobs.clear()

    def close(self) -> None:
        self._jobs.clear()
        self._maps.clear()


def _open_reader(stream: _Stream, buffers: list[torch.Tensor]):
    module = extension.load()
    try:
        if module is None:
            return _NumpyReader(stream, buffers)
        return module.WindowReader(
            files=list(zip(map(os.fsencode, stream.paths), stream.tokens, strict=True)),
            addresses=[buffer.data_ptr() for buffer in buffers],
            header_bytes=HEADER_BYTES,
            seq_len=stream.seq_len,
            vocab_size=stream.vocab_size,
            file_width=stream.width,
            buffer_width=buffers[0].element_size(),
        )
    except OSError as error:
        kind = TrainingFault if error.errno in (errno.ENOMEM, errno.EAGAIN) else UserError
        raise kind(f"No se pueden abrir los ficheros de tokens: {explain(error)}.") from error


def _close(reader, ring: torch.Tensor) -> None:
    """Runs once, at close(), at collection or at exit; `ring` is held until the thread no longer writes to it."""
    reader.close()


class _Ring:
    """A ring of batch buffers: asked for in order, taken in order, lent for a while, asked for again.

    A buffer on the CPU holds int64, ready for use, and is handed out itself. For CUDA it is pinned and as narrow as
    the file: half or a quarter of the bytes cross the bus, the device widens them, and the buffer is used again once
    an event says that its copy is over.
    """

    AHEAD_BYTES = 2**19  # deep enough to hide a disk's delays, small enough to stay in a core's cache
    AHEAD_MIN, AHEAD_MAX = 4, 64
    CUDA_COPIES = 8  # copies that may be under way, so that next() does not hold the CPU to the device's pace

    def __init__(self, stream: _Stream, batch_size: int, device: str | torch.device, lent: int):
        self.device = torch.device(device)
        self._stream = stream
        self._cpu = self.device.type == "cpu"
        self._cuda = self.device.type == "cuda"
        dtype = _TORCH_DTYPES[stream.width] if self._cuda else torch.int64
        size = batch_size * (stream.seq_len + 1) * dtype.itemsize
        lent = max(lent, self.CUDA_COPIES) if self._cuda else lent
        self._lent_limit = lent
        slots = min(max(self.AHEAD_BYTES // size, self.AHEAD_MIN), self.AHEAD_MAX) + lent
        ring = torch.empty(slots, batch_size, stream.seq_len + 1, dtype=dtype, pin_memory=self._cuda)
        self._buffers = list(ring.unbind())
        self._pairs = [(buffer[:, :-1], buffer[:, 1:]) for buffer in self._buffers]
        self._events = [torch.cuda.Event() for _ in self._buffers] if self._cuda else []
        self.free = deque(range(slots))
        self._lent: deque[int] = deque()
        self.reader = _open_reader(stream, self._buffers)
        self.close = weakref.finalize(self, _close, self.reader, ring)

    def recycle(self) -> None:
        """Free the buffers that are lent no longer."""
        if self._cuda:
            while self._lent and self._events[self._lent[0]].query():
                self.free.append(self._lent.popleft())
            if len(self._lent) >= self._lent_limit:
                self._events[self._lent[0]].synchronize()
                self.free.append(self._lent.popleft())
        elif len(self._lent) >= self._lent_limit:
            self.free.append(self._lent.popleft())

    def wait(self, slot: int) -> None:
        """Wait until `slot` is filled. Raises UserError naming file and position of what cannot be used."""
        fault = self.reader.wait(slot)
        if fault is not None:
            raise UserError(self._explain(*fault))
        self._lent.append(slot)

    def pair(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of the batch in `slot`, on the device."""
        if self._cpu:
            return self._pairs[slot]
        batch = self.batch(slot)
        return batch[:, :-1], batch[:, 1:]

    def batch(self, slot: int) -> torch.Tensor:
        """The batch in `slot`, int64 on the device."""
        buffer = self._buffers[slot]
        if self._cpu:
            return buffer
        if not self._cuda:
            return buffer.to(self.device)
        narrow = buffer.to(self.device, non_blocking=True)
        self._events[slot].record(torch.cuda.current_stream(self.device))
        return narrow.to(torch.int64)

    def _explain(self, kind: str, shard: int, position: int, token: int) -> str:
        path = self._stream.paths[shard]
        if kind == "token":
            return beyond_vocabulary(path, token, position, self._stream.vocab_size)
        return (f"{path} se ha acortado mientras se leía, o el disco ya no deja leerlo: compruebe el disco o vuelva a "
                "generarlo y reanude desde el último punto guardado.")


def _positions(
    epoch: int, samples: int, windows: int, global_batch: int, rank: int, batch_size: int, grad_accum: int
) -> Iterator[tuple[int, int, tuple[int, int] | None]]:
    """(epoch, first sequence number, position after it) of each micro-batch; None inside a global batch."""
    while True:
        if samples + global_batch > windows:
            epoch, samples = epoch + 1, 0
        first = samples + rank * batch_size * grad_accum
        samples += global_batch
        for _ in range(grad_accum - 1):
            yield epoch, first, None
            first += batch_size
        yield epoch, first, (epoch, samples)


class TokenLoader:
    """Micro-batches of one rank, for ever: at the end of an epoch the next begins.

    Every global batch takes B = batch_size * grad_accum * world_size sequence numbers, this rank a slice of them, cut
    into grad_accum micro-batches. An epoch ends when fewer than B remain: that tail is all that is ever dropped.

    `epoch` and `samples` are the position after the last complete global batch that next() has delivered; with `seed`
    they are the whole state, and may be continued under another batch size or world size.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike],
        seq_len: int,
        batch_size: int,
        *,
        vocab_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        grad_accum: int = 1,
        device: str | torch.device = "cpu",
    ):
        """Raises UserError for unusable files and for too little text."""
        if min(seq_len, batch_size, grad_accum, world_size) < 1 or not 0 <= rank < world_size:
            raise ValueError(f"{seq_len=} {batch_size=} {grad_accum=} {rank=} {world_size=}")
        stream = _Stream(paths, seq_len, vocab_size)
        self.windows = stream.windows
        self._rank, self._batch_size, self._grad_accum = rank, batch_size, grad_accum
        self._global_batch = batch_size * grad_accum * world_size
        self.steps_per_epoch = self.windows // self._global_batch
        if self.steps_per_epoch == 0:
            raise agreed(
                UserError,
                f"Los datos dan {counted(self.windows, 'secuencia')} y cada paso usa {self._global_batch}: "
                "baje --batch-size, --grad-accum o --seq-len, o use más texto.",
            )
        self._ring = _Ring(stream, batch_size, device, lent=grad_accum)
        self._ahead: deque[tuple[int, tuple[int, int] | None]] = deque()
        self._start(seed, 0, 0)

    def _start(self, seed: int, epoch: int, samples: int) -> None:
        if epoch < 0 or not 0 <= samples <= self.windows:
            raise UserError(
                f"La posición guardada (época {epoch}, muestra {samples}) no cabe en estos datos, "
                f"de {counted(self.windows, 'secuencia')} por época: ¿han cambiado los datos o --seq-len?"
            )
        self.seed, self.epoch, self.samples = seed, epoch, samples
        self._seed64 = seed & _MASK64
        self._positions = _positions(
            epoch, samples, self.windows, self._global_batch, self._rank, self._batch_size, self._grad_accum
        )

    def next(self) -> torch.Tensor:
        """The next micro-batch, int64 [batch_size, T+1] on the device: inputs batch[:, :-1], targets batch[:, 1:].

        On the CPU it is a buffer of the loader's own, unchanged until next() has been called `grad_accum` times more
        (so the micro-batches of one global batch may be kept together); clone what must live longer. On other devices
        it is a new tensor. Raises UserError naming the file, and the token's position in it, for a token outside the
        vocabulary or a file that was cut while it was read.
        """
        return self._ring.batch(self._advance())

    def next_pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As next(), already cut into inputs and targets, two views of [batch_size, T].

        On the CPU the views are made once per buffer: slicing a tensor costs more than filling a small batch does.
        """
        return self._ring.pair(self._advance())

    def _advance(self) -> int:
        ring, ahead = self._ring, self._ahead
        ring.recycle()
        free = ring.free
        while free:
            epoch, first, after = next(self._positions)
            slot = free.popleft()
            ring.reader.submit(slot, self._seed64, epoch, first, self._batch_size)
            ahead.append((slot, after))
        slot, after = ahead[0]
        ring.wait(slot)
        ahead.popleft()
        if after is not None:
            self.epoch, self.samples = after
        return slot

    @property
    def epoch_ended(self) -> bool:
        """Whether the last global batch that next() has delivered was the last of its epoch."""
        return self.samples + self._global_batch > self.windows

    def state_dict(self) -> dict[str, int]:
        """The position after the last batch that next() has delivered."""
        return {"seed": self.seed, "epoch": self.epoch, "samples": self.samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a saved position, of this or another world size; UserError when these data do not have it."""
        self._start(state["seed"], state["epoch"], state["samples"])
        self._ring.reader.cancel()
        self._ring.free.extend(slot for slot, _ in self._ahead)
        self._ahead.clear()

    def close(self) -> None:
        """Stop the reading thread and unmap the files; next() may not be called again."""
        self._ring.close()

    def __enter__(self) -> TokenLoader:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def evaluation_batches(
    paths: Sequence[str | os.PathLike],
    seq_len: int,
    batch_size: int,
    *,
    vocab_size: int,
    rank: int = 0,
    world_size: int = 1,
    device: str | torch.device = "cpu",
    limit: int | None = None,
) -> Iterator[torch.Tensor]:
    """Every window once over all ranks, in file order: int64 [<= batch_size, T+1] on the device, each a new tensor.

    Batch j goes to rank j % world_size, nothing is repeated to fill it: ranks may get different numbers of batches,
    and the last one may be smaller. `limit` takes at most that many windows, spread evenly. Raises UserError, at the
    call, for unusable files or too little text, and while iterating as TokenLoader.next() does.
    """
    stream = _Stream(paths, seq_len, vocab_size)
    count = stream.windows if limit is None else min(limit, stream.windows)
    return _evaluate(stream, count, range(rank * batch_size, count, world_size * batch_size), batch_size, device)


def _evaluate(stream: _Stream, count: int, starts: range, batch_size: int, device) -> Iterator[torch.Tensor]:
    ring = _Ring(stream, batch_size, device, lent=1)
    ahead: deque[tuple[int, int]] = deque()
    coming = iter(starts)
    try:
        for _ in starts:
            ring.recycle()
            while ring.free and (start := next(coming, None)) is not None:
                chosen = [i * stream.windows // count for i in range(start, min(start + batch_size, count))]
                slot = ring.free.popleft()
                ring.reader.submit_windows(slot, chosen)
                ahead.append((slot, len(chosen)))
            slot, rows = ahead.popleft()
            ring.wait(slot)
            batch = ring.batch(slot)[:rows]
            yield batch.clone() if batch.device.type == "cpu" else batch
    finally:
        ring.close()
