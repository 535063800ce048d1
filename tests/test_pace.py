"""--sync auto: the estimate against figures worked out by hand, the choice and its two lines, the measurement, which
leaves nothing behind, and two real machines."""

from types import SimpleNamespace

import pytest
import torch

from aura import allreduce, pace
from aura.errors import TrainingFault
from aura.loop import Precision
from aura.models import bert, gpt
from aura.pace import Pace
from aura.session import Session
from aura.sync import METHODS

MBIT = 1e6 / 8
FOURTEEN_MILLION = [4_000_000, 100_000, *[1_000_000] * 10]  # elements: gradients of 56 MB


def link(rate, latency=0.0):
    """The curve of a link of `rate` bytes/s."""
    return [(size, latency + size / rate) for size in allreduce.SIZES]


def pace_of(compute_s, backward_s=0.0, own_s=None, **more):
    own_s = own_s or [compute_s, compute_s]
    return Pace(compute_s, backward_s, own_s, tokens=[1000.0] * len(own_s), **more)


# ---- The estimate ---------------------------------------------------------------------------------------------------

def test_a_step_of_each_method_takes_what_one_works_out_by_hand():
    curve, parameters = link(1e6), [2_000_000]  # one bucket of 8 MB, 8 s on the network
    seconds = pace.estimate(curve, parameters, pace_of(1.0), every=100)
    small = 1024 / 1e6  # of the sum that ends the step
    assert seconds["ddp"] == pytest.approx(1 + 8 + small)
    assert seconds["fp16"] == pytest.approx(1 + 4 + small)
    assert seconds["diloco"] == 1.0  # 12.5 steps hide 0.25 s
    fast = pace.estimate(curve, parameters, pace_of(0.01), every=100)
    # A fragment: 250,000 bytes and 4 more for each 1024.
    assert fast["diloco"] == pytest.approx(0.01 + (0.250_000 * (1 + 4 / 1024) - 12.5 * 0.01) / 12.5)
    halving = pace.estimate(curve, parameters, pace_of(1.0, halving_s=0.5), every=100)
    assert halving == {**seconds, "fp16": pytest.approx(1.5 + 4 + small)}
    far = pace.estimate(link(1e6, latency=0.3), parameters, pace_of(0.01), every=2)  # two fragments, one a step
    assert far["diloco"] == pytest.approx(0.01 + 0.3 + 1.0 * (1 + 4 / 1024) - 0.01)


def test_backward_hides_what_leaves_before_it_ends():
    curve, ready = link(1e7), (1.0, 0.5)
    parameters = [500_000, 10_000_000]  # 2 MB that are complete last, 40 MB in the middle of backward
    seconds = pace.estimate(curve, parameters, pace_of(30.0, 20.0, ready=ready), 100)
    small = 1024 / 1e7
    assert seconds["ddp"] == pytest.approx(30 + 0.2 + small) and seconds["fp16"] == pytest.approx(30 + 0.1 + small)
    seconds = pace.estimate(curve, parameters, pace_of(3.0, 2.0, ready=ready), 100)
    assert seconds["ddp"] == pytest.approx(1 + 1 + 4 + 0.2 + small)
    assert seconds["fp16"] == pytest.approx(1 + 1 + 2 + 0.1 + small)
    rows = pace.estimate(curve, parameters, pace_of(3.0, 2.0, ready=ready, by_rows=(1,)), 100)
    assert rows["ddp"] == pytest.approx(3 + 0.2 + small) and rows["fp16"] == seconds["fp16"]


def test_buckets_leave_in_the_order_in_which_gradients_are_complete():
    large = 10_000_000  # elements: more than a bucket
    assert allreduce.buckets([(large, 0.9), (5, 0.2), (large, 0.4), (large + 1, 0.4)]) == [
        (4 * (large + 6), 0.4), (4 * large, 0.4), (4 * large, 0.9)]
    assert allreduce.in_turn([1, 3, 4]) == [(1, 1.0), (3, 7 / 8), (4, 0.5)]


# ---- The choice -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("every", [1, 10, 100])
@pytest.mark.parametrize("compute_s", [0.05, 1.5, 40.0])
def test_a_slower_link_never_makes_a_more_exact_method_better(compute_s, every):
    step = pace_of(compute_s, compute_s / 2)
    chosen = [METHODS.index(pace.choose(pace.estimate(link(10 ** (exponent / 8)), FOURTEEN_MILLION, step, every)))
              for exponent in range(104, 30, -1)]
    assert chosen == sorted(chosen) and chosen[0] == METHODS.index("ddp")


@pytest.mark.parametrize(("rate", "name"), [(1e15, "ddp"), (10 * MBIT, "diloco"), (50 * MBIT, "diloco")])
def test_what_is_beyond_doubt(rate, name):
    assert pace.choose(pace.estimate(link(rate), FOURTEEN_MILLION, pace_of(1.5, 1.0), 100)) == name


@pytest.mark.parametrize(("seconds", "name"), [
    ((1.0, 1.0, 1.0), "ddp"), ((1.049, 1.0, 1.0), "ddp"), ((1.051, 1.049, 1.0), "fp16"),
    ((1.1, 1.051, 1.0), "diloco"), ((1.0, 2.0, 3.0), "ddp"), ((1.5, 1.0, 1.1), "fp16"),
])
def test_of_methods_that_are_about_as_fast_the_most_exact_is_taken(seconds, name):
    assert pace.choose(dict(zip(METHODS, seconds, strict=True))) == name


# ---- The two lines --------------------------------------------------------------------------------------------------

def told(rate, step, machines=("a", "b"), **more):
    curve = link(rate, 1e-3)
    seconds = pace.estimate(curve, FOURTEEN_MILLION, step, 100)
    return pace.lines(curve, FOURTEEN_MILLION, step, seconds, machines, **more)


def test_the_lines_say_what_was_found_what_is_chosen_and_why():
    network, choice = told(50 * MBIT, pace_of(1.5, 1.0))
    assert network == "Red: 50 Mbit/s, 1.2 ms; un paso: 1.50 s de cálculo; los gradientes pesan 56 MB."
    # 56.4 MB take 9.02 s at 50 Mbit/s, of which the second of backward hides what leaves before it ends.
    assert choice.startswith("--sync auto elige diloco (1333 tokens/s previstos; ddp ")
    assert choice.endswith("667): por esta red los gradientes enteros tardarían 9.03 s en cada paso.")
    network, choice = told(50 * MBIT, pace_of(1.5, 1.0, by_rows=(0,)))
    assert network.endswith("los gradientes pesan 56 MB, y 16 de ellos, con ddp, viajan solo por filas.")
    assert choice.endswith("por esta red los que viajan enteros tardarían 6.47 s en cada paso."), "16 MB less"
    choice = told(1e12, pace_of(1.0, 0.5), unit="muestras")[1]
    assert choice == ("--sync auto elige ddp (1996 muestras/s previstos; fp16 1996, diloco 2000, una sola máquina "
                      "1000): es exacto, y ninguno de los otros iría más de un 5 % más rápido.")


def test_a_machine_that_is_faster_without_the_others_is_told():
    slow_partner = pace_of(3.1, 2.0, [1.0, 3.1])
    assert told(50 * MBIT, slow_partner)[1].endswith(" Aviso: una sola máquina, sin las demás, iría más rápido.")
    alike = " Aviso: una sola máquina, sin las demás, iría casi igual de rápido."
    for seconds in (1.92, 1.99, 2.01, 2.09):  # of both together, who do twice the work
        assert told(1e12, pace_of(seconds, 1.0, [1.0, seconds]))[1].endswith(alike), seconds
    assert "Aviso" not in told(1e12, pace_of(1.88, 1.0, [1.0, 1.88]))[1]
    # Two cards in one machine are left together, each as fast as the slower of them.
    assert "una sola máquina 1000)" in told(50 * MBIT, pace_of(2.0, 1.0, [1.0, 2.0, 2.0]), ("a", "a", "b"))[1]


# ---- The measurement ------------------------------------------------------------------------------------------------

def small_gpt(dropout=0.1):
    module = gpt.GPT(gpt.GPTConfig(vocab_size=512, seq_len=32, n_layer=3, n_head=2, n_embd=64, dropout=dropout))
    return module.init_weights(1), torch.randint(0, 512, (4, 33))


def summed_loss(model, batch):
    return model(batch[:, :-1], targets=batch[:, 1:]), batch[:, 1:].numel()


def measured(module, batch, loss_fn=summed_loss, grad_accum=1, precision="fp32", **more):
    cpu = torch.device("cpu")
    return pace.measure(Session(), module, loss_fn, batch, Precision(precision, cpu), grad_accum, **more)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_measuring_leaves_nothing_behind(precision):
    module, batch = small_gpt()
    module.h[1].eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    state, modes = torch.get_rng_state(), [part.training for part in module.modules()]
    measured(module, batch, precision=precision, most_seconds=0.1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert [part.training for part in module.modules()] == modes and not module.h[1].training and module.training
    assert all(parameter.grad is None and not parameter._post_accumulate_grad_hooks
               for parameter in module.parameters())


def test_a_pass_that_fails_leaves_no_hooks_and_the_modes_as_they_were():
    module, batch = small_gpt()
    module.eval()

    def failing(model, batch):
        assert model.training and model.h[0].training  # dropout and all that training does
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        measured(module, batch, failing)
    assert not any(part.training for part in module.modules())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in module.parameters())


def test_time_is_bounded_and_the_first_pass_does_not_count(monkeypatch):
    now, calls = [0.0], []
    monkeypatch.setattr(pace.time, "perf_counter", lambda: now[0])

    def slow(model, batch):
        calls.append(len(calls))
        now[0] += 100.0 if len(calls) == 1 else 3.0
        return summed_loss(model, batch)

    module, batch = small_gpt()
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss: now.__setitem__(0, now[0] + 7.0))
    found = measured(module, batch, slow, grad_accum=4, most_seconds=25.0)
    assert len(calls) == 1 + 2  # 10 s each, of which the warm-up takes more
    assert (found.compute_s, found.backward_s, found.own_s, found.tokens) == (40.0, 7.0, [40.0], [4 * 128.0])
    calls.clear()
    measured(module, batch, slow, most_seconds=0.0)
    assert len(calls) == 2
    calls.clear()
    measured(module, batch, slow, most_seconds=1e9)
    assert len(calls) == 1 + pace.REPETITIONS


def test_a_step_ends_with_the_optimiser_timed_on_a_part_of_the_weights(monkeypatch):
    now, updated = [0.0], []
    monkeypatch.setattr(pace.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(pace, "TIMED_ELEMENTS", 1000)

    def step(optimizer):
        updated.append(sum(weights.numel() for group in optimizer.param_groups for weights in group["params"]))
        now[0] += 2.0

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss: now.__setitem__(0, now[0] + 7.0))
    module, batch = small_gpt()
    found = measured(module, batch, grad_accum=4)
    assert set(updated) == {1000}
    assert found.compute_s == pytest.approx(28 + 2.0 * sum(weights.numel() for weights in module.parameters()) / 1000)
    assert (found.backward_s, found.own_s) == (7.0, [found.compute_s])


def test_gradients_are_complete_in_the_order_in_which_backward_comes_by():
    module, batch = small_gpt(dropout=0.0)
    ready = dict(zip((name for name, _ in module.named_parameters()), measured(module, batch).ready, strict=True))
    assert 0 < ready["ln_f.weight"] < ready["h.2.mlp.c_proj.weight"] < ready["h.2.attn.c_attn.weight"]
    assert ready["h.2.ln_1.weight"] < ready["h.1.mlp.c_fc.weight"] < ready["h.0.attn.c_attn.weight"]
    assert ready["h.0.attn.c_attn.weight"] < ready["wte.weight"] == max(ready.values()) <= 1


def test_the_slowest_rank_sets_the_pace(monkeypatch):
    dist, own = Session(), []
    monkeypatch.setattr(dist, "gather_objects", lambda here: own.extend(here) or [
        here, (3 * here[0], 2 * here[1], here[2], 5 * here[3], here[4])])
    module, batch = small_gpt()
    found = pace.measure(dist, module, summed_loss, batch, Precision("fp32", dist.device), 1, 0.0)
    assert (found.compute_s, found.backward_s, found.halving_s) == (3 * own[0], 2 * own[1], 5 * own[3])


def test_parameters_that_travel_by_rows_are_known_by_their_numbers():
    config = bert.BertConfig(400, 16, 1, 2, 32, 48, dropout=0.0, attention_dropout=0.0)
    module = bert.QuestionAnswering(config).init_weights(1)
    tokens = torch.randint(0, 400, (2, 9))

    def answers(model, batch):
        return model(batch, batch * 0, torch.tensor([9, 4]), torch.tensor([[1, 2], [0, 3]])), len(batch)

    found = measured(module, tokens, answers, most_seconds=0.0)
    names = [name for name, _ in module.named_parameters()]
    assert [names[number] for number in found.by_rows] == ["bert.tokens.weight"]


def test_no_gradient_travels_by_rows_where_one_rank_has_a_card():
    """There all of it is DistributedDataParallel's, and ranks that exchange differently wait for each other."""
    module = bert.QuestionAnswering(bert.BertConfig(400, 16, 1, 2, 32, 48))
    for devices, count in (([], 1), (["cpu"] * 3, 1), (["cpu", "cuda"], 0), (["cuda", "cpu"], 0)):
        assert len(Session(devices=devices).by_rows(module)) == count


@pytest.mark.parametrize(("mbit", "most"), [(1000, 12), (50, 12), (10, 9), (3, 9), (0.3, 9)])
def test_the_network_is_measured_in_seconds_however_slow(monkeypatch, mbit, most):
    spent = []

    def timed(dist, tensor):
        spent.append(1e-3 + 4 * tensor.numel() / (mbit * MBIT))
        return spent[-1]

    monkeypatch.setattr(allreduce, "_timed", timed)
    curve = allreduce.exchange_curve(Session(), pace.LONGEST_SECONDS)
    assert sum(spent) < most and curve[0][1] is not None
    assert pace._rate(curve, 2) == pytest.approx(mbit * MBIT, rel=0.1)


def test_every_value_of_a_sum_counts_and_the_slowest_rank_does(monkeypatch):
    dist = SimpleNamespace(rank=0, world_size=2, device=torch.device("cpu"), backend="gloo", barrier=lambda: None,
                           gather_objects=lambda mine: [mine, (50.0, True)])
    monkeypatch.setattr(allreduce.c10d, "all_reduce", lambda tensor: tensor.fill_(3.0))
    assert allreduce._timed(dist, torch.empty(8)) == 50.0
    monkeypatch.setattr(allreduce.c10d, "all_reduce", lambda tensor: tensor.fill_(3.0)[-1:].fill_(2.0))
    with pytest.raises(TrainingFault, match="32 bytes suma mal en los rangos 0: la red o el backend gloo corrompen"):
        allreduce._timed(dist, torch.empty(8))


@pytest.mark.parametrize("stalled", allreduce.SIZES)
def test_a_machine_that_stops_for_a_moment_is_no_slow_network(monkeypatch, stalled):
    sizes = []

    def timed(dist, tensor):
        sizes.append(4 * tensor.numel())
        first = sizes.count(sizes[-1]) == (2 if stalled == sizes[0] else 1)  # one call has opened the connections
        return 1e-3 + sizes[-1] / (940 * MBIT) + 30.0 * (first and sizes[-1] == stalled)

    monkeypatch.setattr(allreduce, "_timed", timed)
    curve = allreduce.exchange_curve(Session(), pace.LONGEST_SECONDS)
    assert curve == [(size, pytest.approx(1e-3 + size / (940 * MBIT))) for size in allreduce.SIZES]


@pytest.mark.parametrize(("each", "stalled"), [(0.8, 1), (0.8, 3), (8.0, 1)])
def test_a_pass_in_which_the_machine_stopped_does_not_count(monkeypatch, each, stalled):
    now, calls = [0.0], []
    monkeypatch.setattr(pace.time, "perf_counter", lambda: now[0])

    def stalling(model, batch):
        now[0] += each + 30.0 * (len(calls) == stalled)
        calls.append(len(calls))
        return summed_loss(model, batch)

    monkeypatch.setattr(torch.Tensor, "backward", lambda loss: now.__setitem__(0, now[0] + 0.2))
    assert measured(*small_gpt(), stalling).compute_s == pytest.approx(each + 0.2) and len(calls) > stalled
