"""What every training script does between its arguments and the loop: places, precision, memory, sync."""

import ctypes
import math
import os
import platform
import shlex
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

from aura import backend, checkpoint, loop, ops, pace, report, resume, sharding, sync
from aura.checkpointer import Checkpointer, asked, cpu_copy
from aura.diloco import DiLoCo
from aura.ema import Average
from aura.errors import EXIT_SIGNAL_BASE, TrainingFault, UserError, agreed, first_line
from aura.files import hold, require_writable_directory, require_writable_file
from aura.halving import Fp16
from aura.output import other_run, plain_arguments, require_room_beside, versions
from aura.products import Linear
from aura.words import counted

INJECT = "AURA_INJECT_NAN"  # RANK:N[,RANK:N...], N counts micro-batches from 1: a rehearsal of --nan-policy
TIMED_S = 0.05  # of products of each kind, by which their speeds are compared, and 3 at least


def check_places(args, dist, folder=False, description=None):
    """Before anything else is done, prove on all ranks that every place the run writes to can be written, and that no
    other run is using its --checkpoint-dir, its --log-dir or, where it is to hold one model alone, the folder of
    --output. folder: --output names a folder, not a file. description: as output.save_output() takes it.
    Raises UserError."""
    # Rank 0 first: if the run is refused there, the others have made no folders.
    dist.run_on_main(lambda: _check_places(args, dist, folder, description))
    if not dist.main:
        _check_places(args, dist, folder)


def _check_places(args, dist, folder, description=None):
    meant = asked(args.resume, args.checkpoint_dir, dist) if dist.main else "auto"
    if meant not in ("auto", "none") and not os.path.isdir(meant):
        checkpoint.peek(checkpoint.choose(meant, args.checkpoint_dir))  # or the data would be prepared first
    # What one script fills from its output folder is called as the user called it: that one comes first.
    places = {"--output_dir": args.output_dir} if "output_dir" in vars(args) else {}
    places |= {"--checkpoint-dir": args.checkpoint_dir, "--log-dir": args.log_dir,
               "--output": args.output if folder else Path(args.output).parent}
    for flag, place in places.items():
        require_writable_directory(place, flag)
        if dist.main and (flag != "--output" or folder or description):
            hold(place, flag)
    if not folder:
        require_writable_file(args.output, "--output")
        require_room_beside(args, description)
    if Path(args.output).parent.resolve() == Path(args.checkpoint_dir).resolve() \
            and checkpoint.step_of(Path(args.output)) is not None:
        raise UserError(f"--output {args.output!r} tiene el nombre de un punto de control de --checkpoint-dir, que se "
                        "perdería: indique otro")
    if not folder and Path(args.output).suffix not in ("", ".pth", ".pt"):  # what lies beside it is named by the rest
        raise UserError(f"--output {args.output!r}: el nombre debe acabar en .pth o .pt")
    if dist.main and (other := other_run(args, description)):
        fate = "lo reemplazará: para conservar los dos, indique otro --output" if folder else \
            "tomará su lugar: aquel se moverá a una carpeta al lado"
        dist.print(f"Aviso: --output {args.output!r} tiene el modelo de otra ejecución, la de --checkpoint-dir "
                   f"{str(other)!r}, y el de esta {fate}.")


def tune_allocator(device, sparing):
    """On the CPU, keep the memory of large temporaries instead of giving it back after each use: otherwise a step
    spends a good part of its time in page faults (M_MMAP_THRESHOLD and M_TRIM_THRESHOLD, mallopt(3); glibc only).
    sparing: do give it back, at once. Kept, it is so full of gaps that gradient checkpointing would save nothing."""
    if device.type == "cpu" and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        m_trim_threshold, m_mmap_threshold = -1, -3
        libc.mallopt(m_mmap_threshold, 1 << (22 if sparing else 30))
        if not sparing:
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


def require_means(args, dist):
    """Choose what carries out the operations, and refuse an --attention, --precision, --compile or --fsdp that cannot
    work here, before the data take their time; on all ranks. Raises UserError."""
    ops.use(args.attention, dist.device)
    choose_precision(args.precision, dist.device)
    if args.compile:
        _require_compilation(dist.device)
    if dist.sharded:
        sharding.require_nccl(dist)


def _require_compilation(device):
    """Prove with an operation that torch.compile works here: it needs compilers that torch does not bring along."""
    try:
        torch.compile(torch.neg)(torch.zeros(1, device=device))
    except RuntimeError as problem:
        raise UserError(f"--compile: torch.compile no funciona en esta máquina ({first_line(problem)}); instale un "
                        "compilador de C++ (en Debian y Ubuntu, apt install g++ python3-dev), o quite --compile"
                        ) from problem


def agree_precision(args, dist):
    """This rank's Precision; to be called on all of them, after require_means().

    It is that of choose_precision() or, where 'auto' differs between ranks, one that all of them have: gradients that
    are averaged must have been scaled alike. With diloco no gradients are, and each rank keeps its own. Also says where
    another choice than 'auto' would be faster."""
    own = choose_precision(args.precision, dist.device)
    on_cpu = dist.device.type == "cpu"
    pairs = on_cpu and ops.multiplies_bfloat16()
    times = times_as_long(own.dtype) if on_cpu and own.dtype else 1
    names, all_pairs, all_times = zip(*dist.gather_objects((own.name, pairs, times)), strict=True)
    if told := slow_products(own.name, max(all_times)):
        dist.print(told)
    if len(set(names)) == 1 or args.sync == "diloco":
        if args.precision == "auto" and all(all_pairs):
            dist.print("--precision auto: fp32 sin GPU. Aquí el procesador multiplica bfloat16: con --precision bf16 "
                       "cada paso puede tardar la mitad.")
        return own
    common = "fp32" if "fp32" in names else "fp16"
    told = ", ".join(f"{name} en el rango {names.index(name)}" for name in dict.fromkeys(names))
    dist.print(f"--precision auto: no todos los procesos pueden lo mismo ({told}); calculan todos en {common}. Con "
               "--sync diloco cada uno usaría la suya.")
    return loop.Precision(common, dist.device)


def slow_products(name, times):
    """What to tell of a precision whose products take so many times what they take in fp32, or None."""
    if times < 2:
        return None
    return (f"--precision {name}: este procesador multiplica matrices {times:.0f} veces más despacio que en fp32; con "
            "--precision fp32 cada paso tardará mucho menos.")


def times_as_long(dtype):
    """How many times what they take in float32 a product and its gradients take in `dtype` on this CPU: twenty and
    more where it has no AVX-512. On one thread: several, beside other work, wait for each other longer than they
    multiply."""

    def shortest(dtype):
        x, layer = torch.ones(256, 256, dtype=dtype, requires_grad=True), Linear(256, 256, bias=False, dtype=dtype)
        times = []
        while len(times) < 3 or sum(times) < TIMED_S:
            begun = time.perf_counter()
            layer(x).backward(x.detach())
            times.append(time.perf_counter() - begun)
        return min(times)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return shortest(dtype) / shortest(torch.float32)
    finally:
        torch.set_num_threads(threads)


def require_memory(args, config, dist, way_out):
    """Raise UserError when weights, gradients and AdamW's two moments (16 bytes a parameter), cut into dist.shards, and
    what --ema and --sync keep exceed the device. way_out: Spanish for what to ask for instead."""
    more = {"--ema": 4 * bool(args.ema)}
    if dist.world_size > 1 and args.sync in sync.DEVICE_BYTES:
        more[f"--sync {args.sync}"] = sync.DEVICE_BYTES[args.sync]
    what = ", ".join(["pesos, gradientes y optimizador", *(name for name, size in more.items() if size)])
    available = backend.device_memory(dist.device)
    needed = (16 + sum(more.values())) * config.parameters() / dist.shards
    if needed > available:
        raise UserError(f"el modelo pide {needed / 1e9:.1f} GB para {what}, y aquí hay {available / 1e9:.1f} GB: "
                        f"{way_out}")


def require_room(args, config, dist, more=0):
    """Raise UserError when rank 0's disk cannot hold a checkpoint of the model of `config` and `more` bytes; on all
    ranks, after check_places(). Returns its bytes."""
    size = checkpoint.size_of(config.parameters(), args.ema) + more
    dist.run_on_main(lambda: checkpoint.require_room(args.checkpoint_dir, size))
    return size


def make_sync(args, dist, module, trained, steps, loss_fn, precision, batch, unit="tokens"):
    """The sync (see sync.Exact) that the arguments ask for in a run of so many steps, to be called on all ranks.
    trained: what will run forward, the module or torch.compile's of it. batch: a micro-batch of any content, for --sync
    auto to time. unit: Spanish for what loss_fn counts."""
    if not dist.grouped or dist.world_size == 1 or dist.sharded:
        return sync.Exact(dist)
    method = args.sync
    if method == "auto":
        method = "ddp"
        if len(set(dist.machines)) > 1:
            method, lines = pace.found(dist, module, lambda _, batch: loss_fn(trained, batch), batch, precision,
                                       args.grad_accum, args.sync_every, unit)
            for line in lines:
                dist.print(line)
    if method == "diloco":
        lr, momentum = sync.outer_step(args, steps)
        dist.print(f"Sincronización diloco: cada proceso da {args.sync_every} pasos por su cuenta entre dos acuerdos, "
                   f"{max(1, steps // args.sync_every)} en todo el entrenamiento (--sync-lr {lr:.3g} --sync-momentum "
                   f"{momentum:.3g}); se validan y se guardan los pesos acordados.")
        if steps < sync.FEW_AGREEMENTS * args.sync_every:
            dist.print("Con tan pocos acuerdos, los mismos tokens en lotes menores pueden enseñar más: «Lotes "
                       "menores» en docs/wsl2.md.")
        return DiLoCo(dist, module, args.sync_every, lr, momentum)
    if method == "fp16":
        dist.print("Sincronización fp16: los gradientes viajan con la mitad de los bytes.")
        return Fp16(dist, precision)
    return sync.Exact(dist)


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
                raise agreed(TrainingFault, "los pesos no son iguales en todos los procesos aunque el 0 los "
                                                     "ha enviado: la red o una de las máquinas corrompe los datos")
    if not same:
        synced.retreat()
    dist.print_each(f"Sincronización inicial: los mismos pesos en {counted(dist.world_size, 'proceso')}")


def _same_everywhere(dist, module):
    """Whether the weights are bit for bit the same on all ranks."""
    return len(set(dist.gather_objects(checksum(module)))) == 1


def checksum(module):
    """CRC-32 of all weights of a module."""
    total = 0
    for parameter in module.parameters():
        total = zlib.crc32(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy(), total)
    return total


@dataclass
class Ready:
    """What training begins with. model: what runs forward, wrapped. steps, fewer: as resume.length() gives them."""

    model: torch.nn.Module
    run: loop.Run
    steps: int
    fewer: int

    def at_step(self, function):
        """function(step, steps), as a script writes it for a whole run, as the function of the step that loop.train
        calls; the steps are counted as if all had been of today's length (see resume.length())."""
        return lambda step: function(step - self.fewer, self.steps - self.fewer)


def make_checkpointer(args, dist, config, dataset, sha256, vocabulary, names=None, begun_with=None):
    """What saves a run, with what it is about in each checkpoint. dataset: its name. vocabulary: the tokenizer as
    bytes. begun_with: the checksum of the weights of --model or --init-from, None without."""
    constants = {**resume.about(config, vocabulary), "arguments": plain_arguments(args), "begun_with": begun_with,
                 "dataset": {"name": dataset, "sha256": sha256}, "versions": versions()}
    if args.keep_every and (not args.checkpoint_freq or args.keep_every % args.checkpoint_freq):
        both = math.lcm(args.keep_every, args.checkpoint_freq)
        dist.print(f"Aviso: --keep-every {args.keep_every} no es múltiplo de --checkpoint-freq {args.checkpoint_freq}: "
                   f"{f'se conservan los de pasos múltiplos de {both}' if both else 'no se conserva ninguno por él'}.")
    return Checkpointer(args.checkpoint_dir, dist, args.keep_checkpoints, cpu_copy(constants), names=names,
                        keep_every=args.keep_every, background=True)


def make_ready(args, dist, module, optimizer, precision, loader, checkpointer, loss_fn, batch, *, unit="tokens",
               same_data=False):
    """Cut or wrap the module and put back what a checkpoint has of the run, to be called on all ranks; returns a Ready.
    batch, unit: as make_sync takes them. same_data: as resume.restore() takes it."""
    sharding.shard(module, optimizer, dist, precision.dtype)
    average = Average(module, args.ema)
    planned = args.max_steps or args.epochs * loader.steps_per_epoch
    trained = module.compiled() if args.compile else module
    synced = make_sync(args, dist, module, trained, planned, loss_fn, precision, batch, unit)
    more, own = (each.get(synced.method, 0) * module.config.parameters()
                 for each in (sync.FILE_BYTES, sync.OWN_FILE_BYTES))
    size = require_room(args, module.config, dist, more + own) - own
    run = loop.Run(module, optimizer, precision, loader, average, synced)
    resume.restore(args, dist, checkpointer, run, same_data)
    steps, fewer = resume.length(args, dist, loader, run.progress)
    say_if_only_rising(args, dist, steps - fewer)
    freq = args.checkpoint_freq or steps
    due = range(run.progress.step // freq * freq + freq, steps, freq)
    checkpointer.say_if_room_is_short(size, due, steps, own)
    synchronise(dist, module, synced)
    return Ready(synced.wrap(trained), run, steps, fewer)


def group_peak(dist, precision):
    """Peak FLOP/s of all the group's devices (see report.peak_flops), None when one is not known for certain; to be
    called on all ranks."""
    peaks = dist.gather_objects(report.peak_flops(backend.device_name(dist.device), precision.name))
    return None if None in peaks else sum(peaks)


def make_policy(args, steps, micro_tokens, **intervals):
    """The loop.Policy of the arguments in a run of so many steps. intervals: of what the script does besides."""
    return loop.Policy(
        max_steps=steps, micro_tokens=micro_tokens, grad_accum=args.grad_accum, grad_clip=args.grad_clip,
        log_interval=args.log_interval, checkpoint_freq=args.checkpoint_freq, nan_policy=args.nan_policy,
        seed=args.seed, **intervals)


def say_if_only_rising(args, dist, steps):
    """Tell whoever starts a run of so many steps that its learning rate never comes to fall."""
    given = vars(args).get("warmup_steps")  # of one script
    if (round(args.warmup_ratio * steps) if given is None else given) >= max(1, steps - 1):
        named = f"--warmup-ratio {args.warmup_ratio:g}" if given is None else f"--warmup_steps {given}"
        dist.print(f"Aviso: con {named} la tasa de aprendizaje no llega a bajar en {counted(steps, 'paso')}: indique "
                   "un valor menor.")


def say_if_complete(dist, progress, steps):
    """Tell whoever starts a run that has reached its end how to go on."""
    if progress.step >= steps and progress.owed is not None:
        dist.print(f"Todos los pasos están dados, {progress.step} de {steps}: falta hacer la última evaluación "
                   "y guardar los resultados.")
    elif progress.step >= steps:
        asked = f"de {steps}" if progress.step == steps else f"y se piden {steps}"
        dist.print(f"El entrenamiento ya estaba completo: paso {progress.step} {asked}. Para seguir, aumente --epochs "
                   "o --max-steps; para empezar de cero, --resume none.")


def leave_stopped(args, dist, progress, stopped, checkpointer):
    """Say on every machine where a run that the signal `stopped` ended goes on, on all ranks; returns the exit code."""
    dist.barrier()  # the store lives in rank 0's process
    as_before = "resume" not in args.given or args.resume == "auto"
    said = f"Detenido por una señal en el paso {progress.step}; "
    # Of a script whose folders are those of the checkpoint that it is given, 'auto' would look into another one.
    named = f"--resume_from {shlex.quote(str(args.checkpoint_dir))}" if "output_dir" in vars(args) else "--resume auto"
    how = " La misma orden lo reanuda." if as_before else f" Para seguir, la misma orden con {named}."
    dist.print(f"{said}{checkpointer.named()}.{how}")
    if dist.machines and not dist.main and dist.machines.index(dist.machines[dist.rank]) == dist.rank:
        dist.print_each(f"{said}el punto de control lo ha guardado el rango 0.{how}")
    return EXIT_SIGNAL_BASE + stopped


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
