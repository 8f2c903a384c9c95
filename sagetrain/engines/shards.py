"""The shards of a model's tensors that a rank keeps for good: the masters, and their update by a step's gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sagetrain.checkpoint.stateful import Owned
from sagetrain.config.errors import TrainingError
from sagetrain.engines.gradients import Decision
from sagetrain.engines.protocol import every
from sagetrain.engines.sharding import Unit, UnitRanks
from sagetrain.model.placement import first_of, place
from sagetrain.model.tensors import EMBEDDING, TensorSpec
from sagetrain.model.transformer import Transformer
from sagetrain.optim.build import Group
from sagetrain.optim.pieces import Optimizer, State, TensorPiece, Weights
from sagetrain.stability.balance import Balance


def _norms(gradients: list[Tensor]) -> Tensor:
    """Return fp32 norms of parts of the gradients, which cover them."""
    if gradients[0].is_cuda:
        return torch.stack(torch._foreach_norm(gradients, dtype=torch.float32))
    # A CPU computes one norm by one core, however long the vector is, and norms of rows by all of them.
    rows = (gradient.float().view(len(gradient), -1) for gradient in gradients)
    return torch.cat([torch.linalg.vector_norm(part, dim=1) for part in rows])


class Shards:
    """The shards of one rank, which are plain local tensors.

    Args:
        parameters: FSDP's parameters by name.
        units: the groups of parameters, which have the ranks of each.
        device: the device of collectives.
        rules: the groups of tensors, each with the way it is updated.
        build: builds the optimizer of pieces of a group: see optim/build.build_optimizer.
        replicas: the number that the gradients' sums over ranks were divided by.
        largest_norm: the largest global norm of the gradients that the optimizer gets.
    """

    def __init__(
        self,
        model: Transformer,
        parameters: Mapping[str, Any],
        units: Sequence[Unit],
        device: torch.device,
        rules: Sequence[Group],
        build: Callable[[Group, Sequence[TensorPiece], dist.ProcessGroup | None], Optimizer],
        replicas: int,
        largest_norm: float,
    ) -> None:
        groups, self._specs, self._here, self._device = model.groups, model.every_spec, model.specs, device
        self._groups = groups
        self._largest_norm = largest_norm
        # Of tensors of other pipeline stages nothing is kept, by the same ranks as of those outside of blocks.
        self._ranks = dict.fromkeys(model.every_spec, units[0].ranks)
        self._ranks |= {name: unit.ranks for unit in units for name in unit.names}
        self._ends = groups.ends_group if model.config.tie_embeddings else None
        # The last stage has a copy of a tied embedding.
        self._is_copy = self._ends is not None and groups.pp_rank > 0
        self.masters = {name: p.to_local().detach() for name, p in parameters.items()}
        """This rank's rows of each tensor, by name."""
        home = next(iter(self.masters.values())).device
        self.masters = {name: torch.empty(0, device=home) for name in model.every_spec} | self.masters
        self._starts = dict.fromkeys(model.every_spec, 0) | {
            name: first_of(self._specs[name], groups) + self._ranks[name].rows(len(p)).start * math.prod(p.shape[1:])
            for name, p in parameters.items()
        }
        self._optimizers: list[tuple[list[TensorPiece], Optimizer]] = []
        self._state: dict[str, Mapping[str, State]] = {}
        self._weights: dict[str, Weights] = {}
        # What no optimizer updates has no state of one.
        self._state.update((name, {}) for name, spec in self._specs.items() if spec.kind == "state")
        for rule in rules:
            self._build_optimizers(rule, build)
        self._balance = None
        if model.config.experts:
            of_rank = self._specs, self.masters, self._starts, self._counts
            self._balance = Balance(model.config, *of_rank, replicas, groups.metrics)

    def _build_optimizers(self, rule: Group, build: Callable[..., Optimizer]) -> None:
        """Build an optimizer for the tensors of a group that have the same ranks."""
        pieces: dict[UnitRanks | None, list[TensorPiece]] = {}
        for name in rule.names:
            weight, start, spec = self.masters[name].view(-1), self._starts[name], self._specs[name]
            placed = place(spec, self._groups)
            piece = TensorPiece(spec, placed.slice, placed.slices, start, start + len(weight), weight)
            pieces.setdefault(self._ranks[name] if name in self._here else None, []).append(piece)
        # The tensors of other pipeline stages have an optimizer too, which says what kinds of state they have.
        for ranks, some in pieces.items():
            optimizer = build(rule, some, ranks.holders if ranks else None)
            self._optimizers += [(some, optimizer)] if ranks else []
            names = [piece.spec.name for piece in some]
            self._state.update(zip(names, optimizer.state, strict=True))
            self._weights.update(zip(names, optimizer.weights, strict=True))

    # -- the update ----------------------------------------------------------------------------------------------

    def update(self, gradients: dict[str, Tensor], decision: Decision, lr: float, number: int) -> bool:
        """Measure the norm of this rank's part of the gradients, ask the decision, and make update `number` (the first
        is 1) of the masters or leave them; collective. Return whether the update was made. Raises TrainingError if a
        tensor has no gradient."""
        self._complete(gradients)
        if self._balance:
            self._balance.take(gradients)
        # The squares travel with the step's metrics.
        self._groups.metrics.derive("train/grad_norm", math.sqrt, self._square(gradients))
        allowed = decision.allows()
        if self._balance:
            decision.metrics.update(self._balance.numbers())
        norm = decision.metrics["train/grad_norm"]
        decision.show(lambda: self._parts(gradients))
        if not (allowed and math.isfinite(norm)):
            return False
        self._step(gradients, min(1.0, self._largest_norm / (norm + 1e-6)), lr, number)
        if self._balance:
            self._balance.update()
        return True

    def _complete(self, gradients: Mapping[str, Tensor]) -> None:
        """Check that every tensor has a gradient, and sum what the ends of a pipeline have of a tied embedding's, and
        tensor-parallel ranks of tensors that saw their own tokens alone; collective."""
        lacking = [name for name in self._here if self.masters[name].numel() and name not in gradients]
        if lacking:
            raise TrainingError(
                f"{lacking[0]} has no gradient in this step (tensors without one: {len(lacking)}): the loss of every "
                "micro-batch has to depend on all tensors of the model, and none may be frozen (requires_grad)"
            )
        if self._ends is not None and EMBEDDING in gradients:
            # The embedding's gradient has a part from the first stage and one from the last. Both get the sum.
            dist.all_reduce(gradients[EMBEDDING], group=self._ends)
        for name, spec in self._here.items() if self._groups.tp_size > 1 else ():
            # Experts that ranks have between them were summed over all ranks that have copies of them.
            summed = spec.cut == "experts" and self._groups.ep_size > 1
            if spec.of_own_tokens and not summed and name in gradients:
                dist.all_reduce(gradients[name], group=self._groups.tp_group)

    def _square(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return this rank's part of the square of the global norm, fp64 on the device. Each element of the model
        counts on one rank."""
        counted = [g for name, g in gradients.items() if self._counts(name)]
        if not counted:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        return _norms(counted).to(self._device).double().square().sum()

    def _parts(self, gradients: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
        """Return gradients as their observers get them: 1-D in fp32, without a copied embedding's."""
        own = gradients.items()
        return [(name, g.view(-1).float()) for name, g in own if not (self._is_copy and name == EMBEDDING)]

    @torch.no_grad()
    def _step(self, gradients: Mapping[str, Tensor], factor: float, lr: float, number: int) -> None:
        """Update the masters by the gradients times a factor; collective. The decision has waited for the GPU, which
        reads the masters."""
        for pieces, optimizer in self._optimizers:
            # A rank that keeps nothing of a tensor has no gradient of it.
            of_pieces = [gradients[p.spec.name].view(-1) if len(p.weight) else p.weight for p in pieces]
            optimizer.step(of_pieces, lr, number, factor)

    # -- what it keeps -------------------------------------------------------------------------------------------

    def _counts(self, name: str) -> bool:
        """Return whether this rank's shard of a tensor counts, and no other rank's with the same values."""
        return place(self._specs[name], self._groups).counted and not self._twin(name)

    def _twin(self, name: str) -> bool:
        """Return whether another rank saves and counts this rank's shard of a tensor."""
        return self._ranks[name].twin or (self._is_copy and name == EMBEDDING)

    def owned(self, chosen: Callable[[TensorSpec], bool] = every) -> Iterator[Owned]:
        """Iterate over the shards: see step.Engine."""
        for name, spec in self._specs.items():
            if chosen(spec):
                master, start = self.masters[name], self._starts[name]
                yield Owned(
                    spec,
                    start,
                    start + master.numel(),
                    weight=master.view(-1),
                    state=self._state[name],
                    masters=self._weights.get(name),
                    twin=self._twin(name),
                )

    @torch.no_grad()
    def spread(self) -> None:
        """Copy masters and optimizer state to the ranks that have copies of them; collective."""
        for name in self._here:
            if (copies := self._ranks[name].copies) is not None:
                self._copy(copies, name)
        if self._ends is not None:
            self._copy(self._ends, EMBEDDING)

    def _copy(self, ranks: dist.ProcessGroup, name: str) -> None:
        """Copy what the first of `ranks` has of a tensor to the others."""
        for owned in self.owned(lambda spec: spec.name == name):
            for kind in owned.kinds:
                values = owned.read(kind).to(self._device)
                dist.broadcast(values, group=ranks, group_src=0)
                owned.write(kind, values)
