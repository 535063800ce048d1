"""The loop: accumulation, exact resume, NaN policies, orderly stop."""

import contextlib
import errno
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from aura import loop, optim, products, report, sharding, signals, tokens
from aura.checkpointer import Checkpointer
from aura.ema import Average
from aura.errors import OutOfMemory, TrainingFault, UserError
from aura.models import gpt
from aura.session import Session
from aura.shards import ShardWriter
from aura.sync import Exact
from tests.support import ROOT, Process

CONFIG = gpt.GPTConfig(vocab_size=64, seq_len=8, n_layer=1, n_head=2, n_embd=16, dropout=0.2)
STEPS = 12


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    writer = ShardWriter(folder, "train", 64)
    writer.write(np.random.default_rng(0).integers(0, 64, 1200))
    return [folder / shard["file"] for shard in writer.close()]


def loss_fn(model, batch):
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"), batch[:, 1:].numel()


class Run:
    """One run in a folder; `spoil` gives the calls of the loss (from 1) that are NaN."""

    def __init__(self, folder, shards, *, batch=4, accum=2, spoil=(), signal_at=None, precision="fp32", dropout=0.2,
                 ema=0.0, **policy):
        self.folder, self.calls, self.spoil, self.signal_at = folder, 0, spoil, signal_at
        self.model = gpt.GPT(gpt.GPTConfig(**{**CONFIG.__dict__, "dropout": dropout})).init_weights(0)
        self.optimizer = optim.adamw(self.model, 1e-2, 0.1)
        self.average, self.begun = Average(self.model, ema), []
        self.loader = tokens.TokenLoader(shards, 8, batch, vocab_size=64, seed=7, grad_accum=accum)
        self.precision = loop.Precision(precision, torch.device("cpu"))
        self.reporter = report.Reporter(folder, True, STEPS)
        self.keeper = Checkpointer(folder, Session(), keep=5)
        self.policy = loop.Policy(**{"max_steps": STEPS, "micro_tokens": batch * 8, "grad_accum": accum,
                                     "log_interval": 1, "checkpoint_freq": 4, "seed": 5, **policy})

    def loss(self, model, batch):
        self.calls += 1
        if self.calls == self.signal_at:
            os.kill(os.getpid(), signal.SIGTERM)
        loss, count = loss_fn(model, batch)
        return (loss * float("nan") if self.calls in self.spoil else loss), count

    def fresh(self):
        return loop.Run(self.model, self.optimizer, self.precision, self.loader, self.average, Exact(Session()))

    def restore(self, state):
        run = self.fresh()
        run.restore(state)
        return run

    def go(self, resume=False, run=None, **more):
        run = run or (self.restore(self.keeper.load("auto")) if resume else self.fresh())
        self.reporter.start(run.progress.step, run.progress.logged, again=run.progress.owed is not None)
        with self.loader:
            stopped = loop.train(
                self.model, run, self.loss, lambda step: 1e-2 / (1 + step), self.keeper, self.reporter, self.policy,
                Session(), begin_step=self.begun.append, reinitialise=lambda: self.model.init_weights(0), **more)
        self.result = run.progress, stopped
        self.reporter.close()
        return self

    def losses(self):
        return [row["loss"] for row in report.read_table(self.folder / "train.csv")]


def folder(tmp_path, name):
    (tmp_path / name).mkdir()
    return tmp_path / name


@pytest.mark.parametrize("accum", [1, 3])
def test_products_are_added_up_in_float32(tmp_path, shards, monkeypatch, accum):
    """On devices that can: with the same losses but for rounding, and no copy of a weight beside the optimiser."""
    steps = {"shards": shards, "accum": accum, "precision": "bf16", "dropout": 0.0, "max_steps": 4}
    plainly = [float(loss) for loss in Run(folder(tmp_path, "a"), **steps).go().losses()]
    monkeypatch.setattr(products, "DEVICES", ("cpu",))
    run, of, copied, stepped = Run(folder(tmp_path, "b"), **steps), products._Copies.of, [], []
    monkeypatch.setattr(products._Copies, "of", lambda *asked: copied.append(products._adds) or of(*asked))
    run.optimizer.register_step_pre_hook(lambda *_: stepped.append(products._copies))
    assert [float(loss) for loss in run.go().losses()] == pytest.approx(plainly, rel=2e-3)
    assert copied and all(copied) and stepped == [None] * 4


def same_weights(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.model.parameters(), b.model.parameters(), strict=True))


@pytest.mark.parametrize("signal_at", [1, 7, 16])
def test_interrupted_and_resumed_equals_uninterrupted_bit_for_bit(tmp_path, shards, signal_at):
    whole = Run(folder(tmp_path, "a"), shards).go()
    assert whole.result[1] == 0 and len(whole.losses()) == STEPS
    cut = Run(folder(tmp_path, "b"), shards, signal_at=signal_at).go()
    assert cut.result[1] == signal.SIGTERM and cut.result[0].step == (signal_at + 1) // 2
    rest = Run(tmp_path / "b", shards).go(resume=True)
    assert rest.losses() == whole.losses()
    assert same_weights(rest, whole)


def test_resume_after_a_hard_kill_drops_the_rows_after_the_checkpoint(tmp_path, shards):
    whole = Run(folder(tmp_path, "a"), shards).go()
    (tmp_path / "a" / "ckpt-00000012.pt").unlink()
    again = Run(tmp_path / "a", shards).go(resume=True)
    assert again.losses() == whole.losses() and same_weights(again, whole)


def test_rows_are_on_the_disk_before_the_checkpoint_that_tells_of_them(tmp_path, shards, monkeypatch):
    synced, sync = [], os.fsync

    def noted(descriptor):
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    run = Run(tmp_path, shards)
    monkeypatch.setattr(os, "fsync", noted)
    run.go()
    after = synced[synced.index("train.csv"):]  # the table that it begins with is written under another name
    order = [name for name in after if name == "train.csv" or name.startswith(".ckpt-")]
    assert order[::2] == ["train.csv"] * 3 and len(order) == 6, synced


SECOND_CTRL_C = """
import time
from aura.signals import orderly_stop
with orderly_stop(tells=lambda: True):
    print("listo", flush=True)
    while True:
        try:
            time.sleep(100)  # as deaf as a collective that waits for a machine that is gone
        except BaseException:
            pass
"""


def test_a_second_ctrl_c_leaves_at_once(tmp_path):
    (tmp_path / "deaf.py").write_text(SECOND_CTRL_C)
    with Process([tmp_path / "deaf.py"], tmp_path) as process:
        process.wait_for("listo")
        for _ in range(2):  # one key press that arrives twice
            process.child.send_signal(signal.SIGINT)
        process.wait_for("Recibida SIGINT: se guarda y se sale en cuanto acabe lo que está en marcha. Espere: otro")
        with pytest.raises(subprocess.TimeoutExpired):
            process.child.wait(0.5)
        for _ in range(20):  # a person presses again and again
            process.child.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.child.wait(1)
                break
        code, output = process.finish()
        assert code == 130 and output.count("Recibida") == 1, output


UNREAD = """
import os, sys, time
from aura.signals import orderly_stop
if sys.argv[1] == "none":
    other = open("other", "w")
    assert other.fileno() == 2
with orderly_stop(tells=lambda: True):
    if sys.argv[1] == "full":
        os.set_blocking(2, False)
        try:
            while os.write(2, bytes(4096)):
                pass
        except BlockingIOError:
            os.set_blocking(2, True)
    elif sys.argv[1] == "closed":
        os.close(2)
    print("listo", flush=True)
    while True:
        time.sleep(100)
"""


@pytest.mark.parametrize("console", ["full", "closed", "none"])
def test_a_console_that_takes_nothing_keeps_nobody_from_leaving(tmp_path, console):
    """Where a process begins without one, its number belongs to another file."""
    (tmp_path / "unread.py").write_text(UNREAD)
    begin = 'exec "$@"' + " 2>&-" * (console == "none")
    with subprocess.Popen(["sh", "-c", begin, "sh", sys.executable, "unread.py", console], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path) as child:
        assert child.stdout.readline() == b"listo\n"
        try:
            for _ in range(20):
                child.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(1)
                    break
            assert child.returncode == 130
        finally:
            child.kill()
    assert console != "none" or (tmp_path / "other").read_text() == ""


def test_a_stop_inside_another_is_that_one(tmp_path, shards):
    before = signal.getsignal(signal.SIGINT)
    with signals.orderly_stop() as request:
        Run(folder(tmp_path, "a"), shards, max_steps=1).go()
        assert signal.getsignal(signal.SIGINT) == request.handle  # a second Ctrl+C is counted on from the first
        with signals.orderly_stop() as inner:
            assert inner is request
    assert signal.getsignal(signal.SIGINT) is before


def test_handlers_are_put_back(tmp_path, shards):
    before = signal.getsignal(signal.SIGTERM)
    Run(folder(tmp_path, "a"), shards, max_steps=1).go()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("asked", ["this rank", "another"])
def test_a_signal_that_comes_again_while_it_leaves_does_not_kill(tmp_path, shards, monkeypatch, asked):
    before = signal.getsignal(signal.SIGTERM)
    if asked == "another":
        advance = Exact.advance
        monkeypatch.setattr(Exact, "advance", lambda *words, **options: [
            replace(known, stop=signal.SIGTERM) for known in advance(*words, **options)])
    try:
        stopped = Run(folder(tmp_path, "a"), shards, signal_at=3 if asked == "this rank" else None).go()
        assert stopped.result[1] == signal.SIGTERM
        assert callable(signal.getsignal(signal.SIGTERM)), "that of before would end this process"
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("steps", [3, STEPS])
def test_a_stop_asked_for_in_an_evaluation_leaves_it_to_the_next_start(tmp_path, shards, steps):
    run, seen = Run(folder(tmp_path, "a"), shards, eval_interval=3, max_steps=steps), []

    def evaluate(request):
        for number in sharding.in_step(range(1000), Session(), request):
            seen.append(number)
            if number == 5:
                os.kill(os.getpid(), signal.SIGTERM)
        return {"val_loss": 0.0}

    progress, stopped = run.go(evaluate=evaluate).result
    assert stopped == signal.SIGTERM and progress.step == 3 and 6 <= len(seen) < 16
    assert run.keeper.load("auto")["progress"]["step"] == 3
    before = report.read_table(tmp_path / "a" / "train.csv")
    assert [row["val_loss"] for row in before] == ["", "", ""]
    words, other = {"eval_interval": 3, "max_steps": steps}, {"evaluate": lambda request: {"val_loss": 0.5}}
    whole = Run(folder(tmp_path, "b"), shards, **words).go(**other)
    for _ in range(2):  # a checkpoint without an evaluation may be resumed twice
        rest = Run(tmp_path / "a", shards, **words).go(resume=True, **other)
        assert rest.result[1] == 0 and rest.keeper.load("auto")["progress"]["owed"] is None
        rows, all_rows = (report.read_table(tmp_path / name / "train.csv") for name in "ab")
        for name in ("step", "loss", "val_loss", "lr", "grad_norm", "tokens", "epoch"):
            assert [row[name] for row in rows] == [row[name] for row in all_rows]
        assert rows[:3] == [*before[:2], {**before[2], "val_loss": "0.5"}]
        for path in (tmp_path / "a").glob("ckpt-*.pt"):
            if path.name != "ckpt-00000003.pt":
                path.unlink()
    assert same_weights(rest, whole)


def test_what_a_rank_alone_knows_is_asked_for_while_the_module_holds_its_own_weights(tmp_path, shards, monkeypatch):
    """Of the checkpoint with which an evaluation ends that an earlier stop had left, too."""
    holds, asked = ["its own"], []

    @contextlib.contextmanager
    def agreed(self):
        holds.append("agreed")
        yield
        holds.pop()

    monkeypatch.setattr(Exact, "agreed", agreed)
    monkeypatch.setattr(Exact, "own_state", lambda self: asked.append(holds[-1]))

    def stop(request):
        os.kill(os.getpid(), signal.SIGTERM)
        return list(sharding.in_step(range(1000), Session(), request)) and {}

    cut = Run(folder(tmp_path, "a"), shards, max_steps=3).go(evaluate=stop)
    assert cut.result[1] == signal.SIGTERM and asked == ["its own"]
    Run(tmp_path / "a", shards, max_steps=3).go(resume=True, evaluate=lambda request: {"val_loss": 0.5})
    assert asked == ["its own"] * 2


def test_what_is_asked_for_now_wins_over_what_was_saved(tmp_path, shards):
    saved = Run(folder(tmp_path, "a"), shards, max_steps=4).go()
    again = Run(tmp_path / "a", shards)
    again.optimizer = optim.adamw(again.model, 1e-2, 0.7)
    again.restore(again.keeper.load("auto"))
    assert [group["weight_decay"] for group in again.optimizer.param_groups] == [0.7, 0.0]
    assert same_weights(saved, again) and len(again.optimizer.state) == len(saved.optimizer.state)
    again.loader.close()


def test_accumulation_equals_one_large_batch(tmp_path, shards):
    large = Run(folder(tmp_path, "a"), shards, batch=8, accum=1, dropout=0.0).go()
    small = Run(folder(tmp_path, "b"), shards, batch=2, accum=4, dropout=0.0).go()
    for a, b in zip(large.losses(), small.losses(), strict=True):
        assert float(a) == pytest.approx(float(b), abs=1e-5)


def test_all_time_counts(tmp_path, shards, monkeypatch):
    """The time for a sample too, which belongs to no step: it is paid for all the same."""
    real, spent = time.perf_counter, [0.0]
    monkeypatch.setattr(loop.time, "perf_counter", lambda: real() + sum(spent))
    run = Run(folder(tmp_path, "a"), shards).go(sample=lambda step, request: spent.append(100.0))
    assert 100 <= run.keeper.load("auto")["progress"]["seconds"] < 200 and len(spent) == 2


@pytest.mark.parametrize("cut", [1, 3])
def test_samples_are_of_the_ends_of_epochs_and_none_is_lost(tmp_path, shards, cut):
    """Though a stop in the evaluation before it, in the last of all too, leaves the sample to the next start."""
    seen, asked = [], []

    def evaluate(request):
        asked.append(request)
        if len(asked) == cut:
            os.kill(os.getpid(), signal.SIGTERM)
            raise signals.Abandoned
        return {"val_loss": 1.0}

    def go(**more):
        return Run(tmp_path, shards, max_steps=38, checkpoint_freq=0).go(
            evaluate=evaluate, sample=lambda step, request: seen.append(step), **more)

    assert go().result[1] == signal.SIGTERM and seen == [18, 36, 38][:cut - 1]
    assert go(resume=True).result[1] == 0 and seen == [18, 36, 38]


def test_the_mean_of_an_epoch_is_of_that_epoch(tmp_path, shards):
    """Also where a larger batch leaves out what was left of the one before."""
    run = Run(folder(tmp_path, "a"), shards, batch=2, max_steps=36, checkpoint_freq=0).go()  # 144 windows of 149
    assert run.result[0].epoch_tokens
    larger = Run(tmp_path / "a", shards, batch=8, max_steps=38).go(resume=True)
    assert larger.loader.epoch == 1 and larger.result[0].epoch_tokens == 2 * 16 * 8


@pytest.mark.parametrize("call, step", [(1, 1), (3, 2)])
def test_nan_before_any_checkpoint_reinitialises_and_lowers_the_rate(tmp_path, shards, call, step):
    run = Run(folder(tmp_path, "a"), shards, spoil={call}).go()
    events = (tmp_path / "a" / "events.log").read_text()
    assert f"paso {step}" in events and "se reinician los pesos" in events
    # Won back once there was no fault from a checkpoint to the next, here from 4 to 8.
    rates = [float(row["lr"]) * int(row["step"]) for row in report.read_table(tmp_path / "a" / "train.csv")]
    assert rates[step:] == pytest.approx([5e-3] * (8 - step) + [1e-2] * (STEPS - 8)) and "paso 8: sin más" in events
    assert run.result[0].lr_scale == 1.0 and run.result[0].step == STEPS
    assert all(torch.isfinite(p).all() for p in run.model.parameters())
    assert {state["step"].item() for state in run.optimizer.state.values()} == {STEPS - step}, "moments begin anew too"


def test_nan_at_the_end_before_any_checkpoint_is_a_fault_and_no_model_of_fresh_weights(tmp_path, shards):
    with pytest.raises(TrainingFault, match="no es finito en el paso 2 "):
        Run(folder(tmp_path, "a"), shards, spoil={1, 3}, max_steps=2, checkpoint_freq=0).go()
    assert not list((tmp_path / "a").glob("*.pt"))


@pytest.mark.parametrize("steps, kept", [((5,), False), ((6,), True), ((9, 10), True), ((2, 6), False)])
def test_nan_past_the_middle_before_any_checkpoint_keeps_what_has_been_learnt(tmp_path, shards, steps, kept):
    """Nobody wants a model begun anew with fewer steps left than this one has had, since it was itself begun anew."""
    how = {"max_steps": 10, "checkpoint_freq": 0, "ema": 0.5, "spoil": {2 * step for step in steps}}
    run = Run(folder(tmp_path, "a"), shards, **how).go()
    skipped = Run(folder(tmp_path, "b"), shards, nan_policy="skip", **how).go()
    assert same_weights(run, skipped) == kept and run.result[0].lr_scale == (1.0 if kept else 0.5 ** len(steps))
    assert ("se salta este paso" in (tmp_path / "a" / "events.log").read_text()) == kept


def test_nans_past_the_middle_before_any_checkpoint_save_what_has_been_learnt_before_they_end_the_run(tmp_path, shards):
    with pytest.raises(TrainingFault, match="por 3.ª vez sin avanzar.*; último punto de control: .*ckpt-00000009.pt"):
        Run(folder(tmp_path, "a"), shards, spoil={14, 16, 18}, max_steps=10, checkpoint_freq=0).go()
    assert (tmp_path / "a" / "ckpt-00000009.pt").exists()


def test_nan_at_the_end_keeps_what_has_been_learnt_since_the_last_checkpoint(tmp_path, shards):
    restarted, skipped = (Run(folder(tmp_path, policy), shards, spoil={2 * STEPS}, nan_policy=policy).go()
                          for policy in ("restart", "skip"))
    assert same_weights(restarted, skipped) and restarted.result[0].lr_scale == 1.0
    assert "se salta este paso" in (tmp_path / "restart" / "events.log").read_text()


def test_nan_after_a_checkpoint_restores_it(tmp_path, shards):
    run = Run(folder(tmp_path, "a"), shards, spoil={13}).go()
    assert "ckpt-00000004.pt" in (tmp_path / "a" / "events.log").read_text()
    assert run.result[0].step == STEPS and run.losses()[6] == "nan"


def test_a_nan_after_going_on_from_elsewhere_goes_back_there_with_what_is_asked_now(tmp_path, shards):
    Run(folder(tmp_path, "old"), shards, max_steps=4).go()
    Run(folder(tmp_path, "new"), shards).go()  # of another way, further
    again = Run(tmp_path / "new", shards, spoil={1}, max_steps=7, checkpoint_freq=0)
    again.optimizer = optim.adamw(again.model, 1e-2, 0.7, betas=(0.9, 0.5))
    state = again.keeper.load(str(tmp_path / "old" / "ckpt-00000004.pt"))
    again.go(run=again.restore(state))
    assert f"se restauran los pesos de {tmp_path}/old/ckpt-00000004.pt" in (tmp_path / "new/events.log").read_text()
    assert [(group["weight_decay"], group["betas"]) for group in again.optimizer.param_groups] == [
        (0.7, (0.9, 0.5)), (0.0, (0.9, 0.5))]


def test_a_nan_does_not_spoil_the_mean_of_its_epoch(tmp_path, shards):
    Run(folder(tmp_path, "a"), shards, spoil={3}, nan_policy="skip", batch=25, max_steps=6).go()
    losses = [[float(row[name]) for row in report.read_table(tmp_path / "a" / "train.csv") if row[name]]
              for name in ("loss", "epoch_loss")]
    first, nan, *others = losses[0]  # two steps an epoch
    means = [first, *((a + b) / 2 for a, b in zip(others[::2], others[1::2], strict=True))]
    assert math.isnan(nan) and losses[1] == pytest.approx(means) and len(means) == 3


def test_a_nan_takes_the_average_back_with_the_weights(tmp_path, shards):
    run, seen = Run(folder(tmp_path, "a"), shards, ema=0.5, spoil={11}, max_steps=7, eval_interval=6), []

    def evaluate(request):
        seen.append(weights_of(run.model))
        return {"val_loss": 0.0}

    run.go(evaluate=evaluate)
    saved = torch.load(tmp_path / "a" / "ckpt-00000004.pt", weights_only=True)["ema"]
    assert same(seen[0], saved.values()) and not same(seen[1], saved.values())


def test_nan_with_skip_keeps_the_weights(tmp_path, shards):
    run = Run(folder(tmp_path, "a"), shards, spoil={13, 20}, nan_policy="skip").go()
    assert run.result[0].lr_scale == 1.0 and run.result[0].step == STEPS
    assert "se salta" in (tmp_path / "a" / "events.log").read_text()


@pytest.mark.parametrize("policy, spoil, last", [
    ("stop", {11}, 4), ("restart", range(11, 99), 4), ("skip", range(9, 99), 7)])
def test_nans_that_do_not_end_stop_the_run_and_name_the_checkpoint(tmp_path, shards, policy, spoil, last):
    run = Run(folder(tmp_path, "a"), shards, spoil=set(spoil), nan_policy=policy)
    with pytest.raises(TrainingFault, match=rf"paso \d+.*--lr.*ckpt-0000000{last}\.pt"):
        run.go()
    assert run.keeper.load("auto")["progress"]["step"] == last


def test_weights_that_are_no_numbers_are_not_saved_when_a_run_gives_up(tmp_path, shards):
    run = Run(folder(tmp_path, "a"), shards, nan_policy="skip")

    def spoilt(model, batch):
        if run.begun[-1] >= 5:
            next(model.parameters()).data.fill_(math.nan)
        return loss_fn(model, batch)

    run.loss = spoilt
    with pytest.raises(TrainingFault, match=r"3\.ª vez.*ckpt-00000004\.pt"):
        run.go()


def spoil_weights(run, steps):
    """Leave weights that are no numbers behind in the steps of these 0-based numbers."""
    def spoil(*_):
        if run.begun[-1] in steps:
            next(run.model.parameters()).data[0, 0] = math.nan

    run.optimizer.register_step_post_hook(spoil)


def test_weights_that_are_no_numbers_are_no_checkpoint_and_no_result(tmp_path, shards):
    run = Run(folder(tmp_path, "a"), shards)
    spoil_weights(run, {7})
    run.go()
    log = (tmp_path / "a" / "events.log").read_text()
    assert "paso 8: los pesos no son finitos: no se guarda este punto de control" in log
    assert "paso 9" in log and "se restauran los pesos de " in log and run.result[0].step == STEPS
    assert {path.name for path in (tmp_path / "a").glob("ckpt-*")} == {"ckpt-00000004.pt", "ckpt-00000012.pt"}
    assert all(weight.isfinite().all() for weight in run.model.parameters())

    last = Run(folder(tmp_path, "b"), shards)
    spoil_weights(last, {STEPS - 1})
    with pytest.raises(TrainingFault, match=r"tras el último paso, los pesos.*--lr menor.*ckpt-00000008\.pt"):
        last.go()
    again = Run(tmp_path / "b", shards).go(resume=True)  # from the last good one
    assert again.result[0].step == STEPS and same_weights(again, Run(folder(tmp_path, "c"), shards).go())


def test_what_one_rank_finds_of_its_weights_all_ranks_act_on(tmp_path, shards, monkeypatch):
    run, dist, other = Run(folder(tmp_path, "a"), shards), Session(), [0]
    monkeypatch.setattr(dist, "sum", lambda values: [values[0] + other[0]])
    for other[0], kept in ((0, True), (1, False)):
        assert loop._worth_keeping(run.fresh(), {}, run.policy, run.reporter, dist) is kept
    run.loader.close()


@pytest.mark.parametrize("found", [math.nan, math.inf])
def test_what_an_evaluation_finds_to_be_no_number_is_no_checkpoint_and_no_result(tmp_path, shards, found):
    values = iter((1.0, found, 2.0))

    def evaluate(request):
        return {"val_loss": next(values)}

    Run(folder(tmp_path, "a"), shards, eval_interval=4).go(evaluate=evaluate)
    assert {path.name for path in (tmp_path / "a").glob("ckpt-*")} == {"ckpt-00000004.pt", "ckpt-00000012.pt"}
    assert f"paso 8: val_loss vale {found:g}: no se guarda" in (tmp_path / "a" / "events.log").read_text()
    with pytest.raises(TrainingFault, match=f"tras el último paso, val_loss vale {found:g}"):
        Run(folder(tmp_path, "b"), shards).go(evaluate=lambda request: {"val_loss": found})


@pytest.mark.parametrize(("policy", "told"), [("restart", True), ("skip", False)])
def test_a_checkpoint_whose_weights_give_no_number_is_said_to_be_one_to_leave(tmp_path, shards, policy, told):
    bad = Run(folder(tmp_path, "a"), shards, max_steps=8).go()
    weights = [weight.detach().clone() for weight in bad.model.parameters()]
    run = Run(tmp_path / "a", shards, checkpoint_freq=0, nan_policy=policy)
    loss = run.loss

    def lost(model, batch):
        found, count = loss(model, batch)
        return (found * math.nan if all(map(torch.equal, model.parameters(), weights)) else found), count

    run.loss = lost
    with pytest.raises(TrainingFault, match=r"paso 11.*3\.ª vez.*revise los datos") as fault:
        run.go(resume=True)
    assert ("o siga desde otro punto de control, o de cero, con --resume; " in str(fault.value)) == told


def test_an_owed_evaluation_that_finds_no_number_hands_nothing_over(tmp_path, shards):
    def abandon(request):
        request.number = signal.SIGTERM
        raise signals.Abandoned

    Run(folder(tmp_path, "a"), shards).go(evaluate=abandon)
    with pytest.raises(TrainingFault, match="tras el último paso, val_loss vale nan"):
        Run(tmp_path / "a", shards).go(resume=True, evaluate=lambda request: {"val_loss": math.nan})


def test_nans_far_apart_are_skipped_to_the_end(tmp_path, shards):
    far = {loop.GOOD_STEPS * time + time for time in range(1, 5)}
    run = Run(folder(tmp_path, "a"), shards, spoil=far, accum=1, nan_policy="skip", max_steps=max(far) + 1,
              checkpoint_freq=0, log_interval=0).go()
    assert run.result[0].step == max(far) + 1 and run.result[0].faults == 0
    near = {loop.GOOD_STEPS * time for time in range(1, 4)}
    with pytest.raises(TrainingFault, match="3.ª vez"):
        Run(folder(tmp_path, "b"), shards, spoil=near, accum=1, nan_policy="skip", max_steps=max(near) + 1,
            checkpoint_freq=0, log_interval=0).go()


@pytest.mark.parametrize("lost_in", ["agreement", "evaluation", "next agreement"])
def test_what_others_save_when_a_rank_is_lost_owes_the_evaluation_that_was_not_made(tmp_path, shards, monkeypatch,
                                                                                   lost_in):
    run, advance = Run(folder(tmp_path, "a"), shards, eval_interval=3), Exact.advance
    state, lost_at = run.fresh(), {"agreement": 3, "next agreement": 4}.get(lost_in)

    def lose(step=None):
        if step == lost_at:
            raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(Exact, "advance", lambda self, step, *words, **options:
                        lose(step) or advance(self, step, *words, **options))
    with pytest.raises(RuntimeError, match="closed by peer"):
        run.go(run=state, evaluate=lambda request: lose() or {"val_loss": 0.5})
    assert state.progress.step == (lost_at or 3)
    owed = state.progress.owed
    assert owed == {} if lost_in == "agreement" else owed is None if lost_at else owed["loss"] == state.progress.loss


@pytest.mark.parametrize("spoilt, retreats", [(2 * STEPS, 0), (2 * STEPS - 2, 1)])
def test_a_nan_in_the_last_step_takes_nothing_from_who_agrees_seldom(tmp_path, shards, monkeypatch, spoilt, retreats):
    run, seen = Run(folder(tmp_path, "a"), shards, spoil={spoilt}), []
    monkeypatch.setattr(Exact, "weights", list(run.model.parameters()))
    monkeypatch.setattr(Exact, "retreat", lambda self: seen.append(1))
    assert run.go().result[0].step == STEPS and len(seen) == retreats
    told = "se vuelve allí a los pesos acordados" if retreats else "se salta este paso"
    assert told in (tmp_path / "a" / "events.log").read_text()


def test_all_is_heard_of_before_it_is_told_and_saved_and_nothing_is_under_way_in_the_end(tmp_path, shards, monkeypatch):
    done, advance = [], Exact.advance

    def noted(self, step, *words, settle, **options):
        done.extend([step] * settle)
        return advance(self, step, *words, settle=settle, **options)

    monkeypatch.setattr(Exact, "advance", noted)
    monkeypatch.setattr(Exact, "close", lambda self: done.append("closed"))
    Run(folder(tmp_path, "a"), shards, eval_interval=6).go(evaluate=lambda request: {"val_loss": 0.5})
    assert done == [1, 4, 6, 8, 12, "closed"]


def test_an_owed_evaluation_that_is_cut_short_again_leaves_the_row_as_it_was():
    def abandon(request):
        raise loop.Abandoned

    @contextlib.contextmanager
    def as_delivered():
        held.append("average")
        yield
        held.clear()

    held, progress, request = [], loop.Progress(step=3, owed={"loss": 1.0}), SimpleNamespace(number=15)
    run = SimpleNamespace(progress=progress, as_delivered=as_delivered)
    reporter = SimpleNamespace(log=lambda step, **row: rows.append(row))
    for evaluate, stop in ((abandon, 15), (lambda request: {"val_loss": 0.5 * len(held)}, 0)):
        rows = []
        clock = loop.Clock(Session())
        assert loop._evaluate_owed(run, loop.Policy(9, 1), evaluate, None, request, None, reporter, clock,
                                   Session()) == stop
        assert rows == ([] if stop else [{"loss": 1.0, "val_loss": 0.5}]) and (progress.owed is None) == (not stop)


@pytest.mark.parametrize("apart", [loop.GOOD_STEPS + 1, loop.GOOD_STEPS])
def test_who_goes_back_to_agreed_weights_needs_no_checkpoint_to_count_anew(apart):
    run = SimpleNamespace(progress=loop.Progress(), sync=SimpleNamespace(weights=[torch.zeros(1)]))
    policy, keeper = loop.Policy(max_steps=9 * apart, micro_tokens=1), SimpleNamespace(has_any=lambda: False)
    reporter = SimpleNamespace(event=lambda step, text: events.append(step))
    events, steps = [], [apart * time for time in range(1, 4)]

    def recover():
        for run.progress.step in steps:
            known = SimpleNamespace(step=run.progress.step, trouble="pérdida nan")
            assert loop._recover(run, known, policy, keeper, reporter, Session(), None) is None

    if apart > loop.GOOD_STEPS:
        recover()
    else:
        with pytest.raises(TrainingFault, match="por 3.ª vez"):
            recover()
    assert events == steps, "the last as well, where it ends the run"


def test_a_fault_in_the_step_after_which_one_was_acted_on_still_had_the_rate_from_before():
    said, progress = [], loop.Progress(step=9)
    run = SimpleNamespace(progress=progress, sync=SimpleNamespace(weights=[torch.zeros(1)]))
    policy, reporter = loop.Policy(99, 1), SimpleNamespace(event=lambda *words: said.append(words))
    for progress.step, step, rate in ((9, 7, 0.5), (11, 9, 0.5), (12, 10, 0.25)):
        known = SimpleNamespace(step=step, trouble="pérdida nan")
        loop._recover(run, known, policy, SimpleNamespace(has_any=lambda: True), reporter, Session(), None)
        assert progress.lr_scale == rate and said[-1][0] == step
    assert ["no cuenta otra vez" in text for _, text in said] == [False, True, False]


def test_endless_nans_stop_even_when_every_step_saves(tmp_path, shards):
    with pytest.raises(TrainingFault, match="3.ª vez"):
        Run(folder(tmp_path, "a"), shards, spoil=set(range(5, 99)), checkpoint_freq=1).go()


def test_a_rate_that_was_lowered_more_than_once_comes_back_by_one_doubling_at_a_time():
    told, progress = [], loop.Progress(lr_scale=0.25, faults=1)
    reporter = SimpleNamespace(event=lambda step, text: told.append(text.rsplit(" ", 1)[1]))
    scales = []
    for _ in range(4):  # checkpoints; there were faults before the first
        loop._win_back_rate(progress, reporter)
        scales.append(progress.lr_scale)
    assert scales == [0.25, 0.5, 1.0, 1.0] and told == ["0.5", "1"]


def test_data_that_go_bad_in_the_middle_name_the_checkpoint(tmp_path, shards):
    run = Run(folder(tmp_path, "a"), shards)
    batches = [run.loader.next().clone() for _ in range(9)]

    class Spoilt:
        epoch, samples, windows, epoch_ended = 0, 5, math.inf, False  # a stream, whose end nobody knows

        def next(self):
            if not batches:
                raise UserError("train-00000.bin: token fuera del vocabulario.")
            return batches.pop()

        def state_dict(self):
            return {}

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    run.loader.close()
    run.loader = Spoilt()
    with pytest.raises(TrainingFault, match=r"train-00000\.bin.*vocabulario; .*ckpt-00000004\.pt") as fault:
        run.go()
    assert fault.value.reason == "train-00000.bin: token fuera del vocabulario"  # others have a checkpoint of their own
    assert {float(row["epoch"]) for row in report.read_table(tmp_path / "a" / "train.csv")} == {0.0}


@pytest.mark.parametrize("problem, whose", [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\n20 MiB"), "la GPU"),
    (torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"), "la GPU"),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"), "la máquina"),
    (RuntimeError("could not create a primitive"), "la máquina"),
    (MemoryError(), "la máquina")], ids=["GPU", "context", "CPU", "oneDNN", "numpy"])
def test_memory_that_is_not_enough_is_a_fault_with_a_way_out(tmp_path, shards, problem, whose):
    run = Run(folder(tmp_path, "a"), shards)

    def greedy(model, batch):
        if len(run.begun) == 7:
            raise problem
        return loss_fn(model, batch)

    run.loss = greedy
    with pytest.raises(OutOfMemory, match=f"{whose}: .*--batch-size .*--grad-accum.*ckpt-00000004.pt$") as fault:
        run.go()
    assert fault.value.exit_code == 3 and "\n" not in str(fault.value)


def test_what_could_not_be_saved_in_the_background_ends_the_run_at_once(tmp_path, shards):
    run = Run(folder(tmp_path, "a"), shards, max_steps=8, checkpoint_freq=0)
    run.begun = SimpleNamespace(append=lambda step: step != 2 or setattr(run.keeper, "failure", TrainingFault("lleno")))
    state = run.fresh()
    with pytest.raises(TrainingFault, match="^lleno; todavía no había"):
        run.go(run=state)
    assert state.progress.step == 3, "not only with the next checkpoint"


def test_the_time_that_training_stood_still_is_told_once(tmp_path, shards, monkeypatch):
    run = Run(folder(tmp_path, "a"), shards, max_steps=8, log_interval=4, checkpoint_freq=1)
    monkeypatch.setattr(run.keeper, "save", lambda *_, **__: 2.0)
    run.go()
    rows = report.read_table(tmp_path / "a" / "train.csv")
    assert [(row["step"], float(row["stall_s"])) for row in rows] == [("1", 0.0), ("4", 6.0), ("8", 8.0)]


@pytest.mark.parametrize("problem, kind, said", [
    (OSError(errno.ENOSPC, "", "nota.txt"), TrainingFault, r"nota\.txt \(no queda espacio .*; .*ckpt-00000004\.pt$"),
    (RuntimeError("shapes differ"), RuntimeError, "^shapes differ$")])
def test_a_disk_that_fails_is_a_fault_and_a_mistake_of_ours_stays_one(tmp_path, shards, problem, kind, said):
    run = Run(folder(tmp_path, "a"), shards)

    def fail(step):
        if step == 6:
            raise problem

    run.begun = SimpleNamespace(append=fail)
    with pytest.raises(kind, match=said) as raised:
        run.go()
    (line,) = (tmp_path / "a" / "events.log").read_text(encoding="utf-8").splitlines()
    assert line.endswith(f" paso 6: se interrumpe: {'RuntimeError: ' * (kind is RuntimeError)}{raised.value}"), line


@pytest.mark.parametrize("precision, scale, told", [
    ("fp16", 2.0**16, False), ("fp16", loop.SMALLEST_LOSS_SCALE / 2, True), ("bf16", 1, True), ("fp32", 1, True)])
def test_a_gradient_that_is_not_finite_is_no_trouble_only_where_a_scale_explains_it(tmp_path, shards, precision, scale,
                                                                                    told):
    run = Run(folder(tmp_path, "a"), shards, precision=precision)
    run.precision.scaler = torch.amp.GradScaler("cpu", scale, enabled=precision == "fp16")

    def overflowing(model, batch):
        loss, count = loss_fn(model, batch)
        if len(run.begun) == 3:
            loss.register_hook(lambda gradient: gradient * math.inf)
        return loss, count

    run.loss = overflowing
    run.go()
    assert all(math.isfinite(float(loss)) for loss in run.losses())
    assert all(torch.isfinite(p).all() for p in run.model.parameters())
    assert (tmp_path / "a" / "events.log").exists() == told
    assert run.precision.scaler.get_scale() == (scale / 2 if precision == "fp16" else 1)


def test_fp16_scaler_survives_a_resume(tmp_path, shards):
    whole = Run(folder(tmp_path, "a"), shards, precision="fp16").go()
    Run(folder(tmp_path, "b"), shards, precision="fp16", signal_at=9).go()
    rest = Run(tmp_path / "b", shards, precision="fp16").go(resume=True)
    assert rest.losses() == whole.losses() and same_weights(rest, whole)
    assert rest.precision.scaler.state_dict() == whole.precision.scaler.state_dict(), "its steps since the last change"


def test_bf16_follows_fp32(tmp_path, shards):
    exact = Run(folder(tmp_path, "a"), shards).go().losses()
    rounded = Run(folder(tmp_path, "b"), shards, precision="bf16").go().losses()
    assert rounded != exact
    assert [float(x) for x in rounded] == pytest.approx([float(x) for x in exact], abs=2e-2)


def test_loss_is_normalised_by_the_tokens_that_count(tmp_path, shards):
    """Micro-batches with different numbers of counting tokens weigh by token, not by micro-batch."""
    run = Run(folder(tmp_path, "a"), shards, batch=2, accum=2, dropout=0.0, max_steps=1, grad_clip=0.0)
    counts = iter([3, 16])

    def ragged(model, batch):
        keep = next(counts)
        logits, targets = model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
        return F.cross_entropy(logits[:keep], targets[:keep], reduction="sum"), keep

    run.loss = ragged
    run.go()
    twin = gpt.GPT(gpt.GPTConfig(**{**CONFIG.__dict__, "dropout": 0.0})).init_weights(0)
    total = 0.0
    with tokens.TokenLoader(shards, 8, 2, vocab_size=64, seed=7, grad_accum=2) as loader:
        for keep in (3, 16):
            batch = loader.next()
            logits, targets = twin(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
            total = total + F.cross_entropy(logits[:keep], targets[:keep], reduction="sum")
    (total / 19).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in twin.parameters()])
    (row,) = report.read_table(tmp_path / "a" / "train.csv")
    assert float(row["loss"]) == pytest.approx(total.item() / 19, abs=1e-6)
    assert float(row["grad_norm"]) == pytest.approx(norm.item(), rel=1e-5)


@pytest.mark.parametrize("limit", [0.0, 0.01, 100.0])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_gradients_longer_than_the_limit_are_cut_to_it_and_no_others(tmp_path, shards, precision, limit):
    run = Run(folder(tmp_path, "a"), shards, max_steps=1, grad_clip=limit, precision=precision)
    run.optimizer, before = torch.optim.SGD(run.model.parameters(), 1.0), weights_of(run.model)
    run.go()
    moved = torch.nn.utils.get_total_norm([new - old for new, old in zip(weights_of(run.model), before, strict=True)])
    (row,) = report.read_table(tmp_path / "a" / "train.csv")
    norm = float(row["grad_norm"])
    assert 0.01 < norm < 100 and moved.item() == pytest.approx(1e-2 * min(norm, limit or norm), rel=1e-3)


def test_each_step_is_announced_before_it_begins(tmp_path, shards):
    run = Run(folder(tmp_path, "a"), shards, accum=1, signal_at=7).go()
    assert run.begun == list(range(7))
    assert Run(tmp_path / "a", shards, accum=1).go(resume=True).begun == list(range(7, STEPS))


def weights_of(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_the_average_follows_its_formula_and_is_what_is_evaluated(tmp_path, shards):
    run = Run(folder(tmp_path, "a"), shards, ema=0.5, eval_interval=1, spoil={7}, nan_policy="skip")
    expected, seen = weights_of(run.model), []

    def evaluate(request):
        own, step = run.average.weights.values(), len(seen) + 1  # while the model holds the average
        kept = min(0.5, (1 + step) / (10 + step)) if step != 4 else 1.0  # of a step that was skipped it takes nothing
        expected[:] = [kept * a + (1 - kept) * b for a, b in zip(expected, own, strict=True)]
        torch.testing.assert_close(weights_of(run.model), expected)
        seen.append(weights_of(run.model))
        return {"val_loss": 0.0}

    run.go(evaluate=evaluate)
    state = run.keeper.load("auto")
    assert len(seen) == STEPS and same(seen[-1], state["ema"].values()) and not same(seen[-1], run.model.parameters())
    assert same(run.model.parameters(), state["model"].values())


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_an_evaluation_that_fails_leaves_the_weights(tmp_path, shards):
    run = Run(folder(tmp_path, "a"), shards, ema=0.9)
    run.average.load({name: torch.full_like(tensor, 7.0) for name, tensor in run.average.weights.items()})
    before = weights_of(run.model)
    with pytest.raises(ZeroDivisionError), run.average.applied():
        assert all((parameter == 7).all() for parameter in run.model.parameters())
        raise ZeroDivisionError
    assert same(before, run.model.parameters()) and all((t == 7).all() for t in run.average.weights.values())
    run.loader.close()


@pytest.mark.parametrize("signal_at, spoil", [(9, ()), (19, (13,))])
def test_the_average_goes_on_bit_for_bit_and_is_restored_with_the_weights(tmp_path, shards, signal_at, spoil):
    whole = Run(folder(tmp_path, "a"), shards, ema=0.9, spoil=spoil).go()
    Run(folder(tmp_path, "b"), shards, ema=0.9, spoil=spoil, signal_at=signal_at).go()
    rest = Run(tmp_path / "b", shards, ema=0.9).go(resume=True)
    assert same(rest.average.weights.values(), whole.average.weights.values()) and same_weights(rest, whole)
    assert all(torch.isfinite(tensor).all() for tensor in rest.average.weights.values())
    assert not same(rest.average.weights.values(), rest.model.parameters())


def test_an_average_begins_with_the_weights_of_a_checkpoint_without_one(tmp_path, shards):
    Run(folder(tmp_path, "a"), shards, max_steps=4).go()
    run = Run(tmp_path / "a", shards, ema=0.9)
    run.restore(run.keeper.load("auto"))
    assert same(run.average.weights.values(), run.model.parameters())
    run.loader.close()


def test_seeds_of_micro_batches_differ():
    seeds = {loop.micro_seed(seed, step, number) for seed in range(5) for step in range(50) for number in range(5)}
    assert len(seeds) == 1250
