"""Draw the plots of these pages from the tables in them, so that a plot cannot say something else than its page.

    python3 results/plots.py [PAGE...]

Pages that compare training runs show plots that `sagetrain compare` drew beside their curves.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parent))

from plot_parts import HERE, bars, cut, gaps, interval, number, numbers, paired, plain, ranked, tables


def attention_elsewhere(figure: Figure) -> None:
    rows = tables("attention-elsewhere")[0]
    (what, *cells), panel = rows[0], figure.subplots()
    for row in rows:
        points = [(place, number(row[cell])) for place, cell in enumerate(cells) if row.get(cell)]
        panel.plot(*zip(*points, strict=True), marker="o", markersize=3, label=plain(row[what]))
    panel.axhline(1, color="black", linewidth=0.8)
    panel.set_xticks(range(len(cells)), cells)
    panel.set_ylabel("speed over FlashAttention-2")
    panel.set_ylim(0, 3.4)
    panel.legend(fontsize=6, loc="upper left", ncols=2)


def attention(figure: Figure) -> None:
    rows = tables("attention")[0]
    panels = figure.subplots(1, 2, sharey=True)
    for panel, column in zip(panels, ("d 128, both", "d 64, both"), strict=True):
        for mask in dict.fromkeys(row["mask"] for row in rows):
            shown = [row for row in rows if row["mask"] == mask and row[column]]
            points = [(number(row["tokens"]), number(row[column])) for row in shown]
            panel.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=mask)
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set(title=f"head dimension {number(column):.0f}", xscale="log", xlabel="sequence length, 1024 tokens")
        panel.set_xticks([2, 4, 8, 16, 64], ["2", "4", "8", "16", "64"], minor=False)
        panel.minorticks_off()
        panel.legend(fontsize=8)
    panels[0].set_ylabel("forward and backward, times\nthe faster of cuDNN and FlashAttention-4")


def which_attention(figure: Figure) -> None:
    rows, panel = tables("which-attention")[0], figure.subplots()
    names = [f"{row['sequences']}, {row['linear layers']} ({row['card']})" for row in rows]
    what = "times the speed of the same step with FlashAttention-4"
    paired(panel, names, {"scores": numbers(rows, "ratio")}, what, 1)
    panel.get_legend().remove()
    panel.axvline(1, color="black", linewidth=0.8)


def linear_layers(figure: Figure) -> None:
    (name, *kinds), rows = tables("linear-layers")[0][0], tables("linear-layers")[0]
    speed, cost = figure.subplots(1, 2)
    speeds = [row for row in rows if row[name].startswith("speed")]
    labels = [row[name].split(", ")[0].removeprefix("speed: ").replace(" on an ", "\n") for row in speeds]
    paired(speed, labels, {plain(kind): numbers(speeds, kind) for kind in kinds}, "times 16-bit linear layers")
    speed.get_legend().remove()
    speed.axvline(1, color="black", linewidth=0.8)
    costs = [row for row in rows if row[name].startswith("loss")]
    for place, kind in enumerate(kinds):
        shown = [(at + 0.2 * place, *interval(row[kind])) for at, row in enumerate(costs) if "±" in row[kind]]
        at, means, halves = zip(*shown, strict=True)
        cost.errorbar(means, at, xerr=halves, fmt="o", markersize=4, capsize=3, label=plain(kind))
    labels = [row[name].removeprefix("loss: ").split(", with")[0].replace(" at ", "\nat ") for row in costs]
    cost.set_yticks(range(len(costs)), [label.replace(" tokens per step", "") for label in labels], fontsize=7)
    cost.invert_yaxis()
    cost.axvline(0, color="black", linewidth=0.8)
    cost.set_xlabel("loss less 16 bits, nats")
    cost.legend(fontsize=7, loc="upper right")


def fp4(figure: Figure) -> None:
    rows, panel = tables("fp4")[0], figure.subplots()
    lengths = [number(row["context"]) for row in rows]
    for name, end in (("trained in 16 bits", ""), ("trained with INT8 attention", " 2")):
        for attention, line in (("fp4", "-"), ("sage", ":")):
            added = [float(row[f"`{attention}` adds{end}"]) for row in rows]
            color = f"C{len(end) // 2}"
            panel.plot(lengths, added, line, marker="o", markersize=3, color=color, label=f"{attention}, {name}")
    panel.axhline(0, color="black", linewidth=0.8)
    panel.set(xscale="log", xlabel="context, tokens", ylabel="added to 16 bits' loss,\n0.0001 nats per token")
    panel.set_xticks(lengths, [f"{length:,.0f}" for length in lengths])
    panel.minorticks_off()
    panel.legend(fontsize=8)


def generation(figure: Figure) -> None:
    rows = tables("generation")[0]
    names = [f"{name.split(',')[0]}, {row['prompts']}" for row in rows for name in list(row)[1:3]]
    values = [number(row[name]) for row in rows for name in list(row)[1:3]]
    bars(figure.subplots(), names, values, "tokens/s for so many prompts, 325M on one H200")


def trainer(figure: Figure) -> None:
    rows = tables("trainer")[0]
    names, values = [row["attention + linear layers"] for row in rows], numbers(rows, "tokens/s")
    bars(figure.subplots(), names, values, "tokens/s of transformers' Trainer, 1.1B on one H100", values[0])


def plan(figure: Figure) -> None:
    """Draw predicted over measured of every row in the log."""
    speed, memory = figure.subplots(1, 2)
    for color, (name, table) in enumerate(zip(("1B", "325M"), tables("log/layouts")[:2], strict=True)):
        for panel, measured, predicted, unit in (
            (speed, "tokens/s", "predicted", 1000),
            (memory, "peak memory", "predicted 2", 1),
        ):
            points = [(number(row[measured]) / unit, number(row[predicted]) / unit) for row in table]
            panel.scatter(*zip(*points, strict=True), s=14, color=f"C{color}", label=name)
    for panel, what in ((speed, "thousand tokens/s, all ranks"), (memory, "GiB of the fullest GPU")):
        panel.axline((0, 0), slope=1, color="black", linewidth=0.8)
        panel.set(xlabel=f"measured, {what}", ylabel="predicted by sagetrain plan")
        panel.legend(fontsize=8)


def halves(figure: Figure) -> None:
    rows = [row for row in tables("halves")[0] if row["halves"] != "not run"]
    names = [f"{row['model, layout']},\n{plain(row['linear layers, attention'])}" for row in rows]
    columns = {column: numbers(rows, column) for column in ("halves", "whole")}
    paired(figure.subplots(), names, columns, "tokens/s, all ranks")


def sequence_parallel(figure: Figure) -> None:
    rows = tables("sequence-parallel")[0]
    columns = {"without": numbers(rows, "tokens/s without"), "with": numbers(rows, "with")}
    names = [row["model, layout"] for row in rows]
    paired(figure.subplots(), names, columns, "tokens/s, all ranks, without and with sequence parallelism")


def loss(figure: Figure) -> None:
    """Draw the curves, which lie on each other, and beside them what each is above the first run in 16 bits."""
    rows, (whole, apart) = tables("loss-325m")[0], figure.subplots(1, 2)
    tokens, sixteen = numbers(rows, "tokens"), numbers(rows, "16 bits")
    for name in ("INT8", "16 bits", "16 bits again"):
        values = numbers(rows, name)
        whole.plot(tokens, values, marker="o", markersize=3, label=name)
        apart.plot(tokens, [value - base for value, base in zip(values, sixteen, strict=True)], "o-", markersize=3)
    whole.set(xlabel="tokens seen, millions", ylabel="validation loss, nats per token")
    apart.set(xlabel="tokens seen, millions", ylabel="less that of 16 bits")
    whole.legend(fontsize=8)


def start(figure: Figure) -> None:
    rows, panel = tables("start")[0], figure.subplots()
    ranks = [name for name in rows[0] if name]
    for place, row in enumerate(rows[index] for index in (0, 3, 4, 5)):
        label = plain(row[""]).partition(":")[0]
        panel.plot([number(each) for each in ranks], [number(row[each]) for each in ranks], f"C{place}o-", label=label)
    panel.set_xscale("log", base=2)
    panel.set_xticks([number(each) for each in ranks], [each.removesuffix(" ranks") for each in ranks])
    panel.set_xlabel("ranks, simulated on two cores")
    panel.set_ylabel("seconds from the first rank's start")
    panel.set_ylim(0)
    panel.legend(fontsize=8)


def saving(figure: Figure) -> None:
    rows = tables("saving")[0]
    names = [row[""] for row in rows]
    bars(figure.subplots(), names, numbers(rows, "training stands still"), "seconds without training")


def step(figure: Figure) -> None:
    rows = tables("step")[0]
    models = dict.fromkeys(row["model"] for row in rows)
    for panel, model in zip(figure.subplots(len(models), 1), models, strict=True):
        shown = [row for row in rows if row["model"] == model]
        values = numbers(shown, "tokens/s")
        bars(panel, [plain(row[""]) for row in shown], values, f"tokens/s of {model} on one H200", values[0])


def tensor_parallel(figure: Figure) -> None:
    rows, panel = {row[""].split(" (")[0].split(":")[0]: row for row in tables("tensor-parallel")[0]}, figure.subplots()
    columns = [name for name in rows["matmuls"] if name and rows["matmuls"][name]]
    below = [0.0] * len(columns)
    for name in ("matmuls", "attention", "other kernels", "communication waited for", "idle"):
        values = [number(rows[name][column]) for column in columns]
        panel.bar(range(len(columns)), values, bottom=below, label=name)
        below = [a + b for a, b in zip(below, values, strict=True)]
    labels = [column.replace("tensor and sequence parallel ", "TP ").replace("4,", "TP 4,") for column in columns]
    panel.set_xticks(range(len(columns)), labels)
    panel.set_ylabel("ms of a step of 65,536 tokens, 1B")
    panel.legend(fontsize=8)


def tokens_per_step(figure: Figure) -> None:
    rows, panel = tables("tokens-per-step")[0], figure.subplots()
    for shift, column in enumerate(list(rows[0])[2:]):
        shown = [row for row in rows if row[column]]
        means, widths = zip(*(interval(row[column]) for row in shown), strict=True)
        places = [number(row["tokens per step"]) * (1 + 0.06 * shift) for row in shown]
        panel.errorbar(places, means, widths, marker="o", markersize=4, capsize=3, linewidth=1, label=plain(column))
    panel.axhline(0, color="black", linewidth=0.8)
    panel.set(xscale="log", xlabel="tokens per step", ylabel="INT8 attention less 16 bits,\nnats per token")
    panel.set_xticks([2**14, 2**16, 2**19, 2**21], ["16K", "64K", "524K", "2.1M"])
    panel.minorticks_off()
    panel.legend(fontsize=8)


def bias(figure: Figure) -> None:
    """Draw each pair's cost by the bias of its gradients, from the file that the page names."""
    panel = figure.subplots()
    lines = (HERE / "tokens-per-step/bias.jsonl").read_text().splitlines()
    pairs = [json.loads(line) for line in lines]
    first = {"parted-16k", "parted-64k", "parted-1m", "parted-2m", "parted-c-512k", "parted-c-2m"}
    for pair in pairs:  # the other pairs were run when the line had been drawn
        pair["name"] = "paper, 18 pairs" if pair["row"] in first else f"then: {pair['variant']}"
    shown = ("paper-ladder", "paper-edges16", "paper-capped", "paper", "int8", "scores", "fine")
    for name in ("paper, 18 pairs", *(f"then: {variant}" for variant in shown)):
        points = [(1000 * pair["bias_to_gradient"], pair["train"]) for pair in pairs if pair["name"] == name]
        panel.scatter(*zip(*points, strict=True), s=16, marker="D" if name.startswith("then") else "o", label=name)
    panel.axline((0, 0), slope=0.0015, color="black", linewidth=0.8)
    panel.set(xlabel="squared bias of the gradient, thousandths of its square", ylabel="training loss less 16 bits")
    panel.legend(fontsize=7)


def small_card(figure: Figure) -> None:
    rows, panel = tables("small-card")[0], figure.subplots()
    columns = ("plan", "allocated", "reserved", "with CUDA's context")
    paired(panel, [plain(row["linear layers"]) for row in rows], {c: numbers(rows, c) for c in columns}, "GiB")
    panel.axvline(22, color="black", linewidth=0.8)
    panel.set_xlim(0, 32)


def muon(figure: Figure) -> None:
    rows, panel = tables("muon")[0], figure.subplots()
    names, update = [plain(row["optimizer"]) for row in rows], numbers(rows, "update")
    rest = [step - part for step, part in zip(numbers(rows, "step"), update, strict=True)]
    panel.barh(names, rest, label="micro-steps and the rest")
    panel.barh(names, update, left=rest, label="update")
    panel.invert_yaxis()
    panel.set_xlabel("ms of a step of 131,072 tokens, 1B on one H100")
    panel.legend(fontsize=7, loc="lower left")


def graphs(figure: Figure) -> None:
    rows, panel = tables("graphs")[0], figure.subplots()
    names = [f"{row['micro-step']}, {row['linear layers, attention']}" for row in rows]
    columns = {"by the host": "by the host, tokens/s", "replayed": "replayed, tokens/s"}
    paired(panel, names, {label: numbers(rows, column) for label, column in columns.items()}, "tokens/s of one H200")


def muon_loss(figure: Figure) -> None:
    rows, panel = tables("muon-loss")[0], figure.subplots()
    names = [row["tuned"].replace(", ", ",\n") for row in rows]
    paired(
        panel,
        names,
        {side: numbers(rows, held) for side, held in (("AdamW", "held out"), ("Muon", "held out 2"))},
        "held-out loss",
    )
    panel.set_xlim(3, 5.2)


def width_rule(figure: Figure) -> None:
    (rows,) = tables("width-rule")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, rule, title in zip(panels, ("none", "width"), ("the same rate", "lr_base_width 256"), strict=True):
        for place, width in enumerate(("64", "128", "256", "512", "1024")):
            (row,) = [row for row in rows if row["width"] == width and row["rule"] in (rule, "either")]
            found = [(float(rate), number(cell)) for rate, cell in [*row.items()][2:] if cell]
            panel.plot(*zip(*found, strict=True), color=f"C{place}", marker="o", markersize=3, label=f"width {width}")
            panel.plot(*min(found, key=lambda point: point[1]), color=f"C{place}", marker="o", markersize=9, alpha=0.5)
        panel.set_xscale("log")
        panel.set_xlabel(f"optimizer.lr, {title}")
    panels[0].set_ylabel("held-out loss")
    panels[0].legend(fontsize=8, loc="lower right")


def int8_limits(figure: Figure) -> None:
    (rows,) = tables("int8-limits")
    kinds, colors = [*dict.fromkeys(row["tokens per step"] for row in rows)], {"16 bits": "C0", "`paper`": "C1"}
    panels = figure.subplots(1, len(kinds), sharex=True, sharey=True)
    for panel, tokens in zip(panels, kinds, strict=True):
        for row in (row for row in rows if row["tokens per step"] == tokens):
            found = [(float(rate), cell) for rate, cell in [*row.items()][3:] if cell]
            x, y = [rate for rate, _ in found], [number(cell) for _, cell in found]
            dashed, color = "--" * (row["QK-norm"] == "no") or "-", colors[row["attention"]]
            name = f"{plain(row['attention'])}, {'QK-norm' if dashed == '-' else 'none'}"
            panel.plot(x, y, dashed, color=color, marker="o", markersize=3, label=name)
            bad = [place for place, (_, cell) in enumerate(found) if not re.search(r"\(0/", cell)]
            panel.plot([x[place] for place in bad], [y[place] for place in bad], "x", color=color, markersize=9)
        panel.set_xscale("log")
        panel.set_xlabel(f"optimizer.lr\ntokens per step: {tokens}")
    panels[0].set_ylabel("held-out loss; x: a seed diverged")
    panels[0].legend(fontsize=8, loc="upper left")


def equal_time(figure: Figure) -> None:
    rows = tables("equal-time")[0]
    texts = dict.fromkeys(row["text"] for row in rows)
    for text, panel in zip(texts, figure.subplots(1, len(texts)), strict=True):
        for row in rows:
            if row["text"] == text:
                points = [(number(name), number(cell)) for name, cell in row.items() if name.endswith(" s")]
                panel.plot(*zip(*points, strict=True), marker="o", markersize=3, label=plain(row["arm"]))
        panel.set(title=text, xlabel="seconds of training on one H200", ylabel="bits per byte of held-out text")
        panel.legend(fontsize=7)


def recipe_parts(figure: Figure) -> None:
    (first, *rows), panel = tables("recipe-parts")[0], figure.subplots()
    for row in rows:
        shares = [name for name in row if name.endswith(" %")]
        less = [number(row[name]) - number(first[name]) for name in shares]
        panel.plot([number(name) for name in shares], less, marker="o", markersize=3, label=plain(row["arm"]))
    panel.axhline(0, color="black", linewidth=0.8)
    panel.set(xlabel="share of the run, %", ylabel="bits per byte of held-out text\nless those of our recipe")
    panel.set_ylim(-0.1, 0.24)
    panel.legend(fontsize=6, ncols=3, loc="upper center")


def muon_int8(figure: Figure) -> None:
    rows, panel = tables("muon-int8")[0], figure.subplots()
    for name in ("gap under AdamW", "gap under Muon"):
        cells = [(row["tokens, millions"].split(" to "), row[name]) for row in rows if "±" in row[name]]
        tokens = [(float(first) + float(last)) / 2 for (first, last), _ in cells]
        gaps, widths = zip(*(interval(cell) for _, cell in cells), strict=True)
        panel.errorbar(tokens, gaps, widths, marker="o", markersize=3, capsize=3, label=name.removeprefix("gap "))
    panel.axhline(0, color="black", linewidth=0.8)
    panel.set(xlabel="tokens seen, millions", ylabel="INT8 less 16 bits, nats")
    panel.legend(fontsize=8)


PLOTS: dict[str, tuple[str, float, Callable[[Figure], None]]] = {
    "attention-elsewhere": ("both.png", 3.6, attention_elsewhere),
    "attention": ("attention.png", 3.6, attention),
    "bias": ("bias.png", 3.6, bias),
    "default": (
        "default.png",
        2.8,
        gaps("default", "{8 bits in}, {tokens per step}", "loss of the default less 16 bits, nats"),
    ),
    "engines": (
        "engines.png",
        4.0,
        ranked("engines", "{engine}, ZeRO {ZeRO}, {linear layers}, {commit}", "tokens/s", "tokens/s on two H100s"),
    ),
    "equal-time": ("time.png", 3.2, equal_time),
    "experts": (
        "gap.png",
        3.4,
        gaps(
            "experts",
            "{tokens a step}: {in 8 bits}",
            "loss less that of 16 bits, nats",
        ),
    ),
    "fp4": ("fp4.png", 3.2, fp4),
    "generation": ("generation.png", 2.4, generation),
    "gradients": (
        "gradients.png",
        2.8,
        ranked("gradients", "{linear layers}: {gradients}", "ratio", "speed over ZeRO 1 in the same run", 1),
    ),
    "graphs": ("graphs.png", 3.6, graphs),
    "halves": ("halves.png", 3.4, halves),
    "layouts": (
        "layouts.png",
        3.0,
        ranked("layouts", "{model}, {GPUs} GPUs: {layout}", "scaling", "speed of a GPU over that of one GPU alone", 1),
    ),
    "8b": ("8b.png", 3.4, ranked("8b", "{layout}, {linear layers}", "of a GPU", "tokens/s of a GPU")),
    "linear-layers": ("linear-layers.png", 3.6, linear_layers),
    "loading": (
        "loading.png",
        2.4,
        ranked("loading", "{checkpoint of 2 ranks} -> {loaded at}", "peak", "peak, in units of the rank's state", 1),
    ),
    "loss-325m": ("loss.png", 3.6, loss),
    "muon": ("step.png", 2.0, muon),
    "muon-loss": ("tuned.png", 2.6, muon_loss),
    "int8-limits": ("rates.png", 3.6, int8_limits),
    "int8-size": (
        "size.png",
        3.2,
        gaps("int8-size", "{parameters}: {run in INT8}", "loss in INT8 less that in 16 bits, nats"),
    ),
    "muon-int8": ("muon-int8.png", 3.0, muon_int8),
    "offload": ("offload.png", 2.4, ranked("offload", "{`offload`}, ZeRO {ZeRO}", "tokens/s", "tokens/s on two H200s")),
    "olmoe": (
        "step.png",
        2.2,
        ranked("olmoe", "{side}, {linear layers, attention}", "tokens/s", "tokens/s on one H200, OLMoE 1B-7B"),
    ),
    "one-h100": ("one-h100.png", 2.6, ranked("one-h100", "{model, attention}", "tokens/s", "tokens/s on one H100")),
    "plan": ("plan.png", 3.6, plan),
    "recipe-parts": ("parts.png", 3.6, recipe_parts),
    "sequence-parallel": ("sequence-parallel.png", 3.0, sequence_parallel),
    "small-card": ("memory.png", 2.4, small_card),
    "start": ("start.png", 3.0, start),
    "saving": ("saving.png", 1.6, saving),
    "step": ("step.png", 3.6, step),
    "tensor-parallel": ("time.png", 3.6, tensor_parallel),
    "tokens-per-step": ("by-size.png", 3.6, tokens_per_step),
    "trainer": ("trainer.png", 2.4, trainer),
    "which-attention": ("which-attention.png", 4.4, which_attention),
    "width-rule": ("rates.png", 3.6, width_rule),
    "window-loss": (
        "gap.png",
        2.4,
        gaps("window-loss", "{attention}, window: {window}", "loss less that of 16 bits, nats"),
    ),
}
"""Each page's file, its height in inches, and the function that draws it."""


def draw(page: str, folder: Path) -> Path:
    """Draw a page's plot into a folder and return the file."""
    name, height, plot = PLOTS[page]
    figure = Figure(figsize=(8, height), layout="constrained")
    plot(figure)
    figure.savefig(folder / name, dpi=110)
    assert not cut(figure), f"{name}: {cut(figure)} reaches beyond the picture"
    return folder / name


def main() -> None:
    """Draw the plots of the pages that are named, or of all pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", choices=[[], *PLOTS], metavar="PAGE", help=f"one of {', '.join(PLOTS)}")
    for page in parser.parse_args().pages or PLOTS:
        print(draw(page, HERE / page))


if __name__ == "__main__":
    main()
