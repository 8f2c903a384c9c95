"""The engine that keeps and updates weights with DeepSpeed's ZeRO.

The optimizer that is handed to DeepSpeed is ours. When DeepSpeed calls the optimizer, the optimizer asks whether the
step is to be made, so nothing of DeepSpeed is replaced. masters.py knows where DeepSpeed keeps weights and moments. The
only private member of DeepSpeed that this module reads is `_global_grad_norm`.

DeepSpeed is imported inside functions, so that planning and checking a run do not pay for the import. The workarounds
here were measured on DeepSpeed 0.19:

- With DeepSpeed's own count of gradient accumulation, a step after a change of tokens per step ends too early.
SageTrain sets the boundary itself (managed_gradient_accumulation is off).
- bf16 with ZeRO 0 applies weight decay before training. SageTrain runs it as ZeRO 1.
- fp32 with ZeRO 0 reports no gradient norm. SageTrain measures the norm and clips the gradients itself.
"""

from __future__ import annotations

import collections
import contextlib
import io
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sagetrain.checkpoint.stateful import Owned
from sagetrain.config.errors import ConfigError
from sagetrain.config.layout import Layout
from sagetrain.config.schema import RunConfig
from sagetrain.engines.deepspeed.deepspeed_config import deepspeed_config
from sagetrain.engines.deepspeed.masters import Masters
from sagetrain.engines.deepspeed.mpu import Mpu
from sagetrain.engines.gradients import Decision, StepGradients
from sagetrain.engines.protocol import every
from sagetrain.engines.step import Engine
from sagetrain.model.placement import place
from sagetrain.model.tensors import TensorSpec
from sagetrain.model.transformer import Transformer
from sagetrain.optim.build import build_optimizer
from sagetrain.optim.build import groups as groups_of


def join_deepspeed() -> Any:
    """Import DeepSpeed in a process that has joined its group, and let DeepSpeed use that group. Return the module. The
    import takes up to a second. Raises ConfigError if the environment tells DeepSpeed to use another device."""
    used = "cuda" if torch.cuda.is_available() else "cpu"
    if (told := os.environ.get("DS_ACCELERATOR", used)) != used:
        raise ConfigError(
            f"DS_ACCELERATOR={told} in the environment: DeepSpeed would use that device, and this process trains on "
            f"{used}. Unset DS_ACCELERATOR"
        )
    if used == "cpu":  # DeepSpeed would look for a GPU.
        os.environ["DS_ACCELERATOR"] = used
    import deepspeed
    import deepspeed.ops

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # This saves the compilation of probes, and a C++ build that only inference on a CPU would use.
    if used == "cpu":
        deepspeed.ops.__compatible_ops__ = collections.defaultdict(bool)
    deepspeed.init_distributed(dist.get_backend(), verbose=False)
    return deepspeed


class Handed(torch.optim.Optimizer):
    """The optimizer that is handed to DeepSpeed. DeepSpeed calls it after gradients are reduced and clipped: once for
    all parameters, or once for each group of parameters. It leaves the decision and the update to the
    engine."""

    def __init__(self, parameters: Sequence[Sequence[nn.Parameter]]) -> None:
        super().__init__([{"params": list(group)} for group in parameters], {"lr": 0.0})
        self.update: Callable[[Sequence[Tensor]], None] = lambda masters: None

    def step(self, closure: Any = None) -> Any:
        """Have the engine update the parameters that DeepSpeed has put in place."""
        self.update([p for group in self.param_groups for p in group["params"] if p.grad is not None])


class DeepSpeedEngine(Engine):
    """An engine on DeepSpeed, for any gradient accumulation at ZeRO 0 to 2."""

    def __init__(self, cfg: RunConfig, model: Transformer) -> None:
        deepspeed, groups = join_deepspeed(), model.groups
        layout = Layout.of(cfg, groups.topology.world_size)
        self._stage = layout.zero_stage
        self._micro_batch, self._norm_stage0 = cfg.data.micro_batch_size, 0.0
        parameters = sum(p.numel() for p in model.parameters())
        self.settings = deepspeed_config(cfg, groups.topology.world_size, parameters)
        parameter: Any
        for name, parameter in model.named_parameters():
            # DeepSpeed reads this mark: a tensor that is split over tensor-parallel ranks counts in the gradient norm
            # on every rank of its group.
            parameter.tensor_model_parallel = place(model.specs[name], groups).slices > 1
        named, rules = dict(model.named_parameters()), groups_of(model.specs.values(), cfg)
        self._optimizer = Handed([[named[name] for name in rule.names] for rule in rules])
        self._lr, build = 0.0, partial(build_optimizer, cfg)
        # DeepSpeed prints memory tables at every stage of its initialization.
        with contextlib.redirect_stdout(io.StringIO()):
            self._ds, *_ = deepspeed.initialize(
                model=model,
                optimizer=self._optimizer,
                config=self.settings,
                mpu=Mpu(groups),
                dist_init_required=False,
            )
        copies = 1 if self._stage else groups.num_replicas
        device, self._clip = torch.device(self._ds.device), cfg.optimizer.clip_grad
        super().__init__(model, device, StepGradients(model, device, self._clip, copies))
        # DeepSpeed writes weights without autograd's version counters noticing, so each writer calls weights_changed.
        self._keeps = cfg.linear.low_bit
        self.weights_changed()
        self._masters = Masters(self._ds, self._optimizer, rules, build, self._stage)

    # -- what it keeps -------------------------------------------------------------------------------------------

    def owned(self, chosen: Callable[[TensorSpec], bool] = every) -> Iterator[Owned]:
        """Iterate over the part of each tensor that this rank keeps: see step.Engine."""
        return self._masters.owned(chosen)

    def leaves(self) -> dict[str, Tensor]:
        """Return the tensors that receive gradients from autograd, by name."""
        return dict(self.model.named_parameters())

    def gathered(self) -> Mapping[str, Tensor]:
        """Return the whole weights of this tensor-parallel rank: see step.Engine."""
        return self.leaves()

    def weights_changed(self) -> None:
        """Renew what depends on the weights, once for all micro-batches of a step: linear layers keep 8-bit weights."""
        if self._keeps:
            self.model.keep_weights()

    def _weights_written(self) -> None:
        self.weights_changed()

    @torch.no_grad()
    def state_changed(self, optimizer_steps: int | None = None) -> None:
        """Bring all copies of the weights in line with the masters: see step.Engine."""
        self._masters.spread()
        self.weights_changed()
        self._masters.check()
        if optimizer_steps is not None:
            self.optimizer_steps = optimizer_steps

    # -- a step --------------------------------------------------------------------------------------------------

    def _prepare(self, micro_batches: int, lr: float) -> None:
        if micro_batches != self._ds.gradient_accumulation_steps():
            self._ds.set_train_batch_size(self._micro_batch * micro_batches * self.groups.num_replicas)
        self._lr = lr
        self._ds.train()

    def _prepare_evaluation(self) -> None:
        self._ds.eval()

    def run(self, inputs: Mapping[str, Any]) -> Tensor:
        """Call the model: see step.Engine."""
        result: Tensor = self._ds(**inputs)
        return result

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of a micro-batch's loss to the step's gradient: see step.Engine."""
        self._ds.backward(loss)

    def _update(self, decision: Decision) -> bool:
        """Let DeepSpeed reduce, clip and call the optimizer, which asks for the decision. If the gradient is not
        finite, DeepSpeed stops before it calls the optimizer."""

        def update(masters: Sequence[Tensor]) -> None:
            if self._stage == 0:
                self._clip_stage0()
            allowed = decision.allows(self._norm)
            decision.show(lambda: self._masters.gradients(masters))
            if allowed:
                self._masters.update(masters, self._lr, self.optimizer_steps + 1)

        self._optimizer.update, skipped = update, self._ds.skipped_steps
        self._ds.step()
        finite = self._ds.skipped_steps == skipped
        if finite and decision.verdict is None:
            raise RuntimeError(
                f"DeepSpeed {version('deepspeed')} has not called the optimizer, and does not say that the gradient is "
                "not finite: it counts micro-batches in another way. Install the version of constraints.txt"
            )
        return decision.allows(self._norm) and finite

    @property
    def _norm(self) -> Tensor | float:
        """The global gradient norm of the current step, which is the same on every rank."""
        norm: Tensor | float = self._norm_stage0 if self._stage == 0 else self._ds.optimizer._global_grad_norm
        return norm

    def _clip_stage0(self) -> None:
        """Measure and clip the global gradient norm, for fp32 at stage 0. Replicated parameters count once."""
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        own = [grad for name, grad in gradients.items() if place(self.model.specs[name], self.groups).counted]
        square = torch.stack([g.float().square().sum() for g in own]).sum()
        if self.groups.tp_size > 1:
            dist.all_reduce(square, group=self.groups.tp_group)
        self._norm_stage0 = square.sqrt().item()
        if self._clip and self._clip < self._norm_stage0 < math.inf:
            torch._foreach_mul_(list(gradients.values()), self._clip / (self._norm_stage0 + 1e-6))
