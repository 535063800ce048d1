"""What the language-model scripts share between their arguments and the loop."""

import dataclasses
import math
import os

import numpy as np
import torch

from aura import (
    corpus,
    dataset,
    heartbeat,
    initial,
    loop,
    ops,
    output,
    preparation,
    report,
    resume,
    sampling,
    scaling,
    sharding,
    share,
    start,
    stream,
    tokens,
)
from aura import tokenizer as tokenizers
from aura.checkpointer import collect
from aura.errors import EXIT_OK, UserError
from aura.signals import leaving_it_to_main, orderly_stop
from aura.words import counted

SELDOM = 500  # steps without an end of an epoch, after which a model is validated all the same
STREAM_EVAL_WINDOWS = 4000  # of a stream, whose validation text stays in memory, where --eval-windows gives no limit
SMALLER = "elija un --preset menor, o menos --n-layer, --n-embd o --seq-len"


def refuse_too_large(args, config, dist):
    """Raise UserError where a model of this config is too large for memory or disk with any vocabulary: before the
    data, which decide on that, take their time."""
    smallest = dataclasses.replace(config, vocab_size=0)
    start.require_memory(args, smallest, dist, SMALLER)
    start.require_room(args, smallest, dist)


def load_data(args, dist, config, begun=None):
    """The Dataset named by the arguments, on every machine; it is prepared first where it is missing. config: the
    model's; its vocabulary size is decided by the data. begun: an initial.Beginning, whose tokenizer they get, or
    None."""
    with leaving_it_to_main(dist):
        found = dist.made_on_main(lambda: _find_or_prepare(args, dist, config, begun))
    return share.share_out(dist, found, args.data_dir)


def _find_or_prepare(args, dist, config, begun):
    name, tokenizer = args.dataset_name, begun and begun.tokenizer
    if name is None and not args.prepare:
        last = dataset.latest(args.data_dir)
        if last is not None:
            for flag in ("tokenizer", "val_fraction", "dataset_max_tokens"):
                if flag in args.given:
                    raise UserError(f"--{flag.replace('_', '-')} {getattr(args, flag)} solo sirve al preparar datos: "
                                    "indique también --dataset-name")
            has = last.meta["options"]["vocab_size"], last.vocab_size  # asked for, and what the text was enough for
            if "vocab_size" in args.given and args.vocab_size not in has:
                raise UserError(f"--vocab-size {args.vocab_size} solo sirve al preparar datos, y los últimos tienen "
                                f"{last.vocab_size} piezas: indique también --dataset-name")
            if tokenizer and not tokenizers.same_pieces(last.load_tokenizer().model, tokenizer.model):
                raise UserError(f"los últimos datos preparados, {last.directory.name!r}, tienen otro tokenizador que "
                                f"--init-from {args.init_from!r}: indique --dataset-name, y se prepararán con el suyo")
            dist.print(f"Datos: {last.directory.name!r}, los últimos preparados en {args.data_dir}.")
            last.verify()
            return last
    if name is None:
        name = corpus.SAMPLE_NAME
        dist.print("Datos: la muestra incluida. Para usar un corpus de verdad: --dataset-name wikipedia, o la ruta de "
                   "un .txt o .jsonl.")

    if tokenizer is None and args.tokenizer:
        tokenizer = tokenizers.load(args.tokenizer)
    require_pieces(args, tokenizer)
    text = _open(name, args)

    def accept(tokenizer):
        if not args.prepare:
            planned = dataclasses.replace(config, vocab_size=tokenizer.vocab_size)
            resume.require_same(args, dist, planned, tokenizer.model, begun and begun.checksum)

    made = preparation.prepare(
        text, args.data_dir, vocab_size=args.vocab_size,
        tokenizer=tokenizer, val_fraction=args.val_fraction, max_tokens=args.dataset_max_tokens,
        threads=args.num_workers or None, latest=args.prepare, accept=accept, note=dist.print)
    if args.prepare and made.tokens("train") <= args.seq_len:
        dist.print(f"Aviso: {counted(made.tokens('train'), 'token')} de entrenamiento no llenan una secuencia de "
                   f"{args.seq_len} + 1: añada texto, o entrene con un --seq-len menor.")
    return made


def _open(name, args):
    try:
        return corpus.open_corpus(name, max_tokens=args.dataset_max_tokens)
    except UserError as problem:
        last, gone = dataset.latest(args.data_dir), os.path.abspath(name)
        files = last.meta["source"].get("files", ()) if last and not os.path.exists(name) else ()
        if not any(file == gone or file.startswith(gone + os.sep) for file in files):
            raise
        raise UserError(f"{problem}; o quite --dataset-name: lo que se preparó con él sigue en "
                        f"{str(last.directory)!r}, y se usará") from problem


def require_pieces(args, tokenizer):
    """Raise UserError where --vocab-size was given and is not the size of `tokenizer`, if there is one, that of
    --tokenizer or of --init-from: it alone decides."""
    if tokenizer and "vocab_size" in args.given and tokenizer.vocab_size != args.vocab_size:
        flag, named = ("--tokenizer", args.tokenizer) if args.tokenizer else ("--init-from", args.init_from)
        raise UserError(f"--vocab-size {args.vocab_size}: {flag} {named!r} tiene {tokenizer.vocab_size} piezas; "
                        f"quite --vocab-size, o quite {flag} y se entrenará uno de ese tamaño")


def make_loaders(args, dist, data):
    """(training loader, function that yields the validation batches or None)."""
    if isinstance(data, stream.Streamed):
        return _stream_loaders(args, dist, data)
    data.hold()
    loader = tokens.TokenLoader(
        data.shards("train"), args.seq_len, args.batch_size, vocab_size=data.vocab_size, seed=args.seed, rank=dist.rank,
        world_size=dist.world_size, grad_accum=args.grad_accum, device=dist.device)
    _say_shares(args, dist, f"su parte de cada lote global; {counted(loader.windows, 'secuencia')} y "
                            f"{counted(loader.steps_per_epoch, 'paso')} por época")
    if data.tokens("val") <= args.seq_len:
        dist.print("Aviso: la validación no llega a una secuencia; no habrá pérdida de validación.")
        return loader, None

    def validation():
        data.require_same()  # its files are opened anew each time
        return tokens.evaluation_batches(
            data.shards("val"), args.seq_len, args.batch_size, vocab_size=data.vocab_size, rank=dist.rank,
            world_size=dist.world_size, device=dist.device, limit=args.eval_windows or None)

    return loader, validation


def _say_shares(args, dist, what):
    """Print what makes up a step. what: Spanish for what each process reads of it."""
    batch = args.batch_size * args.grad_accum * dist.world_size
    dist.print(f"Reparto de los datos: {counted(dist.world_size, 'proceso')} x lote {args.batch_size} x "
               f"acumulación {args.grad_accum} = {counted(batch, 'secuencia')} ({batch * args.seq_len} tokens) por "
               f"paso; cada proceso lee {what}.")


def _stream_loaders(args, dist, data):
    tokenizer, validation = data.load_tokenizer(), None
    if data.val_fraction:
        windows = stream.held_out(data.corpus, tokenizer, args.seq_len, dist=dist, val_fraction=data.val_fraction,
                                  limit=args.eval_windows or STREAM_EVAL_WINDOWS)
        if windows is not None:
            places = range(dist.rank * args.batch_size, len(windows), dist.world_size * args.batch_size)

            def validation():
                return (windows[place:place + args.batch_size].to(dist.device) for place in places)

    loader = stream.StreamLoader(
        data.corpus, tokenizer, args.seq_len, args.batch_size, dist=dist, seed=args.seed, grad_accum=args.grad_accum,
        device=dist.device, threads=args.num_workers or torch.get_num_threads(), val_fraction=data.val_fraction)
    _say_shares(args, dist, "sus propios documentos a medida que entrena")
    return loader, validation


def make_evaluate(module, loss_fn, validation, tokenizer, dist, precision):
    """A function that measures val_loss (nats per token) and bits_per_byte over all ranks, and takes the StopRequest
    by which it is abandoned; None without validation.

    Bits per byte = total nats / ln 2 / UTF-8 bytes of the predicted tokens: comparable between tokenizers. Left out
    where the tokenizer does not know those bytes, or there are none.
    """
    if validation is None:
        return None
    known = tokenizer.token_bytes()
    sizes = torch.from_numpy(np.zeros(tokenizer.vocab_size) if known is None else known).to(dist.device)
    idle = torch.zeros(1, 2, dtype=torch.int64, device=dist.device)

    @torch.no_grad()
    def evaluate(request):
        module.eval()
        totals = np.zeros(3)
        for batch in sharding.in_step(validation(), dist, request):
            with precision.autocast():
                loss, count = loss_fn(module, idle if batch is None else batch)
            if batch is not None:
                totals += (loss.item(), count, sizes[batch[:, 1:]].sum().item())
        nats, count, size = dist.sum(totals)
        measured = {"val_loss": nats / count}
        return {**measured, "bits_per_byte": nats / math.log(2) / size} if size else measured

    return evaluate


def make_sample(args, dist, module, tokenizer, reporter, precision):
    """A function that shows a generated text on rank 0, to be called on all, and takes the StopRequest by which that
    ends where it is."""

    def write(step, stopped):
        try:
            text, _ = sampling.write(module, tokenizer, args.sample_prompt, args.sample_length, seed=args.seed,
                                     temperature=0.8, top_k=50, stopped=stopped)
        except UserError as problem:  # what has diverged is for --nan-policy to act on
            reporter.event(step, f"sin muestra: {problem}")
        else:
            reporter.sample(step, text)

    def sample(step, request):
        if not args.sample_length:
            return
        if dist.sharded:  # all ranks write the same text, with weights that are gathered in autocast's dtype
            with sharding.same_output(module), precision.autocast():
                write(step, lambda: dist.sum([bool(request.number)])[0])
        else:
            dist.run_on_main(lambda: write(step, lambda: request.number))

    return sample


def train(args, dist, data, module, optimizer, schedule, loss_fn, *, names=None, table="train.csv", description=None,
          target_hours=None, same_data=False, begin_step=None, measured=None, begun=None):
    """Everything between a built model and its files: loaders, resume, loop, output. Returns the exit code.

    schedule(step, steps) -> learning rate. loss_fn as loop.train wants it. names: a checkpoint.Names. table and
    target_hours: as report.Reporter takes them. description: name of the JSON beside the model. same_data: refuse to go
    on with another data set. begin_step(step, steps): called before each step. measured: as scaling.recorded gives it.
    begun: an initial.Beginning, whose weights the module has; None where they are fresh.
    """
    precision = start.agree_precision(args, dist)
    tokenizer, config = data.load_tokenizer(), module.config
    rehearsed = start.injected(loss_fn, dist)  # a bad value of its variable ends the run before a former log is moved

    def first_weights():
        if begun:
            return initial.weights(args, dist, begun)
        return type(module)(config).init_weights(args.seed).state_dict()

    loader, validation = make_loaders(args, dist, data)
    with loader, heartbeat.beating(args.log_dir, dist) as clock:
        checkpointer = start.make_checkpointer(args, dist, config, data.meta["name"], data.sha256, tokenizer.model,
                                               names, begun and begun.checksum)
        ready = start.make_ready(
            args, dist, module, optimizer, precision, loader, checkpointer, loss_fn,
            torch.randint(data.vocab_size, (args.batch_size, args.seq_len + 1), device=dist.device),
            same_data=same_data)
        run, steps, first = ready.run, ready.steps, ready.run.progress.step
        if not checkpointer.has_any():
            dist.run_on_main(lambda: output.set_own_aside(args, description, dist.print))
        reporter = report.Reporter(args.log_dir, dist.main, steps, config.flops_per_token(),
                                   start.group_peak(dist, precision), name=table, target_hours=target_hours,
                                   **scaling.yardsticks(measured or {}, dist.world_size))
        epoch = loader.steps_per_epoch  # None of a stream, whose end nobody knows
        policy = start.make_policy(args, steps, args.batch_size * args.seq_len, sample_interval=0 if epoch else SELDOM,
                                   eval_interval=args.eval_interval or (0 if epoch and epoch <= SELDOM else SELDOM))
        dist.print(f"Modelo: {config.parameters() / 1e6:.2f} M parámetros; precisión {precision.name}; "
                   f"{ops.describe(dist.device)}.")
        start.say_if_complete(dist, run.progress, steps)
        reporter.start(run.progress.step, run.progress.logged, again=run.progress.owed is not None)
        # Also while the model is handed over, which no signal cuts short.
        with orderly_stop(tells=dist.tells_of_signals):
            try:
                stopped = loop.train(
                    ready.model, run, rehearsed, ready.at_step(schedule), checkpointer, reporter,
                    policy, dist, begin_step=begin_step and ready.at_step(begin_step),
                    evaluate=make_evaluate(module, loss_fn, validation, tokenizer, dist, precision),
                    sample=make_sample(args, dist, module, tokenizer, reporter, precision),
                    reinitialise=lambda: sharding.load_whole(module, first_weights()), clock=clock)
            finally:
                reporter.close()
            if stopped:
                return start.leave_stopped(args, dist, run.progress, stopped, checkpointer)
            with run.as_delivered():
                weights = collect(module.state_dict(), dist)
                learnt = resume.as_learnt(args, run, first, steps)
                dist.run_on_main(lambda: output.save_output(
                    learnt, weights, config, data, tokenizer, run.progress, description, checkpointer.named(),
                    output.used(learnt, dist, precision, optimizer)))
            dist.barrier()
            if dist.grouped:
                dist.print_each("Todos los procesos completaron el entrenamiento")
            return EXIT_OK
