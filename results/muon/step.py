"""Time Muon's step beside AdamW's in one process on one GPU: 1B, random tokens, 16 bits, FSDP2.

python3 results/muon/step.py [--tokens 131072] [KEY=VALUE]...

The model is compiled once. After two steps of warm-up AdamW makes four steps, Muon five, and AdamW three again.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sagetrain
from sagetrain.training.callbacks import Position, RunStart

VOCAB = 32_000
PHASES = ["warm-up"] * 2 + ["adamw"] * 4 + ["muon"] * 5 + ["adamw again"] * 3


class Watch(sagetrain.Callback):
    """Exchange the optimizer between steps, and print what each step takes.

    Args:
        warm_up: tokens of a step of the warm-up.
        tokens: tokens of the other steps.
    """

    def __init__(self, warm_up: int, tokens: int) -> None:
        self._tokens = [warm_up] * 2 + [tokens] * (len(PHASES) - 2)
        self._rows: list[tuple[float, float]] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def on_start(self, start: RunStart) -> None:
        # The engine has no public way to take another optimizer in the middle of a run.
        engine: Any = start.engine
        self._engine, self._cfg, update = engine, start.cfg, engine._step_optimizers

        def timed(*words: Any) -> None:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            update(*words)
            end.record()
            self._events.append((begin, end))

        engine._step_optimizers = timed

    def on_step_begin(self, step: int) -> None:
        now, before = PHASES[step - 1], PHASES[max(0, step - 2)]
        if now != before and now != "adamw":
            optimizer = self._cfg.optimizer.model_copy(update={"name": now.split()[0]})
            self._engine._begin_optimizers(self._cfg.model_copy(update={"optimizer": optimizer}))
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def on_row(self, position: Position, values: Mapping[str, float]) -> None:
        if "train/loss" not in values:
            return
        torch.cuda.synchronize()
        place = len(self._rows)
        update = self._events[place][0].elapsed_time(self._events[place][1])
        step = 1e3 * self._tokens[place] / values["perf/tokens_per_second"]
        self._rows.append((step, update))
        loss, memory = values["train/loss"], values["perf/memory_gib"]
        print(
            f"{PHASES[place]:12s} {step:8.1f} ms, update {update:6.1f} ms, loss {loss:.3f}, {memory:.2f} GiB",
            flush=True,
        )
        if len(self._rows) == len(PHASES):
            for name in ("adamw", "muon"):
                # The first step of an optimizer sets up its memory.
                found = [
                    row
                    for place, row in enumerate(self._rows)
                    if PHASES[place].startswith(name) and PHASES[place - 1] == PHASES[place]
                ]
                step, update = (statistics.median(row[i] for row in found) for i in range(2))
                print(f"{name}: {step:,.1f} ms a step, of which the update takes {update:.1f} ms")
            os._exit(0)  # A checkpoint would be saved otherwise.


def main() -> None:
    """Train until the last step is timed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131_072, help="tokens of a step")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    asked = parser.parse_intermixed_args()
    folder, warm_up = Path(tempfile.mkdtemp()), asked.tokens // 4
    total = 2 * warm_up + (len(PHASES) - 1) * asked.tokens
    sizes = f"[{{from_tokens: 0, tokens: {warm_up}}}, {{from_tokens: {2 * warm_up}, tokens: {asked.tokens}}}]"
    settings = [
        "data.train=[{path: none}]",
        "data.valid=[]",
        "data.document_attention=false",
        "data.document_positions=false",
        f"model.vocab_size={VOCAB}",
        f"tokens_per_step={{schedule: stages, stages: {sizes}}}",
        f"training.run_dir={folder}/run",
        f"training.total_tokens={total}",
        f"lr_schedule.warmup_tokens={warm_up}",
        "linear.precision=bf16",
        "attention.backend=sdpa",
        "parallel.engine=fsdp",
        "stability.noise_scale.every_steps=null",
        f"checkpoint.every_tokens={total}",
        "evaluation={}",
        "logging={tensorboard: false}",
        *asked.overrides,
    ]
    cfg = sagetrain.load_config("1b", settings)
    length = cfg.data.seq_length + 1

    def tokens(index: int) -> np.ndarray:
        return np.random.default_rng(index).integers(VOCAB, size=length)

    sagetrain.train(cfg, callbacks=[Watch(warm_up, asked.tokens)], tokens=tokens, say=print)


if __name__ == "__main__":
    main()
