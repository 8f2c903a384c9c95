"""Draw the pictures of ranks: what each holds, when they talk to each other, and in which order a pipeline works."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from svg import WIDTH, Picture, width_of

from sagetrain.config import load_config
from sagetrain.config.arithmetic import idle_share
from sagetrain.config.layout import Layout
from sagetrain.config.schema import LinearConfig, RunConfig
from sagetrain.costs.collective_costs import INTO, OUT, collectives
from sagetrain.costs.hardware import HARDWARE
from sagetrain.costs.memory import memory_per_rank
from sagetrain.costs.operations import Rank
from sagetrain.costs.stages import held
from sagetrain.parallel.orders import Action, orders
from sagetrain.parallel.topology import Topology
from sagetrain.planning.performance import predict

CONFIGS = Path(__file__).parent.parent / "configs"

# -- layouts -----------------------------------------------------------------------------------------------------------

RANKS = Topology(world_size=8, tensor_parallel_size=2, context_parallel_size=2)


def layout() -> Picture:
    """Draw which part of the weights and of the tokens each of eight ranks has, and the groups that they are in."""
    tensor, context, data = RANKS.tensor_parallel_size, RANKS.context_parallel_size, RANKS.data_parallel_size
    picture = Picture("What each of eight ranks holds, and its tensor-parallel, context-parallel and replica groups")
    left, step, wide = 84, 49, 42
    sizes = f"tensor {tensor} × context {context} × data {data}"
    picture.text(14, 26, f"{RANKS.world_size} ranks: {sizes}", 14, bold=True)
    for name, y in (("rank", 52), ("weights", 84), ("batch", 124), ("tokens", 164)):
        picture.text(14, y, name, 13, kind="faint")
    for rank in range(RANKS.world_size):
        d, c, t = RANKS.coords(rank)
        x = left + step * rank
        picture.text(x + wide / 2, 52, str(rank), 15, anchor="middle", bold=True)
        for part in range(tensor):
            picture.rectangle(
                x + part * wide / tensor, 66, wide / tensor - 1, 28, "a" if part == t else "box", round_=1
            )
        picture.box(x, 106, wide, 28, "AB"[d], "c")
        for part in range(context):
            picture.rectangle(
                x + part * wide / context, 146, wide / context - 1, 28, "b" if part == c else "box", round_=1
            )
    picture.text(14, 204, "who talks to whom", 14, bold=True)
    groups: list[tuple[str, Callable[[int], list[int]], str]] = [
        ("tensor", RANKS.tp_ranks, "a"), ("context", RANKS.cp_ranks, "b"), ("replicas", RANKS.replica_ranks, "c"),
    ]  # fmt: skip
    y = 218.0
    for name, ranks_of, kind in groups:
        found = sorted({tuple(ranks_of(rank)) for rank in range(RANKS.world_size)})
        picture.text(14, y + 13, name, 13, kind="faint")
        lanes: list[list[tuple[int, ...]]] = []
        for group in found:  # groups that interleave get lines of their own
            lane = next((lane for lane in lanes if lane[-1][-1] < group[0]), None)
            lane.append(group) if lane else lanes.append([group])
        for lane in lanes:
            for group in lane:
                ends = [left + step * rank + wide / 2 for rank in (group[0], group[-1])]
                picture.line((ends[0], y + 8), (ends[1], y + 8), arrow=False)
                for rank in group:
                    picture.rectangle(left + step * rank + wide / 2 - 6, y + 2, 12, 12, kind, round_=6)
            y += 18
        y += 8
    return picture


def _gib(cfg: RunConfig, ranks: int) -> dict[str, float]:
    """Return what a rank holds of weights, gradients and optimizer all the time, GiB."""
    items = memory_per_rank(cfg, ranks, 32768)
    held = dict.fromkeys(("weights", "gradients", "optimizer"), 0.0)
    for item in items:
        if (name := item.name.removeprefix("gathered ")) in held:
            held[name] += item.bytes / 2**30
    return held


def _zero(model: str, stage: int) -> RunConfig:
    """Return a model of configs/ in 16 bits at a ZeRO stage, data parallel alone."""
    overrides = [f"parallel.zero_stage={stage}", "linear.precision=bf16", "parallel.tensor_parallel_size=1",
                 "parallel.sequence_parallel=false", "parallel.world_size=null"]  # fmt: skip
    return load_config(CONFIGS / f"{model}.yaml", overrides)


def zero() -> Picture:
    """Draw what a rank holds of a 7B model at each ZeRO stage, as `sagetrain plan` counts it."""
    ranks = 8
    rows = [("1 GPU", _gib(_zero("7b", 1), 1))]
    rows += [(f"ZeRO {stage}", _gib(_zero("7b", stage), ranks)) for stage in (1, 2, 3)]
    kinds = {"weights": "a", "gradients": "b", "optimizer": "c"}
    picture = Picture(f"What a rank holds of 7B on {ranks} GPUs at ZeRO 1, 2 and 3")
    picture.text(14, 26, f"GiB that a rank of {ranks} holds, 7B (configs/7b.yaml)", 14, bold=True)
    scale = 330 / max(sum(items.values()) for _, items in rows)
    for place, (name, items) in enumerate(rows):
        x, y = 76.0, 44 + 38 * place
        picture.text(14, y + 18, name, 13)
        for part, size in items.items():
            label = f"{size:.1f}"
            if scale * size > width_of(label, 12) + 6:
                picture.box(x, y, scale * size, 28, label, kinds[part], size=12)
            else:
                picture.rectangle(x, y, scale * size, 28, kinds[part], round_=1)
            x += scale * size + 1
        picture.text(x + 8, y + 18, f"{sum(items.values()):.1f}", 13, bold=True)
    picture.legend(44 + 38 * len(rows) + 14, [(kind, name) for name, kind in kinds.items()])
    return picture


def sequence() -> Picture:
    """Draw a block on two tensor-parallel ranks, with and without sequence parallelism."""
    cfg = load_config(CONFIGS / "7b.yaml")
    picture = Picture("A block on two tensor-parallel ranks, with and without sequence parallelism")
    y = 14.0
    for sharded in (False, True):
        rank = Rank(
            tokens=8192, seq_length=4096, tensor=2, sequence_parallel=sharded, linear=LinearConfig(precision="bf16")
        )
        calls = collectives(held(cfg, Layout.of(cfg), 32768, 0), rank, 1)
        kinds = {call.what: call.kind for call in calls if call.moment == "forward"}
        enters, leaves = kinds.get(INTO), kinds[OUT]
        picture.text(14, y + 14, f"sequence_parallel: {str(sharded).lower()}", 13.5, mono=True, bold=True)
        y += 24
        x = 14.0
        for inside in ("attention", "MLP"):
            split = 2 if sharded else 1
            for part in range(2):
                top = y + 34 * part
                picture.rectangle(x, top, 62, 30, "box")
                picture.rectangle(x + (31 * part if sharded else 0), top, 62 / split, 30, "b")
                picture.rectangle(x + 112, top, 78, 30, "box")
                picture.rectangle(x + 112 + 39 * part, top, 39, 30, "a")
                picture.line((x + 62, top + 15), (x + 110, top + 15))
                picture.line((x + 190, top + 15), (x + 224, top + 15))
            picture.text(x + 31, y + 84, "norm", 12.5, anchor="middle")
            picture.text(x + 151, y + 84, inside, 12.5, anchor="middle")
            if enters:
                picture.text(x + 87, y + 104, enters, 11.5, anchor="middle", kind="faint")
            picture.text(x + 224, y + 104, leaves, 11.5, anchor="end", kind="faint")
            x += 228
        y += 118
    picture.legend(y + 12, [("b", "tokens that a rank normalizes"), ("a", "its half of the layers")])
    return picture


# -- a step's timeline -------------------------------------------------------------------------------------------------

FORWARD, BACKWARD, UPDATE, GATHER = 20, 40, 46, 24
STEPS = (
    ("ZeRO 1: once a step, beside the last backward", 1),
    ("ZeRO 2: in every micro-batch", 2),
    ("ZeRO 3: weights are gathered, too", 3),
)


def timeline() -> Picture:
    """Draw when gradients travel in a step of several micro-batches, at each ZeRO stage (schematic, not to scale)."""
    predicted = [predict(_zero("1b", stage), 8, 32768, HARDWARE["h200"]) for _, stage in STEPS]
    count = predicted[0].accumulation
    picture = Picture(f"A step of {count} micro-batches: when gradients travel at ZeRO 1, 2 and 3")
    picture.text(14, 26, f"one step of {count} micro-batches (not to scale)", 14, bold=True)
    y = 44.0
    for (name, stage), step in zip(STEPS, predicted, strict=True):
        picture.text(14, y + 12, name, 13.5)
        below, x = y + 50, 14.0
        for micro in range(count):
            last = micro == count - 1
            picture.box(x, y + 20, FORWARD - 1, 26, "F", "a", size=12)
            picture.box(x + FORWARD, y + 20, BACKWARD - 1, 26, "B", "a", size=12)
            if stage == 3:
                for at in range(0, FORWARD + BACKWARD - 5, 10):
                    picture.rectangle(x + at, below, 8, 9, "d", round_=1)
            if stage > 1 or last:
                for at in range(8, BACKWARD + 6, 10):
                    picture.rectangle(x + FORWARD + at, below + (12 if stage == 3 else 0), 8, 9, "b", round_=1)
            x += FORWARD + BACKWARD
        x += 6
        picture.box(x + 2, y + 20, UPDATE, 26, "update", "c", size=12)
        x += UPDATE + 4
        if stage < 3:
            picture.rectangle(x, below, GATHER, 9, "d", round_=1)
        y = below + (24 if stage == 3 else 12)
        calls = [call for call in step.collectives if call.purpose.startswith("gradients")]
        count_of, sent = sum(call.count for call in calls), sum(call.wire_bytes for call in calls) / 2**30
        said = f"gradients: {count_of} × {calls[0].kind}, {sent:.1f} GiB sent by a rank"
        picture.text(14, y + 12, said, 12.5, kind="faint")
        y += 30
    picture.legend(y + 10, [("a", "forward, backward"), ("b", "gradients"), ("d", "weights"), ("c", "update")])
    picture.text(14, y + 32, "numbers: 1B on 8 GPUs, fp32 gradients, by sagetrain plan", 12.5, kind="faint")
    return picture


# -- a pipeline --------------------------------------------------------------------------------------------------------

STAGES, MICRO_BATCHES = 4, 8


def _played(order: list[list[Action]], chunks: int) -> dict[Action, tuple[float, float]]:
    """Return the begin and the end of every action of an order. A backward pass takes twice as long as a forward
    pass, and messages take no time."""
    played, last = dict[Action, tuple[float, float]](), STAGES * chunks - 1
    free, left = [0.0] * len(order), [list(actions) for actions in order]
    while any(left):
        for stage, actions in enumerate(left):
            kind, chunk, micro = actions[0] if actions else ("", 0, 0)
            before = Action("forward", chunk - 1, micro) if kind == "forward" else Action("backward", chunk + 1, micro)
            if not actions or (0 <= before.chunk <= last and before not in played):
                continue
            begin = max(free[stage], played[before][1] if before in played else 0.0)
            free[stage] = begin + (1 if kind == "forward" else 2) / chunks
            played[actions.pop(0)] = begin, free[stage]
    return played


def pipeline() -> Picture:
    """Draw when each stage of a pipeline does what, from the order that a run has."""
    picture, y = Picture(f"The order of {STAGES} pipeline stages with {MICRO_BATCHES} micro-batches"), 8.0
    left, long = 66.0, 3 * (MICRO_BATCHES + STAGES - 1)
    scale = (WIDTH - left - 10) / long
    for chunks in (1, 2):
        share = idle_share(STAGES, chunks, MICRO_BATCHES)
        name = "1F1B, one chunk a stage" if chunks == 1 else "interleaved, two chunks a stage"
        picture.text(14, y + 18, f"{name}: idle {share:.0%}", 14, bold=True)
        y += 30
        played = _played(orders(STAGES, chunks, MICRO_BATCHES), chunks)
        for stage in range(STAGES):
            picture.text(14, y + 15, f"stage {stage}", 12.5, kind="faint")
            for (kind, chunk, micro), (begin, end) in played.items():
                if chunk % STAGES == stage:
                    colour = ("a", "d")[chunk // STAGES] if kind == "forward" else ("b", "c")[chunk // STAGES]
                    x, wide = left + scale * begin, scale * (end - begin) - 1
                    if wide > 9:
                        picture.box(x, y, wide, 21, f"{micro + 1}", colour, size=8)
                    else:
                        picture.rectangle(x, y, wide, 21, colour)
            y += 24
        y += 6
    picture.legend(y + 10, [("a", "forward"), ("b", "backward"), ("d", "and of chunk 2"), ("c", "and of chunk 2")])
    picture.text(14, y + 34, "numbers: micro-batches; a backward pass takes twice as long", 12.5, kind="faint")
    return picture
