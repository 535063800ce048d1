"""DiLoCo against a plain one on one vector in one process, with Nesterov by torch: real processes agree on the same."""

import contextlib
import dataclasses
import itertools
import threading
import time
from collections import deque

import pytest
import torch
import torch.distributed as c10d

from aura import averaging, diloco
from aura.averaging import BLOCK, pack, unpack
from aura.clock import Clock
from aura.diloco import DiLoCo
from aura.session import Session, is_communication_error
from aura.signals import StopRequest
from aura.sync import Known
from tests.support import run_ranks

RATE = 0.01  # of every process's own AdamW
CASES = {2: (1, 3, 8, 12, 20), 3: (5, 20)}  # processes: steps between two agreements
COUNT = 100_000  # values of which nobody() takes the mean
OUTER = {12: (0.9, 0.5)}  # steps between two agreements: rate and momentum of these, where not as published

GROUP = """
import importlib, sys
from pathlib import Path
from types import SimpleNamespace
from aura import cli, distributed


def main():
    module, name, folder = sys.argv[1:]
    with distributed.session(SimpleNamespace(backend="gloo", dist_timeout=60.0)) as dist:
        getattr(importlib.import_module(module), name)(dist, Path(folder))
    return 0


cli.run(main)
"""


def together(size, work, folder):
    """work(dist, folder), a function of a file of tests, in a group of `size` processes; their outputs, by rank."""
    results = run_ranks(["-c", GROUP, work.__module__, work.__name__, folder], [folder] * size)
    assert [code for code, _ in results] == [0] * size, "\n".join(output[-3000:] for _, output in results)
    return [output for _, output in results]


def layers():
    """4810 weights, the same on every rank; neither parameters nor blocks nor fragments end at the same places."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(37, 41), torch.nn.Linear(41, 53), torch.nn.Linear(53, 19))


def flat(module):
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


def gradient(weights, rank, step):
    """A rank's gradient in a step: every rank is drawn to a different place, with noise."""
    return weights - rank + torch.randn(len(weights), generator=torch.Generator().manual_seed(1000 * rank + step))


def adamw(parameters):
    return torch.optim.AdamW(parameters, RATE, foreach=False)


def steps_of(every):
    return max(10, 2 * every + 3)


# ---- In the processes ---------------------------------------------------------------------------------------------


def advance(synced, step, **options):
    synced.weigh(torch.tensor(1.0), 1, StopRequest(), None)
    return synced.advance(step, "", Clock(synced.dist), **options)


def train(dist, every):
    """{"agreed": [steps, weights] after each step, "before": this rank's own before the last agreement, "after"}."""
    module, agreed = layers(), []
    optimizer, synced = adamw(module.parameters()), DiLoCo(dist, module, every, *OUTER.get(every, ()))
    assert sorted(synced.due.values()) == list(range(min(8, every)))
    for step in range(1, steps_of(every) + 1):
        moves = gradient(flat(module), dist.rank, step).split([p.numel() for p in module.parameters()])
        for parameter, move in zip(module.parameters(), moves, strict=True):
            parameter.grad = move.view_as(parameter)
        optimizer.step()
        before = flat(module)
        advance(synced, step, last=step == steps_of(every))
        agreed.append(synced.agreed_flat.clone())
    return {"agreed": torch.stack(agreed), "before": before, "after": flat(module)}


def drift(dist):
    """How far the agreed weights have come after 100 agreements in which each rank asked, for every second weight, for
    less than one step of the 8 bits."""
    module = torch.nn.Linear(2, dist.world_size, bias=False)
    with torch.no_grad():
        module.weight.zero_()
    synced = DiLoCo(dist, module, 1, lr=1.0, momentum=0.0)  # the agreed weights are the mean of what arrives
    for step in range(1, 102):
        with torch.no_grad():
            module.weight += torch.tensor([[1.0, 0.001 * (1 + dist.rank)]]) * (step <= 100)
        advance(synced, step)
    return synced.agreed_flat


def spoilt(dist):
    """What becomes of weights that are NaN on rank 1: ([agreed after each step], local at the end)."""
    module, agreed = layers(), []
    synced = DiLoCo(dist, module, 2)
    for step in range(1, 8):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter += {0: 0.01, 1: float("nan") if step in (3, 4) else 0.0}.get(dist.rank, 0.0)
        if step == 5 and dist.rank == 1:
            assert not flat(module).isfinite().all(), "what is NaN stays until its fragment leaves"
        if step == 6:
            assert flat(module).isfinite().all(), "the agreed weights have taken its place"
            synced.retreat()
            assert torch.equal(flat(module), synced.agreed_flat)
        advance(synced, step, last=step == 7)
        agreed.append(synced.agreed_flat.clone())
    assert synced.own_state()["flight"] is None, "or a run that goes on from its end would take it twice"
    return {"agreed": torch.stack(agreed), "after": flat(module)}


def nobody(dist):
    """The mean where no rank's values are finite, what a rank that owed 0.3 before owes then, and what left this rank:
    (number of the group, bytes to each rank)."""
    sent, scatter, groups = [], c10d.all_to_all_single, averaging.connect(60)
    c10d.all_to_all_single = lambda into, data, to_me, to_others, group, **more: (
        sent.append((groups.index(group), to_others)), scatter(into, data, to_me, to_others, group=group, **more))[1]
    try:
        owed = averaging.nothing_owed(COUNT, dist.world_size) + 0.3
        payload, _ = averaging.pack_all(torch.ones(COUNT), 0.0, dist.world_size)
        average = averaging.start(payload, COUNT, groups, owed, c10d.Work.wait)
        return {"mean": average.mean(dist.device), "owed": average.owed, "sent": sent}
    finally:
        c10d.all_to_all_single = scatter


def between(dist):
    """Whether the mean of this rank's part has left in a step between two departures, once the part had arrived."""
    synced = DiLoCo(dist, layers(), 20)
    for step in (1, 2):
        advance(synced, step)
    synced.flight.average.exchange.wait(c10d.Work.wait)
    advance(synced, 3)
    left = getattr(synced.flight.average, "means", None) is not None
    advance(synced, 4, last=True)
    return left


def settled(dist):
    """Whether the mean of this rank's part has left when all ranks have settled and may be busy for long."""
    synced = DiLoCo(dist, layers(), 20)
    for step in (1, 2):
        advance(synced, step)
    synced.flight.average.exchange.is_over = lambda: False  # as on a slow network
    advance(synced, 3, settle=True)
    left = getattr(synced.flight.average, "means", None) is not None
    del synced.flight.average.exchange.is_over
    advance(synced, 4, last=True)
    return left


def slower(dist):
    """The steps that are known where the other ranks take a little less than the time-out for each: they take what a
    fast one sends only some steps later."""
    synced, known = DiLoCo(dataclasses.replace(dist, timeout=3.3), layers(), 20), []
    for step in range(1, 5):
        if not dist.main:
            time.sleep(1.7)
        known += advance(synced, step, last=step == 4)
    return [each.step for each in known]


def patience(dist):
    """For how long a rank that was asked to stop would wait for the others: before a step, after one, after long ones,
    with a fragment of unknown time under way, and with one like those before; how many of the fragments of a run have
    been timed, and the longest of those and of one that was under way during a pause."""
    synced, found = DiLoCo(dist, layers(), 8), []
    flight = diloco.Flight(0, None, None)
    for synced.step_s, synced.flight, synced.flight_s in (
            ([], None, [1.0]), ([0.1], None, []), ([0.1, 100.0], None, []), ([0.1], flight, []),
            ([0.1], flight, [30.0, 3.0])):
        found.append(synced._patience())
    synced = DiLoCo(dist, layers(), 8)
    synced.flight_s = []
    for step in range(1, 6):
        advance(synced, step)
    with synced.agreed():
        time.sleep(5.0 * (dist.world_size == 2))
    for step in (6, 7):
        advance(synced, step, last=step == 7)
    return found, len(synced.flight_s), max(synced.flight_s)


def lost(dist):
    """This rank's own weights and the agreed ones after the exchange of a fourth fragment has failed, in the last
    agreement of all; and whether a failure before it leaves the agreed ones alone."""
    module = layers()
    synced, calls = DiLoCo(dist, module, 20), itertools.count()
    received, before = synced._received, synced.agreed_flat.clone()
    synced._put(slice(None), before + gradient(before, dist.rank, 1))
    own = flat(module)

    def fail(*_):
        raise RuntimeError("gloo: Connection closed by peer")

    synced._tell = fail
    with contextlib.suppress(RuntimeError):
        advance(synced, 1)
    untouched = torch.equal(synced.agreed_flat, before)
    del synced._tell
    synced._received = lambda: fail() if next(calls) == 3 else received()
    with contextlib.suppress(RuntimeError):
        advance(synced, 2, last=True)
    synced.close()
    return {"own": own, "agreed": synced.agreed_flat, "untouched": untouched}


def asked_to_stop(dist):
    """What a rank that was asked to stop says of others that are late; they come in the end."""
    synced, request, said = DiLoCo(dist, layers(), 20), StopRequest(), ""
    patience, diloco.PATIENCE_S = diloco.PATIENCE_S, 0.2
    request.handle(2, None)
    for step in (1, 2):
        if not dist.main:
            dist.store.wait([f"late {step}"])
        synced.weigh(torch.tensor(1.0), 1, request, None)
        # With steps that take as long being late is no sign of being gone.
        synced.step_s.append(100.0 if step == 2 else 0.01)
        if dist.main and step == 2:
            threading.Timer(1.0, lambda: dist.store.set("late 2", "1")).start()
        try:
            known = synced.advance(step, "", Clock(dist), settle=True)
        except RuntimeError as problem:
            said += f"{step}: {problem} {is_communication_error(problem)}"
            dist.store.set("late 1", "1")
    diloco.PATIENCE_S = patience
    return said, [each.step for each in known]


def looked_at(dist):
    """When the step under way began, after two looks at the agreed weights: before the first step and in the second."""
    synced, begun = DiLoCo(dist, layers(), 20), []
    for synced.begun in (None, -1000.0):
        with synced.agreed():
            pass
        begun.append(synced.begun)
    return begun


def told_of_failure(dist):
    """What a rank that waits says when another has posted its failure."""
    synced, said = DiLoCo(dist, layers(), 20), None
    usual, diloco.ASK_S = diloco.ASK_S, 0.1
    if dist.main:
        dist.post_failure(RuntimeError("disco lleno"))
        dist.store.wait([f"heard {rank}" for rank in range(1, dist.world_size)])
        dist.store.delete_key("failed")
    try:
        synced.weigh(torch.tensor(1.0), 1, StopRequest(), None)
        synced.advance(1, "", Clock(dist), settle=True)
    except RuntimeError as problem:
        said = str(problem), dist.failure()
        dist.store.set(f"heard {dist.rank}", "1")
    diloco.ASK_S = usual
    return said


def everything(dist, folder):
    size, work = dist.world_size, (drift, spoilt, nobody, between, settled, slower, patience, lost, asked_to_stop,
                                   looked_at, told_of_failure)
    torch.save({**{every: train(dist, every) for every in CASES[size]}, **{each.__name__: each(dist) for each in work}},
               folder / f"{size}-{dist.rank}.pt")


# ---- Here ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{processes: what each rank has saved}."""
    folder = tmp_path_factory.mktemp("diloco")
    for size in CASES:
        together(size, everything, folder)
    return {size: [torch.load(folder / f"{size}-{rank}.pt") for rank in range(size)] for size in CASES}


def reference(world_size, every, steps):
    """The agreed weights after each of `steps` steps but the last: what ranks share in float64, Nesterov by torch."""
    start, fragments = flat(layers()), min(8, every)
    local = [torch.nn.Parameter(start.clone()) for _ in range(world_size)]
    inner = [adamw([weights]) for weights in local]
    places = [slice(len(start) * i // fragments, len(start) * (i + 1) // fragments) for i in range(fragments)]
    agreed = [torch.nn.Parameter(start[place].double()) for place in places]
    lr, momentum = OUTER.get(every, (0.7, 0.9))
    outer = [torch.optim.SGD([part], lr=lr, momentum=momentum, nesterov=True) for part in agreed]
    owed = [[torch.zeros_like(part) for part in agreed] for _ in local]
    owed_mean = [torch.zeros_like(part) for part in agreed]  # of more than two ranks the mean is rounded as well
    away, after = None, []
    for step in range(1, steps):
        for rank, weights in enumerate(local):
            weights.grad = gradient(weights.detach(), rank, step)
            inner[rank].step()
        gone, now = (-(-(done + 1) * fragments // every) - 1 for done in ((step - 1) % every, (step - 1) % every + 1))
        if now > gone:
            with torch.no_grad():
                if away:
                    number, left, sent = away
                    mean = wanted = sum(sent) / world_size + owed_mean[number]
                    if world_size > 2:
                        mean = eight_bits(wanted, world_size)
                    owed_mean[number], agreed[number].grad = wanted - mean, mean
                    outer[number].step()
                    for weights, was in zip(local, left, strict=True):
                        weights[places[number]] = agreed[number].float() + (weights[places[number]] - was)
                left, sent = [weights[places[gone]].clone() for weights in local], []
                for debts, was in zip(owed, left, strict=True):
                    wanted = agreed[gone] - was + debts[gone]
                    sent.append(eight_bits(wanted, world_size))
                    debts[gone] = wanted - sent[-1]
                away = gone, left, sent
        after.append(torch.cat([part.detach() for part in agreed]))
    return torch.stack(after)


def eight_bits(values, world_size):
    """The nearest of the 255 values that a block of 1024 has, block by block; parts of more than two have their own."""
    parts = values.split(4 * -(-len(values) // (4 * world_size)) if world_size > 2 else len(values))
    blocks = [block for part in parts for block in part.split(1024)]
    return torch.cat([(block * 127 / block.abs().max()).round() / 127 * block.abs().max() if block.any() else block
                      for block in blocks])


@pytest.mark.parametrize("size, every", [(size, every) for size in CASES for every in CASES[size]])
def test_the_agreed_weights_are_those_of_the_formula_and_the_same_on_all_ranks(runs, size, every):
    found = [rank[every] for rank in runs[size]]
    assert all(torch.equal(rank["agreed"], found[0]["agreed"]) for rank in found)
    away = (found[0]["agreed"][:-1] - reference(size, every, steps_of(every))).abs()
    # Where a value lies in the middle of two of the 255, float32 and float64 may take one each.
    assert (away > 1e-6).float().mean() < 5e-3 and away.max() < 2 * every * RATE / 127


@pytest.mark.parametrize("size, every", [(2, 20), (3, 5), (3, 20)])
def test_in_the_end_all_have_the_mean(runs, size, every):
    found = [rank[every] for rank in runs[size]]
    assert all(torch.equal(rank["after"], found[0]["agreed"][-1]) for rank in found)
    last_way = runs[size][0][every]["agreed"][-2]
    mean = sum(rank["before"] for rank in found) / size
    step = max((rank["before"] - last_way).abs().max() for rank in found) / 127
    assert (found[0]["after"] - mean).abs().max() <= (1 if size == 2 else 2) * step  # a mean of three is rounded again
    assert (found[0]["after"] - last_way).abs().max() > 10 * step


@pytest.mark.parametrize("size", CASES)
def test_what_rounding_owes_is_paid(runs, size):
    assert all(torch.equal(rank["drift"], runs[size][0]["drift"]) for rank in runs[size])
    along, small = runs[size][0]["drift"].view(size, 2).T.tolist()
    assert along == pytest.approx([100] * size, rel=1e-5)
    assert small == pytest.approx([0.05 * (1 + size)] * size, abs=(1 if size == 2 else 2) / 127)


@pytest.mark.parametrize("size", CASES)
def test_who_is_left_in_the_last_agreement_keeps_what_it_has_learnt(runs, size):
    found, cut = [rank["lost"] for rank in runs[size]], 4810 * 3 // 8
    mean = sum(rank["own"] for rank in found) / size
    for rank in found:
        assert rank["untouched"] and torch.equal(rank["agreed"][cut:], rank["own"][cut:])
        assert torch.equal(rank["agreed"][:cut], found[0]["agreed"][:cut])
        assert (rank["agreed"][:cut] - mean[:cut]).abs().max() < 0.1 < (rank["own"] - mean)[:cut].abs().max()


@pytest.mark.parametrize("size", CASES)
def test_who_waits_hears_that_another_has_failed(runs, size):
    first, *others = [rank["told_of_failure"] for rank in runs[size]]
    assert first is None and others == [("otro proceso ha fallado", [0, "disco lleno", None, False])] * (size - 1)


@pytest.mark.parametrize("size", CASES)
def test_who_is_asked_to_stop_waits_for_late_ones_but_not_for_ever(runs, size):
    (said, steps), *others = [rank["asked_to_stop"] for rank in runs[size]]
    assert said == "1: no llegó nada en 0 s, y se pidió parar True" and steps == [1, 2], "neither has been heard"
    assert all(rank == ("", [2]) for rank in others)


@pytest.mark.parametrize("size", CASES)
def test_patience_with_who_is_well_is_reckoned_by_what_a_step_and_a_fragment_take(runs, size):
    for found, timed, longest in (rank["patience"] for rank in runs[size]):
        assert found == [60.0, diloco.PATIENCE_S, 200.0, 60.0, 60.0] and timed >= 5 + diloco.FRAGMENTS and longest < 5.0


@pytest.mark.parametrize("size", CASES)
def test_a_slow_rank_may_take_nearly_the_time_out_for_every_step(runs, size):
    assert all(rank["slower"] == [1, 2, 3, 4] for rank in runs[size])


@pytest.mark.parametrize("size", CASES)
def test_an_evaluation_is_no_part_of_the_step_that_patience_is_reckoned_by(runs, size):
    for rank in runs[size]:
        before, after = rank["looked_at"]
        assert before is None and after > 0


@pytest.mark.parametrize("size", CASES)
def test_weights_that_are_not_finite_never_leave_their_rank(runs, size):
    found = [rank["spoilt"] for rank in runs[size]]
    assert all(torch.equal(rank["agreed"], found[0]["agreed"]) for rank in found)
    assert found[0]["agreed"].isfinite().all()
    assert all(torch.equal(rank["after"], found[0]["agreed"][-1]) for rank in found)
    # The half that leaves after step 3 comes from all but rank 1; of these rank 0 has gone on by 0.02 since the last.
    moved, mean = found[0]["agreed"][3] - found[0]["agreed"][2], 0.02 / (size - 1)
    momentum = 0.9 * 0.01 / size + mean
    torch.testing.assert_close(moved[:2405], torch.full([2405], 0.7 * (0.9 * momentum + mean)), atol=1e-4, rtol=0)


@pytest.mark.parametrize("size", CASES)
def test_where_nobody_has_anything_to_say_there_is_no_mean_and_debts_stay(runs, size):
    for rank in runs[size]:
        assert rank["nobody"]["mean"] is None
        assert torch.equal(rank["nobody"]["owed"], averaging.nothing_owed(COUNT, size) + 0.3)


def test_the_mean_of_a_part_leaves_while_steps_go_on(runs):
    assert all(rank["between"] for rank in runs[3])


def test_no_rank_waits_for_a_part_of_one_that_evaluates(runs):
    assert all(rank["settled"] for rank in runs[3])


@pytest.mark.parametrize("size", CASES)
def test_a_rank_sends_as_many_bytes_as_a_ring_would(runs, size):
    for rank in runs[size]:
        sent = sum(sum(to_others) for _, to_others in rank["nobody"]["sent"])
        assert sent == pytest.approx(2 * (size - 1) / size * COUNT, rel=0.01)


@pytest.mark.parametrize("size", CASES)
def test_the_two_directions_between_ranks_have_a_connection_each(runs, size):
    """With one for both, what the other sends back would wait behind what this rank sends itself."""
    for number, rank in enumerate(runs[size]):
        for group, to_others in rank["nobody"]["sent"]:
            assert not any(count for other, count in enumerate(to_others) if (other > number) != (group == 0))


def test_no_token_is_forgotten_where_a_rank_is_lost_between_two_messages():
    synced = DiLoCo.__new__(DiLoCo)
    synced.dist, synced.every, synced.due = Session(world_size=2), 9, {}
    synced.begun = synced.flight = None
    synced.messages, synced.heard = deque((step, 10, None, None) for step in range(1, 4)), []

    def hear(step, *_):
        if step == 2:
            raise RuntimeError("gloo: Connection closed by peer")
        return Known(step, 1.0, 15.0, 0)

    synced._tell, synced._hear, synced._own_if_alone = lambda *_: None, hear, contextlib.nullcontext
    assert synced.unheard() == 60
    with pytest.raises(RuntimeError, match="closed by peer"):
        advance(synced, 3, settle=True)
    assert synced.unheard() == 15 + 2 * 20


@pytest.mark.parametrize("value, kept", [(2.0, 2.0), (float("nan"), 0.0)])
def test_who_is_left_in_the_last_agreement_keeps_nothing_that_is_not_finite(value, kept):
    synced, own = DiLoCo.__new__(DiLoCo), torch.nn.Parameter(torch.tensor([2.0, value]))
    synced.parameters, synced.agreed_flat = [own], torch.zeros(2)
    with pytest.raises(RuntimeError), synced._own_if_alone(True):
        raise RuntimeError("gloo: Connection closed by peer")
    assert synced.agreed_flat.tolist() == [kept, kept]


@pytest.mark.parametrize("count", [1, BLOCK - 1, BLOCK, 3 * BLOCK, 3 * BLOCK + 7])
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1e30])
def test_eight_bits_err_by_half_a_step_at_most(count, size):
    values = torch.randn(count, generator=torch.Generator().manual_seed(count)) * size
    values[BLOCK:2 * BLOCK] = 0
    payload, sent = pack(values, 0.5)
    weight, received = unpack(payload, count, torch.device("cpu"))
    assert weight == 0.5 and torch.equal(sent, received) and received.dtype == torch.float32
    assert payload.dtype == torch.uint8 and len(payload) == count + 4 + 4 * -(-count // BLOCK)
    for block, found in zip(values.split(BLOCK), received.split(BLOCK), strict=True):
        step = block.abs().max() / 127
        assert ((found - block).abs() <= step * 0.50001).all() and (block.any() or not found.any())


def test_a_sum_of_what_was_rounded_tends_to_the_sum_of_what_was_meant():
    generator = torch.Generator().manual_seed(0)
    meant, sent, owed = (torch.zeros(1500) for _ in range(3))
    for _ in range(300):
        wanted = torch.randn(1500, generator=generator) ** 3
        meant += wanted
        received = pack(wanted + owed, 1.0)[1]
        owed, sent = wanted + owed - received, sent + received
    assert (meant - sent).abs().max() < 1.0 and torch.allclose(meant - sent, owed, atol=1e-3)
