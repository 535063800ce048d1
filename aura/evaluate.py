"""Measure a trained language model on a text.

    python -m aura.evaluate --checkpoint gpt2_spanish.pth --dataset-name otro.txt
    python -m aura.evaluate --checkpoint gpt2_spanish.pth             # on the validation text of its own training
    python -m aura.evaluate --checkpoint datificate/gpt2-small-spanish --dataset-name otro.txt

A given text is measured whole: a document begins after an end token, and every token and the end are predicted, in
windows as long as the model's context, each of which begins anew. Bits per byte may be compared between models of
different tokenizers; loss and perplexity, which count tokens, only between those of the same.
"""

import functools
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from aura import backend, cli, corpus, dataset, hrm_training, initial, models, ops, output, preparation, pretrain, start
from aura import tokens as token_files
from aura.bar import bar
from aura.errors import EXIT_OK, UserError
from aura.files import MISSHAPEN, explain, require_writable_file, write_json
from aura.session import Session

HUB_TOKENS = 1_000_000  # of a text of the Hub where --dataset-max-tokens gives no other limit
PROGRAM = "aura.evaluate"  # in a file of --json: a later one may replace it


def build_parser():
    """The arguments of this command."""
    parser = cli.Parser(
        prog="python -m aura.evaluate",
        description="Mide la pérdida, la perplejidad y los bits por byte de un modelo de lenguaje. Los bits por byte "
                    "se pueden comparar entre modelos con distintos tokenizadores; la pérdida y la perplejidad, solo "
                    "entre los que tienen el mismo.")
    parser.add_argument("--checkpoint", type=cli.path, default="gpt2_spanish.pth", metavar="RUTA|NOMBRE",
                        help="modelo .pth o .pt, punto de control ckpt-*.pt, o un GPT-2 de Hugging Face, su carpeta o "
                             "su nombre")
    parser.add_argument("--dataset-name", type=cli.path, metavar="NOMBRE|RUTA",
                        help="el texto, como al entrenar: muestra, un .txt o .jsonl, una carpeta o un nombre del Hub; "
                             "sin ella, la validación de los datos con que se entrenó")
    parser.add_argument("--dataset-max-tokens", type=cli.number(int, low=1), metavar="N",
                        help="mide solo los primeros N tokens, que con otro tokenizador son otra parte del texto (del "
                             "Hub, 1 millón si no se indica)")
    parser.add_argument("--eval-windows", type=cli.number(int, low=0), default=0, metavar="N",
                        help="secuencias de validación, repartidas por igual, como las 400 que mira el entrenamiento; "
                             "0: todas")
    parser.add_argument("--data-dir", type=cli.path,
                        help="carpeta de los datos preparados (por defecto: la de su entrenamiento)")
    parser.add_argument("--batch-size", type=cli.number(int, low=1), default=8, help="secuencias a la vez")
    parser.add_argument("--precision", type=cli.choice("auto", "bf16", "fp16", "fp32"), default="auto",
                        help="auto, bf16, fp16 o fp32; auto: bf16 o fp16 con GPU, fp32 en CPU")
    parser.add_argument("--json", type=cli.path, metavar="FICHERO", help="guarda también las cifras en JSON")
    return parser


def main():
    """Measure, print, write the file; returns the exit code."""
    args = build_parser().parse_args()
    backend.limit_threads()
    check_arguments(args)
    place = args.json and _require_free(args.json, args.checkpoint)
    try:
        figures = _measure(args)
    except (RuntimeError, MemoryError) as problem:
        if whose := backend.out_of_memory(problem):
            raise UserError(f"--checkpoint {args.checkpoint!r}: no basta la memoria de {whose} con --batch-size "
                            f"{args.batch_size}: indique uno menor, o libere la que usan otros programas") from problem
        raise
    bits = figures["bits_per_byte"]
    told = f"{bits:.4f} bits por byte" if bits else "sin bits por byte: su tokenizador no conserva todos los bytes"
    perplexity = f"{figures['perplexity']:.4g}" if figures["perplexity"] else "más de 1e+304"
    print(f"Pérdida: {figures['loss']:.4f} nats por token; perplejidad: {perplexity}; {told}.")
    if place:
        try:
            write_json(place, figures)
        except OSError as problem:
            raise UserError(f"--json {args.json!r}: no se puede escribir ({explain(problem)}); indique otro"
                            ) from problem
    return EXIT_OK


def check_arguments(args):
    """Raise UserError for what would have no effect: a text has no prepared data, and these no beginning."""
    if args.dataset_max_tokens and not args.dataset_name:
        raise UserError(f"--dataset-max-tokens {args.dataset_max_tokens}: es para el texto de --dataset-name; de la "
                        "validación se mide lo que dice --eval-windows")
    if args.data_dir and args.dataset_name:
        raise UserError(f"--data-dir {args.data_dir!r}: es de los datos con que se entrenó, y de --dataset-name se lee "
                        "el texto, sin prepararlo: quite una de las dos")
    if args.eval_windows and args.dataset_name:
        raise UserError(f"--eval-windows {args.eval_windows}: es para la validación del propio entrenamiento; de "
                        "--dataset-name se mide lo que dice --dataset-max-tokens")


def _require_free(name, checkpoint):
    """The path of --json. Raises UserError where a file lies there that this command has not written: the description
    of a model has such a name too, and one that is called otherwise would no longer be looked for."""
    path, model = require_writable_file(name, "--json"), Path(checkpoint)
    if model.with_name(output.DESCRIPTION).exists() and path.resolve() == model.with_suffix(".json").resolve():
        raise UserError(f"--json {name!r}: con ese nombre pasaría por la descripción de {model.name!r}, que no se "
                        "podría volver a usar; indique otro nombre")
    try:
        if not path.exists() or json.loads(path.read_text(encoding="utf-8"))["program"] == PROGRAM:
            return path
    except (OSError, *MISSHAPEN):
        pass
    raise UserError(f"--json {name!r}: ya existe y no es de una medida anterior; indique otro nombre")


def _measure(args):
    """The figures of --json, as a dict."""
    warn = functools.partial(print, file=sys.stderr)
    device = backend.take_device(0, warn)
    precision = start.choose_precision(args.precision, device)
    config, weights, tokenizer, learnt = initial.usable(args.checkpoint, "--checkpoint", warn)
    find = _given_text if args.dataset_name else _own_validation
    text, count = find(args, config, tokenizer, learnt, device, warn), _Count()
    start.tune_allocator(device, sparing=False)
    ops.use("auto", device)
    model = models.filled(config, weights, device)
    loss_fn = hrm_training.make_loss(tokenizer.eos_id, learnt["arguments"].get("document_attention") is True)
    measured = pretrain.make_evaluate(model, loss_fn, lambda: count.of(text.batches), tokenizer,
                                      Session(device=device), precision)(None)
    loss = torch.tensor(measured["val_loss"], dtype=torch.float64)
    if not loss.isfinite():
        raise UserError(f"--checkpoint {args.checkpoint!r}: con --precision {precision.name} la pérdida no es un "
                        "número finito: pruebe con --precision fp32 o, si es esa, con un punto de control anterior")
    print(f"{'Validación de' if text.split else 'Texto'} {text.name!r}: {count.tokens} tokens en ventanas de "
          f"{config.seq_len}; modelo de {config.parameters() / 1e6:.2f} M parámetros, precisión {precision.name}; "
          f"{count.tokens / count.seconds:.0f} tokens/s.")
    perplexity = loss.exp().item() if loss < 700 else None  # beyond, no number that JSON has a word for
    bits, lossless = measured.get("bits_per_byte"), tokenizer.lossless
    if bits and not lossless:
        warn("Aviso: su tokenizador no conserva todos los caracteres (normaliza, o tiene piezas añadidas): los bits "
             "por byte son del texto como él lo deja, y no se pueden comparar con los de otro tokenizador.")
    return {"program": PROGRAM, "checkpoint": args.checkpoint, "parameters": config.parameters(),
            "dataset": text.name, "split": text.split, "dataset_sha256": text.sha256, "tokens": count.tokens,
            "seq_len": config.seq_len, "loss": loss.item(), "perplexity": perplexity,
            "bits_per_byte": bits, "tokenizer_sha256": tokenizer.sha256, "lossless": lossless,
            "precision": precision.name, "device": backend.device_name(device), "versions": output.versions(),
            "command": sys.argv}


@dataclass(frozen=True)
class _Text:
    """What is measured. batches: int64 [B, T + 1] each. sha256: None where it is not read whole. split: "val", None of
    a text that is given."""

    name: str
    batches: Iterable
    sha256: str | None
    split: str | None = None


class _Count:
    """Counts the tokens that are predicted, and the seconds, as they go by."""

    tokens, seconds = 0, 0.0

    def of(self, batches):
        """Yield `batches`, each int64 [B, T + 1]."""
        started = time.perf_counter()
        with bar(unit="tok", unit_scale=True, desc="Midiendo", disable=None, mininterval=1.0) as shown:
            for batch in batches:
                yield batch
                count = batch.shape[0] * (batch.shape[1] - 1)
                self.tokens += count
                self.seconds = time.perf_counter() - started
                shown.update(count)


def _given_text(args, config, tokenizer, learnt, device, warn):
    """The _Text of --dataset-name."""
    most = args.dataset_max_tokens
    text = corpus.open_corpus(args.dataset_name, max_tokens=most)
    preparation.say_unread(text, warn)
    if text.name == learnt["dataset"]:
        warn(f"Aviso: el modelo se entrenó con un texto que también se llama {text.name!r}: si es el mismo, esto mide "
             "lo que recuerda de él.")
    if text.source["kind"] == "hub":
        most = most or HUB_TOKENS

    def batches():
        batch = None
        for batch in text_batches(text.documents(), tokenizer, config.seq_len, args.batch_size, device, most):
            yield batch
        if batch is None:
            raise UserError(f"--dataset-name {args.dataset_name!r}: está vacío: no hay ningún documento que medir; "
                            "indique otro texto")
        if text.damage.bad:
            warn(preparation.damaged(asdict(text.damage)))

    return _Text(text.name, batches(), None if most else text.digest())


def _own_validation(args, config, tokenizer, learnt, device, warn):
    """The _Text that was kept apart for validation when the model was trained."""
    known, before = learnt["dataset_sha256"], learnt["arguments"].get("data_dir")
    folder = args.data_dir or (before if isinstance(before, str) else "./Data")
    data = next((each for each in dataset.prepared(folder, warn) if each.sha256 == known), None)
    if data is None and learnt["arguments"].get("stream") is True:
        raise UserError(f"--checkpoint {args.checkpoint!r}: se entrenó con {learnt['dataset']!r} y --stream, que no "
                        "guarda la validación: indique un texto con --dataset-name")
    if data is None:
        whose = f"los datos con que se entrenó ({learnt['dataset']!r}) no están preparados en {folder!r}" \
            if known else "no se sabe con qué datos se entrenó"
        raise UserError(f"--checkpoint {args.checkpoint!r}: {whose}: indique un texto con --dataset-name"
                        + (", o la carpeta de aquellos con --data-dir" if known else ""))
    data.verify("val")
    data.hold()
    if data.tokens("val") <= config.seq_len:
        raise UserError(f"la validación de {data.meta['name']!r} no llega a una secuencia de {config.seq_len}: indique "
                        "un texto con --dataset-name")
    batches = token_files.evaluation_batches(data.shards("val"), config.seq_len, args.batch_size,
                                             vocab_size=tokenizer.vocab_size, device=device,
                                             limit=args.eval_windows or None)
    return _Text(data.meta["name"], batches, data.sha256, "val")


def text_batches(documents, tokenizer, seq_len, batch_size, device, most=None):
    """Yield int64 [<= batch_size, <= seq_len + 1] on the device: the documents (str) as one stream of tokens that
    begins with an end token, and each ends with one. Windows share a token with their neighbours, as in the shards, and
    the last is a shorter one in a batch of its own; so every token is a target once. most: tokens, all by default."""
    rows = []
    for window in _windows(documents, tokenizer, seq_len, most):
        if rows and (len(rows) == batch_size or len(window) < len(rows[0])):
            yield torch.tensor(rows, device=device)
            rows = []
        rows.append(window)
    if rows:
        yield torch.tensor(rows, device=device)


def _windows(documents, tokenizer, seq_len, most):
    held, left = [tokenizer.eos_id], most or sys.maxsize
    for batch in preparation.batches(documents):
        first = 0
        for ids in tokenizer.encode_batch(batch):
            part = [*ids, tokenizer.eos_id][:left]
            held += part
            left -= len(part)
        while len(held) - first > seq_len:
            yield held[first:first + seq_len + 1]
            first += seq_len
        held = held[first:]
        if not left:
            break
    if len(held) > 1:
        yield held


if __name__ == "__main__":
    cli.run(main)
