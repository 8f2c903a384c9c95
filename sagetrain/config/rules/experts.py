"""Rules for layers with a mixture of experts: their sizes, and what was proven to work with them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import cast

from sagetrain.config.errors import Finding
from sagetrain.config.layout import Layout
from sagetrain.config.rules.findings import error, neighbours, warning
from sagetrain.config.schema import ExpertsConfig, RunConfig

_MULTIPLE = 16
"""The kernels read rows in pieces of this many values."""
_MOST = 1023
"""torch's grouped products take fewer than 1,024 groups."""

PROVEN: dict[str, tuple[object, ...]] = {
    "model.experts": (None,),
    "model.activation": ("swiglu",),
    "linear.precision": ("bf16",),
    "parallel.world_size": (1,),
    "parallel.tensor_parallel_size": (1,),
    "parallel.context_parallel_size": (1,),
    "parallel.pipeline_parallel_size": (1,),
    "parallel.engine": ("auto", "fsdp"),
    "parallel.zero_stage": (0,),
    "parallel.shard_size": (None,),
    "parallel.offload": ("none",),
    "parallel.gradient_reduction": ("fp32",),
    "deepspeed": ({},),
    "optimizer.name": ("adamw",),
    "optimizer.moments": ("fp32",),
    "optimizer.master": ("fp32",),
    "training.activation_checkpointing": ("none",),
    "training.compile": ("off",),
    "training.cuda_graphs": ("off",),
    "evaluation.tasks": ([],),
    "evaluation.samples_every_tokens": (None,),
    "stability.monitor.every_steps": (None,),
    "stability.noise_scale.every_steps": (None,),
    "stability.quant_noise.every_steps": (None,),
    "stability.spikes.policy": ("stop",),
    "logging.layer_norms_every_steps": (None,),
}
"""The values that were proven with experts, of each key that asks for it. Other values are errors. A proof opens a
value here, or removes the line if all values have one."""


def findings(cfg: RunConfig, layout: Layout) -> Iterator[Finding]:
    """Check the sizes of experts, and that everything else in the configuration was proven with them."""
    if (experts := cfg.model.experts) is None:
        return
    yield from _sizes(cfg, experts)
    yield from _router(experts)
    for key, values in PROVEN.items():
        found = functools.reduce(getattr, key.split("."), cast(object, cfg))
        value = layout.world_size if key == "parallel.world_size" else found
        if value not in values:
            shown = [value, *values] if key != "model.experts" else [experts.number, *values]
            given, *proven = ("null" if each is None else each for each in shown)
            yield error(
                "not_proven_with_experts",
                key,
                given,
                "was not proven with model.experts yet",
                f"use {' or '.join(map(str, proven))}, or a dense model (model.experts: null)",
            )


def _sizes(cfg: RunConfig, experts: ExpertsConfig) -> Iterator[Finding]:
    """Check that the numbers go together, and that the kernels take the sizes."""
    key, number, tensor = "model.experts", experts.number, cfg.parallel.tensor_parallel_size
    if experts.per_token > number:
        why = f"is more than the {number} experts of a layer (model.experts.number)"
        yield error("experts_per_token", f"{key}.per_token", experts.per_token, why, f"use 1 to {number}")
    if number > _MOST:
        why = f"is more than {_MOST:,}, which grouped products take"
        yield error("experts_number", f"{key}.number", number, why, f"use up to {_MOST:,}")
    if experts.dense_layers >= cfg.model.num_layers:
        yield error(
            "experts_in_no_layer",
            f"{key}.dense_layers",
            experts.dense_layers,
            f"leaves none of the {cfg.model.num_layers} layers with experts",
            f"use 0 to {cfg.model.num_layers - 1}, or model.experts: null",
        )
    for name, size in (("model.hidden_size", cfg.model.hidden_size), (f"{key}.ffn_size", experts.ffn_size)):
        if size % _MULTIPLE:
            why = f"is not a multiple of {_MULTIPLE}, which the kernels of experts need"
            yield error("experts_multiple", name, size, why, f"use {neighbours(size, _MULTIPLE)}")
    if (columns := experts.shared * experts.ffn_size) % tensor:
        why = f"x ffn_size {experts.ffn_size} is not a multiple of parallel.tensor_parallel_size {tensor}"
        fix = f"use another number than {experts.shared}, whose {columns} columns each rank gets an equal share of"
        yield error("tensor_parallel_split", f"{key}.shared", experts.shared, why, fix)


def _router(experts: ExpertsConfig) -> Iterator[Finding]:
    """Find a router that learns nothing, and one that nothing balances."""
    if experts.per_token == 1 and experts.renormalize:
        why = "makes the weight of a token's only expert 1 whatever its score is: the loss teaches the router nothing"
        yield warning("router_learns_nothing", "model.experts.renormalize", True, why, "use false, or more per_token")
    if not experts.balance.bias_rate and not experts.balance.aux_weight:
        why = "with bias_rate 0 lets a router send most tokens to a few experts"
        fix = "use 0.01, or bias_rate 0.001"
        yield warning("router_not_balanced", "model.experts.balance.aux_weight", 0.0, why, fix)
