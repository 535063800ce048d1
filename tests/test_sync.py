"""Training by every method of --sync: agreed weights, data order, signals, NaNs, resuming; real groups of processes."""

import contextlib
import io
import itertools
import json
import os
import re
import shutil
import signal
import zipfile
import zlib
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from aura import checkpoint, diloco, distributed, loop, optim, pretrain, start, sync, tokens
from aura.checkpointer import ORIGIN, Checkpointer
from aura.cli import Parser, add_distributed
from aura.ema import Average
from aura.errors import TrainingFault, UserError
from aura.models import gpt
from aura.resume import restore
from aura.session import Session
from aura.shards import ShardWriter
from tests.support import ROOT, Notes, run_ranks
from tests.test_diloco import together
from tests.test_fsdp import newest, next_token_loss, same

CONFIG = gpt.GPTConfig(vocab_size=65, seq_len=8, n_layer=1, n_head=2, n_embd=16, dropout=0.1)
# Fragments leave after the steps 2, 5, 7, 10, 12, 15, 17 and 20, and again; an epoch ends with step 16.
STEPS, EVERY, CUT, WINDOWS, ACCUM = 24, 20, 6, 12, 2
CONSTANTS = {"config": asdict(CONFIG), "tokenizer": torch.zeros(1), "dataset": {"sha256": "x", "name": "libro"}}


class Killed(BaseException):
    """Ends a run as SIGKILL does: nothing is saved, and nobody is told."""


def crc(tensors):
    total = 0
    for tensor in tensors:
        total = zlib.crc32(tensor.detach().contiguous().numpy().tobytes(), total)
    return total


def prepare(folder, name, source):
    """A folder for a run, which goes on from step CUT of another one if `source` names it."""
    (folder / name).mkdir(exist_ok=True)
    for path in (folder / source).rglob(checkpoint.path_of(".", CUT).name) if source else ():
        target = folder / name / path.relative_to(folder / source)
        target.parent.mkdir(exist_ok=True)
        shutil.copy(path, target)


def train(dist, folder, name, method="diloco", *, source=None, every=EVERY, spoil=(), signal_at=None, kill_at=None,
          by=Killed, ema=0.0, label=None, resume="auto", **policy):
    """Train to STEPS, from the newest checkpoint in folder/name if there is one, or that of `resume`, put together as
    pretrain.train does it; what was seen is written to LABEL.RANK.json. spoil, signal_at: (rank, call of the loss, from
    1). kill_at: a call that raises `by` on all ranks."""
    if dist.main:
        prepare(folder, name, source)
    dist.barrier()
    model, notes, output = gpt.GPT(CONFIG).init_weights(0), Notes(), io.StringIO()
    optimizer, precision = optim.adamw(model, 1e-2, 0.1), loop.Precision("fp32", dist.device)
    average, calls = Average(model, ema), itertools.count(1)
    windows, weights, common, seen = [], [], [], []
    keeper = Checkpointer(folder / name, dist, keep=9, constants=CONSTANTS, background=True)
    loader = tokens.TokenLoader([folder / "train-00000.bin"], 8, WINDOWS // ACCUM // dist.world_size, vocab_size=65,
                                seed=7, rank=dist.rank, world_size=dist.world_size, grad_accum=ACCUM)
    args = SimpleNamespace(sync=method, sync_every=every, sync_lr=0.75, sync_momentum=0.85,
                           resume=str(resume), grad_accum=ACCUM)
    policy = loop.Policy(**{"max_steps": STEPS, "micro_tokens": WINDOWS * 8 // ACCUM // dist.world_size,
                            "grad_accum": ACCUM, "log_interval": 1, "checkpoint_freq": CUT, **policy})

    def loss_fn(model, batch):
        call = next(calls)
        if (dist.rank, call) == signal_at:
            os.kill(os.getpid(), signal.SIGTERM)
        if call == kill_at:
            raise by
        windows.extend(zlib.crc32(row.numpy().tobytes()) for row in batch)
        if call % ACCUM == 1:
            weights.append(crc(run.module.parameters()))
            common.append(crc(synced.weights or ()))
        loss, count = next_token_loss(model, batch)
        return loss * (float("nan") if (dist.rank, call) in spoil else 1.0), count

    @torch.no_grad()
    def evaluate(request):
        seen.append([crc(model.parameters()), crc(average.weights.values())])  # the average, and what it is one of
        return {"val_loss": next_token_loss(model.eval(), torch.arange(36).view(4, 9))[0].item()}

    fault = stopped = None
    with loader, contextlib.redirect_stdout(output):
        synced = start.make_sync(args, dist, model, model, policy.max_steps, next_token_loss, precision, None)
        assert synced.method != "diloco" or (synced.outer_lr, synced.outer_momentum) == (0.75, 0.85)
        run = loop.Run(model, optimizer, precision, loader, average, synced)
        restore(args, dist, keeper, run)
        start.synchronise(dist, model, synced)
        with synced.agreed():
            begun = crc(model.parameters())
        try:
            stopped = loop.train(
                synced.wrap(model), run, loss_fn, lambda step: 1e-2 / (1 + step), keeper, notes, policy, dist,
                evaluate=evaluate, reinitialise=lambda: model.init_weights(0))
        except TrainingFault as problem:
            fault = str(problem)
        except Killed:
            pass
    with synced.agreed():
        agreed = crc(model.parameters())
    (folder / f"{label or name}.{dist.rank}.json").write_text(json.dumps({
        "rows": notes.rows, "events": notes.events, "windows": windows, "weights": weights, "common": common,
        "seen": seen, "begun": begun, "agreed": agreed, "local": crc(model.parameters()), "fault": fault,
        "stopped": stopped, "progress": asdict(run.progress), "said": output.getvalue()}))
    dist.barrier()  # what this rank has written another may copy now


def flip(path):
    """Change one bit of the largest record of a file; what fills the gaps between two records means nothing."""
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda record: record.file_size)
    content = bytearray(path.read_bytes())
    content[largest.header_offset + largest.file_size // 2] ^= 16
    path.write_bytes(content)


def two(dist, folder):
    def run(*words, **options):
        train(dist, folder, *words, **options)

    run("ddp", "ddp")
    for method in ("diloco", "fp16"):
        usual = {"method": method, "eval_interval": CUT, "ema": 0.9}
        run(method, **usual)
        run(f"{method} cut", kill_at=17, **usual)
        run(f"{method} killed", source=f"{method} cut", **usual)
        for when, call in (("early", 1), ("late", 13))[method == "fp16":]:
            run(f"{method} {when}", signal_at=(1, call), label=f"{method} stopped {when}", **usual)
            run(f"{method} {when}", **usual)
    if dist.main:
        prepare(folder, "damaged", "diloco cut")
        flip(checkpoint.path_of(folder / "damaged" / "rank-00001", CUT))
    run("damaged")
    run("another run", kill_at=17, label="another run cut")
    if dist.main:
        prepare(folder, "mixed", "diloco cut")
        shutil.copy(checkpoint.path_of(folder / "another run" / "rank-00001", CUT), folder / "mixed" / "rank-00001")
    run("mixed")
    run("another way", source="diloco cut", resume=checkpoint.path_of(folder / "another way", CUT), kill_at=3,
        label="another way cut")
    run("another way")
    run("from ddp", source="ddp")
    run("to ddp", "ddp", source="diloco cut")
    run("other every", source="diloco cut", every=7)
    run("restart", spoil=[(1, 13)])
    run("skip", spoil=[(1, 9)], nan_policy="skip")
    run("stop", spoil=[(1, 19)], nan_policy="stop")
    run("thrice", spoil=[(1, 13), (0, 15), (1, 19), (0, 25)])
    run("fp16 restart", "fp16", spoil=[(1, 15)])
    run("lost", kill_at=17, by=RuntimeError("gloo: Connection closed by peer"))


def three(dist, folder):
    usual = {"eval_interval": CUT, "ema": 0.9}
    train(dist, folder, "on three", source="diloco cut")
    train(dist, folder, "three", **usual)
    train(dist, folder, "three cut", kill_at=17, **usual)
    train(dist, folder, "three killed", source="three cut", **usual)
    train(dist, folder, "three late", signal_at=(2, 13), label="three stopped late", **usual)
    train(dist, folder, "three late", **usual)


def furthest(dist, folder):
    """What three ranks load, each from its own disk; rank 0 prints the step, or None, for each case."""
    def case(name, *disks, signed=None, resume="auto"):
        (folder / name / str(dist.rank)).mkdir(parents=True)
        keeper = Checkpointer(folder / name / str(dist.rank), dist)
        for step, origin in disks[dist.rank]:
            kept = {"origin": origin} if origin else {}
            keeper.save_alone(step, {"w": torch.full((999,), float(step)), "sync": kept})
        if (name, dist.rank) in (("damaged", 2), ("of one disk", 0)):
            flip(checkpoint.path_of(keeper.directory, 9))
        keeper.sign(signed)
        first = str(checkpoint.path_of(keeper.directory, 4))
        state = keeper.load(first if resume == "path" or resume == "rank 0's" and dist.main else "auto")
        step = state and int(state["w"][0])
        assert len(set(dist.gather_objects((step, step and keeper.last)))) == 1
        dist.print(f"{name}: {step}" + " elsewhere" * ("en la máquina del rango" in str(keeper.last)))

    a, b = "a", "b"
    case("further", [(4, a)], [(6, a)], [(9, a), (7, a)])
    case("not further", [(4, a), (9, a)], [(6, a)], [(9, a)])
    case("another run", [(4, a)], [(6, b), (5, a)], [(9, None)])
    case("damaged", [(4, a)], [(6, a)], [(9, a)])
    case("asked for", [(4, a)], [(6, a)], [(9, a)], resume="path")
    case("asked for by rank 0", [(4, a)], [(6, a)], [(9, a)], resume="rank 0's")
    case("none saved", [], [(6, a)], [(9, b)], signed=a)
    case("left", [(4, a)], [(6, a)], [(9, b), (7, b)], signed=b)
    case("no name", [(4, None)], [(6, a)], [(9, b)], signed=b)
    case("nothing known", [], [(6, a)], [(9, b)])
    case("of one disk", [(4, None), (9, None)], [(4, None), (9, None)], [(4, None)])
    case("of two", [(4, None)], [(4, None), (9, None)], [])


def test_the_others_wait_for_a_text_as_long_as_it_takes():
    turns = []
    dist = SimpleNamespace(main=False, sharded=False, run_on_main=turns.append)
    args = SimpleNamespace(sample_prompt="Había una vez", sample_length=9)
    pretrain.make_sample(args, dist, None, SimpleNamespace(encode=lambda text: [1]), None, None)(500, None)
    assert len(turns) == 1


def test_what_a_survivor_has_saved_is_taken_where_it_is_of_the_same_run_and_further(tmp_path):
    lines, notices = [], []
    for line in together(3, furthest, tmp_path)[0].splitlines():
        if "se descarta" not in line:
            (notices if "Si es de este entrenamiento, pare" in line else lines).append(line)
    for notice, text in zip(notices, (r"empieza de cero, .* rango 1, .*, está .*known/1/ckpt-00000006.pt",
                                      r"sigue desde .*/0/ckpt-00000004.pt, .*, está .*two/1/ckpt-00000009.pt"),
                            strict=True):
        assert re.search(text, notice), notice
    assert lines[-12:] == [
        "further: 9 elsewhere", "not further: 9", "another run: 5 elsewhere", "damaged: 6 elsewhere", "asked for: 4",
        "asked for by rank 0: 4", "none saved: 6 elsewhere", "left: 9 elsewhere", "no name: 9 elsewhere",
        "nothing known: None", "of one disk: 4", "of two: 4"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of all runs."""
    folder = tmp_path_factory.mktemp("sync")
    with ShardWriter(folder, "train", 65) as writer:
        writer.write(np.random.default_rng(0).integers(0, 65, 1600))
    together(2, two, folder)
    together(3, three, folder)
    train(Session(), folder, "on one", source="diloco cut")
    return folder


def told(runs, label, size=2):
    """What each rank has seen in a run."""
    return [json.loads((runs / f"{label}.{rank}.json").read_text()) for rank in range(size)]


def column(run, name, after=0):
    return [row[name] for row in run["rows"] if row["step"] > after and name in row]


def stored(runs, name, step):
    return checkpoint.read(checkpoint.path_of(runs / name, step))


def test_validation_average_and_checkpoints_are_of_the_agreed_weights(runs):
    first, second = told(runs, "diloco")
    assert column(first, "val_loss") == column(second, "val_loss") and first["seen"] == second["seen"]
    assert len(first["seen"]) == STEPS // CUT + 1 and len({agreed for _, agreed in first["seen"]}) == STEPS // CUT + 1
    for number, step in enumerate((6, 12, 16, 18, 24)):
        average, agreed = first["seen"][number]
        assert average != agreed
        if step % CUT == 0:
            state = stored(runs, "diloco", step)
            assert crc(state["model"].values()) == agreed and crc(state["ema"].values()) == average
        if step < STEPS:
            locals_ = {run["weights"][step] for run in (first, second)}
            assert len(locals_) == 2 and agreed not in locals_
    assert first["local"] == second["local"] == first["agreed"] == second["agreed"] == first["seen"][-1][1]


@pytest.mark.parametrize("method", ["diloco", "fp16"])
def test_data_and_counts_are_those_of_ddp(runs, method):
    for ours, theirs in zip(told(runs, method), told(runs, "ddp"), strict=True):
        assert ours["windows"] == theirs["windows"] and len(ours["windows"]) == STEPS * WINDOWS // 2
        assert column(ours, "epoch") == column(theirs, "epoch")
        assert ours["progress"]["tokens"] == theirs["progress"]["tokens"] == STEPS * WINDOWS * 8
        assert ours["progress"]["epoch_tokens"] == theirs["progress"]["epoch_tokens"] == (STEPS - 16) * WINDOWS * 8
        (mean,), (exact,) = column(ours, "epoch_loss"), column(theirs, "epoch_loss")
        assert mean == pytest.approx(exact, abs=0.1 if method == "diloco" else 1e-3)


def test_gradients_in_half_the_bytes_train_as_exact_ones(runs):
    first, second = told(runs, "fp16")
    exact = column(told(runs, "ddp")[0], "loss")
    assert column(first, "loss") == pytest.approx(exact, abs=2e-3) and column(first, "loss") != exact
    assert first["weights"] == second["weights"] and first["local"] == second["local"]


@pytest.mark.parametrize("method, how, step", [("diloco", "killed", CUT), ("diloco", "early", 1), ("diloco", "late", 9),
                                               ("fp16", "killed", CUT), ("fp16", "late", 7),
                                               ("three", "killed", CUT), ("three", "late", 9)])
def test_it_goes_on_bit_for_bit(runs, method, how, step):
    size = 3 if method == "three" else 2
    for rank, (whole, rest) in enumerate(zip(told(runs, method, size), told(runs, f"{method} {how}", size),
                                             strict=True)):
        assert rest["weights"] == whole["weights"][step:] and rest["seen"] == whole["seen"][step // CUT:]
        assert rest["windows"] == whole["windows"][step * WINDOWS // size:] and rest["local"] == whole["local"]
        assert column(rest, "loss", STEPS - 6) == column(whole, "loss", STEPS - 6)
        assert (f"Se reanuda en el paso {step} desde" in rest["said"]) == (rank == 0)
        assert "Cada proceso parte" not in rest["said"]
    assert same(newest(runs / f"{method} {how}") | {"sync": None}, newest(runs / method) | {"sync": None})


@pytest.mark.parametrize("method, when, step", [("diloco", "early", 1), ("diloco", "late", 9), ("fp16", "late", 7)])
def test_a_signal_to_one_rank_stops_all_at_the_same_step(runs, method, when, step):
    for run in told(runs, f"{method} stopped {when}"):
        assert run["stopped"] == signal.SIGTERM and run["progress"]["step"] == step
        assert run["progress"]["tokens"] == step * WINDOWS * 8


def test_what_was_last_agreed_on_is_saved_when_a_rank_is_lost(runs):
    first, second = told(runs, "lost")
    assert first["fault"].endswith("ckpt-00000008.pt") and "ckpt-00000008.pt" not in second["fault"]
    state = newest(runs / "lost")
    assert state["progress"]["tokens"] == 8 * WINDOWS * 8, "with those of the steps that were still on their way"
    assert state["progress"]["step"] == 8 and state["random"]["step"] == 8 and state["config"] == CONSTANTS["config"]
    assert crc(state["model"].values()) == first["agreed"] == second["agreed"]
    assert len({first["agreed"], first["local"], second["local"]}) == 3


@pytest.mark.parametrize("label, size", [("damaged", 2), ("mixed", 2), ("from ddp", 2), ("to ddp", 2),
                                         ("other every", 2), ("on three", 3), ("on one", 1)])
def test_elsewhere_it_goes_on_from_the_agreed_weights(runs, label, size):
    found = told(runs, label, size)
    source = "ddp" if label == "from ddp" else "diloco"
    state = stored(runs, source, CUT)
    assert {run["begun"] for run in found} | {run["weights"][0] for run in found} == {crc(state["model"].values())}
    assert f"Se reanuda en el paso {CUT} desde" in found[0]["said"]
    parts = "Cada proceso parte de los pesos acordados" in found[0]["said"]
    assert parts == (label not in ("to ddp", "on one")), found[0]["said"]
    assert ("rank-00001/ckpt-00000006.pt': el registro" in found[-1]["said"]) == (label == "damaged")
    began = stored(runs, "ddp" if label == "from ddp" else "diloco cut", CUT)["sync"].get("origin")
    ended = newest(runs / label)["sync"]
    assert ended["origin"] == (began or ended["run"]) == (runs / label / ORIGIN).read_text()
    order, exact = ([sorted(sum((run["windows"][step * WINDOWS // len(group):(step + 1) * WINDOWS // len(group)]
                                 for run in group), [])) for step in steps]
                    for group, steps in ((found, range(STEPS - CUT)), (told(runs, "ddp"), range(CUT, STEPS))))
    assert order == exact
    assert {run["progress"]["tokens"] for run in found} == {STEPS * WINDOWS * 8}
    assert len({run["local"] for run in found}) == 1 and np.isfinite(column(found[0], "loss")).all()


def test_what_begins_from_a_checkpoint_that_was_asked_for_takes_none_from_the_way_that_was_left(runs):
    began, ended = stored(runs, "diloco cut", CUT)["sync"], newest(runs / "another way")["sync"]
    assert ended["origin"] == (runs / "another way" / ORIGIN).read_text() != began["origin"]
    assert told(runs, "another way")[0]["weights"] == told(runs, "diloco killed")[0]["weights"]


def test_a_nan_on_one_rank_brings_back_the_agreed_weights_there_alone(runs):
    clean, found = told(runs, "diloco"), told(runs, "restart")
    # The NaN of step 7 is heard of after step 9, and what has left meanwhile arrives after step 10.
    assert found[0]["weights"][:10] == clean[0]["weights"][:10]
    assert found[1]["weights"][:7] == clean[1]["weights"][:7] and found[0]["common"][7] == clean[0]["common"][7]
    assert [run["weights"][7] == run["common"][7] for run in found] == [False, True]
    for run in found:
        nan, won_back = run["events"]
        assert nan.startswith("7: ") and "rango 1" in nan and "pesos acordados" in nan and "por 0.5" in nan
        # The checkpoints of 12 and 18 have no fault between them.
        assert won_back.startswith("18: ") and run["progress"]["lr_scale"] == 1.0 and not run["fault"]
        assert [lr * step for step, lr in zip(range(1, 25), column(run, "lr"), strict=True)] == pytest.approx(
            [1e-2] * 9 + [0.5e-2] * 9 + [1e-2] * (STEPS - 18))
        assert column(run, "loss") == column(found[0], "loss") and column(run, "loss")[-1] < column(run, "loss")[0]
    assert found[0]["local"] == found[1]["local"]


def test_a_nan_on_one_rank_is_skipped(runs):
    for run in told(runs, "skip"):
        assert len(run["events"]) == 1 and "se salta" in run["events"][0] and run["progress"]["lr_scale"] == 1.0
        assert run["progress"]["step"] == STEPS and not run["fault"]
    assert all(torch.isfinite(tensor).all() for name in ("restart", "skip", "fp16 restart")
               for tensor in newest(runs / name)["model"].values())


@pytest.mark.parametrize("label, step, saved, events", [("stop", 10, 6, 1), ("thrice", 13, 12, 4)])
def test_nans_that_do_not_end_stop_all_ranks_and_name_the_checkpoint(runs, label, step, saved, events):
    for run in told(runs, label):
        assert f"no es finito en el paso {step} " in run["fault"] and (" por 3.ª vez" in run["fault"]) == (events > 1)
        assert run["fault"].endswith(f"ckpt-{saved:08}.pt") and len(run["events"]) == events
        assert run["events"][-1].startswith(f"{step}: ") and "se detiene el entrenamiento" in run["events"][-1]
        assert run["progress"]["step"] == step + 2


def test_a_nan_from_before_the_rate_was_lowered_is_one_with_the_nan_that_lowered_it(runs):
    for run in told(runs, "thrice"):
        first, second, third, _ = run["events"]
        assert first.startswith("7: ") and "prevista multiplicada por 0.5" in first
        assert second.startswith("8: ") and "no cuenta otra vez" in second
        assert third.startswith("10: ") and "prevista multiplicada por 0.25" in third


def test_a_nan_in_half_the_bytes_restores_all_ranks(runs):
    found = told(runs, "fp16 restart")
    for run in found:
        nan, won_back = run["events"]
        assert "ckpt-00000006.pt" in nan and "por 0.5" in nan and won_back.startswith("18: ")
        assert run["progress"]["lr_scale"] == 1.0
        assert run["local"] == found[0]["local"] and np.isnan(column(run, "loss")).sum() == 1
    for rank in range(2):
        own = checkpoint.read(checkpoint.found(runs / "fp16 restart" / f"rank-{rank:05d}")[0])["own"]
        assert all(torch.isfinite(residual).all() and residual.any() for residual in own["residuals"])


def test_an_own_file_that_cannot_be_written_is_said_and_no_more(tmp_path, capsys):
    (tmp_path / "rank-00001").touch()  # where its folder would be
    keeper = Checkpointer(tmp_path, Session(rank=1, world_size=2), background=True)
    for step in (5, 6):
        keeper.save(step, {"sync": {}}, own={"local": torch.ones(3)}, interrupted=step == 6)
    keeper.finish()
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and all("[rango 1] Aviso: no se pudo guardar" in line for line in said)
    assert all("será desde los pesos acordados" in line for line in said)


@pytest.mark.parametrize("size, every, form, taken", [(3, 8, diloco.FORMAT, True), (2, 8, diloco.FORMAT, False),
                                                      (3, 9, diloco.FORMAT, False), (3, 8, 1, False)])
def test_an_own_file_is_for_as_many_processes_and_steps_between_agreements(tmp_path, monkeypatch, size, every, form,
                                                                           taken):
    """What was under way would be read as other values than were sent."""
    monkeypatch.setattr(diloco.DiLoCo, "_connect", lambda _: (None, None))
    before, keeper = diloco.DiLoCo(Session(world_size=3), torch.nn.Linear(9, 9), 8), Checkpointer(tmp_path, Session())
    keeper.save(5, {"sync": before.state()}, own=before.own_state())
    monkeypatch.setattr(diloco, "FORMAT", form)
    now = diloco.DiLoCo(Session(world_size=size), torch.nn.Linear(9, 9), every)
    assert ("own" in keeper.load(setting=now.setting)) == taken


def test_an_own_file_that_is_damaged_is_said_with_what_follows_from_it(tmp_path, capsys):
    keeper = Checkpointer(tmp_path, Session(rank=1, world_size=2))
    keeper.save(5, {"sync": {"method": "diloco"}}, own={"local": torch.ones(3)})
    (saved,) = checkpoint.found(keeper.own)
    assert keeper._read_own(checkpoint.path_of(tmp_path, 5), {"method": "diloco"})["own"]
    saved.write_bytes(saved.read_bytes()[:-50])
    assert keeper._read_own(checkpoint.path_of(tmp_path, 5), {"method": "diloco"}) is None
    said = capsys.readouterr().out
    assert said.startswith(f"[rango 1] Aviso: {str(saved)!r}: ") and "se parte de los pesos acordados" in said
    assert "--resume" not in said, "there is no other to be chosen"


def test_the_script_ends_when_a_rank_has_nothing_but_nans_and_hands_out_the_agreed_weights(book, tmp_path):
    command = [ROOT / "train_gpt2_spanish.py", "--preset", "demo", "--n-layer", 1, "--n-embd", 32, "--n-head", 2,
               "--seq-len", 32, "--vocab-size", 400, "--sample-length", 0, "--batch-size", 2, "--max-steps", 20,
               "--dataset-name", book, "--distributed", "--sync", "diloco", "--sync-every", 10, "--checkpoint-freq", 5]
    outputs = run_ranks(command, [tmp_path] * 2, AURA_INJECT_NAN=",".join(f"1:{step}" for step in range(7, 21)))
    for code, output in outputs:
        assert code == 3 and "Traceback" not in output, output
        assert "paso 11 (pérdida o gradiente no finitos en el rango 1) por 3.ª vez" in output
        assert "último punto de control: checkpoints/ckpt-00000010.pt" in output
    assert "AVISO, paso 7" in outputs[0][1]
    assert "cada proceso da 10 pasos por su cuenta entre dos acuerdos, 2 en todo el" in outputs[0][1]
    assert "(--sync-lr 0.9 --sync-momentum 0.5)" in outputs[0][1] and "«Lotes menores» en docs/wsl2" in outputs[0][1]

    for code, output in run_ranks([*command, "--max-steps", 10, "--output", "otra.pth"], [tmp_path] * 2):
        assert code == 0, output
    agreed = checkpoint.read(checkpoint.path_of(tmp_path / "checkpoints", 10))["model"]
    written = torch.load(tmp_path / "otra.pth", weights_only=True)
    assert all(torch.equal(agreed[name], tensor) for name, tensor in written.items())


@pytest.mark.parametrize("words, pieces", [
    (["--sync", "dilocco"], ["--sync", "'dilocco'", "¿quiso decir 'diloco'?"]),
    (["--sync-every", "0"], ["--sync-every", "0", "desde 1"]),
    (["--sync-every", "diez"], ["--sync-every", "'diez'"]),
    (["--sync-lr", "0"], ["--sync-lr", "0", "mayor que 0"]),
    (["--sync-momentum", "1"], ["--sync-momentum", "1", "0.999"]),
])
def test_bad_input_is_one_line_with_the_way_out(words, pieces):
    parser = Parser()
    add_distributed(parser)
    with pytest.raises(UserError) as problem:
        parser.parse_args(words)
    assert all(piece in str(problem.value) for piece in pieces) and "\n" not in str(problem.value)


@pytest.mark.parametrize("method", ["ddp", "fp16"])
def test_what_counts_with_diloco_alone_is_not_taken_by_others(method):
    parser = Parser()
    add_distributed(parser)
    args = parser.parse_args(["--sync", method, "--sync-lr", "0.5", "--sync-every", "3"])
    with pytest.raises(UserError, match=f"^--sync-every 3, --sync-lr 0.5: solo .* diloco, y aquí es --sync {method}"), \
            distributed.session(args):
        pass
    with distributed.session(parser.parse_args(["--sync-every", "3"])) as dist:  # auto may take diloco
        assert not dist.grouped


@pytest.mark.parametrize("strategy, words, idle", [
    (False, ["--fsdp", "--sync", "auto"], "--fsdp"), (True, ["--strategy", "fsdp"], "--strategy fsdp"),
    (False, ["--sync-every", "3", "--sync", "diloco"], "--sync diloco, --sync-every 3"),
    (False, ["--sync", "fp16"], "--sync fp16"), (True, ["--strategy", "ddp", "--sync", "ddp"], ""), (False, [], ""),
])
def test_one_process_says_what_is_of_no_use_to_it(capsys, strategy, words, idle):
    parser = Parser()
    add_distributed(parser, strategy)
    with distributed.session(parser.parse_args(words)) as dist:
        assert dist.world_size == 1
    assert capsys.readouterr().out == (f"Aviso: con un solo proceso, sin efecto: {idle}.\n" if idle else "")


@pytest.mark.parametrize("words, steps, expected", [
    ([], 0, (0.9, 0.5)),
    ([], 60 * 56, (0.9, 0.5)),
    ([], 100 * 56, (0.8, 0.7)),
    (["--sync-every", "10"], 1000, (0.8, 0.7)),
    ([], 300 * 56, (0.7, 0.9)),
    ([], 10**9, (0.7, 0.9)),
    (["--sync-lr", "0.3"], 100 * 56, (0.3, 0.7)),
    (["--sync-momentum", "0"], 10**6, (0.7, 0.0)),
])
def test_few_agreements_take_less_momentum(words, steps, expected):
    parser = Parser()
    add_distributed(parser)
    assert sync.outer_step(parser.parse_args(words), steps) == pytest.approx(expected)


@pytest.mark.parametrize("method", ["fp16", "diloco"])
def test_shards_are_exact_only(method):
    args = SimpleNamespace(fsdp=True, sync=method, dist_timeout=5.0)
    with pytest.raises(UserError, match=f"--sync {method}: cada .* el modelo entero.*quite --sync"), \
            distributed.session(args):
        pass
