"""Our WordPiece against Hugging Face's `tokenizers`: ids and offsets of every context and question.

    python benchmarks/wordpiece.py --vocab bert-base-uncased --data xquad.en.json xquad.es.json --json wordpiece.json
    python benchmarks/wordpiece.py                         quick look: the built-in sample, a vocabulary learned from it

Ids and offsets are compared before anything is timed. Each of the processes encodes all texts with one thread, as the
ranks of a training do; the speed is that of all together. Ours and the library take turns round by round. Ours gives
int32 arrays, the library lists. "first" is a tokenizer that has seen nothing, "again" one that knows the words: ours
has a cache of 65,536 words, the library one of 10,000.
"""

import functools
import importlib.metadata
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
import unicodedata
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import measure  # noqa: E402

from aura import backend, cli, spans, squad, wordpiece  # noqa: E402

OURS = {"first": "ours, first", "again": "ours, again"}
PEERS = ("tokenizers, encode", "tokenizers, encode_batch")


def library(vocab_file: str, lowercase: bool):
    import tokenizers

    result = tokenizers.BertWordPieceTokenizer(vocab_file, lowercase=lowercase)
    result._tokenizer.encode_special_tokens = True  # text is text, also where it spells "[SEP]"
    return result


def same(vocab_file: str, texts: list[str]) -> int:
    """How many tokens the texts have. Ends the program where ids or offsets differ."""
    ours, total = wordpiece.load(vocab_file), 0
    theirs = library(vocab_file, ours.lowercase)
    for text in texts:
        ids, starts, ends = ours.encode(text)
        other = theirs.encode(text, add_special_tokens=False)
        if ids.tolist() != other.ids or list(zip(starts.tolist(), ends.tolist(), strict=True)) != other.offsets:
            raise SystemExit(f"no dan los mismos tokens: {text!r}")
        total += len(ids)
    return total


# ---- Within a worker ------------------------------------------------------------------------------------------------


@functools.lru_cache
def tokenizers_of(vocab_file: str):
    """(ours, theirs), made once in each process."""
    ours = wordpiece.load(vocab_file)
    return ours, library(vocab_file, ours.lowercase)


def seconds(task: tuple[str, str, list[str]]) -> float:
    """Time of one contestant for all texts."""
    name, vocab_file, texts = task
    ours, theirs = tokenizers_of(vocab_file)
    if name == OURS["first"]:
        ours = wordpiece.WordPiece(ours.vocab, ours.lowercase, ours.strip_accents)
    begin = time.perf_counter()
    if name in OURS.values():
        for text in texts:
            ours.encode(text)
    elif name == "tokenizers, encode":
        for text in texts:
            result = theirs.encode(text, add_special_tokens=False)
            _ = result.ids, result.offsets
    else:
        for result in theirs.encode_batch(texts, add_special_tokens=False):
            _ = result.ids, result.offsets
    return time.perf_counter() - begin


# ---- Measuring ------------------------------------------------------------------------------------------------------


def compare(vocab_file: str, texts: list[str], total: int, processes: int, rounds: int) -> list[dict]:
    """Two rows per peer: medians over the rounds, in which everybody takes a turn."""
    names = [*OURS.values(), *PEERS]
    speed = {name: [] for name in names}
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for done in range(-1, rounds):  # the first round is for starting up
            for name in names[done % len(names):] + names[:done % len(names)]:
                times = pool.map(seconds, [(name, vocab_file, texts)] * processes, chunksize=1)
                if done >= 0:
                    speed[name].append(sum(total / each for each in times))
    rows = []
    for what, ours in OURS.items():
        for peer in PEERS:
            ratios = [mine / theirs for mine, theirs in zip(speed[ours], speed[peer], strict=True)]
            rows.append({
                "what": what, "shape": [len(texts), total], "dtype": "int32", "direction": "encode",
                "processes": processes, "threads": 1, "unit": "tokens/s", "ours": statistics.median(speed[ours]),
                "peer_name": peer, "peer": statistics.median(speed[peer]), "ratio": statistics.median(ratios),
                "ratio_min": min(ratios), "ratio_max": max(ratios)})
    return rows


def questions_per_second(examples: list[squad.Example], vocab_file: str) -> float:
    """How many questions a second are made into windows of 384 tokens, in this process, by a tokenizer that has seen
    nothing."""
    tokenizer = wordpiece.load(vocab_file)
    begin = time.perf_counter()
    spans.features(examples, tokenizer)
    return len(examples) / (time.perf_counter() - begin)


def versions() -> dict[str, str]:
    names = {name: importlib.metadata.version(name) for name in ("numpy", "tokenizers")}
    return {"python": platform.python_version(), "unicode": unicodedata.unidata_version, **names}


def table(result: dict) -> None:
    print(f"{result['device']}; {result['texts']} textos, {result['tokens']} tokens, los mismos que con tokenizers")
    print(f"{'procesos':>8} {'caché':8} {'nuestro':>14} {'rival':26} {'tokens/s':>14} {'razón (mín-máx)':>18}")
    for row in result["rows"]:
        ratio = f"{row['ratio']:.2f} ({row['ratio_min']:.2f}-{row['ratio_max']:.2f})"
        print(f"{row['processes']:>8} {'vacía' if row['what'] == 'first' else 'llena':8} {row['ours']:>14,.0f} "
              f"{row['peer_name']:26} {row['peer']:>14,.0f} {ratio:>18}")
    print(f"ventanas de {result['questions']} preguntas, un proceso: {result['questions_per_s']:,.0f} preguntas/s")


def build_parser() -> cli.Parser:
    parser = cli.Parser(description="Mide nuestro WordPiece frente a la biblioteca tokenizers.")
    parser.add_argument("--json", type=measure.file, metavar="FICHERO", help="dónde escribir los resultados")
    parser.add_argument("--data", nargs="+", type=measure.existing, default=[str(squad.SAMPLE)], metavar="FICHERO",
                        help="ficheros de SQuAD v1.1 (por defecto: la muestra incorporada)")
    parser.add_argument("--vocab", metavar="RUTA",
                        help="un vocab.txt o su carpeta (por defecto: aprendido de los textos)")
    parser.add_argument("--processes", type=measure.threads, default="1,2", metavar="N,N",
                        help="procesos a la vez")
    parser.add_argument("--rounds", type=cli.number(int, low=1), default=9, help="rondas")
    return parser


def main(argv: list[str] | None = None) -> None:
    arguments = build_parser().parse_args(argv)
    os.environ["RAYON_NUM_THREADS"] = "1"  # read by the library in each worker
    examples = [example for file in arguments.data for example in squad.read(file)[0]]
    texts = [text for example in examples for text in (example.context, example.question)]
    texts = list(dict.fromkeys(texts))
    with tempfile.TemporaryDirectory() as folder:
        vocab_file = Path(arguments.vocab or folder)
        vocab_file = vocab_file / "vocab.txt" if vocab_file.is_dir() else vocab_file
        if not arguments.vocab:
            vocab_file.write_text("\n".join(wordpiece.learn(texts, 8000)) + "\n", encoding="utf-8")
        neighbours = measure.Neighbours()
        total = same(str(vocab_file), texts)
        result = {"benchmark": "wordpiece", "versions": versions(), "device": backend.device_name(torch.device("cpu")),
                  "texts": len(texts), "tokens": total,
                  "rows": [row for processes in arguments.processes
                           for row in compare(str(vocab_file), texts, total, processes, arguments.rounds)],
                  "questions": len(examples), "questions_per_s": questions_per_second(examples, str(vocab_file))}
    table(result)
    result["others_cpu_share"] = neighbours.warn()
    measure.write(arguments.json, result)


if __name__ == "__main__":
    cli.run(main)
