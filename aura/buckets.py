"""Micro-batches of sequences of different lengths, those of about one length together, so that little is padding."""

from dataclasses import dataclass

import numpy as np
import torch

from aura import tokens
from aura.errors import UserError
from aura.words import counted

POOL = 50  # cells sorted together: enough for nearly equal lengths, few enough for another order in each epoch


@dataclass(frozen=True)
class Order:
    """In what order an epoch takes `len(lengths)` sequences: a pure function of (seed, epoch, cell).

    lengths: of each sequence. cell: how many neighbours have about one length, the sequences of a step; 0: the plain
    permutation. Sequences beyond the last whole cell come last, chosen by chance and not by their length.
    """

    lengths: np.ndarray
    cell: int

    def epoch(self, seed, epoch):
        """int64 [len(lengths)]: every sequence once."""
        count = len(self.lengths)
        order = tokens.permute(np.arange(count), count, seed, epoch).astype(np.int64)
        if not 0 < self.cell <= count:
            return order
        whole = count - count % self.cell
        cells = []
        for start in range(0, whole, POOL * self.cell):
            pool = order[start:min(start + POOL * self.cell, whole)]
            cells.append(pool[np.argsort(self.lengths[pool], kind="stable")].reshape(-1, self.cell))
        cells = np.concatenate(cells)
        turn = tokens.permute(np.arange(len(cells)), len(cells), ~seed, epoch).astype(np.int64)
        return np.concatenate([cells[turn].ravel(), order[whole:]])


class BucketLoader:
    """Micro-batches of one rank, for ever, as tokens.TokenLoader gives them: global batch k of an epoch takes the next
    B = batch_size * grad_accum * world_size sequences of its Order, this rank a slice of them, cut into grad_accum
    micro-batches. An epoch ends when fewer than B remain.

    collate(numbers) -> the batch of these sequences (int64 array, by rising length). bucketed: whether lengths matter.
    `epoch`, `samples`, the seed and the cell are the whole state, also under another batch size or world size.
    """

    def __init__(self, lengths, collate, batch_size, *, seed=0, rank=0, world_size=1, grad_accum=1, bucketed=True):
        self.windows, self.collate = len(lengths), collate
        self._batch_size, self._grad_accum, self._rank = batch_size, grad_accum, rank
        self._global_batch = batch_size * grad_accum * world_size
        self.steps_per_epoch = self.windows // self._global_batch
        if self.steps_per_epoch == 0:
            raise UserError(f"los datos dan {counted(self.windows, 'ventana')} y cada paso usa {self._global_batch}: "
                            "baje --batch-size o --grad-accum, o use más ejemplos")
        self.lengths = np.asarray(lengths)
        self.load_state_dict({"seed": seed, "epoch": 0, "samples": 0, "cell": self._global_batch * bucketed})

    def load_state_dict(self, state):
        """Go to a saved position; UserError when these data do not have it."""
        if not 0 <= state["samples"] <= self.windows:
            raise UserError(f"la posición guardada (muestra {state['samples']} de la época {state['epoch']}) no cabe "
                            f"en estos datos, de {self.windows} ventanas: ¿han cambiado?")
        self.seed, self.epoch, self.samples = state["seed"], state["epoch"], state["samples"]
        self._order = Order(self.lengths, state["cell"])
        self._numbers, self._micro = None, 0

    def state_dict(self):
        """The position after the last complete global batch that next() has delivered."""
        return {"seed": self.seed, "epoch": self.epoch, "samples": self.samples, "cell": self._order.cell}

    @property
    def epoch_ended(self):
        """Whether the last global batch that next() has delivered was the last of its epoch."""
        return self.samples + self._global_batch > self.windows

    def next(self):
        """The next micro-batch."""
        if self._micro == 0 and self.epoch_ended:
            self.epoch, self.samples, self._numbers = self.epoch + 1, 0, None
        if self._numbers is None:
            self._numbers = self._order.epoch(self.seed, self.epoch)
        first = self.samples + (self._rank * self._grad_accum + self._micro) * self._batch_size
        batch = self.collate(self._numbers[first:first + self._batch_size])
        self._micro = (self._micro + 1) % self._grad_accum
        if self._micro == 0:
            self.samples += self._global_batch
        return batch


def padded(rows, length, value):
    """int64 [len(rows), length] of integer arrays, `value` behind the end of each."""
    batch = np.full((len(rows), length), value, np.int64)
    for place, row in zip(batch, rows, strict=True):
        place[:len(row)] = row
    return torch.from_numpy(batch)
