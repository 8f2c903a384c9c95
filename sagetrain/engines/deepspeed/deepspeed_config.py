"""The configuration that DeepSpeed gets, generated from that of a run."""

from __future__ import annotations

from typing import Any

from sagetrain.config.layout import Layout, zero_optimization
from sagetrain.config.schema import RunConfig
from sagetrain.costs.deepspeed_prices import reduce_bucket_size


def deepspeed_config(cfg: RunConfig, num_replicas: int, accumulation: int, parameters: int) -> dict[str, Any]:
    """Return the dict that is handed to DeepSpeed: generated from the YAML, plus the extra keys of its `deepspeed`
    section.

    The batch sizes in the dict count what each replica works on. Under context parallelism these are slices of
    sequences.

    Args:
        num_replicas: data-parallel times context-parallel ranks.
        accumulation: micro-batches of a step.
        parameters: the number of parameters of this tensor-parallel rank.
    """
    layout = Layout.of(cfg)
    stage, zero = layout.zero_stage, {"stage": layout.zero_stage, **zero_optimization(cfg)}
    # Both values are those of the YAML if it sets them.
    zero.update(reduce_bucket_size=reduce_bucket_size(cfg, parameters), overlap_comm=layout.reduces_beside)
    # Stage 0 does not report the norm, so DeepSpeedEngine._clip_stage0 clips there.
    generated = {
        "train_batch_size": cfg.data.micro_batch_size * accumulation * num_replicas,
        "train_micro_batch_size_per_gpu": cfg.data.micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "managed_gradient_accumulation": False,
        "gradient_clipping": cfg.optimizer.clip_grad if stage else 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 62,
    }
    if cfg.training.dtype == "bf16":
        # At stage 1 each gradient is added to its fp32 sum, and freed, as soon as backward has made it. Otherwise
        # DeepSpeed also keeps all gradients in bf16, and zeroes and adds to them in every micro-batch.
        generated["bf16"] = {"enabled": True, "immediate_grad_update": True}
        # Without these two keys DeepSpeed rounds gradients to bf16 between ranks, and at stage 1 also on a single rank.
        generated["data_types"] = {"grad_accum_dtype": "fp32"}
        generated["communication_data_type"] = cfg.parallel.gradient_reduction
    # DeepSpeed's own measurement of throughput waits for the GPU before every micro-batch.
    return {"timers": {"throughput": {"enabled": False}}, **cfg.deepspeed, **generated}
