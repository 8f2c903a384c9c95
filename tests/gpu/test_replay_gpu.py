"""A GPU computes a micro-batch twice with the same bits, compiled and beside CUDA graphs, and one flipped bit is
found."""

import os
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import tiny
from distributed import run_distributed
from on_gpu import needs_gpu, over_nccl, world_of_one  # noqa: F401
from sagetrain.data.batch import Batch
from sagetrain.engines.build_engine import build_engine
from sagetrain.engines.protocol import Observers
from sagetrain.model.compile import compile_blocks
from sagetrain.model.selection import matmuls_of
from sagetrain.parallel.topology import ParallelGroups, Topology
from sagetrain.stability.replica_check import METRIC, ReplicaCheck
from sagetrain.stability.spikes import Verdict

pytestmark = needs_gpu()
LENGTH, VOCAB, STEPS = 512, 512, 20
SHAPE = {
    "num_layers": 2,
    "hidden_size": 512,
    "ffn_hidden_size": 1024,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "value_embeddings": True,
}
CASES = {
    "bf16": ("bf16", {"backend": "sage", "recipe": "fine"}),
    "INT8": ("int8", {"backend": "sage", "recipe": "scores"}),
    "FP8": ("fp8", {"backend": "sage", "recipe": "fine"}),
}


def _alarms(case: str, compiled: bool) -> tuple[list[int], list[int]]:
    """Return the steps of a run that were refused, and those that are refused when a bit of a gradient flips."""
    device, rank, ranks = over_nccl(), dist.get_rank(), dist.get_world_size()
    groups, (linear, attention) = ParallelGroups.create(Topology(ranks, 1)), CASES[case]
    sections = {"linear": {"precision": linear}, "attention": attention, "model": SHAPE, "data": {"seq_length": LENGTH}}
    cfg = tiny.config(1, "bf16", tokens_per_step={"tokens": 4 * ranks * LENGTH}, **sections)
    matmuls, _ = matmuls_of(cfg.linear, cfg.model, tensor_parallel_size=1, device=device, dtype=torch.bfloat16)
    model = tiny.model(cfg, groups, device=device, vocab_size=VOCAB, matmuls=matmuls)
    if compiled:
        compile_blocks(model, hooks=True)
    engine = build_engine(cfg, model)
    leaves, alarms, step = engine.leaves(), list[int](), 0
    replay = ReplicaCheck(model, leaves, [f"GPU {rank}" for rank in range(ranks)], rank)

    def batch(micro_step: int, rank: int) -> Batch:
        draw = torch.Generator().manual_seed(100 * step + 10 * micro_step + rank)
        tokens = torch.randint(0, VOCAB, (1, LENGTH + 1), generator=draw)
        return Batch(tokens[:, :-1], tokens[:, 1:], None, None, None, [])

    def judge(metrics: object) -> Verdict:
        alarms.extend([step] if replay.compare(groups.metrics.vectors[METRIC]).pairs else [])
        return Verdict()

    def take(compared: bool) -> None:
        watched = Observers(replay=replay.begin(lambda rank: batch(3, rank), None), judge=judge)
        engine.step([batch(each, rank) for each in range(4)], 4, 1e-3, watched if compared else Observers())

    for step in range(STEPS):
        take(compared=step % 4 != 1)  # The other steps record graphs.
    undisturbed, calls = alarms.copy(), list[int]()

    def flipped(gradient: torch.Tensor) -> torch.Tensor:
        calls.append(step)
        gradient = gradient.clone()
        gradient.view(-1).view(torch.int16)[12_345] ^= int(len(calls) == 4)  # of the last micro-batch
        return gradient

    hook = leaves["blocks.1.mlp.down.weight"].register_hook(flipped) if rank == 0 else None
    for step in range(STEPS, STEPS + 3):  # noqa: B007
        take(compared=True)
    if hook:
        hook.remove()
    return undisturbed, alarms


@pytest.mark.usefixtures("world_of_one")
def test_a_micro_batch_has_the_same_bits_twice() -> None:
    assert _alarms("INT8", compiled=False) == ([], [STEPS])


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_compiled_blocks_have_them_too(case: str, ranks: int) -> None:
    if ranks > torch.cuda.device_count():
        pytest.skip(f"needs {ranks} GPUs")
    with patch.dict(os.environ, CUBLAS_WORKSPACE_CONFIG=":4096:8"):
        assert run_distributed(_alarms, ranks, case, True) == [([], [STEPS])] * ranks
