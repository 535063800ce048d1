"""What we hand over: our tokenizer.json equals the tokenizer id by id, transformers' models equal our GPT and HRM."""

import dataclasses
import errno
import inspect
import io
import itertools
import json
import os
import random
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import sentencepiece
import torch
from sentencepiece import sentencepiece_model_pb2

from aura import backend, checkpoint, export, files, generate, ops, output, pretrain, sampling
from aura import tokenizer as tokenizers
from aura.errors import UserError
from aura.models.gpt import GPT, GPTConfig
from aura.models.hrm import HRM, HRMConfig
from aura.session import Session
from tests.support import corpus_text

hf = pytest.importorskip("tokenizers")

TEXTS = [
    "", " ", "   ", "En un lugar de la Mancha, de cuyo nombre no quiero acordarme,", "¿Qué? ¡Ñandú!", "漢字かな한국어",
    "العربية",
    "😀👍🏽👨\u200d👩\u200d👧", "e\u0301 n\u0303 u\u0308 é ñ ü", "\x00\x01\x1b\x7f", "\tuno\tdos\t", "\n\nuno\r\ndos\n",
    "a     b  c", "  delante y detrás  ", "▁▁ a▁b▁", "<pad></s><unk><0x41>", "\u200b\ufeff\u202e\U0010ffff", "ﬁ①"]
ALPHABET = [
    *"aeiounrslmdtcp", *" .,-=", " ", " ", "  ", "    ", "\n", "\t", "\r\n", "\x00", "\x1b", "á", "ñ", "Ñ", "e\u0301",
    *"漢字한😀👍▁\u200d\ufeff", "</s>", "<pad>", "<unk>", "<0x41>", "</", "s>", "la ", "día ", "Ana ", " en", "ana",
    "banana", "====", "---", "....", "jajaja", "000"]
UNTOUCHED = {"add_dummy_prefix": False, "remove_extra_whitespaces": False}


def strings(count, alphabet=ALPHABET, longest=25):
    dice = random.Random(0)
    return ["".join(dice.choices(alphabet, k=dice.randrange(longest))) for _ in range(count)]


def rich_text():
    """corpus_text with words that repeat themselves: only in these the order of equal merges matters."""
    odd = ["banana banana ananas", "jajaja jajajaja", "====== ==== ==", "-- --- ----", "... ..... ......",
           "1000000 5000", "cocorococo tarara lalala", "anana nanana"]
    return corpus_text(4) + "\n" + "\n".join(itertools.chain.from_iterable([line] * 40 for line in odd))


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizers.train([rich_text()], 500)


def exported(tokenizer, directory, note=print):
    """What the library makes of our files."""
    assert "tokenizer.json" in tokenizers.export_files(tokenizer, directory, note)
    return hf.Tokenizer.from_file(str(directory / "tokenizer.json"))


def assert_equal(ours, theirs, texts, ties=0):
    """The same ids, and the same text back; at most `ties` texts may be divided differently, with the very same
    score."""
    scores = [piece.score for piece in sentencepiece_model_pb2.ModelProto.FromString(ours.model).pieces]
    for text in texts:
        ids, found = ours.encode(text), theirs.encode(text).ids
        if ties and found != ids:
            ties -= 1
            assert sum(scores[token] for token in found) == pytest.approx(sum(scores[token] for token in ids), rel=1e-6)
        else:
            assert found == ids, repr(text)
        assert theirs.decode(ids) == ours.decode(ids) == theirs.decode(found), repr(text)


def foreign(**options):
    """A SentencePiece model trained elsewhere, as users bring it."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(rich_text().split("\n")), model_writer=model, minloglevel=2, max_sentence_length=100_000,
        **{"vocab_size": 340 if options.get("byte_fallback") else 100, **options})
    return model.getvalue()


def loaded(tmp_path, **options):
    path = tmp_path / "otro.model"
    path.write_bytes(foreign(**options))
    return tokenizers.load(path)


def of_the_library(kind, tmp_path):
    """A tokenizer.json with the pieces of `kind`."""
    made = kind()
    made.train_from_iterator([rich_text()], vocab_size=300, show_progress=False)
    made.save(str(tmp_path / "otro.json"))
    return tokenizers.load(tmp_path / "otro.json")


def test_our_tokenizer_encodes_and_decodes_alike(tokenizer, tmp_path):
    theirs = exported(tokenizer, tmp_path)
    assert_equal(tokenizer, theirs, TEXTS + strings(3000) + [corpus_text(2)])
    assert theirs.get_vocab_size() == tokenizer.vocab_size
    assert json.loads((tmp_path / "vocab.json").read_text("utf-8")) == theirs.get_vocab()
    assert (tmp_path / "tokenizer.model").read_bytes() == tokenizer.model
    assert any(len(set(piece)) < len(piece) // 2 for piece in theirs.get_vocab()), "no piece that repeats itself"


def test_every_single_id_decodes_alike(tokenizer, tmp_path):
    theirs = exported(tokenizer, tmp_path)
    for token in range(tokenizer.vocab_size):
        assert theirs.decode([token]) == tokenizer.decode([token]), token
    assert tokenizer.decode([tokenizer.eos_id, tokenizer.pad_id]) == ""


def test_the_tokenizer_of_another_run_is_set_aside(tokenizer, tmp_path):
    tokenizers.export_files(tokenizer, tmp_path)
    other = of_the_library(hf.ByteLevelBPETokenizer, tmp_path)
    for _ in range(2):
        tokenizers.export_files(other, tmp_path)
    assert tokenizers.load(tmp_path).sha256 == other.sha256
    (old,) = tmp_path.glob("anterior-*/tokenizer.model")
    assert old.read_bytes() == tokenizer.model


def test_writing_needs_no_library(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    files = tokenizers.export_files(tokenizer, tmp_path)
    assert sorted(files) == sorted(path.name for path in tmp_path.iterdir()) and len(files) == 3


@pytest.mark.parametrize("options", [
    {"model_type": "bpe", "byte_fallback": True, "remove_extra_whitespaces": False},
    {"model_type": "bpe"},
    {"model_type": "bpe", "add_dummy_prefix": False},
    {"model_type": "char", "byte_fallback": True},
    {"model_type": "unigram", "byte_fallback": True},
    {"model_type": "unigram", "byte_fallback": True, **UNTOUCHED},
    {"model_type": "bpe", "byte_fallback": True, "user_defined_symbols": ["<|yo|>", "ana", "ñ"], **UNTOUCHED},
], ids=lambda options: "-".join(map(str, options.values())))
def test_models_from_elsewhere_encode_and_decode_alike(options, tmp_path):
    ours = loaded(tmp_path, normalization_rule_name="identity", **options)
    notes = []
    texts = TEXTS + strings(1500, [*ALPHABET, "<|yo|>"])
    unigram = options["model_type"] == "unigram"  # the sums of its scores are rounded differently
    assert_equal(ours, exported(ours, tmp_path, notes.append), texts, ties=len(texts) // 50 if unigram else 0)
    assert bool(notes) == unigram, notes


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_normalising_model_is_alike_on_spanish_and_says_where_it_may_differ(kind, tmp_path):
    ours = loaded(tmp_path, model_type=kind, byte_fallback=True)
    notes = []
    theirs = exported(ours, tmp_path, notes.append)
    assert any("nmt_nfkc" in line and "grafemas" in line for line in notes)
    told = ("\r\n", "\u0301\u200d")
    texts = [text for text in TEXTS + strings(1500) if not any(part in text for part in told)]
    assert_equal(ours, theirs, texts, ties=len(texts) // 50 if kind == "unigram" else 0)
    assert any(theirs.encode(text).ids != ours.encode(text) for text in ("a\r\nb", "e\u0301\u200d"))


@pytest.mark.parametrize(("options", "why"), [
    ({"model_type": "word", "vocab_size": 60}, "word"),
    ({"model_type": "bpe", "treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix"),
    ({"model_type": "unigram", "user_defined_symbols": ["<|yo|>"]}, "user_defined_symbols"),
])
def test_what_the_format_cannot_say_is_not_written(options, why, tmp_path):
    ours = loaded(tmp_path, **options)
    notes = []
    assert tokenizers.export_files(ours, tmp_path, notes.append) == ["tokenizer.model", "vocab.json"]
    assert len(notes) == 1 and why in notes[0] and not (tmp_path / "tokenizer.json").exists()


def random_model(proto, dice):
    """`proto` with pieces that no training would choose: over few letters and with random scores."""
    made = sentencepiece_model_pb2.ModelProto.FromString(proto)
    others = [piece for piece in made.pieces if piece.type != sentencepiece_model_pb2.ModelProto.SentencePiece.NORMAL]
    del made.pieces[:]
    made.pieces.extend(others)
    letters = dice.choice(["a", "ab", "abc"])
    for word in ["a", "b", "c", *sorted({"".join(dice.choices(letters, k=dice.randrange(2, 7))) for _ in range(40)})]:
        made.pieces.add(piece=word, score=-dice.random())
    made.trainer_spec.vocab_size = len(made.pieces)
    return made.SerializeToString()


def test_any_order_of_merges_is_kept(tokenizer):
    dice = random.Random(1)
    for _ in range(40):
        ours = tokenizers.from_bytes(random_model(tokenizer.model, dice))
        theirs = hf.Tokenizer.from_str(json.dumps(ours.to_json(pytest.fail)))
        assert_equal(ours, theirs, strings(60, "abc", 40))


def test_pieces_of_equal_score_are_told(tmp_path):
    proto = sentencepiece_model_pb2.ModelProto.FromString(tokenizers.train([rich_text()], 400).model)
    for piece in proto.pieces:
        piece.score = -1.0
    notes = []
    tokenizers.from_bytes(proto.SerializeToString()).to_json(notes.append)
    assert "misma puntuación" in notes[0]


# The model.


@pytest.fixture(scope="module")
def model(tokenizer):
    return scattered(GPT(GPTConfig(vocab_size=tokenizer.vocab_size, seq_len=48, n_layer=3, n_head=4, n_embd=32,
                                   dropout=0.25)))


def thinker(tokenizer, **options):
    return scattered(HRM(HRMConfig(vocab_size=tokenizer.vocab_size, seq_len=48, n_layer=2, n_head=4, n_embd=64, n_ff=40,
                                   **{"exit_weights": False, "h_cycles": 3, "l_cycles": 1, "rope_theta": 500.0,
                                      **options})))


def scattered(made):
    """`made` with values all about: no bias at zero, no norm at one, or a mistake would not show."""
    torch.manual_seed(0)
    for parameter in [*made.parameters(), *made.buffers()]:
        torch.nn.init.normal_(parameter, 0.5 if parameter.dim() == 1 else 0.0, 0.3)
    return made.eval()


def save(model, tokenizer, path, dtype=torch.float32):
    """A final model as training leaves it, or a checkpoint where the name ends in .pt."""
    weights = {name: value.to(dtype) for name, value in model.state_dict().items()}
    config = dataclasses.asdict(model.config)
    if path.suffix == ".pt":
        stored = torch.frombuffer(bytearray(tokenizer.model), dtype=torch.uint8)
        checkpoint.save_file(path, {"config": config, "model": weights, "tokenizer": stored})
        return path
    checkpoint.save_file(path, weights)
    name = f"{path.stem}.{tokenizer.file_name}"
    (path.parent / name).write_bytes(tokenizer.model)
    path.with_suffix(".json").write_text(json.dumps({"config": config, "tokenizer": name,
                                                    "tokenizer_sha256": tokenizer.sha256}))
    return path


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["export", *map(str, words)])
    return export.main()


@pytest.fixture(scope="module", params=["gpt", "hrm"])
def handed_over(request, model, tokenizer, tmp_path_factory):
    """(a model, its exported folder)"""
    where = tmp_path_factory.mktemp("modelo")
    made = model if request.param == "gpt" else thinker(tokenizer)
    path = save(made, tokenizer, where / "modelo.pth")
    with pytest.MonkeyPatch.context() as patch:
        assert run(patch, "--checkpoint", path, "--to", "hf", where / "hf") == 0
    return made, where / "hf"


def test_the_folder_is_complete(handed_over):
    _, folder = handed_over
    assert {path.name for path in folder.iterdir()} == export.FILES
    assert not [path for path in folder.parent.iterdir() if path.name.startswith(".")]
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1, "some file is for its owner alone"


def test_transformers_computes_the_same(handed_over, tokenizer, capfd):
    transformers = pytest.importorskip("transformers")
    model, folder = handed_over
    theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(theirs).__name__ == {GPT: "GPT2LMHeadModel", HRM: "HrmTextForCausalLM"}[type(model)]
    assert theirs.dtype == torch.float32
    if type(model) is GPT:
        described = theirs.config.layer_norm_epsilon, theirs.config.attn_pdrop, theirs.config.resid_pdrop, \
            theirs.config.embd_pdrop
        assert described == (inspect.signature(ops.add_layer_norm).parameters["eps"].default, 0.25, 0.25, 0.25)
    else:
        assert theirs.config.rms_norm_eps == inspect.signature(ops.add_rms_norm).parameters["eps"].default
    assert not any(loading.values()), loading
    assert (theirs.lm_head.weight is theirs.get_input_embeddings().weight) == (type(model) is GPT)
    generation = theirs.generation_config
    assert generation.eos_token_id == generation.bos_token_id == tokenizer.eos_id
    assert generation.pad_token_id == tokenizer.pad_id
    tokens = torch.randint(model.config.vocab_size, (3, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = model(tokens)
        assert ours.std() > 1, "logits too flat to tell anything"
        torch.testing.assert_close(theirs.eval()(tokens).logits, ours, rtol=1e-4, atol=1e-4)
    said = "".join(capfd.readouterr())
    assert "tie" not in said.lower() and "initialized" not in said, said


def test_transformers_writes_the_same(handed_over, tokenizer):
    transformers = pytest.importorskip("transformers")
    model, folder = handed_over
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    for prompt in ("Ana compró", "junto al mar", "\n"):
        ids = tokenizer.encode(prompt)
        ours = list(sampling.generate(model, ids, 12, eos_id=tokenizer.eos_id, temperature=0))
        continued = theirs.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                                    do_sample=False, max_new_tokens=12)[0, len(ids):].tolist()
        assert [token for token in continued if token != tokenizer.eos_id] == ours


def test_transformers_tokenizes_the_same(handed_over, tokenizer):
    transformers = pytest.importorskip("transformers")
    _, folder = handed_over
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs.padding_side == "left", "what goes on after padding on the right goes on after nothing"
    assert (theirs.eos_token_id, theirs.pad_token_id) == (tokenizer.eos_id, tokenizer.pad_id)
    assert len(theirs) == tokenizer.vocab_size and theirs.model_max_length == 48
    for text in TEXTS + strings(300):
        ids = tokenizer.encode(text)
        assert theirs.encode(text) == ids == theirs(text)["input_ids"], repr(text)
        assert theirs.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize(("options", "named"), [
    ({"exit_weights": True}, "--exit-weights"), ({"segments": 2, "reinject": True}, "--segments y --reinject")])
def test_what_hrm_text_does_not_have_is_named(tokenizer, tmp_path, monkeypatch, options, named):
    path = save(thinker(tokenizer, **options), tokenizer, tmp_path / "hrm.pth")
    with pytest.raises(UserError, match=f"es un HRM con {named}, que en transformers no existe"):
        run(monkeypatch, "--checkpoint", path, "--to", "hf", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_a_checkpoint_and_its_dtype(model, tokenizer, tmp_path, monkeypatch, capsys):
    transformers = pytest.importorskip("transformers")
    path = save(model, tokenizer, tmp_path / "ckpt-00000001.pt", torch.bfloat16)
    assert run(monkeypatch, "--checkpoint", path, "--to", "hf", tmp_path / "hf") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert f"from_pretrained({str(tmp_path / 'hf')!r})" in last and "Cárguelo" in last
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert theirs.dtype == torch.bfloat16
    stored = safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")
    assert {value.dtype for value in stored.values()} == {torch.bfloat16}
    assert torch.equal(theirs.transformer.h[2].mlp.c_fc.weight, model.h[2].mlp.c_fc.weight.t().bfloat16())


def test_a_byte_level_tokenizer_goes_along(model, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    made = hf.ByteLevelBPETokenizer()
    made.train_from_iterator([rich_text()], vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    made.save(str(tmp_path / "tokenizer.json"))
    ours = tokenizers.load(tmp_path / "tokenizer.json")
    path = save(model, ours, tmp_path / "gpt.pth")
    run(monkeypatch, "--checkpoint", path, "--to", "hf", tmp_path / "hf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (theirs.eos_token_id, theirs.pad_token_id) == (ours.eos_id, ours.pad_id)
    for text in TEXTS + strings(300, [*ALPHABET, "<|endoftext|>"]):
        assert theirs.encode(text) == ours.encode(text), repr(text)
    assert not (tmp_path / "hf" / "tokenizer.model").exists()


@pytest.mark.parametrize("prompt", ["Ana compró", ""])
def test_the_space_before_what_is_written_stays(model, tmp_path, monkeypatch, capsys, prompt):
    """Llama's decoder strips the one that a text begins with."""
    made = hf.SentencePieceBPETokenizer()
    made.train_from_iterator([rich_text()], vocab_size=300, special_tokens=["<unk>", "</s>"], show_progress=False)
    made.save(str(tmp_path / "tokenizer.json"))
    ours = tokenizers.load(tmp_path / "tokenizer.json")
    ids, expected, told = ours.encode("pan en la plaza"), f"{prompt} pan en la plaza".strip(), []
    assert ours.decode(ids) == "pan en la plaza"
    monkeypatch.setattr(sampling, "generate", lambda *_, **__: ids)
    path = save(model, ours, tmp_path / "gpt.pth")
    monkeypatch.setattr(sys, "argv", ["generate", "--checkpoint", str(path), "--prompt", prompt])
    monkeypatch.setattr(backend, "unused_card", lambda device: "hay una tarjeta")
    assert generate.main() == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"{expected}\n--- {len(ids)} tokens, ")
    assert said.err == "Aviso: se usa el procesador; hay una tarjeta.\n"
    pretrain.make_sample(SimpleNamespace(sample_prompt=prompt, sample_length=9, seed=1), Session(), model, ours,
                         SimpleNamespace(sample=lambda step, text: told.append(text)), None)(1, None)
    assert told == [expected]


def test_an_earlier_export_is_replaced_and_nothing_else(model, tokenizer, tmp_path, monkeypatch, capsys):
    path = save(model, tokenizer, tmp_path / "gpt.pth")
    order = ("--checkpoint", path, "--to", "hf", tmp_path / "hf")
    (tmp_path / "hf").mkdir()
    run(monkeypatch, *order)
    for described in (path.with_suffix(".json"), tmp_path / "hf" / "config.json"):  # as Windows' Notepad saves them
        described.write_text(described.read_text(encoding="utf-8"), encoding="utf-8-sig")
    assert "Sustituye" not in capsys.readouterr().out
    (tmp_path / "hf" / files.IN_USE).touch()  # of one that was killed as it ended
    run(monkeypatch, *order)
    assert " Sustituye a la exportación que había ahí.\n" in capsys.readouterr().out
    (tmp_path / "hf" / "notas.txt").write_text("mías")
    with pytest.raises(UserError, match="notas.txt"):
        run(monkeypatch, *order)
    (tmp_path / "ajena").mkdir()
    (tmp_path / "ajena" / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "fichero").write_text("")
    for name, why in (("ajena", "no está vacía"), ("fichero", "no es una carpeta")):
        with pytest.raises(UserError, match=why):
            run(monkeypatch, *order[:-1], tmp_path / name)
    assert (tmp_path / "hf" / "notas.txt").read_text() == "mías"


def test_a_folder_that_may_not_be_read_is_not_called_full(tmp_path, monkeypatch):
    def denied(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", denied)
    with pytest.raises(UserError, match=f"--to hf '{tmp_path}': no se puede leer .permiso denegado.; .* indique otra"):
        run(monkeypatch, "--checkpoint", "falta.pth", "--to", "hf", tmp_path)


def test_a_full_disk_leaves_the_earlier_export(model, tokenizer, tmp_path, monkeypatch):
    path = save(model, tokenizer, tmp_path / "gpt.pth")
    order = ("--checkpoint", path, "--to", "hf", tmp_path / "hf")
    run(monkeypatch, *order)
    before = (tmp_path / "hf" / "model.safetensors").stat().st_ino

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    def full_in_safetensors_words(*_, **__):
        raise safetensors.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    for writer, refuse in ((tokenizers, "export_files"), full), ((safetensors.torch, "save_file"),
                                                                 full_in_safetensors_words):
        monkeypatch.setattr(*writer, refuse)
        with pytest.raises(UserError, match="no se puede guardar .no queda espacio en el disco.; indique otra"):
            run(monkeypatch, *order)
    assert (tmp_path / "hf" / "model.safetensors").stat().st_ino == before
    assert not [found for found in tmp_path.iterdir() if found.name.startswith(".")]


def test_what_a_killed_export_left_is_removed_and_nothing_else(model, tokenizer, tmp_path, monkeypatch):
    path = save(model, tokenizer, tmp_path / "gpt.pth")
    for name in (".hf.96e4f4d6.parcial", ".otra.96e4f4d6.parcial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"cut")
    assert run(monkeypatch, "--checkpoint", path, "--to", "hf", tmp_path / "hf") == 0
    assert [found.name for found in tmp_path.iterdir() if found.name.startswith(".")] == [".otra.96e4f4d6.parcial"]


def test_a_tokenizer_that_transformers_would_read_otherwise_is_left_out(tmp_path, monkeypatch, capsys):
    other = loaded(tmp_path, model_type="unigram", user_defined_symbols=["<|yo|>"])
    small = GPT(GPTConfig(vocab_size=other.vocab_size, seq_len=16, n_layer=1, n_head=2, n_embd=16)).init_weights(1)
    path = save(small, other, tmp_path / "gpt.pth")
    assert run(monkeypatch, "--checkpoint", path, "--to", "hf", tmp_path / "hf") == 0
    assert {file.name for file in (tmp_path / "hf").iterdir()} == {"config.json", "generation_config.json",
                                                                  "model.safetensors"}
    said = capsys.readouterr().out
    assert "user_defined_symbols" in said and "Sin tokenizador" in said and "AutoTokenizer" not in said


def test_links_that_lead_to_each_other_are_one_line(tmp_path, monkeypatch):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(UserError, match="--to hf '.*/a'"):
        run(monkeypatch, "--checkpoint", "falta.pth", "--to", "hf", tmp_path / "a")


@pytest.mark.parametrize("command", [generate.main, export.main])
def test_what_is_no_model_is_named_with_the_flag_that_there_is(command, tmp_path, monkeypatch):
    for name in ("x.pt", "model.safetensors"):
        (tmp_path / name).write_bytes(b"hola")
    torch.save({"config": {"hidden_size": 8}, "model": {}, "tokenizer": torch.zeros(9, dtype=torch.uint8)},
               tmp_path / "bert.pt")
    foreign = {"config": {}, "model": {}, "tokenizer": torch.zeros(9, dtype=torch.uint8)}
    for name, value in (("model", 3), ("ema", 3), ("tokenizer", b"x"), ("tokenizer", None)):
        torch.save({**foreign, name: value}, tmp_path / "ajeno.pt")
        with pytest.raises(UserError, match=f"ajeno.pt' no es un .* este proyecto: no tiene {name}, o no es lo que"):
            output.read_output(tmp_path / "ajeno.pt")
    leaves = command is export.main  # the other takes a folder of transformers' too
    for path, why in ((tmp_path / "x.pt", "no es un fichero de PyTorch, o está [^(]*; .* otro con --checkpoint$"),
                      (tmp_path, "es una carpeta; indique el fichero" if leaves else "indique un fichero de esa car"),
                      (tmp_path / "y.pt", "no existe; indique el"), (os.devnull, "no es un fichero ni una carpeta; "),
                      (tmp_path / "model.safetensors", "es para otras herramientas, como transformers; indique el "
                       if leaves else "indique la carpeta en la que está"),
                      (tmp_path / "bert.pt", "su tokenizador no es de SentencePiece, .* un BERT está ya")):
        monkeypatch.setattr(sys, "argv", ["x", "--checkpoint", str(path)])
        if leaves:
            sys.argv += ["--to", "hf", str(tmp_path / "hf")]
        with pytest.raises(UserError, match=f"'{path}': {why}"):
            command()
    assert not (tmp_path / "hf").exists()


def test_too_little_memory_to_write_text_is_told(model, tokenizer, tmp_path, monkeypatch):
    path = save(model, tokenizer, tmp_path / "gpt.pth")
    monkeypatch.setattr(sys, "argv", ["generate", "--checkpoint", str(path)])

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(sampling, "write", full)
    with pytest.raises(UserError, match=r"gpt.pth': no basta la memoria de la GPU: libere .*CUDA_VISIBLE_DEVICES="):
        generate.main()
    monkeypatch.setattr(sampling, "write", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate.main()


def test_a_model_moved_without_its_description_is_told_the_name_of_it(model, tokenizer, tmp_path, monkeypatch):
    path = save(model, tokenizer, tmp_path / "gpt.pth")
    path.with_suffix(".json").unlink()
    monkeypatch.setattr(sys, "argv", ["generate", "--checkpoint", str(path)])
    with pytest.raises(UserError, match=r"falta 'gpt\.json' \(de train_tensordock\.py, 'model_config\.json'\) junto a"):
        generate.main()


def test_the_command_to_try_a_model_with_may_be_pasted(model, tokenizer, tmp_path, capsys):
    path, data = tmp_path / "mi modelo.pth", SimpleNamespace(meta={"name": "libro"}, sha256="0")
    output.save_output(SimpleNamespace(output=str(path), checkpoint_dir="c"), model.state_dict(), model.config, data,
                       tokenizer, SimpleNamespace(step=1, tokens=1), None, "", {})
    said = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert said == ["Pruébelo:", "python", "-m", "aura.generate", "--checkpoint", str(path), "--prompt", "En un lugar"]


def test_a_model_of_another_run_that_came_to_its_place_meanwhile_is_moved_aside(model, tokenizer, tmp_path, capsys):
    data, progress = SimpleNamespace(meta={"name": "libro"}, sha256="0"), SimpleNamespace(step=1, tokens=1)
    kept = None
    for run, moved in (("a", False), ("a", False), ("b", True)):
        args = SimpleNamespace(output=str(tmp_path / "m.pth"), checkpoint_dir=str(tmp_path / run))
        output.save_output(args, model.state_dict(), model.config, data, tokenizer, progress, None, "", {})
        assert ("de otra ejecución, se ha movido a" in capsys.readouterr().out) == moved
        kept = kept or {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    [aside] = tmp_path.glob("anterior-*")
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == kept
    assert kept.keys() == {"m.pth", "m.json", "m.tokenizer.model"} and output.read_output(aside / "m.pth")
    assert output.written_by(tmp_path / "m.json")[1] == tmp_path / "b"
    (tmp_path / "m.json").unlink()
    output.save_output(args, model.state_dict(), model.config, data, tokenizer, progress, None, "", {})
    assert "m.pth, que sin m.json no se sabe de qué ejecución es, se ha movido a" in capsys.readouterr().out
    assert len(list(tmp_path.glob("anterior-*/m.pth"))) == 2


def test_a_run_that_begins_anew_moves_its_folders_earlier_model_aside(model, tokenizer, tmp_path, capsys, monkeypatch):
    data, progress = SimpleNamespace(meta={"name": "libro"}, sha256="0"), SimpleNamespace(step=1, tokens=1)
    args, other = (SimpleNamespace(output=str(tmp_path / "m.pth"), checkpoint_dir=str(tmp_path / run)) for run in "ab")
    output.set_own_aside(args, None, pytest.fail)  # there is none
    output.save_output(args, model.state_dict(), model.config, data, tokenizer, progress, None, "", {})
    output.set_own_aside(other, None, pytest.fail)  # another's, of which save_output() takes care
    kept, told = {path.name: path.read_bytes() for path in tmp_path.iterdir()}, []
    output.set_own_aside(args, None, told.append)
    aside, vocabulary = sorted(tmp_path.iterdir())
    assert vocabulary.name == "m.tokenizer.model", "which --tokenizer may name"
    assert told == [f"El modelo anterior se ha movido a {aside}."]
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == kept and len(kept) == 3
    output.save_output(args, model.state_dict(), model.config, data, tokenizer, progress, None, "", {})
    with monkeypatch.context() as patch:
        patch.setattr(output.shutil, "copy2", lambda *_: os.stat("/no/hay"))
        with pytest.raises(UserError, match=r"está ya en .*anterior-.*m.tokenizer.model', no se puede"):
            output.set_own_aside(args, None, pytest.fail)
    output.save_output(args, model.state_dict(), model.config, data, tokenizer, progress, None, "", {})
    monkeypatch.setattr(output, "set_aside", lambda *_: os.stat("/no/hay"))
    with pytest.raises(UserError, match="m.pth': no se puede mover el modelo anterior .*otro --output"):
        output.set_own_aside(args, None, pytest.fail)


def test_a_model_that_diverged_writes_nothing(model, tokenizer, tmp_path, monkeypatch):
    path = save(model, tokenizer, tmp_path / "ckpt-00000001.pt")
    state = checkpoint.read(path)
    state["model"]["wpe.weight"] = torch.full_like(state["model"]["wpe.weight"], torch.nan)
    checkpoint.save_file(path, state)
    monkeypatch.setattr(sys, "argv", ["generate", "--checkpoint", str(path)])
    for write in (generate.main, lambda: run(monkeypatch, "--checkpoint", path, "--to", "hf", tmp_path / "hf")):
        with pytest.raises(UserError, match=r"1.pt': .* no son números finitos en sus pesos .wpe.weight.: .* anterior"):
            write()
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("damage, why", [
    (lambda path: path.unlink(), "no está"), (lambda path: path.write_bytes(b""), "no es el suyo, o está dañado"),
    (lambda path: path.write_bytes(path.read_bytes() + b"\x18\x00"), "no es el suyo, o está dañado")])
def test_a_model_beside_another_tokenizer_writes_nothing(model, tokenizer, tmp_path, monkeypatch, damage, why):
    """In the last case it still loads, like that of another training, and the text would be nonsense."""
    path = save(model, tokenizer, tmp_path / "gpt.pth")
    damage(path.with_suffix(".tokenizer.model"))
    monkeypatch.setattr(sys, "argv", ["generate", "--checkpoint", str(path)])
    with pytest.raises(UserError, match=f"su tokenizador, 'gpt.tokenizer.model', {why}: cópielo a su lado"):
        generate.main()


def test_a_model_under_another_name_is_told_which_files_are_its_own(model, tokenizer, tmp_path, monkeypatch):
    path = save(model, tokenizer, tmp_path / "gpt.pth").rename(tmp_path / "mio.pth")
    described = tmp_path / "gpt.json"
    (tmp_path / "otro.tokenizer.model").write_bytes(b"another's")
    kept = (tmp_path / "gpt.tokenizer.model").rename(tmp_path / "aparte")
    for name, content in (("lista.json", "[1]"), ("roto.json", "{"), ("c.json", '{"config": {}, "tokenizer": 3}'),
                          ("datos.json", described.read_text() + " " * output.DESCRIPTION_MOST)):
        (tmp_path / name).write_text(content)
    os.mkfifo(tmp_path / "tubo.json")
    os.mkfifo(tmp_path / "tubo.tokenizer.model")
    monkeypatch.setattr(sys, "argv", ["generate", "--checkpoint", str(path), "--length", "1"])
    with pytest.raises(UserError, match=r"falta 'mio.json' .* junto a .*: si es 'gpt.json', cópielo .* 'mio.json'$"):
        generate.main()
    (tmp_path / "b.json").write_bytes(described.read_bytes())
    with pytest.raises(UserError, match=r"falta 'mio.json' .*: cópielo también"):
        generate.main()
    described.rename(tmp_path / "mio.json")
    with pytest.raises(UserError, match=r"'gpt.tokenizer.model', no está: cópielo a su lado desde"):
        generate.main()
    kept.rename(tmp_path / "mio.tokenizer.model")
    with pytest.raises(UserError, match=r"'gpt.tokenizer.model', no está; 'mio.tokenizer.model' es el mismo: cópielo"):
        generate.main()
    (tmp_path / "mio.tokenizer.model").rename(tmp_path / "gpt.tokenizer.model")
    assert generate.main() == 0


def test_what_a_process_keeps_for_itself_is_called_that(tmp_path, monkeypatch):
    (tmp_path / "rank-00000").mkdir()
    own, whole = tmp_path / "rank-00000" / "ckpt-00000024.pt", tmp_path / "interrupt-step-24.pt"
    checkpoint.save_file(own, {"own": {}, "sync": {}})
    for why in ("indique el punto de control de ese paso, de la carpeta de encima", f"indique '{whole}'"):
        with pytest.raises(UserError, match=f"{own}': es lo que un proceso guarda solo para sí, sin el modelo: {why}$"):
            output.read_output(own)
        whole.touch()
        (tmp_path / "ckpt-00000025.pt").touch()
    monkeypatch.chdir(own.parent)
    with pytest.raises(UserError, match="'ckpt-00000024.pt': .* indique '../interrupt-step-24.pt'$"):
        output.read_output(own.name)


@pytest.mark.parametrize("name, reads", [("gpt.json", "read_text"), ("gpt.tokenizer.model", "read_bytes")])
def test_what_may_not_be_read_beside_a_model_is_called_that(model, tokenizer, tmp_path, monkeypatch, name, reads):
    path, reading = save(model, tokenizer, tmp_path / "gpt.pth"), getattr(Path, reads)

    def refused(file, *words, **named):
        if file.name == name:
            raise PermissionError(errno.EACCES, "no", str(file))
        return reading(file, *words, **named)

    monkeypatch.setattr(Path, reads, refused)
    monkeypatch.setattr(sys, "argv", ["generate", "--checkpoint", str(path)])
    with pytest.raises(UserError, match=f"{name}' no se puede leer .permiso denegado.: corrija sus permisos"):
        generate.main()


@pytest.mark.parametrize("strange", [
    torch.zeros(1).expand(64, 64), torch.zeros(64, 64, dtype=torch.int32), torch.zeros(64, 64, dtype=torch.complex64),
    torch.zeros(64, 64).to_sparse(), torch.zeros(64, 64, device="meta"), "text"],
    ids=["repeated", "integers", "complex", "sparse", "without values", "no tensor"])
def test_weights_that_are_no_plain_numbers_are_named(model, tokenizer, tmp_path, monkeypatch, strange):
    path = save(model, tokenizer, tmp_path / "gpt.pth")
    torch.save({**torch.load(path, weights_only=True), "ln_f.weight": strange}, path)
    monkeypatch.setattr(sys, "argv", ["generate", "--checkpoint", str(path)])
    with pytest.raises(UserError, match=r"gpt\.pth': ln_f\.weight no son pesos como los que guarda este proyecto"):
        generate.main()


def test_a_description_of_endless_brackets_is_a_damaged_one(model, tokenizer, tmp_path, monkeypatch):
    path = save(model, tokenizer, tmp_path / "gpt.pth")
    path.with_suffix(".json").write_text("[" * 200_000)
    monkeypatch.setattr(sys, "argv", ["generate", "--checkpoint", str(path)])
    with pytest.raises(UserError, match=r"falta 'gpt\.json'.* o está dañado"):
        generate.main()
    assert output.written_by(path.with_suffix(".json")) is None
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("[" * 200_000)
    with pytest.raises(UserError, match="no está vacía y no es una exportación anterior"):
        export.require_free(tmp_path / "hf")


def test_what_is_asked_for_is_drawn_and_no_piece_colours_the_terminal(model, tokenizer, tmp_path, monkeypatch, capsys):
    path = save(model, tokenizer, tmp_path / "gpt.pth")
    asked = []
    monkeypatch.setattr(sampling, "write", lambda model, _, *words, say, **given: (asked.append(
        (*words, given, getattr(model, "early_exit", None))) or say("a\x1b[2Jb"), 1))
    monkeypatch.setattr(sys, "argv", ["generate", "--checkpoint", str(path), "--seed", "7", "--num-samples", "3"])
    generate.main()
    assert [given["seed"] for _, _, given, _ in asked] == [7, 8, 9]  # or all texts would be one
    assert capsys.readouterr().out.startswith("a\\x1b[2Jb\n")
    path = save(thinker(tokenizer, segments=2), tokenizer, tmp_path / "hrm.pth")
    monkeypatch.setattr(sys, "argv", ["generate", "--checkpoint", str(path), "--early-exit", *"--prompt al --length 9 "
                                      "--temperature 0.5 --top-k 4 --top-p 0.25".split()])
    generate.main()
    assert asked[-1] == ("al", 9, {"seed": 0, "temperature": 0.5, "top_k": 4, "top_p": 0.25}, True)


@pytest.mark.parametrize("kind", [None, "unigram", hf.SentencePieceBPETokenizer, hf.ByteLevelBPETokenizer])
def test_a_text_told_in_parts_is_the_text(kind, tokenizer, tmp_path, monkeypatch):
    """Characters of several tokens come whole, bytes that are no character as if all had been decoded at once."""
    used, dice = tokenizer, random.Random(0)
    if kind:
        used = loaded(tmp_path, model_type=kind) if kind == "unigram" else of_the_library(kind, tmp_path)
    for prompt in ("", "Ana compró", "a ", "漢😀"):
        before = used.encode(prompt) or [used.eos_id]
        known = used.decode(before)
        drawn = dice.choices(range(used.vocab_size), k=300)
        for ids in (*map(used.encode, ("", " niña 漢字😀 y ▁\n fin", "👩\u200d👧")), drawn):
            whole, parts = used.decode(before + ids), []
            assert whole.startswith(known)
            monkeypatch.setattr(sampling, "generate", lambda *_, ids=ids, **__: iter(ids))
            text, count = sampling.write(None, used, prompt, 300, say=parts.append)
            assert text == "".join(parts) == prompt + whole[len(known):] and count == len(ids) and all(parts)
            assert not any(part.endswith("\ufffd") for part in parts[:-1])
            assert len(ids) < 300 or len(parts) > 100, "told while it is written"


def test_a_text_is_printed_while_it_is_written_and_its_line_ends(model, tokenizer, tmp_path, monkeypatch):
    path, shown, pipe = save(model, tokenizer, tmp_path / "gpt.pth"), [], io.BytesIO()

    def written(*_, **__):
        for token in tokenizer.encode("junto al mar"):
            yield token
            shown.append(pipe.getvalue().decode())
        raise KeyboardInterrupt

    monkeypatch.setattr(sampling, "generate", written)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(pipe, encoding="utf-8", line_buffering=True))
    monkeypatch.setattr(sys, "argv", ["generate", "--checkpoint", str(path), "--prompt", "Ana "])
    with pytest.raises(KeyboardInterrupt):
        generate.main()
    assert shown == sorted(set(shown), key=len) and shown[0] != shown[-1] == "Ana junto al mar"
    assert pipe.getvalue().decode() == "Ana junto al mar\n"


def test_what_leaves_needs_a_tokenizer_of_the_model(model, tokenizer, tmp_path, monkeypatch, capsys):
    """One of fewer pieces is taken, and nothing drawn that it does not have."""
    path = save(model, tokenizer, tmp_path / "gpt.pth")
    monkeypatch.setattr(sys, "argv", ["generate", "--checkpoint", str(path), "--length", "30"])
    config, weights, _, _ = output.read_output(path)
    learnt = output.learnt_from({"arguments": {"output": "gpt.pth"}})
    monkeypatch.setattr(output, "read_output", lambda *_: (config, weights, tokenizer, learnt))
    drawn = []
    monkeypatch.setattr(sampling, "choose", lambda logits, *_, **__: drawn.append(len(logits)) or 3)
    with monkeypatch.context() as fewer:
        fewer.setattr(tokenizer, "vocab_size", 5)
        generate.main()
    assert set(drawn) == {5}
    monkeypatch.setattr(tokenizer, "vocab_size", config["vocab_size"] + 1)
    for hand_over in (generate.main, lambda: run(monkeypatch, "--checkpoint", path, "--to", "hf", tmp_path / "hf")):
        with pytest.raises(UserError, match=r"gpt\.pth': el tokenizador tiene \d+ piezas y el modelo solo \d+"):
            hand_over()


def test_bad_orders_are_named(model, tokenizer, tmp_path, monkeypatch):
    path = save(model, tokenizer, tmp_path / "gpt.pth")
    with pytest.raises(UserError, match="'gguf'.* existe hf, .*GGUF, el de llama.cpp y Ollama, no se escribe"):
        run(monkeypatch, "--checkpoint", path, "--to", "gguf", "x")
    with pytest.raises(UserError, match="un formato y una carpeta"):
        run(monkeypatch, "--checkpoint", path, "--to", "hf")
    with pytest.raises(UserError, match="falta.pth"):
        run(monkeypatch, "--checkpoint", "falta.pth", "--to", "hf", tmp_path / "hf")
    described = json.loads(path.with_suffix(".json").read_text())
    for key, value, why in (("n_layer", 2, "no corresponden"), ("experts", 2, "experts: 2"), ("n_emb", 32, "n_emb: 32"),
                            ("n_head", 0, "n_head: 0"), ("n_embd", "32", "n_embd: '32'"), ("n_embd", 33, "no es múlt"),
                            ("n_embd", 2**24, "no corresponden"), ("dropout", 1, "dropout: 1"),
                            ("n_layer", 10**12, "no corresponden")):
        changed = {**described, "config": {**described["config"], key: value}}
        path.with_suffix(".json").write_text(json.dumps(changed))
        with pytest.raises(UserError, match=f"gpt.pth': .*{why}"):
            run(monkeypatch, "--checkpoint", path, "--to", "hf", tmp_path / "hf")
        monkeypatch.setattr(sys, "argv", ["generate", "--checkpoint", str(path)])
        with pytest.raises(UserError, match=f"gpt.pth': .*{why}"):
            generate.main()
    assert not (tmp_path / "hf").exists()
