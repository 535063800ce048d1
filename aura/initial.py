"""--init-from: a training that begins with the weights of another model: one of this project, or a published GPT-2."""

import os
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from aura import cli, gpt2, models, output, published, tokenizer
from aura.checkpoint import choose, peek
from aura.checkpointer import asked
from aura.errors import TrainingFault, UserError, found_by_all
from aura.files import path_called
from aura.models import gpt, hrm

FLAG = "--init-from"
GPT2_HELD = "un .pth o .pt de este proyecto, o un GPT-2 de Hugging Face, su carpeta o su nombre"
FILES = [published.CONFIG, published.WEIGHTS, published.TOKENIZER, "tokenizer_config.json", "tokenizer.model",
         "vocab.json", "merges.txt"]
# Share of a preset's learning rate for weights that are trained already. demo of train_gpt2_spanish.py, trained on four
# fifths of the Quijote and for one epoch on the rest, validated at 4.91, 4.90, 4.91 and 5.00 there with 0.03, 0.1, 0.3
# and 1 times its rate.
CONTINUED = 0.1
# What a training may choose anew, and the name that a model has in an error message.
ANEW = {gpt.GPTConfig: ("seq_len", "dropout"), hrm.HRMConfig: ("seq_len", "ponder_price")}
CALLED = {gpt.GPTConfig: "un GPT-2", hrm.HRMConfig: "un HRM"}
# A padding and an end-of-document token may have been added to a tokenizer (tokenizer.load), no more.
NEW_PIECES = 2


@dataclass
class Beginning:
    """What a training begins with. checksum: the CRC-32 of the weights, as they were read. On rank 0 weights: {our
    name: float32 tensor on the CPU}, until a module has them, and the model's tokenizer; None on the others."""

    config: gpt.GPTConfig | hrm.HRMConfig
    checksum: int
    weights: dict | None = None
    tokenizer: object = None


def add_argument(group, held):
    """Add --init-from to a group of arguments. held: Spanish for what it may be."""
    group.add_argument(FLAG, type=cli.path, metavar="RUTA|NOMBRE",
                       help="empieza con los pesos, las medidas y el tokenizador de un modelo ya entrenado: "
                            f"{held}; --preset da entonces solo la receta")


def check_arguments(args):
    """Raise UserError for a tokenizer beside the model's own."""
    if args.init_from and args.tokenizer:
        raise UserError(f"--tokenizer {args.tokenizer!r}: con {FLAG} el tokenizador es el de ese modelo; quite "
                        "--tokenizer")


def lower_rate(args, note):
    """Take a share of the preset's learning rate, for weights that are trained already, where none was given."""
    if "lr" in args.given:
        return
    args.lr *= CONTINUED
    if not args.prepare:
        note(f"--lr {args.lr:g}: la décima parte de la del preset, pues esos pesos ya están entrenados.")


def read(args, dist, kind, asked_for=None):
    """The Beginning that --init-from names, a model of the config `kind`, which only rank 0 needs to have, with the
    sizes put into `args`; None where it was not given. asked_for: the arguments that the user has chosen, args.given
    unless a checkpoint has more of them. Raises UserError."""
    if args.init_from is None:
        return None
    found = dist.made_on_main(lambda: _read_or_known(args, kind, dist))
    values, checksum = dist.run_on_main(lambda: [asdict(found.config), found.checksum])
    asked_for = args.given if asked_for is None else asked_for
    return _fitted(args, found or Beginning(kind(**values), checksum), asked_for)


def weights(args, dist, begun):
    """The weights that the training began with, on every rank, read again. Raises TrainingFault where they are no
    longer there."""
    return dist.broadcast_tree(dist.made_on_main(lambda: _again(args, begun)))


def _again(args, begun):
    try:
        kind = type(begun.config)
        found = _fitted(args, _read(args, kind, lambda line: None), {*args.given, *ANEW[kind]})
    except UserError as problem:
        raise TrainingFault(f"no hay punto de control, y el modelo del que se partió no se puede leer: {problem}"
                            ) from problem
    if found.checksum != begun.checksum:
        raise TrainingFault(f"no hay punto de control, y {FLAG} {args.init_from!r} ya no es el modelo del que se "
                            "partió")
    return found.weights


def _read_or_known(args, kind, dist):
    """_read() or, where there is no such model any more, what the checkpoint of the run that began with it knows of it:
    all but its weights, which that run no longer needs."""
    try:
        return _read(args, kind, dist.print)
    except UserError:
        meant = asked(args.resume, args.checkpoint_dir, dist)
        path = None if meant == "none" or args.prepare or os.path.lexists(args.init_from) else \
            choose(meant, args.checkpoint_dir)
        state = peek(path) if path else {}
        if not state.get("begun_with") or state["arguments"].get("init_from") != args.init_from:
            raise
        dist.print(f"Aviso: {FLAG} {args.init_from!r} ya no se puede leer; se sigue sin él: {path} tiene lo que hace "
                   "falta.")
        config = models.described(state["config"], state["model"], repr(str(path)))
        pieces = tokenizer.from_bytes(state["tokenizer"].numpy().tobytes())
        return Beginning(config, state["begun_with"], state["model"], pieces)


def _read(args, kind, note):
    named = f"{FLAG} {args.init_from!r}"
    values, found, pieces, _ = opened(args.init_from, FLAG, note, lambda files: _require_apart(args, files, named),
                                      only_ours=kind is not gpt.GPTConfig)
    config = models.described(values, found, named)
    if not isinstance(config, kind):
        raise UserError(f"{named}: es {CALLED[type(config)]}, y este programa entrena {CALLED[kind]}: indique otro "
                        "modelo")
    checksum = 0
    for name in sorted(found):
        checksum = zlib.crc32(found[name].contiguous().view(-1).view(torch.uint8).numpy(), checksum)
    new = pieces.vocab_size - config.vocab_size
    config, found = with_pieces(config, found, pieces, named)
    rows = f" ({new} que no tenía)" * (new > 0) + f" (de {config.vocab_size - new}, las de su tokenizador)" * (new < 0)
    note(f"Se parte de {args.init_from}: {config.parameters() / 1e6:.2f} M parámetros, contexto {config.seq_len}, "
         f"vocabulario {config.vocab_size}{rows}.")
    return Beginning(config, checksum, found, pieces)


def opened(name, flag, note, prove=lambda files: None, only_ours=False):
    """(configuration as a dict, {our name: tensor}, tokenizer, output.learnt_from() it) of the model called `name`: one
    of this project or, unless only_ours, a GPT-2 that transformers or the Hub have.

    flag: the argument that error messages name. prove(files): is called with the paths before they are read, and may
    raise UserError, as this does for what is no such model or cannot be read.
    """
    named = f"{flag} {name!r}"
    path = path_called(name, named)
    own = sorted([*path.glob("*.pt"), *path.glob("*.pth")]) if path.is_dir() else []
    if own and not (path / published.CONFIG).exists():
        raise UserError(f"{named}: indique un fichero de esa carpeta, por ejemplo {str(own[-1])!r}")
    if path.is_file() and path.name == published.WEIGHTS and not only_ours:
        raise UserError(f"{named}: indique la carpeta en la que está, que tiene también su configuración y su "
                        f"tokenizador: {str(path.parent)!r}")
    misspelt = path.suffix in (".pth", ".pt") and not path.exists()  # which is none of the Hub's
    if path.is_file() or misspelt or only_ours:
        prove({path, path.with_suffix(".json")})
        return output.read_output(path, flag)
    folder = published.find(name, flag, gpt2.HELD, FILES, "un modelo de este proyecto es su fichero .pth o .pt",
                            note=note)
    prove({folder / file for file in FILES})
    return *gpt2.read(folder, flag), tokenizer.load(folder, flag), output.learnt_from({})


def usable(name, flag, note):
    """(config, weights, tokenizer, output.learnt_from() it) of the model called `name`, to be used as it is: rows that
    it has beyond its tokenizer's take their probability too. As opened(); raises UserError."""
    named = f"{flag} {name!r}"
    values, weights, pieces, learnt = opened(name, flag, note)
    config = models.described(values, weights, named)
    if learnt["arguments"]:  # of this project, where nothing is added to a tokenizer
        models.require_pieces(pieces, config, named)
    elif pieces.vocab_size > config.vocab_size:
        grown = with_pieces(config, weights, pieces, named)
        # A padding piece alone, which no text has, would take probability for nothing.
        if (config.vocab_size, pieces.vocab_size) != (pieces.pad_id, pieces.pad_id + 1):
            config, weights = grown
    return config, weights, pieces, learnt


def with_pieces(config, found, pieces, named):
    """(the config, the float32 weights) of a model with as many rows in its embedding as its tokenizer has pieces.
    named: how the error message calls it. Raises UserError where that has others than the model's."""
    if pieces.vocab_size > config.vocab_size + NEW_PIECES:
        raise UserError(f"{named}: su tokenizador tiene {pieces.vocab_size} piezas y el modelo solo "
                        f"{config.vocab_size}: no son del mismo modelo; indique otro")
    found = {name: value.float() for name, value in found.items()}
    found["wte.weight"] = _with_rows(found["wte.weight"], pieces.vocab_size)
    return replace(config, vocab_size=pieces.vocab_size), found


def _require_apart(args, files, named):
    """Raise UserError where the run would put its own files in the place of those of the model, which the same command
    reads again when it goes on."""
    if args.prepare:
        return
    files = {path.resolve() for path in files}
    # First: another --output would not help where all of a run lies in one folder.
    if Path(args.checkpoint_dir).resolve() in {path.parent for path in files}:
        flag = "--output-dir" if vars(args).get("output_dir") == args.checkpoint_dir else "--checkpoint-dir"
        raise UserError(f"{named} está en {flag}, donde se guardarán los puntos de control de este entrenamiento: "
                        f"indique otra {flag}")
    for path in (Path(args.output), Path(args.output).with_suffix(".json")):
        if path.resolve() in files:
            raise UserError(f"--output {args.output!r} reemplazaría {path.name}, del modelo del que se parte: indique "
                            "otro --output")


def _with_rows(embedding, count):
    """The embedding with `count` rows. Pieces that the model has never seen get the mean of the others: a GPT-2's
    logits lie far below 0, where one of a fresh row would be, and then it would be the likeliest of all (Hewitt 2021,
    "Initializing New Word Embeddings for Pretrained Language Models")."""
    fresh = embedding.mean(0, keepdim=True).expand(max(0, count - len(embedding)), -1)
    return torch.cat([embedding[:count], fresh])


@found_by_all
def _fitted(args, begun, asked_for):
    """`begun` with those values of ANEW that were asked for; what else was must be what it is."""
    config, weights, anew = begun.config, begun.weights, ANEW[type(begun.config)]
    for name, has in asdict(config).items():
        flag, given = f"--{name.replace('_', '-')}", getattr(args, name, has)
        if name in asked_for and name not in (*anew, "vocab_size") and given != has:
            if isinstance(has, bool):
                raise UserError(f"{flag if given else f'--no-{flag[2:]}'}: el modelo de {FLAG} no es así; quítelo")
            raise UserError(f"{flag} {given}: el modelo de {FLAG} tiene {has}; quite {flag}")
    learnt = isinstance(config, gpt.GPTConfig)  # each position, and there are no others
    if learnt and "seq_len" in asked_for and args.seq_len > config.seq_len:
        raise UserError(f"--seq-len {args.seq_len}: el modelo de {FLAG} lee hasta {config.seq_len} tokens; indique "
                        f"{config.seq_len} o menos")
    config = replace(config, **{name: getattr(args, name) for name in anew if name in asked_for})
    for name, value in asdict(config).items():
        if name != "vocab_size" or name not in asked_for:  # else whoever prepares the data says so
            setattr(args, name, value)
    if learnt and weights:
        weights = {**weights, "wpe.weight": weights["wpe.weight"][:config.seq_len]}
    return replace(begun, config=config, weights=weights)


def built(begun, dist, make, seed, again=False):
    """make() with the weights to begin with, the same on every rank that holds them whole. `begun` then has none left,
    unless they may be wanted again: no copy of them takes memory while the model trains (see weights())."""
    model = dist.build(make, lambda model: filled(model, begun, dist, seed))
    if begun and not dist.sharded:
        dist.broadcast_weights(model)
    if begun and not again:
        begun.weights = None
    return model


def filled(model, begun, dist, seed):
    """`model` with the weights to begin with, for dist.build: those of `begun` on rank 0, fresh ones elsewhere and
    where there is none."""
    if begun and dist.main:
        model.load_state_dict(begun.weights)
        return model
    return model.init_weights(seed)
