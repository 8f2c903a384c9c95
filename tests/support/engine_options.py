"""A table of runs in which every option of the engines meets every other one that goes with it.

A row takes the steps of the plain layout, ZeRO 1 without anything else, on the same ranks, within rounding, and takes
them twice with the same bits. The GPU is busy before copies and collectives meanwhile, each time at other places, so
that a step which reads before a copy has ended is another step.
"""

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import late_copies
import tiny
from sagetrain.config import RunConfig
from sagetrain.config.rules import fit
from sagetrain.data.batch import Batch
from sagetrain.engines.step import Engine
from sagetrain.parallel.topology import ParallelGroups

Row = Mapping[str, str]
"""The value of each of OPTIONS."""

TENSOR_PARALLEL = {"tensor_parallel_size": 2, "sequence_parallel": True}
PIPELINE = {"pipeline_parallel_size": 2}
LAYOUT: dict[str, dict[str, dict[str, Any]]] = {
    "ZeRO": {str(stage): {"parallel": {"zero_stage": stage}} for stage in (1, 0, 2, 3)},
    "offload": {name: {"parallel": {"offload": name}} for name in ("none", "optimizer", "all")},
    "shard_size": {"all": {}, "1": {"parallel": {"shard_size": 1}}, "2": {"parallel": {"shard_size": 2}}},
    "layout": {
        "data parallel": {},
        "tensor parallel": {"parallel": {**TENSOR_PARALLEL, "tensor_parallel_overlap": "off"}},
        "halves": {"parallel": {**TENSOR_PARALLEL, "tensor_parallel_overlap": "on"}},
        "pipeline": {"parallel": PIPELINE},
        "chunks": {"parallel": {**PIPELINE, "pipeline_chunks": 2}},
    },
    "recomputation": {
        name: {"training": {"activation_checkpointing": int(name) if name.isdigit() else name}}
        for name in ("none", "selective", "full", "1")
    }
    | {"on the host": {"training": {"activation_checkpointing": "full", "activation_offload": True}}},
}
NUMBERS: dict[str, dict[str, dict[str, Any]]] = {
    "weights": {
        "fp32": {"training": {"dtype": "fp32"}},
        "bf16": {"training": {"dtype": "bf16"}},
        "bf16_chance": {"training": {"dtype": "bf16"}, "optimizer": {"master": "bf16_chance"}},
        "bf16_kahan": {"training": {"dtype": "bf16"}, "optimizer": {"master": "bf16_kahan"}},
    },
    "optimizer": {name: {"optimizer": {"name": name}} for name in ("adamw", "muon")},
    "moments": {name: {"optimizer": {"moments": name}} for name in ("fp32", "bf16", "int8")},
    "linear": {name: {"linear": {"precision": name, "head": name}} for name in ("bf16", "fp8", "int8")},
}
"""The options that change what is computed. The plain layout has them too."""
OPTIONS = LAYOUT | NUMBERS
"""The sections of each option's values. The first value is the plain one."""
PLAIN: Row = {option: next(iter(values)) for option, values in OPTIONS.items()}

ROWS = 4
MICRO_STEPS = 2, 5, 1
"""The micro-steps of each step of a data-parallel rank. A fault of offload came with the third."""


def config(row: Row, ranks: int) -> RunConfig:
    """Build the configuration of a row. With several ranks each stage of a pipeline has layers for two chunks."""
    layers = 2 if ranks == 1 else 4
    sections: dict[str, dict[str, Any]] = {
        "model": {
            "num_layers": layers,
            "hidden_size": 64,
            "ffn_hidden_size": 96,
            "num_attention_heads": 4,
            "head_dim": 16,
        },
        "attention": {"backend": "reference"},  # Its sums have one order on a GPU, and it takes fp32.
        "data": {"micro_batch_size": ROWS},
        "training": {"total_tokens": 100_000},
        "tokens_per_step": {"tokens": 64 * ROWS * tiny.SEQ},
        # With an eps of 1e-8, Adam takes a full step of lr on a gradient that is nothing but rounding.
        "optimizer": {"clip_grad": 0.5, "eps": 1e-6},
        "parallel": {"engine": "fsdp"},
    }
    for option, value in row.items():
        for name, section in OPTIONS[option][value].items():
            sections[name] = sections.get(name, {}) | section
    return tiny.config(1, **sections)


class Table:
    """The rows for a world of so many ranks.

    Args:
        pairs: every two values of options of LAYOUT that go together are in a row, and every value of NUMBERS with
            every ZeRO stage. Otherwise every value is in a row.
    """

    def __init__(self, ranks: int, pairs: bool) -> None:
        self._ranks, self._lawful = ranks, functools.cache(self._runs)
        meeting = [*itertools.combinations(LAYOUT, 2), *(("ZeRO", option) for option in NUMBERS)]
        self._missing: dict[frozenset[tuple[str, str]], None] = {}
        for options in meeting if pairs else zip(OPTIONS):
            for values in itertools.product(*(OPTIONS[option] for option in options)):
                self._missing[frozenset(zip(options, values, strict=True))] = None
        self.rows = list(self._cover())
        """The rows. Each begins with values that no earlier row has together, and takes as many more as go with
        them."""

    def _runs(self, row: tuple[tuple[str, str], ...]) -> bool:
        cfg = config(dict(row), self._ranks)
        sharing = cfg.parallel.tensor_parallel_size * cfg.parallel.pipeline_parallel_size
        if cfg.parallel.shard_size == self._ranks // sharing:
            return False  # This is what `all` says.
        if cfg.linear.low_bit and cfg.training.dtype == "fp32":
            return False  # A GPU multiplies nothing in 8 bits then.
        found = fit(cfg, self._ranks, tiny.VOCAB)
        return not any(each.level == "error" or each.rule == "no_effect" for each in found)

    def _cover(self) -> Iterator[Row]:
        while self._missing:
            wanted = next(iter(self._missing))
            del self._missing[wanted]
            row = self._begun(dict(wanted))
            if row is None:
                continue
            for option, values in OPTIONS.items():
                if option not in dict(wanted):
                    rows = [row | {option: value} for value in values]
                    row = max((each for each in rows if self._lawful(tuple(each.items()))), key=self._gain)
            for each in [each for each in self._missing if each <= row.items()]:
                del self._missing[each]
            yield row

    def _begun(self, wanted: Row) -> dict[str, str] | None:
        """Return a row of these values that runs, as plain as can be."""
        for stage, weights in itertools.product(OPTIONS["ZeRO"], OPTIONS["weights"]):
            row = {**PLAIN, "ZeRO": stage, "weights": weights, **wanted}
            if self._lawful(tuple(row.items())):
                return row
        return None

    def _gain(self, row: Row) -> int:
        return sum(each <= row.items() for each in self._missing)


class Taken(NamedTuple):
    """The result of the steps of a row."""

    row: Row
    plain: list[float]
    """The losses and gradient norms of the plain layout's steps, and the loss of an evaluation between them."""
    found: list[float]
    """The losses and gradient norms of the row's steps, and the loss of its evaluation."""
    again: bool
    """Whether the row has the same bits once more: numbers, masters and state."""


def take(rows: Sequence[Row], micro_steps: Sequence[int] = MICRO_STEPS) -> list[Taken]:
    """Take the steps of rows; collective."""
    groups, plain, taken = dict[tuple[int, int], ParallelGroups](), dict[str, list[float]](), list[Taken]()
    for row in rows:
        expected = PLAIN | {option: row[option] for option in NUMBERS}
        (numbers, state), (again, same) = (_steps(row, micro_steps, groups, seed) for seed in range(2))
        if (key := str(expected)) not in plain:
            plain[key] = numbers if row == expected else _steps(expected, micro_steps, groups, seed=2)[0]
        taken.append(Taken(row, plain[key], numbers, again == numbers and all(map(torch.equal, state, same))))
    return taken


def _steps(
    row: Row, micro_steps: Sequence[int], groups: dict[tuple[int, int], ParallelGroups], seed: int
) -> tuple[list[float], list[Tensor]]:
    """Return losses and norms of steps, the loss of an evaluation behind the first, and all masters and state."""
    cfg = config(row, dist.get_world_size() if dist.is_initialized() else 1)
    sizes = cfg.parallel.tensor_parallel_size, cfg.parallel.pipeline_parallel_size
    if sizes not in groups:
        groups[sizes] = tiny.join(sizes[0], pp_size=sizes[1])
    numbers: list[float] = []
    engine = tiny.engine(cfg, groups[sizes])
    with late_copies.late(engine, seed):
        for step, each in enumerate(micro_steps):
            own = _batches(step, each, engine)
            result = engine.step(own, len(own), 2e-3)
            assert result.applied, f"a norm of {result.grad_norm} in {row}"
            numbers += result.loss, result.grad_norm
            if step == 0:
                numbers.append(engine.evaluate(_batches(100, 1, engine))["valid/loss"])
    return numbers, [owned.read(kind).clone() for owned in engine.owned() for kind in owned.kinds]


def _batches(step: int, micro_steps: int, engine: Engine) -> list[Batch]:
    """Return this rank's micro-batches of a step. The tokens are the same at every layout."""
    count, groups = micro_steps * dist.get_world_size(), engine.groups
    tokens = torch.randint(0, tiny.VOCAB, (count, ROWS, tiny.SEQ + 1), generator=torch.Generator().manual_seed(step))
    own = tokens[groups.dp_rank :: groups.dp_size]
    return [Batch(rows[:, :-1], rows[:, 1:], None, None, None, [], weight=ROWS) for rows in own]


def _tolerance(row: Row) -> float:
    """Return the largest relative difference from the plain numbers. Sums in another order differ in the last bits of
    fp32. Where values are rounded to fewer bits, these bits make some of them fall to the other side."""
    return 1e-4 if row["weights"] == row["moments"] == "fp32" else 1e-2


def check(taken: Sequence[Taken]) -> None:
    """Check that rows took the steps of the plain layout, and the same bits twice."""
    wrong = []
    for row, plain, found, again in taken:
        told = {option: value for option, value in row.items() if value != PLAIN[option]}
        error = max(abs(a - b) / abs(b) for a, b in zip(found, plain, strict=True))
        if not error <= _tolerance(row):
            wrong.append(f"{told}: losses and norms differ by {error:.1e}: {found}, plain: {plain}")
        if not again:
            wrong.append(f"{told}: other bits with other delays")
    assert not wrong, "\n".join(wrong)
