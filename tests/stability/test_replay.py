"""Bits that flip on one rank are found by a replica, named, and leave no trace in the run."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from distributed import run_distributed
from runs import rows_of, training_rows
from sagetrain.checkpoint import on_disk
from sagetrain.config.check import check
from sagetrain.config.errors import ConfigError, TrainingError
from sagetrain.data.batch import Batch
from sagetrain.engines.protocol import Observers
from sagetrain.engines.step import Engine
from sagetrain.model.walks import Half
from sagetrain.parallel.digest import ROW, digest, digest_by
from sagetrain.stability.replica_check import METRIC, ReplicaCheck, ReplicaTry
from sagetrain.stability.spikes import Verdict
from sagetrain.training.build_run import build, check_files
from sagetrain.training.callbacks import Callback
from sagetrain.training.trainer import Trainer

# The two numbers are set for longer trials by hand.
TRIALS, STEPS = (int(os.environ.get(name, few)) for name, few in (("REPLAY_TRIALS", 8), ("REPLAY_STEPS", 4)))
INTEGERS = {2: torch.int16, 4: torch.int32}


def flip(values: Tensor, place: int, bit: int) -> None:
    """Flip a bit of a value, in place."""
    bits = values.detach().view(-1).view(INTEGERS[values.element_size()])
    width = 8 * values.element_size()
    bits[place % len(bits)] ^= 1 << bit if bit < width - 1 else -(1 << bit)


def test_threads_have_the_digest_of_one() -> None:
    for rows, threads in ((1, 1), (7, 3), (5, 8)):
        data = torch.randint(0, 256, (rows * ROW,), dtype=torch.uint8)
        assert int(digest_by(threads, data)) == int(digest(data)), (rows, threads)


@pytest.mark.parametrize(("shape", "dtype"), [((), "float32"), ((4097,), "float32"), ((512, 64), "bfloat16")])
def test_every_flip_changes_the_digest(shape, dtype) -> None:
    draw, values = random.Random(0), torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = values.to(getattr(torch, dtype))
    before = int(digest(values))
    assert before == int(digest(values.clone()))
    for _ in range(64):
        other = values.clone().contiguous()
        flip(other, draw.randrange(1 << 30), draw.randrange(8 * values.element_size()))
        assert int(digest(other)) != before
    if values.dim() == 1:  # A view that begins anywhere, and two values in each other's place.
        assert int(digest(values[1:])) == int(digest(values[1:].clone()))
        values[[1, 4000]] = values[[4000, 1]]
        assert int(digest(values)) != before


class Steps:
    """Steps of a tiny engine, as the controllers take them."""

    def __init__(self, engine: Engine, every: int = 1) -> None:
        groups = engine.groups
        self.engine, self.every, self.step = engine, every, 0
        places = [f"host {rank}" for rank in range(groups.dp_size)]
        self.replay = ReplicaCheck(engine.model, engine.leaves(), places, groups.rank)

    def batch(self, micro_step: int, rank: int) -> Batch:
        draw = torch.Generator().manual_seed(1000 * (self.step % 50) + 10 * micro_step + rank)
        tokens = torch.randint(0, tiny.VOCAB, (1, tiny.SEQ + 1), generator=draw)
        return Batch(tokens[:, :-1], tokens[:, 1:], None, None, None, [])

    def take(self, before: ReplicaTry | None = None) -> ReplicaTry:
        """Take a step, or take it again."""
        self.step += before is None
        found: list[ReplicaTry] = []

        def judge(metrics: Any) -> Verdict:
            found.append(self.replay.compare(self.engine.groups.metrics.vectors[METRIC]))
            return Verdict(not found[-1].pairs)

        replay = self.replay.begin(partial(self.batch, 1), before)
        batches = [self.batch(micro_step, self.engine.groups.rank) for micro_step in range(2)]
        self.engine.step(batches, 2, 1e-2, Observers(replay=replay, judge=judge))
        return found[0]

    def again(self, before: ReplicaTry) -> list[int]:
        """Take the step again as a run does, and return the ranks that were wrong."""
        self.engine.weights_changed()
        now = self.take(before)
        assert not now.pairs
        return before.suspects(now)


def leaf_is_fp32(engine: Engine) -> bool:
    return next(iter(engine.leaves().values())).dtype == torch.float32


@contextmanager
def broken(engine: Engine, kind: str, victim: int, draw: random.Random) -> Iterator[None]:
    """Flip a bit of a kind on one rank while a step of two micro-batches runs."""
    here, name, number = engine.groups.rank == victim, draw.choice(list(engine.leaves())), draw.randrange(2)
    place, bit, calls = draw.randrange(1 << 20), draw.randrange(32 if leaf_is_fp32(engine) else 16), []
    # The second call is of the rank's own last micro-batch, and the third one is of another replica's.
    when = draw.choice([2, 3])
    leaf, block = engine.leaves()[name], engine.model.get_submodule(f"blocks.{number}")

    def once(values: Tensor) -> Tensor:
        calls.append(here)
        if not here or len(calls) != when:
            return values
        values = values.clone()
        flip(values, place, bit)
        return values

    class Flip(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return once(x) if kind == "activation" else x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return once(gradient) if kind == "gradient of an output" else gradient

    def flipped(layouts: Any, norm: Any, half: Any) -> Any:
        ((stream, normed),) = forward(layouts, norm, half)
        if kind == "activation":
            return (Half(Flip.apply(stream), normed),)
        # Nobody reads the residual stream behind the last block.
        return (Half(stream, Flip.apply(normed)),)

    forward, hook = block.forward, None
    if kind == "weight" and here:
        flip(leaf, place, bit)
    if kind == "gradient":
        hook = leaf.register_hook(once)
    if kind in ("activation", "gradient of an output"):
        block.forward = flipped
    try:
        yield
    finally:
        block.forward = forward
        if hook:
            hook.remove()


KINDS = ["weight", "activation", "gradient of an output", "gradient"]


def flips(trials: int) -> tuple[dict[str, list[int]], list[Any]]:
    """Flip bits on one rank after the other. Return for each kind how many there were, how many were found, and how
    often the rank was named alone. Check that the run has the bits of an undisturbed one."""
    groups, draw = tiny.join(1), random.Random(0)
    found: dict[str, list[int]] = {kind: [0, 0, 0] for kind in KINDS}
    for stage, dtype in ((1, "fp32"), (0, "bf16")):
        steps, clean = (Steps(tiny.engine(tiny.config(stage, dtype), groups)) for _ in range(2))
        for trial in range(trials // 2):
            kind, victim = KINDS[trial % len(KINDS)], trial % groups.dp_size
            assert not clean.take().pairs
            with broken(steps.engine, kind, victim, draw):
                first = steps.take()
            named = first.pairs and steps.again(first)
            for place, more in enumerate((1, bool(first.pairs), named == [victim])):
                found[kind][place] += more
            assert all(map(torch.equal, tiny.state_of(steps.engine), tiny.state_of(clean.engine))), (stage, trial, kind)
    return found, after_the_sum(steps)


def after_the_sum(steps: Steps) -> list[Any]:
    """Flip a bit of the reduced gradients on rank 1 at ZeRO 0, where each replica updates masters of its own."""
    reduction = steps.engine._sums._reduction
    means = reduction.means

    def flipped() -> dict[str, Tensor]:
        found = means()
        if steps.engine.groups.rank == 1:
            flip(found["blocks.0.mlp.down.weight"], 7, 30)
        return found

    reduction.means = flipped
    pairs = steps.take().pairs
    reduction.means = means
    before = steps.replay.different_weights()
    steps.engine.weights_changed()
    after = steps.replay.different_weights()
    return [pairs, before and before.text, before == after, steps.take().pairs]


def test_flips_on_one_rank_are_found_and_leave_no_trace() -> None:
    for found, (at_once, at_save, in_masters, later) in run_distributed(flips, 3, TRIALS):
        each = TRIALS // len(KINDS)
        rounded_away = each - found["gradient of an output"][1]
        assert 0 <= rounded_away <= each // 2
        expected = {kind: [each] * 3 for kind in KINDS}
        assert found == expected | {"gradient of an output": [each, each - rounded_away, each - rounded_away]}
        assert at_save == "the weights of the replicas differ at rank 1 (host 1): blocks.0.mlp.down.weight"
        assert at_once == [] and in_masters and later == [(1, 0), (2, 1)]


PRECISIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp32": ("fp32", {}),
    "bf16": ("bf16", {"training": {"activation_checkpointing": "full"}}),
    "int8": ("bf16", {"attention": {"backend": "sage"}, "linear": {"precision": "int8"}}),
}


def undisturbed(steps: int) -> list[str]:
    """Return the precisions in which any of so many steps is refused. A flip before them is found."""
    groups, refused = tiny.join(1), []
    for name, (dtype, sections) in PRECISIONS.items():
        made = Steps(tiny.engine(tiny.config(groups.dp_size % 2, dtype, **sections), groups))
        with broken(made.engine, "gradient", 0, random.Random(0)):
            first = made.take()
        assert first.pairs and 0 in made.again(first), name
        refused += [name for _ in range(steps) if made.take().pairs]
    return refused


@pytest.mark.parametrize("ranks", [1, 2])
def test_undisturbed_steps_are_never_refused(ranks) -> None:
    """A replica alone is compared with itself."""
    assert run_distributed(undisturbed, ranks, STEPS) == [[]] * ranks


# -- runs ------------------------------------------------------------------------------------------------------------


class Breaks(Callback):
    """Break rank 1 in a step: once, for good, or between the update and the save."""

    def __init__(self, how: str) -> None:
        self.how, self.hook = how, None

    def on_start(self, start: Any) -> None:
        leaves = start.engine.leaves()
        self.leaf, self.here = leaves["blocks.1.mlp.down.weight"], start.engine.groups.rank == 1

    def on_step_begin(self, step: int) -> None:
        if self.here and step == 4 and self.how == "once":
            flip(self.leaf, 5, 20)
        if self.here and step == 4 and self.how == "for good":
            self.leaf.register_hook(lambda gradient: gradient * 1.5)

    def on_step(self, position: Any, result: Any) -> None:
        if self.here and position.step == 5 and self.how == "before the save":
            flip(self.leaf, 5, 20)


def runs(corpus: str, folder: str) -> None:
    """Make runs in one world, and check what each leaves behind."""

    def run(how: str, replay: dict[str, Any]) -> Path:
        path = Path(folder) / how.replace(" ", "-")
        data = {"train": [{"path": f"{corpus}/train"}], "valid": [{"path": f"{corpus}/valid"}]}
        training = {"run_dir": str(path), "total_tokens": 6 * 4 * tiny.SEQ}
        sections = {"data": data, "training": training, "checkpoint": {"every_tokens": 5 * 4 * tiny.SEQ}}
        cfg = tiny.config(1, stability={"replay": replay}, evaluation={"num_sequences": 4}, **sections)
        assert Trainer(build(cfg, own_process=False), callbacks=[Breaks(how)]).train()
        return path

    plain, every = run("not at all", {}), {"every_steps": 2}
    if os.environ["RANK"] == "0":
        assert (plain / "events.jsonl").read_text() == ""
    words = {
        "once": [
            "rank 1 (host *, cpu) and rank 0 (host *, cpu) computed one micro-batch, and the bits differ first in the "
            "output of block 1; their weights differ in blocks.1.mlp.down.weight. Step 4 is refused, and taken again",
            "step 4: the computations of the replicas agree at the second try; wrong was rank 1 (host *, cpu). The run",
        ],
        "before the save": ["the weights of the replicas differ at rank 0 * or rank 1 *; renewed from the master"],
    }
    for how, expected in words.items():
        path = run(how, every)
        if os.environ["RANK"] == "0":
            assert losses(path) == losses(plain) and files(path) == files(plain)
            told = rows_of(path, "events")
            assert [each["kind"] for each in told] == ["corruption"] * len(expected)
            for each, text in zip(told, expected, strict=True):
                assert fnmatch(each["text"], f"{text.replace('[', '[[]')}*"), each
    with pytest.raises(TrainingError, match=r"step 4: .* differ a second time; wrong was rank 0 .* or rank 1 .*dcgmi"):
        run("for good", every)
    assert run("for good", every | {"policy": "go_on"}).exists()


def losses(path: Path) -> dict[int, float]:
    return {row["step"]: row["train/loss"] for row in training_rows(path)}


def files(path: Path) -> list[bytes]:
    """Return the bytes of all tensors of the newest checkpoint."""
    return [file.read_bytes() for file in sorted(on_disk.newest(path / "checkpoints").glob("*.safetensors"))]


def test_a_run_takes_a_refused_step_again_to_the_same_bits(corpus: Path, tmp_path: Path) -> None:
    run_distributed(runs, 2, str(corpus), str(tmp_path))


@pytest.mark.parametrize(("sections", "key"), [
    ({"parallel": {"zero_stage": 2}}, "parallel.zero_stage"),
    ({"parallel": {"zero_stage": 1, "engine": "deepspeed"}}, "parallel.engine"),
    ({"parallel": {"zero_stage": 1, "tensor_parallel_size": 2}}, "parallel.tensor_parallel_size"),
    ({"parallel": {"zero_stage": 1, "offload": "optimizer"}}, "parallel.offload"),
    ({"attention": {"backend": "auto"}}, "attention.backend"),
    ({"model": {"experts": {"number": 4, "per_token": 2, "ffn_size": 16}}}, "model.experts"),
])  # fmt: skip
def test_what_was_not_tried_is_refused_by_name(sections, key) -> None:
    cfg = tiny.config(1, stability={"replay": {"every_steps": 100}}, **sections)
    found = [each for each in check(cfg, 2, files=False) if each.rule == "replay_untried"]
    assert [each.key for each in found] == [key]


def test_frequent_comparisons_name_their_cost() -> None:
    cfg = tiny.config(1, stability={"replay": {"every_steps": 5}})
    (found,) = (each for each in check(cfg, 2, files=False) if each.rule == "replay_often")
    assert "10.0% of the time" in found.message and found.fix.startswith("use 50 or more")


def test_a_loss_and_tokens_of_ones_own_are_refused(corpus: Path, tmp_path: Path) -> None:
    data, training = {"train": [{"path": f"{corpus}/train"}]}, {"run_dir": str(tmp_path / "run")}
    cfg = tiny.config(1, data=data, training=training, stability={"replay": {"every_steps": 100}})
    with pytest.raises(ConfigError, match=r"stability\.replay\.every_steps: 100 .* a loss of your own"):
        check_files(cfg, loss=lambda logits, labels: logits.sum(-1))
