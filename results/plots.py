"""Draws the plots of these pages from the tables in them, so that a plot cannot say something else than its page.

    python3 results/plots.py [PAGE...]

(Pages with files of measurements beside them also have plots of those, made by the commands that they name.)
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

HERE = Path(__file__).parent
Table = list[dict[str, str]]
"""A row a dictionary; of columns with the same name the first has the bare one, the second ends in ' 2'."""


def tables(page: str) -> list[Table]:
    """The tables of a page, in their order."""
    found: list[Table] = []
    for block in re.findall(r"(?:^\|.*\n)+", (HERE / page / "README.md").read_text(), re.M):
        lines = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.splitlines()]
        names = [name if name not in lines[0][:i] else f"{name} 2" for i, name in enumerate(lines[0])]
        found.append([dict(zip(names, line, strict=False)) for line in lines[2:]])
    return found


def number(cell: str) -> float:
    """The first number of a cell: `65,247`, `.449`, `59.9 GiB`, `**1.128**`."""
    found = re.search(r"\d[\d,]*\.?\d*|\.\d+", cell)
    assert found, f"no number in {cell!r}"
    return float(found[0].replace(",", ""))


def plain(text: str) -> str:
    return re.sub(r"[`*\\]", "", text).strip()


def bars(panel: Axes, names: list[str], values: list[float], unit: str, one: float | None = None) -> None:
    """Lying bars with their numbers; `one`: a line at the peer."""
    drawn = panel.barh(range(len(names)), values, color=[f"C{int('SageTrain' in n or 'sage' in n)}" for n in names])
    panel.bar_label(
        drawn, [f"{value:,.3g}" if value < 1000 else f"{value:,.0f}" for value in values], padding=3, fontsize=8
    )
    panel.set_yticks(range(len(names)), names, fontsize=8)
    panel.invert_yaxis()
    panel.set_xlim(0, 1.15 * max(values))
    panel.set_xlabel(unit)
    if one is not None:
        panel.axvline(one, color="black", linewidth=0.8)


def attention_elsewhere(figure: Figure) -> None:
    rows = tables("attention-elsewhere")[0]
    (what, *lengths), panel = rows[0], figure.subplots()
    thousands = [int(length.removesuffix("K")) for length in lengths]
    for row in rows:
        both = [float(row[length].split()[2]) for length in lengths]
        panel.plot(thousands, both, marker="o", markersize=3, label=plain(row[what]))
    panel.axhline(1, color="black", linewidth=0.8)
    panel.set_xscale("log", base=2)
    panel.set_xticks(thousands, lengths)
    panel.set_xlabel("tokens of a sequence")
    panel.set_ylabel("speed over FlashAttention-2")
    panel.set_ylim(0, 1.1)
    panel.legend(fontsize=7, loc="lower left")


def attention(figure: Figure) -> None:
    rows = tables("attention")[1]
    panels = figure.subplots(1, 2, sharey=True)
    for panel, d in zip(panels, ("d 128", "d 64"), strict=True):
        kind, curves = "", {}
        for row in rows:
            label, length = row[""].rpartition(", ")[::2]
            if label.startswith("d "):
                head, kind = label.split(",")[0], "causal"
            elif label:
                kind = label.removesuffix(", causal")
            if head == d:
                curves.setdefault(kind, []).append((number(length or label), number(row[" 2"])))
        for name, points in curves.items():
            panel.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=name)
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set(title=f"head dimension {d[2:]}", xscale="log", xlabel="sequence length, 1024 tokens")
        panel.set_xticks([2, 4, 8, 16, 64], ["2", "4", "8", "16", "64"], minor=False)
        panel.minorticks_off()
        panel.legend(fontsize=8)
    panels[0].set_ylabel("forward and backward, times\nthe faster of cuDNN and FlashAttention-4")


def fp4(figure: Figure) -> None:
    rows, panel = tables("fp4")[0], figure.subplots()
    lengths = [number(row["context"]) for row in rows]
    for name, end in (("trained in 16 bits", ""), ("trained with INT8 attention", " 2")):
        for attention, line in (("fp4", "-"), ("sage", ":")):
            added = [float(row[f"`{attention}` adds{end}"]) for row in rows]
            color = f"C{len(end) // 2}"
            panel.plot(lengths, added, line, marker="o", markersize=3, color=color, label=f"{attention}, {name}")
    panel.axhline(0, color="black", linewidth=0.8)
    panel.set(xscale="log", xlabel="context, tokens", ylabel="added to 16 bits' loss,\n.0001 nats per token")
    panel.set_xticks(lengths, [f"{length:,.0f}" for length in lengths])
    panel.minorticks_off()
    panel.legend(fontsize=8)


def generation(figure: Figure) -> None:
    rows = tables("generation")[0]
    names = [f"{name.split(',')[0]}, {row['prompts']}" for row in rows for name in list(row)[1:3]]
    values = [number(row[name]) for row in rows for name in list(row)[1:3]]
    bars(figure.subplots(), names, values, "tokens/s for so many prompts, 325M on one H200")


def layouts(figure: Figure) -> None:
    """Predicted over measured, of every row with both."""
    speed, memory = figure.subplots(1, 2)
    for color, (name, table) in enumerate(zip(("1B", "325M"), tables("layouts")[:2], strict=True)):
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


def loading(figure: Figure) -> None:
    rows = tables("loading")[0]
    names = [f"{row['checkpoint of 2 ranks']} -> {row['loaded at']}" for row in rows]
    bars(figure.subplots(), names, [number(row["peak"]) for row in rows], "peak, in units of the rank's state", 1)


def loss(figure: Figure) -> None:
    rows, panel = tables("loss-325m")[0], figure.subplots()
    for name in [name for name in rows[0] if name not in ("step", "tokens")]:
        points = [(number(row["tokens"]), number(row[name])) for row in rows if row[name]]
        panel.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
    panel.set(xlabel="tokens seen, millions", ylabel="validation loss, nats per token")
    panel.legend(fontsize=8)


def one_h100(figure: Figure) -> None:
    rows = tables("one-h100")[0]
    names = [plain(row["model, attention"]) for row in rows]
    bars(figure.subplots(), names, [number(row["tokens/s"]) for row in rows], "tokens/s on one H100")


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
    bars(figure.subplots(), names, [number(row["training stands still"]) for row in rows], "seconds without training")


def step(figure: Figure) -> None:
    for panel, rows, model in zip(figure.subplots(2, 1), tables("step"), ("1B", "8 layers of 4096"), strict=False):
        values = [number(row["tokens/s"]) for row in rows]
        bars(panel, [plain(row[""]) for row in rows], values, f"tokens/s of {model} on one H200", values[0])


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
    """What `paper` costs by tokens per step, from the table; and of each pair by the bias of its gradients."""
    sizes, biases = figure.subplots(1, 2)
    rows = tables("tokens-per-step")[0]
    for shift, kind in enumerate(("training loss", "held-out text")):
        cells = [[float(part) for part in row[f"`paper`, {kind}"].split("+-")] for row in rows]
        places = [number(row["tokens per step"]) * (1 + 0.1 * shift) for row in rows]
        sizes.errorbar(places, *zip(*cells, strict=True), marker="o", markersize=4, capsize=3, linewidth=1, label=kind)
    sizes.axhline(0, color="black", linewidth=0.8)
    sizes.set(xscale="log", xlabel="tokens per step", ylabel="INT8 attention less 16 bits,\nnats per token")
    sizes.set_xticks([2**14, 2**16, 2**19, 2**21], ["16K", "64K", "524K", "2.1M"])
    sizes.minorticks_off()
    sizes.legend(fontsize=8)
    lines = (HERE / "tokens-per-step/bias.jsonl").read_text().splitlines()
    pairs = [json.loads(line) for line in lines]
    foretelling = {"parted-16k", "parted-64k", "parted-1m", "parted-2m", "parted-c-512k", "parted-c-2m"}
    for pair in pairs:  # the others were run when the line had been drawn
        pair["name"] = "paper, 18 pairs" if pair["row"] in foretelling else f"then: {pair['variant']}"
    shown = ("paper-ladder", "paper-edges16", "paper-capped", "paper", "int8", "scores", "fine")
    for name in ("paper, 18 pairs", *(f"then: {variant}" for variant in shown)):
        points = [(1000 * pair["bias_to_gradient"], pair["train"]) for pair in pairs if pair["name"] == name]
        biases.scatter(*zip(*points, strict=True), s=16, marker="D" if name.startswith("then") else "o", label=name)
    biases.axline((0, 0), slope=0.0015, color="black", linewidth=0.8)
    biases.set(xlabel="squared bias of the gradient,\nthousandths of its square", ylabel="training loss less 16 bits")
    biases.legend(fontsize=7)


PLOTS: dict[str, tuple[str, float, Callable[[Figure], None]]] = {
    "attention-elsewhere": ("both.png", 3.6, attention_elsewhere),
    "attention": ("attention.png", 3.6, attention),
    "fp4": ("fp4.png", 3.2, fp4),
    "generation": ("generation.png", 2.4, generation),
    "layouts": ("layouts.png", 3.6, layouts),
    "loading": ("loading.png", 2.4, loading),
    "loss-325m": ("loss.png", 3.6, loss),
    "one-h100": ("one-h100.png", 2.6, one_h100),
    "start": ("start.png", 3.0, start),
    "saving": ("saving.png", 1.6, saving),
    "step": ("step.png", 3.6, step),
    "tensor-parallel": ("time.png", 3.6, tensor_parallel),
    "tokens-per-step": ("by-size.png", 3.6, tokens_per_step),
}
"""Of each page: the file, its height in inches, and what draws it."""


def cut(figure: Figure) -> list[str]:
    """Titles and labels of axes that are not whole in the picture, once it is drawn."""
    texts = [text for panel in figure.axes for text in (panel.title, panel.xaxis.label, panel.yaxis.label)]
    return [text.get_text() for text in texts if text.get_text() and not _inside(text.get_window_extent(), figure.bbox)]


def _inside(box: Bbox, page: Bbox) -> bool:
    return page.x0 <= box.x0 and page.y0 <= box.y0 and box.x1 <= page.x1 and box.y1 <= page.y1


def draw(page: str, folder: Path) -> Path:
    """Draw a page's plot into a folder; the file."""
    name, height, plot = PLOTS[page]
    figure = Figure(figsize=(8, height), layout="constrained")
    plot(figure)
    figure.savefig(folder / name, dpi=110)
    assert not cut(figure), f"{name}: {cut(figure)} reaches beyond the picture"
    return folder / name


def main() -> None:
    """Draw the plots of the pages that are named, else of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", choices=[[], *PLOTS], metavar="PAGE", help=f"one of {', '.join(PLOTS)}")
    for page in parser.parse_args().pages or PLOTS:
        print(draw(page, HERE / page))


if __name__ == "__main__":
    main()
