"""Decide how each tensor of a model is updated: by which rule, with which decay and learning rate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist

from sagetrain.config.arithmetic import peak_lr
from sagetrain.config.schema import RunConfig
from sagetrain.model.tensors import TensorSpec
from sagetrain.optim import adamw, muon
from sagetrain.optim.pieces import Optimizer, TensorPiece

Rule = Literal["adamw", "muon"]
_KINDS: dict[Rule, tuple[str, ...]] = {"adamw": adamw.KINDS, "muon": muon.KINDS}


@dataclass(frozen=True)
class Group:
    """The tensors that are updated in the same way."""

    rule: Rule
    weight_decay: float
    lr_factor: float
    """The learning rate as a multiple of the schedule's."""
    names: tuple[str, ...]
    """The names of the tensors, in the order of the model."""


def rule_of(spec: TensorSpec, run: RunConfig) -> Rule:
    """Return the rule that updates a tensor."""
    return "muon" if run.optimizer.is_muon(spec.kind, spec.name) else "adamw"


def kinds_of(spec: TensorSpec, run: RunConfig) -> tuple[str, ...]:
    """Return the kinds of state that the optimizer keeps of a tensor, by the names that checkpoints have for them."""
    return () if spec.kind == "state" else _KINDS[rule_of(spec, run)]


def groups(specs: Iterable[TensorSpec], run: RunConfig) -> list[Group]:
    """Split the tensors of a model into groups. Matrices and embeddings decay, and nothing else."""
    cfg, named = run.optimizer, dict[tuple[Rule, float, float], list[str]]()
    for spec in specs:
        if spec.kind == "state":
            continue
        rule = rule_of(spec, run)
        rate = peak_lr(cfg, _lr_kind(spec), run.model.hidden_size, rule == "muon").rate
        decay = cfg.weight_decay if spec.decays else 0.0
        if cfg.weight_decay_lr is not None:
            decay *= cfg.weight_decay_lr / rate
        named.setdefault((rule, decay, rate / cfg.lr), []).append(spec.name)
    return [Group(*how, tuple(found)) for how, found in named.items()]


def _lr_kind(spec: TensorSpec) -> str:
    """Return the key of optimizer.lr_of that a tensor belongs to."""
    if spec.kind == "embedding":
        return "head" if spec.layer == "head" else "embedding"
    return "gain" if spec.kind in ("bias", "conv", "decay", "step") else spec.kind


def build_optimizer(
    run: RunConfig, group: Group, pieces: Sequence[TensorPiece], ranks: dist.ProcessGroup | None
) -> Optimizer:
    """Build the optimizer of a group of tensors; collective.

    Args:
        pieces: this rank's pieces of the tensors, or of some of them, the same ones on every rank of `ranks`.
        ranks: the ranks that hold each tensor between them; None: this rank holds them whole.
    """
    if group.rule == "muon":
        return muon.Muon(pieces, run.optimizer, run.training.seed, ranks, group.weight_decay, group.lr_factor)
    offloaded = run.parallel.offload != "none"
    return adamw.AdamW(pieces, run.optimizer, run.training.seed, group.weight_decay, group.lr_factor, offloaded)
