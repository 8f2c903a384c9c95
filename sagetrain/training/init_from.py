"""Start a run with the weights of another: check that they fit, and take them over. The other run is only read."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from sagetrain.checkpoint import on_disk, reading
from sagetrain.checkpoint.reading import Reader
from sagetrain.checkpoint.state import Identity, InitFromRecord
from sagetrain.config.errors import CheckpointError, ConfigError
from sagetrain.config.load import flat, null_above
from sagetrain.config.schema import RunConfig, TrainingConfig
from sagetrain.data.token_file import write_atomic
from sagetrain.engines.step import Engine
from sagetrain.model.tensors import tensors
from sagetrain.optim.build import kinds_of
from sagetrain.storage.url_path import Location, checkpoints_of, location

RECORD = "init_from.json"
"""The name, in a run folder, of the record of the checkpoint that its run began with."""
# These keys of a model may differ in a new phase: how far its positions reach, and how weights were drawn, because they
# are replaced. The vocabulary is compared separately, because a model section may leave it to the tokenizer.
_FREE = ("rope_theta", "rope_scaling", "init_std", "vocab_size")


def check(cfg: RunConfig, identity: Identity) -> None:
    """Check that a run can start, before any rank waits for another. A run that has checkpoints of its own continues
    from them. The checkpoint that it began with is then not checked again, and may be gone. Raises ConfigError if
    training.init_from is no run and no checkpoint, or it has another model, vocabulary or tokenizer, or it has no
    moments, or those of another optimizer, although they are wanted. It is also raised if training.run_dir itself is an
    imported folder. `identity` has the settings that identify the checkpoints of the run."""
    training = cfg.training
    if own := on_disk.newest(checkpoints_of(training.run_dir, training.run_url)):
        # The checkpoint is damaged, but another one may be undamaged.
        with contextlib.suppress(CheckpointError):
            if on_disk.read_state(own).imported:
                raise ConfigError(
                    f"training.run_dir {training.run_dir} holds an imported model, which is no run that could go on: "
                    f"give the run a folder of its own, with training.init_from: {training.run_dir}"
                )
        return
    if training.init_from is None:
        return
    path = location(training.init_from)
    folder = named(path)
    if folder is None:
        raise ConfigError(f"training.init_from {path}: is no checkpoint, and no run folder that has one")
    try:
        reader = Reader(folder)
        state = reader.state
    except CheckpointError as error:
        raise ConfigError(f"training.init_from {path}: {error}; name another checkpoint") from error
    if training.init_moments and state.imported:
        raise ConfigError(
            f"training.init_moments: {folder} was imported and has weights alone; set training.init_moments: false"
        )
    if found := differences(state.identity, identity):
        raise ConfigError(
            f"training.init_from {path} does not fit this run: {'; '.join(found)}. Take model and "
            f"attention.qk_norm from {folder / 'config.yaml'}, and data.tokenizer and data made with it from that run"
        )
    if training.init_moments and not same_optimizer(reader, cfg):
        raise ConfigError(
            f"training.init_moments: {folder} has no moments for optimizer.name {cfg.optimizer.name}; take the section "
            f"optimizer from {folder / 'config.yaml'}, or set training.init_moments: false"
        )


def same_optimizer(reader: Reader, cfg: RunConfig) -> bool:
    """Whether a checkpoint of the configured model has the state that the run's optimizer needs."""
    specs = tensors(cfg.model, cfg.attention, reader.state.identity.vocab_size)
    return all(reader.kinds(spec.name)[1:] == kinds_of(spec, cfg) for spec in specs)


def named(path: Location) -> Location | None:
    """Return the checkpoint that training.init_from names: the path itself, or the newest one of a run. Return None if
    there is none."""
    return path if (path / "manifest.json").is_file() else on_disk.newest(path / "checkpoints")


def is_recorded(folder: Location, record: InitFromRecord) -> bool:
    """Whether a checkpoint is the one of a record, whatever folder it is in."""
    manifest = folder / "manifest.json"
    return manifest.is_file() and on_disk.sha256(manifest) == record.manifest_sha256


def differences(theirs: Identity, ours: Identity) -> list[str]:
    """Return the reasons why a run cannot begin with the weights of a checkpoint, from the identities of both."""
    before, now = flat(theirs.complete.model), flat(ours.model)
    keys = [key for key in now if key in before or null_above(before, key)]
    keys += [key for key in before if null_above(now, key)]
    found = [
        f"model.{key}: {before.get(key)!r} there, {now.get(key)!r} here"
        for key in keys
        if key.partition(".")[0] not in _FREE and before.get(key) != now.get(key)
    ]
    if theirs.qk_norm != ours.qk_norm:
        found.append(f"attention.qk_norm: {theirs.qk_norm!r} there, {ours.qk_norm!r} here")
    if ours.vocab_size and theirs.vocab_size != ours.vocab_size:
        found.append(f"vocab_size: {theirs.vocab_size!r} there, {ours.vocab_size!r} here")
    there, here = theirs.tokenizer_sha256, ours.tokenizer_sha256
    if there and here and there != here:
        found.append(f"tokenizer: {there[:12]} there, {here[:12]} here (SHA-256)")
    return found


def start_from(
    training: TrainingConfig, engine: Engine, folder: Path, say: Callable[[str], None]
) -> InitFromRecord | None:
    """Load the weights, and if wanted the Adam moments, of training.init_from into the engine, and write the record of
    its checkpoint to the run folder; collective. Return the record; None without training.init_from. Raises
    CheckpointError if the checkpoint is damaged, or has other shapes."""
    if training.init_from is None:
        return None
    source = on_disk.whole(location(training.init_from), say, moments=training.init_moments)
    reader = Reader(source)
    state = reader.state
    steps = state.optimizer_steps if training.init_moments else 0
    reading.load_engine(reader, engine, steps, moments=training.init_moments)
    record = InitFromRecord(
        checkpoint=str(source.absolute()),
        manifest_sha256=on_disk.sha256(source / "manifest.json"),
        step=state.step,
        tokens=state.tokens,
        optimizer_steps=steps,
        generation=state.generation,
        text_prefix=state.text_prefix,
        chat_template=state.texts.chat_template,
        positions=state.positions,
    )
    if dist.get_rank() == 0:
        write_atomic(folder / RECORD, (json.dumps(record.to_json(), indent=2) + "\n").encode())
    what = "weights and moments" if training.init_moments else "weights"
    say(f"{what} of {source} ({state.tokens:,} tokens seen); this run counts its own from 0")
    return record
