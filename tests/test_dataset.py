"""Prepared folders: whole or not there, found again, the same split every time."""

import errno
import gzip
import json
import os
import re
import shutil
import signal
import unicodedata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from aura import corpus, dataset, files, preparation, tokenizer
from aura.errors import UserError
from aura.shards import ShardWriter
from tests.support import ROOT, Process, corpus_text, ranks, run


def prepare(path, data_dir, **options):
    options = {"vocab_size": 400, "note": lambda _: None, **options}
    return preparation.prepare(corpus.open_corpus(str(path)), data_dir, **options)


def read_tokens(found, split):
    return np.concatenate([np.fromfile(path, dtype=np.uint16, offset=64) for path in found.shards(split)])


def test_tokens_are_the_text(book, tmp_path):
    found = prepare(book, tmp_path / "Data")
    tokenizer = found.load_tokenizer()
    pieces, counts = {}, found.meta["splits"]
    for split in ("train", "val"):
        ids = read_tokens(found, split).tolist()
        assert len(ids) == found.tokens(split) > 0 and ids[-1] == tokenizer.eos_id
        starts = [0, *(i + 1 for i, token in enumerate(ids) if token == tokenizer.eos_id)]
        pieces[split] = {tokenizer.decode(ids[a:b]) for a, b in zip(starts, starts[1:], strict=False)}
        assert counts[split]["documents"] == len(pieces[split])
        assert counts[split]["bytes"] == sum(len(text.encode()) for text in pieces[split])
    assert pieces["train"] | pieces["val"] == set(corpus.open_corpus(str(book)).documents())
    assert not pieces["train"] & pieces["val"]


def test_the_same_source_gives_the_same_bytes(book, tmp_path):
    said = []
    assert prepare(book, tmp_path / "a", note=said.append).sha256 == prepare(book, tmp_path / "b").sha256
    assert "Datos preparados" in said[-1] and "Aviso" not in "".join(said)


def test_files_that_are_left_out_or_that_others_would_keep_for_validation_are_told(book, tmp_path):
    said, folder = [], tmp_path / "textos"
    (folder / "sub").mkdir(parents=True)
    for name in ("uno.txt", "sub/val.txt", "valor.txt"):
        (folder / name).write_text(book.read_text(encoding="utf-8"), encoding="utf-8")
    for name in ("a.docx", "b.docx", "sub/c.pdf", "sub/d.pdf", "sub/e.pdf", ".oculto"):
        (folder / name).touch()
    prepare(folder, tmp_path / "Data", note=said.append)
    told = [line for line in said if line.startswith("Aviso")]
    assert len(told) == 2 and "no se usa a.docx, b.docx, c.pdf, d.pdf y 1 más: se lee lo que acaba en .txt, " in told[0]
    assert "a.docx' es " in told[0] and "conviértalo" in told[0]
    assert "también se entrena con sub/val.txt: " in told[1]
    (folder / "sub" / "val.txt").rename(folder / "sub" / "valor.txt")
    (folder / "sub").rename(folder / unicodedata.normalize("NFD", "Validación"))
    prepare(folder, tmp_path / "Data 2", note=said.append)
    assert re.search("también se entrena con Validación/valor.txt: ", unicodedata.normalize("NFC", "".join(said)))
    (folder / "uno.txt").unlink()
    (folder / "valor.txt").unlink()  # then all that there is is called so
    prepare(folder, tmp_path / "Data", note=said.append)
    assert sum("también se entrena" in line for line in said) == 2


def test_a_prepared_folder_is_used_again_until_something_changes(book, tmp_path):
    data_dir = tmp_path / "Data"
    first = prepare(book, data_dir)
    assert prepare(book, data_dir).meta["prepared_at"] == first.meta["prepared_at"]
    said = []
    other = prepare(book, data_dir, vocab_size=380, note=said.append)
    assert other.vocab_size == 380
    told = f"Aviso: estos datos reemplazan a los de {other.directory}, que tienen otro tokenizador, de 400 piezas: lo "
    assert any(line.startswith(told) for line in said)
    model = tmp_path / "otro.model"
    model.write_bytes(other.load_tokenizer().model)
    book.write_text(corpus_text(70), encoding="utf-8")
    again = prepare(book, data_dir, vocab_size=380)
    assert again.meta["source"]["bytes"] == [book.stat().st_size]
    mine = prepare(book, data_dir, tokenizer=tokenizer.load(model))
    assert mine.load_tokenizer().model == model.read_bytes()
    fraction = {"tokenizer": tokenizer.load(model), "val_fraction": 0.5}
    said.clear()
    halved = prepare(book, data_dir, **fraction, note=said.append)
    assert not any("reemplazan" in line for line in said)
    assert halved.tokens("val") > mine.tokens("val") and halved.sha256 != mine.sha256
    assert prepare(book, data_dir, **fraction, max_tokens=5000).tokens("train") <= 5000


def test_data_that_a_training_reads_are_not_replaced(book, tmp_path):
    first = prepare(book, tmp_path / "Data")
    first.hold()
    first.hold()  # as each process does
    os.close(files.lock(first.directory, shared=True))  # which need not wait for each other
    assert prepare(book, tmp_path / "Data").sha256 == first.sha256
    with pytest.raises(UserError, match="está entrenando con los datos de '.*/Data/libro', que se .* otra --data-dir$"):
        prepare(book, tmp_path / "Data", vocab_size=380)
    assert dataset.read(first.directory).sha256 == first.sha256
    shutil.rmtree(first.directory)
    with pytest.raises(UserError, match="ya no están los datos"):
        first.hold()


def test_data_that_a_training_began_to_read_meanwhile_are_not_replaced(book, tmp_path, monkeypatch):
    first, real = prepare(book, tmp_path / "Data"), preparation._encode

    def encode(*words):
        first.hold()
        return real(*words)

    monkeypatch.setattr(preparation, "_encode", encode)
    with pytest.raises(UserError, match="está entrenando con los datos de"):
        prepare(book, tmp_path / "Data", vocab_size=380)
    assert dataset.read(first.directory).sha256 == first.sha256


def test_data_whose_pieces_are_not_accepted_replace_nothing(book, tmp_path):
    first = prepare(book, tmp_path / "Data")

    def refuse(tokenizer):
        raise UserError(f"{tokenizer.vocab_size} piezas")

    with pytest.raises(UserError, match="^380 piezas$"):
        prepare(book, tmp_path / "Data", vocab_size=380, accept=refuse)
    assert dataset.read(first.directory).sha256 == first.sha256


def test_max_tokens_is_exact(book, tmp_path):
    found = prepare(book, tmp_path / "Data", max_tokens=5001)
    files = [path for split in ("train", "val") for path in found.shards(split)]
    assert sum(path.stat().st_size - 64 for path in files) == 2 * 5001
    assert found.tokens("train") + found.tokens("val") == 5001
    ends = sum(np.sum(np.fromfile(path, np.uint16, offset=64) == found.load_tokenizer().eos_id) for path in files)
    assert sum(split["documents"] for split in found.meta["splits"].values()) - ends in (0, 1)  # none of the others


@pytest.mark.parametrize("most, total", [(None, 4000), (500, 1000), (100_000, 4000)])
def test_how_much_of_the_text_is_left_to_prepare_is_told_by_what_will_be_read(most, total):
    source = SimpleNamespace(total_bytes=4000, source={"kind": "ficheros"}, progress=200)
    progress = preparation._Progress(source, most, print)
    progress.advance(100)
    assert progress.total == progress.bar.total == total
    progress.bar.close()


def test_text_that_ends_before_any_of_it_is_for_training_names_the_way_out(tmp_path):
    first = next(text for text in map(str, range(100)) if preparation.document_share(text) < 0.5)
    source = tmp_path / "libro.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in (first, "de otros", "y más")))
    with pytest.raises(UserError, match="los 2 tokens leídos son de validación; indique un --dataset-max-tokens mayor"):
        prepare(source, tmp_path / "Data", max_tokens=2, val_fraction=0.5)
    assert not list((tmp_path / "Data").iterdir())


def test_latest_is_the_one_prepared_last(book, tmp_path, monkeypatch):
    other = tmp_path / "otro.txt"
    other.write_text(corpus_text(30), encoding="utf-8")
    data_dir = tmp_path / "Data"
    assert dataset.latest(data_dir) is None
    prepare(book, data_dir)
    prepare(other, data_dir)
    assert dataset.latest(data_dir).meta["name"] == "otro"
    said = []
    prepare(book, data_dir, note=said.append)
    assert dataset.latest(data_dir).meta["name"] == "otro", "used, and not asked to be prepared"
    prepare(book, data_dir, latest=True)
    assert dataset.latest(data_dir).meta["name"] == "libro"
    assert len(said) == 1 and "ya preparados" in said[0]
    prepare(other, data_dir, latest=True, note=said.append)
    assert dataset.latest(data_dir).meta["name"] == "otro" and len(said) == 2

    def refused(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(dataset, "write_json", refused)
    prepare(book, data_dir, latest=True, note=said.append)
    assert dataset.latest(data_dir).meta["name"] == "otro" and "sin --dataset-name se entrenaría con los de 'otro'" in \
        said[-1]


def test_data_that_are_there_already_are_used_whatever_became_of_others(book, tmp_path):
    other = tmp_path / "otro.txt"
    other.write_text(corpus_text(30), encoding="utf-8")
    prepare(book, tmp_path / "Data")
    prepare(other, tmp_path / "Data")
    (tmp_path / "Data" / "otro" / "dataset.json").write_text("{")
    said = []
    found = prepare(book, tmp_path / "Data", latest=True, note=said.append)
    assert found.meta["name"] == "libro" and "ya preparados" in said[0]
    assert len(said) == 2 and "otro" in said[1] and "está dañado" in said[1]


def test_latest_does_not_depend_on_the_clock(book, tmp_path, monkeypatch):
    """That was a day ahead for a while."""
    now = dataset.time.time()
    other = tmp_path / "otro.txt"
    shutil.copy(book, other)
    for path, clock in ((book, now + 86_400), (other, now), (book, now + 1)):
        monkeypatch.setattr(dataset.time, "time", lambda clock=clock: clock)
        prepare(path, tmp_path / "Data", latest=True)
        assert dataset.latest(tmp_path / "Data").meta["name"] == path.stem


def test_one_document_is_all_training(tmp_path):
    path = tmp_path / "uno.txt"
    path.write_text("Una sola frase. " * 100, encoding="utf-8")
    said = []
    found = prepare(path, tmp_path / "Data", vocab_size=300, note=said.append)
    assert found.tokens("val") == 0 and found.tokens("train") > 0
    assert "sin documentos de validación" in said[-1] and "Datos preparados" in said[-2], "nothing was damaged"
    assert said[-1].endswith("un .txt se divide en ellos por sus líneas en blanco.")
    prepare(path, tmp_path / "Data", vocab_size=300, val_fraction=0, note=said.append)
    assert said[-1].endswith("no habrá pérdida de validación."), "as was asked for"


@pytest.mark.parametrize("fraction", [None, 1e-9, 1 - 1e-9])
def test_few_documents_still_leave_one_for_validation_and_one_for_training(tmp_path, fraction):
    path = tmp_path / "dos.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"documento {i} " * 40}) for i in range(2)))
    found = prepare(path, tmp_path / "Data", vocab_size=300, val_fraction=fraction)
    assert found.meta["splits"]["train"]["documents"] == found.meta["splits"]["val"]["documents"] == 1


def test_most_of_the_text_is_never_held_out(tmp_path):
    """Verses without blank lines are cut after 16,000 characters: the first part was held out, the tail learnt from."""
    path, measured = tmp_path / "versos.txt", set()
    for number in range(9):  # about half of these have the smaller share in the long part
        path.write_text("".join(f"verso {number} {line % 97} de la mar en calma\n" for line in range(650)))
        threshold = preparation.validation_threshold(opened := corpus.open_corpus(str(path)), None)
        assert len([*opened.documents()]) == 2
        left = sum(map(len, preparation.training_documents(opened, threshold)))
        assert left > 16_000
        measured.add(threshold > 0)
    assert measured == {True, False}
    assert preparation.validation_threshold(opened, 0.95) > 0  # asked for


@pytest.mark.parametrize("end", ["\n", " "])
def test_a_short_text_without_blank_lines_keeps_most_for_training(tmp_path, end):
    """Of 200 KB of verses, or of one line, up to half was held out: it was three documents."""
    path = tmp_path / "poema.txt"
    for number in range(9):
        path.write_text("".join(f"verso {number} {line % 97} de la mar en calma{end}" for line in range(6250)))
        threshold = preparation.validation_threshold(opened := corpus.open_corpus(str(path)), None)
        left = sum(map(len, preparation.training_documents(opened, threshold))) / len(path.read_text())
        assert 0.75 < left < 1


def test_beside_a_document_that_is_most_of_the_text_others_are_held_out(tmp_path):
    path, held = tmp_path / "notas.jsonl", 0
    notes = [json.dumps({"text": f"nota {number}: el mar está en calma"}) for number in range(400)]
    for number in range(60):  # of a twentieth of them the long one has a share that is held out
        path.write_text("\n".join([json.dumps({"text": f"novela {number} " + 10_000 * "mar "}), *notes]))
        opened = corpus.open_corpus(str(path))
        threshold = preparation.validation_threshold(opened, None)
        sizes = [len(text) for text in opened.documents() if preparation.document_share(text) < threshold]
        assert sum(sizes) < 20_000
        held += bool(sizes)
    assert held == 60


@pytest.mark.parametrize("size, fraction, share", [(None, None, 0.002), (10**6, 0, 0), (10**8, None, 0.05),
                                                   (10**9, None, 0.005), (10**11, None, 0.001), (10**8, 0.3, 0.3)])
def test_how_much_is_kept_for_validation_where_not_every_document_is_looked_at(size, fraction, share):
    assert preparation.validation_threshold(SimpleNamespace(total_bytes=size), fraction) == pytest.approx(share)


def test_where_a_document_falls_never_changes():
    """Otherwise what one preparation keeps for validation, another would train on."""
    assert preparation.document_share("adiós") == pytest.approx(0.5392837754307496, abs=1e-15)
    few = SimpleNamespace(total_bytes=9, documents=lambda: iter(["a", "b", "c", "c", "hola"]))
    for fraction, wanted in ((None, "c"), (0.4, "ac"), (0.999, "abc")):
        threshold = preparation.validation_threshold(few, fraction)
        held = sorted(text for text in set(few.documents()) if preparation.document_share(text) < threshold)
        assert held == [*wanted]
        assert {*preparation.training_documents(few, threshold)} == {*few.documents()} - {*wanted}


@pytest.mark.parametrize("content", ["", " \n\n \n", "\0" * 5000, "\0\0\n" * 9])
def test_an_empty_corpus_leaves_nothing(tmp_path, content):
    path = tmp_path / "vacío.txt"
    path.write_text(content)
    with pytest.raises(UserError, match="corpus 'vacío' está vacío o solo tiene bytes nulos.*indique otro$"):
        prepare(path, tmp_path / "Data")
    assert list((tmp_path / "Data").iterdir()) == []


def test_a_broken_json_of_the_folder_is_named(book, tmp_path):
    found = prepare(book, tmp_path / "Data")
    path, shards = found.directory / "dataset.json", {"shards": [{"file": "a.bin"}], "tokens": 9}
    broken = [{**found.meta, "splits": value} for value in ([], {"train": {}}, {"train": shards, "val": shards})]
    broken += [{**found.meta, key: 7} for key in ("name", "sha256", "source", "options", "tokenizer", "splits")]
    broken += [{name: value for name, value in found.meta.items() if name != key} for key in
               ("name", "prepared_at", "sha256", "source", "options", "tokenizer", "splits", "format")]
    for key in ("file", "tokens", "crc32", "sha256", "bytes"):
        splits = {split: {"shards": [{**shard, key: None} for shard in value["shards"]], "tokens": 9}
                  for split, value in found.meta["splits"].items()}
        broken.append({**found.meta, "splits": splits})
    # Rank 0 sends these files to the other machines, which write them under these names.
    for name in ("../../escape.model", "/tmp/escape.model", "sub/a.model", ".bashrc", "a\0b", "\ud800", "a\x1b[2J", ""):
        broken.append({**found.meta, "tokenizer": {**found.meta["tokenizer"], "file": name}})
    broken += [{**found.meta, "prepared_at": 10**400}, {**found.meta, "options": {**found.meta["options"],
                                                                                  "vocab_size": 300.5}}]
    for text in ("{", "[]", "[" * 200_000, *map(json.dumps, broken)):
        path.write_text(text)
        with pytest.raises(UserError, match=r"dataset\.json.*está dañado.*--prepare"):
            dataset.read(found.directory)


def test_a_flipped_byte_is_found(book, tmp_path):
    found = prepare(book, tmp_path / "Data")
    path = found.shards("train")[0]
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"{path.name}.*--prepare y su --dataset-name$"):
        found.verify()


def test_another_tokenizer_in_the_folder_is_found(book, tmp_path):
    found = prepare(book, tmp_path / "Data")
    other = prepare(book, tmp_path / "other", vocab_size=350)
    (found.directory / "tokenizer.model").write_bytes((other.directory / "tokenizer.model").read_bytes())
    with pytest.raises(UserError, match=r"tokenizer\.model"):
        found.verify()


def test_a_damaged_tokenizer_is_named(book, tmp_path):
    found = prepare(book, tmp_path / "Data")
    path = found.directory / "tokenizer.model"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match=r"tokenizer\.model.*dañado.*prepare los datos de nuevo"):
        found.verify()


def test_a_whole_shard_of_other_data_is_found(book, tmp_path):
    """Of the same tokenizer, as a copy that was broken off leaves some files new and others old."""
    found = prepare(book, tmp_path / "Data", vocab_size=350)
    path = found.shards("train")[0]
    path.write_bytes(found.shards("val")[0].read_bytes())
    with pytest.raises(UserError, match=r"train-00000\.bin.*es de otros datos: prepare los datos de nuevo"):
        found.verify()
    with ShardWriter(found.directory, "train", found.vocab_size) as writer:
        writer.write(np.zeros(found.tokens("train"), np.int64))  # as many of them
    with pytest.raises(UserError, match=r"train-00000\.bin.*es de otros datos: prepare los datos de nuevo"):
        found.verify()


def preparing(folder, *words):
    """(A text that takes a while to be prepared, the command that does it.)"""
    big = folder / "grande.txt"
    big.write_text(corpus_text(600), encoding="utf-8")
    return big, [ROOT / "train_gpt2_spanish.py", *words, "--dataset-name", big, "--vocab-size", 400]


def wait_for_tokens(process, folder):
    process.wait_for("Entrenando el tokenizador")
    while not list((folder / "Data").glob(".grande.*/train-00000.bin")) and process.child.poll() is None:
        pass


def test_killed_while_preparing_leaves_nothing_that_is_taken_for_whole(tmp_path):
    """Kill -9 a real preparation; the next one starts over and cleans up, even while the killed one is a zombie."""
    big, command = preparing(tmp_path, "--prepare")
    with Process(command, tmp_path) as process:
        wait_for_tokens(process, tmp_path)
        os.killpg(process.child.pid, signal.SIGKILL)
        process.child.wait()
        assert dataset.latest(tmp_path / "Data") is None
        found = prepare(big, tmp_path / "Data")
    assert found.tokens("train") > 0
    assert [path.name for path in (tmp_path / "Data").iterdir()] == ["grande"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT])
def test_a_signal_while_preparing_leaves_nothing(tmp_path, number):
    with Process(preparing(tmp_path, "--prepare")[1], tmp_path) as process:
        wait_for_tokens(process, tmp_path)
        process.child.send_signal(number)
        code, output = process.finish()
    assert not list(tmp_path.glob("Data/*"))
    if number == signal.SIGUSR1:  # by whose code a job of Slurm's would begin anew, and come as far again
        assert code == 2 and output.endswith("prepárelos antes con --prepare, o pida más tiempo\n"), output
    else:
        assert code == 128 + number and output.endswith("Interrumpido.\n"), output


def test_a_scheduler_whose_time_is_up_while_rank_0_prepares_ends_all_alike(tmp_path):
    with ranks(preparing(tmp_path, "--distributed")[1], [tmp_path] * 2) as processes:
        wait_for_tokens(processes[0], tmp_path)
        for process in reversed(processes):
            process.child.send_signal(signal.SIGUSR1)
        results = [process.finish() for process in processes]
    assert [code for code, _ in results] == [2, 2] and "prepárelos antes con --prepare" in results[0][1], results


KILLED = """
import os, runpy, sys
from aura import preparation, shards
preparation.BATCH_CHARACTERS = 8000
shards.ShardWriter.__init__.__defaults__ = (4000,)
at, number, real, sys.argv = int(sys.argv[1]), int(sys.argv[2]), preparation.batches, sys.argv[3:]

def batches(documents):
    for count, batch in enumerate(real(documents), 1):
        if count == at:
            os.kill(os.getpid(), number)
        preparation.KEEP_SECONDS = 60 if count % 3 else -1  # what is written after a note may fill shards
        yield batch

preparation.batches = batches
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("kind, cuts", [
    ("jsonl.gz", [(9, signal.SIGKILL)]), ("muestra", [(9, signal.SIGKILL)]),
    ("txt", [(9, signal.SIGKILL), (6, signal.SIGUSR1), (1, signal.SIGTERM), (5, signal.SIGINT)])])
def test_a_preparation_that_was_cut_short_is_taken_up(tmp_path, kind, cuts):
    """By kill -9, by a scheduler, by Ctrl+C, by SIGTERM, each further on: in the end every byte is as if it had not."""
    name, most = "muestra", ["--dataset-max-tokens", "60000"]
    if kind == "txt":
        name, most = tmp_path / "a.txt", []
        name.write_bytes(corpus_text(100).encode() + b"mal\xff\n" + corpus_text(200).encode())
    elif kind == "jsonl.gz":
        name, most = tmp_path / "a.jsonl.gz", []
        records = [json.dumps({"text": text}) for text in corpus_text(150).split("\n\n")]
        name.write_bytes(gzip.compress("\n".join([*records, "{mal", *records]).encode()))
    words = [ROOT / "train_gpt2_spanish.py", "--prepare", "--dataset-name", name, "--vocab-size", 400, *most]

    def made(folder, at=0, number=0):
        folder.mkdir(exist_ok=True)
        return run(["-c", KILLED, at, int(number), *words], folder)

    code, output = made(tmp_path / "whole")
    assert code == 0, output
    for at, number in cuts:
        code, output = made(tmp_path / "cut", at, number)
        assert code == (-number if number == signal.SIGKILL else 128 + number), output
        assert ("Se sigue desde los " in output) == ("Entrenando" not in output) == (number != signal.SIGKILL), output
        (left,) = (tmp_path / "cut" / "Data").iterdir()
        if number != signal.SIGKILL:
            assert f"queda en {left}: la misma orden sigue desde ahí" in output, output
    code, output = made(tmp_path / "cut")
    assert code == 0 and "Se sigue desde los " in output, output
    whole, cut = (dataset.latest(tmp_path / folder / "Data") for folder in ("whole", "cut"))
    assert whole.meta["splits"] == cut.meta["splits"] and whole.sha256 == cut.sha256
    assert whole.meta["damage"] == cut.meta["damage"] and whole.meta["damage"]["bad"] == (kind != "muestra")
    assert len(whole.shards("train")) > 2 and list((tmp_path / "cut" / "Data").iterdir()) == [cut.directory]
    cut.verify()


def cut_short(name, data_dir, note=print, **options):
    """The folder that a preparation leaves whose disk is full after some batches."""
    real = preparation.batches

    def some(documents):
        for number, batch in enumerate(real(documents)):
            if number == 4:
                raise OSError(errno.ENOSPC, "No space left on device")
            yield batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "KEEP_SECONDS", -1)
        patch.setattr(preparation, "BATCH_CHARACTERS", 5000)
        patch.setattr(preparation, "batches", some)
        with pytest.raises(UserError, match="no queda espacio"):
            prepare(name, data_dir, note=note, **options)
    (left,) = data_dir.glob(".*")
    return left


def test_a_preparation_from_the_hub_is_taken_up(tmp_path, monkeypatch):
    datasets, said = pytest.importorskip("datasets"), []
    rows = [{"text": document} for document in corpus_text(60).split("\n\n")]
    for number in range(3):
        datasets.Dataset.from_list(rows[number::3]).to_parquet(str(tmp_path / "hub" / f"train-{number}.parquet"))
    monkeypatch.setitem(corpus.HUB, "wikipedia", (str(tmp_path / "hub"), "default"))
    monkeypatch.chdir(tmp_path)
    cut_short("wikipedia", tmp_path / "Data")
    found = prepare("wikipedia", tmp_path / "Data", note=said.append)
    assert "Se sigue desde los" in said[0] and found.meta["splits"]["train"]["documents"] > 40
    assert found.sha256 == prepare("wikipedia", tmp_path / "whole").sha256


def test_what_was_cut_short_is_taken_up_by_its_own_order_alone_and_not_where_it_is_damaged(book, tmp_path):
    whole, left = prepare(book, tmp_path / "whole"), cut_short(book, tmp_path / "Data")
    other = prepare(book, tmp_path / "Data", vocab_size=380)
    assert left.is_dir() and other.vocab_size == 380
    os.link(book, tmp_path / "copia.txt")  # as a backup does, which changes nothing of the text
    said = []
    assert prepare(book, tmp_path / "Data", note=said.append).sha256 == whole.sha256
    assert "Se sigue desde los" in said[0] and not left.exists()
    shutil.rmtree(tmp_path / "Data")
    left = cut_short(book, tmp_path / "Data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)  # as another user meets it
        assert prepare(book, tmp_path / "Data").sha256 == whole.sha256 and left.is_dir()
    shutil.rmtree(tmp_path / "Data")
    left = cut_short(book, tmp_path / "Data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "DOCUMENT_BYTES", 4000)  # as another version cuts: its documents are others
        patch.setattr(corpus, "CUT", (4000, 16_000))
        assert prepare(book, tmp_path / "Data", note=said.append).sha256 != whole.sha256 and left.is_dir()
    assert sum("Se sigue desde los" in line for line in said) == 1
    shutil.rmtree(tmp_path / "Data")

    def change(left, name, old, new):
        (left / name).write_bytes((left / name).read_bytes().replace(old, new, 1))

    def flip(left):
        with open(left / "train-00000.bin", "r+b") as file:
            file.seek(100)
            file.write(b"\xff")

    for damage in (flip, lambda left: os.truncate(left / "train-00000.bin", 99),
                   lambda left: (left / "train-00000.bin").unlink(),
                   lambda left: (left / files.UNFINISHED).write_text("{"),
                   lambda left: change(left, files.UNFINISHED, b'"total": ', b'"total": 1'),
                   lambda left: change(left, "tokenizer.model", b"de", b"dx")):
        said = []
        damage(cut_short(book, tmp_path / "Data"))
        assert prepare(book, tmp_path / "Data", note=said.append).sha256 == whole.sha256
        assert said[0].startswith("Aviso: lo que ya estaba preparado está dañado (") and "desde el principio" in said[0]
        assert [path.name for path in (tmp_path / "Data").iterdir()] == ["libro"]
        shutil.rmtree(tmp_path / "Data")


def test_too_much_damage_before_what_was_cut_short_is_named_with_its_first_line(book, tmp_path):
    good = [json.dumps({"text": f"{number} " + "palabra " * 60}) for number in range(600)]
    bad = tmp_path / "malo.jsonl"
    bad.write_text("\n".join([*good[:40], *["{mal"] * 20, *good[40:]]), encoding="utf-8")
    options = {"tokenizer": prepare(book, tmp_path / "Data").load_tokenizer(), "val_fraction": 0.0}
    said = []
    with pytest.raises(UserError) as whole:
        prepare(bad, tmp_path / "whole", **options)
    cut_short(bad, tmp_path / "Data", **options)
    with pytest.raises(UserError) as taken_up:
        prepare(bad, tmp_path / "Data", note=said.append, **options)
    assert str(taken_up.value) == str(whole.value) and "línea 41" in str(whole.value) and "Se sigue" in said[0]


def test_what_was_cut_short_goes_once_the_same_is_made_and_is_named_once_another_is(book, tmp_path):
    left, said = cut_short(book, tmp_path / "Data"), []
    (left / f".{files.UNFINISHED}.1.parcial").touch()  # as one that is killed while it writes the note leaves it
    twin = shutil.copytree(left, left.with_name(".libro.ffffffff.parcial"))  # of two at once, both killed
    kept = shutil.copytree(left, tmp_path / "twin")
    found = prepare(book, tmp_path / "Data", note=said.append)
    assert list((tmp_path / "Data").iterdir()) == [found.directory] and not list(found.directory.glob(".*"))
    assert not (found.directory / files.UNFINISHED).exists() and "quedó a medias" not in said[-1]
    shutil.copytree(kept, twin)  # of one that was killed once the other was through
    prepare(book, tmp_path / "Data")
    assert not twin.exists()
    shutil.copytree(kept, twin)
    prepare(book, tmp_path / "Data", vocab_size=380, note=said.append)
    assert twin.exists() and said[-1].startswith(f"Aviso: {twin} es de otra preparación de 'libro' que quedó a medias")


@pytest.mark.parametrize("fails", [KeyboardInterrupt, PermissionError])
def test_stopped_on_the_way_into_its_place_loses_neither_the_old_nor_the_new(book, tmp_path, monkeypatch, fails):
    old, rename, said = prepare(book, tmp_path / "Data"), os.rename, []
    left = cut_short(book, tmp_path / "Data", vocab_size=380)

    def stopped(source, target):
        if source == left:
            raise fails
        rename(source, target)

    with monkeypatch.context() as patch, pytest.raises((KeyboardInterrupt, UserError)):
        patch.setattr(os, "rename", stopped)
        prepare(book, tmp_path / "Data", vocab_size=380)
    assert dataset.latest(tmp_path / "Data").meta == old.meta and left.is_dir()
    assert prepare(book, tmp_path / "Data", vocab_size=380, note=said.append).vocab_size == 380
    assert "Se sigue desde los" in said[0]


def test_where_there_are_no_locks_nothing_is_left_that_nobody_could_take_up(book, tmp_path, monkeypatch):
    def no_locks(*_, **__):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files, "lock", no_locks)
    said = []
    with pytest.raises(ValueError):
        cut_short(book, tmp_path / "Data", note=said.append)  # and finds nothing that is left
    assert not list((tmp_path / "Data").iterdir()) and not any("la misma orden sigue" in text for text in said)


def test_what_a_killed_replacement_left_goes_also_where_nothing_is_prepared_anew(book, tmp_path, monkeypatch):
    prepare(book, tmp_path / "Data", vocab_size=380)

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(files.shutil, "rmtree", killed)  # the old folder is out of the way and not yet removed
        prepare(book, tmp_path / "Data")
    assert len(list((tmp_path / "Data").iterdir())) == 2
    said = []
    prepare(book, tmp_path / "Data", note=said.append)
    assert "ya preparados" in said[0] and [path.name for path in (tmp_path / "Data").iterdir()] == ["libro"]


def test_text_is_known_by_its_bytes(book, tmp_path):
    first = prepare(book, tmp_path / "Data")
    moved = tmp_path / "otro" / "libro.txt"
    moved.parent.mkdir()
    moved.write_bytes(book.read_bytes())
    again = prepare(moved, tmp_path / "Data")
    assert again.meta["prepared_at"] == first.meta["prepared_at"]
    assert dataset.read(again.directory).meta["source"] == corpus.open_corpus(str(moved)).source != first.meta["source"]
    before = moved.stat()
    moved.write_text(corpus_text().replace("pan", "sal"), encoding="utf-8")  # as long, and made as old
    os.utime(moved, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed = prepare(moved, tmp_path / "Data")
    assert changed.sha256 != first.sha256


def test_text_that_nobody_may_read_any_more_is_named(book, tmp_path, monkeypatch):
    prepare(book, tmp_path / "Data")
    moved = book.with_name("mudado.txt")
    book.rename(moved)
    opened = corpus.open_corpus(str(moved))
    moved.unlink()
    with pytest.raises(UserError, match=r"mudado\.txt.*no se puede leer .no existe.; compruebe la ruta y sus permisos"):
        opened.digest()


def test_the_tokenizer_learns_from_all_of_packed_text(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation.tokenizers, "SAMPLE_BYTES", 40_000)
    for number in range(10):
        with gzip.open(tmp_path / f"{number}.jsonl.gz", "wb") as file:
            for _ in range(100):
                file.write(json.dumps({"text": f"{number} " + "palabra " * 50}).encode() + b"\n")
    seen = list(preparation._sample(corpus.open_corpus(str(tmp_path)), 0.0))
    assert {text[0] for text in seen} == set("0123456789") and 50 < len(seen) < 200


def test_the_tokenizer_learns_from_nothing_that_is_held_out(book, tmp_path, monkeypatch):
    """Or it would encode that in fewer tokens, and bits per byte would be too low."""
    seen, real = [], preparation.tokenizers.train
    monkeypatch.setattr(preparation.tokenizers, "train",
                        lambda texts, *words: real([seen.append(text) or text for text in texts], *words))
    found = prepare(book, tmp_path / "Data", val_fraction=0.2)
    assert len(seen) == found.meta["splits"]["train"]["documents"] < 60
    opened = corpus.open_corpus(str(book))
    threshold = preparation.validation_threshold(opened, 0.2)
    assert seen == [text for text in opened.documents() if preparation.document_share(text) >= threshold]


def test_of_a_far_larger_corpus_what_is_read_counts_for_sample_and_validation(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "SMALL_CORPUS_BYTES", 10_000)
    monkeypatch.setattr(preparation, "LINE_SECONDS", 0)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"{number:03} " + "palabra " * 50}) + "\n" for number in range(200)))
    opened, said = corpus.open_corpus(str(path)), []
    assert [preparation.validation_threshold(opened, *words) for words in ((None, 100), (0.2,))] == [0.05, 0.2]
    monkeypatch.setattr(preparation, "VALIDATION_BYTES", 1000)
    whole = len(path.read_bytes())
    for tokens, size in ((None, whole), (10**9, whole), (2000, 16_000), (1, 10_000)):
        assert preparation.validation_threshold(opened, None, tokens) == pytest.approx(min(0.05, 1000 / size))
        seen = list(preparation._sample(opened, 0.0, tokens, said.append))
        assert abs(sum(map(len, seen)) - size) < 3000 and seen[0].startswith("000")
    assert said[0] == f"Texto leído para el tokenizador: 0 kB de {whole / 1000:.0f} kB"


def test_two_who_prepare_the_same_use_what_the_first_has_made(book, tmp_path, monkeypatch):
    real, said, first = preparation._encode, [], []

    def encode(*words):
        with monkeypatch.context() as patch:
            patch.setattr(preparation, "_encode", real)
            first.append(prepare(book, tmp_path / "Data"))
        first[0].hold()
        return real(*words)

    monkeypatch.setattr(preparation, "_encode", encode)
    found = prepare(book, tmp_path / "Data", note=said.append)
    assert found.meta == first[0].meta and said[-1].startswith("Otra ejecución ha preparado entretanto los mismos")
    assert [path.name for path in (tmp_path / "Data").iterdir()] == [found.directory.name]


def test_who_comes_while_another_puts_data_in_place_waits_for_that(book, tmp_path, monkeypatch):
    found, real, busy = prepare(book, tmp_path / "Data"), dataset.lock, [1, 1]

    def lock(*words, **options):
        if busy:
            busy.pop()
            raise BlockingIOError(errno.EAGAIN, "in use")
        return real(*words, **options)

    monkeypatch.setattr(dataset, "lock", lock)
    with dataset.unused(found.directory):
        assert not busy


def test_text_that_changes_while_it_is_prepared_is_refused(book, tmp_path, monkeypatch):
    real = preparation._encode

    def encode(*words):
        with open(book, "a", encoding="utf-8") as file:
            file.write("más")
        return real(*words)

    monkeypatch.setattr(preparation, "_encode", encode)
    with pytest.raises(UserError, match="ha cambiado mientras"):
        prepare(book, tmp_path / "Data")
    assert dataset.prepared(tmp_path / "Data") == []


def test_what_was_killed_while_it_marked_the_last_one_leaves_nothing_for_ever(book, tmp_path):
    found = prepare(book, tmp_path / "Data")
    (found.directory / ".dataset.json.1.parcial").write_text("{")
    prepare(book, tmp_path / "Data", latest=True)
    assert not list(found.directory.glob(".*"))


def test_a_preparation_that_another_is_replacing_is_one_line(book, tmp_path, monkeypatch):
    real = preparation.put_in_place

    def put_in_place(partial, final):
        real(partial, final)
        final.rename(final.with_name(".libro.1.parcial"))  # as another does before it puts its own there

    monkeypatch.setattr(preparation, "put_in_place", put_in_place)
    with pytest.raises(UserError, match=r"libro.*no se puede leer .no existe.*prepare los datos de nuevo"):
        prepare(book, tmp_path / "Data")


def test_a_damaged_preparation_is_made_anew(book, tmp_path):
    said = []
    first = prepare(book, tmp_path / "Data")
    good = first.shards("train")[0].read_bytes()
    for name, content in ((first.shards("train")[0].name, good[:-1] + bytes([good[-1] ^ 1])), ("dataset.json", b"{")):
        (first.directory / name).write_bytes(content)
        assert prepare(book, tmp_path / "Data", note=said.append).sha256 == first.sha256
        assert any(name in text and "Se preparan de nuevo" in text for text in said)
    assert first.shards("train")[0].read_bytes() == good


def test_a_copy_of_the_text_needs_no_right_to_write(book, tmp_path, monkeypatch):
    first = prepare(book, tmp_path / "Data")
    os.utime(book, (1, 1))

    def full(*_):
        raise OSError(28, "full")

    monkeypatch.setattr(dataset, "write_json", full)
    assert prepare(book, tmp_path / "Data").meta["prepared_at"] == first.meta["prepared_at"]


def test_a_full_disk_and_a_closed_file_name_the_way_out(book, tmp_path, monkeypatch):
    found = prepare(book, tmp_path / "Data")

    def refused(number):
        def refuse(*_):
            raise OSError(number, "Refused")
        return refuse

    monkeypatch.setattr(preparation, "write_json", refused(errno.ENOSPC))
    with pytest.raises(UserError, match="--data-dir '.*no queda espacio.*; haga sitio, o indique otra carpeta$"):
        prepare(book, tmp_path / "otra")
    monkeypatch.setattr(type(book), "read_bytes", refused(errno.EACCES))
    with pytest.raises(UserError, match=r"tokenizer\.model': no se puede leer .permiso denegado.: corrija sus perm"):
        found.load_tokenizer()


def test_prepared_data_that_may_not_be_read_are_not_replaced(book, tmp_path, monkeypatch):
    found = prepare(book, tmp_path / "Data")

    def denied(self, *_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_text", denied)
    with pytest.raises(UserError, match=r"dataset\.json': no se puede leer .permiso denegado.; .* con --data-dir$"):
        prepare(book, tmp_path / "Data")
    monkeypatch.undo()
    assert dataset.read(found.directory).meta["prepared_at"] == found.meta["prepared_at"]


def test_what_only_another_user_may_replace_is_said_before_anything_is_prepared(book, tmp_path, monkeypatch):
    folder, notes = tmp_path / "Data", []
    first = prepare(book, folder)
    folder.chmod(0o1777)
    monkeypatch.setattr(preparation.os, "geteuid", lambda: 54321)
    with pytest.raises(UserError, match="'.*Data': 'libro' es ahí de otro usuario, y .* indique otra --data-dir"):
        prepare(book, folder, vocab_size=380, note=notes.append)
    assert not notes and prepare(book, folder).sha256 == first.sha256
    folder.chmod(0o777)
    assert prepare(book, folder, vocab_size=380).vocab_size == 380, "there the system lets anybody"


def test_data_with_a_part_that_may_not_be_read_are_not_replaced(book, tmp_path, monkeypatch):
    found = prepare(book, tmp_path / "Data")

    def denied(path, *_):
        raise UserError(f"No se puede leer {path}: permiso denegado.") from PermissionError(errno.EACCES, "Denied")

    monkeypatch.setattr(dataset, "verify_shard", denied)
    with pytest.raises(UserError, match=r"train-00000\.bin': no se puede leer .permiso denegado.; corrija sus"):
        prepare(book, tmp_path / "Data")
    assert dataset.read(found.directory).meta["prepared_at"] == found.meta["prepared_at"]


def test_data_in_a_folder_that_may_not_be_entered_are_not_passed_over(book, tmp_path, monkeypatch):
    found, real = prepare(book, tmp_path / "Data"), Path.read_text
    for name in ("lost+found", "privada"):
        (tmp_path / "Data" / name).mkdir()

    def read_text(self, *words, **named):
        if self.parent != found.directory:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return real(self, *words, **named)

    monkeypatch.setattr(Path, "read_text", read_text)
    with pytest.raises(UserError, match=r"privada/dataset\.json': no se puede leer .permiso denegado"):
        dataset.latest(tmp_path / "Data")


def test_a_name_that_is_no_utf8_is_prepared_and_found_again(tmp_path):
    folder = tmp_path / "libros"
    folder.mkdir()
    path = os.fsdecode(os.fsencode(folder) + b"/Gald\xf3s.txt")
    with open(path, "w", encoding="utf-8") as file:
        file.write(corpus_text(60))
    first = prepare(folder, tmp_path / "Data")
    assert prepare(folder, tmp_path / "Data").meta["prepared_at"] == first.meta["prepared_at"]
    assert first.meta["source"] == json.loads((first.directory / "dataset.json").read_text())["source"]


def test_what_is_left_of_a_removal_is_no_data_set(book, tmp_path):
    found = prepare(book, tmp_path / "Data")
    shutil.copytree(found.directory, tmp_path / "Data" / ".libro.1.parcial")
    assert [each.directory for each in dataset.prepared(tmp_path / "Data")] == [found.directory]


def test_others_are_found_beside_one_that_cannot_be_read(book, tmp_path):
    found, said = prepare(book, tmp_path / "Data"), []
    (tmp_path / "Data" / "otro").mkdir()
    (tmp_path / "Data" / "otro" / "dataset.json").write_text('{"format": 99}')
    assert [each.directory for each in dataset.prepared(tmp_path / "Data", said.append)] == [found.directory]
    assert "de otra versión (99)" in said[0] and "--dataset-name" in said[0]
    with pytest.raises(UserError, match="de otra versión"):
        dataset.latest(tmp_path / "Data")


def test_validation_never_reads_the_text_of_another_preparation(book, tmp_path):
    found = prepare(book, tmp_path / "Data")
    found.require_same()
    book.write_text(corpus_text(70), encoding="utf-8")
    prepare(book, tmp_path / "Data")
    with pytest.raises(UserError, match="otra ejecución ha preparado ahí otros del mismo nombre"):
        found.require_same()
    shutil.rmtree(found.directory)
    with pytest.raises(UserError, match="libro' ya no están los datos con que se empezó a entrenar: devuélvalos"):
        found.require_same()
