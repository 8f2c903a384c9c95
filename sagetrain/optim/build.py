"""AdamW over groups of parameters: matrices and embeddings decay, gains do not; gains of QK-norm do if asked to."""

from __future__ import annotations

from typing import Any

import torch

from sagetrain.config.schema import RunConfig
from sagetrain.model.transformer import Transformer


def parameter_groups(model: Transformer, weight_decay: float, qk_gain_decay: float = 0.0) -> list[dict[str, Any]]:
    """Split the parameters by whether they decay, in the order of the model; the gains of QK-norm apart if they do."""
    pairs = [(model.specs[name], parameter) for name, parameter in model.named_parameters()]
    decayed = [parameter for spec, parameter in pairs if not spec.is_gain]
    gains = [parameter for spec, parameter in pairs if spec.kind == "qk_gain" and qk_gain_decay]
    plain = [parameter for spec, parameter in pairs if spec.is_gain and not (spec.kind == "qk_gain" and qk_gain_decay)]
    groups = [(decayed, weight_decay), (plain, 0.0), (gains, qk_gain_decay)]
    return [{"params": parameters, "weight_decay": decay} for parameters, decay in groups if parameters]


def build_optimizer(model: Transformer, run: RunConfig) -> torch.optim.Optimizer:
    """Build the optimizer of a run: AdamW with decoupled weight decay; one fused kernel per group on a GPU."""
    cfg, fused = run.optimizer, next(model.parameters()).is_cuda
    groups = parameter_groups(model, cfg.weight_decay, run.stability.qk_gain.decay)
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, fused=fused, foreach=False)
