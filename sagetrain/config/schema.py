# ruff: noqa: F401
"""The whole configuration of a run: one typed section per section of the YAML. All section classes can be imported from
here.

Every field has its documentation right below it. `sagetrain plan`, the error messages and the key reference are
generated from it. Unknown keys are errors. This module imports no torch, so that it loads quickly on a laptop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sagetrain.config.sections.base import Section, is_url
from sagetrain.config.sections.data import (
    NO_DATA,
    TOKENIZER_JSON,
    TOKENIZER_NAME,
    DataConfig,
    DataSource,
    cache_folder,
    cached_path,
    tokenizer_in,
)
from sagetrain.config.sections.model import (
    SIXTEEN_BITS,
    AttentionConfig,
    BalanceConfig,
    DeltaNetConfig,
    ExpertsConfig,
    LinearConfig,
    ModelConfig,
    RopeScaling,
    WindowsConfig,
)
from sagetrain.config.sections.optimizer import LearningRates, MuonConfig, OptimizerConfig
from sagetrain.config.sections.schedule import (
    ConstantTokens,
    LrScheduleConfig,
    NoiseAwareTokens,
    RampTokens,
    Stage,
    StagedTokens,
    TokensPerStepConfig,
)
from sagetrain.config.sections.stability import (
    MonitorConfig,
    NoiseScaleConfig,
    QuantNoiseConfig,
    ReplayConfig,
    SpikesConfig,
    StabilityConfig,
)
from sagetrain.config.sections.training import (
    CheckpointConfig,
    EvaluationConfig,
    GuidanceConfig,
    LoggingConfig,
    ParallelConfig,
    ProfileConfig,
    Recomputation,
    TrainingConfig,
    WandbConfig,
)


class RunConfig(Section):
    """One run: the contents of the YAML file."""

    model: ModelConfig
    attention: AttentionConfig = AttentionConfig()
    linear: LinearConfig = LinearConfig()
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig
    tokens_per_step: TokensPerStepConfig
    """Tokens per optimizer step: a function of the tokens seen (constant, ramp, stages), or decided while training
    (noise_aware)."""
    optimizer: OptimizerConfig
    lr_schedule: LrScheduleConfig = LrScheduleConfig()
    training: TrainingConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    profile: ProfileConfig | None = None
    """Write traces of some steps to run_dir/profile, for chrome://tracing or Perfetto. Default: none."""
    stability: StabilityConfig = StabilityConfig()
    guidance: GuidanceConfig = GuidanceConfig()

    def changed(self, sections: Mapping[str, Mapping[str, object]]) -> RunConfig:
        """Return the configuration with other values of some keys, by section. Nothing is checked."""
        update = {name: getattr(self, name).model_copy(update=values) for name, values in sections.items()}
        return self.model_copy(update=update)
