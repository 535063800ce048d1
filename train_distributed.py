"""Fine-tune BERT on SQuAD v1.1, on one process or on several SLURM nodes, with DDP or FSDP.

    python train_distributed.py --model random:tiny --dataset muestra        # no download, two CPU cores, a minute
    python train_distributed.py                                              # bert-base-uncased and SQuAD from the Hub
    torchrun --nproc_per_node=2 train_distributed.py --strategy fsdp --dataset squad/ --model modelos/bert
    python train_distributed.py --model bert_squad --dataset mis_preguntas.json --max-steps 0     # own questions
    sbatch --nodes=2 distributed.slurm --strategy ddp --dataset squad/
    python -m aura.compare results/                                          # a row for each strategy and size

Checkpoints, logs and results go to ./checkpoints, ./logs and ./results; the same command goes on where it was stopped.
Exit codes: 0 done, 2 bad input, 3 a fault in training, 128 + signal after an orderly stop.
"""

import hashlib
import json
import os
import shlex
from dataclasses import replace
from pathlib import Path

from aura import (
    cli,
    distributed,
    finetune,
    heartbeat,
    loop,
    ops,
    optim,
    output,
    pretrained,
    products,
    results,
    resume,
    scoring,
    sharding,
    spans,
    squad,
    start,
    wordpiece,
)
from aura.errors import EXIT_OK, UserError, found_by_all
from aura.files import require_writable_directory
from aura.models import bert
from aura.signals import orderly_stop
from aura.words import counted

RANDOM = tuple(f"random:{name}" for name in bert.PRESETS)
CHOICE_SEED = 0  # which questions are used does not change with --seed, so that runs of several seeds compare


def build_parser():
    """The arguments of this script."""
    parser = cli.Parser(prog="train_distributed.py", description="Ajusta BERT a SQuAD v1.1, con DDP o FSDP.")
    model = parser.add_argument_group("modelo")
    model.add_argument("--model", type=cli.path, default="bert-base-uncased", metavar="CARPETA|NOMBRE",
                       help=f"carpeta con {pretrained.HELD}; un nombre del Hub (con @revisión detrás, esa "
                            f"revisión), o pesos al azar: {', '.join(RANDOM)}")
    model.add_argument("--dropout", type=cli.number(float, low=0, high=0.99), metavar="P",
                       help="fracción de activaciones que se anula (por defecto, la del modelo)")
    model.add_argument("--grad-checkpointing", action="store_true",
                       help="recalcula las activaciones en la pasada hacia atrás: menos memoria, más cálculo")
    data = parser.add_argument_group("datos")
    data.add_argument("--dataset", type=cli.path, default="squad", metavar="RUTA|NOMBRE",
                      help="un .json de SQuAD v1.1, un .jsonl con una pregunta por línea, una carpeta con train*.json "
                           "y dev*.json, muestra (incluida), o un nombre del Hub")
    data.add_argument("--max-train-examples", type=cli.number(int, low=0), default=10_000, metavar="N",
                      help="preguntas para entrenar; 0: todas")
    data.add_argument("--max-val-examples", type=cli.number(int, low=0), default=500, metavar="N",
                      help="preguntas para validar; 0: todas, como con --max-steps 0 si no se indica")
    data.add_argument("--max-len", type=cli.number(int, low=16), default=384, help="tokens de una ventana, como mucho")
    data.add_argument("--doc-stride", type=cli.number(int, low=1), default=128, metavar="TOKENS",
                      help="cuánto avanza cada ventana respecto a la anterior, en un contexto largo")
    data.add_argument("--question-len", type=cli.number(int, low=1), default=64, metavar="TOKENS",
                      help="cuántos tokens de la pregunta se conservan, como mucho")
    data.add_argument("--padding", type=cli.choice(*results.PADDINGS), default="dynamic",
                      help="dynamic: lotes de longitudes parecidas, rellenos hasta la mayor; fixed: orden al azar, "
                           "rellenos hasta --max-len")
    cli.add_training(parser, untrained="no entrena; puntúa --model con las preguntas de validación o, si no vienen "
                                       "aparte, con todas")
    cli.add_logging(parser, validated="cada época")
    cli.add_checkpoints(parser, output="./bert_squad", handed="carpeta del modelo final, con sus respuestas; "
                        f"con --max-steps 0, solo de estas, y si no se indica {scoring.DEFAULTS['output']}")
    parser.add_argument("--results-dir", type=cli.path, default="./results",
                        help="donde cada ejecución deja sus cifras, que python -m aura.compare compara")
    cli.add_distributed(parser, strategy=True)
    parser.set_defaults(epochs=4, batch_size=4, grad_accum=1, lr=3e-5, min_lr_ratio=0.0, weight_decay=0.01,
                        warmup_ratio=0.1)
    return parser


@found_by_all
def check_arguments(args):
    """Raise UserError for windows that leave parts of a context unread, a model that is lost, a --resume in vain."""
    if args.max_steps == 0 and args.resume not in ("auto", "none"):
        raise UserError(f"--resume {args.resume!r} con --max-steps 0: se puntúa --model, no un punto de control; quite "
                        "--resume, e indique en --model la carpeta de un modelo, como ./checkpoints/best")
    handed = os.path.realpath(args.output)  # Path.resolve() raises RuntimeError where links lead in a circle
    if handed == os.path.realpath(args.model):
        raise UserError(f"--output {args.output!r} es la carpeta de --model, y se reemplazaría lo que contiene: "
                        "indique otra --output")
    if handed == os.path.realpath(Path(args.checkpoint_dir, "best")):
        raise UserError(f"--output {args.output!r} es donde se guarda el mejor modelo por pérdida de validación, y se "
                        "perdería: indique otra --output")
    room = args.max_len - args.question_len - 3  # [CLS] question [SEP] context [SEP]
    sizes = f"--max-len {args.max_len} con --question-len {args.question_len}"
    if room < 1:
        raise UserError(f"{sizes} no deja sitio al contexto en una ventana: aumente la una o reduzca la otra")
    if args.doc_stride > room:
        raise UserError(f"{sizes} deja {room} tokens de contexto en una ventana, y --doc-stride {args.doc_stride} se "
                        f"saltaría texto: use --doc-stride {room} o menos")


def read_task(args, dist):
    """The finetune.Task of the arguments, read from files or the Hub; on rank 0."""
    train, validation, problems = squad.open_data(args.dataset, unanswered=args.max_steps == 0)
    for line in problems.lines():
        dist.print(f"Aviso: {line}")
    found, told = len(train) + len(validation or ()), ""
    if args.max_steps == 0:
        train, validation = [], validation or train
        found, told = len(validation), " Con --max-steps 0 no se entrena: no se aparta ninguna."
        if asked := sum(not example.answers for example in validation):
            told += f" Sin respuesta con que comparar, y sin puntuar: {counted(asked, 'pregunta')}."
    elif validation is None:
        train, validation = squad.split(train, args.max_val_examples or len(train) // 10, CHOICE_SEED, problems)
        told = " Las de validar se han sacado de las de entrenar, por párrafos enteros."
    train, validation = (squad.some(examples, limit, CHOICE_SEED) for examples, limit in (
        (train, args.max_train_examples), (validation, args.max_val_examples)))
    if left := found - len(train) - len(validation):
        told += (f" Sin usar, ni en unas ni en otras: {counted(left, 'pregunta')} (cuántas se usan lo dicen "
                 "--max-train-examples y --max-val-examples).")
    tokenizer, module, checksum = read_model(args, train or validation, dist)
    if args.max_len > module.config.seq_len:
        raise UserError(f"--max-len {args.max_len}: el modelo solo tiene {module.config.seq_len} posiciones; indique "
                        f"--max-len {module.config.seq_len} o menos")
    windows = [spans.features(examples, tokenizer, args.max_len, args.doc_stride, args.question_len)
               for examples in (train, validation)]
    lengths = windows[0 if train else 1].lengths
    dist.print(f"Datos: {counted(len(train), 'pregunta')} para entrenar, en {counted(len(windows[0]), 'ventana')}, y "
               f"{len(validation)} para validar, en {len(windows[1])}; de {lengths.mean():.0f} tokens de media, "
               f"{lengths.max()} como mucho.{told}")
    # Figures compare where the right answers are the same as well: those of validation as they are compared, as text.
    trained, ends = windows[0].ids.tobytes() + windows[0].start.tobytes(), windows[0].end.tobytes()
    validated = windows[1].ids.tobytes() + json.dumps([each.answers for each in validation]).encode()
    digests = (hashlib.sha256(part).hexdigest() for part in (trained + ends + validated, trained, validated))
    vocabulary = "".join(f"{piece}\n" for piece in tokenizer.vocab).encode()
    return finetune.Task(module.config, vocabulary, tokenizer.lowercase, tokenizer.strip_accents, tokenizer.pad_id,
                         Path(args.dataset).name, *digests, len(train), *windows, checksum, module, validation)


def read_model(args, examples, dist):
    """(WordPiece, QuestionAnswering with its weights, their checksum) of --model. Random weights learn their vocabulary
    from the questions they will train on, or are scored with, and have no checksum."""
    if args.model in RANDOM:
        folder, config = None, bert.PRESETS[args.model.partition(":")[2]]
        texts = (text for example in examples for text in (example.question, example.context))
        tokenizer = wordpiece.WordPiece(wordpiece.learn(texts, config.vocab_size))
    elif args.model.startswith("random:"):
        raise UserError(f"--model {args.model!r}: al azar hay {', '.join(RANDOM)}")
    else:
        folder = pretrained.find(args.model, dist.print)
        config, tokenizer = pretrained.read_config(folder), wordpiece.load(folder)
        if tokenizer.vocab_size > config.vocab_size:
            raise UserError(f"--model {args.model!r}: su vocabulario tiene {tokenizer.vocab_size} piezas, y el modelo "
                            f"{config.vocab_size}")
    if args.dropout is not None:
        config = replace(config, dropout=args.dropout, attention_dropout=args.dropout)
    module = bert.QuestionAnswering(config).init_weights(args.seed)
    if folder is None:
        return tokenizer, module, None
    dist.print(f"Pesos de {folder}: {pretrained.load_weights(module, folder / pretrained.WEIGHTS)}.")
    return tokenizer, module, start.checksum(module.bert)  # without the head, which may be fresh


def answer_loss(model, batch):
    """Summed loss of where the answers begin and end. batch: of finetune.collate. Returns (loss in nats, windows)."""
    tokens, types, lengths, positions = batch
    return model(tokens, types, lengths, positions), len(tokens)


def build(args, dist, task):
    """The QuestionAnswering, the same on all ranks; cut later where the weights are sharded."""
    module = dist.build(lambda: task.module or bert.QuestionAnswering(task.config), lambda model: model)
    if not dist.sharded:
        dist.broadcast_weights(module)
    if args.padding == "dynamic":
        products.batches_vary(module)
    return module


def train(args, dist, task, clock):
    """Cut or wrap the model, train, evaluate, leave model and figures; returns the exit code. clock: for loop.train."""
    precision = start.agree_precision(args, dist)
    start.require_memory(args, task.config, dist,
                         "elija un --model menor, o reparta el modelo con --strategy fsdp")
    module = build(args, dist, task)
    module.bert.grad_checkpointing = args.grad_checkpointing
    weights = None  # to begin again after a NaN
    if dist.main:
        weights = {name: tensor.to("cpu", copy=True) for name, tensor in module.state_dict().items()}
    optimizer = optim.adamw(module, args.lr, args.weight_decay, betas=(0.9, 0.999))
    rehearsed = start.injected(answer_loss, dist)
    loader = finetune.make_loader(args, dist, task)
    checkpointer = start.make_checkpointer(args, dist, task.config, task.dataset, task.train_sha256, task.vocabulary,
                                           begun_with=task.checksum)
    ready = start.make_ready(args, dist, module, optimizer, precision, loader, checkpointer, answer_loss,
                             finetune.any_batch(args, dist, task), unit="muestras")
    run, steps, first = ready.run, ready.steps, ready.run.progress.step
    evaluation = finetune.Evaluation(args, dist, task, module, precision, first, clock)
    reporter = finetune.make_reporter(args, dist, task, steps, precision)
    policy = start.make_policy(args, steps, args.batch_size, eval_interval=args.eval_interval or 0)
    strategy = finetune.strategy(dist, run.sync)
    dist.print(f"Modelo: {task.config.parameters() / 1e6:.2f} M parámetros; "
               f"{'un proceso' if strategy == 'none' else f'estrategia {strategy}'}; precisión "
               f"{precision.name}; {ops.describe(dist.device)}. {counted(steps, 'paso')}, "
               f"{loader.steps_per_epoch} por época.")
    start.say_if_complete(dist, run.progress, steps)

    def schedule(step, steps):
        return optim.warmup_linear(step, steps=steps, warmup_steps=round(args.warmup_ratio * steps), lr=args.lr,
                                   min_lr=args.min_lr_ratio * args.lr)

    reporter.start(first, run.progress.logged, again=run.progress.owed is not None)
    # Also while model and figures are written, which no signal cuts short.
    with orderly_stop(tells=dist.tells_of_signals) as request:
        try:
            stopped = loop.train(
                ready.model, run, rehearsed, ready.at_step(schedule), checkpointer, reporter,
                policy, dist, evaluate=evaluation,
                reinitialise=lambda: sharding.load_whole(module, dist.broadcast_tree(weights)), clock=clock)
        finally:
            reporter.close()
        if not stopped:
            learnt = resume.as_learnt(args, run, first, steps)
            stopped = finish(learnt, dist, task, run, evaluation, request, checkpointer)
        path = finetune.record(args, dist, task, ready, answer_loss, reporter, evaluation.metrics, first=first,
                               stopped=stopped, request=request)
        if path:
            dist.print(f"Cifras de esta ejecución: {path}")
        if stopped:
            return start.leave_stopped(args, dist, run.progress, stopped, checkpointer)
        dist.barrier()
        return EXIT_OK


def finish(args, dist, task, run, evaluation, request, checkpointer):
    """Score what was trained, unless the last step did, and leave it in --output; returns the signal, heard by
    `request`, that ended the scoring, or 0."""
    with run.as_delivered():
        if not evaluation.metrics and (asked := loop.evaluate_unless_stopped(evaluation, request, dist)[1]):
            return asked
        metrics = evaluation.metrics
        described = {**metrics, "arguments": output.plain_arguments(args)}  # for output.other_run
        finetune.save_model(args.output, dist, task, run.module, described, evaluation.answers,
                            checkpointer.named())
    dist.print(f"Al final: {finetune.in_words(metrics)}. Modelo y predictions.json en {args.output}.")
    if best := evaluation.best:
        since = f" desde el paso {evaluation.since}" if evaluation.since else ""
        dist.print(f"El mejor por pérdida de validación{since}: {finetune.in_words(best)}; en {evaluation.folder}.")
    dist.print(f"Pruébelo: python train_distributed.py --model {shlex.quote(args.output)} --dataset mis_preguntas.json "
               "--max-steps 0")
    return 0


def main():
    """Read, build, train or, without a step, only score; returns the exit code."""
    args = build_parser().parse_args()
    args.fsdp = args.strategy == "fsdp"
    untrained = args.max_steps == 0
    if untrained:
        vars(args).update({name: value for name, value in scoring.DEFAULTS.items() if name not in args.given})
    check_arguments(args)
    with distributed.session(args) as dist:
        start.tune_allocator(dist.device, args.grad_checkpointing)
        if untrained:  # neither checkpoints nor logs, which may be those of a training that goes on
            dist.run_on_main(lambda: scoring.require_place(args))
        else:
            start.check_places(args, dist, folder=True)
            require_writable_directory(args.results_dir, "--results-dir")
        start.require_means(args, dist)
        if untrained:
            task = finetune.share(dist.made_on_main(lambda: read_task(args, dist)), dist)
            return scoring.score(args, dist, task, build(args, dist, task))
        task = dist.made_on_main(lambda: read_task(args, dist))
        with heartbeat.beating(args.log_dir, dist) as clock:
            clock.unit = "muestras"
            return train(args, dist, finetune.share(task, dist), clock)


if __name__ == "__main__":
    cli.run(main)
