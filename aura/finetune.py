"""What answering questions needs between its data and the loop: windows for every rank, scores, files, figures."""

import dataclasses
import json
import math
import socket
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from aura import (
    backend,
    buckets,
    output,
    pretrained,
    report,
    results,
    scaling,
    sharding,
    spans,
    squad,
    start,
)
from aura.checkpointer import collect
from aura.errors import OutOfMemory, TrainingFault
from aura.files import MISSHAPEN, explain, set_aside, write_json
from aura.models import bert
from aura.signals import Abandoned


@dataclass(frozen=True)
class Task:
    """What a run works on, the same on every rank. module, examples (the validation questions): on rank 0 alone, None
    elsewhere. vocabulary: the bytes of vocab.txt. dataset: its name. sha256: of all windows, the same wherever figures
    can be compared; train_sha256, validation_sha256: of each part, since a training may go on with other validation
    questions, for which its best model so far does not count. questions: how many to train on. checksum: of the weights
    that were read, None where they are random."""

    config: bert.BertConfig
    vocabulary: bytes
    lowercase: bool
    strip_accents: bool
    pad_id: int
    dataset: str
    sha256: str
    train_sha256: str
    validation_sha256: str
    questions: int
    train: spans.Features
    validation: spans.Features
    checksum: int | None = None
    module: bert.QuestionAnswering | None = None
    examples: list | None = None


def share(task, dist):
    """Rank 0's Task on every rank, so that no other machine needs the files."""
    tree = None
    if dist.main:
        tree = {**vars(task), "module": None, "examples": None, "config": dataclasses.asdict(task.config),
                "vocabulary": torch.frombuffer(bytearray(task.vocabulary), dtype=torch.uint8)}
        for part in ("train", "validation"):
            tree[part] = {name: torch.from_numpy(array) for name, array in vars(tree[part]).items()}
    tree = dist.broadcast_tree(tree)
    if dist.main:
        return task
    for part in ("train", "validation"):
        tree[part] = spans.Features(**{name: tensor.numpy() for name, tensor in tree[part].items()})
    return Task(**{**tree, "config": bert.BertConfig(**tree["config"]),
                   "vocabulary": tree["vocabulary"].numpy().tobytes()})


def collate(features, numbers, pad_id, device, length=None):
    """The windows `numbers` as (tokens int64 [B, T], types [B, T], lengths [B], positions [B, 2]) on the device; T is
    `length` or that of the longest."""
    lengths = torch.from_numpy(features.lengths[numbers].astype(np.int64))
    length = length or int(lengths.max())
    rows = [features.ids[features.offsets[number]:features.offsets[number + 1]] for number in numbers]
    context_at = torch.from_numpy(features.context_at[numbers].astype(np.int64))
    place = torch.arange(length)
    types = ((place >= context_at[:, None]) & (place < lengths[:, None])).long()
    positions = torch.from_numpy(np.stack([features.start[numbers], features.end[numbers]], 1).astype(np.int64))
    parts = buckets.padded(rows, length, pad_id), types, lengths, positions
    if device.type == "cuda":  # copied from other memory, each would wait for all that the card has still to do
        parts = tuple(part.pin_memory() for part in parts)
    return tuple(part.to(device, non_blocking=True) for part in parts)


def make_loader(args, dist, task):
    """The micro-batches of the training windows."""
    length = args.max_len if args.padding == "fixed" else None
    return buckets.BucketLoader(
        task.train.lengths, lambda numbers: collate(task.train, numbers, task.pad_id, dist.device, length),
        args.batch_size, seed=args.seed, rank=dist.rank, world_size=dist.world_size, grad_accum=args.grad_accum,
        bucketed=length is None)


def any_batch(args, dist, task):
    """A micro-batch of training windows to time."""
    return collate(task.train, np.arange(args.batch_size) % len(task.train.lengths), task.pad_id, dist.device,
                   args.max_len if args.padding == "fixed" else None)


def make_reporter(args, dist, task, steps, precision):
    """The Reporter of this run, in samples; its MFU counts the FLOPs of a window's own tokens, not of its padding."""
    flops = statistics.fmean(task.config.flops(int(length)) for length in task.train.lengths)
    return report.Reporter(args.log_dir, dist.main, steps, flops, start.group_peak(dist, precision), unit="samples")


class Evaluation:
    """Measures val_loss, EM and F1 of the validation questions; to be called on all ranks, with the StopRequest, if
    any, by which they abandon it. The best model by val_loss is kept in the folder `best` of --checkpoint-dir. metrics,
    answers: of the last call, empty where that was abandoned; the answers on rank 0 alone. Without a question that has
    an answer to compare with there are no metrics.

    first: the step that this run goes on from, None where none is taken: then no best model is looked for or kept. One
    that does not lead there, because it is of another run or of later steps, is moved aside. clock: the run's Clock.
    since: the step from which on `best` is the best, as rank 0 knows it.
    """

    def __init__(self, args, dist, task, module, precision, first=None, clock=None):
        self.dist, self.task, self.module, self.precision, self.clock = dist, task, module, precision, clock
        self.rows = 4 * args.batch_size  # no gradients, no optimiser: larger batches than in training fit
        self.folder = None if first is None else Path(args.checkpoint_dir, "best")
        self.metrics, self.answers, self.since = {}, {}, 0
        self.best = dist.run_on_main(lambda: self._known(first)) if self.folder else None

    def _known(self, first):
        """The metrics of the best so far, None where there is none or it was moved aside."""
        described = self.folder / "metrics.json"
        if not self.folder.exists():
            return None
        try:
            known = json.loads(described.read_text(encoding="utf-8"))
            ours = self.task.validation_sha256
            same = known.get("validation_sha256", ours) == ours  # if not, its loss is one on other questions
            for name in ("val_loss", "exact_match", "f1"):
                float(known[name])  # a missing one would otherwise end the run after the training
            if first and same and known.get("step", 0) <= first:
                return known
        except (OSError, *MISSHAPEN):
            self.dist.print(f"Aviso: {described} está dañado: el mejor se busca de nuevo.")
        try:
            moved = set_aside([self.folder], self.folder.parent)
        except OSError as problem:
            raise TrainingFault(f"no se pudo apartar {str(self.folder)!r}, el mejor modelo de antes: "
                                f"{explain(problem)}; corríjalo y repita la misma orden") from problem
        self.dist.print(f"El mejor modelo de antes se ha movido a {moved}.")
        self.since = first  # what the run had before it may have been better
        return None

    def __call__(self, request=None):
        self.metrics, self.answers = {}, {}
        losses, logits = self._forward(request)
        nats, count = self.dist.sum(losses)
        parts = self.dist.gather_objects(logits)
        scores = self.dist.run_on_main(lambda: self._score({number: row for part in parts for number, row in part}))
        self.metrics = {"val_loss": nats / count, **scores} if count else {}
        known, loss = self.best["val_loss"] if self.best else math.nan, self.metrics.get("val_loss", math.nan)
        if self.folder and math.isfinite(loss) and (math.isnan(known) or loss < known):
            self.best = {**self.metrics, "step": self.clock.step}
            save_model(self.folder, self.dist, self.task, self.module, self.best)
        return self.metrics

    @torch.no_grad()
    def _forward(self, request):
        """((summed loss, windows that count), [(number of a window, its logits [T, 2])]) of this rank's share."""
        features, nats, count, logits = self.task.validation, 0.0, 0, []
        order = np.argsort(features.lengths, kind="stable")
        places = range(self.dist.rank * self.rows, len(order), self.dist.world_size * self.rows)
        self.module.eval()
        for numbers in sharding.in_step((order[place:place + self.rows] for place in places), self.dist, request):
            *batch, positions = collate(features, order[:1] if numbers is None else numbers, self.task.pad_id,
                                        self.dist.device)
            with self.precision.autocast():
                found = self.module(*batch).float()
            if numbers is not None:
                nats += F.cross_entropy(found, positions, reduction="sum", ignore_index=spans.UNKNOWN).item() / 2
                count += int((positions[:, 0] != spans.UNKNOWN).sum())
                logits += [(number, row[:length]) for number, row, length in zip(
                    numbers.tolist(), found.cpu().numpy(), features.lengths[numbers], strict=True)]
        return (nats, count), logits

    def _score(self, logits):
        rows = [logits[number] for number in range(len(logits))]
        self.answers, _ = spans.predict(self.task.examples, self.task.validation, [row[:, 0] for row in rows],
                                        [row[:, 1] for row in rows])
        scores = squad.evaluate(self.task.examples, self.answers)
        return {name: scores[name] for name in ("exact_match", "f1")}


def in_words(metrics):
    """The figures of an Evaluation, perhaps none, in Spanish."""
    if not metrics:
        return "no hay respuestas con que comparar las suyas"
    return (f"EM {metrics['exact_match']:.2f}, F1 {metrics['f1']:.2f}, pérdida de validación "
            f"{metrics['val_loss']:.4f}")


def save_model(folder, dist, task, module, metrics, answers=None, named=None):
    """Write the model as --model and other tools read it, its metrics and its answers; to be called on all ranks.
    module: None where only what it was found to answer is kept. named: Checkpointer.named(), where nothing else adds
    it. Raises TrainingFault when the disk refuses."""
    weights = module and collect(module.state_dict(), dist)

    def write():
        try:
            if module:
                pretrained.save_folder(folder, weights, task.config, task.vocabulary, task.lowercase,
                                       task.strip_accents)
            write_json(Path(folder, "metrics.json"), {
                **metrics, "dataset_sha256": task.sha256, "validation_sha256": task.validation_sha256})
            if answers is not None:
                write_json(Path(folder, "predictions.json"), answers)
        except OSError as problem:
            raise TrainingFault(f"no se pudo escribir en {str(folder)!r}: {explain(problem)}; corríjalo y repita "
                                f"la misma orden, que lo guardará{f'; {named}' if named else ''}") from problem

    dist.run_on_main(write)


def exchange_figures(args, dist, task, model, loss_fn, precision, step, request):
    """What exchanging costs, as fields of results.Result: times steps of `model`, which exchanges, of one that does
    not, and the exchange alone. step: seconds of a whole step in training. Raises OutOfMemory on all ranks where
    one has no room for a whole model besides what it trained, Abandoned once the `request` of one asks to stop."""
    def timed(one, **how):
        return scaling.step_seconds(dist, one.train(), loss_fn, make_loader(args, dist, task), args.grad_accum,
                                    precision, request, **how)

    together = timed(model)  # first, in the memory it trained in: a rank that ran out here would leave others waiting
    with scaling.enough_memory(dist):
        plain = bert.QuestionAnswering(task.config).to(dist.device)
        plain.bert.grad_checkpointing = args.grad_checkpointing  # or the time to compute again would pass for exchange
    alone = timed(plain.compiled() if args.compile else plain, alone=True)
    del plain
    by_rows = sum(parameter.numel() for parameter in getattr(model, "by_rows", ()))  # next to nothing of these travels
    size, seconds = scaling.exchange_seconds(dist, task.config.parameters() - by_rows, args.grad_accum,
                                             precision.dtype, request)
    return {"alone_step_s": max(1e-9, step - max(0.0, together - alone)), "exchange_bytes": size, "exchange_s": seconds}


def strategy(dist, synced):
    """How the processes share the work, one of results.STRATEGIES."""
    return "none" if dist.world_size == 1 else "fsdp" if dist.sharded else synced.method


def recipe(args, task, synced):
    """What decides how the model learns, besides its data, batch, length, precision and seed; results.Result.recipe."""
    # What has effect: --dropout may be the model's, and diloco's details depend on the steps where none are given.
    found = {"dropout": task.config.dropout, "attention_dropout": task.config.attention_dropout}
    found |= {name: getattr(args, name) for name in (
        "lr", "min_lr_ratio", "warmup_ratio", "weight_decay", "grad_clip", "ema")}
    if synced.method == "diloco":
        found |= {"sync_every": synced.every, "sync_lr": synced.outer_lr, "sync_momentum": synced.outer_momentum}
    return found


def record(args, dist, task, ready, loss_fn, reporter, metrics, *, first, stopped, request):
    """Leave the figures of this run's steps after `first` in --results-dir; to be called on all ranks. What exchanging
    costs is measured where a step exchanges whole gradients and the memory is enough, but not when the run was
    stopped, nor once `request` asks for it: then it is in a hurry, as torchrun and Slurm kill after 30 s. Returns the
    path on rank 0."""
    run, steps = ready.run, ready.run.progress.step - first
    devices, hosts, memory, local_ranks = map(list, zip(*dist.gather_objects((
        backend.device_name(dist.device), socket.gethostname(), backend.peak_memory(dist.device) / 1e9,
        dist.local_rank)), strict=True))
    dist.print_each(f"Memoria máxima: {memory[dist.rank]:.2f} GB")
    if not steps:
        dist.print("Esta orden no ha dado ningún paso: no deja cifras en --results-dir.")
        return None
    step = dist.broadcast_tree(statistics.median(reporter.step_times) if dist.main else None)
    exchange = {"alone_step_s": None, "communication_s": None, "exchange_bytes": 0, "exchange_s": None}
    used = strategy(dist, run.sync)
    if used in results.EXCHANGING and not stopped:
        try:
            exchange |= exchange_figures(args, dist, task, ready.model, loss_fn, run.precision, step,
                                         request)
            exchange["communication_s"] = (step - exchange["alone_step_s"]) * steps
        except OutOfMemory as problem:  # the model is trained and saved
            dist.print(f"Aviso: no se ha podido medir lo que cuesta el intercambio ({problem}); se guardan las "
                       "demás cifras.")
        except Abandoned:
            dist.print("Aviso: no se mide lo que cuesta el intercambio, porque se ha pedido parar; se guardan las "
                       "demás cifras.")
    if not dist.main:
        return None
    samples, seconds = args.batch_size * args.grad_accum * dist.world_size, sum(reporter.step_times)
    result = results.Result(
        strategy=used, nodes=local_ranks.count(0), processes=dist.world_size, devices=devices, hosts=hosts,
        threads=torch.get_num_threads(),
        model=Path(args.model).name, parameters=task.config.parameters(), dataset=task.dataset,
        dataset_sha256=task.sha256, train_examples=task.questions, max_len=args.max_len, batch_size=args.batch_size,
        grad_accum=args.grad_accum, global_batch=samples, precision=run.precision.name, padding=args.padding,
        seed=args.seed, epochs=steps / run.loader.steps_per_epoch, steps=steps, resumed=first > 0, seconds=seconds,
        samples_per_s=steps * samples / seconds, step_s=step, peak_memory_gb=memory, **exchange,
        **{name: metrics.get(name) for name in ("val_loss", "exact_match", "f1")},
        exit=results.SIGNALLED if stopped else results.COMPLETE,
        versions={**output.versions(), "cuda": torch.version.cuda},
        weights_crc32=None if task.checksum is None else f"{task.checksum:08x}", recipe=recipe(args, task, run.sync),
        computing={"--attention": args.attention, **{flag: "sí" if given else "no" for flag, given in (
            ("--compile", args.compile), ("--grad-checkpointing", args.grad_checkpointing))}})
    try:
        return results.save(args.results_dir, result)
    except OSError as problem:  # the training itself is safe
        reporter.say(f"Aviso: no se pudieron guardar las cifras en {args.results_dir!r} ({explain(problem)}).")
        return None
