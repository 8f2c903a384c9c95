"""A run that starts with the weights of another: what must fit, and what it takes over. The other one is only read."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from sagetrain.checkpoint import on_disk, reading
from sagetrain.checkpoint.reading import Reader
from sagetrain.config.errors import CheckpointError, ConfigError
from sagetrain.config.load import flat
from sagetrain.config.rules.data import CHAT_TEMPLATE, TEXT_PREFIX
from sagetrain.config.schema import TrainingConfig
from sagetrain.data.token_file import write_atomic
from sagetrain.engines.deepspeed import Engine

RECORD = "init_from.json"
"""What a run folder calls the record of the checkpoint that its run began with."""
IMPORTED_TOKENS = "imported tokens"
"""Key of it: the generation settings, special token ids among them, of the folder that the weights came from."""
_POSITIONS = "positions"
"""Key of it: the sequence length that the model was made for before, and the RoPE that it had then."""
_SHA256 = "manifest (SHA-256)"
# What of a model may differ in a new phase: how far its positions reach, and what drew weights that are replaced. Its
# vocabulary is compared by itself: a model section may leave it to the tokenizer.
_FREE = ("rope_theta", "rope_scaling", "init_std", "vocab_size")


def check(root: Path, training: TrainingConfig, identity: Mapping[str, Any]) -> None:
    """See that a run can start, before any rank waits for another. A run that has checkpoints of its own, in `root`,
    goes on from these: what it began with is not looked at again, and may be gone.

    Args:
        identity: of the run, by setting (train/inputs.py).

    Raises:
        ConfigError: training.init_from is no run and no checkpoint, or is one of another model, vocabulary or
            tokenizer, or has no moments where they are wanted; or training.run_dir is an imported folder itself.
    """
    if own := on_disk.newest(root):
        with contextlib.suppress(CheckpointError):  # damaged: another one may be whole
            if "imported" in on_disk.read_manifest(own)["state"]:
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
        state = on_disk.read_manifest(folder)["state"]
    except CheckpointError as error:
        raise ConfigError(f"training.init_from {path}: {error}; name another checkpoint") from error
    if training.init_moments and "imported" in state:
        raise ConfigError(
            f"training.init_moments: {folder} was imported and has weights alone; set training.init_moments: false"
        )
    if found := differences(state["identity"], identity):
        raise ConfigError(
            f"training.init_from {path} does not fit this run: {'; '.join(found)}. Take model and "
            f"attention.qk_norm from {folder / 'config.yaml'}, and data.tokenizer and data made with it from that run"
        )


def named(path: Path) -> Path | None:
    """The checkpoint that training.init_from means: itself, or the newest of a run; None: there is none."""
    return path if (path / "manifest.json").is_file() else on_disk.newest(path / "checkpoints")


def is_recorded(folder: Path, record: Mapping[str, Any]) -> bool:
    """Whether a checkpoint is the one of a record, wherever it lies."""
    manifest = folder / "manifest.json"
    return manifest.is_file() and on_disk.sha256(manifest) == record[_SHA256]


def recorded(run_dir: Path, init_from: str) -> Path:
    """The checkpoint that a run began with, where it was or where init_from finds it. CheckpointError if it is gone."""
    path = run_dir / RECORD
    try:
        record = json.loads(path.read_text())
        for folder in (began := Path(record["checkpoint"]), named(Path(init_from))):
            if folder and is_recorded(folder, record):
                return folder
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} does not say what the run began with ({error})") from error
    raise CheckpointError(f"{path}: the weights that the run began with, {began}, are gone")


def generation_settings(state: Mapping[str, Any]) -> dict[str, Any]:
    """The generation_config.json, special token ids among it, of the folder that a checkpoint's weights come from, by
    whatever runs; or nothing."""
    before = state.get("imported", {}).get("tokens") or (state.get("init_from") or {}).get(IMPORTED_TOKENS)
    return dict(before or {})


def end_tokens(state: Mapping[str, Any]) -> list[int]:
    """Tokens that end a text beside the tokenizer's own: those that imported weights, by whatever runs, came with."""
    given = generation_settings(state).get("eos_token_id")
    return [] if given is None else [given] if isinstance(given, int) else [*given]


def text_prefix(state: Mapping[str, Any]) -> list[int]:
    """Return the tokens before a text that is scored or continued, as a checkpoint records them."""
    for record in (state, state.get("init_from") or {}):
        if (prefix := record.get(TEXT_PREFIX)) is not None:
            return list(prefix)
    return []


def chat_template(state: Mapping[str, Any]) -> Any:
    """The template of the chats that a checkpoint's weights learned last, in whatever run, or templates by name as
    tokenizer_config.json has them; None if there were no chats."""
    return state.get(CHAT_TEMPLATE) or (state.get("init_from") or {}).get(CHAT_TEMPLATE)


def positions(state: Mapping[str, Any]) -> int:
    """The longest sequence that a checkpoint's model is made for, 0 if it is not recorded: a run on shorter sequences
    than those of the run that it began with takes nothing away, as long as it keeps the RoPE."""
    own: int = state.get("identity", {}).get("data.seq_length", 0)
    before = (state.get("init_from") or {}).get(_POSITIONS)
    return max(own, before["length"]) if before and before["rope"] == _rope(state) else own


def _rope(state: Mapping[str, Any]) -> dict[str, Any]:
    model = state.get("identity", {}).get("model", {})
    return {key: model.get(key) for key in ("rope_theta", "rope_scaling")}


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Why a run cannot begin with the weights of a checkpoint, by what both are known by."""
    before, now = flat(theirs["model"]), flat(ours["model"])
    keys = [key for key in now if key in before and key.partition(".")[0] not in _FREE]
    found = [f"model.{key}: {before[key]!r} there, {now[key]!r} here" for key in keys if before[key] != now[key]]
    for key in ("attention.qk_norm", "vocab_size"):
        if key in ours and theirs[key] != ours[key]:
            found.append(f"{key}: {theirs[key]!r} there, {ours[key]!r} here")
    key = "tokenizer (SHA-256)"
    if theirs[key] and ours[key] and theirs[key] != ours[key]:
        found.append(f"tokenizer: {theirs[key][:12]} there, {ours[key][:12]} here (SHA-256)")
    return found


def start_from(
    training: TrainingConfig, engine: Engine, folder: Path, say: Callable[[str], None]
) -> dict[str, Any] | None:
    """Give the engine the weights, and if wanted the Adam moments, of training.init_from; collective.

    Returns the record of what it was, which also goes to the run folder `folder`; None without training.init_from.

    Raises:
        CheckpointError: its files are not whole, or it is of another shape.
    """
    if training.init_from is None:
        return None
    source = on_disk.whole(Path(training.init_from), say, moments=training.init_moments)
    reader = Reader(source)
    state = reader.manifest["state"]
    steps = state["optimizer_steps"] if training.init_moments else 0
    reading.load_engine(reader, engine, steps, moments=training.init_moments)
    record = {
        "checkpoint": str(source.absolute()),
        _SHA256: on_disk.sha256(source / "manifest.json"),
        "step": state["step"],
        "tokens": state["tokens"],
        "optimizer_steps": steps,
        IMPORTED_TOKENS: generation_settings(state),
        TEXT_PREFIX: state.get(TEXT_PREFIX),
        CHAT_TEMPLATE: chat_template(state),
        _POSITIONS: {"length": positions(state), "rope": _rope(state)},
    }
    if dist.get_rank() == 0:
        write_atomic(folder / RECORD, (json.dumps(record, indent=2) + "\n").encode())
    what = "weights and moments" if training.init_moments else "weights"
    say(f"{what} of {source} ({state['tokens']:,} tokens seen); this run counts its own from 0")
    return record
