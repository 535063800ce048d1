"""Going on from a checkpoint: whether it is of this run, what of it is put back, what is said of what has changed."""

import argparse
import shlex
import shutil
from dataclasses import asdict
from pathlib import Path

import torch

from aura import checkpoint, models, report, sharding, sync
from aura import tokenizer as tokenizers
from aura.checkpointer import asked
from aura.errors import UserError, agreed
from aura.files import explain, regular

# Arguments that a resumed run may change, and that change how it learns. What is asked for now holds; it is said aloud,
# for whoever has just forgotten to repeat an option.
RECIPE = ("batch_size", "grad_accum", "lr", "min_lr_ratio", "warmup_ratio", "weight_decay", "beta2", "grad_clip",
          "dropout", "ema", "precision", "epochs", "max_steps", "sync")
ANOTHER = "indique otro con --resume, o --resume none para empezar de cero"
PARTS = "model", "optimizer", "scaler", "loader", "progress", "dataset"  # of a checkpoint, each of them a dict


def restore(args, dist, checkpointer, run, strict=False):
    """Put the newest checkpoint (--resume auto), a given one, or none, back into the loop.Run.

    Raises UserError when it belongs to another model or tokenizer. Another data set begins at its first sample or, when
    strict, is refused as well.
    """
    meant, state = dist.run_on_main(lambda: asked(args.resume, checkpointer.directory, dist)), None
    if meant != "none":
        state = checkpointer.load(meant, sharding.own_part(run.module, run.optimizer), run.sync.setting)
    if state is None:
        checkpointer.start_fresh()  # damaged ones too: rotation would keep them, and not the new ones
        checkpointer.sign(run.sync.origin)
        checkpointer.begin(meant)
        return
    _require_same(state, checkpointer.last, checkpointer.constants, _tokenizers_at_hand(args))
    if missing := [name for name in PARTS if not isinstance(state.get(name), dict)]:
        raise agreed(UserError, f"{checkpointer.last} no tiene {', '.join(missing)}: no es un punto de control "
                     f"entero; {ANOTHER}")
    _keep_beginning(state, checkpointer.constants)
    same_data = state["dataset"]["sha256"] == checkpointer.constants["dataset"]["sha256"]
    if strict and not same_data:
        raise agreed(UserError, f"{checkpointer.last} se entrenó con otros datos ({state['dataset']['name']!r}): "
                     "indique aquellos, o empiece de cero en otra carpeta")
    if folder := checkpointer.branch_off():
        _keep_log(args, dist, folder)
    checkpointer.begin(meant)
    run.restore(state, same_data)
    if meant != "auto" and run.sync.origin:  # what others hold of the way that was left is not this run's
        run.sync.origin = sync.name_run(dist)
    checkpointer.sign(run.sync.origin)
    progress, before = run.progress, state.get("arguments", {})
    run.before = {**before, "seed": state["loader"]["seed"] if same_data else args.seed}
    if not same_data:
        progress.epoch_loss, progress.epoch_tokens, progress.owed = 0.0, 0, None
    if "lr" in before and before["lr"] != args.lr:
        progress.lr_scale = 1.0
    _say_resumed(args, dist, run, state, checkpointer.last, same_data)


def as_learnt(args, run, first, steps):
    """The arguments by which a run of so many steps that went on from step `first` has learnt: the seed that its data
    began with, and, where no step was left to take, all of the checkpoint's, whatever is asked for now."""
    names = {"seed"} if first < steps else {"seed", *RECIPE, "attention", "compile", "grad_checkpointing"}
    return argparse.Namespace(**{name: run.before[name] if name in names and name in run.before else value
                                 for name, value in vars(args).items()})


def _keep_beginning(state, constants):
    """What the run began with goes on into its next checkpoints, also where --init-from is not repeated."""
    if state.get("begun_with") and not constants.get("begun_with"):
        constants["begun_with"] = state["begun_with"]
        constants["arguments"]["init_from"] = state["arguments"].get("init_from")


def _keep_log(args, dist, folder):
    """Copy tables and curve of the way that a run leaves to where its checkpoints have gone: the log goes on without
    the rows that do not lead to where it begins."""
    try:
        for path in [*Path(args.log_dir).glob("*.csv"), *Path(args.log_dir).glob(report.CURVE)]:
            shutil.copy2(path, folder)
    except OSError as problem:
        raise UserError(f"no se puede copiar el registro de {args.log_dir!r} a {str(folder)!r} ({explain(problem)}); "
                        "haga sitio, y repita la orden") from problem
    dist.print("Ahí queda también una copia del registro. Si en --output hay ya un modelo, el de ahora tomará su "
               f"lugar: cópielo si quiere conservarlo ({args.output}).")


def _say_resumed(args, dist, run, state, path, same_data):
    """Tell where the run goes on from, and in what it will not be as it was when `state` was saved."""
    progress, before = run.progress, state.get("arguments", {})
    if same_data and "seed" in before and (seed := state["loader"]["seed"]) != args.seed:
        dist.print(f"El orden de los datos sigue siendo el de --seed {seed}, con que se empezó; --seed {args.seed} "
                   "se usa para todo lo demás que es aleatorio.")
    dist.print(f"Se reanuda en el paso {progress.step} desde {path}.")
    now = vars(args)
    shown = {name: ["sin indicar" if values[name] is None else values[name] for values in (now, before)]
             for name in RECIPE if name in before and name in now and before[name] != now[name]
             and not (name == "epochs" and now.get("max_steps"))}  # which decide nothing then
    changed = [f"--{name.replace('_', '-')} {is_now} (antes {was})" for name, (is_now, was) in shown.items()]
    if changed and "output_dir" not in now:  # else recall.arguments() has told
        dist.print(f"Se usan los valores indicados ahora, distintos de los de antes: {', '.join(changed)}.")
    if progress.lr_scale != 1:
        dist.print(f"La tasa de aprendizaje sigue siendo la prevista multiplicada por {progress.lr_scale:g}, por los "
                   "valores no finitos de antes; si indica otro --lr, se usa tal cual.")
    if run.sync.setting and "own" not in state:
        dist.print("Cada proceso parte de los pesos acordados: los procesos o --sync no son los de antes, o falta lo "
                   "que guardó alguno.")
    if not same_data:
        dist.print(f"Los datos son otros (antes {state['dataset']['name']!r}): se empieza por su principio.")


def length(args, dist, loader, progress):
    """(steps of the whole run, `fewer`).

    Where --epochs says how long the run is, the steps before a resume may each have taken more or less data than one
    takes today: on another number of processes, or of another data set. They count as the number of today's steps that
    would have seen as much; `fewer` is how many steps less that is. The learning rate follows the schedule of a run
    made of today's steps only: that of step - fewer, out of steps - fewer."""
    if args.max_steps:
        return args.max_steps, 0
    whole, batch = args.epochs * loader.steps_per_epoch, args.batch_size * args.grad_accum * dist.world_size
    left = (args.epochs - 1 - loader.epoch) * loader.steps_per_epoch + (loader.windows - loader.samples) // batch
    seen = whole - left
    if seen != progress.step:
        seen = min(seen, whole)  # more epochs may be done than are asked for now
        dist.print("Antes cada paso llevaba otros datos u otra cantidad: lo ya visto equivale a "
                   f"{seen} de los {whole} pasos de ahora, y faltan {whole - seen}.")
    fewer = progress.step - seen
    return whole + fewer, fewer


def require_same(args, dist, config, vocabulary, begun_with=None):
    """Raise UserError when the checkpoint that --resume means, if any, belongs to another model or tokenizer: on rank
    0, before the data that it was trained on are replaced. vocabulary: the tokenizer as bytes. begun_with: as
    start.make_checkpointer() takes it."""
    meant = asked(args.resume, args.checkpoint_dir, dist)
    path = meant != "none" and checkpoint.choose(meant, args.checkpoint_dir)
    if path:
        now = about(config, vocabulary) | {"arguments": vars(args) | {"resume": meant}, "begun_with": begun_with}
        _require_same(checkpoint.peek(path), path, now, _tokenizers_at_hand(args))


def about(config, vocabulary):
    """What a checkpoint says of its model and of its tokenizer, the bytes `vocabulary`."""
    return {"config": asdict(config), "tokenizer": torch.frombuffer(bytearray(vocabulary), dtype=torch.uint8)}


def _tokenizers_at_hand(args):
    """Files among the prepared data that may hold a checkpoint's tokenizer, for a message to name; none for
    train_tensordock.py, which goes on with no other text than that of the run."""
    folder = "" if "output_dir" in vars(args) else getattr(args, "data_dir", "")
    return [path for name in tokenizers.NAMES for path in sorted(Path(folder).glob(f"[!.]*/{name}"))] if folder else []


def _bytes_of(file):
    """What a file holds, None where it is missing or may not be read."""
    try:
        return regular(file).read_bytes()
    except OSError:
        return None


def _require_same(state, path, constants, earlier=()):
    """Raise UserError unless the checkpoint `state` of `path` is of the model and tokenizer in `constants`; every rank
    has rank 0's, so all of them find it and one tells. earlier: files that may hold the checkpoint's tokenizer."""
    kinds = {"config": dict, "tokenizer": torch.Tensor, "dataset": dict}
    if wrong := [name for name, kind in kinds.items() if name in state and not isinstance(state[name], kind)]:
        raise agreed(UserError, f"{path} no es un punto de control de este proyecto (no es lo que debe: "
                     f"{', '.join(wrong)}); {ANOTHER}")
    # Where it was asked for by name, another folder would change nothing.
    found = constants.get("arguments", {}).get("resume", "auto") == "auto"
    anew = f"{'otra --checkpoint-dir, ' * found}o --resume none para empezar de cero"
    try:
        _require_same_weights(state, path, constants, anew)
        _require_same_model(state, path, constants, earlier, anew)
        _require_same_beginning(state, path, constants, anew)
    except KeyError as problem:
        what = checkpoint.WEIGHTS_ALONE if checkpoint.holds_weights_alone(state) else (
            f"no es un punto de control de este proyecto (le falta {problem})")
        raise agreed(UserError, f"{path} {what}; {ANOTHER}") from problem


def _require_same_weights(state, path, constants, anew):
    """Raise UserError for other weights to begin with: before their sizes are compared, which follow from them. anew:
    Spanish for how to begin anew."""
    theirs, ours = (each.get("begun_with") for each in (state, constants))
    if not theirs or not ours or theirs == ours:
        return
    name, value = next(item for item in state["arguments"].items() if item[0] in ("init_from", "model"))
    gone = (", que ya no son los que hay ahí (si los reemplazó otra ejecución, están en una carpeta anterior-… a su "
            "lado)") * (constants.get("arguments", {}).get(name) == value)
    raise agreed(UserError, f"{path} empezó con otros pesos, los de --{name.replace('_', '-')} {value!r}{gone}: "
                 f"indique aquellos, {anew}")


def _require_same_model(state, path, constants, earlier, anew):
    """Raise UserError for another model or tokenizer, KeyError where the checkpoint lacks either. anew: Spanish for how
    to begin anew."""
    way_out = f"use las mismas opciones, {anew}"
    data, now = (each.get("dataset", {}).get("name") for each in (state, constants))
    if now and data and data != now:
        way_out = f"los datos eran {data!r} y ahora son {now!r}: indique aquellos, o {way_out}"
    theirs, ours = models.completed(state["config"]), constants["config"]
    if theirs.keys() != ours.keys():
        raise agreed(UserError, f"{path} es de otro de los scripts, o de otra versión de este "
                     f"({', '.join(sorted(theirs.keys() ^ ours.keys()))}): reanúdelo con aquel, {anew}")
    differing = [f"{key}={theirs.get(key)} (ahora {value})" for key, value in ours.items()
                 if theirs.get(key) != value and key not in ("dropout", "attention_dropout")]
    if theirs.get("exit_weights") and not ours["exit_weights"]:  # as all had before there was the option
        way_out = f"siga con --exit-weights; si no, {way_out}"
    pieces, now_pieces = (each["tokenizer"].numpy().tobytes() for each in (state, constants))
    same_pieces = tokenizers.same_pieces(pieces, now_pieces)
    if any(not each.startswith("vocab_size=") for each in differing):  # then no tokenizer would do
        earlier = ()
    if not same_pieces and (file := next((file for file in earlier if _bytes_of(file) == pieces), None)):
        way_out = ("para seguir con este texto, prepárelo con el tokenizador de antes, --tokenizer "
                   f"{shlex.quote(str(file))}; si no, {way_out}")
    if differing:
        raise agreed(UserError, f"{path} es de otro modelo: {', '.join(differing)}; {way_out}")
    if not same_pieces:
        if str(constants.get("arguments", {}).get("model")).startswith("random:"):
            way_out = f"con --model random:... sale de las preguntas, que serán otras: {way_out}"
        raise agreed(UserError, f"{path} se entrenó con otro tokenizador; {way_out}")


def _require_same_beginning(state, path, constants, anew):
    """Raise UserError for a beginning with weights, or with none, that is not this run's, or another --padding. anew:
    as above."""
    theirs, ours = (each.get("begun_with") for each in (state, constants))
    if ours and not theirs and (named := constants["arguments"].get("init_from")):
        raise agreed(UserError, f"{path} no empezó con los pesos de --init-from {named!r}: para empezar con ellos, "
                     f"{anew.replace(' para empezar de cero', '')}; para seguir desde ese, quite --init-from")
    models = [str(each.get("arguments", {}).get("model")) for each in (state, constants)]
    if bool(theirs) != bool(ours) and any(name.startswith("random:") for name in models):  # which have no checksum
        raise agreed(UserError, f"{path} empezó con otros pesos, los de --model {models[0]!r}: indique aquellos, "
                     f"{anew}")
    theirs, ours = (each.get("arguments", {}).get("padding") for each in (state, constants))
    if theirs and ours and theirs != ours:
        raise agreed(UserError, f"{path} empezó con --padding {theirs}, que también decide el orden de los datos: "
                     f"indique ese, {anew}")
