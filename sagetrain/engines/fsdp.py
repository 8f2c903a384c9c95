"""The engine that shards weights, gradients and optimizer state with torch's FSDP2 (`fully_shard`).

This module is the one place that uses FSDP's names, which differ between torch 2.8 and 2.14. It uses public calls
alone. The stages of ZeRO are settings of one mechanism:

stage  a rank keeps for good     weights are gathered         gradients are reduced
0      everything                never                        once a step, by an all-reduce
1      its shards                once a step                  once a step, by a reduce-scatter
2      its shards                once a step                  in every micro-step
3      its shards                in every pass                in every micro-step

- The sharded parameters are the fp32 masters. The model computes with gathered copies in training.dtype. FSDP sums
the gradients of micro-steps, and of ranks, in fp32.
- A block normalizes for the next block, so the gains of all norms belong to the outermost group of parameters, which
stays gathered from its forward pass to the end of its backward pass. Each block is a group of its own.
- The optimizer works on plain local tensors and never sees a DTensor.
- A shard is whole rows of a tensor-parallel slice, and so one range of the flattened slice, as checkpoints need it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from sagetrain.config.arithmetic import sharding_ranks
from sagetrain.config.schema import RunConfig
from sagetrain.data.loader import Batch
from sagetrain.engines.protocol import Owned, Probe, every
from sagetrain.engines.step import BaseEngine, Decision
from sagetrain.model.block import Block
from sagetrain.model.tensors import TensorSpec
from sagetrain.model.transformer import Transformer
from sagetrain.optim.build import build_optimizer
from sagetrain.optim.build import groups as groups_of
from sagetrain.optim.pieces import Optimizer, State, TensorPiece, Weights
from sagetrain.parallel.layers import keep_weights, materialize
from sagetrain.parallel.topology import ParallelGroups


def rows_of(rows: int, shards: int, place: int) -> slice:
    """Return the rows of a tensor that the shard at `place` of `shards` has, as torch.chunk deals them out."""
    most = -(-rows // shards)
    return slice(min(place * most, rows), min((place + 1) * most, rows))


def partitioner(cfg: RunConfig, groups: ParallelGroups) -> Callable[[nn.Parameter], None]:
    """Return the function that reduces a parameter, which has just got its values, to this rank's shard.

    The function is for Transformer(partition=...), and with it no rank ever holds the whole model in fp32. The
    parameter goes back to the meta device, in fp32. Its attribute `shard` has the rows of this rank until the engine
    takes them.
    """
    shards = sharding_ranks(cfg, groups.num_replicas)
    kept = torch.float32 if cfg.optimizer.master == "fp32" else torch.bfloat16

    def partition(parameter: Any) -> None:
        # The copy is made before the parameter gives its memory away. In its own dtype `to` alone would be a view.
        own = parameter.detach()[rows_of(len(parameter), shards, groups.replica_rank % shards)].to(kept).clone()
        materialize(parameter, torch.empty(parameter.shape, dtype=kept, device="meta"))
        parameter.shard = own

    return partition


def _mesh(groups: ParallelGroups, shards: int, device: torch.device) -> tuple[DeviceMesh, dist.ProcessGroup | None]:
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


def _shard(model: Transformer, mesh: DeviceMesh, dtype: torch.dtype, reshard: bool) -> None:
    """Apply fully_shard to a model: a group of parameters for each block, and one for everything else and the gains."""
    how: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False),
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


class FsdpEngine(BaseEngine):
    """An engine on torch's FSDP2, for any gradient accumulation at any ZeRO stage.

    Args:
        model: a model that was made with `partitioner`.
    """

    takes_probes = True

    def __init__(self, cfg: RunConfig, model: Transformer, groups: ParallelGroups, micro_batches: int) -> None:
        own = {name: cast(Any, parameter).shard for name, parameter in model.named_parameters()}
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        device = next(iter(own.values())).device
        self._stage, self._micro_batches = cfg.parallel.zero_stage, micro_batches
        self._shards = shards = sharding_ranks(cfg, groups.num_replicas)
        # Gradients are clipped as the optimizer reads them, so observers see them as they were.
        super().__init__(model, groups, device, clip=0.0, copies=groups.num_replicas // shards)
        self._largest_norm = cfg.optimizer.clip_grad or math.inf
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[cfg.training.dtype]
        # Blocks return views of what they compute, and FSDP warns that nothing may change these in place. Nothing does.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
        mesh, self._copies = _mesh(groups, shards, device)
        _shard(model, mesh, dtype, reshard=self._stage == 3)
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in self._modules if device.type == "cpu" else ():
            module.set_force_sum_reduction_for_comms(True)  # Gloo has no mean.
        self._root = cast(FSDPModule, model)
        model.to_empty(device=device)
        with torch.no_grad():
            for name, parameter in self._sharded().items():
                parameter.to_local().copy_(own.pop(name))
        # FSDP pads shards of unequal length here, so this comes before their memory is taken over.
        self._leaves = self._gathered_once()
        self._parameters = self._sharded()
        self._masters = {name: p.to_local().detach() for name, p in self._parameters.items()}
        self._starts = {
            name: rows_of(shape[0], shards, groups.replica_rank % shards).start * math.prod(shape[1:])
            for name, shape in shapes.items()
        }
        self._begin_optimizers(cfg)
        self._keeps = self._stage < 3 and cfg.linear.low_bit
        for block in model.blocks if self._keeps else ():
            # FSDP's own hook comes first and has gathered the weights.
            block.register_forward_pre_hook(self._keep_weights)
        self._weights_written()
        self._mode: tuple[bool, bool] | None = None

    def _sharded(self) -> dict[str, Any]:
        """Return the sharded parameters, which are DTensors, by name. The model has them while nothing is gathered."""
        return dict(self.model.named_parameters())

    def _gathered_once(self) -> dict[str, Tensor]:
        """Gather the weights of one group of parameters after the other, and return the tensors that the model computes
        with, by name. FSDP makes these tensors once, and only their memory comes and goes."""
        found: dict[str, Tensor] = {}
        for module in self._modules:
            module.unshard()
            found.update((name, p) for name, p in self.model.named_parameters() if not hasattr(p, "to_local"))
            module.reshard()
        return {name: found[name] for name in self.model.specs}

    # -- the optimizer -------------------------------------------------------------------------------------------

    def _begin_optimizers(self, cfg: RunConfig) -> None:
        """Make the optimizers of the masters, one for each group of tensors that are updated in the same way."""
        ranks, specs = self._holders(), self.model.specs
        self._optimizers: list[tuple[list[TensorPiece], Optimizer]] = []
        self._state: dict[str, Mapping[str, State]] = {}
        self._weights: dict[str, Weights] = {}
        for group in groups_of(specs.values(), cfg):
            pieces = []
            for name in group.names:
                weight, start, spec = self._masters[name].view(-1), self._starts[name], specs[name]
                slices, place = (self.groups.tp_size, self.groups.tp_rank) if spec.cut else (1, 0)
                pieces.append(TensorPiece(spec, place, slices, start, start + len(weight), weight))
            optimizer = build_optimizer(cfg, group, pieces, ranks)
            self._optimizers.append((pieces, optimizer))
            self._state.update(zip(group.names, optimizer.state, strict=True))
            self._weights.update(zip(group.names, optimizer.weights, strict=True))

    def _holders(self) -> dist.ProcessGroup | None:
        """Return the ranks that hold each tensor between them: the tensor-parallel slices of neighbours that shard;
        collective."""
        if self._shards == self.groups.num_replicas:
            return dist.group.WORLD if dist.get_world_size() > 1 else None
        if self._shards == 1:
            return self.groups.tp_group if self.groups.tp_size > 1 else None
        size = self._shards * self.groups.tp_size
        first = self.groups.rank // size * size
        return self.groups.subgroup(list(range(first, first + size)), "holders of a tensor")

    @torch.no_grad()
    def _step_optimizers(self, gradients: Mapping[str, Tensor], factor: float) -> None:
        """Update the masters by the gradients times a factor."""
        if factor != 1:
            torch._foreach_mul_(list(gradients.values()), factor)
        for pieces, optimizer in self._optimizers:
            # A rank that keeps nothing of a tensor has no gradient of it.
            of_pieces = [gradients[p.spec.name].view(-1) if len(p.weight) else p.weight for p in pieces]
            optimizer.step(of_pieces, self._lr, self.optimizer_steps + 1)

    # -- what it keeps -------------------------------------------------------------------------------------------

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings that FSDP was given."""
        return {
            "zero_stage": self._stage,
            "shard_size": self._shards,
            "copies": self.groups.num_replicas // self._shards,
            "param_dtype": str(self._leaves["embedding.weight"].dtype),
            "reduce_dtype": str(torch.float32),
            "reshard_after_forward": self._stage == 3,
            "gradient_sync": "every micro-step" if self._stage > 1 else "last micro-step",
        }

    def owned(self, chosen: Callable[[TensorSpec], bool] = every) -> Iterator[Owned]:
        """Iterate over the part of each tensor that this rank keeps: see engines/protocol.Engine."""
        for name, spec in self.model.specs.items():
            if chosen(spec):
                master, start = self._masters[name], self._starts[name]
                yield Owned(
                    spec,
                    start,
                    start + master.numel(),
                    weight=master.view(-1),
                    state=self._state[name],
                    masters=self._weights[name],
                    twin=self.groups.replica_rank >= self._shards,
                )

    def leaves(self) -> Mapping[str, Tensor]:
        """Return the tensors that receive gradients from autograd, by name."""
        return self._leaves

    def gathered(self) -> Mapping[str, Tensor]:
        """Return the whole weights of this tensor-parallel rank: see engines/protocol.Engine."""
        for module in self._modules:
            module.unshard()
        return self._leaves

    def weights_changed(self) -> None:
        """Renew what depends on the masters, which have changed: the next pass gathers them again."""
        for module in self._modules:
            module.reshard()
        self._weights_written()

    @torch.no_grad()
    def state_changed(self, optimizer_steps: int | None = None) -> None:
        """Bring all copies of the weights in line with the masters: see engines/protocol.Engine."""
        if self._copies is not None:
            for owned in self.owned():
                for kind in owned.kinds:
                    values = owned.read(kind)
                    dist.broadcast(values, group=self._copies, group_src=0)
                    owned.write(kind, values)
        self.weights_changed()
        if optimizer_steps is not None:
            self.optimizer_steps = optimizer_steps

    def _weights_written(self) -> None:
        """Let every block renew its 8-bit weights in its next forward pass, once for all micro-batches of a step."""
        self._stale = list(self.model.blocks) if self._keeps else []

    def _keep_weights(self, block: nn.Module, inputs: Any) -> None:
        if block in self._stale:
            self._stale.remove(block)
            keep_weights(block)

    # -- a step --------------------------------------------------------------------------------------------------

    def _prepare(self, micro_batches: int, lr: float) -> None:
        self._micro_batches, self._lr = micro_batches, lr
        self.model.train()
        # Probes come first, whose gradients are for nobody else.
        self._set_mode(sync=False, last=False)

    def _probe(self, batches: Iterable[Batch], probes: Sequence[Probe], masked: bool) -> Iterable[Batch]:
        # Probes change how layers multiply, so layers make their 8-bit weights of this step before.
        for block in [*self._stale]:
            cast(FSDPModule, block).unshard()
            self._keep_weights(block, ())
        return super()._probe(batches, probes, masked)

    def _prepare_evaluation(self) -> None:
        self.model.eval()

    def _run(self, inputs: Mapping[str, Any]) -> Tensor:
        result: Tensor = self.model(**inputs)
        return result

    def _set_mode(self, sync: bool, last: bool) -> None:
        """Say how the next backward pass ends.

        Args:
            sync: reduce the gradients.
            last: the pass is the last one of the step.
        """
        if (sync, last) == self._mode:
            return
        self._mode, root = (sync, last), self._root
        root.set_requires_gradient_sync(sync)
        # Between the copies of shards, sums travel once a step.
        root.set_requires_all_reduce(last)
        root.set_is_last_backward(last)
        root.set_reshard_after_backward(last or self._stage == 3)
        if not last:
            # The outermost group is needed from the begin of a pass to its end, so giving it back saves no memory.
            root.set_reshard_after_backward(False, recurse=False)

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of a micro-batch's loss to the step's gradient: see BaseEngine."""
        self._set_mode(sync=last or self._stage > 1, last=last)
        (loss / self._micro_batches).backward()

    def _update(self, decision: Decision) -> bool:
        """Measure the norm of the gradients, ask the decision, and update the masters or leave them."""
        gradients = {}
        for name, parameter in self._parameters.items():
            if parameter.grad is not None and self._masters[name].numel():
                gradients[name] = parameter.grad.to_local()
            parameter.grad = None
        # The squares travel with the step's metrics. Each element of the model counts once.
        counted = [
            gradient
            for name, gradient in gradients.items()
            if self.groups.replica_rank < self._shards and (self.model.specs[name].cut or self.groups.tp_rank == 0)
        ]
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        if counted:
            square = torch.stack(torch._foreach_norm(counted, dtype=torch.float32)).double().square().sum()
        self.groups.metrics.derive("train/grad_norm", math.sqrt, square)
        allowed = decision.allows()
        norm = decision.metrics["train/grad_norm"]
        if not math.isfinite(norm):
            return False
        decision.show(lambda: [(name, gradient.view(-1).float()) for name, gradient in gradients.items()])
        if not allowed:
            return False
        self._step_optimizers(gradients, min(1.0, self._largest_norm / (norm + 1e-6)))
        return True
