"""Build the engine of a configuration, and say how its model's parameters are partitioned."""

from __future__ import annotations

from sagetrain.config.schema import RunConfig
from sagetrain.engines.deepspeed import DeepSpeedEngine, partitioner
from sagetrain.engines.protocol import Engine
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.topology import ParallelGroups

__all__ = ["build_engine", "partitioner"]


def build_engine(cfg: RunConfig, model: Transformer, groups: ParallelGroups, micro_batches: int) -> Engine:
    """Build the engine of a run for its model; collective.

    Args:
        cfg: the configuration, in which no value is `auto` any more.
        model: a model that was made with `partitioner`.
        micro_batches: the micro-batches of this rank in the first step. Later steps may have another number.

    Raises:
        ConfigError: DeepSpeed's version, or a key that it was given, makes it keep weights in an order that checkpoints
            do not know.
    """
    return DeepSpeedEngine(cfg, model, groups, micro_batches)
