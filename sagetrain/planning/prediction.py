"""The predicted time of a step, part by part, and the figures that follow from it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CollectiveTime:
    """All calls of one kind in one step, as one rank sees them."""

    axis: str
    """The axis: tensor, context, experts, data (ZeRO's data- and context-parallel ranks), or pipeline."""
    purpose: str
    kind: str
    """The kind: all-reduce, all-gather, reduce-scatter, reduce, all-to-all or send."""
    count: int
    payload: int
    """Bytes of the whole tensor of one call that is added up, gathered, scattered, or (all-to-all) exchanged by one
    rank."""
    wire_bytes: float
    """Bytes that the rank sends in all calls. A ring moves (n - 1) / n of the payload, an all-reduce twice that."""
    seconds: float
    """Seconds of all calls."""
    exposed: float
    """Seconds of these that the GPU waits."""


@dataclass(frozen=True)
class StepPrediction:
    """Seconds of one optimizer step on the slowest rank, part by part."""

    world_size: int
    tokens_per_step: int
    accumulation: int
    matmul: float
    attention: float
    attention_backend: str
    """The attention function, as Hardware.attention names it."""
    overlap: bool
    """Whether micro-batches go through the blocks in halves. `auto` is decided here."""
    elementwise: float
    optimizer: float
    """The engine's passes over gradients, the update, and new weights."""
    orthogonalizing: float
    """The time of Muon's update beyond AdamW's, on the rank that has most to do."""
    offload: float
    """Seconds that the GPU waits for copies to and from the host's memory, and for the update there."""
    overhead: float
    """Fixed costs."""
    launching: float
    """Seconds by which the host takes longer to launch kernels than they run."""
    idle: float
    """Seconds that the slowest stage of a pipeline waits while the pipeline fills and drains."""
    collectives: tuple[CollectiveTime, ...]
    flops_per_token: int
    """FLOPs with attention counted as it is computed, inside documents."""
    flops_per_token_full_attention: int
    """FLOPs with attention counted over whole sequences, which is the usual convention."""
    peak_flops: float
    """The GPU's peak in 16 bits."""
    peak_of_precisions: float
    """The GPU's peak for the mix of precisions in which the FLOPs are computed."""

    def exposed(self, axis: str) -> float:
        """Return the seconds of communication on an axis that nothing hides."""
        return sum(c.exposed for c in self.collectives if c.axis == axis)

    @property
    def computing(self) -> float:
        """Seconds of the kernels of all micro-steps."""
        return self.matmul + self.attention + self.elementwise

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        parts = self.computing + self.optimizer + self.orthogonalizing + self.offload
        return parts + self.overhead + self.launching + self.idle + sum(c.exposed for c in self.collectives)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks."""
        return self.tokens_per_step / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the share of the GPU's peak that the computed FLOPs take. Products in 8 bits, and
        INT8 attention, count against the peak in 8 bits, so the share is below 1. Recomputation does not count."""
        return self.tokens_per_second / self.world_size * self.flops_per_token / self.peak_of_precisions

    @property
    def mfu_16_bit(self) -> float:
        """The figure of a run's perf/mfu: all FLOPs count against the 16-bit peak, in whatever precision they are
        computed. In 8 bits it can pass 1."""
        return self.tokens_per_second / self.world_size * self.flops_per_token / self.peak_flops

    @property
    def mfu_full_attention(self) -> float:
        """The figure of a run's perf/mfu_full_attention: as mfu_16_bit, with attention counted over whole sequences,
        which is the usual convention."""
        return self.mfu_16_bit * self.flops_per_token_full_attention / self.flops_per_token
