"""The plan of a run: memory against what torch really allocates, time, verdicts, ways out."""

import dataclasses
import math
import time

import pytest
import torch

from aura import backend, cgroup, ema, loop, ops, optim, plan, products, report
from aura.checkpointer import _HostCopy
from aura.models import gpt
from tests.support import most_allocated

CPU = torch.device("cpu")
SMALL = gpt.GPTConfig(vocab_size=500, seq_len=128, n_layer=4, n_head=4, n_embd=128, dropout=0.0)  # activations
WIDE = gpt.GPTConfig(vocab_size=500, seq_len=32, n_layer=3, n_head=8, n_embd=384, dropout=0.0)  # weights
WORDS = gpt.GPTConfig(vocab_size=4096, seq_len=128, n_layer=2, n_head=4, n_embd=128, dropout=0.0)  # head and logits
DROPPED = dataclasses.replace(SMALL, n_layer=6, dropout=0.1)
AGAIN = dataclasses.replace(SMALL, n_layer=2, n_embd=256)  # a block that is computed again
BILLIONS = gpt.GPTConfig(vocab_size=32_000, seq_len=1024, n_layer=32, n_head=32, n_embd=2560, dropout=0.0)


def job(config, batch_size=1, grad_accum=1, grad_checkpointing=False, precision="fp32", optimizer="adamw", fused=True):
    return plan.Job(config, batch_size, grad_accum, grad_checkpointing, precision, optimizer, "cpu", fused)


JOBS = {
    "small": job(SMALL, 8), "small-bf16": job(SMALL, 8, precision="bf16"),
    "small-checkpointing": job(SMALL, 8, grad_checkpointing="full"),
    "small-checkpointing-bf16": job(SMALL, 8, grad_checkpointing="full", precision="bf16", optimizer="adafactor"),
    "again-checkpointing": job(AGAIN, 8, grad_checkpointing="full", optimizer="adafactor"),
    "wide": job(WIDE), "wide-bf16-accumulated": job(WIDE, 1, 2, precision="bf16"),
    "wide-adafactor": job(WIDE, 2, optimizer="adafactor"),
    "wide-checkpointing-bf16": job(WIDE, 2, grad_checkpointing="full", precision="bf16"),
    "wide-checkpointing-bf16-accumulated": job(WIDE, 1, 2, "full", "bf16", "adafactor"),
    "words": job(WORDS, 4), "words-bf16": job(WORDS, 4, precision="bf16"), "words-one": job(WORDS, 1),
    "words-one-bf16": job(WORDS, 1, precision="bf16"), "words-one-accumulated": job(WORDS, 1, 2),
    "words-adafactor-accumulated": job(WORDS, 2, 2, optimizer="adafactor"),
    "words-checkpointing-bf16": job(WORDS, 8, grad_checkpointing="full", precision="bf16"),
    "dropped": job(DROPPED, 4), "dropped-bf16": job(DROPPED, 4, precision="bf16"),
}
JOBS |= {name.replace("checkpointing", "selective"): dataclasses.replace(wanted, grad_checkpointing="selective")
         for name, wanted in JOBS.items() if wanted.grad_checkpointing}
JOBS["dropped-selective"] = dataclasses.replace(JOBS["dropped"], grad_checkpointing="selective")


def training(job, device=CPU):
    """(model, optimiser, a function that takes a step) of what a job plans."""
    model = gpt.GPT(job.config).init_weights(0).to(device)
    model.grad_checkpointing = job.grad_checkpointing
    optimizer = optim.build(job.optimizer, model, 1e-3, 0.1)
    precision = loop.Precision(job.precision, device)
    shape = (job.batch_size, job.config.seq_len + 1)

    def step():
        with products.step(model), products.adding(True):
            for _ in range(job.grad_accum):
                batch = torch.randint(job.config.vocab_size, shape, device=device)
                with precision.autocast():
                    loss = model(batch[:, :-1], batch[:, 1:])
                (loss / batch.numel()).backward()
        gradients = [p.grad for p in model.parameters()]
        torch._foreach_mul_(gradients, 1 / torch.nn.utils.get_total_norm(gradients).item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return model, optimizer, step


def allocated_peak(job):
    """The most bytes of tensors that exist at one time in a step but the first, as torch's allocator reports them."""
    model, optimizer, step = training(job)
    with ops.using("fused" if job.fused else "sdpa"):
        step()
        before = sum(p.nbytes for p in model.parameters())
        before += sum(t.nbytes for state in optimizer.state.values() for t in state.values())
        return before + most_allocated(step)


def estimated_peak(job):
    """plan.peak without what it only assumes."""
    return max(sum(parts.values()) - parts["reserve"] for parts in plan.phases(job).values())


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "sdpa"])
@pytest.mark.parametrize("name", JOBS)
def test_the_estimate_is_what_torch_allocates(name, fused):
    if fused:
        ops_or_skip()
    wanted = dataclasses.replace(JOBS[name], fused=fused)
    limit = 0.01 if "again" in name else 0.04  # of two blocks what only the second holds is little
    assert estimated_peak(wanted) == pytest.approx(allocated_peak(wanted), rel=limit)


@pytest.mark.parametrize("name", ["small", "words-one", "words-adafactor-accumulated"])
def test_the_estimate_where_onednn_multiplies(monkeypatch, name):
    """And where MKL does, whichever this processor has."""
    ops_or_skip()
    found = []
    for better in (True, False):
        monkeypatch.setattr(plan.products, "onednn_is_better", lambda better=better: better)
        found.append(estimated_peak(JOBS[name]))
        assert found[-1] == pytest.approx(allocated_peak(JOBS[name]), rel=0.01)
    assert found[0] > found[1]


def test_on_a_cpu_torch_s_operations_leave_more_gaps_than_ours():
    reserves = {fused: plan.worst_phase(dataclasses.replace(job(SMALL), fused=fused))[1] for fused in (True, False)}
    shares = {fused: (parts["reserve"] - plan.CONTEXT["cpu"]) / (sum(parts.values()) - parts["reserve"])
              for fused, parts in reserves.items()}
    assert shares[True] == pytest.approx(0.15, abs=0.01) and shares[False] == pytest.approx(0.5, abs=0.01)


def ops_or_skip():
    with ops.using("auto"):
        if ops._choice != "fused":
            pytest.skip("the kernels cannot be built here")


def test_on_a_card_the_fused_loss_makes_no_products_of_16_bits(monkeypatch):
    """There aura/fused/loss.py adds to the head's float32 gradient directly; on the CPU, by way of a part in 16
    bits."""
    monkeypatch.setattr(plan, "_emulates_bfloat16", lambda: False)
    on_cpu = plan.Job(BILLIONS, 8, 1, False, "bf16", "adamw", "cpu", fused=True)
    sizes = [plan.phases(wanted)["loss"]["loss"]
             for wanted in (on_cpu, dataclasses.replace(on_cpu, device_type="cuda"))]
    assert sizes[0] - sizes[1] == 2 * plan.products.WEIGHT_ROWS * BILLIONS.n_embd


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_the_state_of_an_optimiser_is_what_it_allocates(name):
    model = gpt.GPT(WORDS)
    optimizer = optim.build(name, model, 1e-3, 0.1)
    sum(p.sum() for p in model.parameters()).backward()
    optimizer.step()
    held = sum(t.nbytes for state in optimizer.state.values() for key, t in state.items() if key != "step")
    state, _ = plan.optimizer_bytes(name, [tuple(p.shape) for p in model.parameters()])
    assert held == state


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_the_copy_for_checkpoints_is_what_the_first_save_leaves_in_memory(name):
    model, optimizer, step = training(wanted := job(WORDS, optimizer=name))
    step()
    host = _HostCopy()
    host.take({"model": model.state_dict(), "ema": ema.Average(model, 0.9).weights,
               "optimizer": optimizer.state_dict()})
    held = sum(buffer.nbytes for buffer in host.buffers.values() if buffer.dim())  # Adam's counts of steps have none
    saving = dataclasses.replace(wanted, ema=True, saves=True)
    assert all(parts["copy"] == held for parts in plan.phases(saving).values())
    on_card = dataclasses.replace(saving, device_type="cuda")
    assert not any(parts["copy"] for parts in plan.phases(on_card).values()), "that is not the card's memory"


def test_eight_bits_hold_a_quarter_of_the_state():
    state, _ = plan.optimizer_bytes("adamw8bit", [(1024, 256), (100,)])
    assert state == 2 * 1024 * 256 + 2 * 4 * 1024 + 8 * 100  # two bytes, two scales for 256 values; small ones in full


def card(memory, flops=None):
    return plan.Card("cuda", "a card", memory, "bf16", flops)


def test_a_plan_of_billions_allocates_nothing_and_takes_no_time():
    wanted = plan.Job(BILLIONS, 8, 4, "full", "bf16", "adamw", "cuda")
    started = time.process_time()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        _, parts = plan.worst_phase(wanted)
        plan.lines(wanted, card(80e9, 312e12), steps=100, steps_per_epoch=50)
    allocated = sum(max(0, event.nbytes()) for event in profile.profiler.kineto_results.events()
                    if event.name() == "[memory]")
    assert allocated < 1e6 and time.process_time() - started < 10
    assert parts["weights"] == 4 * BILLIONS.parameters() and parts["optimizer"] == 2 * parts["weights"]
    assert plan.peak(wanted) == sum(parts.values()) > 16 * BILLIONS.parameters()


def test_an_average_of_the_weights_takes_their_room_once_more():
    wanted = job(WIDE)
    _, averaged = plan.worst_phase(dataclasses.replace(wanted, ema=True))
    assert averaged["average"] == averaged["weights"]
    assert estimated_peak(dataclasses.replace(wanted, ema=True)) == estimated_peak(wanted) + averaged["weights"]


def test_checkpointing_and_smaller_batches_need_less():
    wanted = plan.Job(BILLIONS, 8, 4, False, "bf16")
    selective, full = (dataclasses.replace(wanted, grad_checkpointing=mode) for mode in ("selective", "full"))
    single = dataclasses.replace(full, batch_size=1, grad_accum=32)
    assert plan.peak(wanted) > plan.peak(selective) > plan.peak(full) > plan.peak(single)


def test_ways_out_come_from_near_to_far():
    wanted = plan.Job(BILLIONS, 8, 4, False, "bf16")

    def fits(**changes):
        return plan.peak(dataclasses.replace(wanted, **changes))

    same, line = plan.alternatives(wanted, fits())
    assert same == wanted and line == "cabe tal como está"
    for mode, available in (("selective", fits() - 1), ("full", fits(grad_checkpointing="selective") - 1)):
        checkpointed, line = plan.alternatives(wanted, available)
        assert checkpointed == dataclasses.replace(wanted, grad_checkpointing=mode)
        assert line.startswith(f"cabe con --gradient_checkpointing {mode} (")
    single, line = plan.alternatives(wanted, fits(grad_checkpointing="full", batch_size=1, grad_accum=32))
    assert (single.batch_size, single.grad_accum, single.optimizer) == (1, 32, "adamw")
    assert "--gradient_checkpointing full --batch_size 1 --gradient_accumulation_steps 32" in line
    smallest = {"grad_checkpointing": "full", "batch_size": 1, "grad_accum": 32}
    lighter, line = plan.alternatives(wanted, fits(**smallest) - 1)
    assert lighter.optimizer == "adamw8bit" and "--optimizer adamw8bit" in line
    short = dataclasses.replace(BILLIONS, seq_len=512)
    shorter, line = plan.alternatives(wanted, fits(**smallest, optimizer="adafactor", config=short))
    assert shorter.config == short and "--seq_length 512" in line
    presets = [("--model_preset enorme", dataclasses.replace(BILLIONS, n_layer=40)),
               ("--model_preset gpt2-large", gpt.PRESETS["gpt2-large"]), ("--model_preset gpt2", gpt.PRESETS["gpt2"])]
    smaller, line = plan.alternatives(wanted, 12e9, presets)
    assert "--model_preset gpt2-large" in line and plan.peak(smaller) <= 12e9
    assert not any("enorme" in flags for _, flags in plan._settings(wanted, presets))
    none, line = plan.alternatives(wanted, 1e9, presets)
    assert none is None and "1.0 GB" in line
    single, line = plan.alternatives(wanted, fits(**smallest), presets, begun=True)
    assert single.batch_size == 1 and "--optimizer" not in line
    none, line = plan.alternatives(wanted, fits(**smallest) - 1, presets, begun=True)
    assert none is None and "una ejecución empezada" in line


def test_every_batch_of_a_way_out_keeps_the_sequences_of_a_step():
    wanted = plan.Job(BILLIONS, 6, 5, False, "bf16")
    others = [other for other, _ in plan._settings(wanted, [])]
    assert {other.batch_size for other in others} == {6, 5, 3, 2, 1}
    assert all(other.batch_size * other.grad_accum == 30 for other in others)
    absurd = dataclasses.replace(wanted, batch_size=10**20)
    assert plan.alternatives(absurd, plan.peak(wanted))[0].batch_size < 100, "and it took no time"
    on_cpu = plan._settings(dataclasses.replace(wanted, device_type="cpu"), [])
    assert {other.optimizer for other, _ in on_cpu} == {"adamw", "adafactor"}  # bitsandbytes wants a GPU


def test_the_limit_of_a_control_group_counts(tmp_path):
    def write(path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    membership = tmp_path / "cgroup"
    membership.write_text("0::/user/job\n")
    write(tmp_path / "two/user/job/memory.max", "max\n")
    assert cgroup.group_limit(membership, tmp_path / "two") == math.inf
    write(tmp_path / "two/user/memory.max", "5000\n")
    assert cgroup.group_limit(membership, tmp_path / "two") == 5000
    membership.write_text("7:cpu,memory:/docker/abc\n3:cpuset:/\n")
    write(tmp_path / "one/memory/memory.limit_in_bytes", "7000\n")  # a container's own, at the top
    assert cgroup.group_limit(membership, tmp_path / "one") == 7000
    assert cgroup.group_limit(tmp_path / "missing") == math.inf
    assert 0 < backend.device_memory(CPU) < 2**60


def test_flops_of_the_device_and_of_the_model_are_kept_apart():
    wanted = plan.Job(BILLIONS, grad_checkpointing="full")
    model = BILLIONS.flops_per_token()
    again = 2 * 8 * 32 * 2560**2 + 4 * 32 * 1024 * 2560  # products but the last of a block, and attention's two
    assert plan.hardware_flops_per_token(wanted) == model + again
    selective = dataclasses.replace(wanted, grad_checkpointing="selective")
    assert plan.hardware_flops_per_token(selective) == model + 2 * 4 * 32 * 2560**2  # the first product of each MLP
    assert plan.hardware_flops_per_token(dataclasses.replace(wanted, grad_checkpointing=False)) == model
    assert plan.hours(wanted, 1e9, 300e12) == pytest.approx((model + again) * 1e9 / 120e12 / 3600)


def test_the_rate_is_the_known_cards_or_measured(monkeypatch):
    assert plan.measured_flops(seconds=0) > 1e8, "three products are enough"
    assert plan.device_flops(CPU, "fp32") > 1e8
    monkeypatch.setattr(plan.backend, "device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    assert plan.device_flops(torch.device("cuda"), "bf16") == report.PEAK_FLOPS["NVIDIA A100-SXM4-80GB"]
    monkeypatch.setattr(plan.backend, "device_name", lambda device: "otra")
    assert plan.device_flops(torch.device("cuda"), "bf16") is None


def test_an_epoch_has_the_steps_that_the_loader_makes_of_the_text():
    """The target of the last token is one more."""
    steps = plan.Job(SMALL, 4, 2).steps_per_epoch
    assert [steps(tokens) for tokens in (0, 1024, 1025, 2048, 2049)] == [0, 0, 1, 1, 2]


def test_verdicts_name_what_would_fit_exactly():
    wanted = plan.Job(SMALL, 8, 4)
    flops = wanted.tokens_per_step * plan.hardware_flops_per_token(wanted)

    def verdict(steps, seconds_a_step, by_steps=False):
        return plan.verdict(wanted, steps, 1000, flops / seconds_a_step / plan.UTILISATION, 1.0, by_steps)

    assert verdict(3600, 1.0) == "CUMPLE: 1.0 h de las 1 h disponibles"
    assert verdict(3601, 1.0).startswith("NO CUMPLE: ")
    assert verdict(5000, 1.0) == "NO CUMPLE: pide 1.4 h y hay 1 h; con --epochs 3 serían 50 min 00 s"
    assert verdict(5000, 4.0) == ("NO CUMPLE: pide 5.6 h y hay 1 h; no cabe ni una época: caben "
                                  f"{900 * 8 * 4 * 128} tokens, --max_steps 900 (90 % de una época)")
    assert verdict(5000, 1.0, True) == ("NO CUMPLE: pide 1.4 h y hay 1 h; caben "
                                        f"{3600 * 8 * 4 * 128} tokens, --max_steps 3600 (360 % de una época)")
    assert verdict(5000, 4.0, True) == verdict(5000, 4.0)
    assert "ni un paso" in verdict(5000, 4000.0)
    assert plan.fitting_steps(wanted, 1.0, flops / plan.UTILISATION) == 3600


def test_the_plan_is_a_table_that_adds_up():
    wanted = plan.Job(gpt.PRESETS["gpt2"], 8, 4, "full", "bf16")
    shown = plan.lines(wanted, card(80e9, 312e12), steps=2000, steps_per_epoch=4000)
    assert shown[0].startswith("Modelo: 110.4 M parámetros")
    first = next(i for i, line in enumerate(shown) if line.startswith("Memoria"))
    table = [line for line in shown[first + 1:] if line.startswith("  ")]
    sizes = [float(line.split(" GB")[0].split()[-1]) for line in table]
    assert sum(sizes[:-1]) == pytest.approx(sizes[-1], abs=0.04)
    assert len({line.index(" GB") for line in table}) == 1 and "cabe" in table[-1]
    assert f"{8 * 4 * 1024} por paso x 2000 pasos = {8 * 4 * 1024 * 2000} (0.50 épocas); " in shown[-5]
    assert shown[-5].endswith(f"; {2000 * 8 * 4 * 1024 / wanted.config.parameters():.3g} por parámetro")
    assert "en el dispositivo" in shown[-4] and "MFU" in shown[-3] and shown[-2].startswith("Veredicto: CUMPLE")
    few = plan.lines(wanted, card(80e9, 312e12), steps=2000, steps_per_epoch=100)
    assert [line for line in few if line not in shown][-1].startswith(
        f"  Poco texto para este modelo: {100 * 8 * 4 * 1024 / wanted.config.parameters():.3g} tokens distintos")
    assert [plan._share(value) for value in (0.003, 0.996, 20, 1550)] == ["menos de 0.01", "0.996", "20", "1550"]
    full = plan.lines(wanted, card(1e9), steps=1, steps_per_epoch=1)
    assert any("NO CABE" in line for line in full) and "no se conoce la potencia" in full[-1]
    assert max(map(len, shown + full)) <= 130


def test_the_plan_says_what_it_would_take_to_compute_nothing_twice():
    once, some, twice = (plan.Job(gpt.PRESETS["gpt2"], 8, 4, again, "bf16") for again in (False, "selective", "full"))
    (need, less), tokens = map(plan.peak, (once, some)), 2000 * 8 * 4 * 1024

    def last(job, *memory_and_flops):
        return plan.lines(job, card(*memory_and_flops), steps=2000, steps_per_epoch=1000)[-1]

    def advice(flags, other, job):
        share = plan.hardware_flops_per_token(other) / plan.hardware_flops_per_token(job)
        return (f"Consejo: sobra memoria; con {flags} también cabe ({plan.peak(other) / 1e9:.2f} GB) y el cálculo es "
                f"un {100 * (1 - share):.0f} % menor")

    wanted = advice("--no_gradient_checkpointing", once, twice)
    assert last(twice, need) == wanted
    assert last(twice, need, 312e12) == f"{wanted}: {plan.told(plan.hours(once, tokens, 312e12))}"
    assert last(some, need) == advice("--no_gradient_checkpointing", once, some)
    assert last(twice, need - 1) == last(twice, less) == advice("--gradient_checkpointing selective", some, twice)
    for job, available in ((some, need - 1), (twice, less - 1)):
        assert last(job, available) == f"Sin gradient checkpointing pediría {need / 1e9:.2f} GB: no cabe"
    assert last(once, need, 312e12).startswith("Veredicto")
    # Of so small a model almost all is computed in the head, which nothing recomputes.
    tiny = gpt.GPTConfig(vocab_size=50_000, seq_len=32, n_layer=1, n_head=2, n_embd=32)
    assert last(plan.Job(tiny, 8, 4, "full", "bf16"), need, 312e12).startswith("Veredicto")
