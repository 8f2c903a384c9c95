"""Train a small model by the parts of our recipe and of a public speed run's, several arms at a time on each GPU.

    python results/recipe-parts/arms.py TEXT OUT --seconds 245 --after results/recipe-parts/rows.jsonl

TEXT is a folder with tokens of 16 bits, train.bin and valid.bin, of 32,000 words. All arms are plain PyTorch in bf16:
10 layers of 512 (11 in the speed run's model), sequences of 1,024, 16 of them a step, 1,500 steps, and a text that is
read 2.29 times. INT8 is left out, because it moved no loss in results/equal-time.

An arm of kind "climb" changes one setting of the best recipe at its start, so gains add up. An arm of kind "feature"
changes what the library cannot do. With --after ROWS, the file of an earlier call, each arm begins at the best climb of
that call, and nothing is built on. With --once each sequence of the whole text is read at most once, and the arms are
those of ONCE. No test runs this script, and it imports nothing of the library.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from models import (
    BYTES_PER_TOKEN,
    FULL,
    LENGTH,
    MORE,
    NARROW,
    PASSES,
    POINTS,
    SEQUENCES,
    VALID,
    Recipe,
    lane_code,
)

OURS = Recipe()
THEIRS: dict[str, Any] = {
    "lr": 0.02 * MORE, "spectral": True, "momentum": (0.85, 0.97, 0.90, 0.27), "decay": math.nan, "cautious": True,
    "fading": True, "second": True, "embedding": 0.3 * MORE * NARROW, "head": 0.008 * MORE * NARROW,
    "gain": 0.008 * MORE * NARROW, "rest_decay": 0.0, "eps": 1e-10, "clip": 0.0, "warmup": 0.027, "end": 0.05,
}  # fmt: skip
SPEED = Recipe(parts=FULL, **THEIRS)
"""Its warm-up of 40 steps and its momentum's 400 are shares of 1,500 steps here."""

FIRST: list[tuple[str, Recipe]] = [
    ("ours", OURS),
    ("speed run", SPEED),
    ("ours, 2e-3", OURS._replace(lr=2e-3)),
    ("speed run, 0.8 of the steps", SPEED._replace(length=0.8)),
    ("our model, its optimizer", OURS._replace(**THEIRS)),
    ("its model, our optimizer", OURS._replace(parts=FULL)),
]
Change = dict[str, Any]


def lr(factor: float) -> Any:
    return lambda r: {"lr": r.lr * factor}


MIDDLE: list[tuple[str, str, Any]] = [
    ("climb", "lr x 0.5", lr(0.5)),
    ("climb", "weight_decay_lr", lambda r: {"even": True}),
    ("climb", "momentum 0.95", lambda r: {"momentum": (0.95,)}),
    ("feature", "second moment", lambda r: {"second": True}),
    ("climb", "warm-up 0.03", lambda r: {"warmup": 0.03}),
    ("fixed", "ours", lambda r: OURS._replace(seed=1)),
    ("climb", "head x 0.5", lambda r: {"head": r.head / 2}),
    ("climb", "embedding x 0.5", lambda r: {"embedding": r.embedding / 2}),
    ("climb", "decay of matrices x 5", lambda r: {"decay": r.decay * 5}),
    ("feature", "cautious, decay x 5", lambda r: {"decay": max(0.5, r.decay), "cautious": True}),
    ("climb", "fall over 0.9", lambda r: {"line": 0.9}),
    ("feature", "tokens 8K, 16K, 32K", lambda r: {
        "batches": ((0.0, SEQUENCES // 2), (0.2, SEQUENCES), (0.6, 2 * SEQUENCES))}),
    ("fixed", "speed run without values", lambda r: SPEED._replace(parts=FULL - {"values"})),
    ("feature", "momentum 0.85, 0.97, 0.9", lambda r: {"momentum": (0.85, 0.97, 0.9, 0.2)}),
    ("climb", "lr x 0.7", lr(0.7)),
    ("climb", "eps 1e-10", lambda r: {"eps": 1e-10}),
    ("climb", "lr x 1.4", lr(1.4)),
    ("feature", "heads of 128", lambda r: {"parts": frozenset({"wide"})}),
    ("fixed", "speed run, rates x 2", lambda r: SPEED._replace(
        lr=2 * SPEED.lr, embedding=2 * SPEED.embedding, head=2 * SPEED.head, gain=2 * SPEED.gain)),
    ("climb", "head x 2", lambda r: {"head": r.head * 2}),
    ("climb", "embedding x 2", lambda r: {"embedding": r.embedding * 2}),
    ("climb", "clip none", lambda r: {"clip": 0.0}),
    ("climb", "end 0.05", lambda r: {"end": 0.05}),
]  # fmt: skip
LAST: list[tuple[str, str, Any]] = [
    ("feature", "all features that gained", None),
    ("fixed", "best", lambda r: r._replace(seed=1)),
    ("fixed", "best + values, mix", lambda r: r._replace(parts=r.parts | {"values", "mix"})),
    ("fixed", "speed run", lambda r: SPEED._replace(seed=1)),
    ("fixed", "its model, best optimizer", lambda r: r._replace(parts=FULL)),
    ("fixed", "best + square", lambda r: r._replace(parts=r.parts | {"square"})),
]


AFTER: list[tuple[str, str, Any]] = [
    ("alone", "tokens 8K", lambda r: {"batches": ((0.0, SEQUENCES // 2),)}),
    ("alone", "decay 0.2", lambda r: {"decay": 0.2}),
    ("alone", "second moment", lambda r: {"second": True}),
    ("alone", "momentum 0.85", lambda r: {"momentum": (0.85,)}),
    ("alone", "tokens 8K, 16K from 0.3", lambda r: {"batches": ((0.0, SEQUENCES // 2), (0.3, SEQUENCES))}),
    ("alone", "decay 0.5", lambda r: {"decay": 0.5}),
    ("alone", "cautious, decay 0.2", lambda r: {"cautious": True, "decay": 0.2}),
    ("alone", "warm-up 0.03", lambda r: {"warmup": 0.03}),
    ("alone", "fall over 0.8", lambda r: {"line": 0.8}),
    ("alone", "lr 5.6e-3", lambda r: {"lr": 5.6e-3}),
    ("alone", "heads of 128", lambda r: {"parts": r.parts | {"wide"}}),
    ("alone", "head 2e-3", lambda r: {"head": 2e-3}),
    ("alone", "embedding 3.2e-2", lambda r: {"embedding": 3.2e-2}),
    ("alone", "fall over 0.5", lambda r: {"line": 0.5}),
    ("alone", "decay 0.05", lambda r: {"decay": 0.05}),
    ("alone", "base", lambda r: {"seed": 1}),
    ("alone", "the most gain", None),
]  # fmt: skip
"""Decay is of matrices, embedding and head where the base has weight_decay_lr. The last two are second seeds."""


def added(*parts: str, **changes: Any) -> Change:
    return {"parts": frozenset(parts), **changes}


def adamw(lr: float) -> Recipe:
    """Return plain PyTorch's recipe of results/equal-time: AdamW with a rate four times as large for the embedding."""
    return Recipe(lr=lr, embedding=4 * lr, head=lr, gain=lr, adam=True, betas=(0.9, 0.95), warmup=0.2, line=0.0)


ONCE_FIRST: list[tuple[str, Recipe]] = [("ours", OURS), ("speed run", SPEED), ("AdamW 0.001", adamw(1e-3))]
ONCE: list[tuple[str, str, Any]] = [
    ("climb", "weight_decay_lr", lambda r: {"even": True}),
    ("whole", "its model, our optimizer", lambda r: OURS._replace(parts=FULL)),
    ("whole", "our model, its optimizer", lambda r: OURS._replace(**THEIRS)),
    ("whole", "AdamW 0.002", lambda r: adamw(2e-3)),
    ("whole", "ours, values and first residual", lambda r: OURS._replace(parts=frozenset({"values", "mix"}))),
    ("whole", "AdamW as torchtitan's", lambda r: adamw(8e-4)._replace(embedding=8e-4, line=0.8)),
    ("whole", "ours", lambda r: OURS._replace(seed=1)),
    ("whole", "speed run", lambda r: SPEED._replace(seed=1)),
    ("alone", "the base", lambda r: {"seed": 1}),
    ("rate", "AdamW", None),
    ("alone", "tokens 8K", lambda r: {"batches": ((0.0, SEQUENCES // 2),)}),
    ("alone", "weight_decay_lr 1e-3", lambda r: {"decay": 0.025}),
    ("alone", "lr 2.8e-3", lambda r: {"lr": 2.8e-3}),
    ("alone", "the base", lambda r: {"seed": 2}),
    ("alone", "second moment", lambda r: {"second": True}),
    ("alone", "values", lambda r: added("values")),
    ("alone", "values, no gate", lambda r: added("values", "open")),
    ("alone", "values and first residual", lambda r: added("values", "mix")),
    ("alone", "first residual", lambda r: added("mix")),
    ("alone", "values", lambda r: added("values", seed=1)),
    ("alone", "values, no gate", lambda r: added("values", "open", seed=1)),
    ("alone", "values and first residual", lambda r: added("values", "mix", seed=1)),
    ("alone", "values, no gate, their rate 1.6e-2", lambda r: added("values", "open", tables=1.6e-2)),
    ("alone", "values, no gate", lambda r: added("values", "open", seed=2)),
    ("alone", "values", lambda r: added("values", seed=2)),
    ("alone", "values and first residual", lambda r: added("values", "mix", seed=2)),
    ("alone", "first residual", lambda r: added("mix", seed=1)),
    ("alone", "weight_decay_lr 1.6e-2", lambda r: {"decay": 0.4}),
    ("alone", "fall over 1.0", lambda r: {"line": 1.0}),
    ("whole", "ours", lambda r: OURS._replace(seed=2)),
    ("alone", "lr 5.6e-3", lambda r: {"lr": 5.6e-3}),
    ("alone", "tokens 8K, 16K from 0.3", lambda r: {"batches": ((0.0, SEQUENCES // 2), (0.3, SEQUENCES))}),
    ("alone", "warm-up 0.03", lambda r: {"warmup": 0.03}),
    ("alone", "fall over 0.8", lambda r: {"line": 0.8}),
    ("whole", "AdamW 0.001, our schedule", lambda r: adamw(1e-3)._replace(warmup=0.1, line=0.65)),
]
"""The arms of a text that is read once. Those of kind "alone" begin at the better one of ours and weight_decay_lr.
There a decay of 0.025 is weight_decay_lr 1e-3, because all tensors lose the product of both."""


def train(
    code: dict[str, Any], r: Recipe, steps: int, count: int, text: Any, valid: Any, until: float
) -> dict[str, Any]:
    """Train on the first `count` sequences of the text, permutation after permutation of them."""
    torch, cuda = code["torch"], code["cuda"]
    born = time.monotonic()
    model = code["Model"](r.parts, r.seed)
    optimizers = code["Optimizers"](model, r)
    total, draw = round(steps * r.length) * SEQUENCES, torch.Generator().manual_seed(r.seed)
    order = torch.cat([torch.randperm(count, generator=draw) for _ in range(math.ceil(total / count))]) * LENGTH
    order, span = order.to(text.device), torch.arange(LENGTH + 1, device=text.device)

    def rows(source: Any, places: Any) -> tuple[Any, Any]:
        found = source[places[:, None] + span].long()
        return found[:, :-1].contiguous(), found[:, 1:].contiguous()

    def held() -> float:
        parts = (torch.arange(VALID, device=valid.device) * LENGTH).split(SEQUENCES)
        return (
            float(sum(model(*rows(valid, part)).detach() for part in parts))
            / len(parts)
            / math.log(2)
            / BYTES_PER_TOKEN
        )

    bits, points, taken, seen, recent, began, cut = list[list[float]](), [*POINTS], 0, 0, [], 0.0, False
    while seen < total:
        wanted = next(n for share, n in reversed(r.batches) if seen >= share * total)
        wanted = min(wanted, total - seen)
        loss = 0.0
        micro = min(wanted, SEQUENCES)
        if wanted % micro:
            break  # What is left of a ramp is less than a micro-batch.
        for part in order[seen : seen + wanted].split(micro):
            part_loss = model(*rows(text, part))
            (part_loss * (micro / wanted)).backward()
            loss = loss + part_loss.detach() * (micro / wanted)
        optimizers.step(seen / total, (seen + wanted) / total)
        seen, taken = seen + wanted, taken + 1
        if seen > 0.9 * total:
            recent.append(loss)
        if taken == 5:
            float(loss)
            began, at = time.monotonic(), seen
        if taken % 20 == 0 and time.time() > until:
            cut = True
        if cut or (points and seen >= points[0] * total - 1e-9):
            bits.append([round(seen / total, 3), round(held(), 5)])
            while points and seen >= points[0] * total - 1e-9:
                points.pop(0)
            if cut or not math.isfinite(bits[-1][1]):
                break
    end = time.monotonic()
    trained = float(sum(recent)) / len(recent) / math.log(2) / BYTES_PER_TOKEN if recent else math.nan
    return {
        "steps": taken, "tokens": seen * LENGTH, "bits": bits, "train": round(trained, 5), "cut": cut,
        "compiled": round(began - born, 1), "seconds": round(end - began, 1),
        "rate": round((seen - at) * LENGTH / max(end - began, 1e-9)),
        "memory": round(torch.cuda.max_memory_allocated() / 2**30, 1) if cuda else 0,
    }  # fmt: skip


def lane(number: int, gpus: int, asked: argparse.Namespace, until: float, pipe: Any) -> None:
    if gpus:
        known = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = (known.split(",") if known else [*map(str, range(gpus))])[number % gpus]
    code = lane_code()
    torch = code["torch"]
    import numpy as np

    device = torch.device("cuda" if code["cuda"] else "cpu")
    text, valid = (
        torch.from_numpy(np.fromfile(asked.text / f"{name}.bin", np.uint16).astype(np.int32)).to(device)
        for name in ("train", "valid")
    )
    count = (len(text) - 1) // LENGTH if asked.once else round(asked.steps * SEQUENCES / PASSES)
    while (job := pipe.recv()) is not None:
        try:
            found = train(code, job, asked.steps, count, text, valid, until)
        except Exception as error:  # noqa: BLE001  # Another arm may do.
            found = {"error": f"{type(error).__name__}: {str(error)[:600]}"}
        pipe.send(found)


# ---------------------------------------------------------------- main
def score(row: dict[str, Any]) -> float:
    """The end, and a little of the way there: the goal is the best curve from the second minute of eight on."""
    middle = [b for share, b in row["bits"] if 0.25 < share < 0.95]
    return row["bits"][-1][1] + 0.1 * sum(middle) / len(middle)


def said(row: dict[str, Any]) -> str:
    """Return a row's losses and times for a line of the output."""
    curve = " ".join(f"{share:g}:{bits:.4f}" for share, bits in row["bits"] if share > 0.25)
    less = f", {row['less']:+.4f} to its base" if "less" in row else ""
    return f"| {curve} | train {row['train']:.4f}{less} | {row['seconds']} s (+{row['compiled']}), {row['rate']:,}/s"


def read(row: dict[str, Any]) -> Recipe:
    """The recipe of a row of a file, where tuples are lists."""
    r = Recipe(**row)
    return r._replace(
        parts=frozenset(r.parts),
        decay=math.nan if math.isnan(r.decay) else r.decay,  # Equal recipes hold the same one.
        momentum=(*r.momentum,),
        betas=(*r.betas,),
        batches=tuple((a, b) for a, b in r.batches),
    )


class Board:
    """What has run, what runs, and what comes next."""

    def __init__(self, after: Path | None, once: bool) -> None:
        self.rows: list[dict[str, Any]] = []
        self.given: set[Recipe] = set()
        self.first, self.middle, self.last = [*FIRST], [*MIDDLE], [*LAST]
        self.best: tuple[Recipe, dict[str, Any] | None] = (OURS, None)
        if once:
            self.first, self.middle, self.last = [*ONCE_FIRST], [*ONCE], []
        elif after:
            self.first, self.middle, self.last = [], [*AFTER], []
        for row in map(json.loads, after.read_text().splitlines() if after else []):
            r = read(row["recipe"])
            self.take(row["kind"], r, {**row, "recipe": r._asdict()})
            if once and not row["cut"]:
                self.given.add(r)

    def take(self, kind: str, r: Recipe, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if kind != "climb" or r.seed or row["cut"] or not math.isfinite(row["bits"][-1][1]):
            return
        known, end = self.best[1], row["bits"][-1][1]
        if known is None or (score(row) < score(known) - 0.0005 and end < known["bits"][-1][1] + 0.001):
            self.best = (r, row)

    def whole(self, r: Recipe) -> dict[str, Any] | None:
        """Return the row of a recipe that ran to its end, if there is one."""
        return next((row for row in self.rows if not row["cut"] and row["recipe"] == r._asdict()), None)

    def next(self, closing: bool) -> tuple[str, str, Recipe, Recipe | None] | None:
        while self.first:
            name, r = self.first.pop(0)
            if r in self.given:
                continue
            self.given.add(r)
            kind = "climb" if r == OURS or name.startswith("ours, ") else "fixed"
            return name, kind, r, (OURS if kind == "climb" else None)
        queues = (self.last, self.middle) if closing else (self.middle, self.last)
        for queue in queues:
            while queue:
                kind, name, change = queue.pop(0)
                best = self.best[0]
                if kind == "rate":
                    tried = [row for row in self.rows if row["recipe"]["adam"]]
                    ends = {row["recipe"]["lr"]: row["bits"][-1][1] for row in tried}
                    r = adamw(5e-4 if ends.get(1e-3, math.inf) < ends.get(2e-3, math.inf) else 4e-3)
                    name = f"AdamW {r.lr:g}"
                elif change is None:
                    gained = [row for row in self.rows if row["kind"] == kind and row.get("less", 0) < -0.001]
                    gained = [row for row in gained if kind == "alone" or "parts" not in row["change"]]
                    if not gained:
                        continue
                    r = best
                    for row in gained if kind == "feature" else [min(gained, key=lambda row: row["less"])]:
                        r = r._replace(**row["change"])
                    r = r._replace(seed=int(kind == "alone"))
                elif kind in ("fixed", "whole"):
                    r = change(best)
                else:
                    r = best._replace(**change(best))
                if r not in self.given:
                    self.given.add(r)
                    alone = kind in ("whole", "rate") or (kind == "fixed" and name.startswith(("ours", "speed")))
                    return name, kind, r, (None if alone else best)
        return None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=450.0)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--lanes", type=int, default=2, help="on each GPU")
    parser.add_argument("--gpus", type=int, default=2, help="0: the CPU")
    parser.add_argument("--after", type=Path, help="rows of an earlier call")
    parser.add_argument("--once", action="store_true", help="read each sequence once, and run the arms of ONCE")
    asked = parser.parse_args()
    born, stop = time.time(), time.time() + asked.seconds
    asked.out.mkdir(parents=True, exist_ok=True)
    need = 2 * (round(asked.steps * SEQUENCES / (1 if asked.once else PASSES)) * LENGTH + LENGTH + 1)
    assert (asked.text / "train.bin").stat().st_size >= need, f"{asked.text}/train.bin: {need} bytes are needed"
    spawn, board = multiprocessing.get_context("spawn"), Board(asked.after, asked.once)
    running, took = dict[Any, Any](), list[float]()
    lanes = []
    for n in range(max(1, asked.gpus) * asked.lanes):
        pipe, end = spawn.Pipe()
        process = spawn.Process(target=lane, args=(n, asked.gpus, asked, stop - 6, end), daemon=True)
        process.start()
        end.close()
        lanes.append(process)
        if (job := board.next(False)) is not None:
            pipe.send(job[2])
            running[pipe] = (*job, time.time())
    while running and time.time() < stop:
        for pipe in wait(list(running), timeout=1.0):
            name, kind, r, base, since = running.pop(pipe)
            changed = {k: v for k, v in r._asdict().items() if base is not None and v != getattr(base, k)}
            row = {"arm": name, "kind": kind, "seed": r.seed, "change": changed, "recipe": r._asdict()}
            try:
                row |= pipe.recv()
            except EOFError:
                print(f"{name}: its process died", flush=True)
                continue
            row["at"] = round(time.time() - born, 1)
            if "error" not in row:
                parent = None if base is None or row["cut"] else board.whole(base)
                if parent is not None:
                    row["less"] = round(row["bits"][-1][1] - parent["bits"][-1][1], 5)
                    row["less_score"] = round(score(row) - score(parent), 5)
                board.take(kind, r, row)
                took.append(time.time() - since)
            with (asked.out / "rows.jsonl").open("a") as file:
                file.write(json.dumps(row, default=sorted) + "\n")
            print(row["at"], name, r.seed, row.get("error") or said(row), flush=True)
            # The first arms after an earlier call differ in their time, so the next may be as quick as the quickest.
            lasts = (min if asked.after or asked.once else max)(took[-4:], default=60.0)
            left = stop - 6 - time.time()
            job = board.next(left < 2.0 * lasts) if left > 0.97 * lasts else None
            pipe.send(job and job[2])
            if job is not None:
                running[pipe] = (*job, time.time())
    for process in lanes:
        process.terminate()


if __name__ == "__main__":
    main()
