"""Micro-steps can be recorded once and replayed: their program holds no number that changes, and their memory stays."""

import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

import tiny
from distributed import run_distributed
from fake_graph import Counted, FakeGraph, copy_between, differences
from replayed_steps import EXPERTS, engines, micro_batches, step_of, weights_of
from sagekernels.autograd import DOCUMENT_BOUNDS
from sagetrain.engines.fsdp import FsdpEngine
from sagetrain.engines.protocol import Observers
from sagetrain.model import backends
from sagetrain.parallel.orders import order_of
from sagetrain.stability.noise_scale import GradientNoise
from sagetrain.stability.spikes import Verdict

WIDE = {"hidden_size": 64, "ffn_hidden_size": 128}
DELTA = {"key_heads": 1, "value_heads": 2, "key_dim": 16, "value_dim": 16, "pattern": "DF"}
SAGE = {"backend": "sage", "recipe": "scores"}


def recording_of(engine: FsdpEngine, kind: str, step: int, count: int, divisor: float | None) -> FakeGraph:
    """Record a micro-step of a step of `count` micro-batches, behind one that is not recorded."""
    engine._prepare(count, 1e-2)
    batch = next(micro_batches(kind, step, count))
    batch.divisor = divisor if kind == "mask" else None
    inputs = engine.inputs(batch)

    def micro_step() -> None:
        engine._traversal.add(engine.run(inputs), last=False)

    micro_step()
    return FakeGraph.of(micro_step)


def numbers(cases: list[tuple[str, int, str]]) -> list[str]:
    backends.document_bounds = DOCUMENT_BOUNDS  # The check of values is for CPUs alone.
    groups, found = tiny.join(1), []
    for kind, stage, linear in cases:
        engine: Any = tiny.engine(tiny.config(stage, "bf16", linear={"precision": linear}, model=WIDE), groups)
        one, other = (recording_of(engine, kind, *how) for how in ((0, 6, 9.0), (1, 8, 11.0)))
        found += [f"{kind}, {linear}: {line}" for line in differences(one, other)]
        found += [f"{kind}, {linear}: a constant at {line}" for line in one.constants]
    return found


def test_a_micro_step_holds_no_number_that_changes() -> None:
    """Micro-batches, their number in a step, documents and counted tokens are tensors, so one recording serves all."""
    cases = [("plain", 0, "bf16"), ("documents", 1, "int8"), ("mask", 0, "bf16"), ("mask", 1, "int8")]
    assert run_distributed(numbers, 1, cases)[0] == []


# -- replays -----------------------------------------------------------------------------------------------------------

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "16 bits": ("plain", {}),
    "INT8 layers": ("documents", {"linear": {"precision": "int8"}, "model": WIDE | {"value_embeddings": True}}),
    "sage": ("plain", {"attention": SAGE}),
    "sage, documents": ("documents", {"attention": SAGE, "model": {"num_key_value_heads": 1}}),
    "sdpa, documents, recomputed": ("documents", {"training": {"activation_checkpointing": "full"}}),
    "selective": ("plain", {"training": {"activation_checkpointing": "selective"}}),
    "loss mask, tied": ("mask", {"model": {"tie_embeddings": True, "value_embeddings": True}}),
    "fp32, sinks": (
        "mask",
        {"training": {"dtype": "fp32"}, "attention": {"backend": "reference"}, "model": {"sinks": True}},
    ),
    "experts": ("mask", {"model": {"experts": EXPERTS}, "linear": {"precision": "int8"}}),
    "gated delta nets": ("documents", {"model": {"delta_net": DELTA}, "linear": {"precision": "int8"}}),
}
# Biases move slowly, so that rows have room until they are told to need more.
SLOW = EXPERTS | {"balance": {"z_weight": 0.01, "bias_rate": 0.001}}
CASES["experts, slow"] = "mask", {"model": {"experts": SLOW}, "linear": {"precision": "int8"}}

ONE_HEAD = {"num_attention_heads": 1}
GATHERED: dict[str, tuple[str, dict[str, Any]]] = {
    "gathered": ("plain", {"model": ONE_HEAD}),
    "gathered, documents": ("documents", {"attention": SAGE, "model": ONE_HEAD}),
    "gathered, mask, recomputed": ("mask", {"model": ONE_HEAD, "training": {"activation_checkpointing": "full"}}),
}
CASES |= GATHERED
UNEVEN = {"ffn_hidden_size": 45}
CASES["uneven, selective"] = "mask", {"model": UNEVEN, "training": {"activation_checkpointing": "selective"}}


def run_cases(
    stage: int, names: list[str], tp: int = 1, cp: int = 1, gather: int = 1, by_copies: bool = False, ep: int = 1
) -> dict[str, Any]:
    """Take three steps by the host, and by replays. Where ranks have experts between them, take three more, in the
    first of which their rows need more room, and evaluate before the last one. Return what differs, and how many
    recordings and replays there were.

    Args:
        by_copies: ranks copy from and to each other's memory.
    """
    backends.document_bounds = DOCUMENT_BOUNDS  # The check of values is for CPUs alone.
    groups, found = tiny.join(tp, cp, ep_size=ep, gather=gather), {}
    if by_copies:
        copy_between(groups.replica_group)
    halves = {"tensor_parallel_size": tp, "sequence_parallel": tp > 1, "tensor_parallel_overlap": "on"}
    halves |= {"context_parallel_size": cp, "expert_parallel_size": ep, "expert_room": 1.8}
    for name in names:
        (kind, sections), counted = CASES[name], Counted()
        if stage == 3:  # Two blocks at a time are whole.
            sections = {**sections, "model": {"num_layers": 4, **sections.get("model", {})}}
        both = []
        for engine in engines(stage, counted, groups, **sections, parallel=halves):
            steps = [step_of(engine, kind, step) for step in range(3)]
            if ep > 1:
                steps += [crowded(engine, kind, 3), step_of(engine, kind, 4)]
                tiny.evaluation(engine, ["web"])
                steps += [step_of(engine, kind, 5)]
            both.append((steps, weights_of(engine)))
        (steps, weights), (others, again) = both
        same = steps == others and torch.equal(weights, again)
        found[name] = same or (steps, others), counted.recorded, counted.replayed
    return found


def crowded(engine: Any, kind: str, step: int) -> tuple[Any, ...]:
    """Take a step whose tokens choose so few experts that their rows need more room than there was."""
    before = engine.room.times
    tiny.crowd(engine, EXPERTS["per_token"])
    numbers = step_of(engine, kind, step)
    assert engine.room.times > before
    tiny.crowd(engine, 0)
    return numbers


def test_replays_take_the_steps_of_the_host_bit_for_bit() -> None:
    """The second step records, as the first one allocates. A single replica replays every micro-step from then on."""
    for stage in (0, 1):  # A single replica has the same memory at both.
        names = [name for name in CASES if name not in (*GATHERED, "experts, slow")][stage::2]
        assert run_distributed(run_cases, 1, stage, names)[0] == dict.fromkeys(names, (True, 1, 6))


def test_replicas_reduce_in_a_recording_of_the_last_micro_step() -> None:
    """The last micro-step of the second step is the second one of its kind, and is not recorded yet."""
    for stage, names in ((0, ["INT8 layers"]), (1, ["INT8 layers", "loss mask, tied", "experts"])):
        for found in run_distributed(run_cases, 2, stage, names):
            assert set(found.values()) == {(True, 2, 5)}


@pytest.mark.parametrize(("ranks", "tp", "ep", "made"), [
    (2, 1, 2, (4, 13)),
    (2, 2, 2, (2, 16)),
    (4, 2, 2, (4, 13)),
    (4, 1, 4, (4, 13)),
])  # fmt: skip
def test_ranks_with_experts_replay_in_a_room_that_grows(ranks: int, tp: int, ep: int, made: tuple[int, int]) -> None:
    """Recordings of the smaller room replay the step that lacks it, and are never replayed again. Two ranks gather
    tokens, and four send rows by an all-to-all."""
    for found in run_distributed(run_cases, ranks, 1, ["experts, slow"], tp, 1, 1, False, ep):
        assert found == {"experts, slow": (True, *made)}


def test_replicas_reduce_in_every_recorded_micro_step_at_zero_2() -> None:
    """All micro-steps are one program, whose means are added up. The host's way is through the hooks of FSDP2. Gloo
    adds up four ranks in an order that depends on the place in what is packed."""
    for ranks, names in ((2, ["INT8 layers", "loss mask, tied", "experts"]), (4, ["fp32, sinks"])):
        for found in run_distributed(run_cases, ranks, 2, names):
            assert set(found.values()) == {(True, 1, 6)}, found


@pytest.mark.parametrize(("ranks", "tp", "cp", "names"), [
    (1, 1, 1, ["uneven, selective"]),
    (2, 1, 1, ["INT8 layers", "loss mask, tied", "fp32, sinks", "sdpa, documents, recomputed"]),
    (4, 1, 1, ["uneven, selective"]),
    (4, 2, 1, ["INT8 layers"]),
    (4, 1, 2, ["sage, documents"]),
])  # fmt: skip
def test_weights_come_and_go_in_recorded_micro_steps_at_zero_3(ranks: int, tp: int, cp: int, names: list[str]) -> None:
    """The host's way is through the hooks of FSDP2 where there is a single replica."""
    for found in run_distributed(run_cases, ranks, 3, names, tp, cp):
        assert set(found.values()) == {(True, 1, 6)}, found


@pytest.mark.parametrize("ranks", [2, 4])
def test_blocks_are_copied_between_ranks_in_recordings(ranks: int) -> None:
    """A recording waits for its own copies alone, and for all of them. In the second case blocks differ in size."""
    for found in run_distributed(run_cases, ranks, 3, ["uneven, selective", "loss mask, tied"], 1, 1, 1, True):
        assert set(found.values()) == {(True, 1, 6)}, found


def test_tensor_parallel_ranks_replay_their_collectives() -> None:
    for found in run_distributed(run_cases, 2, 1, ["INT8 layers", "experts"], 2):
        assert set(found.values()) == {(True, 1, 6)}


def test_context_parallel_ranks_replay_their_collectives() -> None:
    """The first case has a key head of which both ranks have a copy."""
    for found in run_distributed(run_cases, 2, 1, ["sage, documents", "loss mask, tied"], 1, 2):
        assert set(found.values()) == {(True, 2, 5)}


def test_ranks_that_gather_keys_replay_their_collectives() -> None:
    """The only query head is on both ranks, whose keys the other one gathers. They have chunks of each sequence."""
    for found in run_distributed(run_cases, 2, 1, list(GATHERED), 1, 2, 2):
        assert set(found.values()) == {(True, 2, 5)}


# -- pipelines ---------------------------------------------------------------------------------------------------------

COUNTS = 5, 5, 7, 2, 3
"""The micro-batches of each step. The first one runs by the host, and its second half as later steps are recorded."""


def run_pipelines(
    names: list[str], stages: int, chunks: int = 1, tp: int = 1, stage: int = 1, ep: int = 1
) -> dict[str, tuple[Any, int, int]]:
    """Take steps by the host, and by replays, with an evaluation, a measured step and new state between them. Where
    ranks have experts between them, take one more, whose rows need more room. Return what differs, and how many pools
    and replays there were."""
    backends.document_bounds = DOCUMENT_BOUNDS  # The check of values is for CPUs alone.
    groups, found = tiny.join(tp, pp_size=stages, ep_size=ep), {}
    parallel = {"pipeline_parallel_size": stages, "pipeline_chunks": chunks, "tensor_parallel_size": tp}
    parallel |= {"sequence_parallel": tp > 1, "tensor_parallel_overlap": "on"}
    parallel |= {"expert_parallel_size": ep, "expert_room": 1.8}
    for name in names:
        (kind, sections), counted, both = CASES[name], Counted(), []
        shape = {"num_layers": stages * chunks + 1, **sections.get("model", {})}
        for engine in engines(stage, counted, groups, **{**sections, "model": shape}, parallel=parallel):
            steps = [step_of(engine, kind, step, count) for step, count in enumerate(COUNTS)]
            before = counted.recorded, counted.replayed
            noise = GradientNoise(engine.leaves(), engine.model.every_spec.values(), groups, engine.device)
            seen = Observers(noise=noise, layer_norms=True)
            steps.append((step_of(engine, kind, 5, 3, seen), tiny.evaluation(engine, ["web"])))
            assert before == (counted.recorded, counted.replayed)  # The host launches a measured step.
            engine.state_changed()
            steps.append(step_of(engine, kind, 6, 3))
            steps += [crowded(engine, kind, 7), step_of(engine, kind, 8)] if ep > 1 else []
            both.append((steps, weights_of(engine)))
        (steps, weights), (others, again) = both
        same = steps == others and torch.equal(weights, again)
        found[name] = same or (steps, others), counted.pools, counted.replayed
    return found


REPLAYED = sum(COUNTS[1:]) + 3
"""The micro-batches of `run_pipelines` that are replayed."""


def check_pipelines(
    found: list[dict[str, Any]], stages: int, chunks: int = 1, ranks: int = 1, replayed: int = REPLAYED
) -> None:
    """Check that every rank had the bits of the host, and no more slots than micro-batches are under way at once. The
    last chunk has slots of its own."""
    for rank, of_rank in enumerate(found):
        most, now, stage = Counter[bool](), Counter[bool](), rank // ranks
        for action in (action for count in COUNTS for action in order_of(stage, stages, chunks, count)):
            last = action.chunk == stages * chunks - 1
            now[last] += 1 if action.kind == "forward" else -1
            most[last] = max(most[last], now[last])
        for name, (same, pools, replays) in of_rank.items():
            assert same is True, (name, same)
            assert (pools, replays) == (1 + most.total(), 2 * chunks * replayed), (name, rank)


def test_stages_of_a_pipeline_replay_their_passes() -> None:
    """A slot has a recording of a forward pass and one of a backward pass, whose memory other slots do not touch."""
    names = ["16 bits", "INT8 layers", "sage, documents", "selective", "loss mask, tied", "experts"]
    check_pipelines(run_distributed(run_pipelines, 2, names, 2), 2)


def test_chunks_of_stages_replay_their_passes() -> None:
    names = ["INT8 layers", "sdpa, documents, recomputed", "loss mask, tied"]
    check_pipelines(run_distributed(run_pipelines, 2, names, 2, 2), 2, 2)


def test_four_stages_replay_their_passes() -> None:
    check_pipelines(run_distributed(run_pipelines, 4, ["INT8 layers", "fp32, sinks"], 4), 4)


def test_replicas_of_stages_and_tensor_parallel_stages_replay() -> None:
    """Replicas reduce behind the replays of a chunk's last pass."""
    check_pipelines(run_distributed(run_pipelines, 4, ["INT8 layers", "loss mask, tied"], 2, 2), 2, 2, 2)
    check_pipelines(run_distributed(run_pipelines, 4, ["INT8 layers", "loss mask, tied"], 2, 1, 2), 2, 1, 2)


def test_stages_with_experts_replay_in_a_room_that_grows() -> None:
    """The step that lacks room is replayed. It is taken again by the host, but for its last micro-batch, which is
    recorded anew."""
    check_pipelines(run_distributed(run_pipelines, 4, ["experts, slow"], 2, 1, 1, 1, 2), 2, 1, 2, REPLAYED + 3 + 1 + 3)


class Looking:
    """An observer of a micro-step that takes a batch through the models by itself."""

    def __init__(self, every: Sequence[Any]) -> None:
        self._every = every

    def passing(self, blocks: range, backward: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def end(self) -> None:
        for each in self._every:
            with torch.no_grad():
                each.forward(next(micro_batches("plain", 0, 1)))


def changes(stage: int) -> list[str]:
    """Compare both ways while what is computed changes between steps. Return the changes after which they differ."""
    groups, counted, found = tiny.join(1), Counted(), []
    shape = WIDE | ({"num_layers": 4} if stage == 3 else {})
    host, other = engines(stage, counted, groups, linear={"precision": "int8", "head": "int8"}, model=shape)
    every = host, other
    noise = {each: GradientNoise(each.leaves(), each.model.every_spec.values(), groups, each.device) for each in every}
    for each in every:
        step_of(each, "plain", 0)
    int8 = other.model.matmuls

    def check(change: str, *, new: int, replays: int, kind: str = "plain", step: int = 1, **how: Any) -> None:
        before = counted.recorded, counted.replayed
        noises = how.pop("noises", False)
        numbers = [
            step_of(each, kind, step, observers=Observers(noise=noise[each], **how) if noises else Observers(**how))
            if change != "fewer"
            else step_of(each, kind, step, 2)
            for each in every
        ]
        same = numbers[0] == numbers[1] and torch.equal(*map(weights_of, every))
        made = counted.recorded - before[0], counted.replayed - before[1]
        if not same or made != (new, replays):
            found.append(f"{change}: {same}, {made} {numbers}")

    def switch(matmuls: Any) -> None:
        for each in every:
            each.model.matmuls = matmuls
            each.weights_changed()

    check("first", new=1, replays=3)
    check("fewer", new=0, replays=2)
    check("noise", new=1, replays=1, noises=True)
    check("noise again", new=0, replays=3, noises=True, step=2)
    check("refused", new=0, replays=3, judge=lambda metrics: Verdict(apply=False))
    check("norms", new=0, replays=0, layer_norms=True)
    check("watched", new=0, replays=2, watch=lambda *shape: Looking(every))
    switch([{} for _ in int8])
    check("16 bits", new=1, replays=1)
    switch(int8)
    # The 8-bit weights of layers are elsewhere now. At ZeRO 3 there are none.
    check("8 bits again", new=int(stage < 3), replays=1 if stage < 3 else 3)
    check("documents", new=1, replays=1, kind="documents")
    check("whole sequences again", new=0, replays=3)
    held_out = [tiny.evaluation(each, ["web"]) for each in every]
    found += [f"evaluation: {held_out}"] * (held_out[0] != held_out[1])
    for each in every:
        each.state_changed()
    check("resumed", new=0, replays=3)
    handles = [each.model.blocks[0].mlp.register_forward_hook(lambda *_: None) for each in every]
    check("hooks of modules", new=0, replays=0)
    for handle in handles:
        handle.remove()
    torch.use_deterministic_algorithms(True)
    check("deterministic", new=1, replays=1)
    torch.use_deterministic_algorithms(False)
    return found


@pytest.mark.parametrize(("ranks", "stage"), [(1, 1), (2, 3)])
def test_what_is_computed_may_change_between_replays(ranks: int, stage: int) -> None:
    assert run_distributed(changes, ranks, stage) == [[]] * ranks


def reading(stage: int) -> tuple[bool, list[str], str]:
    """Record a micro-step in which the host reads a value behind the third of four blocks."""
    groups, counted = tiny.join(1), Counted()
    if stage == 3:
        copy_between(groups.replica_group)
    host, other = engines(stage, counted, groups, model={"num_layers": 4})
    block, answers = other.model.blocks[2], []
    forward = block.forward

    def reads(*args: Any) -> Any:
        made = forward(*args)
        answers.append(float(made[0].stream.detach().sum()))
        return made

    block.forward = reads
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        numbers = [[step_of(each, "plain", step) for step in range(3)] for each in (host, other)]
    same = numbers[0] == numbers[1] and torch.equal(weights_of(host), weights_of(other))
    return same, [str(w.message) for w in said if "micro-step" in str(w.message)], other._traversal.recorder.refusal


@pytest.mark.parametrize(("ranks", "stage"), [(1, 1), (2, 3)])
def test_what_cannot_be_recorded_goes_on_by_the_host(ranks: int, stage: int) -> None:
    for same, said, refusal in run_distributed(reading, ranks, stage):
        assert same
        assert len(said) == 1 and said[0].startswith("the host launches each micro-step from now on: HostRead: ")
        assert refusal in said[0]
