"""A GPT under the names and in the shapes of transformers' GPT2Config and GPT2LMHeadModel, there and back."""

import re
from pathlib import Path

import torch

from aura import published
from aura.errors import UserError
from aura.models import in_range
from aura.models.gpt import GPTConfig
from aura.published import CONFIG, WEIGHTS

HELD = f"{CONFIG}, {WEIGHTS} y {published.TOKENIZER}"
FIELDS = {"vocab_size": "vocab_size", "n_positions": "seq_len", "n_layer": "n_layer", "n_head": "n_head",
          "n_embd": "n_embd"}
# Its projections are Conv1D: [in, out] where ours are [out, in]. Its head is tied, as ours is.
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
LAYER_NORM_EPSILON = 1e-5  # the default of ops.layer_norm
# What a GPT2Config may ask for, and we have one way of: {name: (its default, what is ours)}.
ONLY = {"activation_function": ("gelu_new", ("gelu_new", "gelu_pytorch_tanh")),  # two names of one function
        "layer_norm_epsilon": (1e-5, (LAYER_NORM_EPSILON,)), "scale_attn_weights": (True, (True,)),
        "scale_attn_by_inverse_layer_idx": (False, (False,)), "add_cross_attention": (False, (False,)),
        "tie_word_embeddings": (True, (True,))}
MASK = re.compile(r"h\.\d+\.attn\.(masked_)?bias")  # older files hold the causal mask as well


def described(config):
    """What config.json says of a GPTConfig."""
    return {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2",
            **{theirs: getattr(config, ours) for theirs, ours in FIELDS.items()},
            "n_inner": 4 * config.n_embd, "activation_function": "gelu_new", "layer_norm_epsilon": LAYER_NORM_EPSILON,
            "resid_pdrop": config.dropout, "embd_pdrop": config.dropout, "attn_pdrop": config.dropout,
            "tie_word_embeddings": True}


def renamed(weights):
    """Our state dict as GPT2LMHeadModel's, dtypes kept; the head, tied, is not stored."""
    return {f"transformer.{name}": (value.t() if name.endswith(TRANSPOSED) else value).contiguous()
            for name, value in weights.items()}


def read(folder, flag):
    """(the fields of a GPTConfig as a dict, our state dict in float32) of a folder with config.json and
    model.safetensors; whether they belong together is for models.described() to say.

    flag: the argument that error messages name. Raises UserError for what cannot be read, is not a GPT-2, or is one
    that computes what ours does not.
    """
    path, given = Path(folder, CONFIG), published.settings(folder, "gpt2", flag, HELD)
    if missing := [name for name in FIELDS if name not in given]:
        raise UserError(f"{flag}: {str(path)!r} no tiene {', '.join(missing)}")
    if wrong := [f"{theirs} {given[theirs]!r}" for theirs, ours in FIELDS.items()
                 if not in_range(ours, given[theirs], getattr(GPTConfig, ours))]:
        raise UserError(f"{flag}: en {str(path)!r} no valen {', '.join(wrong)}")
    values = {ours: given[theirs] for theirs, ours in FIELDS.items()}
    foreign = [f"{name} {given[name]!r}" for name, (default, ours) in ONLY.items()
               if given.get(name, default) not in ours]
    if given.get("n_inner") not in (None, 4 * values["n_embd"]):
        foreign.append(f"n_inner {given['n_inner']!r}")
    if foreign:
        raise UserError(f"{flag}: {str(path)!r} pide {', '.join(foreign)}, que el GPT-2 de aquí no tiene: indique otro "
                        "modelo")
    dropout = given.get("resid_pdrop", GPTConfig.dropout)
    if in_range("dropout", dropout, GPTConfig.dropout):
        values["dropout"] = float(dropout)
    return values, _ours(published.tensors(Path(folder, WEIGHTS), flag, "AutoModelForCausalLM"), flag)


def _ours(tensors, flag):
    tensors = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    tensors = {name: value for name, value in tensors.items() if not MASK.fullmatch(name)}
    if whole := next((name for name, value in tensors.items() if not value.is_floating_point()), None):
        raise UserError(f"{flag}: en su {WEIGHTS}, {whole} son números enteros, quizá de un modelo cuantizado, y aquí "
                        "se leen los de coma flotante: indique el modelo sin cuantizar")
    head, embedding = tensors.pop("lm_head.weight", None), tensors.get("wte.weight")
    if head is not None and embedding is not None and not torch.equal(head, embedding):
        raise UserError(f"{flag}: en su {WEIGHTS}, lm_head.weight no es wte.weight, y en el GPT-2 de aquí son los "
                        "mismos pesos: indique otro modelo")
    return {name: (value.t() if name.endswith(TRANSPOSED) and value.dim() == 2 else value).float().contiguous()
            for name, value in tensors.items()}
