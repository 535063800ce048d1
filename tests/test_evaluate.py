"""aura.evaluate: what a trained model scores on a text, against figures that are computed otherwise."""

import csv
import json
import math
import shutil
import sys
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F

from aura import corpus, evaluate, export, output, start, tokenizer
from aura.errors import UserError
from aura.models import gpt, hrm
from tests.support import ROOT, corpus_text, run
from tests.test_tokenizer import byte_level

TEXT = "Ana compró pan en la plaza. ¡Ñandú!\n\nLuis miró el río y volvió tarde: 漢字 😀.\n\n" + corpus_text(1)[:900]


@pytest.fixture(autouse=True)
def allocator(monkeypatch):
    monkeypatch.setattr(start, "tune_allocator", lambda device, sparing: None)  # which would last for all tests


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run: m.pth, checkpoints, logs and Data, and its text, libro.txt."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "libro.txt").write_text(corpus_text(), encoding="utf-8")
    code, said = run([ROOT / "train_gpt2_spanish.py", "--preset", "demo", *"--batch-size 4 --n-layer 2 --n-embd 32 "
                      "--n-head 2 --seq-len 32 --vocab-size 400 --sample-length 0 --eval-windows 8 --max-steps 30 "
                      "--lr 3e-3 --ema 0.9 --dataset-name libro.txt --output m.pth".split()], folder)
    assert code == 0, said
    return folder


@pytest.fixture
def measure(monkeypatch, tmp_path, capsys):
    """measure(*options) -> (the figures of --json, what was printed)."""
    def measured(*options):
        (tmp_path / "cifras.json").unlink(missing_ok=True)
        monkeypatch.setattr(sys, "argv", ["evaluate", *map(str, options), "--json", str(tmp_path / "cifras.json")])
        assert evaluate.main() == 0
        return json.loads((tmp_path / "cifras.json").read_text()), capsys.readouterr()
    return measured


def whole(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def stream(path, pieces):
    """(the tokens of the documents of a file, between end tokens; the bytes of their text)."""
    documents = list(corpus.open_corpus(str(path)).documents())
    tokens = [pieces.eos_id, *(token for each in documents for token in [*pieces.encode(each), pieces.eos_id])]
    return torch.tensor(tokens), sum(len(each.encode()) for each in documents)


def nats(logits, targets):
    return F.cross_entropy(logits.double().flatten(0, -2), targets.flatten(), reduction="sum").item()


def opened(path):
    """(module, tokenizer) of a saved model."""
    config, weights, pieces, _ = output.read_output(path)
    module = hrm.HRM(hrm.HRMConfig(**config)) if "h_cycles" in config else gpt.GPT(gpt.GPTConfig(**config))
    module.load_state_dict(weights)
    return module.eval(), pieces


def test_the_validation_is_measured_as_the_training_did(trained, measure, monkeypatch):
    with open(trained / "logs" / "train.csv", newline="") as file:
        last = list(csv.DictReader(file))[-1]
    where = ["--data-dir", trained / "Data"]
    for model in ("m.pth", "checkpoints/ckpt-00000030.pt"):
        found, said = measure("--checkpoint", trained / model, *where, "--eval-windows", 8, "--batch-size", 3)
        assert found["loss"] == pytest.approx(float(last["val_loss"]), rel=1e-6)
        assert found["bits_per_byte"] == pytest.approx(float(last["bits_per_byte"]), rel=1e-6)
        assert (found["tokens"], found["dataset"], found["split"]) == (8 * 32, "libro", "val")
        assert f"Pérdida: {found['loss']:.4f} nats por token; perplejidad: {math.exp(found['loss']):.4g}; " \
               f"{found['bits_per_byte']:.4f} bits por byte." in said.out and not said.err
    monkeypatch.chdir(trained)
    every = measure("--checkpoint", "m.pth")[0]
    data = json.loads((trained / "Data" / "libro" / "dataset.json").read_text())
    assert every["tokens"] == (data["splits"]["val"]["tokens"] - 1) // 32 * 32 > 8 * 32
    assert every["dataset_sha256"] == data["sha256"]


@pytest.mark.parametrize("batch_size", [1, 7, 500])
def test_each_token_and_byte_of_a_text_is_counted_once(trained, measure, tmp_path, batch_size):
    module, pieces = opened(trained / "m.pth")
    text = whole(tmp_path / "otro.txt", TEXT)
    found, said = measure("--checkpoint", trained / "m.pth", "--dataset-name", text, "--batch-size", batch_size)
    (tokens, size), total = stream(text, pieces), 0.0
    with torch.no_grad():
        for at in range(0, len(tokens) - 1, 32):
            window = tokens[at:at + 33]
            total += nats(module(window[None, :-1]), window[1:])
    assert found["tokens"] == len(tokens) - 1 and found["tokens"] % 32, "the tail is to be counted too"
    assert found["loss"] == pytest.approx(total / found["tokens"], rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / size, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(total / found["tokens"]), rel=1e-4)
    assert "Texto 'otro'" in said.out and not said.err and found["split"] is None and len(found["dataset_sha256"]) == 64


def test_only_so_many_tokens_of_a_text_are_measured(trained, measure, tmp_path):
    text = whole(tmp_path / "otro.txt", TEXT)
    found, _ = measure("--checkpoint", trained / "m.pth", "--dataset-name", text, "--dataset-max-tokens", 40)
    module, pieces = opened(trained / "m.pth")
    tokens, _ = stream(text, pieces)
    with torch.no_grad():
        expected = nats(module(tokens[None, :32]), tokens[1:33]) + nats(module(tokens[None, 32:40]), tokens[33:41])
    assert found["tokens"] == 40 and found["loss"] == pytest.approx(expected / 40, rel=1e-5)
    assert found["dataset_sha256"] is None, "which would be of all of it"


def test_of_a_text_of_the_hub_a_beginning_is_measured(trained, measure, monkeypatch):
    monkeypatch.setattr(evaluate, "HUB_TOKENS", 50)
    monkeypatch.setattr(corpus, "_hub_documents", lambda *_: ((TEXT, {}) for _ in range(9)))
    figures, _ = measure("--checkpoint", trained / "m.pth", "--dataset-name", "c4")
    assert (figures["tokens"], figures["dataset_sha256"]) == (50, None)


def test_a_published_gpt2_scores_what_it_does_there(measure, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    module = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=300, n_positions=24, n_embd=32, n_layer=2, n_head=4)).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    module.save_pretrained(tmp_path / "hf")
    byte_level(tmp_path / "hf", special_tokens=["<|endoftext|>"])
    text = whole(tmp_path / "otro.txt", TEXT[:600] + "<pad>")  # no piece of the model's, and added to its tokenizer
    found, _ = measure("--checkpoint", tmp_path / "hf", "--dataset-name", text)
    (tokens, size), total = stream(text, tokenizer.load(tmp_path / "hf")), 0.0
    with torch.no_grad():
        for at in range(0, len(tokens) - 1, 24):
            window = tokens[at:at + 25]
            total += nats(module(window[None, :-1]).logits, window[1:])
    assert found["loss"] == pytest.approx(total / found["tokens"], rel=1e-5) and found["tokens"] == len(tokens) - 1
    assert found["bits_per_byte"] == pytest.approx(found["loss"] * found["tokens"] / math.log(2) / size, rel=1e-6)
    with pytest.raises(UserError, match="hf': no se sabe con qué datos se entrenó: indique un texto con --dataset-n"):
        measure("--checkpoint", tmp_path / "hf")


def test_a_piece_of_the_text_that_a_published_gpt2_has_no_row_for_is_measured_too(measure, tmp_path):
    """The last piece of its tokenizer, beside the padding that is added here."""
    transformers = pytest.importorskip("transformers")
    (tmp_path / "hf").mkdir()
    byte_level(tmp_path / "hf", special_tokens=["<|endoftext|>"])
    known = tokenizer.load(tmp_path / "hf")
    last = known.decode([known.pad_id - 1])
    assert known.encode(last) == [known.pad_id - 1] and known.pad_id == known.vocab_size - 1
    transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=known.pad_id - 1, n_positions=24, n_embd=32, n_layer=1, n_head=4)).save_pretrained(tmp_path / "hf")
    found, _ = measure("--checkpoint", tmp_path / "hf", "--dataset-name", whole(tmp_path / "otro.txt", TEXT + last))
    assert math.isfinite(found["loss"])


def test_an_exported_model_scores_what_it_did(trained, measure, tmp_path):
    text = whole(tmp_path / "otro.txt", TEXT)
    config, weights, pieces, _ = output.read_output(trained / "m.pth")
    export.write_folder(tmp_path / "hf", gpt.GPTConfig(**config), weights, pieces)
    here, there = (measure("--checkpoint", path, "--dataset-name", text)[0] for path in (trained / "m.pth",
                                                                                        tmp_path / "hf"))
    assert here["loss"] == pytest.approx(there["loss"], rel=1e-6)
    assert here["bits_per_byte"] == pytest.approx(there["bits_per_byte"], rel=1e-6)


@pytest.mark.parametrize("alone", [True, False])
def test_an_hrm_sees_the_documents_as_it_was_trained(trained, measure, tmp_path, alone):
    """With --document-attention each by itself: as if it were alone in its window."""
    pieces = opened(trained / "m.pth")[1]
    module = hrm.HRM(hrm.HRMConfig(vocab_size=pieces.vocab_size, seq_len=64, n_layer=1, n_head=2, n_embd=16, n_ff=16)
                     ).init_weights(0).eval()
    torch.save(module.state_dict(), tmp_path / "hrm.pth")
    (tmp_path / "hrm.tokenizer.model").write_bytes(pieces.model)
    (tmp_path / "hrm.json").write_text(json.dumps({
        "config": asdict(module.config), "tokenizer": "hrm.tokenizer.model",
        "arguments": {"document_attention": alone}}))
    text = whole(tmp_path / "dos.jsonl", '{"text": "Ana compró pan."}\n{"text": "Luis volvió tarde."}\n')
    found, _ = measure("--checkpoint", tmp_path / "hrm.pth", "--dataset-name", text)
    first, second = (pieces.encode(each) for each in ("Ana compró pan.", "Luis volvió tarde."))
    eos = pieces.eos_id
    documents = [[eos], [*first, eos], second] if alone else [[eos, *first, eos, *second]]
    targets, total = [*first, eos, *second, eos], 0.0
    assert len(targets) < 64
    with torch.no_grad():
        for each in documents:
            total += nats(module(torch.tensor([each])), torch.tensor(targets[:len(each)]))
            targets = targets[len(each):]
    assert found["loss"] == pytest.approx(total / found["tokens"], rel=1e-5)


def test_what_is_in_the_way_of_a_measure_is_one_line(trained, measure, tmp_path, monkeypatch):
    model, text = ["--checkpoint", trained / "m.pth"], ["--dataset-name", whole(tmp_path / "otro.txt", TEXT)]
    empty = whole(tmp_path / "nada.txt", "\n\n")
    (tmp_path / "otros").mkdir()
    for options, why in (
            ([*model, "--data-dir", tmp_path / "otros"], r"con que se entrenó \('libro'\) no están preparados en"),
            ([*model, "--dataset-max-tokens", 9], "--dataset-max-tokens 9: es para el texto de --dataset-name"),
            ([*model, *text, "--eval-windows", 9], "--eval-windows 9: es para la validación"),
            ([*model, *text, "--data-dir", trained], "--data-dir '.*': es de los datos con que se entrenó"),
            ([*model, "--dataset-name", empty], "--dataset-name '.*': está vacío: no hay"),
            (["--checkpoint", tmp_path / "m.pth", *text], "m.pth': no existe; indique el fichero de un modelo"),
            (["--checkpoint", trained / "checkpoints", *text], "indique un fichero de esa carpeta, por ejemplo ")):
        with pytest.raises(UserError, match=why):
            measure(*options)
    mine = trained / "m.json"
    before = mine.read_bytes()
    monkeypatch.setattr(sys, "argv", ["evaluate", *map(str, [*model, *text]), "--json", str(mine)])
    with pytest.raises(UserError, match="m.json': ya existe y no es de una medida anterior"):
        evaluate.main()
    assert mine.read_bytes() == before
    measure(*model, *text)
    again = tmp_path / "cifras.json"
    monkeypatch.setattr(sys, "argv", ["evaluate", *map(str, [*model, *text]), "--json", str(again)])
    assert evaluate.main() == 0, "its own is replaced"


def test_too_little_memory_and_what_is_not_finite_are_told(trained, measure, tmp_path, monkeypatch):
    options = ["--checkpoint", trained / "m.pth", "--dataset-name", whole(tmp_path / "otro.txt", TEXT)]

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(gpt.GPT, "forward", full)
        with pytest.raises(UserError, match="m.pth': no basta la memoria de la GPU con --batch-size 8: indique"):
            measure(*options)
        patched.setattr(gpt.GPT, "forward", lambda self, tokens, targets: torch.tensor(math.nan))
        with pytest.raises(UserError, match="con --precision fp32 la pérdida no es un número finito"):
            measure(*options)
        patched.setattr(gpt.GPT, "forward", lambda self, tokens, targets: torch.tensor(1e3 * targets.numel()))
        found, said = measure(*options)
        assert (found["loss"], found["perplexity"]) == (1000, None) and "perplejidad: más de 1e+304;" in said.out
        patched.setattr(gpt.GPT, "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            measure(*options)


def test_only_the_data_that_are_measured_need_be_whole(trained, measure, tmp_path):
    data, model = shutil.copytree(trained / "Data", tmp_path / "Data"), trained / "m.pth"

    def damage(name):
        with open(data / "libro" / name, "r+b") as file:
            file.seek(-2, 2)
            file.write(b"\x07\x00")

    damage("train-00000.bin")
    assert measure("--checkpoint", model, "--data-dir", data)[0]["split"] == "val"
    damage("val-00000.bin")
    with pytest.raises(UserError, match="val-00000.bin"):
        measure("--checkpoint", model, "--data-dir", data)


def test_what_is_odd_about_a_text_is_told(trained, measure, tmp_path):
    model = ["--checkpoint", trained / "m.pth"]
    _, said = measure(*model, "--dataset-name", trained / "libro.txt", "--dataset-max-tokens", 40)
    assert "se entrenó con un texto que también se llama 'libro'" in said.err
    folder = tmp_path / "varios"
    folder.mkdir()
    (folder / "leeme.pdf").write_bytes(b"%PDF")
    lines = [json.dumps({"text": f"Luis miró el río {number}."}) for number in range(300)]
    whole(folder / "frases.jsonl", "\n".join([*lines[:5], "{mal", *lines[5:]]) + "\n")
    found, said = measure(*model, "--dataset-name", folder)
    assert "de la carpeta no se usa leeme.pdf" in said.err and "líneas dañadas: 1 de 301" in said.err
    assert found["tokens"] == sum(len(opened(trained / "m.pth")[1].encode(json.loads(line)["text"])) + 1
                                  for line in lines)


def test_a_tokenizer_without_bytes_gives_no_bits_per_byte(trained, measure, tmp_path):
    """Its unknown token would cost the same whatever it stands for."""
    from sentencepiece import SentencePieceTrainer

    whole(tmp_path / "t.txt", corpus_text(4).replace(". ", ".\n"))
    SentencePieceTrainer.train(input=str(tmp_path / "t.txt"), model_prefix=str(tmp_path / "m.tokenizer"),
                               vocab_size=60, model_type="bpe", pad_id=3, minloglevel=2)
    pieces = tokenizer.load(tmp_path / "m.tokenizer.model")
    module = gpt.GPT(gpt.GPTConfig(pieces.vocab_size, 16, 1, 2, 16)).init_weights(0)
    torch.save(module.state_dict(), tmp_path / "m.pth")
    (tmp_path / "m.tokenizer.model").write_bytes(pieces.model)
    (tmp_path / "m.json").write_text(json.dumps({"config": asdict(module.config), "tokenizer": "m.tokenizer.model"}))
    found, said = measure("--checkpoint", tmp_path / "m.pth", "--dataset-name", whole(tmp_path / "otro.txt", TEXT))
    assert found["bits_per_byte"] is None and "sin bits por byte" in said.out and found["loss"] > 1


def test_the_command_ends_with_its_exit_code(trained, tmp_path):
    command = ["-m", "aura.evaluate", "--checkpoint", trained / "m.pth"]
    code, said = run([*command, "--data-dir", trained / "Data"], tmp_path)
    assert code == 0 and said.startswith("Validación de 'libro': ") and said.count("\n") == 2, said
    code, said = run([*command, "--dataset-name", "falta.txt"], tmp_path)
    assert code == 2 and said.startswith("error: ") and said.count("\n") == 1, said


def handed(folder, pieces, name="m.pth"):
    """The path of an untrained model with this SentencePiece tokenizer, as train_tensordock.py leaves one."""
    module = gpt.GPT(gpt.GPTConfig(pieces.vocab_size, 16, 1, 2, 16)).init_weights(0)
    torch.save(module.state_dict(), folder / name)
    (folder / "tokenizer.model").write_bytes(pieces.model)
    (folder / "model_config.json").write_text(json.dumps({"config": asdict(module.config),
                                                          "tokenizer": "tokenizer.model"}))
    return folder / name


def test_the_figures_do_not_pass_for_the_description_of_the_model(trained, measure, tmp_path, monkeypatch):
    model = handed(tmp_path, opened(trained / "m.pth")[1], "final_model.pt")
    options = ["--checkpoint", model, "--dataset-name", whole(tmp_path / "otro.txt", TEXT)]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["evaluate", *map(str, options), "--json", "final_model.json"])
    with pytest.raises(UserError, match="--json 'final_model.json': con ese nombre pasaría por la descripción de"):
        evaluate.main()
    assert measure(*options)[0]["lossless"] and opened(model)


def test_bits_per_byte_of_what_a_tokenizer_leaves_of_a_text_are_told(measure, tmp_path):
    from sentencepiece import SentencePieceTrainer

    whole(tmp_path / "t.txt", corpus_text(4).replace(". ", ".\n"))
    SentencePieceTrainer.train(input=str(tmp_path / "t.txt"), model_prefix=str(tmp_path / "n"), vocab_size=400,
                               model_type="bpe", byte_fallback=True, pad_id=3, minloglevel=2)  # nmt_nfkc by default
    model = handed(tmp_path, tokenizer.load(tmp_path / "n.model"))
    found, said = measure("--checkpoint", model, "--dataset-name", whole(tmp_path / "otro.txt", "Ana     vino.\n"))
    assert found["bits_per_byte"] > 0 and not found["lossless"] and "no conserva todos los caracteres" in said.err
    found, said = measure("--checkpoint", model, "--dataset-name", whole(tmp_path / "nada.txt", "\u200b\n"))
    assert found["bits_per_byte"] is None and found["tokens"] == 1, "of which the tokenizer leaves no byte"


def test_rows_beyond_the_tokenizer_of_a_published_gpt2_count(measure, tmp_path):
    transformers = pytest.importorskip("transformers")
    module = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=5000, n_positions=64, n_embd=32, n_layer=1, n_head=2)).eval()
    module.save_pretrained(tmp_path / "hf")
    byte_level(tmp_path / "hf", special_tokens=["<|endoftext|>"])
    text = whole(tmp_path / "otro.txt", "Ana compró pan.\n")
    found, _ = measure("--checkpoint", tmp_path / "hf", "--dataset-name", text)
    tokens, _ = stream(text, tokenizer.load(tmp_path / "hf"))
    with torch.no_grad():
        expected = nats(module(tokens[None, :-1]).logits, tokens[1:])
    assert found["loss"] == pytest.approx(expected / found["tokens"], rel=1e-5)


def test_a_model_that_learnt_from_a_stream_has_no_validation_of_its_own(trained, measure, tmp_path):
    model = handed(tmp_path, opened(trained / "m.pth")[1])
    described = json.loads((tmp_path / "model_config.json").read_text())
    (tmp_path / "model_config.json").write_text(json.dumps({
        **described, "dataset": "c4", "dataset_sha256": "0" * 64, "arguments": {"stream": True}}))
    with pytest.raises(UserError, match="se entrenó con 'c4' y --stream, que no guarda la validación: indique un tex"):
        measure("--checkpoint", model)
