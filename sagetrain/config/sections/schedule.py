"""The sections of the YAML that change with the tokens seen: tokens per step and learning rate."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Union

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, PrivateAttr

from sagetrain.config.sections.base import Fraction, Section
from sagetrain.config.sections.model import RopeScaling


class ConstantTokens(Section):
    """A constant number of tokens per step."""

    schedule: Literal["constant"]
    tokens: PositiveInt
    """Tokens per optimizer step."""

    @property
    def named_tokens(self) -> dict[str, int]:
        """Every tokens-per-step value that the schedule names, and `multiple`, by dotted key. All schedules have this
        property."""
        return {"tokens_per_step.tokens": self.tokens}


class _Rounded(Section):
    """A schedule whose tokens per step are multiples of `multiple`."""

    @property
    def named_tokens(self) -> dict[str, int]:
        tokens = {name: getattr(self, name, None) for name in ("start", "end", "floor", "ceiling", "multiple")}
        return {f"tokens_per_step.{name}": each for name, each in tokens.items() if each is not None}

    @property
    def rounding(self) -> int:
        """The value of `multiple`, or its default: the largest number that divides the others."""
        return self.named_tokens.get("tokens_per_step.multiple", math.gcd(*self.named_tokens.values()))


class RampTokens(_Rounded):
    """Tokens per step that change linearly with the tokens seen, from start to end (up or down), and stay constant
    afterwards."""

    schedule: Literal["ramp"]
    start: PositiveInt
    """Tokens per step at the beginning."""
    end: PositiveInt
    """Tokens per step after the ramp."""
    ramp_tokens: PositiveInt
    """Tokens seen when the ramp ends."""
    multiple: PositiveInt | None = None
    """The ramp's tokens per step are rounded down to multiples of this many tokens, on any number of ranks alike. Must
    be a whole number of micro-steps in every layout used. Default: the largest number that divides both ends."""


class Stage(Section):
    """One stage of a staged schedule."""

    from_tokens: NonNegativeInt
    """Tokens seen at which this stage begins; the first stage begins at 0."""
    tokens: PositiveInt
    """Tokens per optimizer step in this stage."""
    seq_length: PositiveInt | None = None
    """Tokens of one training sequence in this stage. If one stage has it, all have it, with micro_batch_size. Default:
    data.seq_length in all stages."""
    micro_batch_size: PositiveInt | None = None
    """Sequences one rank processes at once in this stage. Goes with seq_length."""
    rope_scaling: RopeScaling | None = None
    """Extension of the rotary frequencies in this stage, in the place of model.rope_scaling. Goes with seq_length.
    Default: none."""


class StagedTokens(Section):
    """Tokens per step that are piecewise constant, going up or down."""

    schedule: Literal["stages"]
    stages: Annotated[list[Stage], Field(min_length=1)]
    """Stages in increasing order of from_tokens."""
    _own: range | None = PrivateAttr(None)

    @property
    def own(self) -> range:
        """The places of the stages that this part of a run has (config/run_parts.py); all stages, if it is the run."""
        return range(len(self.stages)) if self._own is None else self._own

    @property
    def is_part(self) -> bool:
        """Whether this is the schedule of a part of a run."""
        return self._own is not None

    def part(self, own: range | None) -> StagedTokens:
        """Return the schedule of the part of the run that has these stages; None: of the whole run. It still has all
        others, too."""
        made = self.model_copy()
        made._own = own
        return made

    @property
    def named_tokens(self) -> dict[str, int]:
        return {f"tokens_per_step.stages.{i}.tokens": self.stages[i].tokens for i in self.own}


class NoiseAwareTokens(_Rounded):
    """Tokens per step that are decided while training: as many as leave enough gradient noise to hide the quantization
    error. Needs stability.noise_scale and stability.quant_noise."""

    schedule: Literal["noise_aware"]
    start: PositiveInt
    """Tokens per step at the beginning."""
    floor: PositiveInt
    """Least tokens per step."""
    ceiling: PositiveInt
    """Most tokens per step."""
    hold_tokens: PositiveInt
    """Least number of tokens between two changes."""
    margin: PositiveFloat = 0.1
    """Largest quant_noise/<layer>/ratio that does not lower the tokens per step. The median of three probes is taken
    for each layer, and the largest layer counts."""
    headroom: Fraction = 0.5
    """Tokens per step are raised where the ratio would afterwards be at most this part of the margin. A ratio between
    the two changes nothing."""
    max_factor: Annotated[float, Field(gt=1)] = 1.5
    """Largest factor of one change, up or down."""
    multiple: PositiveInt | None = None
    """Tokens per step are multiples of this many tokens, on any number of ranks alike. Must be a whole number of
    micro-steps in every layout used. Default: the largest number that divides start, floor and ceiling."""


TokensPerStepConfig = Annotated[
    Union[ConstantTokens, RampTokens, StagedTokens, NoiseAwareTokens], Field(discriminator="schedule")
]


class LrScheduleConfig(Section):
    """Learning rate as a function of the tokens seen."""

    shape: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    """Decay after the warm-up: cosine or linear over the run, wsd (stable, then linear decay at the end), constant."""
    warmup: Fraction = 0.0
    """Linear warm-up from 0, as a share of training.total_tokens: 0.01 is a hundredth of the run. A run with another
    total_tokens then has a warm-up of another length."""
    warmup_tokens: NonNegativeInt = 0
    """Linear warm-up from 0 in tokens, instead of warmup."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the run."""
    decay: Fraction | None = None
    """Only for wsd: the final decay, as a share of training.total_tokens. Default: a tenth, unless decay_tokens is
    given."""
    decay_tokens: PositiveInt | None = None
    """Only for wsd: the final decay in tokens, instead of decay."""
    batch_rule: Literal["none", "sqrt", "linear"] = "none"
    """Scaling of the learning rate when tokens per step change: none, sqrt (by (tokens / reference)^0.5), or linear (by
    tokens / reference)."""
    reference_tokens_per_step: PositiveInt | None = None
    """Tokens per step at which optimizer.lr holds unscaled. Required unless batch_rule is none."""
