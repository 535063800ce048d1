"""What an order of train_tensordock.py takes of a card and of time: told before anything is prepared, and kept to."""

import torch

from aura import backend, corpus, dataset, ops, plan, recall, report, start, words
from aura.errors import EXIT_SIGNAL_BASE, OutOfMemory, TrainingFault, UserError

BYTES_PER_TOKEN = 4.3  # of Spanish text with 32,000 pieces; El Quijote: 4.36


def find_card(args, device):
    """The plan.Card of this machine, or with --dry-run another one."""
    if args.gpu or args.gpu_gb:
        if not args.dry_run or not args.gpu_gb:
            raise UserError("--gpu y --gpu_gb sirven para planificar con otra GPU: indique --gpu_gb y --dry_run")
        precision = "bf16" if args.precision == "auto" else args.precision
        return plan.imagined_card(args.gpu or f"una GPU de {args.gpu_gb:g} GB", 1e9 * args.gpu_gb, precision)
    return plan.card_of(device, start.choose_precision(args.precision, device).name)


def job_of(args, config, card):
    """What the arguments, once complete, ask of a device."""
    fused = ops.expects_kernels(args.attention, card.type, card.precision, config.n_embd // config.n_head)
    return plan.Job(config, args.batch_size, args.grad_accum, args.grad_checkpointing, card.precision, args.optimizer,
                    card.type, fused, args.ema > 0, saves=True)


def planned_tokens(args):
    """(tokens of training text, whether they are counted) before anything is prepared."""
    if args.dataset_name is None:
        last = dataset.latest(args.data_dir)
        if last is None:
            raise UserError("falta --dataset_path: la ruta de un .txt, un .jsonl o una carpeta, o muestra para el "
                            "texto incluido")
        return last.tokens("train"), True
    text = corpus.open_corpus(args.dataset_name, max_tokens=args.dataset_max_tokens, flag="--dataset_path")
    size = text.text_bytes()
    if size == 0:
        raise UserError(f"--dataset_path {args.dataset_name!r}: está vacío; indique un texto")
    most = args.dataset_max_tokens or (corpus.HUB_DEFAULT_TOKENS if size is None else float("inf"))
    tokens = min(most, (float("inf") if size is None else size) / BYTES_PER_TOKEN)
    return round(tokens * (1 - args.val_fraction)), False


def show(args, config, card, tokens, counted, presets, progress, note):
    """Print the plan for `tokens` tokens of training text, `counted` or estimated, and what is left of it after a
    checkpoint.

    config: the model's. presets: as plan.alternatives() takes them. progress: the checkpoint's Progress, a dict, or
    None. Raises UserError when the model does not fit the card, and when the tokens are too few for a step.
    """
    job = job_of(args, config, card)
    per_epoch = job.steps_per_epoch(tokens)
    if not per_epoch and (counted or args.dry_run):
        whole = words.counted(max(0, tokens - 1) // args.seq_len, "secuencia")
        raise UserError(f"los datos dan {whole} y cada paso usa {args.batch_size * args.grad_accum}: baje "
                        "--batch_size, --gradient_accumulation_steps o --seq_length, o use más texto")
    per_epoch = max(1, per_epoch)  # an estimate may be too low
    steps = args.max_steps or args.epochs * per_epoch
    note(f"Plan para {card.name}, preset {args.preset}:")
    for line in plan.lines(job, card, steps=steps, steps_per_epoch=per_epoch, target_hours=args.target_hours,
                           presets=presets, by_steps=args.max_steps is not None, begun=progress is not None,
                           trained=args.init_from is not None):
        note(line)
    if progress:  # epochs are counted in steps of today's batch
        done = progress["step"] if args.max_steps else progress["tokens"] // job.tokens_per_step
        left = max(0, steps - done)
        time = f", {plan.told(plan.hours(job, left * job.tokens_per_step, card.flops))}" if card.flops else ""
        note(f"Por hacer: {left} de los {steps} pasos{time}")
    if args.gpu and (names := report.cards_like(args.gpu)):
        note(f"--gpu {args.gpu!r}: si es {' o '.join(map(repr, names))}, escriba ese nombre y el plan dirá el tiempo.")
    if plan.peak(job) > card.memory:
        raise UserError(f"el modelo no cabe en {card.name} ({card.memory / 1e9:.1f} GB): "
                        f"{plan.alternatives(job, card.memory, presets, begun=progress is not None)[1]}")
    if not counted:
        note(f"(Los tokens se han estimado a {BYTES_PER_TOKEN} bytes cada uno.)")
    dtype = start.choose_precision(card.precision, torch.device("cpu")).dtype if card.type == "cpu" else None
    if dtype and args.dry_run and (told := start.slow_products(card.precision, start.times_as_long(dtype))):
        note(told)  # a run says so by itself


def run_within(args, dist, run):
    """run() -> exit code, called with a smaller batch and more accumulation in `args` each time that memory is not
    enough, if so asked. Raises TrainingFault where it is not, or nothing is left to be made smaller."""
    while True:
        try:
            return run()
        except (RuntimeError, MemoryError, OutOfMemory) as problem:
            if not isinstance(problem, OutOfMemory) and not backend.out_of_memory(problem):
                raise
            request = getattr(problem, "request", None)
            if request and request.number:
                dist.print(f"Detenido por una señal; {problem}.")
                return EXIT_SIGNAL_BASE + request.number
        used = f"--batch_size {args.batch_size} --gradient_accumulation_steps {args.grad_accum}"
        total = args.batch_size * args.grad_accum
        smaller = [size for size in range(args.batch_size - 1, 0, -1) if total % size == 0]
        if not smaller:
            raise TrainingFault(f"la memoria no basta con {used}: use --gradient_checkpointing full, un --seq_length "
                                "menor o un --model_preset menor (estos dos, si ya hay puntos de control, con otra "
                                "--output_dir)")
        way_out = f"--batch_size {smaller[0]} --gradient_accumulation_steps {total // smaller[0]}"
        if not args.auto_oom:
            raise TrainingFault(f"la memoria no basta con {used}: use {way_out}, que es el mismo lote efectivo, o "
                                "--auto_oom para que lo haga esta orden")
        dist.print(f"La memoria no basta con {used}: se sigue con {way_out}, el mismo lote efectivo.")
        recall.replace(args, "batch_size", smaller[0])
        recall.replace(args, "grad_accum", total // smaller[0])
        backend.release_memory(dist.device)
