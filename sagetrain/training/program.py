"""Train a run inside of a program, which goes on behind it and may train further runs."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from sagetrain.cluster import preflight
from sagetrain.cluster.guard import StopSignal, alone
from sagetrain.cluster.join import end_distributed
from sagetrain.cluster.launcher import launched
from sagetrain.config.check import accepted, check
from sagetrain.config.errors import ConfigError, Finding, at_start
from sagetrain.config.load import load_config
from sagetrain.config.rules.layout import whole_sequences
from sagetrain.config.schema import RunConfig
from sagetrain.data.function import SampleFunction
from sagetrain.data.remote_blocks import fetch_sources
from sagetrain.data.tokenizer import known_vocab_size
from sagetrain.parallel.cross_entropy import OwnLoss, is_by_sequence
from sagetrain.training.build_run import build
from sagetrain.training.callbacks import Callback, Latest, Position
from sagetrain.training.loss import name_of, try_out
from sagetrain.training.part_by_part import train_parts
from sagetrain.training.trainer import Trainer

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""The environment variables that a run without a launcher sets itself."""


def _accepted(
    config: RunConfig | str | Path,
    texts: list[str],
    world_size: int,
    loss: OwnLoss | None,
    tokens: SampleFunction | None,
) -> tuple[RunConfig, list[Finding], list[str]]:
    """Return the configuration of a run that may begin, what was found in it, and the lines that say so. Raises
    ConfigError."""
    path = None if isinstance(config, RunConfig) else config
    cfg = config if isinstance(config, RunConfig) else load_config(config, texts)
    fetch_sources(cfg.data)
    if cfg.training.restarts:
        raise ConfigError(
            f"training.restarts {cfg.training.restarts}: only the command `sagetrain train` can begin again by itself, "
            "because its process becomes a keeper that forks the ranks; set training.restarts=0 here"
        )
    vocab_size, given = known_vocab_size(cfg.data), tokens is not None
    if given and not callable(tokens):
        raise ConfigError(f"tokens: {tokens!r} cannot be called; give a function of the index of a sequence")
    others = whole_sequences(cfg) if is_by_sequence(loss) else ()
    found = check(cfg, world_size, vocab_size=vocab_size, path=path, overrides=texts, others=others, tokens_given=given)
    findings = accepted(found)
    lines = at_start(findings)
    if loss is not None:
        try_out(loss, cfg.model.vocab_size or vocab_size or 0, cfg.data.micro_batch_size)
        lines.append(f"loss: {name_of(loss)}")
    return cfg, findings, lines


def train_here(
    config: RunConfig | str | Path,
    texts: list[str],
    looks_of: Callable[[RunConfig], tuple[Any, Any]],
    callbacks: Sequence[Callback],
    *,
    loss: OwnLoss | None,
    tokens: SampleFunction | None,
    say: Callable[[str], None],
    own_process: bool,
) -> tuple[Path, Position, bool, dict[str, float]]:
    """Train a run, and leave the process as it was. Return the run's folder, where the run stands, whether that is its
    end, and the newest value of each number.

    Args:
        config: see sagetrain.train, as are the arguments that have its names.
        texts: overrides as the command line has them.
        looks_of: returns what looks at the model while it trains (interop/looks.py).
    """
    if wrong := [each for each in callbacks if not isinstance(each, Callback)]:
        raise ConfigError(f"callbacks: {wrong[0]!r} is no sagetrain.Callback; derive its class from that, and make one")
    rank, world_size = launched()
    try:
        cfg, findings, lines = _accepted(config, texts, world_size, loss, tokens)
        for line in lines if rank == 0 else ():
            say(line)
        gc.collect()  # The traceback of an error has kept the run of an earlier call until now.
        latest = Latest()

        def trainer_of(stop: StopSignal | None) -> Trainer:
            run = build(cfg, own_process=own_process, hears=say, tokens=tokens, loss=loss, stop=stop)
            return Trainer(run, findings, *looks, [*callbacks, latest])

        with alone(own_process), _process_group_of_its_own():
            looks = looks_of(cfg)  # It may refuse the tasks, so it comes before ranks wait for each other.
            trainer, finished = train_parts(trainer_of)
            metrics, position = latest.everywhere(), trainer.position
        del trainer
        gc.collect()  # The parts of a run refer to each other, and the caller may need their memory.
        return Path(cfg.training.run_dir), position, finished, metrics
    except ConfigError as error:
        if own_process and world_size > 1:
            preflight.stay_out(error)
        raise


@contextmanager
def _process_group_of_its_own() -> Iterator[None]:
    """Leave a process group that this process has joined meanwhile, alone, and the variables that name it."""
    joined, hook = dist.is_initialized(), sys.excepthook
    variables = {name: os.environ.get(name) for name in _VARIABLES}
    try:
        yield
    finally:
        if not joined and dist.is_initialized() and dist.get_world_size() == 1:
            end_distributed()
            sys.excepthook = hook  # torch has put its own before it, which names the rank.
            for name, value in variables.items():
                if value is None:
                    os.environ.pop(name, None)
