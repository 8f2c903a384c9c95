"""What is said, and kept, when a GPU's memory is too small."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from sagetrain.config.arithmetic import padded_vocab_size, resolved_zero_stage
from sagetrain.config.errors import TrainingError
from sagetrain.config.schema import RunConfig
from sagetrain.model.accounting import memory_per_rank, total_bytes

OUT_OF_MEMORY = "is out of GPU memory"
"""In the error of a run whose GPU is full, and in no other."""
ENTRIES = 50_000
"""Events of the allocator that are kept, the latest: of some micro-steps. They take up to 50 MB of host memory."""


def record_allocations(device: torch.device) -> None:
    """From now on take note of what a GPU's allocator does, and of the Python lines that ask for memory: a snapshot
    has both. A line costs half a microsecond on a CPU (40 frames deep); on a GPU it is not measured, so a run does it
    only where it is profiled."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(enabled="all", context="alloc", stacks="python", max_entries=ENTRIES)


@contextmanager
def explained(run_dir: Path, rank: int, predicted: Callable[[], float], ways: Mapping[str, object]) -> Iterator[None]:
    """Make of a GPU's out-of-memory an error that says what helps, and leave a snapshot of the allocator in the run
    folder (rank-<rank>.pickle of memory/, for pytorch.org/memory_viz), with what `record_allocations` took note of.

    Args:
        predicted: bytes of a rank, as planned (model.accounting.memory_per_rank) for what is settled by then.
        ways: keys of the YAML that change it, with their values.

    Raises:
        TrainingError: memory is out.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        path = run_dir / "memory" / f"rank-{rank}.pickle"
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            torch.cuda.memory._dump_snapshot(str(path))
            kept = f"who holds how much, with `profile` set also by which line, is in {path} (pytorch.org/memory_viz)"
        except (OSError, RuntimeError) as failed:
            kept = f"no snapshot of the memory could be written ({failed})"
        keys = ", ".join(f"{key} (now {value})" for key, value in ways.items())
        raise TrainingError(
            f"rank {rank} {OUT_OF_MEMORY}: {str(error).splitlines()[0]} `sagetrain plan` predicts "
            f"{predicted() / 2**30:.1f} GiB for a rank of this layout; what it takes is up to {keys}; {kept}. "
            "The newest checkpoint is untouched"
        ) from error


def memory_explained(cfg: RunConfig, vocab_size: int) -> AbstractContextManager[None]:
    """Say what helps if a GPU's memory is out, with what `plan` predicts for a configuration."""

    def predicted() -> float:
        return total_bytes(memory_per_rank(cfg, dist.get_world_size(), padded_vocab_size(vocab_size)))

    ways = {
        "data.micro_batch_size": cfg.data.micro_batch_size,
        "training.activation_checkpointing": cfg.training.activation_checkpointing,
        "parallel.zero_stage": resolved_zero_stage(cfg),
        "parallel.tensor_parallel_size": cfg.parallel.tensor_parallel_size,
    }
    return explained(Path(cfg.training.run_dir), dist.get_rank(), predicted, ways)
