"""DeepSpeed's generated configuration, and one optimizer step by it. Beside this module only reduction.py, which does
something in its place, and masters.py, which knows where it keeps weights and moments, know DeepSpeed.

DeepSpeed is imported inside functions, so that planning and checking a run never pay for it. What is worked around
here was measured on DeepSpeed 0.19: with its own accumulation counting, a step after a change of tokens per step
fires early (we own the boundary: managed_gradient_accumulation is off); bf16 with ZeRO 0 applies weight decay before
training (we run it as ZeRO 1); fp32 with ZeRO 0 reports no gradient norm (we measure and clip it ourselves).
"""

from __future__ import annotations

import collections
import contextlib
import functools
import io
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sagetrain.checkpoint.ledger import fold
from sagetrain.config.arithmetic import overlaps_reduction, own_reduction, resolved_zero_stage
from sagetrain.config.schema import RunConfig
from sagetrain.data.loader import Batch
from sagetrain.engines.gradients import StepGradients
from sagetrain.engines.masters import Masters
from sagetrain.engines.protocol import Observers, StepResult
from sagetrain.engines.reduction import Reduction
from sagetrain.model.accounting import reduce_bucket_size
from sagetrain.model.transformer import Transformer
from sagetrain.optim.build import build_optimizer
from sagetrain.parallel.metrics import Metrics, ratio
from sagetrain.parallel.topology import Mpu, ParallelGroups
from sagetrain.stability.spikes import Verdict

_NOBODY = Observers()


def _never() -> bool:
    return False


def _counted(batch: Batch) -> int:
    """How many tokens of a micro-batch count in the loss."""
    return int((batch.labels >= 0).sum())


def deepspeed_config(cfg: RunConfig, num_replicas: int, accumulation: int, parameters: int) -> dict:
    """The dict handed to DeepSpeed: generated from the YAML plus the extra keys of its `deepspeed` section.

    Its batch sizes count what each replica works on, which under context parallelism are slices of sequences.
    parameters: of this tensor-parallel rank.
    """
    stage = resolved_zero_stage(cfg)
    zero = {"stage": stage, **cfg.deepspeed.get("zero_optimization", {})}
    overlap = overlaps_reduction(cfg) and not own_reduction(cfg)
    # The YAML's, if it has them.
    zero.update(reduce_bucket_size=reduce_bucket_size(cfg, parameters), overlap_comm=overlap)
    # Stage 0 leaves the norm unreported, so that stage clips in Engine._clip_stage0.
    generated = {
        "train_batch_size": cfg.data.micro_batch_size * accumulation * num_replicas,
        "train_micro_batch_size_per_gpu": cfg.data.micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "managed_gradient_accumulation": False,
        "gradient_clipping": cfg.optimizer.clip_grad if stage else 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 62,
    }
    if cfg.training.dtype == "bf16":
        # At stage 1 each gradient is added to its fp32 sum, and freed, as soon as backward has made it. Else all of
        # them are kept in bf16 too, zeroed and added to in every micro-batch.
        generated["bf16"] = {"enabled": True, "immediate_grad_update": True}
        # Without these two DeepSpeed rounds gradients to bf16 between ranks (and, at stage 1, on one rank as well).
        generated["data_types"] = {"grad_accum_dtype": "fp32"}
        generated["communication_data_type"] = cfg.parallel.gradient_reduction
    # DeepSpeed's own measure of throughput waits for the GPU before every micro-batch.
    return {"timers": {"throughput": {"enabled": False}}, **cfg.deepspeed, **generated}


def partitioner(cfg: RunConfig, groups: ParallelGroups) -> Callable[[nn.Parameter], None] | None:
    """What ZeRO 3 does to a parameter that has just got its values: every rank keeps its part. None at other stages.

    For Transformer(partition=...): so no rank ever holds the whole model. Collective.
    """
    if resolved_zero_stage(cfg) != 3:
        return None
    import deepspeed

    config, first = deepspeed_config(cfg, groups.num_replicas, 1, 1), []

    def partition(parameter: nn.Parameter) -> None:
        if first:
            first[0].convert_to_zero_parameters(param_list=[parameter])
            return
        first.append(parameter)
        deepspeed.zero.Init(
            module=nn.ParameterList(first),
            data_parallel_group=groups.replica_group,
            dtype=parameter.dtype,
            config_dict_or_path=config,
            mpu=Mpu(groups),
        )

    return partition


@torch.no_grad()
def _add_gradient(
    optimizer: Any,
    reduction: Reduction | None,
    parameter: nn.Parameter,
    group: int,
    place: int,
    clear_lp_grads: bool,
) -> None:
    """Add a parameter's gradient to its fp32 sum, in the place of DeepSpeed's BF16_Optimizer, which writes it out in
    fp32 first: one kernel for two, fewer calls, the same bits."""
    if parameter.grad is None:
        return
    total = optimizer.fp32_groups_gradients[group][place]
    total.add_(parameter.grad.view(total.shape))
    parameter._hp_grad = total
    optimizer.fp32_groups_has_gradients[group][place] = True
    if clear_lp_grads:
        parameter.grad.zero_()
    if reduction:
        reduction.added(group, place)


def _reduce_nothing(pipeline_parallel: bool = False) -> None:
    """Of one replica, whose gradients DeepSpeed would copy, reduce over itself, and copy back. The argument is its."""


class Engine(Masters):
    """One optimizer step at a time over a Transformer, with any accumulation, at any ZeRO stage."""

    def __init__(self, cfg: RunConfig, model: Transformer, groups: ParallelGroups, accumulation: int):
        import deepspeed

        self.groups, self.stage = groups, resolved_zero_stage(cfg)
        self._micro_batch, self._clip, self._norm = cfg.data.micro_batch_size, cfg.optimizer.clip_grad, 0.0
        # Shapes are noted before ZeRO 3 replaces every parameter by its partition, if it has not yet (partitioner).
        self._shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in model.named_parameters()}
        parameters = sum(torch.Size(shape).numel() for shape in self._shapes.values())
        self.config = deepspeed_config(cfg, groups.num_replicas, accumulation, parameters)
        for name, parameter in model.named_parameters():
            # DeepSpeed reads this mark: a tensor that is cut counts in the gradient norm on every rank of its group.
            parameter.tensor_model_parallel = model.specs[name].cut is not None
        self._base = build_optimizer(model, cfg.optimizer, cfg.stability.qk_gain.decay)
        if self.stage == 3 and getattr(model, "whole_blocks", False):
            deepspeed.utils.set_z3_leaf_modules(model, [type(model.blocks[0])])  # hooks before and behind a block alone
        self._synchronize = deepspeed.get_accelerator().synchronize
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints memory tables at every stage of this
            self._ds, *_ = deepspeed.initialize(
                model=model, optimizer=self._base, config=self.config, mpu=Mpu(groups), dist_init_required=False
            )
        self._reduction: Reduction | None = None
        if hasattr(optimizer := self._ds.optimizer, "fp32_groups_gradients"):
            if own_reduction(cfg) and groups.num_replicas == 1:
                optimizer.reduce_gradients = _reduce_nothing
            elif own_reduction(cfg):
                dtype = torch.bfloat16 if cfg.parallel.gradient_reduction == "bf16" else torch.float32
                bucket = reduce_bucket_size(cfg, parameters)
                self._reduction = Reduction(optimizer, model, groups, bucket, dtype)
            optimizer._update_hp_grad = partial(_add_gradient, optimizer, self._reduction)
        for state in self._flat_masters():
            self._ensure_state(state)
        # DeepSpeed writes weights behind the back of autograd's version counters: whoever wrote says so.
        self._keeps = self.stage < 3 and cfg.linear.low_bit
        self._renew()
        self.check_masters()
        own = [(shard.name, shard.tensors["weight"]) for shard in self.shards() if shard.tensors]
        copies = 1 if self.stage else groups.num_replicas
        self._gradients = StepGradients(self._base, own, self.module, groups, self.device, self._clip, copies)
        self._base.step = self._judged(self._base.step)

    def step(
        self,
        batches: Iterable[Batch],
        accumulation: int,
        lr: float,
        observers: Observers = _NOBODY,
        counted: int | None = None,
        stop: Callable[[], bool] = _never,
    ) -> StepResult:
        """Forward and backward over `accumulation` micro-batches, then one optimizer update at `lr`, if
        observers.judge allows. `counted`: tokens of all ranks' batches that count in the loss, which is their mean;
        None: all do. Where none does, loss and gradient are 0. `stop`: whether this rank was asked to stop, asked at
        the end of the step; all ranks learn of it.

        A step that is refused, or whose gradient DeepSpeed finds not finite, leaves the weights and the optimizer's
        state as they were, to the last bit.
        """
        noise, probes, watch = observers.noise, observers.probes, observers.watch
        if accumulation != self._ds.gradient_accumulation_steps():
            self._ds.set_train_batch_size(self._micro_batch * accumulation * self.groups.num_replicas)
        for group in self._base.param_groups:
            group["lr"] = lr
        self._ds.train()
        metrics = self.groups.metrics
        metrics.clear()
        self._layer_norms = observers.layer_norms
        self.module.watch_blocks = self._note_activation if observers.layer_norms else None
        total, count, samples = torch.zeros((), device=self.device, dtype=torch.float64), 0, []
        masked = counted is not None
        if probes:
            batches = iter(batches)
            first = list(itertools.islice(batches, max(probe.micro_batches for probe in probes)))
            own = [_counted(batch) for batch in first] if masked else None
            each = [replace(b, divisor=max(1, n)) for b, n in zip(first, own, strict=True)] if own else first
            runs = [partial(self.module, **self._inputs(batch)) for batch in each]
            for probe in probes:
                probe.measure(runs[: probe.micro_batches], own and own[: probe.micro_batches])
            batches = itertools.chain(first, batches)
        if counted is not None:  # DeepSpeed takes the mean over micro-batches and replicas
            divisor = max(counted, 1) / (accumulation * self.groups.dp_size)
            batches = (replace(batch, divisor=divisor) for batch in batches)
        for batch in batches:
            with watch(*batch.tokens.shape) if watch and not count else contextlib.nullcontext():
                loss = self.forward(batch)
                if self._reduction and count == accumulation - 1:
                    self._reduction.begin()
                with noise.micro_batch(_counted(batch) if masked else None) if noise else contextlib.nullcontext():
                    self._ds.backward(loss)
            total += loss.detach()
            count += 1
            samples += batch.sample_ids
            metrics.mean("span", batch.span)
        self.module.watch_blocks = None
        if count != accumulation:
            raise RuntimeError(f"the loader gave {count} micro-batches for a step of {accumulation}")
        # Over the world: tensor-parallel ranks hold the same loss, context-parallel ones that of equally many tokens.
        metrics.mean("train/loss", total / accumulation)
        for observer in observers.updates:
            observer.before_update()
        metrics.sum("stop", stop())
        metrics.sum("folds", fold(samples, self.groups.dp_rank))

        @functools.cache
        def verdict() -> tuple[dict[str, float], Verdict]:
            norm = self._norm if self.stage == 0 else self._ds.optimizer._global_grad_norm  # on every rank the same
            metrics.mean("train/grad_norm", norm)
            found = metrics.reduce(self.device)
            return found, observers.judge(found)

        self._verdict, skipped = verdict, self._ds.skipped_steps
        self._gradients.begin(noise)
        self._ds.step()
        found, judged = verdict()  # here for the first time if the gradient is not finite and DeepSpeed has stopped
        applied = judged.apply and self._ds.skipped_steps == skipped
        for observer in observers.updates if applied else ():
            observer.after_update()
        self._renew()
        shown, layer_norms = self._gradients.finish(accumulation, found["train/grad_norm"])
        found.update(shown)
        if observers.layer_norms:
            found.update((f"norms/{layer}/gradient", norm) for layer, norm in layer_norms.items())
        return StepResult(
            found,
            applied=applied,
            stop=found.pop("stop") > 0,
            folds=int(found.pop("folds")),
            span=found.pop("span"),
            event=judged.event,
            layer_norms=layer_norms,
        )

    def _judged(self, update: Callable[[], None]) -> Callable[[], None]:
        """The base optimizer's step, which DeepSpeed calls when it knows the norm (at most stages once for each group
        or sub-group of parameters), but only if the step's verdict allows it."""

        def judged_update() -> None:
            if self.stage == 0:
                self._clip_stage0()
            _, verdict = self._verdict()
            self._gradients.show(by_layer=bool(verdict.event) or self._layer_norms)
            if verdict.apply:
                update()

        return judged_update

    def forward(self, batch: Batch) -> torch.Tensor:
        """Loss of one micro-batch, under context parallelism of this rank's slice of it (fp32 scalar)."""
        return self._ds(**self._inputs(batch))

    def _note_activation(self, block: int, stream: torch.Tensor) -> None:
        """The root mean square over all tokens of the step, on whichever ranks they are."""
        square = torch.linalg.vector_norm(stream, dtype=torch.float32).double().square()
        how = (f"norms/{block}/activation", lambda total, count: math.sqrt(total / count))
        self.groups.metrics.derive(*how, square, stream.numel())

    def _inputs(self, batch: Batch) -> dict[str, Any]:
        return batch.inputs(self.device, self.groups.cp_rank, self.groups.cp_size)

    @torch.no_grad()
    def logits(self, batch: Batch) -> torch.Tensor:
        """Of a micro-batch, [B, S (/ cp), vocab] in the model's dtype, whatever its labels."""
        self._ds.eval()
        return self._ds(**{**self._inputs(batch), "labels": None})

    @torch.no_grad()
    def evaluate(
        self, batches: Iterable[Batch], sources: Sequence[str] = (), stop: Callable[[], bool] = _never
    ) -> dict[str, float]:
        """valid/loss, the mean over what counts of all ranks' micro-batches (equally many on every rank); with names of
        the sources also valid/<name>/loss of each, nan of one that is in none. `stop`: whether this rank was asked to
        stop, asked before every batch.

        Raises:
            InterruptedError: on every rank, some rank was asked to stop. Several learn of it one batch later: none
                waits for what was just begun.
        """
        self._ds.eval()
        metrics = Metrics()  # its own: what the model adds meanwhile is of no step
        totals = torch.zeros(1 + len(sources), 2, dtype=torch.float64, device=self.device)  # losses' sum, tokens
        several, asked = dist.get_world_size() > 1, collections.deque[torch.Tensor]()
        for batch in batches:
            asked.append(torch.tensor(stop(), dtype=torch.int32, device=self.device if several else "cpu"))
            if several:
                dist.all_reduce(asked[-1], op=dist.ReduceOp.MAX)
            if len(asked) > several and asked.popleft():
                raise InterruptedError
            inputs = self._inputs(batch)
            losses = self._ds(**inputs, by_token=True)[: batch.weight].double()
            counted = (inputs["labels"][: batch.weight] >= 0).sum(1, dtype=torch.float64)
            sums = torch.stack([losses.sum(1), counted], 1)
            totals[0] += sums.sum(0)
            if sources:
                totals[1:].index_add_(
                    0, torch.tensor(batch.sources[: len(sums)], dtype=torch.int64, device=self.device), sums
                )
        for name, parts in zip(["valid/loss", *(f"valid/{name}/loss" for name in sources)], totals, strict=True):
            metrics.derive(name, ratio, *parts)
        return metrics.reduce(self.device)

    def _clip_stage0(self) -> None:
        """Global gradient norm and clipping for fp32 at stage 0; replicated parameters count once."""
        marked = [p for p in self.module.parameters() if p.grad is not None]
        own = [p.grad for p in marked if p.tensor_model_parallel or self.groups.tp_rank == 0]
        square = torch.stack([g.float().square().sum() for g in own]).sum()
        if self.groups.tp_size > 1:
            dist.all_reduce(square, group=self.groups.tp_group)
        self._norm = square.sqrt().item()
        if self._clip and self._clip < self._norm < math.inf:
            torch._foreach_mul_([p.grad for p in marked], self._clip / (self._norm + 1e-6))

    def _renew(self) -> None:
        """Weights in 8 bits, from the weights as they are now: once for all micro-batches of a step. At ZeRO 3 gathers
        must find them written, also on a stream of their own (overlap_comm)."""
        if self._keeps:
            self.module.keep_weights()
        if self.stage == 3:
            self._synchronize()

    def weights_changed(self) -> None:
        """Call after weights were set, in all their copies: ZeRO 3 keeps small parameters gathered and must gather them
        anew; below, linear layers keep weights in 8 bits."""
        self._renew()
        if self.stage == 3 and self._ds.optimizer.persistent_parameters:
            persistent = self._ds.optimizer.persistent_parameters
            persistent[0].partition(persistent)
            persistent[0].all_gather(persistent)
