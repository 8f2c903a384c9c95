"""The arithmetic of ranks as a value, and the process groups made from it.

There are four axes, the fastest first. Tensor-parallel ranks are neighbours that share one copy of the model.
Context-parallel copies share every sequence, each with a slice of its tokens. Data-parallel copies have sequences of
their own. Copies of both kinds are replicas: gradients are averaged over all of them, and ZeRO shards over all of them.
The stages of a pipeline have different blocks of the model. The ranks of one stage are consecutive, and each stage is
laid out along the other axes as if it were the whole world.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, cached_property
from typing import Any

import torch
import torch.distributed as dist

from sagetrain.parallel.metrics import Metrics

_IN_ORDER = "gloo_in_order"


@cache
def _devices(interfaces: str) -> list[Any]:
    """Return gloo's devices of these network interfaces. All groups of the process share them, because each device has
    a thread that wakes up 100 times a second."""
    gloo: Any = dist.ProcessGroupGloo
    named = [gloo.create_device(interface=name) for name in interfaces.split(",") if name]
    return named or [gloo.create_default_device()]


def _gloo_in_order(store: Any, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._threads, options._timeout = 1, timeout
    options._devices = _devices(os.environ.get("GLOO_SOCKET_IFNAME", ""))
    group: dist.ProcessGroupGloo = gloo(store, rank, size, options)
    return group


def _backend() -> str | None:
    """Return the backend of process groups: the default one (None), but for gloo a variant with one thread a group.

    Two gloo threads that end collectives at the same time write to one string (torch 2.13: the name of the last
    collective). Now and then this aborts the process or hangs the group.
    """
    if dist.get_backend() != "gloo":
        return None
    if _IN_ORDER not in dist.Backend.backend_list:
        dist.Backend.register_backend(_IN_ORDER, _gloo_in_order, devices=["cpu"])
    return _IN_ORDER


@dataclass(frozen=True)
class Topology:
    """The arithmetic of how `world_size` ranks fall into groups along the axes. It has integers alone and no process
    group. Raises ValueError if a size is below 1, or the product of the other sizes does not divide the world size."""

    world_size: int
    tensor_parallel_size: int
    context_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    expert_parallel_size: int = 1
    context_gather: int = 1
    """The context-parallel ranks that gather keys from each other. Its neighbours exchange heads (Ulysses)."""

    def __post_init__(self) -> None:
        world, tp, cp = self.world_size, self.tensor_parallel_size, self.context_parallel_size
        pp = self.pipeline_parallel_size
        if min(world, tp, cp, pp) < 1:
            raise ValueError(
                f"world_size ({world}), tensor_parallel_size ({tp}), context_parallel_size ({cp}) and "
                f"pipeline_parallel_size ({pp}) must be >= 1"
            )
        if cp % self.context_gather:
            raise ValueError(f"context_gather {self.context_gather} does not divide context_parallel_size {cp}")
        if world % (tp * cp * pp):
            raise ValueError(
                f"world_size {world} is not a multiple of tensor_parallel_size {tp} x context_parallel_size {cp}"
                + (f" x pipeline_parallel_size {pp}" if pp > 1 else "")
            )
        if self.expert_parallel_size < 1 or self.stage_size % self.expert_parallel_size:
            raise ValueError(
                f"expert_parallel_size {self.expert_parallel_size} does not divide the {self.stage_size} ranks of a "
                "pipeline stage"
            )

    @property
    def stage_size(self) -> int:
        """The number of ranks of one pipeline stage."""
        return self.world_size // self.pipeline_parallel_size

    @property
    def text_ranks(self) -> int:
        """The number of neighbouring ranks of a stage that have the stage's whole weights between them, and write a
        text together. One of both sizes divides the other (config/rules/experts.py)."""
        return max(self.tensor_parallel_size, self.expert_parallel_size)

    @property
    def num_replicas(self) -> int:
        """The number of copies of the model: data-parallel size x context-parallel size."""
        return self.stage_size // self.tensor_parallel_size

    @property
    def data_parallel_size(self) -> int:
        return self.num_replicas // self.context_parallel_size

    def coords(self, rank: int) -> tuple[int, int, int]:
        """Return the (data-parallel, context-parallel, tensor-parallel) rank of a global rank. Raises ValueError if the
        rank is outside of the world."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside 0..{self.world_size - 1}")
        replica, tp_rank = divmod(rank % self.stage_size, self.tensor_parallel_size)
        return *divmod(replica, self.context_parallel_size), tp_rank

    def tp_ranks(self, rank: int) -> list[int]:
        """Return the global ranks that share one copy of the model with `rank`, in tensor-parallel order."""
        first = rank - self.coords(rank)[2]
        return list(range(first, first + self.tensor_parallel_size))

    def cp_ranks(self, rank: int) -> list[int]:
        """Return the global ranks that hold slices of the same sequences and the same shard of the model as `rank`, in
        order."""
        first = rank - self.coords(rank)[1] * self.tensor_parallel_size
        return [first + i * self.tensor_parallel_size for i in range(self.context_parallel_size)]

    @property
    def ulysses_size(self) -> int:
        """The number of context-parallel ranks that exchange heads with each other."""
        return self.context_parallel_size // self.context_gather

    def ulysses_ranks(self, rank: int) -> list[int]:
        """Return the global ranks that exchange heads with `rank`, in order: neighbours in its context-parallel
        group."""
        first = self.coords(rank)[1] // self.ulysses_size * self.ulysses_size
        return self.cp_ranks(rank)[first : first + self.ulysses_size]

    def gather_ranks(self, rank: int) -> list[int]:
        """Return the global ranks that gather keys from each other with `rank`, in order."""
        return self.cp_ranks(rank)[self.coords(rank)[1] % self.ulysses_size :: self.ulysses_size]

    def places(self, rank: int, length: int) -> list[slice]:
        """Return the places of a rank's tokens in a sequence of `length` tokens.

        Without a gather they are one slice, in the order of the ranks. With a gather over g ranks, a sequence is cut
        into 2 g chunks. Rank i of a gather has the chunks i and 2 g - 1 - i. Under a causal mask these are the same
        work for each i. Ranks that exchange heads cut the two chunks, one behind the other, into equal parts.
        """
        at, gather, ulysses = self.coords(rank)[1], self.context_gather, self.ulysses_size
        if gather == 1:
            size = length // ulysses
            return [slice(at * size, (at + 1) * size)]
        chunk, (number, part) = length // (2 * gather), divmod(at, ulysses)
        first, last = part * 2 * chunk // ulysses, (part + 1) * 2 * chunk // ulysses
        chunks = ((0, number * chunk), (chunk, (2 * gather - 1 - number) * chunk))
        found = ((max(first - begin, 0), min(last - begin, chunk), place) for begin, place in chunks)
        return [slice(place + low, place + high) for low, high, place in found if low < high]

    def replica_ranks(self, rank: int) -> list[int]:
        """Return the global ranks that hold the same shard of the model as `rank`, in order."""
        first = rank - rank % self.stage_size
        return list(range(first + self.coords(rank)[2], first + self.stage_size, self.tensor_parallel_size))

    def expert_ranks(self, rank: int) -> list[int]:
        """Return the global ranks that have all experts between them with `rank`, in the order of the experts."""
        first = rank - rank % self.stage_size % self.expert_parallel_size
        return list(range(first, first + self.expert_parallel_size))

    def expert_copies(self, rank: int) -> list[int]:
        """Return the global ranks that have the same experts as `rank`, in order."""
        first, place = rank - rank % self.stage_size, rank % self.stage_size % self.expert_parallel_size
        return list(range(first + place, first + self.stage_size, self.expert_parallel_size))

    def pipeline_ranks(self, rank: int) -> list[int]:
        """Return the global ranks with the same place as `rank` in every stage, in the order of the stages."""
        return list(range(rank % self.stage_size, self.world_size, self.stage_size))


@dataclass(frozen=True, eq=False)
class ParallelGroups:
    """The place of a global rank on every axis, and its process groups.

    The groups are None in a process without torch.distributed. cp_group is None without context parallelism, and
    gather_group is None where no keys are gathered.
    """

    topology: Topology
    rank: int
    tp_group: dist.ProcessGroup | None = None
    cp_group: dist.ProcessGroup | None = None
    ulysses_group: dist.ProcessGroup | None = None
    """The context-parallel ranks that exchange heads with each other: cp_group, unless keys are gathered."""
    gather_group: dist.ProcessGroup | None = None
    replica_group: dist.ProcessGroup | None = None
    pp_group: dist.ProcessGroup | None = None
    """The ranks with the same place in every pipeline stage, in the order of the stages. None without a pipeline."""
    ep_group: dist.ProcessGroup | None = None
    """The ranks that have all experts between them. None: this rank has them all."""
    metrics: Metrics = field(default_factory=Metrics)
    """The metrics to which everything in a training step adds."""
    timeout: timedelta | None = None
    """The time that a collective may wait for a silent rank. None: torch's own."""

    @property
    def tp_size(self) -> int:
        return self.topology.tensor_parallel_size

    @property
    def tp_rank(self) -> int:
        return self.topology.coords(self.rank)[2]

    @property
    def cp_size(self) -> int:
        return self.topology.context_parallel_size

    @property
    def cp_rank(self) -> int:
        return self.topology.coords(self.rank)[1]

    @property
    def ulysses_size(self) -> int:
        return self.topology.ulysses_size

    @property
    def ulysses_rank(self) -> int:
        return self.cp_rank % self.ulysses_size

    @property
    def gather_size(self) -> int:
        return self.topology.context_gather

    @property
    def gather_rank(self) -> int:
        return self.cp_rank // self.ulysses_size

    def own_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens of whole sequences: [B, S, ...] -> [B, S / cp, ...]."""
        parts = [x[:, place] for place in self.topology.places(self.rank, x.shape[1])]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    @property
    def dp_size(self) -> int:
        return self.topology.data_parallel_size

    @property
    def dp_rank(self) -> int:
        """The index of the share of the sequences that this rank works on, alone or with its tensor- and
        context-parallel group."""
        return self.topology.coords(self.rank)[0]

    @property
    def num_replicas(self) -> int:
        return self.topology.num_replicas

    @property
    def replica_rank(self) -> int:
        """The place among the ranks that hold the same shard of the model. ZeRO and the files of a checkpoint use
        it."""
        return self.rank % self.topology.stage_size // self.tp_size

    @property
    def pp_size(self) -> int:
        return self.topology.pipeline_parallel_size

    @property
    def pp_rank(self) -> int:
        """The number of this rank's pipeline stage."""
        return self.rank // self.topology.stage_size

    @property
    def ep_size(self) -> int:
        return self.topology.expert_parallel_size

    @property
    def ep_rank(self) -> int:
        """The number of this rank's share of the experts."""
        return self.rank % self.topology.stage_size % self.ep_size

    @classmethod
    def single(cls) -> ParallelGroups:
        """Return the groups of a single process without torch.distributed."""
        return cls(Topology(1, 1), rank=0)

    @classmethod
    def create(cls, topology: Topology, timeout: timedelta | None = None) -> ParallelGroups:
        """Make the process groups that this rank is in, one for each axis. All ranks of the job call it. Raises
        ValueError if the topology was made for another world size than torch.distributed's, or the world's process
        group is bound to a device.

        Args:
            timeout: how long a collective of these groups may wait for a silent rank (default: torch's).
        """
        if dist.get_world_size() != topology.world_size:
            raise ValueError(f"topology is for {topology.world_size} ranks, the job has {dist.get_world_size()}")
        if dist.distributed_c10d._get_default_group().bound_device_id is not None:
            # NCCL would split each group off the world's communicator, which waits for every rank of the world.
            raise ValueError("the world's process group was made with a device_id: make it without one")
        rank, pipelined = dist.get_rank(), topology.pipeline_parallel_size > 1
        stages, context = topology.pipeline_ranks(rank), topology.context_parallel_size > 1
        tp_group = _new_group(topology.tp_ranks(rank), "tensor parallel", timeout)
        ulysses = cp_group = _new_group(topology.cp_ranks(rank), "context parallel", timeout) if context else None
        gather = None
        if topology.context_gather > 1:
            ulysses = _new_group(topology.ulysses_ranks(rank), "exchange of heads", timeout)
            gather = _new_group(topology.gather_ranks(rank), "gather of keys", timeout)
        return cls(
            topology,
            rank,
            tp_group=tp_group,
            cp_group=cp_group,
            ulysses_group=ulysses,
            gather_group=gather,
            replica_group=_new_group(topology.replica_ranks(rank), "replicas", timeout),
            pp_group=_new_group(stages, "pipeline stages", timeout) if pipelined else None,
            ep_group=_new_group(topology.expert_ranks(rank), "experts", timeout)
            if topology.expert_parallel_size > 1
            else None,
            timeout=timeout,
        )

    def on_any_stage(self, flag: bool) -> bool:
        """Return whether the flag is set on any stage of this rank's pipeline; collective over the stages."""
        if self.pp_group is None:
            return flag
        flags = torch.tensor(flag, dtype=torch.int32, device=self.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.pp_group)
        return bool(flags)

    @property
    def device(self) -> torch.device:
        """The device of this rank's collectives."""
        on_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    @cached_property
    def ends_group(self) -> dist.ProcessGroup | None:
        """The ranks of a pipeline in the first and the last stage, which both have a tied embedding. None in other
        stages, and without a pipeline. The first read makes the group, and all ranks of the pipeline take part."""
        return self._ends("ends of a pipeline")

    @cached_property
    def ends_messages(self) -> dist.ProcessGroup | None:
        """Another group of the ranks of `ends_group`, for messages from one to the other."""
        return self._ends("messages between the ends of a pipeline", messages=True)

    def _ends(self, name: str, messages: bool = False) -> dist.ProcessGroup | None:
        if self.pp_group is None:
            return None
        stages = self.topology.pipeline_ranks(self.rank)
        ends = [stages[0], stages[-1]]
        # torch names a group after the number of groups that a rank has made, so all ranks make as many.
        group = self.subgroup(ends if self.rank in ends else [self.rank], name, messages)
        return group if self.rank in ends else None

    def subgroup(self, ranks: list[int], name: str, messages: bool = False) -> dist.ProcessGroup:
        """Make a further group of these global ranks, or one for `messages` between two of them beside other work. Its
        members call it, all in the same order of groups."""
        return _new_group(ranks, name, self.timeout, _beside_other_work(self.timeout) if messages else None)


def _beside_other_work(timeout: timedelta | None) -> Any:
    """Return NCCL's options for messages, or None with gloo. A message begins as soon as it can, and takes few
    multiprocessors from kernels that run meanwhile, also while it waits for the other rank."""
    if dist.get_backend() != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = 8
    if timeout is not None:
        options._timeout = timeout
    return options


def _new_group(ranks: list[int], name: str, timeout: timedelta | None, options: Any = None) -> dist.ProcessGroup:
    """Make a process group of these global ranks.

    Only the members of a group take part, so that the work of a rank for its groups does not grow with their number.
    Every rank makes its groups in the same order of axes, so that no ranks wait for each other in a circle.
    """
    group: dist.ProcessGroup = dist.new_group(
        ranks,
        timeout=timeout,
        backend=_backend(),
        pg_options=options,
        use_local_synchronization=True,
        group_desc=name,  # the watchdog names the rank and the group that hang
    )
    return group
