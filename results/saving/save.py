"""Time how long training stands still for a checkpoint: one that is waited for, and one that is written in the
background.

    python3 results/saving/save.py --config configs/1b.yaml --folder /scratch attention.backend=sdpa
    torchrun --nproc-per-node 4 results/saving/save.py --config configs/1b.yaml --folder /shared/scratch

It trains the configured model on random tokens, one micro-batch per step, and saves it both ways several times. It
needs no data. The figures are medians over the saves, on rank 0. While a checkpoint is written in the background, steps
go on: their time beside a save is printed too. The folder needs room for two checkpoints of 12 bytes per parameter.
They are removed at the end.

This script is frozen. It runs with the library as it was at commit 6c48af22.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from sagetrain.checkpoint.saving import Saved, Saver
from sagetrain.checkpoint.state import Identity, RunState
from sagetrain.cluster.join import end_distributed, init_distributed
from sagetrain.config.arithmetic import padded_vocab_size
from sagetrain.config.errors import ConfigError
from sagetrain.config.load import dump_config, load_config
from sagetrain.config.schema import RunConfig
from sagetrain.data.loader import Batch
from sagetrain.engines.build_engine import build_engine, partitioner
from sagetrain.engines.protocol import Engine
from sagetrain.model.selection import attention_functions
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.rng import rng_state
from sagetrain.parallel.topology import ParallelGroups, Topology

# This is used where the configuration leaves the size to the tokenizer.
VOCAB = 32_768
WARM_UP = 3


def build(cfg: RunConfig) -> Engine:
    """Build the engine that training would have, without torch.compile."""
    device = init_distributed(cfg.training.timeout_minutes)
    parallel = cfg.parallel
    topology = Topology(dist.get_world_size(), parallel.tensor_parallel_size, parallel.context_parallel_size)
    groups = ParallelGroups.create(topology)
    attention = cfg.attention
    if attention.backend == "auto":
        attention = attention.model_copy(update={"backend": "sdpa"})
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[cfg.training.dtype]
    model = Transformer(
        cfg.model,
        attention,
        functions=attention_functions(attention, cfg.model, device=device, dtype=dtype),
        vocab_size=padded_vocab_size(cfg.model.vocab_size or VOCAB),
        groups=groups,
        sequence_parallel=parallel.sequence_parallel,
        activation_checkpointing=cfg.training.activation_checkpointing,
        seed=cfg.training.seed,
        dtype=dtype,
        device=device,
        partition=partitioner(cfg, groups),
    )
    return build_engine(cfg, model, groups, 1)


def stepper(cfg: RunConfig, engine: Engine) -> Callable[[], float]:
    """Return a function that takes a training step on random tokens and returns its seconds."""
    size = (cfg.data.micro_batch_size, cfg.data.seq_length + 1)
    tokens = torch.randint(0, cfg.model.vocab_size or VOCAB, size, generator=torch.Generator().manual_seed(0))
    batch = Batch(
        tokens[:, :-1].contiguous(),
        tokens[:, 1:].contiguous(),
        positions=None,
        cu_seqlens=None,
        max_seqlen=None,
        sample_ids=[],
    )

    def step() -> float:
        begin = time.perf_counter()
        # A step ends with a number that is reduced over ranks, so the GPU is done.
        engine.step([batch], 1, cfg.optimizer.lr)
        return time.perf_counter() - begin

    return step


def measure(saver: Saver, engine: Engine, text: str, step: Callable[[], float], saves: int) -> tuple[list, list, list]:
    """Return the seconds that training stood still for saves that were waited for, the saves in the background, and the
    seconds of the steps beside those."""
    waited, background, beside = [], [], []
    for number in range(2 * saves):
        begin = time.perf_counter()
        identity = Identity(model={}, qk_norm="none", vocab_size=0)
        state = RunState(step=number, tokens=number, sequences=number, identity=identity)
        saver.start(state, text, engine.owned(), rng_state())
        if number % 2:
            saver.wait()
            waited.append(time.perf_counter() - begin)
        else:
            while everywhere(saver.busy, engine.device):
                beside.append(step())
            saver.wait()
        saved = saver.take_saved()
        if not number % 2:
            background.append(saved)
        step()
    return waited, background, beside


def everywhere(mine: bool, device: torch.device) -> bool:
    """Whether a condition holds on some rank, because all must take the same number of steps."""
    some = torch.tensor(float(mine), device=device)
    dist.all_reduce(some)
    return some.item() > 0


def report(
    engine: Engine, stage: object, alone: list[float], waited: list[float], background: list[Saved], beside: list
) -> None:
    """Print the medians."""
    stall = statistics.median(saved.stall_seconds for saved in background)
    later = statistics.median(saved.publish_seconds for saved in background)
    wait = statistics.median(waited)
    size = sum(12 * (shard.stop - shard.start) for shard in engine.owned()) / 2**30
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{name}, {dist.get_world_size()} ranks, ZeRO {stage}; rank 0 writes {size:.2f} GiB")
    print(f"saved and waited for   training stands still for {wait:8.3f} s")
    print(f"in the background      training stands still for {stall:8.3f} s, published {later:.1f} s later")
    print(f"ratio {stall / wait:.1%}")
    during = f"{1e3 * statistics.median(beside):.1f} ms beside a save ({len(beside)} steps)" if beside else "no time"
    print(f"a step takes {1e3 * statistics.median(alone):.1f} ms alone, {during}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="YAML of the run; its data is not read")
    parser.add_argument("--folder", required=True, help="on the file system to measure, shared by all ranks")
    parser.add_argument("--saves", type=int, default=3, help="of each kind")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the run")
    arguments = parser.parse_args()
    try:
        cfg = load_config(arguments.config, arguments.overrides)
    except ConfigError as error:
        sys.exit(str(error))
    engine = build(cfg)
    step, box = stepper(cfg, engine), [None]
    if dist.get_rank() == 0:
        Path(arguments.folder).mkdir(parents=True, exist_ok=True)
        box = [tempfile.mkdtemp(prefix="benchmark-save-", dir=arguments.folder)]
    dist.broadcast_object_list(box, src=0, device=engine.device)
    saver = Saver(Path(box[0]), engine.groups, 1, None, timedelta(minutes=30))
    saver.reserve(engine.owned())
    saver.pin()
    alone = [step() for _ in range(WARM_UP + 10)][WARM_UP:]
    try:
        figures = measure(saver, engine, dump_config(cfg), step, arguments.saves)
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(box[0])
    if dist.get_rank() == 0:
        report(engine, cfg.parallel.zero_stage, alone, *figures)
    dist.barrier()
    end_distributed()


if __name__ == "__main__":
    main()
