"""Blocks under torch.compile: how many graphs they are, their gradients, and what of a model does not change."""

import functools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from aura import ops
from aura.models import bert, gpt, hrm

DEEP = 10  # more blocks than dynamo would compile one after another, 8


def gpt_and_batches():
    model = gpt.GPT(gpt.GPTConfig(vocab_size=101, seq_len=24, n_layer=DEEP, n_head=2, n_embd=32, dropout=0.0))
    return model, [(tokens[:, :-1], tokens[:, 1:]) for tokens in random_tokens(17)]


def bert_and_batches():
    """Batches are of many lengths."""
    config = bert.BertConfig(vocab_size=101, seq_len=40, n_layer=DEEP, n_head=2, n_embd=32, n_ff=48, dropout=0.0,
                             attention_dropout=0.0)
    lengths, positions = torch.tensor([12, 5, 9]), torch.tensor([[1, 2], [0, 4], [3, 3]])
    return bert.QuestionAnswering(config), [(tokens, tokens * 0, lengths, positions)
                                            for tokens in (*random_tokens(17), *random_tokens(13))]


def hrm_and_batches():
    model = hrm.HRM(hrm.HRMConfig(vocab_size=101, seq_len=24, n_layer=DEEP, n_head=2, n_embd=32, n_ff=48))
    return model, [(tokens[:, :-1], tokens[:, 1:]) for tokens in random_tokens(17)]


def hrm_and_documents():
    model, batches = hrm_and_batches()
    return model, [(*batch, None, torch.tensor(bounds)) for batch, bounds in zip(
        batches, ([0, 5, 16, 32, 48], [0, 16, 20, 25, 32, 48]), strict=True)]


def random_tokens(length):
    return [torch.randint(101, (3, length), generator=torch.Generator().manual_seed(seed)) for seed in range(2)]


def gradients_of(model, batches):
    model.zero_grad()
    for batch in batches:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(*batch)
        loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.fixture
def counter(monkeypatch):
    """Counts graphs; what they hold runs as torch would run it without a compiler."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    return counter


# The first block's input is float32, and an HRM has passes without gradients and others with those of one input alone.
@pytest.mark.parametrize(("make", "graphs", "again", "choice"), [
    (gpt_and_batches, 2, False, "sdpa"), (gpt_and_batches, 2, False, "auto"), (gpt_and_batches, 2, "full", "auto"),
    (gpt_and_batches, 2, "selective", "sdpa"), (gpt_and_batches, 2, "selective", "auto"),
    (bert_and_batches, 3, False, "auto"), (bert_and_batches, 3, True, "sdpa"), (bert_and_batches, 3, True, "auto"),
    (hrm_and_batches, 7, False, "auto"), (hrm_and_batches, 7, True, "sdpa"), (hrm_and_documents, 7, False, "sdpa"),
    (hrm_and_documents, 7, True, "auto")])
def test_blocks_share_their_graphs(counter, make, graphs, again, choice):
    model, batches = make()
    model.init_weights(1).train()
    getattr(model, "bert", model).grad_checkpointing = again
    names = list(model.state_dict())
    with ops.using(choice):
        wanted = gradients_of(model, batches)
        compiled = model.compiled()
        found = gradients_of(compiled, batches)
    worst = max((found[name] - wanted[name]).norm() / wanted[name].norm() for name in names if name in wanted)
    assert worst < 5e-3  # of an HRM; the autocast of others is the same to the last bit
    assert counter.frame_count == graphs and list(compiled.state_dict()) == names


@pytest.mark.parametrize("make", [gpt_and_batches, bert_and_batches, hrm_and_batches, hrm_and_documents])
def test_only_training_is_compiled(counter, make):
    model, ((tokens, *rest), *_) = make()
    compiled = model.init_weights(1).compiled().eval()
    with torch.no_grad():
        compiled(tokens, *rest)
        if hasattr(model, "empty_cache"):
            compiled(tokens[:1, :3], cache=compiled.empty_cache())
            compiled.train()(tokens[:1, :3], cache=compiled.empty_cache())
    assert counter.frame_count == 0
