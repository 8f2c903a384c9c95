"""Continue a run: check that a checkpoint is one of this run, and restore everything from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from sagetrain.checkpoint import on_disk, reading
from sagetrain.checkpoint.ledger import EndedPart, Ledger, TrainState
from sagetrain.checkpoint.reading import Reader
from sagetrain.checkpoint.state import Identity, RunState
from sagetrain.config.errors import ConfigError
from sagetrain.config.former_keys import take_out
from sagetrain.config.load import differences, flat, null_above, saved_config
from sagetrain.config.rules.data import ORDER
from sagetrain.config.run_parts import KEYS_OF_STAGES, lengths_of, part_at, parts
from sagetrain.config.schema import DataSource, LinearConfig, LrScheduleConfig, OptimizerConfig, RunConfig, Section
from sagetrain.config.tokens_per_step import change_at_resume, tokens_per_step
from sagetrain.data import verify
from sagetrain.engines.step import Engine
from sagetrain.parallel.objects import of_rank_0
from sagetrain.parallel.rng import set_rng_state
from sagetrain.storage.local import read_rows
from sagetrain.storage.url_path import Location
from sagetrain.training import init_from
from sagetrain.training.init_from import same_optimizer
from sagetrain.training.lr_schedule import learning_rate
from sagetrain.training.perturb import perturb
from sagetrain.training.run import CheckedFiles

VALID, TASKS, SAMPLES = "valid/", "eval/", "samples/"
"""The measurements of the model that are made between steps, as the prefixes of the metrics' names."""


def check_part(
    folder: Location, cfg: RunConfig, files: CheckedFiles, hashes: dict[str, str], stopped: bool
) -> tuple[int, bool]:
    """Check that a run may continue from a checkpoint, as `check` does; collective. Return the number of the part of
    the run that continues, and whether it begins there (config/run_parts.py). A part that was `stopped` at its end
    continues once more if it owes measurements there, because the model of the next part may be another one."""
    state = on_disk.read_state(folder)
    wrote, part = parts_of(state, cfg)
    before = parts(cfg)[wrote]
    check(folder, before, files.part(wrote).identity, hashes)
    last = last_step(state, before.data.seq_length)
    if wrote != part and stopped and owed(before, files.folder.path, state.step, state.tokens, last):
        part = wrote
    return part, wrote != part


def owed(cfg: RunConfig, run_dir: Path, step: int, tokens: int, last: int) -> list[str]:
    """Return the measurements that a continued run has still to make at `tokens` tokens, because a signal came before
    them; collective. The last step had `last` tokens."""
    if not (expected := due(cfg, tokens - last, tokens) if step else []):
        return []
    # Rank 0 decides, because other hosts may see its files late.
    rows = read_rows(run_dir / "metrics.jsonl") if dist.get_rank() == 0 else []
    there = of_rank_0({name for row in rows if row["step"] == step for name in row})
    return [each for each in expected if not any(name.startswith(each) for name in there)]


def due(cfg: RunConfig, before: int, after: int) -> list[str]:
    """Return what is to be measured after a step from `before` to `after` tokens."""
    total, evaluation = cfg.training.total_tokens, cfg.evaluation
    tenth = max(1, total // 10)
    every = {VALID: evaluation.every_tokens or tenth} if cfg.data.valid else {}
    every |= {TASKS: evaluation.tasks_every_tokens or tenth} if evaluation.tasks else {}
    every |= {SAMPLES: evaluation.samples_every_tokens} if evaluation.samples_every_tokens else {}
    return [name for name, tokens in every.items() if after >= total or crossed(before, after, tokens)]


def crossed(before: int, after: int, every: int) -> bool:
    """Whether a multiple of `every` lies in (before, after]."""
    return before // every != after // every


def check(
    folder: Location,
    cfg: RunConfig,
    identity: Identity,
    files: dict[str, str],
) -> Reader:
    """Check that a run with this identity may continue from a checkpoint. `files` has the hashes of the run's data on
    this host, by name. All ranks call this with the same arguments. Return a reader of the checkpoint. Raises
    ConfigError if the checkpoint was written by another run, or has seen more tokens than this one is to see, or
    checkpoint.resume is never."""
    if cfg.checkpoint.resume == "never":
        raise ConfigError(
            f"{folder.parent.parent} holds checkpoint {folder.name} and checkpoint.resume is never; "
            "set it to auto to continue, or choose another training.run_dir"
        )
    reader, train = Reader(folder), cfg.data.train
    state = reader.state
    theirs, ours = flat(state.identity.complete.to_json()), flat(identity.to_json())
    # Cross-entropy has no name, and the checkpoint's loss may have one. Only the checkpoint may have a section.
    keys = (*ours, "loss", *(key for key in theirs if null_above(ours, key)))
    different = [key for key in keys if theirs.get(key) != ours.get(key)]
    changed = {key: f"{key}: checkpoint {theirs.get(key)!r}, this run {ours.get(key)!r}" for key in different}
    order, data = changed.pop(ORDER, ""), verify.changed(state.files, files)
    if data or (order and not changed.keys() & {"data.seq_length", "training.seed"}):
        saved = saved_config(reader.folder / "config.yaml")["data"]["train"]
        before, now = (_shown(DataSource.model_validate(each) for each in sources) for sources in (saved, train))
        why = f"checkpoint {before}, this run {now}, whose samples are others (the same files may be anywhere)"
        if before == now:
            why = f"{now} has changed since: {', '.join(data or [order])}"
        changed["data.train"] = f"data.train: {why}"
    if changed:
        fits = not init_from.differences(state.identity, identity)
        weights = f" (training.init_from={reader.folder} begins with these weights)" if fits else ""
        raise ConfigError(
            f"{reader.folder} was written by another run: {'; '.join(changed.values())}. "
            f"Restore these settings, or choose another training.run_dir{weights}"
        )
    if not (cfg.checkpoint.new_optimizer or same_optimizer(reader, cfg)):
        raise ConfigError(
            f"{reader.folder} has the moments of {_rules(_saved_optimizer(reader.folder))}, and "
            f"{_rules(cfg.optimizer)} of this run needs others: take the section optimizer from its config.yaml, or "
            "set checkpoint.new_optimizer: true to begin with new moments"
        )
    # Whole steps may end after training.total_tokens, so only the tokens before the last step tell a finished run.
    if state.tokens - last_step(state, cfg.data.seq_length) >= cfg.training.total_tokens:
        raise ConfigError(
            f"training.total_tokens {cfg.training.total_tokens:,}: the run in {cfg.training.run_dir} has already seen "
            f"{state.tokens:,} tokens ({folder.name}): nothing would be trained. Name more tokens to go on, or choose "
            "another training.run_dir for a shorter run (training.init_from can begin it with a checkpoint of this one)"
        )
    return reader


def _rules(cfg: OptimizerConfig) -> str:
    """Describe which moments an optimizer needs, by the keys that decide it."""
    left = cfg.muon.adamw_matrices if cfg.name == "muon" else []
    return f"optimizer.name {cfg.name}" + (f" with optimizer.muon.adamw_matrices [{', '.join(left)}]" if left else "")


def _saved_optimizer(folder: Location) -> OptimizerConfig:
    """Return the section optimizer of the run that wrote a checkpoint."""
    saved = saved_config(folder / "config.yaml")
    return OptimizerConfig.model_validate(_known(OptimizerConfig, saved["optimizer"]))


def announce(cfg: RunConfig, linear: LinearConfig, reader: Reader, say: Callable[[str], None]) -> list[str]:
    """Print where a run continues, and what has changed since its checkpoint. Return lines `key: old -> new` for the
    settings that have changed. `linear` has `auto` settled."""
    say(f"resumed from {reader.folder.name} ({reader.state.tokens:,} tokens seen)")
    if reader.world_size != dist.get_world_size():
        say(f"ranks: {reader.world_size} wrote that checkpoint, {dist.get_world_size()} go on with it"
            " (parallel.world_size makes a number that you do not mean an error)")  # fmt: skip
    lines = changed(cfg, reader.folder)
    if linear.keep_layers_below != cfg.linear.keep_layers_below:  # `auto` had chosen this value.
        lines = [line for line in lines if not line.startswith("linear.keep_layers_below:")]
    for line in lines:
        say(f"changed since that checkpoint: {line}")
    if last := last_step(reader.state, cfg.data.seq_length):
        if said := change_at_resume(cfg.tokens_per_step, reader.state.tokens, last):
            say(said)
        if jump := learning_rate_jump(cfg, reader.folder, reader.state.tokens, last):
            say("; ".join(jump))
    return lines


def changed(cfg: RunConfig, folder: Location) -> list[str]:
    """Return lines `key: old -> new` for the settings that differ from those that a checkpoint was written with. What a
    part of a run takes from its stages differs from part to part, and is in the schedule."""
    saved = saved_config(folder / "config.yaml")
    # Earlier versions wrote every key, so one that is gone has changed nothing unless it was set.
    gone = take_out(saved, values=False)
    lines = [f"{'.'.join(map(str, key.path))}: {value!r} -> None" for key, value in gone]
    differ = differences(flat(saved), flat(cfg.model_dump(mode="json")))
    lines += [f"{key}: {old!r} -> {new!r}" for key, (old, new) in sorted(differ.items())]
    return [line for line in lines if not (lengths_of(cfg) and line.startswith(tuple(KEYS_OF_STAGES)))]


def last_step(state: RunState, seq_length: int) -> int:
    """Return the tokens of the last step before a checkpoint; 0 if there was none. `seq_length` is for a checkpoint
    that says nothing of it."""
    return state.ledger.last_tokens(state.identity.seq_length or seq_length) if state.ledger else 0


def parts_of(state: RunState, cfg: RunConfig) -> tuple[int, int]:
    """Return the number of the part of a run that wrote a checkpoint, and of the part that continues from it."""
    wrote = part_at(cfg, state.tokens - last_step(state, cfg.data.seq_length))
    return wrote, wrote if state.tokens >= cfg.training.total_tokens else part_at(cfg, state.tokens)


def learning_rate_jump(cfg: RunConfig, folder: Location, tokens: int, last: int) -> tuple[str, str] | None:
    """Describe how far the learning rate jumps if a run continues with another schedule, and what to do about it. The
    checkpoint has seen `tokens` tokens, `last` of them in its last step. Return the description and the fix; None if
    the schedule gives the last step the learning rate that it had."""
    total = cfg.training.total_tokens
    if not last or tokens >= total:
        return None
    saved = saved_config(folder / "config.yaml")
    peak = _saved_optimizer(folder)
    curve = LrScheduleConfig.model_validate(_known(LrScheduleConfig, saved["lr_schedule"]))
    was = saved["training"]["total_tokens"]
    before = learning_rate(peak, curve, tokens - last, last, was)
    again = learning_rate(cfg.optimizer, cfg.lr_schedule, tokens - last, last, total)
    if math.isclose(before, again, rel_tol=1e-6):
        return None
    now = learning_rate(cfg.optimizer, cfg.lr_schedule, tokens, tokens_per_step(cfg.tokens_per_step, tokens), total)
    times = f", {now / before:.3g} times as much" if before else ""
    length = f": the run was to end at {was:,} tokens and now ends at {total:,}" if was != total else ""
    return (
        f"the learning rate goes from {before:.3g} in the checkpoint's last step to {now:.3g} in the next one{times}; "
        f"lr_schedule.shape {cfg.lr_schedule.shape} follows the settings of this run{length}",
        "leave them as they were, or begin a phase with a warm-up of its own (training.init_from) instead of going on",
    )


def _known(section: type[Section], saved: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a saved section that this version knows."""
    return {key: value for key, value in saved.items() if key in section.model_fields}


def _shown(sources: Iterable[DataSource]) -> str:
    """Return data.train on one line."""
    return ", ".join(each.path if each.weight == 1 else f"{each.path} (weight {each.weight})" for each in sources)


def restore(reader: Reader, engine: Engine, order: str, cfg: RunConfig) -> TrainState:
    """Load a checkpoint of this run into the engine and the random generators. Return the position of the run. Raises
    CheckpointError if the checkpoint's ledger is not that of a run.

    Args:
        order: the fingerprint of the order of samples.
        cfg: the configuration of the run. If training.perturb has changed since the checkpoint, the weights get
            another rounding. The moments of another optimizer are not loaded.
    """
    state = reader.state
    written, length, sequences = state.identity, cfg.data.seq_length, state.sequences
    begins = bool(lengths_of(cfg)) and written.seq_length != length  # This part of the run begins here.
    order_then = order if not begins or written.order is None else written.order
    ledger = Ledger.verified(state.ledger, order_then, reader.folder, written.seq_length)
    if begins:
        sequences, rest = divmod(state.tokens, length)
        if rest:
            raise ConfigError(
                f"{reader.folder}: {state.tokens:,} tokens are no multiple of {length:,}, the seq_length of the stage "
                "of tokens_per_step that begins here; give it one that divides them"
            )
        ledger.begin_part(EndedPart(state.step, written.seq_length, order_then), order, length)
    same, perturbed = same_optimizer(reader, cfg), cfg.training.perturb
    reading.load_engine(reader, engine, state.optimizer_steps if same else 0, moments=same)
    rng = reader.rng(dist.get_rank())
    if rng is not None:
        set_rng_state(rng)
    if perturbed:
        before = saved_config(reader.folder / "config.yaml")["training"]
        perturb(engine, perturbed if perturbed != before.get("perturb") else 0)
    return TrainState(state.step, state.tokens, sequences, ledger, state.controllers)
