"""Steps of a tiny engine by the host and by replays on CPUs, with numbers that can be compared."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import tiny
from fake_graph import Counted
from sagetrain.data.batch import Batch, Sample, batch_of
from sagetrain.engines import recorder
from sagetrain.engines.protocol import Observers

LENGTH = tiny.SEQ
EXPERTS = {"number": 4, "per_token": 2, "ffn_size": 16, "shared": 1, "balance": {"z_weight": 0.01, "bias_rate": 0.1}}


def micro_batches(kind: str, step: int, count: int, rank: int = 0) -> Iterator[Batch]:
    """Yield micro-batches of one sequence: "plain", with "documents", or with a loss "mask" too."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    for _ in range(count):
        tokens = torch.randint(0, tiny.VOCAB, (LENGTH + 1,), generator=draw)
        starts = sorted({int(place) for place in torch.randint(1, LENGTH, (3,), generator=draw)})
        counted = torch.rand(LENGTH, generator=draw).numpy() < 0.7
        if kind == "plain":
            yield Batch(tokens[None, :-1], tokens[None, 1:], None, None, None, [])
        else:
            sample = Sample(tokens.numpy(), starts, 0, counted if kind == "mask" else None)
            yield batch_of([sample], document_attention=True, document_positions=True)


def step_of(engine: Any, kind: str, step: int, count: int = 3, observers: Observers | None = None) -> tuple[Any, ...]:
    """Take a step. Return its numbers."""
    groups = engine.groups
    batches = list(micro_batches(kind, step, count, groups.dp_rank))
    counted = None
    if kind == "mask":
        total = torch.tensor(float(sum(int((batch.labels >= 0).sum()) for batch in batches)))
        dist.all_reduce(total)
        counted = int(total)
    result = tiny.taken(engine, batches, 1e-2, observers or Observers(), counted)
    noise = {name: value for name, value in result.metrics.items() if name.startswith(("noise", "norms"))}
    return result.loss, result.grad_norm, result.span, noise


def weights_of(engine: Any) -> torch.Tensor:
    return torch.cat([owned.read("weight").flatten() for owned in engine.owned()])


def engines(stage: int, counted: Counted, groups: Any, **sections: Any) -> Iterator[Any]:
    """Yield an engine whose micro-steps the host launches, and one that replays them. The host's way at ZeRO 2 is
    through the hooks of FSDP2, as with copies of shards."""
    recorder.recorder = lambda device: counted.pool()
    for how in ("off", "on"):
        training = {**sections.get("training", {}), "cuda_graphs": how}
        dtype, parallel = training.pop("dtype", "bf16"), dict(sections.get("parallel", {}))
        if stage == 2 and how == "off":
            parallel["shard_size"] = groups.num_replicas
        yield tiny.engine(tiny.config(stage, dtype, **{**sections, "training": training, "parallel": parallel}), groups)
