"""Where DeepSpeed keeps the fp32 master weights and Adam moments of every parameter, and that they are what they are
called.

At ZeRO 0 a rank has all of them. At 1 and 2 it has one range of a flat tensor in which parameters lie one behind the
other, and at 3 one range of each parameter. A checkpoint names what lies there
(checkpoint/saving.py). A setting, or a version, that lays it out otherwise would give weights each other's names
without a word, so `check_masters` compares.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist

from sagetrain.config.errors import ConfigError
from sagetrain.model.tensors import TensorSpec
from sagetrain.parallel.topology import ParallelGroups

_BLOCK = 2**22  # weights that all ranks together gather at a time


@dataclass(frozen=True)
class ParameterShard:
    """What this rank owns of one parameter: a range of its flattened tensor-parallel slice.

    `tensors` maps "weight", "exp_avg" and "exp_avg_sq" to 1-D fp32 views of DeepSpeed's own memory; writing to them
    changes the optimizer. Empty range: this rank owns nothing of it (and writes nothing to a checkpoint).
    """

    spec: TensorSpec
    parameter: Any
    """The nn.Parameter, with what DeepSpeed notes on it."""
    start: int
    stop: int
    tensors: dict[str, torch.Tensor]

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def tp_dim(self) -> int | None:
        return self.spec.dim

    @property
    def global_shape(self) -> tuple[int, ...]:
        return self.spec.shape


class Masters:
    """The part of an Engine that knows where its state lies."""

    groups: ParallelGroups
    stage: int
    config: dict[str, Any]
    """What DeepSpeed was given."""
    _ds: Any
    """DeepSpeed's engine."""
    _base: torch.optim.Optimizer
    """Steps the masters."""
    _shapes: dict[str, tuple[int, ...]]
    """Of every parameter's tensor-parallel slice."""

    @property
    def module(self) -> Any:
        return self._ds.module

    @property
    def device(self) -> torch.device:
        return torch.device(self._ds.device)

    def weights_changed(self) -> None:
        """Call after weights were set, in all their copies."""
        raise NotImplementedError

    def _flat_masters(self) -> list[torch.Tensor]:
        """The fp32 tensors that the base optimizer steps: flat partitions, or the parameters themselves at stage 0."""
        if self.stage == 3:
            return list(self._ds.optimizer.fp32_partitioned_groups_flat)
        return [p for group in self._base.param_groups for p in group["params"]]

    def _ensure_state(self, master: torch.Tensor) -> dict[str, torch.Tensor]:
        """Adam's state of one master tensor, made now instead of at the first step so that it can be loaded."""
        state: dict[str, torch.Tensor] = self._base.state[master]
        if not state:
            # The type and device that torch's AdamW itself would choose on its first step.
            step_device = master.device if self._base.defaults.get("fused") else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=step_device)
            state["exp_avg"] = torch.zeros_like(master, memory_format=torch.preserve_format, requires_grad=False)
            state["exp_avg_sq"] = torch.zeros_like(master, memory_format=torch.preserve_format, requires_grad=False)
        return state

    def set_optimizer_steps(self, steps: int) -> None:
        """Set Adam's step count, which its bias correction reads."""
        for master in self._flat_masters():
            self._ensure_state(master)["step"].fill_(steps)

    def shards(self, chosen: Callable[[TensorSpec], bool] = lambda spec: True) -> Iterator[ParameterShard]:
        """This rank's share of every parameter, in the order of the model, or of those that are chosen."""
        for name, parameter in self.module.named_parameters():
            spec = self.module.specs[name]
            if not chosen(spec):
                continue
            shape = self._shapes[name]
            start, stop, views = self._owned(parameter, shape)
            tensors = views if stop > start else {}
            yield ParameterShard(spec, parameter, start, stop, tensors)

    def _owned(self, parameter: Any, shape: tuple[int, ...]) -> tuple[int, int, dict[str, torch.Tensor]]:
        numel = torch.Size(shape).numel()
        if self.stage == 0:
            state = self._ensure_state(parameter)
            views = {"weight": parameter.data, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
            return 0, numel, {kind: tensor.view(-1) for kind, tensor in views.items()}
        if self.stage == 3:
            kept = self._ds.optimizer.get_local_fp32_param
            partition = kept(parameter)
            start = min(partition.numel() * self.groups.replica_rank, numel)
            stop = min(start + partition.numel(), numel)
            views = {kind: kept(parameter, kind) for kind in ("exp_avg", "exp_avg_sq")}
            return start, stop, {k: v[: stop - start] for k, v in {"weight": partition, **views}.items()}
        fragment = parameter._hp_mapping
        if fragment is None:
            return 0, 0, {}
        inside, flat = fragment.lp_fragment_address, fragment.hp_fragment_address
        master = self._base.param_groups[fragment.param_group_index]["params"][0]
        state = self._ensure_state(master)
        views = {"weight": master.data, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
        return (
            inside.start,
            inside.start + inside.numel,
            {kind: tensor.narrow(0, flat.start, flat.numel) for kind, tensor in views.items()},
        )

    @torch.no_grad()
    def check_masters(self) -> None:
        """See that each master shard is, in the model's dtype, the slice of the parameter that it is named after, as
        the model computes with it; collective. Whatever reorders DeepSpeed's memory, or leaves a copy of the weights
        behind, ends here and not in a checkpoint of weights under each other's names.

        Raises:
            ConfigError: on every rank, one is not.
        """
        if self.stage == 0:  # the masters are the parameters
            return
        shards = list(self.shards())
        wrong = torch.tensor(len(shards), device=self.device)
        for place, shard in enumerate(shards):
            master = shard.tensors.get("weight", torch.empty(0, device=self.device))
            with self._whole(shard.parameter) as values:
                differs = (values.view(-1)[shard.start : shard.stop] != master.to(values.dtype)).any()
            if getattr(shard.parameter, "ds_secondary_tensor", None) is not None:
                differs = torch.ones_like(differs)
            wrong = torch.where(differs, wrong.clamp(max=place), wrong)
        dist.all_reduce(wrong, op=dist.ReduceOp.MIN)
        if wrong < len(shards):
            name, keys = shards[int(wrong)].name, ", ".join(self.config["zero_optimization"])
            raise ConfigError(
                f"{name}: what the optimizer keeps of this parameter is not what the model computes with: DeepSpeed "
                f"{version('deepspeed')} has weights in an order, or in copies, that checkpoints do not know. Its "
                f"zero_optimization has the keys {keys}: leave out those that you gave it, or install the version of "
                "constraints.txt"
            )

    @contextlib.contextmanager
    def _whole(self, parameter: Any) -> Iterator[torch.Tensor]:
        """Give the values of a parameter's tensor-parallel slice, gathered at ZeRO 3 while they are looked at."""
        partitioned = self.stage == 3 and not parameter.numel()
        if partitioned:
            parameter.all_gather([parameter])
        yield parameter.data
        if partitioned:
            parameter.partition([parameter])

    def _gather_masters(self) -> None:
        """Make the flat weights that the model computes with from the masters, as DeepSpeed does after a step, but in
        blocks: a collective may keep as much again as it gathers."""
        optimizer, groups = self._ds.optimizer, self.groups
        names = "bf16_partitioned_groups", "parallel_partitioned_bit16_groups"
        (flat,) = [getattr(optimizer, name) for name in names if hasattr(optimizer, name)]
        block = max(1, _BLOCK // groups.num_replicas)
        for parts, group in zip(flat, self._base.param_groups, strict=True):
            own = parts[groups.replica_rank]
            own.copy_(group["params"][0])
            for low in range(0, len(own), block) if groups.num_replicas > 1 else ():
                dist.all_gather(
                    [part[low : low + block] for part in parts], own[low : low + block], group=groups.replica_group
                )

    @property
    def writes_shards(self) -> bool:
        """Whether this replica holds state of its own (at stage 0 only the first one writes)."""
        return self.stage > 0 or self.groups.replica_rank == 0

    def weights(self, shard: ParameterShard) -> list[tuple[torch.Tensor, int]]:
        """What this rank keeps of a parameter's values: 1-D views, each with the place in the flattened tensor-parallel
        slice where it begins (the fp32 master, and beside it what the model computes with)."""
        master = [(shard.tensors["weight"], shard.start)] if shard.tensors else []
        if self.stage == 0:
            return master
        if self.stage == 3:
            part = shard.parameter.ds_tensor.data.view(-1)[: shard.stop - shard.start]
            # Small parameters stay gathered; of others this is empty.
            return [*master, (part, shard.start), (shard.parameter.data.view(-1), 0)]
        return [*master, (shard.parameter.data.view(-1), 0)]

    @torch.no_grad()
    def state_changed(self) -> None:
        """Call after master weights or moments were set: every other copy of the weights becomes what the masters are;
        collective. At ZeRO 0 the state of the first replica becomes that of all.

        Raises:
            ConfigError: as check_masters.
        """
        if self.stage == 0:
            for shard in self.shards() if self.groups.num_replicas > 1 else ():
                for tensor in shard.tensors.values():
                    dist.broadcast(tensor, group=self.groups.replica_group, group_src=0)
        elif self.stage < 3:
            self._gather_masters()
        else:
            for shard in filter(lambda shard: shard.tensors, self.shards()):
                shard.parameter.ds_tensor.data.view(-1)[: shard.stop - shard.start].copy_(shard.tensors["weight"])
        self.weights_changed()
        self.check_masters()
