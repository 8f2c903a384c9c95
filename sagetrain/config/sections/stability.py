"""What is measured about stability, and what follows from it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from sagetrain.config.sections.base import Fraction, Section


class NoiseScaleConfig(Section):
    """The gradient noise scale (arXiv 1812.06162): steps of fewer tokens are mostly noise."""

    every_steps: PositiveInt | None = 10
    """Steps between two measurements, which read the gradients of every micro-batch once more, and under context
    parallelism add them up over ranks. Steps of a single micro-batch give none. null: never."""
    decay: Fraction = 0.9
    """What a measurement leaves of the averages before it: of variance and squared gradient, of quant_noise too."""


class QuantNoiseConfig(Section):
    """The error of quantization in the gradients of weights, against the noise that these have anyway."""

    every_steps: PositiveInt | None = None
    """Steps between two probes; null: never. A probe takes the time of up to five micro-batches, so that 500 cost
    less than 1 % of any run, and memory for the gradients of three, which `sagetrain plan` counts. Not at ZeRO 3."""


class SpikesConfig(Section):
    """Steps whose loss or gradient norm is not finite, or far above those of the steps before (a spike)."""

    policy: Literal["stop", "skip", "rewind"] = "stop"
    """stop: a step that is not finite ends the run; a spike is reported and trained on. skip: either is left out,
    without an update, and stays on record as dropped. rewind: back to the newest checkpoint, and on in the data behind
    the step; all samples in between are dropped."""
    threshold: PositiveFloat = 8.0
    """A spike is more than median + threshold x spread of the window; the spread is 1.4826 x the median distance from
    the median (for normal numbers one standard deviation), and at least 1 % of the median."""
    window: Annotated[int, Field(ge=8)] = 128
    """Steps that a step is compared with, and in which max_events are counted."""
    grace_steps: Annotated[int, Field(ge=4)] = 64
    """No spike is seen before so many steps are known; what is not finite is."""
    max_events: PositiveInt = 3
    """How many times in `window` steps the run may skip or rewind; once more ends it."""


class MonitorConfig(Section):
    """What INT8 attention and linear layers in 8 bits lose, measured while training beside float32:
    quant/<layer>/<tensor>/* and quant/<layer>/<linear layer>.<tensor>/* in the metrics."""

    every_steps: PositiveInt | Literal["auto"] | None = "auto"
    """Steps between two measurements, each on one micro-batch, which goes forward and backward once more for linear
    layers in 8 bits (not at ZeRO 3). auto: 100 where something is quantized, for linear layers 300 micro-batches if
    these are more. null: never."""
    layers: Literal["all"] | Annotated[list[int], Field(min_length=1)] = "all"
    """The layers that are measured, from 0; negative ones count from the end."""


Rung = Literal["fine", "scores", "gradients", "sdpa", "flash", "reference"]


class PrecisionFloor(Section):
    """A rung that some layers are on, or above, for some of the run."""

    rung: Rung
    """One of stability.precision.rungs."""
    first_layers: NonNegativeInt = 0
    """So many layers at the input."""
    last_layers: NonNegativeInt = 0
    """And so many at the output. Both 0: all layers."""
    last_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Only in this last part of training.total_tokens. Default: throughout."""


class PrecisionThreshold(Section):
    """A measured number of each layer that moves it up and down."""

    metric: str = "quant/*/dS/rel_l2"
    """Its name, with * for the number of the layer: quant/*/TENSOR/METRIC or quant_noise/*/METRIC."""
    above: PositiveFloat
    """A layer whose number is above this goes up by one rung."""
    below: PositiveFloat | None = None
    """A layer whose number is below this goes down by one rung, to what is scheduled for it. In 16 bits the number is
    0: such a layer is tried lower after each cool-down. Default: no layer goes down."""
    cooldown_tokens: NonNegativeInt = 0
    """Tokens after a layer's move in which no number moves it again."""


class PrecisionConfig(Section):
    """The precision ladder: layers get an attention that quantizes less, by schedule, by measurement, by a spike. Needs
    attention.backend sage and a recipe by name, which is the lowest rung."""

    rungs: Annotated[list[Rung], Field(min_length=1)]
    """What layers go up to from attention.recipe, each in less INT8 than the one before: recipes, and a 16-bit backend
    at the end. For example fine, gradients, sdpa above recipe paper."""
    floors: list[PrecisionFloor] = []
    """The schedule: a pure function of the tokens seen and the layer. Where more than one applies, the highest counts.
    """
    threshold: PrecisionThreshold | None = None
    """Default: nothing measured moves a layer."""
    spike_tokens: PositiveInt | None = None
    """For so many tokens after a spike, or a step that was not finite and left out, all layers are one rung higher.
    Default: spikes move nothing."""


class QkGainConfig(Section):
    """The learned gains of QK-norm, whose growth the SageBwd paper suspects behind its gap at 2.1M tokens per step."""

    cap: PositiveFloat | None = None
    """Largest magnitude of a gain: after each step the fp32 weights are clipped to it. Gains begin at 1. Default: none.
    """
    decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of these gains alone, as optimizer.weight_decay is of matrices."""


class StabilityConfig(Section):
    """What INT8 attention costs, measured while training, and what follows from it."""

    monitor: MonitorConfig = MonitorConfig()
    noise_scale: NoiseScaleConfig = NoiseScaleConfig()
    quant_noise: QuantNoiseConfig = QuantNoiseConfig()
    spikes: SpikesConfig = SpikesConfig()
    qk_gain: QkGainConfig = QkGainConfig()
    precision: PrecisionConfig | None = None
    """The precision ladder. Default: every layer has the attention of `attention` throughout."""
