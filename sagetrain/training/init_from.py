"""A run that starts with the weights of another: what must fit, and what it takes over. The other one is only read."""

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
from sagetrain.config.load import flat
from sagetrain.config.schema import TrainingConfig
from sagetrain.data.token_file import write_atomic
from sagetrain.engines.protocol import Engine

RECORD = "init_from.json"
"""What a run folder calls the record of the checkpoint that its run began with."""
# What of a model may differ in a new phase: how far its positions reach, and what drew weights that are replaced. Its
# vocabulary is compared by itself: a model section may leave it to the tokenizer.
_FREE = ("rope_theta", "rope_scaling", "init_std", "vocab_size")


def check(root: Path, training: TrainingConfig, identity: Identity) -> None:
    """See that a run can start, before any rank waits for another. A run that has checkpoints of its own, in `root`,
    goes on from these: what it began with is not looked at again, and may be gone.

    Args:
        identity: what the checkpoints of the run are known by.

    Raises:
        ConfigError: training.init_from is no run and no checkpoint, or is one of another model, vocabulary or
            tokenizer, or has no moments where they are wanted; or training.run_dir is an imported folder itself.
    """
    if own := on_disk.newest(root):
        with contextlib.suppress(CheckpointError):  # damaged: another one may be whole
            if on_disk.read_state(own).imported:
                raise ConfigError(
                    f"training.run_dir {training.run_dir} holds an imported model, which is no run that could go on: "
                    f"give the run a folder of its own, with training.init_from: {training.run_dir}"
                )
        return
    if training.init_from is None:
        return
    path = Path(training.init_from)
    folder = named(path)
    if folder is None:
        raise ConfigError(f"training.init_from {path}: is no checkpoint, and no run folder that has one")
    try:
        state = on_disk.read_state(folder)
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


def named(path: Path) -> Path | None:
    """The checkpoint that training.init_from means: itself, or the newest of a run; None: there is none."""
    return path if (path / "manifest.json").is_file() else on_disk.newest(path / "checkpoints")


def is_recorded(folder: Path, record: InitFromRecord) -> bool:
    """Whether a checkpoint is the one of a record, wherever it lies."""
    manifest = folder / "manifest.json"
    return manifest.is_file() and on_disk.sha256(manifest) == record.manifest_sha256


def recorded(run_dir: Path, init_from: str) -> Path:
    """The checkpoint that a run began with, where it was or where init_from finds it. CheckpointError if it is gone."""
    path = run_dir / RECORD
    try:
        record = InitFromRecord.from_json(json.loads(path.read_text()), path)
        for folder in (Path(record.checkpoint), named(Path(init_from))):
            if folder and is_recorded(folder, record):
                return folder
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} does not say what the run began with ({error})") from error
    raise CheckpointError(f"{path}: the weights that the run began with, {record.checkpoint}, are gone")


def differences(theirs: Identity, ours: Identity) -> list[str]:
    """Why a run cannot begin with the weights of a checkpoint, by what both are known by."""
    before, now = flat(theirs.model), flat(ours.model)
    keys = [key for key in now if key in before and key.partition(".")[0] not in _FREE]
    found = [f"model.{key}: {before[key]!r} there, {now[key]!r} here" for key in keys if before[key] != now[key]]
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
    """Give the engine the weights, and if wanted the Adam moments, of training.init_from; collective.

    Returns the record of what it was, which also goes to the run folder `folder`; None without training.init_from.

    Raises:
        CheckpointError: its files are not whole, or it is of another shape.
    """
    if training.init_from is None:
        return None
    source = on_disk.whole(Path(training.init_from), say, moments=training.init_moments)
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
