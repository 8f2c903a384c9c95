"""The engine that a configuration asks for, and how the parameters of its model are made."""

from __future__ import annotations

from sagetrain.config.schema import RunConfig
from sagetrain.engines.deepspeed import DeepSpeedEngine, partitioner
from sagetrain.engines.protocol import Engine
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.topology import ParallelGroups

__all__ = ["build_engine", "partitioner"]


def build_engine(cfg: RunConfig, model: Transformer, groups: ParallelGroups, micro_batches: int) -> Engine:
    """Build the engine of a run over its model; collective.

    Args:
        cfg: with nothing left `auto`.
        model: made with `partitioner`.
        micro_batches: of this rank in the first step. Later steps may have others.

    Raises:
        ConfigError: DeepSpeed's version, or a key that it was given, makes it keep weights as no checkpoint knows them.
    """
    return DeepSpeedEngine(cfg, model, groups, micro_batches)
