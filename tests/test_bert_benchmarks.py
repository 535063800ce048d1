"""The benchmarks of BERT's training: who takes turns, what counts as the same, what the rows say; not what they
measure."""

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from aura import pretrained, spans, squad, wordpiece
from aura.errors import UserError
from aura.models import bert


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a BERT of a few thousand weights, without a head, and a vocabulary of the built-in questions."""
    folder = tmp_path_factory.mktemp("model")
    examples, _ = squad.read(squad.SAMPLE)
    pieces = wordpiece.learn([text for example in examples for text in (example.context, example.question)], 400)
    config = bert.BertConfig(len(pieces), 96, 1, 2, 16, 32)
    module = bert.QuestionAnswering(config).init_weights(0)
    pretrained.save_folder(folder, module.state_dict(), config, "\n".join(pieces).encode() + b"\n", True)
    weights = pretrained.read_tensors(folder / pretrained.WEIGHTS)
    save_file({name: tensor for name, tensor in weights.items() if not name.startswith("qa_")},
              folder / pretrained.WEIGHTS, {"format": "pt"})
    return folder


@pytest.fixture
def job(model, tmp_path):
    return {"model": str(model), "dataset": str(squad.SAMPLE), "examples": 40, "max_len": 96, "batch_size": 4,
            "folder": str(tmp_path), "padding": "fixed", "check": True, "epoch_steps": 10}


def test_a_contestant_waits_works_and_dies(benchmark, job, tmp_path):
    """Our script itself in a process: its first losses are those of the module on the batches that others get."""
    training = benchmark("bert_training")
    ours = training.Contestant(training.OURS, tmp_path, job, padding="fixed", check=True)
    try:
        [((seconds, _), losses)] = ours.wait()
        assert seconds > 0 and not losses
        assert min(ours.turn(2)) > 0
        ours.members[0][1].send(1)
        [(_, losses)] = ours.wait()
        assert len(losses) == 3
        rows = training.examples(training.read_task(job), job)[:4]
        batch = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
        module = bert.QuestionAnswering(pretrained.read_config(job["model"])).init_weights(training.SEED)
        pretrained.load_weights(module, Path(job["model"], pretrained.WEIGHTS))
        logits = module.eval()(batch["input_ids"], batch["token_type_ids"], batch["attention_mask"].sum(1))
        named = {**batch, "start_positions": batch["start_positions"], "end_positions": batch["end_positions"]}
        output, noted = argparse.Namespace(start_logits=logits[..., 0], end_logits=logits[..., 1]), []
        training.as_ours(noted, None, (), named, output)
        assert noted == pytest.approx(losses[:1], abs=1e-5)
        ours.members[0][0].kill()
        ours.members[0][0].join()  # so that already what is sent to it arrives nowhere
        with pytest.raises(SystemExit, match="ours, fixed, proceso 0: ha terminado antes de tiempo"):
            ours.turn(1)
    finally:
        ours.stop()


class Still:
    """A contestant that takes `seconds` a step and tells these losses."""

    def __init__(self, name, seconds=1.0, losses=(), members=1):
        self.name, self.seconds, self.losses, self.stopped, self.turns = name, seconds, losses, False, []
        self.members = [(None, argparse.Namespace(send=lambda steps: None))] * members

    def wait(self):
        return [((1.0, 1.0), [loss + place for loss in self.losses]) for place in range(len(self.members))]

    def turn(self, steps=None):
        self.turns.append(steps)
        return self.seconds, self.seconds / 2

    def stop(self):
        self.stopped = True


def test_losses_must_agree(benchmark):
    """Of two processes the mean counts; a loss that differs, or is NaN, rejects the result and stops all."""
    training = benchmark("bert_training")
    playing = [Still("a", losses=(4.0, 3.0)), Still("b", losses=(3.5, 2.5), members=2)]
    assert training.check(playing) == [[4.0, 3.0], [4.0, 3.0]] and all(one.stopped for one in playing)
    for losses in ((4.0, 3.001), (float("nan"), 3.0)):
        playing = [Still("a", losses=(4.0, 3.0)), Still("b", losses=losses)]
        with pytest.raises(SystemExit, match="b no entrena igual"):
            training.check(playing)
        assert all(one.stopped for one in playing)


def test_rows_of_ddp(benchmark, monkeypatch):
    """Against one process, or two that exchange nothing, the ratio is the speed-up of two; against a peer it is not."""
    training = benchmark("bert_training")
    seconds = {training.OURS: 1.1, training.LIGHTNING: 1.2, training.CONTROL: 1.0, training.ALONE: 0.9}
    made = []

    def contestant(role, *_, **options):
        made.append(Still(role, seconds[role]))
        return made[-1]

    monkeypatch.setattr(training, "Contestant", contestant)
    args = argparse.Namespace(batch_size=4, rounds=3, steps=2)
    rows = {row["peer"]: row for row in training.two_processes(args, None, {"epoch_steps": 8}, "fixed")}
    assert {name: round(row["ratio"], 2) for name, row in rows.items()} == {
        training.LIGHTNING: 1.09, training.CONTROL: 1.82, training.ALONE: 1.64}
    assert rows[training.CONTROL]["target"] == 1.8 and rows[training.LIGHTNING]["ours_cpu_ms"] == pytest.approx(550)
    assert rows[training.ALONE]["rounds"] == 3 and rows[training.ALONE]["peer_samples_per_s"] == pytest.approx(4 / 0.9)
    assert all(one.stopped and one.turns == [2, None, None, None] for one in made)


def test_the_answers_place(benchmark):
    quality = benchmark("bert_quality")
    context = "el gato negro duerme"
    offsets = [(0, 0), (0, 3), (0, 0), (0, 2), (3, 7), (8, 10), (10, 13), (14, 20), (0, 0)]
    parts = [None, 0, None, 1, 1, 1, 1, 1, None]
    for text, place in (("gato negro", (4, 6)), ("duerme", (7, 7)), ("el", (3, 3))):
        example = squad.Example("1", "¿?", context, [(text, context.index(text))])
        assert quality.answer_place(example, offsets, parts) == place
    cut = squad.Example("1", "¿?", context, [("negro duerme", 8)])
    assert quality.answer_place(cut, offsets[:6], parts[:6]) == (0, 0), "not whole inside"


def test_other_windows_are_refused(benchmark, model):
    quality = benchmark("bert_quality")
    found = spans.features(squad.read(squad.SAMPLE)[0][:5], wordpiece.load(model), 96, 20)
    theirs = {"input_ids": [row.tolist() for row in np.split(found.ids, found.offsets[1:-1])],
              "positions": list(zip(found.start.tolist(), found.end.tolist(), strict=True))}
    quality.same_windows(theirs, found)
    theirs["positions"][1] = (0, 5)
    with pytest.raises(SystemExit, match="los lugares de las respuestas no son los de transformers .*1 distintos"):
        quality.same_windows(theirs, found)
    theirs["input_ids"][0][3] += 1
    with pytest.raises(SystemExit, match="las ventanas no son"):
        quality.same_windows(theirs, found)


def test_quality_of_both(benchmark, model, monkeypatch, tmp_path, capsys):
    """Each seed starts both from the same head, and the commands are those that the two programs take."""
    quality = benchmark("bert_quality")
    heads = {}

    def run(command, log, running):
        import train_distributed

        ours = Path(command[1]).name == "train_distributed.py"
        parser = train_distributed.build_parser() if ours else quality.build_parser()
        args = parser.parse_args(command[2:])
        heads.setdefault(args.model, set()).add(Path(args.model, pretrained.WEIGHTS).read_bytes())
        assert (args.epochs, args.lr, args.batch_size, args.dropout, args.max_len) == (3, 1e-4, 4, 0.0, 96)
        target = Path(args.output, "metrics.json") if ours else Path(args.their_scores)
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps({"f1": 50.0 + ours + (args.seed if ours else 0), "exact_match": 40.0}))

    monkeypatch.setattr(quality, "run", run)
    path = tmp_path / "quality.json"
    quality.main(["--model", str(model), "--dataset", str(squad.SAMPLE), "--seeds", "3,4", "--train", "20",
                  "--validation", "8", "--max-len", "96", "--doc-stride", "20", "--json", str(path)])
    result = json.loads(path.read_text())
    assert [(row["seed"], row["f1"], row["peer_f1"]) for row in result["rows"]] == [(3, 54.0, 50.0), (4, 55.0, 50.0)]
    assert result["f1_difference"] == pytest.approx(4.5) and len(heads) == 2
    assert len(set.union(*heads.values())) == 2, "another head for each seed, the same for both"
    assert "diferencia de F1: +4.50 puntos" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["bert_training", "bert_quality"])
def test_bad_arguments(benchmark, name, tmp_path):
    with pytest.raises(UserError, match="falta config.json, vocab.txt, model.safetensors"):
        benchmark(name).main(["--model", str(tmp_path), "--dataset", str(squad.SAMPLE)])
