"""Rules for the section `optimizer`."""

from __future__ import annotations

from collections.abc import Iterator

from sagetrain.config.errors import Finding
from sagetrain.config.layout import Layout
from sagetrain.config.rules.findings import About, no_effect
from sagetrain.config.schema import OptimizerConfig, RunConfig

MATRICES = "q", "k", "v", "out", "gate", "up", "down"
"""The matrices of a block."""
_BF16_STEP = 2**-8
"""A change of a number by less than half of this part is lost in bf16."""


def findings(cfg: RunConfig, layout: Layout) -> Iterator[Finding]:
    """Check that an optimizer reads the settings of Muon, that they leave matrices to it, and that moments can
    move."""
    yield from _unread_rates(cfg)
    yield from _muon(cfg.optimizer)
    yield from _moments(cfg.optimizer)
    yield from _epsilon(cfg)
    yield from _master(cfg, layout)


def _unread_rates(cfg: RunConfig) -> Iterator[Finding]:
    """Find learning rates that no tensor of the model has, and a width that leaves a tied embedding as it is."""
    optimizer = cfg.optimizer
    if optimizer.lr_of.router is not None and cfg.model.experts is None:
        yield no_effect("optimizer.lr_of.router", optimizer.lr_of.router, "a model without model.experts")
    if optimizer.lr_of.head is not None and cfg.model.tie_embeddings:
        why = "model.tie_embeddings: the output projection is the embedding, and has optimizer.lr_of.embedding"
        yield no_effect("optimizer.lr_of.head", optimizer.lr_of.head, why)
    if optimizer.weight_decay_lr is not None and not optimizer.weight_decay:
        yield no_effect("optimizer.weight_decay_lr", optimizer.weight_decay_lr, "optimizer.weight_decay 0")
    if optimizer.lr_base_width is not None and cfg.model.tie_embeddings and optimizer.lr_of.embedding is None:
        yield About("base_width_tied", "optimizer.lr_base_width", optimizer.lr_base_width).warning(
            "leaves the rate of the tied embedding as it is, and an output projection wants a smaller one in a wider "
            "model",
            "set optimizer.lr_of.embedding for this width, or use model.tie_embeddings: false",
        )


def _master(cfg: RunConfig, layout: Layout) -> Iterator[Finding]:
    key, master = "optimizer.master", cfg.optimizer.master
    if master == "fp32":
        return
    if cfg.training.dtype != "bf16":
        why = f"keeps the weights of a model in {cfg.training.dtype} in 16 bits"
        yield About("bf16_masters_in_fp32", key, master).error(why, "use fp32, or training.dtype bf16")
    elif layout.engine == "fsdp" and cfg.parallel.zero_stage > 1:
        why = f"rounds the gradients of each micro-step to 16 bits as well, at ZeRO {cfg.parallel.zero_stage}"
        yield About("bf16_masters_bf16_gradients", key, master).warning(
            why, "use parallel.zero_stage 0 or 1 if they fit"
        )


def _moments(cfg: OptimizerConfig) -> Iterator[Finding]:
    beta = cfg.betas[1]
    if cfg.moments == "bf16" and 1 - beta < _BF16_STEP:
        yield About("moments_stand_still", "optimizer.moments", cfg.moments).error(
            f"rounds to 8 bits, and optimizer.betas {list(cfg.betas)} changes the second moment by {1 - beta:g} of "
            f"itself in a step: below {_BF16_STEP:g} it would stay as it is",
            f"use fp32 or int8, or a second beta of at most {1 - _BF16_STEP:g}",
        )


def _epsilon(cfg: RunConfig) -> Iterator[Finding]:
    eps = cfg.optimizer.eps
    if cfg.model.value_embeddings and eps > 1e-9:
        yield About("value_embeddings_epsilon", "optimizer.eps", eps).warning(
            "holds back the embeddings that model.value_embeddings adds to values: half of their gradients were below "
            "1e-7 at 65,536 tokens per step, and with 1e-10 the loss was 0.030 bits per byte lower after 200 steps at "
            "338M (one seed: results/equal-time)",
            "use optimizer.eps: 1e-10",
        )


def _muon(cfg: OptimizerConfig) -> Iterator[Finding]:
    muon = cfg.muon
    if cfg.name != "muon":
        for name, field in type(muon).model_fields.items():
            if getattr(muon, name) != field.get_default():
                key = f"optimizer.muon.{name}"
                yield no_effect(key, getattr(muon, name), f"optimizer.name {cfg.name}; only muon uses it")
    elif {*muon.adamw_matrices} == {*MATRICES}:
        yield About("muon_without_matrices", "optimizer.muon.adamw_matrices", muon.adamw_matrices).error(
            "names every matrix, so none is left to Muon", "name fewer of them, or use optimizer.name: adamw"
        )
