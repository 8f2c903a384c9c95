"""Train the parts of a run one after the other in one process (config/run_parts.py)."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

import torch

from sagekernels.graphs import forget as forget_recordings
from sagetrain.cluster.guard import StopSignal
from sagetrain.parallel import copies
from sagetrain.training.trainer import Trainer


def train_parts(trainer_of: Callable[[StopSignal | None], Trainer]) -> tuple[Trainer, bool]:
    """Train a run to its end, or until a signal. Return the trainer of its last part, and whether the run is finished.

    Args:
        trainer_of: builds the part that is next by the checkpoints. It gets the signals that the part before has
            listened to, so that none is lost between them.
    """
    stop = None
    while True:
        trainer = trainer_of(stop)
        try:
            finished = trainer.train()
        finally:
            # NCCL ends no group of processes while a recording may use it, and an error's traceback keeps the engine.
            forget_recordings()
        if not trainer.goes_on:
            return trainer, finished
        stop = trainer.run.met.stop
        del trainer
        _forget()


def _forget() -> None:
    """Drop what the part before has left in this process, so that the next one computes the bits that it would compute
    in a process of its own, and has all of the GPU's memory."""
    copies.forget()
    # Sizes that differ from those of an earlier graph would lead to graphs for any size, with other kernels.
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
