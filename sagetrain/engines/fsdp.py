"""The engine that shards weights, gradients and optimizer state with torch's FSDP2 (`fully_shard`).

It is made of weights (model_weights.py), sums of gradients (gradient_sums.py), shards with their optimizers (shards.py)
and a traversal (traversal.py, piped.py, replayed.py, replayed_stage.py). This module, sharding.py and hooks.py are the
places that use FSDP's names, which differ between torch 2.8 and 2.14. They use public calls alone. The stages of ZeRO
are settings of one mechanism:

stage  a rank keeps for good     weights are gathered         gradients are reduced
0      everything                never                        once a step, by an all-reduce
1      its shards                behind each update           once a step, by a reduce-scatter
2      its shards                once a step                  in every micro-step
3      its shards                in every pass                in every micro-step

- The sharded parameters are the fp32 masters. The model computes with gathered copies in training.dtype. The
gradients of micro-steps, and of ranks, are summed in fp32.
- At ZeRO 0 to 2 the engine keeps the gathered copies, renews them, and reduces gradients itself. No micro-step goes
through FSDP's hooks, whose time on the host is a quarter of a micro-step's. A single replica has nothing to reduce.
There the optimizer reads the sums themselves.
- At ZeRO 3 the engine fetches the weights of blocks itself (passing_blocks.py), without hooks, and inside a host copy
engines reduce gradients (copied_reduction.py). FSDP's hooks run there with a single replica or with experts.
- From ZeRO 2 on FSDP's hooks run with copies of shards (shard_size), with experts that ranks have between them, with
state in the host's memory, and in pipelines.
- A block normalizes for the next block, so the gains of all norms belong to the outermost unit of parameters, which
stays gathered from its forward pass to the end of its backward pass. Each block is a unit of its own.
- The optimizer works on plain local tensors and never sees a DTensor.
- A shard is whole rows of a tensor-parallel slice, and so one range of the flattened slice, as checkpoints need it.
- With parallel.offload the shards, their gradients and the moments are in the host's memory, and the CPU makes the
update. Gathers copy shards to the GPU. At ZeRO 1 each shard travels once a step, and so does each gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from sagetrain.checkpoint.stateful import Owned
from sagetrain.config.layout import Layout
from sagetrain.config.schema import RunConfig
from sagetrain.data.batch import Batch
from sagetrain.engines.copied_reduction import reduction_of
from sagetrain.engines.gather import how_gathered
from sagetrain.engines.gradient_sums import HostSums, LeafSums, ShardedSums
from sagetrain.engines.gradients import Decision, StepGradients
from sagetrain.engines.hooks import Hooks
from sagetrain.engines.kept_weights import KeptWeights
from sagetrain.engines.model_weights import GatheredWeights, PassingWeights, ResidentWeights
from sagetrain.engines.piped import Piped, StagePasses
from sagetrain.engines.protocol import Probe, every
from sagetrain.engines.recorder import Recorder, recorder_of
from sagetrain.engines.replayed import Replayed
from sagetrain.engines.replayed_stage import ReplayedPipe
from sagetrain.engines.room import Room
from sagetrain.engines.sharding import gather_once, shard_model, units
from sagetrain.engines.shards import Shards
from sagetrain.engines.step import Engine
from sagetrain.model.chunks import ModelChunk
from sagetrain.model.tensors import TensorSpec
from sagetrain.model.transformer import Transformer
from sagetrain.optim.build import build_optimizer
from sagetrain.optim.build import groups as groups_of
from sagetrain.parallel.pipeline import Pipe


class FsdpEngine(Engine, StagePasses):
    """An engine on torch's FSDP2, for any gradient accumulation at any ZeRO stage.

    Args:
        model: a model that was made with `partitioner`.
    """

    def __init__(self, cfg: RunConfig, model: Transformer) -> None:
        groups, offload = model.groups, cfg.parallel.offload
        device, layout = cast(Any, next(model.parameters())).shard.device, Layout.of(cfg, groups.topology.world_size)
        # This comes first, because recordings are made on another stream than the default one.
        record, by_host = recorder_of(cfg.training.cuda_graphs, layout.not_recorded, model, device)
        # Gradients are clipped as the optimizer reads them, so observers see them as they were.
        shown = StepGradients(model, device, 0.0, layout.copies, layout.expert_copies)
        super().__init__(model, device, shown)
        stage, unhooked = layout.zero_stage, layout.hooks == "never"
        passing, self._stage = unhooked and stage == 3, stage
        dtype = torch.bfloat16 if cfg.training.dtype == "bf16" else torch.float32
        # A number would be a part of the program of a micro-step, and the program stays the same if this changes.
        self._share = model.share
        parts = units(model, layout, device)
        hooked = stage == 3 and not unhooked
        parameters = shard_model(model, parts, device, dtype, reshard=hooked, offloaded=offload != "none")
        self.settings = {
            "zero_stage": stage,
            "shard_size": layout.shards,
            "copies": layout.copies,
            "param_dtype": str(dtype),
            "reduce_dtype": str(torch.float32),
            "reshard_after_forward": stage == 3,
            "gathers": how_gathered(parts, device, by_hooks=not passing),
            "gradient_sync": "every micro-step" if stage > 1 else "last micro-step",
            "offload": offload,
            "micro_steps": f"launched by the host: {by_host}" if by_host else "as CUDA graphs",
        }
        gathered = gather_once(model, parts, stay=unhooked, pass_by=passing)
        rules, build = groups_of(model.every_spec.values(), cfg), partial(build_optimizer, cfg)
        largest = cfg.optimizer.clip_grad or math.inf
        self._shards = Shards(model, parameters, parts, device, rules, build, layout.replicas, largest)
        masters = self._shards.masters
        kept = KeptWeights(unhooked and device.type == "cuda") if stage < 3 and cfg.linear.low_bit else None
        pipe = Pipe(groups, cfg.parallel.pipeline_chunks) if groups.pp_size > 1 else None
        self._weights: GatheredWeights
        self._sums: ShardedSums
        if unhooked:
            whole = ResidentWeights(model, parts, gathered, kept, masters) if stage < 3 else None
            self._weights = whole = whole or PassingWeights(model, parts, gathered, masters)
            reduction = reduction_of(layout, parts, whole.leaves, masters)
            self._sums = sums = LeafSums(parameters, masters, whole.leaves, reduction)
            if record:
                recorder = Recorder(self, record, whole, sums, timed=cfg.training.cuda_graphs == "auto")
                self._traversal = ReplayedPipe(self, pipe, dtype, recorder) if pipe else Replayed(self, recorder)
        else:
            self._weights = GatheredWeights(model, parts, gathered, kept)
            # At ZeRO 2 and 3 gradients come to the host in every micro-step.
            self._sums = (HostSums if offload != "none" and stage > 1 else ShardedSums)(parameters, masters)
        if groups.ep_size > 1:
            self.room = Room(model, cfg.parallel.expert_room, device)
        self._hooks = Hooks(model, layout, isinstance(self._sums, HostSums), parts)
        if pipe and not record:
            self._traversal = Piped(self, pipe, dtype)

    # -- what it keeps -------------------------------------------------------------------------------------------

    def owned(self, chosen: Callable[[TensorSpec], bool] = every) -> Iterator[Owned]:
        """Iterate over the part of each tensor that this rank keeps: see step.Engine."""
        return self._shards.owned(chosen)

    def leaves(self) -> Mapping[str, Tensor]:
        """Return the tensors that receive gradients from autograd, by name. Those of states are none."""
        return {name: leaf for name, leaf in self._weights.leaves.items() if self.model.specs[name].kind != "state"}

    def gathered(self) -> Mapping[str, Tensor]:
        """Return the whole weights of this tensor-parallel rank: see step.Engine."""
        self._weights.gather()
        return self._weights.leaves

    def weights_changed(self) -> None:
        """Renew what depends on the masters, which have changed: the next pass gathers them again."""
        self._weights.reload()

    def state_changed(self, optimizer_steps: int | None = None) -> None:
        """Bring all copies of the weights in line with the masters: see step.Engine."""
        self._shards.spread()
        self.weights_changed()
        if optimizer_steps is not None:
            self.optimizer_steps = optimizer_steps

    def _weights_written(self) -> None:
        self._weights.written()

    # -- a step --------------------------------------------------------------------------------------------------

    def _prepare(self, micro_batches: int, lr: float) -> None:
        self._lr = lr
        self._share.fill_(1 / micro_batches)
        self._sums.begin(micro_batches)
        self.model.train()
        # Probes come first, whose gradients are for nobody else.
        self._hooks.rest()

    def _probe(self, batches: Iterable[Batch], probes: Sequence[Probe], masked: bool) -> Iterable[Batch]:
        # Probes change how layers multiply, so layers make their 8-bit weights of this step before. At ZeRO 3 they make
        # none, and gathered blocks would stay.
        if self._stage < 3:
            self._weights.gather()
        return super()._probe(batches, probes, masked)

    def _prepare_evaluation(self) -> None:
        self.model.eval()

    def run(self, inputs: Mapping[str, Any]) -> Tensor:
        """Call the model: see step.Engine."""
        result: Tensor = self._weights.run(inputs)
        return result

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of a micro-batch's loss to the step's gradient: see step.Engine."""
        self.expect(last)
        (loss * self._share).backward()
        self.add()

    def expect(self, last: bool, ended: ModelChunk | None = None, only: bool = False) -> None:
        """Prepare for a backward pass: see StagePasses."""
        blocks = [cast(Any, self.model.blocks.get_submodule(str(number))) for number in ended.blocks] if ended else []
        self._hooks.expect(last, blocks, only)
        self._sums.expect(last, blocks)

    def add(self) -> None:
        """Add the gradients that a backward pass has left: see StagePasses."""
        self._sums.add()

    def _update(self, decision: Decision) -> bool:
        """Let the shards ask the decision, and update the masters or leave them."""
        return self._shards.update(self._sums.take(), decision, self._lr, self.optimizer_steps + 1)
