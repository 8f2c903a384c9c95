"""Time an all-gather beside a matmul in three ways: NCCL's kernels, NCCL's copy engines, and parallel/copies.py.

    torchrun --nproc-per-node 2 results/tensor-parallel/gather.py

The cost of a gather for a layer is the time by which the matmuls beside it take longer. `adds` is the time of both at
once minus the time of the matmuls alone. Each is a median over rounds in which all ways take turns. `kernels` is the
number of kernels that a gather launches. NCCL uses copy engines (2.28 and later) if its communicator may use no
multiprocessor (zero-CTA policy) and the result lies in memory that is registered with it. Every result is checked
first.

This script is frozen. It runs with the library as it was at commit 6c48af22.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from sagetrain.parallel import copies

MATMULS = 8
ROUNDS = 40


def milliseconds(action: Callable[[], object]) -> float:
    """Time one call between events, on all ranks together."""
    dist.barrier(device_ids=[torch.cuda.current_device()])
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    action()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def kernels_of(action: Callable[[], object]) -> int:
    """Return the number of kernels that a call launches. Copies do not count."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        action()
        torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" and "mem" not in event.name.lower() for event in profile.events())


def by_nccl(group: dist.ProcessGroup, out: Tensor) -> Callable[[Tensor], Callable[[], Tensor]]:
    """Return a function that starts a gather into `out` and returns the function that ends it."""

    def start(x: Tensor) -> Callable[[], Tensor]:
        work = dist.all_gather_into_tensor(out, x, group=group, async_op=True)

        def end() -> Tensor:
            work.wait()
            return out

        return end

    return start


def by_copies(group: dist.ProcessGroup) -> Callable[[Tensor], Callable[[], Tensor]]:
    """Return a function like that of by_nccl, through the operators that the layers call."""
    reason = copies.connect(group)
    if reason:
        raise SystemExit(f"no copies here: {reason}")
    gather, finish = torch.ops.sagetrain.all_gather, torch.ops._c10d_functional.wait_tensor

    def start(x: Tensor) -> Callable[[], Tensor]:
        result = gather(x, group.size(), group.group_name)
        return lambda: finish(result)

    return start


def main() -> None:
    """Measure, and print one line per way on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of half a micro-batch (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=2048, help="width of the residual stream (default: %(default)s)")
    args = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank, size = dist.get_rank(), dist.get_world_size()
    plain, ours = dist.new_group(range(size)), dist.new_group(range(size))
    copying = by_copies(ours)
    options = dist.ProcessGroupNCCL.Options()
    options.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO
    zero = dist.new_group(range(size), pg_options=options)
    dist.all_reduce(torch.ones(1, device=device), group=zero)
    shape, nccl = (args.tokens, args.hidden), zero._get_backend(device)
    pool = torch.cuda.MemPool(nccl.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        registered = torch.empty(shape, dtype=torch.bfloat16, device=device)
    nccl.register_mem_pool(pool, symm=True)
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

    # The ways take turns, round by round, because clocks drift by more than a gather takes.
    alone, beside, work = {name: [] for name in ways}, {name: [] for name in ways}, []
    for number in range(ROUNDS + 3):
        times = {
            name: (milliseconds(lambda s=s: s(own)()), milliseconds(lambda s=s: both(s))) for name, s in ways.items()
        }
        by_themselves = milliseconds(matmuls)
        if number >= 3:
            work.append(by_themselves)
            for name, (gather, together) in times.items():
                alone[name].append(gather)
                beside[name].append(together - by_themselves)
    launched = {name: kernels_of(lambda s=s: s(own)()) for name, s in ways.items()}
    if rank == 0:
        print(f"NCCL {torch.cuda.nccl.version()}, {size} GPUs, {own.nbytes >> 20} MiB a rank, "
              f"{MATMULS} matmuls of {statistics.median(work):.3f} ms together")  # fmt: skip
        print(f"{'way':20} {'alone, ms':>10} {'adds, ms':>10} {'kernels':>8}")
        for name in ways:
            print(f"{name:20} {statistics.median(alone[name]):10.3f} {statistics.median(beside[name]):10.3f} "
                  f"{launched[name]:8}")  # fmt: skip
        sys.stdout.flush()
    dist.barrier(device_ids=[device.index])
    os._exit(0)


if __name__ == "__main__":
    main()
