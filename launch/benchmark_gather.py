"""Time an all-gather beside a matmul, three ways: NCCL's kernels, NCCL's copy engines, and parallel/copies.py.

    torchrun --nproc-per-node 2 launch/benchmark_gather.py

What a gather costs a layer is how much longer the matmuls beside it take, so three times are shown for each way: the
gather alone, the matmuls alone, and both at once. NCCL goes by copy engines (2.28 and later) where its communicator may
use no multiprocessor (zero-CTA policy) and the result lies in symmetric memory. Every result is checked first.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from sagetrain.parallel import copies

MATMULS = 8
REPEATS = 15


def milliseconds(action: Callable[[], None]) -> float:
    """Median over REPEATS on this rank, between events, after three calls."""
    times = []
    for repeat in range(REPEATS + 3):
        dist.barrier(device_ids=[torch.cuda.current_device()])
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        action()
        end.record()
        torch.cuda.synchronize()
        if repeat >= 3:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def by_nccl(group: dist.ProcessGroup, out: Tensor) -> Callable[[Tensor], Callable[[], Tensor]]:
    """Start a gather into `out`; what comes back ends it."""

    def start(x: Tensor) -> Callable[[], Tensor]:
        work = dist.all_gather_into_tensor(out, x, group=group, async_op=True)

        def end() -> Tensor:
            work.wait()
            return out

        return end

    return start


def by_copies(group: dist.ProcessGroup) -> Callable[[Tensor], Callable[[], Tensor]]:
    """The same through the operators that the layers call."""
    reason = copies.connect(group)
    if reason:
        raise SystemExit(f"no copies here: {reason}")
    gather, finish = torch.ops.sagetrain.all_gather, torch.ops._c10d_functional.wait_tensor

    def start(x: Tensor) -> Callable[[], Tensor]:
        result = gather(x, group.size(), group.group_name)
        return lambda: finish(result)

    return start


def main() -> None:
    """Rank 0 prints one line a way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of half a micro-batch (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=2048, help="width of the residual stream (default: %(default)s)")
    args = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank, size = dist.get_rank(), dist.get_world_size()
    plain, ours = dist.new_group(range(size)), dist.new_group(range(size))
    copying = by_copies(ours)  # before symmetric memory is told to go through NCCL
    options = dist.ProcessGroupNCCL.Options()
    options.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO
    zero = dist.new_group(range(size), pg_options=options)
    dist.all_reduce(torch.ones(1, device=device), group=zero)
    symmetric_memory.set_backend("NCCL")
    shape = args.tokens, args.hidden
    registered = symmetric_memory.empty(shape, dtype=torch.bfloat16, device=device)
    symmetric_memory.rendezvous(registered, group=zero.group_name)
    whole = torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(0)).bfloat16()
    own = whole.chunk(size)[rank].contiguous()
    a, b = (torch.randn(n, m, device=device).bfloat16() for n, m in (shape, (args.hidden, 3 * args.hidden)))
    ways = {
        "NCCL": by_nccl(plain, torch.empty_like(whole)),
        "NCCL, copy engines": by_nccl(zero, registered),
        "copies.py": copying,
    }
    for name, start in ways.items():
        result = start(own)()
        torch.cuda.synchronize()
        if not torch.equal(result, whole):
            raise SystemExit(f"{name}: wrong values on rank {rank}")
        result.zero_()

    def matmuls() -> None:
        for _ in range(MATMULS):
            a @ b

    def both(start: Callable[[Tensor], Callable[[], Tensor]]) -> None:
        end = start(own)
        matmuls()
        end()

    if rank == 0:
        print(f"NCCL {torch.cuda.nccl.version()}, {size} GPUs, {own.nbytes >> 20} MiB a rank, ms:")
        print(f"{'way':20} {'gather':>8} {'matmuls':>8} {'both':>8} {'hidden':>8}")
    for name, start in ways.items():
        alone, work = milliseconds(lambda start=start: start(own)() and None), milliseconds(matmuls)
        together = milliseconds(lambda start=start: both(start))
        if rank == 0:
            hidden = (alone + work - together) / alone
            print(f"{name:20} {alone:8.3f} {work:8.3f} {together:8.3f} {hidden:8.0%}", flush=True)
    dist.barrier(device_ids=[device.index])
    os._exit(0)


if __name__ == "__main__":
    main()
