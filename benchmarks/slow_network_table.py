"""What slow_network.py shows of its result: the tables on the console, those of the guide, and the chart."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import slow_network_crew  # noqa: E402
from slow_network_crew import CONTROL, METHODS, ONE  # noqa: E402

from aura import report  # noqa: E402

TITLES = {ONE: "una máquina", CONTROL: "sin intercambio"}
CLOSE = 0.25  # how far a forecast may be from what is measured


def print_speeds(net, rows):
    """The table of a network."""
    print(f"\n{title(net.name)}\n{'':16} {'tokens/s':>9} {'(mín-máx)':>13} {'x una':>6} {'bytes/token':>12} "
          f"{'ddp/éste':>9} {'s/paso':>8} {'previsto':>9}")
    for row in rows:
        name = TITLES.get(row["method"], row["method"])
        if "failed" in row:
            print(f"{name:16} falló")
            continue
        spread = f"({row['tokens_per_s_min']:.0f}-{row['tokens_per_s_max']:.0f})"
        forecast = row.get("predicted_ratio")
        told = "" if forecast is None else f"{row['predicted_s']:9.2f}" + (
            "" if abs(forecast - 1) <= CLOSE else "  fuera del 25 %")
        print(f"{name:16} {row['tokens_per_s']:9.0f} {spread:>13} {shown(row.get('to_one'), 2):>6} "
              f"{row['bytes_per_token']:12.1f} {shown(row.get('bytes_ddp_ratio'), 1):>9} {row['step_s']:8.3f} {told}")
        if "choice" in row:
            print(f"{'':16} elige {', '.join(row['choices'])}; lo más rápido fue {row['fastest']}"
                  f"{'' if row['right'] else ': NO acierta'}")
    print(flush=True)


def shown(value, digits):
    return "-" if value is None else f"{value:.{digits}f}"


def title(name):
    """A network's name in words."""
    net = slow_network_crew.network(name)
    rates = f"{net.mbit:g} Mbit/s" if net.mbit == net.back else f"{net.mbit:g}/{net.back:g} Mbit/s"
    return rates + (f", {net.loss} % de pérdida" if net.loss else "")


def print_summary(found):
    for pair in found["ratios"]:
        what = "con los mismos tokens" if pair["to"] == "ddp" else f"en el mismo tiempo a {title(found['network'])}"
        print(f"pérdida de validación de {pair['method']} frente a {TITLES.get(pair['to'], pair['to'])}, {what}: "
              f"{pair['ratio']:.4f} ({pair['ratio_min']:.4f}-{pair['ratio_max']:.4f})", flush=True)


def markdown(result):
    """The result as the guide's tables."""
    if "summary" in result:
        return quality_markdown(result)
    found = {(row["network"], row["method"]): row for row in result["rows"] if "failed" not in row}
    nets = list(dict.fromkeys(row["network"] for row in result["rows"]))
    methods = [method for method in METHODS if any((net, method) in found for net in nets)]
    header = [TITLES.get(method, method) for method in methods]
    lines = table(["red", *header], [[title(net), *(speed_cell(found.get((net, method))) for method in methods)]
                                     for net in nets])
    senders = [method for method in methods if method not in (ONE, CONTROL)]
    lines += ["", *table(["bytes por token", *senders], [
        [title(net), *(sent_cell(found.get((net, method))) for method in senders)] for net in nets])]
    return "\n".join(lines) + "\n"


def table(header, lines):
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---", *["---:"] * (len(header) - 1)], *lines)]


def speed_cell(row):
    """'1234 (x 1.85)', with what auto chose."""
    if row is None:
        return "-"
    ratio = f" (x {row['to_one']:.2f})" if "to_one" in row and row["method"] != ONE else ""
    return f"{row['tokens_per_s']:.0f}{ratio}" + (f" {row['choice']}" if "choice" in row else "")


def sent_cell(row):
    """'123.4 (1/417)', the share of what ddp sends."""
    if row is None:
        return "-"
    ratio = f" (1/{row['bytes_ddp_ratio']:.0f})" if row.get("bytes_ddp_ratio", 1) > 1.5 else ""
    return f"{row['bytes_per_token']:.0f}{ratio}"


def quality_markdown(result):
    rows = result["rows"]
    lines = table(["método", *(f"semilla {seed}" for seed in result["seeds"]), "tokens"], [
        [TITLES.get(method, method), *(f"{row['val_loss']:.4f}" for row in rows if row["method"] == method),
         f"{next(row['tokens'] for row in rows if row['method'] == method) / 1e6:.2f} M"]
        for method in dict.fromkeys(row["method"] for row in rows)])
    return "\n".join(lines) + "\n"


def draw(result, path):
    """The result as a PNG: tokens/s by network and method, or validation loss over tokens and, where known, time."""
    quality = "summary" in result
    figure, axes = report.new_figure(1, 2 if quality and result["summary"]["tokens_per_s"] else 1, figsize=(10, 5),
                                     sharey=True, squeeze=False, layout="constrained")
    if quality:
        draw_losses(result, axes[0])
    else:
        draw_speeds(result, axes[0][0])
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False,
                  columnspacing=1.2, handlelength=1.2)
    for each in axes[0]:
        each.grid(axis="y", alpha=0.3)
        each.set_axisbelow(True)
    figure.savefig(path, format="png", dpi=110)


def draw_speeds(result, axes):
    """Bars: a group a network, a bar a method."""
    rows = [row for row in result["rows"] if "failed" not in row]
    nets = list(dict.fromkeys(row["network"] for row in rows))
    methods = [method for method in METHODS if any(row["method"] == method for row in rows)]
    wide = 0.8 / len(methods)
    for place, method in enumerate(methods):
        own = [row for row in rows if row["method"] == method]
        axes.bar([nets.index(row["network"]) + (place - (len(methods) - 1) / 2) * wide for row in own],
                 [row["tokens_per_s"] for row in own], wide, label=TITLES.get(method, method))
    axes.set_xticks(range(len(nets)), [title(net) for net in nets])
    axes.set(ylabel="tokens/s", title=f"{result['machines']} máquinas, gradientes de {result['gradient_mb']:.0f} MB")


def draw_losses(result, axes):
    """A line for each method and seed: over tokens, and over minutes at the summary's tokens/s."""
    methods, rates = list(dict.fromkeys(row["method"] for row in result["rows"])), result["summary"]["tokens_per_s"]
    for row in result["rows"]:
        label = TITLES.get(row["method"], row["method"]) if row["seed"] == result["seeds"][0] else None
        tokens, losses = zip(*row["curve"], strict=True)
        style = {"color": f"C{methods.index(row['method'])}", "label": label, "alpha": 0.7, "marker": "."}
        axes[0].plot([count / 1e6 for count in tokens], losses, **style)
        if row["method"] in rates:
            axes[-1].plot([count / rates[row["method"]] / 60 for count in tokens], losses, **style)
    axes[-1].set(xlabel=f"minutos a {title(result['summary']['network'])}")
    axes[0].set(xlabel="millones de tokens", ylabel="pérdida de validación (nats por token)")
