"""What all ranks must have in common before the loop begins."""

import errno
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import hrm_training_small_100m
import test_ddp
import train_distributed
import train_gpt2_spanish
import train_tensordock
from aura import backend, checkpoint, files, hrm_training, loop, ops, output, pace, recall, start
from aura.errors import TrainingFault, UserError
from aura.models import gpt
from aura.rendezvous import SAME_EVERYWHERE, require_same
from aura.session import Session

# Where processes may differ: what lies or is called elsewhere on another machine, what a machine has room for, what
# rank 0 alone does, and who each of them is. --resume is compared by what it means.
MAY_DIFFER = {"attention", "checkpoint_dir", "compile", "data_dir", "dataset", "dataset_max_tokens", "dataset_name",
              "dist_timeout", "distributed", "grad_checkpointing", "help", "init_from", "json", "keep_checkpoints",
              "keep_every", "local_rank", "log_dir", "log_interval", "master_addr", "master_port", "model",
              "num_workers", "output", "rank", "results_dir", "resume", "tokenizer", "val_fraction", "world_size"}


class Ranks(Session):
    """The first rank of a group whose members say `names`."""

    def __init__(self, names):
        super().__init__(world_size=len(names))
        self.names = names

    def gather_objects(self, value):
        return [value, *((name, False, 1) for name in self.names[1:])]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is tuned")
@pytest.mark.parametrize("sparing", [True, False])
def test_memory_is_kept_for_speed_or_given_back(sparing):
    """What the process keeps after tensors of 8 MB are freed that lay below one that lives on."""
    program = ("import sys, torch; from aura import start\n"
               "start.tune_allocator(torch.device('cpu'), sys.argv[1] == 'True')\n"
               "held = lambda: int(open('/proc/self/statm').read().split()[1]) * 4096\n"
               "before = held(); many = [torch.ones(2**21) for _ in range(8)]; lives = torch.ones(2**21); del many\n"
               "print(held() - before)")
    output = subprocess.run([sys.executable, "-c", program, str(sparing)], cwd=Path(start.__file__).parents[1],
                            capture_output=True, text=True, timeout=120, check=True).stdout
    assert (int(output) < 3 * 2**23) == sparing


@pytest.fixture
def plain_processor(monkeypatch):
    monkeypatch.setattr(ops, "multiplies_bfloat16", lambda: False)


@pytest.mark.parametrize("names,sync,wanted", [
    (["fp32", "fp32"], "auto", "fp32"), (["fp32", "bf16"], "ddp", "fp32"), (["fp32", "fp16"], "fp16", "fp32"),
    (["fp32", "fp16", "bf16"], "auto", "fp32"), (["bf16", "fp16"], "auto", "fp16"), (["fp16", "bf16"], "ddp", "fp16"),
    (["bf16", "fp32"], "ddp", "fp32"), (["bf16", "fp16"], "diloco", "bf16"), (["fp32", "bf16"], "diloco", "fp32")])
def test_all_ranks_take_a_precision_that_all_of_them_have(plain_processor, monkeypatch, capsys, names, sync, wanted):
    """Otherwise gradients of different loss scales would be averaged."""
    device = torch.device("cpu")
    if names[0] != "fp32":  # as if it were a card
        device = SimpleNamespace(type="cuda")
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: names[0] == "bf16")
        monkeypatch.setattr(start.loop, "Precision", lambda name, device: SimpleNamespace(name=name))
    dist = Ranks(names)
    dist.device = device
    assert start.agree_precision(SimpleNamespace(precision="auto", sync=sync), dist).name == wanted
    said = capsys.readouterr().out
    assert bool(said) == (len(set(names)) > 1 and sync != "diloco")
    assert not said or (f"{names[1]} en el rango 1" in said and f"calculan todos en {wanted}" in said)


@pytest.mark.parametrize("precision,others,said", [("auto", [], True), ("auto", [True], True), ("auto", [False], False),
                                                   ("fp32", [], False), ("bf16", [], False)])
def test_auto_says_where_bfloat16_would_be_faster(monkeypatch, capsys, precision, others, said):
    """Only if all processors multiply it: the slowest sets the pace."""
    monkeypatch.setattr(ops, "multiplies_bfloat16", lambda: True)
    monkeypatch.setattr(start, "times_as_long", lambda dtype: 0.5)
    dist = Ranks(["fp32"] * (1 + len(others)))
    dist.gather_objects = lambda mine: [mine, *(("fp32", other, 1) for other in others)]
    chosen = start.agree_precision(SimpleNamespace(precision=precision, sync="auto"), dist).name
    assert chosen == ("fp32" if precision == "auto" else precision)
    assert ("con --precision bf16" in capsys.readouterr().out) == said


@pytest.mark.parametrize("precision,own,other,said", [("bf16", 22.4, 1.2, "22"), ("fp16", 1.2, 3.1, "3"),
                                                      ("bf16", 1.7, 1.7, None), ("fp32", 22.4, 1, None),
                                                      ("auto", 22.4, 1, None)])
def test_slow_products_of_16_bits_are_told(plain_processor, monkeypatch, capsys, precision, own, other, said):
    """On any rank: a laptop without AVX-512 takes twenty times as long as in fp32."""
    monkeypatch.setattr(start, "times_as_long", lambda dtype: own)
    dist = Ranks(["fp32", "fp32"])
    dist.gather_objects = lambda mine: [mine, (mine[0], False, other)]
    assert start.agree_precision(SimpleNamespace(precision=precision, sync="auto"), dist).name != "auto"
    printed = capsys.readouterr().out
    assert printed == "" if said is None else f"--precision {precision}: " in printed and f" {said} veces" in printed


def test_how_much_slower_is_measured(monkeypatch):
    """On one thread: two, where another process computes, found products of bfloat16 as fast as any."""
    counts, forward = [], start.Linear.forward
    monkeypatch.setattr(start.Linear, "forward",
                        lambda *given: counts.append(torch.get_num_threads()) or forward(*given))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert start.times_as_long(torch.bfloat16) > 0
        assert set(counts) == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("choice,isa,yes", [("fused", "avx512bf16", True), ("fused", "amx", True),
                                            ("fused", "avx512", False), ("sdpa", "avx512bf16", False)])
def test_whether_bfloat16_is_multiplied_is_asked_of_our_kernels(monkeypatch, choice, isa, yes):
    monkeypatch.setattr(ops, "_choice", choice)
    monkeypatch.setattr(ops.extension, "load", lambda: SimpleNamespace(cpu_isa=lambda: isa))
    assert ops.multiplies_bfloat16() == yes


def test_auto_times_what_will_run_forward(monkeypatch):
    """A compiled model is faster, and hands over all its gradients at once."""
    module, compiled, timed = object(), object(), []

    def found(dist, model, loss_fn, batch, *_):
        timed.append((model, loss_fn(model, batch)))
        return "ddp", []

    monkeypatch.setattr(pace, "found", found)
    args = SimpleNamespace(sync="auto", grad_accum=1, sync_every=8)
    dist = SimpleNamespace(grouped=True, sharded=False, world_size=2, machines=["a", "b"])
    synced = start.make_sync(args, dist, module, compiled, 10, lambda model, batch: (model, batch), None, "batch")
    assert synced.method == "ddp" and timed == [(module, (compiled, "batch"))]


def test_an_orderly_stop_is_told_once_on_every_machine(monkeypatch, capsys):
    args, progress = SimpleNamespace(given=set(), resume="auto"), SimpleNamespace(step=7)
    keeper = SimpleNamespace(named=lambda: "último punto de control: c/ckpt.pt")
    monkeypatch.setattr(Session, "barrier", lambda self: None)
    for rank in range(4):
        dist = Session(rank=rank, world_size=4, machines=["a", "a", "b", "b"])
        assert start.leave_stopped(args, dist, progress, 2, keeper) == 130
    assert capsys.readouterr().out.splitlines() == [
        "Detenido por una señal en el paso 7; último punto de control: c/ckpt.pt. La misma orden lo reanuda.",
        "[rango 2] Detenido por una señal en el paso 7; el punto de control lo ha guardado el rango 0. La misma orden "
        "lo reanuda."]


@pytest.mark.parametrize("script, check, words", [
    (train_gpt2_spanish, train_gpt2_spanish.complete, ["--n-head", "5"]),
    (hrm_training_small_100m, lambda args: hrm_training.complete(args, hrm_training_small_100m.PRESETS),
     ["--benchmark", "--fsdp"]),
    (train_distributed, train_distributed.check_arguments, ["--model", "aquí", "--output", "aquí", "--dataset", "d"])])
def test_what_is_wrong_with_the_arguments_alone_is_said_once(script, check, words):
    with pytest.raises(UserError) as found:
        check(script.build_parser().parse_args(words))
    assert found.value.same_everywhere


def test_of_every_argument_it_is_settled_whether_processes_may_differ_in_it():
    scripts = (train_gpt2_spanish, hrm_training_small_100m, train_distributed, test_ddp)
    names = {action.dest for script in scripts for action in script.build_parser()._actions}
    assert names == set(SAME_EVERYWHERE) | MAY_DIFFER and not MAY_DIFFER & set(SAME_EVERYWHERE)


@pytest.mark.parametrize("first, second", [({}, {"ema": 0.9}), ({"ema": 0.9}, {})])
def test_an_argument_that_one_process_alone_has_is_another_program(first, second):
    with pytest.raises(UserError, match="el rango 1 ejecuta otro programa u otra versión de este"):
        require_same({0: {"arguments": first}, 1: {"arguments": second}})


@pytest.mark.parametrize("every, freq, told", [
    (6, 4, "se conservan los de pasos múltiplos de 12."), (6, 0, "no se conserva ninguno por él."), (8, 4, None),
    (0, 4, None)])
def test_checkpoints_that_are_never_written_cannot_be_kept(tmp_path, capsys, every, freq, told):
    args = SimpleNamespace(keep_every=every, checkpoint_freq=freq, keep_checkpoints=1, checkpoint_dir=str(tmp_path))
    start.make_checkpointer(args, Session(), gpt.GPTConfig(), "libro", "0", b"tokenizer")
    said = capsys.readouterr().out
    assert said == (f"Aviso: --keep-every 6 no es múltiplo de --checkpoint-freq {freq}: {told}\n" if told else "")


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("output", ["c/ckpt-00000002.pt", "c/../c/interrupt-step-2.pt"])
def test_a_model_does_not_take_the_place_of_a_checkpoint(tmp_path, monkeypatch, output, folder):
    monkeypatch.chdir(tmp_path)
    args = SimpleNamespace(checkpoint_dir="c", log_dir="l", output=output)
    with pytest.raises(UserError, match="--output 'c/.*tiene el nombre de un punto de control"):
        start._check_places(args, Session(rank=1), folder)  # rank 0 would hold the folder


def test_what_cannot_be_written_beside_the_model_is_told_before_the_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = SimpleNamespace(checkpoint_dir="c", log_dir="l", output="m.pth", resume="auto")
    for name, make in (("m.json", os.mkfifo), ("m.tokenizer.model", os.mkdir)):
        make(name)
        with pytest.raises(UserError, match=f"--output 'm.pth': a su lado se guarda '{name}', y lo que ahí se llama"):
            start._check_places(args, Session(rank=1), folder=False)
        os.rename(name, "apartado" + name)


def test_who_is_about_to_replace_the_model_of_another_run_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start, "hold", lambda *_: None)  # until this process ends
    (tmp_path / "m.pth").write_bytes(b"")
    args = SimpleNamespace(checkpoint_dir="c", log_dir="l", output="m.pth", resume="auto")
    description, run = tmp_path / "m.json", '{"arguments": {"checkpoint_dir": "%s", "output": "%s"}}'
    for text, told in ((run % ("./a", "m.pth"), True), ("\ufeff" + run % ("a", "m.pth"), True),
                       (run % ("a/../c", "m.pth"), False),
                       (run % ("/before/c", "/before/m.pth"), False),  # moved as a whole
                       ('{"arguments": []}', False), ("", False)):
        description.write_text(text)
        start._check_places(args, Session(), folder=False)
        said = capsys.readouterr().out
        assert "--checkpoint-dir 'a', y el de esta tomará su lugar" in said if told else not said
    description.write_text(run % ("a", "m.pth"))
    (tmp_path / "m.pth").unlink()
    start._check_places(args, Session(), folder=False)
    assert not capsys.readouterr().out


@pytest.mark.parametrize("given, flag", [({}, "--output_dir"), ({"checkpoint_dir": "c"}, "--output_dir"),
                                         ({"checkpoint_dir": "c", "log_dir": "l"}, "--output_dir"),
                                         ({"output_dir": "o", "checkpoint_dir": "d"}, "--checkpoint-dir"),
                                         ({"output_dir": "o", "output": "d/otro.pt"}, "--output")])
def test_two_runs_never_share_an_output_folder_whatever_else_is_given(tmp_path, monkeypatch, given, flag):
    """The second is told the folder as it gave it, and what it is advised never leads to the first's model."""

    def in_use(path):
        if path.parent.name == "d":
            raise BlockingIOError(errno.EAGAIN, "in use")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "_made", [])
    monkeypatch.setattr(files, "lock", in_use)

    args = SimpleNamespace(**{"output_dir": "d", "checkpoint_dir": None, "log_dir": None, "data_dir": None,
                              "output": None, "resume": "auto", "tokenizer": None} | given)
    recall.place(args)
    with pytest.raises(UserError, match=f"otra ejecución está usando 'd': .* otra carpeta con {flag}$"):
        start._check_places(args, Session(), False, "model_config.json")
    monkeypatch.setattr(files.tempfile, "TemporaryFile", mock.Mock(side_effect=PermissionError(errno.EACCES, "no")))
    with pytest.raises(UserError, match=f"escribir en '{args.output_dir}' .* otra carpeta con --output_dir$"):
        start._check_places(args, Session(), False, "model_config.json")


def test_two_runs_never_share_a_folder_of_one_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "_made", [])
    files.require_writable_directory("bert_squad", "--output")
    other = files.lock("bert_squad/.en-uso")
    args = SimpleNamespace(checkpoint_dir="c", log_dir="l", output="bert_squad", resume="auto")
    with pytest.raises(UserError, match="otra ejecución está usando 'bert_squad': .* otra carpeta con --output$"):
        start._check_places(args, Session(), folder=True)
    os.close(other)


@pytest.mark.parametrize("description, beside, model", [("model_config.json", "model_config.json", "uno.pt"),
                                                        (None, "dos.json", "dos.pth")])
def test_two_models_never_share_what_lies_beside_them(tmp_path, monkeypatch, description, beside, model):
    """The second's tokenizer would take the place of the first's, which would write nonsense without a word."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start, "hold", lambda *_: None)  # until this process ends
    args = SimpleNamespace(checkpoint_dir="b", log_dir="b", output="m/dos.pt", resume="auto")
    start._check_places(args, Session(), False, description)
    (tmp_path / "m" / beside).write_text(json.dumps({"arguments": {"checkpoint_dir": "a", "output": f"m/{model}"}}))
    start._check_places(args, Session(), False, description)  # that model has gone
    (tmp_path / "m" / model).write_bytes(b"")
    told = f"--output 'm/dos.pt': '{beside}' y su tokenizador son ahí de otro modelo, '{model}', .* en otra carpeta"
    with pytest.raises(UserError, match=told):
        start._check_places(args, Session(), False, description)
    with pytest.raises(TrainingFault, match=f"{told}, y repita .*; último punto de control: b/x.pt"):
        output.save_output(args, {}, None, None, SimpleNamespace(file_name="tokenizer.model"), None, description,
                           "último punto de control: b/x.pt", {})
    assert {path.name for path in (tmp_path / "m").iterdir()} == {beside, model}


@pytest.mark.parametrize("count,sync,ema,size,what", [
    (1, "diloco", 0.0, 16, "optimizador"), (2, "auto", 0.0, 16, "optimizador"), (2, "ddp", 0.99, 20, "--ema"),
    (2, "fp16", 0.0, 20, "--sync fp16"), (2, "diloco", 0.99, 32, "--ema, --sync diloco")])
def test_what_the_options_keep_in_memory_counts(monkeypatch, count, sync, ema, size, what):
    args, config = SimpleNamespace(sync=sync, ema=ema), gpt.PRESETS["gpt2"]
    monkeypatch.setattr(backend, "device_memory", lambda device: size * config.parameters())
    start.require_memory(args, config, Session(world_size=count), "pida menos")
    monkeypatch.setattr(backend, "device_memory", lambda device: size * config.parameters() - 1)
    with pytest.raises(UserError, match=f"GB para pesos, gradientes y .*{what}, y aquí hay .* GB: pida menos"):
        start.require_memory(args, config, Session(world_size=count), "pida menos")


def test_of_a_model_that_is_cut_each_card_needs_room_for_its_part(monkeypatch):
    args, config = SimpleNamespace(sync="ddp", ema=0.0), gpt.PRESETS["gpt2"]
    monkeypatch.setattr(backend, "device_memory", lambda device: 4 * config.parameters())
    start.require_memory(args, config, Session(world_size=4, shards=4), "pida menos")
    with pytest.raises(UserError, match="pida menos"):
        start.require_memory(args, config, Session(world_size=3, shards=3), "pida menos")


def test_steps_are_counted_as_if_all_had_been_of_today_s_length():
    seen = start.Ready(None, None, steps=12, fewer=4).at_step(lambda step, steps: (step, steps))
    assert [seen(step) for step in (4, 11)] == [(0, 8), (7, 8)]


def test_a_rehearsed_nan_is_of_the_rank_and_the_call_that_are_named(monkeypatch):
    monkeypatch.setenv("AURA_INJECT_NAN", "0:1,1:2")
    for rank in range(3):
        loss = start.injected(lambda model, batch: (torch.ones(()), 1), Session(rank=rank, world_size=3))
        assert [loss(None, None)[0].isnan().item() for _ in range(3)] == [rank == 0, rank == 1, False]


@pytest.mark.parametrize("step,owed,said", [(2, None, ""), (3, None, "ya estaba completo: paso 3 de 3"),
                                            (9, None, "ya estaba completo: paso 9 y se piden 3."),
                                            (3, {"loss": 1.0}, "dados, 3 de 3: falta hacer la última evaluación")])
def test_what_is_left_of_a_run_at_its_end_is_told(capsys, step, owed, said):
    start.say_if_complete(Session(), loop.Progress(step=step, owed=owed), 3)
    out = capsys.readouterr().out
    assert said in out and ("Para seguir" in out) == ("completo" in said) and bool(out) == bool(said)


@pytest.mark.parametrize("given, steps, named", [
    ({"warmup_ratio": 0.93}, 20, "--warmup-ratio 0.93"), ({"warmup_ratio": 0.92}, 20, None),
    ({"warmup_ratio": 1.0, "warmup_steps": 18}, 20, None), ({"warmup_ratio": 0.03, "warmup_steps": None}, 20, None),
    ({"warmup_ratio": 0.03}, 1, None), ({"warmup_ratio": 0.03, "warmup_steps": 19}, 20, "--warmup_steps 19"),
    ({"warmup_ratio": 0.03, "warmup_steps": 5000}, 20, "--warmup_steps 5000")])
def test_a_warmup_that_outlasts_the_run_is_told(capsys, given, steps, named):
    start.say_if_only_rising(SimpleNamespace(**given), Session(), steps)
    out = capsys.readouterr().out
    assert out.startswith(f"Aviso: con {named} ") and "no llega a bajar en 20 pasos" in out if named else not out


def test_the_peak_of_a_group_is_that_of_all_its_cards(monkeypatch):
    monkeypatch.setattr(backend, "device_name", lambda device: "NVIDIA L4")
    bf16, peaks = SimpleNamespace(name="bf16"), [None, 312e12]
    assert start.group_peak(Session(), bf16) == 121e12
    monkeypatch.setattr(Session, "gather_objects", lambda self, value: [value, value, *peaks])
    assert start.group_peak(Session(), bf16) is None
    del peaks[0]
    assert start.group_peak(Session(), bf16) == 2 * 121e12 + 312e12


@pytest.mark.parametrize("script, words", [
    (train_gpt2_spanish.main, ["--dataset-name", "libro.txt"]),
    (lambda: hrm_training.run(hrm_training_small_100m.build_parser(), hrm_training_small_100m.PRESETS),
     ["--dataset-name", "libro.txt"]),
    (train_tensordock.main, ["--dataset-path", "libro.txt", "--model-preset", "aura-cpu", "--output-dir", "salida"])])
def test_a_full_disk_is_found_before_the_data_are_prepared(monkeypatch, tmp_path, script, words):
    monkeypatch.chdir(tmp_path)
    Path("libro.txt").write_text("Ana compró pan.\n" * 2000)
    monkeypatch.setattr(sys, "argv", ["script.py", *words, "--data-dir", "datos", "--max-steps", "1"])
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(UserError, match=r"quedan 1 kB y un punto de control ocupa .* otra carpeta"):
        script()
    assert not Path("datos").exists()
