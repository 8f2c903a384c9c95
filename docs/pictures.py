"""Draw the pictures of these pages as SVG, from the code's own facts where there are any.

    python3 docs/pictures.py

Which products are in INT8, where the rows of experts lie, who is in which group, what a rank holds, how gradients
travel, the order of a pipeline, and the names of files are read from the code. tests/house/test_pictures.py holds that
the files in docs/pictures are what this script draws. A picture is at most 480 units wide, so that it can be read on a
phone, and follows the reader's light or dark colours.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import torch
from rank_pictures import layout, pipeline, sequence, timeline, zero
from svg import WIDTH, Picture

from sagekernels.grouped import plan_rows_twin
from sagekernels.lowbit import LOW_BIT
from sagetrain.checkpoint.manifest import KINDS, file_name
from sagetrain.checkpoint.on_disk import folder_name
from sagetrain.model.backends import Product, Sage

HERE = Path(__file__).parent
FOLDER = HERE / "pictures"

# -- a run -------------------------------------------------------------------------------------------------------------


def run() -> Picture:
    """Draw what happens between a YAML file and a checkpoint, and what each part writes."""
    picture = Picture("A run: YAML and overrides, check, plan, ranks meet, choices, steps in a loop, checkpoint")
    picture.text(14, 24, "what happens", 13, kind="faint")
    picture.text(WIDTH - 14, 24, "what it leaves in the run folder", 13, kind="faint", anchor="end")
    stages = [
        (("one YAML file", "and overrides key=value"), "box", ("config.yaml", "resolved, with defaults")),
        (("check", "every key, file and rule;", "an error ends here: exit code 2"), "a", ("findings.json",)),
        (("ranks meet", "same code, versions, data?"), "a", ()),
        (("auto is decided", "kernels tested, then timed"), "a", ("attention.json", "linear.json")),
        (("weights", "new, or the newest checkpoint"), "a", ()),
    ]
    y = 38.0
    middle = 130.0
    for place, (lines, kind, left) in enumerate(stages):
        height = 20 + 18 * len(lines)
        if place:
            picture.line((middle, y - 16), (middle, y - 2))
        picture.box(14, y, 2 * middle - 28, height, lines, kind)
        _leaves(picture, y + height / 2, left)
        y += height + 16
    loop = y - 6
    picture.line((middle, y - 16), (middle, y + 14))
    y += 16
    steps = [
        (("forward and backward", "micro-batch by micro-batch"), "d", ()),
        (("sum over the ranks", "mean of all gradients"), "d", ()),
        (("judge the step", "spike? skip, rewind or stop"), "d", ("events.jsonl",)),
        (("AdamW", "fp32 master weights"), "d", ("metrics.jsonl", "stability.json")),
    ]
    for place, (lines, kind, left) in enumerate(steps):
        if place:
            picture.line((middle, y - 12), (middle, y - 1))
        picture.box(24, y, 2 * middle - 48, 46, lines, kind)
        _leaves(picture, y + 23, left)
        y += 58
    picture.frame(14, loop, 2 * middle - 28, y - loop - 2)
    picture.text(2 * middle - 8, loop + 16, "every step", 13, kind="faint")
    picture.line((middle, y - 2), (middle, y + 16))
    picture.box(14, y + 18, 2 * middle - 28, 46, ("checkpoint", "written beside the next steps"), "b")
    _leaves(picture, y + 41, ("checkpoints/", f"{folder_name(2000)}/"))
    return picture


def _leaves(picture: Picture, y: float, names: tuple[str, ...]) -> None:
    """Name what a stage writes, right of it."""
    for i, name in enumerate(names):
        mono = " " not in name
        at = y + 5 + 17 * (i - (len(names) - 1) / 2)
        picture.text(WIDTH - 14, at, name, 12.5, anchor="end", mono=mono, kind="ink" if mono else "faint")
    if names:
        picture.line((250, y), (262, y), arrow=False)


# -- attention ---------------------------------------------------------------------------------------------------------

ATTENTION_RECIPES = ("scores", "fine", "paper")
GIVES = {
    "Q K^T": "the scores S", "P V": "the output O", "Q K^T again": "S, for P", "P^T dO": "dV", "dO V^T": "dP, for dS",
    "dS K": "dQ", "dS^T Q": "dK",
}  # fmt: skip


def attention() -> Picture:
    """Draw the seven products as they feed each other, and below which of them each recipe computes in INT8."""
    products = get_args(Product)
    quantized = {recipe: Sage(recipe).quantized for recipe in ATTENTION_RECIPES}
    ever = frozenset[str]().union(*quantized.values())
    picture = Picture("Attention's seven matrix products, and which of them are in INT8 by each recipe")

    def product(number: int, x: float, y: float) -> None:
        name = products[number - 1]
        picture.box(x, y, 98, 34, f"{number}  {name.removesuffix(' again')}", "d" if name in ever else "box")

    def tensor(name: str, x: float, y: float) -> None:
        picture.text(x, y, name, 15, anchor="middle", bold=True)

    def chain(y: float, first: int, second: int, *, into: str, out: str) -> None:
        """Draw inputs, a product, softmax, a product and its result in one row."""
        tensor("Q", 22, y + 14)
        tensor("K", 22, y + 34)
        picture.line((34, y + 17), (52, y + 17))
        product(first, 54, y)
        picture.line((152, y + 17), (188, y + 17))
        picture.text(168, y + 11, "S", 13, anchor="middle")
        picture.box(190, y, 76, 34, "softmax")
        picture.line((266, y + 17), (302, y + 17))
        picture.text(282, y + 11, "P", 13, anchor="middle")
        product(second, 304, y)
        tensor(into, 353, y - 18)
        picture.line((353, y - 14), (353, y - 2))
        picture.line((402, y + 17), (426, y + 17))
        tensor(out, 446, y + 22)

    picture.text(14, 26, "forward", 14, bold=True)
    chain(52, 1, 2, into="V", out="O")
    picture.text(14, 118, "backward", 14, bold=True)
    chain(148, 3, 4, into="dO", out="dV")
    tensor("dO", 22, 246)
    tensor("V", 22, 266)
    picture.line((38, 249), (52, 249))
    product(5, 54, 232)
    picture.line((152, 249), (188, 249))
    picture.text(168, 243, "dP", 13, anchor="middle")
    picture.line((282, 167), (282, 206), (228, 206), (228, 230))
    picture.box(190, 232, 92, 34, "P ∘ (dP − δ)")
    picture.line((282, 243), (302, 243))
    picture.line((282, 255), (291, 255), (291, 293), (302, 293))
    picture.text(292, 226, "dS", 13, anchor="middle")
    product(6, 304, 226)
    product(7, 304, 276)
    for y, result in ((243, "dQ"), (293, "dK")):
        picture.line((402, y), (426, y))
        tensor(result, 446, y + 5)
    picture.legend(338, [("d", "in INT8, by the recipe"), ("box", "always 16 or 32 bits")])
    top, step = 386, 25
    for column, recipe in enumerate(ATTENTION_RECIPES):
        picture.text(250 + 66 * column, top - 14, recipe, 13, anchor="middle", bold=True, mono=True)
    for row, name in enumerate(products):
        y = top + step * row
        picture.text(14, y + 14, f"{row + 1}  {name.removesuffix(' again')}", 13.5)
        picture.text(90, y + 14, f"gives {GIVES[name]}", 12.5, kind="faint")
        for column, recipe in enumerate(ATTENTION_RECIPES):
            inside = name in quantized[recipe]
            picture.box(222 + 66 * column, y, 56, 19, "INT8" if inside else "16", "d" if inside else "box", size=12)
    return picture


# -- linear layers -----------------------------------------------------------------------------------------------------

FORMATS = {torch.float8_e4m3fn: "e4m3", torch.int8: "int8"}


def linear() -> Picture:
    """Draw the three products of a linear layer, and their 8-bit formats."""
    picture = Picture("The three products of a linear layer, and their 8-bit formats")
    flows = (("forward", 46, "X", "X W^T", "Y"), ("backward", 106, "dY", "dY W", "dX"), ("", 150, "dY", "dY^T X", "dW"))
    for number, (name, y, into, product, out) in enumerate(flows, 1):
        picture.text(14, y - 12, name, 14, bold=True)
        picture.text(60, y + 22, into, 15, anchor="middle", bold=True)
        picture.line((80, y + 17), (118, y + 17))
        picture.box(120, y, 98, 34, f"{number}  {product}", "d")
        picture.line((218, y + 17), (256, y + 17))
        picture.text(280, y + 22, out, 15, anchor="middle", bold=True)
    picture.text(310, 68, "the output", 13, kind="faint")
    picture.text(310, 128, "goes to the layer before", 13, kind="faint")
    picture.text(310, 172, "goes to the optimizer", 13, kind="faint")
    top, step = 226, 26
    for column, product in enumerate(("1", "2", "3")):
        picture.text(231 + 95 * column, top - 10, product, 13, anchor="middle", bold=True)
    for row, (precision, matmul) in enumerate(LOW_BIT.items()):
        number, gradient = FORMATS[matmul.number], FORMATS[matmul.gradient]
        y = top + step * row
        picture.text(14, y + 14, precision, 11.5, mono=True)
        for column, formats in enumerate((f"{number} × {number}", *2 * (f"{gradient} × {number}",))):
            picture.box(186 + 95 * column, y, 91, 20, formats, "a" if precision == "int8" else "d", size=11.5)
    return picture


# -- experts -----------------------------------------------------------------------------------------------------------


def rows() -> Picture:
    """Draw how the choices of four tokens become rows sorted by expert, and how their results return."""
    picture = Picture("Tokens choose experts; their rows lie sorted by expert without padding; results are added up")
    choices = torch.tensor([[0, 2], [2, 1], [0, 2], [2, 0]])
    plan = plan_rows_twin(choices, 4, choices.numel())
    kinds, top, step, gap = ("a", "b", "c", "d"), 50, 25, 12
    for x, head in ((14, "tokens choose"), (166, "rows by expert"), (286, "the experts"), (396, "sums")):
        picture.text(x, 28, head, 13, bold=True)
    place, y, begin = dict[int, float](), float(top), 0
    for expert, end in enumerate(plan.ends.tolist()):
        first = y
        for row in range(begin, end):
            place[row] = y
            token = int(plan.tokens()[row])
            picture.box(166, y, 92, step - 4, f"token {token}", kinds[token], size=12.5)
            y += step
        if end == begin:
            picture.text(168, y + 14, "no row", 12.5, kind="faint")
            y += step
        picture.box(286, first, 82, y - first - 4, f"expert {expert}", size=12.5)
        begin, y = end, y + gap
    middle = (y - gap + top) / 2
    for token, chosen in enumerate(choices.tolist()):
        at = middle + (token - 1.5) * 52
        picture.box(
            14, at - 20, 92, 40, (f"token {token}", f"experts {min(chosen)}, {max(chosen)}"), kinds[token], size=12
        )
        picture.box(410, at - 12, 56, 24, f"token {token}", kinds[token], size=12)
        for row in plan.slot[token].tolist():
            picture.line((106, at), (164, place[row] + step / 2 - 2))
            picture.line((368, place[row] + step / 2 - 2), (408, at))
    y += 8
    for line in ("A row for each choice, however they fall: nothing is dropped,",
                 "padded, or counted by the host. Kernels read a table of tiles."):  # fmt: skip
        picture.text(14, y, line, 11.5, kind="faint")
        y += 16
    return picture


# -- a checkpoint ------------------------------------------------------------------------------------------------------


def checkpoint() -> Picture:
    """Draw how a checkpoint is written, what lies in its folder, and how another layout reads it."""
    picture = Picture("A checkpoint: how it is written, its files, and how other ranks read it")
    picture.text(14, 26, "written beside training, published at once", 14, bold=True)
    stages = (("copy", "to host", "memory"), ("write", "each rank", "its files"), ("sync", "to disk,", "SHA-256"),
              ("rename", "once all", "are there"))  # fmt: skip
    for place, lines in enumerate(stages):
        x = 14 + 118 * place
        picture.box(x, 40, 96, 66, lines, "b" if place == 0 else "box", size=13)
        if place:
            picture.line((x - 21, 73), (x - 2, 73))
    picture.text(14, 124, "training waits", 12.5, kind="faint")
    picture.text(132, 124, "training goes on", 12.5, kind="faint")
    y, writers, kinds = 158.0, 4, "abcd"
    picture.text(14, y, f"checkpoints/{folder_name(2000)}/", 13.5, mono=True, bold=True)
    names = [(file_name(kind, f"tp000-dp{rank:03d}"), kinds[rank]) for kind in KINDS[:2] for rank in (0, 1)]
    what = {"shard": "fp32 weights", "moments": "AdamW's moments"}
    for name, kind in names:
        y += 22
        picture.rectangle(22, y - 11, 12, 12, kind, round_=2)
        picture.text(42, y, name, 12.5, mono=True)
        picture.text(WIDTH - 14, y, what[name.split("-")[0]], 12.5, anchor="end", kind="faint")
    for name, said in (("rng-00000.pt", "a rank's random state"), ("config.yaml", "resolved"),
                       ("manifest.json", "every piece, every SHA-256")):  # fmt: skip
        y += 22
        picture.text(42, y, name, 12.5, mono=True)
        picture.text(WIDTH - 14, y, said, 12.5, anchor="end", kind="faint")
    y += 36
    picture.text(14, y, "one parameter, as a flat range", 14, bold=True)
    y += 12
    whole, readers = WIDTH - 28.0, 3
    for rank in range(writers):
        picture.box(
            14 + whole / writers * rank, y, whole / writers - 1, 28, f"piece of rank {rank}", kinds[rank], size=12
        )
    for rank in range(readers):
        left, right = (14 + whole / readers * (rank + share) for share in (0.04, 0.96))
        picture.line((left, y + 36), (left, y + 44), (right, y + 44), (right, y + 36), arrow=False)
        picture.text((left + right) / 2, y + 62, f"rank {rank} of {readers} reads", 12.5, anchor="middle", kind="faint")
    return picture


# -- what it gains and costs -------------------------------------------------------------------------------------------

GAINS = (
    ("1B", "PyTorch, bf16", 76_835, 76_835),
    ("", "PyTorch, torchao FP8", 88_405, 76_835),
    ("", "SageTrain, default: INT8", 112_986, 76_722),
    ("", "SageTrain, FP8 layers", 108_758, 76_722),
    ("7B's width", "PyTorch, bf16", 49_174, 49_174),
    ("", "PyTorch, torchao FP8", 66_024, 49_174),
    ("", "SageTrain, default: INT8", 80_939, 48_418),
    ("", "SageTrain, FP8 and FP8 head", 78_454, 48_418),
)
"""Model, what ran, its tokens/s, and those of plain PyTorch in the same run (results/step); one H200."""
COSTS = (
    ("INT8 attention, scores", 0.0000, 0.0001, "16K, second half"),
    ("INT8 attention, paper", 0.0038, 0.0010, "16K, second half"),
    ("default: INT8, 64K", 0.0010, 0.0002, "64K, second half"),
    ("default: INT8, 131K", 0.0032, 0.0034, "131K, whole run"),
    ("FP8 layers", 0.0027, 0.0020, "524K, second half"),
    ("FP8 layers, scores", 0.0105, 0.0075, "262K, whole run"),
)
"""The columns are: what is in 8 bits, training loss above 16 bits, its 95 % interval, tokens per step. The figures come
from results/default and other pages."""


def gains() -> Picture:
    """Draw what 8 bits gain in speed and cost in loss, from the figures that stand in results/."""
    picture = Picture("What 8 bits gain in speed over plain PyTorch, and cost in training loss")
    picture.text(14, 26, "speed: times plain PyTorch, one H200, 4K", 14, bold=True)
    y, left = 38.0, 186.0
    for model, name, rate, peer in GAINS:
        if model:
            picture.text(14, y + 16, model, 13, bold=True)
            y += 24
        long = 100 * rate / peer
        picture.text(14, y + 14, name, 13)
        picture.rectangle(left, y + 1, long, 17, "d" if name.startswith("Sage") else "box", round_=2)
        picture.text(left + long + 6, y + 14, f"{rate / peer:.2f}×", 13, bold=True)
        picture.text(WIDTH - 14, y + 14, f"{rate:,}/s", 12, anchor="end", kind="faint")
        y += 22
    y += 34
    picture.text(14, y, "cost: training loss above 16 bits, nats (43M)", 14, bold=True)
    y += 10
    zero_at, scale = 200.0, 5600.0
    picture.text(zero_at, y + 10, "16 bits", 12, anchor="middle", kind="faint")
    y += 16
    top = y
    for name, cost, interval, where in COSTS:
        picture.text(14, y + 14, name, 13)
        ends = [zero_at + scale * (cost + sign * interval) for sign in (-1, 1)]
        picture.line((ends[0], y + 10), (ends[1], y + 10), arrow=False)
        picture.rectangle(zero_at + scale * cost - 4, y + 6, 8, 8, "b", round_=4)
        picture.text(WIDTH - 14, y + 8, f"{cost:.4f} ± {interval:.4f}", 12, anchor="end", bold=True)
        picture.text(WIDTH - 14, y + 22, where, 11, anchor="end", kind="faint")
        y += 30
    picture.line((zero_at, top), (zero_at, y), arrow=False)
    return picture


PICTURES: dict[str, Callable[[], Picture]] = {
    "run": run, "attention": attention, "linear": linear, "rows": rows, "layout": layout, "sequence": sequence,
    "zero": zero, "timeline": timeline, "pipeline": pipeline, "checkpoint": checkpoint, "gains": gains,
}  # fmt: skip
"""Draws each file of docs/pictures, by its name."""


def main() -> None:
    """Draw all of them."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
