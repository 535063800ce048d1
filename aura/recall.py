"""A run that goes on with the arguments and the data of its checkpoint, where none are given anew."""

from pathlib import Path

from aura import corpus, dataset, optim
from aura.checkpoint import WEIGHTS_ALONE, choose, holds_weights_alone, peek
from aura.errors import UserError


def place(args):
    """Put everything that was given no place of its own into the output folder. Where that is not given, it is the one
    of the checkpoint to go on from, or `salida`."""
    if args.output_dir is None:
        named = Path(args.resume)
        folder = named if named.is_dir() else named.parent
        args.output_dir = "salida" if args.resume in ("auto", "none") else str(folder)
    folder = Path(args.output_dir)
    for name, value in {"checkpoint_dir": folder, "log_dir": folder, "data_dir": folder / "datos",
                        "output": folder / "final_model.pt"}.items():
        if getattr(args, name) is None:
            setattr(args, name, str(value))


def recorded(args, note=print):
    """The checkpoint that a run with these arguments goes on from, its tensors still on the disk, or None.

    args.resume then names it, so that the same one is loaded later.
    """
    if args.resume == "none":
        return None
    path = choose(args.resume, args.checkpoint_dir, note)
    if path is None:
        return None
    args.resume = str(path)
    state = peek(path)
    if not all(isinstance(state.get(part), dict) for part in ("arguments", "config", "dataset")):
        what = WEIGHTS_ALONE if holds_weights_alone(state) else "no es un punto de control de este proyecto"
        raise UserError(f"{str(path)!r} {what}: indique un checkpoint-step-N.pt, o su carpeta")
    if "output_dir" not in state["arguments"]:
        raise UserError(f"{str(path)!r} es de otro de los scripts: reanúdelo con aquel")
    if state["arguments"]["grad_checkpointing"] is True:  # from when there was no other way
        state["arguments"]["grad_checkpointing"] = "full"
    state["arguments"].setdefault("beta2", optim.BETAS[1])  # of all runs from before it could be chosen
    return state


def arguments(args, state, fixed, flag, note):
    """Take from the checkpoint `state` every argument that was not given now. fixed: names that a resumed run cannot
    change. flag(name) -> how the script calls an argument. Raises UserError for a fixed one that was given anew.

    The folders are those of before as well, unless the checkpoint no longer lies where it was written. Arguments that
    the run itself had to replace, kept as asked_NAME, are compared as they were asked for: the same order goes on with
    what they were replaced by."""
    before = state["arguments"]
    replaced = {name: value for name, value in before.items() if f"asked_{name}" in before}
    before = before | {name: before[f"asked_{name}"] for name in replaced}
    given = args.given - {"preset"} if args.preset == "auto" else args.given
    if all(getattr(args, name) == replaced[name] for name in given & replaced.keys()):
        given -= replaced.keys()  # as the run itself said that it went on
    asked = {name for name in given if name in before and getattr(args, name) != before[name]}
    old, new = before.get("tokenizer"), args.tokenizer
    if old and new and Path(old).resolve() == Path(new).resolve():
        asked.discard("tokenizer")
    refused = [f"{flag(name)} {getattr(args, name)} (antes {_told(before[name])})" for name in fixed if name in asked]
    if refused:
        raise UserError(f"{args.resume} no puede seguir con {', '.join(refused)}: quite esas opciones, o empiece de "
                        "cero en otra --output_dir")
    places = {"output_dir", "checkpoint_dir", "log_dir", "data_dir", "output", "resume", "dataset_name"}
    for name in sorted(asked - places - {"prepare", "dry_run"}):  # these two say what to do now, not how to train
        note(f"Cambia respecto al punto de control: {flag(name)} {_told(before[name])} -> "
             f"{_told(getattr(args, name))}.")
    moved = Path(before["checkpoint_dir"]).resolve() != Path(args.checkpoint_dir).resolve()
    for name in before.keys() & vars(args).keys() - (places if moved else {"resume", "dataset_name"}) - given:
        setattr(args, name, before[name])
    for name, over in (("epochs", "max_steps"), ("warmup_ratio", "warmup_steps")):  # `over` has the last word
        if name in given and over not in given and getattr(args, over) is not None:
            note(f"Cambia respecto al punto de control: {flag(over)} {getattr(args, over)} -> sin indicar.")
            setattr(args, over, None)
    if "dataset_name" not in given:
        args.dataset_name = before["dataset_name"]
    if replaced and all(getattr(args, name) == before[name] for name in replaced):
        note(f"Se sigue con {' '.join(f'{flag(name)} {value}' for name, value in replaced.items())}, como hubo "
             "que seguir la vez anterior.")
        for name, value in replaced.items():
            replace(args, name, value)


def _told(value):
    """An argument's value as Spanish text."""
    return {"None": "sin indicar", "True": "sí", "False": "no"}.get(str(value), value)


def replace(args, name, value):
    """Give the argument `name` another value than the user's, which stays known as asked_NAME for arguments()."""
    vars(args).setdefault(f"asked_{name}", getattr(args, name))
    setattr(args, name, value)


def _unless_another(args, state):
    """What to add to that data are prepared again, where it may be the text of others: which only shows then."""
    name = state["dataset"]["name"]
    if "dataset_name" in args.given and corpus.open_corpus(args.dataset_name).name != name:
        return f"; si --dataset_path {args.dataset_name!r} no es el mismo texto ({name!r}), no se podrá seguir"
    return ""


def data(args, state, note):
    """The prepared Dataset that the checkpoint `state` was trained on, or None when it is no longer there.

    Raises UserError when the arguments name another corpus or tokenizer.
    """
    known = state["dataset"]["sha256"]
    data = next((data for data in dataset.prepared(args.data_dir, note) if data.sha256 == known), None)
    if data is None:
        note(f"Los datos preparados con que se entrenó {args.resume} no están en {args.data_dir}: se preparan de "
             f"nuevo{_unless_another(args, state)}.")
        return None
    if "dataset_name" in args.given and not dataset.same_text(
            data, corpus.open_corpus(args.dataset_name, max_tokens=args.dataset_max_tokens)):
        raise UserError(f"--dataset_path {args.dataset_name!r} no es el corpus con que se entrenó {args.resume} "
                        f"({state['dataset']['name']!r}): quite esa opción, o empiece en otra carpeta")
    try:
        data.verify()
    except UserError as problem:
        note(f"Aviso: {problem}. Se preparan de nuevo.")
        return None
    return data
