"""The rates that accelerators and links reach, for predictions. Better measurements belong here.

A rate is what a training step attains. It is not the peak of a datasheet (`PEAK_FLOPS`, the denominator of MFU). The
rates of the H200 come from our own runs, which are named beside each number and recorded in results/. The others are
the H200's, scaled by the vendors' datasheets. Runs on one H100 confirmed its figures (results/one-h100); the others are
estimates until someone measures them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

# These are dense 16-bit tensor-core peaks in FLOP/s from the vendors' datasheets, keyed by the result of `model_of` for
# the driver's name. A card that comes in several forms is its SXM form if no form is named. A card that is missing here
# has no MFU.
PEAK_FLOPS = {
    "A10": 125e12,
    "A30": 165e12,
    "A40": 150e12,
    "A100": 312e12,
    "A100 PCIE": 312e12,
    "A800": 312e12,
    "A800 PCIE": 312e12,
    "H100": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIE": 756e12,
    "H800": 989e12,
    "H800 NVL": 835e12,
    "H800 PCIE": 756e12,
    "H20": 148e12,
    "H200": 989e12,
    "H200 NVL": 835e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "GB200": 2500e12,
    "B300": 2250e12,
    "GB300": 2500e12,
    "L4": 121e12,
    "L40": 181e12,
    "L40S": 362e12,
    "RTX PRO 6000": 504e12,
    "RTX 3090": 71e12,
    "RTX 4090": 165e12,
    "RTX 5090": 209e12,
}
_SAME = re.compile(r"NVIDIA|GeForce|Blackwell|(Server|Workstation|Edition)|SXM\d?|AC|HBM\w*|\d+GB?", re.IGNORECASE)
"""Words that drivers add to the name of a card and that do not change its peak."""

RESERVED_BYTES = 3 * 2**30
"""Bytes of a GPU's memory for CUDA's context and NCCL's buffers, which the estimate leaves out."""
USABLE_SHARE = 0.94
"""Share of the remaining memory that a run may use. The allocator's fragmentation takes the rest."""


def model_of(name: str) -> str:
    """Return the part of a driver's name for a card that determines its peak. "NVIDIA H100 80GB HBM3" is an H100.
    "NVIDIA H100 PCIe" and "NVIDIA H100 NVL" are other models, and so is a part of a card (MIG)."""
    return " ".join(word for word in re.split(r"[\s-]+", name.upper()) if not _SAME.fullmatch(word))


@dataclass(frozen=True)
class AttentionRate:
    """The rate of causal attention in FLOP/s, forward and backward together.

    The FLOPs are 7 N d per token and N d-wide head row: half of the square, 2 matmuls forward and 5 backward. Long
    sequences reach `wide` at head_dim 128 and `narrow` at 64. They reach half of it at `half_length` tokens.
    """

    narrow: float
    wide: float
    half_length: float

    def at(self, head_dim: int, seq_length: float) -> float:
        """Return the rate at a shape: linear in head_dim between 64 and 128, proportional below, constant above."""
        share = min(1.0, (head_dim - 64) / 64)
        rate = self.narrow + share * (self.wide - self.narrow) if head_dim >= 64 else self.narrow * head_dim / 64
        return rate * seq_length / (seq_length + self.half_length)


@dataclass(frozen=True)
class Hardware:
    """One kind of GPU and the links between GPUs. Times are in seconds, sizes in bytes, rates per second."""

    name: str
    measured: bool
    """Whether the rates were measured on this GPU, or scaled from the H200's."""
    peak_flops: float
    memory: float
    """Bytes of the GPU's memory."""
    matmul_flops: float
    """Rate of a 16-bit matmul of huge matrices."""
    precisions: dict[str, float]
    """Speed of matmuls and attention by the precision of a matmul (costs/operations.py), divided by the speed in 16
    bits. The GPU cannot compute in a precision that is missing."""
    peaks: dict[str, float]
    """Peak of matmuls by precision on the datasheet, divided by `peak_flops`."""
    matmul_half_size: float
    """Smallest dimension at which a matmul in 16 bits runs at half of matmul_flops."""
    attention: dict[str, AttentionRate]
    """Rates by attention.backend ("sage scores" for that recipe), and by "BACKEND over documents" where packed
    documents take another kernel. A rate counts the FLOPs inside documents, and its length is operations.Rank.span."""
    memory_bandwidth: float
    """Rate of kernels that only move data, with reads and writes counted."""
    conversion_bandwidth: float
    """Rate of DeepSpeed where bf16 gradients become fp32."""
    micro_step_seconds: float
    """Fixed cost of a micro-step: its first kernels, and the engine's bookkeeping."""
    step_seconds: float
    """Fixed cost of an optimizer step: the synchronization that reads loss and norm, and the optimizer's launches."""
    block_launch_seconds: float
    """Host time of one block's forward and backward pass, however little they launch. Together with the following times
    it is a floor under small micro-batches."""
    part_launch_seconds: float
    """Host time to launch the kernels of one block's forward and backward pass, compiled. It is spent again for each
    half."""
    low_bit_launch_seconds: dict[str, float]
    """Host time that casts and products in 8 bits add to part_launch_seconds, by linear.precision."""
    delta_launch_seconds: float
    """Host time that a gated delta net adds to that of its block."""
    low_bit_rank_seconds: float
    """Host time that each rank of tensor parallelism beyond the second adds to a block in 8 bits."""
    hooks_block_seconds: float
    """The share of an engine's hooks in a block's host time, which micro-steps without hooks do not take."""
    eager_launch_seconds: float
    """Host time in place of part_launch_seconds where torch.compile does not fuse the kernels."""
    collective_launch_seconds: float
    """Host time to start and finish one collective of tensor parallelism by NCCL."""
    copy_launch_seconds: float
    """Host time to start and finish one collective of tensor parallelism by copy engines."""
    nvlink_bandwidth: float
    """NCCL's bus bandwidth inside a host for large messages."""
    nvlink_latency: float
    """Latency of one collective inside a host, whatever its size."""
    copy_bandwidth: float
    """Bandwidth of copy engines (parallel/copies.py), which do not disturb the matmuls beside them. 0: GPUs that cannot
    access each other's memory."""
    copy_latency: float
    """Latency of one collective by copy engines, whatever its size and whatever runs beside it."""
    replayed_copy_latency: float
    """Latency of one collective by copy engines in a micro-step that a CUDA graph replays."""
    short_block_seconds: float
    """Time that the kernels of one block, forward and backward, take beyond their rates in the shortest micro-steps.
    It is spent again for each half."""
    short_low_bit_seconds: float
    """Time that casts and products in 8 bits add to short_block_seconds."""
    network_latency: float
    """Latency that a collective that leaves the host adds for each further host in its ring."""
    network_bandwidth: float = 400e9 / 8
    """Bandwidth of one GPU's network adapter per direction: 400 Gbit/s."""
    network_efficiency: float = 0.85
    """Share of that bandwidth that NCCL attains (assumed)."""
    gpus_per_host: int = 8
    named: bool = False
    """Whether somebody has named this GPU for a run, so that settings which no GPU takes are errors. False: the run may
    be one without a GPU."""
    host_memory: float = 0.0
    """Bytes of a host's memory. 0: not known; host_memory_per_gpu is assumed."""
    host_memory_per_gpu: float = 256 * 2**30
    """Bytes of a host's memory for each of its GPUs (assumed)."""
    host_copy_bandwidth: float = 50e9
    """Rate of copies between a GPU and pinned memory of its host, in one direction: PCIe 5 (assumed)."""
    host_update_bandwidth: float = 40e9
    """Rate at which the cores of one GPU's share read and write the host's memory in an update (assumed)."""
    int8_attention: str = ""
    """The reason why the rates of `sage` are less reliable here than others, and what to use instead."""
    ceilings: dict[str, float] = field(default_factory=dict)
    """Rate that matmuls of a precision do not exceed, however large they are, because of the limit of power."""
    compute_scale: float = 1.0
    """Factor that divides the time of everything that runs on the GPU. It comes from --measured-tokens-per-second."""

    def memory_of_host(self, ranks: int) -> float:
        """Return the bytes of memory of a host on which this many ranks run."""
        return self.host_memory or ranks * self.host_memory_per_gpu

    def matmul_rate(self, precision: str, *dims: int) -> float:
        """Return the FLOP/s of a matmul with these dimensions."""
        smallest, speed = min(dims), self.precisions[precision]
        # A small product loses time, which is a larger share of a faster product.
        rate = self.matmul_flops * speed * smallest / (smallest + max(1.0, speed) * self.matmul_half_size)
        return min(rate, self.ceilings.get(precision, rate))

    def link(self, stride: int, size: int) -> tuple[float, float]:
        """Return the bus bandwidth and the latency of a collective over `size` ranks that are `stride` apart.

        A ring enters and leaves a host through the adapters of its members there.
        """
        members = max(1, min(size, self.gpus_per_host // stride))
        hosts = -(-size // members)
        if hosts == 1:
            return self.nvlink_bandwidth, self.nvlink_latency
        network = members * self.network_bandwidth * self.network_efficiency
        bandwidth = min(self.nvlink_bandwidth, network) if members > 1 else network
        return bandwidth, self.nvlink_latency + (hosts - 1) * self.network_latency


H200 = Hardware(
    name="NVIDIA H200",
    measured=True,
    peak_flops=PEAK_FLOPS["H200"],
    memory=143_771 * 2**20,  # This is from nvidia-smi.
    # The rate is 788 TFLOP/s at 8192 x 8192 x 8192 on random data. Summed over the matmuls of a step of 1B, profiled at
    # 32K tokens, it is 692 and 616 at TP 2 and 4 (137 and 77 ms per micro-step). For larger ones see `ceilings`.
    matmul_flops=821e12,
    # For fp32 the ratio is TF32's by the datasheet. Products in 8 bits are at their ceilings from 2,048 columns on.
    # Published ratios of FP8 are 1.90 (TransformerEngine, H200 NVL, hidden 4096) and 1.66 (torchao, 16640 x 5120 x
    # 8192). INT8 is multiplied by hopper_int8.cu. Several ranks take tiles from a counter, 1.0 and 1.4 % slower on one
    # GPU.
    precisions={"bf16": 1.0, "fp32": 0.5, "fp8": 2.1, "int8": 2.15},
    # Large products draw the power that the GPU may take, so clocks fall, and rates do not grow with the size. In steps
    # of 1B and of 8 layers of 4096, 2026-11-29 (results/log/step.md), products reach 701 and 690 TFLOP/s in bf16, 1,406
    # and 1,360 in FP8, and 1,398 and 1,430 in INT8. INT8's clock is 12 % higher than FP8's at the same power. The same
    # steps were 2 % faster in 8 bits a day later.
    ceilings={"bf16": 700e12, "fp8": 1.37e15, "int8": 1.44e15},
    peaks={"bf16": 1.0, "fp32": 0.5, "fp8": 2.0, "int8": 2.0},
    matmul_half_size=220,
    attention={
        # FlashAttention-4 and `scores` are level inside our step: 1B on an H100, 2026-11-26, 0.996 to 1.008 at 4K and
        # 16K in 16 bits and with INT8 linear layers (results/which-attention). Alone, and in a plain PyTorch step,
        # FlashAttention-4 is faster.
        "flash": AttentionRate(535e12, 620e12, 1035),
        # This is cuDNN. In the same runs it was 14 to 17 ms per step behind them at 4K, and 74 at 16K.
        "sdpa": AttentionRate(545e12, 550e12, 1080),
        # This is FlashAttention-2, from the time of a whole 325M step that is left for attention. d 128 is in
        # proportion.
        "sdpa over documents": AttentionRate(278e12, 375e12, 1090),
        # fine: 1B, profiled (194, 95 and 51 ms per micro-step at TP 1, 2 and 4), and 325M at d 64. scores: at 4K a step
        # of 1B has 145 and 161 ms of kernels with linear layers in INT8 and FP8 (2026-11-29, results/log/step.md), that
        # is 530 and 480 TFLOP/s, and alone they reach 528. 16K is by steps on an H100, d 64 by 325M there.
        "sage": AttentionRate(330e12, 260e12, 2700),
        "sage scores": AttentionRate(535e12, 620e12, 1035),
        # This is fla's gated delta rule: 15 layers of 8 heads of 128 in 27.7 ms, forward and backward, at 1 x 16,384
        # tokens (2026-11-30); d 64 is in proportion. It does not depend on the span, which stands for the width of
        # keys.
        "delta rule": AttentionRate(12e12, 24e12, 0),
    },
    # Copies reach 4.3 TB/s. In the profile of 1B, the fused kernels of the blocks and of the loss reach 3.1,
    # DeepSpeed's passes and Adam 2.9, and the conversion of bf16 gradients to fp32 0.9.
    memory_bandwidth=3.1e12,
    conversion_bandwidth=0.9e12,
    # The Trainer with 325M reached 183.7K tokens/s with 8 micro-steps per step, 175K with 2, and 343K on two GPUs with
    # 1.
    micro_step_seconds=1e-3,
    step_seconds=6e-3,
    # These times are a least-squares fit over all runs of tests/planning/test_recorded_runs.py. The runs whose host is
    # the limit decide (20 blocks, micro-batches of 32,768 tokens; ms of the step per block). By copies: 325M at TP 4
    # whole 6.6, in halves 9.9, at TP 2 in halves 11.6; 1B at TP 4 in halves 11.6, `scores` 11. By NCCL: 325M at TP 2 in
    # halves 9.0, at TP 4 whole at most 4.8; 1B at TP 4 in halves, with sequence parallelism, at most 10.1. The split
    # between block, part and collectives is uncertain: 1.3 ms, 2.4 ms and 290 us for collectives of either kind fit
    # nearly as well.
    block_launch_seconds=1.2e-3,
    part_launch_seconds=2.8e-3,
    # With 3B in FP8 at TP 2 in halves on two H100s, 2026-11-26, 33,130 tokens/s are 17.7 ms of host time per block,
    # while the GPU was busy for 10.3 (7,700 kernels and copies per micro-step). Whole, 31,201 and 34,171 tokens/s by
    # DeepSpeed are 9.4 and 8.6 ms.
    # In INT8, 1B with micro-batches of one sequence of 4,096 tokens takes 118 ms a micro-step on one H100, 2026-11-27
    # (results/small-card): 5.9 ms per block, of which 16-bit layers take 4.0.
    low_bit_launch_seconds={"fp8": 2.9e-3, "int8": 1.9e-3},
    # 305M with 15 of them takes 196 and 211 ms a step in bf16 and 283 in INT8, where the GPU works for 116 and 108
    # (2026-11-30, results/log/step.md).
    delta_launch_seconds=12.5e-3,
    # With 8B in FP8 at TP 4 whole, 32 micro-steps, on two hosts of four H100s, 2026-11-27, a block's micro-step takes
    # 9.9 ms by DeepSpeed (24,936 tokens/s) and 8.4 by FSDP2 (29,127): 1.0 and 2.3 ms more than at TP 2. What it is made
    # of was not measured. Ranks wait for the slowest host in each collective.
    low_bit_rank_seconds=0.95e-3,
    # With 3B in FP8 at TP 2 whole, 16 micro-steps, two H100s, 2026-11-27, the same commit takes 8.71 ms per block and
    # micro-step with hooks in all of them (33,579 tokens/s), and 6.14 with hooks in two (47,649).
    hooks_block_seconds=2.9e-3,
    collective_launch_seconds=200e-6,
    copy_launch_seconds=250e-6,
    # This was not measured. It is a floor that matters for small micro-batches alone.
    eager_launch_seconds=5e-3,
    # This is NCCL over NVLink 4 without NVLink multicast: 4 GPUs gather 134 MB in 345 us, and reduce and scatter them
    # in 356; two gather them in 286. A few KB are added up in 26 to 50 us.
    nvlink_bandwidth=290e9,
    nvlink_latency=20e-6,
    # Two GPUs gather 134 MB in 268 us, of which 86 are local copies.
    copy_bandwidth=370e9,
    # The runs with sequence parallelism take this beyond the sum of their parts: of 80, 90 and 100 us it has the least
    # error.
    copy_latency=100e-6,
    # 3B in FP8 at TP 2 whole on two H200s, one sequence of 4,096 tokens, replayed (results/graphs): nothing hides 16.2
    # ms of its 228 collectives, whose bytes take 9. With one meeting a scatter it is 2 ms less
    # (results/log/tensor-parallel.md).
    replayed_copy_latency=32e-6,
    # Replays of 325M and 1B take this beyond their parts and a micro-step's 1 ms, in ms a block: 0.17 (bf16), 0.22
    # (FP8) and 0.25 (INT8) with one sequence of 1,024 tokens, and 0.02 to 0.2 with one of 4,096 (results/graphs).
    short_block_seconds=0.21e-3,
    short_low_bit_seconds=0.1e-3,
    network_latency=8e-6,  # This is assumed.
    # 3B with offload at ZeRO 1, 2 and 3 on two GPUs, 16 cores each (results/offload).
    host_update_bandwidth=80e9,
)


def _scaled(name: str, peak: str, memory: float, bandwidth: float, nvlink: float) -> Hardware:
    """Return the H200's figures times the ratio of the datasheets. Memory bandwidth and NVLink are in bytes per
    second."""
    arithmetic, nvlink = PEAK_FLOPS[peak] / H200.peak_flops, nvlink / 900e9
    rates = {
        backend: AttentionRate(rate.narrow * arithmetic, rate.wide * arithmetic, rate.half_length)
        for backend, rate in H200.attention.items()
    }
    return replace(
        H200,
        name=name,
        measured=False,
        # On other cards INT8's rate is Triton's: 1,042 to 558 ms, where the H200 takes 46 ms longer than in FP8.
        precisions={**H200.precisions, "int8": 1.9},
        peak_flops=PEAK_FLOPS[peak],
        memory=memory,
        matmul_flops=H200.matmul_flops * arithmetic,
        ceilings={precision: rate * arithmetic for precision, rate in H200.ceilings.items()},
        attention=rates,
        memory_bandwidth=H200.memory_bandwidth * bandwidth / 4.8e12,
        conversion_bandwidth=H200.conversion_bandwidth * bandwidth / 4.8e12,
        nvlink_bandwidth=H200.nvlink_bandwidth * nvlink,
        copy_bandwidth=H200.copy_bandwidth * nvlink,
    )


def _card(key: str, memory: float, bandwidth: float, pcie: float, int8: float, fp8: float | None) -> Hardware:
    """Describe a card without NVLink. None of these was measured.

    Args:
        key: name of the card in PEAK_FLOPS.
        memory: bytes of its memory.
        bandwidth: memory bandwidth in bytes per second.
        pcie: bytes per second of PCIe, both directions together.
        int8: speed of INT8 matmuls, divided by the speed of bf16. On GeForce cards 16-bit sums in fp32 run at half rate
            by design, and so do those of FP8. INT8 is therefore four times bf16, and FP8 twice.
        fp8: speed of FP8 matmuls, divided by the speed of bf16. None: the card has no FP8.
    """
    card, peak = _scaled(f"NVIDIA {key}", key, memory, bandwidth, pcie), PEAK_FLOPS[key]
    # FlashAttention-2 nears the peak where sums in fp32 limit it (others' reports of a 4090), and 0.6 of it elsewhere.
    # The gains of `sage` are from results/attention-elsewhere, which timed code for 8.0 on an H100, as it is and
    # throttled, with the memory bandwidth of a 4090 by arithmetic.
    share, narrow, wide = (0.9, 1.9, 2.0) if int8 > 2 else (0.6, 1.2, 1.2)
    flash = AttentionRate(0.9 * share * peak, share * peak, 1000)
    sage = AttentionRate(narrow * flash.narrow, wide * flash.wide, 2700)
    backends = dict.fromkeys(("flash", "sdpa", "sdpa over documents"), flash) | {"sage": sage, "sage scores": flash}
    precisions = {"bf16": 1.0, "fp32": 0.5, "int8": int8} | ({"fp8": fp8} if fp8 else {})
    return replace(
        card,
        matmul_flops=0.9 * peak,
        ceilings={},
        host_memory_per_gpu=64 * 2**30,
        host_copy_bandwidth=50e9 if pcie > 64e9 else 22e9,
        host_update_bandwidth=40e9,
        attention=backends,
        precisions=precisions,
        peaks={**H200.peaks, "int8": 4.0 if int8 > 2 else 2.0},
        copy_bandwidth=0.0,
        matmul_half_size=120,
    )


HARDWARE = {
    "h200": H200,
    # One GPU was measured (tests/planning/test_recorded_runs.py). The links are the H200's, as on the datasheets.
    # The ceilings in bf16 and FP8 fit these runs best. INT8's is what FP8 and INT8 rows of one call leave for its
    # products, with FP8's at that rate: 1,154 to 1,212 TFLOP/s in 1B, 3B and 8 layers of 4096 (results/log/step.md,
    # layouts.md).
    "h100": replace(
        _scaled("NVIDIA H100 SXM", "H100", 81_559 * 2**20, 3.35e12, 900e9),
        measured=True,
        ceilings={"bf16": 710e12, "fp8": 1.42e15, "int8": 1.2e15},
    ),
    "a100": replace(
        _scaled("NVIDIA A100 SXM 80 GB", "A100", 80 * 2**30, 2.039e12, 600e9),
        precisions={"bf16": 1.0, "fp32": 0.5, "int8": 1.9},
        host_copy_bandwidth=22e9,
        int8_attention="its rate is that of Hopper's kernels, and other kernels run here: use attention.backend auto, "
        "which times them",
    ),
    "b200": replace(
        _scaled("NVIDIA B200", "B200", 180e9, 7.7e12, 1800e9),
        int8_attention="its rate is that of Hopper's kernels, and those that run here use mma.sync, which reaches a "
        "part of this GPU's tensor cores alone: use attention.backend flash or sdpa, or auto, which times them",
    ),
    "l40s": _card("L40S", 48 * 2**30, 0.864e12, 64e9, 1.8, 1.8),
    "rtxpro6000": _card("RTX PRO 6000", 96 * 2**30, 1.792e12, 128e9, 1.8, 1.8),
    "rtx3090": _card("RTX 3090", 24 * 2**30, 0.936e12, 64e9, 3.5, None),
    "rtx4090": _card("RTX 4090", 24 * 2**30, 1.008e12, 64e9, 3.5, 1.9),
    "rtx5090": _card("RTX 5090", 32 * 2**30, 1.792e12, 128e9, 3.5, 1.9),
}
"""The GPUs that `sagetrain plan --gpu` takes, by name."""


def usable_bytes(memory: float) -> int:
    """Return the largest number of bytes that the estimate for a rank may have on a GPU with this memory."""
    return int((memory - RESERVED_BYTES) * USABLE_SHARE)


def cluster_of(
    gpu: str, gpus_per_host: int, network_gbps: float, host_memory_gib: float | None = None, named: bool = False
) -> Hardware:
    """Return the rates of a GPU in a cluster whose network gives each GPU `network_gbps` Gbit/s.

    Args:
        gpus_per_host: the GPUs that share NVLink.
        host_memory_gib: the memory of a host in GiB. None: it is not known.
        named: whether somebody has named this GPU for a run.
    """
    return replace(
        HARDWARE[gpu],
        gpus_per_host=gpus_per_host,
        network_bandwidth=network_gbps * 1e9 / 8,
        host_memory=(host_memory_gib or 0.0) * 2**30,
        named=named,
    )
