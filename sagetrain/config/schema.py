"""The whole configuration of a run: one typed section per YAML section.

Every field carries its documentation right below it; `sagetrain plan`, the error messages and the key reference are
generated from these. Unknown keys are errors. This module imports no torch: it must load on a laptop in no time.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)


class Section(BaseModel):
    """Base of all sections: immutable, no unknown keys, no silent conversions ("1" or true is no number); field
    docstrings become the reference."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


TOKENIZER_NAME, TOKENIZER_JSON = "tokenizer.model", "tokenizer.json"
"""What `sagetrain prepare` calls the tokenizer that it leaves beside a token file: a SentencePiece model, or one of
Hugging Face's tokenizers."""


def tokenizer_in(folder: Path) -> Path:
    """The tokenizer of a folder of token files, or of a run; a file that does not exist if there is none."""
    other = folder / TOKENIZER_JSON
    return other if other.is_file() and not (folder / TOKENIZER_NAME).is_file() else folder / TOKENIZER_NAME


Fraction = Annotated[float, Field(ge=0, lt=1)]


class RopeScaling(Section):
    """Rotary frequencies of a model that was stretched to sequences longer than those it was first trained on: fast
    ones stay as they are, slow ones are divided by `factor`, those between get a share of both."""

    type: Literal["llama3", "yarn"]
    """Where fast ends and slow begins: llama3 by wavelengths, yarn (arXiv 2309.00071) by turns."""
    factor: PositiveFloat
    """How much longer the sequences are."""
    original_seq_length: PositiveInt
    """Context length before."""
    low_freq_factor: PositiveFloat = 1.0
    """llama3: frequencies that turn less often than so in original_seq_length tokens are slow."""
    high_freq_factor: PositiveFloat = 4.0
    """llama3: frequencies that turn more often than so are fast."""
    beta_slow: PositiveFloat = 1.0
    """yarn: frequencies that turn less often than so in original_seq_length tokens are slow."""
    beta_fast: PositiveFloat = 32.0
    """yarn: frequencies that turn more often than so are fast."""
    attention_factor: PositiveFloat | None = None
    """yarn: q and k are multiplied by it. Default: 0.1 ln(factor) + 1."""


class ModelConfig(Section):
    """Shape of the Llama-style decoder."""

    num_layers: PositiveInt
    """Transformer blocks."""
    hidden_size: PositiveInt
    """Width of the residual stream."""
    ffn_hidden_size: PositiveInt
    """Inner width of the SwiGLU MLP (gate and up each have this many columns)."""
    num_attention_heads: PositiveInt
    """Query heads."""
    num_key_value_heads: PositiveInt = Field(
        default_factory=lambda data: data["num_attention_heads"], validate_default=True
    )
    """Key/value heads (grouped-query attention). Default: num_attention_heads."""
    head_dim: PositiveInt = Field(
        default_factory=lambda data: data["hidden_size"] // data["num_attention_heads"], validate_default=True
    )
    """Width of one head. Default: hidden_size / num_attention_heads."""
    vocab_size: PositiveInt | None = None
    """Tokens of the vocabulary. Default: that of data.tokenizer. Padded up to a multiple of 128 inside the model."""
    tie_embeddings: bool = False
    """Use one matrix as input embedding and output projection."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary position embedding."""
    rope_scaling: RopeScaling | None = None
    """Of models that were stretched to longer sequences."""
    norm_eps: PositiveFloat = 1e-6
    """Epsilon of every RMSNorm, QK-norm included."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights; projections into the residual stream get it / sqrt(2 num_layers)."""


class AttentionConfig(Section):
    """Which attention runs, and the SageBwd settings."""

    backend: Literal["sage", "sdpa", "flash", "reference", "auto"] = "sage"
    """sage: trainable INT8 attention (its torch twin on a machine without a GPU). sdpa: torch's 16-bit attention.
    flash: an installed flash-attn 2, 3 or 4. reference: plain matmuls. auto: the fastest of sage, flash and sdpa that
    passes the admission test on this GPU, timed once, when the run begins, with documents as long as the data's; a run
    that continues keeps it. Without a GPU: sdpa."""
    recipe: Literal["auto", "fine", "paper", "scores", "gradients"] = "auto"
    """What sage quantizes and how: paper (six of the seven products, one scale per tile), fine (all but P V and
    dO V^T, the finest scales that each product allows), scores (Q K^T alone, forward and backward), gradients (dV, dK
    and dQ alone, as in fine). auto: the faster of fine and scores, chosen as backend auto is; without a GPU: fine."""
    qk_norm: Literal["none", "before_rope", "after_rope"] = "before_rope"
    """RMS normalization of each head's q and k with learned gain, before or after the rotary embedding."""
    smooth_k: bool = True
    """Subtract the mean key before quantizing (SageBwd section 3). Turning it off triggers a guidance finding."""
    smooth_q: bool = False
    """Subtract the mean query of each block before quantizing. No consistent gain in the paper: a guidance finding."""


class LinearConfig(Section):
    """In how many bits the blocks' linear layers multiply. Embedding, output projection and norms stay in 16."""

    precision: Literal["bf16", "fp8", "int8"] = "bf16"
    """bf16: as training.dtype says. fp8 (Ada, Hopper and newer GPUs) and int8: operands are rounded to 8 bits before
    each product, scaled by their present magnitudes; results, weights and optimizer keep their precision."""
    recipe: Literal["tensorwise", "rowwise", "rowwise_bf16_wgrad"] = "rowwise"
    """What shares a scale: tensorwise (fp8 only) a whole matrix, with gradients in e5m2; rowwise each token and each
    feature, in e4m3 or INT8; rowwise_bf16_wgrad the same with the gradients of the weights multiplied in 16 bits."""
    keep_first_blocks: NonNegativeInt = 0
    """Blocks at the input whose linear layers stay in 16 bits."""
    keep_last_blocks: NonNegativeInt = 0
    """Blocks at the output whose linear layers stay in 16 bits."""
    keep_layers_below: NonNegativeInt = 0
    """Linear layers of fewer weights than this on a rank stay in 16 bits (q, k and v are one layer, gate and up too):
    rounding takes longer than small matmuls save, by themselves on an H200 below some 8 million (RESULTS.md)."""

    def takes(self, weights: int) -> bool:
        """Whether a layer of so many weights on a rank multiplies in 8 bits, in a block that does."""
        return self.precision != "bf16" and weights >= self.keep_layers_below

    def low_bit_blocks(self, num_layers: int) -> range:
        """Which of the blocks multiply in 8 bits."""
        if self.precision == "bf16":
            return range(0)
        return range(self.keep_first_blocks, max(self.keep_first_blocks, num_layers - self.keep_last_blocks))


class ParallelConfig(Section):
    """How the model and the optimizer state spread over the ranks."""

    world_size: PositiveInt | None = None
    """Ranks (GPUs) of the run: a launch with more or fewer is an error, as where a host did not start. Default: any."""
    tensor_parallel_size: PositiveInt = 1
    """Ranks that share one copy of the model (Megatron tensor parallelism); ranks of one group are neighbours."""
    context_parallel_size: PositiveInt = 1
    """Ranks that share every sequence (Ulysses context parallelism), for long ones: each holds a slice of its tokens,
    and in attention whole sequences with a share of the heads."""
    sequence_parallel: bool = False
    """Shard norms and residual stream along the sequence inside a tensor-parallel group."""
    tensor_parallel_overlap: Literal["auto", "on", "off"] = "auto"
    """Take the tokens of a micro-batch in two halves, so that the tensor-parallel collectives of each run beside the
    matmuls of the other. That launches twice as many kernels; auto: on where a block has work enough to hide it."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    """DeepSpeed ZeRO stage over data- and context-parallel ranks. bf16 runs 0 as 1: DeepSpeed's bf16 stage 0 is wrong.
    """


class DataSource(Section):
    """One token file and its share of the mix."""

    path: str
    """Path of a token file written by `sagetrain prepare`, without .bin/.idx."""
    weight: PositiveFloat = 1.0
    """Relative share of the sequences drawn from this source; the weights of a list need not sum to 1."""


class DataConfig(Section):
    """Token files, and how sequences are cut from them."""

    train: Annotated[list[DataSource], Field(min_length=1)]
    """Training sources, blended by weight."""
    valid: list[DataSource] = []
    """Held-out sources for evaluation. Empty: no evaluation."""
    tokenizer: str | None = None
    """SentencePiece model (tokenizer.model) or Hugging Face tokenizer (tokenizer.json). Default: the one that
    `sagetrain prepare` left beside train[0]; token files from elsewhere need none if model.vocab_size is given."""
    seq_length: PositiveInt
    """Tokens of one training sequence (context length)."""
    micro_batch_size: PositiveInt
    """Sequences one rank processes at once."""
    document_attention: bool = True
    """Attention does not cross document boundaries inside a packed sequence."""
    document_positions: bool = True
    """Rotary positions restart at every document boundary. Needs document_attention."""
    num_workers: NonNegativeInt = 1
    """Threads that prepare batches ahead of the step; 0 prepares them in the training thread."""

    @property
    def tokenizer_path(self) -> str:
        """The tokenizer file: as configured, else beside the first training source."""
        return self.tokenizer or str(tokenizer_in(Path(self.train[0].path).parent))


class ConstantTokens(Section):
    """The same tokens per step throughout."""

    schedule: Literal["constant"]
    tokens: PositiveInt
    """Tokens per optimizer step."""

    @property
    def named_tokens(self) -> dict[str, int]:
        """Dotted key -> every tokens-per-step value that the schedule names; so in all schedules."""
        return {"tokens_per_step.tokens": self.tokens}


class RampTokens(Section):
    """Linear in the tokens seen, from start to end (up or down), then constant."""

    schedule: Literal["ramp"]
    start: PositiveInt
    """Tokens per step at the beginning."""
    end: PositiveInt
    """Tokens per step after the ramp."""
    ramp_tokens: PositiveInt
    """Tokens seen when the ramp ends."""
    multiple: PositiveInt | None = None
    """The ramp's tokens per step are rounded down to multiples of this many tokens, the same on any number of ranks;
    a whole number of micro-steps in every layout used. Default: the largest that divides both ends."""

    @property
    def named_tokens(self) -> dict[str, int]:
        named = {"start": self.start, "end": self.end, "multiple": self.multiple}
        return {f"tokens_per_step.{name}": tokens for name, tokens in named.items() if tokens is not None}

    @property
    def rounding(self) -> int:
        """`multiple`, or its default."""
        return self.multiple or math.gcd(self.start, self.end)


class Stage(Section):
    """One piece of a staged schedule."""

    from_tokens: NonNegativeInt
    """Tokens seen at which this stage begins; the first stage begins at 0."""
    tokens: PositiveInt
    """Tokens per optimizer step in this stage."""


class StagedTokens(Section):
    """Piecewise constant, up or down."""

    schedule: Literal["stages"]
    stages: Annotated[list[Stage], Field(min_length=1)]
    """Stages in increasing order of from_tokens."""

    @property
    def named_tokens(self) -> dict[str, int]:
        return {f"tokens_per_step.stages.{i}.tokens": stage.tokens for i, stage in enumerate(self.stages)}


class NoiseAwareTokens(Section):
    """Decided while training: as many as leave enough gradient noise to hide the error of quantized attention in. Needs
    stability.noise_scale and stability.quant_noise."""

    schedule: Literal["noise_aware"]
    start: PositiveInt
    """Tokens per step at the beginning."""
    floor: PositiveInt
    """Least tokens per step."""
    ceiling: PositiveInt
    """Most tokens per step."""
    hold_tokens: PositiveInt
    """Tokens between two changes, at least."""
    margin: PositiveFloat = 0.1
    """Largest quant_noise/<layer>/ratio, of any layer, that does not lower them."""
    headroom: Fraction = 0.5
    """They are raised where the ratio would be at most this part of the margin. What lies between changes nothing."""
    max_factor: Annotated[float, Field(gt=1)] = 1.5
    """Largest change at a time, up or down."""
    multiple: PositiveInt | None = None
    """Tokens per step are multiples of this many tokens, the same on any number of ranks; a whole number of micro-steps
    in every layout used. Default: the largest that divides start, floor and ceiling."""

    @property
    def named_tokens(self) -> dict[str, int]:
        named = {"start": self.start, "floor": self.floor, "ceiling": self.ceiling, "multiple": self.multiple}
        return {f"tokens_per_step.{name}": tokens for name, tokens in named.items() if tokens is not None}

    @property
    def rounding(self) -> int:
        """`multiple`, or its default."""
        return self.multiple or math.gcd(self.start, self.floor, self.ceiling)


TokensPerStepConfig = Annotated[
    Union[ConstantTokens, RampTokens, StagedTokens, NoiseAwareTokens], Field(discriminator="schedule")
]


class OptimizerConfig(Section):
    """AdamW with fp32 master weights."""

    lr: PositiveFloat
    """Peak learning rate."""
    betas: Annotated[tuple[Fraction, Fraction], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)] = (
        0.9,
        0.95,
    )
    """AdamW's decay rates."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay of matrices; norm gains and biases get none."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 turns clipping off."""


class LrScheduleConfig(Section):
    """Learning rate as a function of the tokens seen."""

    shape: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    """Decay after the warm-up: cosine or linear over the run, wsd (stable, then linear decay at the end), constant."""
    warmup_tokens: NonNegativeInt = 0
    """Tokens of linear warm-up from 0."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the run."""
    decay_tokens: PositiveInt | None = None
    """Only for wsd: tokens of the final decay. Default: a tenth of training.total_tokens."""
    batch_rule: Literal["none", "sqrt", "linear"] = "none"
    """What a change of tokens per step does to the learning rate: none, or times (tokens / reference)^0.5 or ^1."""
    reference_tokens_per_step: PositiveInt | None = None
    """Tokens per step at which optimizer.lr holds unscaled. Required unless batch_rule is none."""


class TrainingConfig(Section):
    """The run itself."""

    run_dir: str
    """Folder of everything the run writes: checkpoints, metrics.jsonl, TensorBoard, resolved configuration."""
    total_tokens: PositiveInt
    """Tokens to train on."""
    init_from: str | None = None
    """Start with the weights of another run, or of one of its checkpoints, and all else new: data, seq_length,
    rope_theta, schedules. Model and tokenizer must be the same. Once this run has a checkpoint it goes on from that."""
    init_moments: bool = False
    """Take over the moments of AdamW too, with init_from."""
    seed: NonNegativeInt = 0
    """Seed of initialization and sample order."""
    perturb: NonNegativeInt = 0
    """Begin from weights that differ in one rounding: the gain of this channel (the first is 1) of the first block's
    norm is the next number above 1. 0: in none. Runs that differ in it alone show how far apart rounding takes equal
    runs, on deterministic machines too (`sagetrain compare --band`)."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Arithmetic of the model; master weights and optimizer state are fp32 in either case."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What the backward pass computes again instead of keeping it: all of every block (full), or what is cheap
    (selective: norms, rotary embedding, SwiGLU, collectives; the results of matmuls and of attention are kept)."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile of the blocks; auto: on with a GPU. At ZeRO 3 a compiled block's weights are gathered together."""
    drop_steps: list[PositiveInt] = []
    """Steps (the first is 1) whose samples are passed over without an update, where a run cannot get past one: a loss
    that is not finite, say. The ledger of every later checkpoint records them."""
    timeout_minutes: PositiveFloat = 30.0
    """How long a step, evaluation or save may be without progress before the run is ended as hung."""
    network_interface: str | None = None
    """Interface (eth0, ib0) that traffic between ranks binds to: NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME are set to
    it. May differ between hosts. Default: the libraries' own choice."""


class EvaluationConfig(Section):
    """Loss on held-out data while training; also run once at the end."""

    every_tokens: PositiveInt | None = None
    """Tokens between evaluations. Default: a tenth of training.total_tokens."""
    num_sequences: PositiveInt = 64
    """Sequences of one evaluation, the same ones each time."""


class CheckpointConfig(Section):
    """When checkpoints are written and which are kept (under training.run_dir/checkpoints).

    Training stands still only while its state is copied to host memory, which takes 12 bytes per parameter of a rank's
    share; it goes on while that is written, and a checkpoint counts once it is wholly on disk.
    """

    every_tokens: PositiveInt | None = None
    """Tokens between checkpoints. Default: a tenth of training.total_tokens. One is always written at the end."""
    keep_last: PositiveInt = 2
    """How many of the newest checkpoints to keep."""
    keep_every_tokens: PositiveInt | None = None
    """Also keep for good the first checkpoint at or past each multiple of this many tokens."""
    resume: Literal["auto", "never"] = "auto"
    """auto: continue from the newest whole checkpoint of run_dir. never: refuse to start in a run_dir that has one."""


class LoggingConfig(Section):
    """Where metrics go."""

    every_steps: PositiveInt = 1
    """Optimizer steps between two lines of metrics.jsonl and the progress bar."""
    tensorboard: bool = True
    """Write TensorBoard events into run_dir/tensorboard."""


class NoiseScaleConfig(Section):
    """The gradient noise scale (arXiv 1812.06162): steps of fewer tokens are mostly noise."""

    every_steps: PositiveInt | None = 10
    """Steps between two measurements, which read the gradients of every micro-batch once more, and under context
    parallelism add them up over ranks. Steps of a single micro-batch give none. null: never."""
    decay: Fraction = 0.9
    """What a measurement leaves of the averages of variance and squared gradient before it."""


class QuantNoiseConfig(Section):
    """The error of quantized attention in the gradients of weights, against the noise that these have anyway."""

    every_steps: PositiveInt | None = None
    """Steps between two probes; null: never. A probe takes the time of three to four micro-batches, so that 500 cost
    less than 1 % of any run, and memory for the gradients of three. Not at ZeRO 3."""


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
    """What INT8 attention loses, measured while training beside float32: quant/<layer>/<tensor>/* in the metrics."""

    every_steps: PositiveInt | Literal["auto"] | None = "auto"
    """Steps between two measurements, each on one micro-batch. auto: 100 where attention quantizes something. null:
    never."""
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


class GuidanceConfig(Section):
    """The stability rules of the SageBwd papers."""

    override: list[str] = []
    """Names of rules whose finding is accepted for this run; recorded in the run folder and in every checkpoint."""


class RunConfig(Section):
    """One run: what the YAML file holds."""

    model: ModelConfig
    attention: AttentionConfig = AttentionConfig()
    linear: LinearConfig = LinearConfig()
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig
    tokens_per_step: TokensPerStepConfig
    """Tokens per optimizer step: as a function of the tokens seen (constant, ramp, stages), or noise_aware."""
    optimizer: OptimizerConfig
    lr_schedule: LrScheduleConfig = LrScheduleConfig()
    training: TrainingConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    stability: StabilityConfig = StabilityConfig()
    guidance: GuidanceConfig = GuidanceConfig()
    deepspeed: dict[str, Any] = {}
    """Extra DeepSpeed keys (profilers, communication options). A key that SageTrain generates is an error."""
