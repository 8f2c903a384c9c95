"""AdamW over groups of parameters: matrices decay, gains and biases do not; gains of QK-norm if asked to."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sagetrain.config.schema import OptimizerConfig
from sagetrain.model.norm import is_qk_gain


def parameter_groups(model: nn.Module, weight_decay: float, qk_gain_decay: float = 0.0) -> list[dict[str, Any]]:
    """Split the parameters by their `no_weight_decay` mark (set by the layers), in the order of the model; the gains of
    QK-norm apart if they decay."""
    decayed = [p for p in model.parameters() if not getattr(p, "no_weight_decay", False)]
    gains = [p for name, p in model.named_parameters() if qk_gain_decay and is_qk_gain(name)]
    apart = {id(p) for p in (*decayed, *gains)}
    plain = [p for p in model.parameters() if id(p) not in apart]
    groups = [(decayed, weight_decay), (plain, 0.0), (gains, qk_gain_decay)]
    return [{"params": parameters, "weight_decay": decay} for parameters, decay in groups if parameters]


def build_optimizer(model: nn.Module, cfg: OptimizerConfig, qk_gain_decay: float = 0.0) -> torch.optim.AdamW:
    """AdamW with decoupled weight decay; one fused kernel per group on a GPU."""
    fused = next(model.parameters()).is_cuda
    groups = parameter_groups(model, cfg.weight_decay, qk_gain_decay)
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, fused=fused, foreach=False)
