"""--init-from: a training that begins with a model of this project, or with a published GPT-2."""

import csv
import json
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from aura import distributed, export, generate, gpt2, initial, output, published, rendezvous, tokenizer
from aura.errors import TrainingFault, UserError
from aura.models import gpt, hrm
from tests.hub import Hub
from tests.support import ROOT, corpus_text, run, run_ranks
from tests.test_tokenizer import byte_level

SCRIPT = ROOT / "train_gpt2_spanish.py"
SMALL = ["--preset", "demo", "--batch-size", 4, "--sample-length", 0, "--log-interval", 1, "--eval-windows", 8]
SIZES = ["--n-layer", 2, "--n-embd", 32, "--n-head", 2, "--seq-len", 32, "--vocab-size", 400]


def train(folder, *options, **extra):
    return run([SCRIPT, *SMALL, *options], folder, **extra)


def losses(folder):
    with open(folder / "logs" / "train.csv", newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a small model that has been trained for a while, modelo.pth, and the text it has read."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "libro.txt").write_text(corpus_text(), encoding="utf-8")
    code, said = train(folder, *SIZES, "--dataset-name", "libro.txt", "--max-steps", 60, "--lr", 3e-3, "--output",
                       "modelo.pth")
    assert code == 0, said
    return folder


@pytest.fixture
def other(tmp_path, model):
    """A folder with another text, where a training begins with that model."""
    (tmp_path / "otro.txt").write_text(corpus_text(70)[40_000:], encoding="utf-8")
    return ["--init-from", model / "modelo.pth", "--dataset-name", "otro.txt", "--max-steps", 4]


def beginning(path, *given, **options):
    """initial.read() of one process, for arguments of which `given` were typed."""
    args = SimpleNamespace(**{"init_from": str(path), "given": set(given), "seq_len": None, "n_layer": None, "n_head":
                              None, "n_embd": None, "dropout": None, "output": "otro.pth",
                              "checkpoint_dir": "otra", "prepare": False, "resume": "auto", "lr": 1e-3,
                              **options})
    return initial.read(args, distributed.Session(), gpt.GPTConfig), args


def test_it_begins_where_the_model_ended_and_goes_on_by_itself(model, other, tmp_path):
    code, said = train(tmp_path, *other)
    assert code == 0 and "Se parte de " in said and "contexto 32, vocabulario 400." in said, said
    assert "--lr 0.0001: la décima parte de la del preset" in said, said
    begun, ended = losses(tmp_path), losses(model)
    assert abs(begun[0] - ended[-1]) < 0.5 < ended[0] - begun[0], (begun, ended)
    made = json.loads((tmp_path / "gpt2_spanish.json").read_text())
    assert made["config"] == json.loads((model / "modelo.json").read_text())["config"]
    assert made["arguments"]["init_from"] == str(model / "modelo.pth")
    code, said = train(tmp_path, *other[:-1], 6)
    assert code == 0 and "Se reanuda en el paso 4" in said and losses(tmp_path)[:4] == begun, said
    code, said = train(tmp_path, *SIZES[:-2], "--max-steps", 7)
    assert code == 0 and "Se reanuda en el paso 6" in said, "also without the model that it began with"
    code, said = train(tmp_path, *other[:-1], 8)
    assert code == 0 and "Se reanuda en el paso 7" in said, "and again with it: it is still known how it began"


def test_a_run_goes_on_when_the_model_that_it_began_with_is_gone(model, other, tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    for name in ("modelo.pth", "modelo.json", "modelo.tokenizer.model"):
        shutil.copy(model / name, base)
    words = ["--init-from", base / "modelo.pth", *other[2:-1], 6, "--checkpoint-freq", 3]
    code, said = train(tmp_path, *words, "--resume", "none", AURA_JOB="uno")
    assert code == 0, said
    whole, weights = losses(tmp_path), torch.load(tmp_path / "gpt2_spanish.pth", weights_only=True)
    shutil.rmtree(base)
    (tmp_path / "checkpoints" / "ckpt-00000006.pt").unlink()
    code, said = train(tmp_path, *words[:1], base / "otro.pth", *words[2:])
    assert code == 2 and "otro.pth': no existe" in said, said
    code, said = train(tmp_path, *words, "--resume", "none")
    assert code == 2 and "modelo.pth': no existe" in said, said
    code, said = train(tmp_path, *words)
    assert code == 0 and "modelo.pth' ya no se puede leer; se sigue sin él: " in said, said
    assert "Se reanuda en el paso 3" in said and losses(tmp_path) == whole
    again = torch.load(tmp_path / "gpt2_spanish.pth", weights_only=True)
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    code, said = train(tmp_path, *words, "--resume", "none", AURA_JOB="uno")
    assert code == 0 and "se sigue sin él: " in said, "a later attempt of that launch repeats its arguments: " + said


def test_two_processes_of_which_one_has_the_model_learn_what_one_does(other, tmp_path):
    code, said = train(tmp_path, *other, "--lr", 1e-3)
    assert code == 0 and "la décima parte" not in said, said
    alone, folders = losses(tmp_path), [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    shutil.copy(tmp_path / "otro.txt", folders[0])
    for suffix in (".pth", ".json", ".tokenizer.model"):
        shutil.copy(Path(other[1]).with_suffix(suffix), folders[0])
    words = [SCRIPT, *SMALL, "--init-from", "modelo.pth", *other[2:], "--lr", 1e-3, "--distributed", "--batch-size", 2]
    for options in ([], ["--fsdp", "--resume", "none", "--attention", "sdpa"]):
        assert [code for code, _ in run_ranks([*words, *options], folders)] == [0, 0]
        assert losses(folders[0]) == pytest.approx(alone, abs=1e-4)
    told = run_ranks([*words, "--resume", "none", "--lr", 1e-9], folders, AURA_INJECT_NAN="1:1")
    assert [code for code, _ in told] == [0, 0], "a fault before the first checkpoint: " + told[1][1]
    assert losses(folders[0])[-1] < alone[0] + 0.5


def test_all_processes_are_given_one_or_none():
    model, other, none = (rendezvous._compared(SimpleNamespace(init_from=name)) for name in ("a.pth", "b.pth", None))
    assert model == other != none, "rank 0 alone reads it, and may have it elsewhere"


def test_a_nan_before_the_first_checkpoint_begins_with_the_model_again(model, other, tmp_path):
    code, said = train(tmp_path, *other, "--lr", 1e-9, AURA_INJECT_NAN="0:1")
    assert code == 0 and "se reinician los pesos" in said, said
    assert abs(losses(tmp_path)[-1] - losses(model)[-1]) < 0.5


def test_a_run_that_began_otherwise_is_left_alone(model, other, tmp_path):
    same = [*SIZES, "--dataset-name", model / "libro.txt", "--tokenizer", model / "modelo.tokenizer.model"]
    assert train(tmp_path, *same, "--max-steps", 2)[0] == 0
    kept = sorted((tmp_path / "Data").rglob("*"))
    code, said = train(tmp_path, *other)
    assert code == 2 and "no empezó con los pesos de --init-from" in said, said
    assert "otra --checkpoint-dir, o --resume none; para seguir desde ese, quite --init-from" in said
    assert sorted((tmp_path / "Data").rglob("*")) == kept, "before its text is prepared"
    assert train(tmp_path, *other, "--resume", "none")[0] == 0
    weights = torch.load(model / "modelo.pth", weights_only=True)
    torch.save({**weights, "ln_f.bias": weights["ln_f.bias"] + 1}, tmp_path / "segundo.pth")
    shutil.copy(model / "modelo.json", tmp_path / "segundo.json")
    shutil.copy(model / "modelo.tokenizer.model", tmp_path)
    code, said = train(tmp_path, "--init-from", tmp_path / "segundo.pth", *other[2:])
    assert code == 2 and "empezó con otros pesos, los de --init-from" in said, said


def test_data_of_another_tokenizer_are_not_taken(other, tmp_path):
    assert train(tmp_path, *SIZES[:-1], 380, "--prepare", "--dataset-name", "otro.txt")[0] == 0
    code, said = train(tmp_path, *other[:2])
    assert code == 2 and "los últimos datos preparados, 'otro', tienen otro tokenizador que --init-from" in said, said
    code, said = train(tmp_path, *other, "--prepare")
    assert code == 0 and "--lr" not in said, said
    code, said = train(tmp_path, *other[:2], "--max-steps", 1)
    assert code == 0 and "Datos: 'otro', los últimos preparados" in said, said


@pytest.mark.parametrize("options, told", [
    (["--tokenizer", "t.model"], "--tokenizer 't.model': con --init-from el tokenizador es el de ese modelo"),
    (["--n-layer", 3], "--n-layer 3: el modelo de --init-from tiene 2; quite --n-layer"),
    (["--n-head", 3], "--n-head 3: el modelo de --init-from tiene 2; quite --n-head"),
    (["--seq-len", 33], "--seq-len 33: el modelo de --init-from lee hasta 32 tokens; indique 32 o menos"),
    (["--vocab-size", 399], "--vocab-size 399: --init-from "),
    (["--init-from", "no/esta.pth"], "--init-from 'no/esta.pth': no existe; indique el fichero de un modelo"),
    (["--init-from", "."], "--init-from: no se puede leer 'config.json' (no existe): la carpeta debe tener "),
    (["--init-from", "{}/modelo.pth", "--output", "{}/../{.name}/modelo.pth"], "--output "),
    (["--init-from", "{}/modelo.pth", "--checkpoint-dir", "{}"], "--init-from "),
    (["--init-from", "{}"], "--init-from '{}': indique un fichero de esa carpeta, por ejemplo '{}/"),
])
def test_what_does_not_go_with_it_is_one_line(model, other, tmp_path, options, told):
    code, said = train(tmp_path, *other, *(str(option).replace("{}", str(model)).replace("{.name}", model.name)
                                           for option in options))
    assert code == 2 and said.splitlines()[-1].startswith("error: " + told.replace("{}", str(model))), said
    assert not (tmp_path / "Data").exists() and not (tmp_path / "checkpoints").exists()


def test_a_shorter_context_and_another_dropout(model):
    whole, _ = beginning(model / "modelo.pth")
    begun, args = beginning(model / "modelo.pth", "seq_len", "dropout", seq_len=8, dropout=0.25)
    assert begun.config == gpt.GPTConfig(400, 8, 2, 2, 32, 0.25) and (args.seq_len, args.n_layer) == (8, 2)
    assert torch.equal(begun.weights["wpe.weight"], whole.weights["wpe.weight"][:8])
    assert begun.checksum == whole.checksum
    assert beginning(model / "modelo.pth", "seq_len", seq_len=whole.config.seq_len)[0].config == whole.config


def test_a_checkpoint_will_do_with_its_average(model):
    path = next((model / "checkpoints").glob("*.pt"))
    begun, _ = beginning(path)
    assert begun.config.n_layer == 2 and begun.tokenizer.vocab_size == 400
    whole, _ = beginning(model / "modelo.pth")
    assert begun.checksum == whole.checksum
    weights = torch.load(model / "modelo.pth", weights_only=True)
    torch.save({**weights, "wte.weight": weights["wte.weight"] * 2}, model / "doble.pth")
    for suffix in (".json", ".tokenizer.model"):
        shutil.copy(model / f"modelo{suffix}", model / f"doble{suffix}")
    assert beginning(model / "doble.pth")[0].checksum != whole.checksum, "of all weights, not of the last"


def test_its_weights_are_read_again_where_nothing_else_is_left(tmp_path, model):
    for path in model.glob("modelo.*"):
        shutil.copy(path, tmp_path)
    begun, args = beginning(tmp_path / "modelo.pth", "seq_len", seq_len=8)
    args.given = set()  # as where a checkpoint had told the length
    again = initial.weights(args, distributed.Session(), replace(begun, weights=None))
    assert all(torch.equal(again[name], value) for name, value in begun.weights.items())
    held = torch.load(tmp_path / "modelo.pth", weights_only=True)
    torch.save(dict(reversed(held.items())), tmp_path / "modelo.pth")
    assert initial.weights(args, distributed.Session(), begun), "the order in the file does not matter"
    torch.save({**held, "ln_f.bias": torch.ones(32)}, tmp_path / "modelo.pth")
    with pytest.raises(TrainingFault, match="modelo.pth' ya no es el modelo del que se partió"):
        initial.weights(args, distributed.Session(), begun)
    (tmp_path / "modelo.pth").unlink()
    with pytest.raises(TrainingFault, match="el modelo del que se partió no se puede leer: .*modelo.pth'"):
        initial.weights(args, distributed.Session(), begun)


def test_only_a_training_keeps_away_from_the_models_files(model):
    for options in ({"output": model / "modelo.pt"}, {"checkpoint_dir": model}):
        with pytest.raises(UserError):
            beginning(model / "modelo.pth", **options)
        assert beginning(model / "modelo.pth", prepare=True, **options)[0].config.n_layer == 2


def test_an_hrm_is_none_of_these(tmp_path, model, monkeypatch):
    module = hrm.HRM(hrm.HRMConfig(vocab_size=40, seq_len=8, n_layer=1, n_head=2, n_embd=16, n_ff=16)).init_weights(0)
    monkeypatch.setattr(output, "read_output", lambda *_: (asdict(module.config), module.state_dict(), None, {}))
    with pytest.raises(UserError, match="es un HRM, y este programa entrena un GPT-2"):
        beginning(model / "modelo.pth")


# ---- Published models -----------------------------------------------------------------------------------------------


CONFIG = {"vocab_size": 300, "n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.2}


@pytest.fixture
def theirs(tmp_path):
    """(a GPT2LMHeadModel of transformers, the folder that it has saved, with a tokenizer)."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**CONFIG)).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    module.save_pretrained(tmp_path / "hf")
    byte_level(tmp_path / "hf", special_tokens=["<|endoftext|>"])
    return module, tmp_path / "hf"


def change(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_published_gpt2_computes_what_it_does_there(theirs):
    module, folder = theirs
    begun, args = beginning(folder)
    assert begun.config == gpt.GPTConfig(301, 24, 2, 4, 32, 0.2) and args.dropout == 0.2
    dist, make = distributed.Session(), lambda: gpt.GPT(begun.config)
    initial.built(begun, dist, make, 0, again=True)
    ours = initial.built(begun, dist, make, 0).eval()
    assert begun.weights is None, "no copy takes memory while the model trains"
    tokens = torch.randint(300, (3, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits, expected = ours(tokens), module(tokens).logits
        assert expected.std() > 1, "logits too flat to tell anything"
        torch.testing.assert_close(logits[..., :300], expected, rtol=1e-4, atol=1e-4)
        # The padding token, which it did not have, is neither the likeliest of all nor impossible.
        torch.testing.assert_close(logits[..., 300], expected.mean(-1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rows, special", [(300, ["<|endoftext|>"]), (320, ["<|endoftext|>"]), (300, [])])
def test_a_published_gpt2_writes_what_it_does_there(theirs, monkeypatch, capsys, rows, special):
    """It may have fewer rows than its tokenizer, to which a padding and an end token are added, has pieces; or more."""
    module, folder = theirs
    module.resize_token_embeddings(rows, mean_resizing=False)
    module.save_pretrained(folder)
    byte_level(folder, special_tokens=special)
    pieces = tokenizer.load(folder)
    assert pieces.vocab_size == 302 - len(special)
    tokens = torch.tensor([pieces.encode("Ana compró")])
    with torch.no_grad():
        for _ in range(12):
            tokens = torch.cat([tokens, module(tokens).logits[:, -1:, :pieces.vocab_size].argmax(-1)], 1)
    assert len(set(tokens[0, -12:].tolist())) > 3, "it says one thing only"
    monkeypatch.setattr(sys, "argv", ["generate", "--checkpoint", str(folder), *"--length 12 --temperature 0".split(),
                                      "--prompt", "Ana compró"])
    assert generate.main() == 0
    assert capsys.readouterr().out.startswith(pieces.decode(tokens[0].tolist()) + "\n--- 12 tokens, ")
    monkeypatch.setattr(sys, "argv", sys.argv[:-2])
    assert generate.main() == 0, "from the end token on"


def test_the_files_of_a_published_model_are_not_replaced(theirs):
    with pytest.raises(UserError, match="config.pth' reemplazaría config.json, del modelo del que se parte"):
        beginning(theirs[1], output=str(theirs[1] / "config.pth"))
    assert beginning(theirs[1], output=str(theirs[1] / "otro.pth"))


def test_a_run_in_the_folder_of_its_model_is_told_the_argument_that_leads_out(theirs):
    folder = str(theirs[1])
    for given, flag in ((None, "--checkpoint-dir"), (folder, "--output-dir")):
        with pytest.raises(UserError, match=f"está en {flag}, .* indique otra {flag}$"):
            beginning(theirs[1], output=str(theirs[1] / "config.pth"), checkpoint_dir=folder, output_dir=given)


def test_what_was_exported_comes_back_bit_for_bit(model, tmp_path):
    config, weights, pieces, _ = output.read_output(model / "modelo.pth")
    export.write_folder(tmp_path / "hf", gpt.GPTConfig(**config), weights, pieces)
    begun, _ = beginning(tmp_path / "hf")
    assert asdict(begun.config) == config and begun.weights.keys() == weights.keys()
    assert all(torch.equal(begun.weights[name], value) for name, value in weights.items())


def test_files_of_other_times(theirs, tmp_path):
    """Without prefix, with causal masks and the head, in 16 bits, and the older pair of vocabulary files."""
    _, folder = theirs
    expected, _ = beginning(folder)
    tensors = {name.removeprefix("transformer."): value.half()
               for name, value in load_file(folder / published.WEIGHTS).items()}
    for layer in range(2):
        tensors |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 24, 24), f"h.{layer}.attn.masked_bias": torch.tensor(-1e4)}
    save_file({**tensors, "lm_head.weight": tensors["wte.weight"].clone()}, folder / published.WEIGHTS)
    document = json.loads((folder / "tokenizer.json").read_text())
    (folder / "vocab.json").write_text(json.dumps(document["model"]["vocab"]))
    (folder / "merges.txt").write_text("\n".join(" ".join(pair) for pair in document["model"]["merges"]))
    (folder / "tokenizer.json").unlink()
    begun, _ = beginning(folder)
    assert begun.config == expected.config
    for name, value in begun.weights.items():
        torch.testing.assert_close(value, expected.weights[name], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("values, told", [
    ({"model_type": "llama"}, "describe un modelo 'llama', y aquí solo sirve un gpt2"),
    ({"activation_function": "relu"}, "pide activation_function 'relu', que el GPT-2 de aquí no tiene"),
    ({"n_inner": 64}, "pide n_inner 64"),
    ({"scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False},
     "pide scale_attn_by_inverse_layer_idx True, tie_word_embeddings False"),
    ({"layer_norm_epsilon": 1e-12, "scale_attn_weights": False, "add_cross_attention": True},
     "pide layer_norm_epsilon 1e-12, scale_attn_weights False, add_cross_attention True"),
    ({"n_layer": "dos"}, "no valen n_layer 'dos'"),
    ({"n_layer": 3}, "los pesos no corresponden a su configuración"),
    ({"n_layer": 10**9}, "los pesos no corresponden a su configuración"),
    ({"n_head": 5}, "su configuración está dañada"),
    ({"vocab_size": 290}, "los pesos no corresponden a su configuración"),
])
def test_models_that_are_no_such_gpt2(theirs, values, told):
    change(theirs[1] / "config.json", **values)
    with pytest.raises(UserError, match=told) as problem:
        beginning(theirs[1])
    assert "--init-from" in str(problem.value)


def test_other_ways_to_say_the_same(theirs):
    path = theirs[1] / "config.json"
    expected, _ = beginning(theirs[1])
    sizes = {name: CONFIG[name] for name in gpt2.FIELDS}
    same = {"activation_function": "gelu_pytorch_tanh", "n_inner": 4 * CONFIG["n_embd"], "resid_pdrop": None}
    path.write_text(json.dumps(sizes | same), encoding="utf-8-sig")
    begun, _ = beginning(theirs[1])
    assert begun.config == replace(expected.config, dropout=gpt.GPTConfig.dropout)
    path.write_text(json.dumps({name: value for name, value in sizes.items() if name != "n_head"}))
    with pytest.raises(UserError, match="config.json' no tiene n_head"):
        beginning(theirs[1])


def test_tensors_of_another_shape(theirs):
    path = theirs[1] / published.WEIGHTS
    tensors = load_file(path)
    head = tensors["transformer.wte.weight"]
    for wrong in ({"transformer.h.0.attn.c_attn.weight": torch.zeros(2, 2, 2)},
                  {"transformer.wte.weight": torch.zeros(1), "lm_head.weight": torch.zeros(1)}):
        save_file(tensors | wrong, path)
        with pytest.raises(UserError, match="los pesos no corresponden a su configuración"):
            beginning(theirs[1])
    del tensors["transformer.wte.weight"]
    save_file(tensors | {"lm_head.weight": head}, path)
    with pytest.raises(UserError, match="los pesos no corresponden a su configuración"):
        beginning(theirs[1])


def test_weights_that_are_not_its_own(theirs):
    path = theirs[1] / published.WEIGHTS
    tensors = load_file(path)
    save_file({**tensors, "lm_head.weight": tensors["transformer.wte.weight"] + 1}, path)
    with pytest.raises(UserError, match="lm_head.weight no es wte.weight"):
        beginning(theirs[1])
    save_file({name: value.to(torch.int8) for name, value in tensors.items()}, path)
    with pytest.raises(UserError, match="son números enteros, quizá de un modelo cuantizado"):
        beginning(theirs[1])
    tensors["transformer.h.1.mlp.c_fc.bias"][3] = torch.nan
    save_file(tensors, path)
    with pytest.raises(UserError, match="no son números finitos en sus pesos .h.1.mlp.c_fc.bias"):
        beginning(theirs[1])
    with pytest.raises(UserError, match=f"model.safetensors': indique la carpeta en la que está.*: '{theirs[1]}'"):
        beginning(path)
    path.rename(path.with_name("pytorch_model.bin"))
    with pytest.raises(UserError, match="solo de safetensors.*AutoModelForCausalLM"):
        beginning(theirs[1])


def test_the_tokenizer_must_be_the_models(theirs, tmp_path):
    for pieces in (310, 301):
        byte_level(theirs[1], vocab_size=pieces)
        with pytest.raises(UserError, match=f"tokenizador tiene {pieces + 2} piezas y el modelo solo 300: no son del"):
            beginning(theirs[1])
    byte_level(theirs[1])  # without the end of a document and the padding, which it then receives
    assert beginning(theirs[1])[0].config.vocab_size == 300 + initial.NEW_PIECES == 302
    byte_level(theirs[1], vocab_size=270)
    begun, _ = beginning(theirs[1])
    assert begun.config.vocab_size == begun.tokenizer.vocab_size == len(begun.weights["wte.weight"]) < 300
    (theirs[1] / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="ni un tokenizer.json; recupere los ficheros que se publicaron con el modelo"):
        beginning(theirs[1])


def test_from_the_hub(theirs, tmp_path):
    (tmp_path / "hub" / "ana").mkdir(parents=True)
    theirs[1].rename(tmp_path / "hub" / "ana" / "gpt2")
    (tmp_path / "libro.txt").write_text(corpus_text(), encoding="utf-8")
    with Hub(tmp_path / "hub") as hub:
        code, said = train(tmp_path, "--init-from", "ana/gpt2", "--dataset-name", "libro.txt", "--max-steps", 2,
                           **hub.environment(tmp_path / "cache"))
    assert code == 0 and "Modelo ana/gpt2 del Hub, la última revisión..." in said, said
    assert "contexto 24, vocabulario 301 (1 que no tenía)." in said, said
    assert json.loads((tmp_path / "gpt2_spanish.json").read_text())["config"]["n_embd"] == 32


def test_the_names_of_a_config_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    known = transformers.GPT2Config().to_dict()
    assert all(known[name] == default for name, (default, _) in gpt2.ONLY.items())
