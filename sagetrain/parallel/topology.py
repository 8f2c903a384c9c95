"""Rank arithmetic as a value, the process groups made from it, and what DeepSpeed asks of an `mpu`.

Two axes: tensor parallel (fastest: neighbouring ranks share one copy of the model) and data parallel.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist


@dataclass(frozen=True)
class Topology:
    """How `world_size` ranks fall into tensor-parallel and data-parallel groups. Pure integers, no process group.

    Raises:
        ValueError: a size below 1, or a world size that the tensor-parallel size does not divide.
    """

    world_size: int
    tensor_parallel_size: int

    def __post_init__(self) -> None:
        if self.world_size < 1 or self.tensor_parallel_size < 1:
            raise ValueError(
                f"world_size ({self.world_size}) and tensor_parallel_size ({self.tensor_parallel_size}) must be >= 1"
            )
        if self.world_size % self.tensor_parallel_size:
            raise ValueError(
                f"world_size {self.world_size} is not a multiple of tensor_parallel_size {self.tensor_parallel_size}"
            )

    @property
    def data_parallel_size(self) -> int:
        return self.world_size // self.tensor_parallel_size

    def coords(self, rank: int) -> tuple[int, int]:
        """(data-parallel rank, tensor-parallel rank) of a global rank."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside 0..{self.world_size - 1}")
        return divmod(rank, self.tensor_parallel_size)

    def tp_ranks(self, rank: int) -> list[int]:
        """Global ranks that share one copy of the model with `rank`, in tensor-parallel order."""
        dp_rank, _ = self.coords(rank)
        first = dp_rank * self.tensor_parallel_size
        return list(range(first, first + self.tensor_parallel_size))

    def dp_ranks(self, rank: int) -> list[int]:
        """Global ranks that hold the same shard of the model as `rank`, in data-parallel order."""
        _, tp_rank = self.coords(rank)
        return list(range(tp_rank, self.world_size, self.tensor_parallel_size))


@dataclass(frozen=True, eq=False)
class ParallelGroups:
    """This process's place on both axes. The groups are None in a process without torch.distributed."""

    topology: Topology
    tp_rank: int
    dp_rank: int
    tp_group: dist.ProcessGroup | None
    dp_group: dist.ProcessGroup | None

    @property
    def tp_size(self) -> int:
        return self.topology.tensor_parallel_size

    @property
    def dp_size(self) -> int:
        return self.topology.data_parallel_size

    @classmethod
    def single(cls) -> ParallelGroups:
        """One process, no torch.distributed."""
        return cls(topology=Topology(1, 1), tp_rank=0, dp_rank=0, tp_group=None, dp_group=None)

    @classmethod
    def create(cls, topology: Topology, timeout: timedelta | None = None) -> ParallelGroups:
        """Make the process groups of both axes. Every rank of the job must call this: it is collective.

        Args:
            timeout: how long a collective of these groups may wait for a silent rank (default: torch's).

        Raises:
            ValueError: the topology was made for another world size than torch.distributed's.
        """
        if dist.get_world_size() != topology.world_size:
            raise ValueError(f"topology is for {topology.world_size} ranks, the job has {dist.get_world_size()}")
        rank = dist.get_rank()
        tp_size = topology.tensor_parallel_size
        # Every rank creates every group, in the same order: new_group is collective over the world.
        tp_groups = [
            dist.new_group(topology.tp_ranks(first), timeout=timeout)
            for first in range(0, topology.world_size, tp_size)
        ]
        dp_groups = [dist.new_group(topology.dp_ranks(tp_rank), timeout=timeout) for tp_rank in range(tp_size)]
        dp_rank, tp_rank = topology.coords(rank)
        return cls(topology, tp_rank, dp_rank, tp_group=tp_groups[dp_rank], dp_group=dp_groups[tp_rank])


class Mpu:
    """ParallelGroups in the words of DeepSpeed's `mpu` argument ("model parallel" is tensor parallel).

    Spelled out method by method: DeepSpeed probes an mpu with hasattr, so that a catch-all would promise pipeline
    and sequence axes that do not exist.
    """

    def __init__(self, groups: ParallelGroups) -> None:
        self._groups = groups

    def get_model_parallel_rank(self) -> int:
        return self._groups.tp_rank

    def get_model_parallel_world_size(self) -> int:
        return self._groups.tp_size

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        return self._groups.tp_group

    def get_tensor_model_parallel_rank(self) -> int:
        return self._groups.tp_rank

    def get_tensor_model_parallel_world_size(self) -> int:
        return self._groups.tp_size

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup | None:
        return self._groups.tp_group

    def get_tensor_model_parallel_src_rank(self) -> int:
        return self._groups.dp_rank * self._groups.tp_size

    def get_data_parallel_rank(self) -> int:
        return self._groups.dp_rank

    def get_data_parallel_world_size(self) -> int:
        return self._groups.dp_size

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        return self._groups.dp_group
