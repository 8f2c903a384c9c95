"""An engine records micro-steps where its layout allows it, memory is there, and replays are as fast as the host."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tiny
from distributed import run_distributed
from fake_graph import Counted
from replayed_steps import EXPERTS, engines, step_of, weights_of
from sagetrain.config.layout import Layout
from sagetrain.config.rules.engine import findings
from sagetrain.engines import recorder, replay_times, replayed_stage
from sagetrain.engines.build_engine import build_engine

# -- memory ------------------------------------------------------------------------------------------------------------


class Gpu:
    """The memory of a GPU as torch.cuda reports it, in GiB: 10 kept, a peak of 14, 16 reserved. A pool takes 3."""

    def __init__(self, free: float) -> None:
        self.free = free
        told = {"memory_allocated": 10, "max_memory_allocated": 14, "memory_reserved": 16}
        for name, gib in told.items():
            setattr(torch.cuda, name, lambda device, gib=gib: gib * 2**30)
        torch.cuda.empty_cache = lambda: None
        torch.cuda.mem_get_info = lambda device: (int(self.free * 2**30), 80 * 2**30)

    def of(self, counted: Counted, engine: Any) -> None:
        """Let the engine believe that it is on this GPU."""

        def pool() -> Any:
            record = counted.pool()

            def taking(function: Any) -> Any:
                self.free -= 3
                return record(function)

            return taking

        recorder.recorder = lambda device: pool()
        of_engine = getattr(engine._traversal, "slots", engine._traversal).recorder
        of_engine.shared, of_engine._device = pool(), torch.device("cuda")


def short_of_memory(free: list[float], stage: int, stages: int) -> tuple[bool, list[str], int, int]:
    """Take steps on ranks whose GPUs have so many GiB free. Return whether they are those of the host, what was said,
    and how many recordings and replays there were."""
    groups, counted = tiny.join(1, pp_size=stages), Counted()
    parallel = {"pipeline_parallel_size": stages}
    host, other = engines(stage, counted, groups, model={"num_layers": 4}, parallel=parallel)
    Gpu(free[groups.rank]).of(counted, other)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        same = all(step_of(host, "plain", step) == step_of(other, "plain", step) for step in range(4))
    same = same and torch.equal(weights_of(host), weights_of(other))
    return same, [str(w.message) for w in said if "micro-step" in str(w.message)], counted.recorded, counted.replayed


LACKING = "the host launches each micro-step from now on: recordings need {} GiB for micro-steps, and {} GiB are free"


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_that_lack_memory_go_on_by_the_host(stage: int) -> None:
    """Recordings keep what a micro-step needs, 4 GiB, beside as much for the host's. What the allocator has reserved
    and does not use is free for both."""
    assert (
        run_distributed(short_of_memory, 2, [1.9] * 2, stage, 1) == [(True, [LACKING.format("8.0", "7.9")], 0, 0)] * 2
    )
    assert run_distributed(short_of_memory, 2, [2.0] * 2, stage, 1) == [(True, [], 1, 9)] * 2


def test_a_stage_may_lack_memory_for_another_slot() -> None:
    """The first slot of the first stage takes 6 GiB, a pass each way 3. The second slot would take as much, beside the
    host's 4 GiB. The last stage has one slot."""
    lacks, replays = run_distributed(short_of_memory, 2, [15.9, 2.0], 1, 2)
    assert lacks[:2] == (True, [LACKING.format("10.0", "9.9")]) and lacks[2] == 2
    assert replays == (True, [], 2, 18)


# -- auto --------------------------------------------------------------------------------------------------------------


def timed(replay: list[float], count: int, stage: int = 1, stages: int = 1, ep: int = 1, top: int = 2) -> list[Any]:
    """Take steps of `count` micro-steps, of which the host takes 2 seconds for each and a replay takes these, by rank.
    Return what this rank chose, by which step. A pipeline has a recording of each of two passes. Ranks that have
    experts between them have room for all rows."""
    groups, counted, clock = tiny.join(1, pp_size=stages, ep_size=ep), Counted(), [0.0]
    replay_times.time = SimpleNamespace(perf_counter=lambda: clock[0])
    passes = min(2, stages)

    def record(function: Any) -> Any:
        recording, seconds = counted(function), iter([60.0])  # The first replay is not timed.

        def again() -> None:
            clock[0] += next(seconds, replay[groups.rank] / passes)
            recording.replay()

        return SimpleNamespace(replay=again)

    recorder.recorder = lambda device: record
    host, auto = (
        tiny.engine(
            tiny.config(
                stage,
                "bf16",
                model={"num_layers": 4} | ({"experts": EXPERTS | {"per_token": top}} if ep > 1 else {}),
                training={"cuda_graphs": how},
                parallel={"pipeline_parallel_size": stages, "expert_parallel_size": ep, "expert_room": float(ep)},
            ),
            groups,
        )
        for how in ("off", "auto")
    )
    of, name = (auto._traversal, "_launch") if stages == 1 else (replayed_stage.StageStep, "forward")
    launch, launched = getattr(of, name), [0]

    def slow(*parts: Any) -> Any:
        launched[0] += 1
        known = launched[0] > 2 if stages > 1 else parts[0].passes >= 2
        clock[0] += 2.0 if known else 90.0  # Kernels are compiled at first.
        return launch(*parts)

    rows = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(6 * passes):
            numbers = [step_of(host, "plain", step, count)]
            setattr(of, name, slow)
            numbers.append(step_of(auto, "plain", step, count))
            setattr(of, name, launch)
            assert numbers[0] == numbers[1] and torch.equal(weights_of(host), weights_of(auto))
            rows.append((counted.recorded, counted.replayed))
    messages = [str(w.message) for w in said if "micro-step" in str(w.message)]
    return [rows, messages, getattr(auto._traversal, "slots", auto._traversal).recorder.timing]


SLOWER = "the host launches each micro-step from now on: a replay takes 2050.00 ms, and the host's launches 2000.00 ms"


def test_auto_keeps_the_faster_way() -> None:
    """Micro-steps are timed both ways in the first steps, three each, and the slowest rank counts. A step of one
    micro-batch is the case in which the host has to be timed on purpose."""
    rows, said, timing = run_distributed(timed, 1, [2.03], 6)[0]
    assert rows[1:3] == [(1, 6), (1, 12)] and rows[-1] == (1, 30) and not said and not timing
    rows, said, timing = run_distributed(timed, 1, [2.05], 6)[0]
    assert rows == [(0, 0), (1, 6), *[(1, 6)] * 4] and not timing
    assert said == [SLOWER]
    rows, said, timing = run_distributed(timed, 1, [2.0], 1)[0]
    assert rows == [*[(0, 0)] * 5, (1, 1)] and not said and timing
    # The last micro-step of a step, which reduces, is another program and is timed as well.
    for rows, said, timing in run_distributed(timed, 2, [0.5, 2.05], 6):
        assert rows[1] == (1, 5) and rows[-1] == (1, 5) and len(said) == 1 and not timing


@pytest.mark.parametrize("stage", [2, 3])
def test_auto_times_micro_steps_that_reduce(stage: int) -> None:
    """Every micro-step is one program at ZeRO 2 and 3, the last one of a step as well."""
    for rows, said, timing in run_distributed(timed, 2, [0.5, 2.03], 6, stage):
        assert rows[1:3] == [(1, 6), (1, 12)] and rows[-1] == (1, 30) and not said and not timing
    for rows, said, timing in run_distributed(timed, 2, [0.5, 2.05], 6, stage):
        assert rows == [(0, 0), (1, 6), *[(1, 6)] * 4] and said == [SLOWER] and not timing


@pytest.mark.parametrize("top", [2, 1])
def test_auto_times_ranks_that_have_experts_between_them(top: int) -> None:
    """They wait for each other in every micro-step, whether they gather tokens or send rows. The last one of a step
    reduces, and is another program."""
    for rows, said, timing in run_distributed(timed, 2, [0.5, 2.03], 6, 1, 1, 2, top):
        assert rows[1:3] == [(1, 5), (2, 11)] and rows[-1] == (2, 29) and not said and not timing


def test_auto_times_steps_of_a_pipeline() -> None:
    """Three steps by the host come first, the next one records, and three steps by replays come behind it. The step
    after them begins with the choice."""
    for stage, (rows, said, timing) in enumerate(run_distributed(timed, 2, [0.5, 2.03], 4, 1, 2)):
        slots = 2 - stage
        assert rows[:6] == [*[(0, 0)] * 4, (2 * slots, 8), (2 * slots, 16)]
        assert rows[-1] == (2 * slots, 64) and not said and not timing
    for stage, (rows, said, timing) in enumerate(run_distributed(timed, 2, [0.5, 2.05], 4, 1, 2)):
        assert rows[7:] == [(2 * (2 - stage), 32)] * 5 and not timing
        assert said == [SLOWER]


def own_loss() -> str:
    """Return who launches the micro-steps of a stage, with a loss of one's own."""
    groups, recorder.recorder = tiny.join(1, pp_size=2), lambda device: Counted().pool()
    cfg = tiny.config(1, training={"cuda_graphs": "auto"}, parallel={"pipeline_parallel_size": 2})
    model = tiny.model(cfg, groups, loss=lambda logits, labels: logits.float().sum(-1))
    return build_engine(cfg, model).settings["micro_steps"]


def test_all_stages_know_of_a_loss_of_ones_own() -> None:
    """Stages choose together, and the last one alone has the loss."""
    why = "launched by the host: a loss of your own may change from one micro-step to the next"
    assert run_distributed(own_loss, 2) == [why] * 2


@pytest.mark.parametrize(("key", "value", "why", "fix"), [
    ("engine", "deepspeed", "hooks of DeepSpeed run in every micro-step", "use fsdp"),
    ("offload", "optimizer", "gradients leave the GPU", "use none"),
])  # fmt: skip
def test_settings_that_keep_micro_steps_by_the_host(key: str, value: Any, why: str, fix: str) -> None:
    cfg = tiny.config(1, "bf16", parallel={key: value}, training={"cuda_graphs": "on"})
    layout = Layout.of(cfg)
    (finding,) = (found for found in findings(cfg, layout) if found.key == "training.cuda_graphs")
    assert finding.message == f"micro-steps cannot be CUDA graphs: parallel.{key} is {value}, where {why}"
    assert finding.fix == f"{fix}, or set cuda_graphs: auto"
    assert not layout.recorded
    assert Layout.of(tiny.config(1)).recorded


def test_layouts_that_auto_records() -> None:
    """`on` alone records a single replica at ZeRO 3, which would keep its blocks in 16 bits beside the masters."""
    for how in ("auto", "on"):
        training, asked = {"cuda_graphs": how}, how == "on"
        for stage in (2, 3):
            cfg = tiny.config(stage, "bf16", training=training)
            for ranks, recorded in ((2, True), (1, asked or stage == 2)):
                layout = Layout.of(cfg, ranks)
                assert (layout.recorded, layout.hooks == "never") == (recorded, recorded)
                assert not any(found.key == "training.cuda_graphs" for found in findings(cfg, layout))
            among = {"model": {"experts": EXPERTS}, "parallel": {"expert_parallel_size": 2}}
            for sections in ({"parallel": {"shard_size": 1}}, among, *[{"model": {"experts": EXPERTS}}] * (stage > 2)):
                kept = Layout.of(tiny.config(stage, "bf16", training=training, **sections), 2)
                assert not kept.recorded and kept.hooks == "every micro-step"
        for parallel in ({}, {"expert_parallel_size": 2}):
            cfg = tiny.config(1, "bf16", training=training, model={"experts": EXPERTS}, parallel=parallel)
            layout = Layout.of(cfg, 2)
            assert (layout.recorded, layout.hooks) == (True, "never"), parallel
            assert not any(found.key == "training.cuda_graphs" for found in findings(cfg, layout))
        for ranks, top in ((4, 2), (2, 1)):
            model, parallel = {"experts": EXPERTS | {"per_token": top}}, {"expert_parallel_size": ranks}
            layout = Layout.of(tiny.config(1, "bf16", training=training, model=model, parallel=parallel), ranks)
            assert layout.recorded and layout.not_recorded is None, (ranks, top)
        for parallel in ({"context_parallel_size": 4}, {"pipeline_parallel_size": 2}):
            layout = Layout.of(tiny.config(1, "bf16", parallel=parallel, training=training))
            assert layout.recorded and layout.not_recorded is None
