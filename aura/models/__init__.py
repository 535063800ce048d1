"""The models; `build` makes the one that a configuration describes, `described` and `filled` that of a file."""

import dataclasses

import torch

from aura.errors import UserError
from aura.models import gpt, hrm


def build(config):
    """The module for a GPTConfig or HRMConfig."""
    return hrm.HRM(config) if isinstance(config, hrm.HRMConfig) else gpt.GPT(config)


def filled(config, weights, device):
    """build(config) on the device with the `weights` of its file, of which there is no second copy on a CPU, and never
    fresh ones in their place."""
    with torch.device("meta"):
        model = build(config)
    model.load_state_dict({name: value.float() for name, value in weights.items()}, assign=True)
    return model.to(device)


def completed(values):
    """The configuration `values` (dict) of a file, with the fields that one written before they existed lacks."""
    return {"exit_weights": True, **values} if "h_cycles" in values else values


def described(values, weights, named):
    """The GPTConfig or HRMConfig of a saved model: `values` and `weights` as its files hold them.

    named: how the error message calls them. Raises UserError for what is damaged, of another program, not finite, or
    does not belong together.
    """
    values = values if isinstance(values, dict) else {"config": values}
    kind = hrm.HRMConfig if "h_cycles" in values else gpt.GPTConfig
    known = {field.name: field.default for field in dataclasses.fields(kind)}
    if wrong := [f"{name}: {value!r}" for name, value in values.items()
                 if name not in known or not in_range(name, value, known[name])]:
        raise UserError(f"{named}: su configuración está dañada o es de otro programa ({', '.join(wrong)[:160]}): "
                        "recupere los ficheros que se guardaron con el modelo")
    config = kind(**values)
    try:
        config.check()
    except UserError as problem:
        raise UserError(f"{named}: su configuración está dañada: {problem}") from problem
    if wrong := next((name for name, value in weights.items() if not _plain(value)), None):
        raise UserError(f"{named}: {wrong} no son pesos como los que guarda este proyecto: recupere los ficheros "
                        "originales")
    expected = {}
    if config.parameters() <= sum(value.numel() for value in weights.values()):  # it may ask for millions of blocks
        with torch.device("meta"):
            expected = {name: value.shape for name, value in build(config).state_dict().items()}
    if {name: getattr(value, "shape", None) for name, value in weights.items()} != expected:
        raise UserError(f"{named}: los pesos no corresponden a su configuración")
    if wrong := next((name for name, value in weights.items() if not value.isfinite().all()), None):
        raise UserError(f"{named}: hay valores que no son números finitos en sus pesos ({wrong}): el entrenamiento "
                        "divergió; indique un punto de control anterior")
    return config


def require_pieces(tokenizer, config, named):
    """Raise UserError where the tokenizer has pieces that the model does not know."""
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(f"{named}: el tokenizador tiene {tokenizer.vocab_size} piezas y el modelo solo "
                        f"{config.vocab_size}: no son del mismo entrenamiento")


def _plain(value):
    """Whether a saved weight is a tensor of numbers that all lie in the file; a view may repeat one without end."""
    return (isinstance(value, torch.Tensor) and value.layout == torch.strided and value.device.type == "cpu"
            and value.is_floating_point() and value.is_contiguous())


def in_range(name, value, default):
    """Whether the field `name` of a configuration, whose default is `default`, may have this value."""
    if isinstance(default, bool) or isinstance(value, bool) or not isinstance(value, int | float):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(default, int):
        return isinstance(value, int) and value >= 1
    return 0 <= value < (1 if "dropout" in name else float("inf"))
