"""How well BERT answers after fine-tuning: our train_distributed.py and the same recipe in transformers' own classes.

    pip install transformers
    python benchmarks/bert_quality.py --model minilm/ --dataset xquad.en.json --json bert_quality.json

Ours is the script as its user runs it. Theirs are the tokenizer, its windows with the overlap that gives our stride,
BertForQuestionAnswering and torch's AdamW, in a plain loop. Both start from the same weights, those of the head
included, see the batches of a seed in the same order, with the same rates, decay and clipping, and are scored by the
same predict() and evaluate(), on questions about paragraphs that neither has seen. The windows must be the same, token
by token: where they are not, no figures are given. Without dropout, the default, the two runs of a seed differ by
rounding and by the padding, which transformers lets into its loss; with dropout also by chance, and three seeds cannot
tell one point.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import measure  # noqa: E402
from bert_training import CLIP, WEIGHT_DECAY, parser_of, with_whole_paths  # noqa: E402

import train_distributed  # noqa: E402
from aura import buckets, cli, optim, pretrained, spans, squad, wordpiece  # noqa: E402
from aura.models import bert  # noqa: E402

SCRIPT = Path(train_distributed.__file__)
WARMUP = 0.1
SAME_F1 = 1.0  # points
SCORES = ("f1", "peer_f1", "exact_match", "peer_exact_match")
LIMIT_S = 4 * 3600  # for one training


# ---- Ours -----------------------------------------------------------------------------------------------------------


def our_command(args, start, seed, folder):
    options = {
        "model": start, "dataset": args.dataset, "max-train-examples": args.train, "max-val-examples": args.validation,
        "epochs": args.epochs, "batch-size": args.batch_size, "lr": args.lr, "min-lr-ratio": 0, "warmup-ratio": WARMUP,
        "weight-decay": WEIGHT_DECAY, "grad-clip": CLIP, "dropout": args.dropout, "max-len": args.max_len,
        "doc-stride": args.doc_stride, "precision": "fp32", "seed": seed, "resume": "none", "checkpoint-freq": 0,
        **{f"{name}-dir": Path(folder, name) for name in ("checkpoint", "log", "results")}, "output": folder,
    }
    return [sys.executable, str(SCRIPT), *words(options)]


def words(options):
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


# ---- Theirs ---------------------------------------------------------------------------------------------------------


def their_windows(examples, tokenizer, args):
    """{"input_ids", "token_type_ids": lists of each window, "positions": of the answer, or 0, 0 ([CLS]) where not all
    of it is inside} by transformers' tokenizer, as its example run_qa.py makes them."""
    found = {"input_ids": [], "token_type_ids": [], "positions": []}
    for example in examples:
        size = args.max_len - len(tokenizer(example.question, add_special_tokens=False)["input_ids"]) - 3
        # Their stride is how much two windows overlap, ours how far apart they begin.
        encoded = tokenizer(example.question, example.context, truncation="only_second", max_length=args.max_len,
                            stride=size - args.doc_stride, return_overflowing_tokens=True, return_offsets_mapping=True)
        for number, offsets in enumerate(encoded["offset_mapping"]):
            for name in ("input_ids", "token_type_ids"):
                found[name].append(encoded[name][number])
            found["positions"].append(answer_place(example, offsets, encoded.sequence_ids(number)))
    return found


def answer_place(example, offsets, parts):
    """(first, last) token of the answer in a window; parts: 0 for the question's tokens, 1 for the context's."""
    begin, end = example.place() or (0, 0)
    covering = [token for token, ((first, last), part) in enumerate(zip(offsets, parts, strict=True))
                if part == 1 and first < end and begin < last]
    inside = covering and offsets[covering[0]][0] <= begin and end <= offsets[covering[-1]][1]
    return (covering[0], covering[-1]) if inside else (0, 0)


def same_windows(theirs, ours):
    """End the program unless transformers' windows are those of our spans.features."""
    rows = np.split(ours.ids, ours.offsets[1:-1])
    places = zip(ours.start.tolist(), ours.end.tolist(), strict=True)
    for name, found, wanted in (("las ventanas", theirs["input_ids"], [row.tolist() for row in rows]),
                                ("los lugares de las respuestas", theirs["positions"], list(places))):
        if found != wanted:
            different = sum(a != b for a, b in zip(found, wanted, strict=False))
            raise SystemExit(f"resultado rechazado: {name} no son los de transformers ({len(wanted)} nuestros, "
                             f"{len(found)} suyos, {different} distintos)")


def collate(windows, numbers, length, pad_id):
    """The keyword arguments of BertForQuestionAnswering for these windows."""
    ids, types = (buckets.padded([np.array(windows[name][number]) for number in numbers], length, value)
                  for name, value in (("input_ids", pad_id), ("token_type_ids", 0)))
    lengths = torch.tensor([len(windows["input_ids"][number]) for number in numbers])
    mask = (torch.arange(length) < lengths[:, None]).long()
    positions = torch.tensor([windows["positions"][number] for number in numbers])
    return {"input_ids": ids, "token_type_ids": types, "attention_mask": mask,
            "start_positions": positions[:, 0], "end_positions": positions[:, 1]}


def train_theirs(args, start, seed):
    """{"exact_match", "f1"} of the recipe in transformers' classes."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(start)
    model = transformers.BertForQuestionAnswering.from_pretrained(
        start, hidden_dropout_prob=args.dropout, attention_probs_dropout_prob=args.dropout)
    train, validation = questions(args)
    found, windows = [], []
    for examples in (train, validation):
        found.append(spans.features(examples, wordpiece.load(start), args.max_len, args.doc_stride))
        windows.append(their_windows(examples, tokenizer, args))
        same_windows(windows[-1], found[-1])
    lengths = found[0].lengths
    loader = buckets.BucketLoader(lengths, lambda numbers: collate(windows[0], numbers, int(lengths[numbers].max()),
                                                                   tokenizer.pad_token_id), args.batch_size, seed=seed)
    named = dict(model.named_parameters())
    free = [name for name in named if name.endswith("bias") or "LayerNorm" in name]
    optimizer = torch.optim.AdamW([
        {"params": [named[name] for name in named if name not in free], "weight_decay": WEIGHT_DECAY},
        {"params": [named[name] for name in free], "weight_decay": 0.0}], lr=args.lr, fused=True)
    steps = args.epochs * loader.steps_per_epoch
    torch.manual_seed(seed)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = optim.warmup_linear(step, steps=steps, warmup_steps=round(WARMUP * steps), lr=args.lr,
                                              min_lr=0)
        loss = model(**loader.next()).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"paso {step + 1}/{steps} | pérdida {loss.item():.4f}", flush=True)
    return scores(model.eval(), validation, found[1], windows[1], tokenizer.pad_token_id)


@torch.no_grad()
def scores(model, examples, found, windows, pad_id):
    rows = {"start_logits": [], "end_logits": []}
    for number in range(len(found)):
        output = model(**collate(windows, [number], len(windows["input_ids"][number]), pad_id))
        for name, kept in rows.items():
            kept.append(output[name][0].numpy())
    answers, _ = spans.predict(examples, found, *rows.values())
    return squad.evaluate(examples, answers)


# ---- Both -----------------------------------------------------------------------------------------------------------


def questions(args):
    """(training, validation examples) as our script chooses them."""
    train, _, _ = squad.open_data(args.dataset)
    train, validation = squad.split(train, args.validation, train_distributed.CHOICE_SEED)
    return squad.some(train, args.train), squad.some(validation, args.validation)


def start_from(args, seed, folder):
    """A folder that both read, with the weights of --model and a head drawn with this seed."""
    config = pretrained.read_config(args.model)
    module = bert.QuestionAnswering(replace(config, dropout=args.dropout)).init_weights(seed)
    pretrained.load_weights(module, Path(args.model, pretrained.WEIGHTS))
    tokenizer = wordpiece.load(args.model)
    vocabulary = "".join(f"{piece}\n" for piece in tokenizer.vocab).encode()
    pretrained.save_folder(folder, module.state_dict(), module.config, vocabulary, tokenizer.lowercase,
                           tokenizer.strip_accents)
    return folder


def run(command, log, running):
    """Run a training in a process of its own with one thread, kept in the list `running` meanwhile. If it fails, end
    the program with its last lines."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with open(log, "w", encoding="utf-8") as file:
        child = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=file,
                                 stderr=subprocess.STDOUT)
    running.append(child)
    try:
        code = child.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        code = f"no ha acabado en {LIMIT_S / 3600:g} horas"
    finally:
        child.kill()
        running.remove(child)
    if code:
        tail = "\n".join(Path(log).read_text(encoding="utf-8", errors="replace").strip().splitlines()[-8:])
        raise SystemExit(f"{Path(command[1]).name} ha fallado ({code}):\n{tail}")


def both(args, seed, folder, pool, running):
    """Futures of the scores of one seed: (ours, theirs)."""
    start = start_from(args, seed, Path(folder, f"start-{seed}"))
    output, result = Path(folder, f"ours-{seed}"), Path(folder, f"theirs-{seed}.json")
    options = {name: value for name, value in vars(args).items() if name not in ("json", "jobs", "given")}
    theirs = [sys.executable, __file__, *words({**options, "model": start, "seeds": seed, "their_scores": result})]

    def train(command, result):
        run(command, Path(folder, f"{Path(command[1]).stem}-{seed}.log"), running)
        return json.loads(Path(result).read_text(encoding="utf-8"))

    return (pool.submit(train, our_command(args, start, seed, output), output / "metrics.json"),
            pool.submit(train, theirs, result))


def print_line(name, row):
    print(f"{name:>8}", *(f"{row[score]:>7.2f}" for score in SCORES), flush=True)


def race(args):
    """Train what the arguments ask for, printing as it goes; returns what goes into the JSON file."""
    train, validation = questions(args)
    result = {"benchmark": "bert_quality", **measure.environment(), "rows": []}
    print(f"{len(train)} preguntas para entrenar, {len(validation)} para comprobar; {args.epochs} épocas, lotes de "
          f"{args.batch_size}, tasa {args.lr:g}, dropout {args.dropout:g}\n{'semilla':>8} {'F1':>7} {'suyo':>7} "
          f"{'EM':>7} {'suyo':>7}", flush=True)
    running = []
    with tempfile.TemporaryDirectory(prefix="bert_quality_") as folder, ThreadPoolExecutor(args.jobs) as pool:
        try:
            for seed, futures in [(seed, both(args, seed, folder, pool, running)) for seed in args.seeds]:
                ours, theirs = (future.result() for future in futures)
                row = {"op": "question answering", "seed": seed, "questions": len(validation), "peer": "transformers",
                       "f1": ours["f1"], "peer_f1": theirs["f1"], "exact_match": ours["exact_match"],
                       "peer_exact_match": theirs["exact_match"]}
                result["rows"].append(row)
                print_line(seed, row)
        finally:  # after a failure, what still runs is of no use
            pool.shutdown(wait=False, cancel_futures=True)
            for child in list(running):
                child.kill()
    means = {name: statistics.fmean(row[name] for row in result["rows"]) for name in SCORES}
    result |= {"means": means, "f1_difference": means["f1"] - means["peer_f1"]}
    print_line("medias", means)
    print(f"diferencia de F1: {result['f1_difference']:+.2f} puntos (objetivo: "
          f"{SAME_F1:g} como mucho)")
    return result


# ---- Arguments ------------------------------------------------------------------------------------------------------


def build_parser():
    parser = parser_of("Compara el F1 de train_distributed.py con el de la misma receta en transformers.")
    parser.add_argument("--seeds", type=measure.numbers, default="0,1,2", help="semillas")
    parser.add_argument("--jobs", type=cli.number(int, low=1), default=2, help="procesos a la vez, de un hilo")
    parser.add_argument("--lr", type=cli.number(float, above=0), default=1e-4, help="tasa de aprendizaje máxima")
    parser.add_argument("--dropout", type=cli.number(float, low=0, high=0.99), default=0.0,
                        help="fracción de activaciones que se anula")
    for name, value, what in (
            ("epochs", 3, "épocas"), ("train", 1000, "preguntas para entrenar"), ("batch-size", 4, "ventanas por lote"),
            ("validation", 190, "preguntas para comprobar"), ("max-len", 384, "tokens de una ventana"),
            ("doc-stride", 128, "cuánto avanza cada ventana")):
        parser.add_argument(f"--{name}", type=cli.number(int, low=1), default=value, help=what)
    parser.add_argument("--their-scores", metavar="FICHERO", help=argparse.SUPPRESS)  # how this file starts theirs
    return parser


def main(argv=None):
    args = with_whole_paths(build_parser(), argv)
    if args.their_scores:
        measure.write(args.their_scores, train_theirs(args, args.model, args.seeds[0]))
        return
    measure.write(args.json, race(args))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the children are ended too
    cli.run(main)
