"""The configuration that DeepSpeed gets, generated from that of a run."""

from __future__ import annotations

from typing import Any

from sagetrain.config.layout import Layout
from sagetrain.config.schema import RunConfig
from sagetrain.config.tokens_per_step import tokens_per_step
from sagetrain.costs.deepspeed_prices import reduce_bucket_size


def deepspeed_config(cfg: RunConfig, world_size: int, parameters: int) -> dict[str, Any]:
    """Return the dict that is handed to DeepSpeed.

    The batch sizes in the dict count what each replica works on. Under context parallelism these are slices of
    sequences.

    Args:
        parameters: the number of parameters of this tensor-parallel rank.
    """
    layout = Layout.of(cfg, world_size)
    # Later steps may have another number of micro-batches.
    stage, accumulation = layout.zero_stage, tokens_per_step(cfg.tokens_per_step, 0) // layout.micro_step
    zero = {"stage": stage, "reduce_bucket_size": reduce_bucket_size(parameters), "overlap_comm": False}
    # Stage 0 does not report the norm, so DeepSpeedEngine._clip_stage0 clips there.
    told: dict[str, Any] = {
        "train_batch_size": cfg.data.micro_batch_size * accumulation * layout.replicas,
        "train_micro_batch_size_per_gpu": cfg.data.micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "managed_gradient_accumulation": False,
        "gradient_clipping": cfg.optimizer.clip_grad if stage else 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 62,
        # DeepSpeed's own measurement of throughput waits for the GPU before every micro-batch.
        "timers": {"throughput": {"enabled": False}},
    }
    if cfg.training.dtype == "bf16":
        # At stage 1 each gradient is added to its fp32 sum, and freed, as soon as backward has made it. Otherwise
        # DeepSpeed also keeps all gradients in bf16, and zeroes and adds to them in every micro-batch.
        told["bf16"] = {"enabled": True, "immediate_grad_update": True}
        # Without these two keys DeepSpeed rounds gradients to bf16 between ranks, and at stage 1 also on a single rank.
        told["data_types"] = {"grad_accum_dtype": "fp32"}
        told["communication_data_type"] = cfg.parallel.gradient_reduction
    return told
