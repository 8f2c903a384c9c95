"""A run's checkpoint as a model, in one process, on a GPU or without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from sagetrain.config.arithmetic import padded_vocab_size
from sagetrain.config.load import load_config
from sagetrain.config.schema import RunConfig, tokenizer_in
from sagetrain.data.tokenizer import Tokenizer, find_tokenizer
from sagetrain.model.selection import resolve_backend
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.topology import ParallelGroups
from sagetrain.train import checkpoint
from sagetrain.train.attention import kept
from sagetrain.train.checkpoint import CheckpointError, Reader


@dataclass
class TrainedRun:
    """A model with the weights of a checkpoint, and what it was trained with."""

    cfg: RunConfig
    model: Transformer
    tokenizer: Tokenizer | None
    """None: it was trained on token files from elsewhere, with the size of their vocabulary alone."""
    vocab_size: int
    step: int
    tokens: int
    device: torch.device


@dataclass(frozen=True)
class OpenRun:
    """A checkpoint of a run, and what it was trained with; no tensor has been read."""

    cfg: RunConfig
    reader: Reader
    tokenizer: Tokenizer | None
    """None: it was trained on token files from elsewhere, with the size of their vocabulary alone."""
    vocab_size: int
    step: int
    tokens: int


def open_run(run_dir: Path, report: Callable[[str], None], step: int | None = None) -> OpenRun:
    """The checkpoint of a step of a run, or its newest whole one. `report` hears what was passed over.

    Raises CheckpointError if there is none, or the run's tokenizer is not the one it was trained with.
    """
    if step is None:
        folder, _ = checkpoint.newest_whole(run_dir / "checkpoints", report)
    else:
        folder = checkpoint.whole_at(run_dir / "checkpoints", step)
    if folder is None:
        raise CheckpointError(f"{run_dir} has no checkpoint; train it first: sagetrain train --config ...")
    reader = Reader(folder)
    state = reader.manifest["state"]
    cfg = load_config(folder / "config.yaml")
    trained_with = state["identity"]["tokenizer (SHA-256)"]
    file = tokenizer_in(run_dir)  # kept there by training
    if trained_with and not file.is_file():
        file = find_tokenizer(cfg.data)
    tokenizer = Tokenizer.load(file) if trained_with or file.is_file() else None
    if trained_with and tokenizer and tokenizer.sha256 != trained_with:
        raise CheckpointError(
            f"{folder} was trained with another tokenizer (SHA-256 {trained_with[:12]}) than {file} "
            f"({tokenizer.sha256[:12]}); put that file back"
        )
    return OpenRun(cfg, reader, tokenizer, state["identity"]["vocab_size"], state["step"], state["tokens"])


def load_run(run_dir: Path, report: Callable[[str], None], step: int | None = None) -> TrainedRun:
    """The checkpoint of `open_run` as a model. `report` hears what was passed over, and what runs otherwise here."""
    run = open_run(run_dir, report, step)
    cfg, device, groups = run.cfg, torch.device("cuda" if torch.cuda.is_available() else "cpu"), ParallelGroups.single()
    trained = kept(cfg.attention, run.reader.folder)
    dtype = torch.bfloat16 if device.type == "cuda" and cfg.training.dtype == "bf16" else torch.float32
    try:
        backend, _ = resolve_backend(trained, cfg.model, device=device, dtype=dtype)
    except ValueError as error:  # trained on other hardware
        report(f"{error}; sdpa is used here")
        backend = "sdpa"
    if backend == "auto":  # not recorded by the version that trained it
        backend = "sdpa"
    attention = trained.model_copy(update={"backend": backend})
    model = Transformer(
        cfg.model,
        attention,
        vocab_size=padded_vocab_size(run.vocab_size),
        groups=groups,
        seed=cfg.training.seed,
        dtype=dtype,
        device=device,
    )
    checkpoint.load_weights(run.reader, model, groups)
    model.eval()
    return TrainedRun(cfg, model, run.tokenizer, run.vocab_size, run.step, run.tokens, device)
