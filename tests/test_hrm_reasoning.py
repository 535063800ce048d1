"""The reasoning benchmark: its tasks say the truth, its contestants have the sizes they claim, a tiny run ends."""

import argparse
import importlib.util
import itertools
import json
import sys

import pytest
import torch

from aura.errors import UserError
from aura.models import gpt, hrm
from tests.support import ROOT, run

SCRIPT = ROOT / "benchmarks" / "hrm_reasoning.py"


@pytest.fixture
def bench(monkeypatch):
    """The benchmark as a module; sys.path and sys.modules are put back afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for other in ("loader", "measure", "train_script"):
        monkeypatch.delitem(sys.modules, other, raising=False)
    spec = importlib.util.spec_from_file_location("hrm_reasoning", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "hrm_reasoning", module)
    spec.loader.exec_module(module)
    yield module
    for other in ("loader", "measure", "train_script"):
        sys.modules.pop(other, None)


def some(bench, task, count=200, seed=3, evaluating=False):
    tokens, targets, levels = next(bench.data(bench.TASKS[task], count, seed, evaluating))
    assert tokens.shape == targets.shape == levels.shape == (count, bench.TASKS[task].seq_len)
    assert tokens.min() >= 0 and tokens.max() < bench.TASKS[task].vocab_size
    return tokens, targets, levels


def test_hops_are_those_of_the_table(bench):
    symbols, seen = bench.SYMBOLS, set()
    for tokens, targets, levels in zip(*(part.tolist() for part in some(bench, "saltos")), strict=True):
        table = dict(divmod(word - bench.PAIRS, symbols) for word in tokens[:symbols])
        place, cycle = 0, []
        for _ in range(symbols):
            cycle.append(place)
            place = table[place]
        assert place == 0 and sorted(cycle) == list(range(symbols)), "one cycle through all"
        seen.add(tuple(cycle))
        assert set(targets[:symbols]) == {bench.IGNORED}
        assert len(set(tokens[symbols:])) == bench.QUESTIONS, "no question twice"
        for word, answer, level in zip(tokens[symbols:], targets[symbols:], levels[symbols:], strict=True):
            hops, place = divmod(word, symbols)
            assert hops == level and 1 <= hops <= bench.HOPS
            for _ in range(hops):
                place = table[place]
            assert place == answer
    assert len(seen) > 150


def test_parity_counts_all_bits_so_far(bench):
    tokens, targets, levels = some(bench, "paridad")
    for bits, answers in zip(tokens.tolist(), targets.tolist(), strict=True):
        assert answers == list(itertools.accumulate(bits, int.__xor__))
    assert levels[0].tolist() == list(range(1, bench.BITS + 1))


def solutions(cells):
    """All 4 x 4 boards that a list of 16 digits, 0 for none, can be completed to, by trial and error."""
    if 0 not in cells:
        return [cells]
    place = cells.index(0)
    row, column = divmod(place, 4)
    peers = {cells[i] for i in range(16) if i // 4 == row or i % 4 == column or
             (i // 8 == row // 2 and i % 4 // 2 == column // 2)}
    return [board for digit in {1, 2, 3, 4} - peers
            for board in solutions([*cells[:place], digit, *cells[place + 1:]])]


def test_sudokus_have_one_solution_and_ask_for_it(bench):
    assert bench.every_board().tolist() == sorted(solutions([0] * 16))
    empties = set()
    for tokens, targets, levels in zip(*(part.tolist() for part in some(bench, "sudoku")), strict=True):
        puzzle = tokens[:16]
        assert tokens[16:] == puzzle and set(targets[:16]) == {bench.IGNORED}
        solution = [digit or answer for digit, answer in zip(puzzle, targets[16:], strict=True)]
        assert solutions(puzzle) == [solution]
        assert all((answer == bench.IGNORED) == (digit > 0) for digit, answer in zip(puzzle, targets[16:], strict=True))
        assert set(levels) == {puzzle.count(0)}
        empties.add(puzzle.count(0))
    assert min(empties) >= 4 and max(empties) in (11, 12) and len(empties) >= 7


def test_boards_of_the_evaluation_are_never_trained_on(bench):
    kept, used = (set(map(tuple, bench.boards_of(3, evaluating).tolist())) for evaluating in (True, False))
    assert len(kept) == bench.HELD_OUT and len(used) == 288 - bench.HELD_OUT and not kept & used
    tokens, targets, _ = some(bench, "sudoku", evaluating=True)
    boards = torch.where(tokens > 0, tokens, targets)[:, 16:]
    assert set(map(tuple, boards.tolist())) <= kept


@pytest.mark.parametrize("task", ["saltos", "paridad", "sudoku"])
def test_data_is_the_seeds_alone(bench, task):
    first, again, other, evaluation = (some(bench, task, 8, seed, evaluating)[0] for seed, evaluating in (
        (3, False), (3, False), (4, False), (3, True)))
    assert torch.equal(first, again) and not torch.equal(first, other) and not torch.equal(first, evaluation)
    batches = bench.data(bench.TASKS[task], 8, 3)
    assert not torch.equal(next(batches)[0], next(batches)[0])


@pytest.mark.parametrize("task", ["saltos", "paridad", "sudoku"])
def test_sizes_called_equal_are(bench, task):
    configs = bench.contestants(bench.TASKS[task])
    base, size, flops = (configs[name] for name in (bench.HRM, bench.SAME_SIZE, bench.SAME_FLOPS))
    counted = [sum(p.numel() for p in model.parameters()) for model in (hrm.HRM(base), gpt.GPT(size))]
    assert counted[1] == pytest.approx(counted[0], rel=0.05)
    spent = base.flops_per_token() - 0.2 * sum(base.flops_per_token() - base.flops_per_token(k) for k in (2, 3, 4)) / 3
    assert bench.training_flops(base) == pytest.approx(spent, rel=1e-3), "2, 3 and 4 passes in the first fifth"
    assert flops.flops_per_token() == pytest.approx(spent, rel=0.05)
    assert hrm.HRM(configs[bench.NO_CYCLES]).state_dict().keys() == hrm.HRM(base).state_dict().keys()


def test_no_gpt_that_near(bench):
    base = bench.contestants(bench.TASKS["saltos"])[bench.HRM]
    with pytest.raises(SystemExit, match="ningún GPT"):
        bench.matched(base, gpt.GPTConfig.parameters, 1.2 * base.parameters())


@pytest.mark.parametrize(("bias", "segments"), [(9.0, 1), (-9.0, 3)])
def test_segments_used_are_the_halting_heads(bench, bias, segments):
    task = bench.TASKS["saltos"]
    model = hrm.HRM(bench.contestants(task)[bench.WITH_SEGMENTS]).init_weights(0).eval()
    with torch.no_grad():
        model.halt.bias.fill_(bias)
    found = bench.evaluate(model, task, some(bench, "saltos"))
    assert found["segments_used"] == segments
    assert found["groups_segments_used"] == {f"k = {k}": segments for k in range(1, 5)}
    assert found["right_halted"] == found["after_segment"][segments - 1]
    assert found["right"] == found["after_segment"][-1]


def test_the_rate_of_the_least_loss_is_chosen(bench, monkeypatch):
    losses = {1e-3: 0.5, 3e-3: 0.4, 1e-2: 0.6, 3e-2: float("nan")}
    monkeypatch.setattr(bench, "together", lambda runs, pool: [
        {"task": run.task, "name": run.name, "rate": run.rate, "loss": losses[run.rate]} for run in runs])
    _, chosen = bench.choose_rates(argparse.Namespace(tasks=["saltos"], steps=9), pool=None)
    assert chosen == {("saltos", name): 3e-3 for name in bench.contestants(bench.TASKS["saltos"])}


def test_rows_are_medians_of_their_seeds(bench):
    rows = [{"seed": seed, "rate": 1e-3, "groups": {"a": right}, **dict.fromkeys(("loss", "whole", "seconds"), 0.0),
             "right": right} for seed, right in ((0, 0.5), (1, 0.9), (2, 0.6))]
    row = bench.summary("paridad", bench.HRM, rows, 9)
    assert row["right"] == row["groups"]["a"] == {"median": 0.6, "min": 0.5, "max": 0.9} and row["seeds"] == [0, 1, 2]
    assert bench.share(row["right"]) == "60 (50-90)"


def test_a_tiny_run(bench, tmp_path):
    code, output = run([SCRIPT, "--tasks", "paridad", "--seeds", 1, "--steps", 2, "--jobs", 1, "--markdown",
                        "--json", "r.json"], tmp_path)
    assert code == 0, output
    result = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    names = list(bench.contestants(bench.TASKS["paridad"]))
    assert [row["name"] for row in result["rows"]] == names and all(f"| {name} |" in output for name in names)
    assert len(result["validation"]) == len(bench.RATES) * (len(names) - 1) and len(result["runs"]) == len(names)
    assert {row["seed"] for row in result["validation"]}.isdisjoint(row["seed"] for row in result["runs"])
    row = next(row for row in result["runs"] if row["name"] == bench.HRM)
    again = bench.carry_out(bench.Run("paridad", bench.HRM, 1, row["rate"], 2))
    assert {**again, "seconds": 0} == {**row, "seconds": 0}, "a run is a function of its seed"


@pytest.mark.parametrize("bad", ["0,0", "1000", "uno", "-1"])
def test_bad_seeds(bench, bad):
    with pytest.raises(UserError, match=f"--seeds: '{bad}'"):
        bench.main([f"--seeds={bad}"])
