"""Train the largest Spanish GPT that one rented card carries in 72 hours.

    python train_tensordock.py --dataset_path corpus.txt --output_dir salida --dry_run     # the plan, nothing else
    python train_tensordock.py --dataset_path corpus.txt --output_dir salida --epochs 1
    python train_tensordock.py --resume_from salida                                        # everything else is recorded
    python train_tensordock.py --init_from salida/final_model.pt --dataset_path otro.txt --output_dir otra
    python train_tensordock.py --dataset_path corpus.txt --output_dir prueba --model_preset aura-cpu --max_steps 50
    python -m aura.export --checkpoint salida/final_model.pt --to hf modelo_hf

All that a run makes lies in --output_dir; the same command goes on where it was stopped. Dashes and underscores are
alike, and the names of train_gpt2_spanish.py work too (--lr is --learning_rate).
Exit codes: 0 done, 2 bad input, 3 a fault in training, 128 + signal after an orderly stop.
"""

import argparse
import dataclasses
import functools
import math
import os
from pathlib import Path

from aura import backend, budget, cli, distributed, initial, optim, output, plan, pretrain, recall, start, tokenizer
from aura.checkpoint import Names
from aura.checkpointer import asked
from aura.errors import EXIT_OK, UserError
from aura.files import hold
from aura.models import gpt

NAMES = Names("checkpoint-step-{}.pt", "interrupt-step-{}.pt")


@dataclasses.dataclass(frozen=True)
class Preset:
    """Sizes of a model and the recipe that goes with them."""

    config: gpt.GPTConfig
    batch_size: int
    grad_accum: int
    lr: float
    grad_checkpointing: str | bool
    checkpoint_freq: int = 500
    beta2: float = 0.99


# From large to small: `auto` takes the first that fits. About 65k tokens a step, except on a CPU. Learning rates:
# Brown et al. 2020, table 2.1, for the sizes next to these; aura-72h-max has the one of 1.3B, where the table says
# 1.6e-4 of its own. beta2: half a million tokens a step want 0.95 (theirs), an eighth of that 0.99 or more, as the
# second moment should remember as many tokens however many a step has (Marek et al. 2025, arXiv:2507.07101).
PRESETS = {
    "aura-72h-max": Preset(gpt.GPTConfig(32_000, 2048, 32, 20, 2560, 0.0), 2, 16, 2e-4, "selective"),
    "aura-72h-extended": Preset(gpt.GPTConfig(32_000, 2048, 24, 16, 2048, 0.0), 2, 16, 2e-4, "selective"),
    "aura-24gb": Preset(gpt.GPTConfig(32_000, 1024, 36, 20, 1280, 0.0), 4, 16, 2.5e-4, "selective"),
    "aura-16gb": Preset(gpt.GPTConfig(32_000, 1024, 24, 16, 1024, 0.0), 4, 16, 3e-4, "selective"),
    "aura-8gb": Preset(gpt.GPTConfig(32_000, 1024, 12, 12, 768, 0.0), 4, 16, 6e-4, "selective"),
    "aura-cpu": Preset(gpt.GPTConfig(8192, 128, 4, 4, 256, 0.0), 4, 1, 1e-3, False, 200),
}
MANUAL = Preset(gpt.GPTConfig(dropout=0.0), 2, 16, 2e-4, "selective")
MOST_PIECES = 2**24
SIZES = ("n_embd", "n_layer", "n_head", "seq_len")
# What a resumed run may not change, because the weights or the order of the data would no longer be those.
FIXED = ("preset", *SIZES, "vocab_size", "optimizer", "seed", "val_fraction", "tokenizer", "dataset_max_tokens")


def build_parser():
    """The arguments of this script: the house's, under the names of the guide too."""
    parser = cli.Parser(prog="train_tensordock.py",
                        description="Entrena el mayor GPT en español que cabe en una GPU alquilada y en 72 horas.")
    group = parser.add_argument_group("lugar y modelo")
    group.add_argument("--output-dir", type=cli.path, help="carpeta de todo lo que hace una ejecución")
    group.add_argument("--preset", type=cli.choice("auto", *PRESETS, "manual"), default="auto",
                       help=f"auto (según la memoria), {', '.join(PRESETS)} o manual")
    initial.add_argument(group, initial.GPT2_HELD)
    group.add_argument("--n-embd", type=cli.number(int, low=1, high=2**17), help="ancho")
    group.add_argument("--n-layer", type=cli.number(int, low=1, high=1000), help="bloques")
    group.add_argument("--n-head", type=cli.number(int, low=1, high=2**17), help="cabezas de atención")
    group.add_argument("--seq-len", type=cli.number(int, low=1, high=2**24),
                       help="longitud de las secuencias y del contexto")
    group.add_argument("--dropout", type=cli.number(float, low=0, high=0.99),
                       help="fracción de activaciones que se anula")
    group.add_argument("--no-grad-checkpointing", "--no-gradient-checkpointing", dest="grad_checkpointing",
                       action="store_const", const=False, help="guarda todas las activaciones")
    group.add_argument("--grad-checkpointing", "--gradient-checkpointing", nargs="?", const="selective",
                       type=cli.choice("selective", "full"), metavar="selective|full",
                       help="recalcula activaciones en la pasada hacia atrás en vez de guardarlas. selective (si no se "
                            "indica valor): las de cada MLP, con menos de la mitad de memoria para ellas y un décimo "
                            "más de cálculo; full: las de cada bloque entero, con un sexto de la memoria y casi un "
                            "cuarto más de cálculo")
    cli.add_data(parser)
    cli.add_beta2(cli.add_training(parser))
    recipe = parser.add_argument_group("receta de esta orden")
    recipe.add_argument("--optimizer", type=cli.choice(*optim.NAMES), default="adamw", help=", ".join(optim.NAMES))
    recipe.add_argument("--schedule", type=cli.choice("cosine", "linear"), default="cosine",
                        help="cómo baja la tasa: cosine o linear")
    recipe.add_argument("--warmup-steps", type=cli.number(int, low=0), metavar="PASOS",
                        help="pasos en que la tasa sube (por defecto: el 3 %% de todos)")
    recipe.add_argument("--auto-oom", action="store_true",
                        help="si falta memoria, sigue con un lote menor y más acumulación")
    cost = parser.add_argument_group("plan")
    cost.add_argument("--dry-run", action="store_true", help="muestra el plan y termina")
    cost.add_argument("--target-hours", type=cli.number(float, above=0, high=1e6), default=72.0, metavar="HORAS",
                      help="en cuántas horas debe acabar")
    cost.add_argument("--gpu", metavar="NOMBRE",
                      help="con --dry-run y --gpu-gb: planifica para esta GPU, por ejemplo \"NVIDIA A100-SXM4-80GB\"")
    cost.add_argument("--gpu-gb", type=cli.number(float, above=0), metavar="GB",
                      help="con --dry-run: planifica para una GPU con esta memoria")
    cli.add_logging(parser)
    cli.add_samples(parser)
    cli.add_checkpoints(parser, output=None)
    for flag, name in {
            "--preset": "--model-preset", "--n-embd": "--embed-size", "--n-layer": "--num-layers",
            "--n-head": "--num-heads", "--seq-len": "--seq-length", "--dataset-name": "--dataset-path",
            "--tokenizer": "--tokenizer-name-or-path", "--val-fraction": "--validation-split",
            "--grad-accum": "--gradient-accumulation-steps", "--lr": "--learning-rate",
            "--checkpoint-freq": "--save-steps", "--resume": "--resume-from"}.items():
        parser.alias(flag, name)
    parser.set_defaults(checkpoint_freq=None, checkpoint_dir=None, log_dir=None, data_dir=None, val_fraction=0.01,
                        warmup_ratio=0.03)
    return parser


# ---- What was asked for ---------------------------------------------------------------------------------------------


@functools.cache
def flag(name):
    """How the guide calls an argument."""
    names = [text for action in build_parser()._actions if action.dest == name for text in action.option_strings
             if not text.startswith("--no-")]
    return "--" + names[-1].removeprefix("--").replace("-", "_")


def check_arguments(args):
    """Raise UserError for arguments that contradict each other, and for a launcher of several processes."""
    if args.tokenizer == "auto":  # as if it had not been given
        args.tokenizer = None
        args.given.discard("tokenizer")
    initial.check_arguments(args)
    if args.dry_run and args.prepare:
        raise UserError("--dry_run muestra el plan y no hace nada, y --prepare prepara los datos: quite uno de los dos")
    if {"warmup_steps", "warmup_ratio"} <= args.given:
        raise UserError("--warmup_steps y --warmup_ratio dicen lo mismo de dos maneras: quite una")
    if (several := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise UserError(f"WORLD_SIZE={several[:20]}: este programa entrena en una sola tarjeta, y cada proceso haría "
                        "lo mismo: láncelo con python, sin torchrun; para varias está train_gpt2_spanish.py")


def complete(args, card, note):
    """Fill what was not given from the preset; a given value always wins, and is named. Returns the model's config with
    the vocabulary that is planned; the data decide the true one."""
    if (args.vocab_size or 0) > MOST_PIECES:
        raise UserError(f"{flag('vocab_size')} {args.vocab_size}: indique {MOST_PIECES} piezas o menos")
    if args.attention == "reference":
        raise UserError("--attention reference sirve para comprobar las otras, y guarda mucho más de lo que el plan "
                        "cuenta: use auto, sdpa o fused")
    if args.optimizer == "adafactor" and "beta2" in args.given:
        raise UserError(f"{flag('beta2')} {args.beta2} es de AdamW: quítelo, o quite {flag('optimizer')} adafactor")
    if args.tokenizer and args.vocab_size is None:
        args.vocab_size = tokenizer.load(args.tokenizer).vocab_size
    if args.preset == "auto":
        args.preset, why = choose_preset(args, card)
        note(f"Preset: {args.preset}, {why}.")
    preset = PRESETS.get(args.preset, MANUAL)
    missing = [flag(name) for name in SIZES if getattr(args, name) is None]
    if preset is MANUAL and missing:
        raise UserError(f"--model_preset manual: indique {', '.join(missing)}")
    for name, value in recipe(preset).items():
        if name in args.given and getattr(args, name) != value and preset is not MANUAL:
            now = getattr(args, name)
            used = f"--no_{flag(name).removeprefix('--')}" if now is False else f"{flag(name)} {now}"
            note(f"Se usa lo indicado: {used} (el preset pone {value}).")
    trained = args.init_from and args.lr is None  # a checkpoint's is lower already
    config = fill(args, preset)
    if trained:
        initial.lower_rate(args, note)
    if args.epochs is None and args.max_steps is None:
        args.epochs = 1
    config.check()
    return config


def recipe(preset):
    """{argument: value} of all that a preset decides."""
    return {name: value for name, value in {**vars(preset), **vars(preset.config)}.items() if name != "config"}


def fill(args, preset):
    """Take from the preset what was not given; returns the model's config."""
    for name, value in recipe(preset).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return gpt.GPTConfig(**{field.name: getattr(args, field.name) for field in dataclasses.fields(gpt.GPTConfig)})


# ---- The plan -------------------------------------------------------------------------------------------------------


def choose_preset(args, card):
    """(name, why) of the largest preset that fits the card with all that was given, or of the smallest where none does;
    a CPU gets the one that was made for it, a model that is there already the recipe of its size."""
    if card.type != "cuda":
        return "aura-cpu", "el de las CPU"
    if args.init_from:
        size = fill(argparse.Namespace(**vars(args)), MANUAL).parameters()
        return min(PRESETS, key=lambda name: abs(math.log(PRESETS[name].config.parameters() / size))), \
            "el de medidas más parecidas"
    room = f"en {card.name} ({card.memory / 1e9:.1f} GB)"
    for name, preset in PRESETS.items():
        wanted = argparse.Namespace(**vars(args))
        if plan.peak(budget.job_of(wanted, fill(wanted, preset), card)) <= card.memory:
            return name, f"el mayor que cabe {room}"
    return name, f"el menor: ninguno cabe {room}"


def ladder(args, config):
    """(flags, config) of every preset, as plan.alternatives() takes them. What was given wins over a preset, so
    the flags repeat the preset's sizes; the rest stays as given. Nothing leads away from the sizes of --init-from."""
    if args.init_from:
        return []
    own = {*args.given, "vocab_size"} if args.tokenizer else args.given
    kept = {name: getattr(config, name) for name in ("vocab_size", "dropout") if name in own}
    return [(" ".join([f"--model_preset {name}", *(f"{flag(size)} {getattr(preset.config, size)}" for size in SIZES
                                                   if size in args.given)]),
             dataclasses.replace(preset.config, **kept)) for name, preset in PRESETS.items()]


# ---- The run --------------------------------------------------------------------------------------------------------


def next_token_loss(model, batch):
    """Summed cross-entropy of each next token. batch: int64 [B, T + 1]. Returns (loss in nats, B * T)."""
    targets = batch[:, 1:]
    return model(batch[:, :-1], targets), targets.numel()


def run(args, dist, data, config, begun):
    """Build the model and train it; returns the exit code. begun: an initial.Beginning or None."""
    model = initial.built(begun, dist, lambda: gpt.GPT(config), args.seed, again=args.auto_oom)
    model.grad_checkpointing = args.grad_checkpointing
    optimizer = optim.build(args.optimizer, model, args.lr, args.weight_decay, (optim.BETAS[0], args.beta2))
    decay = {"cosine": optim.warmup_cosine, "linear": optim.warmup_linear}[args.schedule]

    def schedule(step, steps):
        warmup = round(args.warmup_ratio * steps) if args.warmup_steps is None else args.warmup_steps
        return decay(step, steps=steps, warmup_steps=warmup, lr=args.lr, min_lr=args.min_lr_ratio * args.lr)

    return pretrain.train(args, dist, data, model, optimizer, schedule, next_token_loss, names=NAMES,
                          table="training_log.csv", description=output.DESCRIPTION, target_hours=args.target_hours,
                          same_data=True, begun=begun)


def main():
    """Plan, prepare, build, train; returns the exit code."""
    args = build_parser().parse_args()
    check_arguments(args)
    backend.limit_threads()
    dist = distributed.Session()
    another = args.gpu or args.gpu_gb  # is what is planned for, whatever is here
    dist.device = backend.local_device(0) if another else backend.take_device(0, dist.print)
    recall.place(args)
    if not args.dry_run and Path(args.checkpoint_dir).is_dir():  # so that its newest checkpoint stays the newest
        same = Path(args.checkpoint_dir) == Path(args.output_dir)
        hold(args.checkpoint_dir, "--output_dir" if same else "--checkpoint-dir")
    args.resume = asked(args.resume, args.checkpoint_dir, dist)
    state = recall.recorded(args, dist.print)
    if state is not None:
        recall.arguments(args, state, FIXED, flag, dist.print)
    begun = initial.read(args, dist, gpt.GPTConfig, {*args.given, "seq_len", "dropout"} if state else args.given)
    card = budget.find_card(args, dist.device)
    config = complete(args, card, dist.print)

    progress = state and state.get("progress")
    data = state and recall.data(args, state, dist.print)
    if data:
        tokens, counted, config = data.tokens("train"), True, dataclasses.replace(config, vocab_size=data.vocab_size)
    else:
        tokens, counted = budget.planned_tokens(args)
    if not args.prepare:
        budget.show(args, config, card, tokens, counted, ladder(args, config), progress, dist.print)
    if args.dry_run:
        return EXIT_OK
    start.check_places(args, dist, description=output.DESCRIPTION)
    if not args.prepare:
        start.require_means(args, dist)
        start.require_room(args, config, dist)
        optim.require(args.optimizer, dist.device)
    start.tune_allocator(dist.device, args.grad_checkpointing)
    data = data or pretrain.load_data(args, dist, config, begun)
    if args.prepare:
        return EXIT_OK
    if not counted:
        config = dataclasses.replace(config, vocab_size=data.vocab_size)
        budget.show(args, config, card, data.tokens("train"), True, ladder(args, config), progress, dist.print)
    anew = state is None or Path(args.resume).parent.resolve() != Path(args.checkpoint_dir).resolve()
    output.leave_tokenizer(data.load_tokenizer(), args.output_dir, anew, dist.print)
    config = dataclasses.replace(config, vocab_size=data.vocab_size)
    return budget.run_within(args, dist, functools.partial(run, args, dist, data, config, begun))


if __name__ == "__main__":
    cli.run(main)
