"""Where our CUDA kernels are faster than torch: what `benchmarks/gpu.py --learn` measured on a card.

Beside this file speeds-CARD.json holds what it measured on a card we had, for those who have not measured theirs.
"""

import json
from dataclasses import dataclass

import torch

from aura.errors import UserError
from aura.files import MISSHAPEN, write_json

COMPILED = "torch.compile"  # what models are not run with: the kernels are not chosen against it
OTHER_KERNELS = "ours, mma.sync"  # on Hopper, our kernels for other cards: no peer, but ours too


@dataclass(frozen=True)
class Speeds:
    """cells: {(op, dtype, form, width): [(size, how many times as fast as torch)]}, of forward and backward together.

    form: "causal", "full" or "documents" of attention, else "". width: of a head, else 0. size: T of attention and
    rotary positions, else the length of a row. card: on which it was measured, in Spanish.
    """

    cells: dict
    card: str = "esta tarjeta"

    def __post_init__(self):
        """Sort the cells by size, as wins() goes through them."""
        for cells in self.cells.values():
            cells.sort()

    def wins(self, kind, size):
        """Whether ours are the faster for this (op, dtype, form, width), at the measured size that is nearest in
        proportion. What nobody has measured goes to torch."""
        smaller, wins = 0, False
        for at, ratio in self.cells.get(kind, ()):
            # In integers, and without min(): models ask under torch.compile, which follows this and no logarithms.
            if size * size >= smaller * at:
                wins = ratio > 1
            smaller = at
        return wins

    def operations(self):
        """The names of those in which ours are faster at some size."""
        return sorted({op for (op, *_), cells in self.cells.items() if any(ratio > 1 for _, ratio in cells)})


def learnt(rows):
    """The Speeds that rows of benchmarks/gpu.py tell: against the fastest of torch's ways, training steps left out."""
    times = {}
    for row in rows:
        if row["direction"] != "step" and COMPILED not in row["peer"] and row["peer"] != OTHER_KERNELS:
            case = times.setdefault((row["op"], row["variant"], tuple(row["shape"])), {})
            case.setdefault(row["peer"], []).append((row["ours_ms"], row["peer_ms"]))
    cells = {}
    for (op, variant, shape), peers in times.items():
        whole = max(map(len, peers.values()))  # directions; a peer that refuses one does not count
        ratios = [sum(peer for _, peer in both) / sum(ours for ours, _ in both)
                  for both in peers.values() if len(both) == whole]
        dtype, _, form = variant.partition(", ")
        kind = op, getattr(torch, dtype), form, shape[3] if len(shape) == 4 else 0
        cells.setdefault(kind, []).append((shape[1], min(ratios)))
    return Speeds(cells)


def write(path, speeds):
    """Write `speeds` into a file."""
    write_json(path, [[op, str(dtype).removeprefix("torch."), form, width, cells]
                      for (op, dtype, form, width), cells in speeds.cells.items()])


def read(path, card=Speeds.card):
    """The Speeds of a file, None where there is none. Raises UserError for one that is damaged."""
    if not path.exists():
        return None
    try:
        return Speeds({(op, getattr(torch, dtype), form, width): [tuple(cell) for cell in cells]
                       for op, dtype, form, width, cells in json.loads(path.read_text(encoding="utf-8"))}, card)
    except MISSHAPEN as problem:
        raise UserError(f"{str(path)!r} está dañado: bórrelo, o mida otra vez con python benchmarks/gpu.py --learn"
                        ) from problem
