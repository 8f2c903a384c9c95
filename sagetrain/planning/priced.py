"""A configuration with its predicted speed and memory on a number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from sagetrain.config.arithmetic import may_be_low_bit
from sagetrain.config.errors import ConfigError, Finding
from sagetrain.config.layer_specs import chosen_layers
from sagetrain.config.layout import Layout
from sagetrain.config.rules import fit
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


@dataclass(frozen=True)
class Target:
    """The ranks, their GPU and the data that configurations are priced for."""

    world_size: int
    vocab_size: int
    """Padded vocabulary size."""
    hardware: Hardware
    span: float | None = None
    """The span of the data's documents, as in predict."""

    @property
    def usable(self) -> int:
        """The largest number of bytes that the estimate for a rank may have."""
        return usable_bytes(self.hardware.memory)

    def predict(self, cfg: RunConfig) -> StepPrediction:
        """Predict a step of a configuration that fits these ranks. With training.cuda_graphs: auto the host launches
        micro-steps whose recordings do not fit into memory."""
        if cfg.training.cuda_graphs == "auto" and Layout.of(cfg, self.world_size).recorded:
            recorded = cfg.changed({"training": {"cuda_graphs": "on"}})
            if self.need(recorded) > self.usable:
                cfg = cfg.changed({"training": {"cuda_graphs": "off"}})
        return predict(cfg, self.world_size, self.vocab_size, self.hardware, self.span)

    def priced(self, cfg: RunConfig) -> PricedLayout:
        """Build the layout of a configuration that fits these ranks, with its prediction."""
        prediction = self.predict(cfg)
        return PricedLayout(cfg, prediction, total_bytes(self.memory_of(cfg, prediction)))

    def memory_of(self, cfg: RunConfig, prediction: StepPrediction) -> list[MemoryItem]:
        """Estimate a rank's memory. Micro-batches go through the blocks as in the prediction, whole or in halves."""
        way = with_overlap(cfg, "on" if prediction.overlap else "off")
        return memory_per_rank(way, self.world_size, self.vocab_size)

    def need(self, cfg: RunConfig) -> int:
        """Return the bytes of a rank whose halves are settled."""
        return total_bytes(memory_per_rank(cfg, self.world_size, self.vocab_size))

    def fits_with(self, cfg: RunConfig) -> Callable[[Recomputation], bool]:
        """Return a function that says whether the configuration fits into memory with some recomputation."""
        return lambda how: self.need(with_recomputation(cfg, how)) <= self.usable

    def host_finding(self, cfg: RunConfig) -> Finding | None:
        """Return a finding if what is kept there is estimated to need more memory than a host has, or None."""
        ranks = min(self.world_size, self.hardware.gpus_per_host)
        memory = self.hardware.memory_of_host(ranks)
        whose = "a host" if self.hardware.host_memory else f"a host (assumed: {memory / ranks / 2**30:.0f} GiB a GPU)"
        return host_memory_finding(cfg, self.world_size, self.vocab_size, ranks, memory, whose)

    def allows(self, cfg: RunConfig) -> bool:
        """Whether config/rules has no error for a configuration on these ranks."""
        # The vocabulary size is padded, so it may be more than a vocab_size that is given.
        tokenizer = None if cfg.model.vocab_size else self.vocab_size
        return not any(finding.level == "error" for finding in fit(cfg, self.world_size, tokenizer))

    def can_run(self, item: PricedLayout) -> bool:
        """Whether a layout fits into memory, of the GPU and of the host, without an error in config/rules."""
        return item.memory <= self.usable and not self.host_finding(item.cfg) and self.allows(item.cfg)

    def fastest_linear(self, cfg: RunConfig) -> LinearConfig:
        """Return the settings that linear.precision auto is predicted to choose, without data parallelism: bf16, or
        int8 for layers from a size on. A precision that is named stays. The run times its layers alone, so that
        sharding, pipelines, halves and recomputation have no part in the choice."""
        if cfg.linear.precision != "auto":
            return cfg.linear
        layers = chosen_layers(cfg.model, cfg.parallel.tensor_parallel_size).values()
        precisions = self.hardware.precisions if may_be_low_bit(cfg) else ("bf16",)
        choices = [each for each in cfg.linear.choices(layers) if each.precision in precisions]
        # The optimizer takes the same time with each choice.
        alone = cfg.changed({"parallel": _ALONE, "optimizer": {"name": "adamw", **WIDE}})
        alone, parallel = with_recomputation(alone, "none"), cfg.parallel
        ranks = parallel.tensor_parallel_size * parallel.context_parallel_size

        def speed(linear: LinearConfig) -> float:
            one = alone.model_copy(update={"linear": linear})
            # Layers that are timed alone do not have the memory of a run.
            prediction = predict(one, ranks, self.vocab_size, self.hardware, self.span)
            return float(f"{prediction.tokens_per_second:.6g}")

        # Of equally fast choices the first is taken: 16 bits, then the most layers.
        return max(choices, key=speed)


def calibrate(cfg: RunConfig, target: Target, tokens_per_second: float) -> Hardware:
    """Return the GPU of `target` with everything that runs on the GPU scaled, so that one data-parallel rank reaches
    `tokens_per_second`. Raises ConfigError if fixed costs, launching and communication alone take longer."""
    parallel = cfg.parallel
    gpus = parallel.tensor_parallel_size * parallel.context_parallel_size * parallel.pipeline_parallel_size

    def rate(exponent: float) -> float:
        scaled = replace(target.hardware, compute_scale=10**exponent)
        return replace(target, world_size=gpus, hardware=scaled).predict(cfg).tokens_per_second

    # The time that hosts and links take depends on the scale too, so the scale is searched for. A faster GPU hides less
    # of its communication and may even be slower overall, so the lowest scale that reaches the figure is meant.
    exponents = [n / 4 for n in range(-36, 13)]
    high = next((n for n in exponents if rate(n) >= tokens_per_second), None)
    if high is None:
        raise ConfigError(
            f"--measured-tokens-per-second {tokens_per_second:,.0f}: fixed costs and links alone allow "
            f"{max(map(rate, exponents)):,.0f}; give the figure of {gpus} GPU(s)"
        )
    low = high - 1 / 4
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (low, middle) if rate(middle) >= tokens_per_second else (middle, high)
    return replace(target.hardware, compute_scale=10**high)
