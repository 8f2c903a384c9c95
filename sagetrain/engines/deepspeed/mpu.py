"""The methods that DeepSpeed asks of an `mpu`."""

from __future__ import annotations

import torch.distributed as dist

from sagetrain.parallel.topology import ParallelGroups


class Mpu:
    """ParallelGroups in the words of DeepSpeed's `mpu` argument.

    DeepSpeed's "model parallel" is tensor parallel. Its data-parallel ranks are the replicas, context-parallel ones
    included, because it averages gradients and shards over them alike.

    Every name is written out, because DeepSpeed probes an mpu with hasattr. A catch-all would promise pipeline axes
    that do not exist. It would also promise a sequence axis, by which DeepSpeed would divide gradients and batch sizes
    in its own ways.
    """

    def __init__(self, groups: ParallelGroups) -> None:
        self._groups = groups

    def get_model_parallel_rank(self) -> int:
        return self._groups.tp_rank

    def get_model_parallel_world_size(self) -> int:
        return self._groups.tp_size

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        return self._groups.tp_group

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group

    def get_tensor_model_parallel_src_rank(self) -> int:
        return self._groups.replica_rank * self._groups.tp_size

    def get_data_parallel_rank(self) -> int:
        return self._groups.replica_rank

    def get_data_parallel_world_size(self) -> int:
        return self._groups.num_replicas

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        return self._groups.replica_group
