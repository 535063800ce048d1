"""Published BERT weights: a folder or a name on the Hub in, a module out; and back, as other tools read them.

A folder holds config.json, vocab.txt or tokenizer.json, and model.safetensors, the files of the transformers library.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save

from aura import published
from aura.errors import UserError
from aura.files import remove_partials, write_bytes, write_json
from aura.models import in_range
from aura.models.bert import BertConfig
from aura.published import CONFIG, TOKENIZER, WEIGHTS

VOCABULARY = "vocab.txt"
HELD = f"{CONFIG}, {VOCABULARY} o {TOKENIZER}, y {WEIGHTS}"
REVISIONS = {"bert-base-uncased": "86b5e0934494bd15c9632b12f734a8a67f723594",
             "google-bert/bert-base-uncased": "86b5e0934494bd15c9632b12f734a8a67f723594"}
FIELDS = {"vocab_size": "vocab_size", "max_position_embeddings": "seq_len", "num_hidden_layers": "n_layer",
          "num_attention_heads": "n_head", "hidden_size": "n_embd", "intermediate_size": "n_ff",
          "type_vocab_size": "n_types", "hidden_dropout_prob": "dropout",
          "attention_probs_dropout_prob": "attention_dropout", "layer_norm_eps": "norm_eps"}
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
OPTIONAL = {"type_vocab_size", "hidden_dropout_prob", "attention_probs_dropout_prob", "layer_norm_eps"}
BLOCK = {"attention.qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
         "attention.output": ("attention.output.dense",), "norm_1": ("attention.output.LayerNorm",),
         "mlp.inner": ("intermediate.dense",), "mlp.output": ("output.dense",), "norm_2": ("output.LayerNorm",)}


@dataclass
class Loaded:
    """What came of reading weights: names of ours that were found, those that keep their fresh values, and names of the
    file that nothing here uses."""

    found: list = field(default_factory=list)
    new: list = field(default_factory=list)
    left: list = field(default_factory=list)

    def __str__(self):
        def some(names):
            return ", ".join(names[:4]) + (f" y {len(names) - 4} más" if len(names) > 4 else "")

        return (f"{len(self.found)} tensores cargados"
                + (f"; nuevos, sin entrenar: {some(self.new)}" if self.new else "")
                + (f"; sin usar: {some(self.left)}" if self.left else ""))


def find(name, note=print):
    """The folder that --model `name` means, as published.find() has it."""
    return published.find(name, "--model", HELD, [WEIGHTS, CONFIG, VOCABULARY, TOKENIZER, "tokenizer_config.json"],
                          "--model random:tiny no necesita ningún fichero", REVISIONS, note)


def read_config(folder):
    """The BertConfig of a folder's config.json. Raises UserError naming what is missing, or is not BERT, and for more
    weights than its file can hold: nothing else would keep a module of any size from being made."""
    path, given = Path(folder, CONFIG), published.settings(folder, "bert", "--model", HELD)
    if missing := [name for name in FIELDS if name not in given and name not in OPTIONAL]:
        raise UserError(f"--model: {str(path)!r} no tiene {', '.join(missing)}")
    if given.get("hidden_act", "gelu") != "gelu" or given.get("position_embedding_type", "absolute") != "absolute":
        raise UserError(f"--model: {str(path)!r} pide hidden_act {given.get('hidden_act')!r} y position_embedding_type "
                        f"{given.get('position_embedding_type', 'absolute')!r}; aquí solo hay gelu y absolute")
    values = {ours: given[theirs] for theirs, ours in FIELDS.items() if theirs in given}
    # Two types of segments at least: the question, and the text.
    if wrong := [f"{theirs} {given[theirs]!r}" for theirs, ours in FIELDS.items() if theirs in given
                 and not (in_range(ours, given[theirs], getattr(BertConfig, ours))
                          and (ours != "n_types" or given[theirs] > 1))]:
        raise UserError(f"--model: en {str(path)!r} no valen {', '.join(wrong)}")
    config, weights = BertConfig(**values), Path(folder, WEIGHTS)
    if weights.is_file() and config.parameters() > weights.stat().st_size:  # a byte for each is less than any has
        sizes = ", ".join(f"{theirs} {values[ours]}" for theirs, ours in FIELDS.items()
                          if isinstance(values.get(ours), int))
        raise UserError(f"--model: {str(path)!r} describe un modelo mayor que su {WEIGHTS}, de "
                        f"{weights.stat().st_size} bytes ({sizes}): copie otra vez los dos")
    return config


def published_names(config):
    """{our name: names in published files}; where there are several they are joined along the first axis."""
    names = {"bert.tokens.weight": ("embeddings.word_embeddings.weight",),
             "bert.positions.weight": ("embeddings.position_embeddings.weight",),
             "bert.types.weight": ("embeddings.token_type_embeddings.weight",)}
    modules = {"bert.norm": ("embeddings.LayerNorm",)}
    for layer in range(config.n_layer):
        modules |= {f"bert.layers.{layer}.{ours}": tuple(f"encoder.layer.{layer}.{part}" for part in theirs)
                    for ours, theirs in BLOCK.items()}
    for ours, theirs in modules.items():
        for kind in ("weight", "bias"):
            names[f"{ours}.{kind}"] = tuple(f"{part}.{kind}" for part in theirs)
    names = {ours: tuple(f"bert.{part}" for part in theirs) for ours, theirs in names.items()}
    return {**names, "head.weight": ("qa_outputs.weight",), "head.bias": ("qa_outputs.bias",)}


def read_tensors(path):
    """The tensors of a safetensors file under today's names: with the prefix `bert.`, weight and bias for gamma and
    beta. Raises UserError as published.tensors() does."""
    tensors = published.tensors(path, "--model", "AutoModelForQuestionAnswering")
    return {_today(name): tensor for name, tensor in tensors.items()}


def _today(name):
    name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
    return f"bert.{name}" if name.startswith(("embeddings.", "encoder.", "pooler.")) else name


@torch.no_grad()
def load_weights(module, path):
    """Put the tensors of the file `path` into `module`, a bert.QuestionAnswering; returns a Loaded.

    Raises UserError, before anything is changed, when shapes differ, when the encoder is not whole, or for values that
    are not finite.
    """
    tensors, report, ready, wrong = read_tensors(path), Loaded(), {}, []
    for ours, parameter in module.state_dict().items():
        theirs = published_names(module.config)[ours]
        missing = [name for name in theirs if name not in tensors]
        if missing:
            report.new.append(ours)
            if not ours.startswith("head."):
                wrong.append(f"falta {missing[0]}")
            continue
        parts = [tensors.pop(name) for name in theirs]
        if others := [part.dtype for part in parts if part.dtype not in FLOATS]:
            wrong.append(f"{theirs[0]} tiene valores {str(others[0]).removeprefix('torch.')}, y aquí se leen los de "
                         "coma flotante de 16, 32 y 64 bits")
            continue
        same = len({part.shape[1:] for part in parts}) == 1 and parts[0].dim() > 0
        whole = (torch.cat(parts) if same else parts[-1]).float()
        if whole.shape != parameter.shape:
            wrong.append(f"{theirs[0]} es {list(whole.shape)} y el modelo espera {list(parameter.shape)}")
        elif not torch.isfinite(whole).all():
            wrong.append(f"{theirs[0]} tiene valores que no son números finitos")
        report.found.append(ours)
        ready[ours] = whole
    if wrong:
        more = f" (y {len(wrong) - 3} más)" if len(wrong) > 3 else ""
        raise UserError(f"--model: {str(path)!r} no encaja con su {CONFIG}: {'; '.join(wrong[:3])}{more}")
    report.left = sorted(name for name in tensors if not name.endswith("position_ids"))
    module.load_state_dict(ready, strict=False)
    return report


def save_folder(folder, weights, config, vocabulary, lowercase, strip_accents=None):
    """Write weights (our names, on the CPU), configuration and vocabulary as the transformers library and find() read
    them. vocabulary: the bytes of vocab.txt. strip_accents: None as `lowercase` says. Raises OSError."""
    folder = Path(folder)
    tensors = {}
    for ours, theirs in published_names(config).items():
        for name, part in zip(theirs, weights[ours].chunk(len(theirs)), strict=True):
            tensors[name] = part.contiguous()
    sizes = {theirs: getattr(config, ours) for theirs, ours in FIELDS.items()}
    folder.mkdir(parents=True, exist_ok=True)
    remove_partials(folder)
    write_bytes(folder / VOCABULARY, vocabulary)
    write_json(folder / "tokenizer_config.json", {"do_lower_case": lowercase, "strip_accents": strip_accents,
                                                  "model_max_length": config.seq_len,
                                                  "tokenizer_class": "BertTokenizer"})
    write_json(folder / CONFIG, {"architectures": ["BertForQuestionAnswering"], "model_type": "bert",
                                 "hidden_act": "gelu", "pad_token_id": vocabulary.split(b"\n").index(b"[PAD]"),
                                 **sizes})
    write_bytes(folder / WEIGHTS, save(tensors, metadata={"format": "pt"}))
