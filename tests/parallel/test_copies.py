"""Collectives by copies over memory that processes share. The schedule is that of GPUs, and a thread is the stream."""

import ctypes
import gc
import itertools
import queue
import random
import tempfile
import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import forked
import tiny
from distributed import run_distributed
from sagetrain.config.schema import AttentionConfig, ModelConfig
from sagetrain.engines import fsdp
from sagetrain.engines.gather import gather_by_copies
from sagetrain.model.backends import Sdpa
from sagetrain.parallel import copies
from sagetrain.parallel.collectives import finish, start_all_gather, start_reduce_scatter
from sagetrain.parallel.copies import SLOTS, Copies, connected, memory_of
from sagetrain.parallel.device_memory import DeviceMemory, PadOperation, Step, meeting
from sagetrain.parallel.topology import ParallelGroups, Topology

DELAY = 0.002  # Each copy waits at most this long, in seconds.


class ThreadMemory:
    """A memory of files that all ranks map. A thread does the work of a stream, with random delays."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.allocations = rank, size, 0
        self._meeting, self._telling = (dist.new_group(timeout=timedelta(seconds=forked.PATIENCE)) for _ in range(2))
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._delays = random.Random(rank)
        self._events: set[threading.Event] = set()  # Nobody has waited for these events yet.
        threading.Thread(target=self._run, daemon=True).start()

    def allocate(self, nbytes: int) -> list[Tensor]:
        self.allocations += 1
        self.wait(self.send([]))
        folder: list = [tempfile.mkdtemp() if self.rank == 0 else None]
        dist.broadcast_object_list(folder, group=self._telling)
        files = [f"{folder[0]}/{rank}" for rank in range(self.size)]
        torch.from_file(files[self.rank], shared=True, size=nbytes, dtype=torch.uint8).fill_(255)
        dist.barrier(self._telling)
        return [torch.from_file(file, shared=True, size=nbytes, dtype=torch.uint8) for file in files]

    def another(self) -> "ThreadMemory":
        return ThreadMemory(self.rank, self.size)

    def send(self, steps: list[Step]) -> threading.Event:
        for step in steps:
            meets = isinstance(step, int)
            self._queue.put(partial(dist.barrier, self._meeting) if meets else partial(ctypes.memmove, *step))
        event = threading.Event()
        self._events.add(event)
        self._queue.put(event.set)
        return event

    def wait(self, event: threading.Event) -> None:
        self._events.remove(event)
        event.wait()

    def _run(self) -> None:
        while True:
            work = self._queue.get()
            time.sleep(self._delays.uniform(0, DELAY))
            work()


def _connect() -> tuple[ParallelGroups, ThreadMemory]:
    size, rank = dist.get_world_size(), dist.get_rank()
    groups = ParallelGroups.create(Topology(size, size))
    memory = ThreadMemory(rank, size)
    connected[groups.tp_group.group_name] = Copies(rank, size, memory)
    return groups, memory


def _random(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _expect(kind: str, seed: int, rows: int, width: int, dtype: torch.dtype, rank: int, size: int) -> Tensor:
    xs = [_random(100 * seed + r, rows, width, dtype=dtype) for r in range(size)]
    if kind == "gather":
        return torch.cat(xs)
    return torch.stack(xs).sum(0).chunk(size)[rank]


def _check_many_under_way() -> int:
    """Finish collectives in any order, with more under way than there are slots, on sizes that grow and shrink."""
    groups, memory = _connect()
    size, rank, group = groups.tp_size, groups.tp_rank, groups.tp_group
    choices, pending = random.Random(7), []
    for seed in range(120):
        time.sleep(random.Random(1000 * seed + rank).uniform(0, DELAY))
        kind = choices.choice(("gather", "scatter"))
        rows, width = size * choices.randint(1, 5 + seed // 20), choices.choice((1, 3, 8, 33))
        dtype = choices.choice((torch.float32, torch.bfloat16, torch.float64))
        x = _random(100 * seed + rank, rows, width, dtype=dtype)
        result = (start_all_gather if kind == "gather" else start_reduce_scatter)(x, group)
        del x  # The collective itself keeps the tensor alive until it is finished.
        pending.append((result, (kind, seed, rows, width, dtype, rank, size)))
        gc.collect(0)
        while len(pending) > choices.randint(0, 2 * SLOTS):
            actual, what = pending.pop(choices.randrange(len(pending)))
            torch.testing.assert_close(finish(actual), _expect(*what), rtol=0, atol=0)
    for actual, what in pending:
        torch.testing.assert_close(finish(actual), _expect(*what), rtol=0, atol=0)
    assert torch._C._distributed_c10d._get_work_registry_size() == 0
    with pytest.raises(ValueError, match=r"dim 0 \(1\) is not a multiple of the group's size"):
        start_reduce_scatter(torch.ones(1, 2), group)
    return memory.allocations


def _outcome(ranks: int, parts: list[list[int]]) -> str:
    """Run the meetings of all ranks in all interleavings. Return what goes wrong, or "".

    Args:
        parts: for each meeting the part of the pads in which it is, on each rank.
    """
    programs: list[list[PadOperation | int]] = []
    for rank in range(ranks):
        program: list[PadOperation | int] = []
        for number, part in enumerate(parts):
            program += [number, *meeting(rank, ranks, part[rank]), number]
        programs.append(program)
    start = (0,) * ranks, (-1,) * ranks, frozenset[tuple[tuple[int, int], int]]()
    seen, left = {start}, [start]
    while left:
        at, reached, pads = left.pop()
        values, moved = dict(pads), False
        for rank, program in enumerate(programs):
            if at[rank] == len(program):
                continue
            step, now, new = program[at[rank]], reached, pads
            if isinstance(step, int):
                if step <= reached[rank] and min(reached) < step:  # It has met, and leaves.
                    return f"rank {rank} leaves meeting {step} while others are at {reached}"
                now = (*reached[:rank], step, *reached[rank + 1 :])
            elif step.waits:
                if values.get((step.rank, step.place), 0) != step.value:
                    continue
            else:
                new = frozenset({**values, (step.rank, step.place): step.value}.items())
            moved = True
            state = (*at[:rank], at[rank] + 1, *at[rank + 1 :]), now, new
            if state not in seen:
                seen.add(state)
                left.append(state)
        if not moved and any(a < len(program) for a, program in zip(at, programs, strict=True)):
            return f"all are stuck at {reached}"
    return ""


@pytest.mark.parametrize(("ranks", "parts", "outcome"), [(2, "01010101", ""), (3, "0101", ""), (2, "0000", "stuck")])
def test_ranks_meet_in_every_interleaving(ranks: int, parts: str, outcome: str) -> None:
    """Recordings repeat an even number of meetings, and so do ranks that launch them. One part alone gets stuck."""
    found = _outcome(ranks, [[int(part)] * ranks for part in parts])
    assert outcome in found and bool(outcome) == bool(found)


class Ordered:
    """A memory that runs nothing and logs what its streams do in which order, for all ranks in one process."""

    def __init__(self, size: int, buffers: list[list[Tensor]]) -> None:
        self._size, self._buffers, self._allocations, self.log = size, buffers, 0, list[tuple]()

    def allocate(self, nbytes: int) -> list[Tensor]:
        if self._allocations == len(self._buffers):
            self._buffers.append([torch.zeros(nbytes, dtype=torch.uint8) for _ in range(self._size)])
        self._allocations += 1
        return self._buffers[self._allocations - 1]

    def send(self, steps: list[Step]) -> int:
        self.log += ["sent", *steps]
        return len(self.log)

    def wait(self, event: int) -> None:
        self.log.append(("waits", event))

    def sum(self, *parts: Tensor | int, out: Tensor) -> None:
        """Stand for torch.add and torch.sum."""
        self.log += [("reads", part.data_ptr(), part.nbytes) for part in parts if isinstance(part, Tensor)]


def _races(logs: list[list]) -> int:
    """Return how many accesses no meeting and no event orders, of which one writes what the other reads or writes. Each
    rank has two streams, the caller's and the separate one. A stream knows how far each other one is for certain."""
    ranks = range(len(logs))
    known, at, accesses, races = [[0] * 2 * len(logs) for _ in range(2 * len(logs))], [0] * len(logs), [], 0
    events: list[dict[int, list[int]]] = [{} for _ in logs]

    def learn(stream: int, other: list[int]) -> None:
        known[stream] = [max(pair) for pair in zip(known[stream], other, strict=True)]

    def touch(stream: int, place: int, nbytes: int, writes: bool) -> int:
        known[stream][stream] += 1
        found = 0
        for by, when, start, end, wrote in accesses:
            unordered = known[stream][by] < when and (writes or wrote)
            found += unordered and start < place + nbytes and place < end
        accesses.append((stream, known[stream][stream], place, place + nbytes, writes))
        return found

    while any(at[rank] < len(logs[rank]) for rank in ranks):
        for rank, log in enumerate(logs):
            caller, separate = 2 * rank, 2 * rank + 1
            while at[rank] < len(log) and not isinstance(step := log[at[rank]], int):
                at[rank] += 1
                if step == "sent":
                    learn(separate, known[caller])
                elif step[0] == "waits":
                    learn(caller, events[rank][step[1]])
                elif step[0] == "reads":
                    races += touch(caller, step[1], step[2], False)
                else:
                    target, source, nbytes = step
                    races += touch(separate, source, nbytes, False) + touch(separate, target, nbytes, True)
                events[rank][at[rank]] = [*known[separate]]
        if all(at[rank] < len(logs[rank]) for rank in ranks):  # All are at a meeting.
            every = [max(column) for column in zip(*(known[2 * rank + 1] for rank in ranks), strict=True)]
            for rank in ranks:
                known[2 * rank + 1], at[rank] = [*every], at[rank] + 1
                events[rank][at[rank]] = [*every]
    return races


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("ranks", [2, 3])
def test_no_slot_is_read_or_written_too_early(ranks: int, slots: int) -> None:
    """Take each order of five gathers and scatters: four of them by the host, five twice as a recording repeats them,
    and four again. They are finished at once, or as late as can be."""
    for kinds, at_once in itertools.product(itertools.product(("gather", "scatter"), repeat=5), (True, False)):
        buffers: list[list[Tensor]] = []
        memories, kept = [Ordered(ranks, buffers) for _ in range(ranks)], []
        for rank, memory in enumerate(memories):
            copied = Copies(rank, ranks, memory, slots)
            copied._grow(8 * 4 * ranks)
            starts, started = {"gather": copied.all_gather, "scatter": copied.reduce_scatter}, []
            with patch.multiple(torch, add=memory.sum, sum=memory.sum):
                for repeats in (False, True, True, False):
                    copied.align()
                    count = copied._count
                    with copied.repeatable() if repeats else nullcontext():
                        before = len(started)
                        for kind in kinds if repeats else kinds[:-1]:
                            kept.append(torch.zeros(8 if kind == "gather" else 8 * ranks))
                            started.append(starts[kind](kept[-1]))
                            kept += [finish(started.pop())] if at_once else []
                        while repeats and len(started) > before:
                            kept.append(finish(started.pop()))
                    if repeats:  # The host takes no slot for a replay.
                        copied._count = count
                kept += [finish(result) for result in started]
        assert _races([memory.log for memory in memories]) == 0, (kinds, at_once)


@pytest.mark.parametrize("world_size", [2, 3])
def test_many_under_way(world_size: int) -> None:
    for allocations in run_distributed(_check_many_under_way, world_size):
        assert 1 < allocations < 20


SHAPE = ModelConfig(
    num_layers=2, hidden_size=32, ffn_hidden_size=48, num_attention_heads=8, num_key_value_heads=4, head_dim=8
)


def _train(groups: ParallelGroups, checkpointing: str, backend: str | None) -> list[Tensor]:
    """Return the loss and gradients of two micro-steps."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = tiny.transformer(
        SHAPE,
        AttentionConfig(backend="sdpa"),
        vocab_size=128,
        groups=groups,
        sequence_parallel=True,
        activation_checkpointing=checkpointing,
        seed=5,
    )
    if backend:
        compiles = tiny.compile_first_rank(model, backend)
    losses = []
    for step in range(2):
        text = torch.randint(0, 128, (4, 17), generator=torch.Generator().manual_seed(step))
        losses.append(model(text[:, :-1], text[:, 1:]))
        losses[-1].backward()
    assert torch._C._distributed_c10d._get_work_registry_size() == 0
    assert not torch._dynamo.utils.counters["graph_break"]
    # All blocks share one graph, and so do the norms outside of them. None is compiled twice.
    if backend == "aot_eager" and compiles:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    return [*(loss.detach() for loss in losses), *(p.grad for p in model.parameters())]


def _check_model(backend: str) -> None:
    """Compare the whole model by copies with the functional collectives. Between two ranks even the sums are equal."""
    groups = ParallelGroups.create(Topology(dist.get_world_size(), dist.get_world_size()))
    cases = [("none", None), ("full", None), ("none", backend)]
    expected = [_train(groups, *case) for case in cases]
    copied, _ = _connect()
    for case, truth in zip(cases, expected, strict=True):
        before = connected[copied.tp_group.group_name]._count
        actual = _train(copied, *case)
        assert connected[copied.tp_group.group_name]._count > before
        torch.testing.assert_close(actual, truth, rtol=0, atol=0)


def test_model_by_copies_equals_functional_collectives() -> None:
    run_distributed(_check_model, 2, "aot_eager")


def _check_engine() -> None:
    """Compare ZeRO 3 whose blocks are copied out of the ranks' memory, by FSDP2's hooks and without them, with
    collectives, by hooks and without them. Shards are unequal."""
    hooked, passing = (
        tiny.config(3, "bf16", parallel={"engine": "fsdp", **how}, model={"ffn_hidden_size": 45, "num_layers": 4})
        for how in ({"shard_size": dist.get_world_size()}, {})
    )
    groups = tiny.join(1)
    engines = [tiny.engine(hooked, groups), tiny.engine(passing, groups)]
    name, size = groups.replica_group.group_name, groups.num_replicas
    connected[name], copies._refused[name] = Copies(groups.rank, size, ThreadMemory(groups.rank, size), slots=2), ""
    with patch.object(fsdp, "how_gathered", wraps=fsdp.how_gathered) as asked:
        engines += [tiny.engine(hooked, groups), tiny.engine(passing, groups)]
    of_hooks, _ = (call.args[0] for call in asked.call_args_list)
    assert gather_by_copies(of_hooks[1:]) == ""
    passes = engines[-1]
    blocks = passes._weights._blocks
    with patch.object(blocks._memory, "send", wraps=blocks._memory.send) as sent:
        found = [[tiny.global_step(engine, step, sequences=8).metrics for step in range(3)] for engine in engines]
    state = [[owned.read("weight").clone() for owned in engine.owned()] for engine in engines]
    assert found == [found[0]] * 4
    torch.testing.assert_close(state, [state[0]] * 4, rtol=0, atol=0)
    # In each micro-step four blocks are gathered forward and backward.
    assert connected[name]._count >= 3 * (8 // size) * 2 * 4
    # Without hooks the two blocks at the end of a pass stay for the next one. A renewal begins and ends with a meeting.
    gathers = [len(call.args[0]) > 1 for call in sent.call_args_list]
    assert (gathers.count(True), gathers.count(False)) == (3 * (2 + 4 * 8 // size), 3 * 2)
    assert blocks._held == [None, None], "what an update has made old is in no slot"
    matrices = [
        leaf.data_ptr() for name, leaf in passes.leaves().items() if name.startswith("blocks.") if leaf.dim() > 1
    ]
    assert len({*matrices}) == len(matrices) / 2, "memory holds two of four blocks"


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_engine_gathers_by_copies(ranks: int) -> None:
    run_distributed(_check_engine, ranks)


def _check_agreement() -> list[list[str]]:
    """Check that one rank's trouble is everyone's, in each step, and that a reason is found once. The memory meets when
    it is mapped, as torch's does, so that a rank which comes alone would wait."""
    found, rank = [], dist.get_rank()
    for step in ("check", "open", "reserve", "map", "try"):
        group, tries = dist.new_group(), list[str]()

        def trouble(place: str, step: str = step, tries: list[str] = tries) -> None:
            tries.append(place)
            if (rank, place) == (1, step):
                raise RuntimeError("GPU 1 cannot reach GPU 0\nand more")

        class Refusing(DeviceMemory):
            def __init__(self, ranks: dist.ProcessGroup) -> None:
                trouble("open")
                self._group, self._device, self._own = ranks, None, None
                self._symmetric = SimpleNamespace(multicast_ptr=0)

            def _reserve(self, nbytes: int) -> None:
                trouble("reserve")

            def _map(self, nbytes: int) -> list[Tensor]:
                dist.barrier(self._group)
                trouble("map")
                return [torch.empty(nbytes, dtype=torch.uint8)] * 2

        fakes = {"_check": lambda *_: trouble("check"), "DeviceMemory": Refusing, "_try": lambda *_: trouble("try")}
        with patch.multiple(copies, **fakes), patch.object(torch.cuda, "synchronize"):
            found.append([copies.connect(group) for _ in range(2)])
        assert tries[-1] == step and len({*tries}) == len(tries) and memory_of(group) is None
    return found


def test_ranks_agree_on_a_refusal() -> None:
    said = "rank 1: GPU 1 cannot reach GPU 0"
    no_memory = f"rank 0: no memory for 3,072 bytes that GPUs of a host copy through: {said}"
    for found in run_distributed(_check_agreement, 2):
        assert found == [[each] * 2 for each in (said, said, no_memory, said, said)]


def _check_growth() -> None:
    """Let one rank have no memory for a larger message: all ranks have the error, and no slot counts as grown."""

    class Small(ThreadMemory):
        _group, _device, _own = dist.group.WORLD, None, None
        allocate, _map = DeviceMemory.allocate, ThreadMemory.allocate

        def _reserve(self, nbytes: int) -> None:
            if self.rank == 1 and nbytes > 4096:
                raise RuntimeError("CUDA driver error: out of memory")
            self._own = torch.empty(nbytes, dtype=torch.uint8)

    rank, size = dist.get_rank(), dist.get_world_size()
    with patch.object(torch.cuda, "synchronize"):
        memory = Small(rank, size)
        copied = Copies(rank, size, memory)
        for length, fits in ((8, True), (4096, False), (4096, False), (16, True)):
            x = torch.arange(length) + rank
            if fits:
                assert finish(copied.all_gather(x)).tolist() == [i + r for r in range(size) for i in range(length)]
                own = memory._own
            else:
                with pytest.raises(torch.OutOfMemoryError, match=r"copy through: rank 1: CUDA driver error"):
                    copied.all_gather(x)
                assert memory._own is own, "a rank keeps memory that no rank can use"


def test_a_rank_without_memory_for_a_larger_message() -> None:
    run_distributed(_check_growth, 2)


def test_a_model_whose_ranks_cannot_copy_warns_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model without values needs no GPU if its tensors are fake. Every rank has the refusal, so every rank warns."""
    monkeypatch.setattr(copies, "connect", lambda group: "rank 1: GPU 1 cannot reach GPU 0")
    groups = ParallelGroups(Topology(2, 2), 0, tp_group="the two")
    how = {"vocab_size": 128, "groups": groups, "sequence_parallel": True, "seed": None, "device": "cuda"}
    said = "collectives go through NCCL, which slows the matmuls beside them: rank 1: GPU 1 cannot reach GPU 0$"
    with pytest.warns(UserWarning, match=said), FakeTensorMode():
        tiny.transformer(SHAPE, AttentionConfig(backend="sdpa"), functions=[Sdpa()] * 2, **how)
