"""Keys and values of the positions a model has seen, for generation."""


class KVCache:
    """One slot for each attention of a model's forward pass. Memory, from the first extend() on: 2 * slots * batch *
    seq_len * heads * head_width values. `length`: positions seen so far."""

    def __init__(self, slots, seq_len):
        self.slots, self.seq_len = slots, seq_len
        self.keys = self.values = None
        self.length = 0

    def extend(self, slot, k, v):
        """Append k, v [B, T, H, D] of one slot; returns all so far. advance() follows once every slot has its own.

        T > 1 is for an empty cache only: a later chunk would need a mask that is not square.
        """
        if self.keys is None:  # like k: under autocast, and sharded, its dtype is not that of the weights
            shape = self.slots, len(k), self.seq_len, *k.shape[2:]
            self.keys, self.values = k.new_empty(shape), v.new_empty(shape)
        end = self.length + k.shape[1]
        self.keys[slot, :, self.length:end] = k
        self.values[slot, :, self.length:end] = v
        return self.keys[slot, :, :end], self.values[slot, :, :end]

    def repeat(self, row, done, period):
        """Fill all slots from `done` on, for batch entry `row` at the position being written, with what the `period`
        slots before `done` hold there."""
        for first in range(done, len(self.keys), period):
            for part in (self.keys, self.values):
                part[first:first + period, row, self.length] = part[done - period:done, row, self.length]

    def advance(self, positions):
        """Count `positions` more as seen."""
        self.length += positions
