"""The order of a pipeline's work can be played by any number of stages, and idles no more than 1F1B has to."""

import contextlib
import os
import socket
import threading
from collections import defaultdict
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tiny
from distributed import run_distributed
from forked import PATIENCE, until
from sagetrain.cluster import guard
from sagetrain.cluster.guard import Watchdog
from sagetrain.parallel import orders as orders_module
from sagetrain.parallel.orders import Action, in_flight, orders
from sagetrain.parallel.pipeline import Pipe
from sagetrain.parallel.topology import Topology

LAYOUTS = [(ranks, per_rank) for ranks, per_rank in product(range(2, 9), (1, 2)) if ranks * per_rank <= 12] + [(3, 3)]


def played(order: list[list[Action]], ranks: int, per_rank: int, backward: float = 2.0) -> float:
    """Play an order with messages that take no time, and return when the last stage is done. A forward pass of a chunk
    takes 1. An action starts when its stage is free and its input has arrived."""
    last, done, ends, begun = ranks * per_rank - 1, dict[Action, float](), [0.0] * ranks, [0] * ranks
    while any(begun[rank] < len(order[rank]) for rank in range(ranks)):
        before = sum(begun)
        for rank in range(ranks):
            while begun[rank] < len(order[rank]):
                action = order[rank][begun[rank]]
                kind, chunk, micro = action
                if kind == "forward":
                    needs = [Action("forward", chunk - 1, micro)] if chunk else []
                else:
                    needs = [Action("forward", chunk, micro)]
                    needs += [Action("backward", chunk + 1, micro)] if chunk < last else []
                if any(need not in done for need in needs):
                    break
                start = max([ends[rank], *(done[need] for need in needs)])
                done[action] = ends[rank] = start + (1.0 if kind == "forward" else backward)
                begun[rank] += 1
        assert sum(begun) > before, "all stages wait for each other"
    return max(ends)


@pytest.mark.parametrize(("ranks", "per_rank"), LAYOUTS)
def test_every_order_can_be_played(ranks: int, per_rank: int) -> None:
    for micros in range(1, 65):
        order = orders(ranks, per_rank, micros)
        for rank, own in enumerate(order):
            assert len(own) == len(set(own)) == 2 * micros * per_rank
            assert {action.chunk % ranks for action in own} == {rank}
        time = played(order, ranks, per_rank)
        work = 3.0 * micros * per_rank
        # A pipeline fills and drains in the time of one chunk on each other stage, forward and backward.
        if per_rank == 1 or micros % ranks == 0:
            assert time == work + 3.0 * (ranks - 1)
        assert played(orders(ranks, per_rank, micros, backward=False), ranks, per_rank) >= micros * per_rank


@pytest.mark.parametrize(("ranks", "per_rank"), LAYOUTS)
def test_few_micro_batches_are_kept_at_once(ranks: int, per_rank: int) -> None:
    for micros in range(1, 65):
        kept = [in_flight(order) for order in orders(ranks, per_rank, micros)]
        if per_rank == 1:
            assert kept == [min(micros, ranks - rank) for rank in range(ranks)]
        else:
            largest = micros if micros < ranks else -(-micros // (micros // ranks))
            bound = (per_rank - 1) * largest + 1
            assert kept == [min(micros * per_rank, 2 * (ranks - rank - 1) + bound) for rank in range(ranks)]


@pytest.mark.parametrize(("ranks", "per_rank"), LAYOUTS)
def test_messages_arrive_in_the_order_in_which_they_are_awaited(ranks: int, per_rank: int) -> None:
    last = ranks * per_rank - 1
    for micros in range(1, 65):
        sent, awaited = defaultdict(list), defaultdict(list)
        for rank, own in enumerate(orders(ranks, per_rank, micros)):
            for kind, chunk, micro in own:
                step = 1 if kind == "forward" else -1
                if 0 <= chunk + step <= last:
                    wraps = min(chunk, chunk + step) % ranks == ranks - 1
                    sent[rank, (rank + step) % ranks, kind, wraps].append((chunk + step, micro))
                if 0 <= chunk - step <= last:
                    wraps = min(chunk, chunk - step) % ranks == ranks - 1
                    awaited[(rank - step) % ranks, rank, kind, wraps].append((chunk, micro))
        assert sent == awaited


def test_a_stage_makes_its_own_order_once(monkeypatch) -> None:
    """The actions of all stages would be made at every step: a twentieth of a second at 16 stages."""
    made, place = [], {"topology": Topology(4, 1, 1, 4), "rank": 1, "pp_rank": 1}
    monkeypatch.setattr(orders_module, "Action", lambda *action: made.append(action) or Action(*action))
    monkeypatch.setattr(Pipe, "_connect", lambda *_: None)
    monkeypatch.setattr(Pipe, "_receive", lambda *_: [])
    monkeypatch.setattr(Pipe, "_send", lambda *_: None)
    pipe = Pipe(SimpleNamespace(**place, subgroup=lambda *_, **__: None), 2)
    for _ in range(3):
        pipe.run(37, lambda *_: [], lambda _: [], lambda *_: None)
    assert len(made) == 2 * 2 * 37


# -- stages that hang or die -------------------------------------------------------------------------------------------


def lose_connections() -> None:
    """Lose all connections of this process, as one that dies does."""
    for name in os.listdir("/proc/self/fd"):
        # The list names the descriptor that read it, which is closed by now. The other end of a connection may have
        # closed it, because the first ones are lost already.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                connection.shutdown(socket.SHUT_RDWR)


def say(path: Path, text: str) -> None:
    """Write a file that is whole as soon as it is there: ranks wait for it, and the first one that raises ends all."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.rename(path)


def a_stage_hangs_and_dies(root: str) -> None:
    """Let the last of three stages hang until the watchdog of the first one has said so. Then the stage loses its
    connections, as one that dies does."""
    groups, folder = tiny.join(1, 1, 3), Path(root)
    layout = {"engine": "fsdp", "pipeline_parallel_size": 3}
    engine = tiny.engine(tiny.config(2, model={"num_layers": 3}, parallel=layout), groups)
    # The process goes on after the watchdog has ended it.
    guard.os = SimpleNamespace(**{**vars(os), "_exit": lambda code: None})
    watchdog = Watchdog(folder / "stacks", groups.rank, timeout=1.0, watches=groups.rank == 0)
    watchdog.waits, passes = engine.waits, []

    def watch() -> None:
        """Begin to count the seconds when the first stage waits for the one that hangs."""
        until((folder / "hangs").exists)
        until(lambda: "backward pass of micro-batch 1" in engine.waits())
        watchdog._timeout = 0.5

    if groups.rank == 0:
        watchdog._timeout = PATIENCE
        threading.Thread(target=watch, daemon=True).start()

    def hang(*_: object) -> None:
        passes.append(1)
        if len(passes) == 2:
            (folder / "hangs").touch()
            until((folder / "stacks/rank-0.collectives.json").exists)
            lose_connections()
            until((folder / "lost-1").exists)
            raise RuntimeError("this stage is gone")

    if groups.rank == 2:
        next(iter(engine.model.blocks)).register_forward_pre_hook(hang)
    try:
        with watchdog:
            watchdog.begin("step 7")
            tiny.global_step(engine, 0)
    except RuntimeError as error:
        say(folder / f"lost-{groups.rank}", str(error))
        raise


def a_stage_takes_nothing(root: str) -> None:
    """Run forward passes alone, as an evaluation does. The last stage takes no message until the first one has said
    what it waits for. Then the last stage is gone."""
    groups, folder = tiny.join(1, 1, 2), Path(root)
    pipe, said = Pipe(groups, 1), folder / "waits"
    if groups.rank == 1:
        until(said.exists)
        lose_connections()
        until((folder / "lost").exists)
        raise RuntimeError("this stage is gone")

    def look() -> None:
        until(pipe.waits)
        say(said, pipe.waits())

    threading.Thread(target=look, daemon=True).start()
    try:
        pipe.run(2, lambda chunk, micro, inputs: [torch.zeros(1 << 22)], lambda micro: [])
    except RuntimeError as error:
        say(folder / "lost", str(error))
        raise


def test_a_stage_that_takes_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="raised"):
        run_distributed(a_stage_takes_nothing, 2, str(tmp_path))
    words = "stage 1 (rank 1) to take the forward pass of micro-batch 0 through chunk 0"
    assert (tmp_path / "waits").read_text() == f"pipeline stage 0 (rank 0) waits for {words}"
    assert (tmp_path / "lost").read_text().startswith("pipeline stage 0 (rank 0) has lost stage 1 (rank 1), in the")


def test_a_stage_that_hangs_or_dies_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="raised"):
        run_distributed(a_stage_hangs_and_dies, 3, str(tmp_path))
    said = (tmp_path / "stacks/rank-0.txt").read_text()
    assert said.startswith(
        "rank 0, in step 7, where pipeline stage 0 (rank 0) waits for stage 1 (rank 1), for the backward pass of "
        "micro-batch 1 through chunk 0: no progress for"
    )
    lost = (tmp_path / "lost-1").read_text()
    assert lost.startswith("pipeline stage 1 (rank 1) has lost stage 2 (rank 2), in the backward pass of micro-batch 1")
