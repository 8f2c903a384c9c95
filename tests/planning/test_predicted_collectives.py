"""Predicted collectives agree with what torch and DeepSpeed really call."""

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tiny
from distributed import run_distributed
from sagetrain.config import RunConfig
from sagetrain.config.layout import Layout
from sagetrain.costs.accounting import overlaps
from sagetrain.costs.hardware import H200
from sagetrain.costs.memory import memory_per_rank
from sagetrain.costs.stages import held
from sagetrain.engines.build_engine import build_engine
from sagetrain.model.selection import matmuls_of
from sagetrain.planning.performance import _Step, predict
from sagetrain.planning.prediction import CollectiveTime


class Calls(TorchDispatchMode):
    """The collectives in these dtypes with at least `least` elements: kind -> [calls, bytes of the whole tensor]."""

    KINDS = {"all_reduce": "all-reduce", "allreduce": "all-reduce", "all_gather": "all-gather",
             "allgather": "all-gather", "reduce_scatter": "reduce-scatter", "all_to_all": "all-to-all",
             "reduce_": "reduce"}  # fmt: skip

    def __init__(self, least: int, dtypes: tuple[torch.dtype, ...]):
        super().__init__()
        self.least, self.dtypes, self.seen = least, dtypes, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        namespace, _, name = func.name().partition("::")
        kind = next((kind for key, kind in self.KINDS.items() if key in name), None)
        if kind and namespace in ("c10d", "_c10d_functional"):
            tensors = [x for x in torch.utils._pytree.tree_leaves((args, result)) if isinstance(x, torch.Tensor)]
            whole = max(tensors, key=torch.Tensor.numel)
            if whole.numel() >= self.least and whole.dtype in self.dtypes:
                calls = self.seen.setdefault(kind, [0, 0])
                calls[0] += 1
                calls[1] += whole.nbytes
        return result


LAYOUTS = [
    (2, 1, False, "on", 1, {}),
    (2, 1, True, "on", 1, {}),
    (2, 1, True, "off", 1, {}),
    (2, 1, True, "on", 1, {"precision": "fp8", "keep_last_blocks": 1}),
    # q, k and v together have more weights, gate and up fewer.
    (2, 1, True, "on", 1, {"precision": "fp8", "keep_layers_below": 5000}),
    (1, 2, False, "auto", 1, {}),
    *((1, 1, False, "auto", stage, {}) for stage in (1, 2)),
    *((1, 1, False, "auto", stage, {}, "bf16") for stage in (1, 2)),
]
"""The layouts: tensor and context parallel size, sequence parallel, overlap, ZeRO stage, linear layers, and the dtype
that gradients travel in. Two ranks that share sequences have copies of a key head."""


def real_collectives() -> list[tuple[dict, dict]]:
    """Return the collectives of a step of two micro-steps on two ranks, in every layout, as called and as predicted."""
    result = []
    for tensor, context, sequence, overlap, stage, linear, *more in LAYOUTS:
        groups = tiny.join(tensor, context)
        parallel = {"zero_stage": stage, "tensor_parallel_size": tensor, "sequence_parallel": sequence}
        parallel |= {"context_parallel_size": context, "tensor_parallel_overlap": overlap}
        parallel |= {"engine": "deepspeed", "gradient_reduction": more[0] if more else "fp32"}
        wide = {"hidden_size": 64, "ffn_hidden_size": 64, "value_embeddings": True} if linear else {}
        wide |= {"num_key_value_heads": 1} if context > 1 else {}
        tokens = {"tokens": 2 * 16 * groups.dp_size}
        cfg = tiny.config(stage, "bf16", parallel=parallel, tokens_per_step=tokens, linear=linear, model=wide)
        place = {"vocab_size": tiny.VOCAB, "groups": groups, "sequence_parallel": sequence, "dtype": torch.bfloat16}
        place["overlap"] = overlaps(cfg)
        how = {"tensor_parallel_size": tensor, "device": torch.device("cpu"), "dtype": torch.bfloat16}
        place["matmuls"], _ = matmuls_of(cfg.linear, cfg.model, **how)
        engine = build_engine(tiny.on(cfg, groups), tiny.transformer(cfg.model, cfg.attention, **place))
        # DeepSpeed reduces gradients over a group of one as well. Only activations travel in bf16 or 8 bits.
        dtypes = (torch.bfloat16, torch.uint8) if tensor > 1 else (torch.bfloat16, torch.float32)
        with Calls(256, dtypes) as calls:
            tiny.global_step(engine, 0, sequences=2 * groups.dp_size)
        result.append((calls.seen, predicted_collectives(cfg, 2, least=512)))
    return result


def predicted_collectives(cfg: RunConfig, ranks: int, least: int) -> dict[str, list[int]]:
    """Return the predicted collectives of a step with at least so many bytes, in the form of Calls.seen."""
    return counted(predict(cfg, ranks, tiny.VOCAB, H200).collectives, least)


def counted(collectives: Iterable[CollectiveTime], least: int) -> dict[str, list[int]]:
    """Return the collectives with at least so many bytes in the form of Calls.seen."""
    found: dict[str, list[int]] = {}
    for c in collectives:
        if c.payload >= least:
            row = found.setdefault(c.kind, [0, 0])
            row[0] += c.count
            row[1] += c.count * c.payload
    return found


def agree(cases: list, ranks: list[list[tuple[dict, dict]]], bytes_more: int = 0) -> None:
    """Check that kinds, numbers and bytes of collectives agree on each rank, in each case.

    Args:
        bytes_more: the bytes that may be predicted beyond those called.
    """
    for rank in ranks:
        for case, (called, predicted) in zip(cases, rank, strict=True):
            assert called.keys() == predicted.keys(), case
            for kind in called:
                assert called[kind][0] == predicted[kind][0], (case, kind)
                more = bytes_more * (kind == "all-reduce" and predicted[kind][1] > called[kind][1])
                assert called[kind][1] == pytest.approx(predicted[kind][1], rel=0.01, abs=more), (case, kind)


def test_collectives_are_those_of_torch_and_deepspeed():
    """DeepSpeed pads, and gathers the few norm gains separately."""
    agree(LAYOUTS, run_distributed(real_collectives, 2))


def collectives_of_fsdp(stages: list[tuple[int, int, int]]) -> list[tuple[dict, dict]]:
    """Return the collectives of a step of two micro-steps by FSDP2, for each stage, number of ranks that shard and
    number of ranks that share a sequence, as called and as predicted. Four that share one gather keys in pairs, and
    exchange copies of the key head in pairs."""
    result, every = [], {context: tiny.join(1, context, gather=max(1, context // 2)) for _, _, context in stages}
    for stage, shards, context in stages:
        parallel = {"engine": "fsdp", "zero_stage": stage, "shard_size": shards, "context_parallel_size": context}
        groups, model = every[context], {"num_key_value_heads": 1, "head_dim": 64} if context > 1 else {}
        model |= {"value_embeddings": True}
        tokens = {"tokens": 2 * 16 * groups.dp_size}
        cfg = tiny.config(stage, "bf16", parallel=parallel, tokens_per_step=tokens, model=model)
        engine = tiny.engine(cfg, groups)
        with Calls(256, (torch.bfloat16, torch.float32)) as calls:
            tiny.global_step(engine, 0, sequences=2 * groups.dp_size)
        result.append((calls.seen, predicted_collectives(cfg, groups.topology.world_size, least=0)))
    return result


def test_collectives_are_those_of_fsdp():
    stages = [(0, 4, 1), (1, 4, 1), (2, 4, 1), (3, 4, 1), (1, 2, 1), (3, 2, 1), (1, 4, 4)]
    agree(stages, run_distributed(collectives_of_fsdp, 4, stages))


def shared_experts(cases: Sequence[tuple[int, int, int]]) -> list[tuple[dict, dict]]:
    """Return what two ranks that have experts between them call more, and what of it is predicted, at ZeRO stages
    with so many tensor-parallel ranks and experts of a token. Numbers of parameters are checked here."""
    result = []
    sizes = {size for _, size, _ in cases}
    every = {(size, ranks): tiny.join(size, ep_size=ranks) for size in sizes for ranks in (1, 2)}
    for stage, size, per_token in cases:
        found, experts = {}, {"number": 4, "per_token": per_token, "ffn_size": 32}
        for ranks in (1, 2):
            groups = every[size, ranks]
            parallel = {"engine": "fsdp", "expert_parallel_size": ranks, "tensor_parallel_size": size}
            parallel |= {"sequence_parallel": size > 1, "tensor_parallel_overlap": "on"}
            tokens = {"tokens": 2 * 16 * groups.dp_size}
            cfg = tiny.config(stage, "bf16", parallel=parallel, tokens_per_step=tokens, model={"experts": experts})
            engine = tiny.engine(cfg, groups)
            with Calls(1, (torch.bfloat16, torch.float32, torch.int64)) as calls:
                tiny.global_step(engine, 0, sequences=2 * groups.dp_size)
            found[ranks] = calls.seen, predicted_collectives(cfg, groups.topology.world_size, least=0)
            here = held(cfg, Layout.of(cfg, 4), tiny.VOCAB, 0).sizes.parameters
            assert here == sum(leaf.numel() for leaf in engine.leaves().values())
            kept = sum(each.stop - each.start for each in engine.owned() if each.spec.kind != "state")
            items = {item.name: item.bytes for item in memory_per_rank(cfg, 4, tiny.VOCAB)}
            assert stage == 3 or items["weights"] == 2 * here
            assert items["optimizer"] == pytest.approx(12 * kept, rel=0.01)
        more = [{kind: (np.subtract(two[kind], one.get(kind, 0))).tolist() for kind in two}
                for one, two in zip(*found.values(), strict=True)]  # fmt: skip
        result.append((more[0], more[1]))
    return result


def test_collectives_of_experts_that_ranks_share():
    """They gather tokens, weights and choices, and add up results, or exchange rows where tokens have fewer experts.
    Ranks that have the same experts reduce them."""
    cases = [(0, 1, 2), (1, 1, 1), (3, 2, 2)]
    agree(cases, run_distributed(shared_experts, 4, cases))


PIPELINES = [
    (2, 1, 1, {}, "none"),
    (2, 2, 1, {"tie_embeddings": True}, "none"),
    (2, 2, 1, {"windows": {"tokens": 4, "pattern": "WF"}}, 3),
    (2, 1, 1, {"windows": {"tokens": 4, "pattern": "WF"}}, "full"),
    (1, 2, 1, {"tie_embeddings": True}, "full"),
    (1, 1, 2, {"num_layers": 4}, "none"),
]
"""The tensor-parallel size, chunks of a stage, ZeRO stage, model and recomputation of pipelines of two stages."""


def collectives_of_pipelines() -> list[tuple[dict, dict]]:
    """Return the collectives of this rank's stage in a step of two micro-steps, without messages, as called and as
    predicted."""
    result = []
    groups_of = {tensor: tiny.join(tensor, 1, 2) for tensor in (1, 2)}
    for tensor, chunks, zero, model, again in PIPELINES:
        groups = groups_of[tensor]
        parallel = {"engine": "fsdp", "tensor_parallel_size": tensor, "sequence_parallel": tensor > 1}
        parallel |= {"pipeline_parallel_size": 2, "pipeline_chunks": chunks, "tensor_parallel_overlap": "on"}
        how = {"tokens_per_step": {"tokens": 2 * 16 * groups.dp_size}, "training": {"activation_checkpointing": again}}
        model = {"num_layers": 5, "hidden_size": 64, "value_embeddings": True, **model}
        cfg = tiny.config(zero, "bf16", parallel=parallel, model=model, **how)
        cfg = cfg.changed({"training": {"activation_checkpointing": again, "dtype": "bf16"}})
        engine = tiny.engine(cfg, groups)
        with Calls(64, (torch.bfloat16, torch.float32)) as calls:
            tiny.global_step(engine, 0, sequences=2 * groups.dp_size)
        step = _Step(cfg, Layout.of(cfg, 4), tiny.VOCAB, H200, None, groups.pp_rank)
        planned = [c for c in step.communication(0.0, 0.0, 0.0) if c.kind != "send"]
        result.append((calls.seen, counted(planned, least=128)))
    return result


def test_collectives_are_those_of_stages():
    """The last block of each of two chunks has no gain of a norm behind it in its sum, with both halves of two
    micro-batches: 64 numbers in bf16."""
    agree(PIPELINES, run_distributed(collectives_of_pipelines, 4), bytes_more=2 * 2 * 2 * 128)
