"""The layouts of a run that fit the batch arithmetic and the GPU's memory, and their order by speed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from sagetrain.auto.recomputation_choice import fewest_blocks
from sagetrain.config.arithmetic import idle_share
from sagetrain.config.layer_specs import layers
from sagetrain.config.layout import Layout
from sagetrain.config.schema import LinearConfig, Recomputation, RunConfig
from sagetrain.costs.accounting import total_bytes, with_recomputation
from sagetrain.costs.host_memory import HOST_SHARE, host_memory_per_rank
from sagetrain.planning.changes import raise_of, way, with_enough_tokens
from sagetrain.planning.evidence import MARGINS
from sagetrain.planning.performance import with_overlap
from sagetrain.planning.priced import WIDE, PricedLayout, Target

MORE_TOKENS = 1.1
"""Factor on the fewest tokens per step that run. The fewest may leave only micro-batches of one sequence, which are
slow."""
_MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
_PIPELINE_MICRO_BATCH = 2
"""The largest micro-batch of a pipeline that is considered. Fewer micro-batches let the stages idle for longer."""
_PIPELINE_CONTEXT = 2
"""The most ranks that share a sequence in a pipeline that is considered, unless the configuration has more."""
_MOST_IDLE = 0.25
"""The largest idle share of a pipeline that is considered."""
_UNCUT = {
    "tensor_parallel_size": 1,
    "context_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "pipeline_chunks": 1,
    "pipeline_blocks": "auto",
    "sequence_parallel": False,
    "zero_stage": 1,
}
"""The layout of a model that is not cut, with its optimizer's state sharded."""
_SMALLER_STATES: tuple[Mapping[str, Mapping[str, str]], ...] = (
    {"optimizer": {"moments": "int8"}},
    {"optimizer": {"moments": "int8"}, "parallel": {"engine": "fsdp"}},
    {"optimizer": {"moments": "int8", "master": "bf16_kahan"}, "parallel": {"engine": "fsdp"}},
    {"optimizer": {"moments": "int8", "master": "bf16_chance"}, "parallel": {"engine": "fsdp"}},
    {"optimizer": WIDE, "parallel": {"engine": "fsdp", "offload": "optimizer"}},
    {"optimizer": WIDE, "parallel": {"engine": "fsdp", "offload": "all"}},
)
"""The settings that take less of a GPU's memory for the optimizer's state. The first one works with both engines and
leaves the master weights as they are."""


def by_other_engine(cfg: RunConfig, target: Target) -> PricedLayout | None:
    """Return the same layout by the other engine, or None where config/rules refuses it or no recorded runs on this
    card compare the engines."""
    if "FSDP2" not in MARGINS.get(target.hardware.name, {}):
        return None
    engine = "deepspeed" if Layout.of(cfg).engine == "fsdp" else "fsdp"
    other = cfg.changed({"parallel": {"engine": engine}})
    return target.priced(other) if target.allows(other) else None


def fewest_gpus(cfg: RunConfig, target: Target, smaller_states: bool = False) -> int | None:
    """Return the smallest number of GPUs on which some layout fits into memory, with the optimizer's state as
    configured or smaller, if none does on those of `target`. Only their number times a power of two, up to 1,024 times,
    is tried."""
    states = _smaller_states(cfg) if smaller_states else [cfg]
    counts = (target.world_size * 2**power for power in range(1, 11))
    chosen: dict[tuple[int, ...], LinearConfig] = {}
    larger = (replace(target, world_size=count, span=None) for count in counts)
    return next((each.world_size for each in larger if any(_fits_on(cfg, each, chosen) for cfg in states)), None)


def _fits_on(cfg: RunConfig, target: Target, chosen: dict[tuple[int, ...], LinearConfig]) -> bool:
    """Return whether `propose` has a layout. The first that fits is enough. The precisions in `chosen` hang neither on
    the optimizer nor on the number of replicas."""
    every = [*_candidates(cfg, target)]
    allowed = (candidate for candidate in every if target.allows(candidate))
    raised = _raised(every, target)
    found = itertools.chain.from_iterable(_fitting(each, target, chosen) for each in (allowed, raised))
    return next(found, None) is not None


def propose(cfg: RunConfig, target: Target) -> list[PricedLayout] | None:
    """Return the five fastest layouts that fit into memory and raise no error in config/rules, in order. None means
    that config/rules has an error whatever the layout.

    Each differs from the others in more than the micro-batch and the engine: the faster engine is proposed. None
    recomputes what fits into memory. If tokens_per_step allows none, they are raised, to at most MORE_TOKENS times the
    fewest that do. The precision of linear.precision auto is chosen for the ranks and the micro-batch of each layout.
    """
    every = [*_candidates(cfg, target)]
    allowed = [candidate for candidate in every if target.allows(candidate)]
    with_room = _with_room(allowed, target)
    found = [*_fitting(with_room, target)]
    if not found:
        raised = [*_raised(every, target)]
        if not (allowed or raised):
            return None
        with_room = _with_room(raised, target)
        found = [*_fitting(with_room, target)]
        least = min((raise_of(cfg, item.cfg) for item in found), default=0)
        found = [item for item in found if raise_of(cfg, item.cfg) <= MORE_TOKENS * least]
    best: dict[tuple[int | str, ...], PricedLayout] = {}
    for item in sorted(_worth_sharding(found), key=lambda item: -item.prediction.tokens_per_second):
        best.setdefault(item.key[:-2], item)
    return list(best.values())[:5]


def _worth_sharding(found: Sequence[PricedLayout]) -> Iterator[PricedLayout]:
    """Yield the layouts but those at ZeRO 2 and 3 that share their state with no other rank. Where nothing of these
    sizes fits at lower stages with moments in 8 bits, they stay: at ZeRO 3 weights in bf16 come and go."""
    whole = {_ranks(item.cfg) for item in found if item.layout.zero_stage < 2}
    for item in found:
        alone = item.layout.shards == 1 and item.cfg.parallel.offload == "none" and item.layout.zero_stage > 1
        # Moments in 8 bits are the faster way to make room.
        if not alone or (_ranks(item.cfg) not in whole and item.cfg.optimizer.moments == "int8"):
            yield item


def propose_smaller_states(cfg: RunConfig, target: Target) -> list[PricedLayout]:
    """Return the fastest layouts that fit with a smaller optimizer state than the configured one, in order.

    If moments in 8 bits suffice, the layouts are those that `propose` returns with them. Otherwise there is one layout
    for each other way to make the state smaller.
    """
    first, *others = _smaller_states(cfg)
    if found := propose(first, target):
        return found
    fastest = [propose(each, target) for each in others]
    return sorted((each[0] for each in fastest if each), key=lambda item: -item.prediction.tokens_per_second)


def with_longer_micro_batches(cfg: RunConfig, item: PricedLayout, target: Target, gain: float) -> PricedLayout | None:
    """Return a layout with longer micro-batches than `item`, one of the configuration's, and with the tokens per step
    that they need, that is at least `gain` times as fast: the one with the fewest tokens. None if none of up to eight
    times the length is, or fits. The configuration is as given, with linear.precision auto where it was."""
    micro = item.cfg.data.micro_batch_size
    anew = with_recomputation(item.cfg.model_copy(update={"linear": cfg.linear}), "none")
    for factor in (2, 4, 8):
        longer = with_enough_tokens(anew.changed({"data": {"micro_batch_size": factor * micro}}), target.world_size)
        if target.allows(longer):
            for found in _fitting([longer], target):
                if found.prediction.tokens_per_second >= gain * item.prediction.tokens_per_second:
                    return found
    return None


def host_memory_to_offload(cfg: RunConfig, target: Target) -> int | None:
    """Return the GiB of memory that a host needs for parallel.offload to make a layout fit. Return None if no memory
    does, or if the host has as much."""
    hardware, ranks = target.hardware, min(target.world_size, target.hardware.gpus_per_host)
    roomy = replace(target, hardware=replace(hardware, host_memory=math.inf), span=None)
    states = [state for state in _smaller_states(cfg) if state.parallel.offload != "none"]
    found = [item for state in states for item in propose(state, roomy) or []]
    needs = (host_memory_per_rank(item.cfg, target.world_size, target.vocab_size) for item in found)
    need = float(ranks) * min(map(total_bytes, needs), default=0) / HOST_SHARE
    return math.ceil(need / 2**30) if need > hardware.memory_of_host(ranks) else None


def _smaller_states(cfg: RunConfig) -> list[RunConfig]:
    """Return the configuration with each of _SMALLER_STATES, and once where several come to the same."""
    found: dict[tuple[object, ...], RunConfig] = {}
    for smaller in (cfg.changed(state) for state in _SMALLER_STATES):
        optimizer = smaller.optimizer.moments, smaller.optimizer.master
        found.setdefault((*optimizer, Layout.of(smaller).engine, smaller.parallel.offload), smaller)
    return [*found.values()]


def _candidates(cfg: RunConfig, target: Target) -> Iterator[RunConfig]:
    """Yield every combination worth considering. config/rules says which of them can run. Nothing is recomputed in
    them: `_fitting` decides about that."""
    attention, own, world_size = layers(cfg.model)[0].attention, cfg.parallel, target.world_size
    heads = attention.key_heads
    splits = [size for size in range(1, heads + 1) if heads % size == 0 and world_size % size == 0]
    cuts = [(split, context) for split in splits for context in attention.context_sizes(split)]
    as_is = own.tensor_parallel_size, own.context_parallel_size
    cuts += [as_is] if as_is[0] in splits and as_is not in cuts else []  # Gathered keys are not proposed otherwise.
    micro_batches = sorted({*_MICRO_BATCHES, cfg.data.micro_batch_size})
    every = [*_sharded(cfg, (1, 2, 3) if cfg.training.dtype == "bf16" else (0, 1, 2, 3))]
    for (pipeline, chunks), (split, context), micro in itertools.product(_pipelines(cfg, target), cuts, micro_batches):
        update: dict[str, object] = {"pipeline_parallel_size": pipeline, "pipeline_chunks": chunks}
        # A stage has few weights, so that sharding gradients as well, or sequences, saves little.
        ways = every if pipeline == 1 else [(1, "fsdp")]
        if pipeline > 1 and context > max(own.context_parallel_size, _PIPELINE_CONTEXT):
            continue
        # Copies of keys make the exchange larger, so they stay inside of a host.
        inside = max(target.hardware.gpus_per_host, own.tensor_parallel_size * own.context_parallel_size)
        if attention.copies_of_keys(split * context) > 1 and split * context > inside:
            continue
        if pipeline > 1 and pipeline != own.pipeline_parallel_size:
            if micro > _PIPELINE_MICRO_BATCH:
                continue
            multiple = micro * cfg.data.seq_length * max(1, world_size // (split * context * pipeline))
            micro_batches_of_step = max(1, max(cfg.tokens_per_step.named_tokens.values()) // multiple)
            if idle_share(pipeline, chunks, micro_batches_of_step) > _MOST_IDLE:
                continue
        if (pipeline, chunks) != (own.pipeline_parallel_size, own.pipeline_chunks):
            update["pipeline_blocks"] = "auto"
        if world_size % (split * context * pipeline):
            continue
        update |= {"tensor_parallel_size": split, "context_parallel_size": context}
        for (stage, engine), sharded in itertools.product(ways, (False, True)[: 1 + (split > 1)]):
            how = {**update, "sequence_parallel": sharded, "zero_stage": stage, "engine": engine}
            yield way(cfg, how, micro)


def _sharded(cfg: RunConfig, stages: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Yield the ZeRO stages, each with the engines that are priced: the configured one, and FSDP2 as well where a
    setting asks for what it alone has, as stage 3 does. At lower stages the engines are so near that no prediction
    could tell them apart."""
    parallel = cfg.parallel
    only_fsdp = cfg.optimizer.master != "fp32" or parallel.offload != "none" or parallel.shard_size is not None
    for stage in stages:
        yield stage, parallel.engine
        at_stage = cfg.changed({"parallel": {"zero_stage": stage}})
        if Layout.of(at_stage).engine == "deepspeed" and (only_fsdp or stage == 3):
            yield stage, "fsdp"


def _pipelines(cfg: RunConfig, target: Target) -> list[tuple[int, int]]:
    """Return the stages and chunks of pipelines that are worth considering; (1, 1) is none.

    A model that fits on one GPU, with only its optimizer's state sharded, is not cut. DeepSpeed has no pipelines.
    """
    own, layers = cfg.parallel, cfg.model.num_layers
    uncut = target.need(way(cfg, _UNCUT, 1))
    found = [(1, 1)]
    if own.engine != "deepspeed" and own.offload == "none" and uncut > target.usable:
        sizes = [2**power for power in range(1, 5) if target.world_size % 2**power == 0]
        found += [(size, chunks) for size in sizes for chunks in (1, 2) if size * chunks <= layers]
    return list(dict.fromkeys([*found, (own.pipeline_parallel_size, own.pipeline_chunks)]))


def _raised(candidates: Iterable[RunConfig], target: Target) -> Iterator[RunConfig]:
    """Yield the candidates whose tokens_per_step config/rules refuses, with as many tokens as they need."""
    for candidate in candidates:
        raised = with_enough_tokens(candidate, target.world_size)
        if raised.tokens_per_step != candidate.tokens_per_step and target.allows(raised):
            yield raised


def _ranks(cfg: RunConfig) -> tuple[int, int, int]:
    """Return the sizes that make up a replica's number of ranks."""
    return (
        cfg.parallel.tensor_parallel_size,
        cfg.parallel.context_parallel_size,
        cfg.parallel.pipeline_parallel_size,
    )


def _with_room(candidates: Iterable[RunConfig], target: Target) -> Iterator[RunConfig]:
    """Yield the candidates whose offloaded state fits into the memory of the hosts."""
    rooms: dict[tuple[int, ...], bool] = {}
    for candidate in candidates:
        micro = candidate.training.activation_offload * candidate.data.micro_batch_size
        share = *_ranks(candidate), candidate.parallel.zero_stage, micro
        if share not in rooms:
            rooms[share] = target.host_finding(candidate) is None
        if rooms[share]:
            yield candidate


def _fitting(
    candidates: Iterable[RunConfig], target: Target, chosen: dict[tuple[int, ...], LinearConfig] | None = None
) -> Iterator[PricedLayout]:
    """Yield the layouts of the candidates that fit into memory. Each recomputes no more than it has to, and has the
    precision of linear layers that a run of it is predicted to choose, so that `plan` says the same of a proposal that
    is pasted into a configuration.

    Where sequences fit as they are, they are not split over more ranks: that only adds communication.
    """
    chosen = {} if chosen is None else chosen
    splits: dict[tuple[object, ...], int] = {}
    for candidate in candidates:
        parallel, micro = candidate.parallel, candidate.data.micro_batch_size
        context, cut = parallel.context_parallel_size, (parallel.tensor_parallel_size, parallel.sequence_parallel)
        others = parallel.pipeline_parallel_size, parallel.pipeline_chunks, parallel.zero_stage, parallel.engine
        alike = *cut, *others, *candidate.tokens_per_step.named_tokens.values()
        if splits.get(alike, context) < context:
            continue
        call = *cut, context, micro
        if call not in chosen:
            chosen[call] = target.fastest_linear(candidate)
        candidate = candidate.model_copy(update={"linear": chosen[call]})
        for found in _recomputing(candidate, target):
            if found.cfg.training.activation_checkpointing == "none":
                splits.setdefault(alike, context)
            yield found


def _recomputing(cfg: RunConfig, target: Target) -> Iterator[PricedLayout]:
    """Yield the layouts of a configuration, in which nothing is recomputed, with what its backward pass has to
    recompute for it to fit into memory: nothing, or the fewest blocks and `selective`. No layout is yielded if all of
    that is too little."""
    way, prediction, usable = cfg, None, target.usable
    if cfg.parallel.tensor_parallel_size > 1:
        # The memory depends on halves, about which the prediction decides. What no way fits need not be predicted.
        ways = [with_overlap(cfg, how) for how in ("off", "on")]
        if not any(target.fits_with(each)("full") for each in ways):
            return
        prediction = target.predict(cfg)
        way = ways[prediction.overlap]
    need = target.need(way)
    if need <= usable:
        yield PricedLayout(cfg, prediction or target.predict(cfg), need)
        return
    fits, layers = target.fits_with(way), cfg.model.num_layers
    if not cfg.training.activation_offload and fits("full"):
        blocks = fewest_blocks(layers, fits)
        ways_back: list[Recomputation] = [blocks if blocks < layers else "full", "selective"]
        if cfg.model.experts:  # Not every way was proven with them.
            every = dict.fromkeys([*ways_back, "full"])
            ways_back = [how for how in every if target.allows(with_recomputation(cfg, how))]
        for again in ways_back:
            found = target.priced(with_recomputation(cfg, again))
            if found.memory <= usable:
                yield found
