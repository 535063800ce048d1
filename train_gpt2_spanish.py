"""Train a GPT-2 in Spanish, on one process or on many machines.

    python train_gpt2_spanish.py --preset demo                               # two CPU cores, a few minutes
    python train_gpt2_spanish.py --prepare --dataset-name wikipedia --dataset-max-tokens 100000000
    python train_gpt2_spanish.py --batch-size 8 --epochs 1                   # gpt2, on the data prepared last
    python train_gpt2_spanish.py --init-from gpt2_spanish.pth --dataset-name poemas.txt --output poemas.pth \
        --checkpoint-dir checkpoints/poemas --log-dir logs/poemas            # a trained model goes on with other text
    torchrun --nproc_per_node=4 train_gpt2_spanish.py --distributed --batch-size 8 --seq-len 128
    python -m aura.generate --checkpoint gpt2_spanish.pth --prompt "En un lugar de la Mancha"

Data, checkpoints and logs go to ./Data, ./checkpoints and ./logs; the same command goes on where it was stopped.
Exit codes: 0 done, 2 bad input, 3 a fault in training, 128 + signal after an orderly stop.
"""

import dataclasses

from aura import cli, distributed, initial, optim, pretrain, start
from aura.errors import EXIT_OK, found_by_all
from aura.models import gpt

# What a preset decides besides the model's sizes (aura/models/gpt.py). Learning rates: Brown et al. 2020, table 2.1,
# for the published sizes; found by trial on the built-in sample for demo, where twice the rate with a third of the
# warm-up made training chaotic: a rounding error grew to 0.05 in the loss within 50 steps, and the loss was higher.
# The second moment should remember as many tokens however many a step has (Marek et al. 2025, arXiv:2507.07101): the
# beta2 of GPT-3, 0.95, is for steps of half a million and more. 0.99 by trial for demo, whose steps have a thousandth
# of that; for the others, with 32,768, by the paper's rule alone, which would go further.
RECIPES = {
    "demo": {"batch_size": 4, "grad_accum": 1, "lr": 1e-3, "beta2": 0.99, "warmup_ratio": 0.1, "max_steps": 1200,
             "epochs": 1},
    "gpt2": {"batch_size": 8, "grad_accum": 4, "lr": 6e-4, "beta2": 0.99, "warmup_ratio": 0.03, "epochs": 1},
    "gpt2-medium": {"batch_size": 4, "grad_accum": 8, "lr": 3e-4, "beta2": 0.99, "warmup_ratio": 0.03, "epochs": 1},
    "gpt2-large": {"batch_size": 2, "grad_accum": 16, "lr": 2.5e-4, "beta2": 0.99, "warmup_ratio": 0.03, "epochs": 1},
    "gpt2-xl": {"batch_size": 1, "grad_accum": 32, "lr": 2e-4, "beta2": 0.99, "warmup_ratio": 0.03, "epochs": 1},
}


def build_parser():
    """The arguments of this script."""
    parser = cli.Parser(prog="train_gpt2_spanish.py", description="Entrena un GPT-2 en español.")
    model = parser.add_argument_group("modelo")
    model.add_argument("--preset", type=cli.choice(*gpt.PRESETS), default="gpt2", help=", ".join(gpt.PRESETS))
    initial.add_argument(model, initial.GPT2_HELD)
    model.add_argument("--n-layer", type=cli.number(int, low=1), help="bloques")
    model.add_argument("--n-head", type=cli.number(int, low=1), help="cabezas de atención")
    model.add_argument("--n-embd", type=cli.number(int, low=1), help="ancho")
    model.add_argument("--seq-len", type=cli.number(int, low=1), help="longitud de las secuencias y del contexto")
    model.add_argument("--dropout", type=cli.number(float, low=0, high=0.99),
                       help="fracción de activaciones que se anula")
    cli.add_data(parser)
    cli.add_beta2(cli.add_training(parser))
    cli.add_logging(parser)
    cli.add_samples(parser)
    cli.add_checkpoints(parser, output="./gpt2_spanish.pth")
    cli.add_distributed(parser)
    return parser


@found_by_all
def complete(args):
    """Fill what was not given from the preset; a given value always wins. Returns the model's config without its
    vocabulary, which the data decides."""
    initial.check_arguments(args)
    preset = gpt.PRESETS[args.preset]
    explicit_length = args.max_steps or args.epochs
    for name, value in {**RECIPES[args.preset], **dataclasses.asdict(preset)}.items():
        if getattr(args, name) is None and not (name == "max_steps" and explicit_length):
            setattr(args, name, value)
    sizes = {field.name: getattr(args, field.name) for field in dataclasses.fields(preset)}
    config = dataclasses.replace(preset, **sizes)
    if not args.init_from:  # else the preset's sizes are not the model's
        config.check()
    return config


def next_token_loss(model, batch):
    """Summed cross-entropy of each next token. batch: int64 [B, T + 1]. Returns (loss in nats, B * T)."""
    targets = batch[:, 1:]
    return model(batch[:, :-1], targets), targets.numel()


def main():
    """Prepare, build, train; returns the exit code."""
    args = build_parser().parse_args()
    config = complete(args)
    with distributed.session(args) as dist:
        start.tune_allocator(dist.device, sparing=False)
        if not args.prepare:
            start.check_places(args, dist)
            start.require_means(args, dist)
        begun = initial.read(args, dist, gpt.GPTConfig)
        if begun:
            config = begun.config
            initial.lower_rate(args, dist.print)
        if not args.prepare:
            pretrain.refuse_too_large(args, config, dist)
        data = pretrain.load_data(args, dist, config, begun)
        if args.prepare:
            return EXIT_OK

        config = dataclasses.replace(config, vocab_size=data.vocab_size)
        start.require_memory(args, config, dist, pretrain.SMALLER)
        model = initial.built(begun, dist, lambda: gpt.GPT(config), args.seed)
        optimizer = optim.adamw(model, args.lr, args.weight_decay, betas=(optim.BETAS[0], args.beta2))

        def schedule(step, steps):
            return optim.warmup_cosine(step, steps=steps, warmup_steps=round(args.warmup_ratio * steps), lr=args.lr,
                                       min_lr=args.min_lr_ratio * args.lr)

        return pretrain.train(args, dist, data, model, optimizer, schedule, next_token_loss, begun=begun)


if __name__ == "__main__":
    cli.run(main)
