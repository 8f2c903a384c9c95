"""A configuration with its predicted speed and memory on a number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sagetrain.config.arithmetic import may_be_low_bit
from sagetrain.config.errors import Finding
from sagetrain.config.layer_specs import chosen_layers
from sagetrain.config.layout import Layout
from sagetrain.config.schema import LinearConfig, Recomputation, RunConfig
from sagetrain.costs.accounting import MemoryItem, total_bytes, with_recomputation
from sagetrain.costs.hardware import Hardware, usable_bytes
from sagetrain.costs.host_memory import host_memory_finding
from sagetrain.costs.memory import memory_per_rank
from sagetrain.planning.performance import predict, with_overlap
from sagetrain.planning.prediction import StepPrediction

_ALONE = {
    "zero_stage": 1,
    "offload": "none",
    "engine": "fsdp",
    "pipeline_parallel_size": 1,
    "pipeline_chunks": 1,
    "pipeline_blocks": "auto",
    "tensor_parallel_overlap": "off",
}
"""The settings of layers that are timed alone, whole and by one engine."""
WIDE = {"moments": "fp32", "master": "fp32"}


@dataclass(frozen=True)
class PricedLayout:
    """One way to run a configuration on some number of ranks."""

    cfg: RunConfig
    prediction: StepPrediction
    memory: int
    """Estimated bytes of a rank."""

    @property
    def layout(self) -> Layout:
        """The layout on the ranks that the prediction is for."""
        return Layout.of(self.cfg, self.prediction.world_size)

    @property
    def key(self) -> tuple[int, int, int, int, bool, int, str | int, int, str]:
        """The settings that distinguish layouts. Tokens per step are not among them."""
        layout = self.layout
        return (
            layout.tensor,
            layout.context,
            layout.stages,
            layout.chunks,
            layout.tensor > 1 and self.cfg.parallel.sequence_parallel,
            layout.zero_stage,
            self.cfg.training.activation_checkpointing,
            self.cfg.data.micro_batch_size,
            layout.engine,
        )


def usable_memory(hardware: Hardware) -> int:
    """Return the largest number of bytes that the estimate for a rank may have."""
    return usable_bytes(hardware.memory)


def priced(
    cfg: RunConfig, world_size: int, vocab_size: int, hardware: Hardware, span: float | None = None
) -> PricedLayout:
    """Build the layout of a configuration that fits `world_size` ranks, with its prediction. `vocab_size` is padded;
    `span` is as in predict."""
    prediction = predict(cfg, world_size, vocab_size, hardware, span)
    return PricedLayout(cfg, prediction, total_bytes(memory_of(cfg, prediction, vocab_size)))


def memory_of(cfg: RunConfig, prediction: StepPrediction, vocab_size: int) -> list[MemoryItem]:
    """Estimate a rank's memory. Micro-batches go through the blocks as in the prediction, whole or in halves."""
    way = with_overlap(cfg, "on" if prediction.overlap else "off")
    return memory_per_rank(way, prediction.world_size, vocab_size)


def fastest_linear(cfg: RunConfig, vocab_size: int, hardware: Hardware, span: float | None) -> LinearConfig:
    """Return the settings that linear.precision auto is predicted to choose, without data parallelism: bf16, or int8
    for layers from a size on. A precision that is named stays. The run times its layers alone, so that sharding,
    pipelines, halves and recomputation have no part in the choice."""
    if cfg.linear.precision != "auto":
        return cfg.linear
    layers = chosen_layers(cfg.model, cfg.parallel.tensor_parallel_size).values()
    precisions = hardware.precisions if may_be_low_bit(cfg) else ("bf16",)
    choices = [each for each in cfg.linear.choices(layers) if each.precision in precisions]
    # The optimizer takes the same time with each choice.
    alone = cfg.changed({"parallel": _ALONE, "optimizer": {"name": "adamw", **WIDE}})
    alone, parallel = with_recomputation(alone, "none"), cfg.parallel
    ranks = parallel.tensor_parallel_size * parallel.context_parallel_size

    def speed(linear: LinearConfig) -> float:
        one = alone.model_copy(update={"linear": linear})
        return float(f"{predict(one, ranks, vocab_size, hardware, span).tokens_per_second:.6g}")

    # Of equally fast choices the first is taken: 16 bits, then the most layers.
    return max(choices, key=speed)


def fits_with(cfg: RunConfig, world_size: int, vocab_size: int, hardware: Hardware) -> Callable[[Recomputation], bool]:
    """Return a function that says whether the configuration fits into memory with some recomputation."""

    def fits(how: Recomputation) -> bool:
        memory = memory_per_rank(with_recomputation(cfg, how), world_size, vocab_size)
        return total_bytes(memory) <= usable_memory(hardware)

    return fits


def host_finding(cfg: RunConfig, world_size: int, vocab_size: int, hardware: Hardware) -> Finding | None:
    """Return a finding if what is kept there is estimated to need more memory than a host has, or None."""
    ranks = min(world_size, hardware.gpus_per_host)
    memory = hardware.memory_of_host(ranks)
    whose = "a host" if hardware.host_memory else f"a host (assumed: {memory / ranks / 2**30:.0f} GiB a GPU)"
    return host_memory_finding(cfg, world_size, vocab_size, ranks, memory, whose)
