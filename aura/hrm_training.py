"""What the HRM scripts share: arguments, the batch a preset asks for, the console, the run."""

import argparse
import dataclasses
from dataclasses import dataclass

import torch

from aura import cli, corpus, distributed, files, initial, optim, pretrain, scaling, start, stream
from aura import tokenizer as tokenizers
from aura.errors import EXIT_OK, UserError, found_by_all
from aura.models import hrm
from aura.words import counted


@dataclass(frozen=True)
class Preset:
    """Sizes of a model and the recipe that goes with them. batch_size: sequences per process and micro-batch; gpus: of
    the machine the recipe was made for, whose sequences per step are kept on any other. beta2: higher where a step has
    few tokens (Marek et al. 2025, arXiv:2507.07101)."""

    config: hrm.HRMConfig
    batch_size: int
    grad_accum: int
    gpus: int
    lr: float
    max_steps: int
    warmup_ratio: float
    grad_checkpointing: bool
    ema: float = 0.999
    beta2: float = optim.BETAS[1]

    @property
    def effective_batch(self):
        """Sequences per step."""
        return self.batch_size * self.grad_accum * self.gpus


def make_parser(prog, description, presets):
    """The arguments of a script with these presets; the first is its default."""
    parser = cli.Parser(prog=prog, description=description)
    model = parser.add_argument_group("modelo")
    model.add_argument("--preset", type=cli.choice(*presets), default=next(iter(presets)), help=", ".join(presets))
    initial.add_argument(model, "un .pth o .pt de este programa")
    model.add_argument("--seq-len", type=cli.number(int, low=1), help="longitud de las secuencias y del contexto")
    model.add_argument("--n-embd", type=cli.number(int, low=1), help="ancho")
    model.add_argument("--n-layer", type=cli.number(int, low=1), help="bloques de cada pila")
    model.add_argument("--n-head", type=cli.number(int, low=1), help="cabezas de atención")
    model.add_argument("--n-ff", type=cli.number(int, low=1), help="ancho intermedio de SwiGLU")
    model.add_argument("--h-cycles", type=cli.number(int, low=1, high=1000), help="ciclos de la pila lenta, H")
    model.add_argument("--l-cycles", type=cli.number(int, low=1, high=1000),
                       help="pasadas de la pila rápida, L, en cada ciclo")
    model.add_argument("--segments", type=cli.number(int, low=1, high=1000),
                       help="segmentos por paso, con cabeza de parada si son más de uno")
    model.add_argument("--ponder-price", type=cli.number(float, low=0), metavar="NATS",
                       help="cuánta pérdida debe ahorrar un segmento más")
    model.add_argument("--reinject", action=argparse.BooleanOptionalAction,
                       help="suma de nuevo la entrada antes de cada pasada de L")
    model.add_argument("--exit-weights", action=argparse.BooleanOptionalAction,
                       help="pesos en las normas de salida de las pilas; con ellos el modelo no se puede exportar a "
                            "transformers")
    model.add_argument("--document-attention", action="store_true",
                       help="un token solo ve su propio documento (sin esta opción ve también los anteriores de su "
                            "ventana, separados por el token de fin)")
    model.add_argument("--grad-checkpointing", action=argparse.BooleanOptionalAction,
                       help="recalcula las activaciones en la pasada hacia atrás: mucha menos memoria, más cálculo")
    cli.add_data(parser)
    parser.add_argument("--stream", action=argparse.BooleanOptionalAction,
                        help="lee el texto y lo pasa a tokens a medida que se entrena (por defecto: solo el del Hub)")
    cli.add_beta2(cli.add_training(parser))
    cli.add_logging(parser)
    cli.add_samples(parser)
    cli.add_checkpoints(parser, output="./hrm.pth")
    cli.add_distributed(parser)
    parser.alias("--dataset-name", "--dataset")
    parser.add_argument("--benchmark", action="store_true",
                        help="mide el rendimiento y lo que cuesta comunicarse, y termina; hágalo con un proceso y con "
                             "varios, y el entrenamiento dirá la eficiencia")
    parser.set_defaults(ema=None)
    return parser


@found_by_all
def complete(args, presets):
    """Fill what was not given from the preset; a given value always wins. Returns the model's config without its
    vocabulary, which the data decides."""
    initial.check_arguments(args)
    preset = presets[args.preset]
    values = {**dataclasses.asdict(preset.config), "lr": preset.lr, "warmup_ratio": preset.warmup_ratio,
              "grad_checkpointing": preset.grad_checkpointing, "ema": preset.ema, "beta2": preset.beta2}
    if args.epochs is None:
        values["max_steps"] = preset.max_steps
    for name, value in values.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    if args.benchmark and args.sync in ("fp16", "diloco"):
        raise UserError("--benchmark mide lo que cuesta intercambiar los gradientes en cada paso: quite --sync "
                        f"{args.sync}")
    if args.benchmark and args.fsdp:
        raise UserError("--benchmark mide procesos que tienen cada uno el modelo entero: quite --fsdp")
    if args.benchmark and args.prepare:
        raise UserError("--benchmark y --prepare se excluyen: --benchmark prepara los datos que falten y mide con "
                        "ellos; quite uno de los dos")
    config = hrm.HRMConfig(**{field.name: getattr(args, field.name) for field in dataclasses.fields(hrm.HRMConfig)})
    if not args.init_from:  # else the preset's sizes are not the model's
        require_sense(args, config)
    return config


@found_by_all
def require_sense(args, config):
    """Raise UserError for sizes that do not go together, or an option that has no effect on such a model."""
    if "ponder_price" in args.given and config.segments == 1:
        more = "" if args.init_from else ", o indique --segments 2 o más"
        raise UserError(f"--ponder-price {args.ponder_price:g} es el precio de un segmento más, y solo hay uno: quite "
                        f"esa opción{more}")
    config.check()


def load_data(args, dist, config, begun=None):
    """The prepared Dataset or, with --stream, the stream.Streamed that is read as the model trains. begun: an
    initial.Beginning, whose tokenizer they get, or None."""
    # Rank 0 decides for all: the text may lie on its machine alone, and its path pass for a name on the Hub elsewhere.
    kind = dist.run_on_main(lambda: _kind_to_stream(args, begun))
    args.stream = kind is not None
    if not args.stream:
        return pretrain.load_data(args, dist, config, begun)
    missing = kind == "ficheros" and not files.path_called(args.dataset_name, "--dataset").exists()
    found = None if missing else corpus.open_corpus(args.dataset_name, flag="--dataset")
    if missing or found.source["kind"] != kind:
        where = ("es del Hub en la máquina del rango 0, y en esta un fichero o una carpeta: cámbielo aquí de nombre"
                 if kind == "hub" else "está en la máquina del rango 0 y no en esta: cópielo aquí")
        raise UserError(f"--dataset {args.dataset_name!r}: {where}, o use --no-stream, que lo prepara y lo envía")
    return stream.open_stream(found, args.data_dir, dist, vocab_size=args.vocab_size, tokenizer_path=args.tokenizer,
                              tokenizer=begun and begun.tokenizer, val_fraction=args.val_fraction)


def _kind_to_stream(args, begun):
    """The kind of source that is to be read as the model trains, or None where the data are prepared before."""
    if args.dataset_name is None:
        if args.stream:
            raise UserError("--stream necesita --dataset: c4, spanish, propietario/nombre del Hub, o la ruta de un "
                            "texto")
        return None
    if args.stream is False:
        return None
    kind = corpus.open_corpus(args.dataset_name, flag="--dataset").source["kind"]
    if not args.stream and (kind != "hub" or args.prepare):
        return None
    if args.epochs:
        raise UserError(f"--epochs {args.epochs}: no se sabe cuánto dura una época de un texto que se lee a medida "
                        "que se entrena; use --max-steps, o --no-stream para prepararlo antes")
    if args.prepare:
        raise UserError("--stream y --prepare se excluyen: un texto que se lee a medida que se entrena no se prepara; "
                        "quite uno de los dos")
    if args.dataset_max_tokens:
        raise UserError(f"--dataset-max-tokens {args.dataset_max_tokens}: un texto que se lee a medida que se "
                        "entrena no se corta; use --max-steps, o --no-stream para prepararlo antes")
    pretrain.require_pieces(args, begun.tokenizer if begun else args.tokenizer and tokenizers.load(args.tokenizer))
    return kind


def keep_effective_batch(args, preset, world_size, note):
    """Decide --batch-size and --grad-accum: what was given wins; else they are what keeps the preset's sequences per
    step on this number of processes."""
    wanted = preset.effective_batch
    args.batch_size = args.batch_size or max(1, min(preset.batch_size, wanted // world_size))
    together = args.batch_size * world_size
    if args.grad_accum is not None:
        return
    args.grad_accum = max(1, round(wanted / together))
    if (args.batch_size, args.grad_accum) != (preset.batch_size, preset.grad_accum):
        reached = args.grad_accum * together
        note(f"Lote {args.batch_size} y acumulación {args.grad_accum}: cada paso tiene {counted(reached, 'secuencia')}"
             + (f", las del preset, pensado para {preset.gpus} GPU." if reached == wanted else
                f", y no las {wanted} del preset, que no se pueden repartir así."))


def announce(args, dist, data):
    """The lines that say who trains, with what batch and for how long."""
    gpus = dist.world_size if dist.device.type == "cuda" else 0
    dist.print(f"World size: {dist.world_size}")
    dist.print(f"Total de GPUs: {gpus}" + ("" if gpus else " (se entrena en la CPU)"))
    dist.print(f"Backend: {dist.backend}")
    dist.print(f"Batch size por {'GPU' if gpus else 'proceso'}: {args.batch_size}")
    dist.print(f"Gradient accumulation steps: {args.grad_accum}")
    together = args.batch_size * args.grad_accum * dist.world_size
    dist.print(f"Effective batch size: {together}")
    per_epoch = None if args.stream else (data.tokens("train") - 1) // args.seq_len // together
    dist.print(f"Total training steps: {args.max_steps or args.epochs * per_epoch}")
    dist.print(f"Steps por época: {'no se sabe, el texto se lee al entrenar' if args.stream else per_epoch}")


def make_loss(eos_id, document_attention):
    """loss(model, batch) -> (summed cross-entropy of each next token in nats, how many). batch: int64 [B, T + 1]."""

    def loss(model, batch):
        inputs, targets = batch[:, :-1], batch[:, 1:]
        bounds = {"cu_seqlens": document_bounds(inputs, eos_id)} if document_attention else {}
        return model(inputs, targets, **bounds), targets.numel()

    return loss


def document_bounds(tokens, eos_id):
    """int64 [documents + 1]: where documents begin in the flattened tokens [B, T], and the end. One begins with each
    row and after each eos_id, which belongs to the document it ends. (Every attention on a GPU would convert int32.)"""
    begins = tokens.roll(1, dims=1) == eos_id
    begins[:, 0] = True
    starts = begins.flatten().nonzero().squeeze(1)
    return torch.cat([starts, starts.new_tensor([tokens.numel()])])


def run(parser, presets):
    """Prepare, build, train; returns the exit code. parser: of make_parser. presets: name -> Preset."""
    args = parser.parse_args()
    config = complete(args, presets)
    with distributed.session(args) as dist:
        start.tune_allocator(dist.device, args.grad_checkpointing)
        if not args.prepare:
            start.check_places(args, dist)
            start.require_means(args, dist)
        begun = initial.read(args, dist, hrm.HRMConfig)
        if begun:
            config = begun.config
            initial.lower_rate(args, dist.print)
            require_sense(args, config)
        if not args.prepare:
            pretrain.refuse_too_large(args, config, dist)
        data = load_data(args, dist, config, begun)
        if args.prepare:
            return EXIT_OK
        keep_effective_batch(args, presets[args.preset], dist.world_size, dist.print)
        if not config.input_learns:
            dist.print(f"Aviso: con --h-cycles {config.h_cycles} y --l-cycles {config.l_cycles}, las "
                       f"{hrm.MAX_BP_PASSES} últimas pasadas, que son las que tienen gradientes, no leen el texto, y "
                       "sus vectores solo aprenden como salida: añada --reinject.")
        announce(args, dist, data)
        config = dataclasses.replace(config, vocab_size=data.vocab_size)
        return train(args, dist, data, config, begun)


def train(args, dist, data, config, begun=None):
    """Build the model and train it; returns the exit code. begun: an initial.Beginning or None."""
    start.require_memory(args, config, dist, pretrain.SMALLER)
    model = initial.built(begun, dist, lambda: hrm.HRM(config), args.seed)
    model.grad_checkpointing = args.grad_checkpointing
    loss = make_loss(data.load_tokenizer().eos_id, args.document_attention)
    if args.benchmark:
        precision = start.agree_precision(args, dist)
        scaling.benchmark(args, dist, pretrain.make_loaders(args, dist, data)[0], precision, config, model, loss)
        return EXIT_OK
    optimizer = optim.adamw(model, args.lr, args.weight_decay, betas=(optim.BETAS[0], args.beta2))

    def schedule(step, steps):
        return optim.warmup_cosine(step, steps=steps, warmup_steps=round(args.warmup_ratio * steps), lr=args.lr,
                                   min_lr=args.min_lr_ratio * args.lr)

    def begin_step(step, steps):
        model.bp_passes = hrm.bp_passes(step, steps)

    return pretrain.train(args, dist, data, model, optimizer, schedule, loss, begin_step=begin_step, begun=begun,
                          measured=scaling.recorded(args, config, dist.device))
