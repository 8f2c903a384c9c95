"""Explain an out-of-memory error of a GPU, and keep a snapshot of its memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from sagetrain.config.arithmetic import padded_vocab_size
from sagetrain.config.errors import TrainingError
from sagetrain.config.layout import Layout
from sagetrain.config.schema import RunConfig
from sagetrain.costs.accounting import total_bytes
from sagetrain.costs.memory import memory_per_rank
from sagetrain.parallel.objects import rank_and_world_size

OUT_OF_MEMORY = "is out of GPU memory"
"""The words that are in the error of a run whose GPU is full, and in no other error."""
ENTRIES = 50_000
"""The number of the allocator's latest events that are kept, which covers some micro-steps. They take up to 50 MB of
host memory."""


def record_allocations(device: torch.device) -> None:
    """Record what a GPU's allocator does from now on, and the Python lines that ask for memory. A snapshot contains
    both.

    A line costs half a microsecond on a CPU (40 frames deep). The cost on a GPU is not measured, so a run records only
    if it is profiled.
    """
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(enabled="all", context="alloc", stacks="python", max_entries=ENTRIES)


@contextmanager
def memory_explained(cfg: RunConfig, vocab_size: int) -> Iterator[None]:
    """Turn a GPU's out-of-memory error into an error that says what `plan` predicts for the configuration, and which
    keys of it help. Leave a snapshot of the allocator in the run folder: memory/rank-<rank>.pickle, for
    pytorch.org/memory_viz. The snapshot contains what `record_allocations` has recorded. Raises TrainingError if the
    GPU is out of memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        rank, world_size = rank_and_world_size()
        path = Path(cfg.training.run_dir, "memory", f"rank-{rank}.pickle")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            torch.cuda.memory._dump_snapshot(str(path))
            kept = f"who holds how much, with `profile` set also by which line, is in {path} (pytorch.org/memory_viz)"
        except (OSError, RuntimeError) as failed:
            kept = f"no snapshot of the memory could be written ({failed})"
        predicted = total_bytes(memory_per_rank(cfg, world_size, padded_vocab_size(vocab_size)))
        ways: dict[str, object] = {
            "data.micro_batch_size": cfg.data.micro_batch_size,
            "training.activation_checkpointing": cfg.training.activation_checkpointing,
            "parallel.zero_stage": Layout.of(cfg).zero_stage,
            "parallel.tensor_parallel_size": cfg.parallel.tensor_parallel_size,
        }
        if cfg.parallel.expert_parallel_size > 1:
            ways["parallel.expert_room"] = f"{cfg.parallel.expert_room:g}, doubled after each event named room"
        keys = ", ".join(f"{key} (now {value})" for key, value in ways.items())
        raise TrainingError(
            f"rank {rank} {OUT_OF_MEMORY}: {str(error).splitlines()[0]} `sagetrain plan` predicts "
            f"{predicted / 2**30:.1f} GiB for a rank of this layout; what it takes is up to {keys}; {kept}. "
            "The newest checkpoint is untouched"
        ) from error
