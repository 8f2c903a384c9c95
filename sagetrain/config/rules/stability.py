"""Rules for the measurements of a run's stability, and for the reactions to them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from sagetrain.config.arithmetic import may_be_low_bit
from sagetrain.config.errors import Finding
from sagetrain.config.layout import Layout
from sagetrain.config.rules.findings import About, neighbours, no_effect, not_proven
from sagetrain.config.schema import NoiseAwareTokens, NoiseScaleConfig, RunConfig

WITH_REPLAY: dict[str, tuple[object, ...]] = {
    "parallel.tensor_parallel_size": (1,),
    "parallel.context_parallel_size": (1,),
    "parallel.pipeline_parallel_size": (1,),
    "parallel.engine": ("auto", "fsdp"),
    "parallel.gradient_reduction": ("fp32",),
    "parallel.zero_stage": (0, 1),
    "parallel.offload": ("none",),
    "model.experts": (None,),
    "model.delta_net": (None,),
    "attention.backend": ("sage", "sdpa"),
}
"""The values that were proven with stability.replay, which compares bits of replicas. The backward pass of flash-attn
adds up dQ in any order, and `auto` may choose it."""


def findings(cfg: RunConfig, layout: Layout) -> Iterator[Finding]:
    """Find measurements of something that does not exist, and policies that cannot work."""
    yield from _monitor(cfg)
    yield from _noise_scale(cfg)
    if cfg.stability.quant_noise.every_steps:
        yield from _quant_noise(cfg)
    if isinstance(cfg.tokens_per_step, NoiseAwareTokens):
        yield from _noise_aware(cfg, cfg.tokens_per_step)
    yield from _spikes(cfg)
    yield from _replay(cfg, layout)


def _monitor(cfg: RunConfig) -> Iterator[Finding]:
    monitor, layers, backend = cfg.stability.monitor, cfg.model.num_layers, cfg.attention.backend
    linear = "" if may_be_low_bit(cfg) else "linear layers neither"
    if isinstance(monitor.every_steps, int) and not cfg.attention.may_be_int8 and linear:
        yield About("monitor_of_nothing", "stability.monitor.every_steps", monitor.every_steps).error(
            f"attention.backend {backend} quantizes nothing, {linear}: there is no error to measure",
            "use auto, which measures where something is quantized, or attention.backend sage",
        )
    if monitor.layers == "all":
        return
    if monitor.every_steps is None:
        yield no_effect("stability.monitor.layers", monitor.layers, "stability.monitor.every_steps null")
    outside = [layer for layer in monitor.layers if not -layers <= layer < layers]
    if outside:
        yield About("monitor_layers", "stability.monitor.layers", monitor.layers).error(
            f"the model has {layers} layers, {outside[0]} is none of them",
            f"use numbers from {-layers} to {layers - 1}; -1 is the last layer",
        )


def _noise_scale(cfg: RunConfig) -> Iterator[Finding]:
    asked, micro_batch = cfg.stability.noise_scale.every_steps, cfg.data.micro_batch_size * cfg.data.seq_length
    if (
        asked
        and asked != NoiseScaleConfig().every_steps
        and max(cfg.tokens_per_step.named_tokens.values()) <= micro_batch
    ):
        why = f"steps of one micro-batch of {micro_batch} tokens: there is nothing to compare it with"
        yield no_effect("stability.noise_scale.every_steps", asked, why)


def _quant_noise(cfg: RunConfig) -> Iterator[Finding]:
    key, every = "stability.quant_noise.every_steps", cfg.stability.quant_noise.every_steps
    backend = cfg.attention.backend
    if not cfg.attention.may_be_int8 and not may_be_low_bit(cfg):
        yield About("probe_of_16_bits", key, every).error(
            f"attention.backend {backend} quantizes nothing, linear layers neither: there is no error to measure",
            "set it to null, or use attention.backend sage, or linear.precision int8",
        )
    if cfg.stability.noise_scale.every_steps is None:
        yield About("probe_without_noise", key, every).error(
            "relates the error of quantization to the noise of the gradients, which is not measured",
            "set stability.noise_scale.every_steps, to 10 for instance",
        )
    micro_batch = cfg.data.micro_batch_size * cfg.data.seq_length
    if max(cfg.tokens_per_step.named_tokens.values()) <= micro_batch:
        yield About("probe_without_noise", key, every).error(
            f"steps are one micro-batch of {micro_batch} tokens, whose gradient says nothing about its noise: that "
            "takes accumulation, or data-parallel ranks",
            "use more tokens per step, or a smaller data.micro_batch_size",
        )


def _spikes(cfg: RunConfig) -> Iterator[Finding]:
    key, spikes = "stability.spikes", cfg.stability.spikes
    if spikes.grace_steps > spikes.window:
        yield About("grace_in_window", f"{key}.grace_steps", spikes.grace_steps).error(
            f"is more than stability.spikes.window {spikes.window}, which never knows so many steps: no spike would be "
            "seen",
            f"use at most {spikes.window}, or a longer window",
        )
    if spikes.policy == "stop" and "max_events" in spikes.model_fields_set and spikes.max_events != 3:
        yield no_effect(f"{key}.max_events", spikes.max_events, "policy stop, which leaves out no step")
    if spikes.policy == "rewind" and spikes.max_events > 1 and cfg.checkpoint.keep_last < 3:
        yield About("checkpoints_to_go_back_to", "checkpoint.keep_last", cfg.checkpoint.keep_last).warning(
            "leaves stability.spikes.policy rewind nothing to go back to a second time: each rewind is saved at once, "
            "and that and the checkpoint it went back to are the two newest",
            "use 3 or more, or stability.spikes.max_events 1",
        )


def _replay(cfg: RunConfig, layout: Layout) -> Iterator[Finding]:
    key, every = "stability.replay.every_steps", cfg.stability.replay.every_steps
    if every is None:
        if (policy := cfg.stability.replay.policy) != "stop":
            yield no_effect("stability.replay.policy", policy, f"{key} null")
        return
    yield from not_proven(cfg, WITH_REPLAY, "replay_untried", key, f"{key}: null")
    share = layout.micro_step / (every * min(cfg.tokens_per_step.named_tokens.values()))
    if share > 0.01:
        yield About("replay_often", key, every).warning(
            f"computes one micro-batch more in {every} steps, which takes {share:.1%} of the time or more",
            f"use {math.ceil(100 * every * share)} or more, or accept the cost",
        )


def _noise_aware(cfg: RunConfig, schedule: NoiseAwareTokens) -> Iterator[Finding]:
    key, backend = "tokens_per_step.schedule", cfg.attention.backend
    if backend != "sage" and not cfg.linear.low_bit:
        unsure = backend == "auto" or may_be_low_bit(cfg)
        yield About("noise_aware_of_16_bits", key, schedule.schedule).error(
            f"follows the error of quantization, and attention.backend {backend} with linear.precision "
            f"{cfg.linear.precision} " + ("may quantize nothing" if unsure else "quantizes nothing"),
            "use attention.backend sage, or name linear.precision int8, or another schedule: constant, ramp or stages",
        )
    for name, usual in (("noise_scale", 10), ("quant_noise", 200)):
        every, source = getattr(cfg.stability, name).every_steps, f"stability.{name}.every_steps"
        if every is None:
            yield About("noise_aware_unmeasured", key, schedule.schedule).error(
                f"follows what is measured, and {source} is null", f"set {source}, to {usual} for instance"
            )
        elif every * schedule.start > cfg.training.total_tokens:
            yield About("noise_aware_unmeasured", source, every).warning(
                f"{every} steps of tokens_per_step.start {schedule.start} are more than training.total_tokens "
                f"{cfg.training.total_tokens}, so it is never measured: nothing would be decided",
                f"set it to {usual} for instance, or train longer",
            )
    if not schedule.floor <= schedule.start <= schedule.ceiling:
        name = "floor" if schedule.floor > schedule.ceiling else "start"
        yield About("noise_aware_bounds", f"tokens_per_step.{name}", getattr(schedule, name)).error(
            f"floor {schedule.floor}, start {schedule.start} and ceiling {schedule.ceiling} are not in this order",
            "use floor <= start <= ceiling",
        )
    for name in ("start", "floor", "ceiling"):
        tokens = getattr(schedule, name)
        if tokens % schedule.rounding:
            yield About("noise_aware_multiple", f"tokens_per_step.{name}", tokens).error(
                f"is not a multiple of tokens_per_step.multiple {schedule.rounding}",
                f"use {neighbours(tokens, schedule.rounding)}",
            )
    micro_batch = cfg.data.micro_batch_size * cfg.data.seq_length
    if schedule.floor <= micro_batch:
        yield About("noise_aware_floor", "tokens_per_step.floor", schedule.floor).error(
            f"is no more than one micro-batch of {micro_batch} tokens: one data-parallel replica with accumulation 1, "
            "whose gradient says nothing about its noise",
            f"use {2 * micro_batch} or more, or a smaller data.micro_batch_size",
        )
