"""AdamW over two parameter groups: matrices decay, gains and biases do not."""

from __future__ import annotations

import torch
from torch import nn

from sagetrain.config.schema import OptimizerConfig


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Split the parameters by their `no_weight_decay` mark (set by the layers), in the order of the model."""
    decayed = [p for p in model.parameters() if not getattr(p, "no_weight_decay", False)]
    plain = [p for p in model.parameters() if getattr(p, "no_weight_decay", False)]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, cfg: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW with decoupled weight decay; one fused kernel per group on a GPU."""
    fused = next(model.parameters()).is_cuda
    groups = parameter_groups(model, cfg.weight_decay)
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, fused=fused, foreach=False)
