"""Recordings of an engine's passes as CUDA graphs, and when there are none."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from sagekernels import observe
from sagekernels.graphs import Pool, Record, hooks_of, leave_default_stream
from sagetrain.config.layout import Refusal
from sagetrain.engines.gradient_sums import LeafSums
from sagetrain.engines.model_weights import ResidentWeights
from sagetrain.engines.replay_times import replays_stay, slowest_of_ranks
from sagetrain.engines.traversal import Passes
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.copies import connected
from sagetrain.parallel.layers import linear_layers

PASSES = 2
"""The passes that run by the host before one is recorded: kernels are compiled, tuned and loaded then."""


def recorder(device: torch.device) -> Record | None:
    """Return the function that records on a device, and leave the default stream for good. None: the device has no
    graphs."""
    if device.type != "cuda":
        return None
    leave_default_stream()
    return Pool().record


def recorder_of(
    how: str, refusal: Refusal | None, model: Transformer, device: torch.device
) -> tuple[Record | None, str]:
    """Return the function that records micro-steps, or None and the reason why the host launches each of them, by
    training.cuda_graphs and the setting that keeps micro-steps from being recorded."""
    if how == "off":
        return None, "training.cuda_graphs off"
    if refusal:
        return None, f"{refusal.key} {refusal.value}, where {refusal.why}"
    if how == "auto" and model.own_loss:
        return None, "a loss of your own may change from one micro-step to the next"
    record = recorder(device)
    return record, "" if record else "no GPU"


class Recorder:
    """Recordings of the passes of an engine, until one of them cannot be made.

    Args:
        shared: records in memory that recordings share if each is replayed before the next (see `recorder`).
        weights: the weights, which stay in the same memory.
        sums: the sums of the gradients, which stay in the same memory as soon as there are recordings.
        timed: whether micro-steps are timed both ways in the first steps, and replayed later if that is as fast.
    """

    def __init__(self, engine: Passes, shared: Record, weights: ResidentWeights, sums: LeafSums, timed: bool) -> None:
        self._model, self._device, self._metrics = engine.model, engine.device, engine.groups.metrics
        self.shared, self.weights, self.sums, group = shared, weights, sums, engine.groups.tp_group
        # Collectives by copy engines, if passes use them.
        self._copies = connected.get(group.group_name) if group and engine.groups.tp_size > 1 else None
        self._by_host = self._largest = 0
        self.refusal = ""
        """The reason why nothing is recorded any more."""
        self.timing: bool = timed
        """Whether both ways are timed, because none of them is chosen yet."""

    def pool(self) -> Record:
        """Return a function that records in memory of its own."""
        record = recorder(self._device)
        assert record, "a recorder is for devices that have graphs"
        return record

    def align(self) -> None:
        """Let a pass begin as its recording does."""
        if self._copies:
            self._copies.align()

    def repeatable(self) -> AbstractContextManager[None]:
        """Return the context of a pass. Its collectives are the same whether it is launched by the host or replayed, so
        that ranks need not agree on that."""
        return self._copies.repeatable() if self._copies else contextlib.nullcontext()

    def record(self, make: Callable[[], None], another: bool = False) -> frozenset[str] | None:
        """Call a function that records passes. Return the names of the leaves that get a gradient in them. None: the
        host launches every pass from now on. With `another`, this step or an earlier one has recorded others, each in
        memory of its own."""
        sums, refusal = self.sums, ""
        given, added, found = set(sums.given), self._metrics.added(), frozenset[str]()
        sums.given.clear()
        try:
            refusal = self._lacks_memory(another)
            if not refusal:
                sums.stay()
                free = _free(self._device)
                make()
                self._largest = max(self._largest, free - _free(self._device))
                found = frozenset(sums.given)
                if self._metrics.added() != added:
                    refusal = "a micro-step adds to the metrics"
        except Exception as error:  # noqa: BLE001 - Whatever it is, micro-steps run without recordings as well.
            refusal = f"{type(error).__name__}: {error}".partition("\n")[0]
        sums.given = given
        if not refusal:
            return found
        # What a pass left when it was interrupted was never computed.
        for leaf in self.weights.leaves.values():
            leaf.grad = None
        self.weights.interrupt()
        if self._copies:
            self._copies.interrupt()
        self.give_up(refusal)
        return None

    def _lacks_memory(self, another: bool) -> str:
        """Return "", or that recordings do not fit into the GPU's memory. Recordings keep the memory of a micro-step
        for themselves, and others need as much for passes that are not recorded, or for the update. With recomputation
        those of a pipeline stage keep more, so another one looks for as much as the largest one has taken."""
        device, sums = self._device, self.sums
        if device.type != "cuda":
            return ""
        # A capture cannot free what the caching allocator keeps.
        torch.cuda.empty_cache()
        free = _free(device)
        if another:
            needed = self._by_host + self._largest
        else:
            kept = torch.cuda.memory_allocated(device)
            self._by_host = torch.cuda.max_memory_allocated(device) - kept
            needed = 2 * self._by_host + (0 if sums.stays else sums.reduced_bytes)
            free += torch.cuda.memory_reserved(device) - kept
        if free >= needed:
            return ""
        return f"recordings need {needed / 2**30:.1f} GiB for micro-steps, and {free / 2**30:.1f} GiB are free"

    def choose(self, times: tuple[float, float] | None) -> None:
        """Choose the faster way by the seconds of a micro-batch on this rank (see slowest_of_ranks), as soon as all
        ranks have timed both; collective."""
        found = slowest_of_ranks(times, not self.refusal, self._device)
        if found is None:
            return
        self.timing = False
        by_host, replayed = found
        if not by_host:
            return
        self._metrics.max("perf/micro_step_by_host_seconds", by_host)
        self._metrics.max("perf/micro_step_replayed_seconds", replayed)
        if not self.refusal and not replays_stay(by_host, replayed):
            self.give_up(f"a replay takes {1e3 * replayed:.2f} ms, and the host's launches {1e3 * by_host:.2f} ms")

    def give_up(self, why: str) -> None:
        """Let the host launch every pass from now on."""
        self.refusal, self.sums.stays = why, False
        warnings.warn(f"the host launches each micro-step from now on: {why}", stacklevel=2)

    def begin(self) -> Any:
        """Begin a step. Return all that decides what its passes launch, and where, beside their micro-batches. None:
        the host launches them, because something looks at them that would see nothing of a replay."""
        # The weights, and what is derived from them, are where the passes will find them.
        self.weights.gather()
        model, leaves = self._model, self.weights.leaves.values()
        modules = (each for each in model.named_modules() if not isinstance(each[1], FSDPModule))
        if (
            self.refusal
            or observe.listening()
            or torch._C._autograd._profiler_enabled()
            or torch.is_anomaly_enabled()
            or hooks_of(modules)
            or any(leaf._backward_hooks for leaf in leaves)
        ):
            return None
        layers = list(linear_layers(model))
        held = [*leaves, *(tensor for layer in layers for tensor in layer.kept)]
        return (
            [layer.matmul for layer in layers],
            model.functions,
            model.activation_checkpointing,
            [leaf.requires_grad for leaf in leaves],
            [tensor.data_ptr() for tensor in held],
            self._copies and self._copies.addresses,
            torch.are_deterministic_algorithms_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            torch.get_float32_matmul_precision(),
            torch.is_autocast_enabled(self._device.type),
        )


def _free(device: torch.device) -> int:
    """Return the bytes of a GPU's memory that nobody has, not even the caching allocator."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
