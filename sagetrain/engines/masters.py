"""Find the fp32 master weights and Adam moments of every parameter in DeepSpeed's memory, and check that they belong to
that parameter.

At ZeRO 0 a rank has all of them. At ZeRO 1 and 2 a rank has one range of a flat tensor, in which parameters lie one
behind the other. At ZeRO 3 a rank has one range of each parameter.

A checkpoint gives these ranges the names of parameters (checkpoint/saving.py). With another memory layout, caused by a
setting or a version of DeepSpeed, weights would silently be saved under wrong names. `check` therefore compares the
masters with the model.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sagetrain.config.errors import ConfigError
from sagetrain.engines.protocol import Owned, every
from sagetrain.model.tensors import TensorSpec
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.topology import ParallelGroups

# All ranks together gather this many weights at a time.
_BLOCK = 2**22
_MOMENTS = "exp_avg", "exp_avg_sq"


class Masters:
    """The master weights and moments of a DeepSpeed engine.

    Args:
        ds: DeepSpeed's engine.
        optimizer: the optimizer that was handed to DeepSpeed and updates the masters.
        shapes: the shape of every parameter's tensor-parallel slice, by name.
        settings: the configuration that was handed to DeepSpeed.
    """

    def __init__(
        self,
        ds: Any,
        optimizer: torch.optim.Optimizer,
        groups: ParallelGroups,
        stage: int,
        shapes: Mapping[str, tuple[int, ...]],
        settings: Mapping[str, Any],
    ) -> None:
        self._ds, self._optimizer, self._groups, self._stage = ds, optimizer, groups, stage
        self._shapes, self._settings = shapes, settings
        self._device = torch.device(ds.device)
        for master in self._flat():
            self._state(master)
        self.check()
        self._weights = [(owned.name, owned.weight) for owned in self.owned() if len(owned.weight)]

    def _parameters(self) -> Iterator[tuple[TensorSpec, Any]]:
        """Iterate over the nn.Parameters, which carry DeepSpeed's attributes, each with the specification of its
        tensor."""
        model: Transformer = self._ds.module
        return ((model.specs[name], parameter) for name, parameter in model.named_parameters())

    def _flat(self) -> list[Tensor]:
        """Return the fp32 tensors that the optimizer updates: flat partitions, or at stage 0 the parameters
        themselves."""
        if self._stage == 3:
            return list(self._ds.optimizer.fp32_partitioned_groups_flat)
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _state(self, master: Tensor) -> dict[str, Tensor]:
        """Return Adam's state of one master tensor. The state is made now and not at the first step, so that it can be
        loaded."""
        state: dict[str, Tensor] = self._optimizer.state[master]
        if not state:
            # torch's AdamW itself would choose this type and device in its first step.
            step_device = master.device if self._optimizer.defaults.get("fused") else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=step_device)
            for kind in _MOMENTS:
                state[kind] = torch.zeros_like(master, memory_format=torch.preserve_format, requires_grad=False)
        return state

    def steps(self) -> list[Tensor]:
        """Return Adam's step counts, from which its bias correction is computed."""
        return [self._state(master)["step"] for master in self._flat()]

    def owned(self, chosen: Callable[[TensorSpec], bool] = every) -> Iterator[Owned]:
        """Iterate over the part of each chosen tensor that this rank keeps: see engines/protocol.Engine."""
        nothing = torch.empty(0, device=self._device)
        for spec, parameter in self._parameters():
            if not chosen(spec):
                continue
            numel = torch.Size(self._shapes[spec.name]).numel()
            start, stop, views = self._range(parameter, numel)
            yield Owned(
                spec,
                start,
                stop,
                weight=views.pop("weight", nothing) if stop > start else nothing,
                state=views if stop > start else {},
                copies=self._copies(parameter, stop - start),
                twin=self._stage == 0 and self._groups.replica_rank > 0,
            )

    def _range(self, parameter: Any, numel: int) -> tuple[int, int, dict[str, Tensor]]:
        if self._stage == 0:
            state = self._state(parameter)
            views = {"weight": parameter.data, **{kind: state[kind] for kind in _MOMENTS}}
            return 0, numel, {kind: tensor.view(-1) for kind, tensor in views.items()}
        if self._stage == 3:
            kept = self._ds.optimizer.get_local_fp32_param
            partition = kept(parameter)
            start = min(partition.numel() * self._groups.replica_rank, numel)
            stop = min(start + partition.numel(), numel)
            views = {"weight": partition, **{kind: kept(parameter, kind) for kind in _MOMENTS}}
            return start, stop, {kind: view[: stop - start] for kind, view in views.items()}
        fragment = parameter._hp_mapping
        if fragment is None:
            return 0, 0, {}
        inside, flat = fragment.lp_fragment_address, fragment.hp_fragment_address
        master = self._optimizer.param_groups[fragment.param_group_index]["params"][0]
        state = self._state(master)
        views = {"weight": master.data, **{kind: state[kind] for kind in _MOMENTS}}
        ranges = {kind: tensor.narrow(0, flat.start, flat.numel) for kind, tensor in views.items()}
        return inside.start, inside.start + inside.numel, ranges

    def _copies(self, parameter: Any, length: int) -> tuple[Tensor, ...]:
        """Return this rank's copies of a parameter that the model computes with, 1-D in the model's dtype. `length` is
        the length of this rank's range at ZeRO 3."""
        # At stage 0 the masters are the parameters themselves.
        if self._stage == 0:
            return ()
        # At ZeRO 3 small parameters stay gathered, and for other parameters this tensor is empty.
        whole = parameter.data.view(-1)
        return (parameter.ds_tensor.data.view(-1)[:length], whole) if self._stage == 3 else (whole,)

    def gradients(self) -> list[tuple[str, Tensor]]:
        """Return the parts of gradients that this rank owns and that exist while the optimizer is called, with the
        names of their tensors. DeepSpeed updates one group of parameters after the other, so the gradients of other
        groups do not exist yet or are already freed."""
        masters = {
            m.data_ptr(): m for group in self._optimizer.param_groups for m in group["params"] if m.grad is not None
        }
        starts, parts = sorted(masters), []
        for name, weight in self._weights if masters else ():
            master = masters[starts[max(0, bisect.bisect_right(starts, weight.data_ptr()) - 1)]]
            first = (weight.data_ptr() - master.data_ptr()) // master.element_size()
            if 0 <= first < master.numel():
                parts.append((name, master.grad.view(-1).narrow(0, first, weight.numel())))
        return parts

    @torch.no_grad()
    def check(self) -> None:
        """Check that each master, rounded to the model's dtype, equals the range of its parameter that the model
        computes with; collective. If DeepSpeed's memory is reordered or has another copy of the weights, the run ends
        here, and no checkpoint gets weights under wrong names.

        Raises:
            ConfigError: on every rank, if a master differs on any rank.
        """
        # At stage 0 the masters are the parameters themselves.
        if self._stage == 0:
            return
        pairs = list(zip(self.owned(), (parameter for _, parameter in self._parameters()), strict=True))
        wrong = torch.tensor(len(pairs), device=self._device)
        for place, (owned, parameter) in enumerate(pairs):
            with self._whole(parameter) as values:
                differs = (values.view(-1)[owned.start : owned.stop] != owned.weight.to(values.dtype)).any()
            if getattr(parameter, "ds_secondary_tensor", None) is not None:
                differs = torch.ones_like(differs)
            wrong = torch.where(differs, wrong.clamp(max=place), wrong)
        dist.all_reduce(wrong, op=dist.ReduceOp.MIN)
        if wrong < len(pairs):
            name, keys = pairs[int(wrong)][0].name, ", ".join(self._settings["zero_optimization"])
            raise ConfigError(
                f"{name}: what the optimizer keeps of this parameter is not what the model computes with: DeepSpeed "
                f"{version('deepspeed')} has weights in an order, or in copies, that checkpoints do not know. Its "
                f"zero_optimization has the keys {keys}: leave out those that you gave it, or install the version of "
                "constraints.txt"
            )

    @contextlib.contextmanager
    def _whole(self, parameter: Any) -> Iterator[Tensor]:
        """Yield the values of a parameter's tensor-parallel slice. At ZeRO 3 they are gathered for as long as the block
        runs."""
        partitioned = self._stage == 3 and not parameter.numel()
        if partitioned:
            parameter.all_gather([parameter])
        yield parameter.data
        if partitioned:
            parameter.partition([parameter])

    def spread(self) -> None:
        """Copy the masters to every other copy of the weights; collective. At ZeRO 0 the state of the first replica is
        sent to all replicas."""
        if self._stage == 0:
            for owned in self.owned() if self._groups.num_replicas > 1 else ():
                for tensor in owned.tensors.values():
                    dist.broadcast(tensor, group=self._groups.replica_group, group_src=0)
        elif self._stage < 3:
            self._gather()
        else:
            for owned in self.owned():
                owned.copies[0].copy_(owned.weight)

    def _gather(self) -> None:
        """Make the model's flat weights from the masters, as DeepSpeed does after a step. This works in blocks, because
        a collective may allocate as much memory as it gathers."""
        optimizer, groups = self._ds.optimizer, self._groups
        names = "bf16_partitioned_groups", "parallel_partitioned_bit16_groups"
        (flat,) = [getattr(optimizer, name) for name in names if hasattr(optimizer, name)]
        block = max(1, _BLOCK // groups.num_replicas)
        for parts, group in zip(flat, self._optimizer.param_groups, strict=True):
            own = parts[groups.replica_rank]
            own.copy_(group["params"][0])
            for low in range(0, len(own), block) if groups.num_replicas > 1 else ():
                dist.all_gather(
                    [part[low : low + block] for part in parts], own[low : low + block], group=groups.replica_group
                )
