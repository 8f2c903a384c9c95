"""The marks of GPU tests, the backends of a GPU, poisoned memory, and worlds of ranks on GPUs."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from sagekernels import backends
from sagetrain.cluster.join import end_distributed, init_distributed


def capability() -> tuple[int, int]:
    """Return the compute capability of the GPU; (0, 0) without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def needs_gpu(
    least: tuple[int, int] = (0, 1), gpus: int = 1, *more: pytest.MarkDecorator
) -> list[pytest.MarkDecorator]:
    """Return the marks of a file whose tests need so many GPUs of a compute capability."""
    lacks = capability() < least or torch.cuda.device_count() < gpus
    reason = f"needs {gpus} NVIDIA GPUs of compute capability {least[0]}.{least[1]}: make test-gpu"
    return [pytest.mark.gpu, pytest.mark.skipif(lacks, reason=reason)]


def backends_here() -> list[str]:
    """Return the backends that serve this GPU, or an A100 if there is none. The last one is the GPU's own."""
    served = capability() if torch.cuda.is_available() else (8, 0)
    return [one.name for one in reversed(backends.BACKENDS) if one.serves(served) and one.name != "twin"]


def poison() -> None:
    """Fill memory with NaN, so that the next allocation holds NaN."""
    torch.full((2**26,), torch.nan, device="cuda")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill torch.empty with NaN and largest integers."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def world_of_one() -> Iterator[None]:
    """Let this process be a world of one rank, and leave that world, whose recordings have a stream."""
    threads, stream = torch.get_num_threads(), torch.cuda.current_stream()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            patch.delenv(name, raising=False)
        yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    if dist.is_initialized():
        end_distributed()
    torch.cuda.set_stream(stream)


def over_nccl() -> torch.device:
    """Let this rank, whose group is one of gloo, or a world of one, talk by NCCL. Return its GPU."""
    if dist.is_initialized():
        rank, ranks, store = dist.get_rank(), dist.get_world_size(), dist.distributed_c10d._get_default_store()
        dist.destroy_process_group()
        dist.init_process_group("nccl", store=dist.PrefixStore("nccl", store), rank=rank, world_size=ranks)
    return init_distributed(timeout_minutes=5)
