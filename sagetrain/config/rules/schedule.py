"""Rules for the settings that change during a run: tokens per step and learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterator

from sagetrain.config.arithmetic import decay_tokens, peak_lr, warmup_tokens
from sagetrain.config.errors import Finding
from sagetrain.config.layout import Layout
from sagetrain.config.rules.findings import About, neighbours, no_effect
from sagetrain.config.run_parts import run_of
from sagetrain.config.schema import LearningRates, OptimizerConfig, RampTokens, RunConfig, StagedTokens
from sagetrain.config.tokens_per_step import MOST_SIZES, sizes_of


def findings(cfg: RunConfig, layout: Layout) -> Iterator[Finding]:
    """Check that steps are whole micro-steps, that stages are in order, and that the warm-up ends."""
    yield from _tokens_per_step(cfg, layout)
    yield from _lr_schedule(cfg)
    yield from _batch_rule(cfg)
    yield from _step_size(cfg)


def _tokens_per_step(cfg: RunConfig, layout: Layout) -> Iterator[Finding]:
    schedule, total = cfg.tokens_per_step, cfg.training.total_tokens
    if layout.even:
        multiple, micro = layout.micro_step, cfg.data.micro_batch_size
        for key, tokens in schedule.named_tokens.items():
            if tokens % multiple:
                unit = multiple // micro
                sizes = range(min(micro - 1, tokens // unit, 4096), 0, -1)
                smaller = next((size for size in sizes if tokens % (unit * size) == 0), None)
                ways = [neighbours(tokens, multiple)] * (multiple <= total)
                ways.append(f"data.micro_batch_size {smaller}" if smaller else "fewer data-parallel ranks")
                yield About("whole_micro_steps", key, tokens).error(
                    f"is not a multiple of micro_batch_size {micro} x seq_length "
                    f"{cfg.data.seq_length} x {layout.data} data-parallel ranks = {multiple}",
                    f"use {', or '.join(ways)}",
                )
    if isinstance(schedule, RampTokens):
        yield from _ramp(cfg, schedule)
    if isinstance(schedule, StagedTokens):
        starts = [stage.from_tokens for stage in schedule.stages]
        if starts[0] != 0:
            yield About("first_stage", "tokens_per_step.stages.0.from_tokens", starts[0]).error(
                "the first stage must begin at 0", "set it to 0"
            )
        for i in range(1, len(starts)):
            if starts[i] <= starts[i - 1]:
                yield About("stages_in_order", f"tokens_per_step.stages.{i}.from_tokens", starts[i]).error(
                    f"is not after the stage before it, which begins at {starts[i - 1]}",
                    "list the stages in increasing order of from_tokens",
                )
            elif starts[i] >= total:
                yield About("stage_never_reached", f"tokens_per_step.stages.{i}.from_tokens", starts[i]).warning(
                    f"the run ends before, at training.total_tokens {total}",
                    "begin the stage earlier, drop it, or train longer",
                )
    named = run_of(cfg).tokens_per_step.named_tokens
    first = next(iter(named.values()))
    if total < first:
        yield About("total_tokens", "training.total_tokens", total).error(
            f"is less than the first optimizer step of {first} tokens",
            "train longer, or begin with fewer tokens per step",
        )
    least = min(tokens for key, tokens in named.items() if key != "tokens_per_step.multiple")
    most = -(-total // least)
    ends = f"training.total_tokens {total}: the run ends before step {most + 1}"
    if late := [step for step in cfg.training.drop_steps if step > most]:
        yield no_effect("training.drop_steps", late, ends)
    if cfg.profile and cfg.profile.from_step > most:
        yield no_effect("profile.from_step", cfg.profile.from_step, ends)


def _ramp(cfg: RunConfig, ramp: RampTokens) -> Iterator[Finding]:
    total, rounding = cfg.training.total_tokens, ramp.rounding
    for name in ("start", "end"):
        tokens = getattr(ramp, name)
        if tokens % rounding:
            yield About("ramp_multiple", f"tokens_per_step.{name}", tokens).error(
                f"is not a multiple of tokens_per_step.multiple {rounding}, to which the ramp is rounded down",
                f"use {neighbours(tokens, rounding)}, or a multiple such as {math.gcd(ramp.start, ramp.end)}, which "
                "divides both ends",
            )
    if (sizes := sizes_of(ramp)) > MOST_SIZES:
        yield About("ramp_too_fine", "tokens_per_step.multiple", ramp.multiple).error(
            f"with multiples of {rounding} tokens the ramp has steps of {sizes:,} sizes, more than {MOST_SIZES:,}",
            "use a larger multiple, which divides both ends, or a ramp that ends lower",
        )
    finer = [rounding // parts for parts in (8, 4, 2) if rounding % (parts * cfg.data.seq_length) == 0]
    if abs(ramp.end - ramp.start) == rounding and finer:
        up = f"{ramp.start} until the ramp ends, then {ramp.end}"
        yield About("ramp_in_one_step", "tokens_per_step.multiple", ramp.multiple).warning(
            f"tokens per step are rounded down to multiples of {rounding}: "
            + (up if ramp.end > ramp.start else f"{ramp.end} from the second step on"),
            f"{finer[0]} makes steps of that size between, where micro-steps divide it; or say so with stages",
        )
    if ramp.ramp_tokens > total:
        yield About("ramp_never_ends", "tokens_per_step.ramp_tokens", ramp.ramp_tokens).warning(
            f"the run ends before, at training.total_tokens {total}: {ramp.end} tokens per step are never reached",
            "shorten the ramp or train longer",
        )


def _lr_schedule(cfg: RunConfig) -> Iterator[Finding]:
    schedule, total = cfg.lr_schedule, cfg.training.total_tokens
    decay, warmup = decay_tokens(schedule, total), warmup_tokens(schedule, total)
    key = "lr_schedule.warmup_tokens" if schedule.warmup_tokens else "lr_schedule.warmup"
    given = schedule.warmup_tokens or schedule.warmup
    both = {"lr_schedule.decay": schedule.decay, "lr_schedule.decay_tokens": schedule.decay_tokens}
    decays = {name: value for name, value in both.items() if value is not None}
    decay_key = next(reversed(decays), "lr_schedule.decay")
    if schedule.warmup_tokens and schedule.warmup:
        yield About("one_warmup", key, given).error(
            f"is a second warm-up beside lr_schedule.warmup {schedule.warmup}",
            "keep one of the two, and set the other to 0",
        )
    elif warmup >= total:
        yield About("warmup_before_end", key, given).error(
            f"is not less than training.total_tokens {total}: the peak would never be reached",
            "shorten it (lr_schedule.warmup: 0.01 with warmup_tokens: 0 is a hundredth of any run), or train longer",
        )
    elif schedule.shape == "wsd" and warmup + decay > total:
        room = total - warmup
        most = (
            f"at most {math.floor(room / total * 10_000) / 10_000}"
            if schedule.decay
            else f"decay_tokens of at most {room}"
        )
        yield About("decay_after_warmup", decay_key, decays.get(decay_key)).error(
            f"with a warm-up of {warmup} a decay of {decay} tokens is more than training.total_tokens {total}",
            f"use {most}, or shorten the warm-up",
        )
    elif warmup > total // 2:
        yield About("warmup_of_most", key, given).warning(
            f"takes {warmup / total:.0%} of the run: the learning rate reaches optimizer.lr only then",
            "for example lr_schedule.warmup: 0.025. In a run of 400 steps 0.75 was AdamW's best (results/muon-loss)",
        )
    if schedule.min_lr > cfg.optimizer.lr:
        yield About("min_lr", "lr_schedule.min_lr", schedule.min_lr).error(
            f"is above the peak, optimizer.lr {cfg.optimizer.lr}", "use a smaller min_lr"
        )
    if len(decays) == 2:
        yield About("one_decay", decay_key, schedule.decay_tokens).error(
            f"is a second decay beside lr_schedule.decay {schedule.decay}",
            "keep one of the two, and set the other to null",
        )
    for key, given in decays.items() if schedule.shape != "wsd" else ():
        yield no_effect(key, given, f"shape {schedule.shape}; only wsd uses it")
    if schedule.min_lr and schedule.shape == "constant":
        yield no_effect("lr_schedule.min_lr", schedule.min_lr, "shape constant, which does not decay")


def _batch_rule(cfg: RunConfig) -> Iterator[Finding]:
    key, schedule = "lr_schedule.reference_tokens_per_step", cfg.lr_schedule
    if schedule.batch_rule == "none" and schedule.reference_tokens_per_step is not None:
        yield no_effect(key, schedule.reference_tokens_per_step, "batch_rule none")
    if schedule.batch_rule != "none" and schedule.reference_tokens_per_step is None:
        sizes = list(run_of(cfg).tokens_per_step.named_tokens.values())
        yield About("batch_rule_reference", key, None).error(
            f"batch_rule {schedule.batch_rule} needs it: the tokens per step at which optimizer.lr holds unscaled. A "
            "default taken from the schedule made adding a stage change the learning rates before it",
            f"name the tokens per step for which optimizer.lr was chosen: {sizes[0]} if optimizer.lr is meant for the "
            "first steps. A run begun before this was required goes on exactly as before with the largest of its "
            f"schedule, {max(sizes)}",
        )


def _step_size(cfg: RunConfig) -> Iterator[Finding]:
    """Find learning rates whose exponent lacks its minus sign, and weight decay that removes whole weights in one
    step."""
    optimizer, std, width = cfg.optimizer, cfg.model.init_std, cfg.model.hidden_size
    muon = optimizer.name == "muon"
    kinds = [kind for kind in LearningRates.model_fields if kind != "router" or cfg.model.experts]
    rates = {kind: peak_lr(optimizer, kind, width) for kind in kinds}
    only_muon = {"matrix"} if muon and not optimizer.muon.adamw_matrices else set()
    by_adamw = {rate for kind, rate in rates.items() if kind not in only_muon}
    for key, given, lr in sorted(by_adamw):
        if lr < std * 2**-24:
            yield About("small_lr", key, given).warning(
                f"{_scaled(optimizer, given, lr)}fp32 rounds a step of AdamW away beside weights that begin with a "
                f"standard deviation of model.init_std {std}",
                "use a larger one, such as 3e-4",
            )
        if lr < std * (4 if key == "optimizer.lr_of.embedding" else 1):  # The short recipe has 3.2 times std.
            continue
        fix = "use a smaller one, such as 3e-4"
        if only_muon and key == "optimizer.lr":
            # With adjust_lr original, Muon's own learning rate may well be as large.
            fix += ", or set optimizer.lr_of for what AdamW updates: {embedding: 3e-4, head: 3e-4, gain: 3e-4}"
        yield About("large_lr", key, given).warning(
            f"{_scaled(optimizer, given, lr)}one step of AdamW may change each weight by that much; they begin with a "
            f"standard deviation of model.init_std {std}",
            fix,
        )
    matrix = peak_lr(optimizer, "matrix", width, by_muon=muon)
    key, given, lr = max((rates["embedding"], rates["head"], rates["matrix"], matrix), key=lambda each: each.rate)
    if optimizer.weight_decay_lr is not None:
        key, given, lr = "optimizer.weight_decay_lr", optimizer.weight_decay_lr, optimizer.weight_decay_lr
    if optimizer.weight_decay * lr >= 1:
        yield About("decay_in_one_step", "optimizer.weight_decay", optimizer.weight_decay).error(
            f"times {key} {given} {_scaled(optimizer, given, lr)}is 1 or more: one step would take all of a weight "
            "away",
            f"use a smaller {key} (3e-4, say), or a decay far below {1 / lr:g}",
        )


def _scaled(optimizer: OptimizerConfig, given: float, lr: float) -> str:
    """Return the words for what optimizer.lr_base_width makes of a rate; none where it changes nothing."""
    return "" if lr == given else f"(optimizer.lr_base_width {optimizer.lr_base_width} makes it {lr:g} here) "
