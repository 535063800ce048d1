"""Answering questions with a model as it is: what train_distributed.py does with --max-steps 0."""

import json
from pathlib import Path

from aura import finetune, optim, output, pretrained, sharding, start
from aura.errors import EXIT_OK, UserError
from aura.files import MISSHAPEN, require_writable_directory, set_aside

DEFAULTS = {"output": "./respuestas", "max_val_examples": 0}  # what is taken where nothing is given
DECIDE = ("max_len", "doc_stride", "question_len")  # how questions become windows, and so what a model answers


def require_place(args):
    """Make --output ready for the answers; those to other questions, or of another model, are moved aside. Raises
    UserError where it cannot take them, or has a model's own; on rank 0."""
    if Path(args.output, pretrained.WEIGHTS).exists():
        raise UserError(f"--output {args.output!r} contiene un modelo, cuyas cifras y respuestas se perderían: indique "
                        "otra --output")
    require_writable_directory(args.output, "--output")
    answered = [Path(args.output, name) for name in ("metrics.json", "predictions.json")]
    try:
        described = json.loads(answered[0].read_text(encoding="utf-8"))
        model, dataset = described["model"], described["dataset"]
    except (OSError, *MISSHAPEN):  # none of ours
        return
    if (model, dataset) != (args.model, args.dataset):
        print(f"Las respuestas de {model} a {dataset} que había en {args.output} se han movido a "
              f"{set_aside(answered, args.output)}.")


def score(args, dist, task, module):
    """Answer the validation questions of `task` with `module` as it was read, and leave answers and figures in
    --output; returns the exit code. There is nothing to go on from, so a signal just ends it."""
    precision = start.agree_precision(args, dist)
    sharding.shard(module, optim.adamw(module, args.lr, args.weight_decay), dist, precision.dtype)
    evaluation = finetune.Evaluation(args, dist, task, module, precision)
    metrics = evaluation()
    examples = task.examples or ()  # which rank 0 alone has
    described = {**metrics, "model": args.model, "dataset": args.dataset, "questions": len(examples),
                 "answered": sum(bool(example.answers) for example in examples),
                 **{name: getattr(args, name) for name in DECIDE}, "precision": precision.name,
                 "versions": output.versions()}
    finetune.save_model(args.output, dist, task, None, described, evaluation.answers)
    dist.print(f"Puntuación de {args.model}: {finetune.in_words(metrics)}. predictions.json en {args.output}.")
    dist.barrier()
    return EXIT_OK
