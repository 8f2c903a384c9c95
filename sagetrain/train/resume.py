"""Continuing a run: whether a checkpoint is one of this run, and everything that it restores."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from sagetrain.config.load import flat
from sagetrain.data import verify
from sagetrain.parallel.rng import set_rng_state
from sagetrain.train import checkpoint
from sagetrain.train.checkpoint import CheckpointError, Reader
from sagetrain.train.engine import Engine
from sagetrain.train.ledger import Ledger, TrainState


def check(reader: Reader, identity: dict[str, Any], files: dict[str, str]) -> None:
    """CheckpointError if a checkpoint was written by another run.

    Args:
        identity: what a checkpoint must share with the run that continues it, by setting.
        files: hashes of this host's data, by name.
    """
    state = reader.manifest["state"]
    theirs, ours = flat(state["identity"]), flat(identity)
    changed = [f"{k}: checkpoint {theirs.get(k)!r}, this run {ours[k]!r}" for k in ours if theirs.get(k) != ours[k]]
    changed += verify.changed(state.get("files", {}), files)
    if changed:
        raise CheckpointError(
            f"{reader.folder} was written by another run: {'; '.join(changed)}. "
            "Restore these settings, or choose another training.run_dir"
        )


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
