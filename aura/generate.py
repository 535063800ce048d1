"""Generate text from a trained model.

    python -m aura.generate --checkpoint gpt2_spanish.pth --prompt "En un lugar de la Mancha"
    python -m aura.generate --checkpoint datificate/gpt2-small-spanish --prompt "En un lugar de la Mancha"
"""

import functools
import sys
import time

from aura import backend, cli, initial, models, sampling
from aura.console import harmless
from aura.errors import EXIT_OK, UserError


def build_parser():
    """The arguments of this command."""
    parser = cli.Parser(prog="python -m aura.generate", description="Genera texto con un modelo entrenado.")
    parser.add_argument("--checkpoint", type=cli.path, default="gpt2_spanish.pth", metavar="RUTA|NOMBRE",
                        help="modelo .pth o .pt, punto de control ckpt-*.pt, o un GPT-2 de Hugging Face, su carpeta o "
                             "su nombre")
    parser.add_argument("--prompt", default="", help="el principio del texto (por defecto: ninguno)")
    parser.add_argument("--length", type=cli.number(int, low=1), default=200, help="cuántos tokens, como mucho")
    parser.add_argument("--temperature", type=cli.number(float, low=0), default=0.8, help="0: siempre el más probable")
    parser.add_argument("--top-k", type=cli.number(int, low=0), default=50, help="elige entre los K mejores; 0: todos")
    parser.add_argument("--top-p", type=cli.number(float, above=0, high=1), default=1.0,
                        help="elige entre los más probables que juntos suman esta probabilidad")
    parser.add_argument("--num-samples", type=cli.number(int, low=1), default=1, help="cuántos textos")
    parser.add_argument("--early-exit", action="store_true",
                        help="en un HRM con segmentos, cada token usa los que pide la cabeza de parada, y no todos")
    parser.add_argument("--seed", type=cli.number(int, low=0, high=2**53), default=0,
                        help="semilla; la misma da el mismo texto")
    return parser


def main():
    """Load the model, print the texts; returns the exit code."""
    args = build_parser().parse_args()
    backend.limit_threads()
    try:
        _write(args)
    except (RuntimeError, MemoryError) as problem:
        if whose := backend.out_of_memory(problem):
            elsewhere = "la CPU (CUDA_VISIBLE_DEVICES=)" if "GPU" in whose else "otra máquina"
            raise UserError(f"--checkpoint {args.checkpoint!r}: no basta la memoria de {whose}: libere la que usan "
                            f"otros programas, o genere el texto en {elsewhere}") from problem
        raise
    return EXIT_OK


def _write(args):
    warn = functools.partial(print, file=sys.stderr)
    config, weights, tokenizer, _ = initial.usable(args.checkpoint, "--checkpoint", warn)
    model = models.filled(config, weights, backend.take_device(0, warn))
    if args.early_exit:
        if getattr(model, "halt", None) is None:
            raise UserError(f"--early-exit: {args.checkpoint!r} no tiene cabeza de parada (se entrena con --segments)")
        model.early_exit = True
    given, seen = len(tokenizer.encode(args.prompt)), model.config.seq_len
    if given > seen:
        warn(f"Aviso: --prompt tiene {given} tokens y el modelo ve {seen}: sigue por los últimos {seen}.")
    for number in range(args.num_samples):
        started = time.perf_counter()
        try:
            _, count = sampling.write(model, tokenizer, args.prompt, args.length, say=_say, seed=args.seed + number,
                                      temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)
        finally:  # also of a text that Ctrl+C cuts short, or "Interrumpido." would stand in its last line
            print()
        seconds = time.perf_counter() - started
        print(f"--- {count} tokens, {count / seconds:.0f} tokens/s ---")


def _say(part):
    print(harmless(part), end="", flush=True)


if __name__ == "__main__":
    cli.run(main)
