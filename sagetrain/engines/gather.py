"""The gathers of FSDP2 inside a host, by the GPUs' copy engines: they take no multiprocessors from the matmuls beside
them, as NCCL's kernels do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sagetrain.engines.sharding import Unit
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


def gather_by_copies(units: Sequence[Unit]) -> str:
    """Let units be gathered by copy engines, if these reach all of a unit's ranks; collective. Return the reason why
    NCCL gathers them, or an empty string."""
    for unit in units:
        if not hasattr(unit.module, "set_custom_all_gather"):
            return f"torch {torch.__version__} takes no other all-gather"
        if refusal := copies.connect(unit.ranks.shards, slots=2):
            return refusal
    for unit in units:
        unit.module.set_custom_all_gather(_CopiedGather(copies.connected[unit.ranks.shards.group_name]))
    return ""


def how_gathered(units: Sequence[Unit], device: torch.device, by_hooks: bool = True) -> str:
    """Let blocks be gathered by copy engines if they can, and by FSDP's hooks too if `by_hooks`. Return how weights are
    gathered, in words; collective."""
    by_backend = f"by {dist.get_backend()}"
    if units[0].ranks.shards.size() == 1 or device.type != "cuda":
        return by_backend
    if not by_hooks:
        refusal = copies.connect(units[0].ranks.shards, slots=2)
        return f"{by_backend}: {refusal}" if refusal else "by copy engines, out of other ranks' memory"
    # The outermost unit is always gathered once a step, and would need the largest slots.
    refusal = gather_by_copies([unit for unit in units[1:] if unit.ranks.shards.size() > 1])
    return f"{by_backend}: {refusal}" if refusal else "by copy engines"
