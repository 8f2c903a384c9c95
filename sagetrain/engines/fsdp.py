"""The engine that shards weights, gradients and optimizer state with torch's FSDP2 (`fully_shard`).

This module and sharding.py are the places that use FSDP's names, which differ between torch 2.8 and 2.14. They use
public calls alone. The stages of ZeRO are settings of one mechanism:

stage  a rank keeps for good     weights are gathered         gradients are reduced
0      everything                never                        once a step, by an all-reduce
1      its shards                behind each update           once a step, by a reduce-scatter
2      its shards                once a step                  in every micro-step
3      its shards                in every pass                in every micro-step

- The sharded parameters are the fp32 masters. The model computes with gathered copies in training.dtype. The
gradients of micro-steps, and of ranks, are summed in fp32.
- At ZeRO 0 and 1 the engine keeps the gathered copies and renews them itself. Only the last micro-step, which reduces,
needs FSDP. The others call the model without its hooks, whose time on the host is a quarter of a micro-step's. A single
replica has nothing to reduce, and FSDP would copy each sum twice. There the optimizer reads the sums themselves.
- A block normalizes for the next block, so the gains of all norms belong to the outermost group of parameters, which
stays gathered from its forward pass to the end of its backward pass. Each block is a group of its own.
- The optimizer works on plain local tensors and never sees a DTensor.
- A shard is whole rows of a tensor-parallel slice, and so one range of the flattened slice, as checkpoints need it.
- With parallel.offload the shards, their gradients and the moments are in the host's memory, and the CPU makes the
update. Gathers copy shards to the GPU. At ZeRO 1 each shard travels once a step, and so does each gradient.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from sagetrain.config.errors import TrainingError
from sagetrain.config.layout import Layout
from sagetrain.config.schema import RunConfig
from sagetrain.data.loader import Batch
from sagetrain.engines.flow import Flow
from sagetrain.engines.gather import gather_by_copies
from sagetrain.engines.gradient_sums import HostSums, LeafSums, OwnSums, ShardedSums
from sagetrain.engines.kept_weights import KeptWeights
from sagetrain.engines.protocol import Observers, Owned, Probe, Watched, every
from sagetrain.engines.replayed import Replayed, recorder_of
from sagetrain.engines.sharding import Shard, mesh_of, rows_of, shard_model
from sagetrain.engines.step import BaseEngine, Decision
from sagetrain.engines.whole_weights import WholeWeights
from sagetrain.model.chunks import ModelChunk
from sagetrain.model.staged import Staged
from sagetrain.model.tensors import EMBEDDING, TensorSpec
from sagetrain.model.transformer import Transformer, changed
from sagetrain.optim.build import build_optimizer
from sagetrain.optim.build import groups as groups_of
from sagetrain.optim.pieces import Optimizer, State, TensorPiece, Weights
from sagetrain.parallel.pipeline import Pass, Pipe
from sagetrain.parallel.topology import ParallelGroups


def _norms(gradients: list[Tensor]) -> Tensor:
    """Return fp32 norms of parts of the gradients, which cover them."""
    if gradients[0].is_cuda:
        return torch.stack(torch._foreach_norm(gradients, dtype=torch.float32))
    # A CPU computes one norm by one core, however long the vector is, and norms of rows by all of them.
    rows = (gradient.float().view(len(gradient), -1) for gradient in gradients)
    return torch.cat([torch.linalg.vector_norm(part, dim=1) for part in rows])


class FsdpEngine(BaseEngine):
    """An engine on torch's FSDP2, for any gradient accumulation at any ZeRO stage.

    Args:
        model: a model that was made with `partitioner`.
    """

    def __init__(self, cfg: RunConfig, model: Transformer, groups: ParallelGroups, micro_batches: int) -> None:
        own: dict[str, Shard] = {name: cast(Any, p).shard for name, p in model.named_parameters()}
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        device, self._offload = next(iter(own.values())).device, cfg.parallel.offload
        home = torch.device("cpu") if self._offload != "none" else device
        self._layout = layout = Layout.of(cfg, groups.topology.world_size)
        self._stage, self.takes_probes, shards = layout.zero_stage, layout.takes_probes, layout.shards
        # Gradients are clipped as the optimizer reads them, so observers see them as they were.
        # This comes first, because recordings are made on another stream than the default one.
        record, self._by_host = recorder_of(cfg.training.cuda_graphs, layout.not_recorded, model, device)
        super().__init__(model, groups, device, clip=0.0, copies=layout.copies)
        self._largest_norm = cfg.optimizer.clip_grad or math.inf
        self.dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[cfg.training.dtype]
        # Blocks return views of what they compute, and FSDP warns that nothing may change these in place. Nothing does.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
        mesh, self._copies = mesh_of(groups, shards, device)
        shard_model(model, mesh, self.dtype, reshard=self._stage == 3, offloaded=self._offload != "none")
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in self._modules if device.type == "cpu" else ():
            module.set_force_sum_reduction_for_comms(True)  # Gloo has no mean.
        neighbours, self._gathers = mesh.get_group("shard") if shards > 1 else None, f"by {dist.get_backend()}"
        if neighbours and device.type == "cuda":
            # The outermost group is always gathered once a step, and would need the largest slots.
            refusal = gather_by_copies(self._modules[1:], neighbours)
            self._gathers = f"{self._gathers}: {refusal}" if refusal else "by copy engines"
        self._root = cast(FSDPModule, model)
        self._pipe = Pipe(groups, cfg.parallel.pipeline_chunks) if groups.pp_size > 1 else None
        self._ends = groups.ends_group if cfg.model.tie_embeddings else None
        # The last stage has a copy of a tied embedding.
        self._is_copy = self._ends is not None and groups.pp_rank > 0
        model.to_empty(device=home)
        self._parameters: dict[str, Any] = dict(model.named_parameters())
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.to_local().copy_(own.pop(name).rows)
        # FSDP pads shards of unequal length here, and pins them, so this comes before their memory is taken over.
        self._bare = layout.hooks != "every micro-step"
        gathered = self._gathered_once()
        leaves = {name: leaf for group in gathered for name, leaf in group.items()}
        self._leaves = {name: leaves[name] for name in model.specs}
        self._alone = layout.hooks == "never"
        # A number would be a part of the program of a micro-step, and the program stays the same if this changes.
        self._share = torch.ones((), device=device)
        # Of tensors of other pipeline stages this rank keeps nothing.
        self._masters = {name: torch.empty(0, device=home) for name in model.every_spec}
        self._masters |= {name: p.to_local().detach() for name, p in self._parameters.items()}
        self._starts = dict.fromkeys(model.every_spec, 0) | {
            name: rows_of(shape[0], shards, groups.replica_rank % shards).start * math.prod(shape[1:])
            for name, shape in shapes.items()
        }
        self._begin_optimizers(cfg)
        self._whole = WholeWeights(gathered, self._masters, neighbours) if self._bare else None
        self._kept = (
            KeptWeights(self._bare and device.type == "cuda") if self._stage < 3 and cfg.linear.low_bit else None
        )
        for module in self._modules:
            # FSDP's own hook comes first and has gathered the weights.
            module.register_forward_pre_hook(lambda module, inputs: self._enter(module))
        self._weights_written()
        self._mode: tuple[bool, bool] | None = None
        self._hooked = False
        """If set, the next passes go through FSDP's hooks, although the engine keeps whole weights."""
        self._sums = self._sums_of_layout()
        self._replayed = None
        if record and isinstance(self._sums, LeafSums):
            how = model, self._sums, self._leaves, groups, device
            self._replayed = Replayed(record, self._pass, *how)

    def _sums_of_layout(self) -> ShardedSums:
        kept = self._parameters, self._masters
        if self._bare:
            return (OwnSums if self._alone else LeafSums)(*kept, self._leaves)
        # At ZeRO 2 and 3 gradients come to the host in every micro-step.
        return (HostSums if self._offload != "none" and self._stage > 1 else ShardedSums)(*kept)

    def _gathered_once(self) -> list[dict[str, Tensor]]:
        """Gather the weights of one group of parameters after the other, and return the tensors that the model computes
        with, by name, for each group. FSDP makes these tensors once, and only their memory comes and goes."""
        found: list[dict[str, Tensor]] = []
        for module in self._modules:
            module.unshard()
            every, seen = self.model.named_parameters(), {name for group in found for name in group}
            found.append({name: p for name, p in every if not hasattr(p, "to_local") and name not in seen})
            if not self._bare:
                module.reshard()
        return found

    # -- the optimizer -------------------------------------------------------------------------------------------

    def _begin_optimizers(self, cfg: RunConfig) -> None:
        """Make the optimizers of the masters, one for each group of tensors that are updated in the same way."""
        ranks, specs = self._holders(), self.model.every_spec
        self._optimizers: list[tuple[list[TensorPiece], Optimizer]] = []
        self._state: dict[str, Mapping[str, State]] = {}
        self._weights: dict[str, Weights] = {}
        for group in groups_of(specs.values(), cfg):
            pieces: dict[bool, list[TensorPiece]] = {True: [], False: []}
            for name in group.names:
                weight, start, spec = self._masters[name].view(-1), self._starts[name], specs[name]
                slices, place = (self.groups.tp_size, self.groups.tp_rank) if spec.cut else (1, 0)
                piece = TensorPiece(spec, place, slices, start, start + len(weight), weight)
                pieces[name in self.model.specs].append(piece)
            # The tensors of other pipeline stages have an optimizer too, which says what kinds of state they have.
            for here, some in pieces.items():
                if not some:
                    continue
                optimizer = build_optimizer(cfg, group, some, ranks if here else None)
                self._optimizers += [(some, optimizer)] if here else []
                names = [piece.spec.name for piece in some]
                self._state.update(zip(names, optimizer.state, strict=True))
                self._weights.update(zip(names, optimizer.weights, strict=True))

    def _holders(self) -> dist.ProcessGroup | None:
        """Return the ranks that hold each tensor between them: the tensor-parallel slices of neighbours that shard;
        collective."""
        if self._layout.copies == 1 and self.groups.pp_size == 1:
            return dist.group.WORLD if dist.get_world_size() > 1 else None
        if self._layout.shards == 1:
            return self.groups.tp_group if self.groups.tp_size > 1 else None
        size = self._layout.shards * self.groups.tp_size
        first = self.groups.rank // size * size
        return self.groups.subgroup(list(range(first, first + size)), "holders of a tensor")

    @torch.no_grad()
    def _step_optimizers(self, gradients: Mapping[str, Tensor], factor: float) -> None:
        """Update the masters by the gradients times a factor. The decision has waited for the GPU, which reads them."""
        # A rank among many may keep nothing, and torch takes no empty list.
        if factor != 1 and gradients:
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
            "shard_size": self._layout.shards,
            "copies": self._layout.copies,
            "param_dtype": str(self.dtype),
            "reduce_dtype": str(torch.float32),
            "reshard_after_forward": self._stage == 3,
            "gathers": self._gathers,
            "gradient_sync": "every micro-step" if self._stage > 1 else "last micro-step",
            "offload": self._offload,
            "micro_steps": f"launched by the host: {self._by_host}" if self._by_host else "as CUDA graphs",
        }

    def owned(self, chosen: Callable[[TensorSpec], bool] = every) -> Iterator[Owned]:
        """Iterate over the part of each tensor that this rank keeps: see engines/protocol.Engine."""
        for name, spec in self.model.every_spec.items():
            if chosen(spec):
                master, start = self._masters[name], self._starts[name]
                yield Owned(
                    spec,
                    start,
                    start + master.numel(),
                    weight=master.view(-1),
                    state=self._state[name],
                    masters=self._weights[name],
                    twin=self.groups.replica_rank >= self._layout.shards or (self._is_copy and name == EMBEDDING),
                )

    def leaves(self) -> Mapping[str, Tensor]:
        """Return the tensors that receive gradients from autograd, by name."""
        return self._leaves

    def gathered(self) -> Mapping[str, Tensor]:
        """Return the whole weights of this tensor-parallel rank: see engines/protocol.Engine."""
        for module in self._modules:
            module.unshard()
            self._enter(module)
        return self._leaves

    def weights_changed(self) -> None:
        """Renew what depends on the masters, which have changed: the next pass gathers them again."""
        for module in self._modules if not self._whole else ():
            module.reshard()
        self._weights_written()

    @torch.no_grad()
    def state_changed(self, optimizer_steps: int | None = None) -> None:
        """Bring all copies of the weights in line with the masters: see engines/protocol.Engine."""
        if self._copies is not None:
            self._copy(self._copies, self.owned(lambda spec: spec.name in self.model.specs))
        if self._ends is not None:
            self._copy(self._ends, self.owned(lambda spec: spec.name == EMBEDDING))
        self.weights_changed()
        if optimizer_steps is not None:
            self.optimizer_steps = optimizer_steps

    def _copy(self, ranks: dist.ProcessGroup, every: Iterable[Owned]) -> None:
        """Copy masters and optimizer state from the first of `ranks` to the others."""
        for owned in every:
            for kind in owned.kinds:
                values = owned.read(kind).to(self.device)
                dist.broadcast(values, group=ranks, group_src=0)
                owned.write(kind, values)

    def _weights_written(self) -> None:
        """Begin to renew the whole weights, and let every block renew its 8-bit weights in its next forward pass, once
        for all micro-batches of a step."""
        if self._whole:
            self._whole.renew()
        self._stale: dict[nn.Module, int] = {module: number for number, module in enumerate(self._modules)}

    def _enter(self, module: nn.Module) -> None:
        """Make the weights of a module ready for its forward pass."""
        number = self._stale.pop(module, None)
        if number is None:
            return
        if self._whole:
            self._whole.wait(number)
        if self._kept and module is not self.model:
            self._kept.renew(module)

    # -- a step --------------------------------------------------------------------------------------------------

    def _prepare(self, micro_batches: int, lr: float) -> None:
        self._micro_batches, self._lr = micro_batches, lr
        self._share.fill_(1 / micro_batches)
        self._sums.begin(micro_batches)
        self.model.train()
        # Probes come first, whose gradients are for nobody else.
        self._set_mode(sync=False, last=False)

    def _probe(self, batches: Iterable[Batch], probes: Sequence[Probe], masked: bool) -> Iterable[Batch]:
        # Probes change how layers multiply, so layers make their 8-bit weights of this step before. At ZeRO 3 they make
        # none, and gathered blocks would stay.
        for module in self._modules if self._stage < 3 else ():
            module.unshard()
            self._enter(module)
        return super()._probe(batches, probes, masked)

    def _prepare_evaluation(self) -> None:
        self.model.eval()

    def _run(self, inputs: Mapping[str, Any]) -> Tensor:
        if self._hooked or not self._bare:
            return cast(Tensor, self.model(**inputs))
        self._enter(self.model)
        with changed({(self.model, "without_hooks"): self._enter}):
            result: Tensor = self.model.forward(**inputs)
        return result

    def _micro_step(self, number: int, batch: Batch, last: bool, observers: Observers) -> None:
        self._hooked = self._bare and last and not self._alone
        seen = observers.layer_norms or (observers.watch and number == 0)
        if self._replayed and self._replayed.ready and not self._hooked and not seen:
            self._replayed.run(batch.inputs(torch.device("cpu")), observers.noise)
        else:
            super()._micro_step(number, batch, last, observers)
        self._hooked = False

    def _pass(self, inputs: Mapping[str, Any]) -> None:
        """Run forward and backward over a micro-batch that is not the last one, and add its loss to the sum."""
        loss = self._run(inputs)
        self.backward(loss, last=False)
        self._total += loss.detach()

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
        # Between the copies of shards, sums travel once a step. FSDP holds back a group's sums as one vector, and each
        # chunk gives gradients to other tensors of the outermost group, whose sums therefore travel after every pass.
        root.set_requires_all_reduce(last)
        root.set_requires_all_reduce(last or len(self.model.chunks) > 1, recurse=False)
        # After its last pass FSDP forgets the order of passes, and waits for its copies to the host, as HostSums needs.
        root.set_is_last_backward(last or self._bare or isinstance(self._sums, HostSums))
        root.set_reshard_after_backward(not self._bare and (last or self._stage == 3))
        if not last:
            # The outermost group is needed from the begin of a pass to its end, so giving it back saves no memory.
            root.set_reshard_after_backward(False, recurse=False)

    def _last_of_chunk(self, chunk: ModelChunk) -> None:
        """Let the next backward pass, which is the last one through this chunk but not through the model's part here,
        reduce the gradients of the chunk's blocks."""
        for number in chunk.blocks:
            block = cast(FSDPModule, self.model.blocks.get_submodule(str(number)))
            block.set_requires_gradient_sync(True, recurse=False)
            block.set_requires_all_reduce(True, recurse=False)
            block.set_reshard_after_backward(True, recurse=False)
        if self._micro_batches == 1:
            # FSDP reduces no group of sums in fp32, from other chunks, beside new gradients in training.dtype.
            self._root.set_requires_gradient_sync(True, recurse=False)
        self._mode = None

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of a micro-batch's loss to the step's gradient: see BaseEngine."""
        sync = (last or self._stage > 1) and not self._alone
        self._set_mode(sync, last=last and not self._alone)
        self._sums.expect(reduced=sync)
        (loss * self._share).backward()
        self._sums.add()

    # -- a pipeline ----------------------------------------------------------------------------------------------

    def _run_micro_batches(
        self, batches: Iterable[Batch], micro_batches: int, observers: Observers, masked: bool
    ) -> Tensor:
        if self._pipe is None:
            if self._replayed:
                for module in list(self._stale):
                    self._enter(module)
                self._replayed.begin()
            return super()._run_micro_batches(batches, micro_batches, observers, masked)
        flow, watched = Flow(self, self.dtype, batches), list[Watched]()
        total, left = torch.zeros((), device=self.device, dtype=torch.float64), micro_batches * len(flow.chunks)

        def watching(number: int, micro: int, backward: bool) -> AbstractContextManager[None]:
            if len(watched) == micro:
                watched.append(self._watched(micro, flow.batch(micro), observers))
            return watched[micro].passing(flow.chunks[number].blocks, backward)

        def forward(number: int, micro: int, streams: Sequence[Tensor]) -> Sequence[Tensor]:
            with watching(number, micro, backward=False):
                made = flow.run(number, micro, streams)
            if flow.chunks[number].last:
                total.add_(made[0].detach())
                return [made[0] * self._share]
            return made

        def backward(number: int, micro: int, later: int, run: Pass) -> None:
            nonlocal left
            left -= 1
            self._set_mode(sync=not left or self._stage > 1, last=not left)
            if left and not later:
                self._last_of_chunk(flow.chunks[number])
            if masked and number == self.model.chunks[0].number:
                self._count(flow.batch(micro), observers)
            with watching(number, micro, backward=True), self._noise_of(observers):
                run.run()

        self._pipe.run(micro_batches, forward, flow.like, backward)
        for each in watched:
            each.end()
        flow.take_rest()
        return total

    def gradients(self, batch: Batch, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run a micro-batch apart from a step: see BaseEngine."""
        if self._pipe is None:
            return super().gradients(batch, leaves)
        flow, found = Flow(self, self.dtype, [batch]), dict[int, Tensor]()

        def backward(number: int, micro: int, later: int, run: Pass) -> None:
            for place, gradient in enumerate(run.gradients_of(leaves)):
                # Each leaf belongs to one of the stage's chunks.
                if gradient is not None:
                    found[place] = gradient

        self._pipe.run(1, flow.run, flow.like, backward)
        return [found[place] if place in found else torch.zeros_like(leaf) for place, leaf in enumerate(leaves)]

    def as_whole(self, model: Transformer) -> Callable[..., Tensor]:
        """Return a function that calls the model: see engines/protocol.Engine."""
        return Staged(model, self._pipe, self.dtype) if self._pipe else model

    def waits(self) -> str:
        """Return what this rank waits for: see engines/protocol.Engine."""
        return self._pipe.waits() if self._pipe else ""

    def _token_losses(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, Tensor, Tensor]]:
        if self._pipe is None:
            yield from super()._token_losses(batches)
            return
        rest = iter(batches)
        # More micro-batches at once would idle less, and a signal to stop would wait for longer.
        while some := list(itertools.islice(rest, 4 * self._pipe.size)):
            flow, found = Flow(self, self.dtype, some, by_token=True), list[Tensor]()

            def forward(number: int, micro: int, streams: Sequence[Tensor]) -> Sequence[Tensor]:
                made = flow.run(number, micro, streams)  # noqa: B023
                if flow.chunks[number].last:  # noqa: B023
                    found.extend(made)  # noqa: B023
                    return []
                return made

            self._pipe.run(len(some), forward, flow.like)
            for micro, losses in enumerate(found):
                yield some[micro], flow.inputs(micro)["labels"], losses

    def _update(self, decision: Decision) -> bool:
        """Measure the norm of the gradients, ask the decision, and update the masters or leave them."""
        gradients = self._sums.take()
        lacking = [name for name in self._parameters if self._masters[name].numel() and name not in gradients]
        if lacking:
            raise TrainingError(
                f"{lacking[0]} has no gradient in this step (tensors without one: {len(lacking)}): the loss of every "
                "micro-batch has to depend on all tensors of the model, and none may be frozen (requires_grad)"
            )
        if self._ends is not None and EMBEDDING in gradients:
            # The embedding's gradient has a part from the first stage and one from the last. Both get the sum.
            dist.all_reduce(gradients[EMBEDDING], group=self._ends)
        own = {name: gradient for name, gradient in gradients.items() if not (self._is_copy and name == EMBEDDING)}
        # The squares travel with the step's metrics. Each element of the model counts once.
        counted = [
            gradient
            for name, gradient in own.items()
            if self.groups.replica_rank < self._layout.shards
            and (self.model.specs[name].cut or self.groups.tp_rank == 0)
        ]
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        if counted:
            square = _norms(counted).to(self.device).double().square().sum()
        self.groups.metrics.derive("train/grad_norm", math.sqrt, square)
        allowed = decision.allows()
        norm = decision.metrics["train/grad_norm"]
        decision.show(lambda: [(name, gradient.view(-1).float()) for name, gradient in own.items()])
        if not (allowed and math.isfinite(norm)):
            return False
        self._step_optimizers(gradients, min(1.0, self._largest_norm / (norm + 1e-6)))
        return True
