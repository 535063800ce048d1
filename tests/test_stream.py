"""Streams: every window once over the ranks, resumed bit for bit, and nobody waits for a rank that has less text."""

import gzip
import importlib.util
import io
import json
import re
import signal
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

from aura import corpus, preparation, stream, tokenizer
from aura.errors import UserError
from aura.session import Session
from tests.hub import REVISION, Hub
from tests.support import LIMIT, Process, corpus_text, free_port, run_ranks

T = 16
STEPS_OF_TRIO = 270


@pytest.fixture(autouse=True)
def limit():
    """Makes a stream that never comes a failure, and not a suite that hangs."""
    def expire(*_):
        raise TimeoutError(f"no end after {LIMIT} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(LIMIT)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A trained SentencePiece model, as a path."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    path.write_bytes(tokenizer.train([corpus_text(10)], 300, note=lambda _: None).model)
    return path


@pytest.fixture
def tokens_of(model):
    """tokens_of(documents): one list of token ids, an end token after each document."""
    found = tokenizer.load(model)
    return lambda documents: [token for text in documents for token in (*found.encode(text), found.eos_id)]


def texts(count, name="d", words=30):
    """`count` different documents of different lengths."""
    return [f"Documento {name}{i}: " + " ".join(f"palabra{(i * 7 + j) % 97}" for j in range(words + i * 13 % 40))
            for i in range(count)]


@pytest.fixture
def folder(tmp_path):
    """A folder with all kinds of files: 60 documents."""
    place = tmp_path / "textos"
    place.mkdir()
    lines = "\n".join(json.dumps({"text": text}) for text in texts(20, "a"))
    (place / "a.jsonl").write_text(lines)
    (place / "b.jsonl.gz").write_bytes(gzip.compress(lines.replace("Documento a", "Documento b").encode()))
    (place / "c.txt").write_text("\n".join(text + " " + "fin " * 50 for text in texts(15, "c")))
    (place / "d.txt.gz").write_bytes(gzip.compress(corpus_text(5).encode()))
    return place


def windows_of(tokens, seq_len=T):
    """Every full window of a list of tokens, as tuples."""
    return [tuple(tokens[at:at + seq_len + 1]) for at in range(0, len(tokens) - seq_len, seq_len)]


def loader(path, model, **options):
    """A StreamLoader on one process."""
    options = {"seq_len": T, "batch_size": 3, "dist": Session(), "shuffle_windows": 20, "seed": 5, **options}
    return stream.StreamLoader(corpus.open_corpus(str(path)), tokenizer.load(model), **options)


def rows(batch):
    return [tuple(row) for row in batch.tolist()]


def stored(state):
    """`state` as a checkpoint gives it back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_an_epoch_is_every_window_once_and_the_next_has_another_order(folder, model, tokens_of):
    expected = windows_of(tokens_of(corpus.open_corpus(str(folder)).documents()))
    with loader(folder, model, batch_size=1) as streaming:
        assert streaming.steps_per_epoch is None and not streaming.epoch_ended
        epochs = []
        for epoch in range(2):
            found = []
            for number in range(len(expected)):
                batch = streaming.next()
                assert batch.shape == (1, T + 1) and batch.dtype == torch.int64
                assert (streaming.epoch, streaming.samples) == (epoch, number + 1)
                found += rows(batch)
            epochs.append(found)
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(expected)
    assert epochs[0] != epochs[1] and epochs[0] != expected
    blocks = [set(found[:20]) for found in (*epochs, expected)]
    assert blocks[0] == blocks[1] == blocks[2], "the shuffling stays within blocks"


def test_a_place_beyond_what_a_document_holds_by_now_is_in_those_after_it(folder, model, tokens_of):
    """As of a checkpoint from before long records were several documents."""
    tokens = tokens_of(corpus.open_corpus(str(folder)).documents())
    with loader(folder, model, batch_size=1, shuffle_windows=20) as streaming:
        place = {"epoch": 0, "block": 1, "document": None, "token": 20 * T, "delivered": 0}
        streaming.load_state_dict({**streaming.state_dict(), "ranks": [place]})
        found = [row for _ in range(20) for row in rows(streaming.next())]
    assert len(tokens_of([next(corpus.open_corpus(str(folder)).documents())])) < 20 * T
    assert sorted(found) == sorted(windows_of(tokens[20 * T:40 * T + 1]))


@pytest.mark.parametrize("name", ["folder", "a.jsonl", "d.txt.gz", "muestra"])
def test_a_resumed_stream_is_the_uninterrupted_one_from_any_step(folder, model, monkeypatch, name):
    monkeypatch.setattr(corpus, "SAMPLE_BYTES", 10_000)
    monkeypatch.setattr(preparation, "BATCH_CHARACTERS", 500)
    path = {"folder": folder, "muestra": "muestra"}.get(name, folder / name)
    options = {"batch_size": 3, "grad_accum": 2, "shuffle_windows": 7}
    states, batches = [], []
    with loader(path, model, **options) as streaming:
        states.append(stored(streaming.state_dict()))
        while streaming.epoch < 2 and len(batches) < 600:
            batches.append(streaming.next())
            inside = stored(streaming.state_dict())
            batches.append(streaming.next())
            assert inside == states[-1], "a state is that of complete global batches"
            states.append(stored(streaming.state_dict()))
    chosen = [*range(8), *range(8, len(states) - 4, max(1, len(states) // 8))]
    with loader(path, model, **{**options, "seed": 0}) as resumed:
        for step in chosen:
            resumed.load_state_dict(states[step])
            assert resumed.state_dict() == states[step]
            for expected in batches[2 * step:2 * step + 8]:
                assert torch.equal(resumed.next(), expected)


def test_resuming_tokenises_no_more_than_a_block_again(folder, model, monkeypatch):
    monkeypatch.setattr(preparation, "BATCH_CHARACTERS", 500)
    with loader(folder, model) as streaming:
        while streaming.samples < 1500:
            streaming.next()
        state = streaming.state_dict()
    seen = []
    encode_batch = tokenizer.Tokenizer.encode_batch
    monkeypatch.setattr(tokenizer.Tokenizer, "encode_batch",
                        lambda self, batch, threads: seen.extend(batch) or encode_batch(self, batch, threads))
    with loader(folder, model) as resumed:
        seen.clear()
        resumed.load_state_dict(state)
        resumed.next()
        resumed.close()
        total = sum(map(len, corpus.open_corpus(str(folder)).documents()))
        assert 0 < sum(map(len, seen)) < total / 4


def test_another_block_size_begins_the_block_again(folder, model, capsys):
    with loader(folder, model) as streaming:
        for _ in range(9):
            streaming.next()
        state = stored(streaming.state_dict())
    with loader(folder, model, batch_size=1) as streaming:
        order = [rows(streaming.next())[0] for _ in range(40)]
    with loader(folder, model, batch_size=1, shuffle_windows=10) as resumed:
        resumed.load_state_dict(state)
        assert {rows(resumed.next())[0] for _ in range(20)} == set(order[20:])
    assert "hay que repetir 7 secuencias de 16" in capsys.readouterr().out


def test_what_is_left_of_an_epoch_may_be_less_than_a_window(folder, model):
    with loader(folder / "a.jsonl", model, batch_size=1, shuffle_windows=1) as streaming:
        state = streaming.state_dict()
        while streaming.next() is not None and streaming.epoch == 0:
            last, state = state, streaming.state_dict()
    with loader(folder / "a.jsonl", model, batch_size=1, seq_len=100) as resumed:
        resumed.load_state_dict(last)
        assert resumed.epoch == 0 and resumed.next().shape == (1, 101) and resumed.epoch == 1


GROUP = """
import json, sys, torch
from types import SimpleNamespace
from aura import cli, corpus, distributed, stream, tokenizer

def main():
    with distributed.session(SimpleNamespace(backend="gloo", dist_timeout=20.0, distributed=True)) as dist:
        options = dict(seq_len=16, batch_size=2, dist=dist, shuffle_windows=9, seed=3)
        path, model, out = sys.argv[1:4]
        tokens = tokenizer.load(model)
        {body}
    return 0

cli.run(main)
"""


def in_group(body):
    """A program that runs `body` in a group of processes."""
    return GROUP.replace("{body}", body.strip().replace("\n", "\n        "))


def group(tmp_path, count, body, *arguments, **environment):
    """Run `body` on `count` gloo ranks; [(exit code, output)]."""
    path = tmp_path / "group.py"
    path.write_text(in_group(body))
    return run_ranks([path, *arguments], [tmp_path] * count, 60, **environment)


STEPS = """
with stream.StreamLoader(corpus.open_corpus(path), tokens, **options) as loader:
    seen, epochs = [], []
    for step in range(int(sys.argv[4])):
        if step == 11:
            state = loader.state_dict()
        seen.append(loader.next())
        epochs.append(loader.epoch)
        dist.barrier()
    loader.load_state_dict(state)
    assert all(torch.equal(loader.next(), batch) for batch in seen[11:]), "resumed"
    dist.barrier()
    dist.broken = True
    alone = loader.state_dict()["ranks"]
    dist.broken = False
    known = [now == before for now, before in zip(alone, state["ranks"])]
    assert known == [rank != dist.rank for rank in range(dist.world_size)], "alone"
torch.save([torch.cat(seen).tolist(), epochs], f"{out}{dist.rank}")
if dist.main:
    torch.save(state, out)
"""


@pytest.fixture(scope="module")
def trio(tmp_path_factory, model):
    """What three ranks made of 90 documents, every third of which is shorter: (documents, file, results, steps)."""
    place = tmp_path_factory.mktemp("trio")
    documents = [text if i % 3 < 2 else text[:15] for i, text in enumerate(texts(90, words=2))]
    path = place / "d.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in documents))
    for code, output in group(place, 3, STEPS, path, model, place / "out", STEPS_OF_TRIO):
        assert code == 0, output
    return documents, path, place / "out"


def test_three_ranks_share_every_document_and_none_waits_for_another(trio, tokens_of):
    documents, _, out = trio
    ends, orders = [], set()
    for rank in range(3):
        expected = windows_of(tokens_of(documents[rank::3]))
        seen, epochs = torch.load(f"{out}{rank}")
        assert sorted(map(tuple, seen[:len(expected)])) == sorted(expected)
        ends.append(epochs[-1])
        orders.add(tuple(expected.index(tuple(window)) for window in seen[:9]))
    assert ends[2] > ends[0] >= 1 and len(orders) == 3


def test_on_fewer_ranks_no_document_is_left_out(trio, model, tokens_of, capsys):
    documents, path, out = trio
    state = torch.load(out)
    for order in (1, -1):  # whichever rank is behind
        with loader(path, model, batch_size=1) as resumed:
            resumed.load_state_dict({**state, "ranks": state["ranks"][::order]})
            warning = capsys.readouterr().out
            first = int(warning.split("desde el documento ")[1].split()[0])
            rest = windows_of(tokens_of(documents[first:]))
            assert sorted(rows(resumed.next())[0] for _ in rest) == sorted(rest)
    assert 0 < first < 60 and "el número de procesos era 3 y ahora es 1:" in warning
    further = {**state["ranks"][0], "epoch": 1, "document": None, "token": 0}  # the first document, of another epoch
    with loader(path, model, batch_size=1) as resumed:
        resumed.load_state_dict({**state, "ranks": [further, *state["ranks"][1:]]})
    warning = capsys.readouterr().out
    assert int(warning.split("desde el documento ")[1].split()[0]) > 0 and "de épocas posteriores" in warning
    for rank in range(3):
        delivered = {tuple(row) for row in torch.load(f"{out}{rank}")[0][:22]}
        assert delivered >= set(windows_of(tokens_of(documents[:first][rank::3])))


def test_too_little_text_for_one_rank_ends_all_of_them(tmp_path, model):
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts(1)))
    results = group(tmp_path, 2, STEPS, path, model, tmp_path / "out", 5)
    assert [code for code, _ in results] == [2, 2]
    assert "rango 1: el corpus 'd' no da a cada uno de los 2 procesos una secuencia de 16 + 1" in results[0][1]
    assert not any("Traceback" in output for _, output in results)
    path.write_text('{"text": "hola"}')
    told = r"'d' no da una secuencia de 16 \+ 1 tokens: use más texto o un --seq-len menor"
    with pytest.raises(UserError, match=told):
        loader(path, model)


def test_what_breaks_while_training_comes_out_of_next(tmp_path, model, monkeypatch):
    monkeypatch.setattr(preparation, "BATCH_CHARACTERS", 500)
    place = tmp_path / "textos"
    place.mkdir()
    (place / "a.txt").write_text(corpus_text(5))
    (place / "b.txt.gz").write_bytes(gzip.compress(corpus_text(20).encode())[:-100])
    with loader(place, model) as streaming:
        for _ in range(2):
            with pytest.raises(UserError, match=r"b\.txt\.gz.*gzip"):
                while streaming.epoch == 0:
                    streaming.next()


def test_an_error_nobody_foresaw_comes_out_of_next(folder, model, monkeypatch):
    def broken(self, batch, threads):
        raise MemoryError("no queda sitio")

    monkeypatch.setattr(tokenizer.Tokenizer, "encode_batch", broken)
    with pytest.raises(UserError, match="no se puede seguir leyendo el corpus 'textos': MemoryError: no queda sitio"):
        loader(folder, model)


@pytest.mark.parametrize("doing", ["waiting", "tokenising"])
def test_close_ends_the_thread_at_once(folder, model, monkeypatch, doing):
    before = threading.active_count()
    streaming = loader(folder, model, shuffle_windows=2 if doing == "waiting" else 10_000)
    encode_batch, batches = tokenizer.Tokenizer.encode_batch, []

    def slow(self, batch, threads):
        batches.append(time.sleep(0.2))
        return encode_batch(self, batch, threads)

    if doing == "tokenising":
        monkeypatch.setattr(preparation, "BATCH_CHARACTERS", 500)
        monkeypatch.setattr(tokenizer.Tokenizer, "encode_batch", slow)
        streaming.load_state_dict(streaming.state_dict())
        while not batches:
            time.sleep(0.01)
    assert threading.active_count() == before + 1
    begun = len(batches)
    streaming.close()
    assert threading.active_count() == before and len(batches) - begun < 9


def test_validation_documents_are_kept_out_of_training(folder, model, tokens_of, capsys):
    documents = list(corpus.open_corpus(str(folder)).documents())
    held = [text for text in documents if preparation.document_share(text) < 0.3]
    kept = [text for text in documents if preparation.document_share(text) >= 0.3]
    assert held and kept
    with loader(folder, model, batch_size=1, val_fraction=0.3) as streaming:
        expected = windows_of(tokens_of(kept))
        assert sorted(rows(streaming.next())[0] for _ in expected) == sorted(expected)

    def found(**options):
        return stream.held_out(corpus.open_corpus(str(folder)), tokenizer.load(model), T, dist=Session(),
                               **{"val_fraction": 0.3, "limit": 10**6, **options})

    windows = windows_of(tokens_of(held))
    assert rows(found()) == windows and found().dtype == torch.int64
    assert rows(found(limit=4)) == windows[:4]
    assert found(val_fraction=0.0) is None and "no hay una secuencia de validación" in capsys.readouterr().out
    few = [text for text in documents[:9] if preparation.document_share(text) < 0.3]
    assert rows(found(documents=9)) == windows_of(tokens_of(few))


def test_more_validation_than_before_is_told(folder, model, capsys):
    with loader(folder, model, val_fraction=0.1) as streaming:
        state = stored(streaming.state_dict())
    for fraction, told in ((0.1, ""), (0.05, ""), (0.3, "era el 10 % de los documentos y ahora es el 30 %")):
        with loader(folder, model, val_fraction=fraction) as streaming:
            streaming.load_state_dict(state)
        said = capsys.readouterr().out
        assert told in said and bool(told) == bool(said)
    del state["val_fraction"]
    with loader(folder, model, val_fraction=0.3) as streaming:
        streaming.load_state_dict(state)  # of before it was kept
    assert not capsys.readouterr().out


def test_a_text_that_another_version_cut_otherwise_is_told(folder, model, capsys):
    with loader(folder, model) as streaming:
        state = stored(streaming.state_dict())
        for cut, told in ((state.pop("cut"), False), ([1, 2], True), (None, True)):
            streaming.load_state_dict({**state, "cut": cut} if cut else state)
            assert ("puede repetirse una parte de lo ya leído" in capsys.readouterr().out) == told


def test_a_kept_tokenizer_is_that_of_this_text_and_vocabulary(tmp_path, monkeypatch):
    def opened(text, vocab_size):
        path = tmp_path / text / "libro.txt"
        return stream.open_stream(corpus.open_corpus(str(path)), tmp_path / "Data", Session(), vocab_size=vocab_size)

    for name, size in (("a", 10), ("b", 12)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "libro.txt").write_text(corpus_text(size))
    asked = [("a", 330), ("a", 400), ("b", 330)]
    made = [opened(*which) for which in asked]
    assert [data.vocab_size for data in made] == [330, 400, 330]
    assert made[0].tokenizer.sha256 != made[2].tokenizer.sha256
    monkeypatch.setattr(tokenizer, "train", None)
    assert [opened(*which).sha256 for which in asked] == [data.sha256 for data in made], "a resumed run finds its own"


def test_the_tokenizer_learns_from_nothing_that_is_held_out(folder, tmp_path, monkeypatch):
    seen, real = [], tokenizer.train
    monkeypatch.setattr(tokenizer, "train", lambda texts, *words: real([seen.append(t) or t for t in texts], *words))
    opened = corpus.open_corpus(str(folder))
    stream.open_stream(opened, tmp_path / "Data", Session(), vocab_size=330, val_fraction=0.3)
    training = [text for text in opened.documents() if preparation.document_share(text) >= 0.3]
    assert seen == training and 30 < len(training) < 60


def test_a_kept_tokenizer_that_is_damaged_names_the_way_out(folder, tmp_path):
    def opened():
        return stream.open_stream(corpus.open_corpus(str(folder)), tmp_path / "Data", Session(), vocab_size=330)

    whole = opened().sha256
    [kept] = (tmp_path / "Data").iterdir()
    kept.write_bytes(kept.read_bytes()[:1000])
    with pytest.raises(UserError, match=rf"^el tokenizador guardado '.*{kept.name}': no es .*; bórrelo, y se"):
        opened()
    kept.unlink()
    assert opened().sha256 == whole


def test_ranks_that_would_read_different_texts_are_refused(folder, tmp_path):
    class Two(Session):
        def gather_objects(self, value):
            return [value, "f" * 64]

    with pytest.raises(UserError, match="no es el mismo en el rango 0 y en el 1: .* use --no-stream") as found:
        stream.open_stream(corpus.open_corpus(str(folder)), tmp_path / "Data", Two(), vocab_size=330)
    assert found.value.same_everywhere


def test_a_tokenizer_that_cannot_be_kept_is_one_line(folder, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stream, "write_bytes", full)
    with pytest.raises(UserError, match="no se puede guardar ahí el tokenizador .no queda espacio.*--data-dir"):
        stream.open_stream(corpus.open_corpus(str(folder)), tmp_path / "Data", Session(), vocab_size=330)


hub_extra = pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="datasets is not installed")


def publish(place, names, count):
    """A data set of `count` documents in files `names` of the folder `place`, laid out as on the Hub; the documents."""
    documents = texts(count, place.name, words=2)
    (place / names[0]).parent.mkdir(parents=True)
    (place / "README.md").write_text("---\nconfigs:\n" + "".join(
        f"- config_name: {name}\n  data_files:\n  - split: train\n    path: {Path(names[0]).parent}/*\n"
        for name in ("en", "es")) + "---\n")
    for number, name in enumerate(names):
        records = [{"text": text, "url": "https://e.es"} for text in documents[number::len(names)]]
        if name.endswith(".gz"):
            lines = "".join(json.dumps(record) + "\n" for record in records)
            (place / name).write_bytes(gzip.compress(lines.encode()))
        else:
            parquet = pytest.importorskip("pyarrow.parquet")
            table = pytest.importorskip("pyarrow").Table.from_pylist(records)
            parquet.write_table(table, place / name, row_group_size=4)
    return documents


EACH_NAME = """
for number, path in enumerate(path.split(",")):
    out = f"{sys.argv[3]}{number}-"
""" + textwrap.indent(STEPS, "    ")


@hub_extra
def test_the_hub_is_shared_out_and_resumed(tmp_path, model, tokens_of):
    files = [f"en/c4-train.0000{number}-of-00002.json.gz" for number in range(2)], ["datos/train-00000.parquet"]
    by_file = publish(tmp_path / "hub" / "allenai" / "c4", files[0], 18)
    by_document = publish(tmp_path / "hub" / "yo" / "textos", files[1], 18)
    expected = {f"{number}-{rank}": windows_of(tokens_of(documents[rank::2]))
                for number, documents in enumerate((by_file, by_document)) for rank in range(2)}
    steps = max(map(len, expected.values())) // 2 + 2
    with Hub(tmp_path / "hub") as hub:
        for code, output in group(tmp_path, 2, EACH_NAME, "c4,yo/textos:es", model, tmp_path / "out", steps,
                                  **hub.environment(tmp_path / "cache")):
            assert code == 0, output
        assert {path for _, path in hub.requests if path.endswith((".gz", ".parquet"))} == {
            f"/datasets/{name}/resolve/{REVISION}/{file}"
            for name, part in zip(("allenai/c4", "yo/textos"), files, strict=True) for file in part}
    for which, windows in expected.items():
        seen, epochs = torch.load(tmp_path / f"out{which}")
        assert epochs[-1] == 1 and sorted(map(tuple, seen[:len(windows)])) == sorted(windows)


FAILING = """
import time
import datasets
from aura.errors import UserError
pause = time.sleep
time.sleep = lambda seconds: pause(min(seconds, 0.05))  # the Hub's client waits up to 8 s before it asks again
datasets.config.STREAMING_READ_MAX_RETRIES = datasets.config.STREAMING_OPEN_MAX_RETRIES = 1
for name in path.split(","):
    try:
        with stream.StreamLoader(corpus.open_corpus(name), tokens, **options) as loader:
            print(f"{name} se lee", flush=True)
            while loader.epoch < 2:
                loader.next()
    except UserError as problem:
        print(problem, flush=True)
"""


@hub_extra
def test_a_connection_that_is_cut_is_told_in_spanish(tmp_path, model):
    publish(tmp_path / "hub" / "yo" / "textos", ["datos/train-0.jsonl.gz", "datos/train-1.jsonl.gz"], 6)
    failing = FAILING.replace("MAX_RETRIES = 1", "MAX_RETRIES = 2\ndatasets.config.STREAMING_READ_RETRY_INTERVAL = 0")
    with Hub(tmp_path / "hub") as hub:
        hub.cut = "datos/train-1.*"
        (code, output), = group(tmp_path, 1, failing, "yo/textos:en", model, "-",
                                **hub.environment(tmp_path / "cache"))
    assert code == 0 and "no se puede leer 'yo/textos' de Hugging Face (no se pudo conectar con el Hub)" in output
    assert "ha cortado la conexión; nuevo intento en 0 s (2 de 2)." in output and "Retrying" not in output


@hub_extra
def test_what_the_hub_refuses_is_one_line(tmp_path, model):
    for name in ("textos", "columna"):
        publish(tmp_path / "hub" / "yo" / name, ["datos/train-0.jsonl.gz", "datos/train-1.jsonl.gz"], 6)
    for path in (tmp_path / "hub/yo/columna/datos").iterdir():
        path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()).replace(b'"text"', b'"texto"')))
    asked = "yo/columna:en,yo/textos,yo/nada,yo/textos:en"
    (tmp_path / "group.py").write_text(in_group(FAILING))
    with (Hub(tmp_path / "hub") as hub,
          Process([tmp_path / "group.py", asked, model, "-"], tmp_path, RANK=0, WORLD_SIZE=1, MASTER_ADDR="127.0.0.1",
                  MASTER_PORT=free_port(), **hub.environment(tmp_path / "cache")) as one):
        one.wait_for("yo/textos:en se lee")
        hub.gone = "datos/train-1.*"
        code, output = one.finish(60)
    assert code == 0 and "no tiene la columna «text»; sus columnas son texto, url:" in output
    for name, reason in (("yo/textos", "'en', 'es'"), ("yo/nada", "el Hub responde 404 a .*: no existe"),
                         ("yo/textos", "datos/train-1")):
        assert re.search(rf"no se puede leer '{name}' de Hugging Face \(.*{reason}.*compruebe el nombre", output)
