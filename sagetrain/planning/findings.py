"""The findings of `sagetrain plan` about its own figures. Those of every start come from config/check.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from sagetrain.config.arguments import spelled
from sagetrain.config.arithmetic import may_be_low_bit
from sagetrain.config.errors import Finding, many
from sagetrain.config.layout import Layout
from sagetrain.config.linear_sizes import AUTO_PRECISION, LOW_BIT
from sagetrain.config.rules.findings import About
from sagetrain.config.schema import SIXTEEN_BITS, RunConfig
from sagetrain.costs.accounting import total_bytes
from sagetrain.costs.hardware import Hardware
from sagetrain.planning.changes import overrides_to
from sagetrain.planning.layouts import by_other_engine, with_longer_micro_batches
from sagetrain.planning.prediction import StepPrediction
from sagetrain.planning.priced import PricedLayout
from sagetrain.planning.result import Plan

_FASTER = 1.03
"""Two predictions that differ by less may be in the wrong order."""
_OF_LAYOUT = {
    "world_size",
    "whole_micro_steps",
    "ramp_multiple",
    "noise_aware_floor",
    "gpu_memory",
    "host_memory",
}
"""Rules that another layout may satisfy."""
_WITHOUT_GPU = {"sage_in_fp32", "low_bit_linear_in_fp32"}
"""Rules for what runs without a GPU alone."""
_OF_TOKENS = {"activations", "recomputed", "workspace", "logits", "loss"}
"""The parts of a rank's memory that grow with the micro-batch."""


def of_plan(plan: Plan) -> Iterator[Finding]:
    """Yield what the figures of a plan say about its settings. All of it is about the layout that the plan shows."""
    for find in (_precision, _recomputation, _room, _gain, _of_design, _attention, _engine, _short_micro_steps):
        if plan.shown:
            yield from find(plan, plan.shown)


def precision_of_gpu(cfg: RunConfig, hardware: Hardware) -> Finding | None:
    """Return a finding for linear layers in a precision that the GPU does not have, or None."""
    if not cfg.linear.low_bit:
        return None
    asked = {"linear.precision": cfg.linear.precision, "linear.head": cfg.linear.head}
    lacking = [(key, precision) for key, precision in asked.items() if precision not in hardware.precisions]
    if not lacking:
        return None
    (key, precision), *_ = lacking
    others = [name for name in ("bf16", *LOW_BIT) if name in hardware.precisions]
    return About("linear_precision_of_gpu", key, precision).error(
        f"{hardware.name} has no {precision} matmuls",
        f"use {' or '.join(others)}, or plan for another GPU ({spelled('gpu')})",
    )


def on_gpu(findings: Sequence[Finding], hardware: Hardware) -> list[Finding]:
    """Return the findings, errors first, with what runs without a GPU alone as errors if somebody has named a GPU:
    `train` refuses it there."""
    refused = _WITHOUT_GPU if hardware.named else ()
    found = [replace(each, level="error") if each.rule in refused else each for each in findings]
    return sorted(found, key=lambda each: each.level != "error")


def out_of_room(plan: Plan, own: PricedLayout) -> Iterator[Finding]:
    """Find that the configured layout `own` needs more memory than the GPU or its host has."""
    cfg, usable = own.cfg, plan.target.usable
    if own.memory > usable:
        items = plan.target.memory_of(cfg, own.prediction)
        largest = max(items, key=lambda item: item.bytes)
        state = total_bytes(item for item in items if item.name not in _OF_TOKENS)
        ways = ["more parallel.tensor_parallel_size or zero_stage"] if plan.world_size > 1 else []
        ways += ["a smaller data.micro_batch_size"] if cfg.data.micro_batch_size > 1 else []
        ways += ["optimizer.moments int8"] if cfg.optimizer.moments != "int8" else []
        auto = plan.asked.training.activation_checkpointing == "auto"
        ways += [] if auto or cfg.training.activation_offload else ["training.activation_checkpointing auto"]
        ways += ["parallel.offload"] if cfg.parallel.offload == "none" else []
        away = cfg.training.activation_checkpointing in ("full", "attention") and largest.name == "activations"
        ways += ["training.activation_offload"] if away and not cfg.training.activation_offload else []
        measured = any(item.name == "monitor" for item in items)  # It recomputes blocks that are not compiled.
        ways += ["stability.monitor.every_steps null"] if measured else []
        fix = f"use {', '.join(ways)}"
        if plan.fewest and not plan.proposed:
            fix = (
                f"no layout of {many(plan.world_size, 'GPU')} fits: from {plan.fewest} {plan.hardware.name} on one "
                f"does ({spelled('world_size')} {plan.fewest}); or {fix}"
            )
        yield About("gpu_memory", *_largest_setting(cfg, plan.world_size, state, usable)).error(
            f"a rank is estimated to take {own.memory / 2**30:.1f} GiB, {largest.bytes / 2**30:.1f} of them for "
            f"{largest.name}: more than the {usable / 2**30:.1f} GiB that {plan.hardware.name} leaves to a run",
            fix,
        )
    if no_room := plan.target.host_finding(cfg):
        yield no_room


def _largest_setting(cfg: RunConfig, world_size: int, state: int, usable: int) -> tuple[str, object]:
    """Return the key and the value of the setting that decides about the memory. `state` is what does not grow with the
    micro-batch."""
    if state <= usable:
        return "data.micro_batch_size", cfg.data.micro_batch_size
    if Layout.of(cfg, world_size).replicas > 1 and cfg.parallel.zero_stage < 3:
        return "parallel.zero_stage", cfg.parallel.zero_stage
    return "parallel.tensor_parallel_size", cfg.parallel.tensor_parallel_size


def with_way_out(finding: Finding, plan: Plan) -> Finding:
    """Return a finding whose fix also offers the proposed layouts, if there are some and another layout can correct
    it."""
    if finding.level != "error" or finding.rule not in _OF_LAYOUT or not plan.proposed:
        return finding
    return replace(finding, fix=f"{finding.fix}, or take one of the layouts proposed below")


def _in_8_bits(plan: Plan, item: PricedLayout) -> StepPrediction | None:
    """Return the prediction with linear layers in 8 bits for a layout where linear.precision auto comes to 16, or
    None."""
    asked = plan.asked.linear
    if asked.precision != "auto" or item.cfg.linear.low_bit or AUTO_PRECISION not in plan.hardware.precisions:
        return None
    low = item.cfg.model_copy(update={"linear": asked.model_copy(update={"precision": AUTO_PRECISION})})
    return plan.target.predict(low) if may_be_low_bit(low) else None


def _precision(plan: Plan, shown: PricedLayout) -> Iterator[Finding]:
    """Say which precision the figures are for where the run decides, and why it is 16 bits where it is."""
    linear, why = shown.cfg.linear, ""
    if plan.asked.linear.precision != "auto" or not may_be_low_bit(plan.asked):
        return
    fix = f"what {AUTO_PRECISION} costs in loss is in docs/low-bit-linear.md; bf16 leaves all layers in 16 bits"
    size = f" for layers of {linear.keep_layers_below:,} weights and more" if linear.keep_layers_below else ""
    what = f"{linear.precision}{size}" if linear.low_bit else "bf16"
    if low := _in_8_bits(plan, shown):
        wide, steps = shown.prediction, low.accumulation
        saved, waits = (wide.computing - low.computing) / steps, (low.launching - wide.launching) / steps
        why, fix = f": {AUTO_PRECISION} saves less in matmuls of these sizes than its casts take", ""
        if waits > 0:
            why = (
                f": in {AUTO_PRECISION} a micro-step of {_micro_step(shown)} would compute {1e3 * saved:.1f} ms less, "
                f"and wait {1e3 * waits:.1f} ms longer for the host to launch its kernels"
            )
            fix = "make micro-steps longer: data.micro_batch_size, data.seq_length, and the tokens_per_step they need"
    says = f"is priced as {what}, the faster of bf16 and {AUTO_PRECISION} {plan.where}{why}; the run times it"
    yield About("linear_precision_auto", "linear.precision", "auto").info(says, fix)


def _recomputation(plan: Plan, shown: PricedLayout) -> Iterator[Finding]:
    if plan.asked.training.activation_checkpointing == "auto":
        where = "here" if shown is plan.chosen else f"in {plan.name}"
        yield About("recomputation", "training.activation_checkpointing", "auto").info(
            f"is {shown.cfg.training.activation_checkpointing} {where}: the least that fits into the memory of this "
            "GPU by the estimate of this plan",
            "name a value to have it on every GPU",
        )


def _room(plan: Plan, shown: PricedLayout) -> Iterator[Finding]:
    """Find that there is no memory for the room that rows of experts get if they do not fit into the one that is
    set."""
    parallel, usable = shown.cfg.parallel, plan.target.usable
    twice = min(2 * parallel.expert_room, parallel.expert_parallel_size)
    uneven = shown.layout.replicas * shown.layout.tensor % parallel.expert_parallel_size
    if twice <= parallel.expert_room or shown.memory > usable or uneven:
        return
    larger = shown.cfg.changed({"parallel": {"expert_room": twice}})
    if (need := total_bytes(plan.target.memory_of(larger, shown.prediction))) > usable:
        yield About("room_of_experts", "parallel.expert_room", parallel.expert_room).warning(
            f"is doubled if rows of experts do not fit on some rank. With {twice:g} a rank is estimated to take "
            f"{need / 2**30:.1f} GiB: more than the {usable / 2**30:.1f} GiB that {plan.hardware.name} leaves to a run",
            "use a smaller data.micro_batch_size, or more training.activation_checkpointing",
        )


def _gain(plan: Plan, shown: PricedLayout) -> Iterator[Finding]:
    """Find that the casts of linear layers take longer than their matmuls save."""
    linear = plan.asked.linear
    if not linear.low_bit:
        return
    wide = shown.cfg.model_copy(update={"linear": SIXTEEN_BITS})
    wide_speed = plan.target.predict(wide).tokens_per_second
    if (speed := shown.prediction.tokens_per_second) <= 1.01 * wide_speed:
        yield About("linear_precision_gain", "linear.precision", linear.precision).warning(
            f"is not predicted to be faster: {speed:,.0f} tokens/s {plan.where}, with bf16 {wide_speed:,.0f}",
            "use linear.precision bf16, or larger micro-batches where the host is the limit",
        )


def _of_design(plan: Plan, shown: PricedLayout) -> Iterator[Finding]:
    """Find what is slow on this GPU because of its design, and rates that belong to another GPU's kernels."""
    hardware = plan.hardware
    fp8, int8 = (hardware.precisions.get(name, 0.0) for name in ("fp8", "int8"))
    if shown.cfg.linear.precision == "fp8" and int8 > 1.5 * fp8 > 0:
        yield About("linear_fp8_half_rate", "linear.precision", "fp8").warning(
            f"{hardware.name} adds FP8 products up at half rate: INT8 products are {int8 / fp8:.1f} times as fast",
            "use linear.precision int8 or auto",
        )
    backend = shown.prediction.attention_backend
    if backend.startswith("sage") and hardware.int8_attention:
        why, _, fix = hardware.int8_attention.partition(": ")
        yield About("int8_attention_rate", "attention.backend", plan.asked.attention.backend).warning(
            f"INT8 attention ({backend}) on {hardware.name}: {why}", fix
        )


def _attention(plan: Plan, shown: PricedLayout) -> Iterator[Finding]:
    """Find that another attention backend or recipe is predicted to be faster than the one that is named."""
    cfg, ours = shown.cfg, shown.prediction
    if (cfg.attention.backend, cfg.attention.recipe) == ("auto", "auto"):
        return
    auto = cfg.changed({"attention": {"backend": "auto", "recipe": "auto"}})
    best = plan.target.predict(auto)
    if best.tokens_per_second >= _FASTER * ours.tokens_per_second:
        backend, _, recipe = best.attention_backend.partition(" ")
        faster = f"backend {backend}" + (f" with recipe {recipe or 'fine'}" if backend == "sage" else "")
        yield About("faster_attention", "attention.backend", cfg.attention.backend).info(
            f"{faster} is predicted to be faster: {best.tokens_per_second:,.0f} tokens/s, "
            f"{ours.tokens_per_second:,.0f} {plan.where}",
            f"use attention.backend auto with recipe auto, which times them, or {faster}",
        )


def _engine(plan: Plan, shown: PricedLayout) -> Iterator[Finding]:
    """Find that the same layout is predicted to be faster by the other engine."""
    ours = shown.prediction.tokens_per_second
    other = by_other_engine(shown.cfg, plan.target)
    if other and (theirs := other.prediction.tokens_per_second) >= _FASTER * ours:
        engine = other.cfg.parallel.engine
        yield About("faster_engine", "parallel.engine", shown.cfg.parallel.engine).info(
            f"{engine} is predicted to be faster here: {theirs:,.0f} tokens/s, {ours:,.0f} {plan.where}",
            f"set parallel.engine: {engine}",
        )


def _short_micro_steps(plan: Plan, shown: PricedLayout) -> Iterator[Finding]:
    """Find that even the fastest layout waits for the host to launch kernels, and that more tokens per step, which make
    its micro-steps longer, would make it faster."""
    best = plan.proposed[0] if plan.proposed else shown
    low = _in_8_bits(plan, best)
    if not (best.prediction.launching or (low and low.launching)):
        return
    longer = with_longer_micro_batches(plan.asked, best, plan.target, _FASTER)
    before = best.cfg.tokens_per_step.named_tokens
    if longer is None or longer.cfg.tokens_per_step.named_tokens == before:
        return
    asked, after = plan.asked.tokens_per_step.named_tokens, longer.cfg.tokens_per_step.named_tokens
    key = next(key for key in asked if after[key] != before[key])
    name = "in layout 1" if plan.proposed else plan.name
    why, waiting = f"the host to launch {AUTO_PRECISION}'s kernels in time", best.prediction.launching
    if waiting:
        why = f"the host: launching kernels is {waiting / best.prediction.seconds:.0%} of the step"
    yield About("short_micro_steps", key, asked[key]).info(
        f"leaves micro-steps of {_micro_step(best)} {name}, too short for {why}",
        f"{' '.join(overrides_to(plan.configured, longer.cfg))} is predicted at "
        f"{longer.prediction.tokens_per_second:,.0f} tokens/s with linear layers in {longer.cfg.linear.precision}, "
        f"instead of {best.prediction.tokens_per_second:,.0f} in {best.cfg.linear.precision}; what more tokens per "
        "step do to the loss is in docs/tokens-per-step.md",
    )


def _micro_step(item: PricedLayout) -> str:
    data = item.cfg.data
    return f"{many(data.micro_batch_size, 'sequence')} x {data.seq_length:,} tokens"
