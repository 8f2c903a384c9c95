"""Micro-steps that CUDA graphs replay have the bits of those that the host launches."""

import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import tiny
from distributed import run_distributed
from on_gpu import needs_gpu, over_nccl, world_of_one  # noqa: F401
from sagetrain.data.batch import Sample, batch_of
from sagetrain.engines.build_engine import build_engine
from sagetrain.engines.protocol import Observers
from sagetrain.engines.replay_times import replays_stay
from sagetrain.model.compile import compile_blocks
from sagetrain.model.selection import matmuls_of
from sagetrain.parallel.topology import ParallelGroups, Topology
from sagetrain.stability.noise_scale import GradientNoise

pytestmark = needs_gpu()
LENGTH, VOCAB = 512, 512
SHAPE = {
    "num_layers": 4,
    "hidden_size": 512,
    "ffn_hidden_size": 1024,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "value_embeddings": True,
}
CASES = {
    "bf16, sdpa": ("bf16", {"backend": "sdpa"}, "none"),
    "INT8, scores": ("int8", {"backend": "sage", "recipe": "scores"}, "none"),
    "FP8, fine, recomputed": ("fp8", {"backend": "sage", "recipe": "fine"}, "full"),
    "INT8, experts": ("int8", {"backend": "sage", "recipe": "scores"}, "none"),
}
AMONG_RANKS = {
    "INT8, experts between ranks": ("int8", {"backend": "sage", "recipe": "scores"}, "none"),
    "bf16, experts between ranks, by rows": ("bf16", {"backend": "sdpa"}, "none"),
}
"""Two ranks gather tokens, or send rows by an all-to-all where a token has one expert."""
UNDER_WAY = {(1, 0): (2, 0), (1, 1): (0, 1), (2, 0): (5, 0), (2, 1): (3, 1)}
"""The passes of four micro-batches that two stages have under way at once, in all chunks but the model's last one, and
in the last one. The key is the number of chunks of a stage, and the stage."""
EXPERTS = {"number": 8, "per_token": 2, "ffn_size": 256, "balance": {"bias_rate": 0.01}}


def _steps(
    case: str,
    compiled: bool,
    graphs: str,
    groups: ParallelGroups,
    device: torch.device,
    stage: int = 1,
    chunks: int = 1,
) -> tuple[list[Any], torch.Tensor, Any]:
    """Take six steps of four masked micro-batches with documents, which become more on the way. The noise of the last
    step is measured. Where ranks have experts between them, rows need more room in the second step, so that two more
    steps are taken in which everything can be recorded again. What routers choose by themselves never needs it."""
    linear, attention, again = (CASES | AMONG_RANKS)[case]
    steps = 6 if groups.ep_size == 1 else 8
    head = "fp8" if linear == "fp8" else "bf16"
    training = {"cuda_graphs": graphs, "activation_checkpointing": again}
    tp = groups.tp_size
    shape = SHAPE | ({"num_key_value_heads": 1} if groups.cp_size > 1 else {})  # Context ranks have copies of it.
    experts = EXPERTS | ({"per_token": 1} if "by rows" in case else {})
    shape = shape | ({"experts": experts} if "experts" in case else {})
    shape = shape | ({"num_layers": 4} if groups.pp_size > 1 else {})
    sections = {"attention": attention, "model": shape, "data": {"seq_length": LENGTH}}
    sections["linear"] = {"precision": linear, "head": head}
    sections["parallel"] = {"tensor_parallel_size": tp, "sequence_parallel": tp > 1, "tensor_parallel_overlap": "on",
                            "context_parallel_size": groups.cp_size, "pipeline_parallel_size": groups.pp_size,
                            "pipeline_chunks": chunks, "expert_parallel_size": groups.ep_size,
                            "expert_room": 1.98}  # fmt: skip
    cfg = tiny.config(stage, "bf16", training=training, tokens_per_step={"tokens": 8 * LENGTH}, **sections)
    matmuls, _ = matmuls_of(cfg.linear, cfg.model, tensor_parallel_size=tp, device=device, dtype=torch.bfloat16)
    model = tiny.model(cfg, groups, device=device, vocab_size=VOCAB, matmuls=matmuls)
    if compiled:
        compile_blocks(model, hooks=True)
    engine: Any = build_engine(tiny.on(cfg, groups), model)
    noise = GradientNoise(engine.leaves(), model.every_spec.values(), groups, device)
    numbers = []
    for step in range(steps):
        if groups.ep_size > 1 and step in (1, 2):
            tiny.crowd(engine, 4 if step == 1 else 0)
        draw, batches = torch.Generator().manual_seed(10 * step + groups.dp_rank), []
        for _ in range(4):
            tokens = torch.randint(0, VOCAB, (LENGTH + 1,), generator=draw).numpy()
            starts = sorted({int(place) for place in torch.randint(1, LENGTH, (3 + 20 * (step > 2),), generator=draw)})
            counted = torch.rand(LENGTH, generator=draw).numpy() < 0.7
            batches.append(batch_of([Sample(tokens, starts, 0, counted)], True, True))
        result = tiny.taken(engine, batches, 1e-3, Observers(noise=noise if step == steps - 1 else None), 4000)
        shown = {name: value for name, value in result.metrics.items() if name.startswith(("train", "noise", "perf"))}
        numbers.append(shown | {"room": engine.room.times if engine.room else 0.0})
    return numbers, torch.cat([owned.read("weight").flatten().cpu() for owned in engine.owned()]), engine._traversal


def _apart(host: tuple[list[Any], torch.Tensor], replayed: tuple[list[Any], torch.Tensor]) -> str:
    """Say which numbers and weights differ, if any do."""
    said = [
        f"step {number}, {name}: {one.get(name)} and {other.get(name)}"
        for number, (one, other) in enumerate(zip(host[0], replayed[0], strict=True))
        for name in one | other
        if one.get(name) != other.get(name)
    ]
    weights, again = host[1], replayed[1]
    if not torch.equal(weights, again):
        many, most = int((weights != again).sum()), float((weights - again).abs().max())
        said.append(f"{many} of {len(weights)} weights, by up to {most}")
    return "; ".join(said)


def _bits(
    cases: list[str], compiled: bool, tp: int, cp: int, gather: int, stage: int, ep: int = 1
) -> dict[str, bool | str]:
    torch.use_deterministic_algorithms(True)
    device, ranks = over_nccl(), dist.get_world_size()
    groups, found = ParallelGroups.create(Topology(ranks, tp, cp, 1, ep, gather)), {}
    for case in cases:
        (steps, weights, _), (others, again, replayed) = (
            _steps(case, compiled, how, groups, device, stage) for how in ("off", "on")
        )
        said, rooms = [replayed.recorder.refusal], [step["room"] for step in others]
        recorded = {program.last for program in replayed._programs if program.recording}
        if recorded != ({False, True} if groups.num_replicas > 1 and stage < 2 else {False}):
            said.append(f"recorded of the last micro-batch and of others: {recorded}")
        if ep > 1 and rooms[0] == rooms[1]:
            said.append(f"the room of the steps did not grow in the second one: {rooms}")
        apart = _apart((steps, weights), (others, again))
        wrong = "; ".join(filter(None, [apart, *said]))
        found[case] = f"bits {'differ' if apart else 'are the same'}; {wrong}" if wrong else True
        if not compiled:
            found["auto"] = _auto(case, groups, device, steps, weights)
    return found


def _bits_of_pipelines(cases: list[str], chunks: int) -> dict[str, bool | str]:
    """Return whether two stages have the host's bits, and as many slots as micro-batches are under way at once."""
    torch.use_deterministic_algorithms(True)
    device, found = over_nccl(), {}
    groups = ParallelGroups.create(Topology(2, 1, 1, 2))
    for case in cases:
        (steps, weights, _), (others, again, replayed) = (
            _steps(case, True, how, groups, device, 1, chunks) for how in ("off", "on")
        )
        recorded = tuple(map(len, replayed.slots._free.values()))
        found[case] = replayed.slots.recorder.refusal or _apart((steps, weights), (others, again)) or True
        if recorded != UNDER_WAY[chunks, groups.pp_rank]:
            found[case] = f"{found[case]}, slots: {recorded}"
    return found


def _auto(
    case: str, groups: ParallelGroups, device: torch.device, steps: list[Any], weights: torch.Tensor
) -> bool | str:
    """Return whether `auto` has the bits of the host, and the way that its own times say is the faster one."""
    found, own, chosen = _steps(case, False, "auto", groups, device)
    times = [[step.pop(name) for name in list(step) if name.startswith("perf")] for step in found]
    (seconds,) = (each for each in times if each)
    stays = replays_stay(*seconds)
    right = stays != bool(chosen.recorder.refusal) and min(seconds) > 0 and max(seconds) < 1
    same = found == steps and torch.equal(own, weights)
    return (same and right) or f"{seconds}: {chosen.recorder.refusal}, {found}, {steps}"


@pytest.mark.usefixtures("world_of_one")
def test_replays_have_the_bits_of_the_host() -> None:
    """`auto` has them too, and keeps the faster way."""
    case = "bf16, sdpa"
    assert _bits([case], False, 1, 1, 1, 1) == {case: True, "auto": True}


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "tp", "cp", "gather", "stage"),
    [
        (1, 1, 1, 1, 1),
        (2, 1, 1, 1, 1),
        (2, 2, 1, 1, 1),
        (2, 1, 2, 1, 1),
        (2, 1, 2, 2, 1),
        (2, 1, 1, 1, 2),
        (2, 1, 1, 1, 3),
    ],
)
def test_replays_of_compiled_blocks_have_them_too(ranks: int, tp: int, cp: int, gather: int, stage: int) -> None:
    if ranks > torch.cuda.device_count():
        pytest.skip(f"needs {ranks} GPUs")
    # At ZeRO 3 hooks gather experts.
    cases = [case for case in CASES if stage < 3 or "experts" not in case]
    with patch.dict(os.environ, CUBLAS_WORKSPACE_CONFIG=":4096:8"):
        for found in run_distributed(_bits, ranks, cases, True, tp, cp, gather, stage):
            assert found == dict.fromkeys(cases, True)


@pytest.mark.long
@pytest.mark.parametrize("chunks", [1, 2])
def test_replays_of_pipeline_stages_have_them_too(chunks: int) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    with patch.dict(os.environ, CUBLAS_WORKSPACE_CONFIG=":4096:8"):
        for found in run_distributed(_bits_of_pipelines, 2, list(CASES), chunks):
            assert found == dict.fromkeys(CASES, True)


@pytest.mark.long
@pytest.mark.parametrize("case", list(AMONG_RANKS))
def test_replays_of_ranks_with_experts_have_them_too(case: str) -> None:
    """The room of these ranks grows between the recordings, which are made again."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    with patch.dict(os.environ, CUBLAS_WORKSPACE_CONFIG=":4096:8"):
        for found in run_distributed(_bits, 2, [case], True, 1, 1, 1, 1, 2):
            assert found == {case: True}
