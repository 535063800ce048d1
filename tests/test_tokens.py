"""Shards, their order, and the loader: the C++ reader and the numpy one must be the same thing."""

import errno
import hashlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from aura import compilation, extension
from aura.errors import TrainingFault, UserError
from aura.shards import HEADER_BYTES, ShardHeader, ShardWriter, read_header, verify_shard
from aura.tokens import TokenLoader, _Ring, evaluation_batches, permute

VOCAB = 50_000


def write(directory, count=2000, vocab_size=VOCAB, tokens_per_shard=2**27, seed=0):
    """Shards of random tokens: (paths, the tokens, what close() said)."""
    data = np.random.default_rng(seed).integers(0, vocab_size, count)
    writer = ShardWriter(directory, "train", vocab_size, tokens_per_shard)
    for part in np.array_split(data, 7):
        writer.write(part)
    shards = writer.close()
    return [str(directory / shard["file"]) for shard in shards], data, shards


def forge(path, payload, vocab_size, width=2):
    """A shard whose header is right about a payload that need not be."""
    header = ShardHeader(width, vocab_size, len(payload) // width, zlib.crc32(payload))
    path.write_bytes(header.pack() + payload)
    return str(path)


@pytest.fixture(params=["cpp", "numpy"])
def reader(request, monkeypatch):
    """Run the test with the extension and without it."""
    if request.param == "numpy":
        monkeypatch.setenv("AURA_EXTENSION", "off")
    elif extension.load() is None:
        pytest.skip(extension.status())
    return request.param


@pytest.fixture
def native():
    module = extension.load()
    if module is None:
        pytest.skip(extension.status())
    return module


def open_reader(native, path, tokens, buffers, vocab_size=VOCAB, width=2):
    """The reader behind a TokenLoader, for batches [slots, rows, T + 1], which must live as long."""
    return native.WindowReader(
        files=[(os.fsencode(path), tokens)], addresses=[buffer.data_ptr() for buffer in buffers],
        header_bytes=HEADER_BYTES, seq_len=buffers.shape[2] - 1, vocab_size=vocab_size, file_width=width,
        buffer_width=buffers.element_size())


def collect(paths, batches, state=None, **arguments):
    arguments = {"seq_len": 10, "batch_size": 2, "vocab_size": VOCAB, **arguments}
    with TokenLoader(paths, **arguments) as loader:
        if state:
            loader.load_state_dict(state)
        return torch.cat([loader.next().clone() for _ in range(batches)])


# ---- Order ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9, 31, 64, 65, 100, 1000, 4097, 65_536, 100_003])
def test_permutation_is_a_bijection(count):
    for seed, epoch in [(0, 0), (1, 0), (0, 1), (-3, 7), (2**64 - 1, 2**40)]:
        assert np.array_equal(np.sort(permute(np.arange(count), count, seed, epoch)), np.arange(count))


@pytest.mark.parametrize("count", [1, 2, 3, 6, 1000, 2**20, 10**12, 2**40 + 1, 2**62 - 1, 2**62])
def test_cpp_permutation_equals_numpy(native, count):
    n = np.unique(np.linspace(0, count - 1, 500).astype(np.uint64).clip(0, count - 1))
    for seed, epoch in [(0, 0), (12345, 3), (2**64 - 1, 2**40)]:
        assert np.array_equal(native.permute(n, count, seed, epoch), permute(n, count, seed, epoch))


def test_permutation_refuses_what_it_cannot_order(native):
    for function in (permute, native.permute):
        with pytest.raises(ValueError):
            function(np.zeros(1, np.uint64), 0, 0, 0)
        with pytest.raises(IndexError):
            function(np.array([5], np.uint64), 5, 0, 0)


def test_a_trillion_windows_cost_no_memory():
    count = 10**12
    windows = permute(np.arange(1000) * 10**9, count, 7, 1)
    assert windows.max() < count
    assert len(set(windows.tolist())) == 1000
    assert windows.max() > count * 0.9
    assert windows.min() < count * 0.1


def test_neighbours_and_epochs_are_unrelated():
    count = 10_000
    first, second = (permute(np.arange(count), count, 0, epoch).astype(float) for epoch in (0, 1))
    for a, b in [(first[:-1], first[1:]), (first, second), (first, np.arange(count))]:
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.05


def test_every_place_is_equally_likely():
    hits = np.zeros((6, 6))
    for seed in range(3000):
        hits[np.arange(6), permute(np.arange(6), 6, seed, 0).astype(int)] += 1
    assert np.abs(hits / 3000 - 1 / 6).max() < 0.04


def test_order_is_pinned():
    """Another order would make every saved position mean something else."""
    assert permute(np.arange(10), 10, 42, 3).tolist() == [5, 9, 1, 3, 2, 6, 8, 7, 0, 4]


# ---- Shards ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size, width", [(2**16, 2), (2**16 + 1, 4)])
def test_shards_hold_what_was_written(tmp_path, vocab_size, width):
    paths, data, shards = write(tmp_path, 1000, vocab_size, tokens_per_shard=300)
    assert [os.path.basename(path) for path in paths] == [f"train-0000{i}.bin" for i in range(4)]
    assert [shard["tokens"] for shard in shards] == [300, 300, 300, 100]
    read = [np.fromfile(path, f"<u{width}", offset=HEADER_BYTES) for path in paths]
    assert np.array_equal(np.concatenate(read), data)
    for path, part, shard in zip(paths, read, shards, strict=True):
        header = verify_shard(path, vocab_size)
        assert (header.width, header.vocab_size, header.tokens) == (width, vocab_size, part.size)
        assert header.crc32 == shard["crc32"] == zlib.crc32(part.tobytes())
        assert shard["sha256"] == hashlib.sha256(part.tobytes()).hexdigest()
        assert shard["bytes"] == os.path.getsize(path)


def test_exact_multiple_leaves_no_empty_shard(tmp_path):
    assert len(write(tmp_path, 600, tokens_per_shard=300)[0]) == 2
    assert ShardWriter(tmp_path, "none", VOCAB).close() == []


def test_interrupted_shard_is_never_valid(tmp_path):
    with pytest.raises(RuntimeError), ShardWriter(tmp_path, "train", VOCAB) as writer:
        writer.write(np.arange(100))
        raise RuntimeError
    with pytest.raises(UserError, match=r"train-00000\.bin está incompleto.*vuelva a generarlo"):
        read_header(tmp_path / "train-00000.bin")


@pytest.mark.parametrize("before, since, after", [(0, 0, 5), (250, 0, 300), (250, 40, 1), (250, 500, 1), (300, 500, 7),
                                                  (650, 10, 0)])
def test_writing_goes_on_from_a_state_whatever_was_written_since(tmp_path, before, since, after):
    writer, data = ShardWriter(tmp_path, "train", VOCAB, 300), np.arange(1000)
    writer.write(data[:before])
    state = json.loads(json.dumps(writer.state()))
    writer.write(data[before:before + since] + 1)
    if since:
        writer.close()
    again = ShardWriter(tmp_path, "train", VOCAB, 300)
    again.resume(state)
    again.write(data[before:before + after])
    shards = again.close()
    whole = ShardWriter(tmp_path / "whole", "train", VOCAB, 300)
    whole.write(data[:before + after])
    assert shards == whole.close()
    for shard in shards:
        assert (tmp_path / shard["file"]).read_bytes() == (tmp_path / "whole" / shard["file"]).read_bytes()


def test_writing_does_not_go_on_behind_shards_of_other_data(tmp_path):
    states = []
    for seed in range(2):
        writer = ShardWriter(tmp_path, "train", VOCAB, 300)
        writer.write(np.random.default_rng(seed).integers(0, VOCAB, 300))
        states.append(writer.state())
    ShardWriter(tmp_path, "train", VOCAB, 300).resume(states[1])
    with pytest.raises(UserError, match=r"train-00000\.bin es de otros datos"):
        ShardWriter(tmp_path, "train", VOCAB, 300).resume(states[0])


def test_the_header_is_written_when_the_tokens_are_on_the_disk(tmp_path, monkeypatch):
    on_disk, sync = [], os.fsync

    def noted(descriptor):
        on_disk.append((tmp_path / "train-00000.bin").read_bytes())
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    write(tmp_path, 600)
    whole = (tmp_path / "train-00000.bin").read_bytes()
    assert on_disk[:2] == [bytes(64) + whole[64:], whole] and any(whole[:64])


@pytest.mark.parametrize("bad", [-1, VOCAB])
def test_writer_refuses_tokens_outside_the_vocabulary(tmp_path, bad):
    with pytest.raises(UserError, match=str(bad)):
        ShardWriter(tmp_path, "train", VOCAB).write(np.array([1, bad]))


def edit(path, at, data):
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


CORRUPTIONS = {
    "magic": (lambda path: edit(path, 0, b"X"), "no es un fichero de tokens"),
    "version": (lambda path: edit(path, 8, b"\x09"), "versión 9"),
    "header": (lambda path: edit(path, 16, b"\xff"), "cabecera dañada"),
    "truncated": (lambda path: os.truncate(path, HEADER_BYTES + 1000), "cortado"),
    "truncated in the header": (lambda path: os.truncate(path, 20), "cortado"),
    "too long": (lambda path: edit(path, HEADER_BYTES + 4000, b"more"), "sobra"),
    "empty": (lambda path: os.truncate(path, 0), "no es un fichero de tokens"),
    "flipped bit": (lambda path: edit(path, HEADER_BYTES + 1001, b"\xff"), "dañado"),
    "gone": (os.remove, "No se puede leer .*: no existe"),
}


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_corruption_is_named_in_one_line(tmp_path, kind):
    damage, text = CORRUPTIONS[kind]
    [path], _, _ = write(tmp_path)
    damage(path)
    with pytest.raises(UserError, match=text) as caught:
        verify_shard(path)
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)
    if kind != "flipped bit":
        with pytest.raises(UserError, match=text):
            TokenLoader([path], 10, 2, vocab_size=VOCAB)


@pytest.mark.parametrize("token", [500, 999])
def test_verify_names_a_token_outside_the_vocabulary(tmp_path, token, monkeypatch):
    monkeypatch.setattr("aura.shards.CHUNK_TOKENS", 100)  # of a large shard, whose first pieces are sound
    data = np.arange(500, dtype="<u2")
    data[321] = token
    path = forge(tmp_path / "bad.bin", data.tobytes(), 500)
    with pytest.raises(UserError, match=rf"bad\.bin.*token {token} .*posición 321"):
        verify_shard(path)


def test_shard_of_a_larger_vocabulary_is_refused(tmp_path):
    [path], _, _ = write(tmp_path)
    for check in (verify_shard, read_header):
        assert check(path, vocab_size=VOCAB).vocab_size == VOCAB
        with pytest.raises(UserError, match=f"{VOCAB} tokens.*{VOCAB - 1}"):
            check(path, vocab_size=VOCAB - 1)


# ---- Loader ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [VOCAB, 70_000])
@pytest.mark.parametrize("tokens_per_shard", [2**27, 37, 3])
def test_batches_are_the_windows_of_the_order(tmp_path, reader, vocab_size, tokens_per_shard):
    """Windows straddle shards, even shards smaller than a window; both token widths."""
    paths, data, _ = write(tmp_path, 301, vocab_size, tokens_per_shard)
    with TokenLoader(paths, 10, 3, vocab_size=vocab_size, seed=5) as loader:
        assert (loader.windows, loader.steps_per_epoch) == (30, 10)
        for epoch in range(3):
            order = permute(np.arange(30), 30, 5, epoch).astype(int)
            for step in range(10):
                batch = loader.next()
                assert batch.dtype == torch.int64
                assert batch.shape == (3, 11)
                expected = [data[w * 10 : w * 10 + 11] for w in order[step * 3 : step * 3 + 3]]
                assert np.array_equal(batch.numpy(), expected)
                assert loader.state_dict() == {"seed": 5, "epoch": epoch, "samples": step * 3 + 3}


def test_pairs_are_the_same_batches(tmp_path, reader):
    paths, _, _ = write(tmp_path)
    arguments = {"vocab_size": VOCAB, "seq_len": 10, "batch_size": 4}
    with TokenLoader(paths, **arguments) as one, TokenLoader(paths, **arguments) as other:
        for _ in range(60):
            batch, (inputs, targets) = one.next(), other.next_pair()
            assert torch.equal(inputs, batch[:, :-1])
            assert torch.equal(targets, batch[:, 1:])


def test_micro_batches_of_a_step_may_be_kept(tmp_path, reader, monkeypatch):
    monkeypatch.setattr(_Ring, "AHEAD_MIN", 1)  # no more buffers than it takes: one that is free is filled at once
    monkeypatch.setattr(_Ring, "AHEAD_MAX", 1)
    paths, _, _ = write(tmp_path)
    arguments = {"vocab_size": VOCAB, "seq_len": 10, "batch_size": 2, "grad_accum": 5}
    with TokenLoader(paths, **arguments) as loader:
        for _ in range(60):
            kept, copies = zip(*((batch, batch.clone()) for batch in (loader.next() for _ in range(5))), strict=True)
            assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))
            assert len({batch.data_ptr() for batch in kept}) == 5


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("grad_accum", [1, 2])
def test_order_is_the_same_for_any_world_size(tmp_path, reader, world_size, grad_accum):
    paths, _, _ = write(tmp_path, 2500)
    whole = collect(paths, 12, batch_size=60).view(12, 60, 11)
    share = 60 // world_size
    ranks = [
        collect(
            paths, 12 * grad_accum, batch_size=share // grad_accum, grad_accum=grad_accum, rank=r, world_size=world_size
        ).view(12, share, 11)
        for r in range(world_size)
    ]
    assert torch.equal(torch.cat(ranks, dim=1), whole)


def test_resume_from_any_position(tmp_path, reader):
    paths, _, _ = write(tmp_path, 705)
    arguments = {"vocab_size": VOCAB, "seq_len": 10, "batch_size": 3, "grad_accum": 2, "seed": 9}
    with TokenLoader(paths, **arguments) as loader:
        loader.next()
        loader.load_state_dict(loader.state_dict())  # what was read ahead is forgotten, its buffers are not
        states, batches = [], []
        for _ in range(30):
            states.append(loader.state_dict())
            batches.append(torch.cat([loader.next().clone(), loader.next().clone()]))
        assert states[12]["epoch"] == 1
        for step in (0, 1, 5, 10, 11, 12, 20):
            loader.load_state_dict(states[step])
            assert loader.state_dict() == states[step]
            for expected in batches[step : step + 9]:
                assert torch.equal(torch.cat([loader.next().clone(), loader.next().clone()]), expected)
    assert torch.equal(collect(paths, 4, **arguments, state=states[7]), torch.cat(batches[7:9]))


def test_half_delivered_global_batch_does_not_count(tmp_path, reader):
    paths, _, _ = write(tmp_path)
    with TokenLoader(paths, 10, 2, vocab_size=VOCAB, grad_accum=3) as loader:
        seen = [loader.next() is not None and loader.samples for _ in range(7)]
    assert seen == [0, 0, 6, 6, 6, 12, 12]


def test_world_size_may_change_in_mid_epoch(tmp_path, reader):
    paths, _, _ = write(tmp_path, 3001)
    whole = collect(paths, 150)  # 300 windows in order
    with TokenLoader(paths, 10, 5, vocab_size=VOCAB, rank=1, world_size=3) as loader:
        for _ in range(4):
            loader.next()
        state = loader.state_dict()
    assert state["samples"] == 60
    ranks = [collect(paths, 6, batch_size=8, rank=r, world_size=2, state=state).view(6, 8, 11) for r in range(2)]
    assert torch.equal(torch.cat(ranks, dim=1).view(-1, 11), whole[60 : 60 + 96])


def test_only_the_ragged_tail_is_dropped(tmp_path, reader):
    paths, _, _ = write(tmp_path, 235)  # 23 windows, 4 batches of 5
    with TokenLoader(paths, 10, 5, vocab_size=VOCAB) as loader:
        loader.load_state_dict({"seed": 0, "epoch": 0, "samples": 23})
        loader.next()
        assert loader.state_dict() == {"seed": 0, "epoch": 1, "samples": 5}
    with TokenLoader(paths, 10, 5, vocab_size=VOCAB) as loader:
        for _ in range(5):
            loader.next()
        assert (loader.epoch, loader.samples) == (1, 5)


@pytest.mark.parametrize("windows", [20, 23])
def test_an_epoch_ends_when_less_than_a_batch_is_left(tmp_path, reader, windows):
    paths, _, _ = write(tmp_path, windows * 10 + 1)
    ended = []
    with TokenLoader(paths, 10, 5, vocab_size=VOCAB) as loader:
        for _ in range(9):
            loader.next()
            ended.append(loader.epoch_ended)
    assert ended == [False, False, False, True] * 2 + [False]


def test_memory_that_is_not_enough_is_no_fault_of_the_files(tmp_path, reader):
    """Nor is it bad input, nor a step's lack of memory, for which a smaller batch would help."""
    count = 2**30
    (tmp_path / "big.bin").write_bytes(ShardHeader(2, VOCAB, count, 0).pack())
    os.truncate(tmp_path / "big.bin", HEADER_BYTES + 2 * count)  # takes no room on the disk
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + count, before[1]))
    try:
        with pytest.raises(TrainingFault, match=r"No se pueden abrir los .*: no queda memoria para este .*; ulimit -v"):
            TokenLoader([tmp_path / "big.bin"], 10, 2, vocab_size=VOCAB)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_thread_that_is_refused_is_no_fault_of_the_files(tmp_path, monkeypatch):
    refusal = mock.Mock(side_effect=OSError(errno.EAGAIN, "Resource temporarily unavailable"))
    monkeypatch.setattr(extension.load(), "WindowReader", refusal)
    paths, *_ = write(tmp_path)
    with pytest.raises(TrainingFault, match=r"No se pueden abrir los .*: el sistema no da más hilos .*; ulimit -u"):
        TokenLoader(paths, 10, 2, vocab_size=VOCAB)


def test_too_little_text_names_the_way_out(tmp_path):
    paths, _, _ = write(tmp_path, 101)
    with pytest.raises(UserError, match=r"10 secuencias.*12.*baje --batch-size.*--grad-accum.*--seq-len") as found:
        TokenLoader(paths, 10, 2, vocab_size=VOCAB, grad_accum=3, world_size=2)
    assert found.value.same_everywhere
    for make in (TokenLoader, evaluation_batches):
        with pytest.raises(UserError, match=r"101 tokens.*use más texto.*--seq-len") as found:
            make(paths, 101, 1, vocab_size=VOCAB)
        assert found.value.same_everywhere
        with pytest.raises(UserError, match="ningún fichero"):
            make([], 10, 1, vocab_size=VOCAB)
    with TokenLoader(paths, 100, 1, vocab_size=VOCAB) as loader:
        assert loader.next().shape == (1, 101)


def test_position_of_other_data_is_refused(tmp_path):
    paths, _, _ = write(tmp_path, 101)
    with TokenLoader(paths, 10, 2, vocab_size=VOCAB) as loader, pytest.raises(UserError, match="muestra 11"):
        loader.load_state_dict({"seed": 0, "epoch": 0, "samples": 11})


@pytest.mark.parametrize("seq_len, batch_size", [(10, 3), (250, 1)])  # where it is copied alone, and with its line
def test_loader_names_a_token_outside_the_vocabulary(tmp_path, reader, seq_len, batch_size):
    data = np.arange(500, dtype="<u2")
    data[321] = 999
    good, _, _ = write(tmp_path, 77, 500)
    bad = forge(tmp_path / "bad.bin", data.tobytes(), 500)
    with TokenLoader([*good, bad], seq_len, batch_size, vocab_size=500) as loader:
        for _ in range(2):  # asked again, it says the same
            with pytest.raises(UserError, match=r"bad\.bin: el token 999 de la posición 321") as caught:
                for _ in range(loader.steps_per_epoch):
                    loader.next()
            assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"bad\.bin: el token 999 de la posición 321"):
        list(evaluation_batches([*good, bad], seq_len, batch_size, vocab_size=500))


@pytest.mark.parametrize("width, dtype", [(2, torch.uint16), (2, torch.int64), (4, torch.uint32), (4, torch.int64)])
def test_a_token_outside_the_vocabulary_is_found_wherever_it_stands(tmp_path, native, width, dtype):
    """Alone before the first whole line, in any lane of one, after the last; the smallest that is none."""
    data = np.zeros(100 * 101 + 1, dtype=f"<u{width}")
    data[::101] = 500  # the only one of window w is its w-th
    buffers = torch.zeros((1, 1, 101), dtype=dtype)
    path = forge(tmp_path / "bad.bin", data.tobytes(), 501, width)
    reader = open_reader(native, path, data.size, buffers, vocab_size=500, width=width)
    for window in range(101):
        reader.submit_windows(0, [window])
        assert reader.wait(0) == ("token", 0, 101 * window, 500)
    reader.close()


def test_a_reader_refuses_a_file_that_is_too_short_and_windows_that_are_not_there(tmp_path, native):
    [path], data, _ = write(tmp_path, 101)
    buffers = torch.zeros(1, 1, 11, dtype=torch.int64)
    with pytest.raises(OSError, match=r"train-00000\.bin"):
        open_reader(native, path, data.size + 1, buffers)
    with pytest.raises(ValueError, match="fewer tokens than one window"):
        open_reader(native, path, 10, buffers)
    reader = open_reader(native, path, data.size, buffers)
    for first, count in ((0, 11), (9, 2), (11, 1), (2**64 - 1, 2)):
        with pytest.raises(IndexError):
            reader.submit(0, 0, 0, first, count)
    with pytest.raises(IndexError):
        reader.submit_windows(0, [10])
    reader.submit(0, 0, 0, 9, 1)
    assert reader.wait(0) is None
    reader.close()


def test_more_than_four_billion_tokens(tmp_path, native):
    """Whose places, in tokens and in bytes, take more than 32 bits."""
    count = 2**32 + 11
    path = tmp_path / "big.bin"
    with open(path, "wb") as file:  # takes no room on the disk
        file.truncate(HEADER_BYTES + 2 * (count - 11))
        file.seek(HEADER_BYTES + 2 * (count - 11))
        file.write(np.arange(1, 12, dtype="<u2").tobytes())
    buffers = torch.zeros(1, 1, 9, dtype=torch.int64)
    reader = open_reader(native, path, count, buffers)
    assert reader.windows == 2**29 + 1
    reader.submit_windows(0, [2**29])
    assert reader.wait(0) is None and buffers[0, 0].tolist() == list(range(1, 10))
    reader.close()


def test_cancelling_waits_for_the_batch_that_is_being_filled(tmp_path, native):
    """Its memory may be freed afterwards."""
    [path], data, _ = write(tmp_path, 50_001)
    buffers = torch.full((1, 400_000, 11), -1)
    reader = open_reader(native, path, data.size, buffers)
    first, last = buffers[0, 0].numpy(), buffers[0, -1].numpy()
    reader.submit_windows(0, [0] * 400_000)
    while first[0] == -1:
        pass
    reader.cancel()
    assert last.tolist() == data[:11].tolist()
    reader.close()


def test_signals_are_for_other_threads_than_the_readers(tmp_path, native):
    """One that it took would not wake the main thread from a wait."""
    [path], data, _ = write(tmp_path)
    tasks = Path("/proc/self/task")
    before = set(tasks.iterdir())
    buffers = torch.zeros(1, 1, 11, dtype=torch.int64)
    reader = open_reader(native, path, data.size, buffers)
    [task] = set(tasks.iterdir()) - before

    def blocked(number):
        mask = re.search(r"^SigBlk:\s*(\w+)", (task / "status").read_text(), re.MULTILINE)[1]
        return int(mask, 16) >> (number - 1) & 1

    while blocked(signal.SIGBUS):  # as all are until a thread is made
        pass
    assert all(map(blocked, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)))
    reader.close()


@pytest.mark.parametrize("left", [HEADER_BYTES + 40_000, HEADER_BYTES + 99_998])
def test_file_that_shrinks_is_an_error_and_not_a_crash(tmp_path, reader, left):
    """Cut in whole pages (the read faults) and inside the last one (it would read zeros)."""
    paths, _, _ = write(tmp_path, 50_000)
    with TokenLoader(paths, 10, 2, vocab_size=VOCAB) as loader:
        loader.next()
        os.truncate(paths[0], left)
        with pytest.raises(UserError, match=r"train-00000\.bin se ha acortado.*vuelva a generarlo y reanude"):
            for _ in range(200_000):
                loader.next()


def test_what_a_cut_leaves_of_a_page_is_never_taken_for_tokens(tmp_path, reader):
    """It reads as zeros, without a fault; of twenty shards, looked at one after another, this is not the next."""
    writer = ShardWriter(tmp_path, "train", VOCAB, 20_000)
    writer.write(np.random.default_rng(0).integers(1, VOCAB, 400_000))
    paths = [tmp_path / shard["file"] for shard in writer.close()]
    with TokenLoader(paths, 63, 8, vocab_size=VOCAB) as loader:
        loader.next()
        os.truncate(paths[7], HEADER_BYTES + 38_000)
        with pytest.raises(UserError, match=r"train-00007\.bin se ha acortado"):
            for _ in range(loader.steps_per_epoch):
                assert (loader.next() > 0).all()


def test_what_stands_in_for_a_lost_page_is_never_taken_for_tokens(tmp_path, native):
    """Batches are filled by two threads: the second to come to a lost page finds zeros there, and no fault."""
    [path], data, _ = write(tmp_path, 50_000)
    buffers = torch.full((2, 1, 11), -1)
    reader = open_reader(native, path, data.size, buffers)
    os.truncate(path, HEADER_BYTES + 40_000)
    for slot in (0, 1):
        reader.submit_windows(slot, [4000])
    assert [reader.wait(slot) for slot in (0, 1)] == [("shrunk", 0, 40_000, 0)] * 2
    reader.close()


@pytest.mark.parametrize("put_there", [os.replace, lambda _, path: os.unlink(path)], ids=["another", "nothing"])
def test_what_takes_the_place_of_a_file_being_read_changes_nothing(tmp_path, reader, put_there):
    paths, data, _ = write(tmp_path, 50_000)
    with TokenLoader(paths, 10, 2, vocab_size=VOCAB) as loader, TokenLoader(paths, 10, 2, vocab_size=VOCAB) as other:
        wanted = [other.next().clone() for _ in range(300)]
        found = [loader.next().clone() for _ in range(100)]
        smaller, _, _ = write(tmp_path / "new", 300)
        put_there(smaller[0], paths[0])
        time.sleep(0.02)  # it looks at a file's size every 10 ms
        found += [loader.next().clone() for _ in range(200)]
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


# ---- Evaluation -----------------------------------------------------------------------------------------------------


def test_batches_of_an_evaluation_may_be_kept(tmp_path, reader):
    """More of them than there are buffers."""
    paths, data, _ = write(tmp_path, 1001)
    kept = torch.cat(list(evaluation_batches(paths, 10, 1, vocab_size=VOCAB)))
    assert kept[:, 0].tolist() == data[:-1:10].tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("limit", [None, 7, 1000])
def test_evaluation_counts_each_window_once(tmp_path, reader, world_size, limit):
    paths, data, _ = write(tmp_path, 238, tokens_per_shard=50)  # 23 windows
    ranks = [
        list(evaluation_batches(paths, 10, 4, vocab_size=VOCAB, rank=r, world_size=world_size, limit=limit))
        for r in range(world_size)
    ]
    count = min(limit or 23, 23)
    batches = -(-count // 4)
    assert [len(rank) for rank in ranks] == [len(range(r, batches, world_size)) for r in range(world_size)]
    rows = torch.cat([ranks[j % world_size][j // world_size] for j in range(batches)])
    expected = [data[w * 10 : w * 10 + 11] for w in (i * 23 // count for i in range(count))]
    assert rows.dtype == torch.int64
    assert np.array_equal(rows.numpy(), expected)


def test_evaluation_may_be_left_half_way(tmp_path, reader):
    paths, _, _ = write(tmp_path)
    batches = evaluation_batches(paths, 10, 2, vocab_size=VOCAB)
    next(batches)
    batches.close()


# ---- Processes ------------------------------------------------------------------------------------------------------


def run(code, *arguments, env=None, timeout=60):
    """Python in a process group of its own, all of it gone when the time is out."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=compilation.ROOT,
        env={**os.environ, **(env or {})},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        out, err = process.communicate()
        pytest.fail(f"time-out: {out}{err}")
    return process.returncode, out, err


HEAD = """
import os, sys
from aura.tokens import TokenLoader
loader = TokenLoader(sys.argv[1:], 10, 4, vocab_size=50000)
loader.next()
"""


def test_exit_without_close_is_clean(tmp_path, reader):
    paths, _, _ = write(tmp_path)
    assert run(HEAD, *paths) == (0, "", "")


def test_forked_child_neither_hangs_nor_reads(tmp_path, native):
    paths, _, _ = write(tmp_path)
    code = HEAD + """
child = os.fork()
if child == 0:
    try:
        loader.next()
    except RuntimeError as error:
        print(error, flush=True)
    loader.close()
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
loader.next()
print("parent", flush=True)
"""
    # Since 3.12 Python warns of a fork with threads, which is what is tried here.
    status, out, err = run(code, *paths, env={"PYTHONWARNINGS": "ignore::DeprecationWarning"})
    assert (status, err) == (0, "")
    assert "parent process" in out
    assert out.endswith("parent\n")


def test_closed_loader_says_so(tmp_path, native):
    paths, _, _ = write(tmp_path)
    loader = TokenLoader(paths, 10, 2, vocab_size=VOCAB)
    loader.close()
    loader.close()
    with pytest.raises(RuntimeError, match="closed"):
        loader.next()


def test_many_loaders_leave_no_threads(tmp_path, native):
    paths, _, _ = write(tmp_path)
    before = len(os.listdir("/proc/self/task"))
    for _ in range(50):
        TokenLoader(paths, 10, 2, vocab_size=VOCAB).next()
    assert len(os.listdir("/proc/self/task")) == before
