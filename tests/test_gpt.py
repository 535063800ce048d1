"""GPT-2: sizes, FLOPs, the same logits as the published implementation, the key-value cache."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from aura import loop, models, ops, pretrain, sampling
from aura.errors import UserError
from aura.models import blocks, gpt, hrm
from aura.session import Session

TINY = gpt.GPTConfig(vocab_size=101, seq_len=16, n_layer=2, n_head=4, n_embd=32, dropout=0.0)


@pytest.mark.parametrize("name", ["demo", "gpt2"])
def test_parameter_count_equals_the_module(name):
    with torch.device("meta"):
        model = gpt.GPT(gpt.PRESETS[name])
    assert sum(p.numel() for p in model.parameters()) == gpt.PRESETS[name].parameters()


def test_published_sizes():
    published = {"gpt2": (12, 124.4e6), "gpt2-medium": (16, 354.8e6), "gpt2-large": (20, 774.0e6),
                 "gpt2-xl": (25, 1557.6e6)}
    for name, (heads, size) in published.items():  # with GPT-2's own vocabulary
        config = dataclasses.replace(gpt.PRESETS[name], vocab_size=50257)
        assert config.n_head == heads and config.parameters() == pytest.approx(size, rel=1e-3)


def test_flops_equal_the_counter_of_torch():
    model = gpt.GPT(TINY).init_weights(0)
    tokens = torch.zeros(3, TINY.seq_len, dtype=torch.long)
    counter = FlopCounterMode(display=False)
    with ops.using("sdpa"), sdpa_kernel(SDPBackend.MATH), counter:  # it knows torch's operators alone
        model(tokens).sum().backward()
    assert counter.get_total_flops() == TINY.flops_per_token() * tokens.numel()


@pytest.mark.parametrize("implementation", ["auto", "sdpa", "reference"])
def test_logits_equal_transformers(implementation):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=101, n_positions=16, n_embd=32, n_layer=2, n_head=4)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():  # the published initialisation is too small to show a wrong activation or scale
        for parameter in theirs.parameters():
            parameter.mul_(5).add_(0.01)
    weights = {}
    for name, value in theirs.transformer.state_dict().items():
        conv1d = name.endswith("weight") and any(part in name for part in ("c_attn", "c_proj", "c_fc"))
        weights[name] = value.t() if conv1d else value  # Conv1D keeps its matrix transposed
    ours = gpt.GPT(TINY).eval()
    ours.load_state_dict(weights)
    tokens = torch.randint(101, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), ops.using(implementation):
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("implementation", ["auto", "sdpa", "reference"])
def test_the_loss_with_targets_is_the_cross_entropy_of_the_logits(implementation):
    model = gpt.GPT(TINY).init_weights(1)
    tokens = torch.randint(101, (3, 17), generator=torch.Generator().manual_seed(0))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    expected = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    with ops.using(implementation):
        loss = model(inputs, targets)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients, wanted, atol=1e-4, rtol=1e-4)


def gradients_of(model, seed=0, mixed=False):
    """Loss and gradients of one seeded training step."""
    tokens = torch.randint(101, (3, 17), generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    torch.manual_seed(seed)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
        loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("implementation", ["auto", "sdpa", "reference"])
@pytest.mark.parametrize(("again", "attentions"), [("full", 4), ("selective", 2), (True, 4)])
def test_checkpointing_changes_no_bit(again, attentions, implementation, dropout, monkeypatch):
    model = gpt.GPT(dataclasses.replace(TINY, dropout=dropout)).init_weights(1).train()
    calls = []
    monkeypatch.setattr(gpt.Attention, "forward", lambda self, *args, inner=gpt.Attention.forward: (
        calls.append(self), inner(self, *args))[1])
    with ops.using(implementation):
        loss, wanted = gradients_of(model)
        assert len(calls) == 2
        calls.clear()
        model.grad_checkpointing = again
        same, gradients = gradients_of(model)
        assert len(calls) == attentions
        other, _ = gradients_of(model, seed=1)
    assert torch.equal(loss, same) and all(map(torch.equal, gradients, wanted))
    assert (other == loss) == (dropout == 0)


@pytest.mark.parametrize("again", ["full", "selective"])
def test_checkpointing_is_for_training_only(again, monkeypatch):
    model = gpt.GPT(TINY).init_weights(1).eval()
    model.grad_checkpointing = again
    monkeypatch.setattr(blocks, "checkpoint", None)
    assert gradients_of(model)[0].isfinite()
    cache = model.empty_cache()
    with torch.no_grad():
        model.train()(torch.zeros(1, 5, dtype=torch.long), cache=cache)
    assert cache.length == 5


@pytest.mark.parametrize("again", ["full", "selective"])
def test_checkpointing_under_autocast(again):
    model = gpt.GPT(dataclasses.replace(TINY, dropout=0.2)).init_weights(1).train()
    loss, wanted = gradients_of(model, mixed=True)
    model.grad_checkpointing = again
    same, gradients = gradients_of(model, mixed=True)
    assert torch.equal(loss, same) and all(map(torch.equal, gradients, wanted))


@pytest.mark.parametrize("again", ["full", "selective"])
def test_checkpointing_under_ddp(again):
    model = gpt.GPT(dataclasses.replace(TINY, dropout=0.2)).init_weights(1).train()
    _, wanted = gradients_of(model)
    model.grad_checkpointing = again
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        _, gradients = gradients_of(torch.nn.parallel.DistributedDataParallel(model))
    finally:
        torch.distributed.destroy_process_group()
    assert all(map(torch.equal, gradients, wanted))


@pytest.mark.parametrize("again", ["full", "selective"])
def test_checkpointing_under_compile(again):
    model = gpt.GPT(dataclasses.replace(TINY, dropout=0.2)).init_weights(1).train()
    model.grad_checkpointing = again
    wanted_loss, wanted = gradients_of(model)
    loss, gradients = gradients_of(torch.compile(model, backend="aot_eager"))
    torch.testing.assert_close(loss, wanted_loss)
    torch.testing.assert_close(gradients, wanted, atol=1e-4, rtol=1e-4)


def test_initial_weights_follow_the_seed_and_the_paper():
    model = gpt.GPT(gpt.PRESETS["demo"]).init_weights(3)
    again = gpt.GPT(gpt.PRESETS["demo"]).init_weights(3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    for weight in (model.h[0].attn.c_attn.weight, model.wte.weight, model.wpe.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.h[0].mlp.c_proj.weight.std().item() == pytest.approx(0.02 / 8**0.5, rel=0.02)
    assert model.h[0].ln_1.weight.eq(1).all() and model.h[0].attn.c_attn.bias.eq(0).all()


def test_every_branch_every_attention_and_the_embedding_have_their_dropout(monkeypatch):
    seen = {"add_layer_norm": [], "attention_packed": [], "drop": []}
    add, attend = ops.add_layer_norm, ops.attention_packed
    monkeypatch.setattr(ops, "add_layer_norm", lambda *words, dropout, **options: (
        seen["add_layer_norm"].append(dropout), add(*words, dropout=dropout, **options))[1])
    monkeypatch.setattr(ops, "attention_packed", lambda qkv, dropout: (
        seen["attention_packed"].append(dropout), attend(qkv, dropout=dropout))[1])
    model = gpt.GPT(dataclasses.replace(TINY, dropout=0.25)).init_weights(1)
    model.drop.register_forward_hook(lambda drop, *_: seen["drop"].append(drop.p * drop.training))
    for rate in (0.25, 0.0):
        model.train(rate > 0)(torch.zeros(1, 5, dtype=torch.long))
        assert seen == {"add_layer_norm": [rate] * 4, "attention_packed": [rate] * 2, "drop": [rate]}
        for calls in seen.values():
            calls.clear()


def test_cached_logits_equal_uncached():
    model = gpt.GPT(TINY).init_weights(1).eval()
    tokens = torch.randint(101, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model(tokens)
        cache = model.empty_cache()
        parts = [model(tokens[:, :5], cache=cache)] + [model(tokens[:, i:i + 1], cache=cache) for i in range(5, 12)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-5)


def test_a_token_never_sees_the_future():
    model = gpt.GPT(TINY).init_weights(1).eval()
    a = torch.randint(101, (1, 12), generator=torch.Generator().manual_seed(0))
    b = a.clone()
    b[0, 8] = (a[0, 8] + 1) % 101
    with torch.no_grad():
        difference = (model(a) - model(b)).abs().amax(-1)[0]
    assert difference[:8].max() == 0 and difference[8:].min() > 0


def test_heads_must_divide_the_width():
    with pytest.raises(UserError, match="n-embd 30"):
        gpt.GPT(dataclasses.replace(TINY, n_embd=30))


def test_generation_is_seeded_goes_past_the_context_and_keeps_the_mode():
    model = gpt.GPT(TINY).init_weights(1).train()
    first = list(sampling.generate(model, [1, 2, 3], 40, seed=5, top_k=20, top_p=0.9))
    assert first == list(sampling.generate(model, [1, 2, 3], 40, seed=5, top_k=20, top_p=0.9))
    assert first != list(sampling.generate(model, [1, 2, 3], 40, seed=6, top_k=20, top_p=0.9))
    assert len(first) == 40 and model.training
    cut = sampling.generate(model, [1, 2, 3], 40, seed=5, top_k=20, top_p=0.9, eos_id=first[3])
    assert list(cut) == first[:3]
    asked = iter([False, False, True])
    cut = list(sampling.generate(model, [1, 2, 3], 40, seed=5, top_k=20, top_p=0.9, stopped=lambda: next(asked)))
    assert cut == first[:2] and model.training
    assert max(sampling.generate(model, [1, 2, 3], 40, pieces=5)) == 4, "the tokenizer has no more"


def test_a_validation_is_without_dropout_and_counts_the_bytes_of_what_is_predicted():
    model = gpt.GPT(dataclasses.replace(TINY, dropout=0.5)).init_weights(1).train()
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(101, (rows, 9), generator=generator) for rows in (3, 1)]
    letters = SimpleNamespace(token_bytes=lambda: np.arange(101), vocab_size=101)  # a token is its own size

    def summed(model, batch):
        return model(batch[:, :-1], targets=batch[:, 1:]), batch[:, 1:].numel()

    evaluate = pretrain.make_evaluate(model, summed, lambda: iter(batches), letters, Session(),
                                      loop.Precision("fp32", torch.device("cpu")))
    found, predicted = evaluate(None), [batch[:, 1:] for batch in batches]
    logits = [model.eval()(batch[:, :-1]).flatten(0, 1) for batch in batches]
    nats = sum(F.cross_entropy(each, ids.flatten(), reduction="sum").item()
               for each, ids in zip(logits, predicted, strict=True))
    assert found["val_loss"] == pytest.approx(nats / 32)
    size = sum(ids.sum().item() for ids in predicted)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / size)
    other = Session()  # with another rank, which has measured 8 tokens of 100 bytes
    other.sum = lambda own: [a + b for a, b in zip(own, (10.0, 8, 100), strict=True)] if len(own) == 3 else own
    evaluate = pretrain.make_evaluate(model, summed, lambda: iter(batches), letters, other,
                                      loop.Precision("fp32", torch.device("cpu")))
    assert evaluate(None) == {"val_loss": pytest.approx((nats + 10) / 40),
                              "bits_per_byte": pytest.approx((nats + 10) / math.log(2) / (size + 100))}


@pytest.mark.parametrize("count, made", [(32, False), (33, True)])
def test_a_validation_that_is_no_sequence_is_told_and_not_made(monkeypatch, capsys, count, made):
    monkeypatch.setattr(pretrain.tokens, "TokenLoader", lambda *_, **__: SimpleNamespace(windows=9, steps_per_epoch=3))
    data = SimpleNamespace(hold=lambda: None, shards=lambda part: [], vocab_size=9, tokens=lambda part: count)
    args = SimpleNamespace(seq_len=32, batch_size=2, grad_accum=1, seed=1)
    validation = pretrain.make_loaders(args, Session(), data)[1]
    assert (validation is not None) == made == ("no habrá pérdida de validación" not in capsys.readouterr().out)


def test_a_stop_cuts_a_sample_short():
    model, told, request = gpt.GPT(TINY).init_weights(1), [], SimpleNamespace(number=0)
    letters = SimpleNamespace(encode=lambda text: [1], decode=lambda ids: "x" * len(ids), eos_id=None, vocab_size=None)
    sample = pretrain.make_sample(SimpleNamespace(sample_prompt="", sample_length=9, seed=1), Session(), model, letters,
                                  SimpleNamespace(sample=lambda step, text: told.append(len(text))), None)
    for request.number in (0, 15):
        sample(1, request)
    assert told == [9, 0]


def test_generation_sees_the_end_of_a_prompt_longer_than_the_context():
    model, seen = gpt.GPT(TINY).init_weights(1), []
    model.register_forward_pre_hook(lambda _, given: seen.append(given[0].tolist()[0]))
    written = list(sampling.generate(model, list(range(50)), 5, temperature=0))
    assert len(written) == 5 and seen[0] == list(range(50))[-TINY.seq_len:]
    assert seen[1] == [*range(50), written[0]][-(TINY.seq_len // 2):], "then the older half goes"


def test_choices():
    logits = torch.tensor([1.0, 3.0, 2.0, -5.0])
    generator = torch.Generator().manual_seed(0)
    assert sampling.choose(logits, generator, temperature=0) == 1
    assert {sampling.choose(100 * logits, generator, temperature=1e-300) for _ in range(9)} == {1}
    assert {sampling.choose(logits, generator, top_k=2) for _ in range(60)} == {1, 2}
    assert {sampling.choose(torch.tensor([-torch.inf, 0.0]), generator) for _ in range(9)} == {1}
    for bad in (torch.nan, torch.inf):
        for temperature in (0, 1):
            with pytest.raises(UserError, match="no son números finitos"):
                sampling.choose(torch.tensor([0.0, bad, 1.0]), generator, temperature=temperature)
    for top_p in (0.1, 1e-300):
        assert {sampling.choose(logits, generator, top_p=top_p) for _ in range(60)} == {1}
    assert {sampling.choose(logits, generator, top_k=9) for _ in range(300)} >= {0, 1, 2}
    half = torch.tensor([0.3, 0.5, 0.2]).log()
    assert {sampling.choose(half, generator, top_p=0.6) for _ in range(60)} == {0, 1}, "with the one that reaches it"
    assert len({sampling.choose(torch.zeros(2), generator, top_p=0.5) for _ in range(60)}) == 1, "and no more"


@pytest.mark.parametrize("config", [TINY, hrm.HRMConfig(40, 16, 1, 2, 16, 16, segments=2)], ids=["gpt", "hrm"])
def test_the_weights_of_a_file_are_there_once_and_as_float32(config):
    made = models.build(config).init_weights(3)
    weights = made.state_dict()
    filled = models.filled(config, weights, "cpu")
    for name, value in filled.state_dict().items():
        assert value.data_ptr() == weights[name].data_ptr() and not value.is_meta
    assert all(parameter.requires_grad for parameter in filled.parameters())
    half = models.filled(config, {name: value.bfloat16() for name, value in weights.items()}, "cpu")
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert half.wte.weight.dtype == torch.float32
        torch.testing.assert_close(half.eval()(tokens), made.eval()(tokens), atol=0.1, rtol=0.1)
    with pytest.raises(RuntimeError, match="Missing key"):
        models.filled(config, dict(list(weights.items())[1:]), "cpu")
