"""The rows of a tensor that a rank shards, the mesh of ranks, and groups of parameters, as torch's FSDP2 takes them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from sagetrain.config.layout import Layout
from sagetrain.config.schema import RunConfig
from sagetrain.model.block import Block
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.layers import materialize
from sagetrain.parallel.topology import ParallelGroups


def rows_of(rows: int, shards: int, place: int) -> slice:
    """Return the rows of a tensor that the shard at `place` of `shards` has, as torch.chunk deals them out."""
    most = -(-rows // shards)
    return slice(min(place * most, rows), min((place + 1) * most, rows))


class Shard(NamedTuple):
    """This rank's rows of a parameter until the engine takes them, and the device that the model computes on."""

    rows: Tensor
    device: torch.device


def partitioner(cfg: RunConfig, groups: ParallelGroups) -> Callable[[nn.Parameter], None]:
    """Return the function that reduces a parameter, which has just got its values, to this rank's shard.

    The function is for Transformer(partition=...), and with it no rank ever holds the whole model in fp32. The
    parameter goes back to the meta device, in fp32. Its attribute `shard` is a `Shard`.
    """
    shards = Layout.of(cfg, groups.topology.world_size).shards
    kept = torch.float32 if cfg.optimizer.master == "fp32" else torch.bfloat16
    offloaded = cfg.parallel.offload != "none"

    def partition(parameter: Any) -> None:
        # The copy is made before the parameter gives its memory away. In its own dtype `to` alone would be a view.
        device, rows = parameter.device, rows_of(len(parameter), shards, groups.replica_rank % shards)
        own = parameter.detach()[rows].to("cpu" if offloaded else device, kept, copy=True)
        materialize(parameter, torch.empty(parameter.shape, dtype=kept, device="meta"))
        parameter.shard = Shard(own, device)

    return partition


def mesh_of(groups: ParallelGroups, shards: int, device: torch.device) -> tuple[DeviceMesh, dist.ProcessGroup | None]:
    """Return the mesh of the ranks that have the same tensor-parallel slice, and the group of the ranks that have
    copies of this rank's shards, or None; collective.

    Args:
        shards: the number of neighbours that shard the slice between them.
    """
    whole = groups.replica_group
    assert whole is not None, "an engine runs in a process group"
    if shards == groups.num_replicas:
        return DeviceMesh.from_group(whole, device.type, mesh_dim_names=("shard",)), None
    grid = torch.tensor(groups.topology.replica_ranks(groups.rank), dtype=torch.int).view(-1, shards)
    row, column = divmod(groups.replica_rank, shards)
    shard = groups.subgroup(grid[row].tolist(), "shards")
    copies = whole if shards == 1 else groups.subgroup(grid[:, column].tolist(), "copies of shards")
    names = "copy", "shard"
    return DeviceMesh.from_group([copies, shard], device.type, mesh=grid, mesh_dim_names=names), copies


def shard_model(model: Transformer, mesh: DeviceMesh, dtype: torch.dtype, reshard: bool, offloaded: bool) -> None:
    """Apply fully_shard to a model: a group of parameters for each block, and one for everything else and the gains."""
    how: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False),
        # Copies from and to pinned memory run beside kernels.
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offloaded else OffloadPolicy(),
    }
    blocks = [cast(Block, block) for block in model.blocks]
    norms = [norm for block in blocks for norm in block.norms]
    gains = {norm.gain for norm in norms}
    for block in blocks:
        fully_shard(block, ignored_params=gains, reshard_after_forward=reshard, **how)
    # fully_shard looks for parameters outside of the blocks, and finds the gains here.
    model.gains = nn.ModuleList(norms)
    fully_shard(model, reshard_after_forward=False, **how)
    del model.gains
    for chunk in model.chunks:
        own = [cast(Any, model.blocks.get_submodule(str(number))) for number in chunk.blocks]
        for block, following in itertools.pairwise(own):
            # Where the host launches hardly faster than the GPU computes, as in 8 bits, a gather would otherwise be
            # issued when its block is already waited for.
            block.set_modules_to_forward_prefetch([following])
