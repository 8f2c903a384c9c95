"""The sections of the YAML that say what is computed and in how many bits: model, attention, linear layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from sagetrain.config.linear_sizes import AUTO_PRECISION, LOW_BIT, LinearSizes, LowBit
from sagetrain.config.sections.base import Section

QKNorm = Literal["none", "before_rope", "after_rope", "all_heads"]
"""The places where q and k are normalized."""
MOST_HEADS = 100_000
"""The largest number of query heads. Checks go through all of them."""
Norms = Literal["pre", "post", "sandwich"]
"""The places of the norms on the residual stream."""


class RopeScaling(Section):
    """Rotary frequencies of a model that was extended to longer sequences than it was first trained on. Fast
    frequencies stay as they are, slow ones are divided by `factor`, and those between are interpolated."""

    type: Literal["llama3", "yarn", "linear"]
    """The rule that says where fast ends and slow begins: llama3 goes by wavelengths, yarn (arXiv 2309.00071) by turns.
    With linear all frequencies are slow, as in Gemma 3."""
    factor: Annotated[float, Field(ge=1)]
    """Factor by which the sequences are longer now."""
    original_seq_length: PositiveInt
    """Context length before the extension."""
    low_freq_factor: PositiveFloat = 1.0
    """llama3: frequencies that turn fewer times than this in original_seq_length tokens are slow."""
    high_freq_factor: PositiveFloat = 4.0
    """llama3: frequencies that turn more times than this in original_seq_length tokens are fast."""
    beta_slow: PositiveFloat = 1.0
    """yarn: frequencies that turn fewer times than this in original_seq_length tokens are slow."""
    beta_fast: PositiveFloat = 32.0
    """yarn: frequencies that turn more times than this in original_seq_length tokens are fast."""
    attention_factor: PositiveFloat | None = None
    """yarn: factor that q and k are multiplied by. Default: 0.1 ln(factor) + 1."""
    truncate: bool = True
    """yarn: round the numbers of the frequencies between which is interpolated to whole ones. GPT-OSS does not."""


class WindowsConfig(Section):
    """Layers whose attention reaches back through a window of tokens only."""

    tokens: PositiveInt
    """Tokens that a query sees, its own included."""
    pattern: Annotated[str, Field(pattern="^[WF]+$")] = "WWWF"
    """The layers with a window (W) and with full attention (F), repeated over the layers: WWWF in OLMo 3, WWWWWF in
    Gemma 3."""
    rope_theta: Annotated[float, Field(gt=1)] | None = None
    """Base of the rotary position embedding in layers with a window, where model.rope_scaling does not apply. Default:
    model.rope_theta."""


class DeltaNetConfig(Section):
    """Layers with a gated delta net (arXiv 2412.06464) in the place of attention. A head keeps a matrix of key_dim x
    value_dim, which decays with each token and learns to map the token's key to its value. Time grows with the tokens,
    not with their square, and generation keeps the matrix in the place of keys and values."""

    pattern: Annotated[str, Field(pattern="^[DF]+$")] = "DDDF"
    """The layers with a gated delta net (D) and with full attention (F), repeated over the layers: DDDF in Qwen3-Next,
    Qwen3.5 and OLMo Hybrid."""
    key_heads: PositiveInt
    """Heads of q and k."""
    value_heads: PositiveInt = Field(default_factory=lambda data: data["key_heads"], validate_default=True)
    """Heads of v, of the gates and of the output: a multiple of key_heads. Default: key_heads."""
    key_dim: PositiveInt = 128
    """Width of a head of q and k."""
    value_dim: PositiveInt = 128
    """Width of a head of v."""
    conv_size: Annotated[int, Field(ge=2, le=4)] = 4
    """Tokens that each channel of q, k and v is convolved over, its own included."""


class BalanceConfig(Section):
    """The means that keep a router from sending most tokens to a few experts."""

    bias_rate: NonNegativeFloat = 0.0
    """After each step, the bias of an expert rises by this if the expert had fewer tokens than the mean, and falls if
    it had more (arXiv 2408.15664, with 0.001). The bias counts in the choice of experts alone. The classes of
    transformers that we export to have no such bias."""
    aux_weight: NonNegativeFloat = 0.01
    """Weight of the auxiliary loss of each layer with experts: number x the sum over experts of share of choices x mean
    score. Shares are those of all tokens of the step before, on all ranks, so that accumulation changes nothing."""
    z_weight: NonNegativeFloat = 0.0
    """Weight of the z loss of each layer with experts: the mean square of the log-sum-exp of the router's logits (arXiv
    2202.08906, with 0.001)."""


class ExpertsConfig(Section):
    """Layers whose MLP is a mixture of experts: a router sends each token to a few of many small MLPs, and their
    outputs are added up. No token is dropped."""

    number: Annotated[int, Field(ge=2)]
    """Experts of a layer."""
    per_token: PositiveInt
    """Experts that a token goes to: those with the highest scores; of equal ones, the first."""
    ffn_size: PositiveInt
    """Inner width of one expert (gate and up each have this many columns)."""
    shared: NonNegativeInt = 0
    """Experts that every token goes to, beside those that it chooses. Together they are one MLP of shared x ffn_size
    columns."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """The function that makes scores of the router's logits: softmax over all experts, or sigmoid of each one."""
    renormalize: bool = True
    """Divide the scores of a token's experts by their sum, before they multiply the experts' outputs."""
    scale: PositiveFloat = 1.0
    """Factor on these scores."""
    dense_layers: NonNegativeInt = 0
    """First layers that have an MLP of model.ffn_hidden_size in the place of experts."""
    balance: BalanceConfig = BalanceConfig()


class ModelConfig(Section):
    """The shape of the Llama-style decoder."""

    num_layers: Annotated[int, Field(gt=0, le=10_000)]
    """Transformer blocks."""
    hidden_size: PositiveInt
    """Width of the residual stream."""
    ffn_hidden_size: PositiveInt
    """Inner width of the SwiGLU MLP (gate and up each have this many columns). With experts: of the layers that have
    none."""
    num_attention_heads: Annotated[int, Field(gt=0, le=MOST_HEADS)]
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
    """Number of tokens in the vocabulary. Default: the vocabulary size of data.tokenizer. Padded up to a multiple of
    128 inside the model."""
    tie_embeddings: bool = False
    """Use one matrix as input embedding and output projection."""
    rope_theta: Annotated[float, Field(gt=1)] = 10000.0
    """Base of the rotary position embedding."""
    rope_scaling: RopeScaling | None = None
    """Extension of the rotary frequencies to longer sequences. Default: none."""
    norms: Norms = "pre"
    """RMSNorms of the blocks: pre: of the inputs of attention and MLP. post: of their outputs, before these are added
    to the residual stream, as in OLMo 2 and 3. sandwich: of both, as in Gemma 3."""
    qkv_bias: bool = False
    """Add a learned bias to q, k and v each, as Qwen2 and Qwen2.5 do. Biases begin as 0 and do not decay."""
    windows: WindowsConfig | None = None
    """Layers with windows: tokens, pattern, rope_theta. Default: none, all layers have full attention."""
    delta_net: DeltaNetConfig | None = None
    """Layers with a gated delta net in the place of attention: key_heads, pattern, ... Default: none, all layers have
    attention. On a GPU they need the package fla (pip install 'sagetrain[fla]')."""
    sinks: bool = False
    """Give each query head a sink: a learned score beside those of the keys, whose value is zero, as in GPT-OSS. Sinks
    begin as 0 and do not decay. attention.backend sage and reference take them."""
    value_embeddings: bool = False
    """Add embeddings of the tokens to the values of attention in every second layer, the last one included, each head's
    times a gate that reads the layer's input, as nanochat does. They are vocabulary x key/value width more weights in
    each of these layers: memory and optimizer states, and little time. They have the learning rate of the embedding.
    Layers with a gated delta net have none, and the classes of transformers that we export to neither."""
    experts: ExpertsConfig | None = None
    """Mixture of experts: number, per_token, ffn_size, ... Default: none, all layers have a dense MLP."""
    activation: Literal["swiglu", "geglu"] = "swiglu"
    """The MLP's: swiglu is silu(gate) * up, geglu is gelu(gate) * up, by the tanh form of gelu, as in Gemma."""
    conventions: Literal["llama", "gemma", "gpt_oss"] = "llama"
    """The family whose details count. gemma: embeddings are multiplied by sqrt(hidden_size), and norms multiply by 1 +
    their gain, which begins as 0. gpt_oss: the output of attention, routers and experts have biases, which begin as 0
    and do not decay; experts compute (up + 1) * gate * sigmoid(1.702 gate), where gate is at most 7 and up -7 to 7; and
    rope_scaling is that of layers with windows as well."""
    query_scale: PositiveInt | None = None
    """Scores are divided by the square root of this. Default: head_dim."""
    norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    """Epsilon of every RMSNorm, QK-norm included."""
    init_std: Annotated[float, Field(gt=0, le=1)] = 0.02
    """Standard deviation of the initial weights; projections into the residual stream get it / sqrt(2 num_layers)."""


class AttentionConfig(Section):
    """The attention backend, and the SageBwd settings."""

    backend: Literal["sage", "sdpa", "flash", "reference", "auto"] = "sage"
    """sage: trainable INT8 attention (its torch twin on a machine without a GPU). sdpa: torch's 16-bit attention.
    flash: an installed flash-attn 2, 3 or 4. reference: plain matmuls. auto: the fastest of sage, flash and sdpa that
    passes the admission test on this GPU. It is timed once, when the run begins, with documents as long as those of the
    data, and is kept when the run continues. Without a GPU: sdpa."""
    recipe: Literal["auto", "fine", "paper", "scores"] = "auto"
    """The products that sage quantizes: paper (six of the seven products, one scale per tile), fine (all but P V and dO
    V^T, with the finest scales that each product allows), scores (Q K^T alone, forward and backward). auto: the faster
    of fine and scores, chosen as backend auto is; without a GPU: fine."""
    qk_norm: QKNorm = "before_rope"
    """RMS normalization of each head's q and k with learned gain, before or after the rotary embedding. all_heads: of
    all heads' q together, and k, before the rotary embedding, as OLMo 2 and 3 do; under tensor parallelism the ranks
    then exchange two numbers a token in each block."""
    smooth_k: bool = True
    """Subtract the mean key before quantizing (SageBwd section 3). Turning it off triggers a guidance finding."""

    @property
    def may_be_int8(self) -> bool:
        """Whether anything may be quantized. With backend `auto` this is decided when the run begins."""
        return self.backend in ("sage", "auto")


class LinearConfig(Section):
    """The precision in which the blocks' linear layers and the output projection multiply. Embedding and norms stay in
    16 bits."""

    precision: Literal["bf16", LowBit, "auto"] = "auto"
    """bf16: as training.dtype says. fp8 (e4m3; Ada, Hopper and newer GPUs) and int8: operands are rounded to 8 bits
    before each product, each row scaled by its current magnitude; results, weights and optimizer keep their precision.
    auto: int8 for the layers that are large enough to gain 5 % or more, timed on this GPU once, when the run begins, at
    the sizes that a rank holds. auto stays with bf16 where no layer gains, for layers with a side that is not a
    multiple of 16 (an error with fp8 and int8), and where no GPU has INT8. A run that continues keeps the choice. The
    cost of int8 in loss: docs/low-bit-linear.md."""
    head: Literal["bf16", LowBit] = "bf16"
    """The precision of the output projection. bf16: as training.dtype says. fp8: logits and both gradients. int8:
    the logits alone; gradients stay in 16 bits, because 127 steps are too few for probabilities. Needs linear.precision
    fp8 or int8. Evaluation in training has the same precision."""
    keep_first_blocks: NonNegativeInt = 0
    """Blocks at the input whose linear layers stay in 16 bits."""
    keep_last_blocks: NonNegativeInt = 0
    """Blocks at the output whose linear layers stay in 16 bits."""
    keep_layers_below: NonNegativeInt = 0
    """Linear layers with fewer weights than this on a rank stay in 16 bits (q, k and v count as one layer, gate and up
    too). Rounding takes longer than small matmuls save. On an H200 the limit is about 8 million weights for a layer
    alone, and lower where a whole model keeps the GPU busy (results/log/step.md)."""
    keep_first_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """In this first part of training.total_tokens all linear layers are in 16 bits. The loss that int8 costs from the
    first token on is probably lost while the learning rate warms up (results/int8-warm-up). Default: 8 bits at once."""
    keep_last_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """In this last part of training.total_tokens all linear layers are in 16 bits, so that the model is finished in the
    precision in which it will be evaluated and exported. Default: 8 bits to the end."""

    @property
    def low_bit(self) -> bool:
        """Whether layers multiply in 8 bits. With precision `auto` no layer does until the choice is made."""
        return self.precision in LOW_BIT

    @property
    def phases(self) -> list[LinearConfig]:
        """The settings that a run goes through, in order. Each of them holds for a whole phase."""
        first, last = self.keep_first_fraction, self.keep_last_fraction
        if not (self.low_bit and (first or last)):
            return [self]
        low = self.model_copy(update={"keep_first_fraction": None, "keep_last_fraction": None})
        return [*[SIXTEEN_BITS] * bool(first), low, *[SIXTEEN_BITS] * bool(last)]

    def choices(self, layers: Iterable[LinearSizes]) -> list[LinearConfig]:
        """Return the settings that `auto` may choose from, given the layers on a rank: first all layers in 16 bits,
        then 8 bits for the layers of at least a given size, with the size rising."""
        least = self.keep_layers_below
        sizes = {least, *(max(least, layer.weights) for layer in layers if not layer.odd)}
        wide, low = (self.model_copy(update={"precision": precision}) for precision in ("bf16", AUTO_PRECISION))
        return [wide, *(low.model_copy(update={"keep_layers_below": below}) for below in sorted(sizes))]

    def takes(self, layer: LinearSizes) -> bool:
        """Whether this layer multiplies in 8 bits, in a block that multiplies in 8 bits."""
        return self.low_bit and layer.weights >= self.keep_layers_below and not layer.odd

    def low_bit_blocks(self, num_layers: int) -> range:
        """Return the indices of the blocks that multiply in 8 bits."""
        if not self.low_bit:
            return range(0)
        return range(self.keep_first_blocks, max(self.keep_first_blocks, num_layers - self.keep_last_blocks))


SIXTEEN_BITS = LinearConfig(precision="bf16")
"""All linear layers in training.dtype."""
