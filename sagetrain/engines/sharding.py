"""The rows of a tensor that a rank shards, and the groups of parameters with their ranks, as torch's FSDP2 takes
them."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from sagetrain.config.layout import Layout
from sagetrain.config.schema import RunConfig
from sagetrain.model.block import Block
from sagetrain.model.moe import MoE
from sagetrain.model.tensors import TensorSpec
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


def partitioner(cfg: RunConfig, groups: ParallelGroups) -> Callable[[TensorSpec, nn.Parameter], None]:
    """Return the function that reduces a parameter, which has just got its values, to this rank's shard.

    The function is for Transformer(partition=...), and with it no rank ever holds the whole model in fp32. The
    parameter goes back to the meta device, in fp32. Its attribute `shard` is a `Shard`.
    """
    layout = Layout.of(cfg, groups.topology.world_size)
    kept = torch.float32 if cfg.optimizer.master == "fp32" else torch.bfloat16
    offloaded = cfg.parallel.offload != "none"

    def partition(spec: TensorSpec, parameter: Any) -> None:
        # The copy is made before the parameter gives its memory away. In its own dtype `to` alone would be a view.
        shards, place = layout.shards, groups.replica_rank
        if spec.cut == "experts" and groups.ep_size > 1:
            shards, place = layout.expert_shards, groups.topology.expert_copies(groups.rank).index(groups.rank)
        device, rows = parameter.device, rows_of(len(parameter), shards, place % shards)
        own = parameter.detach()[rows].to("cpu" if offloaded else device, kept, copy=True)
        materialize(parameter, torch.empty(parameter.shape, dtype=kept, device="meta"))
        parameter.shard = Shard(own, device)

    return partition


@dataclass(frozen=True, eq=False)
class UnitRanks:
    """The ranks that shard tensors between them and reduce their gradients, as one of them sees these ranks."""

    mesh: DeviceMesh
    """The ranks that have the same slice of a tensor."""
    shards: dist.ProcessGroup
    """The neighbours that have the shards of the slice between them."""
    copies: dist.ProcessGroup | None
    """The ranks that have copies of this rank's shards. None: there are no copies."""
    holders: dist.ProcessGroup | None
    """The ranks that have all of a tensor between them. None: this rank has it alone."""
    twin: bool
    """Whether another rank saves and counts the shards of this one, which has copies of them."""

    def rows(self, rows: int) -> slice:
        """Return the rows of a slice that this rank's shard has."""
        return rows_of(rows, self.shards.size(), self.shards.rank())


def _ranks_of_all(groups: ParallelGroups, layout: Layout, device: torch.device) -> UnitRanks:
    """Return the ranks that have the same tensor-parallel slices, some neighbours of which shard the slices between
    them; collective."""
    whole = groups.replica_group
    assert whole is not None, "an engine runs in a process group"
    return _ranks(groups, whole, groups.topology.replica_ranks(groups.rank), layout.shards, groups.tp_size, device)


def _ranks_of_experts(groups: ParallelGroups, layout: Layout, device: torch.device) -> UnitRanks | None:
    """Return the ranks that have the same experts, some neighbours of which shard the experts between them; collective.
    None: the experts have the ranks of everything else."""
    if groups.ep_size == 1:
        return None
    same = groups.topology.expert_copies(groups.rank)
    whole = groups.subgroup(same, "copies of experts")
    return _ranks(groups, whole, same, layout.expert_shards, groups.ep_size, device)


def _ranks(
    groups: ParallelGroups, whole: dist.ProcessGroup, same: list[int], shards: int, slices: int, device: torch.device
) -> UnitRanks:
    """Return the ranks of tensors of which `same`, the ranks of a group, have the same slice; collective.

    Args:
        shards: the number of neighbours among them that shard the slice between them.
        slices: the number of slices, which consecutive ranks have.
    """
    row, place = divmod(same.index(groups.rank), shards)
    copies = None
    if shards == len(same):
        neighbours, mesh = whole, DeviceMesh.from_group(whole, device.type, mesh_dim_names=("shard",))
    else:
        grid = torch.tensor(same, dtype=torch.int).view(-1, shards)
        neighbours = groups.subgroup(grid[row].tolist(), "shards")
        copies = whole if shards == 1 else groups.subgroup(grid[:, place].tolist(), "copies of shards")
        names = "copy", "shard"
        mesh = DeviceMesh.from_group([copies, neighbours], device.type, mesh=grid, mesh_dim_names=names)
    return UnitRanks(mesh, neighbours, copies, _holders(groups, shards * slices), twin=row > 0)


def _holders(groups: ParallelGroups, size: int) -> dist.ProcessGroup | None:
    """Return this rank's group of so many neighbours, which have all slices of neighbours that shard; collective."""
    if size == 1:
        return None
    if size == dist.get_world_size():
        return dist.group.WORLD
    for group in (groups.tp_group, groups.ep_group):
        if group is not None and group.size() == size:
            return group
    first = groups.rank // size * size
    return groups.subgroup(list(range(first, first + size)), "holders of a tensor")


class Unit(NamedTuple):
    """A group of parameters, which are gathered together and whose gradients are reduced together."""

    module: Any
    """The module that FSDP wraps."""
    names: tuple[str, ...]
    """The names of the parameters in the model."""
    ranks: UnitRanks
    divisor: int
    """The number that divides the sum of the gradients of `ranks`."""
    others: tuple[nn.Module, ...] = ()
    """Further modules whose parameters are in the group."""
    apart: bool = False
    """Whether no module of the group is ever called. Its weights are then gathered from the begin of a forward pass to
    the end of its backward pass."""
    wide: bool = False
    """Whether the weights are fp32 in a model of any dtype."""


def units(model: Transformer, layout: Layout, device: torch.device) -> list[Unit]:
    """Return the groups of a model's parameters: all that is outside of the blocks, with the gains of all norms, then
    each block, then the experts of each block if they have ranks of their own, then the routers of all blocks;
    collective. Experts with ranks of their own are told whether their blocks call them, so that hooks gather their
    weights."""
    ranks = _ranks_of_all(model.groups, layout, device)
    of_experts, called = _ranks_of_experts(model.groups, layout, device), layout.calls_experts
    gains, mixtures = {norm.gain for norm in _norms(model)}, _mixtures(model)
    routers, experts = [moe.router for moe in mixtures], [moe.experts for moe in mixtures if of_experts]
    module_of: dict[nn.Parameter, nn.Module] = {
        p: block for block in model.blocks for p in block.parameters() if p not in gains
    }
    module_of |= {p: module for module in experts for p in module.parameters()}
    module_of |= {p: routers[0] for router in routers for p in router.parameters()}
    names: dict[nn.Module, list[str]] = {module: [] for module in (model, *model.blocks, *experts, *routers[:1])}
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    for parameter in dict.fromkeys(p for module in _children_first(model) for p in module.parameters(recurse=False)):
        names[module_of.get(parameter, model)].append(name_of[parameter])
    found = [Unit(module, tuple(some), ranks, layout.replicas) for module, some in names.items()]
    if of_experts is not None:
        own = partial(Unit._replace, ranks=of_experts, apart=not called)
        found = [own(each) if each.module in experts else each for each in found]
        for moe in mixtures:
            moe.calls_experts = called
    if routers:
        found[-1] = found[-1]._replace(others=tuple(routers[1:]), apart=True, wide=True)
    return found


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    """Yield all modules in the order in which FSDP packs their parameters. Where a sum is packed decides in which order
    gloo adds up more than two ranks."""
    for child in module.children():
        yield from _children_first(child)
    yield module


def _mixtures(model: Transformer) -> list[MoE]:
    mlps = (cast(Block, block).mlp for block in model.blocks)
    return [mlp for mlp in mlps if isinstance(mlp, MoE)]


def _norms(model: Transformer) -> list[nn.Module]:
    return [norm for block in model.blocks for norm in cast(Block, block).norms]


def shard_model(
    model: Transformer, parts: Sequence[Unit], device: torch.device, dtype: torch.dtype, reshard: bool, offloaded: bool
) -> dict[str, Any]:
    """Apply fully_shard to the units of a model, and take the rows that `partitioner` has left of each parameter.

    Args:
        device: the device that the model computes on.
        reshard: give weights back after each pass.

    Returns:
        FSDP's parameters by name.
    """
    # Blocks return views of what they compute, and FSDP warns that nothing may change these in place. Nothing does.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    own = {name: cast(Any, parameter).shard.rows for name, parameter in model.named_parameters()}
    how: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False),
        # Copies from and to pinned memory run beside kernels.
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda") if offloaded else OffloadPolicy(),
    }
    norms = _norms(model)
    gains = {cast(nn.Parameter, norm.gain) for norm in norms}
    root, *blocks = parts
    # A group leaves out what is in one already, so routers and experts come before their blocks.
    for unit in sorted(blocks, key=lambda unit: isinstance(unit.module, Block)):
        how["mesh"] = unit.ranks.mesh
        if unit.apart:
            kept = torch.float32 if unit.wide else dtype
            policy = MixedPrecisionPolicy(kept, torch.float32, cast_forward_inputs=False)
            fully_shard([unit.module, *unit.others], reshard_after_forward=False, **{**how, "mp_policy": policy})
        else:
            fully_shard(unit.module, ignored_params=gains, reshard_after_forward=reshard, **how)
    # fully_shard looks for parameters outside of the blocks, and finds the gains here.
    model.gains = nn.ModuleList(norms)
    fully_shard(model, reshard_after_forward=False, **{**how, "mesh": root.ranks.mesh})
    del model.gains
    for unit in parts:
        if device.type == "cpu":
            unit.module.set_force_sum_reduction_for_comms(True)  # Gloo has no mean.
        if unit.divisor == unit.ranks.mesh.size():
            continue
        if unit.ranks.shards.size() > 1:
            unit.module.set_gradient_divide_factor(float(unit.divisor))
        else:
            # Where nothing is sharded, versions of torch divide by a factor of ours never, once or twice.
            unit.module.set_all_reduce_hook(partial(torch.Tensor.div_, other=unit.divisor / unit.ranks.mesh.size()))
    for chunk in model.chunks:
        of_chunk = [cast(Any, model.blocks.get_submodule(str(number))) for number in chunk.blocks]
        for block, following in itertools.pairwise(of_chunk):
            # Where the host launches hardly faster than the GPU computes, as in 8 bits, a gather would otherwise be
            # issued when its block is already waited for.
            block.set_modules_to_forward_prefetch([following])
    model.to_empty(device=torch.device("cpu") if offloaded else device)
    parameters: dict[str, Any] = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.to_local().copy_(own.pop(name))
    return parameters


def gather_once(
    model: Transformer, parts: Iterable[Unit], stay: bool, pass_by: bool = False
) -> list[dict[str, Tensor]]:
    """Gather the weights of one unit after the other, and return the tensors that the model computes with, by name, for
    each unit. FSDP makes these tensors once, and only their memory comes and goes. It also pads shards of unequal
    length, and pins them, so this comes before anybody takes the memory of shards.

    Args:
        stay: FSDP takes the weights for gathered from now on.
        pass_by: the weights of all units but the first have no memory when this returns, whatever FSDP takes them for.
    """
    found = list[dict[str, Tensor]]()
    for unit in parts:
        unit.module.unshard()
        found.append({name: cast(Tensor, model.get_parameter(name)) for name in unit.names})
        if not stay:
            unit.module.reshard()
        elif pass_by and len(found) > 1:
            for weight in found[-1].values():
                weight.untyped_storage().resize_(0)
    return found
