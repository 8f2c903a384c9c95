"""Continuing a run: whether a checkpoint is one of this run, and everything that it restores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
import yaml

from sagetrain.config.errors import ConfigError
from sagetrain.config.load import flat
from sagetrain.config.schema import DataSource
from sagetrain.data import verify
from sagetrain.parallel.rng import set_rng_state
from sagetrain.train import checkpoint
from sagetrain.train.checkpoint import Reader
from sagetrain.train.engine import Engine
from sagetrain.train.ledger import Ledger, TrainState
from sagetrain.train.origin import differences

ORDER = "order of samples (hash of token files, weights, seq_length and seed)"
"""Key of the loader's fingerprint in what a run is known by."""


def check(reader: Reader, identity: dict[str, Any], files: dict[str, str], train: Sequence[DataSource]) -> None:
    """ConfigError if a checkpoint was written by another run; on all ranks, which have the same arguments.

    Args:
        identity: what a checkpoint must share with the run that continues it, by setting.
        files: hashes of this host's data, by name.
        train: data.train, which says more to people than the hashes.
    """
    state = reader.manifest["state"]
    theirs, ours = flat(state["identity"]), flat(identity)
    changed = {k: f"{k}: checkpoint {theirs.get(k)!r}, this run {ours[k]!r}" for k in ours if theirs.get(k) != ours[k]}
    order, data = changed.pop(ORDER, ""), verify.changed(state.get("files", {}), files)
    if data or (order and not changed.keys() & {"data.seq_length", "training.seed"}):
        saved = yaml.safe_load((reader.folder / "config.yaml").read_text())["data"]["train"]
        before, now = (_shown(DataSource.model_validate(each) for each in sources) for sources in (saved, train))
        why = f"checkpoint {before}, this run {now}"
        if before == now:
            why = f"{now} has changed since: {', '.join(data or [order])}"
        changed["data.train"] = f"data.train: {why}"
    if changed:
        fits = not differences(state["identity"], identity)
        weights = f" (training.init_from={reader.folder} begins with these weights)" if fits else ""
        raise ConfigError(
            f"{reader.folder} was written by another run: {'; '.join(changed.values())}. "
            f"Restore these settings, or choose another training.run_dir{weights}"
        )


def _shown(sources: Iterable[DataSource]) -> str:
    """data.train on one line."""
    return ", ".join(each.path if each.weight == 1 else f"{each.path} (weight {each.weight})" for each in sources)


def restore(reader: Reader, engine: Engine, order: str) -> TrainState:
    """Load a whole checkpoint of this run into the engine and the random generators; returns where the run stood.

    order: fingerprint of the order of samples.

    Raises:
        CheckpointError: its ledger is not that of a run.
    """
    state, folder = reader.manifest["state"], reader.folder
    ledger = Ledger.verified(state.get("ledger"), order, state["step"], state["sequences"], folder)
    checkpoint.load_engine(reader, engine, state["optimizer_steps"])
    rng = reader.rng(dist.get_rank())
    if rng is not None:
        set_rng_state(rng)
    return TrainState(state["step"], state["tokens"], state["sequences"], ledger, state.get("controllers", {}))
