"""How long an optimizer step takes on N GPUs, predicted from single-GPU and link figures. Plain arithmetic: no torch.

A step is `accumulation` micro-steps and one update. A micro-step runs, on one GPU: the matmuls (slower where tensor
parallelism makes them thin), attention, the kernels that only move data (norms, rotary embedding, SwiGLU, residual
stream, softmax of the loss: bytes over bandwidth), and what DeepSpeed does to every gradient. Communication is priced
collective by collective, as our layers and DeepSpeed 0.19 with our settings call them; `Collective` says how much of it
the GPU waits for.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass

from sagetrain.config.arithmetic import data_parallel_size, resolved_zero_stage, token_multiple
from sagetrain.config.errors import ConfigError
from sagetrain.config.schema import RunConfig
from sagetrain.hardware import Hardware
from sagetrain.model.accounting import (
    PREFETCH_BUCKET,
    attention_calls,
    flops_per_token,
    kept_for_backward,
    overlaps,
    parameters_per_rank,
    parts_of,
    reduce_bucket_size,
)

# Bytes moved per token and block, forward and backward, in units of the element size, per column of (the residual
# stream with its two norms and additions; q and k through QK-norm and rotary embedding; the MLP's inner width). Fused
# by torch.compile, every kernel reads its inputs and writes its outputs once. Eager, RMSNorm and rotary embedding also
# write their fp32 intermediates out: 65 and 54 elements per column. sage's quantizers are part of its attention rate.
_FUSED_ELEMENTS = (19, 5, 8)
_EAGER_ELEMENTS = (151, 119, 14)
_FORWARD_SHARE = 0.4
"""Of those bytes: what recomputing a block repeats."""
# Per logit: written by the matmul; read for the log-sum-exp; read and replaced by its gradient.
_FUSED_LOGIT, _EAGER_LOGIT = 3, 35
_ATTENTION_FORWARD = 2 / 7
"""Forward's share of attention (2 matmuls of 7)."""

# Tokens of a sequence -> share of its causal square that lies inside documents: the text of the measured runs (English
# documentation and books, 1,100 tokens a document on average, half of them below 320).
_DOCUMENT_SHARES = {
    128: 1.0, 1024: 0.79, 2048: 0.69, 4096: 0.58, 8192: 0.45, 16384: 0.32, 32768: 0.21, 65536: 0.145, 131072: 0.10
}  # fmt: skip

# ZeRO stage -> bytes moved per parameter of the rank in a micro-step, per parameter of the rank in a step, and per
# parameter that the rank updates in a step: read off DeepSpeed 0.19 in bf16.
#   1 (BF16_Optimizer): zeroes bf16 gradients (2), adds to them (6), converts (6) and adds (12) them to the fp32 sum.
#     Step: flattening and scaling (20), norm (4), clipping (8), zeroing (4) of all; Adam (28) and new bf16 weights (6).
#   2: bucket copy, flatten, divide, convert to fp32 (18), add to the owned part (12, counted in full).
#     Step on the owned part alone: norm, flatten, clip, Adam, new weights.
#   3: fp32 bucket (6), interleaving (8), division (8), add (12); gathered weights are copied into place (6).
#   0 (fp32): gradients accumulate in place (12). Step: flatten, scale and copy back (24), norm, clipping, Adam.
_STATE_BYTES = {0: (12, 64, 0), 1: (26, 36, 34), 2: (30, 0, 60), 3: (40, 0, 60)}

OVERLAP = 0.2
"""Of the shorter of a collective and the matmuls beside it, what running both at once saves: NCCL takes multiprocessors
that a matmul counted on, and both slow down (TP 4, 1B, H200: collectives of 128 ms alone take 195 beside kernels of
about 290, which then take 313; RESULTS.md). Copies save all but Hardware.copy_latency."""

_WIRE = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}


def document_share(seq_length: int) -> float:
    """Share of the causal square of a packed sequence that attention inside documents computes, for text as measured
    (_DOCUMENT_SHARES), linear in the logarithm of the length; past the table the pairs of a token stay the same."""
    points = list(_DOCUMENT_SHARES.items())
    if seq_length >= points[-1][0]:
        return points[-1][1] * points[-1][0] / seq_length
    for (low, before), (high, after) in itertools.pairwise(points):
        if low <= seq_length < high:
            return before + (after - before) * math.log(seq_length / low) / math.log(high / low)
    return 1.0


@dataclass(frozen=True)
class Collective:
    """All calls of one kind in one step, as one rank sees them."""

    axis: str
    """tensor, context or data (ZeRO's: data- and context-parallel ranks)."""
    purpose: str
    kind: str
    """all-reduce, all-gather, reduce-scatter or all-to-all."""
    count: int
    payload: int
    """Bytes of the whole tensor of one call: added up, gathered, scattered, or (all-to-all) exchanged by one rank."""
    wire_bytes: float
    """Bytes that the rank sends in all calls: a ring moves (n - 1) / n of the payload, an all-reduce twice that."""
    seconds: float
    """Of all calls."""
    exposed: float
    """Of these, seconds that the GPU waits."""


@dataclass(frozen=True)
class StepPrediction:
    """Seconds of one optimizer step on the slowest rank, part by part."""

    world_size: int
    tokens_per_step: int
    accumulation: int
    matmul: float
    attention: float
    elementwise: float
    optimizer: float
    """DeepSpeed's passes over gradients, Adam, new weights."""
    overhead: float
    """Fixed costs."""
    launching: float
    """By how much the host takes longer to launch kernels than they run."""
    collectives: tuple[Collective, ...]
    flops_per_token: int
    peak_flops: float

    def exposed(self, axis: str) -> float:
        """Seconds of communication on an axis that nothing hides."""
        return sum(c.exposed for c in self.collectives if c.axis == axis)

    @property
    def seconds(self) -> float:
        """The whole step."""
        parts = self.matmul + self.attention + self.elementwise + self.optimizer + self.overhead + self.launching
        return parts + sum(c.exposed for c in self.collectives)

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks."""
        return self.tokens_per_step / self.seconds

    @property
    def mfu(self) -> float:
        """Share of the peak, by the convention of flops_per_token."""
        return self.tokens_per_second / self.world_size * self.flops_per_token / self.peak_flops


def predict(cfg: RunConfig, world_size: int, vocab_size: int, hardware: Hardware) -> StepPrediction:
    """One step at the largest tokens per step of the schedule; `vocab_size` is padded.

    `cfg` must fit `world_size` (config/rules). Backends `auto` and `reference` are priced as sdpa.
    """
    rank = _Rank(cfg, world_size, vocab_size, hardware)
    tokens = max(cfg.tokens_per_step.named_tokens.values())
    micro_step = token_multiple(cfg, data_parallel_size(cfg, world_size))
    accumulation = max(1, tokens // micro_step)
    scale = 1 / hardware.compute_scale
    matmul, attention, elementwise = (accumulation * scale * part for part in rank.micro_step())
    per_micro, per_step, per_share = _STATE_BYTES[rank.zero_stage]
    wide = 2 if rank.element == 4 and rank.zero_stage else 1
    touched = accumulation * per_micro + per_step + per_share / rank.replicas
    optimizer = scale * wide * touched * rank.parameters / hardware.memory_bandwidth
    collectives = (
        *_tensor_parallel(rank, accumulation, matmul + elementwise + (attention if rank.in_halves else 0.0)),
        *_context_parallel(rank, accumulation),
        *_data_parallel(rank, accumulation, matmul + attention + elementwise),
    )
    waiting = sum(c.exposed for c in collectives)
    launching = accumulation * rank.launch_seconds() - (matmul + attention + elementwise + waiting)
    return StepPrediction(
        world_size=world_size,
        tokens_per_step=accumulation * micro_step,
        accumulation=accumulation,
        matmul=matmul,
        attention=attention,
        elementwise=elementwise,
        optimizer=optimizer,
        overhead=accumulation * rank.overhead() + hardware.step_seconds,
        launching=max(0.0, launching),
        collectives=collectives,
        flops_per_token=flops_per_token(cfg.model, vocab_size, cfg.data.seq_length),
        peak_flops=hardware.peak_flops,
    )


def calibrate(cfg: RunConfig, vocab_size: int, hardware: Hardware, tokens_per_second: float) -> Hardware:
    """`hardware` with all that runs on the GPU scaled, so that one data-parallel rank reaches `tokens_per_second`.

    Raises:
        ConfigError: fixed costs, launching and communication alone take longer.
    """
    gpus = cfg.parallel.tensor_parallel_size * cfg.parallel.context_parallel_size

    def rate(exponent: float) -> float:
        scaled = dataclasses.replace(hardware, compute_scale=10**exponent)
        return predict(cfg, gpus, vocab_size, scaled).tokens_per_second

    # The time that hosts and links take depends on the scale too, so look for it. A faster GPU hides less of its
    # communication and may even be slower in all: the lowest scale that reaches the figure is meant.
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
    return dataclasses.replace(hardware, compute_scale=10**high)


class _Rank:
    """What one rank computes in a micro-step; context parallelism gives it fewer tokens, in attention fewer heads."""

    def __init__(self, cfg: RunConfig, world_size: int, vocab_size: int, hardware: Hardware):
        self.cfg, self.hardware = cfg, hardware
        self.tensor_size = cfg.parallel.tensor_parallel_size
        self.context_size = cfg.parallel.context_parallel_size
        self.replicas = world_size // self.tensor_size
        """Ranks that ZeRO spreads over, data-parallel and context-parallel."""
        self.zero_stage = resolved_zero_stage(cfg)
        self.compiled = cfg.training.compile != "off"
        self.recomputes = cfg.training.activation_checkpointing == "full"
        self.element = 4 if cfg.training.dtype == "fp32" else 2
        self.tokens = cfg.data.micro_batch_size * cfg.data.seq_length // self.context_size
        self.columns = vocab_size // self.tensor_size
        self.parameters = parameters_per_rank(cfg.model, cfg.attention, vocab_size, self.tensor_size)
        overlap = overlaps(cfg)
        self.parts = parts_of(self.tokens, self.tensor_size, overlap)
        self.in_halves = attention_calls(cfg.data.micro_batch_size, self.tokens, self.tensor_size, overlap) > 1
        """Whether each part has an attention of its own."""
        inside = 1 < self.tensor_size <= hardware.gpus_per_host
        self.copies = bool(cfg.parallel.sequence_parallel and inside and hardware.copy_bandwidth)
        """Whether gathers and scatters go by copy engines."""

    def micro_step(self) -> tuple[float, float, float]:
        """Seconds of matmuls, attention and data movement."""
        layers, again = self.cfg.model.num_layers, 1 if self.recomputes else 0
        matmul = layers * self._block_matmuls() * (3 + again) + 3 * self._matmul(
            self.columns, self.cfg.model.hidden_size
        )
        attention = layers * self._attention() * (1 + again * _ATTENTION_FORWARD)
        moved = layers * self._block_bytes() * (1 + again * _FORWARD_SHARE) + self._end_bytes()
        return matmul, attention, moved / self.hardware.memory_bandwidth

    def collective(self, axis: str, purpose: str, kind: str, count: int, payload: int) -> Collective:
        """`count` calls over the ranks of an axis, all of them waited for."""
        size = {"tensor": self.tensor_size, "context": self.context_size, "data": self.replicas}[axis]
        bandwidth, latency = self.hardware.link(1 if axis == "tensor" else self.tensor_size, size)
        if self.copies and axis == "tensor" and kind != "all-reduce":
            bandwidth, latency = self.hardware.copy_bandwidth, self.hardware.copy_latency
        wire = count * _WIRE[kind] * (size - 1) / size * payload
        seconds = wire / bandwidth + count * latency
        return Collective(axis, purpose, kind, count, payload, wire, seconds, exposed=seconds)

    def launch_seconds(self) -> float:
        """The host's time to launch a micro-step."""
        hardware = self.hardware
        part = hardware.part_launch_seconds if self.compiled else hardware.eager_launch_seconds
        if self.tensor_size > 1:  # forward and backward each two all-reduces, or four gathers and scatters
            call = hardware.copy_launch_seconds if self.copies else hardware.collective_launch_seconds
            part += (8 if self.cfg.parallel.sequence_parallel else 4) * call
        return self.cfg.model.num_layers * (hardware.block_launch_seconds + self.parts * part)

    def overhead(self) -> float:
        """Fixed costs of a micro-step."""
        blocks = self.cfg.model.num_layers * (self.zero_stage == 3)
        return self.hardware.micro_step_seconds + blocks * self.hardware.zero3_block_seconds

    def _matmul(self, outputs: int, inputs: int) -> float:
        """Seconds of [tokens, inputs] x [inputs, outputs]; the two matmuls of its backward take as long each."""
        flops = 2 * self.tokens * outputs * inputs
        return flops * (self.element / 2) / self.hardware.matmul_rate(self.tokens, outputs, inputs)

    def column_matmuls(self) -> float:
        """q, k, v, gate and up of a block, forward; their input gradients take as long, their weight gradients too."""
        model, split, hidden = self.cfg.model, self.tensor_size, self.cfg.model.hidden_size
        query = model.num_attention_heads * model.head_dim // split
        key = model.num_key_value_heads * model.head_dim // split
        inner = model.ffn_hidden_size // split
        return self._matmul(query, hidden) + 2 * self._matmul(key, hidden) + 2 * self._matmul(inner, hidden)

    def _block_matmuls(self) -> float:
        """The same and those of out and down."""
        model, split, hidden = self.cfg.model, self.tensor_size, self.cfg.model.hidden_size
        query, inner = model.num_attention_heads * model.head_dim // split, model.ffn_hidden_size // split
        return self.column_matmuls() + self._matmul(hidden, query) + self._matmul(hidden, inner)

    def _attention(self) -> float:
        model, length = self.cfg.model, self.cfg.data.seq_length
        rates, backend = self.hardware.attention, self.cfg.attention.backend
        if backend == "sage" and self.cfg.attention.recipe == "scores":
            backend = "sage scores"
        backend = backend if backend in rates else "sdpa"
        if self.cfg.data.document_attention:
            backend, length = f"{backend} over documents", length * document_share(length)
        width = model.num_attention_heads * model.head_dim // self.tensor_size
        return 7 * self.tokens * length * width * (self.element / 2) / rates[backend].at(model.head_dim, length)

    def _block_bytes(self) -> float:
        """The residual stream is whole on every rank unless sequence parallelism shards it; the rest is split."""
        model = self.cfg.model
        heads = (model.num_attention_heads + model.num_key_value_heads) * model.head_dim
        stream, rotated, inner = _FUSED_ELEMENTS if self.compiled else _EAGER_ELEMENTS
        if self.context_size > 1:  # q, k, v and o are packed and unpacked around their all-to-alls
            rotated += 8
        shards = self.tensor_size if self.cfg.parallel.sequence_parallel else 1
        if self.copies:  # four scatters sum up all parts of a shard
            stream += 4 * (shards + 1)
        columns = (
            stream * model.hidden_size / shards + (rotated * heads + inner * model.ffn_hidden_size) / self.tensor_size
        )
        return self.element * self.tokens * columns

    def _end_bytes(self) -> float:
        """Embedding, final norm, and the loss over the logits."""
        stream, logit = (_FUSED_ELEMENTS[0], _FUSED_LOGIT) if self.compiled else (_EAGER_ELEMENTS[0], _EAGER_LOGIT)
        return self.element * self.tokens * ((5 + stream / 2) * self.cfg.model.hidden_size + logit * self.columns)


def _tensor_parallel(rank: _Rank, accumulation: int, compute: float) -> list[Collective]:
    """What parallel/collectives.py and layers.py call around the two halves of a block, the embedding and the head.

    With a micro-batch in two parts, those of one run beside the `compute` of the other (attention is no part of it
    where it sees both), a third of which is forward. With one, only the sum of a column-parallel layer's input
    gradients has company: the gradients of its weights.
    """
    if rank.tensor_size == 1:
        return []
    cfg, layers, calls = rank.cfg, rank.cfg.model.num_layers, accumulation * rank.parts
    payload = rank.tokens * cfg.model.hidden_size * rank.element // rank.parts
    sharded = cfg.parallel.sequence_parallel
    entering, leaving = ("all-gather", "reduce-scatter") if sharded else (None, "all-reduce")
    forward, backward, into = compute / 6, compute / 3, compute / 3
    if rank.parts == 1:
        weights = layers * rank.column_matmuls() / rank.hardware.compute_scale
        forward, backward, into = 0.0, 0.0, accumulation * weights
    overlap, waited = (1, rank.hardware.copy_latency) if rank.copies else (OVERLAP, 0.0)
    rows = [
        _beside(rank.collective("tensor", purpose, kind, calls * count, payload), seconds, overlap, waited)
        for purpose, kind, count, seconds in (
            ("forward: into the layers", entering, 2 * layers + 1, forward),
            ("forward: out of the layers", leaving, 2 * layers + 1, forward),
            ("recomputed: into the layers", entering if rank.recomputes else None, 2 * layers, forward),
            ("recomputed: out of the layers", leaving if rank.recomputes else None, 2 * layers, forward),
            ("backward: out of the layers", entering, 2 * layers + 1, backward),
            ("backward: into the layers", leaving, 2 * layers, into),
            ("backward: into the head", leaving, 1, 0.0),
        )
        if kind
    ]
    # Gains are whole on every rank but see their rank's heads or tokens: of q and k, and of the residual stream, where
    # a block has the next one's too unless it is recomputed. Nothing runs beside their sum, at the end of a block.
    width = 2 * cfg.model.head_dim * (cfg.attention.qk_norm != "none")
    width += (2 if rank.recomputes else 3) * cfg.model.hidden_size * sharded
    for purpose, count, size in (
        ("backward: gains outside of blocks", calls, cfg.model.hidden_size * sharded),
        ("backward: gains", accumulation * layers, rank.parts * width),
    ):
        if size:
            rows.append(rank.collective("tensor", purpose, "all-reduce", count, size * rank.element))
    return rows


def _context_parallel(rank: _Rank, accumulation: int) -> list[Collective]:
    """One all-to-all of q, k and v together before attention and one of its output after, forward and backward."""
    if rank.context_size == 1:
        return []
    model, count = rank.cfg.model, accumulation * rank.cfg.model.num_layers
    head = rank.tokens * model.head_dim * rank.element // rank.tensor_size
    queries, all_heads = model.num_attention_heads, model.num_attention_heads + 2 * model.num_key_value_heads
    passes = ["forward", "backward", *(["recomputed"] if rank.recomputes else [])]
    return [
        rank.collective("context", f"{name}: {what}", "all-to-all", count, heads * head)
        for name in passes
        for what, heads in (("q, k, v", all_heads), ("output", queries))
    ]


def _data_parallel(rank: _Rank, accumulation: int, compute: float) -> list[Collective]:
    """ZeRO, as DeepSpeed runs it for train/engine.py: gradients travel in fp32; stages 1 and 2 all-reduce them
    (use_multi_rank_bucket_allreduce), stage 2 in every micro-step. ZeRO-3 gathers weights ahead, beside `compute`."""
    if rank.replicas == 1:
        return []
    size, stage = rank.parameters, rank.zero_stage
    buckets = -(-size // reduce_bucket_size(rank.cfg, size)) if stage > 1 else 1
    calls = accumulation * buckets if stage > 1 else 1
    kind = "reduce-scatter" if stage == 3 else "all-reduce"
    # Nothing hides it: train/engine.py turns DeepSpeed's overlap_comm off.
    gradients = rank.collective("data", "gradients", kind, calls, 4 * size // buckets)
    if stage == 0:
        return [gradients]
    if stage < 3:
        return [gradients, rank.collective("data", "new weights", "all-gather", 1, rank.element * size)]
    gathered = 2 * size - kept_for_backward(rank.cfg, size)  # recomputing a block uses what its backward gathers
    gathers = -(-gathered // PREFETCH_BUCKET)
    payload = rank.element * gathered // gathers
    weights = rank.collective("data", "weights", "all-gather", accumulation * gathers, payload)
    return [_beside(weights, compute), gradients]


def _beside(collective: Collective, compute: float, overlap: float = OVERLAP, waited: float = 0.0) -> Collective:
    """The same, while `compute` seconds of kernels run that do not wait for it but for `waited` of every call."""
    hidden = overlap * min(collective.seconds - waited * collective.count, compute)
    return dataclasses.replace(collective, exposed=collective.seconds - hidden)
