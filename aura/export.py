"""Hand a trained model over to other tools.

    python -m aura.export --checkpoint gpt2_spanish.pth --to hf gpt2-hf

hf: a folder that transformers opens as a GPT-2 or an HRM-Text, without any code of ours.
"""

import json
import math
import os
import re
import shutil

import aura
from aura import cli, gpt2, models, output
from aura import tokenizer as tokenizers
from aura.errors import EXIT_OK, UserError
from aura.files import (
    IN_USE,
    MISSHAPEN,
    building,
    explain,
    path_called,
    put_in_place,
    require_writable_directory,
    sync_directory,
    write_json,
)
from aura.models.hrm import HRMConfig
from aura.words import listed

FORMATS = ("hf",)
MARK = "aura_version"  # in config.json: this folder is an export, and a later one may replace it
TOKENIZER = "tokenizer.json"
FILES = {"config.json", "model.safetensors", "generation_config.json", TOKENIZER, "vocab.json",
         "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"}
RMS_NORM_EPSILON = 1e-6  # the default of ops.rms_norm


def build_parser():
    """The arguments of this command."""
    parser = cli.Parser(prog="python -m aura.export",
                        description="Exporta un modelo entrenado para otras herramientas.")
    parser.add_argument("--checkpoint", type=cli.path, default="gpt2_spanish.pth",
                        help="modelo .pth o punto de control ckpt-*.pt")
    parser.add_argument("--to", nargs="+", required=True, metavar=("FORMATO", "CARPETA"),
                        help="formato y carpeta que se crea; hf: la que abre transformers")
    return parser


def main():
    """Read the model, write the folder; returns the exit code."""
    args = build_parser().parse_args()
    if len(args.to) != 2:
        raise UserError(f"--to {' '.join(args.to)}: se esperan un formato y una carpeta, por ejemplo --to hf gpt2-hf")
    name, directory = args.to
    if name not in FORMATS:
        raise UserError(f"--to {name!r}: formato desconocido; existe {', '.join(FORMATS)}, la carpeta que abre "
                        "transformers (GGUF, el de llama.cpp y Ollama, no se escribe)")
    if not directory.strip():
        raise UserError("--to hf '': no es el nombre de una carpeta")
    final = path_called(directory, f"--to hf {directory!r}", "indique otro nombre").resolve()
    replaced = require_free(final)
    config, weights, tokenizer, _ = output.read_output(args.checkpoint)
    config = check(args.checkpoint, config, weights, tokenizer)
    require_writable_directory(final.parent, "--to hf")
    files = write_folder(final, config, weights, tokenizer)
    size = sum((final / file).stat().st_size for file in files)
    print(f"Exportado en {directory} ({size / 1e6:.1f} MB): {', '.join(files)}."
          + " Sustituye a la exportación que había ahí." * replaced)
    if isinstance(config, HRMConfig):
        print("La arquitectura hrm_text está en transformers desde la versión 5.9.")
    whole = TOKENIZER in files
    if not whole:
        print("Sin tokenizador: el de transformers daría otros tokens; páselos usted, o use python -m aura.generate.")
    print(f"Cárguelo con: from transformers import AutoModelForCausalLM{', AutoTokenizer' * whole}; "
          f"modelo = AutoModelForCausalLM.from_pretrained({directory!r})"
          + f"; tokenizador = AutoTokenizer.from_pretrained({directory!r})" * whole)
    return EXIT_OK


def require_free(directory):
    """Whether `directory` is an earlier export; raises UserError unless it is one without files of anybody else's, or
    new, or empty."""
    named = f"--to hf {str(directory)!r}"
    if not directory.exists():
        return False
    try:
        found = {path.name for path in directory.iterdir()}
        if not found:
            return False
        ours = MARK in json.loads((directory / "config.json").read_text(encoding="utf-8-sig"))
    except NotADirectoryError as problem:
        raise UserError(f"{named}: ya existe y no es una carpeta; indique otro nombre") from problem
    except (FileNotFoundError, IsADirectoryError, *MISSHAPEN):  # no config.json of ours
        ours = False
    except OSError as problem:
        raise UserError(f"{named}: no se puede leer ({explain(problem)}); compruebe sus permisos o indique otra"
                        ) from problem
    if not ours:
        raise UserError(f"{named}: la carpeta no está vacía y no es una exportación anterior, así que no se "
                        "sobrescribe; indique otra")
    foreign = sorted(found - FILES - {IN_USE})  # which one killed at the very end leaves there
    if foreign:
        raise UserError(f"{named}: junto a una exportación anterior hay ficheros que se perderían "
                        f"({', '.join(foreign[:3])}); muévalos o indique otra carpeta")
    return True


def check(path, config, weights, tokenizer):
    """The GPTConfig or HRMConfig of `config` (dict). Raises UserError where the parts of the checkpoint do not belong
    together, and for an HRM with what transformers' HRM-Text does not have."""
    named = f"--checkpoint {str(path)!r}"
    config = models.described(config, weights, named)
    if isinstance(config, HRMConfig):
        foreign = {"--segments": config.segments > 1, "--reinject": config.reinject,
                   "--exit-weights": config.exit_weights}
        if options := [option for option, there in foreign.items() if there]:
            raise UserError(f"{named}: es un HRM con {listed(options)}, que en transformers no existe: para "
                            "exportarlo hay que entrenarlo sin esa opción; para generar texto, use python -m "
                            "aura.generate")
    models.require_pieces(tokenizer, config, named)
    return config


def write_folder(final, config, weights, tokenizer):
    """Write the folder `final`, whole or not at all; returns the names of its files. Raises UserError.

    A tokenizer for which there is no tokenizer.json is left out: from its SentencePiece model transformers would make
    one that splits text otherwise.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        with building(final) as partial:
            weights_path = partial / "model.safetensors"
            save_file(hf_weights(config, weights), weights_path, metadata={"format": "pt"})
            with open(weights_path, "rb+") as file:
                os.fsync(file.fileno())
            made = tokenizers.export_files(tokenizer, partial)
            left_out = set() if TOKENIZER in made else {*made, "tokenizer_config.json", "special_tokens_map.json"}
            for name, content in hf_settings(config, weights, tokenizer).items():
                write_json(partial / name, content)
            for name in left_out:
                (partial / name).unlink()
            shutil.copymode(partial / "config.json", weights_path)  # safetensors lets nobody else read what it writes
            sync_directory(partial)
            put_in_place(partial, final)
    except (OSError, SafetensorError) as problem:
        reason = explain(problem if isinstance(problem, OSError) else _of_the_system(problem))
        raise UserError(f"--to hf {str(final)!r}: no se puede guardar ({reason}); indique otra carpeta o corríjalo"
                        ) from problem
    return sorted(path.name for path in final.iterdir())


def _of_the_system(problem):
    """The OSError that a SafetensorError tells in English, with its number."""
    number = re.search(r"\(os error (\d+)\)", str(problem))
    return OSError(int(number[1]) if number else 0, str(problem))


def hf_weights(config, weights):
    """Our state dict under the names and in the shapes of transformers' GPT2LMHeadModel or HrmTextForCausalLM, dtypes
    kept."""
    return _hrm_weights(config, weights) if isinstance(config, HRMConfig) else gpt2.renamed(weights)


def _hrm_weights(config, weights):
    """Those of an HRM. Norms have no weights there: those of ours go into the products that alone read the norm, and
    what the head reads is weighted into a head of its own, as HRM-Text's is."""
    found = {"model.embed_tokens.weight": weights["wte.weight"], "model.z_L_init": weights["start"],
             "lm_head.weight": weights["wte.weight"] * weights["head_weight"]}
    for stack in "LH":
        for number in range(config.n_layer):
            ours, theirs = f"{stack.lower()}.blocks.{number}.", f"model.{stack}_module.layers.{number}."
            gate_qkv = weights[f"{ours}attn.gqkv.weight"] * weights[f"{ours}norm_1.weight"]
            gate_up = weights[f"{ours}mlp.gate_up.weight"] * weights[f"{ours}norm_2.weight"]
            parts = {**dict(zip("gate q k v".split(), gate_qkv.chunk(4), strict=True)),
                     "o": weights[f"{ours}attn.out.weight"]}
            found |= {f"{theirs}self_attn.{name}_proj.weight": value.clone() for name, value in parts.items()}
            parts = {**dict(zip("gate up".split(), gate_up.chunk(2), strict=True)),
                     "down": weights[f"{ours}mlp.down.weight"]}
            found |= {f"{theirs}mlp.{name}_proj.weight": value.clone() for name, value in parts.items()}
    return found


def hf_settings(config, weights, tokenizer):
    """{file name: content} of the JSON files beside weights and vocabulary."""
    names = {number: piece for piece, number in tokenizer.vocabulary().items()}
    dtype = str(weights["wte.weight"].dtype).removeprefix("torch.")
    # A text begins after the end of another one: there is no token of its own for the beginning, as in GPT-2.
    ends = {"bos_token_id": tokenizer.eos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    special = {"eos_token": names[tokenizer.eos_id], "pad_token": names[tokenizer.pad_id]}
    return {
        "config.json": {**(_hrm_text(config) if isinstance(config, HRMConfig) else gpt2.described(config)),
                        "dtype": dtype, "torch_dtype": dtype, **ends, MARK: aura.__version__},
        "generation_config.json": ends,
        # Text must not become a special token because it spells its name (split_special_tokens).
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.seq_len,
            "clean_up_tokenization_spaces": False, "split_special_tokens": True, "padding_side": "left", **special},
        "special_tokens_map.json": special}


def _hrm_text(config):
    """What transformers' HrmTextConfig calls the sizes of an HRM. Its number of layers is that of a cache's slots."""
    return {"architectures": ["HrmTextForCausalLM"], "model_type": "hrm_text", "vocab_size": config.vocab_size,
            "max_position_embeddings": config.seq_len, "hidden_size": config.n_embd, "intermediate_size": config.n_ff,
            "num_hidden_layers": config.n_layer * config.passes, "num_layers_per_stack": config.n_layer,
            "num_attention_heads": config.n_head, "head_dim": config.n_embd // config.n_head, "hidden_act": "silu",
            "rms_norm_eps": RMS_NORM_EPSILON, "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
            "H_cycles": config.h_cycles, "L_cycles": config.l_cycles, "embedding_scale": math.sqrt(config.n_embd),
            "prefix_lm": False, "tie_word_embeddings": False}


if __name__ == "__main__":
    cli.run(main)
