"""The gathers of FSDP2 inside a host, by the GPUs' copy engines: they take no multiprocessors from the matmuls beside
them, as NCCL's kernels do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sagetrain.parallel import copies
from sagetrain.parallel.copies import Copies


class _CopiedGather:
    """An all-gather as FSDP calls it (`set_custom_all_gather`), on a stream of FSDP's."""

    def __init__(self, by_copies: Copies) -> None:
        self._copies = by_copies

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the memory of a result, of which FSDP fills this rank's part."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather a part of every rank. Without a work in return, FSDP takes it that its stream waits."""
        self._copies.gather_into(output_tensor, input_tensor)


def gather_by_copies(modules: Iterable[Any], group: dist.ProcessGroup) -> str:
    """Let modules be gathered by copy engines, if these reach the whole group; collective.

    Returns:
        The reason why NCCL gathers them, or an empty string.
    """
    modules = list(modules)
    if not all(hasattr(module, "set_custom_all_gather") for module in modules):
        return f"torch {torch.__version__} takes no other all-gather"
    if refusal := copies.connect(group, slots=2):
        return refusal
    gather = _CopiedGather(copies.connected[group.group_name])
    for module in modules:
        module.set_custom_all_gather(gather)
    return ""
