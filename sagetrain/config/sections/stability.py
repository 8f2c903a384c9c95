"""The sections of the YAML that measure stability and react to it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from sagetrain.config.sections.base import Fraction, Section


class NoiseScaleConfig(Section):
    """The gradient noise scale (arXiv 1812.06162). Steps with fewer tokens than the noise scale are mostly noise."""

    every_steps: PositiveInt | None = 10
    """Steps between two measurements. A measurement reads the gradients of every micro-batch once more, and under
    context parallelism sums them over ranks. Steps of a single micro-batch give no measurement. null: never."""
    decay: Fraction = 0.9
    """Weight that the running averages keep at a new measurement: those of variance, of squared gradient, and of
    quant_noise."""


class QuantNoiseConfig(Section):
    """The quantization error in the gradients of the weights, compared with the gradient noise."""

    every_steps: PositiveInt | None = None
    """Steps between two probes; null: never. A probe takes the time of up to five micro-batches, so that a probe every
    500 steps costs less than 1 % of any run. It needs memory for the gradients of three, which `plan` counts."""


class SpikesConfig(Section):
    """The reaction to steps whose loss or gradient norm is not finite, or far above those of the steps before (a
    spike)."""

    policy: Literal["stop", "skip", "rewind"] = "stop"
    """stop: a step that is not finite ends the run; a spike is reported, and training goes on. skip: either kind of
    step is left out, without an update, and is recorded as dropped. rewind: the run goes back to the newest checkpoint
    and continues with the data after the step; all samples between are dropped."""
    threshold: PositiveFloat = 8.0
    """A spike is more than median + threshold x spread of the window. The spread is 1.4826 x the median distance from
    the median (for normal numbers one standard deviation), and at least 1 % of the median."""
    window: Annotated[int, Field(ge=8)] = 128
    """Number of earlier steps that a step is compared with. max_events are counted in the same window."""
    grace_steps: Annotated[int, Field(ge=4)] = 64
    """No spike is detected before this many steps are known. Steps that are not finite are detected from the start."""
    max_events: PositiveInt = 3
    """Largest number of times in `window` steps that the run may skip or rewind. One more ends the run."""


class MonitorConfig(Section):
    """The error of INT8 attention and of 8-bit linear layers against float32, measured while training. The metrics are
    quant/<layer>/<tensor>/* and quant/<layer>/<linear layer>.<tensor>/*."""

    every_steps: PositiveInt | Literal["auto"] | None = "auto"
    """Steps between two measurements. Each takes one micro-batch; for 8-bit linear layers the micro-batch goes forward
    and backward once more. auto: 100 where something is quantized; for linear layers 300 micro-batches if that is more.
    null: never."""
    layers: Literal["all"] | Annotated[list[int], Field(min_length=1)] = "all"
    """The layers that are measured, counted from 0; negative numbers count from the end."""


class ReplayConfig(Section):
    """The search for silent corruption, which is wrong numbers from a GPU that reports no error. A micro-batch is
    computed a second time by another replica, or by the only replica itself. Hashes of all block outputs, of the loss
    and of all gradients are compared before the update."""

    every_steps: PositiveInt | None = None
    """Steps between two comparisons; null: never. A comparison computes one micro-batch more on every rank, and the
    host launches both computations, which takes as long as several steps of a small model (docs/failures.md). A step
    whose hashes differ is refused and taken again, with weights renewed from the masters. The weights of replicas are
    also compared at every save. engine fsdp at zero_stage 0 and 1, without tensor, context and pipeline parallelism; on
    GPUs with attention.backend sage."""
    policy: Literal["stop", "go_on"] = "stop"
    """The reaction when hashes differ in the second try as well, or when renewed weights still differ. stop: the run
    ends, and nothing of the step is saved. go_on: the event is written, and the run continues with the bits that it
    has."""


class StabilityConfig(Section):
    """Measurements of training stability, and the reactions to them."""

    monitor: MonitorConfig = MonitorConfig()
    noise_scale: NoiseScaleConfig = NoiseScaleConfig()
    quant_noise: QuantNoiseConfig = QuantNoiseConfig()
    spikes: SpikesConfig = SpikesConfig()
    replay: ReplayConfig = ReplayConfig()
    stragglers: bool = False
    """Measure the forward and backward passes of every rank in every step, and name a rank that takes longer for 50
    steps than the others of its pipeline stage, or than it did (a score below 0.85). The metric is perf/slowest_rank,
    the event `straggler`. The step's one reduction takes 8 bytes for each rank along. Ranks of a tensor- or
    context-parallel group wait for each other inside of their passes, as at zero_stage 3, so that the group is slow as
    a whole."""
