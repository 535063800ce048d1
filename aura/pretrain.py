"""What the language-model scripts share between their arguments and the loop."""

import ctypes
import json
import math
import os
import platform
import sys
import zlib
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

import aura
from aura import (
    backend,
    corpus,
    dataset,
    heartbeat,
    loop,
    ops,
    pace,
    report,
    sampling,
    scaling,
    sharding,
    share,
    stream,
    sync,
    tokens,
)
from aura import tokenizer as tokenizers
from aura.checkpoint import Checkpointer, choose, collect, cpu_copy, peek, save_file, state_bytes
from aura.ema import Average
from aura.errors import EXIT_OK, EXIT_SIGNAL_BASE, TrainingFault, UserError
from aura.files import explain, hold, require_writable_directory, write_bytes, write_json

STREAM_EVAL_WINDOWS = 4000  # of a stream, whose validation text is kept in memory, where no limit is given
INJECT = "AURA_INJECT_NAN"  # RANK:N[,RANK:N...], N counts micro-batches from 1: a rehearsal of --nan-policy


def check_places(args, dist, folder=False):
    """Prove that every place a run writes to can be written and that no other run uses its folders of checkpoints and
    tables, before anything else is done. folder: --output is one. Raises UserError."""
    require_writable_directory(args.checkpoint_dir, "--checkpoint-dir")
    if dist.main:
        hold(args.checkpoint_dir, "--checkpoint-dir")
    require_writable_directory(args.log_dir, "--log-dir")
    if dist.main and Path(args.log_dir).resolve() != Path(args.checkpoint_dir).resolve():
        hold(args.log_dir, "--log-dir")
    require_writable_directory(args.output if folder else Path(args.output).parent, "--output")
    if not folder and Path(args.output).is_dir():
        raise UserError(f"--output {args.output!r} es una carpeta: indique el nombre de un fichero")
    if not folder and Path(args.output).suffix not in ("", ".pth", ".pt"):  # what lies beside it is named by the rest
        raise UserError(f"--output {args.output!r}: el nombre debe acabar en .pth o .pt")


def tune_allocator(device):
    """On the CPU, keep large temporaries instead of giving their pages back after each use: a step spends a good part
    of its time in page faults else (M_MMAP_THRESHOLD and M_TRIM_THRESHOLD, mallopt(3); glibc only)."""
    if device.type == "cpu" and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        m_trim_threshold, m_mmap_threshold = -1, -3
        libc.mallopt(m_mmap_threshold, 1 << 30)
        libc.mallopt(m_trim_threshold, 2**31 - 1)


def choose_precision(name, device):
    """The Precision for 'auto', 'bf16', 'fp16' or 'fp32' on this device. Raises UserError for what it cannot do."""
    if name == "auto":
        if device.type == "cpu":
            name = "fp32"
        else:
            name = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    if name == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError("--precision bf16: esta GPU no lo tiene (hace falta una Ampere o posterior); use fp16 o fp32")
    return loop.Precision(name, device)


def require_memory(config, device, shards=1):
    """Raise UserError when weights, gradients and AdamW's two moments (16 bytes a parameter), cut into `shards`, exceed
    the device."""
    if device.type == "cuda":
        available = torch.cuda.get_device_properties(device).total_memory
    else:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else math.inf
    needed = 16 * config.parameters() / shards
    if needed > available:
        raise UserError(f"el modelo pide {needed / 1e9:.1f} GB para pesos, gradientes y optimizador, y aquí hay "
                        f"{available / 1e9:.1f} GB: elija un --preset menor, o menos --n-layer, --n-embd o --seq-len")


def load_data(args, dist):
    """The prepared Dataset named by the arguments, made first where it is missing, on every machine."""
    found = {}

    def on_main():
        found["dataset"] = _find_or_prepare(args, dist)

    dist.run_on_main(on_main)
    return share.share_out(dist, found.get("dataset"), args.data_dir)


def _find_or_prepare(args, dist):
    name = args.dataset_name
    if name is None and not args.prepare:
        last = dataset.latest(args.data_dir)
        if last is not None:
            for flag in ("tokenizer", "val_fraction", "dataset_max_tokens"):
                if flag in args.given:
                    raise UserError(f"--{flag.replace('_', '-')} {getattr(args, flag)} solo sirve al preparar datos: "
                                    "indique también --dataset-name")
            dist.print(f"Datos: {last.meta['name']!r}, los últimos preparados en {args.data_dir}.")
            last.verify()
            return last
    if name is None:
        name = corpus.SAMPLE_NAME
        dist.print("Datos: la muestra incluida. Para usar un corpus de verdad: --dataset-name wikipedia, o la ruta de "
                   "un .txt o .jsonl.")
    return dataset.prepare(
        corpus.open_corpus(name, max_tokens=args.dataset_max_tokens), args.data_dir, vocab_size=args.vocab_size,
        tokenizer_path=args.tokenizer, val_fraction=args.val_fraction, max_tokens=args.dataset_max_tokens,
        threads=args.num_workers or None, note=dist.print)


def recorded(args, note=print):
    """The checkpoint that a run with these arguments goes on from, its tensors still on the disk, or None.

    --resume is left naming it, so that what is loaded later is the same.
    """
    if args.resume == "none":
        return None
    path = choose(args.resume, args.checkpoint_dir, note)
    if path is None:
        return None
    args.resume = str(path)
    state = peek(path)
    if not {"arguments", "config", "dataset"} <= state.keys():
        raise UserError(f"{str(path)!r} no es un punto de control de este proyecto")
    if "output_dir" not in state["arguments"]:
        raise UserError(f"{str(path)!r} es de otro de los scripts: reanúdelo con aquel")
    return state


def recall(args, state, fixed, flag, note):
    """Take from the checkpoint `state` every argument that was not given now. fixed: names that a resumed run cannot
    change. flag(name) -> how the script calls an argument. Raises UserError for a fixed one that was given anew.

    The folders are those of before as well, unless the checkpoint no longer lies where it was written."""
    recorded = state["arguments"]
    given = {name for name in args.given if getattr(args, name) != "auto"}
    asked = {name for name in given if name in recorded and getattr(args, name) != recorded[name]}
    refused = [f"{flag(name)} {getattr(args, name)} (era {recorded[name]})" for name in fixed if name in asked]
    if refused:
        raise UserError(f"{args.resume} no puede seguir con {', '.join(refused)}: quite esas opciones, o empiece de "
                        "cero en otra --output_dir")
    places = {"output_dir", "checkpoint_dir", "log_dir", "data_dir", "output", "resume", "dataset_name"}
    for name in sorted(asked - places):
        note(f"Cambia respecto al punto de control: {flag(name)} {recorded[name]} -> {getattr(args, name)}.")
    moved = Path(recorded["checkpoint_dir"]).resolve() != Path(args.checkpoint_dir).resolve()
    for name in recorded.keys() & vars(args).keys() - (places if moved else {"resume", "dataset_name"}) - given:
        setattr(args, name, recorded[name])
    if "epochs" in given and "max_steps" not in given:
        args.max_steps = None
    if "dataset_name" not in given:
        args.dataset_name = recorded["dataset_name"]


def recorded_data(args, state, note):
    """The prepared Dataset that the checkpoint `state` was trained on, or None when it is no longer there.

    Raises UserError when the arguments name another corpus or tokenizer.
    """
    known = state["dataset"]["sha256"]
    data = next((data for data in dataset.prepared(args.data_dir, note) if data.sha256 == known), None)
    if data is None:
        note(f"Los datos preparados con que se entrenó {args.resume} no están en {args.data_dir}: se preparan de "
             "nuevo.")
        return None
    if "dataset_name" in args.given and not dataset.same_text(
            data, corpus.open_corpus(args.dataset_name, max_tokens=args.dataset_max_tokens)):
        raise UserError(f"--dataset_path {args.dataset_name!r} no es el corpus con que se entrenó {args.resume} "
                        f"({state['dataset']['name']!r}): quite esa opción, o empiece en otra carpeta")
    try:
        data.verify()
    except UserError as problem:
        note(f"Aviso: {problem}. Se preparan de nuevo.")
        return None
    return data


def make_loaders(args, dist, data):
    """(training loader, function that yields the validation batches or None)."""
    if isinstance(data, stream.Streamed):
        return _stream_loaders(args, dist, data)
    loader = tokens.TokenLoader(
        data.shards("train"), args.seq_len, args.batch_size, vocab_size=data.vocab_size, seed=args.seed, rank=dist.rank,
        world_size=dist.world_size, grad_accum=args.grad_accum, device=dist.device)
    batch = args.batch_size * args.grad_accum * dist.world_size
    dist.print(f"Reparto de los datos: {_processes(dist)} x lote {args.batch_size} x acumulación "
               f"{args.grad_accum} = {batch} secuencias ({batch * args.seq_len} tokens) por paso; cada proceso lee su "
               f"parte de cada lote global; {loader.windows} secuencias y {loader.steps_per_epoch} pasos por época.")
    if data.tokens("val") <= args.seq_len:
        dist.print("Aviso: la validación no llega a una secuencia; no habrá pérdida de validación.")
        return loader, None

    def validation():
        data.require_same()  # its files are opened anew each time
        return tokens.evaluation_batches(
            data.shards("val"), args.seq_len, args.batch_size, vocab_size=data.vocab_size, rank=dist.rank,
            world_size=dist.world_size, device=dist.device, limit=args.eval_windows or None)

    return loader, validation


def _processes(dist):
    return f"{dist.world_size} proceso{'s' * (dist.world_size > 1)}"


def _stream_loaders(args, dist, data):
    tokenizer, validation = data.load_tokenizer(), None
    if data.val_fraction:
        windows = stream.held_out(data.corpus, tokenizer, args.seq_len, dist=dist, val_fraction=data.val_fraction,
                                  limit=args.eval_windows or STREAM_EVAL_WINDOWS)
        if windows is not None:
            starts = range(dist.rank * args.batch_size, len(windows), dist.world_size * args.batch_size)

            def validation():
                return (windows[start:start + args.batch_size].to(dist.device) for start in starts)

    loader = stream.StreamLoader(
        data.corpus, tokenizer, args.seq_len, args.batch_size, dist=dist, seed=args.seed, grad_accum=args.grad_accum,
        device=dist.device, threads=args.num_workers or torch.get_num_threads(), val_fraction=data.val_fraction)
    batch = args.batch_size * args.grad_accum * dist.world_size
    dist.print(f"Reparto de los datos: {_processes(dist)} x lote {args.batch_size} x acumulación "
               f"{args.grad_accum} = {batch} secuencias ({batch * args.seq_len} tokens) por paso; cada proceso lee sus "
               "propios documentos según entrena.")
    return loader, validation


def make_evaluate(module, loss_fn, validation, tokenizer, dist, precision):
    """A function that measures val_loss (nats per token) and bits_per_byte over all ranks; None without validation.

    Bits per byte = total nats / ln 2 / UTF-8 bytes of the predicted tokens: comparable between tokenizers. Left out
    where the tokenizer does not know those.
    """
    if validation is None:
        return None
    known = tokenizer.token_bytes()
    sizes = torch.from_numpy(np.zeros(tokenizer.vocab_size) if known is None else known).to(dist.device)
    idle = torch.zeros(1, 2, dtype=torch.int64, device=dist.device)

    @torch.no_grad()
    def evaluate():
        module.eval()
        totals = np.zeros(3)
        for batch in in_step(validation(), dist):
            with precision.autocast():
                loss, count = loss_fn(module, idle if batch is None else batch)
            if batch is not None:
                totals += (loss.item(), count, sizes[batch[:, 1:]].sum().item())
        nats, count, size = dist.sum(totals)
        measured = {"val_loss": nats / count}
        return measured if known is None else {**measured, "bits_per_byte": nats / math.log(2) / size}

    return evaluate


def in_step(batches, dist):
    """Yield `batches`; where a forward pass takes all ranks, as many of them on each: None where a rank has no more."""
    if not dist.sharded:
        yield from batches
        return
    batches = iter(batches)
    while True:
        batch = next(batches, None)
        if not dist.sum([batch is not None])[0]:
            return
        yield batch


def make_sample(args, dist, module, tokenizer, reporter, precision):
    """A function that shows a generated text on rank 0, to be called on all."""
    prompt = tokenizer.encode(args.sample_prompt) or [tokenizer.eos_id]

    def write(step):
        ids = sampling.generate(module, prompt, args.sample_length, eos_id=tokenizer.eos_id, seed=args.seed,
                                temperature=0.8, top_k=50)
        reporter.sample(step, args.sample_prompt + tokenizer.decode(ids))

    def sample(step):
        if not args.sample_length:
            return
        if dist.sharded:  # all ranks write the same text, with weights that are gathered in autocast's dtype
            with sharding.same_output(module), precision.autocast():
                write(step)
        else:
            dist.run_on_main(lambda: write(step))

    return sample


def plain_arguments(args):
    """The arguments that are plain values, as a dict."""
    return {key: value for key, value in vars(args).items() if isinstance(value, str | int | float | bool | None)}


def versions():
    """What a file written now depends on."""
    return {"aura": aura.__version__, "torch": torch.__version__.split("+")[0], "python": platform.python_version()}


def constants(args, config, data, tokenizer):
    """What every checkpoint of a run carries besides its state."""
    return cpu_copy({
        "config": asdict(config), "arguments": plain_arguments(args),
        "dataset": {"name": data.meta["name"], "sha256": data.sha256},
        "tokenizer": torch.frombuffer(bytearray(tokenizer.model), dtype=torch.uint8),
        "versions": versions()})


def resume(args, dist, checkpointer, module, optimizer, precision, loader, strict=False, average=None, synced=None):
    """Put back the newest checkpoint (--resume auto), a given one, or none; returns the Progress to go on from.

    Raises UserError when it belongs to another model or tokenizer. Another data set begins at its first sample or, when
    strict, is refused as well.
    """
    asked, state = dist.run_on_main(lambda: checkpointer.asked(args.resume)), None
    if asked != "none":
        state = checkpointer.load(asked, sharding.own_part(module, optimizer), synced and synced.setting)
    if state is None:
        if asked == "none":
            checkpointer.start_fresh()
        checkpointer.sign(synced and synced.origin)
        checkpointer.begin(asked)
        return loop.Progress()
    _require_same(state, checkpointer)
    same_data = state["dataset"]["sha256"] == checkpointer.constants["dataset"]["sha256"]
    if strict and not same_data:
        raise UserError(f"{checkpointer.last} se entrenó con otros datos ({state['dataset']['name']!r}): indique "
                        "aquellos, o empiece de cero en otra carpeta")
    checkpointer.branch_off()
    checkpointer.begin(asked)
    progress = loop.restore(state, module, optimizer, precision, loader if same_data else None, average, synced)
    if asked != "auto" and synced and synced.origin:  # what others hold of the way that was left is not this run's
        synced.origin = sync.name_run(dist)
    checkpointer.sign(synced and synced.origin)
    if not same_data:
        progress.epoch_loss, progress.epoch_tokens = 0.0, 0
    dist.print(f"Se reanuda en el paso {progress.step} desde {checkpointer.last}.")
    if synced and synced.setting and "own" not in state:
        dist.print("Cada proceso parte de los pesos acordados: los procesos o --sync no son los de antes, o falta lo "
                   "que guardó alguno.")
    if not same_data:
        dist.print(f"Los datos son otros (antes {state['dataset']['name']!r}): se empieza por su principio.")
    return progress


def length(args, dist, loader, progress):
    """(steps of the whole run, how many fewer of today's would have come as far): where --epochs says how long it is,
    steps that took more or less data, on another number of processes, count as what they have seen of it, and those
    with other data as none. The schedule is that of a run of today's steps, at the step that many fewer."""
    if args.max_steps:
        return args.max_steps, 0
    whole, left = args.epochs * loader.steps_per_epoch, loader.steps_left(args.epochs)
    fewer = progress.step - (whole - left)
    if fewer:
        dist.print("Antes cada paso llevaba otros datos u otra cantidad: lo ya visto equivale a "
                   f"{whole - left} de los {whole} pasos de ahora, y faltan {left}.")
    return whole + fewer, fewer


def _require_same(state, checkpointer):
    way_out = "use las mismas opciones, otra --checkpoint-dir, o --resume none para empezar de cero"
    try:
        theirs, ours = state["config"], checkpointer.constants["config"]
        differing = [f"{key}={theirs.get(key)} (ahora {value})" for key, value in ours.items()
                     if theirs.get(key) != value and key not in ("dropout", "attention_dropout")]
        if differing:
            raise UserError(f"{checkpointer.last} es de otro modelo: {', '.join(differing)}; {way_out}")
        theirs, ours = (each["tokenizer"].numpy().tobytes() for each in (state, checkpointer.constants))
        if not tokenizers.same_pieces(theirs, ours):
            raise UserError(f"{checkpointer.last} se entrenó con otro tokenizador; {way_out}")
    except KeyError as problem:
        raise UserError(f"{checkpointer.last} no es un punto de control de este proyecto (le falta {problem})"
                        ) from problem


def make_sync(args, dist, module, steps, loss_fn, precision, batch, unit="tokens"):
    """The sync.Exact or diloco.DiLoCo that the arguments ask for in a run of so many steps, to be called on all ranks.
    batch: a micro-batch of any content, for --sync auto to time. unit: Spanish for what loss_fn counts."""
    return sync.make(args, dist, module, steps, lambda: pace.found(dist, module, loss_fn, batch, precision,
                                                                   args.grad_accum, args.sync_every, unit))


def synchronise(dist, module, synced):
    """Let all processes begin with the same agreed weights, rank 0's where they differ, and say so, one line a rank."""
    if not dist.grouped:
        return
    if dist.sharded:
        dist.print_each(f"Sincronización inicial: una de las {dist.shards} partes de los pesos del proceso 0")
        return
    with synced.agreed():
        same = _same_everywhere(dist, module)
        if not same:  # the same seed gives other numbers on other processors
            dist.broadcast_weights(module)
            if not _same_everywhere(dist, module):
                raise sharding.agreed(TrainingFault, "los pesos no son iguales en todos los procesos aunque el 0 los "
                                                     "ha enviado: la red o una de las máquinas corrompe los datos")
    if not same:
        synced.retreat()
    dist.print_each(f"Sincronización inicial: los mismos pesos en {dist.world_size} procesos")


def _same_everywhere(dist, module):
    """Whether the weights are bit for bit the same on all ranks."""
    total = 0
    for parameter in module.parameters():
        total = zlib.crc32(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy(), total)
    return len(set(dist.gather_objects(total))) == 1


def train(args, dist, data, config, module, optimizer, schedule, loss_fn, *, names=None, table="train.csv",
          description=None, target_hours=None, same_data=False, begin_step=None,
          measured=None):
    """Everything between a built model and its files: loaders, resume, loop, output. Returns the exit code.

    schedule(step, steps) -> learning rate. loss_fn as loop.train wants it. names: a checkpoint.Names. table and
    target_hours: as report.Reporter takes them. description: name of the JSON beside the model. same_data: refuse to go
    on with another data set. begin_step(step, steps): called before each step. measured: as scaling.recorded gives it.
    """
    precision = choose_precision(args.precision, dist.device)
    tokenizer = data.load_tokenizer()
    loader, validation = make_loaders(args, dist, data)
    with loader, heartbeat.beating(args.log_dir, dist) as clock:
        steps = args.max_steps or args.epochs * loader.steps_per_epoch
        checkpointer = Checkpointer(args.checkpoint_dir, dist, args.keep_checkpoints,
                                    constants(args, config, data, tokenizer), names=names,
                                    keep_every=args.keep_every, background=True)
        checkpointer.require_room(state_bytes(module, 3 if args.ema else 2))
        dist.shard(module, optimizer, precision.dtype)
        average = Average(module, args.ema)
        synced = make_sync(args, dist, module, steps, loss_fn, precision,
                           torch.randint(data.vocab_size, (args.batch_size, args.seq_len + 1), device=dist.device))
        progress = resume(args, dist, checkpointer, module, optimizer, precision, loader, same_data, average, synced)
        steps, fewer = length(args, dist, loader, progress)
        synchronise(dist, module, synced)
        model = synced.wrap(module.compiled() if args.compile else module)
        peak = report.peak_flops(backend.device_name(dist.device), precision.name)
        reporter = report.Reporter(args.log_dir, dist.main, steps, config.flops_per_token(),
                                   peak and peak * dist.world_size, name=table, target_hours=target_hours,
                                   **scaling.yardsticks(measured or {}, dist.world_size))
        policy = loop.Policy(
            max_steps=steps, micro_tokens=args.batch_size * args.seq_len, grad_accum=args.grad_accum,
            grad_clip=args.grad_clip, log_interval=args.log_interval, sample_interval=loader.steps_per_epoch or 500,
            eval_interval=args.eval_interval or min(loader.steps_per_epoch or 500, 500),
            checkpoint_freq=args.checkpoint_freq, nan_policy=args.nan_policy, seed=args.seed)
        dist.print(f"Modelo: {config.parameters() / 1e6:.2f} M parámetros; precisión {precision.name}; "
                   f"{ops.describe(dist.device)}.")
        if progress.step >= steps:
            dist.print(f"El entrenamiento ya estaba completo: paso {progress.step} de {steps}. Para seguir, aumente "
                       "--epochs o --max-steps; para empezar de cero, --resume none.")
        reporter.start(progress.step)
        try:
            progress, stopped = loop.train(
                model, injected(loss_fn, dist), loader, optimizer,
                lambda step: schedule(step - fewer, steps - fewer), checkpointer, reporter, policy, dist,
                precision, sync=synced, progress=progress, average=average,
                begin_step=begin_step and (lambda step: begin_step(step - fewer, steps - fewer)),
                evaluate=make_evaluate(module, loss_fn, validation, tokenizer, dist, precision),
                sample=make_sample(args, dist, module, tokenizer, reporter, precision),
                reinitialise=lambda: sharding.load_whole(
                    module, type(module)(config).init_weights(args.seed).state_dict()), clock=clock)
        finally:
            reporter.close()
        if stopped and progress.step < steps:
            dist.run_on_main(lambda: None)  # torchrun kills who still saves 30 s after the first process has left
            dist.barrier()  # the store lives in rank 0's process
            dist.print(f"Detenido por una señal en el paso {progress.step}; {checkpointer.named()}. {way_on(args)}")
            return EXIT_SIGNAL_BASE + stopped
        with synced.agreed(), average.applied():
            weights = collect(module.state_dict(), dist)
            dist.run_on_main(lambda: save_output(args, weights, config, data, tokenizer, progress, description,
                                                 checkpointer.named()))
        dist.barrier()
        if dist.grouped:
            dist.print_each("Todos los procesos completaron el entrenamiento")
        return EXIT_OK


def way_on(args):
    """How to go on with a run that was stopped."""
    as_before = "resume" not in args.given or args.resume == "auto"
    return "La misma orden lo reanuda." if as_before else "Para seguir, la misma orden con --resume auto."


def injected(loss_fn, dist):
    """loss_fn, or one that gives NaN on the rank and at the call the environment names, for rehearsals."""
    text = os.environ.get(INJECT)
    if not text:
        return loss_fn
    try:
        wanted = [tuple(map(int, pair.split(":"))) for pair in text.split(",")]
        mine = {call for rank, call in wanted if rank == dist.rank}
    except ValueError as problem:
        raise UserError(f"{INJECT}={text!r}: se espera RANGO:MICROLOTE, o varios separados por comas") from problem
    calls = 0

    def spoiled(model, batch):
        nonlocal calls
        calls += 1
        loss, count = loss_fn(model, batch)
        return (loss * math.nan if calls in mine else loss), count

    return spoiled


def save_output(args, weights, config, data, tokenizer, progress, description, named):
    """Write the weights to --output and, beside them, what another program needs: configuration and tokenizer.

    model.pth -> model.json, model.tokenizer.model (or .json); in a folder of one model, `description` and
    tokenizer.model. named: the checkpoint to go on from. Raises TrainingFault when the disk refuses.
    """
    path = Path(args.output)
    beside, vocabulary = path.with_suffix(".json"), path.with_suffix(f".{tokenizer.file_name}")
    if description:
        beside, vocabulary = path.with_name(description), path.with_name(tokenizer.file_name)
    try:
        save_file(path, weights)
        write_bytes(vocabulary, tokenizer.model)
        write_json(beside, {
            "architecture": type(config).__name__.removesuffix("Config"), "config": asdict(config),
            "steps": progress.step, "tokens": progress.tokens,
            "dataset": data.meta["name"], "dataset_sha256": data.sha256,
            "tokenizer": vocabulary.name, "tokenizer_sha256": tokenizer.sha256,
            "parameters": config.parameters(), "arguments": plain_arguments(args), "command": sys.argv})
    except OSError as problem:
        raise TrainingFault(f"no se pudo guardar {str(path)!r}: {explain(problem)}; corríjalo y repita la misma orden, "
                            f"que lo guardará; {named}") from problem
    print(f"Modelo guardado en {path}, con {beside.name} y {vocabulary.name}.")
    print(f"Pruébelo: python -m aura.generate --checkpoint {path} --prompt \"En un lugar\"")


def read_output(path):
    """(config dict, weights dict, tokenizer) from a saved model or a checkpoint. Raises UserError naming the file."""
    from aura.checkpoint import read

    path = Path(path)
    if not path.is_file():
        raise UserError(f"--checkpoint {str(path)!r}: no existe; indique un modelo (gpt2_spanish.pth, "
                        "final_model.pt) o un punto de control")
    state = read(path)
    if isinstance(state.get("config"), dict):
        if missing := [name for name in ("model", "tokenizer") if name not in state]:
            raise UserError(f"--checkpoint {str(path)!r} no es un punto de control de este proyecto: le falta "
                            f"{', '.join(missing)}")
        weights = {**state["model"], **state.get("ema", {})}
        return state["config"], weights, tokenizers.from_bytes(state["tokenizer"].numpy().tobytes())
    beside = path.with_suffix(".json")
    if not beside.exists():
        beside = path.with_name("model_config.json")
    try:
        description = json.loads(beside.read_text(encoding="utf-8"))
        return description["config"], state, tokenizers.load(path.with_name(description["tokenizer"]), "--checkpoint")
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise UserError(f"falta {beside.name!r} junto a {str(path)!r}, o está dañado: cópielo también, con el "
                        "tokenizador") from problem
