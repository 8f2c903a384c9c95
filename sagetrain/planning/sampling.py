"""Predict how long training stands still while it writes texts (evaluation.samples_prompts)."""

from __future__ import annotations

from sagetrain.config.schema import RunConfig
from sagetrain.costs.accounting import parameters_per_rank
from sagetrain.costs.hardware import Hardware

# This is the host time of one block for one new token, kernel by kernel: 17 ms for 20 blocks on an H200
# (results/generation).
_TOKEN_BLOCK_SECONDS = 0.85e-3


def sample_seconds(cfg: RunConfig, world_size: int, vocab_size: int, hardware: Hardware) -> float:
    """Predict the longest time in seconds that training stands still while evaluation.samples_prompts are continued.

    Every token takes one pass over a rank's weights and the launches of every block. A single GPU records them in a
    CUDA graph where it can, and then takes a third of the time.
    """
    asked, tp_size, ep_size = cfg.evaluation, cfg.parallel.tensor_parallel_size, cfg.parallel.expert_parallel_size
    together = max(tp_size, ep_size) * cfg.parallel.pipeline_parallel_size
    # The stages of a pipeline work one after the other, so a token takes as long as on one of them with all blocks.
    texts = -(-len(asked.samples_prompts) // (world_size // together))
    weights = parameters_per_rank(cfg.model, cfg.attention, vocab_size, tp_size)
    element = 2 if cfg.training.dtype == "bf16" else 4
    block = _TOKEN_BLOCK_SECONDS + (2 * (tp_size > 1) + (ep_size > 1)) * hardware.collective_launch_seconds
    token = cfg.model.num_layers * block + element * weights / hardware.memory_bandwidth
    return -(-texts // cfg.data.micro_batch_size) * asked.samples_tokens * token
