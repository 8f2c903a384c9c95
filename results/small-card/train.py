"""Train configs/24gb.yaml for some steps of random tokens on a GPU whose memory is limited, and print what it takes.

python3 results/small-card/train.py [--gib 22] [--steps 4] [KEY=VALUE]...
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Mapping

import numpy as np
import torch

import sagetrain
from sagetrain.training.callbacks import Position

VOCAB, GIB = 32_000, 2**30


class Memory(sagetrain.Callback):
    """Print a line for each step: loss, speed, and the peak of the memory."""

    def __init__(self, free: int) -> None:
        self._free = free
        self.losses: list[float] = []

    def on_row(self, position: Position, values: Mapping[str, float]) -> None:
        if "train/loss" not in values:
            return
        self.losses.append(values["train/loss"])
        allocated, reserved, whole = values["perf/memory_gib"], math.nan, math.nan
        if torch.cuda.is_available():
            reserved = torch.cuda.max_memory_reserved() / GIB
            whole = (self._free - torch.cuda.mem_get_info()[0]) / GIB
        print(
            f"step {position.step}: loss {self.losses[-1]:.3f}, {values['perf/tokens_per_second']:,.0f} tokens/s, peak "
            f"{allocated:.2f} GiB allocated, {reserved:.2f} reserved, {whole:.2f} with CUDA's context",
            flush=True,
        )


def main() -> None:
    """Train and check the losses. torch raises an error when the limit is passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=22, help="limit of torch's memory on the GPU")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=131_072, help="tokens of a step")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    asked = parser.parse_intermixed_args()
    free = 0
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(asked.gib * GIB / torch.cuda.get_device_properties(0).total_memory)
        free = torch.cuda.mem_get_info()[0]
    watch, total = Memory(free), asked.steps * asked.tokens
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            "data.train=[{path: none}]",
            "data.valid=[]",
            "data.document_attention=false",
            "data.document_positions=false",
            f"model.vocab_size={VOCAB}",
            f"tokens_per_step={{schedule: constant, tokens: {asked.tokens}}}",
            f"training.run_dir={folder}/run",
            f"training.total_tokens={total}",
            f"lr_schedule.warmup_tokens={asked.tokens}",
            "checkpoint={}",
            "evaluation={}",
            "logging={tensorboard: false}",
            *asked.overrides,
        ]
        cfg = sagetrain.load_config("24gb", settings)
        length = cfg.data.seq_length + 1

        def tokens(index: int) -> np.ndarray:
            return np.random.default_rng(index).integers(VOCAB, size=length)

        sagetrain.train(cfg, callbacks=[watch], tokens=tokens, say=print)
    if not all(abs(loss - math.log(VOCAB)) < 1.5 for loss in watch.losses):
        raise SystemExit(f"wrong losses: {watch.losses}")


if __name__ == "__main__":
    main()
