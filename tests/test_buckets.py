"""Batches by length: every sequence once, the same whoever reads them, little padding, resumed where they stopped."""

import numpy as np
import pytest
import torch

from aura import buckets
from aura.errors import UserError

LENGTHS = np.random.RandomState(0).randint(20, 400, 1003)


def make(lengths=LENGTHS, batch_size=4, **options):
    return buckets.BucketLoader(lengths, lambda numbers: numbers.copy(), batch_size, **options)


def taken(loader, count):
    return [loader.next() for _ in range(count)]


@pytest.mark.parametrize("cell", [0, 1, 8, 48, 1003, 2000])
def test_an_epoch_holds_every_sequence_once_and_differs_from_the_next(cell):
    order = buckets.Order(LENGTHS, cell)
    first, second = order.epoch(5, 0), order.epoch(5, 1)
    assert sorted(first) == sorted(second) == list(range(1003))
    assert not np.array_equal(first, second) and np.array_equal(first, order.epoch(5, 0))
    assert not np.array_equal(first, order.epoch(6, 0))


def test_neighbours_are_of_about_one_length_and_their_turn_is_chance():
    cells = LENGTHS[buckets.Order(LENGTHS, 16).epoch(1, 0)][:992].reshape(-1, 16)
    # 1003 sequences are 62 cells, sorted in pools of 50 and 12: by chance a cell would spread over about 340.
    assert np.median(cells.max(1) - cells.min(1)) < 15 and (np.diff(cells, axis=1) >= 0).all()
    means = cells.mean(1)
    assert abs(np.corrcoef(np.arange(len(means)), means)[0, 1]) < 0.3


def test_the_tail_is_chosen_by_chance():
    tails = np.concatenate([LENGTHS[buckets.Order(LENGTHS, 100).epoch(seed, 0)][-3:] for seed in range(100)])
    assert tails.mean() == pytest.approx(LENGTHS.mean(), rel=0.1)


@pytest.mark.parametrize("world, accum", [(1, 4), (2, 2), (4, 1)])
def test_the_micro_batches_of_a_step_do_not_depend_on_who_reads_them(world, accum):
    alone = taken(make(grad_accum=4, seed=9), 8)
    for rank in range(world):
        mine = taken(make(rank=rank, world_size=world, grad_accum=accum, seed=9), 2 * accum)
        expected = [alone[4 * step + rank * accum + micro] for step in range(2) for micro in range(accum)]
        assert all(map(np.array_equal, mine, expected))


@pytest.mark.parametrize("count", [20, 22])
def test_an_epoch_ends_when_less_than_a_step_is_left(count):
    loader = make(np.full(count, 5), batch_size=2, grad_accum=2, seed=3)
    assert loader.steps_per_epoch == 5
    seen = []
    for step in range(1, 12):
        seen += [set(batch) for batch in taken(loader, 2)]
        assert loader.epoch_ended == (step % 5 == 0) and (loader.epoch, loader.samples) == ((step - 1) // 5,
                                                                                          4 * ((step - 1) % 5 + 1))
    for epoch in range(2):
        assert len(set().union(*seen[10 * epoch:10 * epoch + 10])) == 20


@pytest.mark.parametrize("steps", [1, 60, 61, 62, 63])
def test_resumed_is_as_uninterrupted_also_in_another_cut(steps):
    whole = make(batch_size=8, grad_accum=2, seed=2)
    taken(whole, 2 * steps)
    state = whole.state_dict()
    assert all(isinstance(value, int) for value in state.values())
    rest = np.concatenate(taken(whole, 4))
    taken(whole, 1)
    whole.load_state_dict(state)  # back, from the middle of a step and from the next epoch
    assert np.array_equal(np.concatenate(taken(whole, 4)), rest)
    other = make(batch_size=8, grad_accum=2, seed=77)
    other.load_state_dict(state)
    assert np.array_equal(np.concatenate(taken(other, 4)), rest)
    halves = [make(batch_size=4, world_size=2, rank=rank, grad_accum=2, seed=77) for rank in range(2)]
    for half in halves:
        half.load_state_dict(state)
    cut = [np.concatenate(taken(half, 2)) for _ in range(2) for half in halves]
    assert np.array_equal(np.concatenate(cut), rest)
    larger = make(batch_size=32, seed=77)  # another number of sequences a step: the order stays
    larger.load_state_dict(state)
    if steps < 60:
        assert np.array_equal(larger.next(), rest)


def test_a_position_or_a_batch_beyond_the_data_is_refused():
    with pytest.raises(UserError, match="no cabe"):
        make().load_state_dict({"seed": 0, "epoch": 0, "samples": 1004, "cell": 4})
    with pytest.raises(UserError, match="baje --batch-size"):
        make(np.array([3, 4]), batch_size=3)


def test_rows_are_filled_up_with_the_padding():
    rows = [np.array([4, 5, 6], np.int32), np.array([7], np.int32)]
    assert torch.equal(buckets.padded(rows, 4, 1), torch.tensor([[4, 5, 6, 1], [7, 1, 1, 1]]))
