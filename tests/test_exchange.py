"""Gradients whose zero rows stay at home: the mean that DistributedDataParallel gives, on every rank the same bits."""

import json

import pytest
import torch

from tests.support import run_ranks

PROGRAM = """
import copy, json, torch
from pathlib import Path
from types import SimpleNamespace
from aura import cli, distributed, exchange, ops, sharding
from aura.models import bert

ROWS = 400


def gradients(dist, model, spread):
    # Of two micro-batches of each rank, added up before they travel.
    torch.manual_seed(dist.rank)
    model.zero_grad(set_to_none=True)
    for last in (False, True):
        with sharding.exchanging(model, last):
            tokens = torch.randint(0, spread, (2, 9))
            model(tokens, tokens * 0, torch.tensor([9, 4]), torch.tensor([[1, 2], [0, 3]])).backward()
    return {name: parameter.grad.clone() for name, parameter in model.module.named_parameters()}


def main():
    args = SimpleNamespace(backend="gloo", dist_timeout=60.0)
    with distributed.session(args) as dist:
        ops.use("sdpa")
        config = bert.BertConfig(ROWS, 16, 1, 2, 32, 48, dropout=0.0, attention_dropout=0.0)
        module = bert.QuestionAnswering(config).init_weights(1)
        plain = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(module))
        ours = dist.wrap(module)
        table = module.bert.tokens.weight
        whole = any(parameter is table for parameter in ours._module_parameters)
        report = {"apart": ours.by_rows[0] is table, "whole": whole}
        sent, gather = [], torch.distributed.all_gather

        def counting(parts, mine):
            sent.append(mine.numel())
            gather(parts, mine)

        torch.distributed.all_gather = counting
        for spread in (20, ROWS):
            sent.clear()
            wanted, found = gradients(dist, plain, spread), gradients(dist, ours, spread)
            report[spread] = {"sent": list(sent), "rows": int((wanted["bert.tokens.weight"] != 0).any(1).sum()),
                              "worst": max(float((found[name] - wanted[name]).abs().max()) for name in wanted)}
            torch.save(found, f"{spread}.pt")
        del plain  # before its group, or who frees the group may wait for ever (see ddp.Parallel)
        table = torch.zeros(ROWS, 4)
        table[3 + dist.rank, 0] = float("nan") if dist.rank == 0 else -1.0  # of a row whose largest value is 0
        exchange.average_rows(table, dist.world_size)
        report["nan"] = [bool(table[3, 0].isnan()), float(table[4, 0]), bool(table[3 + dist.world_size:].any())]
        uneven = torch.zeros(ROWS, 4)  # all the rows of one rank, and one of each of the others
        uneven[:1 if dist.rank else ROWS] = 1.0
        exchange.average_rows(uneven, dist.world_size)
        report["uneven"] = uneven[:2, 0].tolist()
        empty = torch.zeros(ROWS, 4)
        exchange.average_rows(empty, dist.world_size)
        report["empty"] = bool(empty.any())
        Path("report.json").write_text(json.dumps(report))


cli.run(main)
"""


@pytest.mark.parametrize("world", [2, 3])
def test_the_mean_of_rows_is_that_of_whole_gradients(tmp_path, world):
    folders = [tmp_path / str(rank) for rank in range(world)]
    for folder in folders:
        folder.mkdir()
    (tmp_path / "program.py").write_text(PROGRAM)
    outputs = run_ranks([tmp_path / "program.py"], folders)
    assert [code for code, _ in outputs] == [0] * world, outputs
    reports = [json.loads((folder / "report.json").read_text()) for folder in folders]
    for report in reports:
        assert report["apart"] and not report["whole"]
        few, many = report["20"], report["400"]
        assert few["worst"] < 1e-6 and many["worst"] < 1e-6
        assert few["rows"] <= 20 and max(few["sent"]) <= 20 * 32 and len(few["sent"]) == 3  # counts, numbers, rows
        assert many["rows"] > 36
        assert report["uneven"] == [pytest.approx(1.0), pytest.approx(1 / world)], "all ranks send them alike"
        assert report["nan"] == [True, pytest.approx(-1 / world), False] and not report["empty"]
    for spread in ("20", "400"):
        first, *rest = (torch.load(folder / f"{spread}.pt", weights_only=True) for folder in folders)
        assert all(torch.equal(first[name], other[name]) for other in rest for name in first)
