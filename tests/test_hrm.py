"""HRM-Text1: sizes, FLOPs, causality, which passes gradients flow through, halting, the key-value cache."""

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from aura import ops, sampling
from aura.errors import UserError
from aura.models import hrm

TINY = hrm.HRMConfig(vocab_size=101, seq_len=24, n_layer=2, n_head=2, n_embd=32, n_ff=48)
VARIANTS = [dataclasses.replace(TINY, segments=segments, reinject=reinject)
            for segments, reinject in itertools.product((1, 3), (False, True))]
VARIANTS.append(dataclasses.replace(TINY, exit_weights=False))


def tokens_of(batch=2, length=24, seed=0):
    return torch.randint(101, (batch, length), generator=torch.Generator().manual_seed(seed))


def build(config, seed=1):
    return hrm.HRM(config).init_weights(seed)


def gradients_of(model, mixed=False):
    tokens = tokens_of(3)
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
        loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return loss, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("name", "size"), [("100m", 101.3e6), ("1b", 993e6), ("demo", 5.77e6)])
def test_sizes(name, size):
    with torch.device("meta"):
        model = hrm.HRM(hrm.PRESETS[name])
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == hrm.PRESETS[name].parameters() == pytest.approx(size, rel=1e-3)
    for config in VARIANTS:
        assert config.parameters() == sum(parameter.numel() for parameter in build(config).parameters())


def test_initial_weights_follow_the_seed_and_the_paper():
    model = build(dataclasses.replace(hrm.PRESETS["demo"], segments=2, exit_weights=True))
    again = build(model.config)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    for name, weight in model.named_parameters():
        if name.startswith("halt"):
            assert weight.eq(0).all(), "a token has then an even chance to stop"
        elif weight.dim() == 1:
            assert weight.eq(1).all(), name
        else:
            deviations = weight * weight.shape[1] ** 0.5
            assert deviations.std().item() == pytest.approx(1.0, rel=0.01), name
            assert 2.2 < deviations.abs().max() < 2.2738, name  # cut at two deviations of what 0.8796 is left of
    assert model.start.std().item() == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize("config", VARIANTS)
@pytest.mark.parametrize("passes", [2, 3, 5, 8, 20])
def test_flops_equal_the_counter_of_torch(config, passes):
    model = build(config)
    model.bp_passes = passes
    tokens = tokens_of(3, 25)
    counter = FlopCounterMode(display=False)
    with ops.using("sdpa"), sdpa_kernel(SDPBackend.MATH), counter:  # it knows torch's operators alone
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    assert counter.get_total_flops() == config.flops_per_token(passes) * 3 * 24


@pytest.mark.parametrize("config", VARIANTS)
@pytest.mark.parametrize("implementation", ["auto", "reference"])
@pytest.mark.parametrize("training", [True, False])
def test_no_token_sees_the_future(config, implementation, training):
    model = build(config).train(training)
    model.grad_checkpointing = True
    tokens = tokens_of()
    with ops.using(implementation):
        before = model(tokens)
        for place in (1, 9, 23):
            changed = tokens.clone()
            changed[:, place] = (changed[:, place] + 1) % 101
            after = model(changed)
            assert torch.equal(after[:, :place], before[:, :place])
            assert not torch.equal(after[:, place:], before[:, place:])


@pytest.mark.parametrize("implementation", ["auto", "sdpa"])
def test_no_token_sees_another_document(implementation):
    model, tokens = build(VARIANTS[2]), tokens_of()
    bounds = torch.tensor([0, 10, 24, 30, 48])
    changed = tokens.clone()
    changed[0, :10] = (changed[0, :10] + 1) % 101
    with ops.using(implementation):
        before, after = model(tokens, cu_seqlens=bounds), model(changed, cu_seqlens=bounds)
        alone = model(tokens[:, 10:])  # rotary positions are relative
    assert torch.equal(after[0, 10:], before[0, 10:]) and torch.equal(after[1], before[1])
    torch.testing.assert_close(before[0, 10:], alone[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("config", VARIANTS)
@pytest.mark.parametrize("passes", [2, 3, 4, 5, 8, 11])
def test_gradients_flow_through_the_last_passes_only(config, passes):
    model = build(config)
    model.bp_passes = passes
    outputs = []

    def remember(_, __, output):
        if output.requires_grad:
            output.retain_grad()
        outputs.append(output)

    for stack in (model.l, model.h):
        stack.register_forward_hook(remember)
    gradients = gradients_of(model)[1]
    assert len(outputs) == config.segments * config.passes
    for number, output in enumerate(outputs):
        counts = number % config.passes >= config.passes - passes
        assert output.requires_grad == counts
        assert not counts or output.grad.abs().max() > 0
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in gradients.values())


@pytest.mark.parametrize(("h_cycles", "l_cycles", "reinject", "learns"), [
    (2, 3, False, True), (2, 4, False, False), (2, 4, True, True), (3, 1, False, True), (3, 2, False, False),
    (1, 9, False, True), (4, 1, False, False), (3, 3, True, True)])
def test_whether_the_text_learns_as_an_input_is_known_beforehand(h_cycles, l_cycles, reinject, learns):
    """The weights of its embedding have a gradient as those of the head in any case."""
    config = dataclasses.replace(TINY, h_cycles=h_cycles, l_cycles=l_cycles, reinject=reinject)
    model, embedded = build(config), []
    model.wte.register_forward_hook(lambda _, __, output: embedded.append(output.retain_grad() or output) or None)
    gradients_of(model)
    assert (embedded[0].grad is not None and embedded[0].grad.abs().max() > 0) == learns == config.input_learns


def test_no_gradient_flows_from_one_segment_into_the_one_before():
    model = build(VARIANTS[2])
    model.bp_passes = 20
    read = []
    model.l.register_forward_pre_hook(lambda _, given: read.append(given[1]))
    first, second, _ = model.states(tokens_of())
    first.retain_grad()
    second.sum().backward()
    assert first.grad is None and model.l.blocks[0].attn.out.weight.grad.abs().max() > 0
    begun = read[TINY.h_cycles * TINY.l_cycles]  # with what the one before has found, and with the text again
    torch.testing.assert_close(begun, first + model.wte(tokens_of()) * 32**0.5)


def test_attention_turns_queries_and_keys_by_their_positions_and_gates_the_result():
    model = build(dataclasses.replace(TINY, rope_theta=500.0)).double()
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    layer = model.l.blocks[0].attn
    gate, q, k, v = layer.gqkv(x).view(2, 9, 4, 2, 16).permute(2, 0, 3, 1, 4)
    turns = torch.polar(torch.ones(9, 8, dtype=torch.float64), torch.arange(9.0, dtype=torch.float64)[:, None]
                        / 500 ** (torch.arange(0, 16, 2, dtype=torch.float64) / 16))
    q, k = (torch.complex(*part.chunk(2, -1)) * turns for part in (q, k))
    scores = (q @ k.conj().transpose(-1, -2)).real / 4
    weights = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf).softmax(-1)
    expected = layer.out((gate.sigmoid() * (weights @ v)).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, model._rotation(0, 9, "cpu"), None, 0, None), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("passes", "without", "with_gradients"), [(3, "lllhl", "llh"), (5, "lll", "hlllh")])
def test_truncated_gradients_are_those_of_the_passes_alone(passes, without, with_gradients):
    model = build(TINY).double()
    model.bp_passes = passes
    inputs = tokens_of(3)
    loss, found = gradients_of(model)
    embedded, rotation = model.wte(inputs[:, :-1]) * 32**0.5, model._rotation(0, 23, "cpu")
    states = {"h": embedded, "l": model.start.expand_as(embedded)}
    for names, grad in ((without, False), (with_gradients, True)):
        for name in names:
            with torch.set_grad_enabled(grad):
                states[name] = getattr(model, name)(states[name], states["l" if name == "h" else "h"], rotation)
    logits = states["h"] @ model.wte.weight.t()
    expected = F.cross_entropy(logits.flatten(0, 1), inputs[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected)
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    torch.testing.assert_close(tuple(found.values()), wanted)


@pytest.mark.parametrize("config", VARIANTS)
def test_mixed_precision_reaches_every_weight(config):
    """Weights that autocast has cast without gradients must not be taken again for the passes that have them."""
    model = build(config)
    exact, mixed = gradients_of(model)[1], gradients_of(model, mixed=True)[1]
    for name, gradient in exact.items():
        assert F.cosine_similarity(gradient.flatten(), mixed[name].flatten(), 0) > 0.98, name
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(state.dtype == torch.float32 for state in model.states(tokens_of())), "to which others are added"


def test_recomputed_blocks_give_the_same_gradients():
    model = build(VARIANTS[3])
    plain = gradients_of(model)
    model.grad_checkpointing = True
    again = gradients_of(model)
    assert torch.equal(plain[0], again[0])
    for name, gradient in plain[1].items():
        assert torch.equal(gradient, again[1][name]), name


def test_ponder_loss_is_what_halting_costs_and_reaches_the_head_alone():
    config = dataclasses.replace(TINY, segments=3, ponder_price=0.3)
    model = build(config).double()
    torch.nn.init.normal_(model.halt.weight, generator=torch.Generator().manual_seed(0))
    tokens = tokens_of(3)
    tokens, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[:, :3] = -100  # no loss, and so no price
    losses, left, ponder = [], 1.0, 0.0
    for number, z_h in enumerate(model.states(tokens), 1):
        rows = F.cross_entropy((z_h @ model.wte.weight.t()).flatten(0, 1), targets.flatten(), reduction="none")
        stopping = (z_h.detach() @ model.halt.weight.t() + model.halt.bias).sigmoid().flatten() if number < 3 else 1.0
        losses.append(rows.sum())
        ponder = ponder + (left * stopping * (rows.detach() + 0.3 * number * (targets.flatten() >= 0))).sum()
        left = left * (1 - stopping)
    expected = torch.autograd.grad(sum(losses) / 3 + ponder, list(model.parameters()))
    loss = model(tokens, targets)
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close(loss, losses[-1].detach().to(loss.dtype))  # what is reported is comparable
    torch.testing.assert_close(tuple(found.values()), expected, atol=1e-5, rtol=1e-5)  # the head's is in float32
    assert found["halt.weight"].abs().max() > 1e-3


@pytest.mark.parametrize("config", VARIANTS)
def test_cached_logits_equal_uncached_and_are_those_of_the_loss(config):
    model = build(config).eval()
    tokens = tokens_of(1, 12)
    with torch.no_grad():
        if model.head_weight is not None:
            model.head_weight.copy_(torch.linspace(-1.0, 2.0, 32))
        whole, cache = model(tokens), model.empty_cache()
        expected = F.cross_entropy(whole[0, :-1], tokens[0, 1:], reduction="sum")
        torch.testing.assert_close(model(tokens[:, :-1], tokens[:, 1:]), expected)
        parts = [model(tokens[:, :5], cache=cache)] + [model(tokens[:, i:i + 1], cache=cache) for i in range(5, 12)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-5)


def logits_one_by_one(model, tokens):
    cache = model.empty_cache()
    with torch.no_grad():
        return torch.cat([model(tokens[:, i:i + 1], cache=cache) for i in range(tokens.shape[1])], 1)


def test_early_exit_runs_no_more_segments_than_asked_for():
    model, tokens = build(dataclasses.replace(TINY, segments=3)).eval(), tokens_of(2, 6)
    everything = logits_one_by_one(model, tokens)
    model.early_exit = True
    calls = []
    model.h.register_forward_hook(lambda *_: calls.append(1))
    for bias, segments in ((-5.0, 3), (-0.5, 2), (0.5, 1), (5.0, 1)):
        model.halt.bias.data.fill_(bias)
        calls.clear()
        found = logits_one_by_one(model, tokens)
        assert len(calls) == 6 * TINY.h_cycles * segments
    torch.testing.assert_close(found, logits_one_by_one(one_segment(model), tokens))
    model.halt.bias.data.fill_(-5.0)
    torch.testing.assert_close(logits_one_by_one(model, tokens), everything)


def one_segment(model):
    alone = hrm.HRM(dataclasses.replace(model.config, segments=1)).eval()
    alone.load_state_dict({name: value for name, value in model.state_dict().items() if not name.startswith("halt")})
    return alone


def test_halting_does_not_depend_on_the_rest_of_the_batch():
    model, tokens = build(dataclasses.replace(TINY, segments=3)).eval(), tokens_of(6, 12)
    torch.nn.init.normal_(model.halt.weight, generator=torch.Generator().manual_seed(0))
    model.early_exit = True
    together = logits_one_by_one(model, tokens)
    for row in range(6):
        torch.testing.assert_close(together[row:row + 1], logits_one_by_one(model, tokens[row:row + 1]), atol=1e-5,
                                   rtol=1e-5)


def test_backward_passes_rise_over_the_first_fifth():
    assert [hrm.bp_passes(step, 100) for step in (0, 6, 7, 13, 14, 19, 20, 99)] == [2, 2, 3, 3, 4, 4, 5, 5]
    assert hrm.bp_passes(0, 1) == 2


def test_all_ways_of_carrying_it_out_agree():
    model = build(VARIANTS[3])
    results = []
    for choice in ("auto", "sdpa", "reference"):
        with ops.using(choice):
            results.append(gradients_of(model))
    for loss, gradients in results[1:]:
        torch.testing.assert_close(loss, results[0][0])
        torch.testing.assert_close(gradients, results[0][1], atol=1e-4, rtol=1e-4)


def test_generation():
    model = build(TINY)
    ids = list(sampling.generate(model, [1, 2, 3], 40, temperature=0))
    assert len(ids) == 40 and ids == list(sampling.generate(model, [1, 2, 3], 40, temperature=0)) and model.training


def test_a_width_that_does_not_fit():
    with pytest.raises(UserError, match="--n-embd 30 .* --n-embd 32"):
        hrm.HRM(dataclasses.replace(TINY, n_embd=30))
