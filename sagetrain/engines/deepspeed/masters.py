"""Find the fp32 master weights and Adam moments of every parameter in DeepSpeed's memory, and check that they belong to
that parameter.

At ZeRO 0 a rank has all of them. At ZeRO 1 and 2 a rank has one range of a flat tensor, in which parameters lie one
behind the other.

A checkpoint gives these ranges the names of parameters (checkpoint/saving.py). With another memory layout, caused by a
setting or a version of DeepSpeed, weights would silently be saved under wrong names. `check` therefore compares the
masters with the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sagetrain.checkpoint.stateful import Owned
from sagetrain.config.errors import ConfigError
from sagetrain.engines.protocol import every
from sagetrain.model.placement import place
from sagetrain.model.tensors import TensorSpec
from sagetrain.model.transformer import Transformer
from sagetrain.optim.build import Group
from sagetrain.optim.pieces import Optimizer, State, TensorPiece
from sagetrain.parallel.topology import ParallelGroups

# All ranks together gather this many weights at a time.
_BLOCK = 2**22


@dataclass(frozen=True)
class _Part:
    """A piece of a tensor, and its place in the tensor that DeepSpeed hands to the optimizer."""

    piece: TensorPiece
    parameter: Any
    """The nn.Parameter, which carries DeepSpeed's attributes."""
    master: Tensor
    first: int
    """The position in `master` of the first value."""

    @property
    def gradient(self) -> Tensor:
        """The gradient of the piece, 1-D. It exists only while DeepSpeed calls the optimizer."""
        assert self.master.grad is not None
        return self.master.grad.view(-1)[self.first : self.first + len(self.piece.weight)]


class Masters:
    """The master weights and moments of a DeepSpeed engine.

    Args:
        ds: DeepSpeed's engine.
        optimizer: the optimizer that was handed to DeepSpeed, with a group of parameters for each of `rules`.
        rules: the groups of tensors, each with the way it is updated.
        build: builds the optimizer of pieces of a group: see optim/build.build_optimizer.
    """

    def __init__(
        self,
        ds: Any,
        optimizer: torch.optim.Optimizer,
        rules: Sequence[Group],
        build: Callable[[Group, Sequence[TensorPiece], dist.ProcessGroup | None], Optimizer],
        stage: int,
    ) -> None:
        self._ds, self._optimizer, self._stage = ds, optimizer, stage
        self._groups: ParallelGroups = ds.module.groups
        self._device = torch.device(ds.device)
        number_of = {name: number for number, rule in enumerate(rules) for name in rule.names}
        self._parts = [self._part(spec, parameter, number_of[spec.name]) for spec, parameter in self._parameters()]
        self._units = self._split(number_of)
        optimizers = [
            build(rules[number_of[unit[0].piece.spec.name]], [part.piece for part in unit], self._ranks())
            for unit in self._units
        ]
        self._optimizers: Sequence[Optimizer] = optimizers
        self._state: dict[str, Mapping[str, State]] = {
            part.piece.spec.name: state
            for unit, optimizer in zip(self._units, optimizers, strict=True)
            for part, state in zip(unit, optimizer.state, strict=True)
        }
        self.check()

    def _parameters(self) -> Iterator[tuple[TensorSpec, Any]]:
        """Iterate over the nn.Parameters, which carry DeepSpeed's attributes, each with the specification of its
        tensor."""
        model: Transformer = self._ds.module
        return ((model.specs[name], parameter) for name, parameter in model.named_parameters())

    def _ranks(self) -> dist.ProcessGroup | None:
        """Return the ranks that hold each tensor between them. At stage 0 every replica holds all tensors."""
        if dist.get_world_size() == 1:
            return None
        return self._groups.tp_group if self._stage == 0 else dist.group.WORLD

    def _split(self, number_of: Mapping[str, int]) -> list[list[_Part]]:
        """Split the parts into those that DeepSpeed has the optimizer update at once: groups of parameters. All ranks
        get the same parts in the same order."""
        units: dict[int, list[_Part]] = {}
        for part in self._parts:
            key = number_of[part.piece.spec.name] if self._stage == 0 else id(part.master)
            units.setdefault(key, []).append(part)
        return list(units.values())

    def _part(self, spec: TensorSpec, parameter: Any, number: int) -> _Part:
        """Find the part of a parameter that this rank keeps, in the memory of group `number`."""
        start, stop, first, master = self._range(parameter, number)
        placed = place(spec, self._groups)
        weight = master.detach().view(-1)[first : first + stop - start]
        return _Part(TensorPiece(spec, placed.slice, placed.slices, start, stop, weight), parameter, master, first)

    def _range(self, parameter: Any, number: int) -> tuple[int, int, int, Tensor]:
        """Return the range of the parameter that this rank keeps, its position in a master tensor, and that tensor."""
        if self._stage == 0:
            return 0, parameter.numel(), 0, parameter
        master, fragment = self._optimizer.param_groups[number]["params"][0], parameter._hp_mapping
        if fragment is None:
            return 0, 0, 0, master
        inside, flat = fragment.lp_fragment_address, fragment.hp_fragment_address
        return inside.start, inside.start + inside.numel, flat.start, master

    def owned(self, chosen: Callable[[TensorSpec], bool] = every) -> Iterator[Owned]:
        """Iterate over the part of each chosen tensor that this rank keeps: see step.Engine."""
        for part in self._parts:
            piece = part.piece
            if chosen(piece.spec):
                yield Owned(
                    piece.spec,
                    piece.start,
                    piece.stop,
                    weight=piece.weight,
                    state=self._state[piece.spec.name],
                    # At stage 0 the masters are the parameters themselves.
                    copies=(part.parameter.data.view(-1),) if self._stage else (),
                    twin=self._stage == 0 and self._groups.replica_rank > 0,
                )

    def gradients(self, masters: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
        """Return the gradients of the parts in `masters`, with the names of their tensors. DeepSpeed updates one group
        of parameters after the other, so the gradients of other groups do not exist yet or are already freed."""
        present = {id(master) for master in masters}
        return [
            (part.piece.spec.name, part.gradient)
            for part in self._parts
            if id(part.master) in present and len(part.piece.weight)
        ]

    def update(self, masters: Sequence[Tensor], lr: float, number: int) -> None:
        """Make update `number` (the first is 1) of the parts in `masters`, which are those of whole units;
        collective."""
        present = {id(master) for master in masters}
        for unit, optimizer in zip(self._units, self._optimizers, strict=True):
            if id(unit[0].master) in present:
                optimizer.step([part.gradient for part in unit], lr, number)

    @torch.no_grad()
    def check(self) -> None:
        """Check that each master, rounded to the model's dtype, equals the range of its parameter that the model
        computes with; collective. If DeepSpeed's memory is reordered or has another copy of the weights, the run ends
        here, and no checkpoint gets weights under wrong names. Raises ConfigError on every rank if a master differs on
        any rank."""
        # At stage 0 the masters are the parameters themselves.
        if self._stage == 0:
            return
        wrong = torch.tensor(len(self._parts), device=self._device)
        for number, part in enumerate(self._parts):
            piece = part.piece
            values = part.parameter.data.view(-1)[piece.start : piece.stop]
            differs = (values != piece.weight.to(values.dtype)).any()
            wrong = torch.where(differs, wrong.clamp(max=number), wrong)
        dist.all_reduce(wrong, op=dist.ReduceOp.MIN)
        if wrong < len(self._parts):
            name = self._parts[int(wrong)].piece.spec.name
            raise ConfigError(
                f"{name}: what the optimizer keeps of this parameter is not what the "
                f"model computes with: DeepSpeed {version('deepspeed')} has weights in an order, or in copies, that "
                "checkpoints do not know: install the version of constraints.txt"
            )

    def spread(self) -> None:
        """Copy the masters to every other copy of the weights; collective. At ZeRO 0 the state of the first replica is
        sent to all replicas."""
        if self._stage == 0:
            for owned in self.owned() if self._groups.num_replicas > 1 else ():
                for kind in owned.kinds:
                    values = owned.read(kind)
                    dist.broadcast(values, group=self._groups.replica_group, group_src=0)
                    owned.write(kind, values)
        else:
            self._gather()

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
