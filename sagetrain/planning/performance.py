"""Predict the time of an optimizer step on N GPUs from the rates of a single GPU and of links. Plain arithmetic: no
torch.

A step is `accumulation` micro-steps and one update. On one GPU, a micro-step runs the operations of
costs/operations.py: the matmuls (slower where tensor parallelism makes them thin), attention, and the passes that only
move data (bytes over bandwidth). Then the engine processes every gradient. Communication is priced for each collective,
as our layers and the engine call it. `CollectiveTime` says how much of it the GPU waits for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Literal

from sagetrain.config.arithmetic import attention_calls, parts_of
from sagetrain.config.layout import Layout
from sagetrain.config.schema import RunConfig
from sagetrain.costs import deepspeed_prices
from sagetrain.costs.accounting import elements, flops_per_token, overlaps, rank_of
from sagetrain.costs.collective_costs import collectives, expert_exchanges
from sagetrain.costs.hardware import Hardware
from sagetrain.costs.operation_kinds import AttentionCost, MatmulCost, Operation, PassCost, of_kind
from sagetrain.costs.operations import DELTA_RULE, block_operations, end_operations
from sagetrain.costs.stages import different_stages, held
from sagetrain.optim.owners import MUON_ROUND, cost, owners
from sagetrain.planning.offload import activation_seconds, offload_seconds, spared_bytes
from sagetrain.planning.prediction import CollectiveTime, StepPrediction

# The forward pass has this share of the bytes that passes move, and this share of attention (2 matmuls of 7).
_PASS_FORWARD, _ATTENTION_FORWARD = 0.4, 2 / 7

# Bytes that FSDP2 moves (engines/fsdp.py, torch 2.13) by ZeRO stage: per parameter of the rank in a micro-step, per
# parameter of the rank in a step, and per parameter that it updates. A gradient is added to its fp32 sum (10); sums are
# copied for the reduction (8); gathered weights are copied into place (4). The owned part is rounded for the gather
# (6), taken from the reduction (8), measured (4), clipped (8) and updated (28). At stages 2 and 3 gradients are reduced
# in every micro-step (6) and added (6). At stage 3 weights are also gathered twice in each micro-step: by hooks (14),
# or by copy engines, which is priced as stage 1, and where 8-bit layers round weights in both passes (12).
_STATE_BYTES = {0: (10, 12, 54), 1: (10, 12, 54), 2: (12, 4, 46), 3: (26, 0, 40)}
_owners = functools.lru_cache(maxsize=256)(owners)
"""The owners of Muon's matrices. A search for layouts deals the same matrices out thousands of times."""

# Muon's update of a matrix moves this many bytes for each parameter beyond AdamW's: momentum, direction, exchange, and
# the products of Newton-Schulz steps. The figure also has what these products lose beside large matmuls. For 1B on an
# H100, 2026-11-27, the update took 81 ms more than AdamW's (results/muon).
_MUON_BYTES = 88

OVERLAP = 0.2
"""Share of the shorter of a collective and the matmuls beside it that is saved when both run at once. NCCL takes
multiprocessors that a matmul counted on, and both slow down: for TP 4, 1B, H200, collectives of 128 ms alone take 195
beside kernels of about 290, which then take 313 (results/tensor-parallel). Copies save everything but
their latency."""

_GROUPED = 0.84  # Of one expert's rate, for all: 562 and 596 TFLOP/s in bf16 on an H200 (prototype, 2026-11-28).
_SHORT_TOKENS = 6144  # Kernels of micro-steps of so many tokens reach their rates.
_REPLAY_SECONDS = 0.3e-3  # The host prepares a micro-batch and launches one CUDA graph.
_LAUNCHED = 4
"""The ranks of tensor parallelism of the largest group whose host time was measured. More are taken to need no more."""

_MESSAGE_BANDWIDTH = 15e9
"""Bytes per second of a message between pipeline stages, as it delays a step. NCCL's link carries more. The figure has
also the time in which stages wait for each other, and the multiprocessors that a waiting message takes from kernels.
With it, seven rows of 3B and 8B on two and four H100s (2026-11-27, results/log/layouts.md) are met within 3 %."""

_WIRE = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "reduce": 1, "all-to-all": 1}


def predict(
    cfg: RunConfig, world_size: int, vocab_size: int, hardware: Hardware, span: float | None = None
) -> StepPrediction:
    """Predict one step at the largest tokens per step of the schedule.

    Args:
        cfg: a configuration that fits `world_size` (config/rules). For `auto` as backend, recipe or
            tensor_parallel_overlap, the fastest is priced.
        vocab_size: padded vocabulary size.
        span: span of the data's documents (model.operations.Rank.span). None: that of English text.
    """
    if cfg.parallel.tensor_parallel_overlap == "auto" and cfg.parallel.tensor_parallel_size > 1:
        ways = (with_overlap(cfg, how) for how in ("off", "on"))
        both = (predict(way, world_size, vocab_size, hardware, span) for way in ways)
        return max(both, key=lambda prediction: prediction.tokens_per_second)
    layout, stages = Layout.of(cfg, world_size), different_stages(cfg, vocab_size)
    steps = [_Step(cfg, layout, vocab_size, hardware, span, stage) for stage in stages]
    step = max(steps, key=lambda step: sum(step.compute())) if len(steps) > 1 else steps[0]
    matmul, attention, elementwise = (step.accumulation * part for part in step.compute())
    waiting, launching = step.communication(matmul, attention, elementwise), step.launch_seconds()
    launching -= matmul + attention + elementwise + sum(c.exposed for c in waiting)
    inside = sum(c.exposed for c in waiting if c.axis in ("tensor", "context", "experts"))
    working = matmul + attention + elementwise + inside + max(0.0, launching)
    return StepPrediction(
        world_size=world_size,
        tokens_per_step=step.accumulation * layout.micro_step,
        accumulation=step.accumulation,
        matmul=matmul,
        attention=attention,
        attention_backend=step.attention_backend(),
        overlap=step.overlap,
        elementwise=elementwise,
        optimizer=step.optimizer_seconds(),
        orthogonalizing=step.orthogonalizing_seconds(),
        offload=step.offload_seconds(matmul + attention + elementwise),
        overhead=step.accumulation * hardware.micro_step_seconds + hardware.step_seconds,
        launching=max(0.0, launching),
        idle=step.idle * working,
        collectives=tuple(waiting),
        flops_per_token=flops_per_token(cfg.model, vocab_size, step.rank.span),
        flops_per_token_full_attention=flops_per_token(cfg.model, vocab_size, cfg.data.seq_length),
        peak_flops=hardware.peak_flops,
        peak_of_precisions=hardware.peak_flops * _mean_peak(zip(steps, stages.values(), strict=True)),
    )


def _mean_peak(steps: Iterable[tuple[_Step, int]]) -> float:
    """Return the peak for the mix of precisions of all stages, of which so many are like each of these, divided by the
    peak in 16 bits."""
    computed = [(stages * flops, peak) for step, stages in steps for flops, peak in step.precisions()]
    return sum(flops for flops, _ in computed) / sum(flops / peak for flops, peak in computed)


def with_overlap(cfg: RunConfig, how: Literal["off", "on"]) -> RunConfig:
    """Return a configuration whose micro-batches go through the blocks whole ("off") or in halves ("on")."""
    return cfg.changed({"parallel": {"tensor_parallel_overlap": how}})


class _Step:
    """The priced step of one rank, on one stage of a pipeline."""

    def __init__(
        self, cfg: RunConfig, layout: Layout, vocab_size: int, hardware: Hardware, span: float | None, stage: int
    ):
        part = held(cfg, layout, vocab_size, stage)
        self.cfg, self.hardware, self.part = cfg, hardware, part
        self.layout, self.parameters, tensor_size = layout, part.sizes.parameters, layout.tensor
        self.accumulation = max(1, max(cfg.tokens_per_step.named_tokens.values()) // layout.micro_step)
        inside = 1 < tensor_size <= hardware.gpus_per_host
        copies = bool(cfg.parallel.sequence_parallel and inside and hardware.copy_bandwidth)
        self.rank = rank_of(cfg, copies, span)
        self.overlap = overlaps(cfg)
        self.parts = parts_of(self.rank.tokens, tensor_size, self.overlap)
        self.in_halves = attention_calls(cfg.data.micro_batch_size, self.rank.tokens, tensor_size, self.overlap) > 1
        """True if each part has an attention of its own."""
        self.kinds = part.kinds(self.rank)
        self.low = sum(kind.blocks for kind in self.kinds if kind.rank.linear.low_bit)
        """The number of blocks in 8 bits."""
        self.blocks = [(kind.blocks, block_operations(kind.layer, cfg.attention, kind.rank)) for kind in self.kinds]
        """The number of blocks of each kind with their operations."""
        self.ends = end_operations(cfg.model, vocab_size, self.rank)
        self.collectives = collectives(part, self.rank, self.parts)

    def compute(self) -> tuple[float, float, float]:
        """Return the seconds of a micro-step's matmuls, attention and data movement."""
        scale = 1 / self.hardware.compute_scale
        before, *behind = self.ends
        ends = [before] * self.part.first + behind * self.part.last
        parts = [(1, self._seconds(ends)), *((count, self._seconds(block)) for count, block in self.blocks)]
        matmul, attention, moving = (sum(count * part[i] for count, part in parts) for i in range(3))
        moving += self._copied() / self.hardware.memory_bandwidth + self._short_kernels()
        return scale * matmul, scale * attention, scale * moving

    def _short_kernels(self) -> float:
        """Return the seconds that kernels of a replayed micro-step take beyond their rates. Where the host launches
        short ones, its time decides."""
        if not self.layout.recorded:
            return 0.0
        hardware = self.hardware
        seconds = self.part.num_blocks * hardware.short_block_seconds + self.low * hardware.short_low_bit_seconds
        blocks = self.parts * seconds
        return blocks * max(0.0, 1 - self.rank.tokens / _SHORT_TOKENS)

    def precisions(self) -> Iterator[tuple[float, float]]:
        """Yield the FLOPs of products of a micro-step, without recomputed ones, and the peak of their precision,
        divided by the peak in 16 bits."""
        peaks, (before, *behind) = self.hardware.peaks, self.ends
        ends = [before] * self.part.first + behind * self.part.last
        for count, operations in ((1, ends), *self.blocks):
            for matmul in of_kind(MatmulCost, operations):
                yield from ((count * matmul.flops, peaks[precision]) for precision in matmul.precision)
            for attention in of_kind(AttentionCost, operations):
                eight_bit = attention.backends != (DELTA_RULE,) and self.attention_backend().startswith("sage")
                yield 6 * count * attention.flops, peaks["int8" if eight_bit else attention.precision]

    def _copied(self) -> float:
        """Return the bytes of a micro-step that collectives by copies move inside the GPU, and that kernels beside them
        wait for. The own part is copied to and from its slot of what is gathered, and to its slot of what is scattered;
        there all parts are added up."""
        shards, moved = self.rank.shards, {"all-gather": 4, "reduce-scatter": self.rank.shards + 3}
        return self.rank.copies * sum(
            call.calls * moved.get(call.kind, 0) * call.payload / shards
            for call in self.collectives
            if call.axis == "tensor"
        )

    @property
    def _copy_latency(self) -> float:
        hardware = self.hardware
        return hardware.replayed_copy_latency if self.layout.recorded else hardware.copy_latency

    def communication(self, matmul: float, attention: float, elementwise: float) -> list[CollectiveTime]:
        """Return the collectives of the step, beside so many seconds of computation (see CollectiveCost.beside).

        Attention is not part of the other half if it sees both halves. A third of a half's computation is forward.
        """
        halves = matmul + elementwise + (attention if self.in_halves else 0.0)
        weights = 0.0
        for count, block in self.blocks:
            columns = [layer for layer in of_kind(MatmulCost, block) if layer.column_parallel]
            weights += count * sum(self._matmul(layer, layer.precision.weight_gradient) for layer in columns)
        weights *= self.accumulation / self.hardware.compute_scale
        company = {"forward": halves / 6, "backward": halves / 3, "weight gradients": weights}
        how = (1.0, self._copy_latency) if self.rank.copies else (OVERLAP, 0.0)
        result = []
        for call in self.collectives:
            count = self.accumulation * call.calls
            alone = self._collective(call.axis, f"{call.moment}: {call.what}", call.kind, count, call.payload)
            result.append(alone if call.beside == "nothing" else _beside(alone, company[call.beside], *how))
        return [
            *result,
            *self._data_parallel(matmul + attention + elementwise),
            *self._muon_exchange(),
            *self._between_stages(),
        ]

    @property
    def idle(self) -> float:
        """The time that a stage waits while a pipeline fills and drains, as a part of its own work."""
        return (self.layout.stages - 1) / (self.layout.chunks * self.accumulation)

    def _between_stages(self) -> Iterator[CollectiveTime]:
        """Yield the residual streams and their gradients that a stage of a pipeline receives. A stage asks for a
        message when it needs it, and waits until it is there."""
        rank, stages = self.rank, self.layout.stages
        if stages == 1:
            return
        payload = rank.tokens * rank.element * self.cfg.model.hidden_size // rank.shards
        bandwidth, latency = self.hardware.link(self.layout.world_size // stages, stages)
        one = payload / min(bandwidth, _MESSAGE_BANDWIDTH) + self.parts * latency
        count = 2 * self.accumulation * self.layout.chunks
        what = "residual streams and their gradients"
        sent, seconds = count * payload, count * one
        yield CollectiveTime("pipeline", what, "send", count, payload, sent, seconds, exposed=seconds)
        if self.cfg.model.tie_embeddings:
            # Both ends have the embedding, and every stage waits for their sum.
            table = 4 * self.part.vocab_size * self.cfg.model.hidden_size // (rank.tensor * self.layout.shards)
            ends = 2, (stages - 1) * self.layout.replicas
            yield self._collective("pipeline", "gradients of the embedding", "all-reduce", 1, table, ends)

    def _muon_exchange(self) -> list[CollectiveTime]:
        """Return the exchange of Muon's directions and updates, each in bf16, between the ranks that share matrices."""
        shards = self.layout.shards
        ranks = self.rank.tensor * shards
        shapes = self.part.muon_shapes
        sent = 2 * elements(shapes) // ranks
        if ranks == 1 or not sent:
            return []
        rounds = max(len(set(shapes)), -(-sent // (2 * MUON_ROUND)))
        axis, part = ("data", (shards, 1)) if shards > 1 else ("tensor", None)
        return [self._collective(axis, "matrices of Muon", "all-to-all", 2 * rounds, sent // rounds, part)]

    def launch_seconds(self) -> float:
        """Return the host's seconds to launch all micro-steps."""
        hardware = self.hardware
        part = hardware.part_launch_seconds if self.rank.fused else hardware.eager_launch_seconds
        call = hardware.copy_launch_seconds if self.rank.copies else hardware.collective_launch_seconds
        # The rates were fitted to the calls of one forward and one backward pass, without the gains.
        around = self.parts * (1 + self.rank.sequence_parallel) * (self.rank.tensor > 1)
        calls = around * sum(kind.blocks * len(kind.layer.linear_layers(1)) for kind in self.kinds)
        ranks = max(0, min(self.rank.tensor, _LAUNCHED) - 2) * hardware.low_bit_rank_seconds
        # INT8's figure is of one GPU. Under tensor parallelism it takes the host at least as long as FP8 (12 layers of
        # 7B, 2026-11-28, results/log/layouts.md).
        precision = "fp8" if self.rank.tensor > 1 and self.cfg.linear.low_bit else self.cfg.linear.precision
        beside = calls * call + self.low * self.parts * (hardware.low_bit_launch_seconds.get(precision, 0.0) + ranks)
        block, blocks = hardware.block_launch_seconds + self.parts * part, self.part.num_blocks
        for count, operations in self.blocks:
            rules = [part for part in of_kind(AttentionCost, operations) if part.backends == (DELTA_RULE,)]
            beside += count * len(rules) * hardware.delta_launch_seconds
        launched = 0 if self.layout.recorded else self.accumulation
        hooks = launched * hardware.hooks_block_seconds if self.layout.hooks == "never" else 0.0
        replays = (self.accumulation - launched) * _REPLAY_SECONDS
        return launched * (blocks * block + beside) - blocks * hooks + replays

    def optimizer_seconds(self) -> float:
        """Return the seconds of the engine's passes over gradients, Adam, and new weights."""
        stage, converted = self.layout.zero_stage, 0
        per_micro, per_step, per_share = map(float, _STATE_BYTES[stage])
        if self.layout.engine == "deepspeed":
            per_micro, per_step, per_share = deepspeed_prices.moved_bytes(self.cfg, stage)
            converted = self.accumulation * deepspeed_prices.converted_bytes(self.cfg, stage)
        elif self._blocks_by_copies:
            per_micro, per_step, per_share = map(float, _STATE_BYTES[1])
            per_micro += 12 if self.cfg.linear.low_bit else 0
        per_share -= spared_bytes(self.cfg, self.layout)
        wide = 2 if self.rank.element == 4 and stage else 1
        touched = self.accumulation * per_micro + per_step + per_share / self.layout.shards
        hardware = self.hardware
        seconds = (wide * touched - converted) / hardware.memory_bandwidth + converted / hardware.conversion_bandwidth
        return seconds * self.parameters / hardware.compute_scale

    @property
    def _blocks_by_copies(self) -> bool:
        """Whether copy engines fetch the weights of blocks at ZeRO 3 and reduce their gradients."""
        layout, hardware = self.layout, self.hardware
        inside = layout.tensor * layout.replicas <= hardware.gpus_per_host and hardware.copy_bandwidth > 0
        return inside and layout.zero_stage == 3 and layout.hooks == "never"

    def offload_seconds(self, compute: float) -> float:
        """Return the seconds of a step in which the GPU, which computes for `compute` of them, waits for the host."""
        share, micro_steps = self.parameters / self.layout.shards, self.accumulation
        how = micro_steps, compute / micro_steps, self.hardware
        return offload_seconds(self.cfg, share, *how) + activation_seconds(self.cfg, *how)

    def orthogonalizing_seconds(self) -> float:
        """Return the seconds that Muon's update takes beyond AdamW's, on the rank that has most to do. At ZeRO 0 every
        replica updates all matrices."""
        shapes, hardware, steps = self.part.muon_shapes, self.hardware, self.cfg.optimizer.muon.steps
        if not shapes:
            return 0.0
        ranks, seconds = self.rank.tensor * (self.layout.replicas if self.layout.zero_stage else 1), {}
        for short, long in {(min(shape), max(shape)) for shape in shapes}:
            products = cost((short, long), steps) / hardware.matmul_rate("bf16", short, short, long)
            seconds[short, long] = products + _MUON_BYTES * short * long / hardware.memory_bandwidth
        loads = [0.0] * ranks
        for shape, owner in zip(shapes, _owners(shapes, ranks, steps), strict=True):
            loads[owner] += seconds[min(shape), max(shape)]
        return max(loads) / hardware.compute_scale

    def _seconds(self, operations: Iterable[Operation]) -> tuple[float, float, float]:
        """Return the seconds of the matmuls, attention and passes of a list."""
        matmul = attention = moved = 0.0
        for operation in operations:
            match operation:
                case MatmulCost():
                    again = operation.precision[: operation.recomputed]
                    matmul += sum(self._matmul(operation, precision) for precision in (*operation.precision, *again))
                case AttentionCost():
                    attention += self._attention(operation) * (1 + operation.recomputed * _ATTENTION_FORWARD)
                case PassCost():
                    moved += operation.moved * (1 + operation.recomputed * _PASS_FORWARD)
        return matmul, attention, self.rank.tokens * moved / self.hardware.memory_bandwidth

    def attention_backend(self) -> str:
        """Return the fastest of the attention functions that the run decides between."""
        every = [(count * part.flops, part) for count, block in self.blocks for part in of_kind(AttentionCost, block)]
        softmax = [found for found in every if found[1].backends != (DELTA_RULE,)]
        speeds = self._attention_speeds(max(softmax or every, key=lambda found: found[0])[1])
        return max(speeds, key=speeds.__getitem__)

    def _matmul(self, matmul: MatmulCost, precision: str) -> float:
        """Return the seconds of one of the three products of a linear layer."""
        tokens = max(1, matmul.tokens // matmul.experts)
        rate = self.hardware.matmul_rate(precision, tokens, matmul.outputs, matmul.inputs)
        return matmul.flops / (rate if matmul.experts == 1 else _GROUPED * rate)

    def _attention(self, attention: AttentionCost) -> float:
        """Return the seconds of attention, forward and backward."""
        speed = max(self._attention_speeds(attention).values()) * self.hardware.precisions[attention.precision]
        return 7 * attention.flops / speed

    def _attention_speeds(self, attention: AttentionCost) -> dict[str, float]:
        """Return FLOP/s by attention function. Functions without a rate (reference) get the rate of sdpa."""
        rates, speeds = self.hardware.attention, {}
        for name in attention.backends:
            known = name if name in rates else "sdpa"
            apart = f"{known} over documents"
            rate = rates[apart if attention.documents and apart in rates else known]
            speeds[name] = rate.at(attention.head_dim, attention.span)
        return speeds

    def _collective(
        self, axis: str, purpose: str, kind: str, count: int, payload: int, part: tuple[int, int] | None = None
    ) -> CollectiveTime:
        """Return `count` calls of a collective over the ranks of an axis, all of which the GPU waits for.

        Args:
            part: the number of ranks and the steps of the axis from one to the next, if only a part of the axis takes
                part.
        """
        rank, hardware, replicas = self.rank, self.hardware, self.layout.replicas
        ulysses, experts = rank.context // rank.gather, rank.experts
        sizes = {"tensor": rank.tensor, "context": ulysses, "gather": rank.gather, "experts": experts}
        size, apart = part or (sizes.get(axis, replicas), ulysses if axis == "gather" else 1)
        bandwidth, latency = hardware.link(1 if axis in ("tensor", "experts") else rank.tensor * apart, size)
        if axis == "copies" or (rank.copies and axis == "tensor" and kind != "all-reduce"):
            bandwidth, latency = hardware.copy_bandwidth, self._copy_latency
        wire = count * _WIRE[kind] * (size - 1) / size * payload
        seconds = wire / bandwidth + count * latency
        named = {"gather": "context", "copies": "data"}.get(axis, axis)
        return CollectiveTime(named, purpose, kind, count, payload, wire, seconds, exposed=seconds)

    def _data_parallel(self, compute: float) -> list[CollectiveTime]:
        """Return the collectives of ZeRO beside `compute` seconds of a step."""
        layout, size = self.layout, self.parameters
        if layout.replicas == 1 and self.cfg.model.experts is None:
            return []
        if layout.engine == "fsdp":
            return list(self._fsdp(compute / self.accumulation))
        exchanges = deepspeed_prices.exchanges(self.cfg, layout, size, self.accumulation)
        return [self._collective("data", *each) for each in exchanges]

    def _fsdp(self, compute: float) -> Iterator[CollectiveTime]:
        """Yield the collectives of FSDP2, as engines/fsdp.py has them, beside micro-steps of `compute` seconds.

        Each block is a group, and what is outside of the blocks is one more, which nothing hides. Weights are gathered
        beside a forward pass, at ZeRO 3 beside every pass. Gradients are reduced beside backward passes, two thirds of
        a micro-step: the last one's, at ZeRO 2 and 3 all of them. Copies of shards exchange sums once a step.
        """
        layout, shards, element, copied = self.layout, self.layout.shards, self.rank.element, self._blocks_by_copies
        sizes, count = self.part.sizes, self.part.num_blocks
        block = (sum(sizes.blocks) - sizes.apart) // count
        backward, reduced = 2 * compute / 3, self.accumulation if layout.reduced == "in every micro-step" else 1

        def groups(
            purpose: str, kind: str, times: int, alone: int, width: float, part: tuple[int, int], beside: float
        ) -> Iterator[CollectiveTime]:
            axis = "copies" if copied else "data"
            blocks = self._collective(
                axis, purpose, kind, times * count, int((element if copied else width) * block), part
            )
            how = (1.0, self._copy_latency) if copied else (OVERLAP, 0.0)
            blocks = _beside(blocks, times * beside, *how)
            # As measured, that is never faster than ZeRO 1, which moves as much once a step.
            once = self._collective("data", purpose, kind, count, int(width * block), part)
            least = (
                _beside(once, min(beside, compute / 3) if kind == "all-gather" else beside).exposed if copied else 0.0
            )
            yield dataclasses.replace(blocks, exposed=max(blocks.exposed, least))
            yield self._collective(
                "data", f"{purpose} outside of blocks", kind, alone, int(width * sizes.outside), part
            )

        if shards > 1:
            times, beside = (2 * self.accumulation, compute / 2) if layout.zero_stage == 3 else (1, compute / 3)
            yield from groups("weights", "all-gather", times, 1, element, (shards, 1), beside)
            yield from groups("gradients", "reduce-scatter", reduced, reduced, 4, (shards, 1), backward)
        if (copies := layout.copies) > 1:
            purpose = "gradients of copies" if shards > 1 else "gradients"
            yield from groups(purpose, "all-reduce", 1, 1, 4 / shards, (copies, shards), backward)
        for each in expert_exchanges(self.part, element, reduced, self.parts):
            yield self._collective(*each)


def _beside(
    collective: CollectiveTime, compute: float, overlap: float = OVERLAP, waited: float = 0.0
) -> CollectiveTime:
    """Return the collective while `compute` seconds of kernels run beside it. The kernels wait for `waited` seconds of
    every call."""
    hidden = overlap * min(collective.seconds - waited * collective.count, compute)
    return dataclasses.replace(collective, exposed=collective.seconds - hidden)
