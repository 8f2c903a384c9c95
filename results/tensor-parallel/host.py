"""Time what the host needs for a micro-step under tensor and sequence parallelism: forward and backward, ms.

    python3 results/tensor-parallel/host.py
    torchrun --nproc-per-node 2 results/tensor-parallel/host.py --shape 1b

Without a GPU this process is rank 0 of two, alone. Its collectives meet nobody and copy only its own part. The model is
so small that computing costs little (attention is an addition), and most of the time is Python: torch.compile's guards
and wrappers, calls of operators, autograd, the engine (ZeRO 1). With GPUs there are as many ranks as torchrun starts.
Then `host` is the time that the calls take to return if the GPU had nothing to do before, and `step` is the time of a
micro-step if micro-steps follow each other.

Micro-batches have packed documents, whose ends differ, and go in halves unless --whole. The losses are printed to the
last bit, because a change may not change them. Settings of torch.compile come from the environment, for example
TORCHINDUCTOR_CPP_WRAPPER=1.

This script is frozen. It runs with the library as it was at commit 973539d5.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from sagetrain.cluster.join import end_distributed, init_distributed
from sagetrain.config.arithmetic import engine_of
from sagetrain.config.load import load_config
from sagetrain.data.loader import Batch
from sagetrain.engines.build_engine import build_engine, partitioner
from sagetrain.model.backends import AttentionFunction, TokenLayout
from sagetrain.model.compile import compile_blocks
from sagetrain.model.selection import attention_functions, matmuls_of
from sagetrain.model.transformer import Transformer
from sagetrain.parallel import copies
from sagetrain.parallel.topology import ParallelGroups, Topology

# This is a number of micro-steps.
WARM_UP = 4
TINY = (
    "model={num_layers: 8, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 4, num_key_value_heads: 2}",
    "data.seq_length=64",
    "data.micro_batch_size=4",
)
VOCAB = 128


class Alone:
    """The memory of copies.py for a rank without others: own parts are copied, the parts of others stay zeros, and
    nobody is met."""

    def __init__(self, size: int) -> None:
        self._size = size

    def allocate(self, nbytes: int) -> list[Tensor]:
        return [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(self._size)]

    def send(self, steps: Sequence[tuple[int, int, int] | int]) -> bool:
        for step in steps:
            if not isinstance(step, int):
                ctypes.memmove(*step)
        return True

    def wait(self, event: object) -> None:
        pass


class Added(AttentionFunction):
    """An addition in the place of attention, which would take most of the time: q + k + v."""

    name = "added"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout) -> Tensor:
        return q + (k + v).repeat_interleave(q.shape[2] // k.shape[2], 2)


def join() -> tuple[ParallelGroups, torch.device]:
    """Make all ranks one tensor-parallel group. Without a GPU the group has two ranks, of which this process is one."""
    if torch.cuda.is_available():
        device = init_distributed(timeout_minutes=5)
        return ParallelGroups.create(Topology(dist.get_world_size(), dist.get_world_size())), device
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    os.environ.update(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0")
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    device = init_distributed(timeout_minutes=5)
    groups = ParallelGroups.create(Topology(2, 2))
    copies.connected[groups.tp_group.group_name] = copies.Copies(0, 2, Alone(2))
    return groups, device


def batch(number: int, sequences: int, length: int, vocab_size: int) -> Batch:
    """Return random tokens. Documents end within sequences, and elsewhere in each batch."""
    draw = torch.Generator().manual_seed(number)
    text = torch.randint(0, vocab_size, (sequences, length + 1), generator=draw)
    within = torch.randint(1, length, (sequences,), generator=draw)
    starts = length * torch.arange(sequences)
    ends = torch.stack([starts + within, starts + length], 1).flatten()
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int32), ends.int()])
    positions = torch.stack([torch.cat([torch.arange(n), torch.arange(length - n)]) for n in within.tolist()])
    return Batch(text[:, :-1], text[:, 1:], positions, cu_seqlens, length, [])


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["tiny", "1b", "7b"], default="tiny", help="of configs/, or tiny")
    parser.add_argument("--steps", type=int, default=60, help=f"micro-steps to time, after {WARM_UP} that are not")
    parser.add_argument("--whole", action="store_true", help="not in halves")
    parser.add_argument("--compile", choices=["inductor", "aot_eager"], default="inductor", help="torch's backend")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the run")
    arguments = parser.parse_intermixed_args(words)

    groups, device = join()
    tiny = arguments.shape == "tiny"
    own = ["parallel.sequence_parallel=true", f"parallel.tensor_parallel_size={groups.tp_size}"]
    settings = [*(TINY if tiny else ()), *own, *arguments.overrides]
    cfg = load_config("1b" if tiny else arguments.shape, settings)
    vocab_size = VOCAB if tiny else 32000
    place = {"dtype": torch.bfloat16, "device": device}
    matmuls, _ = matmuls_of(cfg.linear, cfg.model, tensor_parallel_size=groups.tp_size, **place)
    model = Transformer(
        cfg.model,
        cfg.attention,
        vocab_size=vocab_size,
        groups=groups,
        sequence_parallel=True,
        overlap=not arguments.whole,
        functions=[Added()] * cfg.model.num_layers if tiny else attention_functions(cfg.attention, cfg.model, **place),
        matmuls=matmuls,
        partition=partitioner(cfg, groups),
        **place,
    )
    compile_blocks(model, arguments.compile, hooks=engine_of(cfg) == "fsdp")
    engine = build_engine(cfg, model, groups, 2)
    # All micro-steps are in one step and none is at its end, so none reduces gradients.
    engine._prepare(WARM_UP + 2 * arguments.steps + 1, 0.0)

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def micro_step(number: int) -> tuple[float, float, Tensor]:
        inputs = batch(number % 8, cfg.data.micro_batch_size, cfg.data.seq_length, vocab_size)
        start = time.perf_counter()
        loss = engine.forward(inputs)
        middle = time.perf_counter()
        engine.backward(loss, last=False)
        return 1e3 * (middle - start), 1e3 * (time.perf_counter() - middle), loss.detach()

    losses = [micro_step(number)[2].item() for number in range(WARM_UP)]
    gc.collect()
    gc.disable()
    alone = []
    for number in range(arguments.steps):
        synchronize()
        alone.append(micro_step(number)[:2])
    synchronize()
    start = time.perf_counter()
    for number in range(arguments.steps):
        micro_step(number)
    synchronize()
    step = 1e3 * (time.perf_counter() - start) / arguments.steps
    if groups.rank == 0:
        place = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        memory = f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if device.type == "cuda" else ""
        print(f"{arguments.shape} on {place}, torch {torch.__version__}: losses {' '.join(map(float.hex, losses))}")
        for name, times in zip(("forward", "backward"), zip(*alone, strict=True), strict=True):
            least, per_block = min(times), 1e3 * min(times) / cfg.model.num_layers
            print(f"host {name:8s} median {statistics.median(times):8.2f} ms, least {least:8.2f} ms, "
                  f"{per_block:6.0f} us a block")  # fmt: skip
        print(f"step          {step:8.2f} ms{memory}", flush=True)


if __name__ == "__main__":
    main()
    end_distributed()
