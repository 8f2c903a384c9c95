"""Predict the time that parallel.offload and training.activation_offload add to a step: copies between a GPU and the
memory of its host, and the update on the CPU. One run stands behind the figures of parallel.offload: everything in the
memory of a host with two H100s (results/offload). A GPU that makes smaller updates is here, too."""

from __future__ import annotations

from sagetrain.config.layout import Layout
from sagetrain.config.schema import RunConfig
from sagetrain.costs.hardware import Hardware
from sagetrain.costs.host_memory import activations_on_host

# Bytes of host memory that the CPU reads and writes for each parameter that the rank owns. Norm (4), clipping (8) and
# AdamW (28) come once a step. A gradient that is added to an earlier one is read, and the sum read and written.
_UPDATE, _ADD = 40, 12
_UPDATED_ON_GPU = 40
"""Bytes for each parameter that the rank owns, which a GPU then no longer moves: norm, clipping and AdamW."""
# Clipping and AdamW in fp32 take 36 of them. For smaller moments or masters one kernel does both: by optimizer.moments,
# its times for 1B values on an H200 (6.2 and 4.8 ms, 2026-11-29) as bytes at the bandwidth that plan prices.
# Instructions bound it in 8 bits. fp32 moments, where masters alone have 16 bits, are by bytes.
_CLIPPED_AND_UPDATED, _IN_ONE_PASS = 36, {"int8": 19, "bf16": 15, "fp32": 24}


def offload_seconds(cfg: RunConfig, share: float, micro_steps: int, compute: float, hardware: Hardware) -> float:
    """Return the seconds of a step in which the GPU waits for the host.

    Shards travel in fp32. At ZeRO 1 and 2 they come once a step, beside the first forward pass; at ZeRO 3 they come
    beside every pass. Gradients leave the GPU beside the backward pass that reduces them: the last one at ZeRO 1, every
    one at ZeRO 2 and 3. The CPU then adds them to the sums of the step beside the next forward pass.

    Args:
        share: the number of parameters that the rank owns.
        compute: the seconds that the GPU computes in a micro-step, a third of them forward.
    """
    if cfg.parallel.offload == "none":
        return 0.0
    stage, copy = cfg.parallel.zero_stage, 4 * share / hardware.host_copy_bandwidth
    forward, backward, add = compute / 3, 2 * compute / 3, _ADD * share / hardware.host_update_bandwidth
    waits = max(0.0, copy - forward) * (micro_steps if stage == 3 else 1)
    # Both directions of the link work at the same time.
    waits += max(0.0, copy - backward) * (micro_steps if stage > 1 else 1)
    if stage > 1 and micro_steps > 1:
        passed = max(copy, forward) if stage == 3 else forward
        waits += (micro_steps - 2) * max(0.0, add - passed) + add
    return waits + _UPDATE * share / hardware.host_update_bandwidth


def activation_seconds(cfg: RunConfig, micro_steps: int, compute: float, hardware: Hardware) -> float:
    """Return the seconds of a step in which the GPU waits for activations on their way to the host's memory, beside
    forward passes, and back, beside backward passes.

    Args:
        compute: the seconds that the GPU computes in a micro-step, a quarter of them forward: most is computed again.
    """
    copy = sum(activations_on_host(cfg)) / hardware.host_copy_bandwidth
    return micro_steps * (max(0.0, copy - compute / 4) + max(0.0, copy - 3 * compute / 4))


def spared_bytes(cfg: RunConfig, layout: Layout) -> int:
    """Return the bytes for each parameter that the rank owns which its GPU does not move, of those of an update by
    AdamW in fp32."""
    if cfg.parallel.offload != "none":
        return _UPDATED_ON_GPU
    fp32 = cfg.optimizer.moments == cfg.optimizer.master == "fp32"
    if fp32 or layout.engine == "deepspeed" or cfg.optimizer.name == "muon":
        return 0
    return _CLIPPED_AND_UPDATED - _IN_ONE_PASS[cfg.optimizer.moments]
