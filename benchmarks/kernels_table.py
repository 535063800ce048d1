"""The summary of benchmarks/kernels.py: what of its rows is put together, beside what target, as a table."""

import dataclasses

import measure
from kernels_cases import BACKWARD, BOTH, FORWARD, INFERENCE

SUMMARY_FROM = 128  # the targets are for T from here


@dataclasses.dataclass
class Line:
    """A line of the summary: which rows it combines, and the target."""

    label: str
    op: str
    variant: str
    dtype: str | None = None
    kind: str = "torch"
    targets: dict[str, float] = dataclasses.field(default_factory=dict)
    directions: tuple[str, str] = (FORWARD, BACKWARD)

    def takes(self, row: dict) -> bool:
        return (row["op"], row["variant"], row["peer_kind"]) == (self.op, self.variant, self.kind) and (
            self.dtype in (None, row["dtype"])) and (row["op"] != "attention" or row["shape"][1] >= SUMMARY_FROM)


def both(value: float, backward: float | None = None) -> dict[str, float]:
    return {FORWARD: value, BACKWARD: backward or value}


LINES = [
    Line("atención fp32 causal", "attention", "causal, packed", "fp32", targets=both(1.5)),
    Line("atención fp32 completa", "attention", "full, packed", "fp32", targets=both(1.1)),
    Line("atención bf16 causal", "attention", "causal, packed", "bf16", targets=both(2.5)),
    Line("atención bf16 completa", "attention", "full, packed", "bf16", targets=both(1.8)),
    Line("atención con dropout 0,1", "attention", "causal, packed, dropout 0.1", targets=both(4.0, 3.0)),
    Line("atención, 4 documentos, frente a máscara", "attention", "causal, packed, 4 documents", targets=both(3.0)),
    Line("rms_norm", "rms_norm", "plain", targets=both(2.0, 4.0)),
    Line("residuo + layer_norm", "layer_norm", "residual", targets=both(1.3, 1.5)),
    Line("atención fp32 causal, q k v separados", "attention", "causal, separate", "fp32"),
    Line("atención fp32 completa, q k v separados", "attention", "full, separate", "fp32"),
    Line("atención bf16 causal, q k v separados", "attention", "causal, separate", "bf16"),
    Line("atención bf16 completa, q k v separados", "attention", "full, separate", "bf16"),
    Line("atención, 4 documentos, frente a uno por uno", "attention", "causal, packed, 4 documents", kind="loop"),
    Line("atención, 4 documentos, frente a flex_attention", "attention", "causal, packed, 4 documents", kind="flex"),
    Line("atención fp32 causal, frente a torch.compile", "attention", "causal, packed", "fp32", "compile"),
    Line("atención bf16 causal, frente a torch.compile", "attention", "causal, packed", "bf16", "compile"),
    Line("atención con dropout 0,1, frente a torch.compile", "attention", "causal, packed, dropout 0.1",
         kind="compile"),
    Line("rms_norm, frente a torch.compile", "rms_norm", "plain", kind="compile"),
    Line("residuo + layer_norm, frente a torch.compile", "layer_norm", "residual", kind="compile"),
    Line("layer_norm", "layer_norm", "plain"),
    Line("residuo con dropout + layer_norm", "layer_norm", "residual, dropout 0.1"),
    Line("residuo + rms_norm", "rms_norm", "residual"),
    Line("residuo con dropout + rms_norm", "rms_norm", "residual, dropout 0.1"),
    Line("GELU (tanh)", "gelu_tanh", "plain"),
    Line("GELU (tanh), frente a torch.compile", "gelu_tanh", "plain", kind="compile"),
    Line("capa final + entropía cruzada fp32", "linear_cross_entropy", "summed", "fp32", directions=(INFERENCE, BOTH)),
    Line("capa final + entropía cruzada bf16", "linear_cross_entropy", "summed", "bf16", directions=(INFERENCE, BOTH)),
]


def fastest(rows: list[dict]) -> list[dict]:
    """The row with the fastest peer, among rows that differ in the peer alone."""
    best: dict[tuple, dict] = {}
    for row in rows:
        key = (row["dtype"], tuple(row["shape"]))
        if key not in best or row["peer_ms"] < best[key]["peer_ms"]:
            best[key] = row
    return list(best.values())


def summarize(rows: list[dict]) -> list[dict]:
    """One entry for each line, direction and number of threads that was measured."""
    summary = []
    for line in LINES:
        for direction in line.directions:
            for threads in sorted({row["threads"] for row in rows}):
                chosen = fastest([row for row in rows if line.takes(row) and row["direction"] == direction
                                  and row["threads"] == threads])
                if chosen:
                    ratios = [row["ratio"] for row in chosen]
                    summary.append({
                        "line": line.label, "direction": direction, "threads": threads, "cells": len(chosen),
                        "ratio": measure.geometric_mean(ratios), "lowest": min(ratios), "highest": max(ratios),
                        "target": line.targets.get(direction), "peers": sorted({row["peer"] for row in chosen}),
                        "share_of_ceiling": measure.geometric_mean([row["share_of_ceiling"] for row in chosen]),
                    })
    return summary


def markdown(summary: list[dict]) -> str:
    """The summary as a table: geometric means, the lowest and highest ratio of a cell in brackets."""
    threads = sorted({entry["threads"] for entry in summary})
    columns = [(direction, n) for direction in (0, 1) for n in threads]
    heads = [f"{('ida', 'vuelta')[direction]}, {n} hilo{'s' if n > 1 else ''}" for direction, n in columns]
    lines = [f"| frente a torch | {' | '.join(heads)} | objetivo | parte del techo, en el mismo orden |",
             "|---" * (len(columns) + 3) + "|"]
    names = {line.label: line for line in LINES}
    for label in dict.fromkeys(entry["line"] for entry in summary):
        found = {(names[label].directions.index(entry["direction"]), entry["threads"]): entry
                 for entry in summary if entry["line"] == label}
        cells = []
        for column in columns:
            entry = found.get(column)
            cells.append("" if entry is None else f"{entry['ratio']:.2f} ({entry['lowest']:.2f}-{entry['highest']:.2f})"
                         + (" ✗" if entry["target"] and entry["ratio"] < entry["target"] else ""))
        targets = [f"{value:g}x" for value in names[label].targets.values()]
        shares = [f"{found[column]['share_of_ceiling']:.0%}" for column in columns if column in found]
        lines.append(f"| {label} | {' | '.join(cells)} | {' / '.join(targets)} | {' '.join(shares)} |")
    return "\n".join(lines)


def print_errors(rows: list[dict]) -> None:
    """Where our error is greater than a peer's; 2 % are left to chance, the rounding of the results themselves."""
    worse = [row for row in rows if row["error"] > 1.02 * row["peer_error"]]
    print(f"Error frente a float64 mayor que el del rival en {len(worse)} de {len(rows)} comparaciones.")
    told = {}
    for row in sorted(worse, key=lambda row: row["peer_error"] / row["error"], reverse=True):  # the worst comes last
        what = f"{row['op']} {row['dtype']} {row['variant']}, {row['direction']}, {row['peer']}"
        told[what] = f"{row['error']:.2e} frente a {row['peer_error']:.2e} con {'x'.join(map(str, row['shape']))}"
    for what, figures in told.items():
        print(f"  {what}: {figures}")
