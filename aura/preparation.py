"""From text to a prepared data set (see dataset.py).

The folder is built beside its final name and renamed when whole, so nothing half-made is ever taken for whole. Every
minute a note in it says how far it is: who begins the same again goes on from there.
"""

import contextlib
import hashlib
import itertools
import json
import os
import re
import signal
import stat
import sys
import time
import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np

from aura import corpus as corpora
from aura import dataset, formats
from aura import tokenizer as tokenizers
from aura.bar import bar
from aura.errors import Stopped, UserError, first_line
from aura.files import (
    IN_USE,
    MISSHAPEN,
    UNFINISHED,
    building,
    explain,
    give_up,
    put_in_place,
    remove_abandoned,
    remove_partials,
    require_writable_directory,
    unfinished,
    write_bytes,
    write_json,
)
from aura.shards import ShardWriter
from aura.signals import leaving_at_signals
from aura.words import amount, counted, duration, first_of

SPLITS = ("train", "val")
BATCH_CHARACTERS = 1 << 20  # text handed to all cores at once
# As others call, without its endings, a text that is not for training, or its folder: val, wiki.valid, test_data,
# validation-00000.
HELD_OUT = re.compile(r"(.*[-_.])?(val|valid|validation|validaci[oó]n|test|dev)([-_.]?\d+|[-_.]data)?")
TOKEN_BYTES = 8  # more than a token has in any text, on average
KEEP_SECONDS = 60  # between two notes of how far a preparation has come, of which what is cut short is taken up
LINE_SECONDS = 20  # between two progress lines where there is no terminal
SMALL_CORPUS_BYTES = 32_000_000  # up to here every document is looked at twice so that validation is never empty
VALIDATION_BYTES = 5_000_000  # what validation needs at most, between 0.1 % and 5 % of the corpus


def prepare(corpus, data_dir, *, vocab_size=32_000, tokenizer=None, val_fraction=None, max_tokens=None,
            threads=None, latest=False, accept=lambda tokenizer: None, note=print):
    """Turn `corpus` into a prepared folder data_dir/NAME, or return the one that is there already for the same
    bytes and options. Uses all cores; memory does not grow with the corpus.

    tokenizer: None to train one of `vocab_size` pieces. max_tokens: stop after this many tokens. val_fraction: share of
    the documents kept for validation. threads: all cores by default. latest: make it count as prepared last even where
    it is there already. accept: is called with the Tokenizer before what is there is replaced, and may raise UserError.
    Raises UserError for bad input; the folder of an earlier preparation is then untouched. What it returns has been
    read through; an earlier preparation that is damaged is made anew, and one that was cut short is gone on with.
    """
    if corpus.source["kind"] == "hub":
        max_tokens = max_tokens or corpora.HUB_DEFAULT_TOKENS
    options = {"vocab_size": vocab_size if tokenizer is None else tokenizer.vocab_size, "max_tokens": max_tokens,
               "tokenizer": tokenizer and tokenizer.sha256, "val_fraction": val_fraction}
    final = Path(data_dir) / corpus.name
    remove_abandoned(data_dir)  # first: a run killed once its new folder was in place left the old, as large, beside it
    known = _known(options, corpus)
    if existing := _intact(final, options, corpus, note):
        _clear_away(final, known)
        return _used_again(existing, data_dir, latest, note)
    require_writable_directory(data_dir, "--data-dir")
    _require_replaceable(final)
    with dataset.unused(final):
        pass  # or, as the line before, it would be found out once all is prepared
    _say_files(corpus, note)
    started = time.monotonic()
    try:
        with _making(final, known, note) as partial:
            if begun := _begun(partial, note):
                threshold, tokenizer = begun["threshold"], begun["loaded"]
                note(f"Se sigue desde los {begun['total']} tokens de {corpus.name!r} que ya estaban preparados.")
            else:
                threshold = validation_threshold(corpus, val_fraction, max_tokens)
                tokenizer = tokenizer or _train(corpus, threshold, vocab_size, max_tokens, note)
            accept(tokenizer)
            _say_replaced(final, tokenizer, note)
            if not tokenizer.lossless:
                note("Aviso: este tokenizador no conserva todos los caracteres (le faltan piezas de bytes, "
                     "normaliza, o tiene piezas añadidas que no se descodifican).")
            meta = _encode(corpus, partial, tokenizer, threshold, max_tokens, threads, note, known, begun)
            meta |= {"format": dataset.FORMAT, "name": corpus.name, "prepared_at": _stamp(data_dir),
                     "command": sys.argv, "source": corpus.source, "source_sha256": corpus.digest(), "options": options}
            if made := not corpus.changed() and _intact(final, options, corpus, note):
                note(f"Otra ejecución ha preparado entretanto los mismos datos en {final}: se usan esos.")
                (partial / UNFINISHED).unlink(missing_ok=True)
                return made
            _put_in_place(partial, final, corpus, meta)
    except OSError as problem:
        raise UserError(f"--data-dir {str(data_dir)!r}: no se pueden guardar los datos ({explain(problem)}); "
                        "haga sitio, o indique otra carpeta") from problem
    made = dataset.Dataset(final, meta)  # as it is here: another preparation of the name may be taking its place now
    made.verify()
    _summarise(made, time.monotonic() - started, note)
    _clear_away(final, known)
    _tell_what_is_left(final, note)
    return made


def _used_again(existing, data_dir, latest, note):
    """The Dataset `existing`, which from now on is what was prepared last, if `latest`."""
    note(f"Datos ya preparados en {existing.directory}: {existing.tokens('train')} tokens de entrenamiento, "
         f"{existing.tokens('val')} de validación.")
    if latest:
        existing.meta["prepared_at"] = _stamp(data_dir)
        dataset.write_back(existing)
        last = dataset.latest(data_dir, note)
        if last and last.meta["prepared_at"] != existing.meta["prepared_at"]:  # where nothing can be written
            note(f"Aviso: no se puede anotar en {existing.directory} que sean los últimos que se prepararon, y sin "
                 f"--dataset-name se entrenaría con los de {last.directory.name!r}: indíquelo también al entrenar.")
    return existing


def _require_replaceable(final):
    """Raise UserError where the folder `final` is another user's in one with the sticky bit, as /tmp has it: the system
    lets nobody else move it."""
    folder = final.parent.stat()
    if final.exists() and folder.st_mode & stat.S_ISVTX \
            and os.geteuid() not in (0, folder.st_uid, final.stat().st_uid):
        raise UserError(f"--data-dir {str(final.parent)!r}: {final.name!r} es ahí de otro usuario, y en esa carpeta "
                        "solo él puede reemplazarlo: indique otra --data-dir")


def _train(corpus, threshold, vocab_size, max_tokens, note):
    note(f"Entrenando el tokenizador con {corpus.name!r} ({vocab_size} piezas)...")
    sample = _sample(corpus, threshold, max_tokens, note)
    return tokenizers.train(sample, vocab_size, note, f"el corpus {corpus.name!r}")


def _put_in_place(partial, final, corpus, meta):
    """Make the folder `partial` the prepared one, unless the corpus is not what it was, or the one there is in use."""
    if corpus.changed():
        (partial / UNFINISHED).unlink(missing_ok=True)
        raise UserError(f"el corpus {corpus.name!r} ha cambiado mientras se preparaba: repita la orden cuando nadie "
                        "escriba en él")
    write_json(partial / "dataset.json", meta)
    with dataset.unused(final):
        put_in_place(partial, final)


def _say_replaced(final, tokenizer, note):
    """Tell that data of another tokenizer are going to be replaced: what learns from them could not go on."""
    with contextlib.suppress(UserError):  # told by _intact()
        old = dataset.read(final)
        if old and old.meta["tokenizer"]["sha256"] != tokenizer.sha256:
            note(f"Aviso: estos datos reemplazan a los de {final}, que tienen otro tokenizador, de {old.vocab_size} "
                 "piezas: lo que se entrena con aquellos no podrá continuar con estos. Para conservarlos, interrumpa "
                 "esta orden y repítala con otra --data-dir.")


def say_unread(corpus, note):
    """Tell which files of a folder are left out."""
    if corpus.unread:
        way_out = next((f"; {str(path)!r} {'; '.join(known)}" for path in corpus.unread
                        if (known := formats.by_name(path))), ".")
        note(f"Aviso: de la carpeta no se usa {_named([path.name for path in corpus.unread])}: se lee lo que acaba en "
             f"{', '.join(corpora.SUFFIXES)}{way_out}")


def _say_files(corpus, note):
    """Tell which files of a folder are left out, and which of those that are read others would keep for validation."""
    say_unread(corpus, note)
    files = corpus.source.get("files", ())
    folder = files and os.path.commonpath(map(os.path.dirname, files))
    apart = [name for name in (os.path.relpath(file, folder) for file in files)
             if any(map(_held_out, Path(name).parts))]
    if len(files) > len(apart) > 0:
        note(f"Aviso: también se entrena con {_named(apart)}: los documentos de validación se toman de entre todos; si "
             "esos no son para entrenar, sáquelos de la carpeta.")


def _held_out(name):
    name = unicodedata.normalize("NFC", name).lower()  # a Mac may have written its accents apart
    return HELD_OUT.fullmatch(re.sub(r"\.(txt|jsonl)(\.gz)?$", "", name))


def _named(names):
    return first_of([name if name.isprintable() else repr(name) for name in names], 4)  # of a folder of anything


def _stamp(data_dir):
    """Seconds since 1970, later than all that was prepared in `data_dir`, even if the clock was set back since."""
    stamps = [found.meta["prepared_at"] for found in dataset.prepared(data_dir, note=lambda _: None)]
    return max([time.time(), *(stamp + 1e-3 for stamp in stamps)])


def _intact(final, options, corpus, note):
    """The Dataset in `final` if it was made from this corpus with these options and is still whole, else None."""
    try:
        existing = dataset.read(final)
        if existing is None or existing.meta["options"] != options or not dataset.same_text(existing, corpus):
            return None
        existing.verify()
        return existing
    except UserError as problem:
        if isinstance(problem.__cause__, PermissionError):  # another user's, and maybe whole: not to be replaced
            raise
        note(f"Aviso: {problem}. Se preparan de nuevo.")
        return None


def document_share(document):
    """A number in [0, 1) that depends on the text alone, so that equal documents fall on the same side."""
    return int.from_bytes(hashlib.blake2b(document.encode("utf-8"), digest_size=8).digest(), "big") / 2**64


def _reach(size, max_tokens):
    """About how many bytes of a corpus of `size` are read at most: of one far larger than max_tokens the beginning."""
    return min(size, max(SMALL_CORPUS_BYTES, TOKEN_BYTES * max_tokens)) if size and max_tokens else size


def validation_threshold(corpus, fraction, max_tokens=None):
    """Documents whose share lies below this go to validation. In a small corpus at least one document does, and at
    least one does not; but never so many that they are most of the text, of which nothing would be left to learn from.
    max_tokens: as prepare() takes it."""
    size = corpus.total_bytes
    if fraction is None:
        fraction = min(0.05, max(0.001, VALIDATION_BYTES / _reach(size, max_tokens))) if size else 0.002
    if fraction == 0 or size is None or size > SMALL_CORPUS_BYTES:
        return fraction
    sizes = Counter()  # characters by share
    for document in corpus.documents():
        sizes[document_share(document)] += len(document)
    if len(sizes) < 2:
        return 0.0
    threshold = min(max(fraction, np.nextafter(min(sizes), 1)), max(sizes))
    room = max(fraction, 2 / 3) * sizes.total()
    for before, share in enumerate(sorted(sizes)):
        room -= sizes[share]
        if room < 0:
            return min(threshold, share) if before else 0.0
    return threshold


def training_documents(corpus, threshold):
    """Yield those that are not held out. A tokenizer that has seen the others would encode them in fewer tokens."""
    return (document for document in corpus.documents() if document_share(document) >= threshold)


def _sample(corpus, threshold, max_tokens=None, note=print):
    """Training documents spread evenly over what will be read of the corpus where its size is known; all, from the
    first on, where it is not."""
    size = _reach(corpus.text_bytes(), max_tokens)
    keep = min(1.0, tokenizers.SAMPLE_BYTES / size) if size else 1.0
    accumulated, read, told = 1.0, 0, time.monotonic()
    for document in training_documents(corpus, threshold):
        if max_tokens and size and read > size:
            return
        read += len(document)
        if time.monotonic() - told > LINE_SECONDS:
            told = time.monotonic()
            note(f"Texto leído para el tokenizador: {amount(read)}" + (f" de {amount(size)}" if size else ""))
        accumulated += keep
        if accumulated >= 1:
            accumulated -= 1
            yield document


def batches(documents):
    """Lists of neighbouring documents of about BATCH_CHARACTERS together, to be tokenised by all cores at once."""
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _known(options, corpus):
    """A hash over what two preparations must have in common for one to go on with what the other has done."""
    source = {**corpus.source, "modified_ns": [written for written, _ in corpus.source.get("modified_ns", ())]}
    return _hash([dataset.FORMAT, corpora.CUT, options, source])


def _hash(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _left_of(known):
    """A function that says whether an unfinished folder is what was cut short of that which _known() gives this for."""
    def is_ours(folder):
        if not os.access(folder / UNFINISHED, os.W_OK):  # another user's
            return False
        try:
            return json.loads((folder / UNFINISHED).read_text(encoding="utf-8"))["known"] == known
        except (OSError, *MISSHAPEN):
            return True  # and no use to anybody else

    return is_ours


def _clear_away(final, known):
    """Remove what others that began the same as is now made, as _known() tells, and were killed have left."""
    remove_abandoned(final.parent, final.name, _left_of(known))


def _tell_what_is_left(final, note):
    if left := unfinished(final, lambda folder: os.access(folder / UNFINISHED, os.W_OK)):
        folder, locks = left
        give_up(locks)
        note(f"Aviso: {folder} es de otra preparación de {final.name!r} que quedó a medias: si no va a repetir su "
             "orden con el mismo texto, bórrela.")


@contextlib.contextmanager
def _making(final, known, note):
    """A block that makes the folder it is given, which is that of an earlier one cut short where what _known() gives is
    the same. Cut short itself, it says what is left of it."""
    partial = None
    with leaving_at_signals():
        try:
            with building(final, _left_of(known)) as partial:
                yield partial
        except BaseException as problem:
            if partial and (partial / UNFINISHED).exists():
                note(f"Lo que ya está preparado queda en {partial}: la misma orden sigue desde ahí (si no la va a "
                     "repetir, bórrelo).")
            elif isinstance(problem, Stopped) and signal.Signals(problem.number).name == "SIGUSR1":
                # By the code of a stop a job of Slurm's would come back, and get as far again.
                raise UserError("recibida SIGUSR1, que avisa de que se acaba el tiempo, y apenas se había empezado a "
                                "preparar los datos: prepárelos antes con --prepare, o pida más tiempo") from problem
            raise


def _begun(directory, note):
    """What UNFINISHED in `directory` says, if it is there, with its "writers" and "loaded", the tokenizer; None, and an
    empty folder, where that is damaged."""
    if not (directory / UNFINISHED).exists():
        return None
    remove_partials(directory)
    try:
        begun = json.loads((directory / UNFINISHED).read_text(encoding="utf-8"))
        if begun.pop("sha256") != _hash(begun):
            raise UserError(f"{UNFINISHED} no dice lo que se escribió")
        model = (directory / begun["tokenizer"]["file"]).read_bytes()
        if hashlib.sha256(model).hexdigest() != begun["tokenizer"]["sha256"]:
            raise UserError(f"{begun['tokenizer']['file']} no es el que se escribió")
        begun["writers"] = {split: ShardWriter(directory, split, begun["vocab_size"]) for split in SPLITS}
        for split, writer in begun["writers"].items():
            writer.resume(begun["shards"][split])
        return {**begun, "loaded": tokenizers.from_bytes(model)}
    except (OSError, UserError, *MISSHAPEN) as problem:
        note(f"Aviso: lo que ya estaba preparado está dañado ({first_line(problem)}): se prepara desde el principio.")
    for path in directory.iterdir():
        if path.name != IN_USE:
            path.unlink()
    return None


def _encode(corpus, directory, tokenizer, threshold, max_tokens, threads, note, known, begun):
    """Write shards and tokenizer into `directory`; returns the part of dataset.json that they determine. Every
    KEEP_SECONDS it leaves there how far it is; begun: what _begun() has made of that."""
    write_bytes(directory / tokenizer.file_name, tokenizer.model)
    begun = begun or {"writers": {split: ShardWriter(directory, split, tokenizer.vocab_size) for split in SPLITS},
                      "counts": {split: {"documents": 0, "bytes": 0, "tokens": 0} for split in SPLITS},
                      "total": 0, "place": None, "damage": {}}
    corpus.damage = corpora.Damage(**begun["damage"])
    writers, counts, total, place = (begun[name] for name in ("writers", "counts", "total", "place"))

    def documents():
        nonlocal place
        for document, place in corpus.placed(begun["place"]):  # noqa: B007 (of the last document of each batch)
            yield document

    progress, kept = _Progress(corpus, max_tokens, note), time.monotonic()
    with progress.bar:
        for batch in batches(documents()):
            for document, ids in zip(batch, tokenizer.encode_batch(batch, threads), strict=True):
                ids.append(tokenizer.eos_id)
                room = len(ids) if max_tokens is None else max(0, min(len(ids), max_tokens - total))
                split = "val" if document_share(document) < threshold else "train"
                writers[split].write(np.asarray(ids[:room], dtype=np.int64))
                counts[split]["documents"] += 1
                counts[split]["bytes"] += len(document.encode("utf-8"))
                counts[split]["tokens"] += room
                total += room
                if max_tokens is not None and total >= max_tokens:
                    break
            progress.advance(total)
            if max_tokens is not None and total >= max_tokens:
                break
            if time.monotonic() - kept > KEEP_SECONDS:
                state = {
                    "known": known, "tokenizer": {"file": tokenizer.file_name, "sha256": tokenizer.sha256},
                    "vocab_size": tokenizer.vocab_size, "threshold": threshold, "place": place, "counts": counts,
                    "total": total, "damage": {"first": corpus.damage.first, "file": str(corpus.damage.file or ""),
                                               "way_out": corpus.damage.way_out},
                    "shards": {split: writer.state() for split, writer in writers.items()}}
                write_json(directory / UNFINISHED, {**state, "sha256": _hash(state)})
                kept = time.monotonic()
    if not total:
        raise UserError(f"el corpus {corpus.name!r} está vacío: no hay ningún documento con texto; indique "
                        "otro")
    if not counts["train"]["tokens"]:
        raise UserError(f"del corpus {corpus.name!r} no queda texto con que entrenar: los {total} tokens leídos son de "
                        "validación; indique un --dataset-max-tokens mayor o una --val-fraction menor")
    shards = {split: writer.close() for split, writer in writers.items()}
    splits = {split: {**counts[split], "shards": shards[split]} for split in writers}
    digest = hashlib.sha256(tokenizer.sha256.encode())
    for shard in itertools.chain(*shards.values()):
        digest.update(shard["sha256"].encode())
    return {"tokenizer": {"file": tokenizer.file_name, "sha256": tokenizer.sha256, "vocab_size": tokenizer.vocab_size},
            "splits": splits, "sha256": digest.hexdigest(),
            "damage": {"lines": corpus.damage.lines, "bad": corpus.damage.bad, "first": corpus.damage.first}}


class _Progress:
    """A bar over the bytes of the source that will be read, or over the tokens where those are not known; where the
    console is not a terminal, a line now and then instead."""

    def __init__(self, corpus, max_tokens, note):
        self.corpus, self.max_tokens, self.note = corpus, max_tokens, note
        self.by_tokens = corpus.total_bytes is None or (corpus.source["kind"] == "muestra" and max_tokens is not None)
        self.total = max_tokens if self.by_tokens else corpus.total_bytes
        self.bar = bar(total=self.total, unit="tok" if self.by_tokens else "B", unit_scale=True, desc="Preparando",
                       disable=None, mininterval=1.0)
        self.started = self.told = time.monotonic()
        self.begun = None  # where the first batch ended: what was prepared before has cost no time now

    def advance(self, tokens_written):
        """Show that `tokens_written` tokens are done."""
        position = tokens_written if self.by_tokens else self.corpus.progress
        if self.max_tokens and not self.by_tokens:  # they may be enough before the source ends
            wanted = round(position * max(1, self.max_tokens / max(1, tokens_written)))
            self.bar.total = self.total = max(1, min(self.corpus.total_bytes, wanted))
        self.bar.set_postfix_str(f"{tokens_written / 1e6:.1f} M tokens", refresh=False)
        self.bar.update(position - self.bar.n)
        now = time.monotonic()
        if self.begun is None:
            self.started, self.begun = now, position
        if self.bar.disable and now - self.told > LINE_SECONDS and position > self.begun:
            left = (now - self.started) * (self.total - position) / (position - self.begun)
            self.note(f"Preparando: {100 * position / self.total:.0f} %, {tokens_written / 1e6:.1f} M tokens, "
                      f"faltan {duration(left)}")
            self.told = now


def damaged(damage):
    """Spanish for the lines that could not be read. damage: a corpus.Damage as a dict."""
    return f"Aviso: líneas dañadas: {damage['bad']} de {damage['lines']}; la primera: {damage['first']}."


def _summarise(made, seconds, note):
    splits, damage = made.meta["splits"], made.meta["damage"]
    note(f"Datos preparados en {made.directory} ({seconds:.0f} s): {splits['train']['tokens']} tokens de "
         f"entrenamiento en {counted(splits['train']['documents'], 'documento')}, {splits['val']['tokens']} de "
         f"validación en {splits['val']['documents']}, vocabulario de {made.vocab_size}.")
    if damage["bad"]:
        note(damaged(damage))
    if not splits["val"]["tokens"]:
        why = "" if made.meta["options"]["val_fraction"] == 0 else (
            " Para apartar alguno tiene que haber varios, y ninguno que sea casi todo el texto: un .txt se divide en "
            "ellos por sus líneas en blanco.")
        note(f"Aviso: sin documentos de validación; no habrá pérdida de validación.{why}")
