"""Build the engine of a configuration, and say how its model's parameters are partitioned."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from sagetrain.config.layout import Layout
from sagetrain.config.schema import RunConfig
from sagetrain.engines.deepspeed import deepspeed_engine
from sagetrain.engines.step import Engine
from sagetrain.model.tensors import TensorSpec
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.topology import ParallelGroups


def partitioner(cfg: RunConfig, groups: ParallelGroups) -> Callable[[TensorSpec, nn.Parameter], None] | None:
    """Return the function with which the engine partitions a parameter that has just got its values, for
    Transformer(partition=...). None: the engine takes whole parameters. Calling the function is collective."""
    if Layout.of(cfg).engine == "fsdp":
        from sagetrain.engines import sharding  # torch.distributed.fsdp takes half a second

        return sharding.partitioner(cfg, groups)
    return None


def build_engine(cfg: RunConfig, model: Transformer) -> Engine:
    """Build the engine of a run for its model; collective. Raises ConfigError if DeepSpeed keeps weights in an order
    that checkpoints do not know, or is told to use another device.

    Args:
        cfg: the configuration, in which no value of the model is `auto` any more.
        model: a model that was made with `partitioner`.
    """
    if Layout.of(cfg).engine == "fsdp":
        from sagetrain.engines import fsdp

        return fsdp.FsdpEngine(cfg, model)
    return deepspeed_engine.DeepSpeedEngine(cfg, model)
